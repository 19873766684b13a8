//! Releases entries from the CPU, in place of the free chain.
//!
//! The CPU posts the free chain's work on a loopback QP pair of its own. It never blocks on that
//! work: a call posts a batch and returns, and the batch's completion triggers the next call.
//! Because of this, neither other clients nor the lock over the memory node wait while many or
//! large chunks are cleared. The NIC has at most two batches, each of at most `CLEAR_BYTES`.

use std::collections::VecDeque;

use scheme::Error;
use scheme::index::EntryId;
use verbs::direct::{DirectNic, Managed};
use verbs::wqe::Umr;
use verbs::{
    Access, Completion, Key, MemoryRegion, Op, QpAttr, Qpn, QueuePair, Receive, Remote, Sge,
    Status, WorkRequest,
};

use super::layout::table_offset;
use super::layout::{AVAIL, Memory, STEER_STRIDE, entry};
use super::push_queue::PushRecord;

/// Building blocks of the reclaimer's send queue: two batches.
const BLOCKS: u32 = 1024;
/// Maximum building blocks of a batch.
const BATCH_BLOCKS: u32 = BLOCKS / 2;
/// Maximum number of batches in flight.
const BATCHES: usize = 2;
/// Maximum bytes that a batch clears.
const CLEAR_BYTES: u64 = 1 << 20;
/// Maximum number of queued releases; above it the caller stops looking for more entries.
pub const WAITING: usize = 1 << 12;

/// Work of the reclaimer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Release an entry that has no owner: unbind, clear, push, return its permit.
    Release(EntryId),
    /// Return a permit.
    Permit,
    /// Add a receive to the push queue.
    Receive,
}

/// Priority of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// A connected client waits for the task.
    Now,
    /// After all urgent tasks.
    InTurn,
}

/// The CPU's loopback QP pair and its queues of tasks.
pub struct Reclaimer<N: DirectNic> {
    worker: N::Qp,
    _loopback: N::Qp,
    /// Indexed by [`Urgency`].
    queues: [Queue; 2],
    /// For each batch in flight, the value of `ended` once the batch has completed.
    batches: VecDeque<u64>,
    /// Number of completed tasks of [`Urgency::InTurn`].
    ended: u64,
    id: u64,
    /// Chunks released so far, including those of batches in flight.
    pub released: u64,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Cleared bytes of the first task's chunk.
    cleared: u64,
    /// Number of tasks added, and number of tasks posted completely.
    added: u64,
    posted: u64,
}

impl<N: DirectNic> Reclaimer<N> {
    /// Creates the QP pair. Pushes go to `push_queue`, completions of batches to `done`.
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

    /// Number of the QP whose completions the caller passes to [`Reclaimer::completed`].
    pub fn qpn(&self) -> Qpn {
        self.worker.qpn()
    }

    /// Queues a task.
    pub fn add(&mut self, task: Task, urgency: Urgency) {
        let queue = &mut self.queues[urgency as usize];
        queue.tasks.push_back(task);
        queue.added += 1;
    }

    /// Queues `task` if there is one.
    pub fn take(&mut self, task: Option<Task>, urgency: Urgency) {
        if let Some(task) = task {
            self.add(task, urgency);
        }
    }

    /// Number of queued tasks of [`Urgency::InTurn`].
    pub fn waiting(&self) -> usize {
        self.queues[Urgency::InTurn as usize].tasks.len()
    }

    /// Number of [`Urgency::InTurn`] tasks added so far: a ticket for [`Reclaimer::is_done`].
    pub fn ticket(&self) -> u64 {
        self.queues[Urgency::InTurn as usize].added
    }

    /// Returns true if all [`Urgency::InTurn`] tasks up to a ticket have completed.
    pub fn is_done(&self, ticket: u64) -> bool {
        self.ended >= ticket
    }

    /// Records the completion of a batch.
    pub fn completed(&mut self, c: &Completion) -> Result<(), Error> {
        if c.status != Status::Success {
            return Err(Error::Protocol {
                attempt: "releasing chunks from the CPU".into(),
                why: format!("the NIC rejected the memory node's own request: {}", c.status),
            });
        }
        if let Some(ended) = self.batches.pop_front() {
            self.ended = ended;
        }
        Ok(())
    }

    /// Posts queued tasks, up to the limit of batches in flight. Returns true if it posted any.
    pub fn post(&mut self, memory: &Memory<N>, push: PushRecord) -> Result<bool, Error> {
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
    /// Moves as many tasks as fit into a batch.
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

/// Steps of a release, without the unbinds.
const RELEASE_STEPS: usize = 5;

/// Tasks that are posted together; only the last request is signalled.
struct Batch {
    steps: Vec<Step>,
    /// Bytes that this batch may still clear.
    clears: u64,
    /// Chunks that are free once the batch completes.
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

    /// Returns true if `steps` more steps fit; each step takes at most two blocks.
    fn has_room(&self, steps: usize) -> bool {
        2 * (self.steps.len() + steps) <= BATCH_BLOCKS as usize
    }

    fn unbind<N: DirectNic>(&mut self, memory: &Memory<N>, i: EntryId) {
        let unbind = |key: Key| Step::Unbind(Umr::unbind(key, false));
        self.steps.extend(memory.window_keys(i).map(unbind));
    }

    fn clear<N: DirectNic>(&mut self, memory: &Memory<N>, i: EntryId, from: u64, len: u64) {
        let addr = memory.chunk_addr(i) + from;
        let to = Remote { addr, rkey: memory.chunks_clear.key() };
        self.steps.push(Step::Clear(to, [memory.zeros.sge(0, len as u32)]));
        self.clears -= len;
    }

    fn give_back<N: DirectNic>(&mut self, memory: &Memory<N>, i: EntryId) {
        let own = memory.table.remote(table_offset(i) + entry::OWN);
        let value = memory.queue_value(i).to_be_bytes();
        let zero = [memory.zeros.sge(0, 8)];
        let steps = [Step::Disown(own, zero), Step::Push(value), Step::Permit, Step::Receive];
        self.steps.extend(steps);
        self.released += 1;
    }

    fn requests<'a, N: DirectNic>(
        &'a self,
        memory: &Memory<N>,
        push: PushRecord,
        id: u64,
    ) -> Vec<WorkRequest<'a>> {
        let last = self.steps.len() - 1;
        let request = |(n, step): (usize, &'a Step)| WorkRequest {
            id,
            op: step.op(memory, push, self.old),
            signaled: n == last,
        };
        self.steps.iter().enumerate().map(request).collect()
    }
}

impl Step {
    fn op<N: DirectNic>(&self, memory: &Memory<N>, push: PushRecord, old: Sge) -> Op<'_> {
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
                add: PushRecord::ADD,
                boundary: push.wrap.boundary(),
                old,
            },
        }
    }
}
