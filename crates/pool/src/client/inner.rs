//! What the clones of a pool share: the QPs, the scheme, and how they are re-established when they break.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use fabric::{MemoryRegion, Nic, QpChange, Qpn, QueuePair};
use parking_lot::Mutex;

use super::Options;
use super::buffer::Bounce;
use super::control::ControlPlane;
use super::embedded::Embedded;
use super::operation::{Hold, TRIES};
use super::path::{Group, Path, Posted, Way, Work};
use crate::any::AnyClient;
use crate::protocol::Welcome;
use crate::remote::route::beside;
use crate::scheme::{Admitted, ClientScheme, Era, Grant, GroupId};
use crate::{Error, Remote};

/// What all clones of a [`Pool`](super::Pool) share.
pub(super) struct Inner<N: Nic> {
    pub(super) nic: N,
    pub(super) pd: N::Pd,
    pub(super) scheme: AnyClient<N>,
    pub(super) groups: Vec<Group<N>>,
    pub(super) bounce: Arc<Bounce<N>>,
    pub(super) bulletin: N::Mr,
    /// The bulletin's generation when an allocation found no chunk last.
    pub(super) seen_empty: AtomicU32,
    pub(super) terms: Admitted,
    pub(super) welcome: Welcome,
    /// What grants of this connection are marked with.
    pub(super) era: Era,
    pub(super) options: Options,
    pub(super) origin: Origin,
    /// Chunks that are held or asked for, where that is limited.
    pub(super) held: AtomicU64,
    pub(super) max_inline: usize,
    /// Operations that are posted with one doorbell at most.
    pub(super) burst: usize,
    /// Taken by who re-establishes the management QPs; how often that was done.
    pub(super) repair: Mutex<u64>,
    /// What is asked of the memory node while its answers do not come.
    pub(super) watch: Mutex<Watch>,
    pub(super) abandoned: Mutex<Vec<Abandoned<N>>>,
    pub(super) allocations: AtomicU64,
    pub(super) frees: AtomicU64,
    pub(super) empty: AtomicU64,
    pub(super) control: Box<dyn ControlPlane>,
}

/// How a connection was made, and can be made again.
pub(super) enum Origin {
    Socket(PathBuf),
    Remote(Remote),
    Embedded(Arc<Embedded>),
    /// By who called [`Pool::over`].
    Given,
}

/// How often what a failed request may have got is looked for at once.
const RECALLS: u32 = 4;

/// So often nothing has come, [`Completer::IDLE`](fabric::completion::Completer::IDLE) each, until the memory
/// node is asked whether it still answers.
const LOOKS: u32 = 10;

/// See [`Inner::look_after_management`].
#[derive(Default)]
pub(super) struct Watch {
    looks: u32,
    /// A question is on its way; it was asked when the management QPs had been re-established so often.
    asked_after: Option<u64>,
}

/// An operation that nobody waits for any more, and what it moves bytes in or out of.
pub(super) struct Abandoned<N: Nic> {
    posted: Posted<N>,
    _hold: Box<dyn Any + Send + Sync>,
}

impl<N: Nic> Inner<N> {
    pub(super) fn connect(&mut self) -> Result<(), Error> {
        let terms = &self.terms;
        let fits = terms.groups.len() == self.groups.len()
            && terms.groups.iter().zip(&self.groups).all(|(t, g)| t.len() == g.paths.len());
        if !fits {
            return Err(Error::Protocol {
                attempt: "being admitted".into(),
                why: "the memory node named other QPs than it was asked for".into(),
            });
        }
        let peers: Vec<Vec<Qpn>> =
            terms.groups.iter().map(|g| g.iter().map(|q| Qpn::new(*q)).collect()).collect();
        for (peers, group) in peers.iter().zip(&self.groups) {
            for (peer, path) in peers.iter().zip(&group.paths) {
                path.connect(self.control.peer(peer.raw()))?;
            }
        }
        self.scheme.name_access(peers);
        self.scheme.admitted(&self.terms);
        let peers: Vec<_> = terms.management.iter().map(|q| self.control.peer(*q)).collect();
        self.scheme.connect(&peers)
    }

    /// Allocates a chunk, or `bytes`.
    pub(super) async fn allocate_in(
        &self,
        group: GroupId,
        bytes: Option<u64>,
    ) -> Result<Grant, Error> {
        self.check_group(group)?;
        self.reopen_management()?;
        self.hold()?;
        let mut result = self.ask_for(group, bytes).await;
        for _ in 0..TRIES {
            // Without separation somebody's bad access has broken it; what was not delivered is taken
            // back.
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
            Err(Error::OutOfMemory { .. }) => {
                self.held.fetch_sub(1, Ordering::Relaxed);
                self.seen_empty.store(self.bulletin().1, Ordering::Relaxed);
                self.empty.fetch_add(1, Ordering::Relaxed);
            }
            Err(_) => {
                self.held.fetch_sub(1, Ordering::Relaxed);
                self.mend().await?;
            }
        }
        result.map(|grant| grant.of(self.era))
    }

    async fn ask_for(&self, group: GroupId, bytes: Option<u64>) -> Result<Grant, Error> {
        match bytes {
            None => self.scheme.allocate(group).await,
            Some(bytes) => self.scheme.allocate_bytes(group, bytes).await,
        }
    }

    pub(super) async fn free(&self, grant: &Grant) -> Result<(), Error> {
        self.check_of(grant, "free")?;
        self.check_group(grant.group)?;
        self.reopen_management()?;
        let mut result = self.scheme.free(grant).await;
        for _ in 0..TRIES {
            if !self.is_broken_by_access(&result) {
                break;
            }
            self.repair_management()?;
            // Whether it was executed is open: then it is not ours any more.
            result = match self.scheme.free(grant).await {
                Err(Error::NotYours { .. }) => Ok(()),
                other => other,
            };
        }
        match &result {
            Ok(()) => {
                self.frees.fetch_add(1, Ordering::Relaxed);
                self.held.fetch_sub(1, Ordering::Relaxed);
            }
            Err(Error::NotYours { .. }) => {}
            Err(_) => self.mend().await?,
        }
        result
    }

    /// Re-establishes the management QPs after a request has failed, and has the scheme give back what it may
    /// have got. That may break them again; who waits for the error of his request does not wait for long.
    async fn mend(&self) -> Result<(), Error> {
        for _ in 0..RECALLS {
            self.repair_management()?;
            if self.scheme.recall().await.is_ok() {
                break;
            }
        }
        self.repair_management()
    }

    pub(super) fn is_broken_by_access<T>(&self, result: &Result<T, Error>) -> bool {
        !self.welcome.separation && matches!(result, Err(Error::ManagementBroken { .. }))
    }

    /// Counts a chunk that is asked for; an error if the memory node would end the management
    /// connection for it.
    pub(super) fn hold(&self) -> Result<(), Error> {
        let held = self.held.fetch_add(1, Ordering::Relaxed);
        let Some(budget) = self.welcome.budget_chunks.filter(|budget| held >= *budget) else {
            return Ok(());
        };
        self.held.fetch_sub(1, Ordering::Relaxed);
        Err(Error::OverBudget {
            attempt: "allocating a chunk".into(),
            why: format!(
                "this compute node holds {held} chunks and may hold {budget}: free some, or have the \
                 operator raise --budget-chunks"
            ),
            retry_after: Duration::ZERO,
        })
    }

    /// An error if a grant is of another connection.
    #[inline]
    pub(super) fn check_of(&self, grant: &Grant, op: &'static str) -> Result<(), Error> {
        match grant.is_of(self.era) {
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

    /// What the bulletin says: state and generation.
    pub(super) fn bulletin(&self) -> (u32, u32) {
        let both = self.bulletin.memory().load_be64(0);
        ((both >> 32) as u32, both as u32)
    }

    /// Asks again where the memory node has refused to re-establish the management QPs.
    #[inline]
    pub(super) fn reopen_management(&self) -> Result<(), Error> {
        if self.scheme.is_closed() { self.repair_management() } else { Ok(()) }
    }

    /// Re-establishes the management QPs if one of them is broken.
    #[cold]
    pub(super) fn repair_management(&self) -> Result<(), Error> {
        let mut repairs = self.repair.lock();
        if !self.scheme.is_broken() {
            return Ok(());
        }
        *repairs += 1;
        if !self.welcome.separation {
            return self.reset_everything(None);
        }
        self.scheme.reset()?;
        self.scheme.connect(&self.control.reset_management()?)
    }

    /// Nothing has come for a while, although somebody waits. An answer that the memory node does not send any
    /// more is never missed by the NICs: what was asked has arrived and was acknowledged. A memory node on another
    /// host that has ended the management connection, or whose side of it broke, cannot say so over it:
    /// it is asked, and then who waits is told. Never waits itself.
    pub(super) fn look_after_management(&self) {
        let Some(mut watch) = self.watch.try_lock() else { return };
        // Whoever holds it re-establishes them just now.
        let Some(repairs) = self.repair.try_lock() else { return };
        if watch.looks < LOOKS {
            watch.looks += 1;
            return;
        }
        let asked_after = *watch.asked_after.get_or_insert(*repairs);
        let Some(open) = self.control.management_is_open() else { return };
        *watch = Watch::default();
        if !open && asked_after == *repairs {
            // What cannot be taken to Error is in Reset, and has nothing in flight.
            let _ = self.scheme.break_management();
        }
    }

    /// Posts operations with one doorbell. A QP that could not be re-established the last time is so first: or who asks hears
    /// why it cannot be, rather than that it is not ready.
    pub(super) fn post(
        &self,
        group: GroupId,
        way: Way,
        works: &[Work<'_>],
    ) -> Result<Posted<N>, Error> {
        match self.group(group).post(way, works) {
            Err(Error::Verbs(fabric::Error::NotReady { .. })) => {
                let path = self.group(group).path(way);
                let epoch = *path.epoch().read();
                self.recover(path, epoch)?;
                self.group(group).post(way, works)
            }
            posted => posted,
        }
    }

    /// Re-establishes an access QP after work that was posted in `epoch` failed, unless that was done
    /// already.
    pub(super) fn recover(&self, path: &Path<N>, epoch: u64) -> Result<(), Error> {
        if self.welcome.separation {
            return path.recover(epoch, &*self.control);
        }
        let mut repairs = self.repair.lock();
        *repairs += 1;
        self.reset_everything(Some((path, epoch)))
    }

    /// Without separation the access QPs are where chunks are allocated, and are re-established with
    /// the chains: all of them, unless the one that failed was so already. What is in flight on
    /// any of them ends as flushed.
    #[cold]
    pub(super) fn reset_everything(&self, failed: Option<(&Path<N>, u64)>) -> Result<(), Error> {
        let paths = || self.groups.iter().flat_map(|g| &g.paths);
        if failed.is_some_and(|(path, epoch)| *path.epoch().read() != epoch) {
            return Ok(());
        }
        let mut epochs: Vec<_> = paths().map(|path| path.epoch().write()).collect();
        self.scheme.reset()?;
        for path in paths() {
            path.qp().modify(QpChange::Reset)?;
        }
        let peers = self.control.reset_management()?;
        for (path, qpn) in paths().zip(self.terms.groups.iter().flatten()) {
            let qpn = Qpn::new(*qpn);
            path.connect(peers.first().map_or(qpn.into(), |peer| beside(*peer, qpn)))?;
        }
        self.scheme.connect(&peers)?;
        epochs.iter_mut().for_each(|epoch| **epoch += 1);
        Ok(())
    }

    /// Keeps what an operation uses that nobody waits for, until it has ended.
    pub(super) fn abandon(&self, posted: Posted<N>, hold: Hold<'_, N>) {
        let hold: Box<dyn Any + Send + Sync> = match hold {
            Hold::Buffer(buffer) => Box::new(buffer.clone()),
            Hold::Place(place) => Box::new(place),
            Hold::Nothing => return,
        };
        let mut abandoned = self.abandoned.lock();
        abandoned.retain_mut(|a| !has_ended(&mut a.posted));
        abandoned.push(Abandoned { posted, _hold: hold });
    }
}

fn has_ended<N: Nic>(posted: &mut Posted<N>) -> bool {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Waker};
    let cx = &mut Context::from_waker(Waker::noop());
    Pin::new(&mut posted.pending).poll(cx).is_ready()
}

impl<N: Nic> Drop for Inner<N> {
    fn drop(&mut self) {
        // A memory node that is gone has nothing of ours any more.
        let _ = self.control.goodbye();
    }
}
