//! Regions with an engine: which accesses the engine sees, which it refuses, and its lifetime.

use super::*;
use crate::error::Error;
use crate::limits::{FunctionLimits, Limits};
use crate::protection::Refusal;
use crate::spec::{EngineRegion, RegionChange};
use std::sync::{Arc, Mutex};
use verbs::cqe::Syndrome;
use verbs::direct::KeyKind;
use verbs::wqe::umr::Umr;
use verbs::wqe::{Builder, Remote};
use verbs::{Access, DmaMemory, FunctionId, Key, MwKind, Pdn, QpChange, QpState, RegionEngine};

pub const PAGE: usize = 4096;
/// Layout of a region: a page with a command of 64 bytes and its answer, a page with the command's
/// data, and the pages that commands fill.
pub const COMMAND: usize = 0;
pub const ANSWER: usize = 64;
pub const DATA: usize = PAGE;
/// Tag of the QP that may access all pages at first.
pub const TAG: u64 = 7;

/// Tag, offset and length of an access.
pub type Call = (u64, usize, usize);

/// State of a test engine.
#[derive(Default)]
pub struct State {
    /// The tag that may access each page.
    pub owners: Vec<u64>,
    /// Number of calls of `may_read` and `may_write` after which all accesses are refused.
    pub calls_left: usize,
    /// Calls of `may_read`, `may_write` and `written`.
    pub reads: Vec<Call>,
    pub writes: Vec<Call>,
    pub ended: Vec<Call>,
}

/// An engine that copies the data of a command to the page that the command's first byte names,
/// and answers with the number of WRITEs so far.
struct TestEngine {
    memory: DmaMemory,
    state: Arc<Mutex<State>>,
}

impl State {
    fn allows(&mut self, (tag, offset, len): Call) -> bool {
        let Some(left) = self.calls_left.checked_sub(1) else { return false };
        self.calls_left = left;
        let pages = offset / PAGE..=(offset + len - 1) / PAGE;
        self.owners[pages].iter().all(|owner| *owner == tag)
    }
}

impl RegionEngine for TestEngine {
    fn may_read(&self, tag: u64, offset: u64, len: u64) -> bool {
        let (mut state, call) = (self.state.lock().unwrap(), (tag, offset as usize, len as usize));
        state.reads.push(call);
        state.allows(call)
    }

    fn may_write(&self, tag: u64, offset: u64, len: u64) -> bool {
        let (mut state, call) = (self.state.lock().unwrap(), (tag, offset as usize, len as usize));
        state.writes.push(call);
        state.allows(call)
    }

    fn written(&mut self, tag: u64, offset: u64, len: u64) {
        let mut state = self.state.lock().unwrap();
        state.ended.push((tag, offset as usize, len as usize));
        if (offset as usize, len) != (COMMAND, 64) {
            return;
        }
        let (mut command, mut data) = ([0; 64], [0; PAGE]);
        self.memory.read(COMMAND, &mut command);
        self.memory.read(DATA, &mut data);
        self.memory.write(command[0] as usize * PAGE, &data);
        self.memory.write(ANSWER, &[state.ended.len() as u8; 64]);
    }
}

/// A region with a test engine.
pub struct Region {
    pub mem: DmaMemory,
    pub key: Key,
    pub state: Arc<Mutex<State>>,
}

/// Makes a region of zeroed pages, all accessible to [`TAG`].
pub fn register(bed: &mut Bed, f: FunctionId, pd: Pdn, pages: usize) -> Region {
    register_in(bed, f, pd, (memory(pages * PAGE), ALL))
}

fn register_in(
    bed: &mut Bed,
    f: FunctionId,
    pd: Pdn,
    (mem, access): (DmaMemory, Access),
) -> Region {
    let owners = vec![TAG; mem.len() / PAGE];
    let state = State { owners, calls_left: usize::MAX, ..State::default() };
    let state = Arc::new(Mutex::new(state));
    let engine = Box::new(TestEngine { memory: mem.clone(), state: state.clone() });
    let memory = mem.clone();
    let key = bed.e.reg_engine_mr(f, EngineRegion { pd, memory, access, engine }).unwrap();
    Region { mem, key, state }
}

impl Region {
    pub fn remote(&self, at: usize) -> Remote {
        Remote { addr: at as u64, rkey: self.key }
    }

    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mem.read(at, &mut out);
        out
    }

    pub fn give(&self, page: usize, tag: u64) {
        self.state.lock().unwrap().owners[page] = tag;
    }

    /// Takes the calls of `written` since the last call.
    pub fn ended(&self) -> Vec<Call> {
        std::mem::take(&mut self.state.lock().unwrap().ended)
    }

    /// Takes the calls of `may_read` and `may_write` since the last call.
    pub fn asked(&self) -> (Vec<Call>, Vec<Call>) {
        let mut state = self.state.lock().unwrap();
        (std::mem::take(&mut state.reads), std::mem::take(&mut state.writes))
    }

    fn engine_is_dropped(&self) -> bool {
        Arc::strong_count(&self.state) == 1
    }
}

/// Two connected QPs: `peer` accesses a region with an engine through `own`, which has [`TAG`].
struct World {
    bed: Bed,
    own: TestQp,
    peer: TestQp,
}

/// Makes a world, the region, and a region of the peer of the same length.
fn world() -> (World, Region, Mr) {
    world_of(Limits::default(), memory(8 * PAGE))
}

fn world_of(limits: Limits, mem: DmaMemory) -> (World, Region, Mr) {
    let mut bed = Bed::with(limits);
    let (own, peer) = bed.pair();
    let scratch = bed.mr(PF, peer.pd, mem.len(), ALL);
    let region = register_in(&mut bed, PF, own.pd, (mem, ALL));
    bed.e.modify_qp(PF, own.qpn, QpChange::Tag { tag: TAG }).unwrap();
    (World { bed, own, peer }, region, scratch)
}

impl World {
    fn reset(&mut self) {
        for q in [&mut self.own, &mut self.peer] {
            self.bed.e.modify_qp(PF, q.qpn, QpChange::Reset).unwrap();
            q.producer = 0;
            while q.send_cq.reader.poll().is_some() {}
        }
        self.bed.connect(&self.own, &self.peer);
    }

    /// Executes a WQE of the peer, which must succeed.
    #[track_caller]
    fn ok(&mut self, fill: impl FnOnce(&mut Builder)) {
        let cqe = self.bed.execute(&mut self.peer, fill);
        assert_eq!(cqe.error, None);
    }

    /// Executes a WQE of the peer, which must be refused without a reason and break both QPs.
    #[track_caller]
    fn refused(&mut self, fill: impl FnOnce(&mut Builder)) {
        let cqe = self.bed.execute(&mut self.peer, fill);
        assert_error(&cqe, Syndrome::RemoteAccess);
        assert_eq!(cqe.error.unwrap().vendor, 0, "the peer gets no reason");
        for q in [&self.own, &self.peer] {
            assert_eq!(self.bed.state(q), QpState::Error);
        }
        self.reset();
    }
}

#[test]
fn engine_acts_before_the_next_request_of_the_qp() {
    let (mut w, region, scratch) = world();
    for round in 1..4u8 {
        let page = 1 + round as usize;
        scratch.mem.write(0, &[round; PAGE]);
        let wqes: [&dyn Fn(&mut Builder); 4] = [
            &|b| _ = b.rdma_write(region.remote(DATA), &[scratch.sge(0, PAGE)]),
            &|b| _ = b.rdma_write_inline(region.remote(COMMAND), &[page as u8; 64]),
            &|b| _ = b.rdma_read(region.remote(ANSWER), &[scratch.sge(PAGE, 64)]),
            &|b| {
                let to = scratch.sge(2 * PAGE, PAGE);
                b.rdma_read(region.remote(page * PAGE), &[to]).signaled();
            },
        ];
        for fill in wqes {
            w.bed.write_wqe(&mut w.peer, fill);
        }
        w.bed.e.doorbell(w.peer.qpn, w.peer.producer);
        w.bed.run();
        assert_eq!(w.peer.send_cq.reader.poll().expect("a completion").error, None);
        assert_eq!(region.ended(), [(TAG, DATA, PAGE), (TAG, COMMAND, 64)]);
        assert_eq!(scratch.bytes(PAGE, 64), [2; 64], "the answer is of this command");
        assert_eq!(scratch.bytes(2 * PAGE, PAGE), [round; PAGE]);
    }
}

#[test]
fn engine_acts_before_the_completion_of_an_immediate() {
    let (mut w, region, scratch) = world();
    let from = [scratch.sge(0, 64)];
    // Without a receive WQE the WRITE waits, and neither writes nor ends.
    w.bed.post(&mut w.peer, |b| _ = b.rdma_write_imm(region.remote(8), &from, 5).signaled());
    w.bed.run();
    assert_eq!((region.ended(), region.asked()), (vec![], (vec![], vec![])));
    w.bed.post_recv(&mut w.own, &[]);
    w.bed.run();
    assert_eq!(region.ended(), [(TAG, 8, 64)]);
    assert_eq!(w.own.recv_cq.reader.poll().expect("a receive").imm, 5);
}

/// The last receive WQE of a shared queue is taken by another QP between the first slice of a WRITE
/// with immediate and its end. The WQE then waits at its end, and is executed again.
#[test]
fn write_that_waits_at_its_end_ends_once() {
    let limits = Limits { slice_bytes: 512, shared_slice_bytes: 512, ..Limits::default() };
    let mut bed = Bed::with(limits);
    let (pd, peer_pd) = (bed.pd(PF), bed.pd(PF));
    let (ring, record) = (memory(16 * STRIDE as usize), memory(8));
    let spec = crate::spec::RecvSpec {
        ring: ring.clone(),
        entries: 16,
        stride: STRIDE,
        record: record.clone(),
        initial_consumer: 0,
    };
    let srqn = bed.e.create_srq(PF, pd, spec).unwrap();
    let own = Shape { srq: Some(srqn), ..bed.shape(PF, pd) };
    let peer = bed.shape(PF, peer_pd);
    let [(own, mut peer), (other_own, mut other)] = [(); 2].map(|()| (bed.qp(&own), bed.qp(&peer)));
    bed.connect(&own, &peer);
    bed.connect(&other_own, &other);
    bed.e.modify_qp(PF, own.qpn, QpChange::Tag { tag: TAG }).unwrap();
    let region = register(&mut bed, PF, pd, 2);
    let scratch = bed.mr(PF, peer_pd, PAGE, ALL);
    record.store_be32(0, 1);
    bed.post(&mut peer, |b| {
        b.rdma_write_imm(region.remote(0), &[scratch.sge(0, PAGE)], 5).signaled();
    });
    assert!(bed.e.step(peer.qpn, 1));
    assert_eq!(region.asked().1.len(), 1, "the WRITE has begun");
    bed.post(&mut other, |b| _ = b.send(&[]));
    assert!(bed.e.step(other.qpn, 1), "the SEND takes the receive WQE");
    for _ in 0..3 {
        bed.run();
        assert_eq!(peer.send_cq.reader.poll(), None, "the WRITE waits");
    }
    assert_eq!(region.ended(), [(TAG, 0, PAGE)]);
    record.store_be32(0, 2);
    bed.run();
    assert_eq!(peer.send_cq.reader.poll().expect("a completion").error, None);
    assert_eq!(region.ended(), []);
}

#[test]
fn engine_refusal_looks_like_an_unknown_key_and_breaks_one_qp() {
    let (mut w, region, scratch) = world();
    let (own_pd, peer_pd) = (w.own.pd, w.peer.pd);
    let (own, peer) = (w.bed.shape(PF, own_pd), w.bed.shape(PF, peer_pd));
    let (second_own, mut second) = (w.bed.qp(&own), w.bed.qp(&peer));
    w.bed.connect(&second_own, &second);
    w.bed.e.modify_qp(PF, second_own.qpn, QpChange::Tag { tag: TAG + 1 }).unwrap();
    region.give(3, TAG + 1);
    let (at, scratch) = (region.remote(3 * PAGE), scratch.sge(0, 8));
    for _ in 0..2 {
        let cqe = w.bed.execute(&mut second, |b| _ = b.rdma_write(at, &[scratch]));
        assert_eq!(cqe.error, None);
        w.refused(|b| _ = b.rdma_write(at, &[scratch]));
        w.refused(|b| _ = b.rdma_read(at, &[scratch]));
        let unknown = Remote { rkey: Key(at.rkey.0 ^ 1), ..at };
        w.refused(|b| _ = b.rdma_read(unknown, &[scratch]));
        let cqe = w.bed.execute(&mut second, |b| _ = b.rdma_read(at, &[scratch]));
        assert_eq!(cqe.error, None, "the second QP is not affected");
        assert_eq!(region.ended(), [(TAG + 1, 3 * PAGE, 8)]);
    }
    let state = region.asked();
    assert_eq!(state.1[0], (TAG + 1, 3 * PAGE, 8));
    assert_eq!(state.1[1], (TAG, 3 * PAGE, 8));
    assert_eq!((state.0.len(), state.1.len()), (4, 4), "the wrong key did not reach the engine");
}

#[test]
fn engine_sees_only_permitted_accesses_with_bytes() {
    let (mut w, region, scratch) = world();
    let from = scratch.sge(0, 8);
    // No bytes.
    w.ok(|b| _ = b.rdma_write(region.remote(0), &[]));
    w.ok(|b| _ = b.rdma_read(region.remote(0), &[]));
    // The owner's own WQEs, through the lkey.
    let here = verbs::wqe::Sge { addr: 8, len: 8, lkey: region.key };
    let (there, own) = (scratch.remote(0), &mut w.own);
    assert_eq!(w.bed.execute(own, |b| _ = b.rdma_write(there, &[here])).error, None);
    assert_eq!(w.bed.execute(own, |b| _ = b.rdma_read(there, &[here])).error, None);
    // Beyond the range.
    let len = region.mem.len();
    for at in [len - 7, len, usize::MAX, usize::MAX - 7] {
        w.refused(|b| _ = b.rdma_write(region.remote(at), &[from]));
    }
    // Without the QP's right.
    let access = Access::REMOTE_READ;
    w.bed.e.modify_qp(PF, w.own.qpn, QpChange::Access { access }).unwrap();
    w.refused(|b| _ = b.rdma_write(region.remote(0), &[from]));
    assert_eq!((region.asked(), region.ended()), ((vec![], vec![]), vec![]));
    w.ok(|b| _ = b.rdma_read(region.remote(0), &[from]));
    assert_eq!(region.asked(), (vec![(TAG, 0, 8)], vec![]));
}

#[test]
fn engine_region_grants_its_rights_only() {
    let (mut w, _, scratch) = world();
    for access in [Access::REMOTE_READ, Access::REMOTE_WRITE | Access::LOCAL_WRITE] {
        let region = register_in(&mut w.bed, PF, w.own.pd, (memory(PAGE), access));
        let info = w.bed.e.query_key(PF, region.key.index()).unwrap();
        assert_eq!(info.access, access | Access::LOCAL_READ);
        let (at, sge) = (region.remote(0), scratch.sge(0, 8));
        let here = verbs::wqe::Sge { addr: 0, len: 8, lkey: region.key };
        let there = scratch.remote(0);
        assert_eq!(w.bed.execute(&mut w.own, |b| _ = b.rdma_write(there, &[here])).error, None);
        let reads = access.allows(Access::REMOTE_READ);
        if reads {
            w.ok(|b| _ = b.rdma_read(at, &[sge]));
            w.refused(|b| _ = b.rdma_write(at, &[sge]));
            let cqe = w.bed.execute(&mut w.own, |b| _ = b.rdma_read(there, &[here]));
            assert_error(&cqe, Syndrome::LocalProtection);
            w.reset();
        } else {
            w.ok(|b| _ = b.rdma_write(at, &[sge]));
            w.refused(|b| _ = b.rdma_read(at, &[sge]));
        }
        let call = vec![(TAG, 0, 8)];
        let asked = if reads { (call, vec![]) } else { (vec![], call) };
        assert_eq!(region.asked(), asked);
    }
}

#[test]
fn atomics_windows_and_changes_of_an_engine_region_are_refused() {
    let (mut w, region, scratch) = world();
    let old = scratch.sge(0, 8);
    w.refused(|b| _ = b.fetch_add(region.remote(0), 1, old));
    w.refused(|b| _ = b.compare_swap(region.remote(0), 0, 1, old));
    assert_eq!(region.bytes(0, 8), [0; 8]);
    for kind in [MwKind::Type1, MwKind::Type2] {
        let mw = w.bed.e.alloc_mw(PF, w.own.pd, kind).unwrap();
        let (tag, all, region) = (mw.tag().wrapping_add(1), Access::REMOTE_ALL, region.key);
        let umr = match kind {
            MwKind::Type1 => Umr::bind_type1(mw, tag, all, region, 0, 4096),
            MwKind::Type2 => Umr::bind(mw, tag, w.own.qpn, all, region, 0, 4096),
        };
        let cqe = w.bed.execute(&mut w.own, |b| _ = b.umr(&umr));
        assert_error(&cqe, Syndrome::MwBind);
        assert_eq!(cqe.error.unwrap().vendor, Refusal::Region as u8);
        w.reset();
    }
    let info = w.bed.e.query_key(PF, region.key.index()).unwrap();
    assert_eq!((info.kind, info.windows, info.start), (KeyKind::Mr, 0, 0));
    let change = RegionChange { access: Some(Access::NONE), ..RegionChange::default() };
    let refused = w.bed.e.rereg_mr(PF, region.key, change);
    assert_eq!(refused, Err(Error::HasEngine(region.key.index())));
    assert_eq!(w.bed.e.query_key(PF, region.key.index()).unwrap(), info);
    w.ok(|b| _ = b.rdma_write_inline(region.remote(0), &[1; 8]));
    assert_eq!(region.ended(), [(TAG, 0, 8)]);
}

/// Limits under which a transfer of two pages takes sixteen slices.
fn sliced() -> Limits {
    Limits { slice_bytes: 512, shared_slice_bytes: 512, ..Limits::default() }
}

#[test]
fn long_read_ends_when_its_page_changes_hands() {
    for revoked in [false, true] {
        let (mut w, region, scratch) = world_of(sliced(), memory(2 * PAGE));
        region.mem.write(0, &[1; 2 * PAGE]);
        let to = scratch.sge(0, 2 * PAGE);
        w.bed.post(&mut w.peer, |b| _ = b.rdma_read(region.remote(0), &[to]).signaled());
        for _ in 0..5 {
            assert!(w.bed.e.step(w.peer.qpn, 1));
        }
        assert_eq!(scratch.bytes(2047, 2), [1, 1]);
        if revoked {
            region.give(1, TAG + 1);
        }
        w.bed.run();
        let cqe = w.peer.send_cq.reader.poll().expect("a completion");
        let asked = region.asked().0.len();
        if revoked {
            assert_error(&cqe, Syndrome::RemoteAccess);
            assert_eq!((scratch.bytes(2560, 1), asked), (vec![0], 6));
        } else {
            assert_eq!((cqe.error, scratch.bytes(8191, 1), asked), (None, vec![1], 16));
        }
    }
}

#[test]
fn write_that_fails_in_the_middle_never_ends() {
    for revoked in [false, true] {
        let (mut w, region, scratch) = world_of(sliced(), memory(2 * PAGE));
        scratch.mem.write(0, &[1; 2 * PAGE]);
        let from = scratch.sge(0, 2 * PAGE);
        w.bed.post(&mut w.peer, |b| _ = b.rdma_write(region.remote(0), &[from]).signaled());
        for _ in 0..15 {
            assert!(w.bed.e.step(w.peer.qpn, 1));
        }
        assert_eq!((region.bytes(7679, 2), region.ended()), (vec![1, 0], vec![]));
        if revoked {
            region.give(1, TAG + 1);
        }
        w.bed.run();
        let cqe = w.peer.send_cq.reader.poll().expect("a completion");
        assert_eq!(region.asked().1.len(), 16);
        if revoked {
            assert_error(&cqe, Syndrome::RemoteAccess);
            assert_eq!((region.bytes(7680, 1), region.ended()), (vec![0], vec![]));
        } else {
            assert_eq!((cqe.error, region.ended()), (None, vec![(TAG, 0, 2 * PAGE)]));
        }
    }
}

/// The NIC gives the pages of a WRITE of zeros back to the system instead of writing them.
#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn write_of_zeros_over_thin_memory_ends_too() {
    let thin = DmaMemory::thin(64 * PAGE, PAGE, 0).unwrap();
    let (mut w, region, _) = world_of(sliced(), thin);
    let zeros = DmaMemory::zeros(64 * PAGE).unwrap();
    let start = zeros.addr();
    let key = w.bed.e.reg_mr(PF, w.peer.pd, zeros, start, Access::NONE).unwrap();
    let from = verbs::wqe::Sge { addr: start, len: 64 * PAGE as u32, lkey: key };
    region.mem.write(0, &[1; 64 * PAGE]);
    w.ok(|b| _ = b.rdma_write(region.remote(0), &[from]));
    assert_eq!(region.bytes(0, 64 * PAGE), [0; 64 * PAGE]);
    assert_eq!(region.ended(), [(TAG, 0, 64 * PAGE)]);
    region.give(63, TAG + 1);
    w.refused(|b| _ = b.rdma_write(region.remote(0), &[from]));
    assert_eq!(region.ended(), []);
}

/// While other functions have quanta, a `poll` ends after the work of one quantum.
#[test]
fn engine_call_is_charged_like_a_page() {
    let mut bed = Bed::new();
    let (own, mut peer) = bed.pair();
    bed.e.modify_qp(PF, own.qpn, QpChange::Tag { tag: TAG }).unwrap();
    let (region, plain) = (register(&mut bed, PF, own.pd, 1), bed.mr(PF, own.pd, PAGE, ALL));
    let scratch = bed.mr(PF, peer.pd, 64, ALL);
    let mut polls = |at: Remote| {
        for _ in 0..60 {
            bed.write_wqe(&mut peer, |b| _ = b.rdma_write(at, &[scratch.sge(0, 8)]));
        }
        bed.e.doorbell(peer.qpn, peer.producer);
        std::iter::from_fn(|| Some(bed.e.poll(1, usize::MAX)).filter(|n| *n > 0)).count()
    };
    let (engine, plain) = (polls(region.remote(8)), polls(plain.remote(8)));
    let bytes = 60 * PAGE as u64;
    let turns = bytes / (8 * u64::from(Limits::default().function_turn));
    assert!(engine as u64 >= turns && plain <= 2, "{engine} and {plain} polls");
}

#[test]
fn engine_ends_with_its_region() {
    let (mut w, region, _) = world();
    let (key, pd) = (region.key, w.own.pd);
    w.ok(|b| _ = b.rdma_write_inline(region.remote(0), &[1; 8]));
    assert!(!region.engine_is_dropped());
    w.bed.e.dereg_mr(PF, key).unwrap();
    assert!(region.engine_is_dropped());
    w.refused(|b| _ = b.rdma_write_inline(region.remote(0), &[1; 8]));
    assert_eq!(region.ended(), [(TAG, 0, 8)]);
    // A later region with the same index has no engine.
    let mut bed = Bed::with(Limits { keys: 1, ..Limits::default() });
    let pd_there = bed.pd(PF);
    for _ in 0..3 {
        let with = register(&mut bed, PF, pd_there, 1);
        bed.e.dereg_mr(PF, with.key).unwrap();
        assert!(with.engine_is_dropped());
        let plain = bed.mr(PF, pd_there, PAGE, ALL);
        assert_eq!(plain.key.index(), with.key.index());
        let change = RegionChange { access: Some(ALL), ..RegionChange::default() };
        let key = bed.e.rereg_mr(PF, plain.key, change).expect("the region has no engine");
        bed.e.dereg_mr(PF, key).unwrap();
    }
    // Engines end with their function, too, and a rejected registration drops its engine.
    let f = w.bed.e.add_function(FunctionLimits::NONE).unwrap();
    let virtual_pd = w.bed.pd(f);
    let regions = [(); 3].map(|()| register(&mut w.bed, f, virtual_pd, 1));
    w.bed.e.remove_function(f);
    assert!(regions.iter().all(Region::engine_is_dropped));
    let state = Arc::new(Mutex::new(State::default()));
    let mem = memory(2 * PAGE);
    let engine = Box::new(TestEngine { memory: mem.clone(), state: state.clone() });
    let unaligned = mem.slice(4, PAGE).unwrap();
    let spec = EngineRegion { pd, memory: unaligned, access: ALL, engine };
    assert!(matches!(w.bed.e.reg_engine_mr(PF, spec), Err(Error::Argument { .. })));
    assert_eq!(Arc::strong_count(&state), 1);
}

/// Regions with an engine are addressed from 0, so their addresses could be mistaken for those of
/// other memory.
#[test]
fn engine_regions_are_left_out_of_reachability() {
    let (mut w, _, _) = world();
    let mut ways = Vec::new();
    w.bed.e.reachability(0, 1 << 20, &mut ways);
    assert_eq!(ways, []);
    let plain = w.bed.mr(PF, w.own.pd, PAGE, ALL);
    w.bed.e.reachability(plain.mem.addr(), 1, &mut ways);
    assert_eq!(ways.len(), 1);
}
