//! Telling compute nodes that there is no memory, and that there is again (OneSidedMW §4.3).

use fabric::direct::DirectNic;
use fabric::{Completion, CompletionQueue, CqAttr, Op, QueuePair, Remote, WorkRequest};

use crate::Error;
use crate::scheme::bulletin;

/// Building blocks of the send queues that bulletins are written from.
pub const BULLETIN_BLOCKS: u32 = 16;

/// What compute nodes were told last.
pub struct Notice<N: DirectNic> {
    /// What is written to bulletins completes here.
    pub written: N::Cq,
    empty: bool,
    generation: u32,
}

impl<N: DirectNic> Notice<N> {
    /// They were told nothing, which is that there is memory.
    pub fn new(nic: &N, clients_max: u32) -> Result<Self, Error> {
        let entries = clients_max * BULLETIN_BLOCKS;
        let written = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        Ok(Self { written, empty: false, generation: 0 })
    }

    /// True while compute nodes think that there is no memory.
    pub fn is_watching(&self) -> bool {
        self.empty
    }

    /// True if they are to be told something else than last time; then they are, one after the other,
    /// with [`Notice::tell`].
    pub fn changes(&mut self, empty: bool) -> bool {
        if self.empty == empty {
            return false;
        }
        self.empty = empty;
        self.generation = self.generation.wrapping_add(1);
        while self.written.poll(&mut [Completion::EMPTY; 16]) > 0 {}
        true
    }

    /// Writes the present state to a compute node's bulletin, over one of its access QPs.
    pub fn tell(&self, qp: &N::Qp, to: Remote) {
        let state = if self.empty { bulletin::EMPTY } else { bulletin::AVAILABLE };
        let text = ((state as u64) << 32 | self.generation as u64).to_be_bytes();
        let op = Op::WriteInline { to, data: &text };
        // One that cannot be told has broken this QP; it asks before it waits.
        let _ = qp.post_send(&[WorkRequest { id: 0, op, signaled: true }]);
    }
}
