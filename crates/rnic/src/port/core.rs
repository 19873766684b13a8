//! What every port has around the engine: verbs with what a port must remember of them, and events
//! turned into wake-ups.

use std::collections::{HashMap, VecDeque};

use rustix::thread::futex;

use super::control::{Reply, Verb};
use super::error::Error;
use super::events::EventQueues;
use crate::engine::Engine;
use crate::ids::{Cqn, FunctionId};
use crate::memory::DmaMemory;
use crate::verbs::{Event, Limits};

/// Offset, in a CQ's record, of the word that says that somebody sleeps on it.
pub const ARMED: usize = 4;

/// The most wake-ups that one [`Core::deliver_events`] does. They are system calls, the dearest thing
/// that a client can have the NIC do; the rest comes with the next call.
const WAKES: usize = 4;
/// The most threads that one wake-up wakes. A CQ has one that sleeps on it, as a rule; a client that has
/// thousands asleep there shall not keep the NIC busy with them.
const SLEEPERS: u32 = 4;

/// An engine with its CQs' records.
pub(super) struct Core {
    pub engine: Engine,
    /// Where the sleepers of a CQ sleep.
    records: HashMap<Cqn, Record>,
    /// Functions with CQs whose sleepers are to be woken: they take turns.
    wakes: VecDeque<(FunctionId, VecDeque<Cqn>)>,
    /// Asynchronous events.
    pub events: EventQueues,
}

/// A CQ's record.
struct Record {
    function: FunctionId,
    memory: DmaMemory,
    /// It stands in `wakes`.
    queued: bool,
}

impl Core {
    pub fn new(limits: Limits) -> Self {
        Self {
            engine: Engine::new(limits),
            records: HashMap::new(),
            wakes: VecDeque::new(),
            events: EventQueues::default(),
        }
    }

    /// Executes a control verb of function `f`.
    pub fn execute(&mut self, f: FunctionId, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        let record = match &verb {
            Verb::CreateCq { record, .. } => Some(record.clone()),
            _ => None,
        };
        let destroyed = match verb {
            Verb::DestroyCq { cqn } => Some(cqn),
            _ => None,
        };
        let ends = match verb {
            Verb::TakeEvents => return Ok(Reply::Events(self.events.take(f))),
            Verb::DestroyQp { qpn } => Some(Verb::DestroyQp { qpn }),
            Verb::DestroyCq { cqn } => Some(Verb::DestroyCq { cqn }),
            Verb::DestroySrq { srqn } => Some(Verb::DestroySrq { srqn }),
            _ => None,
        };
        let reply = verb.execute(&mut self.engine, f)?;
        if let (Reply::Cq(cqn), Some(record)) = (&reply, record) {
            let record = Record { function: f, memory: record, queued: false };
            self.records.insert(*cqn, record);
        }
        if let Some(cqn) = destroyed {
            self.records.remove(&cqn);
        }
        if let Some(verb) = ends {
            self.deliver_events();
            self.events.forget_ended(f, &verb);
        }
        Ok(reply)
    }

    /// Removes a function with all that it has.
    pub fn remove_function(&mut self, f: FunctionId) {
        self.engine.remove_function(f);
        self.records.retain(|_, record| record.function != f);
        // So that none of its events comes later.
        self.deliver_events();
        self.events.remove(f);
        self.wakes.retain(|(owner, _)| *owner != f);
    }

    /// Wakes who sleeps on the CQs that the engine reports. True if it had anything to do; then there
    /// may be more.
    #[inline]
    pub fn deliver_events(&mut self) -> bool {
        let Self { engine, records, wakes, events } = self;
        let mut any = false;
        let mut left = WAKES;
        for event in engine.take_events() {
            any = true;
            match event {
                Event::Completion(cqn) if left > 0 && wakes.is_empty() => {
                    left -= 1;
                    wake_now(records, cqn);
                }
                Event::Completion(cqn) => queue_wake(records, wakes, cqn),
                Event::Async { function, event } => events.push(function, event),
            }
        }
        if !self.wakes.is_empty() {
            any = true;
            self.wake_some(left);
        }
        any
    }

    #[cold]
    fn wake_some(&mut self, count: usize) {
        for _ in 0..count {
            let Some((function, mut cqs)) = self.wakes.pop_front() else { return };
            let cqn = cqs.pop_front();
            if !cqs.is_empty() {
                self.wakes.push_back((function, cqs));
            }
            if let Some(cqn) = cqn {
                wake_now(&mut self.records, cqn);
            }
        }
    }
}

#[cold]
fn wake_now(records: &mut HashMap<Cqn, Record>, cqn: Cqn) {
    // It may have ended since.
    if let Some(record) = records.get_mut(&cqn) {
        record.queued = false;
        wake_up_to(&record.memory, SLEEPERS);
    }
}

#[cold]
fn queue_wake(
    records: &mut HashMap<Cqn, Record>,
    wakes: &mut VecDeque<(FunctionId, VecDeque<Cqn>)>,
    cqn: Cqn,
) {
    let Some(record) = records.get_mut(&cqn) else { return };
    if std::mem::replace(&mut record.queued, true) {
        return;
    }
    match wakes.iter_mut().find(|(function, _)| *function == record.function) {
        Some((_, cqs)) => cqs.push_back(cqn),
        None => wakes.push_back((record.function, VecDeque::from([cqn]))),
    }
}

/// Wakes all who sleep on the CQ with `record`, in whatever process.
pub fn wake(record: &DmaMemory) {
    wake_up_to(record, i32::MAX as u32);
}

fn wake_up_to(record: &DmaMemory, threads: u32) {
    // A futex in a client's memory: what can fail here is the client's loss.
    let _ = futex::wake(record.word32(ARMED), futex::Flags::empty(), threads);
}
