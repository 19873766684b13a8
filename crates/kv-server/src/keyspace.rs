//! The store as the server sees it, and the execution of commands on data.

use std::future::Future;
use std::time::Duration;

use kv::Ahead;
use redis_formats::command::Command;

use crate::context::Context;
use crate::server::Server;
use crate::session::Queue;
use crate::worker::Worker;

/// Number of databases.
pub const DATABASES: usize = 16;

/// Keys of a database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Number of keys.
    pub keys: u64,
    /// Number of keys with an expiry.
    pub volatile: u64,
    /// Mean time to the expiry of these keys, in milliseconds.
    pub mean_ttl_ms: u64,
}

/// Memory of a store, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Live blocks, index and limbo.
    pub used: u64,
    /// Keys and values within the live blocks.
    pub payload: u64,
    /// The index in remote memory.
    pub index: u64,
    /// Blocks that are free as soon as no reader can know them.
    pub limbo: u64,
    /// Chunks that the store holds.
    pub held: u64,
    /// Memory of this process for the index: mirror and expiries.
    pub local: u64,
    /// The cache of values in this process.
    pub cache: kv::CacheStats,
}

/// A line of the section `# Pool` of INFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Name, in the form of INFO's fields.
    pub name: &'static str,
    /// Value.
    pub value: String,
}

/// Times in which the memory nodes of a store did not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outages {
    /// True during such a time.
    pub is_out: bool,
    /// Their number.
    pub count: u64,
    /// The number of those after which the data was lost.
    pub losses: u64,
}

/// The keys and values behind a server.
///
/// All threads of a server use one value of this type. The futures run on the thread of the
/// connection, so they need not be `Send`.
///
/// No method has a default: a keyspace that passes calls on to another one would miss it silently.
pub trait Keyspace: Send + Sync + Sized + 'static {
    /// The state of WATCH of one connection. Its default watches nothing.
    type Watches: Default;

    /// Executes a command on data, and writes its reply. No other command reaches this function.
    ///
    /// Name, number of arguments, rights and memory are checked before.
    fn execute(context: &mut Context<'_, Self>) -> impl Future<Output = ()>;

    /// Executes the commands of EXEC, and writes its reply: an array, or the null array if a
    /// watched key has changed.
    fn execute_queue(context: &mut Context<'_, Self>, queue: &Queue) -> impl Future<Output = ()>;

    /// Reads the values of keys that a connection's next requests read, if that is faster than one
    /// after the other. The requests take the values from [`Session::ahead`].
    ///
    /// [`Session::ahead`]: crate::session::Session
    fn read_ahead<'k>(
        &self,
        worker: &Worker,
        db: u8,
        keys: impl Iterator<Item = &'k [u8]>,
        ahead: &mut Ahead,
    ) -> impl Future<Output = ()>;

    /// Ends all watches of a connection. DISCARD, RESET and the end of the connection call this.
    fn unwatch(&self, watches: &mut Self::Watches);

    /// Evicts keys until the memory in use is below `maxmemory`. Returns false if that is
    /// impossible; then commands that need memory are refused.
    fn make_room(&self, worker: &Worker, command: &Command) -> impl Future<Output = bool>;

    /// Loads the file of the configuration, if there is one. The first thread calls this before
    /// any connection is served.
    ///
    /// # Errors
    ///
    /// A text for the operator; the server does not start.
    fn load(&self, worker: &Worker) -> impl Future<Output = Result<(), String>>;

    /// Runs until [`Server::is_ending`]: expiry, eviction, compaction, periodic saves. Each thread
    /// runs this function once.
    fn maintain(&self, worker: &Worker) -> impl Future<Output = ()>;

    /// Saves the data before the end if `save` is true. `None`: if the configuration has points for
    /// saving.
    ///
    /// # Errors
    ///
    /// A text for the operator; SHUTDOWN then does not end the server.
    fn finish(
        &self,
        worker: &Worker,
        save: Option<bool>,
    ) -> impl Future<Output = Result<(), String>>;

    /// Takes completions and wakes the futures that wait for them. Returns their number.
    fn poll(&self) -> usize;

    /// Waits until an operation of the pool completes, at most for `limit`.
    fn park(&self, limit: Duration);

    /// Size of database `db`.
    fn size(&self, db: u8) -> Size;

    /// Memory in use.
    fn usage(&self) -> Usage;

    /// Fields of the section `# Persistence` of INFO, which replace those with the same name.
    fn persistence(&self) -> Vec<Fact>;

    /// Returns whether the last save in the background has failed.
    fn is_save_broken(&self) -> bool;

    /// Fields of the section `# Pool` of INFO.
    fn facts(&self) -> Vec<Fact>;

    /// Times in which the memory nodes did not answer.
    fn outages(&self) -> Outages;

    /// A parameter of the configuration has changed.
    fn configured(&self, server: &Server);
}
