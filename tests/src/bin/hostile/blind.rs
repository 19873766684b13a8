//! Forged packets that any user of a compute node's host can send: over an own UDP socket, without
//! token, key or privilege. The attack knows the QP numbers, which a real attacker does not.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rnic::wire::Packet;
use rnic::wire::icrc::{Route, RouteIcrc};
use rnic::wire::packet::{Body, Notice, PACKET_MAX, Part};
use serde_json::{Value, json};
use verbs::wqe::Remote;
use verbs::{Key, Psn, Qpn};

use crate::compute::{Compute, status};
use units::Random;

use crate::Arguments;

/// Packets per send: the kernel's limit of UDP segmentation offload.
const BURST: usize = 64;

/// A UDP socket that sends packets of RoCEv2.
struct Forger {
    socket: UdpSocket,
    to: SocketAddr,
    icrcs: RouteIcrc,
    sent: u64,
}

impl Forger {
    /// Creates a socket that sends to the memory node of `me`, from the address of `me` and another
    /// port.
    fn new(me: &Compute) -> Result<Self> {
        let route = me.route().context("the memory node is on this host")?;
        let socket = UdpSocket::bind((route.local, 0)).context("a UDP socket")?;
        use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO)?;
        let icrcs = RouteIcrc::new(Route::new(socket.local_addr()?, route.address));
        Ok(Self { socket, to: route.address, icrcs, sent: 0 })
    }

    /// Makes the kernel split each send into packets of `bytes`.
    fn set_segment_size(&self, bytes: usize) -> Result<()> {
        let bytes = bytes as i32;
        // SAFETY: the value and its length are valid until the call returns.
        let done = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_UDP,
                libc::UDP_SEGMENT,
                (&raw const bytes).cast(),
                size_of::<i32>() as u32,
            )
        };
        ensure!(done == 0, "UDP_SEGMENT: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Sends copies of `packet`, each modified by `change`, until `change` returns false.
    fn send(
        &mut self,
        packet: &Packet<'_>,
        mut change: impl FnMut(&mut [u8]) -> bool,
    ) -> Result<()> {
        let mut bytes = [0; PACKET_MAX];
        let len = packet.encode(&mut bytes);
        self.set_segment_size(len)?;
        let mut burst = bytes[..len].repeat(BURST);
        loop {
            let mut goes_on = true;
            for (i, packet) in burst.chunks_mut(len).enumerate() {
                goes_on &= change(packet);
                self.icrcs.seal(i as u16, packet);
            }
            // A full socket buffer loses the packets, as a network does.
            if self.socket.send_to(&burst, self.to).is_ok() {
                self.sent += BURST as u64;
            }
            if !goes_on {
                return Ok(());
            }
        }
    }
}

/// A SEND packet with this payload to a QP.
fn send_to(qpn: u32, payload: &[u8]) -> Packet<'_> {
    let body = Body::Send { part: Part::Only, notice: Notice::None };
    let (qpn, psn) = (Qpn::new(qpn), Psn::new(0));
    Packet { qpn, psn, ack_request: true, solicited: false, body, payload }
}

/// Forges requests in the name of a compute node to free one of its chunks, with every PSN (or
/// `--count` PSNs). The chunk must stay allocated, and the compute node's connections must work.
pub fn sweep(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let chunk = me.allocate()?;
    let mut request = chunk.entry.to_be_bytes()[1..].to_vec();
    request.extend(me.free.replies.addr().to_be_bytes());
    request.extend(me.free.rkey.0.to_be_bytes());
    let count = if a.count == 0 { 1 << 24 } else { a.count as u32 };
    let from = Random::new(a.seed).bits() as u32;
    let start = Instant::now();
    let mut forger = Forger::new(&me)?;
    for qpn in me.terms.management.clone() {
        let mut psn = from;
        forger.send(&send_to(qpn, &request), |packet| {
            packet[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
            psn = psn.wrapping_add(1);
            psn.wrapping_sub(from) < count
        })?;
    }
    let took = start.elapsed();
    for at in 0..me.access.len() {
        let from = Remote { addr: chunk.addr, rkey: Key(chunk.keys[at]) };
        let got = me.read(at, from, 64)?;
        ensure!(got == 0, "a READ on lane {at} failed with syndrome {got:#x}");
    }
    let got = me.free_entry(chunk.entry)?;
    ensure!(
        got == status::FREED,
        "the owner's own free gave status {got}: a forged PSN was accepted"
    );
    Ok(json!({ "sent": forger.sent, "ms": took.as_millis() as u64 }))
}

/// Sends packets to nonexistent queue pairs, for the time `--ms`.
pub fn junk(a: &Arguments) -> Result<Value> {
    let me = Compute::join(a)?;
    a.ready()?;
    let mut forger = Forger::new(&me)?;
    let mut random = Random::new(a.seed);
    let end = Instant::now() + a.time;
    forger.send(&send_to(0, b"junk"), |packet| {
        let number = random.bits() as u32;
        packet[5..8].copy_from_slice(&number.to_be_bytes()[1..]);
        number & 0xff != 0 || Instant::now() < end
    })?;
    Ok(json!({ "sent": forger.sent }))
}
