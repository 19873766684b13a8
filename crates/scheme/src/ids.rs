//! Names of clients, groups and lanes.

use serde::{Deserialize, Serialize};

/// Maximum number of windows of a group, including the guard.
pub const MAX_GROUP: usize = 6;

/// Maximum number of access QPs of a group: its lanes times the functions of the memory node's NIC.
pub const QPS_MAX: u32 = 1 << 8;

/// Number of a compute node, assigned by its memory node. Never 0, which means "no owner" in
/// `owner_id`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ClientId(pub u32);

/// Index of a QP group of a compute node (OneSidedMW §4.1; one per core, §5.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct GroupId(pub u16);

/// Index of an access QP of a group within one function of the memory node's NIC. The lane selects
/// the path of a request (OneSidedMW §5.1: synchronous requests on one lane, prefetch and
/// write-back on another).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Lane(pub u8);

/// The QPs of a compute node that are re-established in one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpSet {
    /// The management QPs. In scheme `onesidedmw` without separation: all QPs.
    Management,
    /// One access QP.
    Access(GroupId, Lane),
}
