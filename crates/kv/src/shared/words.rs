//! Words of an index that several compute nodes change: slots with two flags, and the header words
//! that a split uses.
//!
//! ```text
//! slot       63 fingerprint 56 | 55 length 48 | 47 frozen | 46 tentative | 45 place of the block 0
//! root word  63 depth 58 | 57 doubling | 56 0 | 55 version 48 | 47 place of the directory 0
//! header of a subtable, behind the words of mode `alone`:
//!             +24 lock: 63 client 48 | 47 end of the lease in ms since 1970 0      0 = not locked
//!             +32 place of the lower successor, 0 = the subtable is not split
//!             +40 place of the sibling, which is the upper successor of the same subtable
//!             +48 place of the upper successor, 0 until the buckets are marked as moved
//! ```
//!
//! A *frozen* slot never changes again: a split freezes each slot, also an empty one, before it
//! copies the slots. A *tentative* slot names the block of a new key that is not inserted yet.

use crate::layout::table::Slot;
use crate::place::Place;

/// Flag of a slot that never changes again.
pub(super) const FROZEN: u64 = 1 << 47;
/// Flag of a slot whose key is not inserted yet.
pub(super) const TENTATIVE: u64 = 1 << 46;
/// Places have fewer bits than in mode `alone`: memory nodes 0 to 63.
pub(super) const PLACE_END: u64 = 1 << 46;

/// Flag of a root's word while a copy of the directory is made.
pub(super) const DOUBLING: u64 = 1 << 57;
const VERSION: u64 = 0xff << 48;

/// Offset of the lock in a subtable's header.
pub(super) const LOCK: u64 = 24;
/// Offset of the lower successor's place in a subtable's header.
pub(super) const SUCCESSOR: u64 = 32;
/// Offset of the sibling's place in a subtable's header.
pub(super) const SIBLING: u64 = 40;

/// Offset of the upper successor's place in a subtable's header.
pub(super) const UPPER: u64 = 48;

/// True if the slot never changes again.
pub(super) const fn is_frozen(word: u64) -> bool {
    word & FROZEN != 0
}

/// True if the slot names a key that is not inserted yet.
pub(super) const fn is_tentative(word: u64) -> bool {
    word & TENTATIVE != 0
}

/// The slot without flags. `None`: the slot is empty.
pub(super) fn slot_of(word: u64) -> Option<Slot> {
    Slot::parse(word & !(FROZEN | TENTATIVE))
}

/// The root's word for a directory that replaces the one of `before`.
///
/// The version makes the words of two directories differ, even if both have one place.
pub(super) const fn next_root(before: u64, depth: u32, header: Place) -> u64 {
    let version = (before & VERSION).wrapping_add(1 << 48) & VERSION;
    (depth as u64) << 58 | version | header.bits()
}

/// A lock of client `client` that ends at `until`.
pub(super) const fn lock_word(client: u32, until: u64) -> u64 {
    (client as u64 + 1) << 48 | until & ((1 << 48) - 1)
}

/// True if the lock has ended at `now`, or if there is no lock.
pub(super) const fn is_unlocked(lock: u64, now: u64) -> bool {
    lock == 0 || lock & ((1 << 48) - 1) <= now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_do_not_touch_the_slot() {
        let slot = Slot { fingerprint: 0xfe, length: 224, place: Place::of(PLACE_END - 1) };
        for flags in [0, FROZEN, TENTATIVE, FROZEN | TENTATIVE] {
            assert_eq!(slot_of(slot.word() | flags), Some(slot));
            assert_eq!(slot_of(flags), None);
        }
    }

    #[test]
    fn root_words_of_one_place_differ() {
        let first = next_root(0, 3, Place::of(7));
        let second = next_root(first | DOUBLING, 3, Place::of(7));
        assert_ne!(first, second);
        assert_eq!(second & DOUBLING, 0);
        let directory = crate::layout::root::DirectoryRoot::parse(second).expect("a word");
        assert_eq!((directory.depth, directory.header), (3, Place::of(7)));
    }

    #[test]
    fn lock_ends() {
        let lock = lock_word(0, 100);
        assert!(!is_unlocked(lock, 99) && is_unlocked(lock, 100) && is_unlocked(0, 0));
    }
}
