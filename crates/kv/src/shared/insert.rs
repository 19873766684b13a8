//! Insertion of a new key, beside other clients that may insert the same key.
//!
//! 1. CAS an empty slot to a tentative one. Readers pass over it.
//! 2. Read both buckets again. Of two clients that insert one key, the later CAS precedes the read
//!    of its client, so at least one of the two sees the other.
//! 3. A final slot of the same key: empty the own slot, and continue as an update. A tentative one
//!    in a lower slot: empty the own slot, and begin again. In a higher slot: empty that slot.
//! 4. CAS the own slot to its final word. The key is there from now on. If the CAS fails, another
//!    client has emptied or frozen the slot: begin again.

use smallvec::SmallVec;

use super::change::Tried;
use super::fresh::{Fresh, Known};
use super::look::{Among, Hit, Seen, Want, is_same_block};
use super::words::{TENTATIVE, is_frozen, is_tentative};
use super::{Key, Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::reach::Reach;
use crate::search::View;

/// Attempts after which a client empties a tentative slot of another client.
const PATIENCE: u32 = 3;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Inserts a key that is in no final slot of `seen`. `twins`: tentative slots of the same key.
    pub(super) async fn insert(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        seen: &Seen,
        twins: &[Hit],
        attempt: u32,
        fresh: &mut Fresh<'_, B>,
    ) -> Result<Tried, Error> {
        let table = seen.table;
        if !twins.is_empty() && attempt < PATIENCE {
            return Ok(Tried::Again);
        }
        for twin in twins {
            let at = self.slot_at(table, twin.slot);
            if self.swap(&op.trip, at, twin.raw, 0).await? != twin.raw {
                return Ok(Tried::Again);
            }
        }
        let Some(slot) = seen.view.buckets.free(|slot| seen.view.slot(slot) == 0) else {
            let is_full = seen.view.buckets.slots().all(|slot| !is_frozen(seen.view.slot(slot)));
            self.help_split(op, key, table, is_full).await?;
            return Ok(Tried::Again);
        };
        let at = self.slot_at(table, slot);
        let (last, tentative) = (fresh.word.word(), fresh.word.word() | TENTATIVE);
        let known = fresh.know(Known::Slot);
        let mut view = View::new(seen.view.buckets);
        let old = {
            let mut again = self.read_buckets(table, &mut view);
            self.write_and_swap(op, fresh, at, 0, tentative, &mut again).await?
        };
        if old != 0 {
            fresh.know(known);
            return Ok(Tried::Again);
        }
        if view.slot(slot) != tentative || !self.is_only(op, key, seen, &view, twins, slot).await? {
            // Emptied or frozen already, or to be emptied now.
            self.swap(&op.trip, at, tentative, 0).await?;
            fresh.know(Known::Readers);
            return Ok(Tried::Again);
        }
        if self.swap(&op.trip, at, tentative, last).await? != tentative {
            fresh.know(Known::Readers);
            return Ok(Tried::Again);
        }
        Ok(Tried::Done)
    }

    /// True if `mine` is the only slot of the key in `view`, which was read after the slot was
    /// written. Empties tentative slots of the key that are higher.
    async fn is_only(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        before: &Seen,
        view: &View,
        twins: &[Hit],
        mine: usize,
    ) -> Result<bool, Error> {
        // A slot with the block that the first search has read is of another key. A twin that was
        // emptied may be back, so twins are not passed over.
        let is_known = |slot: &usize| {
            let is_twin = twins.iter().any(|twin| twin.slot == *slot);
            *slot == mine || !is_twin && is_same_block(view.slot(*slot), before.view.slot(*slot))
        };
        let known: SmallVec<[usize; 28]> = view.buckets.slots().filter(is_known).collect();
        let mut buffer = self.buffers.take();
        let among = Among { view, tentative: true, known: &known };
        let hits = self.search(op, key, Want::Presence, among, &mut buffer).await?;
        for hit in hits {
            if !is_tentative(hit.raw) {
                return Ok(false);
            }
            let at = self.slot_at(before.table, hit.slot);
            if hit.slot < mine || self.swap(&op.trip, at, hit.raw, 0).await? != hit.raw {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
