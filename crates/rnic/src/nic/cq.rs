//! Completion queues of the software NIC, from the owner's side.
//!
//! ```text
//! ring: 64-byte CQEs (verbs::cqe)   record: +0 consumer index (be32)   +4 armed (u32)
//! ```
//!
//! The consumer index in the record is written only now and then. The ring has twice the requested
//! number of entries, so that half of it may be consumed before the NIC learns of it. Meanwhile the
//! record's cache line does not move between CPUs.
//!
//! Sleeping: the waiting thread stores 1 to `armed`, checks the ring once more, and sleeps on
//! `armed` as a futex. The NIC writes a CQE, then swaps `armed` back to 0 and wakes the thread.
//! Either the thread sees the CQE or the NIC sees `armed`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::thread::futex;
use verbs::cqe::{self, CQE, Cqe};
use verbs::{
    Completion, CompletionKind, CompletionQueue, CqAttr, Cqn, DmaMemory, Error, Key, Qpn, Status,
    WcOpcode,
};

use super::queue::{ReceiveRing, SendQueue};
use super::{MAX_ENTRIES, call, system};
use crate::port::control::{Reply, Verb};
use crate::port::{ARMED, Function, handshake};

/// Maximum sleep before a waiting thread checks that the NIC is still alive. (In unit tests it is
/// long enough that a lost wake-up fails the test.)
pub(super) const ALIVE_CHECK: Duration =
    Duration::from_millis(if cfg!(test) { 20_000 } else { 100 });
/// Mask of a completion's sequence number, which has 24 bits.
pub(super) const NUMBER: u32 = 0xff_ffff;

/// A completion queue.
#[derive(Clone)]
pub struct SoftCq(pub(super) Arc<CqInner>);

pub(super) struct CqInner {
    function: Function,
    pub cqn: Cqn,
    ring: DmaMemory,
    record: DmaMemory,
    entries: u32,
    /// Whether this process polls the CQ: false if overruns are ignored, or if the CQ is lent.
    is_polled: AtomicBool,
    /// Sequence number of the next completion; changed under the lock of `poller`.
    next: AtomicU32,
    /// Whether `Poller::backlog` is not empty.
    has_backlog: AtomicBool,
    poller: Mutex<Poller>,
}

/// Why a sleep ended.
enum Woken {
    /// The current slice of the timeout is over.
    TimedOut,
    /// The whole timeout is over.
    Late,
    /// Another thread woke the sleeper, or `armed` did not have the expected value.
    Called,
}

struct Poller {
    /// The consumer index last written to the record.
    recorded: u32,
    /// The queues that complete here, sorted by QPN.
    members: Vec<Member>,
    /// Index into `members` of the queue that completed last.
    recent: usize,
    /// Completions of queues that were reset or destroyed.
    backlog: VecDeque<Completion>,
}

struct Member {
    qpn: Qpn,
    send: Option<Arc<SendQueue>>,
    receive: Option<Arc<ReceiveRing>>,
}

impl SoftCq {
    pub(super) fn create(function: &Function, attr: &CqAttr) -> Result<Self, Error> {
        if attr.entries == 0 || attr.entries > MAX_ENTRIES {
            return Err(Error::BadRequest {
                what: format!("a CQ of {} entries; possible are 1 to {MAX_ENTRIES}", attr.entries),
            });
        }
        let asked = attr.entries.next_power_of_two();
        let entries = if attr.ignore_overrun { asked } else { 2 * asked };
        let bytes = entries as usize * CQE;
        let memory = function.alloc_dma(Self::bytes(entries)).map_err(system("memory of a CQ"))?;
        let ring = memory.slice(0, bytes).expect("memory made for the ring");
        let record = memory.slice(bytes, 8).expect("memory made for the record");
        cqe::clear(&ring, entries);
        let verb = Verb::CreateCq {
            ring: ring.clone(),
            entries,
            record: record.clone(),
            ignore_overrun: attr.ignore_overrun,
        };
        let Reply::Cq(cqn) = call(function, "create_cq", verb)? else {
            return Err(super::unexpected("create_cq"));
        };
        let is_polled = !attr.ignore_overrun;
        Ok(Self::over(function, cqn, (ring, record), (entries, 0), is_polled))
    }

    /// Wraps a CQ of another process, whose next completion has the sequence number `next`.
    pub(super) fn borrowed(
        function: &Function,
        cqn: Cqn,
        memory: (DmaMemory, DmaMemory),
        (entries, next): (u32, u32),
    ) -> Self {
        Self::over(function, cqn, memory, (entries, next), true)
    }

    fn over(
        function: &Function,
        cqn: Cqn,
        (ring, record): (DmaMemory, DmaMemory),
        (entries, next): (u32, u32),
        is_polled: bool,
    ) -> Self {
        let poller =
            Poller { recorded: next, members: Vec::new(), recent: 0, backlog: VecDeque::new() };
        SoftCq(Arc::new(CqInner {
            function: function.clone(),
            cqn,
            ring,
            record,
            entries,
            is_polled: AtomicBool::new(is_polled),
            next: AtomicU32::new(next),
            has_backlog: AtomicBool::new(false),
            poller: Mutex::new(poller),
        }))
    }

    /// Bytes of a CQ's memory: the ring, then the record on a cache line of its own.
    pub(super) fn bytes(entries: u32) -> usize {
        entries as usize * CQE + 64
    }

    /// The ring and the record.
    pub(super) fn memory(&self) -> (&DmaMemory, &DmaMemory) {
        (&self.0.ring, &self.0.record)
    }

    /// Entries of the ring.
    pub(super) fn ring_entries(&self) -> u32 {
        self.0.entries
    }

    /// Returns an error unless `qpns` are all queue pairs that complete here.
    pub(super) fn check_members(
        &self,
        qpns: impl ExactSizeIterator<Item = Qpn>,
    ) -> Result<(), Error> {
        let poller = self.0.poller.lock();
        let count = qpns.len();
        let known = qpns.filter(|qpn| poller.members.iter().any(|m| m.qpn == *qpn)).count();
        if known == count && known == poller.members.len() {
            return Ok(());
        }
        Err(Error::BadRequest {
            what: format!(
                "lending {count} QPs of CQ {}, to which {} QPs complete; lend all of them together",
                self.0.cqn,
                poller.members.len()
            ),
        })
    }

    /// Stops polling, and returns the sequence number of the next completion. All queue pairs that
    /// complete here have been reset, so the ring holds no completion.
    pub(super) fn lend(&self) -> u32 {
        let mut poller = self.0.poller.lock();
        self.0.is_polled.store(false, Ordering::Release);
        let next = self.0.next.load(Ordering::Relaxed);
        poller.recorded = next;
        self.0.record.store_be32(0, next);
        next
    }

    /// Polls again, from the completion with the sequence number `next` on.
    pub(super) fn end_loan(&self, next: u32) {
        let mut poller = self.0.poller.lock();
        poller.recorded = next;
        self.0.next.store(next, Ordering::Relaxed);
        self.0.record.store_be32(0, next);
        self.0.record.word32(ARMED).store(0, Ordering::SeqCst);
        self.0.is_polled.store(true, Ordering::Release);
    }
}

impl SoftCq {
    /// Like [`CompletionQueue::poll`], but stops before the completion with sequence number `end`.
    #[inline]
    pub fn poll_before(&self, end: Option<u32>, out: &mut [Completion]) -> usize {
        let cq = &*self.0;
        if !(cq.is_ready() || cq.function.poll_engine() && cq.is_ready()) {
            return 0;
        }
        let Some(mut poller) = cq.poller.try_lock() else {
            return 0;
        };
        let mut taken = 0;
        if cq.has_backlog.load(Ordering::Relaxed) {
            while taken < out.len()
                && let Some(completion) = poller.backlog.pop_front()
            {
                out[taken] = completion;
                taken += 1;
            }
            cq.has_backlog.store(!poller.backlog.is_empty(), Ordering::Release);
        }
        while taken < out.len()
            && let Some(completion) = cq.take(&mut poller, end)
        {
            out[taken] = completion;
            taken += 1;
        }
        taken
    }

    /// Returns the sequence number (24 bits) of the completion that is polled next.
    pub fn consumed(&self) -> u32 {
        self.0.next.load(Ordering::Relaxed)
    }

    /// Returns whether completions of reset queues can be polled.
    pub fn has_backlog(&self) -> bool {
        self.0.has_backlog.load(Ordering::Acquire)
    }
}

impl CqInner {
    /// Registers the queues of `qpn`, which complete here from now on.
    pub fn add(&self, qpn: Qpn, send: Option<Arc<SendQueue>>, receive: Option<Arc<ReceiveRing>>) {
        let mut poller = self.poller.lock();
        match poller.members.binary_search_by_key(&qpn, |m| m.qpn) {
            Ok(at) => {
                let member = &mut poller.members[at];
                member.send = send.or(member.send.take());
                member.receive = receive.or(member.receive.take());
            }
            Err(at) => poller.members.insert(at, Member { qpn, send, receive }),
        }
    }

    /// Completes the work of `qpn` that the NIC dropped at a reset.
    ///
    /// First takes the completions that the NIC has already written, then completes the remaining
    /// work as flushed. The indices of the QP's queues restart at 0. `own_receive` is false for a
    /// shared receive queue, which a reset of the QP does not empty.
    pub fn forget_posted(&self, qpn: Qpn, own_receive: bool) {
        let mut poller = self.poller.lock();
        let mut waiting = VecDeque::new();
        while let Some(completion) = self.take(&mut poller, None) {
            waiting.push_back(completion);
        }
        poller.backlog.append(&mut waiting);
        if let Some(member) = poller.find(qpn) {
            let sends = member.send.as_ref().map(|q| q.reset()).unwrap_or_default();
            let receives = match &member.receive {
                Some(q) if own_receive => q.reset(),
                _ => Vec::new(),
            };
            let flushed = |kind| move |id| Completion::flushed(id, qpn, kind);
            poller.backlog.extend(sends.into_iter().map(flushed(CompletionKind::Send)));
            poller.backlog.extend(receives.into_iter().map(flushed(CompletionKind::Receive)));
        }
        let any = !poller.backlog.is_empty();
        self.has_backlog.store(any, Ordering::Release);
        drop(poller);
        if any {
            self.wake();
        }
    }

    /// Removes the queues of `qpn`, which no longer complete here.
    pub fn remove(&self, qpn: Qpn) {
        let mut poller = self.poller.lock();
        poller.members.retain(|m| m.qpn != qpn);
    }

    /// Returns whether a completion can be polled. Takes no lock.
    #[inline]
    fn is_ready(&self) -> bool {
        self.valid(self.next.load(Ordering::Relaxed)).is_some()
            || self.has_backlog.load(Ordering::Acquire)
    }

    /// Returns the offset of the CQE with sequence number `number` if the NIC has written it.
    #[inline]
    fn valid(&self, number: u32) -> Option<usize> {
        let at = (number & (self.entries - 1)) as usize * CQE;
        let last = u64::from_be(self.ring.word64(at + CQE - 8).load(Ordering::Acquire)) as u8;
        let lap = (number >> self.entries.trailing_zeros()) as u8;
        let written = last >> 4 != cqe::opcode::INVALID && (last ^ lap) & cqe::OWNER == 0;
        (written && self.is_polled.load(Ordering::Acquire)).then_some(at)
    }

    /// Takes the next completion off the ring if its sequence number is not `end`.
    #[inline]
    fn take(&self, poller: &mut Poller, end: Option<u32>) -> Option<Completion> {
        // Bounded, because in a borrowed ring the owner could write completions without end.
        for _ in 0..self.entries {
            let number = self.next.load(Ordering::Relaxed);
            // At a reset, completions beyond `end` may have been taken already.
            if end.is_some_and(|end| number.wrapping_sub(end) & NUMBER <= NUMBER / 2) {
                return None;
            }
            let at = self.valid(number)?;
            let mut bytes = [0; CQE];
            self.ring.read(at, &mut bytes);
            let number = (number + 1) & NUMBER;
            self.next.store(number, Ordering::Relaxed);
            if (number.wrapping_sub(poller.recorded) & NUMBER) >= self.entries / 2 {
                poller.recorded = number;
                self.record.store_be32(0, number);
            }
            // A completion of an unknown QPN belongs to a destroyed queue and is dropped.
            if let Some(completion) = poller.complete(&Cqe::from_bytes(&bytes)) {
                return Some(completion);
            }
        }
        None
    }

    /// Sleeps while `armed` is `value`, for one slice of the time until `deadline`.
    fn sleep(&self, value: u32, deadline: Option<Instant>) -> Result<Woken, Error> {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Ok(Woken::Late);
        }
        let slice = left.min(ALIVE_CHECK);
        let slice = futex::Timespec {
            tv_sec: slice.as_secs() as i64,
            tv_nsec: slice.subsec_nanos() as i64,
        };
        let armed = self.record.word32(ARMED);
        let woken = futex::wait(armed, futex::Flags::empty(), value, Some(&slice));
        if woken != Err(rustix::io::Errno::TIMEDOUT) {
            return Ok(Woken::Called);
        }
        if !self.is_ready() {
            self.function.check_alive().map_err(system("waiting for a completion"))?;
        }
        Ok(Woken::TimedOut)
    }

    fn wake(&self) {
        self.record.word32(ARMED).store(0, Ordering::SeqCst);
        crate::port::wake(&self.record);
    }
}

impl Poller {
    #[inline]
    fn find(&mut self, qpn: Qpn) -> Option<&Member> {
        if self.members.get(self.recent).is_none_or(|m| m.qpn != qpn) {
            self.recent = self.members.binary_search_by_key(&qpn, |m| m.qpn).ok()?;
        }
        Some(&self.members[self.recent])
    }

    #[inline]
    fn complete(&mut self, cqe: &Cqe) -> Option<Completion> {
        let member = self.find(cqe.qpn)?;
        let (kind, id) = match cqe.opcode {
            cqe::opcode::REQ | cqe::opcode::REQ_ERR => {
                (CompletionKind::Send, member.send.as_ref()?.complete(cqe.wqe_counter))
            }
            _ => (CompletionKind::Receive, member.receive.as_ref()?.complete(cqe.wqe_counter)),
        };
        let status = match &cqe.error {
            None => Status::Success,
            Some(e) => Status::from_syndrome(e.syndrome),
        };
        let with_imm = matches!(cqe.opcode, cqe::opcode::RESP_SEND_IMM | cqe::opcode::RESP_WR_IMM);
        let invalidated = cqe.opcode == cqe::opcode::RESP_SEND_INV;
        Some(Completion {
            id,
            qpn: cqe.qpn,
            status,
            kind,
            opcode: match (kind, cqe.opcode) {
                (CompletionKind::Send, _) => WcOpcode::of_wqe(cqe.wqe_opcode),
                (_, cqe::opcode::RESP_WR_IMM) => WcOpcode::ReceiveWrite,
                _ => WcOpcode::Receive,
            },
            bytes: cqe.byte_count,
            imm: with_imm.then_some(cqe.imm),
            invalidated: invalidated.then_some(Key(cqe.imm)),
            vendor_error: cqe.error.map_or(0, |e| e.vendor),
        })
    }
}

impl CompletionQueue for SoftCq {
    fn cqn(&self) -> Cqn {
        self.0.cqn
    }

    fn entries(&self) -> u32 {
        self.0.entries
    }

    #[inline]
    fn poll(&self, out: &mut [Completion]) -> usize {
        self.poll_before(None, out)
    }

    #[inline]
    fn offer_cpu(&self) -> bool {
        self.0.function.offer_cpu()
    }

    fn wait_unless(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        let cq = &*self.0;
        let deadline = Instant::now().checked_add(timeout);
        let armed = cq.record.word32(ARMED);
        while cq.function.poll_engine_before_sleep() {
            if cq.is_ready() {
                return Ok(true);
            }
            if done() || deadline.is_some_and(|at| at <= Instant::now()) {
                return Ok(false);
            }
        }
        cq.function.before_sleep();
        loop {
            if !handshake::arm(armed, || cq.is_ready()) {
                return Ok(true);
            }
            if done() {
                return Ok(false);
            }
            match cq.sleep(handshake::ANY, deadline)? {
                Woken::TimedOut => cq.function.before_sleep(),
                Woken::Late | Woken::Called => return Ok(cq.is_ready()),
            }
            if cq.is_ready() {
                return Ok(true);
            }
        }
    }

    fn wait_solicited(&self, timeout: Duration) -> Result<bool, Error> {
        let cq = &*self.0;
        let deadline = Instant::now().checked_add(timeout);
        let armed = cq.record.word32(ARMED);
        cq.function.before_sleep();
        loop {
            let Some(value) = handshake::arm_solicited(armed, || cq.is_ready()) else {
                return Ok(true);
            };
            // A completion that leaves the CQ armed was not solicited. It does not end the wait,
            // even if this thread wakes up for another reason.
            while handshake::is_armed(armed, value) {
                match cq.sleep(value, deadline)? {
                    Woken::TimedOut => cq.function.before_sleep(),
                    Woken::Late => return Ok(false),
                    Woken::Called => {}
                }
            }
            // The CQ was disarmed, perhaps by a completion that another thread took; arm it again.
        }
    }

    fn wake(&self) {
        self.0.wake();
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        // A NIC that is gone has freed the queue already.
        let _ = self.function.execute(Verb::DestroyCq { cqn: self.cqn });
    }
}
