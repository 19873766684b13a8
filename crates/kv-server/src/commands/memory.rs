//! MEMORY DOCTOR and MEMORY STATS. MEMORY USAGE belongs to the store.

use std::sync::atomic::Ordering;

use crate::context::Context;
use crate::keyspace::{DATABASES, Keyspace};

pub(super) fn doctor<K: Keyspace>(cx: &mut Context<'_, K>) {
    let usage = cx.store.usage();
    let limit = cx.server().config.live.max_memory();
    let mut text = String::new();
    if usage.used < 5 << 20 {
        text += "The store is empty or small: there is nothing to examine.\n";
    } else if usage.held > usage.used + usage.used / 2 {
        text += "Chunks hold half as much again as their blocks need: activedefrag moves blocks \
                 together and gives chunks back.\n";
    }
    if limit > 0 && usage.used > limit / 10 * 9 {
        text += "The memory in use is above nine tenths of maxmemory.\n";
    }
    if text.is_empty() {
        text += "No problem was found.\n";
    }
    cx.reply().verbatim(b"txt", text);
}

pub(super) fn allocator<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.reply().bulk("Stats not supported for the current allocator");
}

pub(super) fn stats<K: Keyspace>(cx: &mut Context<'_, K>) {
    let usage = cx.store.usage();
    let sizes: Vec<_> = (0..DATABASES as u8).map(|db| (db, cx.store.size(db))).collect();
    let keys: u64 = sizes.iter().map(|(_, size)| size.keys).sum();
    let used: Vec<_> = sizes.into_iter().filter(|(_, size)| size.keys > 0).collect();
    let peak = cx.server().peak_memory.load(Ordering::Relaxed).max(usage.used);
    let overhead = usage.used.saturating_sub(usage.payload) + usage.local;
    let share = |part: u64, whole: u64| part as f64 * 100.0 / whole.max(1) as f64;
    let mut reply = cx.reply();
    reply.map(12 + used.len());
    let mut number = |name: &str, value: u64| {
        reply.bulk(name);
        reply.integer(value as i64);
    };
    number("peak.allocated", peak);
    number("total.allocated", usage.used);
    number("startup.allocated", 0);
    number("replication.backlog", 0);
    number("clients.normal", 0);
    for (db, size) in used {
        reply.bulk(format!("db.{db}"));
        reply.map(2);
        for (name, value) in [
            (
                "overhead.hashtable.main",
                usage.index.checked_mul(size.keys).unwrap_or(0) / keys.max(1),
            ),
            ("overhead.hashtable.expires", size.volatile * 20),
        ] {
            reply.bulk(name);
            reply.integer(value as i64);
        }
    }
    let mut number = |name: &str, value: u64| {
        reply.bulk(name);
        reply.integer(value as i64);
    };
    number("overhead.total", overhead);
    number("keys.count", keys);
    number("keys.bytes-per-key", usage.used / keys.max(1));
    number("dataset.bytes", usage.payload);
    let doubles = [
        ("dataset.percentage", share(usage.payload, usage.used)),
        ("peak.percentage", share(usage.used, peak)),
        ("fragmentation", usage.held as f64 / usage.used.max(1) as f64),
    ];
    for (name, value) in doubles {
        reply.bulk(name);
        reply.double(value);
    }
}
