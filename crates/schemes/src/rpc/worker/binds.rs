//! Binds and unbinds: posted with one doorbell per QP, then awaited.

use scheme::client_table::PeerQp;
use scheme::wakeup::poll_until;
use scheme::{ClientId, Error, GroupId, Lane};
use verbs::wqe::Umr;
use verbs::{Nic, Op, QueuePair, Status, WorkRequest};

use super::State;

/// A bind or unbind.
pub(super) struct WindowOp {
    /// The access QP to post to; `None`: the binder QP.
    pub(super) path: Option<(ClientId, GroupId, Lane)>,
    pub(super) umr: Umr,
    pub(super) job: usize,
    pub(super) done: bool,
}

impl<N: Nic> State<N> {
    /// Executes the operations and waits for them. An operation that fails because its QP is in the
    /// error state (after a bad access of its compute node) is repeated once on the re-established
    /// QP.
    pub(super) fn run(&mut self, ops: &mut [WindowOp]) -> Result<(), Error> {
        ops.sort_by_key(|op| op.path);
        self.run_once(ops)?;
        if ops.iter().all(|op| op.done) {
            return Ok(());
        }
        for run in ops.chunk_by(same_path).filter(|run| run.iter().any(|o| !o.done)) {
            match (run[0].path, self.path(&run[0])) {
                (None, Some(binder)) => binder.connect(binder.qpn())?,
                (Some(_), Some(_)) => {
                    self.peer_path(&run[0]).expect("just seen").connect_for_work()?;
                }
                _ => {}
            }
        }
        self.run_once(ops)
    }

    pub(super) fn run_once(&mut self, ops: &mut [WindowOp]) -> Result<(), Error> {
        let first = self.serial;
        self.serial += ops.len() as u64;
        let mut posted = 0;
        let mut list = Vec::with_capacity(ops.len());
        let mut index = 0;
        for run in ops.chunk_by(same_path) {
            list.clear();
            for op in run {
                if !op.done {
                    let id = first + index;
                    list.push(WorkRequest { id, op: Op::Window(&op.umr), signaled: true });
                }
                index += 1;
            }
            // The send queue has room, because a compute node has at most `credits` requests per
            // poll.
            if let Some(qp) = self.path(&run[0])
                && !list.is_empty()
                && qp.post_send(&list).is_ok()
            {
                posted += list.len();
            }
        }
        poll_until(&self.binds, posted, |c| {
            let Some(op) = c.id.checked_sub(first).and_then(|i| ops.get_mut(i as usize)) else {
                return false; // of an earlier run
            };
            op.done = c.status == Status::Success;
            true
        })
    }

    /// The QP to which an operation is posted.
    fn path(&self, op: &WindowOp) -> Option<&N::Qp> {
        match op.path {
            None => self.binder.as_ref(),
            Some(_) => self.peer_path(op).map(|path| &path.qp),
        }
    }

    fn peer_path(&self, op: &WindowOp) -> Option<&PeerQp<N>> {
        let (client, group, lane) = op.path?;
        self.peers.get(&client)?.access.get(group, lane)
    }
}

fn same_path(a: &WindowOp, b: &WindowOp) -> bool {
    a.path == b.path
}
