//! Virtual QPs: a lane of a group, with spare QPs (Patronus §5.5).
//!
//! ```text
//!                     refused: epoch + 1                   re-established
//! active QP ───────────────────────────────> broken QP ─────────────────────> spare QP
//!     ^                                                                          │
//!     └──────────────────────────── promoted ────────────────────────────────────┘
//! ```
//!
//! A scheme without spare QPs has one QP for each virtual QP: it is reset in place after every
//! failure.
//!
//! **Promotion.** A refused access puts both sides of its QP into the error state. The first thread
//! that notices makes a spare QP the active one, which takes no message to the memory node. Keys
//! stay valid, because schemes with spare QPs have keys that every QP in the compute node's PD
//! opens. Operations that were flushed are reposted by their threads. The broken QP becomes a spare
//! again in the background ([`Restorer`](super::restore::Restorer)).
//!
//! **Reset in place.** Without a spare QP that is connected, the first thread that notices resets
//! the active QP on both sides, before it posts again. The same after a missing answer: the peer's
//! QP then still works, and may execute a late packet after requests on another QP. A reset ends
//! that.
//!
//! **Flushed requests.** The peer executes nothing behind a request that it refused. Behind a
//! request without an answer it may have executed requests that end as flushed here. So a flushed
//! atomic is repeated in the first case only. Flushed requests may be seen before the failed one,
//! by another thread. Therefore the completer stores the status of the failed request at the QP
//! ([`Failure`](super::access_qp::Failure)) before any thread handles it.
//!
//! `State::epoch` counts promotions and resets, so that each failure causes one only. Locks are
//! taken in the order `restoring`, `state`.
//!
//! With virtual time there is no thread. Broken QPs become spare QPs again in
//! [`Pool::restore_spares`](super::Pool::restore_spares), or when the last QP is reset in place.
//! Re-establishing them in the next access would delay exactly the access that a promotion is to
//! make fast.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;
use verbs::completion::{Completer, Pending};
use verbs::{CompletionQueue, Error as VerbsError, Nic, Status};

use super::access_qp::{AccessQp, Work};
use super::control::ControlPlane;
use crate::Error;

/// Attempts to find room in a full send queue before the thread sleeps in between.
const YIELDS: u32 = 1000;

/// Maximum number of spare QPs of a lane.
pub(super) const SPARES_MAX: u32 = 3;

/// Index of a virtual QP in its group: by function, then by lane.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct PathIndex(pub u8);

/// A virtual QP: an active QP and its spare QPs.
pub(super) struct Path<N: Nic> {
    qps: SmallVec<[AccessQp<N>; 1]>,
    /// The group's, or the one of all QPs that can be lent.
    completer: Arc<Completer<N::Cq>>,
    /// Held for reading while an operation is posted.
    state: RwLock<State>,
    /// Held while a broken QP, or every QP, is re-established.
    restoring: Mutex<()>,
}

/// State of a virtual QP.
#[derive(Default)]
pub(super) struct State {
    /// Number of promotions and resets.
    epoch: u64,
    /// First epoch behind the last one that ended without an answer of the peer.
    unanswered_before: u64,
    active: u8,
    /// Bit i: QP i has failed and is not connected again yet.
    broken: u8,
}

/// A posted operation and the epoch at that time.
pub(super) struct Posted<N: Nic> {
    pub pending: Pending<N::Cq>,
    pub epoch: u64,
}

/// How a virtual QP goes on after a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Recovery {
    /// Another thread has handled the failure.
    Done,
    /// On a spare QP. The broken QP is to be re-established.
    Promoted,
    /// On the same QP, which was reset.
    Reset,
}

/// True if a QP whose request ended with `status` has a peer in the error state, which executes
/// nothing more.
fn is_refusal(status: Option<Status>) -> bool {
    use Status::{RemoteAccess, RemoteInvalidRequest, RemoteOperation};
    matches!(status, Some(RemoteAccess | RemoteInvalidRequest | RemoteOperation))
}

/// True if the peer may have executed requests behind the one that ended with `status`, which is
/// unknown if none failed: then the QP was taken to the error state for another reason.
fn is_unanswered(status: Option<Status>) -> bool {
    matches!(status, None | Some(Status::RetryExceeded))
}

impl State {
    /// Ends the epoch. `unanswered` says that the peer may have executed requests of the epoch that
    /// end as flushed here.
    pub fn advance(&mut self, unanswered: bool) {
        self.epoch += 1;
        if unanswered {
            self.unanswered_before = self.epoch;
        }
    }

    fn is_broken(&self, qp: usize) -> bool {
        self.broken >> qp & 1 == 1
    }
}

impl<N: Nic> Path<N> {
    /// A virtual QP whose first QP is active.
    pub fn new(qps: SmallVec<[AccessQp<N>; 1]>, completer: Arc<Completer<N::Cq>>) -> Self {
        Self { qps, completer, state: RwLock::default(), restoring: Mutex::new(()) }
    }

    /// All QPs.
    pub fn qps(&self) -> &[AccessQp<N>] {
        &self.qps
    }

    /// The active QP, then the others.
    pub fn active_first(&self, state: &State) -> impl Iterator<Item = &AccessQp<N>> {
        let active = state.active as usize;
        let others = (0..self.qps.len()).filter(move |i| *i != active);
        std::iter::once(active).chain(others).map(|i| &self.qps[i])
    }

    /// Where operations complete.
    pub fn completer(&self) -> &Completer<N::Cq> {
        &self.completer
    }

    /// The state. While it is locked for writing, no operation is posted.
    pub fn state(&self) -> &RwLock<State> {
        &self.state
    }

    /// While it is locked, no other thread re-establishes a broken QP.
    pub fn restoring(&self) -> &Mutex<()> {
        &self.restoring
    }

    /// Number of promotions and resets.
    pub fn epoch(&self) -> u64 {
        self.state.read().epoch
    }

    /// True if the peer may have executed an operation that was posted in `epoch` and flushed.
    pub fn is_unanswered(&self, epoch: u64) -> bool {
        epoch < self.state.read().unanswered_before
    }

    /// Posts operations with one doorbell on the active QP: see
    /// [`Group::post`](super::access_qp::Group::post).
    #[inline]
    pub fn post<'a>(
        &self,
        works: impl ExactSizeIterator<Item = &'a Work<'a>> + Clone,
    ) -> Result<Posted<N>, Error> {
        let (mut tries, mut waited) = (0, Duration::ZERO);
        loop {
            let state = self.state.read();
            let access_qp = &self.qps[state.active as usize];
            match self.completer.submit(|id| access_qp.post(id, works.clone())) {
                Ok(pending) => return Ok(Posted { pending, epoch: state.epoch }),
                Err(VerbsError::QueueFull { .. }) => drop(state),
                Err(e) => return Err(e.into()),
            }
            self.make_room(&mut tries, &mut waited)?;
        }
    }

    /// Frees room in the send queue by polling completions, also those of other threads.
    #[cold]
    fn make_room(&self, tries: &mut u32, waited: &mut Duration) -> Result<(), Error> {
        *tries += 1;
        if *tries >= YIELDS || N::Cq::VIRTUAL {
            return Ok(self.completer.make_room(waited)?);
        }
        if self.completer.poll() > 0 {
            (*tries, *waited) = (0, Duration::ZERO);
        } else {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Goes on after an operation that was posted in `epoch` failed, unless another thread has
    /// handled that failure. All operations in flight end as flushed.
    pub fn recover(&self, epoch: u64, control: &dyn ControlPlane) -> Result<Recovery, Error> {
        let mut state = self.state.write();
        if state.epoch != epoch {
            return Ok(Recovery::Done);
        }
        let mut failure = self.qps[state.active as usize].failure();
        if failure.is_none() && !N::Cq::VIRTUAL {
            // Operations may be posted meanwhile: they end as flushed.
            let wait = self.qps[state.active as usize].failure_wait();
            drop(state);
            failure = wait.until_known();
            state = self.state.write();
            if state.epoch != epoch {
                return Ok(Recovery::Done);
            }
        }
        let active = state.active as usize;
        if is_refusal(failure)
            && let Some(spare) = self.spare(&state)
        {
            state.broken |= 1 << active;
            state.active = spare as u8;
            state.advance(false);
            return Ok(Recovery::Promoted);
        }
        self.qps[active].reestablish(control)?;
        state.advance(is_unanswered(failure));
        Ok(Recovery::Reset)
    }

    /// A spare QP that is connected.
    fn spare(&self, state: &State) -> Option<usize> {
        (0..self.qps.len()).find(|i| *i != state.active as usize && !state.is_broken(*i))
    }

    /// Re-establishes a broken QP, which is a spare QP from then on. Returns false if none is
    /// broken. Operations are posted on the active QP meanwhile.
    pub fn restore(&self, control: &dyn ControlPlane) -> Result<bool, Error> {
        if self.qps.len() == 1 {
            return Ok(false);
        }
        let _restoring = self.restoring.lock();
        let broken = self.state.read().broken;
        if broken == 0 {
            return Ok(false);
        }
        // It is not active, and only the holder of `restoring` makes it a spare QP.
        let qp = broken.trailing_zeros();
        self.qps[qp as usize].reestablish(control)?;
        self.state.write().broken &= !(1 << qp);
        Ok(true)
    }

    /// Connects all QPs, which are in Reset, to the memory node's QPs, which are reset too. The
    /// caller holds `restoring`.
    pub fn reconnect(&self, state: &mut State, control: &dyn ControlPlane) -> Result<(), Error> {
        let active = state.active as usize;
        let spares = (0..self.qps.len()).filter(|i| *i != active);
        state.broken = spares.clone().fold(0, |broken, i| broken | 1 << i);
        self.qps[active].reconnect(control)?;
        for spare in spares {
            self.qps[spare].reconnect(control)?;
            state.broken &= !(1 << spare);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::iter::once;

    use scheme::{GroupId, Lane};
    use verbs::{Key, Remote};

    use super::*;
    use crate::client::Pool;
    use crate::{Settings, schemes};

    /// Two threads may see one failure. The first one promotes a spare QP, and the second one must
    /// not take the QP that works for the broken one.
    #[test]
    fn failure_promotes_one_spare() {
        let scheme = schemes::PATRONUS;
        let settings = Settings {
            donate_bytes: 1 << 20,
            chunk_bytes: 64 << 10,
            scheme,
            ..Settings::default()
        };
        let pool = Pool::embedded(settings.with("spares", 2)).unwrap();
        let grant = pool.allocate_in_blocking(GroupId(0)).unwrap();
        let (inner, index) = (&*pool.inner, PathIndex(0));
        let (control, path) = (&*inner.control, inner.group(GroupId(0)).path(index));
        for promoted in 1..=2 {
            let place = inner.bounce.take(8).unwrap();
            let from = Remote { addr: grant.addr, rkey: Key(grant.key(Lane(0)).0 ^ 0x55) };
            let read = Work::Read { from, to: place.sge(0, 8) };
            let Posted { pending, epoch } = path.post(once(&read)).unwrap();
            let ended = path.completer().wait(pending).unwrap();
            assert_eq!(ended.status, Status::RemoteAccess);
            assert_eq!(path.recover(epoch, control).unwrap(), Recovery::Promoted);
            assert_eq!(path.recover(epoch, control).unwrap(), Recovery::Done, "the other thread");
            assert_eq!(path.state().read().broken.count_ones(), promoted);
            pool.write_blocking(&grant, 0, b"goes on").unwrap();
        }
    }

    /// Other statuses leave the peer's QP in a working state, or say nothing about it.
    #[test]
    fn only_a_refusal_of_the_peer_promotes() {
        use Status::*;
        for status in [RemoteAccess, RemoteInvalidRequest, RemoteOperation] {
            assert!(is_refusal(Some(status)) && !is_unanswered(Some(status)), "{status}");
        }
        for status in [RetryExceeded, RnrRetryExceeded, LocalProtection, LocalLength, Other(0xee)] {
            assert!(!is_refusal(Some(status)), "{status}");
        }
        assert!(!is_refusal(None));
        assert!(is_unanswered(None) && is_unanswered(Some(RetryExceeded)));
    }

    #[test]
    fn epochs_without_an_answer_are_remembered() {
        let mut state = State::default();
        for unanswered in [false, true, false, false] {
            state.advance(unanswered);
        }
        assert_eq!((state.epoch, state.unanswered_before), (4, 2));
    }
}
