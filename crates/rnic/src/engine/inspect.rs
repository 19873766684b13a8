//! For who watches the engine from outside: where a WQE aims, and who could reach a piece of memory.
//!
//! Nothing here changes anything, and nothing on the data path knows of it.

use super::Core;
use crate::ids::{Access, FunctionId, Key, Qpn};
use crate::protection::Opening;
use crate::qp::Peer;
use crate::queue::Fetched;
use crate::spaces::KeySpaces;
use crate::verbs::QpState;
use crate::wqe::{Sges, Wqe, decode};

/// What the WQE that a QP executes next would do to its peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aim {
    /// The right that it needs: one of `REMOTE_READ`, `REMOTE_WRITE`, `REMOTE_ATOMIC`.
    pub need: Access,
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The key that it presents.
    pub key: Key,
    /// Where its peer looks that up: 0 for the physical function and those of clients, then one after another for
    /// functions in the order in which their owner has opened them.
    pub space: u32,
    /// First address of its own side; 0 if the WQE holds the bytes.
    pub local: u64,
}

/// A way to a piece of memory that is open: a QP that answers, and a key that it takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reach {
    /// The QP that may send requests.
    pub requester: Qpn,
    /// Its function.
    pub function: FunctionId,
    /// The QP that answers.
    pub responder: Qpn,
    /// The key, with its current tag.
    pub key: Key,
    /// Every QP of the key's PD may use it, if its guard admits that: it is no type-2 window's.
    pub open: bool,
    /// What it opens: first address.
    pub start: u64,
    /// What it opens: bytes.
    pub len: u64,
    /// The rights that both the QP and the key give.
    pub access: Access,
}

impl Core {
    /// See [`super::Engine::aim`].
    pub fn aim(&self, wqe: &mut Fetched, qpn: Qpn) -> Option<Aim> {
        let qp = self.qps.get(qpn.raw())?;
        let executes = qp.state == QpState::ReadyToSend;
        let send = qp.send.as_ref().filter(|s| executes && s.pending() > 0)?;
        let ctrl = match &qp.long {
            Some(long) if long.active => {
                wqe.clone_from(&long.wqe);
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
            Peer::Local(peer) => self.qps.get(peer.raw()),
            Peer::None | Peer::Remote(_) => None,
        };
        let space = peer.map_or(KeySpaces::FIRST, |peer| peer.space);
        Some(Aim { need, addr: at.addr, len, key: at.rkey, space, local })
    }

    /// See [`super::Engine::reaches`].
    pub fn reaches(&self, start: u64, len: u64, into: &mut Vec<Reach>) {
        let keys = self.keys.over(start, len);
        for (number, qp) in self.qps.iter() {
            let Peer::Local(requester) = qp.peer else { continue };
            let Some(asks) = self.qps.get(requester.raw()) else { continue };
            if !qp.responds() || asks.peer != Peer::Local(Qpn::new(number)) {
                continue;
            }
            let guard = |k: &Opening| self.keys[qp.space].guard_admits(k.key.index(), qp.tag);
            let fits =
                keys.iter().filter(|k| k.pd == qp.pd && (k.open && guard(k) || k.qpn == qp.qpn));
            into.extend(fits.filter_map(|k| {
                let access = Access(k.access.0 & qp.access.0 & Access::REMOTE_ALL.0);
                (access != Access::NONE).then_some(Reach {
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
        self.qps.get(qpn.raw()).map(|qp| qp.function)
    }
}
