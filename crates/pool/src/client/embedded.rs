//! A memory node in the same process as its compute nodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use verbs::{Nic, PeerAddress};

use super::control::ControlPlane;
use crate::node::{MemoryNode, NodeThreads};
use crate::protocol::{NodeHello, Status};
use crate::{DefaultNic, Error, Settings};
use scheme::registry::{ClientRegistry, NodeRegistry};
use scheme::{ClientId, ConnectReply, ConnectRequest, GroupId, Lane};

/// A memory node in this process.
pub struct EmbeddedNode<N: Nic = DefaultNic> {
    nic: N,
    clients: ClientRegistry<N>,
    node: MemoryNode,
    node_threads: NodeThreads,
    /// Number of polls that did work; a change wakes threads that wait for memory.
    polls: Arc<(Mutex<u64>, Condvar)>,
}

impl<N: Nic> EmbeddedNode<N> {
    /// Starts the memory node on `nic`, which its compute nodes share, with one of the schemes in
    /// `nodes`. The compute nodes have the schemes in `clients`.
    pub fn start_on(
        nic: N,
        settings: &Settings,
        nodes: &NodeRegistry<N>,
        clients: ClientRegistry<N>,
    ) -> Result<Self, Error> {
        let node = MemoryNode::new(nodes.node(&nic, &settings.node()?)?, settings.clone());
        let polls = Arc::new((Mutex::new(0), Condvar::new()));
        let turned = polls.clone();
        node.on_poll(move || {
            *turned.0.lock() += 1;
            turned.1.notify_all();
        });
        let node_threads = NodeThreads::start(&node)?;
        Ok(Self { nic, clients, node, node_threads, polls })
    }

    /// The memory node's NIC.
    pub fn nic(&self) -> &N {
        &self.nic
    }

    /// The schemes of the compute nodes.
    pub(super) fn clients(&self) -> &ClientRegistry<N> {
        &self.clients
    }

    /// The memory node.
    pub fn node(&self) -> &MemoryNode {
        &self.node
    }

    /// The memory node's CPU threads.
    pub fn threads(&self) -> &NodeThreads {
        &self.node_threads
    }
}

/// Control plane of a compute node of an [`EmbeddedNode`] memory node.
pub struct LocalControl<N: Nic> {
    embedded: Arc<EmbeddedNode<N>>,
    welcome: NodeHello,
    client: Mutex<Option<ClientId>>,
}

impl<N: Nic> LocalControl<N> {
    /// A compute node of `embedded` that is not admitted yet.
    pub fn new(embedded: Arc<EmbeddedNode<N>>) -> Self {
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

impl<N: Nic> ControlPlane for LocalControl<N> {
    fn welcome(&self) -> &NodeHello {
        &self.welcome
    }

    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error> {
        let admitted = self.embedded.node.admit(admission)?;
        *self.client.lock() = Some(ClientId(admitted.client));
        Ok(admitted)
    }

    fn await_memory(&self, timeout: Duration) -> Result<bool, Error> {
        let client = self.client("waiting for memory")?;
        let deadline = Instant::now() + timeout;
        let (polls, changed) = &*self.embedded.polls;
        loop {
            let seen = *polls.lock();
            if self.embedded.node.has_memory(client)? {
                return Ok(true);
            }
            let mut now = polls.lock();
            while *now == seen {
                if changed.wait_until(&mut now, deadline).timed_out() {
                    return Ok(false);
                }
            }
        }
    }

    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        let client = self.client("re-establishing the management QPs")?;
        let peers = self.embedded.node.reset_management_blocking(client)?;
        Ok(peers.into_iter().map(|qpn| self.peer(qpn)).collect())
    }

    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        let client = self.client("re-establishing an access QP")?;
        self.embedded.node.reset_access(client, group, lane).map(|qpn| self.peer(qpn))
    }

    fn status(&self) -> Result<Status, Error> {
        let (node, node_threads) = (&self.embedded.node, &self.embedded.node_threads);
        Ok(Status {
            uptime_ms: node.uptime().as_millis() as u64,
            control_cpu_ns: node_threads.cpu_time().as_nanos() as u64,
            control_wakeups: node_threads.wakeups(),
            nic: self.embedded.nic.caps().name.into(),
            ..Status::of(node.settings(), node.status()?)
        })
    }

    fn audit(&self) -> Result<(), Error> {
        self.embedded.node.audit()
    }

    fn goodbye(&self) -> Result<(), Error> {
        match self.client.lock().take() {
            Some(client) => self.embedded.node.retire_blocking(client),
            None => Ok(()),
        }
    }

    fn check_alive(&self) -> Result<(), Error> {
        match self.embedded.node_threads.failure() {
            None => Ok(()),
            Some(why) => Err(Error::Gone { attempt: "checking the memory node".into(), why }),
        }
    }

    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
}
