//! Budgets: what a compute node may ask of the memory node's NIC, and hold (OneSidedMW §4.4,
//! "protection against DoS attack").
//!
//! The NIC executes allocations without asking the CPU, so the CPU looks afterwards: at an
//! interval it reads the NIC's counters of each compute node's management QPs, that is, how many
//! requests came in. Whoever is over a budget loses its management connection, and nothing else: its
//! grants stay usable. Between two looks a compute node can go over its budget by what it gets done
//! in one interval.
//!
//! - Requests: a bucket that fills with the budget's rate and holds one second of it.
//! - Chunks: allocations less frees that succeeded bound what is held from above (an allocation may
//!   have found nothing). Only if that bound is over the budget, `owner_id` of every entry is read, and
//!   not more often than a twentieth of the time.
//!
//! A connection that was ended may be re-established after [`Budget::suspension`], twice as long each
//! time, up to 64 times; a minute without a fault makes up for it. Who holds too many chunks may
//! then free, and is ended again when it holds more than at that time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What each compute node may use. Nothing is watched if no limit is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Allocations and frees in a second, on average over one second.
    pub requests_per_s: Option<u64>,
    /// Chunks held.
    pub chunks: Option<u64>,
    /// Time between two looks at the counters.
    pub interval: Duration,
    /// How long a management connection that was ended stays so, the first time.
    pub suspension: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            requests_per_s: None,
            chunks: None,
            interval: Duration::from_millis(50),
            suspension: Duration::from_secs(1),
        }
    }
}

impl Budget {
    /// True if anything is limited.
    pub fn is_set(&self) -> bool {
        self.requests_per_s.is_some() || self.chunks.is_some()
    }
}

/// The state of budgets, for `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetStatus {
    /// Requests in a second that a compute node may make.
    pub requests_per_s: Option<u64>,
    /// Chunks that a compute node may hold.
    pub chunks: Option<u64>,
    /// Milliseconds between two looks at the counters.
    pub interval_ms: u64,
    /// Management connections that were ended so far.
    pub ended: u64,
    /// Compute nodes whose management connection is ended now.
    pub suspended: u64,
    /// The compute nodes that use most, at most [`BudgetStatus::MOST`] of them.
    pub most: Vec<Use>,
}

impl BudgetStatus {
    /// Compute nodes in [`BudgetStatus::most`].
    pub const MOST: usize = 16;
}

/// What one compute node uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// The compute node.
    pub client: u32,
    /// Requests in a second, as of the last look.
    pub requests_per_s: u64,
    /// Chunks that it holds at most.
    pub chunks: u64,
    /// Its management connection is ended.
    pub suspended: bool,
}

/// How many doublings the suspension grows by.
const STRIKES: u32 = 6;
/// After so long within its budget a compute node is as one that was never over it.
const FORGIVEN: Duration = Duration::from_secs(60);
/// The CPU counts owners for at most one part in so many of the time.
const COUNTING: u32 = 20;

/// What the CPU knows of one compute node's use. Moments are those of [`fabric::Nic::now`].
#[derive(Debug)]
pub(crate) struct Meter {
    allocations: u32,
    frees: u32,
    read_at: Option<Duration>,
    tokens: f64,
    rate: f64,
    /// Chunks held at most.
    held: u64,
    /// Frees among those that came in that were answered without being executed.
    refused: u64,
    /// What may be held: more than the budget for one that was let in again with more.
    chunks_max: u64,
    count_at: Option<Duration>,
    strikes: u32,
    suspended: Option<Suspension>,
}

#[derive(Debug)]
struct Suspension {
    until: Duration,
    why: String,
}

/// What a look at the counters came to.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    Within,
    /// Count what it owns: it may be too much.
    Count,
    Over(String),
}

/// The NIC counts modulo 2^24.
const COUNT: u32 = 0xff_ffff;

impl Meter {
    pub fn new(budget: &Budget) -> Self {
        Self {
            allocations: 0,
            frees: 0,
            read_at: None,
            tokens: budget.requests_per_s.unwrap_or(0) as f64,
            rate: 0.0,
            held: 0,
            refused: 0,
            chunks_max: budget.chunks.unwrap_or(u64::MAX),
            count_at: None,
            strikes: 0,
            suspended: None,
        }
    }

    /// So many frees were answered by the CPU.
    pub fn refused(&mut self, frees: u32) {
        self.refused += frees as u64;
    }

    /// Takes in the counters: allocations and frees that came in, each modulo 2^24.
    pub fn read(
        &mut self,
        budget: &Budget,
        (allocations, frees): (u32, u32),
        now: Duration,
    ) -> Verdict {
        let asked = allocations.wrapping_sub(self.allocations) & COUNT;
        let given = frees.wrapping_sub(self.frees) & COUNT;
        (self.allocations, self.frees) = (allocations, frees);
        // Some of those may have come in before the last look already: then too few were held at that
        // time, and this makes up for it.
        let refused = std::mem::take(&mut self.refused);
        self.held = (self.held + asked as u64 + refused).saturating_sub(given as u64);
        let since = self.read_at.replace(now).map_or(budget.interval, |at| now - at);
        let seconds = since.as_secs_f64().max(1e-6);
        let requests = (asked + given) as f64;
        self.rate = requests / seconds;
        if let Some(limit) = budget.requests_per_s {
            let limit = limit as f64;
            self.tokens = (self.tokens + limit * seconds).min(limit) - requests;
            if self.tokens < 0.0 {
                self.tokens = limit;
                return Verdict::Over(format!(
                    "it made {requests:.0} requests in {:.0} ms, and its budget is {limit} a \
                     second: make fewer, or have the operator raise --budget-requests-per-s",
                    seconds * 1e3
                ));
            }
        }
        let counted_lately = self.count_at.is_some_and(|at| now < at);
        match self.held > self.chunks_max && !counted_lately {
            true => Verdict::Count,
            false => Verdict::Within,
        }
    }

    /// Takes in how many chunks it really holds, which took `took` to find out.
    pub fn counted(
        &mut self,
        budget: &Budget,
        held: u64,
        took: Duration,
        now: Duration,
    ) -> Verdict {
        self.held = held;
        self.count_at = Some(now + took * COUNTING);
        let allowed = self.chunks_max;
        let budget = budget.chunks.unwrap_or(u64::MAX);
        self.chunks_max = allowed.min(held.max(budget));
        if held <= allowed {
            return Verdict::Within;
        }
        Verdict::Over(format!(
            "it holds {held} chunks, and its budget is {budget}: free some, or have the operator \
             raise --budget-chunks"
        ))
    }

    /// Its management connection is ended.
    pub fn suspend(&mut self, budget: &Budget, why: String, now: Duration) {
        let forgiven = |s: &Suspension| now.saturating_sub(s.until) >= FORGIVEN;
        if self.suspended.as_ref().is_none_or(forgiven) {
            self.strikes = 0;
        }
        let long = budget.suspension * (1 << self.strikes.min(STRIKES));
        self.strikes += 1;
        self.suspended = Some(Suspension { until: now + long, why });
    }

    /// Why it is suspended, and for how long still.
    pub fn suspension(&self, now: Duration) -> Option<(&str, Duration)> {
        let s = self.suspended.as_ref().filter(|s| now < s.until)?;
        Some((&s.why, s.until - now))
    }

    /// As if its time were over.
    #[cfg(test)]
    pub fn end_suspension(&mut self) {
        if let Some(s) = &mut self.suspended {
            s.until = Duration::ZERO;
        }
    }

    /// It is let in again, holds `held` chunks, and the counters stand at this.
    pub fn restart(&mut self, budget: &Budget, held: u64, counts: (u32, u32)) {
        self.held = held;
        (self.allocations, self.frees) = counts;
        (self.refused, self.read_at) = (0, None);
        self.chunks_max = budget.chunks.map_or(u64::MAX, |chunks| chunks.max(held));
        self.tokens = budget.requests_per_s.unwrap_or(0) as f64;
    }

    /// What it uses.
    pub fn usage(&self, client: u32, suspended: bool) -> Use {
        let requests_per_s = if suspended { 0 } else { self.rate as u64 };
        Use { client, requests_per_s, chunks: self.held, suspended }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(requests_per_s: Option<u64>, chunks: Option<u64>) -> Budget {
        Budget { requests_per_s, chunks, ..Budget::default() }
    }

    #[test]
    fn a_second_of_requests_may_come_at_once_and_no_more() {
        let b = budget(Some(1000), None);
        let mut m = Meter::new(&b);
        let start = Duration::from_secs(100);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(m.read(&b, (600, 300), at(0)), Verdict::Within);
        // 100 are left, and 50 came in 50 ms.
        assert_eq!(m.read(&b, (700, 350), at(50)), Verdict::Within);
        let Verdict::Over(why) = m.read(&b, (800, 400), at(60)) else { panic!("not over") };
        assert!(why.contains("150 requests in 10 ms") && why.contains("1000 a second"), "{why}");
        // At the budget's rate it goes on for ever; the counters wrap.
        let mut m = Meter::new(&b);
        for i in 1..100_000u32 {
            let (a, f) = (i * 25, i * 25);
            assert_eq!(m.read(&b, (a & COUNT, f & COUNT), at(50 * i as u64)), Verdict::Within);
        }
        assert_eq!(m.usage(1, false).requests_per_s, 1000);
    }

    #[test]
    fn chunks_are_counted_only_if_there_may_be_too_many() {
        let b = budget(None, Some(10));
        let mut m = Meter::new(&b);
        let start = Duration::from_secs(100);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(m.read(&b, (10, 0), at(0)), Verdict::Within);
        assert_eq!(m.read(&b, (20, 10), at(50)), Verdict::Within);
        // Frees that were refused do not count: 10 held, 5 asked for more.
        m.refused(100);
        assert_eq!(m.read(&b, (25, 110), at(100)), Verdict::Count);
        // They had found nothing.
        let took = Duration::from_millis(10);
        assert_eq!(m.counted(&b, 9, took, at(100)), Verdict::Within);
        assert_eq!(m.read(&b, (27, 110), at(150)), Verdict::Within, "counted just now");
        assert_eq!(m.read(&b, (27, 110), at(301)), Verdict::Count);
        assert!(matches!(m.counted(&b, 11, took, at(301)), Verdict::Over(_)));
    }

    #[test]
    fn a_suspension_doubles_and_is_forgiven() {
        let b = budget(Some(1), Some(10));
        let mut m = Meter::new(&b);
        let mut now = Duration::from_secs(100);
        for expected in [1, 2, 4, 8, 16, 32, 64, 64] {
            m.suspend(&b, "why".into(), now);
            let (why, left) = m.suspension(now).unwrap();
            assert_eq!((why, left), ("why", Duration::from_secs(expected)));
            now += left;
            assert_eq!(m.suspension(now), None);
            m.restart(&b, 15, (1, 1));
        }
        now += FORGIVEN;
        m.suspend(&b, "why".into(), now);
        assert_eq!(m.suspension(now).unwrap().1, Duration::from_secs(1));
        // It was let in again with 15: that many it may keep, and what it frees is gone.
        assert_eq!(m.read(&b, (1, 1), now), Verdict::Within);
        assert_eq!(m.counted(&b, 13, Duration::ZERO, now), Verdict::Within);
        assert!(matches!(m.counted(&b, 14, Duration::ZERO, now), Verdict::Over(_)));
    }
}
