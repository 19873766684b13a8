//! Collection of blocks that no client has and that no word of the index names.
//!
//! A client that has ended leaves blocks behind that it had taken and not used, or unlinked and not
//! freed. The only client of an index finds all blocks in use from the root on, and frees all
//! others.

use std::collections::BTreeSet;

use super::members::{admit, exclude};
use super::words::{is_frozen, is_tentative, slot_of};
use super::{Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{Block, HEADER_BYTES};
use crate::layout::class;
use crate::layout::directory::Entry;
use crate::layout::root::{DATABASES, ROOT_BYTES};
use crate::layout::table::Slot;
use crate::place::Place;
use crate::reach::{Reach, Step};
use crate::store::pieces::{self, Places};
use crate::store::trips::Operation;

/// Ticks until all blocks that this client has unlinked are free.
const TICKS: usize = 64;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Frees all blocks that clients have left behind which have ended. Returns their number.
    ///
    /// This client must be the only one. Clients that want to open the index meanwhile get
    /// [`Error::TooManyClients`]. The call reads the whole index, and the lists of all values in
    /// pieces.
    ///
    /// # Errors
    /// [`Error::NotAlone`] if another client has not ended.
    pub async fn collect(&mut self) -> Result<u64, Error> {
        let block = self.epochs.place();
        let lines = exclude(&self.reach, block, self.slab, self.client()).await?;
        let collected = self.collect_alone().await;
        admit(&self.reach, block, &lines).await?;
        collected
    }

    async fn collect_alone(&self) -> Result<u64, Error> {
        for db in 0..DATABASES as u8 {
            self.end_splits(db).await?;
        }
        // Blocks that wait for epochs would be freed twice.
        for _ in 0..TICKS {
            let databases: BTreeSet<u8> = self.split.lock().iter().map(|old| old.db).collect();
            if databases.is_empty() && self.limbo_bytes() == 0 {
                break;
            }
            for db in databases {
                self.settle(db).await?;
            }
            self.tick_after(0).await?;
        }
        if self.limbo_bytes() > 0 {
            return Err(Error::HeldBack(self.limbo_bytes()));
        }
        let epochs = (self.epochs.place(), self.epochs.block_bytes() as u32);
        let mut used = vec![(self.root, ROOT_BYTES as u32), epochs];
        for db in 0..DATABASES as u8 {
            self.used_by(db, &mut used).await?;
        }
        self.blocks.rebuild(&used).await
    }

    /// Carries out the doubling and the splits that clients have left behind, as far as they were
    /// decided.
    async fn end_splits(&self, db: u8) -> Result<(), Error> {
        let op = self.begin(Operation::Maintain).await?;
        self.finish_doubling(&op, db).await?;
        loop {
            let mut is_any = false;
            for table in self.tables(&op, db).await? {
                if let Some(successors) = self.successors(&op.trip, table).await? {
                    self.publish(&op, db, table, &successors).await?;
                    is_any = true;
                }
            }
            if !is_any {
                return Ok(());
            }
        }
    }

    /// The subtables that the directory of `db` names.
    async fn tables(&self, op: &Op<'_>, db: u8) -> Result<BTreeSet<Place>, Error> {
        self.load(op, db).await?;
        let directory = self.directory(db).lock();
        let Some(directory) = &*directory else { return Ok(BTreeSet::new()) };
        let table = |word| Entry::parse(word).map(|entry| entry.table);
        let tables: Result<_, _> = directory.words().map(table).collect();
        tables.map_err(Error::malformed(self.root_word(db)))
    }

    /// Appends all blocks of database `db`, and empties tentative slots of clients that have ended.
    async fn used_by(&self, db: u8, used: &mut Places) -> Result<(), Error> {
        let op = self.begin(Operation::Maintain).await?;
        let tables = self.tables(&op, db).await?;
        if let Some(directory) = &*self.directory(db).lock() {
            used.push((directory.header, directory.sizes.header_bytes() as u32));
            let pieces = directory.pieces.iter().enumerate();
            used.extend(pieces.map(|(i, piece)| (*piece, directory.sizes.piece_bytes(i) as u32)));
        }
        for table in tables {
            used.push((table, self.shape.header_bytes()));
            for (i, raw) in self.slots(&op, table).await?.into_iter().enumerate() {
                let Some(word) = slot_of(raw) else { continue };
                if !is_tentative(raw) {
                    self.used_for(&op, word, used).await?;
                } else if !is_frozen(raw) {
                    self.swap(&op.trip, self.slot_at(table, i), raw, 0).await?;
                }
            }
        }
        Ok(())
    }

    /// Appends the block of a final slot, and the pieces of its value.
    async fn used_for(&self, op: &Op<'_>, word: Slot, used: &mut Places) -> Result<(), Error> {
        if let Some(bytes) = class::length(self.slab, word.length) {
            used.push((word.place, bytes));
            return Ok(());
        }
        let at = word.place.at(0);
        let left = self.slab - (at.offset % u64::from(self.slab)) as u32;
        let mut bytes = self.buffers.take();
        bytes.resize(pieces::block_bytes(self.slab, word.length, left) as usize, 0);
        self.run(&op.trip, &mut [Step::Read { at, into: &mut bytes }]).await?;
        let block = Block::parse(word.place, &bytes).map_err(Error::malformed(at))?;
        let (pieces, lists) = pieces::list(self, &op.trip, word.place, &block).await?;
        used.extend(pieces.into_iter().chain(lists));
        used.push((word.place, (HEADER_BYTES + block.key.len() + block.rest.len()) as u32));
        Ok(())
    }
}
