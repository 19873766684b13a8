//! The value cache: blocks of mirrored keys at the compute node.
//!
//! The cache maps the place of a block to the block's bytes. A block is written once, and then only
//! its expiry changes, which the mirror has. So a cached block is the key's present one as long as
//! the slot names its place. A block is forgotten before its place is retired, and is cached only
//! while a slot names the place.
//!
//! S3-FIFO chooses the blocks that are evicted (Yang et al., SOSP 2023): new blocks enter a small
//! queue, and those that are read again there move to the main queue. Places of evicted blocks are
//! remembered, so that a block that comes back soon enters the main queue.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::layout::block::{EXPIRY, HEADER_BYTES};
use crate::memory::GOLDEN;
use crate::place::Place;

/// Shards are locked apart. A power of two.
const SHARDS: usize = 16;
/// Bytes that a block takes besides its own: entry, map and allocator.
const ENTRY_BYTES: usize = 160;
/// Bytes of the place of an evicted block.
const GHOST_BYTES: usize = 40;
/// The small queue has a tenth of the bytes.
const SMALL_PART: usize = 10;
/// Reads after which a block of the small queue moves to the main queue.
const READS_TO_STAY: u8 = 2;
/// Reads are counted to this number.
const READS_MAX: u8 = 3;
/// Free entries of a list that are kept.
const SPARE: usize = 64;
/// No entry.
const NONE: u32 = u32::MAX;

/// Counts of the value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Maximum bytes; 0: no value is cached.
    pub limit: u64,
    /// Bytes in use, with those of the cache's own tables.
    pub bytes: u64,
    /// Number of values.
    pub values: u64,
    /// Reads of values that were cached.
    pub hits: u64,
    /// Reads of values that were not cached. Values in pieces do not count.
    pub misses: u64,
}

/// The blocks, by place.
#[derive(Debug)]
pub(super) struct Cache {
    limit: AtomicU64,
    /// Held by the call that changes the limit.
    resizing: Mutex<()>,
    shards: Box<[Mutex<Shard>; SHARDS]>,
}

/// The queue in which a block waits for its eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Small = 0,
    Main = 1,
}

/// The standing of a cached block, which the block that replaces it takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    queue: Queue,
    reads: u8,
}

#[derive(Debug)]
struct Entry {
    place: u64,
    bytes: Arc<[u8]>,
    /// The entry that entered the queue before.
    older: u32,
    newer: u32,
    standing: Standing,
}

/// A queue: a list of entries.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    bytes: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE, bytes: 0 }
    }
}

type Hash = BuildHasherDefault<PlaceHash>;

#[derive(Debug, Default)]
struct Shard {
    of: HashMap<u64, u32, Hash>,
    /// Without gaps: the last entry takes the position of one that is removed.
    entries: Vec<Entry>,
    lists: [List; 2],
    /// Places of evicted blocks, the oldest first.
    ghosts: VecDeque<u64>,
    is_ghost: HashSet<u64, Hash>,
    hits: u64,
    misses: u64,
}

/// Places are multiples of a block's length, so the hash mixes them.
#[derive(Debug, Default)]
struct PlaceHash(u64);

impl Hasher for PlaceHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 ^ u64::from(*byte)));
    }

    fn write_u64(&mut self, place: u64) {
        self.0 = place.wrapping_mul(GOLDEN).rotate_left(32);
    }
}

const fn cost(bytes: usize) -> usize {
    bytes + ENTRY_BYTES
}

impl Cache {
    /// A cache of at most `limit` bytes; 0 caches nothing.
    pub fn new(limit: u64) -> Self {
        let shards = Box::new(std::array::from_fn(|_| Mutex::default()));
        Self { limit: AtomicU64::new(limit), resizing: Mutex::default(), shards }
    }

    /// Changes the limit, and evicts what is beyond it.
    pub fn resize(&self, limit: u64) {
        let _resizing = self.resizing.lock();
        // Before the shards are locked, because a block is cached under the limit of that time.
        self.limit.store(limit, Ordering::Relaxed);
        let most = self.most();
        for shard in self.shards.iter() {
            let mut shard = shard.lock();
            shard.make_room(most, 0);
            if most == 0 {
                *shard = Shard { hits: shard.hits, misses: shard.misses, ..Shard::default() };
            }
        }
    }

    /// Bytes of a shard.
    fn most(&self) -> usize {
        usize::try_from(self.limit.load(Ordering::Relaxed)).unwrap_or(usize::MAX) / SHARDS
    }

    /// True if the cache has room for a block of `bytes`.
    pub fn admits(&self, bytes: usize) -> bool {
        cost(bytes) <= self.most() / 2
    }

    /// The block at `place`. Counts a hit or a miss.
    pub fn read(&self, place: Place) -> Option<Arc<[u8]>> {
        if self.limit.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.shard(place).lock().read(place.bits())
    }

    /// True if the cache does not have the block at `place`. Counts a miss then.
    pub fn lacks(&self, place: Place) -> bool {
        if self.limit.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut shard = self.shard(place).lock();
        let lacks = !shard.of.contains_key(&place.bits());
        shard.misses += u64::from(lacks);
        lacks
    }

    /// Caches `block`, which lies at `place`. `standing`: that of the block that it replaces.
    pub fn keep(&self, place: Place, block: Arc<[u8]>, standing: Option<Standing>) {
        let mut shard = self.shard(place).lock();
        if self.admits(block.len()) {
            shard.insert(place.bits(), block, standing, self.most());
        }
    }

    /// Forgets the block at `place`.
    pub fn forget(&self, place: Place) -> Option<Standing> {
        if self.limit.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut shard = self.shard(place).lock();
        let at = shard.of.get(&place.bits()).copied()?;
        Some(shard.remove(at).standing)
    }

    pub fn stats(&self) -> CacheStats {
        let limit = self.limit.load(Ordering::Relaxed);
        let mut stats = CacheStats { limit, ..CacheStats::default() };
        for shard in self.shards.iter() {
            let shard = shard.lock();
            stats.bytes += shard.bytes() as u64;
            stats.values += shard.entries.len() as u64;
            stats.hits += shard.hits;
            stats.misses += shard.misses;
        }
        stats
    }

    fn shard(&self, place: Place) -> &Mutex<Shard> {
        // Other bits than those by which the maps of a shard choose.
        &self.shards[(place.bits().wrapping_mul(GOLDEN) >> 60) as usize % SHARDS]
    }
}

/// The bytes of a block as the cache has them: without the expiry, which the mirror has.
pub(super) fn copied(block: &[u8]) -> Arc<[u8]> {
    let mut bytes: Arc<[u8]> = block.into();
    if let Some(bytes) = Arc::get_mut(&mut bytes) {
        bytes[EXPIRY as usize..HEADER_BYTES].fill(0);
    }
    bytes
}

impl Shard {
    fn bytes(&self) -> usize {
        self.lists[0].bytes + self.lists[1].bytes + self.ghosts.len() * GHOST_BYTES
    }

    fn read(&mut self, place: u64) -> Option<Arc<[u8]>> {
        let Some(at) = self.of.get(&place) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        let entry = &mut self.entries[*at as usize];
        entry.standing.reads = (entry.standing.reads + 1).min(READS_MAX);
        Some(entry.bytes.clone())
    }

    fn insert(&mut self, place: u64, bytes: Arc<[u8]>, standing: Option<Standing>, most: usize) {
        if self.of.contains_key(&place) {
            return;
        }
        self.make_room(most, cost(bytes.len()));
        let queue = if self.is_ghost.remove(&place) { Queue::Main } else { Queue::Small };
        let standing = standing.unwrap_or(Standing { queue, reads: 0 });
        let at = self.entries.len() as u32;
        self.of.insert(place, at);
        self.entries.push(Entry { place, bytes, older: NONE, newer: NONE, standing });
        self.enqueue(at);
    }

    /// Evicts blocks until `more` bytes fit `most`.
    fn make_room(&mut self, most: usize, more: usize) {
        while self.bytes() + more > most && !self.entries.is_empty() {
            let small = self.lists[Queue::Small as usize];
            let is_main_empty = self.lists[Queue::Main as usize].oldest == NONE;
            if small.oldest != NONE && (small.bytes > most / SMALL_PART || is_main_empty) {
                self.evict_small(small.oldest);
            } else {
                self.evict_main();
            }
        }
        while self.ghosts.len() > self.entries.len() {
            self.ghosts.pop_front().map(|place| self.is_ghost.remove(&place));
        }
        shrink(&mut self.entries, &mut self.of, &mut self.ghosts, &mut self.is_ghost);
    }

    /// Moves the oldest block of the small queue to the main queue, or evicts the block.
    fn evict_small(&mut self, oldest: u32) {
        if self.entries[oldest as usize].standing.reads >= READS_TO_STAY {
            self.dequeue(oldest);
            self.entries[oldest as usize].standing = Standing { queue: Queue::Main, reads: 0 };
            self.enqueue(oldest);
        } else {
            let place = self.remove(oldest).place;
            if self.is_ghost.insert(place) {
                self.ghosts.push_back(place);
            }
        }
    }

    /// Evicts the oldest block of the main queue that was not read since it was there.
    fn evict_main(&mut self) {
        loop {
            let oldest = self.lists[Queue::Main as usize].oldest;
            if oldest == NONE {
                return;
            }
            let standing = &mut self.entries[oldest as usize].standing;
            if standing.reads == 0 {
                self.remove(oldest);
                return;
            }
            standing.reads -= 1;
            self.dequeue(oldest);
            self.enqueue(oldest);
        }
    }

    fn list(&mut self, at: u32) -> &mut List {
        &mut self.lists[self.entries[at as usize].standing.queue as usize]
    }

    /// Puts an entry at the end of its queue.
    fn enqueue(&mut self, at: u32) {
        let bytes = cost(self.entries[at as usize].bytes.len());
        let list = self.list(at);
        list.bytes += bytes;
        let newest = std::mem::replace(&mut list.newest, at);
        if newest == NONE {
            list.oldest = at;
        } else {
            self.entries[newest as usize].newer = at;
        }
        let entry = &mut self.entries[at as usize];
        (entry.older, entry.newer) = (newest, NONE);
    }

    /// Takes an entry out of its queue.
    fn dequeue(&mut self, at: u32) {
        let entry = &self.entries[at as usize];
        let (older, newer, bytes) = (entry.older, entry.newer, cost(entry.bytes.len()));
        self.list(at).bytes -= bytes;
        self.join(at, older, newer);
    }

    /// Makes `older` and `newer` neighbours in the queue of the entry at `at`.
    fn join(&mut self, at: u32, older: u32, newer: u32) {
        match older {
            NONE => self.list(at).oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => self.list(at).newest = older,
            newer => self.entries[newer as usize].older = older,
        }
    }

    /// Removes an entry. The last entry takes its position.
    fn remove(&mut self, at: u32) -> Entry {
        self.dequeue(at);
        let removed = self.entries.swap_remove(at as usize);
        self.of.remove(&removed.place);
        if let Some(moved) = self.entries.get(at as usize) {
            let (place, older, newer) = (moved.place, moved.older, moved.newer);
            self.of.insert(place, at);
            self.join(at, older, at);
            self.join(at, at, newer);
        }
        removed
    }
}

/// Gives the memory of tables back that are mostly empty.
fn shrink(
    entries: &mut Vec<Entry>,
    of: &mut HashMap<u64, u32, Hash>,
    ghosts: &mut VecDeque<u64>,
    is_ghost: &mut HashSet<u64, Hash>,
) {
    let is_sparse = |capacity: usize, used: usize| capacity > 4 * (used + SPARE);
    if is_sparse(entries.capacity(), entries.len()) {
        entries.shrink_to(entries.len() + SPARE);
        of.shrink_to(entries.len() + SPARE);
    }
    if is_sparse(ghosts.capacity(), ghosts.len()) {
        ghosts.shrink_to(ghosts.len() + SPARE);
        is_ghost.shrink_to(ghosts.len() + SPARE);
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn place(i: u64) -> Place {
        Place::of(i + 1)
    }

    fn block(i: u64, bytes: usize) -> Arc<[u8]> {
        vec![i as u8; HEADER_BYTES + bytes].into()
    }

    impl Shard {
        /// Checks that the queues have each entry once, and the maps the same places.
        fn check(&self) {
            let mut seen = 0;
            for (queue, list) in [Queue::Small, Queue::Main].into_iter().zip(self.lists) {
                let (mut at, mut before, mut bytes) = (list.oldest, NONE, 0);
                while at != NONE {
                    let entry = &self.entries[at as usize];
                    assert_eq!((entry.older, entry.standing.queue), (before, queue));
                    assert_eq!(self.of.get(&entry.place), Some(&at));
                    bytes += cost(entry.bytes.len());
                    seen += 1;
                    (before, at) = (at, entry.newer);
                }
                assert_eq!((list.newest, list.bytes), (before, bytes));
            }
            assert_eq!((seen, self.of.len()), (self.entries.len(), self.entries.len()));
            assert!(self.is_ghost.len() <= self.ghosts.len());
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Keep(u64, usize),
        Read(u64),
        Forget(u64),
        Replace(u64, u64),
        Resize(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let of = 0..200_u64;
        prop_oneof![
            20 => (of.clone(), 0..900_usize).prop_map(|(i, bytes)| Op::Keep(i, bytes)),
            20 => of.clone().prop_map(Op::Read),
            5 => of.clone().prop_map(Op::Forget),
            5 => (of.clone(), of).prop_map(|(i, to)| Op::Replace(i, to)),
            1 => (0..4_u64).prop_map(|part| Op::Resize(part << 15)),
        ]
    }

    proptest! {
        #[test]
        fn cache_has_what_was_kept_within_its_limit(ops in vec(op(), 1..600)) {
            let cache = Cache::new(64 << 10);
            let mut kept = HashMap::new();
            for op in ops {
                match op {
                    Op::Keep(i, bytes) => {
                        kept.entry(i).or_insert_with(|| block(i, bytes));
                        cache.keep(place(i), kept[&i].clone(), None);
                    }
                    Op::Read(i) => {
                        if let Some(bytes) = cache.read(place(i)) {
                            prop_assert_eq!(Some(&bytes), kept.get(&i));
                        }
                    }
                    Op::Forget(i) => {
                        cache.forget(place(i));
                        kept.remove(&i);
                        prop_assert!(cache.forget(place(i)).is_none());
                    }
                    Op::Replace(i, to) => {
                        let standing = cache.forget(place(i));
                        kept.remove(&i);
                        cache.forget(place(to));
                        kept.insert(to, block(to, 20));
                        cache.keep(place(to), kept[&to].clone(), standing);
                    }
                    Op::Resize(limit) => cache.resize(limit),
                }
                let stats = cache.stats();
                prop_assert!(stats.bytes <= stats.limit, "{:?}", stats);
                cache.shards.iter().for_each(|shard| shard.lock().check());
            }
        }
    }

    #[test]
    fn values_that_are_read_again_outlive_a_scan() {
        let cache = Cache::new(1 << 20);
        let read = |i| {
            if cache.read(place(i)).is_none() {
                cache.keep(place(i), block(i, 100), None);
            }
        };
        for _ in 0..4 {
            (0..500).for_each(read);
        }
        (1000..50_000).for_each(read);
        let left = (0..500).filter(|i| cache.read(place(*i)).is_some()).count();
        assert!(left > 450, "{left} of 500 values are left");
        let stats = cache.stats();
        assert!(stats.bytes > stats.limit / 10 * 9, "{stats:?}");
    }

    #[test]
    fn cached_copy_of_a_block_has_no_expiry() {
        let bytes = copied(&[0xff; HEADER_BYTES + 3]);
        assert_eq!(bytes[EXPIRY as usize..], [&[0; 8][..], &[0xff; 3]].concat());
        assert!(!Cache::new(1 << 20).admits(32 << 10) && Cache::new(1 << 20).admits(31 << 10));
    }
}
