//! Tests of transfers between frames and the places of slots.

use std::collections::HashSet;
use std::sync::Mutex;

use pool::{Address, MultiPool, Placement, Pool, Settings};
use proptest::prelude::*;

use super::*;
use crate::pool_transport::PoolTransport;
use crate::slots::Emptied;
use crate::store::FileTransport;

/// Frames of a backing memory.
const FRAMES: u32 = 96;
/// Most pages of a post in the tests.
const PAGES_MAX: usize = 24;

fn backing(transport: impl Transport + 'static) -> Backing {
    Backing::new(Box::new(transport), std::env::temp_dir(), None)
}

fn over_file(spec: &str) -> Backing {
    backing(FileTransport::open(spec, FRAMES).expect("a store in memory"))
}

/// Backing memory over memory nodes in this process, each with four chunks of 64 KiB and as many
/// lanes.
fn over_nodes(lanes: &[u32]) -> Backing {
    let pools = lanes.iter().map(|lanes| {
        let settings = Settings {
            donate_bytes: 4 << 16,
            chunk_bytes: 1 << 16,
            group_size: lanes + 1,
            ..Settings::default()
        };
        Pool::embedded(settings).expect("a memory node in this process")
    });
    let pools = MultiPool::over(pools.collect(), Placement::RoundRobin).expect("equal chunks");
    let names = vec![Address::Shm("unused".into()); lanes.len()];
    backing(PoolTransport::over(pools, &names, FRAMES).expect("memory for frames"))
}

/// Sets a frame to a pattern of `seed`.
fn put(backing: &Backing, frame: FrameId, seed: u64) {
    let words = backing.frame(frame).cast::<u64>();
    for at in 0..PAGE_BYTES as u64 / 8 {
        // SAFETY: in bounds of the frame, which no transfer in flight uses.
        unsafe { words.add(at as usize).write(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at) };
    }
}

/// Returns true if a frame has the pattern of `seed`.
fn has(backing: &Backing, frame: FrameId, seed: u64) -> bool {
    let words = backing.frame(frame).cast::<u64>();
    (0..PAGE_BYTES as u64 / 8).all(|at| {
        // SAFETY: as above.
        let word = unsafe { words.add(at as usize).read() };
        word == seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at
    })
}

fn allocate(backing: &Backing, slots: &Mutex<Slots>, count: usize) -> Vec<SlotId> {
    let mut allocated = Vec::new();
    backing.allocate_slots(|| slots.lock().expect("no panic"), count, &mut allocated);
    allocated
}

/// A transfer in flight.
struct Posted {
    ticket: Ticket,
    direction: Direction,
    /// Slots, their frames, and the seed of their content.
    pages: Vec<(SlotId, FrameId, u64)>,
}

/// Posts transfers of random slots with frames of their own, in any lane, and ends them in any
/// order by polls and waits. A model has the content of each slot.
fn transfers_move_the_right_bytes(backing: &Backing, steps: &[(u8, u16, u8)]) {
    let slots = Mutex::new(Slots::new(backing.chunk_bytes()));
    let mut free_frames: Vec<u32> = (0..FRAMES).collect();
    let mut idle: Vec<(SlotId, Option<u64>)> = Vec::new();
    let mut flights: Vec<Posted> = Vec::new();
    let mut next_seed = 1;
    idle.extend(allocate(backing, &slots, 100).into_iter().map(|slot| (slot, None)));
    let end = |posted: Posted, free_frames: &mut Vec<u32>, idle: &mut Vec<_>| {
        drop(posted.ticket);
        for (slot, frame, seed) in posted.pages {
            if posted.direction == Direction::Read {
                assert!(has(backing, frame, seed), "{slot:?} was read to {frame:?}");
            }
            free_frames.push(frame.0);
            idle.push((slot, Some(seed)));
        }
    };
    for &(kind, at, count) in steps {
        let lane = [Lane::Demand, Lane::Prefetch, Lane::WriteBack][usize::from(kind) % 3];
        match kind % 4 {
            // Slots and frames in ascending order are merged to few transfers.
            0 | 1 if free_frames.len() >= PAGES_MAX && !idle.is_empty() => {
                if at % 3 == 0 {
                    idle.sort_unstable();
                    free_frames.sort_unstable_by(|a, b| b.cmp(a));
                }
                let direction = if kind % 4 == 0 { Direction::Read } else { Direction::Write };
                let from = usize::from(at) % idle.len();
                let until = idle.len().min(from + 1 + usize::from(count) % PAGES_MAX);
                let mut chosen: Vec<_> = idle.drain(from..until).collect();
                if direction == Direction::Read {
                    let unread = chosen.extract_if(.., |(_, seed)| seed.is_none());
                    idle.extend(unread);
                }
                let pages: Vec<_> = chosen
                    .into_iter()
                    .map(|(slot, seed)| {
                        let frame = FrameId(free_frames.pop().expect("enough frames"));
                        let seed = match direction {
                            Direction::Read => {
                                put(backing, frame, 0);
                                seed.expect("only written slots are read")
                            }
                            Direction::Write => {
                                next_seed += 1;
                                put(backing, frame, next_seed);
                                next_seed
                            }
                        };
                        (slot, frame, seed)
                    })
                    .collect();
                let pairs: Vec<_> = {
                    let slots = slots.lock().expect("no panic");
                    pages.iter().map(|&(slot, frame, _)| (slots.source(slot), frame)).collect()
                };
                let ticket = backing.post(lane, direction, &pairs);
                flights.push(Posted { ticket, direction, pages });
            }
            2 if !flights.is_empty() => {
                let index = usize::from(at) % flights.len();
                if backing.poll(&mut flights[index].ticket) {
                    assert!(backing.poll(&mut flights[index].ticket), "complete is complete");
                    end(flights.swap_remove(index), &mut free_frames, &mut idle);
                }
            }
            3 if !flights.is_empty() => {
                let mut posted = flights.swap_remove(usize::from(at) % flights.len());
                // Every second one is only dropped.
                if count % 2 == 0 {
                    backing.wait(std::mem::replace(&mut posted.ticket, Ticket::complete()));
                }
                end(posted, &mut free_frames, &mut idle);
            }
            _ => {}
        }
    }
    for posted in flights {
        end(posted, &mut free_frames, &mut idle);
    }
    for (slot, _) in idle {
        let emptied = slots.lock().expect("no panic").free(slot);
        if let Some(Emptied(location)) = emptied {
            backing.free_locations(&[location]);
        }
    }
    assert_eq!(slots.lock().expect("no panic").held(), (0, 0));
}

fn steps() -> impl Strategy<Value = Vec<(u8, u16, u8)>> {
    prop::collection::vec((0u8..12, any::<u16>(), any::<u8>()), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn file_and_overflow_return_what_was_written(steps in steps()) {
        // All slots are in the pool; all are in the overflow file.
        transfers_move_the_right_bytes(&over_file("memory:1MiB"), &steps);
        transfers_move_the_right_bytes(&over_file("memory:0"), &steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn memory_nodes_return_what_was_written(steps in steps()) {
        // 64 slots in each of the nodes, and the others in the overflow file.
        transfers_move_the_right_bytes(&over_nodes(&[2]), &steps);
        transfers_move_the_right_bytes(&over_nodes(&[3, 3]), &steps);
    }
}

#[test]
fn words_and_unmerged_pages_share_a_post() {
    let backing = over_file("memory:2MiB");
    let slots = Mutex::new(Slots::new(backing.chunk_bytes()));
    // Every second slot, so that no two are adjacent: more transfers than one list holds.
    let all = allocate(&backing, &slots, 2 * (IOS_MAX + 6));
    let source = |slot: SlotId| slots.lock().expect("no panic").source(slot);
    let pages: Vec<_> = all
        .iter()
        .step_by(2)
        .zip(0..)
        .map(|(slot, frame)| (source(*slot), FrameId(frame)))
        .collect();
    for (_, frame) in &pages {
        put(&backing, *frame, u64::from(frame.0));
    }
    let ticket = backing.post(Lane::WriteBack, Direction::Write, &pages);
    backing.wait(ticket);
    let word = SlotId::word(0x4045_0000_0000_0000).expect("a double with a short mantissa");
    let mut reads: Vec<_> =
        pages.iter().map(|&(source, frame)| (source, FrameId(FRAMES - 1 - frame.0))).collect();
    let filled = FrameId(FRAMES - 1 - pages.len() as u32);
    reads.insert(10, (source(word), filled));
    backing.wait(backing.post(Lane::Prefetch, Direction::Read, &reads));
    for (at, (_, frame)) in reads.iter().filter(|(_, frame)| *frame != filled).enumerate() {
        assert!(has(&backing, *frame, at as u64), "page {at}");
    }
    // A word moves nothing.
    assert!(has(&backing, filled, u64::from(filled.0)));
}

#[test]
fn adjacent_pages_become_one_transfer() {
    let io = |chunk, page: u32, frame| PageIo {
        chunk: ChunkHandle(chunk),
        offset_bytes: page * PAGE_BYTES as u32,
        frame,
        pages: 1,
    };
    let mut ios = Ios::default();
    for next in [io(1, 4, 7), io(1, 5, 8), io(1, 6, 9), io(2, 7, 10), io(2, 8, 12), io(2, 9, 13)] {
        ios.add(next);
    }
    let merged: Vec<_> = ios.take().iter().map(|io| (io.chunk.0, io.frame, io.pages)).collect();
    assert_eq!(merged, [(1, 7, 3), (2, 10, 1), (2, 12, 2)]);
    assert!(ios.take().is_empty());
}

/// Two threads that find no room allocate a chunk each. Every chunk has a used slot, so that it is
/// freed with its last slot.
#[test]
fn threads_that_allocate_at_once_leak_no_chunk() {
    let embedded = over_nodes(&[2, 2]);
    let slots = Mutex::new(Slots::new(embedded.chunk_bytes()));
    for _ in 0..20 {
        let start = std::sync::Barrier::new(4);
        let lists: Vec<Vec<SlotId>> = std::thread::scope(|scope| {
            let allocate = || {
                start.wait();
                allocate(&embedded, &slots, 17)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(allocate)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let all: HashSet<SlotId> = lists.into_iter().flatten().collect();
        assert_eq!(all.len(), 4 * 17);
        for slot in all {
            let emptied = slots.lock().expect("no panic").free(slot);
            if let Some(Emptied(location)) = emptied {
                embedded.free_locations(&[location]);
                if let ChunkLocation::Overflow(stretch) = location {
                    slots.lock().expect("no panic").note_freed(stretch);
                }
            }
        }
        assert_eq!(slots.lock().expect("no panic").held(), (0, 0));
    }
}

#[test]
fn lost_store_is_an_error_of_the_ticket_or_the_post() {
    let transport = FileTransport::open("memory:1MiB,gone-after=1", 2).expect("a store");
    let chunk = transport.allocate_chunk().expect("room");
    let io = PageIo { chunk, offset_bytes: 0, frame: 0, pages: 1 };
    let mut ticket = transport.post(Lane::WriteBack, Direction::Write, &[io]).expect("the first");
    assert_eq!(ticket.poll(), Ok(true));
    let lost = transport.run(Lane::Demand, Direction::Read, &[io]);
    assert!(matches!(lost, Err(TransportError::Gone(_))), "{lost:?}");
}
