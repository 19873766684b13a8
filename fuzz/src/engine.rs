//! A whole engine: the input controls the rings, records, doorbells and verbs of a hostile
//! function, beside an honest function.

use rnic::Engine;
use rnic::limits::{FunctionLimits, Limits};
use rnic::spec::{CqSpec, QpSpec, Recv, RecvSpec, SendSpec};
use verbs::cqe::{CqReader, clear};
use verbs::wqe::umr::Umr;
use verbs::wqe::{Builder, MAX_BYTES, Remote, Sge};
use verbs::{Access, Cqn, DmaMemory, FunctionId, Key, MwKind, Pdn, QpChange, QpState, Qpn};

use crate::Input;

const ALL: Access = Access(Access::LOCAL_ALL.0 | Access::REMOTE_ALL.0);
/// Building blocks of a send ring, and entries of a CQ.
const BLOCKS: u32 = 16;
/// Receive WQEs of a queue; [`STRIDE`] is the size of each in bytes.
const RECEIVES: u32 = 8;
const STRIDE: u32 = 64;
/// Maximum number of steps per input.
const STEPS: usize = 200;

/// A QP with its memory.
struct Queue {
    function: FunctionId,
    pd: Pdn,
    managed: bool,
    qpn: Qpn,
    cqn: Cqn,
    ring: DmaMemory,
    receives: DmaMemory,
    record: DmaMemory,
    cq_ring: DmaMemory,
    cq_record: DmaMemory,
    reader: CqReader,
    producer: u16,
}

/// A region.
struct Region {
    memory: DmaMemory,
    key: Key,
}

impl Region {
    fn sge(&self, at: u64, len: u32) -> Sge {
        Sge { addr: self.memory.addr() + at, len, lkey: self.key }
    }
}

/// An allocator of pieces of one mapping: the mapping, and the offset of its unused part.
struct Arena(DmaMemory, usize);

impl Arena {
    fn take(&mut self, bytes: usize) -> DmaMemory {
        let piece = self.0.slice(self.1, bytes).expect("the arena is large enough");
        self.1 += bytes.next_multiple_of(64);
        piece
    }
}

struct World {
    engine: Engine,
    now: u64,
    arena: Arena,
    honest: [Queue; 2],
    honest_regions: [Region; 2],
    turns: u8,
    hostile: FunctionId,
    queues: Vec<Queue>,
    keys: Vec<Key>,
    region: Region,
    secret: Region,
    granted: Region,
    server: Queue,
}

/// Runs the input `bytes`.
pub fn run(bytes: &[u8]) {
    let mut world = World::new();
    let mut input = Input::new(bytes);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.serve_honest();
    world.check();
    world.engine.remove_function(world.hostile);
    world.serve_honest();
    // With the function all its work ends. (The server QP's work is flushed.)
    world.now += 10_000_000;
    for _ in 0..1000 {
        if world.engine.poll(world.now, 256) == 0 {
            world.check();
            return;
        }
    }
    panic!("the NIC is busy although no function has posted work");
}

impl World {
    fn new() -> Self {
        let limits = Limits { slice_bytes: 100, qp_turn: 400, ..Limits::default() };
        let mut engine = Engine::new(limits);
        let mut arena = Arena(DmaMemory::anonymous(128 << 10).expect("memory"), 0);
        let allowed =
            FunctionLimits { qps: 12, cqs: 12, srqs: 2, keys: 32, ..FunctionLimits::default() };
        let function = engine.add_function(allowed.clone()).expect("a function");
        let pd = engine.alloc_pd(function).expect("a PD");
        let mut queue = |f, pd, managed| Queue::make(&mut engine, &mut arena, f, pd, managed);
        let honest = [queue(function, pd, false), queue(function, pd, false)];
        let physical = FunctionId::PHYSICAL;
        let server_pd = engine.alloc_pd(physical).expect("a PD");
        let server = Queue::make(&mut engine, &mut arena, physical, server_pd, false);
        let hostile = engine.add_function(allowed).expect("a function");
        let hostile_pd = engine.alloc_pd(hostile).expect("a PD");
        let queues: Vec<Queue> = [false, false, false, true]
            .map(|managed| Queue::make(&mut engine, &mut arena, hostile, hostile_pd, managed))
            .into();
        let mut region = |f, pd, bytes| {
            let memory = arena.take(bytes);
            let key = engine.reg_mr(f, pd, memory.clone(), memory.addr(), ALL).expect("a region");
            Region { memory, key }
        };
        let honest_regions = [region(function, pd, 256), region(function, pd, 256)];
        let secret = region(physical, server_pd, 512);
        let granted = region(physical, server_pd, 512);
        let region = region(hostile, hostile_pd, 4096);
        // The server grants `granted` to the hostile client, but not `secret`: that region is
        // registered in another PD. The input guesses its key nevertheless.
        engine.dereg_mr(physical, secret.key).expect("a region");
        let secret_pd = engine.alloc_pd(physical).expect("a PD");
        let key = engine
            .reg_mr(physical, secret_pd, secret.memory.clone(), secret.memory.addr(), ALL)
            .expect("a region");
        let secret = Region { memory: secret.memory, key };
        secret.memory.write(0, &[0x5e; 512]);
        let mut keys = vec![region.key, granted.key, secret.key];
        keys.extend(honest_regions.iter().map(|r| r.key));
        for _ in 0..3 {
            keys.push(engine.alloc_mw(hostile, hostile_pd, MwKind::Type2).expect("a window"));
        }
        // The hostile function's rings are memory that its own WQEs can access.
        for q in &queues {
            let iova = region.memory.addr();
            let key = engine.reg_mr(hostile, hostile_pd, q.ring.clone(), iova, ALL);
            keys.push(key.expect("a region"));
        }
        let mut world = Self {
            engine,
            now: 0,
            arena,
            honest,
            honest_regions,
            turns: 0,
            hostile,
            queues,
            keys,
            region,
            secret,
            granted,
            server,
        };
        let [a, b] = [world.honest[0].qpn, world.honest[1].qpn];
        connect(&mut world.engine, &world.honest[0], b);
        connect(&mut world.engine, &world.honest[1], a);
        world.connect_hostile();
        world
    }

    fn connect_hostile(&mut self) {
        let qpns = [0, 1, 2, 3].map(|i| self.queues[i].qpn);
        let peers = [self.server.qpn, qpns[2], qpns[1], qpns[3]];
        for (queue, peer) in self.queues.iter().zip(peers) {
            connect(&mut self.engine, queue, peer);
        }
        connect(&mut self.engine, &self.server, qpns[0]);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let (what, which) = (input.byte(), input.byte() as usize % self.queues.len());
        match what % 12 {
            0..=3 => self.post(which, input),
            4 => {
                let queue = &self.queues[which];
                let into = [&queue.ring, &queue.receives, &queue.cq_ring, &self.region.memory];
                let into = into[input.byte() as usize % into.len()];
                let at = input.short() as usize % into.len();
                let bytes = input.byte() as usize % (into.len() - at).min(128);
                into.write(at, input.take(bytes));
            }
            5 => {
                let queue = &self.queues[which];
                let words = [&queue.record, &queue.cq_record];
                let word = words[input.byte() as usize % 2];
                word.store_be32(input.byte() as usize % 2 * 4, input.number());
            }
            6 => {
                let queue = &self.queues[which];
                self.engine.doorbell(queue.qpn, input.number() as u16);
            }
            7 => {
                self.now += 1 << (input.byte() % 24);
                self.engine.poll(self.now, input.byte() as usize);
                self.engine.take_events().for_each(drop);
            }
            8 => self.verb(which, input),
            9 => {
                for i in 0..4 {
                    let queue = &mut self.queues[i];
                    let _ = self.engine.modify_qp(self.hostile, queue.qpn, QpChange::Reset);
                    queue.producer = 0;
                }
                let server = &self.server;
                let reset = self.engine.modify_qp(server.function, server.qpn, QpChange::Reset);
                reset.expect("the server's QP");
                self.connect_hostile();
            }
            10 => {
                let queue = &mut self.queues[which];
                let list = [self.region.sge(input.byte().into(), input.byte().into())];
                let at = input.byte() as usize % RECEIVES as usize * STRIDE as usize;
                queue.receives.write(at, &list[0].to_bytes());
            }
            _ => {
                self.serve_honest();
                self.check();
            }
        }
    }

    /// Writes a WQE that is valid or nearly valid into a ring, and writes the doorbell.
    fn post(&mut self, which: usize, input: &mut Input<'_>) {
        let op = input.byte();
        let n = [0; 6].map(|_| input.number());
        let key = |i: u32| self.keys[i as usize % self.keys.len()];
        let victims = [self.honest[0].qpn, self.server.qpn];
        let own: Vec<(Qpn, Cqn)> = self.queues.iter().map(|q| (q.qpn, q.cqn)).collect();
        let qpn = |i: u32| match i {
            0..=3 => own[i as usize].0,
            4 | 5 => victims[i as usize - 4],
            i => Qpn::new(i & Qpn::MAX),
        };
        let cqn = |i: u32| match i {
            0..=3 => own[i as usize].1,
            4 => self.honest[0].cqn,
            i => Cqn::new(i & Qpn::MAX),
        };
        let bases = [
            &self.region.memory,
            &self.granted.memory,
            &self.secret.memory,
            &self.honest_regions[0].memory,
        ];
        let base = bases[(n[0] >> 6) as usize % bases.len()].addr();
        let addr = base.wrapping_add((n[0] as u64 & 0x3f) * 8);
        let at = Remote { addr, rkey: key(n[1]) };
        let own = self.region.memory.addr() + n[2] as u64 * 8;
        let sge = Sge { addr: own, len: n[3].wrapping_mul(3), lkey: key(n[4]) };
        let queue = &mut self.queues[which];
        let mut b = Builder::new(queue.qpn, queue.producer);
        match op % 14 {
            0 => b.rdma_write(at, &[sge, sge]),
            1 => b.rdma_read(at, &[sge, sge, sge]),
            2 => b.fetch_add(at, n[5] as u64, sge),
            3 => b.masked_compare_swap(at, (0, 0), (n[5] as u64, !0), sge),
            4 => b.send(&[sge]),
            5 => b.send_inline(&n[5].to_be_bytes()),
            6 => b.wait(cqn(n[0]), n[1]),
            7 => b.send_enable(qpn(n[0]), n[1]),
            8 => b.receive_enable(qpn(n[0]), n[1]),
            9 => b.local_invalidate(key(n[0])),
            10 => b.umr(&Umr::unbind(key(n[0]), n[1].is_multiple_of(2))),
            11 => {
                let (window, mr) = (key(n[0]), key(n[5]));
                b.umr(&Umr::bind(window, n[1] as u8, qpn(n[2]), Access(0xff), mr, addr, n[3]))
            }
            12 => b.nop_filling(1 + n[0] % 15),
            _ => b.rdma_write_inline(at, &[n[5] as u8; 40]),
        };
        if op & 0x40 != 0 {
            b.signaled();
        }
        let mut bytes = b.bytes().to_vec();
        for _ in 0..op >> 7 {
            let at = input.short() as usize % bytes.len().min(MAX_BYTES);
            bytes[at] = input.byte();
        }
        for (i, block) in bytes.chunks(64).enumerate() {
            let slot = (queue.producer as usize + i) % BLOCKS as usize;
            queue.ring.write(slot * 64, block);
        }
        queue.producer = queue.producer.wrapping_add(b.blocks() as u16);
        self.engine.doorbell(queue.qpn, queue.producer);
    }

    /// Calls a verb with arbitrary arguments; object numbers are mostly those of existing objects.
    fn verb(&mut self, which: usize, input: &mut Input<'_>) {
        let f = self.hostile;
        let n = input.number();
        let key = self.keys[n as usize % self.keys.len()];
        let queue = &mut self.queues[which];
        let (qpn, cqn, pd) = (queue.qpn, queue.cqn, queue.pd);
        let victim = self.honest[n as usize % 2].qpn;
        match input.byte() % 14 {
            0 => drop(self.engine.modify_qp(f, qpn, QpChange::Reset)),
            1 => drop(self.engine.modify_qp(f, qpn, QpChange::Init)),
            2 => {
                let peer = [victim, self.server.qpn, qpn][n as usize % 3];
                drop(self.engine.modify_qp(f, qpn, QpChange::ReadyToReceive { peer: peer.into() }));
            }
            3 => drop(self.engine.modify_qp(f, qpn, QpChange::ReadyToSend)),
            4 => drop(self.engine.modify_qp(f, qpn, QpChange::Error)),
            5 => drop(self.engine.enable_send(f, qpn, n as u16)),
            6 => drop(self.engine.enable_recv(f, qpn, n as u16)),
            7 => drop(self.engine.dereg_mr(f, key)),
            8 => drop(self.engine.dealloc_mw(f, key)),
            9 => drop(self.engine.destroy_cq(f, cqn)),
            10 => {
                if self.engine.destroy_qp(f, qpn).is_ok() {
                    let _ = self.engine.destroy_cq(f, cqn);
                    // Reuses the memory of the destroyed QP and CQ, which must no longer be written
                    // on their behalf.
                    queue.recreate(&mut self.engine);
                }
            }
            11 => {
                let memory = self.region.memory.slice(n as usize & 0xf80, 64).expect("a part");
                if let Ok(key) = self.engine.reg_mr(f, pd, memory, n as u64 & !7, Access(n as u8)) {
                    self.keys.push(key);
                }
            }
            12 => {
                if let Ok(key) = self.engine.alloc_mw(f, pd, MwKind::Type2) {
                    self.keys.push(key);
                }
            }
            // Objects of other functions.
            _ => {
                assert!(self.engine.modify_qp(f, victim, QpChange::Error).is_err());
                assert!(self.engine.destroy_qp(f, victim).is_err());
                assert!(self.engine.dereg_mr(f, self.honest_regions[0].key).is_err());
                assert!(self.engine.query_key(f, self.secret.key.index()).is_err());
            }
        }
    }

    /// The honest function writes, and reads its data back, while the hostile function's work
    /// continues.
    fn serve_honest(&mut self) {
        self.turns = self.turns.wrapping_add(1);
        let [ours, theirs] = &self.honest_regions;
        ours.memory.write(0, &[self.turns; 32]);
        let remote = Remote { addr: theirs.memory.addr() + 64, rkey: theirs.key };
        let (to, from) = (ours.sge(128, 32), ours.sge(0, 32));
        let queue = &mut self.honest[0];
        for read in [false, true] {
            let mut b = Builder::new(queue.qpn, queue.producer);
            match read {
                false => b.rdma_write(remote, &[from]),
                true => b.rdma_read(remote, &[to]),
            };
            b.signaled();
            queue.ring.write(queue.producer as usize % BLOCKS as usize * 64, b.bytes());
            queue.producer = queue.producer.wrapping_add(b.blocks() as u16);
        }
        self.engine.doorbell(queue.qpn, queue.producer);
        let mut done = 0;
        for _ in 0..1000 {
            self.now += 1;
            self.engine.poll(self.now, 8);
            while let Some(cqe) = queue.reader.poll() {
                assert_eq!(cqe.error, None, "the honest function's work failed");
                done += 1;
            }
            if done == 2 {
                let mut read = [0; 32];
                ours.memory.read(128, &mut read);
                assert_eq!(read, [self.turns; 32]);
                return;
            }
        }
        panic!("the honest function is starved");
    }

    fn check(&mut self) {
        for queue in &self.honest {
            let info = self.engine.query_qp(queue.function, queue.qpn).expect("a QP");
            assert_eq!(info.info.state, QpState::ReadyToSend);
        }
        let same = |memory: &DmaMemory, at: usize, len: usize, value: u8| {
            let mut bytes = vec![0; len];
            memory.read(at, &mut bytes);
            assert!(
                bytes.iter().all(|b| *b == value),
                "bytes at {at} of another function have changed"
            );
        };
        same(&self.secret.memory, 0, 512, 0x5e);
        let [ours, theirs] = &self.honest_regions;
        same(&ours.memory, 32, 96, 0);
        same(&ours.memory, 160, 96, 0);
        same(&theirs.memory, 0, 64, 0);
        same(&theirs.memory, 64, 32, self.turns);
        same(&theirs.memory, 96, 160, 0);
        let _ = &self.arena;
    }
}

impl Queue {
    fn make(
        engine: &mut Engine,
        arena: &mut Arena,
        function: FunctionId,
        pd: Pdn,
        managed: bool,
    ) -> Self {
        let ring = arena.take(BLOCKS as usize * 64);
        let receives = arena.take((RECEIVES * STRIDE) as usize);
        let (record, cq_record) = (arena.take(8), arena.take(8));
        let cq_ring = arena.take(BLOCKS as usize * 64);
        let reader = CqReader::new(cq_ring.clone(), BLOCKS, cq_record.clone(), 0);
        let mut queue = Self {
            function,
            pd,
            managed,
            qpn: Qpn::NONE,
            cqn: Cqn::new(0),
            ring,
            receives,
            record,
            cq_ring,
            cq_record,
            reader,
            producer: 0,
        };
        queue.recreate(engine);
        assert_ne!(queue.qpn, Qpn::NONE);
        queue
    }

    /// Creates the CQ and the QP, unless a limit of the function is reached.
    fn recreate(&mut self, engine: &mut Engine) {
        clear(&self.cq_ring, BLOCKS);
        let spec = CqSpec {
            ring: self.cq_ring.clone(),
            entries: BLOCKS,
            record: self.cq_record.clone(),
            ignore_overrun: false,
            initial_count: 0,
        };
        let Ok(cqn) = engine.create_cq(self.function, spec) else { return };
        self.cqn = cqn;
        let recv = RecvSpec {
            ring: self.receives.clone(),
            entries: RECEIVES,
            stride: STRIDE,
            record: self.record.clone(),
            initial_consumer: 0,
        };
        let send = SendSpec { ring: self.ring.clone(), blocks: BLOCKS, managed: self.managed };
        let spec = QpSpec {
            pd: self.pd,
            send: Some(send),
            recv: Recv::Own { spec: recv, managed: self.managed },
            send_cq: cqn,
            recv_cq: cqn,
            access: ALL,
            privileged: false,
        };
        if let Ok(qpn) = engine.create_qp(self.function, spec) {
            self.qpn = qpn;
            self.producer = 0;
        }
    }
}

fn connect(engine: &mut Engine, queue: &Queue, peer: Qpn) {
    for change in
        [QpChange::Init, QpChange::ReadyToReceive { peer: peer.into() }, QpChange::ReadyToSend]
    {
        // The hostile function may have destroyed its QP.
        let _ = engine.modify_qp(queue.function, queue.qpn, change);
    }
}
