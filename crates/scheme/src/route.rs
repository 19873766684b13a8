//! Addressing of a QP's peer on another host.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use verbs::{PairSecret, PathMtu, PeerAddress, Psn, Qpn, RemotePeer};

/// UDP port and MTU of the NIC at one end of a control connection. Its IP address is that of the
/// connection, so that neither end can direct packets to a third party.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RoceEnd {
    /// UDP port of its RoCEv2 traffic.
    pub port: u16,
    /// Maximum payload of a packet on its link.
    pub mtu: PathMtu,
}

/// Path from local QPs to QPs on another host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Destination address of packets.
    pub address: SocketAddr,
    /// Source address of packets.
    pub local: IpAddr,
    /// Maximum payload of a packet.
    pub mtu: PathMtu,
}

/// Local ACK timeout exponent: 4.096 us * 2^18 = 1.07 s. Retransmissions normally happen much
/// earlier, after a timeout derived from the measured round-trip time. With [`RETRIES`], the QP
/// fails after about 9 s; by then the control connection has detected a dead host, too.
const TIMEOUT: u8 = 18;
const RETRIES: u8 = 7;
/// RNR retry count 7 (unlimited). Receives are posted before the requests that need them; where
/// they are not, a chain posts them later.
const RNR_UNLIMITED: u8 = 7;

impl Route {
    /// The path from a NIC with `here` at the address `local` to a NIC with `there` at `remote`.
    pub fn between(local: IpAddr, here: RoceEnd, remote: IpAddr, there: RoceEnd) -> Self {
        let address = SocketAddr::new(remote, there.port);
        Self { address, local, mtu: here.mtu.min(there.mtu) }
    }

    /// Address of the QP `qpn` on the other host, with its initial state.
    pub fn peer(&self, qpn: Qpn, start: Start) -> PeerAddress {
        let peer = RemotePeer {
            mtu: self.mtu,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_UNLIMITED,
            ..RemotePeer::new(self.address, self.local, qpn)
        };
        with_start(peer.into(), start)
    }
}

/// Initial state of two connected QPs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// This PSN in both directions. For a NIC other than Granary's, which has no secret and whose
    /// packets may come from any UDP port.
    Psn(Psn),
    /// PSNs and packet keys that both ends derive from a secret.
    Secret(PairSecret),
}

impl Default for Start {
    fn default() -> Self {
        Start::Psn(Psn::new(0))
    }
}

/// Address of the QP `qpn` on the host of `peer`, with the same initial state.
pub fn sibling_peer(peer: PeerAddress, qpn: Qpn) -> PeerAddress {
    match peer {
        PeerAddress::Local(_) => qpn.into(),
        PeerAddress::Remote(peer) => RemotePeer { qpn, ..peer }.into(),
    }
}

/// The same peer with another initial state.
pub fn with_start(peer: PeerAddress, start: Start) -> PeerAddress {
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
    fn route_uses_the_smaller_mtu_and_valid_peers() {
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
        assert_eq!(rnic::wire::check_peer(&plain), Ok(()));
        assert_eq!((plain.local, plain.sq_psn), (route.local, plain.rq_psn));
        assert!(!plain.fixed_port, "other NICs use varying ports");
        let side = verbs::SecretSide::Asking;
        let secret = PairSecret { bytes: [1; 32], side, authenticated: true };
        let ours = peer(Start::Secret(secret));
        assert_eq!(
            (rnic::wire::check_peer(&ours), ours.secret, ours.fixed_port),
            (Ok(()), Some(secret), true)
        );
    }
}
