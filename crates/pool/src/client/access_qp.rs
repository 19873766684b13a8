//! Access QPs of a group: posting to them, and why one of them has failed.
//!
//! ```text
//! group g (one per core): one CQ, one virtual QP per lane
//!   lane 0 ── QP ══ memory node's QP        a grant for group g has one key for each lane's QP
//!   lane 1 ── QP ══ memory node's QP
//! ```
//!
//! If the memory node's windows are in several functions of its NIC, each function has QPs of its
//! own: a key belongs to one function and is valid only on QPs that are connected to that function.
//! The grant names the function. All QPs are connected at admission, so that no access waits for a
//! connection.
//!
//! A refused access puts its QP into the error state and flushes all later operations on it. A
//! [virtual QP](Path) then goes on, on a spare QP or on the same QP after a reset on both sides.
//! Keys stay valid in both cases. A type-2 window is bound to the number of a QP, and a QP that is
//! reset keeps its number. Keys of schemes with spare QPs are valid on every QP in the compute
//! node's PD, so they do not depend on a number.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;
use verbs::completion::{Completer, LIST_MAX, id_at};
use verbs::{
    Access, CqAttr, Error as VerbsError, Nic, Op, PeerAddress, QpAttr, QpChange, Qpn, QueuePair,
    Receive, ReceiveAttr, Remote, SendFlags, Sge, Status, WorkRequest,
};

use super::control::ControlPlane;
use super::path::{Path, PathIndex, Posted};
use crate::Error;
use crate::nic::QueueSizes;
use scheme::{GroupId, Lane};

/// A QP group of a compute node.
pub(super) struct Group<N: Nic> {
    pub completer: Arc<Completer<N::Cq>>,
    /// Virtual QPs, by function, then by lane.
    pub paths: Vec<Path<N>>,
    /// Virtual QPs per function.
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

/// An access QP.
pub(super) struct AccessQp<N: Nic> {
    qp: N::Qp,
    group: GroupId,
    /// Index in the group, in the order of the admission.
    index: u8,
    failure: Arc<Failure>,
}

/// Status of the request that put a QP into the error state. The requests behind it are flushed.
#[derive(Default)]
pub(super) struct Failure {
    state: Mutex<FailureState>,
    changed: Condvar,
}

#[derive(Default)]
struct FailureState {
    status: Option<Status>,
    /// Number of times that the QP was connected.
    connections: u64,
}

/// Time limit for the status of the request that failed, after a request was flushed. The thread
/// that has polled that status needs some microseconds, unless it is not scheduled.
const STATUS_WAIT: Duration = Duration::from_millis(100);

impl Failure {
    /// Stores the status of a request that was not only flushed. A missing answer is kept, because
    /// the peer may still execute requests after it.
    fn note(&self, status: Status) {
        let mut state = self.state.lock();
        if state.status.is_none() || status == Status::RetryExceeded {
            state.status = Some(status);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Forgets the status: the QP was connected again.
    fn clear(&self) {
        let mut state = self.state.lock();
        state.status = None;
        state.connections += 1;
        drop(state);
        self.changed.notify_all();
    }
}

/// Wait for the status of the request that has put a QP into the error state, for a thread that has
/// seen a later request end as flushed. Completions are polled in order, but another thread may
/// have polled the earlier one and not stored its status yet.
pub(super) struct FailureWait {
    failure: Arc<Failure>,
    connections: u64,
}

impl FailureWait {
    /// The status; `None` if the QP was connected again, or no request failed within a time limit.
    pub fn until_known(self) -> Option<Status> {
        let mut state = self.failure.state.lock();
        let is_waiting = |state: &mut FailureState| {
            state.status.is_none() && state.connections == self.connections
        };
        self.failure.changed.wait_while_for(&mut state, is_waiting, STATUS_WAIT);
        if state.connections == self.connections { state.status } else { None }
    }
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

/// Number and size of access QPs.
#[derive(Clone, Copy)]
pub(super) struct AccessSizes {
    /// Virtual QPs of each function of the memory node's NIC.
    pub lanes: u8,
    /// Functions of the memory node's NIC.
    pub functions: u8,
    /// Spare QPs of each lane.
    pub spares: u8,
    pub send_blocks: u32,
    /// Receives of each QP.
    pub receives: u32,
    /// The QPs of all lanes but the first complete to a CQ of their own, so that they can be lent.
    pub is_lendable: bool,
}

impl AccessSizes {
    /// QPs of a virtual QP.
    fn each(&self) -> u32 {
        1 + self.spares as u32
    }

    /// Entries of a CQ for `paths` virtual QPs: room for all posted operations, and as many again
    /// that are flushed at a reset.
    fn entries(&self, paths: u32) -> u32 {
        2 * paths * self.each() * (self.send_blocks + self.receives)
    }

    /// Entries of the CQ of a group.
    fn group_entries(&self) -> u32 {
        self.entries(if self.is_lendable { 1 } else { self.lanes as u32 } * self.functions as u32)
    }

    /// Entries of the CQ of the QPs that can be lent, in `groups` groups; `None` if there are none.
    fn lendable_entries(&self, groups: u16) -> Option<u32> {
        let paths = groups as u32 * self.functions as u32 * (self.lanes as u32).saturating_sub(1);
        (self.is_lendable && paths > 0).then(|| self.entries(paths))
    }

    /// The queues of `groups` groups.
    pub fn queues(&self, groups: u16) -> QueueSizes {
        let of_groups = std::iter::repeat_n(self.group_entries(), groups as usize);
        let paths = groups as usize * self.lanes as usize * self.functions as usize;
        let qps = paths * self.each() as usize;
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
        let paths = lanes as u32 * functions as u32;
        let entries = sizes.group_entries();
        let cq = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let completer = Arc::new(Completer::new(cq));
        let completer_of = |path: u32| {
            let lendable = lendable.filter(|_| !path.is_multiple_of(lanes as u32));
            lendable.unwrap_or(&completer)
        };
        let access_qp = |index: u32| -> Result<AccessQp<N>, Error> {
            let completer = completer_of(index % paths);
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
            Ok(AccessQp { qp, group, index: index as u8, failure: Arc::default() })
        };
        let path = |path: u32| -> Result<Path<N>, Error> {
            let indices = (0..sizes.each()).map(|round| path + round * paths);
            let qps = indices.map(access_qp).collect::<Result<_, _>>()?;
            Ok(Path::new(qps, completer_of(path).clone()))
        };
        let paths = (0..paths).map(path).collect::<Result<_, _>>()?;
        Ok(Self { completer, paths, lanes, counts: Counts::default() })
    }

    /// The QPs in the order of the admission: the first of each virtual QP, then the second of
    /// each, and so on.
    pub fn qps(&self) -> impl Iterator<Item = &AccessQp<N>> {
        let rounds = self.paths[0].qps().len();
        (0..rounds).flat_map(|round| self.paths.iter().map(move |path| &path.qps()[round]))
    }

    /// Index of the virtual QP for a function of the memory node's NIC and a lane, modulo the
    /// number of lanes.
    #[inline]
    pub fn path_index(&self, function: u8, lane: Lane) -> PathIndex {
        let index = function as usize * self.lanes as usize + (lane.0 % self.lanes) as usize;
        // Only a forged grant names a function that does not exist.
        PathIndex(if index < self.paths.len() { index } else { index % self.paths.len() } as u8)
    }

    /// The virtual QP at an index of this group.
    #[inline]
    pub fn path(&self, index: PathIndex) -> &Path<N> {
        &self.paths[index.0 as usize]
    }

    /// Virtual QPs per function.
    pub fn lanes(&self) -> u8 {
        self.lanes
    }

    /// Posts operations with one doorbell. The result completes with the last operation, or with
    /// the first one that fails. The operations must fit the send queue; each needs one or a few
    /// blocks.
    #[inline]
    pub fn post<'a>(
        &self,
        index: PathIndex,
        works: impl ExactSizeIterator<Item = &'a Work<'a>> + Clone,
    ) -> Result<Posted<N>, Error> {
        self.path(index).post(works)
    }
}

/// Makes the completers store the status of each failed request in its QP's [`Failure`].
pub(super) fn note_failures<'a, N: Nic>(
    groups: &'a [Group<N>],
    lendable: Option<&'a Completer<N::Cq>>,
) {
    let qps = groups.iter().flat_map(Group::qps);
    let mut failures: Vec<_> = qps.map(|qp| (qp.qpn().raw(), qp.failure.clone())).collect();
    failures.sort_unstable_by_key(|(qpn, _)| *qpn);
    let failures: Arc<[_]> = failures.into();
    for completer in groups.iter().map(|group| &*group.completer).chain(lendable) {
        let failures = failures.clone();
        completer.when_failed(Arc::new(move |completion| {
            let at = failures.binary_search_by_key(&completion.qpn.raw(), |(qpn, _)| *qpn);
            if let Ok(at) = at {
                failures[at].1.note(completion.status);
            }
        }));
    }
}

impl<N: Nic> AccessQp<N> {
    /// The QP's number.
    pub fn qpn(&self) -> Qpn {
        self.qp.qpn()
    }

    /// Connects the QP, which is new or in Reset.
    pub fn connect(&self, peer: PeerAddress) -> Result<(), Error> {
        self.qp.connect(peer)?;
        self.failure.clear();
        Ok(())
    }

    /// Posts operations, which complete with `id`.
    #[inline]
    pub fn post<'a>(
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

    /// The status of the request that put the QP into the error state, if it is known.
    pub fn failure(&self) -> Option<Status> {
        self.failure.state.lock().status
    }

    /// Begins to wait for the status, which is not known yet.
    pub fn failure_wait(&self) -> FailureWait {
        let connections = self.failure.state.lock().connections;
        FailureWait { failure: self.failure.clone(), connections }
    }

    /// Resets the QP on both sides and connects it again. All operations in flight on it end as
    /// flushed.
    pub fn reestablish(&self, control: &dyn ControlPlane) -> Result<(), Error> {
        self.qp.modify(QpChange::Reset)?;
        self.reconnect(control)
    }

    /// Connects the QP, which is in Reset, to the memory node's QP, which is reset too. No
    /// operation may be posted meanwhile.
    pub fn reconnect(&self, control: &dyn ControlPlane) -> Result<(), Error> {
        let peer = control.reset_access(self.group, Lane(self.index))?;
        self.connect(peer)
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
    #[test]
    fn queues_hold_the_requests_of_all_spare_qps() {
        for (spares, qps) in [(0, 6), (1, 12), (3, 24)] {
            let (lanes, functions, send_blocks, receives) = (3, 1, 16, 0);
            let sizes =
                AccessSizes { lanes, functions, spares, send_blocks, receives, is_lendable: false };
            let QueueSizes { cqs, send_queues } = sizes.queues(2);
            assert_eq!(send_queues, vec![16; qps]);
            assert_eq!(cqs, vec![2 * 16 * qps as u32 / 2; 2]);
            // The first lane of each group has the group's CQ, the others share one.
            let QueueSizes { cqs, .. } = AccessSizes { is_lendable: true, ..sizes }.queues(2);
            let each = 2 * 16 * (1 + u32::from(spares));
            assert_eq!(cqs, [each, each, 4 * each]);
        }
    }

    /// A missing answer is never hidden by another failure, and a connected QP has no failure.
    #[test]
    fn failure_is_kept_until_the_qp_is_connected() {
        let wait = |failure: &Arc<Failure>| {
            let connections = failure.state.lock().connections;
            FailureWait { failure: failure.clone(), connections }
        };
        use Status::{RemoteAccess, RetryExceeded};
        for (noted, kept) in [
            (&[RemoteAccess][..], RemoteAccess),
            (&[RemoteAccess, RetryExceeded], RetryExceeded),
            (&[RetryExceeded, RemoteAccess], RetryExceeded),
        ] {
            let failure = Arc::new(Failure::default());
            assert_eq!(wait(&failure).until_known(), None, "after the time limit");
            let before = wait(&failure);
            noted.iter().for_each(|status| failure.note(*status));
            assert_eq!(wait(&failure).until_known(), Some(kept));
            failure.clear();
            failure.note(RemoteAccess);
            assert_eq!(before.until_known(), None, "the failure of another connection");
        }
    }

    #[test]
    fn waiting_thread_learns_the_status_from_another_thread() {
        let failure = Arc::new(Failure::default());
        let wait = FailureWait { failure: failure.clone(), connections: 0 };
        let status = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait.until_known());
            failure.note(Status::RemoteAccess);
            waiting.join().expect("it waits")
        });
        assert_eq!(status, Some(Status::RemoteAccess));
    }
}
