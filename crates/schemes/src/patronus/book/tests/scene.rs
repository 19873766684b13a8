//! Steps of which the tests of the rules consist.

use scheme::{ClientId, Others};

use super::world::{Stage, World, settings};
use crate::patronus::book::BookSettings;
use crate::patronus::message::{Ask, AskTerms, Granted, ObjectId, Outcome};

pub const ONE: ClientId = ClientId(1);
pub const TWO: ClientId = ClientId(2);
pub const THREE: ClientId = ClientId(3);
pub const ALONE: ClientId = ClientId(4);

/// Three compute nodes of a domain, and one without.
pub fn world() -> World {
    world_with(settings(4))
}

pub fn world_with(settings: BookSettings) -> World {
    let mut world = World::new(settings);
    (1..=3).for_each(|client| {
        world.join(client, Some(1));
    });
    world.join(4, None);
    world
}

pub fn granted(world: &World) -> Granted {
    let mut grants = world.replies.iter().filter_map(|(_, _, outcome)| match outcome {
        Outcome::Granted(granted) => Some(*granted),
        _ => None,
    });
    grants.next().expect("a grant")
}

/// Opens what is to be opened, and delivers the grants.
pub fn open(world: &mut World) -> Granted {
    let at = *world.in_stage(Stage::Opening).first().expect("an opening permission");
    world.opened(at, true);
    let granted = granted(world);
    world.deliver(0);
    granted
}

pub fn allocate(world: &mut World, client: ClientId, terms: AskTerms, others: Others) -> Granted {
    assert_eq!(world.request(client, Ask::Allocate { terms, bytes: 64, others }), None);
    open(world)
}

pub fn acquire(
    world: &mut World,
    client: ClientId,
    object: ObjectId,
    terms: AskTerms,
) -> Option<Outcome> {
    world.request(client, Ask::Acquire { terms, object, offset: 0, len: 64 })
}

/// Closes what is to be closed.
pub fn close(world: &mut World) {
    let at = *world.in_stage(Stage::Closing).first().expect("a closing permission");
    world.closed(at);
}

pub fn outcomes(world: &World) -> Vec<(ClientId, Outcome)> {
    world.replies.iter().map(|(client, _, outcome)| (*client, *outcome)).collect()
}

pub fn pass(world: &mut World, micros: u64) {
    world.now += micros;
    world.tick();
}
