//! Queue pairs: attributes, states, the operations allowed in each state, and the flush (IBTA vol.
//! 1, chapter 10, queue pairs and their states).

use super::Side::{Client, Server};
use super::pair::{End, Pair, Shape, connect};
use super::{Bench, Case, always, never, with};
use crate::{
    Access, CompletionKind, Error, Feature, Nic, Op, QpAttr, QpChange, QpState, Qpn, QueuePair,
    Receive, ReceiveAttr, ReceiveRequest, Remote, Status, WcOpcode, WorkRequest,
};

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    vec![
        always(
            "qps.create_and_query",
            &[
                "test_qp.test_create_rc_qp_no_attr",
                "test_qp.test_create_rc_qp_with_attr",
                "test_qp.test_create_rc_qp_ex_no_attr",
                "test_qp.test_create_rc_qp_ex_with_attr",
                "test_qp.test_query_rc_qp",
            ],
            create_and_query,
        ),
        always("qps.bad_attributes", &[], bad_attributes),
        always("qps.transitions", &[], transitions),
        always(
            "qps.receive_in_reset",
            &["test_qpex.test_post_receive_qp_state_bad_flow"],
            receive_in_reset,
        ),
        always(
            "qps.send_before_rts",
            &["test_qpex.test_post_send_qp_state_bad_flow"],
            send_before_rts,
        ),
        always("qps.full_receive_queue", &["test_qpex.test_full_rq_bad_flow"], full_receive_queue),
        always(
            "qps.longer_scatter_list",
            &["test_qpex.test_rq_with_larger_sgl_bad_flow"],
            longer_scatter_list,
        ),
        always("qps.full_send_queue", &[], full_send_queue),
        always("qps.flush", &[], flush),
        always("qps.posted_in_error", &[], posted_in_error),
        always("qps.reset_and_start_again", &[], reset_and_start_again),
        always("qps.responds_in_rtr", &[], responds_in_rtr),
        always("qps.end_of_the_peer", &[], end_of_the_peer),
        always("qps.a_message_waits_for_its_receive", &[], waits_for_its_receive),
        with(Feature::ModifyAccess, "qps.change_rights", &[], change_rights),
        never(
            "qps.outstanding_reads",
            &["test_qp.test_modify_rc_qp_rd_atomic"],
            "max_rd_atomic is set by the back end's to_rtr, not by these verbs",
        ),
        never(
            "qps.drained",
            &[],
            "the state SQD does not exist: access rights can be changed in RTS",
        ),
        never(
            "qps.of_other_transports",
            &[
                "test_qp UC, UD and raw packet cases",
                "test_qpex UD and XRC cases",
                "test_cqex UD and XRC cases",
                "test_atomic XRC cases",
                "test_cq_events.test_cq_events_ud",
            ],
            "RC is the only transport",
        ),
    ]
}

fn qp<N: Nic>(end: &End<N>, send_blocks: u32, receive: Receive<'_, N>) -> Result<N::Qp, Error> {
    let (send_cq, recv_cq) = (&end.cq, &end.cq);
    let access = Access::REMOTE_READ;
    end.nic.create_qp(&end.pd, QpAttr { send_cq, recv_cq, send_blocks, receive, access })
}

fn create_and_query<B: Bench>(bench: &B) {
    for nic in [bench.client(), bench.server()] {
        let end = End::new(nic, &Shape::default());
        let mut numbers = vec![end.qp.qpn()];
        for (blocks, entries) in [(1, 1), (3, 5), (64, 128), (0, 4), (8, 0)] {
            let receive = match entries {
                0 => Receive::None,
                entries => Receive::Own(ReceiveAttr { entries, max_sges: 1 }),
            };
            let qp = qp(&end, blocks, receive).expect("a QP");
            let info = qp.query().expect("a description");
            assert_eq!((info.state, info.peer), (QpState::Reset, Qpn::NONE));
            assert_eq!(info.access, Access::REMOTE_READ);
            assert!(info.send_blocks >= blocks && (info.send_blocks == 0) == (blocks == 0));
            assert!(info.recv_entries >= entries && (info.recv_entries == 0) == (entries == 0));
            numbers.push(qp.qpn());
        }
        numbers.sort();
        numbers.dedup();
        assert_eq!(numbers.len(), 6, "QP numbers are unique and constant");
    }
    let p = Pair::new(bench);
    let info = p.client.qp.query().expect("a description");
    assert_eq!((info.state, info.peer), (QpState::ReadyToSend, p.server.qp.qpn()));
}

fn bad_attributes<B: Bench>(bench: &B) {
    let end = End::new(bench.client(), &Shape::default());
    let most = end.nic.caps().max_queue;
    let own = |entries, max_sges| Receive::Own(ReceiveAttr { entries, max_sges });
    assert!(qp(&end, most + 1, Receive::None).is_err());
    assert!(qp(&end, u32::MAX, Receive::None).is_err());
    for (entries, sges) in [(0, 1), (u32::MAX, 1), (1, 10_000)] {
        assert!(qp(&end, 1, own(entries, sges)).is_err(), "{entries} of {sges}");
        let attr = ReceiveAttr { entries, max_sges: sges };
        assert!(end.nic.create_srq(&end.pd, attr).is_err(), "{entries} of {sges}");
    }
}

/// Moves a QP into a state. For RTR and RTS the QP must be the client's; it is connected to itself.
fn bring<B: Bench>(bench: &B, end: &End<B::Nic>, to: QpState) {
    let qp = &end.qp;
    qp.modify(QpChange::Reset).expect("any QP can be reset");
    let path = [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend];
    let steps = path.iter().position(|s| *s == to).map_or(0, |at| at + 1);
    for step in &path[..steps] {
        change(bench, end, *step).expect("a step of the usual path");
    }
    if to == QpState::Error {
        qp.modify(QpChange::Error).expect("any QP can fail");
    }
    assert_eq!(qp.state().expect("a state"), to);
}

fn change<B: Bench>(bench: &B, end: &End<B::Nic>, to: QpState) -> Result<(), Error> {
    match to {
        QpState::Reset => end.qp.modify(QpChange::Reset),
        QpState::Init => end.qp.modify(QpChange::Init),
        QpState::ReadyToReceive => bench.to_rtr((Client, &end.qp), (Client, &end.qp)),
        QpState::ReadyToSend => end.qp.modify(QpChange::ReadyToSend),
        QpState::Error => end.qp.modify(QpChange::Error),
    }
}

fn transitions<B: Bench>(bench: &B) {
    use QpState::*;
    let end = End::new(bench.client(), &Shape::default());
    let all = [Reset, Init, ReadyToReceive, ReadyToSend, Error];
    for from in all {
        for to in all {
            bring(bench, &end, from);
            let may = matches!(
                (from, to),
                (_, Reset | Error)
                    | (Reset, Init)
                    | (Init, ReadyToReceive)
                    | (ReadyToReceive, ReadyToSend)
            );
            let done = change(bench, &end, to);
            assert_eq!(done.is_ok(), may, "{from:?} to {to:?}: {done:?}");
            let now = if may { to } else { from };
            assert_eq!(end.qp.state().expect("a state"), now, "{from:?} to {to:?}");
        }
    }
}

fn receive_in_reset<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let post = |id| p.server.qp.post_recv(&ReceiveRequest { id, to: &[p.server.sge(0, 8)] });
    p.server.qp.modify(QpChange::Reset).expect("any QP can be reset");
    let refused = post(1);
    assert!(matches!(refused, Err(Error::NotReady { .. })), "{refused:?}");
    p.server.qp.modify(QpChange::Init).expect("Reset to Init");
    post(2).expect("Init takes receives");
    bench.to_rtr((Server, &p.server.qp), (Client, &p.client.qp)).expect("Init to RTR");
    post(3).expect("RTR takes receives");
    let client = &p.client.qp;
    client.modify(QpChange::Reset).expect("any QP can be reset");
    client.modify(QpChange::Init).expect("Reset to Init");
    bench.to_rtr((Client, client), (Server, &p.server.qp)).expect("Init to RTR");
    client.modify(QpChange::ReadyToSend).expect("RTR to RTS");
    for id in [2, 3] {
        p.client.ok(Op::SendInline { data: &[1] });
        let c = p.server.next();
        assert_eq!((c.id, c.status), (id, Status::Success));
    }
}

fn send_before_rts<B: Bench>(bench: &B) {
    let end = End::new(bench.client(), &Shape::default());
    let nop = [WorkRequest { id: 1, op: Op::Nop, signaled: true }];
    for state in [QpState::Reset, QpState::Init, QpState::ReadyToReceive] {
        bring(bench, &end, state);
        let refused = end.qp.post_send(&nop);
        assert!(matches!(refused, Err(Error::NotReady { .. })), "{state:?}: {refused:?}");
    }
    bring(bench, &end, QpState::ReadyToSend);
    assert_eq!(
        end.run(Op::Nop).status,
        Status::Success,
        "refused work must leave nothing in the queue"
    );
    end.nothing();
}

fn full_receive_queue<B: Bench>(bench: &B) {
    let receive = ReceiveAttr { entries: 4, max_sges: 1 };
    let p = Pair::of(bench, &Shape::default(), &Shape { receive, ..Shape::default() });
    let room = p.server.qp.query().expect("a description").recv_entries;
    let to = [p.server.sge(0, 8)];
    (0..room as u64).for_each(|id| p.server.receive(id, &to));
    let full = p.server.qp.post_recv(&ReceiveRequest { id: 99, to: &to });
    assert!(matches!(full, Err(Error::QueueFull { .. })), "{full:?}");
    for round in 0..3 * room as u64 {
        p.client.ok(Op::SendInline { data: &[1] });
        assert_eq!(p.server.next().id, round % room as u64);
        p.server.receive(round % room as u64, &to);
        let full = p.server.qp.post_recv(&ReceiveRequest { id: 99, to: &to });
        assert!(matches!(full, Err(Error::QueueFull { .. })), "{full:?}");
    }
}

fn longer_scatter_list<B: Bench>(bench: &B) {
    let receive = ReceiveAttr { entries: 4, max_sges: 2 };
    let p = Pair::of(bench, &Shape::default(), &Shape { receive, ..Shape::default() });
    let to = vec![p.server.sge(0, 8); 3];
    let refused = p.server.qp.post_recv(&ReceiveRequest { id: 1, to: &to });
    assert!(matches!(refused, Err(Error::BadRequest { .. })), "{refused:?}");
    p.server.receive(2, &to[..2]);
    p.client.ok(Op::SendInline { data: &[1; 16] });
    assert_eq!(p.server.next().id, 2, "a refused receive must not be posted");
    let most = p.client.nic.caps().max_sges as usize;
    let from = vec![p.client.sge(0, 1); most + 1];
    let op = Op::Write { to: p.server.at(0), from: &from };
    let refused = p.client.qp.post_send(&[WorkRequest { id: 3, op, signaled: true }]);
    assert!(matches!(refused, Err(Error::BadRequest { .. })), "{refused:?}");
    p.client.ok(Op::Write { to: p.server.at(0), from: &from[..most] });
}

fn full_send_queue<B: Bench>(bench: &B) {
    let small = Shape { send_blocks: 8, ..Shape::default() };
    let p = Pair::of(bench, &small, &Shape::default());
    let (c, s) = (&p.client, &p.server);
    let room = c.qp.query().expect("a description").send_blocks as u64;
    // No receive is posted, so nothing completes.
    let send = |id| WorkRequest { id, op: Op::SendInline { data: &[1] }, signaled: true };
    (0..room).for_each(|id| c.qp.post_send(&[send(id)]).expect("there is room"));
    for list in [&[send(98)][..], &[send(98), send(99)]] {
        let full = c.qp.post_send(list);
        assert!(matches!(full, Err(Error::QueueFull { .. })), "{full:?}");
    }
    for id in 0..room {
        s.receive(id, &[s.sge(0, 8)]);
        assert_eq!(c.next().id, id);
        assert_eq!(s.next().id, id);
    }
    c.nothing();
    // A list is posted as a whole or not at all.
    let list: Vec<_> =
        (0..room + 1).map(|id| WorkRequest { id, op: Op::Nop, signaled: true }).collect();
    assert!(c.qp.post_send(&list).is_err());
    c.qp.post_send(&list[1..]).expect("there is room");
    (1..=room).for_each(|id| assert_eq!(c.next().id, id));
}

fn flush<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    (0..3).for_each(|id| c.receive(10 + id, &[c.sge(0, 8)]));
    let bad = Remote { rkey: crate::Key(0xdead_be00), ..s.at(0) };
    let ok = Op::WriteInline { to: s.at(0), data: &[1] };
    let list = [ok, Op::WriteInline { to: bad, data: &[2] }, ok, Op::Nop];
    let mut id = 0;
    let list = list.map(|op| {
        id += 1;
        WorkRequest { id, op, signaled: id != 3 }
    });
    c.qp.post_send(&list).expect("posting");
    let first = c.next();
    assert_eq!((first.id, first.status, first.opcode), (1, Status::Success, WcOpcode::Write));
    let second = c.next();
    assert_eq!((second.id, second.status), (2, Status::RemoteAccess));
    // The remaining work is flushed, even if unsignaled; sends and receives each in posting order.
    let mut rest: Vec<_> = (0..5).map(|_| c.next()).collect();
    assert!(rest.iter().all(|c| c.status == Status::Flushed), "{rest:?}");
    rest.sort_by_key(|c| c.kind == CompletionKind::Receive);
    let ids: Vec<_> = rest.iter().map(|c| c.id).collect();
    assert_eq!(ids, [3, 4, 10, 11, 12]);
    c.nothing();
    assert_eq!(s.get(0, 1), [1]);
    assert_eq!(s.qp.state().expect("a state"), QpState::Error);
}

fn posted_in_error<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let c = &p.client;
    c.qp.modify(QpChange::Error).expect("any QP can fail");
    assert_eq!(c.run(Op::Nop).status, Status::Flushed);
    c.receive(5, &[c.sge(0, 8)]);
    // A receive has no doorbell.
    let done = c.next();
    assert_eq!((done.id, done.status, done.kind), (5, Status::Flushed, CompletionKind::Receive));
    // The peer notices the error when it sends a request.
    assert_eq!(p.server.run(Op::SendInline { data: &[1] }).status, Status::RetryExceeded);
}

fn reset_and_start_again<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let numbers = [c.qp.qpn(), s.qp.qpn()];
    for round in 0..3 {
        // A SEND and receives that cannot complete.
        c.receive(1, &[]);
        c.post(2, Op::SendInline { data: &[1] });
        c.qp.modify(QpChange::Reset).expect("any QP can be reset");
        let mut ends = [c.next(), c.next()].map(|c| (c.id, c.status));
        ends.sort_by_key(|end| end.0);
        assert_eq!(
            ends,
            [(1, Status::Flushed), (2, Status::Flushed)],
            "the posted work must be flushed"
        );
        connect(bench, &c.qp, &s.qp);
        assert_eq!([c.qp.qpn(), s.qp.qpn()], numbers);
        for i in 0..40u8 {
            s.receive(i as u64, &[s.sge(0, 8)]);
            c.ok(Op::SendInline { data: &[i, round] });
            assert_eq!(s.next().id, i as u64);
            assert_eq!(s.get(0, 2), [i, round]);
        }
    }
}

fn responds_in_rtr<B: Bench>(bench: &B) {
    let p = Pair::unconnected(bench, &Shape::default(), &Shape::default());
    let (c, s) = (&p.client, &p.server);
    for qp in [&c.qp, &s.qp] {
        qp.modify(QpChange::Init).expect("Reset to Init");
    }
    bench.to_rtr((Server, &s.qp), (Client, &c.qp)).expect("Init to RTR");
    bench.to_rtr((Client, &c.qp), (Server, &s.qp)).expect("Init to RTR");
    c.qp.modify(QpChange::ReadyToSend).expect("RTR to RTS");
    c.ok(Op::WriteInline { to: s.at(0), data: &[3] });
    assert_eq!((s.get(0, 1), s.qp.state().expect("a state")), (vec![3], QpState::ReadyToReceive));
    s.qp.modify(QpChange::ReadyToSend).expect("RTR to RTS");
    s.ok(Op::WriteInline { to: c.at(0), data: &[4] });
    // In Init the QP does not answer.
    s.qp.modify(QpChange::Reset).expect("any QP can be reset");
    s.qp.modify(QpChange::Init).expect("Reset to Init");
    let op = Op::WriteInline { to: s.at(0), data: &[5] };
    assert_eq!(c.run(op).status, Status::RetryExceeded);
    assert_eq!(s.get(0, 1), [3]);
}

fn end_of_the_peer<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let End { nic: _, pd: _, cq: _, qp, mr } = p.server;
    let to = crate::MemoryRegion::remote(&mr, 0);
    drop(qp);
    let c = p.client.run(Op::WriteInline { to, data: &[1] });
    assert_eq!(c.status, Status::RetryExceeded);
    assert_eq!(p.client.qp.state().expect("a state"), QpState::Error);
}

fn waits_for_its_receive<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    c.post(1, Op::SendInline { data: b"late" });
    c.post(2, Op::WriteInline { to: s.at(64), data: &[9] });
    c.nothing();
    assert_eq!(s.get(64, 1), [0], "later work must wait too");
    s.receive(3, &[s.sge(0, 8)]);
    assert_eq!((c.next().id, c.next().id), (1, 2));
    assert_eq!((s.next().bytes, s.get(0, 4), s.get(64, 1)), (4, b"late".to_vec(), vec![9]));
}

fn change_rights<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let write = Op::WriteInline { to: s.at(0), data: &[1] };
    let access = |access| s.qp.modify(QpChange::Access { access });
    c.ok(write);
    access(Access::REMOTE_READ).expect("rights change in RTS");
    assert_eq!(s.qp.query().expect("a description").access, Access::REMOTE_READ);
    c.ok(Op::Read { from: s.at(0), to: &[c.sge(0, 1)] });
    p.refused(write, Status::RemoteAccess);
    access(Access::REMOTE_ALL).expect("rights change in RTS");
    c.ok(write);
    for state in [QpState::Reset, QpState::Error] {
        bring(bench, s, state);
        assert!(access(Access::REMOTE_ALL).is_err(), "{state:?}");
    }
}
