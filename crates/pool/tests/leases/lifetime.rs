//! Extension, expiry, renewal and revocation.

use std::pin::Pin;
use std::thread;
use std::time::Duration;

use pool::join::join;
use pool::{Error, LeaseTerms, Others};
use verbs::executor::block_on;

use crate::bed::*;

#[test]
fn extension_moves_the_end_of_a_lease() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(SHORT);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        let left = a.extend_blocking(&first, LONG).unwrap();
        assert!(left >= LONG - SHORT, "{left:?}");
        assert!(a.left(&first) <= left);
        // The memory node has found the extension where the lease would have ended.
        let patient = LeaseTerms::exclusive(SHORT).wait(3 * SHORT);
        let refused = b.acquire_blocking(&object, &patient);
        assert!(matches!(refused, Err(Error::Busy { .. })), "{refused:?}");
        a.write_blocking(&first, 0, &[1]).unwrap();
        assert_eq!(a.stats().extensions, 1);
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn lease_is_not_extended_against_a_waiter() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(10 * SHORT);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| b.acquire_blocking(&object, &terms).unwrap());
            until_waiting(&a, 1);
            for refused in [a.extend_blocking(&first, LONG), a.renew_blocking(&first)] {
                match refused {
                    Err(Error::NotExtendable { left }) => assert!(left <= 10 * SHORT, "{left:?}"),
                    other => panic!("{other:?}"),
                }
            }
            // The keys of the first permission are dead when the second is granted.
            let second = waiter.join().unwrap();
            b.write_blocking(&second, 0, &[1]).unwrap();
            assert_dead(&a, &forged(&first));
            b.revoke_blocking(&second).unwrap();
        });
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn longest_lease_includes_its_extensions() {
    let most = 4 * SHORT;
    let short = |settings: pool::Settings| settings.with("lease_max_us", most.as_micros() as u64);
    each_with(short, |bed| {
        let a = bed.connect(OURS);
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::None, &terms).unwrap();
        assert!(a.left(&first) <= most, "the lease is within the bounds");
        let refused = a.extend_blocking(&first, LONG);
        assert!(matches!(refused, Err(Error::NotExtendable { .. })), "{refused:?}");
        until_expired(&a, &first);
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn expired_permission_is_refused_here_and_by_the_nic() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(SHORT);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        a.write_blocking(&first, 0, &7u64.to_be_bytes()).unwrap();
        until_expired(&a, &first);
        let before = a.stats();
        let refused = [
            a.read_blocking(&first, 0, &mut [0; 8]),
            a.write_blocking(&first, 0, &[1; 8]),
            a.fetch_and_add_blocking(&first, 0, 1).map(drop),
            a.extend_blocking(&first, LONG).map(drop),
            a.renew_blocking(&first).map(drop),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(Error::Expired { .. })), "{refused:?}");
        }
        let after = a.stats();
        assert_eq!((after.reads, after.writes, after.atomics), (0, before.writes, 0));
        assert_eq!(after.expiries, before.expiries + 5);

        // Granted once the memory node has ended the lease, too.
        let second = b.acquire_blocking(&object, &LeaseTerms::exclusive(LONG)).unwrap();
        let refused = a.write_blocking(&forged(&first), 0, &[9; 8]);
        assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
        assert_eq!(word(&b, &second), 7);
        b.revoke_blocking(&second).unwrap();
        a.revoke_blocking(&first).unwrap();
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn renewal_changes_the_keys_and_keeps_the_object() {
    each_form(|bed| {
        let a = bed.connect(OURS);
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::None, &terms).unwrap();
        a.write_blocking(&first, 0, &7u64.to_be_bytes()).unwrap();
        let before = forged(&first);
        let left = a.renew_blocking(&first).unwrap();
        assert!(left > LONG / 2 && left <= LONG, "{left:?}");
        assert_dead(&a, &before);
        assert_eq!(word(&a, &first), 7);
        assert_eq!(a.stats().renewals, 1);
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn revoked_permission_is_dead_and_may_be_revoked_again() {
    each_form(|bed| {
        let a = bed.connect(OURS);
        for lease in [LONG, Duration::from_micros(1)] {
            let terms = LeaseTerms::exclusive(lease);
            let (object, first) = a.allocate_object_blocking(64, Others::None, &terms).unwrap();
            let clone = first.clone();
            a.revoke_blocking(&first).unwrap();
            a.revoke_blocking(&clone).unwrap();
            assert_dead(&a, &forged(&first));
            let refused = a.read_blocking(&clone, 0, &mut [0; 8]);
            assert!(matches!(refused, Err(Error::Expired { .. })), "{refused:?}");
            a.free_object_blocking(&object).unwrap();
            a.revoke_blocking(&first).unwrap();
        }
    });
}

type Change<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// Otherwise a revocation would end the number before the renewal, and leave the new keys alive.
#[test]
fn renewals_and_revocations_of_a_permission_follow_one_another() {
    each(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        let renew = || -> Change<'_> { Box::pin(async { a.renew(&first).await.map(drop) }) };
        let revoke = || -> Change<'_> { Box::pin(async { a.revoke(&first).await }) };

        let results = block_on(join([renew(), renew()], 2));
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        a.write_blocking(&first, 0, &[1]).unwrap();

        let results = block_on(join([renew(), revoke()], 2));
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        assert!(a.left(&first).is_zero(), "a revoked permission was renewed");
        let second = b.acquire_blocking(&object, &terms.clone().wait(Duration::ZERO)).unwrap();
        b.revoke_blocking(&second).unwrap();
        a.free_object_blocking(&object).unwrap();
    });
}

#[test]
fn permission_of_another_connection_is_stale() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        let refused = [
            b.extend_blocking(&first, LONG).map(drop),
            b.renew_blocking(&first).map(drop),
            b.revoke_blocking(&first),
            b.read_blocking(&first, 0, &mut [0; 8]),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(Error::Stale { .. })), "{refused:?}");
        }
        a.write_blocking(&first, 0, &[1]).unwrap();
        a.free_object_blocking(&object).unwrap();
    });
}
