//! Memory regions as the mechanism that opens chunks: one region per allocated chunk, in the PD of
//! its owner.

use scheme::index::EntryId;
use verbs::{Key, MemoryRegion, Nic};

/// Chunks that `static-mr` registers in advance per compute node: one to be allocated, and one for
/// the time in which the next is registered.
pub const AHEAD: usize = 2;

/// The regions of all blocks.
pub struct Regions<N: Nic> {
    regions: Vec<Option<N::Mr>>,
}

impl<N: Nic> Regions<N> {
    /// No region is registered yet for any of `count` blocks.
    pub fn new(count: u32) -> Self {
        Self { regions: (0..count).map(|_| None).collect() }
    }

    /// Key of a registered chunk; an invalid key if it has no region.
    pub fn key(&self, entry: EntryId) -> Key {
        self.regions[entry.as_usize()].as_ref().map_or(Key::default(), |region| region.key())
    }

    /// Opens a chunk with `region`.
    pub fn open(&mut self, entry: EntryId, region: N::Mr) {
        let old = self.regions[entry.as_usize()].replace(region);
        assert!(old.is_none(), "entry {entry} is registered twice");
    }

    /// Removes a chunk's region. Dropping it invalidates its key; because that takes time, the
    /// caller drops it without holding the lock.
    pub fn close(&mut self, entry: EntryId) -> Option<N::Mr> {
        self.regions[entry.as_usize()].take()
    }
}
