//! Access QPs: posting to them, and re-establishing them after a failed access.
//!
//! ```text
//! group g (one per core): one CQ, one QP per lane
//!   lane 0 ── QP ══ memory node's QP        a grant for group g has one key for each lane's QP
//!   lane 1 ── QP ══ memory node's QP
//! ```
//!
//! If the memory node's windows are in several functions of its NIC, each function has QPs of its
//! own: a key belongs to one function and is valid only on QPs that are connected to that function.
//! The grant names the function. All QPs are connected at admission, so that no access waits for a
//! connection.
//!
//! A refused access puts its QP into the error state and flushes all other operations on it. The
//! windows stay bound, because both QPs keep their numbers. The first thread that notices resets
//! the QP on both sides and connects it again. Flushed operations of other threads are reposted,
//! because a flushed request was not executed. `epoch` counts the resets, so that each failure
//! causes one reset only.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::RwLock;
use smallvec::SmallVec;
use verbs::completion::{Completer, LIST_MAX, Pending, id_at};
use verbs::{
    Access, CompletionQueue, CqAttr, Error as VerbsError, Nic, Op, PeerAddress, QpAttr, QpChange,
    Qpn, QueuePair, Receive, ReceiveAttr, Remote, SendFlags, Sge, WorkRequest,
};

use super::control::ControlPlane;
use crate::Error;
use crate::nic::QueueSizes;
use scheme::{GroupId, Lane};

/// A QP group of a compute node.
pub(super) struct Group<N: Nic> {
    pub completer: Arc<Completer<N::Cq>>,
    pub qps: Vec<AccessQp<N>>,
    /// QPs per function.
    lanes: u8,
    pub counts: Counts,
}

/// Operation counters of a group's QPs.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Counts {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub atomics: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
}

/// Longest list of requests that is posted without an allocation.
pub(super) const STACK_REQUESTS: usize = 16;

/// Index of an access QP in its group, in the order of the admission: by function, then by lane.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct AccessQpIndex(u8);

/// An access QP.
pub(super) struct AccessQp<N: Nic> {
    qp: N::Qp,
    /// The group's, or the one of all QPs that can be lent.
    completer: Arc<Completer<N::Cq>>,
    /// Number of resets. Held for reading while an operation is posted.
    epoch: RwLock<u64>,
    group: GroupId,
    index: AccessQpIndex,
}

/// An access in a form that can be reposted.
#[derive(Clone, Copy)]
pub(super) enum Work<'a> {
    Read { from: Remote, to: Sge },
    Write { to: Remote, from: Sge },
    WriteInline { to: Remote, data: &'a [u8] },
    CompareSwap { at: Remote, compare: u64, swap: u64, old: Sge },
    FetchAdd { at: Remote, add: u64, old: Sge },
}

impl Work<'_> {
    /// Name in error messages.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Read { .. } => "read",
            Work::Write { .. } | Work::WriteInline { .. } => "write",
            Work::CompareSwap { .. } => "compare-and-swap",
            Work::FetchAdd { .. } => "fetch-and-add",
        }
    }

    /// True if repeating the operation has the same effect as executing it once.
    pub fn is_idempotent(&self) -> bool {
        matches!(self, Work::Read { .. } | Work::Write { .. } | Work::WriteInline { .. })
    }

    fn is_write(&self) -> bool {
        matches!(self, Work::Write { .. } | Work::WriteInline { .. })
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

/// The request for the work at `position` of `count` works. Works beyond the positions of a list
/// ([`LIST_MAX`]) share the last one.
fn request(id: u64, position: usize, op: Op<'_>, count: usize) -> WorkRequest<'_> {
    WorkRequest { id: id_at(id, position.min(LIST_MAX - 1)), op, signaled: position + 1 == count }
}

/// For each work, true if it needs a fence to be executed in order: a WRITE behind a READ or an
/// atomic (IBTA vol. 1, chapter 10, ordering of work requests).
fn fences<'a>(works: impl Iterator<Item = &'a Work<'a>>) -> impl Iterator<Item = bool> {
    works.scan(false, |waits_for_reads, work| {
        let fenced = *waits_for_reads && work.is_write();
        *waits_for_reads = !work.is_write();
        Some(fenced)
    })
}

/// Values for a list of works, on the stack for lists of usual length.
type OnStack<T> = SmallVec<[T; STACK_REQUESTS]>;

/// A posted operation and the epoch at that time.
pub(super) struct Posted<N: Nic> {
    pub pending: Pending<N::Cq>,
    pub epoch: u64,
}

/// Number and size of access QPs.
#[derive(Clone, Copy)]
pub(super) struct AccessSizes {
    /// QPs of each function of the memory node's NIC.
    pub lanes: u8,
    /// Functions of the memory node's NIC.
    pub functions: u8,
    pub send_blocks: u32,
    /// Receives of each QP.
    pub receives: u32,
    /// The QPs of all lanes but the first complete to a CQ of their own, so that they can be lent.
    pub is_lendable: bool,
}

impl AccessSizes {
    /// Entries of a CQ for `qps` QPs: room for all posted operations, and as many again that are
    /// flushed at a reset.
    fn entries(&self, qps: u32) -> u32 {
        2 * qps * (self.send_blocks + self.receives)
    }

    /// Entries of the CQ of a group.
    fn group_entries(&self) -> u32 {
        self.entries(if self.is_lendable { 1 } else { self.lanes as u32 } * self.functions as u32)
    }

    /// Entries of the CQ of the QPs that can be lent, in `groups` groups; `None` if there are none.
    fn lendable_entries(&self, groups: u16) -> Option<u32> {
        let qps = groups as u32 * self.functions as u32 * (self.lanes as u32).saturating_sub(1);
        (self.is_lendable && qps > 0).then(|| self.entries(qps))
    }

    /// The queues of `groups` groups.
    pub fn queues(&self, groups: u16) -> QueueSizes {
        let of_groups = std::iter::repeat_n(self.group_entries(), groups as usize);
        let qps = groups as usize * self.lanes as usize * self.functions as usize;
        QueueSizes {
            cqs: of_groups.chain(self.lendable_entries(groups)).collect(),
            send_queues: vec![self.send_blocks; qps],
        }
    }

    /// Creates the CQ of the QPs that can be lent; `None` if there are none.
    pub fn lendable_cq<N: Nic>(
        &self,
        nic: &N,
        groups: u16,
    ) -> Result<Option<Arc<Completer<N::Cq>>>, Error> {
        let Some(entries) = self.lendable_entries(groups) else { return Ok(None) };
        let cq = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        Ok(Some(Arc::new(Completer::new(cq))))
    }
}

impl<N: Nic> Group<N> {
    /// Creates the QPs of a group. `lendable` is the CQ of the QPs that can be lent.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        group: GroupId,
        sizes: AccessSizes,
        lendable: Option<&Arc<Completer<N::Cq>>>,
    ) -> Result<Self, Error> {
        let AccessSizes { lanes, functions, send_blocks, receives, .. } = sizes;
        let count = lanes as u32 * functions as u32;
        let entries = sizes.group_entries();
        let cq = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let completer = Arc::new(Completer::new(cq));
        let access_qp = |index: u32| -> Result<AccessQp<N>, Error> {
            let lendable = lendable.filter(|_| !index.is_multiple_of(lanes as u32));
            let completer = lendable.unwrap_or(&completer).clone();
            let attr = QpAttr {
                send_cq: completer.cq(),
                recv_cq: completer.cq(),
                send_blocks,
                receive: match receives {
                    0 => Receive::None,
                    entries => Receive::Own(ReceiveAttr { entries, max_sges: 1 }),
                },
                // Remote write is for the bulletin, the only memory whose key the memory node has.
                access: Access::REMOTE_WRITE,
            };
            let qp = nic.create_qp(pd, attr)?;
            let index = AccessQpIndex(index as u8);
            Ok(AccessQp { qp, completer, epoch: RwLock::new(0), group, index })
        };
        let qps = (0..count).map(access_qp).collect::<Result<_, _>>()?;
        Ok(Self { completer, qps, lanes, counts: Counts::default() })
    }

    /// Index of the QP for a function of the memory node's NIC and a lane, modulo the number of
    /// lanes.
    #[inline]
    pub fn qp_index(&self, function: u8, lane: Lane) -> AccessQpIndex {
        let index = function as usize * self.lanes as usize + (lane.0 % self.lanes) as usize;
        // Only a forged grant names a function that does not exist.
        AccessQpIndex(if index < self.qps.len() { index } else { index % self.qps.len() } as u8)
    }

    /// The access QP at an index of this group.
    #[inline]
    pub fn access_qp(&self, index: AccessQpIndex) -> &AccessQp<N> {
        &self.qps[index.0 as usize]
    }

    /// QPs per function.
    pub fn lanes(&self) -> u8 {
        self.lanes
    }

    /// Posts operations with one doorbell. The result completes with the last operation, or with
    /// the first one that fails. The operations must fit the send queue; each needs one or a few
    /// blocks.
    #[inline]
    pub fn post<'a>(
        &self,
        index: AccessQpIndex,
        works: impl ExactSizeIterator<Item = &'a Work<'a>> + Clone,
    ) -> Result<Posted<N>, Error> {
        let access_qp = self.access_qp(index);
        let mut tries = 0;
        loop {
            let epoch = access_qp.epoch.read();
            match access_qp.completer.submit(|id| access_qp.post(id, works.clone())) {
                Ok(pending) => return Ok(Posted { pending, epoch: *epoch }),
                Err(VerbsError::QueueFull { .. }) => drop(epoch),
                Err(e) => return Err(e.into()),
            }
            access_qp.make_room(&mut tries)?;
        }
    }
}

impl<N: Nic> AccessQp<N> {
    /// Frees room in the send queue by polling completions, also those of other threads.
    #[cold]
    fn make_room(&self, tries: &mut u32) -> Result<(), Error> {
        if self.completer.poll() > 0 {
            *tries = 0;
            return Ok(());
        }
        *tries += 1;
        if *tries < 1000 && !N::Cq::VIRTUAL {
            std::thread::yield_now();
        } else {
            // Another thread is polling, or the NIC has exited, which `wait` reports.
            self.completer.cq().wait(Duration::from_millis(200))?;
        }
        Ok(())
    }

    /// Where operations on the QP complete.
    pub fn completer(&self) -> &Completer<N::Cq> {
        &self.completer
    }

    /// The QP's number.
    pub fn qpn(&self) -> Qpn {
        self.qp.qpn()
    }

    /// Connects the QP for the first time.
    pub fn connect(&self, peer: PeerAddress) -> Result<(), Error> {
        Ok(self.qp.connect(peer)?)
    }

    fn post<'a>(
        &self,
        id: u64,
        works: impl ExactSizeIterator<Item = &'a Work<'a>> + Clone,
    ) -> Result<(), VerbsError> {
        let count = works.len();
        if count > 1 && fences(works.clone()).any(|fenced| fenced) {
            return self.post_fenced(id, works);
        }
        let request = |(i, work)| request(id, i, Work::op(work), count);
        let list: OnStack<WorkRequest<'_>> = works.enumerate().map(request).collect();
        self.qp.post_send(&list)
    }

    /// Posts works of which one or more need a fence.
    fn post_fenced<'a>(
        &self,
        id: u64,
        works: impl ExactSizeIterator<Item = &'a Work<'a>> + Clone,
    ) -> Result<(), VerbsError> {
        let ops: OnStack<Op<'_>> = works.clone().map(Work::op).collect();
        let flags = SendFlags { fence: true, ..SendFlags::default() };
        let request = |(i, (op, fenced))| {
            request(id, i, if fenced { Op::With { flags, op } } else { *op }, ops.len())
        };
        let list: OnStack<WorkRequest<'_>> =
            ops.iter().zip(fences(works)).enumerate().map(request).collect();
        self.qp.post_send(&list)
    }

    /// The QP.
    pub fn qp(&self) -> &N::Qp {
        &self.qp
    }

    /// Number of resets. While it is locked for writing, no operation is posted.
    pub fn epoch(&self) -> &RwLock<u64> {
        &self.epoch
    }

    /// Re-establishes the QP after an operation that was posted in `epoch` failed, unless another
    /// thread has done so. All operations in flight on it end as flushed.
    pub fn recover(&self, epoch: u64, control: &dyn ControlPlane) -> Result<(), Error> {
        let mut now = self.epoch.write();
        if *now != epoch {
            return Ok(());
        }
        self.qp.modify(QpChange::Reset)?;
        self.reconnect(control)?;
        *now += 1;
        Ok(())
    }

    /// Connects the QP, which is in Reset, to the memory node's QP, which is reset too. The caller
    /// has locked the epoch for writing.
    pub fn reconnect(&self, control: &dyn ControlPlane) -> Result<(), Error> {
        let peer = control.reset_access(self.group, Lane(self.index.0))?;
        Ok(self.qp.connect(peer)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_behind_reads_and_atomics_are_fenced() {
        let (at, sge) = (Remote { addr: 0, rkey: Default::default() }, Sge::default());
        let work = |letter| match letter {
            'r' => Work::Read { from: at, to: sge },
            'w' => Work::Write { to: at, from: sge },
            'i' => Work::WriteInline { to: at, data: &[] },
            'c' => Work::CompareSwap { at, compare: 0, swap: 0, old: sge },
            _ => Work::FetchAdd { at, add: 1, old: sge },
        };
        // Upper case: with a fence.
        for list in ["r", "w", "wicr", "rW", "cIwrrfWicW", "fWwi"] {
            let works: Vec<_> = list.to_ascii_lowercase().chars().map(work).collect();
            let expected: Vec<_> = list.chars().map(|c| c.is_ascii_uppercase()).collect();
            assert_eq!(fences(works.iter()).collect::<Vec<_>>(), expected, "{list}");
        }
    }
}
