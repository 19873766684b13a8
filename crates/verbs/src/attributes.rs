//! Attributes and states of queues and windows.

use serde::{Deserialize, Serialize};

use crate::{Access, PeerAddress, Qpn};

/// Attributes of a completion queue.
#[derive(Clone, Debug)]
pub struct CqAttr {
    /// Number of entries; rounded up to a power of two.
    pub entries: u32,
    /// Overwrite entries that were not polled, for queues that only chains wait on.
    pub ignore_overrun: bool,
}

/// Attributes of a receive queue.
#[derive(Clone, Debug)]
pub struct ReceiveAttr {
    /// Number of entries; rounded up to a power of two.
    pub entries: u32,
    /// Maximum scatter entries of a receive WQE.
    pub max_sges: u32,
}

/// Types of memory window (IBTA vol. 1, §10.6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MwKind {
    /// Accessible to every QP of its PD, so a QP that guesses the 8 bits of the tag gains access
    /// (OneSidedMW §2.3). Any QP of the PD binds, rebinds and unbinds the window; the window cannot
    /// be invalidated.
    Type1,
    /// Bound to one QP (2B).
    #[default]
    Type2,
}

/// States of a queue pair (IBTA vol. 1, §10.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum QpState {
    /// Created or reset: the NIC processes nothing.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive: the QP answers its peer.
    ReadyToReceive,
    /// Ready to send: the QP sends and receives.
    ReadyToSend,
    /// Error, met or requested: all work is flushed.
    Error,
}

/// A change of a queue pair's state (`ibv_modify_qp`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum QpChange {
    /// To Reset, from any state. The queues are emptied; the QP number stays.
    ///
    /// Posted work that has not completed completes as flushed, so that its waiters end.
    /// (`ibv_modify_qp` drops such work silently.)
    Reset,
    /// Reset to Init.
    Init,
    /// Init to RTR, connected to the QP `peer`.
    ReadyToReceive {
        /// The peer: a QP of this NIC or of another NIC.
        peer: PeerAddress,
    },
    /// RTR to RTS.
    ReadyToSend,
    /// To Error, from any state.
    Error,
    /// Sets the peer's access rights from now on (`IBV_QP_ACCESS_FLAGS`). Allowed in Init, RTR and
    /// RTS; the state stays. Needs [`Feature::ModifyAccess`].
    Access {
        /// The rights.
        access: Access,
    },
    /// Sets the tag that is compared with the words that guard windows ([`Guards`]).
    ///
    /// The tag is 0 until set. Allowed in any state, and the state stays; a reset keeps the tag.
    /// Needs [`Feature::GuardedWindows`].
    Tag {
        /// The tag.
        tag: u64,
    },
}

/// State of a queue pair in the NIC (`ibv_query_qp`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QpInfo {
    /// The state.
    pub state: QpState,
    /// The connected QP; [`Qpn::NONE`] before RTR.
    pub peer: Qpn,
    /// Access rights of the peer.
    pub access: Access,
    /// Building blocks of the send queue; 0 if the QP has none.
    pub send_blocks: u32,
    /// Entries of the QP's own receive queue; 0 if the QP has none.
    pub recv_entries: u32,
}

/// Description of a shared receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SrqInfo {
    /// Receive WQEs that its ring holds.
    pub entries: u32,
    /// Bytes of a receive WQE.
    pub stride: u32,
    /// Receive WQEs that are posted and unused.
    pub posted: u32,
    /// Its limit; 0 if no limit is armed.
    pub limit: u32,
}
