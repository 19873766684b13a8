//! Five rules of replacement over one structure: `fifo`, `random`, `bip`, `stream`, `s3fifo`.
//!
//! The structure is a main queue and a queue of newly arrived pages. A rule decides to which queue
//! a page goes, and from which the next victim comes. The rule can change at any time in constant
//! time, and every page keeps its place: this is what [`super::duel`] needs.

use std::io;

use super::queues::Queues;
use super::{Policy, Run};

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

/// Pages in the order in which a rule evicts them.
#[derive(Debug)]
pub struct RuleQueue {
    rule: Rule,
    queues: Queues,
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
        Ok(Self { rule, queues: Queues::new(limit, end, seed)?, owed: 0 })
    }

    /// Changes the rule. Pages keep their places.
    pub fn set_rule(&mut self, rule: Rule) {
        self.rule = rule;
        self.owed = 0;
    }

    /// Changes the limit.
    pub fn set_limit(&mut self, limit: u32) {
        self.queues.limit = limit;
    }

    /// Returns the first part of a run that the queue holds.
    pub(super) fn first_part(&self, run: Run) -> Option<Run> {
        self.queues.set.first_part(run)
    }

    /// Takes a run out as a victim. The queue holds all its pages.
    pub(super) fn take_out(&mut self, run: Run) {
        self.queues.set.remove(run);
        self.queues.end_choice();
    }

    fn take_bip(&mut self, max: u32) -> Option<Run> {
        if self.owed > 0 {
            let run = self.queues.take_random(max)?;
            self.owed -= i64::from(run.pages);
            return Some(run);
        }
        if self.queues.new.len() > self.queues.window(4) {
            return self.queues.take_new(max);
        }
        self.queues.take_random(max)
    }
}

impl Policy for RuleQueue {
    fn arrived(&mut self, run: Run) {
        self.refetched(run, false);
    }

    fn refetched(&mut self, run: Run, recent: bool) {
        let is_new = match self.rule {
            Rule::Fifo | Rule::Random | Rule::Stream => false,
            Rule::S3Fifo => !recent,
            Rule::Bip if self.queues.is_full() => {
                let kept = self.queues.random.below(KEPT_ONE_IN) == 0;
                self.owed += if kept { i64::from(run.pages) } else { 0 };
                !kept
            }
            Rule::Bip => false,
        };
        let credit = u8::from(self.rule == Rule::S3Fifo && recent);
        self.queues.add(run, is_new, credit);
    }

    fn restored(&mut self, run: Run) {
        let credit = match self.rule {
            Rule::Fifo | Rule::Random | Rule::Stream => 0,
            Rule::Bip => 1,
            Rule::S3Fifo => CREDIT_MAX,
        };
        self.queues.add(run, false, credit);
    }

    fn returned(&mut self, run: Run) {
        self.queues.put_back(run);
    }

    fn left_behind(&mut self, run: Run) {
        if self.rule == Rule::Stream {
            self.queues.left.push(run);
        }
    }

    fn unneeded(&mut self, run: Run) {
        self.queues.unneeded.join(run);
    }

    fn removed(&mut self, run: Run) {
        self.queues.remove(run);
    }

    fn victim_run(&mut self, max: u32) -> Option<Run> {
        let queues = &mut self.queues;
        if let Some(run) = queues.take_unneeded(max) {
            return Some(run);
        }
        let first = match self.rule {
            _ if queues.is_stuck() => None,
            Rule::Fifo => None,
            Rule::S3Fifo if queues.new.len() <= queues.limit / 10 => queues.take_main(max),
            Rule::S3Fifo => None,
            Rule::Random => queues.take_random(max),
            Rule::Bip => self.take_bip(max),
            Rule::Stream => queues.take_left(max),
        };
        // After a change of the rule, pages that rule `bip` has left as new ones go first.
        let queues = &mut self.queues;
        let victim = first.or_else(|| queues.take_new(max)).or_else(|| queues.take_main(max));
        queues.end_choice();
        victim
    }

    fn pages(&self) -> u32 {
        self.queues.set.len()
    }

    fn holds(&self, page: u32) -> bool {
        self.queues.set.has(page)
    }
}

#[cfg(test)]
impl RuleQueue {
    pub(super) fn capacity(&self) -> usize {
        self.queues.capacity()
    }
}
