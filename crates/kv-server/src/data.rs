//! A store of crate `kv` over a pool, behind the server, and the commands on data.
//!
//! | module | content |
//! | --- | --- |
//! | `call` | the execution of a command on keys that are locked |
//! | `strings`, `numbers`, `bits`, `bitfield`, `lcs`, `keys`, `expiry` | the commands |
//! | `plan` | which code executes a command, and which keys it has |
//! | `run` | one command with its keys, as one operation of the store |
//! | `exec` | EXEC as one call of the store, WATCH |
//! | `whole`, `debug` | commands on whole databases |
//! | `barrier`, `state` | what all threads share |
//! | `reopen` | the data after a memory node did not answer |
//! | `save`, `save_file`, `upkeep` | files; work in the background |

mod barrier;
mod bitfield;
mod bits;
mod call;
mod debug;
mod exec;
mod expiry;
mod keys;
mod lcs;
mod numbers;
mod plan;
mod reopen;
mod run;
mod save;
mod save_file;
mod state;
mod strings;
mod upkeep;
mod whole;

use std::time::Duration;

use kv::environment::System;
use kv::pooled::PoolMemory;
use kv::{Ahead, Settings};
use pool::{DefaultNic, Pool};
use redis_formats::command::Command;
use verbs::Nic;

use crate::context::Context;
use crate::error::Error;
use crate::keyspace::{Fact, Keyspace, Outages, Size, Usage};
use crate::server::Server;
use crate::session::Queue;
use crate::worker::Worker;

pub use self::exec::Watched;
pub use self::reopen::Reopened;
use self::state::State;

/// The store that commands on data use.
pub type Store<N = DefaultNic> = kv::Store<PoolMemory<N>, PoolMemory<N>, System>;

/// A store over a pool, behind the server.
pub struct Data<N: Nic = DefaultNic> {
    /// The store.
    pub store: Store<N>,
    memory: PoolMemory<N>,
    state: State,
}

impl<N: Nic> Data<N> {
    /// Creates an empty store in `pool`.
    ///
    /// # Errors
    ///
    /// The scheme of the pool has no chunks below a block, or the pool is full.
    pub fn create(pool: Pool<N>, heap: heap::Settings, settings: Settings) -> Result<Self, Error> {
        Self::create_over(vec![pool], heap, settings)
    }

    /// Creates an empty store in several pools, each of one memory node: the index in the first
    /// one, values in all of them.
    ///
    /// # Errors
    ///
    /// As for [`Data::create`], and if the chunks of the pools differ in length.
    pub fn create_over(
        pools: Vec<Pool<N>>,
        heap: heap::Settings,
        settings: Settings,
    ) -> Result<Self, Error> {
        if pools.iter().any(|pool| pool.first_chunk().is_none()) {
            return Err(Error::Scheme);
        }
        let memory = PoolMemory::over(pools, heap)?;
        let store = Store::create_blocking(memory.clone(), memory.clone(), System, settings)?;
        Ok(Self { store, memory, state: State::default() })
    }

    /// Bytes of all chunks of the pools.
    fn capacity(&self) -> u64 {
        let bytes = |pool: &Pool<N>| match &pool.welcome().offer {
            // A memory node that does not tell the number of its chunks.
            offer if offer.chunks == 0 => u64::MAX,
            offer => offer.chunks.saturating_mul(offer.chunk_bytes),
        };
        self.memory.pools().map(bytes).fold(0, u64::saturating_add)
    }

    /// True if an operation had no answer of a memory node: the store is to be opened again.
    pub(crate) fn has_failed(&self) -> bool {
        self.memory.has_failed() || self.store.is_interrupted()
    }

    /// The pool of the first memory node.
    pub fn pool(&self) -> &Pool<N> {
        self.memory.pool()
    }
}

impl<N: Nic> Keyspace for Data<N> {
    type Watches = Vec<Watched>;

    async fn execute(context: &mut Context<'_, Self>) {
        run::execute(context).await;
    }

    async fn execute_queue(context: &mut Context<'_, Self>, queue: &Queue) {
        exec::execute_queue(context, queue).await;
    }

    async fn read_ahead<'k>(
        &self,
        worker: &Worker,
        db: u8,
        keys: impl Iterator<Item = &'k [u8]>,
        ahead: &mut Ahead,
    ) {
        let _shared = self.state.barrier.enter(worker.index).await;
        self.store.read_ahead(self.state.physical(db), keys, ahead).await;
    }

    fn unwatch(&self, watches: &mut Vec<Watched>) {
        watches.clear();
    }

    async fn make_room(&self, worker: &Worker, _: &Command) -> bool {
        self.make_room(worker).await
    }

    async fn load(&self, worker: &Worker) -> Result<(), String> {
        self.load_file(worker).await
    }

    async fn maintain(&self, worker: &Worker) {
        self.maintain(worker).await;
    }

    async fn finish(&self, worker: &Worker, save: Option<bool>) -> Result<(), String> {
        self.finish(worker, save).await
    }

    fn poll(&self) -> usize {
        self.memory.poll()
    }

    fn park(&self, limit: Duration) {
        self.memory.park(limit);
    }

    fn size(&self, db: u8) -> Size {
        let db = self.state.physical(db);
        let (keys, volatile) = (self.store.len(db), self.store.volatile(db));
        Size { keys, volatile, ..Size::default() }
    }

    fn usage(&self) -> Usage {
        let stats = self.store.stats();
        Usage {
            used: stats.usage.live + stats.usage.limbo,
            payload: stats.usage.live.saturating_sub(stats.index_bytes),
            index: stats.index_bytes,
            limbo: stats.usage.limbo,
            held: stats.usage.held,
            local: stats.mirror_bytes,
            cache: stats.cache,
        }
    }

    fn persistence(&self) -> Vec<Fact> {
        self.facts_of_saves()
    }

    fn is_save_broken(&self) -> bool {
        self.state.is_save_broken()
    }

    fn facts(&self) -> Vec<Fact> {
        let (stats, pool) = (self.store.stats(), self.memory.pool());
        let fact = |name, value: u64| Fact { name, value: value.to_string() };
        vec![
            fact("pool_nodes", self.memory.pools().count() as u64),
            fact("pool_nodes_gone", stats.gone_nodes.into()),
            Fact { name: "pool_scheme", value: pool.scheme().to_string() },
            fact("pool_chunk_bytes", pool.chunk_bytes()),
            fact("pool_chunks_held", stats.usage.chunks),
            fact("pool_bytes_held", stats.usage.held),
            fact("pool_groups", pool.groups().into()),
            fact("store_live_bytes", stats.usage.live),
            fact("store_limbo_bytes", stats.usage.limbo),
            fact("store_index_bytes", stats.index_bytes),
            fact("store_subtables", stats.tables),
            fact("store_subtables_mirrored", stats.mirrored),
            fact("store_blocks_moved", stats.moved),
            fact("store_keys_gone", stats.gone),
            fact("store_generation", self.store.generation()),
            fact("cache_limit_bytes", stats.cache.limit),
            fact("cache_bytes", stats.cache.bytes),
            fact("cache_values", stats.cache.values),
            fact("cache_hits", stats.cache.hits),
            fact("cache_misses", stats.cache.misses),
        ]
    }

    /// [`Reopened`] knows the outages.
    fn outages(&self) -> Outages {
        Outages::default()
    }

    fn configured(&self, server: &Server) {
        self.apply(server);
    }
}
