//! The lifetime words of the compute nodes (Patronus §5.3): one table for each compute node, in
//! memory of the memory node.
//!
//! A type-2 window opens the table for READs and atomics to the management QP of its compute node,
//! once, at the admission. So a WRITE of a word is refused by the NIC, no compute node reaches the
//! words of another, and an acquisition binds no window for its word. (Patronus has a window for
//! the header of each permission.)

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use parking_lot::RwLock;
use scheme::{ClientId, Error};
use verbs::wqe::Umr;
use verbs::{Access, DmaMemory, Key, MemoryRegion, MemoryWindow, Nic, Qpn};

use super::book::Words;
use super::headers::Headers;
use super::message::Lifetime;
use super::options::TableTerms;

/// Bytes of a word.
const WORD: usize = 8;

/// The table of one compute node.
pub struct Table<N: Nic> {
    region: N::Mr,
    window: N::Mw,
    words: u32,
}

impl<N: Nic> Table<N> {
    /// A table of `words` words in `pd`. [`Table::bind`] opens it.
    pub fn new(nic: &N, pd: &N::Pd, words: u32) -> Result<Self, Error> {
        let memory = nic.alloc_dma(words as usize * WORD)?;
        let region = nic.reg_mr(pd, &memory, Access::LOCAL_ALL)?;
        Ok(Self { region, window: nic.alloc_mw(pd)?, words })
    }

    /// The key that [`Table::bind`] makes valid.
    fn key(&self) -> Key {
        let first = self.window.key();
        Key::new(first.index(), first.tag().wrapping_add(1))
    }

    /// The UMR that opens the table to the management QP `qpn`.
    pub fn bind(&self, qpn: Qpn) -> Umr {
        let access = Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let (start, len) = (self.region.memory().addr(), self.words * WORD as u32);
        Umr::bind(self.window.key(), self.key().tag(), qpn, access, self.region.key(), start, len)
    }

    /// The memory of the words.
    pub fn memory(&self) -> DmaMemory {
        self.region.memory().clone()
    }

    /// The terms that the compute node gets.
    pub fn terms(&self) -> TableTerms {
        TableTerms {
            lifetimes_addr: self.region.memory().addr(),
            lifetimes_key: self.key().0,
            lifetimes: self.words,
        }
    }
}

/// The memory of all tables; in the published form, the headers. The NIC's atomics are atomic with
/// respect to the CPU ([`Need::GlobalAtomics`](scheme::info::Need)).
#[derive(Default)]
pub struct Tables {
    tables: RwLock<HashMap<ClientId, DmaMemory>>,
    headers: Option<Headers>,
}

impl Tables {
    /// Headers instead of tables.
    pub fn published(headers: Headers) -> Self {
        Self { tables: RwLock::default(), headers: Some(headers) }
    }

    /// The headers, in the published form.
    pub fn headers(&self) -> Option<&Headers> {
        self.headers.as_ref()
    }

    /// Adds the table of a compute node.
    pub fn insert(&self, client: ClientId, memory: DmaMemory) {
        self.tables.write().insert(client, memory);
    }

    /// Removes the table of a compute node.
    pub fn remove(&self, client: ClientId) {
        self.tables.write().remove(&client);
    }

    /// The table of a compute node.
    pub fn memory(&self, client: ClientId) -> Option<DmaMemory> {
        self.tables.read().get(&client).cloned()
    }

    /// Calls `with` with the word in a slot; `None` if the compute node has left.
    fn word<T>(
        &self,
        client: ClientId,
        slot: u32,
        with: impl FnOnce(&DmaMemory, usize) -> T,
    ) -> Option<T> {
        let tables = self.tables.read();
        let memory = tables.get(&client)?;
        let at = slot as usize * WORD;
        (at < memory.len()).then(|| with(memory, at))
    }
}

impl Words for &Tables {
    fn load(&mut self, client: ClientId, slot: u32) -> Lifetime {
        if let Some(headers) = &self.headers {
            return headers.load(client, slot);
        }
        let word = self.word(client, slot, |memory, at| memory.load_be64(at));
        Lifetime(word.unwrap_or_default())
    }

    fn swap(&mut self, client: ClientId, slot: u32, new: Lifetime) -> Lifetime {
        if let Some(headers) = &self.headers {
            return headers.swap(client, slot, new);
        }
        let swap = |memory: &DmaMemory, at| {
            u64::from_be(memory.word64(at).swap(new.0.to_be(), Ordering::AcqRel))
        };
        Lifetime(self.word(client, slot, swap).unwrap_or_default())
    }
}
