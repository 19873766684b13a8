//! The pager's logic: where each page is, and how pages circulate between the program, the shelf
//! and the backing memory.
//!
//! ```text
//!   program's memory        shelf (this process)             backing memory
//!  +----------------+  put_in   +-----------+  READ   +------------------+
//!  | resident pages | <-------- | positions | <------ | slots in chunks  |
//!  |                | --------> |           | ------> |                  |
//!  +----------------+  take_out +-----------+  WRITE  +------------------+
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | [`sync`] | the synchronous path: a fault, until its page is mapped (SAMS "Path Separation") |
//! | [`flow`] | the asynchronous path: taking pages out, inspection, reclaim, write-back |
//! | [`flight`] | transfers in flight: their start and their end |
//! | [`change`] | what the program's `munmap`, `madvise` and `mremap` do to pages |
//! | [`bound`] | the limit of a process that shares the bound of its run |
//! | [`check`] | invariants |
//!
//! # States of a page
//! The page table has four states; the use of its position divides the state *Shelved*.
//!
//! | from | event | to | done by |
//! | --- | --- | --- | --- |
//! | Absent | fault | Resident | handler: zeros |
//! | Resident | victim | Absent if all zero; Remote if a repeated word; Shelved clean if equal to its slot; else Shelved dirty | handler or worker: `take_out`, inspection |
//! | Shelved dirty | write-back starts | Shelved writing | handler or worker |
//! | Shelved writing | WRITE complete | Shelved clean | handler or worker |
//! | Shelved clean | reclaim | Remote | handler or worker |
//! | Shelved clean, dirty | fault | Resident with its slot | handler: `put_in` |
//! | Shelved writing | fault | Resident without a slot; the slot is freed when the WRITE is complete | handler: `put_in` |
//! | Remote | fault or prefetch | Shelved fetching | handler: READ |
//! | Shelved fetching | READ complete | Shelved clean | handler or worker |
//! | Shelved fetching | fault | waits for the READ | handler |
//! | any | dropped by the program | Absent; a position in flight is blank when the transfer is complete | program's thread |
//! | any | mremap | the same state at the other page | program's thread |
//!
//! # Locks
//! In the order in which they may be taken: `protection` ([`Pages::lock_protection`]), a page's
//! BUSY bit, [`Pages::state`], [`Pages::slots`]. A thread that holds one of the last two makes no
//! system call and waits for nothing. No thread holds a BUSY bit while it waits for a transfer.
//!
//! # Bound
//! A page is *present* if it is resident or if a position has memory. `take_out` and `put_in` keep
//! the number of present pages. Only zeros for new pages and new positions raise the number, and
//! they are taken from the room below the limit, under `state`.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::backing::Backing;
use crate::fingerprint::Fingerprints;
use crate::lease::Lease;
use crate::memory::Memory;
use crate::page_table::{Entry, PageId, PageTable};
use crate::point;
use crate::residency::Residency;
use crate::shelf::Shelf;
use crate::slots::{ChunkLocation, Emptied, SlotId, Slots};
use crate::stats::{Counter, Stats};
use crate::stream::{self, Streams};
use crate::transport::{Direction, FrameId, Lane};

pub mod bound;
pub mod change;
pub mod check;
pub mod flight;
pub mod flow;
pub mod sizes;
pub mod sync;

pub use flight::FlightIndex;
use flight::Flights;
pub use flow::Hand;
pub use sizes::Sizes;
pub use sync::Request;

/// Everything that [`Pages::state`] guards.
pub struct State {
    /// Positions and their pages.
    pub shelf: Shelf,
    /// Resident pages, in the order in which they become victims.
    pub queue: Residency,
    /// Transfers in flight.
    pub flights: Flights,
    /// Prefetcher.
    pub streams: Streams,
    /// Pages that are mapped in the program's memory, or about to be.
    pub resident: u32,
    /// Greatest number of present pages.
    pub limit: u32,
    /// Leased units to be given back ([`bound`]).
    pub owed: u32,
    /// Pages whose threads are woken once the lock is released.
    pub late_wakes: Vec<PageId>,
}

impl State {
    /// Returns the number of present pages.
    pub fn present(&self) -> u32 {
        self.resident + self.shelf.filled()
    }

    /// Returns the number of pages that may become present.
    pub fn room(&self) -> u32 {
        self.limit.saturating_sub(self.present())
    }
}

/// The pages of one process.
pub struct Pages<M: Memory> {
    /// State of every page.
    pub table: PageTable,
    /// Memory operations.
    pub memory: M,
    /// Backing memory.
    pub backing: Backing,
    /// Counters.
    pub stats: Stats,
    /// Sizes that follow from the bound.
    pub sizes: Sizes,
    /// The part of the run's bound that this process has; `None` if its bound is its own.
    lease: Option<Lease>,
    fingerprints: Fingerprints,
    state: Mutex<State>,
    /// Slots in the backing memory. Not a part of `state`, because the page server of forked children
    /// takes this lock even if the program was killed while one of its threads held `state`.
    slots: Mutex<Slots>,
    /// Chunks without a used slot, which a thread of the pager frees.
    emptied: Mutex<Vec<ChunkLocation>>,
    /// Pages are taken out only by the holder of this lock, so another holder excludes it.
    protection: Mutex<()>,
    /// True while a fork waits for the handler to read its event, or while a fork is prepared.
    /// Until then the kernel refuses to change pages.
    pub fork_waits: AtomicBool,
    /// Futex: incremented when a position may have become blank, or a fork waits.
    pub room_changes: AtomicU32,
}

impl<M: Memory> Pages<M> {
    /// Pages that are all absent.
    pub fn new(
        table: PageTable,
        memory: M,
        backing: Backing,
        stats: Stats,
        sizes: Sizes,
        fingerprints: Fingerprints,
    ) -> Self {
        let state = State {
            shelf: Shelf::new(sizes.positions),
            queue: Residency::default(),
            flights: Flights::new(&sizes),
            streams: Streams::new(stream::Settings {
                window_pages: sizes.window,
                ..stream::Settings::default()
            }),
            resident: 0,
            limit: sizes.limit,
            owed: 0,
            late_wakes: Vec::new(),
        };
        let slots = Slots::new(backing.chunk_bytes());
        Self {
            table,
            memory,
            backing,
            stats,
            sizes,
            lease: None,
            fingerprints,
            state: Mutex::new(state),
            slots: Mutex::new(slots),
            emptied: Mutex::default(),
            protection: Mutex::new(()),
            fork_waits: AtomicBool::new(false),
            room_changes: AtomicU32::new(0),
        }
    }

    /// Locks the state. Short: no system call is made under this lock.
    pub fn state(&self) -> MutexGuard<'_, State> {
        point();
        self.state.lock().expect("no thread panics while it holds this lock")
    }

    /// Locks the slots.
    pub fn slots(&self) -> MutexGuard<'_, Slots> {
        point();
        self.slots.lock().expect("no thread panics while it holds this lock")
    }

    /// Frees a slot. If its chunk is empty now, a thread of the pager frees the chunk.
    pub fn free_slot(&self, slot: SlotId) {
        let emptied = self.slots().free(slot);
        self.note_emptied(emptied);
    }

    /// Notes chunks for [`Pages::free_emptied`].
    pub fn note_emptied(&self, emptied: impl IntoIterator<Item = Emptied>) {
        for Emptied(location) in emptied {
            self.emptied().push(location);
        }
    }

    /// Returns true if [`Pages::free_emptied`] has something to do.
    pub fn has_emptied(&self) -> bool {
        !self.emptied().is_empty()
    }

    fn emptied(&self) -> MutexGuard<'_, Vec<ChunkLocation>> {
        self.emptied.lock().expect("no thread panics while it holds this lock")
    }

    /// Frees chunks without a used slot. Called only by the pager's threads.
    pub fn free_emptied(&self) {
        loop {
            let location = self.emptied().pop();
            match location {
                Some(location) => {
                    self.backing.free_location(location);
                    if let ChunkLocation::Overflow(stretch) = location {
                        self.slots().note_freed(stretch);
                    }
                }
                None => return,
            }
        }
    }

    /// Locks the protections of the program's pages: no page is taken out meanwhile.
    pub fn lock_protection(&self) -> MutexGuard<'_, ()> {
        self.protection.lock().expect("no thread panics while it holds this lock")
    }

    pub(crate) fn try_lock_protection(&self) -> Option<MutexGuard<'_, ()>> {
        point();
        match self.protection.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::WouldBlock) => None,
            // A poisoned lock must not look like a busy one: the caller would retry forever.
            Err(TryLockError::Poisoned(_)) => panic!("a thread panicked while it held this lock"),
        }
    }

    /// Returns the number of present pages.
    pub fn present(&self) -> u32 {
        self.state().present()
    }

    /// Stores a page's entry, clears BUSY, and wakes the page's waiters.
    pub(crate) fn settle(&self, page: PageId, entry: Entry) {
        if self.table.unlock(page, entry) {
            self.memory.wake(page, 1);
        }
    }

    /// Moves pages between slots and frames, at most 64, and waits for them.
    pub(crate) fn transfer_now(&self, direction: Direction, pairs: &[(SlotId, FrameId)]) {
        let pairs: Vec<_> = {
            let slots = self.slots();
            pairs.iter().map(|&(slot, frame)| (slots.source(slot), frame)).collect()
        };
        let ticket = self.backing.post(Lane::Demand, direction, &pairs);
        self.backing.wait(ticket);
    }

    /// Updates the gauges of present pages, chunks and allocations.
    pub fn update_gauges(&self) {
        let (present, (pool, overflow)) = {
            let state = self.state();
            (state.present(), self.slots().held())
        };
        self.note_present(present);
        self.stats.set(Counter::PoolChunks, u64::from(pool));
        self.stats.raise(Counter::PoolChunksPeak, u64::from(pool));
        self.stats.set(Counter::OverflowChunks, u64::from(overflow));
        self.stats.raise(Counter::OverflowChunksPeak, u64::from(overflow));
    }

    fn note_chunks(&self) {
        let (pool, overflow) = self.slots().held();
        self.stats.set(Counter::PoolChunks, u64::from(pool));
        self.stats.raise(Counter::PoolChunksPeak, u64::from(pool));
        self.stats.set(Counter::OverflowChunks, u64::from(overflow));
        self.stats.raise(Counter::OverflowChunksPeak, u64::from(overflow));
        let done = self.backing.transport_stats();
        self.stats.set(Counter::AllocationsByNic, done.allocations_by_nic);
        self.stats.set(Counter::AllocationsByCpu, done.allocations_by_cpu);
    }

    fn note_present(&self, present: u32) {
        self.stats.set(Counter::ResidentPages, u64::from(present));
        self.stats.raise(Counter::ResidentPagesPeak, u64::from(present));
    }

    /// Tells threads that wait for a blank position to look again.
    pub(crate) fn note_room(&self) {
        self.room_changes.fetch_add(1, Ordering::AcqRel);
    }
}
