//! How a light child comes to page for itself.
//!
//! One thread of the child's does it: it connects to the pool, takes its faults over from the keeper,
//! looks which pages are there, and becomes the handler of the new pager. To a program's thread it is as
//! if nothing happened: a call that meets the old pager tries again with the new one.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::channel::{self, Block, Message};
use super::{Forks, abandoned};
use crate::config::{Config, EXIT_PAGER};
use crate::descriptor;
use crate::page_table::{Entry, PageId, State};
use crate::pager::{Foundation, HEIR_FRAMES, Pager, current, set_current};
use crate::slots::SlotId;
use crate::staging::FrameId;
use crate::sys::{self, PAGE_BYTES};
use crate::threads::spawn;
use crate::transport::Lane;
use crate::uffd::Uffd;
use crate::unpaged::GLANCE_MS_MIN;

/// The descriptors of a light child, in the program's table first.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    pub calls: RawFd,
    pub bell: RawFd,
    pub faults: RawFd,
    pub life: RawFd,
}

impl Ends {
    /// The calling thread has a table of its own with these and `more`.
    pub fn own_table(&self, mut more: Vec<RawFd>) -> io::Result<()> {
        more.extend([self.calls, self.bell, self.faults, self.life]);
        descriptor::own_table(&more)
    }
}

/// What a grown child has from its parent.
pub(crate) struct Inheritance {
    calls: Mutex<OwnedFd>,
    /// The calls of our own keeper: we may be killed while we hold the others.
    kin: Mutex<OwnedFd>,
}

impl Inheritance {
    /// Reads consecutive pages into consecutive frames.
    fn read(&self, pages: Range<u32>, first: *mut u8) {
        let calls = if super::keeper::is_keeper() { &self.kin } else { &self.calls };
        let calls = calls.lock().expect("nobody panics with it locked");
        let mut at = pages.start;
        while at < pages.end {
            let part = at..pages.end.min(at + channel::PAGES_AT_ONCE as u32);
            // SAFETY: the caller's frames, as many as there are pages.
            let read = unsafe {
                let to = first.add((at - pages.start) as usize * PAGE_BYTES);
                let message = Message::pages(channel::READ, part.clone());
                channel::send(calls.as_raw_fd(), message, &[])
                    .and_then(|()| channel::receive_pages(calls.as_raw_fd(), to, part.len()))
            };
            if read.is_err() {
                abandoned();
            }
            at = part.end;
        }
    }

    /// Nothing more is needed from the keeper.
    fn give_up(&self) {
        let calls = self.calls.lock().expect("nobody panics with it locked");
        // SAFETY: our socket.
        unsafe { libc::shutdown(calls.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

impl Forks {
    fn mark_grown(&self) {
        self.grown.store(1, Ordering::Release);
        sys::futex_wake(&self.grown);
    }
}

impl Pager {
    /// In a light child: asks for a pager of its own, and returns it.
    pub fn grow_now(&'static self) -> &'static Pager {
        match self.space() {
            Ok(space) => {
                self.forks.tell(Message::of(channel::GROW), &[]);
                drop(space);
                self.wait_grown()
            }
            Err(_) => self.wait_grown(),
        }
    }

    /// The pager that took the place of this one, once it has.
    pub fn wait_grown(&self) -> &'static Pager {
        while !self.forks.is_grown() {
            sys::futex_wait(&self.forks.grown, 0, None);
        }
        current().expect("a grown child has a pager")
    }

    /// The life of the thread that waits for the bell of a light child.
    pub(super) fn live_light(&'static self, ends: Ends) {
        let mut pause_ms = GLANCE_MS_MIN;
        while !channel::is_ready(ends.bell, pause_ms as i32) {
            pause_ms = self.glance(pause_ms);
        }
        match channel::receive(ends.bell) {
            Ok((message, _)) if message.kind == channel::GROW => self.grow(ends),
            _ => abandoned(),
        }
    }

    fn grow(&'static self, ends: Ends) {
        let fail = |error: crate::Error| -> ! {
            sys::die(
                EXIT_PAGER,
                &format!(
                    "the forked process {} needs memory of its own: {error}; it ends now (status \
                     {EXIT_PAGER})",
                    std::process::id()
                ),
            )
        };
        // What takes time comes first: the keeper serves meanwhile.
        let pool = self.sockets.within_reach(&self.config.pool);
        let transport = Self::open_transport(&Config { pool, ..self.config.clone() })
            .unwrap_or_else(|error| fail(error));
        let space = self.space().unwrap_or_else(|_| unreachable!("a light child grows once"));
        let [theirs, kin] = channel::pair().unwrap_or_else(|_| abandoned());
        let taken = channel::take(ends.calls, theirs.as_raw_fd());
        let blocks = taken.unwrap_or_else(|_| abandoned());
        // SAFETY: this thread's own table; nobody else names these there.
        let (faults, calls) = unsafe {
            let faults = Uffd::from_fd(OwnedFd::from_raw_fd(ends.faults));
            (faults, OwnedFd::from_raw_fd(ends.calls))
        };
        if let Err(error) = faults.set_blocking() {
            self.broken("read the faults of a forked child", &error);
        }
        let foundation = Foundation {
            uffd: faults,
            fork_events: self.fork_events,
            region: self.region.same(),
            space: space.clone(),
            unreadable: self.gate().clone(),
            inheritance: Some(Inheritance { calls: Mutex::new(calls), kin: Mutex::new(kin) }),
            sockets: self.sockets.clone(),
        };
        let pager =
            Self::assemble(&self.config, transport, foundation).unwrap_or_else(|error| fail(error));
        pager.forks.life.store(ends.life, Ordering::Release);
        pager.take_over(&blocks);
        let grown: &'static Arc<Pager> = Box::leak(Box::new(pager));
        grown.enter_as(self);
        set_current(grown);
        self.forks.mark_grown();
        drop(space);
        let heir = spawn("granary-heir", move || {
            grown.enter();
            grown.wait_for_orphanage(ends.bell);
        });
        if let Err(error) = heir.and_then(|()| grown.start_evictor()) {
            grown.broken("start the threads of a forked child", &error);
        }
        // Whoever waits faults again, and is heard by this thread from now on.
        if let Err(error) = grown.uffd.wake(grown.region.base(), grown.region.len()) {
            grown.broken("wake the threads of a forked child", &error);
        }
        grown.handler();
    }

    /// Enters the pages that are there, and those that the keeper has. Nobody brings in any meanwhile.
    fn take_over(&self, blocks: &[Block]) {
        let present = Presence::open().unwrap_or_else(|error| {
            self.broken("see which pages a forked child has (/proc/self/pagemap)", &error)
        });
        let foreign = self.space().map(|space| space.foreign.clone()).unwrap_or_default();
        let (mut resident, mut inherited) = (0, 0);
        for block in blocks {
            let start = block.index as u32 * channel::BLOCK_PAGES;
            let there = present
                .block(self.region.address(PageId(start)))
                .unwrap_or_else(|error| self.broken("see which pages a forked child has", &error));
            for at in 0..channel::BLOCK_PAGES {
                let (page, bit) = (PageId(start + at), 1 << (at % 64));
                if !foreign.is_empty() && foreign.contains(page.0) {
                    continue;
                }
                if there[at as usize / 64] & bit != 0 {
                    self.enter_page(page, Entry::dirty(None));
                    self.residency().push(&self.table, page, 1);
                    resident += 1;
                } else if block.bits[at as usize / 64] & bit != 0 {
                    self.enter_page(page, Entry::remote(SlotId::inherited(page).0));
                    inherited += 1;
                }
            }
        }
        self.take_what_is_there(resident);
        self.slots().inherit(inherited);
    }

    fn enter_page(&self, page: PageId, entry: Entry) {
        let before = self.table.lock(page);
        assert_eq!(before.state(), State::Absent, "a page is entered once");
        let waits = self.table.unlock(page, entry);
        assert!(!waits, "nobody knows the new table yet");
    }

    /// Reads inherited pages: pairs in the order of pages.
    pub(crate) fn read_inherited(&self, pairs: &[(PageId, FrameId)]) {
        let inheritance = self.inheritance.as_ref().expect("inherited slots come from somebody");
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

    /// The life of the thread that waits for the end of the parent.
    fn wait_for_orphanage(&self, bell: RawFd) {
        loop {
            match channel::receive(bell) {
                Ok((message, _)) if message.kind == channel::ORPHANED => {
                    self.move_inheritance();
                    return;
                }
                Ok(_) => {}
                // If something is still needed, who needs it learns that it is not there.
                Err(_) => return,
            }
        }
    }

    /// Moves all that is inherited to slots of our own, then takes leave of the keeper.
    fn move_inheritance(&self) {
        let mut pages: Vec<PageId> = Vec::new();
        while self.slots().inherited() > 0 {
            // What is in staging and has an inherited slot gets another one when it is written.
            self.flush_staging(&self.gate());
            self.table.touched(0..self.region.pages(), |part| {
                for page in part.map(PageId) {
                    let inherited = |entry: Entry| {
                        entry.slot().is_some_and(|slot| SlotId(slot).inherited_page().is_some())
                    };
                    let in_run = pages.last().is_none_or(|last| last.0 + 1 == page.0);
                    if !in_run || pages.len() == HEIR_FRAMES as usize {
                        self.move_pages(&mut pages);
                    }
                    match self.table.try_lock(page, inherited) {
                        Some(entry) if entry.state() == State::Remote => pages.push(page),
                        Some(entry) => {
                            // It is resident: it goes to a slot of ours when it is evicted.
                            self.settle(page, Entry::dirty(None));
                            self.slots_free_inherited(entry);
                        }
                        None => {}
                    }
                }
            });
            self.move_pages(&mut pages);
            // Pages that others have BUSY are left for the next round.
            std::thread::yield_now();
        }
        // Our own children may have slots of the keeper's in their pictures.
        while self.forks.living() > 0 {
            let seen = self.room.load(Ordering::Acquire);
            sys::futex_wait(&self.room, seen, Some(1000));
        }
        if let Some(inheritance) = &self.inheritance {
            inheritance.give_up();
        }
    }

    fn slots_free_inherited(&self, entry: Entry) {
        if let Some(slot) = entry.slot() {
            self.free_slot(SlotId(slot));
        }
    }

    /// Moves consecutive remote pages, BUSY by us.
    fn move_pages(&self, pages: &mut Vec<PageId>) {
        if pages.is_empty() {
            return;
        }
        let first = self.heir_frames();
        let frame = |index: usize| FrameId(first.0 + index as u32);
        let pairs: Vec<_> = pages.iter().enumerate().map(|(i, page)| (*page, frame(i))).collect();
        self.read_inherited(&pairs);
        let mut stored = Vec::with_capacity(pages.len());
        {
            let mut slots = self.slots();
            for index in 0..pages.len() {
                match slots.allocate(&*self.transport) {
                    Ok(slot) => stored.push((slot, frame(index))),
                    Err(error) => self.lost(&error),
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

/// Which pages of this process are there: in memory, or swapped out by the kernel.
pub(super) struct Presence(std::fs::File);

impl Presence {
    const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;

    /// # Errors
    /// Where /proc is not mounted.
    pub fn open() -> io::Result<Self> {
        sys::open_own(c"/proc/self/pagemap").map(Self)
    }

    /// The pages of a block, as bits.
    pub fn block(&self, address: usize) -> io::Result<[u64; 8]> {
        let mut entries = [0u8; channel::BLOCK_PAGES as usize * 8];
        let at = (address / PAGE_BYTES * 8) as u64;
        self.0.read_exact_at(&mut entries, at)?;
        let mut bits = [0u64; 8];
        for (index, entry) in entries.as_chunks::<8>().0.iter().enumerate() {
            if u64::from_ne_bytes(*entry) & Self::PRESENT_OR_SWAPPED != 0 {
                bits[index / 64] |= 1 << (index % 64);
            }
        }
        Ok(bits)
    }
}
