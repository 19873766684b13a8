//! Views of permissions and objects, and the check of the accounts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use scheme::{ClientId, DomainToken, GroupId, LeaseStatus, Others, Right, Sharing};

use super::members::Account;
use super::permissions::{Key, Permission};
use super::{Book, Moment, PermissionId, Place};
use crate::patronus::message::{AskTerms, ObjectId};

/// State of a permission.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PermissionState {
    /// The request waits until conflicting permissions have ended.
    Waiting,
    /// The range is being opened.
    Opening,
    /// The keys are valid.
    Open,
    /// The keys are being made dead. After that, a renewal opens the range again.
    Closing,
}

/// A permission, for tests and the simulator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PermissionView {
    /// The permission.
    pub id: PermissionId,
    /// Its object.
    pub object: ObjectId,
    /// Its range in the donated memory.
    pub place: Place,
    /// The operations.
    pub right: Right,
    /// The permissions beside which it may exist.
    pub sharing: Sharing,
    /// The group whose QPs use the keys.
    pub group: GroupId,
    /// Its state.
    pub state: PermissionState,
    /// Start of the lease, if it has begun.
    pub start: Option<Duration>,
    /// End of the lease, as far as the book knows it, or of the wait. Extensions that the book has
    /// not seen yet are not in it. `None` without a lease, and while it is opened or closed.
    pub deadline: Option<Duration>,
    /// The lease cannot be extended any more.
    pub is_noticed: bool,
    /// The lease that was given; [`AskTerms::FOREVER`]: none.
    pub lease_us: u64,
}

/// State of an object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ObjectState {
    /// Permissions can be acquired.
    Present,
    /// The last permissions end.
    Freeing,
    /// The memory is being cleared.
    Clearing,
}

/// An object, for tests and the simulator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectView {
    /// The object.
    pub id: ObjectId,
    /// The compute node that allocated it, unless it has departed.
    pub owner: Option<ClientId>,
    /// The domain of the compute node that allocated it.
    pub domain: Option<DomainToken>,
    /// The right of other members of the domain.
    pub others: Others,
    /// Its bytes in the donated memory.
    pub place: Place,
    /// All memory that belongs to it.
    pub whole: Place,
    /// Its state.
    pub state: ObjectState,
    /// Requests that wait.
    pub waiting: usize,
}

impl Book {
    /// A permission that waits or has not ended.
    pub fn permission(&self, id: PermissionId) -> Option<PermissionView> {
        self.key(id).map(|key| self.view(key, self.at(key)))
    }

    /// All permissions, by compute node and slot.
    pub fn permissions(&self) -> impl Iterator<Item = PermissionView> {
        self.keys().map(|key| self.view(key, self.at(key)))
    }

    /// The requests that wait for an object, in their order.
    pub fn waiters(&self, entry: u32) -> impl Iterator<Item = PermissionId> {
        let queue = self.objects.with_entry(entry).map(|object| object.queue.iter());
        queue.into_iter().flatten().map(|key| self.id(*key))
    }

    /// All objects, by entry.
    pub fn objects(&self) -> impl Iterator<Item = ObjectView> {
        self.objects.iter().map(|(entry, object)| ObjectView {
            id: self.objects.id(entry),
            owner: object.owner,
            domain: object.domain.map(|domain| self.domains.token(domain)),
            others: object.others,
            place: object.place,
            whole: self.memory.place(object.piece),
            state: match &object.freeing {
                None => ObjectState::Present,
                Some(freeing) if freeing.is_clearing => ObjectState::Clearing,
                Some(_) => ObjectState::Freeing,
            },
            waiting: object.queue.len(),
        })
    }

    fn keys(&self) -> impl Iterator<Item = Key> {
        self.members.iter().flat_map(|(client, member)| {
            member.slots.occupied().map(|(slot, _)| Key { client: *client, slot })
        })
    }

    fn view(&self, key: Key, permission: &Permission) -> PermissionView {
        let state = permission.state;
        let has_begun = matches!(state, PermissionState::Open | PermissionState::Closing);
        PermissionView {
            id: self.id(key),
            object: self.objects.id(permission.object),
            place: self.place(permission),
            right: permission.right,
            sharing: permission.sharing,
            group: permission.group,
            state,
            start: has_begun.then(|| permission.start.into()),
            deadline: deadline(permission).map(Duration::from),
            is_noticed: permission.is_noticed,
            lease_us: permission.lease_us,
        }
    }

    /// Checks the accounts: every chunk is free, a slab or an object's; every slot is free or has a
    /// permission that its object knows; deadlines, counters and sums are right.
    ///
    /// # Errors
    /// A description of the inconsistency.
    pub fn audit(&self) -> Result<(), String> {
        self.memory.audit(self.objects.iter().map(|(_, object)| object.piece))?;
        self.objects.audit()?;
        self.audit_queues()?;
        self.audit_members()?;
        self.audit_domains()?;
        let mut deadlines = BTreeSet::new();
        for key in self.keys() {
            deadlines.extend(deadline(self.at(key)).map(|at| (at, key)));
        }
        if !self.deadlines.iter().eq(deadlines) {
            return Err(format!("{} deadlines are wrong", self.deadlines.len()));
        }
        let waits = |key: &Key| self.at(*key).state == PermissionState::Waiting;
        let waiting = self.keys().filter(waits).count();
        let sums = LeaseStatus {
            objects: self.objects.iter().count() as u64,
            object_bytes: self.objects.iter().map(|(_, object)| object.place.len).sum(),
            waiting: waiting as u64,
            permissions: (self.keys().count() - waiting) as u64,
            ..self.counters.clone()
        };
        match sums == self.counters {
            true => Ok(()),
            false => Err(format!("the counters are {:?}, not {sums:?}", self.counters)),
        }
    }

    /// Checks that every permission is once in the lists of its object, and counts what waiters
    /// wait for.
    fn audit_queues(&self) -> Result<(), String> {
        let mut listed = BTreeSet::new();
        for (entry, object) in self.objects.iter() {
            let is_freeing = object.freeing.is_some();
            if is_freeing && !object.queue.is_empty() {
                return Err(format!("requests wait for object {entry}, which is being freed"));
            }
            let is_clearing = object.freeing.as_ref().is_some_and(|freeing| freeing.is_clearing);
            if is_freeing && object.holders.is_empty() != is_clearing {
                return Err(format!("object {entry} is cleared too early or not at all"));
            }
            let mut before: Vec<&Permission> = Vec::new();
            for key in object.holders.iter().chain(&object.queue) {
                let permission = self.at(*key);
                if permission.object != entry || !listed.insert(*key) {
                    return Err(format!("{key:?} is on the wrong list"));
                }
                let conflicting = before.iter().filter(|other| permission.conflicts_with(other));
                let blockers = conflicting.count();
                before.push(permission);
                let waits = permission.state == PermissionState::Waiting;
                if blockers != permission.blockers as usize || (blockers > 0) != waits {
                    return Err(format!("{key:?}: {blockers} before it, {:?}", permission.state));
                }
            }
            let awaited = |key: &&Key| {
                let holder = self.at(**key);
                let is_open = holder.state == PermissionState::Open;
                let mut waiters = object.queue.iter().map(|waiter| self.at(*waiter));
                let must_end = is_freeing || waiters.any(|waiter| waiter.conflicts_with(holder));
                is_open && must_end && !holder.is_noticed
            };
            if let Some(key) = object.holders.iter().find(awaited) {
                return Err(format!("{key:?} was not noticed"));
            }
        }
        match self.keys().find(|key| !listed.contains(key)) {
            Some(key) => Err(format!("{key:?} is on no list")),
            None => Ok(()),
        }
    }

    fn audit_members(&self) -> Result<(), String> {
        for (client, member) in &self.members {
            let wrong = |what: &str| Err(format!("compute node {}: {what}", client.0));
            member.slots.audit()?;
            let permissions = || member.slots.occupied().map(|(_, permission)| permission);
            let waiting =
                permissions().filter(|permission| permission.state == PermissionState::Waiting);
            let own = || self.objects.iter().filter(|(_, object)| object.owner == Some(*client));
            if member.waiting as usize != waiting.count() {
                return wrong("waiting requests");
            }
            if !own().map(|(entry, _)| entry).eq(member.objects.iter().copied()) {
                return wrong("objects");
            }
            let mut account = Account::default();
            for (_, object) in own().filter(|(_, object)| object.domain.is_none()) {
                account.objects += 1;
                account.bytes += object.place.len;
            }
            if account != member.account {
                return wrong("account");
            }
            let frees = self.objects.iter().filter(|(_, object)| {
                let request = object.freeing.as_ref().and_then(|freeing| freeing.request);
                request.is_some_and(|(by, _)| by == *client)
            });
            if !frees.map(|(entry, _)| entry).eq(member.frees.iter().copied()) {
                return wrong("objects that it frees");
            }
            let closing = |slot| {
                let permission = member.slots.get(slot).and_then(|slot| slot.permission.as_ref());
                permission.is_some_and(|permission| permission.state == PermissionState::Closing)
            };
            if !member.revokes.iter().all(|(slot, _)| closing(*slot)) {
                return wrong("revokes");
            }
            let is_pending = |permission: &Permission| match permission.state {
                PermissionState::Waiting => permission.pending.is_some(),
                PermissionState::Opening => permission.pending.is_none() == permission.is_doomed,
                PermissionState::Open => permission.pending.is_none(),
                PermissionState::Closing => true,
            };
            if !permissions().all(is_pending) {
                return wrong("requests");
            }
            let has_requests = permissions().any(|permission| permission.pending.is_some())
                || !member.revokes.is_empty()
                || !member.frees.is_empty();
            if member.has_left() || (member.is_departed && has_requests) {
                return wrong("something is left");
            }
        }
        Ok(())
    }

    fn audit_domains(&self) -> Result<(), String> {
        let mut accounts: BTreeMap<_, Account> = BTreeMap::new();
        let mut shared: BTreeMap<_, BTreeSet<u32>> = BTreeMap::new();
        for (entry, object) in self.objects.iter() {
            let Some(domain) = object.domain else { continue };
            let account = accounts.entry(domain).or_default();
            account.objects += 1;
            account.bytes += object.place.len;
            if object.others != Others::None {
                shared.entry(domain).or_default().insert(entry);
            }
        }
        for (id, domain) in self.domains.iter() {
            let present = |member: &&super::Member| !member.is_departed;
            let members = self.members.values().filter(present);
            let members = members.filter(|member| member.domain == Some(id)).count();
            let account = accounts.remove(&id).unwrap_or_default();
            let objects = shared.remove(&id).unwrap_or_default();
            let is_right = members == domain.members as usize
                && account == domain.account
                && objects == domain.objects
                && (members > 0 || account.objects > 0);
            if !is_right {
                return Err(format!("{id:?} is wrong"));
            }
        }
        Ok(())
    }
}

/// The deadline of a permission that must be in the queue of deadlines.
fn deadline(permission: &Permission) -> Option<Moment> {
    let has = match permission.state {
        PermissionState::Waiting => true,
        PermissionState::Open => permission.lease_us != AskTerms::FOREVER,
        PermissionState::Opening | PermissionState::Closing => false,
    };
    has.then_some(permission.deadline)
}
