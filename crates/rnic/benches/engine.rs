//! Cost of a WQE in the engine: `cargo bench -p granary-rnic`.
//!
//! One thread executes a managed ring of WQEs repeatedly, between two QPs of one engine. Each WQE
//! is fetched, decoded, checked and executed as usual. The result is the median of several rounds,
//! with the quartiles. On a busy machine, compare only lines of the same run.

use rnic::Engine;
use rnic::limits::Limits;
use rnic::spec::*;
use std::hint::black_box;
use std::time::Instant;
use verbs::wqe::{Builder, Remote, Sge, Umr};
use verbs::{Access, DmaMemory, FunctionId, Key, MwKind, QpChange, QpState, Qpn};

const PF: FunctionId = FunctionId::PHYSICAL;
const BLOCKS: u32 = 1024;
const RECEIVES: u32 = 1024;
const SPAN: usize = 1 << 20;

struct Bench {
    e: Engine,
    ring: DmaMemory,
    record: DmaMemory,
    qpn: Qpn,
    a: (DmaMemory, Key),
    b: (DmaMemory, Key),
    window: Key,
    received: u32,
    limit: u16,
    peer: Qpn,
    peer_pd: verbs::Pdn,
    /// Words that guard windows.
    words: (DmaMemory, Key),
    /// A QP of the peer's PD that binds windows: its number, its ring, and its producer index.
    binder: (Qpn, DmaMemory, u16),
}

const BINDER_BLOCKS: u32 = 64;

fn memory(len: usize) -> DmaMemory {
    DmaMemory::anonymous(len).expect("memory for the benchmark")
}

impl Bench {
    fn new() -> Self {
        let mut e = Engine::new(Limits::default());
        let (pa, pb) = (e.alloc_pd(PF).unwrap(), e.alloc_pd(PF).unwrap());
        let every_access = Access::LOCAL_ALL | Access::REMOTE_ALL;
        let region = |e: &mut Engine, pd| {
            let mem = memory(SPAN);
            let key = e.reg_mr(PF, pd, mem.clone(), mem.addr(), every_access).unwrap();
            (mem, key)
        };
        let (a, b) = (region(&mut e, pa), region(&mut e, pb));
        let window = e.alloc_mw(PF, pa, MwKind::Type2).unwrap();
        let spec = || CqSpec {
            ring: memory(64 * 1024),
            entries: 1024,
            record: memory(8),
            ignore_overrun: true,
            initial_count: 0,
        };
        let cq = e.create_cq(PF, spec()).unwrap();
        let ring = memory(BLOCKS as usize * 64);
        let qp = |pd, send, recv| QpSpec {
            pd,
            send,
            recv,
            send_cq: cq,
            recv_cq: cq,
            access: Access::REMOTE_ALL,
            privileged: true,
        };
        let send = SendSpec { ring: ring.clone(), blocks: BLOCKS, managed: true };
        let qpn = e.create_qp(PF, qp(pa, Some(send), Recv::None)).unwrap();
        let (recv_ring, record) = (memory(RECEIVES as usize * 16), memory(8));
        for i in 0..RECEIVES as usize {
            let sge = Sge { addr: b.0.addr() + 64 * i as u64, len: 64, lkey: b.1 };
            recv_ring.write(16 * i, &sge.to_bytes());
        }
        let recv = RecvSpec {
            ring: recv_ring,
            entries: RECEIVES,
            stride: 16,
            record: record.clone(),
            initial_consumer: 0,
        };
        let peer = e.create_qp(PF, qp(pb, None, Recv::Own { spec: recv, managed: false })).unwrap();
        for (q, peer) in [(qpn, peer), (peer, qpn)] {
            for c in [
                QpChange::Init,
                QpChange::ReadyToReceive { peer: peer.into() },
                QpChange::ReadyToSend,
            ] {
                e.modify_qp(PF, q, c).unwrap();
            }
        }
        let bind_ring = memory(BINDER_BLOCKS as usize * 64);
        let send = SendSpec { ring: bind_ring.clone(), blocks: BINDER_BLOCKS, managed: true };
        let binder = e.create_qp(PF, qp(pb, Some(send), Recv::None)).unwrap();
        for c in [
            QpChange::Init,
            QpChange::ReadyToReceive { peer: binder.into() },
            QpChange::ReadyToSend,
        ] {
            e.modify_qp(PF, binder, c).unwrap();
        }
        let words_pd = e.alloc_pd(PF).unwrap();
        let words = memory(SPAN);
        let key = e.reg_mr(PF, words_pd, words.clone(), words.addr(), every_access).unwrap();
        Self {
            e,
            ring,
            record,
            qpn,
            a,
            b,
            window,
            received: 0,
            limit: 0,
            peer,
            peer_pd: pb,
            words: (words, key),
            binder: (binder, bind_ring, 0),
        }
    }

    /// Fills the ring with the WQEs that `fill` builds for index `i`. Returns their number.
    fn write(&mut self, fill: impl Fn(&Self, &mut Builder, usize)) -> usize {
        let (mut at, mut n) = (0, 0);
        while at < BLOCKS {
            let mut b = Builder::new(self.qpn, at as u16);
            fill(self, &mut b, n);
            if at + b.blocks() > BLOCKS {
                b.nop_filling((BLOCKS - at).min(15));
            }
            self.ring.write(at as usize * 64, b.bytes());
            at += b.blocks();
            n += 1;
        }
        n
    }

    /// Executes the whole ring once, with this number of receives.
    fn lap(&mut self, receives: u32) {
        self.received += receives;
        self.record.store_be32(0, self.received & 0xffff);
        self.limit = self.limit.wrapping_add(BLOCKS as u16);
        self.e.enable_send(PF, self.qpn, self.limit).unwrap();
        while self.e.poll(0, 1 << 16) > 0 {}
    }

    fn measure(&mut self, name: &str, rounds: usize, fill: impl Fn(&Self, &mut Builder, usize)) {
        let n = self.write(fill);
        let receives = if name.starts_with("SEND") { n as u32 } else { 0 };
        let mut ns: Vec<f64> = (0..rounds)
            .map(|_| {
                let laps = 20;
                let t = Instant::now();
                for _ in 0..laps {
                    self.lap(receives);
                }
                t.elapsed().as_nanos() as f64 / (laps * n) as f64
            })
            .collect();
        let state = self.e.query_qp(PF, self.qpn).unwrap().info.state;
        assert_eq!(state, QpState::ReadyToSend, "{name} failed");
        ns.sort_by(f64::total_cmp);
        let at = |q: f64| ns[((ns.len() - 1) as f64 * q) as usize];
        println!("{name:<28} {:>8.1} {:>8.1} {:>8.1}", at(0.5), at(0.25), at(0.75));
    }

    /// Binds `count` type-1 windows of 64 bytes in the peer's PD, with a guard word for each if
    /// `guarded`. Returns their keys.
    fn windows(&mut self, count: usize, guarded: bool) -> Vec<Key> {
        const TAG: u64 = 5;
        let (words, region) = self.words.clone();
        let spec = |i: usize| GuardSpec {
            region,
            addr: words.addr() + 8 * i as u64,
            value: 1 << 24,
            mask: !(0x7f << 14),
        };
        self.e.modify_qp(PF, self.peer, QpChange::Tag { tag: TAG }).unwrap();
        let mut keys = Vec::new();
        for i in 0..count {
            words.store_be64(8 * i, 1 << 24 | 3 << 14 | TAG);
            let window = match guarded {
                true => self.e.alloc_guarded_mw(PF, self.peer_pd, &spec(i)).unwrap(),
                false => self.e.alloc_mw(PF, self.peer_pd, MwKind::Type1).unwrap(),
            };
            let tag = window.tag().wrapping_add(1);
            let start = self.b.0.addr() + 64 * i as u64;
            let umr = Umr::bind_type1(window, tag, Access::REMOTE_ALL, self.b.1, start, 64);
            let mut b = Builder::new(self.binder.0, self.binder.2);
            b.umr(&umr);
            let at = (self.binder.2 as u32 % BINDER_BLOCKS) as usize * 64;
            self.binder.1.write(at, b.bytes());
            self.binder.2 = self.binder.2.wrapping_add(b.blocks() as u16 + 1);
            self.binder.1.write((at + 192) % (BINDER_BLOCKS as usize * 64), &{
                let mut nop = Builder::new(self.binder.0, self.binder.2.wrapping_sub(1));
                nop.nop();
                nop.bytes().to_vec()
            });
            self.e.enable_send(PF, self.binder.0, self.binder.2).unwrap();
            while self.e.poll(0, 64) > 0 {}
            keys.push(Key::new(window.index(), tag));
        }
        keys
    }

    /// Measures READs of 64 B under two sets of keys in alternation. Prints both medians, and the
    /// median of the ratios of adjacent rounds.
    fn compare(&mut self, name: &str, rounds: usize, keys: [&[Key]; 2]) {
        let mut ns: [Vec<f64>; 2] = [Vec::new(), Vec::new()];
        for round in 0..2 * rounds {
            let keys = keys[round % 2];
            let n = self.write(|b, w, i| {
                let at = i % keys.len();
                let from = Remote { addr: b.b.0.addr() + 64 * at as u64, rkey: keys[at] };
                w.rdma_read(from, &[b.here(64 * at, 64)]);
            });
            self.lap(0); // Warms the caches.
            let t = Instant::now();
            (0..10).for_each(|_| self.lap(0));
            ns[round % 2].push(t.elapsed().as_nanos() as f64 / (10 * n) as f64);
        }
        let state = self.e.query_qp(PF, self.qpn).unwrap().info.state;
        assert_eq!(state, QpState::ReadyToSend, "{name} failed");
        let mut ratios: Vec<f64> = ns[1].iter().zip(&ns[0]).map(|(b, a)| b / a).collect();
        let at = |v: &mut Vec<f64>, q: f64| {
            v.sort_by(f64::total_cmp);
            v[((v.len() - 1) as f64 * q) as usize]
        };
        let (plain, guarded) = (at(&mut ns[0], 0.5), at(&mut ns[1], 0.5));
        let [low, mid, high] = [0.25, 0.5, 0.75].map(|q| at(&mut ratios, q));
        println!("{name:<28} {plain:>8.1} {guarded:>8.1}   ratio {mid:.3} ({low:.3} to {high:.3})");
    }

    fn here(&self, at: usize, len: u32) -> Sge {
        Sge { addr: self.a.0.addr() + at as u64, len, lkey: self.a.1 }
    }

    fn there(&self, at: usize) -> Remote {
        Remote { addr: self.b.0.addr() + at as u64, rkey: self.b.1 }
    }
}

fn main() {
    // `cargo test --benches` passes no `--bench`: one round checks that the program works.
    let rounds = if std::env::args().any(|a| a == "--bench") { 51 } else { 1 };
    let mut b = Bench::new();
    println!("{:<28} {:>8} {:>8} {:>8}", "ns per WQE", "median", "25 %", "75 %");
    b.measure("NOP", rounds, |_, w, _| _ = w.nop());
    b.measure("NOP, signaled", rounds, |_, w, _| _ = w.nop().signaled());
    for len in [8u32, 4096] {
        let place = move |i: usize| i * len as usize % (SPAN - 4096);
        b.measure(&format!("WRITE {len} B"), rounds, move |b, w, i| {
            w.rdma_write(b.there(place(i)), &[b.here(place(i), len)]);
        });
        b.measure(&format!("READ {len} B"), rounds, move |b, w, i| {
            w.rdma_read(b.there(place(i)), &[b.here(place(i), len)]);
        });
    }
    b.measure("READ 129 B over 23 SGEs", rounds, |b, w, i| {
        let lens = [1, 1, 1, 1, 1, 1, 3, 8, 8, 1, 3, 8, 8, 1, 3, 8, 8, 8, 8, 24, 8, 8, 8];
        let list: Vec<Sge> =
            lens.iter().enumerate().map(|(k, &l)| b.here((i + k) * 64 % 65536, l)).collect();
        w.rdma_read(b.there(i * 256 % 65536), &list);
    });
    b.measure("WRITE 8 B inline", rounds, |b, w, i| {
        w.rdma_write_inline(b.there(i * 8), &(i as u64).to_be_bytes());
    });
    b.measure("masked FAA", rounds, |b, w, i| {
        w.masked_fetch_add(b.there(i % 64 * 8), 1 << 32, 1 << 47, b.here(i * 8, 8));
    });
    b.measure("masked CAS", rounds, |b, w, i| {
        w.masked_compare_swap(b.there(i % 64 * 8), (0, 0), (7, !0), b.here(i * 8, 8));
    });
    b.measure("SEND 8 B to RECV", rounds, |b, w, i| {
        w.send(&[b.here(i * 8, 8)]);
    });
    println!("{:<28} {:>8} {:>8}", "READ 64 B, type-1 windows", "plain", "guarded");
    let mut g = Bench::new();
    let (plain, guarded) = (g.windows(1024, false), g.windows(1024, true));
    g.compare("one window", rounds, [&plain[..1], &guarded[..1]]);
    g.compare("1,024 windows", rounds, [&plain, &guarded]);
    // A bind takes three blocks and an unbind two, so a pair takes five. NOPs fill the rest of the
    // ring.
    let mut window = Bench::new();
    window.measure("UMR, bind and unbind by turns", rounds, |b, w, i| {
        let (key, qpn) = (Key::new(b.window.index(), b.window.tag()), b.qpn);
        let start = b.a.0.addr() + (i as u64 % 128) * 4096;
        if i >= BLOCKS as usize / 5 * 2 {
            w.nop();
            return;
        }
        let umr = if i % 2 == 0 {
            Umr::bind(key, key.tag(), qpn, Access::REMOTE_ALL, b.a.1, start, 4096)
        } else {
            Umr::unbind(key, true)
        };
        w.umr(&umr);
    });
    black_box(&window.b);
}
