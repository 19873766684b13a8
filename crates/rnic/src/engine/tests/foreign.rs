//! An attacker with its own function posts WQEs that name objects of a victim's function. Each must
//! end with an error of the attacker's QP and change nothing else.

use super::*;
use crate::limits::FunctionLimits;
use crate::protection::Refusal;
use crate::spec::QpDescription;
use verbs::cqe::{Cqe, Syndrome};
use verbs::direct::KeyInfo;
use verbs::wqe::umr::{Klm, Umr, UmrFlags};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{Access, Cqn, FunctionId, Key, MwKind, Pdn, QpState, Qpn};

/// An attacker with two connected QPs, and a victim with one object of each kind.
struct Scene {
    bed: Bed,
    attacker: TestQp,
    other_end: TestQp,
    own: Mr,
    own_window: Key,
    victim: FunctionId,
    pd: Pdn,
    /// A connected QP whose send and receive queues are managed.
    qp: TestQp,
    peer: TestQp,
    mr: Mr,
    free_window: Key,
    bound_window: Key,
    open_window: Key,
}

/// State that no attack may change.
#[derive(PartialEq, Debug)]
struct State {
    qps: [QpDescription; 2],
    keys: Vec<KeyInfo>,
    counts: Vec<u32>,
    bytes: Vec<u8>,
}

fn scene() -> Scene {
    let mut bed = Bed::new();
    let victim = bed.e.add_function(FunctionLimits::default()).unwrap();
    let pd = bed.pd(victim);
    let managed = Shape { managed: true, recv: Some(true), ..bed.shape(victim, pd) };
    let (mut qp, peer) = (bed.qp(&managed), bed.qp(&managed));
    bed.connect(&qp, &peer);
    let mr = bed.mr(victim, pd, 4096, ALL);
    mr.mem.write(0, &[0x77; 4096]);
    let window = |bed: &mut Bed, kind| bed.e.alloc_mw(victim, pd, kind).unwrap();
    let free_window = window(&mut bed, MwKind::Type2);
    let (bound, open) = (window(&mut bed, MwKind::Type2), window(&mut bed, MwKind::Type1));
    let start = mr.mem.addr();
    let all = Access::REMOTE_ALL;
    let tag = |key: Key| key.tag().wrapping_add(1);
    let binds = [
        Umr::bind(bound, tag(bound), qp.qpn, all, mr.key, start, 4096),
        Umr::bind_type1(open, tag(open), all, mr.key, start, 4096),
    ];
    for umr in &binds {
        bed.write_wqe(&mut qp, |w| _ = w.umr(umr));
    }
    // One more WQE, which is not enabled.
    bed.e.enable_send(victim, qp.qpn, qp.producer).unwrap();
    bed.write_wqe(&mut qp, |w| _ = w.nop().signaled());
    bed.run();
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let own_pd = bed.pd(f);
    let shape = bed.shape(f, own_pd);
    let (attacker, other_end) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&attacker, &other_end);
    let own = bed.mr(f, own_pd, 4096, ALL);
    let own_window = bed.e.alloc_mw(f, own_pd, MwKind::Type2).unwrap();
    Scene {
        bed,
        attacker,
        other_end,
        own,
        own_window,
        victim,
        pd,
        qp,
        peer,
        mr,
        free_window,
        bound_window: Key::new(bound.index(), tag(bound)),
        open_window: Key::new(open.index(), tag(open)),
    }
}

impl Scene {
    fn state(&self) -> State {
        let e = &self.bed.e;
        let qp = |q: &TestQp| e.query_qp(self.victim, q.qpn).unwrap();
        let keys = [self.mr.key, self.free_window, self.bound_window, self.open_window];
        let cqs = [&self.qp.send_cq, &self.qp.recv_cq, &self.peer.send_cq, &self.peer.recv_cq];
        State {
            qps: [qp(&self.qp), qp(&self.peer)],
            keys: keys.map(|k| e.query_key(self.victim, k.index()).unwrap()).into(),
            counts: cqs.map(|c| e.cq_count(self.victim, c.cqn).unwrap()).into(),
            bytes: self.mr.bytes(0, 4096),
        }
    }

    /// Executes a WQE that must fail with this error at the attacker's QP, and change nothing else.
    #[track_caller]
    fn refused(
        &mut self,
        syndrome: Syndrome,
        why: Option<Refusal>,
        fill: impl FnOnce(&mut Builder),
    ) {
        let before = self.state();
        let cqe = self.bed.execute(&mut self.attacker, fill);
        self.failed(&cqe, syndrome, why);
        assert_eq!(self.state(), before);
        for q in [&mut self.attacker, &mut self.other_end] {
            self.bed.e.modify_qp(q.function, q.qpn, verbs::QpChange::Reset).unwrap();
            (q.producer, q.recv_producer) = (0, 0);
            q.recv_record.store_be32(0, 0);
            while q.send_cq.reader.poll().is_some() || q.recv_cq.reader.poll().is_some() {}
        }
        self.bed.connect(&self.attacker, &self.other_end);
    }

    #[track_caller]
    fn failed(&self, cqe: &Cqe, syndrome: Syndrome, why: Option<Refusal>) {
        assert_error(cqe, syndrome);
        assert_eq!(cqe.error.unwrap().vendor, why.map_or(0, |w| w as u8));
        assert_eq!(cqe.qpn, self.attacker.qpn);
        assert_eq!(self.bed.state(&self.attacker), QpState::Error);
    }

    /// Checks that the victim's own work still succeeds.
    fn victim_works(&mut self) {
        let limit = self.qp.producer;
        self.bed.e.enable_send(self.victim, self.qp.qpn, limit).unwrap();
        self.bed.run();
        assert_eq!(self.qp.send_cq.reader.poll().unwrap().error, None);
    }
}

#[test]
fn wait_for_a_foreign_cq_is_rejected() {
    let mut s = scene();
    for cqn in [s.qp.send_cq.cqn, s.qp.recv_cq.cqn, Cqn::new(0xff_fff0)] {
        // The result is the same whether the count has been reached, or will never be reached.
        for index in [0, 0x40_0000, 0xff_ffff] {
            s.refused(Syndrome::LocalQpOperation, None, |w| _ = w.wait(cqn, index));
        }
    }
    s.victim_works();
}

#[test]
fn enabling_a_foreign_queue_is_rejected() {
    let mut s = scene();
    for qpn in [s.qp.qpn, s.peer.qpn, Qpn::new(0xff_fff0), Qpn::NONE] {
        s.refused(Syndrome::LocalQpOperation, None, |w| _ = w.send_enable(qpn, 0x7fff));
        s.refused(Syndrome::LocalQpOperation, None, |w| _ = w.receive_enable(qpn, 0x7fff));
    }
    s.victim_works();
}

#[test]
fn invalidating_a_foreign_key_is_rejected() {
    let mut s = scene();
    for key in [s.bound_window, s.open_window, s.free_window, s.mr.key] {
        s.refused(Syndrome::MwBind, Some(Refusal::Pd), |w| _ = w.local_invalidate(key));
    }
    s.victim_works();
}

#[test]
fn umr_on_a_foreign_window_is_rejected() {
    let mut s = scene();
    let (own, at) = (s.own.key, s.own.mem.addr());
    for key in [s.bound_window, s.open_window, s.free_window, s.mr.key] {
        for qpn in [s.attacker.qpn, s.qp.qpn, Qpn::NONE] {
            for flags in [0x80, 0xa0, 0x88] {
                let bind = Umr::bind(key, 9, qpn, Access::REMOTE_ALL, own, at, 64);
                let umr = Umr { flags: UmrFlags(flags), ..bind };
                s.refused(Syndrome::MwBind, Some(Refusal::Pd), |w| _ = w.umr(&umr));
                let umr = Umr { flags: UmrFlags(flags), ..Umr::unbind(key, true) };
                s.refused(Syndrome::MwBind, Some(Refusal::Pd), |w| _ = w.umr(&umr));
            }
        }
    }
    s.victim_works();
}

#[test]
fn window_over_foreign_memory_is_rejected() {
    let mut s = scene();
    let (key, own) = (s.own_window, s.attacker.qpn);
    let start = s.mr.mem.addr();
    for lkey in [s.mr.key, s.bound_window, s.open_window] {
        let bind = Umr::bind(key, 9, own, Access::REMOTE_READ, lkey, start, 64);
        s.refused(Syndrome::MwBind, Some(Refusal::Region), |w| _ = w.umr(&bind));
    }
    // An address of the victim's memory is also outside the attacker's own region.
    let bind = Umr::bind(key, 9, own, Access::REMOTE_READ, s.own.key, start, 64);
    s.refused(Syndrome::MwBind, Some(Refusal::Region), |w| _ = w.umr(&bind));
    let bind = Umr { klm: Klm { addr: s.own.mem.addr(), ..bind.klm }, ..bind };
    s.refused(Syndrome::MwBind, Some(Refusal::Form), |w| _ = w.umr(&bind));
    s.victim_works();
}

#[test]
fn unprivileged_bind_to_another_qp_is_rejected() {
    let mut s = scene();
    let (key, own, at) = (s.own_window, s.own.key, s.own.mem.addr());
    // Binds to the victim's QP, to no QP, and to the attacker's other QP: only the NIC's owner may
    // bind to another QP.
    for qpn in [s.qp.qpn, Qpn::NONE, s.other_end.qpn] {
        let bind = Umr::bind(key, 9, qpn, Access::REMOTE_ALL, own, at, 64);
        s.refused(Syndrome::MwBind, Some(Refusal::Privilege), |w| _ = w.umr(&bind));
    }
    s.refused(Syndrome::MwBind, Some(Refusal::Privilege), |w| _ = w.umr(&Umr::unbind(key, false)));
    // A client's function cannot create a privileged QP.
    let pd = s.attacker.pd;
    let cq = s.attacker.send_cq.cqn;
    let spec = crate::spec::QpSpec {
        pd,
        send: None,
        recv: crate::spec::Recv::None,
        send_cq: cq,
        recv_cq: cq,
        access: Access::NONE,
        privileged: true,
    };
    let f = s.attacker.function;
    assert!(matches!(s.bed.e.create_qp(f, spec.clone()), Err(crate::Error::NotPermitted { .. })));
    // Nor a QP in the victim's PD, or with the victim's CQs.
    let plain = crate::spec::QpSpec { privileged: false, ..spec };
    let foreign = |r| assert!(matches!(r, Err(crate::Error::Foreign { .. })), "{r:?}");
    foreign(s.bed.e.create_qp(f, crate::spec::QpSpec { pd: s.pd, ..plain.clone() }));
    let theirs = s.qp.send_cq.cqn;
    foreign(s.bed.e.create_qp(f, crate::spec::QpSpec { send_cq: theirs, ..plain.clone() }));
    foreign(s.bed.e.create_qp(f, crate::spec::QpSpec { recv_cq: theirs, ..plain }));
    s.victim_works();
}

#[test]
fn foreign_lkeys_are_rejected_in_every_role() {
    let mut s = scene();
    let to = s.own.remote(0);
    for key in [s.mr.key, s.bound_window, s.open_window] {
        let theirs = Sge { lkey: key, ..s.mr.sge(0, 8) };
        let why = Some(Refusal::Pd);
        s.refused(Syndrome::LocalProtection, why, |w| _ = w.rdma_write(to, &[theirs]));
        s.refused(Syndrome::LocalProtection, why, |w| _ = w.rdma_read(to, &[theirs]));
        s.refused(Syndrome::LocalProtection, why, |w| _ = w.send(&[theirs]));
        s.refused(Syndrome::LocalProtection, why, |w| _ = w.fetch_add(to, 1, theirs));
        let own = s.own.sge(0, 8);
        s.refused(Syndrome::LocalProtection, why, |w| _ = w.rdma_read(to, &[own, theirs]));
        // The foreign lkey in a receive WQE of the attacker.
        s.bed.post_recv(&mut s.other_end, &[theirs]);
        s.refused(Syndrome::RemoteOperation, None, |w| _ = w.send(&[own]));
    }
    s.victim_works();
}

#[test]
fn foreign_rkeys_are_rejected() {
    let mut s = scene();
    let own = s.own.sge(0, 8);
    for rkey in [s.mr.key, s.bound_window, s.open_window, s.free_window] {
        let at = Remote { addr: s.mr.mem.addr(), rkey };
        s.refused(Syndrome::RemoteAccess, None, |w| _ = w.rdma_read(at, &[own]));
        s.refused(Syndrome::RemoteAccess, None, |w| _ = w.rdma_write(at, &[own]));
        s.refused(Syndrome::RemoteAccess, None, |w| _ = w.fetch_add(at, 1, own));
    }
    s.victim_works();
}

#[test]
fn tags_of_a_foreign_key_fail_identically() {
    let mut s = scene();
    let to = s.own.remote(0);
    for tag in 0..=255 {
        let lkey = Key::new(s.bound_window.index(), tag);
        let theirs = Sge { lkey, ..s.mr.sge(0, 8) };
        let why = Some(Refusal::Pd);
        s.refused(Syndrome::LocalProtection, why, |w| _ = w.rdma_write(to, &[theirs]));
        s.refused(Syndrome::MwBind, why, |w| _ = w.local_invalidate(lkey));
        s.refused(Syndrome::MwBind, why, |w| _ = w.umr(&Umr::unbind(lkey, true)));
    }
}

#[test]
fn requests_to_a_qp_with_another_peer_fail() {
    let mut s = scene();
    for peer in [s.qp.qpn, s.peer.qpn] {
        let a = s.attacker.qpn;
        s.bed.e.modify_qp(s.attacker.function, a, verbs::QpChange::Reset).unwrap();
        s.attacker.producer = 0;
        s.bed.connect_to(&s.attacker, peer);
        let (at, own) = (s.mr.remote(0), s.own.sge(0, 8));
        s.refused(Syndrome::RetryExceeded, None, |w| _ = w.rdma_read(at, &[own]));
    }
    s.victim_works();
}

#[test]
fn reused_qp_number_is_not_connected_to_the_old_peer() {
    let mut bed = Bed::new();
    let (a, b) = bed.pair();
    bed.e.destroy_qp(PF, a.qpn).unwrap();
    // If a later QP gets the number of `a`, `b` is no longer connected to that number.
    assert_eq!(bed.e.query_qp(PF, b.qpn).unwrap().info.peer, Qpn::NONE);
    let mut b = b;
    assert_error(&bed.execute(&mut b, |w| _ = w.send(&[])), Syndrome::RetryExceeded);
}

// --- messages to a managed queue ---------------------------------------------------------------

/// A request that does not fit must not start the chain that serves requests.
#[test]
fn failed_message_to_a_managed_queue_counts_no_request() {
    for bad_key in [false, true] {
        let mut bed = Bed::new();
        let pd = bed.pd(PF);
        let managed = Shape { managed: true, recv: Some(true), ..bed.shape(PF, pd) };
        let (front, mut worker) = (bed.qp(&managed), bed.qp(&managed));
        bed.connect_to(&worker, worker.qpn);
        let room = bed.mr(PF, pd, 64, ALL);
        let f = bed.e.add_function(FunctionLimits::default()).unwrap();
        let client_pd = bed.pd(f);
        let shape = bed.shape(f, client_pd);
        let mut client = bed.qp(&shape);
        bed.connect(&client, &front);
        let mut sge = room.sge(0, 8);
        if bad_key {
            sge.lkey = Key(sge.lkey.0 ^ 1);
        }
        put_recv(&front.recv_ring, 0, &[room.sge(0, 8)]);
        put_recv(&front.recv_ring, STRIDE as usize, &[sge]);
        bed.e.enable_recv(PF, front.qpn, 2).unwrap();
        // The worker WAITs for the second request.
        let cqn = front.recv_cq.cqn;
        bed.write_wqe(&mut worker, |w| _ = w.wait(cqn, 1).signaled());
        bed.e.enable_send(PF, worker.qpn, worker.producer).unwrap();
        let own = bed.mr(f, client_pd, 64, ALL);
        assert_eq!(bed.execute(&mut client, |w| _ = w.send(&[own.sge(0, 8)])).error, None);
        let len = if bad_key { 8 } else { 9 };
        let cqe = bed.execute(&mut client, |w| _ = w.send(&[own.sge(0, len)]));
        let told = if bad_key { Syndrome::RemoteOperation } else { Syndrome::RemoteInvalidRequest };
        assert_error(&cqe, told);
        assert_eq!(bed.e.cq_count(PF, cqn).unwrap(), 1, "the CQ counts one request");
        assert_eq!(bed.e.query_qp(PF, front.qpn).unwrap().progress.recv_consumer, 1);
        assert_eq!(bed.state(&front), QpState::Error);
        assert!(worker.send_cq.reader.poll().is_none(), "the chain must not start");
        assert_eq!(bed.state(&worker), QpState::ReadyToSend);
    }
}

/// A WRITE with immediate of length 0 must not complete a receive at a QP that grants no WRITE
/// right.
#[test]
fn zero_length_write_imm_needs_the_write_right() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { recv: Some(true), access: Access::NONE, ..bed.shape(PF, pd) };
    let (front, client_shape) = (bed.qp(&shape), bed.shape(PF, pd));
    bed.e.enable_recv(PF, front.qpn, 4).unwrap();
    for op in 0..3 {
        let mut client = bed.qp(&client_shape);
        let _ = bed.e.modify_qp(PF, front.qpn, verbs::QpChange::Reset);
        bed.connect(&client, &front);
        bed.e.enable_recv(PF, front.qpn, 4).unwrap();
        let cqe = bed.execute(&mut client, |w| {
            match op {
                0 => w.rdma_write_imm(Remote::default(), &[], 7),
                1 => w.rdma_write(Remote::default(), &[]),
                _ => w.rdma_read(Remote::default(), &[]),
            };
        });
        assert_error(&cqe, Syndrome::RemoteAccess);
        assert_eq!(bed.e.cq_count(PF, front.recv_cq.cqn).unwrap(), 0);
    }
}
