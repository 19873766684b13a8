//! Blocks from a heap over the pool's chunks.

use std::sync::Arc;

use heap::{Epochs, Guard, Heap, PoolChunks};
use pool::GroupId;
use verbs::Nic;

use super::PoolMemory;
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
