//! Headers of permissions in the published form (Patronus §5.6, figure 3): layout.
//!
//! ```text
//! header (32 B, big-endian)
//! +0  length: unit (2) | count (14)     (16)   unit: 0: 1 B, 1: 64 B, 2: 4096 B
//! +2  address of the range              (48)
//! +8  window of the range: its index    (32)
//! +12 window of the header: its index   (32)   0: the window of the range opens the lifetime, too
//! +16 start of the lease, us            (64)
//! +24 lifetime, us                      (64)   opened to the compute node
//! ```
//!
//! A length that its unit does not divide is rounded up; 14 bits hold 64 MiB less 4 KiB, and longer
//! ranges have this length. The memory node's CPU writes the header and reads only the lifetime:
//! the book has all else.

/// Length of a header.
pub const HEADER_BYTES: u64 = 32;
/// Offset of the lifetime in a header.
pub const LIFETIME: u64 = 24;

const UNITS: [u64; 3] = [1, 64, 4096];
const COUNT: u64 = (1 << 14) - 1;
const ADDRESS: u64 = (1 << 48) - 1;

/// The fields of a header but the lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Length of the range in bytes.
    pub len: u64,
    /// Address of the range, of which 48 bits are kept.
    pub address: u64,
    /// Index of the window over the range.
    pub window: u32,
    /// Index of the window over the lifetime, or 0.
    pub header_window: u32,
    /// Start of the lease in microseconds, by the memory node's clock.
    pub start_us: u64,
}

impl Header {
    /// The first 24 bytes of the header.
    pub fn to_bytes(self) -> [u8; LIFETIME as usize] {
        let fits = |unit: &u64| self.len.div_ceil(*unit) <= COUNT;
        let unit = UNITS.iter().position(fits).unwrap_or(UNITS.len() - 1);
        let count = self.len.div_ceil(UNITS[unit]).min(COUNT);
        let place = (unit as u64) << 62 | count << 48 | self.address & ADDRESS;
        let mut out = [0; LIFETIME as usize];
        out[..8].copy_from_slice(&place.to_be_bytes());
        out[8..12].copy_from_slice(&self.window.to_be_bytes());
        out[12..16].copy_from_slice(&self.header_window.to_be_bytes());
        out[16..].copy_from_slice(&self.start_us.to_be_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Length and address in the first 8 bytes.
    fn place(bytes: &[u8; 24]) -> (u64, u64) {
        let word = u64::from_be_bytes(bytes[..8].try_into().unwrap());
        ((word >> 48 & COUNT) * UNITS[(word >> 62) as usize], word & ADDRESS)
    }

    fn of(len: u64, address: u64) -> Header {
        Header { len, address, window: 1, header_window: 2, start_us: 3 }
    }

    #[test]
    fn header_has_the_fields_of_figure_3() {
        let bytes = of(16_384, 0x1234_5678_9abc).to_bytes();
        // 16,384 bytes are 256 units of 64 bytes.
        assert_eq!(bytes[..8], [0x41, 0x00, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc]);
        assert_eq!(bytes[8..], [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3]);
        assert_eq!(HEADER_BYTES, LIFETIME + 8);
    }

    proptest! {
        #[test]
        fn length_is_exact_or_rounded_up_to_its_unit(len in 1u64..(64 << 20) - 4096, address: u64) {
            let (kept, at) = place(&of(len, address).to_bytes());
            let unit = *UNITS.iter().find(|unit| len <= COUNT * **unit).unwrap();
            prop_assert_eq!((kept, at), (len.next_multiple_of(unit), address & ADDRESS));
        }
    }
}
