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
//! | [`overrun`] | pages beyond the limit, while no page can be taken out |
//! | [`returns`] | pages that come back soon, for the report of thrashing |
//! | [`compact`] | compaction of chunks |
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
//! | Remote, Shelved clean, Shelved dirty | compaction of the slot's chunk | Shelved dirty without a slot, then by write-back and reclaim Remote | worker: [`compact`] |
//! | any | dropped by the program | Absent; a position in flight is blank when the transfer is complete | program's thread |
//! | any | mremap | the same state at the other page | program's thread |
//!
//! # Locks
//! Threads take the locks in this order: `protection` ([`Pages::lock_protection`]), a page's BUSY
//! bit, [`Pages::state`], [`Pages::slots`]. A thread that holds the lock of the state or of the
//! slots makes no system call and does not wait. No thread holds a BUSY bit while it waits for a
//! transfer.
//!
//! # Bound
//! A page is *present* if it is resident or if a position has memory. `take_out` and `put_in` keep
//! the number of present pages. Only zeros for new pages and memory for new positions raise the
//! number. Both are taken from the room below the limit, under the lock of the state.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use smallvec::SmallVec;

use crate::backing::{Backing, FREES_MAX};
use crate::config::Paths;
use crate::fingerprint::Fingerprints;
use crate::lease::Lease;
use crate::memory::Memory;
use crate::page_table::{Entry, PageId, PageTable};
use crate::point;
use crate::policy::{AnyPolicy, Policy, Run};
use crate::shelf::Shelf;
use crate::slots::{ChunkLocation, Emptied, Sealing, SlotId, Slots};
use crate::stats::{Counter, Stats};
use crate::stream::{self, Streams};
use crate::sys::PAGE_SHIFT;
use crate::transport::{Direction, FrameId, Lane};

pub mod bound;
pub mod change;
pub mod check;
pub mod compact;
pub mod flight;
pub mod flow;
#[cfg(test)]
pub(crate) mod model;
pub mod overrun;
pub mod returns;
pub mod sealing;
pub mod sizes;
pub mod standstill;
pub mod sync;

pub use flight::FlightIndex;
use flight::Flights;
pub use flow::Hand;
use overrun::{Allowance, Overrun};
use returns::Returns;
pub use sizes::Sizes;
use standstill::Standstill;
pub use sync::Request;

/// The data that the lock of [`Pages::state`] guards.
pub struct State {
    /// Positions and their pages.
    pub shelf: Shelf,
    /// Resident pages, in the order in which they become victims. A page that is being taken out
    /// is not among them.
    pub policy: AnyPolicy,
    /// Transfers in flight.
    pub flights: Flights,
    /// Prefetcher.
    pub streams: Streams,
    /// Number of pages that are mapped in the program's memory or are being mapped.
    pub resident: u32,
    /// Maximum number of present pages.
    pub limit: u32,
    /// Leased units to be given back ([`bound`]).
    pub owed: u32,
    /// Pages beyond the limit, while no page can be taken out.
    overrun: Overrun,
    /// Pages whose waiting threads are woken after the lock is released. Otherwise the holder of
    /// the lock would make a system call for each wake-up.
    pub late_wakes: Vec<PageId>,
    /// Pages that were taken out since the start.
    taken_out: u64,
    /// Pages that are taken out with the same stamp.
    stamp_pages: u64,
    /// Pages that came back from the pool since the last call of [`Pages::take_returns`].
    returns: Returns,
}

/// Stamps in the taking out of as many pages as the limit. The page table has room for 256 stamps,
/// so a page that was taken out long ago seldom looks as if it were recent.
const RECENT_STAMPS: u8 = 8;

impl State {
    /// Returns the number of present pages.
    pub fn present(&self) -> u32 {
        self.resident + self.shelf.filled()
    }

    /// Returns the number of pages that may be present.
    pub fn allowed(&self) -> u32 {
        self.limit.saturating_add(self.overrun.pages)
    }

    /// Returns the number of pages that may still become present.
    pub fn room(&self) -> u32 {
        self.allowed().saturating_sub(self.present())
    }

    /// Returns the stamp of pages that are taken out now.
    fn stamp(&self) -> u8 {
        (self.taken_out / self.stamp_pages) as u8
    }

    /// Tells the policy that pages are resident for the first time, or as zeros.
    fn note_arrived(&mut self, first: PageId, pages: u32) {
        if pages > 0 {
            self.policy.arrived(Run { start: first.0, pages });
        }
    }

    /// Tells the policy that a victim stays resident.
    fn note_returned(&mut self, page: PageId) {
        self.policy.returned(Run { start: page.0, pages: 1 });
    }

    /// Tells the policy that a page is not resident any more, and no victim of it.
    fn note_removed(&mut self, page: PageId) {
        self.policy.removed(Run { start: page.0, pages: 1 });
    }
}

/// Returns true if about as many pages as the limit have not yet been taken out, up to stamp `now`,
/// since a page with `stamp` was.
fn is_recent(now: u8, stamp: u8) -> bool {
    now.wrapping_sub(stamp) < RECENT_STAMPS
}

/// Returns the prefetcher's settings.
fn prefetch_of(paths: Paths, sizes: &Sizes) -> stream::Settings {
    let clusters = paths != Paths::Two;
    stream::Settings { window_pages: sizes.window, clusters, ..stream::Settings::default() }
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
    allowance: Allowance,
    /// The division of a fault's work.
    pub paths: Paths,
    fingerprints: Fingerprints,
    pub(crate) sealing: Sealing,
    state: Mutex<State>,
    /// Slots in the backing memory. They are not a part of `state`, because the page server of
    /// forked children locks them even if the program was killed while a thread of it held the lock
    /// of the state.
    slots: Mutex<Slots>,
    /// Chunks without a used slot, until a thread of the pager frees them.
    emptied: Mutex<Vec<ChunkLocation>>,
    /// A thread holds this lock while it takes pages out. Other threads hold the lock to keep all
    /// pages where they are.
    protection: Mutex<()>,
    /// Keeps pages from being taken out during a fork.
    standstill: Standstill,
    /// Incremented when a position may have become blank. A thread that waits for a change uses
    /// this word as a futex with a timeout, because no thread wakes the futex.
    pub room_changes: AtomicU32,
}

impl<M: Memory> Pages<M> {
    /// Pages that are all absent. `policy` is made for as many pages as `sizes` and `table` have.
    pub fn new(
        table: PageTable,
        memory: M,
        backing: Backing,
        stats: Stats,
        sizes: Sizes,
        fingerprints: Fingerprints,
        policy: AnyPolicy,
    ) -> Self {
        let state = State {
            shelf: Shelf::new(sizes.positions),
            policy,
            flights: Flights::new(&sizes),
            streams: Streams::new(prefetch_of(Paths::Two, &sizes)),
            resident: 0,
            limit: sizes.limit,
            owed: 0,
            overrun: Overrun::default(),
            late_wakes: Vec::new(),
            taken_out: 0,
            stamp_pages: u64::from(sizes.limit / u32::from(RECENT_STAMPS)).max(1),
            returns: Returns::default(),
        };
        let slots = Slots::new(backing.chunk_bytes());
        Self {
            table,
            memory,
            backing,
            stats,
            sizes,
            lease: None,
            allowance: Allowance { local_bytes: 0, time_ns: u64::MAX, wait_s: u32::MAX },
            paths: Paths::Two,
            fingerprints,
            sealing: Sealing::None,
            state: Mutex::new(state),
            slots: Mutex::new(slots),
            emptied: Mutex::default(),
            protection: Mutex::new(()),
            standstill: Standstill::default(),
            room_changes: AtomicU32::new(0),
        }
    }

    /// Divides the work of faults by `paths`. Called before the first fault.
    pub fn with_paths(mut self, paths: Paths) -> Self {
        self.paths = paths;
        self.state().streams = Streams::new(prefetch_of(paths, &self.sizes));
        self
    }

    /// Locks the state. The holder makes no system call, so that other threads wait only briefly.
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

    /// Returns true if [`Pages::free_emptied`] has a chunk to free.
    pub fn has_emptied(&self) -> bool {
        !self.emptied().is_empty()
    }

    fn emptied(&self) -> MutexGuard<'_, Vec<ChunkLocation>> {
        self.emptied.lock().expect("no thread panics while it holds this lock")
    }

    /// Frees chunks without a used slot. Called only by the pager's threads.
    pub fn free_emptied(&self) {
        loop {
            let locations: SmallVec<[ChunkLocation; FREES_MAX]> = {
                let mut emptied = self.emptied();
                let from = emptied.len().saturating_sub(FREES_MAX);
                emptied.drain(from..).collect()
            };
            if locations.is_empty() {
                return;
            }
            self.backing.free_locations(&locations);
            for location in &locations {
                if let ChunkLocation::Overflow(stretch) = location {
                    self.slots().note_freed(*stretch);
                }
            }
        }
    }

    /// Locks the protections of the program's pages. No page is taken out while the lock is held.
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

    /// Stores a page's entry, clears BUSY, and wakes the threads that wait for the page.
    pub(crate) fn settle(&self, page: PageId, entry: Entry) {
        if self.table.unlock(page, entry) {
            self.memory.wake(page, 1);
        }
    }

    /// Returns the pages that came back since the last call, and the number of pages that are
    /// taken out with the same stamp.
    pub fn take_returns(&self) -> (Returns, u64) {
        let mut state = self.state();
        (std::mem::take(&mut state.returns), state.stamp_pages)
    }

    /// Moves at most 64 pages between slots and frames, and waits until the transfers are complete.
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
        let present = {
            let state = self.state();
            self.stats.record_prefetch(&state.streams.counters());
            state.present()
        };
        self.note_present(present);
        self.note_held();
        self.note_assist();
        self.age_key();
    }

    fn note_held(&self) {
        let ((pool, overflow), usage, tables) = {
            let slots = self.slots();
            (slots.held(), slots.usage(), slots.table_bytes())
        };
        self.stats.raise(Counter::TableBytesPeak, tables + self.table.used_bytes());
        if let Some(sealer) = self.sealing.made() {
            let seal::Statistics { seals, opens, .. } = sealer.statistics();
            self.stats.set(Counter::PagesSealed, seals);
            self.stats.set(Counter::PagesOpened, opens);
        }
        self.stats.set(Counter::PoolChunks, u64::from(pool));
        self.stats.raise(Counter::PoolChunksPeak, u64::from(pool));
        self.stats.set(Counter::OverflowChunks, u64::from(overflow));
        self.stats.raise(Counter::OverflowChunksPeak, u64::from(overflow));
        self.stats.set(Counter::LiveBytes, usage.live << PAGE_SHIFT);
        self.stats.set(Counter::HeldBytes, usage.held << PAGE_SHIFT);
    }

    fn note_chunks(&self) {
        self.note_held();
        let done = self.backing.transport_stats();
        self.stats.set(Counter::AllocationsByNic, done.allocations_by_nic);
        self.stats.set(Counter::AllocationsByCpu, done.allocations_by_cpu);
    }

    fn note_assist(&self) {
        let assist = self.backing.transport_stats().assist;
        self.stats.set(Counter::AssistPages, assist.pages);
        self.stats.set(Counter::AssistedProcesses, assist.is_used.into());
        self.stats.set(Counter::AssistsLost, assist.is_lost.into());
    }

    fn note_present(&self, present: u32) {
        self.stats.set(Counter::ResidentPages, u64::from(present));
        self.stats.raise(Counter::ResidentPagesPeak, u64::from(present));
    }

    /// Counts a change after which a position may be blank, in `room_changes`.
    pub(crate) fn note_room(&self) {
        self.room_changes.fetch_add(1, Ordering::AcqRel);
    }
}
