//! Memory of the process that the value cache takes, by an allocator that counts.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{World, block_on, settings};
use kv::memory::Seeded;
use kv::{Form, SetOptions, Settings};

struct Counting;

thread_local! {
    /// Bytes that this thread has and has not freed.
    static BYTES: Cell<i64> = const { Cell::new(0) };
    /// Calls of this thread that allocated.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn count(bytes: i64, calls: u64) {
    // A thread that ends may free after its counters are gone.
    let _ = BYTES.try_with(|own| own.set(own.get() + bytes));
    let _ = CALLS.try_with(|own| own.set(own.get() + calls));
}

// SAFETY: every call goes to the allocator of the system with the same arguments. The counters
// allocate nothing.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: as for `System::alloc`, which the caller keeps.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64, 1);
        // SAFETY: the caller keeps the rules of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as for `System::dealloc`, which the caller keeps.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64), 0);
        // SAFETY: the pointer is from `alloc` with this layout, so from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn name(i: u64) -> [u8; 8] {
    i.to_be_bytes()
}

/// Bytes of the process behind reads and writes of values of `lengths`, and the cached values.
fn used(cache_bytes: u64, lengths: &[u64]) -> (i64, u64) {
    let before = BYTES.get();
    let world = World::new(64 << 10, 1 << 20, false, 1);
    let store = world.create(Settings { cache_bytes, ..settings(Form::Fused, true, 85) });
    let (mut random, mut value, mut read) = (Seeded::new(7), Vec::new(), Vec::new());
    for longest in lengths {
        for i in 0..12_000 {
            value.resize(random.below(*longest) as usize, i as u8);
            block_on(store.set(0, &name(i), &value, SetOptions::default())).expect("a write");
        }
        for _ in 0..40_000 {
            // Half of the reads are of a tenth of the keys.
            let keys = if random.below(2) == 0 { 1200 } else { 12_000 };
            read.clear();
            block_on(store.get_into(0, &name(random.below(keys)), &mut read)).expect("a read");
        }
    }
    let cache = store.stats().cache;
    assert!(cache.bytes <= cache.limit, "{cache:?}");
    (BYTES.get() - before, cache.values)
}

#[test]
fn memory_of_the_cache_is_within_its_limit() {
    let limit = 2 << 20;
    for lengths in [&[2000][..], &[16], &[16, 2000, 16]] {
        let (without, _) = used(0, lengths);
        let (with, values) = used(limit, lengths);
        let cache = with - without;
        assert!(values > 1000, "{lengths:?}: {values} values");
        assert!(cache <= limit as i64, "{lengths:?}: {values} values take {cache} bytes");
        assert!(cache > limit as i64 / 3, "{lengths:?}: {values} values take {cache} bytes");
    }
}

#[test]
fn read_of_a_cached_value_allocates_nothing() {
    let world = World::new(4096, 1 << 20, false, 1);
    let settings = Settings { cache_bytes: 1 << 20, ..settings(Form::Fused, true, 21) };
    let store = world.create(settings);
    block_on(store.set(0, b"key", &[7; 900], SetOptions::default())).expect("a write");
    let mut value = Vec::with_capacity(1000);
    let mut calls = 0;
    for _ in 0..10 {
        value.clear();
        let before = CALLS.get();
        let expiry = block_on(store.get_into(0, b"key", &mut value)).expect("a read");
        calls = CALLS.get() - before;
        assert_eq!((expiry, &value[..]), (Some(0), &[7; 900][..]));
    }
    assert_eq!((calls, store.stats().cache.hits), (0, 9));
}
