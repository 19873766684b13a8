//! The look-up of a key.

use std::ops::Range;

use smallvec::SmallVec;

use super::access::Steps;
use super::words::{DOUBLING, FROZEN, is_frozen, is_tentative, slot_of};
use super::{Key, Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{HEADER_BYTES, Head};
use crate::layout::directory::Entry;
use crate::layout::table::{BucketWord, Shape, Slot, Spot};
use crate::layout::{Malformed, class};
use crate::place::{Address, Place};
use crate::reach::{Reach, Step, Stopped};
use crate::search::{Buckets, View};
use crate::store::pieces;
use crate::store::trips::Trip;

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

/// A block whose key is the operation's key.
#[derive(Clone, Debug)]
pub(super) struct Hit {
    /// Number of the slot.
    pub slot: usize,
    /// The slot's word, with flags.
    pub raw: u64,
    /// The slot's word without flags.
    pub word: Slot,
    /// The header of the block.
    pub head: Head,
    /// The bytes that were read: a range of the operation's buffer.
    pub range: Range<usize>,
}

/// The slots that a search reads.
#[derive(Clone, Copy)]
pub(super) struct Among<'a> {
    /// The buckets.
    pub view: &'a View,
    /// True: also tentative slots that are not frozen.
    pub tentative: bool,
    /// Slots that are passed over.
    pub known: &'a [usize],
}

/// The buckets of a key.
pub(super) struct Seen {
    /// Place of the subtable.
    pub table: Place,
    /// The subtable's bucket word.
    pub word: BucketWord,
    /// The buckets.
    pub view: View,
}

/// The subtables that a client has found in the header of a subtable that was split.
pub(super) struct Successors {
    /// The bucket word of the old subtable.
    pub old: BucketWord,
    /// Bucket word and place of the new ones.
    pub new: [(BucketWord, Place); 2],
}

impl Successors {
    /// The subtable of the hash `upper`.
    pub fn of(&self, upper: u64) -> Place {
        let [low, high] = self.new;
        if high.0.covers(upper) { high.1 } else { low.1 }
    }
}

/// Bytes that are read of the header of a subtable: from the bucket word to the upper successor.
const HEADER_READ: usize = 56;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Where the subtable at `table` lies.
    pub(super) fn spot(&self, table: Place) -> Spot {
        Spot { header: table, pieces: Vec::new(), shape: self.shape }
    }

    /// Reads the two combined buckets of `key`, in one round trip if the cache is fresh enough.
    /// `along` is a WRITE that is posted with the first round trip. `changes`: the operation may
    /// change the buckets. `None`: the database has no directory.
    pub(super) async fn look(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        changes: bool,
        along: Option<(Address, &[u8])>,
    ) -> Result<Option<Seen>, Error> {
        let upper = key.hash.upper;
        let buckets = Buckets::of(upper, self.shape.groups);
        self.look_at(op, key.db, (upper, buckets), changes, along).await
    }

    /// Reads two combined buckets of the subtable that has the hash `upper`.
    pub(super) async fn look_at(
        &self,
        op: &Op<'_>,
        db: u8,
        (upper, buckets): (u64, Buckets),
        changes: bool,
        mut along: Option<(Address, &[u8])>,
    ) -> Result<Option<Seen>, Error> {
        let mut view = View::new(buckets);
        let mut table = None;
        for _ in 0..self.settings.attempts {
            let named = match table {
                Some(_) => None,
                None => self.named(op, db, upper),
            };
            let place = match (table, named) {
                (Some(table), _) => table,
                (None, Some(named)) => {
                    Entry::parse(named.word).map_err(Error::malformed(named.at))?.table
                }
                (None, None) => match self.load(op, db).await? {
                    0 => return Ok(None),
                    _ => continue,
                },
            };
            let verify = named.filter(|named| !named.is_fresh);
            let mut verified = [[0; 8]; 2];
            let result = {
                let mut steps = Steps::new();
                steps.extend(along.map(|(at, from)| Step::Write { at, from }));
                if let Some(named) = verify {
                    let at = [self.root_word(db), named.at];
                    let reads = at.into_iter().zip(&mut verified);
                    steps.extend(reads.map(|(at, into)| Step::Read { at, into }));
                }
                steps.extend(self.read_buckets(place, &mut view));
                self.run(&op.trip, &mut steps).await
            };
            match result {
                // The cached word is of a subtable that was split and freed since.
                Err(Error::Stopped(Stopped::Freed(_))) if verify.is_some() => {
                    *self.directory(db).lock() = None;
                    continue;
                }
                result => result?,
            }
            along = None;
            if let Some(named) = verify {
                let [root, word] = verified.map(u64::from_be_bytes);
                if root & !DOUBLING != named.root {
                    *self.directory(db).lock() = None;
                    continue;
                }
                self.verified(op, db, named, word);
                if word != named.word {
                    continue;
                }
            }
            match self.judge(place, upper, &view)? {
                Some(word) => return Ok(Some(Seen { table: place, word, view })),
                None if named.is_some_and(|named| named.is_fresh) => self.doubt(db, named),
                None => {
                    let successors = self.successors(&op.trip, place).await?;
                    let Some(successors) = successors else {
                        let what = Malformed("a subtable that was split names no successor");
                        return Err(Error::Malformed { at: place.at(0), what });
                    };
                    if changes {
                        self.publish(op, db, place, &successors).await?;
                    }
                    table = Some(successors.of(upper));
                }
            }
        }
        Err(Error::contended(self.settings.attempts))
    }

    /// The bucket word of the buckets in `view`. `None`: the subtable was split.
    fn judge(&self, table: Place, upper: u64, view: &View) -> Result<Option<BucketWord>, Error> {
        let malformed = Error::malformed(table.at(0));
        let mut first = None;
        for word in view.bucket_words() {
            let word = BucketWord::parse(word).map_err(&malformed)?;
            if !word.covers(upper) {
                return Err(malformed(Malformed("a bucket has the keys of another subtable")));
            }
            if word.moving {
                return Ok(None);
            }
            first = Some(word);
        }
        Ok(first)
    }

    /// The steps that read the two combined buckets of `view`.
    pub(super) fn read_buckets<'v>(&self, table: Place, view: &'v mut View) -> [Step<'v>; 2] {
        let at = view.buckets.first.map(|bucket| bucket_at(table, self.shape, bucket));
        let [one, two] = &mut view.bytes;
        [Step::Read { at: at[0], into: one }, Step::Read { at: at[1], into: two }]
    }

    /// Address of slot `slot`.
    pub(super) fn slot_at(&self, table: Place, slot: usize) -> Address {
        let (bucket, slot) =
            (slot / crate::layout::table::SLOTS, slot % crate::layout::table::SLOTS);
        bucket_at(table, self.shape, bucket as u32).plus(8 * (1 + slot as u64))
    }

    /// Reads the successors of `table`. `None`: the subtable is not split.
    pub(super) async fn successors(
        &self,
        trip: &Trip<'_>,
        table: Place,
    ) -> Result<Option<Successors>, Error> {
        let mut bytes = [0; HEADER_READ];
        self.run(trip, &mut [Step::Read { at: table.at(0), into: &mut bytes }]).await?;
        let word = |at: u64| crate::layout::word(&bytes, at as usize);
        let malformed = Error::malformed(table.at(0));
        let old = BucketWord::parse(word(crate::layout::table::HEADER_WORD));
        let old = old.map_err(&malformed)?;
        let low = Place::of(word(super::words::SUCCESSOR));
        if low.is_none() {
            return Ok(None);
        }
        let mut high = word(super::words::UPPER);
        if high == 0 {
            // The lower successor cannot have been split and freed: no client changes it before the
            // old header has the upper successor.
            [high] = self.words(trip, [low.at(super::words::SIBLING)]).await?;
        }
        let new = super::split::halves(old);
        Ok(Some(Successors { old, new: [(new[0], low), (new[1], Place::of(high))] }))
    }

    /// Reads the blocks whose fingerprint fits, and returns those of `key`.
    pub(super) async fn search(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        want: Want,
        among: Among<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<SmallVec<[Hit; 2]>, Error> {
        let Among { view, tentative, known } = among;
        let mut candidates = SmallVec::<[(usize, u64, Slot, Range<usize>); 2]>::new();
        let start = buffer.len();
        let mut end = start;
        for slot in view.buckets.slots().filter(|slot| !known.contains(slot)) {
            let raw = view.slot(slot);
            // A tentative slot that is frozen never becomes final, and its block may be used again.
            let is_open = !is_tentative(raw) || tentative && !is_frozen(raw);
            let Some(word) = slot_of(raw).filter(|_| is_open) else { continue };
            if word.fingerprint == key.hash.fingerprint() {
                let bytes = self.read_bytes(word, want, key.bytes.len())?;
                candidates.push((slot, raw, word, end..end + bytes));
                end += bytes;
            }
        }
        let mut hits = SmallVec::new();
        if candidates.is_empty() {
            return Ok(hits);
        }
        buffer.resize(end, 0);
        {
            let mut steps = Steps::new();
            let mut rest = &mut buffer[start..];
            for (_, _, word, range) in &candidates {
                let (into, more) = rest.split_at_mut(range.len());
                steps.push(Step::Read { at: word.place.at(0), into });
                rest = more;
            }
            self.run(&op.trip, &mut steps).await?;
        }
        for (slot, raw, word, range) in candidates {
            let bytes = &buffer[range.clone()];
            let head = Head::parse(bytes).map_err(Error::malformed(word.place.at(0)))?;
            let is_same = head.upper == key.hash.upper
                && head.key as usize == key.bytes.len()
                && bytes.get(HEADER_BYTES..HEADER_BYTES + key.bytes.len()) == Some(key.bytes);
            if is_same {
                hits.push(Hit { slot, raw, word, head, range });
            }
        }
        Ok(hits)
    }

    fn read_bytes(&self, word: Slot, want: Want, key: usize) -> Result<usize, Error> {
        let at = word.place.at(0);
        let left = self.slab - (at.offset % u64::from(self.slab)) as u32;
        let whole = pieces::block_bytes(self.slab, word.length, left) as usize;
        if whole > left as usize || whole < HEADER_BYTES {
            let what = Malformed("a slot names bytes beyond a slab");
            return Err(Error::Malformed { at, what });
        }
        let is_whole = match want {
            Want::Presence => false,
            Want::Places => word.length == class::PIECES,
            Want::Value => true,
        };
        Ok(if is_whole { whole } else { whole.min(HEADER_BYTES + key) })
    }
}

/// True if two words of a slot name one block, whether a split has frozen the slot or not.
pub(super) const fn is_same_block(a: u64, b: u64) -> bool {
    (a ^ b) & !FROZEN == 0
}

/// Address of bucket `bucket` of the subtable at `table`, which is one block.
pub(super) fn bucket_at(table: Place, shape: Shape, bucket: u32) -> Address {
    debug_assert!(bucket < shape.buckets() && shape.pieces == 0);
    let group = u64::from(bucket / 3 * crate::layout::table::GROUP_BYTES);
    let within = u64::from(bucket % 3) * crate::layout::table::BUCKET_BYTES as u64;
    table.at(u64::from(crate::layout::table::HEADER_BYTES) + group + within)
}
