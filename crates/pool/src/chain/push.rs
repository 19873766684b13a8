//! Pushing to the free queue: a SEND into a shared receive queue whose order is the tail.

use fabric::direct::{DirectNic, DirectReceive};
use fabric::{MemoryRegion, Nic, Remote};

use super::layout::{self, AVAIL, Memory};
use super::program::{Program, Wrap};

/// What pushes are made with: the record of the push queue, and where its index wraps.
#[derive(Clone, Copy)]
pub struct Push {
    /// The doorbell record.
    pub record: Remote,
    /// Where its index wraps.
    pub wrap: Wrap,
}

impl Push {
    /// What is added to the record for one receive more: the index is its upper half.
    pub const ADD: u64 = 1 << 32;
}

/// The end of a release: the permit, and a receive for the push after the next lap.
pub fn give_back<N: Nic>(memory: &Memory<N>, push: Push, program: &mut Program) {
    let dump = memory.dump.sge(0, 8);
    let boundary = memory.shape.avail_boundary();
    program.push(|b| {
        b.masked_fetch_add(memory.words.remote(AVAIL), layout::STEER_STRIDE, boundary, dump);
    });
    program.push(|b| {
        b.masked_fetch_add(push.record, Push::ADD, push.wrap.boundary(), dump);
    });
}

/// Fills the push queue's ring: receive k scatters to the slot that the k-th push is for.
pub fn fill<N: DirectNic>(memory: &Memory<N>, queue: &N::Srq) {
    let (ring, slots) = (queue.ring(), memory.shape.slots());
    assert_eq!(ring.entries, slots);
    for k in 0..slots {
        // The first push goes behind the entries that are in the queue from the start.
        let slot = (k + memory.shape.chunks) % slots;
        let sge = memory.queue.sge(slot as usize * 8, 8);
        ring.memory.write((k * ring.stride) as usize, &sge.to_bytes());
    }
    queue.record().store_be32(0, slots);
}
