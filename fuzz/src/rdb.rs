//! Database files: the input is a file, a payload of DUMP, and keys for the writer.

use redis_formats::rdb::{
    Compressor, Crc64, Event, Limits, Meta, Options, RdbError, Reader, Value, Writer, dump, restore,
};

use crate::Input;

/// Because no length is trusted, strings have at most this many bytes.
const LIMITS: Limits = Limits { value: 1000 };

/// Parts of files: types with keys, opcodes, lengths, strings.
const PARTS: [&[u8]; 40] = [
    b"\x00\x01k",
    b"\x01\x01k",
    b"\x02\x01k",
    b"\x03\x01k",
    b"\x04\x01k",
    b"\x05\x01k",
    b"\x07\x01k",
    b"\x0b\x01k",
    b"\x0e\x01k",
    b"\x0f\x01k",
    b"\x10\x01k",
    b"\x12\x01k",
    b"\x13\x01k",
    b"\x15\x01k",
    b"\xfe\x02",
    b"\xfb\x01\x02",
    b"\xfa\x01a\x01b",
    b"\xf5\x01f",
    b"\xf7\x01\x02\x01",
    b"\xf8\x03",
    b"\xf9\x03",
    b"\xf4\x01\x02\x03",
    b"\xfc\x01\x02\x03\x04\x05\x06\x07\x08",
    b"\xfd\x01\x02\x03\x04",
    b"\x00",
    b"\x01",
    b"\x02",
    b"\x01a",
    b"\x02ab",
    b"\x40\x05abcde",
    b"\x80\x00\x00\x00\x01a",
    b"\x81",
    b"\x80\xff",
    b"\xc0\x05",
    b"\xc1\x05\x01",
    b"\xc2\x05\x01\x01\x01",
    b"\xc3\x04\x05\x00a\x40\x00",
    b"\xc3\x04\x05\x00a\x40\x01",
    b"\xc3\x05\x10\x00a\xe0\x06\x00",
    b"01234567",
];

type Entry = (Vec<u8>, Vec<u8>, Meta);

/// Runs the input `bytes`.
pub fn run(bytes: &[u8]) {
    let _ = read(bytes);
    let _ = read(&[b"REDIS0011", bytes].concat());
    let token = |byte: &u8| PARTS[usize::from(*byte) % PARTS.len()];
    let parts: Vec<u8> = bytes.iter().flat_map(token).copied().collect();
    // A checksum of zero stands for none.
    let _ = read(&[b"REDIS0011", &parts[..], &[255, 0, 0, 0, 0, 0, 0, 0, 0]].concat());
    payload(bytes);
    payload(&parts);
    round_trip(&mut Input::new(bytes));
}

/// Reads a file. Returns its strings.
fn read(bytes: &[u8]) -> Result<Vec<Entry>, RdbError> {
    let (mut reader, mut entries) = (Reader::new(bytes, LIMITS)?, Vec::new());
    while let Some(event) = reader.next()? {
        let Event::Entry(entry) = event else { continue };
        assert!(entry.key.len() <= LIMITS.value);
        if let Value::String(value) = entry.value {
            assert!(value.len() <= LIMITS.value);
            entries.push((entry.key.to_vec(), value.to_vec(), entry.meta));
        }
    }
    assert!(reader.offset() <= bytes.len() as u64);
    Ok(entries)
}

/// Restores the input as the value of a payload whose checksum is right.
fn payload(bytes: &[u8]) {
    let mut payload = [bytes, &[10, 0]].concat();
    payload.extend(Crc64::of(&payload).to_le_bytes());
    let mut value = Vec::new();
    let _ = restore(bytes, LIMITS, &mut value);
    if let Ok(Value::String(value)) = restore(&payload, LIMITS, &mut value) {
        assert!(value.len() <= LIMITS.value);
        let (mut again, mut out) = (Vec::new(), Vec::new());
        dump(value, Some(&mut Compressor::default()), &mut again);
        let restored = restore(&again, LIMITS, &mut out).expect("a payload of our own");
        assert_eq!(restored, Value::String(value));
    }
}

fn round_trip(input: &mut Input<'_>) {
    let options = Options { compress: input.byte() & 1 == 0, checksum: input.byte() & 1 == 0 };
    let (mut entries, mut writer) =
        (Vec::new(), Writer::new(Vec::new(), options).expect("a vector takes all bytes"));
    while !input.is_empty() {
        let flags = input.byte();
        let meta = Meta {
            expires_ms: (flags & 1 != 0).then(|| input.number().into()),
            idle_seconds: (flags & 2 != 0).then(|| input.number().into()),
            frequency: (flags & 4 != 0).then(|| input.byte()),
        };
        let len = usize::from(input.byte());
        let key = input.take(len).to_vec();
        let len = usize::from(input.byte());
        let value = input.take(len).repeat(1 + usize::from(flags >> 6));
        writer.entry(&key, &value, meta).expect("a vector takes all bytes");
        entries.push((key, value, meta));
    }
    let file = writer.finish().expect("a vector takes all bytes");
    let read = read(&file);
    match entries.iter().all(|(_, value, _)| value.len() <= LIMITS.value) {
        true => assert_eq!(read.expect("a file of our own"), entries),
        false => assert!(matches!(read, Err(RdbError::TooLong { .. }))),
    }
}
