//! Windows: bind, unbind, invalidate, and the conditions under which each is rejected.

use super::*;
use crate::protection::Refusal;
use verbs::cqe::Syndrome;
use verbs::direct::{KeyInfo, KeyKind};
use verbs::wqe::umr::{self, Umr, UmrFlags};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{Access, Key, MwKind, Pdn, QpState, Qpn};

/// A region with a window, and two QPs of one PD. `a` may bind windows to other QPs if
/// `privileged`.
pub(super) struct Windows {
    pub bed: Bed,
    pub a: TestQp,
    pub pd: Pdn,
    pub mr: Mr,
    pub mw: Key,
    /// The peer of `a`: its requests are remote access to the PD of `a`.
    pub peer: TestQp,
    pub scratch: Mr,
}

fn windows(privileged: bool) -> Windows {
    windows_of(MwKind::Type2, privileged)
}

pub(super) fn windows_of(kind: MwKind, privileged: bool) -> Windows {
    let mut bed = Bed::new();
    let (pd, peer_pd) = (bed.pd(PF), bed.pd(PF));
    let mut shape = bed.shape(PF, pd);
    shape.privileged = privileged;
    let a = bed.qp(&shape);
    let peer_shape = bed.shape(PF, peer_pd);
    let peer = bed.qp(&peer_shape);
    bed.connect(&a, &peer);
    let mr = bed.mr(PF, pd, 8192, Access::LOCAL_WRITE);
    let mw = bed.e.alloc_mw(PF, pd, kind).unwrap();
    let scratch = bed.mr(PF, peer_pd, 8192, ALL);
    Windows { bed, a, pd, mr, mw, peer, scratch }
}

impl Windows {
    pub fn start(&self) -> u64 {
        self.mr.mem.addr() + 4096
    }

    /// Returns a UMR that binds the upper half to `qpn`.
    fn bind_umr(&self, key: Key, qpn: Qpn) -> Umr {
        let tag = key.tag().wrapping_add(1);
        Umr::bind(key, tag, qpn, Access::REMOTE_ALL, self.mr.key, self.start(), 4096)
    }

    fn info(&self) -> KeyInfo {
        self.bed.e.query_key(PF, self.mw.index()).unwrap()
    }

    pub fn key(&self) -> Key {
        Key::new(self.mw.index(), self.info().tag)
    }

    pub fn umr(&mut self, umr: &Umr) {
        let cqe = self.bed.execute(&mut self.a, |w| _ = w.umr(umr));
        assert_eq!(cqe.error, None, "{umr:?}");
    }

    /// Executes a WQE that must fail with a bind error for this reason, and change nothing.
    #[track_caller]
    fn refused(&mut self, why: Refusal, fill: impl FnOnce(&mut Builder)) {
        let before = self.info();
        let cqe = self.bed.execute(&mut self.a, fill);
        assert_error(&cqe, Syndrome::MwBind);
        assert_eq!(cqe.error.unwrap().vendor, why as u8);
        assert_eq!(self.info(), before);
        assert_eq!(self.bed.state(&self.a), QpState::Error);
        self.recover();
    }

    pub fn recover(&mut self) {
        for q in [&mut self.a, &mut self.peer] {
            self.bed.e.modify_qp(PF, q.qpn, verbs::QpChange::Reset).unwrap();
            q.producer = 0;
            while q.send_cq.reader.poll().is_some() {}
        }
        self.bed.connect(&self.a, &self.peer);
    }

    /// Returns whether the peer can READ one byte through `key` at `addr`.
    pub fn reads(&mut self, key: Key, addr: u64) -> bool {
        let to = self.scratch.sge(0, 1);
        let from = Remote { addr, rkey: key };
        let cqe = self.bed.execute(&mut self.peer, |w| _ = w.rdma_read(from, &[to]));
        if let Some(e) = cqe.error {
            assert_eq!(e.syndrome, Syndrome::RemoteAccess as u8);
            assert_eq!(e.vendor, 0, "the peer gets no reason");
            assert_eq!(self.bed.state(&self.a), QpState::Error);
            assert_eq!(self.bed.state(&self.peer), QpState::Error);
            self.recover();
        }
        cqe.error.is_none()
    }
}

#[test]
fn bound_window_gives_its_range_to_its_qp_only() {
    let mut t = windows(false);
    let info = t.info();
    assert_eq!((info.kind, info.bound, info.qpn), (KeyKind::Mw(MwKind::Type2), false, Qpn::NONE));
    assert!(!t.reads(t.mw, t.start()), "a free window admits no QP");
    let bind = t.bind_umr(t.mw, t.a.qpn);
    t.umr(&bind);
    let info = t.info();
    assert_eq!((info.bound, info.qpn, info.tag), (true, t.a.qpn, bind.tag));
    assert_eq!((info.start, info.len, info.access), (t.start(), 4096, Access::REMOTE_ALL));
    assert_eq!(t.bed.e.query_key(PF, t.mr.key.index()).unwrap().windows, 1);
    let key = t.key();
    for (addr, allowed) in [(0, true), (4095, true), (4096, false), (u64::MAX, false)] {
        assert_eq!(t.reads(key, t.start().wrapping_add(addr)), allowed, "at {addr:#x}");
    }
    assert!(!t.reads(t.mw, t.start()), "the tag from before the bind is invalid");
    assert_eq!(t.bed.e.stats().binds, 1);
}

#[test]
fn window_grants_only_its_rights() {
    let mut t = windows(false);
    let mut bind = t.bind_umr(t.mw, t.a.qpn);
    bind.access = Access::REMOTE_WRITE;
    t.umr(&bind);
    let (key, start) = (t.key(), t.start());
    assert!(!t.reads(key, start));
    let at = Remote { addr: start, rkey: key };
    let from = t.scratch.sge(0, 8);
    let cqe = t.bed.execute(&mut t.peer, |w| _ = w.rdma_write(at, &[from]));
    assert_eq!(cqe.error, None);
    let cqe = t.bed.execute(&mut t.peer, |w| _ = w.fetch_add(at, 1, from));
    assert_error(&cqe, Syndrome::RemoteAccess);
    t.recover();
    // A window cannot grant local rights, and its key cannot be used as an lkey.
    let mut bind = t.bind_umr(t.key(), t.a.qpn);
    bind.flags = UmrFlags::INLINE;
    bind.access = Access(0xff);
    t.umr(&bind);
    assert_eq!(t.info().access, Access::REMOTE_ALL);
    let as_local = Sge { addr: start, len: 8, lkey: t.key() };
    let to = t.scratch.remote(0);
    let cqe = t.bed.execute(&mut t.a, |w| _ = w.rdma_write(to, &[as_local]));
    assert_error(&cqe, Syndrome::LocalProtection);
}

#[test]
fn qp_may_use_only_windows_bound_to_its_number() {
    let mut t = windows(true);
    let shape = t.bed.shape(PF, t.pd);
    let peer_shape = t.bed.shape(PF, t.peer.pd);
    let (b, mut b_peer) = (t.bed.qp(&shape), t.bed.qp(&peer_shape));
    t.bed.connect(&b, &b_peer);
    let bind = t.bind_umr(t.mw, b.qpn);
    t.umr(&bind);
    let (key, start) = (t.key(), t.start());
    assert!(!t.reads(key, start), "a key of b's window through a");
    let at = Remote { addr: start, rkey: key };
    let local = t.scratch.sge(0, 8);
    t.mr.mem.store_be64(4096, 7);
    t.scratch.mem.store_be64(0, 9);
    // The right key with the right tag, in the same PD: every operation through `a`, then through
    // `b`.
    let each: [fn(&mut Builder, Remote, Sge); 4] = [
        |w, at, local| _ = w.rdma_read(at, &[local]),
        |w, at, local| _ = w.rdma_write(at, &[local]),
        |w, at, local| _ = w.fetch_add(at, 1, local),
        |w, at, local| _ = w.compare_swap(at, 7, 8, local),
    ];
    for fill in each {
        let cqe = t.bed.execute(&mut t.peer, |w| fill(w, at, local));
        assert_error(&cqe, Syndrome::RemoteAccess);
        let words = (t.mr.mem.load_be64(4096), t.scratch.mem.load_be64(0));
        assert_eq!(words, (7, 9), "a rejected operation moved data");
        t.recover();
    }
    for fill in each {
        assert_eq!(t.bed.execute(&mut b_peer, |w| fill(w, at, local)).error, None);
    }
}

#[test]
fn unbinding_invalidates_the_key() {
    let mut t = windows(true);
    for check_qpn in [true, false] {
        let bind = t.bind_umr(t.key(), t.a.qpn);
        t.umr(&bind);
        let (key, start) = (t.key(), t.start());
        assert!(t.reads(key, start));
        t.umr(&Umr::unbind(key, check_qpn));
        let info = t.info();
        assert_eq!((info.bound, info.qpn, info.len), (false, Qpn::NONE, 0));
        assert_eq!(t.bed.e.query_key(PF, t.mr.key.index()).unwrap().windows, 0);
        assert!(!t.reads(key, start));
    }
    assert_eq!(t.bed.e.stats().unbinds, 2);
}

#[test]
fn local_invalidate_frees_a_window_of_its_qp() {
    let mut t = windows(true);
    let (mw, mr) = (t.mw, t.mr.key);
    t.refused(Refusal::Free, |w| _ = w.local_invalidate(mw));
    t.refused(Refusal::NoKey, |w| _ = w.local_invalidate(mr));
    let bind = t.bind_umr(t.mw, Qpn::new(0x77_7777));
    t.umr(&bind);
    let key = t.key();
    t.refused(Refusal::Qpn, |w| _ = w.local_invalidate(key));
    t.umr(&Umr::unbind(key, false));
    let bind = t.bind_umr(t.key(), t.a.qpn);
    t.umr(&bind);
    let (key, start) = (t.key(), t.start());
    t.refused(Refusal::Tag, |w| _ = w.local_invalidate(mw));
    let cqe = t.bed.execute(&mut t.a, |w| _ = w.local_invalidate(key));
    assert_eq!(cqe.error, None);
    assert!(!t.info().bound);
    assert!(!t.reads(key, start));
}

#[test]
fn send_with_invalidate_frees_the_receivers_window() {
    let mut t = windows(false);
    let bind = t.bind_umr(t.mw, t.a.qpn);
    t.umr(&bind);
    let key = t.key();
    let start = t.start();
    let send_invalidate = |t: &mut Windows, key: Key| {
        let at = t.bed.write_wqe(&mut t.peer, |w| _ = w.send(&[]).signaled());
        t.peer.ring.write(at + 3, &[verbs::wqe::opcode::SEND_INVAL]);
        t.peer.ring.write(at + 12, &key.0.to_be_bytes());
        t.bed.e.doorbell(t.peer.qpn, t.peer.producer);
        t.bed.run();
        t.peer.send_cq.reader.poll().unwrap()
    };
    t.bed.post_recv(&mut t.a, &[]);
    assert_eq!(send_invalidate(&mut t, key).error, None);
    let cqe = t.a.recv_cq.reader.poll().unwrap();
    assert_eq!((cqe.opcode, cqe.imm), (verbs::cqe::opcode::RESP_SEND_INV, key.0));
    assert!(!t.info().bound);
    assert!(!t.reads(key, start));
    // A key that the receiver may not invalidate ends the connection and consumes no receive.
    let mut t = windows(true);
    let bind = t.bind_umr(t.mw, Qpn::new(0x77_7777));
    t.umr(&bind);
    let key = t.key();
    t.bed.post_recv(&mut t.a, &[]);
    assert_error(&send_invalidate(&mut t, key), Syndrome::RemoteAccess);
    assert!(t.info().bound);
    assert_error(&t.a.recv_cq.reader.poll().unwrap(), Syndrome::Flushed);
}

#[test]
fn invalid_bind_changes_nothing() {
    let mut t = windows(false);
    let good = t.bind_umr(t.mw, t.a.qpn);
    let read_only = t.bed.mr(PF, t.pd, 8192, Access::NONE);
    let pd = t.bed.pd(PF);
    let elsewhere = t.bed.mr(PF, pd, 8192, ALL);
    let mr_end = t.mr.mem.addr() + 8192;
    let at = |start: u64, len: u32, mut u: Umr| {
        (u.start, u.len) = (start, len as u64);
        (u.klm.addr, u.klm.len) = (start, len);
        u
    };
    let of = |mr: &Mr, mut u: Umr| {
        u = at(mr.mem.addr(), 64, u);
        u.klm.lkey = mr.key;
        u
    };
    let cases = [
        (Refusal::Tag, Umr { key: Key(good.key.0 ^ 1), ..good }),
        (Refusal::NoKey, Umr { key: Key(0xff_ff00), ..good }),
        (Refusal::NoKey, Umr { key: Key(0), ..good }),
        (Refusal::NoKey, Umr { key: t.mr.key, ..good }),
        (Refusal::Form, Umr { mask: good.mask & !umr::MASK_FREE, ..good }),
        (Refusal::Form, Umr { start: good.start + 8, ..good }),
        (Refusal::Form, Umr { len: good.len - 1, ..good }),
        (Refusal::Form, at(t.start(), 0, good)),
        (Refusal::Region, at(t.start() + 1, 4096, good)),
        (Refusal::Region, at(t.mr.mem.addr() - 8, 64, good)),
        (Refusal::Region, at(mr_end, 1, good)),
        (Refusal::Region, at(u64::MAX - 63, 64, good)),
        (Refusal::Region, of(&read_only, good)),
        (Refusal::Region, of(&elsewhere, good)),
        (Refusal::Region, Umr { klm: umr::Klm { lkey: t.mw, ..good.klm }, ..good }),
        (Refusal::Region, Umr { klm: umr::Klm { lkey: Key(t.mr.key.0 ^ 1), ..good.klm }, ..good }),
        (Refusal::Privilege, Umr { qpn: Qpn::new(0x1234), ..good }),
        (Refusal::Privilege, Umr { mask: good.mask & !umr::MASK_QPN, ..good }),
    ];
    for (why, umr) in cases {
        t.refused(why, |w| _ = w.umr(&umr));
    }
    t.umr(&Umr { access: Access::REMOTE_READ, ..of(&read_only, good) });
    t.umr(&Umr::unbind(t.key(), true));
    t.umr(&Umr { key: t.key(), ..good });
}

#[test]
fn qp_checks_and_privilege_protect_a_bound_window() {
    // Unprivileged: the QP may not rebind another QP's window, free it, or omit the check of the
    // QP.
    let mut t = windows(false);
    let shape = crate::engine::tests::bed::Shape { privileged: true, ..t.bed.shape(PF, t.pd) };
    let (mut boss, boss_peer) = (t.bed.qp(&shape), t.bed.qp(&shape));
    t.bed.connect(&boss, &boss_peer);
    let bind = t.bind_umr(t.mw, Qpn::new(0x1234));
    assert_eq!(t.bed.execute(&mut boss, |w| _ = w.umr(&bind)).error, None);
    let (key, a) = (t.key(), t.a.qpn);
    let again = t.bind_umr(key, a);
    t.refused(Refusal::Bound, |w| _ = w.umr(&again));
    let rebind = Umr { flags: UmrFlags::INLINE, ..again };
    t.refused(Refusal::Privilege, |w| _ = w.umr(&rebind));
    t.refused(Refusal::Qpn, |w| _ = w.umr(&Umr::unbind(key, true)));
    t.refused(Refusal::Privilege, |w| _ = w.umr(&Umr::unbind(key, false)));
    // Privileged: the QP check is enforced if requested, and may be omitted.
    let cqe = t.bed.execute(&mut boss, |w| _ = w.umr(&Umr::unbind(key, false)));
    assert_eq!(cqe.error, None);
    let cqe = t.bed.execute(&mut boss, |w| _ = w.umr(&Umr::unbind(key, true)));
    assert_error(&cqe, Syndrome::MwBind);
    assert_eq!(cqe.error.unwrap().vendor, Refusal::Free as u8);
    // A QP may rebind its own window directly, and free it.
    let bind = t.bind_umr(t.key(), a);
    t.umr(&bind);
    let rebind = Umr { flags: UmrFlags::INLINE, ..t.bind_umr(t.key(), a) };
    t.umr(&rebind);
    assert_eq!(t.bed.e.query_key(PF, t.mr.key.index()).unwrap().windows, 1);
    let key = t.key();
    t.refused(Refusal::Privilege, |w| _ = w.umr(&Umr::unbind(key, false)));
    t.umr(&Umr::unbind(key, true));
}

#[test]
fn window_of_another_pd_is_inaccessible() {
    let mut t = windows(true);
    let pd = t.bed.pd(PF);
    let other = t.bed.e.alloc_mw(PF, pd, MwKind::Type2).unwrap();
    let bind = t.bind_umr(other, t.a.qpn);
    t.refused(Refusal::Pd, |w| _ = w.umr(&bind));
}

#[test]
fn only_masked_fields_change() {
    let mut t = windows(false);
    let bind = t.bind_umr(t.mw, t.a.qpn);
    t.umr(&bind);
    t.umr(&Umr::unbind(t.key(), true));
    assert_eq!(t.info().tag, bind.tag, "an unbind does not change the tag");
    let keep = Umr { mask: bind.mask & !(umr::MASK_MKEY | umr::MASK_ACCESS), ..bind };
    let keep = Umr { key: t.key(), tag: 0x99, access: Access::NONE, ..keep };
    t.umr(&keep);
    assert_eq!((t.info().tag, t.info().access), (bind.tag, Access::REMOTE_ALL));
    let unbind = Umr::unbind(t.key(), true);
    t.umr(&Umr { mask: unbind.mask | umr::MASK_MKEY, tag: 0x55, ..unbind });
    assert_eq!(t.info().tag, 0x55);
}

// --- type 1 ------------------------------------------------------------------------------------

impl Windows {
    /// Returns a UMR that binds the upper half as a type-1 window, with the next tag.
    fn open_umr(&self, len: u32) -> Umr {
        let (key, start) = (self.key(), self.start());
        let tag = key.tag().wrapping_add(1);
        Umr::bind_type1(key, tag, Access::REMOTE_ALL, self.mr.key, start, len)
    }

    /// Creates another QP of the PD, and its peer.
    fn neighbours(&mut self) -> (TestQp, TestQp) {
        let shape = self.bed.shape(PF, self.pd);
        let peer_shape = self.bed.shape(PF, self.peer.pd);
        let (b, b_peer) = (self.bed.qp(&shape), self.bed.qp(&peer_shape));
        self.bed.connect(&b, &b_peer);
        (b, b_peer)
    }
}

#[test]
fn type_1_window_is_accessible_to_every_qp_of_its_pd() {
    let mut t = windows_of(MwKind::Type1, false);
    let info = t.info();
    assert_eq!((info.kind, info.bound, info.qpn), (KeyKind::Mw(MwKind::Type1), false, Qpn::NONE));
    assert!(!t.reads(t.mw, t.start()), "a free window admits no QP");
    let bind = t.open_umr(4096);
    t.umr(&bind);
    let info = t.info();
    assert_eq!((info.bound, info.qpn, info.tag, info.len), (true, Qpn::NONE, bind.tag, 4096));
    let (key, start) = (t.key(), t.start());
    assert!(t.reads(key, start));
    assert!(t.reads(key, start + 4095));
    assert!(!t.reads(key, start + 4096));
    let (mut b, mut b_peer) = t.neighbours();
    let (from, to) = (Remote { addr: start, rkey: key }, t.scratch.sge(0, 8));
    let cqe = t.bed.execute(&mut b_peer, |w| _ = w.rdma_read(from, &[to]));
    assert_eq!(cqe.error, None, "through another QP of the PD");
    // Any QP of the PD rebinds the bound window. The old key is invalid, and the region counts the
    // window once.
    let rebind = t.open_umr(64);
    assert_eq!(t.bed.execute(&mut b, |w| _ = w.umr(&rebind)).error, None);
    assert_eq!(t.bed.e.query_key(PF, t.mr.key.index()).unwrap().windows, 1);
    assert!(!t.reads(key, start));
    let key = t.key();
    assert!(t.reads(key, start + 63));
    assert!(!t.reads(key, start + 64));
    // The key is rejected through a QP of another PD.
    let elsewhere = t.bed.pair();
    let (to, mut outsider) = (t.bed.mr(PF, elsewhere.0.pd, 64, ALL), elsewhere.0);
    let from = Remote { addr: start, rkey: key };
    let cqe = t.bed.execute(&mut outsider, |w| _ = w.rdma_read(from, &[to.sge(0, 8)]));
    assert_error(&cqe, Syndrome::RemoteAccess);
}

#[test]
fn type_1_window_is_unbound_by_zero_length_or_the_free_bit() {
    let mut t = windows_of(MwKind::Type1, false);
    for free_bit in [false, true] {
        let bind = t.open_umr(4096);
        t.umr(&bind);
        let (key, start) = (t.key(), t.start());
        assert!(t.reads(key, start));
        let empty = if free_bit { Umr::unbind(key, false) } else { t.open_umr(0) };
        t.umr(&empty);
        let info = t.info();
        assert_eq!((info.bound, info.len), (false, 0));
        assert_eq!(info.tag, if free_bit { key.tag() } else { key.tag().wrapping_add(1) });
        assert_eq!(t.bed.e.query_key(PF, t.mr.key.index()).unwrap().windows, 0);
        for key in [key, t.key()] {
            assert!(!t.reads(key, start));
        }
    }
    assert_eq!(t.bed.e.stats().unbinds, 2);
    t.bed.e.dereg_mr(PF, t.mr.key).unwrap();
}

#[test]
fn type_1_window_rejects_qp_checks_and_invalidation() {
    let mut t = windows_of(MwKind::Type1, false);
    let bind = t.open_umr(4096);
    t.umr(&bind);
    let key = t.key();
    // A type-1 window belongs to no QP: UMRs that check the QP fail, and no QP can invalidate it.
    t.refused(Refusal::Type, |w| _ = w.umr(&Umr::unbind(key, true)));
    t.refused(Refusal::Type, |w| _ = w.local_invalidate(key));
    let own = Umr { qpn: t.a.qpn, ..t.open_umr(64) };
    t.refused(Refusal::Type, |w| _ = w.umr(&own));
    let checked = Umr { flags: UmrFlags::INLINE | UmrFlags::CHECK_FREE, ..t.open_umr(64) };
    t.refused(Refusal::Bound, |w| _ = w.umr(&checked));
    let stale = Umr { key: t.mw, ..t.open_umr(64) };
    t.refused(Refusal::Tag, |w| _ = w.umr(&stale));
    let one_sided = Umr { len: 0, ..t.open_umr(64) };
    t.refused(Refusal::Form, |w| _ = w.umr(&one_sided));
    let other = Umr { klm: umr::Klm { lkey: t.scratch.key, ..bind.klm }, ..t.open_umr(4096) };
    t.refused(Refusal::Region, |w| _ = w.umr(&other));
    let pd = t.bed.pd(PF);
    let foreign = t.bed.e.alloc_mw(PF, pd, MwKind::Type1).unwrap();
    let other = Umr { key: foreign, ..t.open_umr(4096) };
    t.refused(Refusal::Pd, |w| _ = w.umr(&other));
    let start = t.start();
    assert!(t.reads(key, start), "the rejected operations changed nothing");
    t.bed.e.dealloc_mw(PF, key).unwrap();
    assert!(!t.reads(key, start), "a bound window can be destroyed");
    // A type-2 window is not unbound by a length of 0.
    let mut t = windows(true);
    let bind = t.bind_umr(t.mw, t.a.qpn);
    t.umr(&bind);
    let empty = t.open_umr(0);
    t.refused(Refusal::Form, |w| _ = w.umr(&empty));
}

/// OneSidedMW §2.3: a QP in the victim's PD tries all tags of the victim's key.
#[test]
fn guessed_tag_opens_a_type_1_window_but_no_type_2_window() {
    for (kind, opened) in [(MwKind::Type1, 1), (MwKind::Type2, 0)] {
        let mut t = windows_of(kind, true);
        let (victim, _victim_peer) = t.neighbours();
        let bind = match kind {
            MwKind::Type1 => t.open_umr(4096),
            MwKind::Type2 => t.bind_umr(t.mw, victim.qpn),
        };
        t.umr(&bind);
        let (index, start) = (t.mw.index(), t.start());
        let guessed: Vec<u8> =
            (0..=255).filter(|&tag| t.reads(Key::new(index, tag), start)).collect();
        assert_eq!(guessed.len(), opened, "{kind:?}: {guessed:?}");
        assert!(guessed.iter().all(|&tag| tag == bind.tag));
    }
}
