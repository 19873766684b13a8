//! Parsing and printing of sizes in bytes: `4096`, `4KiB`, `1.5GiB`, `100MB`.
//!
//! `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024, and so are their short forms `K`, `M`, `G`, `T`;
//! `kB`, `MB`, `GB`, `TB` are powers of 1000. Upper and lower case are the same. A printed size
//! parses to the same number of bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Size(pub u64);

/// Units for parsing. [`fmt::Display`] uses the first [`UNITS_BINARY`] of them, largest first.
const UNITS: [(&str, u64); 15] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("T", 1 << 40),
    ("G", 1 << 30),
    ("M", 1 << 20),
    ("K", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
    ("bytes", 1),
    ("", 1),
];

/// Number of binary units with full names at the head of [`UNITS`].
const UNITS_BINARY: usize = 4;

impl Size {
    /// The number of bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }

    /// Formats the size to three digits in the largest binary unit, for tables: `1.46GiB`.
    pub fn rounded(self) -> String {
        match UNITS[..UNITS_BINARY].iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) if !self.0.is_multiple_of(*unit) => {
                let value = self.0 as f64 / *unit as f64;
                let digits = if value < 9.995 {
                    2
                } else if value < 99.95 {
                    1
                } else {
                    0
                };
                format!("{value:.digits$}{name}")
            }
            Some(_) => self.to_string(),
            None => format!("{}B", self.0),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |(_, unit): &&(&str, u64)| self.0 >= *unit && self.0.is_multiple_of(*unit);
        match UNITS[..UNITS_BINARY].iter().find(whole) {
            Some((name, unit)) => f.pad(&format!("{}{name}", self.0 / unit)),
            None => f.pad(&self.0.to_string()),
        }
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = |why| SizeError { text: text.to_owned(), why };
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = unit.trim();
        if number.is_empty() {
            return Err(error(Why::NoNumber));
        }
        let (_, unit) = UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .ok_or_else(|| error(Why::Unit(unit.to_owned())))?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let all_digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !all_digits(whole) || !all_digits(fraction) {
            return Err(error(Why::NoNumber));
        }
        let whole: u64 = whole.parse().map_err(|_| error(Why::TooLarge))?;
        let bytes = u128::from(whole) * u128::from(*unit)
            + fraction_of(fraction, *unit).ok_or_else(|| error(Why::NotWhole))?;
        u64::try_from(bytes).map(Size).map_err(|_| error(Why::TooLarge))
    }
}

/// `0.FRACTION` of a unit in bytes, if that is a whole number of bytes.
fn fraction_of(fraction: &str, unit: u64) -> Option<u128> {
    let fraction = fraction.trim_end_matches('0');
    // A byte is 2^-40 TiB, which has 40 decimal digits. Only 25 digits times a unit fit into 128
    // bits, and more digits do not occur in practice.
    if fraction.len() > 25 {
        return None;
    }
    let digits = if fraction.is_empty() { 0 } else { fraction.parse::<u128>().ok()? };
    let scaled = digits.checked_mul(u128::from(unit))?;
    let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    scaled.is_multiple_of(scale).then_some(scaled / scale)
}

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as a size: {why}; write bytes or e.g. 4KiB, 512MiB, 1.5GiB, 100MB")]
pub struct SizeError {
    text: String,
    why: Why,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Why {
    #[error("it does not start with a number")]
    NoNumber,
    #[error("{0:?} is not a unit")]
    Unit(String),
    #[error("it is not a whole number of bytes")]
    NotWhole,
    #[error("it is more than 64 bits of bytes")]
    TooLarge,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn common_spellings_parse() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("17 bytes", 17),
            ("4KiB", 4096),
            ("4kib", 4096),
            ("4K", 4096),
            ("512MiB", 512 << 20),
            ("512 MiB", 512 << 20),
            (" 1GiB ", 1 << 30),
            ("1.5GiB", 3 << 29),
            ("0.001kB", 1),
            ("100MB", 100_000_000),
            ("2tb", 2_000_000_000_000),
            ("16777215TiB", 16_777_215 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn invalid_size_error_has_a_reason() {
        for (text, why) in [
            ("", "does not start with a number"),
            ("MiB", "does not start with a number"),
            ("-1", "does not start with a number"),
            (".5GiB", "does not start with a number"),
            ("5.GiB", "does not start with a number"),
            ("1.2.3", "does not start with a number"),
            ("5 parsecs", "\"parsecs\" is not a unit"),
            ("5Mib/s", "is not a unit"),
            ("1.5", "not a whole number of bytes"),
            ("0.3KiB", "not a whole number of bytes"),
            ("18446744073709551616", "more than 64 bits"),
            ("16777216TiB", "more than 64 bits"),
        ] {
            let error = text.parse::<Size>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(error.contains("512MiB"), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_print_exact_and_rounded() {
        for (bytes, exact, rounded) in [
            (0, "0", "0B"),
            (1000, "1000", "1000B"),
            (4096, "4KiB", "4KiB"),
            (4097, "4097", "4.00KiB"),
            (1 << 30, "1GiB", "1GiB"),
            (1_572_864_000, "1500MiB", "1.46GiB"),
            ((300 << 20) + 1, "314572801", "300MiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), exact);
            assert_eq!(Size(bytes).rounded(), rounded);
        }
    }

    proptest! {
        #[test]
        fn printed_size_parses_back(number in any::<u64>(), shift in 0u32..64) {
            let size = Size(number >> shift << shift.min(number.leading_zeros()));
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn any_text_parses_or_fails_without_panic(text in "\\PC{0,24}") {
            if let Ok(size) = text.parse::<Size>() {
                prop_assert_eq!(size.to_string().parse(), Ok(size));
            }
        }
    }
}
