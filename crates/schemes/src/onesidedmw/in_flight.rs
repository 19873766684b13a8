//! State that a client's chains have in flight: whether the chains are at rest, the resources that
//! a stopped worker holds, and the replies that were never delivered.
//!
//! A client may die, break its management QPs, or be disconnected at any step of any chain. Its
//! requests stop when the memory node resets its own QPs; the chains need nothing from the client
//! and continue. The CPU therefore waits until the chains are at rest, which takes microseconds
//! plus the time to clear a chunk. The table then records the effects of the chains, with two
//! exceptions: a worker that an error stopped holds resources
//! ([`InFlight`](crate::chain::in_flight::InFlight)), and a grant whose reply was not delivered has
//! an owner that does not know of the grant ([`undelivered`]).

use super::layout::granted_entry;
use super::program::staging_offset;
use scheme::Error;
use scheme::index::{EntryId, Slot};
use verbs::MemoryRegion;
use verbs::direct::{DirectNic, DirectQp};
use verbs::wqe::WQEBB;

use super::layout::{Memory, reply, status};
use super::program::PAIR;
use super::{alloc_chain, published_chain};
use crate::chain::queues::{COUNT, ChainQueues};

/// Entries of `owner` whose grants were never delivered: allocations that were received and
/// executed but not answered. The connection must be closed and at rest.
pub(super) fn undelivered<N: DirectNic>(
    nic: &N,
    memory: &Memory<N>,
    d: &ChainQueues<N>,
    owner: u64,
) -> Result<Vec<EntryId>, Error> {
    let credits = d.credits;
    let received = nic.cq_count(&d.requests)?;
    // A reply is a WRITE and a RECV_EN, or a WRITE alone.
    let executed = d.front.progress()?.executed - d.executed;
    let answered = executed.div_ceil(d.reply_blocks.into()) as u32;
    let missing = received.wrapping_sub(d.opened).wrapping_sub(answered) & COUNT;
    // Number of the next request.
    let next = d.first.wrapping_add(received.wrapping_sub(d.count) & COUNT);
    let unexecuted = match d.stopped {
        None => 0,
        Some(at) if memory.shape.published => {
            let executed = published_chain::stopped_at(memory, d, at).request as u32;
            received.wrapping_sub(d.count).wrapping_sub(executed) & COUNT
        }
        Some(at) => unexecuted(memory, d, (at, credits), (received, next)),
    };
    let mut entries = Vec::new();
    for back in unexecuted + 1..=missing.min(credits) {
        let at = staging_offset(Slot::of_request(next.wrapping_sub(back), credits));
        let staged = d.staging.memory().load_be32(at + reply::ENTRY);
        let (entry, said) = (granted_entry(staged), staged as u8);
        // The owner may have freed an undelivered grant by guessing its index.
        let owned = entry < memory.shape.null_entry() && memory.owner(entry) == owner;
        if said == status::GRANTED && owned && !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    Ok(entries)
}

/// Number of received requests that the stopped worker of an alloc chain did not finish.
fn unexecuted<N: DirectNic>(
    memory: &Memory<N>,
    d: &ChainQueues<N>,
    (at, credits): (u16, u32),
    (received, next): (u32, u32),
) -> u32 {
    let ring = d.worker.send_ring();
    let (position, begun) = alloc_chain::unfinished(&memory.shape, &ring, at, credits);
    if begun {
        // The last received request of that position.
        let last = next.wrapping_sub(1);
        return last.wrapping_sub(d.first).wrapping_sub(position) % credits + 1;
    }
    let wait = alloc_chain::wait_block(&memory.shape, position) as usize * WQEBB;
    received.wrapping_sub(ring.memory.load_be32(wait + PAIR)) & COUNT
}
