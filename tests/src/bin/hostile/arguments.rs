//! Attacks with the contents of requests: QP numbers, reply addresses, lengths, number of requests.

use anyhow::{Context, Result, bail, ensure};
use rnic::port::control::Verb;
use serde_json::{Value, json};
use verbs::cqe::Syndrome;
use verbs::wqe::Builder;
use verbs::{Access, Key, QpState, Qpn};

use crate::compute::{Answer, Compute, LONG, SHORT, SLOT, chunk, qpn_bytes, remote, status};
use units::Random;

use crate::Arguments;

/// Allocates for QPs that are not its own access QPs. The attacker gains no access, and can free
/// the chunk as usual (§4.4: "only makes the CN itself unable to access the allocated memory").
pub fn wrong_qpn(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let lanes = me.lanes();
    let near = |by: i32| lanes[0].wrapping_add_signed(by) & Qpn::MAX;
    let mut named = vec![
        // Its own QPs that are not access QPs.
        me.terms.management[0],
        me.terms.management[1],
        me.alloc.qp.qpn.raw(),
        me.access[0].qpn.raw(),
        // Numbers of no QP.
        0,
        0x12_3456,
        Qpn::NONE.raw(),
    ];
    // Lower numbers belong to earlier clients (the victims) and to the memory node's workers.
    named.extend((1..=24).map(|by| near(-by)));
    // Between hosts, the attacker's QPs and its peers may have the same numbers.
    named.retain(|n| !lanes.contains(n));
    let mut refused = 0;
    for &qpn in &named {
        let chunk = me.allocate_for(&[qpn, qpn])?.context("the pool is empty")?;
        for lane in 0..2 {
            for key in &chunk.keys {
                let got = me.read(lane, remote(chunk.addr, *key), 8)?;
                ensure!(got == Syndrome::RemoteAccess as u8, "QPN {qpn:#x}: syndrome {got:#x}");
                refused += 1;
            }
        }
        me.release(&chunk)?;
    }
    // One right number and one wrong: the right one works, on its own lane only.
    let chunk = me.allocate_for(&[lanes[0], Qpn::NONE.raw()])?.context("the pool is empty")?;
    ensure!(me.write(0, remote(chunk.addr, chunk.keys[0]), 64)? == 0);
    ensure!(me.read(1, remote(chunk.addr, chunk.keys[1]), 64)? != 0);
    me.release(&chunk)?;
    // The two lanes in reverse order: each key works on the lane that was named for it.
    let chunk = me.allocate_for(&[lanes[1], lanes[0]])?.context("the pool is empty")?;
    ensure!(me.write(1, remote(chunk.addr, chunk.keys[0]), 64)? == 0);
    ensure!(me.read(0, remote(chunk.addr, chunk.keys[0]), 64)? != 0);
    me.release(&chunk)?;
    Ok(json!({ "named": named.len(), "refused": refused }))
}

/// Requests replies to addresses that the memory node cannot write. The attacker's management
/// connection breaks and works again after it is re-established. Chunks allocated in between belong
/// to the attacker until it disconnects.
pub fn unwritable_reply(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    let readable = me.nic.memory(4096)?;
    let read_only = me.nic.register(me.pd, &readable, Access::REMOTE_READ)?;
    let other_pd = me.nic.pd()?;
    let elsewhere = me.nic.register(other_pd, &readable, Access::REMOTE_WRITE)?;
    a.ready()?;
    let (addr, rkey) = (me.alloc.replies.addr(), me.alloc.rkey);
    let end = addr + me.alloc.replies.len() as u64;
    let foreign = a.of.first().context("the attack needs a victim's chunk (--of)")?;
    let targets = [
        (0, rkey),
        (addr, Key(0)),
        (addr, Key(0xffff_ffff)),
        (addr, Key(rkey.0 ^ 1)),
        (end - 4, rkey),
        (end, rkey),
        (u64::MAX - 3, rkey),
        (readable.addr(), read_only),
        (readable.addr(), elsewhere),
        (foreign.addr, Key(foreign.keys[0])),
    ];
    let lanes = qpn_bytes(&me.lanes());
    for (addr, rkey) in targets {
        me.alloc.send_to(&me.nic, &lanes, addr, rkey);
        match me.alloc.answer(0, SHORT) {
            Answer::Reply(_) => {
                // The SEND is not signaled, so a completion can only be that of a reply.
                bail!("a request for a reply to {addr:#x}, key {rkey} was answered");
            }
            Answer::Failed(_) | Answer::Silence => {}
        }
        me.recover_management()?;
        let arguments = [0xff, 0xff, 0xfe];
        me.free.send_to(&me.nic, &arguments, addr, rkey);
        if let Answer::Reply(bytes) = me.free.answer(0, SHORT) {
            bail!("a request for a reply to {addr:#x}, key {rkey} was answered: {bytes:?}");
        }
        me.recover_management()?;
        let own = me.allocate()?;
        me.release(&own)?;
    }
    Ok(json!({ "targets": targets.len() }))
}

/// Sends requests that are too short, too long or not SENDs.
pub fn malformed(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let mut random = Random::new(a.seed);
    let (mut answered, mut broke, mut silent) = (0, [0u32; 256], 0);
    let mut outcome = |answer: Answer| match answer {
        Answer::Reply(_) => answered += 1,
        Answer::Failed(syndrome) => broke[syndrome as usize] += 1,
        Answer::Silence => silent += 1,
    };
    for len in (0..40).chain([63, 64, 100, 200, 900]) {
        for free in [false, true] {
            let bytes: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
            let m = if free { &mut me.free } else { &mut me.alloc };
            m.send_raw(&me.nic, &bytes);
            outcome(m.answer(0, SHORT / 10));
            me.recover_management()?;
        }
    }
    // SENDs of the maximum length and longer ones, and operations that a management QP does not
    // serve.
    let table = a.of.first().map_or(0, |c| c.addr);
    for len in [4096u32, 65536, 1 << 20, (1 << 20) - 4096] {
        let (from, eight) = (me.sge(0, len), me.sge(0, 8));
        let tries: [&dyn Fn(&mut Builder); 5] = [
            &|b| _ = b.send(&[from]),
            &|b| _ = b.send_imm(&[from], 7),
            &|b| _ = b.rdma_write(remote(table, 0x100), &[from]),
            &|b| _ = b.rdma_write_imm(remote(table, 0x100), &[eight], 7),
            &|b| _ = b.fetch_add(remote(table & !7, 0x100), 1, eight),
        ];
        for build in tries {
            for free in [false, true] {
                let m = if free { &mut me.free } else { &mut me.alloc };
                m.qp.post_receives(&me.nic, 1);
                m.qp.post(&me.nic, build);
                outcome(m.answer(0, LONG));
                me.recover_management()?;
            }
        }
    }
    let own = me.allocate()?;
    me.release(&own)?;
    let broke: Vec<_> = broke.iter().enumerate().filter(|(_, n)| **n > 0).collect();
    ensure!(!broke.is_empty(), "nothing was refused");
    Ok(json!({ "answered": answered, "broke": broke, "silent": silent }))
}

/// Sends many more requests at once than it has credits. The requests wait, and requests of other
/// clients do not.
pub fn over_credit(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let lanes = qpn_bytes(&me.lanes());
    let requests = 200;
    let mut held = Vec::new();
    let slots = me.alloc.replies.len() / SLOT;
    for _ in 0..a.count.max(1) {
        for i in 0..requests {
            me.alloc.send(&me.nic, &lanes, i % slots * SLOT);
        }
        let mut empty = 0;
        for _ in 0..requests {
            // A slot is written several times, so its reply may belong to another request.
            // Therefore the attacker frees every entry of the table below.
            match me.alloc.answer(0, LONG) {
                Answer::Reply(bytes) => match chunk(&bytes, me.terms.chunk_bytes, 2) {
                    Ok(Some(chunk)) => held.push(chunk.entry),
                    _ => empty += 1,
                },
                other => bail!("a request beyond the credits ended with {other:?}"),
            }
        }
        let _ = empty;
        // Frees all entries; the memory node refuses those of other clients.
        let total = me.chunks()?;
        for entry in 0..total {
            let got = me.free_entry(entry)?;
            ensure!(got == status::FREED || got == status::REFUSED, "status {got}");
        }
        held.clear();
    }
    Ok(json!({ "requests": requests * a.count.max(1) as usize }))
}

/// Never polls its CQ, so that the CQ overflows, and posts no receives for its replies.
pub fn never_poll(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let chunk = me.allocate()?;
    // The CQ of an access QP has 256 entries and is never polled.
    let (nic, qp) = (&me.nic, &mut me.access[0]);
    let to = verbs::wqe::Sge { addr: me.local.addr(), len: 8, lkey: me.lkey };
    for _ in 0..40 {
        for _ in 0..16 {
            qp.put(|b| _ = b.rdma_read(remote(chunk.addr, chunk.keys[0]), &[to]).signaled());
        }
        qp.write_doorbell(nic);
        std::thread::sleep(std::time::Duration::from_micros(300));
    }
    me.nic.expect_state(me.access[0].qpn, QpState::Error).context("the CQ overflowed")?;
    // The other lane still works.
    ensure!(me.write(1, remote(chunk.addr, chunk.keys[1]), 64)? == 0, "the other lane");
    // Without a receive the memory node's reply waits, and so do the attacker's later requests.
    let lanes = qpn_bytes(&me.lanes());
    let at = me.alloc.replies.addr();
    let mut request = lanes.clone();
    request.extend(at.to_be_bytes());
    request.extend(me.alloc.rkey.0.to_be_bytes());
    for _ in 0..40 {
        me.alloc.qp.post(&me.nic, |b| _ = b.send_inline(&request));
    }
    ensure!(matches!(me.alloc.answer(0, SHORT), Answer::Silence), "an answer without a receive");
    me.nic.verb(Verb::QueryQp { qpn: me.alloc.qp.qpn })?;
    Ok(json!({}))
}

/// Re-establishes its management connection repeatedly with requests in flight. The memory node
/// must not rewrite a chain before a running instance has finished; otherwise a chunk is lost.
pub fn reset_storm(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let lanes = qpn_bytes(&me.lanes());
    let mut random = Random::new(a.seed);
    let total = me.chunks()?;
    for round in 0..a.count.max(1) {
        for i in 0..1 + random.below(16) as usize {
            me.alloc.send(&me.nic, &lanes, i * SLOT);
            let entry = random.below(total as u64) as u32;
            me.free.send(&me.nic, &entry.to_be_bytes()[1..], i * SLOT);
        }
        for _ in 0..random.below(200) {
            std::hint::spin_loop();
        }
        me.recover_management()?;
        if round % 16 == 15 {
            // The attacker does not know its chunks, so it tries to free every entry.
            for entry in 0..total {
                me.free_entry(entry)?;
            }
        }
    }
    Ok(json!({ "resets": a.count.max(1) }))
}
