//! Checks of objects, permissions and leases, for every scheme that has them.
//!
//! Each check runs with two or more compute nodes of one memory node: inside one process on the
//! inline NIC, and behind the memory node's control socket.

mod bed;
mod ends;
mod lifetime;
mod published;
mod sharing;
mod unprotected;

use pool::schemes;

/// The checks of this file run for the schemes of `schemes::ALL`.
#[test]
fn patronus_is_checked() {
    assert!(schemes::ALL.contains(&schemes::PATRONUS));
}
