//! The model of requests: which must be refused, and how.

use scheme::{ClientId, Others, Right, Sharing};

use super::world::{Asked, CHUNK, Entry, GROUPS, Stage, World};
use crate::patronus::book::PermissionId;
use crate::patronus::message::{Ask, AskTerms, Limit, ObjectId, Outcome, PermissionNumber};

impl World {
    pub(super) fn renews(
        &mut self,
        client: ClientId,
        number: u64,
        permission: PermissionNumber,
        lease_us: u64,
    ) {
        self.asked.pop();
        let (now, lease_us) = (self.now, self.lease(lease_us));
        let entry = self.named(client, permission).expect("an open permission");
        entry.terms.lease_us = lease_us;
        entry.number = Some(number);
        entry.since = now;
        entry.is_renewing = true;
    }

    fn lease(&self, lease_us: u64) -> u64 {
        match lease_us {
            AskTerms::FOREVER => lease_us,
            _ => lease_us.clamp(self.settings.lease_min_us, self.settings.lease_max_us),
        }
    }

    /// Adds a request to the model. Returns the reply that must come at once, or none, as far as
    /// the model knows it.
    pub(super) fn expect(
        &mut self,
        client: ClientId,
        number: u64,
        ask: Ask,
    ) -> Option<Option<Outcome>> {
        match ask {
            Ask::Allocate { terms, bytes, others } => {
                let bad = self.refusal_of_allocation(client, terms, bytes, others);
                self.push(client, number, terms, None, (0, bytes));
                bad.map(Some)
            }
            Ask::Acquire { terms, object, offset, len } => {
                let refusal = self.refusal(client, terms, object, offset, len);
                self.push(client, number, terms, Some(object), (offset, len));
                Some(refusal)
            }
            _ => {
                self.asked.push(Asked { client, number, ask });
                self.expect_other(client, ask)
            }
        }
    }

    fn push(
        &mut self,
        client: ClientId,
        number: u64,
        terms: AskTerms,
        object: Option<ObjectId>,
        (offset, len): (u64, u64),
    ) {
        self.entries.push(Entry {
            client,
            id: None,
            number: Some(number),
            since: self.now,
            until: self.now + terms.wait_us.min(self.settings.lease_max_us),
            object,
            allocates: object.is_none(),
            offset,
            len,
            terms: AskTerms { lease_us: self.lease(terms.lease_us), ..terms },
            stage: Stage::Waiting,
            start: 0,
            life_us: 0,
            word: None,
            is_tampered: false,
            is_renewing: false,
            is_doomed: false,
        });
    }

    /// The refusal of a permission for which the compute node has no slot. Permissions without a
    /// lease have slots of their own.
    fn refusal_of_slot(&self, client: ClientId, is_endless: bool) -> Option<Outcome> {
        let most = match is_endless {
            true => PermissionNumber::SLOTS_MAX - PermissionNumber::LEASED_MAX,
            false => self.settings.permissions_max,
        };
        let is_alike = |entry: &&Entry| entry.client == client && entry.is_endless() == is_endless;
        let is_full = self.entries.iter().filter(is_alike).count() >= most as usize;
        is_full.then_some(Outcome::TooMany(Limit::Permissions, most.into()))
    }

    fn refusal_of_allocation(
        &self,
        client: ClientId,
        terms: AskTerms,
        bytes: u64,
        others: Others,
    ) -> Option<Outcome> {
        let domain = self.nodes[&client].domain;
        let is_grant = terms.lease_us == AskTerms::FOREVER;
        let plain = (Sharing::Exclusive, Right::Write, Others::None);
        if bytes == 0
            || terms.lease_us == 0
            || terms.group.0 >= GROUPS
            || (is_grant && (terms.sharing, terms.right, others) != plain)
            || (others != Others::None && domain.is_none())
        {
            return Some(Outcome::BadRequest);
        }
        if let Some(refusal) = self.refusal_of_slot(client, is_grant) {
            return Some(refusal);
        }
        let len = match is_grant {
            true => bytes.max(CHUNK).checked_next_power_of_two()?,
            false => bytes,
        };
        if is_grant && len > self.settings.blocks.bytes_max() {
            return Some(Outcome::NoBlock);
        }
        let own: Vec<_> = match domain {
            Some(_) => self.things.iter().filter(|thing| thing.domain == domain).collect(),
            None => self.things.iter().filter(|thing| thing.owner == Some(client)).collect(),
        };
        if own.len() as u64 >= self.settings.objects_max {
            return Some(Outcome::TooMany(Limit::Objects, self.settings.objects_max));
        }
        let bytes: u64 = own.iter().map(|thing| thing.place.len).sum();
        let most = self.settings.domain_bytes?;
        let is_over = bytes.checked_add(len).is_none_or(|sum| sum > most);
        is_over.then_some(Outcome::TooMany(Limit::Bytes, most))
    }

    fn refusal(
        &mut self,
        client: ClientId,
        terms: AskTerms,
        object: ObjectId,
        offset: u64,
        len: u64,
    ) -> Option<Outcome> {
        let is_bad = len == 0
            || offset.checked_add(len).is_none()
            || terms.group.0 >= GROUPS
            || terms.lease_us == 0
            || terms.lease_us == AskTerms::FOREVER;
        if is_bad {
            return Some(Outcome::BadRequest);
        }
        let thing = self.things.iter().find(|thing| thing.id == object && !thing.is_freeing);
        let may = thing.is_some_and(|thing| {
            let others = match terms.right {
                Right::Read => thing.others != Others::None,
                Right::Write => matches!(thing.others, Others::Write | Others::Own),
            };
            let is_member = thing.domain.is_some() && thing.domain == self.nodes[&client].domain;
            (thing.owner == Some(client) || (is_member && others))
                && offset + len <= thing.place.len
        });
        if !may {
            return Some(Outcome::NoSuchObject);
        }
        if let Some(refusal) = self.refusal_of_slot(client, false) {
            return Some(refusal);
        }
        self.push(client, 0, terms, Some(object), (offset, len));
        let wanted = self.entries.pop().expect("just pushed");
        let conflicts: Vec<_> =
            self.entries.iter().filter(|entry| entry.conflicts_with(&wanted)).collect();
        if conflicts.is_empty() {
            return None;
        }
        let is_endless = |entry: &&Entry| entry.is_endless() && entry.stage != Stage::Closing;
        if terms.wait_us == 0 || conflicts.iter().any(is_endless) {
            return Some(Outcome::Busy);
        }
        let own = self.entries.iter().filter(|entry| entry.client == client && !entry.is_holder());
        let most = self.settings.waiting_max;
        let is_full = own.count() >= most as usize;
        is_full.then_some(Outcome::TooMany(Limit::Waiting, most.into()))
    }

    fn expect_other(&mut self, client: ClientId, ask: Ask) -> Option<Option<Outcome>> {
        match ask {
            Ask::Renew { permission, lease_us } => {
                if lease_us == 0 || lease_us == AskTerms::FOREVER {
                    return Some(Some(Outcome::BadRequest));
                }
                self.refusal_to_extend(client, permission)
            }
            Ask::Extend { permission, .. } => self.refusal_to_extend(client, permission)?.map(Some),
            Ask::Revoke { permission } => match self.named(client, permission) {
                Some(entry) if matches!(entry.stage, Stage::Open | Stage::Closing) => Some(None),
                // The model does not know which numbers were given away.
                _ => None,
            },
            Ask::Free { object } => {
                let domain = self.nodes[&client].domain;
                let thing = self.things.iter_mut().find(|thing| thing.id == object);
                let thing = thing.filter(|thing| {
                    let is_member = thing.domain.is_some() && thing.domain == domain;
                    let may =
                        thing.owner == Some(client) || (is_member && thing.others == Others::Own);
                    may && !thing.is_freeing
                });
                let Some(thing) = thing else { return Some(Some(Outcome::NoSuchObject)) };
                thing.is_freeing = true;
                None
            }
            Ask::FreeGrant { entry, address } => {
                let thing = self.things.iter_mut().find(|thing| thing.id.entry == entry);
                let thing = thing.filter(|thing| {
                    thing.owner == Some(client)
                        && thing.place.offset == address
                        && !thing.is_freeing
                });
                let Some(thing) = thing else { return Some(Some(Outcome::NotYours)) };
                thing.is_freeing = true;
                None
            }
            Ask::Allocate { .. } | Ask::Acquire { .. } => unreachable!("requests with entries"),
        }
    }

    pub(super) fn named(
        &mut self,
        client: ClientId,
        number: PermissionNumber,
    ) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == Some(PermissionId { client, number }))
    }

    /// The refusal of an extension, if any; `None` if the model does not know.
    fn refusal_to_extend(
        &mut self,
        client: ClientId,
        number: PermissionNumber,
    ) -> Option<Option<Outcome>> {
        let now = self.now;
        let word = self.words.word(client, number.slot());
        let entry = self.named(client, number)?;
        if entry.is_tampered {
            return None;
        }
        let is_noticed = word.micros() == 0;
        match entry.stage {
            Stage::Open if entry.is_endless() || is_noticed => Some(Some(Outcome::NotExtendable)),
            Stage::Open if entry.start + entry.life_us <= now => Some(Some(Outcome::Expired)),
            Stage::Open => Some(None),
            Stage::Closing => Some(Some(Outcome::Expired)),
            _ => Some(Some(Outcome::NotYours)),
        }
    }
}
