//! Seals of slots: nonce and tag of each slot whose content is encrypted, 24 bytes.
//!
//! Slots of the overflow file are always encrypted, because the file lies on a disk. Slots of the
//! pool are encrypted with `granary run --seal` (TDMEM §4.2). A seal belongs to one store of one
//! slot, so an older content of the slot, or that of another slot, fails authentication.

use std::sync::{Arc, OnceLock};

use seal::{Cipher, Seal, Sealer};

use super::{ChunkLocation, SlotId, Slots};
use crate::config::EXIT_PAGER;
use crate::sys;

/// The chunks whose content is encrypted.
#[derive(Clone, Default)]
pub enum Sealing {
    /// None.
    #[default]
    None,
    /// Those of the overflow file.
    Overflow(Arc<Key>),
    /// All.
    All(Arc<Key>),
}

/// The key of a process, which is made at its first use.
///
/// aws-lc finds the processor's AES instructions in a constructor of its own, which runs after that
/// of the preload library. A key that is made before uses tables instead, and takes 37 us for a
/// page instead of half a microsecond.
#[derive(Default)]
pub struct Key {
    cipher: Cipher,
    sealer: OnceLock<Sealer>,
}

impl Key {
    /// The key for a cipher.
    pub fn new(cipher: Cipher) -> Arc<Self> {
        Arc::new(Self { cipher, sealer: OnceLock::new() })
    }

    fn get(&self) -> &Sealer {
        self.sealer.get_or_init(|| match Sealer::new(self.cipher) {
            Ok(sealer) => sealer,
            Err(error) => sys::die(EXIT_PAGER, &format!("cannot encrypt pages: {error}")),
        })
    }
}

impl Sealing {
    pub(super) fn includes(&self, location: ChunkLocation) -> bool {
        match self {
            Self::None => false,
            Self::Overflow(_) => matches!(location, ChunkLocation::Overflow(_)),
            Self::All(_) => true,
        }
    }

    fn key(&self) -> Option<&Key> {
        match self {
            Self::None => None,
            Self::Overflow(key) | Self::All(key) => Some(key),
        }
    }

    /// Returns the sealer, and makes the key at the first call. Called only by the pager's threads.
    pub fn sealer(&self) -> Option<&Sealer> {
        self.key().map(Key::get)
    }

    /// Returns the sealer if the key was made.
    pub fn made(&self) -> Option<&Sealer> {
        self.key().and_then(|key| key.sealer.get())
    }

    /// Tells the sealer that the content of a seal is not needed any more.
    pub(super) fn forget(&self, seal: &Seal) {
        if let Some(sealer) = self.made() {
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
    use super::*;
    use crate::transport::ChunkHandle;

    const CHUNK_BYTES: usize = 1 << 16;

    fn sealed(sealing: fn(Arc<Key>) -> Sealing) -> (Slots, Arc<Key>) {
        let key = Key::new(Cipher::default());
        let mut slots = Slots::new(CHUNK_BYTES);
        slots.set_sealing(sealing(key.clone()));
        (slots, key)
    }

    /// A key that is made before the constructor of aws-lc does not use AES instructions.
    #[test]
    fn key_is_made_at_its_first_use() {
        let (slots, _) = sealed(Sealing::All);
        slots.sealing.forget(&Seal::default());
        assert!(slots.sealing.made().is_none());
        assert!(slots.sealing.sealer().is_some() && slots.sealing.made().is_some());
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
        let (mut slots, key) = sealed(Sealing::All);
        let sealer = key.get();
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
