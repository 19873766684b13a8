//! The software NIC behind the verbs: one data path, whoever runs the engine.
//!
//! ```text
//!  SoftQp --WQE--> send ring --doorbell--> engine --CQE--> CQ ring --> SoftCq
//! ```
//!
//! What differs between the ports stands in [`rnic::port`]; here it is one `match` at the doorbell.

mod cq;
mod qp;
mod queue;
mod work;

use std::path::Path;
use std::sync::Arc;

use rnic::ids::Pdn;
use rnic::port::control::{MWS_MAX, Reply, Verb};
use rnic::port::inline::InlineNic;
use rnic::port::{Error as PortError, Function, shm};
use rnic::verbs::{Limits, MwKind};

pub use cq::SoftCq;
pub use qp::{SoftQp, SoftSrq};

use crate::direct::{DirectNic, KeyInfo, Managed};
use crate::{
    Access, Caps, CompletionQueue, CqAttr, DmaMemory, Error, Key, MemoryRegion, MemoryWindow, Nic,
    QpAttr, ReceiveAttr,
};

/// The most building blocks of a send queue, and receive WQEs of a managed receive queue.
const MAX_QUEUE: u32 = 1 << 15;
/// The most entries of a CQ or of a receive queue that is not managed.
const MAX_ENTRIES: u32 = 1 << 21;

/// A function of a software NIC.
#[derive(Clone)]
pub struct SoftNic {
    function: Function,
}

impl SoftNic {
    /// A new NIC that its callers run: no thread, no socket.
    pub fn inline() -> Self {
        Self { function: Function::Inline(InlineNic::new(Limits::default()).physical()) }
    }

    /// A new NIC in a thread of this process, to which other processes can attach: its physical
    /// function, and the handle that makes sessions for others.
    pub fn host() -> Result<(Self, shm::Host), Error> {
        let host =
            shm::Host::start(Limits::default()).map_err(system("starting the NIC's thread"))?;
        let nic = Self { function: Function::Local(host.physical()) };
        Ok((nic, host))
    }

    /// Attaches to the NIC of the process that serves the socket at `path`.
    pub fn attach(path: impl AsRef<Path>) -> Result<Self, Error> {
        let attached =
            shm::Attached::connect(path.as_ref()).map_err(system("attaching to a NIC"))?;
        Ok(Self { function: Function::Attached(attached) })
    }

    /// The verbs of a function that was opened otherwise.
    pub fn new(function: Function) -> Self {
        Self { function }
    }

    /// The function below the verbs.
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
            max_sges: work::MAX_SGES as u32,
            max_inline: work::MAX_INLINE as u32,
            max_queue: MAX_QUEUE,
        }
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        self.function.alloc_dma(bytes).map_err(system("allocating memory for the NIC"))
    }

    fn alloc_pd(&self) -> Result<SoftPd, Error> {
        match call(&self.function, "alloc_pd", Verb::AllocPd)? {
            Reply::Pd(pd) => {
                Ok(SoftPd(Arc::new(PdInner { function: self.function.clone(), number: pd })))
            }
            _ => Err(unexpected("alloc_pd")),
        }
    }

    fn reg_mr(&self, pd: &SoftPd, memory: &DmaMemory, access: Access) -> Result<SoftMr, Error> {
        let verb =
            Verb::RegMr { pd: pd.number(), memory: memory.clone(), iova: memory.addr(), access };
        match call(&self.function, "reg_mr", verb)? {
            Reply::Key(key) => {
                Ok(SoftMr(Arc::new(MrInner { pd: pd.clone(), key, memory: memory.clone() })))
            }
            _ => Err(unexpected("reg_mr")),
        }
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
            match call(&self.function, "alloc_mws", verb)? {
                Reply::Keys(keys) if keys.len() == batch as usize => windows.extend(
                    keys.into_iter().map(|key| SoftMw(Arc::new(MwInner { pd: pd.clone(), key }))),
                ),
                _ => return Err(unexpected("alloc_mws")),
            }
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
            Reply::KeyInfo(info) => Ok(KeyInfo {
                key: Key::new(key.index(), info.tag),
                bound_to: (info.qpn != crate::Qpn::NONE).then_some(info.qpn),
                start: info.start,
                len: info.len,
            }),
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
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // A NIC that is gone has no PD any more.
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
}

impl MemoryRegion for SoftMr {
    fn key(&self) -> Key {
        self.0.key
    }

    fn memory(&self) -> &DmaMemory {
        &self.0.memory
    }
}

impl Drop for MrInner {
    fn drop(&mut self) {
        // Refused while windows are bound to it: then the NIC keeps the memory, until the function
        // ends.
        let _ = self.pd.function().execute(Verb::DeregMr { key: self.key });
    }
}

/// A memory window.
#[derive(Clone)]
pub struct SoftMw(Arc<MwInner>);

struct MwInner {
    pd: SoftPd,
    key: Key,
}

impl MemoryWindow for SoftMw {
    fn key(&self) -> Key {
        self.0.key
    }
}

impl Drop for MwInner {
    fn drop(&mut self) {
        // A NIC that is gone has no window any more.
        let _ = self.pd.function().execute(Verb::DeallocMw { key: self.key });
    }
}

/// Executes a verb, with its name in the error.
fn call(function: &Function, verb: &'static str, what: Verb<DmaMemory>) -> Result<Reply, Error> {
    function.execute(what).map_err(|e| match e {
        PortError::Verb(e) => Error::Refused { verb, why: e.to_string() },
        PortError::Refused { why } => Error::Refused { verb, why },
        e @ PortError::NotDma { .. } => Error::Refused { verb, why: e.to_string() },
        e => system(verb)(e),
    })
}

/// What a port's error is to who attempted `attempt`.
fn system(attempt: &'static str) -> impl Fn(PortError) -> Error {
    move |e| match e {
        PortError::System { attempt: call, source } => {
            Error::System { attempt: format!("{attempt}: {call}"), source }
        }
        PortError::Gone { why } => Error::Gone { attempt: attempt.to_string(), why },
        e => Error::Refused { verb: attempt, why: e.to_string() },
    }
}

fn unexpected(verb: &'static str) -> Error {
    Error::Refused { verb, why: "the answer is not one to this verb".to_string() }
}
