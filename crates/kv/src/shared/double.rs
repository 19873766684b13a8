//! Doubling of a directory.
//!
//! 1. Set the flag of the root's word. From now on no subtable that was split is retired.
//! 2. Copy the words into a new directory.
//! 3. CAS the root's word. This step decides between clients that double at once.
//!
//! A word that changed during the copy is older in the new directory. The subtable that it names
//! was split then, and leads to its successors.

use super::access::Steps;
use super::words::{DOUBLING, next_root};
use super::{Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::DEPTH_MAX;
use crate::layout::directory::{Entry, Sizes, encode_header};
use crate::layout::put;
use crate::layout::table::BucketWord;
use crate::place::Place;
use crate::reach::{Reach, Step};
use crate::store::trips::Operation;

/// A directory that no word names yet.
struct NewDirectory {
    header: Place,
    pieces: Vec<Place>,
    bytes: Vec<u8>,
    sizes: Sizes,
}

impl NewDirectory {
    fn write_all(&self) -> Steps<'_> {
        let (header, words) = self.bytes.split_at(self.sizes.header_bytes());
        let mut steps = Steps::from_iter([Step::Write { at: self.header.at(0), from: header }]);
        let pieces = words.chunks(8 * self.sizes.words_of_piece).zip(&self.pieces);
        steps.extend(pieces.map(|(from, piece)| Step::Write { at: piece.at(0), from }));
        steps
    }
}

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Doubles the directory until its depth is at least `wanted`.
    pub(super) async fn double(&self, op: &Op<'_>, db: u8, wanted: u32) -> Result<(), Error> {
        if wanted > DEPTH_MAX {
            return Err(Error::TooDeep);
        }
        loop {
            let root = self.load(op, db).await?;
            let depth = self.directory(db).lock().as_ref().map(|directory| directory.depth);
            if depth.is_none_or(|depth| depth >= wanted) {
                return Ok(());
            }
            let flagged = root | DOUBLING;
            let at = self.root_word(db);
            if root != flagged && self.swap(&op.trip, at, root, flagged).await? != root {
                continue;
            }
            self.copy_directory(db, flagged).await?;
        }
    }

    /// Ends a doubling that another client has begun.
    pub(super) async fn finish_doubling(&self, op: &Op<'_>, db: u8) -> Result<(), Error> {
        if self.load(op, db).await? & DOUBLING == 0 {
            return Ok(());
        }
        let depth = self.directory(db).lock().as_ref().map(|directory| directory.depth);
        match depth {
            Some(depth) => self.double(op, db, depth + 1).await,
            None => Ok(()),
        }
    }

    /// Replaces the directory of the root's word `flagged` by one of twice the size.
    async fn copy_directory(&self, db: u8, flagged: u64) -> Result<(), Error> {
        let trip = self.counters.begin(Operation::Double);
        let op = Op { trip, running: self.epochs.begin() };
        let at = self.root_word(db);
        let [root] = self.words(&op.trip, [at]).await?;
        if root != flagged {
            return Ok(());
        }
        let Some(old) = self.read_directory(&op, db, root).await? else { return Ok(()) };
        let words = old.words().flat_map(|word| [word, word]);
        let new = self.new_directory(old.depth + 1, words).await?;
        self.run(&op.trip, &mut new.write_all()).await?;
        let after = next_root(flagged, old.depth + 1, new.header);
        if self.swap(&op.trip, at, flagged, after).await? != flagged {
            self.free_directory(&new);
            return Ok(());
        }
        self.epochs.retire(old.header, old.sizes.header_bytes() as u32);
        for (i, piece) in old.pieces.iter().enumerate() {
            self.epochs.retire(*piece, old.sizes.piece_bytes(i) as u32);
        }
        Ok(())
    }

    /// Frees a directory that no word has named.
    fn free_directory(&self, new: &NewDirectory) {
        self.blocks.release(new.header, new.sizes.header_bytes() as u32);
        for (i, piece) in new.pieces.iter().enumerate() {
            self.blocks.release(*piece, new.sizes.piece_bytes(i) as u32);
        }
    }

    /// Gives a database its first directory, with one subtable.
    pub(super) async fn begin_database(&self, op: &Op<'_>, db: u8) -> Result<(), Error> {
        let table = self.allocate(self.shape.header_bytes() as usize).await?;
        let image = self.image(db, BucketWord::default(), Place::default(), std::iter::empty());
        let entry = Entry { depth: 0, locked: false, table };
        let new = match self.new_directory(0, std::iter::once(entry.word())).await {
            Ok(new) => new,
            Err(error) => {
                self.free_table(table);
                return Err(error);
            }
        };
        let mut steps = new.write_all();
        steps.push(Step::Write { at: table.at(0), from: &image });
        self.run(&op.trip, &mut steps).await?;
        let root = next_root(0, 0, new.header);
        if self.swap(&op.trip, self.root_word(db), 0, root).await? != 0 {
            self.free_table(table);
            self.free_directory(&new);
        }
        Ok(())
    }

    /// Allocates and encodes a directory of `depth`.
    async fn new_directory(
        &self,
        depth: u32,
        words: impl Iterator<Item = u64>,
    ) -> Result<NewDirectory, Error> {
        let sizes = Sizes::of(depth, self.slab);
        let lengths = std::iter::once(sizes.header_bytes());
        let mut places = Vec::with_capacity(1 + sizes.pieces);
        for bytes in lengths.chain((0..sizes.pieces).map(|piece| sizes.piece_bytes(piece))) {
            match self.allocate(bytes).await {
                Ok(place) => places.push((place, bytes)),
                Err(error) => {
                    let free = |(place, bytes): &(Place, usize)| {
                        self.blocks.release(*place, *bytes as u32);
                    };
                    places.iter().for_each(free);
                    return Err(error);
                }
            }
        }
        let mut places = places.into_iter().map(|(place, _)| place);
        let header = places.next().unwrap_or_default();
        let pieces: Vec<Place> = places.collect();
        let mut bytes = vec![0; sizes.header_bytes() + 8 * sizes.words];
        encode_header(&pieces, &mut bytes);
        for (i, word) in words.enumerate() {
            put(&mut bytes, sizes.header_bytes() + 8 * i, word);
        }
        Ok(NewDirectory { header, pieces, bytes, sizes })
    }
}
