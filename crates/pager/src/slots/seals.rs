//! Seals of slots: nonce and tag of each slot whose content is encrypted, 24 bytes.
//!
//! Slots of the overflow file are always encrypted, because the file lies on a disk. Slots of the
//! pool are encrypted with `granary run --seal` (TDMEM §4.2). A seal belongs to one store of one
//! slot, so an older content of the slot, or that of another slot, fails authentication.

use std::sync::Arc;

use seal::{Seal, Sealer};

use super::{ChunkLocation, SlotId, Slots};

/// The chunks whose content is encrypted.
#[derive(Clone, Default)]
pub enum Sealing {
    /// None.
    #[default]
    None,
    /// Those of the overflow file.
    Overflow(Arc<Sealer>),
    /// All.
    All(Arc<Sealer>),
}

impl Sealing {
    pub(super) fn includes(&self, location: ChunkLocation) -> bool {
        match self {
            Self::None => false,
            Self::Overflow(_) => matches!(location, ChunkLocation::Overflow(_)),
            Self::All(_) => true,
        }
    }

    /// Returns the sealer.
    pub fn sealer(&self) -> Option<&Sealer> {
        match self {
            Self::None => None,
            Self::Overflow(sealer) | Self::All(sealer) => Some(sealer),
        }
    }

    /// Tells the sealer that the content of a seal is not needed any more.
    pub(super) fn forget(&self, seal: &Seal) {
        if let Some(sealer) = self.sealer() {
            sealer.forget(seal);
        }
    }
}

impl Slots {
    /// Seals the chunks that are added from now on.
    pub fn set_sealing(&mut self, sealing: Sealing) {
        self.sealing = sealing;
    }

    /// Returns the seal of a slot, or `None` if its content is not encrypted.
    pub fn seal(&self, slot: SlotId) -> Option<Seal> {
        if !slot.has_place() {
            return None;
        }
        let (index, page) = self.split(slot);
        let chunk = self.chunks[index].as_ref().expect("a slot's chunk exists");
        chunk.seals.get(page as usize).copied()
    }

    /// Returns the bytes of the tables of slots: fingerprints, seals, and what each chunk has.
    pub fn table_bytes(&self) -> u64 {
        let chunks = u64::from(self.pool_chunks) + u64::from(self.overflow_chunks);
        let sealed = match self.sealing {
            Sealing::None => 0,
            Sealing::Overflow(_) => u64::from(self.overflow_chunks),
            Sealing::All(_) => chunks,
        };
        let [print, seal] = [size_of::<u128>(), size_of::<Seal>()].map(|bytes| bytes as u64);
        let chunk = size_of::<Option<super::Chunk>>() as u64;
        chunks * chunk + ((chunks * print + sealed * seal) << self.pages_log2)
    }

    /// Records the seal of the content that is written to a slot.
    pub fn set_seal(&mut self, slot: SlotId, seal: Seal) {
        let (index, page) = self.split(slot);
        let chunk = self.chunks[index].as_mut().expect("a slot's chunk exists");
        let old = std::mem::replace(&mut chunk.seals[page as usize], seal);
        self.sealing.forget(&old);
    }
}

#[cfg(test)]
mod tests {
    use seal::Cipher;

    use super::*;
    use crate::transport::ChunkHandle;

    const CHUNK_BYTES: usize = 1 << 16;

    fn sealed(sealing: fn(Arc<Sealer>) -> Sealing) -> (Slots, Arc<Sealer>) {
        let sealer = Arc::new(Sealer::new(Cipher::default()).unwrap());
        let mut slots = Slots::new(CHUNK_BYTES);
        slots.set_sealing(sealing(sealer.clone()));
        (slots, sealer)
    }

    #[test]
    fn overflow_slots_are_sealed() {
        let (mut slots, _) = sealed(Sealing::Overflow);
        slots.add_pool_chunk(ChunkHandle(3));
        let in_pool = slots.allocate().unwrap();
        assert_eq!(slots.seal(in_pool), None);
        let pool_only = slots.table_bytes();
        slots.add_overflow_chunk();
        let in_file = slots.allocate().unwrap();
        assert_eq!(slots.seal(in_file), Some(Seal::default()));
        assert!(slots.table_bytes() >= 2 * pool_only + 16 * 24);
        let (mut all, _) = sealed(Sealing::All);
        all.add_pool_chunk(ChunkHandle(3));
        let slot = all.allocate().unwrap();
        assert_eq!(all.seal(slot), Some(Seal::default()));
        assert_eq!(all.seal(SlotId::word(7).unwrap()), None);
    }

    #[test]
    fn old_key_goes_with_the_last_slot_that_needs_it() {
        let (mut slots, sealer) = sealed(Sealing::All);
        slots.add_pool_chunk(ChunkHandle(0));
        let (one, other) = (slots.allocate().unwrap(), slots.allocate().unwrap());
        let mut stored = [0; 64];
        for slot in [one, other] {
            let seal = sealer.seal(slot.0, &[1; 64], &mut stored).unwrap();
            slots.set_seal(slot, seal);
        }
        sealer.rekey().unwrap();
        assert_eq!(sealer.statistics().keys, 2);
        // One slot is written again, the other one is freed.
        let seal = sealer.seal(one.0, &[2; 64], &mut stored).unwrap();
        slots.set_seal(one, seal);
        assert_eq!(sealer.statistics().keys, 2);
        assert!(slots.free(other).is_none());
        assert_eq!(sealer.statistics().keys, 1);
        let mut opened = [0; 64];
        sealer.open(one.0, &slots.seal(one).unwrap(), &stored, &mut opened).unwrap();
        assert_eq!(opened, [2; 64]);
    }
}
