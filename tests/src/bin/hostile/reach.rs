//! Attacks on other clients' objects: with WQEs that name the objects, and with control verbs.

use anyhow::{Context, Result, ensure};
use rnic::port::control::{QpVerb, ReceiveVerb, SendRing, Verb};
use serde_json::{Value, json};
use verbs::cqe::Syndrome;
use verbs::wqe::{Builder, Umr, UmrFlags};
use verbs::{Access, Cqn, Key, KeyIndex, MwKind, Pdn, QpChange, Qpn, Srqn};

use crate::Arguments;
use crate::compute::{Compute, LONG};
use crate::nic::{Nic, part};
use crate::queue::{Qp, Shape};

/// Object numbers below this limit are tried. The lowest numbers belong to the memory node, the
/// next to victims that were admitted before the attack.
const NUMBERS: u32 = 160;

/// A QP that is connected to itself and is re-established after every error.
struct Loop {
    qp: Qp,
}

impl Loop {
    fn new(nic: &Nic, pd: Pdn) -> Result<Self> {
        let qp = Qp::new(nic, pd, Shape::default())?;
        qp.connect(nic, qp.qpn)?;
        Ok(Self { qp })
    }

    /// Executes one WQE and returns its syndrome, 0 for success.
    fn try_one(&mut self, nic: &Nic, build: impl FnOnce(&mut Builder)) -> Result<u8> {
        self.qp.post(nic, |b| {
            build(b);
            b.signaled();
        });
        let cqe = self.qp.wait(LONG).context("a WQE did not complete")?;
        let Some(error) = cqe.error else { return Ok(0) };
        self.qp.reset(nic)?;
        while self.qp.poll().is_some() {}
        self.qp.connect(nic, self.qp.qpn)?;
        Ok(error.syndrome)
    }

    fn refused(
        &mut self,
        nic: &Nic,
        why: Syndrome,
        what: &str,
        build: impl FnOnce(&mut Builder),
    ) -> Result<()> {
        let got = self.try_one(nic, build)?;
        ensure!(got == why as u8, "{what}: {got:#x} and not {why}");
        Ok(())
    }
}

/// Posts UMRs and LOCAL_INVs on other clients' keys, UMRs without the QP check, and binds for other
/// QPs.
pub fn umr(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    let mut own = Loop::new(&me.nic, me.pd)?;
    let own_mr = me.nic.register(me.pd, &me.local, Access::LOCAL_ALL)?;
    let other_pd = me.nic.pd()?;
    let other_mr = me.nic.register(other_pd, &me.local, Access::LOCAL_ALL)?;
    a.ready()?;
    let chunk = me.allocate()?;
    let start = me.local.addr();
    let mut tried = 0;
    let mut keys: Vec<u32> = a.of.iter().flat_map(|c| c.keys.clone()).collect();
    keys.extend(&chunk.keys);
    for &key in &keys {
        let key = Key(key);
        let tag = key.tag().wrapping_add(1);
        let attempts = [
            Umr::unbind(key, true),
            Umr::unbind(key, false),
            Umr::bind(key, tag, own.qp.qpn, Access::REMOTE_ALL, own_mr, start, 64),
            Umr {
                flags: UmrFlags::INLINE | UmrFlags::TRANSLATION_OFFSET,
                ..Umr::bind(key, tag, own.qp.qpn, Access::REMOTE_ALL, own_mr, start, 64)
            },
        ];
        for umr in &attempts {
            own.refused(&me.nic, Syndrome::MwBind, "a UMR on another's key", |b| _ = b.umr(umr))?;
            tried += 1;
        }
        let inv = |b: &mut Builder| _ = b.local_invalidate(key);
        own.refused(&me.nic, Syndrome::MwBind, "LOCAL_INV of another's key", inv)?;
        // Also on the access QP, which is connected to the QP that the window is bound to.
        let got = me.access(0, |b| _ = b.local_invalidate(key))?;
        ensure!(got == Syndrome::MwBind as u8, "LOCAL_INV on the access QP: {got:#x}");
        tried += 2;
    }
    // The attacker's own windows: bound for other QPs, or over memory of other owners.
    let window = me.nic.windows(me.pd, MwKind::Type2, 1)?[0];
    let qpn = own.qp.qpn;
    let bind = |qpn, mr, start, len| Umr::bind(window, 9, qpn, Access::REMOTE_ALL, mr, start, len);
    let end = start + me.local.len() as u64;
    let attempts = [
        ("to another's QP", bind(Qpn::new(me.lanes()[0]), own_mr, start, 64)),
        ("to another QP of its own", bind(me.access[0].qpn, own_mr, start, 64)),
        ("to no QP", bind(Qpn::NONE, own_mr, start, 64)),
        ("over a region of another PD", bind(qpn, other_mr, start, 64)),
        ("over a nonexistent region", bind(qpn, Key(0x7777_7777), start, 64)),
        ("over another's window", bind(qpn, Key(chunk.keys[0]), chunk.addr, 64)),
        ("beyond the region", bind(qpn, own_mr, end - 63, 64)),
        ("before the region", bind(qpn, own_mr, start - 1, 64)),
        ("across the end of the address space", bind(qpn, own_mr, u64::MAX - 7, 64)),
        ("a window over a window's key", bind(qpn, window, start, 64)),
    ];
    for (what, umr) in &attempts {
        own.refused(&me.nic, Syndrome::MwBind, what, |b| _ = b.umr(umr))?;
        tried += 1;
    }
    // A valid bind succeeds, so the binds above were refused for the right reason. Its unbinding
    // without the QP check is refused, because only the memory node may skip the check.
    let good = bind(qpn, own_mr, start, 64);
    ensure!(own.try_one(&me.nic, |b| _ = b.umr(&good))? == 0, "a valid bind");
    let bound = Key::new(window.index(), 9);
    let unchecked = Umr::unbind(bound, false);
    own.refused(&me.nic, Syndrome::MwBind, "an unbind without the check", |b| {
        _ = b.umr(&unchecked)
    })?;
    let checked = Umr::unbind(bound, true);
    ensure!(own.try_one(&me.nic, |b| _ = b.umr(&checked))? == 0, "a valid unbind");
    me.release(&chunk)?;
    Ok(json!({ "refused": tried + 1 }))
}

/// Posts WAITs on other clients' CQs, and SEND_EN and RECV_EN of other clients' queues.
pub fn enable(a: &Arguments) -> Result<Value> {
    let me = Compute::join(a)?;
    let mut own = Loop::new(&me.nic, me.pd)?;
    a.ready()?;
    let bad = Syndrome::LocalQpOperation;
    let mut tried = 0;
    let mine = [me.alloc.qp.cqn, me.free.qp.cqn, me.access[0].cqn, me.access[1].cqn, own.qp.cqn];
    let mut numbers: Vec<u32> = (0..NUMBERS).collect();
    numbers.extend(&me.terms.management);
    numbers.extend(me.lanes());
    numbers.extend([0x1000, 0xff_ffff, 0x80_0000]);
    for n in numbers {
        if !mine.contains(&Cqn::new(n)) {
            let what = format!("WAIT on CQ {n:#x}");
            own.refused(&me.nic, bad, &what, |b| _ = b.wait(Cqn::new(n), 0))?;
            tried += 1;
        }
        // The attacker's own queues are not managed, so these are refused as well.
        for index in [0, 1, 0xffff] {
            let what = format!("SEND_EN of QP {n:#x}");
            own.refused(&me.nic, bad, &what, |b| _ = b.send_enable(Qpn::new(n), index))?;
            let what = format!("RECV_EN of QP {n:#x}");
            own.refused(&me.nic, bad, &what, |b| _ = b.receive_enable(Qpn::new(n), index))?;
            tried += 2;
        }
    }
    Ok(json!({ "refused": tried }))
}

/// Executes every control verb that names an object, with other clients' objects.
pub fn verbs(a: &Arguments) -> Result<Value> {
    let me = Compute::join(a)?;
    a.ready()?;
    let nic = &me.nic;
    let qps = [&me.alloc.qp, &me.free.qp, &me.access[0], &me.access[1]];
    let mut tried = 0;
    let mut refuse = |verb| -> Result<()> {
        let why = nic.refused(verb)?;
        ensure!(why.len() > 15, "a refusal without a reason: {why}");
        tried += 1;
        Ok(())
    };
    for n in 0..NUMBERS {
        let qpn = Qpn::new(n);
        if !qps.iter().any(|q| q.qpn == qpn) {
            refuse(Verb::QueryQp { qpn })?;
            refuse(Verb::ModifyQp { qpn, change: QpChange::Error })?;
            refuse(Verb::ModifyQp { qpn, change: QpChange::Reset })?;
            refuse(Verb::DestroyQp { qpn })?;
            refuse(Verb::EnableSend { qpn, limit: 9 })?;
            refuse(Verb::EnableRecv { qpn, limit: 9 })?;
        }
        let cqn = Cqn::new(n);
        if !qps.iter().any(|q| q.cqn == cqn) {
            refuse(Verb::CqCount { cqn })?;
            refuse(Verb::DestroyCq { cqn })?;
            refuse(make_qp(me.pd, cqn, ReceiveVerb::None, false, &me.access[0]))?;
        }
        let srqn = Srqn::new(n);
        refuse(Verb::DestroySrq { srqn })?;
        let shared = ReceiveVerb::Shared { srqn };
        refuse(make_qp(me.pd, me.access[0].cqn, shared, false, &me.access[0]))?;
        let pd = Pdn::new(n);
        if pd != me.pd {
            refuse(Verb::DeallocPd { pd })?;
            refuse(Verb::AllocMws { pd, kind: MwKind::Type2, count: 1 })?;
            let memory = part(&me.local, 0, 4096);
            refuse(Verb::RegMr { pd, memory, iova: 0, access: Access::REMOTE_ALL })?;
            refuse(make_qp(pd, me.access[0].cqn, ReceiveVerb::None, false, &me.access[0]))?;
        }
    }
    // The victims' keys, and the lowest keys, which belong to the memory node.
    let keys = a.of.iter().flat_map(|c| c.keys.clone()).chain((0..NUMBERS).map(|n| n << 8));
    let own = [me.lkey, me.alloc.rkey, me.free.rkey];
    for key in keys.map(Key).filter(|k| !own.iter().any(|o| o.index() == k.index())) {
        refuse(Verb::DeregMr { key })?;
        refuse(Verb::DeallocMw { key })?;
        refuse(Verb::QueryKey { index: KeyIndex::new(key.0 >> 8) })?;
    }
    refuse(make_qp(me.pd, me.access[0].cqn, ReceiveVerb::None, true, &me.access[0]))?;
    Ok(json!({ "refused": tried }))
}

fn make_qp(
    pd: Pdn,
    cqn: Cqn,
    receive: ReceiveVerb<verbs::DmaMemory>,
    privileged: bool,
    memory_of: &Qp,
) -> Verb<verbs::DmaMemory> {
    let ring = part(&memory_of.memory, memory_of.send_at(), 4096);
    Verb::CreateQp(QpVerb {
        pd,
        send: Some(SendRing { ring, blocks: 64, managed: true }),
        receive,
        send_cq: cqn,
        recv_cq: cqn,
        access: Access::REMOTE_ALL,
        privileged,
    })
}

/// Connects its own QPs to other clients' QPs, which are not connected to the attacker.
pub fn connect(a: &Arguments) -> Result<Value> {
    let me = Compute::join(a)?;
    let nic = &me.nic;
    let pd = nic.pd()?;
    let shape = Shape { receives: 16, ..Shape::default() };
    let mut qp = Qp::new(nic, pd, shape)?;
    let local = nic.memory(8192)?;
    let lkey = nic.register(pd, &local, Access::LOCAL_ALL)?;
    let sge = verbs::wqe::Sge { addr: local.addr(), len: 8, lkey };
    a.ready()?;
    let mut tried = 0;
    let own: Vec<Qpn> =
        [&me.alloc.qp, &me.free.qp, &me.access[0], &me.access[1], &qp].map(|q| q.qpn).into();
    let foreign = (0..NUMBERS).chain(me.lanes()).chain(me.terms.management.clone());
    for peer in foreign.map(Qpn::new).filter(|n| !own.contains(n)) {
        let chunk = a.of.first().context("the attack needs a victim's chunk (--of)")?;
        let at = crate::compute::remote(chunk.addr, chunk.keys[tried % chunk.keys.len()]);
        let attempts: [&dyn Fn(&mut Builder); 3] = [
            &|b| _ = b.send_inline(&[0; 18]).signaled(),
            &|b| _ = b.rdma_write(at, &[sge]).signaled(),
            &|b| _ = b.rdma_read(at, &[sge]).signaled(),
        ];
        qp.connect(nic, peer)?;
        qp.post(nic, attempts[tried % 3]);
        let cqe = qp.wait(LONG).with_context(|| format!("a WQE to QP {peer} did not complete"))?;
        let got = cqe.error.map(|e| e.syndrome);
        ensure!(got == Some(Syndrome::RetryExceeded as u8), "to QP {peer}: {got:?}");
        qp.reset(nic)?;
        while qp.poll().is_some() {}
        tried += 1;
    }
    Ok(json!({ "refused": tried }))
}
