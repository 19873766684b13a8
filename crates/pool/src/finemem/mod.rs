//! FineMem: one-sided allocation by a bitmap tree in the memory node's memory.
//!
//! Here are the layouts of its metadata ([`header`], [`log`], [`layout`]) and the algorithms on them
//! ([`tree`]), which own no NIC.

pub mod header;
pub mod layout;
pub mod log;
pub mod table;
pub mod tree;
