//! Quantities that several crates use. This crate depends on no other crate of Granary.

pub mod cpus;
