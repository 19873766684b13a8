//! Direct verbs: queues whose rings the owner can see and program, as in `mlx5dv`.
//!
//! Chains are built from such queues (OneSidedMW §4.3). A managed queue executes its WQEs only up
//! to a limit that a SEND_EN or RECV_EN of another WQE moves. Its ring is memory that can be
//! registered, so that one WQE can patch another.

pub mod cqe;
pub mod wqe;

use serde::{Deserialize, Serialize};

use crate::{Access, DmaMemory, Error, Key, KeyIndex, MwKind, Nic, Pdn, QpAttr, Qpn, QueuePair};

/// A NIC that executes chains.
pub trait DirectNic: Nic<Qp: DirectQp, Srq: DirectReceive> {
    /// Creates a QP whose queues are managed as `managed` says.
    fn create_managed_qp(
        &self,
        pd: &Self::Pd,
        attr: QpAttr<'_, Self>,
        managed: Managed,
    ) -> Result<Self::Qp, Error>;

    /// Returns the NIC's table entry for a key of this function, for set-up, tests and recovery.
    fn query_key(&self, key: Key) -> Result<KeyInfo, Error>;

    /// Returns the number of completions that the CQ has counted, modulo 2^24. WAIT compares with
    /// this number.
    fn cq_count(&self, cq: &Self::Cq) -> Result<u32, Error>;
}

/// Kind of object that a key names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum KeyKind {
    /// Memory region.
    Mr,
    /// Memory window.
    Mw(MwKind),
}

/// The NIC's table entry for a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyInfo {
    /// Kind of the key.
    pub kind: KeyKind,
    /// The current tag.
    pub tag: u8,
    /// Its protection domain.
    pub pd: Pdn,
    /// Regions: always true. Windows: whether the window is bound.
    pub bound: bool,
    /// The QP that a type-2 window is bound to; otherwise [`Qpn::NONE`].
    pub qpn: Qpn,
    /// Its rights.
    pub access: Access,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Regions: number of windows bound to the region plus number of guard words in it. Windows: 0.
    pub windows: u32,
}

impl KeyInfo {
    /// Returns the key with its current tag. `index` is the index of this entry.
    pub fn key(&self, index: KeyIndex) -> Key {
        Key::new(index, self.tag)
    }

    /// Returns the QP that a bound type-2 window names.
    ///
    /// `None` for a free window, a type-1 window, a region, and a window bound to QP 0xffffff,
    /// which is no QP.
    pub fn bound_to(&self) -> Option<Qpn> {
        (self.qpn != Qpn::NONE).then_some(self.qpn)
    }
}

/// Managed queues of a QP, and privileges of its WQEs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Managed {
    /// The send queue executes up to the limit set by SEND_EN.
    pub send: bool,
    /// The receive queue's WQEs are usable up to the limit set by RECV_EN.
    pub recv: bool,
    /// UMRs of this QP may bind windows to other QPs, and unbind windows without the QP check. Only
    /// the owner of the NIC can create such a QP.
    pub privileged: bool,
}

/// A ring of WQEs in memory that can be registered like any other memory.
#[derive(Clone, Debug)]
pub struct Ring {
    /// The memory of the ring.
    pub memory: DmaMemory,
    /// Number of entries, a power of two: building blocks of a send queue, WQEs of a receive queue.
    pub entries: u32,
    /// Bytes per entry.
    pub stride: u32,
}

/// The rings of a queue pair.
pub trait DirectQp: QueuePair {
    /// Returns the send queue's ring.
    fn send_ring(&self) -> Ring;

    /// Returns the receive queue's ring if the QP has its own.
    fn recv_ring(&self) -> Option<Ring>;

    /// Sets a managed send queue's limit, a building-block index modulo 2^16, from the CPU.
    fn enable_send(&self, limit: u16) -> Result<(), Error>;

    /// Sets a managed receive queue's limit (modulo 2^16 for up to 2^15 entries) from the CPU.
    fn enable_recv(&self, limit: u32) -> Result<(), Error>;

    /// Returns the progress of the queues.
    fn progress(&self) -> Result<Progress, Error>;
}

/// Progress of a QP's queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// Index, in building blocks modulo 2^16, of the WQE that is executed next, or flushed next in
    /// the error state.
    pub send_consumer: u16,
    /// Index up to which the send queue may execute.
    pub send_limit: u16,
    /// Receive WQEs consumed, modulo 2^32; 0 with a shared receive queue.
    pub recv_consumer: u32,
    /// Index up to which receive WQEs may be used.
    pub recv_limit: u32,
    /// WQEs of the send queue executed without error since the QP was created. A reset does not
    /// clear this counter.
    pub executed: u64,
}

/// The ring of a shared receive queue, for chains that refill it themselves.
pub trait DirectReceive {
    /// Returns the ring.
    fn ring(&self) -> Ring;

    /// Returns the doorbell record: 8 bytes, of which the first 4 hold the producer index,
    /// big-endian.
    fn record(&self) -> DmaMemory;
}
