//! The staging area: a ring of frames between the program's memory and the pool.
//!
//! ```text
//!        oldest                                         newest
//!   ...  Clean  Clean  Free  Writing  Writing  Dirty  Dirty  [next] ...
//! ```
//!
//! | frame | meaning |
//! | --- | --- |
//! | Free | holds no page |
//! | Dirty | holds a staged page that differs from its slot or has no slot |
//! | Writing | is being written to its slot |
//! | Orphan | is being written, but its page has left; slot and frame are freed afterwards |
//! | Clean | holds a staged page, equal to its slot; reclaimed when a frame is needed |
//!
//! Two kinds of threads change a frame's state. The evictor changes Free to Dirty, Dirty to
//! Writing, Writing to Clean or Orphan to Free, and Clean to Free with the page BUSY. A thread that
//! has the frame's page BUSY calls [`Staging::leave`]. The content of a frame changes only while
//! the frame is Free, so it can be copied without a lock while its page is BUSY.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::page_table::PageId;
use crate::slots::SlotId;
use crate::sys::PAGE_BYTES;
use crate::transport::StagingMemory;

/// Index of a frame in the staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrameId(pub u32);

/// State of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FrameState {
    /// Holds no page.
    Free,
    /// Holds a page that is not yet stored.
    Dirty,
    /// Holds a page that is being stored.
    Writing,
    /// Holds a page that is being stored but has left the frame.
    Orphan,
    /// Holds a page that is stored.
    Clean,
}

/// Slot of a page that leaves its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeavingSlot {
    /// The slot's content equals the frame's.
    Stored(SlotId),
    /// The slot, if there is one, holds an older content.
    Unstored(Option<SlotId>),
}

const NO_SLOT: u64 = u64::MAX;

#[derive(Debug)]
struct Frame {
    state: AtomicU32,
    page: AtomicU32,
    slot: AtomicU64,
}

/// The ring of frames.
#[derive(Debug)]
pub struct Staging {
    memory: StagingMemory,
    first: u32,
    frames: Vec<Frame>,
    next: AtomicU32,
    write_next: AtomicU32,
    dirty: AtomicU32,
}

// SAFETY: frames of the memory are named by index; the base is never dereferenced here.
unsafe impl Send for Staging {}
// SAFETY: as above; everything else is atomic.
unsafe impl Sync for Staging {}

impl Staging {
    /// Creates a ring of the frames of `memory` from `first` on.
    pub fn new(memory: StagingMemory, first: u32) -> Self {
        assert!(first < memory.frames, "no frames remain for staging");
        let frame = || Frame {
            state: AtomicU32::new(FrameState::Free as u32),
            page: AtomicU32::new(0),
            slot: AtomicU64::new(NO_SLOT),
        };
        Self {
            memory,
            first,
            frames: (first..memory.frames).map(|_| frame()).collect(),
            next: AtomicU32::new(0),
            write_next: AtomicU32::new(0),
            dirty: AtomicU32::new(0),
        }
    }

    /// Returns the number of frames in the ring.
    pub fn len(&self) -> u32 {
        self.frames.len() as u32
    }

    /// Returns true if the ring has no frame.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the number of Dirty frames.
    pub fn dirty(&self) -> u32 {
        self.dirty.load(Ordering::Acquire)
    }

    /// Returns the address of a frame's 4 KiB.
    pub fn address(&self, frame: FrameId) -> *mut u8 {
        assert!(frame.0 < self.memory.frames);
        // SAFETY: in bounds of the staging memory.
        unsafe { self.memory.base.add(frame.0 as usize * PAGE_BYTES) }
    }

    fn frame(&self, frame: FrameId) -> &Frame {
        &self.frames[(frame.0 - self.first) as usize]
    }

    /// Returns the state of a frame.
    pub fn state(&self, frame: FrameId) -> FrameState {
        match self.frame(frame).state.load(Ordering::Acquire) {
            0 => FrameState::Free,
            1 => FrameState::Dirty,
            2 => FrameState::Writing,
            3 => FrameState::Orphan,
            _ => FrameState::Clean,
        }
    }

    fn change(&self, frame: FrameId, from: FrameState, to: FrameState) -> bool {
        let state = &self.frame(frame).state;
        let done = state
            .compare_exchange(from as u32, to as u32, Ordering::AcqRel, Ordering::Acquire)
            .is_ok();
        if done && from == FrameState::Dirty {
            self.dirty.fetch_sub(1, Ordering::AcqRel);
        }
        if done && to == FrameState::Dirty {
            self.dirty.fetch_add(1, Ordering::AcqRel);
        }
        done
    }

    /// Returns the page of a frame.
    pub fn page(&self, frame: FrameId) -> PageId {
        PageId(self.frame(frame).page.load(Ordering::Acquire))
    }

    /// Sets the page of a frame whose content has moved to another page. The caller has both pages
    /// BUSY.
    pub fn set_page(&self, frame: FrameId, page: PageId) {
        self.frame(frame).page.store(page.0, Ordering::Release);
    }

    /// Returns the slot of a frame.
    pub fn slot(&self, frame: FrameId) -> Option<SlotId> {
        let slot = self.frame(frame).slot.load(Ordering::Acquire);
        (slot != NO_SLOT).then_some(SlotId(slot))
    }

    /// Sets the slot of a frame.
    pub fn set_slot(&self, frame: FrameId, slot: SlotId) {
        self.frame(frame).slot.store(slot.0, Ordering::Release);
    }

    /// Returns the next free frame, checking each frame at most once. `reclaim` is called for each
    /// Clean frame; it makes the frame's page remote and returns true if it can.
    pub fn allocate(&self, reclaim: impl Fn(FrameId) -> bool) -> Option<FrameId> {
        for _ in 0..self.len() {
            let at = self.next.load(Ordering::Relaxed);
            self.next.store((at + 1) % self.len(), Ordering::Relaxed);
            let frame = FrameId(self.first + at);
            match self.state(frame) {
                FrameState::Free => return Some(frame),
                FrameState::Clean if reclaim(frame) => {
                    let freed = self.change(frame, FrameState::Clean, FrameState::Free);
                    assert!(freed, "no other thread changes a reclaimed frame");
                    return Some(frame);
                }
                _ => {}
            }
        }
        None
    }

    /// Makes a free frame Dirty, holding `page`.
    pub fn fill(&self, frame: FrameId, page: PageId, slot: Option<SlotId>) {
        let meta = self.frame(frame);
        meta.page.store(page.0, Ordering::Release);
        meta.slot.store(slot.map_or(NO_SLOT, |slot| slot.0), Ordering::Release);
        let filled = self.change(frame, FrameState::Free, FrameState::Dirty);
        assert!(filled, "{frame:?} was not free");
    }

    /// Changes at most `count` Dirty frames, the oldest first, to Writing and adds them to `batch`.
    pub fn start_writing(&self, count: u32, batch: &mut Vec<FrameId>) {
        for _ in 0..self.len() {
            if batch.len() as u32 >= count || self.dirty() == 0 {
                return;
            }
            let at = self.write_next.load(Ordering::Relaxed);
            self.write_next.store((at + 1) % self.len(), Ordering::Relaxed);
            let frame = FrameId(self.first + at);
            if self.change(frame, FrameState::Dirty, FrameState::Writing) {
                batch.push(frame);
            }
        }
    }

    /// Records that a frame has been written. For an orphan, frees the frame and returns its slot
    /// for the caller to free.
    #[must_use]
    pub fn written(&self, frame: FrameId) -> Option<SlotId> {
        if self.change(frame, FrameState::Writing, FrameState::Clean) {
            return None;
        }
        let slot = self.slot(frame);
        let freed = self.change(frame, FrameState::Orphan, FrameState::Free);
        assert!(freed, "{frame:?} was neither written nor orphaned");
        slot
    }

    /// Removes the page from its frame. The caller has the page BUSY and no longer needs the
    /// content.
    pub fn leave(&self, frame: FrameId) -> LeavingSlot {
        loop {
            let slot = self.slot(frame);
            if self.change(frame, FrameState::Dirty, FrameState::Free) {
                return LeavingSlot::Unstored(slot);
            }
            if self.change(frame, FrameState::Writing, FrameState::Orphan) {
                return LeavingSlot::Unstored(None);
            }
            if self.change(frame, FrameState::Clean, FrameState::Free) {
                return LeavingSlot::Stored(slot.expect("a clean frame has a slot"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staging(frames: u32) -> Staging {
        let base = crate::sys::map_anonymous(frames as usize * PAGE_BYTES).unwrap();
        Staging::new(StagingMemory { base: base as *mut u8, frames }, 2)
    }

    #[test]
    fn clean_frame_is_reclaimed_for_another_page() {
        let staging = staging(4);
        let frame = staging.allocate(|_| false).unwrap();
        staging.fill(frame, PageId(9), None);
        assert_eq!(staging.dirty(), 1);
        let mut batch = Vec::new();
        staging.start_writing(8, &mut batch);
        assert_eq!(batch, [frame]);
        staging.set_slot(frame, SlotId(5));
        assert_eq!(staging.written(frame), None);
        assert_eq!(staging.state(frame), FrameState::Clean);
        let other = staging.allocate(|_| false).unwrap();
        staging.fill(other, PageId(10), None);
        assert_eq!(staging.allocate(|_| false), None, "nothing can be reclaimed");
        assert_eq!(staging.allocate(|clean| staging.page(clean) == PageId(9)), Some(frame));
    }

    #[test]
    fn page_can_leave_its_frame_in_every_state() {
        let staging = staging(3);
        let frame = staging.allocate(|_| false).unwrap();
        staging.fill(frame, PageId(1), Some(SlotId(7)));
        assert_eq!(staging.leave(frame), LeavingSlot::Unstored(Some(SlotId(7))));

        staging.fill(frame, PageId(1), None);
        let mut batch = Vec::new();
        staging.start_writing(1, &mut batch);
        staging.set_slot(frame, SlotId(8));
        assert_eq!(staging.leave(frame), LeavingSlot::Unstored(None));
        assert_eq!(staging.written(frame), Some(SlotId(8)), "the orphan's slot is to be freed");

        staging.fill(frame, PageId(1), Some(SlotId(9)));
        batch.clear();
        staging.start_writing(1, &mut batch);
        assert_eq!(staging.written(frame), None);
        assert_eq!(staging.leave(frame), LeavingSlot::Stored(SlotId(9)));
        assert_eq!((staging.state(frame), staging.dirty()), (FrameState::Free, 0));
    }
}

#[cfg(test)]
#[path = "staging_tests.rs"]
mod edges;
