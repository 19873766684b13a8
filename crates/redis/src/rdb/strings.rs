//! Encodes lengths and strings.

use super::{Compressor, encoding};
use crate::number::parse_i64;

/// Longest text that may be an integer of 32 bits.
const INTEGER_TEXT_MAX: usize = 11;
/// Shortest string that is compressed.
const COMPRESSED_MIN: usize = 21;
/// Bytes by which compression must shorten a string.
const GAIN_MIN: usize = 4;

/// Appends a length.
pub(super) fn put_length(length: u64, out: &mut Vec<u8>) {
    match length {
        0..0x40 => out.push(length as u8),
        0x40..0x4000 => out.extend([(length >> 8) as u8 | 0x40, length as u8]),
        0x4000..0x1_0000_0000 => {
            out.push(encoding::BITS_32);
            out.extend((length as u32).to_be_bytes());
        }
        _ => {
            out.push(encoding::BITS_64);
            out.extend(length.to_be_bytes());
        }
    }
}

/// Appends the encoding of an integer, or returns false if `text` is none of 32 bits.
fn put_integer(text: &[u8], out: &mut Vec<u8>) -> bool {
    let short = text.len() <= INTEGER_TEXT_MAX;
    let Some(value) = short.then(|| parse_i64(text)).flatten() else { return false };
    if let Ok(value) = i8::try_from(value) {
        out.extend([encoding::INT8, value as u8]);
    } else if let Ok(value) = i16::try_from(value) {
        out.push(encoding::INT16);
        out.extend(value.to_le_bytes());
    } else if let Ok(value) = i32::try_from(value) {
        out.push(encoding::INT32);
        out.extend(value.to_le_bytes());
    } else {
        return false;
    }
    true
}

/// Appends all of a string's encoding to `out`, or its length only. In the second case the caller
/// writes the bytes of the string itself, which then are not copied.
///
/// Returns whether the bytes are missing. `packed` holds compressed bytes for a time.
pub(super) fn put_string(
    text: &[u8],
    compressor: Option<(&mut Compressor, &mut Vec<u8>)>,
    out: &mut Vec<u8>,
) -> bool {
    if put_integer(text, out) {
        return false;
    }
    if let Some((compressor, packed)) = compressor
        && text.len() >= COMPRESSED_MIN
    {
        packed.clear();
        if let Some(len) = compressor.compress(text, text.len() - GAIN_MIN, packed) {
            out.push(encoding::LZF);
            put_length(len as u64, out);
            put_length(text.len() as u64, out);
            out.append(packed);
            return false;
        }
    }
    put_length(text.len() as u64, out);
    true
}
