//! Flags, ACL categories and uses of keys as bits, with the names that replies have.

/// Names the bits of `bits`, in the order of `names`.
fn names(bits: u32, names: &'static [&'static str]) -> impl Iterator<Item = &'static str> {
    let set = move |&(bit, _): &(usize, _)| bits >> bit & 1 == 1;
    names.iter().enumerate().filter(set).map(|(_, name)| *name)
}

/// Flags of a command.
pub mod flag {
    /// Changes keys.
    pub const WRITE: u32 = 1;
    /// Reads keys and changes none.
    pub const READONLY: u32 = 1 << 1;
    /// Is refused while the memory in use is above `maxmemory`.
    pub const DENYOOM: u32 = 1 << 2;
    /// Controls the server.
    pub const ADMIN: u32 = 1 << 3;
    /// Belongs to messages between connections.
    pub const PUBSUB: u32 = 1 << 4;
    /// Is refused within scripts.
    pub const NOSCRIPT: u32 = 1 << 5;
    /// Is executed while the server reads its file.
    pub const LOADING: u32 = 1 << 6;
    /// Is executed by a replica whose data are old.
    pub const STALE: u32 = 1 << 7;
    /// Is absent from MONITOR.
    pub const SKIP_MONITOR: u32 = 1 << 8;
    /// Is absent from the slow log.
    pub const SKIP_SLOWLOG: u32 = 1 << 9;
    /// Takes a time that does not grow with the data.
    pub const FAST: u32 = 1 << 10;
    /// Is executed before the connection authenticates.
    pub const NO_AUTH: u32 = 1 << 11;
    /// Is refused while the server reads a file in the background.
    pub const NO_ASYNC_LOADING: u32 = 1 << 12;
    /// Is refused within a transaction.
    pub const NO_MULTI: u32 = 1 << 13;
    /// Is executed while a script runs for too long.
    pub const ALLOW_BUSY: u32 = 1 << 14;

    const NAMES: [&str; 15] = [
        "write",
        "readonly",
        "denyoom",
        "admin",
        "pubsub",
        "noscript",
        "loading",
        "stale",
        "skip_monitor",
        "skip_slowlog",
        "fast",
        "no_auth",
        "no_async_loading",
        "no_multi",
        "allow_busy",
    ];

    /// Names the flags in the order of COMMAND INFO.
    pub fn names(flags: u32) -> impl Iterator<Item = &'static str> {
        super::names(flags, &NAMES)
    }
}

/// ACL categories.
pub mod category {
    /// No category besides those that the flags imply.
    pub const NONE: u32 = 0;
    /// Keys of any type.
    pub const KEYSPACE: u32 = 1;
    /// Reads keys.
    pub const READ: u32 = 1 << 1;
    /// Changes keys.
    pub const WRITE: u32 = 1 << 2;
    /// Strings.
    pub const STRING: u32 = 1 << 7;
    /// Bits of strings.
    pub const BITMAP: u32 = 1 << 8;
    /// Messages between connections.
    pub const PUBSUB: u32 = 1 << 12;
    /// Control of the server.
    pub const ADMIN: u32 = 1 << 13;
    /// Takes a time that does not grow with the data.
    pub const FAST: u32 = 1 << 14;
    /// Every command that is not fast.
    pub const SLOW: u32 = 1 << 15;
    /// Can harm other clients.
    pub const DANGEROUS: u32 = 1 << 17;
    /// State of the connection.
    pub const CONNECTION: u32 = 1 << 18;
    /// Transactions.
    pub const TRANSACTION: u32 = 1 << 19;
    /// Scripts and functions.
    pub const SCRIPTING: u32 = 1 << 20;

    /// Names by bit. Because rules of other servers name them, categories without a command exist.
    pub const NAMES: [&str; 21] = [
        "keyspace",
        "read",
        "write",
        "set",
        "sortedset",
        "list",
        "hash",
        "string",
        "bitmap",
        "hyperloglog",
        "geo",
        "stream",
        "pubsub",
        "admin",
        "fast",
        "slow",
        "blocking",
        "dangerous",
        "connection",
        "transaction",
        "scripting",
    ];

    /// Names the categories in the order of ACL CAT, without `@`.
    pub fn names(categories: u32) -> impl Iterator<Item = &'static str> {
        super::names(categories, &NAMES)
    }

    /// Returns the bit of the category `name`, in any case.
    pub fn parse(name: &[u8]) -> Option<u32> {
        let bit = NAMES.iter().position(|own| name.eq_ignore_ascii_case(own.as_bytes()))?;
        Some(1 << bit)
    }
}

/// Uses of a key by a command.
pub mod key {
    /// Reads the value and changes data of it.
    pub const RW: u16 = 1;
    /// Reads the value.
    pub const RO: u16 = 1 << 1;
    /// Replaces the value without reading the former one.
    pub const OW: u16 = 1 << 2;
    /// Removes the key.
    pub const RM: u16 = 1 << 3;
    /// Returns, copies or uses data of the value.
    pub const ACCESS: u16 = 1 << 4;
    /// Changes data of the value.
    pub const UPDATE: u16 = 1 << 5;
    /// Adds data and changes none that exist.
    pub const INSERT: u16 = 1 << 6;
    /// Removes data of the value.
    pub const DELETE: u16 = 1 << 7;
    /// The use depends on the arguments.
    pub const VARIABLE_FLAGS: u16 = 1 << 8;
    /// The argument is no key, and a cluster finds its node as that of a key.
    pub const NOT_KEY: u16 = 1 << 9;

    const NAMES: [&str; 10] = [
        "RW",
        "RO",
        "OW",
        "RM",
        "access",
        "update",
        "insert",
        "delete",
        "variable_flags",
        "not_key",
    ];

    /// Names the uses in the order of COMMAND INFO.
    pub fn names(uses: u16) -> impl Iterator<Item = &'static str> {
        super::names(uses.into(), &NAMES)
    }
}
