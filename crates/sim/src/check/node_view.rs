//! The memory node's allocation state, in one form for all schemes.

use std::any::Any;
use std::sync::Arc;

use scheme::index::EntryId;
use scheme::{ClientId, NodeScheme};
use schemes::blocks::ChunkIndex;
use schemes::odrp::table::page_of;
use schemes::onesidedmw::layout::Memory;
use schemes::patronus::LeaseView;
use schemes::patronus::book::{ObjectView, PermissionId, PermissionView};
use schemes::patronus::message::ObjectId;
use schemes::tdmem::layout::{Layout, Owner};
use schemes::tdmem::{Tier, table};
use schemes::{finemem, odrp, onesidedmw, patronus, rpc, tdmem};
use verbs::{DmaMemory, Key, MemoryRegion};

use crate::nic::SimNic;

/// The page tables of the connected compute nodes.
#[derive(Default)]
pub(super) struct Tables {
    all: Vec<(ClientId, DmaMemory)>,
    /// Whether the tables cannot be read now.
    hidden: bool,
}

impl Tables {
    /// Returns the owner of a page, once for each row that maps the page.
    fn owners(&self, memory: &Memory<SimNic>, entry: EntryId) -> impl Iterator<Item = ClientId> {
        let pages = memory.shape.chunks as u64;
        let maps = move |rows: &DmaMemory| {
            (0..pages).filter(|n| page_of(memory, rows, *n) == Some(entry)).count()
        };
        self.all.iter().flat_map(move |(id, rows)| (0..maps(rows)).map(|_| *id))
    }
}

/// The part of a memory node's state that a [`NodeView`] of a scheme with pages must be told.
#[derive(Default)]
pub(super) struct PageState {
    /// The page tables of the compute nodes whose chains may run.
    tables: Vec<(ClientId, DmaMemory)>,
    /// The compute nodes by their numbers as owners of pages.
    owners: Vec<(Owner, ClientId)>,
}

impl PageState {
    pub fn of(node: &(dyn NodeScheme + 'static)) -> Self {
        let any: &dyn Any = node;
        if let Some(node) = any.downcast_ref::<odrp::Node<SimNic>>() {
            return Self { tables: node.tables(), owners: Vec::new() };
        }
        let node = any.downcast_ref::<tdmem::Node<SimNic>>();
        let owners = node.map_or_else(Vec::new, |node| node.owners().collect());
        Self { tables: Vec::new(), owners }
    }
}

/// The tables of the engine of `tdmem`, and the pages.
pub(super) struct EngineView {
    tables: Arc<table::Tables>,
    layout: Layout,
    key: Key,
    pages: DmaMemory,
    owners: Vec<(Owner, ClientId)>,
}

impl EngineView {
    fn of(node: &tdmem::Node<SimNic>) -> Self {
        let (layout, memory) = (node.layout(), node.memory());
        let (first, end) = (layout.page(0) as usize, layout.bytes() as usize);
        let pages = memory.slice(first, end - first).expect("the pages are in the region");
        let (tables, key) = (node.tables().clone(), node.key());
        Self { tables, layout, key, pages, owners: Vec::new() }
    }

    /// Returns the compute node with this number; `None` if it is not known now.
    fn client(&self, number: Owner) -> Option<ClientId> {
        self.owners.iter().find(|(owner, _)| *owner == number).map(|(_, client)| *client)
    }
}

/// The book of a memory node with leases.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct BookState {
    pub permissions: Vec<PermissionView>,
    pub objects: Vec<ObjectView>,
    /// The requests that wait for each object with waiting requests, in their order.
    pub queues: Vec<(ObjectId, Vec<PermissionId>)>,
}

impl BookState {
    fn of(book: &patronus::book::Book) -> Self {
        let objects: Vec<ObjectView> = book.objects().collect();
        let awaited = objects.iter().filter(|object| object.waiting > 0);
        let queue = |object: &ObjectView| (object.id, book.waiters(object.id.entry).collect());
        let queues = awaited.map(queue).collect();
        Self { permissions: book.permissions().collect(), objects, queues }
    }

    pub fn permission(&self, id: PermissionId) -> Option<&PermissionView> {
        self.permissions.iter().find(|permission| permission.id == id)
    }

    pub fn object(&self, id: ObjectId) -> Option<&ObjectView> {
        self.objects.iter().find(|object| object.id == id)
    }

    /// Returns the requests that wait for an object.
    pub fn queue(&self, id: ObjectId) -> &[PermissionId] {
        let queue = self.queues.iter().find(|(object, _)| *object == id);
        queue.map_or(&[], |(_, queue)| queue)
    }
}

/// A view of a memory node's allocation state.
pub(super) enum NodeView {
    /// Table and free queue of `onesidedmw`.
    Chains(Box<Memory<SimNic>>),
    /// Free queue of `odrp`, and the page tables of its compute nodes.
    Pages(Box<Memory<SimNic>>, Tables),
    /// The table of the CPU.
    Rpc(rpc::AllocationView<SimNic>),
    /// Bitmaps and logs of `finemem`.
    Tree(finemem::AllocationView),
    /// Tables of `tdmem`.
    Engine(EngineView),
    /// The book of `patronus`.
    Leases(LeaseView<SimNic>),
}

impl NodeView {
    pub fn of(node: &(dyn NodeScheme + 'static)) -> Self {
        let any: &dyn Any = node;
        if let Some(node) = any.downcast_ref::<onesidedmw::Node<SimNic>>() {
            Self::Chains(Box::new(node.memory().clone()))
        } else if let Some(node) = any.downcast_ref::<odrp::Node<SimNic>>() {
            Self::Pages(Box::new(node.memory().clone()), Tables::default())
        } else if let Some(node) = any.downcast_ref::<rpc::Node<SimNic>>() {
            Self::Rpc(node.allocation_view())
        } else if let Some(node) = any.downcast_ref::<finemem::Node<SimNic>>() {
            Self::Tree(node.allocation_view())
        } else if let Some(node) = any.downcast_ref::<tdmem::Node<SimNic>>() {
            Self::Engine(EngineView::of(node))
        } else if let Some(node) = any.downcast_ref::<patronus::Node<SimNic>>() {
            Self::Leases(node.lease_view())
        } else {
            unreachable!("the check does not support this scheme")
        }
    }

    /// Returns the donated memory.
    pub fn memory(&self) -> DmaMemory {
        match self {
            Self::Chains(memory) | Self::Pages(memory, _) => memory.chunks.memory().clone(),
            Self::Rpc(view) => view.memory(),
            Self::Tree(view) => view.memory(),
            Self::Engine(view) => view.pages.clone(),
            Self::Leases(view) => view.memory(),
        }
    }

    /// Returns the book, in a scheme with leases; `None` while its lock is held.
    pub fn book(&self) -> Option<BookState> {
        match self {
            Self::Leases(view) => view.book(BookState::of),
            _ => None,
        }
    }

    /// Returns the lifetime words of a compute node, in a scheme with leases.
    pub fn words(&self, client: ClientId) -> Option<DmaMemory> {
        match self {
            Self::Leases(view) => view.words(client),
            _ => None,
        }
    }

    /// Returns the address of the lifetime of the permission in a slot, in a scheme with headers.
    pub fn lifetime(&self, client: ClientId, slot: u32) -> Option<u64> {
        match self {
            Self::Leases(view) => view.lifetime(client, slot),
            _ => None,
        }
    }

    /// Returns whether a key is that of the region behind an engine.
    pub fn is_behind_engine(&self, key: Key) -> bool {
        matches!(self, Self::Engine(view) if view.key == key)
    }

    /// Returns the page behind an engine that an access reaches, and the offset within the page.
    pub fn page_behind_engine(&self, addr: u64, key: Key) -> Option<(u32, u64)> {
        let Self::Engine(view) = self else { return None };
        let at = addr.checked_sub(view.layout.page(0)).filter(|_| key == view.key)?;
        let size = tdmem::PAGE_BYTES as u64;
        (at / size < view.layout.pages.into()).then_some(((at / size) as u32, at % size))
    }

    /// Returns the number of each page's owner, in scheme `tdmem`.
    pub fn owner_numbers(&self) -> Vec<Owner> {
        match self {
            Self::Engine(view) => {
                (0..view.tables.pages()).map(|page| view.tables.owner(page)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the compute node that has a number as an owner; `None` if it is not known now.
    pub fn owner_of_number(&self, number: Owner) -> Option<ClientId> {
        match self {
            Self::Engine(view) => view.client(number),
            _ => None,
        }
    }

    /// Returns the owner of a chunk in the node's state. `None` while that state is being changed.
    pub fn owner(&self, chunk: u32) -> Option<Option<ClientId>> {
        let chunk = ChunkIndex::new(chunk);
        match self {
            Self::Chains(memory) => match memory.owner(EntryId::from(chunk)) {
                0 => Some(None),
                owner => Some(Some(ClientId(owner as u32))),
            },
            Self::Pages(memory, tables) => {
                (!tables.hidden).then(|| tables.owners(memory, EntryId::from(chunk)).next())
            }
            Self::Rpc(view) => view.chunk(chunk).map(|c| c.owner),
            Self::Tree(view) => Some(view.owner(chunk)),
            Self::Engine(view) => match view.tables.owner(chunk.raw()) {
                0 => Some(None),
                number => view.client(number).map(Some),
            },
            // Objects are no chunks; the book is compared instead.
            Self::Leases(_) => None,
        }
    }

    /// Returns two owners of a page that is mapped twice; they may be equal.
    pub fn has_two(&self, chunk: u32) -> Option<(ClientId, ClientId)> {
        let Self::Pages(memory, tables) = self else { return None };
        if tables.hidden {
            return None;
        }
        let mut owners = tables.owners(memory, EntryId::new(chunk));
        Some((owners.next()?, owners.next()?))
    }

    /// Sets the current state of the pages; `None` if it cannot be read.
    pub fn set_pages(&mut self, now: Option<PageState>) {
        match self {
            Self::Pages(_, tables) => {
                tables.hidden = now.is_none();
                tables.all = now.unwrap_or_default().tables;
            }
            Self::Engine(view) => view.owners = now.map_or_else(Vec::new, |now| now.owners),
            _ => {}
        }
    }

    /// Returns whether an address belongs to the metadata on which compute nodes allocate.
    pub fn is_metadata(&self, addr: u64) -> bool {
        matches!(self, Self::Tree(view) if view.is_metadata(addr))
    }

    /// Returns whether a chunk is accessible to its owner but not granted: a deferred free, or
    /// quarantined.
    pub fn is_deferred(&self, chunk: u32) -> bool {
        let chunk = ChunkIndex::new(chunk);
        match self {
            Self::Chains(_) | Self::Pages(..) | Self::Engine(_) | Self::Leases(_) => false,
            Self::Rpc(view) => view.chunk(chunk).is_some_and(|c| c.aside),
            Self::Tree(view) => view.is_quarantined(chunk),
        }
    }

    /// Returns the free chunks in any order. `Ok(None)` while the state is being changed.
    ///
    /// # Errors
    /// A defect of the free queue itself.
    pub fn free(&self) -> Result<Option<Vec<u32>>, String> {
        let memory = match self {
            Self::Chains(memory) | Self::Pages(memory, _) => memory,
            Self::Rpc(view) => {
                return Ok(view.free().map(|free| free.into_iter().map(ChunkIndex::raw).collect()));
            }
            Self::Tree(view) => {
                let free = view.chunks().filter(|chunk| !view.is_taken(*chunk));
                return Ok(Some(free.map(ChunkIndex::raw).collect()));
            }
            Self::Leases(_) => return Ok(None),
            Self::Engine(view) => {
                let tiers = Tier::DONOR.into_iter();
                return Ok(Some(tiers.flat_map(|tier| view.tables.tier(tier).iter()).collect()));
            }
        };
        // All slots: a slot that the head has passed but that is not emptied yet holds a free entry
        // too.
        let slots = 0..memory.shape.slots() as usize;
        let mut free = Vec::new();
        for value in slots.map(|slot| memory.slot_value(slot)).filter(|v| *v != 0) {
            let entry = memory.entry_of(value);
            let entry = entry.ok_or("the free queue contains a value that names no entry")?;
            free.push(entry.raw());
        }
        let permits = memory.permits();
        if permits > free.len() as i64 && !memory.shape.published {
            let entries = free.len();
            return Err(format!("{permits} permits exist for {entries} entries in the free queue"));
        }
        Ok(Some(free))
    }
}
