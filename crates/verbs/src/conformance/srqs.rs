//! Shared receive queues (IBTA vol. 1, chapter 10, shared receive queue).

use super::pair::{End, Pair, Shape, connect};
use super::{Bench, Case, always, never, with};
use crate::{
    Access, AsyncEvent, Error, Feature, Nic, Op, QpAttr, QpChange, QpState, QueuePair, Receive,
    ReceiveAttr, ReceiveQueue, ReceiveRequest, Status, WorkRequest,
};

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    vec![
        always("srqs.traffic", &["test_srq.test_rc_srq_traffic"], traffic),
        always("srqs.query", &[], query),
        always("srqs.full", &[], full),
        always("srqs.outlive_an_error", &[], outlive_an_error),
        with(Feature::SrqLimit, "srqs.limit", &["test_srq.test_modify_srq_limit"], limit),
        with(Feature::AsyncEvents, "srqs.last_wqe_reached", &[], last_wqe_reached),
        never(
            "srqs.resize",
            &["test_srq.test_resize_srq"],
            "an SRQ cannot be resized: create it for all receives that can be in flight",
        ),
    ]
}

/// Queue pairs of the server that share one SRQ, each connected to a queue pair of the client.
struct Shared<'a, B: Bench> {
    pair: Pair<'a, B>,
    srq: <B::Nic as Nic>::Srq,
    clients: Vec<<B::Nic as Nic>::Qp>,
    servers: Vec<<B::Nic as Nic>::Qp>,
}

impl<'a, B: Bench> Shared<'a, B> {
    fn new(bench: &'a B, count: usize) -> Self {
        let pair = Pair::unconnected(bench, &Shape::default(), &Shape::default());
        let attr = ReceiveAttr { entries: 16, max_sges: 1 };
        let srq = pair.server.nic.create_srq(&pair.server.pd, attr).expect("an SRQ");
        fn qp<N: Nic>(end: &End<N>, receive: Receive<'_, N>) -> N::Qp {
            let (send_cq, recv_cq) = (&end.cq, &end.cq);
            let attr =
                QpAttr { send_cq, recv_cq, send_blocks: 32, receive, access: Access::REMOTE_ALL };
            end.nic.create_qp(&end.pd, attr).expect("a QP")
        }
        let clients: Vec<_> = (0..count).map(|_| qp(&pair.client, Receive::None)).collect();
        let servers: Vec<_> = (0..count).map(|_| qp(&pair.server, Receive::Shared(&srq))).collect();
        clients.iter().zip(&servers).for_each(|(c, s)| connect(bench, c, s));
        Self { pair, srq, clients, servers }
    }

    /// Posts a 64-byte receive for slot `id`.
    fn post(&self, id: u64) -> Result<(), Error> {
        let to = [self.pair.server.sge(id as usize * 64, 64)];
        self.srq.post_recv(&ReceiveRequest { id, to: &to })
    }

    /// Sends `data` from client `i`.
    fn send(&self, i: usize, data: &[u8]) -> Status {
        let send = WorkRequest { id: 7, op: Op::SendInline { data }, signaled: true };
        self.clients[i].post_send(&[send]).expect("posting");
        let c = self.pair.client.next();
        assert_eq!((c.id, c.qpn), (7, self.clients[i].qpn()));
        c.status
    }
}

fn traffic<B: Bench>(bench: &B) {
    let t = Shared::new(bench, 3);
    (0..16).for_each(|id| t.post(id).expect("there is room"));
    for round in 0..40u8 {
        for i in 0..3u8 {
            assert_eq!(t.send(i as usize, &[round, i]), Status::Success);
            let c = t.pair.server.next();
            assert_eq!((c.status, c.bytes), (Status::Success, 2));
            assert_eq!(c.qpn, t.servers[i as usize].qpn(), "the receiving QP");
            assert_eq!(c.id, (round as u64 * 3 + i as u64) % 16, "in the order of the queue");
            assert_eq!(t.pair.server.get(c.id as usize * 64, 2), [round, i]);
            t.post(c.id).expect("a completed entry can be posted again");
        }
    }
    let own = t.servers[0].post_recv(&ReceiveRequest { id: 1, to: &[] });
    assert!(
        matches!(own, Err(Error::BadRequest { .. })),
        "the QP has no receive queue of its own: {own:?}"
    );
}

fn query<B: Bench>(bench: &B) {
    let t = Shared::new(bench, 1);
    let info = t.srq.query().expect("a description");
    assert!(info.entries >= 16);
    assert_eq!((info.posted, info.limit), (0, 0));
    (0..5).for_each(|id| t.post(id).expect("there is room"));
    assert_eq!(t.srq.query().expect("a description").posted, 5);
    t.send(0, &[1]);
    t.pair.server.next();
    assert_eq!(t.srq.query().expect("a description").posted, 4);
}

fn full<B: Bench>(bench: &B) {
    let t = Shared::new(bench, 1);
    let room = t.srq.query().expect("a description").entries as u64;
    (0..room).for_each(|id| t.post(id).expect("there is room"));
    assert!(matches!(t.post(room), Err(Error::QueueFull { .. })));
    t.send(0, &[1]);
    assert!(matches!(t.post(room), Err(Error::QueueFull { .. })), "not polled yet");
    assert_eq!(t.pair.server.next().id, 0);
    t.post(0).expect("there is room again");
}

fn outlive_an_error<B: Bench>(bench: &B) {
    let t = Shared::new(bench, 2);
    (0..4).for_each(|id| t.post(id).expect("there is room"));
    t.servers[0].modify(QpChange::Error).expect("any QP can fail");
    t.pair.server.nothing();
    assert_eq!(
        t.srq.query().expect("a description").posted,
        4,
        "the SRQ's receives must not be flushed"
    );
    assert_eq!(t.send(1, &[5]), Status::Success);
    assert_eq!(t.pair.server.next().id, 0);
    // A message that is too long fails its own connection only.
    let long = [0; 65];
    assert_eq!(t.send(1, &long), Status::RemoteInvalidRequest);
    let c = t.pair.server.next();
    assert_eq!((c.id, c.status, c.qpn), (1, Status::LocalLength, t.servers[1].qpn()));
    connect(bench, &t.clients[0], &t.servers[0]);
    assert_eq!(t.send(0, &[6]), Status::Success);
    assert_eq!(t.pair.server.next().id, 2);
}

fn limit<B: Bench>(bench: &B) {
    let t = Shared::new(bench, 1);
    let srqn = t.srq.srqn();
    let low = |e: &AsyncEvent| *e == AsyncEvent::SrqLimit { srqn };
    let none = || {
        let events = t.pair.server.nic.take_events().expect("events").events;
        assert!(!events.iter().any(low), "{events:?}");
    };
    (0..10).for_each(|id| t.post(id).expect("there is room"));
    t.srq.set_limit(7).expect("a limit");
    assert_eq!(t.srq.query().expect("a description").limit, 7);
    for _ in 0..3 {
        t.send(0, &[1]);
        t.pair.server.next();
    }
    none();
    t.send(0, &[1]);
    t.pair.server.event(low);
    assert_eq!(t.srq.query().expect("a description").limit, 0, "once");
    t.send(0, &[1]);
    none();
    t.srq.set_limit(3).expect("a limit");
    t.srq.set_limit(0).expect("none");
    (0..4).for_each(|_| assert_eq!(t.send(0, &[1]), Status::Success));
    none();
    assert!(t.srq.set_limit(1 << 20).is_err(), "a limit beyond the SRQ size");
}

fn last_wqe_reached<B: Bench>(bench: &B) {
    let t = Shared::new(bench, 2);
    t.post(0).expect("there is room");
    let qpn = t.servers[1].qpn();
    t.servers[1].modify(QpChange::Error).expect("any QP can fail");
    t.pair.server.event(|e| *e == AsyncEvent::LastWqeReached { qpn });
    assert_eq!(t.servers[0].state().expect("a state"), QpState::ReadyToSend);
}
