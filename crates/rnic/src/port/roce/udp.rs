//! The socket, and what comes and goes through it.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::sockopt;

use super::super::error::Error;
use super::batch::{Outgoing, Receiver, Sender};
use super::gather::Gather;
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
    /// What has come and gone, for reports.
    pub counts: WireCounts,
}

/// Packets that never reached the engine or the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireCounts {
    /// Came with a wrong ICRC.
    pub bad_icrc: u64,
    /// The kernel did not take them: its buffers were full, or there is no way to the peer.
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
            counts: WireCounts::default(),
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

    /// Gives each packet that has come to `take`, with its source and the address that it came to; that says whether
    /// more of the packet's message is to come. True if there was any; there may be more.
    #[inline]
    pub fn receive(
        &mut self,
        now_ns: u64,
        mut take: impl FnMut(IpAddr, IpAddr, &[u8]) -> bool,
    ) -> bool {
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
            let mut goes_on = false;
            for (i, packet) in row.bytes.chunks(row.each).enumerate() {
                // As Linux numbers what it cuts into segments.
                if sums.check(i as u16, packet) || icrc::check_unidentified(&route, packet) {
                    goes_on = take(row.source.ip(), destination, packet);
                } else {
                    self.counts.bad_icrc += 1;
                }
            }
            self.gather.took(now_ns, row.bytes.len(), goes_on);
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
                    self.counts.unsent += first.packets as u64;
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

    use super::*;

    /// RoCEv2's senders may leave UDP's checksum out, over IPv6 too (Linux's soft-RoCE does): the ICRC is
    /// there.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn packets_over_ipv6_need_no_udp_checksum() {
        let loopback = "[::1]:0";
        let Ok(sender) = UdpSocket::bind(loopback) else {
            eprintln!("not run: this machine has no IPv6");
            return;
        };
        set(&sender, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).expect("an option");
        let mut wire = Wire::new(UdpSocket::bind(loopback).expect("a socket")).expect("a wire");
        let mut packet = *b"0123456789abcdefICRC";
        let route = Route::new(sender.local_addr().expect("an address"), wire.local());
        icrc::seal(&route, &mut packet);
        sender.send_to(&packet, wire.local()).expect("sending");
        let (start, mut came) = (Instant::now(), Vec::new());
        while came.is_empty() && start.elapsed() < Duration::from_secs(5) {
            wire.receive(0, |_, _, bytes| {
                came.push(bytes.to_vec());
                false
            });
            std::thread::yield_now();
        }
        assert_eq!((came, wire.counts.bad_icrc), (vec![packet.to_vec()], 0));
    }
}
