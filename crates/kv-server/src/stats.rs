//! Counters of a thread, which INFO and the metrics sum up over all threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use redis_formats::command::Id;

/// A counter that one thread increases and others read.
///
/// Because an increase is a load and a store, an increase at the moment of [`Counter::reset`] may
/// undo the reset.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Increases the counter.
    pub fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the counter to zero.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Steps of a power of two in a histogram.
const STEPS: usize = 16;
/// The highest power of two that a histogram tells apart: 17 s in nanoseconds.
const POWER_MAX: usize = 34;
const BUCKETS: usize = (POWER_MAX - 3) * STEPS + STEPS;

/// A distribution of times, with buckets that are 6 % wide.
#[derive(Debug)]
pub struct Times(Box<[Counter]>);

impl Default for Times {
    fn default() -> Self {
        Self((0..BUCKETS).map(|_| Counter::default()).collect())
    }
}

impl Times {
    fn bucket(ns: u64) -> usize {
        let ns = ns.min((1 << (POWER_MAX + 1)) - 1);
        if ns < STEPS as u64 {
            return ns as usize;
        }
        let power = 63 - ns.leading_zeros() as usize;
        let step = (ns >> (power - 4)) as usize & (STEPS - 1);
        (power - 3) * STEPS + step
    }

    /// The largest time of a bucket.
    fn upper(bucket: usize) -> u64 {
        if bucket < STEPS {
            return bucket as u64;
        }
        let (power, step) = (bucket / STEPS + 3, bucket % STEPS);
        ((STEPS + step + 1) as u64) << (power - 4)
    }

    /// Counts a time.
    pub fn add(&self, ns: u64) {
        self.0[Self::bucket(ns)].add(1);
    }
}

/// The sum of the distributions of all threads.
#[derive(Clone, Debug)]
pub struct Distribution(Vec<u64>);

impl Distribution {
    fn new() -> Self {
        Self(vec![0; BUCKETS])
    }

    fn add(&mut self, times: &Times) {
        self.0.iter_mut().zip(&times.0).for_each(|(sum, bucket)| *sum += bucket.get());
    }

    /// Number of times.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The time in nanoseconds below which `percent` of the times are.
    pub fn percentile(&self, percent: f64) -> u64 {
        let wanted = (self.count() as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.0.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Times::upper(bucket);
            }
        }
        0
    }

    /// The number of times of at most `2^power` nanoseconds, for each power that adds some.
    pub fn cumulative(&self) -> Vec<(u32, u64)> {
        let mut rows: Vec<(u32, u64)> = Vec::new();
        let mut seen = 0;
        for (bucket, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            seen += count;
            let power = Times::upper(bucket).next_power_of_two().trailing_zeros().max(10);
            match rows.last_mut() {
                Some(last) if last.0 == power => last.1 = seen,
                _ => rows.push((power, seen)),
            }
        }
        rows
    }
}

/// Counters of a command.
#[derive(Debug, Default)]
pub struct CommandStats {
    /// Executions.
    pub calls: Counter,
    /// Time of the executions in nanoseconds.
    pub ns: Counter,
    /// Refusals before an execution.
    pub rejected: Counter,
    /// Executions that replied with an error.
    pub failed: Counter,
    times: OnceLock<Times>,
}

impl CommandStats {
    /// Counts an execution.
    pub fn executed(&self, ns: u64, with_times: bool) {
        self.calls.add(1);
        self.ns.add(ns);
        if with_times {
            self.times.get_or_init(Times::default).add(ns);
        }
    }
}

/// Counters of a thread.
#[derive(Debug)]
pub struct Stats {
    /// Commands that were executed.
    pub commands: Counter,
    /// Connections that came.
    pub connections: Counter,
    /// Connections that were refused.
    pub refused: Counter,
    /// Bytes received.
    pub received: Counter,
    /// Bytes sent.
    pub sent: Counter,
    /// Calls that read from a socket.
    pub reads: Counter,
    /// Calls that wrote to a socket.
    pub writes: Counter,
    /// Error replies.
    pub errors: Counter,
    /// Reads that found their key.
    pub hits: Counter,
    /// Reads that did not find their key.
    pub misses: Counter,
    /// Keys that expired.
    pub expired: Counter,
    /// Keys that were evicted.
    pub evicted: Counter,
    /// Connections that were ended for `maxmemory-clients`.
    pub evicted_clients: Counter,
    /// Commands that changed data.
    pub changes: Counter,
    /// Waves of ready tasks.
    pub waves: Counter,
    /// Refused passwords.
    pub denied: Counter,
    /// Counters by command.
    pub by_command: Box<[CommandStats]>,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            commands: Counter::default(),
            connections: Counter::default(),
            refused: Counter::default(),
            received: Counter::default(),
            sent: Counter::default(),
            reads: Counter::default(),
            writes: Counter::default(),
            errors: Counter::default(),
            hits: Counter::default(),
            misses: Counter::default(),
            expired: Counter::default(),
            evicted: Counter::default(),
            evicted_clients: Counter::default(),
            changes: Counter::default(),
            waves: Counter::default(),
            denied: Counter::default(),
            by_command: (0..Id::COUNT).map(|_| CommandStats::default()).collect(),
        }
    }
}

impl Stats {
    /// Counters of command `id`.
    pub fn of(&self, id: Id) -> &CommandStats {
        &self.by_command[id as usize]
    }

    /// Sets all counters to zero that CONFIG RESETSTAT names.
    pub(crate) fn reset(&self) {
        let all = [
            &self.commands,
            &self.connections,
            &self.refused,
            &self.received,
            &self.sent,
            &self.reads,
            &self.writes,
            &self.errors,
            &self.hits,
            &self.misses,
            &self.expired,
            &self.evicted,
            &self.evicted_clients,
            &self.denied,
        ];
        all.into_iter().for_each(Counter::reset);
        for command in &self.by_command {
            let counters = [&command.calls, &command.ns, &command.rejected, &command.failed];
            counters.into_iter().for_each(Counter::reset);
        }
        self.reset_times(|_| true);
    }

    /// Empties the distributions of the commands that `is_wanted` selects.
    pub(crate) fn reset_times(&self, is_wanted: impl Fn(usize) -> bool) {
        let wanted = self.by_command.iter().enumerate().filter(|(id, _)| is_wanted(*id));
        for times in wanted.filter_map(|(_, command)| command.times.get()) {
            times.0.iter().for_each(Counter::reset);
        }
    }
}

/// The counters of a command over all threads.
#[derive(Clone, Debug)]
pub struct CommandSum {
    /// Executions.
    pub calls: u64,
    /// Time of the executions in nanoseconds.
    pub ns: u64,
    /// Refusals before an execution.
    pub rejected: u64,
    /// Executions that replied with an error.
    pub failed: u64,
    /// Times of the executions.
    pub times: Distribution,
}

impl CommandSum {
    /// Sums up the counters of command `id`.
    pub fn of<'a>(threads: impl Iterator<Item = &'a Stats>, id: Id) -> Self {
        let times = Distribution::new();
        let mut sum = Self { calls: 0, ns: 0, rejected: 0, failed: 0, times };
        for command in threads.map(|stats| stats.of(id)) {
            sum.calls += command.calls.get();
            sum.ns += command.ns.get();
            sum.rejected += command.rejected.get();
            sum.failed += command.failed.get();
            if let Some(times) = command.times.get() {
                sum.times.add(times);
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_has_its_times() {
        for ns in (0..5000).chain([65_535, 65_536, 1_000_000, 123_456_789, (1 << 35) - 1]) {
            let bucket = Times::bucket(ns);
            let below = bucket.checked_sub(1).map(Times::upper);
            assert!(ns <= Times::upper(bucket), "{ns}");
            assert!(below.is_none_or(|below| ns >= below), "{ns}");
        }
        assert_eq!(Times::bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_and_powers_follow_the_times() {
        let stats = Stats::default();
        for us in 1..=100 {
            stats.of(Id::Get).executed(us * 1000, true);
        }
        let sum = CommandSum::of([&stats, &Stats::default()].into_iter(), Id::Get);
        assert_eq!((sum.calls, sum.ns, sum.times.count()), (100, 5_050_000, 100));
        let median = sum.times.percentile(50.0);
        assert!((50_000..54_000).contains(&median), "{median}");
        assert_eq!(sum.times.cumulative().first(), Some(&(10, 1)));
        assert_eq!(sum.times.cumulative().last(), Some(&(17, 100)));
        stats.reset();
        assert_eq!(CommandSum::of([&stats].into_iter(), Id::Get).times.count(), 0);
    }
}
