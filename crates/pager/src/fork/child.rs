//! State of a forked child in the page server, and the inbox through which children arrive there.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use super::channel::{self, Block, Message};
use crate::extent::Extent;
use crate::page_table::PageId;
use crate::region::Region;
use crate::slots::{Epoch, SlotId};
use crate::sys::PAGE_SHIFT;
use crate::uffd::Uffd;

/// Pages that had slots at a fork, ascending, with their slots. Resident pages are included: the
/// child got them from the kernel and does not read them.
pub(super) type Snapshot = Vec<(PageId, SlotId)>;
/// Indices of blocks that may contain a page of the child.
pub(super) type Touched = BTreeSet<u32>;

/// State of a child in the page server.
pub(super) struct Child {
    /// Descriptor of a light child's faults. `None` for a promoted child, and until a child has
    /// sent a descriptor that it opened itself.
    pub faults: Option<Uffd>,
    /// Sockets for calls and notices. A child made by a raw system call has none.
    pub channel: Option<[OwnedFd; 2]>,
    /// Socket for the calls of a promoted child's own page server.
    pub server_calls: Option<OwnedFd>,
    /// Epoch of the frozen slots that the snapshot names.
    pub epoch: Epoch,
    pub snapshot: Arc<Snapshot>,
    /// Sockets of a fork that the child has announced.
    pub forks: Option<[OwnedFd; 2]>,
    /// Shared with children that this child makes while it is light. A superfluous block is
    /// harmless.
    pub touched: Rc<RefCell<Touched>>,
    /// Extents at the fork, ascending by address. A light child does not change them; its parent
    /// may.
    pub extents: Arc<[Extent]>,
    pub pages_served: u32,
    /// The child can be promoted. Before that, libc's part of fork runs in the child, which may
    /// read any number of pages.
    pub is_light: bool,
    pub promotion_requested: bool,
}

impl Child {
    pub fn new(
        faults: Option<Uffd>,
        channel: Option<[OwnedFd; 2]>,
        epoch: Epoch,
        snapshot: Arc<Snapshot>,
        touched: Touched,
        extents: Arc<[Extent]>,
    ) -> Box<Self> {
        Box::new(Self {
            faults,
            channel,
            server_calls: None,
            epoch,
            snapshot,
            forks: None,
            touched: Rc::new(RefCell::new(touched)),
            extents,
            pages_served: 0,
            is_light: false,
            promotion_requested: false,
        })
    }
}

/// Queue through which the parent's threads send children to the page server.
pub(super) struct Inbox {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl Inbox {
    /// Creates an empty queue, in the calling thread's descriptor table.
    pub fn new() -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: `ends` is valid for the write; this function owns the descriptors.
        unsafe {
            if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self {
                reader: OwnedFd::from_raw_fd(ends[0]),
                writer: OwnedFd::from_raw_fd(ends[1]),
            })
        }
    }

    /// Returns the descriptor from which [`take_arrival`] reads.
    pub fn reader(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    /// Returns the descriptor to which a zero word is written, to end the page server.
    pub fn writer(&self) -> RawFd {
        self.writer.as_raw_fd()
    }

    /// Sends a child. The caller has counted it as a dependent.
    pub fn put(&self, child: Box<Child>) -> io::Result<()> {
        let pointer = (Box::into_raw(child) as usize).to_ne_bytes();
        // SAFETY: a pipe transfers a pointer's bytes together or not at all.
        let put =
            unsafe { libc::write(self.writer.as_raw_fd(), pointer.as_ptr().cast(), pointer.len()) };
        if put == pointer.len() as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A message in an inbox.
pub(super) enum Arrival {
    Child(Box<Child>),
    /// The page server must end, because the program has changed its credentials.
    End,
}

/// Takes the next message out of an inbox, by its reader; `None` if the inbox is empty.
pub(super) fn take_arrival(reader: RawFd) -> Option<Arrival> {
    let mut pointer = [0u8; size_of::<usize>()];
    // SAFETY: valid for the write.
    let got = unsafe { libc::read(reader, pointer.as_mut_ptr().cast(), pointer.len()) };
    (got == pointer.len() as isize).then(|| match usize::from_ne_bytes(pointer) {
        0 => Arrival::End,
        // SAFETY: the pointer was written by `Inbox::put`, and is read only once.
        pointer => Arrival::Child(unsafe { Box::from_raw(pointer as *mut Child) }),
    })
}

impl Child {
    /// Asks the child to get a pager of its own, once.
    pub fn request_promotion(&mut self) {
        if let Some([_, notices]) = &self.channel
            && !std::mem::replace(&mut self.promotion_requested, true)
        {
            let _ = channel::send(notices.as_raw_fd(), Message::of(channel::PROMOTE), &[]);
        }
    }

    /// Returns the page that contains an address of the child, which has its parent's region.
    pub fn page(&self, region: &Region, address: usize) -> Option<PageId> {
        if region.clip(address, 1).is_some() {
            return Some(region.page(address));
        }
        let at = self.extents.partition_point(|extent| extent.end() <= address);
        let extent = self.extents.get(at).filter(|extent| extent.base <= address)?;
        Some(PageId(extent.first + ((address - extent.base) >> PAGE_SHIFT) as u32))
    }

    /// Returns the slot of a page in the snapshot.
    pub fn slot(&self, page: PageId) -> Option<SlotId> {
        let at = self.snapshot.binary_search_by_key(&page, |&(page, _)| page).ok()?;
        Some(self.snapshot[at].1)
    }

    /// Removes pages from the snapshot: they read as zeros.
    pub fn forget(&mut self, range: Range<u32>) {
        let at = |page: u32| self.snapshot.partition_point(|&(p, _)| p.0 < page);
        let dropped = at(range.start)..at(range.end.max(range.start));
        if !dropped.is_empty() {
            Arc::make_mut(&mut self.snapshot).drain(dropped);
        }
    }

    /// Returns all blocks in which the child may have a page, with the pages there that the page
    /// server has.
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let touched = self.touched.borrow();
        let mut touched_blocks = touched.iter().copied().peekable();
        let empty = |index: u32| Block { index: u64::from(index), bits: [0; 8] };
        for &(page, _) in self.snapshot.iter() {
            let index = page.0 / channel::BLOCK_PAGES;
            while let Some(other) = touched_blocks.next_if(|&other| other <= index) {
                blocks.extend((other < index).then(|| empty(other)));
            }
            if blocks.last().is_none_or(|last| last.index != u64::from(index)) {
                blocks.push(empty(index));
            }
            let bit = page.0 % channel::BLOCK_PAGES;
            let last = blocks.last_mut().expect("just pushed");
            last.bits[bit as usize / 64] |= 1 << (bit % 64);
        }
        blocks.extend(touched_blocks.map(empty));
        blocks
    }
}
