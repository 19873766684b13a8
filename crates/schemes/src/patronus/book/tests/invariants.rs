//! What holds between the calls of the book.

use super::world::{Stage, World};
use crate::patronus::book::{ObjectState, PermissionState};
use crate::patronus::message::Lifetime;

impl World {
    /// The invariants of the state.
    pub(super) fn check(&mut self) {
        self.things.retain(|thing| {
            let is_used = self.entries.iter().any(|entry| entry.object == Some(thing.id));
            !thing.is_freeing || thing.was_open || is_used
        });
        self.book.audit().unwrap_or_else(|why| panic!("{why}"));
        self.check_objects();
        self.check_permissions();
        let is_counted = self.entries.iter().filter(|entry| !entry.is_holder()).count() as u64;
        assert_eq!(self.book.status().waiting, is_counted);
        for (client, node) in &self.nodes {
            let has = self.entries.iter().any(|entry| entry.client == *client)
                || self.things.iter().any(|thing| thing.owner == Some(*client));
            assert_eq!(self.book.has_left(*client), !node.is_alive && !has, "{client:?}");
        }
    }

    fn check_objects(&self) {
        let mut count = 0;
        for view in self.book.objects() {
            count += 1;
            let thing = self.things.iter().find(|thing| thing.id == view.id);
            let thing = thing.unwrap_or_else(|| panic!("{view:?} exists"));
            assert_eq!(
                (view.owner, view.others, view.place),
                (thing.owner, thing.others, thing.place,)
            );
            let is_clearing = self.clears.contains(&view.id);
            assert_eq!(view.state == ObjectState::Clearing, is_clearing, "{view:?}");
            assert_eq!(view.state != ObjectState::Present, thing.is_freeing, "{view:?}");
        }
        assert_eq!(count, self.things.len(), "an object is lost: {:?}", self.things);
    }

    fn check_permissions(&self) {
        let next = self.book.next_deadline().map_or(u64::MAX, |at| at.as_micros() as u64);
        for (at, entry) in self.entries.iter().enumerate() {
            let thing = self.things.iter().find(|thing| Some(thing.id) == entry.object);
            let is_freed = thing.is_none_or(|thing| thing.is_freeing);
            let others = || self.entries.iter().enumerate().filter(move |(to, _)| *to != at);
            let mut conflicting = others().filter(|(_, other)| other.conflicts_with(entry));
            if !entry.is_holder() {
                let is_first = !conflicting.any(|(to, other)| to < at || other.is_holder());
                assert!(!is_first, "{entry:?} waits for nothing");
                // A look at the deadlines gives a request whose turn comes a microsecond more.
                assert!(next <= entry.until.max(self.now + 1) && !is_freed);
                continue;
            }
            let id = entry.id.expect("a holder");
            let view = self.book.permission(id).unwrap_or_else(|| panic!("{entry:?} is lost"));
            let state = match entry.stage {
                Stage::Opening => PermissionState::Opening,
                Stage::Open => PermissionState::Open,
                _ => PermissionState::Closing,
            };
            assert_eq!(view.state, state, "{entry:?}");
            let is_awaited = conflicting.any(|(_, other)| {
                assert!(!other.is_holder(), "{entry:?} and {other:?} are open together");
                true
            });
            if entry.stage == Stage::Open && !entry.is_endless() && !entry.is_tampered {
                assert!(next <= entry.start + entry.life_us, "no deadline for {entry:?}");
                let word = self.words.word(entry.client, id.number.slot());
                let is_noticed = word == Lifetime::new(id.number.nonce(), 0);
                assert!(is_noticed || !(is_awaited || is_freed), "{entry:?} is not noticed");
            }
        }
        assert_eq!(
            self.book.permissions().count(),
            self.entries.len(),
            "a permission is lost or too many"
        );
    }
}
