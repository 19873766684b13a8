//! The handlers: read userfaultfd events, follow forks, and serve faults.
//!
//! There is a handler thread for each core, at most `HANDLERS_MAX`. One of them, the leader,
//! reads the events (`crate::leadership`). While one thread of the program faults, the leader
//! serves all faults, on the core where they occur. At intervals a handler checks on which core the
//! faulting thread last ran, and moves to that core (`CpuAffinity`). A wake-up on the same core
//! costs a fraction of a wake-up on another core, above all in a virtual machine.
//!
//! [`crate::pages`] maps the page. Where the machine has no core for the worker thread, the handler
//! does the worker's work in slices, after the faulting thread is awake.

use std::io;

use crate::fork;
use crate::pager::{Pager, Reclaimer};
use crate::pages::sizes::DEMAND_FRAMES;
use crate::pages::{Hand, Request};
use crate::priority::HandlerPriority;
use crate::spawn::spawn;
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES};
use crate::uffd::{Event, Fault};

/// Number of pages that the handler takes out after a fault in addition to the number that the
/// fault mapped.
const CATCH_UP_PAGES: u32 = 2;
/// Greatest number of handler threads. Each has a frame for a READ.
const HANDLERS_MAX: usize = 8;
const _: () = assert!(HANDLERS_MAX <= DEMAND_FRAMES as usize);

impl Pager {
    /// Starts the handlers beside the calling thread, which becomes a handler too.
    pub(crate) fn start_followers(self: &std::sync::Arc<Self>) -> io::Result<()> {
        for _ in 1..units::cpus::cores().min(HANDLERS_MAX) {
            let pager = self.clone();
            spawn("granary-fault", move || {
                pager.enter();
                pager.handler();
            })?;
        }
        Ok(())
    }

    /// Runs a handler's event loop.
    pub(crate) fn handler(self: &std::sync::Arc<Self>) {
        let mut affinity = CpuAffinity::default();
        let mut priority = HandlerPriority::ask();
        self.stats().set(Counter::HandlersRealTime, priority.is_granted().into());
        let mut hand = Hand::default();
        let mut events = Vec::with_capacity(32);
        let mut faults = Vec::with_capacity(32);
        let mut leads = false;
        loop {
            if !leads {
                self.leadership.take();
                leads = true;
            }
            if let Err(error) = self.uffd.read(&mut events) {
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                self.fatal("read page faults", &error);
            }
            // Forks first: until the snapshot for the child is taken, the forking thread waits.
            for event in events.drain(..) {
                match event {
                    Event::Fork(child) => fork::follow(self, child),
                    Event::Fault(fault) => faults.push(fault),
                    Event::Other(number) => {
                        let error = io::Error::other(format!("event {number:#x}"));
                        self.fatal("handle a userfaultfd event", &error);
                    }
                }
            }
            if faults.len() > 1 {
                self.leadership.hand_over();
                leads = false;
            }
            for fault in faults.drain(..) {
                let moved = affinity.follow(fault.thread);
                if let (Some(core), Some(times)) = (moved, &self.fault_times) {
                    times.note_core(core);
                }
                let start = sys::now_ns();
                let pages = self.serve(&mut hand, fault);
                let end = sys::now_ns();
                self.stats().record_fault(end - start);
                priority.served(start, end);
                self.fault_times.iter().for_each(|times| times.note_fault(end));
                if self.reclaimer == Reclaimer::Handler {
                    self.pages.work(&mut hand, pages + CATCH_UP_PAGES);
                }
            }
            if self.reclaimer != Reclaimer::Handler {
                self.pages.reap(&mut hand);
                self.wake_worker(false);
            }
        }
    }

    /// Serves one fault, and returns the number of pages that it mapped.
    fn serve(&self, hand: &mut Hand, fault: Fault) -> u32 {
        // An address without a page was unmapped after the fault. The next access of the thread
        // ends the program or finds other memory.
        let Some(page) = self.region.find(fault.address) else {
            self.wake_at(&fault);
            return 0;
        };
        if fault.write_protected {
            // Pages are write-protected only while they are copied, where the kernel cannot move
            // them. If the page is BUSY, the copying thread wakes the faulting thread. Otherwise an
            // operation that stopped half-way has left the page write-protected.
            self.stats().add(Counter::WriteFaults, 1);
            if let Some(entry) = self.pages.table.lock_or_wait(page) {
                // SAFETY: a page of the region, BUSY by this thread.
                let _ = unsafe { self.uffd.unprotect(fault.address, PAGE_BYTES, true) };
                self.pages.settle(page, entry);
            }
            return 0;
        }
        self.stats().add(Counter::Faults, 1);
        if let Some(trace) = &self.trace {
            trace.record(page, fault.thread, fault.write);
        }
        let request = Request {
            page,
            address: fault.address,
            thread: fault.thread,
            write: fault.write,
            bounds: self.region.neighbours(page),
            advice: self.advice.of(page),
            over_limit: self.forks.is_forking_thread(fault.thread),
            alone: self.trace.is_some(),
        };
        let (taken_out, writes) = (hand.taken_out, hand.waited_writes);
        let pages = self.pages.fault(hand, &request);
        if pages == 0 && self.region.find(fault.address) != Some(page) {
            self.wake_at(&fault);
        }
        if pages == 0 && self.pages.is_standstill() {
            // The worker watches refused faults.
            self.wake_worker(true);
        }
        if hand.taken_out > taken_out {
            self.stats().add(Counter::FaultsEvicting, 1);
            self.stats().add(Counter::PagesEvictedInFaults, hand.taken_out - taken_out);
            self.stats().add(Counter::FaultsWriting, u64::from(hand.waited_writes > writes));
        }
        pages
    }

    fn wake_at(&self, fault: &Fault) {
        if let Err(error) = self.uffd.wake(fault.address, PAGE_BYTES) {
            self.fatal("wake a thread at an address that is no longer paged", &error);
        }
    }
}

/// Keeps a handler thread on the core of the faulting thread.
struct CpuAffinity {
    core: Option<usize>,
    /// Core of the faulting thread at the last check, if it differed from `core`.
    candidate: Option<usize>,
    /// Faults until the next check.
    until_check: u32,
    /// Faults between two checks.
    check_interval: u32,
}

/// Bounds of the interval between checks, in faults. A check costs about as much as a fault, so the
/// interval doubles as long as the core does not change.
const CHECK_INTERVAL_MIN: u32 = 32;
const CHECK_INTERVAL_MAX: u32 = 512;

impl Default for CpuAffinity {
    fn default() -> Self {
        Self { core: None, candidate: None, until_check: 0, check_interval: CHECK_INTERVAL_MIN }
    }
}

impl CpuAffinity {
    /// Moves the handler to the core of `thread`, which has just faulted. The handler moves only if
    /// two consecutive checks found the thread on that core. Returns the core if it has moved.
    fn follow(&mut self, thread: u32) -> Option<usize> {
        if self.until_check > 0 {
            self.until_check -= 1;
            return None;
        }
        let mut moved = None;
        let core = core_of(thread);
        if core.is_some() && core != self.core {
            if self.core.is_none() || self.candidate == core {
                self.core = core;
                core.into_iter().for_each(pin);
                moved = core;
            }
            self.candidate = core;
            self.check_interval = CHECK_INTERVAL_MIN;
        } else {
            self.candidate = None;
            self.check_interval = (2 * self.check_interval).min(CHECK_INTERVAL_MAX);
        }
        self.until_check = self.check_interval;
        moved
    }
}

/// Returns the core on which a thread of this process last ran.
fn core_of(thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    // Field 39 of proc_pid_stat(5). The text after the name, which is in parentheses, starts with
    // field 3.
    stat.rsplit_once(") ")?.1.split(' ').nth(36)?.parse().ok()
}

/// Binds the calling thread to a core. An error is ignored: the thread is only slower then.
fn pin(core: usize) {
    // SAFETY: a zero set is valid; affects the calling thread only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}
