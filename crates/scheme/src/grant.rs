//! Grants: the right to use a chunk.

use std::time::Duration;

use verbs::Key;

use crate::ids::{GroupId, Lane, MAX_GROUP};
use crate::index::EntryId;
use crate::lease::Right;

/// Identity of a connection: the memory node's incarnation and the compute node's number there.
/// Because keys and QP numbers restart with each connection, a grant of an earlier connection could
/// match a current one by chance; comparing this identity detects that.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConnectionEpoch {
    /// Random number of this start of the memory node.
    pub incarnation: u64,
    /// The compute node's number; 0 in a grant that no connection issued.
    pub client: u32,
}

/// The right to use a chunk: its address and one key per access QP of a group.
///
/// A grant is a value, not a handle: dropping it does not free the chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Address of the chunk at the memory node.
    pub addr: u64,
    /// Length of the chunk in bytes.
    pub len: u64,
    /// The chunk's entry in the memory node's table, by which a free names it.
    pub entry: EntryId,
    /// The QP group whose QPs may use it.
    pub group: GroupId,
    /// Function of the memory node's NIC that has the keys. Requests use the QPs of that function.
    pub function: u8,
    /// The operations that the keys open.
    pub right: Right,
    /// Time until which the compute node may use the grant, by the clock of its NIC;
    /// [`Grant::FOREVER`] for a grant without a lease.
    pub until: Duration,
    connection: ConnectionEpoch,
    keys: [Key; MAX_GROUP],
    lanes: u8,
}

impl Grant {
    /// [`Grant::until`] of a grant without a lease.
    pub const FOREVER: Duration = Duration::MAX;

    /// A grant with `keys`, one per lane, that is tied to no connection. Only the memory node's NIC
    /// checks a grant that is made by hand.
    pub fn new(addr: u64, len: u64, entry: EntryId, group: GroupId, keys: &[Key]) -> Self {
        assert!(keys.len() <= MAX_GROUP, "a group has at most {MAX_GROUP} windows");
        let mut padded = [Key::default(); MAX_GROUP];
        padded[..keys.len()].copy_from_slice(keys);
        let (connection, function, lanes) = (ConnectionEpoch::default(), 0, keys.len() as u8);
        let (right, until) = (Right::Write, Self::FOREVER);
        Self { addr, len, entry, group, function, right, until, connection, keys: padded, lanes }
    }

    /// The same grant with another right, for a lease that ends at `until`.
    pub fn leased(self, right: Right, until: Duration) -> Self {
        Self { right, until, ..self }
    }

    /// The same grant with keys of another function of the memory node's NIC.
    pub fn in_function(self, function: u8) -> Self {
        Self { function, ..self }
    }

    /// The same grant, tied to the connection `connection`.
    pub fn with_connection(self, connection: ConnectionEpoch) -> Self {
        Self { connection, ..self }
    }

    /// The connection that the grant is tied to.
    pub fn connection(&self) -> ConnectionEpoch {
        self.connection
    }

    /// False if another connection issued the grant.
    #[inline]
    pub fn belongs_to(&self, connection: ConnectionEpoch) -> bool {
        self.connection == connection || self.connection == ConnectionEpoch::default()
    }

    /// The keys, by lane.
    pub fn keys(&self) -> &[Key] {
        &self.keys[..self.lanes as usize]
    }

    /// The key for `lane`, taken modulo the number of lanes.
    pub fn key(&self, lane: Lane) -> Key {
        self.keys[lane.0 as usize % self.lanes.max(1) as usize]
    }
}
