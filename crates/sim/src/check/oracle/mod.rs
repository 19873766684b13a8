//! What must hold after every step, and the truth that it is held against.
//!
//! The oracle knows three things of each chunk: who holds it, by what clients were told and said (the
//! *shadow*); whose it is by the memory node's books; and who could reach it, by the NIC's own tables. It
//! also has a copy of all donated memory, so that every byte that changes must be explained by what the
//! last step was.
//!
//! [`Invariant`] names what must hold; each is looked at where it could be broken: `told` has what
//! clients are told, `steps` what was done, `reach` who can reach what, and what is free.

mod pages;
mod reach;
mod steps;
mod told;

use std::collections::HashSet;
use std::fmt::Write as _;

use fabric::{DmaMemory, Key};
use pool::finemem::layout::Shape;
use pool::scheme::ClientId;
use rnic::engine::Reach;
use rnic::ids::FunctionId;

use super::books::Books;
use super::case::Case;
use super::invariant::{Invariant, Violation};
use crate::cluster::Link;
use crate::time::Time;

/// What the naps of the memory node's CPU add up to before it has seen to something.
const NAPS: Time = Time::us(12_000);

/// A client, by its place in the oracle's list: one that comes in place of a dead one is another.
pub(super) type Who = usize;

/// A key, and the function of the memory node that it is of.
type Named = (u8, Key);

/// Keys after which the first ones may come again: a tag does after 256 binds.
const FRESH: usize = 200;

/// A chunk in a client's hands.
#[derive(Clone, Debug)]
struct Hold {
    who: Who,
    keys: Vec<Key>,
    /// Which of the memory node's functions they are of.
    function: u8,
    /// A free of it is in flight, or was and nobody knows what came of it.
    freeing: bool,
}

/// What is known of a client.
pub(super) struct Known {
    pub name: String,
    pub honest: bool,
    pub link: Link,
    function: Option<FunctionId>,
    /// Requests to allocate in flight.
    asking: u32,
    alive: bool,
}

/// Things that happened, so that a run can say what it has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Steps of the NIC.
    pub steps: u64,
    /// Chunks granted to honest clients, and to others.
    pub grants: [u64; 2],
    /// Chunks freed by honest clients, and by others.
    pub frees: [u64; 2],
    /// Requests that found no memory.
    pub empty: u64,
    /// Accesses that took effect.
    pub accesses: u64,
    /// Requests and accesses that ended in an error, of honest clients, and of others.
    pub errors: [u64; 2],
    /// Processes that died.
    pub deaths: u64,
    /// Keys that were guessed.
    pub guesses: u64,
    /// How often the memory node's background work was broken off.
    pub broken_off: u64,
}

impl Seen {
    /// Adds another run's.
    pub fn add(&mut self, other: &Seen) {
        let pairs = |a: &mut [u64; 2], b: &[u64; 2]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        self.steps += other.steps;
        pairs(&mut self.grants, &other.grants);
        pairs(&mut self.frees, &other.frees);
        pairs(&mut self.errors, &other.errors);
        self.empty += other.empty;
        self.accesses += other.accesses;
        self.deaths += other.deaths;
        self.guesses += other.guesses;
        self.broken_off += other.broken_off;
    }
}

/// See the module.
pub(super) struct Oracle {
    case: Case,
    /// The memory node's.
    functions: u32,
    books: Books,
    memory: DmaMemory,
    chunk_bytes: u64,
    chunks: u32,
    image: Vec<u8>,
    /// Chunks that were looked at and found clear, and have not changed since.
    found_clear: Vec<bool>,
    /// Steps of the memory node's CPU.
    cpu_steps: u64,
    now_bytes: Vec<u8>,
    /// Holds of each chunk: the last is the one that counts, those before it are being freed.
    holds: Vec<Vec<Hold>>,
    /// Keys that were ever granted.
    granted: Vec<Named>,
    /// Keys of what was released, as its owner was told, or since it is free.
    dead: HashSet<Named>,
    /// Keys that each chunk was granted under since it was free.
    live: Vec<Vec<Named>>,
    /// Pages that were cleared, and that nobody has had since.
    clear: Vec<bool>,
    pub clients: Vec<Known>,
    reaches: Vec<Reach>,
    /// When who died must have been forgotten at the latest.
    pub deaths: Vec<(Time, ClientId)>,
    /// The network has lost or delayed nothing so far.
    pub calm: bool,
    /// How much longer than it should something may take: the CPU naps, or stands still.
    pub slack: Time,
    /// Somebody has named QPs that are not his own: what he is granted, others could reach.
    pub misnamed: bool,
    pub violation: Option<Violation>,
    pub seen: Seen,
    pub now: Time,
    trace: Option<String>,
}

impl Oracle {
    pub fn new(
        case: Case,
        functions: u32,
        books: Books,
        (chunks, chunk_bytes): (u32, u64),
    ) -> Self {
        let memory = books.memory();
        let bytes = chunks as usize * chunk_bytes as usize;
        Self {
            case,
            functions,
            books,
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
            clients: Vec::new(),
            reaches: Vec::new(),
            deaths: Vec::new(),
            calm: true,
            slack: NAPS,
            misnamed: false,
            violation: None,
            seen: Seen::default(),
            now: Time::ZERO,
            trace: None,
        }
    }

    /// What the memory is divided into, where blocks have several sizes.
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

    /// Something is wrong. The first that is, is told.
    pub fn wrong(&mut self, invariant: Invariant, why: impl Into<String>) {
        let violation = Violation { invariant, why: why.into() };
        self.note(|_| format!("VIOLATION: {violation}"));
        self.violation.get_or_insert(violation);
    }

    pub fn name(&self, who: Who) -> &str {
        &self.clients[who].name
    }

    fn name_of(&self, function: FunctionId) -> &str {
        match self.of_function(function) {
            Some(who) => self.name(who),
            None => "memory node",
        }
    }

    // --- who there is --------------------------------------------------------------------------

    pub fn joins(&mut self, name: String, honest: bool, link: Link) -> Who {
        let known = Known { name, honest, link, function: None, asking: 0, alive: true };
        self.clients.push(known);
        self.clients.len() - 1
    }

    pub fn has_function(&mut self, who: Who, function: FunctionId) {
        self.clients[who].function = Some(function);
    }

    /// Whether a function is the memory node's.
    fn is_node(&self, function: FunctionId) -> bool {
        function.0 < self.functions
    }

    fn of_function(&self, function: FunctionId) -> Option<Who> {
        self.clients.iter().position(|c| c.function == Some(function))
    }

    /// A client has gone, with a word or without: `by` this time nothing of it may be left.
    pub fn gone(&mut self, who: Who, by: Time) {
        let client = &mut self.clients[who];
        if !std::mem::take(&mut client.alive) {
            return;
        }
        if let Some(id) = client.link.client() {
            self.deaths.push((by, id));
        }
        for holds in &mut self.holds {
            holds.retain(|h| h.who != who);
        }
    }

    /// The CPU stood still for so long: what waits for it may take longer.
    pub fn pardon(&mut self, time: Time) {
        self.deaths.iter_mut().for_each(|(by, _)| *by += time);
        self.slack += time;
    }

    /// Compute nodes' tables, where access is by pages; `None`: they cannot be seen now.
    pub fn tables_are(&mut self, now: Option<Vec<(ClientId, DmaMemory)>>) {
        self.books.tables_are(now);
    }

    fn is(&self, who: Who, id: ClientId) -> bool {
        self.clients[who].link.client() == Some(id)
    }

    /// What a client owns by the books, less what is only kept ready for it.
    pub fn owned(&self, who: Who) -> Vec<u32> {
        let Some(id) = self.clients[who].link.client() else { return Vec::new() };
        let owns = |e: &u32| self.books.owner(*e) == Some(Some(id)) && !self.books.is_aside(*e);
        (0..self.chunks).filter(owns).collect()
    }

    /// Somebody else's keys, of which function, and where they lead, for who steals.
    pub fn keys_of_others(&self, who: Who) -> Vec<(u8, u64, Key)> {
        let place = |entry: usize| self.memory.addr() + entry as u64 * self.chunk_bytes;
        let all =
            self.holds.iter().enumerate().flat_map(|(e, holds)| holds.iter().map(move |h| (e, h)));
        let others = all.filter(|(_, h)| h.who != who);
        others.flat_map(|(e, h)| h.keys.iter().map(move |k| (h.function, place(e), *k))).collect()
    }
}
