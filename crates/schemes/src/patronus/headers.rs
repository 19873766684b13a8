//! Headers of permissions in the published form, and the lifetimes in them (Patronus §5.2).
//!
//! A header is in the header pool, which is reserved at the start, or in the 32 bytes in front of
//! the object that its permission opens (§5.4, contiguity).

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use scheme::ClientId;
use verbs::DmaMemory;

use super::book::PermissionId;
use super::header::{Header, LIFETIME};
use super::message::Lifetime;

/// Place of a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeaderPlace {
    /// Offset in the header pool.
    Pool(u64),
    /// Offset in the donated memory: in front of an object.
    Hole(u64),
}

/// The headers of a memory node.
pub struct Headers {
    pool: DmaMemory,
    /// The donated memory.
    memory: DmaMemory,
    /// The lifetime of the permission in each slot of a compute node.
    words: Mutex<HashMap<(ClientId, u32), Word>>,
}

/// A lifetime: its place, and the nonce of its permission, which a header does not have.
#[derive(Clone, Copy)]
struct Word {
    place: HeaderPlace,
    nonce: u16,
}

impl Headers {
    /// No permission has a header.
    pub fn new(pool: DmaMemory, memory: DmaMemory) -> Self {
        Self { pool, memory, words: Mutex::default() }
    }

    /// The header pool.
    pub fn pool(&self) -> &DmaMemory {
        &self.pool
    }

    fn at(&self, place: HeaderPlace) -> (&DmaMemory, usize) {
        match place {
            HeaderPlace::Pool(offset) => (&self.pool, offset as usize),
            HeaderPlace::Hole(offset) => (&self.memory, offset as usize),
        }
    }

    /// Address of the lifetime in a header.
    pub fn lifetime_addr(&self, place: HeaderPlace) -> u64 {
        let (memory, at) = self.at(place);
        memory.addr() + at as u64 + LIFETIME
    }

    /// Address of the lifetime of the permission in a slot; `None` if it has no header.
    pub fn lifetime_of(&self, client: ClientId, slot: u32) -> Option<u64> {
        let word = self.words.lock().get(&(client, slot)).copied()?;
        Some(self.lifetime_addr(word.place))
    }

    /// Writes the header of a permission, with lifetime 0.
    pub fn begin(&self, id: PermissionId, place: HeaderPlace, header: &Header) {
        let (memory, at) = self.at(place);
        memory.write(at, &header.to_bytes());
        memory.store_be64(at + LIFETIME as usize, 0);
        let word = Word { place, nonce: id.number.nonce() };
        self.words.lock().insert((id.client, id.number.slot()), word);
    }

    /// Forgets the header of a permission, whose bytes stay.
    pub fn end(&self, id: PermissionId) {
        self.words.lock().remove(&(id.client, id.number.slot()));
    }

    /// The lifetime of the permission in a slot.
    pub fn load(&self, client: ClientId, slot: u32) -> Lifetime {
        let Some(word) = self.words.lock().get(&(client, slot)).copied() else {
            return Lifetime(0);
        };
        let (memory, at) = self.at(word.place);
        Lifetime::new(word.nonce, memory.load_be64(at + LIFETIME as usize))
    }

    /// Replaces the lifetime of the permission in a slot, and returns the old one.
    pub fn swap(&self, client: ClientId, slot: u32, new: Lifetime) -> Lifetime {
        let Some(word) = self.words.lock().get(&(client, slot)).copied() else {
            return Lifetime(0);
        };
        let (memory, at) = self.at(word.place);
        let lifetime = memory.word64(at + LIFETIME as usize);
        let old = lifetime.swap(new.micros().to_be(), Ordering::AcqRel);
        Lifetime::new(word.nonce, u64::from_be(old))
    }
}
