//! Direct verbs: queues whose rings their owner can see and program, as `mlx5dv` has them.
//!
//! This is what chains are built with (OneSidedMW §4.3): a managed queue executes its WQEs only up
//! to a limit that a SEND_EN or RECV_EN of another WQE moves; its ring is memory that can be
//! registered, so that one WQE can patch another.

use crate::{DmaMemory, Error, Key, Nic, QpAttr, Qpn, QueuePair};

/// A NIC that executes chains.
pub trait DirectNic: Nic<Qp: DirectQp, Srq: DirectReceive> {
    /// Creates a QP, with the queues of `managed` managed.
    fn create_managed_qp(
        &self,
        pd: &Self::Pd,
        attr: QpAttr<'_, Self>,
        managed: Managed,
    ) -> Result<Self::Qp, Error>;

    /// What the NIC's tables have for a key of this function: for set-up, tests and recovery.
    fn query_key(&self, key: Key) -> Result<KeyInfo, Error>;

    /// How many completions the CQ has counted, modulo 2^24: what WAIT compares with.
    fn cq_count(&self, cq: &Self::Cq) -> Result<u32, Error>;
}

/// What the NIC's tables have for a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyInfo {
    /// The key with its current tag.
    pub key: Key,
    /// The QP that a bound type-2 window names; `None` for a free window, a type-1 window or an MR, and for a window
    /// that was bound to QP 0xffffff, which is none.
    pub bound_to: Option<Qpn>,
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

impl KeyInfo {
    /// Whether a window is bound; to whom does not matter.
    pub fn is_bound(&self) -> bool {
        self.len > 0
    }
}

/// Which queues of a QP are managed, and what its WQEs may do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Managed {
    /// The send queue executes up to what SEND_EN allows.
    pub send: bool,
    /// The receive queue's WQEs are usable up to what RECV_EN allows.
    pub recv: bool,
    /// Its UMRs may bind windows to other QPs and unbind them without the QP check. Only the
    /// NIC's owner gets such a QP.
    pub privileged: bool,
}

/// A ring of WQEs in memory. Its memory can be registered like any other.
#[derive(Clone, Debug)]
pub struct Ring {
    /// The ring.
    pub memory: DmaMemory,
    /// Entries: building blocks of a send queue, receive WQEs of a receive queue; a power of two.
    pub entries: u32,
    /// Bytes of an entry.
    pub stride: u32,
}

/// The rings of a queue pair.
pub trait DirectQp: QueuePair {
    /// The send queue's ring.
    fn send_ring(&self) -> Ring;

    /// The receive queue's ring, if it has its own.
    fn recv_ring(&self) -> Option<Ring>;

    /// Sets a managed send queue's limit, a building-block index modulo 2^16, from the CPU.
    fn enable_send(&self, limit: u16) -> Result<(), Error>;

    /// Sets a managed receive queue's limit (modulo 2^16 for up to 2^15 entries) from the CPU.
    fn enable_recv(&self, limit: u32) -> Result<(), Error>;

    /// How far the queues have come.
    fn progress(&self) -> Result<Progress, Error>;
}

/// How far a QP's queues have come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Index, in building blocks modulo 2^16, of the WQE that is executed next, or
    /// flushed next in the error state.
    pub send_consumer: u16,
    /// Index up to which the send queue may execute.
    pub send_limit: u16,
    /// Receive WQEs used so far, modulo 2^32; 0 with a shared receive queue.
    pub recv_consumer: u32,
    /// WQEs of the send queue that were executed without error since the QP was made. A reset does not
    /// set it back.
    pub executed: u64,
}

/// The ring of a shared receive queue, for chains that refill it themselves.
pub trait DirectReceive {
    /// The ring.
    fn ring(&self) -> Ring;

    /// The doorbell record: the producer index, big-endian, 4 bytes at offset 0 of 8.
    fn record(&self) -> DmaMemory;
}
