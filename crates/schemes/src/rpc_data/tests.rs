//! Tests of the CPU against compute nodes that violate the protocol. Their requests are posted by
//! hand on the inline NIC, and the test's thread is the memory node's CPU.

use std::sync::atomic::{AtomicU64, Ordering};

use rnic::nic::SoftNic;
use scheme::{Atomic, ClientId, ConnectRequest, DomainToken, NodeScheme, NodeSettings, Others};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr, Qpn, QueuePair,
    Receive, ReceiveAttr, ReceiveRequest, Remote, Status, WorkRequest,
};

use super::message::{Ask, HEADER_BYTES, ObjectId, Outcome, Range};
use super::*;

const DATA: usize = 256;
const MESSAGE: usize = HEADER_BYTES + DATA;

fn start(chunks: u64) -> (SoftNic, Node<SoftNic>) {
    let nic = SoftNic::inline();
    let settings = NodeSettings::new(RPC_DATA, chunks, 4096).with("data_bytes", DATA);
    let settings = NodeSettings { credits: 4, clients_max: 4, ..settings };
    let node = Node::new(&nic, &settings).unwrap();
    (nic, node)
}

/// A compute node whose requests the test posts directly.
struct Hand {
    id: ClientId,
    cq: <SoftNic as Nic>::Cq,
    qp: <SoftNic as Nic>::Qp,
    access: <SoftNic as Nic>::Qp,
    /// A message to send, and behind it a message that is received.
    memory: <SoftNic as Nic>::Mr,
    number: AtomicU64,
}

impl Hand {
    fn join(nic: &SoftNic, node: &mut Node<SoftNic>, id: u32, domain: u8) -> Self {
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false }).unwrap();
        let attr = |receive| QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 64,
            receive,
            access: Access::NONE,
        };
        let own = Receive::Own(ReceiveAttr { entries: 32, max_sges: 1 });
        let qp = nic.create_qp(&pd, attr(own)).unwrap();
        let lanes = [(); 2].map(|()| nic.create_qp(&pd, attr(Receive::None)).unwrap());
        let memory = nic.alloc_dma(2 * MESSAGE).unwrap();
        let memory = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
        let request = ConnectRequest {
            management: vec![qp.qpn().raw()],
            groups: vec![lanes.iter().map(|qp| qp.qpn().raw()).collect()],
            domain: Some(DomainToken([domain; 32])),
            ..ConnectRequest::default()
        };
        let id = ClientId(id);
        let admitted = node.admit(id, &request).unwrap();
        qp.connect(Qpn::new(admitted.management[0])).unwrap();
        for (lane, peer) in lanes.iter().zip(&admitted.groups[0]) {
            lane.connect(Qpn::new(*peer)).unwrap();
        }
        let [access, _] = lanes;
        Self { id, cq, qp, access, memory, number: AtomicU64::new(1) }
    }

    fn receive(&self) {
        let to = [self.memory.sge(MESSAGE, MESSAGE as u32)];
        self.qp.post_recv(&ReceiveRequest { id: 1, to: &to }).unwrap();
    }

    fn send(&self, message: &[u8]) {
        self.memory.memory().write(0, message);
        let from = [self.memory.sge(0, message.len() as u32)];
        let op = Op::Send { from: &from };
        self.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
    }

    fn completions(&self) -> Vec<Completion> {
        let mut all = vec![Completion::EMPTY; 64];
        let n = self.cq.poll(&mut all);
        all.truncate(n);
        all
    }

    /// Sends a message with a header and `data`, polls the CPU, and returns the outcome and the
    /// data of the reply.
    fn say(&self, node: &mut Node<SoftNic>, header: &[u8], data: &[u8]) -> (Outcome, Vec<u8>) {
        self.receive();
        self.send(&[header, data].concat());
        assert!(node.poll().unwrap());
        let all = self.completions();
        assert!(all.len() == 2 && all.iter().all(|c| c.status == Status::Success), "{all:?}");
        let received = all.iter().find(|c| c.id == 1).expect("a reply").bytes as usize;
        let mut reply = vec![0; received];
        self.memory.memory().read(MESSAGE, &mut reply);
        let header = reply[..HEADER_BYTES].try_into().expect("a header");
        let (_, outcome) = Outcome::parse(header);
        (outcome.expect("a valid reply"), reply.split_off(HEADER_BYTES))
    }

    fn ask(&self, node: &mut Node<SoftNic>, ask: Ask, data: &[u8]) -> Outcome {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        self.say(node, &ask.to_bytes(number), data).0
    }

    fn allocate(&self, node: &mut Node<SoftNic>, bytes: u64, others: Others) -> ObjectId {
        match self.ask(node, Ask::Allocate { bytes, others }, &[]) {
            Outcome::Allocated(object) => object,
            other => panic!("{other:?}"),
        }
    }

    fn read(&self, node: &mut Node<SoftNic>, object: ObjectId, len: u32) -> Vec<u8> {
        let ask = Ask::Read(Range { object, offset: 0, len });
        let (outcome, data) = self.say(node, &ask.to_bytes(0), &[]);
        assert_eq!((outcome, data.len()), (Outcome::Done, len as usize));
        data
    }
}

/// Requests that cannot be decoded, are too short or too long, or have impossible values.
#[test]
fn bad_requests_are_answered_and_change_nothing() {
    let (nic, mut node) = start(4);
    let node = &mut node;
    let (hand, other) = (Hand::join(&nic, node, 1, 1), Hand::join(&nic, node, 2, 1));
    let object = hand.allocate(node, 100, Others::Write);
    assert_eq!(
        other.ask(node, Ask::Write(Range { object, offset: 0, len: 100 }), &[7; 100]),
        Outcome::Done
    );
    let range = |offset, len| Range { object, offset, len };
    let write = Ask::Write(range(0, 8)).to_bytes(0);
    let mut unknown = write;
    unknown[0] = 99;
    let mut nobody = Ask::Allocate { bytes: 64, others: Others::None }.to_bytes(0);
    nobody[1] = 4;
    let none = [0; HEADER_BYTES];
    for (header, data) in [
        (&write[..], &[1; 7][..]),
        (&write, &[1; 9]),
        (&write, &[]),
        (&write[..63], &[]),
        (&[], &[]),
        (&unknown, &[1; 8]),
        (&nobody, &[]),
        (&none, &[]),
    ] {
        assert_eq!(hand.say(node, header, data), (Outcome::BadRequest, vec![]));
    }
    let swap = Atomic::CompareAndSwap { expected: 0, new: 1 };
    let bad = [
        Ask::Read(range(0, DATA as u32 + 1)),
        Ask::Read(range(0, u32::MAX)),
        Ask::Atomic { object, offset: 4, atomic: swap },
        Ask::Allocate { bytes: 0, others: Others::None },
    ];
    for ask in bad {
        assert_eq!(hand.ask(node, ask, &[]), Outcome::BadRequest, "{ask:?}");
    }
    let (entry, generation) = (object.entry, object.generation);
    let named = |object| Range { object, offset: 0, len: 8 };
    let no_such = [
        Ask::Read(range(93, 8)),
        Ask::Read(range(u64::MAX, 8)),
        Ask::Read(range(u64::MAX - 7, 8)),
        Ask::Atomic { object, offset: 96, atomic: swap },
        Ask::Atomic { object, offset: u64::MAX - 7, atomic: swap },
        Ask::Read(named(ObjectId { entry, generation: generation + 1 })),
        Ask::Read(named(ObjectId { entry: entry + 1, generation })),
        Ask::Read(named(ObjectId { entry: u32::MAX, generation })),
        Ask::Free { object: ObjectId { entry: u32::MAX, generation } },
    ];
    for ask in no_such {
        assert_eq!(hand.ask(node, ask, &[]), Outcome::NoSuchObject, "{ask:?}");
    }
    assert_eq!(hand.ask(node, Ask::Write(range(93, 8)), &[1; 8]), Outcome::NoSuchObject);
    let most = node.status().unwrap();
    assert_eq!(most.refused, 8 + 4 + 9 + 1);
    assert_eq!(hand.read(node, object, 100), [7; 100]);
    node.audit().unwrap();
}

/// A compute node of another domain learns nothing and changes nothing, whatever name it guesses.
#[test]
fn other_domains_have_no_access() {
    let (nic, mut node) = start(4);
    let node = &mut node;
    let (owner, thief) = (Hand::join(&nic, node, 1, 1), Hand::join(&nic, node, 2, 2));
    let object = owner.allocate(node, 64, Others::Own);
    let range = Range { object, offset: 0, len: 8 };
    assert_eq!(owner.ask(node, Ask::Write(range), &[5; 8]), Outcome::Done);
    let atomic = Atomic::FetchAndAdd { add: 1 };
    for (ask, data) in [
        (Ask::Read(range), &[][..]),
        (Ask::Write(range), &[6; 8]),
        (Ask::Atomic { object, offset: 0, atomic }, &[]),
        (Ask::Free { object }, &[]),
    ] {
        assert_eq!(thief.ask(node, ask, data), Outcome::NoSuchObject, "{ask:?}");
    }
    assert_eq!(owner.read(node, object, 8), [5; 8]);
    // The data of an earlier, longer request of the same slot is not sent.
    let own = thief.allocate(node, 64, Others::None);
    assert_eq!(thief.read(node, own, 64), [0; 64]);
}

/// A message that is longer than a receive breaks its sender's QP only.
#[test]
fn oversized_message_breaks_only_its_senders_qp() {
    let (nic, mut node) = start(4);
    let node = &mut node;
    let (bad, good) = (Hand::join(&nic, node, 1, 1), Hand::join(&nic, node, 2, 2));
    let object = bad.allocate(node, 64, Others::None);
    let from = [bad.memory.sge(0, MESSAGE as u32 + 1)];
    let op = Op::Send { from: &from };
    bad.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
    node.poll().unwrap();
    assert_ne!(bad.completions()[0].status, Status::Success);
    assert!(!node.management_is_open(bad.id).unwrap());
    good.allocate(node, 64, Others::None);
    // After a reset it goes on, and has kept its object.
    bad.qp.modify(verbs::QpChange::Reset).unwrap();
    let qpn = node.reset_management(bad.id).unwrap().expect("at once")[0];
    bad.qp.connect(Qpn::new(qpn)).unwrap();
    bad.completions();
    assert_eq!(bad.read(node, object, 8), [0; 8]);
    node.audit().unwrap();
}

/// The access QPs reach no memory, whatever key is tried: no region has remote rights.
#[test]
fn access_qps_open_nothing() {
    let (nic, mut node) = start(1);
    let hand = Hand::join(&nic, &mut node, 1, 1);
    let object = hand.allocate(&mut node, 64, Others::None);
    let base = node.shared_memory().addr();
    for key in (0..1024).map(verbs::Key) {
        let to = [hand.memory.sge(0, 8)];
        let op = Op::Read { from: Remote { addr: base, rkey: key }, to: &to };
        hand.access.post_send(&[WorkRequest { id: 3, op, signaled: true }]).unwrap();
        assert_ne!(hand.completions()[0].status, Status::Success);
        hand.access.modify(verbs::QpChange::Reset).unwrap();
        let qpn = node.reset_access(hand.id, scheme::GroupId(0), scheme::Lane(0)).unwrap();
        hand.access.connect(Qpn::new(qpn)).unwrap();
    }
    assert_eq!(hand.read(&mut node, object, 8), [0; 8]);
}

/// A grant whose reply is not received is taken back, also one of an object for others.
#[test]
fn undelivered_objects_are_freed() {
    let (nic, mut node) = start(2);
    let node = &mut node;
    let (hand, asks) = (Hand::join(&nic, node, 1, 1), Hand::join(&nic, node, 2, 1));
    for others in [Others::None, Others::Own] {
        let ask = Ask::Allocate { bytes: 4096, others };
        // Without a receive, the reply waits; the reset of the QP drops it.
        hand.send(&ask.to_bytes(1));
        node.poll().unwrap();
        assert_eq!(node.status().unwrap().free, 1);
        hand.qp.modify(verbs::QpChange::Reset).unwrap();
        let qpn = node.reset_management(hand.id).unwrap().expect("at once")[0];
        hand.qp.connect(Qpn::new(qpn)).unwrap();
        hand.completions();
        node.poll().unwrap();
        assert_eq!(node.status().unwrap().free, 2);
    }
    hand.send(&Ask::Allocate { bytes: 4096, others: Others::Own }.to_bytes(1));
    node.poll().unwrap();
    node.retire(hand.id).unwrap();
    while !node.is_retired(hand.id) {
        node.poll().unwrap();
    }
    assert_eq!(node.status().unwrap().free, 2);
    asks.allocate(node, 8192, Others::None);
    node.audit().unwrap();
}

/// Atomic operations of several cores are atomic with respect to each other.
#[test]
fn atomics_of_several_cores_are_atomic() {
    const ADDS: u64 = 2000;
    let nic = SoftNic::inline();
    let settings = NodeSettings::new(RPC_DATA, 2, 4096).with("cores", 2).with("data_bytes", DATA);
    let mut node = Node::new(&nic, &NodeSettings { clients_max: 2, ..settings }).unwrap();
    let hands = [1, 2].map(|id| Hand::join(&nic, &mut node, id, 1));
    let ask = Ask::Allocate { bytes: 64, others: Others::Write }.to_bytes(0);
    hands[0].receive();
    hands[0].send(&ask);
    node.poll().unwrap();
    hands.iter().for_each(|hand| drop(hand.completions()));
    let object = ObjectId { entry: 0, generation: 0 };
    let workers = node.cpu().workers;
    assert_eq!(workers.len(), 2);
    std::thread::scope(|scope| {
        for (hand, mut worker) in hands.iter().zip(workers) {
            scope.spawn(move || {
                for add in 0..ADDS {
                    let atomic = match add % 2 {
                        0 => Atomic::FetchAndAdd { add: 1 },
                        // Never equal: a CAS that fails changes nothing.
                        _ => Atomic::CompareAndSwap { expected: u64::MAX, new: 0 },
                    };
                    hand.receive();
                    hand.send(&Ask::Atomic { object, offset: 8, atomic }.to_bytes(add));
                    while !worker.poll().unwrap() {}
                    assert!(hand.completions().iter().all(|c| c.status == Status::Success));
                }
            });
        }
    });
    let data = hands[0].read(&mut node, object, 16);
    assert_eq!(data[8..], ADDS.to_be_bytes());
}
