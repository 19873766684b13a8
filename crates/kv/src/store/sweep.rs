//! Deletion of expired keys.
//!
//! A key that has expired is never returned. A heap of (expiry, key) finds the keys to delete. A
//! write leaves an older entry of its key in the heap; the sweep finds that the key has another
//! expiry, and drops the entry.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::change::Tried;
use super::look::Hit;
use super::trips::{Operation, Trip};
use super::{Key, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::KeyHash;
use crate::layout::class;
use crate::layout::table::Slot;
use crate::reach::Reach;
use crate::search::{Buckets, View};
use crate::table::Entered;
use crate::ticket::{Hold, Name};

/// Is called with the database and the name of a key that was deleted.
pub type Tell<'a> = &'a mut dyn FnMut(u8, &[u8]);

/// The keys that will expire.
#[derive(Debug, Default)]
pub(super) struct Due(Mutex<BinaryHeap<Reverse<(u64, u8, KeyHash)>>>);

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Notes that a key will expire at `expiry`.
    pub(super) fn will_expire(&self, expiry: u64, db: u8, hash: KeyHash) {
        self.due.0.lock().push(Reverse((expiry, db, hash)));
    }

    /// The time at which the next key may expire.
    pub fn next_expiry(&self) -> Option<u64> {
        self.due.0.lock().peek().map(|Reverse((expiry, ..))| *expiry)
    }

    /// Deletes expired keys: at most `most`. Returns the number of keys deleted.
    pub async fn sweep(&self, most: usize) -> Result<usize, Error> {
        self.sweep_and_tell(most, None).await
    }

    /// Like [`Store::sweep`]. Reads each key before its deletion, for `tell`.
    pub async fn sweep_and_tell(
        &self,
        most: usize,
        mut tell: Option<Tell<'_>>,
    ) -> Result<usize, Error> {
        let mut deleted = 0;
        for _ in 0..most {
            let now = self.environment.now();
            let next = {
                let mut due = self.due.0.lock();
                match due.peek() {
                    Some(Reverse((expiry, ..))) if *expiry <= now => due.pop(),
                    _ => None,
                }
            };
            let Some(Reverse((_, db, hash))) = next else { break };
            let mut key = tell.as_ref().map(|_| Vec::new());
            let is_deleted = self.delete_expired(db, hash, key.as_mut()).await?;
            deleted += usize::from(is_deleted);
            if let (true, Some(tell), Some(key)) = (is_deleted, &mut tell, key) {
                tell(db, &key);
            }
        }
        self.removed.expired.fetch_add(deleted as u64, Ordering::Relaxed);
        Ok(deleted)
    }

    /// Deletes the key with `hash`, if the key has expired. `name`: takes the key.
    async fn delete_expired(
        &self,
        db: u8,
        hash: KeyHash,
        mut name: Option<&mut Vec<u8>>,
    ) -> Result<bool, Error> {
        let ticket = self.tickets.one(Name::new(db, hash.tag), Hold::Exclusive);
        ticket.valid().await;
        let trip = self.trip(Operation::Sweep);
        let _pin = self.blocks.pin();
        loop {
            self.check()?;
            let Some(table) = self.databases[usize::from(db)].table(hash.upper) else {
                return Ok(false);
            };
            let table = table.enter().await;
            if !table.local.lock().covers(hash.upper) {
                continue;
            }
            let mut buffer = self.buffers.take();
            let hit = self.look_by_hash(&trip, &table, hash, &mut buffer).await?;
            let Some(hit) = hit else { return Ok(false) };
            // `Store::forget_gone` deletes the keys of a memory node that is gone.
            if !hit.is_expired(self.environment.now()) || self.blocks.is_gone(hit.word.place) {
                return Ok(false);
            }
            if let Some(name) = &mut name {
                name.clear();
                let slots = std::iter::once(hit.word);
                self.read_keys(&trip, slots, |_, _, key| name.extend_from_slice(key)).await?;
            }
            // The key's bytes are not needed: the hash is that of this key.
            let key = Key { db, bytes: &[], hash };
            if let Tried::Done = self.unlink(&trip, &table, &key, &hit, &buffer).await? {
                return Ok(true);
            }
        }
    }

    /// Looks for the key with `hash`, whose bytes are not known.
    async fn look_by_hash(
        &self,
        trip: &Trip<'_>,
        table: &Entered,
        hash: KeyHash,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Hit>, Error> {
        let buckets = Buckets::of(hash.upper, self.shape.groups);
        if table.is_mirrored {
            let found = {
                let local = table.local.lock();
                local.mirror.as_ref().and_then(|mirror| {
                    let (slot, word) = mirror.find(buckets, hash)?;
                    Some((slot, word, mirror.entry(slot)?.expiry))
                })
            };
            let Some((slot, word, expiry)) = found else { return Ok(None) };
            let mut hit = Hit { slot, word, expiry, block: None };
            if word.length == class::PIECES && !self.blocks.is_gone(word.place) {
                self.read_block(trip, word, buffer).await?;
                hit.block = Some(self.checked(word, buffer, 0..buffer.len())?);
            }
            return Ok(Some(hit));
        }
        let mut view = View::new(buckets);
        self.read_buckets(trip, table, &mut view, None).await?;
        for slot in buckets.slots() {
            let word = Slot::parse(view.slot(slot));
            let fits = |word: &Slot| {
                word.fingerprint == hash.fingerprint() && !self.blocks.is_gone(word.place)
            };
            let Some(word) = word.filter(fits) else { continue };
            buffer.clear();
            self.read_block(trip, word, buffer).await?;
            let whole = self.checked(word, buffer, 0..buffer.len())?;
            let block = whole.block(buffer);
            if self.hasher.hash(block.key) == hash {
                let expiry = block.head.expiry;
                return Ok(Some(Hit { slot, word, expiry, block: Some(whole) }));
            }
        }
        Ok(None)
    }
}
