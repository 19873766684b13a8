//! The buffer of packets to be sent: back to back, in order.
//!
//! ```text
//! |<-- to A, 1044 B -->|<-- to A, 1044 B -->|<- to A, 60 B ->|<- to B ->|   free   |
//!  \________________ a burst: one UDP GSO send _____________/
//! ```
//!
//! The engine writes packets into the outbox when it serves QPs, authenticated packets with their
//! tag. The port writes the ICRC into the packets without a tag, sends all packets and clears the
//! outbox. The engine builds no packets while there is no room for the longest packet.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use super::icrc::{Route, RouteIcrc};
use super::packet::{BTH, PACKET_MAX};
use crate::crc::Sum;

/// Maximum packets of a burst: 64, within the limit of Linux (`UDP_MAX_SEGMENTS`).
const BURST_PACKETS: usize = 64;
/// Maximum bytes of a burst.
const BURST_BYTES: usize = 65_000;
/// Number of packets of maximum length in a burst.
pub(crate) const LONG_BURST: u32 = (BURST_BYTES / PACKET_MAX) as u32;

/// Alignment of payloads, so that copies cross fewer cache lines. The length of the longest packets
/// without optional headers is a multiple of it.
pub(crate) const ALIGNED: usize = 16;

/// The addresses of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// Source IP address.
    pub from: IpAddr,
    /// Destination.
    pub to: SocketAddr,
}

/// Consecutive packets with the same addresses, all of the same length except the last, which may
/// be shorter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Burst {
    /// The addresses of the packets.
    pub envelope: Envelope,
    /// Range of the packets in [`Outbox::bytes`].
    pub bytes: Range<usize>,
    /// Bytes of each packet except the last.
    pub packet_bytes: usize,
    /// Number of packets.
    pub packets: usize,
}

impl Burst {
    /// Appends a packet of `len` bytes. Returns false if the packet cannot be part of this burst.
    #[inline]
    fn take(&mut self, envelope: &Envelope, len: usize) -> bool {
        let whole = self.bytes.len() == self.packets * self.packet_bytes;
        let fits = self.packets < BURST_PACKETS && self.bytes.len() + len <= BURST_BYTES;
        if !whole || !fits || len > self.packet_bytes || self.envelope != *envelope {
            return false;
        }
        self.packets += 1;
        self.bytes.end += len;
        true
    }
}

/// The trailer of a packet in the outbox.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ending {
    /// Room for the ICRC, which the port computes. With the CRC of the payload, if it was computed
    /// when the payload was copied.
    Icrc(Option<Sum>),
    /// Counter and tag, already written.
    Tag,
}

/// A packet to be sent.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// The packet's addresses.
    pub envelope: Envelope,
    /// The packet's bytes.
    pub bytes: &'a mut [u8],
    /// The packet has a tag, and takes no ICRC.
    pub authenticated: bool,
}

/// Packets to be sent. See the module's documentation.
pub struct Outbox {
    memory: Box<[u8]>,
    /// Offset of the first packet in `memory`, so that the payloads of packets of maximum length
    /// without optional headers are aligned to [`ALIGNED`].
    first: usize,
    /// Bytes for packets.
    capacity: usize,
    /// Bytes in use.
    used: usize,
    bursts: Vec<Burst>,
    /// The trailer of each packet.
    endings: Vec<Ending>,
    /// A QP needed room when there was none.
    stalled: bool,
}

impl Outbox {
    /// Makes an outbox of `bytes`, but at least of one packet; without room for packets if `bytes`
    /// is 0.
    pub(crate) fn new(bytes: usize) -> Self {
        let capacity = if bytes == 0 { 0 } else { bytes.max(PACKET_MAX) };
        // Acknowledgements are the shortest packets.
        let packets = capacity / 20;
        let memory: Box<[u8]> = vec![0; capacity + 2 * ALIGNED].into();
        Self {
            first: memory.as_ptr().align_offset(ALIGNED) + ALIGNED - BTH,
            memory,
            capacity,
            used: 0,
            bursts: Vec::with_capacity(packets),
            endings: Vec::with_capacity(packets),
            stalled: false,
        }
    }

    /// True if there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.endings.is_empty()
    }

    /// Packets to be sent.
    pub fn len(&self) -> usize {
        self.endings.len()
    }

    /// The bytes of all packets.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.first..][..self.used]
    }

    /// The packets in order, for sealing and sending.
    pub fn packets(&mut self) -> impl Iterator<Item = Outgoing<'_>> {
        let mut rest = &mut self.memory[self.first..][..self.used];
        let packets = self.bursts.iter().flat_map(move |burst| {
            let (bytes, after) = std::mem::take(&mut rest).split_at_mut(burst.bytes.len());
            rest = after;
            bytes.chunks_mut(burst.packet_bytes).map(|packet| (burst.envelope, packet))
        });
        packets.zip(&self.endings).map(|((envelope, bytes), ending)| {
            let authenticated = matches!(ending, Ending::Tag);
            Outgoing { envelope, bytes, authenticated }
        })
    }

    /// The packets as bursts, each of which one GSO send can carry.
    pub fn bursts(&self) -> &[Burst] {
        &self.bursts
    }

    /// Writes the ICRC of each packet without a tag, for sending from this UDP port. The segments
    /// of a burst are numbered from 0 (IPv4 identification), as Linux does.
    pub fn seal(&mut self, port: u16) {
        let (mut endings, all) = (&self.endings[..], &mut self.memory[self.first..]);
        for burst in &self.bursts {
            let (burst_endings, after) = endings.split_at(burst.packets);
            let source = SocketAddr::new(burst.envelope.from, port);
            let mut icrcs = RouteIcrc::new(Route::new(source, burst.envelope.to));
            let packets =
                all[burst.bytes.clone()].chunks_mut(burst.packet_bytes).zip(burst_endings);
            for (index, (packet, ending)) in packets.enumerate() {
                if let Ending::Icrc(sum) = ending {
                    icrcs.seal_summed(index as u16, packet, *sum);
                }
            }
            endings = after;
        }
    }

    /// Removes all packets.
    pub fn clear(&mut self) {
        self.used = 0;
        self.bursts.clear();
        self.endings.clear();
        self.stalled = false;
    }

    /// Whether a QP waits for room in the outbox.
    #[inline]
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Room for a packet of maximum length. If there is none, the outbox becomes stalled until it
    /// is cleared.
    #[inline]
    pub(crate) fn room(&mut self) -> Option<&mut [u8]> {
        if self.free() < PACKET_MAX {
            self.stalled = true;
            return None;
        }
        Some(&mut self.memory[self.first..][self.used..self.capacity])
    }

    fn free(&self) -> usize {
        self.capacity - self.used
    }

    /// Number of packets of maximum length for which there is room, at most `max`. If there is no
    /// room and `max` is not 0, the outbox becomes stalled until it is cleared.
    #[inline]
    pub(crate) fn packets_max(&mut self, max: u32) -> u32 {
        let room = self.free() / PACKET_MAX;
        self.stalled |= room == 0 && max > 0;
        (room as u64).min(max as u64) as u32
    }

    /// Appends the packet of `len` bytes that was written into [`Outbox::room`].
    #[inline]
    pub(crate) fn commit(&mut self, envelope: Envelope, len: usize, ending: Ending) {
        let start = self.used;
        self.used += len;
        self.endings.push(ending);
        if !self.bursts.last_mut().is_some_and(|last| last.take(&envelope, len)) {
            let bytes = start..self.used;
            self.bursts.push(Burst { envelope, bytes, packet_bytes: len, packets: 1 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(outbox: &mut Outbox, to: u16, len: usize, fill: u8) {
        let from = "10.0.0.1".parse().unwrap();
        let to = SocketAddr::new("10.0.0.2".parse().unwrap(), to);
        outbox.room().unwrap()[..len].fill(fill);
        outbox.commit(Envelope { from, to }, len, Ending::Icrc(None));
    }

    #[test]
    fn outbox_keeps_order_and_forms_bursts() {
        let mut o = Outbox::new(100_000);
        for (to, len, fill) in [(1, 100, 1), (1, 100, 2), (1, 60, 3), (1, 60, 4), (2, 60, 5)] {
            put(&mut o, to, len, fill);
        }
        put(&mut o, 2, 61, 6);
        let seen: Vec<_> =
            o.packets().map(|p| (p.envelope.to.port(), p.bytes.len(), p.bytes[0])).collect();
        let want = [(1, 100, 1), (1, 100, 2), (1, 60, 3), (1, 60, 4), (2, 60, 5), (2, 61, 6)];
        assert_eq!(seen, want);
        let bursts: Vec<_> =
            o.bursts().iter().map(|b| (b.bytes.clone(), b.packet_bytes, b.packets)).collect();
        let want = [(0..260, 100, 3), (260..320, 60, 1), (320..380, 60, 1), (380..441, 61, 1)];
        assert_eq!(bursts, want);
        o.clear();
        assert!(o.is_empty() && o.bursts().is_empty() && o.packets().next().is_none());
    }

    #[test]
    fn bursts_respect_linux_limits() {
        let mut o = Outbox::new(2 << 20);
        (0..150).for_each(|i| put(&mut o, 1, 20, i));
        let sizes: Vec<_> = o.bursts().iter().map(|b| b.packets).collect();
        assert_eq!(sizes, [64, 64, 22]);
        o.clear();
        (0..40).for_each(|i| put(&mut o, 1, 4136, i));
        assert!(o.bursts().iter().all(|b| b.bytes.len() <= 65_000));
        assert_eq!(o.bursts().iter().map(|b| b.packets).sum::<usize>(), 40);
    }

    #[test]
    fn burst_is_filled_to_the_byte() {
        let mut o = Outbox::new(2 << 20);
        // 15 times 4136 bytes, and 2960 are 65,000.
        (0..15).for_each(|i| put(&mut o, 1, 4136, i));
        put(&mut o, 1, 2960, 15);
        assert_eq!((o.len(), o.bursts().len()), (16, 1));
        o.clear();
        (0..15).for_each(|i| put(&mut o, 1, 4136, i));
        put(&mut o, 1, 2961, 15);
        assert_eq!((o.len(), o.bursts().len()), (16, 2));
    }

    #[test]
    fn packets_max_stalls_only_if_packets_are_requested() {
        let mut o = Outbox::new(2 * PACKET_MAX);
        assert_eq!((o.packets_max(0), o.packets_max(1), o.packets_max(9)), (0, 1, 2));
        assert!(!o.is_stalled());
        put(&mut o, 1, PACKET_MAX + 1, 1);
        assert_eq!(o.packets_max(0), 0);
        assert!(!o.is_stalled(), "no packet was requested");
        assert_eq!(o.packets_max(1), 0);
        assert!(o.is_stalled());
        assert_eq!(o.packets_max(0), 0);
        assert!(o.is_stalled(), "until it is cleared");
    }

    #[test]
    fn full_outbox_stalls_until_cleared() {
        let mut o = Outbox::new(1);
        put(&mut o, 1, 20, 1);
        assert!(!o.is_stalled());
        assert!(o.room().is_none() && o.is_stalled());
        o.clear();
        assert!(!o.is_stalled() && o.room().is_some());
        assert!(Outbox::new(0).room().is_none());
    }
}
