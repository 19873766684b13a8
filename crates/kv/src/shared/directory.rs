//! The directory as a client has cached it, and the words in remote memory.
//!
//! A directory is a hint: a subtable that was split names its successors, so a stale word leads to
//! the right subtable too. But a stale word can name a subtable whose block is used again. So an
//! operation may use a cached word only if the word was verified since the latest tick of the
//! epochs; otherwise it reads the root's word and the directory word again, in the same round trip
//! as the buckets.

use super::access::Steps;
use super::words::DOUBLING;
use super::{Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::directory::{Entry, Sizes, parse_header};
use crate::layout::root::{DirectoryRoot, directory_word};
use crate::layout::table::BucketWord;
use crate::layout::word;
use crate::place::{Address, Place};
use crate::reach::{Reach, Step};

/// The tick of a word that must be verified.
const NEVER: u64 = u64::MAX;

/// The directory of one database, as a client has read it.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    /// The root's word, without the flag of a doubling.
    pub root: u64,
    pub depth: u32,
    pub sizes: Sizes,
    pub header: Place,
    pub pieces: Vec<Place>,
    words: Vec<Cached>,
}

#[derive(Clone, Copy, Debug)]
struct Cached {
    word: u64,
    /// The latest tick before the word was read.
    tick: u64,
}

/// A word of a directory, from the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    /// The root's word.
    pub root: u64,
    /// Address of the directory word.
    pub at: Address,
    /// The directory word.
    pub word: u64,
    /// Index of the directory word.
    pub index: usize,
    /// True if the word needs no verification.
    pub is_fresh: bool,
}

impl Directory {
    /// Addresses and words of the subtable with `word`.
    pub fn range(&self, word: BucketWord) -> Vec<(usize, Address)> {
        let first = crate::hash::index(word.prefix << 16, self.depth);
        let count = 1_usize << self.depth.saturating_sub(word.depth);
        let address = |index: usize| Some((index, self.sizes.address(&self.pieces, index)?));
        (first..first + count).filter_map(address).collect()
    }

    /// The words.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.words.iter().map(|cached| cached.word)
    }
}

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// The cached directory word of a key. `None`: no directory is cached.
    pub(super) fn named(&self, op: &Op<'_>, db: u8, upper: u64) -> Option<Named> {
        let directory = self.directory(db).lock();
        let directory = directory.as_ref()?;
        let index = crate::hash::index(upper, directory.depth);
        let cached = directory.words.get(index)?;
        Some(Named {
            root: directory.root,
            at: directory.sizes.address(&directory.pieces, index)?,
            word: cached.word,
            index,
            is_fresh: cached.tick == op.running.tick,
        })
    }

    /// Notes that a directory word was read, and which word it was.
    pub(super) fn verified(&self, op: &Op<'_>, db: u8, named: Named, word: u64) {
        if let Some(directory) = &mut *self.directory(db).lock()
            && directory.root == named.root
            && let Some(cached) = directory.words.get_mut(named.index)
        {
            *cached = Cached { word, tick: op.running.tick };
        }
    }

    /// Lets the next look-up verify a directory word, because its subtable was split.
    pub(super) fn doubt(&self, db: u8, named: Option<Named>) {
        if let (Some(directory), Some(named)) = (&mut *self.directory(db).lock(), named)
            && let Some(cached) = directory.words.get_mut(named.index)
        {
            cached.tick = NEVER;
        }
    }

    /// Address of the root's word of database `db`.
    pub(super) fn root_word(&self, db: u8) -> Address {
        directory_word(self.root, db.into())
    }

    /// Reads the directory of `db` into the cache. Returns the root's word, with its flag; 0 if the
    /// database has no directory.
    pub(super) async fn load(&self, op: &Op<'_>, db: u8) -> Result<u64, Error> {
        loop {
            let [root] = self.words(&op.trip, [self.root_word(db)]).await?;
            if root == 0 {
                *self.directory(db).lock() = None;
                return Ok(0);
            }
            if let Some(directory) = self.read_directory(op, db, root).await? {
                *self.directory(db).lock() = Some(directory);
                return Ok(root);
            }
        }
    }

    /// Reads the directory that the root's word `root` names. The word was read in `op`. `None`:
    /// another directory has replaced it.
    pub(super) async fn read_directory(
        &self,
        op: &Op<'_>,
        db: u8,
        root: u64,
    ) -> Result<Option<Directory>, Error> {
        let malformed = Error::malformed(self.root_word(db));
        let DirectoryRoot { depth, header } = DirectoryRoot::parse(root).map_err(malformed)?;
        let sizes = Sizes::of(depth, self.slab);
        let mut bytes = self.buffers.take();
        bytes.resize(sizes.header_bytes(), 0);
        self.run(&op.trip, &mut [Step::Read { at: header.at(0), into: &mut bytes }]).await?;
        let pieces = parse_header(&bytes, sizes).map_err(Error::malformed(header.at(0)))?;
        bytes.resize(8 * sizes.words, 0);
        let mut again = [0; 8];
        {
            let mut steps = Steps::new();
            let chunks = bytes.chunks_mut(8 * sizes.words_of_piece);
            steps.extend(
                chunks.zip(&pieces).map(|(into, piece)| Step::Read { at: piece.at(0), into }),
            );
            steps.push(Step::Read { at: self.root_word(db), into: &mut again });
            self.run(&op.trip, &mut steps).await?;
        }
        let root = root & !DOUBLING;
        if word(&again, 0) & !DOUBLING != root {
            return Ok(None);
        }
        let tick = op.running.tick;
        let words = (0..sizes.words).map(|i| Cached { word: word(&bytes, 8 * i), tick }).collect();
        Ok(Some(Directory { root, depth, sizes, header, pieces, words }))
    }

    /// Lets the directory words of the subtable `old` name its successors, in the directory that is
    /// current. Returns true if no word of a current directory can name `old` any more.
    pub(super) async fn swing(
        &self,
        op: &Op<'_>,
        db: u8,
        old: BucketWord,
        successors: [(BucketWord, Place); 2],
    ) -> Result<bool, Error> {
        self.load(op, db).await?;
        let cached = self
            .directory(db)
            .lock()
            .as_ref()
            .map(|directory| (directory.root, directory.depth, directory.range(old)));
        let Some((root, depth, range)) = cached else { return Ok(true) };
        if depth <= old.depth {
            return Ok(false);
        }
        for (index, at) in range {
            let upper = (index as u64) << (64 - depth);
            let [mut found] = self.words(&op.trip, [at]).await?;
            loop {
                let entry = Entry::parse(found).map_err(Error::malformed(at))?;
                let Some((word, table)) =
                    successors.iter().find(|(word, _)| word.covers(upper)).copied()
                else {
                    break;
                };
                if entry.depth >= word.depth {
                    break;
                }
                let new = Entry { depth: word.depth, locked: false, table }.word();
                let before = self.swap(&op.trip, at, found, new).await?;
                if before == found {
                    found = new;
                    break;
                }
                found = before;
            }
            let named = Named { root, at, word: found, index, is_fresh: false };
            self.verified(op, db, named, found);
        }
        let [after] = self.words(&op.trip, [self.root_word(db)]).await?;
        // A doubling that began before may have copied the words that were there earlier.
        Ok(after == root)
    }
}
