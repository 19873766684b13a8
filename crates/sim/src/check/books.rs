//! The memory node's books, whichever scheme keeps them.

use fabric::{DmaMemory, MemoryRegion};
use pool::AnyNode;
use pool::finemem;
use pool::odrp::table::page_of;
use pool::onesidedmw::layout::Memory;
use pool::rpc;
use pool::scheme::ClientId;

use crate::nic::SimNic;

/// The tables of compute nodes that are there.
#[derive(Default)]
pub(super) struct Tables {
    all: Vec<(ClientId, DmaMemory)>,
    /// They cannot be seen now.
    hidden: bool,
}

impl Tables {
    /// Whose a page is, once for each row that maps it.
    fn owners(&self, memory: &Memory<SimNic>, entry: u32) -> impl Iterator<Item = ClientId> {
        let pages = memory.shape.chunks as u64;
        let maps = move |rows: &DmaMemory| {
            (0..pages).filter(|n| page_of(memory, rows, *n) == Some(entry)).count()
        };
        self.all.iter().flat_map(move |(client, rows)| (0..maps(rows)).map(|_| *client))
    }
}

/// The tables of compute nodes whose chains may run.
pub(super) fn tables(node: &AnyNode<SimNic>) -> Vec<(ClientId, DmaMemory)> {
    match node {
        AnyNode::Odrp(node) => node.tables(),
        _ => Vec::new(),
    }
}

/// A look into them.
pub(super) enum Books {
    /// Table and free queue of `onesidedmw`.
    Chains(Box<Memory<SimNic>>),
    /// Free queue of `odrp`, and the tables of its compute nodes.
    Pages(Box<Memory<SimNic>>, Tables),
    /// The CPU's table.
    Rpc(rpc::Books<SimNic>),
    /// Bitmaps and logs of `finemem`.
    Tree(finemem::Books),
}

impl Books {
    pub fn of(node: &AnyNode<SimNic>) -> Self {
        match node {
            AnyNode::OneSidedMw(node) => Self::Chains(Box::new(node.memory().clone())),
            AnyNode::Rpc(node) => Self::Rpc(node.books()),
            AnyNode::Odrp(node) => Self::Pages(Box::new(node.memory().clone()), Tables::default()),
            AnyNode::FineMem(node) => Self::Tree(node.books()),
            _ => unreachable!("a scheme that this check does not know"),
        }
    }

    /// The donated memory.
    pub fn memory(&self) -> DmaMemory {
        match self {
            Self::Chains(memory) | Self::Pages(memory, _) => memory.chunks.memory().clone(),
            Self::Rpc(books) => books.memory(),
            Self::Tree(books) => books.memory(),
        }
    }

    /// Who owns a chunk, as the books have it. Nothing is said while somebody writes.
    pub fn owner(&self, entry: u32) -> Option<Option<ClientId>> {
        match self {
            Self::Chains(memory) => match memory.owner(entry) {
                0 => Some(None),
                owner => Some(Some(ClientId(owner as u32))),
            },
            Self::Pages(memory, tables) => {
                (!tables.hidden).then(|| tables.owners(memory, entry).next())
            }
            Self::Rpc(books) => books.chunk(entry).map(|c| c.owner),
            Self::Tree(books) => Some(books.owner(entry)),
        }
    }

    /// A page that two have, or one twice.
    pub fn has_two(&self, entry: u32) -> Option<(ClientId, ClientId)> {
        let Self::Pages(memory, tables) = self else { return None };
        if tables.hidden {
            return None;
        }
        let mut owners = tables.owners(memory, entry);
        Some((owners.next()?, owners.next()?))
    }

    /// Compute nodes' tables are these now; `None`: that cannot be seen.
    pub fn tables_are(&mut self, now: Option<Vec<(ClientId, DmaMemory)>>) {
        if let Self::Pages(_, tables) = self {
            tables.hidden = now.is_none();
            tables.all = now.unwrap_or_default();
        }
    }

    /// True for an address of what compute nodes allocate on.
    pub fn is_metadata(&self, addr: u64) -> bool {
        matches!(self, Self::Tree(books) if books.is_metadata(addr))
    }

    /// A chunk is opened for its owner, who does not have it.
    pub fn is_aside(&self, entry: u32) -> bool {
        match self {
            Self::Chains(_) | Self::Pages(..) => false,
            Self::Rpc(books) => books.chunk(entry).is_some_and(|c| c.aside),
            Self::Tree(books) => books.is_quarantined(entry),
        }
    }

    /// What is free, in any order. Nothing is said while somebody writes.
    ///
    /// # Errors
    /// What is wrong with the free queue itself.
    pub fn free(&self) -> Result<Option<Vec<u32>>, String> {
        let memory = match self {
            Self::Chains(memory) | Self::Pages(memory, _) => memory,
            Self::Rpc(books) => return Ok(books.free()),
            Self::Tree(books) => {
                return Ok(Some((0..books.chunks()).filter(|c| !books.is_taken(*c)).collect()));
            }
        };
        // All slots: one that head has passed and nobody has emptied yet holds a free entry too.
        let slots = 0..memory.shape.slots() as usize;
        let mut free = Vec::new();
        for value in slots.map(|at| memory.queue.memory().load_be64(at * 8)).filter(|v| *v != 0) {
            let entry = memory.entry_of(value);
            free.push(entry.ok_or("the free queue holds what is no entry")?);
        }
        let permits = memory.permits();
        if permits > free.len() as i64 {
            let entries = free.len();
            return Err(format!(
                "{permits} permits are out for {entries} entries in the free queue"
            ));
        }
        Ok(Some(free))
    }
}
