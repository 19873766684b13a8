//! The checks of schemes whose memory node's CPU executes each access.

use std::future::Future;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use pool::{
    DomainToken, Error, Grant, Lane, LeaseTerms, Object, Options, Others, Pool, Right, Transfer,
};

use crate::Setup;
use crate::place::Node;

const LEASE: Duration = Duration::from_millis(1);

fn start(setup: &Setup) -> Node {
    setup.node_of(4096, 8)
}

fn member(node: &Node, token: Option<u8>) -> Pool {
    let domain = token.map(|byte| DomainToken([byte; 32]));
    node.connect_with(Options { groups: Some(1), domain, ..Options::default() })
}

fn word(pool: &Pool, object: &Object) -> u64 {
    let permission = pool.acquire_blocking(object, &LeaseTerms::shared_read(LEASE)).unwrap();
    let mut bytes = [0; 8];
    pool.read_blocking(&permission, 0, &mut bytes).unwrap();
    u64::from_be_bytes(bytes)
}

/// Waits until `chunks` are free.
fn until_free(pool: &Pool, chunks: u64) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while pool.node_status().unwrap().node.free != chunks {
        assert!(Instant::now() < deadline, "memory is missing");
        std::thread::yield_now();
    }
}

/// Accesses that return while they are in flight need keys, which grants do not have.
pub fn registered_memory_is_refused_by_name(setup: &Setup) {
    let node = start(setup);
    let pool = node.connect();
    assert_eq!(pool.first_chunk(), None, "a grant names no place");
    let grant = &pool.allocate_blocking().unwrap();
    let buffer = &pool.buffer(4096).unwrap();
    buffer.memory().write(0, b"data");
    let whole = Transfer { grant, offset: 0, buffer_offset: 0, len: 4096 };
    for refused in [
        pool.read_into(&whole, buffer, Lane(0)).map(drop),
        pool.write_from(&whole, buffer, Lane(0)).map(drop),
        pool.start_read_batch(&[whole], buffer, Lane(0)).map(drop),
        pool.start_write_batch(&[whole], buffer, Lane(0)).map(drop),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("no one-sided") && error.contains("`read_batch`"), "{error}");
    }
    pool.write_batch_blocking(&[whole], buffer, Lane(0)).unwrap();
    let mut back = [0; 4];
    pool.read_blocking(grant, 0, &mut back).unwrap();
    assert_eq!(&back, b"data");
}

/// An access whose future is dropped runs to its end, and writes nothing into later ones.
pub fn abandoned_accesses_end_on_their_own(setup: &Setup) {
    let node = start(setup);
    let pool = node.connect();
    let cx = &mut Context::from_waker(Waker::noop());
    let (kept, lost) = (pool.allocate_blocking().unwrap(), pool.allocate_blocking().unwrap());
    for round in 0..50u8 {
        let _ = std::pin::pin!(pool.write(&lost, 0, &[round; 4096])).poll(cx);
        let _ = std::pin::pin!(pool.read(&lost, 0, &mut [0; 4096])).poll(cx);
        let _ = std::pin::pin!(pool.fetch_and_add(&lost, 8, 1)).poll(cx);
        pool.write_blocking(&kept, 0, &[round; 4096]).unwrap();
        let mut back = [0; 4096];
        pool.read_blocking(&kept, 0, &mut back).unwrap();
        assert!(back == [round; 4096]);
    }
    drop(pool);
    node.check_whole(8);
}

/// Permissions need no message; each access is checked against the object's domain, right and
/// range.
pub fn objects_are_shared_within_their_domain(setup: &Setup) {
    let node = start(setup);
    let (a, b, foreign) = (member(&node, Some(1)), member(&node, Some(1)), member(&node, Some(2)));
    assert!(a.has_objects() && !a.has_leases());
    let write = LeaseTerms::shared_write(LEASE);
    let (object, own) = a.allocate_object_blocking(100, Others::Write, &write).unwrap();
    let theirs = b.acquire_blocking(&object, &write).unwrap();
    for pool in [(&a, &own), (&b, &theirs)] {
        assert!(pool.0.fetch_and_add_blocking(pool.1, 0, 1).unwrap() < 2);
    }
    // The range of a permission is part of the object.
    let part = b.acquire_blocking(&object, &write.clone().range(96..100)).unwrap();
    b.write_blocking(&part, 0, b"last").unwrap();
    let beyond = b.write_blocking(&part, 0, b"later");
    assert!(matches!(beyond, Err(Error::OutOfRange { .. })), "{beyond:?}");
    let beyond = b.acquire_blocking(&object, &write.clone().range(96..101));
    assert!(matches!(beyond, Err(Error::NoSuchObject { .. })), "{beyond:?}");
    let mut last = [0; 4];
    a.read_blocking(&own, 96, &mut last).unwrap();
    assert_eq!(&last, b"last");
    // A right of the permission is checked here, that of the object there.
    let read = b.acquire_blocking(&object, &LeaseTerms::shared_read(LEASE)).unwrap();
    let refused = b.write_blocking(&read, 0, b"no");
    assert!(matches!(refused, Err(Error::NotPermitted { .. })), "{refused:?}");
    let (readable, _) = a.allocate_object_blocking(64, Others::Read, &write).unwrap();
    let (secret, _) = a.allocate_object_blocking(64, Others::None, &write).unwrap();
    let stale = Object { generation: object.generation + 1, ..object };
    let longer = Object { len: 128, ..object };
    assert_eq!(word(&b, &readable), 0);
    let no_such = |pool: &Pool, object: &Object, right: Right, offset: u64| {
        let terms = LeaseTerms { right, ..LeaseTerms::shared_write(LEASE) };
        let permission = pool.acquire_blocking(object, &terms).unwrap();
        let refused = match right {
            Right::Read => pool.read_blocking(&permission, offset, &mut [0; 8]),
            Right::Write => pool.write_blocking(&permission, offset, &[1; 8]),
        };
        assert!(matches!(refused, Err(Error::NoSuchObject { .. })), "{refused:?}");
        let refused = pool.fetch_and_add_blocking(&permission, offset, 1);
        assert!(
            matches!(refused, Err(Error::NoSuchObject { .. } | Error::NotPermitted { .. })),
            "{refused:?}"
        );
    };
    for right in [Right::Read, Right::Write] {
        no_such(&foreign, &object, right, 0);
        no_such(&b, &secret, right, 0);
        no_such(&b, &stale, right, 0);
        no_such(&b, &longer, right, 96);
    }
    no_such(&b, &readable, Right::Write, 0);
    for (pool, object) in [(&foreign, &object), (&b, &object), (&b, &secret), (&b, &stale)] {
        let refused = pool.free_object_blocking(object);
        assert!(matches!(refused, Err(Error::NoSuchObject { .. })), "{refused:?}");
    }
    assert_eq!((word(&a, &object), word(&a, &readable), word(&a, &secret)), (2, 0, 0));
    // A revoked permission is not used any more.
    b.revoke_blocking(&theirs).unwrap();
    b.revoke_blocking(&theirs).unwrap();
    let ended = b.read_blocking(&theirs, 0, &mut [0; 8]);
    assert!(matches!(ended, Err(Error::Expired { .. })), "{ended:?}");
    assert!(a.renew_blocking(&own).unwrap() > LEASE);
    a.free_object_blocking(&object).unwrap();
    let gone = a.read_blocking(&own, 0, &mut [0; 8]);
    assert!(matches!(gone, Err(Error::NoSuchObject { .. })), "{gone:?}");
    let second = a.free_object_blocking(&object);
    assert!(matches!(second, Err(Error::NoSuchObject { .. })), "{second:?}");
    drop((a, b, foreign));
    node.check_whole(8);
}

pub fn objects_go_with_their_owner_or_domain(setup: &Setup) {
    let node = start(setup);
    let (a, b, asks) = (member(&node, Some(1)), member(&node, Some(1)), node.connect());
    let write = LeaseTerms::shared_write(LEASE);
    let chunk =
        |pool: &Pool, others| pool.allocate_object_blocking(4096, others, &write).unwrap().0;
    let (shared, free_by_others) = (chunk(&a, Others::Write), chunk(&a, Others::Own));
    chunk(&a, Others::None);
    let grant: Grant = a.allocate_blocking().unwrap();
    a.write_blocking(&grant, 0, &[1; 4096]).unwrap();
    let alone = asks.allocate_object_blocking(64, Others::Write, &write);
    assert!(matches!(alone, Err(Error::Refused { .. })), "an object for others has a domain");
    let permission = a.acquire_blocking(&shared, &write).unwrap();
    a.write_blocking(&permission, 0, &7u64.to_be_bytes()).unwrap();
    assert_eq!(asks.node_status().unwrap().node.free, 4);
    b.free_object_blocking(&free_by_others).unwrap();
    drop((permission, a));
    until_free(&asks, 7);
    assert_eq!(word(&b, &shared), 7);
    drop(b);
    until_free(&asks, 8);
    drop(asks);
    node.check_whole(8);
}
