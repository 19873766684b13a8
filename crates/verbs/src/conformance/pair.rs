//! Fixture of a case: two ends of a connection.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::Bench;
use super::Side::{Client, Server};
use crate::{
    Access, AsyncEvent, Bind, Completion, CompletionQueue, CqAttr, DmaMemory, Key, MemoryRegion,
    MemoryWindow, Nic, Op, QpAttr, QpChange, QueuePair, Receive, ReceiveAttr, ReceiveRequest,
    Remote, Sge, Status, WorkRequest,
};

/// Timeout that is long enough for any event here on a busy machine.
pub const LONG: Duration = Duration::from_secs(20);
/// Time within which an unwanted event would happen.
pub const SHORT: Duration = Duration::from_millis(20);

/// A waiting thread, as observed by another thread.
#[derive(Default)]
pub struct Sleeper(OnceLock<i32>);

impl Sleeper {
    /// Registers the calling thread, before it waits.
    pub fn begins(&self) {
        let _ = self.0.set(rustix::thread::gettid().as_raw_nonzero().get());
    }

    /// Returns when three observations in a row show the thread asleep, which excludes a brief
    /// pause.
    pub fn until_asleep(&self) {
        let start = Instant::now();
        let mut asleep = 0;
        while asleep < 3 {
            assert!(start.elapsed() < LONG, "the waiting thread did not go to sleep");
            std::thread::sleep(Duration::from_millis(1));
            asleep = if self.0.get().is_some_and(|tid| sleeps(*tid)) { asleep + 1 } else { 0 };
        }
    }
}

/// Returns whether the thread `tid` of this process is asleep, from proc(5).
fn sleeps(tid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat"));
    let stat = stat.expect("proc(5) has an entry for a live thread");
    stat.rsplit(')').next().is_some_and(|behind_name| behind_name.starts_with(" S"))
}

/// Attributes of an end.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Size of the region in bytes.
    pub bytes: usize,
    /// Access rights of the region.
    pub region: Access,
    /// Access rights that the QP gives to its peer.
    pub qp: Access,
    /// Entries of the CQ.
    pub cq_entries: u32,
    /// Building blocks of the send queue.
    pub send_blocks: u32,
    /// The receive queue.
    pub receive: ReceiveAttr,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            bytes: 64 << 10,
            region: Access::LOCAL_ALL | Access::REMOTE_ALL,
            qp: Access::REMOTE_ALL,
            cq_entries: 128,
            send_blocks: 128,
            receive: ReceiveAttr { entries: 32, max_sges: 4 },
        }
    }
}

/// One end of a connection.
pub struct End<N: Nic> {
    /// The function.
    pub nic: N,
    /// The protection domain.
    pub pd: N::Pd,
    /// The CQ of both queues.
    pub cq: N::Cq,
    /// The queue pair.
    pub qp: N::Qp,
    /// The memory region.
    pub mr: N::Mr,
}

/// Both ends of a connection.
pub struct Pair<'a, B: Bench> {
    bench: &'a B,
    /// The client's end.
    pub client: End<B::Nic>,
    /// The server's end.
    pub server: End<B::Nic>,
}

impl<'a, B: Bench> Pair<'a, B> {
    /// Creates two connected ends with default attributes.
    pub fn new(bench: &'a B) -> Self {
        Self::of(bench, &Shape::default(), &Shape::default())
    }

    /// Creates two connected ends.
    pub fn of(bench: &'a B, client: &Shape, server: &Shape) -> Self {
        let pair = Self::unconnected(bench, client, server);
        pair.connect();
        pair
    }

    /// Creates two ends whose QPs are in Reset.
    pub fn unconnected(bench: &'a B, client: &Shape, server: &Shape) -> Self {
        let client = End::new(bench.client(), client);
        let server = End::new(bench.server(), server);
        Self { bench, client, server }
    }

    /// Resets and reconnects both QPs, and drops pending completions.
    pub fn connect(&self) {
        let (a, b) = (&self.client.qp, &self.server.qp);
        for end in [&self.client, &self.server] {
            end.qp.modify(QpChange::Reset).expect("any QP can be reset");
            end.drain();
        }
        connect(self.bench, a, b);
    }

    /// Runs an operation on the client that the server must refuse. Both QPs must then be in the
    /// error state; they are reconnected.
    #[track_caller]
    pub fn refused(&self, op: Op<'_>, status: Status) {
        let c = self.client.run(op);
        assert_eq!(c.status, status, "{op:?}");
        assert_eq!(self.client.qp.state().expect("a state"), crate::QpState::Error);
        assert_eq!(self.server.qp.state().expect("a state"), crate::QpState::Error);
        self.connect();
    }
}

/// Resets and connects a queue pair of the client and a queue pair of the server.
pub fn connect<B: Bench>(bench: &B, a: &<B::Nic as Nic>::Qp, b: &<B::Nic as Nic>::Qp) {
    for (qp, peer) in [((Client, a), (Server, b)), ((Server, b), (Client, a))] {
        qp.1.modify(QpChange::Reset).expect("any QP can be reset");
        qp.1.modify(QpChange::Init).expect("Reset to Init");
        bench.to_rtr(qp, peer).expect("Init to RTR");
    }
    for qp in [a, b] {
        qp.modify(QpChange::ReadyToSend).expect("RTR to RTS");
    }
}

impl<N: Nic> End<N> {
    /// Creates an end whose QP is in Reset.
    pub fn new(nic: &N, shape: &Shape) -> Self {
        let pd = nic.alloc_pd().expect("a PD");
        let attr = CqAttr { entries: shape.cq_entries, ignore_overrun: false };
        let cq = nic.create_cq(attr).expect("a CQ");
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: shape.send_blocks,
            receive: Receive::Own(shape.receive.clone()),
            access: shape.qp,
        };
        let qp = nic.create_qp(&pd, attr).expect("a QP");
        let memory = nic.alloc_dma(shape.bytes).expect("memory");
        let mr = nic.reg_mr(&pd, &memory, shape.region).expect("a region");
        End { nic: nic.clone(), pd, cq, qp, mr }
    }

    /// Registers another region in the same PD.
    pub fn region(&self, bytes: usize, access: Access) -> N::Mr {
        let memory = self.nic.alloc_dma(bytes).expect("memory");
        self.nic.reg_mr(&self.pd, &memory, access).expect("a region")
    }

    /// Posts signaled work.
    #[track_caller]
    pub fn post(&self, id: u64, op: Op<'_>) {
        self.qp.post_send(&[WorkRequest { id, op, signaled: true }]).expect("posting");
    }

    /// Posts a receive.
    #[track_caller]
    pub fn receive(&self, id: u64, to: &[Sge]) {
        self.qp.post_recv(&ReceiveRequest { id, to }).expect("posting a receive");
    }

    /// Posts signaled work and returns the next completion, which must be that of the work.
    #[track_caller]
    pub fn run(&self, op: Op<'_>) -> Completion {
        self.post(77, op);
        let c = self.next();
        assert_eq!((c.id, c.qpn), (77, self.qp.qpn()), "{c:?}");
        c
    }

    /// Runs an operation that must succeed.
    #[track_caller]
    pub fn ok(&self, op: Op<'_>) -> Completion {
        let c = self.run(op);
        assert_eq!(c.status, Status::Success, "{op:?}: {c:?}");
        c
    }

    /// Returns the next completion of the CQ.
    #[track_caller]
    pub fn next(&self) -> Completion {
        next(&self.cq)
    }

    /// Asserts that nothing completes within `SHORT`.
    #[track_caller]
    pub fn nothing(&self) {
        let mut out = [Completion::EMPTY];
        let any = self.cq.wait(SHORT).expect("the NIC is there") && self.cq.poll(&mut out) > 0;
        assert!(!any, "{:?}", out[0]);
    }

    /// Drops pending completions.
    pub fn drain(&self) {
        let mut out = [Completion::EMPTY; 16];
        while self.cq.poll(&mut out) > 0 {}
    }

    /// Writes into the region with the CPU.
    pub fn put(&self, offset: usize, data: &[u8]) {
        self.mr.memory().write(offset, data);
    }

    /// Reads from the region with the CPU.
    pub fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        bytes(self.mr.memory(), offset, len)
    }

    /// Returns an SGE within the region.
    pub fn sge(&self, offset: usize, len: u32) -> Sge {
        self.mr.sge(offset, len)
    }

    /// Returns the peer's address of a byte of the region.
    pub fn at(&self, offset: usize) -> Remote {
        self.mr.remote(offset)
    }

    /// Returns the bytes of a word in the byte order of this NIC's atomics.
    pub fn word(&self, value: u64) -> [u8; 8] {
        if self.nic.caps().big_endian_atomics { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    /// Returns a bind of `window`, whose current key is `key`, to `len` bytes at `offset` of the
    /// region.
    pub fn bind_of(&self, window: &N::Mw, key: Key, offset: usize, len: u32) -> Bind {
        Bind {
            key,
            kind: window.kind(),
            tag: key.tag().wrapping_add(1),
            region: self.mr.key(),
            addr: self.mr.iova() + offset as u64,
            len,
            access: Access::REMOTE_ALL,
            zero_based: false,
        }
    }

    /// Waits for an asynchronous event that `wanted` accepts; drops other events.
    #[track_caller]
    pub fn event(&self, wanted: impl Fn(&AsyncEvent) -> bool) -> AsyncEvent {
        for _ in 0..1000 {
            let events = self.nic.wait_events(LONG).expect("the NIC is there").events;
            assert!(!events.is_empty(), "no event");
            if let Some(event) = events.into_iter().find(&wanted) {
                return event;
            }
        }
        panic!("the expected event did not arrive");
    }
}

/// Returns the next completion of a CQ.
#[track_caller]
pub fn next<C: CompletionQueue>(cq: &C) -> Completion {
    let mut out = [Completion::EMPTY];
    while cq.poll(&mut out) == 0 {
        assert!(arrives(cq), "no completion");
    }
    out[0]
}

/// Returns whether a completion arrives at a CQ within [`LONG`].
pub fn arrives<C: CompletionQueue>(cq: &C) -> bool {
    // With virtual time a wait may end early.
    let tries = if C::VIRTUAL { 10 } else { 1 };
    (0..tries).any(|_| cq.wait(LONG).expect("the NIC is there"))
}

/// Returns a copy of bytes of `memory`.
pub fn bytes(memory: &DmaMemory, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    memory.read(offset, &mut out);
    out
}

/// Returns `len` bytes that depend on `seed`.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// Connects a queue pair of the client to itself.
pub fn connect_to_itself<B: Bench>(bench: &B, qp: &<B::Nic as Nic>::Qp) {
    qp.modify(QpChange::Reset).expect("any QP can be reset");
    qp.modify(QpChange::Init).expect("Reset to Init");
    bench.to_rtr((Client, qp), (Client, qp)).expect("Init to RTR");
    qp.modify(QpChange::ReadyToSend).expect("RTR to RTS");
}
