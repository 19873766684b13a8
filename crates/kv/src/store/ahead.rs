//! Reads ahead: the values of keys that a client will read next, in one round trip.
//!
//! A connection that has sent several GETs has its values read together: one post, one completion,
//! and the misses of the processor's cache overlap. Each value is as of a time between the arrival
//! of the request and the reply, so each read is linearizable.

use std::ops::Range;

use smallvec::SmallVec;

use super::Store;
use super::look::{Candidate, Want};
use super::trips::Operation;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{HEADER_BYTES, Kind};
use crate::layout::class;
use crate::reach::{Reach, Step};
use crate::search::Buckets;
use crate::ticket::Hold;

/// Maximum number of values that are read at once.
pub const AHEAD_MAX: usize = 16;
/// Maximum bytes of a block that is read ahead.
const BLOCK_MAX: usize = 4 << 10;

/// A key that was looked up ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Early {
    /// Not looked up: the read itself does that.
    Unknown,
    /// The key was not there.
    Missing,
    /// The value, as a range of the buffer, and its expiry.
    Value(Range<usize>, u64),
}

/// Values that were read ahead, in the order of their requests.
#[derive(Debug, Default)]
pub struct Ahead {
    bytes: Vec<u8>,
    found: SmallVec<[Early; AHEAD_MAX]>,
    /// Number of requests that have begun.
    begun: usize,
}

impl Ahead {
    /// True if there are no values for the present request and the next ones.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Begins the next request. Forgets all values behind the last one.
    pub fn begin_next(&mut self) {
        self.begun += 1;
        if self.begun > self.found.len() {
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.found.clear();
        self.begun = 0;
    }

    /// Takes the memory away.
    pub fn take_bytes(&mut self) -> Vec<u8> {
        self.clear();
        std::mem::take(&mut self.bytes)
    }

    /// Uses `bytes` for the values.
    pub fn set_bytes(&mut self, bytes: Vec<u8>) {
        self.bytes = bytes;
        self.clear();
    }

    /// The value that the present request reads, with its expiry; `Some(None)`: the key was not
    /// there. `None`: the value was not read ahead.
    pub fn value(&self) -> Option<Option<(&[u8], u64)>> {
        match self.found.get(self.begun.checked_sub(1)?)? {
            Early::Unknown => None,
            Early::Missing => Some(None),
            Early::Value(range, expiry) => Some(Some((&self.bytes[range.clone()], *expiry))),
        }
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Reads the values of `keys` into `ahead`: the first [`AHEAD_MAX`] keys at most.
    ///
    /// A value stays unread if it is long or in pieces, if the compute node has no mirror of its
    /// subtable, or if another operation changes its key. A call that fails has read no value: the
    /// read of the value itself tells the reason.
    pub async fn read_ahead<'k>(
        &self,
        db: u8,
        keys: impl Iterator<Item = &'k [u8]>,
        ahead: &mut Ahead,
    ) {
        ahead.clear();
        if self.read_all_ahead(db, keys, ahead).await.is_err() {
            ahead.clear();
        }
    }

    async fn read_all_ahead<'k>(
        &self,
        db: u8,
        keys: impl Iterator<Item = &'k [u8]>,
        ahead: &mut Ahead,
    ) -> Result<(), Error> {
        let _pin = self.blocks.pin();
        let mut tickets = SmallVec::<[_; AHEAD_MAX]>::new();
        let mut candidates = SmallVec::<[_; AHEAD_MAX]>::new();
        for (at, key) in keys.take(AHEAD_MAX).enumerate() {
            let key = self.key(db, key)?;
            let ticket = self.ticket(&key, Hold::Shared);
            ahead.found.push(Early::Unknown);
            let Some(table) = self.database(&key).table(key.hash.upper) else { continue };
            if !ticket.was_valid() || !table.is_mirrored {
                continue;
            }
            let local = table.local.lock();
            let Some(mirror) = local.mirror.as_ref().filter(|_| local.covers(key.hash.upper))
            else {
                continue;
            };
            let buckets = Buckets::of(key.hash.upper, self.shape.groups);
            let Some((slot, word)) = mirror.find(buckets, key.hash) else {
                ahead.found[at] = Early::Missing;
                continue;
            };
            drop(local);
            if word.length == class::PIECES || self.blocks.is_gone(word.place) {
                continue;
            }
            let bytes = self.read_bytes(word, Want::Value, 0)?;
            if bytes > BLOCK_MAX || !self.cache.lacks(word.place) {
                continue;
            }
            let start = ahead.bytes.len();
            ahead.bytes.resize(start + bytes, 0);
            let range = start..start + bytes;
            candidates.push((at, key, table, Candidate { slot, word, range }));
            tickets.push(ticket);
        }
        if candidates.is_empty() {
            return Ok(());
        }
        let trip = self.trip(Operation::Get);
        {
            let mut rest = &mut ahead.bytes[..];
            let mut steps = SmallVec::<[Step<'_>; AHEAD_MAX]>::new();
            for (_, _, _, candidate) in &candidates {
                let (into, more) = rest.split_at_mut(candidate.range.len());
                steps.push(Step::Read { at: candidate.word.place.at(0), into });
                rest = more;
            }
            self.run(&trip, &mut steps).await?;
        }
        for (at, key, table, candidate) in candidates {
            let start = candidate.range.start;
            // The slot has another key with the same tag, so the read itself decides.
            let Some(hit) = self.compare(&key, Want::Value, candidate, &ahead.bytes)? else {
                continue;
            };
            if !self.is_alive(&hit) {
                ahead.found[at] = Early::Missing;
                continue;
            }
            let block = hit.whole(&ahead.bytes)?;
            if block.head.kind != Kind::String {
                continue;
            }
            let begin = start + HEADER_BYTES + key.bytes.len();
            ahead.found[at] = Early::Value(begin..begin + block.rest.len(), hit.expiry);
            self.keep_read(&table, &hit, &ahead.bytes);
            self.used(&table, hit.slot, false);
        }
        Ok(())
    }
}
