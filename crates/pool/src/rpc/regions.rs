//! Memory regions as what opens chunks: one for a chunk while it has an owner, in that compute node's
//! own PD.

use fabric::{Key, MemoryRegion, Nic};

/// Chunks that `static-mr` registers ahead for each compute node: one to be given, and one for while
/// the next is being registered.
pub const AHEAD: usize = 2;

/// The regions of chunks.
pub struct Regions<N: Nic> {
    regions: Vec<Option<N::Mr>>,
}

impl<N: Nic> Regions<N> {
    /// None of `count` blocks is registered.
    pub fn new(count: u32) -> Self {
        Self { regions: (0..count).map(|_| None).collect() }
    }

    /// The key of a chunk that is registered; otherwise one that opens nothing.
    pub fn key(&self, entry: u32) -> Key {
        self.regions[entry as usize].as_ref().map_or(Key::default(), |region| region.key())
    }

    /// A chunk is open by `region`.
    pub fn open(&mut self, entry: u32, region: N::Mr) {
        let old = self.regions[entry as usize].replace(region);
        assert!(old.is_none(), "entry {entry} is registered twice");
    }

    /// A chunk's region: when it is dropped, its key is dead. Not under the lock: that takes time.
    pub fn close(&mut self, entry: u32) -> Option<N::Mr> {
        self.regions[entry as usize].take()
    }
}
