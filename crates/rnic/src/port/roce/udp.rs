//! The UDP socket of RoCEv2: socket options, and transfer of packets between socket and engine.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::sockopt;

use super::super::error::Error;
use super::batch::{Outgoing, Receiver, Sender};
use super::coalesce::ReceiveCoalescer;
use crate::engine::Engine;
use crate::wire::Outbox;
use crate::wire::icrc::{self, Route};

/// Requested size of the socket's receive buffer; the kernel may grant less.
const RECEIVE_BYTES: usize = 8 << 20;
/// Requested size of the socket's send buffer.
const SEND_BYTES: usize = 8 << 20;
/// Maximum bytes in flight of a connection: four acknowledgement intervals of four full bursts
/// each.
const WINDOW_BYTES: usize = 960 << 10;

/// A NIC's UDP socket.
pub struct RoceSocket {
    socket: UdpSocket,
    local: SocketAddr,
    receiver: Receiver,
    coalescer: ReceiveCoalescer,
    sender: Sender,
    /// Packets that the kernel did not accept: its buffers were full, or there is no route to the
    /// peer.
    pub unsent: u64,
}

impl RoceSocket {
    /// Sets up `socket`, which is bound to the address of the NIC.
    pub fn new(socket: UdpSocket) -> Result<Self, Error> {
        let attempt = "setting up the UDP socket of RoCEv2";
        let system = |source: std::io::Error| Error::System { attempt, source };
        let errno = |e: Errno| Error::System { attempt, source: e.into() };
        socket.set_nonblocking(true).map_err(system)?;
        let local = socket.local_addr().map_err(system)?;
        // Packets must not be fragmented: they carry identification 0, which the ICRC covers.
        let info = match local {
            SocketAddr::V4(_) => {
                let never = sockopt::Ipv4PathMtuDiscovery::DO;
                sockopt::set_ip_mtu_discover(&socket, never).map_err(errno)?;
                (libc::IPPROTO_IP, libc::IP_PKTINFO)
            }
            SocketAddr::V6(_) => {
                let never = sockopt::Ipv6PathMtuDiscovery::DO;
                sockopt::set_ipv6_mtu_discover(&socket, never).map_err(errno)?;
                // A socket that is bound to the unspecified address also receives IPv4 packets.
                let never = sockopt::Ipv4PathMtuDiscovery::DO;
                sockopt::set_ip_mtu_discover(&socket, never).map_err(errno)?;
                // RoCEv2 senders may omit the UDP checksum.
                set(&socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1).map_err(errno)?;
                (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
            }
        };
        // The destination address of a packet is needed only if the socket is bound to any address.
        if local.ip().is_unspecified() {
            set(&socket, info.0, info.1, 1).map_err(errno)?;
        }
        // A kernel without UDP GRO delivers the datagrams one by one.
        let _ = set(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
        // Sizes above the system's limit need CAP_NET_ADMIN; without it the limit applies.
        if sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BYTES).is_err() {
            let _ = sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BYTES);
        }
        if set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SEND_BYTES as i32).is_err() {
            let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BYTES);
        }
        Ok(Self {
            socket,
            local,
            receiver: Receiver::new(),
            coalescer: ReceiveCoalescer::default(),
            sender: Sender::new(),
            unsent: 0,
        })
    }

    /// The address that the socket is bound to.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Maximum bytes in flight of a connection: half the receive buffer, because the kernel also
    /// charges its own overhead to the buffer. The peer's socket is assumed to have the same
    /// buffer.
    pub fn window_bytes(&self) -> u32 {
        let kept = sockopt::socket_recv_buffer_size(&self.socket).unwrap_or(0);
        (kept / 2).clamp(WINDOW_BYTES / 16, WINDOW_BYTES) as u32
    }

    /// Passes received packets to `engine`. Returns true if there was any; then there may be more.
    #[inline]
    pub fn receive(&mut self, now_ns: u64, engine: &mut Engine) -> bool {
        if !self.coalescer.may_read(now_ns) {
            return false;
        }
        match self.receiver.receive(self.socket.as_fd()) {
            // An error is the ICMP result of an earlier send; reading has cleared it.
            Ok(0) | Err(_) => {
                self.coalescer.on_empty_read(now_ns);
                return false;
            }
            Ok(_) => {}
        }
        for batch in self.receiver.batches() {
            let destination = batch.destination.unwrap_or(self.local.ip());
            let to = SocketAddr::new(destination, self.local.port());
            let route = Route::new(batch.source, to);
            let mut icrcs = icrc::RouteIcrc::new(route);
            for (i, packet) in batch.bytes.chunks(batch.each).enumerate() {
                // Linux numbers the segments of a GSO burst from 0 in the identification field.
                engine.receive(now_ns, batch.source, destination, packet, || {
                    icrcs.check(i as u16, packet) || icrc::check_unidentified(&route, packet)
                });
            }
            self.coalescer.on_burst(now_ns, batch.bytes.len(), engine.expects_more_packets());
        }
        true
    }

    /// True while full bursts arrive back to back. Then reading the clock is cheap beside a burst.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.coalescer.is_busy()
    }

    /// Computes the ICRCs of the packets in the outbox, sends them and clears the outbox. Returns
    /// false if the outbox was empty.
    #[inline]
    pub fn send(&mut self, outbox: &mut Outbox) -> bool {
        if outbox.is_empty() {
            return false;
        }
        outbox.seal(self.local.port());
        let (bytes, mut rest) = (outbox.bytes(), outbox.bursts());
        while let Some(first) = rest.first() {
            let next = rest.iter().map(|b| Outgoing {
                from: (b.envelope.from != self.local.ip()).then_some(b.envelope.from),
                to: b.envelope.to,
                bytes: &bytes[b.bytes.clone()],
                each: b.packet_bytes,
            });
            let sent = match self.sender.send(self.socket.as_fd(), next) {
                Ok(sent) => sent,
                Err(Errno::INTR) => continue,
                // Only this burst is lost: bursts to other peers may still succeed.
                Err(_) => {
                    self.unsent += first.packets as u64;
                    1
                }
            };
            rest = &rest[sent..];
        }
        outbox.clear();
        true
    }
}

impl AsFd for RoceSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sets a socket option of type int.
fn set(socket: &UdpSocket, level: i32, name: i32, value: i32) -> Result<(), Errno> {
    let value = std::ptr::from_ref(&value);
    // SAFETY: `value` has `size_of::<i32>()` bytes and lives until the call returns.
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, value.cast(), size_of::<i32>() as u32)
    };
    if done == 0 { Ok(()) } else { Err(super::batch::last_error()) }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use std::net::IpAddr;

    use super::super::batch::PACKETS_MAX;
    use super::*;
    use crate::engine::tests::bed::{Bed, TestQp};
    use crate::limits::{Limits, WireLimits};
    use crate::wire::{Ending, Envelope};
    use verbs::{Access, FunctionId, QpChange, RemotePeer};

    fn wire(address: &str) -> RoceSocket {
        RoceSocket::new(UdpSocket::bind(address).expect("a socket")).expect("a wire")
    }

    /// Receives a datagram: its sender, its destination address and its bytes.
    fn one(wire: &mut RoceSocket) -> (SocketAddr, Option<IpAddr>, Vec<u8>) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let came = wire.receiver.receive(wire.socket.as_fd()).is_ok();
            if let Some(batch) = wire.receiver.batches().next().filter(|_| came) {
                return (batch.source, batch.destination, batch.bytes.to_vec());
            }
            assert!(Instant::now() < until, "nothing came");
            std::thread::yield_now();
        }
    }

    /// Puts a packet of 100 bytes into an outbox.
    fn put(outbox: &mut Outbox, from: &str, to: SocketAddr, fill: u8) {
        outbox.room().unwrap()[..100].fill(fill);
        outbox.commit(Envelope { from: from.parse().unwrap(), to }, 100, Ending::Icrc(None));
    }

    /// RoCEv2 senders may omit the UDP checksum, also over IPv6 (Linux's soft-RoCE does), because
    /// packets have an ICRC.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn packets_over_ipv6_need_no_udp_checksum() {
        let loopback = "[::1]:0";
        let Ok(sender) = UdpSocket::bind(loopback) else {
            return crate::needs::skip("this machine has no IPv6");
        };
        set(&sender, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).expect("an option");
        let mut wire =
            RoceSocket::new(UdpSocket::bind(loopback).expect("a socket")).expect("a wire");
        let mut engine = Engine::new(Limits::default());
        sender.send_to(b"0123456789abcdefICRC", wire.local()).expect("sending");
        let start = Instant::now();
        while !wire.receive(0, &mut engine) && start.elapsed() < Duration::from_secs(5) {
            std::thread::yield_now();
        }
        assert_eq!(engine.wire_stats().unknown_qp, 1);
    }

    /// The limit lets the NIC thread serve doorbells and verbs between two calls under any packet
    /// load.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn receive_is_bounded_and_computes_no_icrc_for_junk() {
        let bind = || UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let (socket, mut wire) = (bind(), RoceSocket::new(bind()).expect("a wire"));
        let junk = [0; 64 * 20];
        let burst = Outgoing { from: None, to: wire.local(), bytes: &junk, each: 20 };
        for _ in 0..4 {
            let sent = Sender::new().send(socket.as_fd(), std::iter::repeat_n(burst, 64));
            assert!(sent.is_ok_and(|sent| sent > 16), "{sent:?}");
        }
        let mut engine = Engine::new(Limits::default());
        let (mut maximum, mut before) = (0, 0);
        while wire.receive(0, &mut engine) {
            let stats = engine.wire_stats();
            maximum = maximum.max(stats.packets_in - before);
            before = stats.packets_in;
        }
        let stats = engine.wire_stats();
        assert!(maximum <= PACKETS_MAX && maximum * 4 < before, "{maximum} of {before} at once");
        assert_eq!((stats.unknown_qp, stats.bad_icrc), (before, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn unspecified_bind_reports_destination_address() {
        let sender = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let mut any = wire("0.0.0.0:0");
        for to in ["127.0.0.1", "127.0.0.2"] {
            sender.send_to(b"0123", (to, any.local().port())).expect("sending");
            let (source, destination, bytes) = one(&mut any);
            assert_eq!((source, bytes), (sender.local_addr().unwrap(), b"0123".to_vec()));
            assert_eq!(destination, Some(to.parse().unwrap()));
        }
        if UdpSocket::bind("[::1]:0").is_err() {
            return crate::needs::skip("this machine has no IPv6");
        }
        let mut any = wire("[::]:0");
        let six = UdpSocket::bind("[::1]:0").expect("a socket");
        for (sender, to) in [(&six, "::1"), (&sender, "127.0.0.2")] {
            sender.send_to(b"0123", (to, any.local().port())).expect("sending");
            let (source, destination, _) = one(&mut any);
            assert_eq!(source, sender.local_addr().unwrap());
            assert_eq!(destination, Some(to.parse().unwrap()));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn packets_leave_from_their_source_address() {
        let (mut any, mut to) = (wire("0.0.0.0:0"), wire("127.0.0.1:0"));
        let mut outbox = Outbox::new(10_000);
        for from in ["127.0.0.2", "127.0.0.3"] {
            put(&mut outbox, from, to.local(), 7);
            assert!(any.send(&mut outbox) && outbox.is_empty());
            let (source, ..) = one(&mut to);
            assert_eq!(source.ip(), from.parse::<IpAddr>().unwrap());
        }
        assert!(!any.send(&mut outbox), "it was empty");
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn rejected_packets_are_counted_and_others_sent() {
        let (mut from, mut to) = (wire("127.0.0.1:0"), wire("127.0.0.1:0"));
        let mut outbox = Outbox::new(10_000);
        // A broadcast, which needs a socket option (SO_BROADCAST) that is not set.
        for _ in 0..2 {
            put(&mut outbox, "127.0.0.1", "255.255.255.255:4791".parse().unwrap(), 1);
        }
        put(&mut outbox, "127.0.0.1", to.local(), 2);
        assert_eq!(outbox.bursts().len(), 2);
        assert!(from.send(&mut outbox));
        assert_eq!(from.unsent, 2);
        assert_eq!(one(&mut to).2[..50], [2; 50]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn empty_datagram_is_ignored() {
        let (sender, mut wire) = (UdpSocket::bind("127.0.0.1:0").unwrap(), wire("127.0.0.1:0"));
        let mut engine = Engine::new(Limits::default());
        for datagram in [&[][..], &[0; 20]] {
            sender.send_to(datagram, wire.local()).expect("sending");
        }
        let until = Instant::now() + Duration::from_secs(20);
        while engine.wire_stats().packets_in == 0 {
            wire.receive(0, &mut engine);
            assert!(Instant::now() < until, "nothing came");
            std::thread::yield_now();
        }
        assert_eq!(engine.wire_stats().packets_in, 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn connection_window_is_half_the_receive_buffer() {
        let wire = wire("127.0.0.1:0");
        let window = |bytes| {
            sockopt::set_socket_recv_buffer_size(&wire.socket, bytes).expect("an option");
            wire.window_bytes()
        };
        // Linux doubles the requested size.
        assert_eq!(window(100_000), 100_000);
        assert_eq!(window(1000), 60 << 10, "the least");
        if sockopt::set_socket_recv_buffer_size_force(&wire.socket, RECEIVE_BYTES).is_ok() {
            assert_eq!(wire.window_bytes(), 960 << 10, "the most");
        }
    }

    /// Linux numbers the packets of a GSO burst in the IPv4 identification, and the ICRC of each
    /// packet is computed for its number. A packet that is sent alone may have any identification.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn icrc_is_right_in_bursts_and_single_packets() {
        checksums_of_packets(false);
        checksums_of_packets(true);
    }

    fn send_one_by_one(wire: &RoceSocket, outbox: &mut Outbox) {
        outbox.seal(wire.local.port());
        for burst in outbox.bursts() {
            for packet in outbox.bytes()[burst.bytes.clone()].chunks(burst.packet_bytes) {
                wire.socket.send_to(packet, burst.envelope.to).expect("sending");
            }
        }
        outbox.clear();
    }

    fn checksums_of_packets(alone: bool) {
        let limits = Limits { wire: Some(WireLimits::default()), ..Limits::default() };
        let mut beds = [Bed::with(limits.clone()), Bed::with(limits)];
        let mut wires = [wire("127.0.0.1:0"), wire("127.0.0.1:0")];
        let mut qps: [TestQp; 2] = std::array::from_fn(|end| {
            let pd = beds[end].pd(FunctionId::PHYSICAL);
            let shape = beds[end].shape(FunctionId::PHYSICAL, pd);
            beds[end].qp(&shape)
        });
        for end in 0..2 {
            let (to, from) = (wires[1 - end].local(), wires[end].local().ip());
            let peer = RemotePeer::new(to, from, qps[1 - end].qpn).into();
            for change in [QpChange::Init, QpChange::ReadyToReceive { peer }, QpChange::ReadyToSend]
            {
                let q = &qps[end];
                beds[end].e.modify_qp(q.function, q.qpn, change).expect("a change");
            }
        }
        let pf = FunctionId::PHYSICAL;
        let mine = beds[0].mr(pf, qps[0].pd, 16 << 10, Access::LOCAL_ALL);
        let theirs = beds[1].mr(pf, qps[1].pd, 16 << 10, Access::REMOTE_ALL | Access::LOCAL_ALL);
        beds[0].post(&mut qps[0], |w| {
            w.rdma_write(theirs.remote(0), &[mine.sge(0, 16 << 10)]).signaled();
        });
        let until = Instant::now() + Duration::from_secs(20);
        while qps[0].send_cq.reader.poll().is_none() {
            for (bed, wire) in beds.iter_mut().zip(&mut wires) {
                wire.receive(0, &mut bed.e);
                while bed.e.poll(0, 64) > 0 {}
                if alone {
                    send_one_by_one(wire, bed.e.outbox());
                }
                wire.send(bed.e.outbox());
            }
            assert_eq!(beds[1].e.wire_stats().bad_icrc, 0);
            assert!(Instant::now() < until, "{:?}", beds[1].e.wire_stats());
            std::thread::yield_now();
        }
        let stats = beds[1].e.wire_stats();
        assert!(stats.packets_in > 3, "the packets are a burst");
        assert_eq!((stats.bad_icrc, stats.ahead), (0, 0));
        assert_eq!(beds[0].e.wire_stats().bad_icrc, 0);
    }
}
