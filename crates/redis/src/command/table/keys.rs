//! Commands on keys of any type, and transactions.

use super::{Command, Group, Id, command, spec};
use crate::command::bits::category::{CONNECTION, DANGEROUS, KEYSPACE, NONE, TRANSACTION};
use crate::command::bits::flag::{
    ALLOW_BUSY, DENYOOM, FAST, LOADING, NOSCRIPT, READONLY, SKIP_SLOWLOG, STALE, WRITE,
};
use crate::command::bits::key::{ACCESS, DELETE, INSERT, OW, RM, RO, RW, UPDATE};

pub(super) const KEYS: &[Command] = &[
    command(Id::Del, "del", -2, "1.0.0", "Deletes keys.")
        .flags(WRITE)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, -1, 1, &[spec(1, -1, 1, RM | DELETE)])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"]),
    command(Id::Unlink, "unlink", -2, "4.0.0", "Deletes keys and frees their memory later.")
        .flags(WRITE | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, -1, 1, &[spec(1, -1, 1, RM | DELETE)])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"]),
    command(Id::Exists, "exists", -2, "1.0.0", "Counts the keys of a list that exist.")
        .flags(READONLY | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, -1, 1, &[spec(1, -1, 1, RO)])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"]),
    command(Id::Type, "type", 2, "1.0.0", "Returns the type of a key's value.")
        .flags(READONLY | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, 1, 1, &[spec(1, 0, 1, RO)]),
    command(Id::Touch, "touch", -2, "3.2.1", "Renews the time of the last access of keys.")
        .flags(READONLY | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, -1, 1, &[spec(1, -1, 1, RO)])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"]),
    command(
        Id::Rename,
        "rename",
        3,
        "1.0.0",
        "Gives a key another name and replaces a key of that name.",
    )
    .flags(WRITE)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 2, 1, &[spec(1, 0, 1, RW | ACCESS | DELETE), spec(2, 0, 1, OW | UPDATE)]),
    command(
        Id::Renamenx,
        "renamenx",
        3,
        "1.0.0",
        "Gives a key another name if no key has that name.",
    )
    .flags(WRITE | FAST)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 2, 1, &[spec(1, 0, 1, RW | ACCESS | DELETE), spec(2, 0, 1, OW | INSERT)]),
    command(Id::Copy, "copy", -3, "6.2.0", "Copies a value to another key.")
        .flags(WRITE | DENYOOM)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, 2, 1, &[spec(1, 0, 1, RO | ACCESS), spec(2, 0, 1, OW | UPDATE)]),
    command(Id::Move, "move", 3, "1.0.0", "Moves a key to another database.")
        .flags(WRITE | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(Id::Keys, "keys", 2, "1.0.0", "Returns all keys that match a pattern.")
        .flags(READONLY)
        .in_group(Group::Generic, KEYSPACE | DANGEROUS)
        .tips(&["request_policy:all_shards", "nondeterministic_output_order"]),
    command(
        Id::Scan,
        "scan",
        -2,
        "2.8.0",
        "Returns a part of the keys and a cursor for the next part.",
    )
    .flags(READONLY)
    .in_group(Group::Generic, KEYSPACE)
    .tips(&["nondeterministic_output", "request_policy:special"]),
    command(Id::Randomkey, "randomkey", 1, "1.0.0", "Returns a key chosen at random.")
        .flags(READONLY)
        .in_group(Group::Generic, KEYSPACE)
        .tips(&["request_policy:all_shards", "nondeterministic_output"]),
    command(Id::Expire, "expire", -3, "1.0.0", "Sets the expiry of a key as seconds from now.")
        .flags(WRITE | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | UPDATE)]),
    command(
        Id::Pexpire,
        "pexpire",
        -3,
        "2.6.0",
        "Sets the expiry of a key as milliseconds from now.",
    )
    .flags(WRITE | FAST)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 1, 1, &[spec(1, 0, 1, RW | UPDATE)]),
    command(
        Id::Expireat,
        "expireat",
        -3,
        "1.2.0",
        "Sets the expiry of a key as a Unix time in seconds.",
    )
    .flags(WRITE | FAST)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 1, 1, &[spec(1, 0, 1, RW | UPDATE)]),
    command(
        Id::Pexpireat,
        "pexpireat",
        -3,
        "2.6.0",
        "Sets the expiry of a key as a Unix time in milliseconds.",
    )
    .flags(WRITE | FAST)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 1, 1, &[spec(1, 0, 1, RW | UPDATE)]),
    command(Id::Ttl, "ttl", 2, "1.0.0", "Returns the seconds until a key expires.")
        .flags(READONLY | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)])
        .tips(&["nondeterministic_output"]),
    command(Id::Pttl, "pttl", 2, "2.6.0", "Returns the milliseconds until a key expires.")
        .flags(READONLY | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)])
        .tips(&["nondeterministic_output"]),
    command(
        Id::Expiretime,
        "expiretime",
        2,
        "7.0.0",
        "Returns the expiry of a key as a Unix time in seconds.",
    )
    .flags(READONLY | FAST)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(
        Id::Pexpiretime,
        "pexpiretime",
        2,
        "7.0.0",
        "Returns the expiry of a key as a Unix time in milliseconds.",
    )
    .flags(READONLY | FAST)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(Id::Persist, "persist", 2, "2.2.0", "Removes the expiry of a key.")
        .flags(WRITE | FAST)
        .in_group(Group::Generic, KEYSPACE)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | UPDATE)]),
    command(
        Id::Dump,
        "dump",
        2,
        "2.6.0",
        "Returns the value of a key in the format that RESTORE reads.",
    )
    .flags(READONLY)
    .in_group(Group::Generic, KEYSPACE)
    .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)])
    .tips(&["nondeterministic_output"]),
    command(Id::Restore, "restore", -4, "2.6.0", "Creates a key from the output of DUMP.")
        .flags(WRITE | DENYOOM)
        .in_group(Group::Generic, KEYSPACE | DANGEROUS)
        .keys(1, 1, 1, &[spec(1, 0, 1, OW | UPDATE)]),
    command(Id::Object, "object", -2, "2.2.3", "Shows how the server keeps a value.")
        .in_group(Group::Generic, NONE)
        .subcommands(OBJECT_SUBCOMMANDS),
    command(Id::Multi, "multi", 1, "1.2.0", "Starts a transaction.")
        .flags(NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY)
        .in_group(Group::Transactions, TRANSACTION),
    command(Id::Exec, "exec", 1, "1.2.0", "Executes the commands of the transaction.")
        .flags(NOSCRIPT | LOADING | STALE | SKIP_SLOWLOG)
        .in_group(Group::Transactions, TRANSACTION),
    command(Id::Discard, "discard", 1, "2.0.0", "Drops the commands of the transaction.")
        .flags(NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY)
        .in_group(Group::Transactions, TRANSACTION),
    command(
        Id::Watch,
        "watch",
        -2,
        "2.2.0",
        "Makes the next EXEC fail if one of the keys changes before it.",
    )
    .flags(NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY)
    .in_group(Group::Transactions, TRANSACTION)
    .keys(1, -1, 1, &[spec(1, -1, 1, RO)]),
    command(Id::Unwatch, "unwatch", 1, "2.2.0", "Ends the watch over all keys.")
        .flags(NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY)
        .in_group(Group::Transactions, TRANSACTION),
    command(
        Id::Wait,
        "wait",
        3,
        "3.0.0",
        "Waits until replicas have the writes of the connection.",
    )
    .flags(NOSCRIPT)
    .in_group(Group::Generic, CONNECTION)
    .tips(&["request_policy:all_shards", "response_policy:agg_min"]),
];

const OBJECT_SUBCOMMANDS: &[Command] = &[
    command(Id::ObjectEncoding, "encoding", 3, "2.2.3", "Returns the encoding of a value.")
        .flags(READONLY)
        .in_group(Group::Generic, KEYSPACE)
        .keys(2, 2, 1, &[spec(2, 0, 1, RO)])
        .tips(&["nondeterministic_output"]),
    command(
        Id::ObjectFreq,
        "freq",
        3,
        "4.0.0",
        "Returns the access counter of a key under an LFU policy.",
    )
    .flags(READONLY)
    .in_group(Group::Generic, KEYSPACE)
    .keys(2, 2, 1, &[spec(2, 0, 1, RO)])
    .tips(&["nondeterministic_output"]),
    command(Id::ObjectHelp, "help", 2, "6.2.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Generic, KEYSPACE),
    command(
        Id::ObjectIdletime,
        "idletime",
        3,
        "2.2.3",
        "Returns the seconds since the last access of a key.",
    )
    .flags(READONLY)
    .in_group(Group::Generic, KEYSPACE)
    .keys(2, 2, 1, &[spec(2, 0, 1, RO)])
    .tips(&["nondeterministic_output"]),
    command(
        Id::ObjectRefcount,
        "refcount",
        3,
        "2.2.3",
        "Returns the number of references to a value.",
    )
    .flags(READONLY)
    .in_group(Group::Generic, KEYSPACE)
    .keys(2, 2, 1, &[spec(2, 0, 1, RO)])
    .tips(&["nondeterministic_output"]),
];
