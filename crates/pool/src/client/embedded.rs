//! A memory node inside the process of its compute nodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::PeerAddress;
use fabric::soft::SoftNic;
use parking_lot::{Condvar, Mutex};

use super::control::ControlPlane;
use crate::node::{MemoryNode, Turner};
use crate::protocol::{Status, Welcome};
use crate::scheme::{Admission, Admitted, ClientId, GroupId, Lane};
use crate::{AnyNode, Error, Settings};

/// A memory node inside this process, on a NIC that its users run: no socket, no NIC thread.
pub struct Embedded {
    nic: SoftNic,
    node: MemoryNode<AnyNode<SoftNic>>,
    turner: Turner,
    /// Counts the turns that did something: wakes who waits for memory.
    turns: Arc<(Mutex<u64>, Condvar)>,
}

impl Embedded {
    /// Starts it.
    pub fn start(settings: &Settings) -> Result<Self, Error> {
        let nic = SoftNic::inline_with(settings.nic_limits());
        let node = MemoryNode::new(AnyNode::new(&nic, settings)?, settings.clone());
        let turns = Arc::new((Mutex::new(0), Condvar::new()));
        let turned = turns.clone();
        node.on_turn(move || {
            *turned.0.lock() += 1;
            turned.1.notify_all();
        });
        let turner = Turner::start(&node)?;
        Ok(Self { nic, node, turner, turns })
    }

    /// Its NIC.
    pub fn nic(&self) -> &SoftNic {
        &self.nic
    }

    /// The memory node.
    pub fn node(&self) -> &MemoryNode<AnyNode<SoftNic>> {
        &self.node
    }

    /// The thread that is its CPU.
    pub fn turner(&self) -> &Turner {
        &self.turner
    }
}

/// A compute node's control plane to an [`Embedded`] memory node.
pub struct LocalControl {
    embedded: Arc<Embedded>,
    welcome: Welcome,
    client: Mutex<Option<ClientId>>,
}

impl LocalControl {
    /// A compute node of `embedded` that is not admitted yet.
    pub fn new(embedded: Arc<Embedded>) -> Self {
        let welcome = embedded.node.welcome();
        Self { embedded, welcome, client: Mutex::new(None) }
    }

    fn client(&self, attempt: &str) -> Result<ClientId, Error> {
        self.client.lock().ok_or_else(|| Error::Refused {
            attempt: attempt.into(),
            why: "this compute node is not admitted".into(),
        })
    }
}

impl ControlPlane for LocalControl {
    fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    fn admit(&self, admission: &Admission) -> Result<Admitted, Error> {
        let admitted = self.embedded.node.admit(admission)?;
        *self.client.lock() = Some(ClientId(admitted.client));
        Ok(admitted)
    }

    fn await_memory(&self, timeout: Duration) -> Result<bool, Error> {
        let client = self.client("waiting for memory")?;
        let deadline = Instant::now() + timeout;
        let (turns, changed) = &*self.embedded.turns;
        loop {
            let seen = *turns.lock();
            if self.embedded.node.has_memory(client)? {
                return Ok(true);
            }
            let mut now = turns.lock();
            while *now == seen {
                if changed.wait_until(&mut now, deadline).timed_out() {
                    return Ok(false);
                }
            }
        }
    }

    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        let client = self.client("re-establishing the management QPs")?;
        let peers = self.embedded.node.reset_management_wholly(client)?;
        Ok(peers.into_iter().map(|qpn| self.peer(qpn)).collect())
    }

    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        let client = self.client("re-establishing an access QP")?;
        self.embedded.node.reset_access(client, group, lane).map(|qpn| self.peer(qpn))
    }

    fn status(&self) -> Result<Status, Error> {
        let (node, turner) = (&self.embedded.node, &self.embedded.turner);
        Ok(Status {
            uptime_ms: node.uptime().as_millis() as u64,
            control_cpu_ns: turner.cpu_time().as_nanos() as u64,
            control_wakeups: turner.wakeups(),
            nic: "inline".into(),
            ..Status::of(node.settings(), node.status()?)
        })
    }

    fn audit(&self) -> Result<(), Error> {
        self.embedded.node.audit()
    }

    fn goodbye(&self) -> Result<(), Error> {
        match self.client.lock().take() {
            Some(client) => self.embedded.node.retire_wholly(client),
            None => Ok(()),
        }
    }

    fn check_alive(&self) -> Result<(), Error> {
        match self.embedded.turner.failure() {
            None => Ok(()),
            Some(why) => Err(Error::Gone { attempt: "looking for the memory node".into(), why }),
        }
    }

    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
}
