//! What the chains of a compute node have in flight: whether they are at rest, what a worker that
//! stopped in the middle has in hand, and which replies were never delivered.
//!
//! A compute node may die, break its management QPs, or be cut off at any moment of any chain. Its
//! requests stop coming in when its QPs at the memory node are reset; the chains need nothing from
//! it and run on. So the CPU waits until they are at rest, which is a matter of microseconds, and
//! of the time that clearing takes. What they did then stands in the table, but for two things:
//! a worker that an error stopped has something in hand ([`Hand`]), and a grant whose reply
//! was not delivered has an owner that does not know of it ([`undelivered`]).

use fabric::MemoryRegion;
use fabric::direct::{DirectNic, DirectQp};
use fabric::wqe::WQEBB;

use super::alloc_chain;
use super::layout::{Memory, reply, status};
use super::program::{PAIR, STAGING_BYTES};
use crate::Error;
use crate::chain::direction::{COUNT, Direction};

/// What a stopped worker took and did not put anywhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Hand {
    /// An entry that is neither in the free queue nor anybody's, or that is about to be nobody's.
    pub entry: Option<u32>,
    /// Permits to be given back, beside that of `entry`.
    pub permits: u32,
    /// Receives to be given to the push queue, beside that of `entry`.
    pub receives: u32,
}

/// The entries of `owner` whose grants were never delivered: of the allocations that came in, those
/// that were executed and not answered. The direction is closed and at rest.
pub(super) fn undelivered<N: DirectNic>(
    nic: &N,
    memory: &Memory<N>,
    d: &Direction<N>,
    (credits, owner): (u32, u64),
) -> Result<Vec<u32>, Error> {
    let received = nic.cq_count(&d.requests)?;
    // Each reply is a WRITE and a RECV_EN.
    let answered = (d.front.progress()?.executed - d.executed).div_ceil(2) as u32;
    let missing = received.wrapping_sub(d.opened).wrapping_sub(answered) & COUNT;
    // The number of the request that comes next.
    let next = d.first.wrapping_add(received.wrapping_sub(d.count) & COUNT);
    let unexecuted = match d.stopped {
        None => 0,
        Some(at) => unexecuted(memory, d, (at, credits), (received, next)),
    };
    let mut entries = Vec::new();
    for back in unexecuted + 1..=missing.min(credits) {
        let slot = (next.wrapping_sub(back) % credits * STAGING_BYTES) as usize;
        let staged = d.staging.memory().load_be32(slot + reply::ENTRY);
        let (entry, said) = (staged >> 8, staged as u8);
        // The owner may have freed what it was not told of, by guessing.
        let owned = entry < memory.shape.chunks && memory.owner(entry) == owner;
        if said == status::GRANTED && owned && !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    Ok(entries)
}

/// How many of the requests that came in the stopped worker of an alloc chain did not finish.
fn unexecuted<N: DirectNic>(
    memory: &Memory<N>,
    d: &Direction<N>,
    (at, credits): (u16, u32),
    (received, next): (u32, u32),
) -> u32 {
    let ring = d.worker.send_ring();
    let (position, begun) = alloc_chain::unfinished(&memory.shape, &ring, at, credits);
    if begun {
        // The last one of that position that came in.
        let last = next.wrapping_sub(1);
        return last.wrapping_sub(d.first).wrapping_sub(position) % credits + 1;
    }
    let wait = alloc_chain::wait_block(&memory.shape, position) as usize * WQEBB;
    received.wrapping_sub(ring.memory.load_be32(wait + PAIR)) & COUNT
}
