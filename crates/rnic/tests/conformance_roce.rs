//! The conformance suite over RoCEv2: two NICs of one process, each with its own socket.

#[path = "../../../tests/src/needs.rs"]
mod needs;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};

use rnic::nic::{SoftNic, SoftQp};
use verbs::conformance::{self, Bench, Side};
use verbs::{
    Error, Feature, PairSecret, PeerAddress, Psn, QpChange, QueuePair, RemotePeer, SecretSide,
};

/// Local ACK timeout: 0.27 s. Eight of them pass on a busy machine only if the peer does not
/// answer.
const TIMEOUT: u8 = 16;

/// Two NICs that reach each other over UDP.
struct Roce {
    client: SoftNic,
    server: SoftNic,
    addresses: [SocketAddr; 2],
    packets: Packets,
    /// Number of connection ends so far.
    ends: AtomicU32,
}

/// Threads that run the NICs.
#[derive(Clone, Copy)]
enum RunBy {
    /// The thread of each NIC.
    Thread,
    /// Also the threads that wait for completions.
    Callers,
}

/// Whether packets are authenticated.
#[derive(Clone, Copy, PartialEq)]
enum Packets {
    Plain,
    Authenticated,
}

impl Roce {
    fn over(address: IpAddr, by: RunBy, packets: Packets) -> Self {
        let socket = || UdpSocket::bind((address, 0)).expect("a socket");
        let sockets = [socket(), socket()];
        let addresses = [0, 1].map(|i: usize| sockets[i].local_addr().expect("an address"));
        let [client, server] = sockets.map(|s| match by {
            RunBy::Thread => SoftNic::host_over(s).expect("a NIC").0,
            RunBy::Callers => SoftNic::over(s).expect("a NIC"),
        });
        Self { client, server, addresses, packets, ends: AtomicU32::new(0) }
    }
}

impl Bench for Roce {
    type Nic = SoftNic;

    fn client(&self) -> &SoftNic {
        &self.client
    }

    fn server(&self) -> &SoftNic {
        &self.server
    }

    fn connection_lacks(&self) -> &'static [Feature] {
        // RoCEv2 has no opcode for masked atomics.
        &[Feature::MaskedAtomics]
    }

    fn to_rtr(
        &self,
        (here, qp): (Side, &SoftQp),
        (there, peer): (Side, &SoftQp),
    ) -> Result<(), Error> {
        // Each connection has its own PSNs, so that late packets of an earlier connection are not
        // accepted.
        let ends = if here == there { 2 } else { 1 };
        let connection = self.ends.fetch_add(ends, Ordering::Relaxed) / 2;
        let psn = Psn::new(connection.wrapping_mul(0x1_0000).wrapping_sub(5));
        let side = match here {
            Side::Client => SecretSide::Asking,
            Side::Server => SecretSide::Asked,
        };
        // A QP that is its own peer would need both sides of the secret.
        let has_secret = self.packets == Packets::Authenticated && here != there;
        let secret = has_secret.then(|| {
            let mut bytes = [0x5e; 32];
            bytes[..4].copy_from_slice(&connection.to_be_bytes());
            PairSecret { bytes, side, authenticated: true }
        });
        let [here, there] = [here, there].map(|side| self.addresses[side as usize]);
        let peer = RemotePeer::new(there, here.ip(), peer.qpn());
        let peer = RemotePeer { sq_psn: psn, rq_psn: psn, secret, timeout: TIMEOUT, ..peer };
        qp.modify(QpChange::ReadyToReceive { peer: PeerAddress::Remote(peer) })
    }
}

fn check(address: IpAddr, by: RunBy, packets: Packets) {
    let report = conformance::run(&Roce::over(address, by, packets));
    println!("{report}");
    let lacking: Vec<_> =
        report.skipped.iter().filter(|(_, why)| why.contains(" lacks ")).map(|s| s.0).collect();
    assert_eq!(lacking, ["regions.remote_write_needs_local_write", "atomics.masked"]);
}

#[test]
fn roce_over_ipv4() {
    check("127.0.0.1".parse().expect("an address"), RunBy::Thread, Packets::Plain);
}

#[test]
fn authenticated_roce() {
    check("127.0.0.1".parse().expect("an address"), RunBy::Thread, Packets::Authenticated);
}

#[test]
fn authenticated_roce_run_by_its_callers() {
    check("127.0.0.1".parse().expect("an address"), RunBy::Callers, Packets::Authenticated);
}

#[test]
fn roce_run_by_its_callers() {
    check("127.0.0.1".parse().expect("an address"), RunBy::Callers, Packets::Plain);
}

#[test]
fn roce_over_ipv6() {
    let loopback: IpAddr = "::1".parse().expect("an address");
    if UdpSocket::bind((loopback, 0)).is_err() {
        return needs::skip("this machine has no IPv6");
    }
    check(loopback, RunBy::Thread, Packets::Authenticated);
}
