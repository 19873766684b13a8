//! Guards: words in memory that determine which QPs may use a window.
//!
//! A type-1 window is accessible to every QP of its PD that presents the window's key, and only the
//! key's 8 tag bits have to be guessed (OneSidedMW §2.3). A *guarded* window also checks a word of
//! memory at every access:
//!
//! ```text
//!   window:  address of the word ──> word ┐
//!            value ─────────────────────┐ │
//!   QP:      tag ─────────────────── OR ┴ XOR ── AND ── 0: admitted
//!            (0 until its owner sets it)          │
//!   window:  mask ────────────────────────────────┘
//! ```
//!
//! The window's owner chooses word, value and mask when it creates the window, and sets the tags of
//! its QPs. An allocator that records the owner of each block in a word can thus use that word as
//! the guard: when the block changes hands, no window has to be rebound. The NIC does not interpret
//! the word. No hardware has guards.
//!
//! Invariants:
//! - A guard word lies in a region and is 8-byte aligned. The region counts the guard and outlives
//!   it.
//! - A window keeps its guard from creation to destruction, bound or not.

use std::sync::atomic::Ordering;

use crate::dma::Span;
use verbs::KeyIndex;

/// A window's guard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    /// The word: 8 bytes, big-endian.
    pub word: Span,
    /// The region that the word lies in.
    pub region: KeyIndex,
    /// The value that, combined with the QP's tag, is compared with the word.
    pub value: u64,
    /// The bits that are compared.
    pub mask: u64,
}

/// Guards of all windows, by key index. Kept apart from the key table, so that its entries stay
/// small.
#[derive(Default)]
pub(crate) struct Guards(Vec<Option<Guard>>);

impl Guards {
    /// Sets the guard of the window at `index`.
    pub fn set(&mut self, index: KeyIndex, guard: Guard) {
        if self.0.len() <= index.index() {
            self.0.resize(index.index() + 1, None);
        }
        self.0[index.index()] = Some(guard);
    }

    /// Removes and returns the guard of the window at `index`.
    pub fn take(&mut self, index: KeyIndex) -> Option<Guard> {
        self.0.get_mut(index.index())?.take()
    }

    /// Returns whether the guard of the window at `index` currently admits a QP with `tag`. The
    /// word is read before any byte of the window is read.
    #[inline]
    pub fn admits(&self, index: KeyIndex, tag: u64) -> bool {
        match self.0.get(index.index()) {
            Some(Some(guard)) => {
                let word = guard.word.load_be64(0, Ordering::Acquire);
                (word ^ (guard.value | tag)) & guard.mask == 0
            }
            _ => false,
        }
    }
}
