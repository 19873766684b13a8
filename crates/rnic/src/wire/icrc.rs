//! The invariant CRC (ICRC): the last four bytes of a RoCEv2 packet (IBTA vol. 1, annex A17.3.3).
//!
//! CRC-32 over eight bytes of ones, the IP header, the UDP header, and the packet up to the ICRC.
//! Fields that routers may change are replaced by ones:
//!
//! ```text
//! IPv4: type of service, time to live, header checksum      UDP: checksum
//! IPv6: traffic class, flow label, hop limit                BTH: byte 4 (FECN, BECN, reserved)
//! ```
//!
//! The ICRC is appended with its least significant byte first. It covers the identification and the
//! don't-fragment bit of IPv4, which a receiver on a plain UDP socket does not learn.

use std::net::{IpAddr, SocketAddr};

use super::packet::{BTH, ICRC};
use crate::crc::{HEAD_MAX, LENGTHS, ONE, POLYNOMIAL, Sum, power, times};

/// The IP and UDP header fields that the ICRC of a packet covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Source address and port.
    pub source: SocketAddr,
    /// Destination address and port, of the same address family.
    pub destination: SocketAddr,
    /// The identification field of IPv4. Linux sends 0 in packets of an unconnected UDP socket that
    /// must not be fragmented.
    pub identification: u16,
    /// The don't-fragment bit of IPv4.
    pub dont_fragment: bool,
}

impl Route {
    /// The route of a packet that must not be fragmented, with identification 0.
    pub fn new(source: SocketAddr, destination: SocketAddr) -> Self {
        Self { source, destination, identification: 0, dont_fragment: true }
    }
}

/// The bits of the first 8 bytes of a BTH that the ICRC replaces by ones: byte 4.
const MASK: u64 = 0xff << 32;
/// Maximum covered bytes before the packet: ones, IPv6 header, UDP header.
const BEFORE: usize = 8 + 40 + 8;

/// The ICRC of a packet. `packet` ends where the ICRC begins. `None` if the packet is shorter than
/// a BTH, or the two addresses have different families.
pub fn of(route: &Route, packet: &[u8]) -> Option<u32> {
    RouteIcrc::new(*route).of(route.identification, packet)
}

/// Computes the ICRCs of successive packets on one route. The CRC of the headers before the packet
/// is computed once for packets of the same length.
#[derive(Clone, Debug)]
pub struct RouteIcrc {
    route: Route,
    /// Length of the last packet up to its ICRC, and the CRC of the headers before a packet of this
    /// length, with identification 0.
    last: Option<(usize, u32)>,
}

impl RouteIcrc {
    /// Starts a sequence of packets on this route, with any identifications.
    pub fn new(route: Route) -> Self {
        Self { route, last: None }
    }

    /// The ICRC of a packet with this identification; see [`of`].
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

    /// CRC of the headers before a packet of `len` bytes.
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

    /// Writes the ICRC into a packet with this identification; see [`seal`].
    #[inline]
    pub fn seal(&mut self, identification: u16, packet: &mut [u8]) {
        let Some((inside, place)) = packet.split_last_chunk_mut::<ICRC>() else { return };
        if let Some(crc) = self.of(identification, inside) {
            *place = crc.to_le_bytes();
        }
    }

    /// Writes the ICRC like [`RouteIcrc::seal`], and uses the CRC of the payload (`sum`) if it is
    /// known.
    #[inline]
    pub(crate) fn seal_summed(&mut self, identification: u16, packet: &mut [u8], sum: Option<Sum>) {
        let Some(sum) = sum else { return self.seal(identification, packet) };
        let Some((inside, place)) = packet.split_last_chunk_mut::<ICRC>() else { return };
        let head = inside.len().checked_sub(sum.len()).map(|len| &inside[..len]);
        if let (Some(head), Some(before)) = (head, self.before(identification, inside.len())) {
            debug_assert!(is_head(head), "the engine builds valid headers");
            *place = sum.crc(before, head, MASK).to_le_bytes();
        }
    }

    /// Checks the ICRC of a packet with this identification; see [`check`].
    #[inline]
    pub fn check(&mut self, identification: u16, packet: &[u8]) -> bool {
        let Some((inside, place)) = packet.split_last_chunk::<ICRC>() else { return false };
        self.of(identification, inside) == Some(u32::from_le_bytes(*place))
    }
}

/// Splits a packet without its ICRC into headers and a payload of the length of a path MTU, if it
/// can be split so. The true end of the headers does not matter, because the CRC does not depend on
/// the split.
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

/// CRC of the eight bytes of ones, the IP header and the UDP header before a packet of `len` bytes
/// (without its ICRC), with identification 0.
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
            // Time to live (+8) and checksum (+10) stay ones.
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

/// Change of the headers' CRC by the identification of IPv4. The CRC is linear, so this is the sum
/// (XOR) of the changes by the hexadecimal digits.
#[inline]
fn identified(identification: u16) -> u32 {
    let digit = |n: usize| (identification >> (4 * n)) as usize & 15;
    let change = |n: usize| IDENTIFICATION[n][digit(n)];
    change(0) ^ change(1) ^ change(2) ^ change(3)
}

/// Change of the CRC of the headers, up to the end of the UDP header, by each hexadecimal digit of
/// the identification, lowest digit first.
const IDENTIFICATION: [[u32; 16]; 4] = {
    let mut digits = [[0; 16]; 4];
    let mut n = 0;
    while n < 64 {
        // CRC-32 of the two bytes followed by zeros, without the initial and final inversion.
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

/// Writes the ICRC into the last four bytes of `packet`. A packet that is too short for an ICRC is
/// left unchanged.
pub fn seal(route: &Route, packet: &mut [u8]) {
    RouteIcrc::new(*route).seal(route.identification, packet);
}

/// Whether the last four bytes of `packet` are its ICRC.
pub fn check(route: &Route, packet: &[u8]) -> bool {
    RouteIcrc::new(*route).check(route.identification, packet)
}

/// Checks the ICRC where the identification of IPv4 is unknown: whether the last four bytes of
/// `packet` are its ICRC with any identification. One in 65,536 damaged packets passes. Over IPv6
/// equal to [`check`].
///
/// The CRC is linear: an identification e(x), 16 bits followed by n bits up to the ICRC, changes
/// the CRC by e(x) x^(32+n) modulo the polynomial. So the change, divided by x^(32+n), must have a
/// degree below 16.
pub fn check_unidentified(route: &Route, packet: &[u8]) -> bool {
    let Some((inside, place)) = packet.split_last_chunk::<ICRC>() else { return false };
    let plain = Route { identification: 0, ..*route };
    let Some(crc) = of(&plain, inside) else { return false };
    let change = crc ^ u32::from_le_bytes(*place);
    if route.source.is_ipv6() {
        return change == 0;
    }
    let behind = 8 * (IPV4_BEHIND_IDENTIFICATION + UDP + inside.len()) as u64;
    // CRC-32 stores the highest power of x in the lowest bit.
    times(change, inverse_power(32 + behind)) & 0xffff == 0
}

/// Bytes of the IPv4 header after the identification.
const IPV4_BEHIND_IDENTIFICATION: usize = 14;
/// Bytes of the UDP header.
const UDP: usize = 8;

/// x^-n modulo the polynomial.
const fn inverse_power(n: u64) -> u32 {
    // 1 plus the polynomial, divided by x.
    power((ONE ^ POLYNOMIAL) << 1 | 1, n)
}

#[cfg(test)]
#[path = "icrc_tests.rs"]
mod tests;
