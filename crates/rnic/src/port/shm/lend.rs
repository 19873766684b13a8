//! Memory of an attached process that another process, the *borrower*, maps too, so that it can use
//! queues of the attached process.
//!
//! The NIC's process seals shared memory against new writable mappings (`sharing.rs`). So the
//! borrower has to map the memory before the owner attaches:
//!
//! ```text
//! owner                               borrower                     NIC's process
//! LendableMemory::new
//!   descriptors ────────────────────> BorrowedMemory::map
//!   <──────────────────────── mapped
//! Attached::connect_lendable ────────────────────────────────────> maps and seals
//! ```
//!
//! There are two memfds: the doorbell page of the function, and an arena from which the function
//! allocates until the arena is full.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::super::error::Error;
use super::client::DOORBELLS_WANTED;
use super::doorbell::{DoorbellPage, MappedDoorbell};
use super::page::{GONE, PAGE_BYTES_MAX, SLEEPING, doorbells_in, page_bytes};
use super::sharing;
use verbs::DmaMemory;

/// Maximum bytes of an arena.
pub const ARENA_MAX: usize = 256 << 20;

/// Memory for the queues of a function that another process can borrow.
pub struct LendableMemory {
    pub(super) page: Shareable,
    pub(super) arena: Shareable,
}

/// A memfd with its mapping in this process.
pub(super) struct Shareable {
    pub file: OwnedFd,
    pub memory: DmaMemory,
}

impl Shareable {
    fn new(name: &str, bytes: usize) -> Result<Self, Error> {
        let (file, memory) = sharing::make(name, bytes)?;
        Ok(Self { file, memory })
    }
}

impl LendableMemory {
    /// Allocates a doorbell page and an arena of `bytes` bytes, at most [`ARENA_MAX`].
    pub fn new(bytes: usize) -> Result<Self, Error> {
        if bytes > ARENA_MAX {
            let why = format!("{bytes} bytes of lendable memory; at most {ARENA_MAX} are possible");
            return Err(Error::Refused { why });
        }
        let page = Shareable::new("granary-doorbells", page_bytes(DOORBELLS_WANTED))?;
        Ok(Self { page, arena: Shareable::new("granary-lendable", bytes)? })
    }

    /// The descriptors for [`BorrowedMemory::map`], in its order.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.page.file.as_fd(), self.arena.file.as_fd()]
    }
}

/// An arena that is shared with the NIC's process. Parts are never used again.
pub(super) struct Arena {
    memory: DmaMemory,
    used: Mutex<usize>,
}

impl Arena {
    pub fn new(memory: DmaMemory) -> Self {
        Self { memory, used: Mutex::new(0) }
    }

    /// Allocates `bytes` bytes, rounded up to pages; `None` if the arena has less.
    pub fn allocate(&self, bytes: usize) -> Option<DmaMemory> {
        let bytes = bytes.max(1).checked_next_multiple_of(rustix::param::page_size())?;
        let mut used = self.used.lock();
        let part = self.memory.slice(*used, bytes)?;
        *used += bytes;
        Some(part)
    }

    /// Offset of `part` in the arena; `None` if it lies elsewhere.
    pub fn offset(&self, part: &DmaMemory) -> Option<usize> {
        let offset = part.addr().checked_sub(self.memory.addr())? as usize;
        self.memory.at(offset, part.len()).map(|_| offset)
    }
}

/// The memory of another process's queues, mapped in this process.
pub struct BorrowedMemory {
    page: DmaMemory,
    arena: DmaMemory,
}

impl BorrowedMemory {
    /// Maps the memory behind [`LendableMemory::descriptors`]. Must be called before the owner
    /// attaches to the NIC. Trusts neither the descriptors nor, later, the contents.
    pub fn map(descriptors: [OwnedFd; 2]) -> Result<Self, Error> {
        let [page, arena] = &descriptors;
        let page = sharing::borrow(page, PAGE_BYTES_MAX as u64)?;
        Ok(Self { page, arena: sharing::borrow(arena, ARENA_MAX as u64)? })
    }

    /// The memory that rings can lie in.
    pub fn arena(&self) -> &DmaMemory {
        &self.arena
    }

    /// The function behind the doorbell page; `wake` is the NIC's eventfd.
    pub fn function(&self, wake: OwnedFd) -> BorrowedFunction {
        let slots = doorbells_in(self.page.len());
        let page = DoorbellPage { memory: self.page.clone(), slots, wake, driver: None };
        BorrowedFunction(Arc::new(page))
    }
}

/// Maps a memfd of another process, at most `most` bytes, before that process shares it with a NIC.
pub fn map_shared(file: &OwnedFd, most: u64) -> Result<DmaMemory, Error> {
    sharing::borrow(file, most)
}

/// A function of another process, as far as borrowed queues need it. It has no control verbs.
#[derive(Clone)]
pub struct BorrowedFunction(Arc<DoorbellPage>);

impl BorrowedFunction {
    /// The error of every control verb.
    pub fn refuse<T>(&self) -> Result<T, Error> {
        let why = "the queues are borrowed; only their owner has control verbs".to_string();
        Err(Error::Refused { why })
    }

    /// Returns an error if the NIC's thread has ended.
    pub fn check_alive(&self) -> Result<(), Error> {
        if self.0.memory.word32(SLEEPING).load(Ordering::Relaxed) == GONE {
            return Err(Error::Gone { why: "its thread has ended".to_string() });
        }
        Ok(())
    }

    /// Yields the calling thread's CPU to the NIC thread if the NIC thread runs on the same CPU;
    /// returns false otherwise.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        self.0.offer_cpu()
    }

    /// The futex word on which the owner's threads wait for asynchronous events.
    pub fn event_word(&self) -> super::super::events::EventWord {
        self.0.event_word()
    }

    /// The doorbell in `slot`.
    pub fn doorbell(&self, slot: u32) -> Result<MappedDoorbell, Error> {
        MappedDoorbell::new(self.0.clone(), slot).ok_or_else(|| {
            let slots = self.0.slots;
            Error::Protocol {
                what: format!("doorbell {slot} does not exist: the page has {slots}"),
            }
        })
    }

    /// Descriptors that the data path needs.
    pub fn descriptors(&self) -> Vec<RawFd> {
        vec![self.0.wake.as_raw_fd()]
    }
}
