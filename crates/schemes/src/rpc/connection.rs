//! State of one compute node at the memory node.

use scheme::client_table::{AccessQps, ClientEntry};
use scheme::index::EntryId;
use scheme::{Error, Start};
use verbs::Nic;

use crate::answers::Answers;

/// A compute node, as the memory node sees it.
pub struct Connection<N: Nic> {
    /// PD of its QPs.
    pub pd: N::Pd,
    /// Its management QP.
    pub answers: Answers<N>,
    /// Its access QPs, by group and lane.
    pub access: AccessQps<N>,
    /// Chunks still to be reclaimed, if the compute node has departed.
    pub leaving: Option<Vec<EntryId>>,
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
