//! The interface of an allocation scheme.
//!
//! A scheme has two sides. On the memory node a [`NodeScheme`] admits compute nodes: it creates the
//! QPs that are the peers of theirs, and does the work that the scheme assigns to the CPU. On the
//! compute node a [`ClientScheme`] allocates and frees chunks with verbs alone.
//!
//! *Released* means the same in every scheme: every key of the chunk is dead, no admitted access
//! is pending, the chunk is cleared, in that order; only then may it be allocated again.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use verbs::completion::WhenIdle;
use verbs::{Key, PeerAddress, Qpn, SessionSecret};

use crate::Error;
use crate::budget::BudgetStatus;
use crate::index::EntryId;
use crate::options::Terms;
use crate::remote::token::Nonce;
use crate::remote::{RoceEnd, Route, Start};
use crate::request_queue::ManagementQp;

/// Maximum number of windows of a group, including the guard.
pub const MAX_GROUP: usize = 6;

/// Maximum number of access QPs of a group: its lanes times the functions of the memory node's NIC.
pub(crate) const QPS_MAX: u32 = 1 << 8;

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

/// A compute node's request to be admitted. It lists the numbers of the compute node's QPs, which
/// exist but are not connected yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// Management QPs, in the order that the scheme defines.
    pub management: Vec<u32>,
    /// Access QPs of each QP group: one per lane for the first function of the memory node's NIC,
    /// then one per lane for the next function, and so on.
    pub groups: Vec<Vec<u32>>,
    /// Address of the compute node's bulletin ([`bulletin`]), which the memory node writes.
    pub bulletin_addr: u64,
    /// Remote key of the bulletin.
    pub bulletin_rkey: u32,
    /// Secret of the NIC session that owns these QPs. Only from a compute node on the memory node's
    /// host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionSecret>,
    /// Port and MTU of the compute node's NIC. Only from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roce: Option<RoceEnd>,
    /// Salt from which the initial state of the QPs is derived. Only from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<Nonce>,
    /// Network path to the compute node's QPs on another host. The memory node fills it in.
    #[serde(skip)]
    pub route: Option<Route>,
    /// Initial state of the QPs of a compute node on another host. The memory node fills it in.
    #[serde(skip)]
    pub start: Start,
}

impl ConnectRequest {
    /// Address of the compute node's QP `qpn`, as the memory node's QPs must name it.
    pub fn peer(&self, qpn: u32) -> PeerAddress {
        let qpn = Qpn::new(qpn);
        self.route.map_or(qpn.into(), |route| route.peer(qpn, self.start))
    }
}

/// The memory node's answer to a [`ConnectRequest`]: the peers of the listed QPs, in the same
/// order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectReply {
    /// The compute node's number.
    pub client: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Windows of a group, including the guard.
    pub group_size: u32,
    /// Requests of each kind that the compute node may have in flight.
    pub credits: u32,
    /// Peers of the management QPs.
    pub management: Vec<u32>,
    /// Peers of the access QPs.
    pub groups: Vec<Vec<u32>>,
    /// Terms that the scheme tells this client.
    #[serde(flatten)]
    pub terms: Terms,
}

/// The bulletin: 8 bytes in the compute node's memory. The memory node's CPU writes them when its
/// free queue runs empty and when memory becomes available again (OneSidedMW §4.3, "detecting empty
/// free MW queue").
///
/// ```text
/// +0 state (be32): 0 available, 1 empty   +4 generation (be32): counts the changes
/// ```
pub mod bulletin {
    /// Free chunks exist.
    pub const AVAILABLE: u32 = 0;
    /// No chunk is free.
    pub const EMPTY: u32 = 1;
    /// Size of the bulletin in bytes.
    pub const BYTES: usize = 8;
}

/// Identity of a connection: the memory node's incarnation and the compute node's number there.
/// Because keys and QP numbers restart with each connection, a grant of an earlier connection could
/// match a current one by chance; comparing this identity detects that.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConnectionEpoch {
    /// See [`crate::protocol::NodeHello::incarnation`].
    pub incarnation: u64,
    /// The compute node's number; 0 in a grant that no connection issued.
    pub client: u32,
}

/// The right to use a chunk: its address and one key per access QP of a group.
///
/// A grant is a value, not a handle: dropping it does not free the chunk.
///
/// ```
/// # let settings = pool::Settings { donate_bytes: 8 << 20, ..pool::Settings::default() };
/// # let pool = pool::Pool::embedded(settings)?;
/// let grant = pool.allocate_blocking()?;
/// assert_eq!(grant.len, pool.chunk_bytes());
/// assert_eq!(grant.keys().len(), usize::from(pool.lanes()));
///
/// // After the free, the keys of every copy are dead.
/// pool.free_blocking(grant)?;
/// let refused = pool.write_blocking(&grant, 0, b"late");
/// assert!(matches!(refused, Err(pool::Error::Access { .. })));
/// # Ok::<(), pool::Error>(())
/// ```
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
    connection: ConnectionEpoch,
    keys: [Key; MAX_GROUP],
    lanes: u8,
}

impl Grant {
    /// A grant with `keys`, one per lane, that is tied to no connection. Only the memory node's NIC
    /// checks a grant that is made by hand.
    pub fn new(addr: u64, len: u64, entry: EntryId, group: GroupId, keys: &[Key]) -> Self {
        assert!(keys.len() <= MAX_GROUP, "a group has at most {MAX_GROUP} windows");
        let mut padded = [Key::default(); MAX_GROUP];
        padded[..keys.len()].copy_from_slice(keys);
        let (connection, function, lanes) = (ConnectionEpoch::default(), 0, keys.len() as u8);
        Self { addr, len, entry, group, function, connection, keys: padded, lanes }
    }

    /// The same grant with keys of another function of the memory node's NIC.
    pub fn in_function(self, function: u8) -> Self {
        Self { function, ..self }
    }

    /// The same grant, tied to the connection `connection`.
    pub(crate) fn with_connection(self, connection: ConnectionEpoch) -> Self {
        Self { connection, ..self }
    }

    /// False if another connection issued the grant.
    #[inline]
    pub(crate) fn belongs_to(&self, connection: ConnectionEpoch) -> bool {
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

/// State of a memory node's scheme.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Name of the scheme.
    pub scheme: String,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Functions of the memory node's NIC that contain windows; 0 in a scheme that supports only
    /// one.
    #[serde(default)]
    pub functions: u32,
    /// Number of chunks.
    pub chunks: u64,
    /// Chunks that are free.
    pub free: u64,
    /// Compute nodes that are connected.
    pub clients: u64,
    /// Departed compute nodes whose chunks are still being reclaimed.
    #[serde(default)]
    pub leaving: u64,
    /// Allocations that the NIC executed.
    pub allocations_nic: u64,
    /// Allocations that the memory node's CPU executed.
    pub allocations_cpu: u64,
    /// Frees that the NIC executed.
    pub frees_nic: u64,
    /// Frees that the memory node's CPU executed.
    pub frees_cpu: u64,
    /// Refused requests.
    pub refused: u64,
    /// Budgets, if any are set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetStatus>,
}

/// Cost of the allocations of a compute node that allocates by CAS. All zero in other schemes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CasStats {
    /// Blocks allocated.
    pub allocations: u64,
    /// Round trips of all allocation attempts. Verbs that are posted together count as one round
    /// trip.
    pub round_trips: u64,
    /// CASes attempted as part of an allocation: to take a block, to write the log, and to return a
    /// partial block.
    pub cas: u64,
    /// Failed CASes: the word did not hold the expected value.
    pub cas_retries: u64,
    /// Maximum number of failed CASes in one allocation attempt.
    pub cas_retries_max: u64,
}

impl CasStats {
    /// The values as named counters.
    pub fn counters(&self) -> Vec<Counter> {
        vec![
            ("allocations", self.allocations),
            ("round_trips", self.round_trips),
            ("cas", self.cas),
            ("cas_retries", self.cas_retries),
            ("cas_retries_max", self.cas_retries_max),
        ]
    }
}

impl From<&[Counter]> for CasStats {
    /// The values of the counters of these names; 0 for a name that is not listed.
    fn from(counters: &[Counter]) -> Self {
        let get = |name| counters.iter().find(|(n, _)| *n == name).map_or(0, |(_, value)| *value);
        Self {
            allocations: get("allocations"),
            round_trips: get("round_trips"),
            cas: get("cas"),
            cas_retries: get("cas_retries"),
            cas_retries_max: get("cas_retries_max"),
        }
    }
}

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
}

/// Event source that wakes the memory node's CPU when there is work.
pub trait CpuEvents: Send + Sync {
    /// Sleeps until an event arrives (returns true, possibly spuriously) or `timeout` has passed
    /// (false).
    fn wait(&self, timeout: Duration) -> Result<bool, Error>;

    /// Wakes a thread that is in [`CpuEvents::wait`], from another thread.
    fn wake(&self);
}

/// Operations on the chunks of a scheme.
pub enum Access<'a> {
    /// READ, WRITE and atomics over the access QPs, with the keys of a grant.
    OneSided,
    /// Whole pages only. A grant names a page that the memory node looks up at each access.
    Paged(&'a dyn PageAccess),
}

/// Access by whole pages.
///
/// These futures must be polled to completion; [`crate::Pool`] ensures this when a caller drops one
/// early.
pub trait PageAccess: Send + Sync {
    /// Bytes of a page.
    fn page_bytes(&self) -> usize;

    /// Reads a page. A page that was never written reads as zeros.
    fn read_page<'a>(&'a self, page: &'a Grant, into: &'a mut [u8]) -> Answer<'a, ()>;

    /// Writes a page. The first write allocates memory for it.
    fn write_page<'a>(&'a self, page: &'a Grant, from: &'a [u8]) -> Answer<'a, ()>;
}

/// The future of a request.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A named value that a client counts.
pub type Counter = (&'static str, u64);

/// The error for a request of `bytes` that exceeds `most`, the largest allocation.
pub(crate) fn too_large(bytes: u64, most: u64, has_sizes: bool) -> Error {
    let why = match has_sizes {
        true => format!("the largest block of this pool has {most}; allocate several"),
        false => format!(
            "this pool's scheme has chunks of {most} bytes only; serve with larger ones (--chunk), \
             or with scheme finemem"
        ),
    };
    Error::Setting { setting: "bytes", value: bytes.to_string(), why }
}

/// The error for a memory node whose scheme this client does not have.
pub(crate) fn unknown(name: &str) -> Error {
    Error::Protocol {
        attempt: "connecting to a memory node".into(),
        why: format!("its scheme {name} is unknown here: use the same version of granary"),
    }
}

/// The compute node's side of a scheme.
///
/// A client is connected in three steps, because the QPs of either side need the numbers of their
/// peers: the scheme's module creates a client whose management QPs are not connected, the memory
/// node admits the numbers of [`ClientScheme::management`], and [`ClientScheme::connect`] connects
/// them.
pub trait ClientScheme: Send + Sync {
    /// Allocates a chunk whose keys are for the QPs of `group`.
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant>;

    /// Allocates at least `bytes`. A scheme with a single size refuses more than one chunk holds.
    fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Answer<'_, Grant> {
        Box::pin(async move {
            let grant = self.allocate(group).await?;
            if bytes <= grant.len {
                return Ok(grant);
            }
            self.free(&grant).await?;
            Err(too_large(bytes, grant.len, false))
        })
    }

    /// Frees a chunk. When this returns, the chunk is released or in quarantine:
    /// [`SchemeInfo::release`](crate::SchemeInfo::release).
    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()>;

    /// Operations on the chunks.
    fn access(&self) -> Access<'_> {
        Access::OneSided
    }

    /// Calls `each` with the management QPs, in the scheme's order.
    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp));

    /// Reads the memory node's terms, before the QPs are connected for the first time.
    fn accept(&self, _terms: &ConnectReply) -> Result<(), Error> {
        Ok(())
    }

    /// Completes what failed requests have left open, once the management QPs are re-established.
    /// If the call itself fails, it is repeated at once or with the next request.
    fn settle(&self) -> Answer<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    /// What this client counts.
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }

    /// Numbers of the management QPs that are not access QPs, for [`ConnectRequest::management`].
    fn management(&self) -> Vec<Qpn> {
        let mut qpns = Vec::new();
        self.each_queue(&mut |queue| {
            if !queue.is_shared() {
                qpns.push(queue.qpn());
            }
        });
        qpns
    }

    /// True if a management QP is in the error state. Requests are then refused until the QPs are
    /// re-established: [`ClientScheme::reset`], [`NodeScheme::reset_management`] on the other side,
    /// then [`ClientScheme::connect`].
    fn is_broken(&self) -> bool {
        let mut broken = false;
        self.each_queue(&mut |queue| broken |= queue.is_broken());
        broken
    }

    /// True from a [`ClientScheme::reset`] until the [`ClientScheme::connect`] that follows. That
    /// period may be long, because the memory node may refuse to re-establish the QPs for a while.
    /// A request posted to a QP in Reset would never complete. Cheap, because it is called before
    /// each request.
    fn is_closed(&self) -> bool {
        let mut closed = false;
        self.each_queue(&mut |queue| closed |= queue.is_closed());
        closed
    }

    /// Takes the management QPs to Reset. Requests in flight end with an error that leaves open
    /// whether they were executed.
    fn reset(&self) -> Result<(), Error> {
        self.try_each(&mut |queue| queue.reset())
    }

    /// Takes the management QPs to Error: requests in flight end with an error.
    fn break_management(&self) -> Result<(), Error> {
        self.try_each(&mut |queue| queue.break_off())
    }

    /// Registers `look`, which a waiting request calls periodically while its answer is overdue.
    fn when_idle(&self, look: &WhenIdle) {
        self.each_queue(&mut |queue| queue.when_idle(look));
    }

    /// Connects the management QPs with their peers, which are listed in the scheme's order.
    fn connect(&self, peers: &[PeerAddress]) -> Result<(), Error> {
        let own = self.management().len();
        if peers.len() != own {
            return Err(Error::Protocol {
                attempt: "connecting the management QPs".into(),
                why: format!("the memory node named {} peers for {own} QPs", peers.len()),
            });
        }
        let mut peers = peers.iter().copied();
        self.try_each(&mut |queue| {
            let peer = if queue.is_shared() { None } else { peers.next() };
            queue.connect(peer)
        })
    }

    /// Calls `each` with the management QPs until one fails.
    fn try_each(
        &self,
        each: &mut dyn FnMut(&dyn ManagementQp) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        self.each_queue(&mut |queue| {
            if result.is_ok() {
                result = each(queue);
            }
        });
        result
    }
}
