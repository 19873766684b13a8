//! Attacks on lifetime words (Patronus §5.3): the word of a permission is a wish of its holder, and
//! reaches no other compute node.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use granary_tests::record::DOMAIN;
use pool::Others;
use schemes::patronus::message::{Lifetime, Outcome};
use serde_json::{Value, json};
use verbs::cqe::Syndrome;
use verbs::wqe::Remote;

use super::node::{Node, acquire, exclusive, place};
use crate::Arguments;
use crate::compute::{LONG, SHORT};

const BYTES: u64 = 256;
/// Longer than the longest lease.
const LONG_US: u64 = 100_000_000;
const REFUSED: u8 = Syndrome::RemoteAccess as u8;

/// READs, WRITEs and CASes of words: beyond the table, by the wrong QP, of another compute node.
pub fn table(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, Some(DOMAIN))?;
    let other = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let first = me.allocate(BYTES, Others::Write, exclusive(1_000_000))?;
    let slot = u64::from(first.permission.slot());
    let words = u64::from(me.table.lifetimes);
    let mut refused = 0;
    // A WRITE to a word of its own: the window has no right for it.
    let from = me.sge(8);
    let word = me.word(slot);
    let got = me.on_management(|b| _ = b.rdma_write(word, &[from]))?;
    ensure!(got == REFUSED, "a WRITE of a lifetime word: {got:#x}");
    let got = me.swap_word(word, 0, 0)?;
    ensure!(got == (0, first.word.0), "the word after the refused WRITE: {got:x?}");
    refused += 1;
    // Outside of the table.
    for beyond in [words, words + 1, 2 * words, 0u64.wrapping_sub(1), 1 << 40] {
        let at = me.word(beyond);
        let got = me.swap_word(at, 0, 1)?.0;
        ensure!(got == REFUSED, "a CAS of word {beyond:#x} of {words}: {got:#x}");
        let to = me.sge(8);
        let got = me.on_management(|b| _ = b.rdma_read(at, &[to]))?;
        ensure!(got == REFUSED, "a READ of word {beyond:#x} of {words}: {got:#x}");
        refused += 2;
    }
    let crossing = Remote { addr: me.word(words).addr - 4, ..word };
    let got = me.swap_word(crossing, 0, 1)?.0;
    ensure!(got != 0, "a CAS across the end of the table");
    // By an access QP: the table is open to the management QP only.
    for qp in 0..me.access.len() {
        let to = me.sge(8);
        let got = me.access(qp, |b| _ = b.compare_swap(word, first.word.0, 0, to))?;
        ensure!(got == REFUSED, "a CAS of a word on access QP {qp}: {got:#x}");
        refused += 1;
    }
    // The table of another compute node, by its key and by the own key.
    for rkey in [other.table.lifetimes_key, me.table.lifetimes_key] {
        for tag in 0..=255u32 {
            let rkey = verbs::Key(rkey & !0xff | tag);
            let at = Remote { addr: other.word(0).addr, rkey };
            let got = me.swap_word(at, 0, 1)?.0;
            ensure!(got == REFUSED, "a CAS of another's word with key {rkey}: {got:#x}");
            refused += 1;
        }
    }
    me.revoke(first.permission)?;
    refused += stale_nonces(&mut me, &first)?;
    me.free(first.object)?;
    Ok(json!({ "refused": refused }))
}

/// CASes with the nonces of earlier permissions change nothing: the slot has a new nonce.
fn stale_nonces(me: &mut Node, first: &schemes::patronus::message::Granted) -> Result<u32> {
    let mut stale = first.word;
    for _ in 0..20 {
        let ask = acquire(exclusive(1_000_000), first.object, BYTES);
        let next = me.granted(ask)?;
        let word = me.word(next.permission.slot().into());
        ensure!(next.permission.slot() == first.permission.slot(), "another slot: {next:?}");
        let (got, old) = me.swap_word(word, stale.0, Lifetime::new(stale.nonce(), 1 << 47).0)?;
        ensure!((got, old) == (0, next.word.0), "word {old:#x} and not {:?}", next.word);
        stale = next.word;
        me.revoke(next.permission)?;
    }
    Ok(20)
}

/// Extends an exclusive permission for ever, with lifetimes up to 2^48 - 1, against a waiter, which
/// gets the object after the longest lease. Then the words of zero, of all ones and with wrong
/// nonces.
pub fn hog(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, Some(DOMAIN))?;
    let mut waiter = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let wishes = [
        |nonce: u16| Lifetime::new(nonce, u64::MAX),
        |nonce: u16| Lifetime::new(nonce, 0),
        |_: u16| Lifetime(u64::MAX),
        |nonce: u16| Lifetime::new(nonce.wrapping_add(1), u64::MAX),
        |nonce: u16| Lifetime::new(nonce.wrapping_sub(1), 1),
    ];
    let (mut swaps, mut waits) = (0u64, Vec::new());
    for wish in wishes {
        let mine = me.allocate(BYTES, Others::Write, exclusive(100_000))?;
        let wish = wish(mine.word.nonce()).0;
        let word = me.word(mine.permission.slot().into());
        // Before there is a waiter, and then against it.
        let mut known = mine.word.0;
        let start = Instant::now();
        let mut number = None;
        let theirs = loop {
            // Each failed CAS returns the present word, with which the next one succeeds: also over
            // the notice, which must be final.
            let (got, old) = me.swap_word(word, known, wish)?;
            ensure!(got == 0, "a CAS of an own word: {got:#x}");
            known = if old == known { wish } else { old };
            swaps += 1;
            let ask = acquire(exclusive(LONG_US), mine.object, BYTES);
            let waiting = *number.get_or_insert_with(|| waiter.send(ask));
            match waiter.reply_within(waiting, SHORT)? {
                None => {}
                Some(Outcome::Granted(granted)) => break granted,
                // The request waits as long as the longest lease, which may have begun at the same
                // moment.
                Some(Outcome::Busy) => number = None,
                Some(other) => bail!("the waiter did not get the object: {other:?}"),
            }
            ensure!(start.elapsed() < LONG, "the waiter does not get the object");
        };
        waits.push(start.elapsed().as_micros() as u64);
        // The holder's key is dead, and the waiter's opens the object.
        let got = me.write(0, place(&mine, 0))?;
        ensure!(got == REFUSED, "a key whose lease has ended: {got:#x}");
        ensure!(waiter.write(0, place(&theirs, 0))? == 0, "the waiter's key");
        waiter.revoke(theirs.permission)?;
        me.free(mine.object)?;
    }
    Ok(json!({ "swaps": swaps, "waits_us": waits }))
}
