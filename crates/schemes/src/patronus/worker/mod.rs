//! A core of the memory node's CPU, which answers the requests of its compute nodes.
//!
//! A turn collects the received requests (at most [`BATCH`]) and the deadlines that have passed,
//! lets the book decide, and executes the book's effects: window operations (with one doorbell for
//! each compute node), clearing, replies. The results go back to the book, which may have further
//! effects, for example the grant to a request that waited for a permission to end. The lock of the
//! book is never held while the core waits for the NIC.
//!
//! Each core serves a part of the compute nodes. Effects that concern a compute node of another
//! core go to the queue of that core.

mod doors;
mod effects;
mod heartbeats;
mod published;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use scheme::client_table::ClientTable;
use scheme::wakeup::CqEvents;
use scheme::{ClientId, CpuEvents, Error, NodeSettings, Worker};
use verbs::{Completion, CompletionKind, CompletionQueue, CqAttr, DmaMemory, Nic, Qpn};

use super::book::{Book, Effect, PermissionId};
use super::connection::Connection;
use super::door::manager::ManagerWindows;
use super::headers::Headers;
use super::lifetimes::Tables;
use super::message::{Ask, Outcome, PermissionNumber, REQUEST_BYTES, Request};
use super::options::Options;
use crate::cores::Assignment;

/// Maximum number of requests that one turn takes.
const BATCH: usize = 64;
/// Send blocks of a UMR that binds.
const BIND_BLOCKS: u32 = 3;
/// Window operations that are posted to a compute node's binder at a time.
pub(super) const BINDS: usize = 2 * BATCH;
/// Send blocks of a binder.
pub(super) const BINDER_BLOCKS: u32 = (BINDS as u32 * BIND_BLOCKS).next_power_of_two();
/// Value of [`Shared::next_deadline`] if there is no deadline.
const NEVER: u64 = u64::MAX;

/// State that all cores share.
pub(super) struct Shared<N: Nic> {
    pub nic: N,
    /// PD of the memory node; in schemes without protection, also of all compute nodes.
    pub pd: N::Pd,
    pub settings: NodeSettings,
    pub options: Options,
    /// The donated memory.
    pub memory: DmaMemory,
    pub book: Mutex<Book>,
    pub tables: Tables,
    pub cores: Vec<Core<N>>,
    pub assignment: Assignment,
    /// The book's next deadline, in nanoseconds.
    next_deadline: AtomicU64,
}

/// A core: its event source, its state, which the control thread also changes between turns, and
/// the effects that other cores and the control thread have for it.
pub(super) struct Core<N: Nic> {
    pub events: Arc<CqEvents<N>>,
    pub state: Mutex<State<N>>,
    pub queue: Mutex<Vec<Effect>>,
    /// The core has announced "empty" to its compute nodes.
    pub announced_empty: AtomicBool,
    /// Compute nodes of the core have departed, and the book has something left of them.
    has_leaving: AtomicBool,
    /// Time of the next heartbeats, in nanoseconds; [`NEVER`] without compute nodes or QP polling.
    next_heartbeat: AtomicU64,
}

/// State of a core.
pub(super) struct State<N: Nic> {
    /// Index of the core.
    index: usize,
    /// CQ for requests of its compute nodes.
    pub requests: N::Cq,
    /// Buffer for completions polled from `requests`.
    arrived: Vec<Completion>,
    /// CQ for window operations.
    pub binds: N::Cq,
    /// Windows for all its compute nodes, in the published form.
    pub published: Option<ManagerWindows<N>>,
    pub peers: ClientTable<Connection<N>>,
    pub by_management: HashMap<Qpn, ClientId>,
    /// ID of the next window operation.
    serial: u64,
    /// Compute nodes that have departed and are still among `peers`.
    pub leaving: usize,
    /// A management QP was re-established: grants may not have been delivered.
    pub has_undelivered: bool,
    /// Windows were used since the last look at the free lists.
    has_used_windows: bool,
    pub counts: Counts,
}

/// A request: its compute node, its number for the book, its operation if valid, and the groups of
/// the compute node.
type Received = (ClientId, u64, Option<Ask>, u16);

/// Counters of a core.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub allocations: u64,
    pub extensions: u64,
    pub frees: u64,
    pub refused: u64,
    pub binds: u64,
    pub unbinds: u64,
    pub handovers: u64,
    pub qp_resets: u64,
    pub heartbeats: u64,
    pub dead_qps: u64,
}

/// A core, to be driven by a thread of its own.
pub(super) struct Handle<N: Nic> {
    pub shared: Arc<Shared<N>>,
    pub core: usize,
}

impl<N: Nic> Worker for Handle<N> {
    fn poll(&mut self) -> Result<bool, Error> {
        self.shared.poll(self.core)
    }

    fn events(&self) -> Arc<dyn CpuEvents> {
        self.shared.cores[self.core].events.clone()
    }

    fn next_poll(&self) -> Option<Duration> {
        self.shared.next_poll(self.core)
    }
}

impl<N: Nic> Shared<N> {
    pub fn new(
        (nic, pd): (N, N::Pd),
        (settings, options): (NodeSettings, Options),
        (memory, tables): (DmaMemory, Tables),
        book: Book,
        cores: Vec<Core<N>>,
    ) -> Self {
        let assignment = Assignment::new(cores.len(), settings.clients_max);
        Self {
            nic,
            pd,
            settings,
            options,
            memory,
            book: Mutex::new(book),
            tables,
            cores,
            assignment,
            next_deadline: AtomicU64::new(NEVER),
        }
    }

    /// The headers of permissions, in the published form.
    pub fn headers(&self) -> Option<&Headers> {
        self.tables.headers()
    }

    /// Polls a core.
    pub fn poll(&self, core: usize) -> Result<bool, Error> {
        self.cores[core].state.lock().turn(self)
    }

    /// Time until the next deadline of the book, or the next heartbeats of a core.
    pub fn next_poll(&self, core: usize) -> Option<Duration> {
        match self.next_look(core) {
            NEVER => None,
            at => Some(Duration::from_nanos(at).saturating_sub(self.nic.now())),
        }
    }

    /// The time, if a deadline of the book has passed, or heartbeats of a core are due.
    fn due(&self, core: usize) -> Option<Duration> {
        let next = self.next_look(core);
        if next == NEVER {
            return None;
        }
        Some(self.nic.now()).filter(|now| now.as_nanos() as u64 >= next)
    }

    /// Time of the next deadline of the book, or of the next heartbeats of a core, in nanoseconds.
    fn next_look(&self, core: usize) -> u64 {
        let heartbeat = self.cores[core].next_heartbeat.load(Ordering::Acquire);
        self.next_deadline.load(Ordering::Acquire).min(heartbeat)
    }

    /// Calls `change` with the book, and notes its next deadline.
    pub fn with_book<T>(&self, change: impl FnOnce(&mut Book) -> T) -> T {
        let mut book = self.book.lock();
        let result = change(&mut book);
        let next = book.next_deadline().map_or(NEVER, |at| at.as_nanos() as u64);
        self.next_deadline.store(next, Ordering::Release);
        result
    }

    /// The core that serves a compute node.
    pub fn core_of(&self, client: ClientId) -> usize {
        self.assignment.core_of(client)
    }

    /// Gives effects to the cores that they concern, and wakes these.
    pub fn give(&self, effects: Vec<Effect>) {
        // In the order of the cores, so that runs of the simulator are the same.
        let mut by_core: BTreeMap<usize, Vec<Effect>> = BTreeMap::new();
        for effect in effects {
            let core = effect.client().map_or(0, |client| self.core_of(client));
            by_core.entry(core).or_default().push(effect);
        }
        for (core, effects) in by_core {
            self.cores[core].queue.lock().extend(effects);
            self.cores[core].events.wake();
        }
    }
}

impl Effect {
    /// The compute node whose core executes the effect; `None`: any core.
    fn client(&self) -> Option<ClientId> {
        match self {
            Effect::Open { id, .. } | Effect::Close { id } | Effect::Abandon { id } => {
                Some(id.client)
            }
            Effect::Reply { client, .. } => Some(*client),
            Effect::Clear { .. } => None,
        }
    }
}

impl<N: Nic> Core<N> {
    /// A core without compute nodes.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        (settings, cores): (&NodeSettings, u32),
        index: usize,
    ) -> Result<Self, Error> {
        // A new compute node is assigned to the core with the fewest.
        let clients = settings.clients_max.div_ceil(cores);
        let in_flight = clients * (settings.credits + 1);
        let entries = 2 * in_flight + CqEvents::<N>::MARGIN;
        let requests = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        // One turn posts at most this many operations, to all binders together.
        let entries = 2 * BINDS as u32;
        let binds = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let state = State {
            index,
            requests,
            arrived: vec![Completion::EMPTY; BATCH],
            binds,
            published: None,
            peers: ClientTable::default(),
            by_management: HashMap::new(),
            serial: 1,
            leaving: 0,
            has_undelivered: false,
            has_used_windows: false,
            counts: Counts::default(),
        };
        Ok(Self {
            events: Arc::new(CqEvents::new(nic, pd, &state.requests)?),
            state: Mutex::new(state),
            queue: Mutex::default(),
            announced_empty: AtomicBool::new(false),
            has_leaving: AtomicBool::new(false),
            next_heartbeat: AtomicU64::new(NEVER),
        })
    }
}

impl<N: Nic> State<N> {
    /// One turn of the core. True if there was work.
    ///
    /// A turn without work looks at no compute node, because a polling core has such turns between
    /// any two requests.
    fn turn(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        let mut effects = std::mem::take(&mut *shared.cores[self.index].queue.lock());
        let mut any = self.take_back_undelivered(shared, &mut effects);
        any |= self.take_requests(shared, &mut effects);
        if let Some(now) = shared.due(self.index) {
            shared.with_book(|book| book.tick(now, &mut &shared.tables, &mut effects));
            self.poll_qps(shared, now, &mut effects);
            any = true;
        }
        let has_effects = !effects.is_empty();
        any |= has_effects;
        self.execute(shared, effects)?;
        if has_effects {
            self.wake_for_departed(shared);
        }
        self.announce(shared);
        any |= self.remove_departed(shared);
        if std::mem::take(&mut self.has_used_windows) {
            if let Some(windows) = &mut self.published {
                any |= windows.fill(&shared.nic).unwrap_or(false);
            }
            for peer in self.peers.values_mut().filter(|peer| !peer.leaving) {
                // Without windows, permissions of this compute node are refused.
                any |= peer.door.fill(&shared.nic).unwrap_or(false);
            }
        }
        Ok(any)
    }

    /// Takes back permissions whose grants were not delivered, before new requests: otherwise the
    /// memory could be in use twice by the same compute node.
    fn take_back_undelivered(&mut self, shared: &Shared<N>, effects: &mut Vec<Effect>) -> bool {
        if !std::mem::take(&mut self.has_undelivered) {
            return false;
        }
        let now = shared.nic.now();
        let mut any = false;
        for (client, peer) in self.peers.iter_mut().filter(|(_, peer)| !peer.leaving) {
            while let Some(number) = peer.answers.take_lost() {
                let id = PermissionId { client: *client, number: PermissionNumber(number) };
                shared.with_book(|book| book.undelivered(now, id, &mut &shared.tables, effects));
                any = true;
            }
        }
        any
    }

    /// Gives the received requests to the book.
    fn take_requests(&mut self, shared: &Shared<N>, effects: &mut Vec<Effect>) -> bool {
        let n = self.requests.poll(&mut self.arrived);
        if n == 0 {
            return false;
        }
        // Not the beginning of the turn: compute nodes believe that their leases began as long
        // after the sending of their requests as the reply says since the arrival.
        let now = shared.nic.now();
        let base = shared.memory.addr();
        let asked: Vec<_> =
            (0..n).filter_map(|i| self.take_request(self.arrived[i], base)).collect();
        if asked.is_empty() {
            return true;
        }
        shared.with_book(|book| {
            for (client, number, ask, groups) in asked {
                let Some(ask) = ask else {
                    let outcome = Outcome::BadRequest;
                    effects.push(Effect::Reply { client, number, outcome, entry: 0 });
                    continue;
                };
                book.request(now, client, number, ask, groups, &mut &shared.tables, effects);
            }
        });
        true
    }

    /// The request of a completion; `None` if there is none. The donated memory begins at `base`.
    fn take_request(&mut self, c: Completion, base: u64) -> Option<Received> {
        if c.kind != CompletionKind::Receive {
            return None; // a wake-up
        }
        let client = *self.by_management.get(&c.qpn)?;
        let peer = self.peers.get_mut(&client)?;
        let mut bytes = [0; REQUEST_BYTES];
        let slot = peer.answers.receive(&c, &mut bytes)?;
        let (number, ask) = Request::parse(&bytes);
        peer.numbers[slot.as_usize()] = number;
        // The book's number names the receive, and the connection of the management QP.
        let number = u64::from(peer.answers.epoch()) << 32 | u64::from(slot.raw());
        let ask = ask.filter(|_| c.bytes as usize == REQUEST_BYTES).map(|ask| match ask {
            // The book counts from the beginning of the donated memory.
            Ask::FreeGrant { entry, address } => {
                Ask::FreeGrant { entry, address: address.wrapping_sub(base) }
            }
            ask => ask,
        });
        Some((client, number, ask, peer.access.0.len() as u16))
    }

    /// Announces "empty" to compute nodes that wait for memory, and "available" when there is some.
    fn announce(&mut self, shared: &Shared<N>) {
        let announced = &shared.cores[self.index].announced_empty;
        if announced.load(Ordering::Acquire)
            && shared.book.lock().has_memory()
            && announced.swap(false, Ordering::AcqRel)
        {
            self.peers.values_mut().for_each(|peer| peer.answers.announce_available());
        }
    }

    /// Wakes the other cores of which compute nodes have departed: the book may have nothing left
    /// of them.
    fn wake_for_departed(&self, shared: &Shared<N>) {
        for (index, core) in shared.cores.iter().enumerate() {
            if index != self.index && core.has_leaving.load(Ordering::Acquire) {
                core.events.wake();
            }
        }
    }

    /// Removes compute nodes that have departed and of which the book has nothing left.
    fn remove_departed(&mut self, shared: &Shared<N>) -> bool {
        if self.leaving == 0 {
            return false;
        }
        let leaving = self.peers.iter().filter(|(_, peer)| peer.leaving).map(|(client, _)| *client);
        let left: Vec<ClientId> = {
            // Before the look into the book: a core that changes the book later sees it.
            shared.cores[self.index].has_leaving.store(true, Ordering::Release);
            let book = shared.book.lock();
            leaving.filter(|client| book.has_left(*client)).collect()
        };
        self.leaving -= left.len();
        for client in &left {
            self.peers.remove(client);
            shared.tables.remove(*client);
            shared.assignment.remove(*client);
        }
        shared.cores[self.index].has_leaving.store(self.leaving > 0, Ordering::Release);
        !left.is_empty()
    }
}
