//! Deviations of the book in the schemes for comparison.

use std::time::Duration;

use scheme::{ClientId, GroupId, Others, Right};

use super::world::{Table, exclusive, settings, shared};
use crate::patronus::book::{Book, BookSettings, Deviations, Effect, PermissionId, Place};
use crate::patronus::message::{Ask, AskTerms, Granted, ObjectId, Outcome};

const NOW: Duration = Duration::from_secs(1);
const ONE: ClientId = ClientId(1);
const TWO: ClientId = ClientId(2);

const PUBLISHED: Deviations =
    Deviations { everybody: true, hole: 32, delays: true, dirty: true, unprotected: false };

/// A book with two compute nodes that share no domain.
struct Bare {
    book: Book,
    words: Table,
    out: Vec<Effect>,
}

impl Bare {
    fn new(deviations: Deviations, chunks: u32) -> Self {
        let mut book = Book::new(BookSettings { deviations, ..settings(chunks) });
        book.join(ONE, None);
        book.join(TWO, None);
        Self { book, words: Table::default(), out: Vec::new() }
    }

    fn ask(&mut self, client: ClientId, ask: Ask) -> Vec<Effect> {
        self.book.request(NOW, client, 1, ask, 1, &mut self.words, &mut self.out);
        std::mem::take(&mut self.out)
    }

    /// Asks for a permission that is granted at once. Also returns its range and its hole.
    fn grant(&mut self, client: ClientId, ask: Ask) -> (Granted, Place, bool) {
        let effects = self.ask(client, ask);
        let [Effect::Open { id, place, has_hole, .. }] = effects[..] else { panic!("{effects:?}") };
        self.book.opened(NOW, id, true, &mut self.words, &mut self.out);
        let replies = std::mem::take(&mut self.out);
        let [Effect::Reply { outcome: Outcome::Granted(granted), .. }] = replies[..] else {
            panic!("{replies:?}");
        };
        (granted, place, has_hole)
    }

    fn allocate(&mut self, bytes: u64, terms: AskTerms) -> (Granted, Place, bool) {
        self.grant(ONE, Ask::Allocate { terms, bytes, others: Others::None })
    }

    fn closed(&mut self, client: ClientId, granted: &Granted) -> Vec<Effect> {
        let id = PermissionId { client, number: granted.permission };
        self.book.closed(NOW, id, &mut self.words, &mut self.out);
        self.book.audit().unwrap();
        std::mem::take(&mut self.out)
    }
}

fn acquire(object: ObjectId, offset: u64) -> Ask {
    Ask::Acquire { terms: shared(100, 0), object, offset, len: 32 }
}

/// The bytes in front of an object have the header of one permission over its start.
#[test]
fn hole_has_one_header_at_a_time() {
    let mut bare = Bare::new(PUBLISHED, 4);
    let (first, place, has_hole) = bare.allocate(64, shared(100, 0));
    assert_eq!((place, has_hole), (Place { offset: 32, len: 64 }, true));
    let object = first.object;
    let (second, _, beside) = bare.grant(TWO, acquire(object, 0));
    let (_, range, behind) = bare.grant(TWO, acquire(object, 32));
    assert_eq!((beside, behind, range.offset), (false, false, 64));
    bare.ask(ONE, Ask::Revoke { permission: first.permission });
    assert_eq!(bare.closed(ONE, &first).len(), 1);
    bare.ask(TWO, Ask::Revoke { permission: second.permission });
    bare.closed(TWO, &second);
    let (_, _, behind) = bare.grant(TWO, acquire(object, 32));
    let (third, _, again) = bare.grant(TWO, acquire(object, 0));
    assert_eq!((behind, again), (false, true));
    // A renewed permission keeps the hole.
    bare.ask(TWO, Ask::Renew { permission: third.permission, lease_us: 100 });
    let effects = bare.closed(TWO, &third);
    assert!(matches!(effects[..], [Effect::Open { has_hole: true, .. }]), "{effects:?}");
}

#[test]
fn grant_without_a_lease_has_no_hole() {
    let mut bare = Bare::new(PUBLISHED, 4);
    let (_, place, has_hole) = bare.allocate(4096, exclusive(AskTerms::FOREVER, 0));
    assert_eq!((place, has_hole), (Place { offset: 0, len: 4096 }, false));
}

/// Revoked keys die. Those over an object that is being freed stay while memory is adequate.
#[test]
fn end_of_keys_is_delayed_for_freed_objects_only() {
    for (chunks, is_delayed) in [(4, true), (1, false)] {
        let mut bare = Bare::new(PUBLISHED, chunks);
        let (first, ..) = bare.allocate(64, shared(100, 0));
        let (second, ..) = bare.grant(TWO, acquire(first.object, 0));
        let effects = bare.ask(TWO, Ask::Revoke { permission: second.permission });
        assert!(matches!(effects[..], [Effect::Close { .. }]), "{effects:?}");
        bare.closed(TWO, &second);
        let effects = bare.ask(TWO, Ask::Free { object: first.object });
        assert!(effects.is_empty(), "the permission of another compute node runs out");
        let later = NOW + Duration::from_millis(1);
        bare.book.tick(later, &mut bare.words, &mut bare.out);
        let end = std::mem::take(&mut bare.out);
        let abandoned = matches!(end[..], [Effect::Abandon { .. }]);
        assert_eq!((abandoned, end.len()), (is_delayed, 1), "{end:?}");
        // Nothing is cleared.
        let effects = bare.closed(ONE, &first);
        let [Effect::Reply { client: TWO, outcome: Outcome::Done, .. }] = effects[..] else {
            panic!("{effects:?}");
        };
        assert_eq!(bare.book.free_chunks(), u64::from(chunks));
    }
}

#[test]
fn object_without_permissions_is_named_by_its_reply() {
    let deviations = Deviations { everybody: true, unprotected: true, ..Deviations::NONE };
    let mut bare = Bare::new(deviations, 4);
    let ask = Ask::Allocate { terms: exclusive(100, 0), bytes: 64, others: Others::Own };
    let replies = [bare.ask(ONE, ask), bare.ask(ONE, ask)];
    let granted = replies.map(|reply| match reply[..] {
        [Effect::Reply { outcome: Outcome::Granted(granted), .. }] => granted,
        _ => panic!("{reply:?}"),
    });
    assert_eq!(granted.map(|granted| granted.address), [0, 64]);
    assert_eq!(bare.book.next_deadline(), None);
    // The reply to the first was not delivered: the object is freed.
    let id = PermissionId { client: ONE, number: granted[0].permission };
    bare.book.undelivered(NOW, id, &mut bare.words, &mut bare.out);
    let cleared = Effect::Clear { object: granted[0].object, place: Place { offset: 0, len: 64 } };
    assert_eq!(std::mem::take(&mut bare.out), [cleared]);
    bare.book.cleared(NOW, granted[0].object, &mut bare.words, &mut bare.out);
    let free = |address| Ask::FreeGrant { entry: granted[1].object.entry, address };
    let refused = bare.ask(TWO, free(0));
    assert!(matches!(refused[..], [Effect::Reply { outcome: Outcome::NotYours, .. }]));
    assert!(matches!(bare.ask(TWO, free(64))[..], [Effect::Clear { .. }]));
    bare.book.audit().unwrap();
}

/// In the safe schemes, foreign objects are refused, and objects have no holes.
#[test]
fn safe_book_has_no_deviations() {
    let mut bare = Bare::new(Deviations::NONE, 4);
    let (first, place, has_hole) = bare.allocate(64, shared(100, 0));
    assert_eq!((place.offset, has_hole), (0, false));
    let terms = AskTerms { group: GroupId(0), right: Right::Read, ..shared(100, 0) };
    for ask in [acquire(first.object, 0), Ask::Free { object: first.object }] {
        let effects = bare.ask(TWO, ask);
        let [Effect::Reply { outcome: Outcome::NoSuchObject, .. }] = effects[..] else {
            panic!("{effects:?}");
        };
    }
    let shared = Ask::Allocate { terms, bytes: 64, others: Others::Read };
    let effects = bare.ask(ONE, shared);
    assert!(matches!(effects[..], [Effect::Reply { outcome: Outcome::BadRequest, .. }]));
}
