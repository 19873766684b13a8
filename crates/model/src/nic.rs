//! The software NIC as the memory node's CPU uses it in a world.
//!
//! Each verb is a point where other actors may run first. Allocations of the verbs are not made in
//! the memory node's zone of the arena.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rnic::nic::SoftNic;
use rnic::nic::interposed::{Call, Hooks, InterposedCq, InterposedNic};
use verbs::{Cqn, DmaMemory, Error, Qpn};

use crate::{arena, schedule};

/// A [`SoftNic`] whose verbs are interleaving points.
pub type ModelNic = InterposedNic<Points>;
/// CQ of a [`ModelNic`].
pub type ModelCq = InterposedCq<Points>;

/// Hooks that suspend the CPU before each verb.
#[derive(Clone, Default)]
pub struct Points {
    /// Send rings of managed queues.
    rings: Arc<Mutex<Vec<(Qpn, DmaMemory)>>>,
}

impl Points {
    /// Wraps the verbs of `inner` with an interleaving point before each.
    pub fn before(inner: SoftNic) -> ModelNic {
        ModelNic::new(inner, Self::default())
    }

    /// Returns the send rings of the managed queues created so far.
    pub fn rings(&self) -> Vec<(Qpn, DmaMemory)> {
        self.rings.lock().expect("one thread uses it").clone()
    }
}

impl Hooks for Points {
    const VIRTUAL: bool = true;

    fn name(&self) -> &'static str {
        "model"
    }

    /// Time does not pass.
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn before(&self, call: Call) {
        match call {
            // No other actor can observe these verbs.
            Call::Create
            | Call::RegMr(_)
            | Call::DeregMr(_)
            | Call::AllocMws(_)
            | Call::Zero(_)
            | Call::Copied(_) => {}
            _ => schedule::yield_to_explorer(),
        }
    }

    fn making<T>(&self, quiet: bool, make: impl FnOnce() -> T) -> T {
        match quiet {
            true => arena::outside_digest(|| arena::inside(make)),
            false => arena::inside(make),
        }
    }

    fn made_qp(&self, qpn: Qpn, _: Cqn, managed_ring: Option<DmaMemory>) {
        if let Some(ring) = managed_ring {
            arena::inside(|| self.rings.lock().expect("one thread uses it").push((qpn, ring)));
        }
    }

    fn wait(&self, cqn: Cqn, next: u32, _: Duration) -> Result<bool, Error> {
        schedule::wait(cqn, next);
        Ok(true)
    }
}
