//! State that the clones of a pool share: QPs and scheme, and the recovery of failed QPs.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use verbs::completion::{Completer, Source};
use verbs::executor::block_on;
use verbs::{CompletionQueue, MemoryRegion, Nic, QpChange, Qpn, QueuePair, Status};

use super::Options;
use super::access_qp::{Group, Work};
use super::buffer::Bounce;
use super::connect::Reconnect;
use super::control::ControlPlane;
use super::leases::LeaseCounts;
use super::lend::Lendable;
use super::operation::TRIES;
use super::path::{Path, PathIndex, Posted, Recovery};
use super::restore::Restorer;
use crate::protocol::NodeHello;
use crate::remote::route::sibling_peer;
use crate::{Error, Scheme};
use scheme::{Answer, ClientScheme, ConnectReply, ConnectionEpoch, Grant, GroupId};

/// State that all clones of a [`Pool`](super::Pool) share.
pub(super) struct Inner<N: Nic> {
    pub(super) nic: N,
    pub(super) pd: N::Pd,
    pub(super) scheme: Box<dyn ClientScheme>,
    /// Access is by READ, WRITE and atomics of the access QPs.
    pub(super) is_one_sided: bool,
    /// Bytes of a page, in a scheme with access by pages.
    pub(super) page_bytes: Option<usize>,
    pub(super) info: Scheme,
    pub(super) groups: Vec<Group<N>>,
    /// All completions of this connection: the groups' first.
    pub(super) sources: Vec<Source>,
    /// The QPs of all lanes but the first, if they can be lent.
    pub(super) lendable: Option<Lendable<N>>,
    pub(super) bounce: Arc<Bounce<N>>,
    pub(super) bulletin: N::Mr,
    /// Generation of the bulletin when an allocation last found no free chunk.
    pub(super) seen_empty: AtomicU32,
    pub(super) terms: ConnectReply,
    pub(super) welcome: NodeHello,
    /// Identity of this connection, stored in its grants.
    pub(super) connection: ConnectionEpoch,
    pub(super) options: Options,
    /// `None` if the caller has supplied the NIC.
    pub(super) reconnect: Option<Reconnect<N>>,
    /// Requests go over access QPs, which are re-established together with the management QPs.
    pub(super) shared: bool,
    pub(super) max_inline: usize,
    /// Maximum number of operations posted with one doorbell.
    pub(super) burst: usize,
    /// Number of times that the management QPs were re-established; locked while they are.
    pub(super) repair: Mutex<u64>,
    /// Number of times that the memory node has not answered a question.
    pub(super) silences: AtomicU64,
    /// State of the question whether the memory node still answers.
    pub(super) probe: Mutex<ManagementProbe>,
    pub(super) abandoned: Mutex<Vec<Abandoned<N>>>,
    pub(super) allocations: AtomicU64,
    pub(super) frees: AtomicU64,
    pub(super) empty: AtomicU64,
    pub(super) leases: LeaseCounts,
    pub(super) promotions: AtomicU64,
    pub(super) restorer: Restorer<N>,
    pub(super) control: Box<dyn ControlPlane>,
}

/// Maximum number of attempts to find the result of a failed request.
const RECALLS: u32 = 4;

/// Condition for repeating operations that another operation has made fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Repeat {
    /// Repeating them has the same effect as executing them once.
    Always,
    /// They were certainly not executed.
    IfNotExecuted,
    Never,
}

/// Idle periods of [`Completer::IDLE`](verbs::completion::Completer::IDLE) without a completion
/// after which the memory node is asked whether it still answers.
const IDLE_PERIODS: u32 = 10;

/// State of [`Inner::probe_management`].
#[derive(Default)]
pub(super) struct ManagementProbe {
    /// Periods in which a request waited, since the last answer.
    idle_periods: u32,
    /// End of the last period.
    counted: Option<Instant>,
    /// Set while a question is unanswered: the value of `repair` when it was sent.
    asked_at: Option<u64>,
}

/// An abandoned operation in flight, and the memory that it reads or writes.
pub(super) struct Abandoned<N: Nic> {
    posted: Posted<N>,
    _hold: Box<dyn Any + Send + Sync>,
}

impl<N: Nic> Inner<N> {
    pub(super) fn connect(&mut self) -> Result<(), Error> {
        let terms = &self.terms;
        let fits = terms.groups.len() == self.groups.len()
            && terms.groups.iter().zip(&self.groups).all(|(t, g)| t.len() == g.qps().count());
        if !fits {
            return Err(Error::Protocol {
                attempt: "being admitted".into(),
                why: "the memory node listed other QPs than requested".into(),
            });
        }
        let peers: Vec<Vec<Qpn>> =
            terms.groups.iter().map(|g| g.iter().map(|q| Qpn::new(*q)).collect()).collect();
        for (peers, group) in peers.iter().zip(&self.groups) {
            for (peer, access_qp) in peers.iter().zip(group.qps()) {
                access_qp.connect(self.control.peer(peer.raw()))?;
            }
        }
        self.scheme.accept(&self.terms)?;
        let peers: Vec<_> = terms.management.iter().map(|q| self.control.peer(*q)).collect();
        self.scheme.connect(&peers)
    }

    /// Allocates a chunk, or a block of at least `bytes`.
    pub(super) async fn allocate_in(
        &self,
        group: GroupId,
        bytes: Option<u64>,
    ) -> Result<Grant, Error> {
        self.check_group(group)?;
        self.reopen_management().await?;
        let mut result = self.ask_for(group, bytes).await;
        for _ in 0..TRIES {
            // Without separation, a failed access of another thread breaks the QP. The memory node
            // takes back a grant that was not delivered.
            if !self.is_broken_by_access(&result) {
                break;
            }
            self.repair_management()?;
            result = self.ask_for(group, bytes).await;
        }
        match &result {
            Ok(_) => {
                self.allocations.fetch_add(1, Ordering::Relaxed);
            }
            Err(Error::OutOfMemory { .. }) => self.note_empty(),
            // The next request re-establishes the management QPs.
            Err(Error::Unanswered { .. }) => {}
            Err(_) => self.recover_request().await?,
        }
        result.map(|grant| grant.with_connection(self.connection))
    }

    /// Counts an allocation that found no free memory. Later waits for memory wait for a newer
    /// bulletin.
    pub(super) fn note_empty(&self) {
        self.seen_empty.store(self.bulletin().1, Ordering::Relaxed);
        self.empty.fetch_add(1, Ordering::Relaxed);
    }

    async fn ask_for(&self, group: GroupId, bytes: Option<u64>) -> Result<Grant, Error> {
        match bytes {
            None => self.scheme.allocate(group).await,
            Some(bytes) => self.scheme.allocate_bytes(group, bytes).await,
        }
    }

    pub(super) async fn free(&self, grant: &Grant) -> Result<(), Error> {
        self.check_connection(grant, "free")?;
        self.check_group(grant.group)?;
        self.reopen_management().await?;
        let mut result = self.scheme.free(grant).await;
        for _ in 0..TRIES {
            if !self.is_broken_by_access(&result) {
                break;
            }
            self.repair_management()?;
            // The free may have been executed before the failure; `NotYours` then means success.
            result = match self.scheme.free(grant).await {
                Err(Error::NotYours { .. }) => Ok(()),
                other => other,
            };
        }
        match &result {
            Ok(()) => {
                self.frees.fetch_add(1, Ordering::Relaxed);
            }
            Err(Error::NotYours { .. } | Error::Unanswered { .. }) => {}
            Err(_) => self.recover_request().await?,
        }
        result
    }

    /// Executes a request that reads or writes a page, or bytes. Re-establishes the management QPs
    /// before it, if they are closed, and after it, if they broke.
    pub(super) async fn data_request<T>(&self, request: Answer<'_, T>) -> Result<T, Error> {
        self.reopen_management().await?;
        let result = request.await;
        if let Err(Error::ManagementBroken { .. }) = &result {
            self.recover_request().await?;
        }
        result
    }

    /// Re-establishes the management QPs after a failed request, and lets the scheme return what
    /// the request may have allocated. This may break the QPs again; the number of attempts is
    /// bounded, because the caller waits for the error.
    pub(super) async fn recover_request(&self) -> Result<(), Error> {
        for _ in 0..RECALLS {
            self.repair_management()?;
            if self.scheme.settle().await.is_ok() {
                break;
            }
        }
        self.repair_management()
    }

    pub(super) fn is_broken_by_access<T>(&self, result: &Result<T, Error>) -> bool {
        self.shared && matches!(result, Err(Error::ManagementBroken { .. }))
    }

    /// Fails if another connection issued the grant.
    #[inline]
    pub(super) fn check_connection(&self, grant: &Grant, op: &'static str) -> Result<(), Error> {
        match grant.belongs_to(self.connection) {
            true => Ok(()),
            false => Err(Error::Stale { op, what: "grant" }),
        }
    }

    #[inline]
    pub(super) fn group(&self, group: GroupId) -> &Group<N> {
        &self.groups[group.0 as usize]
    }

    pub(super) fn check_group(&self, group: GroupId) -> Result<(), Error> {
        if (group.0 as usize) < self.groups.len() {
            return Ok(());
        }
        Err(Error::Setting {
            setting: "group",
            value: group.0.to_string(),
            why: format!("this compute node has {} QP groups", self.groups.len()),
        })
    }

    /// State and generation of the bulletin.
    pub(super) fn bulletin(&self) -> (u32, u32) {
        let both = self.bulletin.memory().load_be64(0);
        ((both >> 32) as u32, both as u32)
    }

    /// Tries again to re-establish the management QPs if the memory node refused the last time, or
    /// did not answer.
    #[inline]
    pub(super) async fn reopen_management(&self) -> Result<(), Error> {
        if self.scheme.is_closed() { self.recover_request().await } else { Ok(()) }
    }

    /// Re-establishes the management QPs if one of them is broken, or late.
    #[cold]
    pub(super) fn repair_management(&self) -> Result<(), Error> {
        if self.options.defers_repair && (self.scheme.is_late() || self.scheme.is_broken()) {
            return Err(self.unanswered("using the management QPs"));
        }
        let silences = self.silences.load(Ordering::Relaxed);
        let mut repairs = self.repair.lock();
        if self.scheme.is_late() {
            // Verbs would wait for a NIC that is stopped. Of threads that wait for the lock, one
            // asks the memory node.
            if self.silences.load(Ordering::Relaxed) != silences {
                return Err(self.unanswered("using the management QPs"));
            }
            self.look()?;
        } else if !self.scheme.is_broken() {
            return Ok(());
        }
        *repairs += 1;
        if self.shared {
            return self.reset_everything(None);
        }
        self.scheme.reset()?;
        self.scheme.connect(&self.control.reset_management()?)
    }

    /// Re-establishes all QPs: see [`Pool::reestablish`](super::Pool::reestablish).
    pub(super) fn reestablish(&self) -> Result<(), Error> {
        self.control.check_alive()?;
        // A memory node that does not answer is asked once, not once for each QP.
        self.look()?;
        self.reset_paths_and_management()?;
        // If this fails, the rest is returned after the next request that fails.
        let _ = block_on(self.scheme.settle());
        Ok(())
    }

    fn reset_paths_and_management(&self) -> Result<(), Error> {
        let mut repairs = self.repair.lock();
        *repairs += 1;
        if self.shared {
            return self.reset_everything(None);
        }
        for path in self.groups.iter().flat_map(|group| &group.paths) {
            let _restoring = path.restoring().lock();
            let mut state = path.state().write();
            for access_qp in path.qps() {
                access_qp.qp().modify(QpChange::Reset)?;
            }
            path.reconnect(&mut state, &*self.control)?;
            state.advance(true);
        }
        self.scheme.reset()?;
        self.scheme.connect(&self.control.reset_management()?)
    }

    /// Asks the memory node for an answer over the control connection.
    fn look(&self) -> Result<(), Error> {
        let Err(error) = self.control.status() else { return Ok(()) };
        self.silences.fetch_add(1, Ordering::Relaxed);
        Err(error)
    }

    /// The error of an operation on QPs that are not re-established yet.
    fn unanswered(&self, attempt: &str) -> Error {
        let why = format!("{} has not answered; re-establish the connection", self.control.name());
        Error::Unanswered { attempt: attempt.to_owned(), why }
    }

    /// Sets the time limit of all waits for the memory node.
    pub(super) fn set_answer_timeout(&self, limit: Duration) {
        self.control.set_answer_timeout(limit);
        let name = self.control.name();
        let of_groups = self.groups.iter().flat_map(|group| &group.paths).map(Path::completer);
        of_groups.for_each(|completer| completer.set_limit(limit, &name));
        self.scheme.set_limit(limit, &name);
    }

    /// Checks the management connection after a request has waited for a while without a
    /// completion. Never blocks.
    ///
    /// The NICs detect a lost answer only while the memory node sends one: the request itself has
    /// arrived and was acknowledged. A memory node on another host that has closed the management
    /// connection, or whose QP has failed, cannot report that over the connection. Therefore the
    /// compute node asks over the control connection, and breaks its management QPs if the answer
    /// is "closed", so that the request fails.
    pub(super) fn probe_management(&self) {
        let Some(mut probe) = self.probe.try_lock() else { return };
        // If another thread holds the lock, it is re-establishing the QPs now.
        let Some(repairs) = self.repair.try_lock() else { return };
        let now = Instant::now();
        if probe.counted.is_some_and(|at| now.duration_since(at) < Completer::<N::Cq>::IDLE) {
            return;
        }
        probe.counted = Some(now);
        probe.idle_periods += 1;
        if probe.idle_periods <= IDLE_PERIODS {
            return;
        }
        let asked_at = *probe.asked_at.get_or_insert(*repairs);
        let Some(open) = self.control.management_is_open() else {
            let unanswered = Completer::<N::Cq>::IDLE * (probe.idle_periods - IDLE_PERIODS);
            if unanswered >= self.control.answer_timeout() {
                self.scheme.set_peer_silent(true);
            }
            return;
        };
        self.scheme.set_peer_silent(false);
        *probe = ManagementProbe::default();
        if !open && asked_at == *repairs {
            // A QP that cannot be taken to Error is in Reset and has nothing in flight.
            let _ = self.scheme.break_management();
        }
    }

    /// Posts operations with one doorbell. Re-establishes a QP first if the last attempt failed;
    /// otherwise the caller would get "not ready" instead of the reason.
    #[inline]
    pub(super) fn post<'a>(
        &self,
        group: GroupId,
        index: PathIndex,
        works: impl ExactSizeIterator<Item = &'a Work<'a>> + Clone,
    ) -> Result<Posted<N>, Error> {
        match self.group(group).post(index, works.clone()) {
            Err(Error::Verbs(verbs::Error::NotReady { .. })) if self.options.defers_repair => {
                Err(self.unanswered("posting operations"))
            }
            Err(Error::Verbs(verbs::Error::NotReady { .. })) => {
                let path = self.group(group).path(index);
                self.recover(path, path.epoch())?;
                self.group(group).post(index, works)
            }
            posted => posted,
        }
    }

    /// Makes a virtual QP usable after an operation that was posted in `epoch` failed, unless
    /// another thread has done so.
    pub(super) fn recover(&self, path: &Path<N>, epoch: u64) -> Result<(), Error> {
        if self.shared {
            let mut repairs = self.repair.lock();
            *repairs += 1;
            return self.reset_everything(Some((path, epoch)));
        }
        match path.recover(epoch, &*self.control)? {
            Recovery::Done => Ok(()),
            Recovery::Promoted => {
                self.promotions.fetch_add(1, Ordering::Relaxed);
                // Virtual time has no thread, and re-establishing the QP here would delay the
                // access that the spare QP is to make fast.
                if !N::Cq::VIRTUAL {
                    self.restorer.wake();
                }
                Ok(())
            }
            Recovery::Reset if N::Cq::VIRTUAL => self.restore(path),
            Recovery::Reset => Ok(()),
        }
    }

    /// Makes all broken QPs of a virtual QP spare QPs again.
    fn restore(&self, path: &Path<N>) -> Result<(), Error> {
        while path.restore(&*self.control)? {}
        Ok(())
    }

    /// Makes one broken QP of each virtual QP a spare QP again. Returns true if there was one.
    pub(super) fn restore_one(&self) -> bool {
        let paths = self.groups.iter().flat_map(|group| &group.paths);
        paths.filter(|path| path.restore(&*self.control).unwrap_or(false)).count() > 0
    }

    /// Makes a virtual QP usable after operations on it ended with `status`. Returns true if the
    /// operations may be reposted: another operation broke the QP, and `repeat` allows it.
    pub(super) fn may_repost(
        &self,
        path: &Path<N>,
        epoch: u64,
        status: Status,
        repeat: Repeat,
        tries: &mut u32,
    ) -> Result<bool, Error> {
        let broken_by_others = matches!(status, Status::Flushed | Status::RetryExceeded);
        if broken_by_others && self.options.defers_repair {
            return Ok(false);
        }
        self.recover(path, epoch)?;
        *tries += 1;
        let may_repeat = match repeat {
            Repeat::Always => true,
            Repeat::IfNotExecuted => status == Status::Flushed && !path.is_unanswered(epoch),
            Repeat::Never => false,
        };
        Ok(broken_by_others && may_repeat && *tries <= TRIES)
    }

    /// Re-establishes all QPs, in scheme `onesidedmw` without separation, where the access QPs
    /// carry the allocation chains. Does nothing if the failed QP was re-established already.
    /// Operations in flight on any of them end as flushed.
    #[cold]
    pub(super) fn reset_everything(&self, failed: Option<(&Path<N>, u64)>) -> Result<(), Error> {
        let paths = || self.groups.iter().flat_map(|group| &group.paths);
        let qps = || self.groups.iter().flat_map(Group::qps);
        if failed.is_some_and(|(path, epoch)| path.epoch() != epoch) {
            return Ok(());
        }
        let mut states: Vec<_> = paths().map(|path| path.state().write()).collect();
        let no_answer = |path: &Path<N>| {
            path.qps().iter().any(|qp| qp.failure() == Some(Status::RetryExceeded))
        };
        let unanswered: Vec<_> = paths().map(no_answer).collect();
        self.scheme.reset()?;
        for access_qp in qps() {
            access_qp.qp().modify(QpChange::Reset)?;
        }
        let peers = self.control.reset_management()?;
        for (access_qp, qpn) in qps().zip(self.terms.groups.iter().flatten()) {
            let qpn = Qpn::new(*qpn);
            access_qp.connect(peers.first().map_or(qpn.into(), |peer| sibling_peer(*peer, qpn)))?;
        }
        self.scheme.connect(&peers)?;
        for (state, unanswered) in states.iter_mut().zip(unanswered) {
            state.advance(unanswered);
        }
        Ok(())
    }

    /// Keeps the memory of an abandoned operation until the operation has ended.
    pub(super) fn abandon(&self, posted: Posted<N>, hold: Box<dyn Any + Send + Sync>) {
        let mut abandoned = self.abandoned.lock();
        abandoned.retain_mut(|a| !has_ended(&mut a.posted));
        abandoned.push(Abandoned { posted, _hold: hold });
    }
}

fn has_ended<N: Nic>(posted: &mut Posted<N>) -> bool {
    // An error means that the NIC is gone.
    !matches!(posted.pending.try_wait(), Ok(None))
}

impl<N: Nic> Drop for Inner<N> {
    fn drop(&mut self) {
        // If this fails, the memory node is gone and owns nothing of this compute node.
        let _ = self.control.goodbye();
    }
}
