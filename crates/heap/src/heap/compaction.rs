//! Hooks for a caller that moves blocks out of sparse chunks.

use pool::GroupId;

use super::{Block, Heap};
use crate::classes::Class;
use crate::error::Error;
use crate::place::Place;
use crate::source::ChunkSource;
use crate::state::State;

/// Slots that one call looks at while it holds a group's lock.
const SLOTS: u32 = 256;

/// Use of a chunk that has blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkUse {
    /// The chunk's first byte, by which the heap's calls name the chunk.
    pub place: Place,
    /// Bytes of the live blocks.
    pub live_bytes: u64,
    /// Bytes of the blocks in limbo.
    pub limbo_bytes: u64,
    /// Classes of the blocks: one, unless the chunk has several slabs.
    pub classes: Vec<Class>,
    /// No new block is allocated in the chunk.
    pub is_evacuating: bool,
}

/// Compaction.
///
/// The caller chooses a sparse chunk, calls [`Heap::evacuate`], copies each live block to a new
/// one, changes its index, and frees the old block. The chunk becomes empty when the last block has
/// left limbo. A caller that cannot move all blocks calls [`Heap::stop_evacuation`].
impl<S: ChunkSource> Heap<S> {
    /// The use of the chunks of `group` whose live blocks take at most `most_live` of the chunk,
    /// the sparsest first, at most `most_chunks`. Without empty chunks, and without those that are
    /// being evacuated.
    pub fn sparse(
        &self,
        group: GroupId,
        most_live: f64,
        most_chunks: usize,
    ) -> Result<Vec<ChunkUse>, Error> {
        let most = most_live * self.classes().chunk_bytes() as f64;
        let mut found: Vec<(u64, u32)> = Vec::new();
        let slots = self.state(group)?.slots();
        for from in (0..slots).step_by(SLOTS as usize) {
            // Other threads get the lock between the parts.
            let state = self.state(group)?;
            let live = |slot| Some((state.evacuable_bytes(slot)?, slot));
            let is_sparse = |chunk: &(u64, u32)| chunk.0 as f64 <= most;
            found.extend((from..slots.min(from + SLOTS)).filter_map(live).filter(is_sparse));
        }
        found.sort_unstable();
        found.truncate(most_chunks);
        let state = self.state(group)?;
        Ok(found.into_iter().filter_map(|(_, slot)| state.chunk_use(slot)).collect())
    }

    /// The use of the chunk at `place`. `None` for an empty chunk, or a chunk that the heap does
    /// not have.
    pub fn chunk_use(&self, place: Place) -> Option<ChunkUse> {
        self.with_chunk(place, |state, slot| state.chunk_use(slot))?
    }

    /// Keeps new blocks out of the chunk at `place` until it is empty, or until
    /// [`Heap::stop_evacuation`]. An empty chunk stays as it is.
    pub fn evacuate(&self, place: Place) -> Result<(), Error> {
        self.set_evacuating("evacuating", place, true)
    }

    /// Allows new blocks in the chunk at `place` again.
    pub fn stop_evacuation(&self, place: Place) -> Result<(), Error> {
        self.set_evacuating("ending the evacuation of", place, false)
    }

    /// At most `most` live blocks of the chunk at `place` that begin behind `after`, by place. The
    /// last block is `after` of the next call. Blocks that are freed meanwhile are not returned.
    pub fn live_blocks(
        &self,
        place: Place,
        after: Option<Place>,
        most: usize,
    ) -> Result<Vec<Block>, Error> {
        let live = |state: &mut State<_>, slot| state.live_blocks(slot, after, most);
        let attempt = "listing the blocks of";
        self.with_chunk(place, live).ok_or(Error::NoChunk { attempt, place })
    }

    fn set_evacuating(
        &self,
        attempt: &'static str,
        place: Place,
        is_evacuating: bool,
    ) -> Result<(), Error> {
        let set = |state: &mut State<_>, slot| state.set_evacuating(slot, is_evacuating);
        self.with_chunk(place, set).ok_or(Error::NoChunk { attempt, place })
    }
}
