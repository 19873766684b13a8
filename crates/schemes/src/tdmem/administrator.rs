//! The commands of the memory node's CPU: INVALIDATE AREA for departed compute nodes, over a QP
//! that is connected to itself.
//!
//! Only the engine changes the tables and the pages. Therefore the CPU frees pages as a compute
//! node does, and needs no lock that the NIC's thread could wait for.

use std::sync::Arc;

use scheme::Error;
use scheme::wakeup::CqEvents;
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr, QpChange,
    QueuePair, Receive, Status, WorkRequest,
};

use super::command::{ANSWER_BYTES, Answer, Command, Operation, Status as Outcome};
use super::layout::{Layout, Owner, Peer};

/// Building blocks of the send queue: one slice in flight.
const BLOCKS: u32 = 16;

/// The QP, and the slice in flight.
pub struct Administrator<N: Nic> {
    qp: N::Qp,
    cq: N::Cq,
    events: Arc<CqEvents<N>>,
    answer: N::Mr,
    region: N::Mr,
    layout: Layout,
    sequence: u64,
    in_flight: Option<Owner>,
}

/// A slice that was executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice {
    /// The owner whose pages were freed.
    pub owner: Owner,
    /// Address of the first page of the next slice; 0 after the last one.
    pub next: u64,
}

impl<N: Nic> Administrator<N> {
    /// Creates the QP for commands to the engine behind `region`.
    pub fn new(nic: &N, pd: &N::Pd, region: &N::Mr, layout: Layout) -> Result<Self, Error> {
        let entries = 2 * BLOCKS + CqEvents::<N>::MARGIN;
        let cq = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let events = Arc::new(CqEvents::new(nic, pd, &cq)?);
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: BLOCKS,
            receive: Receive::None,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
        };
        let qp = nic.create_qp(pd, attr)?;
        qp.modify(QpChange::Tag { tag: Peer::Administrator.tag() })?;
        qp.connect(qp.qpn())?;
        let answer = nic.reg_mr(pd, &nic.alloc_dma(ANSWER_BYTES)?, Access::LOCAL_WRITE)?;
        let region = region.clone();
        Ok(Self { qp, cq, events, answer, region, layout, sequence: 0, in_flight: None })
    }

    /// The source of events that wakes the CPU when a slice was executed.
    pub fn events(&self) -> Arc<CqEvents<N>> {
        self.events.clone()
    }

    /// Returns true if no slice is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_none()
    }

    /// Begins to free pages of an owner from the page at `first` on, or from the first page of all
    /// if `first` is 0. No slice may be in flight.
    pub fn begin(&mut self, owner: Owner, first: u64) -> Result<(), Error> {
        self.sequence += 1;
        let command = Command {
            operation: Operation::InvalidateArea,
            tier: 0,
            target_tier: 0,
            src_mid: owner,
            sequence: self.sequence,
            remote_addr: first,
        };
        let slot = self.layout.first_slot(Peer::Administrator);
        let (command, to) = (command.to_bytes(), self.layout.command(slot));
        let write = Op::WriteInline { to: self.region.remote(to as usize), data: &command };
        let from = self.region.remote(self.layout.answer(slot) as usize);
        let answer = [self.answer.sge(0, ANSWER_BYTES as u32)];
        let read = Op::Read { from, to: &answer };
        self.qp.post_send(&[
            WorkRequest { id: 1, op: write, signaled: false },
            WorkRequest { id: 1, op: read, signaled: true },
        ])?;
        self.in_flight = Some(owner);
        Ok(())
    }

    /// Returns the slice in flight once it was executed.
    ///
    /// # Errors
    /// The engine refused the command, which a correct engine never does.
    pub fn poll(&mut self) -> Result<Option<Slice>, Error> {
        let mut some = [Completion::EMPTY; 16];
        let mut executed = None;
        loop {
            let n = self.cq.poll(&mut some);
            // The others are wake-ups of the CPU.
            if let Some(own) = some[..n].iter().find(|c| c.qpn == self.qp.qpn()) {
                executed = Some(own.status);
            }
            if n < some.len() {
                break;
            }
        }
        let Some((status, owner)) = executed.zip(self.in_flight) else { return Ok(None) };
        self.in_flight = None;
        let refused = |why: String| Error::Protocol {
            attempt: format!("freeing the pages of owner {owner}"),
            why,
        };
        if status != Status::Success {
            return Err(refused(format!("the command failed: {status}; restart the memory node")));
        }
        let mut bytes = [0; ANSWER_BYTES];
        self.answer.memory().read(0, &mut bytes);
        match Answer::parse(&bytes) {
            Some(Answer { sequence, status: Outcome::Done, remote_addr, .. })
                if sequence == self.sequence =>
            {
                Ok(Some(Slice { owner, next: remote_addr }))
            }
            other => Err(refused(format!("the answer is {other:?}; restart the memory node"))),
        }
    }
}
