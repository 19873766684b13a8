//! The free chain (OneSidedMW §4.3 and §4.4; [`layout`] describes its memory).
//!
//! | # | WQE | effect, and fields that it patches |
//! |---|---|---|
//! | - | RECV | the entry's index to #2 +20 (3 bytes of the address); reply address and rkey |
//! | 0 | WAIT | for the request's completion; #11 advances its index |
//! | 1 | FAA | advances the index of the reply's RECV_EN |
//! | 2 | READ entry | queue value and reply to staging; #3 to #6 |
//! | 3 | UNBIND the guard, with the QP check | the proof of ownership: no irreversible step comes
//! before it |
//! | 4 | UNBIND the other windows | without the check: these windows are bound to access QPs |
//! | 5 | WRITE zeros | clears the chunk |
//! | 6 | WRITE owner_id 0 | |
//! | 7 | SEND the queue value | to the shared push queue, whose order defines the tail |
//! | 8 | FAA avail, +64 | returns the permit, after the slot is filled |
//! | 9 | FAA | one more receive for the push queue, in its doorbell record |
//! | 10 | SEND_EN | the reply |
//! | 11 | FAA, FAA | the indices of WAIT and SEND_EN |
//!
//! If #2 or #3 fails, nothing has been changed: the entry does not exist, or the sender does not
//! own it. The worker is then in the error state. The memory node's CPU answers the requests in
//! flight and rewrites the chain (`repair`).

use super::program::staging_offset;
use scheme::index::Slot;
use verbs::wqe::{Umr, offset};
use verbs::{DmaMemory, Key, MemoryRegion, Nic, Remote, Sge};

use super::layout::{self, DUMP_BYTES, Memory, entry, reply, tag_offset};
use crate::chain::in_flight::InFlight;
use crate::chain::program::{Program, Scatter, Wiring, write_chain};
use crate::chain::push_queue::{PushRecord, write_release_tail};

/// Byte of an entry's address that the index's three bytes replace: address bits 8 to 31.
const INDEX_AT: usize = offset::REMOTE_ADDR + 4;
/// Bytes of the entry index in a request.
pub const INDEX_BYTES: usize = 3;

struct Plan {
    entry: u32,
    unbinds: Vec<u32>,
    clear: u32,
    owner: u32,
    end: u32,
}

impl Plan {
    fn new(start: u32, shape: &layout::Shape) -> Self {
        let entry = start + 2;
        let first = entry + (2 + entry_read_sges(shape)).div_ceil(4);
        let unbinds: Vec<u32> = (0..shape.group as u32).map(|j| first + 2 * j).collect();
        let clear = first + 2 * shape.group as u32;
        Self { entry, unbinds, clear, owner: clear + 1, end: clear + 8 }
    }
}

/// Building blocks of a ring for `credits` instances.
pub fn ring_blocks(shape: &layout::Shape, credits: u32) -> u32 {
    (Plan::new(0, shape).end * credits + 2).next_power_of_two()
}

/// Scatter elements of a receive WQE.
pub const RECEIVE_SGES: u32 = 2;

/// Where a worker stopped, and the resources that it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stopped {
    /// Position in the lap.
    pub position: u32,
    /// True if the request was refused: the entry does not exist, or the guard is not the sender's.
    /// Nothing has been changed.
    pub refused: bool,
    /// Resources of the unfinished request.
    pub held: InFlight,
}

/// State of a worker that stopped before building block `at`. The chain's position 0 serves slot
/// `first` of `staging`.
///
/// | stopped before | holds |
/// |---|---|
/// | #0 to #3 | nothing |
/// | the second UNBIND of #4, #5 to #7 | the entry, no longer owned by the sender |
/// | #8 | a permit, and a receive for the push queue |
/// | #9 | a receive for the push queue |
/// | #10, #11 | nothing |
pub fn stopped_at<N: Nic>(
    memory: &Memory<N>,
    ring_entries: u32,
    at: u16,
    credits: u32,
    (staging, first): (&DmaMemory, u32),
) -> Stopped {
    let block = at as u32 % ring_entries;
    let plan = Plan::new(0, &memory.shape);
    let (position, within) = (block / plan.end, block % plan.end);
    let refused = within == plan.entry || within == plan.unbinds[0];
    let mut stopped = Stopped { position, refused, held: InFlight::default() };
    if position >= credits || within <= plan.unbinds[0] {
        return Stopped { refused: refused && position < credits, ..stopped };
    }
    let push = plan.owner + 1;
    if within <= push {
        let at = staging_offset(Slot::of_request(first + position, credits));
        stopped.held.entry = memory.entry_of(staging.load_be64(at + entry::QUEUE_VALUE));
    }
    stopped.held.permits = (within == push + 1) as u32;
    stopped.held.receives = (within == push + 1 || within == push + 2) as u32;
    stopped
}

/// Writes the chain for the requests from `wiring.first` on.
pub fn write<N: Nic>(memory: &Memory<N>, wiring: &Wiring, push: PushRecord) {
    write_chain(wiring, |program, p| write_instance(memory, wiring, push, program, p));
}

fn write_instance<N: Nic>(
    memory: &Memory<N>,
    w: &Wiring,
    push: PushRecord,
    program: &mut Program,
    p: u32,
) {
    let shape = &memory.shape;
    let plan = Plan::new(program.next(), shape);
    let slot = w.slot(p);
    let table = Remote { addr: 0, rkey: memory.table.key() };

    let wait = program.open(w, p);
    program.push_at(plan.entry, |b| {
        let dump = memory.dump.sge(0, DUMP_BYTES as u32);
        b.rdma_read(memory.table.remote(0), entry_scatter(&plan, w, slot, dump).list());
    });
    for (j, &block) in plan.unbinds.iter().enumerate() {
        program.push_at(block, |b| {
            b.umr(&Umr::unbind(Key::default(), j == 0));
        });
    }
    program.push_at(plan.clear, |b| {
        let chunk = Remote { addr: 0, rkey: memory.chunks_clear.key() };
        b.rdma_write(chunk, &[memory.zeros.sge(0, shape.chunk_bytes as u32)]);
    });
    program.push_at(plan.owner, |b| {
        b.rdma_write(table, &[memory.zeros.sge(0, 8)]);
    });
    program.push(|b| {
        b.send(&[w.staging(slot, 0, 8)]);
    });
    write_release_tail(memory, push, program);
    program.finish(w, p, wait);
    assert_eq!(program.next(), plan.end, "the free chain's plan and its WQEs differ");

    let answer = w.staging(slot, entry::FREE_REPLY as u32, reply::FREE_BYTES as u32);
    w.write_reply(slot, w.first.wrapping_add(p), answer);
    let mut arguments = Scatter::default();
    arguments.sge(w.to(INDEX_BYTES as u32, plan.entry, INDEX_AT));
    arguments.to(12, w.front_lkey, w.reply_field(slot, offset::REMOTE_ADDR));
    w.write_receive(slot, &arguments);
}

/// Scatter list from an entry's bytes to the WQEs after the READ.
fn entry_scatter(plan: &Plan, w: &Wiring, slot: Slot, dump: Sge) -> Scatter {
    let group = plan.unbinds.len();
    let mut s = Scatter::default();
    let both = w.staging(slot, 0, entry::CHUNK as u32);
    s.sge(both);
    s.sge(w.to(8, plan.clear, offset::REMOTE_ADDR));
    s.sge(w.to(8, plan.owner, offset::REMOTE_ADDR));
    for &unbind in &plan.unbinds {
        s.sge(w.to(3, unbind, offset::UMR_KEY_INDEX));
    }
    s.skip(entry::T - entry::KEYS - 3 * group, dump);
    for (j, &unbind) in plan.unbinds.iter().enumerate() {
        if j > 0 && j % 4 == 0 {
            s.skip(tag_offset(j) - tag_offset(j - 1) - 1, dump);
        }
        s.sge(w.to(1, unbind, offset::UMR_KEY_TAG));
    }
    s
}

fn entry_read_sges(shape: &layout::Shape) -> u32 {
    let group = shape.group as u32;
    let dumps = 1 + u32::from(shape.group > 4);
    3 + group + dumps + group
}
