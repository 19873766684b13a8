//! Where a QP stands while it does not execute: in its function's row of ready QPs, or in the row of
//! those that wait for a CQ's count or for a receive WQE.
//!
//! A QP stands in one row at most. Rows are linked through the QPs, so that joining, leaving and
//! appending one row to another take the same time however long they are: no function can make
//! another one's WQE pay for a walk over its QPs.

use super::Core;
use crate::ids::{Cqn, Qpn};
use crate::qp::Qp;
use crate::queue::Waiting;
use crate::table::Table;

/// A row of QPs, first come first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: Qpn,
    last: Qpn,
}

/// A QP's neighbours in its row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Links {
    before: Qpn,
    after: Qpn,
}

/// The row that a QP stands in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// None.
    Nowhere,
    /// Its function's ready QPs.
    Ready,
    /// Those that wait for a CQ's count, unless all that waited there have been woken since: then its
    /// function's ready QPs.
    Count {
        /// The CQ.
        cqn: Cqn,
        /// How often its row had been woken then.
        wakes: u32,
    },
    /// Those that wait for a receive WQE of this receive queue.
    Receive(u32),
}

impl Links {
    pub const NONE: Links = Links { before: Qpn::NONE, after: Qpn::NONE };
}

impl List {
    pub const EMPTY: List = List { first: Qpn::NONE, last: Qpn::NONE };

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.first == Qpn::NONE
    }

    /// True if one QP stands in it.
    #[inline]
    pub fn has_one(&self) -> bool {
        self.first == self.last && !self.is_empty()
    }

    #[inline]
    pub fn first(&self) -> Option<Qpn> {
        (!self.is_empty()).then_some(self.first)
    }

    #[inline]
    fn push_back(&mut self, qps: &mut Table<Qp>, qpn: Qpn) {
        let before = std::mem::replace(&mut self.last, qpn);
        match qps.get_mut(before.raw()) {
            None => self.first = qpn,
            Some(last) => last.links.after = qpn,
        }
        link(qps, qpn, Links { before, after: Qpn::NONE });
    }

    /// Takes a QP out that stands in it.
    #[inline]
    fn remove(&mut self, qps: &mut Table<Qp>, qpn: Qpn) {
        let qp = qps.get_mut(qpn.raw()).expect("what stands in a row lives");
        let Links { before, after } = std::mem::replace(&mut qp.links, Links::NONE);
        match qps.get_mut(before.raw()) {
            None => self.first = after,
            Some(qp) => qp.links.after = after,
        }
        match qps.get_mut(after.raw()) {
            None => self.last = before,
            Some(qp) => qp.links.before = before,
        }
    }

    /// Moves all of `other` behind its own.
    #[inline]
    fn append(&mut self, qps: &mut Table<Qp>, other: List) {
        let Some(first) = qps.get_mut(other.first.raw()) else { return };
        first.links.before = self.last;
        match qps.get_mut(self.last.raw()) {
            None => self.first = other.first,
            Some(last) => last.links.after = other.first,
        }
        self.last = other.last;
    }
}

#[inline]
fn link(qps: &mut Table<Qp>, qpn: Qpn, links: Links) {
    qps.get_mut(qpn.raw()).expect("what joins a row lives").links = links;
}

impl Core {
    /// Puts a QP that stands nowhere into its function's row of ready QPs.
    #[inline]
    pub fn make_ready(&mut self, qpn: Qpn) {
        let qp = self.qps.get_mut(qpn.raw()).expect("what becomes ready lives");
        qp.place = Place::Ready;
        let share = qp.share;
        self.shares.of(share).ready.push_back(&mut self.qps, qpn);
        self.shares.activate(share);
    }

    /// Moves a ready QP to the back of its function's row.
    #[inline]
    pub fn requeue(&mut self, share: u32, qpn: Qpn) {
        let ready = &mut self.shares.of(share).ready;
        ready.remove(&mut self.qps, qpn);
        ready.push_back(&mut self.qps, qpn);
    }

    /// Takes the first ready QP of a function.
    pub fn take_ready(&mut self, share: u32) -> Option<Qpn> {
        let ready = &mut self.shares.of(share).ready;
        let qpn = ready.first()?;
        ready.remove(&mut self.qps, qpn);
        self.qps.get_mut(qpn.raw()).expect("what is ready lives").place = Place::Nowhere;
        Some(qpn)
    }

    /// Makes a QP wait.
    pub fn wait(&mut self, qpn: Qpn, on: Waiting) {
        // It may have been made ready while it executed.
        self.leave(qpn);
        let (list, place) = match on {
            Waiting::Count(cqn) => {
                let cq = self.cqs.get_mut(cqn.raw()).expect("the WAIT found it");
                (&mut cq.waiters, Place::Count { cqn, wakes: cq.wakes })
            }
            Waiting::Receive(n) => {
                let recv = self.recvs.get_mut(n).expect("the SEND found it");
                if !recv.managed && !recv.watched {
                    recv.watched = true;
                    self.watch.want(n, self.now_ns);
                }
                (&mut recv.waiters, Place::Receive(n))
            }
        };
        list.push_back(&mut self.qps, qpn);
        self.qps.get_mut(qpn.raw()).expect("it executes").place = place;
    }

    /// Takes a QP out of the row that it stands in.
    pub fn leave(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return };
        let list = match std::mem::replace(&mut qp.place, Place::Nowhere) {
            Place::Nowhere => return,
            Place::Ready => &mut self.shares.of(qp.share).ready,
            Place::Count { cqn, wakes } => match self.cqs.get_mut(cqn.raw()) {
                Some(cq) if cq.wakes == wakes => &mut cq.waiters,
                _ => &mut self.shares.of(qp.share).ready,
            },
            Place::Receive(n) => {
                &mut self.recvs.get_mut(n).expect("a queue outlives who waits there").waiters
            }
        };
        list.remove(&mut self.qps, qpn);
    }

    /// Makes all QPs ready that wait for this CQ, which are of its own function.
    #[inline(never)]
    pub fn wake_waiters(&mut self, cqn: Cqn) {
        let Some(cq) = self.cqs.get_mut(cqn.raw()).filter(|c| !c.waiters.is_empty()) else {
            return;
        };
        cq.wakes = cq.wakes.wrapping_add(1);
        let waiters = std::mem::replace(&mut cq.waiters, List::EMPTY);
        let share = cq.share;
        self.shares.of(share).ready.append(&mut self.qps, waiters);
        self.shares.activate(share);
    }

    /// Makes up to `most` QPs ready that wait at a receive queue.
    pub fn wake_senders(&mut self, n: u32, most: u32) {
        for _ in 0..most {
            let Some(qpn) = self.recvs.get(n).and_then(|r| r.waiters.first()) else { return };
            self.leave(qpn);
            self.schedule(qpn);
        }
    }

    /// Makes the peer of `qpn` ready if it waits for a receive WQE of `qpn`, so that it finds out what
    /// has become of that.
    pub fn wake_peer(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get(qpn.raw()) else { return };
        let (crate::qp::Peer::Local(peer), Some(n)) = (qp.peer, qp.recv) else { return };
        if self.qps.get(peer.raw()).is_some_and(|p| p.place == Place::Receive(n)) {
            self.leave(peer);
            self.schedule(peer);
        }
    }
}
