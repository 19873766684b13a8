//! Types of the control verbs: limits, attributes, descriptions, events.

use crate::ids::{Access, Cqn, FunctionId, Key, Pdn, Qpn, Srqn};
use crate::memory::DmaMemory;
use crate::wire::PeerAddress;

/// Capacity and scheduling parameters of the NIC. Fixed when the NIC is created.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of virtual functions.
    pub functions: u32,
    /// Maximum number of protection domains, over all functions.
    pub pds: u32,
    /// Maximum number of queue pairs, over all functions.
    pub qps: u32,
    /// Maximum number of completion queues, over all functions.
    pub cqs: u32,
    /// Maximum number of receive queues, over all functions: shared ones and the QPs' own.
    pub recvs: u32,
    /// Maximum number of memory regions and windows in one key table, at most 2^24 - 1. The
    /// physical function and the clients' functions share one table; each function that the owner
    /// opens has a table of its own with the same limit.
    pub keys: u32,
    /// Maximum number of memory windows of each function.
    pub windows: u32,
    /// Maximum number of functions that the NIC's owner may use, including the physical function
    /// (FineMem §4.3: 128 on a ConnectX-6).
    pub owner_functions: u32,
    /// Maximum length in bytes of a SEND to a QP of this NIC. Such a SEND is one indivisible step,
    /// so this limit bounds the time for which one client can block the others. A SEND to another
    /// NIC is one step per packet and may be as long as a WRITE.
    pub send_bytes_max: u32,
    /// Slice length in bytes: a longer READ or WRITE is executed in several slices.
    pub slice_bytes: u32,
    /// Slice length while several functions are active. Shorter than `slice_bytes`, because every
    /// function waits for the end of the slice in progress.
    pub shared_slice_bytes: u32,
    /// Scheduling quantum of a QP while other QPs of its function are ready, in bytes moved.
    /// Fetching a WQE counts as 64 bytes plus 64 bytes per segment; a completion counts as 64
    /// bytes.
    pub qp_turn: u32,
    /// Scheduling quantum of a function while other functions are ready, in the same unit. One
    /// `poll` lasts one such quantum, or eight if one function alone has been active for a while.
    pub function_turn: u32,
    /// While the physical function has work, one in this many quanta is the physical function's,
    /// regardless of the number of other functions: the physical function serves all of them. At
    /// least 1.
    pub physical_every: u32,
    /// Scheduling quantum of the physical function. Longer than the quantum of the other functions,
    /// because a chain that clears a chunk serves one client and must not wait for a quantum of a
    /// flooding function after every few KiB.
    pub physical_turn: u32,
    /// Also check the index and QPN in the control segments of managed rings' WQEs. Recycled rings
    /// do not work with this check; the option exists to show the dependence.
    pub strict: bool,
    /// Limits of connections to other NICs. `None`: the NIC accepts no such connection.
    pub wire: Option<WireLimits>,
    /// Source of random numbers, which makes QP numbers unpredictable. `None`: QP numbers are
    /// assigned in order, for reproducible simulations.
    pub random: Option<fn() -> u32>,
}

/// Limits of connections to other NICs.
#[derive(Clone, Debug)]
pub struct WireLimits {
    /// Capacity in bytes of the outbox, which holds packets until the port sends them.
    pub outbox_bytes: usize,
    /// Maximum number of bytes in flight per connection and direction. Packets that overflow the
    /// receiving host's socket buffers are lost and retransmitted.
    pub window_bytes: u32,
    /// Maximum number of WQEs of a QP that are fetched and not yet acknowledged.
    pub requests: u32,
    /// Maximum number of building blocks of these WQEs together; at least 16, the longest WQE.
    pub blocks: u32,
}

impl Default for WireLimits {
    fn default() -> Self {
        Self { outbox_bytes: 1 << 20, window_bytes: 256 << 10, requests: 128, blocks: 256 }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            functions: 4096,
            pds: 16 << 10,
            qps: 64 << 10,
            cqs: 64 << 10,
            recvs: 64 << 10,
            keys: (1 << 24) - 1,
            windows: (1 << 24) - 1,
            owner_functions: 128,
            send_bytes_max: 64 << 10,
            slice_bytes: 32 << 10,
            shared_slice_bytes: 8 << 10,
            qp_turn: 1 << 10,
            function_turn: 2 << 10,
            physical_every: 2,
            physical_turn: 16 << 10,
            strict: false,
            wire: None,
            random: None,
        }
    }
}

/// Limits of one function.
#[derive(Clone, Debug)]
pub struct FunctionLimits {
    /// Protection domains.
    pub pds: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Memory regions and windows.
    pub keys: u32,
    /// Memory windows.
    pub windows: u32,
    /// Functions that this function may open besides itself ([`crate::Engine::open_function`]).
    pub functions: u32,
    /// Bytes of its memory regions; a byte that lies in two regions counts twice.
    pub registered_bytes: u64,
    /// Bytes of its send, receive and completion rings, which bound the work that can be
    /// outstanding.
    pub ring_bytes: u64,
    /// QPs that are connected to QPs of other NICs. The WQE copies that such a connection keeps
    /// count as `ring_bytes`.
    pub remote_peers: u32,
}

impl Default for FunctionLimits {
    fn default() -> Self {
        Self {
            pds: 64,
            qps: 1024,
            cqs: 1024,
            srqs: 64,
            // Keys are limited, because all keys of a function are destroyed in one step when the
            // function is removed.
            keys: 8 << 10,
            windows: 8 << 10,
            // Only the NIC's owner opens further functions.
            functions: 0,
            registered_bytes: 1 << 46,
            ring_bytes: 1 << 30,
            // The owner decides which clients may send packets to other hosts.
            remote_peers: 0,
        }
    }
}

impl FunctionLimits {
    /// Only the NIC's own limits apply.
    pub const NONE: FunctionLimits = FunctionLimits {
        pds: u32::MAX,
        qps: u32::MAX,
        cqs: u32::MAX,
        srqs: u32::MAX,
        keys: u32::MAX,
        windows: u32::MAX,
        functions: u32::MAX,
        registered_bytes: u64::MAX,
        ring_bytes: u64::MAX,
        remote_peers: u32::MAX,
    };
}

/// Byte order in which the NIC reads the 8-byte words that atomics work on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOrder {
    /// Words are big-endian in memory, like WQE fields. Chains require this order.
    BigEndian,
    /// Words are in the host's byte order.
    Host,
}

/// The accesses with respect to which atomics are atomic (IBTA vol. 1, §11.2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicScope {
    /// Against other operations of this NIC only (`IBV_ATOMIC_HCA`).
    Nic,
    /// Against the host's CPUs as well (`IBV_ATOMIC_GLOB`).
    Global,
}

/// Capabilities of the NIC. Users check the ones that they depend on at set-up.
#[derive(Clone, Debug)]
pub struct Caps {
    /// Byte order of atomics.
    pub atomic_order: AtomicOrder,
    /// Scope of atomics.
    pub atomic_scope: AtomicScope,
    /// Managed queues with WAIT, SEND_EN and RECV_EN.
    pub managed_queues: bool,
    /// Type-2 windows (2B: bound to one QP).
    pub mw_type2: bool,
    /// Type-1 windows.
    pub mw_type1: bool,
    /// Type-1 windows with a guard word.
    pub mw_guarded: bool,
    /// Building blocks of a send ring.
    pub send_blocks_max: u32,
    /// Receive WQEs of a queue whose indices have 16 bits.
    pub recv_entries_max: u32,
    /// Receive WQEs of a record-driven queue whose indices have 32 bits.
    pub recv_entries_wide_max: u32,
    /// Bytes of one receive WQE.
    pub recv_stride_max: u32,
    /// Entries of a CQ.
    pub cq_entries_max: u32,
    /// SGEs of a READ or WRITE.
    pub rdma_sges_max: u32,
    /// Bytes of a READ or WRITE.
    pub rdma_bytes_max: u64,
    /// Bytes of a SEND.
    pub send_bytes_max: u32,
    /// Memory regions and windows.
    pub keys_max: u32,
}

/// Types of memory window (IBTA vol. 1, §10.6).
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Default, Debug, serde::Serialize, serde::Deserialize,
)]
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

/// Kind of object that a key names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum KeyKind {
    /// Memory region.
    Mr,
    /// Memory window.
    Mw(MwKind),
}

/// Description of one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
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

/// Parameters of a new completion queue.
#[derive(Clone, Debug)]
pub struct CqSpec {
    /// The ring: `entries` times 64 bytes, aligned to 64, filled by [`crate::cqe::clear`].
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

/// States of an RC QP (IBTA vol. 1, §10.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum QpState {
    /// Created, or reset.
    Reset,
    /// Receives may be posted.
    Init,
    /// RTR: responds to requests.
    ReadyToReceive,
    /// RTS: responds to requests and sends.
    ReadyToSend,
    /// All work is flushed.
    Error,
}

/// A transition of a QP.
///
/// ```text
/// Reset --Init--> Init --RTR(peer)--> RTR --RTS--> RTS
/// any state --Error--> Error      any state --Reset--> Reset
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum QpChange {
    /// To Reset: indices start again, outstanding work is dropped, the QP number stays.
    Reset,
    /// To Init.
    Init,
    /// To RTR, connected to a peer QP.
    ReadyToReceive {
        /// The peer QP. It need not exist yet.
        peer: PeerAddress,
    },
    /// To RTS.
    ReadyToSend,
    /// To Error: work is flushed.
    Error,
    /// Sets the rights of the peer (`IBV_QP_ACCESS_FLAGS`). Not allowed in Reset or Error; the
    /// state does not change.
    Access {
        /// The rights.
        access: Access,
    },
    /// Sets the tag that guard words are compared with ([`GuardSpec`]); initially 0. Allowed in
    /// every state; the state does not change. The tag, like the QP number, survives a reset.
    Tag {
        /// The tag.
        tag: u64,
    },
}

/// Description of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct QpInfo {
    /// Its state.
    pub state: QpState,
    /// The peer QP; [`Qpn::NONE`] before RTR.
    pub peer: Qpn,
    /// Index of the next building block to be executed.
    pub send_consumer: u16,
    /// Index up to which building blocks may be executed.
    pub send_limit: u16,
    /// Index of the next receive WQE.
    pub recv_consumer: u32,
    /// Index up to which receive WQEs may be used.
    pub recv_limit: u32,
    /// Number of WQEs executed since the QP was created.
    pub executed: u64,
    /// Upper bound of the peer's rights.
    pub access: Access,
    /// Building blocks of its send ring; 0 without one.
    pub send_blocks: u32,
    /// Receive WQEs of its own receive ring; 0 without one.
    pub recv_entries: u32,
}

/// Description of a shared receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
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

/// Capacity of a function (`ibv_device_attr`): the lower of the function's own limits and the
/// NIC's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct DeviceInfo {
    /// Protection domains.
    pub pds: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Memory regions and windows together.
    pub keys: u32,
    /// Memory windows.
    #[serde(default)]
    pub windows: u32,
    /// Number of functions that the owner of this function may use, including this one. Each
    /// function has its own keys and limits like these.
    #[serde(default)]
    pub functions: u32,
    /// Bytes in memory regions.
    pub registered_bytes: u64,
    /// Bytes of rings.
    pub ring_bytes: u64,
    /// Building blocks of a send ring.
    pub send_blocks: u32,
    /// Receive WQEs of a queue that is not managed.
    pub recv_entries: u32,
    /// Entries of a CQ.
    pub cq_entries: u32,
    /// SGEs of a READ or WRITE.
    pub sges: u32,
    /// Bytes of a READ or WRITE.
    pub rdma_bytes: u64,
    /// Bytes of a SEND.
    pub send_bytes: u32,
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

/// Affiliated asynchronous events (IBTA vol. 1, chapter 11, "asynchronous events").
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AsyncEvent {
    /// The QP went to Error because one of its WQEs failed or because it refused its peer's
    /// request.
    QpError {
        /// The QP.
        qpn: Qpn,
        /// Cause of the error.
        syndrome: crate::cqe::Syndrome,
        /// True: the QP rejected a request of its peer, which produces no completion at this QP.
        /// False: one of the QP's own WQEs failed.
        by_peer: bool,
    },
    /// A completion found the CQ full. The CQ accepts no more completions; a QP that completes to
    /// this CQ goes to Error at its next completion.
    CqOverrun {
        /// The CQ.
        cqn: Cqn,
    },
    /// Fewer receive WQEs are left in the SRQ than its limit. The event disarms the limit.
    SrqLimit {
        /// The SRQ.
        srqn: Srqn,
    },
    /// The QP is in Error and uses no more receive WQEs of its SRQ.
    LastWqeReached {
        /// The QP.
        qpn: Qpn,
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
