//! The queue in a simulated cluster.

mod world;

use std::sync::Arc;
use std::time::Duration;

use pool::{
    DomainToken, EmbeddedNode, Error, GroupId, LeaseTerms, Options, Others, Pool, Settings, schemes,
};
use proptest::prelude::*;
use sim::Time;
use verbs::executor::block_on;

use super::layout::{NEXT, TAIL};
use super::{Connection, Consumer, ENTRIES_MAX, Metadata, PAYLOAD_BYTES, Producer, create};
use world::{Fault, Plan, Seen};

const SCHEMES: [pool::Scheme; 3] = [schemes::PATRONUS, schemes::PATRONUS_2, schemes::PATRONUS_MR];

/// Runs the plan with a fault at each verb of a member. Returns the number of runs in which the
/// member stopped, and the sums of what they have shown.
fn at_each_verb(plan: &Plan, member: usize, hang: Option<Time>, step: usize) -> (u32, Seen) {
    let (mut stopped, mut sum) = (0, Seen::default());
    for passes in (0..).step_by(step) {
        let fault = Some(Fault { member, passes, hang });
        let seen = Plan { fault, seed: u64::from(passes), ..plan.clone() }.run();
        sum.unknown += seen.unknown;
        sum.notices += seen.notices;
        sum.left_over = sum.left_over.max(seen.left_over);
        if !seen.stopped {
            break;
        }
        stopped += 1;
    }
    (stopped, sum)
}

#[test]
fn entries_are_taken_once_and_in_order() {
    for scheme in SCHEMES {
        for seed in 0..8 {
            let plan = Plan { seed, scheme, inserts: 20, ..Plan::default() };
            let seen = plan.run();
            assert_eq!((seen.unknown, seen.left_over), (0, 0), "{plan:?}");
        }
    }
}

/// An entry without a WRITE is skipped. At most one segment, which was not linked yet, is left
/// until the domain ends.
#[test]
fn producer_may_end_at_any_verb() {
    let plan = Plan { late_us: 1000, ..Plan::default() };
    let (stopped, seen) = at_each_verb(&plan, 0, None, 1);
    assert!(stopped > 20 && seen.unknown > 0 && seen.notices > 0, "{stopped}: {seen:?}");
    assert!(seen.left_over <= 1, "{seen:?}");
}

/// A producer that hangs for longer than its leases finds its entry skipped, or its segment freed.
#[test]
fn producer_may_hang_at_any_verb() {
    let hang = Some(Time::us(500));
    for passes in (0..170).step_by(3) {
        let fault = Some(Fault { member: 1, passes, hang });
        let seen = Plan { fault, seed: u64::from(passes), ..Plan::default() }.run();
        assert_eq!(seen.left_over, 0, "{passes}: {seen:?}");
        assert!(seen.unknown <= 1, "{passes}: {seen:?}");
    }
}

/// A consumer loses patience while the producer still may write its entry.
#[test]
fn entry_of_a_slow_producer_is_not_skipped() {
    let plan = Plan { lease_us: 1000, patience_us: 10, ..Plan::default() };
    for passes in (0..100).step_by(2) {
        let fault = Some(Fault { member: 1, passes, hang: Some(Time::us(400)) });
        let seen = Plan { fault, seed: u64::from(passes), ..plan.clone() }.run();
        assert_eq!((seen.unknown, seen.left_over), (0, 0), "{passes}: {seen:?}");
    }
}

#[test]
fn consumer_may_end_at_any_verb() {
    let plan = Plan { consumers: 2, ..Plan::default() };
    let mut left_over = 0;
    for passes in (0..300).step_by(7) {
        let fault = Some(Fault { member: 3, passes, hang: None });
        let seen = Plan { fault, seed: u64::from(passes), ..plan.clone() }.run();
        assert!(seen.stopped, "{passes}");
        left_over += seen.left_over;
    }
    assert_eq!(left_over, 0, "the other consumer frees the segments");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_run_keeps_entries_and_order(
        seed: u64,
        scheme in 0..SCHEMES.len(),
        (producers, consumers) in (1_u16..6, 1_u16..4),
        (inserts, entries) in (1_u32..24, 1_u64..9),
        (lease_us, patience_us, late_us) in (50_u64..200, 1_u64..200, 0_u64..1000),
        revokes: bool,
        fault in prop::option::of((0_usize..8, 0_u32..200, prop::option::of(1_u64..1000))),
    ) {
        let scheme = SCHEMES[scheme];
        let fault = fault.and_then(|(member, passes, hang)| {
            let member = member % usize::from(producers + consumers);
            // The last consumer has to stay.
            let may_die = member < usize::from(producers) || consumers > 1;
            let hang = hang.map(Time::us);
            (may_die || hang.is_some()).then_some(Fault { member, passes, hang })
        });
        let died = fault.is_some_and(|fault| fault.hang.is_none());
        let plan = Plan {
            seed,
            scheme,
            producers,
            consumers,
            inserts,
            entries,
            lease_us,
            revokes,
            patience_us,
            late_us,
            fault,
        };
        let seen = plan.run();
        prop_assert!(seen.left_over <= u64::from(died), "{:?}: {:?}", plan, seen);
        prop_assert!(seen.unknown <= usize::from(fault.is_some()), "{:?}: {:?}", plan, seen);
    }
}

fn connection() -> Connection<pool::DefaultNic> {
    let scheme = schemes::PATRONUS;
    let settings =
        Settings { donate_bytes: 1 << 20, chunk_bytes: 4096, scheme, ..Settings::default() };
    let node = Arc::new(EmbeddedNode::start(&settings).unwrap());
    let options = Options { domain: Some(DomainToken([1; 32])), ..Options::default() };
    let pool = Pool::embedded_in(&node, options).unwrap();
    Connection { pool, group: GroupId(0), lease: Duration::from_secs(1), revokes: false }
}

#[test]
fn queue_of_one_process_keeps_order() {
    let connection = connection();
    let queue = block_on(create(&connection, 3)).unwrap();
    let mut producer = block_on(Producer::open(connection.clone(), &queue)).unwrap();
    let mut consumer = block_on(Consumer::open(connection, &queue, Duration::MAX)).unwrap();
    assert!(block_on(consumer.take(5)).unwrap().is_empty());
    for round in 0..4_u8 {
        let entries: Vec<_> = (0..5).map(|i| [5 * round + i; PAYLOAD_BYTES]).collect();
        for entry in &entries {
            block_on(producer.insert(entry)).unwrap();
        }
        let mut taken = Vec::new();
        while taken.len() < 5 {
            taken.extend(block_on(consumer.take(2)).unwrap());
        }
        assert_eq!(taken, entries);
    }
    assert!(block_on(consumer.take(5)).unwrap().is_empty());
}

#[test]
fn object_without_a_queue_is_refused() {
    let connection = connection();
    for entries in [0, ENTRIES_MAX + 1] {
        let refused = block_on(create(&connection, entries));
        assert!(matches!(refused, Err(Error::Setting { setting: "entries", .. })), "{refused:?}");
    }
    let terms = LeaseTerms::shared_write(Duration::from_secs(1));
    let (object, _) = connection.pool.allocate_object_blocking(64, Others::None, &terms).unwrap();
    let refused = block_on(Producer::open(connection.clone(), &object)).map(drop);
    assert!(matches!(refused, Err(Error::Protocol { .. })), "{refused:?}");
    block_on(connection.pool.free_object(&object)).unwrap();
    let refused = block_on(Producer::open(connection, &object)).map(drop);
    assert!(matches!(refused, Err(Error::NoSuchObject { .. })), "{refused:?}");
}

/// A member may write any word. The others fail after a bounded number of steps.
#[test]
fn damaged_links_end_an_operation() {
    for (at, is_of_metadata) in [(TAIL, true), (NEXT, false)] {
        let connection = connection();
        let pool = &connection.pool;
        let queue = block_on(create(&connection, 1)).unwrap();
        let mut producer = block_on(Producer::open(connection.clone(), &queue)).unwrap();
        let terms = LeaseTerms::shared_write(Duration::from_secs(1));
        let mut object = queue;
        if !is_of_metadata {
            block_on(producer.insert(&[1; PAYLOAD_BYTES])).unwrap();
            let mut metadata = block_on(Metadata::open(connection.clone(), &queue)).unwrap();
            let segment = block_on(metadata.segment(TAIL)).unwrap();
            object = *segment.held.object();
        }
        let permission = pool.acquire_blocking(&object, &terms).unwrap();
        pool.write_blocking(&permission, at, &[0x77; 8]).unwrap();
        let failed = block_on(producer.insert(&[2; PAYLOAD_BYTES]));
        assert!(matches!(failed, Err(Error::Protocol { .. })), "{at}: {failed:?}");
    }
}
