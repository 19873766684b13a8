//! Tests of the driver in which the test runs the callers' part and the NIC thread's part itself.

use std::sync::atomic::Ordering::SeqCst;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::FdFlags;

use super::super::super::test_queue::TestQueue;
use super::super::doorbell::DoorbellPage;
use super::super::nic_thread::eventfd;
use super::super::page::{ASLEEP, AWAKE, DOORBELLS, SLEEPING, page_bytes};
use super::*;
use crate::limits::Limits;
use verbs::FunctionId;

/// A NIC without a NIC thread, with one queue pair.
pub(in super::super) struct Bench {
    pub driver: Arc<EngineDriver>,
    pub q: TestQueue,
    shared: Arc<Shared>,
    page: DmaMemory,
}

impl Bench {
    pub fn new(callers: bool) -> Self {
        let shared = Arc::new(Shared::new().unwrap());
        let mut nic = NicThread::new(Limits::default(), shared.clone(), None).unwrap();
        // One second of run time, so that the time 0 lies far in the past.
        nic.started -= Duration::from_secs(1);
        let page = DmaMemory::anonymous(page_bytes(4)).unwrap();
        nic.add_doorbells(FunctionId::PHYSICAL, page.clone(), 4);
        let q = TestQueue::new(|verb| nic.execute(FunctionId::PHYSICAL, verb).unwrap());
        nic.scan_everything();
        let driver = Arc::new(EngineDriver::new(nic, shared.clone(), callers).unwrap());
        Self { driver, q, shared, page }
    }

    /// Posts a WQE and stores its doorbell, without a round.
    pub fn post(&mut self) {
        self.q.nop();
        let at = DOORBELLS + self.q.slot.unwrap() as usize * 4;
        self.page.word32(at).store(1 << 16 | u32::from(self.q.index), Ordering::Release);
    }

    fn on_doorbell(&self, asleep: bool) -> bool {
        self.driver.on_doorbell(|| asleep)
    }
}

impl EngineDriver {
    /// Sets the time of the last work to the far future, so that there was work lately.
    pub fn set_recent_work(&self) {
        self.last_work_ns.store(u64::MAX, SeqCst);
    }

    /// Whether a caller has announced that it is about to sleep.
    pub fn is_released(&self) -> bool {
        self.released.load(SeqCst)
    }
}

fn is_ready(fd: &OwnedFd, wait: Duration) -> bool {
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timespec(wait))) == Ok(1)
}

#[test]
fn timer_slack_grows_with_callers_run_time() {
    assert_eq!(slack_after(Duration::ZERO), Duration::ZERO);
    assert!(slack_after(8 * CHECK_MAX) <= CHECK_MAX);
    assert_eq!(slack_after(Duration::from_secs(1)), SLACK_MAX);
}

#[test]
fn waiting_caller_takes_over_a_sleeping_nic() {
    let mut b = Bench::new(true);
    assert!(b.driver.is_shared());
    b.post();
    assert!(b.driver.poll_engine() && b.q.is_done());
    assert!(b.driver.callers_drive.load(SeqCst));
    assert_eq!(b.driver.idle_rounds.load(SeqCst), 0);
    assert!(!b.driver.poll_engine(), "there is no work");
    assert_eq!(b.driver.idle_rounds.load(SeqCst), 1);
    // The timer wakes the NIC thread for its check.
    assert!(is_ready(b.driver.timer.as_ref().unwrap(), Duration::from_secs(20)));
}

#[test]
fn callers_run_no_rounds_without_permission() {
    let mut b = Bench::new(false);
    assert!(!b.driver.is_shared());
    b.post();
    assert!(!b.driver.poll_engine() && !b.q.is_done());
    b.driver.set_recent_work();
    assert!(!b.driver.poll_engine_before_sleep() && !b.q.is_done());
    b.driver.before_sleep();
    assert!(!b.driver.is_released());
}

#[test]
fn caller_requests_the_engine_from_the_running_thread() {
    let mut b = Bench::new(true);
    b.post();
    let asked = |callers| {
        b.driver.requested.store(false, SeqCst);
        b.driver.released.store(true, SeqCst);
        b.driver.callers_drive.store(callers, SeqCst);
        let _nic = b.driver.nic.lock();
        assert!(!b.driver.poll_engine());
        (b.driver.requested.load(SeqCst), b.driver.released.load(SeqCst))
    };
    assert_eq!(asked(false), (true, false));
    assert_eq!(asked(true), (false, true), "another caller holds the engine");
    assert!(!b.q.is_done());
}

#[test]
fn doorbell_runs_a_round_unless_one_is_near() {
    let mut b = Bench::new(true);
    b.post();
    assert!(b.on_doorbell(false) && !b.q.is_done(), "the thread is awake");
    assert!(b.on_doorbell(true) && b.q.is_done());
    assert!(b.driver.callers_drive.load(SeqCst));
    let (now, long_ago) = (u64::MAX, 0);
    b.post();
    b.driver.received.store(false, SeqCst);
    b.driver.awaits_answers.store(true, SeqCst);
    b.driver.last_round_ns.store(now, SeqCst);
    assert!(b.on_doorbell(false) && !b.q.is_done(), "left to the next round");
    assert!(b.driver.poll_engine() && b.q.is_done());
    for (brought, awaits, last_round_ns) in
        [(true, true, now), (false, false, now), (false, true, long_ago)]
    {
        b.post();
        b.driver.received.store(brought, SeqCst);
        b.driver.awaits_answers.store(awaits, SeqCst);
        b.driver.last_round_ns.store(last_round_ns, SeqCst);
        assert!(b.on_doorbell(false) && b.q.is_done(), "{brought} {awaits} {last_round_ns}");
    }
}

#[test]
fn doorbell_during_a_round_is_left_to_the_lock_holder() {
    let mut b = Bench::new(true);
    b.post();
    let nic = b.driver.nic.lock();
    assert!(!b.on_doorbell(true), "the NIC thread must be woken");
    assert!(b.driver.rescan.load(SeqCst));
    b.driver.callers_drive.store(true, SeqCst);
    assert!(b.on_doorbell(true), "the other caller scans again");
    drop(nic);
    assert!(!b.q.is_done());
    assert!(b.driver.doorbell_round() && b.q.is_done());
    assert!(!b.driver.rescan.load(SeqCst));
}

#[test]
fn doorbell_wakes_a_sleeping_thread_if_the_lock_is_held() {
    let b = Bench::new(true);
    let wake = eventfd().unwrap();
    let driver = Some(b.driver.clone());
    let page = DoorbellPage { memory: b.page.clone(), slots: 4, wake, driver };
    let _nic = b.driver.nic.lock();
    for (sleeping, wakes) in [(AWAKE, false), (ASLEEP, true)] {
        page.memory.word32(SLEEPING).store(sleeping, SeqCst);
        page.on_doorbell();
        assert_eq!(is_ready(&page.wake, Duration::ZERO), wakes);
    }
}

#[test]
fn forked_child_does_not_run_the_engine() {
    let mut b = Bench::new(true);
    assert!(b.driver.is_own_process());
    b.driver.own_process.word32(0).store(0, SeqCst);
    b.post();
    assert!(!b.driver.is_own_process() && !b.driver.poll_engine());
    assert!(b.on_doorbell(true), "a child wakes no thread either");
    assert!(!b.q.is_done());
}

#[test]
fn stopped_nic_runs_no_rounds() {
    let mut b = Bench::new(true);
    b.post();
    drop(Unwinding(&mut b.driver.nic.lock()));
    assert!(b.driver.nic.lock().stop, "a round that panicked stops the NIC");
    assert!(!b.driver.poll_engine() && !b.q.is_done());
    assert!(b.shared.is_alive());
    drop(End(&b.driver));
    assert!(!b.shared.is_alive());
    assert!(!b.shared.submit(Box::new(|_| ())));
    assert_eq!(b.page.word32(SLEEPING).load(SeqCst), super::super::page::GONE);
}

#[test]
fn callers_without_a_recent_round_are_absent() {
    let b = Bench::new(true);
    b.driver.last_round_ns.store(0, SeqCst);
    assert!(b.driver.since_last_round() >= 1_000_000_000 && b.driver.is_absent());
    b.driver.last_round_ns.store(u64::MAX, SeqCst);
    assert!(b.driver.since_last_round() == 0 && !b.driver.is_absent());
}

#[test]
fn caller_stays_awake_after_recent_work() {
    let b = Bench::new(true);
    b.driver.last_work_ns.store(u64::MAX, SeqCst);
    assert!(b.driver.poll_engine_before_sleep());
    b.driver.last_work_ns.store(0, SeqCst);
    assert!(!b.driver.poll_engine_before_sleep(), "a second ago");
    b.driver.last_work_ns.store(u64::MAX, SeqCst);
    let _nic = b.driver.nic.lock();
    b.driver.callers_drive.store(false, SeqCst);
    assert!(!b.driver.poll_engine_before_sleep(), "the NIC thread runs the engine");
}

#[test]
fn sleeping_caller_wakes_the_thread_if_callers_run_the_engine() {
    let b = Bench::new(true);
    for callers in [false, true] {
        b.driver.callers_drive.store(callers, SeqCst);
        b.driver.requested.store(true, SeqCst);
        b.driver.released.store(false, SeqCst);
        b.driver.before_sleep();
        assert!(b.driver.is_released() && !b.driver.requested.load(SeqCst));
        assert_eq!(is_ready(&b.shared.epoll, Duration::ZERO), callers);
    }
}

#[test]
fn nic_thread_answers_verbs_while_callers_run_the_engine() {
    let mut b = Bench::new(true);
    b.post();
    b.driver.requested.store(true, SeqCst);
    // Callers run rounds all the time.
    b.driver.last_round_ns.store(u64::MAX, SeqCst);
    let (driver, answered) = (b.driver.clone(), Arc::new(AtomicBool::new(false)));
    let for_job = answered.clone();
    let verb = Box::new(move |_: &mut NicThread| {
        for_job.store(driver.callers_drive.load(SeqCst), SeqCst);
        driver.released.store(true, SeqCst);
    });
    // The verb arrives after the NIC thread's last scan.
    let shared = b.shared.clone();
    b.shared.submit(Box::new(move |_| _ = shared.submit(verb)));
    b.driver.release(&mut b.driver.nic.lock());
    assert!(answered.load(SeqCst), "callers ran the NIC at that time");
    assert!(
        !b.driver.callers_drive.load(SeqCst)
            && !b.driver.requested.load(SeqCst)
            && !b.driver.is_released()
    );
    assert!(
        b.q.is_done(),
        "the NIC thread scans after it has announced that callers run the engine"
    );
    // The NIC thread is awake: a verb does not have to wake it.
    b.shared.wait(Some(timespec(Duration::ZERO)));
    b.shared.submit(Box::new(|_| ()));
    assert!(!is_ready(&b.shared.epoll, Duration::ZERO));
}

#[test]
fn timer_is_close_on_exec_and_nonblocking() {
    let b = Bench::new(true);
    let timer = b.driver.timer.as_ref().unwrap();
    assert!(rustix::io::fcntl_getfd(timer).unwrap().contains(FdFlags::CLOEXEC));
    assert!(rustix::fs::fcntl_getfl(timer).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
}
