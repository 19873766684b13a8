//! Keys that expire, with the redis-server of this machine.

#[path = "redis/pair.rs"]
mod pair;

use pair::{Ours, Pair, Theirs};

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
    let mut wrong = Vec::new();
    for lines in EXPIRED {
        pair.ask("FLUSHALL");
        pair.ask("CONFIG RESETSTAT");
        for line in std::iter::once("SET k v PXAT 2").chain(lines.lines()) {
            let [theirs, ours] = pair.ask(line);
            assert_eq!(theirs, ours, "{line} of {lines}");
        }
        let counts = [0, 1].map(|which| pair.field(which, "expired_keys"));
        if counts[0] != counts[1] {
            wrong.push((lines, counts));
        }
    }
    assert!(wrong.is_empty(), "redis and ours: {wrong:?}");
}

/// In one pipeline, so that the work of Redis in the background does not delete the key before.
#[test]
fn replaced_key_that_has_expired_is_not_counted() {
    let Some(theirs) = Theirs::start(None) else { return };
    let debug = ("enable-debug-command", "yes");
    let mut pair = Pair::of(theirs, Ours::start_with(64 << 20, None, debug));
    pair.connect("2");
    assert_eq!(pair.ask_one(1, "DEBUG SET-ACTIVE-EXPIRE 0"), b"+OK\r\n");
    let payload = r#""\x00\xc0{\n\x00H\xe2S\xe1\x00zg\xb9""#;
    for (lines, count) in [
        (format!("RESTORE k 0 {payload} REPLACE"), 0),
        (format!("RESTORE k 9000 {payload} IDLETIME 5 replace"), 0),
        (format!("RESTORE k 2 {payload} ABSTTL REPLACE"), 0),
        (format!("RESTORE k 0 {payload} ABSTTL"), 1),
        (format!("MULTI\nRESTORE k 0 {payload} REPLACE\nEXEC"), 0),
        (format!("MULTI\nRESTORE k 0 {payload}\nEXEC"), 1),
        (format!("RESTORE k 0 {payload} REPLACE\nDEL k\nSET k v PXAT 2\nGET k"), 1),
    ] {
        pair.ask("CONFIG RESETSTAT");
        let lines: Vec<String> =
            std::iter::once("SET k v PXAT 2").chain(lines.lines()).map(str::to_owned).collect();
        let [theirs, ours] = pair.ask_all(&lines);
        assert_eq!(theirs, ours, "{lines:?}");
        let counts = [0, 1].map(|which| pair.field(which, "expired_keys"));
        assert_eq!(counts, [count; 2], "{lines:?}");
        pair.ask("FLUSHALL");
    }
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
