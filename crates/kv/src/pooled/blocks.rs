//! Blocks from a heap over the pool's chunks.

use heap::{Epochs, Guard, Heap, PoolChunks};
use pool::GroupId;
use smallvec::SmallVec;
use verbs::Nic;

use super::PoolMemory;
use super::member::Member;
use crate::blocks::{Blocks, NoBlock, Usage};
use crate::layout::class;
use crate::place::{Place, UNIT};

/// Sparse chunks that one compaction empties in each group.
const SPARSE_CHUNKS: usize = 64;

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

impl<N: Nic> Member<N> {
    /// The heap of a store that is open.
    fn ready(&self) -> Result<&Heap<PoolChunks<N>>, NoBlock> {
        let unknown = "the blocks of the store are not known before the store is open";
        self.heap.get().ok_or_else(|| NoBlock::Lost(unknown.into()))
    }

    /// The error of an allocation on this memory node.
    fn no_block(&self, error: heap::Error) -> NoBlock {
        if let heap::Error::Source { source, .. } = &error {
            self.note(source);
        }
        no_block(error)
    }

    async fn tend(&self) -> Result<(), NoBlock> {
        let heap = self.ready()?;
        for group in 0..self.pool.groups() {
            heap.epochs().advance();
            heap.give_back(GroupId(group)).await.map_err(|error| self.no_block(error))?;
            match heap.refill(GroupId(group)).await.map_err(|error| self.no_block(error)) {
                // The reserve is filled when the pool has memory again.
                Ok(_) | Err(NoBlock::Full) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn evacuate(&self, share: u32) -> usize {
        let Some(heap) = self.heap.get() else { return 0 };
        let mut leaving = self.leaving.lock();
        for group in 0..self.pool.groups() {
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

    fn settle(&self) {
        let Some(heap) = self.heap.get() else { return };
        for place in self.leaving.lock().drain() {
            if let Some(place) = heap::Place::from_raw(place.bits()) {
                // A chunk that became empty is no longer evacuating, or is given back.
                let _ = heap.stop_evacuation(place);
            }
        }
    }
}

impl<N: Nic> PoolMemory<N> {
    /// The memory nodes that are not gone.
    fn alive(&self) -> impl Iterator<Item = &Member<N>> {
        self.shared.members.iter().filter(|member| !member.is_lost())
    }

    /// The memory node of a stripe, and number of the stripe there; then those that continue the
    /// stripe if the first one is full or gone.
    fn members_of(&self, stripe: u32) -> impl Iterator<Item = (&Member<N>, u32)> {
        let members = &self.shared.members;
        let (first, own) = (stripe as usize % members.len(), stripe / members.len() as u32);
        let order = members[first..].iter().chain(&members[..first]);
        order.filter(|member| !member.is_lost()).map(move |member| (member, own))
    }
}

impl<N: Nic> Blocks for PoolMemory<N> {
    type Pin<'a>
        = SmallVec<[Guard<&'a Epochs>; 1]>
    where
        Self: 'a;

    fn slab(&self) -> u32 {
        self.pool().chunk_bytes().min(class::SLAB_MAX.into()) as u32
    }

    async fn allocate(&self, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        let mut result = Err(NoBlock::Lost("all memory nodes are gone".into()));
        for (member, own) in self.members_of(stripe) {
            let block = member.ready()?.allocate(member.group(own), bytes.into()).await;
            match block.map_err(|error| member.no_block(error)) {
                Ok(block) => return Ok(Place::of(block.place.raw())),
                Err(_) if result == Err(NoBlock::Full) => {}
                Err(error) => result = Err(error),
            }
        }
        result
    }

    fn release(&self, place: Place) {
        self.retire(place);
    }

    fn retire(&self, place: Place) {
        let heap = self.member(place.node()).and_then(|member| member.heap.get());
        let Some((heap, place)) = heap.zip(heap::Place::from_raw(place.bits())) else {
            return;
        };
        // A place that is not live comes from damaged remote memory. The heap is as before.
        let _ = heap.free(place);
    }

    fn pin(&self) -> Self::Pin<'_> {
        let lane = pin_counter();
        self.heaps().map(|heap| heap.epochs().pin(lane)).collect()
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
        for member in self.alive() {
            match member.tend().await {
                // The rest of the memory nodes goes on.
                Err(_) if member.is_lost() => {}
                tended => tended?,
            }
        }
        Ok(())
    }

    fn evacuate(&self, share: u32) -> usize {
        self.alive().map(|member| member.evacuate(share)).sum()
    }

    fn is_leaving(&self, place: Place) -> bool {
        let Some(member) = self.member(place.node()) else { return false };
        let chunk = member.pool.chunk_bytes() / UNIT;
        let first = Place::new(place.node(), place.unit() / chunk * chunk);
        first.is_some_and(|first| member.leaving.lock().contains(&first))
    }

    fn settle(&self) {
        self.shared.members.iter().for_each(Member::settle);
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for heap in self.alive().filter_map(|member| member.heap.get()) {
            let stats = heap.stats();
            usage.live += stats.live_bytes();
            usage.limbo += stats.limbo_bytes();
            usage.held += stats.held_bytes();
            usage.chunks += (stats.held_chunks + stats.returning_chunks) as u64;
        }
        usage
    }
}
