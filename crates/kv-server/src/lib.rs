//! A server that speaks the Redis protocol over a key-value store.
//!
//! ```text
//! thread i:  epoll ──> tasks of ready sockets: parse, execute, reply ──> one write a socket
//!              ^            │ await                                          │
//!              └── nothing ready <── completions of the pool <── Pool::poll ─┘
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | [`keyspace`] | what the server needs of a store; the execution of commands on data |
//! | [`data`] | a store of crate `kv` over a pool, behind the server |
//! | [`context`] | what the execution of a command has |
//! | [`session`], [`client`] | a connection: for its own thread, for other threads |
//! | [`config`] | parameters with the names of redis.conf |
//! | `dispatch` | checks of a request, queues of transactions, counters |
//! | `connection` | the task of a connection: input, output, limits |
//! | `net` | event loop, tasks, sockets, TLS |
//! | `commands` | commands on sessions and on the server |
//!
//! A thread runs to completion and shares nothing that makes another one wait. A connection is one
//! task on one thread, so its pipeline is executed in order and answered with one write.

mod channels;
pub mod client;
mod commands;
pub mod config;
mod connection;
pub mod context;
mod cron;
pub mod data;
mod dispatch;
mod duties;
mod error;
pub mod keyspace;
mod latency;
pub mod metrics;
mod monitor;
mod net;
pub mod notify;
mod panics;
mod process;
mod random;
mod security_log;
pub mod server;
pub mod session;
mod slowlog;
mod start;
pub mod stats;
mod users;
pub mod worker;

pub use commands::unknown_debug;
pub use dispatch::execute_one;
pub use error::Error;
pub use process::connections_within;
pub use start::{Running, Setup, Stop};
