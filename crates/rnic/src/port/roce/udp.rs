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

    use super::super::batch::PACKETS_MAX;
    use super::*;
    use crate::verbs::Limits;

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
}
