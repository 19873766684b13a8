//! The verbs: what a NIC's user calls (IBTA vol. 1, chapter 11, "software transport verbs").
//!
//! Objects are handles; the last clone that is dropped destroys the object. A memory region or
//! a queue keeps its protection domain and memory alive.
//!
//! Addresses in work requests are those that the memory's owner sees: the I/O virtual address of
//! a registered byte is its address in the process that registered it.

use std::task::Waker;
use std::time::{Duration, Instant};

use crate::{Access, Cqn, DmaMemory, Error, Key, Qpn, Remote, Sge};

/// A function of a NIC: what a process opens to use it.
pub trait Nic: Clone + Send + Sync + 'static {
    /// Protection domain.
    type Pd: Clone + Send + Sync + 'static;
    /// Memory region.
    type Mr: MemoryRegion;
    /// Memory window.
    type Mw: MemoryWindow;
    /// Completion queue.
    type Cq: CompletionQueue;
    /// Shared receive queue.
    type Srq: ReceiveQueue;
    /// Queue pair.
    type Qp: QueuePair;

    /// What the NIC can do.
    fn caps(&self) -> Caps;

    /// Zeroed memory that this NIC can register: `bytes`, rounded up to pages. On a NIC that runs
    /// in another process it is shared with that process.
    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error>;

    /// The time, from some moment in the past on; it never goes back. Who uses a NIC takes the time from it,
    /// so that it can be virtual.
    fn now(&self) -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }

    /// Has the calling CPU write zeros over `len` bytes at `offset` of `memory`. Panics if they lie outside.
    /// Not the NIC's work; a NIC whose time is virtual learns of the CPU's that way.
    fn zero(&self, memory: &DmaMemory, offset: usize, len: usize) {
        memory.zero(offset, len);
    }

    /// Allocates a protection domain.
    fn alloc_pd(&self) -> Result<Self::Pd, Error>;

    /// Registers `memory`, all or a slice of what [`Nic::alloc_dma`] gave.
    fn reg_mr(&self, pd: &Self::Pd, memory: &DmaMemory, access: Access) -> Result<Self::Mr, Error>;

    /// Allocates a type-2 memory window, unbound.
    fn alloc_mw(&self, pd: &Self::Pd) -> Result<Self::Mw, Error>;

    /// Allocates `count` type-2 windows, at once where the NIC can.
    fn alloc_mws(&self, pd: &Self::Pd, count: usize) -> Result<Vec<Self::Mw>, Error> {
        (0..count).map(|_| self.alloc_mw(pd)).collect()
    }

    /// Allocates `count` type-1 windows, unbound. Any QP of the PD may use, rebind and unbind them: who
    /// guesses a tag of 8 bits is in (OneSidedMW §2.3). For baselines, not for what others must not
    /// reach. Needs [`Caps::type1_windows`].
    fn alloc_type1_mws(&self, pd: &Self::Pd, count: usize) -> Result<Vec<Self::Mw>, Error>;

    /// Creates a completion queue.
    fn create_cq(&self, attr: CqAttr) -> Result<Self::Cq, Error>;

    /// Creates a shared receive queue whose completions go to the CQ of the QP that received.
    fn create_srq(&self, pd: &Self::Pd, attr: ReceiveAttr) -> Result<Self::Srq, Error>;

    /// Creates an RC queue pair in state Reset.
    fn create_qp(&self, pd: &Self::Pd, attr: QpAttr<'_, Self>) -> Result<Self::Qp, Error>;
}

/// What a NIC can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Name for reports: `inline`, `shm`, ...
    pub name: &'static str,
    /// It executes WAIT, SEND_EN and RECV_EN: chains work.
    pub chains: bool,
    /// It has type-2B windows that a UMR binds to another QP.
    pub windows: bool,
    /// It has type-1 windows.
    pub type1_windows: bool,
    /// Words that atomics work on are big-endian in memory.
    pub big_endian_atomics: bool,
    /// The most scatter-gather entries of a work request.
    pub max_sges: u32,
    /// The most bytes of inline data.
    pub max_inline: u32,
    /// The most entries of a send or receive queue.
    pub max_queue: u32,
}

/// Attributes of a completion queue.
#[derive(Clone, Debug)]
pub struct CqAttr {
    /// Entries; rounded up to a power of two.
    pub entries: u32,
    /// Overwrite entries that were not polled: for queues that only chains wait on.
    pub ignore_overrun: bool,
}

/// Attributes of a receive queue.
#[derive(Clone, Debug)]
pub struct ReceiveAttr {
    /// Entries; rounded up to a power of two.
    pub entries: u32,
    /// Scatter entries of each receive WQE.
    pub max_sges: u32,
}

/// Attributes of a queue pair.
#[derive(Clone)]
pub struct QpAttr<'a, N: Nic> {
    /// CQ of the send queue.
    pub send_cq: &'a N::Cq,
    /// CQ of the receive queue.
    pub recv_cq: &'a N::Cq,
    /// Send queue size in building blocks of 64 bytes; rounded up to a power of two; 0: none.
    pub send_blocks: u32,
    /// The receive queue.
    pub receive: Receive<'a, N>,
    /// What peers may do through this QP, with keys that allow it.
    pub access: Access,
}

/// The receive side of a queue pair.
#[derive(Clone)]
pub enum Receive<'a, N: Nic> {
    /// None: SENDs to it are refused.
    None,
    /// Its own queue.
    Own(ReceiveAttr),
    /// A shared one.
    Shared(&'a N::Srq),
}

/// A registered memory region.
pub trait MemoryRegion: Clone + Send + Sync + 'static {
    /// The key, local and remote alike.
    fn key(&self) -> Key;
    /// The memory.
    fn memory(&self) -> &DmaMemory;

    /// The SGE of `len` bytes at `offset`. Panics if they lie outside the region.
    fn sge(&self, offset: usize, len: u32) -> Sge {
        assert!(self.memory().at(offset, len as usize).is_some(), "SGE outside its region");
        Sge { addr: self.memory().addr() + offset as u64, len, lkey: self.key() }
    }

    /// The remote address of the byte at `offset`, for whoever holds the key.
    fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.memory().addr() + offset as u64, rkey: self.key() }
    }
}

/// A memory window.
pub trait MemoryWindow: Clone + Send + Sync + 'static {
    /// The window's key as it was when it was allocated; each bind changes the tag.
    fn key(&self) -> Key;
}

/// A receive queue that work can be posted to.
pub trait ReceiveQueue: Clone + Send + Sync + 'static {
    /// Posts a receive. Entries are given out in the order of the ring: the queue is full as long as
    /// the completion of the oldest has not been polled, also if younger ones have been.
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error>;
}

/// States of a queue pair (IBTA vol. 1, §10.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpState {
    /// Made or reset: nothing is processed.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive: answers the peer.
    ReadyToReceive,
    /// Ready to send: does everything.
    ReadyToSend,
    /// An error happened or was asked for: everything is flushed.
    Error,
}

/// A change of a queue pair's state (`ibv_modify_qp`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpChange {
    /// To Reset, from any state: the queues are emptied, the number stays. What was posted and has
    /// not completed completes as flushed, so that whoever waits for it learns it (`ibv_modify_qp`
    /// drops it in silence).
    Reset,
    /// Reset to Init.
    Init,
    /// Init to RTR, connected to the QP `peer`.
    ReadyToReceive {
        /// The peer's number.
        peer: Qpn,
    },
    /// RTR to RTS.
    ReadyToSend,
    /// To Error, from any state.
    Error,
}

/// An RC queue pair.
///
/// Posting and polling may be done by several threads; they take turns.
pub trait QueuePair: Clone + Send + Sync + 'static {
    /// Its number.
    fn qpn(&self) -> Qpn;

    /// Changes its state.
    fn modify(&self, change: QpChange) -> Result<(), Error>;

    /// Its state as the NIC has it.
    fn state(&self) -> Result<QpState, Error>;

    /// Reset, Init, RTR and RTS in one go.
    fn connect(&self, peer: Qpn) -> Result<(), Error> {
        self.modify(QpChange::Reset)?;
        self.modify(QpChange::Init)?;
        self.modify(QpChange::ReadyToReceive { peer })?;
        self.modify(QpChange::ReadyToSend)
    }

    /// Posts `list` to the send queue and rings the doorbell once. All of it is posted, or none.
    fn post_send(&self, list: &[WorkRequest<'_>]) -> Result<(), Error>;

    /// Posts a receive to the QP's own receive queue.
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error>;
}

/// Work for a send queue.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest<'a> {
    /// Comes back with the completion.
    pub id: u64,
    /// What to do.
    pub op: Op<'a>,
    /// Ask for a completion. One that fails completes in any case.
    pub signaled: bool,
}

/// What a work request does.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Op<'a> {
    /// Nothing.
    Nop,
    /// SEND of what the list gathers.
    Send {
        /// Local memory.
        from: &'a [Sge],
    },
    /// SEND of the bytes themselves.
    SendInline {
        /// At most [`Caps::max_inline`] bytes.
        data: &'a [u8],
    },
    /// RDMA READ.
    Read {
        /// Remote memory.
        from: Remote,
        /// Local memory.
        to: &'a [Sge],
    },
    /// RDMA WRITE.
    Write {
        /// Remote memory.
        to: Remote,
        /// Local memory.
        from: &'a [Sge],
    },
    /// RDMA WRITE of the bytes themselves.
    WriteInline {
        /// Remote memory.
        to: Remote,
        /// At most [`Caps::max_inline`] bytes.
        data: &'a [u8],
    },
    /// CAS of 8 bytes.
    CompareSwap {
        /// The word.
        at: Remote,
        /// Compared with the word.
        compare: u64,
        /// Replaces it if equal.
        swap: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// FAA of 8 bytes.
    FetchAdd {
        /// The word.
        at: Remote,
        /// The addend.
        add: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// FAA on a word that is a row of fields, each ending at a set bit of `boundary`: they are added
    /// without carry between them.
    MaskedFetchAdd {
        /// The word.
        at: Remote,
        /// The addends.
        add: u64,
        /// The last bit of each field.
        boundary: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// CAS under masks.
    MaskedCompareSwap {
        /// The word.
        at: Remote,
        /// Compared with the word.
        compare: u64,
        /// The bits that are compared.
        compare_mask: u64,
        /// Put into the bits of `swap_mask`.
        swap: u64,
        /// The bits that are replaced.
        swap_mask: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// Binds or unbinds a memory window.
    Window(&'a rnic::wqe::Umr),
    /// Invalidates a window of this QP.
    LocalInvalidate {
        /// The window's key.
        key: Key,
    },
}

/// Work for a receive queue.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// Comes back with the completion.
    pub id: u64,
    /// Where the message goes.
    pub to: &'a [Sge],
}

/// How a piece of work ended (`ibv_wc_status`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Status {
    /// It was done.
    #[error("success")]
    Success,
    /// A message did not fit where it should go.
    #[error("local length error")]
    LocalLength,
    /// The work request is malformed or not allowed on this QP.
    #[error("local QP operation error")]
    LocalOperation,
    /// A local key does not allow it.
    #[error("local protection error")]
    LocalProtection,
    /// The QP went into the error state before this was done.
    #[error("flushed: the QP is in the error state")]
    Flushed,
    /// A window could not be bound, unbound or invalidated.
    #[error("memory window bind error")]
    Bind,
    /// The peer does not understand the request.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The remote key does not allow it: dead, another QP's, or out of its range.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer failed while it executed the request.
    #[error("remote operational error")]
    RemoteOperation,
    /// The peer does not answer.
    #[error("the peer does not answer (retry limit exceeded)")]
    RetryExceeded,
    /// The peer posted no receive in time.
    #[error("the peer has no receive posted (RNR retry limit exceeded)")]
    RnrRetryExceeded,
    /// A syndrome that has no name here.
    #[error("completion error with syndrome {0:#x}")]
    Other(u8),
}

impl Status {
    /// The status that a CQE's syndrome stands for (the values are those of `mlx5_err_cqe`; 0 is
    /// success).
    pub fn from_syndrome(syndrome: u8) -> Self {
        match syndrome {
            0x00 => Status::Success,
            0x01 => Status::LocalLength,
            0x02 => Status::LocalOperation,
            0x04 => Status::LocalProtection,
            0x05 => Status::Flushed,
            0x06 => Status::Bind,
            0x12 => Status::RemoteInvalidRequest,
            0x13 => Status::RemoteAccess,
            0x14 => Status::RemoteOperation,
            0x15 => Status::RetryExceeded,
            0x16 => Status::RnrRetryExceeded,
            other => Status::Other(other),
        }
    }

    /// The syndrome that stands for this status.
    pub fn syndrome(self) -> u8 {
        match self {
            Status::Success => 0x00,
            Status::LocalLength => 0x01,
            Status::LocalOperation => 0x02,
            Status::LocalProtection => 0x04,
            Status::Flushed => 0x05,
            Status::Bind => 0x06,
            Status::RemoteInvalidRequest => 0x12,
            Status::RemoteAccess => 0x13,
            Status::RemoteOperation => 0x14,
            Status::RetryExceeded => 0x15,
            Status::RnrRetryExceeded => 0x16,
            Status::Other(syndrome) => syndrome,
        }
    }
}

/// What kind of work a completion is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionKind {
    /// Work of a send queue.
    Send,
    /// A received message.
    Receive,
}

/// A completion (`ibv_wc`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The work request's id.
    pub id: u64,
    /// The QP it was posted to.
    pub qpn: Qpn,
    /// How it ended.
    pub status: Status,
    /// Of which queue.
    pub kind: CompletionKind,
    /// Bytes received.
    pub bytes: u32,
    /// Immediate data received.
    pub imm: Option<u32>,
}

impl Completion {
    /// The completion of work that was done; otherwise how it ended.
    pub fn ok(self) -> Result<Completion, Status> {
        match self.status {
            Status::Success => Ok(self),
            status => Err(status),
        }
    }

    /// What an array for [`CompletionQueue::poll`] starts with.
    pub const EMPTY: Completion = Completion {
        id: 0,
        qpn: Qpn::NONE,
        status: Status::Success,
        kind: CompletionKind::Send,
        bytes: 0,
        imm: None,
    };
}

/// A completion queue.
pub trait CompletionQueue: Clone + Send + Sync + 'static {
    /// Time is virtual: it passes only while somebody waits. Then nobody spins, who waits calls
    /// [`CompletionQueue::wait_unless`] at once, and a future leaves its waker with
    /// [`CompletionQueue::leave_waker`].
    const VIRTUAL: bool = false;

    /// Its number.
    fn cqn(&self) -> Cqn;

    /// Yields the calling thread's CPU to the NIC if polling on would keep that from running; false
    /// if it does not. For who polls in a loop.
    fn offer_cpu(&self) -> bool {
        false
    }

    /// Takes up to `out.len()` completions; how many. Several threads may poll; each completion
    /// goes to one of them.
    fn poll(&self, out: &mut [Completion]) -> usize;

    /// Sleeps until a completion is there to be polled or `timeout` has passed; true in the first
    /// case. Returns at once if one is there already. An error says that the NIC is gone.
    ///
    /// Several threads may wait: one completion wakes all of them, and those that find it taken
    /// sleep on. Who waits for what another thread may take wants [`CompletionQueue::wait_unless`].
    fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => timeout,
            };
            if self.wait_unless(left, &|| false)? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// Like [`CompletionQueue::wait`], but does not go to sleep if `done` says true, and may return
    /// early with false: after [`CompletionQueue::wake`], or when a completion came that another
    /// thread has taken.
    ///
    /// `done` is called after the queue has been armed: whoever makes it true and then calls
    /// [`CompletionQueue::wake`] is certain that this thread does not sleep on.
    fn wait_unless(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<bool, Error>;

    /// Where time is virtual: calls `waker` when a completion can be polled.
    fn leave_waker(&self, _waker: &Waker) {}

    /// Wakes who sleeps in [`CompletionQueue::wait_unless`].
    fn wake(&self);
}
