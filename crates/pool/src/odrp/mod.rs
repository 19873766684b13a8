//! `odrp`: remote paging whose every access is a chain (the ODRP baseline of OneSidedMW, §2.2.3).
//!
//! Memory is pages of 4 KiB. Each compute node has a table of its own at the memory node, which maps
//! its *page numbers* (places in its swap space) to pages. It never learns an address and never has a
//! key: it sends a number, and the memory node's NIC looks it up and moves the page.
//!
//! ```text
//!  compute node                              memory node
//!  QP == SEND number, buffer ==============> front QP   RQ: scatters the arguments into the chain
//!                                            worker R ==loopback==> R'   looks up
//!     <== WRITE of the page ================ front QP   SQ: the page
//!  QP == SEND op, number, buffer, reply ===> front QP   likewise
//!                                            worker W ==loopback==> W'   looks up, allocates, frees
//!     <== READ of the page, reply ========== front QP   SQ: the page, the reply, the credit
//! ```
//!
//! | request | the page is mapped | it is not |
//! | --- | --- | --- |
//! | read | the page | "not mapped": it reads as zeros |
//! | write | the page is overwritten | a free page is mapped, then written ("AllocWrite"); or "no memory" |
//! | free | cleared, unmapped, back in the free queue | "not mapped" |
//!
//! - [`table`]: the tables, byte by byte.
//! - [`read_chain`]: the chain of reads, which is short; [`chain`]: that of writes and frees.
//! - `node`: the memory node's side; [`client`]: the compute node's.
//!
//! Decisions, where the paper says little:
//! - Two QPs with a chain each, and one table, for each compute node: a queue for what is read, a queue for
//!   what is written and freed. A free waits, on the NIC, for the reads and writes that may have looked its
//!   page up. So no access is pending when a page is given back, and the NIC frees as it allocates.
//! - A write READs the compute node's buffer; a read WRITEs into it, and that WRITE is the reply. A page
//!   that is not mapped has none: a compute node reads what it has written, and knows what that is. Who does
//!   not know it asks the other queue.
//! - The compute node chooses page numbers. Nothing is allocated before the first write.
//! - Pages are cleared when they are freed, as in every scheme here.
//!
//! What keeps a compute node to itself: its number replaces 3 bytes of an address, through a key that
//! covers its own table only; everything else of a request either picks a row of a constant table that
//! has a row for every value, or is an address and a key of its own memory, used over its own connection.
//! A number beyond the table ends its connection, with nothing changed.

pub mod chain;
pub mod client;
mod connection;
pub mod node;
pub mod read_chain;
pub mod table;
#[cfg(test)]
mod tests;

pub use client::Client;
pub use node::Node;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// What a request asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Ask {
    /// Give me the page.
    Read = 1,
    /// Take the page.
    Write = 2,
    /// Unmap the page.
    Free = 3,
}

/// What a reply says.
pub mod status {
    /// Not answered yet; or, of a read, the page itself is the answer.
    pub const PENDING: u64 = 0;
    /// It was done.
    pub const DONE: u64 = 1;
    /// The page is not mapped.
    pub const UNMAPPED: u64 = 2;
    /// There is no free page.
    pub const EMPTY: u64 = 3;
    /// There is no such request.
    pub const BAD: u64 = 4;
}

/// Bytes of a request to read: page number (3), buffer's address (8) and key (4).
pub const READ_BYTES: usize = 15;
/// Bytes of a request to the other queue: op (1), page number (3), buffer's address (8) and key (4), reply's address (8)
/// and key (4).
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a reply: a status.
pub const REPLY_BYTES: usize = 8;
