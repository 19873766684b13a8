//! Page faults of a paged program: the workload of [`crate::uffd_baseline`], with the pager and
//! the pool.
//!
//! This code runs in a process that the preload library pages; its memory is an ordinary
//! allocation. Every page holds its number, so that no page is zero (the pager does not store zero
//! pages) and a wrong page is detected. Pages are only read, so that the fault is measured and not
//! the write-back.
//!
//! Random touches repeat one shuffled order of the pages. Each page is then touched at the largest
//! possible distance from its last touch, so every touch faults if the local memory is clearly
//! smaller than the touched memory.

use std::time::{Duration, Instant};

use crate::fault::{Outcome, Pattern};
use units::{PAGE_BYTES, Random};

/// Pages between two clock readings, with sequential touches.
const BATCH_PAGES: usize = 64;

/// Memory of a program, touched page by page.
pub struct Memory {
    words: Vec<u64>,
    /// The shuffled order of the pages.
    order: Vec<u32>,
    /// Index into `order` of the next random touch.
    next_random: usize,
    /// Page of the next sequential touch.
    next_sequential: usize,
}

const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();

/// Error: a page does not hold its stored content, because the pager lost data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "page {page} holds {found:#x} instead of its stored content: the pager lost data; please \
     report this bug"
)]
pub struct WrongPage {
    page: usize,
    found: u64,
}

impl Memory {
    /// Allocates and fills `bytes`, rounded down to whole pages.
    pub fn new(bytes: usize) -> Self {
        let pages = bytes / PAGE_BYTES;
        assert!(pages > 0, "{bytes} bytes are less than a page");
        // One extra page, because an allocation may start in the middle of a page.
        let mut words = vec![0; (pages + 1) * PAGE_WORDS];
        let mut order: Vec<u32> = (0..pages as u32).collect();
        Random::stream(0x6772_616e, 0).shuffle(&mut order);
        for page in 0..pages {
            words[page * PAGE_WORDS] = stamp(page);
        }
        Self { words, order, next_random: 0, next_sequential: 0 }
    }

    /// Touches pages for `duration`.
    ///
    /// # Errors
    /// [`WrongPage`] if the pager lost data.
    pub fn touch(&mut self, pattern: Pattern, duration: Duration) -> Result<Outcome, WrongPage> {
        match pattern {
            Pattern::Random => self.random(duration),
            Pattern::Sequential => self.sequential(duration),
        }
    }

    fn random(&mut self, duration: Duration) -> Result<Outcome, WrongPage> {
        let mut outcome = Outcome::default();
        while outcome.elapsed < duration {
            let page = self.order[self.next_random] as usize;
            self.next_random = (self.next_random + 1) % self.order.len();
            let start = Instant::now();
            self.check(page)?;
            let latency = start.elapsed();
            outcome.latencies.record(latency);
            outcome.pages += 1;
            outcome.elapsed += latency;
        }
        Ok(outcome)
    }

    fn sequential(&mut self, duration: Duration) -> Result<Outcome, WrongPage> {
        let mut outcome = Outcome::default();
        let start = Instant::now();
        while outcome.elapsed < duration {
            for _ in 0..BATCH_PAGES {
                self.check(self.next_sequential)?;
                self.next_sequential = (self.next_sequential + 1) % self.order.len();
            }
            outcome.pages += BATCH_PAGES as u64;
            outcome.elapsed = start.elapsed();
        }
        Ok(outcome)
    }

    /// Reads a word of a page and checks that it holds the stored value.
    fn check(&self, page: usize) -> Result<(), WrongPage> {
        // `black_box` keeps the compiler from moving or removing the load.
        let found = *std::hint::black_box(&self.words[page * PAGE_WORDS]);
        if found == stamp(page) { Ok(()) } else { Err(WrongPage { page, found }) }
    }
}

/// Content of the first word of a page; never zero.
fn stamp(page: usize) -> u64 {
    0x6772_616e_0000_0000 | page as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touch_checks_every_page() {
        let mut memory = Memory::new(64 * PAGE_BYTES);
        for pattern in Pattern::ALL {
            let outcome = memory.touch(pattern, Duration::from_millis(1)).unwrap();
            assert!(outcome.pages >= 64 && outcome.elapsed >= Duration::from_millis(1));
            let timed = if pattern == Pattern::Random { outcome.pages } else { 0 };
            assert_eq!(outcome.latencies.count(), timed);
        }
        memory.words[7 * PAGE_WORDS] = 0;
        for pattern in Pattern::ALL {
            let error = memory.touch(pattern, Duration::from_millis(1)).unwrap_err();
            assert_eq!(error, WrongPage { page: 7, found: 0 });
        }
    }
}
