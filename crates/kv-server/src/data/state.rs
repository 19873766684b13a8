//! State of the commands on data that all threads share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::Waker;

use parking_lot::Mutex;
use verbs::Nic;

use super::Store;
use super::barrier::Barrier;
use crate::keyspace::DATABASES;

/// After a failed save, seconds until the next attempt.
const RETRY_S: u64 = 5;

/// A key as a save must write it: value and expiry, or nothing.
type Image = Option<(Vec<u8>, u64)>;

/// Where a save is, and what changed behind it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The position in each database from which on keys are not saved yet. `None`: all are.
    pub next: [Option<u64>; DATABASES],
    /// Keys that changed before they were saved, as they were at the begin of the save.
    pub images: BTreeMap<(u8, u64, Vec<u8>), Image>,
}

/// State of saves.
#[derive(Debug, Default)]
pub(super) struct Saves {
    is_running: AtomicBool,
    pub is_asked: AtomicBool,
    /// Set by a flush: the save cannot be finished.
    pub is_aborted: AtomicBool,
    pub progress: Mutex<Progress>,
    /// Begin of the running save, in milliseconds since 1970.
    pub since_ms: AtomicU64,
    /// End of the last save without an error, in seconds since 1970.
    pub last_s: AtomicU64,
    /// Begin of the last attempt, in seconds since 1970.
    pub tried_s: AtomicU64,
    pub seconds: AtomicU64,
    pub has_failed: AtomicBool,
    pub count: AtomicU64,
    /// Keys of the file that was loaded.
    pub loaded: AtomicU64,
    pub loaded_expired: AtomicU64,
    /// Keys that `rdb-skip-unknown` left out.
    pub loaded_without: AtomicU64,
}

impl Saves {
    /// Begins a save, unless one runs.
    pub fn begin(&self) -> bool {
        let begins = !self.is_running.swap(true, Ordering::SeqCst);
        if begins {
            self.is_aborted.store(false, Ordering::Relaxed);
        }
        begins
    }

    pub fn end(&self) {
        *self.progress.lock() = Progress::default();
        self.is_running.store(false, Ordering::SeqCst);
    }

    pub fn is_running(&self) -> bool {
        self.is_running.load(Ordering::SeqCst)
    }

    /// True if BGSAVE SCHEDULE has asked for a save, or if one of `points` is reached: pairs of
    /// seconds since the last save and changes. After a failure 5 s pass before the next attempt.
    pub fn are_due(&self, points: &[(u64, u64)], changes: u64, now_s: u64) -> bool {
        if self.is_asked.load(Ordering::Relaxed) {
            return true;
        }
        let since = |time: &AtomicU64| now_s.saturating_sub(time.load(Ordering::Relaxed));
        let may = since(&self.tried_s) > RETRY_S || !self.has_failed.load(Ordering::Relaxed);
        may && points.iter().any(|(s, least)| since(&self.last_s) > *s && changes >= *least)
    }
}

/// State of the commands on data.
#[derive(Debug)]
pub(crate) struct State {
    pub(super) barrier: Barrier,
    /// The database of the store for each database of clients. SWAPDB exchanges two.
    databases: [AtomicU8; DATABASES],
    pub(super) swaps: AtomicU64,
    /// Changes since the last save.
    pub(super) changes: AtomicU64,
    pub(super) saves: Saves,
    /// A save has begun, and the first thread is to carry it out.
    pub(super) is_save_begun: AtomicBool,
    /// Wakes the work in the background.
    pub(super) bell: Mutex<Option<Waker>>,
    /// A task moves blocks together.
    pub(super) is_compacting: AtomicBool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            barrier: Barrier::default(),
            databases: std::array::from_fn(|db| AtomicU8::new(db as u8)),
            swaps: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            saves: Saves::default(),
            is_save_begun: AtomicBool::new(false),
            bell: Mutex::default(),
            is_compacting: AtomicBool::new(false),
        }
    }
}

impl State {
    /// The state of a store that is opened again with all its data. A save that ran has failed.
    pub fn carried(old: &Self) -> Self {
        let state = Self::default();
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        for (own, before) in state.databases.iter().zip(&old.databases) {
            own.store(before.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        state.swaps.store(load(&old.swaps), Ordering::Relaxed);
        // A write without an answer counts too.
        state.changes.store(load(&old.changes) + 1, Ordering::Relaxed);
        let (saves, before) = (&state.saves, &old.saves);
        let pairs = [
            (&saves.last_s, &before.last_s),
            (&saves.tried_s, &before.tried_s),
            (&saves.seconds, &before.seconds),
            (&saves.count, &before.count),
            (&saves.loaded, &before.loaded),
            (&saves.loaded_expired, &before.loaded_expired),
        ];
        pairs.iter().for_each(|(own, before)| own.store(load(before), Ordering::Relaxed));
        let has_failed = before.is_running() || before.has_failed.load(Ordering::Relaxed);
        saves.has_failed.store(has_failed, Ordering::Relaxed);
        state
    }
}

/// A flag that one task sets until the value is dropped.
pub(super) struct Alone<'a>(&'a AtomicBool);

impl<'a> Alone<'a> {
    /// Sets the flag. `None`: another task has set the flag.
    pub fn new(flag: &'a AtomicBool) -> Option<Self> {
        (!flag.swap(true, Ordering::AcqRel)).then_some(Self(flag))
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl State {
    /// The store's database for a database of clients.
    pub fn physical(&self, db: u8) -> u8 {
        self.databases[usize::from(db) % DATABASES].load(Ordering::Acquire)
    }

    /// The clients' database for a database of the store.
    pub fn logical(&self, db: u8) -> u8 {
        (0..DATABASES as u8).find(|own| self.physical(*own) == db).unwrap_or(db)
    }

    /// Exchanges two databases. The caller runs alone.
    pub fn swap(&self, one: u8, other: u8) {
        let [a, b] = [one, other].map(|db| &self.databases[usize::from(db)]);
        let before = a.swap(b.load(Ordering::Acquire), Ordering::AcqRel);
        b.store(before, Ordering::Release);
        self.swaps.fetch_add(1, Ordering::Release);
    }

    /// True if the last save in the background has failed.
    pub fn is_save_broken(&self) -> bool {
        self.saves.has_failed.load(Ordering::Relaxed)
    }

    /// True while a save goes through the keys: changes then need the value before.
    pub fn is_saving(&self) -> bool {
        self.saves.is_running()
    }

    /// Keeps a key that is about to change as it is, if a save has yet to write the key. The
    /// caller is inside the key's subtable as a writer.
    pub fn keep_image<N: Nic>(
        &self,
        store: &Store<N>,
        db: u8,
        key: &[u8],
        value: Option<&[u8]>,
        expiry: u64,
    ) {
        if !self.is_saving() {
            return;
        }
        let position = store.position(key);
        let mut progress = self.saves.progress.lock();
        if progress.next[usize::from(db)].is_some_and(|next| position >= next) {
            let image = || value.map(|value| (value.to_vec(), expiry));
            progress.images.entry((db, position, key.to_vec())).or_insert_with(image);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_save_is_tried_again_after_a_pause() {
        let saves = Saves::default();
        saves.last_s.store(1000, Ordering::Relaxed);
        saves.tried_s.store(1000, Ordering::Relaxed);
        let points = [(60, 10), (2, 100)];
        let is_due = |changes, now_s| saves.are_due(&points, changes, now_s);
        assert!(!is_due(9, 2000) && !is_due(10, 1060) && is_due(10, 1061));
        assert!(!is_due(100, 1002) && is_due(100, 1003) && !is_due(99, 1003));
        saves.has_failed.store(true, Ordering::Relaxed);
        saves.tried_s.store(1003, Ordering::Relaxed);
        assert!(!is_due(100, 1004) && !is_due(100, 1008) && is_due(100, 1009));
        // BGSAVE SCHEDULE waits for the running save only.
        saves.is_asked.store(true, Ordering::Relaxed);
        assert!(is_due(0, 1004));
    }
}
