//! Tests of a `NicThread` that the test itself runs, in place of the NIC thread.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use rustix::event::poll;

use super::super::super::test_queue::TestQueue;
use super::super::page::{DOORBELLS, WAITER, on_one_cpu, page_bytes};
use super::*;

const PF: FunctionId = FunctionId::PHYSICAL;

fn nic(wire: Option<RoceSocket>) -> (NicThread, DmaMemory) {
    let shared = Arc::new(Shared::new().unwrap());
    let mut nic = NicThread::new(Limits::default(), shared, wire).unwrap();
    let page = DmaMemory::anonymous(page_bytes(4)).unwrap();
    nic.add_doorbells(PF, page.clone(), 4);
    (nic, page)
}

fn queue(nic: &mut NicThread) -> TestQueue {
    let q = TestQueue::new(|verb| nic.execute(PF, verb).unwrap());
    nic.scan_everything();
    q
}

fn ring(page: &DmaMemory, q: &TestQueue, generation: u32) {
    let at = DOORBELLS + q.slot.unwrap() as usize * 4;
    page.word32(at).store(generation << 16 | u32::from(q.index), Ordering::Release);
}

fn is_ready(fd: impl AsFd, wait: Duration) -> bool {
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timespec(wait))) == Ok(1)
}

#[test]
fn moves_back_off_if_they_do_not_help() {
    let mut stay = STAY;
    let mut moves = 0;
    let mut elapsed = Duration::ZERO;
    while elapsed < Duration::from_secs(60) {
        elapsed += stay;
        stay = stay_after(stay, stay);
        moves += 1;
    }
    assert!(moves < 25, "{moves} moves in a minute");
    assert_eq!(stay, STAY_MAX);
    assert_eq!(stay_after(stay, stay * 5), STAY, "after a time without yield requests");
}

#[test]
fn round_with_any_kind_of_work_is_not_idle() {
    let (mut nic, page) = nic(None);
    let mut q = queue(&mut nic);
    assert!(!nic.work(0));
    for (has_mail, rings, is_armed) in [
        (true, false, false),
        (false, true, false),
        (true, true, false),
        (false, true, true),
        (true, true, true),
    ] {
        if has_mail {
            assert!(nic.shared.submit(Box::new(|_| ())));
        }
        if rings {
            q.nop();
            ring(&page, &q, 1);
        }
        if is_armed {
            q.cq.arm();
        }
        assert!(nic.work(0), "{has_mail} {rings} {is_armed}");
        assert_eq!(q.is_done(), rings);
        while nic.work(0) {}
    }
}

#[test]
fn sleeping_nic_announces_its_level_and_wake_up() {
    let (mut nic, page) = nic(None);
    let q = queue(&mut nic);
    let sleeping = || page.word32(SLEEPING).load(Ordering::Relaxed);
    assert!(matches!(nic.prepare_sleep(0), Some(None)));
    assert_eq!(sleeping(), ASLEEP);
    nic.wake_up();
    assert_eq!(sleeping(), AWAKE);
    assert_eq!(nic.shared.sleeps.load(Ordering::Relaxed), 1);
    // Receives that are posted to a QP in the error state are flushed.
    nic.execute(PF, Verb::ModifyQp { qpn: q.qpn, change: QpChange::Error }).unwrap();
    while nic.work(0) {}
    assert!(matches!(nic.prepare_sleep(0), Some(None)));
    assert_eq!(sleeping(), ASLEEP_RNR);
}

#[test]
fn packets_wake_the_nic_thread_unless_callers_run_the_engine() {
    let wire = RoceSocket::new(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
    let (sender, to) = (UdpSocket::bind("127.0.0.1:0").unwrap(), wire.local());
    let (mut nic, _) = nic(Some(wire));
    let socket = nic.socket.as_ref().unwrap().as_fd().try_clone_to_owned().unwrap();
    let epoll = nic.shared.epoll.try_clone().unwrap();
    assert!(nic.watched);
    nic.hand_to_callers();
    sender.send_to(&[0; 20], to).unwrap();
    assert!(is_ready(&socket, Duration::from_secs(20)), "the packet has arrived");
    assert!(!is_ready(&epoll, Duration::ZERO));
    assert!(nic.receive(0));
    nic.take_from_callers();
    sender.send_to(&[0; 20], to).unwrap();
    assert!(is_ready(&epoll, Duration::from_secs(20)), "a packet wakes the thread");
    assert!(nic.work(0));
    assert!(!nic.work(0) && !is_ready(&socket, Duration::ZERO));
    assert_eq!(nic.core.engine.wire_stats().packets_in, 2);
    assert_eq!(nic.unsent(), 0);
    nic.socket.as_mut().unwrap().unsent = 7;
    assert_eq!(nic.unsent(), 7);
}

#[test]
fn doorbell_from_before_a_reset_is_ignored() {
    let (mut nic, page) = nic(None);
    let mut q = queue(&mut nic);
    q.nop();
    ring(&page, &q, 1);
    nic.execute(PF, Verb::ModifyQp { qpn: q.qpn, change: QpChange::Reset }).unwrap();
    q.connect(|verb| nic.execute(PF, verb).unwrap());
    nic.scan_everything();
    assert!(!q.is_done());
    ring(&page, &q, 2);
    nic.scan_everything();
    assert!(q.is_done());
}

#[test]
fn destroyed_queue_pairs_free_their_doorbells() {
    let (mut nic, _) = nic(None);
    for _ in 0..3 {
        let queues: Vec<_> = (0..4).map(|_| queue(&mut nic)).collect();
        let slots: Vec<_> = queues.iter().map(|q| q.slot.unwrap()).collect();
        assert_eq!(slots, [0, 1, 2, 3]);
        for q in queues {
            nic.execute(PF, Verb::DestroyQp { qpn: q.qpn }).unwrap();
        }
    }
}

#[test]
fn yield_requests_are_seen_on_the_nics_cpu() {
    let (mut nic, page) = nic(None);
    let other = DmaMemory::anonymous(page_bytes(1)).unwrap();
    let f = nic.core.engine.add_function(crate::limits::FunctionLimits::default()).unwrap();
    nic.add_doorbells(f, other.clone(), 1);
    on_one_cpu(|cpu| {
        let here = cpu + 1;
        assert!(!nic.take_yield_requests(0), "no client waits");
        for page in [&page, &other] {
            assert_eq!(page.word32(WHERE).load(Ordering::Relaxed), here);
        }
        let mut is_seen = |first, second| {
            page.word32(WAITER).store(first, Ordering::Relaxed);
            other.word32(WAITER).store(second, Ordering::Relaxed);
            let yield_requests = nic.yield_requests;
            let any = nic.take_yield_requests(0);
            assert_eq!(nic.yield_requests - yield_requests, u32::from(any));
            any
        };
        assert!(!is_seen(0, 0) && !is_seen(here + 1, 0));
        assert!(is_seen(here, 0) && is_seen(0, here) && is_seen(here, here));
        assert!(!is_seen(0, 0), "a request is taken once");
        // After enough requests, and enough time here, the thread moves to another CPU.
        let stay = STAY.as_nanos() as u64;
        (nic.yield_requests, nic.moved_at) = (YIELD_REQUESTS_MAX - 1, 1);
        page.word32(WAITER).store(here, Ordering::Relaxed);
        assert!(nic.take_yield_requests(stay));
        assert_eq!(
            (nic.yield_requests, nic.moved_at),
            (YIELD_REQUESTS_MAX, 1),
            "too early for a move"
        );
        assert!(!nic.take_yield_requests(stay + 1));
        assert_eq!((nic.yield_requests, nic.moved_at, nic.min_stay), (0, stay + 1, 2 * STAY));
        let now = nic.now_ns();
        assert!(nic.yield_cpu(now, false) >= now);
    });
}

#[test]
fn eventfds_and_timespecs_have_the_right_form() {
    let fd = eventfd().unwrap();
    assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    assert!(rustix::fs::fcntl_getfl(&fd).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    assert_eq!(timespec(Duration::new(3, 7)), Timespec { tv_sec: 3, tv_nsec: 7 });
}
