//! Standstill of a process's pages while a child is forked.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Hand, Pages};
use crate::memory::Memory;
use crate::page_table::PageId;

/// Reason of a standstill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A fork that is prepared by `pthread_atfork`, until its snapshot is taken or it has failed.
    Prepared = 1,
    /// A fork by a raw system call, from the read of its event until its snapshot is taken.
    Raw = 2,
}

/// Keeps pages from being taken out during a fork.
#[derive(Default)]
pub(super) struct Standstill {
    /// Bits of the [`Cause`]s. Only the threads that follow the fork change the bits. A refused
    /// change of pages leaves them as they are, because the kernel refuses until the forking thread
    /// runs again, which may be after the snapshot.
    causes: AtomicU32,
    /// Bits of `causes` are cleared under this lock, so that no page is left here.
    refused: Mutex<Refused>,
    /// Number of refused faults that may have a page beyond the limit.
    grants: AtomicU32,
    /// Number of faults that are given a page beyond the limit now. Read by the simulator's check
    /// of the limit.
    used_now: AtomicU32,
}

/// Faults that need room, and for which a page must be taken out.
#[derive(Default)]
struct Refused {
    pages: Vec<PageId>,
    /// Time of the first refusal in `pages`, in ns.
    since_ns: u64,
}

impl Standstill {
    fn refused(&self) -> MutexGuard<'_, Refused> {
        self.refused.lock().expect("no thread panics while it holds this lock")
    }
}

/// Time for which the faults of a standstill are refused, in ns. A fork takes a small part of it.
const REFUSAL_NS: u64 = 20_000_000;

impl<M: Memory> Pages<M> {
    /// Begins a standstill: no page is taken out until [`Pages::end_standstill`].
    pub fn begin_standstill(&self, cause: Cause) {
        self.standstill.grants.store(0, Ordering::Release);
        self.standstill.causes.fetch_or(cause as u32, Ordering::AcqRel);
    }

    /// Ends a standstill, after the snapshot for the child or after a failed fork. No effect if
    /// there is none.
    ///
    /// Slots that are allocated from here on belong to no child, so the freezing of new slots ends
    /// first. Otherwise a page that the program changes again and again would keep the slots of all
    /// its versions until the child has ended.
    pub fn end_standstill(&self, cause: Cause) {
        if cause == Cause::Prepared {
            self.slots().end_freezing();
        }
        let refused = {
            let mut refused = self.standstill.refused();
            let before = self.standstill.causes.fetch_and(!(cause as u32), Ordering::AcqRel);
            match before & !(cause as u32) {
                0 => std::mem::take(&mut refused.pages),
                _ => Vec::new(),
            }
        };
        refused.into_iter().for_each(|page| self.memory.wake(page, 1));
    }

    /// Returns true during a standstill.
    pub fn is_standstill(&self) -> bool {
        self.standstill.causes.load(Ordering::Acquire) != 0
    }

    /// Makes the thread that faulted on a page fault again, after the standstill of a prepared fork
    /// if there is one. Without this pause the thread and its handler would take the core from the
    /// forking thread. Only a prepared fork keeps the mappings as they are meanwhile.
    pub(super) fn refuse(&self, page: PageId) {
        {
            let mut refused = self.standstill.refused();
            let causes = self.standstill.causes.load(Ordering::Acquire);
            if causes & Cause::Prepared as u32 != 0 {
                if refused.pages.is_empty() {
                    refused.since_ns = self.memory.now_ns();
                }
                refused.pages.push(page);
                return;
            }
        }
        self.memory.wake(page, 1);
    }

    /// Makes room beyond the limit for a refused fault. Returns false if no grant is left.
    pub(super) fn make_granted_room(&self, hand: &mut Hand) -> bool {
        let less = |grants: u32| grants.checked_sub(1);
        let grants = &self.standstill.grants;
        if !self.is_standstill()
            || grants.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_err()
        {
            return false;
        }
        self.standstill.used_now.fetch_add(1, Ordering::AcqRel);
        let made = self.make_room(hand, true);
        self.standstill.used_now.fetch_sub(1, Ordering::AcqRel);
        made
    }

    /// Returns true while a fault uses a grant.
    pub fn is_granted(&self) -> bool {
        self.standstill.used_now.load(Ordering::Acquire) > 0
    }

    /// Lets threads whose faults have been refused for long have a page each beyond the limit.
    /// Returns the time until the next call, in ms; `None` if no fault is refused.
    ///
    /// A refused thread may hold a lock for which the forking thread waits: `fork` takes locks of
    /// libc, such as that of the list of streams, after the standstill has begun.
    pub fn relieve_refused(&self) -> Option<u64> {
        let refused = {
            let mut refused = self.standstill.refused();
            if refused.pages.is_empty() {
                return None;
            }
            let left_ns = (refused.since_ns + REFUSAL_NS).saturating_sub(self.memory.now_ns());
            if left_ns > 0 {
                return Some(left_ns.div_ceil(1_000_000));
            }
            std::mem::take(&mut refused.pages)
        };
        self.standstill.grants.fetch_add(refused.len() as u32, Ordering::AcqRel);
        refused.into_iter().for_each(|page| self.memory.wake(page, 1));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::model;

    #[test]
    fn page_beyond_the_limit_is_granted_within_its_fork_only() {
        let (pages, mut hand) = (model::pages(), Hand::default());
        let refuse_for_long = || {
            pages.refuse(PageId(3));
            assert_eq!(pages.relieve_refused(), Some(REFUSAL_NS.div_ceil(1_000_000)));
            pages.memory.pass(REFUSAL_NS);
            assert_eq!(pages.relieve_refused(), None);
        };
        pages.begin_standstill(Cause::Prepared);
        refuse_for_long();
        pages.end_standstill(Cause::Prepared);
        pages.begin_standstill(Cause::Prepared);
        assert!(!pages.make_granted_room(&mut hand), "the grant belongs to the fork before");
        refuse_for_long();
        assert!(pages.make_granted_room(&mut hand) && !pages.is_granted());
        assert!(!pages.make_granted_room(&mut hand), "the grant is used up");
        pages.end_standstill(Cause::Prepared);
        assert!(!pages.make_granted_room(&mut hand));
    }
}
