//! The state of the NIC, by its parts.
//!
//! A part has the methods that need nothing else. A method that needs several parts, for a WQE or a
//! packet, is a method of [`Core`], in the file of its subject.

use super::events::Events;
use super::owners::Owners;
use super::queues::Queues;
use super::record_poller::RecordPoller;
use super::remote::state::RemoteState;
use super::scratch::Scratch;
use crate::key_namespaces::KeyNamespaces;
use crate::limits::Limits;
use crate::spec::Stats;

/// Maximum length in bytes of a READ or WRITE (IBTA vol. 1, §9.7).
pub(super) const RDMA_BYTES_MAX: u64 = 1 << 31;

/// Scheduling cost of fetching and decoding a WQE, of each of its segments, and of a completion, in
/// bytes that the NIC could move in the same time.
pub(super) const WQE_WORK: u64 = 64;
/// Scheduling cost of a call of a region engine after a WRITE: the engine may copy a page.
pub(super) const ENGINE_WORK: u64 = units::PAGE_BYTES as u64;
/// Scheduling cost of a QP that has nothing to execute in its quantum: its cache lines were loaded
/// in vain.
pub(super) const EMPTY_QUANTUM_WORK: u64 = 256;

/// The whole state but the WQE in execution. Separate, so that a decoded WQE can borrow the buffer
/// while this state changes.
pub(super) struct Core {
    pub limits: Limits,
    pub now_ns: u64,
    pub owners: Owners,
    pub keys: KeyNamespaces,
    pub queues: Queues,
    /// Work since the NIC was created, in bytes moved.
    pub work: u64,
    pub record_poller: RecordPoller,
    pub wire: RemoteState,
    pub events: Events,
    pub stats: Stats,
    pub scratch: Box<Scratch>,
    /// Current slice length of READs and WRITEs, in bytes.
    pub slice: u64,
}

impl Core {
    pub fn new(limits: Limits) -> Self {
        Self {
            now_ns: 0,
            owners: Owners::new(limits.pds),
            keys: KeyNamespaces::new(limits.keys),
            queues: Queues::new(&limits),
            work: 0,
            record_poller: RecordPoller::default(),
            wire: RemoteState::new(limits.wire.as_ref()),
            events: Events::new(),
            stats: Stats::default(),
            scratch: Box::new(Scratch::new()),
            slice: limits.slice_bytes.max(1) as u64,
            limits,
        }
    }
}
