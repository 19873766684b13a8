//! Blocks that the compute node keeps, so that reads of their keys need no round trip.
//!
//! An entry is the block at a place. A value is written to a new place each time, so an entry of
//! the place that a slot names is the key's present value. The entry of a place is removed before
//! the place is used for another block. A reader that adds an entry pins the blocks meanwhile, so
//! an entry cannot come late.
//!
//! Which entries are dropped is decided by the CLOCK algorithm: an entry that was used since the
//! hand passed it stays for another turn.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::place::Place;

const SHARDS: usize = 16;
/// Bytes of an entry besides its block: the place twice, lengths, and the memory allocator's share.
const ENTRY_BYTES: usize = 96;

/// The blocks that are kept.
pub(super) struct Cache {
    shards: Box<[Mutex<Shard>]>,
    /// Bytes of a shard.
    most: usize,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Default)]
struct Shard {
    /// The position of each place in `entries`.
    of: HashMap<Place, usize>,
    entries: Vec<Entry>,
    hand: usize,
    bytes: usize,
}

struct Entry {
    place: Place,
    is_used: bool,
    block: Box<[u8]>,
}

/// Counts of the value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Bytes of the entries.
    pub bytes: u64,
    /// Number of entries.
    pub entries: u64,
    /// Reads that found their block.
    pub hits: u64,
    /// Reads that did not.
    pub misses: u64,
}

impl Cache {
    /// A cache of at most `bytes`. `None` for 0.
    pub fn new(bytes: u64) -> Option<Self> {
        let most = usize::try_from(bytes).unwrap_or(usize::MAX) / SHARDS;
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (hits, misses) = (AtomicU64::new(0), AtomicU64::new(0));
        (bytes > 0).then_some(Self { shards, most, hits, misses })
    }

    /// Appends the block at `place` to `out`. False if the block is not here.
    pub fn read(&self, place: Place, out: &mut Vec<u8>) -> bool {
        let mut shard = self.shard(place).lock();
        let Some(at) = shard.of.get(&place).copied() else {
            drop(shard);
            self.misses.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        let entry = &mut shard.entries[at];
        entry.is_used = true;
        out.extend_from_slice(&entry.block);
        drop(shard);
        self.hits.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Keeps `block`, which lies at `place`. The caller holds a pin under which a slot named the
    /// place.
    pub fn add(&self, place: Place, block: &[u8]) {
        let bytes = block.len() + ENTRY_BYTES;
        // An entry that would displace most others is not kept.
        if bytes > self.most / 4 {
            return;
        }
        let mut shard = self.shard(place).lock();
        if shard.of.contains_key(&place) {
            return;
        }
        shard.make_room(self.most - bytes);
        let at = shard.entries.len();
        shard.of.insert(place, at);
        shard.entries.push(Entry { place, is_used: false, block: block.into() });
        shard.bytes += bytes;
    }

    /// Removes the entry of a place that is about to have another block, or has none any more.
    pub fn remove(&self, place: Place) {
        let mut shard = self.shard(place).lock();
        if let Some(at) = shard.of.get(&place).copied() {
            shard.take(at);
        }
    }

    /// Counts.
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = shard.lock();
            stats.bytes += shard.bytes as u64;
            stats.entries += shard.entries.len() as u64;
        }
        stats
    }

    fn shard(&self, place: Place) -> &Mutex<Shard> {
        // Neighbours lie in one shard's chunks otherwise.
        let mixed = place.bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        &self.shards[mixed as usize % SHARDS]
    }
}

impl Shard {
    /// Drops entries until at most `most` bytes are left.
    fn make_room(&mut self, most: usize) {
        while self.bytes > most && !self.entries.is_empty() {
            let at = self.hand % self.entries.len();
            if std::mem::take(&mut self.entries[at].is_used) {
                self.hand = at + 1;
            } else {
                // The last entry is now at the hand.
                self.take(at);
                self.hand = at;
            }
        }
    }

    fn take(&mut self, at: usize) {
        let entry = self.entries.swap_remove(at);
        self.of.remove(&entry.place);
        self.bytes -= entry.block.len() + ENTRY_BYTES;
        if let Some(moved) = self.entries.get(at) {
            self.of.insert(moved.place, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(i: u64) -> Place {
        Place::of(i + 1)
    }

    #[test]
    fn entries_are_what_was_added_and_stay_within_the_bound() {
        let most = 64 << 10;
        let cache = Cache::new(most).expect("a cache");
        for i in 0..2000 {
            cache.add(place(i), &[i as u8; 300]);
            assert!(cache.stats().bytes <= most);
        }
        let mut found = 0;
        for i in 0..2000 {
            let mut block = Vec::new();
            if cache.read(place(i), &mut block) {
                assert_eq!(block, [i as u8; 300]);
                found += 1;
            }
        }
        assert!(found > 100 && found == cache.stats().entries, "{found}");
        (0..2000).for_each(|i| cache.remove(place(i)));
        assert_eq!((cache.stats().bytes, cache.stats().entries), (0, 0));
    }

    #[test]
    fn entry_in_use_outlives_others() {
        let cache = Cache::new(64 << 10).expect("a cache");
        cache.add(place(0), &[7; 300]);
        for i in 1..2000 {
            let mut block = Vec::new();
            assert!(cache.read(place(0), &mut block), "after {i} others");
            cache.add(place(i), &[0; 300]);
        }
    }

    #[test]
    fn entry_is_not_replaced_and_a_long_block_is_not_kept() {
        let cache = Cache::new(64 << 10).expect("a cache");
        cache.add(place(0), &[1; 8]);
        cache.add(place(1), &[2; 2000]);
        let mut block = Vec::new();
        assert!(cache.read(place(0), &mut block) && !cache.read(place(1), &mut block));
        cache.remove(place(0));
        cache.add(place(0), &[3; 8]);
        block.clear();
        assert!(cache.read(place(0), &mut block));
        assert_eq!((block, Cache::new(0).is_none()), (vec![3; 8], true));
    }
}
