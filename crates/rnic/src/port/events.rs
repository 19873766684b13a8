//! Asynchronous events on their way to the functions that they are for.
//!
//! ```text
//! engine ── Event::Async ──> queue of the function ── Verb::TakeEvents ──> its owner
//!                                    └─ futex on its word `armed`, if that is 1
//! ```
//!
//! The word is armed and disarmed as a CQ's is (`handshake.rs`): who waits arms it and then takes events
//! once more; the NIC puts an event into the queue and then looks at the word.
//!
//! A queue is short, and an event that is in it already does not come again: a function that never takes its
//! events keeps the last of them, and costs nothing more.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::thread::futex;

use super::control::{EVENTS_MAX, Events, Verb};
use super::handshake;
use super::wakes::Sleeper;
use crate::ids::FunctionId;
use crate::memory::DmaMemory;
use crate::verbs::AsyncEvent;

/// The most events that wait for their function. More drop the oldest.
const QUEUE_MAX: usize = 1024;

/// The word of a function: 0, or armed by who waits for its events.
#[derive(Clone)]
pub struct EventWord(DmaMemory);

impl EventWord {
    /// The first 4 bytes of `memory`.
    pub(super) fn new(memory: DmaMemory) -> Self {
        Self(memory)
    }

    pub(super) fn memory(&self) -> &DmaMemory {
        &self.0
    }

    /// Says that the caller will wait; then it must take events once more before it does.
    pub fn arm(&self) {
        self.0.word32(0).store(handshake::ANY, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Sleeps while the word is armed, for up to `timeout`.
    pub fn sleep(&self, timeout: Duration) {
        let timeout = futex::Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos() as i64,
        };
        // Woken, interrupted, too late: the caller looks again in any case.
        let word = self.0.word32(0);
        let _ = futex::wait(word, futex::Flags::empty(), handshake::ANY, Some(&timeout));
    }
}

/// The queues of all functions.
#[derive(Default)]
pub(super) struct EventQueues {
    queues: HashMap<FunctionId, Queue>,
}

#[derive(Default)]
struct Queue {
    events: VecDeque<AsyncEvent>,
    lost: u32,
    word: Option<(EventWord, Arc<Sleeper>)>,
}

impl EventQueues {
    /// Sets the word on which threads wait for events of `function`, and its sleeper.
    pub fn watch(&mut self, function: FunctionId, word: EventWord, sleeper: Arc<Sleeper>) {
        self.queues.entry(function).or_default().word = Some((word, sleeper));
    }

    /// The word of `function`, if it has one.
    pub fn word(&self, function: FunctionId) -> Option<EventWord> {
        self.queues.get(&function)?.word.as_ref().map(|(word, _)| word.clone())
    }

    /// Puts an event into its function's queue; gives the sleeper to be woken for it.
    #[cold]
    pub fn push(&mut self, function: FunctionId, event: AsyncEvent) -> Option<&Arc<Sleeper>> {
        let queue = self.queues.entry(function).or_default();
        if queue.events.contains(&event) {
            return None;
        }
        if queue.events.len() == QUEUE_MAX {
            queue.events.pop_front();
            queue.lost = queue.lost.saturating_add(1);
        }
        queue.events.push_back(event);
        let (EventWord(word), sleeper) = queue.word.as_ref()?;
        fence(Ordering::SeqCst);
        handshake::disarm(word.word32(0), true).then_some(sleeper)
    }

    /// Takes the oldest events of `function`.
    pub fn take(&mut self, function: FunctionId) -> Events {
        let Some(queue) = self.queues.get_mut(&function) else { return Events::default() };
        let count = queue.events.len().min(EVENTS_MAX);
        let events = queue.events.drain(..count).collect();
        Events { events, lost: std::mem::take(&mut queue.lost) }
    }

    /// Forgets events of an object that `verb`, which was done, has ended.
    pub fn forget_ended(&mut self, function: FunctionId, verb: &Verb<()>) {
        let Some(queue) = self.queues.get_mut(&function) else { return };
        queue.events.retain(|event| match (event, verb) {
            (AsyncEvent::QpError { qpn: at, .. }, Verb::DestroyQp { qpn }) => at != qpn,
            (AsyncEvent::LastWqeReached { qpn: at }, Verb::DestroyQp { qpn }) => at != qpn,
            (AsyncEvent::CqOverrun { cqn: at }, Verb::DestroyCq { cqn }) => at != cqn,
            (AsyncEvent::SrqLimit { srqn: at }, Verb::DestroySrq { srqn }) => at != srqn,
            _ => true,
        });
    }

    /// Forgets a function.
    pub fn remove(&mut self, function: FunctionId) {
        self.queues.remove(&function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Qpn;

    fn event(n: u32) -> AsyncEvent {
        AsyncEvent::LastWqeReached { qpn: Qpn::new(n) }
    }

    #[test]
    fn a_queue_that_nobody_reads_keeps_the_last_and_says_what_it_lost() {
        let mut queues = EventQueues::default();
        let f = FunctionId(3);
        for n in 0..QUEUE_MAX as u32 + 10 {
            queues.push(f, event(n));
            queues.push(f, event(n));
        }
        let first = queues.take(f);
        assert_eq!((first.lost, first.events.len()), (10, EVENTS_MAX));
        assert_eq!(first.events[0], event(10));
        assert_eq!(queues.take(f).lost, 0);
        assert_eq!(queues.take(FunctionId(4)), Events::default());
    }

    #[test]
    fn what_has_ended_has_no_events() {
        let mut queues = EventQueues::default();
        let f = FunctionId::PHYSICAL;
        queues.push(f, event(1));
        queues.push(f, event(2));
        queues.forget_ended(f, &Verb::DestroyQp { qpn: Qpn::new(1) });
        assert_eq!(queues.take(f).events, [event(2)]);
    }
}
