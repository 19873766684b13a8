//! Index types: an integer of one index space is not an integer of another one.
//!
//! Each type is a `u32` with conversions to related types. The types of a scheme's own spaces lie
//! beside its layout. Here are those that all schemes share.

use std::ops::Range;

/// A type that is declared with `index_type!`.
pub trait Index: Copy + Ord {
    /// The index with this number.
    fn from_raw(number: u32) -> Self;

    /// The number.
    fn to_raw(self) -> u32;
}

/// Declares an index type. It prints as its number.
#[macro_export]
macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u32);

        impl $name {
            /// The index with this number.
            #[inline]
            pub const fn new(number: u32) -> Self {
                Self(number)
            }

            /// The number.
            #[inline]
            pub const fn raw(self) -> u32 {
                self.0
            }

            /// The number, as an index of an array.
            #[inline]
            pub const fn as_usize(self) -> usize {
                self.0 as usize
            }

            /// The index `count` after this one.
            #[inline]
            pub const fn plus(self, count: u32) -> Self {
                Self(self.0 + count)
            }
        }

        impl $crate::index::Index for $name {
            fn from_raw(number: u32) -> Self {
                Self(number)
            }

            fn to_raw(self) -> u32 {
                self.0
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&self.0, f)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

/// Operations on a range of indices. The standard library has them for integers only.
pub trait IndexRange {
    /// Type of the indices.
    type Index: Index;

    /// Iterates over the range.
    fn iter(
        self,
    ) -> impl DoubleEndedIterator<Item = Self::Index> + ExactSizeIterator + Clone + use<Self>;

    /// Splits the range into ranges of `len` indices; the last one may be shorter.
    fn batches(self, len: usize) -> impl Iterator<Item = Range<Self::Index>>;

    /// Number of indices.
    fn len(&self) -> usize;

    /// Returns true if the range has no index.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<I: Index> IndexRange for Range<I> {
    type Index = I;

    fn iter(self) -> impl DoubleEndedIterator<Item = I> + ExactSizeIterator + Clone + use<I> {
        (self.start.to_raw()..self.end.to_raw()).map(I::from_raw)
    }

    fn batches(self, len: usize) -> impl Iterator<Item = Range<I>> {
        let end = self.end;
        self.iter().step_by(len).map(move |first| {
            let next = first.to_raw().saturating_add(len as u32);
            first..end.min(I::from_raw(next))
        })
    }

    fn len(&self) -> usize {
        self.end.to_raw().saturating_sub(self.start.to_raw()) as usize
    }
}

index_type! {
    /// An entry of the memory node's table, by which a request names what it frees. An entry is a
    /// chunk, a block, or a page of the client's own table (ODRP).
    EntryId
}

index_type! {
    /// A slot for a request in flight. Buffers of requests and replies have a part for each slot.
    Slot
}

/// Decodes a word of a message.
impl From<u32> for EntryId {
    fn from(word: u32) -> Self {
        Self::new(word)
    }
}

/// Encodes a word of a message.
impl From<EntryId> for u32 {
    fn from(entry: EntryId) -> Self {
        entry.raw()
    }
}

impl Slot {
    /// The slot of the request with this number.
    pub const fn of_request(number: u32, credits: u32) -> Self {
        Self::new(number % credits)
    }

    /// Offset of the slot's part in a buffer with `bytes` for each slot.
    pub const fn offset(self, bytes: usize) -> usize {
        self.as_usize() * bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_cover_the_range_once() {
        let range = |from, to| EntryId::new(from)..EntryId::new(to);
        assert_eq!(Vec::from_iter(range(3, 9).batches(4)), [range(3, 7), range(7, 9)]);
        assert_eq!(range(3, 3).batches(4).count(), 0);
        assert_eq!((range(3, 9).len(), range(9, 3).len()), (6, 0));
        assert_eq!(range(3, 5).iter().rev().map(EntryId::raw).collect::<Vec<_>>(), [4, 3]);
    }
}
