//! What the memory node has for one compute node, and how far that has come.

use fabric::direct::{DirectNic, DirectQp};
use fabric::wqe::Builder;
use fabric::{MemoryRegion, PeerAddress, QpChange, QueuePair, Remote};

use super::{REPLY_BYTES, chain};
use crate::Error;
use crate::chain::direction::Direction;
use crate::chain::layout::Memory;

/// What the memory node has for one compute node.
pub struct Connection<N: DirectNic> {
    pub reads: Direction<N>,
    /// Writes and frees.
    pub writes: Direction<N>,
    /// What the chain of reads counts.
    pub counters: N::Mr,
    pub rows: N::Mr,
    /// Access QPs by group and lane, with the compute node's QPs: no key opens anything to them, and
    /// only bulletins go over them.
    pub access: Vec<Vec<(N::Qp, PeerAddress)>>,
    pub bulletin: Remote,
    pub stage: Stage,
    /// Tell it, once its connection is closed.
    pub tell: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Requests come in.
    Open,
    /// None come in; what did is executed to its end.
    Closing,
    /// Nothing is in flight.
    Closed,
    /// It has gone; its chain runs on.
    Settling,
    /// The rows below this one were looked at.
    Scanning(u64),
    /// What it had is with the reclaimer, up to this ticket.
    Releasing(u64),
}

impl<N: DirectNic> Connection<N> {
    /// In the order of [`Admitted::management`].
    pub fn directions(&self) -> [&Direction<N>; 2] {
        [&self.reads, &self.writes]
    }

    /// No request comes in from now on, and no answer goes out.
    pub fn close(&self) -> Result<(), Error> {
        Ok(self.directions().iter().try_for_each(|d| d.front.modify(QpChange::Reset))?)
    }

    /// Whether nothing is in flight, given that it is closed.
    pub fn is_at_rest(&self, nic: &N) -> Result<bool, Error> {
        // The reads first: a free waits for them.
        Ok(self.reads.is_at_rest(nic, None)?
            && self.writes.is_at_rest(nic, self.reads.answers.as_ref())?)
    }

    /// Ends its chains, which are at rest. Gives a page that they have unmapped and not given back, since they
    /// waited for a read that was never answered.
    ///
    /// A free that waits for such a read must not go on after its page was taken from it: anything that completes to
    /// the CQ of the answers, be it an error, would let it.
    pub fn stop(&self, memory: &Memory<N>, credits: u32) -> Result<Option<u32>, Error> {
        let page = self.in_hand(memory, credits)?;
        self.directions().iter().try_for_each(|d| d.worker.modify(QpChange::Reset))?;
        Ok(page)
    }

    fn in_hand(&self, memory: &Memory<N>, credits: u32) -> Result<Option<u32>, Error> {
        let d = &self.writes;
        if d.stopped.is_some() {
            return Ok(None);
        }
        let at = (d.worker.progress()?.send_consumer, d.worker.send_ring().entries);
        Ok(chain::in_hand(memory, d.staging.memory(), at, credits))
    }
}

impl Stage {
    pub fn is_gone(self) -> bool {
        matches!(self, Stage::Settling | Stage::Scanning(_) | Stage::Releasing(_))
    }
}

/// Breaks the compute node's side of its QP, so that whoever waits for a reply learns that there will
/// be none: a WRITE with a key that is not one. Nothing is in flight.
pub fn break_peer<N: DirectNic>(d: &Direction<N>) -> Result<(), Error> {
    d.front.connect(d.front_peer)?;
    let mut b = Builder::new(d.front.qpn(), 0);
    b.rdma_write(Remote::default(), &[d.staging.sge(0, REPLY_BYTES as u32)]);
    d.front.send_ring().memory.write(0, b.bytes());
    Ok(d.front.enable_send(b.blocks() as u16)?)
}
