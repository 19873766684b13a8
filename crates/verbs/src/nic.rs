//! The verbs: the interface of a NIC to its users (IBTA vol. 1, chapter 11, "software transport
//! verbs").
//!
//! Objects are handles. Dropping the last clone of a handle destroys the object. A memory region or
//! a queue keeps its protection domain and memory alive.
//!
//! Addresses in work requests are I/O virtual addresses: the address that a registered byte has in
//! the process that registered it.

use std::os::fd::RawFd;
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::{
    Access, Caps, Completion, CqAttr, Cqn, DeviceInfo, DmaMemory, Error, Events, Key, MwKind,
    PeerAddress, QpChange, QpInfo, QpState, Qpn, ReceiveAttr, ReceiveRequest, RegionEngine, Remote,
    Sge, SrqInfo, Srqn, WorkRequest, Zeros,
};

/// Greatest age of [`Nic::now_coarse`] while the machine runs: two ticks of the slowest kernel,
/// which has 100 a second.
pub const COARSE_LAG: Duration = Duration::from_millis(20);

/// A function of a NIC: the handle through which a process uses the NIC.
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

    /// Returns the capabilities of the NIC.
    fn caps(&self) -> Caps;

    /// Returns the limits of this function (`ibv_query_device`).
    fn query_device(&self) -> Result<DeviceInfo, Error>;

    /// Opens a further function of the same NIC (`ibv_open_device` on another virtual function).
    ///
    /// The new function has keys, windows and limits of its own. A NIC has at most
    /// [`DeviceInfo::functions`] functions. Objects belong to the function that created them: a QP
    /// can name keys of its own function or of its peer's function, and no other keys. QPs of
    /// different functions can be connected. The function is closed when its last handle and its
    /// last object are dropped.
    ///
    /// Further functions provide more windows than one function has (FineMem §4.3).
    fn open_function(&self) -> Result<Self, Error> {
        Err(Error::Unsupported {
            attempt: "opening a further function of the NIC".into(),
            why: format!("{} has one", self.caps().name),
        })
    }

    /// Takes the pending asynchronous events of this function (`ibv_get_async_event`).
    ///
    /// Events of destroyed objects are left out. Taking events is optional: the NIC keeps a few
    /// hundred of them and counts the dropped ones in [`Events::lost`].
    fn take_events(&self) -> Result<Events, Error>;

    /// Like [`Nic::take_events`], but sleeps up to `timeout` until an event is pending.
    fn wait_events(&self, timeout: Duration) -> Result<Events, Error>;

    /// Descriptors that must stay open for as long as the function is used, for a process that
    /// moves or closes descriptors.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Allocates zeroed memory that this NIC can register: `bytes`, rounded up to pages. If the NIC
    /// runs in another process, the memory is shared with that process.
    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error>;

    /// Like [`Nic::alloc_dma`], for chunks: memory used in units of `unit` bytes, aligned to
    /// `unit`.
    ///
    /// A NIC that need not pin memory allocates it lazily: a page takes RAM from the first write
    /// on. Writing zeros over whole pages, with [`Nic::zero`] or from [`Nic::alloc_zeros`] by the
    /// NIC, gives their RAM back, except for the first `kept` bytes. Reads return the same bytes on
    /// every NIC.
    fn alloc_thin(&self, bytes: usize, _unit: usize, _kept: usize) -> Result<DmaMemory, Error> {
        self.alloc_dma(bytes)
    }

    /// Like [`Nic::alloc_dma`], for memory that is never written and so stays zero. A NIC may use
    /// this knowledge to clear other memory from it without copying.
    fn alloc_zeros(&self, bytes: usize) -> Result<DmaMemory, Error> {
        self.alloc_dma(bytes)
    }

    /// Returns the monotonic time since an arbitrary moment. Users of a NIC take the time from the
    /// NIC, so that a simulator can make it virtual.
    fn now(&self) -> Duration {
        monotonic()
    }

    /// Returns an earlier result of [`Nic::now`], which is up to [`COARSE_LAG`] old.
    ///
    /// The result may be older for a moment after the machine stood still. A NIC whose system has a
    /// clock that advances by ticks returns its time, which takes a fifth of the time of `now`.
    fn now_coarse(&self) -> Duration {
        self.now()
    }

    /// Writes zeros over `len` bytes at `offset` of `memory` with the calling CPU.
    ///
    /// The caller must drop `zeros` before it tells any other thread or process that the bytes are
    /// clear. Panics if the bytes lie outside `memory`. The CPU does the work, not the NIC; the
    /// verb exists so that a NIC with virtual time can account for the CPU time.
    fn zero(&self, zeros: &mut Zeros, memory: &DmaMemory, offset: usize, len: usize) {
        zeros.write(memory, offset, len);
    }

    /// Accounts for a copy of `bytes` that the calling CPU has made. A NIC with virtual time takes
    /// time for it; other NICs do nothing.
    fn copied(&self, _bytes: usize) {}

    /// Allocates a protection domain.
    fn alloc_pd(&self) -> Result<Self::Pd, Error>;

    /// Registers `memory`, all or a slice of an allocation of [`Nic::alloc_dma`].
    fn reg_mr(&self, pd: &Self::Pd, memory: &DmaMemory, access: Access) -> Result<Self::Mr, Error> {
        self.reg_mr_iova(pd, memory, memory.addr(), access)
    }

    /// Like [`Nic::reg_mr`], but the first byte has the address `iova` in work requests. `iova`
    /// must equal the memory's address modulo 8. 0 makes a zero-based region
    /// (`IBV_ACCESS_ZERO_BASED`).
    fn reg_mr_iova(
        &self,
        pd: &Self::Pd,
        memory: &DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<Self::Mr, Error>;

    /// Changes a region (`ibv_rereg_mr`). The region gets a new key; the old key is dead.
    ///
    /// Fails while windows are bound to the region or other handles to it exist. After any failure
    /// the region is deregistered. Needs [`Feature::Rereg`](crate::Feature::Rereg).
    fn rereg_mr(&self, mr: Self::Mr, change: Rereg<'_, Self>) -> Result<Self::Mr, Error>;

    /// Allocates a type-2 memory window, unbound.
    fn alloc_mw(&self, pd: &Self::Pd) -> Result<Self::Mw, Error>;

    /// Allocates `count` type-2 windows, in one call to the NIC where the NIC supports that.
    fn alloc_mws(&self, pd: &Self::Pd, count: usize) -> Result<Vec<Self::Mw>, Error> {
        (0..count).map(|_| self.alloc_mw(pd)).collect()
    }

    /// Allocates `count` type-1 windows, unbound.
    ///
    /// Any QP of the PD may use, rebind and unbind them, so that guessing an 8-bit tag grants
    /// access (OneSidedMW §2.3). They serve as a baseline and must not protect memory from other
    /// clients. Needs [`Caps::type1_windows`].
    fn alloc_type1_mws(&self, pd: &Self::Pd, count: usize) -> Result<Vec<Self::Mw>, Error>;

    /// Allocates unbound type-1 windows, each guarded by one word of memory. Needs
    /// [`Feature::GuardedWindows`](crate::Feature::GuardedWindows).
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

    /// Registers `memory` as a region behind an engine, with address 0 for its first byte. Peers
    /// reach it by READ and WRITE only; atomics and windows are refused. Needs
    /// [`Feature::RegionEngines`](crate::Feature::RegionEngines).
    fn reg_engine_mr(
        &self,
        _pd: &Self::Pd,
        _memory: &DmaMemory,
        _access: Access,
        _engine: Box<dyn RegionEngine>,
    ) -> Result<Self::Mr, Error> {
        Err(Error::Unsupported {
            attempt: "registering a region behind an engine".into(),
            why: format!("{} has no engines", self.caps().name),
        })
    }

    /// Creates a completion queue.
    fn create_cq(&self, attr: CqAttr) -> Result<Self::Cq, Error>;

    /// Creates a shared receive queue whose completions go to the CQ of the QP that received.
    fn create_srq(&self, pd: &Self::Pd, attr: ReceiveAttr) -> Result<Self::Srq, Error>;

    /// Creates an RC queue pair in state Reset.
    fn create_qp(&self, pd: &Self::Pd, attr: QpAttr<'_, Self>) -> Result<Self::Qp, Error>;
}

/// Changes to a region ([`Nic::rereg_mr`]). Properties that are `None` stay as they are.
#[derive(Clone)]
pub struct Rereg<'a, N: Nic> {
    /// New protection domain.
    pub pd: Option<&'a N::Pd>,
    /// New memory.
    pub memory: Option<&'a DmaMemory>,
    /// New access rights.
    pub access: Option<Access>,
}

impl<N: Nic> Default for Rereg<'_, N> {
    fn default() -> Self {
        Self { pd: None, memory: None, access: None }
    }
}

/// Guards of type-1 windows: one word of memory per window, read by the NIC at each use of the
/// window.
///
/// A QP can use the window only while `(word ^ (value | tag)) & mask == 0`, where `tag` is the QP's
/// own ([`QpChange::Tag`]). A rejected access completes with the same error as an unknown key.
///
/// Because a type-1 window is bound before its user is known, the window is open to any QP that
/// guesses its key. A guard word that names the owner of the memory rejects the QPs of every other
/// client.
#[derive(Clone)]
pub struct Guards<'a, N: Nic> {
    /// The region that holds the words, 8-byte aligned and big-endian. The windows keep it alive.
    pub region: &'a N::Mr,
    /// The bits of a word that are compared.
    pub mask: u64,
    /// For each window, the address of its word (as in work requests) and the value.
    pub words: &'a [(u64, u64)],
}

/// Attributes of a queue pair.
#[derive(Clone)]
pub struct QpAttr<'a, N: Nic> {
    /// CQ of the send queue.
    pub send_cq: &'a N::Cq,
    /// CQ of the receive queue.
    pub recv_cq: &'a N::Cq,
    /// Send queue size in building blocks of 64 bytes, rounded up to a power of two; 0 for no send
    /// queue.
    pub send_blocks: u32,
    /// The receive queue.
    pub receive: Receive<'a, N>,
    /// Operations that peers may do through this QP, with keys that allow them.
    pub access: Access,
}

/// The receive side of a queue pair.
#[derive(Clone)]
pub enum Receive<'a, N: Nic> {
    /// No receive queue: SENDs to the QP are refused.
    None,
    /// A receive queue of the QP's own.
    Own(ReceiveAttr),
    /// A shared receive queue.
    Shared(&'a N::Srq),
}

/// A registered memory region.
pub trait MemoryRegion: Clone + Send + Sync + 'static {
    /// Returns the key, both local and remote.
    fn key(&self) -> Key;
    /// Returns the registered memory.
    fn memory(&self) -> &DmaMemory;

    /// Returns the address that the first byte has in work requests.
    fn iova(&self) -> u64 {
        self.memory().addr()
    }

    /// Returns the SGE of `len` bytes at `offset`. Panics if they lie outside the region.
    fn sge(&self, offset: usize, len: u32) -> Sge {
        assert!(self.memory().at(offset, len as usize).is_some(), "SGE outside its region");
        Sge { addr: self.iova() + offset as u64, len, lkey: self.key() }
    }

    /// Returns the remote address of the byte at `offset`, including the region's key.
    fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.iova() + offset as u64, rkey: self.key() }
    }
}

/// A memory window.
pub trait MemoryWindow: Clone + Send + Sync + 'static {
    /// Returns the key that the window had when it was allocated. Each bind changes the tag.
    fn key(&self) -> Key;

    /// Returns the type of the window.
    fn kind(&self) -> MwKind;
}

/// A receive queue that work can be posted to.
pub trait ReceiveQueue: Clone + Send + Sync + 'static {
    /// Posts a receive.
    ///
    /// Entries are allocated in ring order: the queue stays full until the oldest entry's
    /// completion is polled, even if younger entries have completed.
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error>;

    /// Arms the SRQ limit once (`IBV_SRQ_LIMIT`).
    ///
    /// The NIC raises [`AsyncEvent::SrqLimit`](crate::AsyncEvent::SrqLimit) when a message leaves
    /// fewer than `limit` receives or finds none. 0 disarms the limit. Needs
    /// [`Feature::SrqLimit`](crate::Feature::SrqLimit).
    fn set_limit(&self, limit: u32) -> Result<(), Error>;

    /// Queries the NIC about the queue (`ibv_query_srq`).
    fn query(&self) -> Result<SrqInfo, Error>;

    /// Returns the SRQ number, as in [`AsyncEvent::SrqLimit`](crate::AsyncEvent::SrqLimit).
    fn srqn(&self) -> Srqn;
}

/// An RC queue pair.
///
/// Several threads may post and poll; a lock serializes them.
pub trait QueuePair: Clone + Send + Sync + 'static {
    /// Returns the QP number.
    fn qpn(&self) -> Qpn;

    /// Changes the state of the QP.
    fn modify(&self, change: QpChange) -> Result<(), Error>;

    /// Queries the NIC about the QP.
    fn query(&self) -> Result<QpInfo, Error>;

    /// Returns the state that the NIC holds for the QP.
    fn state(&self) -> Result<QpState, Error> {
        Ok(self.query()?.state)
    }

    /// Moves the QP through Reset, Init, RTR and RTS.
    fn connect(&self, peer: impl Into<PeerAddress>) -> Result<(), Error> {
        self.modify(QpChange::Reset)?;
        self.modify(QpChange::Init)?;
        self.modify(QpChange::ReadyToReceive { peer: peer.into() })?;
        self.modify(QpChange::ReadyToSend)
    }

    /// Posts `list` to the send queue, all or nothing, and writes the doorbell once.
    ///
    /// Fails with [`Error::NotReady`] in Reset, Init and RTR (IBTA vol. 1, chapter 10, states of a
    /// queue pair).
    fn post_send(&self, list: &[WorkRequest<'_>]) -> Result<(), Error>;

    /// Posts a receive to the QP's own receive queue. Fails in Reset.
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error>;
}

fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A completion queue.
pub trait CompletionQueue: Clone + Send + Sync + 'static {
    /// True if time is virtual: it passes only while threads wait.
    ///
    /// Threads then never spin: a waiting thread calls [`CompletionQueue::wait_unless`] at once,
    /// and a future leaves its waker with [`CompletionQueue::leave_waker`].
    const VIRTUAL: bool = false;

    /// Returns the CQ number.
    fn cqn(&self) -> Cqn;

    /// Returns the number of completions that fit into the CQ.
    fn entries(&self) -> u32;

    /// Yields the calling thread's CPU to the NIC if the NIC cannot run otherwise. Returns whether
    /// it yielded. For threads that poll in a loop.
    fn offer_cpu(&self) -> bool {
        false
    }

    /// Returns the time of the CQ's NIC, as [`Nic::now`]. Limits of waits for completions use it,
    /// so that a simulator can make them virtual.
    fn now(&self) -> Duration {
        monotonic()
    }

    /// Takes up to `out.len()` completions and returns their number. Several threads may poll; each
    /// completion goes to one of them.
    fn poll(&self, out: &mut [Completion]) -> usize;

    /// Sleeps until a completion can be polled (returns true) or `timeout` has passed (false).
    ///
    /// Returns at once if a completion can be polled already. Fails if the NIC is gone. With
    /// [virtual time](CompletionQueue::VIRTUAL) the call may return false early, because the
    /// scheduler also wakes waiting threads for other reasons.
    ///
    /// Several threads may wait: one completion wakes all of them, and threads that find it taken
    /// sleep again. A thread that waits for a completion that another thread may take should call
    /// [`CompletionQueue::wait_unless`].
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

    /// Like [`CompletionQueue::wait`], but does not sleep if `done` returns true.
    ///
    /// May return false early: after [`CompletionQueue::wake`], or when another thread has taken
    /// the completion.
    ///
    /// `done` is called after the CQ is armed. So a thread that makes `done` true and then calls
    /// [`CompletionQueue::wake`] is certain to wake the waiting thread.
    fn wait_unless(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<bool, Error>;

    /// Like [`CompletionQueue::wait`], but only solicited completions and errors end the sleep
    /// (`ibv_req_notify_cq` with `solicited_only`).
    ///
    /// If any completion can be polled already, the call returns at once. Needs
    /// [`Feature::SolicitedEvents`](crate::Feature::SolicitedEvents); without it any completion
    /// ends the sleep.
    fn wait_solicited(&self, timeout: Duration) -> Result<bool, Error> {
        self.wait(timeout)
    }

    /// With virtual time: calls `waker` when a completion can be polled.
    fn leave_waker(&self, _waker: &Waker) {}

    /// Wakes the threads that sleep in [`CompletionQueue::wait_unless`].
    fn wake(&self);
}
