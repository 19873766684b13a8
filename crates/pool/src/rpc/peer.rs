//! What the memory node has for one compute node: its QPs, and how it is answered.

use fabric::{
    Completion, CompletionQueue, Error as VerbsError, Key, MemoryRegion, Nic, Op, QpChange, Qpn,
    QueuePair, ReceiveRequest, Remote, Status, WorkRequest,
};

use super::{Outcome, REQUEST_BYTES, Reply};
use crate::Error;
use crate::scheme::bulletin;

/// A compute node.
pub struct Peer<N: Nic> {
    /// The PD of its QPs.
    pub pd: N::Pd,
    /// Its requests come in here, replies and bulletins go out.
    pub management: N::Qp,
    /// The compute node's side of it.
    pub management_peer: Qpn,
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
    /// Its bulletin says "empty".
    pub told_empty: bool,
    /// Its management QP does not answer.
    pub broken: bool,
    /// It has gone, and these chunks are still to be taken back.
    pub leaving: Option<Vec<u32>>,
}

/// An access QP.
pub struct Path<N: Nic> {
    /// The memory node's side.
    pub qp: N::Qp,
    /// The compute node's side.
    pub peer: Qpn,
}

impl<N: Nic> Peer<N> {
    /// Connects the management QP, for the first time or anew, and takes requests.
    pub fn connect_management(&mut self, credits: u32) -> Result<(), Error> {
        self.management.connect(self.management_peer)?;
        while self.replies.poll(&mut [Completion::EMPTY; 16]) > 0 {}
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
        if self.broken {
            return;
        }
        if reply.outcome == Outcome::Empty {
            self.tell_empty();
        }
        self.post(Op::SendInline { data: &reply.to_bytes() });
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

    /// Writes the bulletin, if there is one.
    pub fn post_bulletin(&mut self, state: u32) {
        if self.bulletin.rkey == Key::default() {
            return;
        }
        self.generation = self.generation.wrapping_add(1);
        let mut data = [0; bulletin::BYTES];
        data[..4].copy_from_slice(&state.to_be_bytes());
        data[4..].copy_from_slice(&self.generation.to_be_bytes());
        self.post(Op::WriteInline { to: self.bulletin, data: &data });
    }

    fn post(&mut self, op: Op<'_>) {
        let mut done = [Completion::EMPTY; 16];
        loop {
            let n = self.replies.poll(&mut done);
            if done[..n].iter().any(|c| c.status != Status::Success) {
                self.broken = true;
            }
            if n < done.len() {
                break;
            }
        }
        match self.management.post_send(&[WorkRequest { id: 0, op, signaled: true }]) {
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
