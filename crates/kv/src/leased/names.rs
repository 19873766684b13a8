//! Names of objects in places.
//!
//! The name of an object has 32 bytes, and a slot of the index has 46 bits for a place. A place
//! has the object's entry and the low bits of its generation:
//!
//! ```text
//! unit of a place   39 entry | low bits of the generation | kind (2) | offset in units of 32 B 0
//! word of an entry  63 upper bits of the generation 32 | 31 blocks of the object that are freed 0
//! ```
//!
//! The memory node compares whole generations. The upper bits of an entry's generation stand in a
//! *table of names*, an object with a word for each entry. A compute node assumes upper bits that
//! it knows, 0 at first. If the memory node does not find the object, the compute node reads the
//! word. Upper bits change only once in some hundred allocations of one entry, so hardly any access
//! reads the table.
//!
//! Scheme `unprotected` has the address of an object in place of its entry, and the entry in place
//! of the generation. There the lowest bits of all addresses are 0, and have no place.

use pool::Object;

use super::{LeasedSettings, Together};
use crate::error::Error;
use crate::layout::{Malformed, class, put, word};
use crate::place::{Address, Place, UNIT};

/// Bits of a place's unit.
const UNIT_BITS: u32 = 40;
/// Bits of the kind.
const KIND_BITS: u32 = 2;
/// Least bits of a generation in a place.
const LOW_MIN: u32 = 4;
/// Number of the memory node in addresses of the table of names. Places have numbers below.
pub(super) const TABLE_NODE: u8 = 255;
/// Bytes of the anchor.
pub(super) const ANCHOR_BYTES: usize = 64;
/// Offset of the place of the index's root in the anchor.
pub(super) const ROOT: u64 = 56;

const MAGIC: u64 = u64::from_be_bytes(*b"GRNYLS01");

/// The use of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Blocks of values.
    Values,
    /// A part of the index, of a slab's bytes shifted right by this number.
    Index(u8),
    /// The table of names.
    Table,
}

impl Kind {
    /// The kind of an object for a part of the index of `bytes`.
    pub fn of_index(slab: u32, bytes: u32) -> Self {
        let fits = |shift: &u8| slab >> shift >= bytes;
        Self::Index([4, 2].into_iter().find(fits).unwrap_or(0))
    }

    const fn code(self) -> u64 {
        match self {
            Self::Index(shift) => 1 + shift as u64 / 2,
            _ => 0,
        }
    }

    const fn parse(code: u64) -> Self {
        match code & ((1 << KIND_BITS) - 1) {
            0 => Self::Values,
            code => Self::Index(2 * (code as u8 - 1)),
        }
    }
}

/// A name as an address has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Short {
    /// The object's entry.
    pub entry: u32,
    /// Low bits of the generation.
    pub low: u32,
}

/// An object, and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub name: Short,
    pub kind: Kind,
    /// Offset in bytes.
    pub offset: u64,
}

/// The facts that all compute nodes of an index have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Number of the memory node in places.
    pub node: u8,
    /// Bytes of the largest object but the table: a power of two.
    pub slab: u32,
    /// Bits of an entry in a place.
    entry_bits: u32,
    /// Lowest bits of all entries, which are 0.
    zero_bits: u32,
    /// Blocks of one object of values.
    pub together: Together,
    /// The table of names.
    pub table: Object,
}

impl Layout {
    /// Number of words of a table for `objects` objects.
    ///
    /// # Errors
    /// [`Error::Setting`] if a place has no room for the names.
    pub fn table_words(slab: u32, objects: u32) -> Result<u64, Error> {
        if !slab.is_power_of_two() || !(512..=class::SLAB_MAX).contains(&slab) {
            return Err(Error::Setting("the slab must be a power of two from 512 B to 1 MiB"));
        }
        let words = objects.max(2).checked_next_power_of_two();
        let few = Error::Setting("places have no room for so many objects; use a smaller slab");
        match words.filter(|words| low_bits(slab, words.ilog2()).is_some()) {
            Some(words) => Ok(words.into()),
            None => Err(few),
        }
    }

    /// The layout of an index with these settings, a checked slab, and a table of `words` words.
    pub fn new(node: u8, settings: &LeasedSettings, words: u64, table: Object) -> Self {
        Self {
            node,
            slab: settings.slab,
            entry_bits: words.ilog2(),
            zero_bits: settings.entry_unit.max(1).ilog2(),
            together: settings.together,
            table,
        }
    }

    /// The anchor's bytes.
    pub fn encode(&self) -> [u8; ANCHOR_BYTES] {
        let mut bytes = [0; ANCHOR_BYTES];
        put(&mut bytes, 0, MAGIC);
        let sizes = u64::from(self.slab) << 32
            | u64::from(self.zero_bits) << 24
            | u64::from(self.entry_bits) << 16
            | u64::from(self.together.0) << 8
            | u64::from(self.node);
        put(&mut bytes, 8, sizes);
        bytes[16..48].copy_from_slice(&self.table.to_bytes());
        bytes
    }

    /// The layout in an anchor's bytes.
    pub fn parse(bytes: &[u8; ANCHOR_BYTES]) -> Result<Self, Malformed> {
        if word(bytes, 0) != MAGIC {
            return Err(Malformed("an anchor of objects has a wrong magic number"));
        }
        let sizes = word(bytes, 8);
        let (slab, entry_bits) = ((sizes >> 32) as u32, (sizes >> 16) as u32 & 0xff);
        let zero_bits = (sizes >> 24) as u32 & 0xff;
        let together = Together((sizes >> 8) as u8);
        let table = bytes[16..48].try_into().ok().and_then(Object::from_bytes);
        let is_possible = entry_bits < 32
            && entry_bits + zero_bits <= 32
            && together.0 > 0
            && Self::table_words(slab, 1 << entry_bits).is_ok();
        match table.filter(|_| is_possible) {
            Some(table) => {
                Ok(Self { node: sizes as u8, slab, entry_bits, zero_bits, together, table })
            }
            None => Err(Malformed("an anchor of objects has impossible sizes")),
        }
    }

    const fn offset_bits(&self) -> u32 {
        offset_bits(self.slab)
    }

    fn low_bits(&self) -> u32 {
        low_bits(self.slab, self.entry_bits).expect("checked when the layout was made")
    }

    /// The place of the bytes at `offset` of an object. `None`: the table has no word for the
    /// entry.
    pub fn place(&self, kind: Kind, entry: u32, generation: u32, offset: u32) -> Option<Place> {
        let number = u64::from(entry) >> self.zero_bits;
        if number >> self.entry_bits != 0 || number << self.zero_bits != u64::from(entry) {
            return None;
        }
        let name = (number << self.low_bits()) | u64::from(self.short(generation));
        let unit = ((name << KIND_BITS) | kind.code()) << self.offset_bits();
        Place::new(self.node, unit | (u64::from(offset) / UNIT))
    }

    /// The low bits of a generation.
    fn short(&self, generation: u32) -> u32 {
        generation & ((1 << self.low_bits()) - 1)
    }

    /// The upper bits of a generation.
    pub fn upper(&self, generation: u32) -> u32 {
        generation >> self.low_bits()
    }

    /// The name that the table has for an object.
    pub fn name_of(&self, object: &Object) -> Short {
        Short { entry: object.entry, low: self.short(object.generation) }
    }

    /// The object at an address.
    pub fn spot(&self, at: Address) -> Spot {
        if at.node == TABLE_NODE {
            return Spot {
                name: Short { entry: self.table.entry, low: self.table.generation },
                kind: Kind::Table,
                offset: at.offset,
            };
        }
        let shift = self.offset_bits() + UNIT.ilog2();
        let rest = at.offset >> shift;
        let name = rest >> KIND_BITS;
        let low = name & ((1 << self.low_bits()) - 1);
        let entry = (name >> self.low_bits()) << self.zero_bits;
        Spot {
            name: Short { entry: entry as u32, low: low as u32 },
            kind: Kind::parse(rest),
            offset: at.offset & ((1 << shift) - 1),
        }
    }

    /// The whole name of an object, with the upper bits of its generation.
    pub fn object(&self, name: Short, kind: Kind, upper: u32) -> Object {
        match kind {
            Kind::Table => self.table,
            _ => Object {
                entry: name.entry,
                // Bits beyond a generation can come from damaged memory only.
                generation: (u64::from(upper) << self.low_bits()) as u32 | name.low,
                len: self.slab.into(),
                ..self.table
            },
        }
    }

    /// Bytes to allocate for an object of `bytes`: entries that are addresses need objects that
    /// begin at multiples of a unit.
    pub fn allocated(&self, bytes: u64) -> u64 {
        match self.zero_bits {
            0 => bytes,
            // Entries of scheme `unprotected` count 16 bytes.
            bits => bytes.max(16 << bits).next_power_of_two(),
        }
    }

    /// Bytes of an object of a kind.
    pub fn bytes(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Values => self.slab.into(),
            Kind::Index(shift) => u64::from(self.slab >> shift),
            Kind::Table => self.table.len,
        }
    }

    /// Address of the word of an entry.
    pub fn word(&self, entry: u32) -> Address {
        Address { node: TABLE_NODE, offset: 8 * u64::from(entry >> self.zero_bits) }
    }

    /// Bytes of a block of values for `bytes`, and the number of such blocks of one object. `None`:
    /// no object is as large.
    pub fn blocks(&self, bytes: u32) -> Option<(u32, u32)> {
        let each = match bytes {
            0..=class::EXACT_BYTES => bytes.max(1).next_multiple_of(UNIT as u32),
            _ => class::fitting(self.slab, bytes)?.1,
        };
        let count = (self.slab / each).min(self.together.0.into());
        (count > 0).then_some((each, count))
    }
}

const fn offset_bits(slab: u32) -> u32 {
    slab.ilog2() - UNIT.ilog2()
}

/// Bits of a generation in a place; `None` if there are too few.
fn low_bits(slab: u32, entry_bits: u32) -> Option<u32> {
    let rest = UNIT_BITS.checked_sub(KIND_BITS + offset_bits(slab) + entry_bits)?;
    // A generation has 32 bits.
    (rest >= LOW_MIN).then_some(rest.min(24))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(words: u64) -> Object {
        Object { incarnation: 7, entry: 1, generation: 0, len: 8 * words, node: 0 }
    }

    fn layout(slab: u32, objects: u32) -> Layout {
        let words = Layout::table_words(slab, objects).expect("room");
        Layout::new(3, &LeasedSettings { slab, ..LeasedSettings::default() }, words, table(words))
    }

    proptest! {
        #[test]
        fn place_leads_back_to_the_object(
            slab_bits in 9_u32..=16,
            entry: u32,
            generation: u32,
            offset: u32,
            code in 0_u64..4,
        ) {
            let slab = 1 << slab_bits;
            let layout = layout(slab, 1 << 16);
            let kind = Kind::parse(code);
            let (entry, offset) = (entry % (1 << 16), offset % slab / 32 * 32);
            let place = layout.place(kind, entry, generation, offset).expect("an entry");
            prop_assert!(place.node() == 3 && place.bits() < 1 << 46);
            let spot = layout.spot(place.at(5));
            prop_assert_eq!((spot.kind, spot.offset), (kind, u64::from(offset) + 5));
            let object = layout.object(spot.name, spot.kind, layout.upper(generation));
            prop_assert_eq!((object.entry, object.generation), (entry, generation));
            prop_assert_eq!(layout.name_of(&object), spot.name);
        }

        #[test]
        fn anchor_of_any_bytes_is_read_or_refused(bytes: [u8; 32], sizes: u64) {
            let mut anchor = [0; ANCHOR_BYTES];
            anchor[16..48].copy_from_slice(&bytes);
            put(&mut anchor, 0, MAGIC);
            put(&mut anchor, 8, sizes);
            if let Ok(layout) = Layout::parse(&anchor) {
                prop_assert!(layout.low_bits() >= LOW_MIN);
            }
        }
    }

    #[test]
    fn anchor_is_read_back() {
        let layout = layout(16 << 10, 1 << 20);
        assert_eq!(Layout::parse(&layout.encode()), Ok(layout));
        assert!(Layout::parse(&[0; ANCHOR_BYTES]).is_err());
        assert_eq!(layout.low_bits(), 9);
    }

    #[test]
    fn entry_beyond_the_table_has_no_place() {
        let layout = layout(4096, 1000);
        assert!(layout.place(Kind::Values, 1023, 0, 0).is_some());
        assert_eq!(layout.place(Kind::Values, 1024, 0, 0), None);
        assert!(Layout::table_words(1 << 20, 1 << 20).is_err());
        assert!(Layout::table_words(3000, 16).is_err());
    }

    #[test]
    fn entries_may_be_addresses() {
        let words = Layout::table_words(16 << 10, 1 << 16).expect("room");
        let settings = LeasedSettings { entry_unit: 256, ..LeasedSettings::default() };
        let layout = Layout::new(0, &settings, words, table(words));
        assert_eq!(Layout::parse(&layout.encode()), Ok(layout));
        assert_eq!(layout.place(Kind::Values, 255, 0, 0), None);
        let place = layout.place(Kind::Values, 256 * 65_535, 7, 4096).expect("an entry");
        let spot = layout.spot(place.at(0));
        assert_eq!((spot.name.entry, spot.name.low, spot.offset), (256 * 65_535, 7, 4096));
        assert_eq!(layout.word(spot.name.entry).offset, 8 * 65_535);
        assert_eq!([100, 4096, 5000].map(|bytes| layout.allocated(bytes)), [4096, 4096, 8192]);
    }

    #[test]
    fn blocks_of_an_object_fit_the_slab() {
        let layout = layout(16 << 10, 1 << 16);
        assert_eq!(layout.blocks(4096), Some((4096, 4)));
        assert_eq!(layout.blocks(4097), Some((4128, 3)));
        assert_eq!(layout.blocks(100), Some((128, 4)));
        assert_eq!(layout.blocks(8000), Some((8192, 2)));
        assert_eq!(layout.blocks(16 << 10), Some((16 << 10, 1)));
        assert_eq!(layout.blocks((16 << 10) + 1), None);
        assert_eq!(Kind::of_index(16 << 10, 4096), Kind::Index(2));
        assert_eq!(Kind::of_index(16 << 10, 4097), Kind::Index(0));
        assert_eq!(layout.bytes(Kind::Index(4)), 1024);
    }
}
