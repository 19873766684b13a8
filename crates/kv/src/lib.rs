//! A key-value index in disaggregated memory.
pub mod environment;
pub mod hash;
pub mod layout;
pub mod place;
pub mod reach;
