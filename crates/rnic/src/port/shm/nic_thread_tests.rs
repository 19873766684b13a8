//! The test plays the NIC's thread.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use rustix::event::poll;

use super::super::super::test_queue::TestQueue;
use super::super::doorbell::{DOORBELLS, WAITER, on_one_cpu, page_bytes};
use super::*;

const PF: FunctionId = FunctionId::PHYSICAL;

fn nic(wire: Option<Wire>) -> (NicThread, DmaMemory) {
    let shared = Arc::new(Shared::new().unwrap());
    let mut nic = NicThread::new(Limits::default(), shared, wire).unwrap();
    let page = DmaMemory::anonymous(page_bytes(4)).unwrap();
    nic.add_doorbells(PF, page.clone(), 4);
    (nic, page)
}

fn queue(nic: &mut NicThread) -> TestQueue {
    let q = TestQueue::new(|verb| nic.execute(PF, verb).unwrap());
    nic.look_at_all();
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
fn who_is_crowded_wherever_it_goes_stays_longer() {
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
    assert_eq!(stay_after(stay, stay * 5), STAY, "after a time of peace");
}

#[test]
fn a_round_with_work_of_any_kinds_is_not_idle() {
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
fn a_nic_that_sleeps_says_how_deep_and_that_it_is_awake_again() {
    let (mut nic, page) = nic(None);
    let q = queue(&mut nic);
    let sleeping = || page.word32(SLEEPING).load(Ordering::Relaxed);
    assert!(matches!(nic.fall_asleep(0), Some(None)));
    assert_eq!(sleeping(), ASLEEP);
    nic.wake_up();
    assert_eq!(sleeping(), AWAKE);
    assert_eq!(nic.shared.sleeps.load(Ordering::Relaxed), 1);
    // Receives that are posted from now on are flushed.
    nic.execute(PF, Verb::ModifyQp { qpn: q.qpn, change: QpChange::Error }).unwrap();
    while nic.work(0) {}
    assert!(matches!(nic.fall_asleep(0), Some(None)));
    assert_eq!(sleeping(), ASLEEP_RNR);
}

#[test]
fn packets_wake_the_thread_but_not_while_callers_run_its_nic() {
    let wire = Wire::new(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
    let (sender, to) = (UdpSocket::bind("127.0.0.1:0").unwrap(), wire.local());
    let (mut nic, _) = nic(Some(wire));
    let socket = nic.wire.as_ref().unwrap().as_fd().try_clone_to_owned().unwrap();
    let epoll = nic.shared.epoll.try_clone().unwrap();
    assert!(nic.watched);
    nic.leave_to_callers();
    sender.send_to(&[0; 20], to).unwrap();
    assert!(is_ready(&socket, Duration::from_secs(20)), "it has come");
    assert!(!is_ready(&epoll, Duration::ZERO));
    assert!(nic.receive(0));
    nic.take_back();
    sender.send_to(&[0; 20], to).unwrap();
    assert!(is_ready(&epoll, Duration::from_secs(20)), "a packet wakes the thread");
    assert!(nic.work(0));
    assert!(!nic.work(0) && !is_ready(&socket, Duration::ZERO));
    assert_eq!(nic.core.engine.wire_stats().packets_in, 2);
    assert_eq!(nic.unsent(), 0);
    nic.wire.as_mut().unwrap().unsent = 7;
    assert_eq!(nic.unsent(), 7);
}

#[test]
fn what_was_rung_before_a_reset_is_not_executed_after_it() {
    let (mut nic, page) = nic(None);
    let mut q = queue(&mut nic);
    q.nop();
    ring(&page, &q, 1);
    nic.execute(PF, Verb::ModifyQp { qpn: q.qpn, change: QpChange::Reset }).unwrap();
    q.connect(|verb| nic.execute(PF, verb).unwrap());
    nic.look_at_all();
    assert!(!q.is_done());
    ring(&page, &q, 2);
    nic.look_at_all();
    assert!(q.is_done());
}

#[test]
fn the_doorbells_of_queue_pairs_that_have_ended_are_free_for_others() {
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
fn a_client_that_waits_on_the_nic_s_cpu_is_seen_there() {
    let (mut nic, page) = nic(None);
    let other = DmaMemory::anonymous(page_bytes(1)).unwrap();
    let f = nic.core.engine.add_function(crate::verbs::FunctionLimits::default()).unwrap();
    nic.add_doorbells(f, other.clone(), 1);
    on_one_cpu(|cpu| {
        let here = cpu + 1;
        assert!(!nic.is_waited_for_here(0), "no client waits");
        for page in [&page, &other] {
            assert_eq!(page.word32(WHERE).load(Ordering::Relaxed), here);
        }
        let mut is_seen = |first, second| {
            page.word32(WAITER).store(first, Ordering::Relaxed);
            other.word32(WAITER).store(second, Ordering::Relaxed);
            let crowded = nic.crowded;
            let any = nic.is_waited_for_here(0);
            assert_eq!(nic.crowded - crowded, u32::from(any));
            any
        };
        assert!(!is_seen(0, 0) && !is_seen(here + 1, 0));
        assert!(is_seen(here, 0) && is_seen(0, here) && is_seen(here, here));
        assert!(!is_seen(0, 0), "once each time");
        // Where that goes on, it leaves after a time.
        let stay = STAY.as_nanos() as u64;
        (nic.crowded, nic.left_at) = (CROWDED_MAX - 1, 1);
        page.word32(WAITER).store(here, Ordering::Relaxed);
        assert!(nic.is_waited_for_here(stay));
        assert_eq!((nic.crowded, nic.left_at), (CROWDED_MAX, 1), "it has not been here long");
        assert!(!nic.is_waited_for_here(stay + 1));
        assert_eq!((nic.crowded, nic.left_at, nic.stay), (0, stay + 1, 2 * STAY));
        let now = nic.now_ns();
        assert!(nic.yield_cpu(now, false) >= now);
    });
}

#[test]
fn descriptors_and_times_are_as_the_system_takes_them() {
    let fd = eventfd().unwrap();
    assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    assert!(rustix::fs::fcntl_getfl(&fd).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    assert_eq!(timespec(Duration::new(3, 7)), Timespec { tv_sec: 3, tv_nsec: 7 });
}
