//! The table of parameters: name, kind, default, and what a change does.

/// Kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `yes` or `no`.
    Switch,
    /// An integer within bounds.
    Number(i64, i64),
    /// Bytes, with a unit.
    Memory(u64, u64),
    /// A word of a list.
    Word(&'static [&'static str]),
    /// Any text.
    Text,
    /// Text with a check of its own, in [`super::check`].
    Checked,
    /// Only the default is possible: the text says why.
    Only(&'static str),
}

/// Use of a parameter by the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// A change takes effect at once.
    Live,
    /// The value at the start holds, also in Redis.
    Start,
    /// The value at the start holds, but Redis can change it. CONFIG SET accepts the value that
    /// holds, because programs set the values of CONFIG GET again.
    Kept,
    /// As `Start`; CONFIG SET needs `enable-protected-configs`.
    Protected,
    /// The value has no effect: the server has not what the parameter is about.
    Unused,
}

/// A parameter.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub name: &'static str,
    pub alias: Option<&'static str>,
    pub kind: Kind,
    pub default: &'static str,
    pub used: Use,
}

const fn row(name: &'static str, kind: Kind, default: &'static str, used: Use) -> Parameter {
    Parameter { name, alias: None, kind, default, used }
}

const fn named(parameter: Parameter, alias: &'static str) -> Parameter {
    Parameter { alias: Some(alias), ..parameter }
}

use Kind::{Checked, Memory, Number, Only, Switch, Text, Word};
use Use::{Kept, Live, Protected, Start, Unused};

const INT: i64 = i32::MAX as i64;
const LONG: i64 = i64::MAX;
const BYTES: Kind = Memory(0, i64::MAX as u64);
const NO_AOF: &str = "argument must be 'no': this server has no append-only file";
const NO_CLUSTER: &str = "argument must be 'no': this server is no node of a cluster";
const NO_PASSPHRASE: &str = "argument must be empty: use a key without a passphrase";
const NO_REPLICAS: &str = "argument must be empty: this server has no replication";

/// Policies of eviction.
pub(crate) const POLICIES: &[&str] = &[
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "noeviction",
];
/// Where a command of tests is allowed.
const WHERE: &[&str] = &["no", "yes", "local"];

/// Parameters of tests, which a pattern of CONFIG GET does not select.
pub(crate) const HIDDEN: [&str; 2] = ["key-load-delay", "rdb-key-save-delay"];

/// All parameters that the server knows.
#[rustfmt::skip]
pub(crate) static PARAMETERS: &[Parameter] = &[
    // Network.
    row("bind", Checked, "127.0.0.1 -::1", Kept),
    row("port", Number(0, 65_535), "6379", Kept),
    row("tls-port", Number(0, 65_535), "0", Kept),
    row("unixsocket", Text, "", Start),
    row("unixsocketperm", Checked, "0", Start),
    row("tcp-backlog", Number(0, INT), "511", Start),
    row("tcp-keepalive", Number(0, INT), "300", Live),
    row("timeout", Number(0, INT), "0", Live),
    row("maxclients", Number(1, u32::MAX as i64), "10000", Live),
    row("protected-mode", Switch, "yes", Live),
    row("proto-max-bulk-len", Memory(1 << 20, i64::MAX as u64), "536870912", Live),
    row("client-query-buffer-limit", Memory(1 << 20, i64::MAX as u64), "1073741824", Live),
    row("client-output-buffer-limit", Checked,
        "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60", Live),
    row("io-threads", Number(1, 128), "1", Start),
    row("io-threads-do-reads", Switch, "no", Unused),
    row("socket-mark-id", Number(0, u32::MAX as i64), "0", Unused),
    row("bind-source-addr", Text, "", Unused),
    // TLS.
    row("tls-cert-file", Text, "", Kept),
    row("tls-key-file", Text, "", Kept),
    row("tls-key-file-pass", Only(NO_PASSPHRASE), "", Kept),
    row("tls-ca-cert-file", Text, "", Kept),
    row("tls-ca-cert-dir", Only("argument must be empty: use tls-ca-cert-file"), "", Kept),
    row("tls-auth-clients", Word(&["yes", "no", "optional"]), "yes", Kept),
    row("tls-protocols", Checked, "", Kept),
    row("tls-ciphers", Text, "", Unused),
    row("tls-ciphersuites", Text, "", Unused),
    row("tls-prefer-server-ciphers", Switch, "no", Unused),
    row("tls-session-caching", Switch, "yes", Unused),
    row("tls-session-cache-size", Number(0, INT), "20480", Unused),
    row("tls-session-cache-timeout", Number(0, INT), "300", Unused),
    row("tls-replication", Switch, "no", Unused),
    row("tls-cluster", Switch, "no", Unused),
    row("tls-dh-params-file", Text, "", Unused),
    row("tls-client-cert-file", Text, "", Unused),
    row("tls-client-key-file", Text, "", Unused),
    row("tls-client-key-file-pass", Text, "", Unused),
    // Users.
    row("requirepass", Text, "", Live),
    row("aclfile", Text, "", Start),
    row("acllog-max-len", Number(0, LONG), "128", Live),
    row("acl-pubsub-default", Word(&["allchannels", "resetchannels"]), "resetchannels", Live),
    row("enable-protected-configs", Word(WHERE), "no", Start),
    row("enable-debug-command", Word(WHERE), "no", Start),
    row("enable-module-command", Word(WHERE), "no", Unused),
    // Memory and keys.
    row("databases", Only("argument must be '16': the store has 16 databases"), "16", Start),
    row("maxmemory", BYTES, "0", Live),
    // Of this server, not of Redis: memory of the process for values.
    row("cache", BYTES, "0", Live),
    // Of this server too: seconds without an answer of the memory node until commands fail, and
    // what follows the loss of the memory node.
    row("pool-timeout", Number(1, 3600), "5", Live),
    row("pool-lost", Word(&["reopen", "exit"]), "reopen", Live),
    row("maxmemory-policy", Word(POLICIES), "noeviction", Live),
    row("maxmemory-samples", Number(1, INT), "5", Live),
    row("maxmemory-eviction-tenacity", Number(0, 100), "10", Unused),
    row("maxmemory-clients", Checked, "0", Live),
    row("lfu-log-factor", Number(0, INT), "10", Live),
    row("lfu-decay-time", Number(0, INT), "1", Live),
    row("active-expire-effort", Number(1, 10), "1", Live),
    row("activedefrag", Switch, "yes", Live),
    row("active-defrag-threshold-lower", Number(0, 1000), "10", Live),
    row("active-defrag-threshold-upper", Number(0, 1000), "100", Live),
    row("active-defrag-ignore-bytes", BYTES, "104857600", Live),
    row("active-defrag-cycle-min", Number(1, 99), "1", Live),
    row("active-defrag-cycle-max", Number(1, 99), "25", Live),
    row("active-defrag-max-scan-fields", Number(1, LONG), "1000", Unused),
    row("lazyfree-lazy-eviction", Switch, "no", Unused),
    row("lazyfree-lazy-expire", Switch, "no", Unused),
    row("lazyfree-lazy-server-del", Switch, "no", Unused),
    row("lazyfree-lazy-user-del", Switch, "no", Unused),
    row("lazyfree-lazy-user-flush", Switch, "no", Unused),
    row("activerehashing", Switch, "yes", Unused),
    // Events and logs.
    row("notify-keyspace-events", Checked, "", Live),
    row("slowlog-log-slower-than", Number(-1, LONG), "10000", Live),
    row("slowlog-max-len", Number(0, LONG), "128", Live),
    row("latency-monitor-threshold", Number(0, LONG), "0", Live),
    row("latency-tracking", Switch, "yes", Live),
    row("latency-tracking-info-percentiles", Checked, "50 99 99.9", Live),
    row("loglevel", Word(&["debug", "verbose", "notice", "warning"]), "notice", Unused),
    row("logfile", Text, "", Unused),
    row("syslog-enabled", Switch, "no", Unused),
    row("syslog-ident", Text, "redis", Unused),
    row("syslog-facility", Text, "local0", Unused),
    row("always-show-logo", Switch, "no", Unused),
    // Files.
    row("dir", Checked, "", Protected),
    row("dbfilename", Checked, "dump.rdb", Protected),
    row("save", Checked, "", Live),
    row("rdbcompression", Switch, "yes", Live),
    row("rdbchecksum", Switch, "yes", Live),
    // Of this server, not of Redis: a file with values of other types is loaded without these.
    row("rdb-skip-unknown", Switch, "no", Start),
    row("sanitize-dump-payload", Word(&["no", "yes", "clients"]), "no", Unused),
    row("stop-writes-on-bgsave-error", Switch, "yes", Live),
    row("rdb-save-incremental-fsync", Switch, "yes", Unused),
    row("rdb-del-sync-files", Switch, "no", Unused),
    row("rdb-key-save-delay", Number(i32::MIN as i64, INT), "0", Unused),
    row("key-load-delay", Number(i32::MIN as i64, INT), "0", Unused),
    row("shutdown-timeout", Number(0, INT), "10", Unused),
    row("shutdown-on-sigint", Text, "default", Unused),
    row("shutdown-on-sigterm", Text, "default", Unused),
    // Parts that the server has not.
    row("appendonly", Only(NO_AOF), "no", Unused),
    row("appendfilename", Text, "appendonly.aof", Unused),
    row("appenddirname", Text, "appendonlydir", Unused),
    row("appendfsync", Word(&["everysec", "always", "no"]), "everysec", Unused),
    row("no-appendfsync-on-rewrite", Switch, "no", Unused),
    row("auto-aof-rewrite-percentage", Number(0, INT), "100", Unused),
    row("auto-aof-rewrite-min-size", BYTES, "67108864", Unused),
    row("aof-load-truncated", Switch, "yes", Unused),
    row("aof-use-rdb-preamble", Switch, "yes", Unused),
    row("aof-timestamp-enabled", Switch, "no", Unused),
    row("aof-rewrite-incremental-fsync", Switch, "yes", Unused),
    row("cluster-enabled", Only(NO_CLUSTER), "no", Unused),
    row("cluster-config-file", Text, "nodes.conf", Unused),
    row("cluster-node-timeout", Number(0, LONG), "15000", Unused),
    named(row("replicaof", Only(NO_REPLICAS), "", Unused), "slaveof"),
    row("masteruser", Text, "", Unused),
    row("masterauth", Text, "", Unused),
    named(row("replica-serve-stale-data", Switch, "yes", Unused), "slave-serve-stale-data"),
    named(row("replica-read-only", Switch, "yes", Unused), "slave-read-only"),
    named(row("replica-priority", Number(0, INT), "100", Unused), "slave-priority"),
    named(row("replica-lazy-flush", Switch, "no", Unused), "slave-lazy-flush"),
    named(row("replica-ignore-maxmemory", Switch, "yes", Unused), "slave-ignore-maxmemory"),
    row("replica-announced", Switch, "yes", Unused),
    row("repl-diskless-sync", Switch, "yes", Unused),
    row("repl-diskless-sync-delay", Number(0, INT), "5", Unused),
    row("repl-diskless-load", Word(&["disabled", "on-empty-db", "swapdb"]), "disabled", Unused),
    row("repl-disable-tcp-nodelay", Switch, "no", Unused),
    row("repl-backlog-size", Memory(1, i64::MAX as u64), "1048576", Unused),
    row("repl-backlog-ttl", Number(0, LONG), "3600", Unused),
    row("repl-timeout", Number(1, INT), "60", Unused),
    named(row("repl-ping-replica-period", Number(1, INT), "10", Unused), "repl-ping-slave-period"),
    named(row("min-replicas-to-write", Only("argument must be '0': this server has no replication"),
        "0", Unused), "min-slaves-to-write"),
    named(row("min-replicas-max-lag", Number(0, INT), "10", Unused), "min-slaves-max-lag"),
    named(row("busy-reply-threshold", Number(0, LONG), "5000", Unused), "lua-time-limit"),
    named(row("hash-max-listpack-entries", Number(0, LONG), "512", Unused),
        "hash-max-ziplist-entries"),
    named(row("hash-max-listpack-value", BYTES, "64", Unused), "hash-max-ziplist-value"),
    named(row("list-max-listpack-size", Number(-INT, INT), "-2", Unused), "list-max-ziplist-size"),
    row("list-compress-depth", Number(0, INT), "0", Unused),
    row("set-max-intset-entries", Number(0, LONG), "512", Unused),
    named(row("zset-max-listpack-entries", Number(0, LONG), "128", Unused),
        "zset-max-ziplist-entries"),
    named(row("zset-max-listpack-value", BYTES, "64", Unused), "zset-max-ziplist-value"),
    row("hll-sparse-max-bytes", BYTES, "3000", Unused),
    row("stream-node-max-bytes", BYTES, "4096", Unused),
    row("stream-node-max-entries", Number(0, LONG), "100", Unused),
    row("tracking-table-max-keys", Number(0, LONG), "1000000", Unused),
    row("propagation-error-behavior", Word(&["ignore", "panic", "panic-on-replicas"]), "ignore",
        Unused),
    // The process.
    row("daemonize", Only("argument must be 'no': use a service manager"), "no", Start),
    row("pidfile", Text, "", Unused),
    row("supervised", Text, "no", Unused),
    row("hz", Number(0, INT), "10", Unused),
    row("dynamic-hz", Switch, "yes", Unused),
    row("set-proc-title", Switch, "yes", Unused),
    row("proc-title-template", Text, "{title} {listen-addr} {server-mode}", Unused),
    row("disable-thp", Switch, "yes", Unused),
    row("jemalloc-bg-thread", Switch, "yes", Unused),
    row("oom-score-adj", Word(&["no", "yes", "relative", "absolute"]), "no", Unused),
    row("oom-score-adj-values", Text, "0 200 800", Unused),
    row("crash-log-enabled", Switch, "yes", Unused),
    row("crash-memcheck-enabled", Switch, "yes", Unused),
    row("ignore-warnings", Text, "", Unused),
    row("server_cpulist", Text, "", Unused),
    row("bio_cpulist", Text, "", Unused),
];

/// Returns the index of the parameter `name`, in any case.
pub(crate) fn find(name: &[u8]) -> Option<usize> {
    let is = |own: &str| name.eq_ignore_ascii_case(own.as_bytes());
    PARAMETERS.iter().position(|row| is(row.name) || row.alias.is_some_and(is))
}
