//! Random requests, extensions, hostile words, stalls and deaths, against the model.

use proptest::prelude::*;
use scheme::{ClientId, GroupId, Others, Right, Sharing};

use super::world::{GROUPS, Stage, World, settings};
use crate::patronus::book::BookSettings;
use crate::patronus::message::{Ask, AskTerms, ObjectId, PermissionNumber};

/// A step; the numbers select among what exists.
#[derive(Clone, Debug)]
enum Step {
    Allocate { client: usize, terms: AskTerms, bytes: u64, others: Others },
    Acquire { client: usize, terms: AskTerms, object: usize, offset: u64, len: u64 },
    Renew { client: usize, entry: usize, lease_us: u64 },
    Revoke { client: usize, entry: usize, serial: i64 },
    Extend { client: usize, entry: usize, life_us: u64 },
    Free { client: usize, object: usize },
    FreeGrant { client: usize, object: usize, shift: u64 },
    Cas { entry: usize, life_us: u64 },
    Tamper { client: usize, slot: u32, word: u64 },
    Deliver { at: usize },
    Lose { at: usize },
    Opened { at: usize, is_open: bool },
    Closed { at: usize },
    Cleared { at: usize },
    Settle,
    Pass { micros: u64 },
    Tick,
    Depart { client: usize },
    Join { client: usize },
}

fn terms() -> impl Strategy<Value = AskTerms> {
    let lease = prop_oneof![
        10 => 1u64..40,
        2 => 900u64..2000,
        1 => Just(0u64),
        1 => Just(AskTerms::FOREVER),
        1 => Just(1u64 << 60),
    ];
    let wait = prop_oneof![2 => Just(0u64), 5 => 1u64..200, 1 => Just(u64::MAX)];
    let group = prop_oneof![20 => 0u16..GROUPS, 1 => Just(GROUPS)];
    (group, any::<bool>(), any::<bool>(), lease, wait).prop_map(
        |(group, reads, shared, lease_us, wait_us)| AskTerms {
            group: GroupId(group),
            right: if reads { Right::Read } else { Right::Write },
            sharing: if shared { Sharing::Shared } else { Sharing::Exclusive },
            lease_us,
            wait_us,
        },
    )
}

/// An allocation without a lease, which only this combination of terms allows.
fn grant() -> impl Strategy<Value = AskTerms> {
    terms().prop_map(|terms| AskTerms {
        right: Right::Write,
        sharing: Sharing::Exclusive,
        lease_us: AskTerms::FOREVER,
        ..terms
    })
}

fn others() -> impl Strategy<Value = Others> {
    prop_oneof![Just(Others::None), Just(Others::Read), Just(Others::Write), Just(Others::Own)]
}

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 1u64..200,
        3 => 500u64..1200,
        3 => 1000u64..20_000,
        1 => Just(0u64),
        1 => any::<u64>(),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let (client, at) = (|| 0usize..4, || 0usize..64);
    let range = prop_oneof![
        4 => (Just(0u64), 1u64..64),
        4 => (0u64..64, 1u64..64),
        1 => (any::<u64>(), any::<u64>()),
    ];
    prop_oneof![
        3 => (client(), terms(), bytes(), others()).prop_map(|(client, terms, bytes, others)| {
            Step::Allocate { client, terms, bytes, others }
        }),
        2 => (client(), grant(), bytes()).prop_map(|(client, terms, bytes)| {
            Step::Allocate { client, terms, bytes, others: Others::None }
        }),
        12 => (client(), terms(), at(), range).prop_map(|(client, terms, object, (offset, len))| {
            Step::Acquire { client, terms, object, offset, len }
        }),
        3 => (client(), at(), 0u64..100).prop_map(|(client, entry, lease_us)| {
            Step::Renew { client, entry, lease_us }
        }),
        3 => (client(), at(), -1i64..2).prop_map(|(client, entry, serial)| {
            Step::Revoke { client, entry, serial }
        }),
        1 => (client(), at(), 0u64..1200).prop_map(|(client, entry, life_us)| {
            Step::Extend { client, entry, life_us }
        }),
        2 => (client(), at()).prop_map(|(client, object)| Step::Free { client, object }),
        1 => (client(), at(), 0u64..2).prop_map(|(client, object, shift)| {
            Step::FreeGrant { client, object, shift }
        }),
        4 => (at(), 1u64..1200).prop_map(|(entry, life_us)| Step::Cas { entry, life_us }),
        1 => (client(), 0u32..8, any::<u64>()).prop_map(|(client, slot, word)| {
            Step::Tamper { client, slot, word }
        }),
        8 => at().prop_map(|at| Step::Deliver { at }),
        1 => at().prop_map(|at| Step::Lose { at }),
        10 => (at(), prop::bool::weighted(0.9)).prop_map(|(at, is_open)| {
            Step::Opened { at, is_open }
        }),
        8 => at().prop_map(|at| Step::Closed { at }),
        3 => at().prop_map(|at| Step::Cleared { at }),
        6 => Just(Step::Settle),
        5 => (1u64..60).prop_map(|micros| Step::Pass { micros }),
        1 => Just(Step::Pass { micros: 1000 }),
        6 => Just(Step::Tick),
        1 => client().prop_map(|client| Step::Depart { client }),
        1 => client().prop_map(|client| Step::Join { client }),
    ]
}

/// An element of a list that is not empty.
fn pick<T: Copy>(list: &[T], at: usize) -> Option<T> {
    (!list.is_empty()).then(|| list[at % list.len()])
}

fn object(world: &World, at: usize) -> ObjectId {
    let all: Vec<_> = world.things.iter().map(|thing| thing.id).collect();
    // Also objects that do not exist any more, or never did.
    match at % 16 {
        0 => ObjectId { entry: (at / 16) as u32, generation: 0 },
        1 => ObjectId { entry: u32::MAX, generation: at as u32 },
        _ => pick(&all, at).unwrap_or(ObjectId { entry: 0, generation: 0 }),
    }
}

fn permission(world: &World, at: usize) -> Option<PermissionNumber> {
    let ids: Vec<_> = world.entries.iter().filter_map(|entry| entry.id).collect();
    pick(&ids, at).map(|id| id.number)
}

fn run(world: &mut World, step: Step) {
    let living = |world: &World| -> Vec<ClientId> {
        let alive = world.nodes.iter().filter(|(_, node)| node.is_alive);
        alive.map(|(client, _)| *client).collect()
    };
    let alive = living(world);
    let by = |at: usize| pick(&alive, at);
    let stage = |world: &World, stage, at| pick(&world.in_stage(stage), at);
    match step {
        Step::Allocate { client, terms, bytes, others } => {
            let Some(client) = by(client) else { return };
            world.request(client, Ask::Allocate { terms, bytes, others });
        }
        Step::Acquire { client, terms, object: at, offset, len } => {
            let (Some(client), object) = (by(client), object(world, at)) else { return };
            world.request(client, Ask::Acquire { terms, object, offset, len });
        }
        Step::Renew { client, entry, lease_us } => {
            let (Some(client), Some(permission)) = (by(client), permission(world, entry)) else {
                return;
            };
            world.request(client, Ask::Renew { permission, lease_us });
        }
        Step::Revoke { client, entry, serial } => {
            let (Some(client), Some(permission)) = (by(client), permission(world, entry)) else {
                return;
            };
            let near = permission.0.wrapping_add_signed(serial << 16);
            world.request(client, Ask::Revoke { permission: PermissionNumber(near) });
        }
        Step::Extend { client, entry, life_us } => {
            let (Some(client), Some(permission)) = (by(client), permission(world, entry)) else {
                return;
            };
            world.request(client, Ask::Extend { permission, lifetime_us: life_us });
        }
        Step::Free { client, object: at } => {
            let (Some(client), object) = (by(client), object(world, at)) else { return };
            world.request(client, Ask::Free { object });
        }
        Step::FreeGrant { client, object: at, shift } => {
            let (Some(client), object) = (by(client), object(world, at)) else { return };
            let thing = world.things.iter().find(|thing| thing.id == object);
            let address = thing.map_or(0, |thing| thing.place.offset) + shift;
            world.request(client, Ask::FreeGrant { entry: object.entry, address });
        }
        Step::Cas { entry, life_us } => {
            let known: Vec<_> = (0..world.entries.len())
                .filter(|at| world.entries[*at].word.is_some_and(|word| word.micros() > 0))
                .filter(|at| world.nodes[&world.entries[*at].client].is_alive)
                .collect();
            if let Some(at) = pick(&known, entry).filter(|at| !world.entries[*at].is_endless()) {
                world.cas(at, life_us);
            }
        }
        Step::Tamper { client, slot, word } => {
            let Some(client) = by(client) else { return };
            world.tamper(client, slot, word);
        }
        Step::Deliver { at } => {
            let all: Vec<_> = (0..world.in_flight.len()).collect();
            pick(&all, at).into_iter().for_each(|at| world.deliver(at));
        }
        Step::Lose { at } => {
            let all: Vec<_> = (0..world.in_flight.len()).collect();
            pick(&all, at).into_iter().for_each(|at| world.lose(at));
        }
        Step::Opened { at, is_open } => {
            let at = stage(world, Stage::Opening, at);
            at.into_iter().for_each(|at| world.opened(at, is_open));
        }
        Step::Closed { at } => {
            let at = stage(world, Stage::Closing, at);
            at.into_iter().for_each(|at| world.closed(at));
        }
        Step::Cleared { at } => {
            let all: Vec<_> = (0..world.clears.len()).collect();
            pick(&all, at).into_iter().for_each(|at| world.cleared(at));
        }
        Step::Settle => world.settle(),
        Step::Pass { micros } => world.now += micros,
        Step::Tick => world.tick(),
        Step::Depart { client } => by(client).into_iter().for_each(|client| world.depart(client)),
        Step::Join { client } => {
            let client = client as u32 + 1;
            let has_left = world.book.has_left(ClientId(client));
            if has_left {
                world.join(client, domain(client));
            }
        }
    }
}

/// Two compute nodes share a domain, one has its own, and one has none.
fn domain(client: u32) -> Option<u8> {
    [Some(1), Some(1), Some(2), None][(client - 1) as usize]
}

fn cases() -> u32 {
    let is_full = std::env::var_os("GRANARY_TEST_FULL").is_some_and(|value| value == "1");
    if is_full { 50_000 } else { 500 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// The book does as the model says, with random requests, words, and deaths of compute nodes.
    /// In the end nothing is left.
    #[test]
    fn book_does_as_the_model_says(
        chunks in 1u32..12,
        objects_max in 2u64..20,
        limit in prop::option::of(1000u64..30_000),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let settings = BookSettings { objects_max, domain_bytes: limit, ..settings(chunks) };
        let mut world = World::new(settings);
        (1..=4).for_each(|client| { world.join(client, domain(client)); });
        steps.into_iter().for_each(|step| run(&mut world, step));
        world.drain();
    }
}
