//! An allocator over a [`Memory`]: classes in slabs, and exact reclamation.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::Memory;
use crate::blocks::{Blocks, NoBlock, SharedBlocks, Usage};
use crate::error::Error;
use crate::layout::class;
use crate::place::{Place, UNIT};

/// Allocates blocks in a [`Memory`].
///
/// A freed block is overwritten at once, so that a reader that must not know it any more notices.
#[derive(Clone, Debug)]
pub struct Arena {
    state: Arc<Mutex<State>>,
    memory: Arc<Memory>,
}

#[derive(Debug)]
struct State {
    node: u8,
    first: u64,
    end: u64,
    chunks: BTreeMap<u64, Chunk>,
    retired: VecDeque<(u64, Place)>,
    pins: BTreeMap<u64, usize>,
    clock: u64,
    wrong_frees: u64,
}

#[derive(Debug)]
struct Chunk {
    stripe: u32,
    bytes: u32,
    used: BTreeSet<u32>,
    leaving: bool,
}

impl Chunk {
    fn blocks(&self, slab: u32) -> u32 {
        slab / self.bytes
    }
}

/// A pin of an [`Arena`].
#[derive(Debug)]
pub struct Pin {
    state: Arc<Mutex<State>>,
    memory: Arc<Memory>,
    at: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        if let Some(count) = state.pins.get_mut(&self.at) {
            *count -= 1;
            if *count == 0 {
                state.pins.remove(&self.at);
            }
        }
        state.reclaim(&self.memory);
    }
}

impl Arena {
    /// An allocator of chunks `first` to `end` of memory node 0.
    pub fn new(memory: Arc<Memory>, first: u64, end: u64) -> Self {
        Self::on(memory, 0, first, end)
    }

    /// An allocator of chunks `first` to `end` of a memory node.
    pub fn on(memory: Arc<Memory>, node: u8, first: u64, end: u64) -> Self {
        let state = State {
            node,
            first,
            end,
            chunks: BTreeMap::new(),
            retired: VecDeque::new(),
            pins: BTreeMap::new(),
            clock: 0,
            wrong_frees: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), memory }
    }

    fn set_leaving(&self, place: Place, is_leaving: bool) {
        let number = place.at(0).offset / u64::from(self.memory.chunk());
        if let Some(chunk) = self.state.lock().chunks.get_mut(&number) {
            chunk.leaving = is_leaving;
        }
    }

    /// Frees of blocks that were not in use.
    pub fn wrong_frees(&self) -> u64 {
        self.state.lock().wrong_frees
    }

    /// The blocks that are in use and not retired.
    pub fn used(&self) -> Vec<Place> {
        let slab = self.memory.chunk();
        let state = self.state.lock();
        let node = state.node;
        let retired: BTreeSet<_> = state.retired.iter().map(|(_, place)| *place).collect();
        let used = state.chunks.iter().flat_map(|(number, chunk)| {
            chunk.used.iter().map(move |i| place_of(node, *number, slab, *i, chunk.bytes))
        });
        used.filter(|place| !retired.contains(place)).collect()
    }
}

fn place_of(node: u8, chunk: u64, slab: u32, i: u32, bytes: u32) -> Place {
    let unit = (chunk * u64::from(slab) + u64::from(i * bytes)) / UNIT;
    Place::new(node, unit).expect("a chunk below 32 TiB")
}

impl State {
    fn allocate(&mut self, memory: &Memory, stripe: u32, bytes: u32) -> Option<Place> {
        let slab = memory.chunk();
        let bytes = class::fitting(slab, bytes.max(1))?.1;
        let open = self.chunks.iter_mut().find(|(_, chunk)| {
            chunk.stripe == stripe
                && chunk.bytes == bytes
                && !chunk.leaving
                && (chunk.used.len() as u32) < chunk.blocks(slab)
        });
        let (number, chunk) = match open {
            Some((number, chunk)) => (*number, chunk),
            None => {
                let number =
                    (self.first..self.end).find(|number| !self.chunks.contains_key(number))?;
                memory.set_stripe(place_of(self.node, number, slab, 0, 0).at(0), stripe);
                let chunk = Chunk { stripe, bytes, used: BTreeSet::new(), leaving: false };
                (number, self.chunks.entry(number).or_insert(chunk))
            }
        };
        let i = (0..chunk.blocks(slab)).find(|i| !chunk.used.contains(i))?;
        chunk.used.insert(i);
        Some(place_of(self.node, number, slab, i, bytes))
    }

    fn free(&mut self, memory: &Memory, place: Place) {
        let at = place.at(0).offset;
        let number = at / u64::from(memory.chunk());
        let Some(chunk) = self.chunks.get_mut(&number) else {
            self.wrong_frees += 1;
            return;
        };
        let i = (at % u64::from(memory.chunk())) as u32 / chunk.bytes;
        if !chunk.used.remove(&i) {
            self.wrong_frees += 1;
            return;
        }
        if !memory.is_lost(self.node) {
            memory.write(place.at(0), &vec![0xdb; chunk.bytes as usize]);
        }
        if chunk.used.is_empty() {
            self.chunks.remove(&number);
        }
    }

    fn reclaim(&mut self, memory: &Memory) {
        let oldest = self.pins.keys().next().copied().unwrap_or(u64::MAX);
        while let Some((at, place)) = self.retired.front().copied() {
            if at >= oldest {
                return;
            }
            self.retired.pop_front();
            self.free(memory, place);
        }
    }

    fn adopt(&mut self, memory: &Memory, (place, bytes, stripe): (Place, u32, u32)) -> bool {
        let slab = memory.chunk();
        let Some((_, bytes)) = class::fitting(slab, bytes) else { return false };
        let at = place.at(0).offset;
        let number = at / u64::from(slab);
        memory.set_stripe(place.at(0), stripe);
        let chunk = Chunk { stripe, bytes, used: BTreeSet::new(), leaving: false };
        let chunk = self.chunks.entry(number).or_insert(chunk);
        let offset = (at % u64::from(slab)) as u32;
        chunk.bytes == bytes
            && chunk.stripe == stripe
            && offset.is_multiple_of(bytes)
            && chunk.used.insert(offset / bytes)
    }
}

impl Blocks for Arena {
    type Pin = Pin;

    fn slab(&self) -> u32 {
        self.memory.chunk()
    }

    async fn allocate(&self, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        self.state.lock().allocate(&self.memory, stripe, bytes).ok_or(NoBlock::Full)
    }

    fn release(&self, place: Place) {
        self.state.lock().free(&self.memory, place);
    }

    fn retire(&self, place: Place) {
        let mut state = self.state.lock();
        let now = state.clock;
        state.clock += 1;
        state.retired.push_back((now, place));
        state.reclaim(&self.memory);
    }

    fn pin(&self) -> Pin {
        let mut state = self.state.lock();
        let at = state.clock;
        *state.pins.entry(at).or_default() += 1;
        Pin { state: self.state.clone(), memory: self.memory.clone(), at }
    }

    fn adopt(&self, used: &[(Place, u32, u32)]) -> Result<(), NoBlock> {
        let mut state = self.state.lock();
        for block in used {
            if !state.adopt(&self.memory, *block) {
                return Err(NoBlock::Lost(format!("block {} overlaps another", block.0)));
            }
        }
        Ok(())
    }

    async fn tend(&self) -> Result<(), NoBlock> {
        Ok(())
    }

    fn evacuate(&self, share: u32) -> usize {
        let slab = self.memory.chunk();
        let mut state = self.state.lock();
        let mut classes = HashMap::<(u32, u32), usize>::new();
        for chunk in state.chunks.values() {
            *classes.entry((chunk.stripe, chunk.bytes)).or_default() += 1;
        }
        let mut chosen = 0;
        for chunk in state.chunks.values_mut() {
            let several = classes[&(chunk.stripe, chunk.bytes)] > 1;
            if several && chunk.used.len() as u32 * 100 < share * chunk.blocks(slab) {
                chunk.leaving = true;
                chosen += 1;
            }
        }
        chosen
    }

    fn is_leaving(&self, place: Place) -> bool {
        let number = place.at(0).offset / u64::from(self.memory.chunk());
        self.state.lock().chunks.get(&number).is_some_and(|chunk| chunk.leaving)
    }

    fn blocks_beside(&self, place: Place) -> Vec<(Place, u32)> {
        let slab = self.memory.chunk();
        let number = place.at(0).offset / u64::from(slab);
        let bytes = self.state.lock().chunks.get(&number).map_or(0, |chunk| chunk.bytes);
        let used = self.used().into_iter();
        let beside = used.filter(|used| used.at(0).offset / u64::from(slab) == number);
        beside.map(|used| (used, bytes)).collect()
    }

    fn vacate(&self, place: Place) {
        self.set_leaving(place, true);
    }

    fn reuse(&self, place: Place) {
        self.set_leaving(place, false);
    }

    async fn give_back(&self) -> Result<(), NoBlock> {
        Ok(())
    }

    fn settle(&self) {
        self.state.lock().chunks.values_mut().for_each(|chunk| chunk.leaving = false);
    }

    fn usage(&self) -> Usage {
        let state = self.state.lock();
        let slab = self.memory.chunk();
        let live = state.chunks.values().map(|c| u64::from(c.bytes) * c.used.len() as u64).sum();
        let size = |place: &Place| {
            let number = place.at(0).offset / u64::from(slab);
            state.chunks.get(&number).map_or(0, |chunk| u64::from(chunk.bytes))
        };
        let limbo = state.retired.iter().map(|(_, place)| size(place)).sum::<u64>();
        let chunks = state.chunks.len() as u64;
        Usage { live: live_without(live, limbo), limbo, held: chunks * u64::from(slab), chunks }
    }
}

/// Clones of an arena allocate for several compute nodes.
impl SharedBlocks for Arena {
    fn slab(&self) -> u32 {
        self.memory.chunk()
    }

    async fn allocate(&self, bytes: u32) -> Result<Place, Error> {
        Ok(Blocks::allocate(self, 0, bytes).await?)
    }

    fn release(&self, place: Place, _bytes: u32) {
        Blocks::release(self, place);
    }

    async fn tend(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn rebuild(&self, used: &[(Place, u32)]) -> Result<u64, Error> {
        let named: BTreeSet<Place> = used.iter().map(|(place, _)| *place).collect();
        let lost: Vec<Place> =
            self.used().into_iter().filter(|place| !named.contains(place)).collect();
        lost.iter().for_each(|place| Blocks::release(self, *place));
        Ok(lost.len() as u64)
    }

    async fn leave(&self) -> Result<(), Error> {
        Ok(())
    }
}

const fn live_without(used: u64, limbo: u64) -> u64 {
    used - limbo
}
