//! Arguments and results of the engine's control verbs.

use verbs::direct::Progress;
use verbs::{Access, AsyncEvent, Cqn, DmaMemory, FunctionId, Key, Pdn, QpInfo, RegionEngine, Srqn};

/// The guard of a type-1 window: a word of memory that the NIC reads at every access through the
/// window. The access is allowed only while `(word ^ (value | the QP's tag)) & mask == 0`. A
/// rejected access completes with the same error as an unknown rkey.
///
/// A guard protects a window against guessed keys without binding the window to a QP. Guards are an
/// extension of this NIC; no hardware has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct GuardSpec {
    /// The region that contains the word. The region may be in any PD of the window's function.
    pub region: Key,
    /// The word's address in the region, a multiple of 8. The word is big-endian.
    pub addr: u64,
    /// The value that, combined with the QP's tag, is compared with the word.
    pub value: u64,
    /// The bits that are compared.
    pub mask: u64,
}

/// Parameters of a new completion queue.
#[derive(Clone, Debug)]
pub struct CqSpec {
    /// The ring: `entries` times 64 bytes, aligned to 64, filled by [`verbs::cqe::clear`].
    pub ring: DmaMemory,
    /// Entries: a power of two.
    pub entries: u32,
    /// The doorbell record, 8 bytes, aligned to 8. Offset 0: the consumer's running index
    /// (big-endian, 24 bits of 32). Offset 4: the word `armed` (host-endian), which the consumer
    /// sets to 1 to request an event for the next completion, and which the NIC clears when it
    /// raises [`Event::Completion`].
    pub record: DmaMemory,
    /// Completions overwrite older, unconsumed ones. For CQs that are only counted (by WAIT) and
    /// never read.
    pub ignore_overrun: bool,
    /// Running number of the first completion (24 bits); the record's index starts there too.
    /// Nonzero only in tests of the wrap-around.
    pub initial_count: u32,
}

/// Parameters of a new receive queue, a QP's own or shared.
///
/// The NIC uses WQEs from its consumer index up to a limit. Both are running indices: modulo 2^16
/// if the queue has up to 32768 entries, otherwise modulo 2^32. Only queues that are driven by a
/// doorbell record may be larger than 32768 entries; hardware has no such queues.
#[derive(Clone, Debug)]
pub struct RecvSpec {
    /// The ring: `entries` times `stride` bytes, aligned to 16.
    pub ring: DmaMemory,
    /// Receive WQEs: a power of two.
    pub entries: u32,
    /// Bytes of a receive WQE, which is a list of SGEs: a multiple of 16. An SGE of length 0 is
    /// skipped; an SGE of length 0 with lkey 0x100 ends the list.
    pub stride: u32,
    /// The doorbell record, 8 bytes, aligned to 8. Offset 0: the producer's running index
    /// (big-endian). Unused if the queue is managed.
    pub record: DmaMemory,
    /// Index of the first receive WQE to use, also after a reset.
    pub initial_consumer: u32,
}

/// Parameters of a new send queue.
#[derive(Clone, Debug)]
pub struct SendSpec {
    /// The ring: `blocks` times 64 bytes, aligned to 64.
    pub ring: DmaMemory,
    /// Building blocks: a power of two, at most 32768.
    pub blocks: u32,
    /// SEND_EN, not a doorbell, sets the limit up to which WQEs are executed.
    pub managed: bool,
}

/// The receive side of a QP.
#[derive(Clone, Debug)]
pub enum Recv {
    /// No receive side: a SEND to this QP is an invalid request.
    None,
    /// A queue of its own.
    Own {
        /// The queue.
        spec: RecvSpec,
        /// RECV_EN, not the doorbell record, sets the limit up to which WQEs may be used.
        managed: bool,
    },
    /// A shared queue of the same function. The SRQ's own PD, not the QP's, applies to the keys in
    /// its WQEs.
    Shared(Srqn),
}

/// Parameters of a new queue pair (RC).
#[derive(Clone, Debug)]
pub struct QpSpec {
    /// Its protection domain.
    pub pd: Pdn,
    /// Its send queue. A QP without one only responds.
    pub send: Option<SendSpec>,
    /// Its receive queue.
    pub recv: Recv,
    /// The CQ for completions of the send queue.
    pub send_cq: Cqn,
    /// The CQ for completions of the receive queue.
    pub recv_cq: Cqn,
    /// Upper bound of the peer's rights, in addition to the key's own rights.
    pub access: Access,
    /// WQEs of this QP may bind windows to other QPs and unbind other QPs' windows (within its PD).
    /// Reserved for the physical function.
    pub privileged: bool,
}

/// Description of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct QpDescription {
    /// State and attributes.
    #[serde(flatten)]
    pub info: QpInfo,
    /// Progress of its queues. `recv_consumer` and `recv_limit` are those of the SRQ if the QP has
    /// one.
    #[serde(flatten)]
    pub progress: Progress,
}

/// Parameters of a memory region with an engine ([`crate::Engine::reg_engine_mr`]).
pub struct EngineRegion {
    /// Its protection domain.
    pub pd: Pdn,
    /// Its memory.
    pub memory: DmaMemory,
    /// The operations that the key allows, besides the engine's own checks.
    pub access: Access,
    /// The engine.
    pub engine: Box<dyn RegionEngine>,
}

/// Changes to a memory region ([`crate::Engine::rereg_mr`]).
#[derive(Clone, Debug, Default)]
pub struct RegionChange {
    /// New protection domain.
    pub pd: Option<Pdn>,
    /// New memory, and the address of its first byte.
    pub memory: Option<(DmaMemory, u64)>,
    /// New rights.
    pub access: Option<Access>,
}

/// Event that the NIC reports to its port, besides the completions in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An armed CQ got a completion.
    Completion(Cqn),
    /// An asynchronous event (IBTA vol. 1, §11.6.3).
    Async {
        /// The function that receives the event.
        function: FunctionId,
        /// The event.
        event: AsyncEvent,
    },
}

/// Counters of the NIC since its creation.
#[derive(Clone, Debug)]
pub struct Stats {
    /// WQEs executed without error, by opcode.
    pub wqes: [u64; 64],
    /// Receive WQEs consumed.
    pub receives: u64,
    /// Completions written.
    pub completions: u64,
    /// Bytes moved by READ, WRITE and SEND.
    pub bytes: u64,
    /// WQEs that completed with an error.
    pub errors: u64,
    /// WQEs, send and receive, that were flushed.
    pub flushed: u64,
    /// Windows bound.
    pub binds: u64,
    /// Windows unbound.
    pub unbinds: u64,
    /// WQEs that found no receive WQE at the peer (RNR).
    pub rnr: u64,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            wqes: [0; 64],
            receives: 0,
            completions: 0,
            bytes: 0,
            errors: 0,
            flushed: 0,
            binds: 0,
            unbinds: 0,
            rnr: 0,
        }
    }
}

impl Stats {
    /// WQEs executed without error, of all opcodes.
    pub fn wqes_total(&self) -> u64 {
        self.wqes.iter().sum()
    }
}
