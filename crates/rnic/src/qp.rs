//! A queue pair: attributes, state, and where it stands in its work.
//!
//! Transitions (IBTA vol. 1, §10.3.1; SQD and SQE are not there):
//!
//! ```text
//! from     Init   RTR    RTS    Error   Reset
//! Reset    yes                  yes     yes
//! Init            yes           yes     yes
//! RTR                    yes    yes     yes
//! RTS                           yes     yes
//! Error                         yes     yes
//! ```

use crate::engine::lists::{Links, Place};
use crate::engine::remote::Connection;
use crate::error::Error;
use crate::ids::{Access, Cqn, FunctionId, Pdn, Qpn};
use crate::queue::{Fetched, SendQueue};
use crate::spaces::Space;
use crate::verbs::{QpChange, QpState};

/// The other end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Peer {
    /// Not connected.
    None,
    /// A QP of this NIC.
    Local(Qpn),
    /// A QP of another NIC: the connection is in `Qp::remote`.
    Remote(Qpn),
}

pub(crate) struct Qp {
    pub qpn: Qpn,
    pub function: FunctionId,
    pub pd: Pdn,
    /// Where its keys, and those that its peer presents, are looked up.
    pub space: Space,
    pub privileged: bool,
    pub access: Access,
    /// What is compared with words that guard windows.
    pub tag: u64,
    pub state: QpState,
    pub peer: Peer,
    pub send: Option<SendQueue>,
    /// Number of the receive queue in the engine's table.
    pub recv: Option<u32>,
    pub recv_shared: bool,
    pub send_cq: Cqn,
    pub recv_cq: Cqn,
    pub executed: u64,
    /// Its function's share.
    pub share: u32,
    /// Work that it may still do in this turn; below 0, what it owes.
    pub left: i64,
    pub place: Place,
    pub links: Links,
    /// In the engine's list of QPs that flush what is posted to them.
    pub flushing: bool,
    /// An event was raised that nobody has taken.
    pub reported: bool,
    /// The event of its last WQE was raised and not taken.
    pub last_reported: bool,
    /// The WQE that is executed in slices. Made when first needed, then kept.
    pub long: Option<Box<Long>>,
    /// The index of the WQE that a message of another NIC has taken out of a shared receive queue, while it
    /// arrives.
    pub taken: Option<u16>,
    /// The connection to a QP of another NIC.
    pub remote: Option<Box<Connection>>,
}

/// A WQE under way.
pub(crate) struct Long {
    /// It is under way.
    pub active: bool,
    /// Bytes moved.
    pub done: u64,
    pub wqe: Fetched,
}

impl Qp {
    /// True if it answers its peer's requests.
    #[inline]
    pub fn responds(&self) -> bool {
        matches!(self.state, QpState::ReadyToReceive | QpState::ReadyToSend)
    }

    /// Building blocks that may be executed.
    #[inline]
    pub fn pending(&self) -> u32 {
        self.send.as_ref().map_or(0, SendQueue::pending)
    }

    /// The state after `change`, if the table above has it.
    pub fn after(&self, change: QpChange) -> Result<QpState, Error> {
        use QpState::*;
        let allowed = match (self.state, change) {
            (_, QpChange::Reset) => Some(Reset),
            (_, QpChange::Error) => Some(Error),
            (Reset, QpChange::Init) => Some(Init),
            (Init, QpChange::ReadyToReceive { .. }) => Some(ReadyToReceive),
            (ReadyToReceive, QpChange::ReadyToSend) => Some(ReadyToSend),
            (Init | ReadyToReceive | ReadyToSend, QpChange::Access { .. }) => Some(self.state),
            (_, QpChange::Tag { .. }) => Some(self.state),
            _ => None,
        };
        let refused =
            || crate::error::Error::Transition { qpn: self.qpn, from: self.state, change };
        allowed.ok_or_else(refused)
    }

    /// Keeps a WQE that has moved `done` bytes until its next turn.
    pub fn put_aside(&mut self, wqe: &Fetched, done: u64) {
        let fresh = || Box::new(Long { active: false, done: 0, wqe: Fetched::new() });
        let long = self.long.get_or_insert_with(fresh);
        if !long.active {
            long.wqe.clone_from(wqe);
            long.active = true;
        }
        long.done = done;
    }

    /// Forgets the WQE that is under way.
    pub fn abandon(&mut self) {
        if let Some(long) = &mut self.long {
            long.active = false;
        }
    }
}
