//! Backing memory: transfers of pages between frames and the places that slots name.
//!
//! A place is in the pool, in the overflow file, or with the page server of a forked child's
//! parent. Transfers with the pool are split-phase. The others are rare, and complete on return. An
//! unrecoverable error ends the process, because pages of the program are lost.

use std::path::PathBuf;
use std::sync::{MutexGuard, OnceLock};

use smallvec::SmallVec;

use crate::config::{EXIT_PAGER, EXIT_POOL_GONE, EXIT_TAMPERED};
use crate::fork::inheritance::Inheritance;
use crate::page_table::PageId;
use crate::patience::Calls;
use crate::slots::{ChunkLocation, Place, SlotId, Slots, Source};
use crate::store::FileStore;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::{
    ChunkHandle, Direction, FrameId, FrameMemory, Lane, PageIo, Ticket, Transport, TransportError,
    TransportStats,
};
use crate::{descriptor, run_memory};

/// Backing memory of one process.
pub struct Backing {
    transport: Box<dyn Transport>,
    frames: FrameMemory,
    overflow: OnceLock<FileStore>,
    overflow_directory: PathBuf,
    /// Calls of the transport that may wait for the pool.
    calls: Calls,
    /// Connection of a promoted child to the page server that has its inherited pages.
    inheritance: Option<Inherited>,
}

/// Inherited pages, and private memory into which they are read. The NIC reaches the frames, so
/// plain content of a sealed run must not lie there.
struct Inherited {
    connection: Inheritance,
    /// As many pages as there are frames. A page that is not used has no memory.
    pages: usize,
    bytes: usize,
}

impl Drop for Inherited {
    fn drop(&mut self) {
        // SAFETY: this value's own memory, and no transfer uses it any more.
        let _ = unsafe { sys::unmap_anonymous(self.pages, self.bytes) };
    }
}

// SAFETY: the base of the frames is used only to compute addresses of frames, and `crate::pages`
// gives each frame one owner at a time.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    /// Backing memory over a transport. The overflow file is created in a directory when it is
    /// needed.
    pub(crate) fn new(
        transport: Box<dyn Transport>,
        overflow_directory: PathBuf,
        inheritance: Option<Inheritance>,
    ) -> Self {
        let frames = transport.frames();
        let inheritance = inheritance.map(|connection| {
            let bytes = frames.frames as usize * PAGE_BYTES;
            let pages = sys::map_anonymous(bytes).unwrap_or_else(|error| {
                sys::die(EXIT_PAGER, &format!("cannot map memory for a parent's pages: {error}"))
            });
            Inherited { connection, pages, bytes }
        });
        let (overflow, calls) = (OnceLock::new(), Calls::default());
        Self { transport, frames, overflow, overflow_directory, calls, inheritance }
    }

    /// Returns the bytes of a chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.transport.chunk_bytes()
    }

    /// Returns true if all chunks must be encrypted.
    pub fn must_seal(&self) -> bool {
        self.transport.must_seal()
    }

    /// Returns the transport's counters.
    pub fn transport_stats(&self) -> TransportStats {
        self.transport.stats()
    }

    /// Returns the start of the oldest call that waits for the pool, in ns.
    pub(crate) fn oldest_call_ns(&self) -> Option<u64> {
        self.calls.oldest_ns()
    }

    /// Returns true if a thread waits for the pool.
    pub(crate) fn is_called(&self) -> bool {
        self.oldest_call_ns().is_some()
    }

    /// Adds the descriptors that the pager's threads need to `keep`.
    pub fn descriptors(&self, keep: &mut Vec<i32>) {
        self.transport.descriptors(keep);
    }

    /// Returns true if a thread must call [`Backing::watch`].
    pub fn is_watched(&self) -> bool {
        self.transport.is_watched()
    }

    /// Runs the transport's thread.
    pub fn watch(&self) {
        self.transport.watch();
    }

    /// Returns the first byte of a frame.
    pub fn frame(&self, frame: FrameId) -> *mut u8 {
        assert!(frame.0 < self.frames.frames, "{frame:?} of {}", self.frames.frames);
        // SAFETY: in bounds of the frames.
        unsafe { self.frames.base.add(frame.0 as usize * PAGE_BYTES) }
    }

    /// Returns the private page into which the inherited page of a frame is read.
    pub fn inherited_page(&self, frame: FrameId) -> *mut u8 {
        let inherited = self.inheritance.as_ref().expect("only a promoted child inherits pages");
        assert!(frame.0 < self.frames.frames, "{frame:?} of {}", self.frames.frames);
        (inherited.pages + frame.0 as usize * PAGE_BYTES) as *mut u8
    }

    /// Starts to move pages between sources and frames. Adjacent pairs are merged. A demand
    /// transfer, on which a thread waits, is complete on return. Inherited pages arrive in
    /// [`Backing::inherited_page`] of the frame, and words nowhere.
    pub fn post(&self, lane: Lane, direction: Direction, pairs: &[(Source, FrameId)]) -> Ticket {
        let mut ios = Ios::default();
        let mut at = 0;
        while let Some(&(source, frame)) = pairs.get(at) {
            at += 1;
            match source {
                Source::Place(Place { location: ChunkLocation::Pool(chunk), offset_bytes }) => {
                    ios.add(PageIo { chunk, offset_bytes, frame: frame.0, pages: 1 });
                    if ios.is_full() && at < pairs.len() {
                        self.run(lane, direction, ios.take());
                    }
                }
                Source::Place(Place {
                    location: ChunkLocation::Overflow(stretch),
                    offset_bytes,
                }) => {
                    let start = u64::from(stretch) * self.chunk_bytes() as u64;
                    self.move_overflow(direction, start + u64::from(offset_bytes), frame);
                }
                Source::Inherited(page) => {
                    assert!(direction == Direction::Read, "inherited slots are never written");
                    let first = at - 1;
                    while pairs.get(at).is_some_and(|&(next, to)| {
                        let count = (at - first) as u32;
                        next == Source::Inherited(PageId(page.0 + count)) && to.0 == frame.0 + count
                    }) {
                        at += 1;
                    }
                    self.read_inherited(page, frame, (at - first) as u32);
                }
                Source::Word(_) => {
                    assert!(direction == Direction::Read, "words are never written");
                }
            }
        }
        let ios = ios.take();
        if ios.is_empty() {
            return Ticket::complete();
        }
        if lane == Lane::Demand {
            self.run(lane, direction, ios);
            return Ticket::complete();
        }
        self.calls
            .run(|| self.transport.post(lane, direction, ios))
            .unwrap_or_else(|error| self.pool_lost(&error))
    }

    fn run(&self, lane: Lane, direction: Direction, ios: &[PageIo]) {
        if let Err(error) = self.calls.run(|| self.transport.run(lane, direction, ios)) {
            self.pool_lost(&error);
        }
    }

    /// Returns true if transfers are complete. Makes no system call.
    pub fn poll(&self, ticket: &mut Ticket) -> bool {
        ticket.poll().unwrap_or_else(|error| self.pool_lost(&error))
    }

    /// Waits until transfers are complete.
    pub fn wait(&self, ticket: Ticket) {
        self.calls.run(|| ticket.wait()).unwrap_or_else(|error| self.pool_lost(&error));
    }

    /// Allocates `count` slots and appends them to `slots`. `lock` locks the set of slots. Chunks
    /// are allocated while the set is not locked, all at a time that the missing slots need.
    pub fn allocate_slots<'a>(
        &self,
        lock: impl Fn() -> MutexGuard<'a, Slots>,
        count: usize,
        slots: &mut Vec<SlotId>,
    ) {
        let wanted = slots.len() + count;
        let mut set = lock();
        loop {
            while slots.len() < wanted
                && let Some(slot) = set.allocate()
            {
                slots.push(slot);
            }
            if slots.len() == wanted {
                return;
            }
            let wants_pool = set.wants_pool();
            drop(set);
            let chunk_pages = self.chunk_bytes() / PAGE_BYTES;
            let missing = (wanted - slots.len()).div_ceil(chunk_pages);
            let mut chunks = Vec::new();
            let allocated = wants_pool
                .then(|| self.calls.run(|| self.transport.allocate_chunks(missing, &mut chunks)));
            // Slots are taken from each new chunk before the lock is released. Otherwise a chunk
            // could stay without a used slot, and would never be freed.
            set = lock();
            match allocated {
                Some(Ok(())) => {}
                Some(Err(TransportError::Full)) => set.note_full(),
                Some(Err(gone)) => self.pool_lost(&gone),
                None => set.add_overflow_chunk(),
            }
            for chunk in chunks {
                set.add_pool_chunk(chunk);
                let taken = std::iter::from_fn(|| set.allocate_open());
                slots.extend(taken.take(chunk_pages.min(wanted - slots.len())));
            }
        }
    }

    /// Returns the percentage of the pool that is allocated, 0 if it is unknown.
    pub fn used_percent(&self) -> u8 {
        self.calls.run(|| self.transport.used_percent())
    }

    /// Frees chunks. Called only by the pager's threads.
    pub fn free_locations(&self, locations: &[ChunkLocation]) {
        let mut chunks = SmallVec::<[ChunkHandle; FREES_MAX]>::new();
        for location in locations {
            match *location {
                ChunkLocation::Pool(chunk) => chunks.push(chunk),
                ChunkLocation::Overflow(stretch) => {
                    let bytes = self.chunk_bytes() as u64;
                    self.overflow().punch(u64::from(stretch) * bytes, bytes);
                }
            }
        }
        if let Err(error) = self.calls.run(|| self.transport.free_chunks(&chunks)) {
            self.pool_lost(&error);
        }
    }

    fn read_inherited(&self, page: PageId, frame: FrameId, pages: u32) {
        let inherited =
            self.inheritance.as_ref().expect("a pager with inherited slots has an inheritance");
        inherited.connection.read(page.0..page.0 + pages, self.inherited_page(frame));
    }

    /// Tells the parent's page server that no more pages are needed.
    pub fn release_inheritance(&self) {
        if let Some(inherited) = &self.inheritance {
            inherited.connection.release();
            let Inherited { pages, bytes, .. } = *inherited;
            // SAFETY: this pager's own memory. All inherited pages were read.
            let _ = unsafe { sys::madvise(pages, bytes, libc::MADV_DONTNEED) };
        }
    }

    fn move_overflow(&self, direction: Direction, offset: u64, frame: FrameId) {
        let done = match direction {
            Direction::Read => self.overflow().read(offset, frame.0, 1),
            Direction::Write => self.overflow().write(offset, frame.0, 1),
        };
        if let Err(error) = done {
            self.overflow_failed(&error);
        }
    }

    /// Returns the overflow file and creates it at first use. Called only by the pager's threads,
    /// because the descriptor is in their table.
    fn overflow(&self) -> &FileStore {
        self.overflow.get_or_init(|| {
            let here = FileStore::unlinked(&self.overflow_directory, self.frames)
                .or_else(|_| FileStore::unlinked("/var/tmp".as_ref(), self.frames));
            match here {
                Ok(store) => {
                    sys::say(&format!(
                        "the pool is full: pages of process {} go to an overflow file, which is \
                         slower (GRANARY_OVERFLOW_DIR names its directory, now {}); give the pool \
                         more memory (--memory)",
                        descriptor::program(),
                        self.overflow_directory.display()
                    ));
                    store
                }
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

    /// Ends the process because the content of a place is not the last that was stored there.
    pub fn tampered(&self, page: PageId, place: Place) -> ! {
        let origin = match place.location {
            ChunkLocation::Pool(chunk) => self.transport.origin(chunk),
            ChunkLocation::Overflow(_) => {
                format!("the overflow file in {}", self.overflow_directory.display())
            }
        };
        sys::die(
            EXIT_TAMPERED,
            &format!(
                "{origin} returned bytes for page {} that this process did not store there last; \
                 the page was not used; process {} ends now (status {EXIT_TAMPERED}): the memory \
                 is faulty, or its owner changed it",
                page.0,
                descriptor::program()
            ),
        )
    }

    /// Ends the process because the overflow file cannot store or return a page.
    fn overflow_failed(&self, error: &std::io::Error) -> ! {
        let why = match error.raw_os_error() {
            Some(libc::EFBIG) => {
                "RLIMIT_FSIZE limits the size of files of this process: raise ulimit -f"
            }
            Some(libc::ENOSPC | libc::EDQUOT) => {
                "its file system is full: free space there, or set GRANARY_OVERFLOW_DIR to another"
            }
            _ => sys::die(
                EXIT_PAGER,
                &format!(
                    "cannot move a page to or from the overflow file: {error}; process {} ends \
                     now (status {EXIT_PAGER})",
                    descriptor::program()
                ),
            ),
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

    /// Ends the process because the pool is gone, and with it pages of the program.
    fn pool_lost(&self, error: &TransportError) -> ! {
        let process = descriptor::program();
        let why = match run_memory::ended_command() {
            Some(command) => format!(
                "granary run (process {command}) has ended before its program, and with it the \
                 way to the pool"
            ),
            None => error.to_string(),
        };
        sys::die(
            EXIT_POOL_GONE,
            &format!(
                "{why}; the pool held pages of process {process}, so the process ends now (status \
                 {EXIT_POOL_GONE})"
            ),
        )
    }
}

/// Fills a page with a word.
///
/// # Safety
/// `page` points to a page, aligned to 8 bytes, that no other thread accesses.
pub unsafe fn fill(page: *mut u8, word: u64) {
    for at in 0..PAGE_BYTES / size_of::<u64>() {
        // SAFETY: by the caller.
        unsafe { page.cast::<u64>().add(at).write(word) };
    }
}

/// Maximum number of chunks that are freed together.
pub const FREES_MAX: usize = 64;

/// Maximum number of transfers in one post.
const IOS_MAX: usize = 64;

/// A list of transfers in which adjacent ones are merged.
struct Ios {
    list: [PageIo; IOS_MAX],
    count: usize,
}

impl Default for Ios {
    fn default() -> Self {
        let none = PageIo { chunk: ChunkHandle(0), offset_bytes: 0, frame: 0, pages: 0 };
        Self { list: [none; IOS_MAX], count: 0 }
    }
}

impl Ios {
    fn add(&mut self, io: PageIo) {
        if let Some(last) = self.list[..self.count].last_mut()
            && follows(last, &io)
        {
            last.pages += 1;
            return;
        }
        self.list[self.count] = io;
        self.count += 1;
    }

    fn is_full(&self) -> bool {
        self.count == IOS_MAX
    }

    /// Empties the list.
    fn take(&mut self) -> &[PageIo] {
        let count = std::mem::take(&mut self.count);
        &self.list[..count]
    }
}

fn follows(last: &PageIo, io: &PageIo) -> bool {
    last.chunk == io.chunk
        && last.offset_bytes + u32::from(last.pages) * PAGE_BYTES as u32 == io.offset_bytes
        && last.frame + u32::from(last.pages) == io.frame
        && last.pages < u16::MAX
}

#[cfg(test)]
#[path = "backing_tests.rs"]
mod tests;
