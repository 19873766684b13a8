//! The software NIC behind the verbs: one data path, independent of the thread that runs the
//! engine.
//!
//! ```text
//!  SoftQp --WQE--> send ring --doorbell--> engine --CQE--> CQ ring --> SoftCq
//! ```
//!
//! The differences between the ports are in [`crate::port`]; here they are one `match` at the
//! doorbell.

#[cfg(test)]
mod completion_tests;
mod cq;
pub mod interposed;
pub mod lend;
mod qp;
mod queue;
#[cfg(test)]
mod tests;
mod work;

use std::net::UdpSocket;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbs::direct::{DirectNic, KeyInfo, Managed};
use verbs::{
    Access, Caps, CompletionQueue, CqAttr, DeviceInfo, DmaMemory, Error, Events, Feature, Guards,
    Key, MemoryRegion, MemoryWindow, MwKind, Nic, Pdn, QpAttr, ReceiveAttr, RegionEngine, Rereg,
    SessionSecret,
};

use crate::limits::Limits;
use crate::port::control::{GUARDED_MWS_MAX, MWS_MAX, Reply, Verb};
use crate::port::inline::InlineNic;
use crate::port::roce::RoceSocket;
use crate::port::{Error as PortError, Function, shm};
use crate::spec::EngineRegion;

pub use cq::SoftCq;
pub use qp::{SoftQp, SoftSrq};

/// Maximum building blocks of a send queue, and maximum WQEs of a managed receive queue.
const MAX_QUEUE: u32 = 1 << 15;
/// Maximum entries of a CQ or of a receive queue that is not managed.
const MAX_ENTRIES: u32 = 1 << 21;

/// Optional features of the software NIC. The first is missing where the NIC runs in another
/// process: an engine is code of the NIC's process.
static FEATURES: [Feature; 12] = [
    Feature::RegionEngines,
    Feature::Type1Windows,
    Feature::Type2Windows,
    Feature::GuardedWindows,
    Feature::Rereg,
    Feature::ZeroBased,
    Feature::AsyncEvents,
    Feature::SrqLimit,
    Feature::SolicitedEvents,
    Feature::MaskedAtomics,
    Feature::ModifyAccess,
    Feature::CqOverrun,
];

/// A function of a software NIC.
#[derive(Clone)]
pub struct SoftNic {
    function: Function,
}

impl SoftNic {
    /// Creates a NIC that runs on its callers' threads, without a thread or socket of its own.
    pub fn inline() -> Self {
        Self::inline_with(Limits::default())
    }

    /// Like [`SoftNic::inline`], with the given limits.
    pub fn inline_with(limits: Limits) -> Self {
        Self { function: Function::Inline(InlineNic::new(limits).physical()) }
    }

    /// Creates a NIC on a thread of this process, to which other processes can attach. Returns its
    /// physical function and the handle that creates sessions for other processes.
    pub fn host() -> Result<(Self, shm::Host), Error> {
        Self::host_with(Limits::default())
    }

    /// Like [`SoftNic::host`], with the given limits.
    pub fn host_with(limits: Limits) -> Result<(Self, shm::Host), Error> {
        let host = shm::Host::start(limits).map_err(system("starting the NIC's thread"))?;
        let nic = Self { function: Function::Local(host.physical()) };
        Ok((nic, host))
    }

    /// Like [`SoftNic::host`], with a RoCEv2 port to other hosts on `socket`.
    ///
    /// QPs can be connected to QPs of a NIC that is reachable over UDP. Packets arrive at and leave
    /// from the address that `socket` is bound to.
    pub fn host_over(socket: UdpSocket) -> Result<(Self, shm::Host), Error> {
        Self::host_over_with(socket, Limits::default())
    }

    /// Like [`SoftNic::host_over`], with the given limits.
    pub fn host_over_with(socket: UdpSocket, limits: Limits) -> Result<(Self, shm::Host), Error> {
        let wire = RoceSocket::new(socket).map_err(system("opening the way to other hosts"))?;
        let host =
            shm::Host::start_roce(limits, wire).map_err(system("starting the NIC's thread"))?;
        let nic = Self { function: Function::Local(host.physical()) };
        Ok((nic, host))
    }

    /// Creates a NIC for this process alone, with a RoCEv2 port as in [`SoftNic::host_over`].
    ///
    /// While a thread polls for completions, it runs the NIC in place of the NIC thread. This
    /// avoids handing messages from one thread to another.
    pub fn over(socket: UdpSocket) -> Result<Self, Error> {
        let wire = RoceSocket::new(socket).map_err(system("opening the way to other hosts"))?;
        Ok(Self::own(Some(wire))?.0)
    }

    /// Like [`SoftNic::host`], but threads of this process that poll for completions run the NIC,
    /// as in [`SoftNic::over`]. [`shm::Host::start_own`] describes the consequences for attached
    /// processes.
    pub fn host_own() -> Result<(Self, shm::Host), Error> {
        Self::own(None)
    }

    fn own(wire: Option<RoceSocket>) -> Result<(Self, shm::Host), Error> {
        let host = shm::Host::start_own(Limits::default(), wire)
            .map_err(system("starting the NIC's thread"))?;
        let nic = Self { function: Function::Local(host.physical()) };
        Ok((nic, host))
    }

    /// Attaches to the NIC of the process that serves the socket at `path`.
    pub fn attach(path: impl AsRef<Path>) -> Result<Self, Error> {
        let attached =
            shm::Attached::connect(path.as_ref()).map_err(system("attaching to a NIC"))?;
        Ok(Self { function: Function::Attached(attached) })
    }

    /// Like [`SoftNic::attach`], with memory that a borrower has mapped already. The queues that
    /// are created first can be lent: see [`SoftNic::lend`].
    pub fn attach_lendable(
        path: impl AsRef<Path>,
        lendable: shm::LendableMemory,
    ) -> Result<Self, Error> {
        let attached = shm::Attached::connect_lendable(path.as_ref(), lendable)
            .map_err(system("attaching to a NIC"))?;
        Ok(Self { function: Function::Attached(attached) })
    }

    /// Allocates like [`Nic::alloc_dma`], and shows another process the memory before the NIC's
    /// process seals it ([`shm::map_shared`]). Only attached functions have memory to show; for
    /// others `show` is not called.
    pub fn alloc_shown(
        &self,
        bytes: usize,
        show: &mut dyn FnMut(BorrowedFd<'_>),
    ) -> Result<DmaMemory, Error> {
        let allocated = match &self.function {
            Function::Attached(attached) => attached.alloc_shown(bytes, show),
            function => function.alloc_dma(bytes),
        };
        allocated.map_err(system("allocating memory for the NIC"))
    }

    /// Wraps a function that was opened elsewhere.
    pub fn new(function: Function) -> Self {
        Self { function }
    }

    /// Returns the secret of the session if the function is attached to another process's NIC.
    pub fn secret(&self) -> Option<SessionSecret> {
        match &self.function {
            Function::Attached(attached) => Some(attached.secret()),
            Function::Inline(_) | Function::Local(_) | Function::Borrowed(_) => None,
        }
    }

    /// Returns the function below the verbs.
    pub fn function(&self) -> &Function {
        &self.function
    }
}

impl Nic for SoftNic {
    type Pd = SoftPd;
    type Mr = SoftMr;
    type Mw = SoftMw;
    type Cq = SoftCq;
    type Srq = SoftSrq;
    type Qp = SoftQp;

    fn caps(&self) -> Caps {
        Caps {
            name: self.function.port_name(),
            chains: true,
            windows: true,
            type1_windows: true,
            big_endian_atomics: true,
            global_atomics: true,
            max_sges: work::MAX_SGES as u32,
            max_inline: work::MAX_INLINE as u32,
            max_queue: MAX_QUEUE,
            features: if self.function.is_local() { &FEATURES } else { &FEATURES[1..] },
        }
    }

    fn query_device(&self) -> Result<DeviceInfo, Error> {
        match call(&self.function, "query_device", Verb::QueryDevice)? {
            Reply::Device(info) => Ok(DeviceInfo {
                recv_entries: info.recv_entries.min(MAX_ENTRIES),
                cq_entries: info.cq_entries.min(MAX_ENTRIES),
                ..info
            }),
            _ => Err(unexpected("query_device")),
        }
    }

    fn open_function(&self) -> Result<Self, Error> {
        let function = self.function.open().map_err(|e| match e {
            PortError::Verb(e) => Error::Refused { verb: "open_function", why: e.to_string() },
            e => system("open_function")(e),
        })?;
        Ok(Self { function })
    }

    fn take_events(&self) -> Result<Events, Error> {
        match call(&self.function, "take_events", Verb::TakeEvents)? {
            Reply::Events(events) => Ok(events),
            _ => Err(unexpected("take_events")),
        }
    }

    fn wait_events(&self, timeout: Duration) -> Result<Events, Error> {
        let attempt = "waiting for asynchronous events";
        let deadline = Instant::now().checked_add(timeout);
        let word = self.function.event_word().map_err(system(attempt))?;
        loop {
            self.function.before_sleep();
            word.arm();
            let events = self.take_events()?;
            let left =
                deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
            if !events.events.is_empty() || left.is_zero() {
                return Ok(events);
            }
            word.sleep(left.min(cq::ALIVE_CHECK));
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.function.descriptors()
    }

    fn now_coarse(&self) -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        self.function.alloc_dma(bytes).map_err(system("allocating memory for the NIC"))
    }

    fn alloc_thin(&self, bytes: usize, unit: usize, kept: usize) -> Result<DmaMemory, Error> {
        let attempt = "allocating memory for chunks";
        self.function.alloc_thin(bytes, unit, kept).map_err(system(attempt))
    }

    fn alloc_zeros(&self, bytes: usize) -> Result<DmaMemory, Error> {
        self.function.alloc_zeros(bytes).map_err(system("allocating zeros for the NIC"))
    }

    fn alloc_pd(&self) -> Result<SoftPd, Error> {
        match call(&self.function, "alloc_pd", Verb::AllocPd)? {
            Reply::Pd(pd) => {
                Ok(SoftPd(Arc::new(PdInner { function: self.function.clone(), number: pd })))
            }
            _ => Err(unexpected("alloc_pd")),
        }
    }

    fn reg_mr_iova(
        &self,
        pd: &SoftPd,
        memory: &DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<SoftMr, Error> {
        let memory = memory.clone();
        let verb = Verb::RegMr { pd: pd.number(), memory: memory.clone(), iova, access };
        match call(&self.function, "reg_mr", verb)? {
            Reply::Key(key) => Ok(SoftMr(Arc::new(MrInner { pd: pd.clone(), key, memory, iova }))),
            _ => Err(unexpected("reg_mr")),
        }
    }

    fn rereg_mr(&self, mut mr: SoftMr, change: Rereg<'_, Self>) -> Result<SoftMr, Error> {
        let inner = Arc::get_mut(&mut mr.0).ok_or_else(|| Error::Refused {
            verb: "rereg_mr",
            why: "other handles of the region exist; drop them first".to_string(),
        })?;
        let verb = Verb::ReregMr {
            key: inner.key,
            pd: change.pd.map(SoftPd::number),
            memory: change.memory.map(|memory| (memory.clone(), memory.addr())),
            access: change.access,
        };
        match call(&self.function, "rereg_mr", verb)? {
            Reply::Key(key) => inner.key = key,
            _ => return Err(unexpected("rereg_mr")),
        }
        if let Some(pd) = change.pd {
            inner.pd = pd.clone();
        }
        if let Some(memory) = change.memory {
            (inner.memory, inner.iova) = (memory.clone(), memory.addr());
        }
        Ok(mr)
    }

    fn alloc_mw(&self, pd: &SoftPd) -> Result<SoftMw, Error> {
        self.alloc_mws(pd, 1)?.pop().ok_or_else(|| unexpected("alloc_mws"))
    }

    fn alloc_mws(&self, pd: &SoftPd, count: usize) -> Result<Vec<SoftMw>, Error> {
        self.alloc_windows(pd, MwKind::Type2, count)
    }

    fn alloc_type1_mws(&self, pd: &SoftPd, count: usize) -> Result<Vec<SoftMw>, Error> {
        self.alloc_windows(pd, MwKind::Type1, count)
    }

    fn alloc_guarded_mws(
        &self,
        pd: &SoftPd,
        guards: &Guards<'_, Self>,
    ) -> Result<Vec<SoftMw>, Error> {
        let mut windows = Vec::with_capacity(guards.words.len());
        for words in guards.words.chunks(GUARDED_MWS_MAX as usize) {
            let (pd_number, region, mask) = (pd.number(), guards.region.key(), guards.mask);
            let words = words.to_vec();
            let verb = Verb::AllocGuardedMws { pd: pd_number, region, mask, words };
            let keys = call(&self.function, "alloc_guarded_mws", verb)?;
            windows.extend(pd.windows(keys, MwKind::Type1, Some(guards.region))?);
        }
        Ok(windows)
    }

    fn reg_engine_mr(
        &self,
        pd: &SoftPd,
        memory: &DmaMemory,
        access: Access,
        engine: Box<dyn RegionEngine>,
    ) -> Result<SoftMr, Error> {
        if !self.caps().has(Feature::RegionEngines) {
            return Err(Error::Unsupported {
                attempt: "registering a region behind an engine".into(),
                why: "the NIC runs in another process, and an engine is code of that process; \
                      register the region there"
                    .into(),
            });
        }
        let (pd, memory) = (pd.clone(), memory.clone());
        let region = EngineRegion { pd: pd.number(), memory: memory.clone(), access, engine };
        let key = self.function.reg_engine_mr(region).map_err(refused("reg_engine_mr"))?;
        Ok(SoftMr(Arc::new(MrInner { pd, key, memory, iova: 0 })))
    }

    fn create_cq(&self, attr: CqAttr) -> Result<SoftCq, Error> {
        SoftCq::create(&self.function, &attr)
    }

    fn create_srq(&self, pd: &SoftPd, attr: ReceiveAttr) -> Result<SoftSrq, Error> {
        SoftSrq::create(pd, &attr)
    }

    fn create_qp(&self, pd: &SoftPd, attr: QpAttr<'_, Self>) -> Result<SoftQp, Error> {
        SoftQp::create(pd, &attr, Managed::default())
    }
}

impl SoftNic {
    fn alloc_windows(&self, pd: &SoftPd, kind: MwKind, count: usize) -> Result<Vec<SoftMw>, Error> {
        let mut windows = Vec::with_capacity(count);
        while windows.len() < count {
            let batch = (count - windows.len()).min(MWS_MAX as usize) as u32;
            let verb = Verb::AllocMws { pd: pd.number(), kind, count: batch };
            windows.extend(pd.windows(call(&self.function, "alloc_mws", verb)?, kind, None)?);
        }
        Ok(windows)
    }
}

impl DirectNic for SoftNic {
    fn create_managed_qp(
        &self,
        pd: &SoftPd,
        attr: QpAttr<'_, Self>,
        managed: Managed,
    ) -> Result<SoftQp, Error> {
        SoftQp::create(pd, &attr, managed)
    }

    fn query_key(&self, key: Key) -> Result<KeyInfo, Error> {
        match call(&self.function, "query_key", Verb::QueryKey { index: key.index() })? {
            Reply::KeyInfo(info) => Ok(info),
            _ => Err(unexpected("query_key")),
        }
    }

    fn cq_count(&self, cq: &SoftCq) -> Result<u32, Error> {
        match call(&self.function, "cq_count", Verb::CqCount { cqn: cq.cqn() })? {
            Reply::Count(count) => Ok(count),
            _ => Err(unexpected("cq_count")),
        }
    }
}

/// A protection domain.
#[derive(Clone)]
pub struct SoftPd(Arc<PdInner>);

struct PdInner {
    function: Function,
    number: Pdn,
}

impl SoftPd {
    fn number(&self) -> Pdn {
        self.0.number
    }

    fn function(&self) -> &Function {
        &self.0.function
    }

    /// Wraps the windows that a verb has allocated.
    fn windows(
        &self,
        reply: Reply,
        kind: MwKind,
        guards: Option<&SoftMr>,
    ) -> Result<impl Iterator<Item = SoftMw>, Error> {
        let Reply::Keys(keys) = reply else { return Err(unexpected("alloc_mws")) };
        let (pd, guards) = (self.clone(), guards.cloned());
        Ok(keys.into_iter().map(move |key| {
            SoftMw(Arc::new(MwInner { pd: pd.clone(), key, kind, _guards: guards.clone() }))
        }))
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // A NIC that is gone has freed the PD already.
        let _ = self.function.execute(Verb::DeallocPd { pd: self.number });
    }
}

/// A memory region.
#[derive(Clone)]
pub struct SoftMr(Arc<MrInner>);

struct MrInner {
    pd: SoftPd,
    key: Key,
    memory: DmaMemory,
    iova: u64,
}

impl MemoryRegion for SoftMr {
    fn key(&self) -> Key {
        self.0.key
    }

    fn memory(&self) -> &DmaMemory {
        &self.0.memory
    }

    fn iova(&self) -> u64 {
        self.0.iova
    }
}

impl Drop for MrInner {
    fn drop(&mut self) {
        // Refused while windows are bound to the region: the NIC then keeps the memory until the
        // function ends.
        let _ = self.pd.function().execute(Verb::DeregMr { key: self.key });
    }
}

/// A memory window.
#[derive(Clone)]
pub struct SoftMw(Arc<MwInner>);

struct MwInner {
    pd: SoftPd,
    key: Key,
    kind: MwKind,
    /// The region that holds the guard word.
    _guards: Option<SoftMr>,
}

impl MemoryWindow for SoftMw {
    fn key(&self) -> Key {
        self.0.key
    }

    fn kind(&self) -> MwKind {
        self.0.kind
    }
}

impl Drop for MwInner {
    fn drop(&mut self) {
        // A NIC that is gone has freed the window already.
        let _ = self.pd.function().execute(Verb::DeallocMw { key: self.key });
    }
}

/// Executes a verb and puts the verb's name into an error.
fn call(function: &Function, verb: &'static str, what: Verb<DmaMemory>) -> Result<Reply, Error> {
    function.execute(what).map_err(refused(verb))
}

/// Converts a port's error into an error of `verb`.
fn refused(verb: &'static str) -> impl Fn(PortError) -> Error {
    move |e| match e {
        PortError::Verb(e) => Error::Refused { verb, why: e.to_string() },
        PortError::Refused { why } => Error::Refused { verb, why },
        e @ PortError::NotDma { .. } => Error::Refused { verb, why: e.to_string() },
        e => system(verb)(e),
    }
}

/// Converts a port's error into an error of `attempt`.
fn system(attempt: &'static str) -> impl Fn(PortError) -> Error {
    move |e| match e {
        PortError::System { attempt: call, source } => {
            Error::System { attempt: format!("{attempt}: {call}"), source }
        }
        PortError::Gone { why } => Error::Gone { attempt: attempt.to_string(), why },
        PortError::Unanswered { waited } => {
            let (attempt, peer) = (attempt.to_string(), "the NIC".to_string());
            Error::Unanswered { attempt, peer, waited }
        }
        e => Error::Refused { verb: attempt, why: e.to_string() },
    }
}

fn unexpected(verb: &'static str) -> Error {
    Error::Refused { verb, why: "the NIC's reply is of another verb".to_string() }
}
