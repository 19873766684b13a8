//! Domains, rights, conflicts, and the order of waiting requests.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use pool::join::join;
use pool::{Error, LeaseTerms, MultiPool, Object, Others, Placement, Pool, Right};
use verbs::executor::block_on;

use crate::bed::*;

#[test]
fn object_is_shared_within_its_domain() {
    each(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(100, Others::Write, &terms).unwrap();
        assert_eq!(object.len, 100);
        let object = Object::from_bytes(&object.to_bytes()).unwrap();
        let mut bytes = [1; 100];
        a.read_blocking(&first, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 100]);
        a.write_blocking(&first, 0, &7u64.to_be_bytes()).unwrap();
        a.revoke_blocking(&first).unwrap();

        let reader = b.acquire_blocking(&object, &LeaseTerms::shared_read(LONG)).unwrap();
        assert_eq!(word(&b, &reader), 7);
        let refused = b.write_blocking(&reader, 0, &[1]);
        assert!(matches!(refused, Err(Error::NotPermitted { .. })), "{refused:?}");
        // The NIC refuses what the library would not post.
        let refused = b.write_blocking(&forged(&reader), 0, &[1]);
        assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
        let refused = b.fetch_and_add_blocking(&forged(&reader), 0, 1);
        assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
        b.revoke_blocking(&reader).unwrap();

        let writers = [&a, &b].map(|pool| {
            let terms = LeaseTerms::shared_write(LONG);
            (pool, pool.acquire_blocking(&object, &terms).unwrap())
        });
        for (pool, writer) in &writers {
            pool.fetch_and_add_blocking(writer, 0, 5).unwrap();
        }
        assert_eq!(word(&a, &writers[0].1), 17);
        assert_dead(&b, &forged(&writers[0].1));
        writers.iter().for_each(|(pool, writer)| pool.revoke_blocking(writer).unwrap());
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn right_of_others_bounds_what_they_acquire() {
    each(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let read = LeaseTerms::shared_read(LONG);
        let write = LeaseTerms::shared_write(LONG);
        for others in [Others::None, Others::Read, Others::Write, Others::Own] {
            let (object, first) = a.allocate_object_blocking(64, others, &read).unwrap();
            for (terms, least) in [(&read, Others::Read), (&write, Others::Write)] {
                match others >= least {
                    true if terms.right == Right::Read => {
                        b.acquire_blocking(&object, terms).unwrap();
                    }
                    true => {
                        let permission = b.acquire_blocking(&object, terms).unwrap();
                        b.write_blocking(&permission, 0, &[1]).unwrap();
                    }
                    false => assert_no_such(b.acquire_blocking(&object, terms)),
                }
            }
            a.revoke_blocking(&first).unwrap();
            if others == Others::Own {
                b.free_object_blocking(&object).unwrap();
            } else {
                assert_no_such(b.free_object_blocking(&object));
            }
        }
    });
}

#[test]
fn object_that_may_not_be_acquired_does_not_exist() {
    each(|bed| {
        let (a, b, c) = (bed.connect(OURS), bed.connect(THEIRS), bed.connect(None));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        a.revoke_blocking(&first).unwrap();
        for other in [&b, &c] {
            assert_no_such(other.acquire_blocking(&object, &terms));
            assert_no_such(other.free_object_blocking(&object));
        }
        let unknown = Object { entry: u32::MAX, ..object };
        let earlier = Object { incarnation: object.incarnation ^ 1, ..object };
        for other in [stale(object), unknown, earlier] {
            assert_no_such(a.acquire_blocking(&other, &terms));
            assert_no_such(a.free_object_blocking(&other));
        }
        assert_no_such(a.acquire_blocking(&object, &terms.clone().range(60..65)));
        a.free_object_blocking(&object).unwrap();
        assert_no_such(a.acquire_blocking(&object, &terms));
        assert_no_such(a.free_object_blocking(&object));

        let refused = c.allocate_object_blocking(64, Others::Read, &terms);
        assert!(refused.is_err(), "without a domain there are no others");
    });
}

#[test]
fn conflict_is_by_overlap() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let now = |terms: LeaseTerms| terms.wait(Duration::ZERO);
        let whole = now(LeaseTerms::exclusive(LONG));
        let (object, first) = a.allocate_object_blocking(1024, Others::Write, &whole).unwrap();
        a.write_blocking(&first, 512, b"second half").unwrap();
        let busy = |pool: &Pool, terms: &LeaseTerms| {
            let refused = pool.acquire_blocking(&object, terms);
            assert!(matches!(refused, Err(Error::Busy { .. })), "{refused:?}");
        };
        busy(&b, &whole);
        busy(&b, &now(LeaseTerms::shared_read(LONG)));
        a.revoke_blocking(&first).unwrap();

        let low = a.acquire_blocking(&object, &whole.clone().range(0..512)).unwrap();
        let high = b.acquire_blocking(&object, &whole.clone().range(512..1024)).unwrap();
        let mut text = [0; 11];
        b.read_blocking(&high, 0, &mut text).unwrap();
        assert_eq!(&text, b"second half");
        let refused = a.write_blocking(&low, 505, &[1; 8]);
        assert!(matches!(refused, Err(Error::OutOfRange { grant_len: 512, .. })), "{refused:?}");
        busy(&a, &now(LeaseTerms::shared_read(LONG)).range(511..513));
        a.revoke_blocking(&low).unwrap();
        b.revoke_blocking(&high).unwrap();

        // Permissions of one compute node conflict, too.
        let shared = a.acquire_blocking(&object, &now(LeaseTerms::shared_read(LONG))).unwrap();
        busy(&a, &whole);
        let beside = a.acquire_blocking(&object, &now(LeaseTerms::shared_write(LONG))).unwrap();
        a.revoke_blocking(&shared).unwrap();
        a.revoke_blocking(&beside).unwrap();
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn waiting_requests_are_granted_first_come_first_served() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        let (report, reports) = mpsc::channel();
        thread::scope(|scope| {
            for number in 0..4u64 {
                let (pool, terms, report) = (&b, &terms, report.clone());
                scope.spawn(move || {
                    let permission = pool.acquire_blocking(&object, terms).unwrap();
                    pool.write_blocking(&permission, 0, &number.to_be_bytes()).unwrap();
                    report.send((number, permission)).unwrap();
                });
                until_waiting(&a, number + 1);
            }
            let mut holder = (&a, first);
            for number in 0..4 {
                assert!(reports.try_recv().is_err(), "granted beside another permission");
                holder.0.revoke_blocking(&holder.1).unwrap();
                let (granted, permission) = reports.recv().unwrap();
                assert_eq!((granted, word(&b, &permission)), (number, number));
                holder = (&b, permission);
            }
            holder.0.revoke_blocking(&holder.1).unwrap();
        });
        a.free_object_blocking(&object).unwrap();
    });
}

/// A compute node sends no more waiting requests than the memory node admits.
#[test]
fn requests_beyond_the_waiting_ones_wait_at_home() {
    let credits = |settings: pool::Settings| pool::Settings { credits: 4, ..settings };
    each_with(credits, |bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        thread::scope(|scope| {
            let waiters = scope.spawn(|| {
                let use_it = async |_| b.revoke(&b.acquire(&object, &terms).await?).await;
                block_on(join((0..8).map(use_it), 8))
            });
            until_waiting(&a, 2);
            a.revoke_blocking(&first).unwrap();
            let results = waiters.join().unwrap();
            assert!(results.iter().all(Result::is_ok), "{results:?}");
        });
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn wait_has_a_limit() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        let before = Instant::now();
        let refused = b.acquire_blocking(&object, &terms.clone().wait(SHORT));
        assert!(matches!(refused, Err(Error::Busy { .. })), "{refused:?}");
        assert!(before.elapsed() >= SHORT);
        // The holder's lease goes on.
        a.write_blocking(&first, 0, &[1]).unwrap();
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn exclusive_permissions_exclude_each_other() {
    const ROUNDS: u64 = 50;
    each_form(|bed| {
        let pools = [bed.connect(OURS), bed.connect(OURS)];
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = pools[0].allocate_object_blocking(64, Others::Write, &terms).unwrap();
        pools[0].revoke_blocking(&first).unwrap();
        // Holders at this moment. A lost update alone would need two READs before either WRITE.
        let holders = AtomicUsize::new(0);
        thread::scope(|scope| {
            for pool in &pools {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        let permission = pool.acquire_blocking(&object, &terms).unwrap();
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                        let next = word(pool, &permission) + 1;
                        thread::yield_now();
                        pool.write_blocking(&permission, 0, &next.to_be_bytes()).unwrap();
                        assert_eq!(holders.fetch_sub(1, Ordering::SeqCst), 1, "two holders");
                        pool.revoke_blocking(&permission).unwrap();
                    }
                });
            }
        });
        let last = pools[1].acquire_blocking(&object, &terms).unwrap();
        assert_eq!(word(&pools[1], &last), 2 * ROUNDS);
        pools[1].revoke_blocking(&last).unwrap();
        pools[0].free_object_blocking(&object).unwrap();
    });
}

#[test]
fn deadlock_ends_with_the_leases() {
    each_form(|bed| {
        let pools = [bed.connect(OURS), bed.connect(OURS)];
        let terms = LeaseTerms::exclusive(SHORT);
        let held = [&pools[0], &pools[1]]
            .map(|pool| pool.allocate_object_blocking(64, Others::Write, &terms).unwrap());
        thread::scope(|scope| {
            for (pool, (object, _)) in pools.iter().zip([&held[1], &held[0]]) {
                let terms = LeaseTerms::exclusive(SHORT).wait(LONG);
                scope.spawn(move || {
                    let permission = pool.acquire_blocking(object, &terms).unwrap();
                    pool.revoke_blocking(&permission).unwrap();
                });
            }
        });
        for (pool, (object, first)) in pools.iter().zip(&held) {
            let refused = pool.read_blocking(first, 0, &mut [0; 8]);
            assert!(matches!(refused, Err(Error::Expired { .. })), "{refused:?}");
            pool.free_object_blocking(object).unwrap();
        }
    });
}

#[test]
fn objects_of_several_memory_nodes_go_to_their_own() {
    each(|bed| {
        each(|other| {
            let connect = || {
                let pools = vec![bed.connect(OURS), other.connect(OURS)];
                MultiPool::over(pools, Placement::RoundRobin).unwrap()
            };
            let (a, b) = (connect(), connect());
            let terms = LeaseTerms::exclusive(LONG);
            for _ in 0..2 {
                let (object, first) = a.allocate_object_blocking(64, Others::Own, &terms).unwrap();
                a.write_blocking(&a.place(&first), 0, &[object.node as u8]).unwrap();
                a.extend_blocking(&first, LONG).unwrap();
                a.renew_blocking(&first).unwrap();
                a.revoke_blocking(&first).unwrap();
                let second = b.acquire_blocking(&object, &terms).unwrap();
                let mut byte = [9];
                b.read_blocking(&b.place(&second), 0, &mut byte).unwrap();
                assert_eq!(byte, [object.node as u8]);
                b.free_object_blocking(&object).unwrap();
            }
        });
    });
}
