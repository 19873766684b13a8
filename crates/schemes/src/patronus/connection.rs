//! State of one compute node at the memory node: its QPs, doors and lifetime words.

use scheme::client_table::{AccessQps, ClientEntry};
use scheme::{Error, Start};
use verbs::Nic;

use super::door::Door;
use super::lifetimes::Table;
use crate::answers::Answers;

/// A compute node, as the memory node sees it.
pub struct Connection<N: Nic> {
    /// Its management QP.
    pub answers: Answers<N>,
    /// Its access QPs and spare QPs, by group.
    pub access: AccessQps<N>,
    /// What opens its permissions.
    pub door: Door<N>,
    /// A loopback QP of the memory node in its PD, to which binds are posted. The compute node
    /// cannot break it.
    pub binder: N::Qp,
    /// Its lifetime words, unless its permissions have headers or no leases.
    pub lifetimes: Option<Table<N>>,
    /// Numbers of its requests in flight, by slot: the compute node's own numbers.
    pub numbers: Vec<u64>,
    /// Spare QPs.
    pub spares: u64,
    /// The compute node has departed: its QPs are closed.
    pub leaving: bool,
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
        self.leaving
    }
}
