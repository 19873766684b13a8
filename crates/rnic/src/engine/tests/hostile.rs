//! A hostile function writes arbitrary bytes to its rings, doorbell records and doorbells. The NIC
//! must neither panic nor stall, other functions must be served, and memory that was not granted
//! must not change.

use super::*;
use crate::limits::{FunctionLimits, Limits};
use proptest::prelude::*;
use verbs::cqe::CQE;
use verbs::wqe::umr::Umr;
use verbs::wqe::{Builder, MAX_BYTES, Remote, Sge};
use verbs::{Access, Cqn, MwKind, QpChange, QpState, Qpn};

/// Byte offsets in a WQE, and the values to store there.
type Spoil = Vec<(u16, u8)>;

/// Actions of the hostile function in one round.
#[derive(Clone, Debug)]
struct Round {
    /// WQEs for its rings: operation, numeric arguments, bytes to overwrite.
    wqes: Vec<(u8, [u32; 6], Spoil)>,
    /// Values for its doorbell records and for the doorbell.
    records: [u32; 6],
    doorbell: u16,
    bytes: Vec<u8>,
    revive: bool,
}

fn round() -> impl Strategy<Value = Round> {
    let spoil = proptest::collection::vec((0..MAX_BYTES as u16, any::<u8>()), 0..4);
    let near = || prop_oneof![3 => 0..64u32, 1 => any::<u32>()];
    let numbers = [near(), near(), near(), near(), near(), near()];
    (
        proptest::collection::vec((0..14u8, numbers, spoil), 1..12),
        [near(), near(), near(), near(), near(), near()],
        prop_oneof![2 => 0..40u16, 1 => any::<u16>()],
        proptest::collection::vec(any::<u8>(), 0..300),
        any::<bool>(),
    )
        .prop_map(|(wqes, records, doorbell, bytes, revive)| Round {
            wqes,
            records,
            doorbell,
            bytes,
            revive,
        })
}

fn build(b: &mut Builder, op: u8, n: [u32; 6], keys: &[verbs::Key], m: &Mr, qpns: &[Qpn]) {
    let key = |i: u32| keys[i as usize % keys.len()];
    let qpn = |i: u32| qpns.get(i as usize % 8).copied().unwrap_or(Qpn::new(i));
    let addr = m.mem.addr().wrapping_add(n[0] as u64 * 16).wrapping_sub(64);
    let at = Remote { addr, rkey: key(n[1]) };
    let sge =
        Sge { addr: m.mem.addr() + n[2] as u64 * 8, len: n[3].wrapping_mul(3), lkey: key(n[4]) };
    let (key0, key5) = (key(n[0]), key(n[5]));
    match op {
        0 => b.rdma_write(at, &[sge, sge]),
        1 => b.rdma_read(at, &[sge, sge, sge]),
        2 => b.fetch_add(at, n[5] as u64, sge),
        3 => b.masked_compare_swap(at, (0, 0), (n[5] as u64, !0), sge),
        4 => b.send(&[sge]),
        5 => b.send_inline(&n[5].to_be_bytes()),
        6 => b.wait(Cqn::new(n[0]), n[1]),
        7 => b.send_enable(qpn(n[0]), n[1]),
        8 => b.receive_enable(qpn(n[0]), n[1]),
        9 => b.local_invalidate(key0),
        10 => b.umr(&Umr::unbind(key0, n[1].is_multiple_of(2))),
        11 => b.umr(&Umr::bind(key0, n[1] as u8, qpn(n[2]), Access(0xff), key5, addr, n[3])),
        12 => b.nop_filling(1 + n[0] % 15),
        _ => b.rdma_write_inline(at, &[n[5] as u8; 40]),
    };
    b.flags(n[5] as u8);
}

struct Hostile {
    bed: Bed,
    /// QPs of the hostile function: connected to the server, connected to each other, and managed.
    qps: Vec<TestQp>,
    keys: Vec<verbs::Key>,
    mr: Mr,
    /// Memory of the server: one region is granted to the hostile function, one is not.
    granted: Mr,
    secret: Mr,
    server: TestQp,
    bystanders: (TestQp, TestQp),
    bystander_mr: (Mr, Mr),
}

impl Hostile {
    fn new() -> Self {
        let limits =
            Limits { slice_bytes: 100, qp_turn: 1000, function_turn: 4000, ..Limits::default() };
        let mut bed = Bed::with(limits);
        let bystanders = bed.pair();
        let bystander_mr =
            (bed.mr(PF, bystanders.0.pd, 256, ALL), bed.mr(PF, bystanders.1.pd, 256, ALL));
        let pd = bed.pd(PF);
        let (granted, secret) = (bed.mr(PF, pd, 512, ALL), bed.mr(PF, bystanders.0.pd, 512, ALL));
        secret.mem.write(0, &[0x5e; 512]);
        let shape = bed.shape(PF, pd);
        let server = bed.qp(&shape);
        let f = bed.e.add_function(FunctionLimits::default()).unwrap();
        let pd = bed.pd(f);
        let shape = bed.shape(f, pd);
        let managed = Shape { managed: true, recv: Some(true), cq_entries: 8, ..shape.clone() };
        let mut qps: Vec<TestQp> = (0..3).map(|_| bed.qp(&shape)).collect();
        qps.push(bed.qp(&managed));
        bed.connect(&qps[0], &server);
        bed.connect(&qps[1], &qps[2]);
        bed.connect_to(&qps[3], qps[3].qpn);
        let mr = bed.mr(f, pd, 4096, ALL);
        let mut keys =
            vec![mr.key, granted.key, secret.key, bystander_mr.0.key, bystander_mr.1.key];
        for kind in [MwKind::Type2, MwKind::Type2, MwKind::Type1] {
            keys.push(bed.e.alloc_mw(f, pd, kind).unwrap());
        }
        // The rings are registered, so the function's own WQEs can modify them.
        for q in &qps {
            let ring = q.ring.clone();
            keys.push(bed.e.reg_mr(f, pd, ring.clone(), mr.mem.addr(), ALL).unwrap());
        }
        Self { bed, qps, keys, mr, granted, secret, server, bystanders, bystander_mr }
    }

    fn attack(&mut self, r: &Round) {
        let qpns: Vec<Qpn> = self.qps.iter().map(|q| q.qpn).collect();
        for (i, (op, numbers, spoil)) in r.wqes.iter().enumerate() {
            let q = &mut self.qps[i % 4];
            let mut b = Builder::new(q.qpn, q.producer);
            build(&mut b, *op, *numbers, &self.keys, &self.mr, &qpns);
            let mut bytes = b.bytes().to_vec();
            for &(at, byte) in spoil {
                let at = at as usize % bytes.len();
                bytes[at] = byte;
            }
            for (k, block) in bytes.chunks(64).enumerate() {
                let at = (q.producer as usize + k) % q.blocks as usize * 64;
                q.ring.write(at, block);
            }
            q.producer = q.producer.wrapping_add(b.blocks() as u16);
        }
        for (i, q) in self.qps.iter().enumerate() {
            q.recv_record.store_be32(0, r.records[i]);
            q.send_cq.record.store_be32(0, r.records[4]);
            q.send_cq.record.store_be32(4, r.records[5]);
            let n = r.bytes.len().min(q.recv_ring.len());
            q.recv_ring.write(0, &r.bytes[..n]);
            self.bed.e.doorbell(q.qpn, q.producer);
            let _ = self.bed.e.enable_send(q.function, q.qpn, q.producer);
            let _ = self.bed.e.enable_recv(q.function, q.qpn, r.records[i] as u16);
        }
        self.bed.e.doorbell(self.qps[0].qpn, r.doorbell);
        // The port rejects doorbells for other functions' QPs. A doorbell for an unknown QP must
        // have no effect.
        self.bed.e.doorbell(Qpn::new(r.records[5] | 0x80_0000), r.doorbell);
    }

    /// A bystander's WRITE completes after a bounded number of WQEs, whatever other QPs are ready.
    fn serves_bystanders(&mut self, value: u8) {
        let (a, _) = &mut self.bystanders;
        let (from, to) = &self.bystander_mr;
        from.mem.write(0, &[value; 64]);
        let (to_at, from_at) = (to.remote(0), from.sge(0, 64));
        self.bed.post(a, |w| _ = w.rdma_write(to_at, &[from_at]).signaled());
        let mut executed = 0;
        while self.bystanders.0.send_cq.reader.poll().is_none_or(|c| c.error.is_some()) {
            self.bed.now += 1;
            let n = self.bed.e.poll(self.bed.now, 8);
            executed += n;
            assert!(n > 0 && executed < 200, "the bystander is starved");
        }
        assert_eq!(to.bytes(0, 64), [value; 64]);
    }

    fn revive(&mut self) {
        let bed = &mut self.bed;
        for q in self.qps.iter_mut().chain([&mut self.server]) {
            bed.e.modify_qp(q.function, q.qpn, QpChange::Reset).unwrap();
            q.producer = 0;
        }
        bed.connect(&self.qps[0], &self.server);
        bed.connect(&self.qps[1], &self.qps[2]);
        bed.connect_to(&self.qps[3], self.qps[3].qpn);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 3 } else { 400 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn hostile_function_harms_only_itself(rounds in proptest::collection::vec(round(), 1..12)) {
        let mut h = Hostile::new();
        for (i, r) in rounds.iter().enumerate() {
            h.attack(r);
            h.serves_bystanders(i as u8);
            // The function may keep the NIC busy forever (with a ring that enables itself), but
            // must not delay other functions.
            h.bed.now += 3_000_000;
            h.bed.e.poll(h.bed.now, if cfg!(miri) { 50 } else { 2000 });
            h.bed.e.take_events().for_each(drop);
            for q in [&h.bystanders.0, &h.bystanders.1] {
                prop_assert_eq!(h.bed.state(q), QpState::ReadyToSend);
            }
            prop_assert_eq!(h.secret.bytes(0, 512), vec![0x5e; 512]);
            prop_assert_eq!(h.bystander_mr.0.bytes(64, 192), vec![0; 192]);
            prop_assert_eq!(h.bystander_mr.1.bytes(64, 192), vec![0; 192]);
            let access = h.bed.e.query_key(PF, h.granted.key.index()).unwrap();
            prop_assert_eq!((access.tag, access.len), (h.granted.key.tag(), 512));
            if r.revive {
                h.revive();
            }
        }
        // The function may change memory that it was granted. Afterwards the function and all its
        // objects are removed.
        let f = h.qps[0].function;
        h.bed.e.remove_function(f);
        h.bed.e.poll(h.bed.now, 1 << 20);
        prop_assert_eq!(h.bed.e.core.queues.qps.len(), 3);
        prop_assert_eq!(h.bed.e.poll(h.bed.now, 100), 0);
        h.serves_bystanders(0xee);
    }

    #[test]
    fn arbitrary_completions_decode(bytes in proptest::array::uniform32(any::<u8>())) {
        let mut entry = [0; CQE];
        entry[32..].copy_from_slice(&bytes);
        let cqe = verbs::cqe::Cqe::from_bytes(&entry);
        let again = verbs::cqe::Cqe::from_bytes(&cqe.to_bytes(bytes[31]));
        prop_assert_eq!(cqe, again);
    }
}
