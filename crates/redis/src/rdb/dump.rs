//! Payloads of DUMP and RESTORE: a type, a value, a version of two bytes, a checksum of eight.

use super::source::Source;
use super::strings::put_string;
use super::{Compressor, Crc64, Kind, Limits, RdbError, VERSION, Value, is_known_version};

/// Bytes behind the value.
const FOOTER: usize = 10;

/// Appends the payload of a string to `out`.
pub fn dump(value: &[u8], compressor: Option<&mut Compressor>, out: &mut Vec<u8>) {
    let begin = out.len();
    out.push(Kind::String as u8);
    let mut packed = Vec::new();
    let compressor = compressor.map(|compressor| (compressor, &mut packed));
    if put_string(value, compressor, out) {
        out.extend_from_slice(value);
    }
    out.extend(VERSION.to_le_bytes());
    let crc = Crc64::of(&out[begin..]);
    out.extend(crc.to_le_bytes());
}

/// Reads a payload. A string goes to `out`, which is cleared first.
///
/// # Errors
///
/// [`RdbError::Version`], [`RdbError::Checksum`] and [`RdbError::Truncated`] are the cases in which
/// Redis answers "DUMP payload version or checksum are wrong"; the others are "Bad data format".
pub fn restore<'a>(
    payload: &[u8],
    limits: Limits,
    out: &'a mut Vec<u8>,
) -> Result<Value<'a>, RdbError> {
    out.clear();
    let truncated = RdbError::Truncated { offset: payload.len() as u64 };
    let len = payload.len().checked_sub(FOOTER).ok_or(truncated)?;
    let (value, footer) = payload.split_at(len);
    let version = u32::from(u16::from_le_bytes([footer[0], footer[1]]));
    if !is_known_version(version) {
        return Err(RdbError::Version(version));
    }
    let mut stored = [0; 8];
    stored.copy_from_slice(&footer[2..]);
    let expected = u64::from_le_bytes(stored);
    let found = Crc64::of(&payload[..len + 2]);
    if found != expected {
        return Err(RdbError::Checksum { found, expected });
    }
    let mut source = Source::new(value, limits);
    let damaged = RdbError::Damaged { offset: len as u64, problem: "the payload has no value" };
    let inner = |error| match error {
        // The checksum was right, so the payload is complete as its sender made it.
        RdbError::Truncated { .. } => damaged,
        other => other,
    };
    let value = read_value(&mut source, out);
    let kind = value.map_err(inner)?;
    if source.offset() != len as u64 {
        return Err(source.damaged("bytes behind the value"));
    }
    Ok(match kind {
        Kind::String => Value::String(out),
        other => Value::Skipped(other),
    })
}

fn read_value(source: &mut Source<&[u8]>, out: &mut Vec<u8>) -> Result<Kind, RdbError> {
    let number = source.byte()?;
    let unsupported = RdbError::Unsupported { offset: 0, what: "the type", number };
    let kind = Kind::from_number(number).ok_or(unsupported)?;
    match kind {
        Kind::String => source.string(out)?,
        other => source.skip_value(other)?,
    }
    Ok(kind)
}
