//! The part of the run's bound that this process has leased from the [`Ledger`].

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::ledger::{GUARANTEED_UNITS, Ledger, Lost, Owner, UNIT_PAGES, View, surplus};
use crate::run_memory::RunMemory;
use crate::sys;

/// Time without a fault or without need after which a process gives units back, in nanoseconds.
pub const IDLE_NS: u64 = 100_000_000;
/// Time that a new process waits for its guaranteed units, while others take pages out for it.
const START_NS: u64 = 1_000_000_000;
/// Longest wait of a new process until it asks again, in milliseconds.
const START_WAIT_MS: u64 = 20;
/// Announcements of a want for each audit, which finds units of processes that have ended.
const AUDIT_EVERY: u32 = 10;
/// Attempts of an audit, which fails while a process changes its lease.
const AUDITS: u32 = 100;

/// The lease of a process.
#[derive(Debug)]
pub struct Lease {
    ledger: Ledger,
    owner: Owner,
    slot: AtomicU32,
    /// Leased units. The ledger has a copy.
    own: AtomicU32,
    unit_pages: u32,
    /// A thread has wanted units since the last review, and has not got them.
    is_short: AtomicBool,
    /// The ledger says that this process wants units.
    wants: AtomicBool,
    /// Announcements in which this process wanted units.
    announced: AtomicU32,
}

impl Lease {
    /// Leases the guaranteed units of this process from the run's ledger. While other processes
    /// have all units, waits for up to a second for them to take pages out. After that, and if the
    /// guaranteed units of all processes exceed the total, the units are beyond the total.
    ///
    /// # Errors
    /// The run has no ledger of this version, or has too many processes.
    pub fn open(memory: RunMemory) -> io::Result<Self> {
        Self::start(Ledger::open(memory)?, Owner::current())
    }

    /// Leases the guaranteed units of this process, a promoted child, from its parent's ledger.
    pub fn for_child(&self) -> io::Result<Self> {
        Self::start(self.ledger, Owner::current())
    }

    fn start(ledger: Ledger, owner: Owner) -> io::Result<Self> {
        let lease = Self::claim(ledger, owner, UNIT_PAGES).ok_or_else(|| {
            io::Error::other("each process of the run needs a slot, and all slots are in use")
        })?;
        let end = sys::now_ns() + START_NS;
        loop {
            let event = lease.event();
            let seen = event.load(Ordering::Acquire);
            // No process can make room if the guaranteed units exceed the total.
            let is_hopeless = lease.view().is_none_or(|view| {
                u64::from(view.processes) * u64::from(GUARANTEED_UNITS) > u64::from(view.total)
            });
            if lease.take_guaranteed(is_hopeless || sys::now_ns() >= end) {
                break;
            }
            lease.set_wants(true);
            lease.ledger.wake_all_but(lease.slot().0);
            sys::futex_wait_shared(event, seen, Some(START_WAIT_MS));
        }
        lease.set_wants(false);
        Ok(lease)
    }

    /// Claims a slot, without units unless the process has some from before an exec. `None` if each
    /// slot belongs to a living process.
    pub(crate) fn claim(ledger: Ledger, owner: Owner, unit_pages: u32) -> Option<Self> {
        let claimed = ledger.claim(owner).or_else(|| {
            audit(&ledger);
            ledger.claim(owner)
        });
        let (slot, own) = claimed?;
        if own > 0 {
            // The exec may have ended a thread in the middle of a change.
            audit(&ledger);
        }
        Some(Self {
            ledger,
            owner,
            slot: AtomicU32::new(slot as u32),
            own: AtomicU32::new(own),
            unit_pages,
            is_short: AtomicBool::new(false),
            wants: AtomicBool::new(false),
            announced: AtomicU32::new(0),
        })
    }

    /// Leases what is missing of the guaranteed units. Returns true if all are there.
    fn take_guaranteed(&self, forced: bool) -> bool {
        let missing = || GUARANTEED_UNITS.saturating_sub(self.own());
        self.change(|slot, own| self.ledger.take(slot, own, missing(), false));
        if missing() > 0 {
            audit(&self.ledger);
            self.change(|slot, own| self.ledger.take(slot, own, missing(), forced));
        }
        missing() == 0
    }

    /// Returns the ledger.
    pub fn ledger(&self) -> Ledger {
        self.ledger
    }

    fn slot(&self) -> (usize, Owner) {
        (self.slot.load(Ordering::Acquire) as usize, self.owner)
    }

    /// Returns the number of leased units.
    pub fn own(&self) -> u32 {
        self.own.load(Ordering::Acquire)
    }

    /// Returns the number of leased pages.
    pub fn pages(&self) -> u32 {
        self.own().saturating_mul(self.unit_pages)
    }

    /// Returns the pages of a unit.
    pub fn unit_pages(&self) -> u32 {
        self.unit_pages
    }

    /// Returns the futex on which this process's worker waits.
    pub fn event(&self) -> &'static AtomicU32 {
        self.ledger.event(self.slot().0)
    }

    /// Leases units by `change`, again in a new slot if this process has lost its own. The caller
    /// excludes other changes. Returns the number of units.
    fn change(&self, change: impl Fn((usize, Owner), u32) -> Result<u32, Lost>) -> u32 {
        let own = self.own();
        let got = change(self.slot(), own).or_else(|_| {
            self.enter_again(own);
            change(self.slot(), own)
        });
        let got = got.unwrap_or(0);
        self.own.store(own.saturating_add(got), Ordering::Release);
        got
    }

    /// Enters this process into the ledger again, because its slot was overwritten: by a process
    /// that could not see this one (in another PID namespace), or by mistake.
    fn enter_again(&self, own: u32) {
        let Some((slot, units)) = self.ledger.claim(self.owner) else { return };
        self.slot.store(slot as u32, Ordering::Release);
        if units > own {
            let _ = self.ledger.release((slot, self.owner), units, units - own);
        } else {
            let _ = self.ledger.take((slot, self.owner), units, own - units, true);
        }
    }

    /// Leases at most `wanted` units. Returns their number. Makes no system call. Calls of this and
    /// of [`Lease::release`] exclude each other.
    pub(crate) fn take(&self, wanted: u32) -> u32 {
        let got = self.change(|slot, own| self.ledger.take(slot, own, wanted, false));
        if got < wanted && !self.is_short.load(Ordering::Relaxed) {
            self.is_short.store(true, Ordering::Relaxed);
        }
        got
    }

    /// Gives units back, which have no page any more.
    pub(crate) fn release(&self, units: u32) {
        let own = self.own();
        let less = own.saturating_sub(units);
        if self.ledger.release(self.slot(), own, units).is_err() {
            self.enter_again(less);
        }
        self.own.store(less, Ordering::Release);
    }

    /// Wakes the processes that wait for units.
    pub(crate) fn wake_wanting(&self) {
        self.ledger.wake_wanting();
    }

    fn view(&self) -> Option<View> {
        self.ledger.view(self.slot().0, self.own())
    }

    fn set_wants(&self, wants: bool) {
        if self.wants.swap(wants, Ordering::AcqRel) != wants {
            self.ledger.set_wants(self.slot().0, wants);
        }
    }

    /// Tells the other processes whether this one wants units. Called by the worker, at least
    /// [`IDLE_NS`] after the last call.
    pub(crate) fn announce(&self) {
        let is_short = self.is_short.swap(false, Ordering::AcqRel);
        self.set_wants(is_short);
        if is_short && self.announced.fetch_add(1, Ordering::Relaxed).is_multiple_of(AUDIT_EVERY) {
            audit(&self.ledger);
        }
    }

    /// Returns true if this process wants units that it did not get.
    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Acquire) || self.wants.load(Ordering::Acquire)
    }

    /// Returns how many units this process should give back; see [`surplus`]. Calls of this exclude
    /// [`Lease::take`] and [`Lease::release`].
    pub(crate) fn surplus(&self, unused_pages: u32, is_idle: bool) -> u32 {
        if !self.ledger.has(self.slot(), self.own()) {
            self.enter_again(self.own());
        }
        self.view().map_or(0, |view| surplus(&view, unused_pages / self.unit_pages, is_idle))
    }
}

/// Counts the leased units again. Without effect while a process changes its lease all the time.
fn audit(ledger: &Ledger) {
    let _ = (0..AUDITS).any(|_| ledger.audit(Owner::is_alive));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(pid: u32) -> Owner {
        Owner::new(pid, 1)
    }

    #[test]
    fn a_process_enters_again_if_its_slot_is_overwritten() {
        let ledger = Ledger::in_memory(2, 20 * UNIT_PAGES);
        let lease = Lease::claim(ledger, owner(1), UNIT_PAGES).unwrap();
        assert_eq!((lease.take(6), lease.pages()), (6, 6 * UNIT_PAGES));
        // Another process believes that this one has ended.
        assert!(ledger.audit(|_| false));
        assert_eq!(ledger.given(), 0);
        assert_eq!(lease.take(3), 3);
        assert_eq!((lease.own(), ledger.given()), (9, 9));
        assert!(ledger.audit(|_| false));
        assert_eq!(lease.surplus(0, false), 0);
        assert_eq!((lease.own(), ledger.given()), (9, 9));
        assert!(ledger.audit(|_| false));
        lease.release(4);
        assert_eq!((lease.own(), ledger.given()), (5, 5));
    }

    #[test]
    fn a_process_wants_units_until_it_gets_them() {
        let ledger = Ledger::in_memory(2, 10 * UNIT_PAGES);
        let lease = Lease::claim(ledger, owner(1), UNIT_PAGES).unwrap();
        let wants = || ledger.members().next().unwrap().wants;
        assert_eq!(lease.take(12), 10);
        assert!(lease.is_short() && !wants());
        lease.set_wants(true);
        assert!(wants());
        lease.is_short.store(false, Ordering::Release);
        lease.announce();
        assert!(!wants() && !lease.is_short());
    }

    #[test]
    fn a_started_process_has_its_guaranteed_units() {
        let ledger = Ledger::in_memory(4, 6 * UNIT_PAGES);
        let first = Lease::start(ledger, Owner::current()).unwrap();
        assert_eq!((first.own(), ledger.given()), (GUARANTEED_UNITS, 4));
        // The guaranteed units of two processes exceed the total, so no process waits.
        let parent = std::os::unix::process::parent_id();
        let second = Lease::start(ledger, Owner::new(parent, 0)).unwrap();
        assert_eq!((second.own(), ledger.given()), (GUARANTEED_UNITS, 8));
    }
}
