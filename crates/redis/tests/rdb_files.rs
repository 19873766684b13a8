//! Exchanges database files and payloads with a Redis server, in both directions.

mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::Path;
use std::process::Command;

use redis_formats::rdb::{
    Compressor, Event, Kind, Limits, Meta, Options, Reader, Value, Writer, dump, restore,
};
use server::{Client, Server, is_installed};

/// Beyond the time of any run, in milliseconds.
const EXPIRY: i64 = 4_102_444_800_123;

type Strings = BTreeMap<Vec<u8>, (Vec<u8>, Option<i64>)>;

fn strings() -> Strings {
    let texts = [
        "",
        "0",
        "-1",
        "127",
        "128",
        "-129",
        "32768",
        "-32769",
        "2147483647",
        "2147483648",
        "-2147483648",
        "-2147483649",
        "01",
        "9223372036854775807",
        "text",
    ];
    let mut values: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    for len in [19, 20, 21, 44, 45, 63, 64, 300, 16_383, 16_384, 70_000, 1 << 20] {
        values.push(vec![b'x'; len]);
        values.push((0..len).map(|n| (n * 7 + n / 300) as u8).collect());
        let mut seed = len as u32;
        values.push(
            (0..len)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 24) as u8
                })
                .collect(),
        );
    }
    let expiry = |n: usize| n.is_multiple_of(3).then_some(EXPIRY + n as i64);
    let keyed = values.into_iter().enumerate().map(|(n, value)| {
        let mut key = format!("key:{n}:").into_bytes();
        key.extend(value.iter().take(60));
        (key, (value, expiry(n)))
    });
    keyed.collect()
}

fn set_all(client: &mut Client, strings: &Strings) {
    for (key, (value, expiry)) in strings {
        let mut request = vec![b"set".to_vec(), key.clone(), value.clone()];
        if let Some(expiry) = expiry {
            request.extend([b"pxat".to_vec(), expiry.to_string().into_bytes()]);
        }
        assert_eq!(client.call(&request).str(), "OK");
    }
}

/// Creates values of all other types, each in the encodings that a size selects.
fn set_other_types(client: &mut Client) -> usize {
    let long = "v".repeat(200);
    let mut lines = vec![
        "rpush small-list a b 3".to_owned(),
        format!("rpush large-value {}", "w".repeat(20_000)),
        "sadd integers 1 2 3".to_owned(),
        "sadd words a b".to_owned(),
        "hset small-hash a 1 b 2".to_owned(),
        format!("hset large-hash a {long}"),
        "zadd small-scores 1 a 2.5 b".to_owned(),
        format!("zadd large-scores 1 {long} -inf b inf c"),
        "xadd stream 1-1 a 1 b 2".to_owned(),
        "xadd stream 2-1 c 3".to_owned(),
        "xadd stream 3-1 c 3".to_owned(),
        "xdel stream 3-1".to_owned(),
        "xgroup create stream group 0".to_owned(),
        "xgroup create stream other $".to_owned(),
        "xreadgroup group group consumer count 1 streams stream >".to_owned(),
        "pfadd counter a b c".to_owned(),
    ];
    lines.extend((0..300).map(|n| format!("rpush large-list {n}:{long}")));
    lines.extend((0..600).map(|n| format!("sadd large-set {n} x{n}")));
    lines.extend((0..200).map(|n| format!("zadd many-scores {n}.5 m{n}")));
    for line in lines {
        assert_ne!(client.line(&line).kind, "Error", "{line}");
    }
    let library = "#!lua name=lib\nredis.register_function('f', function() return 1 end)";
    assert_eq!(client.call(&["function", "load", library]).str(), "lib");
    12
}

#[test]
fn file_of_redis_is_read() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    for compression in ["yes", "no"] {
        client.line("flushall");
        client.line("function flush");
        client.call(&["config", "set", "rdbcompression", compression]);
        client.line("select 0");
        let strings = strings();
        set_all(&mut client, &strings);
        client.line("select 5");
        let others = set_other_types(&mut client);
        client.call(&["set", "in-five", "5"]);
        assert_eq!(client.line("save").str(), "OK");
        let file = File::open(server.folder().join("dump.rdb")).unwrap();
        let mut reader = Reader::new(BufReader::new(file), Limits::default()).unwrap();
        assert_eq!(reader.version(), 10);
        let (mut found, mut database, mut kinds) = (Strings::new(), 0, BTreeSet::new());
        let (mut skipped, mut libraries, mut version) = (0, 0, Vec::new());
        while let Some(event) = reader.next().unwrap() {
            match event {
                Event::Aux { key: b"redis-ver", value } => version = value.to_vec(),
                Event::Database(number) => database = number,
                Event::Functions => libraries += 1,
                Event::Entry(entry) => match entry.value {
                    Value::String(value) if database == 0 => {
                        let value = (value.to_vec(), entry.meta.expires_ms);
                        found.insert(entry.key.to_vec(), value);
                    }
                    Value::String(_) => assert!(matches!(entry.key, b"in-five" | b"counter")),
                    Value::Skipped(kind) => {
                        kinds.insert(kind);
                        skipped += 1;
                    }
                },
                _ => {}
            }
        }
        assert!(version.starts_with(b"7.0."));
        assert_eq!(found, strings);
        assert_eq!((skipped, libraries), (others, 1));
        let expected = [
            Kind::Set,
            Kind::Hash,
            Kind::SortedSet,
            Kind::SetIntset,
            Kind::HashListpack,
            Kind::SortedSetListpack,
            Kind::ListQuicklist2,
            Kind::Stream2,
        ];
        assert_eq!(kinds, expected.into_iter().collect());
    }
}

fn write(path: &Path, strings: &Strings, options: Options) {
    let file = BufWriter::new(File::create(path).unwrap());
    let mut writer = Writer::new(file, options).unwrap();
    writer.aux(b"redis-ver", b"7.0.15").unwrap();
    writer.aux(b"redis-bits", b"64").unwrap();
    writer.database(0).unwrap();
    writer.sizes(strings.len() as u64, 1).unwrap();
    for (n, (key, (value, expires_ms))) in strings.iter().enumerate() {
        let meta = Meta {
            expires_ms: *expires_ms,
            idle_seconds: (n % 4 == 1).then_some(1000),
            frequency: (n % 4 == 2).then_some(9),
        };
        writer.entry(key, value, meta).unwrap();
    }
    writer.database(3).unwrap();
    writer.entry(b"in-three", b"3", Meta::default()).unwrap();
    writer.finish().unwrap();
}

#[test]
fn file_for_redis_is_loaded() {
    for (compress, checksum) in [(true, true), (false, true), (true, false)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump.rdb");
        let strings = strings();
        write(&path, &strings, Options { compress, checksum });
        if is_installed("redis-check-rdb") {
            let output = Command::new("redis-check-rdb").arg(&path).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && text.contains("RDB looks OK"), "{text}");
            assert_eq!(text.contains("Checksum OK"), checksum, "{text}");
        }
        let Some(server) = Server::start_in(folder) else { return };
        let mut client = server.connect();
        assert_eq!(client.line("dbsize").str(), strings.len().to_string());
        for (key, (value, expiry)) in &strings {
            assert_eq!(&client.call(&[b"get", &key[..]]).text, value);
            let theirs = client.call(&[b"pexpiretime", &key[..]]).str();
            assert_eq!(theirs, expiry.unwrap_or(-1).to_string());
        }
        client.line("select 3");
        assert_eq!(client.line("get in-three").str(), "3");
    }
}

#[test]
fn payloads_are_exchanged_with_redis() {
    let Some(server) = Server::start() else { return };
    let mut client = server.connect();
    let mut compressor = Compressor::default();
    let (mut payload, mut out) = (Vec::new(), Vec::new());
    for (key, (value, _)) in strings() {
        client.call(&[b"set", &key[..], &value]);
        let theirs = client.call(&[b"dump", &key[..]]).text;
        let restored = restore(&theirs, Limits::default(), &mut out).unwrap();
        assert_eq!(restored, Value::String(&value));
        for compressor in [None, Some(&mut compressor)] {
            payload.clear();
            dump(&value, compressor, &mut payload);
            let reply = client.call(&[b"restore", &key[..], b"0", &payload, b"replace"]);
            assert_eq!(reply.str(), "OK");
            assert_eq!(client.call(&[b"get", &key[..]]).text, value);
        }
        // Without compression the bytes themselves are equal.
        if value.len() <= 20 {
            assert_eq!(payload, theirs);
        }
    }
    set_other_types(&mut client);
    for (key, kind) in [
        ("large-list", Kind::ListQuicklist2),
        ("stream", Kind::Stream2),
        ("integers", Kind::SetIntset),
        ("large-set", Kind::Set),
        ("small-hash", Kind::HashListpack),
        ("large-hash", Kind::Hash),
        ("many-scores", Kind::SortedSet),
        ("small-scores", Kind::SortedSetListpack),
    ] {
        let payload = client.call(&["dump", key]).text;
        let value = restore(&payload, Limits::default(), &mut out).unwrap();
        assert_eq!(value, Value::Skipped(kind), "{key}");
    }
}
