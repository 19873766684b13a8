//! State of a pager, shared by its threads and by calls on the program's threads.
//!
//! | thread | tasks |
//! | --- | --- |
//! | handler (one) | reads events, brings pages in |
//! | evictor (one) | takes pages out, writes them back, frees chunks |
//! | program's | map, unmap, protect and advise ([`crate::mapping`]) |
//!
//! Locks, in the order in which they may be taken: `space` (program's threads only), `evict_lock`
//! (program's threads and evictor), then a page's BUSY bit, then `slots` or `residency`. The
//! handler takes `evict_lock` only to follow a fork or to evict, with no page BUSY. A thread that
//! holds a lock or a BUSY bit has all signals blocked and does not touch paged memory that may be
//! missing.
//!
//! Room: `resident` counts the pages that are resident or about to be. It is raised before a page
//! is mapped and never passes `limit`, except for pages of a forking thread.

use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};

use crate::config::{self, Config, EXIT_PAGER, EXIT_POOL_GONE};
use crate::errno::{Errno, MOVED};
use crate::fork::inheritance::Inheritance;
use crate::fork::state::Forks;
use crate::node_sockets::Sockets;
use crate::page_table::{PageId, PageTable};
use crate::pool_transport;
use crate::region::{RangeSet, Region, Space};
use crate::residency::Residency;
use crate::slots::{ChunkLocation, Emptied, SlotId, Slots};
use crate::staging::{FrameId, Staging};
use crate::stats::{Counter, Stats};
use crate::store::{FileStore, FileTransport};
use crate::streams::Streams;
use crate::sys::{self, FileSizeSignalBlocked, PAGE_BYTES};
use crate::trace_recorder::Recorder;
use crate::transport::{ChunkHandle, Transport, TransportError};
use crate::uffd::{Features, Uffd};
use crate::unpaged::UnpagedMonitor;
use crate::{Error, descriptor};

/// Frames into which the handler reads: the size of its largest batch.
pub(crate) const READ_FRAMES: u32 = 32;
/// Frames from which the page server serves forked children.
pub(crate) const CHILD_FRAMES: u32 = 16;
/// Frames through which a promoted child reads its parent's pages.
pub(crate) const INHERIT_FRAMES: u32 = 16;

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
        if let Some(pager) = current() {
            pager.measure_unpaged(true);
        }
    }
    if !DONE.swap(true, Ordering::AcqRel) {
        // SAFETY: a function of this library, which is never unloaded.
        unsafe { libc::atexit(at_exit) };
    }
}

/// Attempted operation in the error that a limit of the address space causes.
const ADDRESS_SPACE: &str = "reserve address space (RLIMIT_AS and RLIMIT_DATA, ulimit -v and -d, \
                             must be unlimited before a paged program starts)";

/// Resources from which a pager is assembled.
pub(crate) struct PagerParts {
    pub uffd: Uffd,
    pub fork_events: bool,
    pub region: Region,
    pub space: Space,
    pub unreadable: RangeSet,
    pub inheritance: Option<Inheritance>,
    pub sockets: Sockets,
}

/// A pager: one region, its pages, and the threads that move them.
pub struct Pager {
    pub(crate) region: Region,
    pub(crate) config: Config,
    pub(crate) table: PageTable,
    pub(crate) uffd: Uffd,
    pub(crate) transport: Box<dyn Transport>,
    pub(crate) staging: Staging,
    pub(crate) stats: Stats,
    /// Trace of the faults, if it was asked for.
    pub(crate) trace: Option<Recorder>,
    pub(crate) slots: Mutex<Slots>,
    pub(crate) residency: Mutex<Residency>,
    space: Mutex<Space>,
    /// Pages that are mapped without PROT_READ. The evictor evicts only while it holds this lock,
    /// so another holder excludes eviction.
    evict_lock: Mutex<RangeSet>,
    /// Locations of chunks that became empty, for the evictor to free.
    pub(crate) emptied: Mutex<Vec<ChunkLocation>>,
    overflow: OnceLock<FileStore>,
    overflow_directory: PathBuf,
    /// Address of zeroed memory as long as the largest batch; never written.
    pub(crate) zeros: usize,
    pub(crate) limit: u32,
    resident: AtomicU32,
    /// Futex: incremented when room appears or the evictor cannot make any now.
    pub(crate) room: AtomicU32,
    /// Futex: incremented to wake the evictor.
    pub(crate) evictor_wakes: AtomicU32,
    pub(crate) evictor_sleeps: AtomicBool,
    /// Ids of the pager's threads that touch the program's pages.
    pub(crate) threads: [AtomicU32; 2],
    /// A pidfd of this process in the descriptor table of the pager's threads; `None` if it could
    /// not be opened.
    own_pidfd: OnceLock<Option<OwnedFd>>,
    /// True while a fork waits for the handler to read its event. Until then the kernel refuses to
    /// map or write-protect pages.
    pub(crate) fork_waits: AtomicBool,
    pub(crate) forks: Forks,
    pub(crate) fork_events: bool,
    /// True if the handler thread evicts, instead of the evictor thread. With two cores or fewer,
    /// the program and the NIC's polling thread occupy the cores, and an evictor thread would keep
    /// the NIC from answering.
    pub(crate) evicts_inline: bool,
    /// Streams of missing faults and of write-protection faults.
    streams: Mutex<(Streams, Streams)>,
    /// State that a promoted child has from its parent.
    pub(crate) inheritance: Option<Inheritance>,
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
    /// transport's staging memory.
    pub fn new(config: &Config, transport: Box<dyn Transport>) -> Result<Arc<Self>, Error> {
        config.check()?;
        let system = |what: &str| {
            let what = what.to_string();
            move |source| Error::System { what, source }
        };
        let (uffd, fork_events) = match Uffd::open(Features { fork_events: true }) {
            Ok(uffd) => (uffd, true),
            Err(Error::UserfaultfdApi(_)) => (Uffd::open(Features::default())?, false),
            Err(error) => return Err(error),
        };
        let moved = { descriptor::move_high(uffd.as_raw_fd()) };
        let uffd = Uffd::from_fd(moved.map_err(system("move the userfaultfd to a high number"))?);
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
        let sockets = Sockets::open(&config.pool, !fork_events);
        let parts =
            PagerParts { uffd, fork_events, region, space, unreadable, inheritance: None, sockets };
        Self::assemble(config, transport, parts)
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
        let PagerParts { uffd, fork_events, region, space, unreadable, inheritance, sockets } =
            parts;
        let table =
            PageTable::new(region.pages() as usize).map_err(system("map the page table"))?;
        let memory = transport.staging();
        // A forked child must not share the staging memory with the NIC.
        // SAFETY: changes only whether a fork copies the staging memory.
        let _ = unsafe {
            let bytes = memory.frames as usize * PAGE_BYTES;
            sys::madvise(memory.base as usize, bytes, libc::MADV_DONTFORK)
        };
        let evicts_inline = units::cpus::cores() <= 2;
        let reserved = READ_FRAMES + CHILD_FRAMES + INHERIT_FRAMES;
        let frames_bytes = u64::from(memory.frames) * PAGE_BYTES as u64;
        if memory.frames < reserved + 64 || frames_bytes * 2 > config.local_bytes {
            return Err(Error::LocalTooSmall { bytes: config.local_bytes });
        }
        let limit = ((config.local_bytes - frames_bytes) / PAGE_BYTES as u64)
            .min(u64::from(region.pages())) as u32;
        let blocked = FileSizeSignalBlocked::new();
        let stats = match &config.run_directory {
            Some(directory) => {
                // A forked child that has changed its user may be unable to create the file; its
                // counters are private then.
                Stats::shared(directory)
                    .or_else(
                        |error| if inheritance.is_some() { Stats::private() } else { Err(error) },
                    )
                    .map_err(|error| match blocked.was_raised() {
                        true => Error::FileSizeLimit { limit_bytes: sys::file_size_limit() },
                        false => system("create the counters' file")(error),
                    })?
            }
            None => Stats::private().map_err(system("map the counters"))?,
        };
        let trace = match &config.trace {
            Some(prefix) => match Recorder::create(prefix, region.pages()) {
                Ok(recorder) => Some(recorder),
                // A forked child goes on without a trace.
                Err(_) if inheritance.is_some() => None,
                Err(error) => return Err(system("create the trace of the faults")(error)),
            },
            None => None,
        };
        drop(blocked);
        stats.set(Counter::ChunkBytes, transport.chunk_bytes() as u64);
        let zeros = sys::map_anonymous(READ_FRAMES as usize * PAGE_BYTES)
            .map_err(system("map a run of zeros"))?;
        Ok(Arc::new(Self {
            config: config.clone(),
            table,
            uffd,
            staging: Staging::new(memory, reserved),
            slots: Mutex::new(Slots::new(transport.chunk_bytes())),
            transport,
            stats,
            trace,
            residency: Mutex::default(),
            space: Mutex::new(space),
            evict_lock: Mutex::new(unreadable),
            region,
            emptied: Mutex::default(),
            overflow: OnceLock::new(),
            overflow_directory: config.overflow_directory.clone(),
            zeros,
            limit,
            resident: AtomicU32::new(0),
            room: AtomicU32::new(0),
            evictor_wakes: AtomicU32::new(0),
            evictor_sleeps: AtomicBool::new(false),
            threads: Default::default(),
            own_pidfd: OnceLock::new(),
            fork_waits: AtomicBool::new(false),
            forks: Forks::default(),
            fork_events,
            evicts_inline,
            streams: Mutex::default(),
            inheritance,
            sockets,
            enter: OnceLock::new(),
            unpaged_monitor: UnpagedMonitor::default(),
        }))
    }

    /// Opens the backing memory that `config` names, with staging sized for its bound: memory nodes
    /// ([`pool_transport`]), or a file for diagnosis ([`crate::store`]).
    pub fn open_transport(config: &Config) -> Result<Box<dyn Transport>, Error> {
        let frames = config::staging_frames(config.local_bytes);
        if FileTransport::is_named_by(&config.pool) {
            return Ok(Box::new(FileTransport::open(&config.pool, frames)?));
        }
        let nodes = pool::Address::list(&config.pool).map_err(|why| Error::Setting {
            name: "GRANARY_POOL",
            value: config.pool.clone(),
            why,
        })?;
        let blocked = FileSizeSignalBlocked::new();
        match pool_transport::connect(&nodes, frames) {
            Ok(transport) => Ok(transport),
            Err(_) if blocked.was_raised() => {
                Err(Error::FileSizeLimit { limit_bytes: sys::file_size_limit() })
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Returns the number of pages of the region that may be resident.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns the number of pages that are resident now or about to be.
    pub fn resident(&self) -> u32 {
        self.resident.load(Ordering::Acquire)
    }

    /// Locks the address space.
    ///
    /// # Errors
    /// `MOVED` if another pager has replaced this one.
    pub(crate) fn space(&self) -> Result<MutexGuard<'_, Space>, Errno> {
        let space = self.space.lock().expect("no thread panics while it holds this lock");
        if self.forks.is_promoted() { Err(MOVED) } else { Ok(space) }
    }

    pub(crate) fn streams(&self) -> MutexGuard<'_, (Streams, Streams)> {
        self.streams.lock().expect("no thread panics while it holds this lock")
    }

    /// Returns the first frame that serves forked children. These frames follow the handler's.
    pub(crate) fn child_frames(&self) -> FrameId {
        FrameId(READ_FRAMES)
    }

    /// Returns the first frame through which a promoted child reads its parent's pages.
    pub(crate) fn inherit_frames(&self) -> FrameId {
        FrameId(READ_FRAMES + CHILD_FRAMES)
    }

    /// Sets the number of resident pages of a new pager. The number may exceed the limit.
    pub(crate) fn set_initial_resident(&self, pages: u32) {
        self.resident.store(pages, Ordering::Release);
        self.stats.set(Counter::ResidentPages, u64::from(pages));
        self.stats.raise(Counter::ResidentPagesPeak, u64::from(pages));
    }

    pub(crate) fn evict_lock(&self) -> MutexGuard<'_, RangeSet> {
        self.evict_lock.lock().expect("no thread panics while it holds this lock")
    }

    /// Locks `evict_lock` unless another thread holds it.
    pub(crate) fn try_evict_lock(&self) -> Option<MutexGuard<'_, RangeSet>> {
        match self.evict_lock.try_lock() {
            Ok(evict_lock) => Some(evict_lock),
            Err(TryLockError::WouldBlock) => None,
            // A poisoned lock must not look like a busy one: the caller would retry forever.
            Err(TryLockError::Poisoned(_)) => panic!("a thread panicked while it held evict_lock"),
        }
    }

    /// Measures unpaged memory if it seems to have changed, and records the result. Returns true if
    /// it was measured.
    pub(crate) fn measure_unpaged(&self, at_exit: bool) -> bool {
        let is_own =
            |range: &Range<usize>| self.region.contains(range.start) || sys::is_own_mapping(range);
        let measured = self.unpaged_monitor.measure(at_exit, self.resident(), is_own);
        if let Some(usage) = &measured {
            self.stats.record_unpaged(usage, !self.forks.is_light());
        }
        measured.is_some()
    }

    pub(crate) fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().expect("no thread panics while it holds this lock")
    }

    pub(crate) fn residency(&self) -> MutexGuard<'_, Residency> {
        self.residency.lock().expect("no thread panics while it holds this lock")
    }

    /// Takes room for at most `wanted` pages and returns how many were granted.
    pub(crate) fn take_room(&self, wanted: u32) -> u32 {
        let mut now = self.resident.load(Ordering::Acquire);
        loop {
            let granted = wanted.min(self.limit.saturating_sub(now));
            if granted == 0 {
                return 0;
            }
            match self.resident.compare_exchange_weak(
                now,
                now + granted,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    let after = u64::from(now + granted);
                    self.stats.set(Counter::ResidentPages, after);
                    self.stats.raise(Counter::ResidentPagesPeak, after);
                    return granted;
                }
                Err(other) => now = other,
            }
        }
    }

    /// Takes room for one page, if necessary beyond the limit. For a thread that is forking: it
    /// holds `evict_lock`, so no room can be made until its fault is served.
    pub(crate) fn take_room_over_limit(&self) -> u32 {
        let now = self.resident.fetch_add(1, Ordering::AcqRel) + 1;
        self.stats.set(Counter::ResidentPages, u64::from(now));
        self.stats.raise(Counter::ResidentPagesPeak, u64::from(now));
        1
    }

    /// Returns room and wakes threads that wait for it.
    pub(crate) fn give_room(&self, pages: u32) {
        if pages == 0 {
            return;
        }
        let before = self.resident.fetch_sub(pages, Ordering::AcqRel);
        assert!(before >= pages, "more room is returned than was taken");
        self.stats.set(Counter::ResidentPages, u64::from(before - pages));
        self.room.fetch_add(1, Ordering::AcqRel);
        if before >= self.limit {
            sys::futex_wake(&self.room);
        }
    }

    /// Wakes the evictor if room is short, or in any case if `always`.
    pub(crate) fn wake_evictor(&self, always: bool) {
        let room = self.limit - self.resident().min(self.limit);
        if !always && (self.evicts_inline || room >= self.low_water()) {
            return;
        }
        self.evictor_wakes.fetch_add(1, Ordering::AcqRel);
        if self.evictor_sleeps.load(Ordering::SeqCst) {
            sys::futex_wake(&self.evictor_wakes);
        }
    }

    /// Returns the pidfd of this process, for the pager's threads.
    pub(crate) fn own_pidfd(&self) -> Option<i32> {
        let open = || {
            // SAFETY: a plain system call; this function owns the returned descriptor.
            unsafe {
                let fd = libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) as i32;
                (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
            }
        };
        self.own_pidfd.get_or_init(open).as_ref().map(|fd| fd.as_raw_fd())
    }

    /// Room, in pages, below which the evictor is woken.
    pub(crate) fn low_water(&self) -> u32 {
        (self.limit / 16).clamp(32, 1024)
    }

    /// Room, in pages, at which the evictor stops.
    pub(crate) fn high_water(&self) -> u32 {
        (self.limit / 8).clamp(64, 2048)
    }

    /// Wakes the threads that wait at `pages` pages from `page` on.
    pub(crate) fn wake(&self, page: PageId, pages: u32) {
        let address = self.region.address(page);
        if let Err(error) = self.uffd.wake(address, pages as usize * PAGE_BYTES) {
            self.fatal("wake a thread that waits for a page", &error);
        }
    }

    /// Stores a page's entry, clears BUSY, and wakes the page's waiters.
    pub(crate) fn settle(&self, page: PageId, entry: crate::page_table::Entry) {
        if self.table.unlock(page, entry) {
            self.wake(page, 1);
        }
    }

    /// Frees a slot. If its chunk is empty now, the evictor frees the chunk.
    pub(crate) fn free_slot(&self, slot: SlotId) {
        let emptied = self.slots().free(slot);
        self.note_emptied(emptied);
    }

    pub(crate) fn note_emptied(&self, emptied: impl IntoIterator<Item = Emptied>) {
        let mut any = false;
        for Emptied(location) in emptied {
            self.emptied.lock().expect("no thread panics while it holds this lock").push(location);
            any = true;
        }
        if any {
            self.wake_evictor(true);
        }
    }

    /// Returns the overflow file and creates it at first use. Called only by the pager's threads,
    /// because the descriptor is in their table.
    pub(crate) fn overflow(&self) -> &FileStore {
        self.overflow.get_or_init(|| {
            let memory = self.transport.staging();
            let here = FileStore::unlinked(&self.overflow_directory, memory)
                .or_else(|_| FileStore::unlinked("/var/tmp".as_ref(), memory));
            match here {
                Ok(store) => store,
                Err(error) => sys::die(
                    EXIT_PAGER,
                    &format!(
                        "the pool is full, and the overflow file in {} cannot be created \
                         ({error}): set GRANARY_OVERFLOW_DIR to a writable directory",
                        self.overflow_directory.display()
                    ),
                ),
            }
        })
    }

    /// Ends the process because the overflow file cannot store a page, or returned content that
    /// fails authentication.
    pub(crate) fn overflow_failed(&self, error: &std::io::Error) -> ! {
        let why = match error.raw_os_error() {
            Some(libc::EFBIG) => {
                "RLIMIT_FSIZE limits the size of files of this process: raise ulimit -f"
            }
            Some(libc::ENOSPC | libc::EDQUOT) => {
                "its file system is full: free space there, or set GRANARY_OVERFLOW_DIR to another"
            }
            _ => self.fatal("move a page to or from the overflow file", error),
        };
        sys::die(
            EXIT_PAGER,
            &format!(
                "the pool is full, and the overflow file in {} cannot grow ({error}): {why}, or \
                 give the pool more memory; process {} ends now (status {EXIT_PAGER})",
                self.overflow_directory.display(),
                descriptor::program()
            ),
        )
    }

    /// Frees a chunk. Called only by the pager's threads.
    pub(crate) fn free_location(&self, location: ChunkLocation) {
        match location {
            ChunkLocation::Pool(chunk) => self.free_chunk(chunk),
            ChunkLocation::Overflow(stretch) => {
                let bytes = self.transport.chunk_bytes() as u64;
                self.overflow().punch(u64::from(stretch) * bytes, bytes);
            }
        }
    }

    fn free_chunk(&self, chunk: ChunkHandle) {
        if let Err(error) = self.transport.free_chunk(chunk) {
            self.pool_lost(&error);
        }
    }

    /// Updates the gauges of chunks and allocations.
    pub(crate) fn update_gauges(&self) {
        let (pool, overflow) = self.slots().held();
        self.stats.set(Counter::PoolChunks, u64::from(pool));
        self.stats.raise(Counter::PoolChunksPeak, u64::from(pool));
        self.stats.set(Counter::OverflowChunks, u64::from(overflow));
        self.stats.raise(Counter::OverflowChunksPeak, u64::from(overflow));
        let done = self.transport.stats();
        self.stats.set(Counter::AllocationsByNic, done.allocations_by_nic);
        self.stats.set(Counter::AllocationsByCpu, done.allocations_by_cpu);
    }

    /// Ends the process because the pool is gone, and with it pages of the program.
    pub(crate) fn pool_lost(&self, error: &TransportError) -> ! {
        sys::die(
            EXIT_POOL_GONE,
            &format!(
                "{error}; the pool held pages of process {}, so the process ends now (status \
                 {EXIT_POOL_GONE})",
                descriptor::program()
            ),
        )
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
