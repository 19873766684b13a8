//! Replies: a writer for servers and a parser for clients.
//!
//! A [`Writer`] takes every kind of reply. In RESP2 some kinds have the form that Redis uses there:
//!
//! | kind | RESP3 | RESP2 |
//! | --- | --- | --- |
//! | null, null array | `_` | `$-1`, `*-1` |
//! | map, set, push | `%`, `~`, `>` | array; a map is a flat array |
//! | double, big number, verbatim text | `,`, `(`, `=` | bulk string |
//! | boolean | `#` | integer 0 or 1 |

mod parser;
mod writer;

pub use parser::{BadReply, Kind, Limits, Reply, ReplyParser};
pub use writer::{Protocol, Writer};
