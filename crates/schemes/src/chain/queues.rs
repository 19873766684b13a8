//! The memory node's queues for one request kind of one client: the front QP, which faces the
//! client, and the loopback pair whose worker executes the chain.

use scheme::client_table::PeerQp;
use scheme::{ClientId, Error};
use verbs::direct::{DirectNic, DirectQp, Managed};
use verbs::wqe::{WQEBB, offset, opcode};
use verbs::{
    Access, CompletionQueue, CqAttr, MemoryRegion, PeerAddress, QpAttr, QpState, QueuePair,
    Receive, ReceiveAttr, Sge,
};

use super::program::{PAIR, STAGING_BYTES, Wiring};

/// The queues for one request kind of one client: the front QP, the worker and its loopback peer.
pub struct ChainQueues<N: DirectNic> {
    /// The QP that faces the client.
    pub front: N::Qp,
    /// Address of the client's QP that connects to the front QP.
    pub front_peer: PeerAddress,
    /// Executes the chain.
    pub worker: N::Qp,
    /// The worker's peer.
    pub loopback: N::Qp,
    /// Counts the requests received.
    pub requests: N::Cq,
    /// Counts the completed replies, if the chain waits for them.
    pub answers: Option<N::Cq>,
    worker_local: N::Mr,
    worker_remote: N::Mr,
    front_local: N::Mr,
    front_remote: N::Mr,
    /// Requests whose arguments, replies and instances have a slot.
    pub credits: u32,
    /// Building blocks of a reply, and WQEs of a reply: each has one block.
    pub reply_blocks: u32,
    credit_block: u32,
    /// 64 bytes for each slot, then the constant `owner_id`.
    pub staging: N::Mr,
    /// Number of the request that position 0 of the chain serves first, as the chain is currently
    /// written.
    pub first: u32,
    /// Number of requests, from `first` on, whose WQEs the CPU has posted; 0 if the chain re-arms
    /// itself.
    pub posted: u64,
    /// Value that the CQ of requests will have counted before that request.
    pub count: u32,
    /// Value that this CQ had counted when the queues were opened.
    pub opened: u32,
    /// Number of WQEs that the front QP had executed when the queues were opened.
    pub executed: u64,
    /// The WQE before which the worker stopped, if the worker is known to be in the error state.
    pub stopped: Option<u16>,
}

/// Resources of the memory node that all clients' queues use.
pub struct SharedResources<'a, N: DirectNic> {
    /// The NIC.
    pub nic: &'a N,
    /// The PD of fronts and workers.
    pub data: &'a N::Pd,
    /// The PD of the workers' peers.
    pub metadata: &'a N::Pd,
    /// Receives the error completions of workers.
    pub faults: &'a N::Cq,
    /// Receives the error completions of replies, which are ignored.
    pub replies: &'a N::Cq,
    /// Counts pushes to the free queue.
    pub pushes: &'a N::Cq,
    /// Requests that may be in flight.
    pub credits: u32,
}

/// Parameters of one request kind.
pub struct QueueParams<'a, N: DirectNic> {
    /// The client.
    pub owner: ClientId,
    /// The client's QP.
    pub peer: PeerAddress,
    /// Building blocks of the chain.
    pub worker_blocks: u32,
    /// Building blocks of a reply.
    pub reply_blocks: u32,
    /// Index of the block that returns the credit.
    pub credit_block: u32,
    /// Scatter elements of a request.
    pub receive_sges: u32,
    /// Push queue of the chain, if it pushes to the free queue.
    pub push_queue: Option<&'a N::Srq>,
    /// The chain waits for the completion of its replies.
    pub waits: bool,
    /// Rights of the client over the front QP, with keys that allow them.
    pub access: Access,
    /// The chain copies fields between its WQEs.
    pub copies: bool,
}

/// Returns true if the front QPs of all `queues` are connected and not in the error state.
pub fn accept_requests<'a, N: DirectNic>(
    queues: impl IntoIterator<Item = &'a ChainQueues<N>>,
) -> Result<bool, Error> {
    for d in queues {
        if d.front.state()? != QpState::ReadyToSend {
            return Ok(false);
        }
    }
    Ok(true)
}

impl<N: DirectNic> ChainQueues<N> {
    /// Creates the queues.
    pub fn new(
        parts: &SharedResources<'_, N>,
        purpose: &QueueParams<'_, N>,
    ) -> Result<Self, Error> {
        let SharedResources { nic, data, metadata, .. } = parts;
        let credits = parts.credits;
        let counter = CqAttr { entries: 64, ignore_overrun: true };
        let requests = nic.create_cq(counter.clone())?;
        let answers = purpose.waits.then(|| nic.create_cq(counter)).transpose()?;
        let attr = |send_cq, send_blocks, receive, access| QpAttr {
            send_cq,
            recv_cq: &requests,
            send_blocks,
            receive,
            access,
        };
        let own = ReceiveAttr { entries: credits, max_sges: purpose.receive_sges };
        let front = nic.create_managed_qp(
            data,
            attr(
                answers.as_ref().unwrap_or(parts.replies),
                purpose.reply_blocks * credits,
                Receive::Own(own),
                purpose.access,
            ),
            Managed { send: true, recv: true, privileged: false },
        )?;
        let worker = nic.create_managed_qp(
            data,
            attr(parts.faults, purpose.worker_blocks, Receive::None, Access::NONE),
            Managed { send: true, recv: false, privileged: true },
        )?;
        let receive = purpose.push_queue.map_or(Receive::None, Receive::Shared);
        let loopback = nic.create_qp(
            metadata,
            QpAttr { recv_cq: parts.pushes, ..attr(parts.replies, 0, receive, Access::REMOTE_ALL) },
        )?;
        let staging = nic.alloc_dma(Wiring::staging_bytes(credits))?;
        let staging = nic.reg_mr(data, &staging, Access::LOCAL_ALL)?;
        let owner = purpose.owner.0 as u64;
        staging.memory().store_be64((credits * STAGING_BYTES) as usize, owner);
        let (worker_ring, front_ring) = (worker.send_ring().memory, front.send_ring().memory);
        let (local, remote) = match purpose.copies {
            true => (Access::LOCAL_ALL, Access::REMOTE_ALL),
            false => (Access::LOCAL_WRITE, Access::REMOTE_ATOMIC),
        };
        Ok(Self {
            worker_local: nic.reg_mr(data, &worker_ring, local)?,
            worker_remote: nic.reg_mr(metadata, &worker_ring, remote)?,
            front_local: nic.reg_mr(data, &front_ring, Access::LOCAL_WRITE)?,
            front_remote: nic.reg_mr(metadata, &front_ring, Access::REMOTE_ATOMIC)?,
            front,
            front_peer: purpose.peer,
            worker,
            loopback,
            requests,
            answers,
            staging,
            credits,
            reply_blocks: purpose.reply_blocks,
            credit_block: purpose.credit_block,
            first: 0,
            posted: 0,
            count: 0,
            opened: 0,
            executed: 0,
            stopped: None,
        })
    }

    /// The front QP as an access QP, in a scheme whose access QPs carry requests.
    pub fn access_qp(&self) -> PeerQp<N> {
        PeerQp { qp: self.front.clone(), peer: self.front_peer }
    }

    /// The queues in the form that the chain writers need.
    pub fn wiring(&self, dump: Sge) -> Wiring {
        Wiring {
            worker_ring: self.worker.send_ring(),
            worker: self.worker.qpn(),
            worker_lkey: self.worker_local.key(),
            worker_rkey: self.worker_remote.key(),
            front_ring: self.front.send_ring(),
            front_recv: self.front.recv_ring().expect("a management QP has its own receive queue"),
            front: self.front.qpn(),
            front_lkey: self.front_local.key(),
            front_rkey: self.front_remote.key(),
            recv_cq: self.requests.cqn(),
            staging: self.staging.sge(0, STAGING_BYTES),
            dump,
            credits: self.credits,
            reply_blocks: self.reply_blocks,
            credit_block: self.credit_block,
            first: self.first,
            count: self.count,
        }
    }

    /// Returns true if the worker will execute nothing more, provided that no request arrives and
    /// that nothing more completes into `others`. Either it waits for the next request or for a
    /// reply that will not end, or it is in the error state and the WQE at which it stopped is
    /// known.
    pub fn is_at_rest(&self, nic: &N, others: Option<&N::Cq>) -> Result<bool, Error> {
        if self.worker.state()? == QpState::Error {
            return Ok(self.stopped.is_some());
        }
        let count = |cq: &N::Cq| Ok::<_, Error>((cq.cqn().raw(), nic.cq_count(cq)?));
        let cqs = [Some(&self.requests), self.answers.as_ref(), others];
        let counts = cqs.into_iter().flatten().map(count).collect::<Result<Vec<_>, _>>()?;
        let before = self.worker.progress()?.send_consumer;
        let ring = self.worker.send_ring();
        let at = (before as u32 % ring.entries) as usize * WQEBB;
        let mut op = [0];
        ring.memory.read(at + offset::OPCODE, &mut op);
        let awaited = ring.memory.load_be32(at + PAIR) & COUNT;
        let on = ring.memory.load_be32(at + offset::ENABLE_NUMBER);
        let counted = counts.iter().find(|(cqn, _)| *cqn == on).map_or(0, |(_, counted)| *counted);
        // If the worker has not moved, the fields read above belong to the WQE that it executes
        // next, and are unchanged: an index is advanced only by WQEs after the WQE that carries it.
        let stands = self.worker.progress()?.send_consumer == before;
        let reached = counted.wrapping_sub(1).wrapping_sub(awaited) & (COUNT / 2 + 1) == 0;
        Ok(stands && op[0] == opcode::WAIT && !reached)
    }
}

/// Mask of a CQ's count, which wraps at 2^24.
pub const COUNT: u32 = 0xff_ffff;
