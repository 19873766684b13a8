//! Bytes that changed in remote memory.

mod common;

use common::{COLUMNS, block_on, store};
use kv::blocks::Blocks;
use kv::{Error, SetOptions};

/// A value of three pieces.
fn long() -> Vec<u8> {
    (0..10_000_u32).map(|byte| (byte * 31 + byte / 256) as u8).collect()
}

/// No change of one byte makes a read return another value.
#[test]
fn changed_byte_of_a_value_is_an_error() {
    for (column, form, mirror) in COLUMNS {
        let (world, store) = store(form, mirror, 2);
        block_on(store.set(0, b"first", b"", SetOptions::default())).expect("a write");
        // The blocks of the index, too.
        let before = world.arena.used();
        let values = [(&b"long"[..], long()), (b"short", b"value".to_vec())];
        for (key, value) in &values {
            block_on(store.set(0, key, value, SetOptions::default())).expect("a write");
        }
        let mut errors = 0;
        let blocks = world.arena.used().into_iter().filter(|place| !before.contains(place));
        let length = |place| u64::from(world.arena.blocks_beside(place)[0].1);
        let bytes =
            |place: kv::place::Place| (0..length(place)).step_by(7).map(move |i| place.at(i));
        for at in blocks.flat_map(bytes) {
            let mut bytes = [0];
            world.memory.read(at, &mut bytes);
            world.memory.write(at, &[bytes[0] ^ 1]);
            for (key, value) in &values {
                match block_on(store.get(0, key)) {
                    Ok(Some(read)) => assert!(read == *value, "{column}: {at:?}"),
                    // Without a mirror, a damaged key is that of another value.
                    Ok(None) => assert!(!mirror, "{column}: {at:?}"),
                    Err(Error::Malformed { .. }) => errors += 1,
                    Err(error) => panic!("{column}: {at:?}: {error}"),
                }
            }
            world.memory.write(at, &bytes);
        }
        assert!(errors > 10_000 / 7, "{column}: {errors} errors");
        for (key, value) in &values {
            assert_eq!(block_on(store.get(0, key)).as_ref(), Ok(&Some(value.clone())), "{column}");
        }
    }
}
