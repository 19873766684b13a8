//! Attacks with requests: what is not the attacker's own, stale names, impossible values.

use anyhow::{Context, Result, bail, ensure};
use granary_tests::record::DOMAIN;
use pool::{DomainToken, Others, Right, Sharing};
use schemes::patronus::message::{Ask, AskTerms, ObjectId, Outcome, PermissionNumber};
use serde_json::{Value, json};
use units::Random;

use super::node::{Node, acquire, exclusive, shared_read, terms};
use crate::Arguments;
use crate::compute::SHORT;

const BYTES: u64 = 256;
const LONG_US: u64 = 100_000_000;
const NO_SUCH: Outcome = Outcome::NoSuchObject;

/// Requests for objects and permissions of other compute nodes, from within and without the domain.
pub fn foreign(a: &Arguments) -> Result<Value> {
    let mut strangers = Vec::new();
    if a.remote.is_some() {
        // From another host a domain must be one of the memory node's.
        let refusal = Node::join(a, Some(DomainToken([0xaa; 32]))).err();
        let why = refusal.context("a compute node was admitted to an unknown domain")?.to_string();
        ensure!(why.contains("not one of the memory node's"), "{why}");
    }
    for domain in [None, Some(DomainToken([0; 32])), Some(DomainToken([0xff; 32]))] {
        strangers.push(Node::join(a, domain)?);
    }
    let mut member = Node::join(a, Some(DOMAIN))?;
    let mut other = Node::join(a, Some(DOMAIN))?;
    a.ready()?;
    let victim = a.object.context("the attack needs an object (--object)")?;
    let (object, len) =
        (ObjectId { entry: victim.entry, generation: victim.generation }, victim.len);
    let mut refused = 0;
    for stranger in &mut strangers {
        for terms in [shared_read(LONG_US), exclusive(LONG_US)] {
            stranger.expect(acquire(terms, object, len), NO_SUCH)?;
            refused += 1;
        }
        stranger.expect(Ask::Free { object }, NO_SUCH)?;
        refused += 1 + names(stranger, a, victim.entry)?;
    }
    // A member of the domain, to whom the allocator gave less: Read, Write, but not Own.
    let (free, read) = (Outcome::Done, shared_read(LONG_US));
    for (others, right) in [
        (Others::None, None),
        (Others::Read, Some(Right::Read)),
        (Others::Write, Some(Right::Write)),
    ] {
        let theirs = other.allocate(BYTES, others, read)?;
        for wanted in [Right::Read, Right::Write] {
            if right.is_none_or(|right| wanted > right) {
                let ask = acquire(terms(wanted, Sharing::Shared, LONG_US), theirs.object, BYTES);
                member.expect(ask, NO_SUCH)?;
                refused += 1;
            }
        }
        member.expect(Ask::Free { object: theirs.object }, NO_SUCH)?;
        refused += 1 + stale(&mut member, theirs.object)?;
        // Numbers are those of one compute node: the same number is none of the attacker's.
        for permission in [theirs.permission, PermissionNumber(u64::MAX), PermissionNumber(0)] {
            for ask in [
                Ask::Revoke { permission },
                Ask::Renew { permission, lease_us: LONG_US },
                Ask::Extend { permission, lifetime_us: LONG_US },
            ] {
                member.expect(ask, Outcome::NotYours)?;
                refused += 1;
            }
        }
        other.expect(Ask::Free { object: theirs.object }, free)?;
        // The name is stale now.
        for node in [&mut member, &mut other] {
            node.expect(acquire(read, theirs.object, BYTES), NO_SUCH)?;
            node.expect(Ask::Free { object: theirs.object }, NO_SUCH)?;
            refused += 2;
        }
    }
    Ok(json!({ "refused": refused }))
}

/// Guessed names of objects, and grants of victims.
fn names(me: &mut Node, a: &Arguments, entries: u32) -> Result<u32> {
    let mut tried = 0;
    for entry in (0..entries + 8).chain([u32::MAX, 1 << 24, 1 << 31]) {
        for generation in [0, 1, u32::MAX] {
            let object = ObjectId { entry, generation };
            me.expect(acquire(shared_read(LONG_US), object, 8), NO_SUCH)?;
            me.expect(Ask::Free { object }, NO_SUCH)?;
            tried += 2;
        }
    }
    for chunk in &a.of {
        for address in [chunk.addr, 0, u64::MAX, chunk.addr + 1] {
            let free = Ask::FreeGrant { entry: chunk.entry, address };
            me.expect(free, Outcome::NotYours)?;
            tried += 1;
        }
    }
    Ok(tried)
}

/// Other generations of an object that exists, and ranges over its end.
fn stale(me: &mut Node, object: ObjectId) -> Result<u32> {
    let by = |n: u32| ObjectId { generation: object.generation.wrapping_add(n), ..object };
    let mut tried = 0;
    for object in [by(1), by(2), by(u32::MAX), by(1 << 31)] {
        me.expect(acquire(shared_read(LONG_US), object, BYTES), NO_SUCH)?;
        me.expect(Ask::Free { object }, NO_SUCH)?;
        tried += 2;
    }
    for (offset, len) in [
        (0, BYTES + 1),
        (BYTES, 1),
        (BYTES - 1, 2),
        (1, BYTES),
        (u64::MAX - 8, 8),
        (0, u64::MAX),
        (1 << 63, 1 << 62),
    ] {
        me.expect(Ask::Acquire { terms: shared_read(LONG_US), object, offset, len }, NO_SUCH)?;
        tried += 1;
    }
    Ok(tried)
}

/// Requests with impossible values, unknown operations, random bytes, and of wrong lengths.
pub fn malformed(a: &Arguments) -> Result<Value> {
    let mut me = Node::join(a, None)?;
    a.ready()?;
    let own = me.allocate(BYTES, Others::None, exclusive(LONG_US))?;
    let mut refused = 0;
    let bad = Outcome::BadRequest;
    let allocate = |terms, bytes, others| Ask::Allocate { terms, bytes, others };
    let in_group = |group| AskTerms { group: pool::GroupId(group), ..exclusive(LONG_US) };
    for ask in [
        allocate(exclusive(0), BYTES, Others::None),
        allocate(exclusive(LONG_US), 0, Others::None),
        // Without a domain there are no others.
        allocate(exclusive(LONG_US), BYTES, Others::Read),
        allocate(exclusive(LONG_US), BYTES, Others::Own),
        allocate(shared_read(AskTerms::FOREVER), BYTES, Others::None),
        allocate(in_group(1), BYTES, Others::None),
        allocate(in_group(u16::MAX), BYTES, Others::None),
        acquire(exclusive(0), own.object, BYTES),
        acquire(exclusive(AskTerms::FOREVER), own.object, BYTES),
        acquire(in_group(1), own.object, BYTES),
        acquire(exclusive(LONG_US), own.object, 0),
        Ask::Acquire { terms: exclusive(LONG_US), object: own.object, offset: u64::MAX, len: 2 },
        Ask::Renew { permission: own.permission, lease_us: 0 },
        Ask::Renew { permission: own.permission, lease_us: AskTerms::FOREVER },
    ] {
        me.expect(ask, bad)?;
        refused += 1;
    }
    for bytes in [u64::MAX, u64::MAX - 1, 1 << 63, 1 << 40] {
        for lease_us in [LONG_US, AskTerms::FOREVER] {
            match me.ask(allocate(exclusive(lease_us), bytes, Others::None))? {
                Outcome::Empty | Outcome::NoBlock | Outcome::TooMany(..) => refused += 1,
                other => bail!("an object of {bytes} bytes: {other:?}"),
            }
        }
    }
    refused += random_bytes(&mut me, &mut Random::new(a.seed), a.count)?;
    me.revoke(own.permission)?;
    me.free(own.object)?;
    Ok(json!({ "refused": refused }))
}

/// Random bytes in place of requests. Every request of up to 64 bytes is answered; longer ones and
/// other operations break the attacker's own management QP.
fn random_bytes(me: &mut Node, random: &mut Random, count: u64) -> Result<u32> {
    let mut answered = 0;
    for _ in 0..count {
        let (number, mut bytes) = me.request(Ask::Revoke { permission: PermissionNumber(7) });
        // An operation that does not exist, so that the random values change nothing.
        for at in (0..8).chain(16..64) {
            bytes[at] = random.bits() as u8;
        }
        bytes[0] = 8 + bytes[0] % 248;
        me.send_bytes(&bytes);
        let got = me.reply(number)?;
        ensure!(got == Outcome::BadRequest, "{bytes:?}: {got:?}");
        answered += 1;
    }
    for len in [0usize, 1, 8, 16, 63] {
        let (_, bytes) = me.request(Ask::Revoke { permission: PermissionNumber(7) });
        me.send_bytes(&bytes[..len]);
        // The number is incomplete, or left from an earlier request: no reply is expected to match.
        ensure!(me.any_reply()?.outcome == Outcome::BadRequest, "a request of {len} bytes");
        answered += 1;
    }
    for len in [65, 80, 200, 900] {
        me.send_bytes(&vec![1; len]);
        let broke = me.reply_within(u64::MAX, SHORT);
        ensure!(broke.is_err() || broke.is_ok_and(|got| got.is_none()), "a request of {len} bytes");
        me.recover_management()?;
    }
    Ok(answered)
}
