//! Files of the data, with the redis-server of this machine.

#[path = "redis/pair.rs"]
mod pair;

use pair::{Ours, Pair, Theirs};

/// Keys of all forms that a file can have.
const FILL: &str = "SET a 1\nSET b 70000\nSET c -5\nSET d 123456789012\nSET e \"\"\nSET \"\\x00k\" \
    \"v\\x00\"\nSET f x EXAT 32503680000\nSETRANGE g 5000 x\nSETRANGE h 300000 y\nSELECT 9\nSET a \
    in9\nSELECT 0";

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

/// Waits for the end of saves in the background.
fn wait_for_save(pair: &mut Pair, which: usize) {
    while pair.field(which, "rdb_bgsave_in_progress") == 1 {}
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

/// A save without an error ends the state of the failed one.
#[test]
fn save_after_a_failed_one_lets_writes_go_on() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    pair.ask("CONFIG SET save \"3600 1000000\"");
    for save in ["SAVE", "BGSAVE"] {
        pair.hold_files(true);
        for which in [0, 1] {
            pair.ask_one(which, "BGSAVE");
            wait_for_save(&mut pair, which);
            assert!(pair.ask_one(which, "SET a 1").starts_with(b"-MISCONF"), "{which}");
        }
        pair.hold_files(false);
        for which in [0, 1] {
            pair.ask_one(which, save);
            wait_for_save(&mut pair, which);
            assert_eq!(pair.ask_one(which, "SET a 1"), b"+OK\r\n", "{save}: {which}");
            let info = String::from_utf8(pair.ask_one(which, "INFO persistence")).unwrap();
            assert!(info.contains("rdb_last_bgsave_status:ok\r\n"), "{save}: {which}: {info}");
        }
    }
}

/// Changes that a save has are no changes since the last save.
#[test]
fn changes_since_the_last_save_are_counted() {
    let Some(mut pair) = Pair::start() else { return };
    pair.connect("2");
    let count = |pair: &mut Pair, which| pair.field(which, "rdb_changes_since_last_save");
    for save in ["SAVE", "BGSAVE"] {
        for line in ["SET a 1", "SET a 2", "DEL a", "DEL a", "GET a"] {
            pair.ask(line);
        }
        for which in [0, 1] {
            assert!(count(&mut pair, which) >= 3, "{save}: {which}");
            pair.ask_one(which, save);
            wait_for_save(&mut pair, which);
            assert_eq!(count(&mut pair, which), 0, "{save}: {which}");
        }
        pair.ask("SET a 1");
        assert_eq!([0, 1].map(|which| count(&mut pair, which)), [1, 1], "{save}");
    }
}

/// The file would have a part of the data of before and a part of after.
#[test]
fn swap_or_flush_ends_a_running_save() {
    let mut pair = Pair::of_ours(Ours::start(None));
    pair.connect("2");
    let value = "x".repeat(100);
    for change in ["SWAPDB 0 1", "FLUSHDB", "FLUSHALL"] {
        for key in 0..5000 {
            pair.ask_one(1, &format!("SET key:{key} {value}"));
        }
        let saves = pair.field(1, "rdb_saves");
        // In a transaction, so that the save has not ended before the change.
        for line in ["MULTI", "BGSAVE", change, "EXEC"] {
            pair.ask_one(1, line);
        }
        wait_for_save(&mut pair, 1);
        let info = String::from_utf8(pair.ask_one(1, "INFO persistence")).unwrap();
        assert!(info.contains("rdb_last_bgsave_status:err\r\n"), "{change}: {info}");
        assert_eq!(pair.field(1, "rdb_saves"), saves, "{change}");
        // An exchange of a database with itself changes nothing.
        for line in ["MULTI", "BGSAVE", "SWAPDB 1 1", "EXEC"] {
            pair.ask_one(1, line);
        }
        wait_for_save(&mut pair, 1);
        assert_eq!(pair.field(1, "rdb_saves"), saves + 1, "{change}");
    }
}
