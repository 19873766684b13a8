//! The memory node's books, whichever scheme keeps them.

use fabric::{DmaMemory, MemoryRegion};
use pool::AnyNode;
use pool::onesidedmw::layout::Memory;
use pool::rpc;
use pool::scheme::ClientId;

use crate::nic::SimNic;

/// A look into them.
pub(super) enum Books {
    /// Table and free queue of `onesidedmw`.
    Chains(Box<Memory<SimNic>>),
    /// The CPU's table.
    Rpc(rpc::Books<SimNic>),
}

impl Books {
    pub fn of(node: &AnyNode<SimNic>) -> Self {
        match node {
            AnyNode::OneSidedMw(node) => Self::Chains(Box::new(node.memory().clone())),
            AnyNode::Rpc(node) => Self::Rpc(node.books()),
            _ => unreachable!("a scheme that this check does not know"),
        }
    }

    /// The donated memory.
    pub fn memory(&self) -> DmaMemory {
        match self {
            Self::Chains(memory) => memory.chunks.memory().clone(),
            Self::Rpc(books) => books.memory(),
        }
    }

    /// Who owns a chunk, as the books have it. Nothing is said while somebody writes.
    pub fn owner(&self, entry: u32) -> Option<Option<ClientId>> {
        match self {
            Self::Chains(memory) => match memory.owner(entry) {
                0 => Some(None),
                owner => Some(Some(ClientId(owner as u32))),
            },
            Self::Rpc(books) => books.chunk(entry).map(|c| c.owner),
        }
    }

    /// A chunk is opened for its owner, who does not have it.
    pub fn is_aside(&self, entry: u32) -> bool {
        match self {
            Self::Chains(_) => false,
            Self::Rpc(books) => books.chunk(entry).is_some_and(|c| c.aside),
        }
    }

    /// What is free, in any order. Nothing is said while somebody writes.
    ///
    /// # Errors
    /// What is wrong with the free queue itself.
    pub fn free(&self) -> Result<Option<Vec<u32>>, String> {
        let Self::Chains(memory) = self else {
            let Self::Rpc(books) = self else { unreachable!("there are two kinds") };
            return Ok(books.free());
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
