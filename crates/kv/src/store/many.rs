//! The look-up of several keys in the round trips of one.

use std::sync::Arc;

use super::access::Steps;
use super::gone::Losses;
use super::look::{Candidate, GONE, Hit, Want};
use super::trips::{Operation, Trip};
use super::{Key, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::class;
use crate::layout::table::{BucketWord, Slot};
use crate::reach::{Reach, Step};
use crate::search::{Buckets, View};
use crate::table::Table;
use crate::ticket::Hold;

/// A key of a look-up of several.
pub(super) struct Sought<'k> {
    pub key: Key<'k>,
    pub want: Want,
    /// The subtable. None: the database is empty.
    pub table: Option<Arc<Table>>,
}

/// A key after a look-up.
#[derive(Default)]
pub(super) struct Found {
    pub hit: Option<Hit>,
    pub view: Option<View>,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Reads several values of one database, in the round trips of one.
    pub async fn get_many(&self, db: u8, keys: &[&[u8]]) -> Result<Vec<Option<Vec<u8>>>, Error> {
        self.read_many(db, keys, true).await
    }

    /// Like [`Store::get_many`]. `is_use`: the read counts as a use of the keys.
    pub async fn read_many(
        &self,
        db: u8,
        keys: &[&[u8]],
        is_use: bool,
    ) -> Result<Vec<Option<Vec<u8>>>, Error> {
        let keys = keys.iter().map(|key| self.key(db, key)).collect::<Result<Vec<_>, _>>()?;
        let ticket = self.tickets.all(keys.iter().map(Key::name), Hold::Shared);
        ticket.valid().await;
        let trip = self.trip(Operation::Get);
        let _pin = self.blocks.pin();
        let mut buffer = self.buffers.take();
        let mut losses = Losses::default();
        let mut before = Vec::new();
        loop {
            buffer.clear();
            let table = |key: &Key<'_>| self.database(key).table(key.hash.upper);
            let want = Want::Value;
            let sought: Vec<_> =
                keys.iter().map(|key| Sought { key: *key, want, table: table(key) }).collect();
            let values = match self.look_all(&trip, &sought, &mut buffer).await {
                Ok(Some(found)) => {
                    let values = self.values(&trip, &sought, found, &buffer, is_use);
                    values.await.map(Some)
                }
                Ok(None) => Ok(None),
                Err(error) => Err(error),
            };
            match values {
                Ok(Some(values)) => return Ok(values),
                Ok(None) => {}
                Err(error) => {
                    losses.meet(error)?;
                    continue;
                }
            }
            self.check()?;
            // The directory changes before a subtable does, so other subtables have the keys now.
            let tables: Vec<_> = sought.into_iter().filter_map(|sought| sought.table).collect();
            if let (Some(table), true) = (tables.first(), is_same(&before, &tables)) {
                return Err(self.foreign_prefix(table));
            }
            before = tables;
        }
    }

    /// The values of the keys that are there. `is_use`: notes their uses.
    async fn values(
        &self,
        trip: &Trip<'_>,
        sought: &[Sought<'_>],
        found: Vec<Found>,
        buffer: &[u8],
        is_use: bool,
    ) -> Result<Vec<Option<Vec<u8>>>, Error> {
        let now = self.environment.now();
        let mut values = Vec::with_capacity(found.len());
        for (sought, found) in sought.iter().zip(found) {
            let Some(hit) = found.hit.filter(|hit| !hit.is_expired(now)) else {
                values.push(None);
                continue;
            };
            let mut value = Vec::new();
            self.load(trip, hit.word.place, &hit.whole(buffer)?, &mut value).await?;
            if let Some(table) = sought.table.as_ref().filter(|_| is_use) {
                self.used(table, hit.slot, false);
            }
            values.push(Some(value));
        }
        Ok(values)
    }

    /// Looks for several keys. `None`: a split or a merge has moved one of them.
    pub(super) async fn look_all(
        &self,
        trip: &Trip<'_>,
        sought: &[Sought<'_>],
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Vec<Found>>, Error> {
        let mut found: Vec<Found> = sought.iter().map(|_| Found::default()).collect();
        self.read_all_buckets(trip, sought, &mut found).await?;
        let mut candidates = Vec::new();
        let mut end = buffer.len();
        for (i, sought) in sought.iter().enumerate() {
            let Some(table) = &sought.table else { continue };
            let first = candidates.len();
            let is_there = match &found[i].view {
                Some(view) => self.name_in_view(sought, view, table, |slot, word| {
                    candidates.push((i, Candidate { slot, word, range: 0..0 }));
                })?,
                None => self.name_in_mirror(sought, table, &mut found[i], |slot, word| {
                    candidates.push((i, Candidate { slot, word, range: 0..0 }));
                }),
            };
            if !is_there {
                return Ok(None);
            }
            for (_, candidate) in &mut candidates[first..] {
                let bytes = self.read_bytes(candidate.word, sought.want, sought.key.bytes.len())?;
                candidate.range = end..end + bytes;
                end += bytes;
            }
        }
        self.read_candidates(trip, &candidates, buffer, end).await?;
        for (i, candidate) in candidates {
            let Sought { key, want, table } = &sought[i];
            if let Some(hit) = self.compare(key, *want, candidate, buffer)? {
                if let (Want::Value, Some(table)) = (want, table) {
                    self.keep_read(table, &hit, buffer);
                }
                found[i].hit = Some(hit);
            }
        }
        Ok(Some(found))
    }

    async fn read_candidates(
        &self,
        trip: &Trip<'_>,
        candidates: &[(usize, Candidate)],
        buffer: &mut Vec<u8>,
        end: usize,
    ) -> Result<(), Error> {
        if candidates.is_empty() {
            return Ok(());
        }
        let start = buffer.len();
        buffer.resize(end, 0);
        let mut rest = &mut buffer[start..];
        let mut steps = Steps::new();
        for (_, candidate) in candidates {
            let (into, more) = rest.split_at_mut(candidate.range.len());
            steps.push(Step::Read { at: candidate.word.place.at(0), into });
            rest = more;
        }
        self.run(trip, &mut steps).await
    }

    /// Reads the buckets of the keys whose subtables have no mirror.
    async fn read_all_buckets(
        &self,
        trip: &Trip<'_>,
        sought: &[Sought<'_>],
        found: &mut [Found],
    ) -> Result<(), Error> {
        let mut steps = Steps::new();
        for (sought, found) in sought.iter().zip(found) {
            let Some(table) = sought.table.as_ref().filter(|table| !table.is_mirrored) else {
                continue;
            };
            let buckets = Buckets::of(sought.key.hash.upper, self.shape.groups);
            let view = found.view.insert(View::new(buckets));
            for (first, into) in buckets.first.into_iter().zip(&mut view.bytes) {
                steps.push(Step::Read { at: table.spot.bucket(first), into });
            }
        }
        if steps.is_empty() {
            return Ok(());
        }
        self.run(trip, &mut steps).await
    }

    /// Names the slots whose fingerprint fits. False if the key is not in this subtable any more.
    fn name_in_view(
        &self,
        sought: &Sought<'_>,
        view: &View,
        table: &Table,
        mut candidate: impl FnMut(usize, Slot),
    ) -> Result<bool, Error> {
        let hash = sought.key.hash;
        for word in view.bucket_words() {
            let word = BucketWord::parse(word);
            if !word.map_err(Error::malformed(table.spot.header.at(0)))?.covers(hash.upper) {
                return Ok(false);
            }
        }
        for slot in view.buckets.slots() {
            let word = Slot::parse(view.slot(slot));
            let fits = |word: &Slot| {
                word.fingerprint == hash.fingerprint() && !self.blocks.is_gone(word.place)
            };
            if let Some(word) = word.filter(fits) {
                candidate(slot, word);
            }
        }
        Ok(true)
    }

    /// Finds the key in the mirror, and names the slot if the block is to be read.
    fn name_in_mirror(
        &self,
        sought: &Sought<'_>,
        table: &Table,
        found: &mut Found,
        mut candidate: impl FnMut(usize, Slot),
    ) -> bool {
        let hash = sought.key.hash;
        let local = table.local.lock();
        if !local.covers(hash.upper) {
            return false;
        }
        let buckets = Buckets::of(hash.upper, self.shape.groups);
        let Some(mirror) = &local.mirror else { return false };
        let Some((slot, word)) = mirror.find(buckets, hash) else { return true };
        if self.blocks.is_gone(word.place) {
            found.hit = Some(Hit { slot, word, expiry: GONE, block: None });
            return true;
        }
        let is_list = word.length == class::PIECES;
        let expiry = mirror.entry(slot).map_or(0, |entry| entry.expiry);
        if sought.want == Want::Value || sought.want == Want::Places && is_list {
            match self.cached(word, expiry) {
                // Two keys with one tag: the other one is there.
                Some(whole) if whole.block(&[]).key != sought.key.bytes => {}
                Some(whole) => found.hit = Some(Hit { slot, word, expiry, block: Some(whole) }),
                None => candidate(slot, word),
            }
        } else {
            found.hit = Some(Hit { slot, word, expiry, block: None });
        }
        true
    }
}

fn is_same(before: &[Arc<Table>], now: &[Arc<Table>]) -> bool {
    before.len() == now.len() && before.iter().zip(now).all(|(a, b)| Arc::ptr_eq(a, b))
}
