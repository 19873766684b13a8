//! State of one compute node at the memory node.

use scheme::client_table::{AccessQps, ClientEntry};
use scheme::{Error, Start};
use verbs::Nic;

use super::table::Freed;
use crate::answers::Answers;

/// A compute node, as the memory node sees it.
pub struct Connection<N: Nic> {
    /// Its management QP.
    pub answers: Answers<N>,
    /// Replies with data that are too long to be inline, one for each request in flight.
    pub replies: N::Mr,
    /// Its access QPs. There is no key that they could use.
    pub access: AccessQps<N>,
    /// The compute node has departed: its objects that are not cleared yet.
    pub leaving: Option<Vec<Freed>>,
}

impl<N: Nic> ClientEntry for Connection<N> {
    type Nic = N;

    fn access(&self) -> &AccessQps<N> {
        &self.access
    }

    fn access_mut(&mut self) -> &mut AccessQps<N> {
        &mut self.access
    }

    fn set_management_start(&mut self, start: Start) {
        self.answers.management.set_start(start);
    }

    fn is_open(&self) -> Result<bool, Error> {
        self.answers.is_open()
    }

    fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }
}
