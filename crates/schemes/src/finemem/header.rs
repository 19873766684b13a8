//! The 64-bit headers of spans and sections. A header holds a bitmap and the log of the last change
//! in one word, so that one CAS commits both (FineMem §4.1, §4.2).
//!
//! ```text
//!  63                            32 31 30 29    25 24 22 21       15 14            1  0
//! ┌────────────────────────────────┬─────┬────────┬─────┬───────────┬───────────────┬────┐
//! │ bitmap (32)                    │retry│ offset │size │ timestamp │ user          │ in │
//! │                                │ (2) │  (5)   │ (3) │    (7)    │ (14)          │use │
//! └────────────────────────────────┴─────┴────────┴─────┴───────────┴───────────────┴────┘
//! span:    one bit per chunk: 1 taken            in use: its chunks are allocated individually
//! section: two bits per span: 00 empty, 01 normal, 10 contended, 11 full      in use: 0
//! ```
//!
//! - *offset* and *size*: the block of the last change: its first chunk (section: its first span),
//!   and the logarithm of its length. The bitmap shows whether the block was allocated or freed. A
//!   section that is part of a larger block has a special *size*, and *offset* holds the logarithm
//!   of the block's number of sections ([`Record::PART`]).
//! - *user*: the client, as numbered by the memory node (from 1). Applications of one compute node
//!   are distinguished by the service that allocates for them, not in the header.
//! - *timestamp*: advances when a change is of another kind than the previous one (FineMem §4.2).
//!   It distinguishes two words that would otherwise be equal with changes in between. A verb that
//!   is delayed by exactly 128 such changes would not notice them.

use super::block::{
    CHUNK_ORDER_MAX, CHUNKS, ChunkOffset, Order, PARTS_ORDER_MAX, SPAN_ORDER_MAX, SPANS, SpanOffset,
};

/// A field of the word: its lowest bit, and its number of bits.
#[derive(Clone, Copy)]
struct Field(u32, u32);

const IN_USE: Field = Field(0, 1);
const USER: Field = Field(1, 14);
const TIMESTAMP: Field = Field(15, 7);
const SIZE: Field = Field(22, 3);
const OFFSET: Field = Field(25, 5);
const RETRY: Field = Field(30, 2);
const BITMAP: Field = Field(32, 32);

const fn fills_a_word(fields: &[Field]) -> bool {
    let (mut at, mut i) = (0, 0);
    while i < fields.len() {
        if fields[i].0 != at {
            return false;
        }
        at += fields[i].1;
        i += 1;
    }
    at == 64
}
const _: () = assert!(fills_a_word(&[IN_USE, USER, TIMESTAMP, SIZE, OFFSET, RETRY, BITMAP]));
const _: () = assert!(CHUNKS == BITMAP.1 && 2 * SPANS == BITMAP.1);
const _: () = assert!(
    CHUNKS <= 1 << OFFSET.1 && CHUNK_ORDER_MAX < Record::OPENED && Record::OPENED < 1 << SIZE.1
);
const _: () = assert!(
    SPAN_ORDER_MAX < Record::PART
        && Record::PART < Record::OPENED
        && PARTS_ORDER_MAX < 1 << OFFSET.1
);

impl Field {
    const fn get(self, word: u64) -> u32 {
        ((word >> self.0) & ((1 << self.1) - 1)) as u32
    }

    const fn put(self, word: u64, value: u32) -> u64 {
        let mask = ((1 << self.1) - 1) << self.0;
        (word & !mask) | (((value as u64) << self.0) & mask)
    }
}

/// A timestamp of 7 bits, modulo 128.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Timestamp(u32);

impl Timestamp {
    /// The timestamp `value` modulo 128.
    pub const fn new(value: u32) -> Self {
        Self(value % 128)
    }

    /// The next timestamp.
    pub const fn next(self) -> Self {
        Self::new(self.0 + 1)
    }

    /// The number, below 128.
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// True if this timestamp is later than `other`, provided that they are less than 64 apart.
    pub const fn is_after(self, other: Self) -> bool {
        let ahead = (self.0 + 128 - other.0) % 128;
        ahead != 0 && ahead < 64
    }
}

/// A client's user number, 14 bits; 0 means no owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct User(u16);

impl User {
    /// No owner.
    pub const NOBODY: User = User(0);
    /// The largest number.
    pub const MAX: u16 = (1 << USER.1) - 1;

    /// The user with this number; `None` beyond [`User::MAX`].
    pub const fn new(number: u16) -> Option<Self> {
        if number <= Self::MAX { Some(Self(number)) } else { None }
    }

    /// The number.
    pub const fn raw(self) -> u16 {
        self.0
    }
}

/// The temporary log of a header: the block of its last change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// First chunk in the span, or first span in the section. For a [`Record::PART`]: the logarithm
    /// of the block's number of sections.
    pub offset: u32,
    /// Logarithm of the number of chunks or spans, or [`Record::OPENED`], or [`Record::PART`].
    pub size: u32,
    /// Time of the change.
    pub timestamp: Timestamp,
    /// The owner of the block, or the last owner of a freed block.
    pub user: User,
}

impl Record {
    /// In a section: the span at `offset` was opened for the allocation of single chunks. There is
    /// no block.
    pub const OPENED: u32 = 7;
    /// The whole section, as part of a block of several sections.
    pub const PART: u32 = 5;
}

/// State of a span in its section's bitmap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Spread {
    /// Nothing in the span is taken.
    Empty = 0b00,
    /// Part of the span is taken.
    Normal = 0b01,
    /// Part of the span is taken, and allocations contend for it.
    Contended = 0b10,
    /// The whole span is taken.
    Full = 0b11,
}

impl Spread {
    const fn of(bits: u32) -> Self {
        match bits {
            0b00 => Self::Empty,
            0b01 => Self::Normal,
            0b10 => Self::Contended,
            _ => Self::Full,
        }
    }
}

/// A header, as stored in memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Header(pub u64);

impl std::fmt::Debug for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (r, in_use) = (self.record(), self.in_use());
        write!(f, "[{:032b} retry {} ", self.bitmap(), self.retry())?;
        write!(f, "{}+2^{} t{} u{}", r.offset, r.size, r.timestamp.0, r.user.0)?;
        write!(f, "{}]", if in_use { " in use" } else { "" })
    }
}

impl Header {
    /// The bitmap.
    pub const fn bitmap(self) -> u32 {
        BITMAP.get(self.0)
    }

    /// Replaces the bitmap.
    pub const fn with_bitmap(self, bitmap: u32) -> Self {
        Self(BITMAP.put(self.0, bitmap))
    }

    /// Number of failed CAS of the last allocation, as a level: 0 below the lower threshold, 1
    /// below the upper one, else 2.
    pub const fn retry(self) -> u32 {
        RETRY.get(self.0)
    }

    /// Replaces the level of failed CAS.
    pub const fn with_retry(self, level: u32) -> Self {
        Self(RETRY.put(self.0, level))
    }

    /// True if the span's chunks are allocated individually.
    pub const fn in_use(self) -> bool {
        IN_USE.get(self.0) == 1
    }

    /// Sets or clears "in use".
    pub const fn with_in_use(self, in_use: bool) -> Self {
        Self(IN_USE.put(self.0, in_use as u32))
    }

    /// The temporary log.
    pub const fn record(self) -> Record {
        Record {
            offset: OFFSET.get(self.0),
            size: SIZE.get(self.0),
            timestamp: Timestamp(TIMESTAMP.get(self.0)),
            user: User(USER.get(self.0) as u16),
        }
    }

    /// Replaces the temporary log.
    pub const fn with_record(self, record: Record) -> Self {
        let word = OFFSET.put(self.0, record.offset);
        let word = SIZE.put(word, record.size);
        let word = TIMESTAMP.put(word, record.timestamp.0);
        Self(USER.put(word, record.user.0 as u32))
    }

    /// Section: the state of a span.
    pub const fn spread(self, span: SpanOffset) -> Spread {
        Spread::of(self.bitmap() >> (2 * span.raw()) & 0b11)
    }

    /// Section: replaces the state of a span.
    pub const fn with_spread(self, span: SpanOffset, spread: Spread) -> Self {
        let at = 2 * span.raw();
        self.with_bitmap(self.bitmap() & !(0b11 << at) | (spread as u32) << at)
    }
}

/// The bits of a block of chunks in a span's bitmap.
pub const fn chunk_mask(offset: ChunkOffset, order: Order) -> u32 {
    ((1u32 << order.chunks()) - 1) << offset.raw()
}

/// The bits of a block of 2^`size` spans in a section's bitmap, all of them full.
pub const fn span_mask(offset: SpanOffset, size: u32) -> u32 {
    let bits = ((1u64 << (2 << size)) - 1) as u32;
    bits << (2 * offset.raw())
}

/// Positions of the aligned blocks of `order` in a span.
pub fn chunk_blocks(order: Order) -> impl ExactSizeIterator<Item = ChunkOffset> {
    (0..CHUNKS >> order.raw()).map(move |i| ChunkOffset::new(i << order.raw()))
}

/// Positions of the aligned blocks of 2^`size` spans in a section.
pub fn span_blocks(size: u32) -> impl ExactSizeIterator<Item = SpanOffset> {
    (0..SPANS >> size).map(move |i| SpanOffset::new(i << size))
}

/// The first free, aligned block of `order` in a span's bitmap.
pub fn find_chunks(bitmap: u32, order: Order) -> Option<ChunkOffset> {
    chunk_blocks(order).find(|offset| bitmap & chunk_mask(*offset, order) == 0)
}

/// The first aligned block of 2^`size` empty spans in a section's bitmap.
pub fn find_spans(bitmap: u32, size: u32) -> Option<SpanOffset> {
    span_blocks(size).find(|offset| bitmap & span_mask(*offset, size) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_header_field_round_trips_alone(
            word in any::<u64>(), bitmap in any::<u32>(), retry in 0u32..4, offset in 0u32..32,
            size in 0u32..8, time in 0u32..128, user in 0u16..=User::MAX, in_use in any::<bool>(),
        ) {
            let record = Record {
                offset, size, timestamp: Timestamp::new(time), user: User::new(user).unwrap(),
            };
            let before = Header(word);
            let logged = before.with_record(record);
            prop_assert_eq!(logged.record(), record);
            prop_assert_eq!(
                (logged.bitmap(), logged.retry(), logged.in_use()),
                (before.bitmap(), before.retry(), before.in_use())
            );
            let all = logged.with_bitmap(bitmap).with_retry(retry).with_in_use(in_use);
            prop_assert_eq!(all.record(), record);
            prop_assert_eq!((all.bitmap(), all.retry(), all.in_use()), (bitmap, retry, in_use));
        }

        #[test]
        fn found_block_is_free_and_aligned(
            bitmap in any::<u32>(), order in 0u32..=CHUNK_ORDER_MAX,
        ) {
            let order = Order::new(order);
            match find_chunks(bitmap, order) {
                Some(at) => {
                    prop_assert_eq!(at.raw() % order.chunks(), 0);
                    prop_assert_eq!(bitmap & chunk_mask(at, order), 0);
                }
                None => for at in chunk_blocks(order) {
                    prop_assert_ne!(bitmap & chunk_mask(at, order), 0);
                },
            }
        }
    }

    #[test]
    fn timestamp_comparison_wraps_around() {
        let t = Timestamp::new;
        assert!(t(1).is_after(t(0)) && t(0).is_after(t(127)) && t(63).is_after(t(0)));
        assert!(!t(0).is_after(t(0)) && !t(64).is_after(t(0)) && !t(127).is_after(t(0)));
        assert_eq!(t(127).next(), t(0));
    }

    #[test]
    fn states_of_spans_are_two_bits_each() {
        use Spread::*;
        let all = [Empty, Normal, Contended, Full];
        let word =
            SpanOffset::all().fold(Header(0), |h, s| h.with_spread(s, all[s.as_usize() % 4]));
        SpanOffset::all().for_each(|s| assert_eq!(word.spread(s), all[s.as_usize() % 4]));
        assert_eq!(span_mask(SpanOffset::new(0), SPAN_ORDER_MAX), u32::MAX);
        let second = Header(0).with_spread(SpanOffset::new(1), Full);
        assert_eq!(find_spans(second.bitmap(), 1), Some(SpanOffset::new(2)));
    }

    #[test]
    fn largest_user_number_fits() {
        assert!(User::new(User::MAX).is_some() && User::new(User::MAX + 1).is_none());
    }
}
