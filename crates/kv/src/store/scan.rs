//! Steps through all keys of a database.
//!
//! A cursor names a position in the order of hash prefixes, so splits, merges and doublings do not
//! change what lies before it and what behind. Keys that are there all the time are returned at
//! least once.

use super::Store;
use super::trips::Operation;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::table::{BucketWord, SLOTS, Slot};
use crate::layout::word;
use crate::reach::{Reach, Step};
use crate::table::Table;

/// Where a scan continues; 0 begins a scan, and ends it.
///
/// Layout, from bit 47 on: the prefix of the subtable (24 bits), its depth plus 1 (6 bits), and the
/// next bucket (18 bits). Clients in JavaScript keep a cursor in a float64, which is exact for 53
/// bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor(pub u64);

const DEPTH_AT: u32 = 18;
const PREFIX_AT: u32 = 24;
const BUCKET_MASK: u64 = (1 << DEPTH_AT) - 1;

impl Cursor {
    /// True for the begin, and for the end.
    pub const fn is_end(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn new(prefix: u64, depth: u32, bucket: u32) -> Self {
        // The last 24 of the prefix's 48 bits are 0, since prefixes have at most 24 bits.
        Self(prefix >> 24 << PREFIX_AT | (depth as u64 + 1) << DEPTH_AT | bucket as u64)
    }

    /// The position behind bucket `bucket` of `buckets` of the subtable with `word`.
    pub(crate) fn behind(word: BucketWord, bucket: u32, buckets: u32) -> Self {
        if bucket + 1 < buckets {
            return Self::new(word.prefix, word.depth, bucket + 1);
        }
        match (word.prefix << 16).checked_add(1 << (63 - word.depth) << 1) {
            _ if word.depth == 0 => Self::default(),
            Some(top) => Self::new(top >> 16, word.depth, 0),
            None => Self::default(),
        }
    }

    /// The first bits of the hashes, left-aligned in 64 bits.
    pub(crate) const fn top(self) -> u64 {
        self.0 >> PREFIX_AT << 40
    }

    /// Depth of the subtable at that time. 0 bits at the begin count as depth 0.
    pub(crate) const fn depth(self) -> u32 {
        ((self.0 >> DEPTH_AT) as u32 & 63).saturating_sub(1)
    }

    pub(crate) const fn bucket(self) -> u32 {
        (self.0 & BUCKET_MASK) as u32
    }
}

/// Keys of a step of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// The keys.
    pub keys: Vec<Vec<u8>>,
    /// Where the scan continues.
    pub next: Cursor,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Returns at least `count` keys from `cursor` on, unless the scan ends before. A bucket is
    /// never divided over two steps.
    pub async fn scan(&self, db: u8, cursor: Cursor, count: usize) -> Result<Scanned, Error> {
        self.key(db, b"")?;
        let trip = self.trip(Operation::Scan);
        let _pin = self.blocks.pin();
        let mut scanned = Scanned { keys: Vec::new(), next: cursor };
        let mut is_begun = false;
        while scanned.keys.len() < count.max(1) && !(is_begun && scanned.next.is_end()) {
            is_begun = true;
            let cursor = scanned.next;
            let Some(table) = self.databases[usize::from(db)].table(cursor.top()) else {
                return Ok(Scanned { next: Cursor::default(), ..scanned });
            };
            let (word, gone) = {
                let local = table.local.lock();
                (local.word, local.gone)
            };
            if gone || !word.covers(cursor.top()) {
                continue;
            }
            // After a merge the subtable has buckets before the cursor that the scan has not seen.
            let is_merged = word.depth < cursor.depth();
            let bucket = if is_merged { 0 } else { cursor.bucket() };
            if bucket < self.shape.buckets() {
                let Some(keys) = self.scan_bucket(&trip, &table, bucket, word.depth).await? else {
                    continue;
                };
                scanned.keys.extend(keys);
            }
            scanned.next = Cursor::behind(word, bucket, self.shape.buckets());
        }
        Ok(scanned)
    }

    /// The keys in a bucket. `None` if the subtable was split or merged meanwhile.
    async fn scan_bucket(
        &self,
        trip: &super::trips::Trip<'_>,
        table: &Table,
        bucket: u32,
        depth: u32,
    ) -> Result<Option<Vec<Vec<u8>>>, Error> {
        let words = match self.mirrored_bucket(table, bucket) {
            Some(words) => words,
            None => {
                let mut bytes = [0; 8 * SLOTS];
                let at = table.spot.bucket(bucket).plus(8);
                self.run(trip, &mut [Step::Read { at, into: &mut bytes }]).await?;
                std::array::from_fn(|i| word(&bytes, 8 * i))
            }
        };
        let now = self.environment.now();
        let mut keys = Vec::new();
        let slots = words.iter().filter_map(|word| Slot::parse(*word));
        self.read_keys(trip, slots, |_, head, key| {
            if !head.is_expired(now) {
                keys.push(key.to_vec());
            }
        })
        .await?;
        // A split clears the moved slots after the directory has changed.
        let local = table.local.lock();
        Ok((!local.gone && local.word.depth == depth).then_some(keys))
    }

    fn mirrored_bucket(&self, table: &Table, bucket: u32) -> Option<[u64; SLOTS]> {
        let local = table.local.lock();
        let mirror = local.mirror.as_ref()?;
        let first = bucket as usize * SLOTS;
        Some(std::array::from_fn(|i| mirror.entry(first + i).map_or(0, |entry| entry.word)))
    }

    /// A key that is there, chosen at random.
    pub async fn random_key(&self, db: u8) -> Result<Option<Vec<u8>>, Error> {
        self.key(db, b"")?;
        if self.is_empty(db) {
            return Ok(None);
        }
        let start = self.environment.random();
        let bucket = self.environment.random() % u64::from(self.shape.buckets());
        let begin = match self.databases[usize::from(db)].table(start) {
            Some(table) => {
                let word = table.local.lock().word;
                Cursor::new(word.prefix, word.depth, bucket as u32)
            }
            None => return Ok(None),
        };
        for cursor in [begin, Cursor::default()] {
            let mut found = self.scan(db, cursor, 1).await?;
            if !found.keys.is_empty() {
                let chosen = self.environment.random() as usize % found.keys.len();
                return Ok(Some(found.keys.swap_remove(chosen)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_has_the_layout_of_the_design() {
        let cursor = Cursor::new(0xabcd_ef00_0000, 24, 254);
        assert_eq!((cursor.top() >> 40, cursor.depth(), cursor.bucket()), (0xabcdef, 24, 254));
        assert!(Cursor::new(0xffff_ff00_0000, 24, 254).0 < 1 << 53, "exact in a float64");
        assert!(!Cursor::new(0, 0, 0).is_end() && Cursor::default().is_end());
        assert_eq!(Cursor::default().depth(), 0);
    }
}
