//! The formats of Redis 7.0, without sockets and without a store.
//!
//! | module | content |
//! | --- | --- |
//! | [`request`] | parser of commands: multibulk and inline, incremental, without copies |
//! | [`reply`] | writer of replies in RESP2 and RESP3, and a parser for clients |
//! | [`command`] | table of commands, lookups, the replies of COMMAND, refusals in Redis's words |
//! | [`acl`] | users, their rules and rights (version 1) |
//! | [`conf`] | lines of redis.conf, sizes of memory |
//! | [`words`] | splits a line into words with quotes, and quotes them |
//! | [`glob`] | patterns with `*`, `?` and classes, in bounded time |
//! | [`number`] | integers and floating-point numbers as Redis reads and prints them |
//! | [`rdb`] | reader and writer of database files, payloads of DUMP |
//!
//! No module has state of its own beyond its types, opens a file or a socket, or asks for the time.

pub mod acl;
pub mod command;
pub mod conf;
mod error;
pub mod glob;
pub mod number;
pub mod rdb;

pub mod reply;
pub mod request;
pub mod words;

pub use error::Error;
