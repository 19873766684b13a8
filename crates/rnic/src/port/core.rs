//! What every port has around the engine: verbs with what a port must remember of them, and events
//! turned into wake-ups.

use std::collections::HashMap;

use rustix::thread::futex;

use super::control::{Reply, Verb};
use super::error::Error;
use crate::engine::Engine;
use crate::ids::{Cqn, FunctionId};
use crate::memory::DmaMemory;
use crate::verbs::{Event, Limits};

/// Offset, in a CQ's record, of the word that says that somebody sleeps on it.
pub const ARMED: usize = 4;

/// By CQ: whose it is, and its record.
type Records = HashMap<Cqn, (FunctionId, DmaMemory)>;

/// An engine with its CQs' records.
pub(super) struct Core {
    pub engine: Engine,
    /// Where the sleepers of a CQ sleep.
    records: Records,
}

impl Core {
    pub fn new(limits: Limits) -> Self {
        Self { engine: Engine::new(limits), records: Records::new() }
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
        let reply = verb.execute(&mut self.engine, f)?;
        if let (Reply::Cq(cqn), Some(record)) = (&reply, record) {
            self.records.insert(*cqn, (f, record));
        }
        if let Some(cqn) = destroyed {
            self.records.remove(&cqn);
        }
        Ok(reply)
    }

    /// Removes a function with all that it has.
    pub fn remove_function(&mut self, f: FunctionId) {
        self.engine.remove_function(f);
        self.records.retain(|_, (owner, _)| *owner != f);
    }

    /// Wakes who sleeps on the CQs that the engine reports. True if it had anything to report.
    #[inline]
    pub fn deliver_events(&mut self) -> bool {
        let Self { engine, records } = self;
        let mut any = false;
        for event in engine.take_events() {
            any = true;
            if let Event::Completion(cqn) = event {
                wake_sleepers(records, cqn);
            }
        }
        any
    }
}

#[cold]
fn wake_sleepers(records: &Records, cqn: Cqn) {
    if let Some((_, record)) = records.get(&cqn) {
        wake(record);
    }
}

/// Wakes all who sleep on the CQ with `record`, in whatever process.
pub fn wake(record: &DmaMemory) {
    // A futex in a client's memory: what can fail here is the client's loss.
    let _ = futex::wake(record.word32(ARMED), futex::Flags::empty(), i32::MAX as u32);
}
