//! Requests: what they may ask for, and what they begin.

use std::collections::VecDeque;

use scheme::{ClientId, Others, Right, Sharing};

use super::members::{Account, DomainId};
use super::objects::{Hole, Object};
use super::permissions::{Asked, Key, Pending, Permission};
use super::{Effect, Moment, PermissionState, Turn};
use crate::patronus::message::{
    Ask, AskTerms, Granted, Lifetime, Limit, ObjectId, Outcome, PermissionNumber,
};

/// Result of a request: the outcome, or `None` if the reply comes later.
type Answer = Result<Option<Outcome>, Outcome>;

/// A permission that a compute node names.
enum Named {
    /// The number was never given to this compute node.
    Unknown,
    /// The permission has ended.
    Ended,
    /// The permission is open or being closed.
    Present(Key),
}

impl Turn<'_> {
    /// Executes a request or begins to.
    pub(super) fn request(&mut self, client: ClientId, number: u64, ask: Ask, groups: u16) {
        if self.book.members.get(&client).is_none_or(|member| member.is_departed) {
            return;
        }
        let (entry, answer) = match ask {
            Ask::Allocate { terms, bytes, others } => {
                (0, self.allocate(client, number, terms, bytes, others, groups))
            }
            Ask::Acquire { terms, object, offset, len } => {
                (object.entry, self.acquire(client, number, terms, object, (offset, len), groups))
            }
            Ask::Renew { permission, lease_us } => {
                (0, self.renew(client, number, permission, lease_us))
            }
            Ask::Revoke { permission } => (0, self.revoke(client, number, permission)),
            Ask::Free { object } => (object.entry, self.free(client, number, object)),
            Ask::FreeGrant { entry, address } => {
                (entry, self.free_grant(client, number, entry, address))
            }
            Ask::Extend { permission, lifetime_us } => {
                (0, self.extend(client, permission, lifetime_us))
            }
        };
        let Some(outcome) = answer.unwrap_or_else(Some) else { return };
        let entry = match outcome {
            Outcome::Granted(granted) => granted.object.entry,
            _ => entry,
        };
        self.reply(client, number, outcome, entry);
    }

    fn allocate(
        &mut self,
        client: ClientId,
        number: u64,
        terms: AskTerms,
        bytes: u64,
        others: Others,
        groups: u16,
    ) -> Answer {
        let domain = self.book.member(client).domain;
        let is_endless = terms.lease_us == AskTerms::FOREVER;
        let is_grant = (terms.right, terms.sharing, others)
            == (Right::Write, Sharing::Exclusive, Others::None);
        let is_possible = bytes > 0
            && terms.lease_us > 0
            && terms.group.0 < groups
            && (is_grant || !is_endless)
            && (others == Others::None
                || domain.is_some()
                || self.book.settings.deviations.everybody);
        if !is_possible {
            return Err(Outcome::BadRequest);
        }
        self.require_slot(client, is_endless)?;
        // A grant is a block, as in schemes without objects.
        let len = match is_endless {
            true => self.book.memory.block_bytes(bytes).ok_or(Outcome::NoBlock)?,
            false => bytes,
        };
        let account = *self.account(domain, client);
        let settings = &self.book.settings;
        if account.objects >= settings.objects_max {
            return Err(Outcome::TooMany(Limit::Objects, settings.objects_max));
        }
        if let Some(most) = settings.domain_bytes
            && account.bytes.checked_add(len).is_none_or(|sum| sum > most)
        {
            return Err(Outcome::TooMany(Limit::Bytes, most));
        }
        let deviations = self.book.settings.deviations;
        let hole = if is_endless { 0 } else { deviations.hole };
        let piece = self.book.memory.take(len.saturating_add(hole))?;
        let mut place = self.book.memory.place(piece);
        (place.offset, place.len) = (place.offset + hole, len);
        let entry = self.book.objects.insert(Object {
            owner: Some(client),
            domain,
            others,
            piece,
            place,
            first: None,
            holders: Vec::new(),
            queue: VecDeque::new(),
            hole: if hole > 0 { Hole::Free } else { Hole::None },
            was_open: deviations.unprotected,
            freeing: None,
        });
        let account = self.account(domain, client);
        account.objects += 1;
        account.bytes += len;
        self.book.counters.objects += 1;
        self.book.counters.object_bytes += len;
        self.book.member_mut(client).objects.insert(entry);
        if let Some(domain) = domain.filter(|_| others != Others::None) {
            self.book.domains.get_mut(domain).objects.insert(entry);
        }
        if deviations.unprotected {
            return Ok(Some(self.named_only(entry)));
        }
        let pending = Pending { number, asked: Asked::Allocate, since: self.book.now };
        let permission = self.permission(terms, entry, (0, len), pending);
        let key = self.admit(client, permission, 0).expect("a new object has no other permission");
        self.book.objects.at_mut(entry).first = Some(self.book.number(key));
        Ok(None)
    }

    /// The reply to an allocation without a permission. The object's entry is its number, by which
    /// the object is freed if the reply is not delivered.
    fn named_only(&mut self, entry: u32) -> Outcome {
        let number = PermissionNumber(entry.into());
        let object = self.book.objects.at_mut(entry);
        object.first = Some(number);
        self.book.counters.grants += 1;
        Outcome::Granted(Granted {
            object: self.book.objects.id(entry),
            permission: number,
            address: self.book.objects.at(entry).place.offset,
            waited_us: 0,
            word: Lifetime::new(0, u64::MAX),
            lanes: 0,
            keys: Default::default(),
            header: None,
        })
    }

    fn acquire(
        &mut self,
        client: ClientId,
        number: u64,
        terms: AskTerms,
        object: ObjectId,
        (offset, len): (u64, u64),
        groups: u16,
    ) -> Answer {
        let is_possible = len > 0
            && offset.checked_add(len).is_some()
            && terms.group.0 < groups
            && terms.lease_us > 0
            && terms.lease_us != AskTerms::FOREVER;
        if !is_possible {
            return Err(Outcome::BadRequest);
        }
        let state = self.book.objects.find(object).filter(|state| state.freeing.is_none());
        let state = state.ok_or(Outcome::NoSuchObject)?;
        if !self.may(client, state, terms.right) || offset + len > state.place.len {
            return Err(Outcome::NoSuchObject);
        }
        self.require_slot(client, false)?;
        let pending = Pending { number, asked: Asked::Acquire, since: self.book.now };
        let permission = self.permission(terms, object.entry, (offset, len), pending);
        let wait_us = terms.wait_us.min(self.book.settings.lease_max_us);
        self.admit(client, permission, wait_us)?;
        Ok(None)
    }

    /// True if a compute node may acquire an object with this right.
    fn may(&self, client: ClientId, object: &Object, right: Right) -> bool {
        let most = match object.others {
            Others::None => None,
            Others::Read => Some(Right::Read),
            Others::Write | Others::Own => Some(Right::Write),
        };
        self.book.settings.deviations.everybody
            || object.owner == Some(client)
            || (object.domain.is_some()
                && object.domain == self.book.member(client).domain
                && most.is_some_and(|most| right <= most))
    }

    fn require_slot(&self, client: ClientId, is_endless: bool) -> Result<(), Outcome> {
        let most = match is_endless {
            true => PermissionNumber::SLOTS_MAX - PermissionNumber::LEASED_MAX,
            false => self.book.settings.permissions_max,
        };
        match self.book.member(client).slots.are_full(is_endless) {
            true => Err(Outcome::TooMany(Limit::Permissions, most.into())),
            false => Ok(()),
        }
    }

    fn permission(
        &self,
        terms: AskTerms,
        object: u32,
        (offset, len): (u64, u64),
        pending: Pending,
    ) -> Permission {
        Permission {
            object,
            group: terms.group,
            right: terms.right,
            sharing: terms.sharing,
            offset,
            len,
            lease_us: self.within_bounds(terms.lease_us),
            pending: Some(pending),
            state: PermissionState::Waiting,
            is_in_hole: false,
            is_doomed: false,
            is_noticed: false,
            blockers: 0,
            start: Moment::default(),
            deadline: Moment::NEVER,
        }
    }

    /// A lease within the bounds of the memory node.
    fn within_bounds(&self, lease_us: u64) -> u64 {
        let settings = &self.book.settings;
        match lease_us {
            AskTerms::FOREVER => lease_us,
            _ => lease_us.max(settings.lease_min_us).min(settings.lease_max_us),
        }
    }

    /// The account of the objects of a compute node.
    pub(super) fn account(&mut self, domain: Option<DomainId>, client: ClientId) -> &mut Account {
        match domain {
            Some(domain) => &mut self.book.domains.get_mut(domain).account,
            None => &mut self.book.member_mut(client).account,
        }
    }

    /// The permission that a compute node names in a request. The numbers of permissions that wait
    /// or are being opened were not given to it yet.
    fn named(&self, client: ClientId, number: PermissionNumber) -> Named {
        let key = Key { client, slot: number.slot() };
        let Some(slot) = self.book.member(client).slots.get(key.slot) else {
            return Named::Unknown;
        };
        let latest = PermissionNumber::new(slot.serial, key.slot);
        match &slot.permission {
            _ if number > latest || number.serial() == 0 => Named::Unknown,
            Some(permission) if number == latest => match permission.state {
                PermissionState::Waiting | PermissionState::Opening => Named::Unknown,
                PermissionState::Open | PermissionState::Closing => Named::Present(key),
            },
            _ => Named::Ended,
        }
    }

    /// The permission that a compute node names in order to extend it. It must be open, and its
    /// deadline must not have passed.
    fn extendable(&mut self, client: ClientId, number: PermissionNumber) -> Result<Key, Outcome> {
        let key = match self.named(client, number) {
            Named::Unknown => return Err(Outcome::NotYours),
            Named::Ended => return Err(Outcome::Expired),
            Named::Present(key) => key,
        };
        let permission = self.book.at(key);
        if permission.state != PermissionState::Open {
            return Err(Outcome::Expired);
        }
        if permission.is_endless() || permission.is_noticed {
            return Err(Outcome::NotExtendable);
        }
        let word = self.words.load(client, key.slot);
        match self.end_by(key, word) > self.book.now {
            true => Ok(key),
            false => Err(Outcome::Expired),
        }
    }

    /// Renews a lease: the permission is closed, then opened under a new number. Its range stays
    /// reserved in between.
    fn renew(
        &mut self,
        client: ClientId,
        number: u64,
        permission: PermissionNumber,
        lease_us: u64,
    ) -> Answer {
        if lease_us == 0 || lease_us == AskTerms::FOREVER {
            return Err(Outcome::BadRequest);
        }
        let key = self.extendable(client, permission)?;
        let lease_us = self.within_bounds(lease_us);
        let pending = Pending { number, asked: Asked::Renew, since: self.book.now };
        let permission = self.book.at_mut(key);
        permission.lease_us = lease_us;
        permission.pending = Some(pending);
        self.close(key);
        Ok(None)
    }

    fn extend(&mut self, client: ClientId, number: PermissionNumber, lifetime_us: u64) -> Answer {
        let key = self.extendable(client, number)?;
        let most = self.book.settings.lease_max_us;
        let wanted = lifetime_us.min(most);
        let nonce = number.nonce();
        let old = self.words.load(client, key.slot);
        let permission = self.book.at(key);
        let has = match old.nonce() == nonce {
            true => old.micros().min(most),
            false => permission.deadline.micros_since(permission.start),
        };
        if has >= most {
            return Err(Outcome::NotExtendable);
        }
        let mut word = Lifetime::new(nonce, has.max(wanted));
        if wanted > has {
            let old = self.words.swap(client, key.slot, word);
            // The compute node's own CAS may have come in between: the longer lifetime counts.
            if old.nonce() == nonce && old.micros().min(most) > wanted {
                word = Lifetime::new(nonce, old.micros().min(most));
                self.words.swap(client, key.slot, word);
            }
        }
        Ok(Some(Outcome::Extended(word)))
    }

    /// The reply that grants a permission.
    pub(super) fn granted(&self, key: Key, waited_us: u64, word: Lifetime) -> Granted {
        let permission = self.book.at(key);
        Granted {
            object: self.book.objects.id(permission.object),
            permission: self.book.number(key),
            address: self.book.place(permission).offset,
            waited_us,
            word,
            lanes: 0,
            keys: Default::default(),
            header: None,
        }
    }

    fn revoke(&mut self, client: ClientId, number: u64, permission: PermissionNumber) -> Answer {
        let key = match self.named(client, permission) {
            Named::Unknown => return Err(Outcome::NotYours),
            Named::Ended => return Ok(Some(Outcome::Done)),
            Named::Present(key) => key,
        };
        let settings = &self.book.settings;
        let most = u64::from(settings.permissions_max) + u64::from(settings.waiting_max);
        if self.book.member(client).revokes.len() as u64 > most {
            return Err(Outcome::TooMany(Limit::Waiting, most));
        }
        self.book.member_mut(client).revokes.insert((key.slot, number));
        if self.book.at(key).state == PermissionState::Open {
            self.book.counters.revocations += 1;
            self.close(key);
        } else {
            self.cancel(key);
        }
        Ok(None)
    }

    fn free(&mut self, client: ClientId, number: u64, object: ObjectId) -> Answer {
        let state = self.book.objects.find(object).filter(|state| state.freeing.is_none());
        let state = state.ok_or(Outcome::NoSuchObject)?;
        let domain = self.book.member(client).domain;
        let is_member = domain.is_some() && domain == state.domain;
        let may = state.owner == Some(client)
            || (is_member && state.others == Others::Own)
            || self.book.settings.deviations.everybody;
        if !may {
            return Err(Outcome::NoSuchObject);
        }
        self.begin_free(object.entry, client, Some(number));
        Ok(None)
    }

    fn free_grant(&mut self, client: ClientId, number: u64, entry: u32, address: u64) -> Answer {
        let state = self.book.objects.with_entry(entry).filter(|state| state.freeing.is_none());
        let everybody = self.book.settings.deviations.everybody;
        let is_own = |state: &&Object| {
            (state.owner == Some(client) || everybody) && state.place.offset == address
        };
        state.filter(is_own).ok_or(Outcome::NotYours)?;
        self.begin_free(entry, client, Some(number));
        Ok(None)
    }

    /// Opens the range of a permission.
    pub(super) fn open(&mut self, key: Key) {
        let id = self.book.id(key);
        let permission = self.book.at_mut(key);
        permission.state = PermissionState::Opening;
        permission.is_noticed = false;
        let (right, group) = (permission.right, permission.group);
        let place = self.book.place(self.book.at(key));
        let has_hole = self.take_hole(key);
        self.out.push(Effect::Open { id, place, right, group, has_hole });
    }

    /// Takes the hole in front of the object for the header of a permission over its start, if the
    /// hole is free or has the header of this permission already.
    fn take_hole(&mut self, key: Key) -> bool {
        let permission = self.book.at(key);
        let (entry, offset, is_in_hole) =
            (permission.object, permission.offset, permission.is_in_hole);
        let object = self.book.objects.at_mut(entry);
        let takes = offset == 0 && object.hole == Hole::Free;
        if takes {
            object.hole = Hole::Taken;
            self.book.at_mut(key).is_in_hole = true;
        }
        takes || is_in_hole
    }
}
