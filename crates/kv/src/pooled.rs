//! Stores over a pool: remote memory and blocks of a memory node.
//!
//! [`PoolMemory`] is both ways into a pool that a store needs: [`Reach`] executes verbs on the
//! grants that have the addresses, and [`Blocks`] allocates from a heap over the pool's chunks.

use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use heap::{Epochs, Guard, Heap, PoolChunks};
use parking_lot::Mutex;
use pool::{Grant, GroupId, Lane, Pool};
use smallvec::SmallVec;
use verbs::{Nic, Status};

use crate::blocks::{Blocks, NoBlock, Usage};
use crate::layout::class;
use crate::place::{Address, Place, UNIT};
use crate::reach::{Range, Reach, Step, Stopped};

/// Steps of one list: as many as [`Pool::run`] takes without an allocation.
const LIST: usize = 16;
/// Steps of an operation on one key, for which memory is on the stack.
const FEW: usize = 4;
/// Bytes of one list. Longer READs and WRITEs are divided.
const LIST_BYTES: usize = 128 << 10;
/// Lists in flight at once for one round trip.
const LISTS: usize = 3;

/// Sparse chunks that one compaction empties in each group.
const SPARSE_CHUNKS: usize = 64;

/// The memory of a pool, as a store uses it. Clones share the heap.
pub struct PoolMemory<N: Nic = pool::DefaultNic> {
    shared: Arc<Shared<N>>,
}

struct Shared<N: Nic> {
    pool: Pool<N>,
    node: u8,
    heap: OnceLock<Heap<PoolChunks<N>>>,
    chunks: PoolChunks<N>,
    settings: heap::Settings,
    /// Chunks of a predecessor, until the heap has taken them over.
    inherited: Mutex<Vec<Grant>>,
    first_chunk_addr: u64,
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

    /// The memory of `pool`, for a store whose owner has ended. `chunks`: all chunks of the
    /// predecessor. [`Store::open`](crate::Store::open) finds the blocks in them.
    pub fn inheriting(
        pool: Pool<N>,
        node: u8,
        settings: heap::Settings,
        chunks: Vec<Grant>,
    ) -> Result<Self, heap::Error> {
        // A scheme without a first chunk has no access at any offset, and is refused here.
        let first_chunk_addr = pool.first_chunk().unwrap_or_default();
        let source = PoolChunks::new(pool.clone(), node, first_chunk_addr)
            .map_err(|source| heap::Error::Source { attempt: "using a pool", source })?;
        let shared = Shared {
            pool,
            node,
            heap: OnceLock::new(),
            chunks: source,
            settings,
            inherited: Mutex::new(chunks),
            first_chunk_addr,
            leaving: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The heap. `None`: the blocks of the predecessor are not known yet.
    pub fn heap(&self) -> Option<&Heap<PoolChunks<N>>> {
        self.shared.heap.get()
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<N> {
        &self.shared.pool
    }

    fn adopt_all(&self, used: Vec<heap::Block>) -> Result<(), heap::Error> {
        let chunks = self.shared.inherited.lock().clone();
        let source = self.shared.chunks.clone();
        let heap = Heap::rebuild(source, self.shared.settings, chunks, used)?;
        let _ = self.shared.heap.set(heap);
        self.shared.inherited.lock().clear();
        Ok(())
    }

    /// The grant that has `at`, and the offset of `at` in it.
    fn locate(&self, at: Address) -> Option<(Grant, u64)> {
        let rest = at.offset % UNIT;
        let place = heap::Place::new(at.node, at.offset - rest)?;
        if let Some((grant, offset)) = self.heap().and_then(|heap| heap.locate(place)) {
            return Some((grant, offset + rest));
        }
        let address = self.shared.first_chunk_addr.checked_add(at.offset)?;
        let inherited = self.shared.inherited.lock();
        let grant = inherited.iter().find(|grant| {
            at.node == self.shared.node && (grant.addr..grant.addr + grant.len).contains(&address)
        })?;
        Some((*grant, address - grant.addr))
    }

    fn group(&self, stripe: u32) -> GroupId {
        GroupId((stripe % u32::from(self.shared.pool.groups().max(1))) as u16)
    }

    /// Executes steps of one list in place: a list of [`Part`] would copy them.
    async fn run_few(
        &self,
        steps: &mut [Step<'_>],
        grants: &[(Grant, u64)],
    ) -> Result<(), Stopped> {
        let posted = steps.iter_mut().zip(grants);
        let mut posted: SmallVec<[pool::Step<'_, N>; FEW]> =
            posted.map(|(step, (grant, offset))| to_pool(step, grant, *offset)).collect();
        self.shared.pool.run(Lane(0), &mut posted).await.map_err(stopped)
    }

    async fn run_list(&self, part: &mut Part<'_>) -> Result<(), Stopped> {
        let mut steps: SmallVec<[pool::Step<'_, N>; LIST]> = SmallVec::new();
        for (verb, grant, offset) in part.iter_mut() {
            steps.push(to_pool(verb, grant, *offset));
        }
        self.shared.pool.run(Lane(0), &mut steps).await.map_err(stopped)
    }
}

/// A step in the pool's words.
fn to_pool<'a, N: Nic>(step: &'a mut Step<'_>, grant: &'a Grant, offset: u64) -> pool::Step<'a, N> {
    match step {
        Step::Read { into, .. } => pool::Step::Read { grant, offset, into },
        Step::Write { from, .. } => pool::Step::Write { grant, offset, from },
        Step::Cas { expected, new, old, .. } => {
            let (expected, new) = (*expected, *new);
            pool::Step::CompareAndSwap { grant, offset, expected, new, old }
        }
        Step::Add { amount, old, .. } => {
            pool::Step::FetchAndAdd { grant, offset, add: *amount, old }
        }
    }
}

/// True if one list can have all steps, undivided.
fn is_one_list(steps: &[Step<'_>], grants: &[(Grant, u64)]) -> bool {
    let bytes = |step: &Step<'_>| match step {
        Step::Read { into, .. } => into.len(),
        Step::Write { from, .. } => from.len(),
        Step::Cas { .. } | Step::Add { .. } => 8,
    };
    let qp = |(grant, _): &(Grant, u64)| (grant.group, grant.function);
    steps.len() <= LIST
        && steps.iter().map(bytes).sum::<usize>() <= LIST_BYTES
        && grants.windows(2).all(|pair| qp(&pair[0]) == qp(&pair[1]))
}

/// Verbs of one list, with the grants and the offsets in them.
type Part<'a> = SmallVec<[(Step<'a>, Grant, u64); LIST]>;

fn stopped(error: pool::Error) -> Stopped {
    let text = error.to_string();
    match error {
        pool::Error::List { status: Status::RemoteAccess, .. }
        | pool::Error::Access { status: Status::RemoteAccess, .. }
        | pool::Error::Stale { .. }
        | pool::Error::NotYours { .. } => Stopped::Refused(text),
        _ => Stopped::Lost(text),
    }
}

/// Appends `step`, in parts of at most [`LIST_BYTES`], with the grants from `locate`.
fn divide<'a>(
    step: &'a mut Step<'_>,
    lists: &mut SmallVec<[(Part<'a>, usize); 1]>,
    locate: impl Fn(Address) -> Result<(Grant, u64), Stopped>,
) -> Result<(), Stopped> {
    let (grant, offset) = locate(step.at())?;
    let at = step.at();
    let mut add = |step: Step<'a>, bytes: usize, done: u64| {
        let is_full = |(part, total): &(Part<'_>, usize)| {
            let first = &part[0].1;
            part.len() == LIST
                || total + bytes > LIST_BYTES
                || (first.group, first.function) != (grant.group, grant.function)
        };
        if lists.last().is_none_or(is_full) {
            lists.push((Part::new(), 0));
        }
        if let Some((part, total)) = lists.last_mut() {
            part.push((step, grant, offset + done));
            *total += bytes;
        }
    };
    match step {
        Step::Read { into, .. } => {
            let mut done = 0;
            for into in into.chunks_mut(LIST_BYTES) {
                let bytes = into.len();
                add(Step::Read { at: at.plus(done), into }, bytes, done);
                done += bytes as u64;
            }
        }
        Step::Write { from, .. } => {
            let mut done = 0;
            for from in from.chunks(LIST_BYTES) {
                add(Step::Write { at: at.plus(done), from }, from.len(), done);
                done += from.len() as u64;
            }
        }
        Step::Cas { expected, new, old, .. } => {
            add(Step::Cas { at, expected: *expected, new: *new, old }, 8, 0);
        }
        Step::Add { amount, old, .. } => add(Step::Add { at, amount: *amount, old }, 8, 0),
    }
    Ok(())
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
        let mut grants: SmallVec<[(Grant, u64); FEW]> = SmallVec::new();
        for step in steps.iter() {
            grants.push(locate(step.at())?);
        }
        if is_one_list(steps, &grants) {
            return self.run_few(steps, &grants).await;
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
            (Some((a, _)), Some((b, _))) => (a.group, a.function) == (b.group, b.function),
            _ => false,
        }
    }
}

/// Runs futures at the same time. Polls them in order, so that they post in order.
async fn join<F>(futures: impl Iterator<Item = F>) -> Result<(), Stopped>
where
    F: Future<Output = Result<(), Stopped>>,
{
    let mut open: Vec<Option<Pin<Box<F>>>> = futures.map(|future| Some(Box::pin(future))).collect();
    let mut result = Ok(());
    poll_fn(|cx| {
        for future in &mut open {
            if let Some(Poll::Ready(ended)) = future.as_mut().map(|one| one.as_mut().poll(cx)) {
                *future = None;
                if result.is_ok() {
                    result = ended;
                }
            }
        }
        if open.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
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
    fn ready(&self) -> Result<&Heap<PoolChunks<N>>, NoBlock> {
        let unknown = "the blocks of the store are not known before the store is open";
        self.heap().ok_or_else(|| NoBlock::Lost(unknown.into()))
    }
}

impl<N: Nic> Blocks for PoolMemory<N> {
    type Pin = Option<Guard<Arc<Epochs>>>;

    fn slab(&self) -> u32 {
        self.shared.pool.chunk_bytes().min(class::SLAB_MAX.into()) as u32
    }

    async fn allocate(&self, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        let block = self.ready()?.allocate(self.group(stripe), bytes.into()).await;
        Ok(Place::of(block.map_err(no_block)?.place.raw()))
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
        for group in 0..self.shared.pool.groups() {
            heap.epochs().advance();
            heap.give_back(GroupId(group)).await.map_err(no_block)?;
            match heap.refill(GroupId(group)).await.map_err(no_block) {
                // The reserve is filled when the pool has memory again.
                Ok(_) | Err(NoBlock::Full) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn evacuate(&self, share: u32) -> usize {
        let Some(heap) = self.heap() else { return 0 };
        let mut leaving = self.shared.leaving.lock();
        for group in 0..self.shared.pool.groups() {
            let most = f64::from(share) / 100.0;
            let sparse = heap.sparse(GroupId(group), most, SPARSE_CHUNKS).unwrap_or_default();
            // One sparse chunk of a group has no other to move its blocks to.
            for chunk in sparse.iter().filter(|_| sparse.len() > 1) {
                if heap.evacuate(chunk.place).is_ok() {
                    leaving.insert(Place::of(chunk.place.raw()));
                }
            }
        }
        leaving.len()
    }

    fn is_leaving(&self, place: Place) -> bool {
        let chunk = self.shared.pool.chunk_bytes() / UNIT;
        let first = Place::new(place.node(), place.unit() / chunk * chunk);
        first.is_some_and(|first| self.shared.leaving.lock().contains(&first))
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
