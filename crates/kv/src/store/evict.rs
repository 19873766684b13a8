//! Choice and deletion of keys to make room.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::change::Tried;
use super::look::Hit;
use super::sweep::Tell;
use super::trips::{Operation, Trip};
use super::{Key, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::KeyHash;
use crate::layout::class;
use crate::layout::root::DATABASES;
use crate::layout::table::{BUCKET_BYTES, SLOTS, Slot};
use crate::reach::{Reach, Step};
use crate::table::Table;
use crate::ticket::{Hold, Name};
use crate::uses::Measure;

/// Keys among which one is chosen.
const SAMPLE: usize = 5;
/// Maximum number of samples without a candidate.
const ATTEMPTS: usize = 64;
const GROUP_SLOTS: usize = 3 * SLOTS;

/// Which keys may be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Candidates {
    /// All keys.
    #[default]
    All,
    /// The keys that have an expiry.
    Volatile,
}

/// Which of the candidates is evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// The one of least worth in the store's [`Measure`].
    #[default]
    LeastUsed,
    /// Any.
    Random,
    /// The one that expires first.
    SoonestExpiry,
}

/// A key that may be evicted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sampled {
    pub slot: usize,
    pub word: Slot,
    /// Known from the mirror, or from the block.
    pub tag: u64,
    pub expiry: u64,
    pub worth: i64,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Chooses what the store notes of the uses of keys from now on.
    pub fn measure(&self, measure: Measure) {
        self.counts_uses.store(measure == Measure::Frequency, Ordering::Relaxed);
    }

    pub(super) fn measured(&self) -> Measure {
        let counts = self.counts_uses.load(Ordering::Relaxed);
        if counts { Measure::Frequency } else { Measure::Recency }
    }

    /// Notes a use of the key in `slot`.
    pub(super) fn used(&self, table: &Table, slot: usize, is_new: bool) {
        let (measure, now) = (self.measured(), self.environment.coarse());
        let random = if measure == Measure::Frequency { self.environment.random() } else { 0 };
        table.local.lock().uses.used(slot, is_new, measure, now, random);
    }

    /// Deletes one key to make room. False if no candidate was found.
    ///
    /// The key is chosen among five, from local metadata.
    pub async fn evict(&self, candidates: Candidates, by: Eviction) -> Result<bool, Error> {
        self.evict_and_tell(candidates, by, None).await
    }

    /// Like [`Store::evict`]. Reads the key before its deletion, for `tell`.
    pub async fn evict_and_tell(
        &self,
        candidates: Candidates,
        by: Eviction,
        mut tell: Option<Tell<'_>>,
    ) -> Result<bool, Error> {
        for _ in 0..ATTEMPTS {
            self.check()?;
            let trip = self.trip(Operation::Evict);
            let Some(table) = self.random_table() else { return Ok(false) };
            let sample = self.sample(&trip, &table, candidates, by).await?;
            let Some(chosen) = self.choose(&sample, by) else { continue };
            if self.evict_key(&trip, &table, chosen, &mut tell).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The key of a sample that goes first.
    pub(super) fn choose(&self, sample: &[Sampled], by: Eviction) -> Option<Sampled> {
        let chosen = match by {
            Eviction::LeastUsed => sample.iter().min_by_key(|key| key.worth),
            Eviction::SoonestExpiry => {
                let volatile = sample.iter().filter(|key| key.expiry != 0);
                volatile.min_by_key(|key| key.expiry)
            }
            Eviction::Random if sample.is_empty() => None,
            Eviction::Random => sample.get(self.environment.random() as usize % sample.len()),
        };
        chosen.copied()
    }

    /// Deletes a chosen key and tells of it, if the slot still names the same block.
    pub(super) async fn evict_key(
        &self,
        trip: &Trip<'_>,
        table: &Arc<Table>,
        chosen: Sampled,
        tell: &mut Option<Tell<'_>>,
    ) -> Result<bool, Error> {
        // The name of a key is lost with its memory node.
        let is_told = tell.is_some() && !self.blocks.is_gone(chosen.word.place);
        let mut name = is_told.then(Vec::new);
        if !self.evict_chosen(trip, table, chosen, name.as_mut()).await? {
            return Ok(false);
        }
        if let (Some(tell), Some(name)) = (tell, name) {
            tell(table.db, &name);
        }
        self.removed.evicted.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    /// A subtable, chosen in proportion to the keys.
    pub(super) fn random_table(&self) -> Option<Arc<Table>> {
        let total: u64 = self.databases.iter().map(|database| database.keys()).sum();
        let mut key = self.environment.random() % total.max(1);
        for db in 0..DATABASES {
            let keys = self.databases[db].keys();
            if key < keys {
                return self.databases[db].table(self.environment.random());
            }
            key -= keys;
        }
        None
    }

    /// Some keys of a subtable, from a random group on.
    pub(super) async fn sample(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        candidates: Candidates,
        by: Eviction,
    ) -> Result<SmallVec<[Sampled; GROUP_SLOTS]>, Error> {
        let groups = self.shape.groups as usize;
        let start = self.environment.random() as usize % groups;
        let (now, measure) = (self.environment.now(), self.measured());
        let mut sample = SmallVec::new();
        if table.is_mirrored {
            let local = table.local.lock();
            let Some(mirror) = &local.mirror else { return Ok(sample) };
            for i in 0..groups * GROUP_SLOTS {
                let slot = (start * GROUP_SLOTS + i) % (groups * GROUP_SLOTS);
                let Some(entry) = mirror.entry(slot) else { continue };
                let Some(word) = Slot::parse(entry.word) else { continue };
                if candidates == Candidates::All || entry.expiry != 0 {
                    let worth = local.uses.worth(slot, measure, now);
                    let (tag, expiry) = (entry.tag, entry.expiry);
                    sample.push(Sampled { slot, word, tag, expiry, worth });
                }
                if sample.len() == SAMPLE {
                    break;
                }
            }
            return Ok(sample);
        }
        let mut bytes = [0; 3 * BUCKET_BYTES];
        let at = table.spot.bucket(3 * start as u32);
        self.run(trip, &mut [Step::Read { at, into: &mut bytes }]).await?;
        let slots = super::image::slots_of(&bytes);
        let words = slots.iter().enumerate();
        let words: SmallVec<[(usize, Slot); GROUP_SLOTS]> =
            words.filter_map(|(i, word)| Some((i, Slot::parse(*word)?))).collect();
        let words = words.into_iter().filter(|(_, word)| !self.blocks.is_gone(word.place));
        {
            let local = table.local.lock();
            for (i, word) in words {
                let slot = start * GROUP_SLOTS + i;
                let worth = local.uses.worth(slot, measure, now);
                sample.push(Sampled { slot, word, tag: 0, expiry: 0, worth });
            }
        }
        if by == Eviction::LeastUsed && candidates == Candidates::All {
            sample.sort_by_key(|key| key.worth);
            sample.truncate(1);
        }
        let _pin = self.blocks.pin();
        // The blocks may have been freed since the group was read; then their bytes are no block.
        let words: SmallVec<[Slot; GROUP_SLOTS]> = sample.iter().map(|key| key.word).collect();
        let read = self.read_keys(trip, words.into_iter(), |i, head, key| {
            sample[i].tag = self.hasher.hash(key).tag;
            sample[i].expiry = head.expiry;
        });
        match read.await {
            Err(Error::Malformed { .. }) => sample.clear(),
            read => read?,
        }
        sample.retain(|key| candidates == Candidates::All || key.expiry != 0);
        Ok(sample)
    }

    /// Deletes a chosen key, if the slot still names the same block. `name`: takes the key.
    async fn evict_chosen(
        &self,
        trip: &Trip<'_>,
        table: &Arc<Table>,
        chosen: Sampled,
        name: Option<&mut Vec<u8>>,
    ) -> Result<bool, Error> {
        let ticket = self.tickets.one(Name::new(table.db, chosen.tag), Hold::Exclusive);
        ticket.valid().await;
        let _pin = self.blocks.pin();
        let table = table.clone().enter().await;
        if !table.local.lock().covers(chosen.tag) {
            return Ok(false);
        }
        let mut buffer = self.buffers.take();
        if !self.still_names(trip, &table, chosen, &mut buffer).await? {
            return Ok(false);
        }
        let Sampled { slot, word, tag, expiry, .. } = chosen;
        if let Some(name) = name {
            let words = std::iter::once(word);
            self.read_keys(trip, words, |_, _, key| name.extend_from_slice(key)).await?;
        }
        let mut hit = Hit { slot, word, expiry, block: None };
        if word.length == class::PIECES && !self.blocks.is_gone(word.place) {
            buffer.clear();
            self.read_block(trip, word, &mut buffer).await?;
            hit.block = Some(self.checked(word, &buffer, 0..buffer.len())?);
        }
        let key = Key { db: table.db, bytes: &[], hash: KeyHash { upper: tag, tag } };
        let tried = self.unlink(trip, &table, &key, &hit, &buffer).await?;
        Ok(matches!(tried, Tried::Done))
    }

    async fn still_names(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        chosen: Sampled,
        buffer: &mut Vec<u8>,
    ) -> Result<bool, Error> {
        if table.is_mirrored {
            let local = table.local.lock();
            let entry = local.mirror.as_ref().and_then(|mirror| mirror.entry(chosen.slot));
            let expected = (chosen.word.word(), chosen.tag);
            return Ok(entry.is_some_and(|entry| (entry.word, entry.tag) == expected));
        }
        let mut bytes = [0; 8];
        let at = table.spot.slot(chosen.slot);
        self.run(trip, &mut [Step::Read { at, into: &mut bytes }]).await?;
        if crate::layout::word(&bytes, 0) != chosen.word.word() {
            return Ok(false);
        }
        // Under the ticket of the key, so this is its block if the tag is the same.
        buffer.clear();
        self.read_block(trip, chosen.word, buffer).await?;
        let block = self.parse(chosen.word, buffer)?;
        Ok(self.hasher.hash(block.key).tag == chosen.tag)
    }
}
