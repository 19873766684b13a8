//! The part that all ports share around the engine: it executes verbs, records the sleepers of each
//! CQ, and turns the engine's events into wake-ups.

use std::collections::HashMap;
use std::sync::Arc;

use rustix::thread::futex;

use super::control::{Reply, Verb};
use super::error::Error;
use super::events::{EventQueues, EventWord};
use super::sleeper::{Environment, Sleeper};
use super::wakes::Wakes;
use crate::engine::Engine;
use crate::limits::Limits;
use crate::spec::Event;
use verbs::{Cqn, DmaMemory, FunctionId};

/// Offset, in a CQ's record, of the armed word: non-zero while a thread sleeps on the CQ.
pub const ARMED: usize = 4;

/// An engine with its CQs' records.
pub(super) struct Core {
    pub engine: Engine,
    /// The word of each CQ's record that threads sleep on.
    sleepers: HashMap<Cqn, Arc<Sleeper>>,
    /// Pending wake-ups.
    pub wakes: Wakes,
    /// Pending asynchronous events of each function.
    pub events: EventQueues,
}

impl Core {
    pub fn new(limits: Limits) -> Self {
        Self {
            engine: Engine::new(limits),
            sleepers: HashMap::new(),
            wakes: Wakes::new(Environment::SYSTEM),
            events: EventQueues::default(),
        }
    }

    /// Registers `word` as the futex word on which threads wait for asynchronous events of
    /// `function`.
    pub fn watch_events(&mut self, function: FunctionId, word: EventWord) {
        let sleeper = self.wakes.sleeper(function, word.memory().clone());
        self.events.watch(function, word, sleeper);
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
            // The engine has checked the record when it executed the verb.
            if let Some(word) = record.slice(ARMED, 4) {
                self.sleepers.insert(*cqn, self.wakes.sleeper(f, word));
            }
        }
        if let Some(cqn) = destroyed {
            self.sleepers.remove(&cqn);
        }
        if let Some(verb) = ends {
            self.deliver_events();
            self.events.forget_ended(f, &verb);
        }
        Ok(reply)
    }

    /// Removes a function with all its objects, events and wake-ups.
    pub fn remove_function(&mut self, f: FunctionId) {
        self.engine.remove_function(f);
        self.sleepers.retain(|_, sleeper| sleeper.function != f);
        // Delivered first: otherwise the engine would report events of this function after its
        // removal.
        self.deliver_events();
        self.events.remove(f);
        self.wakes.remove(f);
    }

    /// Turns the engine's events into wake-ups and makes some of the wake-ups. Returns true if
    /// there was work; then more may be left.
    #[inline]
    pub fn deliver_events(&mut self) -> bool {
        let Self { engine, sleepers, wakes, events } = self;
        let mut any = false;
        // Draining an empty queue in each round would cost a tenth of a READ's latency.
        if engine.has_events() {
            any = true;
            for event in engine.take_events() {
                let sleeper = match event {
                    // No sleeper if the CQ was destroyed after its completion.
                    Event::Completion(cqn) => sleepers.get(&cqn),
                    Event::Async { function, event } => events.push(function, event),
                };
                if let Some(sleeper) = sleeper {
                    wakes.queue(sleeper);
                }
            }
        }
        if !wakes.is_empty() {
            any = true;
            wakes.run();
        }
        any
    }
}

/// Wakes all threads, of any process, that sleep on the CQ with `record`.
pub fn wake(record: &DmaMemory) {
    // The futex may lie in memory of another process. A failure harms that memory's owner only.
    let _ = futex::wake(record.word32(ARMED), futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
