//! The responder's half of a connection: which requests are new, and what is to be answered.
//!
//! ```text
//!                    before `expected`: a duplicate        `expected`            behind it: a gap
//!   SEND, WRITE      acknowledged again, dropped           executed              dropped, one
//!   READ             read again, from its PSN on           executed, queued      NAK for `expected`
//!   atomic           its result again, from `results`      executed, kept
//!
//!   outputs   [ READ 17.. ][ atomic 21 ] then the reply: ACK, NAK or RNR NAK for what came last
//! ```
//!
//! Answers leave in the order of PSNs; acknowledgements that had no time to leave are one. They carry the PSN of a
//! SEND or WRITE: a READ or atomic is answered with its data, and by nothing else. After a refusal the same NAK is
//! given again to whoever asks again, until the QP is reset.

use std::collections::VecDeque;

use super::guesses::Fit;
use super::packet::{Nak, Syndrome};
use super::peer::RemotePeer;
use crate::ids::Psn;
use crate::wqe::Remote;

/// Packets of a READ at most.
pub(crate) const READ_PACKETS_MAX: u32 = 1 << 22;
/// "No word about receive WQEs": who has none says so with an RNR NAK.
const NO_CREDITS: u8 = 31;

/// How a request's PSN stands to what is expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arrival {
    Expected,
    Duplicate,
    Ahead,
}

/// What an executed request is answered with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// The data of a READ, the result of an atomic.
    Data,
    /// An acknowledgement, of a SEND or WRITE that asks for one.
    Ack,
    /// Nothing: a later request will ask.
    Nothing,
}

/// The message that is arriving.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    None,
    /// A SEND into a receive WQE whose bytes are kept: `len` bytes have come.
    Send {
        len: u32,
    },
    /// A WRITE: `left` of `len` bytes are still to come, to `at`.
    Write {
        at: Remote,
        left: u32,
        len: u32,
    },
}

/// An answer with data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Output {
    /// The rest of a READ.
    Read {
        /// PSN of its next packet.
        psn: Psn,
        /// What it reads.
        at: Remote,
        /// Bytes that are left.
        left: u32,
        /// No packet of it has been sent.
        fresh: bool,
    },
    Atomic {
        psn: Psn,
        old: u64,
    },
    /// That a READ is refused which was answered before.
    Refusal {
        /// Its PSN.
        psn: Psn,
    },
}

/// An answer that is due.
#[derive(Clone, Copy)]
struct Due {
    output: Output,
    /// It was asked for again. Such answers take no place from those of new requests.
    again: bool,
}

/// Packets whose acknowledgement may wait for better times.
const HELD_MAX: u32 = 4;

/// Packets whose acknowledgement may wait for a request, and after how many it leaves with the next: a small share of
/// what a sender has in flight at most, and many enough that it costs next to nothing.
const DIALOGUE_MAX: u32 = 16;
const DIALOGUE_LEAVES: u32 = 8;

/// What is said when all outputs have left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reply {
    None,
    Ack,
    Gap,
    NotReady,
    Refusal,
}

pub(crate) struct Responder {
    mtu: u32,
    expected: Psn,
    /// What acknowledgements carry: the last SEND or WRITE, if that is not half a circle ago. An acknowledgement with
    /// the PSN of a READ or atomic could be taken for its end, though its data was lost.
    acknowledged: Option<Psn>,
    msn: u32,
    /// PSNs that have arrived since an acknowledgement was sent; `u32::MAX` if that is to leave at once.
    unacknowledged: u32,
    rnr_timer: u8,
    pub message: Message,
    /// Bytes of the receive WQE that the SEND at hand has taken.
    pub receive_wqe: Box<[u8]>,
    outputs: VecDeque<Due>,
    /// New ones, and repeated ones, at most.
    outputs_max: usize,
    /// Results of the last atomics, oldest first.
    results: VecDeque<(Psn, u64)>,
    /// A NAK for `expected` has been given.
    told: bool,
    reply: Reply,
    refused: Option<Nak>,
}

impl Responder {
    /// With receive WQEs of `stride` bytes.
    pub fn new(peer: &RemotePeer, stride: u32) -> Self {
        let most = peer.max_dest_rd_atomic as usize;
        Self {
            mtu: peer.mtu.bytes(),
            expected: peer.rq_psn,
            acknowledged: None,
            msn: 0,
            unacknowledged: 0,
            rnr_timer: peer.min_rnr_timer,
            message: Message::None,
            receive_wqe: vec![0; stride as usize].into(),
            outputs: VecDeque::with_capacity(2 * most),
            outputs_max: most,
            results: VecDeque::with_capacity(most),
            told: false,
            reply: Reply::None,
            refused: None,
        }
    }

    // --- requests ------------------------------------------------------------------------------

    /// Packets that `len` bytes of a READ take.
    pub fn packets(&self, len: u32) -> u32 {
        len.div_ceil(self.mtu).max(1)
    }

    /// How a request's PSN stands to the expected one.
    pub fn fit(&self, psn: Psn) -> Fit {
        Fit::of(psn, self.expected)
    }

    /// Takes note of a request's arrival. One that is ahead is answered and to be dropped.
    pub fn arrival(&mut self, psn: Psn) -> Arrival {
        if psn == self.expected {
            self.told = false;
            return Arrival::Expected;
        }
        if psn.is_before(self.expected) {
            return Arrival::Duplicate;
        }
        if !self.told {
            self.told = true;
            self.reply = Reply::Gap;
        }
        Arrival::Ahead
    }

    /// The expected request, of so many PSNs, was executed.
    pub fn accepted(&mut self, packets: u32, ends_message: bool, answer: Answer) {
        let last = self.expected.plus(packets - 1);
        self.expected = self.expected.plus(packets);
        (self.acknowledged, self.unacknowledged) = match answer {
            // The data acknowledges what is before it.
            Answer::Data => (self.acknowledged.filter(|psn| psn.is_before(self.expected)), 0),
            _ => (Some(last), self.unacknowledged.saturating_add(packets)),
        };
        self.msn = self.msn.wrapping_add(ends_message as u32);
        if matches!(self.reply, Reply::Gap | Reply::NotReady) {
            self.reply = Reply::None;
        }
        if answer == Answer::Ack {
            self.acknowledge();
        }
    }

    /// An acknowledgement is due.
    pub fn acknowledge(&mut self) {
        // The others acknowledge as well; so do answers to what is behind.
        let implied = |due: &Due| {
            let (psn, _) = reach(&due.output, self.mtu);
            self.acknowledged.is_some_and(|last| last.is_before(psn))
        };
        if self.reply == Reply::None && !self.outputs.iter().any(implied) {
            self.reply = Reply::Ack;
        }
    }

    /// One is asked for again: who does that has waited long enough.
    pub fn acknowledge_again(&mut self) {
        self.acknowledge();
        self.unacknowledged = u32::MAX;
    }

    /// An answer with data is to leave, with PSNs from `psn` on. It acknowledges what is before it; saying so
    /// again behind it would go back in the order of PSNs.
    fn implies_acknowledgement(&mut self, psn: Psn) {
        if self.reply == Reply::Ack && self.acknowledged.is_some_and(|last| last.is_before(psn)) {
            self.reply = Reply::None;
        }
    }

    /// The expected request found no receive WQE.
    pub fn not_ready(&mut self) {
        self.told = true;
        self.reply = Reply::NotReady;
    }

    /// The expected request was refused: the QP is in Error.
    pub fn refuse(&mut self, nak: Nak) {
        self.refused = Some(nak);
        self.reply = Reply::Refusal;
    }

    /// A request came to the QP in Error: if it is what was refused, or behind it, its sender has missed
    /// the NAK.
    pub fn refuse_again(&mut self, psn: Psn) {
        if self.refused.is_some() && !psn.is_before(self.expected) {
            self.reply = Reply::Refusal;
        }
    }

    /// The QP went to Error for a reason of its own: nothing is answered any more.
    pub fn close(&mut self) {
        if self.refused.is_none() {
            self.outputs.clear();
            self.reply = Reply::None;
        }
    }

    /// True if one more READ or atomic may be outstanding.
    pub fn has_room(&self) -> bool {
        self.count(false) < self.outputs_max
    }

    fn count(&self, again: bool) -> usize {
        self.outputs.iter().filter(|due| due.again == again).count()
    }

    /// Queues the answer of a READ that was admitted.
    pub fn read(&mut self, at: Remote, len: u32) {
        let output = Output::Read { psn: self.expected, at, left: len, fresh: true };
        self.outputs.push_back(Due { output, again: false });
        self.implies_acknowledgement(self.expected);
    }

    /// Keeps and queues the result of an atomic that was executed.
    pub fn atomic(&mut self, old: u64) {
        if self.results.len() == self.outputs_max {
            self.results.pop_front();
        }
        self.results.push_back((self.expected, old));
        let output = Output::Atomic { psn: self.expected, old };
        self.outputs.push_back(Due { output, again: false });
        self.implies_acknowledgement(self.expected);
    }

    /// Queues a READ once more. One that contradicts what was asked before is dropped.
    pub fn read_again(&mut self, psn: Psn, at: Remote, len: u32) {
        let packets = self.packets(len);
        if packets > self.expected.since(psn) {
            return;
        }
        let end = psn.plus(packets);
        // What is still to be sent will be; what it overlaps otherwise, it replaces.
        for due in &self.outputs {
            let (from, to) = reach(&due.output, self.mtu);
            if !psn.is_before(from) && psn.is_before(to) {
                return;
            }
            if from.is_before(end) && !from.is_before(psn) && end.is_before(to) {
                return;
            }
        }
        let mtu = self.mtu;
        self.outputs.retain(|due| {
            let (from, _) = reach(&due.output, mtu);
            from.is_before(psn) || !from.is_before(end)
        });
        self.insert(psn, Output::Read { psn, at, left: len, fresh: true });
    }

    /// Queues the result of an atomic once more; it is not executed again. Without a result, which is
    /// older than any that its sender may still ask for, nothing is answered.
    pub fn atomic_again(&mut self, psn: Psn) {
        // The latest: a number comes again when the circle has closed.
        let found = self.results.iter().rev().find(|(of, _)| *of == psn);
        let Some(&(_, old)) = found else { return };
        let again = Output::Atomic { psn, old };
        if !self.outputs.iter().any(|due| due.output == again) {
            self.insert(psn, again);
        }
    }

    fn insert(&mut self, psn: Psn, output: Output) {
        if self.count(true) >= self.outputs_max {
            return;
        }
        let behind = |due: &Due| !reach(&due.output, self.mtu).0.is_before(psn);
        let at = self.outputs.iter().position(behind).unwrap_or(self.outputs.len());
        self.outputs.insert(at, Due { output, again: true });
        self.implies_acknowledgement(psn);
    }

    // --- answers -------------------------------------------------------------------------------

    /// True if something is to be sent.
    #[inline]
    pub fn has_output(&self) -> bool {
        !self.outputs.is_empty() || self.reply != Reply::None
    }

    /// True if all that is to be sent is that a few requests have arrived.
    pub fn owes_little(&self) -> bool {
        self.owes_only_an_ack() && self.unacknowledged <= HELD_MAX
    }

    /// The same where requests of this side are on their way to the same peer.
    pub fn owes_little_in_dialogue(&self) -> bool {
        self.owes_only_an_ack() && self.unacknowledged <= DIALOGUE_MAX
    }

    /// True if that should leave with the next of them.
    pub fn goes_along(&self) -> bool {
        self.owes_only_an_ack() && self.unacknowledged >= DIALOGUE_LEAVES
    }

    /// True if all that is to be sent is that requests have arrived.
    pub fn owes_only_an_ack(&self) -> bool {
        self.outputs.is_empty() && self.reply == Reply::Ack
    }

    /// The answer with data that is to be sent next.
    pub fn output(&self) -> Option<Output> {
        self.outputs.front().map(|due| due.output)
    }

    /// True if what is to be sent next was asked for again.
    pub fn is_again(&self) -> bool {
        self.outputs.front().is_some_and(|due| due.again)
    }

    /// The READ in front cannot be answered a second time. Who still waits for it hears that; to others the
    /// PSN is a past one.
    pub fn refuse_output(&mut self) {
        if let Some(Due { output: Output::Read { psn, .. }, .. }) = self.outputs.pop_front() {
            self.outputs.push_front(Due { output: Output::Refusal { psn }, again: true });
        }
    }

    /// So many packets of the READ in front were sent.
    pub fn read_sent(&mut self, packets: u32) {
        let bytes = packets.saturating_mul(self.mtu);
        let Some(Due { output: Output::Read { psn, at, left, fresh }, .. }) =
            self.outputs.front_mut()
        else {
            return;
        };
        if *left <= bytes {
            self.outputs.pop_front();
            return;
        }
        *psn = psn.plus(packets);
        at.addr = at.addr.wrapping_add(bytes as u64);
        *left -= bytes;
        *fresh = false;
    }

    /// The atomic's result, or the refusal, in front was sent.
    pub fn atomic_sent(&mut self) {
        self.outputs.pop_front();
    }

    /// Takes the reply that is due once no output is left: its PSN and what it says.
    pub fn take_reply(&mut self) -> Option<(Psn, Syndrome)> {
        if !self.outputs.is_empty() {
            return None;
        }
        self.unacknowledged = 0;
        let expected = self.expected;
        Some(match std::mem::replace(&mut self.reply, Reply::None) {
            Reply::None => return None,
            Reply::Ack => (self.acknowledged?, Syndrome::Ack(NO_CREDITS)),
            Reply::Gap => (expected, Syndrome::Nak(Nak::Sequence)),
            Reply::NotReady => (expected, Syndrome::Rnr(self.rnr_timer)),
            Reply::Refusal => (expected, Syndrome::Nak(self.refused?)),
        })
    }

    /// Drops what is to be answered beside the refusal: the READ in front was refused at `psn`.
    pub fn refuse_at(&mut self, psn: Psn, nak: Nak) {
        self.outputs.clear();
        self.expected = psn;
        self.refuse(nak);
    }

    /// Acknowledges up to here, in answers with data.
    pub fn positive(&self) -> Syndrome {
        Syndrome::Ack(NO_CREDITS)
    }

    /// Messages that were completed, modulo 2^24.
    pub fn msn(&self) -> u32 {
        self.msn & Psn::MAX
    }
}

/// PSNs that an output will be sent with, from and to.
fn reach(output: &Output, mtu: u32) -> (Psn, Psn) {
    match *output {
        Output::Read { psn, left, .. } => (psn, psn.plus(left.div_ceil(mtu).max(1))),
        Output::Atomic { psn, .. } | Output::Refusal { psn } => (psn, psn.plus(1)),
    }
}

#[cfg(test)]
#[path = "responder_tests.rs"]
mod tests;
