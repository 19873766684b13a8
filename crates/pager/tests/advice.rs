//! Advice of the program on its memory: its effect on residency and on read-ahead, and that no
//! advice but DONTNEED and FREE changes the content.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pager::stats::Counter;
use pager::sys::PAGE_BYTES;
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
        let config = Config::new(8 << 20, "memory:1GiB");
        let pager = Pager::new(&config, Pager::open_transport(&config).unwrap()).unwrap();
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
    memory.take_out(0..100, MADV_COLD, PAGES as u32 - 400);
    memory.check(0..PAGES);
}

#[test]
fn pages_that_the_program_will_need_are_brought_in_before() {
    let memory = Memory::new();
    memory.take_out(0..PAGES, MADV_PAGEOUT, 0);
    memory.advise(50..PAGES, libc::MADV_WILLNEED);
    assert!(memory.pager.resident() >= PAGES as u32 - 50, "{}", memory.pager.resident());
    let faults = memory.count(Counter::Faults);
    memory.check(50..PAGES);
    assert_eq!(memory.count(Counter::Faults), faults);
    memory.check(0..50);
    assert!(memory.count(Counter::Faults) > faults);
}

#[test]
fn advice_on_access_decides_on_read_ahead() {
    let memory = Memory::new();
    // The first pages push the others out of staging, so that those are remote.
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
