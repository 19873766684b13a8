//! The value cache: blocks of mirrored keys at the compute node.
//!
//! A cached block equals the block in remote memory. A block is written once, and then only its
//! expiry changes. Three rules follow:
//!
//! - A change of the expiry forgets the block.
//! - A retired block is forgotten, which gives its bytes back.
//! - A block that is allocated is forgotten. `flush` takes no tickets, so a reader can keep a block
//!   after `flush` has retired the block. The reader's pin ends before the place is allocated again.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::place::Place;

const SHARDS: usize = 16;
/// Bytes of the cache that a block takes besides its own: entry, queue and allocator.
const OVERHEAD: u64 = 96;
/// Places in the queue of a shard that name no block, before they are taken out.
const SLACK: usize = 64;

/// Counts of the value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Most bytes; 0: the store has no value cache.
    pub limit: u64,
    /// Bytes in use, with the cache's own.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Reads that the cache answered.
    pub hits: u64,
    /// Reads that went to remote memory.
    pub misses: u64,
}

/// The blocks of keys, by place.
#[derive(Debug)]
pub(super) struct Cache {
    limit: u64,
    shards: [Mutex<Shard>; SHARDS],
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    blocks: HashMap<u64, Cached>,
    /// Places in the order of their insertion, each with the number of the insertion.
    queue: VecDeque<(u64, u64)>,
    bytes: u64,
    number: u64,
}

#[derive(Debug)]
struct Cached {
    bytes: Box<[u8]>,
    number: u64,
    /// Read since the eviction has passed the block.
    is_used: bool,
}

fn cost(bytes: usize) -> u64 {
    bytes as u64 + OVERHEAD
}

impl Cache {
    /// A cache of at most `limit` bytes; 0 caches nothing.
    pub fn new(limit: u64) -> Self {
        let shards = std::array::from_fn(|_| Mutex::default());
        Self { limit, shards, hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    pub fn is_on(&self) -> bool {
        self.limit != 0
    }

    fn shard(&self, place: Place) -> &Mutex<Shard> {
        // The upper bits of the product depend on all bits of the place.
        let mixed = place.bits().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shards[(mixed >> 60) as usize % SHARDS]
    }

    /// Copies the block of `place` to `into`. False: the cache has no such block of this length.
    pub fn read(&self, place: Place, into: &mut [u8]) -> bool {
        if !self.is_on() {
            return false;
        }
        let is_hit = {
            let mut shard = self.shard(place).lock();
            match shard.blocks.get_mut(&place.bits()) {
                Some(cached) if cached.bytes.len() == into.len() => {
                    cached.is_used = true;
                    into.copy_from_slice(&cached.bytes);
                    true
                }
                _ => false,
            }
        };
        let counter = if is_hit { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        is_hit
    }

    /// Keeps a block that was read. The caller holds a ticket of the key and a pin.
    pub fn keep(&self, place: Place, bytes: &[u8]) {
        let most = self.limit / SHARDS as u64;
        if cost(bytes.len()) > most {
            return;
        }
        let mut shard = self.shard(place).lock();
        let shard = &mut *shard;
        let Entry::Vacant(vacant) = shard.blocks.entry(place.bits()) else { return };
        shard.number += 1;
        let number = shard.number;
        vacant.insert(Cached { bytes: bytes.into(), number, is_used: false });
        shard.bytes += cost(bytes.len());
        shard.queue.push_back((place.bits(), number));
        shard.shrink(most);
    }

    /// Forgets the block of `place`.
    pub fn forget(&self, place: Place) {
        if self.is_on() {
            self.shard(place).lock().remove(place.bits());
        }
    }

    pub fn stats(&self) -> CacheStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (limit, hits, misses) = (self.limit, load(&self.hits), load(&self.misses));
        let mut stats = CacheStats { limit, hits, misses, ..CacheStats::default() };
        for shard in &self.shards {
            let shard = shard.lock();
            stats.bytes += shard.bytes;
            stats.blocks += shard.blocks.len() as u64;
        }
        stats
    }
}

impl Shard {
    fn remove(&mut self, place: u64) {
        if let Some(cached) = self.blocks.remove(&place) {
            self.bytes -= cost(cached.bytes.len());
        }
    }

    /// Evicts blocks until at most `most` bytes are in use: the oldest that was not read again.
    fn shrink(&mut self, most: u64) {
        while self.bytes > most {
            let Some((place, number)) = self.queue.pop_front() else { return };
            match self.blocks.get_mut(&place).filter(|cached| cached.number == number) {
                Some(cached) if cached.is_used => {
                    cached.is_used = false;
                    self.queue.push_back((place, number));
                }
                Some(_) => self.remove(place),
                None => {}
            }
        }
        if self.queue.len() > 2 * self.blocks.len() + SLACK {
            let blocks = &self.blocks;
            self.queue.retain(|(place, number)| {
                blocks.get(place).is_some_and(|cached| cached.number == *number)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(i: u64) -> Place {
        Place::new(0, 32 * i).expect("a place")
    }

    #[test]
    fn blocks_that_were_read_again_outlive_others() {
        let cache = Cache::new(64 << 10);
        cache.keep(place(1), &[7; 100]);
        let mut bytes = [0; 100];
        for i in 2..2000 {
            cache.keep(place(i), &[i as u8; 100]);
            assert!(cache.read(place(1), &mut bytes), "after {i} blocks");
        }
        let stats = cache.stats();
        assert!(stats.bytes <= stats.limit && stats.blocks > 250, "{stats:?}");
        assert!(!cache.read(place(2), &mut bytes));
    }

    #[test]
    fn queue_stays_short_while_blocks_are_forgotten() {
        let cache = Cache::new(1 << 20);
        for i in 0..10_000 {
            cache.keep(place(i % 3), &[1; 10]);
            cache.forget(place(i % 3));
        }
        assert_eq!(cache.stats().bytes, 0);
        assert!(cache.shards.iter().all(|shard| shard.lock().queue.len() <= SLACK + 1));
    }

    #[test]
    fn block_of_another_length_or_beyond_the_limit_is_not_returned() {
        let cache = Cache::new(16 << 10);
        cache.keep(place(1), &[1; 100]);
        cache.keep(place(2), &[1; 2000]);
        assert!(!cache.read(place(1), &mut [0; 99]));
        assert!(!cache.read(place(2), &mut [0; 2000]));
        assert!(!Cache::new(0).read(place(1), &mut [0; 100]));
    }
}
