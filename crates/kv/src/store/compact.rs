//! Compaction: blocks of sparse chunks move, so that the chunks become empty.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use super::Store;
use super::image::slots_of;
use super::trips::{Operation, Trip};
use crate::blocks::{Blocks, NoBlock};
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::KeyHash;
use crate::layout::block::{Block, HEADER_BYTES};
use crate::layout::class;
use crate::layout::table::Slot;
use crate::reach::Reach;
use crate::search::Buckets;
use crate::table::{Entry, Table};
use crate::ticket::{Hold, Name};

/// Blocks that move before other tasks run.
const MOVES: usize = 16;

/// Lets the other tasks of the thread run.
pub(super) async fn give_way() {
    let mut has_waited = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_waited, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Moves the blocks out of the chunks whose live share is below `share` percent. Returns the
    /// number of blocks moved.
    ///
    /// Values in pieces, subtables and directories stay: their chunks take blocks again afterwards.
    /// So do blocks for which a full pool has no room; others may find room.
    /// Other tasks of the thread run between subtables, and after some blocks.
    pub async fn compact(&self, share: u32) -> Result<usize, Error> {
        self.check()?;
        if self.blocks.evacuate(share) == 0 {
            return Ok(0);
        }
        let result = self.move_all().await;
        self.blocks.settle();
        if let Ok(moved) = &result {
            self.removed.moved.fetch_add(*moved as u64, std::sync::atomic::Ordering::Relaxed);
        }
        result
    }

    async fn move_all(&self) -> Result<usize, Error> {
        let mut moved = 0;
        // Lengths of blocks for which the pool has no room.
        let mut is_full = [false; 256];
        for database in &self.databases {
            for table in database.tables() {
                for (at, (word, tag)) in self.leaving(&table).await?.into_iter().enumerate() {
                    let is_full = &mut is_full[usize::from(word.length)];
                    if *is_full {
                        continue;
                    }
                    match self.move_block(&table, word, tag).await {
                        Err(Error::NoBlock(NoBlock::Full)) => *is_full = true,
                        result => moved += usize::from(result?),
                    }
                    if at % MOVES == MOVES - 1 {
                        give_way().await;
                    }
                }
                give_way().await;
            }
        }
        Ok(moved)
    }

    /// The slots whose blocks are to move, with the tags of their keys, if known.
    async fn leaving(&self, table: &Arc<Table>) -> Result<Vec<(Slot, Option<u64>)>, Error> {
        let is_leaving =
            |word: &Slot| word.length != class::PIECES && self.blocks.is_leaving(word.place);
        if let Some(mirror) = &table.local.lock().mirror {
            let slots = mirror.slots.iter().zip(&mirror.tags);
            let parsed = slots.filter_map(|(word, tag)| Some((Slot::parse(*word)?, Some(*tag))));
            // A reserved slot names no block of the allocator.
            return Ok(parsed.filter(|(word, _)| is_leaving(word)).collect());
        }
        let trip = self.trip(Operation::Compact);
        let mut bytes = self.buffers.take();
        self.read_groups(&trip, &table.spot, &mut bytes).await?;
        let slots = slots_of(&bytes);
        let parsed = slots.iter().filter_map(|word| Slot::parse(*word));
        Ok(parsed.filter(is_leaving).map(|word| (word, None)).collect())
    }

    /// Moves the block that `word` names, if a slot still names it.
    async fn move_block(&self, table: &Table, word: Slot, tag: Option<u64>) -> Result<bool, Error> {
        let trip = self.trip(Operation::Compact);
        let pin = self.blocks.pin();
        let mut bytes = self.buffers.take();
        let tag = match tag {
            Some(tag) => tag,
            None => {
                // Without a ticket the block may be another one already; then no slot names it.
                if !self.blocks.is_leaving(word.place) {
                    return Ok(false);
                }
                self.read_block(&trip, word, &mut bytes).await?;
                match Block::parse(word.place, &bytes) {
                    Ok(block) => self.hasher.hash(block.key).tag,
                    Err(_) => return Ok(false),
                }
            }
        };
        drop(pin);
        let ticket = self.tickets.one(Name::new(table.db, tag), Hold::Exclusive);
        ticket.valid().await;
        let _pin = self.blocks.pin();
        self.check()?;
        let Some(entered) = self.databases[usize::from(table.db)].table(tag) else {
            return Ok(false);
        };
        let entered = entered.enter().await;
        bytes.clear();
        let Some(slot) = self.slot_of(&trip, &entered, word, tag, &mut bytes).await? else {
            return Ok(false);
        };
        let block = self.parse(word, &bytes)?;
        let (hash, expiry) = (self.hasher.hash(block.key), block.head.expiry);
        let length = HEADER_BYTES + block.key.len() + block.rest.len();
        self.relocate(&trip, &entered, (slot, word), hash, expiry, &mut bytes[..length]).await
    }

    /// The slot that names the block of `word`, whose bytes are read into `bytes`.
    async fn slot_of(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        word: Slot,
        tag: u64,
        bytes: &mut Vec<u8>,
    ) -> Result<Option<usize>, Error> {
        if table.is_mirrored {
            let slot = {
                let local = table.local.lock();
                let Some(mirror) = &local.mirror else { return Ok(None) };
                let mut slots = mirror.slots.iter().zip(&mirror.tags);
                slots.position(|(slot, other)| *slot == word.word() && *other == tag)
            };
            if slot.is_some() {
                self.read_block(trip, word, bytes).await?;
            }
            return Ok(slot);
        }
        // The ticket is that of the block's key, if the block is still there.
        let mut groups = self.buffers.take();
        self.read_groups(trip, &table.spot, &mut groups).await?;
        let Some(slot) = slots_of(&groups).iter().position(|slot| *slot == word.word()) else {
            return Ok(None);
        };
        self.read_block(trip, word, bytes).await?;
        let block = self.parse(word, bytes)?;
        let hash = self.hasher.hash(block.key);
        let buckets = Buckets::of(hash.upper, self.shape.groups);
        let is_same = hash.tag == tag && buckets.slots().any(|other| other == slot);
        Ok(is_same.then_some(slot))
    }

    /// Writes the block elsewhere, and changes its slot.
    async fn relocate(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        (slot, word): (usize, Slot),
        hash: KeyHash,
        expiry: u64,
        bytes: &mut [u8],
    ) -> Result<bool, Error> {
        let mut owned = self.owned();
        let place = owned.allocate(table.stripe, bytes.len() as u32).await?;
        crate::layout::block::reseal(place, bytes);
        let new = Slot { place, ..word };
        let (at, old) = (table.spot.slot(slot), word.word());
        owned.keep();
        let write = (place.at(0), &*bytes);
        if self.write_and_swap(trip, write, at, old, new.word()).await? != old {
            owned.free();
            self.lost_swap(trip, at, table.is_mirrored).await?;
            return Ok(false);
        }
        {
            let mut local = table.local.lock();
            local.replace(slot, Some(Entry { word: new.word(), tag: hash.tag, expiry }));
        }
        let standing = self.retire(word, &[]);
        if standing.is_some() {
            self.keep(table, slot, new, bytes, standing);
        }
        Ok(true)
    }
}
