//! The way of a page between private memory and a frame: copied, or sealed and opened.
//!
//! The NIC reaches the frames, and so may the memory node's process. So plain content of a sealed
//! slot never lies in a frame, and a frame is opened into private memory that no program sees
//! before the tag was right (TDMEM §4.2).

use std::time::Duration;

use crate::backing;
use crate::config::EXIT_PAGER;
use crate::memory::Memory;
use crate::page_table::PageId;
use crate::pages::Pages;
use crate::slots::{Sealing, SlotId, Source};
use crate::sys::{self, PAGE_BYTES};
use crate::transport::{Direction, FrameId};

impl<M: Memory> Pages<M> {
    /// Encrypts the slots that `sealing` names. Called before the first fault.
    pub fn with_sealing(self, sealing: Sealing) -> Self {
        self.slots().set_sealing(sealing.clone());
        Self { sealing, ..self }
    }

    /// Replaces a key of 24 hours. Called now and then.
    pub(super) fn age_key(&self) {
        if let Some(sealer) = self.sealing.made() {
            // After an error the old key goes on, and the next call tries again.
            let _ = sealer.tick(Duration::from_nanos(self.memory.now_ns()));
        }
    }

    /// Brings the content of a slot to private memory, after its READ to a frame. Ends the process
    /// if the slot is sealed and the frame does not have the content of the last WRITE.
    ///
    /// # Safety
    /// The frame belongs to the caller, and `to` is a private page that belongs to the caller.
    pub(crate) unsafe fn take_from_frame(
        &self,
        page: PageId,
        slot: SlotId,
        frame: FrameId,
        to: *mut u8,
    ) {
        let (source, seal) = {
            let slots = self.slots();
            (slots.source(slot), slots.seal(slot))
        };
        let from = match source {
            // SAFETY: by the caller.
            Source::Word(word) => return unsafe { backing::fill(to, word) },
            Source::Inherited(_) => self.backing.inherited_page(frame),
            Source::Place(_) => self.backing.frame(frame),
        };
        let sealer = seal.and_then(|_| self.sealing.sealer());
        let (Some(seal), Source::Place(place), Some(sealer)) = (seal, source, sealer) else {
            // SAFETY: by the caller; both have memory of a page.
            return unsafe { from.copy_to_nonoverlapping(to, PAGE_BYTES) };
        };
        // SAFETY: by the caller. `open_raw` reads the frame once, whatever others write to it.
        if unsafe { sealer.open_raw(slot.0, &seal, from, to, PAGE_BYTES) }.is_err() {
            self.backing.tampered(page, place);
        }
    }

    /// Brings a page to a frame, before the WRITE to its slot.
    ///
    /// # Safety
    /// The frame belongs to the caller. `from` is a private page that no other thread writes.
    pub(crate) unsafe fn put_to_frame(&self, slot: SlotId, from: *const u8, frame: FrameId) {
        let to = self.backing.frame(frame);
        let is_sealed = self.slots().seal(slot).is_some();
        let Some(sealer) = is_sealed.then(|| self.sealing.sealer()).flatten() else {
            // SAFETY: by the caller; both have memory of a page.
            return unsafe { from.copy_to_nonoverlapping(to, PAGE_BYTES) };
        };
        // SAFETY: by the caller. `seal_raw` writes the frame once, and never reads it.
        match unsafe { sealer.seal_raw(slot.0, from, to, PAGE_BYTES) } {
            Ok(seal) => self.slots().set_seal(slot, seal),
            Err(error) => sys::die(EXIT_PAGER, &format!("cannot seal a page: {error}")),
        }
    }

    /// Reads at most 64 slots through frames to private memory.
    ///
    /// # Safety
    /// The frames belong to the caller. Each target is a private page that belongs to the caller.
    pub(crate) unsafe fn read_now(&self, pages: &[(PageId, SlotId, FrameId, *mut u8)]) {
        let pairs: Vec<_> = pages.iter().map(|&(_, slot, frame, _)| (slot, frame)).collect();
        self.transfer_now(Direction::Read, &pairs);
        for &(page, slot, frame, to) in pages {
            // SAFETY: by the caller.
            unsafe { self.take_from_frame(page, slot, frame, to) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cipher;
    use crate::pages::model;
    use crate::slots::Key;

    #[test]
    fn key_is_replaced_after_a_day() {
        const SECOND_NS: u64 = 1_000_000_000;
        let pages = model::pages().with_sealing(Sealing::All(Key::new(Cipher::default())));
        let sealer = pages.sealing.sealer().expect("a key");
        // A content that is still needed keeps its key.
        let mut sealed = [0; PAGE_BYTES];
        sealer.seal(1, &[7; PAGE_BYTES], &mut sealed).expect("a seal");
        let keys_after = |seconds: u64| {
            pages.memory.pass(seconds * SECOND_NS);
            pages.update_gauges();
            sealer.statistics().keys
        };
        assert_eq!([keys_after(0), keys_after(24 * 3600 - 1), keys_after(1)], [1, 1, 2]);
    }
}
