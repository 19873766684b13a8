//! Broadcasts to clients that the memory is exhausted, and that it is available again (OneSidedMW
//! §4.3).

use scheme::{Error, bulletin};
use verbs::{Completion, CompletionQueue, CqAttr, Nic, Op, QueuePair, Remote, WorkRequest};

/// Building blocks of the send queues that bulletins are written from.
pub const BULLETIN_BLOCKS: u32 = 16;

/// The state last broadcast to the clients.
pub struct AvailabilityNotifier<N: Nic> {
    /// Receives the completions of the WRITEs to bulletins.
    pub written: N::Cq,
    empty: bool,
    generation: u32,
}

impl<N: Nic> AvailabilityNotifier<N> {
    /// Starts in the state "available", which clients assume without a broadcast.
    pub fn new(nic: &N, clients_max: u32) -> Result<Self, Error> {
        let entries = clients_max * BULLETIN_BLOCKS;
        let written = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        Ok(Self { written, empty: false, generation: 0 })
    }

    /// Returns true while the broadcast state is "empty".
    pub fn is_watching(&self) -> bool {
        self.empty
    }

    /// Sets the state. Returns true if it changed; then the caller must call
    /// [`AvailabilityNotifier::notify`] for each client.
    pub fn set_empty(&mut self, empty: bool) -> bool {
        if self.empty == empty {
            return false;
        }
        self.empty = empty;
        self.generation = self.generation.wrapping_add(1);
        while self.written.poll(&mut [Completion::EMPTY; 16]) > 0 {}
        true
    }

    /// Writes the current state to a client's bulletin, over one of the client's access QPs.
    pub fn notify(&self, qp: &N::Qp, to: Remote) {
        let state = if self.empty { bulletin::EMPTY } else { bulletin::AVAILABLE };
        let text = ((state as u64) << 32 | self.generation as u64).to_be_bytes();
        let op = Op::WriteInline { to, data: &text };
        // Errors are ignored: the QP is then broken, and its client sends a request before it
        // waits.
        let _ = qp.post_send(&[WorkRequest { id: 0, op, signaled: true }]);
    }
}
