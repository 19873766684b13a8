//! The holes of `patronus-paper`: each attack succeeds there, and fails in `patronus`.
//!
//! An attacker makes grants by hand from keys and addresses that it was given once. Its requests
//! are those of an honest compute node.

use std::sync::Arc;
use std::thread;

use pool::scheme::Lane;
use pool::scheme::index::EntryId;
use pool::{
    EmbeddedNode, Error, Grant, GroupId, LeaseTerms, Object, Others, Permission, Pool, Right,
    Settings, schemes,
};

use verbs::Key;

use crate::bed::*;

/// Runs an attack on both schemes. It returns true if it succeeds.
fn attack_with(change: impl Fn(Settings) -> Settings, attack: impl Fn(&Bed) -> bool) {
    for scheme in [schemes::PATRONUS, schemes::PATRONUS_PAPER] {
        let mut settings = settings(scheme);
        if scheme == schemes::PATRONUS_PAPER {
            settings = change(settings);
        }
        let bed = Bed::Embedded(Arc::new(EmbeddedNode::start(&settings).unwrap()));
        assert_eq!(attack(&bed), scheme == schemes::PATRONUS_PAPER, "{scheme}");
    }
}

fn attack(attack: impl Fn(&Bed) -> bool) {
    attack_with(|settings| settings, attack);
}

/// A grant with one key for all lanes.
fn by_hand(addr: u64, len: u64, key: Key) -> Grant {
    Grant::new(addr, len, EntryId::new(0), GroupId(0), &[key])
}

/// True if the memory node's NIC executes it.
fn succeeds(result: Result<(), Error>) -> bool {
    match result {
        Ok(()) => true,
        Err(Error::Access { .. }) => false,
        Err(other) => panic!("{other:?}"),
    }
}

fn key(permission: &Permission) -> Key {
    permission.lease().grant.key(Lane(0))
}

/// An object of `bytes`, without permission.
fn object(pool: &Pool, bytes: u64, others: Others) -> Object {
    let terms = LeaseTerms::exclusive(LONG);
    let (object, first) = pool.allocate_object_blocking(bytes, others, &terms).unwrap();
    pool.revoke_blocking(&first).unwrap();
    object
}

/// Permissions of one compute node that use each window of the memory node at least once.
const MANY: usize = 100;

#[test]
fn later_tag_of_a_dead_key_opens_the_next_holders_object() {
    attack(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(THEIRS));
        let terms = LeaseTerms::exclusive(LONG);
        let mine = a.acquire_blocking(&object(&a, 64, Others::None), &terms).unwrap();
        let dead = key(&mine);
        a.revoke_blocking(&mine).unwrap();
        let victims: Vec<_> = (0..MANY)
            .map(|_| b.allocate_object_blocking(64, Others::None, &terms).unwrap().1)
            .collect();
        (1..=3).any(|more| {
            let guess = Key::new(dead.index(), dead.tag().wrapping_add(more));
            let opened = victims.iter().find(|victim| key(victim) == guess);
            let victim = opened.unwrap_or(&victims[0]);
            let grant = by_hand(victim.lease().grant.addr, 64, guess);
            succeeds(a.write_blocking(&grant, 0, &[9; 8]))
                && word(&b, victim) == 0x0909_0909_0909_0909
        })
    });
}

#[test]
fn permission_for_reading_opens_atomics() {
    attack(|bed| {
        let a = bed.connect(OURS);
        let object = object(&a, 64, Others::None);
        let reader = a.acquire_blocking(&object, &LeaseTerms::shared_read(LONG)).unwrap();
        let before = word(&a, &reader);
        let added = a.fetch_and_add_blocking(&forged(&reader), 0, 5).map(drop);
        succeeds(added) && word(&a, &reader) == before + 5
    });
}

#[test]
fn holder_writes_its_lifetime_in_front_of_its_object() {
    attack(|bed| {
        let a = bed.connect(OURS);
        let terms = LeaseTerms::exclusive(LONG);
        let (_, mine) = a.allocate_object_blocking(64, Others::None, &terms).unwrap();
        let lifetime = by_hand(mine.lease().grant.addr - 8, 8, key(&mine));
        let mut bytes = [0; 8];
        succeeds(a.write_blocking(&lifetime, 0, &1u64.to_be_bytes())) && {
            a.read_blocking(&lifetime, 0, &mut bytes).unwrap();
            // The extension by CAS compares with the lifetime that was granted.
            let left = a.extend_blocking(&mine, LONG).unwrap();
            u64::from_be_bytes(bytes) == 1 && left > LONG / 2
        }
    });
}

/// The former holder of a header shortens the lease of the next one.
#[test]
fn header_is_used_again_under_an_old_window() {
    attack_with(
        |settings| settings.with("contiguity", false),
        |bed| {
            let (a, b) = (bed.connect(OURS), bed.connect(OURS));
            let object = object(&a, 128, Others::Write);
            let terms = LeaseTerms::exclusive(LONG);
            let mine = a.acquire_blocking(&object, &terms).unwrap();
            let (old_key, lease) = (key(&mine), mine.lease());
            let remote =
                lease.header.map_or((lease.grant.addr - 8, old_key), |it| (it.addr, it.rkey));
            a.revoke_blocking(&mine).unwrap();
            let victim = b.acquire_blocking(&object, &terms).unwrap();
            let lifetime = by_hand(remote.0, 8, remote.1);
            let written = succeeds(a.write_blocking(&lifetime, 0, &[0; 8]));
            let extended = b.extend_blocking(&victim, LONG + LONG / 2);
            assert_eq!(extended.is_err(), written, "{extended:?}");
            written
        },
    );
}

/// A free ends the permission of the compute node that frees, but the memory stays in use until
/// the other permissions have ended.
#[test]
fn ended_holder_of_a_live_object_writes_under_delayed_unbinding() {
    attack(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::shared_write(LONG);
        let (object, mine) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        let victim = b.acquire_blocking(&object, &terms).unwrap();
        thread::scope(|scope| {
            let free = scope.spawn(|| a.free_object_blocking(&object));
            until(|| lease_status(&a).permissions == 1);
            assert!(b.extend_blocking(&victim, LONG + LONG / 2).is_err());
            let written = succeeds(a.write_blocking(&forged(&mine), 0, &[9; 8]));
            let seen = word(&b, &victim) == 0x0909_0909_0909_0909;
            assert_eq!(seen, written);
            b.revoke_blocking(&victim).unwrap();
            free.join().unwrap().unwrap();
            written
        })
    });
}

#[test]
fn object_of_another_compute_node_is_acquired_and_freed() {
    attack(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(None));
        let theirs = object(&a, 64, Others::None);
        match b.acquire_blocking(&theirs, &LeaseTerms::shared_write(LONG)) {
            Ok(permission) => {
                b.write_blocking(&permission, 0, &[9; 8]).unwrap();
                b.free_object_blocking(&theirs).unwrap();
                assert_no_such(a.acquire_blocking(&theirs, &LeaseTerms::exclusive(LONG)));
                true
            }
            refused => {
                assert_no_such(refused);
                assert_no_such(b.free_object_blocking(&theirs));
                a.free_object_blocking(&theirs).unwrap();
                false
            }
        }
    });
}

/// The holder writes its lifetime word itself, past the client's own check of the longest lease.
#[test]
fn lifetime_that_its_holder_writes_ends_at_the_longest_lease() {
    let most = 4 * SHORT;
    let settings = settings(schemes::PATRONUS_PAPER).with("lease_max_us", most.as_micros() as u64);
    let bed = Bed::Embedded(Arc::new(EmbeddedNode::start(&settings).unwrap()));
    check_on(bed, |bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(most);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        let header = first.lease().header.expect("the published form has headers");
        let word = by_hand(header.addr, 8, header.rkey);
        let word = word.leased(Right::Write, Grant::FOREVER);
        let known = a.fetch_and_add_blocking(&word, 0, 0).unwrap();
        let endless = 10 * LONG.as_micros() as u64;
        assert_eq!(a.compare_and_swap_blocking(&word, 0, known, endless).unwrap(), known);
        // The wait is shorter than the lifetime in the word. It is longer than the longest lease.
        let patient = LeaseTerms::exclusive(SHORT).wait(LONG);
        let second = b.acquire_blocking(&object, &patient).unwrap();
        assert_dead(&a, &forged(&first));
        b.revoke_blocking(&second).unwrap();
        a.free_object_blocking(&object).unwrap();
    });
}
