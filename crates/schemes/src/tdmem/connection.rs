//! The memory node's state for one compute node.

use scheme::client_table::{AccessQps, ClientEntry, PeerQp};
use scheme::{Error, Start};
use verbs::{Nic, QpChange, QueuePair, Remote};

use super::layout::Owner;

/// A compute node, as the memory node sees it.
pub struct Connection<N: Nic> {
    /// Its number as an owner of pages and slots.
    pub owner: Owner,
    /// The QP for its commands and loads. The QP's tag names the owner.
    pub management: PeerQp<N>,
    /// Access QPs, by group and lane. No key grants access over them; they carry bulletins only.
    pub access: AccessQps<N>,
    /// Address of its bulletin.
    pub bulletin: Remote,
    /// True once the compute node has departed.
    pub leaving: bool,
}

impl<N: Nic> Connection<N> {
    /// Ends all access. After that, no command of the compute node is executed any more, so that
    /// its pages can be freed, and its number can get a new user.
    pub fn shut_down(&mut self) -> Result<(), Error> {
        self.management.qp.modify(QpChange::Error)?;
        self.access.shut_down()?;
        self.leaving = true;
        Ok(())
    }
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
        self.management.set_start(start);
    }

    fn is_open(&self) -> Result<bool, Error> {
        self.management.is_ready()
    }

    fn is_leaving(&self) -> bool {
        self.leaving
    }
}
