//! What the control verbs take and give: limits, attributes, descriptions, events.

use crate::ids::{Access, Cqn, FunctionId, Key, Pdn, Qpn, Srqn};
use crate::memory::DmaMemory;
use crate::wire::PeerAddress;

/// What the NIC holds at most, and how it runs. Fixed when it is made.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Virtual functions.
    pub functions: u32,
    /// Protection domains of all functions.
    pub pds: u32,
    /// Queue pairs of all functions.
    pub qps: u32,
    /// Completion queues of all functions.
    pub cqs: u32,
    /// Receive queues of all functions: shared ones and QPs' own.
    pub recvs: u32,
    /// Memory regions and windows of a key table, at most 2^24 - 1: of the physical function and those of clients
    /// together, and as many again of each function that the owner opens.
    pub keys: u32,
    /// Memory windows of each function.
    pub windows: u32,
    /// Functions that the NIC's owner may use, the physical one among them (FineMem §4.3: 128 of a ConnectX-6).
    pub owner_functions: u32,
    /// The longest SEND to a QP of this NIC, in bytes. It is one indivisible step, so that this bounds how long
    /// one client can keep the NIC from the others. One to another NIC is a step for each packet, and may be as
    /// long as a WRITE.
    pub send_bytes_max: u32,
    /// READs and WRITEs longer than this many bytes are executed in slices of it.
    pub slice_bytes: u32,
    /// The same while several functions have turns: somebody waits for the end of each.
    pub shared_slice_bytes: u32,
    /// Work of one QP in a turn while others of its function are ready, in bytes moved. A WQE counts
    /// as 64 bytes and 64 more for each of its segments, a completion as 64.
    pub qp_turn: u32,
    /// Work of one function in a turn while others are ready; counted likewise. A `poll` is as long, and eight times as
    /// long where one function has had all turns for a while.
    pub function_turn: u32,
    /// While it has work, every so-many-th turn is the physical function's, however many others there
    /// are: it answers for all of them. At least 1.
    pub physical_every: u32,
    /// Work of the physical function in a turn. Longer than the others', as a chain that clears a chunk
    /// is work for one client, and must not wait for a turn of a flood with each few KiB.
    pub physical_turn: u32,
    /// Check the index and QPN in the control segment of managed rings' WQEs too. Recycled rings
    /// cannot run then; it is there to show what depends on it.
    pub strict: bool,
    /// What connections to other NICs may take. Without it there are none.
    pub wire: Option<WireLimits>,
    /// Where random numbers come from: then those of QPs cannot be guessed. Without it they are
    /// given out in order, as it suits a simulation.
    pub random: Option<fn() -> u32>,
}

/// What connections to other NICs may take.
#[derive(Clone, Debug)]
pub struct WireLimits {
    /// Bytes of packets that wait to be sent.
    pub outbox_bytes: usize,
    /// Bytes in flight of one connection at most, in either direction. What the other host's sockets
    /// cannot hold is lost and sent again.
    pub window_bytes: u32,
    /// WQEs of a QP that were fetched and are not acknowledged at most.
    pub requests: u32,
    /// Building blocks of these WQEs together; 16 at least, the longest WQE.
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

/// What one function may have.
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
    /// Functions that it may open besides itself ([`crate::Engine::open_function`]).
    pub functions: u32,
    /// Bytes in its memory regions; a byte in two regions counts twice.
    pub registered_bytes: u64,
    /// Bytes of its rings for sends, receives and completions: all work that can be outstanding.
    pub ring_bytes: u64,
    /// QPs that are connected to QPs of other NICs. What such a connection keeps of WQEs counts among
    /// `ring_bytes`.
    pub remote_peers: u32,
}

impl Default for FunctionLimits {
    fn default() -> Self {
        Self {
            pds: 64,
            qps: 1024,
            cqs: 1024,
            srqs: 64,
            // What a function has ends in one go when it ends.
            keys: 8 << 10,
            windows: 8 << 10,
            // Further functions are the owner's.
            functions: 0,
            registered_bytes: 1 << 46,
            ring_bytes: 1 << 30,
            // Whom a client may send packets to is the owner's to say.
            remote_peers: 0,
        }
    }
}

impl FunctionLimits {
    /// No limit but the NIC's own.
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
    /// Words are big-endian in memory, as WQE fields are: chains need it.
    BigEndian,
    /// Words are in the host's order.
    Host,
}

/// Against whom atomics are atomic (IBTA vol. 1, §11.2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicScope {
    /// Against other operations of this NIC only (`IBV_ATOMIC_HCA`).
    Nic,
    /// Against the host's CPUs as well (`IBV_ATOMIC_GLOB`).
    Global,
}

/// What the NIC can do: to be checked at set-up by whoever depends on it.
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
    /// Type-1 windows that a word guards.
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
    /// Open to every QP of its PD: whoever guesses the 8 bits of its tag may use it (OneSidedMW
    /// §2.3). Any QP of the PD binds, rebinds and unbinds it; it cannot be invalidated.
    Type1,
    /// Bound to one QP (2B).
    #[default]
    Type2,
}

/// What guards a type-1 window: a word of memory, which the NIC reads each time that the window is used. Through a QP
/// it is used only while `(word ^ (value | the QP's tag)) & mask == 0`. Who is refused hears what he would hear of
/// a key that does not exist.
///
/// It closes windows against keys that are guessed, without being bound to a QP. An extension of this NIC; no
/// hardware has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct GuardSpec {
    /// The region that the word lies in, of any PD of the window's function.
    pub region: Key,
    /// The word's address in it, a multiple of 8. The word is big-endian.
    pub addr: u64,
    /// What the word is compared with, together with the QP's tag.
    pub value: u64,
    /// The bits that are compared.
    pub mask: u64,
}

/// What a key is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum KeyKind {
    /// Memory region.
    Mr,
    /// Memory window.
    Mw(MwKind),
}

/// One key, described.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct KeyInfo {
    /// What it is.
    pub kind: KeyKind,
    /// The tag that is valid now.
    pub tag: u8,
    /// Its protection domain.
    pub pd: Pdn,
    /// A region: always true. A window: bound, that is, not free.
    pub bound: bool,
    /// The QP that a type-2 window is bound to, else [`Qpn::NONE`].
    pub qpn: Qpn,
    /// Its rights.
    pub access: Access,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// A region: windows that are bound to it, and windows whose guards lie in it.
    pub windows: u32,
}

/// A completion queue to be made.
#[derive(Clone, Debug)]
pub struct CqSpec {
    /// The ring: `entries` times 64 bytes, aligned to 64, filled by [`crate::cqe::clear`].
    pub ring: DmaMemory,
    /// Entries: a power of two.
    pub entries: u32,
    /// The record, 8 bytes, aligned to 8: at 0 the consumer's running index (big-endian, 24 bits of
    /// 32), at 4 the word `armed` (host-endian): the consumer sets it to 1 to be told of the next
    /// completion, the NIC swaps it to 0 when it raises [`Event::Completion`].
    pub record: DmaMemory,
    /// Completions overwrite older ones that were not consumed. For queues that are only counted
    /// (by WAIT), never read.
    pub ignore_overrun: bool,
    /// Running number of the first completion (24 bits); the record's index starts there too. 0
    /// but in tests of the wrap.
    pub initial_count: u32,
}

/// A receive queue to be made, a QP's own or shared.
///
/// The NIC uses WQEs from its consumer index up to a limit, both running: modulo 2^16 when the queue
/// has up to 32768 entries, else modulo 2^32 (which only record-driven queues may have; hardware has no
/// such queues).
#[derive(Clone, Debug)]
pub struct RecvSpec {
    /// The ring: `entries` times `stride` bytes, aligned to 16.
    pub ring: DmaMemory,
    /// Receive WQEs: a power of two.
    pub entries: u32,
    /// Bytes of a receive WQE: a row of SGEs, so a multiple of 16. An SGE of length 0 is skipped; one
    /// that also has lkey 0x100 ends the list.
    pub stride: u32,
    /// The record, 8 bytes, aligned to 8: at 0 the producer's running index (big-endian). Not read
    /// when the queue is managed.
    pub record: DmaMemory,
    /// The index of the first receive WQE to be used, also after a reset.
    pub initial_consumer: u32,
}

/// A send queue to be made.
#[derive(Clone, Debug)]
pub struct SendSpec {
    /// The ring: `blocks` times 64 bytes, aligned to 64.
    pub ring: DmaMemory,
    /// Building blocks: a power of two, at most 32768.
    pub blocks: u32,
    /// WQEs are executed up to where SEND_EN allows, not up to a doorbell.
    pub managed: bool,
}

/// The receive side of a QP.
#[derive(Clone, Debug)]
pub enum Recv {
    /// None: a SEND to this QP is an invalid request.
    None,
    /// A queue of its own.
    Own {
        /// The queue.
        spec: RecvSpec,
        /// Its WQEs may be used up to where RECV_EN allows, not up to the record.
        managed: bool,
    },
    /// A shared queue of the same function. Its own PD guards what its WQEs name.
    Shared(Srqn),
}

/// A queue pair to be made (RC).
#[derive(Clone, Debug)]
pub struct QpSpec {
    /// Its protection domain.
    pub pd: Pdn,
    /// Its send queue. Without one it only responds.
    pub send: Option<SendSpec>,
    /// Its receive queue.
    pub recv: Recv,
    /// Where its send queue's completions go.
    pub send_cq: Cqn,
    /// Where its receive queue's completions go.
    pub recv_cq: Cqn,
    /// Rights that its peer has at most, whatever the key says.
    pub access: Access,
    /// Its WQEs may bind windows to other QPs and unbind those of others (within its PD). For the
    /// physical function only.
    pub privileged: bool,
}

/// States of an RC QP (IBTA vol. 1, §10.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum QpState {
    /// Made, or reset.
    Reset,
    /// Receives may be posted.
    Init,
    /// RTR: it responds.
    ReadyToReceive,
    /// RTS: it responds and sends.
    ReadyToSend,
    /// Work is flushed.
    Error,
}

/// A transition of a QP.
///
/// ```text
/// Reset --Init--> Init --RTR(peer)--> RTR --RTS--> RTS      any --Error--> Error     any --Reset--> Reset
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum QpChange {
    /// To Reset: indices start again, work is forgotten, the number stays.
    Reset,
    /// To Init.
    Init,
    /// To RTR, with the QP that it talks to.
    ReadyToReceive {
        /// The other end. It need not exist yet.
        peer: PeerAddress,
    },
    /// To RTS.
    ReadyToSend,
    /// To Error: work is flushed.
    Error,
    /// What its peer may do at most, from now on (`IBV_QP_ACCESS_FLAGS`). Not in Reset or Error; the
    /// state stays.
    Access {
        /// The rights.
        access: Access,
    },
    /// What is compared with words that guard windows, from now on ([`GuardSpec`]); 0 until then. In any state, which
    /// stays; it outlives a reset, as the number does.
    Tag {
        /// The tag.
        tag: u64,
    },
}

/// A queue pair, described.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct QpInfo {
    /// Its state.
    pub state: QpState,
    /// The other end, [`Qpn::NONE`] before RTR.
    pub peer: Qpn,
    /// Index of the next building block to be executed.
    pub send_consumer: u16,
    /// Index up to which building blocks may be executed.
    pub send_limit: u16,
    /// Index of the next receive WQE.
    pub recv_consumer: u32,
    /// Index up to which receive WQEs may be used.
    pub recv_limit: u32,
    /// WQEs executed since it was made.
    pub executed: u64,
    /// Rights that its peer has at most.
    pub access: Access,
    /// Building blocks of its send ring; 0 without one.
    pub send_blocks: u32,
    /// Receive WQEs of its own receive ring; 0 without one.
    pub recv_entries: u32,
}

/// A shared receive queue, described.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct SrqInfo {
    /// Receive WQEs that its ring holds.
    pub entries: u32,
    /// Bytes of a receive WQE.
    pub stride: u32,
    /// Receive WQEs that are posted and not used yet.
    pub posted: u32,
    /// Its limit; 0: none is armed.
    pub limit: u32,
}

/// What a function may have at most (`ibv_device_attr`): its own limits, or the NIC's where they are lower.
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
    /// Functions of the NIC that who has this one may use, this one among them. Each has keys of its own, and
    /// limits like these.
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

/// What changes of a memory region ([`crate::Engine::rereg_mr`]).
#[derive(Clone, Debug, Default)]
pub struct RegionChange {
    /// Another protection domain.
    pub pd: Option<Pdn>,
    /// Other memory, and the address of its first byte.
    pub memory: Option<(DmaMemory, u64)>,
    /// Other rights.
    pub access: Option<Access>,
}

/// What the NIC tells its port beside completions in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An armed CQ got a completion.
    Completion(Cqn),
    /// An asynchronous event (IBTA vol. 1, §11.6.3).
    Async {
        /// The function that it is for.
        function: FunctionId,
        /// What happened.
        event: AsyncEvent,
    },
}

/// Affiliated asynchronous events (IBTA vol. 1, chapter 11, "asynchronous events").
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AsyncEvent {
    /// The QP went to Error because one of its WQEs failed or because it refused its peer's request.
    QpError {
        /// The QP.
        qpn: Qpn,
        /// Why.
        syndrome: crate::cqe::Syndrome,
        /// It refused a request of its peer; no completion of its own says so. Else one of its own WQEs
        /// failed.
        by_peer: bool,
    },
    /// A completion found no room. The CQ takes no more completions; QPs that complete to it go to
    /// Error when they try.
    CqOverrun {
        /// The CQ.
        cqn: Cqn,
    },
    /// Fewer receive WQEs are left in the SRQ than its limit, which is no longer armed.
    SrqLimit {
        /// The SRQ.
        srqn: Srqn,
    },
    /// The QP is in Error, and uses no receive WQE of its SRQ any more.
    LastWqeReached {
        /// The QP.
        qpn: Qpn,
    },
}

/// Counters of the NIC since it was made.
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
    /// WQEs that failed.
    pub errors: u64,
    /// WQEs, send and receive, flushed.
    pub flushed: u64,
    /// Windows bound.
    pub binds: u64,
    /// Windows unbound.
    pub unbinds: u64,
    /// Times that a WQE found no receive WQE at the peer.
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
