//! A model checker that runs the memory pool's own code: every order in which the NIC, its clients
//! and the memory node's CPU can take their steps, in small configurations.
//!
//! ```text
//!  explore ── actions, act, put back ──> world ── step(qpn) ──> rnic::Engine   the real one
//!     │                                    │  └── one verb ───> cpu: pool::onesidedmw::Node, the real one
//!     │ digest, undo                       └── post, crash ───> client: raw verbs, lies included
//!   arena (all bytes of a world)           spec: what each step may change
//! ```
//!
//! - module [`config`]: what is explored.
//! - module [`spec`]: what must hold.
//! - function [`explore()`]: how.
//!
//! An action is indivisible: one WQE of one QP, a client's post (ring and doorbell), the end of a client's process
//! (its function is removed), or what the CPU does from one verb to the next. All else interleaves.

mod arena;
mod client;
pub mod config;
mod cpu;
pub mod explore;
mod nic;
pub mod spec;
mod world;

pub use config::Config;
pub use explore::{Report, Violation, explore, prepare};
