//! The allocator of a checked run: one that notices errors at once, or that of a region.

use std::sync::Arc;

use crate::blocks::SharedBlocks;
use crate::error::Error;
use crate::memory::{Arena, Client, Memory, Seeded};
use crate::place::Place;
use crate::region::RegionBlocks;

/// The memory that the allocators of a run share.
pub(super) enum Shared {
    /// All compute nodes have one allocator, which overwrites blocks that are freed.
    Arena(Arena),
    /// Each compute node has an allocator of its own in the region with this header.
    Region(Place),
}

/// The allocator of one compute node.
pub(super) enum Allocator {
    Arena(Arena),
    Region(RegionBlocks<Arc<Client>>),
}

impl Shared {
    /// The memory of a run.
    pub async fn new(memory: &Arc<Memory>, random: &mut Seeded) -> Result<Self, Error> {
        if random.below(2) == 0 {
            return Ok(Self::Arena(Arena::new(memory.clone(), 0, 4096)));
        }
        // Few chunks change their class. Some between belong to other users of the memory node.
        let count = [120, 200, 1000][random.below(3) as usize];
        let chunks: Vec<u64> =
            (0..2 * count).filter(|_| random.below(3) > 0).take(count as usize).collect();
        let client = Arc::new(Client::new(memory.clone(), false));
        let header = RegionBlocks::create(&client, 0, memory.chunk(), &chunks).await?;
        Ok(Self::Region(header))
    }

    /// The allocator of the compute node `client`.
    pub async fn join(&self, client: &Arc<Client>) -> Result<Allocator, Error> {
        Ok(match self {
            Self::Arena(arena) => Allocator::Arena(arena.clone()),
            Self::Region(header) => {
                Allocator::Region(RegionBlocks::join(client.clone(), *header).await?)
            }
        })
    }

    /// Frees of blocks that were not in use.
    pub fn wrong_frees(&self) -> u64 {
        match self {
            Self::Arena(arena) => arena.wrong_frees(),
            Self::Region(_) => 0,
        }
    }
}

impl Allocator {
    /// Number of blocks in use. `others`: the allocators of the other compute nodes.
    pub async fn used<'a>(&self, others: impl Iterator<Item = &'a Self>) -> Result<usize, Error> {
        let held = |allocator: &Self| match allocator {
            Self::Arena(_) => 0,
            Self::Region(region) => region.held_blocks(),
        };
        match self {
            Self::Arena(arena) => Ok(arena.used().len()),
            Self::Region(region) => {
                let taken = region.usage().await?.taken_blocks;
                let held = held(self) + others.map(held).sum::<u64>();
                let used = taken.checked_sub(held);
                let wrong = Error::Setting("more blocks are free than were taken");
                used.map(|used| used as usize).ok_or(wrong)
            }
        }
    }
}

impl SharedBlocks for Allocator {
    fn slab(&self) -> u32 {
        match self {
            Self::Arena(arena) => SharedBlocks::slab(arena),
            Self::Region(region) => region.slab(),
        }
    }

    async fn allocate(&self, bytes: u32) -> Result<Place, Error> {
        match self {
            Self::Arena(arena) => SharedBlocks::allocate(arena, bytes).await,
            Self::Region(region) => region.allocate(bytes).await,
        }
    }

    fn release(&self, place: Place, bytes: u32) {
        match self {
            Self::Arena(arena) => SharedBlocks::release(arena, place, bytes),
            Self::Region(region) => region.release(place, bytes),
        }
    }

    async fn tend(&self) -> Result<(), Error> {
        match self {
            Self::Arena(arena) => SharedBlocks::tend(arena).await,
            Self::Region(region) => region.tend().await,
        }
    }

    async fn rebuild(&self, used: &[(Place, u32)]) -> Result<u64, Error> {
        match self {
            Self::Arena(arena) => arena.rebuild(used).await,
            Self::Region(region) => region.rebuild(used).await,
        }
    }

    async fn leave(&self) -> Result<(), Error> {
        match self {
            Self::Arena(arena) => arena.leave().await,
            Self::Region(region) => region.leave().await,
        }
    }
}
