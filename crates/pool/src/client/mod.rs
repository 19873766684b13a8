//! The compute node: a [`Pool`] from which chunks are allocated and through which they are reached.
//!
//! - A *group* is a set of QPs, one per *lane*, with a CQ of their own; by default there is one
//!   group for each core (OneSidedMW §5.1). A grant is for the QPs of one group: whoever uses it,
//!   its requests go there.
//! - Ranges are checked before anything is posted. The NIC checks them again.
//! - Every operation exists as a future and blocking. Blocking calls spin briefly, then sleep; they
//!   must not be made by futures that run under [`fabric::executor::block_on`].

mod access;
mod batch;
mod buffer;
pub mod control;
mod embedded;
mod finish;
mod inner;
mod operation;
mod path;

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use fabric::executor::block_on;
use fabric::soft::SoftNic;
use fabric::{Access, Error as VerbsError, MemoryRegion, Nic};
use parking_lot::Mutex;

pub use batch::{Batch, Transfer};
pub use buffer::Buffer;
pub use embedded::Embedded;
pub use operation::Operation;

use self::buffer::Bounce;
use self::control::{ControlPlane, SocketControl, until_admitted};
use self::embedded::LocalControl;
use self::finish::Finish;
use self::inner::{Inner, Origin};
use self::path::Group;
use crate::any::AnyClient;
use crate::events::cores;
use crate::protocol::{Status, Welcome};
use crate::remote::RoceEnd;
use crate::scheme::{
    Admission, ClientScheme, Effort, Era, Grant, GroupId, QPS_MAX, WhenIdle, bulletin,
};
use crate::{Error, Remote, Settings};

/// How a compute node connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// QP groups; one per core if not given.
    pub groups: Option<u16>,
    /// Size of each access QP's send queue, in building blocks of 64 bytes: a power of two, at
    /// least 16. An operation takes one, a short write up to four.
    pub send_blocks: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { groups: None, send_blocks: 256 }
    }
}

/// A connection to a memory node, used by any number of threads. Clones share it; the last one
/// that is dropped gives everything back.
pub struct Pool<N: Nic = SoftNic> {
    inner: Arc<Inner<N>>,
}

impl<N: Nic> Clone for Pool<N> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

/// What a pool did since it was connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Chunks allocated.
    pub allocations: u64,
    /// Chunks freed.
    pub frees: u64,
    /// Allocations that found no free chunk.
    pub empty: u64,
    /// CASes that failed, of allocations that the compute node does itself ([`Pool::effort`] has more).
    pub cas_retries: u64,
    /// The most of these in one allocation.
    pub cas_retries_max: u64,
    /// READs.
    pub reads: u64,
    /// WRITEs.
    pub writes: u64,
    /// CAS and FAA.
    pub atomics: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
}

impl Pool<SoftNic> {
    /// A memory node inside this process, and one compute node connected to it: no socket, no
    /// other process.
    pub fn embedded(settings: Settings) -> Result<Self, Error> {
        Self::embedded_in(&Arc::new(Embedded::start(&settings)?), Options::default())
    }

    /// Another compute node of a memory node inside this process.
    pub fn embedded_in(embedded: &Arc<Embedded>, options: Options) -> Result<Self, Error> {
        let control = Box::new(LocalControl::new(embedded.clone()));
        let origin = Origin::Embedded(embedded.clone());
        Self::from(embedded.nic().clone(), control, options, origin)
    }

    /// Connects to the memory node that serves the socket at `path`.
    pub fn connect(path: impl AsRef<FilePath>, options: Options) -> Result<Self, Error> {
        let path = path.as_ref();
        until_admitted(|| {
            let control = SocketControl::connect(path)?;
            check_place(control.welcome())?;
            let nic = attach(path)?;
            let control = Box::new(control.with_nic(&nic));
            let origin = Origin::Socket(path.to_path_buf());
            Self::from(nic, control, options.clone(), origin)
        })
    }

    /// Connects to a memory node on another host, over RoCEv2: with the NIC of this host that `to` names, or with
    /// one of this process's own, which is a thread of it.
    pub fn connect_remote(to: &Remote, options: Options) -> Result<Self, Error> {
        until_admitted(|| Self::connect_remote_once(to, options.clone()))
    }

    fn connect_remote_once(to: &Remote, options: Options) -> Result<Self, Error> {
        let token = to.token()?;
        let mut nic = None;
        let control = SocketControl::connect_remote(&to.to, token.as_ref(), |link, welcome| {
            check_place(welcome)?;
            let attempt = || format!("opening the way to {}", to.to);
            let system = |source| Error::System { attempt: attempt(), source };
            let (opened, port) = match &to.nic {
                Some(local) => (SoftNic::attach(&local.socket)?, local.port),
                None => {
                    let local = link.as_remote().map(|link| link.local);
                    let local = local.ok_or_else(|| system(ErrorKind::NotConnected.into()))?;
                    let socket = UdpSocket::bind((local, 0)).map_err(system)?;
                    let port = socket.local_addr().map_err(system)?.port();
                    (SoftNic::over(socket)?, port)
                }
            };
            nic = Some(opened);
            RoceEnd::of(link, port).map(Some).map_err(|e| system(e.into()))
        })?;
        let nic = nic.expect("opened while it connected");
        Self::from(nic, Box::new(control), options, Origin::Remote(to.clone()))
    }

    /// Connects anew to where this pool was connected to, with the same options: after
    /// [`Error::Gone`], when the memory node has been started again. An error if nobody serves there
    /// yet.
    ///
    /// What was granted before belongs to the old connection: used with the new pool it is refused
    /// with [`Error::Stale`], also where its keys would fit by chance. This pool and its clones stay
    /// what they are; drop them.
    pub fn reconnect(&self) -> Result<Self, Error> {
        let options = self.inner.options.clone();
        match &self.inner.origin {
            Origin::Socket(path) => Self::connect(path, options),
            Origin::Remote(to) => Self::connect_remote(to, options),
            Origin::Embedded(embedded) => Self::embedded_in(embedded, options),
            Origin::Given => Err(Error::Setting {
                setting: "reconnect",
                value: "a pool over a NIC that was given to it".into(),
                why: "only who opened that NIC can open another; call Pool::over again".into(),
            }),
        }
    }
}

impl<N: Nic> Pool<N> {
    /// Connects over `nic` to the memory node that `control` leads to.
    pub fn over(nic: N, control: Box<dyn ControlPlane>, options: Options) -> Result<Self, Error> {
        Self::from(nic, control, options, Origin::Given)
    }

    fn from(
        nic: N,
        control: Box<dyn ControlPlane>,
        options: Options,
        origin: Origin,
    ) -> Result<Self, Error> {
        let welcome = control.welcome().clone();
        let groups = checked_groups(&options, &welcome)?;
        let pd = nic.alloc_pd()?;
        let ways = checked_ways(&welcome)?;
        // Replies to allocations come over access QPs then.
        let receives = if welcome.separation { 0 } else { welcome.credits };
        let groups = (0..groups)
            .map(|g| Group::new(&nic, &pd, GroupId(g), ways, options.send_blocks, receives))
            .collect::<Result<Vec<_>, _>>()?;
        let scheme = AnyClient::new(&nic, &pd, &welcome)?;
        let lent = |g: &Group<N>| (g.paths[0].qp().clone(), g.completer.clone());
        scheme.lend_access(&nic, &pd, welcome.credits, groups.iter().map(lent).collect())?;
        let memory = nic.alloc_dma(bulletin::BYTES)?;
        let bulletin = nic.reg_mr(&pd, &memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let at = bulletin.remote(0);
        let terms = control.admit(&Admission {
            management: scheme.management().iter().map(|q| q.raw()).collect(),
            groups: groups
                .iter()
                .map(|g| g.paths.iter().map(|p| p.qpn().raw()).collect())
                .collect(),
            bulletin_addr: at.addr,
            bulletin_rkey: at.rkey.0,
            ..Admission::default()
        })?;
        let bounce = Bounce::new(&nic, &pd)?;
        let mut inner = Inner {
            bounce,
            max_inline: nic.caps().max_inline as usize,
            burst: options.send_blocks as usize / 4,
            nic,
            pd,
            scheme,
            groups,
            bulletin,
            seen_empty: AtomicU32::new(0),
            era: Era { incarnation: welcome.incarnation, client: terms.client },
            terms,
            welcome,
            options,
            origin,
            held: AtomicU64::new(0),
            repair: Mutex::default(),
            watch: Mutex::default(),
            abandoned: Mutex::new(Vec::new()),
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            empty: AtomicU64::new(0),
            control,
        };
        inner.connect()?;
        let inner = Arc::new(inner);
        let pool = Arc::downgrade(&inner);
        let look = move || pool.upgrade().into_iter().for_each(|p| p.look_after_management());
        inner.scheme.when_idle(&(Arc::new(look) as WhenIdle));
        Ok(Self { inner })
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.inner.terms.chunk_bytes
    }

    /// QP groups of this compute node.
    pub fn groups(&self) -> u16 {
        self.inner.groups.len() as u16
    }

    /// Lanes of each group.
    pub fn lanes(&self) -> u8 {
        self.inner.groups[0].lanes()
    }

    /// This compute node's number at the memory node.
    pub fn client(&self) -> u32 {
        self.inner.terms.client
    }

    /// What the memory node said of itself first: scheme, sizes.
    pub fn welcome(&self) -> &Welcome {
        &self.inner.welcome
    }

    /// The NIC that this pool uses.
    pub fn nic(&self) -> &N {
        &self.inner.nic
    }

    /// Descriptors that the connection needs, for a thread with a descriptor table of its own: the
    /// control connection's. (The NIC's are its function's to name.)
    pub fn control_descriptors(&self) -> Vec<i32> {
        self.inner.control.descriptors()
    }

    /// The group of the core that the calling thread runs on now.
    pub fn current_group(&self) -> GroupId {
        let cpu = rustix::thread::sched_getcpu();
        GroupId((cpu % self.inner.groups.len()) as u16)
    }

    /// `bytes` of zeroed registered memory, rounded up to pages.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer<N>, Error> {
        Buffer::new(&self.inner.nic, &self.inner.pd, bytes, self.inner.era)
    }

    /// Allocates a chunk for the current core's group. It reads as zeros.
    ///
    /// Dropped before it ends, the chunk is freed as soon as it is there.
    pub async fn allocate(&self) -> Result<Grant, Error> {
        self.allocate_in(self.current_group()).await
    }

    /// Allocates a chunk for the QPs of `group`, like [`Pool::allocate`].
    pub async fn allocate_in(&self, group: GroupId) -> Result<Grant, Error> {
        self.allocate_some(group, None).await
    }

    /// Allocates at least `bytes` for the current core's group, like [`Pool::allocate`]: the grant says how
    /// many there are. Schemes with sizes ([`SchemeKind::has_sizes`](crate::SchemeKind::has_sizes)) have blocks of
    /// powers of two of chunks, up to what the pool has, and 2 GiB; of others an error says that a chunk does not hold as
    /// many.
    pub async fn allocate_bytes(&self, bytes: u64) -> Result<Grant, Error> {
        self.allocate_some(self.current_group(), Some(bytes)).await
    }

    /// [`Pool::allocate_bytes`] for the QPs of a given group.
    pub async fn allocate_bytes_in(&self, group: GroupId, bytes: u64) -> Result<Grant, Error> {
        self.allocate_some(group, Some(bytes)).await
    }

    async fn allocate_some(&self, group: GroupId, bytes: Option<u64>) -> Result<Grant, Error> {
        let (inner, undo) = (self.inner.clone(), self.inner.clone());
        let allocate = async move { inner.allocate_in(group, bytes).await };
        Finish::new::<N::Cq>(allocate, move |result| {
            if let Ok(grant) = result {
                // A memory node that is gone, or a connection that broke: it is not ours any more.
                let _ = block_on(undo.free(&grant));
            }
        })
        .await
    }

    /// Frees a chunk: when this returns, its keys are dead, and it is cleared and free; in schemes `finemem` and
    /// `rpc-mw-1` it is set aside until it can be. Nothing of it may be in flight any more. It is freed also if this is dropped before it ends.
    pub async fn free(&self, grant: Grant) -> Result<(), Error> {
        let inner = self.inner.clone();
        Finish::new::<N::Cq>(async move { inner.free(&grant).await }, drop).await
    }

    /// [`Pool::allocate`], blocking.
    pub fn allocate_blocking(&self) -> Result<Grant, Error> {
        self.allocate_in_blocking(self.current_group())
    }

    /// [`Pool::allocate_in`], blocking.
    pub fn allocate_in_blocking(&self, group: GroupId) -> Result<Grant, Error> {
        block_on(self.inner.allocate_in(group, None))
    }

    /// [`Pool::allocate_bytes`], blocking.
    pub fn allocate_bytes_blocking(&self, bytes: u64) -> Result<Grant, Error> {
        block_on(self.inner.allocate_in(self.current_group(), Some(bytes)))
    }

    /// [`Pool::free`], blocking.
    pub fn free_blocking(&self, grant: Grant) -> Result<(), Error> {
        block_on(self.inner.free(&grant))
    }

    /// Waits until the memory node has free chunks: true; or until `timeout` has passed: false. Another
    /// compute node may be faster in taking them.
    pub fn wait_for_memory_blocking(&self, timeout: Duration) -> Result<bool, Error> {
        let inner = &*self.inner;
        // The memory node's word by RDMA, if it is newer than the last "empty": no request then.
        let (state, generation) = inner.bulletin();
        let seen = inner.seen_empty.load(Ordering::Relaxed);
        if state == bulletin::AVAILABLE && generation != seen {
            inner.seen_empty.store(generation, Ordering::Relaxed);
            return inner.control.check_alive().map(|()| true);
        }
        inner.control.await_memory(timeout)
    }

    /// An error if its connection to the memory node is known to have ended. Asks nobody, and never waits.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        self.inner.control.check_alive()
    }

    /// What its allocations have cost in round trips and CASes, in schemes where it does them by CAS.
    pub fn effort(&self) -> Effort {
        self.inner.scheme.effort()
    }

    /// What this pool did.
    pub fn stats(&self) -> PoolStats {
        let inner = &*self.inner;
        let effort = inner.scheme.effort();
        let mut stats = PoolStats {
            cas_retries: effort.cas_retries,
            cas_retries_max: effort.cas_retries_max,
            allocations: inner.allocations.load(Ordering::Relaxed),
            frees: inner.frees.load(Ordering::Relaxed),
            empty: inner.empty.load(Ordering::Relaxed),
            ..PoolStats::default()
        };
        for counts in inner.groups.iter().map(|g| &g.counts) {
            stats.reads += counts.reads.load(Ordering::Relaxed);
            stats.writes += counts.writes.load(Ordering::Relaxed);
            stats.atomics += counts.atomics.load(Ordering::Relaxed);
            stats.bytes_read += counts.bytes_read.load(Ordering::Relaxed);
            stats.bytes_written += counts.bytes_written.load(Ordering::Relaxed);
        }
        stats
    }

    /// The memory node's state.
    pub fn node_status(&self) -> Result<Status, Error> {
        self.inner.control.status()
    }

    /// Has the memory node check that every chunk is exactly once free or owned. Exact only while
    /// nobody allocates or frees.
    pub fn audit(&self) -> Result<(), Error> {
        self.inner.control.audit()
    }

    /// The control plane.
    pub fn control(&self) -> &dyn ControlPlane {
        &*self.inner.control
    }
}

/// Whether there is a place, before QPs are made. Admission decides.
fn check_place(welcome: &Welcome) -> Result<(), Error> {
    match &welcome.full {
        None => Ok(()),
        Some(why) => {
            Err(Error::Full { attempt: "connecting to the memory node".into(), why: why.clone() })
        }
    }
}

/// Attaches to the NIC of the memory node at `path`, over a second connection. If that one is
/// ended, the memory node has as many as it takes.
fn attach(path: &FilePath) -> Result<SoftNic, Error> {
    let is_closed = |e: &ErrorKind| matches!(e, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
    SoftNic::attach(path).map_err(|error| match error {
        VerbsError::Gone { why, .. } => Error::NotAdmitted { why },
        VerbsError::System { attempt, source } if is_closed(&source.kind()) => {
            Error::NotAdmitted { why: format!("{attempt}: {source}") }
        }
        error => error.into(),
    })
}

/// Lanes, and functions of the memory node's NIC that windows are in.
fn checked_ways(welcome: &Welcome) -> Result<(u8, u8), Error> {
    let lanes = welcome.group_size.saturating_sub(1).max(1);
    let functions = welcome.functions.max(1);
    match (u8::try_from(lanes), u8::try_from(functions)) {
        (Ok(few), Ok(of)) if lanes * functions <= QPS_MAX => Ok((few, of)),
        _ => Err(Error::Protocol {
            attempt: "connecting to the memory node".into(),
            why: format!("it wants {lanes} lanes to each of {functions} functions of its NIC"),
        }),
    }
}

fn checked_groups(options: &Options, welcome: &Welcome) -> Result<u16, Error> {
    let setting = |setting, value: u32, why: String| Error::Setting {
        setting,
        value: value.to_string(),
        why,
    };
    let max = welcome.groups_max.min(u16::MAX as u32);
    let groups = match options.groups {
        Some(groups) => groups as u32,
        None => (cores() as u32).min(max),
    };
    if !(1..=max).contains(&groups) {
        let why = format!("the memory node gives a compute node 1 to {max}");
        return Err(setting("groups", groups, why));
    }
    let blocks = options.send_blocks;
    if !blocks.is_power_of_two() || !(16..=1 << 15).contains(&blocks) {
        return Err(setting("send_blocks", blocks, "a power of two from 16 to 32768".into()));
    }
    Ok(groups as u16)
}
