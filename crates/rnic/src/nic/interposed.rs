//! The software NIC with hooks between a program and its verbs.
//!
//! The hooks run before each verb, and decide when completions become visible and how a thread
//! waits. A model checker uses them to explore all orders of verbs; a simulator uses them to give
//! each verb a time.

use std::os::fd::RawFd;
use std::task::Waker;
use std::time::Duration;

use verbs::direct::{DirectNic, DirectQp, KeyInfo, Managed, Progress, Ring};
use verbs::{
    Access, Caps, Completion, CompletionQueue, CqAttr, Cqn, DeviceInfo, DmaMemory, Error, Events,
    Feature, Guards, Key, MemoryRegion, Nic, QpAttr, QpChange, QpInfo, Qpn, QueuePair, Receive,
    ReceiveAttr, ReceiveQueue, ReceiveRequest, RegionEngine, Rereg, SrqInfo, WorkRequest, Zeros,
};

use crate::nic::{SoftCq, SoftMr, SoftMw, SoftNic, SoftPd, SoftQp, SoftSrq};

/// A verb, as passed to [`Hooks::before`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// `alloc_dma`, `alloc_pd`, or the creation of a queue.
    Create,
    /// `reg_mr` or `reg_engine_mr` of this number of bytes.
    RegMr(u64),
    /// `alloc_mws` of this number of windows.
    AllocMws(u64),
    /// Drop of the last handle of a region of this number of bytes, which deregisters it.
    DeregMr(u64),
    /// `zero` of this number of bytes.
    Zero(u64),
    /// `copied` of this number of bytes.
    Copied(u64),
    /// `post_send` of this number of work requests to this QP.
    PostSend(Qpn, usize),
    /// `post_recv`.
    PostRecv,
    /// `poll`.
    Poll(Cqn),
    /// A change of a QP's state.
    Modify,
    /// A query of the NIC's tables.
    Query,
    /// A CPU write of a managed queue's limit.
    Enable,
}

/// Hooks of an [`InterposedNic`].
pub trait Hooks: Clone + Send + Sync + 'static {
    /// See [`CompletionQueue::VIRTUAL`].
    const VIRTUAL: bool;

    /// Returns the NIC's name in reports.
    fn name(&self) -> &'static str;

    /// See [`Nic::now`].
    fn now(&self) -> Duration;

    /// See [`Nic::now_coarse`].
    fn now_coarse(&self) -> Duration {
        self.now()
    }

    /// Runs before a verb.
    fn before(&self, call: Call);

    /// Runs after a verb that may have given work to the NIC.
    fn after(&self) {}

    /// Runs `make`, which creates an object. `quiet` is true if no program reads the object's
    /// memory.
    fn making<T>(&self, _quiet: bool, make: impl FnOnce() -> T) -> T {
        make()
    }

    /// Runs after the creation of a QP whose send CQ is `send_cq`. `managed_ring` is the send ring
    /// of a managed send queue.
    fn made_qp(&self, qpn: Qpn, send_cq: Cqn, managed_ring: Option<DmaMemory>);

    /// Runs before a QP is connected to `peer`.
    fn connects(&self, _qpn: Qpn, _peer: Qpn) {}

    /// Returns the sequence number (24 bits) of the first completion of a CQ that is not visible
    /// yet. `None` if all completions are visible.
    fn horizon(&self, _cqn: Cqn) -> Option<u32> {
        None
    }

    /// Waits until the completion with sequence number `next` of a CQ exists (returns true) or
    /// `timeout` has passed (false).
    fn wait(&self, cqn: Cqn, next: u32, timeout: Duration) -> Result<bool, Error>;

    /// Calls `waker` when the completion with sequence number `next` of a CQ exists.
    fn leave_waker(&self, _cqn: Cqn, _next: u32, _waker: &Waker) {}

    /// Lets `time` pass. Returns false if time cannot pass; a wait without a CQ then ends early.
    fn nap(&self, _time: Duration) -> bool {
        false
    }

    /// Runs after the creation of a CQ.
    fn made_cq(&self, _cqn: Cqn) {}

    /// Runs after completions were polled.
    fn polled(&self, _all: &[Completion]) {}
}

/// Features of the software NIC that work with hooks. Solicited events are missing, because the
/// hooks do the waiting and do not distinguish solicited completions.
const FEATURES: [Feature; 11] = [
    Feature::RegionEngines,
    Feature::Type1Windows,
    Feature::Type2Windows,
    Feature::GuardedWindows,
    Feature::Rereg,
    Feature::ZeroBased,
    Feature::AsyncEvents,
    Feature::SrqLimit,
    Feature::MaskedAtomics,
    Feature::ModifyAccess,
    Feature::CqOverrun,
];

/// Interval at which `wait_events` checks for events.
const NAP: Duration = Duration::from_micros(10);

/// A [`SoftNic`] with hooks.
#[derive(Clone)]
pub struct InterposedNic<H> {
    inner: SoftNic,
    hooks: H,
}

/// CQ of an [`InterposedNic`].
#[derive(Clone)]
pub struct InterposedCq<H> {
    inner: SoftCq,
    hooks: H,
}

/// Memory region of an [`InterposedNic`].
#[derive(Clone)]
pub struct InterposedMr<H: Hooks> {
    inner: SoftMr,
    dereg: std::sync::Arc<Dereg<H>>,
}

struct Dereg<H: Hooks> {
    hooks: H,
    bytes: u64,
}

/// Shared receive queue of an [`InterposedNic`].
#[derive(Clone)]
pub struct InterposedSrq<H> {
    inner: SoftSrq,
    hooks: H,
}

/// QP of an [`InterposedNic`].
#[derive(Clone)]
pub struct InterposedQp<H> {
    inner: SoftQp,
    hooks: H,
}

impl<H: Hooks> InterposedNic<H> {
    /// Wraps the verbs of `inner` with `hooks`.
    pub fn new(inner: SoftNic, hooks: H) -> Self {
        Self { inner, hooks }
    }

    /// Returns the hooks.
    pub fn hooks(&self) -> &H {
        &self.hooks
    }

    /// Returns the wrapped NIC.
    pub fn inner(&self) -> &SoftNic {
        &self.inner
    }

    /// Registers `memory` with `make`.
    fn register(
        &self,
        memory: &DmaMemory,
        make: impl FnOnce() -> Result<SoftMr, Error>,
    ) -> Result<InterposedMr<H>, Error> {
        let bytes = memory.len() as u64;
        self.hooks.before(Call::RegMr(bytes));
        self.hooks.making(false, || {
            let inner = make()?;
            let dereg = Dereg { hooks: self.hooks.clone(), bytes };
            Ok(InterposedMr { inner, dereg: std::sync::Arc::new(dereg) })
        })
    }

    fn soft<'a>(attr: &'a QpAttr<'_, Self>) -> QpAttr<'a, SoftNic> {
        QpAttr {
            send_cq: &attr.send_cq.inner,
            recv_cq: &attr.recv_cq.inner,
            send_blocks: attr.send_blocks,
            receive: match &attr.receive {
                Receive::None => Receive::None,
                Receive::Own(own) => Receive::Own(own.clone()),
                Receive::Shared(srq) => Receive::Shared(&srq.inner),
            },
            access: attr.access,
        }
    }

    fn qp(&self, inner: SoftQp, send_cq: &InterposedCq<H>, managed: bool) -> InterposedQp<H> {
        let ring = managed.then(|| inner.send_ring().memory);
        self.hooks.made_qp(inner.qpn(), send_cq.inner.cqn(), ring);
        InterposedQp { inner, hooks: self.hooks.clone() }
    }
}

impl<H: Hooks> Nic for InterposedNic<H> {
    type Pd = SoftPd;
    type Mr = InterposedMr<H>;
    type Mw = SoftMw;
    type Cq = InterposedCq<H>;
    type Srq = InterposedSrq<H>;
    type Qp = InterposedQp<H>;

    fn caps(&self) -> Caps {
        Caps { name: self.hooks.name(), features: &FEATURES, ..self.inner.caps() }
    }

    fn query_device(&self) -> Result<DeviceInfo, Error> {
        self.hooks.before(Call::Query);
        self.inner.query_device()
    }

    fn open_function(&self) -> Result<Self, Error> {
        self.hooks.before(Call::Create);
        let inner = self.hooks.making(false, || self.inner.open_function())?;
        Ok(Self { inner, hooks: self.hooks.clone() })
    }

    fn take_events(&self) -> Result<Events, Error> {
        self.hooks.before(Call::Query);
        self.inner.take_events()
    }

    fn wait_events(&self, timeout: Duration) -> Result<Events, Error> {
        let deadline = self.now().saturating_add(timeout);
        loop {
            let events = self.take_events()?;
            let left = deadline.saturating_sub(self.now());
            let over = !events.events.is_empty() || left.is_zero();
            if over || !self.hooks.nap(left.min(NAP)) {
                return Ok(events);
            }
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.inner.descriptors()
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        self.hooks.making(false, || self.inner.alloc_dma(bytes))
    }

    fn now(&self) -> Duration {
        self.hooks.now()
    }

    fn now_coarse(&self) -> Duration {
        self.hooks.now_coarse()
    }

    fn zero(&self, zeros: &mut Zeros, memory: &DmaMemory, offset: usize, len: usize) {
        self.hooks.before(Call::Zero(len as u64));
        zeros.write(memory, offset, len);
    }

    fn copied(&self, bytes: usize) {
        self.hooks.before(Call::Copied(bytes as u64));
    }

    fn alloc_pd(&self) -> Result<SoftPd, Error> {
        self.hooks.before(Call::Create);
        self.hooks.making(false, || self.inner.alloc_pd())
    }

    fn reg_mr_iova(
        &self,
        pd: &SoftPd,
        memory: &DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<Self::Mr, Error> {
        self.register(memory, || self.inner.reg_mr_iova(pd, memory, iova, access))
    }

    fn reg_engine_mr(
        &self,
        pd: &SoftPd,
        memory: &DmaMemory,
        access: Access,
        engine: Box<dyn RegionEngine>,
    ) -> Result<Self::Mr, Error> {
        self.register(memory, || self.inner.reg_engine_mr(pd, memory, access, engine))
    }

    fn rereg_mr(&self, mr: Self::Mr, change: Rereg<'_, Self>) -> Result<Self::Mr, Error> {
        let InterposedMr { inner, mut dereg } = mr;
        let bytes = change.memory.map_or(0, |memory| memory.len() as u64);
        // The old key ends and a new one begins; pages of unchanged memory stay pinned.
        self.hooks.before(Call::DeregMr(dereg.bytes));
        self.hooks.before(Call::RegMr(bytes));
        let Rereg { pd, memory, access } = change;
        let inner = self.inner.rereg_mr(inner, Rereg { pd, memory, access })?;
        if let (Some(memory), Some(dereg)) = (memory, std::sync::Arc::get_mut(&mut dereg)) {
            dereg.bytes = memory.len() as u64;
        }
        Ok(InterposedMr { inner, dereg })
    }

    fn alloc_mw(&self, pd: &SoftPd) -> Result<SoftMw, Error> {
        self.hooks.before(Call::AllocMws(1));
        self.hooks.making(false, || self.inner.alloc_mw(pd))
    }

    fn alloc_mws(&self, pd: &SoftPd, count: usize) -> Result<Vec<SoftMw>, Error> {
        self.hooks.before(Call::AllocMws(count as u64));
        self.hooks.making(false, || self.inner.alloc_mws(pd, count))
    }

    fn alloc_type1_mws(&self, pd: &SoftPd, count: usize) -> Result<Vec<SoftMw>, Error> {
        self.hooks.before(Call::AllocMws(count as u64));
        self.hooks.making(false, || self.inner.alloc_type1_mws(pd, count))
    }

    fn alloc_guarded_mws(
        &self,
        pd: &SoftPd,
        guards: &Guards<'_, Self>,
    ) -> Result<Vec<SoftMw>, Error> {
        self.hooks.before(Call::AllocMws(guards.words.len() as u64));
        let Guards { region, mask, words } = *guards;
        let guards = Guards { region: &region.inner, mask, words };
        self.hooks.making(false, || self.inner.alloc_guarded_mws(pd, &guards))
    }

    fn create_cq(&self, attr: CqAttr) -> Result<InterposedCq<H>, Error> {
        self.hooks.before(Call::Create);
        // No program reads a CQ that ignores overruns: WAIT uses only its counter.
        let quiet = attr.ignore_overrun;
        let inner = self.hooks.making(quiet, || self.inner.create_cq(attr))?;
        self.hooks.made_cq(inner.cqn());
        Ok(InterposedCq { inner, hooks: self.hooks.clone() })
    }

    fn create_srq(&self, pd: &SoftPd, attr: ReceiveAttr) -> Result<InterposedSrq<H>, Error> {
        self.hooks.before(Call::Create);
        let inner = self.hooks.making(false, || self.inner.create_srq(pd, attr))?;
        Ok(InterposedSrq { inner, hooks: self.hooks.clone() })
    }

    fn create_qp(&self, pd: &SoftPd, attr: QpAttr<'_, Self>) -> Result<InterposedQp<H>, Error> {
        self.hooks.before(Call::Create);
        let inner = self.hooks.making(false, || self.inner.create_qp(pd, Self::soft(&attr)))?;
        Ok(self.qp(inner, attr.send_cq, false))
    }
}

impl<H: Hooks> DirectNic for InterposedNic<H> {
    fn create_managed_qp(
        &self,
        pd: &SoftPd,
        attr: QpAttr<'_, Self>,
        managed: Managed,
    ) -> Result<InterposedQp<H>, Error> {
        self.hooks.before(Call::Create);
        let make = || self.inner.create_managed_qp(pd, Self::soft(&attr), managed);
        let inner = self.hooks.making(false, make)?;
        Ok(self.qp(inner, attr.send_cq, managed.send))
    }

    fn query_key(&self, key: Key) -> Result<KeyInfo, Error> {
        self.hooks.before(Call::Query);
        self.inner.query_key(key)
    }

    fn cq_count(&self, cq: &InterposedCq<H>) -> Result<u32, Error> {
        self.hooks.before(Call::Query);
        self.inner.cq_count(&cq.inner)
    }
}

impl<H: Hooks> MemoryRegion for InterposedMr<H> {
    fn key(&self) -> Key {
        self.inner.key()
    }

    fn memory(&self) -> &DmaMemory {
        self.inner.memory()
    }

    fn iova(&self) -> u64 {
        self.inner.iova()
    }
}

impl<H: Hooks> Drop for Dereg<H> {
    fn drop(&mut self) {
        self.hooks.before(Call::DeregMr(self.bytes));
    }
}

impl<H> InterposedCq<H> {
    /// Returns the sequence number (24 bits) of the completion that is polled next.
    pub fn consumed(&self) -> u32 {
        self.inner.consumed()
    }
}

impl<H: Hooks> CompletionQueue for InterposedCq<H> {
    const VIRTUAL: bool = H::VIRTUAL;

    fn cqn(&self) -> Cqn {
        self.inner.cqn()
    }

    fn entries(&self) -> u32 {
        self.inner.entries()
    }

    fn now(&self) -> Duration {
        self.hooks.now()
    }

    fn poll(&self, out: &mut [Completion]) -> usize {
        let cqn = self.inner.cqn();
        self.hooks.before(Call::Poll(cqn));
        let horizon = self.hooks.horizon(cqn);
        if horizon == Some(self.inner.consumed()) && !self.inner.has_backlog() {
            return 0;
        }
        let count = self.inner.poll_before(horizon, out);
        self.hooks.polled(&out[..count]);
        count
    }

    fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        self.wait_unless(timeout, &|| false)
    }

    fn wait_unless(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        if self.inner.has_backlog() {
            return Ok(true);
        }
        if done() {
            return Ok(false);
        }
        self.hooks.wait(self.inner.cqn(), self.inner.consumed(), timeout)
    }

    fn leave_waker(&self, waker: &Waker) {
        match self.inner.has_backlog() {
            true => waker.wake_by_ref(),
            false => self.hooks.leave_waker(self.inner.cqn(), self.inner.consumed(), waker),
        }
    }

    fn wake(&self) {
        self.inner.wake();
    }
}

impl<H: Hooks> ReceiveQueue for InterposedSrq<H> {
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error> {
        self.hooks.before(Call::PostRecv);
        self.inner.post_recv(wr)?;
        self.hooks.after();
        Ok(())
    }

    fn set_limit(&self, limit: u32) -> Result<(), Error> {
        self.hooks.before(Call::Modify);
        self.inner.set_limit(limit)
    }

    fn query(&self) -> Result<SrqInfo, Error> {
        self.hooks.before(Call::Query);
        self.inner.query()
    }

    fn srqn(&self) -> verbs::Srqn {
        self.inner.srqn()
    }
}

impl<H: Hooks> verbs::direct::DirectReceive for InterposedSrq<H> {
    fn ring(&self) -> Ring {
        self.inner.ring()
    }

    fn record(&self) -> DmaMemory {
        self.inner.record()
    }
}

impl<H: Hooks> QueuePair for InterposedQp<H> {
    fn qpn(&self) -> Qpn {
        self.inner.qpn()
    }

    fn modify(&self, change: QpChange) -> Result<(), Error> {
        self.hooks.before(Call::Modify);
        if let QpChange::ReadyToReceive { peer } = change {
            self.hooks.connects(self.inner.qpn(), peer.qpn());
        }
        self.inner.modify(change)?;
        self.hooks.after();
        Ok(())
    }

    fn query(&self) -> Result<QpInfo, Error> {
        self.hooks.before(Call::Query);
        self.inner.query()
    }

    fn post_send(&self, list: &[WorkRequest<'_>]) -> Result<(), Error> {
        self.hooks.before(Call::PostSend(self.inner.qpn(), list.len()));
        self.inner.post_send(list)?;
        self.hooks.after();
        Ok(())
    }

    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error> {
        self.hooks.before(Call::PostRecv);
        self.inner.post_recv(wr)?;
        self.hooks.after();
        Ok(())
    }
}

impl<H: Hooks> DirectQp for InterposedQp<H> {
    fn send_ring(&self) -> Ring {
        self.inner.send_ring()
    }

    fn recv_ring(&self) -> Option<Ring> {
        self.inner.recv_ring()
    }

    fn enable_send(&self, limit: u16) -> Result<(), Error> {
        self.hooks.before(Call::Enable);
        self.inner.enable_send(limit)?;
        self.hooks.after();
        Ok(())
    }

    fn enable_recv(&self, limit: u32) -> Result<(), Error> {
        self.hooks.before(Call::Enable);
        self.inner.enable_recv(limit)?;
        self.hooks.after();
        Ok(())
    }

    fn progress(&self) -> Result<Progress, Error> {
        self.hooks.before(Call::Query);
        self.inner.progress()
    }
}
