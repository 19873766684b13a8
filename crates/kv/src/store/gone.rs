//! Keys whose values were on a memory node that is gone.
//!
//! The index lies on the first memory node, and values lie on all of them. If another memory node
//! ends, its values are lost, and their keys count as expired: a read does not find them, and a
//! write replaces them. [`Store::forget_gone`] then deletes them. A value in pieces is lost with
//! any of its pieces.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::Store;
use super::access::Steps;
use super::trips::{Operation, Trip};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{Block, Kind};
use crate::layout::class;
use crate::layout::table::Slot;
use crate::place::Place;
use crate::reach::{Reach, Step, Stopped};
use crate::table::Table;
use crate::ticket::Name;

/// Slots that one round trip clears.
const BATCH: usize = 64;

/// The memory nodes whose loss an operation has met.
///
/// An operation that meets a loss tries again, and then finds the blocks of the memory node lost.
/// So an operation has at most one attempt more for each memory node.
#[derive(Debug, Default)]
pub(super) struct Losses(SmallVec<[u8; 2]>);

impl Losses {
    /// Returns if another attempt does without the memory node that `error` names.
    ///
    /// # Errors
    /// Any other error, and [`Error::GoneAgain`] for a memory node that the operation has met.
    /// Otherwise an operation would try for ever if [`Blocks::is_gone`] contradicts [`Reach::run`].
    pub fn meet(&mut self, error: Error) -> Result<(), Error> {
        match error {
            Error::Stopped(Stopped::Gone { node, why }) if self.0.contains(&node) => {
                Err(Error::GoneAgain { node, why })
            }
            Error::Stopped(Stopped::Gone { node, .. }) => {
                self.0.push(node);
                Ok(())
            }
            other => Err(other),
        }
    }
}

/// A key to be forgotten: its slot, and its blocks besides the slot's own.
struct Lost {
    slot: usize,
    word: Slot,
    parts: Vec<(Place, u32)>,
}

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
        let mut lost = Vec::new();
        for (slot, word) in slots.iter().enumerate() {
            let Some(word) = Slot::parse(*word) else { continue };
            if self.blocks.is_gone(word.place) {
                lost.push(Lost { slot, word, parts: Vec::new() });
            } else if word.length == class::PIECES
                && let Some(parts) = self.parts_if_lost(&trip, word).await?
            {
                lost.push(Lost { slot, word, parts });
            }
        }
        for batch in lost.chunks(BATCH) {
            let clear = |lost: &Lost| Step::Write { at: table.spot.slot(lost.slot), from: &[0; 8] };
            let mut steps: Steps<'_> = batch.iter().map(clear).collect();
            self.commit(&trip, &mut steps).await?;
            batch.iter().for_each(|lost| self.forget(table, lost));
        }
        Ok(lost.len() as u64)
    }

    /// True if a piece of the value of `block`, or a list of pieces, is on a memory node that is
    /// gone.
    pub(super) fn lacks_pieces(&self, block: &Block<'_>) -> bool {
        if block.head.kind == Kind::String {
            return false;
        }
        // A malformed list is reported where the list is read.
        let Ok(list) = block.list() else { return false };
        let pieces = list.pieces().flatten().chain(list.next);
        pieces.into_iter().any(|(place, _)| self.blocks.is_gone(place))
    }

    /// The pieces and lists of the value that `word` names, if one of them is lost.
    async fn parts_if_lost(
        &self,
        trip: &Trip<'_>,
        word: Slot,
    ) -> Result<Option<Vec<(Place, u32)>>, Error> {
        let mut buffer = self.buffers.take();
        self.read_block(trip, word, &mut buffer).await?;
        let block = self.parse(word, &buffer)?;
        if !self.lacks_pieces(&block) {
            return Ok(None);
        }
        let (mut pieces, lists) = self.pieces(trip, word.place, &block).await?;
        pieces.extend(lists);
        Ok(Some(pieces))
    }

    /// Takes a key out of what is known locally.
    fn forget(&self, table: &Table, lost: &Lost) {
        let tag = {
            let mut local = table.local.lock();
            let tag = local.mirror.as_ref().map(|mirror| mirror.tags[lost.slot]);
            local.replace(lost.slot, None);
            tag
        };
        self.databases[usize::from(table.db)].count(-1);
        self.retire(lost.word, &lost.parts);
        match tag {
            Some(tag) => self.touched(Name::new(table.db, tag)),
            // Without a mirror the key is not known any more.
            None => self.flushed(table.db),
        }
    }
}
