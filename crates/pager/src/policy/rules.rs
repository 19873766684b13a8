//! Five rules of replacement over one structure: `fifo`, `random`, `bip`, `stream`, `s3fifo`.
//!
//! The structure is a main queue and a queue of newly arrived pages. A rule decides to which queue
//! a page goes, and from which the next victim comes. The rule can change at any time in constant
//! time, and every page keeps its place: this is what [`super::duel`] needs.

use std::io;

use units::Random;

use super::runs::{LeftWindows, PageSet, RunQueue, compact};
use super::{Policy, RUN_PAGES, Run};

/// A rule of replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// First in, first out.
    Fifo,
    /// A random run of the main queue.
    Random,
    /// Bimodal insertion: newly arrived pages leave first, except 1 run in [`KEPT_ONE_IN`], which
    /// takes a random old run's place. In a scan, the oldest run would be the next one that the
    /// program needs. A page that a soft fault has brought back goes round once more.
    Bip,
    /// The window that a stream has left; else random.
    Stream,
    /// S3-FIFO without hits (Yang et al., SOSP 2023): new pages leave first while they are over a
    /// tenth. Pages whose refetch comes soon after their eviction, and pages that a soft fault has
    /// brought back, go to the main queue. The latter go round it [`CREDIT_MAX`] times. The pager's
    /// page table remembers evictions, so the ghost queue of the paper takes no memory here.
    S3Fifo,
}

/// Of this many newly arrived runs, rule `bip` keeps one.
pub const KEPT_ONE_IN: u64 = 64;
/// Rounds of the main queue that a page survives at most under rule `s3fifo`.
pub const CREDIT_MAX: u8 = 3;
/// The newly arrived pages that rule `bip` holds at least: two windows of a stream.
const NEW_PAGES_MIN: u32 = 2 * RUN_PAGES;

/// Pages in the order in which a rule evicts them.
#[derive(Debug)]
pub struct RuleQueue {
    rule: Rule,
    limit: u32,
    random: Random,
    /// The pages that count in `main` and `new`.
    set: PageSet,
    main: RunQueue,
    /// Rules `bip` and `s3fifo`: newly arrived pages, first out.
    new: RunQueue,
    /// Rule `stream`: windows that were left, the oldest first. Their pages are in `main` too.
    left: LeftWindows,
    /// Pages that the program does not need soon. They are in another queue too.
    unneeded: LeftWindows,
    /// Pages that arrived since the last victim; over an eighth of the limit, memory has room.
    since_victim: u32,
    /// Victims that were returned since pages arrived last. If the main queue has only pages that
    /// cannot leave, new ones must.
    returned: u32,
    /// Rule `bip`: kept pages, less the old pages that have left for them. A victim is a whole run,
    /// so the number can be negative.
    owed: i64,
}

impl RuleQueue {
    /// Creates an empty queue for `limit` pages with numbers below `end`.
    ///
    /// # Errors
    /// Errors of mapping memory.
    pub fn new(rule: Rule, limit: u32, end: u32, seed: u64) -> io::Result<Self> {
        Ok(Self {
            rule,
            limit,
            random: Random::new(seed),
            set: PageSet::new(end)?,
            main: RunQueue::new(limit),
            new: RunQueue::new(limit),
            left: LeftWindows::new(),
            unneeded: LeftWindows::new(),
            since_victim: u32::MAX,
            returned: 0,
            owed: 0,
        })
    }

    /// Changes the rule. Pages keep their places.
    pub fn set_rule(&mut self, rule: Rule) {
        self.rule = rule;
        self.owed = 0;
    }

    /// Changes the limit.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Returns true if pages arrive in the place of others.
    fn is_full(&self) -> bool {
        self.since_victim <= (self.limit / 8).max(4 * RUN_PAGES)
    }

    /// Adds a run that was not resident. `recent` as in [`Policy::refetched`].
    fn add(&mut self, run: Run, recent: bool) {
        let full = self.is_full();
        self.returned = 0;
        self.since_victim = self.since_victim.saturating_add(run.pages);
        let is_new = match self.rule {
            Rule::Fifo | Rule::Random | Rule::Stream => false,
            Rule::S3Fifo => !recent,
            Rule::Bip if full => {
                let kept = self.random.below(KEPT_ONE_IN) == 0;
                self.owed += if kept { i64::from(run.pages) } else { 0 };
                !kept
            }
            Rule::Bip => false,
        };
        let credit = u8::from(self.rule == Rule::S3Fifo && recent);
        let queue = if is_new { &mut self.new } else { &mut self.main };
        self.set.insert(run, |part| queue.push(part, credit));
    }

    /// Returns the first part of a run that the queue holds.
    pub(super) fn first_part(&self, run: Run) -> Option<Run> {
        self.set.first_part(run)
    }

    /// Takes a run out as a victim. The queue holds all its pages.
    pub(super) fn take_out(&mut self, run: Run) {
        self.since_victim = 0;
        self.removed(run);
    }

    fn take_random(&mut self, max: u32) -> Option<Run> {
        self.main.take_random(&mut self.set, &mut self.random, max)
    }

    fn take_bip(&mut self, max: u32) -> Option<Run> {
        let window = (self.limit / 50).max(NEW_PAGES_MIN.min(self.limit / 4));
        if self.owed > 0 {
            let run = self.take_random(max)?;
            self.owed -= i64::from(run.pages);
            return Some(run);
        }
        if self.new.len() > window {
            return self.new.take(&mut self.set, max);
        }
        self.take_random(max)
    }
}

impl Policy for RuleQueue {
    fn arrived(&mut self, run: Run) {
        self.add(run, false);
    }

    fn refetched(&mut self, run: Run, recent: bool) {
        self.add(run, recent);
    }

    fn restored(&mut self, run: Run) {
        self.since_victim = self.since_victim.saturating_add(run.pages);
        self.returned = 0;
        let credit = match self.rule {
            Rule::Fifo | Rule::Random | Rule::Stream => 0,
            Rule::Bip => 1,
            Rule::S3Fifo => CREDIT_MAX,
        };
        self.set.insert(run, |part| self.main.push(part, credit));
    }

    fn returned(&mut self, run: Run) {
        self.returned = self.returned.saturating_add(run.pages);
        self.set.insert(run, |part| self.main.push(part, 0));
    }

    fn left_behind(&mut self, run: Run) {
        if self.rule == Rule::Stream {
            self.left.push(run);
        }
    }

    fn unneeded(&mut self, run: Run) {
        self.unneeded.join(run);
    }

    fn removed(&mut self, run: Run) {
        self.set.remove(run);
        compact(&mut self.set, &mut self.main, &mut self.new);
    }

    fn victim_run(&mut self, max: u32) -> Option<Run> {
        if let Some(run) = self.unneeded.next(max, |run| self.set.first_part(run)) {
            self.take_out(run);
            return Some(run);
        }
        self.since_victim = 0;
        let first = match self.rule {
            _ if self.returned > self.main.len() => None,
            Rule::Fifo => None,
            Rule::S3Fifo if self.new.len() <= self.limit / 10 => self.main.take(&mut self.set, max),
            Rule::S3Fifo => None,
            Rule::Random => self.take_random(max),
            Rule::Bip => self.take_bip(max),
            Rule::Stream => self.left.take(&mut self.set, max).or_else(|| self.take_random(max)),
        };
        // After a change of the rule, pages that rule `bip` has left as new ones go first.
        let victim = first
            .or_else(|| self.new.take(&mut self.set, max))
            .or_else(|| self.main.take(&mut self.set, max));
        // The pages of a window that was left are stale in the queues now.
        compact(&mut self.set, &mut self.main, &mut self.new);
        victim
    }

    fn pages(&self) -> u32 {
        self.set.len()
    }

    fn holds(&self, page: u32) -> bool {
        self.set.has(page)
    }
}

#[cfg(test)]
impl RuleQueue {
    pub(super) fn capacity(&self) -> usize {
        self.main.capacity() + self.new.capacity() + self.left.capacity() + self.unneeded.capacity()
    }
}
