//! Opening a store whose owner has ended, from the index alone.
//!
//! 1. Read the root, and count this owner in its generation.
//! 2. Carry out the records of the journal that are whole, and clear the journal.
//! 3. Read directories and subtables. A split or merge that had begun to change a directory is
//!    finished: the subtable with the greater number gets all words of its prefix.
//! 4. Read header and key of each block: tags and expiries.
//! 5. List the used blocks for the allocator. All others are free.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::access::Steps;
use super::atomically::Journal;
use super::database::Directory;
use super::image::{Image, entry_of, slots_of};
use super::trips::{Operation, Trip};
use super::{Settings, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{Block, HEADER_BYTES};
use crate::layout::directory::{self, Sizes};
use crate::layout::journal::{self, Change};
use crate::layout::root::{DirectoryRoot, ROOT_BYTES, Root, generation_word};
use crate::layout::table::{BucketWord, Header, Slot, Spot};
use crate::layout::{Malformed, class, table, word};
use crate::place::Place;
use crate::reach::{Reach, Step, Stopped};
use crate::table::{Entry, Local, Table};

/// Changes beyond which a journal is not believed.
const CHANGES_MAX: usize = 1 << 24;

/// Blocks in use: place, bytes and stripe.
type Used = Vec<(Place, u32, u32)>;

/// A subtable as it was read.
struct Read {
    spot: Spot,
    header: Header,
    slots: Box<[u64]>,
    /// The words of the directory that belong to the subtable: first, and number.
    words: (usize, usize),
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Opens the store whose root is at `root`, after its owner has ended.
    ///
    /// The allocator must be new: the store lists the used blocks for it.
    pub async fn open(
        reach: R,
        blocks: B,
        environment: E,
        settings: Settings,
        root: Place,
    ) -> Result<Self, Error> {
        let mut bytes = vec![0; ROOT_BYTES];
        let read = Step::Read { at: root.at(0), into: &mut bytes };
        reach.run(&mut [read]).await?;
        let found = Root::parse(&bytes).map_err(Error::malformed(root.at(0)))?;
        let mut store = Self::with(reach, blocks, environment, settings, root, &found)?;
        let mut used = vec![(root, ROOT_BYTES as u32, 0)];
        store.become_owner().await?;
        store.read_journal(found.journal, &mut used).await?;
        {
            let trip = store.trip(Operation::Maintain);
            store.replay(&trip).await?;
            for (db, directory) in found.directories.into_iter().enumerate() {
                if !directory.header.is_none() {
                    store.read_database(&trip, db as u8, directory, &mut used).await?;
                }
            }
        }
        store.blocks.adopt(&used)?;
        store.reserve_records().await?;
        Ok(store)
    }

    /// Counts this owner, so that its predecessor notices.
    async fn become_owner(&mut self) -> Result<(), Error> {
        let (before, after) = (self.generation, self.generation + 1);
        let at = generation_word(self.root);
        let old = self.swap(&self.trip(Operation::Maintain), at, before, after).await?;
        if old != before {
            return Err(Error::Deposed);
        }
        self.generation = after;
        Ok(())
    }

    async fn read_journal(&mut self, place: Place, used: &mut Used) -> Result<(), Error> {
        let stripes = 1_usize << self.settings.stripe_bits;
        let mut bytes = vec![0; 8 * stripes];
        {
            let trip = self.trip(Operation::Maintain);
            self.run(&trip, &mut [Step::Read { at: place.at(0), into: &mut bytes }]).await?;
        }
        let words: Vec<_> =
            (0..stripes).map(|stripe| Place::of(word(&bytes, 8 * stripe))).collect();
        used.push((place, bytes.len() as u32, 0));
        used.extend(words.iter().zip(0..).map(|(word, stripe)| (*word, 8, stripe)));
        self.journal = Journal::new(words);
        Ok(())
    }

    /// Carries out the records of calls that the predecessor did not end.
    async fn replay(&self, trip: &Trip<'_>) -> Result<(), Error> {
        for place in &self.journal.words {
            let at = place.at(0);
            let mut bytes = [0; 8];
            self.run(trip, &mut [Step::Read { at, into: &mut bytes }]).await?;
            let first = word(&bytes, 0);
            if first == 0 {
                continue;
            }
            if let Some(changes) = self.whole_record(trip, first).await? {
                for Change { slot, old, new } in changes {
                    self.swap(trip, slot, old, new).await?;
                }
            }
            self.commit(trip, &mut [Step::Write { at, from: &[0; 8] }]).await?;
        }
        Ok(())
    }

    /// The changes of the record that `word` names. `None` if the record or one of its blocks is
    /// not whole: then the call had not begun to change slots.
    async fn whole_record(
        &self,
        trip: &Trip<'_>,
        mut word: u64,
    ) -> Result<Option<Vec<Change>>, Error> {
        let mut changes = Vec::new();
        let mut bytes = self.buffers.take();
        while let Some((place, length)) = journal::parse_word(word) {
            if !self.is_in_slab(place, length) {
                return Ok(None);
            }
            bytes.resize(length as usize, 0);
            self.run(trip, &mut [Step::Read { at: place.at(0), into: &mut bytes }]).await?;
            let Ok((more, next)) = journal::parse(place, &bytes) else { return Ok(None) };
            if more.is_empty() || changes.len() > CHANGES_MAX {
                return Ok(None);
            }
            changes.extend(more);
            word = next;
        }
        for change in &changes {
            if !change.slot.offset.is_multiple_of(8) {
                return Ok(None);
            }
            let Some(slot) = Slot::parse(change.new) else { continue };
            bytes.clear();
            if self.read_block(trip, slot, &mut bytes).await.is_err()
                || Block::parse(slot.place, &bytes).is_err()
            {
                return Ok(None);
            }
        }
        Ok(Some(changes))
    }

    pub(super) fn is_in_slab(&self, place: Place, bytes: u32) -> bool {
        super::pieces::is_in_slab(self.slab, place, bytes)
    }

    async fn read_database(
        &self,
        trip: &Trip<'_>,
        db: u8,
        root: DirectoryRoot,
        used: &mut Used,
    ) -> Result<(), Error> {
        let malformed = Error::malformed(root.header.at(0));
        if root.depth < u32::from(self.settings.stripe_bits) {
            return Err(malformed(Malformed("a directory has fewer words than the store stripes")));
        }
        let (pieces, words) = self.read_directory(trip, root, used).await?;
        let mut reads = self.read_tables(trip, &words).await?;
        assign(&mut reads, root.depth, words.len()).map_err(&malformed)?;
        let mut tables: Vec<Option<Arc<Table>>> = vec![None; words.len()];
        let mut unfinished = Vec::new();
        for read in reads.into_iter().filter(|read| read.words.1 != 0) {
            let (first, count) = read.words;
            let (table, kept) = self.adopt_table(trip, db, root.depth, read, used).await?;
            unfinished.extend(kept.map(|kept| (table.clone(), kept)));
            tables[first..first + count].fill(Some(table));
        }
        let Some(tables) = tables.into_iter().collect::<Option<Vec<_>>>() else {
            return Err(malformed(Malformed("a directory has words without a subtable")));
        };
        let entries = tables.iter().map(|table| entry_of(table, table.local.lock().word).word());
        let right: Vec<_> = entries.collect();
        if right != words {
            let bytes: Vec<u8> = right.iter().flat_map(|word| word.to_be_bytes()).collect();
            self.write_words(trip, (root.depth, &pieces), 0, &bytes).await?;
        }
        self.shrink_tables(trip, unfinished).await?;
        let (depth, header) = (root.depth, root.header);
        let directory = Directory { depth, header, pieces, tables };
        *self.databases[usize::from(db)].directory.write() = Some(directory);
        Ok(())
    }

    async fn read_directory(
        &self,
        trip: &Trip<'_>,
        root: DirectoryRoot,
        used: &mut Used,
    ) -> Result<(Vec<Place>, Vec<u64>), Error> {
        let malformed = Error::malformed(root.header.at(0));
        let sizes = Sizes::of(root.depth, self.slab);
        let header_bytes = sizes.header_bytes() as u32;
        if !self.is_in_slab(root.header, header_bytes) {
            return Err(malformed(Malformed("a directory's header is longer than a slab")));
        }
        let mut bytes = vec![0; sizes.header_bytes()];
        self.run(trip, &mut [Step::Read { at: root.header.at(0), into: &mut bytes }]).await?;
        let pieces = directory::parse_header(&bytes, sizes).map_err(&malformed)?;
        used.push((root.header, header_bytes, 0));
        let mut bytes = vec![0; 8 * sizes.words];
        let into = bytes.chunks_mut(8 * sizes.words_of_piece);
        let mut steps: Steps<'_> =
            pieces.iter().zip(into).map(|(at, into)| Step::Read { at: at.at(0), into }).collect();
        self.run(trip, &mut steps).await?;
        drop(steps);
        let length = |(i, place): (usize, &Place)| (*place, sizes.piece_bytes(i) as u32, 0);
        used.extend(pieces.iter().enumerate().map(length));
        let words = (0..sizes.words).map(|i| word(&bytes, 8 * i)).collect();
        Ok((pieces, words))
    }

    /// Reads the subtables that the words of a directory name.
    async fn read_tables(&self, trip: &Trip<'_>, words: &[u64]) -> Result<Vec<Read>, Error> {
        let mut seen = HashMap::new();
        let mut reads = Vec::new();
        let mut bytes = self.buffers.take();
        for word in words {
            let entry = directory::Entry::parse(*word);
            let place = entry.map_err(Error::malformed(self.root.at(0)))?.table;
            if seen.insert(place, ()).is_some() {
                continue;
            }
            let malformed = Error::malformed(place.at(0));
            let length = table::HEADER_BYTES + 8 * self.shape.pieces;
            if !self.is_in_slab(place, self.shape.header_bytes()) {
                return Err(malformed(Malformed("a subtable reaches beyond its slab")));
            }
            bytes.resize(length as usize, 0);
            self.run(trip, &mut [Step::Read { at: place.at(0), into: &mut bytes }]).await?;
            let (spot, header) =
                table::parse_header(place, &bytes, self.shape).map_err(&malformed)?;
            self.read_groups(trip, &spot, &mut bytes).await?;
            self.sequence.fetch_max(header.sequence + 1, Ordering::Relaxed);
            reads.push(Read { spot, header, slots: slots_of(&bytes), words: (0, 0) });
        }
        Ok(reads)
    }

    /// Makes a subtable of what was read, and reads its keys. Returns the slots to write too, if a
    /// split of the subtable is to be finished.
    async fn adopt_table(
        &self,
        trip: &Trip<'_>,
        db: u8,
        depth: u32,
        read: Read,
        used: &mut Used,
    ) -> Result<(Arc<Table>, Option<Box<[u64]>>), Error> {
        let own = depth - read.words.1.trailing_zeros();
        let prefix = crate::hash::prefix(top(read.words.0 as u64, depth), own);
        let word = BucketWord { depth: own, prefix, ..read.header.whole };
        let mut local = Local::new(self.shape, word, self.new_mirror());
        let stripe = self.stripe(prefix << 16);
        let words = read.slots.iter().enumerate();
        let words: Vec<_> =
            words.filter_map(|(slot, word)| Some((slot, Slot::parse(*word)?))).collect();
        let (words, lost): (Vec<_>, Vec<_>) =
            words.into_iter().partition(|(_, word)| !self.blocks.is_gone(word.place));
        let mut has_lost = !lost.is_empty();
        let mut kept = vec![0; read.slots.len()].into_boxed_slice();
        self.read_keys(trip, words.iter().map(|(_, word)| *word), |i, head, key| {
            let (slot, parsed) = words[i];
            // A split copied the slot to the other subtable, and could not clear it here.
            if !word.covers(head.upper) {
                return;
            }
            let (hash, expiry) = (self.hasher.hash(key), head.expiry);
            kept[slot] = parsed.word();
            local.settle(slot, Some(Entry { word: parsed.word(), tag: hash.tag, expiry }));
            if expiry != 0 {
                self.will_expire(expiry, db, hash);
            }
        })
        .await?;
        for (slot, word) in &words {
            if kept[*slot] != 0 && !self.adopt_block(trip, *word, stripe, used).await? {
                (kept[*slot], has_lost) = (0, true);
                local.replace(*slot, None);
            }
        }
        self.databases[usize::from(db)].count(local.used.into());
        let table = Table::new(read.spot, db, stripe, read.header.sequence, local);
        used.extend(table.blocks().map(|(place, bytes)| (place, bytes, stripe)));
        let is_unfinished = has_lost || own != read.header.whole.depth;
        Ok((table, is_unfinished.then_some(kept)))
    }

    /// Writes the subtables whose split is to be finished, after their directory words.
    async fn shrink_tables(
        &self,
        trip: &Trip<'_>,
        unfinished: Vec<(Arc<Table>, Box<[u64]>)>,
    ) -> Result<(), Error> {
        for (table, slots) in unfinished {
            let whole = table.local.lock().word;
            let header = Header { db: table.db, whole, sequence: table.sequence };
            let image = Image::new(&table.spot, header, &slots);
            let mut steps = image.write_groups(&table.spot);
            steps.push(image.write_word(&table.spot));
            self.commit(trip, &mut steps).await?;
        }
        Ok(())
    }

    /// Lists the block of a slot, and its pieces. Returns false if a piece is on a memory node that
    /// is gone: then the key is lost.
    async fn adopt_block(
        &self,
        trip: &Trip<'_>,
        slot: Slot,
        stripe: u32,
        used: &mut Used,
    ) -> Result<bool, Error> {
        if let Some(bytes) = class::length(self.slab, slot.length) {
            used.push((slot.place, bytes, stripe));
            return Ok(true);
        }
        let mut bytes = self.buffers.take();
        self.read_block(trip, slot, &mut bytes).await?;
        let block = self.parse(slot, &bytes)?;
        if self.lacks_pieces(&block) {
            return Ok(false);
        }
        let (pieces, lists) = match self.pieces(trip, slot.place, &block).await {
            Err(Error::Stopped(Stopped::Gone { .. })) => return Ok(false),
            result => result?,
        };
        let length = HEADER_BYTES + block.key.len() + block.rest.len();
        used.push((slot.place, length as u32, stripe));
        used.extend(pieces.into_iter().chain(lists).map(|(place, bytes)| (place, bytes, stripe)));
        Ok(true)
    }
}

/// The hash whose first `depth` bits are `index`.
const fn top(index: u64, depth: u32) -> u64 {
    if depth == 0 { 0 } else { index << (64 - depth) }
}

/// Gives each word of a directory to the subtable with the greatest number that covers it.
fn assign(reads: &mut [Read], depth: u32, words: usize) -> Result<(), Malformed> {
    reads.sort_by_key(|read| read.header.sequence);
    let mut owners = vec![usize::MAX; words];
    for (i, read) in reads.iter().enumerate() {
        let whole = read.header.whole;
        if whole.depth > depth {
            return Err(Malformed("a subtable is deeper than its directory"));
        }
        let (first, count) = super::image::words_of(whole, depth);
        owners[first..first + count].fill(i);
    }
    for (word, owner) in owners.iter().enumerate() {
        let Some(read) = reads.get_mut(*owner) else {
            return Err(Malformed("a directory has words that no subtable covers"));
        };
        if read.words.1 == 0 {
            read.words.0 = word;
        } else if read.words.0 + read.words.1 != word {
            return Err(Malformed("the words of a subtable do not lie together"));
        }
        read.words.1 += 1;
    }
    for read in reads.iter().filter(|read| read.words.1 != 0) {
        let (first, count) = read.words;
        if !count.is_power_of_two() || first % count != 0 {
            return Err(Malformed("the words of a subtable are no prefix"));
        }
    }
    Ok(())
}
