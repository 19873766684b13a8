//! Injected packets that no requester of this project sends, and the PSNs and MSNs of the
//! responses.

use super::*;
use crate::wire::Packet;
use crate::wire::packet::{
    Aeth, AtomicOp, Body, Nak, Notice, PACKET_MAX, Part, Reth, Syndrome as Says,
};
use verbs::cqe::{self, Syndrome};
use verbs::direct::KeyInfo;
use verbs::wqe::umr::Umr;
use verbs::{Access, Key, Psn, QpState};

/// Payload bytes of a full packet.
pub const MTU: usize = 1024;

/// A connection whose near end is the test itself, packet by packet.
pub struct World {
    pub net: Net,
    pub far: TestQp,
    /// A region of the far end, in the PD of its QP.
    pub region: Mr,
    /// PSN of the next request.
    pub psn: u32,
    /// Whether requests ask for an acknowledgement.
    pub asks: bool,
    /// Ring and record of the far end's shared receive queue, if it has one.
    shared: Option<[verbs::DmaMemory; 2]>,
    _near: TestQp,
}

impl World {
    pub fn new(shared: bool) -> Self {
        Self::with(shared, |_| {})
    }

    /// Creates a world whose far end has parameters changed by `shape`.
    pub fn with(shared: bool, shape: impl Fn(&mut Shape)) -> Self {
        let mut net = Net::new(11);
        let pd = net.beds[1].pd(PF);
        let queue = shared.then(|| [memory(16 * STRIDE as usize), memory(8)]);
        let srqn = queue.as_ref().map(|[ring, record]| {
            let spec = crate::spec::RecvSpec {
                ring: ring.clone(),
                entries: 16,
                stride: STRIDE,
                record: record.clone(),
                initial_consumer: 0,
            };
            net.beds[1].e.create_srq(PF, pd, spec).unwrap()
        });
        let link = Link::default();
        let [near, far] = net.pair_of(&link, |end, s| {
            if end == 1 {
                (s.pd, s.srq) = (pd, srqn);
                shape(s);
            }
        });
        let region = net.beds[1].mr(PF, pd, 16 << 10, ALL);
        Self { net, far, region, psn: link.psn[0], asks: true, shared: queue, _near: near }
    }

    /// Posts a receive WQE of 4096 bytes, for the end of the region.
    pub fn post_receive(&mut self) {
        let room = self.region.sge(12 << 10, 4096);
        match &self.shared {
            None => self.net.beds[1].post_recv(&mut self.far, &[room]),
            Some([ring, record]) => {
                put_recv(ring, 0, &[room]);
                record.store_be32(0, 1);
            }
        }
    }

    /// Injects a packet from the peer's address to `destination`; it uses one PSN.
    pub fn receive_at(&mut self, destination: std::net::IpAddr, body: Body, payload: &[u8]) {
        let (qpn, psn) = (self.far.qpn, Psn::new(self.psn));
        let ack_request = self.asks;
        let packet = Packet { qpn, psn, ack_request, solicited: false, body, payload };
        let mut bytes = [0; PACKET_MAX];
        let len = packet.encode(&mut bytes);
        let source = std::net::SocketAddr::new(address(0, self.net.v6), PORT);
        self.net.beds[1].e.receive(self.net.now, source, destination, &bytes[..len], || true);
        self.psn = Psn::new(self.psn).plus(1).raw();
    }

    /// Injects a packet from the peer; returns the far end's responses.
    pub fn receive(&mut self, body: Body, payload: &[u8]) -> Vec<(u32, Body)> {
        self.receive_at(address(1, self.net.v6), body, payload);
        self.net.log = Some(Vec::new());
        self.net.turn(1);
        let answers = self.net.log.take().unwrap().into_iter().map(|(_, bytes)| {
            let packet = Packet::parse(&bytes).unwrap();
            (packet.psn.raw(), packet.body)
        });
        answers.collect()
    }

    fn key(&self, key: Key) -> KeyInfo {
        self.net.beds[1].e.query_key(PF, key.index()).unwrap()
    }

    /// Binds a window over the first page of the region to the far end's QP.
    fn bound_window(&mut self) -> Key {
        let window = self.net.beds[1].e.alloc_mw(PF, self.far.pd, Default::default()).unwrap();
        let tag = window.tag().wrapping_add(1);
        let (mr, start) = (self.region.key, self.region.mem.addr());
        let umr = Umr::bind(window, tag, self.far.qpn, Access::REMOTE_ALL, mr, start, 4096);
        assert_eq!(self.net.execute(1, &mut self.far, |w| _ = w.umr(&umr)).error, None);
        Key::new(window.index(), tag)
    }
}

pub fn send(part: Part, notice: Notice) -> Body {
    Body::Send { part, notice }
}

fn psns_and_msns(answers: &[(u32, Body)]) -> Vec<(u32, u32)> {
    let msn = |body: &Body| match *body {
        Body::Acknowledge(aeth) | Body::AtomicAcknowledge { aeth, .. } => Some(aeth.msn),
        Body::ReadResponse { aeth, .. } => aeth.map(|aeth| aeth.msn),
        _ => panic!("{body:?} is no answer"),
    };
    answers.iter().filter_map(|(psn, body)| Some((*psn, msn(body)?))).collect()
}

/// The last packet of a SEND with invalidate contains the key. A key that the peer may not
/// invalidate ends the connection: the receive completes as flushed, and the key stays valid.
#[test]
fn multi_packet_send_rejects_a_foreign_invalidation() {
    for shared in [false, true] {
        for case in 0..4 {
            let mut w = World::new(shared);
            let own = w.bound_window();
            let elsewhere = w.net.beds[1].pd(PF);
            let key = match case {
                0 => w.region.key,
                1 => Key::new(own.index(), own.tag().wrapping_add(1)),
                2 => w.net.beds[1].e.alloc_mw(PF, elsewhere, Default::default()).unwrap(),
                _ => Key(0xffff_ff07),
            };
            let keys = [own, w.region.key];
            let before = keys.map(|k| w.key(k));
            w.post_receive();
            w.receive(send(Part::First, Notice::None), &[1; MTU]);
            let answers = w.receive(send(Part::Last, Notice::Invalidate(key)), &[2; 100]);
            let [(_, Body::Acknowledge(Aeth { syndrome, .. }))] = answers[..] else {
                panic!("case {case}: {answers:?}");
            };
            assert_eq!(syndrome, Says::Nak(Nak::RemoteAccess), "case {case}");
            assert_eq!(w.net.beds[1].state(&w.far), QpState::Error, "case {case}");
            assert_eq!(keys.map(|k| w.key(k)), before, "case {case}");
            let cqe = w.far.recv_cq.reader.poll().expect("the receive WQE completes");
            assert_error(&cqe, Syndrome::Flushed);
            assert_eq!(w.far.recv_cq.reader.poll(), None);
        }
    }
}

#[test]
fn multi_packet_send_invalidates_the_window_of_its_qp() {
    for shared in [false, true] {
        let mut w = World::new(shared);
        let own = w.bound_window();
        w.post_receive();
        w.receive(send(Part::First, Notice::None), &[1; MTU]);
        assert!(w.key(own).bound, "the key is in the last packet");
        let answers = w.receive(send(Part::Last, Notice::Invalidate(own)), &[2; 100]);
        assert_eq!(answers.len(), 1);
        assert!(!w.key(own).bound);
        let cqe = w.far.recv_cq.reader.poll().unwrap();
        assert_eq!((cqe.error, cqe.opcode), (None, cqe::opcode::RESP_SEND_INV));
        assert_eq!((cqe.imm, cqe.byte_count), (own.0, MTU as u32 + 100));
    }
}

/// A host has several addresses; a QP has one of them.
#[test]
fn packets_to_another_local_address_are_dropped() {
    let mut w = World::new(false);
    let at = w.region.remote(0);
    let write = Body::Write { part: Part::Only, reth: Some(Reth { at, len: 4 }), imm: None };
    let others: [std::net::IpAddr; 3] = match w.net.v6 {
        true => ["fd00::7", "::1", "10.0.0.2"].map(|a| a.parse().unwrap()),
        false => ["10.0.0.7", "127.0.0.1", "fd00::2"].map(|a| a.parse().unwrap()),
    };
    let psn = w.psn;
    for (n, destination) in others.into_iter().enumerate() {
        w.psn = psn;
        w.receive_at(destination, write, b"evil");
        assert_eq!(w.net.beds[1].e.wire_stats().strangers, n as u64 + 1, "{destination}");
    }
    assert_eq!(w.region.bytes(0, 4), [0; 4]);
    w.psn = psn;
    let answers = w.receive(write, b"good");
    assert_eq!(psns_and_msns(&answers), [(psn, 1)]);
    assert_eq!(w.region.bytes(0, 4), b"good");
}

/// IBTA vol. 1, §9.7.5.1.3: the MSN counts messages of all kinds, not packets.
#[test]
fn msn_of_responses_counts_messages() {
    let mut w = World::new(false);
    let first = w.psn;
    let psn = |n: u32| Psn::new(first).plus(n).raw();
    let reth = |w: &World, len| Reth { at: w.region.remote(0), len };
    let write = |part, reth| Body::Write { part, reth, imm: None };
    let long = reth(&w, 2 * MTU as u32 + 8);
    // Every packet asks for an acknowledgement; only the last packet completes a message.
    let mut got = Vec::new();
    for (part, reth, len) in
        [(Part::First, Some(long), MTU), (Part::Middle, None, MTU), (Part::Last, None, 8)]
    {
        got.extend(psns_and_msns(&w.receive(write(part, reth), &vec![7; len])));
    }
    assert_eq!(got, [(psn(0), 0), (psn(1), 0), (psn(2), 1)]);
    // A READ uses as many PSNs as its response has packets; the middle packets contain no MSN.
    let read = Body::Read(reth(&w, 3 * MTU as u32));
    assert_eq!(psns_and_msns(&w.receive(read, &[])), [(psn(3), 2), (psn(5), 2)]);
    w.psn = psn(6);
    let add = Body::Atomic { at: w.region.remote(0), op: AtomicOp::FetchAdd { add: 1 } };
    assert_eq!(psns_and_msns(&w.receive(add, &[])), [(psn(6), 3)]);
    w.post_receive();
    assert_eq!(w.receive(send(Part::First, Notice::None), &[1; MTU]), ack(psn(7), 3));
    assert_eq!(w.receive(send(Part::Last, Notice::None), &[1; 4]), ack(psn(8), 4));
    // A duplicate does not increase the MSN.
    w.psn = psn(8);
    assert_eq!(w.receive(send(Part::Last, Notice::None), &[1; 4]), ack(psn(8), 4));
}

pub fn ack(psn: u32, msn: u32) -> Vec<(u32, Body)> {
    vec![(psn, Body::Acknowledge(Aeth { syndrome: Says::Ack(31), msn }))]
}
