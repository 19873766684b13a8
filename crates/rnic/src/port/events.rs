//! Delivery of asynchronous events to the functions that own the affected objects.
//!
//! ```text
//! engine ── Event::Async ──> queue of the function ── Verb::TakeEvents ──> its owner
//!                                    └─ futex on its word `armed`, if that is 1
//! ```
//!
//! The word is armed and disarmed as the word of a CQ is (`handshake.rs`): a waiting thread arms
//! the word and then takes events once more; the NIC puts an event into the queue and then reads
//! the word.
//!
//! A queue is bounded, and an event that is already queued is not queued again. So a function that
//! never takes its events costs no more than one full queue, which holds the newest events.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::thread::futex;

use super::control::{EVENTS_MAX, Verb};
use super::handshake;
use super::sleeper::Sleeper;
use verbs::{AsyncEvent, DmaMemory, Events, FunctionId};

/// Maximum queued events of a function. A further event drops the oldest.
const QUEUE_MAX: usize = 1024;

/// The futex word of a function: armed by threads that wait for its events, otherwise 0.
#[derive(Clone)]
pub struct EventWord(DmaMemory);

impl EventWord {
    /// Uses the first 4 bytes of `memory` as the word.
    pub(super) fn new(memory: DmaMemory) -> Self {
        Self(memory)
    }

    pub(super) fn memory(&self) -> &DmaMemory {
        &self.0
    }

    /// Arms the word. The caller must then take events once more before it sleeps.
    pub fn arm(&self) {
        self.0.word32(0).store(handshake::ANY, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Sleeps while the word is armed, for at most `timeout`.
    pub fn sleep(&self, timeout: Duration) {
        let timeout = futex::Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos() as i64,
        };
        // The result does not matter: the caller checks for events again in any case.
        let word = self.0.word32(0);
        let _ = futex::wait(word, futex::Flags::empty(), handshake::ANY, Some(&timeout));
    }
}

/// The event queues of all functions.
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
    /// Sets the word on which threads wait for events of `function`, and the sleeper that wakes
    /// them.
    pub fn watch(&mut self, function: FunctionId, word: EventWord, sleeper: Arc<Sleeper>) {
        self.queues.entry(function).or_default().word = Some((word, sleeper));
    }

    /// The word of `function`, if it has one.
    pub fn word(&self, function: FunctionId) -> Option<EventWord> {
        self.queues.get(&function)?.word.as_ref().map(|(word, _)| word.clone())
    }

    /// Queues an event for its function. Returns the sleeper to wake, if the word was armed.
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

    /// Takes the oldest events of `function`, at most [`EVENTS_MAX`].
    pub fn take(&mut self, function: FunctionId) -> Events {
        let Some(queue) = self.queues.get_mut(&function) else { return Events::default() };
        let count = queue.events.len().min(EVENTS_MAX);
        let events = queue.events.drain(..count).collect();
        Events { events, lost: std::mem::take(&mut queue.lost) }
    }

    /// Removes the events of the object that `verb`, which has succeeded, destroyed.
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

    /// Removes the queue and the word of a function.
    pub fn remove(&mut self, function: FunctionId) {
        self.queues.remove(&function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::sleeper::Environment;
    use crate::port::wakes::Wakes;
    use verbs::{Cqn, Qpn, Srqn};

    fn event(n: u32) -> AsyncEvent {
        AsyncEvent::LastWqeReached { qpn: Qpn::new(n) }
    }

    #[test]
    fn unread_queue_keeps_newest_events_and_counts_lost_ones() {
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
    fn destroyed_qp_has_no_events() {
        let mut queues = EventQueues::default();
        let f = FunctionId::PHYSICAL;
        queues.push(f, event(1));
        queues.push(f, event(2));
        queues.forget_ended(f, &Verb::DestroyQp { qpn: Qpn::new(1) });
        assert_eq!(queues.take(f).events, [event(2)]);
    }

    #[test]
    fn destroying_an_object_removes_only_its_own_events() {
        let f = FunctionId::PHYSICAL;
        let (qpn, cqn, srqn) = (Qpn::new(1), Cqn::new(1), Srqn::new(1));
        let syndrome = verbs::cqe::Syndrome::LocalProtection;
        let failed = |qpn| AsyncEvent::QpError { qpn, syndrome, by_peer: false };
        let events = [
            event(1),
            event(2),
            failed(qpn),
            failed(Qpn::new(2)),
            AsyncEvent::CqOverrun { cqn },
            AsyncEvent::CqOverrun { cqn: Cqn::new(2) },
            AsyncEvent::SrqLimit { srqn },
            AsyncEvent::SrqLimit { srqn: Srqn::new(2) },
        ];
        let destroyed = [
            (Verb::DestroyQp { qpn }, vec![0, 2]),
            (Verb::DestroyCq { cqn }, vec![4]),
            (Verb::DestroySrq { srqn }, vec![6]),
            (Verb::AllocPd, vec![]),
        ];
        for (verb, ended) in destroyed {
            let mut queues = EventQueues::default();
            events.iter().for_each(|event| _ = queues.push(f, *event));
            queues.forget_ended(f, &verb);
            let left = events.iter().enumerate().filter(|(i, _)| !ended.contains(i));
            let left: Vec<_> = left.map(|(_, event)| *event).collect();
            assert_eq!(queues.take(f).events, left, "{verb:?}");
        }
    }

    #[test]
    fn reused_function_number_inherits_no_events() {
        let mut queues = EventQueues::default();
        let f = FunctionId(3);
        queues.push(f, event(1));
        queues.remove(f);
        assert_eq!(queues.take(f), Events::default());
    }

    #[test]
    fn event_wakes_a_sleeping_thread() {
        let (mut queues, mut wakes) = (EventQueues::default(), Wakes::new(Environment::SYSTEM));
        let f = FunctionId(3);
        let word = EventWord::new(DmaMemory::anonymous(4).unwrap());
        queues.watch(f, word.clone(), wakes.sleeper(f, word.memory().clone()));
        assert!(
            queues
                .word(f)
                .is_some_and(|word_of_f| word_of_f.memory().addr() == word.memory().addr())
        );
        assert!(queues.word(FunctionId(4)).is_none());
        assert!(queues.push(f, event(1)).is_none(), "the word is not armed");
        word.arm();
        assert_eq!(word.memory().word32(0).load(Ordering::SeqCst), handshake::ANY);
        let (sender, receiver) = std::sync::mpsc::channel();
        let sleeping = word.clone();
        let sleeper = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid()).unwrap();
            while sleeping.memory().word32(0).load(Ordering::SeqCst) == handshake::ANY {
                sleeping.sleep(Duration::from_secs(20));
            }
        });
        // Wait until the thread is asleep: the event must not arrive while it is about to sleep.
        let stat = format!("/proc/self/task/{}/stat", receiver.recv().unwrap().as_raw_nonzero());
        let is_asleep = || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" S"))
        };
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while !is_asleep() {
            assert!(std::time::Instant::now() < until, "the thread does not sleep");
            std::thread::yield_now();
        }
        let woken = queues.push(f, event(2)).expect("the word is armed").clone();
        wakes.queue(&woken);
        wakes.run();
        sleeper.join().unwrap();
    }
}
