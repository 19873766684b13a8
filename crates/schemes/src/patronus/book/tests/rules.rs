//! Each rule of permissions by itself. The world checks every effect against its model, too.

use std::collections::BTreeSet;
use std::time::Duration;

use scheme::{ClientId, GroupId, Others, Right, Sharing};

use super::scene::*;
use super::world::{CHUNK, GROUPS, Stage, Table, exclusive, settings, shared};
use crate::patronus::book::{Book, BookSettings, Effect, Place, Words};
use crate::patronus::message::{
    Ask, AskTerms, Lifetime, Limit, ObjectId, Outcome, PermissionNumber,
};

#[test]
fn impossible_requests_are_refused() {
    let mut world = world();
    let own = allocate(&mut world, ONE, exclusive(10, 0), Others::Own).object;
    let good = exclusive(10, 0);
    let endless = AskTerms { lease_us: AskTerms::FOREVER, ..good };
    let others = Others::None;
    for (client, ask) in [
        (ONE, Ask::Allocate { terms: good, bytes: 0, others }),
        (ONE, Ask::Allocate { terms: exclusive(0, 0), bytes: 1, others }),
        (
            ONE,
            Ask::Allocate { terms: AskTerms { group: GroupId(GROUPS), ..good }, bytes: 1, others },
        ),
        (ONE, Ask::Allocate { terms: endless, bytes: 1, others: Others::Read }),
        (
            ONE,
            Ask::Allocate { terms: AskTerms { right: Right::Read, ..endless }, bytes: 1, others },
        ),
        (ALONE, Ask::Allocate { terms: good, bytes: 1, others: Others::Read }),
        (ONE, Ask::Acquire { terms: good, object: own, offset: 0, len: 0 }),
        (ONE, Ask::Acquire { terms: good, object: own, offset: u64::MAX, len: 2 }),
        (ONE, Ask::Acquire { terms: endless, object: own, offset: 0, len: 1 }),
        (ONE, Ask::Acquire { terms: exclusive(0, 0), object: own, offset: 0, len: 1 }),
        (ONE, Ask::Renew { permission: PermissionNumber(0), lease_us: 0 }),
    ] {
        assert_eq!(world.request(client, ask), Some(Outcome::BadRequest), "{ask:?}");
    }
    assert_eq!(world.request(ONE, Ask::Allocate { terms: good, bytes: 1 << 40, others }), {
        Some(Outcome::NoBlock)
    });
}

#[test]
fn refusals_tell_nothing_about_foreign_objects() {
    let mut world = world();
    world.join(5, Some(2));
    let read = allocate(&mut world, ONE, shared(10, 0), Others::Read).object;
    let none = allocate(&mut world, ONE, shared(10, 0), Others::None).object;
    let stale = ObjectId { generation: 1, ..read };
    let unknown = ObjectId { entry: 9, generation: 0 };
    let write = AskTerms { right: Right::Write, ..shared(10, 0) };
    for (client, object, terms, len) in [
        (ClientId(5), read, shared(10, 0), 64),
        (ALONE, read, shared(10, 0), 64),
        (TWO, none, shared(10, 0), 64),
        (TWO, read, write, 64),
        (TWO, read, shared(10, 0), 65),
        (TWO, stale, shared(10, 0), 64),
        (TWO, unknown, shared(10, 0), 64),
    ] {
        let ask = Ask::Acquire { terms, object, offset: 0, len };
        assert_eq!(world.request(client, ask), Some(Outcome::NoSuchObject), "{ask:?}");
    }
    for (client, object) in [(TWO, read), (TWO, none), (ALONE, read), (ONE, stale), (ONE, unknown)]
    {
        let ask = Ask::Free { object };
        assert_eq!(world.request(client, ask), Some(Outcome::NoSuchObject));
    }
    assert_eq!(acquire(&mut world, TWO, read, shared(10, 0)), None);
}

#[test]
fn leases_are_brought_within_bounds() {
    let mut world = world();
    for (asked, given) in [(1, 10), (500, 500), (1 << 60, 1000)] {
        let granted = allocate(&mut world, ONE, exclusive(asked, 0), Others::None);
        assert_eq!(granted.word, Lifetime::new(granted.permission.nonce(), given));
    }
}

#[test]
fn requests_are_granted_first_come_first_served() {
    let mut world = world();
    let first = allocate(&mut world, ONE, shared(100, 0), Others::Own);
    let object = first.object;
    assert_eq!(acquire(&mut world, TWO, object, shared(50, 0)), None);
    open(&mut world);
    // An exclusive request waits for both, and a shared one behind it for the exclusive one.
    assert_eq!(acquire(&mut world, THREE, object, exclusive(50, 500)), None);
    assert_eq!(acquire(&mut world, TWO, object, shared(50, 500)), None);
    assert_eq!(world.in_stage(Stage::Waiting).len(), 2);
    assert_eq!(world.book.status().notices, 2);
    pass(&mut world, 50);
    close(&mut world);
    assert!(world.in_stage(Stage::Opening).is_empty(), "one of the two is still open");
    pass(&mut world, 50);
    close(&mut world);
    let third = open(&mut world);
    assert_eq!((third.waited_us, world.in_stage(Stage::Waiting).len()), (100, 1));
    assert_eq!(world.words.word(THREE, third.permission.slot()).micros(), 0, "a notice at once");
    assert_eq!(third.word.micros(), 50);
    pass(&mut world, 50);
    close(&mut world);
    assert_eq!(open(&mut world).waited_us, 150);
}

#[test]
fn ranges_that_do_not_overlap_do_not_conflict() {
    let mut world = world();
    let object = allocate(&mut world, ONE, exclusive(10, 0), Others::Own).object;
    pass(&mut world, 10);
    close(&mut world);
    let half = |offset| Ask::Acquire { terms: exclusive(50, 0), object, offset, len: 32 };
    assert_eq!(world.request(ONE, half(0)), None);
    assert_eq!(world.request(TWO, half(32)), None);
    assert_eq!(world.in_stage(Stage::Opening).len(), 2);
    assert_eq!(world.request(TWO, half(31)), Some(Outcome::Busy));
}

#[test]
fn waiting_is_limited() {
    let mut world = world();
    let object = allocate(&mut world, ONE, exclusive(100, 0), Others::Own).object;
    assert_eq!(acquire(&mut world, TWO, object, shared(50, 0)), Some(Outcome::Busy));
    assert_eq!(acquire(&mut world, TWO, object, shared(50, 20)), None);
    assert_eq!(acquire(&mut world, TWO, object, shared(50, u64::MAX)), None);
    let refused = Some(Outcome::TooMany(Limit::Waiting, 2));
    assert_eq!(acquire(&mut world, TWO, object, shared(50, 20)), refused);
    pass(&mut world, 20);
    assert_eq!(outcomes(&world), [(TWO, Outcome::Busy)]);
    pass(&mut world, 80);
    close(&mut world);
    assert_eq!(open(&mut world).waited_us, 100);
    assert_eq!(world.book.status().busy, 2);
}

#[test]
fn longest_wait_is_the_longest_lease() {
    let mut world = world();
    let object = allocate(&mut world, ONE, exclusive(1000, 0), Others::Own).object;
    world.now += 1;
    assert_eq!(acquire(&mut world, TWO, object, shared(50, u64::MAX)), None);
    pass(&mut world, 999);
    // The NIC is late, and the permission closes at the last moment of the wait.
    pass(&mut world, 1);
    assert_eq!(outcomes(&world), []);
    close(&mut world);
    assert_eq!(world.in_stage(Stage::Opening).len(), 1, "the turn of the request has come");
}

#[test]
fn wait_ends_behind_an_earlier_request() {
    let mut world = world();
    let object = allocate(&mut world, ONE, exclusive(1000, 0), Others::Own).object;
    world.now += 1;
    assert_eq!(acquire(&mut world, TWO, object, exclusive(50, u64::MAX)), None);
    assert_eq!(acquire(&mut world, THREE, object, exclusive(50, u64::MAX)), None);
    pass(&mut world, 1000);
    assert_eq!(outcomes(&world), [(THREE, Outcome::Busy)]);
}

#[test]
fn permission_without_lease_is_not_waited_for() {
    let mut world = world();
    let terms = AskTerms { lease_us: AskTerms::FOREVER, ..exclusive(1, 0) };
    let ask = Ask::Allocate { terms, bytes: CHUNK + 1, others: Others::None };
    assert_eq!(world.request(ONE, ask), None);
    let grant = open(&mut world);
    assert_eq!(grant.word.micros(), (1 << 48) - 1);
    assert_eq!(world.things[0].place.len, 2 * CHUNK);
    assert_eq!(acquire(&mut world, ONE, grant.object, shared(50, 500)), Some(Outcome::Busy));
    let permission = grant.permission;
    let ask = Ask::Renew { permission, lease_us: 10 };
    assert_eq!(world.request(ONE, ask), Some(Outcome::NotExtendable));
    let never_given = Ask::Revoke { permission: PermissionNumber::new(0, permission.slot()) };
    assert_eq!(world.request(ONE, never_given), Some(Outcome::NotYours));
    pass(&mut world, 1 << 40);
    assert_eq!(world.in_stage(Stage::Open).len(), 1, "a permission without a lease has ended");

    let free = |address| Ask::FreeGrant { entry: grant.object.entry, address };
    assert_eq!(world.request(TWO, free(grant.address)), Some(Outcome::NotYours));
    assert_eq!(world.request(ONE, free(grant.address + 1)), Some(Outcome::NotYours));
    assert_eq!(world.request(ONE, free(grant.address)), None);
    assert_eq!(world.request(ONE, free(grant.address)), Some(Outcome::NotYours), "a second free");
    close(&mut world);
    world.cleared(0);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Done)]);
    assert_eq!(world.book.free_chunks(), 4);
}

#[test]
fn extension_puts_a_lease_back() {
    let mut world = world();
    allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    assert!(world.cas(0, 80));
    assert_eq!(world.book.next_deadline(), Some(Duration::from_micros(50)));
    pass(&mut world, 50);
    assert_eq!(world.book.next_deadline(), Some(Duration::from_micros(80)));
    assert_eq!(world.book.status().extensions, 1);
    assert!(world.cas(0, 5000), "the word may have any lifetime");
    pass(&mut world, 949);
    assert_eq!(world.in_stage(Stage::Open).len(), 1);
    pass(&mut world, 1);
    assert_eq!(world.in_stage(Stage::Closing).len(), 1, "the longest lease is exceeded");
}

#[test]
fn notice_fixes_the_end() {
    let mut world = world();
    let object = allocate(&mut world, ONE, exclusive(50, 0), Others::Own).object;
    assert!(world.cas(0, 80));
    assert_eq!(acquire(&mut world, TWO, object, exclusive(50, 500)), None);
    assert!(!world.cas(0, 90), "extended after the notice");
    let permission = world.entries[0].id.unwrap().number;
    let ask = Ask::Renew { permission, lease_us: 50 };
    assert_eq!(world.request(ONE, ask), Some(Outcome::NotExtendable));
    let ask = Ask::Extend { permission, lifetime_us: 90 };
    assert_eq!(world.request(ONE, ask), Some(Outcome::NotExtendable));
    world.tamper(ONE, permission.slot(), Lifetime::new(permission.nonce(), 900).0);
    pass(&mut world, 79);
    assert_eq!(world.in_stage(Stage::Open), [0]);
    pass(&mut world, 1);
    assert_eq!(world.in_stage(Stage::Closing), [0], "a word counts after the notice");
}

#[test]
fn word_with_a_foreign_nonce_extends_nothing() {
    let mut world = world();
    let granted = allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    let foreign = Lifetime::new(granted.permission.nonce() ^ 1, 900);
    world.tamper(ONE, granted.permission.slot(), foreign.0);
    pass(&mut world, 49);
    assert_eq!(world.in_stage(Stage::Open), [0]);
    pass(&mut world, 1);
    assert_eq!(world.in_stage(Stage::Closing), [0]);
}

/// Words whose holder extends its lease between the load and the swap.
struct Racing {
    table: Table,
    late: Option<Lifetime>,
}

impl Words for Racing {
    fn load(&mut self, client: ClientId, slot: u32) -> Lifetime {
        let word = self.table.load(client, slot);
        if let Some(late) = self.late.take() {
            self.table.swap(client, slot, late);
        }
        word
    }

    fn swap(&mut self, client: ClientId, slot: u32, new: Lifetime) -> Lifetime {
        self.table.swap(client, slot, new)
    }
}

#[test]
fn extension_that_races_with_the_end_counts() {
    let mut book = Book::new(settings(4));
    let mut words = Racing { table: Table::default(), late: None };
    let (mut out, us) = (Vec::new(), Duration::from_micros);
    book.join(ONE, None);
    let ask = Ask::Allocate { terms: exclusive(50, 0), bytes: 1, others: Others::None };
    book.request(us(0), ONE, 1, ask, GROUPS, &mut words, &mut out);
    let Effect::Open { id, place, .. } = out[0] else { panic!("{out:?}") };
    assert_eq!(place.len, 1, "exactly the bytes of the object are opened");
    book.opened(us(0), id, true, &mut words, &mut out);
    words.late = Some(Lifetime::new(id.number.nonce(), 70));
    out.clear();
    assert!(!book.tick(us(50), &mut words, &mut out));
    assert_eq!((out.as_slice(), book.next_deadline()), ([].as_slice(), Some(us(70))));
    assert_eq!(words.table.word(ONE, 0).micros(), 0, "the next extension must fail");
    assert!(book.permission(id).unwrap().is_noticed);
    book.tick(us(70), &mut words, &mut out);
    assert_eq!(out, [Effect::Close { id }]);
}

#[test]
fn extension_by_request_is_as_by_cas() {
    let mut world = world();
    let permission = allocate(&mut world, ONE, exclusive(50, 0), Others::Own).permission;
    let extend = |lifetime_us| Ask::Extend { permission, lifetime_us };
    let word = |outcome| match outcome {
        Some(Outcome::Extended(word)) => word.micros(),
        other => panic!("{other:?}"),
    };
    assert_eq!(word(world.request(ONE, extend(80))), 80);
    assert_eq!(word(world.request(ONE, extend(60))), 80, "a lease is never shortened");
    assert_eq!(world.request(TWO, extend(90)), Some(Outcome::NotYours));
    assert_eq!(word(world.request(ONE, extend(u64::MAX))), 1000);
    assert_eq!(world.request(ONE, extend(u64::MAX)), Some(Outcome::NotExtendable));
    pass(&mut world, 999);
    assert_eq!(world.in_stage(Stage::Open), [0]);
    world.now += 1;
    assert_eq!(world.request(ONE, Ask::Renew { permission, lease_us: 9 }), Some(Outcome::Expired));
    world.tick();
    close(&mut world);
    assert_eq!(world.request(ONE, extend(90)), Some(Outcome::Expired));
}

#[test]
fn revoke_returns_when_the_keys_are_dead() {
    let mut world = world();
    let first = allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    let revoke = Ask::Revoke { permission: first.permission };
    assert_eq!(world.request(TWO, revoke), Some(Outcome::NotYours));
    assert_eq!(world.request(ONE, revoke), None);
    assert_eq!(world.request(ONE, revoke), None, "the keys are not dead yet");
    close(&mut world);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Done), (ONE, Outcome::Done)]);
    assert_eq!(world.request(ONE, revoke), Some(Outcome::Done));
    assert_eq!(world.book.status().revocations, 1);
    // The next permission has the same slot, but another number.
    assert_eq!(acquire(&mut world, ONE, first.object, exclusive(50, 0)), None);
    let second = world.entries[0].id.unwrap().number;
    assert_eq!(second.slot(), first.permission.slot());
    let guess = Ask::Revoke { permission: second };
    assert_eq!(world.request(ONE, guess), Some(Outcome::NotYours), "not given to it yet");
    open(&mut world);
    assert_eq!(world.request(ONE, revoke), Some(Outcome::Done));
    assert_eq!(world.in_stage(Stage::Open).len(), 1, "a late revoke has ended another permission");
}

/// A permission in the slot of an ended one has another nonce. A CAS that its compute node has
/// begun before, and that is executed late, fails.
#[test]
fn late_extension_of_an_ended_permission_fails() {
    let mut world = world();
    let terms = exclusive(50, 0);
    let first = allocate(&mut world, ONE, terms, Others::Own);
    assert_eq!(world.request(ONE, Ask::Revoke { permission: first.permission }), None);
    close(&mut world);
    assert_eq!(acquire(&mut world, ONE, first.object, terms), None);
    let second = open(&mut world);
    let slot = second.permission.slot();
    assert_eq!((slot, second.word.micros()), (first.permission.slot(), first.word.micros()));
    assert_ne!(world.words.word(ONE, slot), first.word, "the CAS of the first one would succeed");
    let renew = Ask::Renew { permission: second.permission, lease_us: 50 };
    assert_eq!(world.request(ONE, renew), None);
    close(&mut world);
    let third = open(&mut world);
    assert_eq!(third.permission.slot(), slot);
    let words = [first.word, second.word, third.word];
    assert_eq!(BTreeSet::from(words.map(|word| word.0)).len(), 3, "{words:?}");
}

#[test]
fn renewal_keeps_the_range_and_changes_the_number() {
    let mut world = world();
    let first = allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    world.now += 40;
    let ask = Ask::Renew { permission: first.permission, lease_us: 70 };
    assert_eq!(world.request(ONE, ask), None);
    assert_eq!(acquire(&mut world, TWO, first.object, exclusive(10, 500)), None);
    close(&mut world);
    assert_eq!(world.in_stage(Stage::Waiting), [1], "a waiter has slipped in");
    world.now += 3;
    let second = open(&mut world);
    assert_eq!((second.word.micros(), second.waited_us), (70, 3));
    assert_eq!(second.permission.slot(), first.permission.slot());
    assert_ne!(second.permission.nonce(), first.permission.nonce());
    let ask = Ask::Renew { permission: second.permission, lease_us: 70 };
    assert_eq!(world.request(ONE, ask), Some(Outcome::NotExtendable), "another one waits");
    let ask = Ask::Renew { permission: first.permission, lease_us: 70 };
    assert_eq!(world.request(ONE, ask), Some(Outcome::Expired));
    assert_eq!(world.book.status().renewals, 1);
}

#[test]
fn failed_renewal_ends_the_permission() {
    let mut world = world();
    let first = allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    let ask = Ask::Renew { permission: first.permission, lease_us: 70 };
    assert_eq!(world.request(ONE, ask), None);
    assert_eq!(acquire(&mut world, TWO, first.object, exclusive(10, 500)), None);
    close(&mut world);
    world.opened(world.in_stage(Stage::Opening)[0], false);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Failed)]);
    open(&mut world);
    assert_eq!(world.things.len(), 1, "the object is as it was");
}

#[test]
fn revoke_and_free_end_a_renewal() {
    let mut world = world();
    let first = allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    let renew = Ask::Renew { permission: first.permission, lease_us: 70 };
    assert_eq!(world.request(ONE, renew), None);
    assert_eq!(world.request(ONE, Ask::Revoke { permission: first.permission }), None);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Expired)]);
    close(&mut world);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Done)]);
    assert!(world.entries.is_empty());

    assert_eq!(acquire(&mut world, ONE, first.object, exclusive(50, 0)), None);
    let permission = open(&mut world).permission;
    assert_eq!(world.request(ONE, Ask::Renew { permission, lease_us: 70 }), None);
    assert_eq!(world.request(TWO, Ask::Free { object: first.object }), None);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Expired)]);
    close(&mut world);
    world.cleared(0);
    assert_eq!(outcomes(&world), [(TWO, Outcome::Done)]);
}

#[test]
fn time_that_goes_back_ends_nothing_early() {
    let mut world = world();
    world.now = 1000;
    allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    let mut out = Vec::new();
    world.book.tick(Duration::from_micros(10), &mut world.words, &mut out);
    world.book.tick(Duration::from_micros(1049), &mut world.words, &mut out);
    assert_eq!(out, []);
    world.book.tick(Duration::from_micros(1050), &mut world.words, &mut out);
    world.book.tick(Duration::from_micros(10), &mut world.words, &mut out);
    assert_eq!(out.len(), 1);
}

#[test]
fn one_look_at_the_deadlines_is_bounded() {
    let settings = BookSettings { permissions_max: 100, ..settings(8) };
    let mut world = world_with(settings);
    for _ in 0..100 {
        allocate(&mut world, ONE, exclusive(10, 0), Others::None);
    }
    let mut out = Vec::new();
    let now = Duration::from_micros(10);
    assert!(world.book.tick(now, &mut world.words, &mut out));
    assert_eq!(out.len(), 64);
    assert!(!world.book.tick(now, &mut world.words, &mut out));
    assert_eq!(out.len(), 100);
}

#[test]
fn reports_of_what_is_not_due_change_nothing() {
    let mut world = world();
    let granted = allocate(&mut world, ONE, exclusive(50, 0), Others::Own);
    let id = world.entries[0].id.unwrap();
    let mut out = Vec::new();
    let now = Duration::ZERO;
    world.book.opened(now, id, false, &mut world.words, &mut out);
    world.book.closed(now, id, &mut world.words, &mut out);
    world.book.cleared(now, granted.object, &mut world.words, &mut out);
    world.book.depart(now, ClientId(99), &mut world.words, &mut out);
    let ask = Ask::Free { object: granted.object };
    world.book.request(now, ClientId(99), 1, ask, GROUPS, &mut world.words, &mut out);
    assert_eq!(out, []);
    let view = world.book.permission(id).unwrap();
    assert_eq!((view.object, view.sharing), (granted.object, Sharing::Exclusive));
    assert_eq!(view.place, Place { offset: granted.address, len: 64 });
}
