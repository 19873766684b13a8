//! Completion errors and asynchronous events, at requester and responder (IBTA vol. 1, chapter 11).

use super::pair::{Pair, SHORT, Shape};
use super::{Bench, Case, always, with};
use crate::{
    Access, AsyncEvent, CompletionKind, Feature, Key, MemoryRegion, Nic, Op, QpAttr, QpChange,
    QpState, QueuePair, Receive, Remote, Sge, Status,
};

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    use Feature::AsyncEvents;
    vec![
        always("errors.local_keys", &[], local_keys),
        always("errors.remote_keys", &[], remote_keys),
        always("errors.rights_of_the_queue_pair", &[], rights_of_the_queue_pair),
        always("errors.message_too_long", &[], message_too_long),
        always("errors.no_receive_queue", &[], no_receive_queue),
        always("errors.isolate_other_connections", &[], isolate_other_connections),
        with(AsyncEvents, "errors.event_at_the_responder", &[], event_at_the_responder),
        with(AsyncEvents, "errors.events_of_destroyed_objects", &[], events_of_destroyed_objects),
        with(AsyncEvents, "errors.events_can_be_waited_for", &[], events_can_be_waited_for),
    ]
}

fn local_keys<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let good = c.sge(0, 8);
    let end = good.addr + c.mr.memory().len() as u64;
    let bad = [
        Sge { lkey: Key(good.lkey.0 ^ 1), ..good },
        Sge { lkey: Key(0), ..good },
        Sge { lkey: Key(u32::MAX), ..good },
        Sge { addr: end - 7, ..good },
        Sge { addr: good.addr - 1, ..good },
        Sge { addr: u64::MAX - 3, ..good },
    ];
    for sge in bad {
        let list = [good, sge];
        for op in [
            Op::Send { from: &list },
            Op::Write { to: s.at(0), from: &list },
            Op::Read { from: s.at(0), to: &list },
        ] {
            let done = c.run(op);
            assert_eq!(done.status, Status::LocalProtection, "{op:?}");
            assert_eq!(
                s.qp.state().expect("a state"),
                QpState::ReadyToSend,
                "the server QP must not fail"
            );
            p.connect();
        }
    }
    assert_eq!((c.get(0, 8), s.get(0, 8)), (vec![0; 8], vec![0; 8]));
    c.ok(Op::Write { to: s.at(0), from: &[good] });
}

fn remote_keys<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let good = s.at(0);
    for bit in 0..32 {
        let to = Remote { rkey: Key(good.rkey.0 ^ 1 << bit), ..good };
        let done = c.run(Op::WriteInline { to, data: &[1] });
        assert_eq!(done.status, Status::RemoteAccess, "bit {bit}");
        assert_eq!(done.vendor_error, 0, "the requester must not learn the reason");
        p.connect();
    }
    assert_eq!(s.get(0, 8), [0; 8]);
    c.ok(Op::WriteInline { to: good, data: &[1] });
}

fn rights_of_the_queue_pair<B: Bench>(bench: &B) {
    let all = [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC];
    for granted in all {
        let server = Shape { qp: granted, ..Shape::default() };
        let p = Pair::of(bench, &Shape::default(), &server);
        let old = p.client.sge(0, 8);
        let list = [old];
        let ops = [
            Op::Read { from: p.server.at(0), to: &list },
            Op::Write { to: p.server.at(0), from: &list },
            Op::FetchAdd { at: p.server.at(0), add: 1, old },
        ];
        for (asked, op) in all.into_iter().zip(ops) {
            match asked == granted {
                true => _ = p.client.ok(op),
                false => p.refused(op, Status::RemoteAccess),
            }
        }
        // Messages need no access right.
        p.server.receive(1, &[]);
        p.client.ok(Op::SendInline { data: &[] });
    }
}

fn message_too_long<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    s.put(0, &[0xcc; 64]);
    s.receive(1, &[s.sge(0, 8), s.sge(32, 8)]);
    s.receive(2, &[s.sge(0, 8)]);
    assert_eq!(c.run(Op::SendInline { data: &[1; 17] }).status, Status::RemoteInvalidRequest);
    let first = s.next();
    assert_eq!((first.id, first.status), (1, Status::LocalLength));
    assert_eq!(first.kind, CompletionKind::Receive);
    let second = s.next();
    assert_eq!((second.id, second.status), (2, Status::Flushed));
    assert_eq!(s.get(0, 64), [0xcc; 64]);
    p.connect();
    let most = c.nic.query_device().expect("limits").send_bytes as usize;
    if most < c.mr.memory().len() {
        let list = [c.sge(0, most as u32 + 1)];
        assert_eq!(c.run(Op::Send { from: &list }).status, Status::LocalLength);
    }
}

fn no_receive_queue<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let end = &p.server;
    let attr = QpAttr {
        send_cq: &end.cq,
        recv_cq: &end.cq,
        send_blocks: 8,
        receive: Receive::None,
        access: Access::REMOTE_ALL,
    };
    let qp = end.nic.create_qp(&end.pd, attr).expect("a QP");
    end.qp.modify(QpChange::Reset).expect("any QP can be reset");
    super::pair::connect(bench, &p.client.qp, &qp);
    p.client.ok(Op::WriteInline { to: end.at(0), data: &[1] });
    let c = p.client.run(Op::SendInline { data: &[1] });
    assert_eq!(c.status, Status::RemoteInvalidRequest);
    assert_eq!(qp.state().expect("a state"), QpState::Error);
}

fn isolate_other_connections<B: Bench>(bench: &B) {
    let (p, q) = (Pair::new(bench), Pair::new(bench));
    let bad = Remote { rkey: Key(0xdead_be00), ..p.server.at(0) };
    for i in 0..10u8 {
        q.client.post(1, Op::WriteInline { to: q.server.at(i as usize), data: &[i] });
        p.refused(Op::WriteInline { to: bad, data: &[1] }, Status::RemoteAccess);
        assert_eq!(q.client.next().status, Status::Success);
    }
    assert_eq!(q.server.get(0, 10), (0..10).collect::<Vec<u8>>());
}

fn event_at_the_responder<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let bad = Remote { rkey: Key(0xdead_be00), ..p.server.at(0) };
    assert_eq!(p.client.run(Op::WriteInline { to: bad, data: &[1] }).status, Status::RemoteAccess);
    let of = |end: &super::End<B::Nic>| {
        let number = end.qp.qpn();
        move |e: &AsyncEvent| matches!(e, AsyncEvent::QpError { qpn, .. } if *qpn == number)
    };
    let theirs = p.server.event(of(&p.server));
    let AsyncEvent::QpError { syndrome, by_peer, .. } = theirs else { unreachable!("as asked") };
    assert_eq!(Status::from_syndrome(syndrome as u8), Status::RemoteAccess);
    assert!(by_peer, "no completion of the server reports the failure of its QP");
    if !bench.is_one_function() {
        let events = p.client.nic.take_events().expect("events").events;
        assert!(
            !events.iter().any(of(&p.server)),
            "events go to the function of the failed QP only: {events:?}"
        );
        assert!(events.iter().any(of(&p.client)), "the client QP has failed too: {events:?}");
    }
}

fn events_of_destroyed_objects<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (nic, number) = (p.server.nic.clone(), p.server.qp.qpn());
    let bad = Remote { rkey: Key(0xdead_be00), ..p.server.at(0) };
    assert_eq!(p.client.run(Op::WriteInline { to: bad, data: &[1] }).status, Status::RemoteAccess);
    drop(p);
    let events = nic.take_events().expect("events").events;
    let of = |e: &AsyncEvent| matches!(e, AsyncEvent::QpError { qpn, .. } if *qpn == number);
    assert!(!events.iter().any(of), "{events:?}");
}

fn events_can_be_waited_for<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    while !s.nic.take_events().expect("events").events.is_empty() {}
    assert!(s.nic.wait_events(SHORT).expect("events").events.is_empty());
    let bad = Remote { rkey: Key(0xdead_be00), ..s.at(0) };
    if <<B::Nic as Nic>::Cq as crate::CompletionQueue>::VIRTUAL {
        c.post(1, Op::WriteInline { to: bad, data: &[1] });
        s.event(|e| matches!(e, AsyncEvent::QpError { .. }));
        return;
    }
    std::thread::scope(|scope| {
        let number = s.qp.qpn();
        let of =
            move |e: &AsyncEvent| matches!(e, AsyncEvent::QpError { qpn, .. } if *qpn == number);
        let waiter = scope.spawn(move || s.event(of));
        // The thread probably sleeps by now.
        std::thread::sleep(std::time::Duration::from_millis(10));
        c.post(1, Op::WriteInline { to: bad, data: &[1] });
        waiter.join().expect("the waiter ends");
    });
}
