//! A sorted map of disjoint ranges that is read without a lock.
//!
//! The map has two copies. A writer changes the inactive copy and then makes it the active one, so
//! a reader finds a complete copy even while a writer is stopped in the middle of a change. This
//! matters for the fault handler: the writer may be a thread of the program that waits for the
//! handler. A reader repeats its search if the copies changed places meanwhile.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::sys;

/// A range of the map, with a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub start: u64,
    pub end: u64,
    pub value: u64,
}

/// Words of an item.
const ITEM_WORDS: usize = 3;

/// The map. Writers must exclude each other.
pub(crate) struct Latch {
    /// Each copy is a count, and then the items.
    words: *const AtomicU64,
    capacity: usize,
    /// Number of changes; the lowest bit selects the active copy.
    version: AtomicU64,
}

// SAFETY: all access to the words is atomic, and they are unmapped only on drop.
unsafe impl Send for Latch {}
// SAFETY: as above.
unsafe impl Sync for Latch {}

impl Latch {
    /// Creates an empty map for at most `capacity` items.
    pub fn new(capacity: usize) -> io::Result<Self> {
        let words = sys::map_anonymous(Self::bytes(capacity))? as *const AtomicU64;
        Ok(Self { words, capacity, version: AtomicU64::new(0) })
    }

    fn bytes(capacity: usize) -> usize {
        2 * 8 * (1 + ITEM_WORDS * capacity)
    }

    /// Returns the maximum number of items.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    fn word(&self, version: u64, index: usize) -> &AtomicU64 {
        let per_copy = 1 + ITEM_WORDS * self.capacity;
        assert!(index < per_copy);
        // SAFETY: in bounds; anonymous memory starts as zeros and is only accessed as atomics.
        unsafe { &*self.words.add((version & 1) as usize * per_copy + index) }
    }

    fn count(&self, version: u64) -> usize {
        self.word(version, 0).load(Ordering::Relaxed) as usize
    }

    fn item(&self, version: u64, at: usize) -> Item {
        let word = |part| self.word(version, 1 + ITEM_WORDS * at + part).load(Ordering::Relaxed);
        Item { start: word(0), end: word(1), value: word(2) }
    }

    fn read<T>(&self, look: impl Fn(u64) -> T) -> T {
        loop {
            let version = self.version.load(Ordering::Acquire);
            let found = look(version);
            fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == version {
                return found;
            }
        }
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.read(|version| self.count(version))
    }

    /// Returns the last item that starts before `key`.
    fn last_before(&self, key: u64) -> Option<Item> {
        self.read(|version| {
            let (mut low, mut high) = (0, self.count(version));
            while low < high {
                let middle = (low + high) / 2;
                if self.item(version, middle).start < key {
                    low = middle + 1
                } else {
                    high = middle
                }
            }
            (low > 0).then(|| self.item(version, low - 1))
        })
    }

    /// Returns the item that contains `key`.
    pub fn find(&self, key: u64) -> Option<Item> {
        self.last_before(key.checked_add(1)?).filter(|item| key < item.end)
    }

    /// Returns true if an item overlaps the range.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        self.last_before(range.end).is_some_and(|item| item.end > range.start)
    }

    /// Returns all items, ascending.
    pub fn all(&self) -> Vec<Item> {
        self.read(|version| (0..self.count(version)).map(|at| self.item(version, at)).collect())
    }

    /// Replaces all items. They are ascending and disjoint, and at most as many as fit.
    pub fn set(&self, items: &[Item]) {
        assert!(items.len() <= self.capacity, "{} items of {}", items.len(), self.capacity);
        let version = self.version.load(Ordering::Relaxed) + 1;
        // Readers of the copy that changes now must see the previous change of the version.
        fence(Ordering::Release);
        let set = |index, value| self.word(version, index).store(value, Ordering::Relaxed);
        set(0, items.len() as u64);
        for (at, item) in items.iter().enumerate() {
            for (part, value) in [item.start, item.end, item.value].into_iter().enumerate() {
                set(1 + ITEM_WORDS * at + part, value);
            }
        }
        self.version.store(version, Ordering::Release);
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        // SAFETY: the map owns its words, and no reference outlives it.
        unsafe {
            let _ = sys::unmap_anonymous(self.words as usize, Self::bytes(self.capacity));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(start: u64, end: u64, value: u64) -> Item {
        Item { start, end, value }
    }

    #[test]
    fn items_are_found_by_each_of_their_keys() {
        let latch = Latch::new(3).unwrap();
        assert_eq!((latch.find(0), latch.len()), (None, 0));
        let items = [item(0, 4, 7), item(10, 12, 8), item(12, u64::MAX, 9)];
        latch.set(&items);
        assert_eq!(latch.all(), items);
        let value = |key| latch.find(key).map(|item| item.value);
        assert_eq!([0, 3, 4, 9].map(value), [Some(7), Some(7), None, None]);
        assert_eq!([10, 11, 12, 1 << 60].map(value), [Some(8), Some(8), Some(9), Some(9)]);
        assert!(latch.overlaps(&(3..5)) && latch.overlaps(&(0..100)) && !latch.overlaps(&(4..10)));
        latch.set(&items[..1]);
        assert_eq!((latch.find(11), latch.len()), (None, 1));
    }

    #[test]
    fn readers_see_only_complete_changes() {
        let latch = Latch::new(64).unwrap();
        let state = |round: u64| -> Vec<Item> {
            (0..round % 64).map(|at| item(at * 10, at * 10 + 10, round)).collect()
        };
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut seen = 0u64;
                while !done.load(Ordering::Acquire) {
                    let all = latch.all();
                    let round = all.first().map_or(0, |first| first.value);
                    assert_eq!(all, state(round), "{round}");
                    seen = seen.max(round);
                }
                seen
            });
            for round in 0..20_000 {
                latch.set(&state(round));
            }
            done.store(true, Ordering::Release);
            assert!(reader.join().unwrap() > 0, "the reader saw no change");
        });
    }
}
