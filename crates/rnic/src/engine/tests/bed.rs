//! Test bed: an engine with a function, memory, and QPs with helpers for posting.

use crate::engine::Engine;
use crate::limits::*;
use crate::spec::*;
use std::sync::Arc;
use verbs::cqe::{CqReader, Cqe};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{Access, Cqn, DmaMemory, FunctionId, Key, Pdn, QpChange, QpState, Qpn};

/// The physical function.
pub const PF: FunctionId = FunctionId::PHYSICAL;

/// Bytes of a range whose pages are mapped: pages in RAM, and pages that were only read, for which
/// the kernel maps its shared zero page.
pub fn mapped(memory: &DmaMemory) -> usize {
    use std::os::unix::fs::FileExt;
    const PRESENT: u64 = 1 << 63;
    let page = rustix::param::page_size();
    let mut entries = vec![0; memory.len() / page * 8];
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entries, memory.addr() / page as u64 * 8).unwrap();
    let present = |entry: &&[u8; 8]| u64::from_ne_bytes(**entry) & PRESENT != 0;
    entries.as_chunks().0.iter().filter(present).count() * page
}

/// Allocates `len` zeroed bytes, page-aligned, on the heap instead of in a mapping, so that Miri
/// can run the test.
pub fn memory(len: usize) -> DmaMemory {
    struct Heap(*mut u8, std::alloc::Layout);
    // SAFETY: a heap block belongs to the process; it is accessed only through raw pointers.
    unsafe impl Send for Heap {}
    // SAFETY: as above.
    unsafe impl Sync for Heap {}
    impl Drop for Heap {
        fn drop(&mut self) {
            // SAFETY: allocated below with this layout, freed once.
            unsafe { std::alloc::dealloc(self.0, self.1) }
        }
    }
    let layout = std::alloc::Layout::from_size_align(len.max(1), 4096).unwrap();
    // SAFETY: the layout has a nonzero size.
    let base = unsafe { std::alloc::alloc_zeroed(layout) };
    assert!(!base.is_null());
    // SAFETY: the block lives as long as its owner, and is accessed only through raw pointers.
    unsafe { DmaMemory::from_raw(base, len, Arc::new(Heap(base, layout))) }
}

/// A CQ with its consumer.
pub struct Cq {
    pub cqn: Cqn,
    pub reader: CqReader,
    pub ring: DmaMemory,
    pub record: DmaMemory,
}

/// A QP with its rings, records and CQs.
pub struct TestQp {
    pub qpn: Qpn,
    pub function: FunctionId,
    pub pd: Pdn,
    pub ring: DmaMemory,
    pub blocks: u32,
    /// Building-block index of the next WQE.
    pub producer: u16,
    pub recv_ring: DmaMemory,
    pub recv_record: DmaMemory,
    pub recv_entries: u32,
    pub recv_producer: u32,
    pub send_cq: Cq,
    pub recv_cq: Cq,
}

/// Bytes of a receive WQE in the bed.
pub const STRIDE: u32 = 64;

/// Parameters of a QP of the bed.
#[derive(Clone, Debug)]
pub struct Shape {
    pub function: FunctionId,
    pub pd: Pdn,
    pub blocks: u32,
    pub managed: bool,
    pub recv: Option<bool>,
    pub recv_entries: u32,
    pub access: Access,
    pub privileged: bool,
    pub cq_entries: u32,
    pub ignore_overrun: bool,
    pub initial_count: u32,
    pub srq: Option<verbs::Srqn>,
}

pub struct Bed {
    pub e: Engine,
    pub now: u64,
}

impl Bed {
    pub fn new() -> Self {
        Self::with(Limits::default())
    }

    pub fn with(limits: Limits) -> Self {
        Self { e: Engine::new(limits), now: 0 }
    }

    pub fn pd(&mut self, f: FunctionId) -> Pdn {
        self.e.alloc_pd(f).unwrap()
    }

    pub fn shape(&self, function: FunctionId, pd: Pdn) -> Shape {
        Shape {
            function,
            pd,
            blocks: 64,
            managed: false,
            recv: Some(false),
            recv_entries: 16,
            access: Access::REMOTE_ALL,
            privileged: false,
            cq_entries: 64,
            ignore_overrun: false,
            initial_count: 0,
            srq: None,
        }
    }

    pub fn cq(&mut self, s: &Shape) -> Cq {
        let (ring, record) = (memory(s.cq_entries as usize * 64), memory(8));
        record.store_be32(0, s.initial_count);
        verbs::cqe::clear(&ring, s.cq_entries);
        let cqn = self
            .e
            .create_cq(
                s.function,
                CqSpec {
                    ring: ring.clone(),
                    entries: s.cq_entries,
                    record: record.clone(),
                    ignore_overrun: s.ignore_overrun,
                    initial_count: s.initial_count,
                },
            )
            .unwrap();
        let reader = CqReader::new(ring.clone(), s.cq_entries, record.clone(), s.initial_count);
        Cq { cqn, reader, ring, record }
    }

    pub fn qp(&mut self, s: &Shape) -> TestQp {
        let (send_cq, recv_cq) = (self.cq(s), self.cq(s));
        let ring = memory(s.blocks as usize * 64);
        let recv_ring = memory((s.recv_entries * STRIDE) as usize);
        let recv_record = memory(8);
        let recv = match (s.srq, s.recv) {
            (Some(srqn), _) => Recv::Shared(srqn),
            (None, None) => Recv::None,
            (None, Some(managed)) => Recv::Own {
                spec: RecvSpec {
                    ring: recv_ring.clone(),
                    entries: s.recv_entries,
                    stride: STRIDE,
                    record: recv_record.clone(),
                    initial_consumer: 0,
                },
                managed,
            },
        };
        let send = SendSpec { ring: ring.clone(), blocks: s.blocks, managed: s.managed };
        let qpn = self
            .e
            .create_qp(
                s.function,
                QpSpec {
                    pd: s.pd,
                    send: Some(send),
                    recv,
                    send_cq: send_cq.cqn,
                    recv_cq: recv_cq.cqn,
                    access: s.access,
                    privileged: s.privileged,
                },
            )
            .unwrap();
        TestQp {
            qpn,
            function: s.function,
            pd: s.pd,
            ring,
            blocks: s.blocks,
            producer: 0,
            recv_ring,
            recv_record,
            recv_entries: s.recv_entries,
            recv_producer: 0,
            send_cq,
            recv_cq,
        }
    }

    /// Moves a QP to RTS with peer `peer`.
    pub fn connect_to(&mut self, q: &TestQp, peer: Qpn) {
        for change in
            [QpChange::Init, QpChange::ReadyToReceive { peer: peer.into() }, QpChange::ReadyToSend]
        {
            self.e.modify_qp(q.function, q.qpn, change).unwrap();
        }
    }

    pub fn connect(&mut self, a: &TestQp, b: &TestQp) {
        self.connect_to(a, b.qpn);
        self.connect_to(b, a.qpn);
    }

    /// Creates two connected QPs of the physical function, each in a separate PD.
    pub fn pair(&mut self) -> (TestQp, TestQp) {
        let (pa, pb) = (self.pd(PF), self.pd(PF));
        let (sa, sb) = (self.shape(PF, pa), self.shape(PF, pb));
        let (a, b) = (self.qp(&sa), self.qp(&sb));
        self.connect(&a, &b);
        (a, b)
    }

    pub fn mr(&mut self, f: FunctionId, pd: Pdn, len: usize, access: Access) -> Mr {
        let mem = memory(len);
        let key = self.e.reg_mr(f, pd, mem.clone(), mem.addr(), access).unwrap();
        Mr { mem, key }
    }

    /// Polls until no work is left.
    pub fn run(&mut self) -> usize {
        let mut n = 0;
        loop {
            self.now += 100;
            match self.e.poll(self.now, 64) {
                0 => return n,
                k => n += k,
            }
        }
    }

    /// Writes a WQE without a doorbell; returns its offset in the ring.
    pub fn write_wqe(&self, q: &mut TestQp, fill: impl FnOnce(&mut Builder)) -> usize {
        let mut b = Builder::new(q.qpn, q.producer);
        fill(&mut b);
        let at = (q.producer as u32 & (q.blocks - 1)) as usize * 64;
        for (i, block) in b.bytes().chunks(64).enumerate() {
            q.ring.write((at + i * 64) % (q.blocks as usize * 64), block);
        }
        q.producer = q.producer.wrapping_add(b.blocks() as u16);
        at
    }

    /// Posts one WQE and its doorbell.
    pub fn post(&mut self, q: &mut TestQp, fill: impl FnOnce(&mut Builder)) {
        self.write_wqe(q, fill);
        self.e.doorbell(q.qpn, q.producer);
    }

    /// Posts one signaled WQE, runs, and returns its completion.
    pub fn execute(&mut self, q: &mut TestQp, fill: impl FnOnce(&mut Builder)) -> Cqe {
        self.post(q, |b| {
            fill(b);
            b.signaled();
        });
        self.run();
        q.send_cq.reader.poll().expect("a completion")
    }

    /// Posts a receive WQE with these SGEs; does not write the record if the queue is managed.
    pub fn post_recv(&mut self, q: &mut TestQp, list: &[Sge]) {
        let at = (q.recv_producer & (q.recv_entries - 1)) as usize * STRIDE as usize;
        put_recv(&q.recv_ring, at, list);
        q.recv_producer = (q.recv_producer + 1) & 0xffff;
        q.recv_record.store_be32(0, q.recv_producer);
    }

    pub fn state(&self, q: &TestQp) -> QpState {
        self.e.query_qp(q.function, q.qpn).unwrap().info.state
    }

    pub fn events(&mut self) -> Vec<Event> {
        self.e.take_events().collect()
    }
}

/// Writes a receive WQE of [`STRIDE`] bytes.
pub fn put_recv(ring: &DmaMemory, at: usize, list: &[Sge]) {
    let mut bytes = [0u8; STRIDE as usize];
    for (slot, sge) in bytes.chunks_mut(16).zip(list) {
        slot.copy_from_slice(&sge.to_bytes());
    }
    ring.write(at, &bytes);
}

/// A region of the bed.
pub struct Mr {
    pub mem: DmaMemory,
    pub key: Key,
}

impl Mr {
    pub fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.mem.addr() + at as u64, len: len as u32, lkey: self.key }
    }

    pub fn remote(&self, at: usize) -> Remote {
        Remote { addr: self.mem.addr() + at as u64, rkey: self.key }
    }

    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mem.read(at, &mut out);
        out
    }
}

/// Asserts that a completion is an error with this syndrome.
#[track_caller]
pub fn assert_error(cqe: &Cqe, syndrome: verbs::cqe::Syndrome) {
    let error = cqe.error.unwrap_or_else(|| panic!("{cqe:?} is not an error"));
    assert_eq!(verbs::cqe::Syndrome::from_value(error.syndrome), Some(syndrome), "{cqe:?}");
}

/// Rights of a region for local and remote access.
pub const ALL: Access = Access(Access::LOCAL_ALL.0 | Access::REMOTE_ALL.0);
