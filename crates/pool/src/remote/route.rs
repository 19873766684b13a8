//! How a QP reaches its peer on another host.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use fabric::{PathMtu, PeerAddress, Psn, Qpn, RemotePeer};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use crate::Error;

/// What one end of a control connection says of its NIC. Its IP address is that of the connection, so that
/// nobody has packets sent to a third party.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RoceEnd {
    /// UDP port of its RoCEv2.
    pub port: u16,
    /// The most payload of a packet that its link takes.
    pub mtu: PathMtu,
}

impl RoceEnd {
    /// A NIC with UDP port `port` at the address of this end of a TCP connection, which also knows the way's MTU.
    pub fn of(stream: impl AsFd, port: u16) -> Result<Self, Errno> {
        let bytes = match rustix::net::sockopt::ip_mtu(&stream) {
            Ok(bytes) => bytes,
            Err(_) => rustix::net::sockopt::ipv6_mtu(&stream)?,
        };
        let mtu = PathMtu::fitting(bytes).ok_or(Errno::MSGSIZE)?;
        Ok(Self { port, mtu })
    }
}

/// The way from the QPs here to those of another host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Where packets go.
    pub address: SocketAddr,
    /// The address here that they come from.
    pub local: IpAddr,
    /// The most payload of a packet.
    pub mtu: PathMtu,
}

/// Local ACK timeout: 4.096 us times two to this power, so 1.07 s. What has been measured of the connection makes
/// retransmissions much earlier; with [`RETRIES`] a peer is given up after some 9 s, when the control
/// connection has noticed too that a host is gone.
const TIMEOUT: u8 = 18;
const RETRIES: u8 = 7;
/// Receives are posted before they are asked for, and where they are not, a chain comes to it.
const RNR_FOR_EVER: u8 = 7;

impl Route {
    /// The way from a NIC with `here` at the address `local` to one with `there` at `remote`.
    pub fn between(local: IpAddr, here: RoceEnd, remote: IpAddr, there: RoceEnd) -> Self {
        let address = SocketAddr::new(remote, there.port);
        Self { address, local, mtu: here.mtu.min(there.mtu) }
    }

    /// The QP `qpn` at its end. Both ends begin with `psn`.
    pub fn peer(&self, qpn: Qpn, psn: Psn) -> PeerAddress {
        PeerAddress::Remote(RemotePeer {
            mtu: self.mtu,
            sq_psn: psn,
            rq_psn: psn,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_FOR_EVER,
            ..RemotePeer::new(self.address, self.local, qpn)
        })
    }
}

/// The QP `qpn` where `peer` is, that begins as that does.
pub fn beside(peer: PeerAddress, qpn: Qpn) -> PeerAddress {
    match peer {
        PeerAddress::Local(_) => qpn.into(),
        PeerAddress::Remote(peer) => RemotePeer { qpn, ..peer }.into(),
    }
}

/// The same peer, with `psn` to begin with at both ends.
pub fn from_psn(peer: PeerAddress, psn: Psn) -> PeerAddress {
    match peer {
        PeerAddress::Local(_) => peer,
        PeerAddress::Remote(peer) => RemotePeer { sq_psn: psn, rq_psn: psn, ..peer }.into(),
    }
}

/// A PSN to begin with, so that packets of an earlier connection of the same QPs do not fit.
pub fn random_psn() -> Result<Psn, Error> {
    let mut bytes = [0; 4];
    match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
        Ok(4) => Ok(Psn::new(u32::from_ne_bytes(bytes) & Psn::MAX)),
        Ok(_) | Err(Errno::INTR) => random_psn(),
        Err(e) => Err(Error::System { attempt: "drawing random numbers".into(), source: e.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_takes_the_smaller_mtu_and_its_peers_can_be_connected() {
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        let end = |port, mtu| RoceEnd { port, mtu };
        let route = Route::between(
            ip("10.0.0.1"),
            end(4791, PathMtu::Mtu4096),
            ip("10.0.0.2"),
            end(5000, PathMtu::Mtu1024),
        );
        assert_eq!(route.address, "10.0.0.2:5000".parse().unwrap());
        assert_eq!(route.mtu, PathMtu::Mtu1024);
        let PeerAddress::Remote(peer) = route.peer(Qpn::new(7), random_psn().unwrap()) else {
            panic!("a route leads to another host");
        };
        assert_eq!(peer.check(), Ok(()));
        assert_eq!((peer.local, peer.sq_psn), (route.local, peer.rq_psn));
    }
}
