//! Queues that a process lends to another process: the borrower posts and polls, the owner keeps
//! the control verbs.
//!
//! ```text
//! owner: lend ──> state, eventfd ──> borrower: adopt ──> posts and polls ──> ends
//!   ^                                                                        │
//!   └── take_back: resets the QPs, so that nothing is in flight  <───────────┘
//! ```
//!
//! A CQ is lent together with all QPs that complete to it. All QPs are in Reset when they are lent
//! and when they are taken back, so their indices start at 0 on both sides. Only the CQ's sequence
//! number goes on: its owner asks the NIC for the number.
//!
//! The borrower trusts neither the state nor the contents of the shared memory.

use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};
use verbs::cqe::CQE;
use verbs::direct::DirectNic;
use verbs::wqe::WQEBB;
use verbs::{CompletionQueue, Cqn, DmaMemory, Error, Qpn, QueuePair};

use super::cq::{NUMBER, SoftCq};
use super::qp::SoftQp;
use super::{MAX_ENTRIES, MAX_QUEUE, SoftNic, system};
use crate::port::Function;
use crate::port::shm::{Attached, BorrowedMemory};

/// Maximum bytes of the state of lent queues.
pub const STATE_MAX: usize = 128 << 10;
/// Maximum QPs that are lent with one CQ.
pub const QPS_MAX: usize = 1024;

/// State and descriptor of lent queues, for [`SoftNic::adopt`].
#[derive(Debug)]
pub struct Lent {
    /// Positions and sizes of the queues, at most [`STATE_MAX`] bytes.
    pub state: Vec<u8>,
    /// The NIC's eventfd.
    pub wake: OwnedFd,
}

/// Positions and sizes of the queues. Offsets are in bytes from the start of the arena.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    cqn: u32,
    ring: u64,
    record: u64,
    entries: u32,
    /// Sequence number of the next completion.
    next: u32,
    qps: Vec<QpState>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QpState {
    qpn: u32,
    /// Slot of its doorbell.
    slot: u32,
    ring: u64,
    blocks: u32,
}

/// Number of bytes of memory that the queues of a [`LendableMemory`](crate::port::shm) need: a CQ
/// for `entries` completions, and send queues of `blocks` building blocks each.
pub fn lendable_bytes(cqs: &[u32], send_queues: &[u32]) -> usize {
    let pages = |bytes: usize| bytes.next_multiple_of(rustix::param::page_size());
    let cq = |entries: &u32| pages(SoftCq::bytes(2 * entries.next_power_of_two()));
    let queue = |blocks: &u32| pages(blocks.next_power_of_two() as usize * WQEBB);
    cqs.iter().map(cq).sum::<usize>() + send_queues.iter().map(queue).sum::<usize>()
}

impl SoftNic {
    /// Lends `cq` and `qps`, which must be all QPs that complete to it, to the process that has
    /// mapped the memory of this function.
    ///
    /// Resets the QPs: work in flight ends as flushed. The caller connects them again before the
    /// borrower posts. Until [`SoftNic::take_back`], this process can neither post to the QPs nor
    /// poll the CQ.
    ///
    /// # Errors
    /// The function was not attached with memory that a borrower has mapped, or the queues are not
    /// in that memory. Then nothing is lent.
    pub fn lend(&self, cq: &SoftCq, qps: &[SoftQp]) -> Result<Lent, Error> {
        let attached = self.attached()?;
        let (ring, record) = cq.memory();
        let state = State {
            cqn: cq.cqn().raw(),
            ring: offset(attached, ring, "the CQ's ring")?,
            record: offset(attached, record, "the CQ's record")?,
            entries: cq.ring_entries(),
            next: 0,
            qps: qps.iter().map(|qp| describe(attached, qp)).collect::<Result<_, _>>()?,
        };
        cq.check_members(qps.iter().map(QueuePair::qpn))?;
        let wake = attached.wake().map_err(system("lending queues"))?;
        for (at, qp) in qps.iter().enumerate() {
            if let Err(error) = qp.lend() {
                qps[..=at].iter().for_each(SoftQp::end_loan);
                return Err(error);
            }
        }
        let state = State { next: cq.lend(), ..state };
        let state = serde_json::to_vec(&state).expect("a state is plain data");
        Ok(Lent { state, wake })
    }

    /// Takes lent queues back: resets the QPs, so that no transfer of the borrower is in flight
    /// when this returns. Work of the borrower that has not completed may have been executed, in
    /// part, or not at all. The caller connects the QPs again.
    ///
    /// Only after the borrower has ended or has dropped the queues: the NIC would execute what the
    /// borrower posts later, and two processes would poll one CQ.
    pub fn take_back(&self, cq: &SoftCq, qps: &[SoftQp]) -> Result<(), Error> {
        for qp in qps {
            qp.modify(verbs::QpChange::Reset)?;
        }
        let count = self.cq_count(cq)?;
        cq.end_loan(count);
        qps.iter().for_each(SoftQp::end_loan);
        Ok(())
    }

    /// Adopts queues that another process has lent: `memory` is the memory that this process has
    /// mapped, `wake` and `state` are those of [`Lent`]. The QPs take sends, the CQ is polled; no
    /// object has a control verb.
    ///
    /// # Errors
    /// The state is malformed, or names memory outside of `memory`.
    pub fn adopt(
        memory: &BorrowedMemory,
        wake: OwnedFd,
        state: &[u8],
    ) -> Result<(SoftCq, Vec<SoftQp>), Error> {
        check_wake(&wake)?;
        let state = State::decode(state, memory.arena().len())?;
        let part = |offset: u64, bytes: usize, align: u64, what: &str| {
            let range = usize::try_from(offset).ok().filter(|_| offset.is_multiple_of(align));
            let part = range.and_then(|offset| memory.arena().slice(offset, bytes));
            part.ok_or_else(|| malformed(format!("{what} of {bytes} bytes at {offset}")))
        };
        let bytes = state.entries as usize * CQE;
        let ring = part(state.ring, bytes, CQE as u64, "the CQ's ring")?;
        let record = part(state.record, 8, 8, "the CQ's record")?;
        let function = Function::Borrowed(memory.function(wake));
        let cq = SoftCq::borrowed(
            &function,
            Cqn::new(state.cqn),
            (ring, record),
            (state.entries, state.next),
        );
        let mut qps = Vec::with_capacity(state.qps.len());
        for qp in &state.qps {
            let ring =
                part(qp.ring, qp.blocks as usize * WQEBB, WQEBB as u64, "a send queue's ring")?;
            let (qpn, slot) = (Qpn::new(qp.qpn), qp.slot);
            qps.push(SoftQp::borrowed(&function, &cq, qpn, (ring, qp.blocks), slot)?);
        }
        Ok((cq, qps))
    }

    fn attached(&self) -> Result<&Attached, Error> {
        match self.function() {
            Function::Attached(attached) => Ok(attached),
            _ => Err(Error::Unsupported {
                attempt: "lending queues to another process".to_string(),
                why: "the process does not attach to the NIC of another process; use the NIC of \
                      `granary serve` or `granary nic`"
                    .to_string(),
            }),
        }
    }
}

impl State {
    /// Decodes a state for an arena of `arena` bytes, and checks all sizes. The tables of the
    /// queues then need less memory than the arena has.
    fn decode(bytes: &[u8], arena: usize) -> Result<Self, Error> {
        if bytes.len() > STATE_MAX {
            return Err(malformed(format!("{} bytes", bytes.len())));
        }
        let state: State = serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
        let entries = state.entries;
        if !entries.is_power_of_two() || entries > 2 * MAX_ENTRIES || state.next > NUMBER {
            return Err(malformed(format!("a CQ of {entries} entries at {}", state.next)));
        }
        if state.qps.len() > QPS_MAX {
            return Err(malformed(format!("{} QPs", state.qps.len())));
        }
        let mut blocks = 0;
        for (at, qp) in state.qps.iter().enumerate() {
            if !qp.blocks.is_power_of_two() || qp.blocks > MAX_QUEUE {
                return Err(malformed(format!("a send queue of {} blocks", qp.blocks)));
            }
            if state.qps[..at].iter().any(|other| other.qpn == qp.qpn || other.slot == qp.slot) {
                return Err(malformed(format!("QP {} or doorbell {} twice", qp.qpn, qp.slot)));
            }
            blocks += qp.blocks as usize;
        }
        match entries as usize * CQE + blocks * WQEBB <= arena {
            true => Ok(state),
            false => Err(malformed(format!("queues that exceed {arena} bytes of memory"))),
        }
    }
}

fn describe(attached: &Attached, qp: &SoftQp) -> Result<QpState, Error> {
    let (ring, blocks, slot) = qp.lendable()?;
    let ring = offset(attached, ring, "a send queue's ring")?;
    Ok(QpState { qpn: qp.qpn().raw(), slot, ring, blocks })
}

fn offset(attached: &Attached, memory: &DmaMemory, what: &str) -> Result<u64, Error> {
    attached.lendable_offset(memory).map(|offset| offset as u64).ok_or_else(|| Error::Refused {
        verb: "lend",
        why: format!("{what} is not in memory that a borrower has mapped"),
    })
}

/// Returns an error unless a write to the descriptor wakes a NIC and cannot block.
fn check_wake(wake: &OwnedFd) -> Result<(), Error> {
    let flags = rustix::fs::fcntl_getfl(wake.as_fd()).map_err(|e| Error::System {
        attempt: "examining the NIC's eventfd".to_string(),
        source: e.into(),
    })?;
    if !flags.contains(rustix::fs::OFlags::NONBLOCK) {
        return Err(malformed("a blocking descriptor instead of the NIC's eventfd".to_string()));
    }
    Ok(())
}

fn malformed(what: String) -> Error {
    Error::Refused { verb: "adopt", why: format!("the state of the lent queues names {what}") }
}
