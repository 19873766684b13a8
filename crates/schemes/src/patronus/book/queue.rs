//! Conflicts: a request is granted at once, waits, or is refused.
//!
//! A request waits behind the permissions of the object and the earlier requests with which it
//! conflicts, and only behind those: requests that conflict are granted first come, first served.

use scheme::ClientId;

use super::permissions::{Key, Permission};
use super::{PermissionState, Turn};
use crate::patronus::message::{Limit, Outcome};

impl Turn<'_> {
    /// Admits a permission: opens it, or lets it wait. A slot must be free.
    pub(super) fn admit(
        &mut self,
        client: ClientId,
        permission: Permission,
        wait_us: u64,
    ) -> Result<Key, Outcome> {
        let entry = permission.object;
        let object = self.book.objects.at(entry);
        let mut blockers = 0;
        let mut ends = true;
        for key in object.holders.iter().chain(&object.queue) {
            let other = self.book.at(*key);
            if permission.conflicts_with(other) {
                blockers += 1;
                ends &= !other.is_endless() || other.state == PermissionState::Closing;
            }
        }
        if blockers > 0 {
            self.may_wait(client, wait_us, ends)?;
        }
        let slot = self.book.member_mut(client).slots.insert(permission);
        let key = Key { client, slot };
        if blockers == 0 {
            self.hold(key);
            return Ok(key);
        }
        let until = self.book.now.after(wait_us);
        let waiter = self.book.at_mut(key);
        waiter.blockers = blockers;
        waiter.deadline = until;
        self.book.deadlines.add(until, key);
        self.book.objects.at_mut(entry).queue.push_back(key);
        self.book.member_mut(client).waiting += 1;
        self.book.counters.waiting += 1;
        for at in 0..self.book.objects.at(entry).holders.len() {
            let holder = self.book.objects.at(entry).holders[at];
            if self.book.at(holder).conflicts_with(self.book.at(key)) {
                self.notice(holder);
            }
        }
        Ok(key)
    }

    /// Checks that a request may wait. `ends` is true if all it would wait for have leases.
    fn may_wait(&mut self, client: ClientId, wait_us: u64, ends: bool) -> Result<(), Outcome> {
        if wait_us == 0 || !ends {
            self.book.counters.busy += 1;
            return Err(Outcome::Busy);
        }
        let most = self.book.settings.waiting_max;
        match self.book.member(client).waiting >= most {
            true => Err(Outcome::TooMany(Limit::Waiting, most.into())),
            false => Ok(()),
        }
    }

    /// Makes a permission one of those that the object has, and opens it.
    fn hold(&mut self, key: Key) {
        let entry = self.book.at(key).object;
        self.book.objects.at_mut(entry).holders.push(key);
        self.book.counters.permissions += 1;
        self.open(key);
    }

    /// Ends the wait of a request without a permission. The reply was sent, if there is one.
    pub(super) fn leave(&mut self, key: Key) {
        let entry = self.book.at(key).object;
        let queue = &mut self.book.objects.at_mut(entry).queue;
        let at = queue.iter().position(|other| *other == key).expect("a waiter of the object");
        queue.remove(at);
        let gone = self.stop_waiting(key);
        self.unblock(entry, &gone, at);
    }

    /// Takes a request that waited in vain out of its slot.
    pub(super) fn stop_waiting(&mut self, key: Key) -> Permission {
        self.waits_no_more(key);
        self.book.member_mut(key.client).slots.remove(key.slot)
    }

    fn waits_no_more(&mut self, key: Key) {
        let deadline = self.book.at(key).deadline;
        self.book.deadlines.remove(deadline, key);
        self.book.member_mut(key.client).waiting -= 1;
        self.book.counters.waiting -= 1;
    }

    /// Tells the waiters from position `from` on that `gone` is not before them any more, and opens
    /// the permissions of those whose turn has come.
    pub(super) fn unblock(&mut self, entry: u32, gone: &Permission, from: usize) {
        let mut ready = Vec::new();
        for at in from..self.book.objects.at(entry).queue.len() {
            let key = self.book.objects.at(entry).queue[at];
            let waiter = self.book.at_mut(key);
            if waiter.conflicts_with(gone) {
                waiter.blockers -= 1;
                if waiter.blockers == 0 {
                    ready.push(key);
                }
            }
        }
        if ready.is_empty() {
            return;
        }
        let book = &mut *self.book;
        let members = &book.members;
        book.objects.at_mut(entry).queue.retain(|key| {
            let slot = members[&key.client].slots.get(key.slot);
            slot.and_then(|slot| slot.permission.as_ref()).is_some_and(|p| p.blockers > 0)
        });
        for key in ready {
            self.waits_no_more(key);
            self.hold(key);
        }
    }

    /// True if all that a request waits for is being closed, and not for a renewal.
    pub(super) fn waits_for_closes_only(&self, key: Key) -> bool {
        let waiter = self.book.at(key);
        let holders = self.book.objects.at(waiter.object).holders.iter();
        let ends = |other: &&Permission| {
            other.state == PermissionState::Closing
                && other.pending.is_none()
                && waiter.conflicts_with(other)
        };
        holders.map(|holder| self.book.at(*holder)).filter(ends).count() as u32 == waiter.blockers
    }

    /// True if a request waits that conflicts with this permission.
    pub(super) fn is_awaited(&self, key: Key) -> bool {
        let permission = self.book.at(key);
        let queue = &self.book.objects.at(permission.object).queue;
        queue.iter().any(|waiter| self.book.at(*waiter).conflicts_with(permission))
    }
}
