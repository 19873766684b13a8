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
    Subscribe, Psubscribe, Ssubscribe, Unsubscribe, Punsubscribe, Sunsubscribe, Publish,
    Spublish, Pubsub, PubsubChannels, PubsubHelp, PubsubNumpat, PubsubNumsub,
    PubsubShardchannels, PubsubShardnumsub, Ping, Echo, Hello, Auth, Reset, Quit, Select,
    Client, ClientCaching, ClientGetname, ClientGetredir, ClientHelp, ClientId, ClientInfo,
    ClientKill, ClientList, ClientNoEvict, ClientNoTouch, ClientPause, ClientReply,
    ClientSetinfo, ClientSetname, ClientTracking, ClientTrackinginfo, ClientUnblock,
    ClientUnpause, Dbsize, Flushdb, Flushall, Swapdb, Memory, MemoryDoctor, MemoryHelp,
    MemoryMallocStats, MemoryStats, MemoryUsage, Info, Config, ConfigGet, ConfigHelp,
    ConfigResetstat, ConfigSet, Command, CommandCount, CommandDocs, CommandGetkeys,
    CommandGetkeysandflags, CommandHelp, CommandInfo, CommandList, Time, Lolwut, Slowlog,
    SlowlogGet, SlowlogHelp, SlowlogLen, SlowlogReset, Latency, LatencyDoctor, LatencyGraph,
    LatencyHelp, LatencyHistogram, LatencyHistory, LatencyLatest, LatencyReset, Monitor,
    Shutdown, Role, Replicaof, Slaveof, Module, ModuleHelp, ModuleList, Save, Bgsave, Lastsave,
    Acl, AclCat, AclDeluser, AclDryrun, AclGenpass, AclGetuser, AclHelp, AclList, AclLoad,
    AclLog, AclSave, AclSetuser, AclUsers, AclWhoami, Cluster, ClusterCountkeysinslot,
    ClusterGetkeysinslot, ClusterHelp, ClusterInfo, ClusterKeyslot, ClusterLinks, ClusterMyid,
    ClusterNodes, ClusterShards, ClusterSlots, Function, FunctionFlush, FunctionHelp,
    FunctionList, FunctionStats, Debug,
}

impl Id {
    /// Number of commands and subcommands.
    pub const COUNT: usize = Self::Debug as usize + 1;
}
