//! READ over the `shm` port compared with a bare hand-off between two threads, in one run.
//!
//! ```text
//! cargo bench -p granary-rnic --bench shm [-- ROUNDS] [WORD]
//! ```
//!
//! The bare hand-off is a NIC without queues and protection: a doorbell line, a copy, and a
//! completion line. Variants alternate, so that other load on the machine affects all of them; the
//! median and the best round of each are printed. The client is attached as another process would
//! be: its queues and buffers are shared memory that the NIC thread maps a second time.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rnic::nic::{SoftCq, SoftMr, SoftNic, SoftQp};
use rnic::port::Function;
use rnic::port::shm::{Attached, Host, Session, SessionLimits, socket};
use verbs::completion::Completer;
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr, QueuePair, Receive,
    Status, WorkRequest,
};

/// Duration of one run of one variant.
const SLICE: Duration = Duration::from_millis(20);
/// Size in bytes of the region that is read.
const REGION: usize = 1 << 20;

fn main() {
    let rounds = std::env::args().filter_map(|a| a.parse().ok()).next_back().unwrap_or(25);
    let (nic, host) = SoftNic::host().expect("a host");
    let attached = attach(&host);
    let bed = Bed::new(&attached, &nic);
    let inline = SoftNic::inline();
    let inline = Bed::new(&inline, &inline);
    let bare = Bare::start();
    let mut variants: Vec<Variant<'_>> = Vec::new();
    for size in [8, 4096] {
        let (bare, bed, inline) = (&bare, &bed, &inline);
        variants.push(("bare, round trip", size, Box::new(move || bare.measure(size, 1))));
        variants.push(("READ, round trip", size, Box::new(move || bed.round_trips(size))));
        variants.push(("READ, Completer", size, Box::new(move || bed.completer_round_trips(size))));
        variants.push(("bare, 64 in flight", size, Box::new(move || bare.measure(size, 64))));
        variants.push(("READ, 64 in flight", size, Box::new(move || bed.stream(size, 1, 1))));
        variants.push(("READ, 64, lists of 8", size, Box::new(move || bed.stream(size, 8, 1))));
        let op = "READ, 64, lists of 8, 1 of 8 signaled";
        variants.push((op, size, Box::new(move || bed.stream(size, 8, 8))));
        let op = "READ, lists of 8, inline (no hand-off)";
        variants.push((op, size, Box::new(move || inline.stream(size, 8, 1))));
    }
    // A word argument selects the variants whose names contain it.
    if let Some(word) =
        std::env::args().skip(1).find(|a| a != "--bench" && a.parse::<u32>().is_err())
    {
        variants.retain(|(name, ..)| name.contains(&word));
    }
    let mut results = vec![Vec::new(); variants.len()];
    for _ in 0..rounds {
        for ((_, _, run), results) in variants.iter_mut().zip(&mut results) {
            results.push(run());
        }
    }
    println!("{:<40} {:>6} {:>12} {:>12}", "", "bytes", "median ns/op", "best ns/op");
    let mut bare_median = f64::NAN;
    for ((name, size, _), results) in variants.iter().zip(&mut results) {
        results.sort_by(f64::total_cmp);
        let (median, best) = (results[results.len() / 2], results[0]);
        if name.starts_with("bare") {
            bare_median = median;
        }
        // NaN where the bare hand-off was not picked.
        let ratio = median / bare_median;
        println!("{name:<40} {size:>6} {median:>12.1} {best:>12.1}   {ratio:.2} x bare");
    }
    let stats = host.stats().expect("the NIC is there");
    println!("NIC thread: {:?} of CPU, {} WQEs", stats.cpu, stats.engine.wqes_total());
}

/// A variant: its name, bytes per operation, and a function that runs it and returns ns per
/// operation.
type Variant<'a> = (&'static str, usize, Box<dyn FnMut() -> f64 + 'a>);

/// Attaches to `host` over a socket pair, served by a thread.
fn attach(host: &Host) -> SoftNic {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC;
    let (client, server): (OwnedFd, OwnedFd) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket pair");
    let mut session = Session::new(host, SessionLimits::default());
    std::thread::spawn(move || {
        let _service = socket::receive(&server);
        while let Ok(Some(packet)) = socket::receive(&server) {
            let (reply, fds) = session.handle(&packet.bytes, packet.descriptors);
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            socket::send(&server, &reply, &fds).expect("answering");
        }
    });
    SoftNic::new(Function::Attached(Attached::open(client).expect("attaching")))
}

/// A client's QP, connected to a QP of the host that owns the region.
struct Bed {
    qp: SoftQp,
    cq: SoftCq,
    completer: Completer<SoftCq>,
    completer_qp: SoftQp,
    local: SoftMr,
    remote: SoftMr,
    _peers: Vec<SoftQp>,
}

impl Bed {
    fn new(client: &SoftNic, server: &SoftNic) -> Self {
        let (pd, server_pd) = (client.alloc_pd().expect("a PD"), server.alloc_pd().expect("a PD"));
        let cq = |nic: &SoftNic| {
            nic.create_cq(CqAttr { entries: 128, ignore_overrun: false }).expect("a CQ")
        };
        let qp = |nic: &SoftNic, pd, cq: &SoftCq| {
            let attr = QpAttr {
                send_cq: cq,
                recv_cq: cq,
                send_blocks: 128,
                receive: Receive::None,
                access: Access::REMOTE_ALL,
            };
            nic.create_qp(pd, attr).expect("a QP")
        };
        let (cq_a, cq_b, server_cq) = (cq(client), cq(client), cq(server));
        let (a, b) = (qp(client, &pd, &cq_a), qp(client, &pd, &cq_b));
        let peers = [&a, &b].map(|qp_of_client| {
            let peer = qp(server, &server_pd, &server_cq);
            peer.connect(qp_of_client.qpn()).expect("connecting");
            qp_of_client.connect(peer.qpn()).expect("connecting");
            peer
        });
        let memory = |nic: &SoftNic, pd| {
            let memory = nic.alloc_dma(REGION).expect("memory");
            memory.write(0, &vec![1; REGION]);
            nic.reg_mr(pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL).expect("an MR")
        };
        Self {
            qp: a,
            cq: cq_a,
            completer: Completer::new(cq_b),
            completer_qp: b,
            local: memory(client, &pd),
            remote: memory(server, &server_pd),
            _peers: peers.into(),
        }
    }

    fn round_trips(&self, size: usize) -> f64 {
        let mut out = [Completion::EMPTY];
        per_op(|i| {
            let to = [self.local.sge(0, size as u32)];
            let op = Op::Read { from: self.remote.remote(place(i, size, REGION)), to: &to };
            self.qp.post_send(&[WorkRequest { id: i, op, signaled: true }]).expect("room");
            while self.cq.poll(&mut out) == 0 {
                std::hint::spin_loop();
            }
            assert_eq!((out[0].id, out[0].status), (i, Status::Success));
            1
        })
    }

    fn completer_round_trips(&self, size: usize) -> f64 {
        per_op(|i| {
            let to = [self.local.sge(0, size as u32)];
            let op = Op::Read { from: self.remote.remote(place(i, size, REGION)), to: &to };
            let post = |id| self.completer_qp.post_send(&[WorkRequest { id, op, signaled: true }]);
            let pending = self.completer.submit(post).expect("room");
            assert_eq!(pending.wait().expect("the NIC").status, Status::Success);
            1
        })
    }

    /// Keeps 64 requests in flight, posted `list` at a time, with every `signal`-th signaled.
    fn stream(&self, size: usize, list: usize, signal: usize) -> f64 {
        let mut out = [Completion::EMPTY; 64];
        let (mut posted, mut in_flight) = (0u64, 0);
        let mut turn = |room: usize| {
            while in_flight + list <= room {
                let sges: [_; 8] = std::array::from_fn(|k| {
                    [self.local.sge(place(posted + k as u64, size, 64 * size), size as u32)]
                });
                let wrs: [_; 8] = std::array::from_fn(|k| {
                    let i = posted + k as u64;
                    let from = self.remote.remote(place(i, size, REGION));
                    let signaled = (k + 1).is_multiple_of(signal);
                    WorkRequest { id: i, op: Op::Read { from, to: &sges[k] }, signaled }
                });
                self.qp.post_send(&wrs[..list]).expect("room");
                posted += list as u64;
                in_flight += list;
            }
            let done = self.cq.poll(&mut out);
            assert!(out[..done].iter().all(|c| c.status == Status::Success));
            in_flight -= done * signal;
            (done * signal, in_flight)
        };
        let ns = per_op(|_| turn(64).0 as u64);
        while turn(0).1 > 0 {
            std::hint::spin_loop();
        }
        ns
    }
}

/// The bare hand-off: a thread that copies memory when its doorbell line changes.
struct Bare {
    shared: &'static BareShared,
}

#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

#[derive(Default)]
struct BareShared {
    doorbell: Line,
    completion: Line,
    size: Line,
    asleep: AtomicBool,
    from: Buffer,
    to: Buffer,
}

/// Bytes that only the copying thread touches while the bench runs.
struct Buffer(Vec<AtomicU64>);

impl Default for Buffer {
    fn default() -> Self {
        Buffer((0..REGION / 8).map(|_| AtomicU64::new(1)).collect())
    }
}

impl Bare {
    fn start() -> Self {
        let shared: &'static BareShared = Box::leak(Box::default());
        shared.asleep.store(true, Ordering::Relaxed);
        std::thread::spawn(move || shared.serve());
        Self { shared }
    }

    fn measure(&self, size: usize, in_flight: u64) -> f64 {
        let s = self.shared;
        s.size.0.store(size as u64, Ordering::Relaxed);
        s.asleep.store(false, Ordering::Release);
        let mut posted = s.doorbell.0.load(Ordering::Relaxed);
        let mut done = posted;
        let ns = per_op(|_| {
            while posted - done < in_flight {
                posted += 1;
                s.doorbell.0.store(posted, Ordering::Release);
            }
            let now = loop {
                let now = s.completion.0.load(Ordering::Acquire);
                if now != done {
                    break now;
                }
                std::hint::spin_loop();
            };
            let finished = now - done;
            done = now;
            finished
        });
        while s.completion.0.load(Ordering::Acquire) < posted {
            std::hint::spin_loop();
        }
        s.asleep.store(true, Ordering::Release);
        ns
    }
}

impl BareShared {
    fn serve(&self) {
        let mut done = 0;
        loop {
            if self.asleep.load(Ordering::Acquire) {
                // Between two measurements the NIC thread needs the CPU.
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let posted = self.doorbell.0.load(Ordering::Acquire);
            let size = self.size.0.load(Ordering::Relaxed) as usize;
            while done < posted {
                let from = self.from.0[place(done, size, REGION) / 8].as_ptr();
                let to = self.to.0[place(done, size, 64 * size) / 8].as_ptr();
                // SAFETY: `place` keeps `size` bytes within both buffers, and no other thread
                // touches them.
                unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), size) };
                done += 1;
                self.completion.0.store(done, Ordering::Release);
            }
            std::hint::spin_loop();
        }
    }
}

/// Returns the offset of operation `i` of `size` bytes in a region of `region` bytes.
fn place(i: u64, size: usize, region: usize) -> usize {
    i as usize * size % region
}

/// Runs `turn` for a while after a warm-up and returns ns per operation. `turn` returns the number
/// of operations that it completed.
fn per_op(mut turn: impl FnMut(u64) -> u64) -> f64 {
    let mut i = 0;
    let mut count_for = |time: Duration| {
        let (since, mut count) = (Instant::now(), 0);
        loop {
            for _ in 0..64 {
                count += turn(i);
                i += 1;
            }
            let elapsed = since.elapsed();
            if elapsed >= time {
                return elapsed.as_nanos() as f64 / count as f64;
            }
        }
    };
    count_for(SLICE / 5);
    count_for(SLICE)
}
