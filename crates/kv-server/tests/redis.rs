//! Commands on data, compared byte for byte with the redis-server of this machine.
//!
//! The scripts in `tests/redis` are sent to both servers, with RESP2 and with RESP3. A line that
//! begins with `@2` goes to a second connection. Without redis-server the tests do nothing.

#[path = "redis/pair.rs"]
mod pair;

use pair::{Ours, Pair};

/// Commands whose replies differ, with the reason.
const EXCEPTIONS: [(&str, &str); 2] = [
    ("INCRBYFLOAT f 0x10", "hexadecimal floating-point numbers are not read"),
    ("DUMP d3", "the compressor finds other matches than LZF of Redis; both can be read"),
];

fn compare(script: &str) {
    let Some(mut pair) = Pair::start() else { return };
    let mut differences = Vec::new();
    // Ours reads values from the pool first, and from the value cache then.
    for (protocol, cache) in [("2", "0"), ("3", "16mb")] {
        pair.connect(protocol);
        assert_eq!(pair.ask_one(1, &format!("CONFIG SET cache {cache}")), b"+OK\r\n");
        for line in script.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let [theirs, ours] = pair.ask(line);
            let is_exception = EXCEPTIONS.iter().any(|(other, _)| *other == line);
            if theirs != ours && !is_exception {
                let show = |reply: &[u8]| String::from_utf8_lossy(reply).into_owned();
                differences.push(format!("{line}\n  {:?}\n  {:?}", show(&theirs), show(&ours)));
            }
        }
    }
    assert!(differences.is_empty(), "redis and ours:\n{}", differences.join("\n"));
}

#[test]
fn strings_are_those_of_redis() {
    compare(include_str!("redis/strings.txt"));
}

#[test]
fn bits_are_those_of_redis() {
    compare(include_str!("redis/bits.txt"));
}

#[test]
fn keys_and_transactions_are_those_of_redis() {
    compare(include_str!("redis/keys.txt"));
}

/// Lengths from requests take no memory that the pool has not.
#[test]
fn far_offsets_are_refused_before_memory_is_taken() {
    let mut pair = Pair::of_ours(Ours::start_over(64 << 20, None));
    pair.connect("2");
    pair.ask_one(1, "CONFIG SET proto-max-bulk-len 9223372036854775807");
    let (full, far) = ("-OOM command not allowed", 8 * (100_u64 << 20));
    for (line, start) in [
        (format!("SETRANGE k {} x", 100 << 20), full),
        (format!("SETBIT k {far} 1"), full),
        (format!("BITFIELD k SET u8 {far} 1"), full),
        (format!("SETRANGE k {} x", 1_u64 << 40), "-ERR string exceeds maximum allowed size"),
        (format!("SETBIT k {} 1", 1_u64 << 50), "-ERR bit offset is not an integer"),
        (format!("BITFIELD k SET i64 {} 1", i64::MAX - 70), "-ERR bit offset is not an integer"),
        (format!("BITFIELD k GET i64 {} ", i64::MAX - 70), "-ERR bit offset is not an integer"),
    ] {
        let reply = String::from_utf8(pair.ask_one(1, &line)).unwrap();
        assert!(reply.starts_with(start), "{line}: {reply}");
    }
    assert_eq!(pair.ask_one(1, "EXISTS k"), b":0\r\n");
    assert_eq!(pair.ask_one(1, "SETRANGE k 1000 x"), b":1001\r\n");
}

/// Values are read ahead of their requests, between which others change them.
#[test]
fn pipelines_are_those_of_redis() {
    let Some(mut pair) = Pair::start() else { return };
    let mut state = 7_u64;
    let mut random = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % limit
    };
    for (protocol, cache) in [("2", "0"), ("3", "16mb"), ("2", "0")] {
        pair.connect(protocol);
        assert_eq!(pair.ask_one(1, &format!("CONFIG SET cache {cache}")), b"+OK\r\n");
        for _ in 0..300 {
            let lines: Vec<String> = (0..1 + random(90))
                .map(|number| {
                    let key = random(12);
                    match random(60) {
                        0..=5 => {
                            format!("SET k{key} {number}{}", "x".repeat(random(6000) as usize))
                        }
                        6 => format!("DEL k{key}"),
                        7 => format!("APPEND k{key} more"),
                        8 => format!("PEXPIRE k{key} 0"),
                        9 => format!("SELECT {}", random(2)),
                        10 => "MULTI".to_owned(),
                        11..=13 => "EXEC".to_owned(),
                        14 => format!("GET k{key} k1"),
                        15 => format!("MSET k{key} 1 k{} 2", random(12)),
                        16 => format!("STRLEN k{key}"),
                        17 => format!("GETDEL k{key}"),
                        18 => "SWAPDB 0 1".to_owned(),
                        19..=30 => format!("get k{key}"),
                        _ => format!("GET k{key}"),
                    }
                })
                .collect();
            let [theirs, ours] = pair.ask_all(&lines);
            assert!(theirs == ours, "replies differ to\n{}", lines.join("\n"));
        }
        // The transaction that may be open.
        drop(pair.ask("DISCARD"));
    }
}

#[test]
fn events_of_keys_are_those_of_redis() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    assert_eq!(pair.ask("CONFIG SET notify-keyspace-events KEAmn"), [b"+OK\r\n"; 2]);
    let [theirs, ours] = pair.ask("@2 PSUBSCRIBE __key* done");
    assert_eq!(theirs, ours);
    // The reply of the second pattern.
    drop(pair.messages());
    let mut is_queued = false;
    for line in include_str!("redis/events.txt").lines() {
        let replies = pair.ask(line);
        assert_eq!(replies[0], replies[1], "{line}");
        is_queued = line == "MULTI" || is_queued && line != "EXEC";
        if is_queued {
            continue;
        }
        let [theirs, ours] = pair.messages();
        let show = |all: &[Vec<u8>]| -> Vec<String> {
            all.iter().map(|own| String::from_utf8_lossy(own).into_owned()).collect()
        };
        assert_eq!(show(&theirs), show(&ours), "{line}");
    }
}

/// EXEC, MGET and WATCH of several connections, which two threads of the server serve.
#[test]
fn transactions_are_seen_whole_and_watches_lose_no_change() {
    const ROUNDS: usize = 300;
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    pair.ask_one(1, "MSET a 0 b 0 w 0");
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let mut client = pair.another();
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    for line in ["MULTI", "INCR a", "PING", "INCR b"] {
                        client.ask(line);
                    }
                    client.ask("EXEC");
                }
            });
            let mut client = pair.another();
            scope.spawn(move || {
                let mut done = 0;
                while done < ROUNDS {
                    client.ask("WATCH w");
                    let reply = String::from_utf8(client.ask("GET w")).unwrap();
                    let old: u64 = reply.lines().nth(1).unwrap().parse().unwrap();
                    client.ask("MULTI");
                    client.ask(&format!("SET w {}", old + 1));
                    done += usize::from(client.ask("EXEC") != b"*-1\r\n");
                }
            });
        }
        let mut client = pair.another();
        scope.spawn(move || {
            for _ in 0..ROUNDS {
                let reply = String::from_utf8(client.ask("MGET a b")).unwrap();
                let lines: Vec<&str> = reply.lines().collect();
                assert_eq!(lines[2], lines[4], "{reply:?}");
            }
        });
    });
    let expected = format!("*3\r\n$3\r\n{0}\r\n$3\r\n{0}\r\n$3\r\n{0}\r\n", 3 * ROUNDS);
    assert_eq!(pair.ask_one(1, "MGET a b w"), expected.as_bytes());
}

/// A transaction with a command on whole databases runs alone, command after command.
#[test]
fn wide_transactions_are_seen_whole() {
    const ROUNDS: usize = 300;
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    pair.ask_one(1, "MSET a 0 b 0");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let mut client = pair.another();
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    for line in ["MULTI", "INCR a", "DBSIZE", "INCR b"] {
                        client.ask(line);
                    }
                    assert!(client.ask("EXEC").starts_with(b"*3\r\n:"));
                }
            });
            let mut client = pair.another();
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // A transaction of single keys enters the barrier by itself.
                    let replies = match round % 2 {
                        0 => client.ask("MGET a b"),
                        _ => ["MULTI", "MGET a b", "EXEC"].map(|line| client.ask(line)).concat(),
                    };
                    let reply = String::from_utf8(replies).unwrap();
                    let lines: Vec<&str> = reply.lines().rev().collect();
                    assert_eq!(lines[0], lines[2], "{reply:?}");
                }
            });
        }
    });
    let expected = format!("*2\r\n$3\r\n{0}\r\n$3\r\n{0}\r\n", 2 * ROUNDS);
    assert_eq!(pair.ask_one(1, "MGET a b"), expected.as_bytes());
}

/// Rights that a user loses between MULTI and EXEC.
#[test]
fn command_without_a_right_changes_nothing_in_exec() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    for line in [
        "ACL SETUSER bob on >pw ~* +@all",
        "@2 AUTH bob pw",
        "@2 MULTI",
        "@2 SET a 1",
        "@2 SELECT 1",
        "@2 SET b 1",
        "@2 INCR c",
        "ACL SETUSER bob -set -select",
        "@2 EXEC",
        "MGET a b c",
        "SELECT 1",
        "MGET a b c",
        "SELECT 0",
        // With a command on whole databases.
        "ACL SETUSER bob +set +select",
        "@2 MULTI",
        "@2 SET a 1",
        "@2 DBSIZE",
        "@2 SELECT 1",
        "@2 INCR c",
        "ACL SETUSER bob -set -select",
        "@2 EXEC",
        "MGET a b c",
        "SELECT 1",
        "DBSIZE",
        "SELECT 0",
        "@2 MULTI",
        "@2 INCR c",
        "@2 PUBLISH a b",
        "ACL SETUSER bob resetkeys resetchannels",
        "@2 EXEC",
        "@2 INCR c",
        "DBSIZE",
        "ACL DELUSER bob",
    ] {
        let [theirs, ours] = pair.ask(line).map(|own| String::from_utf8(own).unwrap());
        assert_eq!(theirs, ours, "{line}");
    }
}

/// A value of exactly `proto-max-bulk-len` is the longest one.
#[test]
fn lengths_end_at_the_limit_of_the_configuration() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    let mib = 1 << 20;
    let long = "x".repeat(mib - 1);
    for line in [
        "CONFIG SET proto-max-bulk-len 1048576",
        "SETBIT k 8388607 1",
        "SETBIT k 8388608 1",
        "GETBIT k 8388607",
        "GETBIT k 8388608",
        "BITFIELD k SET u8 8388600 1",
        "BITFIELD k SET u8 8388601 1",
        "BITFIELD k SET u1 8388608 1",
        "STRLEN k",
        "DEL k",
        "SETRANGE k 1048575 x",
        "SETRANGE k 1048576 x",
        "STRLEN k",
        "APPEND k x",
        &format!("SET k {long}"),
        "APPEND k x",
        "APPEND k x",
        &format!("SET k {long}x"),
        "STRLEN k",
        "CONFIG SET proto-max-bulk-len 536870912",
    ] {
        let [theirs, ours] = pair.ask(line).map(|own| String::from_utf8(own).unwrap());
        assert_eq!(theirs, ours, "{}", &line[..line.len().min(60)]);
    }
}

/// CLIENT NO-TOUCH is of Redis 7.2, which the redis-server of this test need not be.
#[test]
fn reads_without_touch_are_no_uses() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    let mut client = pair.another();
    let payload = r#""\x00\xc0{\n\x00H\xe2S\xe1\x00zg\xb9""#;
    for key in ["a", "b"] {
        pair.ask_one(1, &format!("RESTORE {key} 0 {payload} IDLETIME 1000"));
    }
    let is_idle = |pair: &mut Pair, key: &str| {
        let idle = String::from_utf8(pair.ask_one(1, &format!("OBJECT IDLETIME {key}"))).unwrap();
        idle[1..].trim().parse::<u64>().unwrap() >= 1000
    };
    assert_eq!(client.ask("CLIENT NO-TOUCH ON"), b"+OK\r\n");
    client.ask_all(&["GET a".to_owned(), "GET b".to_owned(), "STRLEN b".to_owned()]);
    client.ask("MGET a b");
    // Redis looks at these without a use, too.
    pair.ask_one(1, "OBJECT ENCODING a");
    pair.ask_one(1, "MEMORY USAGE b");
    assert!(is_idle(&mut pair, "a") && is_idle(&mut pair, "b"));
    // TOUCH is a use all the same.
    client.ask("TOUCH a");
    assert!(!is_idle(&mut pair, "a") && is_idle(&mut pair, "b"));
    client.ask("CLIENT NO-TOUCH OFF");
    client.ask("GET b");
    assert!(!is_idle(&mut pair, "b"));
}

#[test]
fn restored_key_has_the_idle_time_of_the_command() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    let payload = r#""\x00\xc0{\n\x00H\xe2S\xe1\x00zg\xb9""#;
    assert_eq!(pair.ask_one(1, &format!("RESTORE key 0 {payload} IDLETIME 1000")), b"+OK\r\n");
    let idle = String::from_utf8(pair.ask_one(1, "OBJECT IDLETIME key")).unwrap();
    let idle: u64 = idle[1..].trim().parse().unwrap();
    assert!((1000..1020).contains(&idle), "{idle}");
}

#[test]
fn keys_are_evicted_up_to_the_limit() {
    for policy in ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-ttl"] {
        let mut pair = Pair::of_ours(Ours::start(None));
        pair.connect("2");
        pair.ask_one(1, "CONFIG SET maxmemory 2mb");
        pair.ask_one(1, &format!("CONFIG SET maxmemory-policy {policy}"));
        let value = "x".repeat(1000);
        for key in 0..5000 {
            let reply = pair.ask_one(1, &format!("SET key:{key} {value} EX 1000"));
            assert_eq!(reply, b"+OK\r\n", "{policy}");
        }
        let size = String::from_utf8(pair.ask_one(1, "DBSIZE")).unwrap();
        let size: u64 = size[1..].trim().parse().unwrap();
        assert!((1000..2200).contains(&size), "{policy}: {size}");
    }
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    pair.ask_one(1, "CONFIG SET maxmemory 1mb");
    let value = "x".repeat(1000);
    let refused = (0..2000)
        .map(|key| pair.ask_one(1, &format!("SET key:{key} {value}")))
        .filter(|reply| reply.starts_with(b"-OOM command not allowed"))
        .count();
    assert!((900..1500).contains(&refused), "{refused}");
}

/// A full pool has chunks of the old length only: blocks move together for values of a new length.
#[test]
fn values_of_new_lengths_evict_few_keys_of_a_full_pool() {
    let mut pair = Pair::of_ours(Ours::start_over(8 << 20, None));
    pair.connect("2");
    pair.ask_one(1, "CONFIG SET maxmemory-policy allkeys-random");
    for round in 0..6 {
        let value = "x".repeat(100 + 700 * round);
        for key in 0..(12 << 20) / value.len() {
            let set = format!("SET {round}:{key} {value}");
            assert_eq!(pair.ask_one(1, &set), b"+OK\r\n");
            if key % 97 == 0 {
                pair.ask_one(1, &format!("DEL {round}:{}", key / 2));
            }
        }
        let used = pair.field(1, "used_memory") * 100 / pair.field(1, "used_memory_rss");
        assert!(used > 65, "{used} % of the chunks are used after values of {} B", value.len());
    }
    assert!(pair.field(1, "evicted_keys") > 1000);
}

/// A value of another length in a full pool costs whole chunks: as many as the value needs.
#[test]
fn value_evicts_as_much_as_it_needs() {
    for policy in ["allkeys-lru", "allkeys-random", "volatile-ttl"] {
        let mut pair = Pair::of_ours(Ours::start_over(16 << 20, None));
        pair.connect("2");
        pair.ask_one(1, &format!("CONFIG SET maxmemory-policy {policy}"));
        let value = "x".repeat(1000);
        for key in 0..16_000 {
            pair.ask_one(1, &format!("SET key:{key} {value} EX 1000"));
        }
        let (mut keys, mut moved) = (Vec::new(), Vec::new());
        for bytes in [10, 50_000, 200_000, 200_000, 1_000_000] {
            let before = pair.field(1, "evicted_keys");
            let moves = pair.field(1, "store_blocks_moved");
            let long = "y".repeat(bytes);
            let reply = pair.ask_one(1, &format!("SET long:{bytes} {long} EX 1000"));
            assert_eq!(reply, b"+OK\r\n", "{policy}: {bytes}");
            keys.push((bytes, pair.field(1, "evicted_keys") - before));
            moved.push(pair.field(1, "store_blocks_moved") - moves);
        }
        // 56 keys have a chunk. A short value first looks for a place among single keys.
        for (bytes, keys) in &keys {
            let chunks = (bytes >> 16) as u64 + 2;
            assert!(*keys <= 7 + 56 * 2 * chunks, "{policy}: {bytes} bytes evicted {keys} keys");
        }
        assert_eq!(moved, [0; 5], "{policy}: {keys:?}");
    }
}

/// CONFIG SET is the last command: the work in the background evicts.
#[test]
fn evicted_key_is_told_to_subscribers() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    pair.ask_one(1, "CONFIG SET notify-keyspace-events Ee maxmemory-policy allkeys-lru");
    pair.ask_one(1, "@2 SUBSCRIBE __keyevent@0__:evicted");
    pair.ask_one(1, "SET key value");
    pair.ask_one(1, "CONFIG SET maxmemory 1");
    let message = String::from_utf8(pair.message()).unwrap();
    assert!(message.ends_with("\r\n__keyevent@0__:evicted\r\n$3\r\nkey\r\n"), "{message}");
}

#[test]
fn values_are_cached_within_the_parameter_cache() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    let mut ask = |line: &str| String::from_utf8(pair.ask_one(1, line)).unwrap();
    assert_eq!(ask("CONFIG GET cache"), "*2\r\n$5\r\ncache\r\n$1\r\n0\r\n");
    ask("SET key value");
    assert_eq!(ask("GET key"), "$5\r\nvalue\r\n");
    assert!(ask("INFO pool").contains("cache_limit_bytes:0\r\ncache_bytes:0\r\n"));
    assert_eq!(ask("CONFIG SET cache 1mb"), "+OK\r\n");
    for _ in 0..3 {
        assert_eq!(ask("GET key"), "$5\r\nvalue\r\n");
    }
    let info = ask("INFO pool");
    for field in ["limit_bytes:1048576", "values:1", "hits:2", "misses:1"] {
        assert!(info.contains(&format!("cache_{field}\r\n")), "{field}: {info}");
    }
    assert!(!ask("INFO memory").contains("local_cache_memory:0\r\n"));
    ask("SET key other");
    assert_eq!(ask("MGET key absent"), "*2\r\n$5\r\nother\r\n$-1\r\n");
    assert!(ask("INFO pool").contains("cache_hits:3\r\ncache_misses:1\r\n"));
    assert_eq!(ask("CONFIG SET cache 0"), "+OK\r\n");
    assert_eq!(ask("GET key"), "$5\r\nother\r\n");
    assert!(ask("INFO pool").contains("cache_bytes:0\r\ncache_values:0\r\n"));
}
