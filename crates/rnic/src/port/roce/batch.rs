//! Batched datagram I/O: recvmmsg and sendmmsg, with UDP GRO and GSO.
//!
//! ```text
//!  receive   slots of 64 KiB   |A A A A a|B|A A|...    UDP GRO: a slot holds datagrams of one
//!                                                      sender, all of the same length except the
//!                                                      last
//!  send      bursts            |A A A A a|B|...        UDP GSO: likewise
//! ```
//!
//! All system calls of the port that take pointers to structures are in this file.

use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::wire::ALIGNED;
use crate::wire::packet::BTH;

/// Maximum slots that one call fills, each with a batch (the datagrams that GRO has merged).
const SLOTS: usize = 16;
/// Maximum packets that one call receives: Linux puts at most 128 into a batch
/// (`UDP_MAX_SEGMENTS`).
#[cfg(test)]
pub const PACKETS_MAX: u64 = SLOTS as u64 * 128;
/// Minimum number of slots that a call offers to the kernel.
const OFFERED_MIN: usize = 1;
/// Bytes of a slot: the largest batch that UDP GRO delivers.
const SLOT_BYTES: usize = 1 << 16;
/// Rows from this length on are received one by one into the same slot, which stays in the cache.
const LONG_BYTES: u32 = SLOT_BYTES as u32 / 4;
/// Maximum bursts that one call sends.
const BURSTS: usize = 64;
/// Room for the ancillary data of a message: GRO or GSO size, and an address.
const CONTROL_WORDS: usize = 16;

type Control = [u64; CONTROL_WORDS];

/// A GRO batch: the consecutive datagrams of one sender in one slot.
#[derive(Clone, Copy, Debug)]
pub struct GroBatch<'a> {
    /// The sender of the datagrams.
    pub source: SocketAddr,
    /// Their destination address, if the kernel reports it.
    pub destination: Option<IpAddr>,
    /// The bytes of all datagrams.
    pub bytes: &'a [u8],
    /// Bytes of each datagram except the last.
    pub each: usize,
}

/// The receive buffers and the state of the last receive call.
pub struct Receiver {
    /// The slots, from offset `first` on, so that payloads are aligned as in the outbox.
    memory: Box<[u8]>,
    first: usize,
    names: Box<[libc::sockaddr_storage; SLOTS]>,
    controls: Box<[Control; SLOTS]>,
    received: usize,
    /// Number of slots that the next call offers. It grows when all slots were filled, because an
    /// empty call costs time for each offered slot.
    offered: usize,
    /// The previous call, which offered one slot, received a batch.
    again: bool,
    lens: [u32; SLOTS],
    control_lens: [usize; SLOTS],
}

impl Receiver {
    /// Allocates the buffers for one call.
    pub fn new() -> Self {
        let memory: Box<[u8]> = vec![0; SLOTS * SLOT_BYTES + 2 * ALIGNED].into();
        Self {
            first: memory.as_ptr().align_offset(ALIGNED) + ALIGNED - BTH,
            memory,
            names: Box::new([no_name(); SLOTS]),
            controls: Box::new([[0; CONTROL_WORDS]; SLOTS]),
            received: 0,
            offered: OFFERED_MIN,
            again: false,
            lens: [0; SLOTS],
            control_lens: [0; SLOTS],
        }
    }

    /// Receives the available datagrams. Returns the number of filled slots, or `WOULDBLOCK` if
    /// there is no datagram.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        self.received = 0;
        let mut parts = [const { MaybeUninit::<libc::iovec>::uninit() }; SLOTS];
        let mut messages = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; SLOTS];
        let offered = self.offered;
        let slots = self.memory[self.first..].chunks_exact_mut(SLOT_BYTES).take(offered);
        let rest = self.names.iter_mut().zip(self.controls.iter_mut());
        for (((part, message), slot), (name, control)) in
            parts.iter_mut().zip(&mut messages).zip(slots).zip(rest)
        {
            let part =
                part.write(libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() });
            let header = &mut message.write(no_message()).msg_hdr;
            header.msg_name = std::ptr::from_mut(name).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
            header.msg_iov = part;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of::<Control>();
        }
        if offered == 1 {
            // A receiver that waits for one message polls often, and recvmsg is cheaper than
            // recvmmsg. SAFETY: as for `recvmmsg` below, with the first message, which was written
            // above.
            let got = unsafe {
                let header = &mut messages[0].assume_init_mut().msg_hdr;
                libc::recvmsg(socket.as_raw_fd(), header, libc::MSG_DONTWAIT)
            };
            if got < 0 {
                self.again = false;
                return Err(last_error());
            }
            // SAFETY: the first message was written above.
            unsafe { messages[0].assume_init_mut() }.msg_len = got as u32;
            // Two successful calls in succession: more datagrams are likely, so offer two slots.
            let again = std::mem::replace(&mut self.again, true);
            self.offered = if again && (got as u32) < LONG_BYTES { 2 } else { 1 };
            self.note(&messages[..1]);
            return Ok(1);
        }
        // SAFETY: each of the first `offered` messages points to its own name, part and control
        // block, with their correct lengths. These live until the call returns, and nothing else
        // uses them meanwhile.
        let got = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                messages.as_mut_ptr().cast(),
                offered as u32,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        if got < 0 {
            // After an empty call offer one slot, which is the cheapest call.
            (self.offered, self.again) = (OFFERED_MIN, false);
            return Err(last_error());
        }
        let got = got as usize;
        self.offered = if got == offered { SLOTS.min(2 * offered) } else { got };
        self.note(&messages[..got]);
        if self.lens[..got].iter().any(|len| *len >= LONG_BYTES) {
            self.offered = OFFERED_MIN;
        }
        Ok(got)
    }

    /// Records the lengths of the batches in the first slots. All of `messages` must be
    /// initialized.
    fn note(&mut self, messages: &[MaybeUninit<libc::mmsghdr>]) {
        self.received = messages.len();
        for (i, message) in messages.iter().enumerate() {
            // SAFETY: the callers pass messages that were written before the system call.
            let message = unsafe { message.assume_init_ref() };
            self.lens[i] = message.msg_len;
            // A truncated datagram cannot be a valid packet: it is dropped.
            let cut = message.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
            self.control_lens[i] = if cut { 0 } else { message.msg_hdr.msg_controllen };
            if cut {
                self.lens[i] = 0;
            }
        }
    }

    /// The batches that the last call received.
    pub fn batches(&self) -> impl Iterator<Item = GroBatch<'_>> {
        (0..self.received).filter_map(|i| {
            let len = self.lens[i] as usize;
            let bytes = &self.memory[self.first + i * SLOT_BYTES..][..len];
            let (each, destination) = read_control(&self.controls[i], self.control_lens[i]);
            let each = each.filter(|each| *each > 0).unwrap_or(len);
            let source = read_name(&self.names[i])?;
            (len > 0).then_some(GroBatch { source, destination, bytes, each })
        })
    }
}

/// A burst of datagrams to one destination, all of the same length except the last.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The source address, or `None` for the system's choice.
    pub from: Option<IpAddr>,
    /// The destination.
    pub to: SocketAddr,
    /// The bytes of all datagrams.
    pub bytes: &'a [u8],
    /// Bytes of each datagram except the last.
    pub each: usize,
}

/// The address and control buffers of send calls.
pub struct Sender {
    names: Box<[libc::sockaddr_storage; BURSTS]>,
    controls: Box<[Control; BURSTS]>,
}

impl Sender {
    /// Allocates the buffers for one call.
    pub fn new() -> Self {
        Self {
            names: Box::new([no_name(); BURSTS]),
            controls: Box::new([[0; CONTROL_WORDS]; BURSTS]),
        }
    }

    /// Sends at most 64 bursts. Returns the number that the kernel accepted, or the error of the
    /// first one.
    pub fn send<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        bursts: impl Iterator<Item = Outgoing<'a>>,
    ) -> Result<usize, Errno> {
        let mut parts = [const { MaybeUninit::<libc::iovec>::uninit() }; BURSTS];
        let mut messages = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BURSTS];
        let mut count = 0;
        let places = self.names.iter_mut().zip(self.controls.iter_mut());
        for (((part, message), (name, control)), burst) in
            parts.iter_mut().zip(&mut messages).zip(places).zip(bursts)
        {
            let part = part.write(libc::iovec {
                iov_base: burst.bytes.as_ptr().cast_mut().cast(),
                iov_len: burst.bytes.len(),
            });
            let header = &mut message.write(no_message()).msg_hdr;
            header.msg_namelen = write_name(name, burst.to);
            header.msg_name = std::ptr::from_mut(name).cast();
            header.msg_iov = part;
            header.msg_iovlen = 1;
            let segment = (burst.each < burst.bytes.len()).then_some(burst.each as u16);
            header.msg_controllen = write_control(control, segment, burst.from);
            if header.msg_controllen > 0 {
                header.msg_control = control.as_mut_ptr().cast();
            }
            count += 1;
        }
        if count == 0 {
            return Ok(0);
        }
        let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        if count == 1 {
            // SAFETY: as for `sendmmsg` below, with the first message.
            let sent = unsafe { libc::sendmsg(fd, &messages[0].assume_init_ref().msg_hdr, flags) };
            return if sent < 0 { Err(last_error()) } else { Ok(1) };
        }
        // SAFETY: as for `recvmmsg` in `receive`, with the first `count` messages; the parts are
        // only read.
        let sent = unsafe { libc::sendmmsg(fd, messages.as_mut_ptr().cast(), count as u32, flags) };
        if sent < 0 { Err(last_error()) } else { Ok(sent as usize) }
    }
}

pub fn last_error() -> Errno {
    let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    Errno::from_raw_os_error(code)
}

fn no_name() -> libc::sockaddr_storage {
    // SAFETY: all zeros is a valid value of this structure of integers.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn no_message() -> libc::mmsghdr {
    // SAFETY: all zeros is a valid value of this structure of integers and pointers.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

// --- addresses -----------------------------------------------------------------------------------

fn write_name(name: &mut libc::sockaddr_storage, address: SocketAddr) -> u32 {
    let place = std::ptr::from_mut(name);
    match address {
        SocketAddr::V4(v4) => {
            let sockaddr = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: a `sockaddr_storage` has room for, and the alignment of, every socket
            // address.
            unsafe { place.cast::<libc::sockaddr_in>().write(sockaddr) };
            size_of::<libc::sockaddr_in>() as u32
        }
        SocketAddr::V6(v6) => {
            let sockaddr = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as for `sockaddr_in` above.
            unsafe { place.cast::<libc::sockaddr_in6>().write(sockaddr) };
            size_of::<libc::sockaddr_in6>() as u32
        }
    }
}

fn read_name(name: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let place = std::ptr::from_ref(name);
    match i32::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: a `sockaddr_storage` is as large and aligned as a `sockaddr_in`, which is
            // plain integers.
            let sockaddr = unsafe { place.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(sockaddr.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(sockaddr.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above, for a `sockaddr_in6`.
            let sockaddr = unsafe { place.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(sockaddr.sin6_addr.s6_addr);
            let port = u16::from_be(sockaddr.sin6_port);
            match ip.to_ipv4_mapped() {
                // An IPv6 socket that is bound to the unspecified address also receives IPv4
                // datagrams.
                Some(ip) => Some(SocketAddrV4::new(ip, port).into()),
                None => Some(SocketAddrV6::new(ip, port, 0, sockaddr.sin6_scope_id).into()),
            }
        }
        _ => None,
    }
}

// --- ancillary data ------------------------------------------------------------------------------
//
// struct cmsghdr: +0 length with this header (usize) +8 level (i32) +12 type (i32) +16 data. The
// next one begins at a multiple of 8.

const HEADER: usize = 16;

fn put_item(bytes: &mut [u8], at: usize, level: i32, kind: i32, data: &[u8]) -> usize {
    let len = HEADER + data.len();
    let item = &mut bytes[at..at + len.next_multiple_of(8)];
    item[0..8].copy_from_slice(&len.to_ne_bytes());
    item[8..12].copy_from_slice(&level.to_ne_bytes());
    item[12..16].copy_from_slice(&kind.to_ne_bytes());
    item[HEADER..len].copy_from_slice(data);
    at + len.next_multiple_of(8)
}

fn write_control(control: &mut Control, segment: Option<u16>, from: Option<IpAddr>) -> usize {
    let mut bytes = [0; size_of::<Control>()];
    let mut at = 0;
    if let Some(segment) = segment {
        let data = segment.to_ne_bytes();
        at = put_item(&mut bytes, at, libc::SOL_UDP, libc::UDP_SEGMENT, &data);
    }
    match from {
        Some(IpAddr::V4(ip)) => {
            // struct in_pktinfo: +0 interface  +4 source address  +8 (unused)
            let mut data = [0; 12];
            data[4..8].copy_from_slice(&ip.octets());
            at = put_item(&mut bytes, at, libc::IPPROTO_IP, libc::IP_PKTINFO, &data);
        }
        Some(IpAddr::V6(ip)) => {
            // struct in6_pktinfo: +0 source address  +16 interface
            let mut data = [0; 20];
            data[..16].copy_from_slice(&ip.octets());
            at = put_item(&mut bytes, at, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &data);
        }
        None => {}
    }
    for (word, bytes) in control.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    }
    at
}

/// Reads the datagram size of a batch and its destination address from the ancillary data.
fn read_control(control: &Control, len: usize) -> (Option<usize>, Option<IpAddr>) {
    let mut bytes = [0; size_of::<Control>()];
    for (word, bytes) in control.iter().zip(bytes.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    let (mut each, mut destination) = (None, None);
    let mut rest = &bytes[..len.min(bytes.len())];
    while let Some((header, _)) = rest.split_first_chunk::<HEADER>() {
        let [len, kind] = [&header[..8], &header[8..]].map(|b| b.try_into().expect("eight bytes"));
        let len = usize::from_ne_bytes(len);
        let (level, kind) = {
            let kind: [u8; 8] = kind;
            let (level, kind) = kind.split_at(4);
            let int = |b: &[u8]| i32::from_ne_bytes(b.try_into().expect("four bytes"));
            (int(level), int(kind))
        };
        let Some(data) = rest.get(HEADER..len) else { break };
        match (level, kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                each = data.first_chunk().map(|b| i32::from_ne_bytes(*b) as usize);
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // struct in_pktinfo: +8 destination address of the IP header.
                let ip: Option<[u8; 4]> = data.get(8..12).and_then(|b| b.try_into().ok());
                destination = ip.map(IpAddr::from);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                destination = data.first_chunk::<16>().map(|b| IpAddr::from(*b).to_canonical());
            }
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    (each, destination)
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
