//! The look-up of a key in a subtable.

use std::ops::Range;

use smallvec::SmallVec;

use super::access::Steps;
use super::trips::Trip;
use super::whole::Whole;
use super::{Key, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{Block, HEADER_BYTES, Head};
use crate::layout::table::{BucketWord, Slot};
use crate::layout::{Malformed, class};
use crate::place::Address;
use crate::reach::{Reach, Step};
use crate::search::{Buckets, View};
use crate::table::{Entry, Table};

/// Expiry of a key whose block is on a memory node that is gone: the key counts as expired.
pub(super) const GONE: u64 = 1;

/// What an operation needs to know of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// Whether the key is there, and its expiry.
    Presence,
    /// All places that the key occupies, to free them.
    Places,
    /// The value.
    Value,
}

/// A key that is there.
#[derive(Clone, Debug)]
pub(super) struct Hit {
    /// Number of the slot.
    pub slot: usize,
    /// The slot's word.
    pub word: Slot,
    /// The expiry; 0: none.
    pub expiry: u64,
    /// The whole block, if the look-up wanted the block.
    pub block: Option<Whole>,
}

impl Hit {
    pub fn entry(&self, tag: u64) -> Entry {
        Entry { word: self.word.word(), tag, expiry: self.expiry }
    }

    pub fn is_expired(&self, now: u64) -> bool {
        self.expiry != 0 && self.expiry <= now
    }
}

/// The result of a look-up: the key, if it is there, and the buckets, if they were read.
pub(super) struct Seen {
    pub hit: Option<Hit>,
    pub view: Option<View>,
}

pub(super) struct Candidate {
    pub slot: usize,
    pub word: Slot,
    pub range: Range<usize>,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Returns whether the key has not expired. The clock is read only for a key with an expiry.
    pub(super) fn is_alive(&self, hit: &Hit) -> bool {
        hit.expiry == 0 || !hit.is_expired(self.environment.now())
    }

    /// Looks for `key` in `table`. `along` is a WRITE that is posted with the first round trip.
    /// `None`: the subtable has other keys now, because a split or a merge has run.
    pub(super) async fn look(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        key: &Key<'_>,
        want: Want,
        buffer: &mut Vec<u8>,
        along: Option<(Address, &[u8])>,
    ) -> Result<Option<Seen>, Error> {
        if table.is_mirrored {
            return self.look_in_mirror(trip, table, key, want, buffer).await;
        }
        let mut view = View::new(Buckets::of(key.hash.upper, self.shape.groups));
        self.read_buckets(trip, table, &mut view, along).await?;
        for word in view.bucket_words() {
            let word = BucketWord::parse(word);
            let word = word.map_err(Error::malformed(table.spot.header.at(0)))?;
            if !word.covers(key.hash.upper) {
                return Ok(None);
            }
        }
        let hit = self.search(trip, key, want, buffer, &view, &[]).await?;
        Ok(Some(Seen { hit, view: Some(view) }))
    }

    /// The error for buckets that have other keys than their subtable.
    pub(super) fn foreign_prefix(&self, table: &Table) -> Error {
        let what = Malformed("a bucket has the prefix of other keys");
        Error::Malformed { at: table.spot.header.at(0), what }
    }

    async fn look_in_mirror(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        key: &Key<'_>,
        want: Want,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Seen>, Error> {
        let found = {
            let local = table.local.lock();
            if !local.covers(key.hash.upper) {
                return Ok(None);
            }
            let buckets = Buckets::of(key.hash.upper, self.shape.groups);
            let find = |mirror: &crate::table::Mirror| {
                let (slot, word) = mirror.find(buckets, key.hash)?;
                let expiry = mirror.entry(slot).map_or(0, |entry| entry.expiry);
                Some(Hit { slot, word, expiry, block: None })
            };
            local.mirror.as_ref().and_then(find)
        };
        let Some(mut hit) = found else { return Ok(Some(Seen { hit: None, view: None })) };
        if self.blocks.is_gone(hit.word.place) {
            hit.expiry = GONE;
            return Ok(Some(Seen { hit: Some(hit), view: None }));
        }
        let is_list = hit.word.length == class::PIECES;
        if want == Want::Value || want == Want::Places && is_list {
            let (is_cached, whole) = match self.cached(hit.word, hit.expiry) {
                Some(whole) => (true, whole),
                None => {
                    let start = buffer.len();
                    self.read_block(trip, hit.word, buffer).await?;
                    (false, self.checked(hit.word, buffer, start..buffer.len())?)
                }
            };
            let block = whole.block(buffer);
            // Two keys with one tag: the other one is there.
            if block.key != key.bytes {
                return Ok(Some(Seen { hit: None, view: None }));
            }
            hit.expiry = if self.lacks_pieces(&block) { GONE } else { block.head.expiry };
            hit.block = Some(whole);
            if !is_cached && want == Want::Value {
                self.keep_read(table, &hit, buffer);
            }
        }
        Ok(Some(Seen { hit: Some(hit), view: None }))
    }

    /// Reads the two combined buckets of `view`.
    pub(super) async fn read_buckets(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        view: &mut View,
        along: Option<(Address, &[u8])>,
    ) -> Result<(), Error> {
        let first = view.buckets.first;
        let [one, two] = &mut view.bytes;
        let read_one = Step::Read { at: table.spot.bucket(first[0]), into: one };
        let read_two = Step::Read { at: table.spot.bucket(first[1]), into: two };
        match along {
            Some((at, from)) => {
                let write = Step::Write { at, from };
                self.run(trip, &mut [write, read_one, read_two]).await
            }
            None => self.run(trip, &mut [read_one, read_two]).await,
        }
    }

    /// Reads the blocks whose fingerprint fits, except those in the slots `known`, and compares the
    /// keys.
    pub(super) async fn search(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        want: Want,
        buffer: &mut Vec<u8>,
        view: &View,
        known: &[usize],
    ) -> Result<Option<Hit>, Error> {
        let mut candidates = SmallVec::<[Candidate; 2]>::new();
        let start = buffer.len();
        let mut end = start;
        for slot in view.buckets.slots().filter(|slot| !known.contains(slot)) {
            let Some(word) = Slot::parse(view.slot(slot)) else { continue };
            if word.fingerprint == key.hash.fingerprint() && !self.blocks.is_gone(word.place) {
                let bytes = self.read_bytes(word, want, key.bytes.len())?;
                candidates.push(Candidate { slot, word, range: end..end + bytes });
                end += bytes;
            }
        }
        if candidates.is_empty() {
            return Ok(None);
        }
        buffer.resize(end, 0);
        {
            let mut steps = Steps::new();
            let mut rest = &mut buffer[start..];
            for candidate in &candidates {
                let (into, more) = rest.split_at_mut(candidate.range.len());
                steps.push(Step::Read { at: candidate.word.place.at(0), into });
                rest = more;
            }
            self.run(trip, &mut steps).await?;
        }
        for candidate in candidates {
            if let Some(hit) = self.compare(key, want, candidate, buffer)? {
                return Ok(Some(hit));
            }
        }
        Ok(None)
    }

    pub(super) fn compare(
        &self,
        key: &Key<'_>,
        want: Want,
        candidate: Candidate,
        buffer: &[u8],
    ) -> Result<Option<Hit>, Error> {
        let Candidate { slot, word, range } = candidate;
        let bytes = &buffer[range.clone()];
        let head = Head::parse(bytes).map_err(Error::malformed(word.place.at(0)))?;
        let is_same = head.upper == key.hash.upper
            && head.key as usize == key.bytes.len()
            && bytes.get(HEADER_BYTES..HEADER_BYTES + key.bytes.len()) == Some(key.bytes);
        if !is_same {
            return Ok(None);
        }
        let is_whole = want == Want::Value || want == Want::Places && word.length == class::PIECES;
        let mut hit = Hit { slot, word, expiry: head.expiry, block: None };
        if is_whole {
            let whole = self.checked(word, buffer, range)?;
            if self.lacks_pieces(&whole.block(buffer)) {
                hit.expiry = GONE;
            }
            hit.block = Some(whole);
        }
        Ok(Some(hit))
    }

    /// Parses the whole block that `word` names.
    pub(super) fn parse<'b>(&self, word: Slot, bytes: &'b [u8]) -> Result<Block<'b>, Error> {
        Block::parse(word.place, bytes).map_err(Error::malformed(word.place.at(0)))
    }

    /// Appends the whole block that `word` names to `buffer`.
    pub(super) async fn read_block(
        &self,
        trip: &Trip<'_>,
        word: Slot,
        buffer: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let bytes = self.read_bytes(word, Want::Value, 0)?;
        let start = buffer.len();
        buffer.resize(start + bytes, 0);
        let step = Step::Read { at: word.place.at(0), into: &mut buffer[start..] };
        self.run(trip, &mut [step]).await
    }

    /// Bytes to read of the block that `word` names.
    pub(super) fn read_bytes(
        &self,
        word: Slot,
        want: Want,
        key_bytes: usize,
    ) -> Result<usize, Error> {
        let at = word.place.at(0);
        let left = self.slab - (at.offset % u64::from(self.slab)) as u32;
        let whole = super::pieces::block_bytes(self.slab, word.length, left);
        if whole > left || (whole as usize) < HEADER_BYTES {
            let what = Malformed("a slot names bytes beyond a slab");
            return Err(Error::Malformed { at, what });
        }
        let key_end = HEADER_BYTES + key_bytes;
        let is_whole = want == Want::Value || want == Want::Places && word.length == class::PIECES;
        Ok(if is_whole { whole as usize } else { key_end.min(whole as usize) })
    }
}
