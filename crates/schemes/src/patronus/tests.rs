//! Tests of the memory node's turns. The test posts requests by hand on the inline NIC, and its
//! thread is the memory node's CPU, so that it knows what one turn takes.

mod turns;

use std::time::Duration;

use rnic::nic::SoftNic;
use scheme::{
    ClientId, ConnectRequest, DomainToken, GroupId, LeaseStatus, NodeScheme, NodeSettings, Others,
    Right, Scheme, Sharing,
};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr, QpChange, Qpn,
    QueuePair, Receive, ReceiveAttr, ReceiveRequest, Status, WorkRequest,
};

use super::message::{
    Ask, AskTerms, Granted, ObjectId, Outcome, PermissionNumber, REPLY_BYTES, Reply, Request,
};
use super::*;

/// Requests of a compute node in flight.
const CREDITS: u32 = 16;

fn settings(scheme: Scheme) -> NodeSettings {
    let settings = NodeSettings::new(scheme, 64, 4096);
    NodeSettings { credits: CREDITS, clients_max: 4, ..settings }
}

/// A compute node whose requests the test posts.
struct Hand {
    cq: <SoftNic as Nic>::Cq,
    qp: <SoftNic as Nic>::Qp,
    _access: Vec<<SoftNic as Nic>::Qp>,
    memory: <SoftNic as Nic>::Mr,
    /// Requests without reply.
    asked: usize,
}

impl Hand {
    fn join(nic: &SoftNic, node: &mut Node<SoftNic>, settings: &NodeSettings, id: u32) -> Self {
        Self::join_in(nic, node, settings, (id, None))
    }

    fn join_in(
        nic: &SoftNic,
        node: &mut Node<SoftNic>,
        settings: &NodeSettings,
        (id, domain): (u32, Option<DomainToken>),
    ) -> Self {
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false }).unwrap();
        let qp = |receive, access| {
            let attr = QpAttr { send_cq: &cq, recv_cq: &cq, send_blocks: 64, receive, access };
            nic.create_qp(&pd, attr).unwrap()
        };
        let own = Receive::Own(ReceiveAttr { entries: 64, max_sges: 1 });
        let management = qp(own, Access::REMOTE_WRITE);
        let lanes = settings.lanes() * (1 + node.spares());
        let access: Vec<_> = (0..lanes).map(|_| qp(Receive::None, Access::NONE)).collect();
        let memory = nic.alloc_dma(4096).unwrap();
        let memory = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
        let request = ConnectRequest {
            management: vec![management.qpn().raw()],
            groups: vec![access.iter().map(|qp| qp.qpn().raw()).collect()],
            domain,
            ..ConnectRequest::default()
        };
        let admitted = node.admit(ClientId(id), &request).unwrap();
        management.connect(Qpn::new(admitted.management[0])).unwrap();
        Self { cq, qp: management, _access: access, memory, asked: 0 }
    }

    /// Sends a request, which the next turn takes.
    fn ask(&mut self, ask: Ask) {
        let to = [self.memory.sge(self.asked * REPLY_BYTES, REPLY_BYTES as u32)];
        self.qp.post_recv(&ReceiveRequest { id: 1, to: &to }).unwrap();
        self.send(ask);
        self.asked += 1;
    }

    /// Sends a request without a receive for its reply.
    fn send(&self, ask: Ask) {
        let data = Request { number: self.asked as u64, ask }.to_bytes();
        let op = Op::SendInline { data: &data };
        self.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
    }

    /// Connects again to the memory node's QP. Requests without reply are lost.
    fn reconnect(&mut self, qpn: u32) {
        self.qp.modify(QpChange::Reset).unwrap();
        self.qp.connect(Qpn::new(qpn)).unwrap();
        while self.cq.poll(&mut [Completion::EMPTY; 64]) > 0 {}
        self.asked = 0;
    }

    /// The outcomes of all requests, in their order. All must be answered.
    fn outcomes(&mut self) -> Vec<Outcome> {
        let asked = std::mem::take(&mut self.asked);
        let mut done = [Completion::EMPTY; 64];
        assert_eq!(self.cq.poll(&mut done), 2 * asked, "a request is not answered");
        assert!(done[..2 * asked].iter().all(|c| c.status == Status::Success));
        let mut replies: Vec<Reply> = (0..asked)
            .map(|at| {
                let mut bytes = [0; REPLY_BYTES];
                self.memory.memory().read(at * REPLY_BYTES, &mut bytes);
                Reply::parse(&bytes).expect("a reply")
            })
            .collect();
        replies.sort_by_key(|reply| reply.number);
        replies.into_iter().map(|reply| reply.outcome).collect()
    }

    fn grants(&mut self) -> Vec<Granted> {
        let outcomes = self.outcomes().into_iter();
        let granted = outcomes.filter_map(|outcome| match outcome {
            Outcome::Granted(granted) => Some(granted),
            Outcome::Done => None,
            other => panic!("{other:?}"),
        });
        granted.collect()
    }
}

/// Lease of permissions that expire, as in the paper's experiments.
const LEASE_US: u64 = 100;

fn terms(lease_us: u64) -> AskTerms {
    AskTerms {
        group: GroupId(0),
        right: Right::Write,
        sharing: Sharing::Exclusive,
        lease_us,
        wait_us: 0,
    }
}

/// Permissions that each of two compute nodes holds.
const EACH: usize = 4;
/// Turns in each of which all permissions end and as many begin.
const TURNS: usize = 20;

/// Two compute nodes, each with two sets of objects that have permissions by turns.
struct Bed {
    nic: SoftNic,
    node: Node<SoftNic>,
    hands: [Hand; 2],
    objects: [[Vec<ObjectId>; 2]; 2],
    held: [Vec<PermissionNumber>; 2],
}

impl Bed {
    /// The permissions over the first sets of objects are held, without an end.
    fn new(settings: &NodeSettings) -> Self {
        let nic = SoftNic::inline();
        let mut node = Node::new(&nic, settings).unwrap();
        let hands = [1, 2].map(|id| Hand::join(&nic, &mut node, settings, id));
        let (objects, held) = Default::default();
        let mut bed = Self { nic, node, hands, objects, held };
        for set in [1, 0] {
            for hand in &mut bed.hands {
                let (terms, others) = (terms(1_000_000), Others::None);
                (0..EACH).for_each(|_| hand.ask(Ask::Allocate { terms, bytes: 64, others }));
            }
            bed.turn();
            for (at, hand) in bed.hands.iter_mut().enumerate() {
                let granted = hand.grants();
                bed.objects[set][at] = granted.iter().map(|granted| granted.object).collect();
                let numbers = granted.iter().map(|granted| granted.permission);
                match set {
                    0 => bed.held[at] = numbers.collect(),
                    _ => numbers.for_each(|permission| hand.ask(Ask::Revoke { permission })),
                }
            }
            bed.turn();
            bed.hands.iter_mut().for_each(|hand| drop(hand.outcomes()));
        }
        bed
    }

    fn turn(&mut self) {
        self.node.poll().unwrap();
    }

    /// One turn: all permissions end, and those over the sets `next` begin.
    fn replace_all(&mut self, next: usize, lease_us: u64, revoke: bool) {
        for (at, hand) in self.hands.iter_mut().enumerate() {
            for object in &self.objects[next][at] {
                let terms = terms(lease_us);
                hand.ask(Ask::Acquire { terms, object: *object, offset: 0, len: 64 });
            }
            for permission in self.held[at].drain(..).filter(|_| revoke) {
                hand.ask(Ask::Revoke { permission });
            }
        }
        self.turn();
        for (hand, held) in self.hands.iter_mut().zip(&mut self.held) {
            held.extend(hand.grants().iter().map(|granted| granted.permission));
            assert_eq!(held.len(), EACH);
        }
    }

    fn status(&mut self) -> LeaseStatus {
        self.node.status().unwrap().lease.unwrap()
    }
}

/// What [`TURNS`] turns count, and the lifecycles in them. Permissions are revoked, or expire.
fn lifecycles(settings: &NodeSettings, expire: bool) -> (LeaseStatus, u64) {
    let mut bed = Bed::new(settings);
    let lease_us = if expire { LEASE_US } else { 1_000_000 };
    bed.replace_all(1, lease_us, true);
    let before = bed.status();
    for turn in 0..TURNS {
        if expire {
            let end = bed.nic.now() + Duration::from_micros(LEASE_US);
            while bed.nic.now() < end {
                std::hint::spin_loop();
            }
        }
        bed.replace_all(turn % 2, lease_us, !expire);
    }
    bed.node.audit().unwrap();
    let after = bed.status();
    let change = LeaseStatus {
        binds: after.binds - before.binds,
        unbinds: after.unbinds - before.unbinds,
        handovers: after.handovers - before.handovers,
        grants: after.grants - before.grants,
        revocations: after.revocations - before.revocations,
        expiries: after.expiries - before.expiries,
        ..LeaseStatus::default()
    };
    (change, (TURNS * 2 * EACH) as u64)
}

/// Patronus, table 4: window operations that bind, those that only unbind, and RPCs, of the
/// lifecycle of a permission, where each turn has as many ends as beginnings.
#[test]
fn techniques_save_window_operations_as_in_table_4() {
    for (name, [delay, contiguity, handover, expire], row) in [
        ("baseline", [false, false, false, false], [2, 2, 2]),
        ("+ delay", [true, false, false, false], [2, 1, 2]),
        ("+ contiguity", [true, true, false, false], [1, 1, 2]),
        ("+ handover", [true, true, true, false], [1, 0, 2]),
        ("+ expire", [true, true, true, true], [1, 0, 1]),
    ] {
        let settings = settings(PATRONUS_PAPER)
            .with("delay", delay)
            .with("contiguity", contiguity)
            .with("handover", handover);
        let (count, lifecycles) = lifecycles(&settings, expire);
        let binds = count.binds + count.handovers;
        let rpcs = count.grants + count.revocations;
        assert_eq!([binds, count.unbinds, rpcs], row.map(|each| each * lifecycles), "{name}");
        assert_eq!(count.expiries, if expire { lifecycles } else { 0 }, "{name}");
    }
    // Ours: one window, whose handover is within a compute node.
    let (count, lifecycles) = lifecycles(&settings(PATRONUS), false);
    assert_eq!((count.handovers, count.binds, count.unbinds), (lifecycles, 0, 0));
}
