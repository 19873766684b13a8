//! The allocator of blocks, as the index sees it.

use std::future::Future;

use crate::error::Error;
use crate::place::Place;

/// The reason that no block was allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoBlock {
    /// The pool, or this compute node's share of the pool, has no chunk left.
    #[error("allocating a block: the pool is full; evict or delete keys, or donate more memory")]
    Full,
    /// The pool cannot be reached.
    #[error("allocating a block: {0}; connect and open the store again")]
    Lost(String),
}

/// A number of bytes, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of blocks in use.
    pub live: u64,
    /// Bytes of blocks that were retired and that a pinned reader may still know.
    pub limbo: u64,
    /// Bytes of the chunks held.
    pub held: u64,
    /// Number of chunks held.
    pub chunks: u64,
}

/// Allocates blocks for an index, in stripes: all blocks of a stripe are reached by one QP.
///
/// No block has place 0. The allocator keeps all its metadata at the compute node, so a successor
/// tells its allocator which blocks are in use ([`Blocks::adopt`]).
pub trait Blocks {
    /// Keeps retired blocks from being used again, until the pin is dropped.
    type Pin;

    /// Bytes of a slab: the longest block.
    fn slab(&self) -> u32;

    /// Allocates a block of at least `bytes` in `stripe`.
    fn allocate(&self, stripe: u32, bytes: u32) -> impl Future<Output = Result<Place, NoBlock>>;

    /// Allocates a block of a value. Only the blocks of values may lie on other memory nodes than
    /// the index. `spread` is the same for all blocks of a key: it chooses the memory node, as long
    /// as this has room.
    fn allocate_value(
        &self,
        stripe: u32,
        spread: u64,
        bytes: u32,
    ) -> impl Future<Output = Result<Place, NoBlock>> {
        let _ = spread;
        self.allocate(stripe, bytes)
    }

    /// Returns true if the memory node of `place` is gone, with all its blocks.
    fn is_gone(&self, place: Place) -> bool {
        let _ = place;
        false
    }

    /// Returns the number of memory nodes that are gone.
    fn gone_nodes(&self) -> u32 {
        0
    }

    /// Frees a block that no word in remote memory has named.
    fn release(&self, place: Place);

    /// Frees a block that no word in remote memory names any more, when no pin is left that was
    /// taken before this call.
    fn retire(&self, place: Place);

    /// Pins all blocks that can be reached now.
    fn pin(&self) -> Self::Pin;

    /// Takes over blocks of a predecessor: place, bytes and stripe of each.
    fn adopt(&self, used: &[(Place, u32, u32)]) -> Result<(), NoBlock>;

    /// Does the work that no operation waits for: frees retired blocks, returns chunks, fills the
    /// reserve.
    fn tend(&self) -> impl Future<Output = Result<(), NoBlock>>;

    /// Chooses chunks whose live share is below `share` percent, whose blocks are to move.
    /// Returns the number of chunks. No block is allocated in a chosen chunk.
    fn evacuate(&self, share: u32) -> usize;

    /// True if the block at `place` is to move.
    fn is_leaving(&self, place: Place) -> bool;

    /// The blocks in use of the slab that has `place`: their places and bytes.
    fn blocks_beside(&self, place: Place) -> Vec<(Place, u32)>;

    /// Keeps new blocks out of the slab that has `place` until [`Blocks::reuse`], or lets them in
    /// if its chunk has other slabs.
    fn vacate(&self, place: Place);

    /// Ends [`Blocks::vacate`].
    fn reuse(&self, place: Place);

    /// Frees retired blocks, and gives empty chunks back that blocks of other stripes could use,
    /// those of the reserve too.
    fn give_back(&self) -> impl Future<Output = Result<(), NoBlock>>;

    /// Ends the evacuation: chosen chunks that are not empty take blocks again.
    fn settle(&self);

    /// The bytes by use.
    fn usage(&self) -> Usage;
}

/// The length of a block, as its readers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// A slot or a list names the length.
    Named,
    /// The block has a list of pieces. A reader does not know its length, and reads to the end of
    /// the slab.
    Open,
}

/// Allocates blocks for an index that several compute nodes change.
///
/// A compute node frees blocks that another one has allocated. The index waits until no compute
/// node can know a block before it frees the block, so the allocator keeps no readers in mind.
pub trait SharedBlocks {
    /// Bytes of a slab: the longest block.
    fn slab(&self) -> u32;

    /// Allocates a block of at least `bytes`.
    fn allocate(&self, bytes: u32) -> impl Future<Output = Result<Place, Error>>;

    /// Allocates a block of a value: any block but the parts of the index.
    fn allocate_value(
        &self,
        bytes: u32,
        length: Length,
    ) -> impl Future<Output = Result<Place, Error>> {
        let _ = length;
        self.allocate(bytes)
    }

    /// Frees a block. `bytes`: the length for which the block was allocated, rounded up to 32 B or
    /// not. An allocator without a list of all blocks needs the length.
    fn release(&self, place: Place, bytes: u32);

    /// Does the work that no operation waits for.
    fn tend(&self) -> impl Future<Output = Result<(), Error>>;

    /// Frees all blocks but `used`, which are all that the index names: their places, and the bytes
    /// for which they were allocated. Returns the number of blocks that were not free before. No
    /// compute node but this one allocates or frees meanwhile.
    fn rebuild(&self, used: &[(Place, u32)]) -> impl Future<Output = Result<u64, Error>>;

    /// Gives back what this compute node has taken and not used, before it leaves.
    fn leave(&self) -> impl Future<Output = Result<(), Error>>;
}
