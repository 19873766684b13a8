//! Attacks on the free chain: the guard window is the proof of ownership (OneSidedMW §4.4).

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use crate::Arguments;
use crate::compute::{Answer, Compute, LONG, SLOT, status};

/// Frees chunks of victims.
pub fn foreign(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let mut refused = 0;
    for round in 0..a.count.max(1) {
        for chunk in &a.of {
            let got = me.free_entry(chunk.entry)?;
            ensure!(got == status::REFUSED, "freeing another's entry gave status {got}");
            refused += 1;
        }
        // A refusal must not affect the attacker's own later requests.
        if round % 8 == 0 {
            let own = me.allocate()?;
            me.release(&own)?;
        }
    }
    Ok(json!({ "refused": refused }))
}

/// Frees its own chunks twice: sequentially, and with the first free still in flight.
pub fn double(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let rounds = a.count.max(1);
    let mut refused = 0;
    for _ in 0..rounds {
        let chunk = me.allocate()?;
        me.release(&chunk)?;
        let got = me.free_entry(chunk.entry)?;
        ensure!(got == status::REFUSED, "the second free gave status {got}");
        refused += 1;
    }
    for round in 0..rounds {
        let chunk = me.allocate()?;
        let at_once = 2 + round % 14;
        let freed = free_at_once(&mut me, chunk.entry, at_once as usize)?;
        ensure!(freed == 1, "{freed} of {at_once} concurrent frees of one chunk were executed");
        refused += at_once - 1;
    }
    // The entry is free now; its next owner must not lose the chunk to a late free.
    Ok(json!({ "refused": refused }))
}

/// Sends `n` frees of one entry at once, and repeats those with status AGAIN. Returns the number of
/// executed frees.
fn free_at_once(me: &mut Compute, entry: u32, n: usize) -> Result<u32> {
    let arguments = entry.to_be_bytes();
    let slots: Vec<usize> = (0..n).map(|i| i * SLOT).collect();
    for &slot in &slots {
        me.free.send(&me.nic, &arguments[1..], slot);
    }
    let mut answers = Vec::new();
    for &slot in &slots {
        match me.free.answer(slot, LONG) {
            Answer::Reply(bytes) => answers.push(bytes[7]),
            other => bail!("a concurrent free ended with {other:?}"),
        }
    }
    let mut freed = 0;
    for answer in answers {
        match answer {
            status::FREED => freed += 1,
            status::REFUSED => {}
            // Not executed. By now the chunk is free or belongs to another client.
            status::AGAIN => freed += (me.free_entry(entry)? == status::FREED) as u32,
            other => bail!("status {other}"),
        }
    }
    Ok(freed)
}

/// Frees invalid entries: the null entry, and entries beyond the table.
pub fn unknown(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let chunks = a.count as u32;
    let mut refused = 0;
    for entry in [chunks, chunks + 1, chunks + 2, chunks * 2, 0x00ff_ff00, 0x00ff_fffe, 0x00ff_ffff]
    {
        let got = me.free_entry(entry)?;
        ensure!(got == status::REFUSED, "freeing entry {entry:#x} of {chunks} gave status {got}");
        refused += 1;
    }
    let own = me.allocate()?;
    me.release(&own)?;
    Ok(json!({ "refused": refused }))
}

/// Many compute nodes send a free that stops their chain at the same time. Each stop flushes a
/// whole lap of WQEs into the single CQ that notifies the memory node's CPU.
pub fn all_stop_at_once(a: &Arguments) -> Result<Value> {
    let mut nodes = Vec::new();
    while (nodes.len() as u64) < a.count {
        match Compute::join(a) {
            Ok(me) => nodes.push(me),
            Err(e) if nodes.len() > 1 && e.to_string().contains("connected") => break,
            Err(e) => return Err(e),
        }
    }
    a.ready()?;
    let rounds = 3;
    for _ in 0..rounds {
        for me in &mut nodes {
            me.free.send(&me.nic, &[0xff; 3], 0);
        }
        for (i, me) in nodes.iter_mut().enumerate() {
            match me.free.answer(0, LONG) {
                Answer::Reply(bytes) if bytes[7] == status::REFUSED => {}
                other => bail!("compute node {i}: an invalid free ended with {other:?}"),
            }
        }
    }
    Ok(json!({ "compute_nodes": nodes.len(), "refused": nodes.len() * rounds }))
}
