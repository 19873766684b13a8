//! An intrusive doubly linked list of QPs.
//!
//! The links are stored in the QPs, so that insertion, removal and concatenation take constant time
//! and allocate no memory. Otherwise a function with many QPs could slow down the WQEs of other
//! functions. A QP is in at most one list.

use crate::table::Table;
use verbs::{Cqn, Qpn};

/// A table entry that can be in a list.
pub(crate) trait Linked {
    /// The links to the neighbours in its list.
    fn links(&mut self) -> &mut Links;
}

/// A list of QPs, in order of arrival.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpList {
    first: Qpn,
    last: Qpn,
}

/// Links of a QP to its neighbours in a list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Links {
    before: Qpn,
    after: Qpn,
}

/// The list that contains a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InList {
    /// No list.
    None,
    /// The ready QPs of its function.
    Ready,
    /// The waiters of a CQ; or, if all these waiters have been woken since, the ready QPs of its
    /// function.
    CqWaiters {
        /// The CQ.
        cqn: Cqn,
        /// The CQ's count of wake-ups when the QP was inserted.
        wakes: u32,
    },
    /// The waiters of a receive queue.
    RecvWaiters(u32),
}

impl Links {
    pub const NONE: Links = Links { before: Qpn::NONE, after: Qpn::NONE };
}

impl QpList {
    pub const EMPTY: QpList = QpList { first: Qpn::NONE, last: Qpn::NONE };

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.first == Qpn::NONE
    }

    /// True if the list contains exactly one QP.
    #[inline]
    pub fn has_one(&self) -> bool {
        self.first == self.last && !self.is_empty()
    }

    #[inline]
    pub fn first(&self) -> Option<Qpn> {
        (!self.is_empty()).then_some(self.first)
    }

    #[inline]
    pub fn push_back<T: Linked>(&mut self, nodes: &mut Table<T>, qpn: Qpn) {
        let before = std::mem::replace(&mut self.last, qpn);
        match nodes.get_mut(before.raw()) {
            None => self.first = qpn,
            Some(last) => last.links().after = qpn,
        }
        link(nodes, qpn, Links { before, after: Qpn::NONE });
    }

    /// Removes a QP that the list contains.
    #[inline]
    pub fn remove<T: Linked>(&mut self, nodes: &mut Table<T>, qpn: Qpn) {
        let qp = nodes.get_mut(qpn.raw()).expect("a QP in a list exists");
        let Links { before, after } = std::mem::replace(qp.links(), Links::NONE);
        match nodes.get_mut(before.raw()) {
            None => self.first = after,
            Some(qp) => qp.links().after = after,
        }
        match nodes.get_mut(after.raw()) {
            None => self.last = before,
            Some(qp) => qp.links().before = before,
        }
    }

    /// Appends all QPs of `other`.
    #[inline]
    pub fn append<T: Linked>(&mut self, nodes: &mut Table<T>, other: QpList) {
        let Some(first) = nodes.get_mut(other.first.raw()) else { return };
        first.links().before = self.last;
        match nodes.get_mut(self.last.raw()) {
            None => self.first = other.first,
            Some(last) => last.links().after = other.first,
        }
        self.last = other.last;
    }
}

#[inline]
fn link<T: Linked>(nodes: &mut Table<T>, qpn: Qpn, links: Links) {
    *nodes.get_mut(qpn.raw()).expect("a QP to insert exists").links() = links;
}
