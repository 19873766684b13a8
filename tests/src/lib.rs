//! Helpers of the whole-system tests.

pub mod control;
pub mod hosts;
pub mod node;
pub mod pager;
pub mod run;
pub mod scene;
pub mod thread;
