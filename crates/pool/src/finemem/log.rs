//! The full redo log and the capability table: 8 bytes each for a chunk and for a block.
//!
//! ```text
//! full log, one for each chunk; what is known of a block is kept at its first chunk
//!  63                              31 30     26 25    24    23  21 20       14 13       0
//! ┌──────────────────────────────────┬─────────┬──────┬─────┬──────┬───────────┬─────────┐
//! │ zero                             │sections │layer │taken│ size │ timestamp │ user    │
//! └──────────────────────────────────┴─────────┴──────┴─────┴──────┴───────────┴─────────┘
//! of a block of several sections each section's first chunk has one: size 5, and the logarithm of how many
//!
//! capability, one for each block
//!  63                                  32 31                                   0
//! ┌──────────────────────────────────────┬──────────────────────────────────────┐
//! │ main key                             │ backup key                           │
//! └──────────────────────────────────────┴──────────────────────────────────────┘
//! free or granted: (key, 0)     quarantined: (0, the old key)
//! in finemem-paper (key, backup key); (what was the backup key, 0) until there is another
//! ```

use fabric::Key;

use super::header::{Record, Timestamp, User};
use super::layout::{Block, SECTION_ORDER, SPAN_ORDER};

/// Which header a record of the log came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Layer {
    /// A span's: the block is one of chunks.
    #[default]
    Span,
    /// A section's: the block is one of spans.
    Section,
}

/// What the full log of a chunk says: the last that happened to the block that begins there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FullLog {
    /// Whose it is, or was.
    pub user: User,
    /// When.
    pub timestamp: Timestamp,
    /// Logarithm of the block's length, in chunks or spans; [`Record::PART`] of one that has several sections.
    pub size: u32,
    /// Of one that has several, the logarithm of how many; else 0.
    pub sections: u32,
    /// It was taken, not given back.
    pub taken: bool,
    /// Of what the block is one.
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
    /// What a header's temporary log becomes.
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

    /// The bits that say whose a block is, and which: all but the timestamp.
    pub const OWNERSHIP: u64 = !(0x7f << TIMESTAMP_AT);

    /// What says that `user` has a block, at no time.
    pub fn taken(user: User, block: Block) -> Self {
        let (layer, timestamp) = (block.layer(), Timestamp::default());
        let (size, sections) = match layer {
            Layer::Span => (block.order, 0),
            Layer::Section if block.order > SECTION_ORDER => {
                (Record::PART, block.order - SECTION_ORDER)
            }
            Layer::Section => (block.order - SPAN_ORDER, 0),
        };
        Self { user, timestamp, size, sections, taken: true, layer }
    }

    /// What a word says; bits beyond the fields are ignored.
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
    /// What opens the block; no key while it is quarantined.
    pub main: Key,
    /// What opens it next; of a block in quarantine, what opened it.
    pub backup: Key,
}

impl Capability {
    /// A block with a key.
    pub fn open(key: Key) -> Self {
        Self { main: key, backup: Key::default() }
    }

    /// A block that its owner has given up, and whose key may still open it.
    pub fn quarantined(key: Key) -> Self {
        Self { main: Key::default(), backup: key }
    }

    /// True for a block with a key and none to follow it.
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

    /// What a word says.
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
        fn a_log_is_read_back(
            user in 0u16..=User::MAX, time in 0u32..128, size in 0u32..8, taken in any::<bool>(),
            section in any::<bool>(), sections in 0u32..32,
        ) {
            let layer = if section { Layer::Section } else { Layer::Span };
            let user = User::new(user).unwrap();
            let log = FullLog { user, timestamp: Timestamp::new(time), size, sections, taken, layer };
            prop_assert_eq!(FullLog::parse(log.to_word()), log);
            prop_assert_eq!(log.to_word() >> (SECTIONS_AT + 5), 0);
        }

        #[test]
        fn any_word_is_a_log_and_a_capability(word in any::<u64>()) {
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
