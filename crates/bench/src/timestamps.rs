//! Number of allocations until a 7-bit timestamp of FineMem's headers wraps around (FineMem §6.2,
//! recovery capability). The result is a count and independent of any clock.

use pool::{Error, GroupId, Scheme, Settings};
use rnic::nic::SoftNic;
use scheme::{ClientScheme, Grant, NodeScheme};
use schemes::finemem::Node;
use verbs::executor::block_on;

use crate::inline_client::{self, Connection};
use units::Random;

const CHUNK: u64 = 4096;
/// Number of distinct timestamps.
const TIMESTAMPS: u32 = 128;
const SEED: u64 = 1;

/// Parameters of the workload: clients that allocate and free chunks in rounds.
#[derive(Clone, Copy, Debug)]
pub struct WrapWorkload {
    /// Chunks of 4 KiB in the pool.
    pub chunks: u64,
    /// Compute nodes; they allocate and free one chunk each in round-robin order.
    pub compute_nodes: u32,
    /// Chunks that each compute node holds.
    pub held: u32,
    /// Chunks, picked at random, that each compute node frees and allocates again in a round.
    pub freed: u32,
}

/// Allocations of all compute nodes until the first timestamp of any header has wrapped around;
/// `None` if no timestamp has wrapped around after `limit` allocations.
///
/// # Errors
/// Errors of the pool.
pub fn allocations_until_wrap(
    scheme: Scheme,
    workload: &WrapWorkload,
    limit: u64,
) -> Result<Option<u64>, Error> {
    let settings = Settings {
        donate_bytes: workload.chunks * CHUNK,
        chunk_bytes: CHUNK,
        scheme,
        clients_max: workload.compute_nodes,
        ..Settings::default()
    }
    .node()?;
    let nic = SoftNic::inline();
    let mut node = Node::new(&nic, &settings)?;
    let connections = (1..=workload.compute_nodes)
        .map(|number| inline_client::connect(&nic, &mut node, &settings, number))
        .collect::<Result<Vec<Connection>, _>>()?;
    let mut held: Vec<Vec<Grant>> = vec![Vec::new(); connections.len()];
    let mut rng = Random::stream(SEED, 0);
    let books = node.allocation_view();
    let mut last: Vec<u32> = books.timestamps().collect();
    let mut moved = vec![0; last.len()];
    let (mut allocations, mut wanted) = (0, workload.held);
    loop {
        for _ in 0..wanted {
            for (connection, held) in connections.iter().zip(&mut held) {
                held.push(block_on(connection.client.allocate(GroupId(0)))?);
                allocations += 1;
            }
        }
        // Sampled twice per round. Between two samples no timestamp moves by half of its range,
        // because it moves only when allocations and frees alternate.
        add_movement(books.timestamps(), &mut last, &mut moved);
        if moved.iter().any(|moved| *moved >= TIMESTAMPS) {
            return Ok(Some(allocations));
        }
        if allocations >= limit {
            return Ok(None);
        }
        for _ in 0..workload.freed {
            for (connection, held) in connections.iter().zip(&mut held) {
                let grant = held.swap_remove(rng.below(held.len() as u64) as usize);
                block_on(connection.client.free(&grant))?;
            }
        }
        // Polls the node until it has regenerated keys and ended quarantines.
        let scanned = node.release_times().entries;
        while node.release_times().entries < scanned + 4 * workload.chunks {
            node.poll()?;
        }
        add_movement(books.timestamps(), &mut last, &mut moved);
        wanted = workload.freed;
    }
}

/// Adds to `moved` the distance that each timestamp has moved since `last`.
fn add_movement(now: impl Iterator<Item = u32>, last: &mut [u32], moved: &mut [u32]) {
    for ((now, last), moved) in now.zip(last).zip(moved) {
        *moved += now.wrapping_sub(*last) % TIMESTAMPS;
        *last = now;
    }
}

#[cfg(test)]
mod tests {
    use pool::schemes;

    use super::*;

    #[test]
    fn timestamp_wraps_after_64_alternations() {
        // No span is ever empty, so no span is opened or closed, which would move timestamps as
        // well. Each header's timestamp moves twice per round.
        let partial = WrapWorkload { chunks: 512, compute_nodes: 1, held: 300, freed: 100 };
        let allocations =
            allocations_until_wrap(schemes::FINEMEM_PAPER, &partial, 100_000).unwrap();
        let rounds = (allocations.unwrap() - 300) / 100;
        assert!((63..=65).contains(&rounds), "{rounds} rounds");
        // If all chunks are freed, spans become empty. Each opening or closing of a span moves the
        // timestamp of its section's header.
        let full = WrapWorkload { freed: 300, ..partial };
        let sooner = allocations_until_wrap(schemes::FINEMEM_PAPER, &full, 100_000).unwrap();
        assert!(sooner < allocations, "{sooner:?}");
        let limited = allocations_until_wrap(schemes::FINEMEM_PAPER, &partial, 3000).unwrap();
        assert_eq!(limited, None);
    }
}
