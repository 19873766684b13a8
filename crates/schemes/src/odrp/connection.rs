//! The memory node's state for one client, with the stages of closing and reclaiming it.

use scheme::client_table::{AccessQps, ClientEntry};
use scheme::index::EntryId;
use scheme::route::with_start;
use scheme::{Error, Start};
use verbs::direct::{DirectNic, DirectQp};
use verbs::wqe::Builder;
use verbs::{MemoryRegion, QpChange, QueuePair, Remote};

use super::{REPLY_BYTES, chain};
use crate::chain::layout::Memory;
use crate::chain::queues::{ChainQueues, accept_requests};

/// Queues, tables and stage of one client.
pub struct Connection<N: DirectNic> {
    pub reads: ChainQueues<N>,
    /// Writes and frees.
    pub writes: ChainQueues<N>,
    /// Counters of the chain of reads.
    pub counters: N::Mr,
    pub rows: N::Mr,
    /// Access QPs by group and lane, with the client's QPs. No key grants access over them; they
    /// carry bulletins only.
    pub access: AccessQps<N>,
    pub bulletin: Remote,
    pub stage: Stage,
    /// Break the client's QPs once the connection is closed, so that the client notices.
    pub notify: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Requests are accepted.
    Open,
    /// No new request is accepted; requests in flight are executed to the end.
    Closing,
    /// No request is in flight.
    Closed,
    /// The client has departed; its chains still run.
    Settling,
    /// The rows below this one have been scanned.
    Scanning(u64),
    /// The reclaimer releases the client's pages, up to this ticket.
    Releasing(u64),
}

impl<N: DirectNic> Connection<N> {
    /// The queues in the order of [`ConnectReply::management`](crate::ConnectReply::management).
    pub fn queues(&self) -> [&ChainQueues<N>; 2] {
        [&self.reads, &self.writes]
    }

    /// Resets the front QPs: no request is accepted and no reply is sent any more.
    pub fn close(&self) -> Result<(), Error> {
        Ok(self.queues().iter().try_for_each(|d| d.front.modify(QpChange::Reset))?)
    }

    /// Returns true if no request is in flight. The connection must be closed.
    pub fn is_at_rest(&self, nic: &N) -> Result<bool, Error> {
        // Reads first, because a free waits for them.
        Ok(self.reads.is_at_rest(nic, None)?
            && self.writes.is_at_rest(nic, self.reads.answers.as_ref())?)
    }

    /// Stops the chains, which must be at rest. Returns the page, if any, that they have unmapped
    /// but not freed because they waited for a read that was never answered.
    ///
    /// A free that waits for such a read must not continue after its page has been taken from it.
    /// Any completion in the CQ of the answers, even an error, would let it continue; therefore the
    /// workers are reset.
    pub fn stop(&self, memory: &Memory<N>, credits: u32) -> Result<Option<EntryId>, Error> {
        let page = self.held_page(memory, credits)?;
        self.queues().iter().try_for_each(|d| d.worker.modify(QpChange::Reset))?;
        Ok(page)
    }

    fn held_page(&self, memory: &Memory<N>, credits: u32) -> Result<Option<EntryId>, Error> {
        let d = &self.writes;
        if d.stopped.is_some() {
            return Ok(None);
        }
        let at = (d.worker.progress()?.send_consumer, d.worker.send_ring().entries);
        Ok(chain::held_page(memory, d.staging.memory(), at, credits))
    }
}

impl<N: DirectNic> ClientEntry for Connection<N> {
    type Nic = N;

    fn access(&self) -> &AccessQps<N> {
        &self.access
    }

    fn access_mut(&mut self) -> &mut AccessQps<N> {
        &mut self.access
    }

    fn set_management_start(&mut self, start: Start) {
        for d in [&mut self.reads, &mut self.writes] {
            d.front_peer = with_start(d.front_peer, start);
        }
    }

    fn is_open(&self) -> Result<bool, Error> {
        Ok(self.stage == Stage::Open && accept_requests(self.queues())?)
    }

    fn is_leaving(&self) -> bool {
        self.stage.is_gone()
    }
}

impl Stage {
    pub fn is_gone(self) -> bool {
        matches!(self, Stage::Settling | Stage::Scanning(_) | Stage::Releasing(_))
    }
}

/// Breaks the client's QP, so that a client that waits for a reply gets an error: posts a WRITE
/// with an invalid key. No request may be in flight.
pub fn break_peer<N: DirectNic>(d: &ChainQueues<N>) -> Result<(), Error> {
    d.front.connect(d.front_peer)?;
    let mut b = Builder::new(d.front.qpn(), 0);
    b.rdma_write(Remote::default(), &[d.staging.sge(0, REPLY_BYTES as u32)]);
    d.front.send_ring().memory.write(0, b.bytes());
    Ok(d.front.enable_send(b.blocks() as u16)?)
}
