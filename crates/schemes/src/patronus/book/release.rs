//! Objects from their free to their release, and the departure of compute nodes.

use std::collections::BTreeSet;

use scheme::{ClientId, Others};

use super::members::DomainId;
use super::objects::Freeing;
use super::permissions::{Asked, Key};
use super::{Effect, PermissionState, Turn};
use crate::patronus::message::{ObjectId, Outcome};

impl Turn<'_> {
    /// Begins to free an object, which must not be free already: refuses its waiters, closes the
    /// permissions of the compute node `by`, and lets those of others run out.
    pub(super) fn begin_free(&mut self, entry: u32, by: ClientId, number: Option<u64>) {
        let request = number.map(|number| (by, number));
        let object = self.book.objects.at_mut(entry);
        object.freeing = Some(Freeing { request, is_clearing: false });
        let waiters = std::mem::take(&mut object.queue);
        let holders = object.holders.clone();
        if request.is_some() {
            self.book.member_mut(by).frees.insert(entry);
        }
        for key in waiters {
            self.cancel(key);
            self.stop_waiting(key);
            self.forget_if_left(key.client);
        }
        for key in holders {
            match self.book.at(key).state {
                PermissionState::Open if key.client == by => self.close(key),
                PermissionState::Open => self.notice(key),
                PermissionState::Opening | PermissionState::Closing => self.cancel(key),
                PermissionState::Waiting => {}
            }
        }
        self.release_if_unused(entry);
    }

    /// Clears an object that is being freed and has no permissions any more, or releases it at once
    /// if it was never opened.
    pub(super) fn release_if_unused(&mut self, entry: u32) {
        let object = self.book.objects.at_mut(entry);
        if !object.holders.is_empty() {
            return;
        }
        let Some(freeing) = object.freeing.as_mut().filter(|freeing| !freeing.is_clearing) else {
            return;
        };
        if !object.was_open || self.book.settings.deviations.dirty {
            return self.release(entry);
        }
        freeing.is_clearing = true;
        let place = self.book.memory.place(object.piece);
        self.out.push(Effect::Clear { object: self.book.objects.id(entry), place });
    }

    /// The result of [`Effect::Clear`].
    pub(super) fn cleared(&mut self, id: ObjectId) {
        let object = self.book.objects.find(id);
        let freeing = object.and_then(|object| object.freeing.as_ref());
        if freeing.is_some_and(|freeing| freeing.is_clearing) {
            self.release(id.entry);
        }
    }

    fn release(&mut self, entry: u32) {
        let object = self.book.objects.remove(entry);
        self.book.memory.give(object.piece, self.book.delays());
        let len = object.place.len;
        self.book.counters.objects -= 1;
        self.book.counters.object_bytes -= len;
        if let Some(domain) = object.domain {
            let domain = self.book.domains.get_mut(domain);
            domain.account.objects -= 1;
            domain.account.bytes -= len;
            domain.objects.remove(&entry);
        }
        if let Some(owner) = object.owner {
            let member = self.book.member_mut(owner);
            member.objects.remove(&entry);
            if object.domain.is_none() {
                member.account.objects -= 1;
                member.account.bytes -= len;
            }
            self.forget_if_left(owner);
        }
        if let Some(domain) = object.domain {
            self.book.domains.forget_if_empty(domain);
        }
        let request = object.freeing.and_then(|freeing| freeing.request);
        if let Some((client, number)) = request {
            self.book.member_mut(client).frees.remove(&entry);
            self.reply(client, number, Outcome::Done, entry);
        }
    }

    /// Forgets a compute node of which nothing is left.
    pub(super) fn forget_if_left(&mut self, client: ClientId) {
        if self.book.members.get(&client).is_some_and(|member| member.has_left()) {
            self.book.members.remove(&client);
        }
    }

    /// Takes everything from a compute node that is gone.
    pub(super) fn depart(&mut self, client: ClientId) {
        let Some(member) = self.book.members.get_mut(&client) else { return };
        if std::mem::replace(&mut member.is_departed, true) {
            return;
        }
        let domain = member.domain;
        member.revokes.clear();
        for entry in std::mem::take(&mut member.frees) {
            let object = self.book.objects.at_mut(entry);
            object.freeing.as_mut().expect("an object that is being freed").request = None;
        }
        self.drop_waiters(client);
        let slots = self.book.member(client).slots.occupied().map(|(slot, _)| slot);
        for slot in slots.collect::<Vec<_>>() {
            let key = Key { client, slot };
            match self.book.at(key).state {
                PermissionState::Waiting => {}
                PermissionState::Open => self.close(key),
                PermissionState::Opening | PermissionState::Closing => self.abandon(key),
            }
        }
        for entry in self.book.member(client).objects.clone() {
            let object = self.book.objects.at_mut(entry);
            if object.others != Others::None && object.domain.is_some() {
                object.owner = None;
                self.book.member_mut(client).objects.remove(&entry);
            } else if object.freeing.is_none() {
                self.begin_free(entry, client, None);
            }
        }
        if let Some(domain) = domain {
            self.book.domains.get_mut(domain).members -= 1;
            if self.book.domains.get(domain).members == 0 {
                self.free_objects_of(domain, client);
            }
            self.book.domains.forget_if_empty(domain);
        }
        self.forget_if_left(client);
    }

    /// Drops the requests of a compute node that wait, if it is one of the book.
    pub(super) fn forget_requests(&mut self, client: ClientId) {
        if self.book.members.contains_key(&client) {
            self.drop_waiters(client);
        }
    }

    /// Drops the requests of a compute node that wait. The latest of an object goes first, so that
    /// the end of one never opens another one's permission.
    fn drop_waiters(&mut self, client: ClientId) {
        let permissions = self.book.member(client).slots.occupied();
        let waiting = permissions.filter(|(_, p)| p.state == PermissionState::Waiting);
        let objects: BTreeSet<u32> = waiting.map(|(_, permission)| permission.object).collect();
        for entry in objects {
            let queue = self.book.objects.at(entry).queue.iter().rev();
            let own: Vec<_> = queue.copied().filter(|key| key.client == client).collect();
            own.into_iter().for_each(|key| self.leave(key));
        }
    }

    /// Frees the objects of a domain whose last member, `by`, has departed.
    fn free_objects_of(&mut self, domain: DomainId, by: ClientId) {
        for entry in self.book.domains.get(domain).objects.clone() {
            if self.book.objects.at(entry).freeing.is_none() {
                self.begin_free(entry, by, None);
            }
        }
    }

    /// Gives up the request of a permission that is being opened or renewed. The object that the
    /// request allocated has no name anywhere: it is freed.
    fn abandon(&mut self, key: Key) {
        let permission = self.book.at(key);
        let entry = permission.object;
        let is_new = permission.pending.is_some_and(|pending| pending.asked == Asked::Allocate);
        self.cancel(key);
        if is_new && self.book.objects.at(entry).freeing.is_none() {
            self.begin_free(entry, key.client, None);
        }
    }
}
