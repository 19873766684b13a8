//! How long the 7-bit timestamps of FineMem's headers last (FineMem §6.2, recovery capability): a count, on which no clock
//! has any influence.

use fabric::executor::block_on;
use fabric::soft::SoftNic;
use pool::finemem::Node;
use pool::scheme::{ClientScheme, Grant, NodeScheme};
use pool::{Error, GroupId, SchemeKind, Settings};

use crate::local::{self, Connection};
use crate::paper::load::Dice;

const CHUNK: u64 = 4096;
/// Timestamps that there are.
const AROUND: u32 = 128;
const SEED: u64 = 1;

/// Who allocates and frees until a timestamp has gone around.
#[derive(Clone, Copy, Debug)]
pub struct Churning {
    /// Chunks of 4 KiB that there are.
    pub chunks: u64,
    /// Compute nodes, which take turns chunk by chunk.
    pub compute_nodes: u32,
    /// Chunks that each holds.
    pub held: u32,
    /// How many of them, picked at random, it frees before it allocates as many.
    pub freed: u32,
}

/// Allocations of all compute nodes together until the first timestamp of all headers has gone around; `None` if none
/// has after `most`.
///
/// # Errors
/// What the pool says.
pub fn until_one_wraps(
    scheme: SchemeKind,
    churning: &Churning,
    most: u64,
) -> Result<Option<u64>, Error> {
    let settings = Settings {
        donate_bytes: churning.chunks * CHUNK,
        chunk_bytes: CHUNK,
        scheme,
        clients_max: churning.compute_nodes,
        ..Settings::default()
    };
    let nic = SoftNic::inline();
    let mut node = Node::new(&nic, &settings)?;
    let connections = (1..=churning.compute_nodes)
        .map(|number| local::connect(&nic, &mut node, &settings, number))
        .collect::<Result<Vec<Connection>, _>>()?;
    let mut held: Vec<Vec<Grant>> = vec![Vec::new(); connections.len()];
    let mut dice = Dice::new(SEED, 0);
    let books = node.books();
    let mut last: Vec<u32> = books.timestamps().collect();
    let mut moved = vec![0; last.len()];
    let (mut allocations, mut wanted) = (0, churning.held);
    loop {
        for _ in 0..wanted {
            for (connection, held) in connections.iter().zip(&mut held) {
                held.push(block_on(connection.client.allocate(GroupId(0)))?);
                allocations += 1;
            }
        }
        // Twice a round at least, in which no header's timestamp moves as far as half around: it moves only between
        // allocations and frees.
        look(books.timestamps(), &mut last, &mut moved);
        if moved.iter().any(|moved| *moved >= AROUND) {
            return Ok(Some(allocations));
        }
        if allocations >= most {
            return Ok(None);
        }
        for _ in 0..churning.freed {
            for (connection, held) in connections.iter().zip(&mut held) {
                let grant = held.swap_remove(dice.below(held.len() as u64) as usize);
                block_on(connection.client.free(&grant))?;
            }
        }
        // The rest, in which keys are made anew and quarantines end.
        let scanned = node.release_times().entries;
        while node.release_times().entries < scanned + 4 * churning.chunks {
            node.turn()?;
        }
        look(books.timestamps(), &mut last, &mut moved);
        wanted = churning.freed;
    }
}

/// Adds how far timestamps have moved since.
fn look(now: impl Iterator<Item = u32>, last: &mut [u32], moved: &mut [u32]) {
    for ((now, last), moved) in now.zip(last).zip(moved) {
        *moved += now.wrapping_sub(*last) % AROUND;
        *last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_goes_around_once_allocations_and_frees_have_alternated_64_times() {
        // No span is ever empty, and so none is opened or closed, which moves timestamps too: two moves of each header in
        // each round.
        let one = Churning { chunks: 512, compute_nodes: 1, held: 300, freed: 100 };
        let allocations = until_one_wraps(SchemeKind::FineMemPaper, &one, 100_000).unwrap();
        let rounds = (allocations.unwrap() - 300) / 100;
        assert!((63..=65).contains(&rounds), "{rounds} rounds");
        // Where all is freed they are, and a section's header has a part in each of that.
        let all = Churning { freed: 300, ..one };
        let sooner = until_one_wraps(SchemeKind::FineMemPaper, &all, 100_000).unwrap();
        assert!(sooner < allocations, "{sooner:?}");
        assert_eq!(until_one_wraps(SchemeKind::FineMemPaper, &one, 3000).unwrap(), None);
    }
}
