//! Regions behind engines, an extension without a counterpart in rdma-core.

use std::sync::{Arc, Mutex};

use super::pair::{End, Pair, connect, pattern};
use super::windows::second_connection;
use super::{Bench, Case, at_server};
use crate::{
    Access, Bind, Data, DmaMemory, Error, Feature, MemoryRegion, MemoryWindow, Nic, Op, QpChange,
    QpState, QueuePair, RegionEngine, Remote, Rereg, Status, WorkRequest,
};

/// Layout of a test engine's region: a command and its answer in the first page, the command's
/// data in the second, and the pages that commands fill.
const COMMAND: u64 = 0;
const COMMAND_BYTES: usize = 64;
const ANSWER: usize = 64;
const PAGE: usize = 4096;
const DATA: usize = PAGE;
const PAGES: usize = 8;
/// Bytes of the region.
const BYTES: usize = PAGES * PAGE;
/// The tag that owns the first two pages at first.
const TAG: u64 = 0x1234;

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    let case = |name, program| at_server(Feature::RegionEngines, name, program);
    vec![
        case("engines.act_before_the_next_request", act_before_the_next_request::<B>),
        case("engines.act_before_an_immediate", act_before_an_immediate),
        case("engines.see_the_tag_of_the_queue_pair", see_the_tag),
        case("engines.admit_reads_and_writes_only", admit_reads_and_writes_only),
        case("engines.end_with_their_region", end_with_their_region),
    ]
}

/// State of a test engine.
struct State {
    /// The tag that may access each page.
    owners: [u64; PAGES],
    /// Tag, offset and length of each WRITE that has ended.
    written: Vec<(u64, u64, u64)>,
}

/// An engine that copies the data of a command to the page that the command's first byte names,
/// gives the page to the command's tag, and answers with the number of WRITEs so far.
struct TestEngine {
    memory: DmaMemory,
    state: Arc<Mutex<State>>,
}

impl TestEngine {
    fn owns(&self, tag: u64, offset: u64, len: u64) -> bool {
        let state = self.state.lock().expect("no panic");
        let (first, last) = (offset as usize / PAGE, (offset + len - 1) as usize / PAGE);
        state.owners[first..=last].iter().all(|owner| *owner == tag)
    }
}

impl RegionEngine for TestEngine {
    fn may_read(&self, tag: u64, offset: u64, len: u64) -> bool {
        self.owns(tag, offset, len)
    }

    fn may_write(&self, tag: u64, offset: u64, len: u64) -> bool {
        self.owns(tag, offset, len)
    }

    fn written(&mut self, tag: u64, offset: u64, len: u64) {
        let mut state = self.state.lock().expect("no panic");
        state.written.push((tag, offset, len));
        if offset != COMMAND || len != COMMAND_BYTES as u64 {
            return;
        }
        let mut command = [0; COMMAND_BYTES];
        self.memory.read(COMMAND as usize, &mut command);
        let page = command[0] as usize % PAGES;
        let mut data = [0; PAGE];
        self.memory.read(DATA, &mut data);
        self.memory.write(page * PAGE, &data);
        state.owners[page] = tag;
        self.memory.write(ANSWER, &[state.written.len() as u8; COMMAND_BYTES]);
    }
}

/// A region of the server behind a test engine, and the engine's state. The server's QP has the tag
/// that owns the first two pages.
struct Engines<N: Nic> {
    mr: N::Mr,
    state: Arc<Mutex<State>>,
}

fn engines<N: Nic>(server: &End<N>) -> Engines<N> {
    let memory = server.nic.alloc_dma(BYTES).expect("memory");
    let mut owners = [0; PAGES];
    owners[..2].fill(TAG);
    let state = Arc::new(Mutex::new(State { owners, written: Vec::new() }));
    let engine = Box::new(TestEngine { memory: memory.clone(), state: state.clone() });
    let access = Access::LOCAL_ALL | Access::REMOTE_ALL;
    let mr = server.nic.reg_engine_mr(&server.pd, &memory, access, engine).expect("a region");
    assert_eq!(mr.iova(), 0);
    server.qp.modify(QpChange::Tag { tag: TAG }).expect("a tag");
    Engines { mr, state }
}

impl<N: Nic> Engines<N> {
    fn page(&self, page: usize) -> Remote {
        self.mr.remote(page * PAGE)
    }

    fn give(&self, page: usize, tag: u64) {
        self.state.lock().expect("no panic").owners[page] = tag;
    }

    /// Takes the WRITEs that have ended since the last call.
    fn written(&self) -> Vec<(u64, u64, u64)> {
        std::mem::take(&mut self.state.lock().expect("no panic").written)
    }
}

fn act_before_the_next_request<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, e) = (&p.client, engines(&p.server));
    for (round, page) in [(1, 2), (2, 3), (3, 2)] {
        let data = pattern(round, PAGE);
        c.put(0, &data);
        let (from, answer) = ([c.sge(0, PAGE as u32)], [c.sge(2 * PAGE, COMMAND_BYTES as u32)]);
        let loaded = [c.sge(3 * PAGE, PAGE as u32)];
        let command = [page as u8; COMMAND_BYTES];
        let ops = [
            Op::Write { to: e.mr.remote(DATA), from: &from },
            Op::WriteInline { to: e.page(0), data: &command },
            Op::Read { from: e.mr.remote(ANSWER), to: &answer },
            Op::Read { from: e.page(page), to: &loaded },
        ];
        let mut list = ops.map(|op| WorkRequest { id: 8, op, signaled: false });
        list[3].signaled = true;
        c.qp.post_send(&list).expect("posting");
        assert_eq!(c.next().status, Status::Success);
        let writes = [(TAG, DATA as u64, PAGE as u64), (TAG, COMMAND, COMMAND_BYTES as u64)];
        assert_eq!(e.written(), writes);
        assert_eq!(c.get(2 * PAGE, COMMAND_BYTES), [2; COMMAND_BYTES]);
        assert_eq!(c.get(3 * PAGE, PAGE), data);
    }
    // WRITEs without bytes reach no engine, and neither does a WRITE that is refused.
    c.ok(Op::WriteInline { to: e.page(0), data: &[] });
    p.refused(Op::WriteInline { to: e.page(4), data: &[1; 8] }, Status::RemoteAccess);
    assert_eq!(e.written(), []);
}

fn act_before_an_immediate<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let e = engines(&p.server);
    for _ in 0..3 {
        p.server.receive(4, &[]);
        let from = [p.client.sge(0, 16)];
        let data = Data::Gather(&from);
        p.client.post(5, Op::WriteImm { to: e.mr.remote(DATA), data, imm: 9 });
        assert_eq!((p.server.next().id, e.written()), (4, vec![(TAG, DATA as u64, 16)]));
        assert_eq!(p.client.next().status, Status::Success);
    }
}

fn see_the_tag<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let e = engines(&p.server);
    let (mine, theirs) = second_connection(bench, &p);
    theirs.modify(QpChange::Tag { tag: TAG + 1 }).expect("a tag");
    e.give(4, TAG);
    e.give(5, TAG + 1);
    let second = |op| {
        mine.post_send(&[WorkRequest { id: 5, op, signaled: true }]).expect("posting");
        p.client.next().status
    };
    let (data, to) = ([7; 8], [p.client.sge(0, 8)]);
    p.client.ok(Op::WriteInline { to: e.page(4), data: &data });
    assert_eq!(second(Op::WriteInline { to: e.page(5), data: &data }), Status::Success);
    assert_eq!(second(Op::Read { from: e.page(5), to: &to }), Status::Success);
    let (four, five) = (4 * PAGE as u64, 5 * PAGE as u64);
    assert_eq!(e.written(), [(TAG, four, 8), (TAG + 1, five, 8)]);
    // The page of the other tag, and ranges that begin before or end behind the own page.
    for at in [e.page(4), e.mr.remote(5 * PAGE - 1), e.mr.remote(6 * PAGE - 7)] {
        let refused = [Op::Read { from: at, to: &to }, Op::WriteInline { to: at, data: &data }];
        for op in refused {
            assert_eq!(second(op), Status::RemoteAccess, "{op:?}");
            assert_eq!(theirs.state().expect("a state"), QpState::Error);
            assert_eq!(p.server.qp.state().expect("a state"), QpState::ReadyToSend);
            p.client.ok(Op::Read { from: e.page(4), to: &to });
            connect(bench, &mine, &theirs);
        }
    }
    assert_eq!(e.written(), []);
}

fn admit_reads_and_writes_only<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (s, e) = (&p.server, engines(&p.server));
    let old = p.client.sge(0, 8);
    p.refused(Op::FetchAdd { at: e.page(0), add: 1, old }, Status::RemoteAccess);
    p.refused(Op::CompareSwap { at: e.page(0), compare: 0, swap: 1, old }, Status::RemoteAccess);
    if s.nic.caps().windows {
        let window = s.nic.alloc_mw(&s.pd).expect("a window");
        let bind = s.bind_of(&window, window.key(), 0, 64);
        let over = Bind { region: e.mr.key(), addr: 0, zero_based: true, ..bind };
        assert_eq!(s.run(Op::Bind(&over)).status, Status::Bind);
        p.connect();
    }
    // The owner's own work requests may use the region as a local buffer.
    s.ok(Op::Write { to: p.client.at(0), from: &[e.mr.sge(0, 64)] });
    s.ok(Op::Read { from: p.client.at(0), to: &[e.mr.sge(3 * PAGE, 64)] });
    assert_eq!(e.written(), []);
    let Engines { mr, state } = e;
    let change = Rereg { access: Some(Access::REMOTE_READ), ..Rereg::default() };
    let refused = s.nic.rereg_mr(mr, change).map(|_| ());
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert_eq!(Arc::strong_count(&state), 1, "the region has ended, and its engine with it");
}

fn end_with_their_region<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let Engines { mr, state } = engines(&p.server);
    let at = mr.remote(0);
    p.client.ok(Op::WriteInline { to: at, data: &[1; 8] });
    assert_eq!(Arc::strong_count(&state), 2);
    drop(mr);
    assert_eq!(Arc::strong_count(&state), 1, "the engine is dropped");
    p.refused(Op::WriteInline { to: at, data: &[1; 8] }, Status::RemoteAccess);
    assert_eq!(state.lock().expect("no panic").written.len(), 1);
    // A later region, which may have the same key index, has no engine.
    let plain = p.server.region(BYTES, Access::LOCAL_ALL | Access::REMOTE_ALL);
    p.client.ok(Op::FetchAdd { at: plain.remote(0), add: 1, old: p.client.sge(0, 8) });
    // A region that cannot be registered drops its engine, too.
    let other = End::new(&p.server.nic, &super::Shape::default());
    let engine = TestEngine { memory: other.mr.memory().clone(), state: state.clone() };
    let unaligned = other.mr.memory().slice(4, PAGE).expect("a slice");
    let (pd, access) = (&other.pd, Access::REMOTE_READ);
    let refused = other.nic.reg_engine_mr(pd, &unaligned, access, Box::new(engine)).map(|_| ());
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert_eq!(Arc::strong_count(&state), 1);
}
