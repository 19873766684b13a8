//! Places of blocks in the memory of memory nodes.

use std::fmt;

/// Bytes of a unit, in which offsets and lengths are counted.
pub const UNIT_BYTES: u64 = 32;

/// Bits of a place that hold the offset.
const OFFSET_BITS: u32 = 40;

/// The place of a block: a memory node and an offset from this node's first chunk.
///
/// ```text
///   63      48 47     40 39                                    0
///  |    0     |  node   |  offset in units of 32 bytes          |
/// ```
///
/// A slot of an index holds these 48 bits as they are. A place is no address: a server that
/// restarts gets other keys for a chunk, and the places in its index stay valid.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(u64);

impl Place {
    /// Maximum offset in bytes: 32 TiB minus one unit.
    pub const OFFSET_MAX: u64 = ((1 << OFFSET_BITS) - 1) * UNIT_BYTES;

    /// The place at `offset` bytes from the first chunk of memory node `node`. `None` if the offset
    /// is no multiple of [`UNIT_BYTES`], or is beyond [`Place::OFFSET_MAX`].
    pub const fn new(node: u8, offset: u64) -> Option<Self> {
        match offset <= Self::OFFSET_MAX && offset.is_multiple_of(UNIT_BYTES) {
            true => Some(Self(((node as u64) << OFFSET_BITS) | (offset / UNIT_BYTES))),
            false => None,
        }
    }

    /// The place with these bits. `None` if one of the upper 16 bits is set.
    pub const fn from_raw(raw: u64) -> Option<Self> {
        if raw >> (OFFSET_BITS + 8) == 0 { Some(Self(raw)) } else { None }
    }

    /// The bits, of which the upper 16 are zero.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Number of the memory node.
    pub const fn node(self) -> u8 {
        (self.0 >> OFFSET_BITS) as u8
    }

    /// Offset in bytes from the memory node's first chunk.
    pub const fn offset(self) -> u64 {
        self.units() * UNIT_BYTES
    }

    /// Offset in units.
    pub(crate) const fn units(self) -> u64 {
        self.0 & ((1 << OFFSET_BITS) - 1)
    }

    /// The place `units` units behind this one, which must lie in the same chunk.
    pub(crate) const fn plus(self, units: u64) -> Self {
        Self(self.0 + units)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:#x}", self.node(), self.offset())
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_has_the_layout_of_a_slot() {
        let place = Place::new(0xab, 0x1234 * 32).unwrap();
        assert_eq!(place.raw(), 0x0000_ab00_0000_1234);
        assert_eq!((place.node(), place.offset()), (0xab, 0x1234 * 32));
        assert_eq!(Place::from_raw(place.raw()), Some(place));
        assert_eq!(place.to_string(), "171:0x24680");
    }

    #[test]
    fn impossible_places_are_refused() {
        assert_eq!(Place::new(0, 16), None);
        assert_eq!(Place::new(0, Place::OFFSET_MAX + 32), None);
        assert_eq!(Place::new(255, Place::OFFSET_MAX).unwrap().raw(), (1 << 48) - 1);
        assert_eq!(Place::from_raw(1 << 48), None);
    }
}
