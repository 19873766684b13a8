//! Permissions from their opening to their end.

use super::deadlines::Moment;
use super::objects::Hole;
use super::permissions::{Asked, Key};
use super::{Effect, PermissionId, PermissionState, Turn};
use crate::patronus::message::{Lifetime, Outcome};

impl Turn<'_> {
    /// The result of [`Effect::Open`].
    pub(super) fn opened(&mut self, id: PermissionId, is_open: bool) {
        let Some(key) = self.book.key(id) else { return };
        if self.book.at(key).state != PermissionState::Opening {
            return;
        }
        if !is_open {
            return self.could_not_open(key);
        }
        let now = self.book.now;
        let permission = self.book.at_mut(key);
        permission.state = PermissionState::Open;
        permission.start = now;
        permission.deadline = match permission.is_endless() {
            true => Moment::NEVER,
            false => now.after(permission.lease_us),
        };
        let (deadline, lease_us) = (permission.deadline, permission.lease_us);
        let (entry, is_doomed) = (permission.object, permission.is_doomed);
        let pending = permission.pending.take();
        self.book.objects.at_mut(entry).was_open = true;
        self.book.deadlines.add(deadline, key);
        let Some(pending) = pending.filter(|_| !is_doomed) else { return self.close(key) };
        let word = Lifetime::new(id.number.nonce(), lease_us);
        if self.is_awaited(key) {
            self.swap_to(key, 0);
            self.book.at_mut(key).is_noticed = true;
            self.book.counters.notices += 1;
        } else {
            self.words.swap(key.client, key.slot, word);
        }
        match pending.asked {
            Asked::Renew => self.book.counters.renewals += 1,
            Asked::Allocate | Asked::Acquire => self.book.counters.grants += 1,
        }
        let granted = self.granted(key, now.micros_since(pending.since), word);
        self.reply(key.client, pending.number, Outcome::Granted(granted), entry);
    }

    fn could_not_open(&mut self, key: Key) {
        let permission = self.book.at_mut(key);
        let entry = permission.object;
        if let Some(pending) = permission.pending.take() {
            let named = if pending.asked == Asked::Acquire { entry } else { 0 };
            self.reply(key.client, pending.number, Outcome::Failed, named);
            let is_free = self.book.objects.at(entry).freeing.is_some();
            if pending.asked == Asked::Allocate && !is_free {
                self.begin_free(entry, key.client, None);
            }
        }
        self.end(key);
    }

    /// Dooms a permission that is being opened, or ends the renewal of one that is being closed.
    /// Its request is answered at once.
    pub(super) fn cancel(&mut self, key: Key) {
        let permission = self.book.at_mut(key);
        permission.is_doomed |= permission.state == PermissionState::Opening;
        let entry = permission.object;
        let Some(pending) = permission.pending.take() else { return };
        let (outcome, named) = match pending.asked {
            Asked::Renew => (Outcome::Expired, 0),
            Asked::Allocate => (Outcome::NoSuchObject, 0),
            Asked::Acquire => (Outcome::NoSuchObject, entry),
        };
        self.reply(key.client, pending.number, outcome, named);
    }

    /// Closes an open permission.
    pub(super) fn close(&mut self, key: Key) {
        let permission = self.book.at_mut(key);
        debug_assert_eq!(permission.state, PermissionState::Open);
        permission.state = PermissionState::Closing;
        let (deadline, is_noticed) = (permission.deadline, permission.is_noticed);
        self.book.deadlines.remove(deadline, key);
        if !is_noticed && !self.book.member(key.client).is_departed {
            self.swap_to(key, 0);
        }
        let id = self.book.id(key);
        self.out.push(match self.is_delayed(key) {
            true => Effect::Abandon { id },
            false => Effect::Close { id },
        });
    }

    /// True if the keys of a permission may stay valid after its end, because the memory under it
    /// is not used again soon.
    fn is_delayed(&self, key: Key) -> bool {
        let permission = self.book.at(key);
        self.book.delays()
            && permission.pending.is_none()
            && self.book.objects.at(permission.object).freeing.is_some()
    }

    /// The result of [`Effect::Close`].
    pub(super) fn closed(&mut self, id: PermissionId) {
        let Some(key) = self.book.key(id) else { return };
        if self.book.at(key).state != PermissionState::Closing {
            return;
        }
        if self.book.at(key).pending.is_some() {
            let member = self.book.member_mut(key.client);
            member.slots.get_mut(key.slot).expect("a slot in use").serial += 1;
            return self.open(key);
        }
        while let Some(number) = self.next_revoke(key) {
            self.reply(key.client, number, Outcome::Done, 0);
        }
        self.end(key);
    }

    fn next_revoke(&mut self, key: Key) -> Option<u64> {
        let revokes = &mut self.book.member_mut(key.client).revokes;
        let next = *revokes.range((key.slot, 0)..=(key.slot, u64::MAX)).next()?;
        revokes.remove(&next);
        Some(next.1)
    }

    /// Takes a permission whose keys are dead out of its slot, and lets those go on that waited for
    /// its end.
    fn end(&mut self, key: Key) {
        let gone = self.book.member_mut(key.client).slots.remove(key.slot);
        let entry = gone.object;
        let object = self.book.objects.at_mut(entry);
        let at = object.holders.iter().position(|holder| *holder == key);
        object.holders.swap_remove(at.expect("a permission of the object"));
        if gone.is_in_hole {
            object.hole = Hole::Free;
        }
        self.book.counters.permissions -= 1;
        self.unblock(entry, &gone, 0);
        self.release_if_unused(entry);
        self.forget_if_left(key.client);
    }

    /// Tells the holder of a permission that it cannot be extended any more. An extension before
    /// this moment counts.
    pub(super) fn notice(&mut self, key: Key) {
        let permission = self.book.at(key);
        let is_final = permission.is_endless() || permission.is_noticed;
        if permission.state != PermissionState::Open || is_final {
            return;
        }
        let old = self.swap_to(key, 0);
        let end = self.end_by(key, old);
        self.set_deadline(key, end);
        self.book.at_mut(key).is_noticed = true;
        self.book.counters.notices += 1;
    }

    fn set_deadline(&mut self, key: Key, at: Moment) {
        let old = std::mem::replace(&mut self.book.at_mut(key).deadline, at);
        self.book.deadlines.remove(old, key);
        self.book.deadlines.add(at, key);
    }

    /// Writes a lifetime with the nonce of the permission into its word. Returns the old word. The
    /// slot of a permission without a lease has no word.
    fn swap_to(&mut self, key: Key, micros: u64) -> Lifetime {
        let nonce = self.book.number(key).nonce();
        self.words.swap(key.client, key.slot, Lifetime::new(nonce, micros))
    }

    /// End of a lease as a lifetime word has it.
    pub(super) fn end_by(&self, key: Key, word: Lifetime) -> Moment {
        let most = self.book.settings.lease_max_us;
        self.book.at(key).end_by(word, self.book.number(key).nonce(), most)
    }

    /// A deadline that was taken from the queue has passed.
    pub(super) fn due(&mut self, key: Key) {
        let permission = self.book.at(key);
        match permission.state {
            // Its turn comes when the NIC has closed what it waits for, in this turn of the caller.
            PermissionState::Waiting if self.waits_for_closes_only(key) => {
                let next = self.book.now.after(1);
                self.book.at_mut(key).deadline = next;
                self.book.deadlines.add(next, key);
            }
            PermissionState::Waiting => {
                let pending = permission.pending.expect("a waiter has a request");
                let entry = permission.object;
                self.book.counters.busy += 1;
                self.reply(key.client, pending.number, Outcome::Busy, entry);
                self.leave(key);
            }
            PermissionState::Open if permission.is_noticed => self.expire(key),
            PermissionState::Open => self.expire_unless_extended(key),
            // Neither has a deadline.
            PermissionState::Opening | PermissionState::Closing => {}
        }
    }

    fn expire_unless_extended(&mut self, key: Key) {
        let now = self.book.now;
        let word = self.words.load(key.client, key.slot);
        let mut end = self.end_by(key, word);
        if end <= now {
            // No extension succeeds after the swap; one that came before it counts.
            let old = self.swap_to(key, 0);
            end = self.end_by(key, old);
            self.book.at_mut(key).is_noticed = true;
            if end <= now {
                return self.expire(key);
            }
            self.book.counters.notices += 1;
        }
        self.book.counters.extensions += 1;
        self.set_deadline(key, end);
    }

    fn expire(&mut self, key: Key) {
        self.book.counters.expiries += 1;
        self.close(key);
    }

    /// The reply that granted a permission was not delivered.
    pub(super) fn undelivered(&mut self, id: PermissionId) {
        let Some(member) = self.book.members.get(&id.client) else { return };
        let allocated = member.objects.iter().copied().find(|entry| {
            let object = self.book.objects.at(*entry);
            object.freeing.is_none() && object.first == Some(id.number)
        });
        if let Some(entry) = allocated {
            self.begin_free(entry, id.client, None);
        }
        let Some(key) = self.book.key(id) else { return };
        match self.book.at(key).state {
            PermissionState::Open => self.close(key),
            PermissionState::Opening | PermissionState::Closing => self.cancel(key),
            PermissionState::Waiting => {}
        }
    }
}
