//! The preload library.
