//! The pager.
