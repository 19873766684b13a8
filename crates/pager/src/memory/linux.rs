//! [`Memory`] of the Linux kernel, over userfaultfd.
//!
//! There are two ways to bring pages from the program's memory to the shelf and back:
//!
//! | | [`Way::Move`] (Linux 6.8 and later) | [`Way::Copy`] |
//! | --- | --- | --- |
//! | take out | UFFDIO_MOVE | UFFDIO_WRITEPROTECT, copy, MADV_DONTNEED |
//! | put in | UFFDIO_MOVE | UFFDIO_COPY, MADV_DONTNEED of the position |
//! | page pinned by a device | stays | later writes of the device are lost |
//! | microseconds a page, in runs of 64 | 0.1 | 1.5 |
//!
//! The kernel moves pages only between mappings with the same access, which is read and write for
//! the shelf. So [`Way::Move`] too copies pages with another protection.
//!
//! The kernel also moves a page that it references without a pin: vmsplice(2) and MSG_ZEROCOPY do
//! this. Because the memory of the page is used again for other pages, the pipe or the socket then
//! transfers wrong content. So the preload library keeps the program from these calls, or copies.
//!
//! A copied page is write-protected before the copy. If the program writes to the page before it is
//! dropped, the thread waits, and the pager reads a write-protection fault on a BUSY page. A page
//! may keep the mark if an operation stops half-way, and then a write-protection fault occurs on a
//! page that is not BUSY: the handler must remove the mark.

use std::sync::Arc;
use std::{fmt, io};

use super::copying::{ProgramReader, touch};
use super::{Done, Memory, Position, Stop, probe};
use crate::config::{EXIT_PAGER, Pages};
use crate::page_table::PageId;
use crate::region::Region;
use crate::sys::{self, PAGE_BYTES};
use crate::uffd::{MoveOptions, Uffd};
use crate::{Error, descriptor};

/// The way to bring pages from the program's memory to the shelf and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The kernel moves pages.
    Move,
    /// The pager copies pages.
    Copy,
}

/// Pages that are copied together before their originals are dropped.
const COPIED_RUN: u32 = 64;
/// As [`COPIED_RUN`], for the pages that [`Way::Move`] must copy.
const COPIED_RUN_MOVING: u32 = 8;
/// Calls that may return EAGAIN before the reason is taken to be a fork. Without a fork, the reason
/// is another thread that changes the address space at the same moment.
const TRIES: u32 = 4;

const TAKE_OUT: MoveOptions = MoveOptions { wake: false, holes: true };
const PUT_IN: MoveOptions = MoveOptions { wake: true, holes: false };
const RELOCATE: MoveOptions = MoveOptions { wake: false, holes: false };

/// Memory of the program and of the shelf.
#[derive(Debug)]
pub struct LinuxMemory {
    uffd: Arc<Uffd>,
    region: Region,
    /// Address of the shelf. A position that is always filled, the guard, follows the last one.
    shelf: usize,
    positions: u32,
    /// Address of [`COPIED_RUN`] pages of zeros, never written.
    zeros: usize,
    reader: ProgramReader,
    way: Way,
    why_copying: Option<WhyCopying>,
}

/// The reason why pages are copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhyCopying {
    /// [`Pages::Copy`].
    Setting,
    /// The kernel has no UFFDIO_MOVE.
    NoMove,
    /// UFFDIO_MOVE gave an unexpected answer.
    FailedTest(String),
}

impl WhyCopying {
    /// [`WhyCopying::Setting`] as text.
    pub const SETTING: &str = "GRANARY_PAGES=copy";
    /// [`WhyCopying::NoMove`] as text.
    pub const NO_MOVE: &str = "the kernel has no UFFDIO_MOVE (Linux 6.8 or later has)";
    /// [`WhyCopying::FailedTest`] as text, without the answer.
    pub const FAILED_TEST: &str = "the self-test of UFFDIO_MOVE failed";
}

impl fmt::Display for WhyCopying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting => f.write_str(Self::SETTING),
            Self::NoMove => f.write_str(Self::NO_MOVE),
            Self::FailedTest(answer) => write!(f, "{}: {answer}", Self::FAILED_TEST),
        }
    }
}

/// Result of one call for a part of a run.
enum Step {
    /// The first pages of the part are done.
    Done(u32),
    /// The reason of the failure is gone: the same call again.
    Again,
    /// The same call for half of the part, because the part is not within one mapping.
    Smaller,
    Stop(Stop),
}

/// Reason why a page was not moved within the program's memory.
enum NotMoved {
    /// The address space changes.
    Refused,
    /// The page must be copied.
    Unmovable,
}

/// Calls `step` for parts of a run until the run is done or stops. The arguments are the first page
/// and the number of pages of a part.
fn for_run(pages: u32, mut step: impl FnMut(u32, u32) -> Step) -> Done {
    let (mut at, mut count) = (0, pages);
    while at < pages {
        match step(at, count) {
            Step::Done(done) => {
                at += done;
                count = pages - at;
            }
            Step::Again => {}
            Step::Smaller => count = (count / 2).max(1),
            Step::Stop(stop) => return Done { pages: at, stop: Some(stop) },
        }
    }
    Done { pages, stop: None }
}

impl LinuxMemory {
    /// Maps a shelf of `positions` for the pages of `region`, which is registered with `uffd`. For
    /// [`Pages::Auto`], tests whether the kernel moves pages as expected.
    ///
    /// # Errors
    /// [`Error::System`] if the shelf cannot be mapped. [`Error::Setting`] if pages must be moved
    /// and the kernel cannot move them.
    pub fn new(
        uffd: Arc<Uffd>,
        region: &Region,
        positions: u32,
        pages: Pages,
    ) -> Result<Self, Error> {
        let why_copying = match pages {
            Pages::Copy => Some(WhyCopying::Setting),
            _ => probe::reason_to_copy(&uffd),
        };
        let way = match (&why_copying, pages) {
            (None, _) => Way::Move,
            (Some(why), Pages::Move) => {
                return Err(Error::Setting {
                    name: "GRANARY_PAGES",
                    value: "move".into(),
                    why: format!("{why}; use GRANARY_PAGES=auto"),
                });
            }
            (Some(_), _) => Way::Copy,
        };
        let system = |source| Error::System { what: "map the shelf".into(), source };
        let len = (positions as usize + 1) * PAGE_BYTES;
        let zeros = sys::map_anonymous(COPIED_RUN as usize * PAGE_BYTES).map_err(system)?;
        let memory = Self {
            shelf: map_shelf(len).map_err(system)?,
            region: region.clone(),
            positions,
            zeros,
            reader: ProgramReader::open(),
            uffd,
            way,
            why_copying,
        };
        if way == Way::Move {
            // SAFETY: the shelf was just mapped.
            unsafe { memory.uffd.register_target(memory.shelf, len).map_err(system)? };
            memory.populate_pages(memory.guard(), PAGE_BYTES);
        }
        Ok(memory)
    }

    /// Returns the way to bring pages from the program's memory to the shelf and back.
    pub fn way(&self) -> Way {
        self.way
    }

    /// Returns the reason why pages are copied, or `None` if they are moved.
    pub fn why_copying(&self) -> Option<&WhyCopying> {
        self.why_copying.as_ref()
    }

    /// Returns the number of positions.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// Returns the maximum number of pages that are present twice for a moment, while the pages are
    /// copied.
    pub fn slack_pages(&self) -> u32 {
        match self.way {
            Way::Move => COPIED_RUN_MOVING,
            Way::Copy => COPIED_RUN,
        }
    }

    /// Appends the descriptors that the pager's threads need, apart from the userfaultfd's.
    pub fn descriptors(&self, into: &mut Vec<i32>) {
        into.extend(self.reader.descriptor());
    }

    fn page_address(&self, page: PageId) -> usize {
        self.region.address(page)
    }

    fn position_address(&self, position: Position) -> usize {
        debug_assert!(position.0 < self.positions, "{position:?} of {}", self.positions);
        self.shelf + position.0 as usize * PAGE_BYTES
    }

    fn guard(&self) -> usize {
        self.shelf + self.positions as usize * PAGE_BYTES
    }

    /// Evaluates the error of a call that maps or protects `count` pages.
    fn refused(&self, what: &str, error: &io::Error, count: u32, tries: &mut u32) -> Step {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => {
                *tries += 1;
                if *tries < TRIES { Step::Again } else { Step::Stop(Stop::Forking) }
            }
            Some(libc::ENOENT) if count > 1 => Step::Smaller,
            // EINTR: the process is being killed.
            Some(libc::EEXIST | libc::ENOENT | libc::ESRCH | libc::EINTR) => {
                Step::Stop(Stop::Changed)
            }
            _ => fatal(what, error),
        }
    }

    /// Returns how many of the first pages of the program's memory the kernel cannot move because
    /// of their mapping. A move to the guard always fails, and the error tells the reason.
    fn unmovable(&self, first: usize, pages: u32) -> u32 {
        let refuses = |page: &u32| {
            let source = first + *page as usize * PAGE_BYTES;
            // SAFETY: the guard is present, so nothing is moved.
            let moved = unsafe {
                self.uffd.move_pages(self.guard(), source, PAGE_BYTES, MoveOptions::default())
            };
            moved.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
        };
        (0..pages).take_while(refuses).count() as u32
    }

    /// Evaluates EINVAL of a move of `count` pages at `program`. Copies at least one page, or
    /// returns [`Step::Smaller`].
    fn not_movable(&self, program: usize, count: u32, copy: impl FnOnce(u32) -> Step) -> Step {
        match self.unmovable(program, count.min(COPIED_RUN_MOVING)) {
            0 if count > 1 => Step::Smaller,
            unmovable => copy(unmovable.max(1)),
        }
    }

    fn move_out(&self, first: usize, to: usize, pages: u32) -> Done {
        const WHAT: &str = "move pages out of the program's memory";
        let (mut tries, mut touched) = (0, None);
        for_run(pages, |at, count| {
            let (source, target) = (first + bytes(at), to + bytes(at));
            // SAFETY: the caller owns the pages and the positions.
            let moved = unsafe { self.uffd.move_pages(target, source, bytes(count), TAKE_OUT) };
            let error = match moved {
                Ok(moved) => return Step::Done(pages_of(moved)),
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EBUSY) if touched == Some(at) => Step::Stop(Stop::Pinned),
                Some(libc::EBUSY) => {
                    touch(source);
                    touched = Some(at);
                    Step::Again
                }
                Some(libc::EINVAL) => self.not_movable(source, count, |part| {
                    self.copy_out(source, target, part, &mut tries)
                }),
                // A page of zeros keeps no position, so no content is lost with these zeros.
                Some(libc::EEXIST) if tries < TRIES && self.discard_zeros(target, count) => {
                    tries += 1;
                    Step::Again
                }
                Some(libc::EEXIST) => fatal(&format!("{WHAT}: a position holds a page"), &error),
                _ => self.refused(WHAT, &error, count, &mut tries),
            }
        })
    }

    fn move_in(&self, from: usize, first: usize, pages: u32) -> Done {
        let (mut tries, mut touched) = (0, None);
        for_run(pages, |at, count| {
            let (source, target) = (from + bytes(at), first + bytes(at));
            // SAFETY: the caller owns the pages and the positions.
            let moved = unsafe { self.uffd.move_pages(target, source, bytes(count), PUT_IN) };
            let error = match moved {
                Ok(moved) => return Step::Done(pages_of(moved)),
                Err(error) => error,
            };
            match error.raw_os_error() {
                // The position has no memory: it was taken out as a page that the program had
                // dropped. Or the kernel has merged it with another page of the same content.
                Some(libc::ENOENT | libc::EBUSY) if touched != Some(at) => {
                    self.populate_pages(source, PAGE_BYTES);
                    touched = Some(at);
                    Step::Again
                }
                Some(libc::EBUSY) => self.copy_in(source, target, 1, &mut tries),
                Some(libc::EINVAL) => self.not_movable(target, count, |part| {
                    self.copy_in(source, target, part, &mut tries)
                }),
                _ => {
                    self.refused("move pages into the program's memory", &error, count, &mut tries)
                }
            }
        })
    }

    /// Moves a page within the program's memory. Returns whether the page was mapped.
    fn move_within(&self, source: usize, target: usize) -> Result<bool, NotMoved> {
        let mut touched = false;
        loop {
            // SAFETY: the caller owns both pages.
            let moved = unsafe { self.uffd.move_pages(target, source, PAGE_BYTES, RELOCATE) };
            let Err(error) = moved else { return Ok(true) };
            match error.raw_os_error() {
                Some(libc::ENOENT) => return Ok(false),
                Some(libc::EAGAIN) => return Err(NotMoved::Refused),
                Some(libc::EBUSY) if !touched => {
                    touch(source);
                    touched = true;
                }
                Some(libc::EBUSY | libc::EINVAL) => return Err(NotMoved::Unmovable),
                _ => fatal("move a page for mremap", &error),
            }
        }
    }

    /// Takes out pages by copying them, at most [`LinuxMemory::slack_pages`].
    fn copy_out(&self, source: usize, target: usize, count: u32, tries: &mut u32) -> Step {
        let len = bytes(count);
        // SAFETY: the caller owns the pages.
        if let Err(error) = unsafe { self.uffd.protect(source, len) } {
            return self.refused("write-protect pages", &error, count, tries);
        }
        // A page that is missing leaves its position as it is: empty, or with the content that an
        // earlier call for a longer run has copied before it dropped the page.
        // SAFETY: the caller owns the positions.
        if let Err(error) = unsafe { self.reader.read(source, target as *mut u8, len) } {
            fatal("read pages of the program", &error);
        }
        // SAFETY: the content of the pages is in the positions.
        match unsafe { sys::madvise(source, len, libc::MADV_DONTNEED) } {
            Ok(()) => Step::Done(count),
            // A part of the run is locked in memory.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && count > 1 => Step::Smaller,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.discard_pages(target, len);
                // SAFETY: the caller owns the page.
                let _ = unsafe { self.uffd.unprotect(source, len, true) };
                Step::Stop(Stop::Pinned)
            }
            Err(error) => fatal("drop pages from the program's memory", &error),
        }
    }

    /// Puts in pages by copying them.
    fn copy_in(&self, source: usize, target: usize, count: u32, tries: &mut u32) -> Step {
        // SAFETY: the caller owns the pages and the positions.
        match unsafe { self.uffd.copy(target, source, bytes(count), false) } {
            Ok(copied) => {
                self.discard_pages(source, copied);
                Step::Done(pages_of(copied))
            }
            Err(error) => {
                self.refused("copy pages into the program's memory", &error, count, tries)
            }
        }
    }

    /// Moves a page within the program's memory by copying it. Returns true if it was mapped;
    /// `None` if the kernel changes no page now.
    fn copy_within(&self, source: usize, target: usize) -> Option<bool> {
        const WHAT: &str = "move a page for mremap";
        // Only the descriptor table of the pager's threads keeps the reader's descriptor, and a
        // thread of the program moves this page.
        let own = (!descriptor::has_own_table()).then(ProgramReader::open);
        let reader = own.as_ref().unwrap_or(&self.reader);
        let mut copy = [0u64; PAGE_BYTES / 8];
        // SAFETY: a local array.
        match unsafe { reader.read(source, copy.as_mut_ptr().cast(), PAGE_BYTES) } {
            Ok(0) => return Some(false),
            Ok(_) => {}
            Err(error) => fatal(WHAT, &error),
        }
        // SAFETY: a local array, and a missing page that the caller owns.
        let done = unsafe {
            let copy = copy.as_ptr() as usize;
            self.uffd.copy_without_wake(target, copy, PAGE_BYTES, false)
        };
        if done.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EAGAIN)) {
            return None;
        }
        // SAFETY: the content is at the target.
        let dropped =
            done.and_then(|_| unsafe { sys::madvise(source, PAGE_BYTES, libc::MADV_DONTNEED) });
        if let Err(error) = dropped {
            fatal(WHAT, &error);
        }
        Some(true)
    }

    /// Gives memory of their own to pages of the shelf.
    fn populate_pages(&self, start: usize, len: usize) {
        const MADV_POPULATE_WRITE: i32 = 23;
        // SAFETY: changes no content.
        if unsafe { sys::madvise(start, len, MADV_POPULATE_WRITE) }.is_err() {
            // Linux before 5.14 does not know the advice.
            (start..start + len).step_by(PAGE_BYTES).for_each(touch);
        }
    }

    /// Frees the memory of positions that hold nothing but zeros. Returns false, and frees nothing,
    /// if one holds anything else.
    fn discard_zeros(&self, start: usize, pages: u32) -> bool {
        let first = start as *const u64;
        // SAFETY: the caller has reserved the positions; one without memory reads as zeros.
        let is_zero = |index| unsafe { first.add(index).read_volatile() } == 0;
        let are_zero = (0..bytes(pages) / 8).all(is_zero);
        if are_zero {
            self.discard_pages(start, bytes(pages));
        }
        are_zero
    }

    fn discard_pages(&self, start: usize, len: usize) {
        // SAFETY: pages of the shelf, whose content the caller has done with.
        if let Err(error) = unsafe { sys::madvise(start, len, libc::MADV_DONTNEED) } {
            fatal("free pages of the shelf", &error);
        }
    }
}

impl Memory for LinuxMemory {
    fn take_out(&self, first: PageId, to: Position, pages: u32) -> Done {
        let (source, target) = (self.page_address(first), self.position_address(to));
        if self.way == Way::Move {
            return self.move_out(source, target, pages);
        }
        let mut tries = 0;
        for_run(pages, |at, count| {
            let count = count.min(COPIED_RUN);
            self.copy_out(source + bytes(at), target + bytes(at), count, &mut tries)
        })
    }

    fn put_in(&self, from: Position, first: PageId, pages: u32) -> Done {
        let (source, target) = (self.position_address(from), self.page_address(first));
        if self.way == Way::Move {
            return self.move_in(source, target, pages);
        }
        let mut tries = 0;
        for_run(pages, |at, count| {
            let count = count.min(COPIED_RUN);
            self.copy_in(source + bytes(at), target + bytes(at), count, &mut tries)
        })
    }

    fn put_zeros(&self, first: PageId, pages: u32, write: bool) -> Done {
        let mut tries = 0;
        for_run(pages, |at, count| {
            let target = self.page_address(PageId(first.0 + at));
            let count = count.min(COPIED_RUN);
            // SAFETY: the caller owns the missing pages.
            let mapped = unsafe {
                match write {
                    true => self.uffd.copy(target, self.zeros, bytes(count), false),
                    false => self.uffd.zero(target, bytes(count)),
                }
            };
            match mapped {
                Ok(mapped) => Step::Done(pages_of(mapped)),
                Err(error) => self.refused("map pages of zeros", &error, count, &mut tries),
            }
        })
    }

    fn drop_pages(&self, first: PageId, pages: u32) {
        // SAFETY: the program drops these pages.
        let dropped =
            unsafe { sys::madvise(self.page_address(first), bytes(pages), libc::MADV_DONTNEED) };
        if let Err(error) = dropped {
            fatal("drop pages", &error);
        }
    }

    /// Because a pinned page is copied, a later write of the device to this page is lost.
    fn relocate(&self, from: PageId, to: PageId) -> Option<bool> {
        let (source, target) = (self.page_address(from), self.page_address(to));
        let moved = match self.way {
            Way::Move => self.move_within(source, target),
            Way::Copy => Err(NotMoved::Unmovable),
        };
        match moved {
            Ok(is_mapped) => Some(is_mapped),
            Err(NotMoved::Refused) => None,
            Err(NotMoved::Unmovable) => self.copy_within(source, target),
        }
    }

    fn is_at(&self, page: PageId, address: usize) -> bool {
        self.region.find(address) == Some(page)
    }

    fn wake(&self, first: PageId, pages: u32) {
        // The threads that wait at unmapped pages were woken when the pages were unmapped.
        let Some(address) = self.region.find_address(first) else { return };
        if let Err(error) = self.uffd.wake(address, bytes(pages)) {
            fatal("wake a thread that waits for a page", &error);
        }
    }

    fn populate(&self, first: Position, pages: u32) {
        self.populate_pages(self.position_address(first), bytes(pages));
    }

    fn discard(&self, first: Position, pages: u32) {
        self.discard_pages(self.position_address(first), bytes(pages));
    }

    fn position(&self, position: Position) -> *mut u8 {
        self.position_address(position) as *mut u8
    }

    fn now_ns(&self) -> u64 {
        sys::now_ns()
    }

    fn pause(&self) {
        // A real-time thread (the handler) that yields gives way to real-time threads only, and the
        // worker is none.
        if sys::is_real_time() {
            std::thread::sleep(PAUSE);
        } else {
            std::thread::yield_now();
        }
    }
}

/// Pause of a real-time thread that waits for an ordinary one.
const PAUSE: std::time::Duration = std::time::Duration::from_micros(20);

impl Drop for LinuxMemory {
    fn drop(&mut self) {
        // SAFETY: the owner drops the memory only after all use of it has ended.
        unsafe {
            let _ = sys::unmap_anonymous(self.shelf, (self.positions as usize + 1) * PAGE_BYTES);
            let _ = sys::unmap_anonymous(self.zeros, COPIED_RUN as usize * PAGE_BYTES);
        }
    }
}

/// Maps memory for positions: of small pages, not in core dumps, and not in forked children.
pub(super) fn map_shelf(len: usize) -> io::Result<usize> {
    let start = sys::map_anonymous(len)?;
    for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
        // SAFETY: memory that was just mapped. A kernel without huge pages refuses the first one.
        let _ = unsafe { sys::madvise(start, len, advice) };
    }
    Ok(start)
}

fn bytes(pages: u32) -> usize {
    pages as usize * PAGE_BYTES
}

fn pages_of(bytes: usize) -> u32 {
    (bytes / PAGE_BYTES) as u32
}

/// Ends the process because a necessary operation failed. Continuing could expose wrong data to the
/// program.
fn fatal(what: &str, error: &io::Error) -> ! {
    let process = descriptor::program();
    sys::die(
        EXIT_PAGER,
        &format!("cannot {what}: {error}; process {process} ends now (status {EXIT_PAGER})"),
    )
}

#[cfg(test)]
#[path = "linux_tests.rs"]
mod tests;
