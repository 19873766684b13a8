//! The oracle checks the invariants after every step.
//!
//! It knows three things about each chunk: its holder, from the clients' requests and replies (the
//! *shadow*); its owner, from the memory node's state; and the clients that can access it, from the
//! NIC's tables. It also has a copy of all donated memory, so that every changed byte must be
//! explained by the last step.
//!
//! [`Invariant`] lists the invariants. Each is checked where it could be violated: `grants` checks
//! replies to clients, `steps` checks operations, and `reachability` checks access rights and free
//! chunks.

mod engine;
mod grants;
mod leases;
mod pages;
mod reachability;
mod steps;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::time::Duration;

use rnic::engine::Reachability;
use scheme::{ClientId, DomainToken};
use schemes::finemem::layout::Shape;
use verbs::{DmaMemory, FunctionId, Key};

use super::case::Case;
use super::invariant::{Invariant, Violation};
use super::node_view::{NodeView, PageState};
use crate::cluster::Link;
use crate::ids::NodeId;
use crate::nic::SimHooks;
use crate::time::Time;

pub(super) use leases::{Leases, Posted, Use};

/// Total sleep time of the memory node's CPU before it handles an event.
const NAPS: Time = Time::us(12_000);

/// Index of a client in the oracle's list. The replacement of a killed client has an index of its
/// own.
pub(super) type ClientIndex = usize;

/// A key, with the function of the memory node that it belongs to.
type Named = (u8, Key);

/// Number of grants after which keys may repeat: a tag repeats after 256 binds.
const FRESH: usize = 200;

/// A client's holding of a chunk.
#[derive(Clone, Debug)]
struct Holding {
    client: ClientIndex,
    keys: Vec<Key>,
    /// The memory node's function that the keys belong to.
    function: u8,
    /// Whether a free is in flight, or its outcome is unknown.
    freeing: bool,
}

/// State of a client.
pub(super) struct ClientState {
    pub name: String,
    pub honest: bool,
    pub link: Link,
    function: Option<FunctionId>,
    /// Number of allocation requests in flight.
    allocating: u32,
    alive: bool,
    /// Token of the client's domain, in a scheme with leases.
    pub domain: Option<DomainToken>,
    /// The client's clock, once it has a NIC.
    pub hooks: Option<SimHooks>,
    /// The client's compute node.
    node: NodeId,
    /// Whether the clock of the client's node has stood still at some time.
    pub clock_stopped: bool,
    /// Accesses to donated memory that the NIC has refused.
    refusals: u32,
}

/// Counts of what happened in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// Steps of the NIC.
    pub steps: u64,
    /// Chunks granted to honest clients and to hostile clients.
    pub grants: [u64; 2],
    /// Chunks freed by honest clients and by hostile clients.
    pub frees: [u64; 2],
    /// Requests that found no memory.
    pub empty: u64,
    /// Leases that honest clients extended.
    pub extensions: u64,
    /// Permissions that were granted after a wait for others to end.
    pub waits: u64,
    /// Leases that ended without the request of a client.
    pub expiries: u64,
    /// Requests of honest clients for permissions that the memory node's NIC could not open.
    pub unopened: u64,
    /// Accesses that the NIC refused, of honest clients and of hostile clients.
    pub refusals: [u64; 2],
    /// Accesses that took effect.
    pub accesses: u64,
    /// Requests and accesses that ended in an error, of honest clients and of hostile clients.
    pub errors: [u64; 2],
    /// Processes that were killed.
    pub deaths: u64,
    /// Keys that were guessed.
    pub guesses: u64,
    /// Aborts of the memory node's background work.
    pub aborts: u64,
}

impl EventCounts {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &EventCounts) {
        let pairs = |a: &mut [u64; 2], b: &[u64; 2]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        self.steps += other.steps;
        pairs(&mut self.grants, &other.grants);
        pairs(&mut self.frees, &other.frees);
        pairs(&mut self.errors, &other.errors);
        self.empty += other.empty;
        self.extensions += other.extensions;
        self.waits += other.waits;
        self.expiries += other.expiries;
        self.unopened += other.unopened;
        pairs(&mut self.refusals, &other.refusals);
        self.accesses += other.accesses;
        self.deaths += other.deaths;
        self.guesses += other.guesses;
        self.aborts += other.aborts;
    }
}

/// The oracle; see the module documentation.
pub(super) struct Oracle {
    case: Case,
    /// Number of functions of the memory node.
    functions: u32,
    node_view: NodeView,
    memory: DmaMemory,
    chunk_bytes: u64,
    chunks: u32,
    image: Vec<u8>,
    /// Chunks that were found clear and have not changed since.
    found_clear: Vec<bool>,
    /// Steps of the memory node's CPU.
    cpu_steps: u64,
    now_bytes: Vec<u8>,
    /// Holdings of each chunk: the last one is current, the earlier ones are being freed.
    holds: Vec<Vec<Holding>>,
    /// All keys that were ever granted.
    granted: Vec<Named>,
    /// Keys of chunks that were released, by a reply to the owner or because the chunk is free.
    dead: HashSet<Named>,
    /// Keys under which each chunk was granted since it was last free.
    live: Vec<Vec<Named>>,
    /// Pages that were cleared and not allocated since.
    clear: Vec<bool>,
    /// The owner of each page before the last step, in scheme `tdmem`.
    owner_numbers: Vec<u16>,
    /// Checks of objects and permissions, in a scheme with leases.
    leases: Option<Box<Leases>>,
    /// Changes of the book at the last check of free memory.
    zeros_checked: u64,
    pub clients: Vec<ClientState>,
    reaches: Vec<Reachability>,
    /// Deadlines by which departed clients must have been forgotten.
    pub deaths: Vec<(Time, ClientId)>,
    /// Whether the network has lost or delayed nothing so far.
    pub calm: bool,
    /// Additional time that operations may take because of sleeps and stalls of the CPU.
    pub slack: Time,
    /// Total length of the stalls of the memory node's CPU.
    pub cpu_stalls: Time,
    /// Time that the memory node's clock shows.
    pub node_now: Duration,
    /// Whether a client has named foreign QPs: those QPs may then access that client's chunks.
    pub misnamed: bool,
    pub violation: Option<Violation>,
    pub counts: EventCounts,
    pub now: Time,
    trace: Option<String>,
}

impl Oracle {
    pub fn new(
        case: Case,
        functions: u32,
        node_view: NodeView,
        (chunks, chunk_bytes): (u32, u64),
    ) -> Self {
        let memory = node_view.memory();
        let bytes = chunks as usize * chunk_bytes as usize;
        Self {
            case,
            functions,
            node_view,
            memory,
            chunk_bytes,
            chunks,
            image: vec![0; bytes],
            found_clear: vec![false; chunks as usize],
            cpu_steps: 0,
            now_bytes: vec![0; bytes],
            holds: vec![Vec::new(); chunks as usize],
            granted: Vec::new(),
            dead: HashSet::new(),
            live: vec![Vec::new(); chunks as usize],
            clear: vec![true; chunks as usize],
            owner_numbers: vec![0; chunks as usize],
            leases: None,
            zeros_checked: 0,
            clients: Vec::new(),
            reaches: Vec::new(),
            deaths: Vec::new(),
            calm: true,
            slack: NAPS,
            cpu_stalls: Time::ZERO,
            node_now: Duration::ZERO,
            misnamed: false,
            violation: None,
            counts: EventCounts::default(),
            now: Time::ZERO,
            trace: None,
        }
    }

    /// Returns the division of the memory, if blocks have several sizes.
    pub fn shape(&self) -> Option<Shape> {
        let shape = Shape { chunks: self.chunks, chunk_bytes: self.chunk_bytes };
        self.case.sizes.then_some(shape)
    }

    // --- the trace -----------------------------------------------------------------------------

    pub fn start_trace(&mut self) {
        self.trace = Some(String::new());
    }

    pub fn take_trace(&mut self) -> Option<String> {
        self.trace.take()
    }

    /// Adds a line to the trace.
    pub fn note(&mut self, line: impl FnOnce(&Self) -> String) {
        if let Some(mut trace) = self.trace.take() {
            let _ = writeln!(trace, "{} {}", self.now, line(self));
            self.trace = Some(trace);
        }
    }

    /// Records a violation. The first violation is kept.
    pub fn wrong(&mut self, invariant: Invariant, why: impl Into<String>) {
        let violation = Violation { invariant, why: why.into() };
        self.note(|_| format!("VIOLATION: {violation}"));
        self.violation.get_or_insert(violation);
    }

    pub fn name(&self, client: ClientIndex) -> &str {
        &self.clients[client].name
    }

    fn name_of(&self, function: FunctionId) -> &str {
        match self.of_function(function) {
            Some(client) => self.name(client),
            None => "memory node",
        }
    }

    // --- clients ------------------------------------------------------------------------------

    pub fn add_client(
        &mut self,
        name: String,
        honest: bool,
        link: Link,
        node: NodeId,
    ) -> ClientIndex {
        // The clock may still stand still, although the client that it stopped for was killed.
        let clock_stopped = self.clients.iter().any(|c| c.node == node && c.clock_stopped);
        let state = ClientState {
            name,
            honest,
            link,
            function: None,
            allocating: 0,
            alive: true,
            domain: None,
            hooks: None,
            node,
            clock_stopped,
            refusals: 0,
        };
        self.clients.push(state);
        self.clients.len() - 1
    }

    pub fn set_function(&mut self, client: ClientIndex, function: FunctionId) {
        self.clients[client].function = Some(function);
    }

    /// Returns whether a function belongs to the memory node.
    fn is_node(&self, function: FunctionId) -> bool {
        function.0 < self.functions
    }

    fn of_function(&self, function: FunctionId) -> Option<ClientIndex> {
        self.clients.iter().position(|c| c.function == Some(function))
    }

    /// Records that a client has departed, by closing its connection or by dying. Nothing of it may
    /// be left after the time `by`.
    pub fn departed(&mut self, client: ClientIndex, by: Time) {
        let state = &mut self.clients[client];
        if !std::mem::take(&mut state.alive) {
            return;
        }
        if let Some(id) = state.link.client() {
            self.deaths.push((by, id));
        }
        for holds in &mut self.holds {
            holds.retain(|h| h.client != client);
        }
        self.departs_from_domain(client);
    }

    /// Extends the deadlines because the CPU was stalled for `time`.
    pub fn extend_deadlines(&mut self, time: Time) {
        self.deaths.iter_mut().for_each(|(by, _)| *by += time);
        self.slack += time;
        self.cpu_stalls += time;
    }

    /// Sets the state of the pages, if access is by pages; `None` if it cannot be read now.
    pub fn set_pages(&mut self, now: Option<PageState>) {
        self.node_view.set_pages(now);
    }

    fn is(&self, client: ClientIndex, id: ClientId) -> bool {
        self.clients[client].link.client() == Some(id)
    }

    /// Returns the chunks that a client owns in the memory node's state, except deferred and
    /// quarantined ones; in a scheme with leases, the entries of its objects.
    pub fn owned(&self, client: ClientIndex) -> Vec<u32> {
        if self.case.has_leases() {
            return self.objects_of(client);
        }
        let Some(id) = self.clients[client].link.client() else { return Vec::new() };
        let owns =
            |e: &u32| self.node_view.owner(*e) == Some(Some(id)) && !self.node_view.is_deferred(*e);
        (0..self.chunks).filter(owns).collect()
    }

    /// Returns other clients' keys, for theft: function, address and key.
    pub fn keys_of_others(&self, client: ClientIndex) -> Vec<(u8, u64, Key)> {
        let place = |entry: usize| self.memory.addr() + entry as u64 * self.chunk_bytes;
        let all =
            self.holds.iter().enumerate().flat_map(|(e, holds)| holds.iter().map(move |h| (e, h)));
        let others = all.filter(|(_, h)| h.client != client);
        others.flat_map(|(e, h)| h.keys.iter().map(move |k| (h.function, place(e), *k))).collect()
    }
}
