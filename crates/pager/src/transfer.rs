//! Transfers of pages between frames and slots. The location of a slot's chunk decides the path:
//! the pool, the overflow file, or the page server of a forked child's parent.

use crate::page_table::PageId;
use crate::pager::Pager;
use crate::slots::{ChunkLocation, Place, SlotId};
use crate::staging::FrameId;
use crate::sys::PAGE_BYTES;
use crate::transport::{ChunkHandle, Lane, PageIo};

impl Pager {
    /// Moves pages between slots and frames, given as `pairs`. Adjacent pairs are merged into one
    /// transfer. Returns only when all pages have moved; an unrecoverable error ends the process.
    pub(crate) fn transfer(&self, lane: Lane, write: bool, pairs: &[(SlotId, FrameId)]) {
        if let &[(slot, frame)] = pairs
            && slot.inherited_page().is_none()
        {
            // Fast path for one page on which a thread waits: no heap allocation.
            let place = self.slots().place(slot);
            if let ChunkLocation::Pool(chunk) = place.location {
                return self.transfer_in_pool(lane, write, &[page_io(chunk, &place, frame)]);
            }
        }
        let Plan { pool, overflow, inherited } = self.plan(pairs);
        assert!(!write || inherited.is_empty(), "inherited slots are never written");
        if !pool.is_empty() {
            self.transfer_in_pool(lane, write, &pool);
        }
        if !inherited.is_empty() {
            self.read_inherited(&inherited);
        }
        for (offset, frame, pages) in overflow {
            let store = self.overflow();
            let done = if write {
                store.write(offset, frame, pages)
            } else {
                store.read(offset, frame, pages)
            };
            if let Err(error) = done {
                self.overflow_failed(&error);
            }
        }
    }

    fn transfer_in_pool(&self, lane: Lane, write: bool, ios: &[PageIo]) {
        let done =
            if write { self.transport.write(lane, ios) } else { self.transport.read(lane, ios) };
        if let Err(error) = done {
            self.pool_lost(&error);
        }
    }

    /// Reads slots into frames, `part` pairs at a time. Calls `arrived` with the number of each
    /// part, in order, when the part's pages are in their frames; later parts may still be in
    /// flight then.
    pub(crate) fn read_parts(
        &self,
        pairs: &[(SlotId, FrameId)],
        part: usize,
        arrived: &mut dyn FnMut(usize),
    ) {
        let plans: Vec<Plan> = pairs.chunks(part).map(|pairs| self.plan(pairs)).collect();
        if plans.iter().any(|plan| !plan.overflow.is_empty() || !plan.inherited.is_empty()) {
            self.transfer(Lane::Async, false, pairs);
            (0..plans.len()).for_each(arrived);
            return;
        }
        let parts: Vec<Vec<PageIo>> = plans.into_iter().map(|plan| plan.pool).collect();
        if let Err(error) = self.transport.read_parts(Lane::Async, &parts, arrived) {
            self.pool_lost(&error);
        }
    }

    fn plan(&self, pairs: &[(SlotId, FrameId)]) -> Plan {
        let mut plan = Plan { pool: Vec::with_capacity(pairs.len()), ..Plan::default() };
        let slots = self.slots();
        for &(slot, frame) in pairs {
            if let Some(page) = slot.inherited_page() {
                plan.inherited.push((page, frame));
                continue;
            }
            let place = slots.place(slot);
            match place.location {
                ChunkLocation::Pool(chunk) => {
                    let io = page_io(chunk, &place, frame);
                    match plan.pool.last_mut() {
                        Some(last) if follows(last, &io) => last.pages += 1,
                        _ => plan.pool.push(io),
                    }
                }
                ChunkLocation::Overflow(stretch) => {
                    let start = u64::from(stretch) * slots.chunk_bytes() as u64;
                    plan.overflow.push((start + u64::from(place.offset_bytes), frame.0, 1));
                }
            }
        }
        plan
    }
}

/// Transfers sorted by path.
#[derive(Default)]
struct Plan {
    pool: Vec<PageIo>,
    /// Byte offset in the overflow file, first frame, number of pages.
    overflow: Vec<(u64, u32, u16)>,
    /// Pages that the parent's page server holds for this forked child.
    inherited: Vec<(PageId, FrameId)>,
}

/// Builds the transfer of one page.
fn page_io(chunk: ChunkHandle, place: &Place, frame: FrameId) -> PageIo {
    PageIo { chunk, offset_bytes: place.offset_bytes, frame: frame.0, pages: 1 }
}

fn follows(last: &PageIo, io: &PageIo) -> bool {
    last.chunk == io.chunk
        && last.offset_bytes + u32::from(last.pages) * PAGE_BYTES as u32 == io.offset_bytes
        && last.frame + u32::from(last.pages) == io.frame
        && last.pages < u16::MAX
}
