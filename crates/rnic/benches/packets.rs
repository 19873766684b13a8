//! Cost of a packet in the engine, without sockets: `cargo bench -p granary-rnic --bench packets`.
//!
//! One thread runs two engines and carries the packets of each to the other. The messages have 1
//! MiB. With the smallest path MTU the cost per packet dominates, with the largest one the cost per
//! byte. The result is in nanoseconds per packet, the median of several rounds, for four stages:
//!
//! ```text
//!  make    fetch the WQE, write headers, copy the payload and compute its CRC      sender
//!  seal    compute the ICRC from that CRC and the headers                          sender
//!  check   check the ICRC of a received packet, which is in the cache              receiver
//!  take    check keys, access memory, use the receive WQE, write the completion    receiver
//! ```
//!
//! The sender is the requester, for a READ the responder. The tag of authenticated packets is
//! computed in `make` and checked in `take`; they have no ICRC.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rnic::Engine;
use rnic::limits::{Limits, WireLimits};
use rnic::spec::*;
use rnic::wire::UDP_PORT;
use rnic::wire::icrc::{Route, RouteIcrc};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{
    Access, DmaMemory, FunctionId, Key, PairSecret, PathMtu, QpChange, QpState, Qpn, RemotePeer,
    SecretSide,
};

const PF: FunctionId = FunctionId::PHYSICAL;
const MESSAGE: usize = 1 << 20;
const BLOCKS: u32 = 64;
/// Bytes after which the `roce` port sends the outbox: one burst.
const SEND_BYTES: usize = 60 << 10;

struct End {
    e: Engine,
    qpn: Qpn,
    ring: DmaMemory,
    record: DmaMemory,
    memory: (DmaMemory, Key),
    producer: u16,
    received: u32,
    address: SocketAddr,
}

fn memory(len: usize) -> DmaMemory {
    DmaMemory::anonymous(len).expect("memory for the benchmark")
}

impl End {
    fn new(end: u8) -> Self {
        let wire = WireLimits { window_bytes: 960 << 10, ..WireLimits::default() };
        let mut e = Engine::new(Limits { wire: Some(wire), ..Limits::default() });
        let pd = e.alloc_pd(PF).unwrap();
        let data = memory(MESSAGE);
        let every_access = Access::LOCAL_ALL | Access::REMOTE_ALL;
        let key = e.reg_mr(PF, pd, data.clone(), data.addr(), every_access).unwrap();
        let cq = CqSpec {
            ring: memory(BLOCKS as usize * 64),
            entries: BLOCKS,
            record: memory(8),
            ignore_overrun: true,
            initial_count: 0,
        };
        let cq = e.create_cq(PF, cq).unwrap();
        let ring = memory(BLOCKS as usize * 64);
        let recv = RecvSpec {
            ring: memory(BLOCKS as usize * 16),
            entries: BLOCKS,
            stride: 16,
            record: memory(8),
            initial_consumer: 0,
        };
        for i in 0..BLOCKS as usize {
            let sge = Sge { addr: data.addr(), len: MESSAGE as u32, lkey: key };
            recv.ring.write(16 * i, &sge.to_bytes());
        }
        let record = recv.record.clone();
        let spec = QpSpec {
            pd,
            send: Some(SendSpec { ring: ring.clone(), blocks: BLOCKS, managed: false }),
            recv: Recv::Own { spec: recv, managed: false },
            send_cq: cq,
            recv_cq: cq,
            access: Access::REMOTE_ALL,
            privileged: false,
        };
        let qpn = e.create_qp(PF, spec).unwrap();
        let address = SocketAddr::new(IpAddr::from([10, 0, 0, end]), UDP_PORT);
        Self { e, qpn, ring, record, memory: (data, key), producer: 0, received: 0, address }
    }

    fn connect(&mut self, qpn: Qpn, address: SocketAddr, mtu: PathMtu, side: Option<SecretSide>) {
        let secret = side.map(|side| PairSecret { bytes: [1; 32], side, authenticated: true });
        let peer = RemotePeer { mtu, secret, ..RemotePeer::new(address, self.address.ip(), qpn) };
        let peer = peer.into();
        for change in [QpChange::Init, QpChange::ReadyToReceive { peer }, QpChange::ReadyToSend] {
            self.e.modify_qp(PF, self.qpn, change).unwrap();
        }
    }

    fn post(&mut self, builder: &Builder) {
        assert_eq!(builder.blocks(), 1, "a WQE of one block does not cross the ring's end");
        let at = self.producer as usize % BLOCKS as usize * 64;
        self.ring.write(at, builder.bytes());
        self.producer = self.producer.wrapping_add(1);
        self.e.doorbell(self.qpn, self.producer);
    }
}

/// Time and packets of each stage.
#[derive(Default)]
struct Stages {
    make: Duration,
    seal: Duration,
    check: Duration,
    take: Duration,
    packets: u32,
}

/// Polls `from` and carries its packets to `to`. Returns false if there were none.
fn carry(now: u64, from: &mut End, to: &mut End, authenticated: bool, stages: &mut Stages) -> bool {
    let start = Instant::now();
    while from.e.poll(now, 64) > 0 && from.e.outbox().bytes().len() < SEND_BYTES {}
    stages.make += start.elapsed();
    if from.e.outbox().is_empty() {
        return false;
    }
    let start = Instant::now();
    from.e.outbox().seal(UDP_PORT);
    stages.seal += start.elapsed();
    stages.packets += from.e.outbox().len() as u32;
    // Copied, as the kernel does it.
    let bytes = from.e.outbox().bytes().to_vec();
    let bursts = from.e.outbox().bursts().to_vec();
    from.e.outbox().clear();
    for burst in bursts {
        let packets = || bytes[burst.bytes.clone()].chunks(burst.packet_bytes);
        let start = Instant::now();
        let mut icrcs = RouteIcrc::new(Route::new(from.address, to.address));
        let mut is_good = |(i, packet)| icrcs.check(i as u16, packet);
        assert!(authenticated || packets().enumerate().all(&mut is_good), "a wrong ICRC");
        stages.check += start.elapsed();
        let start = Instant::now();
        for packet in packets() {
            to.e.receive(now, from.address, to.address.ip(), packet, || true);
        }
        stages.take += start.elapsed();
    }
    true
}

/// The direction of the measured packets.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    /// From the requester to the responder.
    Request,
    /// From the responder to the requester.
    Response,
}

fn measure(
    name: &str,
    direction: Direction,
    mtu: PathMtu,
    authenticated: bool,
    rounds: usize,
    fill: impl Fn(&End, &End, &mut Builder),
) {
    let [mut a, mut b] = [1, 2].map(End::new);
    let ends = [(a.qpn, a.address), (b.qpn, b.address)];
    let side = |side| authenticated.then_some(side);
    a.connect(ends[1].0, ends[1].1, mtu, side(SecretSide::Asking));
    b.connect(ends[0].0, ends[0].1, mtu, side(SecretSide::Asked));
    let mut measured = Vec::new();
    for now in 0..rounds as u64 {
        // Each direction has its own counters; one of them is reported.
        let (mut there, mut back) = (Stages::default(), Stages::default());
        for _ in 0..8 {
            b.received += 1;
            b.record.store_be32(0, b.received & 0xffff);
            let mut builder = Builder::new(a.qpn, a.producer);
            fill(&a, &b, &mut builder);
            a.post(&builder);
            let mut goes_on = true;
            while goes_on {
                goes_on = carry(now, &mut a, &mut b, authenticated, &mut there);
                goes_on |= carry(now, &mut b, &mut a, authenticated, &mut back);
            }
        }
        measured.push(if direction == Direction::Request { there } else { back });
    }
    for end in [&mut a, &mut b] {
        let state = end.e.query_qp(PF, end.qpn).unwrap().info.state;
        assert_eq!(state, QpState::ReadyToSend, "{name} failed");
    }
    let median = |stage: fn(&Stages) -> Duration| {
        let mut ns: Vec<f64> =
            measured.iter().map(|s| stage(s).as_nanos() as f64 / s.packets as f64).collect();
        ns.sort_by(f64::total_cmp);
        ns[ns.len() / 2]
    };
    let packets = if authenticated { "tag" } else { "ICRC" };
    println!(
        "{name:<8} {packets:<5} {:>5} {:>8.1} {:>8.1} {:>8.1} {:>8.1}",
        mtu.bytes(),
        median(|s| s.make),
        median(|s| s.seal),
        median(|s| s.check),
        median(|s| s.take)
    );
}

fn main() {
    // `cargo test --benches` passes no `--bench`: one round checks that the program works.
    let rounds = if std::env::args().any(|a| a == "--bench") { 101 } else { 1 };
    let stages = format!("{:>8} {:>8} {:>8} {:>8}", "make", "seal", "check", "take");
    println!("{:<8} {:<5} {:>5} {stages}", "ns", "", "MTU");
    let mtus = [PathMtu::Mtu256, PathMtu::Mtu1024, PathMtu::Mtu4096];
    for (mtu, tags) in mtus.into_iter().flat_map(|mtu| [(mtu, false), (mtu, true)]) {
        measure("SEND", Direction::Request, mtu, tags, rounds, |a, _, w| {
            let (addr, lkey) = (a.memory.0.addr(), a.memory.1);
            w.send(&[Sge { addr, len: MESSAGE as u32, lkey }]).signaled();
        });
        measure("WRITE", Direction::Request, mtu, tags, rounds, |a, b, w| {
            let (addr, lkey) = (a.memory.0.addr(), a.memory.1);
            let to = Remote { addr: b.memory.0.addr(), rkey: b.memory.1 };
            w.rdma_write(to, &[Sge { addr, len: MESSAGE as u32, lkey }]).signaled();
        });
        measure("READ", Direction::Response, mtu, tags, rounds, |a, b, w| {
            let (addr, lkey) = (a.memory.0.addr(), a.memory.1);
            let from = Remote { addr: b.memory.0.addr(), rkey: b.memory.1 };
            w.rdma_read(from, &[Sge { addr, len: MESSAGE as u32, lkey }]).signaled();
        });
    }
}
