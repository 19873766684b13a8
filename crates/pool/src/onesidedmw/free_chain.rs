//! The free chain (OneSidedMW §4.3 and §4.4; `layout` has what it works on).
//!
//! | # | WQE | what it does, and what it patches |
//! |---|---|---|
//! | - | RECV | the entry's index to #2 +20 (3 bytes of the address); reply address and rkey |
//! | 0 | WAIT | for the request's completion; its own index is moved by 11 |
//! | 1 | FAA | moves the index of the reply's RECV_EN |
//! | 2 | READ entry | queue value and reply to staging; #3 to #6 |
//! | 3 | UNBIND the guard, with the QP check | the proof of ownership: nothing irreversible before |
//! | 4 | UNBIND the other windows | without the check: they are bound to access QPs |
//! | 5 | WRITE zeros | clears the chunk |
//! | 6 | WRITE owner_id 0 | |
//! | 7 | SEND the queue value | to the shared push queue, whose order is the tail |
//! | 8 | FAA avail, +64 | gives the permit, after the slot is filled |
//! | 9 | FAA | one more receive for the push queue, in its doorbell record |
//! | 10 | SEND_EN | the reply |
//! | 11 | FAA, FAA | the indices of WAIT and SEND_EN |
//!
//! If #2 or #3 fails, nothing was changed: the entry does not exist or is not the sender's. The
//! worker is in the error state, and the memory node's CPU answers the requests that are in
//! flight and writes the chain anew (`node`).

use fabric::wqe::{Umr, offset};
use fabric::{Key, MemoryRegion, Nic, Remote, Sge};

use super::layout::{self, AVAIL, DUMP_BYTES, Memory, entry, reply, tag_offset};
use super::program::{PAIR, Program, REPLY_BLOCKS, Scatter, Wiring, Wrap, bump};

/// Byte of an entry's address where the three bytes of its index stand: address bits 8 to 31.
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

/// Building blocks that a ring for `credits` instances needs.
pub fn ring_blocks(shape: &layout::Shape, credits: u32) -> u32 {
    (Plan::new(0, shape).end * credits + 2).next_power_of_two()
}

/// Scatter elements of a receive WQE.
pub const RECEIVE_SGES: u32 = 2;

/// Where a worker stopped: which position of the lap, and whether before anything was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stopped {
    /// Position in the lap.
    pub position: u32,
    /// True if the request was refused: its entry is unknown, or its guard not the sender's.
    pub refused: bool,
}

/// Which instance the building block `consumer` belongs to.
pub fn stopped_at(shape: &layout::Shape, ring_entries: u32, consumer: u16) -> Stopped {
    let block = consumer as u32 % ring_entries;
    let instance = Plan::new(0, shape).end;
    let within = block % instance;
    let plan = Plan::new(0, shape);
    Stopped {
        position: block / instance,
        refused: within == plan.entry || within == plan.unbinds[0],
    }
}

/// What pushes are made with: the record of the push queue, and where its index wraps.
#[derive(Clone, Copy)]
pub struct Push {
    /// The doorbell record.
    pub record: Remote,
    /// Where its index wraps.
    pub wrap: Wrap,
}

/// Writes the chain for the requests from `wiring.first` on.
pub fn write<N: Nic>(memory: &Memory<N>, wiring: &Wiring, push: Push) {
    let mut program = Program::new(wiring.worker_ring.clone(), wiring.worker);
    for p in 0..wiring.credits {
        write_instance(memory, wiring, push, &mut program, p);
    }
    let (rkey, dump) = (wiring.worker_rkey, memory.dump.sge(0, 8));
    let lap = wiring.worker_ring.entries;
    program.close(|program, last| {
        let pair = program.field(last, PAIR);
        program.push(|b| bump(b, pair, rkey, lap, Wrap::Bits16, dump));
    });
}

fn write_instance<N: Nic>(
    memory: &Memory<N>,
    w: &Wiring,
    push: Push,
    program: &mut Program,
    p: u32,
) {
    let shape = &memory.shape;
    let plan = Plan::new(program.next(), shape);
    let (slot, credits) = (w.slot(p), w.credits);
    let at = |block: u32, field: usize| {
        w.worker_ring.memory.addr() + (block as usize * fabric::wqe::WQEBB + field) as u64
    };
    let dump = memory.dump.sge(0, 8);
    let table = Remote { addr: 0, rkey: memory.table.key() };

    let wait = program.push(|b| {
        b.wait(w.recv_cq, (w.count + p) & 0xff_ffff);
    });
    program.push(|b| bump(b, w.credit_pair(slot), w.front_rkey, credits, Wrap::Bits16, dump));
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
    give_back(memory, push, program);
    let enable = program.push(|b| {
        let limit = REPLY_BLOCKS * (w.first.wrapping_add(p + 1));
        b.send_enable(w.front, limit & 0xffff);
    });
    program.push(|b| bump(b, at(wait, PAIR), w.worker_rkey, credits, Wrap::Bits24, dump));
    let replies = REPLY_BLOCKS * credits;
    program.push(|b| bump(b, at(enable, PAIR), w.worker_rkey, replies, Wrap::Bits16, dump));
    assert_eq!(program.next(), plan.end, "the free chain's plan and its WQEs differ");

    let answer = w.staging(slot, entry::FREE_REPLY as u32, reply::FREE_BYTES as u32);
    w.write_reply(slot, w.first.wrapping_add(p), answer);
    let mut arguments = Scatter::default();
    arguments.to(INDEX_BYTES, w.worker_lkey, at(plan.entry, INDEX_AT));
    arguments.to(12, w.front_lkey, w.reply_field(slot, offset::REMOTE_ADDR));
    w.write_receive(slot, &arguments);
}

/// The end of a release: the permit, and a receive for the push after the next lap.
fn give_back<N: Nic>(memory: &Memory<N>, push: Push, program: &mut Program) {
    let dump = memory.dump.sge(0, 8);
    let boundary = memory.shape.avail_boundary();
    program.push(|b| {
        b.masked_fetch_add(memory.words.remote(AVAIL), layout::STEER_STRIDE, boundary, dump);
    });
    program.push(|b| bump(b, push.record.addr, push.record.rkey, 1, push.wrap, dump));
}

/// How an entry's bytes go into the WQEs behind the READ.
fn entry_scatter(plan: &Plan, w: &Wiring, slot: u32, dump: Sge) -> Scatter {
    let at = |block: u32, field: usize| {
        w.worker_ring.memory.addr() + (block as usize * fabric::wqe::WQEBB + field) as u64
    };
    let key = w.worker_lkey;
    let group = plan.unbinds.len();
    let mut s = Scatter::default();
    let both = w.staging(slot, 0, entry::CHUNK as u32);
    s.to(entry::CHUNK, both.lkey, both.addr);
    s.to(8, key, at(plan.clear, offset::REMOTE_ADDR));
    s.to(8, key, at(plan.owner, offset::REMOTE_ADDR));
    for &unbind in &plan.unbinds {
        s.to(3, key, at(unbind, offset::UMR_KEY_INDEX));
    }
    s.skip(entry::T - entry::KEYS - 3 * group, dump);
    for (j, &unbind) in plan.unbinds.iter().enumerate() {
        if j > 0 && j % 4 == 0 {
            s.skip(tag_offset(j) - tag_offset(j - 1) - 1, dump);
        }
        s.to(1, key, at(unbind, offset::UMR_KEY_TAG));
    }
    s
}

fn entry_read_sges(shape: &layout::Shape) -> u32 {
    let group = shape.group as u32;
    let dumps = 1 + u32::from(shape.group > 4);
    3 + group + dumps + group
}
