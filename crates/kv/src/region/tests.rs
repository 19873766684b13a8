use std::sync::Arc;

use verbs::executor::block_on;

use super::*;
use crate::memory::{Client, Memory};

type Blocks = RegionBlocks<Arc<Client>>;

const CHUNK: u32 = 4096;

fn client(memory: &Arc<Memory>) -> Arc<Client> {
    Arc::new(Client::new(memory.clone(), false))
}

fn region(chunks: &[u64]) -> (Arc<Memory>, Place) {
    let memory = Memory::new(CHUNK);
    let header = block_on(Blocks::create(&client(&memory), 0, CHUNK, chunks)).unwrap();
    (memory, header)
}

fn join(memory: &Arc<Memory>, header: Place) -> Blocks {
    block_on(RegionBlocks::join(client(memory), header)).unwrap()
}

fn allocate(blocks: &Blocks, bytes: u32) -> Result<Place, Error> {
    block_on(blocks.allocate(bytes))
}

fn usage(blocks: &Blocks) -> RegionUsage {
    block_on(blocks.usage()).unwrap()
}

#[test]
fn blocks_of_two_compute_nodes_are_distinct() {
    let (memory, header) = region(&Vec::from_iter((3..40).filter(|chunk| chunk % 5 != 0)));
    let both = [join(&memory, header), join(&memory, header)];
    let mut taken: Vec<(Place, u32)> = Vec::new();
    for i in 0..300 {
        let bytes = [64, 100, 500, 4096][i % 4] / (1 + i as u32 % 3);
        match allocate(&both[i % 2], bytes) {
            Ok(place) => taken.push((place, bytes)),
            Err(error) => assert_eq!(error, NoBlock::Full.into()),
        }
    }
    let mut ranges: Vec<_> = taken
        .iter()
        .map(|(place, bytes)| (place.at(0).offset, place.at(0).offset + u64::from(*bytes)))
        .collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    assert!(ranges.iter().all(|(start, _)| !(start / u64::from(CHUNK)).is_multiple_of(5)));
    // Each one frees blocks of both.
    for (i, (place, bytes)) in taken.into_iter().enumerate() {
        both[i / 3 % 2].release(place, bytes);
    }
    both.iter().for_each(|blocks| block_on(blocks.leave()).unwrap());
    assert_eq!(usage(&both[0]).taken_blocks, 0);
}

#[test]
fn chunk_changes_its_class_when_all_blocks_are_free() {
    let (memory, header) = region(&Vec::from_iter(0..6));
    let (one, two) = (join(&memory, header), join(&memory, header));
    // Header and table take two chunks.
    let small: Vec<_> = (0..4 * 64).map(|_| allocate(&one, 64).unwrap()).collect();
    assert_eq!(allocate(&one, 64), Err(NoBlock::Full.into()));
    assert_eq!(allocate(&two, 4096), Err(NoBlock::Full.into()));
    // Half of the blocks of each chunk goes back through each compute node.
    for (i, place) in small.into_iter().enumerate() {
        [&one, &two][i % 2].release(place, 64);
    }
    block_on(one.leave()).unwrap();
    let large: Vec<_> = (0..4).map(|_| allocate(&two, 4096).unwrap()).collect();
    assert_eq!(allocate(&one, 64), Err(NoBlock::Full.into()));
    large.iter().for_each(|place| two.release(*place, 4096));
    block_on(two.leave()).unwrap();
    let usage = usage(&two);
    assert_eq!((usage.chunks, usage.free_chunks, usage.taken_blocks), (4, 4, 0));
}

#[test]
fn bits_of_a_chunk_of_another_class_are_not_taken() {
    let (memory, header) = region(&Vec::from_iter(0..3));
    let (one, two) = (join(&memory, header), join(&memory, header));
    let (small, _) = one.layout.state(64).unwrap();
    let (large, _) = one.layout.state(2048).unwrap();
    let places = [allocate(&one, 2048).unwrap(), allocate(&one, 2048).unwrap()];
    let (index, _) = one.layout.locate(places[0], 2048).unwrap();
    one.release(places[0], 2048);
    block_on(one.leave()).unwrap();
    // A compute node that saw these bits when the chunk had blocks of 64 B.
    assert!(!block_on(two.take_bits(index, 0, 1, small)).unwrap());
    assert_eq!(usage(&two).taken_blocks, 1);
    assert!(block_on(two.take_bits(index, 0, 1, large)).unwrap());
    assert_eq!(usage(&two).taken_blocks, 2);
}

#[test]
fn rebuilt_region_has_the_named_blocks_only() {
    let (memory, header) = region(&Vec::from_iter(0..20));
    let (lost, kept) = (join(&memory, header), join(&memory, header));
    let taken: Vec<_> = (0..150).map(|_| allocate(&lost, 70).unwrap()).collect();
    let used: Vec<_> = taken.iter().step_by(3).map(|place| (*place, 70)).collect();
    drop(lost);
    assert!(block_on(kept.rebuild(&used)).unwrap() > 100);
    assert_eq!(usage(&kept).taken_blocks, used.len() as u64);
    let wrong = [(used[0].0, 4096)];
    assert!(matches!(block_on(kept.rebuild(&wrong)), Err(Error::Malformed { .. })));
    for _ in 0..100 {
        let place = allocate(&kept, 70).unwrap();
        assert!(used.iter().all(|(used, _)| *used != place));
    }
}

#[test]
fn region_needs_chunks_for_its_table() {
    let memory = Memory::new(CHUNK);
    for chunks in [vec![], vec![1], vec![1, 2]] {
        let created = block_on(Blocks::create(&client(&memory), 0, CHUNK, &chunks));
        assert_eq!(created.is_ok(), chunks.len() > 1, "{chunks:?}: {created:?}");
    }
}
