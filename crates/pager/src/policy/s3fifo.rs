//! S3-FIFO without hits (Yang et al., SOSP 2023): a small queue for new pages, and a main queue.
//!
//! A page whose refetch comes soon after its eviction, and a page that a soft fault brings back, go
//! to the main queue. The pager's page table remembers evictions, so the ghost queue of the paper
//! takes no memory here. A page of the main queue goes round once for each soft fault, at most
//! [`CREDIT_MAX`] times.

use super::runs::{PageSet, RunQueue};
use super::{Policy, RUN_PAGES, Run};

/// Rounds of the main queue that a page survives at most.
pub const CREDIT_MAX: u8 = 3;

/// The queues of S3-FIFO.
#[derive(Debug)]
pub struct S3Fifo {
    limit: u32,
    set: PageSet,
    small: RunQueue,
    main: RunQueue,
}

impl S3Fifo {
    /// Creates empty queues for `limit` pages.
    pub fn new(limit: u32) -> Self {
        Self {
            limit,
            set: PageSet::default(),
            small: RunQueue::default(),
            main: RunQueue::default(),
        }
    }

    fn compact(&mut self) {
        if self.main.len() + self.small.len() > 2 * self.set.len() + 16 * RUN_PAGES {
            let mut left = self.set.clone();
            self.main.compact(&mut left);
            self.small.compact(&mut left);
        }
    }
}

impl Policy for S3Fifo {
    fn arrived(&mut self, run: Run) {
        self.set.insert(run, |part| self.small.push(part, 0));
        self.compact();
    }

    fn refetched(&mut self, run: Run, recent: bool) {
        match recent {
            true => self.set.insert(run, |part| self.main.push(part, 1)),
            false => self.set.insert(run, |part| self.small.push(part, 0)),
        }
        self.compact();
    }

    fn restored(&mut self, run: Run) {
        self.set.insert(run, |part| self.main.push(part, CREDIT_MAX));
        self.compact();
    }

    fn removed(&mut self, run: Run) {
        self.set.remove(run, |_| ());
        self.compact();
    }

    fn victim_run(&mut self, max: u32) -> Option<Run> {
        let small = if self.small.len() > self.limit / 10 {
            self.small.take(&mut self.set, max)
        } else {
            None
        };
        small
            .or_else(|| self.main.take(&mut self.set, max))
            .or_else(|| self.small.take(&mut self.set, max))
    }

    fn pages(&self) -> u32 {
        self.set.len()
    }

    fn sweep(&mut self, resident: &mut dyn FnMut(u32) -> bool) {
        self.set.retain(resident);
        self.compact();
    }
}
