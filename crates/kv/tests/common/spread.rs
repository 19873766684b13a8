//! Blocks on several memory nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv::Store;
use kv::blocks::{Blocks, NoBlock, Usage};
use kv::memory::{Arena, Client, Hand, Memory};
use kv::place::Place;

const CHUNK: u32 = 4096;
pub const NODES: u8 = 3;

/// An arena on each memory node.
#[derive(Clone)]
pub struct Spread {
    pub memory: Arc<Memory>,
    pub arenas: Vec<Arena>,
    /// Tells no loss of a memory node, although accesses fail.
    pub denies: bool,
    /// Puts the blocks of one value on all memory nodes in turn, as a full memory node does.
    pub scattered: Option<Arc<AtomicU64>>,
}

impl Spread {
    fn arena(&self, place: Place) -> &Arena {
        &self.arenas[usize::from(place.node())]
    }
}

impl Blocks for Spread {
    type Pin = Vec<<Arena as Blocks>::Pin>;

    fn slab(&self) -> u32 {
        CHUNK
    }

    async fn allocate(&self, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        self.arenas[0].allocate(stripe, bytes).await
    }

    async fn allocate_value(&self, stripe: u32, spread: u64, bytes: u32) -> Result<Place, NoBlock> {
        let spread = match &self.scattered {
            Some(turn) => turn.fetch_add(1, Ordering::Relaxed),
            None => spread,
        };
        let nodes = (0..NODES).map(|step| ((spread + u64::from(step)) % u64::from(NODES)) as u8);
        for node in nodes.filter(|node| !self.memory.is_lost(*node)) {
            if let Ok(place) = self.arenas[usize::from(node)].allocate(stripe, bytes).await {
                return Ok(place);
            }
        }
        Err(NoBlock::Full)
    }

    fn is_gone(&self, place: Place) -> bool {
        !self.denies && self.memory.is_lost(place.node())
    }

    fn gone_nodes(&self) -> u32 {
        (0..NODES).filter(|node| self.memory.is_lost(*node)).count() as u32
    }

    fn release(&self, place: Place) {
        self.arena(place).release(place);
    }

    fn retire(&self, place: Place) {
        self.arena(place).retire(place);
    }

    fn pin(&self) -> Self::Pin {
        self.arenas.iter().map(Blocks::pin).collect()
    }

    fn adopt(&self, _: &[(Place, u32, u32)]) -> Result<(), NoBlock> {
        Ok(())
    }

    async fn tend(&self) -> Result<(), NoBlock> {
        Ok(())
    }

    fn evacuate(&self, share: u32) -> usize {
        self.arenas
            .iter()
            .filter(|arena| !self.is_gone_arena(arena))
            .map(|a| a.evacuate(share))
            .sum()
    }

    fn is_leaving(&self, place: Place) -> bool {
        self.arena(place).is_leaving(place)
    }

    fn blocks_beside(&self, place: Place) -> Vec<(Place, u32)> {
        self.arena(place).blocks_beside(place)
    }

    fn vacate(&self, place: Place) {
        self.arena(place).vacate(place);
    }

    fn reuse(&self, place: Place) {
        self.arena(place).reuse(place);
    }

    async fn give_back(&self) -> Result<(), NoBlock> {
        Ok(())
    }

    fn settle(&self) {
        self.arenas.iter().for_each(Blocks::settle);
    }

    fn usage(&self) -> Usage {
        let add = |sum: Usage, arena: &Arena| {
            let usage = arena.usage();
            Usage {
                live: sum.live + usage.live,
                limbo: sum.limbo + usage.limbo,
                held: sum.held + usage.held,
                chunks: sum.chunks + usage.chunks,
            }
        };
        self.arenas.iter().fold(Usage::default(), add)
    }
}

impl Spread {
    fn is_gone_arena(&self, arena: &Arena) -> bool {
        arena.used().first().is_some_and(|place| self.is_gone(*place))
    }
}

pub type SpreadStore = Store<Arc<Client>, Spread, Arc<Hand>>;

/// Three memory nodes.
pub fn world() -> (Arc<Memory>, Spread) {
    let memory = Memory::new(CHUNK);
    let arena = |node| Arena::on(memory.clone(), node, 0, 1 << 20);
    let arenas = (0..NODES).map(arena).collect();
    (memory.clone(), Spread { memory, arenas, denies: false, scattered: None })
}
