//! Reclaims the chunks of departed clients (OneSidedMW §4.3, "handling crashed CNs").
//!
//! ```text
//! retire: reset the front QPs, set the access QPs to Error ──> the chains come to rest
//!   ──> scan owner_id of all entries, in batches ──> for each chunk: invalidate keys, clear,
//!   push to the queue
//! ```

use scheme::index::EntryId;
use scheme::{ClientId, Error};
use verbs::QueuePair;
use verbs::direct::DirectNic;

use super::connection::Connection;
use super::node::Node;
use crate::chain::reclaimer::{Task, Urgency, WAITING};

/// Entries whose owner one call checks.
const SCAN: u32 = 1 << 15;

/// A departed client whose chunks are being reclaimed.
pub(super) struct Leaving<N: DirectNic> {
    connection: Connection<N>,
    stage: Stage,
}

enum Stage {
    /// The client's chains still run.
    Settling,
    /// The entries below this one have been scanned.
    Scanning(EntryId),
    /// The reclaimer releases the client's chunks, up to this ticket.
    Releasing(u64),
}

impl<N: DirectNic> Leaving<N> {
    /// The client's connection.
    pub fn connection(&mut self) -> &mut Connection<N> {
        &mut self.connection
    }

    /// True while the chains come to rest, which no event reports: the CPU must poll.
    pub fn is_settling(&self) -> bool {
        matches!(self.stage, Stage::Settling)
    }
}

impl<N: DirectNic> Node<N> {
    /// Ends the requests and accesses of a departed client, and starts reclaiming its chunks.
    pub(super) fn begin_retire(&mut self, client: ClientId) -> Result<(), Error> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        connection.close()?;
        // From here on the client's keys are useless: its windows are bound to QPs in the error
        // state.
        connection.access.shut_down()?;
        self.closing.remove(&client);
        if let Some(connection) = self.clients.remove(&client) {
            self.leaving.insert(client, Leaving { connection, stage: Stage::Settling });
        }
        Ok(())
    }

    /// Advances reclamation of all departed clients; true if any advanced.
    pub(super) fn reclaim_departed(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut leaving = std::mem::take(&mut self.leaving);
        let mut gone = Vec::new();
        let mut result = Ok(());
        for (&client, l) in &mut leaving {
            match self.advance_reclamation(client, l) {
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
                for d in l.connection.queues() {
                    self.workers.remove(&d.worker.qpn());
                }
            }
        }
        self.leaving = leaving;
        result?;
        let push = self.push();
        Ok(self.reclaimer.post(&self.memory, push)? || any)
    }

    /// Advances reclamation of one client by one step. `None`: no progress; `Some(true)`: finished.
    fn advance_reclamation(
        &mut self,
        client: ClientId,
        l: &mut Leaving<N>,
    ) -> Result<Option<bool>, Error> {
        match l.stage {
            Stage::Settling => {
                if !self.are_at_rest(&l.connection)? {
                    return Ok(None);
                }
                self.return_held(&l.connection, Urgency::InTurn)?;
                l.stage = Stage::Scanning(EntryId::new(0));
            }
            Stage::Scanning(from) => {
                if self.reclaimer.waiting() >= WAITING {
                    return Ok(None); // the completion of a batch triggers the next call
                }
                let end = self.memory.shape.null_entry();
                let to = end.min(from.plus(SCAN));
                let mut next = from;
                while next < to && self.reclaimer.waiting() < WAITING {
                    if self.memory.owner(next) == client.0 as u64 {
                        self.memory.disown(next);
                        self.reclaimer.add(Task::Release(next), Urgency::InTurn);
                    }
                    next = next.plus(1);
                }
                l.stage = match next == end {
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
