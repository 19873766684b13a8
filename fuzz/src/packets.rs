//! A NIC on a network: the input is the packets of a hostile peer, beside an honest connection.
//!
//! The first byte decides whether packets are authenticated. If they are, the hostile peer has the
//! key of its own connection, so that its packets get as far as plain ones. It also sends packets
//! in the name of the honest peer, without that peer's key.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use rnic::Engine;
use rnic::limits::{Limits, WireLimits};
use rnic::spec::{CqSpec, QpSpec, Recv, RecvSpec, SendSpec};
use rnic::wire::mac::{self, Sealer, TRAILER};
use rnic::wire::packet::{
    Aeth, AtomicOp, Body, ICRC, Nak, Notice, PACKET_MAX, Part, Reth, Syndrome,
};
use rnic::wire::{Outgoing, Packet, UDP_PORT};
use verbs::cqe::{CqReader, clear};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{
    Access, DmaMemory, FunctionId, Key, PairSecret, PathMtu, Psn, QpChange, QpState, Qpn,
    RemotePeer, SecretSide,
};

use crate::Input;

const ALL: Access = Access(Access::LOCAL_ALL.0 | Access::REMOTE_ALL.0);
const PF: FunctionId = FunctionId::PHYSICAL;
const BLOCKS: u32 = 16;
const RECEIVES: u32 = 8;
const STRIDE: u32 = 64;
const STEPS: usize = 300;
/// Bytes of a region.
const REGION: usize = 4096;

/// Last byte of the IP address of the tested NIC, of the honest peer, and of the hostile peer.
const HERE: u8 = 1;
const FRIEND: u8 = 2;
const HOSTILE: u8 = 3;

fn ip(of: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, of))
}

/// A QP with its memory.
struct Queue {
    qpn: Qpn,
    ring: DmaMemory,
    record: DmaMemory,
    reader: CqReader,
    producer: u16,
    posted: u32,
    region: DmaMemory,
    key: Key,
}

struct World {
    nic: Engine,
    friend: Engine,
    now: u64,
    /// The QP that is connected to the hostile peer.
    victim: Queue,
    /// The honest connection: the tested NIC's end and the honest peer's end.
    honest: [Queue; 2],
    /// Memory of the NIC whose key no peer was given.
    secret: DmaMemory,
    secret_key: Key,
    /// The next PSN of the hostile peer.
    psn: Psn,
    rounds: u8,
    authenticated: bool,
    /// Computes the authentication tags of the hostile peer.
    sealer: Option<Sealer>,
    /// Number of connections of the hostile peer so far.
    connections: u8,
}

/// Runs the input `bytes`, first through the packet parser.
pub fn run(bytes: &[u8]) {
    again(bytes);
    let mut input = Input::new(bytes);
    let mut world = World::new(input.byte() & 1 == 1);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.exchange();
    world.rest();
}

/// Checks that parsing and encoding are inverse.
fn again(bytes: &[u8]) {
    let Ok(packet) = Packet::parse(bytes) else { return };
    let mut out = [0; PACKET_MAX];
    let len = packet.encode(&mut out);
    assert_eq!(len, bytes.len());
    assert_eq!(Packet::parse(&out[..len]), Ok(packet));
}

impl World {
    fn new(authenticated: bool) -> Self {
        let wire = WireLimits { outbox_bytes: 64 << 10, ..WireLimits::default() };
        let limits = Limits { wire: Some(wire), ..Limits::default() };
        let (mut nic, mut friend) = (Engine::new(limits.clone()), Engine::new(limits));
        let victim = Queue::make(&mut nic);
        let honest = [Queue::make(&mut nic), Queue::make(&mut friend)];
        let shared =
            |side| authenticated.then_some(PairSecret { bytes: [1; 32], side, authenticated });
        let start = Psn::new(0xff_fff0);
        let (asking, asked) = (shared(SecretSide::Asking), shared(SecretSide::Asked));
        connect(&mut nic, &honest[0], (HERE, FRIEND), honest[1].qpn, (start, asking));
        connect(&mut friend, &honest[1], (FRIEND, HERE), honest[0].qpn, (start, asked));
        let pd = nic.alloc_pd(PF).expect("a PD");
        let secret = DmaMemory::anonymous(REGION).expect("memory");
        secret.write(0, &[0x5e; REGION]);
        let secret_key = nic.reg_mr(PF, pd, secret.clone(), secret.addr(), ALL).expect("a region");
        let mut world = Self {
            nic,
            friend,
            now: 0,
            victim,
            honest,
            secret,
            secret_key,
            psn: start,
            rounds: 0,
            authenticated,
            sealer: None,
            connections: 1,
        };
        world.connect_victim();
        world
    }

    /// Connects the victim to the hostile peer, which knows the secret if packets are
    /// authenticated.
    fn connect_victim(&mut self) {
        self.connections = self.connections.wrapping_add(1);
        let theirs = Qpn::new(0x77);
        let (bytes, authenticated) = ([self.connections; 32], self.authenticated);
        let shared = |side| PairSecret { bytes, side, authenticated };
        let ours = authenticated.then(|| shared(SecretSide::Asked));
        self.psn = Psn::new(0xff_fff0);
        let start = (self.psn, ours);
        connect(&mut self.nic, &self.victim, (HERE, HOSTILE), theirs, start);
        if authenticated {
            let hostile = shared(SecretSide::Asking);
            self.sealer = mac::sealer(&hostile, theirs, self.victim.qpn);
            self.psn = mac::first_psn(&hostile, theirs, self.victim.qpn);
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 16 {
            0..=6 => self.packet(input),
            7 => {
                let bytes = input.byte() as usize;
                let bytes = input.take(bytes).to_vec();
                self.arrive(ip(HOSTILE), &bytes);
            }
            8 | 9 => self.post(input),
            10 => {
                self.now += 1_000 * (1 + input.number() as u64 % 100_000);
                self.turn();
            }
            11 => {
                self.victim.posted = self.victim.posted.wrapping_add(1) & 0xffff;
                self.victim.record.store_be32(0, self.victim.posted);
            }
            12 => self.exchange(),
            13 => self.reconnect(),
            14 => {
                // Deregisters memory while packets that name it are in flight.
                let _ = self.nic.dereg_mr(PF, self.victim.key);
                let (region, pd) = (self.victim.region.clone(), self.nic.alloc_pd(PF));
                if let Ok(pd) = pd
                    && let Ok(key) = self.nic.reg_mr(PF, pd, region.clone(), region.addr(), ALL)
                {
                    self.victim.key = key;
                }
            }
            _ => self.turn(),
        }
    }

    /// Sends a packet of the hostile peer, intact or corrupted.
    fn packet(&mut self, input: &mut Input<'_>) {
        let (kind, flags) = (input.byte(), input.byte());
        let part = [Part::First, Part::Middle, Part::Last, Part::Only][(flags & 3) as usize];
        let base = if flags & 4 == 0 { self.victim.region.addr() } else { self.secret.addr() };
        let rkey = if flags & 8 == 0 { self.victim.key } else { self.secret_key };
        let at = Remote { addr: base.wrapping_add(input.number() as u64 * 8), rkey };
        let len = input.number().wrapping_mul(16);
        let word = input.number();
        let reth = Reth { at, len };
        let nak = [Nak::Sequence, Nak::InvalidRequest, Nak::RemoteAccess, Nak::RemoteOperation];
        let syndrome = match word % 4 {
            0 | 1 => Syndrome::Ack(31),
            2 => Syndrome::Rnr((word >> 2) as u8 & 31),
            _ => Syndrome::Nak(nak[(word >> 2) as usize % 4]),
        };
        let aeth = Aeth { syndrome, msn: word };
        let notice = match word % 3 {
            _ if !part.ends() => Notice::None,
            0 => Notice::None,
            1 => Notice::Imm(word),
            _ => Notice::Invalidate(rkey),
        };
        let imm = (word % 2 == 1 && part.ends()).then_some(word);
        let body = match kind % 12 {
            0 | 1 => Body::Send { part, notice },
            2 | 3 => Body::Write { part, reth: part.begins().then_some(reth), imm },
            4 | 5 => Body::Read(reth),
            6 => Body::Atomic { at, op: AtomicOp::FetchAdd { add: word as u64 } },
            7 => {
                let op = AtomicOp::CompareSwap { compare: 0, swap: word as u64 };
                Body::Atomic { at, op }
            }
            8 | 9 => Body::ReadResponse { part, aeth: (part != Part::Middle).then_some(aeth) },
            10 => Body::AtomicAcknowledge { aeth, old: word as u64 },
            _ => Body::Acknowledge(aeth),
        };
        let data = [0xd0; 1024];
        let bytes =
            match body {
                Body::Send { .. } | Body::Write { .. } | Body::ReadResponse { .. } => {
                    if part.ends() { (len as usize).min(256) } else { 256 }
                }
                _ => 0,
            };
        // Usually the expected PSN, which a hostile peer need not use.
        let delta = input.byte();
        let psn = match delta {
            0..=0xbf => self.psn,
            _ => self.psn.plus((delta as u32 & 0x3f).wrapping_sub(32)),
        };
        if delta < 0xa0 {
            let packets = if let Body::Read(_) = body { len.div_ceil(256).max(1) } else { 1 };
            self.psn = self.psn.plus(packets);
        }
        let honest = flags & 0x30 == 0x30;
        let packet = Packet {
            qpn: if honest { self.honest[0].qpn } else { self.victim.qpn },
            psn,
            ack_request: flags & 0x40 == 0,
            solicited: flags & 0x80 != 0,
            body,
            payload: &data[..bytes],
        };
        let mut out = [0; PACKET_MAX];
        let len = packet.encode(&mut out);
        for _ in 0..kind >> 6 {
            let at = input.short() as usize % len;
            out[at] = input.byte();
        }
        let Some(sealer) = &mut self.sealer else { return self.arrive(ip(HOSTILE), &out[..len]) };
        let mut bytes = out[..len - ICRC].to_vec();
        bytes.extend([0; TRAILER]);
        sealer.seal(&mut bytes);
        if input.byte() == 0 {
            *bytes.last_mut().expect("the packet has a trailer") ^= 1;
        }
        // The packet has the honest peer's address but a tag with the hostile peer's key.
        let from = if honest { FRIEND } else { HOSTILE };
        self.arrive(ip(from), &bytes);
    }

    fn arrive(&mut self, from: IpAddr, bytes: &[u8]) {
        let from = SocketAddr::new(from, UDP_PORT);
        self.nic.receive(self.now, from, ip(HERE), bytes, || true);
    }

    /// The victim posts a request to its peer.
    fn post(&mut self, input: &mut Input<'_>) {
        let (op, at, len) = (input.byte(), input.number() as u64 * 8, input.number());
        let q = &mut self.victim;
        let sge = Sge { addr: q.region.addr() + at, len, lkey: q.key };
        let there = Remote { addr: 0x1000 + at, rkey: Key(7) };
        let mut b = Builder::new(q.qpn, q.producer);
        match op % 6 {
            0 => b.rdma_read(there, &[sge, sge]),
            1 => b.rdma_write(there, &[sge, sge]),
            2 => b.send(&[sge]),
            3 => b.fetch_add(there, 3, sge),
            4 => b.nop(),
            _ => b.local_invalidate(q.key),
        };
        b.signaled();
        q.put(&b);
        self.nic.doorbell(self.victim.qpn, self.victim.producer);
    }

    /// Reconnects the victim.
    fn reconnect(&mut self) {
        let q = &mut self.victim;
        let reset = self.nic.modify_qp(PF, q.qpn, QpChange::Reset);
        reset.expect("every QP can be reset");
        (q.producer, q.posted) = (0, 0);
        q.record.store_be32(0, 0);
        self.connect_victim();
    }

    /// Polls both engines and delivers their packets to each other.
    fn turn(&mut self) {
        for _ in 0..64 {
            let mut idle = true;
            for end in 0..2 {
                let (from, to) = if end == 0 {
                    (&mut self.nic, &mut self.friend)
                } else {
                    (&mut self.friend, &mut self.nic)
                };
                idle &= from.poll(self.now, 64) == 0;
                for Outgoing { envelope, bytes, .. } in from.outbox().packets() {
                    // Packets to the hostile peer are dropped.
                    if envelope.to.ip() != ip(HOSTILE) {
                        let source = SocketAddr::new(envelope.from, UDP_PORT);
                        to.receive(self.now, source, envelope.to.ip(), bytes, || true);
                        idle = false;
                    }
                }
                from.outbox().clear();
            }
            if idle {
                return;
            }
        }
    }

    /// Uses the honest connection: a WRITE, and a READ of the written data.
    fn exchange(&mut self) {
        self.rounds = self.rounds.wrapping_add(1);
        let [near, far] = &mut self.honest;
        near.region.write(0, &[self.rounds; 600]);
        let there = Remote { addr: far.region.addr() + 64, rkey: far.key };
        let part = |at: u64| Sge { addr: near.region.addr() + at, len: 600, lkey: near.key };
        let (out, back) = (part(0), part(2048));
        let mut b = Builder::new(near.qpn, near.producer);
        b.rdma_write(there, &[out]).signaled();
        near.put(&b);
        let mut b = Builder::new(near.qpn, near.producer);
        b.rdma_read(there, &[back]).signaled();
        near.put(&b);
        self.nic.doorbell(near.qpn, near.producer);
        let mut done = 0;
        for _ in 0..1000 {
            self.now += 1_000;
            self.turn();
            while let Some(cqe) = self.honest[0].reader.poll() {
                assert_eq!(cqe.error, None, "the honest connection failed");
                done += 1;
            }
            if done == 2 {
                break;
            }
        }
        assert_eq!(done, 2, "the honest connection is not served");
        let mut got = [0; 600];
        self.honest[0].region.read(2048, &mut got);
        assert!(got == [self.rounds; 600]);
    }

    /// Checks that no other memory was changed, and that all retransmissions end.
    fn rest(&mut self) {
        let mut secret = [0; REGION];
        self.secret.read(0, &mut secret);
        assert!(secret == [0x5e; REGION], "memory without a published key has changed");
        let state = self.nic.query_qp(PF, self.honest[0].qpn).expect("the honest QP").info.state;
        assert_eq!(state, QpState::ReadyToSend);
        for _ in 0..1000 {
            match self.nic.next_timeout() {
                Some(at) => self.now = self.now.max(at),
                None => return,
            }
            self.turn();
        }
        panic!("the NIC never becomes idle");
    }
}

impl Queue {
    fn make(engine: &mut Engine) -> Self {
        let memory = |bytes| DmaMemory::anonymous(bytes).expect("memory");
        let pd = engine.alloc_pd(PF).expect("a PD");
        let region = memory(REGION);
        let key = engine.reg_mr(PF, pd, region.clone(), region.addr(), ALL).expect("a region");
        let (cq_ring, cq_record) = (memory(BLOCKS as usize * 64), memory(8));
        clear(&cq_ring, BLOCKS);
        let spec = CqSpec {
            ring: cq_ring.clone(),
            entries: BLOCKS,
            record: cq_record.clone(),
            // No code reads the victim's CQ.
            ignore_overrun: true,
            initial_count: 0,
        };
        let cqn = engine.create_cq(PF, spec).expect("a CQ");
        let (ring, receives, record) =
            (memory(BLOCKS as usize * 64), memory((RECEIVES * STRIDE) as usize), memory(8));
        for n in 0..RECEIVES {
            let sge = |at: u64, len| Sge { addr: region.addr() + 1024 + at, len, lkey: key };
            receives.write((n * STRIDE) as usize, &sge(n as u64 * 64, 50).to_bytes());
            receives.write((n * STRIDE) as usize + 16, &sge(512, 1000).to_bytes());
        }
        let recv = RecvSpec {
            ring: receives,
            entries: RECEIVES,
            stride: STRIDE,
            record: record.clone(),
            initial_consumer: 0,
        };
        let spec = QpSpec {
            pd,
            send: Some(SendSpec { ring: ring.clone(), blocks: BLOCKS, managed: false }),
            recv: Recv::Own { spec: recv, managed: false },
            send_cq: cqn,
            recv_cq: cqn,
            access: ALL,
            privileged: false,
        };
        let qpn = engine.create_qp(PF, spec).expect("a QP");
        let reader = CqReader::new(cq_ring, BLOCKS, cq_record, 0);
        Self { qpn, ring, record, reader, producer: 0, posted: 0, region, key }
    }

    fn put(&mut self, b: &Builder) {
        for (i, block) in b.bytes().chunks(64).enumerate() {
            let slot = (self.producer as usize + i) % BLOCKS as usize;
            self.ring.write(slot * 64, block);
        }
        self.producer = self.producer.wrapping_add(b.blocks() as u16);
    }
}

/// Connects a QP of the NIC `here` to a QP of the NIC `there`.
fn connect(
    engine: &mut Engine,
    queue: &Queue,
    (here, there): (u8, u8),
    peer: Qpn,
    (start, secret): (Psn, Option<PairSecret>),
) {
    let address = SocketAddr::new(ip(there), UDP_PORT);
    let peer = RemotePeer {
        secret,
        mtu: PathMtu::Mtu256,
        sq_psn: start,
        rq_psn: start,
        timeout: 8,
        retry_cnt: 1,
        rnr_retry: 3,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        ..RemotePeer::new(address, ip(here), peer)
    };
    for change in
        [QpChange::Init, QpChange::ReadyToReceive { peer: peer.into() }, QpChange::ReadyToSend]
    {
        engine.modify_qp(PF, queue.qpn, change).expect("a connection");
    }
}
