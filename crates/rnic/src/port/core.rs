//! What every port has around the engine: verbs with what a port must remember of them, and events
//! turned into wake-ups.

use std::collections::HashMap;
use std::sync::Arc;

use rustix::thread::futex;

use super::control::{Reply, Verb};
use super::error::Error;
use super::events::{EventQueues, EventWord};
use super::wakes::{Environment, Sleeper, Wakes};
use crate::engine::Engine;
use crate::ids::{Cqn, FunctionId};
use crate::memory::DmaMemory;
use crate::verbs::{Event, Limits};

/// Offset, in a CQ's record, of the word that says that somebody sleeps on it.
pub const ARMED: usize = 4;

/// An engine with its CQs' records.
pub(super) struct Core {
    pub engine: Engine,
    /// The word of each CQ's record that threads sleep on.
    sleepers: HashMap<Cqn, Arc<Sleeper>>,
    /// Wake-ups to be made.
    pub wakes: Wakes,
    /// Asynchronous events.
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

    /// Wakes the threads that sleep on `word` for asynchronous events of `function`.
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
            // The verb has checked the record.
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

    /// Removes a function with all that it has.
    pub fn remove_function(&mut self, f: FunctionId) {
        self.engine.remove_function(f);
        self.sleepers.retain(|_, sleeper| sleeper.function != f);
        // So that none of its events comes later.
        self.deliver_events();
        self.events.remove(f);
        self.wakes.remove(f);
    }

    /// Wakes the threads that sleep on the CQs that the engine reports. True if there was work; more
    /// may be left then.
    #[inline]
    pub fn deliver_events(&mut self) -> bool {
        let Self { engine, sleepers, wakes, events } = self;
        let mut any = false;
        for event in engine.take_events() {
            any = true;
            let sleeper = match event {
                // The CQ may have ended since.
                Event::Completion(cqn) => sleepers.get(&cqn),
                Event::Async { function, event } => events.push(function, event),
            };
            if let Some(sleeper) = sleeper {
                wakes.queue(sleeper);
            }
        }
        if !wakes.is_empty() {
            any = true;
            wakes.run();
        }
        any
    }
}

/// Wakes all threads that sleep on the CQ with `record`, in whatever process.
pub fn wake(record: &DmaMemory) {
    // A futex in memory that another process may share: a failure costs the owner of that memory.
    let _ = futex::wake(record.word32(ARMED), futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
