//! The model of effects: which may come now, and what they change.

use scheme::{ClientId, GroupId, Right};

use super::world::{Asked, Cause, Entry, Stage, Thing, World};
use crate::patronus::book::{Effect, PermissionId, Place};
use crate::patronus::message::{Ask, Lifetime, ObjectId, Outcome};

impl World {
    pub(super) fn effect(&mut self, effect: Effect) {
        match effect {
            Effect::Open { id, place, right, group, has_hole } => {
                assert!(!has_hole, "a header in a safe scheme");
                self.open(id, place, right, group);
            }
            Effect::Close { id } => self.close(id),
            Effect::Abandon { id } => panic!("{id:?} ends with valid keys"),
            Effect::Clear { object, place } => {
                let thing = self.things.iter().find(|thing| thing.id == object).expect("an object");
                assert!(thing.is_freeing && thing.was_open);
                let has = |entry: &Entry| entry.is_holder() && entry.object == Some(object);
                assert!(!self.entries.iter().any(has), "{object:?} is cleared while it is open");
                assert!(place.offset == thing.place.offset && place.len >= thing.place.len);
                assert!(!self.clears.contains(&object), "{object:?} is cleared twice");
                self.clears.push(object);
            }
            Effect::Reply { client, number, outcome, entry } => {
                assert!(self.nodes[&client].is_alive, "a reply to a dead compute node");
                self.replies.push((client, number, outcome));
                self.reply(client, number, outcome, entry);
            }
        }
    }

    fn open(&mut self, id: PermissionId, place: Place, right: Right, group: GroupId) {
        let view = self.book.permission(id).expect("an opening permission");
        let at = self.entries.iter().position(|entry| {
            let is_first = match entry.object {
                None => entry.allocates,
                Some(object) => object == view.object && entry.stage == Stage::Waiting,
            };
            let is_range = view.place == place
                && entry.client == id.client
                && entry.terms.right == right
                && entry.terms.group == group
                && entry.terms.sharing == view.sharing;
            let same_place = entry.object.is_none() || {
                let thing = self.things.iter().find(|thing| Some(thing.id) == entry.object);
                thing.is_some_and(|thing| {
                    (thing.place.offset + entry.offset, entry.len) == (place.offset, place.len)
                })
            };
            let same_slot = entry.id.is_some_and(|old| old.number.slot() == id.number.slot());
            let renews = entry.stage == Stage::Between && same_slot;
            is_range && same_place && (is_first || renews)
        });
        let at = at.unwrap_or_else(|| panic!("no request for {view:?}"));
        if self.entries[at].object.is_none() {
            self.allocated(at, view.object, place);
        }
        let wanted = &self.entries[at];
        for (before, other) in self.entries.iter().enumerate() {
            if before != at && other.conflicts_with(wanted) {
                let is_first = !other.is_holder() && (before > at || wanted.is_renewing);
                assert!(is_first, "{other:?} comes before {wanted:?}");
            }
        }
        let used = self.entries.iter().find(|entry| entry.id == Some(id));
        assert!(used.is_none(), "{id:?} is used twice");
        let entry = &mut self.entries[at];
        entry.id = Some(id);
        entry.stage = Stage::Opening;
        entry.word = None;
    }

    fn allocated(&mut self, at: usize, object: ObjectId, place: Place) {
        let entry = &mut self.entries[at];
        entry.object = Some(object);
        assert!(place.len >= entry.len);
        entry.len = place.len;
        let is_apart = |other: &Thing| {
            place.offset + place.len <= other.place.offset
                || other.place.offset + other.place.len <= place.offset
        };
        assert!(self.things.iter().all(is_apart), "{place:?} has two objects");
        let view = self.book.objects().find(|view| view.id == object).expect("a new object");
        self.things.push(Thing {
            id: object,
            owner: view.owner,
            domain: self.nodes[&entry.client].domain,
            others: view.others,
            place,
            is_freeing: false,
            was_open: false,
        });
    }

    fn close(&mut self, id: PermissionId) {
        let (now, cause) = (self.now, self.cause);
        let entry = self.entries.iter_mut().find(|entry| entry.id == Some(id)).expect("a holder");
        assert_eq!(entry.stage, Stage::Open, "{entry:?}");
        entry.stage = Stage::Closing;
        match cause {
            Cause::Of(client) => assert_eq!(client, id.client, "a foreign permission is closed"),
            Cause::Tick => {
                let has_ended = entry.start + entry.life_us <= now;
                assert!(has_ended || entry.is_tampered, "{entry:?} is closed too early at {now}");
                assert!(!entry.is_endless());
            }
            Cause::Report => assert!(entry.is_doomed, "{entry:?} is closed without a reason"),
        }
    }

    fn reply(&mut self, client: ClientId, number: u64, outcome: Outcome, named: u32) {
        let asks = |entry: &Entry| entry.client == client && entry.number == Some(number);
        let Some(at) = self.entries.iter().position(asks) else {
            return self.reply_to_other(client, number, outcome);
        };
        let entry = &mut self.entries[at];
        entry.number = None;
        let Outcome::Granted(granted) = outcome else {
            let acquires = !entry.allocates && !entry.is_renewing;
            let entry_named = entry.object.filter(|_| acquires).map_or(0, |object| object.entry);
            assert_eq!(named, entry_named);
            return self.refused(at, outcome);
        };
        let id = entry.id.expect("an opened permission");
        assert_eq!(
            (entry.stage, entry.start),
            (Stage::Open, self.now),
            "granted before it is open"
        );
        assert_eq!(
            (id, Some(granted.object)),
            (PermissionId { client, number: granted.permission }, entry.object,)
        );
        assert_eq!(named, granted.object.entry);
        assert_eq!(granted.waited_us, self.now - entry.since);
        let place = self.things.iter().find(|thing| thing.id == granted.object);
        let place = place.expect("an object").place;
        assert_eq!(granted.address, place.offset + entry.offset);
        let life = entry.terms.lease_us;
        assert_eq!(granted.word, Lifetime::new(id.number.nonce(), life));
        entry.is_renewing = false;
        entry.is_tampered = false;
        let allocated = std::mem::take(&mut entry.allocates).then_some(granted.object);
        self.in_flight.push((id, granted.word, allocated));
    }

    /// A request for a permission was refused, at once or after a wait.
    fn refused(&mut self, at: usize, outcome: Outcome) {
        let entry = &mut self.entries[at];
        match (entry.stage, outcome) {
            (Stage::Waiting, Outcome::Busy) if self.cause == Cause::Tick => {
                assert!(entry.until <= self.now, "{entry:?} is refused too early");
            }
            (Stage::Waiting, Outcome::NoSuchObject) if entry.since < self.now => {
                let thing = self.things.iter().find(|thing| Some(thing.id) == entry.object);
                assert!(thing.is_none_or(|thing| thing.is_freeing));
            }
            (Stage::Waiting, _) => {}
            (Stage::Opening, Outcome::Failed) => {}
            (Stage::Between | Stage::Closing, Outcome::Expired) if entry.is_renewing => {
                entry.is_renewing = false;
                return;
            }
            (Stage::Opening, Outcome::NoSuchObject | Outcome::Expired) => {
                entry.is_doomed = true;
                entry.is_renewing = false;
                return;
            }
            _ => panic!("{entry:?} is refused: {outcome:?}"),
        }
        self.entries.remove(at);
    }

    fn reply_to_other(&mut self, client: ClientId, number: u64, outcome: Outcome) {
        let asks = |asked: &Asked| asked.client == client && asked.number == number;
        let at = self.asked.iter().position(asks).unwrap_or_else(|| panic!("no such request"));
        let ask = self.asked.remove(at).ask;
        match (ask, outcome) {
            (Ask::Revoke { permission }, Outcome::Done) => {
                let named = self.named(client, permission);
                assert!(named.is_none(), "revoked, but {named:?}");
            }
            (Ask::Free { object }, Outcome::Done) => {
                let thing = self.things.iter().find(|thing| thing.id == object);
                assert!(thing.is_none_or(|thing| !thing.was_open), "freed, but not cleared");
                let has = |entry: &Entry| entry.object == Some(object);
                assert!(!self.entries.iter().any(has), "freed, but permissions are left");
            }
            (Ask::Extend { permission, lifetime_us }, Outcome::Extended(word)) => {
                let most = self.settings.lease_max_us;
                let entry = self.named(client, permission).expect("an open permission");
                let wanted = lifetime_us.min(most).max(entry.life_us);
                if !entry.is_tampered {
                    assert_eq!(word.micros(), wanted);
                    entry.life_us = wanted;
                }
                entry.word = Some(word);
            }
            (Ask::Extend { permission, .. }, Outcome::NotExtendable) => {
                let most = self.settings.lease_max_us;
                let word = self.words.word(client, permission.slot());
                if let Some(entry) = self.named(client, permission) {
                    let reached = entry.life_us >= most || entry.is_endless();
                    assert!(reached || entry.is_tampered || word.micros() == 0);
                }
            }
            _ => {}
        }
    }
}
