//! Merge of two sibling subtables that are nearly empty.
//!
//! 1. Write a new subtable with the keys of both.
//! 2. Write the directory words.
//!
//! Both old subtables are retired. A crash in 2 leaves words of old and new: the new subtable has
//! the greater number, so recovery gives it all words of its prefix.

use std::sync::Arc;

use super::Store;
use super::image::{Image, entry_of, words_of};
use super::trips::Operation;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::prefix;
use crate::layout::table::{BucketWord, Header, SLOTS};
use crate::reach::Reach;
use crate::table::Table;

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Merges sibling subtables that are less than a quarter full, and gives the index of an empty
    /// database back. Returns the number of merges.
    pub async fn merge(&self, db: u8) -> Result<usize, Error> {
        let database = self.databases.get(usize::from(db)).ok_or(Error::NoDatabase(db))?;
        let mut merges = 0;
        for table in database.tables() {
            while self.merge_one(db, &table).await? {
                merges += 1;
            }
        }
        if database.keys() == 0 {
            self.free_empty(db).await?;
        }
        Ok(merges)
    }

    /// The sibling with which `table` can merge.
    fn sibling(&self, db: u8, table: &Table) -> Option<Arc<Table>> {
        let word = table.local.lock().word;
        if word.depth <= u32::from(self.settings.stripe_bits) {
            return None;
        }
        let other = word.prefix ^ 1 << (48 - word.depth);
        let sibling = self.databases[usize::from(db)].table(other << 16)?;
        let few = |table: &Table| {
            let local = table.local.lock();
            let is_same = local.word.depth == word.depth && !local.gone;
            is_same && local.used as usize * 4 < self.shape.slots()
        };
        (few(table) && few(&sibling)).then_some(sibling)
    }

    /// Merges `table` with its sibling. False if the two are not merged.
    async fn merge_one(&self, db: u8, table: &Arc<Table>) -> Result<bool, Error> {
        if self.sibling(db, table).is_none() {
            return Ok(false);
        }
        let database = &self.databases[usize::from(db)];
        let _structure = database.structure.close().await;
        let Some(sibling) = self.sibling(db, table) else { return Ok(false) };
        let _first = table.gate.close().await;
        let _second = sibling.gate.close().await;
        self.check()?;
        let trip = self.trip(Operation::Merge);
        let _pin = self.blocks.pin();
        let (mut slots, _) = self.slots_and_prefixes(&trip, table).await?;
        let (others, _) = self.slots_and_prefixes(&trip, &sibling).await?;
        let Some(moves) = place_all(&mut slots, &others) else { return Ok(false) };

        let before = table.local.lock().word;
        let depth = before.depth - 1;
        let word = BucketWord {
            depth,
            version: before.version.wrapping_add(1),
            prefix: prefix(before.prefix << 16, depth),
            ..before
        };
        let mut owned = self.owned();
        let spot = self.allocate_table(&mut owned, table.stripe).await?;
        let new = self.new_table(spot, db, word, table.is_mirrored && sibling.is_mirrored);
        let header = Header { db, whole: word, sequence: new.sequence };
        let image = Image::new(&new.spot, header, &slots);
        self.run(&trip, &mut image.write_all(&new.spot)).await?;
        (0..slots.len()).for_each(|slot| copy(&new, table, slot, slot));
        moves.iter().for_each(|(from, to)| copy(&new, &sibling, *from, *to));
        new.local.lock().used = slots.iter().filter(|word| **word != 0).count() as u32;

        let (pieces, depth) = match &*database.directory.read() {
            Some(directory) => (directory.pieces.clone(), directory.depth),
            None => return Ok(false),
        };
        owned.keep();
        let (index, count) = words_of(word, depth);
        let entry = entry_of(&new, word).word().to_be_bytes();
        self.write_words(&trip, (depth, &pieces), index, &entry.repeat(count)).await?;
        if let Some(directory) = &mut *database.directory.write() {
            directory.tables[index..index + count].fill(new);
        }
        for old in [table, &sibling] {
            old.local.lock().gone = true;
            old.blocks().for_each(|(place, _)| self.blocks.retire(place));
        }
        Ok(true)
    }

    /// Gives the index of a database back that has no key.
    async fn free_empty(&self, db: u8) -> Result<(), Error> {
        let is_empty = |store: &Self| {
            let tables = store.databases[usize::from(db)].tables();
            !tables.is_empty() && tables.iter().all(|table| table.local.lock().used == 0)
        };
        if is_empty(self) { self.flush_if(db, is_empty).await } else { Ok(()) }
    }
}

/// Places the slots of the sibling in the same buckets, at the same index if possible. `None` if a
/// bucket has no room.
fn place_all(slots: &mut [u64], others: &[u64]) -> Option<Vec<(usize, usize)>> {
    let mut moves = Vec::new();
    for (from, word) in others.iter().enumerate().filter(|(_, word)| **word != 0) {
        let bucket = from / SLOTS * SLOTS;
        let to = std::iter::once(from).chain(bucket..bucket + SLOTS).find(|to| slots[*to] == 0)?;
        slots[to] = *word;
        moves.push((from, to));
    }
    Some(moves)
}

/// Copies what is known locally of a key.
fn copy(new: &Table, old: &Table, from: usize, to: usize) {
    let (mut new, old) = (new.local.lock(), old.local.lock());
    new.uses.copy(to, &old.uses, from);
    if let (Some(new), Some(old)) = (&mut new.mirror, &old.mirror)
        && let Some(entry) = old.entry(from)
    {
        new.set(to, Some(entry));
    }
}
