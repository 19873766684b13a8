//! A function's doorbells as the NIC sees them, and what its word is worth.
//!
//! - A doorbell counts as rung if the queue pair then has something to do. One that does not (a liar's, or
//!   one for a queue pair that takes none) keeps the NIC neither awake nor from who waits for its CPU.
//! - Of a function whose doorbells change for nothing fewer are looked at in each round, until one of them
//!   is meant: it pays for that itself, by being heard later.
//! - A function says that it waits on the NIC's CPU. If the NIC leaves it the CPU, is away for long, and that
//!   brought no work of the function, it is not believed for a while, twice as long each time; also if it brought some,
//!   where the NIC had work of others meanwhile.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::doorbell::{DOORBELLS, WAITER};
use crate::engine::Engine;
use crate::ids::{FunctionId, Qpn};
use crate::memory::DmaMemory;

/// Doorbells of a function that one look looks at. A client that has many, and keeps their cache lines
/// to itself by writing them, makes its own doorbells slow, not those of others.
const SCAN: usize = 64;
/// The same for one whose doorbells change for nothing: a cache line.
const SCAN_MIN: usize = 16;

/// An absence that is long: more than two threads take that pass their CPU to and fro.
pub(super) const LONG: Duration = Duration::from_micros(50);
/// For how long a function is not believed, the first time and at most.
const DOUBT_MIN: Duration = Duration::from_millis(1);
const DOUBT_MAX: Duration = Duration::from_secs(1);

/// A function's doorbells as the NIC sees them.
pub(super) struct Bells {
    pub function: FunctionId,
    pub page: DmaMemory,
    pub slots: u32,
    /// By slot, up to the highest that was ever in use: what was seen last.
    seen: Vec<u32>,
    /// By slot: whose it is.
    owner: Vec<Option<Qpn>>,
    /// Where the next look goes on, and how far it goes.
    next: usize,
    span: usize,
    trust: Trust,
    /// The NIC has just left its CPU because this function said it waited there.
    on_trial: bool,
}

/// What a look at doorbells came to.
#[derive(Clone, Copy, Default)]
struct Looked {
    /// Some had changed.
    changed: bool,
    /// Queue pairs have something to do.
    work: bool,
}

impl Bells {
    pub fn new(function: FunctionId, page: DmaMemory, slots: u32) -> Self {
        Self {
            function,
            page,
            slots,
            seen: Vec::new(),
            owner: Vec::new(),
            next: 0,
            span: SCAN,
            trust: Trust::default(),
            on_trial: false,
        }
    }

    /// Tells the engine of doorbells that have changed, among the next few; true if there is something to
    /// do.
    #[inline]
    pub fn scan(&mut self, engine: &mut Engine) -> bool {
        let from = if self.next < self.seen.len() { self.next } else { 0 };
        let to = self.seen.len().min(from + self.span);
        self.next = to;
        let looked = self.look(engine, from..to);
        if looked.changed {
            self.span = if looked.work { SCAN } else { (self.span / 2).max(SCAN_MIN) };
        }
        looked.work
    }

    /// Tells the engine of all doorbells that have changed.
    pub fn scan_all(&mut self, engine: &mut Engine) {
        self.look(engine, 0..self.seen.len());
    }

    #[inline]
    fn look(&mut self, engine: &mut Engine, slots: Range<usize>) -> Looked {
        let mut looked = Looked::default();
        let first = slots.start;
        for (at, seen) in self.seen[slots].iter_mut().enumerate() {
            let slot = first + at;
            let bell = self.page.word32(DOORBELLS + slot * 4).load(Ordering::Acquire);
            if bell != *seen {
                *seen = bell;
                looked.changed = true;
                if let Some(qpn) = self.owner[slot] {
                    looked.work |= engine.ring(qpn, bell as u16);
                }
            }
        }
        looked
    }

    /// Whether the function says, and is believed, that it waits on `cpu`.
    #[inline]
    pub fn waits_on(&mut self, cpu: u32, now: u64) -> bool {
        let waiter = self.page.word32(WAITER);
        if waiter.load(Ordering::Relaxed) != cpu || !self.trust.holds(now) {
            return false;
        }
        waiter.store(0, Ordering::Relaxed);
        self.on_trial = true;
        true
    }

    /// The NIC has the CPU again, at `now`, that it left to this function among others, `busy` or not.
    #[inline]
    pub fn judge(&mut self, engine: &mut Engine, away: Duration, now: u64, busy: bool) {
        if !std::mem::take(&mut self.on_trial) || away < LONG {
            return;
        }
        let kept = self.scan(engine) && !busy;
        self.trust.tried(kept, now);
    }

    pub fn free_slot(&self) -> Option<u32> {
        let slot = self.owner.iter().position(Option::is_none).unwrap_or(self.owner.len());
        (slot < self.slots as usize).then_some(slot as u32)
    }

    fn current(&self, slot: usize) -> u32 {
        self.page.word32(DOORBELLS + slot * 4).load(Ordering::Acquire)
    }

    pub fn take_slot(&mut self, slot: u32, qpn: Qpn) {
        let slot = slot as usize;
        if slot == self.owner.len() {
            self.owner.push(None);
            self.seen.push(0);
        }
        self.owner[slot] = Some(qpn);
        self.seen[slot] = self.current(slot);
    }

    /// What was rung for `qpn` so far is of no interest any more.
    pub fn ignore_past(&mut self, qpn: Qpn) {
        if let Some(slot) = self.owner.iter().position(|o| *o == Some(qpn)) {
            self.seen[slot] = self.current(slot);
        }
    }

    pub fn release(&mut self, qpn: Qpn) {
        if let Some(slot) = self.owner.iter().position(|o| *o == Some(qpn)) {
            self.owner[slot] = None;
        }
        while self.owner.last() == Some(&None) {
            self.owner.pop();
            self.seen.pop();
        }
    }
}

/// Whether a function is believed. Times in ns since the NIC was started.
#[derive(Default)]
struct Trust {
    /// It is not, until then.
    from: u64,
    doubt: Duration,
}

impl Trust {
    #[inline]
    fn holds(&self, now: u64) -> bool {
        now >= self.from
    }

    #[cold]
    fn tried(&mut self, kept: bool, now: u64) {
        if kept {
            self.doubt = Duration::ZERO;
            return;
        }
        self.doubt = (self.doubt * 2).clamp(DOUBT_MIN, DOUBT_MAX);
        self.from = now + self.doubt.as_nanos() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::bed::Bed;
    use crate::verbs::{FunctionLimits, Limits};

    fn nic(doorbells: u32) -> (Engine, Bells) {
        let mut engine = Engine::new(Limits::default());
        let function = engine.add_function(FunctionLimits::default()).unwrap();
        let page = DmaMemory::anonymous(8192).unwrap();
        let mut bells = Bells::new(function, page, doorbells);
        // Queue pairs that nobody has made, so that they take no doorbell.
        (0..doorbells).for_each(|slot| bells.take_slot(slot, Qpn::new(1000 + slot)));
        (engine, bells)
    }

    #[test]
    fn doorbells_that_change_for_nothing_are_no_work_and_are_looked_at_less() {
        let (mut engine, mut bells) = nic(256);
        let mut looks = 0;
        for value in 1..200 {
            for slot in 0..256 {
                bells.page.word32(DOORBELLS + slot * 4).store(value, Ordering::Relaxed);
            }
            let before = bells.seen.clone();
            assert!(!bells.scan(&mut engine));
            looks += before.iter().zip(&bells.seen).filter(|(a, b)| a != b).count();
        }
        assert!(looks <= 64 + 32 + 197 * SCAN_MIN, "{looks}");
        // All of them come round nevertheless.
        (0..256 / SCAN_MIN).for_each(|_| _ = bells.scan(&mut engine));
        assert!(bells.seen.iter().all(|seen| *seen == 199));
    }

    #[test]
    fn who_says_for_nothing_that_it_waits_is_believed_ever_more_rarely() {
        let (mut engine, mut bells) = nic(1);
        let (mut now, mut absences) = (0, 0);
        let slice = Duration::from_millis(3);
        while now < 10_000_000_000 {
            bells.page.word32(WAITER).store(7, Ordering::Relaxed);
            if bells.waits_on(7, now) {
                now += slice.as_nanos() as u64;
                bells.judge(&mut engine, slice, now, false);
                absences += 1;
            }
            now += 10_000;
        }
        assert!(absences < 25, "{absences} times in 10 s");
    }

    /// Whether a function is believed that has had the NIC's CPU for long and then brings work, `busy` or not.
    fn is_believed_after_work(busy: bool) -> bool {
        let mut bed = Bed::new();
        let function = bed.e.add_function(FunctionLimits::default()).unwrap();
        let pd = bed.pd(function);
        let shape = bed.shape(function, pd);
        let (mut qp, peer) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&qp, &peer);
        let page = DmaMemory::anonymous(8192).unwrap();
        let mut bells = Bells::new(function, page, 1);
        bells.take_slot(0, qp.qpn);
        bells.page.word32(WAITER).store(7, Ordering::Relaxed);
        assert!(bells.waits_on(7, 0));
        bed.write_wqe(&mut qp, |w| _ = w.nop());
        bells.page.word32(DOORBELLS).store(u32::from(qp.producer), Ordering::Relaxed);
        bells.judge(&mut bed.e, LONG, 1000, busy);
        bells.page.word32(WAITER).store(7, Ordering::Relaxed);
        bells.waits_on(7, 1001)
    }

    #[test]
    fn who_keeps_the_cpu_of_a_busy_nic_for_long_is_not_believed_whatever_it_brings() {
        assert!(is_believed_after_work(false));
        assert!(!is_believed_after_work(true));
    }

    #[test]
    fn short_absences_and_those_that_bring_work_cost_no_trust() {
        let (mut engine, mut bells) = nic(1);
        for now in 0..1000 {
            bells.page.word32(WAITER).store(7, Ordering::Relaxed);
            assert!(!bells.waits_on(8, now));
            assert!(bells.waits_on(7, now));
            assert!(!bells.waits_on(7, now), "it says so once");
            bells.judge(&mut engine, Duration::from_micros(3), now, true);
        }
        let mut trust = Trust::default();
        for now in 0..1000 {
            trust.tried(false, now);
            assert!(!trust.holds(now));
            trust.tried(true, now + DOUBT_MIN.as_nanos() as u64);
            assert!(trust.holds(now + DOUBT_MIN.as_nanos() as u64), "it starts anew");
        }
    }

    #[test]
    fn a_page_has_a_slot_for_each_of_its_doorbells_and_no_more() {
        let (_, mut bells) = nic(3);
        assert_eq!(bells.free_slot(), None);
        bells.release(Qpn::new(1001));
        assert_eq!((bells.free_slot(), bells.seen.len()), (Some(1), 3));
        bells.release(Qpn::new(77));
        assert_eq!((bells.free_slot(), bells.seen.len()), (Some(1), 3), "it has no slot");
        bells.release(Qpn::new(1002));
        assert_eq!((bells.free_slot(), bells.seen.len()), (Some(1), 1));
        bells.take_slot(1, Qpn::new(1003));
        assert_eq!(bells.free_slot(), Some(2));
        bells.release(Qpn::new(1000));
        assert_eq!((bells.free_slot(), bells.seen.len()), (Some(0), 2));
    }

    #[test]
    fn a_doorbell_of_before_is_not_one_of_the_next_owner_or_of_a_queue_pair_that_was_reset() {
        let mut bed = Bed::new();
        let function = bed.e.add_function(FunctionLimits::default()).unwrap();
        let pd = bed.pd(function);
        let shape = bed.shape(function, pd);
        let (mut qp, peer) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&qp, &peer);
        let mut bells = Bells::new(function, DmaMemory::anonymous(8192).unwrap(), 2);
        // Both queue pairs' WQEs are there; their doorbells are rung before the slots are theirs.
        bed.write_wqe(&mut qp, |w| _ = w.nop());
        let ring = |bells: &Bells, slot: usize, value| {
            bells.page.word32(DOORBELLS + slot * 4).store(value, Ordering::Relaxed);
        };
        ring(&bells, 0, 1 << 16 | 1);
        bells.take_slot(0, qp.qpn);
        bells.take_slot(1, peer.qpn);
        assert!(!bells.scan(&mut bed.e), "rung by the owner before");
        ring(&bells, 0, 2 << 16 | 1);
        bells.ignore_past(peer.qpn);
        bells.ignore_past(qp.qpn);
        assert!(!bells.scan(&mut bed.e), "rung before the reset");
        ring(&bells, 0, 3 << 16 | 1);
        assert!(bells.scan(&mut bed.e));
    }

    #[test]
    fn doorbells_of_two_queue_pairs_in_one_look_are_work() {
        let mut bed = Bed::new();
        let function = bed.e.add_function(FunctionLimits::default()).unwrap();
        let pd = bed.pd(function);
        let shape = bed.shape(function, pd);
        let mut qps = [bed.qp(&shape), bed.qp(&shape)];
        bed.connect(&qps[0], &qps[1]);
        let mut bells = Bells::new(function, DmaMemory::anonymous(8192).unwrap(), 2);
        for (slot, qp) in (0..).zip(&mut qps) {
            bells.take_slot(slot, qp.qpn);
            bed.write_wqe(qp, |w| _ = w.nop());
            bells.page.word32(DOORBELLS + slot as usize * 4).store(1 << 16 | 1, Ordering::Relaxed);
        }
        assert!(bells.scan(&mut bed.e));
        assert!(!bells.scan(&mut bed.e));
    }
}
