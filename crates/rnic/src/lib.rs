//! A software RDMA NIC.
//!
//! The engine is a deterministic state machine that owns no thread, socket or clock. A port passes
//! doorbells, packets and the current time to the engine, which executes work-queue elements in the
//! ConnectX layout against registered memory. The port `inline` runs the engine in the caller's own
//! thread; the port `shm` runs the engine in a thread of the memory node's process, to which other
//! processes attach; the port `roce` adds RoCEv2 packets over UDP.

mod crc;
mod dma;
pub mod engine;
pub mod error;
mod guard;
mod key_namespaces;
pub mod limits;
pub mod metrics;
#[cfg(test)]
#[path = "../../../tests/src/needs.rs"]
mod needs;
pub mod nic;
pub mod port;
pub mod protection;
mod region_engines;
pub mod spec;
mod table;
pub mod wire;

pub use engine::Engine;
pub use error::Error;
