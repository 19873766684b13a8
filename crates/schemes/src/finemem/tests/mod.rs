//! Requests of a client to the memory node's CPU, and background work that is aborted or fails.

mod hostile;

use rnic::nic::SoftNic;
use scheme::route::{RoceEnd, Route};
use scheme::{ClientId, ConnectRequest, GroupId, Lane, QpSet, Start};
use verbs::{
    Access, Caps, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, Op, PathMtu, Psn, QpAttr,
    QpChange, Qpn, QueuePair, Receive, Remote, Status, WorkRequest,
};

use super::block::CHUNK_ORDER;
use super::header::User;
use super::*;
use crate::finemem::tree::Tree;
use crate::finemem::words;

type Qp = <SoftNic as Nic>::Qp;

const CHUNKS: u64 = 32;

fn settings() -> NodeSettings {
    NodeSettings::new(crate::FINEMEM, CHUNKS, 4096)
}

/// A memory node, and a client that uses none of the client code.
struct Bed {
    node: Node<SoftNic>,
    id: ClientId,
    cq: <SoftNic as Nic>::Cq,
    management: Qp,
    _access: Vec<Qp>,
    memory: <SoftNic as Nic>::Mr,
    metadata: Metadata,
    /// The memory node's side of the management QP.
    peer: u32,
}

impl Bed {
    fn new() -> Self {
        let nic = SoftNic::inline();
        let settings = settings();
        let mut node = Node::new(&nic, &settings).unwrap();
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
        let qp = || {
            let (receive, access) = (Receive::None, Access::NONE);
            let attr = QpAttr { send_cq: &cq, recv_cq: &cq, send_blocks: 16, receive, access };
            nic.create_qp(&pd, attr).unwrap()
        };
        let management = qp();
        let access: Vec<Qp> = (0..settings.lanes() * node.functions()).map(|_| qp()).collect();
        let request = ConnectRequest {
            management: vec![management.qpn().raw()],
            groups: vec![access.iter().map(|qp| qp.qpn().raw()).collect()],
            ..ConnectRequest::default()
        };
        let id = ClientId(1);
        let admitted = node.admit(id, &request).unwrap();
        let peer = admitted.management[0];
        management.connect(Qpn::new(peer)).unwrap();
        let memory = nic.alloc_dma(4096).unwrap();
        let memory = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
        let metadata = Metadata::of(&admitted).unwrap();
        Self { node, id, cq, management, _access: access, memory, metadata, peer }
    }

    /// Completion status of a READ of the first word of the metadata.
    fn read(&self, key: Key) -> Status {
        let to = [self.memory.sge(0, 8)];
        let op = Op::Read { from: Remote { addr: self.metadata.addr, rkey: key }, to: &to };
        self.management.post_send(&[WorkRequest { id: 1, op, signaled: true }]).unwrap();
        let mut some = [Completion::EMPTY; 4];
        assert_eq!(self.cq.poll(&mut some), 1);
        some[0].status
    }

    /// The client allocates a chunk, then departs.
    fn die_with_a_chunk(&mut self) {
        let user = User::new(self.metadata.user).unwrap();
        let tree = Tree::new(self.node.shape, user);
        let taken = words::now(tree.allocate(&self.node.words, CHUNK_ORDER)).unwrap();
        assert!(taken.is_some());
        assert_eq!(self.node.free_chunks(), CHUNKS - 1);
        self.node.retire(self.id).unwrap();
    }
}

#[test]
fn nic_that_lacks_a_capability_is_rejected_by_name() {
    let caps = SoftNic::inline().caps();
    assert!(settings().scheme.check_caps(&caps).is_ok());
    let lacking = [
        (Caps { type1_windows: false, ..caps.clone() }, "type-1 windows"),
        (Caps { windows: false, ..caps.clone() }, "type-2B windows"),
        (Caps { big_endian_atomics: false, ..caps.clone() }, "big-endian atomics"),
        (Caps { global_atomics: false, ..caps.clone() }, "with respect to the CPU"),
    ];
    for (caps, named) in lacking {
        let why = settings().scheme.check_caps(&caps).unwrap_err().to_string();
        assert!(why.contains(named), "{why}");
    }
}

#[test]
fn broken_management_connection_closes_and_reconnects() {
    let mut bed = Bed::new();
    let key = Key(bed.metadata.rkey);
    assert_eq!(bed.read(key), Status::Success);
    assert!(bed.node.management_is_open(bed.id).unwrap());
    assert_ne!(bed.read(Key(!key.0)), Status::Success);
    assert!(!bed.node.management_is_open(bed.id).unwrap());
    bed.management.modify(QpChange::Reset).unwrap();
    assert_eq!(bed.node.reset_management(bed.id).unwrap(), Some(vec![bed.peer]));
    bed.management.connect(Qpn::new(bed.peer)).unwrap();
    assert!(bed.node.management_is_open(bed.id).unwrap());
    assert_eq!(bed.read(key), Status::Success);
}

#[test]
fn aborted_background_work_recovers() {
    let mut steps = 0;
    loop {
        let mut bed = Bed::new();
        bed.die_with_a_chunk();
        assert_eq!(bed.node.aborts(), 0);
        bed.node.abort_after(steps);
        let mut turns = 0;
        while !bed.node.is_retired(bed.id) {
            turns += 1;
            assert!(turns < 100_000, "aborted after {steps} steps: {:?}", bed.node.status());
            bed.node.poll().unwrap();
        }
        assert_eq!(bed.node.free_chunks(), CHUNKS);
        bed.node.audit().unwrap();
        match bed.node.aborts() {
            0 => break,
            times => assert_eq!(times, 1),
        }
        steps += 1;
    }
    assert!(steps > 3, "{steps}");
}

#[test]
fn nic_error_is_not_mistaken_for_an_abort() {
    let mut bed = Bed::new();
    bed.die_with_a_chunk();
    bed.node.keys.functions()[0].binder.modify(QpChange::Error).unwrap();
    let failed = (0..1000).find_map(|_| bed.node.poll().err());
    assert!(failed.is_some(), "rebinding its window must fail");
    assert_eq!(bed.node.aborts(), 0);
    assert_eq!(bed.node.free_chunks(), CHUNKS - 1);
}

/// Both ends derive the PSN from a salt, which the client chooses for each connection.
#[test]
fn remote_qp_restarts_at_the_last_announced_psn() {
    let mut bed = Bed::new();
    let end = RoceEnd { port: 4791, mtu: PathMtu::Mtu1024 };
    let ip = |last| std::net::IpAddr::from([10, 0, 0, last]);
    let route = Route::between(ip(1), end, ip(2), end);
    let at = |psn| route.peer(Qpn::new(7), Start::Psn(Psn::new(psn)));
    let peer = bed.node.peers.get_mut(&bed.id).unwrap();
    peer.management.peer = at(1);
    peer.access.0[0].iter_mut().for_each(|lane| lane.peer = at(1));
    let begin = |bed: &Bed| {
        let peer = &bed.node.peers[&bed.id];
        [peer.management.peer, peer.access.0[0][0].peer, peer.access.0[0][1].peer]
    };
    bed.node.set_start(bed.id, QpSet::Access(GroupId(0), Lane(1)), Start::Psn(Psn::new(2)));
    assert_eq!(begin(&bed), [at(1), at(1), at(2)]);
    bed.node.set_start(bed.id, QpSet::Management, Start::Psn(Psn::new(3)));
    assert_eq!(begin(&bed), [at(3), at(1), at(2)]);
}
