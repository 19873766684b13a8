//! Guards: words in memory that say through which QP a window may be used.
//!
//! A type-1 window opens to every QP of its PD that has its key, and of a key 8 bits are to be guessed
//! (OneSidedMW §2.3). A *guarded* one asks a word of memory as well, each time that it is used:
//!
//! ```text
//!   window:  address of the word ──> word ┐
//!            value ─────────────────────┐ │
//!   QP:      tag ─────────────────── OR ┴ XOR ── AND ── 0: admitted
//!            (0 until its owner sets it)          │
//!   window:  mask ────────────────────────────────┘
//! ```
//!
//! The window's owner chooses word, value and mask when it makes the window, and the tags of its QPs. So a word
//! that whoever hands out memory keeps anyway (whose is it?) says to the NIC who may use it, with nothing to be
//! bound when it changes hands. The NIC knows nothing of what the word means. No hardware has guards.
//!
//! Invariants:
//! - A guard's word lies in a region, 8 bytes aligned; the region counts the guard and outlives it.
//! - A window has its guard from when it is made until it ends, bound or not.

use std::sync::atomic::Ordering;

use crate::dma::Span;
use crate::ids::KeyIndex;

/// A window's guard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    /// The word: 8 bytes, big-endian.
    pub word: Span,
    /// The region that the word lies in.
    pub region: KeyIndex,
    /// What the word is compared with, together with the QP's tag.
    pub value: u64,
    /// The bits that are compared.
    pub mask: u64,
}

/// The guards of all windows, by key index. Beside the key table, so that its entries stay small.
#[derive(Default)]
pub(crate) struct Guards(Vec<Option<Guard>>);

impl Guards {
    /// Gives the window at `index` its guard.
    pub fn set(&mut self, index: KeyIndex, guard: Guard) {
        if self.0.len() <= index.index() {
            self.0.resize(index.index() + 1, None);
        }
        self.0[index.index()] = Some(guard);
    }

    /// Ends the guard of the window at `index`, if it has one.
    pub fn take(&mut self, index: KeyIndex) -> Option<Guard> {
        self.0.get_mut(index.index())?.take()
    }

    /// Whether the guarded window at `index` may be used through a QP with `tag`, as its word says now. It is read
    /// before whatever is read of the window.
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
