//! The compute node: a [`Pool`] allocates chunks and accesses them.
//!
//! - A *group* is a set of QPs, one per *lane*, with a CQ of their own; by default there is one
//!   group per core (OneSidedMW §5.1). A grant is bound to the QPs of one group: all accesses to it
//!   use these QPs, regardless of the calling thread.
//! - Ranges, rights and leases are checked before an operation is posted. The NIC checks them
//!   again.
//! - Every operation exists as a future and as a blocking call. Blocking calls spin briefly, then
//!   sleep; futures that run under [`verbs::executor::block_on`] must not make them.

mod access;
mod access_qp;
mod batch;
mod buffer;
mod by_rpc;
mod chunk_memory;
mod connect;
pub mod control;
mod detached;
mod embedded;
mod event_loop;
mod inner;
mod leases;
pub mod lend;
mod operation;
mod path;
mod restore;
mod sealed;
mod steps;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use verbs::completion::WhenIdle;
use verbs::executor::block_on;
use verbs::{Access, DmaMemory, MemoryRegion, Nic};

pub use batch::{Batch, Transfer};
pub use buffer::Buffer;
pub use chunk_memory::ChunkMemory;
pub use embedded::EmbeddedNode;
pub use operation::Operation;
pub use sealed::{SealedBlock, SealedError, SealedPool};
pub use steps::Step;

use self::access_qp::{AccessSizes, Group, note_failures};
use self::buffer::Bounce;
use self::connect::Reconnect;
use self::control::ControlPlane;
use self::detached::Detached;
use self::embedded::LocalControl;
use self::event_loop::sources;
use self::inner::Inner;
use self::leases::LeaseCounts;
use self::lend::Lendable;
use self::path::SPARES_MAX;
use self::restore::Restorer;
use crate::protocol::{NodeHello, Status};
use crate::{DefaultNic, Error, Scheme};
use scheme::options::SchemeOptions;
use scheme::registry::{ClientParts, ClientRegistry};
use scheme::{
    CasStats, ConnectRequest, ConnectionEpoch, DomainToken, Grant, GroupId, QPS_MAX, bulletin,
};
use units::cpus::cores;

/// Options of a compute node's connection.
///
/// ```
/// use pool::{EmbeddedNode, Options, Pool, Settings};
///
/// let settings = Settings { donate_bytes: 8 << 20, ..Settings::default() };
/// let node = EmbeddedNode::start(&settings)?;
/// let options = Options { groups: Some(1), ..Options::default() };
/// let pool = Pool::embedded_in(&node.into(), options)?;
/// assert_eq!(pool.groups(), 1);
/// # Ok::<(), pool::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of QP groups; by default one per core.
    pub groups: Option<u16>,
    /// Size of each access QP's send queue in building blocks of 64 bytes: a power of two, at least
    /// 16. An operation takes one block, a short write up to four.
    pub send_blocks: u32,
    /// The QPs of all lanes but the first complete to a CQ of their own, so that they can be lent
    /// to another process ([`Pool::lend_lanes`]).
    pub is_lendable: bool,
    /// Time within which the memory node answers, 1 ms to one hour. Afterwards a call that waits
    /// for it ends with [`Error::Unanswered`]: an access or a request after at least one second.
    pub answer_timeout: Duration,
    /// Operations that fail because the memory node does not answer re-establish nothing, and so
    /// never block: all operations fail from then on, until [`Pool::reestablish`] succeeds. For
    /// threads that must not block, such as event loops.
    pub defers_repair: bool,
    /// Token of the domain that the compute node joins, in schemes with leases
    /// ([`Others`](scheme::Others)). To a memory node on another host, the token is proved and not
    /// sent.
    pub domain: Option<DomainToken>,
    /// The compute node's own options of the scheme, by name. A scheme ignores the options of other
    /// schemes. Scheme `tdmem` has `local_bytes`: memory of the compute node that holds pages
    /// before the memory node does. Scheme `patronus` has `extend`: `cas` (the default) or `rpc`,
    /// the way in which leases are extended.
    pub scheme: SchemeOptions,
}

/// Default of [`Options::answer_timeout`].
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

impl Options {
    /// Checks the options that no other part checks.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        check_answer_timeout(self.answer_timeout)
    }
}

fn check_answer_timeout(limit: Duration) -> Result<(), Error> {
    scheme::require(
        (Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&limit),
        "answer_timeout",
        limit.as_millis(),
        "must be 1 ms to one hour",
    )
}

impl Default for Options {
    fn default() -> Self {
        let scheme = SchemeOptions::default();
        Self {
            groups: None,
            send_blocks: 256,
            is_lendable: false,
            answer_timeout: ANSWER_TIMEOUT,
            defers_repair: false,
            domain: None,
            scheme,
        }
    }
}

/// A connection to a memory node; any number of threads can use it. Clones share the connection;
/// dropping the last clone releases everything.
///
/// ```
/// use pool::{Pool, Settings};
///
/// let pool = Pool::embedded(Settings { donate_bytes: 8 << 20, ..Settings::default() })?;
/// let grant = pool.allocate_blocking()?;
/// pool.write_blocking(&grant, 0, &1u64.to_be_bytes())?;
/// assert_eq!(pool.compare_and_swap_blocking(&grant, 0, 1, 2)?, 1);
/// assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 5)?, 2);
/// pool.free_blocking(grant)?;
/// assert_eq!(pool.stats().frees, 1);
/// # Ok::<(), pool::Error>(())
/// ```
pub struct Pool<N: Nic = DefaultNic> {
    inner: Arc<Inner<N>>,
}

impl<N: Nic> Clone for Pool<N> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

/// Counters of a pool since it was connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Chunks and objects allocated.
    pub allocations: u64,
    /// Chunks and objects freed.
    pub frees: u64,
    /// Allocations that failed because no chunk was free.
    pub empty: u64,
    /// Failed CASes of allocations that the compute node executes itself ([`Pool::cas_stats`] has
    /// more).
    pub cas_retries: u64,
    /// Maximum number of failed CASes in one allocation.
    pub cas_retries_max: u64,
    /// READs.
    pub reads: u64,
    /// WRITEs.
    pub writes: u64,
    /// CAS and FAA operations.
    pub atomics: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Permissions acquired, with those of allocated objects.
    pub acquisitions: u64,
    /// Leases extended by CAS.
    pub extensions: u64,
    /// Leases renewed.
    pub renewals: u64,
    /// Permissions revoked.
    pub revocations: u64,
    /// Accesses and extensions that failed because the lease had ended.
    pub expiries: u64,
    /// Refused accesses after which a spare QP took the place of the broken QP.
    pub promotions: u64,
}

impl<N: Nic> Pool<N> {
    /// Connects over `nic` to the memory node that `control` is connected to.
    pub fn over(nic: N, control: Box<dyn ControlPlane>, options: Options) -> Result<Self, Error> {
        Self::over_with(nic, control, options, &schemes::clients())
    }

    /// Like [`Pool::over`], with the schemes in `clients`.
    pub fn over_with(
        nic: N,
        control: Box<dyn ControlPlane>,
        options: Options,
        clients: &ClientRegistry<N>,
    ) -> Result<Self, Error> {
        Self::from(nic, control, options, None, clients)
    }

    /// Connects another compute node to a memory node inside this process.
    pub fn embedded_in(embedded: &Arc<EmbeddedNode<N>>, options: Options) -> Result<Self, Error> {
        let control = Box::new(LocalControl::new(embedded.clone()));
        let node = embedded.clone();
        let again: Reconnect<N> = Arc::new(move |options| Self::embedded_in(&node, options));
        let nic = embedded.nic().clone();
        Self::from(nic, control, options, Some(again), embedded.clients())
    }

    /// Connects again to the memory node of this pool, with the same options. For use after
    /// [`Error::Gone`], when the memory node was restarted; an error while it is not running.
    ///
    /// Grants of this pool belong to the old connection. The new pool refuses them with
    /// [`Error::Stale`], even if their keys happen to match. This pool and its clones remain
    /// unusable; drop them.
    pub fn reconnect(&self) -> Result<Self, Error> {
        match &self.inner.reconnect {
            Some(again) => again(Options {
                answer_timeout: self.inner.control.answer_timeout(),
                ..self.inner.options.clone()
            }),
            None => Err(Error::Setting {
                setting: "reconnect",
                value: "a pool over a NIC that the caller supplied".into(),
                why: "the caller must open a new NIC and call Pool::over again".into(),
            }),
        }
    }

    /// Re-establishes all QPs after the memory node did not answer for a while. Operations in
    /// flight end as flushed, and none of them takes effect any more. Grants stay valid. Blocks
    /// for at most a few times [`Options::answer_timeout`].
    ///
    /// # Errors
    /// [`Error::Gone`] if the connection has ended, or the memory node still does not answer.
    pub fn reestablish(&self) -> Result<(), Error> {
        self.inner.reestablish()
    }

    /// Sets [`Options::answer_timeout`], also for calls that wait now.
    ///
    /// # Errors
    /// [`Error::Setting`] if the time is not 1 ms to one hour.
    pub fn set_answer_timeout(&self, limit: Duration) -> Result<(), Error> {
        check_answer_timeout(limit)?;
        self.inner.set_answer_timeout(limit);
        Ok(())
    }

    /// [`Options::defers_repair`] of this pool.
    pub fn defers_repair(&self) -> bool {
        self.inner.options.defers_repair
    }

    /// True if the memory node has not ended the connection, as far as this compute node knows.
    /// Then the chunks of the pool are as they were.
    pub fn is_connected(&self) -> bool {
        self.inner.control.check_alive().is_ok()
    }

    fn from(
        nic: N,
        control: Box<dyn ControlPlane>,
        options: Options,
        reconnect: Option<Reconnect<N>>,
        clients: &ClientRegistry<N>,
    ) -> Result<Self, Error> {
        options.validate()?;
        let welcome = control.welcome().clone();
        let (groups, sizes) = access_sizes(&options, &welcome)?;
        let pd = nic.alloc_pd()?;
        let (info, family) = clients.known(&welcome.offer.scheme)?;
        let sizes = AccessSizes { receives: family.access_receives(&welcome.offer), ..sizes };
        // The first queues of the NIC: these can be lent.
        let lendable = sizes.lendable_cq(&nic, groups)?;
        let groups = (0..groups)
            .map(|g| Group::new(&nic, &pd, GroupId(g), sizes, lendable.as_ref()))
            .collect::<Result<Vec<_>, _>>()?;
        note_failures(&groups, lendable.as_deref());
        let first = |g: &Group<N>| (g.paths[0].qps()[0].qp().clone(), g.completer.clone());
        let access: Vec<_> = groups.iter().map(first).collect();
        let (offer, own) = (&welcome.offer, &options.scheme);
        let parts = ClientParts { nic: &nic, pd: &pd, offer, access: &access, options: own };
        let scheme = family.client(&parts)?;
        let mut shared = false;
        scheme.each_queue(&mut |queue| shared |= queue.is_shared());
        let page_bytes = match scheme.access() {
            scheme::Access::OneSided | scheme::Access::ByRpc(_) => None,
            scheme::Access::Paged(pages) => Some(pages.page_bytes()),
        };
        let is_one_sided = matches!(scheme.access(), scheme::Access::OneSided);
        let sources = sources(&groups, lendable.as_deref(), &*scheme);
        let memory = nic.alloc_dma(bulletin::BYTES)?;
        let bulletin = nic.reg_mr(&pd, &memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let at = bulletin.remote(0);
        let terms = control.admit(&ConnectRequest {
            management: scheme.management().iter().map(|q| q.raw()).collect(),
            groups: groups.iter().map(|g| g.qps().map(|p| p.qpn().raw()).collect()).collect(),
            bulletin_addr: at.addr,
            bulletin_rkey: at.rkey.0,
            domain: options.domain,
            ..ConnectRequest::default()
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
            sources,
            lendable: lendable.map(Lendable::new),
            bulletin,
            seen_empty: AtomicU32::new(0),
            info,
            is_one_sided,
            page_bytes,
            shared,
            connection: ConnectionEpoch { incarnation: welcome.incarnation, client: terms.client },
            terms,
            welcome,
            options,
            reconnect,
            repair: Mutex::default(),
            silences: AtomicU64::new(0),
            probe: Mutex::default(),
            abandoned: Mutex::new(Vec::new()),
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            empty: AtomicU64::new(0),
            leases: LeaseCounts::default(),
            promotions: AtomicU64::new(0),
            restorer: Restorer::default(),
            control,
        };
        inner.connect()?;
        inner.set_answer_timeout(inner.options.answer_timeout);
        let inner = Arc::new(inner);
        let pool = Arc::downgrade(&inner);
        inner.restorer.set_pool(pool.clone());
        let probe = move || pool.upgrade().into_iter().for_each(|p| p.probe_management());
        inner.scheme.when_idle(&(Arc::new(probe) as WhenIdle));
        Ok(Self { inner })
    }

    /// Size of a chunk in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.inner.terms.chunk_bytes
    }

    /// Address of the memory node's first chunk. `grant.addr` minus this address is an offset that
    /// names the same memory for every compute node, for as long as the memory node runs. `None` in
    /// schemes with access by pages, where a grant does not name a place.
    pub fn first_chunk(&self) -> Option<u64> {
        self.inner.terms.first_chunk
    }

    /// A grant of the whole pool for the QPs of `group`: [`Pool::first_chunk`] is its address. Only
    /// in scheme `shared-region`, in which every compute node may reach every byte, also of chunks
    /// that other compute nodes own. The grant cannot be freed.
    pub fn whole_pool(&self, group: GroupId) -> Option<Grant> {
        let inner = &self.inner;
        inner.scheme.whole_pool(group).map(|grant| grant.with_connection(inner.connection))
    }

    /// Number of QP groups of this compute node.
    pub fn groups(&self) -> u16 {
        self.inner.groups.len() as u16
    }

    /// Number of lanes of each group.
    pub fn lanes(&self) -> u8 {
        self.inner.groups[0].lanes()
    }

    /// Number of this compute node at the memory node.
    pub fn client(&self) -> u32 {
        self.inner.terms.client
    }

    /// The memory node's first reply: scheme and sizes.
    pub fn welcome(&self) -> &NodeHello {
        &self.inner.welcome
    }

    /// The memory node's scheme.
    pub fn scheme(&self) -> Scheme {
        self.inner.info
    }

    /// The NIC that this pool uses.
    pub fn nic(&self) -> &N {
        &self.inner.nic
    }

    /// File descriptors of the control connection and of the NIC, for a thread with a descriptor
    /// table of its own.
    pub fn descriptors(&self) -> Vec<i32> {
        let mut all = self.inner.control.descriptors();
        all.extend(self.inner.nic.descriptors());
        all
    }

    /// The group of the core on which the calling thread runs now.
    pub fn current_group(&self) -> GroupId {
        let cpu = rustix::thread::sched_getcpu();
        GroupId((cpu % self.inner.groups.len()) as u16)
    }

    /// Registers `bytes` of zeroed memory, rounded up to pages.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer<N>, Error> {
        self.buffer_over(self.inner.nic.alloc_dma(bytes)?)
    }

    /// Registers memory that the NIC has allocated.
    pub(crate) fn buffer_over(&self, memory: DmaMemory) -> Result<Buffer<N>, Error> {
        Buffer::new(&self.inner.nic, &self.inner.pd, memory, self.inner.connection)
    }

    /// Allocates a chunk for the current core's group. It reads as zeros.
    ///
    /// If the future is dropped after its first poll, the chunk is freed as soon as it is
    /// allocated.
    pub async fn allocate(&self) -> Result<Grant, Error> {
        self.allocate_in(self.current_group()).await
    }

    /// Allocates a chunk for the QPs of `group`, like [`Pool::allocate`].
    pub async fn allocate_in(&self, group: GroupId) -> Result<Grant, Error> {
        self.allocate_some(group, None).await
    }

    /// Allocates at least `bytes` for the current core's group, like [`Pool::allocate`]; the grant
    /// has the actual length. Schemes with sizes
    /// ([`SchemeInfo::has_sizes`](scheme::SchemeInfo::has_sizes)) have blocks of a power of two of
    /// chunks, up to the pool's size and 2 GiB. Other schemes return an error if `bytes` exceeds a
    /// chunk.
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
        Detached::new::<N::Cq>(allocate, move |result| {
            if let Ok(grant) = result {
                // If this fails, the memory node has exited or the connection broke, and the chunk
                // is reclaimed there.
                let _ = block_on(undo.free(&grant));
            }
        })
        .await
    }

    /// Frees a chunk. When this returns, its keys are dead, and the chunk is cleared and free; in
    /// schemes `finemem` and `rpc-mw-1` it is in quarantine until then. No access to the chunk may
    /// be in flight. If the future is dropped after its first poll, the chunk is freed
    /// nevertheless.
    pub async fn free(&self, grant: Grant) -> Result<(), Error> {
        let inner = self.inner.clone();
        Detached::new::<N::Cq>(async move { inner.free(&grant).await }, drop).await
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

    /// Blocks until the memory node has a free chunk (true) or `timeout` has passed (false).
    /// Another compute node may allocate that chunk first.
    pub fn wait_for_memory_blocking(&self, timeout: Duration) -> Result<bool, Error> {
        let inner = &*self.inner;
        // If the bulletin reports free memory since the last failed allocation, no request is
        // needed.
        let (state, generation) = inner.bulletin();
        let seen = inner.seen_empty.load(Ordering::Relaxed);
        if state == bulletin::AVAILABLE && generation != seen {
            inner.seen_empty.store(generation, Ordering::Relaxed);
            return inner.control.check_alive().map(|()| true);
        }
        inner.control.await_memory(timeout)
    }

    /// An error if the control connection is known to have ended. Sends nothing and never blocks.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        self.inner.control.check_alive()
    }

    /// Round trips and CASes of its allocations, in schemes by CAS.
    pub fn cas_stats(&self) -> CasStats {
        CasStats::from(&*self.inner.scheme.counters())
    }

    /// Counters of this pool.
    pub fn stats(&self) -> PoolStats {
        let inner = &*self.inner;
        let effort = CasStats::from(&*inner.scheme.counters());
        let mut stats = PoolStats {
            cas_retries: effort.cas_retries,
            cas_retries_max: effort.cas_retries_max,
            allocations: inner.allocations.load(Ordering::Relaxed),
            frees: inner.frees.load(Ordering::Relaxed),
            empty: inner.empty.load(Ordering::Relaxed),
            promotions: inner.promotions.load(Ordering::Relaxed),
            ..PoolStats::default()
        };
        for counts in inner.groups.iter().map(|g| &g.counts) {
            stats.reads += counts.reads.load(Ordering::Relaxed);
            stats.writes += counts.writes.load(Ordering::Relaxed);
            stats.atomics += counts.atomics.load(Ordering::Relaxed);
            stats.bytes_read += counts.bytes_read.load(Ordering::Relaxed);
            stats.bytes_written += counts.bytes_written.load(Ordering::Relaxed);
        }
        inner.leases.fill(&mut stats);
        stats
    }

    /// Makes a broken QP of each lane a spare QP again. Returns false if there is none left.
    ///
    /// A thread of the pool does this after each refused access, so only programs with virtual time
    /// ([`verbs::CompletionQueue::VIRTUAL`]) need it.
    pub fn restore_spares(&self) -> bool {
        self.inner.restore_one()
    }

    /// The state of the memory node.
    pub fn node_status(&self) -> Result<Status, Error> {
        self.inner.control.status()
    }

    /// Makes the memory node check that every chunk is exactly once free or owned. Exact only while
    /// no compute node allocates or frees.
    pub fn audit(&self) -> Result<(), Error> {
        self.inner.control.audit()
    }

    /// The control plane.
    pub fn control(&self) -> &dyn ControlPlane {
        &*self.inner.control
    }
}

/// Number of groups, and the access QPs of a group, without receives.
fn access_sizes(options: &Options, welcome: &NodeHello) -> Result<(u16, AccessSizes), Error> {
    let groups = checked_groups(options, welcome)?;
    let (lanes, functions, spares) = checked_lanes(welcome)?;
    let (send_blocks, is_lendable) = (options.send_blocks, options.is_lendable);
    Ok((groups, AccessSizes { lanes, functions, spares, send_blocks, receives: 0, is_lendable }))
}

/// Number of lanes, of functions of the memory node's NIC that contain windows, and of spare QPs of
/// a lane.
fn checked_lanes(welcome: &NodeHello) -> Result<(u8, u8, u8), Error> {
    let lanes = welcome.offer.group_size.saturating_sub(1).max(1);
    let functions = welcome.offer.functions.max(1);
    let spares = welcome.offer.spares;
    // A spare QP takes the place of a QP to the same function.
    let has_spares = spares <= if functions == 1 { SPARES_MAX } else { 0 };
    match (u8::try_from(lanes), u8::try_from(functions)) {
        (Ok(lanes_u8), Ok(functions_u8))
            if has_spares && lanes * functions * (1 + spares) <= QPS_MAX =>
        {
            Ok((lanes_u8, functions_u8, spares as u8))
        }
        _ => Err(Error::Protocol {
            attempt: "connecting to the memory node".into(),
            why: format!(
                "it requires {lanes} lanes with {spares} spare QPs each to each of {functions} \
                 functions of its NIC"
            ),
        }),
    }
}

fn checked_groups(options: &Options, welcome: &NodeHello) -> Result<u16, Error> {
    let setting = |setting, value: u32, why: String| Error::Setting {
        setting,
        value: value.to_string(),
        why,
    };
    let max = welcome.offer.groups_max.min(u16::MAX as u32);
    let groups = match options.groups {
        Some(groups) => groups as u32,
        None => (cores() as u32).min(max),
    };
    if !(1..=max).contains(&groups) {
        let why = format!("must be 1 to {max}, the memory node's limit");
        return Err(setting("groups", groups, why));
    }
    let blocks = options.send_blocks;
    if !blocks.is_power_of_two() || !(16..=1 << 15).contains(&blocks) {
        return Err(setting(
            "send_blocks",
            blocks,
            "must be a power of two from 16 to 32768".into(),
        ));
    }
    Ok(groups as u16)
}
