//! Keys whose values were on a memory node that is gone.
//!
//! The index lies on the first memory node, and values lie on all of them. If another memory node
//! ends, its values are lost, and their keys count as expired: a read does not find them, and a
//! write replaces them. [`Store::forget_gone`] then deletes them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Store;
use super::access::Steps;
use super::trips::Operation;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::table::Slot;
use crate::reach::{Reach, Step};
use crate::table::Table;
use crate::ticket::Name;

/// Slots that one round trip clears.
const BATCH: usize = 64;

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Deletes the keys whose values were on memory nodes that are gone. Returns their number.
    ///
    /// Does nothing until a further memory node is gone. Writers of each subtable wait while the
    /// subtable is searched.
    pub async fn forget_gone(&self) -> Result<u64, Error> {
        let nodes = self.blocks.gone_nodes();
        if self.forgotten.load(Ordering::Relaxed) == nodes {
            return Ok(0);
        }
        let mut keys = 0;
        for database in &self.databases {
            for table in database.tables() {
                keys += self.forget_gone_in(&table).await?;
            }
        }
        self.removed.gone.fetch_add(keys, Ordering::Relaxed);
        // A write that was in flight may have linked a block after its subtable was searched.
        if keys == 0 {
            self.forgotten.store(nodes, Ordering::Relaxed);
        }
        Ok(keys)
    }

    async fn forget_gone_in(&self, table: &Arc<Table>) -> Result<u64, Error> {
        let trip = self.trip(Operation::Maintain);
        let _closed = table.gate.close().await;
        self.check()?;
        if table.local.lock().gone {
            return Ok(0);
        }
        let slots = self.slots(&trip, table).await?;
        let words = slots.iter().enumerate();
        let gone: Vec<(usize, Slot)> = words
            .filter_map(|(slot, word)| Some((slot, Slot::parse(*word)?)))
            .filter(|(_, word)| self.blocks.is_gone(word.place))
            .collect();
        for batch in gone.chunks(BATCH) {
            let clear = |(slot, _): &(usize, Slot)| Step::Write {
                at: table.spot.slot(*slot),
                from: &[0; 8],
            };
            let mut steps: Steps<'_> = batch.iter().map(clear).collect();
            self.commit(&trip, &mut steps).await?;
            for (slot, word) in batch {
                self.forget(table, *slot, *word);
            }
        }
        Ok(gone.len() as u64)
    }

    /// Takes a key out of what is known locally.
    fn forget(&self, table: &Table, slot: usize, word: Slot) {
        let tag = {
            let mut local = table.local.lock();
            let tag = local.mirror.as_ref().map(|mirror| mirror.tags[slot]);
            local.replace(slot, None);
            tag
        };
        self.databases[usize::from(table.db)].count(-1);
        self.blocks.retire(word.place);
        match tag {
            Some(tag) => self.touched(Name::new(table.db, tag)),
            // Without a mirror the key is not known any more.
            None => self.flushed(table.db),
        }
    }
}
