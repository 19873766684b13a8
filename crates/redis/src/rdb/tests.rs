use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

type Owned = (Vec<u8>, Vec<u8>, Meta);

fn write(entries: &[Owned], options: Options) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), options).unwrap();
    writer.aux(b"redis-ver", b"7.0.15").unwrap();
    writer.database(3).unwrap();
    writer.sizes(entries.len() as u64, 1 << 33).unwrap();
    for (key, value, meta) in entries {
        writer.entry(key, value, *meta).unwrap();
    }
    writer.finish().unwrap()
}

/// Reads all parts as text, and the entries.
fn read(bytes: &[u8], limits: Limits) -> Result<(Vec<String>, Vec<Owned>), RdbError> {
    let mut reader = Reader::new(bytes, limits)?;
    let (mut parts, mut entries) = (Vec::new(), Vec::new());
    while let Some(event) = reader.next()? {
        match event {
            Event::Entry(Entry { key, value: Value::String(value), meta }) => {
                entries.push((key.to_vec(), value.to_vec(), meta));
            }
            Event::Aux { key, value } => {
                let text = [key, value].map(String::from_utf8_lossy);
                parts.push(text.join("="));
            }
            other => parts.push(format!("{other:?}")),
        }
    }
    assert_eq!(reader.next().unwrap(), None);
    Ok((parts, entries))
}

fn entries() -> Vec<Owned> {
    let meta = |expires_ms, idle_seconds, frequency| Meta { expires_ms, idle_seconds, frequency };
    let texts = [
        "",
        "0",
        "-1",
        "127",
        "128",
        "-32768",
        "32768",
        "2147483647",
        "2147483648",
        "-2147483648",
        "-2147483649",
        "01",
        "+1",
        "text",
    ];
    let mut all: Vec<_> = texts
        .iter()
        .map(|text| (text.as_bytes().to_vec(), text.as_bytes().to_vec(), Meta::default()))
        .collect();
    for len in [20, 21, 63, 64, 16_383, 16_384, 200_000] {
        all.push((b"z".repeat(len), b"ab".repeat(len), meta(Some(len as i64), None, Some(7))));
        let noise: Vec<u8> = (0..len).map(|n| ((n * n) >> 3) as u8 ^ (n >> 8) as u8).collect();
        all.push((noise.clone(), noise, meta(None, Some(70_000), None)));
    }
    all
}

#[test]
fn written_database_is_read_again() {
    for compress in [false, true] {
        for checksum in [false, true] {
            let bytes = write(&entries(), Options { compress, checksum });
            let (parts, read) = read(&bytes, Limits::default()).unwrap();
            assert_eq!(parts[..2], ["redis-ver=7.0.15", "Database(3)"]);
            assert_eq!(
                parts[2],
                format!("Sizes {{ keys: {}, volatile: 8589934592 }}", entries().len())
            );
            assert_eq!(read, entries());
            assert_eq!(bytes.ends_with(&[0; 8]), !checksum);
        }
    }
    let len = |compress| write(&entries(), Options { compress, checksum: true }).len();
    assert!(len(true) < len(false) / 2);
}

#[test]
fn every_truncated_database_is_refused() {
    let all = entries();
    let bytes = write(&all[..18], Options::default());
    for len in 0..bytes.len() {
        let error = read(&bytes[..len], Limits::default()).unwrap_err();
        assert!(matches!(error, RdbError::Truncated { .. }), "{len}: {error}");
    }
}

#[test]
fn every_changed_byte_is_found() {
    let bytes = write(&entries()[..18], Options::default());
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x10;
        assert!(read(&changed, Limits::default()).is_err(), "byte {at}");
    }
}

#[test]
fn headers_are_checked() {
    let refused = |bytes: &[u8]| Reader::new(bytes, Limits::default()).err().unwrap().to_string();
    assert!(refused(b"RADIS0010").contains("not REDIS"));
    assert!(refused(b"REDISxxxx").contains("not REDIS"));
    assert!(refused(b"REDIS0013").contains("version 13 is unknown"));
    assert!(refused(b"REDIS").contains("end at 0"));
    // Version 4 has no checksum.
    assert_eq!(read(b"REDIS0004\xff", Limits::default()).unwrap().0, [""; 0]);
}

#[test]
fn announced_lengths_take_no_memory() {
    let head = b"REDIS0010\x00\x01k";
    let limits = Limits { value: usize::MAX };
    for value in [
        &b"\x81\x7f\xff\xff\xff\xff\xff\xff\xff"[..],
        b"\xc3\x81\x7f\xff\xff\xff\xff\xff\xff\xff\x81\x7f\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let error = read(&[head, value].concat(), limits).unwrap_err();
        assert!(matches!(error, RdbError::Truncated { .. }), "{error}");
        let error = read(&[head, value].concat(), Limits::default()).unwrap_err();
        assert!(matches!(error, RdbError::TooLong { .. }), "{error}");
    }
    // A compressed string whose length is far above what its input can stand for.
    let error = read(&[&head[..], b"\xc3\x01\x80\x10\x00\x00\x00a"].concat(), limits).unwrap_err();
    assert!(matches!(error, RdbError::Damaged { .. }), "{error}");
}

#[test]
fn values_of_other_types_are_skipped() {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let (a, b) = (text("a"), text("b"));
    let id = [7; 16];
    let group = |read: &[u8], times: usize| {
        let pending = [&[1][..], &id, &[0; 8], &[3]].concat();
        let consumer = [&[1][..], &b, &vec![0; times], &[1], &id].concat();
        [&[1][..], &a, &[1, 2], read, &pending, &consumer].concat()
    };
    let entries = [&[1][..], &text("0123456789abcdef"), &b, &[1, 9, 9]].concat();
    let values: Vec<(Kind, Vec<u8>)> = vec![
        (Kind::List, [&[2][..], &a, b"\xc0\x05"].concat()),
        (Kind::Set, [&[1][..], &a].concat()),
        (Kind::Hash, [&[1][..], &a, &b].concat()),
        (Kind::SortedSet, [&[1][..], &a, &[0; 8]].concat()),
        (Kind::SortedSetText, [&[3][..], &a, &text("1.5"), &b, &[254], &b, &[253]].concat()),
        (
            Kind::Module,
            b"\x81\0\0\0\0\0\0\x04\x01\x02\x07\x01\x08\x03abcd\x04abcdefgh\x05\x01x\x00".to_vec(),
        ),
        (Kind::HashZipmap, a.clone()),
        (Kind::ListZiplist, a.clone()),
        (Kind::SetIntset, b"\xc3\x04\x05\x01ab\x00".to_vec()),
        (Kind::SortedSetZiplist, a.clone()),
        (Kind::HashZiplist, a.clone()),
        (Kind::ListQuicklist, [&[2][..], &a, &b].concat()),
        (Kind::Stream1, [&entries[..], &group(&[], 8)].concat()),
        (Kind::HashListpack, a.clone()),
        (Kind::SortedSetListpack, a.clone()),
        (Kind::ListQuicklist2, [&[2, 1][..], &a, &[2], &b].concat()),
        (Kind::Stream2, [&entries[..], &[1, 2, 3, 4, 5], &group(&[4], 8)].concat()),
        (Kind::SetListpack, a.clone()),
        (Kind::Stream3, [&entries[..], &[1, 2, 3, 4, 5], &group(&[4], 16)].concat()),
    ];
    for (kind, value) in values {
        let tail =
            b"\xf7\x02\x02\x01\x00\xf5\x01f\xf4\x01\x02\x03\x00\x01k\x01v\xff\0\0\0\0\0\0\0\0";
        let bytes = [b"REDIS0011", &[kind as u8][..], &a, &value, tail].concat();
        let (parts, entries) = read(&bytes, Limits::default()).unwrap();
        assert!(parts[0].contains(&format!("Skipped({kind:?})")), "{parts:?}");
        assert!(parts[1].starts_with("ModuleAux"), "{parts:?}");
        assert_eq!(parts[2], "Functions");
        assert_eq!(entries, [(b"k".to_vec(), b"v".to_vec(), Meta::default())], "{kind}");
    }
}

#[test]
fn unknown_types_are_refused() {
    for number in [6, 8, 22, 100, 243, 246] {
        let bytes = [b"REDIS0010", &[number][..], b"\x01k\x01v"].concat();
        let error = read(&bytes, Limits::default()).unwrap_err();
        assert!(error.to_string().contains(&format!(" {number} cannot be read")), "{error}");
    }
}

#[test]
fn reader_is_broken_after_an_error() {
    let mut reader = Reader::new(&b"REDIS0010\x06"[..], Limits::default()).unwrap();
    assert!(matches!(reader.next(), Err(RdbError::Unsupported { .. })));
    assert!(matches!(reader.next(), Err(RdbError::Broken)));
}

#[test]
fn names_of_module_types_are_decoded() {
    // "ReJSON-RL" of version 3.
    let id = b"ReJSON-RL".iter().fold(0_u64, |id, &byte| {
        let all = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        id << 6 | all.iter().position(|&own| own == byte).unwrap() as u64
    });
    let bytes = [
        b"REDIS0010\xf7\x81",
        &(id << 10 | 3).to_be_bytes()[..],
        b"\x02\x01\x00\xff\0\0\0\0\0\0\0\0",
    ];
    let (parts, _) = read(&bytes.concat(), Limits::default()).unwrap();
    assert_eq!(parts, [r#"ModuleAux { module: "ReJSON-RL" }"#]);
}

#[test]
fn payload_of_dump_is_restored() {
    for (_, value, _) in entries() {
        for compressor in [None, Some(&mut Compressor::default())] {
            let (mut payload, mut out) = (Vec::new(), Vec::new());
            dump(&value, compressor, &mut payload);
            let restored = restore(&payload, Limits::default(), &mut out).unwrap();
            assert_eq!(restored, Value::String(&value));
        }
    }
    // The payload of "10" that Redis's documentation of DUMP has, in version 10.
    let mut payload = Vec::new();
    dump(b"10", None, &mut payload);
    assert_eq!(payload[..5], [0, 0xc0, 10, 10, 0]);
}

#[test]
fn damaged_payloads_are_refused() {
    let restored = |payload: &[u8]| {
        let mut out = Vec::new();
        restore(payload, Limits::default(), &mut out).map(drop).unwrap_err()
    };
    let signed = |value: &[u8], version: u16| {
        let mut payload = [value, &version.to_le_bytes()].concat();
        payload.extend(Crc64::of(&payload).to_le_bytes());
        payload
    };
    assert!(matches!(restored(b"short"), RdbError::Truncated { .. }));
    assert!(matches!(restored(&signed(b"\x00\x01a", 13)), RdbError::Version(13)));
    assert!(matches!(restored(&[0; 20]), RdbError::Version(0)));
    let mut changed = signed(b"\x00\x01a", 10);
    changed[2] ^= 1;
    assert!(matches!(restored(&changed), RdbError::Checksum { .. }));
    assert!(matches!(restored(&signed(b"\x00\x05a", 10)), RdbError::Damaged { .. }));
    assert!(matches!(restored(&signed(b"\x00\x01ab", 10)), RdbError::Damaged { .. }));
    assert!(matches!(restored(&signed(b"\x06\x01ab", 10)), RdbError::Unsupported { .. }));
    let mut out = Vec::new();
    let list = restore(&signed(b"\x01\x01\x01a", 10), Limits::default(), &mut out);
    assert_eq!(list.unwrap(), Value::Skipped(Kind::List));
}

/// Redis 7.4 writes version 12, in which a field of a hash may expire.
#[test]
fn hashes_of_version_12_are_skipped_exactly() {
    let mut file = b"REDIS0012\xfe\x00".to_vec();
    file.extend(b"\x18\x01h\x08\x07\x06\x05\x04\x03\x02\x01\x02\x00\x01a\x01b\x05\x01c\x01d");
    file.extend(b"\x19\x01l\x08\x07\x06\x05\x04\x03\x02\x01\x03abc\x00\x01k\x01v\xff");
    file.extend(Crc64::of(&file).to_le_bytes());
    let mut reader = Reader::new(&file[..], Limits::default()).unwrap();
    let mut found = Vec::new();
    while let Some(event) = reader.next().unwrap() {
        if let Event::Entry(entry) = event {
            let kind = match entry.value {
                Value::String(_) => Kind::String,
                Value::Skipped(kind) => kind,
            };
            found.push((entry.key.to_vec(), kind));
        }
    }
    let expected =
        [(&b"h"[..], Kind::HashExpiring), (b"l", Kind::HashListpackExpiring), (b"k", Kind::String)];
    assert_eq!(found, expected.map(|(key, kind)| (key.to_vec(), kind)));
    // Valkey gives these numbers other meanings.
    file[5..9].copy_from_slice(b"0080");
    let mut reader = Reader::new(&file[..], Limits::default()).unwrap();
    assert!(matches!(reader.next(), Ok(Some(Event::Database(0)))));
    assert!(matches!(reader.next(), Err(RdbError::Unsupported { number: 24, .. })));
}

fn meta() -> impl Strategy<Value = Meta> {
    let options = (any::<Option<i64>>(), any::<Option<u64>>(), any::<Option<u8>>());
    options.prop_map(|(expires_ms, idle_seconds, frequency)| Meta {
        expires_ms,
        idle_seconds,
        frequency,
    })
}

fn text() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..40),
        vec(0..3_u8, 0..600),
        any::<i64>().prop_map(|n| n.to_string().into_bytes()),
        any::<i32>().prop_map(|n| n.to_string().into_bytes()),
    ]
}

proptest! {
    #[test]
    fn reader_reads_what_the_writer_wrote(
        entries in vec((text(), text(), meta()), 0..12),
        compress in any::<bool>(),
    ) {
        let bytes = write(&entries, Options { compress, checksum: true });
        assert_eq!(read(&bytes, Limits::default()).unwrap().1, entries);
    }
}

proptest! {
    /// Damaged files end with an error or with strings within the limit, and without a panic.
    #[test]
    fn damaged_databases_are_read_without_harm(
        changes in vec((any::<usize>(), any::<u8>()), 1..8),
        cut in any::<usize>(),
    ) {
        let mut bytes = write(&entries()[..18], Options { compress: true, checksum: false });
        for (at, byte) in changes {
            let at = 9 + at % (bytes.len() - 9);
            bytes[at] = byte;
        }
        bytes.truncate(if cut % 3 == 0 { cut % bytes.len() } else { bytes.len() });
        if let Ok((_, entries)) = read(&bytes, Limits { value: 300 }) {
            prop_assert!(entries.iter().all(|(key, value, _)| key.len().max(value.len()) <= 300));
        }
    }
}
