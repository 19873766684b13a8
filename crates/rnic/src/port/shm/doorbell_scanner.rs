//! Scans a function's doorbells, and limits the harm of clients that write useless doorbells or
//! yield requests.
//!
//! - A changed doorbell counts as work only if its queue pair then has WQEs to execute. A doorbell
//!   without work (of a hostile client, or of a queue pair that accepts none) neither keeps the NIC
//!   awake nor keeps it from yielding its CPU.
//! - The scanner reads fewer doorbells per round of a function whose doorbells change without work,
//!   until one of them brings work. The cost falls on that function: its doorbells are seen later.
//! - A client on the NIC's CPU requests that the NIC yields the CPU (`page.rs`, word `waiter`). If
//!   the NIC yields, is away for long, and then finds no work of the function, it ignores the
//!   function's requests for a while. The time doubles with each failure. The same happens if there
//!   was work of the function, but the NIC had work of other functions meanwhile.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::page::{DOORBELLS, WAITER};
use crate::engine::Engine;
use verbs::{DmaMemory, FunctionId, Qpn};

/// Maximum doorbells of a function that one scan reads. A client with many doorbells that keeps
/// their cache lines busy by writing them delays its own doorbells, not those of other clients.
const SCAN_MAX: usize = 64;
/// Minimum doorbells per scan, for a function whose doorbells change without work: one cache line.
const SCAN_MIN: usize = 16;

/// Duration from which a yield is long: longer than two threads need to hand the CPU over and back.
pub(super) const LONG: Duration = Duration::from_micros(50);
/// Time for which yield requests are ignored: after the first failure, and the maximum.
const BACKOFF_MIN: Duration = Duration::from_millis(1);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// The NIC's view of a function's doorbell page.
pub(super) struct DoorbellScanner {
    pub function: FunctionId,
    pub page: DmaMemory,
    pub slots: u32,
    /// By slot, up to the highest one that was ever in use: the value that was seen last.
    seen: Vec<u32>,
    /// By slot: the queue pair that owns it.
    owner: Vec<Option<Qpn>>,
    /// First slot of the next scan.
    next: usize,
    /// Number of slots that the next scan reads.
    span: usize,
    backoff: YieldBackoff,
    /// The NIC has just yielded its CPU on a request of this function.
    has_yielded: bool,
}

/// Result of a scan.
#[derive(Clone, Copy, Default)]
struct ScanResult {
    /// A doorbell had changed.
    changed: bool,
    /// A queue pair has work.
    work: bool,
}

impl DoorbellScanner {
    pub fn new(function: FunctionId, page: DmaMemory, slots: u32) -> Self {
        Self {
            function,
            page,
            slots,
            seen: Vec::new(),
            owner: Vec::new(),
            next: 0,
            span: SCAN_MAX,
            backoff: YieldBackoff::default(),
            has_yielded: false,
        }
    }

    /// Scans the next few doorbells and passes changed ones to the engine. Returns true if there is
    /// work.
    #[inline]
    pub fn scan(&mut self, engine: &mut Engine) -> bool {
        let from = if self.next < self.seen.len() { self.next } else { 0 };
        let to = self.seen.len().min(from + self.span);
        self.next = to;
        let result = self.scan_range(engine, from..to);
        if result.changed {
            self.span = if result.work { SCAN_MAX } else { (self.span / 2).max(SCAN_MIN) };
        }
        result.work
    }

    /// Scans all doorbells and passes changed ones to the engine.
    pub fn scan_all(&mut self, engine: &mut Engine) {
        self.scan_range(engine, 0..self.seen.len());
    }

    #[inline]
    fn scan_range(&mut self, engine: &mut Engine, slots: Range<usize>) -> ScanResult {
        let mut result = ScanResult::default();
        let first = slots.start;
        for (at, seen) in self.seen[slots].iter_mut().enumerate() {
            let slot = first + at;
            let value = self.page.word32(DOORBELLS + slot * 4).load(Ordering::Acquire);
            if value != *seen {
                *seen = value;
                result.changed = true;
                if let Some(qpn) = self.owner[slot] {
                    result.work |= engine.doorbell(qpn, value as u16);
                }
            }
        }
        result
    }

    /// Takes the function's request to yield `cpu`. Returns whether there was one that is to be
    /// honored.
    #[inline]
    pub fn take_yield_request(&mut self, cpu: u32, now: u64) -> bool {
        let waiter = self.page.word32(WAITER);
        if waiter.load(Ordering::Relaxed) != cpu || !self.backoff.is_over(now) {
            return false;
        }
        waiter.store(0, Ordering::Relaxed);
        self.has_yielded = true;
        true
    }

    /// Updates the backoff after the NIC thread has yielded its CPU for `away`, until `now`.
    /// `busy`: the NIC had work when it yielded.
    #[inline]
    pub fn after_yield(&mut self, engine: &mut Engine, away: Duration, now: u64, busy: bool) {
        if !std::mem::take(&mut self.has_yielded) || away < LONG {
            return;
        }
        let kept = self.scan(engine) && !busy;
        self.backoff.record(kept, now);
    }

    /// The lowest free slot.
    pub fn free_slot(&self) -> Option<u32> {
        let slot = self.owner.iter().position(Option::is_none).unwrap_or(self.owner.len());
        (slot < self.slots as usize).then_some(slot as u32)
    }

    /// The present value of a doorbell.
    fn current(&self, slot: usize) -> u32 {
        self.page.word32(DOORBELLS + slot * 4).load(Ordering::Acquire)
    }

    /// Assigns a free slot to a queue pair. The doorbell's present value counts as seen.
    pub fn assign_slot(&mut self, slot: u32, qpn: Qpn) {
        let slot = slot as usize;
        if slot == self.owner.len() {
            self.owner.push(None);
            self.seen.push(0);
        }
        self.owner[slot] = Some(qpn);
        self.seen[slot] = self.current(slot);
    }

    /// Marks the present value of `qpn`'s doorbell as seen, because the queue pair was reset.
    pub fn mark_seen(&mut self, qpn: Qpn) {
        if let Some(slot) = self.owner.iter().position(|o| *o == Some(qpn)) {
            self.seen[slot] = self.current(slot);
        }
    }

    /// Frees the slot of a queue pair, if it has one.
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

/// Backoff for a function's yield requests. Times are in ns since the NIC was started.
#[derive(Default)]
struct YieldBackoff {
    /// Requests are ignored until this time.
    ignored_until: u64,
    /// Length of the last backoff; 0 after a successful yield.
    length: Duration,
}

impl YieldBackoff {
    #[inline]
    fn is_over(&self, now: u64) -> bool {
        now >= self.ignored_until
    }

    #[cold]
    fn record(&mut self, kept: bool, now: u64) {
        if kept {
            self.length = Duration::ZERO;
            return;
        }
        self.length = (self.length * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.ignored_until = now + self.length.as_nanos() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::bed::Bed;
    use crate::limits::{FunctionLimits, Limits};

    fn nic(doorbells: u32) -> (Engine, DoorbellScanner) {
        let mut engine = Engine::new(Limits::default());
        let function = engine.add_function(FunctionLimits::default()).unwrap();
        let page = DmaMemory::anonymous(8192).unwrap();
        let mut scanner = DoorbellScanner::new(function, page, doorbells);
        // Queue pairs that do not exist, so that no doorbell brings work.
        (0..doorbells).for_each(|slot| scanner.assign_slot(slot, Qpn::new(1000 + slot)));
        (engine, scanner)
    }

    #[test]
    fn useless_doorbells_are_no_work_and_scanned_less() {
        let (mut engine, mut scanner) = nic(256);
        let mut looks = 0;
        for value in 1..200 {
            for slot in 0..256 {
                scanner.page.word32(DOORBELLS + slot * 4).store(value, Ordering::Relaxed);
            }
            let before = scanner.seen.clone();
            assert!(!scanner.scan(&mut engine));
            looks += before.iter().zip(&scanner.seen).filter(|(a, b)| a != b).count();
        }
        assert!(looks <= 64 + 32 + 197 * SCAN_MIN, "{looks}");
        // Every doorbell is read within one cycle of scans nevertheless.
        (0..256 / SCAN_MIN).for_each(|_| _ = scanner.scan(&mut engine));
        assert!(scanner.seen.iter().all(|seen| *seen == 199));
    }

    #[test]
    fn useless_yield_requests_back_off() {
        let (mut engine, mut scanner) = nic(1);
        let (mut now, mut absences) = (0, 0);
        let slice = Duration::from_millis(3);
        while now < 10_000_000_000 {
            scanner.page.word32(WAITER).store(7, Ordering::Relaxed);
            if scanner.take_yield_request(7, now) {
                now += slice.as_nanos() as u64;
                scanner.after_yield(&mut engine, slice, now, false);
                absences += 1;
            }
            now += 10_000;
        }
        assert!(absences < 25, "{absences} times in 10 s");
    }

    /// Whether a yield request is honored after a long yield that brought work of the function.
    /// `busy`: the NIC had work when it yielded.
    fn is_believed_after_work(busy: bool) -> bool {
        let mut bed = Bed::new();
        let function = bed.e.add_function(FunctionLimits::default()).unwrap();
        let pd = bed.pd(function);
        let shape = bed.shape(function, pd);
        let (mut qp, peer) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&qp, &peer);
        let page = DmaMemory::anonymous(8192).unwrap();
        let mut scanner = DoorbellScanner::new(function, page, 1);
        scanner.assign_slot(0, qp.qpn);
        scanner.page.word32(WAITER).store(7, Ordering::Relaxed);
        assert!(scanner.take_yield_request(7, 0));
        bed.write_wqe(&mut qp, |w| _ = w.nop());
        scanner.page.word32(DOORBELLS).store(u32::from(qp.producer), Ordering::Relaxed);
        scanner.after_yield(&mut bed.e, LONG, 1000, busy);
        scanner.page.word32(WAITER).store(7, Ordering::Relaxed);
        scanner.take_yield_request(7, 1001)
    }

    #[test]
    fn long_yield_of_a_busy_nic_backs_off() {
        assert!(is_believed_after_work(false));
        assert!(!is_believed_after_work(true));
    }

    #[test]
    fn short_or_useful_yields_do_not_back_off() {
        let (mut engine, mut scanner) = nic(1);
        for now in 0..1000 {
            scanner.page.word32(WAITER).store(7, Ordering::Relaxed);
            assert!(!scanner.take_yield_request(8, now));
            assert!(scanner.take_yield_request(7, now));
            assert!(!scanner.take_yield_request(7, now), "a request is taken once");
            scanner.after_yield(&mut engine, Duration::from_micros(3), now, true);
        }
        let mut backoff = YieldBackoff::default();
        for now in 0..1000 {
            backoff.record(false, now);
            assert!(!backoff.is_over(now));
            backoff.record(true, now + BACKOFF_MIN.as_nanos() as u64);
            assert!(
                backoff.is_over(now + BACKOFF_MIN.as_nanos() as u64),
                "the backoff starts again at its minimum"
            );
        }
    }

    #[test]
    fn page_has_as_many_slots_as_doorbells() {
        let (_, mut scanner) = nic(3);
        assert_eq!(scanner.free_slot(), None);
        scanner.release(Qpn::new(1001));
        assert_eq!((scanner.free_slot(), scanner.seen.len()), (Some(1), 3));
        scanner.release(Qpn::new(77));
        assert_eq!((scanner.free_slot(), scanner.seen.len()), (Some(1), 3), "the QP has no slot");
        scanner.release(Qpn::new(1002));
        assert_eq!((scanner.free_slot(), scanner.seen.len()), (Some(1), 1));
        scanner.assign_slot(1, Qpn::new(1003));
        assert_eq!(scanner.free_slot(), Some(2));
        scanner.release(Qpn::new(1000));
        assert_eq!((scanner.free_slot(), scanner.seen.len()), (Some(0), 2));
    }

    #[test]
    fn old_doorbell_value_is_ignored_after_reuse_or_reset() {
        let mut bed = Bed::new();
        let function = bed.e.add_function(FunctionLimits::default()).unwrap();
        let pd = bed.pd(function);
        let shape = bed.shape(function, pd);
        let (mut qp, peer) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&qp, &peer);
        let mut scanner = DoorbellScanner::new(function, DmaMemory::anonymous(8192).unwrap(), 2);
        // The WQE is posted and the doorbell written before the slot is assigned.
        bed.write_wqe(&mut qp, |w| _ = w.nop());
        let ring = |scanner: &DoorbellScanner, slot: usize, value| {
            scanner.page.word32(DOORBELLS + slot * 4).store(value, Ordering::Relaxed);
        };
        ring(&scanner, 0, 1 << 16 | 1);
        scanner.assign_slot(0, qp.qpn);
        scanner.assign_slot(1, peer.qpn);
        assert!(!scanner.scan(&mut bed.e), "written by the previous owner of the slot");
        ring(&scanner, 0, 2 << 16 | 1);
        scanner.mark_seen(peer.qpn);
        scanner.mark_seen(qp.qpn);
        assert!(!scanner.scan(&mut bed.e), "written before the reset");
        ring(&scanner, 0, 3 << 16 | 1);
        assert!(scanner.scan(&mut bed.e));
    }

    #[test]
    fn doorbells_of_two_queue_pairs_in_one_scan_are_work() {
        let mut bed = Bed::new();
        let function = bed.e.add_function(FunctionLimits::default()).unwrap();
        let pd = bed.pd(function);
        let shape = bed.shape(function, pd);
        let mut qps = [bed.qp(&shape), bed.qp(&shape)];
        bed.connect(&qps[0], &qps[1]);
        let mut scanner = DoorbellScanner::new(function, DmaMemory::anonymous(8192).unwrap(), 2);
        for (slot, qp) in (0..).zip(&mut qps) {
            scanner.assign_slot(slot, qp.qpn);
            bed.write_wqe(qp, |w| _ = w.nop());
            scanner
                .page
                .word32(DOORBELLS + slot as usize * 4)
                .store(1 << 16 | 1, Ordering::Relaxed);
        }
        assert!(scanner.scan(&mut bed.e));
        assert!(!scanner.scan(&mut bed.e));
    }
}
