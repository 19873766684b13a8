//! Several threads that allocate, read and free in one heap.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use common::{Ram, now};
use heap::{Heap, Place, Settings};
use pool::GroupId;
use units::Random;

const THREADS: u16 = 3;
const SLOTS: usize = 64;
const CHUNKS: u64 = 64;
const CHUNK: u64 = 1024;
const UNITS: usize = (CHUNKS * CHUNK / 32) as usize;

/// An index of places, and the memory that the places name: one word for each unit.
struct Shared {
    heap: Heap<Ram>,
    /// Raw place of each block plus one; 0 is an empty slot.
    slots: Vec<AtomicU64>,
    memory: Vec<AtomicU64>,
}

impl Shared {
    fn word(&self, place: Place) -> &AtomicU64 {
        // Chunks of the two memory nodes lie in turn.
        let chunk = 2 * (place.offset() / CHUNK) + u64::from(place.node());
        &self.memory[((chunk * CHUNK + place.offset() % CHUNK) / 32) as usize]
    }

    /// Replaces the block of a slot, and frees the last one.
    fn replace(&self, slot: usize, group: GroupId, random: &mut Random) {
        let place = match now(self.heap.allocate(group, 32 + random.below(200))) {
            Ok(block) => {
                self.word(block.place).store(slot as u64, Ordering::Relaxed);
                block.place.raw() + 1
            }
            Err(heap::Error::Source { .. }) => 0,
            Err(other) => panic!("{other}"),
        };
        let last = self.slots[slot].swap(place, Ordering::AcqRel);
        if let Some(last) = last.checked_sub(1) {
            self.heap.free(Place::from_raw(last).unwrap()).unwrap();
        }
    }

    /// Reads the block of a slot: it has the slot's number while the guard is there.
    fn read(&self, slot: usize, group: GroupId) {
        let _guard = self.heap.pin(group);
        let found = self.slots[slot].load(Ordering::Acquire);
        let Some(place) = found.checked_sub(1).and_then(Place::from_raw) else { return };
        for _ in 0..3 {
            assert_eq!(self.word(place).load(Ordering::Relaxed), slot as u64);
            assert!(self.heap.locate(place).is_some());
            std::hint::spin_loop();
        }
    }
}

#[test]
fn readers_see_their_blocks_while_other_threads_replace_them() {
    let source = Ram::new(CHUNK, CHUNKS, THREADS);
    let settings = Settings { reserve_chunks: 1, reserve_chunks_max: 2 };
    let shared = Arc::new(Shared {
        heap: Heap::new(source.clone(), settings).unwrap(),
        slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
        memory: (0..UNITS).map(|_| AtomicU64::new(u64::MAX)).collect(),
    });
    let start = Arc::new(Barrier::new(usize::from(THREADS)));
    let run = |thread: u16| {
        let (shared, start) = (shared.clone(), start.clone());
        move || {
            let group = GroupId(thread);
            let mut random = Random::stream(1, u32::from(thread));
            start.wait();
            for round in 0..200_000u32 {
                let slot = random.below(SLOTS as u64) as usize;
                match random.below(4) {
                    0 => shared.replace(slot, group, &mut random),
                    _ => shared.read(slot, group),
                }
                if round.is_multiple_of(64) {
                    now(shared.heap.give_back(group)).unwrap();
                    // All chunks may be in use.
                    let _ = now(shared.heap.refill(group));
                }
            }
        }
    };
    let threads: Vec<_> = (0..THREADS).map(|thread| std::thread::spawn(run(thread))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    shared.heap.audit().unwrap();
    let last = shared.slots.iter().filter_map(|slot| slot.load(Ordering::Relaxed).checked_sub(1));
    last.for_each(|place| shared.heap.free(Place::from_raw(place).unwrap()).unwrap());
    for group in 0..THREADS {
        now(shared.heap.give_back_all(GroupId(group))).unwrap();
    }
    assert_eq!((source.held(), shared.heap.stats().held_bytes()), (0, 0));
}
