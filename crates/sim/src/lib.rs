//! Virtual time: the very code that runs on real NICs (RNIC engine, allocation schemes, clients),
//! on a NIC whose time is computed.
//!
//! ```text
//!   fibers: client threads, the memory node's cores        (fiber.rs)
//!      │ verbs (fabric::hooked)                            (nic.rs)
//!      ▼
//!   one engine, stepped WQE by WQE <── events in the order of time   (world.rs)
//!      what a WQE waits for: units, PCIe, link, CPU        (timing.rs, resource.rs, params.rs)
//!      what the network does to it                         (net.rs)
//! ```
//!
//! - One seed decides everything; the same seed gives the same run, to the byte, on any machine.
//! - A WQE takes effect when its request arrives at the responder; its completion is seen when the
//!   answer has come back.
//! - All nodes' NICs share one engine: what differs between them is where a QP was made.

pub mod check;
mod cluster;
mod error;
pub mod fiber;
mod net;
mod nic;
pub mod params;
mod queues;
mod random;
mod resource;
mod state;
mod time;
mod timing;
mod world;

pub use cluster::{Cluster, ClusterSpec, Connector, Link, Process, SimControl};
pub use error::Error;
pub use net::{Faults, Partition};
pub use nic::{SimHooks, SimNic};
pub use params::Params;
pub use queues::Observed;
pub use random::Random;
pub use state::{Counters, NodeId};
pub use time::Time;
pub use world::Sim;
