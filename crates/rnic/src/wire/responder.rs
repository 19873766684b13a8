//! The responder half of a connection: classifies requests, and queues the responses.
//!
//! ```text
//!                before `expected`: a duplicate      `expected`          after it: a gap
//!   SEND, WRITE  acknowledged again, dropped         executed            dropped, one
//!   READ         read again, from its PSN on         executed, queued    NAK for `expected`
//!   atomic       its result again, from `results`    executed, kept
//!
//!   outputs   [ READ 17.. ][ atomic 21 ] then the reply: ACK, NAK or RNR NAK for the last request
//! ```
//!
//! Responses leave in PSN order. ACKs that have not left yet are merged into one. An ACK carries
//! the PSN of a SEND or WRITE, because a READ or atomic is answered by its data only. After a NAK
//! for a rejected request the same NAK is sent for every repeated request, until the QP is reset.

use std::collections::VecDeque;

use super::guess_limiter::PsnFit;
use super::packet::{Nak, Syndrome};
use verbs::wqe::Remote;
use verbs::{Psn, RemotePeer};

/// Maximum packets of a READ.
pub(crate) const READ_PACKETS_MAX: u32 = 1 << 22;
/// Credit code of ACKs for "no end-to-end flow control": a lack of receive WQEs is reported by RNR
/// NAKs.
const NO_CREDITS: u8 = 31;

/// Relation of a request's PSN to the expected PSN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arrival {
    Expected,
    Duplicate,
    Ahead,
}

/// Response to an executed request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// The data of a READ or the result of an atomic.
    Data,
    /// An ACK for a SEND or WRITE that requests one.
    Ack,
    /// No response: a later packet will request the ACK.
    Nothing,
}

/// The message that is being received.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    None,
    /// A SEND into the receive WQE that is kept in the responder; `len` bytes have arrived.
    Send {
        len: u32,
    },
    /// A WRITE: `left` of its `len` bytes are outstanding, with the destination `at`.
    Write {
        at: Remote,
        left: u32,
        len: u32,
    },
}

/// A response with data, or a NAK in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Output {
    /// The remaining packets of a READ response.
    Read {
        /// PSN of the next packet.
        psn: Psn,
        /// The memory to read.
        at: Remote,
        /// Bytes that are left.
        left: u32,
        /// No packet of the response has been sent.
        fresh: bool,
    },
    Atomic {
        psn: Psn,
        old: u64,
    },
    /// A NAK for a repeated READ that cannot be answered a second time.
    Refusal {
        /// The READ's PSN.
        psn: Psn,
    },
}

/// A queued response.
#[derive(Clone, Copy)]
struct Queued {
    output: Output,
    /// The response to a repeated request. Such responses do not count against the limit of new
    /// ones.
    repeated: bool,
}

/// Maximum packets whose ACK may be delayed until the link is idle.
const IDLE_DELAY_MAX: u32 = 4;

/// Maximum packets whose ACK may be delayed until the next request of this side (piggybacking). It
/// is a small fraction of a sender's window, and large enough that the cost per packet is
/// negligible.
const PIGGYBACK_MAX: u32 = 16;
/// Packets from which a delayed ACK leaves with the next request.
const PIGGYBACK_AT: u32 = 8;

/// The response without data that is sent after all outputs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reply {
    None,
    Ack,
    /// NAK: PSN sequence error.
    Gap,
    /// RNR NAK.
    NotReady,
    /// NAK: the request was rejected.
    Refusal,
}

pub(crate) struct Responder {
    mtu: u32,
    /// The PSN of the next new request.
    expected: Psn,
    /// The PSN of ACKs: the last SEND or WRITE, if its distance is less than half of the PSN space.
    /// Because a requester could take an ACK with the PSN of a READ or atomic for its completion,
    /// even if the data was lost.
    acknowledged: Option<Psn>,
    /// Message sequence number: messages completed.
    msn: u32,
    /// PSNs received since the last ACK was sent; `u32::MAX` if the ACK must leave at once.
    unacknowledged: u32,
    rnr_timer: u8,
    pub message: Message,
    /// The receive WQE of the current SEND.
    pub receive_wqe: Box<[u8]>,
    outputs: VecDeque<Queued>,
    /// Maximum new outputs, and maximum repeated ones.
    outputs_max: usize,
    /// Results of the last atomics, oldest first.
    results: VecDeque<(Psn, u64)>,
    /// A NAK for `expected` was sent.
    nak_sent: bool,
    reply: Reply,
    /// The reason for which a request was rejected.
    refused: Option<Nak>,
}

impl Responder {
    /// Makes a responder for receive WQEs of `stride` bytes.
    pub fn new(peer: &RemotePeer, stride: u32) -> Self {
        let max_outputs = peer.max_dest_rd_atomic as usize;
        Self {
            mtu: peer.mtu.bytes(),
            expected: peer.rq_psn,
            acknowledged: None,
            msn: 0,
            unacknowledged: 0,
            rnr_timer: peer.min_rnr_timer,
            message: Message::None,
            receive_wqe: vec![0; stride as usize].into(),
            outputs: VecDeque::with_capacity(2 * max_outputs),
            outputs_max: max_outputs,
            results: VecDeque::with_capacity(max_outputs),
            nak_sent: false,
            reply: Reply::None,
            refused: None,
        }
    }

    // --- requests ------------------------------------------------------------------------------

    /// Number of response packets of a READ of `len` bytes.
    pub fn packets(&self, len: u32) -> u32 {
        len.div_ceil(self.mtu).max(1)
    }

    /// Relation of a request's PSN to the expected PSN, for the limit on guesses.
    pub fn fit(&self, psn: Psn) -> PsnFit {
        PsnFit::of(psn, self.expected)
    }

    /// Classifies a received request. For the first one that is ahead a NAK is queued; the caller
    /// drops requests that are ahead.
    pub fn arrival(&mut self, psn: Psn) -> Arrival {
        if psn == self.expected {
            self.nak_sent = false;
            return Arrival::Expected;
        }
        if psn.is_before(self.expected) {
            return Arrival::Duplicate;
        }
        if !self.nak_sent {
            self.nak_sent = true;
            self.reply = Reply::Gap;
        }
        Arrival::Ahead
    }

    /// Records that the expected request, of `packets` PSNs, was executed.
    pub fn accepted(&mut self, packets: u32, ends_message: bool, answer: Answer) {
        let last = self.expected.plus(packets - 1);
        self.expected = self.expected.plus(packets);
        (self.acknowledged, self.unacknowledged) = match answer {
            // The data acknowledges all earlier requests.
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

    /// Queues an ACK, unless another queued response implies it.
    pub fn acknowledge(&mut self) {
        // A NAK acknowledges all earlier requests, and so does the data of a later READ or atomic.
        let implied = |queued: &Queued| {
            let (psn, _) = psn_range(&queued.output, self.mtu);
            self.acknowledged.is_some_and(|last| last.is_before(psn))
        };
        if self.reply == Reply::None && !self.outputs.iter().any(implied) {
            self.reply = Reply::Ack;
        }
    }

    /// Queues an ACK for a repeated request. The ACK is not delayed, because the peer has already
    /// waited for a timeout.
    pub fn acknowledge_now(&mut self) {
        self.acknowledge();
        self.unacknowledged = u32::MAX;
    }

    /// Cancels a queued ACK that is implied by a response with data from `psn` on. Sent after that
    /// response, the ACK would violate PSN order.
    fn implies_acknowledgement(&mut self, psn: Psn) {
        if self.reply == Reply::Ack && self.acknowledged.is_some_and(|last| last.is_before(psn)) {
            self.reply = Reply::None;
        }
    }

    /// Queues an RNR NAK: there is no receive WQE for the expected request.
    pub fn queue_rnr_nak(&mut self) {
        self.nak_sent = true;
        self.reply = Reply::NotReady;
    }

    /// Queues a NAK: the expected request was rejected, and the QP enters the error state.
    pub fn reject(&mut self, nak: Nak) {
        self.refused = Some(nak);
        self.reply = Reply::Refusal;
    }

    /// Queues the NAK again if a request received in the error state is the rejected one or a later
    /// one, because then the peer has missed the NAK.
    pub fn repeat_nak(&mut self, psn: Psn) {
        if self.refused.is_some() && !psn.is_before(self.expected) {
            self.reply = Reply::Refusal;
        }
    }

    /// Drops all responses when the QP enters the error state, unless a request was rejected.
    pub fn close(&mut self) {
        if self.refused.is_none() {
            self.outputs.clear();
            self.reply = Reply::None;
        }
    }

    /// Whether one more READ or atomic may be outstanding.
    pub fn has_room(&self) -> bool {
        self.count(false) < self.outputs_max
    }

    fn count(&self, repeated: bool) -> usize {
        self.outputs.iter().filter(|queued| queued.repeated == repeated).count()
    }

    /// Queues the response to a new READ whose access was granted.
    pub fn read(&mut self, at: Remote, len: u32) {
        let output = Output::Read { psn: self.expected, at, left: len, fresh: true };
        self.outputs.push_back(Queued { output, repeated: false });
        self.implies_acknowledgement(self.expected);
    }

    /// Queues the result of an executed atomic, and keeps it for repeated requests.
    pub fn atomic(&mut self, old: u64) {
        if self.results.len() == self.outputs_max {
            self.results.pop_front();
        }
        self.results.push_back((self.expected, old));
        let output = Output::Atomic { psn: self.expected, old };
        self.outputs.push_back(Queued { output, repeated: false });
        self.implies_acknowledgement(self.expected);
    }

    /// Queues the response to a repeated READ. A READ that contradicts earlier requests is dropped.
    pub fn repeat_read(&mut self, psn: Psn, at: Remote, len: u32) {
        let packets = self.packets(len);
        if packets > self.expected.since(psn) {
            return;
        }
        let end = psn.plus(packets);
        // The repeated READ is dropped if a queued response covers its start, or extends beyond its
        // end. It replaces the queued responses that it covers.
        for queued in &self.outputs {
            let (from, to) = psn_range(&queued.output, self.mtu);
            if !psn.is_before(from) && psn.is_before(to) {
                return;
            }
            if from.is_before(end) && !from.is_before(psn) && end.is_before(to) {
                return;
            }
        }
        let mtu = self.mtu;
        self.outputs.retain(|queued| {
            let (from, _) = psn_range(&queued.output, mtu);
            from.is_before(psn) || !from.is_before(end)
        });
        self.insert(psn, Output::Read { psn, at, left: len, fresh: true });
    }

    /// Queues the kept result of a repeated atomic, which is not executed again. If no result is
    /// kept, the request is older than any that the peer may repeat, and gets no response.
    pub fn repeat_atomic(&mut self, psn: Psn) {
        // The latest result, because a PSN recurs after a wrap around.
        let found = self.results.iter().rev().find(|(of, _)| *of == psn);
        let Some(&(_, old)) = found else { return };
        let again = Output::Atomic { psn, old };
        if !self.outputs.iter().any(|queued| queued.output == again) {
            self.insert(psn, again);
        }
    }

    fn insert(&mut self, psn: Psn, output: Output) {
        if self.count(true) >= self.outputs_max {
            return;
        }
        let behind = |queued: &Queued| !psn_range(&queued.output, self.mtu).0.is_before(psn);
        let at = self.outputs.iter().position(behind).unwrap_or(self.outputs.len());
        self.outputs.insert(at, Queued { output, repeated: true });
        self.implies_acknowledgement(psn);
    }

    // --- responses -----------------------------------------------------------------------------

    /// Whether there is a response to send.
    #[inline]
    pub fn has_output(&self) -> bool {
        !self.outputs.is_empty() || self.reply != Reply::None
    }

    /// Whether the only response is an ACK of few packets, which may be delayed until the link is
    /// idle.
    pub fn ack_may_wait_for_idle(&self) -> bool {
        self.owes_only_an_ack() && self.unacknowledged <= IDLE_DELAY_MAX
    }

    /// Whether the only response is an ACK that may be delayed until the next request of this side.
    pub fn ack_may_be_piggybacked(&self) -> bool {
        self.owes_only_an_ack() && self.unacknowledged <= PIGGYBACK_MAX
    }

    /// Whether the delayed ACK should leave with the next request of this side.
    pub fn ack_leaves_with_request(&self) -> bool {
        self.owes_only_an_ack() && self.unacknowledged >= PIGGYBACK_AT
    }

    /// Whether the only response is an ACK.
    pub fn owes_only_an_ack(&self) -> bool {
        self.outputs.is_empty() && self.reply == Reply::Ack
    }

    /// The next response with data.
    pub fn output(&self) -> Option<Output> {
        self.outputs.front().map(|queued| queued.output)
    }

    /// Whether the next response answers a repeated request.
    pub fn output_is_repeated(&self) -> bool {
        self.outputs.front().is_some_and(|queued| queued.repeated)
    }

    /// Replaces the READ at the head of the output queue by a NAK, because the READ cannot be
    /// answered a second time. A peer that has already completed the READ ignores the NAK as a
    /// duplicate.
    pub fn nak_output(&mut self) {
        if let Some(Queued { output: Output::Read { psn, .. }, .. }) = self.outputs.pop_front() {
            self.outputs.push_front(Queued { output: Output::Refusal { psn }, repeated: true });
        }
    }

    /// Records that `packets` packets of the READ at the head of the output queue were sent.
    pub fn read_sent(&mut self, packets: u32) {
        let bytes = packets.saturating_mul(self.mtu);
        let Some(Queued { output: Output::Read { psn, at, left, fresh }, .. }) =
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

    /// Removes the atomic response or NAK at the head of the output queue, which was sent.
    pub fn pop_output(&mut self) {
        self.outputs.pop_front();
    }

    /// Takes the response without data, with its PSN, once no output is left.
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

    /// Replaces all responses by a NAK for `psn`, because the READ at the head of the output queue
    /// failed there.
    pub fn nak_at(&mut self, psn: Psn, nak: Nak) {
        self.outputs.clear();
        self.expected = psn;
        self.reject(nak);
    }

    /// The syndrome of responses with data: they acknowledge all packets up to their PSN.
    pub fn positive(&self) -> Syndrome {
        Syndrome::Ack(NO_CREDITS)
    }

    /// Number of completed messages, modulo 2^24.
    pub fn msn(&self) -> u32 {
        self.msn & Psn::MAX
    }
}

/// The PSN range of an output: the first PSN, and the one after the last.
fn psn_range(output: &Output, mtu: u32) -> (Psn, Psn) {
    match *output {
        Output::Read { psn, left, .. } => (psn, psn.plus(left.div_ceil(mtu).max(1))),
        Output::Atomic { psn, .. } | Output::Refusal { psn } => (psn, psn.plus(1)),
    }
}

#[cfg(test)]
#[path = "responder_tests.rs"]
mod tests;
