//! Events that took longer than `latency-monitor-threshold`.

use std::collections::{BTreeMap, VecDeque};

use parking_lot::Mutex;

/// Samples that an event keeps.
const SAMPLES_MAX: usize = 160;

/// A sample: seconds since 1970, and the longest time in this second in milliseconds.
pub(crate) type Sample = (u64, u64);

#[derive(Clone, Debug, Default)]
struct Event {
    samples: VecDeque<Sample>,
    max: u64,
}

/// The latest samples by event.
#[derive(Debug, Default)]
pub(crate) struct Latency {
    events: Mutex<BTreeMap<&'static str, Event>>,
}

/// A row of LATENCY LATEST.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latest {
    pub event: &'static str,
    pub at_s: u64,
    pub ms: u64,
    pub max_ms: u64,
}

impl Latency {
    /// Adds a sample to an event.
    pub fn add(&self, event: &'static str, at_s: u64, ms: u64) {
        let mut events = self.events.lock();
        let event = events.entry(event).or_default();
        event.max = event.max.max(ms);
        match event.samples.back_mut() {
            Some(last) if last.0 == at_s => last.1 = last.1.max(ms),
            _ => event.samples.push_back((at_s, ms)),
        }
        if event.samples.len() > SAMPLES_MAX {
            event.samples.pop_front();
        }
    }

    pub fn latest(&self) -> Vec<Latest> {
        let row = |(&name, event): (&&'static str, &Event)| {
            let &(at_s, ms) = event.samples.back()?;
            Some(Latest { event: name, at_s, ms, max_ms: event.max })
        };
        self.events.lock().iter().filter_map(row).collect()
    }

    pub fn history(&self, event: &[u8]) -> Vec<Sample> {
        let events = self.events.lock();
        let found = str::from_utf8(event).ok().and_then(|name| events.get(name));
        found.map_or(Vec::new(), |event| event.samples.iter().copied().collect())
    }

    /// Removes the events that `is_wanted` selects. Returns their number.
    pub fn reset(&self, is_wanted: impl Fn(&str) -> bool) -> usize {
        let mut events = self.events.lock();
        let before = events.len();
        events.retain(|name, _| !is_wanted(name));
        before - events.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_second_are_one_sample() {
        let latency = Latency::default();
        for (at, ms) in [(1, 5), (1, 9), (1, 7), (2, 3)] {
            latency.add("command", at, ms);
        }
        assert_eq!(latency.history(b"command"), [(1, 9), (2, 3)]);
        let latest = Latest { event: "command", at_s: 2, ms: 3, max_ms: 9 };
        assert_eq!(latency.latest(), [latest]);
        assert_eq!(latency.reset(|name| name == "other"), 0);
        assert_eq!(latency.reset(|_| true), 1);
        assert!(latency.latest().is_empty());
        (0..1000).for_each(|at| latency.add("fork", at, 1));
        assert_eq!(latency.history(b"fork").len(), SAMPLES_MAX);
    }
}
