//! Taking back what a gone compute node owned (OneSidedMW §4.3, "handling crashed CNs").
//!
//! ```text
//! retire: fronts reset, access QPs in Error ──> its chains come to rest ──> owner_id of every entry
//!   is read, a piece at a time ──> each of its chunks: keys dead, cleared, back in the queue
//! ```

use fabric::direct::DirectNic;
use fabric::{QpChange, QueuePair};

use super::connection::Connection;
use super::node::Node;
use crate::Error;
use crate::chain::reclaimer::{Task, Urgency, WAITING};
use crate::scheme::ClientId;

/// Entries whose owner is looked at in one turn.
const SCAN: u32 = 1 << 15;

/// A compute node that has gone.
pub(super) struct Leaving<N: DirectNic> {
    connection: Connection<N>,
    stage: Stage,
}

enum Stage {
    /// Its chains run on.
    Settling,
    /// The entries below this one were looked at.
    Scanning(u32),
    /// What it had is with the reclaimer, up to this ticket.
    Releasing(u64),
}

impl<N: DirectNic> Leaving<N> {
    /// Its connection.
    pub fn connection(&mut self) -> &mut Connection<N> {
        &mut self.connection
    }

    /// True while only time brings it on: its chains come to rest without a word to the CPU.
    pub fn is_settling(&self) -> bool {
        matches!(self.stage, Stage::Settling)
    }
}

impl<N: DirectNic> Node<N> {
    /// A compute node has gone: its requests and accesses end here.
    pub(super) fn begin_retire(&mut self, client: ClientId) -> Result<(), Error> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        connection.close()?;
        // From here on its keys open nothing: its windows are bound to QPs that do not answer.
        for (qp, _) in connection.access.iter().flatten() {
            qp.modify(QpChange::Error)?;
        }
        self.closing.remove(&client);
        if let Some(connection) = self.clients.remove(&client) {
            self.leaving.insert(client, Leaving { connection, stage: Stage::Settling });
        }
        Ok(())
    }

    /// Brings the compute nodes that have gone on; true if that did something.
    pub(super) fn take_back(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut leaving = std::mem::take(&mut self.leaving);
        let mut gone = Vec::new();
        let mut result = Ok(());
        for (&client, l) in &mut leaving {
            match self.bring_on(client, l) {
                Ok(Some(done)) => {
                    any = true;
                    if done {
                        gone.push(client);
                    }
                }
                Ok(None) => {}
                Err(e) => result = Err(e),
            }
        }
        for client in gone {
            if let Some(l) = leaving.remove(&client) {
                for d in l.connection.directions() {
                    self.workers.remove(&d.worker.qpn());
                }
            }
        }
        self.leaving = leaving;
        result?;
        let push = self.push();
        Ok(self.reclaimer.post(&self.memory, push)? || any)
    }

    /// Brings one on: whether it came on, and then, whether it is through.
    fn bring_on(&mut self, client: ClientId, l: &mut Leaving<N>) -> Result<Option<bool>, Error> {
        match l.stage {
            Stage::Settling => {
                if !self.are_at_rest(&l.connection)? {
                    return Ok(None);
                }
                self.empty_hands(&l.connection, Urgency::InTurn)?;
                l.stage = Stage::Scanning(0);
            }
            Stage::Scanning(from) => {
                if self.reclaimer.waiting() >= WAITING {
                    return Ok(None); // the completion of a batch brings the next turn
                }
                let chunks = self.memory.shape.chunks;
                let to = chunks.min(from + SCAN);
                let mut next = from;
                while next < to && self.reclaimer.waiting() < WAITING {
                    if self.memory.owner(next) == client.0 as u64 {
                        self.memory.disown(next);
                        self.reclaimer.add(Task::Release(next), Urgency::InTurn);
                    }
                    next += 1;
                }
                l.stage = match next == chunks {
                    true => Stage::Releasing(self.reclaimer.ticket()),
                    false => Stage::Scanning(next),
                };
            }
            Stage::Releasing(ticket) if self.reclaimer.is_done(ticket) => return Ok(Some(true)),
            Stage::Releasing(_) => return Ok(None),
        }
        Ok(Some(false))
    }
}
