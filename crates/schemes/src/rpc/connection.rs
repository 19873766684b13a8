//! State of one compute node at the memory node: its QPs, and replies and bulletins to it.

use std::collections::BTreeSet;

use scheme::client_table::{AccessQps, ClientEntry, PeerQp};
use scheme::index::{EntryId, IndexRange, Slot};
use scheme::{Error, Start, bulletin};
use verbs::{
    Completion, CompletionQueue, Error as VerbsError, Key, MemoryRegion, Nic, Op, QpChange,
    QueuePair, ReceiveRequest, Remote, Status, WorkRequest,
};

use super::{Outcome, REQUEST_BYTES, Reply};

/// Work-request ID of a reply without a grant: greater than every entry.
const NO_GRANT: u64 = u32::MAX as u64;
/// Work-request ID of a bulletin.
const BULLETIN: u64 = NO_GRANT - 1;
/// Maximum number of bulletin writes in flight.
const BULLETINS: u32 = 2;

/// A compute node, as the memory node sees it.
pub struct Connection<N: Nic> {
    /// PD of its QPs.
    pub pd: N::Pd,
    /// The QP for its requests, and for replies and bulletins to it.
    pub management: PeerQp<N>,
    /// Number of resets of the management QP. Completions of an earlier epoch are stale.
    pub epoch: u32,
    /// CQ for the completions of replies and bulletins.
    pub replies: N::Cq,
    /// Receive buffers, one per request in flight.
    pub inbox: N::Mr,
    /// Its access QPs, by group and lane.
    pub access: AccessQps<N>,
    /// Address of its bulletin; key 0: none.
    pub bulletin: Remote,
    /// Number of changes of the bulletin.
    pub generation: u32,
    /// Bulletin writes in flight.
    pub bulletins: u32,
    /// True if its bulletin says "empty".
    pub announced_empty: bool,
    /// True if its management QP has failed.
    pub broken: bool,
    /// Chunks granted in replies whose delivery is not confirmed yet.
    pub unconfirmed: BTreeSet<EntryId>,
    /// Chunks granted in replies that were not delivered; to be taken back.
    pub lost: Vec<EntryId>,
    /// Chunks still to be reclaimed, if the compute node has departed.
    pub leaving: Option<Vec<EntryId>>,
}

impl<N: Nic> Connection<N> {
    /// Connects the management QP, for the first time or again, and posts its receives.
    pub fn connect_management(&mut self, credits: u32) -> Result<(), Error> {
        // Replies that are unconfirmed by now were not delivered.
        self.poll_replies();
        self.lost.extend(std::mem::take(&mut self.unconfirmed));
        self.management.connect()?;
        while self.replies.poll(&mut [Completion::EMPTY; 16]) > 0 {}
        self.bulletins = 0;
        self.broken = false;
        self.announced_empty = false;
        for slot in (Slot::new(0)..Slot::new(credits)).iter() {
            self.post_receive(slot)?;
        }
        Ok(())
    }

    fn post_receive(&self, slot: Slot) -> Result<(), Error> {
        let to = self.inbox.sge(slot.offset(REQUEST_BYTES), REQUEST_BYTES as u32);
        let id = (self.epoch as u64) << 32 | u64::from(slot.raw());
        Ok(self.management.qp.post_recv(&ReceiveRequest { id, to: &[to] })?)
    }

    /// Sends a reply and reposts the receive of that slot. An error affects only this compute node:
    /// it puts the management QP into the error state.
    pub fn answer(&mut self, slot: Slot, reply: Reply) {
        let granted = (reply.outcome == Outcome::Done && reply.lanes > 0).then_some(reply.entry);
        self.unconfirmed.extend(granted);
        if self.broken {
            return;
        }
        if reply.outcome == Outcome::Empty {
            self.announce_empty();
        }
        let id = granted.map_or(NO_GRANT, |entry| entry.raw().into());
        self.post(id, Op::SendInline { data: &reply.to_bytes() });
        if self.post_receive(slot).is_err() {
            self.disconnect();
        }
    }

    /// Writes "empty" to the bulletin, unless the bulletin has that state already.
    pub fn announce_empty(&mut self) {
        if !self.announced_empty && !self.broken {
            self.announced_empty = true;
            self.post_bulletin(bulletin::EMPTY);
        }
    }

    /// Writes the bulletin, if the compute node has one. Skips the write while earlier ones are in
    /// flight, so that the send queue has room for replies. No wake-up is lost, because the compute
    /// node asks the memory node before it waits.
    pub fn post_bulletin(&mut self, state: u32) {
        self.poll_replies();
        if self.bulletin.rkey == Key::default() || self.bulletins == BULLETINS {
            return;
        }
        self.bulletins += 1;
        self.generation = self.generation.wrapping_add(1);
        let mut data = [0; bulletin::BYTES];
        data[..4].copy_from_slice(&state.to_be_bytes());
        data[4..].copy_from_slice(&self.generation.to_be_bytes());
        self.post(BULLETIN, Op::WriteInline { to: self.bulletin, data: &data });
    }

    /// Processes the completions of replies and bulletins.
    pub fn poll_replies(&mut self) {
        let mut done = [Completion::EMPTY; 16];
        loop {
            let n = self.replies.poll(&mut done);
            for c in &done[..n] {
                self.bulletins -= (c.id == BULLETIN && self.bulletins > 0) as u32;
                match c.status {
                    Status::Success => drop(self.unconfirmed.remove(&EntryId::new(c.id as u32))),
                    _ => self.broken = true,
                }
            }
            if n < done.len() {
                break;
            }
        }
    }

    fn post(&mut self, id: u64, op: Op<'_>) {
        self.poll_replies();
        match self.management.qp.post_send(&[WorkRequest { id, op, signaled: true }]) {
            Ok(()) => {}
            // The compute node has not posted receives for its replies.
            Err(VerbsError::QueueFull { .. }) => self.disconnect(),
            Err(_) => self.broken = true,
        }
    }

    fn disconnect(&mut self) {
        self.broken = true;
        // If this fails, the NIC has exited, and no QP works any more.
        let _ = self.management.qp.modify(QpChange::Error);
    }
}

impl<N: Nic> ClientEntry for Connection<N> {
    type Nic = N;

    fn access(&self) -> &AccessQps<N> {
        &self.access
    }

    fn access_mut(&mut self) -> &mut AccessQps<N> {
        &mut self.access
    }

    fn set_management_start(&mut self, start: Start) {
        self.management.set_start(start);
    }

    fn is_open(&self) -> Result<bool, Error> {
        Ok(!self.broken && self.management.is_ready()?)
    }

    fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }
}
