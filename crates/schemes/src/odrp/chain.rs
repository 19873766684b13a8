//! The chain of writes and frees (OneSidedMW §2.2.3; [`super::table`] describes its tables). It
//! also serves reads from clients that do not know whether a page is mapped; [`super::read_chain`]
//! is faster.
//!
//! | # | WQE | effect, and fields that it patches |
//! |---|---|---|
//! | - | RECV | op to #3, page number to #2, buffer to the transfer, reply address to the reply |
//! | 0 | WAIT | for the request's completion |
//! | 1 | FAA | advances the index of the reply's RECV_EN, which has run in the previous lap |
//! | 2 | READ the page's row | #3: state; the transfer and #c8: page; queue value to staging |
//! | 3 | READ the request's row | gates #a0 and #c0; opcodes of transfer and reply; status |
//! | a0 | WRITE | the address of #2 to #a6; or the NOP that skips all of "allocate" |
//! | a1 | FAA avail, -64 | takes a permit; the old value is the address of #a2 |
//! | a2 | READ steering row | #a3: word, addend, boundary; #a4: opcode; #a5: the null entry |
//! | a3 | FAA head, +8 (or avail, +64) | the old head is the address of #a4 |
//! | a4 | CAS that swaps in 0 (or NOP) | the queue value is the address of #a5 |
//! | a5 | READ image | the transfer: page and opcode; the status; the new row to staging |
//! | a6 | WRITE the row | the page is mapped |
//! | c0 | WRITE | the address of #2 to #c1; or the NOP that skips all of "free" |
//! | c1 | WRITE zeros | the row: the page is unmapped |
//! | c2 | READ `begun` of the reads | the index of #c4 |
//! | c3 | FAA | converts the number of a read to the number of its reply |
//! | c4 | WAIT | until all reads that may have looked the page up are answered |
//! | c5 to c7 | READ, FAA, WAIT | the same for this queue: until all earlier requests are answered
//! |
//! | c8 | WRITE zeros | clears the page |
//! | c9 | SEND the queue value | to the shared push queue, whose order defines the tail |
//! | c10, c11 | FAA, FAA | the permit; one more receive for the push queue |
//! | 4 | SEND_EN | the answer |
//! | 5 | FAA, FAA | the indices of WAIT and SEND_EN |
//!
//! ```text
//! answer (front ring): transfer of the page | reply, inline (2 blocks) | RECV_EN, signaled
//! ```
//!
//! The allocating part is that of [`crate::onesidedmw::alloc_chain`] without the windows. The only
//! argument that can make a WQE fail before #c11 is a page number beyond the client's table; it
//! fails at #2, before anything is changed. But the chain may wait for ever at #c4 or #c7, if the
//! client breaks the QP of its reads or writes. The chain then holds an unmapped page
//! ([`held_page`]).

use crate::chain::program::staging_offset;
use scheme::index::{EntryId, Slot};
use verbs::wqe::{WQEBB, offset};
use verbs::{Cqn, DmaMemory, MemoryRegion, Nic, Remote};

use super::read_chain::BEGUN;
use super::table::{Gate, ROW_BYTES, image};
use super::{PAGE_BYTES, REPLY_BYTES};
use crate::chain::layout::{self, AVAIL, Memory};
use crate::chain::program::{PAIR, Program, STAGING_BYTES, Scatter, Wiring, Wrap, write_chain};
use crate::chain::push_queue::{PushRecord, write_release_tail};
use crate::chain::queues::COUNT;

/// Building blocks of an answer.
pub const ANSWER_BLOCKS: u32 = 4;
/// Index of the block that returns the credit.
pub const CREDIT_BLOCK: u32 = 3;
/// Scatter elements of a receive WQE.
pub const RECEIVE_SGES: u32 = 4;

/// Building blocks of "allocate" and of "free".
const ALLOCATE_BLOCKS: u32 = 10;
const FREE_BLOCKS: u32 = 12;
/// The gate of "allocate".
pub const ALLOCATE: Gate = Gate::of(ALLOCATE_BLOCKS);
/// The gate of "free".
pub const FREE: Gate = Gate::of(FREE_BLOCKS);

/// Byte of the control segment that holds a WQE's number of segments.
const SEGMENTS: usize = 7;
/// Byte of a row's address that the page number's three bytes replace.
const NUMBER_AT: usize = offset::REMOTE_ADDR + 4;
/// Byte of the address of a request's row that the state replaces.
const STATE_AT: usize = offset::REMOTE_ADDR + 5;
/// Byte of the address of a request's row that the op replaces.
const OP_AT: usize = offset::REMOTE_ADDR + 6;
/// Offset of the status in a reply: its first inline byte.
const STATUS_AT: usize = WQEBB + offset::RDMA_SGE + 4;
/// Inline bytes of a reply: enough that its WQE takes two blocks and the answer four.
const INLINE_BYTES: usize = 32;
/// Address of the first SGE of a transfer.
const LOCAL_ADDR: usize = offset::RDMA_SGE + 8;

/// Offsets in a slot of the staging memory.
mod staged {
    /// The queue value of the page that a free returns.
    pub const QUEUE_VALUE: u32 = 0;
    /// The row that maps the allocated page.
    pub const ROW: u32 = 16;
}

/// Tables and queues that the chain of one client works on.
pub struct Tables<N: Nic> {
    /// The client's table.
    pub rows: N::Mr,
    /// The table of requests (see [`super::table`]).
    pub steps: N::Mr,
    /// The push queue, through which pages return to the free queue.
    pub push: PushRecord,
    /// The CQ of completed answers, and its count before the first one.
    pub answers: (Cqn, u32),
    /// State of the client's chain of reads.
    pub reads: Reads<N>,
}

/// State of the same client's reads that a free waits on.
pub struct Reads<N: Nic> {
    /// The counters of the chain of reads.
    pub counters: N::Mr,
    /// The CQ of completed read answers.
    pub answers: Cqn,
    /// Addend that converts `begun` to the number of the last answer to wait for (24 bits).
    pub delta: u32,
}

/// Building-block indices of the WQEs of one instance.
struct Plan {
    row: u32,
    step: u32,
    gate: u32,
    steer: u32,
    advance: u32,
    swap: u32,
    image: u32,
    map: u32,
    free_gate: u32,
    clear: u32,
    unmap: u32,
    /// The WAIT for the reads.
    settle: u32,
    /// The WAIT for earlier requests of this queue.
    settle_own: u32,
    end: u32,
}

impl Plan {
    fn new(start: u32) -> Self {
        let row = start + 2;
        let step = row + 2;
        let gate = step + 3;
        let steer = gate + 2;
        let advance = steer + 2;
        let swap = advance + 1;
        let image = swap + 2;
        let map = image + 2;
        let free_gate = gate + ALLOCATE_BLOCKS;
        let unmap = free_gate + 1;
        let settle = unmap + 3;
        let settle_own = settle + 3;
        Self {
            row,
            step,
            gate,
            steer,
            advance,
            swap,
            image,
            map,
            free_gate,
            unmap,
            settle,
            settle_own,
            clear: settle_own + 1,
            end: free_gate + FREE_BLOCKS + 3,
        }
    }
}

/// Building blocks of a ring for `credits` instances.
pub fn ring_blocks(credits: u32) -> u32 {
    (Plan::new(0).end * credits + 2).next_power_of_two()
}

/// The page held by a chain that is blocked for ever before building block `at`: a page that the
/// chain has unmapped but not pushed. The chain must have been written for requests from 0 on.
pub fn held_page<N: Nic>(
    memory: &Memory<N>,
    staging: &DmaMemory,
    (at, ring_entries): (u16, u32),
    credits: u32,
) -> Option<EntryId> {
    let block = at as u32 % ring_entries;
    let plan = Plan::new(0);
    let (position, within) = (block / plan.end, block % plan.end);
    if position >= credits || ![plan.settle, plan.settle_own].contains(&within) {
        return None;
    }
    let at = staging_offset(Slot::of_request(position, credits));
    memory.entry_of(staging.load_be64(at + staged::QUEUE_VALUE as usize))
}

/// Writes the chain for the requests from `wiring.first` on.
pub fn write<N: Nic>(memory: &Memory<N>, tables: &Tables<N>, wiring: &Wiring) {
    write_chain(wiring, |program, p| write_instance(memory, tables, wiring, program, p));
}

fn write_instance<N: Nic>(
    memory: &Memory<N>,
    tables: &Tables<N>,
    w: &Wiring,
    program: &mut Program,
    p: u32,
) {
    let plan = Plan::new(program.next());
    let slot = w.slot(p);
    let front = |len: usize, block: usize, field: usize, s: &mut Scatter| {
        s.to(len, w.front_lkey, w.reply_field(slot, block * WQEBB + field));
    };
    let (rows, steps) = (&tables.rows, &tables.steps);

    let wait = program.open(w, p);
    program.push_at(plan.row, |b| {
        let mut s = Scatter::default();
        s.sge(w.to(1, plan.step, STATE_AT));
        front(8, 0, LOCAL_ADDR, &mut s);
        s.sge(w.to(8, plan.clear, offset::REMOTE_ADDR));
        s.sge(w.staging(slot, staged::QUEUE_VALUE, 8));
        b.rdma_read(rows.remote(0), s.list());
    });
    program.push_at(plan.step, |b| {
        let mut s = Scatter::default();
        for gate in [plan.gate, plan.free_gate] {
            s.sge(w.to(1, gate, offset::OPCODE));
            s.sge(w.to(1, gate, SEGMENTS));
        }
        front(1, 0, offset::OPCODE, &mut s);
        front(1, 1, offset::OPCODE, &mut s);
        front(8, 0, STATUS_AT, &mut s);
        b.rdma_read(steps.remote(0), s.list());
    });
    write_allocate(memory, rows, w, (&plan, slot), program);
    write_free(memory, tables, w, (&plan, slot, wait), program);
    program.finish(w, p, wait);
    assert_eq!(program.next(), plan.end, "the chain's plan and its WQEs differ");
    write_answer(memory, w, slot, w.first.wrapping_add(p));

    let mut arguments = Scatter::default();
    arguments.sge(w.to(1, plan.step, OP_AT));
    arguments.sge(w.to(3, plan.row, NUMBER_AT));
    front(12, 0, offset::REMOTE_ADDR, &mut arguments);
    front(12, 1, offset::REMOTE_ADDR, &mut arguments);
    w.write_receive(slot, &arguments);
}

/// Writes the gate at block `at` of a part. An open gate copies the row's address from #2 to the
/// WQE at `block`.
fn gate(program: &mut Program, w: &Wiring, plan: &Plan, (at, block): (u32, u32)) {
    let to = Remote { addr: w.at(block, offset::REMOTE_ADDR), rkey: w.worker_rkey };
    program.push_at(at, |b| {
        b.rdma_write(to, &[w.to(8, plan.row, offset::REMOTE_ADDR)]);
    });
}

fn write_allocate<N: Nic>(
    memory: &Memory<N>,
    rows: &N::Mr,
    w: &Wiring,
    (plan, slot): (&Plan, Slot),
    program: &mut Program,
) {
    let shape = &memory.shape;
    gate(program, w, plan, (plan.gate, plan.map));
    program.push(|b| {
        let row = w.to(8, plan.steer, offset::REMOTE_ADDR);
        let avail = memory.words.remote(AVAIL);
        b.masked_fetch_add(avail, shape.take_permit(), shape.avail_boundary(), row);
    });
    program.push_at(plan.steer, |b| {
        let to = [
            w.to(8, plan.advance, offset::REMOTE_ADDR),
            w.to(16, plan.advance, offset::ATOMIC_ADD),
            w.to(1, plan.swap, offset::OPCODE),
            w.to(8, plan.image, offset::REMOTE_ADDR),
        ];
        b.rdma_read(Remote { addr: 0, rkey: memory.steer.key() }, &to);
    });
    program.push_at(plan.advance, |b| {
        let old = w.to(8, plan.swap, offset::REMOTE_ADDR);
        b.masked_fetch_add(Remote { addr: 0, rkey: memory.words.key() }, 0, 0, old);
    });
    program.push_at(plan.swap, |b| {
        let old = w.to(8, plan.image, offset::REMOTE_ADDR);
        let place = Remote { addr: 0, rkey: memory.queue.key() };
        b.masked_compare_swap(place, (0, 0), (0, u64::MAX), old);
    });
    program.push_at(plan.image, |b| {
        let mut s = Scatter::default();
        s.to(8, w.front_lkey, w.reply_field(slot, LOCAL_ADDR));
        s.to(1, w.front_lkey, w.reply_field(slot, offset::OPCODE));
        s.to(8, w.front_lkey, w.reply_field(slot, STATUS_AT));
        s.sge(w.staging(slot, staged::ROW, ROW_BYTES as u32));
        b.rdma_read(Remote { addr: 0, rkey: memory.table.key() }, s.list());
    });
    program.push_at(plan.map, |b| {
        let row = w.staging(slot, staged::ROW, ROW_BYTES as u32);
        b.rdma_write(Remote { addr: 0, rkey: rows.key() }, &[row]);
    });
    assert_eq!(program.next(), plan.gate + ALLOCATE_BLOCKS);
}

fn write_free<N: Nic>(
    memory: &Memory<N>,
    tables: &Tables<N>,
    w: &Wiring,
    (plan, slot, wait): (&Plan, Slot, u32),
    program: &mut Program,
) {
    let reads = &tables.reads;
    gate(program, w, plan, (plan.free_gate, plan.unmap));
    program.push_at(plan.unmap, |b| {
        let row = Remote { addr: 0, rkey: tables.rows.key() };
        b.rdma_write(row, &[memory.zeros.sge(0, ROW_BYTES as u32)]);
    });
    settle(program, w, plan.settle, (reads.counters.remote(BEGUN), reads.delta, reads.answers));
    let own = Remote { addr: w.at(wait, PAIR), rkey: w.worker_rkey };
    // For the requests of this queue before this one; the number of this request is in its own
    // WAIT.
    let (answers, before) = tables.answers;
    let delta = before.wrapping_sub(w.count).wrapping_sub(1) & COUNT;
    settle(program, w, plan.settle_own, (own, delta, answers));
    program.push_at(plan.clear, |b| {
        let page = Remote { addr: 0, rkey: memory.chunks_clear.key() };
        b.rdma_write(page, &[memory.zeros.sge(0, PAGE_BYTES as u32)]);
    });
    program.push(|b| {
        b.send(&[w.staging(slot, staged::QUEUE_VALUE, 8)]);
    });
    write_release_tail(memory, tables.push, program);
    assert_eq!(program.next(), plan.free_gate + FREE_BLOCKS);
}

/// Waits, at block `at`, until `answers` has counted the completion "index at `from`, plus
/// `delta`".
fn settle(program: &mut Program, w: &Wiring, at: u32, (from, delta, answers): (Remote, u32, Cqn)) {
    program.push(|b| {
        b.rdma_read(from, &[w.to(4, at, PAIR)]);
    });
    program.push(|b| {
        let index = Remote { addr: w.at(at, PAIR), rkey: w.worker_rkey };
        b.masked_fetch_add(index, (delta as u64) << 32, Wrap::Bits24.boundary(), w.dump);
    });
    program.push_at(at, |b| {
        b.wait(answers, 0);
    });
}

/// Writes the answer of `slot`; `first_use` is the number of the first request that uses the slot.
fn write_answer<N: Nic>(memory: &Memory<N>, w: &Wiring, slot: Slot, first_use: u32) {
    w.write_front(slot, 0, |b| {
        let page = verbs::Sge { addr: 0, len: PAGE_BYTES as u32, lkey: memory.chunks.key() };
        b.rdma_write_imm(Remote::default(), &[page], crate::chain::REPLY_IMM);
    });
    w.write_front(slot, 1, |b| {
        b.rdma_write_inline(Remote::default(), &[0; INLINE_BYTES]);
        assert_eq!(b.blocks(), CREDIT_BLOCK - 1);
    });
    w.write_credit(slot, first_use, true);
}

const _: () = {
    assert!(REPLY_BYTES <= INLINE_BYTES);
    assert!(image::BYTES == 8 + 1 + 8 + ROW_BYTES);
    assert!(layout::entry::T + image::BYTES <= layout::entry::OWN);
    assert!(staged::ROW as usize + ROW_BYTES <= STAGING_BYTES as usize);
};
