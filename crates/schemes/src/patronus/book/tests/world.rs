//! A book in a world that executes its effects, with a simple model of what must happen.
//!
//! The model is a list of requests and permissions in the order of their arrival. It searches the
//! list where the book counts, and sees extensions in the CAS itself, not in the words that the
//! book reads.

use std::collections::BTreeMap;
use std::time::Duration;

use scheme::{ClientId, DomainToken, GroupId, Others, Right, Sharing};

use crate::patronus::book::{Book, BookSettings, Deviations, Effect, PermissionId, Place, Words};
use crate::patronus::message::{Ask, AskTerms, Lifetime, ObjectId, Outcome};
use crate::rpc::blocks::Blocks;

pub const CHUNK: u64 = 4096;
/// QP groups of each compute node.
pub const GROUPS: u16 = 2;

/// Settings of a small memory node.
pub fn settings(chunks: u32) -> BookSettings {
    BookSettings {
        blocks: Blocks::new(chunks, CHUNK, true),
        chunk_bytes: CHUNK,
        lease_min_us: 10,
        lease_max_us: 1000,
        permissions_max: 8,
        waiting_max: 2,
        domain_bytes: None,
        objects_max: 100,
        deviations: Deviations::NONE,
    }
}

/// Terms that begin tests.
pub fn exclusive(lease_us: u64, wait_us: u64) -> AskTerms {
    AskTerms {
        group: GroupId(0),
        right: Right::Write,
        sharing: Sharing::Exclusive,
        lease_us,
        wait_us,
    }
}

/// Terms of a shared permission.
pub fn shared(lease_us: u64, wait_us: u64) -> AskTerms {
    AskTerms { right: Right::Read, sharing: Sharing::Shared, ..exclusive(lease_us, wait_us) }
}

/// Lifetime words of all compute nodes.
#[derive(Clone, Default)]
pub struct Table(pub BTreeMap<(ClientId, u32), u64>);

impl Table {
    pub fn word(&self, client: ClientId, slot: u32) -> Lifetime {
        Lifetime(self.0.get(&(client, slot)).copied().unwrap_or(0))
    }
}

impl Words for Table {
    fn load(&mut self, client: ClientId, slot: u32) -> Lifetime {
        self.word(client, slot)
    }

    fn swap(&mut self, client: ClientId, slot: u32, new: Lifetime) -> Lifetime {
        Lifetime(self.0.insert((client, slot), new.0).unwrap_or(0))
    }
}

/// Stage of a request or permission in the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    Waiting,
    Opening,
    Open,
    Closing,
    /// The old keys of a renewal are dead, and the new ones are not ordered yet.
    Between,
}

/// A request that wants a permission, or the permission.
#[derive(Clone, Debug)]
pub struct Entry {
    pub client: ClientId,
    pub id: Option<PermissionId>,
    /// The request that is not answered yet.
    pub number: Option<u64>,
    pub since: u64,
    pub until: u64,
    /// `None` for an allocation that the book has not executed yet.
    pub object: Option<ObjectId>,
    pub allocates: bool,
    pub offset: u64,
    pub len: u64,
    pub terms: AskTerms,
    pub stage: Stage,
    pub start: u64,
    /// Lifetime from the start on, with the extensions that succeeded.
    pub life_us: u64,
    /// The word as the holder knows it; `None` before the reply is delivered.
    pub word: Option<Lifetime>,
    /// The holder wrote its own word against the rules.
    pub is_tampered: bool,
    pub is_renewing: bool,
    /// Must be closed when it is open.
    pub is_doomed: bool,
}

impl Entry {
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let overlap =
            self.offset.max(other.offset) < (self.offset + self.len).min(other.offset + other.len);
        let any_exclusive = [self.terms.sharing, other.terms.sharing].contains(&Sharing::Exclusive);
        self.object.is_some() && self.object == other.object && overlap && any_exclusive
    }

    pub fn is_endless(&self) -> bool {
        self.terms.lease_us == AskTerms::FOREVER
    }

    pub fn is_holder(&self) -> bool {
        self.stage != Stage::Waiting
    }
}

/// An object of the model.
#[derive(Clone, Debug)]
pub struct Thing {
    pub id: ObjectId,
    pub owner: Option<ClientId>,
    pub domain: Option<u8>,
    pub others: Others,
    pub place: Place,
    pub is_freeing: bool,
    pub was_open: bool,
}

/// A request without a permission of its own that is not answered yet.
#[derive(Clone, Debug)]
pub struct Asked {
    pub client: ClientId,
    pub number: u64,
    pub ask: Ask,
}

/// A compute node of the model.
#[derive(Clone, Debug)]
pub struct Node {
    pub domain: Option<u8>,
    pub is_alive: bool,
}

/// The call of the book whose effects are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    Of(ClientId),
    Tick,
    Report,
}

/// The book and the model.
#[derive(Clone)]
pub struct World {
    pub book: Book,
    pub settings: BookSettings,
    pub words: Table,
    pub now: u64,
    pub nodes: BTreeMap<ClientId, Node>,
    pub entries: Vec<Entry>,
    pub things: Vec<Thing>,
    pub asked: Vec<Asked>,
    /// Replies that grant permissions and are on their way; with the object that was allocated.
    pub in_flight: Vec<(PermissionId, Lifetime, Option<ObjectId>)>,
    pub clears: Vec<ObjectId>,
    /// Replies of the latest call.
    pub replies: Vec<(ClientId, u64, Outcome)>,
    pub cause: Cause,
}

impl World {
    pub fn new(settings: BookSettings) -> Self {
        Self {
            book: Book::new(settings),
            settings,
            words: Table::default(),
            now: 0,
            nodes: BTreeMap::new(),
            entries: Vec::new(),
            things: Vec::new(),
            asked: Vec::new(),
            in_flight: Vec::new(),
            clears: Vec::new(),
            replies: Vec::new(),
            cause: Cause::Report,
        }
    }

    pub fn join(&mut self, client: u32, domain: Option<u8>) -> ClientId {
        let client = ClientId(client);
        self.book.join(client, domain.map(|byte| DomainToken([byte; 32])));
        self.nodes.insert(client, Node { domain, is_alive: true });
        client
    }

    fn time(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    /// Calls the book, checks the effects and the state.
    fn call(
        &mut self,
        cause: Cause,
        call: impl FnOnce(&mut Book, Duration, &mut Table, &mut Vec<Effect>),
    ) {
        let mut out = Vec::new();
        let now = self.time();
        call(&mut self.book, now, &mut self.words, &mut out);
        self.cause = cause;
        self.replies.clear();
        for effect in out {
            self.effect(effect);
        }
        self.check();
    }

    /// The smallest number that no request of the compute node in flight has.
    fn number(&self, client: ClientId) -> u64 {
        let waiting = self.entries.iter().filter(|entry| entry.client == client);
        let waiting = waiting.filter_map(|entry| entry.number);
        let asked = self.asked.iter().filter(|asked| asked.client == client);
        let used: Vec<_> = waiting.chain(asked.map(|asked| asked.number)).collect();
        (1..).find(|number| !used.contains(number)).expect("a free number")
    }

    /// Sends a request. Returns the reply, if there is one at once.
    pub fn request(&mut self, client: ClientId, ask: Ask) -> Option<Outcome> {
        let number = self.number(client);
        let expected = self.expect(client, number, ask);
        self.call(Cause::Of(client), |book, now, words, out| {
            book.request(now, client, number, ask, GROUPS, words, out);
        });
        let reply = self.replies.iter().find(|(to, of, _)| (*to, *of) == (client, number));
        let reply = reply.map(|(_, _, outcome)| *outcome);
        if let Some(expected) = expected {
            assert_eq!(reply, expected, "{ask:?}");
        }
        if let Ask::Renew { permission, lease_us } = ask
            && reply.is_none()
        {
            self.renews(client, number, permission, lease_us);
        }
        reply
    }

    /// The CAS by which a holder extends its lease. True if it succeeds.
    pub fn cas(&mut self, at: usize, life_us: u64) -> bool {
        let most = self.settings.lease_max_us;
        let entry = &mut self.entries[at];
        let (id, known) = (entry.id.expect("a grant"), entry.word.expect("a delivered grant"));
        let word = self.words.0.get_mut(&(id.client, id.number.slot())).expect("a word");
        if *word != known.0 {
            return false;
        }
        assert_eq!(entry.stage, Stage::Open, "an extension of an ended permission succeeds");
        let new = Lifetime::new(known.nonce(), life_us);
        *word = new.0;
        entry.word = Some(new);
        entry.life_us = life_us.min(most);
        // A shorter lifetime is seen at the next look, which is not due earlier.
        entry.is_tampered |= life_us < known.micros();
        true
    }

    /// A compute node writes any of its words.
    pub fn tamper(&mut self, client: ClientId, slot: u32, word: u64) {
        self.words.0.insert((client, slot), word);
        let own = |entry: &&mut Entry| {
            entry.id.is_some_and(|id| id.client == client && id.number.slot() == slot)
        };
        if let Some(entry) = self.entries.iter_mut().find(own) {
            entry.is_tampered |= entry.stage == Stage::Open;
        }
    }

    /// Reports an executed [`Effect::Open`].
    pub fn opened(&mut self, at: usize, is_open: bool) {
        let entry = &mut self.entries[at];
        let id = entry.id.expect("an effect was seen");
        assert_eq!(entry.stage, Stage::Opening);
        // The object of an allocation that fails is freed, which closes permissions that the
        // compute node acquired by guessing its name.
        let cause = match entry.allocates && !is_open {
            true => Cause::Of(id.client),
            false => Cause::Report,
        };
        let object = entry.object.expect("an effect was seen");
        let thing = self.things.iter_mut().find(|thing| thing.id == object).expect("an object");
        if is_open {
            entry.stage = Stage::Open;
            entry.start = self.now;
            entry.life_us = entry.terms.lease_us;
            thing.was_open = true;
        } else if entry.is_doomed {
            self.entries.remove(at);
        } else {
            thing.is_freeing |= entry.allocates;
        }
        self.call(cause, |book, now, words, out| {
            book.opened(now, id, is_open, words, out);
        });
    }

    /// Reports an executed [`Effect::Close`].
    pub fn closed(&mut self, at: usize) {
        let entry = &mut self.entries[at];
        let id = entry.id.expect("an open permission");
        assert_eq!(entry.stage, Stage::Closing);
        if entry.is_renewing {
            entry.stage = Stage::Between;
        } else {
            self.entries.remove(at);
        }
        self.call(Cause::Report, |book, now, words, out| book.closed(now, id, words, out));
    }

    /// Reports an executed [`Effect::Clear`].
    pub fn cleared(&mut self, at: usize) {
        let id = self.clears.remove(at);
        self.things.retain(|thing| thing.id != id);
        self.call(Cause::Report, |book, now, words, out| book.cleared(now, id, words, out));
    }

    /// A grant reaches its compute node.
    pub fn deliver(&mut self, at: usize) {
        let (id, word, _) = self.in_flight.remove(at);
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.id == Some(id)) {
            entry.word = Some(word);
        }
    }

    /// A grant does not reach its compute node.
    pub fn lose(&mut self, at: usize) {
        let (id, _, allocated) = self.in_flight.remove(at);
        let freed = self.things.iter_mut().find(|thing| Some(thing.id) == allocated);
        if let Some(thing) = freed.filter(|thing| thing.owner == Some(id.client)) {
            thing.is_freeing = true;
        }
        self.call(Cause::Of(id.client), |book, now, words, out| {
            book.undelivered(now, id, words, out);
        });
        let open = self.entries.iter().find(|entry| entry.id == Some(id));
        assert!(open.is_none_or(|entry| entry.stage == Stage::Closing), "{open:?}");
    }

    /// A compute node dies.
    pub fn depart(&mut self, client: ClientId) {
        self.nodes.get_mut(&client).expect("a node").is_alive = false;
        self.asked.retain(|asked| asked.client != client);
        self.in_flight.retain(|(id, _, _)| id.client != client);
        let mut named_nowhere = Vec::new();
        for entry in self.entries.iter_mut().filter(|entry| entry.client == client) {
            if entry.number.take().is_some() && entry.stage == Stage::Opening {
                entry.is_doomed = true;
                named_nowhere.extend(entry.object.filter(|_| entry.allocates));
            }
            entry.is_renewing = false;
        }
        self.entries.retain(|entry| entry.client != client || entry.is_holder());
        let domain = self.nodes[&client].domain;
        let mut alive = self.nodes.values().filter(|node| node.is_alive);
        let is_last = domain.is_some() && alive.all(|node| node.domain != domain);
        for thing in &mut self.things {
            if thing.owner == Some(client) {
                match thing.others {
                    Others::None => thing.is_freeing = true,
                    _ => thing.owner = None,
                }
            }
            thing.is_freeing |= named_nowhere.contains(&thing.id);
            thing.is_freeing |= is_last && thing.domain == domain;
        }
        self.call(Cause::Of(client), |book, now, words, out| book.depart(now, client, words, out));
        let own = |entry: &&Entry| entry.client == client && entry.stage == Stage::Open;
        assert!(!self.entries.iter().any(|entry| own(&entry)), "a dead node's permission is open");
    }

    /// Looks at all deadlines.
    pub fn tick(&mut self) {
        self.call(Cause::Tick, |book, now, words, out| while book.tick(now, words, out) {});
        let (now, most) = (self.now, self.settings.lease_max_us);
        for entry in &self.entries {
            match entry.stage {
                Stage::Waiting => {
                    let before =
                        self.entries.iter().take_while(|other| !std::ptr::eq(*other, entry));
                    let conflicts = before.filter(|other| other.conflicts_with(entry));
                    let is_next = conflicts
                        .clone()
                        .all(|other| other.stage == Stage::Closing && !other.is_renewing);
                    assert!(entry.until > now || is_next, "{entry:?} waits too long");
                }
                Stage::Open if !entry.is_endless() => {
                    let life = if entry.is_tampered { most } else { entry.life_us };
                    assert!(entry.start + life > now, "{entry:?} is open too long");
                }
                _ => {}
            }
        }
    }

    /// Positions of the entries in a stage.
    pub fn in_stage(&self, stage: Stage) -> Vec<usize> {
        let entries = self.entries.iter().enumerate();
        entries.filter(|(_, entry)| entry.stage == stage).map(|(at, _)| at).collect()
    }

    /// Executes effects until none is left.
    pub fn settle(&mut self) {
        loop {
            if let Some(at) = self.in_stage(Stage::Opening).first() {
                self.opened(*at, true);
            } else if let Some(at) = self.in_stage(Stage::Closing).first() {
                self.closed(*at);
            } else if !self.clears.is_empty() {
                self.cleared(0);
            } else {
                return;
            }
        }
    }

    /// Lets all compute nodes die; after that, nothing may be left.
    pub fn drain(&mut self) {
        let nodes: Vec<_> = self.nodes.iter().filter(|(_, node)| node.is_alive).collect();
        for client in nodes.into_iter().map(|(client, _)| *client).collect::<Vec<_>>() {
            self.depart(client);
        }
        self.settle();
        assert_eq!(self.book.free_chunks(), u64::from(self.settings.blocks.chunks()));
        let status = self.book.status();
        assert_eq!((status.objects, status.permissions, status.domains), (0, 0, 0));
        assert!(self.nodes.keys().all(|client| self.book.has_left(*client)));
        assert_eq!(self.book.next_deadline(), None);
    }
}
