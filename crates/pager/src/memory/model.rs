//! [`Memory`] of a simulated kernel, with assertions of the trait's contract.
//!
//! Program pages and positions are boxes that move. Each operation is divided into steps of a page,
//! between which other threads run. A seed decides where an operation stops early.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Done, Memory, Position, Stop};
use crate::page_table::{PageId, PageTable};
use crate::sim::fiber::{self, point, trace, wait_until};
use crate::sim::random::Random;

/// Words of a page.
pub(crate) const WORDS: usize = 512;

/// Content of a page.
#[derive(Clone, PartialEq, Eq)]
#[repr(align(64))]
pub(crate) struct Bytes(pub [u64; WORDS]);

impl Bytes {
    /// A page of zeros.
    pub(crate) fn zeros() -> Box<Self> {
        Box::new(Self([0; WORDS]))
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let last = self.0[WORDS - 1];
        let other = self.0.iter().position(|word| *word != last);
        match other {
            None => write!(f, "all words {last:#x}"),
            Some(at) => {
                let print = self.0.iter().fold(0u64, |p, w| (p ^ w).wrapping_mul(0x100_0000_01b3));
                write!(f, "word {at} {:#x}, last {last:#x}, sum {print:#x}", self.0[at])
            }
        }
    }
}

/// Odds that an operation stops early: at one page in this number of pages on average, and never
/// for 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Odds {
    pub pinned: u32,
    pub changed: u32,
    /// The kernel refuses as in a fork, although there is none.
    pub forking: u32,
}

/// An event that the handler reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A thread waits for a missing page, or to write to one that is write-protected.
    Fault { page: PageId, thread: u32, write: bool, is_protected: bool },
    /// A fork has been made. The kernel changes no page until this event has been read.
    Fork,
}

/// A thread that waits for a page.
struct Wait {
    page: PageId,
    thread: u32,
    is_woken: bool,
}

/// State of the simulated kernel.
pub(crate) struct Kernel {
    /// Content of mapped pages.
    pages: Vec<Option<Box<Bytes>>>,
    /// Pages that a device has pinned.
    pinned: Vec<bool>,
    /// Write-protected pages.
    protected: Vec<bool>,
    positions: Vec<Option<Box<Bytes>>>,
    waits: Vec<Wait>,
    events: VecDeque<Event>,
    /// A fork's event has not been read yet.
    is_forking: bool,
    /// Mapped pages and filled positions.
    present: u32,
    odds: Odds,
    random: Random,
}

impl Kernel {
    fn wake(&mut self, page: PageId) {
        for wait in self.waits.iter_mut().filter(|wait| wait.page == page) {
            wait.is_woken = true;
        }
    }

    fn fill(&mut self, position: Position, content: Box<Bytes>) {
        let place = &mut self.positions[position.0 as usize];
        assert!(place.is_none(), "{position:?} is filled twice");
        *place = Some(content);
        self.present += 1;
    }

    fn empty(&mut self, position: Position) -> Box<Bytes> {
        let content = self.positions[position.0 as usize].take();
        self.present -= 1;
        content.unwrap_or_else(|| panic!("{position:?} is empty"))
    }

    fn map(&mut self, page: PageId, content: Box<Bytes>) {
        let place = &mut self.pages[page.0 as usize];
        assert!(place.is_none(), "{page:?} is mapped twice");
        *place = Some(content);
        self.present += 1;
    }

    fn unmap(&mut self, page: PageId) -> Option<Box<Bytes>> {
        self.pinned[page.0 as usize] = false;
        self.protected[page.0 as usize] = false;
        let content = self.pages[page.0 as usize].take();
        self.present -= u32::from(content.is_some());
        content
    }
}

/// The simulated kernel's memory of a program, and the shelf.
pub(crate) struct ModelMemory {
    kernel: Mutex<Kernel>,
    /// The page table of the pager's logic that uses this memory.
    table: AtomicPtr<PageTable>,
    /// Pages that are copied together, if pages are copied and not moved.
    copied_run: Option<u32>,
    /// The kernel moves no page within the program's memory.
    pub(crate) refuses_moves: AtomicBool,
    /// Time that has passed without a step.
    passed_ns: AtomicU64,
}

impl ModelMemory {
    /// Missing pages and empty positions. Pages are moved, or copied if a number of pages is given
    /// that are copied together.
    pub(crate) fn new(
        pages: u32,
        positions: u32,
        copied_run: Option<u32>,
        odds: Odds,
        random: Random,
    ) -> Self {
        let none = |count: u32| (0..count).map(|_| None).collect();
        let kernel = Kernel {
            pages: none(pages),
            pinned: vec![false; pages as usize],
            protected: vec![false; pages as usize],
            positions: none(positions.next_multiple_of(64)),
            waits: Vec::new(),
            events: VecDeque::new(),
            is_forking: false,
            present: 0,
            odds,
            random,
        };
        let (kernel, refuses_moves) = (Mutex::new(kernel), AtomicBool::new(false));
        let (table, passed_ns) = (AtomicPtr::default(), AtomicU64::new(0));
        Self { kernel, table, copied_run, refuses_moves, passed_ns }
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, ns: u64) {
        self.passed_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Checks from now on that pages are BUSY in this table, which must live as long as the memory.
    pub(crate) fn watch(&self, table: &PageTable) {
        self.table.store(std::ptr::from_ref(table).cast_mut(), Ordering::Release);
    }

    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().expect("no thread panics while it holds this lock")
    }

    fn assert_busy(&self, first: PageId, pages: u32, what: &str) {
        // SAFETY: by the promise of `watch`.
        let table = unsafe { self.table.load(Ordering::Acquire).as_ref() };
        let table = table.expect("the memory watches a table");
        for page in (first.0..first.0 + pages).map(PageId) {
            let entry = table.peek(page);
            assert!(entry.is_busy(), "{what}: {page:?} is not BUSY but {entry:?}");
        }
    }

    /// Runs one step for each page of a run, until one stops.
    fn for_run(
        &self,
        what: &str,
        (first, pages): (PageId, u32),
        mut step: impl FnMut(&mut Kernel, u32) -> Option<Stop>,
    ) -> Done {
        self.assert_busy(first, pages, what);
        let mut done = Done { pages, stop: None };
        for at in 0..pages {
            point();
            self.assert_busy(first, pages, what);
            let mut kernel = self.kernel();
            let odds = kernel.odds;
            let is_refused = kernel.is_forking || kernel.random.once_in(odds.forking);
            let stop = if is_refused { Some(Stop::Forking) } else { step(&mut kernel, at) };
            if stop.is_some() {
                done = Done { pages: at, stop };
                break;
            }
        }
        trace(|| format!("{what} {first:?}+{pages}: {done:?}"));
        point();
        done
    }

    /// Takes out at most `copied_run` pages by copying them.
    fn copy_out(&self, first: PageId, to: Position, pages: u32) -> Option<Stop> {
        let all = |at: u32| (PageId(first.0 + at), to.plus(at));
        point();
        {
            let mut kernel = self.kernel();
            if kernel.is_forking {
                return Some(Stop::Forking);
            }
            let mapped = |kernel: &Kernel, page: PageId| kernel.pages[page.0 as usize].is_some();
            for (page, _) in (0..pages).map(all) {
                kernel.protected[page.0 as usize] = mapped(&kernel, page);
            }
        }
        for (page, position) in (0..pages).map(all) {
            point();
            let mut kernel = self.kernel();
            let content = kernel.pages[page.0 as usize].clone();
            kernel.fill(position, content.unwrap_or_else(Bytes::zeros));
        }
        for (page, _) in (0..pages).map(all) {
            point();
            self.kernel().unmap(page);
        }
        None
    }

    /// Removes the write-protection of a page that the caller has set BUSY, and wakes its threads.
    pub(crate) fn unprotect(&self, page: PageId) {
        self.assert_busy(page, 1, "unprotect");
        let mut kernel = self.kernel();
        kernel.protected[page.0 as usize] = false;
        kernel.wake(page);
    }

    /// Lets a thread of the program access a page. `access` is called once, with the content of the
    /// mapped page. Waits for the page as often as necessary.
    pub(crate) fn access(
        &self,
        thread: u32,
        page: PageId,
        write: bool,
        access: impl FnOnce(&mut Bytes),
    ) {
        loop {
            point();
            let mut kernel = self.kernel();
            let is_protected = kernel.protected[page.0 as usize];
            match &mut kernel.pages[page.0 as usize] {
                Some(content) if !(write && is_protected) => return access(content),
                _ => {}
            }
            trace(|| format!("thread {thread} faults on {page:?}, write: {write}"));
            kernel.waits.push(Wait { page, thread, is_woken: false });
            kernel.events.push_back(Event::Fault { page, thread, write, is_protected });
            drop(kernel);
            wait_until("waits for a page", || {
                self.kernel().waits.iter().any(|wait| wait.thread == thread && wait.is_woken)
            });
            let mut kernel = self.kernel();
            kernel.waits.retain(|wait| wait.thread != thread);
            // The handler does not read the fault of a thread that waits no more.
            kernel.events.retain(
                |event| !matches!(event, Event::Fault { thread: other, .. } if *other == thread),
            );
        }
    }

    /// Drops a page as a raw system call does, which the pager does not see. Returns true if the
    /// page was mapped, and so reads as zeros now.
    pub(crate) fn drop_raw(&self, page: PageId) -> bool {
        let dropped = self.kernel().unmap(page).is_some();
        trace(|| format!("raw drop of {page:?}: {dropped}"));
        dropped
    }

    /// Pins a page if it is mapped. Returns true if the page is mapped.
    pub(crate) fn pin(&self, page: PageId) -> bool {
        let mut kernel = self.kernel();
        let is_mapped = kernel.pages[page.0 as usize].is_some();
        kernel.pinned[page.0 as usize] = is_mapped;
        is_mapped
    }

    /// Lets a device write to a page that it has pinned, and unpins it. Without effect if the page
    /// was dropped since.
    pub(crate) fn write_pinned(&self, page: PageId, write: impl FnOnce(&mut Bytes)) {
        let mut kernel = self.kernel();
        if std::mem::take(&mut kernel.pinned[page.0 as usize]) {
            let content = &mut kernel.pages[page.0 as usize];
            write(content.as_mut().expect("a pinned page stays mapped"));
        }
    }

    /// Maps a page before the program starts.
    pub(crate) fn start_with(&self, page: PageId, content: Box<Bytes>) {
        self.kernel().map(page, content);
    }

    /// Forks: returns the child's copy of the mapped pages. Until the handler has read the event,
    /// the kernel changes no page.
    pub(crate) fn fork(&self) -> Vec<Option<Box<Bytes>>> {
        let mut kernel = self.kernel();
        assert!(!kernel.is_forking, "forks exclude each other");
        kernel.is_forking = true;
        kernel.events.push_back(Event::Fork);
        trace(|| "fork".into());
        kernel.pages.clone()
    }

    /// Returns true until the event of a fork has been read.
    pub(crate) fn is_forking(&self) -> bool {
        self.kernel().is_forking
    }

    /// Returns true if an event waits for the handler.
    pub(crate) fn has_events(&self) -> bool {
        !self.kernel().events.is_empty()
    }

    /// Returns at most `max` events, forks first.
    pub(crate) fn read_events(&self, max: usize) -> Vec<Event> {
        let mut kernel = self.kernel();
        let count = max.min(kernel.events.len());
        let mut events: Vec<Event> = kernel.events.drain(..count).collect();
        events.sort_by_key(|event| *event != Event::Fork);
        if events.first() == Some(&Event::Fork) {
            kernel.is_forking = false;
        }
        trace(|| format!("read {events:?}"));
        events
    }

    /// Returns the number of mapped pages and filled positions.
    pub(crate) fn present(&self) -> u32 {
        self.kernel().present
    }

    /// Returns a copy of a page's content, if the page is mapped.
    pub(crate) fn mapped(&self, page: PageId) -> Option<Box<Bytes>> {
        self.kernel().pages[page.0 as usize].clone()
    }

    /// Returns a copy of a position's content, if the position is filled.
    pub(crate) fn filled(&self, position: Position) -> Option<Box<Bytes>> {
        self.kernel().positions[position.0 as usize].clone()
    }
}

impl Memory for ModelMemory {
    fn take_out(&self, first: PageId, to: Position, pages: u32) -> Done {
        if let Some(run) = self.copied_run {
            let mut at = 0;
            while at < pages {
                let part = run.min(pages - at);
                let stop = self.copy_out(PageId(first.0 + at), to.plus(at), part);
                if stop.is_some() {
                    return Done { pages: at, stop };
                }
                at += part;
            }
            trace(|| format!("take_out {first:?}+{pages} to {to:?}"));
            return Done { pages, stop: None };
        }
        self.for_run("take_out", (first, pages), |kernel, at| {
            let page = PageId(first.0 + at);
            let odds = kernel.odds;
            if kernel.pinned[page.0 as usize] || kernel.random.once_in(odds.pinned) {
                return Some(Stop::Pinned);
            }
            if kernel.random.once_in(odds.changed) {
                return Some(Stop::Changed);
            }
            let content = kernel.unmap(page);
            kernel.fill(to.plus(at), content.unwrap_or_else(Bytes::zeros));
            None
        })
    }

    fn put_in(&self, from: Position, first: PageId, pages: u32) -> Done {
        self.for_run("put_in", (first, pages), |kernel, at| {
            let page = PageId(first.0 + at);
            assert!(kernel.positions[from.plus(at).0 as usize].is_some(), "put_in of {page:?}");
            let odds = kernel.odds;
            if kernel.random.once_in(odds.changed) {
                return Some(Stop::Changed);
            }
            let content = kernel.empty(from.plus(at));
            kernel.map(page, content);
            kernel.wake(page);
            None
        })
    }

    fn put_zeros(&self, first: PageId, pages: u32, _write: bool) -> Done {
        self.for_run("put_zeros", (first, pages), |kernel, at| {
            let page = PageId(first.0 + at);
            let odds = kernel.odds;
            if kernel.pages[page.0 as usize].is_some() || kernel.random.once_in(odds.changed) {
                return Some(Stop::Changed);
            }
            kernel.map(page, Bytes::zeros());
            kernel.wake(page);
            None
        })
    }

    fn drop_pages(&self, first: PageId, pages: u32) {
        self.assert_busy(first, pages, "drop_pages");
        for page in (first.0..first.0 + pages).map(PageId) {
            point();
            self.kernel().unmap(page);
        }
        trace(|| format!("drop_pages {first:?}+{pages}"));
        point();
    }

    fn relocate(&self, from: PageId, to: PageId) -> Option<bool> {
        point();
        if self.refuses_moves.load(Ordering::Relaxed) {
            return None;
        }
        self.assert_busy(from, 1, "relocate from");
        self.assert_busy(to, 1, "relocate to");
        let mut kernel = self.kernel();
        assert!(!kernel.is_forking, "the program's threads move pages, and one of them forks");
        let content = kernel.unmap(from);
        let is_mapped = content.is_some();
        content.into_iter().for_each(|content| kernel.map(to, content));
        drop(kernel);
        trace(|| format!("relocate {from:?} to {to:?}: {is_mapped}"));
        point();
        Some(is_mapped)
    }

    fn wake(&self, first: PageId, pages: u32) {
        point();
        let mut kernel = self.kernel();
        (first.0..first.0 + pages).for_each(|page| kernel.wake(PageId(page)));
        trace(|| format!("wake {first:?}+{pages}"));
    }

    fn populate(&self, first: Position, pages: u32) {
        for at in 0..pages {
            point();
            self.kernel().fill(first.plus(at), Bytes::zeros());
        }
        trace(|| format!("populate {first:?}+{pages}"));
    }

    fn discard(&self, first: Position, pages: u32) {
        for at in 0..pages {
            point();
            self.kernel().empty(first.plus(at));
        }
        trace(|| format!("discard {first:?}+{pages}"));
        point();
    }

    fn position(&self, position: Position) -> *mut u8 {
        point();
        let mut kernel = self.kernel();
        match &mut kernel.positions[position.0 as usize] {
            Some(content) => content.0.as_mut_ptr().cast(),
            None => {
                drop(kernel);
                panic!("{position:?} is empty: a touch would map the kernel's page of zeros")
            }
        }
    }

    fn pause(&self) {
        fiber::pause();
    }

    /// Times are counted, and nothing depends on them.
    /// One step of the simulator takes a millisecond.
    fn now_ns(&self) -> u64 {
        let steps = u64::from(fiber::step().unwrap_or(0));
        steps * 1_000_000 + self.passed_ns.load(Ordering::Relaxed)
    }
}
