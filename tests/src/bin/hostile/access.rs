//! Attacks on chunks: victims' keys, out-of-bounds ranges, revoked keys, remaining data.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use verbs::Access;
use verbs::cqe::Syndrome;
use verbs::wqe::{Builder, Sge};

use crate::compute::{Chunk, Compute, LONG, remote, status};
use units::Random;

use crate::Arguments;

/// Tries all 256 tags of the victims' keys, over both of the attacker's lanes, with READ, WRITE and
/// FAA.
pub fn tags(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let mut refused = 0;
    for chunk in &a.of {
        for key in &chunk.keys {
            for tag in 0..=255u32 {
                let at = remote(chunk.addr, key & !0xff | tag);
                let lane = tag as usize % 2;
                let local = me.sge(64, 8);
                let got = match tag % 3 {
                    0 => me.read(lane, at, 8)?,
                    1 => me.write(lane, at, 8)?,
                    _ => me.access(lane, |b| _ = b.fetch_add(at, 1, local))?,
                };
                ensure!(got == Syndrome::RemoteAccess as u8, "key {:#x}: {got:#x}", at.rkey.0);
                refused += 1;
            }
            // The right key, over the lanes that an incomplete check might accept.
            for lane in 0..2 {
                for len in [1, 8, 64, chunk.len as u32] {
                    let got = me.read(lane, remote(chunk.addr, *key), len)?;
                    ensure!(got == Syndrome::RemoteAccess as u8, "{len} bytes: {got:#x}");
                    refused += 1;
                }
            }
        }
    }
    Ok(json!({ "tried": refused }))
}

/// Reads and writes around the borders of its own chunk; the adjacent chunks belong to victims.
pub fn borders(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    // One WQE names this memory several times, so that long accesses are not refused because of
    // their local side.
    let long = me.nic.memory(LONG_SGE)?;
    let long_key = me.nic.register(me.pd, &long, Access::LOCAL_ALL)?;
    a.ready()?;
    let chunk = me.allocate()?;
    let mut random = Random::new(a.seed);
    let (mut granted, mut refused) = (0, 0);
    let edges = [chunk.addr, chunk.addr + chunk.len];
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for edge in edges {
        for before in [0u64, 1, 2, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097] {
            for len in [1u64, 2, 8, 9, 64, 4096, 8192] {
                ranges.push((edge - before, len));
                ranges.push((edge + before, len));
            }
        }
    }
    ranges.extend([
        (chunk.addr, chunk.len),
        (chunk.addr, chunk.len + 1),
        (chunk.addr - 1, chunk.len + 1),
        (chunk.addr - 1, chunk.len + 2),
        (chunk.addr, 1 << 31),
        (chunk.addr, (1 << 31) - 1),
        (chunk.addr + 1, (1 << 31) - 1),
        (u64::MAX, 1),
        (u64::MAX, 2),
        (u64::MAX - 7, 8),
        (u64::MAX - 7, 16),
        (u64::MAX - 100, 1 << 31),
        (0, 1),
        (0, (1 << 31) - 1),
        (chunk.addr | 1 << 63, 8),
        (chunk.addr ^ 1 << 47, 8),
        (chunk.addr + (1 << 32), 8),
        (chunk.addr.wrapping_sub(1 << 32), 8),
        (0u64.wrapping_sub(chunk.len), chunk.len),
    ]);
    for (addr, len) in ranges {
        let inside = addr >= chunk.addr
            && addr.checked_add(len).is_some_and(|end| end <= chunk.addr + chunk.len);
        let at = remote(addr, chunk.keys[0]);
        let local = long_sges(&long, long_key, len);
        let read = random.below(2) == 0;
        let got = me.access(0, |b| {
            if read {
                b.rdma_read(at, &local)
            } else {
                b.rdma_write(at, &local)
            };
        })?;
        ensure!((got == 0) == inside, "{len} bytes at {addr:#x} of {chunk:?}: {got:#x}");
        granted += inside as u32;
        refused += !inside as u32;
    }
    // An access of zero bytes moves nothing, so the NIC checks no range.
    for addr in [chunk.addr - 1, chunk.addr + chunk.len, 0, u64::MAX] {
        let none = Sge { len: 0, ..me.sge(0, 0) };
        let got = me.access(0, |b| _ = b.rdma_write(remote(addr, chunk.keys[0]), &[none]))?;
        ensure!(got == 0, "0 bytes at {addr:#x}: {got:#x}");
    }
    for at in [chunk.addr - 8, chunk.addr + chunk.len, chunk.addr + 4, chunk.addr + chunk.len - 4] {
        let old = me.sge(0, 8);
        let add = |b: &mut Builder| _ = b.fetch_add(remote(at, chunk.keys[0]), 1, old);
        ensure!(me.access(0, add)? != 0, "an atomic at {at:#x} of {chunk:?}");
        let wide = |b: &mut Builder| {
            b.masked_compare_swap(remote(at, chunk.keys[0]), (0, 0), (u64::MAX, u64::MAX), old);
        };
        ensure!(me.access(0, wide)? != 0, "a masked atomic at {at:#x} of {chunk:?}");
        refused += 2;
    }
    me.release(&chunk)?;
    Ok(json!({ "granted": granted, "refused": refused }))
}

/// Bytes of an SGE. As many such SGEs as fit into a WQE name more than 2^31 bytes.
const LONG_SGE: usize = 36 << 20;

/// A list of SGEs of `len` bytes in total, all in the same memory.
fn long_sges(memory: &verbs::DmaMemory, lkey: verbs::Key, len: u64) -> Vec<Sge> {
    let mut left = len;
    let mut list = Vec::new();
    while left > 0 {
        let part = left.min(LONG_SGE as u64);
        list.push(Sge { addr: memory.addr(), len: part as u32, lkey });
        left -= part;
    }
    list
}

/// Frees a chunk while its own WRITEs to the chunk are in flight, and keeps using the key. The next
/// owner of the chunk (a victim, or the attacker) must find zeros, and the old key must be revoked.
pub fn reuse(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    me.local.write(4096, &vec![0xee; 64 << 10]);
    let (mut late, mut dead) = (0, 0);
    for round in 0..a.count.max(1) {
        let chunk = me.allocate()?;
        let old = remote(chunk.addr, chunk.keys[0]);
        let from = me.sge(4096, (chunk.len as u32).min(64 << 10));
        let slot = me.free.slot();
        let qp = &mut me.access[0];
        for i in 0..48 {
            qp.put(|b| {
                b.rdma_write(old, &[from]);
                if i == 47 {
                    b.signaled();
                }
            });
        }
        // The free is posted before, between or after the WRITEs.
        if round % 3 == 0 {
            qp.write_doorbell(&me.nic);
        }
        me.free.send(&me.nic, &chunk.entry.to_be_bytes()[1..], slot);
        me.access[0].write_doorbell(&me.nic);
        match me.free.answer(slot, LONG) {
            crate::compute::Answer::Reply(bytes) if bytes[7] == status::FREED => {}
            other => bail!("a free ended with {other:?}"),
        }
        // The chunk is released: accesses through the old key must have no effect from now on.
        let next = me.allocate_again()?;
        match me.access[0].wait(LONG).context("the WRITEs did not end")?.error {
            None => late += 1,
            Some(_) => dead += 1,
        }
        me.recover(0)?;
        let got = me.read(0, old, 8)?;
        ensure!(got == Syndrome::RemoteAccess as u8, "a revoked key: {got:#x}");
        if let Some(next) = next {
            ensure!(me.is_zero(&next)?, "round {round}: a late WRITE reached the next owner");
            me.release(&next)?;
        }
    }
    ensure!(dead > 0, "no WRITE was late: {late} rounds ended before the free");
    Ok(json!({ "writes_before_the_free": late, "cut_off_by_it": dead }))
}

impl Compute {
    /// Allocates a chunk, possibly the one that was just freed; `None` if the pool is empty.
    fn allocate_again(&mut self) -> Result<Option<Chunk>> {
        let lanes = self.lanes();
        self.allocate_for(&lanes)
    }

    /// True if a chunk is all zeros.
    pub fn is_zero(&mut self, chunk: &Chunk) -> Result<bool> {
        let len = (chunk.len as usize).min(self.local.len() - 4096);
        self.local.write(4096, &vec![0xff; len]);
        let got = self.read(0, remote(chunk.addr, chunk.keys[0]), len as u32)?;
        ensure!(got == 0, "reading a new chunk: {got:#x}");
        let mut out = vec![0; len];
        self.local.read(4096, &mut out);
        Ok(out.iter().all(|b| *b == 0))
    }
}

/// Allocates chunks, fills them with a pattern, and waits to be killed.
pub fn spoil(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let lanes = me.lanes();
    me.local.write(4096, &vec![0xaa; me.local.len() - 4096]);
    let mut chunks = Vec::new();
    while (chunks.len() as u64) < a.count {
        let Some(chunk) = me.allocate_for(&lanes)? else { break };
        let len = chunk.len as u32;
        ensure!(me.write(0, remote(chunk.addr, chunk.keys[0]), len)? == 0, "spoiling");
        chunks.push(chunk);
    }
    // More WRITEs than the NIC can execute before the process is killed.
    let from = me.sge(4096, chunks.first().map_or(8, |c| c.len as u32));
    for (i, chunk) in chunks.iter().cycle().take(60).enumerate() {
        let qp = &mut me.access[i % 2];
        qp.put(|b| _ = b.rdma_write(remote(chunk.addr, chunk.keys[i % 2]), &[from]));
    }
    let report = json!({ "spoiled": chunks.len() });
    println!("{report}");
    me.access[0].write_doorbell(&me.nic);
    me.access[1].write_doorbell(&me.nic);
    a.wait()?;
    bail!("the test must kill this process");
}

/// Allocates every chunk as soon as possible and checks that it contains no data of other clients.
pub fn scavenge(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let lanes = me.lanes();
    let deadline = std::time::Instant::now() + LONG;
    let mut chunks = Vec::new();
    while (chunks.len() as u64) < a.count {
        match me.allocate_for(&lanes)? {
            Some(chunk) => {
                ensure!(me.is_zero(&chunk)?, "chunk {} shows another's bytes", chunk.entry);
                chunks.push(chunk);
            }
            None => ensure!(std::time::Instant::now() < deadline, "only {} chunks", chunks.len()),
        }
    }
    for chunk in &chunks {
        me.release(chunk)?;
    }
    Ok(json!({ "all_zero": chunks.len() }))
}
