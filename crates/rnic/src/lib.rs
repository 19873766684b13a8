//! A software RDMA NIC.
//!
//! The engine is a deterministic state machine that owns no thread, socket or clock. A port passes
//! doorbells, packets and the current time to the engine, which executes work-queue elements in the
//! ConnectX layout against registered memory. The port `inline` runs the engine in the caller's own
//! thread; the port `shm` runs the engine in a thread of the memory node's process, to which other
//! processes attach; the port `roce` adds RoCEv2 packets over UDP.

pub mod bucket;
pub mod cqe;
mod crc;
mod dma;
pub mod engine;
pub mod error;
mod guard;
pub mod ids;
mod key_namespaces;
pub mod memory;
pub mod metrics;
#[cfg(test)]
#[path = "../../../tests/src/needs.rs"]
mod needs;
pub mod port;
pub mod protection;
mod table;
pub mod verbs;
pub mod wire;
pub mod wqe;

pub use engine::Engine;
pub use error::Error;
