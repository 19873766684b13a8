//! Attacks with keys. Keys follow from keys: a bind advances the tag of a window by one, the next
//! registration at an index that of a region, and a tag has 8 bits. The protection domain of each
//! compute node closes its windows and regions to all others.

use anyhow::{Result, ensure};
use granary_tests::record::DOMAIN;
use pool::Others;
use serde_json::{Value, json};
use verbs::Key;
use verbs::cqe::Syndrome;
use verbs::wqe::Remote;

use super::node::{LANES, Node, acquire, exclusive, keys, place, shared_read};
use crate::Arguments;
use crate::compute::remote;

const BYTES: u64 = 256;
const LONG_US: u64 = 100_000_000;
const REFUSED: u8 = Syndrome::RemoteAccess as u8;
const LOCAL: u8 = Syndrome::LocalQpOperation as u8;

/// Tries all 256 tags of foreign keys: of `--count` chunks of a victim, and of the next holder of
/// its own object. With a key for each lane, the lanes take turns.
pub fn foreign(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, Some(DOMAIN))?;
    let mut next = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let mut tried = 0;
    for (number, chunk) in a.of.iter().take(a.count as usize).enumerate() {
        let mut keys = chunk.keys.clone();
        keys.dedup();
        // A type-1 window or a region opens to every QP of its compute node, so that all lanes have
        // its key. A type-2 window opens to one QP.
        ensure!(keys.len() == if me.has_key_per_lane { LANES } else { 1 }, "{chunk:?}");
        tried += all_tags(&mut me, remote(chunk.addr, keys[number % keys.len()]))?;
    }
    // The holder before knows the window's next keys, if the window is handed over.
    let mine = me.allocate(BYTES, Others::Write, exclusive(LONG_US))?;
    for round in 0..4 {
        me.revoke(mine.permission)?;
        let theirs = next.granted(acquire(exclusive(LONG_US), mine.object, BYTES))?;
        ensure!(theirs.address == mine.address, "another range: {theirs:?}");
        for by in 0..=3 {
            for key in keys(&mine) {
                let rkey = Key::new(key.index(), key.tag().wrapping_add(by));
                for qp in 0..me.access.len() {
                    refuse_all(&mut me, qp, Remote { addr: mine.address, rkey })?;
                    tried += 3;
                }
            }
        }
        if round == 0 {
            tried += all_tags(&mut me, place(&theirs, LANES - 1))?;
        }
        for qp in 0..next.access.len() {
            ensure!(next.write(qp, place(&theirs, qp))? == 0, "the holder's own key on QP {qp}");
        }
        next.revoke(theirs.permission)?;
    }
    me.free(mine.object)?;
    Ok(json!({ "tried": tried }))
}

/// Tries all tags of a key. Returns the number of accesses.
fn all_tags(me: &mut Node, at: Remote) -> Result<u32> {
    for tag in 0..=255 {
        let at = Remote { rkey: Key::new(at.rkey.index(), tag), ..at };
        let qp = tag as usize % me.access.len();
        let local = me.sge(8);
        let got = match tag % 3 {
            0 => me.read(qp, at)?,
            1 => me.write(qp, at)?,
            _ => me.access(qp, |b| _ = b.fetch_add(at, 1, local))?,
        };
        ensure!(got == REFUSED, "key {}: {got:#x}", at.rkey);
    }
    Ok(256)
}

/// READ, WRITE and FAA must be refused.
fn refuse_all(me: &mut Node, qp: usize, at: Remote) -> Result<()> {
    let local = me.sge(8);
    let got =
        [me.read(qp, at)?, me.write(qp, at)?, me.access(qp, |b| _ = b.fetch_add(at, 1, local))?];
    ensure!(got == [REFUSED; 3], "key {} on QP {qp}: {got:x?}", at.rkey);
    Ok(())
}

/// Uses a permission for reading to write, and permissions beyond their ranges and ends.
pub fn rights(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let first = me.allocate(BYTES, Others::Read, shared_read(LONG_US))?;
    let mut refused = 0;
    for qp in 0..me.access.len() {
        let at = place(&first, qp);
        ensure!(me.read(qp, at)? == 0, "a READ under a permission for reading");
        let local = me.sge(8);
        let got = [
            me.write(qp, at)?,
            me.access(qp, |b| _ = b.fetch_add(at, 1, local))?,
            me.access(qp, |b| _ = b.compare_swap(at, 0, 1, local))?,
        ];
        ensure!(got == [REFUSED; 3], "writes under a permission for reading: {got:x?}");
        let got = me.access(qp, |b| {
            b.masked_compare_swap(at, (0, 0), (u64::MAX, u64::MAX), local);
        })?;
        // RoCEv2 has no masked atomics, so the attacker's own NIC refuses them.
        let expected = if a.remote.is_some() { LOCAL } else { REFUSED };
        ensure!(got == expected, "a masked CAS under a permission for reading: {got:#x}");
        refused += 4;
        let of_other_lane = me.read(qp, place(&first, qp + 1))?;
        let expected = if me.has_key_per_lane { REFUSED } else { 0 };
        ensure!(of_other_lane == expected, "the other lane's key on QP {qp}: {of_other_lane:#x}");
    }
    me.revoke(first.permission)?;
    // A permission for a part of the object, in the middle.
    let part = schemes::patronus::message::Ask::Acquire {
        terms: exclusive(LONG_US),
        object: first.object,
        offset: 64,
        len: 64,
    };
    let part = me.granted(part)?;
    for (at, is_inside) in [(0, true), (56, true), (57, false), (64, false)] {
        let at = Remote { addr: part.address + at, ..place(&part, 0) };
        ensure!((me.write(0, at)? == 0) == is_inside, "a WRITE at {:#x} of {part:?}", at.addr);
    }
    for before in [1, 8, 64] {
        let at = Remote { addr: part.address - before, ..place(&part, 1) };
        ensure!(me.read(1, at)? == REFUSED, "a READ {before} bytes before {part:?}");
        refused += 1;
    }
    me.revoke(part.permission)?;
    refuse_all(&mut me, 0, place(&part, 0))?;
    me.free(first.object)?;
    Ok(json!({ "refused": refused + 5 }))
}
