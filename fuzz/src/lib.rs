//! Fuzz targets, one to a file of `tests/`: bytes are turned into what a hostile peer does, while
//! somebody honest is served beside it. See `docs/testing.md`.
//!
//! | target | bytes become | must hold |
//! | --- | --- | --- |
//! | `wqe` | a WQE | decoding ends, and stays within the bytes |
//! | `engine` | rings, records, doorbells and verbs of a function | another function sees no error and no changed byte |
//! | `packets` | packets of a QP's peer on another host | another connection works, other memory is as it was, the NIC comes to rest |
//! | `session` | packets and requests to the shared-memory port | each has an answer; another session works |
//! | `service` | packets to a memory node's socket | the memory node answers another client |
//! | `hosts` | bytes to a memory node's TCP port | the memory node answers another host |

pub mod engine;
pub mod hosts;
mod input;
pub mod packets;
pub mod service;
pub mod session;
pub mod wqe;

pub use input::Input;

use std::time::Duration;

/// How long a target runs in `cargo test`, beside the inputs of its corpus. `make fuzz` runs it for
/// as long as it is told.
pub fn test_time() -> Duration {
    let full = std::env::var_os("GRANARY_TEST_FULL").is_some();
    Duration::from_secs(if full { 20 } else { 2 })
}

/// The longest input.
pub const BYTES_MAX: usize = 4096;
