//! The book: objects, permissions, waiters and deadlines of a memory node.
//!
//! A pure state machine. Inputs are requests, results of window operations, the time, and the
//! lifetime words; outputs are [`Effect`]s. The caller executes the effects without holding a lock
//! of the book and reports their results.
//!
//! ```text
//! request ─no conflict───────> opening ─opened─> open ─revoke│expiry│free│death─> closing ─> ended
//!    └─conflict─> waiting ─turn──^  ^                                                │
//!                                   └───────────renewal, under a new number──────────┘
//! object: allocated ─free─> freeing ─last permission ended─> clearing ─cleared─> released
//! ```
//!
//! | file | content |
//! | --- | --- |
//! | `requests` | checks of requests, and what they begin |
//! | `queue` | conflicts: who waits, and whose turn it is |
//! | `lifecycle` | permissions: opened, noticed, extended, expired, closed |
//! | `release` | objects: freed, cleared, released; departure of compute nodes |
//! | `permissions`, `objects`, `members` | the tables |
//! | `deadlines` | the queue of deadlines |
//! | `slabs` | the allocator |
//! | `deviations` | rules that the schemes for comparison break |
//! | `audit` | views for tests and the simulator, and the check of the accounts |
//!
//! Invariants: two permissions that conflict are never opening, open or closing at the same time. A
//! range is opened only after the keys of every conflicting permission are dead. A compute
//! node that writes into its lifetime words changes only the ends of its own leases, and no lease
//! is longer than `lease_max_us`. Work is at most linear in the permissions of one object, except
//! for departures, which are linear in what the compute node has.
//!
//! A request that waits knows the number of permissions and earlier requests with which it
//! conflicts. Each one that ends counts it down; at zero, the request's turn has come.

mod audit;
mod deadlines;
mod deviations;
mod lifecycle;
pub(crate) mod members;
mod objects;
mod permissions;
mod queue;
mod release;
mod requests;
pub(crate) mod slabs;
#[cfg(test)]
mod tests;

pub use audit::{ObjectState, ObjectView, PermissionState, PermissionView};
pub use deviations::Deviations;
pub use permissions::PERMISSION_BYTES;

use std::collections::BTreeMap;
use std::time::Duration;

use scheme::{ClientId, DomainToken, GroupId, LeaseStatus, Right};

use self::deadlines::{Deadlines, Moment};
use self::members::{Domains, Member};
use self::objects::Objects;
use self::permissions::{Key, Permission};
use self::slabs::Memory;
use super::message::Lifetime;
use super::message::{Ask, ObjectId, Outcome, PermissionNumber};
use crate::rpc::blocks::Blocks;

/// A permission of a compute node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PermissionId {
    /// The compute node.
    pub client: ClientId,
    /// Number of the permission.
    pub number: PermissionNumber,
}

/// A range of the donated memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A task for the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Open a range to a compute node, then call [`Book::opened`].
    Open {
        /// The permission.
        id: PermissionId,
        /// The range.
        place: Place,
        /// The operations.
        right: Right,
        /// The group whose QPs use the keys.
        group: GroupId,
        /// The [`Deviations::hole`] in front of the range is free for the header.
        has_hole: bool,
    },
    /// Make the keys of a permission dead, then call [`Book::closed`].
    Close {
        /// The permission.
        id: PermissionId,
    },
    /// Forget a permission whose keys stay valid for now, then call [`Book::closed`]
    /// ([`Deviations::delays`]).
    Abandon {
        /// The permission.
        id: PermissionId,
    },
    /// Write zeros over a range, then call [`Book::cleared`].
    Clear {
        /// The object.
        object: ObjectId,
        /// Its memory.
        place: Place,
    },
    /// Reply to a request. The caller fills in the address and the keys of a grant: `address` is
    /// an offset in the donated memory, and `lanes` is 0.
    Reply {
        /// The compute node.
        client: ClientId,
        /// Number of the request.
        number: u64,
        /// The result.
        outcome: Outcome,
        /// The object's entry, or 0.
        entry: u32,
    },
}

/// The lifetime words of all compute nodes.
pub trait Words {
    /// Reads a word.
    fn load(&mut self, client: ClientId, slot: u32) -> Lifetime;

    /// Replaces a word with an atomic swap and returns the old one.
    fn swap(&mut self, client: ClientId, slot: u32, new: Lifetime) -> Lifetime;
}

/// Settings of a book.
#[derive(Clone, Copy)]
pub struct BookSettings {
    /// The blocks of the donated memory.
    pub blocks: Blocks,
    /// Size in bytes of a chunk.
    pub chunk_bytes: u64,
    /// Shortest lease.
    pub lease_min_us: u64,
    /// Longest lease, with all its extensions.
    pub lease_max_us: u64,
    /// Permissions of a compute node, with its requests that wait.
    pub permissions_max: u32,
    /// Requests of a compute node that wait for permissions to end.
    pub waiting_max: u32,
    /// Bytes of the objects of a domain, or of a compute node without one; `None`: no limit.
    pub domain_bytes: Option<u64>,
    /// Objects of a domain, or of a compute node without one.
    pub objects_max: u64,
    /// The rules that the book breaks.
    pub deviations: Deviations,
}

/// The manager of a memory node.
#[cfg_attr(test, derive(Clone))]
pub struct Book {
    settings: BookSettings,
    /// The latest moment of a call.
    now: Moment,
    memory: Memory,
    objects: Objects,
    members: BTreeMap<ClientId, Member>,
    domains: Domains,
    deadlines: Deadlines,
    counters: LeaseStatus,
}

/// Deadlines that one call of [`Book::tick`] looks at.
const TICK_MOST: usize = 64;

impl Book {
    /// All memory is free and zero.
    pub fn new(settings: BookSettings) -> Self {
        Self {
            settings,
            now: Moment::default(),
            memory: Memory::new(settings.blocks, settings.chunk_bytes),
            objects: Objects::default(),
            members: BTreeMap::new(),
            domains: Domains::default(),
            deadlines: Deadlines::default(),
            counters: LeaseStatus::default(),
        }
    }

    /// Admits a compute node, as a member of the domain with this token. Its number must be unused:
    /// [`Book::has_left`].
    pub fn join(&mut self, client: ClientId, domain: Option<DomainToken>) {
        debug_assert!(self.has_left(client), "compute node {} joins twice", client.0);
        let domain = domain.map(|token| self.domains.join(token));
        self.members.insert(client, Member::new(domain, self.settings.permissions_max));
    }

    /// Executes a request of a compute node with `groups` groups of QPs, or begins to. An address
    /// in the request is an offset in the donated memory.
    #[expect(clippy::too_many_arguments, reason = "the border of the book: all are different")]
    pub fn request(
        &mut self,
        now: Duration,
        client: ClientId,
        number: u64,
        ask: Ask,
        groups: u16,
        words: &mut dyn Words,
        out: &mut Vec<Effect>,
    ) {
        self.turn(now, words, out).request(client, number, ask, groups);
    }

    /// The range of a permission was opened, or could not be opened.
    pub fn opened(
        &mut self,
        now: Duration,
        id: PermissionId,
        is_open: bool,
        words: &mut dyn Words,
        out: &mut Vec<Effect>,
    ) {
        self.turn(now, words, out).opened(id, is_open);
    }

    /// The keys of a permission are dead.
    pub fn closed(
        &mut self,
        now: Duration,
        id: PermissionId,
        words: &mut dyn Words,
        out: &mut Vec<Effect>,
    ) {
        self.turn(now, words, out).closed(id);
    }

    /// The memory of an object is zero.
    pub fn cleared(
        &mut self,
        now: Duration,
        object: ObjectId,
        words: &mut dyn Words,
        out: &mut Vec<Effect>,
    ) {
        self.turn(now, words, out).cleared(object);
    }

    /// Looks at deadlines that have passed: ends leases that were not extended, and answers
    /// requests that waited in vain. Returns true if more have passed than one call looks at.
    pub fn tick(&mut self, now: Duration, words: &mut dyn Words, out: &mut Vec<Effect>) -> bool {
        let mut turn = self.turn(now, words, out);
        for _ in 0..TICK_MOST {
            let now = turn.book.now;
            let Some(key) = turn.book.deadlines.pop_due(now) else { return false };
            turn.due(key);
        }
        self.deadlines.first().is_some_and(|at| at <= self.now)
    }

    /// The earliest moment at which [`Book::tick`] has something to do.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(Duration::from)
    }

    /// The reply that granted a permission was not delivered: takes the permission back, and frees
    /// the object if the same request allocated it. Comes before [`Book::depart`].
    pub fn undelivered(
        &mut self,
        now: Duration,
        id: PermissionId,
        words: &mut dyn Words,
        out: &mut Vec<Effect>,
    ) {
        self.turn(now, words, out).undelivered(id);
    }

    /// A compute node is gone; its QPs are dead. Drops its requests, closes its permissions, and
    /// frees the objects that no other compute node may use. Its lifetime words are not used any
    /// more.
    pub fn depart(
        &mut self,
        now: Duration,
        client: ClientId,
        words: &mut dyn Words,
        out: &mut Vec<Effect>,
    ) {
        self.turn(now, words, out).depart(client);
    }

    /// True if nothing is left of a compute node that has departed or never joined: its number may
    /// be used again.
    pub fn has_left(&self, client: ClientId) -> bool {
        !self.members.contains_key(&client)
    }

    /// Drops the requests of a compute node that wait: the connection of its management QP is
    /// closed, so that it gets no replies.
    pub fn forget_requests(
        &mut self,
        now: Duration,
        client: ClientId,
        words: &mut dyn Words,
        out: &mut Vec<Effect>,
    ) {
        self.turn(now, words, out).forget_requests(client);
    }

    /// True if some allocation would find memory.
    pub fn has_memory(&self) -> bool {
        self.memory.has_room()
    }

    /// Number of chunks that are free.
    pub fn free_chunks(&self) -> u64 {
        self.memory.free_chunks()
    }

    /// Counters and sizes, as far as the book knows them. The other fields are 0.
    pub fn status(&self) -> LeaseStatus {
        LeaseStatus { domains: self.domains.count(), ..self.counters.clone() }
    }

    fn turn<'a>(
        &'a mut self,
        now: Duration,
        words: &'a mut dyn Words,
        out: &'a mut Vec<Effect>,
    ) -> Turn<'a> {
        self.now = self.now.max(now.into());
        Turn { book: self, words, out }
    }

    /// True if keys over freed memory may stay valid: memory is adequate.
    fn delays(&self) -> bool {
        self.settings.deviations.delays && self.memory.is_adequate()
    }

    fn member(&self, client: ClientId) -> &Member {
        &self.members[&client]
    }

    fn member_mut(&mut self, client: ClientId) -> &mut Member {
        self.members.get_mut(&client).expect("a compute node of the book")
    }

    /// The permission in a slot, which must have one.
    fn at(&self, key: Key) -> &Permission {
        let slot = self.member(key.client).slots.get(key.slot).expect("a slot in use");
        slot.permission.as_ref().expect("a permission in the slot")
    }

    /// The permission in a slot, which must have one.
    fn at_mut(&mut self, key: Key) -> &mut Permission {
        let slot = self.member_mut(key.client).slots.get_mut(key.slot).expect("a slot in use");
        slot.permission.as_mut().expect("a permission in the slot")
    }

    /// The number of the permission in a slot.
    fn number(&self, key: Key) -> PermissionNumber {
        let slot = self.member(key.client).slots.get(key.slot).expect("a slot in use");
        PermissionNumber::new(slot.serial, key.slot)
    }

    fn id(&self, key: Key) -> PermissionId {
        PermissionId { client: key.client, number: self.number(key) }
    }

    /// The slot of a permission that has not ended.
    fn key(&self, id: PermissionId) -> Option<Key> {
        let key = Key { client: id.client, slot: id.number.slot() };
        let slot = self.members.get(&key.client)?.slots.get(key.slot)?;
        slot.permission.as_ref()?;
        (self.number(key) == id.number).then_some(key)
    }

    /// The range of a permission in the donated memory.
    fn place(&self, permission: &Permission) -> Place {
        let object = self.objects.at(permission.object).place;
        Place { offset: object.offset + permission.offset, len: permission.len }
    }
}

/// One call of the book, with all it may use.
struct Turn<'a> {
    book: &'a mut Book,
    words: &'a mut dyn Words,
    out: &'a mut Vec<Effect>,
}

impl Turn<'_> {
    /// Answers a request, unless its compute node has departed.
    fn reply(&mut self, client: ClientId, number: u64, outcome: Outcome, entry: u32) {
        let member = self.book.members.get(&client);
        if member.is_some_and(|member| !member.is_departed) {
            self.out.push(Effect::Reply { client, number, outcome, entry });
        }
    }
}
