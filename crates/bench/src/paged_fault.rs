//! Page faults of a paged program: what [`crate::bare_fault`] does, with the pager and the pool
//! behind it.
//!
//! Runs in a process that the preload library pages: its memory is an ordinary allocation.
//! Every page holds its number, so that none is zero (zero pages need no pool) and a wrong page
//! is noticed. Pages are only read: what is measured is the fault, not the write-back.
//!
//! With random touches the pages come in one shuffled order, again and again: each page has been
//! away for as long as possible when its turn comes, so that each touch faults as long as what is
//! local is clearly less than the memory.

use std::time::{Duration, Instant};

use crate::bare_fault::SplitMix;
use crate::fault::{Outcome, PAGE_BYTES, Pattern};

/// Pages between two looks at the clock, with sequential touches.
const BATCH_PAGES: usize = 64;

/// Memory of a program, touched page by page.
pub struct Memory {
    words: Vec<u64>,
    /// The shuffled order of the pages.
    order: Vec<u32>,
    /// Where the next touch of each pattern is.
    next_random: usize,
    next_sequential: usize,
}

const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();

/// A page that does not hold what was stored there: data was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("page {page} holds {found:#x}, not what was stored: data was lost; please report it")]
pub struct WrongPage {
    page: usize,
    found: u64,
}

impl Memory {
    /// Allocates and fills `bytes`, rounded down to pages.
    pub fn new(bytes: usize) -> Self {
        let pages = bytes / PAGE_BYTES;
        assert!(pages > 0, "there is no page in {bytes} bytes");
        // One page more: an allocation need not begin at a page.
        let mut words = vec![0; (pages + 1) * PAGE_WORDS];
        let mut order: Vec<u32> = (0..pages as u32).collect();
        SplitMix::new(0x6772_616e).shuffle(&mut order);
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

    /// Reads a word of a page, which must hold what was stored.
    fn check(&self, page: usize) -> Result<(), WrongPage> {
        // Through `black_box`, so that the load is made here and now.
        let found = *std::hint::black_box(&self.words[page * PAGE_WORDS]);
        if found == stamp(page) { Ok(()) } else { Err(WrongPage { page, found }) }
    }
}

/// What a page holds: nothing like zero.
fn stamp(page: usize) -> u64 {
    0x6772_616e_0000_0000 | page as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_touched_and_checked() {
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
