//! Subtables and directories as bytes, and the steps that write them.

use super::Store;
use super::access::Steps;
use super::owned::Owned;
use super::trips::Trip;
use crate::blocks::{Blocks, NoBlock};
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::directory::{self, Entry, Sizes};
use crate::layout::put;
use crate::layout::table::{self, BUCKET_BYTES, BucketWord, HEADER_WORD, SLOTS, Spot};
use crate::place::{Address, Place};
use crate::reach::{Reach, Step};
use crate::table::Table;

/// The bytes of a subtable: the header with its list of pieces, then the groups.
pub(super) struct Image {
    bytes: Vec<u8>,
    groups_at: usize,
}

impl Image {
    /// A subtable with `slots`.
    pub fn new(spot: &Spot, header: table::Header, slots: &[u64]) -> Self {
        let groups_at = table::HEADER_BYTES as usize + 8 * spot.pieces.len();
        let mut bytes = vec![0; groups_at + spot.shape.group_bytes()];
        table::encode_header(spot, header, &mut bytes);
        let word = header.whole.word();
        for (bucket, slots) in slots.chunks(SLOTS).enumerate() {
            let at = groups_at + bucket * BUCKET_BYTES;
            put(&mut bytes, at, word);
            for (i, slot) in slots.iter().enumerate() {
                put(&mut bytes, at + 8 * (1 + i), *slot);
            }
        }
        Self { bytes, groups_at }
    }

    /// The steps that write the whole subtable.
    pub fn write_all(&self, spot: &Spot) -> Steps<'_> {
        if spot.pieces.is_empty() {
            let step = Step::Write { at: spot.header.at(0), from: &self.bytes };
            return Steps::from_iter([step]);
        }
        let from = &self.bytes[..self.groups_at];
        let mut steps = self.write_groups(spot);
        steps.push(Step::Write { at: spot.header.at(0), from });
        steps
    }

    /// The steps that write the groups.
    pub fn write_groups(&self, spot: &Spot) -> Steps<'_> {
        let groups = &self.bytes[self.groups_at..];
        spot.parts().map(|(at, range)| Step::Write { at, from: &groups[range] }).collect()
    }

    /// The step that writes the header's bucket word.
    pub fn write_word(&self, spot: &Spot) -> Step<'_> {
        let start = HEADER_WORD as usize;
        Step::Write { at: spot.header.at(HEADER_WORD), from: &self.bytes[start..start + 8] }
    }
}

/// A directory that is being written.
pub(super) struct NewDirectory {
    pub header: Place,
    pub pieces: Vec<Place>,
    bytes: Vec<u8>,
    sizes: Sizes,
}

impl NewDirectory {
    /// The steps that write the directory.
    pub fn write_all(&self) -> Steps<'_> {
        let (header, words) = self.bytes.split_at(self.sizes.header_bytes());
        let mut steps = Steps::from_iter([Step::Write { at: self.header.at(0), from: header }]);
        let pieces = words.chunks(8 * self.sizes.words_of_piece).zip(&self.pieces);
        steps.extend(pieces.map(|(from, piece)| Step::Write { at: piece.at(0), from }));
        steps
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Allocates the blocks of a subtable.
    pub(super) async fn allocate_table(
        &self,
        owned: &mut Owned<'_, B>,
        stripe: u32,
    ) -> Result<Spot, NoBlock> {
        let shape = self.shape;
        let header = owned.allocate(stripe, shape.header_bytes()).await?;
        let mut pieces = Vec::with_capacity(shape.pieces as usize);
        for piece in 0..shape.pieces {
            pieces.push(owned.allocate(stripe, shape.piece_bytes(piece)).await?);
        }
        Ok(Spot { header, pieces, shape })
    }

    /// Allocates and encodes a directory of `depth`.
    pub(super) async fn encode_directory(
        &self,
        owned: &mut Owned<'_, B>,
        depth: u32,
        entries: impl Iterator<Item = Entry>,
    ) -> Result<NewDirectory, NoBlock> {
        let sizes = Sizes::of(depth, self.slab);
        let header = owned.allocate(0, sizes.header_bytes() as u32).await?;
        let mut pieces = Vec::with_capacity(sizes.pieces);
        for piece in 0..sizes.pieces {
            pieces.push(owned.allocate(0, sizes.piece_bytes(piece) as u32).await?);
        }
        let mut bytes = vec![0; sizes.header_bytes() + 8 * sizes.words];
        directory::encode_header(&pieces, &mut bytes);
        for (i, entry) in entries.enumerate() {
            put(&mut bytes, sizes.header_bytes() + 8 * i, entry.word());
        }
        Ok(NewDirectory { header, pieces, bytes, sizes })
    }

    /// Writes `words` of a directory of `depth` from word `index` on.
    pub(super) async fn write_words(
        &self,
        trip: &Trip<'_>,
        (depth, pieces): (u32, &[Place]),
        index: usize,
        words: &[u8],
    ) -> Result<(), Error> {
        let sizes = Sizes::of(depth, self.slab);
        let mut steps = Steps::new();
        let (mut index, mut rest) = (index, words);
        while let (false, Some(at)) = (rest.is_empty(), sizes.address(pieces, index)) {
            let left = sizes.words_of_piece - index % sizes.words_of_piece;
            let (from, more) = rest.split_at(rest.len().min(8 * left));
            steps.push(Step::Write { at, from });
            (index, rest) = (index + from.len() / 8, more);
        }
        self.commit(trip, &mut steps).await
    }

    /// The slots of a subtable that no writer changes: those of the mirror, or read.
    pub(super) async fn slots(&self, trip: &Trip<'_>, table: &Table) -> Result<Box<[u64]>, Error> {
        if let Some(mirror) = &table.local.lock().mirror {
            return Ok(mirror.slots.clone());
        }
        let mut bytes = self.buffers.take();
        self.read_groups(trip, &table.spot, &mut bytes).await?;
        Ok(slots_of(&bytes))
    }

    /// Reads the groups of a subtable into `bytes`.
    pub(super) async fn read_groups(
        &self,
        trip: &Trip<'_>,
        spot: &Spot,
        bytes: &mut Vec<u8>,
    ) -> Result<(), Error> {
        bytes.resize(spot.shape.group_bytes(), 0);
        let mut steps = Steps::new();
        let mut rest = bytes.as_mut_slice();
        for (at, range) in spot.parts() {
            let (into, more) = rest.split_at_mut(range.len());
            steps.push(Step::Read { at, into });
            rest = more;
        }
        self.run(trip, &mut steps).await
    }
}

/// The slots in the bytes of a subtable's groups.
pub(super) fn slots_of(groups: &[u8]) -> Box<[u64]> {
    let buckets = groups.chunks_exact(BUCKET_BYTES);
    let words = buckets.flat_map(|bucket| (1..=SLOTS).map(|i| crate::layout::word(bucket, 8 * i)));
    words.collect()
}

/// The directory word of a subtable with the bucket word `word`.
pub(super) fn entry_of(table: &Table, word: BucketWord) -> Entry {
    Entry { depth: word.depth, locked: false, table: table.spot.header }
}

/// Index and number of the words of a subtable in a directory of `depth`.
pub(super) fn words_of(word: BucketWord, depth: u32) -> (usize, usize) {
    (crate::hash::index(word.prefix << 16, depth), 1 << (depth - word.depth))
}

/// The address of a database's word in the root.
pub(super) fn root_word(root: Place, db: u8) -> Address {
    crate::layout::root::directory_word(root, db.into())
}
