//! `odrp`: remote paging in which every access is a chain (the ODRP baseline of OneSidedMW,
//! §2.2.3).
//!
//! Memory is divided into pages of 4 KiB. Each client has its own table at the memory node, which
//! maps its *page numbers* (positions in its swap space) to pages. A client never learns an address
//! and never has a key: it sends a page number, and the memory node's NIC looks the page up and
//! transfers it.
//!
//! ```text
//!  compute node                              memory node
//!  QP == SEND number, buffer ==============> front QP   RQ: scatters the arguments into the chain
//!                                           worker R ==loopback==> R'   looks up
//!     <== WRITE of the page ================ front QP   SQ: the page
//!  QP == SEND op, number, buffer, reply ===> front QP   RQ: the same
//!                                           worker W ==loopback==> W'   looks up, allocates, frees
//!     <== READ of the page, reply ========== front QP   SQ: the page, the reply, the credit
//! ```
//!
//! | request | page mapped | page not mapped |
//! | --- | --- | --- |
//! | read | the page | "not mapped": it reads as zeros |
//! | write | the page is overwritten | maps a page, then writes ("AllocWrite"); or "no memory" |
//! | free | cleared, unmapped, back in the free queue | "not mapped" |
//!
//! - [`table`]: the tables, byte by byte.
//! - [`read_chain`]: the short chain of reads; [`chain`]: the chain of writes and frees.
//! - `node`: the memory node's side; [`client`]: the client's side.
//!
//! Decisions where the paper is silent:
//! - Each client has one table and two QPs, each with a chain: one queue for reads, one for writes
//!   and frees. A free waits, on the NIC, for the reads and writes that may have looked its page
//!   up. So no access is pending when a page is freed, and the NIC frees without the CPU, as it
//!   allocates.
//! - A write READs the client's buffer. A read WRITEs into the buffer, and that WRITE is the reply.
//!   A read of an unmapped page has no reply: a client knows which pages it has written. A client
//!   that does not know whether a page is mapped reads it through the queue of writes.
//! - The client chooses page numbers. No page is allocated before the first write.
//! - Pages are cleared when they are freed, as in every scheme here.
//!
//! Isolation of clients: a page number replaces 3 bytes of an address, through a key that covers
//! only the client's own table. Every other field of a request either selects a row of a constant
//! table that has a row for every value, or is an address and a key of the client's own memory,
//! used over its own connection. A page number beyond the table ends the client's connection and
//! changes nothing.

pub mod chain;
pub mod client;
mod connection;
pub mod node;
pub mod read_chain;
mod reclaim;
pub mod table;
#[cfg(test)]
mod tests;

pub use client::Client;
pub use node::Node;

use scheme::info::{
    AccessKind, Allocator, Isolation, Need, ReleaseTime, Scheme, SchemeInfo, Sizes,
};
use scheme::registry::{self, ClientFamily, ClientParts, NodeFamily};
use scheme::{CHUNKS_MAX, ClientScheme, Error, NodeScheme, NodeSettings};
use verbs::Nic;
use verbs::direct::DirectNic;

/// Scheme `odrp`: pages of 4 KiB behind a page table for each client. A chain of work requests
/// translates every access.
pub const ODRP: Scheme = &SchemeInfo {
    name: "odrp",
    source: "OneSidedMW §2.2.3",
    allocator: Allocator::Nic,
    isolation: Isolation::PageTable,
    sizes: Sizes::Chunk,
    access: AccessKind::Pages,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[Need::Chains, Need::BigEndianAtomics],
    chunk_bytes: Some(PAGE_BYTES as u64),
    chunks_max: CHUNKS_MAX,
    options: &[],
    unsafe_because: None,
};

/// The schemes of this module.
pub const SCHEMES: &[Scheme] = &[ODRP];

/// Registers the schemes of this module.
pub struct Family;

impl registry::Family for Family {
    fn schemes(&self) -> &'static [Scheme] {
        SCHEMES
    }
}

impl<N: DirectNic> NodeFamily<N> for Family {
    fn node(&self, nic: &N, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error> {
        Ok(Box::new(Node::new(nic.clone(), settings.clone())?))
    }
}

impl<N: Nic> ClientFamily<N> for Family {
    fn client(&self, parts: &ClientParts<'_, N>) -> Result<Box<dyn ClientScheme>, Error> {
        let ClientParts { nic, pd, offer, .. } = *parts;
        Ok(Box::new(Client::new(nic, pd, offer)?))
    }
}

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum PageOp {
    /// Transfer the page to the client.
    Read = 1,
    /// Transfer the page from the client.
    Write = 2,
    /// Unmap the page.
    Free = 3,
}

/// Status codes in replies.
pub mod status {
    /// No reply yet. For a read: the page itself is the reply.
    pub const PENDING: u64 = 0;
    /// The operation was executed.
    pub const DONE: u64 = 1;
    /// The page is not mapped.
    pub const UNMAPPED: u64 = 2;
    /// There is no free page.
    pub const EMPTY: u64 = 3;
    /// The operation is unknown.
    pub const BAD: u64 = 4;
}

/// Bytes of a read request: page number (3), buffer's address (8) and key (4).
pub const READ_BYTES: usize = 15;
/// Bytes of a request to the queue of writes: op (1), page number (3), buffer's address (8) and key
/// (4), reply's address (8) and key (4).
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a reply: a status.
pub const REPLY_BYTES: usize = 8;
