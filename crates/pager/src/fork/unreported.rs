//! Forks that the kernel does not report: without CAP_SYS_PTRACE a child has no userfaultfd, and what
//! is missing reads as zeros there until it has made one.
//!
//! So from before the fork until the child has registered its region nothing may touch a missing page in
//! it. What does run there is libc: the locks of its streams, which lie in allocated memory, and
//! the forking thread's stack. They are made resident before, and the evictor and the handler stand still,
//! so that the child's copy of the page table says which pages were missing. If one of them is
//! there when the child looks, somebody touched it, and the child ends with a message.
//!
//! At other times the region is not copied by a fork at all: a child that a raw system call makes finds
//! nothing there, rather than zeros.

use std::ffi::c_void;
use std::sync::MutexGuard;

use super::channel;
use super::grow::Presence;
use crate::config::EXIT_PAGER;
use crate::page_table::{PageId, State};
use crate::pager::Pager;
use crate::region::RangeSet;
use crate::sys::{self, PAGE_BYTES};
use crate::uffd::{Features, Uffd};

/// How much of the forking thread's stack is made resident.
const STACK_BYTES: usize = 64 << 10;

unsafe extern "C" {
    /// glibc's list of streams.
    static _IO_list_all: *const Stream;
}

/// The head of glibc's `struct _IO_FILE`, an ABI since 1999.
#[repr(C)]
struct Stream {
    flags: i32,
    pointers: [*const c_void; 12],
    chain: *const Stream,
    fileno: i32,
    flags2: i32,
    old_offset: i64,
    column: u16,
    vtable_offset: i8,
    short_buffer: [u8; 1],
    lock: *const c_void,
}

impl Pager {
    /// Keeps the handler and the evictor still, with everything resident that libc touches in the child.
    pub(super) fn stop_for_unreported_fork(
        &'static self,
    ) -> (MutexGuard<'static, ()>, MutexGuard<'static, RangeSet>) {
        loop {
            let mut all = Vec::new();
            self.touch_streams(&mut all);
            let here = (&raw const all) as usize;
            for at in (here.saturating_sub(STACK_BYTES / 2)..here + STACK_BYTES / 2)
                .step_by(PAGE_BYTES)
                .filter(|&at| self.region.contains(at))
            {
                touch(at);
                all.push(at);
            }
            let turn = self.turn.lock().expect("nobody panics with the turn locked");
            let gate = self.gate();
            let resident = |&at: &usize| {
                let entry = self.table.load(self.region.page(at));
                entry.state() == State::Resident && !entry.is_busy()
            };
            if all.iter().all(resident) {
                self.copy_at_forks(libc::MADV_DOFORK);
                return (turn, gate);
            }
            drop((turn, gate));
            std::thread::yield_now();
        }
    }

    fn touch_streams(&self, all: &mut Vec<usize>) {
        // SAFETY: glibc's own list, which only grows at its head while a fork is prepared, or shrinks by
        // a stream that a thread closes; as libc does in the child, it is walked as it is.
        unsafe {
            let mut at = _IO_list_all;
            let mut left = 100_000;
            while !at.is_null() && left > 0 {
                for address in [at as usize, at as usize + size_of::<Stream>(), (*at).lock as usize]
                {
                    if self.region.contains(address) {
                        touch(address);
                        all.push(address);
                    }
                }
                at = (*at).chain;
                left -= 1;
            }
        }
    }

    fn copy_at_forks(&self, advice: i32) {
        // SAFETY: changes only whether a fork copies the region.
        let done = unsafe { sys::madvise(self.region.base(), self.region.len(), advice) };
        if let Err(error) = done {
            self.broken("say whether a fork copies paged memory", &error);
        }
    }

    /// Forks by raw system calls do not copy the region.
    pub(crate) fn hide_from_raw_forks(&self) {
        self.copy_at_forks(libc::MADV_DONTFORK);
    }

    /// In the child: makes the descriptor of its faults.
    pub(super) fn open_faults(&self, foreign: &RangeSet) -> Uffd {
        self.check_untouched(foreign);
        let faults = match Uffd::open(Features::default()) {
            Ok(faults) => faults,
            Err(error) => sys::die(EXIT_PAGER, &format!("cannot page a forked child: {error}")),
        };
        let mut ours = RangeSet::default();
        ours.insert(0..self.region.pages());
        for part in foreign.overlap(0..self.region.pages()) {
            ours.remove(part);
        }
        for part in ours.overlap(0..self.region.pages()) {
            let start = self.region.address(PageId(part.start));
            // SAFETY: the region of this process, whose faults are served from here on.
            if let Err(error) = unsafe { faults.register(start, part.len() * PAGE_BYTES) } {
                self.broken("register a forked child's memory with userfaultfd", &error);
            }
        }
        self.hide_from_raw_forks();
        faults
    }

    fn check_untouched(&self, foreign: &RangeSet) {
        let present = Presence::open().unwrap_or_else(|error| {
            self.broken("see which pages a forked child has (/proc/self/pagemap)", &error)
        });
        self.table.touched(0..self.region.pages(), |part| {
            let start = part.start / channel::BLOCK_PAGES * channel::BLOCK_PAGES;
            let there = present.block(self.region.address(PageId(start))).unwrap_or_else(|error| {
                self.broken("see which pages a forked child has", &error)
            });
            for page in part.map(PageId) {
                let at = page.0 - start;
                if there[at as usize / 64] >> (at % 64) & 1 != 0
                    && self.table.load(page).state() != State::Resident
                    && !foreign.contains(page.0)
                {
                    sys::die(
                        EXIT_PAGER,
                        "libc touched paged-out memory in a forked child before it could be followed, \
                         so the child ends now; with CAP_SYS_PTRACE forks are followed from the start",
                    );
                }
            }
        });
    }
}

fn touch(address: usize) {
    // SAFETY: allocated memory of this process.
    unsafe { std::ptr::read_volatile(address as *const u8) };
}
