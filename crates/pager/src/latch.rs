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

/// Atomic words that start as zeros. A model checker can replace the machine's memory.
pub(crate) trait Words {
    /// Loads a word.
    fn load(&self, index: usize, order: Ordering) -> u64;
    /// Stores a word.
    fn store(&self, index: usize, value: u64, order: Ordering);
    /// A fence between such words.
    fn fence(order: Ordering);
}

/// The map. Writers must exclude each other.
pub(crate) struct Latch<W: Words = Mapped> {
    /// The number of changes, whose lowest bit selects the active copy, and then the copies. Each
    /// copy is a count, and then the items.
    words: W,
    capacity: usize,
}

/// Index of the word with the number of changes.
const VERSION: usize = 0;

impl Latch {
    /// Creates an empty map for at most `capacity` items.
    pub fn new(capacity: usize) -> io::Result<Self> {
        Ok(Self { words: Mapped::new(words_of(capacity))?, capacity })
    }
}

/// Returns the number of words of a map.
fn words_of(capacity: usize) -> usize {
    1 + 2 * (1 + ITEM_WORDS * capacity)
}

impl<W: Words> Latch<W> {
    /// Returns the maximum number of items.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the index of a word of a copy.
    fn index(&self, version: u64, index: usize) -> usize {
        let per_copy = 1 + ITEM_WORDS * self.capacity;
        1 + (version & 1) as usize * per_copy + index
    }

    fn word(&self, version: u64, index: usize) -> u64 {
        self.words.load(self.index(version, index), Ordering::Relaxed)
    }

    fn count(&self, version: u64) -> usize {
        self.word(version, 0) as usize
    }

    fn item(&self, version: u64, at: usize) -> Item {
        let word = |part| self.word(version, 1 + ITEM_WORDS * at + part);
        Item { start: word(0), end: word(1), value: word(2) }
    }

    fn read<T>(&self, look: impl Fn(u64) -> T) -> T {
        loop {
            let version = self.words.load(VERSION, Ordering::Acquire);
            let found = look(version);
            W::fence(Ordering::Acquire);
            if self.words.load(VERSION, Ordering::Relaxed) == version {
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
        let version = self.words.load(VERSION, Ordering::Relaxed) + 1;
        // Readers of the copy that changes now must see the previous change of the version.
        W::fence(Ordering::Release);
        let set = |index, value| {
            self.words.store(self.index(version, index), value, Ordering::Relaxed);
        };
        set(0, items.len() as u64);
        for (at, item) in items.iter().enumerate() {
            for (part, value) in [item.start, item.end, item.value].into_iter().enumerate() {
                set(1 + ITEM_WORDS * at + part, value);
            }
        }
        self.words.store(VERSION, version, Ordering::Release);
    }
}

/// Words of anonymous memory.
pub(crate) struct Mapped {
    start: *const AtomicU64,
    len: usize,
}

// SAFETY: all access to the words is atomic, and they are unmapped only on drop.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(len: usize) -> io::Result<Self> {
        let start = sys::map_anonymous(8 * len)? as *const AtomicU64;
        Ok(Self { start, len })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len);
        // SAFETY: in bounds; anonymous memory starts as zeros and is only accessed as atomics.
        unsafe { &*self.start.add(index) }
    }
}

impl Words for Mapped {
    #[inline]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.word(index).load(order)
    }

    #[inline]
    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.word(index).store(value, order);
    }

    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this value owns the words, and no reference outlives it.
        unsafe {
            let _ = sys::unmap_anonymous(self.start as usize, 8 * self.len);
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
        let seen = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    let all = latch.all();
                    let round = all.first().map_or(0, |first| first.value);
                    assert_eq!(all, state(round), "{round}");
                    seen.fetch_max(round, Ordering::AcqRel);
                }
            });
            // On a busy machine the reader starts late.
            let is_unseen = || seen.load(Ordering::Acquire) == 0 && !reader.is_finished();
            for round in (1..).take_while(|round| *round < 20_000 || is_unseen()) {
                latch.set(&state(round));
            }
            done.store(true, Ordering::Release);
        });
    }

    /// Words of the model checker. `FENCES` selects whether its fences have an effect.
    struct Modelled<const FENCES: bool>(Vec<loom::sync::atomic::AtomicU64>);

    impl<const FENCES: bool> Words for Modelled<FENCES> {
        fn load(&self, index: usize, order: Ordering) -> u64 {
            self.0[index].load(order)
        }

        fn store(&self, index: usize, value: u64, order: Ordering) {
            self.0[index].store(value, order);
        }

        fn fence(order: Ordering) {
            if FENCES {
                loom::sync::atomic::fence(order);
            }
        }
    }

    /// A writer changes the map twice while a reader loads its item, in every order of their loads
    /// and stores that C11 allows.
    fn reader_and_writer<const FENCES: bool>() {
        const CAPACITY: usize = 1;
        let zero = || loom::sync::atomic::AtomicU64::new(0);
        let words = Modelled::<FENCES>((0..words_of(CAPACITY)).map(|_| zero()).collect());
        let latch = loom::sync::Arc::new(Latch { words, capacity: CAPACITY });
        latch.set(&[item(1, 2, 1)]);
        let writer = loom::thread::spawn({
            let latch = latch.clone();
            move || (2..4).for_each(|round| latch.set(&[item(round, round + 1, round)]))
        });
        let found = latch.all();
        assert_eq!(found.len(), 1);
        let round = found[0].value;
        assert_eq!(found[0], item(round, round + 1, round));
        writer.join().unwrap();
        assert_eq!(latch.find(3), Some(item(3, 4, 3)));
    }

    #[test]
    fn no_reader_sees_a_mixture_of_two_changes() {
        crate::wake::check(reader_and_writer::<true>);
    }

    #[test]
    #[should_panic(expected = "left == right")]
    fn without_fences_a_reader_sees_a_mixture() {
        crate::wake::check(reader_and_writer::<false>);
    }
}
