//! Taking back what a gone compute node owned (OneSidedMW §4.3, "handling crashed CNs").
//!
//! The CPU reads `owner_id` of every entry and posts, for each that names the compute node, what
//! the free chain would have done, on a loopback pair of its own: keys dead first, then the chunk
//! cleared, then the entry back in the queue.

use std::time::Duration;

use fabric::direct::{DirectNic, Managed};
use fabric::wqe::Umr;
use fabric::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Op, QpAttr, QueuePair, Receive,
    Remote, Status, WorkRequest,
};

use super::free_chain::Push;
use super::layout::{AVAIL, ENTRY_BYTES, Memory, STEER_STRIDE, entry};
use crate::Error;
use crate::scheme::ClientId;

/// Building blocks of the reclaimer's send queue.
const BLOCKS: u32 = 1024;

/// The loopback pair that the CPU posts to.
pub struct Reclaimer<N: DirectNic> {
    worker: N::Qp,
    done: N::Cq,
    _loopback: N::Qp,
}

impl<N: DirectNic> Reclaimer<N> {
    /// Makes the pair; pushes go to `push_queue`.
    pub fn new(
        nic: &N,
        data: &N::Pd,
        metadata: &N::Pd,
        push_queue: &N::Srq,
        pushes: &N::Cq,
    ) -> Result<Self, Error> {
        let done = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false })?;
        let attr = QpAttr {
            send_cq: &done,
            recv_cq: &done,
            send_blocks: BLOCKS,
            receive: Receive::None,
            access: Access::NONE,
        };
        let managed = Managed { privileged: true, ..Managed::default() };
        let worker = nic.create_managed_qp(data, attr, managed)?;
        let loopback = nic.create_qp(
            metadata,
            QpAttr {
                send_cq: &done,
                recv_cq: pushes,
                send_blocks: 0,
                receive: Receive::Shared(push_queue),
                access: Access::REMOTE_ALL,
            },
        )?;
        worker.connect(loopback.qpn())?;
        loopback.connect(worker.qpn())?;
        Ok(Self { worker, done, _loopback: loopback })
    }

    /// Releases every chunk of `owner`; how many.
    pub fn reclaim(&self, memory: &Memory<N>, push: Push, owner: ClientId) -> Result<u64, Error> {
        let mut reclaimed = 0;
        for i in 0..memory.shape.chunks {
            if memory.owner(i) == owner.0 as u64 {
                self.release(memory, push, i)?;
                reclaimed += 1;
            }
        }
        Ok(reclaimed)
    }

    fn release(&self, memory: &Memory<N>, push: Push, i: u32) -> Result<(), Error> {
        let shape = &memory.shape;
        let unbinds: Vec<Umr> = memory.window_keys(i).map(|k| Umr::unbind(k, false)).collect();
        let zeros = [memory.zeros.sge(0, shape.chunk_bytes as u32)];
        let word = [memory.zeros.sge(0, 8)];
        let value = memory.queue_value(i).to_be_bytes();
        let old = memory.dump.sge(0, 8);
        let chunk = Remote { addr: memory.chunk_addr(i), rkey: memory.chunks_clear.key() };
        let own = memory.table.remote(i as usize * ENTRY_BYTES + entry::OWN);
        let permit = Op::MaskedFetchAdd {
            at: memory.words.remote(AVAIL),
            add: STEER_STRIDE,
            boundary: shape.avail_boundary(),
            old,
        };
        let credit = Op::MaskedFetchAdd {
            at: push.record,
            add: 1 << 32,
            boundary: push.wrap.boundary(),
            old,
        };
        let request = |op| WorkRequest { id: i as u64, op, signaled: false };
        let mut list: Vec<WorkRequest<'_>> =
            unbinds.iter().map(|u| request(Op::Window(u))).collect();
        list.push(request(Op::Write { to: chunk, from: &zeros }));
        list.push(request(Op::Write { to: own, from: &word }));
        list.push(request(Op::SendInline { data: &value }));
        list.push(request(permit));
        list.push(WorkRequest { signaled: true, ..request(credit) });
        self.worker.post_send(&list)?;
        self.wait(i)
    }

    fn wait(&self, i: u32) -> Result<(), Error> {
        let mut done = [Completion::EMPTY];
        while self.done.poll(&mut done) == 0 {
            self.done.wait(Duration::from_millis(100))?;
        }
        if done[0].status != Status::Success {
            return Err(Error::Protocol {
                attempt: format!("taking back chunk {i}"),
                why: format!("the NIC refused what only the memory node posts: {}", done[0].status),
            });
        }
        Ok(())
    }
}
