//! Stores over a pool: remote memory and blocks of one or several memory nodes.
//!
//! [`PoolMemory`] is both ways into a pool that a store needs: [`Reach`] executes verbs on the
//! grants that have the addresses, and [`Blocks`] allocates from a heap over the pool's chunks.
//!
//! Of several memory nodes, the first one has the index, and all of them have values. A block and
//! its slot are written in one round trip only if both are on the first memory node. If another
//! memory node ends, its values are lost and the store goes on without it.

pub(crate) mod lists;
mod nodes;
mod whole;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use heap::{ChunkSource, Epochs, Guard, Heap};
use parking_lot::Mutex;
use pool::{Grant, GroupId, Lane, Pool};
use smallvec::SmallVec;
use verbs::{Nic, executor};

use self::lists::{LIST, Located, Part, divide, is_one_list, is_one_qp, join, stopped, to_pool};
use self::nodes::Node;
pub use self::nodes::{NodeGrant, Nodes};
pub use self::whole::{RegionKeeper, SharedPoolStore, WholePool};

use crate::blocks::{Blocks, NoBlock, Usage};
use crate::layout::class;
use crate::place::{Address, Place, UNIT};
use crate::reach::{Range, Reach, Step, Stopped};

/// Steps of an operation on one key, for which memory is on the stack.
const FEW: usize = 4;
/// Lists in flight at once for one round trip.
const LISTS: usize = 3;

/// Sparse chunks that one compaction empties in each group, or a quarter of them if that is more:
/// each compaction looks at all slots once. At least half of them stay, and take the blocks.
const SPARSE_CHUNKS: usize = 64;

/// The memory of a pool, as a store uses it. Clones share the heap.
pub struct PoolMemory<N: Nic = pool::DefaultNic> {
    shared: Arc<Shared<N>>,
}

struct Shared<N: Nic> {
    nodes: Nodes<N>,
    heap: OnceLock<Heap<Nodes<N>>>,
    settings: heap::Settings,
    /// Chunks of a predecessor by address, until the heap has taken them over.
    inherited: Mutex<Vec<NodeGrant>>,
    /// A memory node that the store needs has not answered.
    has_failed: AtomicBool,
    leaving: Mutex<HashSet<Place>>,
}

impl<N: Nic> Clone for PoolMemory<N> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<N: Nic> PoolMemory<N> {
    /// The memory of `pool`, for a new store. `node` is the number of the memory node in places.
    ///
    /// # Errors
    /// [`heap::Error::Source`] for a scheme whose chunks are accessed by whole pages.
    pub fn new(pool: Pool<N>, node: u8, settings: heap::Settings) -> Result<Self, heap::Error> {
        let memory = Self::inheriting(pool, node, settings, Vec::new())?;
        memory.adopt_all(Vec::new())?;
        Ok(memory)
    }

    /// The memory of several pools, each of one memory node, for a new store. The first pool has
    /// the index, and all of them have values.
    ///
    /// # Errors
    /// As for [`PoolMemory::new`], and for pools whose chunks differ in length.
    pub fn over(pools: Vec<Pool<N>>, settings: heap::Settings) -> Result<Self, heap::Error> {
        let memory = Self::of(Nodes::new(pools, 0), settings, Vec::new())?;
        memory.adopt_all(Vec::new())?;
        Ok(memory)
    }

    /// The memory of `pool`, for a store whose owner has ended. `chunks`: all chunks of the
    /// predecessor. [`Store::open`](crate::Store::open) finds the blocks in them.
    pub fn inheriting(
        pool: Pool<N>,
        node: u8,
        settings: heap::Settings,
        chunks: Vec<Grant>,
    ) -> Result<Self, heap::Error> {
        let chunks = chunks.into_iter().map(|grant| NodeGrant { node: 0, grant }).collect();
        Self::of(Nodes::new(vec![pool], node), settings, chunks)
    }

    /// The same memory nodes and chunks, for the same store when it is opened again, in this
    /// process. No operation of the store may be in flight, nor begin later.
    ///
    /// # Errors
    /// As for [`PoolMemory::new`].
    pub fn reopened(&self) -> Result<Self, heap::Error> {
        let inherited = || self.shared.inherited.lock().clone();
        let chunks = self.heap().map_or_else(inherited, Heap::chunks);
        Self::of(Ok(self.shared.nodes.clone()), self.shared.settings, chunks)
    }

    /// True if an operation has failed because the first memory node did not answer, or another one
    /// that is still connected. The store must be [opened again](PoolMemory::reopened).
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed.load(Ordering::Relaxed)
    }

    /// Re-establishes the connections to all memory nodes ([`Pool::reestablish`]). A memory node
    /// other than the first that has ended its connection counts as gone. Returns false if the
    /// first one has ended its connection: then the store is lost.
    ///
    /// # Errors
    /// A memory node still does not answer.
    pub fn reestablish(&self) -> Result<bool, pool::Error> {
        for (index, node) in self.shared.nodes.iter().enumerate() {
            match node.pool.reestablish() {
                Ok(()) => {}
                Err(error) if node.pool.is_connected() => return Err(error),
                Err(_) if index == 0 => return Ok(false),
                Err(_) => {
                    node.set_gone();
                }
            }
        }
        Ok(true)
    }

    fn of(
        nodes: Result<Nodes<N>, pool::Error>,
        settings: heap::Settings,
        mut chunks: Vec<NodeGrant>,
    ) -> Result<Self, heap::Error> {
        chunks.sort_by_key(|chunk| (chunk.node, chunk.grant.addr));
        let nodes =
            nodes.map_err(|source| heap::Error::Source { attempt: "using a pool", source })?;
        let (heap, inherited) = (OnceLock::new(), Mutex::new(chunks));
        let (leaving, has_failed) = (Mutex::default(), AtomicBool::new(false));
        let shared = Shared { nodes, heap, settings, inherited, has_failed, leaving };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The heap. `None`: the blocks of the predecessor are not known yet.
    pub fn heap(&self) -> Option<&Heap<Nodes<N>>> {
        self.shared.heap.get()
    }

    /// The pool of the first memory node.
    pub fn pool(&self) -> &Pool<N> {
        &self.shared.nodes.index().pool
    }

    /// Polls the completions of all memory nodes, as [`Pool::poll`] does.
    pub fn poll(&self) -> usize {
        self.pools().map(Pool::poll).sum()
    }

    /// Polls until something completes or `timeout` has passed, as [`Pool::park`] does.
    pub fn park(&self, timeout: Duration) -> usize {
        match self.shared.nodes.len() {
            1 => self.pool().park(timeout),
            _ => executor::park(timeout, || self.poll()),
        }
    }

    /// The pools of all memory nodes.
    pub fn pools(&self) -> impl Iterator<Item = &Pool<N>> {
        self.shared.nodes.iter().map(|node| &node.pool)
    }

    /// Sets the time within which a memory node must answer ([`Pool::set_answer_timeout`]).
    ///
    /// # Errors
    /// The time is not 1 ms to one hour.
    pub fn set_answer_timeout(&self, limit: Duration) -> Result<(), pool::Error> {
        self.pools().try_for_each(|pool| pool.set_answer_timeout(limit))
    }

    fn adopt_all(&self, used: Vec<heap::Block>) -> Result<(), heap::Error> {
        let chunks = self.shared.inherited.lock().clone();
        let heap = Heap::rebuild(self.shared.nodes.clone(), self.shared.settings, chunks, used)?;
        let _ = self.shared.heap.set(heap);
        self.shared.inherited.lock().clear();
        Ok(())
    }

    /// The chunk that has `at`, and the offset of `at` in it.
    fn locate(&self, at: Address) -> Option<Located> {
        let rest = at.offset % UNIT;
        let place = heap::Place::new(at.node, at.offset - rest)?;
        if let Some((chunk, offset)) = self.heap().and_then(|heap| heap.locate(place)) {
            return Some((chunk, offset + rest));
        }
        let (index, node) = self.shared.nodes.by_number(at.node)?;
        let address = node.first_chunk_addr.checked_add(at.offset)?;
        let inherited = self.shared.inherited.lock();
        let key = (index as u8, address);
        let behind = inherited.partition_point(|own| (own.node, own.grant.addr) <= key);
        let chunk = inherited.get(behind.checked_sub(1)?)?;
        let within = address.checked_sub(chunk.grant.addr)?;
        (usize::from(chunk.node) == index && within < chunk.grant.len).then_some((*chunk, within))
    }

    /// The reason of a failure at a memory node. A memory node that has only values is gone then:
    /// its connection has ended, and with it the memory.
    fn stopped(&self, index: usize, error: pool::Error) -> Stopped {
        let node = self.shared.nodes.get(index);
        let is_silent = node.pool.defers_repair() && node.pool.is_connected();
        match stopped(error) {
            Stopped::Lost(why) if index > 0 && !is_silent => {
                let number = self.shared.nodes.number(index);
                node.set_gone();
                Stopped::Gone { node: number, why }
            }
            stopped => {
                self.shared.has_failed.store(true, Ordering::Relaxed);
                stopped
            }
        }
    }

    /// Executes steps of one list in place: a list of [`Part`] would copy them.
    async fn run_few(&self, steps: &mut [Step<'_>], chunks: &[Located]) -> Result<(), Stopped> {
        let index = usize::from(chunks[0].0.node);
        let posted = steps.iter_mut().zip(chunks);
        let mut posted: SmallVec<[pool::Step<'_, N>; FEW]> =
            posted.map(|(step, (chunk, offset))| to_pool(step, &chunk.grant, *offset)).collect();
        let pool = &self.shared.nodes.get(index).pool;
        pool.run(Lane(0), &mut posted).await.map_err(|error| self.stopped(index, error))
    }

    async fn run_list(&self, part: &mut Part<'_>) -> Result<(), Stopped> {
        let Some(index) = part.first().map(|(_, chunk, _)| usize::from(chunk.node)) else {
            return Ok(());
        };
        let mut steps: SmallVec<[pool::Step<'_, N>; LIST]> = SmallVec::new();
        for (verb, chunk, offset) in part.iter_mut() {
            steps.push(to_pool(verb, &chunk.grant, *offset));
        }
        let pool = &self.shared.nodes.get(index).pool;
        pool.run(Lane(0), &mut steps).await.map_err(|error| self.stopped(index, error))
    }
}

impl<N: Nic> Reach for PoolMemory<N> {
    type Right = ();

    async fn open(&self, _range: Range) -> Result<(), Stopped> {
        Ok(())
    }

    async fn close(&self, (): ()) {}

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let locate = |at| {
            let found = self.locate(at);
            found.ok_or_else(|| Stopped::Refused(format!("no chunk of this process has {at}")))
        };
        let mut chunks: SmallVec<[Located; FEW]> = SmallVec::new();
        for step in steps.iter() {
            chunks.push(locate(step.at())?);
        }
        if chunks.is_empty() {
            return Ok(());
        }
        if is_one_list(steps, &chunks) {
            return self.run_few(steps, &chunks).await;
        }
        let mut lists = SmallVec::new();
        let has_atomics =
            steps.iter().any(|step| matches!(step, Step::Cas { .. } | Step::Add { .. }));
        for step in steps.iter_mut() {
            divide(step, &mut lists, locate)?;
        }
        if let [(part, _)] = lists.as_mut_slice() {
            return self.run_list(part).await;
        }
        // A fence within a list orders it, but no fence stands between two lists.
        let at_once = if has_atomics { 1 } else { LISTS };
        for lists in lists.chunks_mut(at_once) {
            join(lists.iter_mut().map(|(part, _)| self.run_list(part))).await?;
        }
        Ok(())
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        match (self.locate(a), self.locate(b)) {
            (Some((a, _)), Some((b, _))) => is_one_qp(&a, &b),
            _ => false,
        }
    }
}

fn no_block(error: heap::Error) -> NoBlock {
    match &error {
        heap::Error::Source {
            source: pool::Error::OutOfMemory { .. } | pool::Error::OverBudget { .. },
            ..
        } => NoBlock::Full,
        _ => NoBlock::Lost(error.to_string()),
    }
}

/// The stripe of this thread's pins: threads that pin at once should use different ones.
fn pin_counter() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static LANE: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    LANE.with(|stripe| *stripe)
}

impl<N: Nic> PoolMemory<N> {
    /// The heap of a store that is open.
    fn ready(&self) -> Result<&Heap<Nodes<N>>, NoBlock> {
        let unknown = "the blocks of the store are not known before the store is open";
        self.heap().ok_or_else(|| NoBlock::Lost(unknown.into()))
    }

    async fn allocate_on(&self, node: &Node<N>, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        let block = self.ready()?.allocate(node.group(stripe), bytes.into()).await;
        let block = block.map_err(|error| self.no_block(node, error))?;
        Ok(Place::of(block.place.raw()))
    }

    /// The first place of the chunk that has `place`.
    fn chunk_of(&self, place: Place) -> Place {
        let chunk = self.pool().chunk_bytes() / UNIT;
        Place::new(place.node(), place.unit() / chunk * chunk).unwrap_or(place)
    }

    /// The reason that `node` has given no block.
    fn no_block(&self, node: &Node<N>, error: heap::Error) -> NoBlock {
        let why = no_block(error);
        let is_index = std::ptr::eq(node, self.shared.nodes.index());
        let is_silent = node.pool.defers_repair() && node.pool.is_connected();
        if matches!(why, NoBlock::Lost(_)) && (is_index || is_silent) {
            self.shared.has_failed.store(true, Ordering::Relaxed);
        }
        why
    }

    /// Gives chunks of a group back, and fills its reserve.
    async fn tend_group(
        &self,
        heap: &Heap<Nodes<N>>,
        group: GroupId,
        node: &Node<N>,
    ) -> Result<(), NoBlock> {
        heap.give_back(group).await.map_err(|error| self.no_block(node, error))?;
        if !node.is_gone() {
            heap.refill(group).await.map_err(|error| self.no_block(node, error))?;
        }
        Ok(())
    }
}

impl<N: Nic> Blocks for PoolMemory<N> {
    type Pin = Option<Guard<Arc<Epochs>>>;

    fn slab(&self) -> u32 {
        self.pool().chunk_bytes().min(class::SLAB_MAX.into()) as u32
    }

    async fn allocate(&self, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        self.allocate_on(self.shared.nodes.index(), stripe, bytes).await
    }

    async fn allocate_value(&self, stripe: u32, spread: u64, bytes: u32) -> Result<Place, NoBlock> {
        let nodes = &self.shared.nodes;
        let count = nodes.len();
        for step in 0..count {
            let index = (spread as usize % count + step) % count;
            let node = nodes.get(index);
            if node.is_gone() {
                continue;
            }
            match self.allocate_on(node, stripe, bytes).await {
                Err(NoBlock::Full) => {}
                Err(NoBlock::Lost(_)) if index > 0 && !self.has_failed() => {
                    node.set_gone();
                }
                result => return result,
            }
        }
        Err(NoBlock::Full)
    }

    fn is_gone(&self, place: Place) -> bool {
        self.shared.nodes.by_number(place.node()).is_some_and(|(_, node)| node.is_gone())
    }

    fn gone_nodes(&self) -> u32 {
        self.shared.nodes.iter().filter(|node| node.is_gone()).count() as u32
    }

    fn release(&self, place: Place) {
        self.retire(place);
    }

    fn retire(&self, place: Place) {
        let Some((heap, place)) = self.heap().zip(heap::Place::from_raw(place.bits())) else {
            return;
        };
        // A place that is not live comes from damaged remote memory. The heap is as before.
        let _ = heap.free(place);
    }

    fn pin(&self) -> Self::Pin {
        self.heap().map(|heap| heap.epochs().pin_owned(pin_counter()))
    }

    fn adopt(&self, used: &[(Place, u32, u32)]) -> Result<(), NoBlock> {
        let block = |(place, bytes, _): &(Place, u32, u32)| {
            let place = heap::Place::from_raw(place.bits())?;
            Some(heap::Block { place, bytes: (*bytes).into() })
        };
        let blocks = used.iter().filter_map(block).collect();
        self.adopt_all(blocks).map_err(no_block)
    }

    async fn tend(&self) -> Result<(), NoBlock> {
        let heap = self.ready()?;
        for group in (0..self.shared.nodes.groups()).map(GroupId) {
            let node = self.shared.nodes.node_of(group);
            heap.epochs().advance();
            match self.tend_group(heap, group, node).await {
                // The reserve is filled when the pool has memory again.
                Ok(()) | Err(NoBlock::Full) => {}
                Err(NoBlock::Lost(_))
                    if !std::ptr::eq(node, self.shared.nodes.index()) && !self.has_failed() =>
                {
                    node.set_gone();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn evacuate(&self, share: u32) -> usize {
        let Some(heap) = self.heap() else { return 0 };
        let mut leaving = self.shared.leaving.lock();
        let groups = (0..self.shared.nodes.groups()).map(GroupId);
        for group in groups.filter(|group| !self.shared.nodes.node_of(*group).is_gone()) {
            let most = f64::from(share) / 100.0;
            let sparse = heap.sparse(group, most, usize::MAX).unwrap_or_default();
            let taken = SPARSE_CHUNKS.max(sparse.len() / 4).min(sparse.len() / 2);
            for chunk in &sparse[..taken] {
                if heap.evacuate(chunk.place).is_ok() {
                    leaving.insert(Place::of(chunk.place.raw()));
                }
            }
        }
        leaving.len()
    }

    fn is_leaving(&self, place: Place) -> bool {
        self.shared.leaving.lock().contains(&self.chunk_of(place))
    }

    fn blocks_beside(&self, place: Place) -> Vec<(Place, u32)> {
        let units = u64::from(Blocks::slab(self)) / UNIT;
        let (chunk, first) = (self.chunk_of(place), place.unit() / units * units);
        let before = (first > chunk.unit()).then(|| Place::new(place.node(), first - 1)).flatten();
        let to_heap = |place: Place| heap::Place::from_raw(place.bits());
        let Some((heap, chunk)) = self.heap().zip(to_heap(chunk)) else { return Vec::new() };
        let blocks = heap.live_blocks(chunk, before.and_then(to_heap), units as usize);
        let blocks = blocks.unwrap_or_default().into_iter();
        let blocks = blocks.map(|block| (Place::of(block.place.raw()), block.bytes as u32));
        blocks.take_while(|(place, _)| place.unit() < first + units).collect()
    }

    fn vacate(&self, place: Place) {
        let chunk = heap::Place::from_raw(self.chunk_of(place).bits());
        // A chunk of several slabs may be the only one.
        if let Some((heap, chunk)) = self.heap().zip(chunk)
            && u64::from(Blocks::slab(self)) == self.pool().chunk_bytes()
        {
            let _ = heap.evacuate(chunk);
        }
    }

    fn reuse(&self, place: Place) {
        let chunk = heap::Place::from_raw(self.chunk_of(place).bits());
        if let Some((heap, chunk)) = self.heap().zip(chunk) {
            // A chunk that became empty takes blocks already, or is given back.
            let _ = heap.stop_evacuation(chunk);
        }
    }

    async fn give_back(&self) -> Result<(), NoBlock> {
        let heap = self.ready()?;
        let groups = self.shared.nodes.groups();
        for group in (0..groups).map(GroupId) {
            let node = self.shared.nodes.node_of(group);
            let freed = match groups {
                1 => heap.give_back(group).await,
                _ => heap.give_back_all(group).await,
            };
            freed.map_err(|error| self.no_block(node, error))?;
        }
        Ok(())
    }

    fn settle(&self) {
        let Some(heap) = self.heap() else { return };
        for place in self.shared.leaving.lock().drain() {
            if let Some(place) = heap::Place::from_raw(place.bits()) {
                // A chunk that became empty is no longer evacuating, or is given back.
                let _ = heap.stop_evacuation(place);
            }
        }
    }

    fn usage(&self) -> Usage {
        let Some(heap) = self.heap() else { return Usage::default() };
        let stats = heap.stats();
        Usage {
            live: stats.live_bytes(),
            limbo: stats.limbo_bytes(),
            held: stats.held_bytes(),
            chunks: (stats.held_chunks + stats.returning_chunks) as u64,
        }
    }
}
