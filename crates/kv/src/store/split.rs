//! Split of a subtable, and doubling of the directory.
//!
//! 1. Write the new subtable whole, with the slots that belong there at the same index.
//! 2. Write the directory words.
//! 3. Write the old subtable without these slots, then its header.
//!
//! Writers of the subtable wait meanwhile. Readers do not: a reader uses the old subtable until the
//! directory has changed, and looks again if the subtable does not cover its key any more.

use std::sync::Arc;

use super::Store;
use super::access::Steps;
use super::database::{Database, Directory};
use super::image::{Image, entry_of, root_word, slots_of, words_of};
use super::look::Want;
use super::trips::{Operation, Trip};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::DEPTH_MAX;
use crate::layout::block::{HEADER_BYTES, Head};
use crate::layout::table::{BucketWord, Header, Slot};
use crate::reach::{Reach, Step};
use crate::table::{Local, Mirror, Table};

/// The bucket words of the two halves of a subtable.
fn halves(word: BucketWord) -> [BucketWord; 2] {
    let (depth, version) = (word.depth + 1, word.version.wrapping_add(1));
    let low = BucketWord { depth, version, ..word };
    [low, BucketWord { prefix: word.prefix | 1 << (48 - depth), ..low }]
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Splits `table`, unless the table has another depth than `depth` meanwhile.
    pub(super) async fn split(&self, table: &Arc<Table>, depth: u32) -> Result<(), Error> {
        let database = &self.databases[usize::from(table.db)];
        let _structure = database.structure.close().await;
        let _closed = table.gate.close().await;
        self.check()?;
        let (word, gone) = {
            let local = table.local.lock();
            (local.word, local.gone)
        };
        if gone || word.depth != depth {
            return Ok(());
        }
        if depth == DEPTH_MAX {
            return Err(Error::TooDeep);
        }
        if database.root().depth == depth {
            self.double(database).await?;
        }
        let trip = self.trip(Operation::Split);
        let (slots, prefixes) = self.slots_and_prefixes(&trip, table).await?;
        let [low, high] = halves(word);
        let is_moved = |slot: usize| slots[slot] != 0 && high.covers(prefixes[slot]);

        let mut owned = self.owned();
        let spot = self.allocate_table(&mut owned, table.stripe).await?;
        let new = self.new_table(spot, table.db, high, table.is_mirrored);
        let pick = |moved: bool| -> Vec<u64> {
            (0..slots.len()).map(|i| if is_moved(i) == moved { slots[i] } else { 0 }).collect()
        };
        let header = Header { db: table.db, whole: high, sequence: new.sequence };
        let image = Image::new(&new.spot, header, &pick(true));
        self.run(&trip, &mut image.write_all(&new.spot)).await?;
        copy_moved(&mut new.local.lock(), &table.local.lock(), &slots, is_moved);

        owned.keep();
        self.write_halves(&trip, database, (table, low), (&new, high)).await?;

        let header = Header { db: table.db, whole: low, sequence: table.sequence };
        let image = Image::new(&table.spot, header, &pick(false));
        let mut steps: Steps<'_> = image.write_groups(&table.spot);
        // Last, because a header with the old depth tells recovery to look for moved slots.
        steps.push(image.write_word(&table.spot));
        self.commit(&trip, &mut steps).await?;
        drop_moved(&mut table.local.lock(), low, is_moved);
        Ok(())
    }

    /// The slots of a subtable that no writer changes, and the prefix of each key: a tag, or the
    /// upper half of a hash.
    pub(super) async fn slots_and_prefixes(
        &self,
        trip: &Trip<'_>,
        table: &Table,
    ) -> Result<(Box<[u64]>, Box<[u64]>), Error> {
        if let Some(mirror) = &table.local.lock().mirror {
            return Ok((mirror.slots.clone(), mirror.tags.clone()));
        }
        let mut bytes = self.buffers.take();
        self.read_groups(trip, &table.spot, &mut bytes).await?;
        let slots = slots_of(&bytes);
        let heads = self.read_heads(trip, &slots).await?;
        Ok((slots, heads.iter().map(|head| head.map_or(0, |head| head.upper)).collect()))
    }

    /// Reads the headers of the blocks in `slots`, in one round trip. `None` for an empty slot, and
    /// for a block whose memory node is gone.
    pub(super) async fn read_heads(
        &self,
        trip: &Trip<'_>,
        slots: &[u64],
    ) -> Result<Vec<Option<Head>>, Error> {
        let mut bytes = self.buffers.take();
        let mut words = Vec::new();
        for (i, word) in slots.iter().enumerate() {
            let word = Slot::parse(*word).filter(|word| !self.blocks.is_gone(word.place));
            if let Some(word) = word {
                self.read_bytes(word, Want::Presence, 0)?;
                words.push((i, word));
            }
        }
        let mut heads = vec![None; slots.len()];
        if words.is_empty() {
            return Ok(heads);
        }
        bytes.resize(words.len() * HEADER_BYTES, 0);
        let into = bytes.chunks_exact_mut(HEADER_BYTES);
        let reads = words.iter().zip(into);
        let mut steps: Steps<'_> =
            reads.map(|((_, word), into)| Step::Read { at: word.place.at(0), into }).collect();
        self.run(trip, &mut steps).await?;
        drop(steps);
        for ((i, word), bytes) in words.iter().zip(bytes.chunks_exact(HEADER_BYTES)) {
            heads[*i] = Some(Head::parse(bytes).map_err(Error::malformed(word.place.at(0)))?);
        }
        Ok(heads)
    }

    /// Writes the directory words of the halves of a subtable, and changes the local directory.
    async fn write_halves(
        &self,
        trip: &Trip<'_>,
        database: &Database,
        low: (&Arc<Table>, BucketWord),
        high: (&Arc<Table>, BucketWord),
    ) -> Result<(), Error> {
        let (depth, pieces) = match &*database.directory.read() {
            Some(directory) => (directory.depth, directory.pieces.clone()),
            None => return Ok(()),
        };
        let (index, count) = words_of(low.1, depth);
        let mut words = Vec::with_capacity(16 * count);
        for (table, word) in [low, high] {
            let entry = entry_of(table, word).word().to_be_bytes();
            (0..count).for_each(|_| words.extend_from_slice(&entry));
        }
        self.write_words(trip, (depth, &pieces), index, &words).await?;
        if let Some(directory) = &mut *database.directory.write() {
            directory.tables[index + count..index + 2 * count].fill(high.0.clone());
        }
        Ok(())
    }

    /// Doubles the directory. The caller has closed the database's structure.
    async fn double(&self, database: &Database) -> Result<(), Error> {
        let trip = self.trip(Operation::Double);
        let (old, tables) = match &*database.directory.read() {
            Some(directory) => {
                let twice =
                    directory.tables.iter().flat_map(|table| [table.clone(), table.clone()]);
                ((directory.root(), directory.pieces.clone()), twice.collect::<Vec<_>>())
            }
            None => return Ok(()),
        };
        let depth = old.0.depth + 1;
        let mut owned = self.owned();
        let entries = tables.iter().map(|table| entry_of(table, table.local.lock().word));
        let new = self.encode_directory(&mut owned, depth, entries).await?;
        self.run(&trip, &mut new.write_all()).await?;
        let (header, pieces) = (new.header, new.pieces.clone());
        let directory = Directory { depth, header, pieces, tables };
        owned.keep();
        let (before, after) = (old.0.word(), directory.root().word());
        if self.swap(&trip, root_word(self.root, database.number), before, after).await? != before {
            self.lost_root(&trip, database.number).await?;
        }
        *database.directory.write() = Some(directory);
        self.blocks.retire(old.0.header);
        old.1.iter().for_each(|piece| self.blocks.retire(*piece));
        Ok(())
    }
}

/// Copies what is known locally of the moved keys to the new subtable.
fn copy_moved(new: &mut Local, old: &Local, slots: &[u64], is_moved: impl Fn(usize) -> bool) {
    for slot in (0..slots.len()).filter(|slot| is_moved(*slot)) {
        new.used += 1;
        new.uses.copy(slot, &old.uses, slot);
        if let (Some(new), Some(old)) = (&mut new.mirror, &old.mirror) {
            let old: &Mirror = old;
            new.set(slot, old.entry(slot));
        }
    }
}

/// Takes the moved keys out of the old subtable.
fn drop_moved(old: &mut Local, word: BucketWord, is_moved: impl Fn(usize) -> bool) {
    old.word = word;
    for slot in (0..old.uses.len()).filter(|slot| is_moved(*slot)) {
        old.replace(slot, None);
    }
}
