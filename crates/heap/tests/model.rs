//! Random calls, compared with a model that knows every block and every guard.

mod common;

use std::collections::BTreeMap;

use common::{Ram, RamChunk, now};
use heap::{Block, Error, Guard, Heap, Place, Settings};
use pool::GroupId;
use proptest::prelude::*;

const GROUPS: u16 = 2;
const CHUNKS: u64 = 24;

#[derive(Clone, Debug)]
enum Step {
    Allocate { group: u16, bytes: u64, waits: bool },
    Free { pick: usize },
    FreeWrong { pick: usize, offset: u64 },
    Pin { group: u16 },
    Unpin { pick: usize },
    Refill { group: u16 },
    GiveBack { group: u16, all: bool },
    FailNextFree { is_executed: bool },
    Evacuate { group: u16 },
    StopEvacuation { pick: usize },
    MoveBlocks { pick: usize },
    Rebuild,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (group, pick) = (|| 0..GROUPS, || any::<usize>());
    // Lengths of a block in chunks of 4 KiB, short ones more often.
    let bytes = (0u32..13, any::<u64>()).prop_map(|(log2, bits)| bits % (1 << log2) + 1);
    let allocate = (group(), bytes, any::<bool>())
        .prop_map(|(group, bytes, waits)| Step::Allocate { group, bytes, waits });
    let free = pick().prop_map(|pick| Step::Free { pick });
    let wrong =
        (pick(), 1u64..256).prop_map(|(pick, units)| Step::FreeWrong { pick, offset: units * 32 });
    let give_back = (group(), any::<bool>()).prop_map(|(group, all)| Step::GiveBack { group, all });
    let step = prop_oneof![
        20 => allocate,
        18 => free,
        2 => wrong,
        3 => group().prop_map(|group| Step::Pin { group }),
        3 => pick().prop_map(|pick| Step::Unpin { pick }),
        2 => group().prop_map(|group| Step::Refill { group }),
        3 => give_back,
        1 => any::<bool>().prop_map(|is_executed| Step::FailNextFree { is_executed }),
        2 => group().prop_map(|group| Step::Evacuate { group }),
        1 => pick().prop_map(|pick| Step::StopEvacuation { pick }),
        2 => pick().prop_map(|pick| Step::MoveBlocks { pick }),
        1 => Just(Step::Rebuild),
    ];
    prop::collection::vec(step, 1..200)
}

/// A guard, and the blocks that were live when it was made and have been freed since.
struct Pin {
    _guard: Guard<std::sync::Arc<heap::Epochs>>,
    freed: Vec<Block>,
}

struct Model {
    heap: Heap<Ram>,
    source: Ram,
    settings: Settings,
    live: BTreeMap<Place, (u64, GroupId)>,
    pins: Vec<Pin>,
    /// Chunks that were chosen for evacuation.
    victims: Vec<Place>,
}

fn end(block: &Block) -> u64 {
    block.place.offset() + block.bytes
}

fn overlap(a: &Block, b: &Block) -> bool {
    a.place.node() == b.place.node() && a.place.offset() < end(b) && b.place.offset() < end(a)
}

fn choose<T: Clone>(all: impl ExactSizeIterator<Item = T>, pick: usize) -> Option<T> {
    let mut all = all;
    let count = all.len();
    (count > 0).then(|| all.nth(pick % count))?
}

impl Model {
    fn new(settings: Settings) -> Self {
        let source = Ram::new(4096, CHUNKS, GROUPS);
        let heap = Heap::new(source.clone(), settings).unwrap();
        let (live, pins, victims) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { heap, source, settings, live, pins, victims }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Allocate { group, bytes, waits } => {
                self.allocate(GroupId(group), bytes, waits);
            }
            Step::Free { pick } => {
                if let Some(place) = choose(self.live.keys().copied(), pick) {
                    self.free(place);
                }
            }
            Step::FreeWrong { pick, offset } => self.free_wrong(pick, offset),
            Step::Pin { group } => {
                let guard = self.heap.epochs().pin_owned(usize::from(group));
                self.pins.push(Pin { _guard: guard, freed: Vec::new() });
            }
            Step::Unpin { pick } => {
                if !self.pins.is_empty() {
                    self.pins.swap_remove(pick % self.pins.len());
                }
            }
            Step::Refill { group } => match now(self.heap.refill(GroupId(group))) {
                Ok(_) => assert_eq!(self.heap.pending(GroupId(group)).unwrap().missing_chunks, 0),
                Err(Error::Source { .. }) => assert_eq!(self.source.held(), CHUNKS as usize),
                Err(other) => panic!("{other}"),
            },
            Step::GiveBack { group, all } => self.give_back(GroupId(group), all),
            Step::FailNextFree { is_executed } => self.source.fail_next_free(is_executed),
            Step::Evacuate { group } => {
                let sparse = self.heap.sparse(GroupId(group), 0.6, 1).unwrap();
                for chunk in sparse {
                    self.heap.evacuate(chunk.place).unwrap();
                    self.victims.push(chunk.place);
                }
            }
            Step::StopEvacuation { pick } => {
                if let Some(chunk) = choose(self.victims.iter().copied(), pick) {
                    self.victims.retain(|victim| *victim != chunk);
                    let _ = self.heap.stop_evacuation(chunk);
                }
            }
            Step::MoveBlocks { pick } => {
                if let Some(chunk) = choose(self.victims.iter().copied(), pick) {
                    self.move_blocks(chunk);
                }
            }
            Step::Rebuild => self.rebuild(),
        }
    }

    fn allocate(&mut self, group: GroupId, bytes: u64, waits: bool) -> Option<Block> {
        let evacuating = |place: &&Place| {
            let used = self.heap.chunk_use(**place);
            // The evacuation ends with the last block, also within this call.
            used.is_some_and(|chunk| chunk.is_evacuating && chunk.live_bytes > 0)
        };
        let closed: Vec<Place> = self.victims.iter().filter(evacuating).copied().collect();
        let block = match waits {
            false => self.heap.try_allocate(group, bytes).unwrap()?,
            true => match now(self.heap.allocate(group, bytes)) {
                Ok(block) => block,
                Err(Error::Source { .. }) => {
                    assert_eq!(self.source.held(), CHUNKS as usize);
                    return None;
                }
                Err(other) => panic!("{other}"),
            },
        };
        assert!(block.bytes >= bytes);
        let (chunk, offset) = self.heap.locate(block.place).unwrap();
        assert_eq!(chunk.group, group);
        assert!(offset + block.bytes <= 4096);
        let start = Place::new(block.place.node(), block.place.offset() - offset).unwrap();
        assert!(!closed.contains(&start), "a new block in a chunk that is being evacuated");
        // Only the last live block before the end of the new one can overlap it.
        let limit = Place::new(block.place.node(), end(&block)).unwrap();
        if let Some((place, (bytes, _))) = self.live.range(..limit).next_back() {
            assert!(!overlap(&block, &Block { place: *place, bytes: *bytes }));
        }
        for pin in &self.pins {
            let known = pin.freed.iter().find(|freed| overlap(&block, freed));
            assert_eq!(known, None, "{block:?} is known to a reader");
        }
        self.live.insert(block.place, (block.bytes, group));
        Some(block)
    }

    fn free(&mut self, place: Place) {
        let (bytes, _) = self.live.remove(&place).unwrap();
        self.heap.free(place).unwrap();
        let block = Block { place, bytes };
        self.pins.iter_mut().for_each(|pin| pin.freed.push(block));
        assert!(matches!(self.heap.free(place), Err(Error::NotLive { .. })));
    }

    fn free_wrong(&mut self, pick: usize, offset: u64) {
        let Some(place) = choose(self.live.keys().copied(), pick) else { return };
        let wrong = Place::new(place.node(), place.offset() + offset).unwrap();
        if !self.live.contains_key(&wrong) {
            assert!(matches!(self.heap.free(wrong), Err(Error::NotLive { .. })));
        }
    }

    fn give_back(&mut self, group: GroupId, all: bool) {
        let keep = if all { 0 } else { self.settings.reserve_chunks_max };
        let result = match all {
            true => now(self.heap.give_back_all(group)),
            false => now(self.heap.give_back(group)),
        };
        match result {
            Ok(_) if self.pins.is_empty() => {
                let pending = self.heap.pending(group).unwrap();
                assert_eq!(pending.limbo_blocks, 0);
                let used = self.used_chunks(group);
                let held = self.heap_chunks().into_iter().filter(|c| c.group == group).count();
                assert!((used..=used + keep).contains(&held), "{used} used, {held} held");
            }
            Ok(_) | Err(Error::Source { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }

    /// Number of chunks of `group` that have a live block.
    fn used_chunks(&self, group: GroupId) -> usize {
        let of_group = self.live.iter().filter(|(_, (_, its))| *its == group);
        let mut chunks: Vec<_> =
            of_group.map(|(place, _)| (place.node(), place.offset() / 4096)).collect();
        chunks.dedup();
        chunks.len()
    }

    fn heap_chunks(&self) -> Vec<RamChunk> {
        let starts = (0..CHUNKS).map(|n| Place::new((n % 2) as u8, n / 2 * 4096).unwrap());
        starts.filter_map(|start| Some(self.heap.locate(start)?.0)).collect()
    }

    /// Moves all blocks out of a chunk.
    fn move_blocks(&mut self, chunk: Place) {
        let Ok(blocks) = self.heap.live_blocks(chunk, None, usize::MAX) else { return };
        let in_chunk = |place: &&Place| {
            place.node() == chunk.node() && place.offset() / 4096 == chunk.offset() / 4096
        };
        let expected: Vec<_> = self.live.keys().filter(in_chunk).copied().collect();
        assert_eq!(blocks.iter().map(|block| block.place).collect::<Vec<_>>(), expected);
        for block in blocks {
            let (_, group) = self.live[&block.place];
            if self.allocate(group, block.bytes, true).is_none() {
                return;
            }
            self.free(block.place);
        }
    }

    /// Makes the heap again from the live blocks, as after a restart: no reader is left.
    fn rebuild(&mut self) {
        self.pins.clear();
        self.victims.clear();
        // A chunk whose return failed belongs to no heap after a restart.
        self.source.mend();
        now(self.heap.give_back_all(GroupId(0))).unwrap();
        assert_eq!(self.heap.stats().returning_chunks, 0);
        let chunks = self.heap_chunks();
        let used =
            self.live.iter().map(|(place, (bytes, _))| Block { place: *place, bytes: *bytes });
        let heap = Heap::rebuild(self.source.clone(), self.settings, chunks, used);
        self.heap = heap.unwrap();
    }

    fn check(&self) {
        self.heap.audit().unwrap();
        let stats = self.heap.stats();
        let live: u64 = self.live.values().map(|(bytes, _)| bytes).sum();
        assert_eq!(stats.live_bytes(), live);
        assert_eq!(stats.held_chunks, self.heap_chunks().len());
        assert!(stats.live_bytes() + stats.limbo_bytes() <= stats.held_bytes());
        // A chunk whose return failed may be free at the source already.
        let held = self.source.held();
        assert!(stats.held_chunks <= held && held <= stats.held_chunks + stats.returning_chunks);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_calls_agree_with_the_model(
        steps in steps(),
        reserve_chunks in 0usize..3,
        surplus in 0usize..3,
    ) {
        let reserve_chunks_max = reserve_chunks + surplus;
        let mut model = Model::new(Settings { reserve_chunks, reserve_chunks_max });
        for step in steps {
            model.step(step);
            model.check();
        }
        model.pins.clear();
        let live: Vec<Place> = model.live.keys().copied().collect();
        live.into_iter().for_each(|place| model.free(place));
        model.source.mend();
        (0..GROUPS).for_each(|group| model.give_back(GroupId(group), true));
        prop_assert_eq!(model.heap.stats().held_bytes(), 0);
        prop_assert_eq!(model.source.held(), 0);
        model.check();
    }
}
