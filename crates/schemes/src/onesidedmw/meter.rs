//! Budgets: limits on a compute node's requests to the memory node's NIC and on the chunks that it
//! holds (OneSidedMW §4.4, "protection against DoS attack").
//!
//! Because the NIC executes allocations without the CPU, the CPU checks them afterwards:
//! periodically it reads the NIC's request counters of each compute node's management QPs. A
//! compute node that is over a budget loses its management connection only: its grants stay usable.
//! It can exceed its budget by the requests of one interval at most.
//!
//! - Requests: a token bucket that refills at the budget's rate and holds the tokens of one second.
//! - Chunks: allocations minus successful frees are an upper bound of the chunks held (an
//!   allocation may have found no free chunk). Only if that bound exceeds the budget, the CPU reads
//!   `owner_id` of every entry, for at most a twentieth of its time.
//!
//! A closed connection may be re-established after [`Budget::suspension`]. The suspension doubles
//! each time, up to 64-fold; a minute within the budget resets it. A compute node that holds too
//! many chunks may then free chunks; its connection is closed again if it allocates beyond that
//! number.

use std::time::Duration;

use scheme::Use;

use super::options::Budget;

/// Maximum number of times that the suspension doubles.
const STRIKES: u32 = 6;
/// Time within the budget after which the suspension starts from its initial length again.
const FORGIVEN: Duration = Duration::from_secs(60);
/// Reciprocal of the share of time that the CPU may spend on counting owners.
const COUNTING: u32 = 20;

/// The CPU's record of one compute node's usage. Times are those of [`verbs::Nic::now`].
#[derive(Debug)]
pub struct Meter {
    allocations: u32,
    frees: u32,
    read_at: Option<Duration>,
    tokens: f64,
    rate: f64,
    /// Upper bound of the chunks held.
    held: u64,
    /// Frees that the NIC counted and the CPU refused.
    refused: u64,
    /// Chunks allowed: the budget, or more if the compute node held more when it was re-admitted.
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

/// Result of a counter reading.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    Within,
    /// The bound exceeds the limit: count the chunks that it owns.
    Count,
    Over(String),
}

/// Mask of the NIC's counters, which count modulo 2^24.
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

    /// Records frees that the CPU refused.
    pub fn refused(&mut self, frees: u32) {
        self.refused += frees as u64;
    }

    /// Processes a reading of the counters: received allocations and frees, each modulo 2^24.
    pub fn read(
        &mut self,
        budget: &Budget,
        (allocations, frees): (u32, u32),
        now: Duration,
    ) -> Verdict {
        let asked = allocations.wrapping_sub(self.allocations) & COUNT;
        let given = frees.wrapping_sub(self.frees) & COUNT;
        (self.allocations, self.frees) = (allocations, frees);
        // Some of the refused frees may have been counted at the previous reading, which then set
        // `held` too low; adding them here corrects that.
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
                    "it made {requests:.0} requests in {:.0} ms and its budget is {limit} a \
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

    /// Processes an exact count of the chunks held, which took `took`.
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
            "it holds {held} chunks and its budget is {budget}: free some, or have the operator \
             raise --budget-chunks"
        ))
    }

    /// Records that the management connection was closed.
    pub fn suspend(&mut self, budget: &Budget, why: String, now: Duration) {
        let forgiven = |s: &Suspension| now.saturating_sub(s.until) >= FORGIVEN;
        if self.suspended.as_ref().is_none_or(forgiven) {
            self.strikes = 0;
        }
        let long = budget.suspension * (1 << self.strikes.min(STRIKES));
        self.strikes += 1;
        self.suspended = Some(Suspension { until: now + long, why });
    }

    /// The reason for the suspension and its remaining time, if it is suspended.
    pub fn suspension(&self, now: Duration) -> Option<(&str, Duration)> {
        let s = self.suspended.as_ref().filter(|s| now < s.until)?;
        Some((&s.why, s.until - now))
    }

    /// Ends the suspension as if its time had passed.
    #[cfg(test)]
    pub fn end_suspension(&mut self) {
        if let Some(s) = &mut self.suspended {
            s.until = Duration::ZERO;
        }
    }

    /// Re-admits the compute node, which holds `held` chunks; `counts` are the current counters.
    pub fn restart(&mut self, budget: &Budget, held: u64, counts: (u32, u32)) {
        self.held = held;
        (self.allocations, self.frees) = counts;
        (self.refused, self.read_at) = (0, None);
        self.chunks_max = budget.chunks.map_or(u64::MAX, |chunks| chunks.max(held));
        self.tokens = budget.requests_per_s.unwrap_or(0) as f64;
    }

    /// Usage for `status`.
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
    fn request_budget_allows_a_burst_of_one_second() {
        let b = budget(Some(1000), None);
        let mut m = Meter::new(&b);
        let start = Duration::from_secs(100);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(m.read(&b, (600, 300), at(0)), Verdict::Within);
        // 100 tokens are left; 50 more arrived in 50 ms.
        assert_eq!(m.read(&b, (700, 350), at(50)), Verdict::Within);
        let Verdict::Over(why) = m.read(&b, (800, 400), at(60)) else { panic!("not over") };
        assert!(why.contains("150 requests in 10 ms") && why.contains("1000 a second"), "{why}");
        // At exactly the budget's rate the verdict stays `Within`, also when the counters wrap
        // around.
        let mut m = Meter::new(&b);
        for i in 1..100_000u32 {
            let (a, f) = (i * 25, i * 25);
            assert_eq!(m.read(&b, (a & COUNT, f & COUNT), at(50 * i as u64)), Verdict::Within);
        }
        assert_eq!(m.usage(1, false).requests_per_s, 1000);
    }

    #[test]
    fn chunks_are_counted_only_if_the_bound_exceeds_the_budget() {
        let b = budget(None, Some(10));
        let mut m = Meter::new(&b);
        let start = Duration::from_secs(100);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(m.read(&b, (10, 0), at(0)), Verdict::Within);
        assert_eq!(m.read(&b, (20, 10), at(50)), Verdict::Within);
        // Refused frees do not count: 10 chunks are held, and 5 more were requested.
        m.refused(100);
        assert_eq!(m.read(&b, (25, 110), at(100)), Verdict::Count);
        // The 5 allocations found no free chunk.
        let took = Duration::from_millis(10);
        assert_eq!(m.counted(&b, 9, took, at(100)), Verdict::Within);
        assert_eq!(m.read(&b, (27, 110), at(150)), Verdict::Within, "counted just now");
        assert_eq!(m.read(&b, (27, 110), at(301)), Verdict::Count);
        assert!(matches!(m.counted(&b, 11, took, at(301)), Verdict::Over(_)));
    }

    #[test]
    fn suspension_doubles_and_resets_after_a_minute() {
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
        // It was re-admitted with 15 chunks and may keep these; freed chunks lower its limit.
        assert_eq!(m.read(&b, (1, 1), now), Verdict::Within);
        assert_eq!(m.counted(&b, 13, Duration::ZERO, now), Verdict::Within);
        assert!(matches!(m.counted(&b, 14, Duration::ZERO, now), Verdict::Over(_)));
    }
}
