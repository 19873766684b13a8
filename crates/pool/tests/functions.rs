//! Tests of schemes with windows bound in advance on a NIC whose functions have too few windows:
//! the memory node uses several functions.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::{CHUNK, check_whole, over_functions, settings};
use pool::{
    Address, EmbeddedNode, Endpoint, Error, Grant, GroupId, Lane, Listen, MultiPool, Options,
    Placement, Pool, Remote, Scheme, Service, Settings, Step, Transfer, schemes,
};
use schemes::finemem::layout::{Functions, Shape};
use verbs::Key;

fn by_cas() -> impl Iterator<Item = Scheme> {
    schemes::ALL.iter().copied().filter(|scheme| scheme.is_by_cas())
}

fn of(scheme: Scheme, chunks: u64) -> Settings {
    over_functions(settings(scheme, chunks))
}

fn two_groups() -> Options {
    Options { groups: Some(2), ..Options::default() }
}

#[test]
fn blocks_of_all_sizes_are_at_their_table_addresses() {
    for scheme in by_cas() {
        let pool = Pool::embedded(of(scheme, 96)).unwrap();
        let functions = pool.welcome().offer.functions;
        assert!((3..=7).contains(&functions), "{scheme}: {functions}");
        let shape = Shape { chunks: 96, chunk_bytes: CHUNK };
        let (division, mut seen) = (Functions::new(shape, functions), BTreeSet::new());
        for _ in 0..3 {
            // Allocates all memory in blocks of one size after another, so that each block is used.
            for order in 0..6 {
                let count = 96 >> order;
                let blocks: Vec<Grant> = (0..count)
                    .map(|_| pool.allocate_bytes_blocking(CHUNK << order).unwrap())
                    .collect();
                for (i, grant) in blocks.iter().enumerate() {
                    assert_eq!(grant.function as u32, division.of(grant.entry));
                    seen.insert(grant.function);
                    pool.write_blocking(grant, grant.len - 8, &[i as u8; 8]).unwrap();
                    pool.fetch_and_add_blocking(grant, 0, 1).unwrap();
                }
                for (i, grant) in blocks.into_iter().enumerate() {
                    let mut mark = [0; 8];
                    pool.read_blocking(&grant, grant.len - 8, &mut mark).unwrap();
                    assert_eq!(mark, [i as u8; 8]);
                    pool.free_blocking(grant).unwrap();
                }
                check_whole(&pool, 96);
            }
        }
        assert_eq!(seen.len() as u32, functions, "{scheme}: every function has a used block");
    }
}

#[test]
fn batch_reaches_all_functions() {
    let pool = Pool::embedded_in(
        &Arc::new(EmbeddedNode::start(&of(schemes::FINEMEM, 30)).unwrap()),
        two_groups(),
    );
    let pool = pool.unwrap();
    let buffer = pool.buffer(30 * 64).unwrap();
    let grants: Vec<Grant> =
        (0..30).map(|i| pool.allocate_in_blocking(GroupId(i % 2)).unwrap()).collect();
    assert!(grants.iter().map(|g| g.function).collect::<BTreeSet<_>>().len() >= 3);
    let transfer = |(i, grant)| Transfer { grant, offset: 64, buffer_offset: i * 64, len: 64 };
    let transfers: Vec<Transfer<'_>> = grants.iter().enumerate().map(transfer).collect();
    for lane in [Lane(0), Lane(1), Lane(7)] {
        (0..30).for_each(|i| buffer.memory().write(i * 64, &[i as u8 ^ lane.0; 64]));
        pool.write_batch_blocking(&transfers, &buffer, lane).unwrap();
        buffer.memory().zero(0, 30 * 64);
        pool.read_batch_blocking(&transfers, &buffer, lane).unwrap();
        for i in 0..30 {
            let mut back = [0; 64];
            buffer.memory().read(i * 64, &mut back);
            assert_eq!(back, [i as u8 ^ lane.0; 64]);
        }
    }
}

/// Two functions have two QPs, between which there is no order.
#[test]
fn ordered_list_stays_in_one_function() {
    let pool = Pool::embedded(of(schemes::FINEMEM, 30)).unwrap();
    let grants: Vec<Grant> =
        (0..30).map(|_| pool.allocate_in_blocking(GroupId(0)).unwrap()).collect();
    let here = grants.iter().find(|g| g.function == 1).unwrap();
    let beside = grants.iter().rfind(|g| g.function == 1).unwrap();
    let there = grants.iter().find(|g| g.function != 1).unwrap();
    let run = |second| {
        let mut old = 0;
        let mut steps = [
            Step::Write { grant: here, offset: 0, from: &[1; 8] },
            Step::FetchAndAdd { grant: second, offset: 0, add: 1, old: &mut old },
        ];
        pool.run_blocking(Lane(1), &mut steps).map(|()| old)
    };
    assert_eq!((run(beside).unwrap(), run(here).unwrap()), (0, 0x0101_0101_0101_0101));
    let refused = run(there).unwrap_err().to_string();
    assert!(refused.contains("(group 0, function 1)"), "{refused}");
    assert_eq!(pool.fetch_and_add_blocking(there, 0, 0).unwrap(), 0);
}

/// A key opens its block on QPs of its function only, and no key opens another owner's block on any
/// QP.
#[test]
fn no_key_opens_a_block_over_another_function() {
    let node = Arc::new(EmbeddedNode::start(&of(schemes::FINEMEM, 6)).unwrap());
    let [owner, thief] = [(); 2].map(|()| Pool::embedded_in(&node, two_groups()).unwrap());
    let functions = owner.welcome().offer.functions as u8;
    let grants: Vec<Grant> = (0..5).map(|_| owner.allocate_blocking().unwrap()).collect();
    let his = thief.allocate_blocking().unwrap();
    for grant in &grants {
        owner.write_blocking(grant, 0, b"a secret").unwrap();
        let by_hand = |function, key| {
            Grant::new(grant.addr, grant.len, grant.entry, GroupId(0), &[key; 2])
                .in_function(function)
        };
        let refused = |pool: &Pool, function, key| {
            let guess = by_hand(function, key);
            let result = pool.write_blocking(&guess, 0, b"changed!");
            matches!(result, Err(Error::Access { .. }))
        };
        let key = grant.keys()[0];
        for function in 0..functions + 3 {
            // A function number that does not exist is mapped to an existing function.
            let right = function % functions == grant.function;
            if !right {
                assert!(refused(&owner, function, key), "over {function}");
            }
            assert!(refused(&thief, function, key), "over {function}");
        }
        // Any index: regions and windows have the lowest ones.
        for function in 0..functions {
            for index in 0..24 {
                for tag in 0..4 {
                    let key = Key::new(index.into(), tag);
                    assert!(refused(&thief, function, key), "{key} over {function}");
                }
            }
        }
        let mut found = [0; 8];
        owner.read_blocking(grant, 0, &mut found).unwrap();
        assert_eq!(&found, b"a secret");
    }
    thief.write_blocking(&his, 0, b"still works").unwrap();
    drop(thief);
    grants.into_iter().for_each(|grant| owner.free_blocking(grant).unwrap());
    check_whole(&owner, 6);
}

fn serve(scheme: Scheme) -> (Service, Remote) {
    let listen = Listen::to_all("127.0.0.1:0".parse().unwrap());
    let service = Service::start_with(&of(scheme, 24), &Endpoint::Fresh, Some(&listen)).unwrap();
    let to = service.address().unwrap().into();
    (service, Remote { to, token: None, nic: None })
}

/// Two compute nodes at a time, over shared memory and over RoCEv2; one departs without freeing its
/// chunks.
#[test]
fn shm_and_roce_clients_share_all_functions() {
    for scheme in by_cas() {
        let (service, remote) = serve(scheme);
        let here = Pool::connect(service.path(), two_groups()).unwrap();
        let far = Pool::connect_remote(&remote, two_groups()).unwrap();
        assert!(far.welcome().offer.functions >= 3);
        for _ in 0..4 {
            let mut held = Vec::new();
            for i in 0..12u8 {
                for (pool, mark) in [(&here, i), (&far, i | 0x80)] {
                    let grant = pool.allocate_blocking().unwrap();
                    pool.write_blocking(&grant, 0, &[mark; 512]).unwrap();
                    held.push((pool, grant, mark));
                }
            }
            assert!(matches!(far.allocate_blocking(), Err(Error::OutOfMemory { .. })));
            for (pool, grant, mark) in held {
                let mut back = [0; 512];
                pool.read_blocking(&grant, 0, &mut back).unwrap();
                assert_eq!(back, [mark; 512]);
                pool.free_blocking(grant).unwrap();
            }
        }
        let left = far.allocate_bytes_blocking(4 * CHUNK).unwrap();
        far.write_blocking(&left, 0, &[1; 64]).unwrap();
        drop(far);
        check_whole(&here, 24);
    }
}

/// A pool over memory nodes with one and with several functions.
#[test]
fn multi_pool_mixes_one_and_several_functions() {
    let one = Service::start(&settings(schemes::FINEMEM, 24), &Endpoint::Fresh).unwrap();
    let (several, remote) = serve(schemes::FINEMEM);
    let addresses = [
        Address::Shm(one.path().to_owned()),
        Address::Shm(several.path().to_owned()),
        Address::Roce(remote),
    ];
    let pools = MultiPool::connect(&addresses, two_groups(), Placement::RoundRobin).unwrap();
    let all: Vec<_> = (0..36u8)
        .map(|i| {
            let placed = pools.allocate_blocking().unwrap();
            pools.write_blocking(&placed, 100, &[i; 16]).unwrap();
            placed
        })
        .collect();
    let functions = |node: u16| {
        let there = all.iter().filter(|placed| placed.node.0 == node);
        there.map(|placed| placed.grant.function).collect::<BTreeSet<_>>().len()
    };
    assert_eq!(functions(0), 1);
    assert!(functions(1) > 1 && functions(2) > 1);
    for (i, placed) in all.into_iter().enumerate() {
        let mut back = [0; 16];
        pools.read_blocking(&placed, 100, &mut back).unwrap();
        assert_eq!(back, [i as u8; 16]);
        pools.free_blocking(placed).unwrap();
    }
}

/// More windows than a 24-bit key index can name: some are in another function.
#[test]
fn windows_exceed_the_24_bit_key_index() {
    if std::env::var_os("GRANARY_TEST_FULL").is_none() {
        return; // takes a minute and several gigabytes
    }
    let chunks = 9 << 20;
    let settings = Settings { nic_windows: None, ..settings(schemes::FINEMEM, chunks) };
    let pool = Pool::embedded(settings).unwrap();
    assert_eq!(pool.welcome().offer.functions, 2);
    let first = pool.allocate_blocking().unwrap();
    let large = pool.allocate_bytes_blocking(CHUNK << 10).unwrap();
    assert_eq!((first.function, large.function), (0, 1));
    for grant in [first, large] {
        pool.write_blocking(&grant, grant.len - 8, b"the last").unwrap();
        let mut found = [0; 8];
        pool.read_blocking(&grant, grant.len - 8, &mut found).unwrap();
        assert_eq!(&found, b"the last");
        let elsewhere = grant.in_function(1 - grant.function);
        assert!(pool.read_blocking(&elsewhere, grant.len - 8, &mut found).is_err());
        pool.free_blocking(grant).unwrap();
    }
}
