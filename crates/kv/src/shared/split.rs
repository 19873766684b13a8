//! Split of a subtable.
//!
//! 1. Lock the subtable: by a word of the header, or by an exclusive right to the header. The lock
//!    only saves work: two clients that split one subtable at once do no harm.
//! 2. Freeze all slots, each by a CAS, also the empty ones. Changes of the subtable wait from now
//!    on. Readers do not.
//! 3. Write two new subtables with the final slots, at the same indices.
//! 4. CAS the place of the lower one into the old header. This step decides.
//! 5. Write the place of the upper one into the old header, then mark all buckets as moved, so that
//!    readers go on to the new subtables.
//! 6. Let the directory words name the new subtables, and retire the old one.
//!
//! Each client that finds a decided split carries out 5 and 6 before it changes a new subtable. So
//! a client that crashes in a split leaves a locked subtable before 4, and only memory after 4.

use smallvec::SmallVec;

use super::access::Steps;
use super::look::{Successors, bucket_at};
use super::words::{
    FROZEN, LOCK, SIBLING, SUCCESSOR, UPPER, is_frozen, is_tentative, is_unlocked, lock_word,
    slot_of,
};
use super::{Key, Op, SharedStore, SplitLock};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::DEPTH_MAX;
use crate::layout::block::{HEADER_BYTES, Head};
use crate::layout::table::{self, BUCKET_BYTES, BucketWord, Header, SLOTS, Slot, encode_header};
use crate::layout::{put, word};
use crate::place::Place;
use crate::reach::{Range, Reach, Step, Stopped};
use crate::store::trips::Operation;

/// Subtables that wait for the end of a doubling, until this client ends the doubling itself.
const PENDING: usize = 8;

/// A subtable that was split by this client, and that a directory may name still.
#[derive(Clone, Copy, Debug)]
pub(super) struct Old {
    pub db: u8,
    table: Place,
    word: BucketWord,
    new: [(BucketWord, Place); 2],
}

/// The error of a split.
struct Failed {
    /// True: this client has frozen no slot.
    is_before: bool,
    error: Error,
}

/// The bucket words of the two successors of a subtable.
pub(super) fn halves(word: BucketWord) -> [BucketWord; 2] {
    let depth = word.depth + 1;
    let low = BucketWord { depth, moving: false, version: 0, prefix: word.prefix };
    [low, BucketWord { prefix: word.prefix | 1 << (48 - depth), ..low }]
}

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Brings a split of `table` forward, or begins one if `is_full`. Returns after one step if
    /// another client has the lock.
    pub(super) async fn help_split(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        table: Place,
        is_full: bool,
    ) -> Result<(), Error> {
        let at = [LOCK, SUCCESSOR, table::HEADER_WORD].map(|offset| table.at(offset));
        let [lock, successor, whole] = self.words(&op.trip, at).await?;
        if successor != 0 {
            if let Some(successors) = self.successors(&op.trip, table).await? {
                self.publish(op, key.db, table, &successors).await?;
            }
            return Ok(());
        }
        let now = self.environment.now();
        let is_exclusive = self.settings.lock == SplitLock::Exclusive;
        if !is_exclusive && (!is_unlocked(lock, now) || lock == 0 && !is_full) {
            return Ok(());
        }
        let whole = BucketWord::parse(whole).map_err(Error::malformed(table.at(0)))?;
        if whole.depth == DEPTH_MAX {
            return Err(Error::TooDeep);
        }
        let limbo = self.limbo_bytes();
        if limbo > self.settings.limbo_max {
            return Err(Error::HeldBack(limbo));
        }
        let until = match self.settings.lock {
            SplitLock::Plain => u64::MAX,
            SplitLock::Lease(ms) => now.saturating_add(ms),
            SplitLock::Exclusive => {
                self.split_exclusively(op, key.db, table, whole).await?;
                return self.bury(op).await;
            }
        };
        let mine = lock_word(self.client(), until);
        if self.swap(&op.trip, at[0], lock, mine).await? != lock {
            return Ok(());
        }
        if let Err(error) = self.prepare_and_split(key.db, table, whole).await {
            if error.is_before {
                self.swap(&op.trip, at[0], mine, lock).await?;
            } else if matches!(error.error, Error::Contended { .. }) {
                // Some slots are frozen, so the split must go on: a lock that has ended lets any
                // client do so, also the next operation of this one.
                self.swap(&op.trip, at[0], mine, lock_word(self.client(), now)).await?;
            }
            return Err(error.error);
        }
        self.bury(op).await
    }

    /// Splits `table` under an exclusive right to its header, unless another client has split the
    /// table before.
    async fn split_exclusively(
        &self,
        op: &Op<'_>,
        db: u8,
        table: Place,
        whole: BucketWord,
    ) -> Result<(), Error> {
        let range =
            Range { start: table.at(0), bytes: table::HEADER_BYTES, writes: true, exclusive: true };
        let right = match self.reach.open(range).await {
            Ok(right) => right,
            Err(Stopped::Busy) => return Ok(()),
            Err(stopped) => return Err(stopped.into()),
        };
        let result = match self.words(&op.trip, [table.at(SUCCESSOR)]).await {
            Ok([0]) => {
                self.prepare_and_split(db, table, whole).await.map_err(|failed| failed.error)
            }
            Ok([_]) => Ok(()),
            Err(error) => Err(error),
        };
        self.reach.close(right).await;
        result
    }

    /// Splits `table`, which this client has locked.
    async fn prepare_and_split(
        &self,
        db: u8,
        table: Place,
        whole: BucketWord,
    ) -> Result<(), Failed> {
        let split =
            Op { trip: self.counters.begin(Operation::Split), running: self.epochs.begin() };
        let mut places = Vec::new();
        if let Err(error) = self.prepare(&split, db, whole, &mut places).await {
            places.into_iter().for_each(|place| self.free_table(place));
            return Err(Failed { is_before: true, error });
        }
        let result = self.split(&split, db, table, whole, [places[0], places[1]]).await;
        result.map_err(|error| Failed { is_before: false, error })
    }

    /// Frees a subtable that no word has named.
    pub(super) fn free_table(&self, place: Place) {
        self.blocks.release(place, self.shape.header_bytes());
    }

    /// Makes room in the directory, and allocates the new subtables.
    async fn prepare(
        &self,
        op: &Op<'_>,
        db: u8,
        whole: BucketWord,
        places: &mut Vec<Place>,
    ) -> Result<(), Error> {
        self.double(op, db, whole.depth + 1).await?;
        for _ in 0..2 {
            places.push(self.allocate(self.shape.header_bytes() as usize).await?);
        }
        Ok(())
    }

    async fn split(
        &self,
        op: &Op<'_>,
        db: u8,
        table: Place,
        whole: BucketWord,
        [low, high]: [Place; 2],
    ) -> Result<(), Error> {
        let frozen = self.freeze(op, table).await;
        if let Err(Error::Contended { .. }) = frozen {
            // No word names them yet.
            [low, high].into_iter().for_each(|place| self.free_table(place));
        }
        let slots = frozen?;
        let heads = self.heads(op, &slots).await?;
        let new = halves(whole);
        let images = [(new[0], high), (new[1], Place::default())].map(|(word, sibling)| {
            let kept = slots.iter().zip(&heads).map(|(slot, head)| match head {
                Some(head) if word.covers(head.upper) => slot & !FROZEN,
                _ => 0,
            });
            self.image(db, word, sibling, kept)
        });
        let mut steps: Steps<'_> = [low, high]
            .into_iter()
            .zip(&images)
            .map(|(place, image)| Step::Write { at: place.at(0), from: image })
            .collect();
        self.run(&op.trip, &mut steps).await?;
        drop(steps);
        let before = self.swap(&op.trip, table.at(SUCCESSOR), 0, low.bits()).await?;
        if before != 0 {
            [low, high].into_iter().for_each(|place| self.free_table(place));
            if let Some(successors) = self.successors(&op.trip, table).await? {
                self.publish(op, db, table, &successors).await?;
            }
            return Ok(());
        }
        let new = [(new[0], low), (new[1], high)];
        self.split.lock().push(Old { db, table, word: whole, new });
        self.mark_moved(op, table, whole, high).await
    }

    /// Reads all slots of a subtable.
    pub(super) async fn slots(&self, op: &Op<'_>, table: Place) -> Result<Vec<u64>, Error> {
        let mut bytes = self.buffers.take();
        bytes.resize(self.shape.group_bytes(), 0);
        let at = bucket_at(table, self.shape, 0);
        self.run(&op.trip, &mut [Step::Read { at, into: &mut bytes }]).await?;
        let buckets = bytes.chunks_exact(BUCKET_BYTES);
        let slots = buckets.flat_map(|bucket| (1..=SLOTS).map(|i| word(bucket, 8 * i)));
        Ok(slots.collect())
    }

    /// Freezes all slots. Returns their words, which never change again.
    ///
    /// A turn leaves a slot open only if a client has changed the slot meanwhile. Clients that meet
    /// a frozen slot wait, so the turns end, unless a client changes a slot for ever.
    async fn freeze(&self, op: &Op<'_>, table: Place) -> Result<Vec<u64>, Error> {
        let mut slots = self.slots(op, table).await?;
        for _ in 0..self.settings.attempts {
            let open: Vec<usize> = (0..slots.len()).filter(|i| !is_frozen(slots[*i])).collect();
            if open.is_empty() {
                return Ok(slots);
            }
            let mut found = vec![0; open.len()];
            {
                let mut steps = Steps::new();
                for (slot, old) in open.iter().zip(&mut found) {
                    let (at, expected) = (self.slot_at(table, *slot), slots[*slot]);
                    steps.push(Step::Cas { at, expected, new: expected | FROZEN, old });
                }
                self.run(&op.trip, &mut steps).await?;
            }
            for (slot, found) in open.into_iter().zip(found) {
                let is_done = slots[slot] == found;
                slots[slot] = if is_done { found | FROZEN } else { found };
            }
        }
        let word = "a slot of the key's subtable, which is being split,";
        Err(Error::Contended { word, attempts: self.settings.attempts })
    }

    /// Reads the headers of the blocks of final slots, in one round trip.
    async fn heads(&self, op: &Op<'_>, slots: &[u64]) -> Result<Vec<Option<Head>>, Error> {
        let finals = slots.iter().enumerate().filter(|(_, slot)| !is_tentative(**slot));
        let finals: Vec<(usize, Slot)> =
            finals.filter_map(|(i, slot)| Some((i, slot_of(*slot)?))).collect();
        let mut heads = vec![None; slots.len()];
        if finals.is_empty() {
            return Ok(heads);
        }
        let mut bytes = self.buffers.take();
        bytes.resize(finals.len() * HEADER_BYTES, 0);
        {
            let into = bytes.chunks_exact_mut(HEADER_BYTES);
            let reads = finals.iter().zip(into);
            let mut steps: Steps<'_> =
                reads.map(|((_, word), into)| Step::Read { at: word.place.at(0), into }).collect();
            self.run(&op.trip, &mut steps).await?;
        }
        for ((i, word), bytes) in finals.iter().zip(bytes.chunks_exact(HEADER_BYTES)) {
            heads[*i] = Some(Head::parse(bytes).map_err(Error::malformed(word.place.at(0)))?);
        }
        Ok(heads)
    }

    /// The bytes of a subtable.
    pub(super) fn image(
        &self,
        db: u8,
        whole: BucketWord,
        sibling: Place,
        slots: impl Iterator<Item = u64>,
    ) -> Vec<u8> {
        let groups_at = table::HEADER_BYTES as usize;
        let mut bytes = vec![0; self.shape.header_bytes() as usize];
        let header = Header { db, whole, sequence: 0 };
        encode_header(&self.spot(Place::default()), header, &mut bytes);
        put(&mut bytes, SIBLING as usize, sibling.bits());
        for bucket in 0..self.shape.buckets() as usize {
            put(&mut bytes, groups_at + bucket * BUCKET_BYTES, whole.word());
        }
        for (i, slot) in slots.enumerate() {
            let at = groups_at + i / SLOTS * BUCKET_BYTES + 8 * (1 + i % SLOTS);
            put(&mut bytes, at, slot);
        }
        bytes
    }

    /// Carries out the steps behind the decision of a split, as far as readers and changes need.
    pub(super) async fn publish(
        &self,
        op: &Op<'_>,
        db: u8,
        table: Place,
        successors: &Successors,
    ) -> Result<(), Error> {
        self.mark_moved(op, table, successors.old, successors.new[1].1).await?;
        self.swing(op, db, successors.old, successors.new).await?;
        Ok(())
    }

    /// Marks the overflow buckets as moved, of which each combined bucket has one. The upper
    /// successor comes first: a client that finds a mark may find the lower one freed.
    async fn mark_moved(
        &self,
        op: &Op<'_>,
        table: Place,
        whole: BucketWord,
        high: Place,
    ) -> Result<(), Error> {
        let high = high.bits().to_be_bytes();
        let moved = BucketWord { moving: true, ..whole }.word().to_be_bytes();
        let mut steps = Steps::new();
        steps.push(Step::Write { at: table.at(UPPER), from: &high });
        for group in 0..self.shape.groups {
            let at = bucket_at(table, self.shape, 3 * group + 1);
            steps.push(Step::Write { at, from: &moved });
        }
        self.run(&op.trip, &mut steps).await
    }

    /// Retires subtables of this client that no directory names any more.
    pub(super) async fn bury(&self, op: &Op<'_>) -> Result<(), Error> {
        let open: SmallVec<[Old; 2]> = self.split.lock().drain(..).collect();
        if let Some(old) = open.first().filter(|_| open.len() > PENDING) {
            self.finish_doubling(op, old.db).await?;
        }
        for (i, old) in open.iter().enumerate() {
            match self.swing(op, old.db, old.word, old.new).await {
                Ok(true) => self.epochs.retire(old.table, self.shape.header_bytes()),
                Ok(false) => self.split.lock().push(*old),
                Err(error) => {
                    self.split.lock().extend_from_slice(&open[i..]);
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}
