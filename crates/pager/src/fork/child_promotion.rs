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
use super::keeper;
use super::state::server_lost;
use crate::config::{Config, EXIT_PAGER};
use crate::descriptor;
use crate::lease::Lease;
use crate::page_table::{Entry, PageId};
use crate::pager::{Pager, PagerParts, current, set_current};
use crate::pages::Hand;
use crate::presence::Presence;
use crate::slots::SlotId;
use crate::spawn::spawn;
use crate::sys;
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
        // The program's threads wait for pages in the kernel, so this thread looks for them.
        let mut wait = keeper::Wait::for_pages();
        while !channel::is_ready(ends.notices, pause_ms as i32) {
            pause_ms = match wait.look() {
                true => keeper::LOOK_MS as u64,
                false => self.sample_unpaged(pause_ms),
            };
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
        let lease = self.pages.lease().map(Lease::for_child).transpose();
        let lease = lease.unwrap_or_else(|source| {
            fail(crate::Error::System { what: "share the bound of the run".into(), source })
        });
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
            uffd: Arc::new(faults),
            fork_events: self.fork_events,
            region: self.region.clone(),
            space: space.clone(),
            unreadable: self.unreadable().clone(),
            inheritance: Some(Inheritance::new(calls, server_calls)),
            sockets: self.sockets.clone(),
            advice: self.advice.clone(),
            lease,
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
        let started = heir
            .and_then(|()| promoted.start_worker())
            .and_then(|()| promoted.start_followers())
            .and_then(|()| promoted.start_watcher())
            .and_then(|()| promoted.start_monitor());
        if let Err(error) = started {
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
        let mut inherited = 0;
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
                        self.pages.enter(PageId(page), Entry::resident(None));
                    } else if block.bits[at as usize / 64] & 1 << (at % 64) != 0 {
                        let inherited_slot = SlotId::inherited(PageId(page));
                        self.pages.enter(PageId(page), Entry::remote(inherited_slot.0));
                        inherited += 1;
                    }
                }
            }
        }
        self.pages.slots().inherit(inherited);
        self.pages.extend_to_present();
        self.pages.update_gauges();
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
        let mut hand = Hand::default();
        while self.pages.slots().inherited() > 0 {
            self.pages.move_inherited(&mut hand);
        }
        // The snapshots of this process's own children may name inherited slots.
        while self.pages.slots().has_dependents() {
            let seen = self.pages.room_changes.load(Ordering::Acquire);
            sys::futex_wait(&self.pages.room_changes, seen, Some(1000));
        }
        self.pages.backing.release_inheritance();
    }
}
