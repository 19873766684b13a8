//! What the memory node has for one compute node: its QPs, and how it is answered.

use std::collections::BTreeSet;

use fabric::{
    Completion, CompletionQueue, Error as VerbsError, Key, MemoryRegion, Nic, Op, PeerAddress,
    QpChange, QueuePair, ReceiveRequest, Remote, Status, WorkRequest,
};

use super::{Outcome, REQUEST_BYTES, Reply};
use crate::Error;
use crate::scheme::bulletin;

/// Id of what grants nothing: beyond all entries.
const NO_GRANT: u64 = u32::MAX as u64;
/// Id of the work request of a bulletin.
const BULLETIN: u64 = NO_GRANT - 1;
/// Changes of a bulletin that may be on their way.
const BULLETINS: u32 = 2;

/// A compute node.
pub struct Peer<N: Nic> {
    /// The PD of its QPs.
    pub pd: N::Pd,
    /// Its requests come in here, replies and bulletins go out.
    pub management: N::Qp,
    /// The compute node's side of it.
    pub management_peer: PeerAddress,
    /// Counts the resets of the management QP: completions from before the last one are stale.
    pub epoch: u32,
    /// Where what goes out completes.
    pub replies: N::Cq,
    /// A place for each request.
    pub inbox: N::Mr,
    /// Its access QPs, by group and lane.
    pub groups: Vec<Vec<Path<N>>>,
    /// Its bulletin; key 0: it has none.
    pub bulletin: Remote,
    /// Changes of the bulletin.
    pub generation: u32,
    /// Changes of the bulletin that are on their way.
    pub bulletins: u32,
    /// Its bulletin says "empty".
    pub told_empty: bool,
    /// Its management QP does not answer.
    pub broken: bool,
    /// Chunks that were granted in replies of which it is not known that they arrived.
    pub unheard: BTreeSet<u32>,
    /// Chunks that were granted in replies that did not arrive: they are to be taken back.
    pub lost: Vec<u32>,
    /// It has gone, and these chunks are still to be taken back.
    pub leaving: Option<Vec<u32>>,
}

/// An access QP.
pub struct Path<N: Nic> {
    /// The memory node's side.
    pub qp: N::Qp,
    /// The compute node's side.
    pub peer: PeerAddress,
}

impl<N: Nic> Peer<N> {
    /// Connects the management QP, for the first time or anew, and takes requests.
    pub fn connect_management(&mut self, credits: u32) -> Result<(), Error> {
        // What has not arrived by now never will.
        self.hear();
        self.lost.extend(std::mem::take(&mut self.unheard));
        self.management.connect(self.management_peer)?;
        while self.replies.poll(&mut [Completion::EMPTY; 16]) > 0 {}
        self.bulletins = 0;
        self.broken = false;
        self.told_empty = false;
        for slot in 0..credits {
            self.post_receive(slot)?;
        }
        Ok(())
    }

    fn post_receive(&self, slot: u32) -> Result<(), Error> {
        let to = self.inbox.sge(slot as usize * REQUEST_BYTES, REQUEST_BYTES as u32);
        let id = (self.epoch as u64) << 32 | slot as u64;
        Ok(self.management.post_recv(&ReceiveRequest { id, to: &[to] })?)
    }

    /// Sends a reply and takes the next request into the same place. What goes wrong here is
    /// between this compute node and its management QP, and ends with that.
    pub fn answer(&mut self, slot: u32, reply: Reply) {
        let granted = (reply.outcome == Outcome::Done && reply.lanes > 0).then_some(reply.entry);
        self.unheard.extend(granted);
        if self.broken {
            return;
        }
        if reply.outcome == Outcome::Empty {
            self.tell_empty();
        }
        let id = granted.map_or(NO_GRANT, |entry| entry as u64);
        self.post(id, Op::SendInline { data: &reply.to_bytes() });
        if self.post_receive(slot).is_err() {
            self.break_off();
        }
    }

    /// Says on the bulletin that there is no memory, once.
    pub fn tell_empty(&mut self) {
        if !self.told_empty && !self.broken {
            self.told_empty = true;
            self.post_bulletin(bulletin::EMPTY);
        }
    }

    /// Writes the bulletin, if there is one. Of a compute node that does not answer for a while some are
    /// left out, so that there is room for its replies: it asks before it waits.
    pub fn post_bulletin(&mut self, state: u32) {
        self.hear();
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

    /// Takes note of what has arrived, and of what has not.
    pub fn hear(&mut self) {
        let mut done = [Completion::EMPTY; 16];
        loop {
            let n = self.replies.poll(&mut done);
            for c in &done[..n] {
                self.bulletins -= (c.id == BULLETIN && self.bulletins > 0) as u32;
                match c.status {
                    Status::Success => drop(self.unheard.remove(&(c.id as u32))),
                    _ => self.broken = true,
                }
            }
            if n < done.len() {
                break;
            }
        }
    }

    fn post(&mut self, id: u64, op: Op<'_>) {
        self.hear();
        match self.management.post_send(&[WorkRequest { id, op, signaled: true }]) {
            Ok(()) => {}
            // It does not take the replies that it asked for.
            Err(VerbsError::QueueFull { .. }) => self.break_off(),
            Err(_) => self.broken = true,
        }
    }

    fn break_off(&mut self) {
        self.broken = true;
        // If even that fails, the NIC is gone, and with it everybody's QPs.
        let _ = self.management.modify(QpChange::Error);
    }
}
