//! A store in an embedded pool: writes, reads, a call of two keys, a scan, and what the store
//! holds.
//!
//! `cargo run -p granary-kv --example kv`

use kv::environment::System;
use kv::pooled::PoolMemory;
use kv::{Cursor, Expiry, SetOptions, Settings, Store, Wanted};
use pool::Pool;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings =
        pool::Settings { donate_bytes: 64 << 20, chunk_bytes: 64 << 10, ..Default::default() };
    let pool = Pool::embedded(settings)?;
    let memory = PoolMemory::new(pool, 0, heap::Settings::default())?;
    let store = Store::create_blocking(memory.clone(), memory, System, Settings::default())?;

    for i in 0..1000 {
        let key = format!("user:{i}");
        store.set_blocking(0, key.as_bytes(), b"active", SetOptions::default())?;
    }
    assert_eq!(store.get_blocking(0, b"user:7")?.as_deref(), Some(&b"active"[..]));

    // Both keys change, or neither, also if this process ends in between.
    let keys = [b"user:7", b"user:8"].map(|key| Wanted { db: 0, key, is_read: true });
    store.atomically_blocking(&keys, |call| {
        let seven = call.get(0).unwrap_or_default().to_vec();
        call.put(1, seven, Expiry::Never);
        call.put(0, b"gone".to_vec(), Expiry::Never);
    })?;

    let (mut cursor, mut keys) = (Cursor::default(), 0);
    loop {
        let scanned = store.scan_blocking(0, cursor, 100)?;
        keys += scanned.keys.len();
        cursor = scanned.next;
        if cursor.is_end() {
            break;
        }
    }
    println!("{keys} keys: {:?}", store.stats());
    Ok(())
}
