//! The allocation chain of OneSidedMW's figure 5 taken literally, for scheme `onesidedmw-paper`.
//!
//! | # | WQE | effect, and fields that it patches | in the paper (§4.3) |
//! |---|---|---|---|
//! | - | RECV | QPNs to BIND 1.. +68; reply address and rkey to the reply +16 | step 1 |
//! | 0 | WAIT | for the request's completion | "the request triggers" |
//! | 1 | FAA head, +16 | the old head is the address of #2 | step 2 |
//! | 2 | READ slot | the slot's value is the address of #4, its own address that of #3 | step 3 |
//! | 3 | WRITE 0 to the slot | | "detecting empty free MW queue" |
//! | 4 | READ entry | keys and addresses of #5, the address of #6, and the reply | step 4 |
//! | 5 | BIND each window | the guard to the free worker, the others to the access QPs | steps 5, 6 |
//! | 6 | WRITE owner_id | from the memory node's constant | "handling crashed CNs" |
//! | 7 | SEND_EN | the reply, which is on the Alloc QP | not in the figure |
//! | 8 | WRITE with immediate | the reply, in the Alloc QP's send queue | step 7 |
//!
//! That is 8 WQEs and one for each window of a group: 10 for the stores, whose groups have 2
//! windows, and 11 for the figure's 3 windows. The chain that re-arms itself has 16 and 17.
//!
//! The memory node's CPU re-posts WQEs that were executed. It posts the WQEs of many requests
//! ahead; the last WQE of every half of them is signaled, and its completion makes the CPU post as
//! many requests again.
//!
//! The paper leaves some details open. This chain decides them as follows:
//!
//! - A chain on the Alloc QP cannot have FAA and READ on the memory node's own memory, so #0 to #7
//!   are on the loopback worker, and #7 starts the reply.
//! - An atomic has one result, but both #2 and #3 need the slot's address. A slot therefore has a
//!   second word: its own address.
//! - #3 follows #2, so that no other WQE of the chain lies between the READ and the WRITE.
//! - The figure has no WQE that changes the tags of keys, so each window keeps its key.
//! - The paper does not say what happens to the request that found no entry, to its WQEs, and to
//!   the head, which has passed an empty slot. The CPU answers the requests in flight with EMPTY
//!   and posts their WQEs again. The head stays, because the CPU cannot set it back while other
//!   chains advance it.
//! - The figure has no free chain. Frees use the [`free_chain`](super::free_chain), which re-arms
//!   itself.

use std::ops::Range;

use scheme::Error;
use verbs::direct::{DirectNic, DirectQp, Ring};
use verbs::wqe::{WQEBB, offset};
use verbs::{MemoryRegion, Nic, QpState, Qpn, QueuePair, Remote};

use super::alloc_chain::{entry_read_blocks, entry_scatter, push_binds, write_arguments};
use super::layout::{self, DUMP_BYTES, Memory, reply};
use super::program::{Program, Wiring};
use crate::chain::in_flight::InFlight;
use crate::chain::queues::{COUNT, ChainQueues};

/// Building blocks of a reply: the WRITE with immediate.
pub const REPLY_BLOCKS: u32 = 1;
/// Least number of requests whose WQEs are posted ahead.
const AHEAD_MIN: u32 = 32;

/// WQEs that one allocation executes, the reply included.
pub const fn wqes(group: usize) -> u32 {
    8 + group as u32
}

/// Requests whose WQEs are posted ahead, with these credits: a power of two. A client that keeps to
/// its credits waits for the CPU only if the CPU is late by half of them.
pub fn ahead(credits: u32) -> u32 {
    (2 * credits).max(AHEAD_MIN)
}

/// Building-block indices of the WQEs of one instance, from its first WQE on.
struct Plan {
    slot: u32,
    zero: u32,
    entry: u32,
    binds: Vec<u32>,
    owner: u32,
    end: u32,
}

impl Plan {
    fn new(start: u32, shape: &layout::Shape) -> Self {
        let slot = start + 2;
        let entry = slot + 2;
        let first_bind = entry + entry_read_blocks(shape);
        let binds: Vec<u32> = (0..shape.group as u32).map(|j| first_bind + 3 * j).collect();
        let owner = first_bind + 3 * shape.group as u32;
        Self { slot, zero: slot + 1, entry, binds, owner, end: start + instance_blocks(shape) }
    }
}

/// Building blocks of an instance: 6 WQEs of one block, the READ of the entry, and the BINDs.
fn instance_blocks(shape: &layout::Shape) -> u32 {
    6 + entry_read_blocks(shape) + 3 * shape.group as u32
}

/// Building blocks of a ring with room for `ahead` instances.
pub fn ring_blocks(shape: &layout::Shape, ahead: u32) -> u32 {
    (instance_blocks(shape) * (ahead + 1)).next_power_of_two()
}

/// Instances of one lap of a ring.
fn instances(shape: &layout::Shape, ring_entries: u32) -> u64 {
    u64::from(ring_entries / instance_blocks(shape))
}

/// Index of the first building block of a request's instance, from the first lap on.
fn place(shape: &layout::Shape, ring_entries: u32, request: u64) -> u64 {
    let each = instances(shape, ring_entries);
    let within = request % each * u64::from(instance_blocks(shape));
    request / each * u64::from(ring_entries) + within
}

/// Writes the replies of all slots. Their addresses come with the requests.
pub fn write_replies(w: &Wiring) {
    for p in 0..w.credits {
        let slot = w.slot(p);
        w.write_answer(slot, w.staging(slot, 0, reply::BYTES as u32));
    }
}

/// Writes the WQEs of `requests`, counted from the request `w.first`. Returns the limit up to which
/// the worker may then execute.
pub fn write<N: Nic>(
    memory: &Memory<N>,
    w: &Wiring,
    free_worker: Qpn,
    requests: Range<u64>,
) -> u16 {
    let (shape, entries) = (&memory.shape, w.worker_ring.entries);
    for request in requests.clone() {
        write_instance(memory, w, free_worker, request);
    }
    place(shape, entries, requests.end) as u16
}

fn write_instance<N: Nic>(memory: &Memory<N>, w: &Wiring, free_worker: Qpn, request: u64) {
    let (shape, entries) = (&memory.shape, w.worker_ring.entries);
    let position = (request % u64::from(w.credits)) as u32;
    let slot = w.slot(position);
    let at = place(shape, entries, request);
    let mut program = Program::resume(w.worker_ring.clone(), w.worker, at);
    let plan = Plan::new(program.next(), shape);
    let to = |block: u32| w.to(8, block, offset::REMOTE_ADDR);
    let nowhere = |rkey| Remote { addr: 0, rkey };

    program.push(|b| {
        b.wait(w.recv_cq, w.count.wrapping_add(request as u32) & COUNT);
    });
    program.push(|b| {
        let head = memory.words.remote(0);
        b.masked_fetch_add(head, shape.slot_bytes(), shape.head_boundary(), to(plan.slot));
    });
    program.push_at(plan.slot, |b| {
        b.rdma_read(nowhere(memory.queue.key()), &[to(plan.entry), to(plan.zero)]);
    });
    program.push_at(plan.zero, |b| {
        b.rdma_write(nowhere(memory.queue.key()), &[memory.zeros.sge(0, 8)]);
    });
    program.push_at(plan.entry, |b| {
        let dump = memory.dump.sge(0, DUMP_BYTES as u32);
        let scatter = entry_scatter(shape, (&plan.binds[..], &[][..], plan.owner), w, slot, dump);
        b.rdma_read(nowhere(memory.table.key()), scatter.list());
    });
    push_binds(memory, &mut program, &plan.binds, free_worker);
    program.push_at(plan.owner, |b| {
        b.rdma_write(nowhere(memory.table.key()), &[w.owner_id()]);
    });
    let is_last = (request + 1).is_multiple_of(u64::from(w.credits / 2));
    program.push(|b| {
        let limit = w.first.wrapping_add(request as u32).wrapping_add(1);
        b.send_enable(w.front, (REPLY_BLOCKS * limit) & 0xffff);
        if is_last {
            b.signaled();
        }
    });
    assert_eq!(program.next(), plan.end, "the chain's plan and its WQEs differ");
    if (request + 1).is_multiple_of(instances(shape, entries)) {
        program.fill(entries);
    }
    write_arguments(w, slot, &plan.binds);
}

/// Posts the WQEs of half of the requests that are posted ahead, after as many were executed.
///
/// A worker that is not connected is left alone: its chain is written again when it is.
pub fn post_again<N: DirectNic>(
    memory: &Memory<N>,
    d: &mut ChainQueues<N>,
    free_worker: Qpn,
) -> Result<(), Error> {
    if d.worker.state()? != QpState::ReadyToSend {
        return Ok(());
    }
    let end = d.posted + u64::from(d.credits / 2);
    let limit = write(memory, &d.wiring(memory.dump.sge(0, 8)), free_worker, d.posted..end);
    d.worker.enable_send(limit)?;
    d.posted = end;
    if d.front.state()? == QpState::ReadyToSend {
        d.front.enable_recv(d.first.wrapping_add(end as u32))?;
    }
    Ok(())
}

/// Where a worker stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stopped {
    /// The first request that was not executed, counted from the request `first`. A request counts
    /// as executed once the grant's owner is written.
    pub request: u64,
    /// True if the queue was empty: the READ of the entry has a null address.
    pub empty: bool,
}

/// State of a worker that stopped before building block `at`.
pub fn stopped_at<N: DirectNic>(memory: &Memory<N>, d: &ChainQueues<N>, at: u16) -> Stopped {
    let (shape, ring) = (&memory.shape, d.worker.send_ring());
    let each = instances(shape, ring.entries);
    let (block, plan, position) = locate(shape, ring.entries, at);
    // The instances that are posted ahead take less than a lap.
    let last = d.posted - 1;
    let request = last.saturating_sub((last + each - position) % each);
    let executed = block > plan.owner;
    let empty = block == plan.entry && entry_address(&ring, &plan) == 0;
    Stopped { request: request + u64::from(executed), empty }
}

/// Resources held by a worker that stopped before building block `at`.
///
/// | stopped before | holds |
/// |---|---|
/// | #0, #1 | nothing |
/// | #2, #3 | the slot that the head has passed, and its entry |
/// | #4 to #6 | the entry, some of its windows bound; nothing if the queue was empty |
/// | #7 | nothing: `owner_id` names the client |
pub fn held_resources<N: Nic>(memory: &Memory<N>, ring: &Ring, at: u16) -> InFlight {
    let (block, plan, _) = locate(&memory.shape, ring.entries, at);
    if block < plan.slot || block > plan.owner {
        return InFlight::default();
    }
    let value = match block <= plan.zero {
        true => memory.take_slot(address(ring, plan.slot)),
        false => entry_address(ring, &plan),
    };
    InFlight { entry: memory.entry_of(value), ..InFlight::default() }
}

/// The building block `at` in its ring, its instance, and the instance's position in the lap.
///
/// NOPs at the end of the lap belong to the last instance.
fn locate(shape: &layout::Shape, ring_entries: u32, at: u16) -> (u32, Plan, u64) {
    let block = u32::from(at) % ring_entries;
    let len = instance_blocks(shape);
    let position = u64::from(block / len).min(instances(shape, ring_entries) - 1);
    (block, Plan::new(position as u32 * len, shape), position)
}

fn address(ring: &Ring, block: u32) -> u64 {
    ring.memory.load_be64(block as usize * WQEBB + offset::REMOTE_ADDR)
}

fn entry_address(ring: &Ring, plan: &Plan) -> u64 {
    address(ring, plan.entry)
}
