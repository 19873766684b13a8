//! The allocation chain (OneSidedMW §4.3, figure 5; [`layout`] describes its memory).
//!
//! | # | WQE | effect, and fields that it patches |
//! |---|---|---|
//! | - | RECV | QPNs of the access QPs to BIND 1.. +68; reply address and rkey to the reply +16 |
//! | 0 | WAIT | for the request's completion; #11 advances its index |
//! | 1 | FAA | advances the index of the reply's RECV_EN, which has run in the previous lap |
//! | 2 | FAA avail, -64 | takes a permit; the old value is the address of #3 |
//! | 3 | READ steering row | #4: word, addend, boundary; #5: opcode; #6: the null entry's address |
//! | 4 | FAA head, +8 (or avail, +64) | the old head is the address of #5 |
//! | 5 | CAS that swaps in 0 (or NOP) | the queue value is the address of #6 |
//! | 6 | READ entry | all of #7 to #10, and the reply |
//! | 7 | BIND each window | the guard to the free worker, the other windows to the access QPs |
//! | 8 | FAA on the tag words | the old tags go into the reply; advances to the next tags |
//! | 9 | WRITE owner_id | before the reply, from the memory node's constant |
//! | 10 | SEND_EN | the reply |
//! | 11 | FAA, FAA | the indices of WAIT and SEND_EN |
//!
//! A WQE is fetched only after all earlier WQEs of its queue have taken effect, and each WQE is
//! patched only by earlier WQEs.

use scheme::index::Slot;
use verbs::direct::Ring;
use verbs::wqe::{Umr, WQEBB, offset, opcode, umr};
use verbs::{Access, Key, MemoryRegion, Nic, Qpn, Remote, Sge};

use super::layout::{self, AVAIL, DUMP_BYTES, Memory, reply};
use super::program::{Program, Scatter, Wiring, write_chain};
use crate::chain::in_flight::InFlight;

/// Building-block indices of the WQEs of one instance.
struct Plan {
    steer: u32,
    advance: u32,
    swap: u32,
    entry: u32,
    binds: Vec<u32>,
    tags: Vec<u32>,
    owner: u32,
}

impl Plan {
    fn new(start: u32, shape: &layout::Shape) -> Self {
        let steer = start + 3;
        let advance = steer + 2;
        let swap = advance + 1;
        let entry = swap + 2;
        let first_bind = entry + entry_read_blocks(shape);
        let binds: Vec<u32> = (0..shape.group as u32).map(|j| first_bind + 3 * j).collect();
        let first_tag = first_bind + 3 * shape.group as u32;
        let tags: Vec<u32> = (0..shape.tag_words() as u32).map(|w| first_tag + w).collect();
        let owner = first_tag + shape.tag_words() as u32;
        Self { steer, advance, swap, entry, binds, tags, owner }
    }

    /// The block after the instance's last WQE.
    fn end(&self) -> u32 {
        self.owner + 4
    }
}

/// Building blocks of a ring for `credits` instances.
pub fn ring_blocks(shape: &layout::Shape, credits: u32) -> u32 {
    (Plan::new(0, shape).end() * credits + 2).next_power_of_two()
}

/// Scatter elements of a receive WQE.
pub fn receive_sges(shape: &layout::Shape) -> u32 {
    shape.group as u32
}

/// Writes the chain for the requests from `wiring.first` on.
pub fn write<N: Nic>(memory: &Memory<N>, wiring: &Wiring, free_worker: Qpn) {
    write_chain(wiring, |program, p| write_instance(memory, wiring, free_worker, program, p));
}

fn write_instance<N: Nic>(
    memory: &Memory<N>,
    w: &Wiring,
    free_worker: Qpn,
    program: &mut Program,
    p: u32,
) {
    let shape = &memory.shape;
    let plan = Plan::new(program.next(), shape);
    let slot = w.slot(p);
    let to = |len: u32, block: u32, field: usize| w.to(len, block, field);
    let words = |offset: usize| memory.words.remote(offset);

    let wait = program.open(w, p);
    program.push(|b| {
        let row = to(8, plan.steer, offset::REMOTE_ADDR);
        b.masked_fetch_add(words(AVAIL), shape.take_permit(), shape.avail_boundary(), row);
    });
    program.push_at(plan.steer, |b| {
        let row = Remote { addr: 0, rkey: memory.steer.key() };
        b.rdma_read(
            row,
            &[
                to(8, plan.advance, offset::REMOTE_ADDR),
                to(16, plan.advance, offset::ATOMIC_ADD),
                to(1, plan.swap, offset::OPCODE),
                to(8, plan.entry, offset::REMOTE_ADDR),
            ],
        );
    });
    program.push_at(plan.advance, |b| {
        let old = to(8, plan.swap, offset::REMOTE_ADDR);
        b.masked_fetch_add(Remote { addr: 0, rkey: memory.words.key() }, 0, 0, old);
    });
    program.push_at(plan.swap, |b| {
        let slot = Remote { addr: 0, rkey: memory.queue.key() };
        let old = to(8, plan.entry, offset::REMOTE_ADDR);
        b.masked_compare_swap(slot, (0, 0), (0, u64::MAX), old);
    });
    program.push_at(plan.entry, |b| {
        let patched = (&plan.binds[..], &plan.tags[..], plan.owner);
        let dump = memory.dump.sge(0, DUMP_BYTES as u32);
        let scatter = entry_scatter(shape, patched, w, slot, dump);
        b.rdma_read(Remote { addr: 0, rkey: memory.table.key() }, scatter.list());
    });
    push_binds(memory, program, &plan.binds, free_worker);
    for (word, &block) in plan.tags.iter().enumerate() {
        let old = w.staging(slot, (reply::TAGS + 8 * word) as u32, 8);
        program.push_at(block, |b| {
            let tags = Remote { addr: 0, rkey: memory.table.key() };
            b.masked_fetch_add(tags, 0x0101_0101_0101_0101, 0x8080_8080_8080_8080, old);
        });
    }
    program.push_at(plan.owner, |b| {
        b.rdma_write(Remote { addr: 0, rkey: memory.table.key() }, &[w.owner_id()]);
    });
    program.finish(w, p, wait);
    assert_eq!(program.next(), plan.end(), "the chain's plan and its WQEs differ");

    w.write_reply(slot, w.first.wrapping_add(p), w.staging(slot, 0, reply::BYTES as u32));
    write_arguments(w, slot, &plan.binds);
}

/// Writes the BINDs of an entry's windows. A READ of the entry patches in keys and addresses, the
/// request the QPNs of all windows but the guard.
pub(super) fn push_binds<N: Nic>(
    memory: &Memory<N>,
    program: &mut Program,
    binds: &[u32],
    free_worker: Qpn,
) {
    for (j, &block) in binds.iter().enumerate() {
        let qpn = if j == 0 { free_worker } else { Qpn::NONE };
        let (mr, len) = (memory.chunks.key(), memory.shape.chunk_bytes as u32);
        let bind = Umr::bind(Key::default(), 0, qpn, Access::REMOTE_ALL, mr, 0, len);
        program.push_at(block, |b| {
            b.umr(&bind);
        });
    }
}

/// Writes the receive WQE of `slot`, which scatters a request over the BINDs and the reply.
pub(super) fn write_arguments(w: &Wiring, slot: Slot, binds: &[u32]) {
    let mut arguments = Scatter::default();
    for &bind in &binds[1..] {
        arguments.sge(w.to(3, bind, umr::QPN));
    }
    arguments.to(12, w.front_lkey, w.reply_field(slot, offset::REMOTE_ADDR));
    w.write_receive(slot, &arguments);
}

/// Resources held by a worker that stopped before building block `at`.
///
/// | stopped before | holds |
/// |---|---|
/// | #0, #1, #2 | nothing |
/// | #3, #4 | a permit |
/// | #5, with a permit | the slot that the head has passed, and its entry |
/// | #6 to #9, with a permit | the entry, some of its windows bound |
/// | #5 to #9, without a permit | nothing: the permit was returned |
/// | #10, #11 | nothing: `owner_id` names the client |
pub fn held_resources<N: Nic>(memory: &Memory<N>, ring: &Ring, at: u16, credits: u32) -> InFlight {
    let block = at as u32 % ring.entries;
    let instance = Plan::new(0, &memory.shape).end();
    if block >= instance * credits {
        return InFlight::default(); // the end of the lap
    }
    let plan = Plan::new(block - block % instance, &memory.shape);
    let field = |block: u32, field: usize| block as usize * WQEBB + field;
    let word = |block: u32| ring.memory.load_be64(field(block, offset::REMOTE_ADDR));
    if block < plan.steer || block > plan.owner {
        return InFlight::default();
    }
    if block <= plan.advance {
        return InFlight { permits: 1, ..InFlight::default() };
    }
    let value = if block == plan.swap {
        let mut op = [0];
        ring.memory.read(field(plan.swap, offset::OPCODE), &mut op);
        if op[0] != opcode::ATOMIC_MASKED_CS {
            return InFlight::default();
        }
        memory.take_slot(word(plan.swap))
    } else {
        word(plan.entry)
    };
    InFlight { entry: memory.entry_of(value), ..InFlight::default() }
}

/// Block of the WAIT of a position.
pub fn wait_block(shape: &layout::Shape, position: u32) -> u32 {
    Plan::new(0, shape).end() * position
}

/// Progress of a worker that stopped before building block `at`: the position of the unfinished
/// request, and whether its execution has begun. A request counts as finished once the grant's
/// owner is written.
pub fn unfinished(shape: &layout::Shape, ring: &Ring, at: u16, credits: u32) -> (u32, bool) {
    let block = at as u32 % ring.entries;
    let plan = Plan::new(0, shape);
    let (position, within) = (block / plan.end(), block % plan.end());
    match position < credits {
        true if within > plan.owner => ((position + 1) % credits, false),
        true => (position, within > 0),
        false => (0, false),
    }
}

/// Scatter list from an entry's bytes after T to the WQEs after the READ.
///
/// The WQEs are the BINDs, the FAAs on the tag words, and the WRITE of the owner.
pub(super) fn entry_scatter(
    shape: &layout::Shape,
    (binds, tags, owner): (&[u32], &[u32], u32),
    w: &Wiring,
    slot: Slot,
    dump: Sge,
) -> Scatter {
    let mut s = Scatter::default();
    for four in binds.chunks(4) {
        for field in [offset::UMR_KEY_TAG, umr::TAG] {
            for &bind in four {
                s.sge(w.to(1, bind, field));
            }
            s.skip(4 - four.len(), dump);
        }
    }
    for &bind in binds {
        s.sge(w.to(1, bind, offset::OPCODE));
        s.sge(w.to(3, bind, offset::UMR_KEY_INDEX));
        s.sge(w.to(8, bind, umr::START));
        s.sge(w.to(8, bind, umr::KLM_ADDR));
    }
    for &tags in tags {
        s.sge(w.to(8, tags, offset::REMOTE_ADDR));
    }
    s.sge(w.to(8, owner, offset::REMOTE_ADDR));
    let grant = w.staging(slot, 0, shape.grant_bytes() as u32);
    s.sge(grant);
    debug_assert_eq!(s.list().len() as u32, entry_read_sges(shape));
    s
}

fn entry_read_sges(shape: &layout::Shape) -> u32 {
    let group = shape.group as u32;
    let words = shape.tag_addresses() as u32;
    let dumps = if shape.group.is_multiple_of(4) { 0 } else { 2 };
    2 * group + dumps + 4 * group + words + 2
}

/// Building blocks of the READ of an entry.
pub(super) fn entry_read_blocks(shape: &layout::Shape) -> u32 {
    (2 + entry_read_sges(shape)).div_ceil(4)
}
