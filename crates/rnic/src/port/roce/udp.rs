//! The socket, and what comes and goes through it.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::sockopt;

use super::super::error::Error;
use super::batch::{Outgoing, Receiver, Sender};
use super::gather::Gather;
use crate::engine::Engine;
use crate::wire::Outbox;
use crate::wire::icrc::{self, Route};

/// Bytes that the kernel keeps for us until we read them, if it lets us have so much.
const RECEIVE_BYTES: usize = 8 << 20;
const SEND_BYTES: usize = 8 << 20;
/// Bytes in flight of a connection, where the kernel keeps enough: four acknowledgements, each of four full bursts.
const WINDOW_BYTES: usize = 960 << 10;

/// A NIC's UDP socket.
pub struct Wire {
    socket: UdpSocket,
    local: SocketAddr,
    receiver: Receiver,
    gather: Gather,
    sender: Sender,
    /// Packets that the kernel did not take: its buffers were full, or there is no way to the peer.
    pub unsent: u64,
}

impl Wire {
    /// The wire of a NIC that is reached at the address that `socket` is bound to.
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
                // Bound to any address it has IPv4 packets too.
                let never = sockopt::Ipv4PathMtuDiscovery::DO;
                sockopt::set_ip_mtu_discover(&socket, never).map_err(errno)?;
                // Others leave UDP's checksum out, as RoCEv2 lets them.
                set(&socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1).map_err(errno)?;
                (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
            }
        };
        // A socket with one address need not be told which one a packet came to.
        if local.ip().is_unspecified() {
            set(&socket, info.0, info.1, 1).map_err(errno)?;
        }
        // Where the kernel is too old for it, datagrams come one by one.
        let _ = set(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
        // More than a user may have needs a privilege; without, what the system lets a user have.
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
            gather: Gather::default(),
            sender: Sender::new(),
            unsent: 0,
        })
    }

    /// The address that it is bound to.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Bytes in flight that a connection may have: what the kernel keeps has its own overhead, and the other host's
    /// socket is taken to be like this one.
    pub fn window_bytes(&self) -> u32 {
        let kept = sockopt::socket_recv_buffer_size(&self.socket).unwrap_or(0);
        (kept / 2).clamp(WINDOW_BYTES / 16, WINDOW_BYTES) as u32
    }

    /// Gives the packets that have come to `engine`. True if there was any; there may be more.
    #[inline]
    pub fn receive(&mut self, now_ns: u64, engine: &mut Engine) -> bool {
        if !self.gather.may_look(now_ns) {
            return false;
        }
        match self.receiver.receive(self.socket.as_fd()) {
            // An error is one of an earlier send (ICMP), and has been taken by that.
            Ok(0) | Err(_) => {
                self.gather.found_nothing(now_ns);
                return false;
            }
            Ok(_) => {}
        }
        for row in self.receiver.rows() {
            let destination = row.destination.unwrap_or(self.local.ip());
            let to = SocketAddr::new(destination, self.local.port());
            let route = Route::new(row.source, to);
            let mut sums = icrc::Row::new(route);
            for (i, packet) in row.bytes.chunks(row.each).enumerate() {
                // As Linux numbers what it cuts into segments.
                engine.receive(now_ns, row.source, destination, packet, || {
                    sums.check(i as u16, packet) || icrc::check_unidentified(&route, packet)
                });
            }
            self.gather.took(now_ns, row.bytes.len(), engine.is_amid_message());
        }
        true
    }

    /// True if bursts come one after the other: each takes longer than to ask for the time.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.gather.is_busy()
    }

    /// Seals and sends what is in the outbox, and clears it. True if there was anything.
    #[inline]
    pub fn send(&mut self, outbox: &mut Outbox) -> bool {
        if outbox.is_empty() {
            return false;
        }
        outbox.seal(self.local.port());
        let (all, mut rest) = (outbox.bytes(), outbox.bursts());
        while let Some(first) = rest.first() {
            let next = rest.iter().map(|b| Outgoing {
                from: (b.envelope.from != self.local.ip()).then_some(b.envelope.from),
                to: b.envelope.to,
                bytes: &all[b.bytes.clone()],
                each: b.packet_bytes,
            });
            let sent = match self.sender.send(self.socket.as_fd(), next) {
                Ok(sent) => sent,
                Err(Errno::INTR) => continue,
                // This burst is lost; those to others need not be.
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

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sets an option that is an int.
fn set(socket: &UdpSocket, level: i32, name: i32, value: i32) -> Result<(), Errno> {
    let value = std::ptr::from_ref(&value);
    // SAFETY: the value lives, with its length, until the call returns.
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
    use crate::ids::{Access, FunctionId};
    use crate::verbs::{Limits, QpChange, WireLimits};
    use crate::wire::{Ending, Envelope, RemotePeer};

    fn wire(address: &str) -> Wire {
        Wire::new(UdpSocket::bind(address).expect("a socket")).expect("a wire")
    }

    /// Receives a datagram: its sender, the address that it came to, and its bytes.
    fn one(wire: &mut Wire) -> (SocketAddr, Option<IpAddr>, Vec<u8>) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let came = wire.receiver.receive(wire.socket.as_fd()).is_ok();
            if let Some(row) = wire.receiver.rows().next().filter(|_| came) {
                return (row.source, row.destination, row.bytes.to_vec());
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

    /// RoCEv2's senders may leave UDP's checksum out, over IPv6 too (Linux's soft-RoCE does): the ICRC is
    /// there.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn packets_over_ipv6_need_no_udp_checksum() {
        let loopback = "[::1]:0";
        let Ok(sender) = UdpSocket::bind(loopback) else {
            return crate::needs::skip("this machine has no IPv6");
        };
        set(&sender, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).expect("an option");
        let mut wire = Wire::new(UdpSocket::bind(loopback).expect("a socket")).expect("a wire");
        let mut engine = Engine::new(Limits::default());
        sender.send_to(b"0123456789abcdefICRC", wire.local()).expect("sending");
        let start = Instant::now();
        while !wire.receive(0, &mut engine) && start.elapsed() < Duration::from_secs(5) {
            std::thread::yield_now();
        }
        assert_eq!(engine.wire_stats().unknown_qp, 1);
    }

    /// Doorbells and verbs are looked at between two calls, however many packets wait.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_look_takes_a_bounded_number_of_packets_and_works_no_checksum_out_for_junk() {
        let bind = || UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let (socket, mut wire) = (bind(), Wire::new(bind()).expect("a wire"));
        let junk = [0; 64 * 20];
        let burst = Outgoing { from: None, to: wire.local(), bytes: &junk, each: 20 };
        for _ in 0..4 {
            let sent = Sender::new().send(socket.as_fd(), std::iter::repeat_n(burst, 64));
            assert!(sent.is_ok_and(|sent| sent > 16), "{sent:?}");
        }
        let mut engine = Engine::new(Limits::default());
        let (mut most, mut before) = (0, 0);
        while wire.receive(0, &mut engine) {
            let stats = engine.wire_stats();
            most = most.max(stats.packets_in - before);
            before = stats.packets_in;
        }
        let stats = engine.wire_stats();
        assert!(most <= PACKETS_MAX && most * 4 < before, "{most} of {before} at once");
        assert_eq!((stats.unknown_qp, stats.bad_icrc), (before, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_socket_that_is_bound_to_any_address_learns_to_which_one_a_packet_came() {
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
    fn packets_leave_from_the_address_that_they_are_said_to_come_from() {
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
    fn packets_that_the_kernel_does_not_take_are_counted_and_those_to_others_leave() {
        let (mut from, mut to) = (wire("127.0.0.1:0"), wire("127.0.0.1:0"));
        let mut outbox = Outbox::new(10_000);
        // A broadcast, for which the socket has no permission.
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
    fn an_empty_datagram_harms_nobody() {
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
    fn a_connection_has_half_of_what_the_kernel_keeps_in_flight() {
        let wire = wire("127.0.0.1:0");
        let window = |bytes| {
            sockopt::set_socket_recv_buffer_size(&wire.socket, bytes).expect("an option");
            wire.window_bytes()
        };
        // Linux doubles the size that it is asked for.
        assert_eq!(window(100_000), 100_000);
        assert_eq!(window(1000), 60 << 10, "the least");
        if sockopt::set_socket_recv_buffer_size_force(&wire.socket, RECEIVE_BYTES).is_ok() {
            assert_eq!(wire.window_bytes(), 960 << 10, "the most");
        }
    }

    /// Linux numbers the packets that it cuts a burst into, and the ICRC of each is made for its number; a packet that
    /// comes alone may have any.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn the_checksum_of_each_packet_is_right_whether_it_comes_in_a_burst_or_alone() {
        checksums_of_packets(false);
        checksums_of_packets(true);
    }

    fn send_one_by_one(wire: &Wire, outbox: &mut Outbox) {
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
        assert!(stats.packets_in > 3, "they are a burst");
        assert_eq!((stats.bad_icrc, stats.ahead), (0, 0));
        assert_eq!(beds[0].e.wire_stats().bad_icrc, 0);
    }
}
