//! Read-only inspection for tools outside the engine: the target of the next WQE, and the QPs and
//! keys that give access to a memory range.
//!
//! These functions change nothing, and the data path does not use them.

use super::core::Core;
use crate::engine::qp::Peer;
use crate::engine::queue::Fetched;
use crate::key_namespaces::KeyNamespaces;
use crate::protection::KeyRange;
use verbs::wqe::{Sges, Wqe, decode};
use verbs::{Access, FunctionId, Key, QpState, Qpn};

/// The memory of the peer that the next WQE of a QP accesses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The required right: one of `REMOTE_READ`, `REMOTE_WRITE`, `REMOTE_ATOMIC`.
    pub need: Access,
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The key that the WQE presents.
    pub key: Key,
    /// The key namespace of the peer: 0 for the physical function and clients' functions; functions
    /// that the owner opened have 1, 2, ... in the order of opening.
    pub namespace: u32,
    /// First local address; 0 for inline data.
    pub local: u64,
}

/// One way to access a memory range: a QP that responds, and a key that it accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reachability {
    /// The QP that can send requests.
    pub requester: Qpn,
    /// The function of the requester.
    pub function: FunctionId,
    /// The QP that responds to the requests.
    pub responder: Qpn,
    /// The key, with its current tag.
    pub key: Key,
    /// Every QP of the key's PD that the guard (if any) admits may use the key: it is not a type-2
    /// window's.
    pub open: bool,
    /// First address that the key gives access to.
    pub start: u64,
    /// Number of bytes that the key gives access to.
    pub len: u64,
    /// Rights that both the QP and the key grant.
    pub access: Access,
}

impl Core {
    /// See [`super::Engine::next_target`].
    pub fn next_target(&self, wqe: &mut Fetched, qpn: Qpn) -> Option<Target> {
        let qp = self.queues.qps.get(qpn.raw())?;
        let executes = qp.state == QpState::ReadyToSend;
        let send = qp.send.as_ref().filter(|s| executes && s.pending() > 0)?;
        let ctrl = match &qp.partial {
            Some(partial) if partial.active => {
                wqe.clone_from(&partial.wqe);
                wqe.control()
            }
            _ => send.fetch(wqe),
        };
        let first = |sges: &Sges<'_>| match sges {
            Sges::List(_) => sges.iter().next().map_or(0, |sge| sge.addr),
            Sges::Inline(_) => 0,
        };
        let (need, at, len, local) = match decode(&ctrl, wqe.bytes()).ok()? {
            Wqe::Write { to, from, .. } => {
                (Access::REMOTE_WRITE, to, from.total_len(), first(&from))
            }
            Wqe::Read { from, to } => (Access::REMOTE_READ, from, to.total_len(), first(&to)),
            Wqe::CompareSwap { at, old, .. } | Wqe::FetchAdd { at, old, .. } => {
                (Access::REMOTE_ATOMIC, at, 8, old.addr)
            }
            _ => return None,
        };
        let peer = match qp.peer {
            Peer::Local(peer) => self.queues.qps.get(peer.raw()),
            Peer::None | Peer::Remote(_) => None,
        };
        let namespace = peer.map_or(KeyNamespaces::FIRST, |peer| peer.namespace);
        Some(Target { need, addr: at.addr, len, key: at.rkey, namespace, local })
    }

    /// See [`super::Engine::reachability`].
    pub fn reachability(&self, start: u64, len: u64, into: &mut Vec<Reachability>) {
        let keys = self.keys.keys_over(start, len);
        for (number, qp) in self.queues.qps.iter() {
            let Peer::Local(requester) = qp.peer else { continue };
            let Some(asks) = self.queues.qps.get(requester.raw()) else { continue };
            if !qp.responds() || asks.peer != Peer::Local(Qpn::new(number)) {
                continue;
            }
            let guard = |k: &KeyRange| self.keys[qp.namespace].guard_admits(k.key.index(), qp.tag);
            let fits =
                keys.iter().filter(|k| k.pd == qp.pd && (k.open && guard(k) || k.qpn == qp.qpn));
            into.extend(fits.filter_map(|k| {
                let access = Access(k.access.0 & qp.access.0 & Access::REMOTE_ALL.0);
                (access != Access::NONE).then_some(Reachability {
                    requester,
                    function: asks.function,
                    responder: qp.qpn,
                    key: k.key,
                    open: k.open,
                    start: k.start,
                    len: k.len,
                    access,
                })
            }));
        }
    }

    /// See [`super::Engine::function_of`].
    pub fn function_of(&self, qpn: Qpn) -> Option<FunctionId> {
        self.queues.qps.get(qpn.raw()).map(|qp| qp.function)
    }
}
