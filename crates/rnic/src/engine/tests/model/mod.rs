//! Compares the engine with a model of memory, regions and windows that has no queues. Several
//! functions execute random operations; the model predicts the outcome of each operation and the
//! contents of memory.

mod ops;

use super::*;
use crate::limits::{FunctionLimits, Limits};
use ops::{Kind, Name, Op, op};
use proptest::prelude::*;
use verbs::cqe::Syndrome;
use verbs::wqe::umr::{Umr, UmrFlags};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{Access, DmaMemory, FunctionId, Key, MwKind, Pdn, QpChange, QpState, Qpn};

/// Bytes of memory of the server, and of each client.
const SERVER: usize = 2048;
const CLIENT: usize = 512;
const CLIENTS: usize = 2;
/// Number of connections of each client.
const LANES: usize = 2;
const WINDOWS: usize = 4;
/// Index of the type-1 window; all other windows are of type 2.
const OPEN: usize = 3;

#[derive(Clone, Debug)]
struct Region {
    key: Key,
    at: usize,
    len: usize,
    access: Access,
    meta: bool,
    alive: bool,
}

#[derive(Clone, Debug)]
struct Bound {
    region: usize,
    to: Qpn,
    at: usize,
    len: usize,
    access: Access,
}

#[derive(Clone, Debug)]
struct Window {
    tag: u8,
    bound: Option<Bound>,
}

/// A connection to a client: its two QPs.
struct Lane {
    client: TestQp,
    server: TestQp,
}

struct World {
    bed: Bed,
    data: Pdn,
    meta: Pdn,
    worker: TestQp,
    loopback: TestQp,
    lanes: Vec<Lane>,
    memory: DmaMemory,
    client_mrs: Vec<Mr>,
    window_keys: Vec<Key>,
    // State of the model.
    server_bytes: Vec<u8>,
    client_bytes: Vec<Vec<u8>>,
    regions: Vec<Region>,
    windows: Vec<Window>,
}

type Expected = Result<(), Syndrome>;

impl World {
    fn new() -> Self {
        let mut bed = Bed::with(Limits { slice_bytes: 100, qp_turn: 100, ..Limits::default() });
        let (data, meta) = (bed.pd(PF), bed.pd(PF));
        let worker = Shape { privileged: true, ..bed.shape(PF, data) };
        let worker = bed.qp(&worker);
        let loopback = bed.shape(PF, meta);
        let loopback = bed.qp(&loopback);
        bed.connect(&worker, &loopback);
        let memory = memory(SERVER);
        let mut lanes = Vec::new();
        let mut client_mrs = Vec::new();
        for _ in 0..CLIENTS {
            let f = bed.e.add_function(FunctionLimits::default()).unwrap();
            let pd = bed.pd(f);
            client_mrs.push(bed.mr(f, pd, CLIENT, ALL));
            for _ in 0..LANES {
                let (client, server) = (bed.shape(f, pd), bed.shape(PF, data));
                let (client, server) = (bed.qp(&client), bed.qp(&server));
                bed.connect(&client, &server);
                lanes.push(Lane { client, server });
            }
        }
        let kind = |i| if i == OPEN { MwKind::Type1 } else { MwKind::Type2 };
        let window_keys: Vec<Key> =
            (0..WINDOWS).map(|i| bed.e.alloc_mw(PF, data, kind(i)).unwrap()).collect();
        let server_bytes: Vec<u8> = (0..SERVER).map(|i| (i * 31 % 251) as u8).collect();
        memory.write(0, &server_bytes);
        let client_bytes: Vec<Vec<u8>> =
            (0..CLIENTS).map(|c| (0..CLIENT).map(|i| (i * 17 + c * 101) as u8).collect()).collect();
        for (mr, bytes) in client_mrs.iter().zip(&client_bytes) {
            mr.mem.write(0, bytes);
        }
        let windows = window_keys.iter().map(|k| Window { tag: k.tag(), bound: None }).collect();
        let mut w = World {
            bed,
            data,
            meta,
            worker,
            loopback,
            lanes,
            memory,
            client_mrs,
            window_keys,
            server_bytes,
            client_bytes,
            regions: Vec::new(),
            windows,
        };
        w.register(0, SERVER, Access(0x7c), false);
        w
    }

    // --- the model -----------------------------------------------------------------------------

    fn key(&self, name: Name) -> Key {
        let key = if name.window {
            let i = name.index % WINDOWS;
            Key::new(self.window_keys[i].index(), self.windows[i].tag)
        } else {
            self.regions[name.index % self.regions.len()].key
        };
        Key(key.0 ^ if name.stale { 0x5a } else { 0 })
    }

    /// Returns whether the peer of the server's QP `through` may do `need` with `len` bytes at
    /// `at`.
    fn allows(&self, name: Name, through: Qpn, at: usize, len: usize, need: Access) -> bool {
        let inside = |start: usize, size: usize| at >= start && at + len <= start + size;
        if name.stale {
            return false;
        }
        if name.window {
            let window = name.index % WINDOWS;
            let to = |b: &Bound| window == OPEN || b.to == through;
            self.windows[window]
                .bound
                .as_ref()
                .is_some_and(|b| to(b) && b.access.allows(need) && inside(b.at, b.len))
        } else {
            let r = &self.regions[name.index % self.regions.len()];
            r.alive && !r.meta && r.access.allows(need) && inside(r.at, r.len)
        }
    }

    fn bound_to(&self, region: usize) -> usize {
        let to = |w: &&Window| w.bound.as_ref().is_some_and(|b| b.region == region);
        self.windows.iter().filter(to).count()
    }

    // --- the engine ----------------------------------------------------------------------------

    fn register(&mut self, at: usize, len: usize, access: Access, meta: bool) {
        let mem = self.memory.slice(at, len).unwrap();
        let pd = if meta { self.meta } else { self.data };
        if self.regions.len() == 8 && self.regions.iter().all(|r| r.alive) {
            return;
        }
        let key = self.bed.e.reg_mr(PF, pd, mem.clone(), mem.addr(), access).unwrap();
        let region = Region { key, at, len, access, meta, alive: true };
        match self.regions.iter_mut().find(|r| !r.alive) {
            Some(dead) => *dead = region,
            None => self.regions.push(region),
        }
    }

    /// Returns the server's QP with number `by`: the privileged worker, or a lane's QP.
    fn by(&self, by: usize) -> (Qpn, bool) {
        match by {
            0 => (self.worker.qpn, true),
            n => (self.lanes[n - 1].server.qpn, false),
        }
    }

    fn execute_by(&mut self, by: usize, fill: impl FnOnce(&mut Builder)) -> verbs::cqe::Cqe {
        let q = if by == 0 { &mut self.worker } else { &mut self.lanes[by - 1].server };
        self.bed.execute(q, fill)
    }

    fn addr(&self, at: usize) -> u64 {
        self.memory.addr() + at as u64
    }

    /// Adjusts an operation so that it can succeed now. Unadjusted operations mostly fail.
    fn aimed(&self, op: &Op) -> Op {
        let mut op = op.clone();
        let live = |i: usize| {
            let fits = |r: &Region| r.alive && !r.meta;
            let all: Vec<usize> =
                (0..self.regions.len()).filter(|&i| fits(&self.regions[i])).collect();
            all.get(i % all.len().max(1)).copied().unwrap_or(0)
        };
        let lane_of = |q: Qpn| self.lanes.iter().position(|l| l.server.qpn == q).unwrap();
        match &mut op {
            Op::Bind { region, at, len, by, .. } => {
                *region = live(*region);
                let r = &self.regions[*region];
                *at = r.at + *at % r.len;
                *len = 1 + (*len).min(r.at + r.len - *at - 1);
                *by = if len.is_multiple_of(4) { *by } else { 0 };
            }
            Op::Unbind { window, by, .. } | Op::Invalidate { window, by } => {
                let bound = self.windows[window.index].bound.as_ref();
                *by = match bound {
                    Some(_) if window.index == OPEN => *by,
                    Some(b) => 1 + lane_of(b.to),
                    None => 0,
                };
            }
            Op::Access { lane, kind, key, at, len, local } => {
                let atomic = matches!(kind, Kind::FetchAdd | Kind::CompareSwap);
                key.stale = false;
                let range = if key.window {
                    let bound = self.windows[key.index % WINDOWS].bound.as_ref();
                    let named = bound.filter(|_| key.index % WINDOWS != OPEN);
                    *lane = named.map_or(*lane, |b| lane_of(b.to));
                    bound.map_or((0, 1), |b| (b.at, b.len))
                } else {
                    key.index = live(key.index);
                    let r = &self.regions[key.index];
                    (r.at, r.len)
                };
                *at = range.0 + *at % range.1;
                *at = if atomic { at.next_multiple_of(8) } else { *at };
                *len = (*len).min(range.0 + range.1 - (*at).min(range.0 + range.1));
                *local %= CLIENT - 300;
            }
            Op::Send { key, room, len, .. } => {
                (key.window, key.stale, key.index) = (false, false, live(key.index));
                room[1] = room[1].max(len.saturating_sub(room[0]));
            }
            Op::Register { .. } | Op::Deregister { .. } => {}
        }
        op
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Register { at, len, access, meta } => {
                self.register(at, len, Access(access), meta);
            }
            Op::Deregister { region } => {
                let i = region % self.regions.len();
                let expected = self.regions[i].alive && self.bound_to(i) == 0;
                let done = self.bed.e.dereg_mr(PF, self.regions[i].key);
                assert_eq!(done.is_ok(), expected, "{done:?}");
                self.regions[i].alive &= !expected;
            }
            Op::Bind { window, region, to, by, at, len, access, check } => {
                self.bind(window, region, self.lanes[to].server.qpn, by, (at, len), access, check)
            }
            Op::Unbind { window, by, check } => {
                let (executor, privileged) = self.by(by);
                let bound = &self.windows[window.index].bound;
                let own = bound.as_ref().is_some_and(|b| b.to == executor);
                let open = window.index == OPEN;
                let fine = !window.stale && if check { own && !open } else { privileged || open };
                let key = self.key(window);
                let cqe = self.execute_by(by, |w| _ = w.umr(&Umr::unbind(key, check)));
                self.ended(&cqe, if fine { Ok(()) } else { Err(Syndrome::MwBind) }, by, false);
                if fine {
                    self.windows[window.index].bound = None;
                }
            }
            Op::Invalidate { window, by } => {
                let (executor, _) = self.by(by);
                let bound = &self.windows[window.index].bound;
                let own = bound.as_ref().is_some_and(|b| b.to == executor);
                let fine = !window.stale && own && window.index != OPEN;
                let key = self.key(window);
                let cqe = self.execute_by(by, |w| _ = w.local_invalidate(key));
                self.ended(&cqe, if fine { Ok(()) } else { Err(Syndrome::MwBind) }, by, false);
                if fine {
                    self.windows[window.index].bound = None;
                }
            }
            Op::Access { lane, kind, key, at, len, local } => {
                self.access(lane, kind, key, at, len, local)
            }
            Op::Send { lane, back, len, room, key } => self.send(lane, back, len, room, key),
        }
        self.compare();
    }

    #[allow(clippy::too_many_arguments)]
    fn bind(
        &mut self,
        window: Name,
        region: usize,
        to: Qpn,
        by: usize,
        (at, len): (usize, usize),
        access: u8,
        check: bool,
    ) {
        let (executor, privileged) = self.by(by);
        let i = region % self.regions.len();
        let open = window.index == OPEN;
        let to = if open { Qpn::NONE } else { to };
        let (r, old) = (&self.regions[i], &self.windows[window.index]);
        let access = Access(access & Access::REMOTE_ALL.0);
        let writes = access.0 & !Access::REMOTE_READ.0 != 0;
        let fine = !window.stale
            && (old.bound.is_none() || !check)
            && (privileged
                || open
                || to == executor && old.bound.as_ref().is_none_or(|b| b.to == executor))
            && (len > 0
                && r.alive
                && !r.meta
                && at >= r.at
                && at + len <= r.at + r.len
                && (!writes || r.access.allows(Access::LOCAL_WRITE))
                || open && len == 0);
        let tag = old.tag.wrapping_add(1);
        let mut umr =
            Umr::bind(self.key(window), tag, to, access, r.key, self.addr(at), len as u32);
        if !check {
            umr.flags = UmrFlags::INLINE;
        }
        let cqe = self.execute_by(by, |w| _ = w.umr(&umr));
        self.ended(&cqe, if fine { Ok(()) } else { Err(Syndrome::MwBind) }, by, false);
        if fine {
            let bound = (len > 0).then_some(Bound { region: i, to, at, len, access });
            self.windows[window.index] = Window { tag, bound };
        }
    }

    fn access(&mut self, lane: usize, kind: Kind, key: Name, at: usize, len: usize, local: usize) {
        let atomic = matches!(kind, Kind::FetchAdd | Kind::CompareSwap);
        let len = if atomic { 8 } else { len };
        let client = lane / LANES;
        let through = self.lanes[lane].server.qpn;
        let need = match kind {
            Kind::Write => Access::REMOTE_WRITE,
            Kind::Read => Access::REMOTE_READ,
            _ => Access::REMOTE_ATOMIC,
        };
        let expected = if len > 0 && local + len > CLIENT {
            Err(Syndrome::LocalProtection)
        } else if atomic && !at.is_multiple_of(8) {
            Err(Syndrome::RemoteInvalidRequest)
        } else if len > 0 && !self.allows(key, through, at, len, need) {
            Err(Syndrome::RemoteAccess)
        } else {
            Ok(())
        };
        let (add, compare) = (0x0123_4567_89ab_cdef, be64(&self.server_bytes, at));
        if expected.is_ok() && len > 0 {
            let (here, there) = (local..local + len, at..at + len);
            let (mine, theirs) = (&mut self.client_bytes[client], &mut self.server_bytes);
            match kind {
                Kind::Write => theirs[there].copy_from_slice(&mine[here]),
                Kind::Read => mine[here].copy_from_slice(&theirs[there]),
                Kind::FetchAdd | Kind::CompareSwap => {
                    let old = be64(theirs, at);
                    let new =
                        if matches!(kind, Kind::FetchAdd) { old.wrapping_add(add) } else { add };
                    mine[here].copy_from_slice(&old.to_be_bytes());
                    theirs[there].copy_from_slice(&new.to_be_bytes());
                }
            }
        }
        let (remote, mr) =
            (Remote { addr: self.addr(at), rkey: self.key(key) }, &self.client_mrs[client]);
        // In two pieces, if both have bytes.
        let first = len / 3;
        let whole = mr.sge(local, len);
        let pieces = [mr.sge(local, first), mr.sge(local + first, len - first)];
        let cqe = self.bed.execute(&mut self.lanes[lane].client, |w| {
            match kind {
                Kind::Write => w.rdma_write(remote, &pieces),
                Kind::Read => w.rdma_read(remote, &pieces),
                Kind::FetchAdd => w.fetch_add(remote, add, whole),
                Kind::CompareSwap => w.compare_swap(remote, compare, add, whole),
            };
        });
        if expected.is_ok() {
            assert_eq!(cqe.byte_count as usize, len);
        }
        self.ended(&cqe, expected, lane + 1, true);
    }

    /// Executes a SEND from the client to the server's QP, or in the other direction, into a
    /// receive WQE of two SGEs.
    fn send(&mut self, lane: usize, back: bool, len: usize, room: [usize; 2], key: Name) {
        let client = lane / LANES;
        let mine = &self.client_mrs[client];
        let server_key = self.key(key);
        let server = |at: usize, len: usize| Sge {
            addr: self.memory.addr() + at as u64,
            len: len as u32,
            lkey: server_key,
        };
        // Memory of the server that its QP may access locally: regions of the QP's PD.
        let local = |at: usize, len: usize, need: Access| {
            let region = &self.regions[key.index % self.regions.len()];
            let fine = !key.window
                && !key.stale
                && region.alive
                && !region.meta
                && (region.access.allows(need) || need == Access::LOCAL_READ)
                && at >= region.at
                && at + len <= region.at + region.len;
            fine || len == 0
        };
        let (from, to, expected, sizes);
        if back {
            from = vec![server(100, len)];
            to = [mine.sge(0, room[0]), mine.sge(200, room[1])];
            sizes = split(len, room);
            expected = if !local(100, len, Access::LOCAL_READ) {
                Err(Syndrome::LocalProtection)
            } else if sizes.is_none() {
                Err(Syndrome::RemoteInvalidRequest)
            } else {
                Ok(())
            };
        } else {
            from = vec![mine.sge(0, len)];
            to = [server(300, room[0]), server(1024, room[1])];
            sizes = split(len, room);
            let used = [len.min(room[0]), len.saturating_sub(room[0]).min(room[1])];
            let fine = local(300, used[0], Access::LOCAL_WRITE)
                && local(1024, used[1], Access::LOCAL_WRITE);
            // The engine checks the SGEs in order, then their total length.
            expected = if !fine {
                Err(Syndrome::RemoteOperation)
            } else if sizes.is_none() {
                Err(Syndrome::RemoteInvalidRequest)
            } else {
                Ok(())
            };
        }
        if let (Ok(()), Some([a, b])) = (expected, sizes) {
            let (c, s) = (&mut self.client_bytes[client], &mut self.server_bytes);
            if back {
                c[..a].copy_from_slice(&s[100..100 + a]);
                c[200..200 + b].copy_from_slice(&s[100 + a..100 + a + b]);
            } else {
                s[300..300 + a].copy_from_slice(&c[..a]);
                s[1024..1024 + b].copy_from_slice(&c[a..a + b]);
            }
        }
        let Lane { client, server } = &mut self.lanes[lane];
        let (sender, receiver) = if back { (server, client) } else { (client, server) };
        self.bed.post_recv(receiver, &to);
        let cqe = self.bed.execute(sender, |w| _ = w.send(&from));
        let received = receiver.recv_cq.reader.poll();
        match expected {
            Ok(()) => assert_eq!(received.unwrap().byte_count as usize, len),
            Err(Syndrome::LocalProtection) => {
                assert_eq!(received, None);
                // The receive WQE stays posted; the reconnection drops it.
                let both = [&self.lanes[lane].client, &self.lanes[lane].server];
                for q in both {
                    let _ = self.bed.e.modify_qp(q.function, q.qpn, QpChange::Error);
                }
            }
            Err(_) => assert!(received.unwrap().error.is_some()),
        }
        self.ended(&cqe, expected, lane + 1, true);
    }

    /// Compares a completion with the expected outcome; reconnects after an error.
    fn ended(&mut self, cqe: &verbs::cqe::Cqe, expected: Expected, by: usize, remote: bool) {
        let got = match cqe.error {
            None => Ok(()),
            Some(e) => Err(Syndrome::from_value(e.syndrome).unwrap()),
        };
        assert_eq!(got, expected);
        let bed = &mut self.bed;
        let (a, b) = match by {
            0 => (&mut self.worker, &mut self.loopback),
            n => {
                let lane = &mut self.lanes[n - 1];
                (&mut lane.client, &mut lane.server)
            }
        };
        let states = [bed.state(a), bed.state(b)];
        if got.is_ok() {
            assert_eq!(states, [QpState::ReadyToSend; 2]);
            return;
        }
        assert!(states.contains(&QpState::Error));
        if remote && got != Err(Syndrome::LocalProtection) {
            assert_eq!(states, [QpState::Error; 2]);
        }
        bed.run();
        for q in [&mut *a, &mut *b] {
            bed.e.modify_qp(q.function, q.qpn, QpChange::Reset).unwrap();
            q.producer = 0;
            q.recv_producer = 0;
            q.recv_record.store_be32(0, 0);
            while q.send_cq.reader.poll().is_some() || q.recv_cq.reader.poll().is_some() {}
        }
        bed.connect(a, b);
    }

    fn compare(&self) {
        let mut bytes = vec![0; SERVER];
        self.memory.read(0, &mut bytes);
        assert!(bytes == self.server_bytes, "the server's memory differs from the model's");
        for (mr, model) in self.client_mrs.iter().zip(&self.client_bytes) {
            assert!(mr.bytes(0, CLIENT) == *model, "a client's memory differs from the model's");
        }
        for (key, model) in self.window_keys.iter().zip(&self.windows) {
            let info = self.bed.e.query_key(PF, key.index()).unwrap();
            assert_eq!((info.bound, info.tag), (model.bound.is_some(), model.tag));
            if let Some(b) = &model.bound {
                assert_eq!((info.qpn, info.access), (b.to, b.access));
                assert_eq!((info.start, info.len), (self.addr(b.at), b.len as u64));
            }
        }
        for (i, r) in self.regions.iter().enumerate() {
            let info = self.bed.e.query_key(PF, r.key.index());
            let windows = info.ok().filter(|i| i.tag == r.key.tag()).map(|i| i.windows as usize);
            assert_eq!(windows, r.alive.then(|| self.bound_to(i)));
        }
    }
}

/// Splits `len` bytes over two buffers; `None` if they do not fit.
fn split(len: usize, room: [usize; 2]) -> Option<[usize; 2]> {
    let first = len.min(room[0]);
    (len - first <= room[1]).then_some([first, len - first])
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |b| u64::from_be_bytes(b.try_into().unwrap()))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 1000 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn engine_agrees_with_the_model(
        ops in proptest::collection::vec((op(), proptest::bool::weighted(0.8)), 1..120),
    ) {
        let mut world = World::new();
        for (op, aimed) in &ops {
            world.step(&if *aimed { world.aimed(op) } else { op.clone() });
        }
        prop_assert!(world.bed.e.core.owners.functions.contains_key(&FunctionId::PHYSICAL));
    }
}

#[test]
fn model_operations_succeed_often_enough() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut world = World::new();
    for _ in 0..if cfg!(miri) { 50 } else { 3000 } {
        let op = op().new_tree(&mut runner).unwrap().current();
        world.step(&world.aimed(&op));
    }
    let stats = world.bed.e.stats();
    if !cfg!(miri) {
        assert!(stats.errors > 300, "{stats:?}");
        assert!(stats.wqes_total() > 600, "{stats:?}");
        assert!(stats.binds > 60 && stats.unbinds > 20 && stats.receives > 30, "{stats:?}");
    }
}
