//! Names of remote memory: places of 32 bytes, and addresses of bytes.

use std::fmt;

/// Bytes of the unit in which places count.
pub const UNIT: u64 = 32;

/// Bits of a place: 8 of the memory node, 40 of the offset.
pub const PLACE_BITS: u32 = 48;

const UNITS_BITS: u32 = 40;
const MASK: u64 = (1 << PLACE_BITS) - 1;

/// The place of a block: a memory node, and an offset from the node's first chunk in units of 32 B.
///
/// Layout of the word: node in bits 47 to 40, offset in bits 39 to 0. Place 0 is that of a root, so
/// no block has this place, and a word can use 0 for "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(u64);

impl Place {
    /// Place `unit` of memory node `node`. `None` if the unit has more than 40 bits.
    pub const fn new(node: u8, unit: u64) -> Option<Self> {
        if unit >> UNITS_BITS != 0 {
            return None;
        }
        Some(Self((node as u64) << UNITS_BITS | unit))
    }

    /// The place in the lower 48 bits of `word`. The upper bits are ignored.
    pub const fn of(word: u64) -> Self {
        Self(word & MASK)
    }

    /// The place as a word of 48 bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Number of the memory node.
    pub const fn node(self) -> u8 {
        (self.0 >> UNITS_BITS) as u8
    }

    /// Offset from the node's first chunk in units of 32 B.
    pub const fn unit(self) -> u64 {
        self.0 & ((1 << UNITS_BITS) - 1)
    }

    /// True for the word 0, which names no block.
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Address of the byte `offset` bytes behind the place's first byte.
    pub const fn at(self, offset: u64) -> Address {
        Address { node: self.node(), offset: self.unit() * UNIT + offset }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:#x}", self.node(), self.unit() * UNIT)
    }
}

/// The address of a byte: a memory node, and an offset from the node's first chunk in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Number of the memory node.
    pub node: u8,
    /// Offset from the node's first chunk in bytes; at most 45 bits.
    pub offset: u64,
}

impl Address {
    /// The address as a word: node in bits 63 to 56, offset below.
    pub const fn word(self) -> u64 {
        (self.node as u64) << 56 | self.offset
    }

    /// The address in `word`; the inverse of [`Address::word`].
    pub const fn of(word: u64) -> Self {
        Self { node: (word >> 56) as u8, offset: word & ((1 << 56) - 1) }
    }

    /// The address `bytes` further on.
    pub const fn plus(self, bytes: u64) -> Self {
        Self { node: self.node, offset: self.offset + bytes }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:#x}", self.node, self.offset)
    }
}
