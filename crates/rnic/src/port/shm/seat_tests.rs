//! The test plays the callers, and the NIC's thread as well: no thread runs.

use std::sync::atomic::Ordering::SeqCst;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::FdFlags;

use super::super::super::test_queue::TestQueue;
use super::super::doorbell::{ASLEEP, AWAKE, DOORBELLS, Page, SLEEPING, page_bytes};
use super::super::nic_thread::eventfd;
use super::*;
use crate::ids::FunctionId;
use crate::verbs::Limits;

/// A NIC that no thread runs, with a queue pair.
pub(in super::super) struct Bench {
    pub seat: Arc<Seat>,
    pub q: TestQueue,
    shared: Arc<Shared>,
    page: DmaMemory,
}

impl Bench {
    pub fn new(callers: bool) -> Self {
        let shared = Arc::new(Shared::new().unwrap());
        let mut nic = NicThread::new(Limits::default(), shared.clone(), None).unwrap();
        // Its clock is ahead of all times of this file that are past.
        nic.started -= Duration::from_secs(1);
        let page = DmaMemory::anonymous(page_bytes(4)).unwrap();
        nic.add_doorbells(FunctionId::PHYSICAL, page.clone(), 4);
        let q = TestQueue::new(|verb| nic.execute(FunctionId::PHYSICAL, verb).unwrap());
        nic.look_at_all();
        let seat = Arc::new(Seat::new(nic, shared.clone(), callers).unwrap());
        Self { seat, q, shared, page }
    }

    /// Posts a WQE, and stores its doorbell without a turn.
    pub fn post(&mut self) {
        self.q.nop();
        let at = DOORBELLS + self.q.slot.unwrap() as usize * 4;
        self.page.word32(at).store(1 << 16 | u32::from(self.q.index), Ordering::Release);
    }

    fn rung(&self, asleep: bool) -> bool {
        self.seat.rung(|| asleep)
    }
}

impl Seat {
    /// Lets the last work of callers be of a time that has not come.
    pub fn work_goes_on(&self) {
        self.worked_ns.store(u64::MAX, SeqCst);
    }

    /// Whether a caller has said that it goes to sleep.
    pub fn is_left(&self) -> bool {
        self.left.load(SeqCst)
    }
}

fn is_ready(fd: &OwnedFd, wait: Duration) -> bool {
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timespec(wait))) == Ok(1)
}

#[test]
fn looks_may_be_late_where_callers_stay() {
    assert_eq!(late_after(Duration::ZERO), Duration::ZERO);
    assert!(late_after(8 * LOOK) <= LOOK);
    assert_eq!(late_after(Duration::from_secs(1)), LATE_MAX);
}

#[test]
fn a_caller_that_waits_takes_a_sleeping_nic_over_and_does_its_work() {
    let mut b = Bench::new(true);
    assert!(b.seat.is_shared());
    b.post();
    assert!(b.seat.wait_turn() && b.q.is_done());
    assert!(b.seat.callers.load(SeqCst));
    assert_eq!(b.seat.idle.load(SeqCst), 0);
    assert!(!b.seat.wait_turn(), "there is nothing to do");
    assert_eq!(b.seat.idle.load(SeqCst), 1);
    // The thread wakes up to look whether the caller is still there.
    assert!(is_ready(b.seat.timer.as_ref().unwrap(), Duration::from_secs(20)));
}

#[test]
fn a_nic_that_is_not_the_process_s_own_has_no_turns_of_callers() {
    let mut b = Bench::new(false);
    assert!(!b.seat.is_shared());
    b.post();
    assert!(!b.seat.wait_turn() && !b.q.is_done());
    b.seat.work_goes_on();
    assert!(!b.seat.busy_turn() && !b.q.is_done());
    b.seat.before_sleep();
    assert!(!b.seat.is_left());
}

#[test]
fn a_caller_that_finds_the_thread_running_asks_for_the_nic() {
    let mut b = Bench::new(true);
    b.post();
    let asked = |callers| {
        b.seat.wanted.store(false, SeqCst);
        b.seat.left.store(true, SeqCst);
        b.seat.callers.store(callers, SeqCst);
        let _nic = b.seat.nic.lock();
        assert!(!b.seat.wait_turn());
        (b.seat.wanted.load(SeqCst), b.seat.left.load(SeqCst))
    };
    assert_eq!(asked(false), (true, false));
    assert_eq!(asked(true), (false, true), "another caller has it");
    assert!(!b.q.is_done());
}

#[test]
fn a_doorbell_is_a_turn_unless_the_thread_is_awake_or_a_turn_is_near() {
    let mut b = Bench::new(true);
    b.post();
    assert!(b.rung(false) && !b.q.is_done(), "the thread is awake");
    assert!(b.rung(true) && b.q.is_done());
    assert!(b.seat.callers.load(SeqCst));
    let (now, long_ago) = (u64::MAX, 0);
    b.post();
    b.seat.brought.store(false, SeqCst);
    b.seat.awaits.store(true, SeqCst);
    b.seat.last_ns.store(now, SeqCst);
    assert!(b.rung(false) && !b.q.is_done(), "the next turn takes it along");
    assert!(b.seat.wait_turn() && b.q.is_done());
    for (brought, awaits, last_ns) in
        [(true, true, now), (false, false, now), (false, true, long_ago)]
    {
        b.post();
        b.seat.brought.store(brought, SeqCst);
        b.seat.awaits.store(awaits, SeqCst);
        b.seat.last_ns.store(last_ns, SeqCst);
        assert!(b.rung(false) && b.q.is_done(), "{brought} {awaits} {last_ns}");
    }
}

#[test]
fn a_doorbell_in_another_turn_is_left_to_that_or_to_the_thread() {
    let mut b = Bench::new(true);
    b.post();
    let nic = b.seat.nic.lock();
    assert!(!b.rung(true), "the thread is to be woken");
    assert!(b.seat.again.load(SeqCst));
    b.seat.callers.store(true, SeqCst);
    assert!(b.rung(true), "another caller looks again");
    drop(nic);
    assert!(!b.q.is_done());
    assert!(b.seat.post_turn() && b.q.is_done());
    assert!(!b.seat.again.load(SeqCst));
}

#[test]
fn a_doorbell_wakes_a_thread_that_sleeps_and_whose_nic_is_not_free() {
    let b = Bench::new(true);
    let wake = eventfd().unwrap();
    let seat = Some(b.seat.clone());
    let page = Page { memory: b.page.clone(), slots: 4, wake, seat };
    let _nic = b.seat.nic.lock();
    for (sleeping, wakes) in [(AWAKE, false), (ASLEEP, true)] {
        page.memory.word32(SLEEPING).store(sleeping, SeqCst);
        page.rung();
        assert_eq!(is_ready(&page.wake, Duration::ZERO), wakes);
    }
}

#[test]
fn a_child_of_the_process_leaves_the_nic_alone() {
    let mut b = Bench::new(true);
    assert!(b.seat.is_here());
    b.seat.here.word32(0).store(0, SeqCst);
    b.post();
    assert!(!b.seat.is_here() && !b.seat.wait_turn());
    assert!(b.rung(true), "it wakes no thread either");
    assert!(!b.q.is_done());
}

#[test]
fn a_nic_that_has_ended_has_no_more_turns() {
    let mut b = Bench::new(true);
    b.post();
    drop(Unwinding(&mut b.seat.nic.lock()));
    assert!(b.seat.nic.lock().stop, "a turn that panicked ends the NIC");
    assert!(!b.seat.wait_turn() && !b.q.is_done());
    assert!(b.shared.is_alive());
    drop(End(&b.seat));
    assert!(!b.shared.is_alive());
    assert!(!b.shared.submit(Box::new(|_| ())));
    assert_eq!(b.page.word32(SLEEPING).load(SeqCst), super::super::doorbell::GONE);
}

#[test]
fn callers_without_a_turn_for_long_are_absent() {
    let b = Bench::new(true);
    b.seat.last_ns.store(0, SeqCst);
    assert!(b.seat.since_turn() >= 1_000_000_000 && b.seat.is_absent());
    b.seat.last_ns.store(u64::MAX, SeqCst);
    assert!(b.seat.since_turn() == 0 && !b.seat.is_absent());
}

#[test]
fn a_caller_stays_awake_as_long_as_there_was_work_lately() {
    let b = Bench::new(true);
    b.seat.worked_ns.store(u64::MAX, SeqCst);
    assert!(b.seat.busy_turn());
    b.seat.worked_ns.store(0, SeqCst);
    assert!(!b.seat.busy_turn(), "a second ago");
    b.seat.worked_ns.store(u64::MAX, SeqCst);
    let _nic = b.seat.nic.lock();
    b.seat.callers.store(false, SeqCst);
    assert!(!b.seat.busy_turn(), "the thread runs it");
}

#[test]
fn a_caller_that_goes_to_sleep_wakes_the_thread_where_callers_run_the_nic() {
    let b = Bench::new(true);
    for callers in [false, true] {
        b.seat.callers.store(callers, SeqCst);
        b.seat.wanted.store(true, SeqCst);
        b.seat.left.store(false, SeqCst);
        b.seat.before_sleep();
        assert!(b.seat.is_left() && !b.seat.wanted.load(SeqCst));
        assert_eq!(is_ready(&b.shared.epoll, Duration::ZERO), callers);
    }
}

#[test]
fn the_thread_answers_verbs_while_callers_run_the_nic_and_takes_it_back_when_they_leave() {
    let mut b = Bench::new(true);
    b.post();
    b.seat.wanted.store(true, SeqCst);
    // A caller has turns all the time.
    b.seat.last_ns.store(u64::MAX, SeqCst);
    let (seat, answered) = (b.seat.clone(), Arc::new(AtomicBool::new(false)));
    let of_job = answered.clone();
    let verb = Box::new(move |_: &mut NicThread| {
        of_job.store(seat.callers.load(SeqCst), SeqCst);
        seat.left.store(true, SeqCst);
    });
    // It comes when the thread has looked for the last time.
    let shared = b.shared.clone();
    b.shared.submit(Box::new(move |_| _ = shared.submit(verb)));
    b.seat.leave(&mut b.seat.nic.lock());
    assert!(answered.load(SeqCst), "callers ran the NIC at that time");
    assert!(!b.seat.callers.load(SeqCst) && !b.seat.wanted.load(SeqCst) && !b.seat.is_left());
    assert!(b.q.is_done(), "the thread looks once more when it has said that callers run it");
    // The thread is awake: a verb need not wake it.
    b.shared.wait(Some(timespec(Duration::ZERO)));
    b.shared.submit(Box::new(|_| ()));
    assert!(!is_ready(&b.shared.epoll, Duration::ZERO));
}

#[test]
fn the_timer_is_closed_in_programs_that_this_process_starts() {
    let b = Bench::new(true);
    let timer = b.seat.timer.as_ref().unwrap();
    assert!(rustix::io::fcntl_getfd(timer).unwrap().contains(FdFlags::CLOEXEC));
    assert!(rustix::fs::fcntl_getfl(timer).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
}
