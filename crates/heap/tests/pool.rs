//! Heaps over the chunks of a pool, for every scheme with access at any offset.

use std::time::{Duration, Instant};

use heap::{Block, Heap, PoolChunks, Settings};
use pool::scheme::info::AccessKind;
use pool::{GroupId, Pool, Scheme, schemes};
use verbs::executor::block_on;

const CHUNK: u64 = 4096;
const CHUNKS: u64 = 64;
const GROUPS: u16 = 2;

fn pool(scheme: Scheme) -> Pool {
    let settings = pool::Settings {
        donate_bytes: CHUNKS * CHUNK,
        chunk_bytes: CHUNK,
        scheme,
        clients_max: 4,
        ..pool::Settings::default()
    };
    let node = pool::EmbeddedNode::start(&settings).unwrap();
    let options = pool::Options { groups: Some(GROUPS), ..pool::Options::default() };
    Pool::embedded_in(&node.into(), options).unwrap()
}

fn one_sided() -> impl Iterator<Item = Scheme> {
    schemes::ALL.iter().copied().filter(|scheme| scheme.access == AccessKind::OneSided)
}

/// The address of the first chunk: the lowest of all.
fn first_chunk_addr(pool: &Pool) -> u64 {
    let all: Vec<_> = (0..CHUNKS).map(|_| pool.allocate_blocking().unwrap()).collect();
    let first = all.iter().map(|grant| grant.addr).min().unwrap();
    all.into_iter().for_each(|grant| pool.free_blocking(grant).unwrap());
    await_free(pool);
    first
}

/// Waits until all chunks are free: some schemes release a chunk after its free has returned.
fn await_free(pool: &Pool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while pool.node_status().unwrap().node.free < CHUNKS {
        assert!(Instant::now() < deadline, "{:?}", pool.node_status());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The content of a block, from its place.
fn content(block: &Block) -> Vec<u8> {
    let mut random = units::Random::new(block.place.raw());
    (0..block.bytes / 8).flat_map(|_| random.bits().to_be_bytes()).collect()
}

fn allocate_until_full(heap: &Heap<PoolChunks>) -> Vec<Block> {
    let mut random = units::Random::new(7);
    let mut blocks = Vec::new();
    loop {
        let group = GroupId(random.below(u64::from(GROUPS)) as u16);
        let bytes = (CHUNK >> random.below(6)) + random.below(32);
        match block_on(heap.allocate(group, bytes.min(CHUNK))) {
            Ok(block) => blocks.push(block),
            Err(heap::Error::Source { source: pool::Error::OutOfMemory { .. }, .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
    blocks
}

fn check_content(heap: &Heap<PoolChunks>, blocks: &[Block]) {
    for block in blocks {
        let (grant, offset) = heap.locate(block.place).unwrap();
        let mut found = vec![0; block.bytes as usize];
        heap.source().pool().read_blocking(&grant, offset, &mut found).unwrap();
        assert_eq!(found, content(block), "{block:?}");
    }
}

fn fill_and_empty(scheme: Scheme) {
    let pool = pool(scheme);
    let chunks = PoolChunks::new(pool.clone(), 3, first_chunk_addr(&pool)).unwrap();
    let heap = Heap::new(chunks, Settings::NO_RESERVE).unwrap();
    let mut blocks = allocate_until_full(&heap);
    assert_eq!(heap.stats().held_chunks as u64, CHUNKS, "{scheme}");
    assert_eq!(pool.node_status().unwrap().node.free, 0, "{scheme}");
    for block in &blocks {
        assert_eq!(block.place.node(), 3);
        let (grant, offset) = heap.locate(block.place).unwrap();
        pool.write_blocking(&grant, offset, &content(block)).unwrap();
    }
    check_content(&heap, &blocks);

    // Half of the blocks go, and the rest keep their content.
    units::Random::new(9).shuffle(&mut blocks);
    let freed = blocks.split_off(blocks.len() / 2);
    freed.iter().for_each(|block| heap.free(block.place).unwrap());
    give_back(&heap);
    check_content(&heap, &blocks);
    heap.audit().unwrap();
    pool.audit().unwrap();

    // The same chunks and places after a restart of the heap.
    let grants: Vec<_> = grants(&heap);
    let chunks = heap.source().clone();
    drop(heap);
    let heap = Heap::rebuild(chunks, Settings::NO_RESERVE, grants, blocks.clone()).unwrap();
    check_content(&heap, &blocks);

    blocks.iter().for_each(|block| heap.free(block.place).unwrap());
    give_back(&heap);
    assert_eq!(heap.stats().held_bytes(), 0, "{scheme}");
    await_free(&pool);
    pool.audit().unwrap();
}

fn give_back(heap: &Heap<PoolChunks>) {
    for group in 0..GROUPS {
        block_on(heap.give_back(GroupId(group))).unwrap();
    }
}

/// The grants of all chunks of the heap.
fn grants(heap: &Heap<PoolChunks>) -> Vec<pool::Grant> {
    let starts = (0..CHUNKS).map(|n| heap::Place::new(3, n * CHUNK).unwrap());
    starts.filter_map(|start| Some(heap.locate(start)?.0)).collect()
}

#[test]
fn every_scheme_holds_blocks_and_gets_its_chunks_back() {
    assert!(one_sided().count() >= 8);
    one_sided().for_each(fill_and_empty);
}

#[test]
fn schemes_without_one_sided_access_are_refused() {
    for scheme in schemes::ALL.iter().copied().filter(|s| s.access != AccessKind::OneSided) {
        let settings = pool::Settings { scheme, ..pool::Settings::default() };
        let chunk_bytes = scheme.chunk_bytes.unwrap_or(settings.chunk_bytes);
        let settings = pool::Settings { donate_bytes: 64 * chunk_bytes, chunk_bytes, ..settings };
        let pool = Pool::embedded(settings).unwrap();
        let refused = PoolChunks::new(pool, 0, 0).map(|_| ()).unwrap_err();
        let why = match scheme.access {
            AccessKind::Pages => "whole pages",
            _ => "without addresses",
        };
        assert!(refused.to_string().contains(why), "{refused}");
    }
}

/// Executors with several threads move futures between threads.
#[test]
fn futures_can_move_between_threads() {
    fn is_send(_: impl Send) {}
    let pool = pool(schemes::ONESIDEDMW);
    let heap = Heap::new(PoolChunks::new(pool, 0, 0).unwrap(), Settings::default()).unwrap();
    let group = GroupId(0);
    is_send(heap.allocate(group, 1));
    is_send(heap.refill(group));
    is_send(heap.give_back(group));
}

/// Background tasks and allocations of one group at the same time, on one thread.
#[test]
fn reserve_keeps_allocations_from_waiting() {
    let pool = pool(schemes::ONESIDEDMW);
    let chunks = PoolChunks::new(pool.clone(), 0, first_chunk_addr(&pool)).unwrap();
    let heap = Heap::new(chunks, Settings::default()).unwrap();
    let group = GroupId(1);
    for _ in 0..8 {
        block_on(heap.refill(group)).unwrap();
        let blocks: Vec<_> =
            (0..8).map(|_| heap.try_allocate(group, 1024).unwrap().unwrap()).collect();
        assert!(heap.locate(blocks[0].place).unwrap().0.group == group);
        blocks.iter().for_each(|block| heap.free(block.place).unwrap());
        block_on(heap.give_back(group)).unwrap();
        assert!(heap.stats().held_chunks <= 4);
    }
    block_on(heap.give_back_all(group)).unwrap();
    await_free(&pool);
    pool.audit().unwrap();
}
