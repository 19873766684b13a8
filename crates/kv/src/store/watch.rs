//! Counters of changes of watched keys.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::Store;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::reach::Reach;
use crate::ticket::Name;

/// The watched keys.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// Number of watches, so that a change without any takes no lock.
    count: AtomicUsize,
    keys: Mutex<HashMap<Name, Watched>>,
}

#[derive(Debug, Default)]
struct Watched {
    db: u8,
    watches: usize,
    changes: u64,
    flushes: u64,
}

/// A watch on a key: tells whether the key has changed since.
#[derive(Debug)]
pub struct Watch {
    watches: Arc<Watches>,
    name: Name,
    since: u64,
    flushes: u64,
}

impl Watch {
    /// True if the key was changed, deleted, or found expired since the watch began.
    pub fn is_changed(&self) -> bool {
        let keys = self.watches.keys.lock();
        keys.get(&self.name).is_none_or(|key| key.changes != self.since)
    }

    /// True if the database of the key was flushed since the watch began. The key may have been
    /// absent all the time.
    pub fn is_flushed(&self) -> bool {
        let keys = self.watches.keys.lock();
        keys.get(&self.name).is_none_or(|key| key.flushes != self.flushes)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut keys = self.watches.keys.lock();
        if let Some(key) = keys.get_mut(&self.name) {
            key.watches -= 1;
            if key.watches == 0 {
                keys.remove(&self.name);
            }
        }
        self.watches.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Watches a key.
    pub fn watch(&self, db: u8, key: &[u8]) -> Result<Watch, Error> {
        let name = self.key(db, key)?.name();
        let watches = &self.watches;
        watches.count.fetch_add(1, Ordering::Relaxed);
        let mut keys = watches.keys.lock();
        let watched = keys.entry(name).or_default();
        watched.db = db;
        watched.watches += 1;
        let (since, flushes) = (watched.changes, watched.flushes);
        let watches = watches.clone();
        Ok(Watch { watches, name, since, flushes })
    }

    /// Notes a change of a key.
    pub(super) fn touched(&self, name: Name) {
        if self.watches.count.load(Ordering::Relaxed) != 0
            && let Some(key) = self.watches.keys.lock().get_mut(&name)
        {
            key.changes += 1;
        }
    }

    /// Counts all watched keys as changed: the store is opened again, and its watches end.
    pub fn end_watches(&self) {
        self.watches.keys.lock().values_mut().for_each(|key| key.changes += 1);
    }

    /// Notes a flush of a database.
    pub(super) fn flushed(&self, db: u8) {
        let mut keys = self.watches.keys.lock();
        keys.values_mut().filter(|key| key.db == db).for_each(|key| key.flushes += 1);
    }
}
