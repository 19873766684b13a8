//! The memory operations that the pager asks of the kernel, as a trait.
//!
//! The pager's logic ([`crate::pages`]) is generic over [`Memory`]. [`linux`] implements the trait
//! with userfaultfd; the simulator implements it with a model of pages.
//!
//! Two kinds of pages take part. *Program pages* ([`PageId`]) belong to the program's region, and a
//! thread that touches a missing one waits for the pager. *Positions* ([`Position`]) form the
//! *shelf*: private memory that only the pager touches. A page *circulates* between the two: it is
//! taken out of the program's memory to a position, and put back from a position, by moving it and
//! not by copying its bytes.
//!
//! | operation | program page | position |
//! | --- | --- | --- |
//! | [`Memory::take_out`] | mapped to missing | empty to filled |
//! | [`Memory::put_in`] | missing to mapped | filled to empty |
//! | [`Memory::put_zeros`] | missing to mapped | |
//! | [`Memory::drop_pages`] | to missing | |
//! | [`Memory::populate`] | | empty to filled with zeros |
//! | [`Memory::discard`] | | to empty |
//!
//! `take_out` and `put_in` keep the number of present pages, so the bound on local memory holds
//! without a page being freed or allocated.

use crate::page_table::PageId;

mod copying;
pub mod linux;
#[cfg(test)]
pub(crate) mod model;
mod probe;

/// Index of a page of the shelf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u32);

impl Position {
    /// Returns the position `count` pages behind this one.
    pub fn plus(self, count: u32) -> Self {
        Self(self.0 + count)
    }
}

/// Reason why an operation on a run of pages ended before the run's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A device has pinned the next page (O_DIRECT, io_uring's registered buffers): the page must
    /// stay where it is.
    Pinned,
    /// The kernel changes no page now. A fork is in progress whose event must be read first, or the
    /// event has been read and the forking thread has not run since.
    Forking,
    /// The next page is mapped already, or its mapping is gone: the thread must fault again.
    Changed,
}

/// Result of an operation on a run of pages: the first pages of the run are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Number of pages for which the operation is complete.
    pub pages: u32,
    /// `None` if the whole run is done.
    pub stop: Option<Stop>,
}

/// Memory operations of the kernel.
///
/// Each operation names a run of consecutive pages or positions. The caller owns them: it has set
/// the program pages BUSY in the page table, and no other thread uses the positions. An error that
/// leaves the program without its memory ends the process inside the implementation.
pub trait Memory: Send + Sync {
    /// Takes mapped pages out of the program's memory, to empty positions. A page of the run that
    /// the program has dropped meanwhile becomes a position of zeros.
    fn take_out(&self, first: PageId, to: Position, pages: u32) -> Done;

    /// Puts the content of filled positions into missing pages of the program's memory. Wakes the
    /// threads that wait for the pages. The positions are empty then.
    fn put_in(&self, from: Position, first: PageId, pages: u32) -> Done;

    /// Maps zeros at missing pages, and wakes the threads that wait for them. The pages have memory
    /// of their own only with `write`.
    fn put_zeros(&self, first: PageId, pages: u32, write: bool) -> Done;

    /// Drops pages from the program's memory, mapped or missing.
    fn drop_pages(&self, first: PageId, pages: u32);

    /// Moves one mapped page of the program to a missing page of the program. Returns true if the
    /// page at `from` was mapped. `None`: the kernel changes no page now, and nothing was moved.
    fn relocate(&self, from: PageId, to: PageId) -> Option<bool>;

    /// Returns true if a page is at an address. A page may be unmapped, and its number given to
    /// another address, between a fault and the moment in which the page becomes BUSY.
    fn is_at(&self, _page: PageId, _address: usize) -> bool {
        true
    }

    /// Wakes the threads that wait for pages.
    fn wake(&self, first: PageId, pages: u32);

    /// Fills empty positions with zeros.
    fn populate(&self, first: Position, pages: u32);

    /// Frees the memory of positions.
    fn discard(&self, first: Position, pages: u32);

    /// Returns the first byte of a filled position: 4096 bytes, aligned to a page. The shelf is
    /// contiguous: the next position follows.
    fn position(&self, position: Position) -> *mut u8;

    /// Lets other threads run, because the caller waits for one of them.
    fn pause(&self);

    /// Returns the time, in nanoseconds.
    fn now_ns(&self) -> u64;
}
