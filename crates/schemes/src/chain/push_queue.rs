//! Pushes to the free queue: a SEND into a shared receive queue whose order defines the tail.

use verbs::direct::{DirectNic, DirectReceive};
use verbs::{MemoryRegion, Nic, Remote};

use super::layout::{self, AVAIL, Memory};
use super::program::{Program, Wrap};

/// Doorbell record of the push queue, and the width at which its index wraps.
#[derive(Clone, Copy)]
pub struct PushRecord {
    /// The doorbell record.
    pub record: Remote,
    /// Width at which its index wraps.
    pub wrap: Wrap,
}

impl PushRecord {
    /// Addend that adds one receive to the record: the index is its upper half.
    pub const ADD: u64 = 1 << 32;
}

/// Writes the end of a release: return the permit, and add a receive for the push one lap later.
pub fn write_release_tail<N: Nic>(memory: &Memory<N>, push: PushRecord, program: &mut Program) {
    let dump = memory.dump.sge(0, 8);
    let boundary = memory.shape.avail_boundary();
    program.push(|b| {
        b.masked_fetch_add(memory.words.remote(AVAIL), layout::STEER_STRIDE, boundary, dump);
    });
    program.push(|b| {
        b.masked_fetch_add(push.record, PushRecord::ADD, push.wrap.boundary(), dump);
    });
}

/// Fills the push queue's ring: receive k scatters to the free-queue slot of the k-th push.
pub fn fill<N: DirectNic>(memory: &Memory<N>, queue: &N::Srq) {
    let (ring, slots) = (queue.ring(), memory.shape.slots());
    assert_eq!(ring.entries, slots);
    for k in 0..slots {
        // The first push goes to the slot after the entries that the queue holds initially.
        let slot = (k + memory.shape.chunks) % slots;
        let sge = memory.queue.sge(memory.shape.slot_offset(slot as usize), 8);
        ring.memory.write((k * ring.stride) as usize, &sge.to_bytes());
    }
    queue.record().store_be32(0, slots);
}
