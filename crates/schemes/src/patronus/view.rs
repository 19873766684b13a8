//! A view of the book, for external checkers.

use std::sync::Arc;

use scheme::ClientId;
use verbs::{DmaMemory, Nic};

use super::book::Book;
use super::worker::Shared;

/// View of the book of a memory node.
pub struct LeaseView<N: Nic>(pub(super) Arc<Shared<N>>);

impl<N: Nic> LeaseView<N> {
    /// The donated memory.
    pub fn memory(&self) -> DmaMemory {
        self.0.memory.clone()
    }

    /// The lifetime words of a compute node.
    pub fn words(&self, client: ClientId) -> Option<DmaMemory> {
        self.0.tables.memory(client)
    }

    /// Address of the lifetime of the permission in a slot, in the published form.
    pub fn lifetime(&self, client: ClientId, slot: u32) -> Option<u64> {
        self.0.headers()?.lifetime_of(client, slot)
    }

    /// Calls `look` with the book; `None` while another thread holds its lock.
    pub fn book<T>(&self, look: impl FnOnce(&Book) -> T) -> Option<T> {
        self.0.book.try_lock().map(|book| look(&book))
    }
}
