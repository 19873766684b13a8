//! A software RDMA NIC.
//!
//! The engine is a deterministic state machine that owns no thread, socket or clock: it is told of
//! doorbells and of time, and executes work-queue elements in the ConnectX layout against
//! registered memory. Ports run it: `inline` in the caller's own thread, `shm` in a thread of the
//! memory node's process to which other processes attach.

pub mod bucket;
pub mod cqe;
mod crc;
mod dma;
pub mod engine;
pub mod error;
mod guard;
pub mod ids;
pub mod memory;
#[cfg(test)]
#[path = "../../../tests/src/needs.rs"]
mod needs;
pub mod port;
pub mod protection;
mod qp;
mod queue;
mod spaces;
mod table;
pub mod verbs;
pub mod wire;
pub mod wqe;

pub use engine::Engine;
pub use error::Error;
