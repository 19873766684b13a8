//! The pager's state, shared by its threads and by the program's calls.
//!
//! | thread | does |
//! | --- | --- |
//! | handler (one) | reads events, brings pages in |
//! | evictor (one) | takes pages out, writes them back, gives chunks back |
//! | program's | map, unmap, protect and advise ([`crate::mapping`]) |
//!
//! Locks, in the order in which they may be taken: `space` (the program's threads only), `gate` (they
//! and the evictor), then a page's BUSY, then `slots` or `residency`. The handler takes `gate` only to
//! follow a fork, with no page BUSY. Who holds a lock or a BUSY touches no paged memory that may be
//! missing, and has all signals blocked.
//!
//! Room: `resident` counts the pages that are resident or about to be. It is raised before a page is
//! mapped and never passes `limit`.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};

use crate::config::{self, Config, EXIT_PAGER, EXIT_POOL_GONE};
use crate::fault::Streams;
use crate::fork::Inheritance;
use crate::mapping::{Errno, MOVED};
use crate::page_table::{PageId, PageTable};
use crate::pool_transport::PoolTransport;
use crate::reach::Sockets;
use crate::region::{RangeSet, Region, Space};
use crate::residency::Residency;
use crate::slots::{Emptied, Home, SlotId, Slots};
use crate::staging::{FrameId, Staging};
use crate::stats::{Counter, Stats};
use crate::store::{FileStore, FileTransport};
use crate::sys::{self, FileSizeSignalBlocked, PAGE_BYTES};
use crate::transport::{ChunkHandle, Transport, TransportError};
use crate::uffd::{Features, Uffd};
use crate::unpaged::{self, Watch};
use crate::{Error, descriptor};

/// Frames that the handler reads into: its largest batch.
pub(crate) const READ_FRAMES: u32 = 32;
/// Frames that serve forked children.
pub(crate) const CHILD_FRAMES: u32 = 16;
/// Frames through which a forked child moves what it has from its parent.
pub(crate) const HEIR_FRAMES: u32 = 16;

/// The program's pager.
static CURRENT: AtomicPtr<Pager> = AtomicPtr::new(std::ptr::null_mut());

/// The pager of the program that this process runs, once it has one.
#[inline]
pub fn current() -> Option<&'static Pager> {
    // SAFETY: set to pagers that are never dropped only.
    unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
}

/// The program uses this pager from now on.
pub fn set_current(pager: &'static Arc<Pager>) {
    CURRENT.store(Arc::as_ptr(pager).cast_mut(), Ordering::Release);
    unpaged::look_at_exit();
}

/// What fails where there is too little of it.
const ADDRESS_SPACE: &str = "reserve address space (where a paged program starts, RLIMIT_AS and \
                             RLIMIT_DATA, ulimit -v and -d, must be unlimited)";

/// What a pager is built on.
pub(crate) struct Foundation {
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
    pub(crate) slots: Mutex<Slots>,
    pub(crate) residency: Mutex<Residency>,
    space: Mutex<Space>,
    /// Pages that are mapped without PROT_READ. Whoever holds it keeps the evictor still.
    gate: Mutex<RangeSet>,
    /// Homes of chunks that became empty, for the evictor to give back.
    pub(crate) emptied: Mutex<Vec<Home>>,
    overflow: OnceLock<FileStore>,
    overflow_directory: PathBuf,
    /// A page of zeros per frame of the largest batch; never written.
    pub(crate) zeros: usize,
    pub(crate) limit: u32,
    resident: AtomicU32,
    /// Raised whenever room appears or the evictor cannot make any now.
    pub(crate) room: AtomicU32,
    /// Raised to call the evictor.
    pub(crate) calls: AtomicU32,
    pub(crate) evictor_sleeps: AtomicBool,
    /// Threads of the pager's that touch the program's pages.
    pub(crate) threads: [AtomicU32; 2],
    /// A descriptor of this process, or -1; in the pager's threads' table.
    own_process: OnceLock<Option<OwnedFd>>,
    /// A fork waits for its event to be read; nothing can be mapped or protected until then.
    pub(crate) fork_waits: AtomicBool,
    pub(crate) forks: crate::fork::Forks,
    pub(crate) fork_events: bool,
    /// The handler evicts: there is no core to spare for the evictor beside the program's and the one
    /// that the NIC's thread polls on, which it would keep from answering.
    pub(crate) evicts_inline: bool,
    /// Runs of missing and of write-protection faults.
    streams: Mutex<(Streams, Streams)>,
    /// What a forked child has from its parent.
    pub(crate) inheritance: Option<Inheritance>,
    /// How forked children reach the memory nodes.
    pub(crate) sockets: Sockets,
    pub(crate) enter: OnceLock<fn()>,
    /// Looks at what is not paged.
    pub(crate) watch: Watch,
}

impl Pager {
    /// Sets a pager up over `transport`, without threads: [`Pager::start`] brings it to life.
    ///
    /// # Errors
    /// Where userfaultfd is not permitted, address space is short, or the bound is too small for the
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
        // Without events, what is for which child is said when it is made (`fork::birth`).
        region.prepare(region.base(), region.len(), fork_events);
        // SAFETY: the region is ours and nothing is in it yet.
        unsafe {
            let arena = region.arena().len() * PAGE_BYTES;
            sys::mprotect(region.base(), arena, libc::PROT_READ | libc::PROT_WRITE)
                .map_err(system(ADDRESS_SPACE))?;
            uffd.register(region.base(), region.len())
                .map_err(system("register the region with userfaultfd"))?;
        }
        let (space, unreadable) = (region.space(), RangeSet::default());
        let sockets = Sockets::of(&config.pool);
        let foundation =
            Foundation { uffd, fork_events, region, space, unreadable, inheritance: None, sockets };
        Self::assemble(config, transport, foundation)
    }

    /// Puts a pager together.
    pub(crate) fn assemble(
        config: &Config,
        transport: Box<dyn Transport>,
        foundation: Foundation,
    ) -> Result<Arc<Self>, Error> {
        let system = |what: &str| {
            let what = what.to_string();
            move |source| Error::System { what, source }
        };
        let Foundation { uffd, fork_events, region, space, unreadable, inheritance, sockets } =
            foundation;
        let table =
            PageTable::new(region.pages() as usize).map_err(system("map the page table"))?;
        let memory = transport.staging();
        // A forked child has no business there.
        // SAFETY: changes only whether a fork copies the staging memory.
        let _ = unsafe {
            let bytes = memory.frames as usize * PAGE_BYTES;
            sys::madvise(memory.base as usize, bytes, libc::MADV_DONTFORK)
        };
        let evicts_inline = crate::fault::cores() <= 2;
        let reserved = READ_FRAMES + CHILD_FRAMES + HEIR_FRAMES;
        let frames_bytes = u64::from(memory.frames) * PAGE_BYTES as u64;
        if memory.frames < reserved + 64 || frames_bytes * 2 > config.local_bytes {
            return Err(Error::LocalTooSmall { bytes: config.local_bytes });
        }
        let limit = ((config.local_bytes - frames_bytes) / PAGE_BYTES as u64)
            .min(u64::from(region.pages())) as u32;
        let blocked = FileSizeSignalBlocked::new();
        let stats = match &config.run_directory {
            Some(directory) => {
                // A forked child may have changed its user since: it counts for itself then.
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
            residency: Mutex::default(),
            space: Mutex::new(space),
            gate: Mutex::new(unreadable),
            region,
            emptied: Mutex::default(),
            overflow: OnceLock::new(),
            overflow_directory: config.overflow_directory.clone(),
            zeros,
            limit,
            resident: AtomicU32::new(0),
            room: AtomicU32::new(0),
            calls: AtomicU32::new(0),
            evictor_sleeps: AtomicBool::new(false),
            threads: Default::default(),
            own_process: OnceLock::new(),
            fork_waits: AtomicBool::new(false),
            forks: crate::fork::Forks::default(),
            fork_events,
            evicts_inline,
            streams: Mutex::default(),
            inheritance,
            sockets,
            enter: OnceLock::new(),
            watch: Watch::default(),
        }))
    }

    /// Opens the memory that `config` names, sized for its bound: a memory node
    /// ([`PoolTransport`]), or a file for diagnosis ([`crate::store`]).
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
        match PoolTransport::connect(&nodes, frames) {
            Ok(transport) => Ok(Box::new(transport)),
            Err(_) if blocked.was_raised() => {
                Err(Error::FileSizeLimit { limit_bytes: sys::file_size_limit() })
            }
            Err(error) => Err(error),
        }
    }

    /// The region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Pages of the region that may be resident.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Pages that are resident now.
    pub fn resident(&self) -> u32 {
        self.resident.load(Ordering::Acquire)
    }

    /// Who has which pages. `MOVED` if another pager took the place of this one.
    pub(crate) fn space(&self) -> Result<MutexGuard<'_, Space>, Errno> {
        let space = self.space.lock().expect("nobody panics with the space locked");
        if self.forks.is_grown() { Err(MOVED) } else { Ok(space) }
    }

    pub(crate) fn streams(&self) -> MutexGuard<'_, (Streams, Streams)> {
        self.streams.lock().expect("nobody panics with the streams locked")
    }

    /// The first of the frames that serve forked children: after those of the handler.
    pub(crate) fn child_frames(&self) -> FrameId {
        FrameId(READ_FRAMES)
    }

    /// The first of the frames through which a forked child moves what it has from its parent.
    pub(crate) fn heir_frames(&self) -> FrameId {
        FrameId(READ_FRAMES + CHILD_FRAMES)
    }

    /// So many pages are resident from the start, be it more than may be.
    pub(crate) fn take_what_is_there(&self, pages: u32) {
        self.resident.store(pages, Ordering::Release);
        self.stats.set(Counter::ResidentPages, u64::from(pages));
        self.stats.raise(Counter::ResidentPagesPeak, u64::from(pages));
    }

    pub(crate) fn gate(&self) -> MutexGuard<'_, RangeSet> {
        self.gate.lock().expect("nobody panics with the gate locked")
    }

    /// The gate, unless another thread has it locked.
    pub(crate) fn try_gate(&self) -> Option<MutexGuard<'_, RangeSet>> {
        match self.gate.try_lock() {
            Ok(gate) => Some(gate),
            Err(TryLockError::WouldBlock) => None,
            // To wait for this lock would be to wait for ever.
            Err(TryLockError::Poisoned(_)) => panic!("a thread panicked with the gate locked"),
        }
    }

    pub(crate) fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().expect("nobody panics with the slots locked")
    }

    pub(crate) fn residency(&self) -> MutexGuard<'_, Residency> {
        self.residency.lock().expect("nobody panics with the queue locked")
    }

    /// Takes room for at most `wanted` pages; returns how many.
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

    /// Takes room for a page, be it beyond the limit: a thread that forks holds up who could make some.
    pub(crate) fn take_room_beyond(&self) -> u32 {
        let now = self.resident.fetch_add(1, Ordering::AcqRel) + 1;
        self.stats.set(Counter::ResidentPages, u64::from(now));
        self.stats.raise(Counter::ResidentPagesPeak, u64::from(now));
        1
    }

    /// Gives room back.
    pub(crate) fn give_room(&self, pages: u32) {
        if pages == 0 {
            return;
        }
        let before = self.resident.fetch_sub(pages, Ordering::AcqRel);
        assert!(before >= pages, "more room is given back than was taken");
        self.stats.set(Counter::ResidentPages, u64::from(before - pages));
        self.room.fetch_add(1, Ordering::AcqRel);
        if before >= self.limit {
            sys::futex_wake(&self.room);
        }
    }

    /// Calls the evictor if room is short or `always`.
    pub(crate) fn call_evictor(&self, always: bool) {
        let room = self.limit - self.resident().min(self.limit);
        if !always && (self.evicts_inline || room >= self.low_water()) {
            return;
        }
        self.calls.fetch_add(1, Ordering::AcqRel);
        if self.evictor_sleeps.load(Ordering::SeqCst) {
            sys::futex_wake(&self.calls);
        }
    }

    /// A descriptor of this process, for the pager's threads.
    pub(crate) fn own_process(&self) -> Option<i32> {
        let open = || {
            // SAFETY: a plain system call; the descriptor that it returns is ours.
            unsafe {
                let fd = libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) as i32;
                (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
            }
        };
        self.own_process.get_or_init(open).as_ref().map(|fd| fd.as_raw_fd())
    }

    /// Pages of room below which the evictor is called.
    pub(crate) fn low_water(&self) -> u32 {
        (self.limit / 16).clamp(32, 1024)
    }

    /// Pages of room that the evictor makes before it sleeps again.
    pub(crate) fn high_water(&self) -> u32 {
        (self.limit / 8).clamp(64, 2048)
    }

    /// Wakes the threads that wait at a page.
    pub(crate) fn wake(&self, page: PageId, pages: u32) {
        let address = self.region.address(page);
        if let Err(error) = self.uffd.wake(address, pages as usize * PAGE_BYTES) {
            self.broken("wake a thread that waits for a page", &error);
        }
    }

    /// Unlocks a page and wakes its waiters.
    pub(crate) fn settle(&self, page: PageId, entry: crate::page_table::Entry) {
        if self.table.unlock(page, entry) {
            self.wake(page, 1);
        }
    }

    /// Frees a slot; its chunk, if empty now, is given back by the evictor.
    pub(crate) fn free_slot(&self, slot: SlotId) {
        let emptied = self.slots().free(slot);
        self.note_emptied(emptied);
    }

    pub(crate) fn note_emptied(&self, emptied: impl IntoIterator<Item = Emptied>) {
        let mut any = false;
        for Emptied(home) in emptied {
            self.emptied.lock().expect("nobody panics with the list locked").push(home);
            any = true;
        }
        if any {
            self.call_evictor(true);
        }
    }

    /// The overflow file; opened by the pager's threads only, in their descriptor table.
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
                        "the pool is full and no overflow file can be made in {} ({error}): set \
                         GRANARY_OVERFLOW_DIR",
                        self.overflow_directory.display()
                    ),
                ),
            }
        })
    }

    /// The overflow file takes a page no more, or gives one that is not what was stored.
    pub(crate) fn overflow_failed(&self, error: &std::io::Error) -> ! {
        let why = match error.raw_os_error() {
            Some(libc::EFBIG) => {
                "this process may not make files so large (RLIMIT_FSIZE): raise ulimit -f"
            }
            Some(libc::ENOSPC | libc::EDQUOT) => {
                "there is no room on its file system: make some, or set GRANARY_OVERFLOW_DIR"
            }
            _ => self.broken("move a page to or from the overflow file", error),
        };
        sys::die(
            EXIT_PAGER,
            &format!(
                "the pool is full, and the overflow file in {} cannot grow ({error}): {why}, or give the \
                 pool more memory; process {} ends now (status {EXIT_PAGER})",
                self.overflow_directory.display(),
                descriptor::program()
            ),
        )
    }

    /// Gives a chunk's home back. On the pager's threads only.
    pub(crate) fn give_back(&self, home: Home) {
        match home {
            Home::Pool(chunk) => self.give_back_chunk(chunk),
            Home::Overflow(stretch) => {
                let bytes = self.transport.chunk_bytes() as u64;
                self.overflow().punch(u64::from(stretch) * bytes, bytes);
            }
        }
    }

    fn give_back_chunk(&self, chunk: ChunkHandle) {
        if let Err(error) = self.transport.free_chunk(chunk) {
            self.lost(&error);
        }
    }

    /// Brings the gauges of chunks and allocations up to date.
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

    /// The pool is gone, and pages with it: the program cannot go on.
    pub(crate) fn lost(&self, error: &TransportError) -> ! {
        sys::die(
            EXIT_POOL_GONE,
            &format!(
                "{error}; pages of process {} were there, so it ends now (status {EXIT_POOL_GONE})",
                descriptor::program()
            ),
        )
    }

    /// Something that must work does not: end rather than go on with wrong data.
    pub(crate) fn broken(&self, what: &str, error: &std::io::Error) -> ! {
        sys::die(
            EXIT_PAGER,
            &format!(
                "cannot {what}: {error}; process {} ends now (status {EXIT_PAGER})",
                descriptor::program()
            ),
        )
    }
}
