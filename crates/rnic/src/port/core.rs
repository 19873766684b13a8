//! What every port has around the engine: verbs with what a port must remember of them, and events
//! turned into wake-ups.

use rustix::thread::futex;

use super::control::{Reply, Verb};
use super::error::Error;
use crate::engine::Engine;
use crate::ids::{Cqn, FunctionId};
use crate::memory::DmaMemory;
use crate::verbs::{Event, Limits};

/// Offset, in a CQ's record, of the word that says that somebody sleeps on it.
pub const ARMED: usize = 4;

/// An engine with its CQs' records.
pub(super) struct Core {
    pub engine: Engine,
    /// By CQ number: where the sleepers of a CQ sleep.
    records: Vec<Option<(FunctionId, DmaMemory)>>,
}

impl Core {
    pub fn new(limits: Limits) -> Self {
        Self { engine: Engine::new(limits), records: Vec::new() }
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
        if let Reply::Cq(cqn) = reply {
            if self.records.len() <= cqn.index() {
                self.records.resize(cqn.index() + 1, None);
            }
            self.records[cqn.index()] = record.map(|r| (f, r));
        }
        if let Some(cqn) = destroyed {
            self.records[cqn.index()] = None;
        }
        Ok(reply)
    }

    /// Removes a function with all that it has.
    pub fn remove_function(&mut self, f: FunctionId) {
        self.engine.remove_function(f);
        for slot in &mut self.records {
            if slot.as_ref().is_some_and(|(owner, _)| *owner == f) {
                *slot = None;
            }
        }
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
fn wake_sleepers(records: &[Option<(FunctionId, DmaMemory)>], cqn: Cqn) {
    if let Some(Some((_, record))) = records.get(cqn.index()) {
        wake(record);
    }
}

/// Wakes all who sleep on the CQ with `record`, in whatever process.
pub fn wake(record: &DmaMemory) {
    // A futex in a client's memory: what can fail here is the client's loss.
    let _ = futex::wake(record.word32(ARMED), futex::Flags::empty(), i32::MAX as u32);
}
