//! Tests of the CPU against compute nodes that violate the protocol. Their requests are posted by
//! hand on the inline NIC, and the test's thread is the memory node's CPU.

use rnic::nic::SoftNic;
use scheme::{ClientId, ConnectRequest, GroupId, Lane, NodeScheme, NodeSettings, Scheme, bulletin};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr, QpState, Qpn,
    QueuePair, Receive, ReceiveAttr, ReceiveRequest, Status, WorkRequest,
};

use proptest::prelude::*;

use super::*;
use crate::blocks::CHUNK_ORDER;

mod node;
mod openings;
mod reconnect;

const CREDITS: u32 = 4;

/// The schemes by RPC.
const SCHEMES: [Scheme; 7] = [
    crate::RPC_MW_2,
    crate::RPC_MW_1,
    crate::FINE_MR,
    crate::STATIC_MR,
    crate::PREMMAP_RPC,
    crate::ONDEMAND_RPC,
    crate::SHARED_REGION,
];

fn settings(scheme: Scheme, chunks: u64) -> NodeSettings {
    let settings = NodeSettings::new(scheme, chunks, 4096);
    NodeSettings { credits: CREDITS, clients_max: 4, ..settings }
}

/// A compute node whose requests the test posts directly.
struct Hand {
    id: ClientId,
    cq: <SoftNic as Nic>::Cq,
    qp: <SoftNic as Nic>::Qp,
    access: <SoftNic as Nic>::Qp,
    memory: <SoftNic as Nic>::Mr,
}

/// Offset of the bulletin in a hand's memory.
const BULLETIN: usize = 2048;

impl Hand {
    fn join(nic: &SoftNic, node: &mut Node<SoftNic>, id: u32) -> Self {
        Self::join_with(nic, node, id, |_| {})
    }

    fn join_with(
        nic: &SoftNic,
        node: &mut Node<SoftNic>,
        id: u32,
        change: impl FnOnce(&mut ConnectRequest),
    ) -> Self {
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false }).unwrap();
        let attr = |receive, access| QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 64,
            receive,
            access,
        };
        let own = Receive::Own(ReceiveAttr { entries: 32, max_sges: 1 });
        let qp = nic.create_qp(&pd, attr(own, Access::REMOTE_WRITE)).unwrap();
        let lanes: Vec<_> = (0..2)
            .map(|_| nic.create_qp(&pd, attr(Receive::None, Access::NONE)).unwrap())
            .collect();
        let memory = nic.alloc_dma(4096).unwrap();
        let rights = Access::LOCAL_ALL | Access::REMOTE_WRITE;
        let memory = nic.reg_mr(&pd, &memory, rights).unwrap();
        let mut request = ConnectRequest {
            management: vec![qp.qpn().raw()],
            groups: vec![lanes.iter().map(|q| q.qpn().raw()).collect()],
            bulletin_addr: memory.remote(BULLETIN).addr,
            bulletin_rkey: memory.key().0,
            ..ConnectRequest::default()
        };
        change(&mut request);
        let id = ClientId(id);
        let admitted = node.admit(id, &request).unwrap();
        qp.connect(Qpn::new(admitted.management[0])).unwrap();
        for (lane, peer) in lanes.iter().zip(&admitted.groups[0]) {
            lane.connect(Qpn::new(*peer)).unwrap();
        }
        Self { id, cq, qp, access: lanes[0].clone(), memory }
    }

    fn receive(&self) {
        let to = [self.memory.sge(0, REPLY_BYTES as u32)];
        self.qp.post_recv(&ReceiveRequest { id: 1, to: &to }).unwrap();
    }

    fn send(&self, data: &[u8]) {
        let op = Op::SendInline { data };
        self.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
    }

    fn completions(&self) -> Vec<Completion> {
        let mut all = vec![Completion::EMPTY; 64];
        let n = self.cq.poll(&mut all);
        all.truncate(n);
        all
    }

    /// Sends a request, polls the CPU once, and reads the reply.
    fn ask(&self, node: &mut Node<SoftNic>, ask: Ask) -> Reply {
        self.receive();
        self.send(&Request { number: 77, ask }.to_bytes());
        assert!(node.poll().unwrap());
        assert!(self.completions().iter().all(|c| c.status == Status::Success));
        self.reply()
    }

    fn reply(&self) -> Reply {
        let mut bytes = [0; REPLY_BYTES];
        self.memory.memory().read(0, &mut bytes);
        let reply = Reply::parse(&bytes).expect("a reply");
        assert_eq!(reply.number, 77);
        reply
    }

    fn allocate(&self, node: &mut Node<SoftNic>) -> Reply {
        self.ask(node, Ask::Allocate { group: 0, order: CHUNK_ORDER })
    }

    fn bulletin(&self) -> (u32, u32) {
        let memory = self.memory.memory();
        (memory.load_be32(BULLETIN), memory.load_be32(BULLETIN + 4))
    }

    /// Reads the first 8 bytes of a granted chunk.
    fn read(&self, granted: &Reply) -> Status {
        let from = verbs::Remote { addr: granted.addr, rkey: granted.keys[0] };
        let to = [self.memory.sge(1024, 8)];
        let op = Op::Read { from, to: &to };
        self.access.post_send(&[WorkRequest { id: 3, op, signaled: true }]).unwrap();
        self.completions()[0].status
    }
}

fn start(scheme: Scheme, chunks: u64) -> (SoftNic, Node<SoftNic>) {
    let nic = SoftNic::inline();
    let node = Node::new(&nic, &settings(scheme, chunks)).unwrap();
    (nic, node)
}

#[test]
fn invalid_requests_are_answered() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 2);
        let hand = Hand::join(&nic, &mut node, 1);
        assert_eq!(
            hand.ask(&mut node, Ask::Allocate { group: 1, order: CHUNK_ORDER }).outcome,
            Outcome::BadRequest
        );
        assert_eq!(
            hand.ask(&mut node, Ask::Allocate { group: u16::MAX, order: CHUNK_ORDER }).outcome,
            Outcome::BadRequest
        );
        for entry in [0, 1, 2, 1 << 24, u32::MAX].map(EntryId::new) {
            assert_eq!(hand.ask(&mut node, Ask::Free { entry }).outcome, Outcome::NotYours);
        }
        for data in [&b""[..], b"short", &[9; REQUEST_BYTES]] {
            hand.receive();
            hand.send(data);
            assert!(node.poll().unwrap());
            assert_eq!(hand.completions().len(), 2);
            let mut outcome = [0];
            hand.memory.memory().read(0, &mut outcome);
            assert_eq!(outcome[0], Outcome::BadRequest as u8);
        }
        let granted = hand.allocate(&mut node);
        assert_eq!(granted.outcome, Outcome::Done);
        assert_eq!(hand.read(&granted), Status::Success);
        assert_eq!(node.status().unwrap().refused, 10);
        node.audit().unwrap();
    }
}

#[test]
fn oversized_message_breaks_only_its_senders_management_qp() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 4);
        let (bad, good) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
        let granted = bad.allocate(&mut node);
        bad.send(&[1; REQUEST_BYTES + 1]);
        node.poll().unwrap();
        assert_ne!(bad.completions()[0].status, Status::Success);
        assert_eq!(good.allocate(&mut node).outcome, Outcome::Done);
        // The compute node keeps its chunk, and after a reset it may send requests again.
        assert_eq!(bad.read(&granted), Status::Success);
        for _ in 0..10 {
            bad.send(&[1; REQUEST_BYTES + 1]);
            bad.qp.modify(verbs::QpChange::Reset).unwrap();
            let peers = node.reset_management(bad.id).unwrap();
            bad.qp.connect(Qpn::new(peers.expect("nothing is in flight")[0])).unwrap();
            bad.completions();
            node.poll().unwrap();
            for _ in 0..3 {
                let entry = bad.allocate(&mut node).entry;
                assert_eq!(bad.ask(&mut node, Ask::Free { entry }).outcome, Outcome::Done);
            }
        }
        retire(&mut node, bad.id);
        retire(&mut node, good.id);
        node.audit().unwrap();
        assert_eq!(node.status().unwrap().free, 4);
    }
}

#[test]
fn client_beyond_its_credits_delays_only_itself() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 64);
        let (eager, modest) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
        for _ in 0..3 * CREDITS {
            eager.receive();
            eager.send(
                &Request { number: 77, ask: Ask::Allocate { group: 0, order: CHUNK_ORDER } }
                    .to_bytes(),
            );
        }
        assert_eq!(eager.completions().len() as u32, CREDITS, "further requests found no receive");
        assert_eq!(modest.allocate(&mut node).outcome, Outcome::Done);
        while node.poll().unwrap() {}
        assert_eq!(node.status().unwrap().allocations_cpu, 3 * CREDITS as u64 + 1);
        assert_eq!(eager.completions().len() as u32, 5 * CREDITS);
    }
}

#[test]
fn client_without_receives_is_disconnected_alone() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 64);
        let (silent, good) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
        // It posts no receives: replies pile up at the memory node until the send queue is full.
        let cut_off = (0..64).any(|_| {
            silent.send(
                &Request { number: 77, ask: Ask::Free { entry: EntryId::new(0) } }.to_bytes(),
            );
            node.poll().unwrap();
            silent.completions().iter().any(|c| c.status != Status::Success)
        });
        assert!(cut_off, "the compute node is not disconnected");
        assert_eq!(silent.qp.state().unwrap(), QpState::Error);
        assert_eq!(good.allocate(&mut node).outcome, Outcome::Done);
        retire(&mut node, silent.id);
        node.audit().unwrap();
    }
}

/// A grant that was not delivered is taken back when the connection is re-established; a delivered
/// one is not.
#[test]
fn undelivered_grants_are_taken_back() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 8);
        let hand = Hand::join(&nic, &mut node, 1);
        let delivered = hand.allocate(&mut node);
        for _ in 0..3 {
            // No receive is posted for the reply.
            hand.send(
                &Request { number: 77, ask: Ask::Allocate { group: 0, order: CHUNK_ORDER } }
                    .to_bytes(),
            );
        }
        while node.poll().unwrap() {}
        assert_eq!(node.status().unwrap().free, 4);
        hand.qp.modify(verbs::QpChange::Reset).unwrap();
        let peers = node.reset_management(hand.id).unwrap();
        hand.qp.connect(Qpn::new(peers.expect("nothing is in flight")[0])).unwrap();
        hand.completions();
        while node.poll().unwrap() {}
        assert_eq!(node.status().unwrap().free, 7, "{scheme}");
        node.audit().unwrap();
        assert_eq!(hand.read(&delivered), Status::Success);
        for _ in 0..7 {
            assert_eq!(hand.allocate(&mut node).outcome, Outcome::Done);
        }
        assert_eq!(hand.allocate(&mut node).outcome, Outcome::Empty);
        let free = Ask::Free { entry: delivered.entry };
        assert_eq!(hand.ask(&mut node, free).outcome, Outcome::Done);
        retire(&mut node, hand.id);
        node.audit().unwrap();
    }
}

#[test]
fn unwritable_bulletin_affects_only_its_owner() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 1);
        let good = Hand::join(&nic, &mut node, 1);
        let bad = Hand::join_with(&nic, &mut node, 2, |request| request.bulletin_addr += 1 << 30);
        let none = Hand::join_with(&nic, &mut node, 3, |request| request.bulletin_rkey = 0);
        let granted = good.allocate(&mut node);
        assert_eq!(good.allocate(&mut node).outcome, Outcome::Empty);
        assert_eq!(good.bulletin(), (bulletin::EMPTY, 1));
        bad.receive();
        bad.send(
            &Request { number: 77, ask: Ask::Allocate { group: 0, order: CHUNK_ORDER } }.to_bytes(),
        );
        node.poll().unwrap();
        assert!(bad.completions().iter().any(|c| c.status != Status::Success));
        assert_eq!(none.allocate(&mut node).outcome, Outcome::Empty);
        let free = Ask::Free { entry: granted.entry };
        assert_eq!(good.ask(&mut node, free).outcome, Outcome::Done);
        assert_eq!(good.bulletin(), (bulletin::AVAILABLE, 2));
        assert_eq!(none.allocate(&mut node).outcome, Outcome::Done);
        node.audit().unwrap();
    }
}

#[test]
fn broken_access_qp_does_not_block_allocate_and_free() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 2);
        let hand = Hand::join(&nic, &mut node, 1);
        let granted = hand.allocate(&mut node);
        let mut wrong = granted;
        wrong.keys[0] = Key(0xdead_be00);
        assert_eq!(hand.read(&wrong), Status::RemoteAccess);
        // Binds and unbinds are posted on the broken QP.
        let second = hand.allocate(&mut node);
        assert_eq!(second.outcome, Outcome::Done);
        assert_eq!(hand.read(&second), Status::Flushed);
        assert_eq!(hand.ask(&mut node, Ask::Free { entry: granted.entry }).outcome, Outcome::Done);
        let peer = node.reset_access(hand.id, GroupId(0), Lane(0)).unwrap();
        hand.access.connect(Qpn::new(peer)).unwrap();
        hand.completions();
        assert_eq!(hand.read(&second), Status::Success);
        // A type-1 window stays bound until the next allocation, the shared region for ever.
        let dead = !scheme.releases_late();
        assert_eq!(hand.read(&granted) == Status::RemoteAccess, dead);
        assert!(node.reset_access(hand.id, GroupId(0), Lane(2)).is_err());
        assert!(node.reset_access(hand.id, GroupId(1), Lane(0)).is_err());
        assert!(node.reset_access(ClientId(9), GroupId(0), Lane(0)).is_err());
        retire(&mut node, hand.id);
        node.audit().unwrap();
        assert_eq!(node.status().unwrap().free, 2);
    }
}

/// Retires a compute node and polls until it is retired.
fn retire(node: &mut Node<SoftNic>, client: ClientId) {
    node.retire(client).unwrap();
    while !node.is_retired(client) {
        node.poll().unwrap();
    }
}

#[test]
fn retired_client_has_no_access() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 4);
        let (leaver, heir) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
        let granted: Vec<Reply> = (0..4).map(|_| leaver.allocate(&mut node)).collect();
        retire(&mut node, leaver.id);
        assert_eq!(node.status().unwrap().free, 4);
        for _ in 0..4 {
            assert_eq!(heir.allocate(&mut node).outcome, Outcome::Done);
        }
        for g in &granted {
            assert_ne!(leaver.read(g), Status::Success);
        }
        leaver.send(&Request { number: 77, ask: Ask::Free { entry: granted[0].entry } }.to_bytes());
        assert!(!node.poll().unwrap(), "a request of a departed client was executed");
        retire(&mut node, leaver.id); // idempotent
        node.audit().unwrap();
    }
}

#[test]
fn invalid_admissions_are_refused() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 1);
        let hand = Hand::join(&nic, &mut node, 1);
        let qpn = hand.qp.qpn().raw();
        let lanes = vec![qpn, qpn];
        let admission = |management: Vec<u32>, groups: Vec<Vec<u32>>| ConnectRequest {
            management,
            groups,
            bulletin_addr: 0,
            bulletin_rkey: 0,
            ..ConnectRequest::default()
        };
        for (request, expected) in [
            (admission(vec![], vec![lanes.clone()]), "1 management QPs"),
            (admission(vec![qpn; 2], vec![lanes.clone()]), "1 management QPs"),
            (admission(vec![qpn], vec![]), "QP groups"),
            (admission(vec![qpn], vec![lanes.clone(); 65]), "QP groups"),
            (admission(vec![qpn], vec![vec![qpn]]), "but one has 1"),
            (admission(vec![qpn], vec![vec![qpn; 3]]), "but one has 3"),
        ] {
            let e = node.admit(ClientId(2), &request).unwrap_err().to_string();
            assert!(e.contains(expected), "{e}");
        }
        assert_eq!(node.status().unwrap().clients, 1);
    }
}

proptest! {
    #[test]
    fn requests_are_read_back(number in any::<u64>(), n in any::<u32>(), free in any::<bool>()) {
        let ask = match free {
            true => Ask::Free { entry: EntryId::new(n) },
            false => Ask::Allocate { group: n as u16, order: CHUNK_ORDER },
        };
        let bytes = Request { number, ask }.to_bytes();
        prop_assert_eq!(Request::parse(&bytes), (number, Some(ask)));
    }

    #[test]
    fn replies_are_read_back(
        number in any::<u64>(),
        addr in any::<u64>(),
        keys in proptest::collection::vec(any::<u32>(), 0..=MAX_GROUP),
    ) {
        let mut reply = Reply::bare(number, Outcome::Done, EntryId::new(7));
        reply.addr = addr;
        reply.len = 4096;
        reply.lanes = keys.len();
        for (to, from) in reply.keys.iter_mut().zip(&keys) {
            *to = Key(*from);
        }
        prop_assert_eq!(Reply::parse(&reply.to_bytes()), Some(reply));
    }

    #[test]
    fn reading_never_panics(bytes in any::<[u8; 32]>(), more in any::<[u8; 32]>()) {
        let mut all = [0; REPLY_BYTES];
        all[..32].copy_from_slice(&bytes);
        all[32..].copy_from_slice(&more);
        let _ = Reply::parse(&all);
        let _ = Request::parse(all[..16].try_into().unwrap());
    }
}
