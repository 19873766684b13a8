//! A thread that keeps the second core of a machine with two cores from going idle while faults are
//! frequent.
//!
//! The handler serves a fault on the core of the faulting thread, and still runs there when it
//! wakes the thread. The kernel therefore starts the thread on the other core if that core is idle.
//! The thread then waits until that core has left its sleep state, which takes 20 to 40 us in a
//! virtual machine. The kernel must also keep the TLBs of both cores consistent. Where a NIC thread
//! polls on the other core, the core is not idle. Where pages move without a NIC
//! (`direct_transport`), this thread polls instead, at the lowest priority.
//!
//! Sorting 40 MB with 16 MiB local took 32 s with this thread and 49 s without. With a polling
//! process bound to the other core the sort took 8.5 s. This thread is not bound: the scheduler
//! still moves the faulting thread now and then, and the handler follows late.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::pager::Pager;
use crate::spawn::spawn;
use crate::sys;

/// Time without a fault after which the thread sleeps. Also the greatest interval between two
/// faults that wakes it.
const AWAKE_NS: u64 = 200_000;

/// State of the thread.
#[derive(Debug, Default)]
pub(crate) struct Awake {
    /// Time of the last fault.
    last_fault_ns: AtomicU64,
    /// Futex: 1 while the thread sleeps.
    sleeps: AtomicU32,
}

impl Awake {
    /// Records a fault, and wakes the thread if faults are frequent.
    pub fn note_fault(&self, now_ns: u64) {
        let last = self.last_fault_ns.swap(now_ns, Ordering::Relaxed);
        if self.sleeps.load(Ordering::Acquire) == 1 && now_ns.wrapping_sub(last) < AWAKE_NS {
            self.sleeps.store(0, Ordering::Release);
            sys::futex_wake(&self.sleeps);
        }
    }

    /// Polls while faults are frequent, and sleeps otherwise. Never returns.
    fn run(&self) {
        // SAFETY: changes the nice value of the calling thread.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
        loop {
            let since_fault =
                || sys::now_ns().saturating_sub(self.last_fault_ns.load(Ordering::Relaxed));
            while since_fault() < AWAKE_NS {
                (0..64).for_each(|_| std::hint::spin_loop());
            }
            self.sleeps.store(1, Ordering::Release);
            while self.sleeps.load(Ordering::Acquire) == 1 {
                sys::futex_wait(&self.sleeps, 1, None);
            }
        }
    }
}

impl Pager {
    /// Starts the thread where it is useful: with two cores, and without a NIC that moves pages.
    pub(crate) fn start_awake(self: &std::sync::Arc<Self>) -> std::io::Result<()> {
        let is_direct = self.pages.backing.transport_stats().is_direct;
        if units::cpus::cores() != 2 || !is_direct {
            return Ok(());
        }
        let pager = self.clone();
        spawn("granary-awake", move || {
            pager.enter();
            pager.awake.run();
        })
    }
}
