//! The local end of a route to another host.

use std::os::fd::AsFd;

use rnic::wire::fitting_mtu;
use rustix::io::Errno;

pub use rnic::wire::UDP_PORT;
pub use scheme::route::{RoceEnd, Route, Start, sibling_peer};

/// The end of a NIC with UDP port `port` at the local address of a TCP connection, which also
/// supplies the path MTU.
pub fn roce_end(stream: impl AsFd, port: u16) -> Result<RoceEnd, Errno> {
    let bytes = match rustix::net::sockopt::ip_mtu(&stream) {
        Ok(bytes) => bytes,
        Err(_) => rustix::net::sockopt::ipv6_mtu(&stream)?,
    };
    let mtu = fitting_mtu(bytes).ok_or(Errno::MSGSIZE)?;
    Ok(RoceEnd { port, mtu })
}
