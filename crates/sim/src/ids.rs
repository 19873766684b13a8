//! Numbers of simulated objects.

/// A node of the simulated cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u16);

/// The default is a number that no node has.
impl Default for NodeId {
    fn default() -> Self {
        NodeId(u16::MAX)
    }
}
