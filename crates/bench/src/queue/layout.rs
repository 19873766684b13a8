//! Layout of a queue in remote memory. All words are big-endian, as atomics have them.
//!
//! ```text
//! metadata block, 64 B                    segment, 64 B and 32 B for each entry
//! +0   MAGIC                              +0   inserted: indexes given out, by FAA
//! +8   entries of a segment               +8   taken: entries taken, by CAS
//! +16  head: link                         +16  next: link, by CAS
//! +24  tail: link                         +24  previous: link, until that segment is freed
//!                                         +64  entries: payload (24), check word (8)
//! ```

use scheme::Object;

/// First word of a metadata block.
pub const MAGIC: u64 = u64::from_be_bytes(*b"granaryq");

/// Bytes of a metadata block.
pub const METADATA_BYTES: usize = 64;
/// Offset of the link to the first segment from which entries are taken.
pub const HEAD: u64 = 16;
/// Offset of the link to a segment near the last one.
pub const TAIL: u64 = 24;

/// Bytes of a segment before its entries.
pub const HEADER_BYTES: usize = 64;
/// Offset of the number of indexes given out.
pub const INSERTED: u64 = 0;
/// Offset of the number of entries taken.
pub const TAKEN: u64 = 8;
/// Offset of the link to the next segment.
pub const NEXT: u64 = 16;
/// Offset of the link to the previous segment.
pub const PREVIOUS: u64 = 24;

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 32;
/// Bytes of an entry for the program.
pub const PAYLOAD_BYTES: usize = 24;
/// Largest number of entries of a segment.
pub const ENTRIES_MAX: u64 = 1 << 16;

/// The part of an entry for the program.
pub type Payload = [u8; PAYLOAD_BYTES];

/// Check word of an entry that no consumer waits for any more. Memory of a new segment is zero.
const SKIPPED: u64 = 1;
/// Smallest check word of a written entry.
const CHECK_MIN: u64 = 2;

/// The word at `at`.
pub fn word(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Replaces the word at `at`.
pub fn put(bytes: &mut [u8], at: u64, word: u64) {
    let at = at as usize;
    bytes[at..at + 8].copy_from_slice(&word.to_be_bytes());
}

/// Name of a segment in one word: entry (32), generation (32), plus one. Zero is no link.
///
/// The segments of a queue have the memory node, its start and the length in common. So one CAS
/// publishes the whole name of a segment, and no reader sees a part of it. An entry of the memory
/// node's table has a generation for each object, so that a link never names another segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link(u64);

impl Link {
    /// The link to `segment`.
    pub fn to(segment: &Object) -> Self {
        let name = u64::from(segment.entry) << 32 | u64::from(segment.generation);
        Self(name.wrapping_add(1))
    }

    /// The link in a word; `None` if there is none.
    pub fn of(word: u64) -> Option<Self> {
        (word != 0).then_some(Self(word))
    }

    /// The word.
    pub fn word(self) -> u64 {
        self.0
    }
}

/// The part of a name that all segments of a queue have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Entries of a segment.
    pub entries: u64,
    incarnation: u64,
    node: u32,
}

impl Shape {
    /// The shape of the segments of the queue with this metadata block.
    pub fn new(metadata: &Object, entries: u64) -> Self {
        Self { entries, incarnation: metadata.incarnation, node: metadata.node }
    }

    /// The shape that a metadata block states; `None` if its content is not that of one.
    pub fn of(metadata: &Object, bytes: &[u8; METADATA_BYTES]) -> Option<Self> {
        let (magic, entries) = (word(bytes, 0), word(bytes, 8));
        let is_valid = magic == MAGIC && (1..=ENTRIES_MAX).contains(&entries);
        is_valid.then(|| Self::new(metadata, entries))
    }

    /// A metadata block whose head and tail are `first`.
    pub fn metadata(&self, first: Link) -> [u8; METADATA_BYTES] {
        let mut bytes = [0; METADATA_BYTES];
        let words = [(0, MAGIC), (8, self.entries), (HEAD, first.word()), (TAIL, first.word())];
        words.into_iter().for_each(|(at, word)| put(&mut bytes, at, word));
        bytes
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        entry_offset(self.entries)
    }

    /// The name of a segment.
    pub fn segment(&self, link: Link) -> Object {
        let name = link.0.wrapping_sub(1);
        Object {
            incarnation: self.incarnation,
            entry: (name >> 32) as u32,
            generation: name as u32,
            len: self.segment_bytes(),
            node: self.node,
        }
    }
}

/// Offset of an entry in its segment.
pub fn entry_offset(index: u64) -> u64 {
    HEADER_BYTES as u64 + index * ENTRY_BYTES as u64
}

/// Offset of the check word of an entry in its segment.
pub fn check_offset(index: u64) -> u64 {
    entry_offset(index) + PAYLOAD_BYTES as u64
}

/// The words before the entries of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Indexes given out; may exceed the number of entries.
    pub inserted: u64,
    /// Entries taken.
    pub taken: u64,
    /// The next segment.
    pub next: Option<Link>,
    /// The previous segment, if it may have to be freed.
    pub previous: Option<Link>,
}

impl Header {
    /// Reads a header.
    pub fn of(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            inserted: word(bytes, INSERTED),
            taken: word(bytes, TAKEN),
            next: Link::of(word(bytes, NEXT)),
            previous: Link::of(word(bytes, PREVIOUS)),
        }
    }
}

/// The beginning of a segment before it is linked: it has the first entry already.
pub fn new_segment(previous: Link, payload: &Payload) -> [u8; HEADER_BYTES + ENTRY_BYTES] {
    let mut bytes = [0; HEADER_BYTES + ENTRY_BYTES];
    put(&mut bytes, INSERTED, 1);
    put(&mut bytes, PREVIOUS, previous.word());
    bytes[HEADER_BYTES..].copy_from_slice(&written(0, payload));
    bytes
}

/// State of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// Not written yet, or not completely.
    Empty,
    /// Written.
    Written(Payload),
    /// Its index was given out, and nothing will be written.
    Skipped,
}

impl Entry {
    /// Reads the entry with `index`.
    pub fn of(index: u64, bytes: &[u8; ENTRY_BYTES]) -> Self {
        let (payload, check) = bytes.split_at(PAYLOAD_BYTES);
        let payload = payload.try_into().expect("24 bytes");
        match word(check, 0) {
            SKIPPED => Self::Skipped,
            // Also true during the WRITE: neither it nor a READ at the same time is atomic.
            check if check != check_word(index, &payload) => Self::Empty,
            _ => Self::Written(payload),
        }
    }
}

/// The bytes of a written entry.
pub fn written(index: u64, payload: &Payload) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    bytes[..PAYLOAD_BYTES].copy_from_slice(payload);
    put(&mut bytes, PAYLOAD_BYTES as u64, check_word(index, payload));
    bytes
}

/// Bytes of the check word of a skipped entry.
pub fn skipped() -> [u8; 8] {
    SKIPPED.to_be_bytes()
}

/// Check word of a written entry: a hash of its index and payload, at least [`CHECK_MIN`].
fn check_word(index: u64, payload: &Payload) -> u64 {
    let words = [0, 8, 16].map(|at| word(payload, at));
    let hash = words.into_iter().fold(index, |hash, word| mix(hash ^ word));
    hash.max(CHECK_MIN)
}

/// A bijection whose output bits each depend on all input bits (the finalizer of splitmix64).
fn mix(state: u64) -> u64 {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ state >> 31
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn object(entry: u32, generation: u32) -> Object {
        Object { incarnation: 7, entry, generation, len: 64 + 32 * 5, node: 3 }
    }

    #[test]
    fn zeroed_memory_has_no_link_and_no_entry() {
        assert_eq!(Link::of(0), None);
        let header = Header::of(&[0; HEADER_BYTES]);
        let empty = Header { inserted: 0, taken: 0, next: None, previous: None };
        assert_eq!(header, empty);
        assert_eq!(Entry::of(0, &[0; ENTRY_BYTES]), Entry::Empty);
        assert_eq!(Shape::of(&object(0, 0), &[0; METADATA_BYTES]), None);
    }

    #[test]
    fn metadata_is_read_back_and_bounded() {
        let metadata = object(1, 2);
        let shape = Shape::new(&metadata, 5);
        let first = Link::to(&object(0, 0));
        let mut bytes = shape.metadata(first);
        assert_eq!(Shape::of(&metadata, &bytes), Some(shape));
        assert_eq!([HEAD, TAIL].map(|at| Link::of(word(&bytes, at))), [Some(first); 2]);
        for entries in [0, ENTRIES_MAX + 1, u64::MAX] {
            put(&mut bytes, 8, entries);
            assert_eq!(Shape::of(&metadata, &bytes), None, "{entries}");
        }
    }

    #[test]
    fn new_segment_has_its_first_entry() {
        let previous = Link::to(&object(9, 9));
        let bytes = new_segment(previous, &[5; PAYLOAD_BYTES]);
        let header = Header::of(bytes[..HEADER_BYTES].try_into().unwrap());
        let expected = Header { inserted: 1, taken: 0, next: None, previous: Some(previous) };
        assert_eq!(header, expected);
        let first = bytes[HEADER_BYTES..].try_into().unwrap();
        assert_eq!(Entry::of(0, first), Entry::Written([5; PAYLOAD_BYTES]));
    }

    proptest! {
        #[test]
        fn links_name_their_segment(entry: u32, generation in 0..u32::MAX) {
            let segment = object(entry, generation);
            let link = Link::to(&segment);
            prop_assert_eq!(Link::of(link.word()), Some(link));
            prop_assert_eq!(Shape::new(&object(0, 0), 5).segment(link), segment);
        }

        #[test]
        fn entries_are_read_back(index in 0..ENTRIES_MAX, payload: Payload) {
            let mut bytes = written(index, &payload);
            prop_assert_eq!(Entry::of(index, &bytes), Entry::Written(payload));
            bytes[PAYLOAD_BYTES..].copy_from_slice(&skipped());
            prop_assert_eq!(Entry::of(index, &bytes), Entry::Skipped);
        }

        /// A READ during a WRITE may see any of the words.
        #[test]
        fn part_of_an_entry_is_empty(
            index in 0..ENTRIES_MAX,
            payload: Payload,
            missing in 1_u8..15,
        ) {
            let mut bytes = written(index, &payload);
            for part in (0..4).filter(|part| missing >> part & 1 == 1) {
                bytes[8 * part..8 * part + 8].fill(0);
            }
            let is_whole = bytes == written(index, &payload);
            prop_assert_eq!(Entry::of(index, &bytes) == Entry::Written(payload), is_whole);
            prop_assert_ne!(Entry::of(index, &bytes), Entry::Skipped);
        }
    }
}
