//! Service of a client beside a client that floods the NIC:
//! `cargo bench -p granary-rnic --bench fairness`.
//!
//! Two functions, one engine, one thread. The flooding client keeps the send rings of 1, 8 or 64
//! QPs full of 8-byte READs or of 1 MiB WRITEs. The benchmark measures three victims in succession:
//!
//! - a client that reads 8 bytes, waits for the completion and reads again (latency);
//! - the memory node's own function, which does the same (latency);
//! - a client that keeps a single ring full of 8-byte READs (rate).
//!
//! The engine is polled as in the `shm` port, with 64 WQEs for each poll. Only the polls are timed.

use rnic::Engine;
use rnic::limits::{FunctionLimits, Limits};
use rnic::spec::*;
use std::time::{Duration, Instant};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{Access, DmaMemory, FunctionId, QpChange, QpState, Qpn};

const BLOCKS: u16 = 1024;
const BUDGET: usize = 64;
const MIB: u32 = 1 << 20;

/// A QP that only sends, connected to a QP that only responds.
struct Sender {
    function: FunctionId,
    qpn: Qpn,
    limit: u16,
}

/// A function's QPs.
struct Client {
    qps: Vec<Sender>,
}

fn memory(len: usize) -> DmaMemory {
    DmaMemory::anonymous(len).expect("memory for the benchmark")
}

impl Client {
    /// Makes `count` QPs whose rings hold the same WQE in every block: a READ of 8 bytes, or a
    /// WRITE of `bytes`.
    fn new(e: &mut Engine, f: FunctionId, count: usize, bytes: u32) -> Self {
        let pd = e.alloc_pd(f).unwrap();
        let every_access = Access::LOCAL_ALL | Access::REMOTE_ALL;
        let mut region = || {
            let mem = memory(bytes.max(4096) as usize);
            let key = e.reg_mr(f, pd, mem.clone(), mem.addr(), every_access).unwrap();
            (mem, key)
        };
        let (here, there) = (region(), region());
        let cq = CqSpec {
            ring: memory(64 * 64),
            entries: 64,
            record: memory(8),
            ignore_overrun: true,
            initial_count: 0,
        };
        let cq = e.create_cq(f, cq).unwrap();
        let mut qps = Vec::new();
        for _ in 0..count {
            let ring = memory(BLOCKS as usize * 64);
            let spec = |send| QpSpec {
                pd,
                send,
                recv: Recv::None,
                send_cq: cq,
                recv_cq: cq,
                access: every_access,
                privileged: false,
            };
            let send = SendSpec { ring: ring.clone(), blocks: BLOCKS as u32, managed: true };
            let (qpn, peer) =
                (e.create_qp(f, spec(Some(send))).unwrap(), e.create_qp(f, spec(None)).unwrap());
            for (q, peer) in [(qpn, peer), (peer, qpn)] {
                for c in [
                    QpChange::Init,
                    QpChange::ReadyToReceive { peer: peer.into() },
                    QpChange::ReadyToSend,
                ] {
                    e.modify_qp(f, q, c).unwrap();
                }
            }
            let remote = Remote { addr: there.0.addr(), rkey: there.1 };
            let local = Sge { addr: here.0.addr(), len: bytes, lkey: here.1 };
            for i in 0..BLOCKS {
                let mut b = Builder::new(qpn, i);
                match bytes {
                    8 => b.rdma_read(remote, &[local]),
                    _ => b.rdma_write(remote, &[local]),
                };
                ring.write(i as usize * 64, b.bytes());
            }
            qps.push(Sender { function: f, qpn, limit: 0 });
        }
        Self { qps }
    }

    fn refill(&mut self, e: &mut Engine) {
        for q in &mut self.qps {
            q.refill(e);
        }
    }
}

impl Sender {
    fn info(&self, e: &Engine) -> QpDescription {
        let info = e.query_qp(self.function, self.qpn).unwrap();
        assert_eq!(info.info.state, QpState::ReadyToSend);
        info
    }

    /// Enables a whole ring of WQEs.
    fn refill(&mut self, e: &mut Engine) {
        self.limit = self.info(e).progress.send_consumer.wrapping_add(BLOCKS);
        e.enable_send(self.function, self.qpn, self.limit).unwrap();
    }

    /// Enables one more WQE.
    fn post(&mut self, e: &mut Engine) {
        self.limit = self.limit.wrapping_add(1);
        e.enable_send(self.function, self.qpn, self.limit).unwrap();
    }
}

struct Bed {
    e: Engine,
    flood: Option<Client>,
    polls: u64,
}

impl Bed {
    fn new(flood: Option<(usize, u32)>) -> Self {
        let mut e = Engine::new(Limits::default());
        let flood = flood.map(|(count, bytes)| {
            let f = e.add_function(FunctionLimits::default()).unwrap();
            Client::new(&mut e, f, count, bytes)
        });
        Self { e, flood, polls: 0 }
    }

    /// Polls the engine once. Returns the time of the poll.
    fn poll(&mut self) -> Duration {
        if let Some(flood) = self.flood.as_mut().filter(|_| self.polls.is_multiple_of(8)) {
            flood.refill(&mut self.e);
        }
        self.polls += 1;
        let start = Instant::now();
        self.e.poll(0, BUDGET);
        start.elapsed()
    }

    /// Measures median and 99th percentile of a READ's latency, in ns. The latency includes the
    /// whole poll during which the READ is posted.
    fn latency(&mut self, f: FunctionId, reads: usize) -> (u128, u128) {
        let mut victim = Client::new(&mut self.e, f, 1, 8);
        let mut times = Vec::with_capacity(reads);
        for i in 0..reads {
            // A varying number of polls, so that the READs are not in phase with the flooding
            // client's quanta.
            for _ in 0..i % 7 {
                self.poll();
            }
            let before = victim.qps[0].info(&self.e).progress.executed;
            // The engine sees a doorbell that is written during a poll after that poll.
            let mut time = self.poll();
            victim.qps[0].post(&mut self.e);
            while victim.qps[0].info(&self.e).progress.executed == before {
                time += self.poll();
            }
            times.push(time.as_nanos());
        }
        times.sort();
        (times[reads / 2], times[reads * 99 / 100])
    }

    /// Measures the rate of one full ring, in READs per second.
    fn rate(&mut self, time: Duration) -> f64 {
        let f = self.e.add_function(FunctionLimits::default()).unwrap();
        let mut victim = Client::new(&mut self.e, f, 1, 8);
        let mut spent = Duration::ZERO;
        while spent < time {
            victim.refill(&mut self.e);
            for _ in 0..8 {
                spent += self.poll();
            }
        }
        victim.qps[0].info(&self.e).progress.executed as f64 / spent.as_secs_f64()
    }
}

fn main() {
    let full = std::env::args().any(|a| a == "--bench");
    let (reads, time) =
        if full { (5_000, Duration::from_millis(300)) } else { (20, Duration::ZERO) };
    let row = |name: &str, flood| {
        let mut bed = Bed::new(flood);
        let f = bed.e.add_function(FunctionLimits::default()).unwrap();
        let (median, p99) = bed.latency(f, reads);
        let (node, node_p99) = bed.latency(FunctionId::PHYSICAL, reads);
        let rate = bed.rate(time) / 1e6;
        println!("{name:<22} {median:>8} {p99:>8} {node:>8} {node_p99:>8} {rate:>8.2}");
    };
    println!("{:<22} {:>17} {:>17} {:>8}", "", "client's READ, ns", "node's READ, ns", "rate");
    println!(
        "{:<22} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "flood", "median", "99 %", "median", "99 %", "M/s"
    );
    row("none", None);
    for bytes in [8, MIB] {
        for count in [1, 8, 64] {
            row(&format!("{count} QPs of {bytes} B"), Some((count, bytes)));
        }
    }
}
