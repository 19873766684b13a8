//! Counters of a NIC's packets.

use super::packet::Malformed;

/// Packet counters since the NIC was started.
#[derive(Clone, Debug, Default)]
pub struct WireStats {
    /// Packets passed to [`crate::Engine::receive`].
    pub packets_in: u64,
    /// Packets built for sending.
    pub packets_out: u64,
    /// Of the packets built, retransmitted requests.
    pub repeated: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
    /// NAKs sent, RNR NAKs included.
    pub naks_out: u64,
    /// NAKs received, RNR NAKs included.
    pub naks_in: u64,
    /// Duplicate requests received.
    pub duplicates: u64,
    /// Requests received behind a gap and dropped.
    pub ahead: u64,
    /// Responses without an outstanding request, or that do not match it; dropped.
    pub stray: u64,
    /// Packets for QPs that do not exist or are not connected to another NIC; dropped.
    pub unknown_qp: u64,
    /// Packets whose source address is not the peer's, or whose destination is not the QP's;
    /// dropped.
    pub strangers: u64,
    /// Packets with a wrong ICRC; dropped.
    pub bad_icrc: u64,
    /// Packets with a wrong or missing authentication tag; dropped.
    pub forged: u64,
    /// Packets with the right tag and a counter far behind the highest one; dropped.
    pub outdated: u64,
    /// Packets with a PSN far from the expected one, on connections without tags.
    pub guesses: u64,
    /// Packets dropped because there were too many such guesses at their QP.
    pub shut_out: u64,
    /// Packets for QPs in a state in which they accept none; dropped.
    pub untimely: u64,
    /// Malformed packets by reason, in the order of [`Malformed::ALL`]; dropped.
    pub malformed: [u64; Malformed::ALL.len()],
}

impl WireStats {
    pub(crate) fn not_a_packet(&mut self, why: Malformed) {
        let at = Malformed::ALL.iter().position(|m| *m == why).expect("ALL has every reason");
        self.malformed[at] += 1;
    }
}
