//! Simulation in virtual time: the product's code (RNIC engine, allocation schemes, clients) runs
//! on a NIC whose timing is computed by a model.
//!
//! ```text
//!   fibers: client threads, the memory node's cores        (fiber.rs)
//!      │ verbs (rnic::nic::interposed)                        (nic.rs)
//!      ▼
//!   one engine, stepped WQE by WQE <── events in time order  (world.rs)
//!      timing of a WQE: units, PCIe, link, CPU             (timing.rs, resource.rs, params.rs)
//!      faults of the network                               (net.rs)
//! ```
//!
//! - A seed determines the whole run: the same seed gives the same run, to the byte, on any
//!   machine.
//! - A WQE takes effect when its request arrives at the responder. Its completion becomes visible
//!   when the answer has returned.
//! - All nodes' NICs share one engine. A QP belongs to the node on which it was created.

pub mod check;
mod clock;
mod cluster;
mod error;
pub mod fiber;
mod ids;
mod net;
mod nic;
pub mod params;
mod qp;
mod qp_schedule;
mod random;
mod replies;
mod resource;
mod state;
mod time;
mod timing;
mod waits;
mod world;

pub use clock::Clock;
pub use cluster::{Cluster, ClusterSpec, Connector, Link, Process, SimControl};
pub use error::Error;
pub use ids::NodeId;
pub use net::{Faults, Partition};
pub use nic::{SimHooks, SimNic};
pub use params::Params;
pub use qp::Observed;
pub use random::Random;
pub use state::{Counters, VerbStall};
pub use time::Time;
pub use waits::Waits;
pub use world::Sim;
