//! Evacuation of chunks, and heaps that are made again from their blocks.

mod common;

use common::{G, Ram, RamChunk, allocate, heap, now};
use heap::{Block, Error, Heap, Place, Settings};
use pool::GroupId;

/// Fills `chunks` chunks with blocks of 1 KiB, and frees all but the first `kept` blocks of each.
fn sparse_heap(chunks: u64, kept: u64) -> Heap<Ram> {
    let heap = heap(8192, 2 * chunks);
    let blocks: Vec<_> = (0..8 * chunks).map(|_| allocate(&heap, 1024)).collect();
    let is_freed = |block: &&Block| block.place.offset() % 8192 / 1024 >= kept;
    blocks.iter().filter(is_freed).for_each(|block| heap.free(block.place).unwrap());
    now(heap.give_back(G)).unwrap();
    heap
}

#[test]
fn sparse_chunks_are_found_by_their_live_share() {
    let heap = sparse_heap(600, 2);
    let extra = allocate(&heap, 1024);
    let found = heap.sparse(G, 0.25, usize::MAX).unwrap();
    assert_eq!(found.len(), 599, "one chunk has three blocks");
    let class = heap.classes().class_of(1024).unwrap();
    for chunk in &found {
        assert_eq!((chunk.live_bytes, chunk.limbo_bytes), (2048, 0));
        assert_eq!(chunk.classes, [class]);
    }
    let all = heap.sparse(G, 1.0, usize::MAX).unwrap();
    assert_eq!(all.last().unwrap().live_bytes, 3072, "the sparsest is first");
    assert_eq!(heap.sparse(G, 1.0, 7).unwrap().len(), 7);
    assert!(heap.sparse(G, 0.1, 7).unwrap().is_empty());
    let (start, _) = heap.locate(extra.place).unwrap();
    let start = Place::new(start.node, start.number * 8192).unwrap();
    assert_eq!(heap.chunk_use(start).unwrap().live_bytes, 3072);
}

#[test]
fn evacuated_chunks_come_back() {
    let heap = sparse_heap(8, 2);
    let victims = heap.sparse(G, 0.3, 6).unwrap();
    for chunk in &victims {
        heap.evacuate(chunk.place).unwrap();
        assert!(heap.chunk_use(chunk.place).unwrap().is_evacuating);
    }
    assert_eq!(heap.sparse(G, 1.0, 100).unwrap().len(), 2);
    for chunk in &victims {
        let mut after = None;
        loop {
            let live = heap.live_blocks(chunk.place, after, 1).unwrap();
            let Some(block) = live.first() else { break };
            let copy = heap.try_allocate(G, block.bytes).unwrap().unwrap();
            let (to, from) = (heap.locate(copy.place).unwrap(), heap.locate(chunk.place).unwrap());
            assert_ne!(to.0, from.0);
            after = Some(block.place);
            heap.free(block.place).unwrap();
        }
    }
    assert_eq!(now(heap.give_back(G)).unwrap(), 6);
    assert_eq!(heap.source().held(), 2);
    assert_eq!(heap.stats().live_bytes(), heap.stats().held_bytes());
    heap.audit().unwrap();
}

#[test]
fn evacuation_can_be_ended() {
    let heap = sparse_heap(1, 2);
    let chunk = heap.sparse(G, 1.0, 1).unwrap()[0].place;
    heap.evacuate(chunk).unwrap();
    assert!(heap.try_allocate(G, 1024).unwrap().is_none());
    heap.audit().unwrap();
    heap.stop_evacuation(chunk).unwrap();
    assert!(heap.try_allocate(G, 1024).unwrap().is_some());
    heap.audit().unwrap();
}

#[test]
fn emptied_chunk_is_no_longer_evacuating() {
    let settings = Settings { reserve_chunks: 1, reserve_chunks_max: 1 };
    let heap = Heap::new(Ram::new(4096, 1, 1), settings).unwrap();
    let block = allocate(&heap, 4096);
    heap.evacuate(block.place).unwrap();
    heap.free(block.place).unwrap();
    now(heap.give_back(G)).unwrap();
    heap.evacuate(block.place).unwrap();
    for _ in 0..4 {
        assert!(heap.try_allocate(G, 1024).unwrap().is_some(), "the reserve is used");
    }
    assert!(!heap.chunk_use(block.place).unwrap().is_evacuating);
}

#[test]
fn live_blocks_are_listed_over_slabs_in_parts() {
    let heap = heap(4 << 20, 1);
    let mut all: Vec<_> =
        [1 << 20, 300 << 10, 300 << 10, 32, 32, 64].map(|bytes| allocate(&heap, bytes)).into();
    let chunk = Place::new(0, 0).unwrap();
    heap.free(all.remove(1).place).unwrap();
    all.sort_by_key(|block| block.place);
    for most in [1, 2, 100] {
        let mut found = Vec::new();
        loop {
            let after = found.last().map(|block: &Block| block.place);
            let part = heap.live_blocks(chunk, after, most).unwrap();
            if part.is_empty() {
                break;
            }
            found.extend(part);
            assert!(found.len() <= all.len(), "a block is listed twice");
        }
        assert_eq!(found, all);
    }
    let used = heap.chunk_use(chunk).unwrap();
    assert_eq!(used.classes.len(), 4);
}

#[test]
fn rebuilt_heap_has_the_same_blocks() {
    let source = Ram::new(4096, 10, 2);
    let heap = Heap::new(source.clone(), Settings::NO_RESERVE).unwrap();
    let groups = [GroupId(0), GroupId(1)];
    let sizes = [1000, 1000, 50, 2000, 4096];
    let allocate = |bytes, group| now(heap.allocate(group, bytes)).unwrap();
    let blocks: Vec<Block> =
        sizes.iter().flat_map(|bytes| groups.map(|group| allocate(*bytes, group))).collect();
    let freed = [allocate(4096, groups[0]).place, allocate(4096, groups[1]).place];
    let places = blocks.iter().map(|block| block.place).chain(freed);
    let mut chunks: Vec<_> = places.map(|place| heap.locate(place).unwrap().0).collect();
    chunks.sort();
    chunks.dedup();
    let before = heap.stats();
    drop(heap);

    let again = Heap::rebuild(source, Settings::NO_RESERVE, chunks, blocks.clone()).unwrap();
    again.audit().unwrap();
    assert_eq!(again.stats().live_bytes() + 2 * 4096, before.live_bytes());
    assert!(blocks.iter().all(|block| again.block(block.place) == Some(*block)));
    assert_eq!(again.stats().empty_chunks, 2);
    for group in groups {
        assert_eq!(now(again.give_back(group)).unwrap(), 1);
        // The free blocks of the chunks that are used.
        let block = again.try_allocate(group, 1000).unwrap().unwrap();
        assert!(!blocks.contains(&block));
    }
    again.audit().unwrap();
    assert_eq!(again.source().held(), 8);
}

#[test]
fn impossible_blocks_are_errors() {
    let chunk = |number| RamChunk { node: 0, number, group: G };
    let rebuild = |chunks: Vec<RamChunk>, used: &[(u64, u64)]| {
        let block = |(offset, bytes): &(u64, u64)| Block {
            place: Place::new(0, *offset).unwrap(),
            bytes: *bytes,
        };
        let source = Ram::new(4096, 4, 1);
        Heap::rebuild(source, Settings::NO_RESERVE, chunks, used.iter().map(block)).map(|_| ())
    };
    let why = |used: &[(u64, u64)]| match rebuild(vec![chunk(0), chunk(2)], used) {
        Err(Error::Used { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    rebuild(vec![chunk(0), chunk(2)], &[(0, 1000), (1024, 1024), (8192, 32)]).unwrap();
    assert!(why(&[(0, 1024), (0, 1024)]).contains("twice"));
    assert!(why(&[(0, 1024), (2048, 2048)]).contains("another length"));
    assert!(why(&[(512, 1024)]).contains("begins there"));
    assert!(why(&[(3 * 1344, 1344)]).contains("begins there"));
    assert!(why(&[(4096, 1024)]).contains("no chunk"));
    assert!(why(&[(1 << 40, 1024)]).contains("no chunk"));
    assert!(why(&[(0, 8192)]).contains("as long"));
    let twice = rebuild(vec![chunk(0), chunk(0)], &[]);
    assert!(matches!(twice, Err(Error::BadChunk { .. })), "{twice:?}");
    let far = rebuild(vec![chunk(1 << 24)], &[]);
    assert!(matches!(far, Err(Error::BadChunk { .. })), "{far:?}");
    let group = RamChunk { group: GroupId(1), ..chunk(0) };
    assert!(matches!(rebuild(vec![group], &[]), Err(Error::NoGroup { .. })));
}
