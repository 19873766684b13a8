//! Numbers of the commands and subcommands.

/// Identifies a command or a subcommand. The server selects its code by this number.
#[rustfmt::skip]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "each variant is the name of the command")]
#[repr(u8)]
pub enum Id {
    Get, Set, Setnx, Setex, Psetex, Getset, Getdel, Getex, Mget, Mset, Msetnx, Strlen, Append,
    Getrange, Substr, Setrange, Incr, Decr, Incrby, Decrby, Incrbyfloat, Lcs, Setbit, Getbit,
    Bitcount, Bitpos, Bitop, Bitfield, BitfieldRo, Del, Unlink, Exists, Type, Touch, Rename,
    Renamenx, Copy, Move, Keys, Scan, Randomkey, Expire, Pexpire, Expireat, Pexpireat, Ttl,
    Pttl, Expiretime, Pexpiretime, Persist, Dump, Restore, Object, ObjectEncoding, ObjectFreq,
    ObjectHelp, ObjectIdletime, ObjectRefcount, Multi, Exec, Discard, Watch, Unwatch, Wait,
    Subscribe, Psubscribe, Unsubscribe, Punsubscribe, Publish, Pubsub, PubsubChannels,
    PubsubHelp, PubsubNumpat, PubsubNumsub, Ping, Echo, Hello, Auth, Reset, Quit, Select,
    Client, ClientGetname, ClientHelp, ClientId, ClientInfo, ClientKill, ClientList,
    ClientNoEvict, ClientPause, ClientReply, ClientSetname, ClientTracking, ClientUnpause,
    Dbsize, Flushdb, Flushall, Swapdb, Memory, MemoryDoctor, MemoryHelp, MemoryStats,
    MemoryUsage, Info, Config, ConfigGet, ConfigHelp, ConfigResetstat, ConfigSet, Command,
    CommandCount, CommandDocs, CommandGetkeys, CommandGetkeysandflags, CommandHelp,
    CommandInfo, CommandList, Time, Lolwut, Slowlog, SlowlogGet, SlowlogHelp, SlowlogLen,
    SlowlogReset, Latency, LatencyDoctor, LatencyGraph, LatencyHelp, LatencyHistogram,
    LatencyHistory, LatencyLatest, LatencyReset, Monitor, Shutdown, Role, Save, Bgsave,
    Lastsave, Acl, AclCat, AclDeluser, AclDryrun, AclGenpass, AclGetuser, AclHelp, AclList,
    AclLoad, AclLog, AclSave, AclSetuser, AclUsers, AclWhoami, Cluster,
    ClusterCountkeysinslot, ClusterGetkeysinslot, ClusterHelp, ClusterInfo, ClusterKeyslot,
    ClusterLinks, ClusterMyid, ClusterNodes, ClusterShards, ClusterSlots, Function,
    FunctionFlush, FunctionHelp, FunctionList, FunctionStats, Debug,
}

impl Id {
    /// Number of commands and subcommands.
    pub const COUNT: usize = Self::Debug as usize + 1;
}
