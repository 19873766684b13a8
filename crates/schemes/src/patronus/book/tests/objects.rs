//! Each rule of objects and compute nodes by itself.

use scheme::Others;

use super::scene::*;
use super::world::{CHUNK, Stage, exclusive, settings, shared};
use crate::patronus::book::BookSettings;
use crate::patronus::message::{Ask, Limit, ObjectId, Outcome};

#[test]
fn failed_allocation_gives_its_memory_back() {
    let mut world = world();
    let ask = Ask::Allocate { terms: exclusive(50, 0), bytes: 64, others: Others::Own };
    assert_eq!(world.request(ONE, ask), None);
    assert_eq!(world.book.free_chunks(), 3);
    world.opened(0, false);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Failed)]);
    assert_eq!((world.book.free_chunks(), world.clears.len()), (4, 0), "it is still zero");
}

#[test]
fn free_lets_the_leases_of_others_run_out() {
    let mut world = world();
    let object = allocate(&mut world, ONE, shared(100, 0), Others::Own).object;
    for client in [TWO, THREE] {
        assert_eq!(acquire(&mut world, client, object, shared(60, 0)), None);
    }
    open(&mut world);
    assert_eq!(acquire(&mut world, TWO, object, exclusive(50, 500)), None);
    // TWO has a permission and waits for another one; THREE's is being opened.
    assert_eq!(world.request(ONE, Ask::Free { object }), None);
    let refused = Outcome::NoSuchObject;
    assert_eq!(outcomes(&world), [(TWO, refused), (THREE, refused)]);
    assert_eq!(world.request(TWO, Ask::Free { object }), Some(refused));
    assert_eq!(acquire(&mut world, TWO, object, shared(60, 0)), Some(refused));
    close(&mut world);
    world.opened(world.in_stage(Stage::Opening)[0], true);
    close(&mut world);
    assert_eq!(world.in_stage(Stage::Open).len(), 1, "TWO keeps its lease");
    assert!(world.clears.is_empty());
    pass(&mut world, 60);
    close(&mut world);
    assert_eq!(world.clears, [object]);
    assert_eq!(world.book.free_chunks(), 3);
    world.cleared(0);
    assert_eq!(outcomes(&world), [(ONE, Outcome::Done)]);
    assert_eq!(world.book.free_chunks(), 4);
    let next = allocate(&mut world, ONE, shared(100, 0), Others::Own).object;
    assert_eq!(next, ObjectId { generation: 1, ..object }, "the name is another one");
}

#[test]
fn permissions_objects_and_bytes_are_limited() {
    let limits = BookSettings { objects_max: 9, domain_bytes: Some(600), ..settings(8) };
    let mut world = world_with(limits);
    for _ in 0..8 {
        allocate(&mut world, ONE, exclusive(10, 0), Others::None);
    }
    let ask = |bytes| Ask::Allocate { terms: exclusive(10, 0), bytes, others: Others::None };
    let permissions = Outcome::TooMany(Limit::Permissions, 8);
    assert_eq!(world.request(ONE, ask(8)), Some(permissions));
    let bytes = Outcome::TooMany(Limit::Bytes, 600);
    assert_eq!(world.request(TWO, ask(89)), Some(bytes), "the domain has 512");
    assert_eq!(world.request(TWO, ask(u64::MAX)), Some(bytes));
    assert_eq!(world.request(TWO, ask(88)), None);
    assert_eq!(world.request(TWO, ask(1)), Some(Outcome::TooMany(Limit::Objects, 9)));
    assert_eq!(world.request(ALONE, ask(600)), None, "a compute node without a domain");
}

#[test]
fn memory_that_is_used_up_is_told() {
    let mut world = world();
    let ask = |bytes| Ask::Allocate { terms: exclusive(10, 0), bytes, others: Others::None };
    for _ in 0..3 {
        assert_eq!(world.request(ONE, ask(CHUNK)), None);
    }
    assert_eq!(world.request(ONE, ask(2 * CHUNK)), Some(Outcome::NoBlock));
    assert_eq!(world.request(ONE, ask(CHUNK)), None);
    assert_eq!(world.request(ONE, ask(1)), Some(Outcome::Empty));
    assert_eq!(world.request(ONE, ask(CHUNK)), Some(Outcome::Empty));
}

#[test]
fn undelivered_grants_are_taken_back() {
    let mut world = world();
    let object = allocate(&mut world, ONE, exclusive(10, 0), Others::Own).object;
    pass(&mut world, 10);
    close(&mut world);
    assert_eq!(acquire(&mut world, TWO, object, exclusive(100, 0)), None);
    world.opened(0, true);
    world.lose(0);
    assert_eq!(world.in_stage(Stage::Closing), [0]);
    close(&mut world);
    assert_eq!(world.things.len(), 1, "the object was not allocated by this request");

    let ask = Ask::Allocate { terms: exclusive(10, 0), bytes: 64, others: Others::Own };
    assert_eq!(world.request(TWO, ask), None);
    world.opened(0, true);
    pass(&mut world, 10);
    close(&mut world);
    // The lease has ended before the reply was known to be lost.
    world.lose(0);
    assert_eq!(world.clears.len(), 1, "an object without a name is kept");
}

#[test]
fn objects_of_a_domain_live_until_its_last_member_has_left() {
    let mut world = world();
    let kept = allocate(&mut world, ONE, shared(100, 0), Others::Read).object;
    let own = allocate(&mut world, ONE, shared(100, 0), Others::None).object;
    assert_eq!(acquire(&mut world, TWO, kept, shared(100, 0)), None);
    open(&mut world);
    world.depart(ONE);
    assert!(!world.book.has_left(ONE));
    world.settle();
    assert!(world.book.has_left(ONE));
    let names: Vec<_> = world.things.iter().map(|thing| thing.id).collect();
    assert_eq!(names, [kept], "{own:?} is not the domain's");
    // A compute node with the same number does not own the object of the earlier one.
    world.join(1, Some(1));
    assert_eq!(world.request(ONE, Ask::Free { object: kept }), Some(Outcome::NoSuchObject));
    for client in [ONE, THREE, TWO] {
        assert_eq!(world.things.len(), 1);
        world.depart(client);
        world.settle();
    }
    assert!(world.things.is_empty());
    assert_eq!(world.book.status().domains, 0);
}

#[test]
fn death_passes_exclusive_permissions_on() {
    let mut world = world();
    let object = allocate(&mut world, ONE, exclusive(500, 0), Others::Own).object;
    assert_eq!(acquire(&mut world, TWO, object, exclusive(100, 900)), None);
    assert_eq!(acquire(&mut world, TWO, object, shared(100, 900)), None);
    assert_eq!(acquire(&mut world, THREE, object, exclusive(100, 900)), None);
    world.depart(TWO);
    assert!(world.in_stage(Stage::Opening).is_empty(), "a dead waiter's turn has come");
    world.depart(ONE);
    close(&mut world);
    assert_eq!(open(&mut world).permission.slot(), 0);
    assert_eq!(world.entries[0].client, THREE);
}

#[test]
fn allocation_of_a_dead_compute_node_is_freed() {
    let mut world = world();
    let ask = Ask::Allocate { terms: exclusive(10, 0), bytes: 64, others: Others::Own };
    assert_eq!(world.request(ONE, ask), None);
    world.depart(ONE);
    world.opened(0, true);
    close(&mut world);
    assert_eq!(world.clears.len(), 1, "an object without a name is kept");
}
