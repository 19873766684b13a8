//! Which code executes a data command, and which keys it has.

use redis_formats::command::{Id, keys as keys_of};

use super::call::{Body, Call};
use super::{bitfield, bits, expiry, keys, lcs, numbers, strings};

/// The execution of a command whose keys are among its arguments.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub body: Body,
    /// False: whether the key is there, and its expiry, suffice.
    pub needs_value: bool,
}

const fn with_value(body: Body) -> Option<Plan> {
    Some(Plan { body, needs_value: true })
}

const fn without_value(body: Body) -> Option<Plan> {
    Some(Plan { body, needs_value: false })
}

/// The plan of a command, unless the command concerns whole databases.
pub(super) fn plan(call: &Call<'_>) -> Option<Plan> {
    match call.command.id {
        Id::Get => with_value(strings::get),
        Id::Set => {
            let gets = (3..call.args.count()).any(|at| call.args.is(at, "get"));
            Some(Plan { body: strings::set, needs_value: gets })
        }
        Id::Setnx => without_value(strings::setnx),
        Id::Setex => without_value(strings::setex),
        Id::Psetex => without_value(strings::psetex),
        Id::Getset => with_value(strings::getset),
        Id::Getdel => with_value(strings::getdel),
        Id::Getex => with_value(strings::getex),
        Id::Mget => with_value(strings::mget),
        Id::Mset => without_value(strings::mset),
        Id::Msetnx => without_value(strings::msetnx),
        Id::Strlen => with_value(strings::strlen),
        Id::Append => with_value(strings::append),
        Id::Getrange | Id::Substr => with_value(strings::getrange),
        Id::Setrange => with_value(strings::setrange),
        Id::Incr => with_value(numbers::incr),
        Id::Decr => with_value(numbers::decr),
        Id::Incrby => with_value(numbers::incrby),
        Id::Decrby => with_value(numbers::decrby),
        Id::Incrbyfloat => with_value(numbers::incrbyfloat),
        Id::Lcs => with_value(lcs::lcs),
        Id::Setbit => with_value(bits::setbit),
        Id::Getbit => with_value(bits::getbit),
        Id::Bitcount => with_value(bits::bitcount),
        Id::Bitpos => with_value(bits::bitpos),
        Id::Bitop => with_value(bits::bitop),
        Id::Bitfield | Id::BitfieldRo => with_value(bitfield::bitfield),
        Id::Del | Id::Unlink => without_value(keys::del),
        Id::Exists => without_value(keys::exists),
        // Reading the value is a use.
        Id::Touch => with_value(keys::exists),
        Id::Type => without_value(keys::kind),
        Id::Rename | Id::Renamenx => with_value(keys::rename),
        Id::Copy => with_value(keys::copy),
        Id::Move => with_value(keys::relocate),
        Id::Expire | Id::Pexpire | Id::Expireat | Id::Pexpireat => without_value(expiry::expire),
        Id::Persist => without_value(expiry::persist),
        Id::Ttl | Id::Pttl | Id::Expiretime | Id::Pexpiretime => without_value(expiry::ttl),
        Id::ObjectEncoding => with_value(keys::object_encoding),
        Id::ObjectRefcount => with_value(keys::object_refcount),
        Id::MemoryUsage => with_value(keys::memory_usage),
        Id::Dump => with_value(keys::dump),
        Id::Restore => without_value(keys::restore),
        _ => None,
    }
}

/// A key of a command: the database as clients see it, and the index of the argument.
pub(super) type KeyAt = (u8, usize);

/// The keys of a command, in their order.
pub(super) fn keys(call: &Call<'_>) -> Vec<KeyAt> {
    let found = keys_of(call.command, &call.args).filter_map(Result::ok);
    let mut keys: Vec<KeyAt> = found.map(|key| (call.db, key.index)).collect();
    match call.command.id {
        Id::Move => keys.push((keys::target_db(call), 1)),
        Id::Copy => keys[1].0 = keys::target_db(call),
        _ => {}
    }
    keys
}

/// The index of the only key of a command, if there is one key only.
pub(super) fn only_key(call: &Call<'_>) -> Option<usize> {
    if call.command.id == Id::Move {
        return None;
    }
    let mut found = keys_of(call.command, &call.args).filter_map(Result::ok);
    let first = found.next()?.index;
    found.next().is_none().then_some(first)
}

/// For each key the number of its cell, and for each cell the number of its first key.
pub(super) fn cells_of(keys: &[(u8, &[u8])]) -> (Vec<usize>, Vec<usize>) {
    let mut firsts = Vec::with_capacity(keys.len());
    let mut numbers = std::collections::HashMap::with_capacity(keys.len());
    let of = keys.iter().enumerate().map(|(number, key)| {
        *numbers.entry(*key).or_insert_with(|| {
            firsts.push(number);
            firsts.len() - 1
        })
    });
    (of.collect(), firsts)
}
