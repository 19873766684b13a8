//! The software NIC as the memory node's CPU sees it in a world: each verb is a point where
//! everybody else may come first. What the verbs allocate is not the node's own: it lies apart.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::hooked::{Call, HookedCq, HookedNic, Hooks};
use fabric::soft::SoftNic;
use fabric::{Cqn, DmaMemory, Error, Qpn};

use crate::{arena, cpu};

/// A [`SoftNic`] whose verbs give way.
pub type ModelNic = HookedNic<Points>;
/// Its CQ.
pub type ModelCq = HookedCq<Points>;

/// What stands before each verb.
#[derive(Clone, Default)]
pub struct Points {
    /// Send rings of managed queues.
    rings: Arc<Mutex<Vec<(Qpn, DmaMemory)>>>,
}

impl Points {
    /// The verbs of `inner`, with a point before each where others may come first.
    pub fn before(inner: SoftNic) -> ModelNic {
        ModelNic::new(inner, Self::default())
    }

    /// The send rings of the managed queues that were made.
    pub fn rings(&self) -> Vec<(Qpn, DmaMemory)> {
        self.rings.lock().expect("one thread uses it").clone()
    }
}

impl Hooks for Points {
    const VIRTUAL: bool = true;

    fn name(&self) -> &'static str {
        "model"
    }

    /// Time stands still.
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn before(&self, call: Call) {
        match call {
            // Nobody sees these from elsewhere.
            Call::Create
            | Call::RegMr(_)
            | Call::DeregMr(_)
            | Call::AllocMws(_)
            | Call::Zero(_) => {}
            _ => cpu::give_way(),
        }
    }

    fn making<T>(&self, quiet: bool, make: impl FnOnce() -> T) -> T {
        match quiet {
            true => arena::quietly(|| arena::inside(make)),
            false => arena::inside(make),
        }
    }

    fn made_qp(&self, qpn: Qpn, _: Cqn, managed_ring: Option<DmaMemory>) {
        if let Some(ring) = managed_ring {
            arena::inside(|| self.rings.lock().expect("one thread uses it").push((qpn, ring)));
        }
    }

    fn wait(&self, cqn: Cqn, next: u32, _: Duration) -> Result<bool, Error> {
        cpu::wait(cqn, next);
        Ok(true)
    }
}
