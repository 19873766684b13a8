//! Advice of the program on its memory: its effect on residency and on read-ahead, and that no
//! advice but DONTNEED and FREE changes the content.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use pager::stats::Counter;
use pager::sys::PAGE_BYTES;
use pager::transport::{
    ChunkHandle, Direction, FrameMemory, Lane, PageIo, Ticket, Transport, TransportError,
    TransportStats,
};
use pager::{Config, Pager};

const MADV_COLD: i32 = 20;
const MADV_PAGEOUT: i32 = 21;
const PAGES: usize = 600;

struct Memory {
    pager: Arc<Pager>,
    base: usize,
    /// Resident pages after the mapping: the handler fills pages ahead, also beyond its end.
    beyond: u32,
}

impl Memory {
    /// Maps pages that all fit in the bound, and fills them.
    fn new() -> Self {
        Self::over(|transport| transport)
    }

    /// As `new`, over a transport that wraps the usual one.
    fn over(wrap: impl FnOnce(Box<dyn Transport>) -> Box<dyn Transport>) -> Self {
        let config = Config::new(8 << 20, "memory:1GiB");
        let transport = wrap(Pager::open_transport(&config).unwrap());
        let pager = Pager::new(&config, transport).unwrap();
        pager.start().unwrap();
        let base = pager.map(PAGES * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap();
        let mut memory = Self { pager, base, beyond: 0 };
        memory.fill();
        memory.beyond = memory.pager.resident() - PAGES as u32;
        memory
    }

    fn fill(&self) {
        for page in 0..PAGES {
            // SAFETY: mapped memory of this size.
            unsafe { self.word(page).write_volatile(page as u64 + 1) };
        }
    }

    fn word(&self, page: usize) -> *mut u64 {
        (self.base + page * PAGE_BYTES + page % 512 * 8) as *mut u64
    }

    fn advise(&self, pages: std::ops::Range<usize>, advice: i32) {
        let start = self.base + pages.start * PAGE_BYTES;
        self.pager.advise(start, pages.len() * PAGE_BYTES, advice).unwrap();
    }

    fn check(&self, pages: std::ops::Range<usize>) {
        for page in pages {
            // SAFETY: mapped by `new`.
            assert_eq!(unsafe { self.word(page).read_volatile() }, page as u64 + 1, "{page}");
        }
    }

    /// Maps further pages.
    fn map(&self, pages: usize) -> usize {
        self.pager.map(pages * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap()
    }

    /// Writes to new pages until a condition on the number of evicted pages holds. Returns the
    /// number of new pages.
    fn touch_until(&self, holds: impl Fn(u64) -> bool) -> u32 {
        let pages = 2 * self.pager.limit();
        let base = self.map(pages as usize);
        for page in 0..pages {
            if holds(self.count(Counter::PagesEvicted)) {
                return page;
            }
            // SAFETY: mapped memory of this size.
            unsafe { ((base + page as usize * PAGE_BYTES) as *mut u64).write_volatile(7) };
        }
        panic!("the condition does not hold after {pages} pages");
    }

    /// Checks pages, and returns the number of faults.
    fn faults_of_check(&self, pages: std::ops::Range<usize>) -> u64 {
        let before = self.count(Counter::Faults);
        self.check(pages);
        self.count(Counter::Faults) - before
    }

    fn count(&self, counter: Counter) -> u64 {
        self.pager.stats().get(counter)
    }

    /// Takes pages out, and waits until at most `resident` pages of the mapping are resident. The
    /// advice is repeated after a while without effect: the evictor passes over pages that the
    /// handler still has BUSY after it has woken their thread.
    fn take_out(&self, pages: std::ops::Range<usize>, advice: i32, resident: u32) {
        let (start, mut advised) = (Instant::now(), None::<Instant>);
        while self.pager.resident() > resident + self.beyond {
            if advised.is_none_or(|at| at.elapsed() > Duration::from_millis(500)) {
                self.advise(pages.clone(), advice);
                advised = Some(Instant::now());
            }
            let waited = start.elapsed() < Duration::from_secs(60);
            assert!(waited, "{} pages stay resident", self.pager.resident());
            std::thread::yield_now();
        }
    }
}

#[test]
fn pages_that_the_program_does_not_need_are_taken_out_at_once() {
    let memory = Memory::new();
    memory.take_out(100..400, MADV_PAGEOUT, PAGES as u32 - 300);
    memory.check(0..PAGES);
}

#[test]
fn cold_pages_stay_until_room_is_needed_and_leave_first() {
    let memory = Memory::new();
    let (evicted, resident) = (memory.count(Counter::PagesEvicted), memory.pager.resident());
    memory.advise(100..500, MADV_COLD);
    let other = memory.touch_until(|evicted_now| evicted_now >= evicted + 100);
    assert!(other + resident > memory.pager.limit() / 2, "room was not needed");
    let gone = memory.count(Counter::PagesEvicted) - evicted;
    assert!(gone <= 400, "{gone} pages were evicted, more than are cold");
    assert_eq!(memory.faults_of_check(0..100), 0);
    assert_eq!(memory.faults_of_check(500..PAGES), 0);
    assert!(memory.faults_of_check(100..500) > 0);
}

#[test]
fn a_sequential_pass_evicts_only_pages_that_it_has_left() {
    let memory = Memory::new();
    let pages = 3 * memory.pager.limit() as usize;
    let base = memory.map(pages);
    memory.pager.advise(base, pages * PAGE_BYTES, libc::MADV_SEQUENTIAL).unwrap();
    for page in 0..pages {
        let word = (base + page * PAGE_BYTES + page % 512 * 8) as *mut u64;
        // SAFETY: mapped memory of this size.
        unsafe { word.write_volatile(page as u64 + 1) };
    }
    assert!(memory.count(Counter::PagesEvicted) > pages as u64 / 2);
    assert_eq!(memory.faults_of_check(0..PAGES), 0, "the pages before the pass");
}

#[test]
fn pages_that_the_program_will_need_are_brought_in_before() {
    let memory = Memory::new();
    memory.take_out(0..PAGES, MADV_PAGEOUT, 0);
    memory.advise(50..PAGES, libc::MADV_WILLNEED);
    // The handler counts the pages of a run after it has mapped them, which may be after the advice
    // has returned.
    let start = Instant::now();
    while memory.pager.resident() < PAGES as u32 - 50 {
        let waited = start.elapsed() < Duration::from_secs(60);
        assert!(waited, "only {} pages are resident", memory.pager.resident());
        std::thread::yield_now();
    }
    let faults = memory.count(Counter::Faults);
    memory.check(50..PAGES);
    assert_eq!(memory.count(Counter::Faults), faults);
    memory.check(0..50);
    assert!(memory.count(Counter::Faults) > faults);
}

/// Stops READs while it is closed.
#[derive(Default)]
struct Gate {
    is_closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn close(&self, is_closed: bool) {
        *self.is_closed.lock().unwrap() = is_closed;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let is_closed = self.is_closed.lock().unwrap();
        drop(self.opened.wait_while(is_closed, |is_closed| *is_closed).unwrap());
    }
}

/// A transport behind a gate.
struct Gated(Box<dyn Transport>, Arc<Gate>);

impl Transport for Gated {
    fn chunk_bytes(&self) -> usize {
        self.0.chunk_bytes()
    }

    fn frames(&self) -> FrameMemory {
        self.0.frames()
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        self.0.allocate_chunk()
    }

    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError> {
        self.0.free_chunk(chunk)
    }

    fn post(
        &self,
        lane: Lane,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<Ticket, TransportError> {
        if direction == Direction::Read {
            self.1.pass();
        }
        self.0.post(lane, direction, ios)
    }

    fn stats(&self) -> TransportStats {
        self.0.stats()
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        self.0.descriptors(keep);
    }
}

#[test]
fn the_advice_that_pages_are_needed_waits_for_no_read() {
    let gate = Arc::new(Gate::default());
    let memory = Memory::over(|transport| Box::new(Gated(transport, gate.clone())));
    memory.take_out(0..PAGES, MADV_PAGEOUT, 0);
    let before = memory.pager.resident();
    gate.close(true);
    let advised = std::thread::spawn(move || {
        memory.advise(0..PAGES, libc::MADV_WILLNEED);
        memory
    });
    let start = Instant::now();
    while !advised.is_finished() && start.elapsed() < Duration::from_secs(60) {
        std::thread::yield_now();
    }
    let returned = advised.is_finished();
    gate.close(false);
    let memory = advised.join().unwrap();
    assert!(returned, "the call waits for READs");
    while memory.pager.resident() < before + PAGES as u32 {
        assert!(start.elapsed() < Duration::from_secs(120), "{}", memory.pager.resident());
        std::thread::yield_now();
    }
    memory.check(0..PAGES);
}

#[test]
fn advice_on_access_decides_on_read_ahead() {
    let memory = Memory::new();
    // The first pages push the others off the shelf, so that those are remote.
    let ahead = |advice: i32, pages: std::ops::Range<usize>| {
        memory.take_out(0..PAGES, MADV_PAGEOUT, 0);
        memory.advise(0..PAGES, advice);
        let before = [Counter::PagesReadAhead, Counter::Faults].map(|c| memory.count(c));
        memory.check(pages);
        let after = [Counter::PagesReadAhead, Counter::Faults].map(|c| memory.count(c));
        (after[0] - before[0], after[1] - before[1])
    };
    let (random, random_faults) = ahead(libc::MADV_RANDOM, 0..200);
    assert_eq!((random, random_faults), (0, 200));
    let (sequential, sequential_faults) = ahead(libc::MADV_SEQUENTIAL, 0..200);
    let (normal, normal_faults) = ahead(libc::MADV_NORMAL, 0..200);
    assert!(sequential > 150 && normal > 100, "{sequential} {normal}");
    assert!(sequential_faults < normal_faults, "{sequential_faults} {normal_faults}");
}

#[test]
fn freed_pages_read_as_zeros_and_advice_ends_with_the_mapping() {
    let memory = Memory::new();
    memory.take_out(0..PAGES, MADV_PAGEOUT, 0);
    memory.advise(0..10, libc::MADV_FREE);
    // SAFETY: mapped by `new`.
    assert!((0..10).all(|page| unsafe { memory.word(page).read_volatile() } == 0));
    memory.check(10..PAGES);
    memory.advise(0..PAGES, libc::MADV_RANDOM);
    let Memory { pager, base, beyond } = memory;
    pager.unmap(base, PAGES * PAGE_BYTES).unwrap();
    let bytes = PAGES * PAGE_BYTES;
    assert_eq!(pager.map(bytes, libc::PROT_READ | libc::PROT_WRITE), Ok(base), "the same place");
    let memory = Memory { pager, base, beyond };
    memory.fill();
    memory.take_out(0..PAGES, MADV_PAGEOUT, 0);
    let before = memory.count(Counter::PagesReadAhead);
    memory.check(0..300);
    assert!(memory.count(Counter::PagesReadAhead) > before, "no advice on the new mapping");
}
