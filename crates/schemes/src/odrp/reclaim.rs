//! The end of connections: workers that stopped, and the pages of departed clients.

use scheme::Error;
use verbs::direct::DirectNic;
use verbs::{Completion, CompletionQueue, MemoryRegion, QueuePair, Status};

use super::connection::{Stage, break_peer};
use super::node::Node;
use super::table;
use crate::chain::reclaimer::{Task, Urgency, WAITING};

/// Rows of a table that one call scans.
const SCAN: u64 = 1 << 13;

impl<N: DirectNic> Node<N> {
    /// Drains the fault CQ: completed batches of the reclaimer, and workers that stopped. Returns
    /// true if it processed any.
    pub(super) fn poll_faults(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut some = [Completion::EMPTY; 16];
        loop {
            let n = self.faults.poll(&mut some);
            if n == 0 {
                return Ok(any);
            }
            for c in &some[..n] {
                if c.qpn == self.reclaimer.qpn() {
                    self.reclaimer.completed(c)?;
                    any = true;
                } else if c.status != Status::Success {
                    any |= self.record_stop(c)?;
                }
            }
        }
    }

    /// Handles the first error completion of a worker, whose client sent an invalid page number.
    /// Closes the client's connection.
    fn record_stop(&mut self, fault: &Completion) -> Result<bool, Error> {
        let client = self.workers.get(&fault.qpn);
        let Some(c) = client.and_then(|client| self.clients.get_mut(client)) else {
            return Ok(false);
        };
        let d = match c.reads.worker.qpn() == fault.qpn {
            true => &mut c.reads,
            false => &mut c.writes,
        };
        if d.stopped.is_some() {
            return Ok(false);
        }
        d.stopped = Some(fault.id as u16);
        if c.stage == Stage::Open {
            c.close()?;
            c.stage = Stage::Closing;
            c.notify = true;
            self.refused += 1;
        }
        Ok(true)
    }

    /// Advances the connections that are being closed or reclaimed. Returns true if any advanced.
    pub(super) fn advance_reclamation(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut retired = Vec::new();
        for (&client, c) in self.clients.iter_mut() {
            any |= match c.stage {
                Stage::Open | Stage::Closed => false,
                Stage::Closing | Stage::Settling if !c.is_at_rest(&self.nic)? => false,
                Stage::Closing => {
                    let page = c.stop(&self.memory, self.settings.credits)?;
                    self.reclaimer.take(page.map(Task::Release), Urgency::Now);
                    c.stage = Stage::Closed;
                    if std::mem::take(&mut c.notify) {
                        c.queues().into_iter().try_for_each(break_peer)?;
                    }
                    true
                }
                Stage::Settling => {
                    let page = c.stop(&self.memory, self.settings.credits)?;
                    self.reclaimer.take(page.map(Task::Release), Urgency::InTurn);
                    c.stage = Stage::Scanning(0);
                    true
                }
                // The completion of a batch triggers the next call.
                Stage::Scanning(_) if self.reclaimer.waiting() >= WAITING => false,
                Stage::Scanning(from) => {
                    let numbers = self.memory.shape.chunks as u64;
                    let to = numbers.min(from + SCAN);
                    let rows = c.rows.memory();
                    let mapped = |n| table::page_of(&self.memory, rows, n);
                    for page in (from..to).filter_map(mapped) {
                        self.reclaimer.add(Task::Release(page), Urgency::InTurn);
                    }
                    c.stage = match to == numbers {
                        true => Stage::Releasing(self.reclaimer.ticket()),
                        false => Stage::Scanning(to),
                    };
                    true
                }
                Stage::Releasing(ticket) => {
                    let done = self.reclaimer.is_done(ticket);
                    if done {
                        retired.push(client);
                    }
                    done
                }
            };
        }
        for client in retired {
            if let Some(c) = self.clients.remove(&client) {
                for d in c.queues() {
                    self.workers.remove(&d.worker.qpn());
                }
            }
        }
        let push = self.push();
        Ok(self.reclaimer.post(&self.memory, push)? || any)
    }
}
