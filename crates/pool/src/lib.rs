//! The memory pool: memory nodes donate RAM, compute nodes allocate it in chunks and reach it with
//! one-sided operations.
//!
//! [`scheme`] says what an allocation scheme is, on both sides; each scheme has a module of its
//! own. Nothing here names a NIC: all of it is written against `fabric`'s verbs.

mod credits;
mod error;
pub mod onesidedmw;
pub mod protocol;
pub mod scheme;
mod settings;

pub use error::Error;
pub use scheme::{Admission, Admitted, ClientId, Grant, GroupId, Lane, NodeStatus};
pub use settings::{ControlMode, SchemeKind, Settings};
