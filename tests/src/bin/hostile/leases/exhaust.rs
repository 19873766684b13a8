//! Attacks that use up permissions, objects, waiting requests and QPs, or leave replies unread.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use granary_tests::record::DOMAIN;
use pool::Others;
use schemes::patronus::message::{Limit, Outcome};
use serde_json::{Value, json};
use verbs::cqe::Syndrome;

use super::node::{Node, acquire, exclusive, place, shared_read};
use crate::Arguments;
use crate::compute::{LONG, SHORT, remote};

const BYTES: u64 = 64;
const LONG_US: u64 = 100_000_000;
const REFUSED: u8 = Syndrome::RemoteAccess as u8;

/// Acquires `--count` permissions without using them, allocates objects, and lets requests wait,
/// until each limit answers.
pub fn limits(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, Some(DOMAIN))?;
    let mut other = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let mine = me.allocate(BYTES, Others::Write, shared_read(LONG_US))?;
    let (mut held, mut too_many) = (1u64, 0);
    for _ in 0..a.count {
        match me.ask(acquire(shared_read(LONG_US), mine.object, BYTES))? {
            Outcome::Granted(_) => held += 1,
            Outcome::TooMany(Limit::Permissions, most) => {
                ensure!(held == most, "{held} permissions, but a limit of {most}");
                too_many += 1;
            }
            other => bail!("permission {held}: {other:?}"),
        }
    }
    // The limit is that of each compute node.
    let theirs = other.granted(acquire(shared_read(LONG_US), mine.object, BYTES))?;
    // Requests that wait for all of these permissions.
    let mut waiting = Vec::new();
    let most = loop {
        let number = other.send(acquire(exclusive(LONG_US), mine.object, BYTES));
        match other.reply_within(number, SHORT)? {
            None => waiting.push(number),
            Some(Outcome::TooMany(Limit::Waiting, most)) => break most,
            Some(got) => bail!("waiting request {}: {got:?}", waiting.len()),
        }
        ensure!(waiting.len() < 1000, "no limit of waiting requests");
    };
    ensure!(waiting.len() as u64 == most, "{} requests wait of {most}", waiting.len());
    // A waiting request delays no other request of its compute node.
    other.revoke(theirs.permission)?;
    let objects = fill(&mut other)?;
    me.free(mine.object)?;
    for number in waiting {
        let got = other.reply(number)?;
        ensure!(got == Outcome::NoSuchObject, "a request for a freed object: {got:?}");
    }
    Ok(json!({ "held": held, "too_many": too_many, "waiting": most, "objects": objects }))
}

/// Allocates objects until a limit answers, and frees them.
fn fill(me: &mut Node) -> Result<usize> {
    let mut objects = Vec::new();
    loop {
        match me.ask(schemes::patronus::message::Ask::Allocate {
            terms: exclusive(LONG_US),
            bytes: 16 << 10,
            others: Others::Write,
        })? {
            Outcome::Granted(granted) => objects.push(granted.object),
            Outcome::Empty
            | Outcome::NoBlock
            | Outcome::TooMany(Limit::Bytes | Limit::Objects | Limit::Permissions, _) => break,
            other => bail!("object {}: {other:?}", objects.len()),
        }
    }
    objects.iter().try_for_each(|object| me.free(*object))?;
    Ok(objects.len())
}

/// Sends requests and posts no receives for their replies. The memory node takes back the grants in
/// them.
pub fn deaf(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, Some(DOMAIN))?;
    let mut other = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let theirs = other.allocate(BYTES, Others::Write, shared_read(LONG_US))?;
    other.revoke(theirs.permission)?;
    for round in 0..a.count.max(1) {
        // Within the credits, and far beyond them.
        for _ in 0..if round % 2 == 0 { 8 } else { 200 } {
            let (_, bytes) = me.request(acquire(shared_read(LONG_US), theirs.object, BYTES));
            me.send_without_receive(&bytes);
        }
        // The memory node serves others meanwhile.
        let own = other.granted(acquire(shared_read(LONG_US), theirs.object, BYTES))?;
        other.revoke(own.permission)?;
        me.recover_management()?;
        // An exclusive permission is granted once all that was not delivered has ended.
        let own = other.granted(acquire(exclusive(LONG_US), theirs.object, BYTES))?;
        other.revoke(own.permission)?;
    }
    other.free(theirs.object)?;
    Ok(json!({ "rounds": a.count.max(1) }))
}

/// Breaks its access QPs until none is left, again and again, for `--ms`. Its permission stays good
/// on each QP that is re-established. Permissions end and begin while these QPs are broken.
pub fn breaks(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, Some(DOMAIN))?;
    let mut other = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let mut own = me.allocate(BYTES, Others::Write, exclusive(LONG_US))?;
    let (start, mut broken) = (Instant::now(), 0);
    while start.elapsed() < a.time || broken == 0 {
        broken += break_all(&mut me, a)?;
        for qp in 0..me.access.len() {
            me.recover(qp)?;
            ensure!(me.write(qp, place(&own, qp))? == 0, "its own key on QP {qp} after a break");
        }
        // Windows of type 2 are unbound over the QPs that are broken.
        broken += break_all(&mut me, a)?;
        me.revoke(own.permission)?;
        let theirs = other.granted(acquire(exclusive(LONG_US), own.object, BYTES))?;
        for qp in 0..me.access.len() {
            me.recover(qp)?;
            let got = me.write(qp, place(&own, qp))?;
            ensure!(got == REFUSED, "a key that was revoked while QP {qp} was broken: {got:#x}");
        }
        ensure!(other.write(0, place(&theirs, 0))? == 0, "the next holder's key");
        other.revoke(theirs.permission)?;
        // Windows are bound while their QPs are re-established.
        broken += break_all(&mut me, a)?;
        let number = me.send(acquire(exclusive(LONG_US), own.object, BYTES));
        (0..me.access.len()).try_for_each(|qp| me.recover(qp))?;
        own = match me.reply(number)? {
            Outcome::Granted(granted) => granted,
            other => bail!("a request with broken QPs: {other:?}"),
        };
        for qp in 0..me.access.len() {
            ensure!(me.write(qp, place(&own, qp))? == 0, "a new key on QP {qp} after a break");
        }
    }
    ensure!(start.elapsed() < LONG * 6, "the memory node has slowed down");
    me.free(own.object)?;
    Ok(json!({ "broken": broken, "ms": start.elapsed().as_millis() as u64 }))
}

/// Breaks all access QPs with forged keys. Returns their number.
fn break_all(me: &mut Node, a: &Arguments) -> Result<usize> {
    let chunk = a.of.first().map_or(remote(0, 0), |c| remote(c.addr, c.keys[0]));
    for qp in 0..me.access.len() {
        let from = me.sge(8);
        let got = me.access_once(qp, |b| _ = b.rdma_write(chunk, &[from]))?;
        ensure!(got == REFUSED, "a forged key: {got:#x}");
    }
    Ok(me.access.len())
}
