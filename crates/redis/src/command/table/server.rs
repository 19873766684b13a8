//! Commands that show and control the server.

use super::{Command, Group, Id, command, spec};
use crate::command::bits::category::{
    ADMIN as TO_ADMIN, CONNECTION, DANGEROUS, KEYSPACE, NONE, SCRIPTING,
};
use crate::command::bits::flag::{
    ADMIN, ALLOW_BUSY, FAST, LOADING, NO_ASYNC_LOADING, NO_MULTI, NOSCRIPT, READONLY, STALE, WRITE,
};
use crate::command::bits::key::RO;

pub(super) const SERVER: &[Command] = &[
    command(Id::Dbsize, "dbsize", 1, "1.0.0", "Returns the number of keys in the database.")
        .flags(READONLY | FAST)
        .in_group(Group::Server, KEYSPACE)
        .tips(&["request_policy:all_shards", "response_policy:agg_sum"]),
    command(Id::Flushdb, "flushdb", -1, "1.0.0", "Deletes all keys of the database.")
        .flags(WRITE)
        .in_group(Group::Server, KEYSPACE | DANGEROUS)
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"]),
    command(Id::Flushall, "flushall", -1, "1.0.0", "Deletes all keys of all databases.")
        .flags(WRITE)
        .in_group(Group::Server, KEYSPACE | DANGEROUS)
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"]),
    command(Id::Swapdb, "swapdb", 3, "4.0.0", "Exchanges the contents of two databases.")
        .flags(WRITE | FAST)
        .in_group(Group::Server, KEYSPACE | DANGEROUS),
    command(Id::Memory, "memory", -2, "4.0.0", "Shows the use of memory.")
        .in_group(Group::Server, NONE)
        .subcommands(MEMORY_SUBCOMMANDS),
    command(Id::Info, "info", -1, "1.0.0", "Returns facts and counters of the server by section.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, DANGEROUS)
        .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
    command(Id::Config, "config", -2, "2.0.0", "Reads and changes the configuration.")
        .in_group(Group::Server, NONE)
        .subcommands(CONFIG_SUBCOMMANDS),
    command(Id::Command, "command", -1, "2.8.13", "Returns the facts of all commands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, CONNECTION)
        .tips(&["nondeterministic_output_order"])
        .subcommands(COMMAND_SUBCOMMANDS),
    command(Id::Time, "time", 1, "2.6.0", "Returns the time of the server.")
        .flags(LOADING | STALE | FAST)
        .in_group(Group::Server, NONE)
        .tips(&["nondeterministic_output"]),
    command(Id::Lolwut, "lolwut", -1, "5.0.0", "Draws a picture and shows the version.")
        .flags(READONLY | FAST)
        .in_group(Group::Server, NONE),
    command(Id::Slowlog, "slowlog", -2, "2.2.12", "Shows commands that took long.")
        .in_group(Group::Server, NONE)
        .subcommands(SLOWLOG_SUBCOMMANDS),
    command(Id::Latency, "latency", -2, "2.8.13", "Shows how long commands and events take.")
        .in_group(Group::Server, NONE)
        .subcommands(LATENCY_SUBCOMMANDS),
    command(
        Id::Monitor,
        "monitor",
        1,
        "1.0.0",
        "Sends each command that the server executes to the connection.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Server, NONE),
    command(Id::Shutdown, "shutdown", -1, "1.0.0", "Ends the server, with or without a last file.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE | NO_MULTI | ALLOW_BUSY)
        .in_group(Group::Server, NONE),
    command(Id::Role, "role", 1, "2.8.12", "Returns the role of the server in replication.")
        .flags(NOSCRIPT | LOADING | STALE | FAST)
        .in_group(Group::Server, TO_ADMIN | DANGEROUS),
    command(Id::Replicaof, "replicaof", 3, "5.0.0", "Accepts NO ONE; there is no replication.")
        .flags(ADMIN | NOSCRIPT | STALE | NO_ASYNC_LOADING)
        .in_group(Group::Server, NONE),
    command(Id::Slaveof, "slaveof", 3, "1.0.0", "Accepts NO ONE; there is no replication.")
        .flags(ADMIN | NOSCRIPT | STALE | NO_ASYNC_LOADING)
        .in_group(Group::Server, NONE),
    command(Id::Module, "module", -2, "4.0.0", "Lists the modules; there are none.")
        .in_group(Group::Server, NONE)
        .subcommands(MODULE_SUBCOMMANDS),
    command(
        Id::Save,
        "save",
        1,
        "1.0.0",
        "Writes the database to its file while all clients wait.",
    )
    .flags(ADMIN | NOSCRIPT | NO_ASYNC_LOADING | NO_MULTI)
    .in_group(Group::Server, NONE),
    command(
        Id::Bgsave,
        "bgsave",
        -1,
        "1.0.0",
        "Writes the database to its file in the background.",
    )
    .flags(ADMIN | NOSCRIPT | NO_ASYNC_LOADING)
    .in_group(Group::Server, NONE),
    command(Id::Lastsave, "lastsave", 1, "1.0.0", "Returns the Unix time of the last file.")
        .flags(LOADING | STALE | FAST)
        .in_group(Group::Server, TO_ADMIN | DANGEROUS)
        .tips(&["nondeterministic_output"]),
    command(Id::Acl, "acl", -2, "6.0.0", "Manages users and their rights.")
        .in_group(Group::Server, NONE)
        .subcommands(ACL_SUBCOMMANDS),
    command(Id::Cluster, "cluster", -2, "3.0.0", "Shows the cluster.")
        .in_group(Group::Cluster, NONE)
        .subcommands(CLUSTER_SUBCOMMANDS),
    command(
        Id::Function,
        "function",
        -2,
        "7.0.0",
        "Stands for the functions that this server does not have.",
    )
    .in_group(Group::Scripting, NONE)
    .subcommands(FUNCTION_SUBCOMMANDS),
    command(Id::Debug, "debug", -2, "1.0.0", "Offers operations for tests of the server.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
];

const MODULE_SUBCOMMANDS: &[Command] = &[
    command(Id::ModuleHelp, "help", 2, "5.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::ModuleList, "list", 2, "4.0.0", "Lists the modules; there are none.")
        .flags(ADMIN | NOSCRIPT)
        .in_group(Group::Server, NONE)
        .tips(&["nondeterministic_output_order"]),
];

const MEMORY_SUBCOMMANDS: &[Command] = &[
    command(Id::MemoryDoctor, "doctor", 2, "4.0.0", "Names problems in the use of memory.")
        .in_group(Group::Server, NONE)
        .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
    command(Id::MemoryHelp, "help", 2, "4.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(
        Id::MemoryMallocStats,
        "malloc-stats",
        2,
        "4.0.0",
        "Tells that the allocator has no statistics.",
    )
    .in_group(Group::Server, NONE)
    .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
    command(Id::MemoryStats, "stats", 2, "4.0.0", "Returns the use of memory by purpose.")
        .in_group(Group::Server, NONE)
        .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
    command(
        Id::MemoryUsage,
        "usage",
        -3,
        "4.0.0",
        "Returns the bytes that a key and its value take.",
    )
    .flags(READONLY)
    .in_group(Group::Server, NONE)
    .keys(2, 2, 1, &[spec(2, 0, 1, RO)]),
];

const CONFIG_SUBCOMMANDS: &[Command] = &[
    command(
        Id::ConfigGet,
        "get",
        -3,
        "2.0.0",
        "Returns the configuration parameters that match patterns.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Server, NONE),
    command(Id::ConfigHelp, "help", 2, "5.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::ConfigResetstat, "resetstat", 2, "2.0.0", "Sets the counters of INFO to zero.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::ConfigSet, "set", -4, "2.0.0", "Changes configuration parameters.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"]),
];

const COMMAND_SUBCOMMANDS: &[Command] = &[
    command(Id::CommandCount, "count", 2, "2.8.13", "Returns the number of commands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, CONNECTION),
    command(Id::CommandDocs, "docs", -2, "7.0.0", "Returns the descriptions of commands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, CONNECTION)
        .tips(&["nondeterministic_output_order"]),
    command(
        Id::CommandGetkeys,
        "getkeys",
        -4,
        "2.8.13",
        "Returns the keys among the arguments of a command.",
    )
    .flags(LOADING | STALE)
    .in_group(Group::Server, CONNECTION),
    command(
        Id::CommandGetkeysandflags,
        "getkeysandflags",
        -4,
        "7.0.0",
        "Returns the keys among the arguments of a command and their use.",
    )
    .flags(LOADING | STALE)
    .in_group(Group::Server, CONNECTION),
    command(Id::CommandHelp, "help", 2, "5.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, CONNECTION),
    command(Id::CommandInfo, "info", -2, "2.8.13", "Returns the facts of commands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, CONNECTION)
        .tips(&["nondeterministic_output_order"]),
    command(Id::CommandList, "list", -2, "7.0.0", "Lists the names of commands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, CONNECTION)
        .tips(&["nondeterministic_output_order"]),
];

const SLOWLOG_SUBCOMMANDS: &[Command] = &[
    command(Id::SlowlogGet, "get", -2, "2.2.12", "Returns the newest entries of the slow log.")
        .flags(ADMIN | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["request_policy:all_nodes", "nondeterministic_output"]),
    command(Id::SlowlogHelp, "help", 2, "6.2.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::SlowlogLen, "len", 2, "2.2.12", "Returns the number of entries of the slow log.")
        .flags(ADMIN | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["request_policy:all_nodes", "response_policy:agg_sum", "nondeterministic_output"]),
    command(Id::SlowlogReset, "reset", 2, "2.2.12", "Removes all entries of the slow log.")
        .flags(ADMIN | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"]),
];

const LATENCY_SUBCOMMANDS: &[Command] = &[
    command(
        Id::LatencyDoctor,
        "doctor",
        2,
        "2.8.13",
        "Describes the latency of the server and names causes.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Server, NONE)
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"]),
    command(Id::LatencyGraph, "graph", 3, "2.8.13", "Draws the latency of an event over time.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"]),
    command(Id::LatencyHelp, "help", 2, "2.8.13", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(
        Id::LatencyHistogram,
        "histogram",
        -2,
        "7.0.0",
        "Returns the distribution of the execution times of commands.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Server, NONE)
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"]),
    command(Id::LatencyHistory, "history", 3, "2.8.13", "Returns the samples of an event.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"]),
    command(Id::LatencyLatest, "latest", 2, "2.8.13", "Returns the newest sample of each event.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"]),
    command(Id::LatencyReset, "reset", -2, "2.8.13", "Removes the samples of events.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE)
        .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"]),
];

const ACL_SUBCOMMANDS: &[Command] = &[
    command(Id::AclCat, "cat", -2, "6.0.0", "Lists the categories, or the commands of a category.")
        .flags(NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclDeluser, "deluser", -3, "6.0.0", "Deletes users and ends their connections.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclDryrun, "dryrun", -4, "7.0.0", "Tests whether a user may execute a command.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclGenpass, "genpass", -2, "6.0.0", "Returns a random password.")
        .flags(NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclGetuser, "getuser", 3, "6.0.0", "Returns the rules of a user.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclHelp, "help", 2, "6.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(
        Id::AclList,
        "list",
        2,
        "6.0.0",
        "Returns the rules of all users as lines of an ACL file.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Server, NONE),
    command(Id::AclLoad, "load", 2, "6.0.0", "Reads the users from the ACL file.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclLog, "log", -2, "6.0.0", "Returns the refused commands and logins.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclSave, "save", 2, "6.0.0", "Writes the users to the ACL file.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclSetuser, "setuser", -3, "6.0.0", "Creates or changes a user.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclUsers, "users", 2, "6.0.0", "Lists the names of all users.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
    command(Id::AclWhoami, "whoami", 2, "6.0.0", "Returns the user of the connection.")
        .flags(NOSCRIPT | LOADING | STALE)
        .in_group(Group::Server, NONE),
];

const CLUSTER_SUBCOMMANDS: &[Command] = &[
    command(
        Id::ClusterCountkeysinslot,
        "countkeysinslot",
        3,
        "3.0.0",
        "Returns the number of keys in a slot.",
    )
    .flags(STALE)
    .in_group(Group::Cluster, NONE),
    command(Id::ClusterGetkeysinslot, "getkeysinslot", 4, "3.0.0", "Returns keys of a slot.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE)
        .tips(&["nondeterministic_output"]),
    command(Id::ClusterHelp, "help", 2, "5.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Cluster, NONE),
    command(Id::ClusterInfo, "info", 2, "3.0.0", "Returns the state of the cluster.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE)
        .tips(&["nondeterministic_output"]),
    command(Id::ClusterKeyslot, "keyslot", 3, "3.0.0", "Returns the slot of a key.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE),
    command(Id::ClusterLinks, "links", 2, "7.0.0", "Lists the connections between nodes.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE)
        .tips(&["nondeterministic_output"]),
    command(Id::ClusterMyid, "myid", 2, "3.0.0", "Returns the id of the node.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE),
    command(Id::ClusterNodes, "nodes", 2, "3.0.0", "Describes all nodes as text.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE)
        .tips(&["nondeterministic_output"]),
    command(Id::ClusterShards, "shards", 2, "7.0.0", "Describes slots and nodes by shard.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE)
        .tips(&["nondeterministic_output"]),
    command(Id::ClusterSlots, "slots", 2, "3.0.0", "Describes the nodes of each range of slots.")
        .flags(STALE)
        .in_group(Group::Cluster, NONE)
        .tips(&["nondeterministic_output"]),
];

const FUNCTION_SUBCOMMANDS: &[Command] = &[
    command(Id::FunctionFlush, "flush", -2, "7.0.0", "Deletes all functions; none exist.")
        .flags(WRITE | NOSCRIPT)
        .in_group(Group::Scripting, SCRIPTING)
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"]),
    command(Id::FunctionHelp, "help", 2, "7.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Scripting, SCRIPTING),
    command(Id::FunctionList, "list", -2, "7.0.0", "Lists the functions; none exist.")
        .flags(NOSCRIPT)
        .in_group(Group::Scripting, SCRIPTING)
        .tips(&["nondeterministic_output_order"]),
    command(
        Id::FunctionStats,
        "stats",
        2,
        "7.0.0",
        "Returns the state of the engines of functions.",
    )
    .flags(NOSCRIPT | ALLOW_BUSY)
    .in_group(Group::Scripting, SCRIPTING)
    .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
];
