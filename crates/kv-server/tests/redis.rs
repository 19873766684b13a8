//! Commands on data, compared byte for byte with the redis-server of this machine.
//!
//! The scripts in `tests/redis` are sent to both servers, with RESP2 and with RESP3. A line that
//! begins with `@2` goes to a second connection. Without redis-server the tests do nothing.

#[path = "redis/pair.rs"]
mod pair;

use pair::{Ours, Pair, Theirs};

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

/// The key has expired and is not deleted yet, or the work in the background has deleted it.
#[test]
fn expiry_of_a_watched_key_ends_its_transaction() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    for round in 0..20 {
        pair.ask_one(1, &format!("SET key:{round} value PX 3"));
        pair.ask_one(1, &format!("WATCH key:{round}"));
        let begin = std::time::Instant::now();
        // Not by the key: a command that meets the expired key deletes it.
        while begin.elapsed().as_millis() < 5 {
            pair.ask_one(1, "PING");
        }
        pair.ask_one(1, "MULTI");
        assert_eq!(pair.ask_one(1, "SET other value"), b"+QUEUED\r\n");
        assert_eq!(pair.ask_one(1, "EXEC"), b"*-1\r\n", "round {round}");
    }
}

/// A key that expires is deleted in the background, and an event tells that.
#[test]
fn expired_key_is_deleted_and_told() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    pair.ask_one(1, "CONFIG SET notify-keyspace-events Ex");
    pair.ask_one(1, "@2 SUBSCRIBE __keyevent@0__:expired");
    for key in 0..1000 {
        pair.ask_one(1, &format!("SET key:{key} v PX 1"));
    }
    let mut keys: Vec<Vec<u8>> = (0..1000).map(|_| pair.message()).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 1000);
    assert_eq!(pair.ask_one(1, "DBSIZE"), b":0\r\n");
}

/// Redis deletes expired keys that KEYS, SCAN and RANDOMKEY meet.
#[test]
fn expired_key_is_not_counted_behind_a_scan() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    for scan in ["KEYS *", "SCAN 0", "RANDOMKEY"] {
        for key in 0..20 {
            pair.ask_one(1, &format!("SET key:{key} v PX 1"));
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
        pair.ask_one(1, scan);
        assert_eq!(pair.ask_one(1, "DBSIZE"), b":0\r\n", "{scan}");
    }
}

/// What meets a key with an expiry in the past, behind `SET k v PXAT 2`. Nothing expired is left.
const EXPIRED: [&str; 34] = [
    "GET k",
    "SET k w",
    "SET k w NX",
    "SET k w XX",
    "SET k w GET",
    "SET k w PXAT 2\nGET k",
    "SETEX k 10 w",
    "SETNX k w",
    "GETSET k w",
    "GETDEL k",
    "APPEND k w",
    "INCR k",
    "SETBIT k 0 1",
    "DEL k",
    "DEL k a",
    "MGET k a",
    "MSET k 1 b 2",
    "MSETNX k 1 b 2",
    "RENAME k b",
    "SET a 1\nRENAME a k",
    "SET a 1\nCOPY a k",
    "MOVE k 1",
    "BITOP NOT d k",
    "SET a 1\nBITOP NOT k a",
    "EXPIRE k 100",
    "PERSIST k",
    "OBJECT ENCODING k",
    "RESTORE k 0 \"\\x00\\xc0{\\n\\x00H\\xe2S\\xe1\\x00zg\\xb9\"",
    "RESTORE b 2 \"\\x00\\xc0{\\n\\x00H\\xe2S\\xe1\\x00zg\\xb9\" ABSTTL\nGET b\nGET k",
    "MULTI\nSET k w\nEXEC",
    "MULTI\nGET k\nEXEC",
    "MULTI\nDEL k\nEXEC",
    "MULTI\nSET b v PXAT 2\nGET b\nSET c v PXAT 2\nSET c w\nGET k\nEXEC",
    "SET b v\nPEXPIREAT b 1\nGETEX c PXAT 1\nSET d v\nGETEX d PXAT 1\nGET k",
];

#[test]
fn expired_keys_are_counted_as_redis_does() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    let count = |pair: &mut Pair, which| {
        let info = String::from_utf8(pair.ask_one(which, "INFO stats")).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("expired_keys:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    let mut wrong = Vec::new();
    for lines in EXPIRED {
        pair.ask("FLUSHALL");
        pair.ask("CONFIG RESETSTAT");
        for line in std::iter::once("SET k v PXAT 2").chain(lines.lines()) {
            let [theirs, ours] = pair.ask(line);
            assert_eq!(theirs, ours, "{line} of {lines}");
        }
        let counts = [0, 1].map(|which| count(&mut pair, which));
        if counts[0] != counts[1] {
            wrong.push((lines, counts));
        }
    }
    assert!(wrong.is_empty(), "redis and ours: {wrong:?}");
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
fn paused_server_keeps_expired_keys_and_does_not_show_them() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    for line in ["MULTI", "SET key v PX 500", "CLIENT PAUSE 60000 WRITE", "EXEC"] {
        pair.ask_one(1, line);
    }
    // The work in the background has an interval of 100 ms.
    std::thread::sleep(std::time::Duration::from_millis(750));
    assert_eq!(pair.ask_one(1, "GET key"), b"$-1\r\n");
    assert_eq!(pair.ask_one(1, "KEYS *"), b"*0\r\n");
    assert_eq!(pair.ask_one(1, "DBSIZE"), b":1\r\n");
    pair.ask_one(1, "CLIENT UNPAUSE");
    assert_eq!(pair.ask_one(1, "GET key"), b"$-1\r\n");
    assert_eq!(pair.ask_one(1, "DBSIZE"), b":0\r\n");
    assert!(String::from_utf8_lossy(&pair.ask_one(1, "INFO stats")).contains("expired_keys:1\r\n"));
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

/// Keys of all forms that a file can have.
const FILL: &str = "SET a 1\nSET b 70000\nSET c -5\nSET d 123456789012\nSET e \"\"\nSET \"\\x00k\" \
    \"v\\x00\"\nSET f x EXAT 32503680000\nSETRANGE g 5000 x\nSETRANGE h 300000 y\nSELECT 9\nSET a \
    in9\nSELECT 0";

/// A number of INFO.
fn field(pair: &mut Pair, name: &str) -> u64 {
    let info = String::from_utf8(pair.ask_one(1, "INFO")).unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().parse().unwrap()
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
        let used = field(&mut pair, "used_memory") * 100 / field(&mut pair, "used_memory_rss");
        assert!(used > 65, "{used} % of the chunks are used after values of {} B", value.len());
    }
    assert!(field(&mut pair, "evicted_keys") > 1000);
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
            let before = field(&mut pair, "evicted_keys");
            let moves = field(&mut pair, "store_blocks_moved");
            let long = "y".repeat(bytes);
            let reply = pair.ask_one(1, &format!("SET long:{bytes} {long} EX 1000"));
            assert_eq!(reply, b"+OK\r\n", "{policy}: {bytes}");
            keys.push((bytes, field(&mut pair, "evicted_keys") - before));
            moved.push(field(&mut pair, "store_blocks_moved") - moves);
        }
        // 56 keys have a chunk. A short value first looks for a place among single keys.
        for (bytes, keys) in &keys {
            let chunks = (bytes >> 16) as u64 + 2;
            assert!(*keys <= 7 + 56 * 2 * chunks, "{policy}: {bytes} bytes evicted {keys} keys");
        }
        assert_eq!(moved, [0; 5], "{policy}: {keys:?}");
    }
}

fn dump(pair: &mut Pair, which: usize) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for line in
        "SELECT 0\nGET a\nGET b\nGET c\nGET d\nGET e\nGET \"\\x00k\"\nGET f\nPEXPIRETIME f\n\
         GET g\nGET h\nDBSIZE\nSELECT 9\nGET a\nDBSIZE\nSELECT 0"
            .lines()
    {
        all.push(pair.ask_one(which, line));
    }
    all
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
fn redis_loads_our_file_and_we_load_that_of_redis() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    FILL.lines().for_each(|line| drop(pair.ask(line)));
    let expected = dump(&mut pair, 0);
    assert_eq!(dump(&mut pair, 1), expected);
    assert_eq!(pair.ask("SAVE"), [b"+OK\r\n"; 2]);
    let [theirs, ours] = pair.files();
    let checked = std::process::Command::new("redis-check-rdb").arg(&ours).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    drop(pair);
    let mut pair = Pair::of(Theirs::start(Some(&ours)).unwrap(), Ours::start(Some(&theirs)));
    pair.connect_without_flush("2");
    assert_eq!(dump(&mut pair, 0), expected, "redis with our file");
    assert_eq!(dump(&mut pair, 1), expected, "ours with the file of redis");
}

#[test]
fn file_with_other_types_is_loaded_without_these() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    for line in ["SET a 1", "RPUSH l 1 2", "HSET h f v", "SELECT 3", "ZADD z 1 m", "SET b 2"] {
        pair.ask_one(0, line);
    }
    assert_eq!(pair.ask("SAVE"), [b"+OK\r\n"; 2]);
    let file = pair.files()[0].clone();
    drop(pair);
    let ours = Ours::start_with(64 << 20, Some(&file), ("rdb-skip-unknown", "yes"));
    let mut pair = Pair::of_ours(ours);
    pair.connect_without_flush("2");
    assert_eq!(pair.ask_one(1, "GET a"), b"$1\r\n1\r\n");
    assert_eq!(pair.ask_one(1, "DBSIZE"), b":1\r\n");
    pair.ask_one(1, "SELECT 3");
    assert_eq!(pair.ask_one(1, "GET b"), b"$1\r\n2\r\n");
    let info = String::from_utf8(pair.ask_one(1, "INFO persistence")).unwrap();
    assert!(info.contains("rdb_last_load_keys_skipped:3\r\n"), "{info}");
    assert!(info.contains("rdb_last_load_keys_loaded:2\r\n"), "{info}");
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

/// The parameter `stop-writes-on-bgsave-error`.
#[test]
fn failed_save_stops_writes_as_in_redis() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    pair.ask("SET a 1");
    pair.remove_directories();
    for which in [0, 1] {
        pair.ask_one(which, "BGSAVE");
        let is_failed = |pair: &mut Pair| {
            let info = pair.ask_one(which, "INFO persistence");
            String::from_utf8_lossy(&info).contains("rdb_last_bgsave_status:err")
        };
        while !is_failed(&mut pair) {}
    }
    // Without points for saving, the parameter has no effect.
    for line in [
        "SET a 2",
        "CONFIG SET save \"3600 1000000\"",
        "SET a 3",
        "DEL a",
        "GET a",
        "PING",
        "MULTI",
        "SET a 4",
        "EXEC",
        "MULTI",
        "GET a",
        "EXEC",
        "PUBLISH c m",
        "EXPIRE a 10",
        "CONFIG SET stop-writes-on-bgsave-error no",
        "SET a 5",
        "PING",
        "CONFIG SET stop-writes-on-bgsave-error yes",
        "INCR a",
        "CONFIG SET save \"\"",
        "INCR a",
    ] {
        let [theirs, ours] = pair.ask(line).map(|own| String::from_utf8(own).unwrap());
        assert_eq!(theirs, ours, "{line}");
    }
}

#[test]
fn save_in_the_background_has_the_data_of_its_begin() {
    let ours = Ours::start(None);
    let mut pair = Pair::of_ours(ours);
    pair.connect("2");
    let value = "x".repeat(100);
    for key in 0..20_000 {
        pair.ask_one(1, &format!("SET key:{key} {value}{key}"));
    }
    assert_eq!(pair.ask_one(1, "BGSAVE"), b"+Background saving started\r\n");
    for key in 0..3000 {
        pair.ask_one(1, &format!("SET key:{} later", key * 6));
        pair.ask_one(1, &format!("DEL key:{}", key * 6 + 1));
        pair.ask_one(1, &format!("SET new:{key} later"));
        pair.ask_one(1, &format!("RENAME key:{} old:{key}", key * 6 + 2));
    }
    while !String::from_utf8_lossy(&pair.ask_one(1, "INFO persistence"))
        .contains("rdb_bgsave_in_progress:0")
    {}
    let file = pair.files()[1].clone();
    drop(pair);
    let mut pair = Pair::of_ours(Ours::start(Some(&file)));
    pair.connect_without_flush("2");
    assert_eq!(pair.ask_one(1, "DBSIZE"), b":20000\r\n");
    for key in 0..20_000 {
        let expected = format!("{value}{key}");
        let expected = format!("${}\r\n{expected}\r\n", expected.len());
        let found = pair.ask_one(1, &format!("GET key:{key}"));
        assert_eq!(found, expected.as_bytes(), "key:{key}");
    }
}
