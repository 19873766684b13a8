//! Limits of a connection to a QP of another NIC.

use std::net::IpAddr;

use verbs::{PathMtu, RemotePeer};

use super::packet;
use crate::error::Error;

/// Checks that all attributes of `peer` are within the limits of a connection.
pub fn check_peer(peer: &RemotePeer) -> Result<(), Error> {
    let within = |what, value: u8, from: u8, to: u8, must| {
        let value = value as u64;
        let inside = (from as u64..=to as u64).contains(&value);
        if inside { Ok(()) } else { Err(Error::Argument { what, value, must }) }
    };
    within("the local ACK timeout of a connection", peer.timeout, 1, 31, "1 to 31")?;
    within("the retry count of a connection", peer.retry_cnt, 0, 7, "0 to 7")?;
    within("the RNR retry count of a connection", peer.rnr_retry, 0, 7, "0 to 7")?;
    within("the RNR timer code of a connection", peer.min_rnr_timer, 0, 31, "0 to 31")?;
    let max = RemotePeer::RD_ATOMIC_MAX;
    within("max_rd_atomic", peer.max_rd_atomic, 1, max, "1 to 16")?;
    within("max_dest_rd_atomic", peer.max_dest_rd_atomic, 1, max, "1 to 16")?;
    let ip = peer.address.ip();
    let is_no_host = |ip: IpAddr| ip.is_unspecified() || ip.is_multicast();
    if is_no_host(ip) || is_no_host(peer.local) || peer.address.port() == 0 {
        return Err(Error::Address { address: peer.address, local: peer.local });
    }
    if ip.is_ipv4() != peer.local.is_ipv4() {
        return Err(Error::Address { address: peer.address, local: peer.local });
    }
    Ok(())
}

/// Returns the largest path MTU whose packets, with all headers, fit IP packets of `bytes`, if any
/// does.
pub fn fitting_mtu(bytes: u32) -> Option<PathMtu> {
    // IPv6, UDP, the longest sequence of transport headers, padding and the longest trailer.
    let around = 40 + 8 + packet::HEADERS_MAX as u32 + packet::TRAILER_MAX as u32;
    PathMtu::ALL.into_iter().rev().find(|mtu| mtu.bytes() + around <= bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbs::Qpn;

    fn peer() -> RemotePeer {
        RemotePeer::new(
            "10.0.0.2:4791".parse().unwrap(),
            "10.0.0.1".parse().unwrap(),
            Qpn::new(0x123),
        )
    }

    #[test]
    fn check_rejects_invalid_attributes() {
        assert_eq!(check_peer(&peer()), Ok(()));
        let wrong: [fn(&mut RemotePeer); 10] = [
            |p| p.timeout = 0,
            |p| p.timeout = 32,
            |p| p.retry_cnt = 8,
            |p| p.rnr_retry = 8,
            |p| p.min_rnr_timer = 32,
            |p| p.max_rd_atomic = 0,
            |p| p.max_dest_rd_atomic = 17,
            |p| p.address = "[::1]:4791".parse().unwrap(),
            |p| p.address = "0.0.0.0:4791".parse().unwrap(),
            |p| p.local = "224.0.0.1".parse().unwrap(),
        ];
        for (i, spoil) in wrong.into_iter().enumerate() {
            let mut p = peer();
            spoil(&mut p);
            assert!(check_peer(&p).is_err(), "{i}");
        }
    }

    #[test]
    fn path_mtu_leaves_room_for_headers() {
        // IPv6, UDP, BTH, RETH and immediate or the atomic header, pad, counter and tag.
        let around = 40 + 8 + packet::HEADERS_MAX as u32 + 3 + 20;
        for mtu in PathMtu::ALL {
            assert_eq!(fitting_mtu(mtu.bytes() + around), Some(mtu));
            assert!(fitting_mtu(mtu.bytes() + around - 1) < Some(mtu));
        }
        assert_eq!(fitting_mtu(1500), Some(PathMtu::Mtu1024));
        assert_eq!(fitting_mtu(9000), Some(PathMtu::Mtu4096));
        assert_eq!(fitting_mtu(65536), Some(PathMtu::Mtu4096));
        assert_eq!(fitting_mtu(300), None);
    }
}
