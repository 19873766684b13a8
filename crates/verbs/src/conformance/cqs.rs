//! Completion queues and their notifications (IBTA vol. 1, chapter 11, completion queue
//! operations).

use std::time::Duration;

use super::pair::{LONG, Pair, SHORT, Shape, Sleeper, arrives};
use super::{Bench, Case, always, never, with};
use crate::{
    AsyncEvent, Completion, CompletionKind, CompletionQueue, CqAttr, Feature, Nic, Op, QpChange,
    QpState, QueuePair, SendFlags, Status, WorkRequest,
};

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    vec![
        always("cqs.sizes", &["test_cq.test_create_cq", "test_cqex.test_create_cq_ex"], sizes),
        always(
            "cqs.bad_sizes",
            &["test_cq.test_create_cq_bad_flow", "test_cqex.test_create_cq_ex_bad_flow"],
            bad_sizes,
        ),
        always(
            "cqs.events",
            &["test_cq_events.test_cq_events_rc", "test_cq.test_create_cq_with_comp_channel"],
            events,
        ),
        with(Feature::SolicitedEvents, "cqs.solicited_events", &[], solicited_events),
        always("cqs.wake", &[], wake),
        always("cqs.two_for_one_queue_pair", &[], two_for_one),
        with(Feature::CqOverrun, "cqs.overrun", &[], overrun),
        never(
            "cqs.resize",
            &["test_cq.test_resize_cq"],
            "a CQ cannot be resized: create it for all work that can be in flight",
        ),
        never(
            "cqs.vectors_and_timestamps",
            &["test_cq.test_create_cq (comp_vector)", "test_cqex.CQEXAPITest (wc_flags)"],
            "one NIC thread serves all CQs, and completions carry no time stamps",
        ),
    ]
}

fn sizes<B: Bench>(bench: &B) {
    for nic in [bench.client(), bench.server()] {
        for entries in [1, 2, 3, 100, 4096] {
            let cq = nic.create_cq(CqAttr { entries, ignore_overrun: false }).expect("a CQ");
            assert!(cq.entries() >= entries);
            assert_eq!(cq.poll(&mut [Completion::EMPTY]), 0);
        }
    }
    // Wraps around the CQ many times.
    let small = Shape { cq_entries: 4, ..Shape::default() };
    let p = Pair::of(bench, &small, &small);
    for i in 0..100 {
        p.client.post(i, Op::Nop);
        assert_eq!(p.client.next().id, i);
    }
}

fn bad_sizes<B: Bench>(bench: &B) {
    let nic = bench.client();
    let most = nic.query_device().expect("limits").cq_entries;
    for entries in [0, most + 1, u32::MAX] {
        assert!(nic.create_cq(CqAttr { entries, ignore_overrun: false }).is_err(), "{entries}");
    }
}

fn events<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    for _ in 0..20 {
        assert!(!s.cq.wait(Duration::ZERO).expect("the NIC is there"));
        s.receive(1, &[s.sge(0, 8)]);
        c.ok(Op::SendInline { data: &[1] });
        assert!(arrives(&s.cq));
        assert!(arrives(&s.cq), "the completion has not been polled");
        let mut out = [Completion::EMPTY; 2];
        assert_eq!(s.cq.poll(&mut out), 1);
        assert_eq!((out[0].id, out[0].kind), (1, CompletionKind::Receive));
    }
    assert!(!s.cq.wait(SHORT).expect("the NIC is there"));
}

fn solicited_events<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let solicited = SendFlags { solicited: true, ..SendFlags::default() };
    let send = Op::SendInline { data: &[1] };
    let quiet = |wait: Duration| s.cq.wait_solicited(wait).expect("the NIC is there");
    assert!(!quiet(SHORT));
    for _ in 0..5 {
        let sleeper = Sleeper::default();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                sleeper.begins();
                quiet(LONG)
            });
            sleeper.until_asleep();
            assert!(!waiter.is_finished());
            s.receive(1, &[s.sge(0, 8)]);
            c.ok(Op::With { flags: solicited, op: &send });
            assert!(waiter.join().expect("a waiter"));
        });
        s.next();
        s.receive(2, &[s.sge(0, 8)]);
        c.ok(send);
        // A completion that can be polled already ends the wait at once, solicited or not.
        assert!(quiet(LONG));
        assert_eq!(s.next().status, Status::Success);
    }
    // Unsolicited completions do not wake a sleeping thread; an error does.
    let sleeper = Sleeper::default();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            sleeper.begins();
            quiet(LONG)
        });
        sleeper.until_asleep();
        s.receive(1, &[s.sge(0, 8)]);
        c.ok(send);
        // The sleeping thread also checks now and then that the NIC is alive; that must not end the
        // wait.
        std::thread::sleep(Duration::from_millis(250));
        assert!(!waiter.is_finished(), "an unsolicited message must not end the wait");
        s.receive(2, &[]);
        assert_eq!(
            c.run(send).status,
            Status::RemoteInvalidRequest,
            "the message is too long for the receive"
        );
        assert!(waiter.join().expect("a waiter"));
    });
    assert_eq!(s.next().status, Status::Success);
    assert_eq!(s.next().status, Status::LocalLength);
}

fn wake<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    if <B::Nic as Nic>::Cq::VIRTUAL {
        // With virtual time no other thread runs while this thread sleeps.
        assert!(!p.client.cq.wait_unless(LONG, &|| true).expect("the NIC is there"));
        return;
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let is_done = || done.load(std::sync::atomic::Ordering::SeqCst);
            while !is_done() {
                p.client.cq.wait_unless(LONG, &is_done).expect("the NIC is there");
            }
        });
        std::thread::sleep(Duration::from_millis(5));
        done.store(true, std::sync::atomic::Ordering::SeqCst);
        p.client.cq.wake();
        waiter.join().expect("a waiter");
    });
}

fn two_for_one<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let end = &p.server;
    let recv_cq =
        end.nic.create_cq(CqAttr { entries: 8, ignore_overrun: false }).expect("a second CQ");
    let attr = crate::QpAttr {
        send_cq: &end.cq,
        recv_cq: &recv_cq,
        send_blocks: 8,
        receive: crate::Receive::Own(crate::ReceiveAttr { entries: 4, max_sges: 1 }),
        access: crate::Access::NONE,
    };
    let qp = end.nic.create_qp(&end.pd, attr).expect("a QP");
    end.qp.modify(QpChange::Reset).expect("any QP can be reset");
    super::pair::connect(bench, &p.client.qp, &qp);
    qp.post_recv(&crate::ReceiveRequest { id: 5, to: &[end.sge(0, 8)] }).expect("a receive");
    p.client.receive(6, &[p.client.sge(0, 8)]);
    p.client.ok(Op::SendInline { data: &[1] });
    let send = WorkRequest { id: 7, op: Op::SendInline { data: &[2] }, signaled: true };
    qp.post_send(&[send]).expect("posting");
    assert_eq!(super::pair::next(&recv_cq).id, 5);
    assert_eq!(end.next().id, 7);
    assert_eq!(p.client.next().id, 6);
}

fn overrun<B: Bench>(bench: &B) {
    let small = Shape { cq_entries: 4, ..Shape::default() };
    let p = Pair::of(bench, &small, &Shape::default());
    let c = &p.client;
    let room = c.cq.entries();
    for id in 0..room as u64 + 1 {
        c.post(id, Op::Nop);
    }
    let cqn = c.cq.cqn();
    c.event(|e| *e == AsyncEvent::CqOverrun { cqn });
    for id in 0..room as u64 {
        let done = c.next();
        assert_eq!(
            (done.id, done.status),
            (id, Status::Success),
            "completions before the overrun must be kept"
        );
    }
    c.nothing();
    assert_eq!(c.qp.state().expect("a state"), QpState::Error);
    // Other connections are not affected.
    let q = Pair::new(bench);
    q.client.ok(Op::Nop);
}
