//! A key-value index in disaggregated memory.
pub mod blocks;
pub mod environment;
mod error;
mod gate;
pub mod hash;
pub mod layout;
pub mod memory;
pub mod place;
pub mod pooled;
pub mod reach;
mod search;
mod store;
mod table;
mod ticket;
mod uses;

pub use error::Error;
pub use store::*;
