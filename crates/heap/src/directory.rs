//! The chunks of a heap by their places.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::place::Place;

/// Chunks of a table.
const TABLE_BITS: u32 = 12;
const TABLE: usize = 1 << TABLE_BITS;

/// Maximum number of chunks of a memory node. No scheme has more.
pub(crate) const CHUNKS_MAX: u64 = 1 << (2 * TABLE_BITS);

/// A chunk in a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkId {
    /// Index of the group that has the chunk.
    pub group: u16,
    /// Number of the chunk in its group.
    pub slot: u32,
}

impl ChunkId {
    /// The entry of the chunk. 0 is no chunk.
    fn entry(self) -> u64 {
        (u64::from(self.group) << 32 | u64::from(self.slot)) + 1
    }

    fn from_entry(entry: u64) -> Option<Self> {
        let bits = entry.checked_sub(1)?;
        Some(Self { group: (bits >> 32) as u16, slot: bits as u32 })
    }
}

type Table = OnceLock<Box<[AtomicU64]>>;
type Node = OnceLock<Box<[Table]>>;

/// Finds the group of a place without a lock. Tables are made when the first chunk in their range
/// arrives, and are kept.
pub(crate) struct Directory {
    nodes: Box<[Node]>,
    chunk_bytes: u64,
}

impl Directory {
    pub fn new(chunk_bytes: u64) -> Self {
        let nodes = (0..=u8::MAX).map(|_| Node::new()).collect();
        Self { nodes, chunk_bytes }
    }

    /// The chunk that has `place`. Its group may give the chunk back before the caller has the
    /// group's lock.
    #[inline]
    pub fn find(&self, place: Place) -> Option<ChunkId> {
        let number = place.offset() / self.chunk_bytes;
        let tables = self.nodes[usize::from(place.node())].get()?;
        let table = tables.get((number >> TABLE_BITS) as usize)?.get()?;
        ChunkId::from_entry(table[number as usize % TABLE].load(Ordering::Acquire))
    }

    /// True if a chunk can lie at `place`.
    pub fn has_room(&self, place: Place) -> bool {
        let offset = place.offset();
        offset.is_multiple_of(self.chunk_bytes) && offset / self.chunk_bytes < CHUNKS_MAX
    }

    /// Enters the chunk at `place`, for which there must be room. False if there is one already.
    pub fn enter(&self, place: Place, chunk: ChunkId) -> bool {
        let set = self.entry(place);
        set.compare_exchange(0, chunk.entry(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Removes the chunk at `place`.
    pub fn remove(&self, place: Place) {
        self.entry(place).store(0, Ordering::Release);
    }

    fn entry(&self, place: Place) -> &AtomicU64 {
        let number = place.offset() / self.chunk_bytes;
        let tables = self.nodes[usize::from(place.node())]
            .get_or_init(|| (0..TABLE).map(|_| Table::new()).collect());
        let table = tables[(number >> TABLE_BITS) as usize]
            .get_or_init(|| (0..TABLE).map(|_| AtomicU64::new(0)).collect());
        &table[number as usize % TABLE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_found_by_every_place_in_them() {
        let directory = Directory::new(4096);
        let at = |node, offset| Place::new(node, offset).unwrap();
        let chunk = ChunkId { group: u16::MAX, slot: u32::MAX - 1 };
        assert!(directory.enter(at(3, 8192), chunk));
        assert!(!directory.enter(at(3, 8192), ChunkId { group: 0, slot: 0 }));
        assert_eq!(directory.find(at(3, 8192 + 4064)), Some(chunk));
        for other in [at(3, 4064), at(3, 12288), at(2, 8192), at(3, Place::OFFSET_MAX)] {
            assert_eq!(directory.find(other), None);
        }
        directory.remove(at(3, 8192));
        assert_eq!(directory.find(at(3, 8192)), None);
        assert!(directory.enter(at(3, 8192), ChunkId { group: 0, slot: 0 }));
    }

    #[test]
    fn room_ends_at_the_last_chunk() {
        let directory = Directory::new(512);
        let at = |offset| Place::new(0, offset).unwrap();
        assert!(directory.has_room(at((CHUNKS_MAX - 1) * 512)));
        assert!(!directory.has_room(at(CHUNKS_MAX * 512)));
        assert!(!directory.has_room(at(256)));
        assert!(directory.enter(at((CHUNKS_MAX - 1) * 512), ChunkId { group: 0, slot: 0 }));
    }
}
