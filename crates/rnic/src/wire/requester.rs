//! The requester's half of a connection: which request is sent next, and what an answer means.
//!
//! ```text
//!   PSN ──────── una ───────────── next ──────── high ──────── assigned ──>
//!    acknowledged │   in flight     │ to be sent  │  never sent │ no request yet
//!                 │                 │    again    │             │
//!                 +── go back ──────+ (next = una): NAK, gap in responses, timeout
//!
//!   requests   [ WRITE 3 packets ][ READ 9 ][ local: no packets ][ SEND 1 ]     a ring, oldest first
//!   reads              [ READ 4..8 ][ 8..12 ]                                   segments outstanding
//! ```
//!
//! A READ is asked for in segments, as many packets each as the window has room for. Their borders stay: what
//! is asked for again ends where it ended before, so that the responder has either seen a segment whole or
//! not at all.
//!
//! No field of a packet is trusted: an answer to what was not sent changes nothing.

use std::collections::VecDeque;

use super::guesses::Fit;
use super::outbox::LONG_BURST;
use super::pace::{Pace, rnr_ns, timeout_ns};
use super::packet::Nak;
use super::peer::RemotePeer;
use crate::cqe::Syndrome;
use crate::ids::Psn;
use crate::wqe::WQEBB;

/// PSNs that requests may have been given beyond the oldest that is not acknowledged: a quarter of the
/// circle, and one request more.
pub(crate) const SPAN_MAX: u32 = 1 << 22;
/// Bytes of a READ segment at most: four bursts of the longest packets. Where one ends, so does a burst.
const SEGMENT_BYTES: u32 = 240 << 10;

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Nothing on the wire: it is done, and completes in its turn.
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
    /// PSNs that it takes: packets that are sent, or of a READ that come back.
    pub packets: u32,
    /// Bytes that it moves.
    pub len: u32,
    /// Opcode and index of the WQE.
    pub opcode: u8,
    pub counter: u16,
    pub signaled: bool,
    /// It fails when its turn comes, and nothing behind it is sent.
    pub fault: Option<(Syndrome, u8)>,
    /// Building blocks of the WQE that are kept, and the running index of the first.
    blocks: u32,
    at: u32,
}

impl Request {
    /// One that takes `packets` PSNs; it gets its place in [`Requester::push`].
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

/// What is to be sent next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// Which request of the ring.
    pub request: usize,
    /// Which of its packets is the first.
    pub packet: u32,
    /// PSNs: packets of a SEND or WRITE, or those that come back for a READ.
    pub count: u32,
    /// The first one.
    pub psn: Psn,
    /// The last packet asks for an acknowledgement.
    pub ack: bool,
}

/// What a response is to the requester.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Response {
    /// The one that is expected: packet `packet` of request `request`.
    Next { request: usize, packet: u32 },
    /// One that was seen before, or that nobody asked for.
    Stray,
    /// One behind a gap.
    Ahead,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retired {
    Done(Request),
    Failed(Request, Syndrome, u8),
}

/// A READ segment or atomic that is outstanding.
#[derive(Clone, Copy, Debug)]
struct Segment {
    first: Psn,
    packets: u32,
}

pub(crate) struct Requester {
    requests: VecDeque<Request>,
    /// The WQEs of `requests`, in building blocks, by running index.
    wqes: Box<[[u8; WQEBB]]>,
    /// Running index of the next building block that is kept.
    next_block: u32,
    segments: VecDeque<Segment>,
    segments_max: usize,
    segment_packets: u32,
    una: Psn,
    high: Psn,
    assigned: Psn,
    /// The next packet to be sent: of this request (or none, if all are sent), this one.
    at: usize,
    sent: u32,
    /// All before it is asked to be acknowledged.
    asked: Psn,
    pace: Pace,
    /// A packet that was sent once, and when: measures the round trip.
    probe: Option<(Psn, u64)>,
    /// Until this PSN is acknowledged a loss is being mended; one window is halved once.
    mending: Option<Psn>,
    went_back_to: Psn,
    /// When something was last heard of the peer, or first awaited.
    heard_ns: u64,
    /// When the retransmission timer was started.
    timer_ns: u64,
    /// The peer asked to wait until then.
    rnr_until: Option<u64>,
    rnr_left: u8,
    rnr_retry: u8,
    patience_ns: u64,
    failed: Option<Syndrome>,
}

impl Requester {
    /// For at most `requests` WQEs of together at most `blocks` building blocks, and a window of
    /// `window` bytes.
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
            asked: psn,
            pace: Pace::new(window / mtu, peer.timeout),
            probe: None,
            mending: None,
            went_back_to: psn,
            heard_ns: 0,
            timer_ns: 0,
            rnr_until: None,
            rnr_left: peer.rnr_retry,
            rnr_retry: peer.rnr_retry,
            patience_ns: timeout_ns(peer.timeout) * (peer.retry_cnt as u64 + 1),
            failed: None,
        }
    }

    // --- requests ------------------------------------------------------------------------------

    /// True if a WQE of any length may be pushed: all before it have been sent, and there is room.
    pub fn has_room(&self, most_blocks: u32) -> bool {
        self.requests.len() < self.requests.capacity()
            && self.blocks_used() + most_blocks <= self.wqes.len() as u32
            && self.at == self.requests.len()
            && self.assigned.since(self.una) < SPAN_MAX
            && self.failed.is_none()
    }

    /// True if nothing is outstanding.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// True if packets were sent that are not acknowledged.
    pub fn awaits_answer(&self) -> bool {
        self.una != self.high
    }

    /// True if a READ or atomic is outstanding, of those that have been sent.
    pub fn reads_outstanding(&self) -> bool {
        !self.segments.is_empty()
    }

    fn blocks_used(&self) -> u32 {
        self.requests.front().map_or(0, |r| self.next_block.wrapping_sub(r.at))
    }

    /// Puts a request behind the others, with its WQE. There is room.
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
        self.settle();
    }

    pub fn request(&self, at: usize) -> &Request {
        &self.requests[at]
    }

    /// Copies the WQE of a request out.
    pub fn wqe(&self, at: usize, into: &mut [u8]) {
        let request = &self.requests[at];
        let (blocks, _) = into.as_chunks_mut::<WQEBB>();
        for (i, block) in blocks.iter_mut().take(request.blocks as usize).enumerate() {
            *block = self.wqes[request.at.wrapping_add(i as u32) as usize % self.wqes.len()];
        }
    }

    /// Takes the oldest request if it has ended.
    pub fn retire(&mut self) -> Option<Retired> {
        let front = *self.requests.front()?;
        let acknowledged = self.una.since(front.first) >= front.packets;
        // What the peer has done is done, whatever was found wrong here since.
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

    /// Takes the oldest request, whatever has become of it: the QP is in Error.
    pub fn flush(&mut self) -> Option<Request> {
        (self.at, self.sent) = (0, 0);
        self.segments.clear();
        self.requests.pop_front()
    }

    /// Request `at` fails when its turn comes.
    pub fn fault(&mut self, at: usize, syndrome: Syndrome, vendor: u8) {
        self.requests[at].fault = Some((syndrome, vendor));
    }

    // --- sending -------------------------------------------------------------------------------

    /// What is to be sent next, if anything may be: packets of one request, at most `most` of them.
    #[inline]
    pub fn next(&self, most: u32) -> Option<Plan> {
        let r = self.requests.get(self.at).filter(|_| most > 0)?;
        if r.fault.is_some() || self.failed.is_some() || self.rnr_until.is_some() {
            return None;
        }
        let psn = r.first.plus(self.sent);
        let in_flight = psn.since(self.una);
        let room = self.pace.window().saturating_sub(in_flight);
        if room == 0 {
            return None;
        }
        let (left, again) = (r.packets - self.sent, psn.is_before(self.high));
        let unasked = psn.since(self.asked);
        let count = match r.kind {
            Kind::Read | Kind::Atomic if again => {
                let held = |s: &&Segment| psn.since(s.first) < s.packets;
                let s = self.segments.iter().find(held)?;
                s.packets - psn.since(s.first)
            }
            Kind::Read | Kind::Atomic if self.segments.len() >= self.segments_max => return None,
            Kind::Read => {
                // Better a little later than in pieces.
                let most = left.min(self.segment_packets);
                if room < most.min(self.pace.window() / 4) && in_flight > 0 {
                    return None;
                }
                most.min(room)
            }
            _ => {
                // Likewise, where a burst begins. An acknowledgement is on its way: one is asked for more often.
                let burst = left.min(LONG_BURST).min(self.pace.window() / 4);
                if room < burst && unasked.is_multiple_of(LONG_BURST) && in_flight > 0 {
                    return None;
                }
                let to_ask = self.pace.ack_every().saturating_sub(unasked).max(1);
                let to_burst = LONG_BURST - unasked % LONG_BURST;
                // What is sent again and what is not stay apart.
                let alike = if again { self.high.since(psn) } else { left };
                most.min(left).min(room).min(to_ask).min(to_burst).min(alike)
            }
        };
        let ends = self.sent + count == r.packets;
        let ack = ends || room == count || unasked + count >= self.pace.ack_every();
        Some(Plan { request: self.at, packet: self.sent, count, psn, ack })
    }

    /// What `plan` says was sent; true if it was sent before.
    #[inline]
    pub fn sent(&mut self, plan: &Plan, now_ns: u64) -> bool {
        let end = plan.psn.plus(plan.count);
        let again = plan.psn.is_before(self.high);
        if self.una == self.high {
            (self.heard_ns, self.timer_ns) = (now_ns, now_ns);
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
            self.asked = end;
        }
        self.sent += plan.count;
        self.settle();
        again
    }

    /// Puts the cursor on the next packet that there is.
    fn settle(&mut self) {
        while let Some(r) = self.requests.get(self.at) {
            if self.sent < r.packets || r.fault.is_some() {
                return;
            }
            self.at += 1;
            self.sent = 0;
        }
    }

    /// Puts the cursor on `psn`.
    fn seek(&mut self, psn: Psn) {
        let found = self.requests.iter().position(|r| psn.since(r.first) < r.packets);
        (self.at, self.sent) = match found {
            Some(at) => (at, psn.since(self.requests[at].first)),
            None => (self.requests.len(), 0),
        };
        self.asked = psn;
    }

    // --- answers -------------------------------------------------------------------------------

    /// How an answer's PSN stands to those of the packets in flight.
    pub fn fit(&self, psn: Psn) -> Fit {
        if psn.since(self.una) < self.high.since(self.una) {
            return Fit::Expected;
        }
        match Fit::of(psn, self.una) {
            Fit::Expected => Fit::Near,
            other => other,
        }
    }

    /// Everything before `to` arrived, says the peer. A READ's or atomic's result that is missing
    /// nevertheless was lost.
    pub fn acknowledged(&mut self, to: Psn, now_ns: u64) {
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

    /// What a READ response or atomic acknowledgement of this PSN is.
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

    /// The awaited response was taken.
    pub fn answered(&mut self, psn: Psn, now_ns: u64) {
        self.advance(psn.plus(1), now_ns);
    }

    /// A response before one that arrived is missing.
    pub fn gap(&mut self, now_ns: u64) {
        self.lost(now_ns);
    }

    /// The peer misses what comes before `psn`, or refuses it for now or for good.
    pub fn refused(&mut self, psn: Psn, nak: Nak, now_ns: u64) {
        if psn.since(self.una) >= self.high.since(self.una) {
            return;
        }
        self.acknowledged(psn, now_ns);
        match (nak, self.una == psn) {
            (Nak::Sequence, true) => self.lost(now_ns),
            // The result of a READ before it was lost; going back has begun.
            (Nak::Sequence, false) => {}
            (Nak::InvalidRequest, true) => self.failed = Some(Syndrome::RemoteInvalidRequest),
            (Nak::RemoteAccess, true) => self.failed = Some(Syndrome::RemoteAccess),
            (Nak::RemoteOperation, true) => self.failed = Some(Syndrome::RemoteOperation),
            // That result will never come: the peer's QP is in Error.
            (_, false) => self.failed = Some(Syndrome::RetryExceeded),
        }
    }

    /// The peer has no receive WQE for `psn`.
    pub fn not_ready(&mut self, psn: Psn, timer: u8, now_ns: u64) {
        if psn.since(self.una) >= self.high.since(self.una) || self.rnr_until.is_some() {
            return;
        }
        self.acknowledged(psn, now_ns);
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
        self.heard_ns = now_ns;
        self.probe = None;
        self.mending = None;
        self.seek(psn);
        self.rnr_until = Some(now_ns + rnr_ns(timer));
    }

    /// Everything before `to` is done.
    fn advance(&mut self, to: Psn, now_ns: u64) {
        let count = to.since(self.una);
        if count == 0 {
            return;
        }
        if let Some((psn, sent_ns)) = self.probe
            && psn.is_before(to)
        {
            self.pace.measured(now_ns.saturating_sub(sent_ns));
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
        self.pace.progress(count);
        (self.heard_ns, self.timer_ns) = (now_ns, now_ns);
        self.rnr_left = self.rnr_retry;
        if next.is_before(to) {
            self.seek(to);
        }
        if self.mending.is_some_and(|end| !to.is_before(end)) {
            self.mending = None;
        }
    }

    /// The PSN of the next packet to be sent.
    fn cursor(&self) -> Psn {
        self.requests.get(self.at).map_or(self.assigned, |r| r.first.plus(self.sent))
    }

    /// Something from the oldest packet on was lost: once more from there, once for each loss.
    fn lost(&mut self, now_ns: u64) {
        match self.mending {
            Some(_) if self.went_back_to == self.una => return,
            Some(_) => {}
            None => {
                self.pace.loss();
                self.mending = Some(self.high);
            }
        }
        self.go_back(now_ns);
    }

    fn go_back(&mut self, now_ns: u64) {
        self.went_back_to = self.una;
        self.probe = None;
        self.timer_ns = now_ns;
        self.seek(self.una);
    }

    // --- time ----------------------------------------------------------------------------------

    /// When [`Requester::on_time`] has something to do.
    pub fn deadline(&self) -> Option<u64> {
        if self.failed.is_some() {
            return None;
        }
        if let Some(until) = self.rnr_until {
            return Some(until);
        }
        let given_up = self.heard_ns + self.patience_ns;
        (self.una != self.high).then(|| given_up.min(self.timer_ns + self.pace.retransmit_ns()))
    }

    /// Does what is due; true if packets are sent again for want of an answer.
    pub fn on_time(&mut self, now_ns: u64) -> bool {
        if self.deadline().is_none_or(|at| now_ns < at) {
            return false;
        }
        if self.rnr_until.take().is_some() {
            (self.heard_ns, self.timer_ns) = (now_ns, now_ns);
            return false;
        }
        if now_ns >= self.heard_ns + self.patience_ns {
            self.failed = Some(Syndrome::RetryExceeded);
            return false;
        }
        self.pace.timeout();
        self.mending = Some(self.high);
        self.go_back(now_ns);
        true
    }
}

#[cfg(test)]
#[path = "requester_tests.rs"]
mod tests;
