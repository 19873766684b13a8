//! The queues of [`super::rules`] and [`super::contest`], which decide to which queue a page goes,
//! and from which the next victim comes.

use std::io;

use units::Random;

use super::runs::{LeftWindows, PageSet, RunQueue, compact_from};
use super::{RUN_PAGES, Run};

/// A main queue and a queue of newly arrived pages, both in the order of arrival.
#[derive(Debug)]
pub(super) struct Queues {
    pub limit: u32,
    pub random: Random,
    /// The pages that count in `main` and `new`.
    pub set: PageSet,
    pub main: RunQueue,
    pub new: RunQueue,
    /// Windows that were left, the oldest first. Their pages are in `main` or `new` too.
    pub left: LeftWindows,
    /// Pages that the program does not need soon. They are in `main` or `new` too.
    pub unneeded: LeftWindows,
    /// Pages that arrived since the last victim.
    since_victim: u32,
    /// Victims that were returned since pages arrived last.
    returned: u32,
}

impl Queues {
    /// Creates empty queues for `limit` pages with numbers below `end`.
    pub fn new(limit: u32, end: u32, seed: u64) -> io::Result<Self> {
        Ok(Self {
            limit,
            random: Random::new(seed),
            set: PageSet::new(end)?,
            main: RunQueue::new(limit),
            new: RunQueue::new(limit),
            left: LeftWindows::new(),
            unneeded: LeftWindows::new(),
            since_victim: u32::MAX,
            returned: 0,
        })
    }

    /// Returns true if pages arrive in the place of others. Memory has room if an eighth of the
    /// limit has arrived without a victim.
    pub fn is_full(&self) -> bool {
        self.since_victim <= (self.limit / 8).max(4 * RUN_PAGES)
    }

    /// Returns true if the main queue may have only pages that cannot leave, so that new ones must.
    pub fn is_stuck(&self) -> bool {
        self.returned > self.main.len()
    }

    /// Returns the number of new pages that wait: two windows of a stream, or a 50th of the limit.
    /// In a small memory, one `part`-th of the limit.
    pub fn window(&self, part: u32) -> u32 {
        (self.limit / 50).max((2 * RUN_PAGES).min(self.limit / part))
    }

    /// Adds a run that became resident.
    pub fn add(&mut self, run: Run, is_new: bool, credit: u8) {
        self.returned = 0;
        self.since_victim = self.since_victim.saturating_add(run.pages);
        let queue = if is_new { &mut self.new } else { &mut self.main };
        self.set.insert(run, |part| queue.push(part, credit));
    }

    /// Adds victims that cannot leave now.
    pub fn put_back(&mut self, run: Run) {
        self.returned = self.returned.saturating_add(run.pages);
        self.set.insert(run, |part| self.main.push(part, 0));
    }

    /// Removes a run.
    pub fn remove(&mut self, run: Run) {
        self.set.remove(run);
        self.compact();
    }

    /// Ends the choice of a victim. Pages of a window that was taken are stale in the queues now.
    pub fn end_choice(&mut self) {
        self.since_victim = 0;
        self.compact();
    }

    /// Drops the stale parts of both queues if there are many. Where both queues have a page, the
    /// main queue keeps the page.
    fn compact(&mut self) {
        let Self { set, main, new, .. } = self;
        if main.len() + new.len() > compact_from(set.len()) {
            main.compact(set);
            new.compact(set);
            main.unmark(set);
            new.unmark(set);
        }
    }

    /// Takes pages that the program does not need soon, and ends the choice of a victim.
    pub fn take_unneeded(&mut self, max: u32) -> Option<Run> {
        let run = self.unneeded.take(&mut self.set, max)?;
        self.end_choice();
        Some(run)
    }

    pub fn take_main(&mut self, max: u32) -> Option<Run> {
        self.main.take(&mut self.set, max)
    }

    pub fn take_new(&mut self, max: u32) -> Option<Run> {
        self.new.take(&mut self.set, max)
    }

    pub fn take_random(&mut self, max: u32) -> Option<Run> {
        self.main.take_random(&mut self.set, &mut self.random, max)
    }

    /// Takes pages of the oldest window that was left, else random ones.
    pub fn take_left(&mut self, max: u32) -> Option<Run> {
        self.left.take(&mut self.set, max).or_else(|| self.take_random(max))
    }

    /// Returns the number of entries for which there is memory.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.main.capacity() + self.new.capacity() + self.left.capacity() + self.unneeded.capacity()
    }
}
