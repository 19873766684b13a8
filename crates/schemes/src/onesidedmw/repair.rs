//! The CPU's work when a chain has stopped, or when a management connection is closed.
//!
//! - A refused free stops its worker before anything is changed. The CPU answers that request with
//!   REFUSED and the requests after it with AGAIN, and rewrites the chain. A client with many
//!   refused frees is rate-limited ([`paced`](scheme::NodeSettings::paced)); no other client
//!   waits.
//! - In scheme `onesidedmw-paper`, an allocation from an empty queue stops its worker. The CPU
//!   answers the requests in flight with EMPTY, and posts the chain again.
//! - A worker that stopped elsewhere holds resources. No client can cause this; if it happens, the
//!   CPU returns the resources and closes the client's management connection.
//! - A closed management connection leaves nothing behind: requests in flight are executed to the
//!   end, and undelivered grants are reclaimed.

use std::time::Duration;

use scheme::index::{EntryId, Slot};
use scheme::{ClientId, Error};
use verbs::direct::{DirectNic, DirectQp};
use verbs::{MemoryRegion, QpState, QueuePair};

use super::connection::{Connection, Management};
use super::in_flight::undelivered;
use super::layout::{entry, reply, status};
use super::node::Node;
use super::program::REPLY_BLOCKS;
use super::program::staging_offset;
use super::{alloc_chain, free_chain, published_chain};
use crate::chain::in_flight::InFlight;
use crate::chain::queues::ChainQueues;
use crate::chain::reclaimer::{Task, Urgency};

impl<N: DirectNic> Node<N> {
    /// Handles the workers that have stopped; true if there were any.
    pub(super) fn handle_stopped(&mut self) -> Result<bool, Error> {
        let mut stopped = std::mem::take(&mut self.stopped);
        let any = !stopped.is_empty();
        stopped.append(&mut self.deferred_repairs);
        for client in stopped {
            // The client may have left, or re-established its connection, in the meantime.
            let Some(mut c) = self.clients.remove(&client) else { continue };
            let result = self.handle_stopped_client(client, &mut c);
            self.clients.insert(client, c);
            result?;
        }
        if std::mem::take(&mut self.found_empty) && self.free_chunks()? <= 0 {
            self.broadcast(true);
        }
        Ok(any)
    }

    fn handle_stopped_client(
        &mut self,
        client: ClientId,
        c: &mut Connection<N>,
    ) -> Result<(), Error> {
        if c.management != Management::Open || c.queues().all(|d| d.stopped.is_none()) {
            return Ok(());
        }
        if self.memory.shape.published
            && let Some(at) = c.allocs[0].stopped
        {
            let stop = published_chain::stopped_at(&self.memory, &c.allocs[0], at);
            if stop.empty {
                self.repair_alloc(c, stop.request)?;
                self.found_empty = true;
                if c.free.stopped.is_none() {
                    return Ok(());
                }
            }
        }
        if c.allocs.iter().all(|d| d.stopped.is_none())
            && let Some(at) = c.free.stopped
        {
            debug_assert_eq!(c.free.worker.state()?, QpState::Error);
            let stop = self.free_stop(&c.free, at);
            if stop.refused {
                if self.settings.paced {
                    let now = self.nic.now();
                    if c.repairs.wait(now).is_some() {
                        if !self.deferred_repairs.contains(&client) {
                            self.deferred_repairs.push(client);
                        }
                        return Ok(());
                    }
                    c.repairs.take(1, now);
                }
                c.meter.refused(self.repair_free(&mut c.free, stop.position)?);
                self.refused += 1;
                return Ok(());
            }
        }
        c.notify = true;
        self.close(client, c)
    }

    /// Answers the requests of a published chain that found the queue empty, and posts their WQEs
    /// again. The head has passed the slots of these requests, and stays.
    ///
    /// No request can arrive in the meantime, as in [`Node::repair_free`].
    fn repair_alloc(&mut self, c: &mut Connection<N>, failed: u64) -> Result<(), Error> {
        let (d, guard) = (&mut c.allocs[0], c.free.worker.qpn());
        let taken = d.front.progress()?.recv_consumer;
        d.front.enable_recv(taken)?;
        let received = (d.front.progress()?.recv_consumer & 0xffff) + (1 << 16);
        let unanswered = received.wrapping_sub(d.first).wrapping_sub(failed as u32) & 0xffff;
        for request in received - unanswered..received {
            let at = staging_offset(Slot::of_request(request, d.credits)) + reply::STATUS;
            d.staging.memory().write(at, &[status::EMPTY]);
        }
        d.count = self.nic.cq_count(&d.requests)?;
        d.first = received;
        self.arm_alloc(d, guard)?;
        d.front.enable_send((published_chain::REPLY_BLOCKS * received) as u16)?;
        Ok(d.front.enable_recv(received + d.credits)?)
    }

    /// Time until the next deferred repair of a free chain.
    pub(super) fn next_repair(&self) -> Option<Duration> {
        let now = self.nic.now();
        let wait = |client| self.clients.get(client)?.repairs.wait(now);
        self.deferred_repairs.iter().map(|client| wait(client).unwrap_or_default()).min()
    }

    fn free_stop(&self, d: &ChainQueues<N>, at: u16) -> free_chain::Stopped {
        let (entries, credits) = (d.worker.send_ring().entries, self.settings.credits);
        let staging = (d.staging.memory(), d.first);
        free_chain::stopped_at(&self.memory, entries, at, credits, staging)
    }

    /// Repairs a free chain whose worker refused the request of `position`: answers the requests in
    /// flight and rewrites the chain. Returns the number of answered requests.
    ///
    /// No request can arrive in the meantime: the receive queue's limit is set back, and advances
    /// only with the replies sent here.
    fn repair_free(&mut self, d: &mut ChainQueues<N>, position: u32) -> Result<u32, Error> {
        let credits = self.settings.credits;
        let taken = d.front.progress()?.recv_consumer;
        d.front.enable_recv(taken)?;
        // Receive indices have 16 bits and wrap. Adding one lap keeps the subtractions below from
        // underflowing.
        let received = (d.front.progress()?.recv_consumer & 0xffff) + (1 << 16);
        // The request that stopped the chain: the last received request of this position.
        let at = (d.first + position) % credits;
        let failed = received - 1 - (received - 1).wrapping_sub(at) % credits;
        d.count = self.nic.cq_count(&d.requests)?;
        d.first = received;
        for request in failed..received {
            let answer = if request == failed { status::REFUSED } else { status::AGAIN };
            let at = staging_offset(Slot::of_request(request, credits));
            let at = at + entry::FREE_REPLY + reply::FREE_STATUS;
            d.staging.memory().store_be32(at, answer as u32);
        }
        self.arm_free(d)?;
        d.front.enable_send((REPLY_BLOCKS * received) as u16)?;
        Ok(received - failed)
    }

    /// Closes a client's management connection; [`Node::complete_closings`] completes the closing.
    pub(super) fn close(&mut self, client: ClientId, c: &mut Connection<N>) -> Result<(), Error> {
        c.close()?;
        if c.management == Management::Closing {
            self.closing.insert(client);
        }
        Ok(())
    }

    /// Re-establishes a management connection once nothing of it is in flight. Returns its QP
    /// numbers, or `None` to retry later.
    pub(super) fn reestablish(
        &mut self,
        client: ClientId,
        c: &mut Connection<N>,
    ) -> Result<Option<Vec<u32>>, Error> {
        self.close(client, c)?;
        c.notify = false; // the client reset its side itself
        if c.management == Management::Closing {
            if !self.reclaim_in_flight(client, c)? {
                return Ok(None);
            }
            self.closing.remove(&client);
            c.management = Management::Closed;
        }
        let push = self.push();
        self.reclaimer.post(&self.memory, push)?;
        if self.has_bound_guards(c)? {
            return Ok(None);
        }
        self.check_suspension(client, c)?;
        self.open(c)?;
        Ok(Some(c.management_qpns()))
    }

    /// Completes the closing of connections that have come to rest; true if any has.
    pub(super) fn complete_closings(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for client in self.closing.clone() {
            let Some(mut c) = self.clients.remove(&client) else {
                self.closing.remove(&client);
                continue;
            };
            let result = self.reclaim_in_flight(client, &mut c);
            if let Ok(true) = result {
                c.management = Management::Closed;
                self.closing.remove(&client);
                any = true;
                if std::mem::take(&mut c.notify) {
                    // An error means that the client has left.
                    let _ = self.break_peer(&c);
                }
            }
            self.clients.insert(client, c);
            result?;
        }
        Ok(any)
    }

    /// Reclaims the resources that a closed connection's chains have in flight. Returns false if
    /// the chains are not at rest.
    fn reclaim_in_flight(
        &mut self,
        client: ClientId,
        c: &mut Connection<N>,
    ) -> Result<bool, Error> {
        if !self.are_at_rest(c)? {
            return Ok(false);
        }
        c.reclaiming = self.return_held(c, Urgency::Now)?;
        for d in &c.allocs {
            for entry in undelivered(&self.nic, &self.memory, d, client.0.into())? {
                self.memory.disown(entry);
                self.reclaimer.add(Task::Release(entry), Urgency::Now);
                c.reclaiming.push(entry);
            }
        }
        Ok(true)
    }

    /// True if the client's free chain could still free an entry that is being reclaimed from it,
    /// because the entry's guard is still bound to that chain's worker.
    pub(super) fn has_bound_guards(&self, c: &mut Connection<N>) -> Result<bool, Error> {
        let guard_of = c.free.worker.qpn();
        while let Some(&entry) = c.reclaiming.last() {
            let guard = self.memory.window_keys(entry).next().expect("a group has a guard");
            if self.nic.query_key(guard)?.bound_to() == Some(guard_of) {
                return Ok(true);
            }
            c.reclaiming.pop();
        }
        Ok(false)
    }

    /// True if nothing is in flight: no request arrives, and the workers have executed all requests
    /// received.
    pub(super) fn are_at_rest(&self, c: &Connection<N>) -> Result<bool, Error> {
        for d in c.queues() {
            if !d.is_at_rest(&self.nic, None)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the resources that stopped workers hold. Gives the entries among them.
    pub(super) fn return_held(
        &mut self,
        c: &Connection<N>,
        urgency: Urgency,
    ) -> Result<Vec<EntryId>, Error> {
        let mut held: Vec<InFlight> = Vec::new();
        for d in &c.allocs {
            if let Some(at) = d.stopped {
                let ring = d.worker.send_ring();
                held.push(match self.memory.shape.published {
                    true => published_chain::held_resources(&self.memory, &ring, at),
                    false => alloc_chain::held_resources(&self.memory, &ring, at, d.credits),
                });
            }
        }
        if let Some(at) = c.free.stopped {
            held.push(self.free_stop(&c.free, at).held);
        }
        let mut entries = Vec::new();
        for held in held {
            if let Some(entry) = held.entry {
                self.prepare_release(entry)?;
                self.reclaimer.add(Task::Release(entry), urgency);
                entries.push(entry);
            }
            (0..held.permits).for_each(|_| self.reclaimer.add(Task::Permit, urgency));
            (0..held.receives).for_each(|_| self.reclaimer.add(Task::Receive, urgency));
        }
        Ok(entries)
    }

    /// Prepares an entry with partly bound windows for its release: clears its owner, and copies
    /// the windows' current tags from the NIC to the table.
    fn prepare_release(&self, i: EntryId) -> Result<(), Error> {
        self.memory.disown(i);
        for (j, key) in self.memory.window_keys(i).enumerate() {
            let tag = self.nic.query_key(key)?.tag;
            self.memory.set_tag(i, j, tag);
        }
        Ok(())
    }
}
