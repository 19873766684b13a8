//! Steps through all keys of a database.
//!
//! A split keeps the indices of slots, so a cursor of an old subtable is right for its successors.

use super::look::Seen;
use super::words::{is_tentative, slot_of};
use super::{Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::Block;
use crate::layout::class;
use crate::layout::root::DATABASES;
use crate::layout::table::Slot;
use crate::reach::{Reach, Step};
use crate::search::{Buckets, slots_of};
use crate::store::trips::Operation;
use crate::store::{Cursor, Scanned};

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Returns at least `count` keys from `cursor` on, unless the scan ends before. A bucket is
    /// never divided over two steps. A key that is there all the time is returned at least once.
    pub async fn scan(&self, db: u8, cursor: Cursor, count: usize) -> Result<Scanned, Error> {
        let mut scanned = Scanned { keys: Vec::new(), next: cursor };
        let op = self.begin(Operation::Scan).await?;
        loop {
            let step = self.scan_bucket(&op, db, scanned.next).await?;
            let Some((slots, next)) = step else {
                return Ok(Scanned { next: Cursor::default(), ..scanned });
            };
            self.read_keys(&op, &slots, &mut scanned.keys).await?;
            scanned.next = next;
            if next.is_end() || scanned.keys.len() >= count.max(1) {
                return Ok(scanned);
            }
        }
    }

    /// Number of keys of database `db`, also of those that have expired. Reads the whole index: a
    /// shared index has no counter, since each insertion would change it.
    pub async fn len(&self, db: u8) -> Result<u64, Error> {
        let (mut keys, mut cursor) = (0, Cursor::default());
        loop {
            let op = self.begin(Operation::Scan).await?;
            let Some((slots, next)) = self.scan_bucket(&op, db, cursor).await? else {
                return Ok(keys);
            };
            keys += slots.len() as u64;
            cursor = next;
            if next.is_end() {
                return Ok(keys);
            }
        }
    }

    /// The final slots of the bucket at `cursor`, and the cursor behind it. `None`: the database
    /// has no directory.
    async fn scan_bucket(
        &self,
        op: &Op<'_>,
        db: u8,
        cursor: Cursor,
    ) -> Result<Option<(Vec<Slot>, Cursor)>, Error> {
        if usize::from(db) >= DATABASES {
            return Err(Error::NoDatabase(db));
        }
        // A foreign cursor may name a bucket that no subtable has.
        let bucket = cursor.bucket().min(self.shape.buckets() - 1);
        let buckets = Buckets::around(bucket);
        let seen = self.look_at(op, db, (cursor.top(), buckets), false, None).await?;
        let Some(Seen { word, view, .. }) = seen else { return Ok(None) };
        let finals = slots_of(bucket).map(|slot| view.slot(slot)).filter(|raw| !is_tentative(*raw));
        let next = Cursor::behind(word, bucket, self.shape.buckets());
        Ok(Some((finals.filter_map(slot_of).collect(), next)))
    }

    /// Appends the keys of the blocks in `slots`, unless they have expired.
    async fn read_keys(
        &self,
        op: &Op<'_>,
        slots: &[Slot],
        keys: &mut Vec<Vec<u8>>,
    ) -> Result<(), Error> {
        let length = |slot: &Slot| class::length(self.slab, slot.length).unwrap_or(0) as usize;
        let mut blocks: Vec<Vec<u8>> = slots.iter().map(|slot| vec![0; length(slot)]).collect();
        if blocks.is_empty() {
            return Ok(());
        }
        let reads = slots.iter().zip(&mut blocks);
        let mut steps: super::access::Steps<'_> =
            reads.map(|(slot, into)| Step::Read { at: slot.place.at(0), into }).collect();
        self.run(&op.trip, &mut steps).await?;
        drop(steps);
        let now = self.environment.now();
        for (slot, bytes) in slots.iter().zip(&blocks) {
            let block = Block::parse(slot.place, bytes);
            let block = block.map_err(Error::malformed(slot.place.at(0)))?;
            if !block.head.is_expired(now) {
                keys.push(block.key.to_vec());
            }
        }
        Ok(())
    }
}
