//! What a chain would have done, from the CPU: entries go back to the free queue.
//!
//! The CPU posts, on a loopback pair of its own, what the free chain would have done. It never
//! waits for that: a turn posts a batch and returns, and the batch's completion brings the next turn,
//! so that neither other compute nodes nor the lock over the memory node wait for the clearing of
//! many or large chunks. At most two batches are with the NIC, each of at most [`CLEAR_BYTES`].

use std::collections::VecDeque;

use fabric::direct::{DirectNic, Managed};
use fabric::wqe::Umr;
use fabric::{
    Access, Completion, Key, MemoryRegion, Op, QpAttr, Qpn, QueuePair, Receive, Remote, Sge,
    Status, WorkRequest,
};

use super::layout::{AVAIL, ENTRY_BYTES, Memory, STEER_STRIDE, entry};
use super::push::Push;
use crate::Error;

/// Building blocks of the reclaimer's send queue: two batches.
const BLOCKS: u32 = 1024;
/// Building blocks of a batch at most.
const BATCH_BLOCKS: u32 = BLOCKS / 2;
/// Batches that the NIC has at most.
const BATCHES: usize = 2;
/// Bytes that a batch clears at most.
const CLEAR_BYTES: u64 = 1 << 20;
/// Releases that wait to be posted, before more entries are looked at.
pub const WAITING: usize = 1 << 12;

/// Something to be put back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Release an entry that nobody owns: unbind, clear, push, give its permit.
    Release(u32),
    /// Give a permit back.
    Permit,
    /// Give the push queue a receive.
    Receive,
}

/// How soon a task is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// A living compute node waits for it.
    Now,
    /// Behind everything else.
    InTurn,
}

/// The loopback pair that the CPU posts to, and what it has to do.
pub struct Reclaimer<N: DirectNic> {
    worker: N::Qp,
    _loopback: N::Qp,
    /// By urgency.
    queues: [Queue; 2],
    /// For each batch that the NIC has: how many tasks in turn will have ended with it.
    batches: VecDeque<u64>,
    /// Tasks in turn that have ended.
    ended: u64,
    id: u64,
    /// Chunks released so far, those in the NIC's hands included.
    pub released: u64,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Bytes of the first task's chunk that are cleared.
    cleared: u64,
    /// Tasks that were added, and that were posted to their end.
    added: u64,
    posted: u64,
}

impl<N: DirectNic> Reclaimer<N> {
    /// Makes the pair; pushes go to `push_queue`, batches complete to `done`.
    pub fn new(
        nic: &N,
        (data, metadata): (&N::Pd, &N::Pd),
        push_queue: &N::Srq,
        pushes: &N::Cq,
        done: &N::Cq,
    ) -> Result<Self, Error> {
        let attr = QpAttr {
            send_cq: done,
            recv_cq: done,
            send_blocks: BLOCKS,
            receive: Receive::None,
            access: Access::NONE,
        };
        let managed = Managed { privileged: true, ..Managed::default() };
        let worker = nic.create_managed_qp(data, attr, managed)?;
        let loopback = nic.create_qp(
            metadata,
            QpAttr {
                send_cq: done,
                recv_cq: pushes,
                send_blocks: 0,
                receive: Receive::Shared(push_queue),
                access: Access::REMOTE_ALL,
            },
        )?;
        worker.connect(loopback.qpn())?;
        loopback.connect(worker.qpn())?;
        Ok(Self {
            worker,
            _loopback: loopback,
            queues: Default::default(),
            batches: VecDeque::new(),
            ended: 0,
            id: 0,
            released: 0,
        })
    }

    /// Number of the QP whose completions are for [`Reclaimer::completed`].
    pub fn qpn(&self) -> Qpn {
        self.worker.qpn()
    }

    /// Adds something to do.
    pub fn add(&mut self, task: Task, urgency: Urgency) {
        let queue = &mut self.queues[urgency as usize];
        queue.tasks.push_back(task);
        queue.added += 1;
    }

    /// Adds something to do, if there is something.
    pub fn take(&mut self, task: Option<Task>, urgency: Urgency) {
        if let Some(task) = task {
            self.add(task, urgency);
        }
    }

    /// Tasks in turn that wait.
    pub fn waiting(&self) -> usize {
        self.queues[Urgency::InTurn as usize].tasks.len()
    }

    /// Tasks in turn that were added so far: a ticket for [`Reclaimer::is_done`].
    pub fn ticket(&self) -> u64 {
        self.queues[Urgency::InTurn as usize].added
    }

    /// True if all tasks in turn up to a ticket have ended.
    pub fn is_done(&self, ticket: u64) -> bool {
        self.ended >= ticket
    }

    /// A batch ended.
    pub fn completed(&mut self, c: &Completion) -> Result<(), Error> {
        if c.status != Status::Success {
            return Err(Error::Protocol {
                attempt: "taking chunks back".into(),
                why: format!("the NIC refused what only the memory node posts: {}", c.status),
            });
        }
        if let Some(ended) = self.batches.pop_front() {
            self.ended = ended;
        }
        Ok(())
    }

    /// Posts what there is to do, as far as the NIC may have it at a time. True if it posted.
    pub fn post(&mut self, memory: &Memory<N>, push: Push) -> Result<bool, Error> {
        let mut any = false;
        while self.batches.len() < BATCHES && self.queues.iter().any(|q| !q.tasks.is_empty()) {
            let mut batch = Batch::new(memory);
            self.queues.iter_mut().for_each(|queue| queue.fill(&mut batch, memory));
            self.id += 1;
            self.worker.post_send(&batch.requests(memory, push, self.id))?;
            self.batches.push_back(self.queues[Urgency::InTurn as usize].posted);
            self.released += batch.released;
            any = true;
        }
        Ok(any)
    }
}

impl Queue {
    /// Moves what has room into a batch.
    fn fill<N: DirectNic>(&mut self, batch: &mut Batch, memory: &Memory<N>) {
        let steps = RELEASE_STEPS + memory.shape.group;
        while let Some(&task) = self.tasks.front()
            && batch.has_room(steps)
        {
            match task {
                Task::Permit => batch.steps.push(Step::Permit),
                Task::Receive => batch.steps.push(Step::Receive),
                Task::Release(_) if batch.clears == 0 => return,
                Task::Release(i) => {
                    if self.cleared == 0 {
                        batch.unbind(memory, i);
                    }
                    let len = (memory.shape.chunk_bytes - self.cleared).min(batch.clears);
                    batch.clear(memory, i, self.cleared, len);
                    self.cleared += len;
                    if self.cleared < memory.shape.chunk_bytes {
                        return;
                    }
                    batch.give_back(memory, i);
                    self.cleared = 0;
                }
            }
            self.tasks.pop_front();
            self.posted += 1;
        }
    }
}

/// Steps of a release beside its unbindings.
const RELEASE_STEPS: usize = 5;

/// Work that is posted together; its last request is signalled.
struct Batch {
    steps: Vec<Step>,
    /// Bytes that may still be cleared.
    clears: u64,
    /// Chunks that are free when it ends.
    released: u64,
    old: Sge,
}

enum Step {
    Unbind(Umr),
    Clear(Remote, [Sge; 1]),
    Disown(Remote, [Sge; 1]),
    Push([u8; 8]),
    Permit,
    Receive,
}

impl Batch {
    fn new<N: DirectNic>(memory: &Memory<N>) -> Self {
        Self { steps: Vec::new(), clears: CLEAR_BYTES, released: 0, old: memory.dump.sge(0, 8) }
    }

    /// Whether `steps` more fit; each takes two blocks at most.
    fn has_room(&self, steps: usize) -> bool {
        2 * (self.steps.len() + steps) <= BATCH_BLOCKS as usize
    }

    fn unbind<N: DirectNic>(&mut self, memory: &Memory<N>, i: u32) {
        let unbind = |key: Key| Step::Unbind(Umr::unbind(key, false));
        self.steps.extend(memory.window_keys(i).map(unbind));
    }

    fn clear<N: DirectNic>(&mut self, memory: &Memory<N>, i: u32, from: u64, len: u64) {
        let addr = memory.chunk_addr(i) + from;
        let to = Remote { addr, rkey: memory.chunks_clear.key() };
        self.steps.push(Step::Clear(to, [memory.zeros.sge(0, len as u32)]));
        self.clears -= len;
    }

    fn give_back<N: DirectNic>(&mut self, memory: &Memory<N>, i: u32) {
        let own = memory.table.remote(i as usize * ENTRY_BYTES + entry::OWN);
        let value = memory.queue_value(i).to_be_bytes();
        let zero = [memory.zeros.sge(0, 8)];
        let steps = [Step::Disown(own, zero), Step::Push(value), Step::Permit, Step::Receive];
        self.steps.extend(steps);
        self.released += 1;
    }

    fn requests<'a, N: DirectNic>(
        &'a self,
        memory: &Memory<N>,
        push: Push,
        id: u64,
    ) -> Vec<WorkRequest<'a>> {
        let last = self.steps.len() - 1;
        let of = |(n, step): (usize, &'a Step)| WorkRequest {
            id,
            op: step.op(memory, push, self.old),
            signaled: n == last,
        };
        self.steps.iter().enumerate().map(of).collect()
    }
}

impl Step {
    fn op<N: DirectNic>(&self, memory: &Memory<N>, push: Push, old: Sge) -> Op<'_> {
        match self {
            Step::Unbind(umr) => Op::Window(umr),
            Step::Clear(to, from) | Step::Disown(to, from) => Op::Write { to: *to, from },
            Step::Push(value) => Op::SendInline { data: value },
            Step::Permit => Op::MaskedFetchAdd {
                at: memory.words.remote(AVAIL),
                add: STEER_STRIDE,
                boundary: memory.shape.avail_boundary(),
                old,
            },
            Step::Receive => Op::MaskedFetchAdd {
                at: push.record,
                add: Push::ADD,
                boundary: push.wrap.boundary(),
                old,
            },
        }
    }
}
