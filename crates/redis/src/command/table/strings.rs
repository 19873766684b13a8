//! Commands on strings and bitmaps.

use super::{Command, Group, Id, command, spec};
use crate::command::bits::category::{BITMAP, STRING};
use crate::command::bits::flag::{DENYOOM, FAST, READONLY, WRITE};
use crate::command::bits::key::{ACCESS, DELETE, INSERT, OW, RO, RW, UPDATE, VARIABLE_FLAGS};

pub(super) const STRINGS: &[Command] = &[
    command(Id::Get, "get", 2, "1.0.0", "Returns the value of a key.")
        .flags(READONLY | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(
        Id::Set,
        "set",
        -3,
        "1.0.0",
        "Stores a value under a key; options set its expiry and a condition.",
    )
    .flags(WRITE | DENYOOM)
    .in_group(Group::String, STRING)
    .keys(
        1,
        1,
        1,
        &[spec(1, 0, 1, RW | ACCESS | UPDATE | VARIABLE_FLAGS)
            .noted("the option GET reads the key")],
    ),
    command(Id::Setnx, "setnx", 3, "1.0.0", "Stores a value if the key does not exist.")
        .flags(WRITE | DENYOOM | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, OW | INSERT)]),
    command(Id::Setex, "setex", 4, "2.0.0", "Stores a value with an expiry in seconds.")
        .flags(WRITE | DENYOOM)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, OW | UPDATE)]),
    command(Id::Psetex, "psetex", 4, "2.6.0", "Stores a value with an expiry in milliseconds.")
        .flags(WRITE | DENYOOM)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, OW | UPDATE)]),
    command(Id::Getset, "getset", 3, "1.0.0", "Stores a value and returns the former one.")
        .flags(WRITE | DENYOOM | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(Id::Getdel, "getdel", 2, "6.2.0", "Deletes a key and returns its value.")
        .flags(WRITE | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | DELETE)]),
    command(Id::Getex, "getex", -2, "6.2.0", "Returns the value of a key and changes its expiry.")
        .flags(WRITE | FAST)
        .in_group(Group::String, STRING)
        .keys(
            1,
            1,
            1,
            &[spec(1, 0, 1, RW | ACCESS | UPDATE).noted("the options change the expiry")],
        ),
    command(Id::Mget, "mget", -2, "1.0.0", "Returns the values of several keys.")
        .flags(READONLY | FAST)
        .in_group(Group::String, STRING)
        .keys(1, -1, 1, &[spec(1, -1, 1, RO | ACCESS)])
        .tips(&["request_policy:multi_shard"]),
    command(Id::Mset, "mset", -3, "1.0.1", "Stores values under several keys at once.")
        .flags(WRITE | DENYOOM)
        .in_group(Group::String, STRING)
        .keys(1, -1, 2, &[spec(1, -1, 2, OW | UPDATE)])
        .tips(&["request_policy:multi_shard", "response_policy:all_succeeded"]),
    command(
        Id::Msetnx,
        "msetnx",
        -3,
        "1.0.1",
        "Stores values under several keys if none of the keys exists.",
    )
    .flags(WRITE | DENYOOM)
    .in_group(Group::String, STRING)
    .keys(1, -1, 2, &[spec(1, -1, 2, OW | INSERT)])
    .tips(&["request_policy:multi_shard", "response_policy:agg_min"]),
    command(Id::Strlen, "strlen", 2, "2.2.0", "Returns the length of a value in bytes.")
        .flags(READONLY | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RO)]),
    command(Id::Append, "append", 3, "2.0.0", "Adds bytes to the end of a value.")
        .flags(WRITE | DENYOOM | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | INSERT)]),
    command(
        Id::Getrange,
        "getrange",
        4,
        "2.4.0",
        "Returns the bytes of a value between two offsets.",
    )
    .flags(READONLY)
    .in_group(Group::String, STRING)
    .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(
        Id::Substr,
        "substr",
        4,
        "1.0.0",
        "Returns the bytes of a value between two offsets; older name of GETRANGE.",
    )
    .flags(READONLY)
    .in_group(Group::String, STRING)
    .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(Id::Setrange, "setrange", 4, "2.2.0", "Overwrites a value from an offset on.")
        .flags(WRITE | DENYOOM)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | UPDATE)]),
    command(Id::Incr, "incr", 2, "1.0.0", "Adds one to the integer of a key.")
        .flags(WRITE | DENYOOM | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(Id::Decr, "decr", 2, "1.0.0", "Subtracts one from the integer of a key.")
        .flags(WRITE | DENYOOM | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(Id::Incrby, "incrby", 3, "1.0.0", "Adds a number to the integer of a key.")
        .flags(WRITE | DENYOOM | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(Id::Decrby, "decrby", 3, "1.0.0", "Subtracts a number from the integer of a key.")
        .flags(WRITE | DENYOOM | FAST)
        .in_group(Group::String, STRING)
        .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(
        Id::Incrbyfloat,
        "incrbyfloat",
        3,
        "2.6.0",
        "Adds a number to the floating-point number of a key.",
    )
    .flags(WRITE | DENYOOM | FAST)
    .in_group(Group::String, STRING)
    .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(Id::Lcs, "lcs", -3, "7.0.0", "Returns the longest common subsequence of two values.")
        .flags(READONLY)
        .in_group(Group::String, STRING)
        .keys(1, 2, 1, &[spec(1, 1, 1, RO | ACCESS)]),
    command(
        Id::Setbit,
        "setbit",
        4,
        "2.2.0",
        "Sets or clears a bit of a value and returns the former bit.",
    )
    .flags(WRITE | DENYOOM)
    .in_group(Group::Bitmap, BITMAP)
    .keys(1, 1, 1, &[spec(1, 0, 1, RW | ACCESS | UPDATE)]),
    command(Id::Getbit, "getbit", 3, "2.2.0", "Returns a bit of a value.")
        .flags(READONLY | FAST)
        .in_group(Group::Bitmap, BITMAP)
        .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(Id::Bitcount, "bitcount", -2, "2.6.0", "Counts the bits of a value that are set.")
        .flags(READONLY)
        .in_group(Group::Bitmap, BITMAP)
        .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(
        Id::Bitpos,
        "bitpos",
        -3,
        "2.8.7",
        "Returns the position of the first bit that is set or clear.",
    )
    .flags(READONLY)
    .in_group(Group::Bitmap, BITMAP)
    .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
    command(
        Id::Bitop,
        "bitop",
        -4,
        "2.6.0",
        "Stores the result of a bitwise operation on several values.",
    )
    .flags(WRITE | DENYOOM)
    .in_group(Group::Bitmap, BITMAP)
    .keys(2, -1, 1, &[spec(2, 0, 1, OW | UPDATE), spec(3, -1, 1, RO | ACCESS)]),
    command(
        Id::Bitfield,
        "bitfield",
        -2,
        "3.2.0",
        "Reads and changes integers of any width within a value.",
    )
    .flags(WRITE | DENYOOM)
    .in_group(Group::Bitmap, BITMAP)
    .keys(
        1,
        1,
        1,
        &[spec(1, 0, 1, RW | ACCESS | UPDATE | VARIABLE_FLAGS)
            .noted("without SET and INCRBY it only reads")],
    ),
    command(
        Id::BitfieldRo,
        "bitfield_ro",
        -2,
        "6.0.0",
        "Reads integers of any width within a value.",
    )
    .flags(READONLY | FAST)
    .in_group(Group::Bitmap, BITMAP)
    .keys(1, 1, 1, &[spec(1, 0, 1, RO | ACCESS)]),
];
