//! Keys and values of checked runs.

use super::linear::Did;

/// The bytes of key `key`.
pub(super) fn name(key: u64) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

/// A value of a length that depends on the number. One value in 13 lies in two or three pieces.
pub(super) fn encode(number: u64) -> Vec<u8> {
    let mut bytes = number.to_be_bytes().to_vec();
    let pieces = if number.is_multiple_of(13) { 4200 + number % 5000 } else { 0 };
    bytes.resize(8 + (number % 50 + pieces) as usize, number as u8);
    bytes
}

/// The number of a value that is whole.
pub(super) fn decode(bytes: &[u8]) -> Result<u64, String> {
    let number = bytes.get(..8).and_then(|head| head.try_into().ok()).map(u64::from_be_bytes);
    match number {
        Some(number) if bytes == encode(number) => Ok(number),
        _ => Err(format!("a read returned bytes that no write has written: {bytes:x?}")),
    }
}

/// The history's entry of a read that returned `value`; an error for bytes that no write has
/// written.
pub(super) fn seen(value: Option<Vec<u8>>) -> Result<Did, String> {
    value.map(|value| decode(&value)).transpose().map(Did::Get)
}
