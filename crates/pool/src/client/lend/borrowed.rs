//! The borrower's side of lent lanes.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::slice::from_ref;

use smallvec::SmallVec;
use verbs::{Completion, CompletionQueue, Key, Op, QueuePair, Remote, Sge, Status, WorkRequest};

use super::event::CompletionEvent;
use super::{Direction, LaneTransfer, LentLanes, Local};
use crate::nic::{LendingNic, LentQueues};
use crate::{DefaultNic, Error};

/// Longest list of requests that is posted without an allocation.
const STACK_REQUESTS: usize = 16;
/// Completions that are taken with one poll of the CQ.
const BATCH: usize = 16;

/// Lanes of another process's pool. Dropping it ends the borrower's use of the lanes.
///
/// One thread posts and polls. The memory of the queues belongs to the owner too, and the owner is
/// not trusted: whatever it writes there, posts and polls neither panic nor access other memory.
/// They may then report wrong results, for this owner's transfers only.
pub struct BorrowedLanes<N: LendingNic = DefaultNic> {
    cq: N::Cq,
    qps: Vec<LentQp<N>>,
    local: Local,
    /// Requests by slot; free slots have nothing left.
    requests: Vec<Request>,
    free: Vec<u32>,
    finished: VecDeque<Finished>,
    event: CompletionEvent<N::Cq>,
}

struct LentQp<N: LendingNic> {
    qp: N::Qp,
    blocks: u32,
    /// Requests posted that have not completed; each takes one building block.
    in_flight: u32,
}

/// A list of transfers in flight.
#[derive(Clone, Copy)]
struct Request {
    token: u64,
    /// QPs on which the last transfer has not completed; 0 if the slot is free.
    left: u32,
    status: Status,
}

/// A list of transfers that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finished {
    /// The token of [`BorrowedLanes::post`].
    pub token: u64,
    /// [`Status::Success`], or why one of the transfers failed. After a failure the QP executes
    /// nothing more: the owner has to take the lanes back.
    pub status: Status,
}

/// Id of a work request: the slot of its list, its number of transfers on this QP, and its QP.
/// Only the last transfer on a QP has an id with a number.
#[derive(Clone, Copy)]
struct Id {
    slot: u32,
    count: u16,
    qp: u16,
}

impl Id {
    fn encode(self) -> u64 {
        u64::from(self.slot) << 32 | u64::from(self.count) << 16 | u64::from(self.qp)
    }

    fn decode(id: u64) -> Self {
        Self { slot: (id >> 32) as u32, count: (id >> 16) as u16, qp: id as u16 }
    }
}

impl<N: LendingNic> BorrowedLanes<N> {
    /// Adopts the lanes of `lent`, whose queues are in `memory`.
    ///
    /// # Errors
    /// The state is malformed, or names memory outside of `memory`.
    pub fn adopt(memory: &N::Borrowed, lent: LentLanes) -> Result<Self, Error> {
        let malformed =
            |why: &str| Error::Protocol { attempt: "adopting lent lanes".into(), why: why.into() };
        let LentLanes { state, wake } = lent;
        let (local, queues) =
            state.split_first_chunk().ok_or_else(|| malformed("the state is too short"))?;
        let local =
            Local::decode(local).ok_or_else(|| malformed("the buffer exceeds all addresses"))?;
        let (cq, qps) = N::adopt(memory, LentQueues { state: queues.to_vec(), wake })?;
        if qps.len() > usize::from(u16::MAX) {
            return Err(malformed("too many QPs"));
        }
        let qps = qps.into_iter().map(|qp| {
            let blocks = N::send_blocks(&qp);
            LentQp { qp, blocks, in_flight: 0 }
        });
        Ok(Self {
            event: CompletionEvent::new(cq.clone())?,
            cq,
            qps: qps.collect(),
            local,
            requests: Vec::new(),
            free: Vec::new(),
            finished: VecDeque::new(),
        })
    }

    /// Posts `transfers`, with one doorbell for each QP. Returns false, without posting anything,
    /// if a QP has not enough room: poll first. A list longer than a send queue has no room ever.
    ///
    /// # Errors
    /// A transfer names a QP that is not lent, or bytes outside of the buffer; or the list is
    /// empty.
    pub fn post(
        &mut self,
        token: u64,
        direction: Direction,
        transfers: &[LaneTransfer],
    ) -> Result<bool, Error> {
        let mut works: SmallVec<[(u16, Remote, Sge); STACK_REQUESTS]> = SmallVec::new();
        for t in transfers {
            let sge = self.local.part(t.offset, t.bytes);
            let (Some(sge), true) = (sge, usize::from(t.qp) < self.qps.len()) else {
                return Err(refused(t, &self.local, self.qps.len()));
            };
            works.push((t.qp, Remote { addr: t.address, rkey: Key(t.rkey) }, sge));
        }
        works.sort_by_key(|(qp, ..)| *qp);
        let runs = || works.chunk_by(|(a, ..), (b, ..)| a == b);
        let has_room = |run: &[(u16, Remote, Sge)]| {
            let qp = &self.qps[run[0].0 as usize];
            run.len() <= (qp.blocks - qp.in_flight.min(qp.blocks)) as usize
        };
        if works.is_empty() {
            return Err(Error::Setting {
                setting: "transfers",
                value: "none".into(),
                why: "a list has at least one transfer".into(),
            });
        }
        if !runs().all(has_room) {
            return Ok(false);
        }
        let slot = self.claim(Request { token, left: 0, status: Status::Success });
        for run in runs() {
            // There is room, so only an owner that interferes makes this fail.
            if self.post_run(slot, direction, run).is_err() {
                self.requests[slot as usize].status = Status::LocalOperation;
            }
        }
        if self.requests[slot as usize].left == 0 {
            self.finish(slot);
        }
        Ok(true)
    }

    fn post_run(
        &mut self,
        slot: u32,
        direction: Direction,
        run: &[(u16, Remote, Sge)],
    ) -> Result<(), Error> {
        let (qp, count) = (run[0].0, run.len());
        let request = |(i, (_, remote, sge)): (usize, &'_ (u16, Remote, Sge))| {
            let is_last = i + 1 == count;
            let id = Id { slot, count: if is_last { count as u16 } else { 0 }, qp };
            (id.encode(), *remote, *sge, is_last)
        };
        let numbers: SmallVec<[_; STACK_REQUESTS]> = run.iter().enumerate().map(request).collect();
        let list: SmallVec<[WorkRequest<'_>; STACK_REQUESTS]> = numbers
            .iter()
            .map(|(id, remote, sge, is_last)| WorkRequest {
                id: *id,
                op: match direction {
                    Direction::Read => Op::Read { from: *remote, to: from_ref(sge) },
                    Direction::Write => Op::Write { to: *remote, from: from_ref(sge) },
                },
                signaled: *is_last,
            })
            .collect();
        let lent = &mut self.qps[qp as usize];
        lent.qp.post_send(&list)?;
        lent.in_flight += count as u32;
        self.requests[slot as usize].left += 1;
        Ok(())
    }

    fn claim(&mut self, request: Request) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.requests[slot as usize] = request;
            return slot;
        }
        self.requests.push(request);
        self.requests.len() as u32 - 1
    }

    /// Returns the next list of transfers that has ended, without waiting.
    pub fn poll(&mut self) -> Option<Finished> {
        if self.finished.is_empty() {
            let mut batch = [Completion::EMPTY; BATCH];
            let count = self.cq.poll(&mut batch);
            batch[..count].iter().for_each(|completion| self.complete(completion));
        }
        self.finished.pop_front()
    }

    /// Handles a completion: of the last transfer of a list on a QP, or of one that has failed.
    fn complete(&mut self, completion: &Completion) {
        let id = Id::decode(completion.id);
        let Some(request) = self.requests.get_mut(id.slot as usize).filter(|r| r.left > 0) else {
            return;
        };
        if request.status == Status::Success {
            request.status = completion.status;
        }
        if id.count == 0 {
            return;
        }
        if let Some(lent) = self.qps.get_mut(id.qp as usize) {
            lent.in_flight = lent.in_flight.saturating_sub(u32::from(id.count));
        }
        request.left -= 1;
        if request.left == 0 {
            self.finish(id.slot);
        }
    }

    fn finish(&mut self, slot: u32) {
        let Request { token, status, .. } = self.requests[slot as usize];
        self.finished.push_back(Finished { token, status });
        self.free.push(slot);
    }

    /// Number of lists in flight.
    pub fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// A descriptor that becomes readable, after [`BorrowedLanes::arm`], when there is something to
    /// poll. For poll(2) together with other descriptors.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.descriptor()
    }

    /// Makes [`BorrowedLanes::event`] readable at the next completion, even if that has arrived
    /// already. Poll until there is nothing, arm, then sleep. The first call starts a thread, which
    /// sleeps on the CQ on behalf of the caller.
    ///
    /// # Errors
    /// The system has no thread, or the NIC is gone: then nothing in flight will end.
    pub fn arm(&mut self) -> Result<(), Error> {
        self.event.arm()
    }
}

fn refused(t: &LaneTransfer, local: &Local, qps: usize) -> Error {
    Error::Setting {
        setting: "transfer",
        value: format!("{} bytes at {} of the buffer, by QP {}", t.bytes, t.offset, t.qp),
        why: format!("the buffer has {} bytes, and {qps} QPs are lent", local.bytes),
    }
}
