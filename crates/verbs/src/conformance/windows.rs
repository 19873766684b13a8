//! Memory windows (IBTA vol. 1, chapter 10, memory management).

use super::pair::{End, Pair, Shape, connect};
use super::{Bench, Case, never, with};
use crate::{
    Access, Bind, Data, Feature, Guards, Key, MemoryRegion, MemoryWindow, MwKind, Nic, Op, QpAttr,
    QpChange, QpState, QueuePair, Receive, ReceiveAttr, Remote, Status, WcOpcode, WorkRequest,
};

/// Offset of a window in the server's region. [`LEN`] is its length in bytes.
const START: usize = 4096;
const LEN: u32 = 512;

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    use Feature::{Type1Windows as One, Type2Windows as Two};
    vec![
        with(
            One,
            "windows.type_1_bind",
            &["test_mr.test_mw_type1", "test_mr.test_mw_ex_type1"],
            type_1_bind,
        ),
        with(One, "windows.type_1_rebind", &[], type_1_rebind),
        with(
            One,
            "windows.type_1_unbound_by_length_0",
            &["test_mr.test_invalidate_mw_type1"],
            type_1_unbound,
        ),
        with(One, "windows.type_1_is_open_to_its_pd", &[], type_1_is_open_to_its_pd),
        with(
            Feature::GuardedWindows,
            "windows.guard_word_admits_queue_pairs",
            &[],
            guard_word_admits_queue_pairs,
        ),
        with(
            Feature::GuardedWindows,
            "windows.guards_are_words_of_a_region",
            &[],
            guards_are_words,
        ),
        with(One, "windows.type_1_cannot_be_invalidated", &[], type_1_cannot_be_invalidated),
        with(Two, "windows.type_2_bind", &["test_mr.test_mw_type2"], type_2_bind),
        with(
            Two,
            "windows.type_2_local_invalidate",
            &["test_mr.test_mw_type2_invalidate_local"],
            type_2_local_invalidate,
        ),
        with(
            Two,
            "windows.type_2_send_with_invalidate",
            &["test_mr.test_mw_type2_invalidate_remote"],
            type_2_send_with_invalidate,
        ),
        with(
            Two,
            "windows.type_2_dealloc",
            &["test_mr.test_mw_type2_invalidate_dealloc"],
            type_2_dealloc,
        ),
        with(Two, "windows.type_2_is_not_rebound_while_bound", &[], type_2_not_rebound),
        with(
            Two,
            "windows.type_2_is_bound_to_one_queue_pair",
            &[],
            type_2_is_bound_to_one_queue_pair,
        ),
        with(Two, "windows.invalidate_foreign_keys", &[], invalidate_foreign_keys),
        with(Two, "windows.rights", &["test_qpex.test_qp_ex_rc_bind_mw"], rights),
        with(Two, "windows.need_a_writable_region", &[], need_a_writable_region),
        with(Two, "windows.stay_in_their_region_and_pd", &[], stay_in_their_region_and_pd),
        with(Two, "windows.key_is_not_a_local_key", &[], key_is_not_a_local_key),
        with(Feature::ZeroBased, "windows.zero_based", &[], zero_based),
        with(One, "windows.belong_to_one_function", &[], belong_to_one_function),
        never(
            "windows.wrong_type",
            &["test_mr.test_reg_mw_wrong_type"],
            "a third window type cannot be expressed: the type is an enum",
        ),
        never(
            "windows.bind_right_of_a_region",
            &[],
            "regions have no bind right (IBV_ACCESS_MW_BIND): the owner of the PD decides by \
             posting the bind",
        ),
    ]
}

/// Binds a window on the server and returns its remote address.
fn bind<N: Nic>(server: &End<N>, bind: Bind) -> Remote {
    let done = server.ok(Op::Bind(&bind));
    assert_eq!(done.opcode, WcOpcode::Bind);
    bind.remote()
}

/// Checks that the client can write and read the whole window.
fn opens<B: Bench>(p: &Pair<'_, B>, at: Remote, len: u32, seed: u8) {
    let data = super::pair::pattern(seed, len as usize);
    p.client.put(0, &data);
    p.client.ok(Op::Write { to: at, from: &[p.client.sge(0, len)] });
    assert_eq!(p.server.get(START, len as usize), data);
    p.client.ok(Op::Read { from: at, to: &[p.client.sge(8192, len)] });
    assert_eq!(p.client.get(8192, len as usize), data);
}

/// Checks that the client cannot write to the window. Both QPs are then reset and reconnected.
fn closed<B: Bench>(p: &Pair<'_, B>, at: Remote) {
    let before = p.server.get(0, 16384);
    p.refused(Op::WriteInline { to: at, data: &[0xee; 4] }, Status::RemoteAccess);
    assert_eq!(p.server.get(0, 16384), before);
}

fn bound_type_1<B: Bench>(p: &Pair<'_, B>) -> (<B::Nic as Nic>::Mw, Remote) {
    let window = p.server.nic.alloc_type1_mws(&p.server.pd, 1).expect("a window").remove(0);
    let at = bind(&p.server, p.server.bind_of(&window, window.key(), START, LEN));
    (window, at)
}

fn bound_type_2<B: Bench>(p: &Pair<'_, B>) -> (<B::Nic as Nic>::Mw, Remote) {
    let window = p.server.nic.alloc_mw(&p.server.pd).expect("a window");
    let at = bind(&p.server, p.server.bind_of(&window, window.key(), START, LEN));
    (window, at)
}

fn bind_opens_its_range<B: Bench>(p: &Pair<'_, B>, at: Remote) {
    opens(p, at, LEN, 1);
    for offset in [-1i64, LEN as i64 - 3] {
        closed(p, Remote { addr: at.addr.wrapping_add_signed(offset), ..at });
    }
    let region = Remote { rkey: Key(at.rkey.0 ^ 0x80), ..at };
    closed(p, region);
    opens(p, at, LEN, 2);
}

fn type_1_bind<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (_window, at) = bound_type_1(&p);
    bind_opens_its_range(&p, at);
}

fn type_1_rebind<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (window, mut at) = bound_type_1(&p);
    for len in [LEN / 2, LEN, 8] {
        let old = at;
        at = bind(&p.server, p.server.bind_of(&window, at.rkey, START, len));
        assert_ne!(at.rkey, old.rkey);
        opens(&p, at, len, len as u8);
        closed(&p, old);
        closed(&p, Remote { addr: at.addr + len as u64, ..at });
    }
}

fn type_1_unbound<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (window, at) = bound_type_1(&p);
    opens(&p, at, LEN, 3);
    let nothing = p.server.bind_of(&window, at.rkey, START, 0);
    let empty = bind(&p.server, nothing);
    closed(&p, at);
    closed(&p, empty);
    let again = bind(&p.server, p.server.bind_of(&window, empty.rkey, START, LEN));
    opens(&p, again, LEN, 4);
}

fn type_1_is_open_to_its_pd<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (_window, at) = bound_type_1(&p);
    let (mine, theirs) = second_connection(bench, &p);
    let write = Op::WriteInline { to: at, data: &[9; 8] };
    mine.post_send(&[WorkRequest { id: 5, op: write, signaled: true }]).expect("posting");
    assert_eq!(p.client.next().status, Status::Success);
    assert_eq!(theirs.state().expect("a state"), QpState::ReadyToSend);
    assert_eq!(p.server.get(START, 8), [9; 8]);
}

fn guard_word_admits_queue_pairs<B: Bench>(bench: &B) {
    const WORD: usize = 32 << 10;
    let p = Pair::new(bench);
    let s = &p.server;
    let set_word = |word: u64| s.put(WORD, &word.to_be_bytes());
    let words = [(s.at(WORD).addr, 0x1200), (s.at(WORD).addr, 0x1300)];
    let guards = Guards { region: &s.mr, mask: 0xffff, words: &words };
    let windows = s.nic.alloc_guarded_mws(&s.pd, &guards).expect("windows");
    assert!(windows.iter().all(|w| w.kind() == MwKind::Type1));
    let [one, two] = [0, 1].map(|i| bind(s, s.bind_of(&windows[i], windows[i].key(), START, LEN)));
    s.qp.modify(QpChange::Tag { tag: 0x34 }).expect("a tag");
    closed(&p, one);
    set_word(0xffff_0000_0000_1234);
    opens(&p, one, LEN, 1);
    closed(&p, two);
    for word in [0x1233, 0x1235, 0x1200, 0x1334, 0x9234] {
        set_word(word);
        closed(&p, one);
    }
    set_word(0x1334);
    opens(&p, two, LEN, 2);
    set_word(0x1234);
    // A second connection, which has another tag.
    let (mine, theirs) = second_connection(bench, &p);
    theirs.modify(QpChange::Tag { tag: 0x35 }).expect("a tag");
    let write = Op::WriteInline { to: one, data: &[9; 8] };
    mine.post_send(&[WorkRequest { id: 5, op: write, signaled: true }]).expect("posting");
    assert_eq!(p.client.next().status, Status::RemoteAccess);
    opens(&p, one, LEN, 3);
    set_word(0x1235);
    connect(bench, &mine, &theirs);
    mine.post_send(&[WorkRequest { id: 6, op: write, signaled: true }]).expect("posting");
    assert_eq!(p.client.next().status, Status::Success, "the tag outlives a reset");
    closed(&p, one);
}

fn guards_are_words<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let s = &p.server;
    let end = s.mr.memory().len();
    for addr in [s.at(4).addr, s.at(0).addr + end as u64, s.at(0).addr - 8, 0] {
        let guards = Guards { region: &s.mr, mask: 1, words: &[(s.at(0).addr, 0), (addr, 0)] };
        let refused = s.nic.alloc_guarded_mws(&s.pd, &guards);
        assert!(matches!(refused, Err(crate::Error::Refused { .. })), "{addr:#x}");
    }
    // The region lives as long as a window that it guards, even without a handle.
    let region = s.region(4096, Access::LOCAL_ALL);
    region.memory().store_be64(0, 1);
    let words = [(region.iova(), 1)];
    let guards = Guards { region: &region, mask: 1, words: &words };
    let window = s.nic.alloc_guarded_mws(&s.pd, &guards).expect("a window").remove(0);
    let at = bind(s, s.bind_of(&window, window.key(), START, LEN));
    drop(region);
    opens(&p, at, LEN, 4);
    drop(window);
    closed(&p, at);
}

fn type_1_cannot_be_invalidated<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (_window, at) = bound_type_1(&p);
    assert_eq!(p.server.run(Op::LocalInvalidate { key: at.rkey }).status, Status::Bind);
    p.connect();
    p.server.receive(1, &[]);
    let data = Data::Gather(&[]);
    p.refused(Op::SendInvalidate { data, key: at.rkey }, Status::RemoteAccess);
    opens(&p, at, LEN, 5);
}

fn type_2_bind<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (_window, at) = bound_type_2(&p);
    bind_opens_its_range(&p, at);
}

fn type_2_local_invalidate<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (window, at) = bound_type_2(&p);
    opens(&p, at, LEN, 1);
    let done = p.server.ok(Op::LocalInvalidate { key: at.rkey });
    assert_eq!(done.opcode, WcOpcode::LocalInvalidate);
    closed(&p, at);
    assert_eq!(p.server.run(Op::LocalInvalidate { key: at.rkey }).status, Status::Bind, "free");
    p.connect();
    let again = bind(&p.server, p.server.bind_of(&window, at.rkey, START, LEN));
    opens(&p, again, LEN, 2);
    closed(&p, at);
}

fn type_2_send_with_invalidate<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (window, mut at) = bound_type_2(&p);
    for (round, inline) in [false, true].into_iter().enumerate() {
        opens(&p, at, LEN, round as u8);
        p.client.put(0, b"done with it");
        p.server.receive(3, &[p.server.sge(0, 64)]);
        let gather = [p.client.sge(0, 12)];
        let data = if inline { Data::Inline(b"done with it") } else { Data::Gather(&gather) };
        let sent = p.client.ok(Op::SendInvalidate { data, key: at.rkey });
        assert_eq!(sent.opcode, WcOpcode::Send);
        let c = p.server.next();
        assert_eq!((c.id, c.status, c.opcode), (3, Status::Success, WcOpcode::Receive));
        assert_eq!((c.bytes, c.imm, c.invalidated), (12, None, Some(at.rkey)));
        assert_eq!(p.server.get(0, 12), b"done with it");
        closed(&p, at);
        at = bind(&p.server, p.server.bind_of(&window, at.rkey, START, LEN));
    }
}

fn type_2_dealloc<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (window, at) = bound_type_2(&p);
    opens(&p, at, LEN, 1);
    drop(window);
    closed(&p, at);
}

fn type_2_not_rebound<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (window, at) = bound_type_2(&p);
    let other = p.server.bind_of(&window, at.rkey, 0, 64);
    assert_eq!(p.server.run(Op::Bind(&other)).status, Status::Bind);
    p.connect();
    opens(&p, at, LEN, 1);
    closed(&p, other.remote());
}

/// Creates another connection between the same two ends.
pub(super) fn second_connection<B: Bench>(
    bench: &B,
    p: &Pair<'_, B>,
) -> (<B::Nic as Nic>::Qp, <B::Nic as Nic>::Qp) {
    let qp = |end: &End<B::Nic>| {
        let attr = QpAttr {
            send_cq: &end.cq,
            recv_cq: &end.cq,
            send_blocks: 16,
            receive: Receive::Own(ReceiveAttr { entries: 4, max_sges: 1 }),
            access: Access::REMOTE_ALL,
        };
        end.nic.create_qp(&end.pd, attr).expect("a QP")
    };
    let (mine, theirs) = (qp(&p.client), qp(&p.server));
    connect(bench, &mine, &theirs);
    (mine, theirs)
}

/// Checks that a window of one function cannot be reached through queue pairs of another function.
/// If the NIC has a single function, checks that opening another one fails.
fn belong_to_one_function<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let functions = p.server.nic.query_device().expect("limits").functions;
    assert!(functions > 0);
    let Some(opened) = p.server.nic.open_function().ok().filter(|_| functions > 1) else {
        assert!(functions == 1, "{functions} functions, but opening another one fails");
        assert!(
            p.server.nic.open_function().is_err(),
            "one function, but opening another one succeeds"
        );
        return;
    };
    let device = opened.query_device().expect("limits");
    assert_eq!(device.windows, p.server.nic.query_device().expect("limits").windows);
    // The same memory is registered in both functions; the new function's window has a key index
    // that the old function does not use.
    let there = End::new(&opened, &Shape::default());
    let mr = opened.reg_mr(&there.pd, p.server.mr.memory(), Access::LOCAL_ALL).expect("a region");
    let there = End { mr, ..there };
    let mine = End::new(&p.client.nic, &Shape::default());
    connect(bench, &mine.qp, &there.qp);
    let windows = opened.alloc_type1_mws(&there.pd, 300).expect("windows");
    let last = windows.last().expect("300");
    let bound = bind(&there, there.bind_of(last, last.key(), START, LEN));
    let write = |end: &End<B::Nic>| end.run(Op::WriteInline { to: bound, data: &[3; 8] }).status;
    assert_eq!(write(&mine), Status::Success);
    assert_eq!(p.server.get(START, 8), [3; 8]);
    p.server.put(START, &[0; 8]);
    closed(&p, bound);
    assert_eq!(p.server.get(START, 8), [0; 8]);
    // In the other direction: the old function's window, through the new function's queue pair. A
    // window of the new function with the same key index, if there is one, is unbound.
    let (_window, at) = bound_type_1(&p);
    opens(&p, at, LEN, 4);
    let status = mine.run(Op::WriteInline { to: at, data: &[5; 8] }).status;
    assert_eq!(status, Status::RemoteAccess);
    opens(&p, at, LEN, 6);
    // The function ends with its objects, and its slot can be reused.
    drop((windows, there, opened));
    p.server.nic.open_function().expect("another function");
}

fn type_2_is_bound_to_one_queue_pair<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (_window, at) = bound_type_2(&p);
    let (mine, theirs) = second_connection(bench, &p);
    let write = Op::WriteInline { to: at, data: &[9; 8] };
    mine.post_send(&[WorkRequest { id: 5, op: write, signaled: true }]).expect("posting");
    assert_eq!(p.client.next().status, Status::RemoteAccess);
    assert_eq!(theirs.state().expect("a state"), QpState::Error);
    assert_eq!(p.server.get(START, 8), [0; 8]);
    // The window's own connection is not affected.
    opens(&p, at, LEN, 1);
}

fn invalidate_foreign_keys<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (_window, at) = bound_type_2(&p);
    let (mine, theirs) = second_connection(bench, &p);
    let op = Op::LocalInvalidate { key: at.rkey };
    theirs.post_send(&[WorkRequest { id: 5, op, signaled: true }]).expect("posting");
    assert_eq!(p.server.next().status, Status::Bind);
    connect(bench, &mine, &theirs);
    theirs.post_recv(&crate::ReceiveRequest { id: 6, to: &[] }).expect("posting a receive");
    let op = Op::SendInvalidate { data: Data::Inline(&[]), key: at.rkey };
    mine.post_send(&[WorkRequest { id: 5, op, signaled: true }]).expect("posting");
    assert_eq!(p.client.next().status, Status::RemoteAccess);
    assert_eq!(p.server.next().status, Status::Flushed, "the receive");
    opens(&p, at, LEN, 1);
    // The key of a region is not the key of a window.
    let region = Op::LocalInvalidate { key: p.server.mr.key() };
    assert_eq!(p.server.run(region).status, Status::Bind);
}

fn rights<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let all = [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC];
    for granted in all {
        let window = p.server.nic.alloc_mw(&p.server.pd).expect("a window");
        let what = p.server.bind_of(&window, window.key(), START, LEN);
        let at = bind(&p.server, Bind { access: granted, ..what });
        for asked in all {
            let old = p.client.sge(0, 8);
            let list = [old];
            let op = match asked {
                Access::REMOTE_READ => Op::Read { from: at, to: &list },
                Access::REMOTE_WRITE => Op::Write { to: at, from: &list },
                _ => Op::FetchAdd { at, add: 1, old },
            };
            if granted == asked {
                p.client.ok(op);
            } else {
                p.refused(op, Status::RemoteAccess);
            }
        }
    }
}

fn need_a_writable_region<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let region = p.server.region(4096, Access::LOCAL_READ | Access::REMOTE_READ);
    let window = p.server.nic.alloc_mw(&p.server.pd).expect("a window");
    let of = |access| Bind {
        region: region.key(),
        addr: region.iova(),
        len: 64,
        access,
        ..p.server.bind_of(&window, window.key(), 0, 64)
    };
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        assert_eq!(p.server.run(Op::Bind(&of(access))).status, Status::Bind, "{access:?}");
        p.connect();
    }
    let at = bind(&p.server, of(Access::REMOTE_READ));
    p.client.ok(Op::Read { from: at, to: &[p.client.sge(0, 64)] });
}

fn stay_in_their_region_and_pd<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let window = p.server.nic.alloc_mw(&p.server.pd).expect("a window");
    let good = p.server.bind_of(&window, window.key(), START, LEN);
    let end = p.server.mr.iova() + p.server.mr.memory().len() as u64;
    let other = End::new(&p.server.nic, &Shape::default());
    let foreign_window = p.server.nic.alloc_mw(&other.pd).expect("a window");
    let bad = [
        ("beyond the end", Bind { addr: end - LEN as u64 + 1, ..good }),
        ("before the start", Bind { addr: p.server.mr.iova() - 1, ..good }),
        ("another PD's region", Bind { region: other.mr.key(), addr: other.mr.iova(), ..good }),
        ("another PD's window", Bind { key: foreign_window.key(), ..good }),
        ("an old tag", Bind { key: Key(good.key.0 ^ 1), ..good }),
        ("a region's key for the window's", Bind { key: p.server.mr.key(), ..good }),
        ("a window for the region", Bind { region: window.key(), ..good }),
    ];
    for (what, bad) in bad {
        assert_eq!(p.server.run(Op::Bind(&bad)).status, Status::Bind, "{what}");
        p.connect();
    }
    let at = bind(&p.server, good);
    opens(&p, at, LEN, 1);
}

fn key_is_not_a_local_key<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (_window, at) = bound_type_2(&p);
    let from = [crate::Sge { addr: at.addr, len: 8, lkey: at.rkey }];
    let c = p.server.run(Op::Write { to: p.client.at(0), from: &from });
    assert_eq!(c.status, Status::LocalProtection);
}

fn zero_based<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let window = p.server.nic.alloc_mw(&p.server.pd).expect("a window");
    let what = p.server.bind_of(&window, window.key(), START, LEN);
    let at = bind(&p.server, Bind { zero_based: true, ..what });
    assert_eq!(at.addr, 0);
    opens(&p, at, LEN, 1);
    p.client.ok(Op::WriteInline { to: Remote { addr: LEN as u64 - 4, ..at }, data: &[7; 4] });
    assert_eq!(p.server.get(START + LEN as usize - 4, 5), [7, 7, 7, 7, 0]);
    closed(&p, Remote { addr: LEN as u64 - 3, ..at });
    closed(&p, Remote { addr: what.addr, ..at });
}
