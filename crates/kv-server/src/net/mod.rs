//! Event loop, tasks and sockets of a thread.

pub(crate) mod event_loop;
pub(crate) mod inbox;
pub(crate) mod listen;
pub(crate) mod stream;
pub(crate) mod timer;
pub(crate) mod tls;
