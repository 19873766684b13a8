//! Helpers of the whole-system tests.

pub mod pager;
