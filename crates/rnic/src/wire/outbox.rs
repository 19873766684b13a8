//! Packets on their way out: one buffer, back to back, in order.
//!
//! ```text
//! |<-- to A, 1044 B -->|<-- to A, 1044 B -->|<- to A, 60 B ->|<- to B ->|   free   |
//!  \________________ a burst: one UDP GSO send _____________/
//! ```
//!
//! The engine writes packets here in the turns of QPs; the port seals them with their ICRC, sends them and
//! clears the outbox. While there is no room for the longest packet nothing is made.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use super::packet::PACKET_MAX;

/// Packets of a burst at most, as Linux has it (`UDP_MAX_SEGMENTS`), and its bytes.
const BURST_PACKETS: usize = 64;
const BURST_BYTES: usize = 65_000;
/// Packets of the longest kind that are a burst.
pub(crate) const LONG_BURST: u32 = (BURST_BYTES / PACKET_MAX) as u32;

/// Where a packet goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// The address to send it from.
    pub from: IpAddr,
    /// Where to.
    pub to: SocketAddr,
}

/// Packets that follow each other to the same place, all as long as the first but the last, which may be
/// shorter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Burst {
    /// Where they go.
    pub envelope: Envelope,
    /// Their bytes in [`Outbox::bytes`].
    pub bytes: Range<usize>,
    /// Bytes of each but the last.
    pub packet_bytes: usize,
    /// How many they are.
    pub packets: usize,
}

/// Packets to be sent. See the module.
pub struct Outbox {
    bytes: Box<[u8]>,
    used: usize,
    /// Where each packet ends, and its place.
    packets: Vec<(Envelope, usize)>,
    /// A QP found no room.
    stalled: bool,
}

impl Outbox {
    /// With room for `bytes`, and for one packet at least; for none if 0.
    pub(crate) fn new(bytes: usize) -> Self {
        let bytes = if bytes == 0 { 0 } else { bytes.max(PACKET_MAX) };
        // Acknowledgements are the shortest packets.
        let packets = Vec::with_capacity(bytes / 20);
        Self { bytes: vec![0; bytes].into(), used: 0, packets, stalled: false }
    }

    /// True if there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Packets to be sent.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// All packets' bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// The packets, in order, to be sealed and sent.
    pub fn packets(&mut self) -> impl Iterator<Item = (Envelope, &mut [u8])> {
        let mut rest = &mut self.bytes[..self.used];
        let mut start = 0;
        self.packets.iter().map(move |&(envelope, end)| {
            let (packet, after) = std::mem::take(&mut rest).split_at_mut(end - start);
            (rest, start) = (after, end);
            (envelope, packet)
        })
    }

    /// The packets in runs that one system call with segmentation can send.
    pub fn bursts(&self) -> Bursts<'_> {
        Bursts { packets: &self.packets, at: 0 }
    }

    /// Gives each burst to `f` with its bytes, to be sealed.
    pub fn each_burst(&mut self, mut f: impl FnMut(&Burst, &mut [u8])) {
        for burst in (Bursts { packets: &self.packets, at: 0 }) {
            f(&burst, &mut self.bytes[burst.bytes.clone()]);
        }
    }

    /// Forgets all packets: they were sent, or are lost.
    pub fn clear(&mut self) {
        self.used = 0;
        self.packets.clear();
        self.stalled = false;
    }

    /// True if the engine has stopped making packets until they are sent.
    #[inline]
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Room for the longest packet. If there is none, that is remembered.
    #[inline]
    pub(crate) fn room(&mut self) -> Option<&mut [u8]> {
        if self.bytes.len() - self.used < PACKET_MAX {
            self.stalled = true;
            return None;
        }
        Some(&mut self.bytes[self.used..])
    }

    /// Takes the packet of `len` bytes that was written into [`Outbox::room`].
    #[inline]
    pub(crate) fn commit(&mut self, envelope: Envelope, len: usize) {
        self.used += len;
        self.packets.push((envelope, self.used));
    }
}

/// What is in an outbox, by bursts.
#[derive(Clone)]
pub struct Bursts<'a> {
    packets: &'a [(Envelope, usize)],
    at: usize,
}

impl Iterator for Bursts<'_> {
    type Item = Burst;

    fn next(&mut self) -> Option<Burst> {
        let (envelope, first_end) = *self.packets.get(self.at)?;
        let start = if self.at == 0 { 0 } else { self.packets[self.at - 1].1 };
        let packet_bytes = first_end - start;
        let (mut end, mut packets) = (first_end, 1);
        for &(other, other_end) in &self.packets[self.at + 1..] {
            let len = other_end - end;
            let fits = packets < BURST_PACKETS && other_end - start <= BURST_BYTES;
            if other != envelope || len > packet_bytes || !fits {
                break;
            }
            (end, packets) = (other_end, packets + 1);
            if len < packet_bytes {
                break;
            }
        }
        self.at += packets;
        Some(Burst { envelope, bytes: start..end, packet_bytes, packets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(outbox: &mut Outbox, to: u16, len: usize, fill: u8) {
        let from = "10.0.0.1".parse().unwrap();
        let to = SocketAddr::new("10.0.0.2".parse().unwrap(), to);
        outbox.room().unwrap()[..len].fill(fill);
        outbox.commit(Envelope { from, to }, len);
    }

    #[test]
    fn packets_come_out_in_order_and_in_bursts() {
        let mut o = Outbox::new(100_000);
        for (to, len, fill) in [(1, 100, 1), (1, 100, 2), (1, 60, 3), (1, 60, 4), (2, 60, 5)] {
            put(&mut o, to, len, fill);
        }
        put(&mut o, 2, 61, 6);
        let seen: Vec<_> =
            o.packets().map(|(e, bytes)| (e.to.port(), bytes.len(), bytes[0])).collect();
        let want = [(1, 100, 1), (1, 100, 2), (1, 60, 3), (1, 60, 4), (2, 60, 5), (2, 61, 6)];
        assert_eq!(seen, want);
        let bursts: Vec<_> = o.bursts().map(|b| (b.bytes, b.packet_bytes, b.packets)).collect();
        let want = [(0..260, 100, 3), (260..320, 60, 1), (320..380, 60, 1), (380..441, 61, 1)];
        assert_eq!(bursts, want);
        o.clear();
        assert!(o.is_empty() && o.bursts().next().is_none() && o.packets().next().is_none());
    }

    #[test]
    fn a_burst_is_what_linux_takes() {
        let mut o = Outbox::new(2 << 20);
        (0..150).for_each(|i| put(&mut o, 1, 20, i));
        let sizes: Vec<_> = o.bursts().map(|b| b.packets).collect();
        assert_eq!(sizes, [64, 64, 22]);
        o.clear();
        (0..40).for_each(|i| put(&mut o, 1, 4136, i));
        assert!(o.bursts().all(|b| b.bytes.len() <= 65_000));
        assert_eq!(o.bursts().map(|b| b.packets).sum::<usize>(), 40);
    }

    #[test]
    fn who_finds_no_room_waits_until_it_is_cleared() {
        let mut o = Outbox::new(1);
        put(&mut o, 1, 20, 1);
        assert!(!o.is_stalled());
        assert!(o.room().is_none() && o.is_stalled());
        o.clear();
        assert!(!o.is_stalled() && o.room().is_some());
        assert!(Outbox::new(0).room().is_none());
    }
}
