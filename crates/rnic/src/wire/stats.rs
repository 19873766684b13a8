//! Counters of a NIC's wire.

use super::packet::Malformed;

/// What came and went since the NIC was made.
#[derive(Clone, Debug, Default)]
pub struct WireStats {
    /// Packets that were given to [`crate::Engine::receive`].
    pub packets_in: u64,
    /// Packets that were made.
    pub packets_out: u64,
    /// Of these, requests that had been sent before.
    pub repeated: u64,
    /// Times that packets were sent again for want of an answer.
    pub timeouts: u64,
    /// Negative acknowledgements that were sent, RNR among them.
    pub naks_out: u64,
    /// Those that came.
    pub naks_in: u64,
    /// Requests that had come before.
    pub duplicates: u64,
    /// Requests that came before their predecessors, and were dropped.
    pub ahead: u64,
    /// Answers that nobody waited for, or that do not fit what was asked; dropped.
    pub stray: u64,
    /// Packets for QPs that there are not, or that are not connected to another NIC; dropped.
    pub unknown_qp: u64,
    /// Packets from another address than the peer's, or to another than its QP's; dropped.
    pub strangers: u64,
    /// Packets with a wrong ICRC; dropped.
    pub bad_icrc: u64,
    /// Packets without the tag that the key of their connection gives them; dropped.
    pub forged: u64,
    /// Packets with the right tag and a counter far behind the highest one; dropped.
    pub outdated: u64,
    /// Packets with a PSN far from what is expected, of connections without tags.
    pub guesses: u64,
    /// Packets that were dropped because of too many such guesses at their QP.
    pub shut_out: u64,
    /// Packets for QPs in a state in which they take none; dropped.
    pub untimely: u64,
    /// What was no packet, by reason, in the order of [`Malformed::ALL`]; dropped.
    pub malformed: [u64; Malformed::ALL.len()],
}

impl WireStats {
    pub(crate) fn not_a_packet(&mut self, why: Malformed) {
        let at = Malformed::ALL.iter().position(|m| *m == why).expect("all are there");
        self.malformed[at] += 1;
    }
}
