//! Tests with the kernel's userfaultfd. No thread serves faults, so the tests read the program's
//! pages with [`ProgramReader`], which never waits.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::*;
use crate::uffd::{Event, Features};

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A region and its memory. The fields are dropped in this order.
struct Fixture {
    memory: LinuxMemory,
    region: Region,
}

impl Fixture {
    fn with(pages: Pages, features: Features) -> Self {
        let uffd = Arc::new(Uffd::open(features).expect("userfaultfd is permitted"));
        let region = Region::reserve(1 << 28).unwrap();
        region.prepare(region.base(), region.len(), true);
        // SAFETY: an empty region of this test.
        unsafe {
            uffd.register(region.base(), region.len()).unwrap();
            sys::mprotect(region.base(), region.arena().len() * PAGE_BYTES, READ_WRITE).unwrap();
        }
        Self { memory: LinuxMemory::new(uffd, &region, 256, pages).unwrap(), region }
    }

    fn address(&self, page: u32) -> usize {
        self.region.address(PageId(page))
    }

    fn protect(&self, page: u32, pages: u32, protection: i32) {
        // SAFETY: pages of the test's region.
        unsafe { sys::mprotect(self.address(page), bytes(pages), protection) }.unwrap();
    }

    /// Maps pages at `first` that contain the bytes `first`, `first + 1`, and so on.
    fn fill(&self, first: u32, pages: u32) {
        for page in first..first + pages {
            let content = [page as u8; PAGE_BYTES];
            let source = content.as_ptr() as usize;
            // SAFETY: missing pages of the test's region.
            unsafe { self.memory.uffd.copy(self.address(page), source, PAGE_BYTES, false) }
                .unwrap();
        }
    }

    /// Returns the byte of which the page consists, or `None` if the page is missing.
    fn page(&self, page: u32) -> Option<u8> {
        let mut content = [0; PAGE_BYTES];
        let target = content.as_mut_ptr();
        // SAFETY: a local array.
        let read = unsafe { self.memory.reader.read(self.address(page), target, PAGE_BYTES) };
        (read.unwrap() == 1).then(|| same_bytes(&content))
    }

    fn pages(&self, first: u32, pages: u32) -> Vec<Option<u8>> {
        (first..first + pages).map(|page| self.page(page)).collect()
    }

    fn position(&self, position: u32) -> u8 {
        let start = self.memory.position(Position(position));
        // SAFETY: a position of the test; the kernel fills it with zeros if it is empty.
        same_bytes(unsafe { std::slice::from_raw_parts(start, PAGE_BYTES) })
    }

    fn take_out(&self, first: u32, to: u32, pages: u32) -> Done {
        self.memory.take_out(PageId(first), Position(to), pages)
    }

    fn put_in(&self, from: u32, first: u32, pages: u32) -> Done {
        self.memory.put_in(Position(from), PageId(first), pages)
    }

    /// Returns the number of positions that have memory.
    fn present_positions(&self, first: u32, pages: u32) -> usize {
        let mut present = vec![0u8; pages as usize];
        let start = self.memory.position(Position(first));
        // SAFETY: `present` has an entry for each page.
        let done = unsafe { libc::mincore(start.cast(), bytes(pages), present.as_mut_ptr()) };
        assert_eq!(done, 0);
        present.iter().filter(|entry| **entry & 1 == 1).count()
    }
}

fn same_bytes(content: &[u8]) -> u8 {
    assert!(content.iter().all(|byte| *byte == content[0]), "a page of different bytes");
    content[0]
}

fn done(pages: u32) -> Done {
    Done { pages, stop: None }
}

fn stopped(pages: u32, stop: Stop) -> Done {
    Done { pages, stop: Some(stop) }
}

/// Runs a test in both ways; on a kernel that cannot move pages, in one.
fn in_both_ways(test: impl Fn(&Fixture)) {
    in_ways(Features::default(), test);
}

fn in_ways(features: Features, test: impl Fn(&Fixture)) {
    {
        let copying = Fixture::with(Pages::Copy, features);
        assert_eq!(copying.memory.way(), Way::Copy);
        test(&copying);
    }
    if let Some(moving) = moving(features) {
        test(&moving);
    }
}

fn moving(features: Features) -> Option<Fixture> {
    let fixture = Fixture::with(Pages::Auto, features);
    if let Some(why) = fixture.memory.why_copying() {
        eprintln!("not tested with moves: {why}");
        return None;
    }
    assert_eq!(fixture.memory.way(), Way::Move);
    Some(fixture)
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < end, "timeout: not reached within 10 s: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn run_returns_with_its_content() {
    in_both_ways(|f| {
        f.fill(1, 100);
        assert_eq!(f.take_out(1, 5, 100), done(100));
        assert_eq!(f.pages(1, 100), [None; 100]);
        assert_eq!(f.present_positions(5, 100), 100);
        assert!((0..100).all(|index| f.position(5 + index) == 1 + index as u8));
        assert_eq!(f.put_in(5, 1, 100), done(100));
        assert!((1..101).all(|page| f.page(page) == Some(page as u8)));
        assert_eq!(f.present_positions(5, 100), 0, "the positions are empty");
        assert_eq!(f.take_out(1, 5, 100), done(100), "empty positions can be filled again");
    });
}

#[test]
fn stray_zeros_at_positions_are_no_obstacle() {
    in_both_ways(|f| {
        f.fill(1, 8);
        assert_eq!(f.position(6), 0, "the read maps a page of zeros");
        assert_eq!(f.present_positions(5, 8), 1);
        assert_eq!(f.take_out(1, 5, 8), done(8));
        assert_eq!(
            (5..13).map(|at| f.position(at)).collect::<Vec<_>>(),
            (1..9).collect::<Vec<_>>()
        );
    });
}

/// Linux 6.18 moves pages and reports EEXIST if it has to retry (see [`Uffd::move_pages`]). The
/// test makes the same moves before the call.
#[test]
fn pages_that_the_kernel_moved_before_an_error_count() {
    let _forks = FORKS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(f) = moving(Features::default()) else { return };
    let moved = |target, source, pages| {
        // SAFETY: pages and positions of the test.
        let moved = unsafe { f.memory.uffd.move_pages(target, source, bytes(pages), RELOCATE) };
        assert_eq!(moved.unwrap(), bytes(pages));
    };
    let position = |at: u32| f.memory.position_address(Position(at));
    f.fill(1, 8);
    moved(position(5), f.address(1), 3);
    assert_eq!(f.take_out(1, 5, 8), done(8));
    assert!((0..8).all(|index| f.position(5 + index) == 1 + index as u8));

    moved(f.address(1), position(5), 3);
    assert_eq!(f.put_in(5, 1, 8), done(8));
    assert!((1..9).all(|page| f.page(page) == Some(page as u8)));
    assert_eq!(f.present_positions(5, 8), 0);

    moved(f.address(11), f.address(1), 1);
    assert_eq!(f.memory.relocate(PageId(1), PageId(11)), Some(true));
    assert_eq!([f.page(1), f.page(11)], [None, Some(1)]);
}

#[test]
fn page_dropped_by_the_program_becomes_zeros() {
    in_both_ways(|f| {
        f.fill(1, 4);
        f.memory.drop_pages(PageId(2), 2);
        assert_eq!(f.take_out(1, 0, 4), done(4));
        assert_eq!(f.put_in(0, 1, 4), done(4), "positions without memory");
        assert_eq!(f.pages(1, 4), [Some(1), Some(0), Some(0), Some(4)]);
        assert_eq!(f.take_out(1, 0, 4), done(4));
        assert_eq!([0, 1, 2, 3].map(|position| f.position(position)), [1, 0, 0, 4]);
    });
}

#[test]
fn put_in_stops_before_a_mapped_page() {
    in_both_ways(|f| {
        f.fill(1, 4);
        assert_eq!(f.take_out(1, 0, 4), done(4));
        f.fill(3, 1);
        assert_eq!(f.put_in(0, 1, 4), stopped(2, Stop::Changed));
        assert_eq!(f.pages(1, 4), [Some(1), Some(2), Some(3), None]);
        assert_eq!([f.position(2), f.position(3)], [3, 4], "these positions stay filled");
    });
}

#[test]
fn zeros_are_mapped_up_to_a_mapped_page() {
    in_both_ways(|f| {
        for write in [false, true] {
            assert_eq!(f.memory.put_zeros(PageId(1), 100, write), done(100));
            assert_eq!(f.pages(1, 100), [Some(0); 100]);
            f.memory.drop_pages(PageId(1), 100);
            f.fill(3, 1);
            let done = f.memory.put_zeros(PageId(1), 4, write);
            assert_eq!(done, stopped(2, Stop::Changed));
            assert_eq!(f.pages(1, 4), [Some(0), Some(0), Some(3), None]);
            f.memory.drop_pages(PageId(1), 4);
        }
    });
}

#[test]
fn run_over_all_protections_keeps_its_content() {
    const PAGES: u32 = 40;
    let protections = [
        (4, libc::PROT_READ),
        (9, libc::PROT_NONE),
        (12, READ_WRITE | libc::PROT_EXEC),
        (13, READ_WRITE),
        (20, libc::PROT_READ),
        (35, READ_WRITE),
    ];
    in_both_ways(|f| {
        f.fill(0, PAGES);
        for (index, &(first, protection)) in protections.iter().enumerate() {
            let end = protections.get(index + 1).map_or(PAGES, |next| next.0);
            f.protect(first, end - first, protection);
        }
        assert_eq!(f.take_out(0, 0, PAGES), done(PAGES));
        assert_eq!(f.pages(0, PAGES), [None; PAGES as usize]);
        assert!((0..PAGES).all(|position| f.position(position) == position as u8));
        assert_eq!(f.put_in(0, 0, PAGES), done(PAGES));
        assert!((0..PAGES).all(|page| f.page(page) == Some(page as u8)));
        assert_eq!(f.present_positions(0, PAGES), 0);
        f.memory.drop_pages(PageId(0), PAGES);
        assert_eq!(f.memory.put_zeros(PageId(0), PAGES, true), done(PAGES));
        assert_eq!(f.pages(0, PAGES), [Some(0); PAGES as usize]);
    });
}

/// Held while a test forks. A fork waits until its event has been read from every userfaultfd that
/// reports forks, including those of other tests.
static FORKS: Mutex<()> = Mutex::new(());

/// Starts a child that lives until the returned descriptor is closed.
fn fork_child() -> (i32, std::os::fd::OwnedFd) {
    use std::os::fd::FromRawFd;
    let mut ends = [0; 2];
    // SAFETY: the child makes only system calls; the test owns the descriptors.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            libc::close(ends[1]);
            let mut byte = 0u8;
            libc::read(ends[0], (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
        libc::close(ends[0]);
        (child, std::os::fd::OwnedFd::from_raw_fd(ends[1]))
    }
}

fn wait_for(child: i32) {
    // SAFETY: a child of this test.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
}

#[test]
fn pages_shared_with_a_forked_child_are_taken_out() {
    let _forks = FORKS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    in_both_ways(|f| {
        f.fill(1, 20);
        let (child, alive) = fork_child();
        assert_eq!(f.take_out(1, 0, 10), done(10), "the child is alive");
        drop(alive);
        wait_for(child);
        assert_eq!(f.take_out(11, 10, 10), done(10), "the child is gone");
        assert!((0..20).all(|position| f.position(position) == 1 + position as u8));
        assert_eq!(f.put_in(0, 1, 20), done(20));
        assert!((1..21).all(|page| f.page(page) == Some(page as u8)));
    });
}

/// Pins two pages as a buffer of a new io_uring. Returns `None` if io_uring is not permitted.
fn pin(address: usize) -> Option<std::os::fd::OwnedFd> {
    use std::os::fd::{AsRawFd, FromRawFd};
    const REGISTER_BUFFERS: u32 = 0;
    let mut parameters = [0u8; 120];
    // SAFETY: `parameters` has the size of `struct io_uring_params`.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
    if ring < 0 {
        eprintln!("pins are not tested: io_uring_setup: {}", io::Error::last_os_error());
        return None;
    }
    // SAFETY: just opened.
    let ring = unsafe { std::os::fd::OwnedFd::from_raw_fd(ring as i32) };
    let buffer = libc::iovec { iov_base: address as *mut _, iov_len: 2 * PAGE_BYTES };
    // SAFETY: mapped pages of the test.
    let done = unsafe {
        libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), REGISTER_BUFFERS, &buffer, 1)
    };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    Some(ring)
}

#[test]
fn pinned_page_stays_until_it_is_released() {
    let Some(f) = moving(Features::default()) else { return };
    f.fill(1, 6);
    let Some(ring) = pin(f.address(3)) else { return };
    assert_eq!(f.take_out(1, 0, 6), stopped(2, Stop::Pinned));
    assert_eq!(f.take_out(4, 2, 3), stopped(0, Stop::Pinned));
    assert_eq!(f.take_out(5, 4, 2), done(2), "the pages behind the pinned ones");
    assert_eq!(f.pages(1, 6), [None, None, Some(3), Some(4), None, None]);
    drop(ring);
    // The kernel releases the pages in the background.
    wait_until("the page is released", || f.take_out(3, 2, 1) == done(1));
    wait_until("the page is released", || f.take_out(4, 3, 1) == done(1));
    assert!((0..6).all(|position| f.position(position) == 1 + position as u8));
}

#[test]
fn page_locked_in_memory_stays() {
    in_both_ways(|f| {
        f.fill(1, 4);
        // SAFETY: a page of the test.
        let locked = unsafe { libc::mlock(f.address(3) as *const _, PAGE_BYTES) };
        assert_eq!(locked, 0, "{}", io::Error::last_os_error());
        assert_eq!(f.take_out(1, 0, 4), stopped(2, Stop::Pinned));
        assert_eq!(f.pages(1, 4), [None, None, Some(3), Some(4)]);
        assert_eq!([f.position(0), f.position(1), f.position(2)], [1, 2, 0]);
        // If the page were still write-protected, this thread would wait without end.
        // SAFETY: a mapped page of the test.
        unsafe { (f.address(3) as *mut u8).write_volatile(3) };
    });
}

#[test]
fn page_moves_within_the_program_with_its_content() {
    let _forks = FORKS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    in_both_ways(|f| {
        f.fill(1, 3);
        assert_eq!(f.memory.relocate(PageId(1), PageId(11)), Some(true));
        f.protect(2, 1, libc::PROT_READ);
        f.protect(12, 1, libc::PROT_READ);
        assert_eq!(
            f.memory.relocate(PageId(2), PageId(12)),
            Some(true),
            "a page that cannot be moved"
        );
        let (child, alive) = fork_child();
        assert_eq!(
            f.memory.relocate(PageId(3), PageId(13)),
            Some(true),
            "a page shared with a child"
        );
        drop(alive);
        wait_for(child);
        assert_eq!(f.memory.relocate(PageId(4), PageId(14)), Some(false), "a missing page");
        assert_eq!(f.pages(1, 4), [None; 4]);
        assert_eq!(f.pages(11, 4), [Some(1), Some(2), Some(3), None]);
    });
}

/// The descriptor tables of the program's threads have no reader after the start of the pager's
/// threads.
#[test]
fn page_is_copied_within_the_program_by_a_thread_without_the_reader() {
    let f = Fixture::with(Pages::Copy, Features::default());
    f.fill(1, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: gives this thread a descriptor table of its own.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            let reader = f.memory.reader.descriptor().expect("/proc is mounted");
            // SAFETY: closes the copy in this thread's table only.
            assert_eq!(unsafe { libc::close(reader) }, 0);
            assert_eq!(f.memory.relocate(PageId(1), PageId(11)), Some(true));
        });
    });
    assert_eq!([f.page(1), f.page(11)], [None, Some(1)]);
}

#[test]
fn no_page_is_taken_out_or_put_in_during_a_fork() {
    let _forks = FORKS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let features = Features { fork_events: true };
    if let Err(error) = Uffd::open(features) {
        eprintln!("forks are not tested: {error}");
        return;
    }
    in_ways(features, |f| {
        f.fill(1, 2);
        let forking = std::thread::spawn(fork_child);
        let mut position = 0;
        wait_until("the fork has begun", || match f.take_out(1, position, 1) {
            Done { pages: 1, .. } => {
                let back = f.put_in(position, 1, 1);
                position += u32::from(back.pages == 0);
                back == stopped(0, Stop::Forking)
            }
            other => {
                assert_eq!(other, stopped(0, Stop::Forking));
                true
            }
        });
        assert!(!forking.is_finished());
        assert_eq!(f.memory.relocate(PageId(2), PageId(12)), None);
        // Forks of other tests report events too, and wait for this thread to read them.
        f.memory.uffd.set_nonblocking().unwrap();
        wait_until("the fork has ended", || {
            let mut events = Vec::new();
            let _ = f.memory.uffd.read(&mut events);
            assert!(events.iter().all(|event| matches!(event, Event::Fork(_))), "{events:?}");
            forking.is_finished()
        });
        let (child, alive) = forking.join().unwrap();
        drop(alive);
        wait_for(child);
        match f.page(1) {
            Some(1) => assert_eq!(f.take_out(1, 10, 1), done(1)),
            other => {
                assert_eq!(other, None);
                assert_eq!(f.put_in(0, 1, 1), done(1));
            }
        }
    });
}

/// Starts a thread that reads a missing page, and waits for its fault.
fn read_in_thread(f: &Fixture, page: u32) -> std::thread::JoinHandle<u8> {
    let address = f.address(page);
    // SAFETY: a page of the test, which lives until the thread has ended.
    let reader = std::thread::spawn(move || unsafe { (address as *const u8).read_volatile() });
    let mut events = Vec::new();
    f.memory.uffd.read(&mut events).unwrap();
    assert!(matches!(events[..], [Event::Fault(fault)] if fault.address == address), "{events:?}");
    reader
}

#[test]
fn waiting_thread_wakes_when_its_page_is_mapped() {
    in_both_ways(|f| {
        f.memory.populate(Position(0), 2);
        // SAFETY: a filled position of the test.
        unsafe { f.memory.position(Position(1)).write_bytes(9, PAGE_BYTES) };
        let reader = read_in_thread(f, 2);
        assert_eq!(f.put_in(0, 1, 2), done(2));
        assert_eq!(reader.join().unwrap(), 9);
        for (page, write) in [(3, false), (4, true)] {
            let reader = read_in_thread(f, page);
            assert_eq!(f.memory.put_zeros(PageId(page), 1, write), done(1));
            assert_eq!(reader.join().unwrap(), 0);
        }
        let reader = read_in_thread(f, 5);
        f.memory.wake(PageId(5), 1);
        let mut events = Vec::new();
        f.memory.uffd.read(&mut events).unwrap();
        assert!(matches!(events[..], [Event::Fault(_)]), "the thread faults again: {events:?}");
        assert_eq!(f.memory.put_zeros(PageId(5), 1, false), done(1));
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn positions_get_and_lose_memory() {
    in_both_ways(|f| {
        assert_eq!(f.present_positions(0, 8), 0);
        f.memory.populate(Position(2), 4);
        assert_eq!(f.present_positions(0, 8), 4);
        assert_eq!(f.position(2), 0);
        f.memory.discard(Position(3), 2);
        assert_eq!(f.present_positions(0, 8), 2);
    });
}

#[test]
fn reads_and_touches_of_missing_pages_do_not_wait() {
    in_both_ways(|f| {
        f.fill(2, 1);
        let mut content = [1u8; 3 * PAGE_BYTES];
        // SAFETY: a local array.
        let read = unsafe {
            f.memory.reader.read(f.address(1), content.as_mut_ptr(), content.len()).unwrap()
        };
        assert_eq!(read, 1, "the first and the third page are missing");
        let (first, rest) = content.split_at(PAGE_BYTES);
        assert_eq!((same_bytes(first), same_bytes(&rest[..PAGE_BYTES])), (1, 2));
        touch(f.address(1));
        touch(f.address(2));
        assert_eq!(f.pages(1, 3), [None, Some(2), None]);
    });
}

/// A thread increments words of pages that are taken out and put in all the time. No write is lost.
#[test]
fn concurrent_writes_are_kept() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    const PAGES: u32 = 16;
    const WRITES: u64 = 1000;
    in_both_ways(|f| {
        assert_eq!(f.memory.put_zeros(PageId(0), PAGES, true), done(PAGES));
        let (written, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    let count = written.load(Ordering::Relaxed);
                    let word = f.address((count % u64::from(PAGES)) as u32) as *mut u64;
                    // SAFETY: a word of the test that only this thread writes.
                    unsafe { word.write_volatile(word.read_volatile() + 1) };
                    written.store(count + 1, Ordering::Relaxed);
                }
            });
            let mut rounds = 0;
            wait_until("the thread has written", || {
                assert_eq!(f.take_out(0, 0, PAGES), done(PAGES));
                assert_eq!(f.put_in(0, 0, PAGES), done(PAGES));
                // A thread that waits for a write-protected page retries.
                f.memory.wake(PageId(0), PAGES);
                std::thread::yield_now();
                rounds += 1;
                rounds >= 300 && written.load(Ordering::Relaxed) >= WRITES
            });
            ended.store(true, Ordering::Relaxed);
        });
        let found = (0..PAGES).map(|page| {
            // SAFETY: a mapped page, which no thread writes any more.
            unsafe { (f.address(page) as *const u64).read_volatile() }
        });
        assert_eq!(found.sum::<u64>(), written.load(Ordering::Relaxed));
    });
}

#[test]
fn settings_choose_the_way() {
    let copying = Fixture::with(Pages::Copy, Features::default()).memory;
    assert_eq!((copying.way(), copying.slack_pages()), (Way::Copy, COPIED_RUN));
    assert_eq!(copying.why_copying(), Some(&WhyCopying::Setting));
    let Some(f) = moving(Features::default()) else { return };
    assert_eq!((f.memory.way(), f.memory.slack_pages()), (Way::Move, COPIED_RUN_MOVING));
    assert_eq!(Fixture::with(Pages::Move, Features::default()).memory.way(), Way::Move);
    let mut descriptors = Vec::new();
    f.memory.descriptors(&mut descriptors);
    assert!(matches!(descriptors[..], [fd] if descriptor::is_ours(fd)));
    drop(f);
    assert!(!descriptor::is_ours(descriptors[0]));
}
