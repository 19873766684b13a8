//! A subtable as its compute node knows it.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::gate::Gate;
use crate::hash::KeyHash;
use crate::layout::table::{BucketWord, Shape, Slot, Spot};
use crate::place::Place;
use crate::search::Buckets;
use crate::uses::Uses;

/// The word of a mirror's slot while an operation writes the slot for the first time.
const RESERVED: u64 = u64::MAX;

/// A subtable.
#[derive(Debug)]
pub(crate) struct Table {
    pub spot: Spot,
    pub db: u8,
    pub stripe: u32,
    pub sequence: u64,
    pub gate: Gate,
    /// True if the compute node mirrors the subtable.
    pub is_mirrored: bool,
    pub local: Mutex<Local>,
}

/// The part of a subtable that changes.
#[derive(Debug)]
pub(crate) struct Local {
    /// Depth and prefix.
    pub word: BucketWord,
    /// True if no directory names the subtable any more.
    pub gone: bool,
    /// Slots in use.
    pub used: u32,
    /// Number of keys inserted so far. A view of the buckets is stale if the number has changed.
    pub inserts: u64,
    /// The uses of the keys.
    pub uses: Uses,
    /// The index, if the compute node mirrors it.
    pub mirror: Option<Mirror>,
    /// Slots that operations are writing for the first time, if there is no mirror.
    reserved: SmallVec<[u32; 4]>,
}

/// Bytes of a slot in a mirror: word and tag.
const MIRROR_SLOT_BYTES: usize = 16;

/// The memory of all mirrors of a store, and its limit.
#[derive(Debug)]
pub(crate) struct Budget {
    used: AtomicU64,
    limit: u64,
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), limit })
    }

    /// Bytes of all mirrors.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves the memory of one mirror. `None`: the limit is reached.
    fn reserve(self: &Arc<Self>, shape: Shape) -> Option<Share> {
        let bytes = (MIRROR_SLOT_BYTES * shape.slots()) as u64;
        let add = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit);
        let reserved = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        reserved.ok().map(|_| Share { budget: self.clone(), bytes })
    }
}

/// The memory of one mirror. Returned when the value is dropped.
#[derive(Debug)]
struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A copy of the slots, with the tags of their keys.
#[derive(Debug)]
pub(crate) struct Mirror {
    pub slots: Box<[u64]>,
    pub tags: Box<[u64]>,
    /// Expiry by slot, of the keys that have one.
    pub expiries: HashMap<u32, u64>,
    _share: Share,
}

/// A key as a mirror knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub word: u64,
    pub tag: u64,
    pub expiry: u64,
}

impl Mirror {
    /// An empty mirror. `None`: the memory of mirrors has reached its limit.
    pub fn new(shape: Shape, budget: &Arc<Budget>) -> Option<Self> {
        let share = budget.reserve(shape)?;
        let empty = || vec![0; shape.slots()].into_boxed_slice();
        let (slots, tags, expiries) = (empty(), empty(), HashMap::new());
        Some(Self { slots, tags, expiries, _share: share })
    }

    /// The slot of the key, if the key is there.
    pub fn find(&self, buckets: Buckets, hash: KeyHash) -> Option<(usize, Slot)> {
        let found = buckets.slots().find_map(|slot| {
            let is_same = self.tags[slot] == hash.tag && self.slots[slot] != RESERVED;
            is_same.then(|| Slot::parse(self.slots[slot])).flatten().map(|parsed| (slot, parsed))
        });
        found.filter(|(_, slot)| slot.fingerprint == hash.fingerprint())
    }

    /// The key in `slot`.
    pub fn entry(&self, slot: usize) -> Option<Entry> {
        let word = self.slots[slot];
        if word == 0 || word == RESERVED {
            return None;
        }
        let expiry = self.expiries.get(&(slot as u32)).copied().unwrap_or(0);
        Some(Entry { word, tag: self.tags[slot], expiry })
    }

    pub fn set(&mut self, slot: usize, entry: Option<Entry>) {
        let entry = entry.unwrap_or(Entry { word: 0, tag: 0, expiry: 0 });
        self.slots[slot] = entry.word;
        self.tags[slot] = entry.tag;
        if entry.expiry != 0 {
            self.expiries.insert(slot as u32, entry.expiry);
        } else if !self.expiries.is_empty() {
            self.expiries.remove(&(slot as u32));
        }
    }
}

impl Local {
    pub fn new(shape: Shape, word: BucketWord, mirror: Option<Mirror>) -> Self {
        let reserved = SmallVec::new();
        Self { word, gone: false, used: 0, inserts: 0, uses: Uses::new(shape), mirror, reserved }
    }

    /// True if the hash with this prefix (a hash's upper half, or a tag) belongs to the subtable.
    pub fn covers(&self, prefix: u64) -> bool {
        !self.gone && self.word.covers(prefix)
    }

    /// Reserves a free slot for a new key. `word` reads the slots as an index without mirror has
    /// been read.
    pub fn reserve(
        &mut self,
        buckets: Buckets,
        tag: u64,
        word: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        if let Some(mirror) = &mut self.mirror {
            let slot = buckets.free(|slot| mirror.slots[slot] == 0)?;
            mirror.slots[slot] = RESERVED;
            mirror.tags[slot] = tag;
            return Some(slot);
        }
        let is_free = |slot| word(slot) == 0 && !self.reserved.contains(&(slot as u32));
        let slot = buckets.free(is_free)?;
        self.reserved.push(slot as u32);
        Some(slot)
    }

    /// Ends a reservation, with the key that the slot has now.
    pub fn settle(&mut self, slot: usize, entry: Option<Entry>) {
        match &mut self.mirror {
            Some(mirror) => mirror.set(slot, entry),
            None => self.reserved.retain(|reserved| *reserved != slot as u32),
        }
        self.used += u32::from(entry.is_some());
        self.inserts += u64::from(entry.is_some());
    }

    /// Replaces the key in `slot`, or takes it out.
    pub fn replace(&mut self, slot: usize, entry: Option<Entry>) {
        self.used -= u32::from(entry.is_none());
        if let Some(mirror) = &mut self.mirror {
            mirror.set(slot, entry);
        }
    }
}

impl Table {
    pub fn new(spot: Spot, db: u8, stripe: u32, sequence: u64, local: Local) -> Arc<Self> {
        let (gate, is_mirrored) = (Gate::default(), local.mirror.is_some());
        let local = Mutex::new(local);
        Arc::new(Self { spot, db, stripe, sequence, gate, is_mirrored, local })
    }

    /// Enters as a writer.
    pub async fn enter(self: Arc<Self>) -> Entered {
        self.gate.enter().await;
        Entered(self)
    }

    /// The places of the subtable's blocks, with their bytes.
    pub fn blocks(&self) -> impl Iterator<Item = (Place, u32)> + '_ {
        let shape = self.spot.shape;
        let pieces = self.spot.pieces.iter().enumerate();
        std::iter::once((self.spot.header, shape.header_bytes()))
            .chain(pieces.map(move |(i, piece)| (*piece, shape.piece_bytes(i as u32))))
    }
}

/// A subtable that this task has entered as a writer: no split or merge runs.
#[derive(Debug)]
pub(crate) struct Entered(Arc<Table>);

impl Entered {
    /// Enters without waiting.
    pub fn attempt(table: &Arc<Table>) -> Option<Self> {
        table.gate.try_enter().then(|| Self(table.clone()))
    }

    pub fn table(&self) -> &Arc<Table> {
        &self.0
    }
}

impl Deref for Entered {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.0
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.gate.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_mirror_returns_to_its_budget() {
        let shape = Shape::new(1, 4096).expect("a shape");
        let bytes = (MIRROR_SLOT_BYTES * shape.slots()) as u64;
        let budget = Budget::new(2 * bytes + 1);
        let mirrors = [Mirror::new(shape, &budget), Mirror::new(shape, &budget)];
        assert!(mirrors.iter().all(Option::is_some) && budget.used() == 2 * bytes);
        assert!(Mirror::new(shape, &budget).is_none());
        drop(mirrors);
        assert_eq!(budget.used(), 0);
        assert!(Mirror::new(shape, &budget).is_some());
    }
}
