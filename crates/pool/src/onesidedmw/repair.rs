//! What the CPU does when a chain stopped, or a management connection is closed.
//!
//! - A free that is refused stops its worker before anything was changed. That request is answered
//!   with "refused", those behind it with "again", and the chain is written anew. Who has many refused
//!   waits for that ([`Settings::paced`](crate::Settings::paced)), alone.
//! - A worker that stopped elsewhere has something in hand; no compute node can bring that about, but
//!   if it happens, what is in hand goes back, and the compute node's management is closed.
//! - A management connection that is closed leaves nothing behind: what is in flight is executed to
//!   its end, and grants that were not delivered are taken back.

use std::time::Duration;

use fabric::direct::{DirectNic, DirectQp};
use fabric::{MemoryRegion, QpState, QueuePair};

use super::connection::{Connection, Management};
use super::in_flight::{Hand, undelivered};
use super::layout::{entry, reply, status};
use super::node::Node;
use super::program::{REPLY_BLOCKS, STAGING_BYTES};
use super::{alloc_chain, free_chain};
use crate::Error;
use crate::chain::direction::Direction;
use crate::chain::reclaimer::{Task, Urgency};
use crate::scheme::ClientId;

impl<N: DirectNic> Node<N> {
    /// Sees to the workers that stopped; true if any did.
    pub(super) fn see_to_stopped(&mut self) -> Result<bool, Error> {
        let mut stopped = std::mem::take(&mut self.stopped);
        let any = !stopped.is_empty();
        stopped.append(&mut self.later);
        for client in stopped {
            // It may have left, or been re-established meanwhile.
            let Some(mut c) = self.clients.remove(&client) else { continue };
            let result = self.see_to(client, &mut c);
            self.clients.insert(client, c);
            result?;
        }
        Ok(any)
    }

    fn see_to(&mut self, client: ClientId, c: &mut Connection<N>) -> Result<(), Error> {
        if c.management != Management::Open || c.directions().all(|d| d.stopped.is_none()) {
            return Ok(());
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
                        if !self.later.contains(&client) {
                            self.later.push(client);
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
        c.tell = true;
        self.close(client, c)
    }

    /// How long it is until the next free chain is to be repaired.
    pub(super) fn next_repair(&self) -> Option<Duration> {
        let now = self.nic.now();
        let wait = |client| self.clients.get(client)?.repairs.wait(now);
        self.later.iter().map(|client| wait(client).unwrap_or_default()).min()
    }

    fn free_stop(&self, d: &Direction<N>, at: u16) -> free_chain::Stopped {
        let (entries, credits) = (d.worker.send_ring().entries, self.settings.credits);
        let staging = (d.staging.memory(), d.first);
        free_chain::stopped_at(&self.memory, entries, at, credits, staging)
    }

    /// The worker of a free chain has refused the request of `position`: answers what is in flight
    /// and writes the chain anew. Gives how many requests it answered.
    ///
    /// No request can come in meanwhile: the receive queue's limit is set back, and moves on only
    /// with the replies that are sent here.
    fn repair_free(&mut self, d: &mut Direction<N>, position: u32) -> Result<u32, Error> {
        let credits = self.settings.credits;
        let taken = d.front.progress()?.recv_consumer;
        d.front.enable_recv(taken)?;
        // Receive indices have 16 bits and are met modulo that only: one lap more keeps the
        // subtractions below from wrapping.
        let received = (d.front.progress()?.recv_consumer & 0xffff) + (1 << 16);
        // The request that stopped the chain: the last one at this position that has come in.
        let at = (d.first + position) % credits;
        let failed = received - 1 - (received - 1).wrapping_sub(at) % credits;
        d.count = self.nic.cq_count(&d.requests)?;
        d.first = received;
        for request in failed..received {
            let answer = if request == failed { status::REFUSED } else { status::AGAIN };
            let slot = (request % credits * STAGING_BYTES) as usize;
            let at = slot + entry::FREE_REPLY + reply::FREE_STATUS;
            d.staging.memory().store_be32(at, answer as u32);
        }
        self.arm_free(d)?;
        d.front.enable_send((REPLY_BLOCKS * received) as u16)?;
        Ok(received - failed)
    }

    /// Closes a compute node's management connection: [`Node::bring_to_rest`] sees to the rest.
    pub(super) fn close(&mut self, client: ClientId, c: &mut Connection<N>) -> Result<(), Error> {
        c.close()?;
        if c.management == Management::Closing {
            self.closing.insert(client);
        }
        Ok(())
    }

    /// Re-establishes a management connection, once nothing of it is in flight any more; its numbers.
    pub(super) fn reestablish(
        &mut self,
        client: ClientId,
        c: &mut Connection<N>,
    ) -> Result<Option<Vec<u32>>, Error> {
        self.close(client, c)?;
        c.tell = false; // it knows
        if c.management == Management::Closing {
            if !self.take_in_flight(client, c)? {
                return Ok(None);
            }
            self.closing.remove(&client);
            c.management = Management::Closed;
        }
        let push = self.push();
        self.reclaimer.post(&self.memory, push)?;
        if self.is_owing(c)? {
            return Ok(None);
        }
        self.check_suspension(client, c)?;
        self.open(c)?;
        Ok(Some(c.management_qpns()))
    }

    /// Looks after the connections that are being closed; true if one got there.
    pub(super) fn bring_to_rest(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for client in self.closing.clone() {
            let Some(mut c) = self.clients.remove(&client) else {
                self.closing.remove(&client);
                continue;
            };
            let result = self.take_in_flight(client, &mut c);
            if let Ok(true) = result {
                c.management = Management::Closed;
                self.closing.remove(&client);
                any = true;
                if std::mem::take(&mut c.tell) {
                    // Whoever cannot be told has left.
                    let _ = self.break_peer(&c);
                }
            }
            self.clients.insert(client, c);
            result?;
        }
        Ok(any)
    }

    /// Takes back what the chains of a closed connection have in flight, if they are at rest.
    fn take_in_flight(&mut self, client: ClientId, c: &mut Connection<N>) -> Result<bool, Error> {
        if !self.are_at_rest(c)? {
            return Ok(false);
        }
        c.owed = self.empty_hands(c, Urgency::Now)?;
        let who = (self.settings.credits, client.0 as u64);
        for d in &c.allocs {
            for entry in undelivered(&self.nic, &self.memory, d, who)? {
                self.memory.disown(entry);
                self.reclaimer.add(Task::Release(entry), Urgency::Now);
                c.owed.push(entry);
            }
        }
        Ok(true)
    }

    /// True if a compute node's free chain could still free what is being taken back from it: the
    /// guard is bound.
    pub(super) fn is_owing(&self, c: &mut Connection<N>) -> Result<bool, Error> {
        let guard_of = c.free.worker.qpn();
        while let Some(&entry) = c.owed.last() {
            let guard = self.memory.window_keys(entry).next().expect("a group has a guard");
            if self.nic.query_key(guard)?.bound_to == Some(guard_of) {
                return Ok(true);
            }
            c.owed.pop();
        }
        Ok(false)
    }

    /// True if nothing is in flight: no request comes in, and the workers have done what did.
    pub(super) fn are_at_rest(&self, c: &Connection<N>) -> Result<bool, Error> {
        for d in c.directions() {
            if !d.is_at_rest(&self.nic, None)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Puts back what workers that stopped have in hand; the entries among it.
    pub(super) fn empty_hands(
        &mut self,
        c: &Connection<N>,
        urgency: Urgency,
    ) -> Result<Vec<u32>, Error> {
        let credits = self.settings.credits;
        let mut hands: Vec<Hand> = Vec::new();
        for d in &c.allocs {
            if let Some(at) = d.stopped {
                let ring = d.worker.send_ring();
                hands.push(alloc_chain::in_hand(&self.memory, &ring, at, credits));
            }
        }
        if let Some(at) = c.free.stopped {
            hands.push(self.free_stop(&c.free, at).hand);
        }
        let mut entries = Vec::new();
        for hand in hands {
            if let Some(entry) = hand.entry {
                self.take_up(entry)?;
                self.reclaimer.add(Task::Release(entry), urgency);
                entries.push(entry);
            }
            (0..hand.permits).for_each(|_| self.reclaimer.add(Task::Permit, urgency));
            (0..hand.receives).for_each(|_| self.reclaimer.add(Task::Receive, urgency));
        }
        Ok(entries)
    }

    /// Takes an entry that a chain left half bound or half unbound: nobody owns it any more, and the
    /// table has the tags that the NIC has.
    fn take_up(&self, i: u32) -> Result<(), Error> {
        self.memory.disown(i);
        for (j, key) in self.memory.window_keys(i).enumerate() {
            let now = self.nic.query_key(key)?.key;
            self.memory.set_tag(i, j, now.tag());
        }
        Ok(())
    }
}
