//! Packets on their way out: one buffer, back to back, in order.
//!
//! ```text
//! |<-- to A, 1044 B -->|<-- to A, 1044 B -->|<- to A, 60 B ->|<- to B ->|   free   |
//!  \________________ a burst: one UDP GSO send _____________/
//! ```
//!
//! The engine writes packets here in the turns of QPs, authenticated ones with their tag; the port
//! puts the ICRC into the others, sends them and clears the outbox. While there is no room for the
//! longest packet nothing is made.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use super::icrc::{Route, Row};
use super::packet::{BTH, PACKET_MAX};
use crate::crc::Sum;

/// Packets of a burst at most, as Linux has it (`UDP_MAX_SEGMENTS`), and its bytes.
const BURST_PACKETS: usize = 64;
const BURST_BYTES: usize = 65_000;
/// Packets of the longest kind that are a burst.
pub(crate) const LONG_BURST: u32 = (BURST_BYTES / PACKET_MAX) as u32;

/// What payloads are aligned to, so that fewer of their parts go over the edge of a cache line. Packets of the longest kind
/// are a multiple of it.
pub(crate) const ALIGNED: usize = 16;

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

impl Burst {
    /// Takes one more packet of `len` bytes, if it can.
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

/// What a packet that is put into the outbox ends with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ending {
    /// Room for the ICRC, which the port makes; with the sum of the payload, if that was made when
    /// it was copied.
    Icrc(Option<Sum>),
    /// Counter and tag: nothing is left to be done.
    Tag,
}

/// A packet to be sent.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// Where it goes.
    pub envelope: Envelope,
    /// Its bytes.
    pub bytes: &'a mut [u8],
    /// It has a tag, and takes no ICRC.
    pub authenticated: bool,
}

/// Packets to be sent. See the module.
pub struct Outbox {
    memory: Box<[u8]>,
    /// Where packets begin: so that the payload of one without further headers is [`ALIGNED`], and that of each behind it.
    first: usize,
    /// Bytes that there are for them, and how many are used.
    capacity: usize,
    used: usize,
    bursts: Vec<Burst>,
    /// What is behind each packet's payload.
    endings: Vec<Ending>,
    /// A QP found no room.
    stalled: bool,
}

impl Outbox {
    /// With room for `bytes`, and for one packet at least; for none if 0.
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

    /// All packets' bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.first..][..self.used]
    }

    /// The packets, in order, to be sealed and sent.
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

    /// The packets in runs that one system call with segmentation can send.
    pub fn bursts(&self) -> &[Burst] {
        &self.bursts
    }

    /// Puts the ICRC into each packet that has one and will be sent from this UDP port. The
    /// segments of a burst are numbered from 0, as Linux does.
    pub fn seal(&mut self, port: u16) {
        let (mut endings, all) = (&self.endings[..], &mut self.memory[self.first..]);
        for burst in &self.bursts {
            let (its, after) = endings.split_at(burst.packets);
            let source = SocketAddr::new(burst.envelope.from, port);
            let mut row = Row::new(Route::new(source, burst.envelope.to));
            let packets = all[burst.bytes.clone()].chunks_mut(burst.packet_bytes).zip(its);
            for (index, (packet, ending)) in packets.enumerate() {
                if let Ending::Icrc(sum) = ending {
                    row.seal_summed(index as u16, packet, *sum);
                }
            }
            endings = after;
        }
    }

    /// Forgets all packets: they were sent, or are lost.
    pub fn clear(&mut self) {
        self.used = 0;
        self.bursts.clear();
        self.endings.clear();
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
        if self.free() < PACKET_MAX {
            self.stalled = true;
            return None;
        }
        Some(&mut self.memory[self.first..][self.used..self.capacity])
    }

    fn free(&self) -> usize {
        self.capacity - self.used
    }

    /// Of `most` packets, however long, as many as there is room for. If that is none although some were wanted, it is
    /// remembered.
    #[inline]
    pub(crate) fn packets_max(&mut self, most: u32) -> u32 {
        let room = self.free() / PACKET_MAX;
        self.stalled |= room == 0 && most > 0;
        (room as u64).min(most as u64) as u32
    }

    /// Takes the packet of `len` bytes that was written into [`Outbox::room`].
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
    fn packets_come_out_in_order_and_in_bursts() {
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
    fn a_burst_is_what_linux_takes() {
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
    fn a_burst_is_full_to_the_byte() {
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
    fn who_wants_packets_and_finds_room_for_none_waits() {
        let mut o = Outbox::new(2 * PACKET_MAX);
        assert_eq!((o.packets_max(0), o.packets_max(1), o.packets_max(9)), (0, 1, 2));
        assert!(!o.is_stalled());
        put(&mut o, 1, PACKET_MAX + 1, 1);
        assert_eq!(o.packets_max(0), 0);
        assert!(!o.is_stalled(), "none were wanted");
        assert_eq!(o.packets_max(1), 0);
        assert!(o.is_stalled());
        assert_eq!(o.packets_max(0), 0);
        assert!(o.is_stalled(), "until it is cleared");
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
