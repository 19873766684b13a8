//! A queue pair: attributes, state, and progress of its work.
//!
//! Transitions (IBTA vol. 1, §10.3.1; SQD and SQE are not implemented):
//!
//! ```text
//! from     Init   RTR    RTS    Error   Reset
//! Reset    yes                  yes     yes
//! Init            yes           yes     yes
//! RTR                    yes    yes     yes
//! RTS                           yes     yes
//! Error                         yes     yes
//! ```

use super::qp_list::{InList, Linked, Links};
use super::queue::{Fetched, SendQueue};
use super::remote::connection::Connection;
use crate::error::Error;
use crate::key_namespaces::Namespace;
use verbs::{Access, Cqn, FunctionId, Pdn, QpChange, QpState, Qpn};

/// The peer of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Peer {
    /// Not connected.
    None,
    /// A QP of this NIC.
    Local(Qpn),
    /// A QP of another NIC. `Qp::remote` holds the connection.
    Remote(Qpn),
}

pub(crate) struct Qp {
    pub qpn: Qpn,
    pub function: FunctionId,
    pub pd: Pdn,
    /// The namespace in which its own keys, and the keys that its peer presents, are looked up.
    pub namespace: Namespace,
    pub privileged: bool,
    pub access: Access,
    /// The tag that guard words are compared with.
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
    /// Index of its function's entry in the scheduler.
    pub sched_index: u32,
    /// Deficit counter in bytes: the rest of its scheduling quantum; negative: its debt.
    pub deficit: i64,
    pub in_list: InList,
    pub links: Links,
    /// The record poller's list of flushing QPs contains this QP.
    pub flushing: bool,
    /// A `QpError` event was raised and not yet taken by the port.
    pub reported: bool,
    /// A `LastWqeReached` event was raised and not yet taken by the port.
    pub last_wqe_reported: bool,
    /// The WQE that is executed in slices. Allocated at first use, then kept.
    pub partial: Option<Box<PartialWqe>>,
    /// Index of the receive WQE that a partly received message of another NIC has taken out of a
    /// shared receive queue.
    pub taken_wqe: Option<u16>,
    /// The connection to a QP of another NIC.
    pub remote: Option<Box<Connection>>,
}

/// A partly executed WQE.
pub(crate) struct PartialWqe {
    /// The WQE is in progress. False: the allocation is unused.
    pub active: bool,
    /// Bytes moved so far.
    pub done: u64,
    pub wqe: Fetched,
}

impl Qp {
    /// True if the QP responds to its peer's requests.
    #[inline]
    pub fn responds(&self) -> bool {
        matches!(self.state, QpState::ReadyToReceive | QpState::ReadyToSend)
    }

    /// Building blocks that may be executed.
    #[inline]
    pub fn pending(&self) -> u32 {
        self.send.as_ref().map_or(0, SendQueue::pending)
    }

    /// Returns the state after `change`, or an error if the table above has no such transition.
    pub fn next_state(&self, change: QpChange) -> Result<QpState, Error> {
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

    /// Saves a WQE that has moved `done` bytes, to continue it in a later quantum.
    pub fn suspend_wqe(&mut self, wqe: &Fetched, done: u64) {
        let fresh = || Box::new(PartialWqe { active: false, done: 0, wqe: Fetched::new() });
        let partial = self.partial.get_or_insert_with(fresh);
        if !partial.active {
            partial.wqe.clone_from(wqe);
            partial.active = true;
        }
        partial.done = done;
    }

    /// Drops the WQE in progress.
    pub fn drop_partial(&mut self) {
        if let Some(partial) = &mut self.partial {
            partial.active = false;
        }
    }
}

impl Linked for Qp {
    #[inline]
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}
