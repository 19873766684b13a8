//! A network in virtual time, with a test bed at each end.

use super::*;
use crate::limits::{Limits, WireLimits};
use crate::wire::Outgoing;
use crate::wire::icrc::{self, Route};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use units::Random;
use verbs::{PairSecret, PathMtu, Psn, RemotePeer, SecretSide};

/// Faults of the network, each as a rate per 10,000 packets.
#[derive(Clone, Copy, Default, Debug)]
pub struct Faults {
    pub loss: u32,
    pub duplicates: u32,
    /// Packets delayed by up to 300 us, so that later packets overtake them.
    pub delays: u32,
    /// Packets with one flipped bit, which the ICRC check must detect.
    pub spoilt: u32,
}

/// A packet in flight.
struct Flying {
    to: usize,
    source: SocketAddr,
    destination: SocketAddr,
    bytes: Vec<u8>,
}

/// Two engines and the network between them.
pub struct Net {
    pub beds: [Bed; 2],
    pub now: u64,
    pub faults: Faults,
    pub random: Random,
    pub v6: bool,
    flying: BTreeMap<(u64, u64), Flying>,
    sequence: u64,
    /// All packets sent, if logging is on.
    pub log: Option<Vec<(usize, Vec<u8>)>>,
}

/// Parameters of a connection of two QPs.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub mtu: PathMtu,
    pub psn: [u32; 2],
    pub rd_atomic: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    /// The secret of both ends, and whether packets have tags.
    pub secret: Option<([u8; PairSecret::BYTES], bool)>,
    /// Each end accepts packets only from its peer's port.
    pub fixed_port: bool,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            mtu: PathMtu::Mtu1024,
            psn: [0xff_fff0, 77],
            rd_atomic: 16,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            secret: None,
            fixed_port: false,
        }
    }
}

impl Link {
    /// A connection whose packets have tags.
    pub fn authenticated() -> Self {
        Self {
            secret: Some(([0x5e; PairSecret::BYTES], true)),
            fixed_port: true,
            ..Self::default()
        }
    }
}

/// Source port of all packets; also the peer's port if `fixed_port` is set.
pub const PORT: u16 = 0xc123;

pub fn address(end: usize, v6: bool) -> IpAddr {
    match v6 {
        false => IpAddr::from([10, 0, 0, 1 + end as u8]),
        true => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1 + end as u16]),
    }
}

/// Limits of an engine with connections to other NICs.
pub fn wired() -> Limits {
    Limits { wire: Some(WireLimits::default()), ..Limits::default() }
}

impl Net {
    pub fn new(seed: u64) -> Self {
        Self::with(seed, wired())
    }

    pub fn with(seed: u64, limits: Limits) -> Self {
        Self {
            beds: [Bed::with(limits.clone()), Bed::with(limits)],
            now: 0,
            faults: Faults::default(),
            random: Random::new(seed),
            v6: seed & 1 == 1,
            flying: BTreeMap::new(),
            sequence: 0,
            log: None,
        }
    }

    /// Returns the peer of a QP at `end`, with the parameters of `link`.
    pub fn peer(&self, end: usize, of: Qpn, link: &Link) -> RemotePeer {
        let port = if link.fixed_port { PORT } else { crate::wire::UDP_PORT };
        let to = SocketAddr::new(address(1 - end, self.v6), port);
        let side = if end == 0 { SecretSide::Asking } else { SecretSide::Asked };
        let secret =
            link.secret.map(|(bytes, authenticated)| PairSecret { bytes, side, authenticated });
        RemotePeer {
            fixed_port: link.fixed_port,
            secret,
            mtu: link.mtu,
            sq_psn: Psn::new(link.psn[end]),
            rq_psn: Psn::new(link.psn[1 - end]),
            timeout: link.timeout,
            retry_cnt: link.retry_cnt,
            rnr_retry: link.rnr_retry,
            min_rnr_timer: link.min_rnr_timer,
            max_rd_atomic: link.rd_atomic,
            max_dest_rd_atomic: link.rd_atomic,
            ..RemotePeer::new(to, address(end, self.v6), of)
        }
    }

    pub fn connect(&mut self, qps: [&TestQp; 2], link: &Link) {
        for end in 0..2 {
            let peer = self.peer(end, qps[1 - end].qpn, link).into();
            let q = qps[end];
            for change in [QpChange::Init, QpChange::ReadyToReceive { peer }, QpChange::ReadyToSend]
            {
                self.beds[end].e.modify_qp(q.function, q.qpn, change).unwrap();
            }
        }
    }

    /// Creates two connected QPs, one at each end, with parameters changed by `shape`.
    pub fn pair_of(&mut self, link: &Link, shape: impl Fn(usize, &mut Shape)) -> [TestQp; 2] {
        let qps = [0, 1].map(|end| {
            let bed = &mut self.beds[end];
            let pd = bed.pd(PF);
            let mut s = bed.shape(PF, pd);
            shape(end, &mut s);
            bed.qp(&s)
        });
        self.connect([&qps[0], &qps[1]], link);
        qps
    }

    pub fn pair(&mut self, link: &Link) -> [TestQp; 2] {
        self.pair_of(link, |_, _| {})
    }

    /// Polls an engine until it has no work, and takes its packets.
    pub fn turn(&mut self, end: usize) {
        loop {
            let bed = &mut self.beds[end];
            bed.now = self.now;
            let done = bed.e.poll(self.now, 64);
            self.collect(end);
            if done == 0 {
                return;
            }
        }
    }

    /// Takes the packets in the outbox of an engine.
    fn collect(&mut self, end: usize) {
        let outbox = self.beds[end].e.outbox();
        if outbox.is_empty() {
            return;
        }
        let mut packets = Vec::with_capacity(outbox.len());
        for Outgoing { envelope, bytes, authenticated } in outbox.packets() {
            let source = SocketAddr::new(envelope.from, PORT);
            if !authenticated {
                icrc::seal(&Route::new(source, envelope.to), bytes);
            }
            packets.push((source, envelope.to, bytes.to_vec()));
        }
        outbox.clear();
        for (source, to, bytes) in packets {
            self.carry(end, source, to, bytes);
        }
    }

    fn carry(&mut self, end: usize, source: SocketAddr, destination: SocketAddr, bytes: Vec<u8>) {
        if let Some(log) = &mut self.log {
            log.push((end, bytes.clone()));
        }
        let faults = self.faults;
        let copies = 1 + self.happens(faults.duplicates) as u32;
        for _ in 0..copies {
            if self.happens(faults.loss) {
                continue;
            }
            let mut bytes = bytes.clone();
            if self.happens(faults.spoilt) {
                let at = self.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.below(8);
            }
            let mut delay = 5_000;
            if self.happens(faults.delays) {
                delay += self.below(300_000);
            }
            self.sequence += 1;
            let flying = Flying { to: 1 - end, source, destination, bytes };
            self.flying.insert((self.now + delay, self.sequence), flying);
        }
    }

    /// Returns a number below `n`: a remainder, because seeds of these tests are recorded.
    pub fn below(&mut self, n: u64) -> u64 {
        self.random.bits() % n
    }

    /// Returns whether a fault of this rate per 10,000 packets happens to a packet.
    fn happens(&mut self, rate: u32) -> bool {
        rate > 0 && self.below(10_000) < rate.into()
    }

    /// Advances time to the next event; returns false if there is none.
    pub fn pass(&mut self) -> bool {
        let flying = self.flying.first_key_value().map(|((at, _), _)| *at);
        let timers = self.beds.iter().filter_map(|b| b.e.next_timeout());
        let Some(next) = timers.chain(flying).min() else { return false };
        self.now = self.now.max(next);
        while let Some(first) = self.flying.first_entry()
            && first.key().0 <= self.now
        {
            let f = first.remove();
            let route = Route::new(f.source, f.destination);
            let is_intact = || icrc::check(&route, &f.bytes);
            let (source, destination) = (f.source, f.destination.ip());
            self.beds[f.to].e.receive(self.now, source, destination, &f.bytes, is_intact);
        }
        self.turn(0);
        self.turn(1);
        true
    }

    /// Runs until no packet is in flight and no timer runs, for at most a minute of virtual time.
    pub fn run(&mut self) {
        self.run_for(60_000_000_000);
    }

    /// Runs until no packet is in flight and no timer runs, or for `ns`.
    pub fn run_for(&mut self, ns: u64) {
        let end = self.now + ns;
        self.turn(0);
        self.turn(1);
        while self.now < end && self.pass() {}
    }

    /// Runs until no packet is in flight; timers do not expire.
    pub fn deliver(&mut self) {
        self.turn(0);
        self.turn(1);
        while !self.flying.is_empty() {
            self.pass();
        }
    }

    /// Injects a packet and polls the engine.
    pub fn inject(&mut self, to: usize, from: IpAddr, bytes: &[u8]) {
        self.drop_in(to, SocketAddr::new(from, PORT), bytes);
        self.turn(to);
    }

    /// Injects a packet without polling the engine.
    pub fn drop_in(&mut self, to: usize, from: SocketAddr, bytes: &[u8]) {
        let destination = address(to, self.v6);
        self.beds[to].e.receive(self.now, from, destination, bytes, || true);
    }

    /// Number of packets whose corruption was detected.
    pub fn spoilt(&self) -> u64 {
        let stats = self.beds.iter().map(|bed| bed.e.wire_stats());
        stats.map(|stats| stats.bad_icrc + stats.forged).sum()
    }

    /// Posts one signaled WQE at an end, runs, and returns its completion.
    #[track_caller]
    pub fn execute(
        &mut self,
        end: usize,
        q: &mut TestQp,
        fill: impl FnOnce(&mut Builder),
    ) -> verbs::cqe::Cqe {
        self.beds[end].post(q, |b| {
            fill(b);
            b.signaled();
        });
        self.run();
        q.send_cq.reader.poll().expect("a completion")
    }
}
