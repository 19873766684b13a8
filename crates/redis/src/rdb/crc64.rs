//! CRC-64 with Jones's polynomial, as database files have it.

/// The polynomial, its bits reversed.
const POLYNOMIAL: u64 = 0x95ac_9329_ac4b_c9b5;

/// `TABLES[n][b]` is the CRC of byte `b` followed by `n` zeros.
static TABLES: [[u64; 256]; 8] = tables();

const fn tables() -> [[u64; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut at = 1;
    while at < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[at - 1][byte];
            tables[at][byte] = before >> 8 ^ tables[0][before as usize & 0xff];
            byte += 1;
        }
        at += 1;
    }
    tables
}

/// A running CRC-64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc64(u64);

impl Crc64 {
    /// Returns the CRC of `bytes`.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut crc = Self::default();
        crc.update(bytes);
        crc.value()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            let mixed = (self.0 ^ u64::from_le_bytes(*word)).to_le_bytes();
            let parts = mixed.iter().zip(TABLES.iter().rev());
            self.0 = parts.fold(0, |crc, (&byte, table)| crc ^ table[usize::from(byte)]);
        }
        for &byte in rest {
            self.0 = self.0 >> 8 ^ TABLES[0][(self.0 as u8 ^ byte) as usize];
        }
    }

    /// The CRC of all bytes that were added.
    pub const fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_equals_the_check_value() {
        assert_eq!(Crc64::of(b""), 0);
        assert_eq!(Crc64::of(b"123456789"), 0xe9c6_d914_c4b8_d9ca);
    }

    #[test]
    fn crc_does_not_depend_on_parts() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1000).collect();
        for part in [1, 3, 8, 13, 999] {
            let mut crc = Crc64::default();
            bytes.chunks(part).for_each(|part| crc.update(part));
            assert_eq!(crc.value(), Crc64::of(&bytes));
        }
    }
}
