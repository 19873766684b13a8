//! Resources that a stopped chain holds.

use scheme::index::EntryId;

/// Resources that a stopped worker has taken and not returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InFlight {
    /// An entry that is not in the free queue and has no owner, or is about to lose its owner.
    pub entry: Option<EntryId>,
    /// Permits to return, besides the permit of `entry`.
    pub permits: u32,
    /// Receives to add to the push queue, besides the receive of `entry`.
    pub receives: u32,
}
