//! The full redo log (8 bytes per chunk) and the capability table (8 bytes per block).
//!
//! ```text
//! full log, one per chunk; the log of a block is that of its first chunk
//!  63                              31 30     26 25    24    23  21 20       14 13       0
//! ┌──────────────────────────────────┬─────────┬──────┬─────┬──────┬───────────┬─────────┐
//! │ zero                             │sections │layer │taken│ size │ timestamp │ user    │
//! └──────────────────────────────────┴─────────┴──────┴─────┴──────┴───────────┴─────────┘
//! A block of several sections has a log at each section's first chunk: size 5, and the logarithm
//! of the number of sections.
//!
//! capability, one per block
//!  63                                  32 31                                   0
//! ┌──────────────────────────────────────┬──────────────────────────────────────┐
//! │ main key                             │ backup key                           │
//! └──────────────────────────────────────┴──────────────────────────────────────┘
//! free or granted: (key, 0)     quarantined: (0, the old key)
//! in finemem-paper (key, backup key); after a free (the former backup key, 0), until regeneration
//! ```

use verbs::Key;

use super::block::{Block, Layer, Order, PARTS_ORDER_MAX, SECTION_ORDER, SPAN_ORDER};
use super::header::{Record, Timestamp, User};
use crate::blocks::ChunkIndex;

/// The full log of a chunk: the last change of the block that begins there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FullLog {
    /// The owner, or the last owner of a freed block.
    pub user: User,
    /// Time of the change.
    pub timestamp: Timestamp,
    /// Logarithm of the block's length, in chunks or spans; [`Record::PART`] for a block of several
    /// sections.
    pub size: u32,
    /// Logarithm of the number of sections of a block that has several; otherwise 0.
    pub sections: u32,
    /// True after an allocation, false after a free.
    pub taken: bool,
    /// Unit of the block's length.
    pub layer: Layer,
}

const TIMESTAMP_AT: u32 = 14;
const SIZE_AT: u32 = 21;
const TAKEN_AT: u32 = 24;
const LAYER_AT: u32 = 25;
const SECTIONS_AT: u32 = 26;
const _: () = assert!(User::MAX as u64 == (1 << TIMESTAMP_AT) - 1);
const _: () = assert!(SIZE_AT == TIMESTAMP_AT + 7 && TAKEN_AT == SIZE_AT + 3);

impl FullLog {
    /// The full log for a header's temporary log.
    pub fn of(record: Record, taken: bool, layer: Layer) -> Self {
        let Record { offset, size, timestamp, user } = record;
        let sections = if layer == Layer::Section && size == Record::PART { offset } else { 0 };
        Self { user, timestamp, size, sections, taken, layer }
    }

    /// The word.
    pub fn to_word(self) -> u64 {
        self.user.raw() as u64
            | (self.timestamp.raw() as u64) << TIMESTAMP_AT
            | (self.size as u64) << SIZE_AT
            | (self.taken as u64) << TAKEN_AT
            | ((self.layer == Layer::Section) as u64) << LAYER_AT
            | (self.sections as u64) << SECTIONS_AT
    }

    /// Mask of the bits that identify the block and its owner: all but the timestamp.
    pub const OWNERSHIP: u64 = !(0x7f << TIMESTAMP_AT);

    /// The log of a block owned by `user`, with timestamp 0.
    pub fn taken(user: User, block: Block) -> Self {
        let (layer, timestamp) = (block.layer(), Timestamp::default());
        let (size, sections) = match layer {
            Layer::Span => (block.order.raw(), 0),
            Layer::Section if block.order.has_parts() => (Record::PART, block.order.in_sections()),
            Layer::Section => (block.order.in_spans(), 0),
        };
        Self { user, timestamp, size, sections, taken: true, layer }
    }

    /// The block that this log of `chunk` describes: it begins at `chunk`, or in an earlier
    /// section.
    pub fn block(self, chunk: ChunkIndex) -> Block {
        match self.layer {
            Layer::Span => Block { chunk, order: Order::new(self.size) },
            Layer::Section if self.size == Record::PART => {
                Block::around(chunk, SECTION_ORDER.plus(self.sections.min(PARTS_ORDER_MAX)))
            }
            Layer::Section => Block { chunk, order: SPAN_ORDER.plus(self.size) },
        }
    }

    /// Decodes a word; bits outside the fields are ignored.
    pub fn parse(word: u64) -> Self {
        let bits = |at: u32, count: u32| (word >> at) as u32 & ((1 << count) - 1);
        Self {
            user: User::new(bits(0, TIMESTAMP_AT) as u16).expect("14 bits"),
            timestamp: Timestamp::new(bits(TIMESTAMP_AT, 7)),
            size: bits(SIZE_AT, 3),
            taken: bits(TAKEN_AT, 1) == 1,
            layer: if bits(LAYER_AT, 1) == 1 { Layer::Section } else { Layer::Span },
            sections: bits(SECTIONS_AT, 5),
        }
    }
}

/// An entry of the capability table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capability {
    /// The key that grants access to the block; no key during quarantine.
    pub main: Key,
    /// The next main key. For a block in quarantine: the last main key.
    pub backup: Key,
}

impl Capability {
    /// A block with a key.
    pub fn open(key: Key) -> Self {
        Self { main: key, backup: Key::default() }
    }

    /// A block that its owner has freed, and whose key may still grant access.
    pub fn quarantined(key: Key) -> Self {
        Self { main: Key::default(), backup: key }
    }

    /// True for a block with a main key and no backup key.
    pub fn lacks_backup(self) -> bool {
        (self.main != Key::default()) & (self.backup == Key::default())
    }

    /// True for a block in quarantine.
    pub fn is_quarantined(self) -> bool {
        (self.main == Key::default()) & (self.backup != Key::default())
    }

    /// The word.
    pub fn to_word(self) -> u64 {
        (self.main.0 as u64) << 32 | self.backup.0 as u64
    }

    /// Decodes a word.
    pub fn parse(word: u64) -> Self {
        Self { main: Key((word >> 32) as u32), backup: Key(word as u32) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn full_log_round_trips(
            user in 0u16..=User::MAX, time in 0u32..128, size in 0u32..8, taken in any::<bool>(),
            section in any::<bool>(), sections in 0u32..32,
        ) {
            let layer = if section { Layer::Section } else { Layer::Span };
            let user = User::new(user).unwrap();
            let timestamp = Timestamp::new(time);
            let log = FullLog { user, timestamp, size, sections, taken, layer };
            prop_assert_eq!(FullLog::parse(log.to_word()), log);
            prop_assert_eq!(log.to_word() >> (SECTIONS_AT + 5), 0);
        }

        #[test]
        fn any_word_parses_as_log_and_capability(word in any::<u64>()) {
            let log = FullLog::parse(word);
            prop_assert_eq!(FullLog::parse(log.to_word()), log);
            prop_assert_eq!(Capability::parse(word).to_word(), word);
        }
    }

    #[test]
    fn a_quarantined_block_has_no_main_key() {
        let key = Key(0x703);
        assert!(Capability::quarantined(key).is_quarantined());
        assert!(!Capability::open(key).is_quarantined() && !Capability::default().is_quarantined());
    }
}
