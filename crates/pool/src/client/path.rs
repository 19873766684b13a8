//! Access QPs: posting to them, and re-establishing them when a bad access broke one.
//!
//! ```text
//! group g (one per core): one CQ, one QP per lane
//!   lane 0 ── QP ══ memory node's QP        a grant for group g has one key for each lane's QP
//!   lane 1 ── QP ══ memory node's QP
//! ```
//!
//! Where the memory node's windows are in several functions of its NIC there are as many QPs again for each: a key
//! is of one function, and only a QP that is connected there reaches it. A grant says which. They are
//! all connected when the compute node is admitted, so that no access is ever held up by a connection that is
//! not there yet.
//!
//! A refused access puts its QP into the error state, and everything else on that QP is flushed.
//! Windows live on, since both QPs keep their numbers: whoever notices resets the QP on both sides
//! and connects it again; the flushed operations of others are posted again, since a flushed request was not
//! executed. `epoch` counts this, so that it happens once for each break.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fabric::completion::{Completer, Pending};
use fabric::{
    Access, CompletionQueue, CqAttr, Error as VerbsError, Nic, Op, PeerAddress, QpAttr, QpChange,
    Qpn, QueuePair, Receive, ReceiveAttr, Remote, Sge, WorkRequest,
};
use parking_lot::RwLock;

use super::control::ControlPlane;
use crate::Error;
use crate::scheme::{GroupId, Lane};

/// A QP group of a compute node.
pub(super) struct Group<N: Nic> {
    pub completer: Arc<Completer<N::Cq>>,
    pub paths: Vec<Path<N>>,
    /// QPs for each function.
    lanes: u8,
    pub counts: Counts,
}

/// What a group's QPs did.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Counts {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub atomics: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
}

/// An access QP of a group, by its place in the admission: function by function, and the lanes in each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Way(u8);

/// An access QP.
pub(super) struct Path<N: Nic> {
    qp: N::Qp,
    /// How often it was re-established. Held for reading while something is posted.
    epoch: RwLock<u64>,
    group: GroupId,
    way: Way,
}

/// One operation, in a form that can be posted again.
#[derive(Clone, Copy)]
pub(super) enum Work<'a> {
    Read { from: Remote, to: Sge },
    Write { to: Remote, from: Sge },
    WriteInline { to: Remote, data: &'a [u8] },
    CompareSwap { at: Remote, compare: u64, swap: u64, old: Sge },
    FetchAdd { at: Remote, add: u64, old: Sge },
}

impl Work<'_> {
    /// Its name in errors.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Read { .. } => "read",
            Work::Write { .. } | Work::WriteInline { .. } => "write",
            Work::CompareSwap { .. } => "compare-and-swap",
            Work::FetchAdd { .. } => "fetch-and-add",
        }
    }

    /// True if doing it twice is the same as doing it once.
    pub fn is_idempotent(&self) -> bool {
        matches!(self, Work::Read { .. } | Work::Write { .. } | Work::WriteInline { .. })
    }

    fn op(&self) -> Op<'_> {
        use std::slice::from_ref;
        match self {
            Work::Read { from, to } => Op::Read { from: *from, to: from_ref(to) },
            Work::Write { to, from } => Op::Write { to: *to, from: from_ref(from) },
            Work::WriteInline { to, data } => Op::WriteInline { to: *to, data },
            Work::CompareSwap { at, compare, swap, old } => {
                Op::CompareSwap { at: *at, compare: *compare, swap: *swap, old: *old }
            }
            Work::FetchAdd { at, add, old } => Op::FetchAdd { at: *at, add: *add, old: *old },
        }
    }
}

/// Work that was posted, and the epoch that it was posted in.
pub(super) struct Posted<N: Nic> {
    pub pending: Pending<N::Cq>,
    pub epoch: u64,
}

impl<N: Nic> Group<N> {
    /// Makes the QPs of a group.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        group: GroupId,
        (lanes, functions): (u8, u8),
        send_blocks: u32,
        receives: u32,
    ) -> Result<Self, Error> {
        let count = lanes as u32 * functions as u32;
        // Everything that is posted, and as much again that is flushed at a reset.
        let entries = 2 * count * (send_blocks + receives);
        let cq = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let path = |way| -> Result<Path<N>, Error> {
            let attr = QpAttr {
                send_cq: &cq,
                recv_cq: &cq,
                send_blocks,
                receive: match receives {
                    0 => Receive::None,
                    entries => Receive::Own(ReceiveAttr { entries, max_sges: 1 }),
                },
                // The memory node may write the bulletin, the only memory whose key it has.
                access: Access::REMOTE_WRITE,
            };
            let qp = nic.create_qp(pd, attr)?;
            Ok(Path { qp, epoch: RwLock::new(0), group, way: Way(way as u8) })
        };
        let paths = (0..count).map(path).collect::<Result<_, _>>()?;
        let completer = Arc::new(Completer::new(cq));
        Ok(Self { completer, paths, lanes, counts: Counts::default() })
    }

    /// The way to a function of the memory node's NIC on a lane, taken modulo the number of lanes.
    #[inline]
    pub fn way(&self, function: u8, lane: Lane) -> Way {
        let way = function as usize * self.lanes as usize + (lane.0 % self.lanes) as usize;
        // A function that there is not is some forged grant's.
        Way(if way < self.paths.len() { way } else { way % self.paths.len() } as u8)
    }

    /// The path of a way of this group.
    #[inline]
    pub fn path(&self, way: Way) -> &Path<N> {
        &self.paths[way.0 as usize]
    }

    /// QPs for each function.
    pub fn lanes(&self) -> u8 {
        self.lanes
    }

    /// Posts operations with one doorbell; what is waited for is the last of them, or the first
    /// that fails.
    ///
    /// They fit the send queue: 1 or a few blocks each.
    pub fn post(&self, way: Way, works: &[Work<'_>]) -> Result<Posted<N>, Error> {
        let path = self.path(way);
        let mut tries = 0;
        loop {
            let epoch = path.epoch.read();
            match self.completer.submit(|id| path.post(id, works)) {
                Ok(pending) => return Ok(Posted { pending, epoch: *epoch }),
                Err(VerbsError::QueueFull { .. }) => drop(epoch),
                Err(e) => return Err(e.into()),
            }
            self.make_room(&mut tries)?;
        }
    }

    /// Polls for others, since room comes with their completions.
    #[cold]
    fn make_room(&self, tries: &mut u32) -> Result<(), Error> {
        if self.completer.turn() > 0 {
            *tries = 0;
            return Ok(());
        }
        *tries += 1;
        if *tries < 1000 && !N::Cq::VIRTUAL {
            std::thread::yield_now();
        } else {
            // Somebody else polls, or the NIC is gone: this tells.
            self.completer.cq().wait(Duration::from_millis(200))?;
        }
        Ok(())
    }
}

impl<N: Nic> Path<N> {
    /// The QP's number.
    pub fn qpn(&self) -> Qpn {
        self.qp.qpn()
    }

    /// Connects the QP for the first time.
    pub fn connect(&self, peer: PeerAddress) -> Result<(), Error> {
        Ok(self.qp.connect(peer)?)
    }

    fn post(&self, id: u64, works: &[Work<'_>]) -> Result<(), VerbsError> {
        if let [work] = works {
            return self.qp.post_send(&[WorkRequest { id, op: work.op(), signaled: true }]);
        }
        let last = works.len() - 1;
        let request = |(i, work)| WorkRequest { id, op: Work::op(work), signaled: i == last };
        let list: Vec<WorkRequest<'_>> = works.iter().enumerate().map(request).collect();
        self.qp.post_send(&list)
    }

    /// The QP.
    pub fn qp(&self) -> &N::Qp {
        &self.qp
    }

    /// How often it was re-established; nobody posts while this is held for writing.
    pub fn epoch(&self) -> &RwLock<u64> {
        &self.epoch
    }

    /// Re-establishes the QP after work that was posted in `epoch` failed, unless that was done
    /// already. Everything that is still in flight on it ends as flushed.
    pub fn recover(&self, epoch: u64, control: &dyn ControlPlane) -> Result<(), Error> {
        let mut now = self.epoch.write();
        if *now != epoch {
            return Ok(());
        }
        self.qp.modify(QpChange::Reset)?;
        let peer = control.reset_access(self.group, Lane(self.way.0))?;
        self.qp.connect(peer)?;
        *now += 1;
        Ok(())
    }
}
