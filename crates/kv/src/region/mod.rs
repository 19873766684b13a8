//! A region: chunks of one memory node, from which several compute nodes allocate blocks.
//!
//! The metadata lies in remote memory, and is changed by one-sided operations only. A table has a
//! descriptor for each chunk: the class of its blocks, and a bit for each block that is free. A
//! compute node takes up to 64 free blocks by one CAS of a word of bits, or a whole free chunk by
//! one CAS of its state, and allocates from these without a round trip. A block that is freed goes
//! to the compute node that frees it; surplus blocks go back by FETCH_AND_ADD of their bits.
//!
//! | step | why no block has two owners |
//! | --- | --- |
//! | CAS of a word of bits to 0 | each bit has one taker; the state is read behind the CAS, since the chunk may have another class by now |
//! | CAS of the state, free to a class | all bits are 0, so all blocks belong to the winner |
//! | CAS of the state, a class to free | only by a compute node that has all blocks of the chunk |
//! | addition of bits | only the owner of a block sets its bit |
//!
//! A compute node that crashes loses the blocks that it has taken and not used, and the unlinked
//! blocks that waited for the epochs of others. No other compute node loses a block.

mod layout;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;

use self::layout::{FREE, HEADER_BYTES, Layout, ROOT};
use crate::blocks::{NoBlock, SharedBlocks};
use crate::error::Error;
use crate::layout::{Malformed, word};
use crate::place::{Place, UNIT};
use crate::reach::{Reach, Step};

/// Bytes of the table that are read at once.
const WINDOW: usize = 16 << 10;
/// Windows that are searched for a block of the class before a free chunk is divided.
const SEARCHED: usize = 4;
/// Bytes of free blocks of one class that a compute node keeps.
const KEPT_BYTES: u32 = 64 << 10;
/// Searches of the whole table before the region counts as full.
const ROUNDS: usize = 8;

/// The allocator of one compute node in a region.
#[derive(Debug)]
pub struct RegionBlocks<R> {
    reach: R,
    header: Place,
    layout: Layout,
    local: Mutex<Local>,
}

/// The blocks that a compute node has taken and not used.
#[derive(Debug, Default)]
struct Local {
    /// Free blocks, by the state of their chunks.
    free: BTreeMap<u64, Vec<Place>>,
    /// The descriptor at which the next search begins.
    cursor: u64,
}

/// Numbers of chunks and blocks of a region. Exact only while no compute node works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionUsage {
    /// Chunks of the region, without those of header and table.
    pub chunks: u64,
    /// Chunks that are free.
    pub free_chunks: u64,
    /// Blocks that a compute node has taken, used or not.
    pub taken_blocks: u64,
}

/// Blocks of one chunk that an index names.
#[derive(Clone, Debug)]
struct Named {
    state: u64,
    /// The bits of the blocks, by the number of their word.
    bits: BTreeMap<usize, u64>,
}

/// A chunk that could be divided into blocks of a class.
#[derive(Clone, Debug)]
struct Candidate {
    index: u64,
    state: u64,
    /// The bits of a chunk of another class, of which all blocks are free.
    bits: Vec<u64>,
}

impl<R: Reach> RegionBlocks<R> {
    /// Creates a region from `chunks`: numbers of chunks that stay allocated as long as the region
    /// is used. `chunk`: the bytes of each. Returns the place of the header, by which compute nodes
    /// [join](RegionBlocks::join) the region.
    ///
    /// # Errors
    /// [`Error::Setting`] if the chunks are too few, or too many for their size.
    pub async fn create(reach: &R, node: u8, chunk: u32, chunks: &[u64]) -> Result<Place, Error> {
        let mut chunks = chunks.to_vec();
        chunks.sort_unstable();
        let few = Error::Setting("a region needs more chunks for its table; reserve more memory");
        let (Some(first), Some(last)) = (chunks.first().copied(), chunks.last().copied()) else {
            return Err(few);
        };
        let count = last - first + 1;
        let pieces = count.div_ceil(Layout::of_piece(chunk));
        if pieces as usize >= chunks.len() {
            return Err(few);
        }
        if pieces as usize > (chunk as usize - HEADER_BYTES) / 8 {
            return Err(Error::Setting("a region this large needs larger chunks"));
        }
        let place = |number: u64| {
            let place = Place::new(node, number * u64::from(chunk) / UNIT);
            place.ok_or(Error::Setting("a chunk of the region is beyond 32 TiB"))
        };
        let header = place(first)?;
        let (table, blocks) = chunks[1..].split_at(pieces as usize);
        let pieces = table.iter().map(|number| place(*number)).collect::<Result<_, _>>()?;
        let layout = Layout { node, chunk, first, chunks: count, pieces };
        let each = Layout::of_piece(chunk);
        let mut table = vec![vec![0; chunk as usize]; layout.pieces.len()];
        for number in blocks {
            let (piece, at) = ((number - first) / each, (number - first) % each);
            let at = 8 * at as usize * Layout::words(chunk);
            crate::layout::put(&mut table[piece as usize], at, FREE);
        }
        for (piece, bytes) in layout.pieces.iter().zip(&table) {
            reach.run(&mut [Step::Write { at: piece.at(0), from: bytes }]).await?;
        }
        // The header comes last: a compute node that joins finds the table whole.
        let bytes = layout.encode();
        reach.run(&mut [Step::Write { at: header.at(0), from: &bytes }]).await?;
        Ok(header)
    }

    /// The allocator of this compute node in the region with its header at `header`.
    pub async fn join(reach: R, header: Place) -> Result<Self, Error> {
        let malformed = Error::malformed(header.at(0));
        let mut bytes = vec![0; HEADER_BYTES];
        reach.run(&mut [Step::Read { at: header.at(0), into: &mut bytes }]).await?;
        let pieces = Layout::pieces_of(&bytes).map_err(&malformed)?;
        bytes.resize(HEADER_BYTES + 8 * pieces, 0);
        reach.run(&mut [Step::Read { at: header.at(0), into: &mut bytes }]).await?;
        let layout = Layout::parse(header.node(), &bytes).map_err(&malformed)?;
        Ok(Self { reach, header, layout, local: Mutex::default() })
    }

    /// Place of the index's root. `None`: the region has no index yet.
    pub async fn root(&self) -> Result<Option<Place>, Error> {
        let mut bytes = [0; 8];
        let at = self.header.at(ROOT);
        self.reach.run(&mut [Step::Read { at, into: &mut bytes }]).await?;
        let place = Place::of(u64::from_be_bytes(bytes));
        Ok((!place.is_none()).then_some(place))
    }

    /// Notes the place of the index's root, unless the region has one. Returns the region's root.
    pub async fn set_root(&self, root: Place) -> Result<Place, Error> {
        let (at, mut old) = (self.header.at(ROOT), 0);
        let cas = Step::Cas { at, expected: 0, new: root.bits(), old: &mut old };
        self.reach.run(&mut [cas]).await?;
        Ok(if old == 0 { root } else { Place::of(old) })
    }

    /// The way to remote memory.
    pub fn reach(&self) -> &R {
        &self.reach
    }

    /// Number of blocks that this compute node has taken and not used.
    pub fn held_blocks(&self) -> u64 {
        self.local.lock().free.values().map(|free| free.len() as u64).sum()
    }

    /// Counts the chunks and blocks of the region.
    pub async fn usage(&self) -> Result<RegionUsage, Error> {
        let mut usage = RegionUsage::default();
        let mut index = 0;
        while index < self.layout.chunks {
            let (bytes, count) = self.window(index).await?;
            for (_, state, bits) in self.descriptors(index, &bytes) {
                let free: u32 = bits.map(u64::count_ones).sum();
                usage.chunks += u64::from(state != 0);
                usage.free_chunks += u64::from(state == FREE);
                usage.taken_blocks += u64::from(self.layout.blocks(state).saturating_sub(free));
            }
            index += count;
        }
        Ok(usage)
    }

    /// Reads descriptors from `index` on. Returns their bytes and their number.
    async fn window(&self, index: u64) -> Result<(Vec<u8>, u64), Error> {
        let each = Layout::of_piece(self.layout.chunk);
        let bytes = 8 * Layout::words(self.layout.chunk);
        let most = ((WINDOW / bytes) as u64).max(1);
        let count = most.min(each - index % each).min(self.layout.chunks - index);
        let mut window = vec![0; bytes * count as usize];
        let at = self.layout.word(index, 0);
        self.reach.run(&mut [Step::Read { at, into: &mut window }]).await?;
        Ok((window, count))
    }

    /// Index, state and bits of the descriptors in `bytes`.
    fn descriptors<'b>(
        &self,
        index: u64,
        bytes: &'b [u8],
    ) -> impl Iterator<Item = (u64, u64, impl Iterator<Item = u64> + use<'b, R>)> {
        let each = bytes.chunks_exact(8 * Layout::words(self.layout.chunk));
        (index..).zip(each).map(|(index, bytes)| {
            let bits = (1..bytes.len() / 8).map(|at| word(bytes, 8 * at));
            (index, word(bytes, 0), bits)
        })
    }

    /// Takes blocks of chunks in state `state`, of `bytes` each.
    async fn refill(&self, state: u64, bytes: u32) -> Result<(), Error> {
        for _ in 0..ROUNDS {
            let mut candidate = None;
            let mut index = self.local.lock().cursor % self.layout.chunks.max(1);
            let (mut windows, mut left) = (0, self.layout.chunks);
            while left > 0 {
                let (window, count) = self.window(index).await?;
                if self.take_in(&window, index, (state, bytes), &mut candidate).await? {
                    return Ok(());
                }
                windows += 1;
                if windows >= SEARCHED && candidate.is_some() {
                    break;
                }
                left = left.saturating_sub(count);
                index = (index + count) % self.layout.chunks;
            }
            let Some(candidate) = candidate else { return Err(NoBlock::Full.into()) };
            if self.divide(&candidate, (state, bytes)).await? {
                return Ok(());
            }
        }
        Err(NoBlock::Full.into())
    }

    /// Takes blocks of the class in the chunks of a window. Returns false if there are none;
    /// `candidate` gets a chunk that could be divided.
    async fn take_in(
        &self,
        window: &[u8],
        index: u64,
        (wanted, bytes): (u64, u32),
        candidate: &mut Option<Candidate>,
    ) -> Result<bool, Error> {
        for (index, state, bits) in self.descriptors(index, window) {
            if state == wanted {
                for (at, bits) in bits.enumerate().filter(|(_, bits)| *bits != 0) {
                    if self.take(index, at, bits, (wanted, bytes)).await? {
                        self.local.lock().cursor = index;
                        return Ok(true);
                    }
                }
                continue;
            }
            let is_better = candidate.as_ref().is_none_or(|found| found.state != FREE);
            if state == FREE && is_better {
                *candidate = Some(Candidate { index, state, bits: Vec::new() });
            } else if candidate.is_none() && self.layout.blocks(state) != 0 {
                let bits: Vec<u64> = bits.collect();
                let free: u32 = bits.iter().map(|bits| bits.count_ones()).sum();
                if free == self.layout.blocks(state) {
                    *candidate = Some(Candidate { index, state, bits });
                }
            }
        }
        Ok(false)
    }

    /// Takes the blocks whose bits are `bits`, if the chunk is in state `state`.
    async fn take(
        &self,
        index: u64,
        at: usize,
        bits: u64,
        (state, bytes): (u64, u32),
    ) -> Result<bool, Error> {
        if !self.take_bits(index, at, bits, state).await? {
            return Ok(false);
        }
        let places = (0..64).filter(|bit| bits >> bit & 1 != 0);
        let places = places.map(|bit| self.layout.place(index, at as u32 * 64 + bit, bytes));
        self.local.lock().free.entry(state).or_default().extend(places);
        Ok(true)
    }

    /// Replaces `bits` by 0. Returns false if the bits or the state of the chunk differ.
    async fn take_bits(&self, index: u64, at: usize, bits: u64, state: u64) -> Result<bool, Error> {
        let (mut old, mut found) = (0, [0; 8]);
        let word = self.layout.word(index, 1 + at);
        // In one list: a chunk of which this compute node has a block keeps its state.
        let mut steps = [
            Step::Cas { at: word, expected: bits, new: 0, old: &mut old },
            Step::Read { at: self.layout.word(index, 0), into: &mut found },
        ];
        self.reach.run(&mut steps).await?;
        if old != bits {
            return Ok(false);
        }
        if u64::from_be_bytes(found) != state {
            self.add_bits(index, at, bits).await?;
            return Ok(false);
        }
        Ok(true)
    }

    async fn add_bits(&self, index: u64, at: usize, bits: u64) -> Result<(), Error> {
        let (at, mut old) = (self.layout.word(index, 1 + at), 0);
        Ok(self.reach.run(&mut [Step::Add { at, amount: bits, old: &mut old }]).await?)
    }

    /// Divides a chunk into blocks of `bytes`, and takes all of them. Returns false if another
    /// compute node was faster.
    async fn divide(
        &self,
        candidate: &Candidate,
        (state, bytes): (u64, u32),
    ) -> Result<bool, Error> {
        let Candidate { index, state: before, bits } = candidate;
        for (at, taken) in bits.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            if !self.take_bits(*index, at, *taken, *before).await? {
                for (at, taken) in bits[..at].iter().enumerate().filter(|(_, bits)| **bits != 0) {
                    self.add_bits(*index, at, *taken).await?;
                }
                return Ok(false);
            }
        }
        let (at, mut old) = (self.layout.word(*index, 0), 0);
        let cas = Step::Cas { at, expected: *before, new: state, old: &mut old };
        self.reach.run(&mut [cas]).await?;
        if old != *before {
            return Ok(false);
        }
        // The first block comes last, so that it is used first.
        let blocks = (0..self.layout.blocks(state)).rev();
        let places = blocks.map(|block| self.layout.place(*index, block, bytes));
        let mut local = self.local.lock();
        local.free.entry(state).or_default().extend(places);
        local.cursor = *index;
        Ok(true)
    }

    /// Gives free blocks of chunks in state `state` back: whole chunks, otherwise bits.
    async fn give_back(&self, state: u64, places: Vec<Place>) -> Result<(), Error> {
        let blocks = self.layout.blocks(state).max(1);
        let bytes = crate::layout::class::bytes(self.layout.chunk, (state - 2) as u32);
        let mut chunks: HashMap<u64, BTreeMap<usize, u64>> = HashMap::new();
        for place in places {
            let Some((index, block)) = self.layout.locate(place, bytes) else { continue };
            let bits = chunks.entry(index).or_default();
            *bits.entry(block as usize / 64).or_default() |= 1 << (block % 64);
        }
        let mut chunks: Vec<_> = chunks.into_iter().collect();
        chunks.sort_unstable_by_key(|(index, _)| *index);
        for (index, words) in chunks {
            if words.values().map(|bits| bits.count_ones()).sum::<u32>() == blocks {
                let (at, mut old) = (self.layout.word(index, 0), 0);
                let cas = Step::Cas { at, expected: state, new: FREE, old: &mut old };
                self.reach.run(&mut [cas]).await?;
                continue;
            }
            for (at, bits) in words {
                self.add_bits(index, at, bits).await?;
            }
        }
        Ok(())
    }

    /// The blocks of `used`, by the descriptors of their chunks.
    fn named(&self, used: &[(Place, u32)]) -> Result<BTreeMap<u64, Named>, Error> {
        let mut named: BTreeMap<u64, Named> = BTreeMap::new();
        for (place, bytes) in used {
            let found = self.layout.state(*bytes).and_then(|(state, bytes)| {
                self.layout.locate(*place, bytes).map(|(index, block)| (state, index, block))
            });
            let Some((state, index, block)) = found else {
                let what = Malformed("the index names a block that the region has not");
                return Err(Error::Malformed { at: place.at(0), what });
            };
            let chunk =
                named.entry(index).or_insert_with(|| Named { state, bits: BTreeMap::new() });
            if chunk.state != state {
                return Err(self.foreign(index));
            }
            *chunk.bits.entry(block as usize / 64).or_default() |= 1 << (block % 64);
        }
        Ok(named)
    }

    /// The error for a chunk that has blocks of another class than the index says.
    fn foreign(&self, index: u64) -> Error {
        let what = Malformed("a chunk has blocks of another class than the index names");
        Error::Malformed { at: self.layout.place(index, 0, 0).at(0), what }
    }

    /// Free blocks of this compute node beyond those that it keeps, by the states of their chunks.
    fn surplus(&self) -> Vec<(u64, Vec<Place>)> {
        let mut local = self.local.lock();
        let surplus = local.free.iter_mut().filter_map(|(state, free)| {
            let bytes = self.layout.chunk / self.layout.blocks(*state).max(1);
            let kept = (KEPT_BYTES / bytes).clamp(2, 64) as usize;
            // Twice as many, so that blocks do not go to and fro.
            if free.len() <= 2 * kept {
                return None;
            }
            // In order of their places, so that whole chunks leave.
            free.sort_unstable_by(|a, b| b.cmp(a));
            Some((*state, free.drain(..free.len() - kept).collect()))
        });
        surplus.collect()
    }
}

impl<R: Reach> SharedBlocks for RegionBlocks<R> {
    fn slab(&self) -> u32 {
        self.layout.chunk
    }

    async fn allocate(&self, bytes: u32) -> Result<Place, Error> {
        let Some((state, bytes)) = self.layout.state(bytes) else {
            return Err(Error::Setting("a block longer than a chunk was asked for"));
        };
        loop {
            let place = self.local.lock().free.get_mut(&state).and_then(Vec::pop);
            if let Some(place) = place {
                return Ok(place);
            }
            match self.refill(state, bytes).await {
                // Chunks that this compute node has for other classes may be all that is left.
                Err(Error::NoBlock(NoBlock::Full)) if self.held_blocks() > 0 => {
                    SharedBlocks::leave(self).await?;
                    self.refill(state, bytes).await?;
                }
                result => result?,
            }
        }
    }

    fn release(&self, place: Place, bytes: u32) {
        if let Some((state, _)) = self.layout.state(bytes) {
            self.local.lock().free.entry(state).or_default().push(place);
        }
    }

    async fn tend(&self) -> Result<(), Error> {
        for (state, places) in self.surplus() {
            self.give_back(state, places).await?;
        }
        Ok(())
    }

    async fn rebuild(&self, used: &[(Place, u32)]) -> Result<u64, Error> {
        let mut named = self.named(used)?;
        let held = std::mem::take(&mut self.local.lock().free);
        let held: usize = held.values().map(Vec::len).sum();
        let (mut before, mut after) = (held as u64, 0);
        let mut windows = Vec::new();
        let mut index = 0;
        while index < self.layout.chunks {
            let (mut bytes, count) = self.window(index).await?;
            let each = bytes.chunks_exact_mut(8 * Layout::words(self.layout.chunk));
            for (index, descriptor) in (index..).zip(each) {
                let state = word(descriptor, 0);
                let chunk = named.remove(&index);
                if chunk.as_ref().is_some_and(|chunk| chunk.state != state) {
                    return Err(self.foreign(index));
                }
                let blocks = self.layout.blocks(state);
                for at in 0..blocks.div_ceil(64) as usize {
                    let all = u64::MAX >> (64 - (blocks - 64 * at as u32).min(64));
                    let used = chunk.as_ref().and_then(|chunk| chunk.bits.get(&at)).unwrap_or(&0);
                    before += u64::from(word(descriptor, 8 + 8 * at).count_ones());
                    after += u64::from((all & !used).count_ones());
                    crate::layout::put(descriptor, 8 + 8 * at, all & !used);
                }
            }
            windows.push((index, bytes));
            index += count;
        }
        if let Some(index) = named.keys().next() {
            return Err(self.foreign(*index));
        }
        // The states stay. So each word is right by itself, also if this compute node ends between.
        for (index, bytes) in &windows {
            let at = self.layout.word(*index, 0);
            self.reach.run(&mut [Step::Write { at, from: bytes }]).await?;
        }
        Ok(after.saturating_sub(before))
    }

    async fn leave(&self) -> Result<(), Error> {
        let all = std::mem::take(&mut self.local.lock().free);
        for (state, places) in all {
            self.give_back(state, places).await?;
        }
        Ok(())
    }
}
