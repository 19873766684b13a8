//! The chain of reads, with as few WQEs as possible, because every access executes all of them.
//!
//! | # | WQE | effect, and fields that it patches |
//! |---|---|---|
//! | - | RECV | page number to #2, buffer to the transfer |
//! | 0 | WAIT | for the request's completion |
//! | 1 | FAA `begun`, +1 | the old value is the index of the next instance's #0 |
//! | 2 | READ the page's row | the transfer: opcode and page |
//! | 3 | SEND_EN | the transfer |
//! | 4 | FAA `enabled`, +1 | the old value is the index of the next instance's #3 |
//! | lap | RECV_EN, FAA, FAA, SEND_EN | one lap more of receives; the ring on itself |
//!
//! ```text
//! answer (front ring): WRITE of the page with immediate, or NOP, which completes
//! counters, in the metadata PD:  +0 begun   +8 enabled   each {index (4), number (4)}, as in WAIT
//! ```
//!
//! The queue determines the operation, and the row provides the opcode. The row of an unmapped page
//! is zero, so a read of it gets no reply. The client knows which of its pages are mapped; a client
//! that reads another page blocks only itself.
//!
//! A free relies on `begun`, which each read increments before it reads the row. A free first
//! unmaps the page, then reads `begun`, and then waits until that number of reads has been
//! answered. By then every read that looked the page up has been answered, and every later read
//! finds no page ([`super::chain`]).
//!
//! Receives are enabled one lap ahead, so a client may overwrite the arguments of one of its own
//! unfinished reads. The overwritten arguments can still name only pages of its own table and
//! addresses in its own memory.

use verbs::wqe::{WQEBB, offset};
use verbs::{Cqn, MemoryRegion, Nic, Remote};

use super::PAGE_BYTES;
use crate::chain::layout::Memory;
use crate::chain::program::{PAIR, Program, Scatter, Wiring, Wrap, write_chain};

/// Scatter elements of a receive WQE.
pub const RECEIVE_SGES: u32 = 2;
/// Building blocks of an answer.
pub const ANSWER_BLOCKS: u32 = 1;
/// Building blocks of an instance.
const INSTANCE: u32 = 5;
/// Offset of `begun` in the counters.
pub const BEGUN: usize = 0;
/// Offset of `enabled` in the counters.
const ENABLED: usize = 8;
/// Bytes of the counters.
pub const COUNTERS_BYTES: usize = 64;

/// Receives that are enabled initially: two laps.
pub const fn receives(credits: u32) -> u32 {
    2 * credits
}

/// Building blocks of a ring for `credits` instances.
pub fn ring_blocks(credits: u32) -> u32 {
    (INSTANCE * credits + 4).next_power_of_two()
}

/// Writes the chain and its counters for the next requests. The first request is completion number
/// `wiring.count`.
pub fn write<N: Nic>(
    memory: &Memory<N>,
    rows: &N::Mr,
    counters: &N::Mr,
    (w, requests): (&Wiring, Cqn),
) {
    let pair = |index: u32, number: u32| (index as u64) << 32 | number as u64;
    let words = counters.memory();
    let begun = w.count.wrapping_add(1) & 0xff_ffff;
    words.store_be64(BEGUN, pair(begun, requests.raw()));
    words.store_be64(ENABLED, pair(2 * ANSWER_BLOCKS, w.front.raw()));
    write_chain(w, |program, p| write_instance(memory, rows, counters, w, program, p));
}

fn write_instance<N: Nic>(
    memory: &Memory<N>,
    rows: &N::Mr,
    counters: &N::Mr,
    w: &Wiring,
    program: &mut Program,
    p: u32,
) {
    let (begin, slot) = (program.next(), w.slot(p));
    let next = if p + 1 == w.credits { 0 } else { begin + INSTANCE };
    let counter = |at: usize| counters.remote(at);
    program.push(|b| {
        b.wait(w.recv_cq, w.count.wrapping_add(p) & 0xff_ffff);
    });
    program.push(|b| {
        let wait = w.to(8, next, PAIR);
        b.masked_fetch_add(counter(BEGUN), 1 << 32, Wrap::Bits24.boundary(), wait);
    });
    program.push(|b| {
        let mut s = Scatter::default();
        s.to(1, w.front_lkey, w.reply_field(slot, offset::OPCODE));
        s.to(8, w.front_lkey, w.reply_field(slot, offset::RDMA_SGE + 8));
        b.rdma_read(rows.remote(0), s.list());
    });
    program.push(|b| {
        b.send_enable(w.front, p + 1);
    });
    program.push(|b| {
        let enable = w.to(8, next + 3, PAIR);
        b.masked_fetch_add(counter(ENABLED), 1 << 32, Wrap::Bits16.boundary(), enable);
    });
    assert_eq!(program.next() - begin, INSTANCE);
    if p + 1 == w.credits {
        let at = program.push(|b| {
            b.receive_enable(w.front, receives(w.credits) + w.credits);
        });
        program.bump(w, at, w.credits, Wrap::Bits16);
    }

    w.write_front(slot, 0, |b| {
        let page = verbs::Sge { addr: 0, len: PAGE_BYTES as u32, lkey: memory.chunks.key() };
        b.rdma_write_imm(Remote::default(), &[page], crate::chain::REPLY_IMM).signaled();
    });
    let mut arguments = Scatter::default();
    arguments.sge(w.to(3, begin + 2, offset::REMOTE_ADDR + 4));
    arguments.to(12, w.front_lkey, w.reply_field(slot, offset::REMOTE_ADDR));
    w.write_receive(slot, &arguments);
}

const _: () = assert!(ANSWER_BLOCKS as usize * WQEBB == 64);
