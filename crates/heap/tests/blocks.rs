//! Blocks, chunks and limbo of one heap.

mod common;

use std::future::Future;

use common::{G, Ram, RamChunk, allocate, heap, now};
use heap::{Block, ClassStats, Error, Heap, Pending, Place, Settings};
use pool::GroupId;

fn place(offset: u64) -> Place {
    Place::new(0, offset).unwrap()
}

#[test]
fn blocks_of_1_kib_fill_a_chunk_exactly() {
    for (chunk_bytes, blocks) in [(2048, 2), (4096, 4), (8192, 8)] {
        let heap = heap(chunk_bytes, 1);
        let all: Vec<_> = (0..blocks).map(|_| allocate(&heap, 1024).place.offset()).collect();
        assert_eq!(all, (0..blocks).map(|n| n * 1024).collect::<Vec<_>>());
        assert!(heap.try_allocate(G, 32).unwrap().is_none());
        let full = now(heap.allocate(G, 1)).unwrap_err();
        assert!(full.to_string().contains("no free chunk"), "{full}");
        assert_eq!(heap.stats().live_bytes(), heap.stats().held_bytes());
        heap.audit().unwrap();
    }
}

/// A chunk is empty if all of its n blocks are among the 90 % that were freed: 0.9^n.
#[test]
fn share_of_empty_chunks_follows_from_the_blocks_per_chunk() {
    const BLOCKS: u64 = 100_000;
    for (chunk_bytes, expected) in [(2048, 0.81), (4096, 0.6561), (8192, 0.4305)] {
        let source = Ram::new(chunk_bytes, BLOCKS, 1);
        let heap = Heap::new(source.clone(), Settings::NO_RESERVE).unwrap();
        let mut places: Vec<_> = (0..BLOCKS).map(|_| allocate(&heap, 1024).place).collect();
        let chunks = source.held();
        assert_eq!(chunks as u64, BLOCKS * 1024 / chunk_bytes);
        units::Random::new(chunk_bytes).shuffle(&mut places);
        places.iter().skip(BLOCKS as usize / 10).for_each(|place| heap.free(*place).unwrap());
        let given_back = now(heap.give_back(G)).unwrap();
        let share = given_back as f64 / chunks as f64;
        assert!((share - expected).abs() < 0.01, "{share} of chunks of {chunk_bytes}");
        assert_eq!(source.held(), chunks - given_back);
        heap.audit().unwrap();
    }
}

#[test]
fn freed_block_is_used_again_when_no_guard_is_left() {
    let heap = heap(4096, 1);
    let blocks: Vec<_> = (0..4).map(|_| allocate(&heap, 1024)).collect();
    let guard = heap.pin(G);
    heap.free(blocks[2].place).unwrap();
    assert_eq!((heap.stats().live_bytes(), heap.stats().limbo_bytes()), (3072, 1024));
    for _ in 0..5 {
        assert!(heap.try_allocate(G, 1024).unwrap().is_none());
        now(heap.give_back(G)).unwrap();
    }
    assert!(heap.locate(blocks[2].place).is_some(), "the guard's owner reads the chunk");
    drop(guard);
    let later = heap.pin(G);
    now(heap.give_back(G)).unwrap();
    assert_eq!(heap.stats().limbo_bytes(), 0, "a guard made after the free does not matter");
    drop(later);
    assert_eq!(heap.try_allocate(G, 1024).unwrap(), Some(blocks[2]));
}

#[test]
fn allocation_takes_a_block_out_of_limbo_before_a_chunk() {
    let settings = Settings { reserve_chunks: 1, reserve_chunks_max: 1 };
    let heap = Heap::new(Ram::new(4096, 2, 1), settings).unwrap();
    let block = allocate(&heap, 4096);
    now(heap.refill(G)).unwrap();
    heap.free(block.place).unwrap();
    assert_eq!(heap.try_allocate(G, 4096).unwrap(), Some(block));
    assert_eq!(heap.stats().empty_chunks, 1);
}

#[test]
fn chunk_with_blocks_in_limbo_is_not_given_back() {
    let heap = heap(4096, 2);
    let block = allocate(&heap, 4096);
    let guard = heap.epochs().pin_owned(7);
    heap.free(block.place).unwrap();
    assert_eq!(now(heap.give_back_all(G)).unwrap(), 0);
    assert_eq!(heap.source().held(), 1);
    drop(guard);
    assert_eq!(now(heap.give_back_all(G)).unwrap(), 1);
    assert_eq!((heap.source().held(), heap.locate(block.place)), (0, None));
}

#[test]
fn frees_of_places_that_are_not_live_are_errors() {
    let heap = heap(4096, 3);
    let block = allocate(&heap, 1024);
    let refused = |place| match heap.free(place) {
        Err(Error::NotLive { place: named }) => assert_eq!(named, place),
        other => panic!("{other:?}"),
    };
    let after = |bytes| Place::new(block.place.node(), block.place.offset() + bytes).unwrap();
    [after(32), after(1024), after(4096)].into_iter().for_each(refused);
    refused(Place::new(255, Place::OFFSET_MAX).unwrap());
    heap.free(block.place).unwrap();
    refused(block.place);
    now(heap.give_back(G)).unwrap();
    refused(block.place);
    // The chunk of 1344-byte blocks ends with 64 bytes of no block.
    let first = allocate(&heap, 1344).place;
    refused(Place::new(first.node(), first.offset() + 3 * 1344).unwrap());
    heap.audit().unwrap();
}

#[test]
fn requests_beyond_the_limits_are_errors() {
    let heap = heap(4096, 1);
    let too_long = heap.try_allocate(G, 4097).unwrap_err();
    assert!(too_long.to_string().contains("4096"), "{too_long}");
    assert!(matches!(now(heap.allocate(G, u64::MAX)), Err(Error::TooLong { .. })));
    let other = GroupId(1);
    assert!(matches!(heap.try_allocate(other, 1), Err(Error::NoGroup { group: 1, groups: 1 })));
    assert!(matches!(heap.pending(other), Err(Error::NoGroup { .. })));
    assert!(matches!(now(heap.refill(other)), Err(Error::NoGroup { .. })));
    assert!(matches!(heap.evacuate(place(0)), Err(Error::NoChunk { .. })));
    assert_eq!(allocate(&heap, 0).bytes, 32);

    let reserve = Settings { reserve_chunks: 2, reserve_chunks_max: 1 };
    assert!(matches!(Heap::new(Ram::new(4096, 1, 1), reserve), Err(Error::Setting { .. })));
    let length = Heap::new(Ram::new(3000, 1, 1), Settings::default());
    assert!(matches!(length, Err(Error::Setting { .. })));
}

#[test]
fn reserve_is_filled_and_the_rest_given_back() {
    let settings = Settings { reserve_chunks: 2, reserve_chunks_max: 3 };
    let heap = Heap::new(Ram::new(4096, 10, 1), settings).unwrap();
    assert_eq!(heap.pending(G).unwrap(), Pending { missing_chunks: 2, ..Pending::default() });
    assert_eq!(now(heap.refill(G)).unwrap(), 2);
    assert_eq!(now(heap.refill(G)).unwrap(), 0);
    let blocks: Vec<_> = (0..2).map(|_| heap.try_allocate(G, 4096).unwrap().unwrap()).collect();
    assert!(heap.try_allocate(G, 1).unwrap().is_none());
    assert_eq!(heap.pending(G).unwrap().missing_chunks, 2);
    assert_eq!(now(heap.refill(G)).unwrap(), 2);
    blocks.iter().for_each(|block| heap.free(block.place).unwrap());
    assert_eq!(heap.pending(G).unwrap().limbo_blocks, 2);
    assert_eq!(now(heap.give_back(G)).unwrap(), 1);
    assert_eq!(heap.pending(G).unwrap(), Pending::default());
    assert_eq!((heap.source().held(), heap.stats().empty_chunks), (3, 3));
    assert_eq!(now(heap.give_back_all(G)).unwrap(), 3);
    heap.audit().unwrap();
}

#[test]
fn chunks_of_a_group_serve_this_group() {
    let heap = Heap::new(Ram::new(4096, 4, 2), Settings::NO_RESERVE).unwrap();
    let (a, b) = (GroupId(0), GroupId(1));
    let first = now(heap.allocate(a, 1024)).unwrap();
    assert!(heap.try_allocate(b, 1024).unwrap().is_none());
    let second = now(heap.allocate(b, 1024)).unwrap();
    assert_eq!(heap.locate(first.place).unwrap().0.group, a);
    assert_eq!(heap.locate(second.place).unwrap().0.group, b);
    // A guard holds for all groups.
    let guard = heap.pin(b);
    heap.free(first.place).unwrap();
    assert_eq!(now(heap.give_back(a)).unwrap(), 0);
    drop(guard);
    assert_eq!(now(heap.give_back(a)).unwrap(), 1);
}

#[test]
fn long_chunks_are_cut_into_slabs() {
    let heap = heap(4 << 20, 2);
    let whole: Vec<_> = (0..3).map(|_| allocate(&heap, 1 << 20)).collect();
    assert!(whole.iter().all(|block| block.bytes == 1 << 20));
    let small = heap.try_allocate(G, 32).unwrap().unwrap();
    assert_eq!(small.place.offset() % (4 << 20), 3 << 20);
    assert!(heap.try_allocate(G, 64).unwrap().is_none(), "each slab has a class");
    heap.free(whole[1].place).unwrap();
    now(heap.give_back(G)).unwrap();
    let reused = heap.try_allocate(G, 64).unwrap().unwrap();
    assert_eq!(reused.place, whole[1].place);
    for block in [whole[0], whole[2], small] {
        heap.free(block.place).unwrap();
    }
    assert_eq!(now(heap.give_back(G)).unwrap(), 0, "one slab is in use");
    heap.free(reused.place).unwrap();
    assert_eq!(now(heap.give_back(G)).unwrap(), 1);
    heap.audit().unwrap();
}

#[test]
fn block_and_location_of_a_place() {
    let heap = heap(4096, 2);
    let block = allocate(&heap, 1500);
    assert_eq!(heap.block(block.place), Some(Block { place: block.place, bytes: 2048 }));
    let inside = Place::new(block.place.node(), block.place.offset() + 64).unwrap();
    assert_eq!(heap.block(inside), None);
    let (chunk, offset) = heap.locate(inside).unwrap();
    assert_eq!((chunk.node, chunk.number, offset), (0, 0, 64));
    assert_eq!(heap.locate(place(4096)), None);
}

#[test]
fn statistics_by_class() {
    let heap = heap(4096, 8);
    let long = allocate(&heap, 2048);
    let short: Vec<_> = (0..5).map(|_| allocate(&heap, 1000)).collect();
    let _guard = heap.pin(G);
    heap.free(short[0].place).unwrap();
    let stats = heap.stats();
    let class = |bytes| *stats.classes.iter().find(|class| class.block_bytes == bytes).unwrap();
    let expected = ClassStats { block_bytes: 1024, live_blocks: 4, limbo_blocks: 1, slabs: 2 };
    assert_eq!(class(1024), expected);
    let expected =
        ClassStats { block_bytes: long.bytes, live_blocks: 1, limbo_blocks: 0, slabs: 1 };
    assert_eq!(class(2048), expected);
    assert_eq!((stats.held_chunks, stats.held_bytes()), (3, 3 * 4096));
    assert_eq!((stats.live_bytes(), stats.limbo_bytes()), (2048 + 4 * 1024, 1024));
}

#[test]
fn chunk_that_cannot_be_used_goes_back() {
    let source = Ram::new(4096, 4, 1);
    let heap = Heap::new(source.clone(), Settings::NO_RESERVE).unwrap();
    let block = allocate(&heap, 4096);
    let chunk = |number| RamChunk { node: 0, number, group: G };
    for number in [u64::MAX / 4096, 1 << 24] {
        source.forge_next(chunk(number));
        assert!(matches!(now(heap.allocate(G, 1)), Err(Error::BadChunk { .. })), "{number}");
        assert_eq!(source.freed().pop(), Some(chunk(number)));
    }
    heap.audit().unwrap();
    assert_eq!(heap.block(block.place), Some(block));
    assert_eq!(heap.stats().held_chunks, 1);
}

#[test]
fn failed_return_is_repeated() {
    for is_executed in [false, true] {
        let source = Ram::new(4096, 2, 1);
        let heap = Heap::new(source.clone(), Settings::NO_RESERVE).unwrap();
        let block = allocate(&heap, 4096);
        heap.free(block.place).unwrap();
        source.fail_next_free(is_executed);
        assert!(matches!(now(heap.give_back(G)), Err(Error::Source { .. })));
        assert_eq!((heap.stats().held_chunks, heap.stats().returning_chunks), (0, 1));
        assert_eq!(now(heap.give_back(G)).unwrap(), 1);
        assert_eq!((source.held(), source.frees()), (0, 1));
        assert_eq!(heap.stats().held_bytes(), 0);
    }
}

#[test]
fn chunk_that_was_freed_by_a_failed_return_can_come_back() {
    let source = Ram::new(4096, 1, 1);
    let heap = Heap::new(source.clone(), Settings::NO_RESERVE).unwrap();
    let block = allocate(&heap, 4096);
    heap.free(block.place).unwrap();
    source.fail_next_free(true);
    assert!(now(heap.give_back(G)).is_err());
    let again = allocate(&heap, 4096);
    assert_eq!(again, block);
    assert_eq!(now(heap.give_back(G)).unwrap(), 0, "the chunk in use was freed");
    assert_eq!((source.held(), heap.stats().held_bytes()), (1, 4096));
}

#[test]
fn dropped_futures_leave_the_counts_right() {
    let source = Ram::new(4096, 4, 1);
    let heap = Heap::new(source.clone(), Settings::default()).unwrap();
    drop(heap.refill(G));
    drop(heap.allocate(G, 1));
    assert_eq!(heap.pending(G).unwrap().missing_chunks, 2);
    now(heap.refill(G)).unwrap();
    source.stop(true);
    {
        let mut giving = Box::pin(heap.give_back_all(G));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(giving.as_mut().poll(&mut cx).is_pending());
        assert_eq!(heap.stats().returning_chunks, 1);
        assert_eq!(heap.stats().held_chunks, 1);
    }
    assert_eq!(heap.stats().returning_chunks, 0);
    heap.audit().unwrap();
}
