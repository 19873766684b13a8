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
    use crate::ids::{Cqn, Qpn, Srqn};
    use crate::port::wakes::{Environment, Wakes};

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

    #[test]
    fn an_object_that_has_ended_takes_its_own_events_with_it_and_no_others() {
        let f = FunctionId::PHYSICAL;
        let (qpn, cqn, srqn) = (Qpn::new(1), Cqn::new(1), Srqn::new(1));
        let syndrome = crate::cqe::Syndrome::LocalProtection;
        let failed = |qpn| AsyncEvent::QpError { qpn, syndrome, by_peer: false };
        let all = [
            event(1),
            event(2),
            failed(qpn),
            failed(Qpn::new(2)),
            AsyncEvent::CqOverrun { cqn },
            AsyncEvent::CqOverrun { cqn: Cqn::new(2) },
            AsyncEvent::SrqLimit { srqn },
            AsyncEvent::SrqLimit { srqn: Srqn::new(2) },
        ];
        let gone = [
            (Verb::DestroyQp { qpn }, vec![0, 2]),
            (Verb::DestroyCq { cqn }, vec![4]),
            (Verb::DestroySrq { srqn }, vec![6]),
            (Verb::AllocPd, vec![]),
        ];
        for (verb, its) in gone {
            let mut queues = EventQueues::default();
            all.iter().for_each(|event| _ = queues.push(f, *event));
            queues.forget_ended(f, &verb);
            let left = all.iter().enumerate().filter(|(i, _)| !its.contains(i));
            let left: Vec<_> = left.map(|(_, event)| *event).collect();
            assert_eq!(queues.take(f).events, left, "{verb:?}");
        }
    }

    #[test]
    fn a_function_that_is_gone_leaves_no_events_to_the_next_one_of_its_number() {
        let mut queues = EventQueues::default();
        let f = FunctionId(3);
        queues.push(f, event(1));
        queues.remove(f);
        assert_eq!(queues.take(f), Events::default());
    }

    #[test]
    fn an_event_wakes_a_thread_that_sleeps_until_one_comes() {
        let (mut queues, mut wakes) = (EventQueues::default(), Wakes::new(Environment::SYSTEM));
        let f = FunctionId(3);
        let word = EventWord::new(DmaMemory::anonymous(4).unwrap());
        queues.watch(f, word.clone(), wakes.sleeper(f, word.memory().clone()));
        assert!(queues.word(f).is_some_and(|it| it.memory().addr() == word.memory().addr()));
        assert!(queues.word(FunctionId(4)).is_none());
        assert!(queues.push(f, event(1)).is_none(), "the word is not armed");
        word.arm();
        assert_eq!(word.memory().word32(0).load(Ordering::SeqCst), handshake::ANY);
        let (say, hear) = std::sync::mpsc::channel();
        let sleeping = word.clone();
        let sleeper = std::thread::spawn(move || {
            say.send(rustix::thread::gettid()).unwrap();
            while sleeping.memory().word32(0).load(Ordering::SeqCst) == handshake::ANY {
                sleeping.sleep(Duration::from_secs(20));
            }
        });
        // The event comes when the thread is asleep, not when it is about to be.
        let stat = format!("/proc/self/task/{}/stat", hear.recv().unwrap().as_raw_nonzero());
        let is_asleep = || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" S"))
        };
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while !is_asleep() {
            assert!(std::time::Instant::now() < until, "it does not sleep");
            std::thread::yield_now();
        }
        let woken = queues.push(f, event(2)).expect("the word is armed").clone();
        wakes.queue(&woken);
        wakes.run();
        sleeper.join().unwrap();
    }
}
