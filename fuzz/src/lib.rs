//! Fuzz targets, one per file of `tests/`: the input is translated into operations of a hostile
//! peer, while an honest peer is served beside it. See `docs/internals/testing.md`.
//!
//! | target | bytes become | must hold |
//! | --- | --- | --- |
//! | `wqe` | a WQE | decoding ends, and stays within the bytes |
//! | `engine` | rings, records, doorbells and verbs of a function | another function sees no error and no changed byte |
//! | `packets` | packets of a QP's peer on another host | another connection works, other memory is unchanged, the NIC becomes idle |
//! | `session` | packets and requests to the shared-memory port | every packet gets an answer; another session works |
//! | `service` | packets to a memory node's socket | the memory node answers another client |
//! | `trace` | a fault trace | decoding checks every field; an encoded trace decodes to the same events |
//! | `executable` | the file of a program | decoding ends; only ELF files have a kind |
//! | `assist` | a packet to the assist, and the entries of a ring | each request is within its frames; the rest is refused |
//! | `kv_memory` | root, directory, subtables and blocks of a store | the store opens, or not; no call panics or does not end |
//! | `seal` | sealed bytes, a seal and a place | bytes open only as they were stored; all other outputs are zeros |
//! | `resp` | requests and replies of the Redis protocol | parsing does not depend on how bytes arrive; limits hold |
//! | `rdb` | a database file, a payload of DUMP, and keys | strings are within the limit; the reader reads what the writer wrote |
//! | `hosts` | bytes to a memory node's TCP port | the memory node answers another host |

pub mod assist;
pub mod engine;
pub mod executable;
pub mod hosts;
mod input;
pub mod kv_memory;
pub mod packets;
pub mod rdb;
pub mod resp;
pub mod seal;
pub mod service;
pub mod session;
pub mod trace;
pub mod wqe;

pub use input::Input;

use std::time::Duration;

/// Returns how long a target runs in `cargo test`, in addition to the inputs of its corpus. `make
/// fuzz` runs a target for a given time.
pub fn test_time() -> Duration {
    let full = std::env::var_os("GRANARY_TEST_FULL").is_some();
    Duration::from_secs(if full { 20 } else { 2 })
}

/// Maximum length of an input.
pub const BYTES_MAX: usize = 4096;
