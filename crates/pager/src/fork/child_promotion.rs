//! Promotion of a light child to a pager of its own.
//!
//! One thread of the child does it: it connects to the pool, takes the child's faults over from the
//! page server, finds out which pages are resident, and becomes the handler of the new pager. The
//! program does not notice: a call that finds the old pager replaced is repeated with the new one.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::channel::{self, Block, Message};
use super::inheritance::Inheritance;
use super::state::server_lost;
use crate::config::{Config, EXIT_PAGER};
use crate::descriptor;
use crate::page_table::{Entry, PageId, State};
use crate::pager::{INHERIT_FRAMES, Pager, PagerParts, current, set_current};
use crate::presence::Presence;
use crate::slots::SlotId;
use crate::spawn::spawn;
use crate::staging::FrameId;
use crate::sys;
use crate::transport::Lane;
use crate::uffd::Uffd;
use crate::unpaged::SAMPLE_MS_MIN;

/// Sockets and descriptors of a light child, first in the program's table.
#[derive(Clone, Copy)]
pub(super) struct ChildSockets {
    pub calls: RawFd,
    pub notices: RawFd,
    pub faults: RawFd,
    pub exit_socket: RawFd,
}

impl ChildSockets {
    /// Gives the calling thread a descriptor table of its own with these descriptors and `more`.
    pub fn own_table(&self, mut more: Vec<RawFd>) -> io::Result<()> {
        more.extend([self.calls, self.notices, self.faults, self.exit_socket]);
        descriptor::own_table(&more)
    }
}

impl Pager {
    /// In a light child: requests the promotion and waits for it. Returns the new pager.
    pub fn promote_now(&'static self) -> &'static Pager {
        match self.space() {
            Ok(space) => {
                self.forks.request(Message::of(channel::PROMOTE), &[]);
                drop(space);
                self.wait_promoted()
            }
            Err(_) => self.wait_promoted(),
        }
    }

    /// Waits until another pager has replaced this one, and returns that pager.
    pub fn wait_promoted(&self) -> &'static Pager {
        while !self.forks.is_promoted() {
            sys::futex_wait(&self.forks.promoted, 0, None);
        }
        current().expect("a promoted child has a pager")
    }

    /// Runs the thread of a light child: waits for notices, and promotes the child when requested.
    pub(super) fn wait_for_promotion(&'static self, ends: ChildSockets) {
        let mut pause_ms = SAMPLE_MS_MIN;
        while !channel::is_ready(ends.notices, pause_ms as i32) {
            pause_ms = self.sample_unpaged(pause_ms);
        }
        match channel::receive(ends.notices) {
            Ok((message, _)) if message.kind == channel::PROMOTE => self.promote(ends),
            _ => server_lost(),
        }
    }

    fn promote(&'static self, ends: ChildSockets) {
        let fail = |error: crate::Error| -> ! {
            sys::die(
                EXIT_PAGER,
                &format!(
                    "cannot give the forked process {} a pager of its own: {error}; the process \
                     ends now (status {EXIT_PAGER})",
                    std::process::id()
                ),
            )
        };
        // Slow steps come first, because the page server still serves faults meanwhile.
        let pool = self.sockets.reachable_list(&self.config.pool);
        let transport = Self::open_transport(&Config { pool, ..self.config.clone() })
            .unwrap_or_else(|error| fail(error));
        let space = self.space().unwrap_or_else(|_| unreachable!("a light child grows once"));
        let [theirs, server_calls] = channel::pair().unwrap_or_else(|_| server_lost());
        let taken = channel::take(ends.calls, theirs.as_raw_fd());
        let blocks = taken.unwrap_or_else(|_| server_lost());
        // SAFETY: this thread's own table, in which these numbers have no other owner.
        let (faults, calls) = unsafe {
            let faults = Uffd::from_fd(OwnedFd::from_raw_fd(ends.faults));
            (faults, OwnedFd::from_raw_fd(ends.calls))
        };
        if let Err(error) = faults.set_blocking() {
            self.fatal("read the faults of a forked child", &error);
        }
        let parts = PagerParts {
            uffd: faults,
            fork_events: self.fork_events,
            region: self.region.same(),
            space: space.clone(),
            unreadable: self.evict_lock().clone(),
            inheritance: Some(Inheritance::new(calls, server_calls)),
            sockets: self.sockets.clone(),
            advice: self.advice.clone(),
        };
        let pager =
            Self::assemble(&self.config, transport, parts).unwrap_or_else(|error| fail(error));
        pager.forks.exit_socket.store(ends.exit_socket, Ordering::Release);
        pager.import_pages(&blocks);
        let promoted: &'static Arc<Pager> = Box::leak(Box::new(pager));
        promoted.enter_as(self);
        set_current(promoted);
        self.forks.mark_promoted();
        drop(space);
        let heir = spawn("granary-heir", move || {
            promoted.enter();
            promoted.wait_for_parent_exit(ends.notices);
        });
        if let Err(error) = heir.and_then(|()| promoted.start_evictor()) {
            promoted.fatal("start the threads of a forked child", &error);
        }
        // Threads that wait fault again; this thread serves their faults from now on.
        for (start, len) in promoted.region.all_addresses() {
            if let Err(error) = promoted.uffd.wake(start, len) {
                promoted.fatal("wake the threads of a forked child", &error);
            }
        }
        promoted.handler();
    }

    /// Enters the resident pages, and those that the page server has, into the new page table. No
    /// thread maps pages meanwhile.
    fn import_pages(&self, blocks: &[Block]) {
        let present = Presence::open().unwrap_or_else(|error| {
            self.fatal("read which pages a forked child has (/proc/self/pagemap)", &error)
        });
        let foreign = self.space().map(|space| space.foreign.clone()).unwrap_or_default();
        let all = self.region.all_numbers();
        let (mut resident, mut inherited) = (0, 0);
        for block in blocks {
            let start = block.index as u32 * channel::BLOCK_PAGES;
            let end = start + channel::BLOCK_PAGES;
            for numbers in &all {
                let part = numbers.start.max(start)..numbers.end.min(end);
                if part.is_empty() {
                    continue;
                }
                let mut exists = [false; channel::BLOCK_PAGES as usize];
                let address = self.region.address(PageId(part.start));
                let existing = present.existing(address, part.len()).unwrap_or_else(|error| {
                    self.fatal("read which pages a forked child has", &error)
                });
                existing.for_each(|index| exists[index as usize] = true);
                for (page, exists) in part.zip(exists) {
                    let at = page - start;
                    if !foreign.is_empty() && foreign.contains(page) {
                        continue;
                    }
                    if exists {
                        self.enter_page(PageId(page), Entry::dirty(None));
                        self.residency().push(&self.table, PageId(page), 1);
                        resident += 1;
                    } else if block.bits[at as usize / 64] & 1 << (at % 64) != 0 {
                        let inherited_slot = SlotId::inherited(PageId(page));
                        self.enter_page(PageId(page), Entry::remote(inherited_slot.0));
                        inherited += 1;
                    }
                }
            }
        }
        self.set_initial_resident(resident);
        self.slots().inherit(inherited);
    }

    fn enter_page(&self, page: PageId, entry: Entry) {
        let before = self.table.lock(page);
        assert_eq!(before.state(), State::Absent, "each page is entered only once");
        let waits = self.table.unlock(page, entry);
        assert!(!waits, "no other thread uses the new table yet");
    }

    /// Reads inherited pages; the pairs are in the order of pages.
    pub(crate) fn read_inherited(&self, pairs: &[(PageId, FrameId)]) {
        let inheritance =
            self.inheritance.as_ref().expect("a pager with inherited slots has an inheritance");
        let mut at = 0;
        while at < pairs.len() {
            let (page, frame) = pairs[at];
            let next = |&(index, (p, f)): &(usize, &(PageId, FrameId))| {
                p.0 == page.0 + index as u32 && f.0 == frame.0 + index as u32
            };
            let run = pairs[at..].iter().enumerate().take_while(next).count();
            inheritance.read(page.0..page.0 + run as u32, self.staging.address(frame));
            at += run;
        }
    }

    /// Runs the thread that waits for the end of the parent.
    fn wait_for_parent_exit(&self, notices: RawFd) {
        loop {
            match channel::receive(notices) {
                Ok((message, _)) if message.kind == channel::ORPHANED => {
                    self.move_inherited_pages();
                    return;
                }
                Ok(_) => {}
                // If pages are still needed, the next read fails and ends the process with a
                // message.
                Err(_) => return,
            }
        }
    }

    /// Moves all inherited pages to slots of this pager, then releases the page server.
    fn move_inherited_pages(&self) {
        let mut pages: Vec<PageId> = Vec::new();
        while self.slots().inherited() > 0 {
            // A staged page with an inherited slot gets a slot of this pager when it is written
            // back.
            self.flush_staging(&self.evict_lock());
            for numbers in self.region.all_numbers() {
                self.table.touched(numbers, |part| {
                    part.map(PageId).for_each(|page| self.move_inherited_page(page, &mut pages));
                });
            }
            self.move_pages(&mut pages);
            // Pages that other threads have BUSY are tried again in the next round.
            std::thread::yield_now();
        }
        // The snapshots of this process's own children may name inherited slots.
        while self.slots().has_dependents() {
            let seen = self.room.load(Ordering::Acquire);
            sys::futex_wait(&self.room, seen, Some(1000));
        }
        if let Some(inheritance) = &self.inheritance {
            inheritance.release();
        }
    }

    /// Adds a page to the run `pages` if it is inherited and remote. The run before it is moved if
    /// it is complete.
    fn move_inherited_page(&self, page: PageId, pages: &mut Vec<PageId>) {
        let inherited =
            |entry: Entry| entry.slot().is_some_and(|slot| SlotId(slot).inherited_page().is_some());
        let in_run = pages.last().is_none_or(|last| last.0 + 1 == page.0);
        if !in_run || pages.len() == INHERIT_FRAMES as usize {
            self.move_pages(pages);
        }
        match self.table.try_lock(page, inherited) {
            Some(entry) if entry.state() == State::Remote => pages.push(page),
            Some(entry) => {
                // A resident page gets a slot of this pager when it is evicted.
                self.settle(page, Entry::dirty(None));
                self.slots_free_inherited(entry);
            }
            None => {}
        }
    }

    fn slots_free_inherited(&self, entry: Entry) {
        if let Some(slot) = entry.slot() {
            self.free_slot(SlotId(slot));
        }
    }

    /// Moves consecutive remote pages that are BUSY by this thread.
    fn move_pages(&self, pages: &mut Vec<PageId>) {
        if pages.is_empty() {
            return;
        }
        let first = self.inherit_frames();
        let frame = |index: usize| FrameId(first.0 + index as u32);
        let pairs: Vec<_> = pages.iter().enumerate().map(|(i, page)| (*page, frame(i))).collect();
        self.read_inherited(&pairs);
        let mut stored = Vec::with_capacity(pages.len());
        {
            let mut slots = self.slots();
            for index in 0..pages.len() {
                match slots.allocate(&*self.transport) {
                    Ok(slot) => stored.push((slot, frame(index))),
                    Err(error) => self.pool_lost(&error),
                }
            }
        }
        self.transfer(Lane::Async, true, &stored);
        for (page, (slot, _)) in pages.drain(..).zip(stored) {
            self.settle(page, Entry::remote(slot.0));
            self.free_slot(SlotId::inherited(page));
        }
    }
}
