//! The choice of a NIC thread without work: poll on, offer its CPU, or sleep.
//!
//! Polling finds the next doorbell at once, and sleeping costs the client a wake-up: 5 us on the
//! NIC's own core, up to 50 us on an idle one. So the NIC thread polls for as long as the recent
//! gaps between work suggest, up to [`SPIN_MAX`]. It does so only while there are clients and while
//! no other thread wants the core. If other threads want it, the NIC thread sleeps at once, because
//! a thread that wakes is scheduled before CPU-bound threads, and a thread that yields is scheduled
//! behind them.
//!
//! A pure state machine: times are in ns since the NIC was started, and the caller acts.

use std::time::Duration;

/// Time without work for which the NIC thread only polls.
pub(super) const SPIN: Duration = Duration::from_micros(2);
/// Time without work after which the NIC thread sleeps if nothing is known about the gaps.
pub(super) const SLEEP_AFTER: Duration = Duration::from_micros(100);
/// The longest time without work for which the NIC thread polls.
const SPIN_MAX: Duration = Duration::from_millis(1);
/// Time without work after which a real-time thread looks whether other threads want a core, and
/// the time between two looks.
const LOOK_AFTER: Duration = Duration::from_micros(20);
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// Duration from which a yield shows that another thread wanted the core. Longer than two threads
/// need to hand the core over and back.
const LONG_YIELD: Duration = Duration::from_micros(50);
/// Time for which the core counts as wanted after the first sign, and the maximum after repeated
/// signs.
const WANTED_MIN: Duration = Duration::from_millis(2);
const WANTED_MAX: Duration = Duration::from_secs(1);
/// Time for which a real-time thread may run without sleeping while other threads wait.
const RUN_MAX: Duration = Duration::from_millis(20);

/// Number of gaps whose median predicts the next one.
const GAPS: usize = 16;

/// The next step of a NIC thread without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Run another round at once.
    Poll,
    /// Offer the CPU to other threads, then run another round.
    Yield,
    /// Sleep until an event.
    Sleep,
}

/// The situation of a NIC thread without work.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Situation {
    /// The present time.
    pub now: u64,
    /// Time of the first round without work since the last work or sleep.
    pub since: u64,
    /// The NIC has clients, from which work may come.
    pub has_clients: bool,
    /// A client waits for this CPU, or the process has one CPU only.
    pub must_yield: bool,
    /// Ordinary threads do not run while the NIC thread runs.
    pub real_time: bool,
}

/// The state on which the choice depends.
#[derive(Default)]
pub(super) struct IdlePolicy {
    gaps: Gaps,
    /// Until this time the core counts as wanted by other threads.
    wanted_until: u64,
    /// Time for which the core counts as wanted after the next sign; 0 before the first one.
    wanted_for: u64,
    /// Until this time a real-time thread does not spin, because it has run for long.
    give_way_until: u64,
    /// Time of the next look whether other threads want a core.
    next_look: u64,
    /// Time from which work has been absent: the last work, also before a sleep.
    quiet_since: Option<u64>,
    /// Limit of the present spin, once it is computed.
    limit: Option<u64>,
    /// Time of the last sleep, or of the last look that found no thread waiting.
    ran_since: u64,
}

impl IdlePolicy {
    /// Chooses the next step. `others_wait` tells whether other threads wait for a CPU;
    /// `None` if that is not known.
    pub fn step(&mut self, at: Situation, others_wait: impl FnOnce() -> Option<bool>) -> Step {
        let quiet_since = *self.quiet_since.get_or_insert(at.since);
        debug_assert!(quiet_since <= at.now);
        let idle = at.now.saturating_sub(at.since);
        if at.must_yield && at.real_time {
            return Step::Sleep;
        }
        if idle < ns(SPIN) && !at.must_yield {
            return Step::Poll;
        }
        if at.now < self.wanted_until {
            // A short spin saves the wake-ups of requests in quick succession. It takes the core
            // from others for a few turns of theirs at most: see `give_way_until`.
            let spins = at.real_time && idle < ns(LOOK_AFTER) && at.now >= self.give_way_until;
            if !spins {
                return Step::Sleep;
            }
            if !self.has_run_long(at.now) {
                return Step::Poll;
            }
        }
        let unknown = at.real_time && (idle >= ns(LOOK_AFTER) || self.has_run_long(at.now));
        if (unknown || self.wanted_for > 0) && at.now >= self.next_look {
            self.next_look = at.now + ns(LOOK_EVERY);
            match others_wait() {
                Some(false) => (self.wanted_for, self.ran_since) = (0, at.now),
                Some(true) => {
                    if self.has_run_long(at.now) {
                        self.give_way_until = at.now + ns(RUN_MAX);
                    }
                    return self.note_wanted(at.now);
                }
                // A yield of an ordinary thread shows it; a real-time thread cannot know.
                None if at.real_time => return Step::Sleep,
                None => {}
            }
        }
        if idle >= self.limit(at.has_clients, idle) {
            return Step::Sleep;
        }
        if at.real_time { Step::Poll } else { Step::Yield }
    }

    /// Records that a yield took `away`, until `now`.
    pub fn yielded(&mut self, away: Duration, now: u64) {
        if away >= LONG_YIELD {
            self.note_wanted(now);
        }
    }

    fn note_wanted(&mut self, now: u64) -> Step {
        self.wanted_for = (self.wanted_for * 2).clamp(ns(WANTED_MIN), ns(WANTED_MAX));
        self.wanted_until = now + self.wanted_for;
        Step::Sleep
    }

    /// Records work. `now` is called only if there was none before.
    #[inline]
    pub fn worked(&mut self, now: impl FnOnce() -> u64) {
        if let Some(since) = self.quiet_since.take() {
            self.gaps.record(now().saturating_sub(since));
            self.limit = None;
        }
    }

    /// Records that the thread has slept until `now`.
    pub fn slept(&mut self, now: u64) {
        (self.ran_since, self.limit) = (now, None);
    }

    /// Whether a real-time thread has run for so long that it must give way to threads that wait.
    fn has_run_long(&self, now: u64) -> bool {
        now.saturating_sub(self.ran_since) >= ns(RUN_MAX)
    }

    /// Whether a real-time thread that still has work must become an ordinary one.
    pub fn must_step_down(&mut self, now: u64, others_wait: impl FnOnce() -> Option<bool>) -> bool {
        if !self.has_run_long(now) {
            return false;
        }
        self.ran_since = now;
        others_wait() != Some(false)
    }

    /// Time without work after which the thread sleeps. Computed when it first matters.
    fn limit(&mut self, has_clients: bool, idle: u64) -> u64 {
        let usual = ns(SLEEP_AFTER);
        if idle < usual || !has_clients {
            return usual;
        }
        *self.limit.get_or_insert_with(|| match self.gaps.median() {
            // Twice the median, because half of the gaps are longer.
            Some(median) if median <= ns(SPIN_MAX) => (2 * median).clamp(usual, ns(SPIN_MAX)),
            _ => usual,
        })
    }
}

/// The last gaps between work, in ns.
#[derive(Default)]
struct Gaps {
    last: [u64; GAPS],
    count: usize,
}

impl Gaps {
    fn record(&mut self, gap: u64) {
        self.last[self.count % GAPS] = gap;
        self.count = self.count.wrapping_add(1);
    }

    /// The median; `None` before there are enough gaps.
    fn median(&self) -> Option<u64> {
        if self.count < GAPS {
            return None;
        }
        let mut sorted = self.last;
        sorted.sort_unstable();
        Some(sorted[GAPS / 2])
    }
}

const fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;

    fn situation(since: u64, idle: u64) -> Situation {
        Situation { now: since + idle, since, has_clients: true, ..Situation::default() }
    }

    fn nobody() -> Option<bool> {
        Some(false)
    }

    fn never() -> Option<bool> {
        panic!("no look is due")
    }

    /// A policy after `count` gaps of `gap`, and the present time.
    fn after_gaps(gap: u64, count: u64) -> (IdlePolicy, u64) {
        let mut policy = IdlePolicy::default();
        let mut now = MS;
        for _ in 0..count {
            policy.step(situation(now, 0), never);
            now += gap;
            policy.worked(|| now);
        }
        (policy, now)
    }

    /// Time without work after which the policy sleeps.
    fn sleeps_after(policy: &mut IdlePolicy, now: u64, clients: bool) -> u64 {
        let at = |idle| Situation { has_clients: clients, ..situation(now, idle) };
        (0..3000).map(|us| us * US).find(|us| policy.step(at(*us), nobody) == Step::Sleep).unwrap()
    }

    #[test]
    fn unknown_gaps_lead_to_the_usual_spin() {
        let mut policy = IdlePolicy::default();
        assert_eq!(policy.step(situation(MS, US), never), Step::Poll);
        assert_eq!(policy.step(situation(MS, 2 * US), never), Step::Yield);
        assert_eq!(policy.step(situation(MS, 99 * US), never), Step::Yield);
        assert_eq!(policy.step(situation(MS, 100 * US), never), Step::Sleep);
        let (mut policy, now) = after_gaps(200 * US, 15);
        assert_eq!(sleeps_after(&mut policy, now, true), 100 * US);
    }

    #[test]
    fn spin_is_twice_the_median_gap_within_bounds() {
        for (gap, spin) in [(5, 100), (80, 160), (300, 600), (700, 1000), (1000, 1000), (1001, 100)]
        {
            let (mut policy, now) = after_gaps(gap * US, 16);
            assert_eq!(sleeps_after(&mut policy, now, true), spin * US, "gaps of {gap} us");
            assert_eq!(sleeps_after(&mut policy, now + 9 * MS, false), 100 * US, "no clients");
        }
    }

    #[test]
    fn few_outliers_do_not_change_the_prediction() {
        let (mut policy, mut now) = after_gaps(300 * US, 16);
        for gap in [50 * MS, 50 * MS, US, 50 * MS] {
            policy.step(situation(now, 0), never);
            now += gap;
            policy.worked(|| now);
        }
        assert_eq!(sleeps_after(&mut policy, now, true), 600 * US);
    }

    #[test]
    fn gap_includes_the_sleep_in_it() {
        let mut policy = IdlePolicy::default();
        let mut now = MS;
        for _ in 0..16 {
            assert_eq!(policy.step(situation(now, 100 * US), never), Step::Sleep);
            policy.slept(now + 250 * US);
            policy.step(situation(now + 250 * US, 0), never);
            now += 300 * US;
            policy.worked(|| now);
        }
        assert_eq!(sleeps_after(&mut policy, now, true), 600 * US);
    }

    #[test]
    fn wanted_core_is_left_at_once_and_tried_again_later() {
        let (mut policy, now) = after_gaps(300 * US, 16);
        assert_eq!(policy.step(situation(now, 3 * US), never), Step::Yield);
        policy.yielded(Duration::from_micros(49), now);
        assert_eq!(policy.step(situation(now, 4 * US), never), Step::Yield);
        policy.yielded(Duration::from_millis(3), now);
        assert_eq!(policy.step(situation(now, US), never), Step::Poll);
        assert_eq!(policy.step(situation(now, 2 * US), never), Step::Sleep);
        // After that time the thread looks before it yields, and the time doubles.
        let later = now + 2 * MS;
        assert_eq!(policy.step(situation(later, 2 * US), || Some(true)), Step::Sleep);
        assert_eq!(policy.step(situation(later + 3 * MS, 2 * US), never), Step::Sleep);
        assert_eq!(policy.step(situation(later + 4 * MS, 2 * US), nobody), Step::Yield);
        // No thread wants the core any more: the next sign begins with the shortest time.
        policy.yielded(Duration::from_millis(3), later + 5 * MS);
        assert_eq!(policy.step(situation(later + 7 * MS, 2 * US), || None), Step::Yield);
    }

    #[test]
    fn time_for_which_the_core_is_wanted_is_bounded() {
        let mut policy = IdlePolicy::default();
        let mut now = MS;
        for _ in 0..30 {
            policy.yielded(LONG_YIELD, now);
            now = policy.wanted_until;
        }
        policy.yielded(LONG_YIELD, now);
        assert_eq!(policy.wanted_until - now, 1000 * MS);
    }

    #[test]
    fn real_time_thread_polls_only_while_nobody_waits() {
        let (mut policy, now) = after_gaps(300 * US, 16);
        let at = |idle| Situation { real_time: true, ..situation(now, idle) };
        assert_eq!(policy.step(at(19 * US), never), Step::Poll);
        assert_eq!(policy.step(at(20 * US), nobody), Step::Poll);
        assert_eq!(policy.step(at(69 * US), never), Step::Poll);
        assert_eq!(policy.step(at(70 * US), || Some(true)), Step::Sleep);
        assert_eq!(policy.step(at(80 * US), never), Step::Sleep, "the core is wanted");
        assert_eq!(policy.step(at(19 * US), never), Step::Poll, "a short spin");
        let (mut policy, now) = after_gaps(300 * US, 16);
        let at = |idle| Situation { real_time: true, ..situation(now, idle) };
        assert_eq!(policy.step(at(20 * US), || None), Step::Sleep, "it cannot know");
    }

    #[test]
    fn real_time_thread_sleeps_for_a_client_on_its_cpu() {
        let at = |real_time| Situation { must_yield: true, real_time, ..situation(MS, 0) };
        assert_eq!(IdlePolicy::default().step(at(true), never), Step::Sleep);
        assert_eq!(IdlePolicy::default().step(at(false), never), Step::Yield);
    }

    #[test]
    fn real_time_thread_that_has_run_long_gives_way() {
        let mut policy = IdlePolicy::default();
        policy.slept(MS);
        assert!(!policy.must_step_down(20 * MS, never));
        assert!(policy.must_step_down(21 * MS, || Some(true)));
        assert!(policy.must_step_down(41 * MS, || None));
        assert!(!policy.must_step_down(61 * MS, nobody));
        assert!(!policy.must_step_down(80 * MS, never));
        // Gaps that are too short for a look otherwise.
        let at = |now| Situation { real_time: true, ..situation(now - 3 * US, 3 * US) };
        assert_eq!(policy.step(at(80 * MS), never), Step::Poll);
        assert_eq!(policy.step(at(81 * MS), nobody), Step::Poll);
        assert_eq!(policy.step(at(101 * MS), || Some(true)), Step::Sleep);
        // It does not spin for as long as it has run.
        policy.slept(101 * MS);
        assert_eq!(policy.step(at(102 * MS), never), Step::Sleep);
        assert_eq!(policy.step(at(120 * MS), || Some(true)), Step::Sleep);
        policy.slept(120 * MS);
        assert_eq!(policy.step(at(122 * MS), never), Step::Poll, "the short spin is back");
    }
}
