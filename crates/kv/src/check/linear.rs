//! A checker of linearizability of one key (Wing and Gong, with memory of visited states by Lowe).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashSet};

/// The value of a key: a number, or none.
pub type Value = Option<u64>;

/// An operation on one key, and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    /// A read.
    Get(Value),
    /// A write.
    Set(u64),
    /// Sets if absent; the result is whether the value was set.
    SetNew(u64, bool),
    /// A deletion; the result is whether the key was there.
    Delete(bool),
    /// Replaces the value, and returns the one before.
    Swap(u64, Value),
    /// Sets if absent, without an answer.
    SetNewOpen(u64),
    /// A deletion without an answer.
    DeleteOpen,
}

impl Did {
    /// The value afterwards, if the operation is possible with the value `before`.
    fn apply(self, before: Value) -> Option<Value> {
        match self {
            Self::Get(seen) => (seen == before).then_some(before),
            Self::Set(value) => Some(Some(value)),
            Self::SetNew(value, is_set) => {
                let after = if is_set { Some(value) } else { before };
                (is_set == before.is_none()).then_some(after)
            }
            Self::Delete(was_there) => (was_there == before.is_some()).then_some(None),
            Self::Swap(value, old) => (old == before).then_some(Some(value)),
            Self::SetNewOpen(value) => Some(before.or(Some(value))),
            Self::DeleteOpen => Some(None),
        }
    }
}

/// An operation with its times.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Time of the call.
    pub begin: u64,
    /// Time of the answer. `u64::MAX`: the call has no answer, and may have had no effect.
    pub end: u64,
    /// The operation.
    pub did: Did,
}

/// The operations of a run, by key.
#[derive(Debug, Default)]
pub struct History {
    clock: Cell<u64>,
    events: RefCell<BTreeMap<u64, Vec<Event>>>,
}

impl History {
    /// The next time.
    pub fn tick(&self) -> u64 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    /// Adds a call that has its answer now.
    pub fn add(&self, key: u64, begin: u64, did: Did) {
        let end = self.tick();
        self.events.borrow_mut().entry(key).or_default().push(Event { begin, end, did });
    }

    /// Adds a call without an answer.
    pub fn add_open(&self, key: u64, begin: u64, did: Did) {
        let event = Event { begin, end: u64::MAX, did };
        self.events.borrow_mut().entry(key).or_default().push(event);
    }

    /// Panics if the history of a key is not linearizable.
    pub fn check(&self, seed: u64) {
        if let Some(why) = self.violation() {
            panic!("seed {seed}, {why}");
        }
    }

    /// The history of a key that is not linearizable.
    pub fn violation(&self) -> Option<String> {
        let events = self.events.borrow();
        let wrong = events.iter().find(|(_, events)| !is_linearizable(events))?;
        let mut events = wrong.1.clone();
        events.sort_by_key(|event| event.begin);
        let lines: Vec<_> = events.iter().map(|event| format!("\n  {event:?}")).collect();
        Some(format!("key {}: the history has no order:{}", wrong.0, lines.concat()))
    }

    /// Number of events of a key.
    pub fn events(&self, key: u64) -> usize {
        self.events.borrow().get(&key).map_or(0, Vec::len)
    }
}

/// True if there is an order of the events in which each has its result.
pub fn is_linearizable(events: &[Event]) -> bool {
    assert!(events.len() <= 64, "{} events of one key", events.len());
    let must = events.iter().enumerate().filter(|(_, event)| event.end != u64::MAX);
    let all = must.fold(0_u64, |all, (i, _)| all | 1 << i);
    let mut seen = HashSet::new();
    let mut stack = vec![(0_u64, None)];
    while let Some((done, value)) = stack.pop() {
        if done & all == all {
            return true;
        }
        if !seen.insert((done, value)) {
            continue;
        }
        let open = || events.iter().enumerate().filter(|(i, _)| done >> i & 1 == 0);
        let first_end = open().map(|(_, event)| event.end).min().unwrap_or(u64::MAX);
        for (i, event) in open().filter(|(_, event)| event.begin <= first_end) {
            if let Some(after) = event.did.apply(value) {
                stack.push((done | 1 << i, after));
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checker_accepts_and_refuses_histories() {
        let event = |begin, end, did| Event { begin, end, did };
        let set = event(1, 4, Did::Set(7));
        assert!(is_linearizable(&[
            set,
            event(2, 3, Did::Get(None)),
            event(5, 6, Did::Get(Some(7)))
        ]));
        assert!(is_linearizable(&[set, event(2, 3, Did::Get(Some(7)))]));
        assert!(!is_linearizable(&[set, event(5, 6, Did::Get(None))]));
        assert!(!is_linearizable(&[
            set,
            event(2, 3, Did::Get(Some(7))),
            event(4, 5, Did::Get(None))
        ]));
        let open = event(1, u64::MAX, Did::Set(7));
        assert!(is_linearizable(&[
            open,
            event(2, 3, Did::Get(None)),
            event(4, 5, Did::Get(Some(7)))
        ]));
        assert!(!is_linearizable(&[
            event(1, 2, Did::SetNew(1, true)),
            event(3, 4, Did::SetNew(2, true))
        ]));
    }
}
