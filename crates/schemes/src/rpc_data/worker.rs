//! A core of the memory node's CPU, which executes the requests of its compute nodes.
//!
//! A turn takes the received requests (at most [`BATCH`]) and answers each one at once: an access
//! checks its range and copies the data under the lock for readers of the table; a free clears the
//! memory without a lock. Each core serves a part of the compute nodes; their objects are those of
//! all cores.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use scheme::client_table::ClientTable;
use scheme::index::Slot;
use scheme::wakeup::CqEvents;
use scheme::{Atomic, ClientId, CpuEvents, Error, NodeSettings, Right, Worker};
use verbs::{
    Completion, CompletionKind, CompletionQueue, CqAttr, DmaMemory, MemoryRegion, Nic, Qpn, Zeros,
};

use super::connection::Connection;
use super::message::{Ask, HEADER_BYTES, ObjectId, Outcome, Range};
use super::table::{Freed, Table};
use crate::cores::Assignment;

/// Maximum number of requests that one turn takes.
const BATCH: usize = 64;
/// Bytes of departed compute nodes that one turn clears, or one larger object.
const CLEAR_BYTES: u64 = 1 << 20;
/// Length of the longest reply that is sent inline. A longer copy into the WQE costs more than a
/// SEND from registered memory.
const INLINE_BYTES: usize = HEADER_BYTES + 128;

/// State that all cores share.
pub(super) struct Shared<N: Nic> {
    pub nic: N,
    pub settings: NodeSettings,
    /// Most bytes that one request transfers.
    pub data_bytes: usize,
    /// The donated memory.
    pub memory: DmaMemory,
    pub table: RwLock<Table>,
    pub cores: Vec<Core<N>>,
    pub assignment: Assignment,
}

/// A core: its event source, and its state, which the control thread also changes between turns.
pub(super) struct Core<N: Nic> {
    pub events: Arc<CqEvents<N>>,
    pub state: Mutex<State<N>>,
    /// The core has announced "empty" to its compute nodes.
    pub announced_empty: AtomicBool,
}

/// State of a core.
pub(super) struct State<N: Nic> {
    /// Index of the core.
    index: usize,
    /// CQ for requests of its compute nodes.
    pub requests: N::Cq,
    /// Buffer for completions polled from `requests`.
    arrived: Vec<Completion>,
    /// CQ of the access QPs, to which nothing is posted.
    pub unused: N::Cq,
    pub peers: ClientTable<Connection<N>>,
    pub by_management: HashMap<Qpn, ClientId>,
    /// A reply: its header, and the data of an access.
    reply: Vec<u8>,
    pub counts: Counts,
}

/// Counters of a core.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub allocations: u64,
    pub frees: u64,
    pub refused: u64,
}

/// A core, to be driven by a thread of its own.
pub(super) struct Handle<N: Nic> {
    pub shared: Arc<Shared<N>>,
    pub core: usize,
}

impl<N: Nic> Worker for Handle<N> {
    fn poll(&mut self) -> Result<bool, Error> {
        Ok(self.shared.poll(self.core))
    }

    fn events(&self) -> Arc<dyn CpuEvents> {
        self.shared.cores[self.core].events.clone()
    }
}

impl<N: Nic> Shared<N> {
    /// Polls a core. True if there was work.
    pub fn poll(&self, core: usize) -> bool {
        self.cores[core].state.lock().turn(self)
    }

    /// The core that serves a compute node.
    pub fn core_of(&self, client: ClientId) -> usize {
        self.assignment.core_of(client)
    }

    /// Clears the memory of an object that is being freed, and releases it.
    fn clear(&self, Freed { object, place }: Freed) {
        {
            let mut zeros = Zeros::default();
            let (at, len) = (place.offset as usize, place.len as usize);
            self.nic.zero(&mut zeros, &self.memory, at, len);
        }
        self.table.write().release(object);
        // Compute nodes may wait for memory.
        for core in &self.cores {
            if core.announced_empty.load(Ordering::Acquire) {
                core.events.wake();
            }
        }
    }

    /// Executes an atomic operation on a word of the donated memory, in big-endian byte order.
    fn atomic(&self, at: usize, atomic: Atomic) -> u64 {
        let word = self.memory.word64(at);
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let old = match atomic {
            Atomic::CompareAndSwap { expected, new } => {
                word.compare_exchange(expected.to_be(), new.to_be(), success, failure)
            }
            Atomic::FetchAndAdd { add } => word.fetch_update(success, failure, |word| {
                Some(u64::from_be(word).wrapping_add(add).to_be())
            }),
        };
        u64::from_be(old.unwrap_or_else(|old| old))
    }
}

impl<N: Nic> Core<N> {
    /// A core without compute nodes. `data_bytes`: most bytes that one request transfers.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        (settings, cores): (&NodeSettings, u32),
        data_bytes: usize,
        index: usize,
    ) -> Result<Self, Error> {
        // A new compute node is assigned to the core with the fewest.
        let clients = settings.clients_max.div_ceil(cores);
        let entries = 2 * clients * settings.credits + CqEvents::<N>::MARGIN;
        let requests = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let unused = nic.create_cq(CqAttr { entries: 1, ignore_overrun: true })?;
        let state = State {
            index,
            requests,
            arrived: vec![Completion::EMPTY; BATCH],
            unused,
            peers: ClientTable::default(),
            by_management: HashMap::new(),
            reply: vec![0; HEADER_BYTES + data_bytes],
            counts: Counts::default(),
        };
        Ok(Self {
            events: Arc::new(CqEvents::new(nic, pd, &state.requests)?),
            state: Mutex::new(state),
            announced_empty: AtomicBool::new(false),
        })
    }
}

impl<N: Nic> State<N> {
    /// One turn of the core. True if there was work.
    fn turn(&mut self, shared: &Shared<N>) -> bool {
        // Before new requests: otherwise a compute node could be told that no memory is free while
        // its own lost object has some.
        let mut any = self.take_back_undelivered(shared);
        let n = self.requests.poll(&mut self.arrived);
        any |= n > 0;
        for at in 0..n {
            self.take_request(shared, self.arrived[at]);
        }
        any |= self.clear_departed(shared);
        self.announce(shared);
        any
    }

    /// Frees the objects whose names were not delivered.
    fn take_back_undelivered(&mut self, shared: &Shared<N>) -> bool {
        let mut any = false;
        for (client, peer) in self.peers.iter_mut().filter(|(_, peer)| peer.leaving.is_none()) {
            while let Some(name) = peer.answers.take_lost() {
                let freed = shared.table.write().take_back(*client, ObjectId::from_raw(name));
                if let Some(freed) = freed {
                    shared.clear(freed);
                }
                any = true;
            }
        }
        any
    }

    /// Executes and answers the request of a completion, if there is one.
    fn take_request(&mut self, shared: &Shared<N>, c: Completion) {
        if c.kind != CompletionKind::Receive {
            return; // a wake-up
        }
        let Some(&client) = self.by_management.get(&c.qpn) else { return };
        let Some(peer) = self.peers.get_mut(&client) else { return };
        let mut header = [0; HEADER_BYTES];
        let Some(slot) = peer.answers.receive(&c, &mut header) else { return };
        let (number, ask) = Ask::parse(&header, c.bytes as usize);
        let (outcome, data) = match ask {
            Some(ask) => self.execute(shared, client, slot, ask),
            None => (Outcome::BadRequest, 0),
        };
        self.answer(shared, client, slot, (number, outcome, data));
    }

    /// Executes a request. Returns its outcome, and the length of the data that it has put into
    /// the reply.
    fn execute(
        &mut self,
        shared: &Shared<N>,
        client: ClientId,
        slot: Slot,
        ask: Ask,
    ) -> (Outcome, usize) {
        let len = match ask {
            Ask::Read(range) | Ask::Write(range) => range.len as usize,
            _ => 0,
        };
        if len > shared.data_bytes {
            return (Outcome::BadRequest, 0);
        }
        let data = HEADER_BYTES..HEADER_BYTES + len;
        let outcome = match ask {
            Ask::Allocate { bytes, others } => {
                let outcome = shared.table.write().allocate(client, bytes, others);
                self.counts.allocations += u64::from(matches!(outcome, Outcome::Allocated(_)));
                return (outcome, 0);
            }
            Ask::Free { object } => {
                let freed = shared.table.write().begin_free(client, object);
                let Some(freed) = freed else { return (Outcome::NoSuchObject, 0) };
                shared.clear(freed);
                self.counts.frees += 1;
                return (Outcome::Done, 0);
            }
            Ask::Read(range) => {
                let table = shared.table.read();
                let Some(at) = table.find(client, range, Right::Read) else {
                    return (Outcome::NoSuchObject, 0);
                };
                shared.memory.read(at, &mut self.reply[data]);
                drop(table);
                shared.nic.copied(len);
                return (Outcome::Done, len);
            }
            Ask::Write(range) => {
                let data = &mut self.reply[data];
                self.peers[&client].answers.read_request(slot, HEADER_BYTES, data);
                let table = shared.table.read();
                let Some(at) = table.find(client, range, Right::Write) else {
                    return (Outcome::NoSuchObject, 0);
                };
                shared.memory.write(at, data);
                drop(table);
                shared.nic.copied(len);
                Outcome::Done
            }
            Ask::Atomic { object, offset, atomic } => {
                if !offset.is_multiple_of(8) {
                    return (Outcome::BadRequest, 0);
                }
                let table = shared.table.read();
                let word = Range { object, offset, len: 8 };
                match table.find(client, word, Right::Write) {
                    Some(at) => Outcome::Previous(shared.atomic(at, atomic)),
                    None => Outcome::NoSuchObject,
                }
            }
        };
        (outcome, 0)
    }

    /// Sends a reply with `data` bytes of data, which are behind the header in `self.reply`.
    fn answer(
        &mut self,
        shared: &Shared<N>,
        client: ClientId,
        slot: Slot,
        (number, outcome, data): (u64, Outcome, usize),
    ) {
        let Some(peer) = self.peers.get_mut(&client) else { return };
        let grant = match outcome {
            Outcome::Allocated(object) => Some(object.to_raw()),
            _ => None,
        };
        match outcome {
            Outcome::Done | Outcome::Allocated(_) | Outcome::Previous(_) | Outcome::NoBlock => {}
            Outcome::Empty => {
                shared.cores[self.index].announced_empty.store(true, Ordering::Release);
                peer.answers.announce_empty();
            }
            Outcome::NoSuchObject | Outcome::TooMany(..) | Outcome::BadRequest => {
                self.counts.refused += 1;
            }
        }
        let reply = &mut self.reply[..HEADER_BYTES + data];
        reply[..HEADER_BYTES].copy_from_slice(&outcome.to_bytes(number));
        if reply.len() <= INLINE_BYTES.min(shared.nic.caps().max_inline as usize) {
            return peer.answers.answer(slot, reply, grant);
        }
        let at = slot.offset(HEADER_BYTES + shared.data_bytes);
        peer.replies.memory().write(at, reply);
        let reply = peer.replies.sge(at, reply.len() as u32);
        peer.answers.answer_from(slot, reply);
    }

    /// Announces "available" to compute nodes that wait for memory, when there is some.
    fn announce(&mut self, shared: &Shared<N>) {
        let announced = &shared.cores[self.index].announced_empty;
        if announced.load(Ordering::Acquire)
            && shared.table.read().has_memory()
            && announced.swap(false, Ordering::AcqRel)
        {
            self.peers.values_mut().for_each(|peer| peer.answers.announce_available());
        }
    }

    /// Clears some objects of a departed compute node, and removes one of which nothing is left.
    /// True if there was one.
    fn clear_departed(&mut self, shared: &Shared<N>) -> bool {
        let gone = self.peers.iter_mut().find(|(_, peer)| peer.leaving.is_some());
        let Some((&client, peer)) = gone else { return false };
        let left = peer.leaving.as_mut().expect("just seen");
        let mut cleared = 0;
        while cleared < CLEAR_BYTES
            && let Some(freed) = left.pop()
        {
            cleared += freed.place.len;
            shared.clear(freed);
            self.counts.frees += 1;
        }
        if left.is_empty() {
            self.peers.remove(&client);
            shared.assignment.remove(client);
        }
        true
    }
}
