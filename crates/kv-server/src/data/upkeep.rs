//! Work in the background: expiry, eviction, compaction, saves.

use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use kv::blocks::Blocks;
use kv::{Candidates, Eviction, Measure};
use verbs::Nic;

use super::Data;
use super::save::points;
use super::state::Alone;
use crate::keyspace::DATABASES;
use crate::server::Server;
use crate::worker::Worker;

/// Interval of the work.
const INTERVAL: Duration = Duration::from_millis(100);
/// Interval in which a server without commands finds out whether the memory node answers.
const LOOK: Duration = Duration::from_secs(1);
/// Expired keys that are deleted before other tasks run.
const SWEEP: usize = 256;
/// Sweeps of one interval.
const SWEEPS: usize = 64;
/// Keys that are evicted before other tasks run.
const EVICTIONS: u64 = 16;
/// Attempts of a command to find room in a full pool.
const ATTEMPTS: u32 = 64;
/// Attempts of a command that evict single keys, for the room of a value of the same length.
const SINGLE: u32 = 3;
/// Attempts of a command to find room, if no key may be evicted.
const ATTEMPTS_WITHOUT_EVICTION: u32 = 16;
/// Interval of the compaction, if there is nothing to move.
const COMPACTION: Duration = Duration::from_secs(1);
/// In a full pool blocks move together if the unused part of the chunks is more than this, in
/// percent of the used part.
const FULL_PERCENT: u64 = 25;
/// A chunk is emptied if less than this part of it, in percent, is live.
const SPARSE_PERCENT: u32 = 80;

/// How keys are chosen for eviction (`maxmemory-policy`).
fn policy(server: &Server) -> Option<(Candidates, Eviction)> {
    let text = server.config.get("maxmemory-policy");
    let (candidates, rule) = text.split_once('-')?;
    let candidates = match candidates {
        "volatile" => Candidates::Volatile,
        _ => Candidates::All,
    };
    let eviction = match rule {
        "random" => Eviction::Random,
        "ttl" => Eviction::SoonestExpiry,
        _ => Eviction::LeastUsed,
    };
    Some((candidates, eviction))
}

/// The attempts of a command to find room in a full pool.
#[derive(Debug)]
pub(super) struct Attempts {
    number: u32,
    /// Bytes of the command.
    bytes: u64,
    /// Slabs that the next eviction empties.
    slabs: u64,
}

impl Attempts {
    /// The attempts of a command of `bytes` bytes.
    pub fn new(bytes: u64) -> Self {
        Self { number: 0, bytes, slabs: 0 }
    }
}

/// The bytes of chunks that no block uses.
fn unused(usage: &kv::blocks::Usage) -> u64 {
    usage.held.saturating_sub(usage.live + usage.limbo)
}

impl<N: Nic> Data<N> {
    /// Applies changed parameters.
    pub(crate) fn apply(&self, server: &Server) {
        let counts = server.config.get("maxmemory-policy").ends_with("lfu");
        self.store.measure(if counts { Measure::Frequency } else { Measure::Recency });
        self.store.resize_cache(server.config.live.cache());
        let limit = server.config.live.pool_timeout();
        self.memory.set_answer_timeout(limit).expect("`pool-timeout` is 1 s to one hour");
    }

    /// Evicts keys until the memory in use is below `maxmemory`: at most as many keys as there are.
    pub(crate) async fn make_room(&self, worker: &Worker) -> bool {
        let limit = worker.server.config.live.max_memory();
        // Limbo becomes free by itself, so it evicts nothing.
        let is_over = || self.store.blocks().usage().live > limit;
        if is_over() {
            self.evict_while(worker, self.keys(), is_over).await;
        }
        !is_over()
    }

    fn keys(&self) -> u64 {
        (0..DATABASES).map(|db| self.store.len(db as u8)).sum()
    }

    /// Evicts at most `most` keys while `is_wanted`. Other tasks run in between. Returns the number
    /// of keys evicted.
    async fn evict_while(&self, worker: &Worker, most: u64, is_wanted: impl Fn() -> bool) -> u64 {
        let mut evicted = 0;
        while evicted < most && is_wanted() && self.evict(worker).await {
            evicted += 1;
            if evicted % EVICTIONS == 0 {
                worker.yield_now().await;
            }
        }
        evicted
    }

    async fn evict(&self, worker: &Worker) -> bool {
        let Some((candidates, eviction)) = policy(&worker.server) else { return false };
        let server = &worker.server;
        let mut tell = |db: u8, key: &[u8]| {
            server.notify(b'e', "evicted", self.state.logical(db), key);
        };
        let is_told = server.config.live.notify() != 0;
        let tell: Option<kv::Tell<'_>> = if is_told { Some(&mut tell) } else { None };
        let result = self.store.evict_and_tell(candidates, eviction, tell).await;
        let is_evicted = result.unwrap_or_else(|error| {
            tracing::error!(%error, "evicting a key failed");
            false
        });
        worker.stats().evicted.add(is_evicted.into());
        is_evicted
    }

    /// Makes room in a full pool: moves blocks together, gives free blocks back, or evicts keys.
    /// Returns whether another attempt to allocate may succeed: the attempts of a command have an
    /// end. Other tasks run in between.
    ///
    /// Without the moves, values of new lengths would evict nearly all keys: a slab has blocks of
    /// one length, and is empty only when its last block is freed.
    pub(super) async fn free_something(&self, worker: &Worker, attempts: &mut Attempts) -> bool {
        let may_evict = policy(&worker.server).is_some();
        let most = if may_evict { ATTEMPTS } else { ATTEMPTS_WITHOUT_EVICTION };
        if attempts.number == most {
            return false;
        }
        attempts.number += 1;
        worker.yield_now().await;
        if self.unused_percent() > FULL_PERCENT && self.compact_alone(worker).await {
            self.free_retired(worker).await;
            return true;
        }
        if self.evict_slabs(worker, attempts).await {
            self.free_retired(worker).await;
            return true;
        }
        let limbo = self.store.blocks().usage().limbo;
        let keys = 1 << attempts.number.min(16) >> 1;
        let evicted = self.evict_while(worker, keys, || true).await;
        let is_tended = self.store.blocks().tend().await.is_ok();
        evicted > 0 || is_tended && self.store.blocks().usage().limbo < limbo
    }

    /// Returns whether CLIENT PAUSE keeps expired keys.
    pub(super) fn keeps_expired(&self, worker: &Worker) -> bool {
        worker.server.pause.is_active(worker.now_ms())
    }

    /// Counts and tells that an expired key is there no more.
    pub(super) fn note_expired(&self, worker: &Worker, db: u8, key: &[u8]) {
        worker.stats().expired.add(1);
        worker.server.notify(b'x', "expired", self.state.logical(db), key);
    }

    /// Frees the blocks that were retired: two epochs pass before.
    async fn free_retired(&self, worker: &Worker) {
        for _ in 0..3 {
            let _ = self.store.blocks().give_back().await;
            worker.yield_now().await;
        }
    }

    /// Evicts all keys of as many slabs as the command has bytes, and twice as many with each
    /// further attempt: a command may need more than its own bytes. Returns whether a slab is
    /// empty.
    async fn evict_slabs(&self, worker: &Worker, attempts: &mut Attempts) -> bool {
        let Some((candidates, eviction)) = policy(&worker.server) else { return false };
        let slab = u64::from(self.store.blocks().slab());
        // A place of the same length is free sooner.
        if attempts.number <= SINGLE && attempts.bytes < slab / 2 {
            return false;
        }
        // The list of a value in pieces has a class of its own.
        let least = attempts.bytes.div_ceil(slab) + u64::from(attempts.bytes > slab);
        attempts.slabs = (2 * attempts.slabs).max(least);
        let server = &worker.server;
        let mut tell = |db: u8, key: &[u8]| {
            server.notify(b'e', "evicted", self.state.logical(db), key);
        };
        let is_told = server.config.live.notify() != 0;
        let tell: Option<kv::Tell<'_>> = if is_told { Some(&mut tell) } else { None };
        let cleared = self.store.evict_slabs(attempts.slabs, candidates, eviction, tell).await;
        let cleared = cleared.unwrap_or_else(|error| {
            tracing::error!(%error, "evicting keys failed");
            kv::Cleared::default()
        });
        worker.stats().evicted.add(cleared.keys);
        cleared.slabs > 0
    }

    /// Deletes a key that a command has found expired.
    pub(super) async fn drop_expired(
        &self,
        worker: &Worker,
        db: u8,
        key: &[u8],
        is_missing: bool,
    ) -> Result<(), kv::Error> {
        let now_ms = worker.now_ms();
        let is_due = || self.store.next_expiry().is_some_and(|next| next <= now_ms);
        if !is_missing || !is_due() || self.keeps_expired(worker) {
            return Ok(());
        }
        if self.delete_expired(db, key).await? {
            self.note_expired(worker, db, key);
        }
        Ok(())
    }

    /// Deletes a key if it has expired. Returns whether it has.
    pub(super) async fn delete_expired(&self, db: u8, key: &[u8]) -> Result<bool, kv::Error> {
        let change = |expiry: Option<u64>| match expiry {
            // The store deletes an expired key that is to be deleted, and tells of none.
            None => kv::Update::Delete,
            Some(_) => kv::Update::Keep,
        };
        self.store.alter(db, key, change).await
    }

    /// Deletes expired keys.
    pub(super) async fn sweep(&self, worker: &Worker) -> Result<(), kv::Error> {
        if self.keeps_expired(worker) {
            return Ok(());
        }
        for _ in 0..SWEEPS {
            let server = &worker.server;
            let is_told = server.config.live.notify() != 0;
            let mut tell = |db: u8, key: &[u8]| {
                server.notify(b'x', "expired", self.state.logical(db), key);
            };
            let tell: Option<kv::Tell<'_>> = if is_told { Some(&mut tell) } else { None };
            let deleted = self.store.sweep_and_tell(SWEEP, tell).await?;
            worker.stats().expired.add(deleted as u64);
            if deleted == 0 {
                break;
            }
            worker.yield_now().await;
        }
        Ok(())
    }

    /// The bytes of chunks that no block uses, in percent of those that blocks use.
    fn unused_percent(&self) -> u64 {
        let usage = self.store.blocks().usage();
        unused(&usage).saturating_mul(100) / usage.live.max(1)
    }

    /// Moves blocks together, or waits a little for the task that does so. Returns whether blocks
    /// move.
    async fn compact_alone(&self, worker: &Worker) -> bool {
        let Some(_alone) = Alone::new(&self.state.is_compacting) else {
            worker.wait(Duration::from_millis(1)).await;
            return true;
        };
        let moved = self.store.compact(SPARSE_PERCENT).await;
        moved.unwrap_or_else(|error| {
            tracing::warn!(%error, "moving blocks together failed");
            0
        }) > 0
    }

    /// Moves blocks together if chunks hold much more than the blocks need (`activedefrag`).
    /// Returns the pause until the next call: while blocks move, the calls take at most
    /// `active-defrag-cycle-max` percent of the time.
    async fn compact(&self, worker: &Worker) -> Result<Duration, kv::Error> {
        let server = &worker.server;
        if !server.config.is("activedefrag", "yes") {
            return Ok(COMPACTION);
        }
        let is_worth = unused(&self.store.blocks().usage())
            > server.config.number("active-defrag-ignore-bytes")
            && self.unused_percent() > server.config.number("active-defrag-threshold-lower");
        let start = worker.elapsed_ns();
        if !is_worth || !self.compact_alone(worker).await {
            return Ok(COMPACTION);
        }
        let took = Duration::from_nanos(worker.elapsed_ns() - start);
        let most = server.config.number("active-defrag-cycle-max").clamp(1, 99) as u32;
        Ok(took * (100 - most) / most)
    }

    /// Works until the server ends. Each thread calls this function; the first one does the work.
    pub(crate) async fn maintain(&self, worker: &Worker) {
        let (mut compaction_ns, mut look_ns) = (0, 0);
        while !worker.server.is_ending() && !self.has_failed() {
            self.pause(worker).await;
            if worker.index != 0 || worker.server.is_loading() {
                continue;
            }
            if worker.elapsed_ns() >= look_ns {
                look_ns = worker.elapsed_ns() + LOOK.as_nanos() as u64;
                if let Err(error) = self.store.check_owner().await {
                    tracing::warn!(%error, "looking at the store failed");
                }
            }
            if let Err(error) = self.work(worker, &mut compaction_ns).await {
                tracing::warn!(%error, "work in the background failed");
            }
            self.save_if_due(worker).await;
        }
    }

    /// Deletes the keys whose values were on a memory node that is gone.
    async fn forget_gone(&self) -> Result<(), kv::Error> {
        let keys = self.store.forget_gone().await?;
        if keys > 0 {
            self.state.changes.fetch_add(keys, Ordering::Relaxed);
            tracing::error!(
                keys,
                nodes = self.store.blocks().gone_nodes(),
                "keys are lost: a memory node with their values is gone; the server goes on \
                 without it"
            );
        }
        Ok(())
    }

    /// The work of one interval. `compaction_ns` is the time of the next compaction.
    async fn work(&self, worker: &Worker, compaction_ns: &mut u64) -> Result<(), kv::Error> {
        self.forget_gone().await?;
        if worker.server.expires_actively() {
            self.sweep(worker).await?;
        }
        // Commands make room too, but CONFIG SET may be the last command.
        if worker.server.config.live.max_memory() > 0 {
            self.make_room(worker).await;
        }
        if worker.elapsed_ns() >= *compaction_ns {
            let pause = self.compact(worker).await?;
            *compaction_ns = worker.elapsed_ns() + pause.as_nanos() as u64;
        }
        self.store.blocks().tend().await.map_err(kv::Error::from)
    }

    async fn save_if_due(&self, worker: &Worker) {
        let saves = &self.state.saves;
        if !saves.is_running() && self.is_save_due(worker) {
            let _alone = self.state.barrier.close().await;
            saves.is_asked.store(false, Ordering::Relaxed);
            if self.begin_save(worker.now_ms()) {
                self.state.is_save_begun.store(true, Ordering::Release);
            }
        }
        if self.state.is_save_begun.swap(false, Ordering::AcqRel) {
            // The log has the error. SAVE and SHUTDOWN reply with theirs.
            if self.save(worker).await.is_err() {
                saves.has_failed.store(true, Ordering::Relaxed);
            }
        }
    }

    fn is_save_due(&self, worker: &Worker) -> bool {
        let (now_s, changes) = (worker.now_ms() / 1000, self.state.changes.load(Ordering::Relaxed));
        self.state.saves.are_due(&points(&worker.server), changes, now_s)
    }

    /// Has the first thread carry out a save that has begun.
    pub(super) fn start_save(&self) {
        self.state.is_save_begun.store(true, Ordering::Release);
        if let Some(waker) = self.state.bell.lock().take() {
            waker.wake();
        }
    }

    /// Waits for the interval, or for a save.
    async fn pause(&self, worker: &Worker) {
        let due = worker.elapsed_ns() + INTERVAL.as_nanos() as u64;
        let mut is_added = false;
        let _rest = worker.rest();
        poll_fn(|cx| {
            let is_begun = || worker.index == 0 && self.state.is_save_begun.load(Ordering::Acquire);
            if worker.elapsed_ns() >= due || worker.server.is_ending() || is_begun() {
                return Poll::Ready(());
            }
            if !is_added {
                worker.timers.add(due, cx.waker().clone());
                is_added = true;
            }
            if worker.index == 0 {
                *self.state.bell.lock() = Some(cx.waker().clone());
            }
            if is_begun() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// True if the data is to be saved before the end.
    pub(super) fn saves_at_end(&self, worker: &Worker, save: Option<bool>) -> bool {
        let is_wanted = save.unwrap_or_else(|| !points(&worker.server).is_empty());
        is_wanted && !worker.server.is_loading()
    }

    /// Saves before the end if `save` is true, or else if the configuration has save points.
    pub(crate) async fn finish(&self, worker: &Worker, save: Option<bool>) -> Result<(), String> {
        if !self.saves_at_end(worker, save) {
            return Ok(());
        }
        while self.state.saves.is_running() {
            worker.wait(Duration::from_millis(10)).await;
            if self.has_failed() {
                return Err("saving: a memory node does not answer".to_owned());
            }
        }
        let _alone = self.state.barrier.close().await;
        match self.begin_save(worker.now_ms()) {
            true => self.save(worker).await,
            false => Err("saving: another save is in progress; try again".to_owned()),
        }
    }
}
