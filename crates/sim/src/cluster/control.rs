//! The control connection of a compute node.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pool::client::control::ControlPlane;
use pool::protocol::{NodeHello, Status};
use scheme::{ClientId, ConnectReply, ConnectRequest, GroupId, Lane};
use verbs::PeerAddress;

use super::Link;
use super::cpu::{Core, NodeCpu};
use crate::fiber;
use crate::nic::{SimHooks, SimNic};
use crate::time::Time;

/// A compute node's control connection: it sends requests to the memory node's CPU, which answers
/// when it has time.
pub struct SimControl {
    node: Arc<NodeCpu>,
    welcome: NodeHello,
    link: Link,
    hooks: SimHooks,
}

impl SimControl {
    /// Creates the connection of a process that has this NIC.
    pub(super) fn new(node: &Arc<NodeCpu>, nic: &SimNic, link: Link) -> Self {
        Self { node: node.clone(), welcome: node.welcome(), link, hooks: nic.hooks().clone() }
    }

    /// Has the memory node's CPU do `job`, which is called after each quantum until it returns a
    /// result.
    fn call<T: Send + 'static>(
        &self,
        mut job: impl FnMut(&mut Core) -> Option<T> + Send + 'static,
    ) -> Result<T, pool::Error> {
        if fiber::is_ending() {
            return Err(gone());
        }
        if fiber::current().is_none() {
            let core = &mut *self.node.core.lock();
            loop {
                if let Some(result) = job(core) {
                    return Ok(result);
                }
                core.scheme.poll()?;
                self.hooks.pump();
            }
        }
        let latency = self.hooks.control_latency();
        fiber::sleep(latency);
        let answer = Arc::new(Mutex::new(None));
        let (reply, waker, link) = (answer.clone(), fiber::waker(), self.link.clone());
        self.node.give(Box::new(move |core| {
            if link.0.lock().dead {
                return true;
            }
            let Some(result) = job(core) else { return false };
            *reply.lock() = Some(result);
            waker.wake_by_ref();
            true
        }));
        loop {
            if fiber::is_ending() {
                return Err(gone());
            }
            if let Some(result) = answer.lock().take() {
                fiber::sleep(latency);
                return Ok(result);
            }
            fiber::wait();
        }
    }

    fn client(&self) -> Result<ClientId, pool::Error> {
        self.link.client().ok_or_else(gone)
    }
}

fn gone() -> pool::Error {
    pool::Error::Gone {
        attempt: "asking the memory node".into(),
        why: "this simulated process has ended".into(),
    }
}

impl ControlPlane for SimControl {
    fn welcome(&self) -> &NodeHello {
        &self.welcome
    }

    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, pool::Error> {
        let (admission, link) = (admission.clone(), self.link.clone());
        self.call(move |core| {
            if link.0.lock().ended {
                return Some(Err(gone()));
            }
            core.last += 1;
            let first_chunk = core.scheme.first_chunk();
            let admitted = core.scheme.admit(ClientId(core.last), &admission);
            let admitted = admitted.map(|reply| ConnectReply { first_chunk, ..reply });
            if let Ok(admitted) = &admitted {
                let client = ClientId(admitted.client);
                let mut link = link.0.lock();
                link.client = Some(client);
                // The process died while it was being admitted.
                if link.ended {
                    let _ = core.scheme.retire(client);
                }
            }
            Some(admitted)
        })?
    }

    fn await_memory(&self, timeout: Duration) -> Result<bool, pool::Error> {
        let client = self.client()?;
        let (hooks, deadline) = (self.hooks.clone(), self.hooks.now() + Time::from(timeout));
        self.call(move |core| match core.scheme.client_waits(client) {
            Ok(false) => Some(Ok(true)),
            Ok(true) if hooks.now() >= deadline => Some(Ok(false)),
            Ok(true) => None,
            Err(e) => Some(Err(e)),
        })?
    }

    fn reset_management(&self) -> Result<Vec<PeerAddress>, pool::Error> {
        let client = self.client()?;
        let peers = self.call(move |core| core.scheme.reset_management(client).transpose())??;
        Ok(peers.into_iter().map(|qpn| self.peer(qpn)).collect())
    }

    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, pool::Error> {
        let client = self.client()?;
        let peer = self.call(move |core| Some(core.scheme.reset_access(client, group, lane)))??;
        Ok(self.peer(peer))
    }

    fn status(&self) -> Result<Status, pool::Error> {
        let node = self.call(|core| Some(core.scheme.status()))??;
        let settings = &self.node.settings;
        let donated_bytes = settings.chunks() * settings.chunk_bytes;
        Ok(Status {
            node,
            donated_bytes,
            nic: "simulated".into(),
            control_cpu_ns: self.hooks.node_cpu().as_ns(),
            ..Status::default()
        })
    }

    fn audit(&self) -> Result<(), pool::Error> {
        self.call(|core| Some(core.scheme.audit()))?
    }

    fn goodbye(&self) -> Result<(), pool::Error> {
        let client = {
            let mut link = self.link.0.lock();
            if std::mem::replace(&mut link.ended, true) {
                return Ok(());
            }
            link.client
        };
        let Some(client) = client else { return Ok(()) };
        // At the end of the world, or after the process's death, there is no connection to close.
        if fiber::current().is_none() || fiber::is_ending() {
            return Ok(());
        }
        let mut begun = false;
        self.call(move |core| {
            if !begun {
                begun = true;
                if let Err(e) = core.scheme.retire(client) {
                    return Some(Err(e));
                }
            }
            core.scheme.is_retired(client).then_some(Ok(()))
        })?
    }

    fn check_alive(&self) -> Result<(), pool::Error> {
        match &*self.node.failure.lock() {
            None => Ok(()),
            Some(why) => Err(pool::Error::Gone {
                attempt: "looking for the memory node".into(),
                why: why.clone(),
            }),
        }
    }

    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
}
