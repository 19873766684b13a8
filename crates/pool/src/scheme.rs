//! What an allocation scheme is.
//!
//! A scheme has two sides. On the memory node a [`NodeScheme`] admits compute nodes: it makes the
//! QPs that answer theirs, and does what its design leaves to the CPU. On the compute node a
//! [`ClientScheme`] allocates and frees chunks with verbs alone.
//!
//! *Released* means the same in every scheme: every key of the chunk is dead, no admitted access
//! is pending, the chunk is cleared, in that order; only then may it be allocated again.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use fabric::{Key, PeerAddress, Qpn};
use rnic::port::shm::Secret;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::budget::BudgetStatus;
use crate::remote::token::Nonce;
use crate::remote::{RoceEnd, Route, Start};

/// The most windows that a group has, the guard included.
pub const MAX_GROUP: usize = 6;

/// The most access QPs of a group: lanes to all functions of the memory node's NIC.
pub(crate) const QPS_MAX: u32 = 1 << 8;

/// A compute node, as its memory node numbers it: never 0, which means "nobody" in `owner_id`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ClientId(pub u32);

/// One of a compute node's QP groups, by position (OneSidedMW §4.1; one per core, §5.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct GroupId(pub u16);

/// One of a group's access QPs for a function of the memory node's NIC, by position: which path a request takes (OneSidedMW §5.1: requests
/// that somebody waits for on one, prefetch and write-back on another).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Lane(pub u8);

/// QPs of a compute node that are connected anew together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// Its management QPs; without separation in scheme `onesidedmw`, all QPs.
    Management,
    /// An access QP.
    Access(GroupId, Lane),
}

/// What a compute node says of itself when it wants to be admitted: the numbers of its QPs, which
/// are made and not yet connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    /// Management QPs, in the order that the scheme defines.
    pub management: Vec<u32>,
    /// Access QPs of each QP group: those of each lane for the first function of the memory node's NIC, then those for
    /// the next.
    pub groups: Vec<Vec<u32>>,
    /// Where the memory node writes its bulletin ([`bulletin`]): address.
    pub bulletin_addr: u64,
    /// Where the memory node writes its bulletin: key.
    pub bulletin_rkey: u32,
    /// On the memory node's host: the secret of the NIC session that these QPs are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<Secret>,
    /// On another host: what its NIC is reached by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roce: Option<RoceEnd>,
    /// On another host: drawn for what its QPs begin with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<Nonce>,
    /// On another host: how its QPs are reached from here. The memory node finds that out.
    #[serde(skip)]
    pub route: Option<Route>,
    /// On another host: what its QPs begin with. The memory node finds that out.
    #[serde(skip)]
    pub start: Start,
}

impl Admission {
    /// The QP that it names by `qpn`, as it is reached from here.
    pub fn peer(&self, qpn: u32) -> PeerAddress {
        let qpn = Qpn::new(qpn);
        self.route.map_or(qpn.into(), |route| route.peer(qpn, self.start))
    }
}

/// What the memory node answers: the peers of those QPs, in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admitted {
    /// The compute node's number.
    pub client: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Windows of a group, the guard included.
    pub group_size: u32,
    /// Requests of one kind that the compute node may have in flight.
    pub credits: u32,
    /// Peers of the management QPs.
    pub management: Vec<u32>,
    /// Peers of the access QPs.
    pub groups: Vec<Vec<u32>>,
    /// Where the compute node allocates by itself: what it works on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
}

/// The metadata of a memory node on which compute nodes allocate with READ and CAS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// Address of its first word.
    pub addr: u64,
    /// Key, for the management QP only.
    pub rkey: u32,
    /// What the compute node is called in it.
    pub user: u16,
    /// Address of the first chunk.
    pub data: u64,
    /// Chunks of the pool.
    pub chunks: u32,
}

/// The bulletin: 8 bytes in the compute node's memory that the memory node's CPU writes when its
/// free queue runs empty and when there is memory again (OneSidedMW §4.3, "detecting empty free MW
/// queue").
///
/// ```text
/// +0 state (be32): 0 available, 1 empty   +4 generation (be32): counts the changes
/// ```
pub mod bulletin {
    /// There are free chunks.
    pub const AVAILABLE: u32 = 0;
    /// There are none.
    pub const EMPTY: u32 = 1;
    /// Bytes of the bulletin.
    pub const BYTES: usize = 8;
}

/// A connection of a compute node: which start of the memory node, and which number there. Key and
/// QP numbers begin anew with each, so that a grant of one could fit another's by chance.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Era {
    /// See [`crate::protocol::Welcome::incarnation`].
    pub incarnation: u64,
    /// The compute node's number; 0 for what was not granted.
    pub client: u32,
}

/// The right to use a chunk: where it is and one key per access QP of a group.
///
/// It is a value, not a handle: dropping it does not free the chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Address of the chunk at the memory node.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Its index in the memory node's table: what a free names.
    pub entry: u32,
    /// The QP group whose QPs may use it.
    pub group: GroupId,
    /// Which of the memory node's NIC functions its keys are of: requests go to the QPs of that function.
    pub function: u8,
    era: Era,
    keys: [Key; MAX_GROUP],
    lanes: u8,
}

impl Grant {
    /// A grant with `keys`, one per lane, of no connection in particular: who makes one by hand has it
    /// judged by the memory node's NIC.
    pub fn new(addr: u64, len: u64, entry: u32, group: GroupId, keys: &[Key]) -> Self {
        assert!(keys.len() <= MAX_GROUP, "a group has at most {MAX_GROUP} windows");
        let mut all = [Key::default(); MAX_GROUP];
        all[..keys.len()].copy_from_slice(keys);
        let (era, function, lanes) = (Era::default(), 0, keys.len() as u8);
        Self { addr, len, entry, group, function, era, keys: all, lanes }
    }

    /// The same with keys of another of the memory node's NIC functions.
    pub fn in_function(self, function: u8) -> Self {
        Self { function, ..self }
    }

    /// The same as a grant of a connection.
    pub(crate) fn of(self, era: Era) -> Self {
        Self { era, ..self }
    }

    /// False if it was granted on another connection.
    #[inline]
    pub(crate) fn is_of(&self, era: Era) -> bool {
        self.era == era || self.era == Era::default()
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

/// What a memory node's scheme can say of itself at any time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Name of the scheme.
    pub scheme: String,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Functions of its NIC that windows are in; 0 where only one can be.
    #[serde(default)]
    pub functions: u32,
    /// Chunks in all.
    pub chunks: u64,
    /// Chunks that are free.
    pub free: u64,
    /// Compute nodes that are connected.
    pub clients: u64,
    /// Compute nodes that have gone, and whose chunks are being taken back.
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
    /// Requests that were refused.
    pub refused: u64,
    /// Budgets, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetStatus>,
}

/// What a compute node looks at while an answer does not come: see [`ClientScheme::when_idle`].
pub type WhenIdle = Arc<dyn Fn() + Send + Sync>;

/// What allocations have cost a compute node that does them itself, by CAS. Other schemes leave it at zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effort {
    /// Blocks that it got.
    pub allocations: u64,
    /// Round trips of all attempts to allocate; verbs that are posted together are one.
    pub round_trips: u64,
    /// CASes tried, for whatever is part of an allocation: to take, to log, to give back what cannot be had whole.
    pub cas: u64,
    /// Those of them that found another word than they expected.
    pub cas_retries: u64,
    /// The most of these in one attempt.
    pub cas_retries_max: u64,
}

/// The memory node's side of a scheme. One control thread calls it.
pub trait NodeScheme: Send {
    /// Admits a compute node: makes QPs for it, connected to the ones that it names.
    fn admit(&mut self, client: ClientId, request: &Admission) -> Result<Admitted, Error>;

    /// A compute node has gone: from now on none of its keys opens anything. Turns take its chunks
    /// back, a bounded piece of work in each, until [`NodeScheme::is_retired`].
    ///
    /// # Errors
    /// The NIC refused it. The compute node still has its chunks, and this is called again.
    fn retire(&mut self, client: ClientId) -> Result<(), Error>;

    /// True if nothing is left of a compute node.
    fn is_retired(&self, client: ClientId) -> bool;

    /// What the CPU has to do now, if anything: answer RPCs, repair chains that a request broke,
    /// tell compute nodes of empty and of available again. True if it did something.
    fn turn(&mut self) -> Result<bool, Error>;

    /// True while some compute node waits for memory, so that [`NodeScheme::turn`] must be called
    /// from time to time (`OneSidedMW §4.3`: the CPU then watches the queue).
    fn is_watching(&self) -> bool;

    /// How soon [`NodeScheme::turn`] must be called although nothing happens, if it must.
    fn next_look(&self) -> Option<Duration> {
        None
    }

    /// A compute node says that it was told "empty" and would wait. True if there is none: then
    /// all are told so, and [`NodeScheme::turn`] tells them when there is memory again. False if
    /// there is memory by now.
    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error>;

    /// A management QP of the compute node broke and its side is in state Reset: takes the memory
    /// node's sides through Reset and connects them again. What was granted and could not be
    /// delivered is taken back. Their numbers, in the order of [`Admitted::management`]; or nothing,
    /// while requests of that connection are still executed: to be asked again after a turn.
    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error>;

    /// Whether the memory node's sides of the compute node's management QPs take requests and answer them. It
    /// cannot tell a compute node on another host that they do not: that one asks, when it waits for long.
    fn management_is_open(&self, client: ClientId) -> Result<bool, Error>;

    /// An access QP of the compute node broke, or will be broken by this: resets the memory node's
    /// side and connects it again. Its windows live on. Returns its number.
    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error>;

    /// What QPs of a compute node on another host begin with when they are connected from now on.
    /// Those that are not in `part` keep what they have: they may be connected anew at any moment,
    /// by others.
    fn renew(&mut self, client: ClientId, part: Part, start: Start);

    /// What the CPU sleeps on while [`NodeScheme::turn`] has nothing to do. A scheme that returns
    /// some gets a thread that calls `turn` and waits in turns; one whose CPU has nothing to do
    /// except while it is watching returns none, and no thread is started for it.
    fn events(&self) -> Option<Arc<dyn CpuEvents>> {
        None
    }

    /// How many functions of the NIC the windows are in: a compute node has access QPs for each.
    fn functions(&self) -> u32 {
        1
    }

    /// How many cores of the memory node's CPU this is made for.
    fn workers(&self) -> usize {
        1
    }

    /// The work of each core, to be driven on its own: each answers some of the compute nodes, and they
    /// may take turns at the same time. Where there are none, [`NodeScheme::turn`] is all there is;
    /// where there are, it does a turn of each, also while they are driven. Calls of the control
    /// plane that concern a compute node wait for the turn of its worker to end.
    fn take_workers(&mut self) -> Vec<Box<dyn Worker>> {
        Vec::new()
    }

    /// The state of the scheme.
    fn status(&mut self) -> Result<NodeStatus, Error>;

    /// Checks that every chunk is exactly once free or owned, as far as can be seen while no
    /// request is in flight; an error says what is wrong.
    fn audit(&self) -> Result<(), Error>;
}

/// A core of the memory node's CPU.
pub trait Worker: Send {
    /// What this core has to do now, if anything. True if it did something: it is to be called again then.
    fn turn(&mut self) -> Result<bool, Error>;

    /// What the core sleeps on while there is nothing to do.
    fn events(&self) -> Arc<dyn CpuEvents>;
}

/// What wakes the memory node's CPU when it has something to do.
pub trait CpuEvents: Send + Sync {
    /// Sleeps until there may be something to do or `timeout` has passed; true in the first case.
    fn wait(&self, timeout: Duration) -> Result<bool, Error>;

    /// Wakes whoever waits, from another thread.
    fn wake(&self);
}

/// Access by whole pages, for schemes where it is not one-sided: what [`ClientScheme::allocate`] gives
/// names a page that the memory node looks up at each access.
///
/// These futures must be polled to their end: [`crate::Pool`] sees to that where they are given up.
pub trait PageScheme: Send + Sync {
    /// Reads a page. One that was never written reads as zeros.
    fn read_page(
        &self,
        page: &Grant,
        into: &mut [u8],
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Writes a page; memory for it is allocated by the first write.
    fn write_page(
        &self,
        page: &Grant,
        from: &[u8],
    ) -> impl Future<Output = Result<(), Error>> + Send;
}

/// The error for `bytes` that are more than the `most` that can be allocated at once.
pub(crate) fn too_large(bytes: u64, most: u64, has_sizes: bool) -> Error {
    let why = match has_sizes {
        true => format!("the largest block of this pool has {most}; allocate several"),
        false => format!(
            "this pool's scheme has chunks of {most} bytes only; serve with larger ones (--chunk), or with \
             scheme finemem"
        ),
    };
    Error::Setting { setting: "bytes", value: bytes.to_string(), why }
}

/// The compute node's side of a scheme.
///
/// It comes about in two steps, since its QPs need their peers' numbers and the other way round:
/// the scheme's module makes a client whose management QPs are not connected yet, the memory node
/// admits the numbers of [`ClientScheme::management`], and [`ClientScheme::connect`] connects them.
pub trait ClientScheme: Send + Sync {
    /// Allocates a chunk whose keys are for the QPs of `group`.
    fn allocate(&self, group: GroupId) -> impl Future<Output = Result<Grant, Error>> + Send;

    /// Allocates at least `bytes`, where a scheme has more than one size. Others refuse what their chunks do not
    /// hold.
    fn allocate_bytes(
        &self,
        group: GroupId,
        bytes: u64,
    ) -> impl Future<Output = Result<Grant, Error>> + Send {
        async move {
            let grant = self.allocate(group).await?;
            if bytes <= grant.len {
                return Ok(grant);
            }
            self.free(&grant).await?;
            Err(too_large(bytes, grant.len, false))
        }
    }

    /// Frees a chunk. When this returns, the chunk is released; in scheme `finemem` and `rpc-mw-1` it is
    /// set aside until it can be.
    fn free(&self, grant: &Grant) -> impl Future<Output = Result<(), Error>> + Send;

    /// The management QPs, in the scheme's order: what [`Admission::management`] names.
    fn management(&self) -> Vec<Qpn>;

    /// True if a management QP is in the error state, so that requests are refused until it is
    /// re-established: [`ClientScheme::reset`], [`NodeScheme::reset_management`] on the other side,
    /// then [`ClientScheme::connect`].
    fn is_broken(&self) -> bool;

    /// True from a [`ClientScheme::reset`] to the [`ClientScheme::connect`] that follows, which may be long:
    /// the memory node may refuse to re-establish the QPs for a while. What was posted to a QP in Reset
    /// would never complete. Cheap: looked at before each request.
    fn is_closed(&self) -> bool {
        false
    }

    /// Takes the management QPs to Reset. Requests that are in flight end with an error, which
    /// leaves open whether they were executed.
    fn reset(&self) -> Result<(), Error>;

    /// Takes the management QPs to Error: requests that are in flight end with an error.
    fn break_management(&self) -> Result<(), Error>;

    /// Gives back what a request that broke off may have got, where that is the compute node's to find out. Asked
    /// after a request has failed, when the management QPs are re-established. If it breaks off itself, it is
    /// asked again, now or with the next request.
    fn recall(&self) -> impl Future<Output = Result<(), Error>> + Send {
        async { Ok(()) }
    }

    /// What its allocations have cost, where it does them by CAS.
    fn effort(&self) -> Effort {
        Effort::default()
    }

    /// Has `look` called from time to time by who waits for an answer that does not come.
    fn when_idle(&self, look: &WhenIdle);

    /// The memory node's access QPs, by group and lane, once it has admitted the compute node: for
    /// schemes whose requests name them.
    fn name_access(&self, _peers: Vec<Vec<Qpn>>) {}

    /// What the memory node said when it admitted the compute node, before the QPs are connected: for
    /// schemes that need more of it than QP numbers.
    fn admitted(&self, _terms: &Admitted) {}

    /// Connects the management QPs with their peers, given in the scheme's order.
    fn connect(&self, peers: &[PeerAddress]) -> Result<(), Error>;
}
