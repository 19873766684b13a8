//! Loss of a memory node: what it held is dropped and counted, and the rest goes on.
//!
//! The first memory node of a store has the root and, as long as there is room, the directories. If
//! it is gone, the store is lost. After the loss of another memory node:
//!
//! 1. A directory of which a piece is lost is written elsewhere.
//! 2. A subtable that is lost becomes an empty one elsewhere, in the directory words of its prefix.
//! 3. Slots of other subtables whose blocks are lost become empty.
//! 4. Words of the journal that are lost become others.
//!
//! Writers of a subtable wait meanwhile. An operation that has met the loss then begins again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Store;
use super::database::Database;
use super::image::{Image, entry_of, slots_of, words_of};
use super::trips::{Operation, Trip};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::gate::Gate;
use crate::layout::table::{Header, Slot};
use crate::reach::{Reach, Step, Stopped};
use crate::table::Table;

/// Attempts of an operation that meets losses of memory nodes.
const ATTEMPTS: u32 = 3;

/// The memory nodes that were lost.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Closed by the task that drops what a memory node held.
    gate: Gate,
    /// Numbers of the memory nodes whose contents were dropped.
    dropped: Mutex<Vec<u8>>,
    /// Keys dropped.
    pub keys: AtomicU64,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// True if `error` is the loss of a memory node without which the store goes on.
    pub(super) fn is_outlived(&self, error: &Error) -> bool {
        matches!(error, Error::Stopped(Stopped::Gone { node, .. }) if *node != self.root.node())
    }

    /// Handles the failure of an operation that has changed nothing. `Ok`: a memory node was lost,
    /// the store has dropped what it held, and the operation may begin again. The caller is inside
    /// no gate. `attempts` counts the calls of one operation.
    pub(super) async fn outlive(&self, error: Error, attempts: &mut u32) -> Result<(), Error> {
        *attempts += 1;
        match error {
            Error::Stopped(Stopped::Gone { node, .. })
                if node != self.root.node() && *attempts < ATTEMPTS =>
            {
                // Boxed, so that the futures of operations stay small.
                Box::pin(self.drop_node(node)).await
            }
            error => Err(error),
        }
    }

    /// Drops what lost memory nodes held, if an operation has noticed a loss since the last call.
    pub async fn drop_lost(&self) -> Result<(), Error> {
        let lost = (0..=u8::MAX).filter(|node| self.reach.is_lost(*node));
        for node in lost.filter(|node| *node != self.root.node()) {
            self.drop_node(node).await?;
        }
        Ok(())
    }

    /// Drops what memory node `node` held.
    async fn drop_node(&self, node: u8) -> Result<(), Error> {
        let _closed = self.losses.gate.close().await;
        if self.losses.dropped.lock().contains(&node) {
            return Ok(());
        }
        let trip = self.trip(Operation::Maintain);
        let _pin = self.blocks.pin();
        for database in &self.databases {
            self.drop_in(&trip, database, node).await?;
        }
        self.replace_journal(&trip, node).await?;
        self.losses.dropped.lock().push(node);
        Ok(())
    }

    async fn drop_in(&self, trip: &Trip<'_>, database: &Database, node: u8) -> Result<(), Error> {
        let _structure = database.structure.close().await;
        let tables = database.tables();
        if tables.is_empty() {
            return Ok(());
        }
        let has_lost_piece = database.directory.read().as_ref().is_some_and(|directory| {
            let mut places = std::iter::once(&directory.header).chain(&directory.pieces);
            places.any(|place| place.node() == node)
        });
        if has_lost_piece {
            self.rewrite_directory(trip, database, 0).await?;
        }
        let before = self.losses.keys.load(Ordering::Relaxed);
        for table in tables {
            let _closed = table.gate.close().await;
            if table.blocks().any(|(place, _)| place.node() == node) {
                self.replace_table(trip, database, &table, node).await?;
            } else {
                self.drop_slots(trip, database, &table, node).await?;
            }
        }
        if self.losses.keys.load(Ordering::Relaxed) != before {
            self.flushed(database.number);
        }
        Ok(())
    }

    /// Puts an empty subtable in the place of `table`. The caller has closed gate and structure.
    async fn replace_table(
        &self,
        trip: &Trip<'_>,
        database: &Database,
        table: &Arc<Table>,
        node: u8,
    ) -> Result<(), Error> {
        let word = table.local.lock().word;
        let mut owned = self.owned();
        let spot = self.allocate_table(&mut owned, table.stripe).await?;
        let new = self.new_table(spot, table.db, word, true);
        let header = Header { db: table.db, whole: word, sequence: new.sequence };
        let image = Image::new(&new.spot, header, &vec![0; self.shape.slots()]);
        self.run(trip, &mut image.write_all(&new.spot)).await?;
        let (pieces, depth) = match &*database.directory.read() {
            Some(directory) => (directory.pieces.clone(), directory.depth),
            None => return Ok(()),
        };
        owned.keep();
        let (index, count) = words_of(word, depth);
        let entry = entry_of(&new, word).word().to_be_bytes();
        self.write_words(trip, (depth, &pieces), index, &entry.repeat(count)).await?;
        if let Some(directory) = &mut *database.directory.write() {
            directory.tables[index..index + count].fill(new);
        }
        let (keys, slots) = {
            let mut local = table.local.lock();
            local.gone = true;
            (local.used, local.mirror.as_ref().map(|mirror| mirror.slots.clone()))
        };
        self.count_lost(database, keys);
        // Without a mirror, blocks of the subtable that lie on other memory nodes are not known.
        let slots = slots.unwrap_or_default();
        let blocks = slots.iter().filter_map(|word| Slot::parse(*word)).map(|slot| slot.place);
        let own = table.blocks().map(|(place, _)| place);
        own.chain(blocks).filter(|p| p.node() != node).for_each(|p| self.blocks.retire(p));
        Ok(())
    }

    /// Takes out the keys of `table` whose blocks are lost. The caller has closed the gate.
    async fn drop_slots(
        &self,
        trip: &Trip<'_>,
        database: &Database,
        table: &Table,
        node: u8,
    ) -> Result<(), Error> {
        let mirrored = table.local.lock().mirror.as_ref().map(|mirror| mirror.slots.clone());
        let slots = match mirrored {
            Some(slots) => slots,
            None => {
                let mut bytes = self.buffers.take();
                self.read_groups(trip, &table.spot, &mut bytes).await?;
                slots_of(&bytes)
            }
        };
        for (slot, word) in slots.iter().enumerate() {
            let is_lost = |slot: &Slot| slot.place.node() == node;
            if Slot::parse(*word).filter(is_lost).is_none() {
                continue;
            }
            let at = table.spot.slot(slot);
            if self.swap(trip, at, *word, 0).await? != *word {
                self.lost_swap(trip, at, table.is_mirrored).await?;
                continue;
            }
            table.local.lock().replace(slot, None);
            self.count_lost(database, 1);
        }
        Ok(())
    }

    /// Gives the stripes whose words of the journal are lost other words.
    async fn replace_journal(&self, trip: &Trip<'_>, node: u8) -> Result<(), Error> {
        for stripe in 0..self.journal.stripes() {
            if self.journal.word(stripe).node() != node {
                continue;
            }
            let _stripe = self.journal.close(stripe).await;
            let mut owned = self.owned();
            let place = owned.allocate(stripe, 8).await?;
            let named = place.bits().to_be_bytes();
            let at = self.journal.list.at(8 * u64::from(stripe));
            let clear = Step::Write { at: place.at(0), from: &[0; 8] };
            self.run(trip, &mut [clear]).await?;
            owned.keep();
            self.commit(trip, &mut [Step::Write { at, from: &named }]).await?;
            self.journal.set_word(stripe, place);
        }
        Ok(())
    }

    fn count_lost(&self, database: &Database, keys: u32) {
        database.count(-i64::from(keys));
        self.losses.keys.fetch_add(keys.into(), Ordering::Relaxed);
    }
}
