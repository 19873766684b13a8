//! The verbs: what a NIC's user calls (IBTA vol. 1, chapter 11, "software transport verbs").
//!
//! Objects are handles; the last clone that is dropped destroys the object. A memory region or
//! a queue keeps its protection domain and memory alive.
//!
//! Addresses in work requests are those that the memory's owner sees: the I/O virtual address of
//! a registered byte is its address in the process that registered it.

use std::task::Waker;
use std::time::{Duration, Instant};

use crate::{
    Access, Completion, Cqn, DmaMemory, Error, Key, PeerAddress, Qpn, ReceiveRequest, Remote, Sge,
    WorkRequest, Zeros,
};
use rnic::verbs::{MwKind, SrqInfo};

pub use rnic::port::control::Events;
pub use rnic::verbs::DeviceInfo;

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

    /// What this function may have at most (`ibv_query_device`).
    fn query_device(&self) -> Result<DeviceInfo, Error>;

    /// Opens a further function of the same NIC, up to [`DeviceInfo::functions`] of them: one with keys, windows and
    /// limits of its own (`ibv_open_device` on another virtual function). What is made through one belongs to it
    /// alone: a QP reaches keys of its own function, or its peer's, and those of others do not exist for it. QPs of different
    /// functions can be connected. It ends with its last handle and object.
    ///
    /// For who needs more windows than a function has (FineMem §4.3).
    fn open_function(&self) -> Result<Self, Error> {
        Err(Error::Unsupported {
            attempt: "opening a further function of the NIC".into(),
            why: format!("{} has one", self.caps().name),
        })
    }

    /// Takes the asynchronous events of this function that have come so far (`ibv_get_async_event`). Those of
    /// objects that have been destroyed are not among them. They need not be taken: a few hundred are kept,
    /// and [`Events::lost`] counts the others.
    fn take_events(&self) -> Result<Events, Error>;

    /// Like [`Nic::take_events`], but sleeps up to `timeout` until there are some.
    fn wait_events(&self, timeout: Duration) -> Result<Events, Error>;

    /// Zeroed memory that this NIC can register: `bytes`, rounded up to pages. On a NIC that runs
    /// in another process it is shared with that process.
    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error>;

    /// [`Nic::alloc_dma`] for chunks: memory used in units of `unit` bytes at multiples of that. A
    /// NIC whose memory need not be pinned makes it thin: a page takes RAM from its first write on.
    /// Zeros that are written over whole pages, by [`Nic::zero`] or by the NIC from
    /// [`Nic::alloc_zeros`], give the RAM back, except that of the first `kept` bytes. What is read
    /// is the same on every NIC.
    fn alloc_thin(&self, bytes: usize, _unit: usize, _kept: usize) -> Result<DmaMemory, Error> {
        self.alloc_dma(bytes)
    }

    /// [`Nic::alloc_dma`] for memory that is never written, so that it stays zero: a NIC may know
    /// that, and clear other memory from it in another way than by copying.
    fn alloc_zeros(&self, bytes: usize) -> Result<DmaMemory, Error> {
        self.alloc_dma(bytes)
    }

    /// The time, from some moment in the past on; it never goes back. Who uses a NIC takes the time from it,
    /// so that it can be virtual.
    fn now(&self) -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }

    /// Has the calling CPU write zeros over `len` bytes at `offset` of `memory`; nobody may be told of them before
    /// `zeros` is dropped. Panics if they lie outside. Not the NIC's work; a NIC whose time is virtual learns of the
    /// CPU's that way.
    fn zero(&self, zeros: &mut Zeros, memory: &DmaMemory, offset: usize, len: usize) {
        zeros.write(memory, offset, len);
    }

    /// Allocates a protection domain.
    fn alloc_pd(&self) -> Result<Self::Pd, Error>;

    /// Registers `memory`, all or a slice of what [`Nic::alloc_dma`] gave.
    fn reg_mr(&self, pd: &Self::Pd, memory: &DmaMemory, access: Access) -> Result<Self::Mr, Error>;

    /// Like [`Nic::reg_mr`], but the first byte has the address `iova` in work requests; it must equal
    /// the memory's address modulo 8. With 0 the region is a zero-based one (`IBV_ACCESS_ZERO_BASED`).
    fn reg_mr_iova(
        &self,
        pd: &Self::Pd,
        memory: &DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<Self::Mr, Error>;

    /// Changes a region (`ibv_rereg_mr`): it has another key then, and the old one is dead. Refused while
    /// windows are bound to it, or while others hold its handle; the region is deregistered then, as
    /// it is after any failure. Needs [`Feature::Rereg`].
    fn rereg_mr(&self, mr: Self::Mr, change: Rereg<'_, Self>) -> Result<Self::Mr, Error>;

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

    /// Allocates type-1 windows, unbound, that words of memory guard: one for each word. Needs
    /// [`Feature::GuardedWindows`].
    fn alloc_guarded_mws(
        &self,
        _pd: &Self::Pd,
        _guards: &Guards<'_, Self>,
    ) -> Result<Vec<Self::Mw>, Error> {
        Err(Error::Unsupported {
            attempt: "allocating guarded windows".into(),
            why: format!("{} has none", self.caps().name),
        })
    }

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
    /// They are atomic to the host's CPUs as well (`IBV_ATOMIC_GLOB`), not to this NIC only.
    pub global_atomics: bool,
    /// The most scatter-gather entries of a work request.
    pub max_sges: u32,
    /// The most bytes of inline data.
    pub max_inline: u32,
    /// The most entries of a send or receive queue.
    pub max_queue: u32,
    /// What else it can do, and not every NIC.
    pub features: &'static [Feature],
}

impl Caps {
    /// Whether it has `feature`.
    pub fn has(&self, feature: Feature) -> bool {
        self.features.contains(&feature)
    }
}

/// What one NIC can do and another cannot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Feature {
    /// Type-1 windows.
    Type1Windows,
    /// Type-2 windows, each bound to one queue pair (2B).
    Type2Windows,
    /// Type-1 windows that are used only through queue pairs that a word of memory admits ([`Guards`]). Of
    /// software NICs.
    GuardedWindows,
    /// Regions change ([`Nic::rereg_mr`]).
    Rereg,
    /// Regions and windows whose first byte has address 0.
    ZeroBased,
    /// Asynchronous events reach the function.
    AsyncEvents,
    /// An SRQ's limit can be armed.
    SrqLimit,
    /// [`CompletionQueue::wait_solicited`] tells solicited completions from others.
    SolicitedEvents,
    /// Masked CAS and FAA.
    MaskedAtomics,
    /// A QP's rights change while it is connected.
    ModifyAccess,
    /// A CQ that runs over takes no more completions and says so, if it was asked to.
    CqOverrun,
    /// A region that peers may write must allow local writes too, else it is refused.
    RemoteNeedsLocalWrite,
}

/// What changes of a region ([`Nic::rereg_mr`]); the rest stays.
#[derive(Clone)]
pub struct Rereg<'a, N: Nic> {
    /// Another protection domain.
    pub pd: Option<&'a N::Pd>,
    /// Other memory.
    pub memory: Option<&'a DmaMemory>,
    /// Other rights.
    pub access: Option<Access>,
}

impl<N: Nic> Default for Rereg<'_, N> {
    fn default() -> Self {
        Self { pd: None, memory: None, access: None }
    }
}

/// What guards type-1 windows: for each a word of memory, which the NIC reads whenever the window is used. Through a
/// queue pair it is used only while `(word ^ (value | the queue pair's tag)) & mask == 0`
/// ([`QpChange::Tag`]). Who is refused hears what he would hear of a key that does not exist.
///
/// A type-1 window is bound before it is known whose queue pairs will use it, and so opens to all that guess its
/// key. A word that says whose the memory is keeps out those whose it is not.
#[derive(Clone)]
pub struct Guards<'a, N: Nic> {
    /// The words lie in it, 8 bytes aligned and big-endian. It lives as long as the windows.
    pub region: &'a N::Mr,
    /// The bits of a word that count.
    pub mask: u64,
    /// For each window the address of its word, as work requests have it, and the value.
    pub words: &'a [(u64, u64)],
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

    /// The address of the first byte in work requests.
    fn iova(&self) -> u64 {
        self.memory().addr()
    }

    /// The SGE of `len` bytes at `offset`. Panics if they lie outside the region.
    fn sge(&self, offset: usize, len: u32) -> Sge {
        assert!(self.memory().at(offset, len as usize).is_some(), "SGE outside its region");
        Sge { addr: self.iova() + offset as u64, len, lkey: self.key() }
    }

    /// The remote address of the byte at `offset`, for whoever holds the key.
    fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.iova() + offset as u64, rkey: self.key() }
    }
}

/// A memory window.
pub trait MemoryWindow: Clone + Send + Sync + 'static {
    /// The window's key as it was when it was allocated; each bind changes the tag.
    fn key(&self) -> Key;

    /// Its type.
    fn kind(&self) -> MwKind;
}

/// A receive queue that work can be posted to.
pub trait ReceiveQueue: Clone + Send + Sync + 'static {
    /// Posts a receive. Entries are given out in the order of the ring: the queue is full as long as
    /// the completion of the oldest has not been polled, also if younger ones have been.
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error>;

    /// Arms the limit, once: [`AsyncEvent::SrqLimit`](crate::AsyncEvent::SrqLimit) comes when a message has left fewer than `limit`
    /// receives, or has found none (`IBV_SRQ_LIMIT`). 0 disarms it. Needs [`Feature::SrqLimit`].
    fn set_limit(&self, limit: u32) -> Result<(), Error>;

    /// What the NIC knows of it (`ibv_query_srq`).
    fn query(&self) -> Result<SrqInfo, Error>;

    /// Its number, as [`AsyncEvent::SrqLimit`](crate::AsyncEvent::SrqLimit) names it.
    fn srqn(&self) -> rnic::ids::Srqn;
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
        /// The peer: a QP of this NIC, or of another one.
        peer: PeerAddress,
    },
    /// RTR to RTS.
    ReadyToSend,
    /// To Error, from any state.
    Error,
    /// What the peer may do, from now on (`IBV_QP_ACCESS_FLAGS`). In Init, RTR and RTS, and the state stays.
    /// Needs [`Feature::ModifyAccess`].
    Access {
        /// The rights.
        access: Access,
    },
    /// What is compared with the words that guard windows ([`Guards`]), from now on; 0 until then. In any state, which
    /// stays; it outlives a reset. Needs [`Feature::GuardedWindows`].
    Tag {
        /// The tag.
        tag: u64,
    },
}

/// What the NIC knows of a queue pair (`ibv_query_qp`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpInfo {
    /// Its state.
    pub state: QpState,
    /// The QP that it is connected to, if it is.
    pub peer: Option<Qpn>,
    /// What the peer may do.
    pub access: Access,
    /// Building blocks of its send queue; 0: none.
    pub send_blocks: u32,
    /// Entries of its own receive queue; 0: none.
    pub recv_entries: u32,
}

/// An RC queue pair.
///
/// Posting and polling may be done by several threads; they take turns.
pub trait QueuePair: Clone + Send + Sync + 'static {
    /// Its number.
    fn qpn(&self) -> Qpn;

    /// Changes its state.
    fn modify(&self, change: QpChange) -> Result<(), Error>;

    /// What the NIC knows of it.
    fn query(&self) -> Result<QpInfo, Error>;

    /// Its state as the NIC has it.
    fn state(&self) -> Result<QpState, Error> {
        Ok(self.query()?.state)
    }

    /// Reset, Init, RTR and RTS in one go.
    fn connect(&self, peer: impl Into<PeerAddress>) -> Result<(), Error> {
        self.modify(QpChange::Reset)?;
        self.modify(QpChange::Init)?;
        self.modify(QpChange::ReadyToReceive { peer: peer.into() })?;
        self.modify(QpChange::ReadyToSend)
    }

    /// Posts `list` to the send queue and rings the doorbell once. All of it is posted, or none. In Reset, Init
    /// and RTR nothing is: [`Error::NotReady`] (IBTA vol. 1, chapter 10, states of a queue pair).
    fn post_send(&self, list: &[WorkRequest<'_>]) -> Result<(), Error>;

    /// Posts a receive to the QP's own receive queue; not in Reset.
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error>;
}

/// A completion queue.
pub trait CompletionQueue: Clone + Send + Sync + 'static {
    /// Time is virtual: it passes only while somebody waits. Then nobody spins, who waits calls
    /// [`CompletionQueue::wait_unless`] at once, and a future leaves its waker with
    /// [`CompletionQueue::leave_waker`].
    const VIRTUAL: bool = false;

    /// Its number.
    fn cqn(&self) -> Cqn;

    /// Completions that fit it before one must be polled.
    fn entries(&self) -> u32;

    /// Yields the calling thread's CPU to the NIC if polling on would keep that from running; false
    /// if it does not. For who polls in a loop.
    fn offer_cpu(&self) -> bool {
        false
    }

    /// Takes up to `out.len()` completions; how many. Several threads may poll; each completion
    /// goes to one of them.
    fn poll(&self, out: &mut [Completion]) -> usize;

    /// Sleeps until a completion is there to be polled or `timeout` has passed; true in the first
    /// case. Returns at once if one is there already. An error says that the NIC is gone. Where time is
    /// [virtual](CompletionQueue::VIRTUAL) it may end early with false, as who waits may be woken for other
    /// reasons, too.
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

    /// Like [`CompletionQueue::wait`], but only completions that their senders solicited, and those with an
    /// error, wake it (`ibv_req_notify_cq` with `solicited_only`). One that is there already, whatever it
    /// is, returns at once. Needs [`Feature::SolicitedEvents`]; otherwise any completion wakes it.
    fn wait_solicited(&self, timeout: Duration) -> Result<bool, Error> {
        self.wait(timeout)
    }

    /// Where time is virtual: calls `waker` when a completion can be polled.
    fn leave_waker(&self, _waker: &Waker) {}

    /// Wakes who sleeps in [`CompletionQueue::wait_unless`].
    fn wake(&self);
}
