//! Guarded windows: admission of QPs, and the lifetime of guards.

use super::windows::{Windows, windows_of};
use super::*;
use crate::error::{Error, Object};
use crate::limits::{FunctionLimits, Limits};
use crate::spec::GuardSpec;
use verbs::cqe::Syndrome;
use verbs::direct::KeyKind;
use verbs::wqe::umr::Umr;
use verbs::wqe::{Remote, Sge};
use verbs::{Access, FunctionId, Key, MwKind, QpChange};

/// Mask and value of the guard.
const MASK: u64 = 0xffff;
const VALUE: u64 = 0x4100;

/// A bound window over the upper half of the region, guarded by the second word of `words`, which
/// is in a separate PD. The responding QP has tag 7.
struct Guarded {
    t: Windows,
    words: Mr,
}

fn spec(words: &Mr) -> GuardSpec {
    GuardSpec { region: words.key, addr: words.mem.addr() + 8, value: VALUE, mask: MASK }
}

fn guarded() -> Guarded {
    let mut t = windows_of(MwKind::Type1, false);
    let pd = t.bed.pd(PF);
    let words = t.bed.mr(PF, pd, 64, Access::LOCAL_ALL);
    t.mw = t.bed.e.alloc_guarded_mw(PF, t.pd, &spec(&words)).unwrap();
    let (tag, qpn) = (t.mw.tag().wrapping_add(1), t.a.qpn);
    let umr = Umr::bind_type1(t.mw, tag, Access::REMOTE_ALL, t.mr.key, t.start(), 4096);
    t.umr(&umr);
    t.bed.e.modify_qp(PF, qpn, QpChange::Tag { tag: 7 }).unwrap();
    Guarded { t, words }
}

impl Guarded {
    fn says(&self, word: u64) {
        self.words.mem.store_be64(8, word);
    }

    /// Returns whether the peer can READ through the window now.
    fn opens(&mut self) -> bool {
        let (key, start) = (self.t.key(), self.t.start());
        self.t.reads(key, start)
    }
}

#[test]
fn guarded_window_admits_while_its_word_matches() {
    let mut g = guarded();
    assert_eq!(g.t.bed.e.query_key(PF, g.t.mw.index()).unwrap().kind, KeyKind::Mw(MwKind::Type1));
    assert!(!g.opens(), "the word is 0");
    for (word, opens) in [
        (VALUE | 7, true),
        (0xabcd_ef01_2345_0000 | VALUE | 7, true), // beyond the mask
        (VALUE | 6, false),
        (VALUE, false),
        (7, false),
        (VALUE | 0x200 | 7, false),
        (VALUE | 7, true),
    ] {
        g.says(word);
        assert_eq!(g.opens(), opens, "{word:#x}");
    }
    // The tag belongs to the QP and survives the resets in this test. A new tag takes effect at
    // once.
    g.t.bed.e.modify_qp(PF, g.t.a.qpn, QpChange::Tag { tag: 8 }).unwrap();
    assert!(!g.opens());
    g.says(VALUE | 8);
    assert!(g.opens());
    // The guard word is checked for every kind of access.
    let (at, to) = (Remote { addr: g.t.start(), rkey: g.t.key() }, g.t.scratch.sge(0, 8));
    type Fill = fn(&mut verbs::wqe::Builder, Remote, Sge);
    let all: [Fill; 3] = [
        |w, at, sge| _ = w.rdma_read(at, &[sge]),
        |w, at, sge| _ = w.rdma_write(at, &[sge]),
        |w, at, sge| _ = w.fetch_add(at, 1, sge),
    ];
    for fill in all {
        g.says(VALUE | 8);
        let cqe = g.t.bed.execute(&mut g.t.peer, |w| fill(w, at, to));
        assert_eq!(cqe.error, None);
        g.says(VALUE | 9);
        let cqe = g.t.bed.execute(&mut g.t.peer, |w| fill(w, at, to));
        assert_error(&cqe, Syndrome::RemoteAccess);
        assert_eq!(cqe.error.unwrap().vendor, 0, "the peer gets no reason");
        g.t.recover();
    }
}

#[test]
fn guard_survives_a_rebind() {
    let mut g = guarded();
    g.says(VALUE | 7);
    let old = g.t.key();
    let tag = old.tag().wrapping_add(1);
    let umr = Umr::bind_type1(old, tag, Access::REMOTE_ALL, g.t.mr.key, g.t.start(), 4096);
    g.t.umr(&umr);
    assert!(g.opens());
    let start = g.t.start();
    assert!(!g.t.reads(old, start), "the guard admits, but the key is invalid");
    g.says(VALUE | 6);
    assert!(!g.opens());
}

/// OneSidedMW §2.3, for a guarded window: all tags are tried, including the right one.
#[test]
fn guessing_all_tags_never_opens_a_guarded_window() {
    let mut g = guarded();
    let (index, start) = (g.t.mw.index(), g.t.start());
    for (word, opened) in [(VALUE | 6, 0), (VALUE | 7, 1)] {
        g.says(word);
        let opens = |tag: &u8| g.t.reads(Key::new(index, *tag), start);
        assert_eq!((0..=255).filter(opens).count(), opened);
    }
}

#[test]
fn long_read_fails_when_the_guard_word_changes() {
    let limits = Limits { slice_bytes: 512, shared_slice_bytes: 512, ..Limits::default() };
    let mut bed = Bed::with(limits);
    let (mut a, mut peer) = bed.pair();
    let (mr, scratch) = (bed.mr(PF, a.pd, 8192, ALL), bed.mr(PF, peer.pd, 8192, ALL));
    let words_pd = bed.pd(PF);
    let words = bed.mr(PF, words_pd, 64, Access::LOCAL_ALL);
    let mw = bed.e.alloc_guarded_mw(PF, a.pd, &spec(&words)).unwrap();
    let umr = Umr::bind_type1(mw, 9, Access::REMOTE_ALL, mr.key, mr.mem.addr(), 8192);
    assert_eq!(bed.execute(&mut a, |w| _ = w.umr(&umr)).error, None);
    bed.e.modify_qp(PF, a.qpn, QpChange::Tag { tag: 7 }).unwrap();
    words.mem.store_be64(8, VALUE | 7);
    mr.mem.write(0, &[1; 8192]);
    let at = Remote { addr: mr.mem.addr(), rkey: Key::new(mw.index(), 9) };
    bed.post(&mut peer, |w| {
        w.rdma_read(at, &[scratch.sge(0, 8192)]);
        w.signaled();
    });
    while scratch.bytes(0, 1) == [0] {
        assert_ne!(bed.e.poll(1, 1), 0, "the READ starts");
    }
    assert_eq!(scratch.bytes(8191, 1), [0], "the READ is not complete");
    words.mem.store_be64(8, VALUE | 6);
    bed.run();
    assert_error(&peer.send_cq.reader.poll().unwrap(), Syndrome::RemoteAccess);
    assert_eq!(scratch.bytes(8191, 1), [0]);
}

#[test]
fn region_outlives_its_guard_words() {
    let mut g = guarded();
    let e = &mut g.t.bed.e;
    let in_use = |e: Result<(), Error>| {
        assert!(matches!(e, Err(Error::InUse { users: 1, .. })), "{e:?}");
    };
    assert_eq!(e.query_key(PF, g.words.key.index()).unwrap().windows, 1);
    in_use(e.dereg_mr(PF, g.words.key));
    in_use(e.rereg_mr(PF, g.words.key, crate::spec::RegionChange::default()).map(drop));
    // An unbound window keeps its guard.
    g.t.umr(&Umr::unbind(g.t.key(), false));
    in_use(g.t.bed.e.dereg_mr(PF, g.words.key));
    let (mw, words) = (g.t.mw, g.words.key);
    g.t.bed.e.dealloc_mw(PF, mw).unwrap();
    g.t.bed.e.dereg_mr(PF, words).unwrap();
    // A later object with the same key index has no guard.
    let limits = Limits { keys: 2, ..Limits::default() };
    let mut bed = Bed::with(limits);
    let pd = bed.pd(PF);
    let words = bed.mr(PF, pd, 64, ALL);
    for _ in 0..3 {
        let guarded = bed.e.alloc_guarded_mw(PF, pd, &spec(&words)).unwrap();
        bed.e.dealloc_mw(PF, guarded).unwrap();
        let plain = bed.e.alloc_mw(PF, pd, MwKind::Type1).unwrap();
        assert_eq!(plain.index(), guarded.index());
        assert_eq!(bed.e.query_key(PF, words.key.index()).unwrap().windows, 0);
        bed.e.dealloc_mw(PF, plain).unwrap();
    }
    bed.e.dereg_mr(PF, words.key).unwrap();
}

#[test]
fn guards_end_with_their_function() {
    let mut bed = Bed::new();
    let f = bed.e.add_function(FunctionLimits::NONE).unwrap();
    let (pd, other) = (bed.pd(f), bed.pd(f));
    let words = bed.mr(f, other, 64, ALL);
    for _ in 0..3 {
        bed.e.alloc_guarded_mw(f, pd, &spec(&words)).unwrap();
    }
    bed.e.remove_function(f);
    assert!(matches!(bed.e.query_key(PF, words.key.index()), Err(Error::Unknown(_))));
}

#[test]
fn guard_word_must_lie_in_a_region_of_its_function() {
    let mut bed = Bed::new();
    let f = bed.e.add_function(FunctionLimits::NONE).unwrap();
    let (pd, foreign_pd) = (bed.pd(PF), bed.pd(f));
    let (words, foreign) = (bed.mr(PF, pd, 64, ALL), bed.mr(f, foreign_pd, 64, ALL));
    let window = bed.e.alloc_mw(PF, pd, MwKind::Type1).unwrap();
    let good = spec(&words);
    let stale = Key::new(words.key.index(), words.key.tag().wrapping_add(1));
    let unknown = |key: Key| Error::Unknown(Object::Key(key.index()));
    let object = Object::Key(foreign.key.index());
    for (region, why) in [
        (foreign.key, Error::Foreign { object, caller: PF }),
        (stale, unknown(stale)),
        (window, unknown(window)),
        (Key(0), unknown(Key(0))),
    ] {
        let bad = GuardSpec { region, ..good };
        assert_eq!(bed.e.alloc_guarded_mw(PF, pd, &bad), Err(why));
    }
    let start = words.mem.addr();
    for addr in [start - 8, start + 57, start + 60, start + 64, start + 4, u64::MAX - 7, 0] {
        let bad = GuardSpec { addr, ..good };
        let refused = bed.e.alloc_guarded_mw(PF, pd, &bad);
        assert!(matches!(refused, Err(Error::Argument { .. })), "{addr:#x}: {refused:?}");
    }
    assert_eq!(bed.e.query_key(PF, words.key.index()).unwrap().windows, 0);
    assert!(matches!(
        bed.e.alloc_guarded_mw(FunctionId::PHYSICAL, foreign_pd, &good),
        Err(Error::Foreign { .. })
    ));
}
