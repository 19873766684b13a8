//! What must hold after every step, and the truth that it is held against.
//!
//! The oracle knows three things of each chunk: who holds it, by what clients were told and said (the
//! *shadow*); whose it is by the memory node's books; and who could reach it, by the NIC's own tables. It
//! also has a copy of all donated memory, so that every byte that changes must be explained by what the
//! last step was.
//!
//! | invariant | what is looked at |
//! | --- | --- |
//! | no chunk has two owners | grants that clients were told of; who can reach a chunk |
//! | no access takes effect outside its owner's chunk, or after its release | each WQE that was executed; each byte that changed |
//! | a released chunk never shows old contents | the bytes of what is free, and of what was granted |
//! | released means: keys dead, then cleared, then free | who can reach a chunk when it is cleared, is free, or its free was answered |
//! | the free queue holds each free entry once | the queue, after each step of the memory node |
//! | what is owned is of a live client, or is reclaimed in bounded time | the books, some time after each death, and at the end |
//! | every request ends in success or a named error | what clients were told |

use std::fmt::Write as _;

use fabric::{DmaMemory, Key};
use pool::SchemeKind;
use pool::scheme::{ClientId, Grant};
use rnic::engine::{Aim, NextKind, Reach, Stepped};
use rnic::ids::{Access, FunctionId};

use super::books::Books;
use crate::cluster::Link;
use crate::queues::Observed;
use crate::time::Time;

/// What the naps of the memory node's CPU add up to before it has seen to something.
const NAPS: Time = Time::us(12_000);

/// A client, by its place in the oracle's list: one that comes in place of a dead one is another.
pub(super) type Who = usize;

/// A chunk in a client's hands.
#[derive(Clone, Debug)]
struct Hold {
    who: Who,
    keys: Vec<Key>,
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
    }
}

/// See the module.
pub(super) struct Oracle {
    pub scheme: SchemeKind,
    books: Books,
    memory: DmaMemory,
    chunk_bytes: u64,
    chunks: u32,
    image: Vec<u8>,
    now_bytes: Vec<u8>,
    /// Holds of each chunk: the last is the one that counts, those before it are being freed.
    holds: Vec<Vec<Hold>>,
    /// Keys that were ever granted.
    granted: Vec<Key>,
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
    pub violation: Option<String>,
    pub seen: Seen,
    pub now: Time,
    trace: Option<String>,
}

impl Oracle {
    pub fn new(scheme: SchemeKind, books: Books, (chunks, chunk_bytes): (u32, u64)) -> Self {
        let memory = books.memory();
        let bytes = chunks as usize * chunk_bytes as usize;
        Self {
            scheme,
            books,
            memory,
            chunk_bytes,
            chunks,
            image: vec![0; bytes],
            now_bytes: vec![0; bytes],
            holds: vec![Vec::new(); chunks as usize],
            granted: Vec::new(),
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
    pub fn wrong(&mut self, why: impl Into<String>) {
        let why = why.into();
        if why.is_empty() {
            return; // it was told before
        }
        self.note(|_| format!("VIOLATION: {why}"));
        self.violation.get_or_insert(why);
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

    fn is(&self, who: Who, id: ClientId) -> bool {
        self.clients[who].link.client() == Some(id)
    }

    // --- what clients say and are told ---------------------------------------------------------

    pub fn asks(&mut self, who: Who) {
        self.clients[who].asking += 1;
        self.note(|o| format!("{} asks for a chunk", o.name(who)));
    }

    /// A request to allocate has ended without a grant.
    pub fn not_granted(&mut self, who: Who, why: &str) {
        self.clients[who].asking -= 1;
        self.note(|o| format!("{} gets none: {why}", o.name(who)));
    }

    pub fn granted(&mut self, who: Who, grant: &Grant) {
        self.clients[who].asking -= 1;
        let honest = self.clients[who].honest;
        self.seen.grants[!honest as usize] += 1;
        let entry = grant.entry;
        self.note(|o| format!("{} is granted chunk {entry}", o.name(who)));
        if entry >= self.chunks
            || grant.len != self.chunk_bytes
            || grant.addr != self.memory.addr() + entry as u64 * self.chunk_bytes
        {
            return self.wrong(format!("{} is granted what is no chunk", self.name(who)));
        }
        if let Some(owner) = self.books.owner(entry)
            && !owner.is_some_and(|id| self.is(who, id))
        {
            let name = self.name(who);
            self.wrong(format!("{name} is granted chunk {entry}, whose owner is {owner:?}"));
        }
        if let Some(last) = self.holds[entry as usize].last()
            && !last.freeing
        {
            let (name, other) = (self.name(who), self.name(last.who));
            self.wrong(format!("{name} is granted chunk {entry}, which {other} holds"));
        }
        let at = entry as usize * self.chunk_bytes as usize;
        if honest && self.image[at..at + self.chunk_bytes as usize].iter().any(|b| *b != 0) {
            let name = self.name(who);
            self.wrong(format!("{name} is granted chunk {entry}, which shows old contents"));
        }
        let keys = grant.keys().to_vec();
        let old = keys.iter().find(|k| self.granted.contains(k));
        // A tag comes again after 256 binds.
        if let Some(key) = old.filter(|_| self.granted.len() < 200) {
            let (name, tag) = (self.name(who), key.tag());
            self.wrong(format!("{name} is granted chunk {entry} under an old key (tag {tag})"));
        }
        self.granted.extend(&keys);
        self.holds[entry as usize].push(Hold { who, keys, freeing: false });
    }

    /// A client asks for a chunk to be freed.
    pub fn frees(&mut self, who: Who, entry: u32, keys: &[Key]) {
        self.note(|o| format!("{} frees chunk {entry}", o.name(who)));
        if let Some(hold) = self.hold_of(who, entry, keys) {
            hold.freeing = true;
        }
    }

    fn hold_of(&mut self, who: Who, entry: u32, keys: &[Key]) -> Option<&mut Hold> {
        let holds = self.holds.get_mut(entry as usize)?;
        holds.iter_mut().find(|h| h.who == who && h.keys == keys)
    }

    /// A client is told that the chunk is free.
    pub fn freed(&mut self, who: Who, entry: u32, keys: &[Key]) {
        self.note(|o| format!("{} has freed chunk {entry}", o.name(who)));
        let honest = self.clients[who].honest;
        self.seen.frees[!honest as usize] += 1;
        if let Some(holds) = self.holds.get_mut(entry as usize) {
            holds.retain(|h| h.who != who || h.keys != keys);
        }
        if self.scheme == SchemeKind::RpcMw1 {
            return; // by design its windows are rebound by the next allocation
        }
        if self.reaches.iter().any(|r| keys.contains(&r.key)) {
            let name = self.name(who);
            self.wrong(format!(
                "{name} was told that chunk {entry} is free, and its key still opens it"
            ));
        }
    }

    /// An error of an honest client: is it one that may be?
    pub fn error(&mut self, who: Who, what: &str, error: &pool::Error) {
        use pool::Error as E;
        let honest = self.clients[who].honest;
        self.seen.errors[!honest as usize] += 1;
        self.note(|o| format!("{} {what}: {error}", o.name(who)));
        if !honest {
            return;
        }
        let may_be = match error {
            E::OutOfMemory { .. } => true,
            // What only the network may bring about.
            E::Access { .. } | E::ManagementBroken { .. } | E::Refused { .. } => !self.calm,
            _ => false,
        };
        if !may_be {
            let name = self.name(who);
            self.wrong(format!("{name} {what}, and that ends with: {error}"));
        }
    }

    // --- after each step -----------------------------------------------------------------------

    /// A QP did something. `reaches` is asked again if that may have changed.
    pub fn after_step(&mut self, o: &Observed, look: impl FnOnce(&mut Vec<Reach>)) {
        self.seen.steps += 1;
        self.note(|oracle| oracle.describe(o));
        let node = o.function == FunctionId::PHYSICAL;
        if matches!(o.next.kind, NextKind::Window | NextKind::Invalidate) {
            self.look(look);
        }
        let done = o.stepped == Stepped::Done || o.unanswered;
        if let Some(aim) = o.aim.filter(|_| done && !o.lost) {
            match self.of_function(o.function) {
                Some(who) => self.accessed(who, &aim, o.stepped == Stepped::Done),
                None => self.node_wrote(&aim),
            }
        }
        let by = if node { None } else { o.aim.map(|aim| (o.function, aim)) };
        self.account_for_bytes(by);
        let moves = matches!(o.next.kind, NextKind::Send { .. } | NextKind::Atomic);
        if node && (moves || matches!(o.next.kind, NextKind::Write { .. } | NextKind::Window)) {
            self.check_free();
        }
    }

    /// Something else happened: a CPU worked, or a message arrived at one.
    pub fn after_cpu(&mut self, look: impl FnOnce(&mut Vec<Reach>)) {
        self.look(look);
        self.account_for_bytes(None);
        self.check_free();
    }

    fn describe(&self, o: &Observed) -> String {
        let mut line = format!(
            "{} QP {} -> {}: {:?}",
            self.name_of(o.function),
            o.qpn.raw(),
            o.next.peer.raw(),
            o.next.kind
        );
        if let Some(aim) = &o.aim
            && let Some((entry, at)) = self.place(aim.addr)
        {
            let _ = write!(line, " at chunk {entry} +{at}");
        }
        let _ = write!(line, " {:?}", o.stepped);
        if o.lost {
            line.push_str(", lost");
        }
        if o.unanswered {
            line.push_str(", the answer lost");
        }
        line
    }

    /// The chunk that an address lies in, and where in it.
    fn place(&self, addr: u64) -> Option<(u32, u64)> {
        let at = addr.checked_sub(self.memory.addr()).filter(|at| *at < self.image.len() as u64)?;
        Some(((at / self.chunk_bytes) as u32, at % self.chunk_bytes))
    }

    /// A client's access took effect, or may have.
    fn accessed(&mut self, who: Who, aim: &Aim, surely: bool) {
        if !surely {
            return; // what it wrote is seen in the bytes
        }
        self.seen.accesses += 1;
        let kind = match aim.need {
            Access::REMOTE_READ => "reads",
            Access::REMOTE_WRITE => "writes",
            _ => "changes",
        };
        let Some((entry, at)) = self.place(aim.addr) else {
            if aim.len > 0 {
                let name = self.name(who);
                self.wrong(format!("{name} {kind} {} bytes of what is no chunk", aim.len));
            }
            return;
        };
        if at + aim.len > self.chunk_bytes {
            let name = self.name(who);
            self.wrong(format!("{name} {kind} beyond the end of chunk {entry}"));
        } else if !self.may_access(who, entry, aim.key) {
            let (name, owner) = (self.name(who), self.books.owner(entry));
            let holds = self.holds[entry as usize].last().map(|h| self.name(h.who));
            self.wrong(format!(
                "{name} {kind} chunk {entry} with a key that is not its own any more: it is held by \
                 {holds:?}, its owner is {owner:?}"
            ));
        }
    }

    fn may_access(&self, who: Who, entry: u32, key: Key) -> bool {
        let holds = &self.holds[entry as usize];
        let holds_it = |h: &Hold| h.who == who && h.keys.contains(&key);
        if holds.iter().any(holds_it) || self.is_given_away(entry) {
            return true;
        }
        let client = &self.clients[who];
        // Who keeps to no rule may have thrown the grant away, or use it before it is told.
        let owns = || match self.books.owner(entry) {
            Some(Some(id)) => self.is(who, id),
            Some(None) => client.asking > 0,
            None => true,
        };
        !client.honest && owns()
    }

    /// The memory node wrote to a chunk: it clears it, when no key of it is alive.
    fn node_wrote(&mut self, aim: &Aim) {
        if aim.need == Access::REMOTE_WRITE
            && let Some((entry, _)) = self.place(aim.addr)
        {
            self.cleared(entry);
        }
    }

    fn cleared(&mut self, entry: u32) {
        if let Some(who) = self.reached_by(entry) {
            let name = self.name(who);
            self.wrong(format!("chunk {entry} is cleared while {name} can still reach it"));
        }
        if let Some(hold) = self.holds[entry as usize].last()
            && !hold.freeing
        {
            let name = self.name(hold.who);
            self.wrong(format!("chunk {entry} is cleared while {name} holds it"));
        }
    }

    /// Every byte that changed must be one that the last step may change.
    fn account_for_bytes(&mut self, by: Option<(FunctionId, Aim)>) {
        let mut now = std::mem::take(&mut self.now_bytes);
        self.memory.read(0, &mut now);
        if now != self.image {
            let size = self.chunk_bytes as usize;
            for entry in 0..self.chunks {
                let (old, new) = (
                    &self.image[entry as usize * size..][..size],
                    &now[entry as usize * size..][..size],
                );
                let Some(first) = (0..size).find(|i| old[*i] != new[*i]) else { continue };
                let last = (0..size).rfind(|i| old[*i] != new[*i]).unwrap_or(first);
                let zeros = (first..=last).all(|i| new[i] == 0 || new[i] == old[i]);
                self.changed(entry, (first as u64, last as u64), zeros, by);
            }
            self.image.copy_from_slice(&now);
        }
        self.now_bytes = now;
    }

    fn changed(
        &mut self,
        entry: u32,
        (first, last): (u64, u64),
        zeros: bool,
        by: Option<(FunctionId, Aim)>,
    ) {
        let Some((function, aim)) = by else {
            return match zeros {
                true => self.cleared(entry),
                false => self.wrong(format!(
                    "bytes {first} to {last} of chunk {entry} change by themselves"
                )),
            };
        };
        let base = self.memory.addr() + entry as u64 * self.chunk_bytes;
        let covers = aim.addr <= base + first && base + last < aim.addr + aim.len;
        let who = self.of_function(function);
        if aim.need == Access::REMOTE_READ || !covers {
            let name = self.name_of(function);
            self.wrong(format!(
                "{name} changes bytes {first} to {last} of chunk {entry}, where it does not aim"
            ));
        } else if !who.is_some_and(|who| self.may_access(who, entry, aim.key)) {
            let name = self.name_of(function);
            self.wrong(format!("{name} changes chunk {entry}, which is not its own"));
        }
    }

    // --- who can reach what --------------------------------------------------------------------

    fn look(&mut self, look: impl FnOnce(&mut Vec<Reach>)) {
        let mut reaches = std::mem::take(&mut self.reaches);
        reaches.clear();
        look(&mut reaches);
        // The memory node's own queues work on chunks too.
        reaches.retain(|r| r.function != FunctionId::PHYSICAL);
        self.reaches = reaches;
        self.check_reaches();
    }

    /// Who can reach a chunk, if somebody can.
    fn reached_by(&self, entry: u32) -> Option<Who> {
        let start = self.memory.addr() + entry as u64 * self.chunk_bytes;
        let into = |r: &&Reach| r.start < start + self.chunk_bytes && start < r.start + r.len;
        self.reaches.iter().find(into).and_then(|r| self.of_function(r.function))
    }

    fn check_reaches(&mut self) {
        let type1 = self.scheme == SchemeKind::RpcMw1;
        let mut by: Vec<Option<Who>> = vec![None; self.chunks as usize];
        for at in 0..self.reaches.len() {
            let r = self.reaches[at];
            let Some((entry, within)) = self.place(r.start) else { continue };
            if within + r.len > self.chunk_bytes {
                return self.wrong(format!("a key of chunk {entry} opens what is beyond it"));
            }
            let Some(who) = self.of_function(r.function) else { continue };
            // A type-1 window opens to all who have its key: that is what is unsafe about it.
            if type1 || self.is_given_away(entry) {
                continue;
            }
            if let Some(other) = by[entry as usize].replace(who)
                && other != who
            {
                let (a, b) = (self.name(other), self.name(who));
                return self.wrong(format!("chunk {entry} can be reached by {a} and by {b}"));
            }
            self.check_reach(who, entry);
        }
    }

    /// Whether a chunk is of somebody who may have had it bound to another's QPs: that harms himself only.
    fn is_given_away(&self, entry: u32) -> bool {
        let honest = |who: Who| self.clients[who].honest;
        self.misnamed
            && match self.books.owner(entry) {
                Some(Some(id)) => {
                    (0..self.clients.len()).any(|who| self.is(who, id) && !honest(who))
                }
                // On its way to somebody, or back from him.
                _ => self.holds[entry as usize].last().is_none_or(|h| !honest(h.who)),
            }
    }

    /// Whether a chunk is a client's, or may be.
    pub fn may_own(&self, who: Who, entry: u32) -> bool {
        let holds = self.holds.get(entry as usize);
        holds.is_some_and(|holds| {
            let owner = self.books.owner(entry);
            holds.iter().any(|h| h.who == who)
                || owner.is_none_or(|o| o.is_some_and(|id| self.is(who, id)))
        })
    }

    fn check_reach(&mut self, who: Who, entry: u32) {
        let holds = &self.holds[entry as usize];
        if holds.iter().any(|h| h.who == who) {
            return;
        }
        let last = holds.last();
        if let Some(other) = last.filter(|h| !h.freeing) {
            let (name, other) = (self.name(who), self.name(other.who));
            return self.wrong(format!("{name} can reach chunk {entry}, which {other} holds"));
        }
        // One that was granted and not told yet, or told to who did not get the answer.
        let client = &self.clients[who];
        let owns = match self.books.owner(entry) {
            Some(Some(id)) => self.is(who, id),
            Some(None) | None => true, // on its way from one to the other
        };
        if !owns && client.asking == 0 {
            let name = self.name(who);
            self.wrong(format!("{name} can reach chunk {entry}, which is not its own"));
        }
    }

    // --- what is free --------------------------------------------------------------------------

    fn check_free(&mut self) {
        let free = match self.books.free() {
            Ok(Some(free)) => free,
            Ok(None) => return,
            Err(why) => return self.wrong(why),
        };
        let mut seen = 0u64;
        for entry in free {
            let bit = 1 << (entry % 64);
            if seen & bit != 0 {
                return self.wrong(format!("chunk {entry} is free twice"));
            }
            seen |= bit;
            if let Some(Some(owner)) = self.books.owner(entry) {
                return self.wrong(format!("chunk {entry} is free, and its owner is {owner:?}"));
            }
            if let Some(hold) = self.holds[entry as usize].iter().find(|h| !h.freeing) {
                let name = self.name(hold.who);
                return self.wrong(format!("chunk {entry} is free, and {name} holds it"));
            }
            if let Some(who) = self.reached_by(entry) {
                let name = self.name(who);
                return self.wrong(format!("chunk {entry} is free, and {name} can reach it"));
            }
            let at = entry as usize * self.chunk_bytes as usize;
            if self.image[at..at + self.chunk_bytes as usize].iter().any(|b| *b != 0) {
                return self.wrong(format!("chunk {entry} is free, and is not clear"));
            }
        }
    }

    /// All have gone: nothing is in memory, and nobody can reach it.
    pub fn check_empty(&self) -> Result<(), String> {
        match (self.image.iter().position(|b| *b != 0), self.reaches.first()) {
            (Some(at), _) => Err(format!("all have gone, and byte {at} is not clear")),
            (_, Some(reach)) => Err(format!("all have gone, and a key opens: {reach:?}")),
            _ => Ok(()),
        }
    }

    /// What a client owns by the books, less what is only kept ready for it.
    pub fn owned(&self, who: Who) -> Vec<u32> {
        let Some(id) = self.clients[who].link.client() else { return Vec::new() };
        let owns = |e: &u32| self.books.owner(*e) == Some(Some(id)) && !self.books.is_aside(*e);
        (0..self.chunks).filter(owns).collect()
    }

    /// Somebody else's keys and where they lead, for who steals.
    pub fn keys_of_others(&self, who: Who) -> Vec<(u32, u64, Key)> {
        let place = |entry: usize| self.memory.addr() + entry as u64 * self.chunk_bytes;
        let all =
            self.holds.iter().enumerate().flat_map(|(e, holds)| holds.iter().map(move |h| (e, h)));
        let others = all.filter(|(_, h)| h.who != who);
        others.flat_map(|(e, h)| h.keys.iter().map(move |k| (e as u32, place(e), *k))).collect()
    }
}
