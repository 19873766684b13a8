//! Opening and closing of permissions in a turn: handovers, one list for each QP, completions,
//! failures.

use scheme::wakeup::poll_until;
use scheme::{ClientId, Error};
use verbs::{Nic, Op, QueuePair, Status, WorkRequest};

use super::{BINDS, Shared, State};
use crate::patronus::book::{Effect, PermissionId};
use crate::patronus::connection::Connection;
use crate::patronus::door::{Change, Opening, Post, PostTo};

/// A permission to open or to close.
pub(super) struct DoorTask {
    pub id: PermissionId,
    /// `None`: to close.
    pub opening: Option<Opening>,
    /// The keys of the permission to close stay valid for now.
    pub is_delayed: bool,
    /// An operation of the task has failed.
    pub failed: bool,
}

impl DoorTask {
    pub fn open(client: ClientId, opening: Opening) -> Self {
        let id = PermissionId { client, number: opening.number };
        Self { id, opening: Some(opening), is_delayed: false, failed: false }
    }

    pub fn close(id: PermissionId) -> Self {
        Self { id, opening: None, is_delayed: false, failed: false }
    }

    pub fn abandon(id: PermissionId) -> Self {
        Self { is_delayed: true, ..Self::close(id) }
    }
}

/// A window operation of one or two tasks of a compute node, which are named by their indices.
struct Operation {
    client: ClientId,
    post: Post,
    closes: Option<usize>,
    opens: Option<usize>,
    done: bool,
}

impl Operation {
    fn qp(&self) -> (ClientId, PostTo) {
        (self.client, self.post.to)
    }
}

impl<N: Nic> State<N> {
    /// Executes the tasks and reports the results to the book.
    pub(super) fn run_doors(
        &mut self,
        shared: &Shared<N>,
        tasks: &mut Vec<DoorTask>,
        next: &mut Vec<Effect>,
    ) -> Result<(), Error> {
        if tasks.is_empty() {
            return Ok(());
        }
        self.has_used_windows = true;
        if self.published.is_some() {
            self.run_published(shared, tasks)?;
        } else {
            self.run_own_doors(shared, tasks)?;
        }
        let now = shared.nic.now();
        shared.with_book(|book| {
            for task in tasks.drain(..) {
                match task.opening {
                    None => book.closed(now, task.id, &mut &shared.tables, next),
                    Some(_) => {
                        book.opened(now, task.id, !task.failed, &mut &shared.tables, next);
                    }
                }
            }
        });
        Ok(())
    }

    /// Executes the tasks with the doors of the compute nodes.
    fn run_own_doors(&mut self, shared: &Shared<N>, tasks: &mut [DoorTask]) -> Result<(), Error> {
        // Tasks of one compute node are adjacent, those that close first.
        tasks.sort_by_key(|task| (task.id.client, task.opening.is_some()));
        for some in tasks.chunks_mut(BINDS) {
            let mut operations = Vec::with_capacity(some.len());
            let mut first = 0;
            for run in some.chunk_by_mut(|a, b| a.id.client == b.id.client) {
                self.prepare(shared, run, first, &mut operations);
                first += run.len();
            }
            self.post(&mut operations)?;
            self.retry_failed(shared, some, &mut operations)?;
            self.settle(some, &operations);
        }
        Ok(())
    }

    /// The operations for the tasks of one compute node, of which the first one has index `first`.
    /// A permission that closes and one that opens become one rebind (MW handover, Patronus §5.4);
    /// nothing waits to find a pair.
    fn prepare(
        &mut self,
        shared: &Shared<N>,
        run: &mut [DoorTask],
        first: usize,
        operations: &mut Vec<Operation>,
    ) {
        let client = run[0].id.client;
        let closing = run.iter().take_while(|task| task.opening.is_none()).count();
        let (closes, opens) = run.split_at_mut(closing);
        let Some(peer) = self.peers.get_mut(&client).filter(|peer| !peer.leaving) else {
            // The QPs of a departed compute node are closed: its keys are dead.
            opens.iter_mut().for_each(|task| task.failed = true);
            return;
        };
        let mut handed_over = 0;
        for (at, task) in opens.iter_mut().enumerate() {
            let opening = task.opening.expect("a task that opens");
            let index = Some(first + closing + at);
            let old = closes.get(handed_over).map(|task| task.id.number);
            if let Some(post) = old.and_then(|old| peer.door.hand_over(old, &opening)) {
                let closes = Some(first + handed_over);
                operations.push(Operation { client, post, closes, opens: index, done: false });
                handed_over += 1;
                self.counts.handovers += 1;
                continue;
            }
            self.counts.binds += 1;
            match peer.door.open(&shared.nic, &opening, &peer.access) {
                Change::Done => {}
                Change::Impossible => task.failed = true,
                Change::Posts(posts) => operations.extend(posts.into_iter().map(|post| {
                    Operation { client, post, closes: None, opens: index, done: false }
                })),
            }
        }
        for (at, task) in closes.iter().enumerate().skip(handed_over) {
            self.counts.unbinds += 1;
            let closes = Some(first + at);
            if let Change::Posts(posts) = peer.door.close(task.id.number) {
                operations.extend(posts.into_iter().map(|post| Operation {
                    client,
                    post,
                    closes,
                    opens: None,
                    done: false,
                }));
            }
        }
    }

    /// Posts the operations that are not done, with one doorbell for each QP, and waits for their
    /// completions.
    fn post(&mut self, operations: &mut [Operation]) -> Result<(), Error> {
        operations.sort_by_key(Operation::qp);
        let first = self.serial;
        self.serial += operations.len() as u64;
        let mut posted = 0;
        let mut list = Vec::with_capacity(operations.len());
        let mut index = 0;
        for run in operations.chunk_by(|a, b| a.qp() == b.qp()) {
            list.clear();
            for operation in run {
                if !operation.done {
                    let (id, op) = (first + index, Op::Window(&operation.post.umr));
                    list.push(WorkRequest { id, op, signaled: true });
                }
                index += 1;
            }
            if let Some(peer) = self.peers.get(&run[0].client)
                && let Some(qp) = qp_of(peer, run[0].post.to)
                && !list.is_empty()
                && qp.post_send(&list).is_ok()
            {
                posted += list.len();
            }
        }
        drop(list);
        poll_until(&self.binds, posted, |c| {
            let index = c.id.checked_sub(first).map(|index| index as usize);
            let Some(operation) = index.and_then(|index| operations.get_mut(index)) else {
                return false; // of an earlier list
            };
            operation.done = c.status == Status::Success;
            true
        })
    }

    /// Repeats tasks of which an operation failed once, with new windows on QPs that are
    /// re-established. The old windows are deallocated, so that their keys are dead in any case.
    fn retry_failed(
        &mut self,
        shared: &Shared<N>,
        tasks: &mut [DoorTask],
        operations: &mut Vec<Operation>,
    ) -> Result<(), Error> {
        let failed: Vec<Operation> = operations.extract_if(.., |op| !op.done).collect();
        if failed.is_empty() {
            return Ok(());
        }
        for run in failed.chunk_by(|a, b| a.qp() == b.qp()) {
            if let Some(peer) = self.peers.get(&run[0].client) {
                match run[0].post.to {
                    PostTo::Binder => peer.binder.connect(peer.binder.qpn())?,
                    PostTo::Lane(group, lane) => {
                        if let Some(path) = peer.access.get(group, lane) {
                            path.connect_for_work()?;
                        }
                    }
                }
            }
        }
        let mut again: Vec<usize> = failed.iter().filter_map(|op| op.opens.or(op.closes)).collect();
        again.sort_unstable();
        again.dedup();
        // Operations of these tasks that are done belong to windows that are deallocated now.
        operations.retain(|op| op.opens.or(op.closes).is_none_or(|task| !again.contains(&task)));
        let mut repeated = Vec::new();
        for index in again {
            let task = &mut tasks[index];
            let client = task.id.client;
            let Some(peer) = self.peers.get_mut(&client) else { continue };
            peer.door.discard(task.id.number);
            let Some(opening) = task.opening else { continue };
            let operation =
                |post| Operation { client, post, closes: None, opens: Some(index), done: false };
            match peer.door.open(&shared.nic, &opening, &peer.access) {
                Change::Posts(posts) => repeated.extend(posts.into_iter().map(operation)),
                Change::Done => {}
                // No window is left, and the task has no operation any more.
                Change::Impossible => task.failed = true,
            }
        }
        self.post(&mut repeated)?;
        operations.extend(repeated);
        Ok(())
    }

    /// Notes failed tasks, and frees the windows of permissions that are closed.
    fn settle(&mut self, tasks: &mut [DoorTask], operations: &[Operation]) {
        for operation in operations {
            let Some(peer) = self.peers.get_mut(&operation.client) else { continue };
            match (operation.opens, operation.closes) {
                (Some(opens), _) if !operation.done => {
                    tasks[opens].failed = true;
                    peer.door.discard(tasks[opens].id.number);
                }
                (None, Some(closes)) => peer.door.release(tasks[closes].id.number),
                _ => {}
            }
        }
    }
}

/// The QP to which an operation of a compute node is posted.
fn qp_of<N: Nic>(peer: &Connection<N>, to: PostTo) -> Option<&N::Qp> {
    match to {
        PostTo::Binder => Some(&peer.binder),
        PostTo::Lane(group, lane) => Some(&peer.access.get(group, lane)?.qp),
    }
}
