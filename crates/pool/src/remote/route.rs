//! How a QP reaches its peer on another host.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use fabric::{PairSecret, PathMtu, PeerAddress, Psn, Qpn, RemotePeer};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::scheme::{GroupId, Lane};

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

    /// The QP `qpn` at its end, with what both ends begin with.
    pub fn peer(&self, qpn: Qpn, start: Start) -> PeerAddress {
        let peer = RemotePeer {
            mtu: self.mtu,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_FOR_EVER,
            ..RemotePeer::new(self.address, self.local, qpn)
        };
        begun(peer.into(), start)
    }
}

/// What two connected QPs begin with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// This PSN, both ways. The peer is none of Granary's NICs: it has no secret, and its packets
    /// come from any port.
    Psn(Psn),
    /// What both ends draw from a secret.
    Secret(PairSecret),
}

impl Default for Start {
    fn default() -> Self {
        Start::Psn(Psn::new(0))
    }
}

/// The QP `qpn` where `peer` is, that begins as that does.
pub fn beside(peer: PeerAddress, qpn: Qpn) -> PeerAddress {
    match peer {
        PeerAddress::Local(_) => qpn.into(),
        PeerAddress::Remote(peer) => RemotePeer { qpn, ..peer }.into(),
    }
}

/// Of access QPs, each with its peer: what that of a lane begins with. Nothing if there is no such
/// lane.
pub(crate) fn renew_lane<T>(
    groups: &mut [Vec<(T, PeerAddress)>],
    group: GroupId,
    lane: Lane,
    start: Start,
) {
    let lanes = groups.get_mut(group.0 as usize);
    if let Some((_, peer)) = lanes.and_then(|lanes| lanes.get_mut(lane.0 as usize)) {
        *peer = begun(*peer, start);
    }
}

/// The same peer, with what both ends begin with.
pub fn begun(peer: PeerAddress, start: Start) -> PeerAddress {
    let PeerAddress::Remote(peer) = peer else { return peer };
    let (psn, secret) = match start {
        Start::Psn(psn) => (psn, None),
        Start::Secret(secret) => (Psn::new(0), Some(secret)),
    };
    let fixed_port = secret.is_some();
    RemotePeer { sq_psn: psn, rq_psn: psn, secret, fixed_port, ..peer }.into()
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
        let peer = |start| match route.peer(Qpn::new(7), start) {
            PeerAddress::Remote(peer) => peer,
            PeerAddress::Local(_) => panic!("a route leads to another host"),
        };
        let plain = peer(Start::Psn(Psn::new(9)));
        assert_eq!(plain.check(), Ok(()));
        assert_eq!((plain.local, plain.sq_psn), (route.local, plain.rq_psn));
        assert!(!plain.fixed_port, "other NICs vary the port");
        let side = fabric::SecretSide::Asking;
        let secret = PairSecret { bytes: [1; 32], side, authenticated: true };
        let ours = peer(Start::Secret(secret));
        assert_eq!((ours.check(), ours.secret, ours.fixed_port), (Ok(()), Some(secret), true));
    }
}
