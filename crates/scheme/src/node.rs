//! The memory node's side of a scheme.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::connect::{ConnectReply, ConnectRequest};
use crate::ids::{ClientId, GroupId, Lane, QpSet};
use crate::options::Terms;
use crate::route::Start;
use crate::status::NodeStatus;

/// The memory node's side of a scheme. A single control thread calls it.
pub trait NodeScheme: Any + Send {
    /// Admits a compute node: creates its peer QPs and connects them to the QPs that `request`
    /// lists.
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error>;

    /// Begins to retire a departed compute node: from now on none of its keys is valid. Later calls
    /// of [`NodeScheme::poll`] reclaim its chunks, a bounded amount of work per call, until
    /// [`NodeScheme::is_retired`] is true.
    ///
    /// # Errors
    /// The NIC refused the revocation. The compute node keeps its chunks, and the caller tries
    /// again.
    fn retire(&mut self, client: ClientId) -> Result<(), Error>;

    /// True if no resource of the compute node is left.
    fn is_retired(&self, client: ClientId) -> bool;

    /// Does the CPU's pending work: answers RPCs, repairs chains that a request broke, announces
    /// "empty" and "available" to compute nodes. Returns true if there was work.
    fn poll(&mut self) -> Result<bool, Error>;

    /// True while a compute node waits for memory, so that [`NodeScheme::poll`] must be called
    /// periodically (OneSidedMW §4.3: the CPU then watches the queue).
    fn is_watching(&self) -> bool {
        false
    }

    /// Longest time until the next call of [`NodeScheme::poll`] even if no event arrives; `None`:
    /// unlimited.
    fn next_poll(&self) -> Option<Duration> {
        None
    }

    /// Registers a compute node that saw "empty" and waits for memory. Returns true if no chunk is
    /// free: the scheme then announces "empty" to all compute nodes, and [`NodeScheme::poll`]
    /// announces "available" later. Returns false if a chunk has become free meanwhile.
    fn client_waits(&mut self, _client: ClientId) -> Result<bool, Error> {
        Ok(false)
    }

    /// Re-establishes the management QPs of a compute node whose own sides are in state Reset:
    /// takes the memory node's sides through Reset and connects them again. Grants that could not
    /// be delivered are taken back.
    ///
    /// Returns their numbers in the order of [`ConnectReply::management`]. Returns `None` while the
    /// NIC still executes requests of that connection: the caller asks again after a call of
    /// [`NodeScheme::poll`].
    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error>;

    /// True if the memory node's sides of the management QPs still execute and answer requests.
    /// Because a closed side cannot notify a compute node on another host, the compute node asks
    /// when an answer is overdue.
    fn management_is_open(&self, client: ClientId) -> Result<bool, Error>;

    /// Re-establishes an access QP of the compute node: resets the memory node's side and connects
    /// it again. Its windows stay bound. Returns the QP's number.
    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error>;

    /// Sets the initial state for the QPs in `part` of a compute node on another host, used from
    /// their next connect on. QPs outside `part` keep theirs, because other threads may
    /// re-establish them at any moment.
    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start);

    /// Event source and workers that execute the scheme's work on the memory node. Called once,
    /// when the node starts.
    fn cpu(&mut self) -> Cpu {
        Cpu::default()
    }

    /// Terms that the scheme tells every client before it is admitted.
    fn terms(&self) -> Terms {
        Terms::new()
    }

    /// Number of functions of the NIC that contain windows. A compute node has access QPs for each.
    fn functions(&self) -> u32 {
        1
    }

    /// Spare QPs of each lane, in a scheme whose keys are valid on every QP of a compute node
    /// (Patronus §5.5). A group's spare QPs follow its access QPs: the first spare of each lane,
    /// then the second of each lane.
    fn spares(&self) -> u32 {
        0
    }

    /// Address of the first chunk, as grants name it. The chunks lie one behind the other, so that
    /// the offset from this address names a place of the pool for as long as the memory node runs.
    /// `None` if a grant does not name a place, because access is by pages.
    fn first_chunk(&self) -> Option<u64>;

    /// The state of the scheme.
    fn status(&mut self) -> Result<NodeStatus, Error>;

    /// Checks that every chunk is exactly once either free or owned, as far as this can be
    /// determined while no request is in flight. The error describes the inconsistency.
    fn audit(&self) -> Result<(), Error>;
}

/// Event source and workers that execute a scheme's work on the memory node.
#[derive(Default)]
pub struct Cpu {
    /// The event source on which the CPU sleeps while [`NodeScheme::poll`] has no work. If there is
    /// one, a thread alternately calls `poll` and waits for events. A scheme that needs the CPU
    /// only while [`NodeScheme::is_watching`] has none, and no thread is started.
    pub events: Option<Arc<dyn CpuEvents>>,
    /// One [`Worker`] per core, if the scheme uses several cores; each is driven by a thread of its
    /// own. Each worker answers a part of the compute nodes, and workers run concurrently. If the
    /// list is empty, [`NodeScheme::poll`] does all work; otherwise `poll` polls each worker, even
    /// while threads drive them. Control-plane calls that concern a compute node wait until its
    /// worker's current poll ends.
    pub workers: Vec<Box<dyn Worker>>,
    /// The CPU polls on cores of its own instead of sleeping.
    pub polls: bool,
}

/// The part of a scheme that one CPU core of the memory node executes.
pub trait Worker: Send {
    /// Does this core's pending work. Returns true if there was work: the caller then calls again
    /// at once.
    fn poll(&mut self) -> Result<bool, Error>;

    /// The event source on which the core sleeps while there is no work.
    fn events(&self) -> Arc<dyn CpuEvents>;

    /// Longest time until the next call of [`Worker::poll`] even if no event arrives; `None`:
    /// unlimited.
    fn next_poll(&self) -> Option<Duration> {
        None
    }
}

/// Event source that wakes the memory node's CPU when there is work.
pub trait CpuEvents: Send + Sync {
    /// Sleeps until an event arrives (returns true, possibly spuriously) or `timeout` has passed
    /// (false).
    fn wait(&self, timeout: Duration) -> Result<bool, Error>;

    /// Wakes a thread that is in [`CpuEvents::wait`], from another thread.
    fn wake(&self);
}
