//! The requester half of a connection: selects the packets to send, and processes responses.
//!
//! ```text
//!   PSN ──────── una ───────────── next ──────── high ──────── assigned ──>
//!    acknowledged │   in flight     │ to be sent  │  never sent │ no request yet
//!                 │                 │    again    │             │
//!                 +── go back ──────+ (next = una): NAK, gap in responses, timeout
//!
//!   requests   [ WRITE 3 packets ][ READ 9 ][ local: no packets ][ SEND 1 ]   a ring, oldest first
//!   reads              [ READ 4..8 ][ 8..12 ]                                 segments outstanding
//! ```
//!
//! `una` is the oldest unacknowledged PSN, `high` the first PSN that was never sent.
//!
//! A READ is requested in segments, each of as many packets as the window has room for. The borders
//! of segments do not change: a repeated READ request ends where the original one ended. So the
//! responder has either seen a whole segment or none of it.
//!
//! No field of a packet is trusted: a response without a matching request changes no state.

use std::collections::VecDeque;

use super::congestion::{CongestionControl, rnr_ns, timeout_ns};
use super::guess_limiter::PsnFit;
use super::outbox::LONG_BURST;
use super::packet::Nak;
use verbs::cqe::Syndrome;
use verbs::wqe::WQEBB;
use verbs::{Psn, RemotePeer};

/// Maximum PSNs assigned beyond the oldest unacknowledged PSN: a quarter of the PSN space. One
/// request may exceed it.
pub(crate) const SPAN_MAX: u32 = 1 << 22;
/// Maximum bytes of a READ segment: four bursts of packets of maximum length. The end of a segment
/// also ends a burst.
const SEGMENT_BYTES: u32 = 240 << 10;

/// Kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A WQE without packets. It is already executed, and completes in order.
    Local,
    Send,
    Write,
    Read,
    Atomic,
}

/// A WQE that has been fetched and has not completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub kind: Kind,
    /// Its first PSN.
    pub first: Psn,
    /// Number of its PSNs: request packets, or response packets of a READ.
    pub packets: u32,
    /// Bytes that the request transfers.
    pub len: u32,
    /// Opcode and index of the WQE.
    pub opcode: u8,
    pub counter: u16,
    pub signaled: bool,
    /// The request fails with this syndrome when it is the oldest one, and no later request is
    /// sent.
    pub fault: Option<(Syndrome, u8)>,
    /// Number of the WQE's building blocks that are kept.
    blocks: u32,
    /// Running index of the first kept building block.
    at: u32,
}

impl Request {
    /// Makes a request of `packets` PSNs. [`Requester::push`] assigns them.
    pub fn new(kind: Kind, packets: u32, len: u32) -> Self {
        Self {
            kind,
            first: Psn::new(0),
            packets,
            len,
            opcode: 0,
            counter: 0,
            signaled: false,
            fault: None,
            blocks: 0,
            at: 0,
        }
    }
}

/// The packets to send next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// Index of the request in the ring.
    pub request: usize,
    /// Index of the first packet within the request.
    pub packet: u32,
    /// Number of PSNs: packets of a SEND or WRITE, or response packets of a READ.
    pub count: u32,
    /// The first PSN.
    pub psn: Psn,
    /// The last packet requests an acknowledgement.
    pub ack: bool,
}

/// Relation of a response packet to the expected one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Response {
    /// The expected packet: packet `packet` of request `request`.
    Next { request: usize, packet: u32 },
    /// A duplicate, or a packet without an outstanding request.
    Stray,
    /// A packet behind a gap.
    Ahead,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retired {
    Done(Request),
    Failed(Request, Syndrome, u8),
}

/// An outstanding READ segment or atomic.
#[derive(Clone, Copy, Debug)]
struct Segment {
    first: Psn,
    packets: u32,
}

pub(crate) struct Requester {
    requests: VecDeque<Request>,
    /// The WQEs of `requests`, in building blocks, by running index.
    wqes: Box<[[u8; WQEBB]]>,
    /// Running index of the next building block to be kept.
    next_block: u32,
    segments: VecDeque<Segment>,
    segments_max: usize,
    segment_packets: u32,
    /// The oldest unacknowledged PSN.
    una: Psn,
    /// The first PSN that was never sent.
    high: Psn,
    /// The first PSN that is not assigned to a request.
    assigned: Psn,
    /// Send cursor: index of the request of the next packet; the number of requests if all are
    /// sent.
    at: usize,
    /// Send cursor: index of the next packet within its request.
    sent: u32,
    /// PSN after the last packet with an ACK request.
    ack_requested: Psn,
    congestion: CongestionControl,
    /// The packet that measures the round-trip time, and the time when it was sent.
    probe: Option<(Psn, u64)>,
    /// Loss recovery is in progress until this PSN is acknowledged. The window is halved once for
    /// each recovery.
    recovery_end: Option<Psn>,
    /// The PSN to which the requester last went back.
    recovery_from: Psn,
    /// Time of the last progress, or when packets were first outstanding.
    progress_ns: u64,
    /// Start of the retransmission timer.
    timer_ns: u64,
    /// End of the delay that an RNR NAK has requested.
    rnr_until: Option<u64>,
    /// RNR retries that are left.
    rnr_left: u8,
    rnr_retry: u8,
    /// Time without progress after which the connection fails.
    failure_ns: u64,
    failed: Option<Syndrome>,
}

impl Requester {
    /// Makes a requester for at most `requests` WQEs with a total of `blocks` building blocks, and
    /// a window of `window` bytes.
    pub fn new(peer: &RemotePeer, requests: u32, blocks: u32, window: u32) -> Self {
        let mtu = peer.mtu.bytes();
        let psn = peer.sq_psn;
        Self {
            requests: VecDeque::with_capacity(requests as usize),
            wqes: vec![[0; WQEBB]; blocks as usize].into(),
            next_block: 0,
            segments: VecDeque::with_capacity(peer.max_rd_atomic as usize),
            segments_max: peer.max_rd_atomic as usize,
            segment_packets: SEGMENT_BYTES / mtu,
            una: psn,
            high: psn,
            assigned: psn,
            at: 0,
            sent: 0,
            ack_requested: psn,
            congestion: CongestionControl::new(window / mtu, peer.timeout),
            probe: None,
            recovery_end: None,
            recovery_from: psn,
            progress_ns: 0,
            timer_ns: 0,
            rnr_until: None,
            rnr_left: peer.rnr_retry,
            rnr_retry: peer.rnr_retry,
            failure_ns: timeout_ns(peer.timeout) * (peer.retry_cnt as u64 + 1),
            failed: None,
        }
    }

    // --- requests ------------------------------------------------------------------------------

    /// Whether a WQE of up to `most_blocks` building blocks may be pushed: all earlier requests are
    /// sent, and there is room.
    pub fn has_room(&self, most_blocks: u32) -> bool {
        self.requests.len() < self.requests.capacity()
            && self.blocks_used() + most_blocks <= self.wqes.len() as u32
            && self.at == self.requests.len()
            && self.assigned.since(self.una) < SPAN_MAX
            && self.failed.is_none()
    }

    /// Whether no request is outstanding.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether packets are in flight: sent, but not acknowledged.
    pub fn awaits_answer(&self) -> bool {
        self.una != self.high
    }

    /// Whether a READ or atomic that was sent is outstanding.
    pub fn reads_outstanding(&self) -> bool {
        !self.segments.is_empty()
    }

    fn blocks_used(&self) -> u32 {
        self.requests.front().map_or(0, |r| self.next_block.wrapping_sub(r.at))
    }

    /// Appends a request with its WQE. The caller has checked [`Requester::has_room`].
    pub fn push(&mut self, mut request: Request, wqe: &[u8]) {
        let (blocks, _) = wqe.as_chunks::<WQEBB>();
        request.first = self.assigned;
        request.at = self.next_block;
        request.blocks = blocks.len() as u32;
        for block in blocks {
            let at = self.next_block as usize % self.wqes.len();
            self.wqes[at] = *block;
            self.next_block = self.next_block.wrapping_add(1);
        }
        self.assigned = self.assigned.plus(request.packets);
        self.requests.push_back(request);
        self.advance_cursor();
    }

    pub fn request(&self, at: usize) -> &Request {
        &self.requests[at]
    }

    /// Copies the WQE of a request to `into`.
    pub fn wqe(&self, at: usize, into: &mut [u8]) {
        let request = &self.requests[at];
        let (blocks, _) = into.as_chunks_mut::<WQEBB>();
        for (i, block) in blocks.iter_mut().take(request.blocks as usize).enumerate() {
            *block = self.wqes[request.at.wrapping_add(i as u32) as usize % self.wqes.len()];
        }
    }

    /// Removes the oldest request if it has ended.
    pub fn retire(&mut self) -> Option<Retired> {
        let front = *self.requests.front()?;
        let acknowledged = self.una.since(front.first) >= front.packets;
        // A request that the peer has executed completes, even if a fault was found here
        // afterwards.
        let ended = if acknowledged && (front.fault.is_none() || front.packets > 0) {
            Retired::Done(front)
        } else if let Some((syndrome, vendor)) = front.fault {
            Retired::Failed(front, syndrome, vendor)
        } else if let Some(syndrome) = self.failed {
            Retired::Failed(front, syndrome, 0)
        } else {
            return None;
        };
        self.requests.pop_front();
        self.at = self.at.saturating_sub(1);
        Some(ended)
    }

    /// Removes the oldest request in any state, because the QP is in the error state.
    pub fn flush(&mut self) -> Option<Request> {
        (self.at, self.sent) = (0, 0);
        self.segments.clear();
        self.requests.pop_front()
    }

    /// Marks request `at` as failed. It ends when it is the oldest one.
    pub fn fault(&mut self, at: usize, syndrome: Syndrome, vendor: u8) {
        self.requests[at].fault = Some((syndrome, vendor));
    }

    // --- sending -------------------------------------------------------------------------------

    /// The next packets that may be sent: packets of one request, at most `max_packets`.
    #[inline]
    pub fn next(&self, max_packets: u32) -> Option<Plan> {
        let r = self.requests.get(self.at).filter(|_| max_packets > 0)?;
        if r.fault.is_some() || self.failed.is_some() || self.rnr_until.is_some() {
            return None;
        }
        let psn = r.first.plus(self.sent);
        let in_flight = psn.since(self.una);
        let room = self.congestion.window().saturating_sub(in_flight);
        if room == 0 {
            return None;
        }
        let (left, again) = (r.packets - self.sent, psn.is_before(self.high));
        let unasked = psn.since(self.ack_requested);
        let count = match r.kind {
            Kind::Read | Kind::Atomic if again => {
                let held = |s: &&Segment| psn.since(s.first) < s.packets;
                let s = self.segments.iter().find(held)?;
                s.packets - psn.since(s.first)
            }
            Kind::Read | Kind::Atomic if self.segments.len() >= self.segments_max => return None,
            Kind::Read => {
                // Wait for more room rather than split the READ into small segments.
                let segment = left.min(self.segment_packets);
                if room < segment.min(self.congestion.window() / 4) && in_flight > 0 {
                    return None;
                }
                segment.min(room)
            }
            _ => {
                // At the start of a burst, also wait for the room of a whole burst. Room will come,
                // because ACKs are requested more often than once per window.
                let burst = left.min(LONG_BURST).min(self.congestion.window() / 4);
                if room < burst && unasked.is_multiple_of(LONG_BURST) && in_flight > 0 {
                    return None;
                }
                let to_ask = self.congestion.ack_every().saturating_sub(unasked).max(1);
                let to_burst = LONG_BURST - unasked % LONG_BURST;
                // A plan holds either retransmitted packets or new ones.
                let alike = if again { self.high.since(psn) } else { left };
                max_packets.min(left).min(room).min(to_ask).min(to_burst).min(alike)
            }
        };
        let ends = self.sent + count == r.packets;
        let ack = ends || room == count || unasked + count >= self.congestion.ack_every();
        Some(Plan { request: self.at, packet: self.sent, count, psn, ack })
    }

    /// Records that the packets of `plan` were sent. Returns true if it was a retransmission.
    #[inline]
    pub fn sent(&mut self, plan: &Plan, now_ns: u64) -> bool {
        let end = plan.psn.plus(plan.count);
        let again = plan.psn.is_before(self.high);
        if self.una == self.high {
            (self.progress_ns, self.timer_ns) = (now_ns, now_ns);
        }
        if !again {
            let mut answered = plan.psn.plus(plan.count - 1);
            if matches!(self.requests[plan.request].kind, Kind::Read | Kind::Atomic) {
                self.segments.push_back(Segment { first: plan.psn, packets: plan.count });
                answered = plan.psn;
            }
            self.high = end;
            if self.probe.is_none() && plan.ack {
                self.probe = Some((answered, now_ns));
            }
        }
        if plan.ack {
            self.ack_requested = end;
        }
        self.sent += plan.count;
        self.advance_cursor();
        again
    }

    /// Moves the send cursor to the next existing packet.
    fn advance_cursor(&mut self) {
        while let Some(r) = self.requests.get(self.at) {
            if self.sent < r.packets || r.fault.is_some() {
                return;
            }
            self.at += 1;
            self.sent = 0;
        }
    }

    /// Moves the send cursor to `psn`.
    fn seek(&mut self, psn: Psn) {
        let found = self.requests.iter().position(|r| psn.since(r.first) < r.packets);
        (self.at, self.sent) = match found {
            Some(at) => (at, psn.since(self.requests[at].first)),
            None => (self.requests.len(), 0),
        };
        self.ack_requested = psn;
    }

    // --- responses -----------------------------------------------------------------------------

    /// Relation of a response's PSN to the packets in flight.
    pub fn fit(&self, psn: Psn) -> PsnFit {
        if psn.since(self.una) < self.high.since(self.una) {
            return PsnFit::Expected;
        }
        match PsnFit::of(psn, self.una) {
            PsnFit::Expected => PsnFit::Near,
            other => other,
        }
    }

    /// Processes an ACK of all packets before `to`. If it covers a READ or atomic whose result has
    /// not arrived, the result was lost.
    pub fn on_ack(&mut self, to: Psn, now_ns: u64) {
        let claimed = to.since(self.una);
        if claimed > self.high.since(self.una) {
            return;
        }
        let awaited = self.segments.front().map(|s| s.first.later(self.una));
        match awaited {
            Some(first) if claimed > first.since(self.una) => {
                self.advance(first, now_ns);
                self.lost(now_ns);
            }
            _ => self.advance(to, now_ns),
        }
    }

    /// Classifies a READ response or atomic acknowledgement with this PSN.
    pub fn response(&self, psn: Psn) -> Response {
        let Some(segment) = self.segments.front() else { return Response::Stray };
        let awaited = segment.first.later(self.una);
        if psn != awaited {
            let ahead = psn.since(awaited) < self.high.since(awaited);
            return if ahead { Response::Ahead } else { Response::Stray };
        }
        let found = self.requests.iter().position(|r| psn.since(r.first) < r.packets);
        match found {
            Some(request) => {
                Response::Next { request, packet: psn.since(self.requests[request].first) }
            }
            None => Response::Stray,
        }
    }

    /// Records that the expected response was accepted.
    pub fn on_response(&mut self, psn: Psn, now_ns: u64) {
        self.advance(psn.plus(1), now_ns);
    }

    /// Records that a response is missing, because a later one has arrived.
    pub fn on_response_gap(&mut self, now_ns: u64) {
        self.lost(now_ns);
    }

    /// Processes a NAK for `psn`: packets before `psn` have arrived, and `psn` is missing or
    /// rejected.
    pub fn on_nak(&mut self, psn: Psn, nak: Nak, now_ns: u64) {
        if psn.since(self.una) >= self.high.since(self.una) {
            return;
        }
        self.on_ack(psn, now_ns);
        match (nak, self.una == psn) {
            (Nak::Sequence, true) => self.lost(now_ns),
            // The result of an earlier READ was lost. `on_ack` has already started the recovery.
            (Nak::Sequence, false) => {}
            (Nak::InvalidRequest, true) => self.failed = Some(Syndrome::RemoteInvalidRequest),
            (Nak::RemoteAccess, true) => self.failed = Some(Syndrome::RemoteAccess),
            (Nak::RemoteOperation, true) => self.failed = Some(Syndrome::RemoteOperation),
            // The result of an earlier READ was lost, and the peer's QP is in the error state: the
            // result will never arrive.
            (_, false) => self.failed = Some(Syndrome::RetryExceeded),
        }
    }

    /// Processes an RNR NAK: the peer has no receive WQE for `psn`. `timer` is the code of the
    /// delay.
    pub fn on_rnr_nak(&mut self, psn: Psn, timer: u8, now_ns: u64) {
        if psn.since(self.una) >= self.high.since(self.una) || self.rnr_until.is_some() {
            return;
        }
        self.on_ack(psn, now_ns);
        if self.una != psn {
            return;
        }
        if self.rnr_retry != 7 {
            if self.rnr_left == 0 {
                self.failed = Some(Syndrome::RnrRetryExceeded);
                return;
            }
            self.rnr_left -= 1;
        }
        self.progress_ns = now_ns;
        self.probe = None;
        self.recovery_end = None;
        self.seek(psn);
        self.rnr_until = Some(now_ns + rnr_ns(timer));
    }

    /// Records that all requests and responses before `to` are complete.
    fn advance(&mut self, to: Psn, now_ns: u64) {
        let count = to.since(self.una);
        if count == 0 {
            return;
        }
        if let Some((psn, sent_ns)) = self.probe
            && psn.is_before(to)
        {
            self.congestion.on_rtt(now_ns.saturating_sub(sent_ns));
            self.probe = None;
        }
        let next = self.cursor();
        self.una = to;
        while self
            .segments
            .front()
            .is_some_and(|s| to.since(s.first) >= s.packets && !to.is_before(s.first))
        {
            self.segments.pop_front();
        }
        self.congestion.on_ack(count);
        (self.progress_ns, self.timer_ns) = (now_ns, now_ns);
        self.rnr_left = self.rnr_retry;
        if next.is_before(to) {
            self.seek(to);
        }
        if self.recovery_end.is_some_and(|end| !to.is_before(end)) {
            self.recovery_end = None;
        }
    }

    /// The PSN at the send cursor.
    fn cursor(&self) -> Psn {
        self.requests.get(self.at).map_or(self.assigned, |r| r.first.plus(self.sent))
    }

    /// Goes back to the oldest unacknowledged packet after a loss, once for each loss.
    fn lost(&mut self, now_ns: u64) {
        match self.recovery_end {
            Some(_) if self.recovery_from == self.una => return,
            Some(_) => {}
            None => {
                self.congestion.on_loss();
                self.recovery_end = Some(self.high);
            }
        }
        self.go_back(now_ns);
    }

    fn go_back(&mut self, now_ns: u64) {
        self.recovery_from = self.una;
        self.probe = None;
        self.timer_ns = now_ns;
        self.seek(self.una);
    }

    // --- time ----------------------------------------------------------------------------------

    /// The time at which [`Requester::on_timer`] must be called.
    pub fn deadline(&self) -> Option<u64> {
        if self.failed.is_some() {
            return None;
        }
        if let Some(until) = self.rnr_until {
            return Some(until);
        }
        let given_up = self.progress_ns + self.failure_ns;
        (self.una != self.high)
            .then(|| given_up.min(self.timer_ns + self.congestion.retransmit_ns()))
    }

    /// Handles an expired timer. Returns true if the retransmission timer has expired.
    pub fn on_timer(&mut self, now_ns: u64) -> bool {
        if self.deadline().is_none_or(|at| now_ns < at) {
            return false;
        }
        if self.rnr_until.take().is_some() {
            (self.progress_ns, self.timer_ns) = (now_ns, now_ns);
            return false;
        }
        if now_ns >= self.progress_ns + self.failure_ns {
            self.failed = Some(Syndrome::RetryExceeded);
            return false;
        }
        self.congestion.on_timeout();
        self.recovery_end = Some(self.high);
        self.go_back(now_ns);
        true
    }
}

#[cfg(test)]
#[path = "requester_tests.rs"]
mod tests;
