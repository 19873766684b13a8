//! State of a pager, shared by its threads and by calls on the program's threads.
//!
//! | thread | tasks |
//! | --- | --- |
//! | handler (one) | reads events, brings pages in |
//! | worker (one) | takes pages out, writes them back, frees chunks |
//! | monitor (one) | reports waits for the pool, and thrashing ([`crate::monitor`]) |
//! | program's | map, unmap, protect and advise ([`crate::mapping`]) |
//!
//! Locks, in the order in which they may be taken: `space` (program's threads only), then those of
//! [`crate::pages`]. A thread that holds a lock or a BUSY bit has all signals blocked and does not
//! touch paged memory that may be missing.

use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use crate::advice::AdviceMap;
use crate::assist::link::Link;
use crate::awake::FaultTimes;
use crate::backing::Backing;
use crate::config::{Config, EXIT_PAGER, Paths};
use crate::errno::{Errno, MOVED};
use crate::extent::set_fences;
use crate::fingerprint::Fingerprints;
use crate::fork::inheritance::Inheritance;
use crate::fork::state::Forks;
use crate::fork::unseen::is_unseen_child;
use crate::leadership::Leadership;
use crate::lease::Lease;
use crate::memory::linux::{LinuxMemory, Way, WhyCopying};
use crate::node_sockets::{self, HandedOn, Sockets};
use crate::page_table::PageTable;
use crate::pages::overrun::Allowance;
use crate::pages::{Pages, Sizes};
use crate::policy::Name;
use crate::pool_transport;
use crate::region::{RangeSet, Region, Space};
use crate::run_memory::RunMemory;
use crate::slots::{self, Sealing};
use crate::stats::{Counter, Stats};
use crate::store::FileTransport;
use crate::sys::{self, FileSizeSignalBlocked, PAGE_BYTES, SignalsBlocked};
use crate::trace_recorder::Recorder;
use crate::transport::Transport;
use crate::uffd::{Features, Uffd};
use crate::unpaged::UnpagedMonitor;
use crate::{Error, descriptor, direct_transport};

/// The pager of the program that this process runs.
static CURRENT: AtomicPtr<Pager> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the pager of the program that this process runs, once it has one.
#[inline]
pub fn current() -> Option<&'static Pager> {
    // SAFETY: the pointer is set only to pagers that are never dropped.
    unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
}

/// Makes `pager` the one that [`current`] returns.
pub fn set_current(pager: &'static Arc<Pager>) {
    CURRENT.store(Arc::as_ptr(pager).cast_mut(), Ordering::Release);
    measure_at_exit();
}

/// Registers a call of [`Pager::measure_unpaged`] for the program's `exit`, once.
fn measure_at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    extern "C" fn at_exit() {
        if let Some(pager) = current().filter(|_| !is_unseen_child()) {
            pager.measure_unpaged(true);
            pager.note_at_exit();
        }
    }
    if !DONE.swap(true, Ordering::AcqRel) {
        // SAFETY: a function of this library, which is never unloaded.
        unsafe { libc::atexit(at_exit) };
    }
}

/// The options of the connection to each of `nodes` memory nodes.
fn connection(config: &Config, nodes: usize) -> pool::Options {
    let answer_timeout = Duration::from_secs(config.answer_s.into());
    let mut options = pool::Options { answer_timeout, ..pool::Options::default() };
    if config.tier_bytes > 0 {
        options.scheme.set("local_bytes", config.tier_bytes / nodes.max(1) as u64);
    }
    options
}

/// Opens the run's ledger if the processes of the run share its bound.
fn open_lease(config: &Config) -> Result<Option<Lease>, Error> {
    let Some(path) = config.run_memory.as_ref().filter(|_| config.shares_bound) else {
        return Ok(None);
    };
    RunMemory::of_this_process(path).and_then(Lease::open).map(Some).map_err(|source| {
        Error::System {
            what: format!(
                "share the bound of the run (--local): the program's parent has closed the \
                 inherited descriptor, and {} cannot be opened; with --local-each the process \
                 needs no such descriptor",
                path.display()
            ),
            source,
        }
    })
}

/// Returns the chunks that are encrypted: without `--seal` the overflow file, or the pool if that
/// is a file too.
fn sealing(config: &Config, must_seal: bool) -> Sealing {
    let key = slots::Key::new(config.seal.unwrap_or_default());
    match config.seal {
        None if !must_seal => Sealing::Overflow(key),
        _ => Sealing::All(key),
    }
}

/// Attempted operation in the error that a limit of the address space causes.
const ADDRESS_SPACE: &str = "reserve address space (RLIMIT_AS and RLIMIT_DATA, ulimit -v and -d, \
                             must be unlimited before a paged program starts)";

/// Seed of the replacement policy: always the same, so that a run can be repeated.
const POLICY_SEED: u64 = 1;

/// The thread that takes pages out, writes them back and reclaims their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reclaimer {
    /// The worker.
    Worker,
    /// The handler, after each fault. With two cores or fewer, the program and the NIC's polling
    /// thread occupy the cores, and a worker would keep the NIC from answering.
    Handler,
    /// The handler, within a fault that finds too little room.
    Fault,
}

impl Reclaimer {
    fn of(paths: Paths) -> Self {
        match paths {
            Paths::Linux => Self::Fault,
            Paths::Two | Paths::Fastswap if units::cpus::cores() <= 2 => Self::Handler,
            Paths::Two | Paths::Fastswap => Self::Worker,
        }
    }
}

/// Resources from which a pager is assembled.
pub(crate) struct PagerParts {
    pub uffd: Arc<Uffd>,
    pub fork_events: bool,
    pub region: Region,
    pub space: Space,
    pub unreadable: RangeSet,
    pub inheritance: Option<Inheritance>,
    pub sockets: Sockets,
    pub advice: Arc<AdviceMap>,
    /// This process's part of the run's bound; `None` if the bound is its own.
    pub lease: Option<Lease>,
}

/// A pager: one region and the extents beside it, their pages, and the threads that move them.
pub struct Pager {
    pub(crate) region: Region,
    pub(crate) config: Config,
    pub(crate) uffd: Arc<Uffd>,
    pub(crate) pages: Pages<LinuxMemory>,
    /// Trace of the faults, if it was asked for.
    pub(crate) trace: Option<Recorder>,
    space: Mutex<Space>,
    /// Advice of the program on its accesses.
    pub(crate) advice: Arc<AdviceMap>,
    /// Pages that the program needs soon, for the worker.
    pub(crate) advised_in: Mutex<Vec<Range<u32>>>,
    /// Pages that the program does not need soon, for the worker.
    pub(crate) advised_out: Mutex<Vec<Range<u32>>>,
    /// Pages that are mapped without PROT_READ.
    pub(crate) unreadable: Mutex<RangeSet>,
    /// Futex: incremented to wake the worker.
    pub(crate) worker_wakes: AtomicU32,
    pub(crate) worker_sleeps: AtomicU32,
    /// Futex on which the monitor sleeps. No thread wakes it.
    pub(crate) monitor_wakes: AtomicU32,
    pub(crate) leadership: Leadership,
    /// Where a thread of `granary run` keeps the second core awake, the page that it reads.
    pub(crate) fault_times: Option<FaultTimes>,
    pub(crate) forks: Forks,
    pub(crate) fork_events: bool,
    /// The thread that does the asynchronous path's work on pages.
    pub(crate) reclaimer: Reclaimer,
    /// Descriptors by which forked children reach the memory nodes.
    pub(crate) sockets: Sockets,
    pub(crate) enter: OnceLock<fn()>,
    /// Schedule and result of the measurements of unpaged memory.
    pub(crate) unpaged_monitor: UnpagedMonitor,
}

impl Pager {
    /// Sets up a pager over `transport`, without threads. [`Pager::start`] starts the threads.
    ///
    /// # Errors
    /// userfaultfd is not permitted, address space is short, or the bound is too small for the
    /// transport's frames.
    pub fn new(config: &Config, transport: Box<dyn Transport>) -> Result<Arc<Self>, Error> {
        config.check()?;
        let system = |what: &str| {
            let what = what.to_string();
            move |source| Error::System { what, source }
        };
        // First, because a process that has changed its user opens userfaultfds by the device that
        // it was handed.
        let sockets = Sockets::open(&config.pool, config.handed.as_deref());
        let (uffd, fork_events) = match Uffd::open(Features { fork_events: true }) {
            Ok(uffd) => (uffd, true),
            Err(Error::UserfaultfdApi(_)) => (Uffd::open(Features::default())?, false),
            Err(error) => return Err(error),
        };
        let moved = { descriptor::move_high(uffd.as_raw_fd()) };
        let uffd = moved.map_err(system("move the userfaultfd to a high number"))?;
        let uffd = Arc::new(Uffd::from_fd(uffd));
        let region = Region::reserve(config.region_bytes).map_err(system(ADDRESS_SPACE))?;
        // Without fork events, a fork copies the region only for a child that registers it
        // (`fork::child_setup`).
        region.prepare(region.base(), region.len(), fork_events);
        // SAFETY: the region belongs to this pager and is still empty.
        unsafe {
            let arena = region.arena().len() * PAGE_BYTES;
            sys::mprotect(region.base(), arena, libc::PROT_READ | libc::PROT_WRITE)
                .map_err(system(ADDRESS_SPACE))?;
            uffd.register(region.base(), region.len())
                .map_err(system("register the region with userfaultfd"))?;
        }
        let (space, unreadable) = (region.space(), RangeSet::default());
        let advice = AdviceMap::new().map_err(system("map the table of advice"))?;
        let parts = PagerParts {
            uffd,
            fork_events,
            region,
            space,
            unreadable,
            inheritance: None,
            sockets,
            advice: Arc::new(advice),
            lease: open_lease(config)?,
        };
        let pager = Self::assemble(config, transport, parts)?;
        if let Some(why @ WhyCopying::FailedTest(_)) = pager.pages.memory.why_copying() {
            sys::say(&format!("pages are copied and not moved, which is slower: {why}"));
        }
        Ok(pager)
    }

    /// Assembles a pager from its resources.
    pub(crate) fn assemble(
        config: &Config,
        transport: Box<dyn Transport>,
        parts: PagerParts,
    ) -> Result<Arc<Self>, Error> {
        let system = |what: &str| {
            let what = what.to_string();
            move |source| Error::System { what, source }
        };
        let PagerParts {
            uffd,
            fork_events,
            region,
            space,
            unreadable,
            inheritance,
            sockets,
            advice,
            lease,
        } = parts;
        let table =
            PageTable::new(region.numbers() as usize).map_err(system("map the page table"))?;
        set_fences(&table, &space.unused);
        let frames = transport.frames();
        // A forked child must not share the frames with the NIC.
        // SAFETY: changes only whether a fork copies the frames.
        let _ = unsafe {
            let bytes = frames.frames as usize * PAGE_BYTES;
            sys::madvise(frames.base as usize, bytes, libc::MADV_DONTFORK)
        };
        let too_small = Error::LocalTooSmall { bytes: config.local_bytes };
        let sizes = Sizes::new(config.local_bytes).with_frames(frames.frames).ok_or(too_small)?;
        let sizes = match config.policy {
            Name::Segmented => sizes.with_keep(config.policy.shelf_pages(sizes.limit)),
            _ => sizes,
        };
        let memory = LinuxMemory::new(uffd.clone(), &region, sizes.positions, config.pages)?;
        let sizes = sizes.with_slack(memory.slack_pages());
        let reserved = frames.frames - sizes.window_frames() + memory.slack_pages();
        let sizes = Sizes { limit: sizes.limit.min(region.pages()), ..sizes };
        let blocked = FileSizeSignalBlocked::new();
        // Without the run's memory, or with too many processes, the counters are private.
        let shared = config.run_memory.as_deref().map(RunMemory::of_this_process);
        let stats = match shared.and_then(|shared| Stats::shared(shared.ok()?)) {
            Some(stats) => stats,
            None => Stats::private().map_err(system("map the counters"))?,
        };
        let trace = match &config.trace {
            Some(prefix) => match Recorder::create(prefix, region.numbers()) {
                Ok(recorder) => Some(recorder),
                // A forked child goes on without a trace.
                Err(_) if inheritance.is_some() => None,
                Err(error) => return Err(system("create the trace of the faults")(error)),
            },
            None => None,
        };
        drop(blocked);
        stats.set(Counter::ChunkBytes, transport.chunk_bytes() as u64);
        stats.set(Counter::DirectProcesses, transport.stats().is_direct.into());
        stats.record_way(memory.why_copying());
        let fingerprints = Fingerprints::new().map_err(system("get random numbers"))?;
        let policy = config
            .policy
            .policy(sizes.limit, table.len() as u32, POLICY_SEED)
            .map_err(system("map the order of eviction"))?;
        let backing = Backing::new(transport, config.overflow_directory.clone(), inheritance);
        let pages = Pages::new(table, memory, backing, stats, sizes, fingerprints, policy)
            .with_paths(config.paths);
        pages.stats.set(Counter::ProcessesSealing, config.seal.is_some().into());
        let must_seal = pages.backing.must_seal();
        crate::patience::set_limit(config.wait_s);
        let allowance = Allowance {
            local_bytes: config.local_bytes,
            time_ns: u64::from(config.pinned_s) * 1_000_000_000,
            wait_s: config.wait_s,
        };
        let pages = pages.with_allowance(allowance).with_sealing(sealing(config, must_seal));
        let random = slots::kernel_random().map_err(system("get random numbers"))?;
        pages.slots().hide(config.hide, random);
        let pages = match lease {
            Some(lease) => pages.with_lease(lease, reserved),
            None => pages,
        };
        // Without the page, faults are only slower.
        let fault_times =
            config.fault_times.as_deref().and_then(|path| FaultTimes::open(path).ok());
        Ok(Arc::new(Self {
            config: config.clone(),
            uffd,
            pages,
            unreadable: Mutex::new(unreadable),
            trace,
            space: Mutex::new(space),
            advice,
            advised_in: Mutex::default(),
            advised_out: Mutex::default(),
            region,
            worker_wakes: AtomicU32::new(0),
            worker_sleeps: AtomicU32::new(0),
            monitor_wakes: AtomicU32::new(0),
            leadership: Leadership::default(),
            fault_times,
            forks: Forks::default(),
            fork_events,
            reclaimer: Reclaimer::of(config.paths),
            sockets,
            enter: OnceLock::new(),
            unpaged_monitor: UnpagedMonitor::default(),
        }))
    }

    /// Opens the backing memory that `config` names, with as many frames as its bound needs: memory
    /// nodes (`direct_transport`, [`pool_transport`]), or a file for diagnosis
    /// ([`crate::store`]).
    pub fn open_transport(config: &Config) -> Result<Box<dyn Transport>, Error> {
        let frames = Sizes::new(config.local_bytes).frames();
        if FileTransport::is_named_by(&config.pool) {
            return Ok(Box::new(FileTransport::open(&config.pool, frames)?));
        }
        let pool = match &config.handed {
            Some(handed) => node_sockets::reachable_list(&config.pool, handed)?,
            None => config.pool.clone(),
        };
        let nodes = pool::Address::list(&pool).map_err(|why| Error::Setting {
            name: "GRANARY_POOL",
            value: config.pool.clone(),
            why,
        })?;
        let blocked = FileSizeSignalBlocked::new();
        let opened = match (config.is_direct, Self::link(config)) {
            (true, Some(link)) => direct_transport::connect_with_assist(&nodes, frames, link),
            (true, None) => direct_transport::connect(&nodes, frames),
            (false, Some(link)) => pool_transport::connect_with_assist(&nodes, frames, link),
            (false, None) => {
                let options = connection(config, nodes.len());
                pool_transport::connect_with(&nodes, frames, &options)
                    .map(|pool| Box::new(pool) as _)
            }
        };
        match opened {
            Ok(transport) => Ok(transport),
            Err(_) if blocked.was_raised() => {
                Err(Error::FileSizeLimit { limit_bytes: sys::file_size_limit() })
            }
            Err(error) => Err(error),
        }
    }

    /// Connects to the assist of the run. `None` without an assist: then the process itself moves
    /// its pages.
    fn link(config: &Config) -> Option<Arc<Link>> {
        let directory = config.run_directory.as_ref().filter(|_| config.has_assist)?;
        Link::connect(directory).ok().map(Arc::new)
    }

    /// Returns the region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the counters.
    pub fn stats(&self) -> &Stats {
        &self.pages.stats
    }

    /// Returns true if the user wants programs to run that may stop the pager.
    pub fn allows_unpaged(&self) -> bool {
        self.config.allow_unpaged
    }

    /// Returns true if the kernel moves pages, and false if the pager copies them.
    pub fn moves_pages(&self) -> bool {
        self.pages.memory.way() == Way::Move
    }

    /// Returns true if the kernel reports forks of this process to the pager.
    pub fn reports_forks(&self) -> bool {
        self.fork_events
    }

    /// Returns the descriptors that a program needs which the calling thread executes after it has
    /// changed its user. Does not allocate.
    pub fn to_hand_on(&self) -> Option<HandedOn<'_>> {
        self.sockets.to_hand_on()
    }

    /// Returns the number of pages that are present: resident, or on the shelf.
    pub fn present(&self) -> u32 {
        self.pages.present()
    }

    /// Returns the number of pages that are mapped in the region.
    pub fn resident(&self) -> u32 {
        self.pages.state().resident
    }

    /// Returns the number of pages that may be present: resident, or on the shelf.
    pub fn limit(&self) -> u32 {
        self.pages.state().limit
    }

    /// Locks the address space.
    ///
    /// # Errors
    /// `MOVED` if another pager has replaced this one.
    pub(crate) fn space(&self) -> Result<MutexGuard<'_, Space>, Errno> {
        let space = self.space.lock().expect("no thread panics while it holds this lock");
        if self.forks.is_promoted() { Err(MOVED) } else { Ok(space) }
    }

    /// Locks the set of pages that are mapped without PROT_READ. Held only by threads that hold
    /// `space`.
    pub(crate) fn unreadable(&self) -> MutexGuard<'_, RangeSet> {
        self.unreadable.lock().expect("no thread panics while it holds this lock")
    }

    /// Measures unpaged memory if it seems to have changed, and records the result. Returns true if
    /// it was measured.
    pub(crate) fn measure_unpaged(&self, at_exit: bool) -> bool {
        let is_own =
            |range: &Range<usize>| self.region.contains(range.start) || sys::is_own_mapping(range);
        // A thread of the parent may have held the state's lock at the fork; then the copy of the
        // lock in a light child is never released.
        let present = match self.forks.is_light() {
            true => self.stats().get(Counter::ResidentPages) as u32,
            false => self.pages.present(),
        };
        let measured = self.unpaged_monitor.measure(at_exit, present, is_own);
        if let Some(usage) = &measured {
            self.stats().record_unpaged(usage, !self.forks.is_light());
        }
        measured.is_some()
    }

    /// Updates the counters that the worker updates at intervals. A light child has its parent's.
    fn note_at_exit(&self) {
        if !self.forks.is_light() {
            let _blocked = SignalsBlocked::new();
            self.pages.update_gauges();
        }
    }

    /// Ends the process because a necessary operation failed. Continuing could expose wrong data to
    /// the program.
    pub(crate) fn fatal(&self, what: &str, error: &std::io::Error) -> ! {
        sys::die(
            EXIT_PAGER,
            &format!(
                "cannot {what}: {error}; process {} ends now (status {EXIT_PAGER})",
                descriptor::program()
            ),
        )
    }
}
