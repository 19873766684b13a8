//! Helpers of the whole-system tests.

pub mod node;
pub mod pager;
pub mod run;
pub mod thread;
