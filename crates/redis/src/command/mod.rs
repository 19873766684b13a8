//! The table of commands: names, arity, flags, categories, key positions.
//!
//! The facts are those of Redis 7.0 (`COMMAND INFO`), and a test compares them with a server. The
//! descriptions are this project's. A lookup neither allocates nor depends on the case:
//!
//! ```
//! use redis_formats::command::{Command, Id, lookup};
//!
//! let arguments: [&[u8]; 3] = [b"Config", b"GET", b"maxmemory"];
//! let command = lookup(&arguments[..]).unwrap();
//! assert_eq!(command.id, Id::ConfigGet);
//! assert!(command.takes(arguments.len()));
//! ```

pub mod bits;
mod ids;
mod keys;
mod lookup;
mod refusal;
mod replies;
mod table;

pub use ids::Id;
pub use keys::{BadKeys, Key, keys};
pub use lookup::{all, by_id, by_name, find};
pub use refusal::{Refusal, is_http, lookup, sanitize};
pub use replies::reply;

/// The arguments of a command, the command's name first.
pub trait Arguments {
    /// Number of arguments.
    fn len(&self) -> usize;

    /// Returns the argument `index`, which is below [`len`](Self::len).
    fn at(&self, index: usize) -> &[u8];

    /// Returns whether no argument is there.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: AsRef<[u8]>> Arguments for [T] {
    fn len(&self) -> usize {
        <[T]>::len(self)
    }

    fn at(&self, index: usize) -> &[u8] {
        self[index].as_ref()
    }
}

/// The arguments of `inner` from an index on.
pub(crate) struct Tail<'a, A: ?Sized> {
    pub inner: &'a A,
    pub skip: usize,
}

impl<A: Arguments + ?Sized> Arguments for Tail<'_, A> {
    fn len(&self) -> usize {
        self.inner.len().saturating_sub(self.skip)
    }

    fn at(&self, index: usize) -> &[u8] {
        self.inner.at(self.skip + index)
    }
}

/// Facts of a command or a subcommand.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// Number of the command.
    pub id: Id,
    /// Name in lower case; a subcommand's name is without that of its container.
    pub name: &'static str,
    /// Number of arguments with the name; a negative number is a minimum.
    pub arity: i8,
    /// Version of Redis that has the command first.
    pub since: &'static str,
    /// Description.
    pub summary: &'static str,
    /// Group of the documentation.
    pub group: Group,
    /// Bits of [`bits::flag`].
    pub flags: u32,
    /// Bits of [`bits::category`].
    pub categories: u32,
    /// First key, last key and step, as the older form of COMMAND INFO has them.
    pub positions: (i8, i8, i8),
    /// Where the keys are.
    pub keys: &'static [KeySpec],
    /// Hints for clients of a cluster.
    pub tips: &'static [&'static str],
    /// Subcommands; a command that has some is a container.
    pub subcommands: &'static [Command],
}

/// A run of keys among the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySpec {
    /// Index of the first key.
    pub first: u8,
    /// Distance of the last key from the first one; if negative, from the end of the arguments.
    pub last: i8,
    /// Distance between two keys.
    pub step: u8,
    /// Bits of [`bits::key`].
    pub uses: u16,
    /// Explains the uses, or is empty.
    pub note: &'static str,
}

/// Group of commands in the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Strings.
    String,
    /// Bits of strings.
    Bitmap,
    /// Keys of any type.
    Generic,
    /// Messages between connections.
    Pubsub,
    /// State of a connection.
    Connection,
    /// The server.
    Server,
    /// Transactions.
    Transactions,
    /// The cluster.
    Cluster,
    /// Scripts and functions.
    Scripting,
}

impl Group {
    /// The name in the reply of COMMAND DOCS.
    pub const fn name(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Bitmap => "bitmap",
            Self::Generic => "generic",
            Self::Pubsub => "pubsub",
            Self::Connection => "connection",
            Self::Server => "server",
            Self::Transactions => "transactions",
            Self::Cluster => "cluster",
            Self::Scripting => "scripting",
        }
    }
}

impl Command {
    /// Returns whether the command may have `count` arguments, its name among them.
    ///
    /// The name of a subcommand counts as a second one.
    pub const fn takes(&self, count: usize) -> bool {
        let least = self.arity.unsigned_abs() as usize;
        if self.arity < 0 { count >= least } else { count == least }
    }

    /// Returns whether the command has any of the flags.
    pub const fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }

    /// Returns the subcommand `name`, in any case.
    pub fn subcommand(&self, name: &[u8]) -> Option<&'static Command> {
        self.subcommands.iter().find(|sub| name.eq_ignore_ascii_case(sub.name.as_bytes()))
    }
}
