//! Deletion of all keys of a database.

use std::sync::Arc;

use super::Store;
use super::image::root_word;
use super::trips::{Operation, Trip};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::class;
use crate::layout::root::DATABASES;
use crate::layout::table::Slot;
use crate::place::Place;
use crate::reach::Reach;
use crate::table::Table;

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Deletes all keys of database `db`, with one CAS on the root.
    ///
    /// Waits for the writers of each subtable. The blocks are freed before the future ends.
    pub async fn flush(&self, db: u8) -> Result<(), Error> {
        self.databases.get(usize::from(db)).ok_or(Error::NoDatabase(db))?;
        self.flush_if(db, |_| true).await
    }

    /// Like [`Store::flush`], if `is_wanted` when no writer is in the database.
    pub(super) async fn flush_if(
        &self,
        db: u8,
        is_wanted: impl Fn(&Self) -> bool,
    ) -> Result<(), Error> {
        let database = &self.databases[usize::from(db)];
        self.check()?;
        let structure = database.structure.close().await;
        let tables = database.tables();
        if tables.is_empty() {
            return Ok(());
        }
        let trip = self.trip(Operation::Maintain);
        let _pin = self.blocks.pin();
        let mut closed = Vec::with_capacity(tables.len());
        for table in &tables {
            closed.push(table.gate.close().await);
        }
        self.check()?;
        if !is_wanted(self) {
            return Ok(());
        }
        let before = database.root().word();
        if self.swap(&trip, root_word(self.root, db), before, 0).await? != before {
            self.lost_root(&trip, db).await?;
        }
        let directory = database.directory.write().take();
        for table in &tables {
            let mut local = table.local.lock();
            local.gone = true;
            database.count(-i64::from(local.used));
        }
        self.flushed(db);
        drop(closed);
        drop(structure);
        if let Some(directory) = directory {
            self.blocks.retire(directory.header);
            directory.pieces.iter().for_each(|piece| self.blocks.retire(*piece));
        }
        for table in tables {
            self.retire_table(&trip, &table).await?;
        }
        Ok(())
    }

    /// Deletes all keys of all databases, one database after the other.
    pub async fn flush_all(&self) -> Result<(), Error> {
        for db in 0..DATABASES {
            self.flush(db as u8).await?;
        }
        Ok(())
    }

    /// Retires a subtable that no directory names, with the blocks of its keys.
    async fn retire_table(&self, trip: &Trip<'_>, table: &Arc<Table>) -> Result<(), Error> {
        let slots = self.slots(trip, table).await?;
        let mut buffer = self.buffers.take();
        for word in slots.iter().filter_map(|word| Slot::parse(*word)) {
            let mut parts: Vec<(Place, u32)> = Vec::new();
            if word.length == class::PIECES && !self.blocks.is_gone(word.place) {
                buffer.clear();
                self.read_block(trip, word, &mut buffer).await?;
                let block = self.parse(word, &buffer)?;
                let (pieces, lists) = self.pieces(trip, word.place, &block).await?;
                parts.extend(pieces.into_iter().chain(lists));
            }
            self.retire(word, &parts);
        }
        table.blocks().for_each(|(place, _)| self.blocks.retire(place));
        Ok(())
    }
}
