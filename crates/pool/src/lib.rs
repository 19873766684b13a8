//! The memory pool.
