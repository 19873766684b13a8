//! A model checker that runs the memory pool's own code.
//!
//! In small configurations it explores every order in which the NIC, its clients and the memory
//! node's CPU can take their steps.
//!
//! ```text
//!  explore ── actions, act, undo ──> world ── step(qpn) ──> rnic::Engine, unchanged
//!     │                                │  └── one verb ───> cpu: onesidedmw::Node, unchanged
//!     │ digest, undo                   └── post, crash ───> client: raw verbs, also invalid ones
//!   arena (all bytes of a world)       spec: the changes that a step may make
//! ```
//!
//! - module [`config`]: the explored configurations.
//! - module [`spec`]: the specification.
//! - function [`explore()`]: the exploration.
//!
//! An action is indivisible. Actions are: one WQE of one QP, a client's post (ring and doorbell),
//! the end of a client's process (its function is removed), and the CPU's work from one verb to the
//! next. All actions interleave.

mod arena;
mod client;
pub mod config;
mod cpu;
pub mod explore;
mod nic;
mod schedule;
pub mod spec;
mod world;

pub use config::Config;
pub use explore::{Report, Violation, explore, prepare};
