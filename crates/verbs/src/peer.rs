//! Description of the peer of a connection, as an argument of `modify_qp`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::{Psn, Qpn};

/// The QP to which a QP is connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerAddress {
    /// A QP of this NIC.
    Local(Qpn),
    /// A QP of another NIC, over RoCEv2.
    Remote(RemotePeer),
}

impl From<Qpn> for PeerAddress {
    fn from(qpn: Qpn) -> Self {
        PeerAddress::Local(qpn)
    }
}

impl From<RemotePeer> for PeerAddress {
    fn from(peer: RemotePeer) -> Self {
        PeerAddress::Remote(peer)
    }
}

impl PeerAddress {
    /// The QP number of the peer.
    pub fn qpn(&self) -> Qpn {
        match self {
            PeerAddress::Local(qpn) => *qpn,
            PeerAddress::Remote(peer) => peer.qpn,
        }
    }
}

/// A QP of another NIC, with the connection attributes that `ibv_modify_qp` takes for RTR and RTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemotePeer {
    /// IP address and UDP port of the peer; the port is usually 4791. Packets from
    /// another IP address are dropped.
    pub address: SocketAddr,
    /// The peer sends from the port of `address`: packets from another port are dropped. Granary's
    /// NICs send from the port on which they receive; Linux's soft-RoCE and hardware vary the
    /// source port.
    #[serde(default)]
    pub fixed_port: bool,
    /// The IP address of this end: the source of sent packets and the destination of received
    /// packets.
    pub local: IpAddr,
    /// The peer's QP number.
    pub qpn: Qpn,
    /// Maximum payload of a packet, the same at both ends.
    pub mtu: PathMtu,
    /// PSN of the first request that this end sends. Should be random. Not used if there is a
    /// secret.
    pub sq_psn: Psn,
    /// PSN of the first request of the peer: the peer's `sq_psn`. Not used if there is a secret.
    pub rq_psn: Psn,
    /// The shared secret, from which the first PSNs and the keys of both directions are derived.
    /// `None` if the peer does not support secrets (Linux's soft-RoCE, hardware).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<PairSecret>,
    /// Code of the local ACK timeout, 1 to 31: 4.096 us times two to this power (IBTA vol. 1,
    /// §9.7.6.1.3). Round-trip measurements make retransmissions earlier, never later.
    pub timeout: u8,
    /// Number of retries, 0 to 7. The connection fails if the peer acknowledges nothing for
    /// `retry_cnt + 1` local ACK timeouts.
    pub retry_cnt: u8,
    /// Number of times that a request is retransmitted after RNR NAKs in succession, 0 to 6; 7 for
    /// no limit.
    pub rnr_retry: u8,
    /// Code of the delay in RNR NAKs that this end sends, 0 to 31 (IBTA vol. 1, §9.7.5.2.8).
    pub min_rnr_timer: u8,
    /// Maximum outstanding READs and atomics of this end, 1 to 16.
    pub max_rd_atomic: u8,
    /// Maximum outstanding READs and atomics of the peer, 1 to 16. A further one is an invalid
    /// request.
    pub max_dest_rd_atomic: u8,
}

impl RemotePeer {
    /// Maximum of `max_rd_atomic` and `max_dest_rd_atomic`.
    pub const RD_ATOMIC_MAX: u8 = 16;

    /// A peer with values for a local network: a local ACK timeout of 67 ms, seven retries,
    /// unlimited RNR retries, 16 READs and atomics in each direction, an MTU of 1024, PSNs from 0.
    pub fn new(address: SocketAddr, local: IpAddr, qpn: Qpn) -> Self {
        Self {
            address,
            fixed_port: false,
            local,
            qpn,
            mtu: PathMtu::Mtu1024,
            sq_psn: Psn::new(0),
            rq_psn: Psn::new(0),
            secret: None,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            max_rd_atomic: Self::RD_ATOMIC_MAX,
            max_dest_rd_atomic: Self::RD_ATOMIC_MAX,
        }
    }

    /// Whether `source` is an address from which this peer sends.
    #[inline]
    pub fn sends_from(&self, source: SocketAddr) -> bool {
        let address = self.address;
        address.ip() == source.ip() && (!self.fixed_port || address.port() == source.port())
    }

    /// Whether packets of the connection have authentication tags.
    pub fn is_authenticated(&self) -> bool {
        self.secret.is_some_and(|secret| secret.authenticated)
    }
}

/// Path MTU: the maximum payload of a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(into = "u16", try_from = "u16")]
pub enum PathMtu {
    /// 256 bytes.
    Mtu256,
    /// 512 bytes.
    Mtu512,
    /// 1024 bytes: fits Ethernet's 1500.
    Mtu1024,
    /// 2048 bytes.
    Mtu2048,
    /// 4096 bytes.
    Mtu4096,
}

impl PathMtu {
    /// All path MTUs, in ascending order.
    pub const ALL: [PathMtu; 5] =
        [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];

    /// The payload in bytes.
    #[inline]
    pub const fn bytes(self) -> u32 {
        256 << self as u32
    }
}

impl From<PathMtu> for u16 {
    fn from(mtu: PathMtu) -> u16 {
        mtu.bytes() as u16
    }
}

impl TryFrom<u16> for PathMtu {
    type Error = &'static str;

    fn try_from(bytes: u16) -> Result<Self, Self::Error> {
        let found = Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes as u32);
        found.ok_or("a path MTU is 256, 512, 1024, 2048 or 4096 bytes")
    }
}

/// The end of a connection that a NIC is. It distinguishes the two directions even if both QPs have
/// the same number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecretSide {
    /// The end that requested the connection.
    Asking,
    /// The end that accepted the connection.
    Asked,
}

/// The shared secret of the two ends of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairSecret {
    /// The secret bytes: the same at both ends, and new for each connection of the two QPs.
    pub bytes: [u8; PairSecret::BYTES],
    /// This end of the connection.
    pub side: SecretSide,
    /// Packets are authenticated in both directions. If false, packets have an ICRC, and only the
    /// first PSNs are derived from the secret.
    pub authenticated: bool,
}

impl fmt::Debug for PairSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { side, authenticated, .. } = self;
        write!(f, "PairSecret({side:?}, authenticated: {authenticated})")
    }
}

impl PairSecret {
    /// Bytes of a secret.
    pub const BYTES: usize = 32;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> RemotePeer {
        RemotePeer::new(
            "10.0.0.2:4791".parse().unwrap(),
            "10.0.0.1".parse().unwrap(),
            Qpn::new(0x123),
        )
    }

    fn secret(authenticated: bool) -> PairSecret {
        PairSecret { bytes: [7; PairSecret::BYTES], side: SecretSide::Asked, authenticated }
    }

    #[test]
    fn peer_address_round_trips_through_json() {
        for address in [PeerAddress::from(peer()), PeerAddress::from(Qpn::new(77))] {
            let text = serde_json::to_string(&address).unwrap();
            assert_eq!(serde_json::from_str::<PeerAddress>(&text).unwrap(), address, "{text}");
        }
        let odd = serde_json::to_string(&peer()).unwrap().replace("1024", "1000");
        assert!(serde_json::from_str::<RemotePeer>(&odd).is_err());
    }

    #[test]
    fn peer_address_returns_its_qp_number() {
        assert_eq!(PeerAddress::from(peer()).qpn(), Qpn::new(0x123));
        assert_eq!(PeerAddress::from(Qpn::new(77)).qpn(), Qpn::new(77));
    }

    #[test]
    fn peer_sends_from_its_address_and_from_its_port_if_fixed() {
        let mut peer = peer();
        let other_port = "10.0.0.2:5000".parse().unwrap();
        let other_host = "10.0.0.3:4791".parse().unwrap();
        assert!(peer.sends_from(peer.address) && peer.sends_from(other_port));
        assert!(!peer.sends_from(other_host));
        peer.fixed_port = true;
        assert!(peer.sends_from(peer.address));
        assert!(!peer.sends_from(other_port) && !peer.sends_from(other_host));
    }

    #[test]
    fn secret_says_whether_packets_are_authenticated() {
        let mut peer = peer();
        assert!(!peer.is_authenticated());
        for authenticated in [false, true] {
            peer.secret = Some(secret(authenticated));
            assert_eq!(peer.is_authenticated(), authenticated);
        }
    }

    #[test]
    fn debug_output_hides_the_secret() {
        let text = format!("{:?}", secret(true));
        assert_eq!(text, "PairSecret(Asked, authenticated: true)");
    }

    #[test]
    fn path_mtu_has_its_length_in_json() {
        assert_eq!(PathMtu::ALL.map(PathMtu::bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!(PathMtu::ALL.map(u16::from), [256, 512, 1024, 2048, 4096]);
    }
}
