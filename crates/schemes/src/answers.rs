//! The memory node's end of a compute node's management QP: received requests, replies to them, and
//! the bulletin. The schemes in which the CPU answers requests use it.

use std::collections::BTreeSet;

use scheme::client_table::{PeerQp, refuse};
use scheme::index::{IndexRange, Slot};
use scheme::wakeup::poll_until;
use scheme::{ConnectRequest, Error, bulletin};
use verbs::wqe::Umr;
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Error as VerbsError, Key, MemoryRegion, Nic, Op,
    QpAttr, QpChange, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Remote, Sge, Status,
    WorkRequest,
};

/// Send blocks of a management QP per request in flight: the reply, a bulletin "empty" before it,
/// and a bulletin "available" after it.
const ANSWER_BLOCKS: u32 = 4;
/// Work-request ID of a reply without a grant.
const NO_GRANT: u64 = u64::MAX;
/// Work-request ID of a bulletin.
const BULLETIN: u64 = NO_GRANT - 1;
/// Work-request ID of a heartbeat.
const HEARTBEAT: u64 = NO_GRANT - 2;
/// Maximum number of bulletin writes in flight.
const BULLETINS: u32 = 2;

/// Sizes and rights of a management QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnswersAttr {
    /// Requests in flight.
    pub credits: u32,
    /// Length of a request.
    pub request_bytes: usize,
    /// Rights of the compute node over the QP, with keys that allow them.
    pub access: Access,
}

/// Result of [`Answers::heartbeat`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heartbeat {
    /// A heartbeat was posted.
    Posted,
    /// None was posted: the compute node has sent no request since the QP was connected, or the
    /// send queue is full.
    NotPosted,
    /// The last one was not answered.
    Unanswered,
}

/// The management QP of a compute node, with its receives and replies.
pub struct Answers<N: Nic> {
    attr: AnswersAttr,
    /// The QP for its requests, and for replies and bulletins to it.
    pub management: PeerQp<N>,
    /// Number of resets of the management QP. Completions of an earlier epoch are stale.
    epoch: u32,
    /// CQ for the completions of replies and bulletins.
    replies: N::Cq,
    /// Receive buffers, one per request in flight.
    inbox: N::Mr,
    /// Address of its bulletin; key 0: none.
    bulletin: Remote,
    /// Number of changes of the bulletin.
    generation: u32,
    /// Bulletin writes in flight.
    bulletins: u32,
    /// True if its bulletin says "empty".
    announced_empty: bool,
    /// True if its management QP has failed.
    broken: bool,
    /// True if a request was received since the last connect.
    has_asked: bool,
    /// True if a heartbeat was not answered so far.
    heartbeat: bool,
    /// Grants in replies whose delivery is not confirmed yet.
    unconfirmed: BTreeSet<u64>,
    /// Grants in replies that were not delivered; to be taken back.
    lost: Vec<u64>,
}

impl<N: Nic> Answers<N> {
    /// Creates and connects the QP to the first management QP in `request`. Its requests complete
    /// to `requests`.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        request: &ConnectRequest,
        requests: &N::Cq,
        attr: AnswersAttr,
    ) -> Result<Self, Error> {
        let AnswersAttr { credits, request_bytes, access } = attr;
        let blocks = (credits * ANSWER_BLOCKS).next_power_of_two();
        let replies = nic.create_cq(CqAttr { entries: blocks, ignore_overrun: false })?;
        let management = nic.create_qp(
            pd,
            QpAttr {
                send_cq: &replies,
                recv_cq: requests,
                send_blocks: blocks,
                receive: Receive::Own(ReceiveAttr { entries: credits, max_sges: 1 }),
                access,
            },
        )?;
        let inbox = nic.alloc_dma(credits as usize * request_bytes)?;
        let mut answers = Self {
            attr,
            management: PeerQp { qp: management, peer: request.peer(request.management[0]) },
            epoch: 0,
            replies,
            inbox: nic.reg_mr(pd, &inbox, Access::LOCAL_ALL)?,
            bulletin: Remote { addr: request.bulletin_addr, rkey: Key(request.bulletin_rkey) },
            generation: 0,
            bulletins: 0,
            announced_empty: false,
            broken: false,
            has_asked: false,
            heartbeat: false,
            unconfirmed: BTreeSet::new(),
            lost: Vec::new(),
        };
        answers.connect()?;
        Ok(answers)
    }

    /// Connects the management QP, for the first time or again, and posts its receives.
    fn connect(&mut self) -> Result<(), Error> {
        // Replies that are unconfirmed by now were not delivered.
        self.poll_replies();
        self.lost.extend(std::mem::take(&mut self.unconfirmed));
        self.management.connect()?;
        while self.replies.poll(&mut [Completion::EMPTY; 16]) > 0 {}
        self.bulletins = 0;
        self.broken = false;
        (self.has_asked, self.heartbeat) = (false, false);
        self.announced_empty = false;
        for slot in (Slot::new(0)..Slot::new(self.attr.credits)).iter() {
            self.post_receive(slot)?;
        }
        Ok(())
    }

    /// Binds a window to the QP, before the first reply. A window stays bound when the QP is
    /// re-established.
    pub fn bind(&self, umr: &Umr) -> Result<(), Error> {
        let op = Op::Window(umr);
        self.management.qp.post_send(&[WorkRequest { id: NO_GRANT, op, signaled: true }])?;
        let mut status = Status::Flushed;
        poll_until(&self.replies, 1, |c| {
            status = c.status;
            true
        })?;
        match status {
            Status::Success => Ok(()),
            status => Err(refuse(format!("binding a window to its management QP: {status}"))),
        }
    }

    /// Re-establishes the QP. Returns its number.
    pub fn reconnect(&mut self) -> Result<u32, Error> {
        self.management.qp.modify(QpChange::Error)?;
        self.epoch += 1;
        self.connect()?;
        Ok(self.management.qp.qpn().raw())
    }

    /// Closes the QP of a compute node that has departed.
    pub fn close(&mut self) -> Result<(), Error> {
        (self.broken, self.announced_empty) = (true, false);
        Ok(self.management.qp.modify(QpChange::Reset)?)
    }

    /// Counts the replies of a closed QP that are unconfirmed as not delivered.
    pub fn drop_unconfirmed(&mut self) {
        self.poll_replies();
        self.lost.extend(std::mem::take(&mut self.unconfirmed));
    }

    /// Number of resets of the QP.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// True if the QP executes and answers requests.
    pub fn is_open(&self) -> Result<bool, Error> {
        Ok(!self.broken && self.management.is_ready()?)
    }

    /// Handles the completion of a receive: reads the request into `bytes` and returns its slot.
    /// `None` if there is none, because the QP failed or was reset.
    pub fn receive(&mut self, c: &Completion, bytes: &mut [u8]) -> Option<Slot> {
        if (c.id >> 32) as u32 != self.epoch {
            return None;
        }
        if c.status != Status::Success {
            self.broken = true;
            return None;
        }
        self.has_asked = true;
        let slot = Slot::new(c.id as u32);
        self.inbox.memory().read(slot.offset(self.attr.request_bytes), bytes);
        Some(slot)
    }

    /// Copies bytes of the request in a slot, from `at` on. They must lie within its length.
    pub fn read_request(&self, slot: Slot, at: usize, bytes: &mut [u8]) {
        self.inbox.memory().read(slot.offset(self.attr.request_bytes) + at, bytes);
    }

    fn post_receive(&self, slot: Slot) -> Result<(), Error> {
        let bytes = self.attr.request_bytes;
        let to = self.inbox.sge(slot.offset(bytes), bytes as u32);
        let id = (self.epoch as u64) << 32 | u64::from(slot.raw());
        Ok(self.management.qp.post_recv(&ReceiveRequest { id, to: &[to] })?)
    }

    /// Sends a reply and reposts the receive of that slot. `grant`: the name of the grant in the
    /// reply, which [`Answers::take_lost`] returns if the reply is not delivered. An error affects
    /// only this compute node: it puts the management QP into the error state.
    pub fn answer(&mut self, slot: Slot, reply: &[u8], grant: Option<u64>) {
        self.answer_with(slot, Op::SendInline { data: reply }, grant);
    }

    /// Like [`Answers::answer`], with a reply in memory that is registered in the QP's PD. The
    /// memory must not change before the compute node uses the slot again.
    pub fn answer_from(&mut self, slot: Slot, reply: Sge) {
        self.answer_with(slot, Op::Send { from: &[reply] }, None);
    }

    fn answer_with(&mut self, slot: Slot, reply: Op<'_>, grant: Option<u64>) {
        self.unconfirmed.extend(grant);
        if self.broken {
            return;
        }
        self.post(grant.unwrap_or(NO_GRANT), reply);
        if self.post_receive(slot).is_err() {
            self.disconnect();
        }
    }

    /// True if grants were not delivered.
    pub fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Takes a grant that was not delivered.
    pub fn take_lost(&mut self) -> Option<u64> {
        self.lost.pop()
    }

    /// Writes "empty" to the bulletin, unless the bulletin has that state already.
    pub fn announce_empty(&mut self) {
        if !self.announced_empty && !self.broken {
            self.announced_empty = true;
            self.post_bulletin(bulletin::EMPTY);
        }
    }

    /// Writes "available" to the bulletin if it says "empty".
    pub fn announce_available(&mut self) {
        if std::mem::take(&mut self.announced_empty) {
            self.post_bulletin(bulletin::AVAILABLE);
        }
    }

    /// Writes the bulletin, if the compute node has one. Skips the write while earlier ones are in
    /// flight, so that the send queue has room for replies. No wake-up is lost, because the compute
    /// node asks the memory node before it waits.
    fn post_bulletin(&mut self, state: u32) {
        self.poll_replies();
        if self.bulletin.rkey == Key::default() || self.bulletins == BULLETINS {
            return;
        }
        self.bulletins += 1;
        self.generation = self.generation.wrapping_add(1);
        let mut data = [0; bulletin::BYTES];
        data[..4].copy_from_slice(&state.to_be_bytes());
        data[4..].copy_from_slice(&self.generation.to_be_bytes());
        self.post(BULLETIN, Op::WriteInline { to: self.bulletin, data: &data });
    }

    /// Looks whether the compute node's NIC has answered the last heartbeat, and posts the next
    /// one: a WRITE of no bytes, for which the NIC checks no key. A QP that has failed has one more
    /// period, in which the compute node may re-establish the QP.
    pub fn heartbeat(&mut self) -> Heartbeat {
        self.poll_replies();
        if std::mem::replace(&mut self.heartbeat, self.has_asked) {
            return Heartbeat::Unanswered;
        }
        if self.broken || !self.has_asked {
            return Heartbeat::NotPosted;
        }
        let op = Op::WriteInline { to: Remote::default(), data: &[] };
        match self.management.qp.post_send(&[WorkRequest { id: HEARTBEAT, op, signaled: true }]) {
            Ok(()) => Heartbeat::Posted,
            Err(VerbsError::QueueFull { .. }) => {
                self.heartbeat = false;
                Heartbeat::NotPosted
            }
            Err(_) => {
                self.broken = true;
                Heartbeat::NotPosted
            }
        }
    }

    /// Processes the completions of replies and bulletins.
    fn poll_replies(&mut self) {
        let mut done = [Completion::EMPTY; 16];
        loop {
            let n = self.replies.poll(&mut done);
            for c in &done[..n] {
                self.bulletins -= (c.id == BULLETIN && self.bulletins > 0) as u32;
                self.heartbeat &= c.id != HEARTBEAT || c.status != Status::Success;
                match c.status {
                    Status::Success => drop(self.unconfirmed.remove(&c.id)),
                    _ => self.broken = true,
                }
            }
            if n < done.len() {
                break;
            }
        }
    }

    fn post(&mut self, id: u64, op: Op<'_>) {
        self.poll_replies();
        match self.management.qp.post_send(&[WorkRequest { id, op, signaled: true }]) {
            Ok(()) => {}
            // The compute node has not posted receives for its replies.
            Err(VerbsError::QueueFull { .. }) => self.disconnect(),
            Err(_) => self.broken = true,
        }
    }

    fn disconnect(&mut self) {
        self.broken = true;
        // If this fails, the NIC has exited, and no QP works any more.
        let _ = self.management.qp.modify(QpChange::Error);
    }
}

#[cfg(test)]
mod tests {
    use rnic::nic::SoftNic;
    use verbs::Qpn;

    use super::*;

    /// The memory node's end, the CQ of its requests, and the compute node's QP.
    struct Bed {
        answers: Answers<SoftNic>,
        requests: <SoftNic as Nic>::Cq,
        peer: <SoftNic as Nic>::Qp,
    }

    impl Bed {
        fn new() -> Self {
            let nic = SoftNic::inline();
            let pd = nic.alloc_pd().unwrap();
            let cq = || nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
            let (own, requests) = (cq(), cq());
            let attr = QpAttr {
                send_cq: &own,
                recv_cq: &own,
                send_blocks: 16,
                receive: Receive::Own(ReceiveAttr { entries: 4, max_sges: 1 }),
                access: Access::REMOTE_WRITE,
            };
            let peer = nic.create_qp(&pd, attr).unwrap();
            let request =
                ConnectRequest { management: vec![peer.qpn().raw()], ..ConnectRequest::default() };
            let attr = AnswersAttr { credits: 4, request_bytes: 8, access: Access::NONE };
            let answers = Answers::new(&nic, &pd, &request, &requests, attr).unwrap();
            let bed = Self { answers, requests, peer };
            bed.connect();
            bed
        }

        fn connect(&self) {
            let qpn: Qpn = self.answers.management.qp.qpn();
            self.peer.connect(qpn).unwrap();
        }

        fn ask(&mut self) {
            let op = Op::SendInline { data: &[1; 8] };
            self.peer.post_send(&[WorkRequest { id: 1, op, signaled: true }]).unwrap();
            let mut all = [Completion::EMPTY; 16];
            let n = self.requests.poll(&mut all);
            // Those of an earlier connection were flushed.
            let received = |c| self.answers.receive(c, &mut [0; 8]);
            let slots: Vec<Slot> = all[..n].iter().filter_map(received).collect();
            assert_eq!(slots.len(), 1);
            self.answers.post_receive(slots[0]).unwrap();
        }
    }

    #[test]
    fn heartbeats_tell_dead_qps_from_live_ones() {
        let mut bed = Bed::new();
        assert_eq!(bed.answers.heartbeat(), Heartbeat::NotPosted, "it may not be connected yet");
        bed.ask();
        for _ in 0..100 {
            assert_eq!(bed.answers.heartbeat(), Heartbeat::Posted);
        }
        // A QP that is re-established between two heartbeats is alive.
        bed.peer.modify(QpChange::Reset).unwrap();
        assert_eq!(bed.answers.heartbeat(), Heartbeat::Posted);
        bed.answers.reconnect().unwrap();
        bed.connect();
        assert_eq!(bed.answers.heartbeat(), Heartbeat::NotPosted);
        bed.ask();
        assert_eq!(bed.answers.heartbeat(), Heartbeat::Posted);
        // One that failed before a heartbeat was posted has one more period, too.
        bed.peer.modify(QpChange::Error).unwrap();
        bed.answers.management.qp.modify(QpChange::Error).unwrap();
        assert_ne!(bed.answers.heartbeat(), Heartbeat::Unanswered);
        for _ in 0..2 {
            assert_eq!(bed.answers.heartbeat(), Heartbeat::Unanswered);
        }
    }
}
