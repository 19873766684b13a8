//! The table of objects: memory, owners, domains, and the check of each access.
//!
//! ```text
//! allocated ─begin_free, take_back, depart─> freeing ─(cleared)─release─> free, all zero
//! ```
//!
//! A pure state machine. All cores share it under a lock for readers and writers. A core keeps the
//! lock for readers from [`Table::find`] to the end of the access, so that the memory of a freed
//! object is not accessed. It clears that memory without the lock.
//!
//! Invariants: memory belongs to one object, or is free and zero. An object of `Others::None` is
//! freed when its owner departs, another one when the last member of its domain departs.

use std::collections::{BTreeMap, BTreeSet};

use scheme::{ClientId, DomainToken, Others, Right};

use super::message::{ObjectId, Outcome, Range};
use crate::patronus::book::Place;
use crate::patronus::book::members::{Account, DomainId, Domains};
use crate::patronus::book::slabs::{Memory, Piece};
use crate::patronus::message::{Limit, Outcome as Shortage};
use crate::rpc::blocks::Blocks;

/// Settings of a table.
#[derive(Clone, Copy)]
pub struct TableSettings {
    /// The blocks of the donated memory.
    pub blocks: Blocks,
    /// Size in bytes of a chunk.
    pub chunk_bytes: u64,
    /// Bytes of the objects of a domain, or of a compute node without one; `None`: no limit.
    pub domain_bytes: Option<u64>,
    /// Objects of a domain, or of a compute node without one.
    pub objects_max: u64,
}

/// An object.
struct Object {
    /// The compute node that allocated it; `None` if it has departed.
    owner: Option<ClientId>,
    /// Domain of the compute node that allocated it.
    domain: Option<DomainId>,
    others: Others,
    piece: Piece,
    /// The bytes that accesses may reach.
    place: Place,
    is_freeing: bool,
}

/// Entry of the table.
#[derive(Default)]
struct Entry {
    /// Number of earlier objects with this entry.
    generation: u32,
    object: Option<Object>,
}

/// A compute node.
struct Member {
    domain: Option<DomainId>,
    /// Entries of its objects.
    objects: BTreeSet<u32>,
    /// Its objects, if it has no domain.
    account: Account,
}

/// Memory that is to be cleared, and then released by [`Table::release`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Freed {
    /// The object.
    pub object: ObjectId,
    /// All bytes of its piece of memory.
    pub place: Place,
}

/// The objects of a memory node.
pub struct Table {
    settings: TableSettings,
    memory: Memory,
    entries: Vec<Entry>,
    /// Entries without an object; the last one is used first.
    free: Vec<u32>,
    members: BTreeMap<ClientId, Member>,
    domains: Domains,
}

impl Table {
    /// All memory is free and zero.
    pub fn new(settings: TableSettings) -> Self {
        Self {
            settings,
            memory: Memory::new(settings.blocks, settings.chunk_bytes),
            entries: Vec::new(),
            free: Vec::new(),
            members: BTreeMap::new(),
            domains: Domains::default(),
        }
    }

    /// Admits a compute node, as a member of the domain with this token.
    pub fn join(&mut self, client: ClientId, domain: Option<DomainToken>) {
        let domain = domain.map(|token| self.domains.join(token));
        let member = Member { domain, objects: BTreeSet::new(), account: Account::default() };
        self.members.insert(client, member);
    }

    /// Allocates an object of `bytes`.
    pub fn allocate(&mut self, client: ClientId, bytes: u64, others: Others) -> Outcome {
        let Some(member) = self.members.get(&client) else { return Outcome::BadRequest };
        let domain = member.domain;
        if bytes == 0 || (others != Others::None && domain.is_none()) {
            return Outcome::BadRequest;
        }
        let account = match domain {
            Some(domain) => self.domains.get(domain).account,
            None => member.account,
        };
        let TableSettings { objects_max, domain_bytes, .. } = self.settings;
        if account.objects >= objects_max {
            return Outcome::TooMany(Limit::Objects, objects_max);
        }
        if let Some(most) = domain_bytes
            && account.bytes.checked_add(bytes).is_none_or(|sum| sum > most)
        {
            return Outcome::TooMany(Limit::Bytes, most);
        }
        if self.free.is_empty() && self.entries.len() >= ObjectId::ENTRIES_MAX as usize {
            return Outcome::TooMany(Limit::Objects, ObjectId::ENTRIES_MAX.into());
        }
        let piece = match self.memory.take(bytes) {
            Ok(piece) => piece,
            Err(Shortage::Empty) => return Outcome::Empty,
            Err(_) => return Outcome::NoBlock,
        };
        let place = Place { len: bytes, ..self.memory.place(piece) };
        let owner = Some(client);
        let object = Object { owner, domain, others, piece, place, is_freeing: false };
        let entry = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            self.entries.len() as u32 - 1
        });
        let state = &mut self.entries[entry as usize];
        state.object = Some(object);
        let generation = state.generation;
        self.members.get_mut(&client).expect("just seen").objects.insert(entry);
        if let Some(domain) = domain.filter(|_| others != Others::None) {
            self.domains.get_mut(domain).objects.insert(entry);
        }
        let account = self.account(domain, Some(client)).expect("of a compute node that is here");
        account.objects += 1;
        account.bytes += bytes;
        Outcome::Allocated(ObjectId { entry, generation })
    }

    /// The account of an object's bytes; `None` if its compute node has departed.
    fn account(
        &mut self,
        domain: Option<DomainId>,
        owner: Option<ClientId>,
    ) -> Option<&mut Account> {
        match domain {
            Some(domain) => Some(&mut self.domains.get_mut(domain).account),
            None => self.members.get_mut(&owner?).map(|member| &mut member.account),
        }
    }

    /// The object of this name, unless it is being freed.
    fn object(&self, id: ObjectId) -> Option<&Object> {
        let state = self.entries.get(id.entry as usize)?;
        let object = state.object.as_ref().filter(|_| state.generation == id.generation)?;
        (!object.is_freeing).then_some(object)
    }

    /// Finds the bytes of an access with this right. Returns their offset in the donated memory;
    /// `None` if the compute node may not access them.
    pub fn find(&self, client: ClientId, range: Range, right: Right) -> Option<usize> {
        let object = self.object(range.object)?;
        let most = match object.others {
            Others::None => None,
            Others::Read => Some(Right::Read),
            Others::Write | Others::Own => Some(Right::Write),
        };
        let may = object.owner == Some(client)
            || (self.is_of_domain(client, object) && most.is_some_and(|most| right <= most));
        let end = range.offset.checked_add(range.len.into())?;
        let is_inside = may && end <= object.place.len;
        is_inside.then(|| (object.place.offset + range.offset) as usize)
    }

    fn is_of_domain(&self, client: ClientId, object: &Object) -> bool {
        let member = self.members.get(&client);
        object.domain.is_some() && member.is_some_and(|member| member.domain == object.domain)
    }

    /// Begins to free an object; `None` if the compute node may not free it.
    pub fn begin_free(&mut self, client: ClientId, id: ObjectId) -> Option<Freed> {
        let object = self.object(id)?;
        let is_member = object.others == Others::Own && self.is_of_domain(client, object);
        (object.owner == Some(client) || is_member).then(|| self.free(id.entry))
    }

    /// Begins to free an object whose name was not delivered to its owner.
    pub fn take_back(&mut self, client: ClientId, id: ObjectId) -> Option<Freed> {
        let owner = self.object(id)?.owner;
        (owner == Some(client)).then(|| self.free(id.entry))
    }

    fn free(&mut self, entry: u32) -> Freed {
        let Entry { generation, object } = &mut self.entries[entry as usize];
        let object = object.as_mut().expect("an object of the table");
        object.is_freeing = true;
        let object_id = ObjectId { entry, generation: *generation };
        Freed { object: object_id, place: self.memory.place(object.piece) }
    }

    /// Releases an object that is being freed, and whose memory is zero.
    pub fn release(&mut self, id: ObjectId) {
        let state = &mut self.entries[id.entry as usize];
        let object = state.object.take().expect("an object that is being freed");
        // An entry that has had all generations stays unused.
        if let Some(next) = state.generation.checked_add(1) {
            state.generation = next;
            self.free.push(id.entry);
        }
        self.memory.give(object.piece, false);
        if let Some(account) = self.account(object.domain, object.owner) {
            account.objects -= 1;
            account.bytes -= object.place.len;
        }
        if let Some(member) = object.owner.and_then(|owner| self.members.get_mut(&owner)) {
            member.objects.remove(&id.entry);
        }
        if let Some(domain) = object.domain {
            self.domains.get_mut(domain).objects.remove(&id.entry);
            self.domains.forget_if_empty(domain);
        }
    }

    /// Removes a compute node that is gone. Returns the objects that go with it.
    pub fn depart(&mut self, client: ClientId) -> Vec<Freed> {
        let Some(member) = self.members.remove(&client) else { return Vec::new() };
        let mut freed = Vec::new();
        for entry in member.objects {
            let object = self.entries[entry as usize].object.as_mut();
            let object = object.expect("an object of the compute node");
            object.owner = None;
            if object.others == Others::None && !object.is_freeing {
                freed.push(self.free(entry));
            }
        }
        let Some(domain) = member.domain else { return freed };
        let state = self.domains.get_mut(domain);
        state.members -= 1;
        if state.members == 0 {
            for entry in state.objects.clone() {
                if self.entries[entry as usize].object.as_ref().is_some_and(|o| !o.is_freeing) {
                    freed.push(self.free(entry));
                }
            }
        }
        self.domains.forget_if_empty(domain);
        freed
    }

    /// True if some allocation would find memory.
    pub fn has_memory(&self) -> bool {
        self.memory.has_room()
    }

    /// Number of chunks that are free.
    pub fn free_chunks(&self) -> u64 {
        self.memory.free_chunks()
    }

    /// Checks the accounts: memory, entries, objects of compute nodes and domains.
    pub fn audit(&self) -> Result<(), String> {
        let objects = || {
            let entries = (0u32..).zip(&self.entries);
            entries.filter_map(|(at, entry)| Some((at, entry.object.as_ref()?)))
        };
        self.memory.audit(objects().map(|(_, object)| object.piece))?;
        let mut sums: BTreeMap<(Option<DomainId>, Option<ClientId>), (u64, u64)> = BTreeMap::new();
        for (entry, object) in objects() {
            let payer = (object.domain, object.owner.filter(|_| object.domain.is_none()));
            let sum = sums.entry(payer).or_default();
            *sum = (sum.0 + 1, sum.1 + object.place.len);
            let owner = object.owner.map(|owner| self.members.get(&owner));
            let is_listed =
                owner.is_none_or(|owner| owner.is_some_and(|owner| owner.objects.contains(&entry)));
            let is_shared = object.others != Others::None;
            let in_domain = object
                .domain
                .is_some_and(|domain| self.domains.get(domain).objects.contains(&entry));
            if !is_listed || is_shared != in_domain {
                return Err(format!("object {entry} is not on the lists of its owner and domain"));
            }
            if object.owner.is_none() && !object.is_freeing && !is_shared {
                return Err(format!("object {entry} is forgotten"));
            }
        }
        for (client, member) in &self.members {
            let key = (None, Some(*client));
            let Account { objects, bytes } = member.account;
            if sums.get(&key).copied().unwrap_or_default() != (objects, bytes) {
                return Err(format!("compute node {}: {:?}", client.0, member.account));
            }
        }
        for (id, domain) in self.domains.iter() {
            let Account { objects, bytes } = domain.account;
            if sums.get(&(Some(id), None)).copied().unwrap_or_default() != (objects, bytes) {
                return Err(format!("{id:?}: {:?}", domain.account));
            }
        }
        let vacant = self.entries.iter().filter(|entry| entry.object.is_none());
        let usable = vacant.filter(|entry| entry.generation != u32::MAX).count();
        match self.free.iter().collect::<BTreeSet<_>>().len() == self.free.len()
            && self.free.len() >= usable
            && self.free.iter().all(|at| self.entries[*at as usize].object.is_none())
        {
            true => Ok(()),
            false => Err(format!("the list of free entries is {:?}", self.free)),
        }
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
