//! Functions that the NIC's owner opens: separate key namespaces, and limits per function.

use super::*;
use crate::error::{Error, Object};
use crate::limits::{FunctionLimits, Limits};
use crate::spec::RegionChange;
use verbs::cqe::Syndrome;
use verbs::wqe::{Remote, Umr};
use verbs::{Access, FunctionId, Key, MwKind, Pdn, QpState};

/// A function with a region over the same memory as all other functions, a type-1 window over the
/// whole region, and a QP that responds to a client.
struct Side {
    f: FunctionId,
    pd: Pdn,
    region: Key,
    window: Key,
    qp: TestQp,
    client: TestQp,
}

struct Sides {
    bed: Bed,
    memory: verbs::DmaMemory,
    scratch: Mr,
    sides: Vec<Side>,
}

/// Sets up the physical function and `more` opened functions. Function n has n + 1 windows; the
/// last one is bound to the n-th 64 bytes of the memory.
fn sides(more: usize) -> Sides {
    let mut bed = Bed::new();
    let memory = memory(4096);
    let client_pd = bed.pd(PF);
    let scratch = bed.mr(PF, client_pd, 64, ALL);
    let mut sides = Vec::new();
    for at in 0..=more {
        let f = if at == 0 { PF } else { bed.e.open_function(PF).unwrap() };
        let pd = bed.pd(f);
        let region = bed.e.reg_mr(f, pd, memory.clone(), memory.addr(), ALL).unwrap();
        let mut last = None;
        for _ in 0..=at {
            last = Some(bed.e.alloc_mw(f, pd, MwKind::Type1).unwrap());
        }
        let window = last.unwrap();
        let (shape, client_shape) = (bed.shape(f, pd), bed.shape(PF, client_pd));
        let (mut qp, client) = (bed.qp(&shape), bed.qp(&client_shape));
        bed.connect(&qp, &client);
        let tag = window.tag().wrapping_add(1);
        let start = memory.addr() + 64 * at as u64;
        let bind = Umr::bind_type1(window, tag, Access::REMOTE_ALL, region, start, 64);
        assert_eq!(bed.execute(&mut qp, |w| _ = w.umr(&bind)).error, None);
        let window = Key::new(window.index(), tag);
        sides.push(Side { f, pd, region, window, qp, client });
    }
    Sides { bed, memory, scratch, sides }
}

impl Sides {
    /// Returns whether the client of side `through` can READ at `at` with `key`.
    fn reads(&mut self, through: usize, key: Key, at: u64) -> bool {
        let Self { bed, memory, scratch, sides } = self;
        let side = &mut sides[through];
        let (from, to) = (Remote { addr: memory.addr() + at, rkey: key }, scratch.sge(0, 8));
        let cqe = bed.execute(&mut side.client, |w| _ = w.rdma_read(from, &[to]));
        let Some(error) = cqe.error else { return true };
        assert_eq!(error.syndrome, Syndrome::RemoteAccess as u8);
        for q in [&mut side.qp, &mut side.client] {
            assert_eq!(bed.state(q), QpState::Error);
            bed.e.modify_qp(q.function, q.qpn, verbs::QpChange::Reset).unwrap();
            q.producer = 0;
            while q.send_cq.reader.poll().is_some() {}
        }
        bed.connect(&side.qp, &side.client);
        false
    }
}

#[test]
fn window_is_accessible_only_through_qps_of_its_function() {
    let mut t = sides(2);
    t.memory.write(0, &[7; 192]);
    let windows: Vec<Key> = t.sides.iter().map(|side| side.window).collect();
    for through in 0..3 {
        for (of, key) in windows.iter().enumerate() {
            let at = 64 * of as u64;
            assert_eq!(t.reads(through, *key, at), through == of, "{of} over {through}");
        }
    }
}

#[test]
fn same_key_number_exists_in_each_function() {
    let mut t = sides(2);
    let (a, b) = (&t.sides[1], &t.sides[2]);
    assert_eq!(a.region, b.region, "separate tables assign the same keys");
    let (fa, fb, pd, key) = (a.f, b.f, b.pd, a.region);
    let info = |t: &Sides, f| t.bed.e.query_key(f, key.index()).unwrap();
    assert_ne!(info(&t, fa).pd, info(&t, fb).pd);
    // A verb accesses only the caller's namespace: the other function's key is unchanged.
    let before = info(&t, fa);
    t.bed.e.rereg_mr(fb, key, RegionChange::default()).unwrap_err();
    let spare = t.bed.e.alloc_mw(fb, pd, MwKind::Type2).unwrap();
    let absent = Error::Unknown(Object::Key(spare.index()));
    assert_eq!(t.bed.e.dealloc_mw(fa, spare), Err(absent));
    t.bed.e.dealloc_mw(fb, spare).unwrap();
    assert_eq!(info(&t, fa), before);
}

#[test]
fn opened_functions_are_limited_and_lose_their_keys_on_removal() {
    let limits = Limits { owner_functions: 3, windows: 2, ..Limits::default() };
    let mut bed = Bed::with(limits);
    let device = bed.e.query_device(PF).unwrap();
    assert_eq!((device.functions, device.windows), (3, 2));
    let (a, b) = (bed.e.open_function(PF).unwrap(), bed.e.open_function(PF).unwrap());
    let limited = |r: Result<(), Error>| assert!(matches!(r, Err(Error::Limit { .. })), "{r:?}");
    limited(bed.e.open_function(PF).map(drop));
    // Neither opened functions nor clients may open functions.
    let client = bed.e.add_function(FunctionLimits::default()).unwrap();
    for f in [a, client] {
        assert_eq!(bed.e.query_device(f).unwrap().functions, 1);
        limited(bed.e.open_function(f).map(drop));
    }
    // Each function has its own window limit; regions do not count.
    for f in [PF, a, b] {
        let pd = bed.pd(f);
        let mr = bed.mr(f, pd, 64, ALL);
        let windows = [(); 2].map(|()| bed.e.alloc_mw(f, pd, MwKind::Type1).unwrap());
        limited(bed.e.alloc_mw(f, pd, MwKind::Type2).map(drop));
        bed.e.dealloc_mw(f, windows[0]).unwrap();
        bed.e.alloc_mw(f, pd, MwKind::Type2).unwrap();
        bed.e.dereg_mr(f, mr.key).unwrap();
    }
    let old = bed.e.query_key(a, verbs::KeyIndex::new(4)).unwrap();
    bed.e.remove_function(a);
    assert!(bed.e.query_key(a, verbs::KeyIndex::new(4)).is_err());
    let again = bed.e.open_function(PF).unwrap();
    let nothing = bed.e.query_key(again, verbs::KeyIndex::new(4));
    assert!(matches!(nothing, Err(Error::Unknown(_))), "{old:?}, then {nothing:?}");
    limited(bed.e.open_function(PF).map(drop));
}

#[test]
fn windows_of_any_namespace_keep_a_qp_number_in_use() {
    let mut t = sides(1);
    let Side { f, pd, region, .. } = t.sides[1];
    let (qpn, start) = (t.sides[1].qp.qpn, t.memory.addr());
    let window = t.bed.e.alloc_mw(f, pd, MwKind::Type2).unwrap();
    let bind = Umr::bind(window, 9, qpn, Access::REMOTE_READ, region, start, 64);
    assert_eq!(t.bed.execute(&mut t.sides[1].qp, |w| _ = w.umr(&bind)).error, None);
    assert!(t.bed.e.core.keys.may_have_window(qpn));
    t.bed.e.remove_function(f);
    assert!(!t.bed.e.core.keys.may_have_window(qpn));
}
