//! Checks of the memory node's book after each event.

use std::time::Duration;

use scheme::{Others, Right, Sharing};
use schemes::patronus::book::{ObjectState, ObjectView, PermissionState, PermissionView};
use schemes::patronus::message::AskTerms;

use super::{Leases, TURN, wrong};
use crate::check::invariant::{Invariant, Violation};
use crate::check::node_view::BookState;
use crate::check::oracle::Oracle;
use crate::time::Time;

/// Returns whether two permissions cannot exist at the same time.
pub(super) fn conflict(a: &PermissionView, b: &PermissionView) -> bool {
    let are_shared = a.sharing == Sharing::Shared && b.sharing == Sharing::Shared;
    a.object == b.object
        && !are_shared
        && a.place.offset < b.place.offset + b.place.len
        && b.place.offset < a.place.offset + a.place.len
}

/// Returns whether a permission may open its range now.
pub(super) fn is_held(permission: &PermissionView) -> bool {
    permission.state != PermissionState::Waiting
}

impl Oracle {
    /// Reads the book and checks it.
    pub(super) fn look_at_book(&mut self) {
        self.check_leases(|leases, oracle| {
            let Some(book) = oracle.node_view.book() else {
                return Err(wrong(
                    Invariant::GoesOn,
                    "the lock of the book is held while a core waits for the NIC",
                ));
            };
            if book != leases.book {
                let old = std::mem::replace(&mut leases.book, book);
                leases.changes += 1;
                leases.note_ends(&old, oracle)?;
                leases.check_conflicts(oracle)?;
                leases.check_rights(oracle)?;
                leases.check_objects(&old)?;
                leases.check_queues(&old, oracle)?;
            }
            leases.check_times(oracle)
        });
        if let Some(leases) = &self.leases {
            (self.counts.waits, self.counts.expiries) = (leases.waited, leases.expired);
        }
    }
}

impl Leases {
    fn check_conflicts(&self, oracle: &Oracle) -> Result<(), Violation> {
        let all = &self.book.permissions;
        for (at, a) in all.iter().enumerate().filter(|(_, a)| is_held(a)) {
            if let Some(b) = all[..at].iter().find(|b| is_held(b) && conflict(a, b)) {
                let (one, other) = (oracle.name_of_id(a.id.client), oracle.name_of_id(b.id.client));
                let why = format!("{one} and {other} have conflicting permissions: {a:?}, {b:?}");
                return Err(wrong(Invariant::Exclusive, why));
            }
        }
        Ok(())
    }

    /// Each permission is for its object's allocator, or for the domain as the allocator said.
    fn check_rights(&self, oracle: &Oracle) -> Result<(), Violation> {
        for permission in &self.book.permissions {
            let name = oracle.name_of_id(permission.id.client);
            let Some(object) = self.book.object(permission.object) else {
                let why =
                    format!("{name} has a permission for an object that is not: {permission:?}");
                return Err(wrong(Invariant::Released, why));
            };
            if !contains(object, permission) {
                let why = format!("{name} has a permission beyond {object:?}: {permission:?}");
                return Err(wrong(Invariant::Permissions, why));
            }
            let client = oracle.client_of(permission.id.client);
            // The permissions of a departed client are closed, after its objects were given to its
            // domain.
            if !client.is_some_and(|client| oracle.clients[client].alive) {
                continue;
            }
            let domain = client.and_then(|client| oracle.clients[client].domain);
            let least = match permission.right {
                Right::Read => Others::Read,
                Right::Write => Others::Write,
            };
            let is_member = domain.is_some() && domain == object.domain && object.others >= least;
            if object.owner != Some(permission.id.client) && !is_member {
                let why = format!("{name} has a permission for a foreign object: {object:?}");
                return Err(wrong(Invariant::Permissions, why));
            }
        }
        Ok(())
    }

    /// The memory of objects does not overlap, and an object does not change its memory.
    fn check_objects(&self, old: &BookState) -> Result<(), Violation> {
        let mut places: Vec<_> = self.book.objects.iter().map(|object| object.whole).collect();
        places.sort_by_key(|place| place.offset);
        if let Some(pair) = places.windows(2).find(|p| p[0].offset + p[0].len > p[1].offset) {
            return Err(wrong(Invariant::Released, format!("two objects overlap: {pair:?}")));
        }
        for object in &self.book.objects {
            let is_same = |before: &ObjectView| before.place == object.place;
            if !old.object(object.id).is_none_or(is_same) {
                return Err(wrong(Invariant::Released, format!("{object:?} has moved")));
            }
        }
        Ok(())
    }

    /// Records permissions that have ended. Their numbers must not come again.
    fn note_ends(&mut self, old: &BookState, oracle: &Oracle) -> Result<(), Violation> {
        for before in &old.permissions {
            let now = self.book.permission(before.id);
            if let Some(now) = now {
                let began = before.state != PermissionState::Closing;
                let ends = began && now.state == PermissionState::Closing;
                let is_due = before.deadline.is_some_and(|deadline| deadline <= oracle.node_now);
                self.waited += u64::from(!is_held(before) && is_held(now));
                self.expired += u64::from(ends && is_due);
                continue;
            }
            self.ended.insert(before.id);
            self.waits.remove(&before.id);
            self.noticed.remove(&before.id);
            if let Some(keys) = self.granted.remove(&before.id)
                && let Some(client) = oracle.client_of(before.id.client)
            {
                self.dead.extend(keys.into_iter().map(|key| (client, key)));
            }
        }
        let again = self.book.permissions.iter().find(|p| self.ended.contains(&p.id));
        match again {
            None => Ok(()),
            Some(p) => {
                let name = oracle.name_of_id(p.id.client);
                let why = format!("{name} has a permission under an old number: {p:?}");
                Err(wrong(Invariant::Dead, why))
            }
        }
    }

    /// Requests that conflict are granted first come, first served, and none waits without a cause.
    fn check_queues(&self, old: &BookState, oracle: &Oracle) -> Result<(), Violation> {
        for (object, before) in &old.queues {
            let now = self.book.queue(*object);
            let stayed: Vec<_> = before.iter().filter(|id| now.contains(id)).collect();
            if !now.iter().take(stayed.len()).eq(stayed) {
                let why = format!("the queue of {object:?} was {before:?} and is {now:?}");
                return Err(wrong(Invariant::Granted, why));
            }
            for new in self.book.permissions.iter().filter(|p| is_held(p) && p.object == *object) {
                // A renewal keeps its range.
                let slot = (new.id.client, new.id.number.slot());
                let held = |p: &&PermissionView| (p.id.client, p.id.number.slot()) == slot;
                if old.permissions.iter().filter(|p| is_held(p)).any(|p| held(&p)) {
                    continue;
                }
                let place = before.iter().position(|id| *id == new.id).unwrap_or(before.len());
                let earlier = before[..place].iter().filter(|id| now.contains(id));
                let mut passed = earlier.filter_map(|id| self.book.permission(*id));
                if let Some(other) = passed.find(|other| conflict(other, new)) {
                    let name = oracle.name_of_id(new.id.client);
                    let other = oracle.name_of_id(other.id.client);
                    let why = format!("{name} gets {object:?} before {other}, which waits longer");
                    return Err(wrong(Invariant::Granted, why));
                }
            }
        }
        for (object, queue) in &self.book.queues {
            for (at, id) in queue.iter().enumerate() {
                let Some(waiter) = self.book.permission(*id) else {
                    let why = format!("{id:?} waits for {object:?} without a permission");
                    return Err(wrong(Invariant::Granted, why));
                };
                let is_before = |p: &PermissionView| is_held(p) || queue[..at].contains(&p.id);
                let mut others = self.book.permissions.iter().filter(|p| is_before(p));
                if !others.any(|other| conflict(waiter, other)) {
                    let why = format!("{waiter:?} waits for {object:?}, and nothing is before it");
                    return Err(wrong(Invariant::Granted, why));
                }
            }
        }
        Ok(())
    }

    /// No lease and no wait is longer than the longest lease, apart from the time of a turn and the
    /// stalls of the CPU.
    fn check_times(&mut self, oracle: &Oracle) -> Result<(), Violation> {
        let slack = Duration::from_nanos((TURN + oracle.cpu_stalls).as_ns());
        for p in &self.book.permissions {
            if p.state == PermissionState::Waiting {
                let since = *self.waits.entry(p.id).or_insert(oracle.now);
                // The memory node's clock may be slower than virtual time.
                let most = Time::from((self.lease_max * 102 / 100) + slack);
                if oracle.now.since(since) > most {
                    let name = oracle.name_of_id(p.id.client);
                    let why = format!("{name} waits longer than {most}: {p:?}");
                    return Err(wrong(Invariant::Granted, why));
                }
                continue;
            }
            self.waits.remove(&p.id);
            let Some(start) = p.start.filter(|_| p.lease_us != AskTerms::FOREVER) else { continue };
            if oracle.node_now.saturating_sub(start) > self.lease_max + slack {
                let name = oracle.name_of_id(p.id.client);
                let why = format!("{name} has a permission for too long: {p:?}");
                return Err(wrong(Invariant::Bounded, why));
            }
            let Some(deadline) = p.deadline.filter(|_| p.state == PermissionState::Open) else {
                continue;
            };
            if deadline.saturating_sub(start) > self.lease_max {
                let why = format!("a lease ends later than the longest one: {p:?}");
                return Err(wrong(Invariant::Bounded, why));
            }
            if p.is_noticed && deadline > *self.noticed.entry(p.id).or_insert(deadline) {
                let why = format!("a lease was extended after its notice: {p:?}");
                return Err(wrong(Invariant::Notified, why));
            }
        }
        Ok(())
    }
}

fn contains(object: &ObjectView, permission: &PermissionView) -> bool {
    let (outer, inner) = (object.place, permission.place);
    inner.len > 0
        && outer.offset <= inner.offset
        && inner.offset + inner.len <= outer.offset + outer.len
        // The memory is cleared only after the last permission has ended.
        && object.state != ObjectState::Clearing
}
