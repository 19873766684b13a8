//! The invariant CRC: the last four bytes of a RoCEv2 packet (IBTA vol. 1, annex A17.3.3).
//!
//! CRC-32 over eight bytes of ones, the IP header, the UDP header, and the packet up to the ICRC, with ones
//! in place of what changes on the way:
//!
//! ```text
//! IPv4: type of service, time to live, header checksum      UDP: checksum
//! IPv6: traffic class, flow label, hop limit                BTH: byte 4 (FECN, BECN, reserved)
//! ```
//!
//! It is appended with its least significant byte first. IPv4's identification and its don't-fragment bit
//! are covered, so who checks has to know them: a plain UDP socket does not tell.

use std::net::{IpAddr, SocketAddr};

use super::packet::{BTH, ICRC};
use crate::crc::{HEAD_MAX, LENGTHS, ONE, POLYNOMIAL, Sum, power, times};

/// What the headers below a packet hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Sender.
    pub source: SocketAddr,
    /// Receiver, of the same kind of address.
    pub destination: SocketAddr,
    /// IPv4's identification; 0 where Linux sends an unconnected UDP socket's packets that it must not
    /// fragment.
    pub identification: u16,
    /// IPv4's don't-fragment bit.
    pub dont_fragment: bool,
}

impl Route {
    /// The route of a packet that must not be fragmented, with identification 0.
    pub fn new(source: SocketAddr, destination: SocketAddr) -> Self {
        Self { source, destination, identification: 0, dont_fragment: true }
    }
}

/// What the ICRC takes for ones in the first 8 bytes of a BTH: byte 4.
const MASK: u64 = 0xff << 32;
/// Bytes before the packet's own that are covered at most: ones, IPv6 header, UDP header.
const BEFORE: usize = 8 + 40 + 8;

/// The ICRC of a packet; `packet` ends where the ICRC begins. `None` if it is shorter than a BTH, or the two
/// addresses are of different kinds.
pub fn of(route: &Route, packet: &[u8]) -> Option<u32> {
    Row::new(*route).of(route.identification, packet)
}

/// The ICRCs of packets on one route, one after the other. What is before packets of one length is summed up once.
#[derive(Clone, Debug)]
pub struct Row {
    route: Route,
    /// Bytes of the last packet up to its ICRC, and the CRC of what is before one so long, with identification 0.
    last: Option<(usize, u32)>,
}

impl Row {
    /// Of packets on this route, whatever their identification.
    pub fn new(route: Route) -> Self {
        Self { route, last: None }
    }

    /// As [`of`].
    #[inline]
    pub fn of(&mut self, identification: u16, packet: &[u8]) -> Option<u32> {
        let before = self.before(identification, packet.len())?;
        if let Some((head, payload)) = split(packet)
            && let Some(sum) = Sum::of(payload)
        {
            return Some(sum.crc(before, head, MASK));
        }
        let (bth, rest) = packet.split_first_chunk::<BTH>()?;
        let mut bth = *bth;
        bth[4] = 0xff;
        let mut crc = crc32fast::Hasher::new_with_initial(before);
        crc.update(&bth);
        crc.update(rest);
        Some(crc.finalize())
    }

    /// CRC of what is before a packet of `len` bytes.
    #[inline]
    fn before(&mut self, identification: u16, len: usize) -> Option<u32> {
        let before = match self.last {
            Some((last, crc)) if last == len => crc,
            _ => {
                let crc = before(&self.route, len)?;
                self.last = Some((len, crc));
                crc
            }
        };
        Some(match self.route.source {
            SocketAddr::V4(_) => before ^ identified(identification),
            SocketAddr::V6(_) => before,
        })
    }

    /// As [`seal`].
    #[inline]
    pub fn seal(&mut self, identification: u16, packet: &mut [u8]) {
        let Some((inside, place)) = packet.split_last_chunk_mut::<ICRC>() else { return };
        if let Some(crc) = self.of(identification, inside) {
            *place = crc.to_le_bytes();
        }
    }

    /// Likewise, of a packet whose payload's sum is known, if it is.
    #[inline]
    pub(crate) fn seal_summed(&mut self, identification: u16, packet: &mut [u8], sum: Option<Sum>) {
        let Some(sum) = sum else { return self.seal(identification, packet) };
        let Some((inside, place)) = packet.split_last_chunk_mut::<ICRC>() else { return };
        let head = inside.len().checked_sub(sum.len()).map(|len| &inside[..len]);
        if let (Some(head), Some(before)) = (head, self.before(identification, inside.len())) {
            debug_assert!(is_head(head), "the engine's own");
            *place = sum.crc(before, head, MASK).to_le_bytes();
        }
    }

    /// As [`check`].
    #[inline]
    pub fn check(&mut self, identification: u16, packet: &[u8]) -> bool {
        let Some((inside, place)) = packet.split_last_chunk::<ICRC>() else { return false };
        self.of(identification, inside) == Some(u32::from_le_bytes(*place))
    }
}

/// The headers of a packet without its ICRC, and its payload, if that may be as long as a path MTU. (Where there are fewer
/// headers or more, the CRC is the same.)
#[inline]
fn split(packet: &[u8]) -> Option<(&[u8], &[u8])> {
    let len = LENGTHS.iter().rev().find(|len| packet.len() >= **len + BTH)?;
    let (head, payload) = packet.split_at(packet.len() - len);
    is_head(head).then_some((head, payload))
}

#[inline]
fn is_head(head: &[u8]) -> bool {
    (BTH..=HEAD_MAX).contains(&head.len())
}

/// CRC of the ones, the IP header and the UDP header before a packet of `len` bytes without its ICRC, with
/// identification 0.
fn before(route: &Route, len: usize) -> Option<u32> {
    let udp_len = (8 + len + ICRC) as u16;
    let mut head = [0xff; BEFORE];
    let ip = &mut head[8..];
    let ip_len = match (route.source.ip(), route.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ip[0] = 0x45;
            ip[2..4].copy_from_slice(&(20 + udp_len).to_be_bytes());
            ip[4..6].fill(0);
            ip[6..8].copy_from_slice(&[(route.dont_fragment as u8) << 6, 0]);
            // Time to live (8) and checksum (10) stay ones.
            ip[9] = 17;
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..20].copy_from_slice(&destination.octets());
            20
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            ip[0] = 0x6f;
            ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
            ip[6] = 17;
            ip[8..24].copy_from_slice(&source.octets());
            ip[24..40].copy_from_slice(&destination.octets());
            40
        }
        _ => return None,
    };
    let udp = &mut ip[ip_len..];
    udp[0..2].copy_from_slice(&route.source.port().to_be_bytes());
    udp[2..4].copy_from_slice(&route.destination.port().to_be_bytes());
    udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
    Some(crc32fast::hash(&head[..8 + ip_len + UDP]))
}

/// What IPv4's identification adds to the CRC of the headers, which is linear: the sum of what its digits add.
#[inline]
fn identified(identification: u16) -> u32 {
    let digit = |n: usize| (identification >> (4 * n)) as usize & 15;
    let of = |n: usize| IDENTIFICATION[n][digit(n)];
    of(0) ^ of(1) ^ of(2) ^ of(3)
}

/// What each hexadecimal digit of the identification, lowest first, adds to the CRC of the headers up to UDP's end.
const IDENTIFICATION: [[u32; 16]; 4] = {
    let mut digits = [[0; 16]; 4];
    let mut n = 0;
    while n < 64 {
        // CRC-32 of the two bytes and of zeros behind them, without the ones that it begins and ends with.
        let [high, low] = ((n as u16 % 16) << (n / 16 * 4)).to_be_bytes();
        let (mut crc, mut bit) = (high as u32 | (low as u32) << 8, 0);
        while bit < 8 * (2 + IPV4_BEHIND_IDENTIFICATION + UDP) {
            crc = (crc >> 1) ^ if crc & 1 != 0 { POLYNOMIAL } else { 0 };
            bit += 1;
        }
        digits[n / 16][n % 16] = crc;
        n += 1;
    }
    digits
};

/// Puts the ICRC into the last four bytes of `packet`. A packet that has none is left as it is.
pub fn seal(route: &Route, packet: &mut [u8]) {
    Row::new(*route).seal(route.identification, packet);
}

/// Whether the last four bytes of `packet` are its ICRC.
pub fn check(route: &Route, packet: &[u8]) -> bool {
    Row::new(*route).check(route.identification, packet)
}

/// Like [`check`], where IPv4's identification is not known: whether the last four bytes of `packet` are its ICRC
/// with some identification. Of damaged packets one in 65536 passes. Over IPv6 it is [`check`].
///
/// The CRC is linear: another identification e(x), 16 bits with n bits behind it up to the ICRC, changes the CRC by
/// e(x) x^(32+n) modulo the polynomial. So the change, divided by x^(32+n), must have a degree below 16.
pub fn check_unidentified(route: &Route, packet: &[u8]) -> bool {
    let Some((inside, place)) = packet.split_last_chunk::<ICRC>() else { return false };
    let plain = Route { identification: 0, ..*route };
    let Some(crc) = of(&plain, inside) else { return false };
    let change = crc ^ u32::from_le_bytes(*place);
    if route.source.is_ipv6() {
        return change == 0;
    }
    let behind = 8 * (IPV4_BEHIND_IDENTIFICATION + UDP + inside.len()) as u64;
    // A bit string of CRC-32 begins with its highest power in the lowest bit.
    times(change, inverse_power(32 + behind)) & 0xffff == 0
}

/// Bytes of the IPv4 header after the identification, and of the UDP header.
const IPV4_BEHIND_IDENTIFICATION: usize = 14;
const UDP: usize = 8;

/// x^-n.
const fn inverse_power(n: u64) -> u32 {
    // 1 plus the polynomial, divided by x.
    power((ONE ^ POLYNOMIAL) << 1 | 1, n)
}

#[cfg(test)]
#[path = "icrc_tests.rs"]
mod tests;
