//! Scheme `unprotected`: objects without permissions.

use std::sync::Arc;
use std::time::Duration;

use pool::{EmbeddedNode, Error, LeaseTerms, Object, Others, schemes};

use crate::bed::*;

fn bed() -> Bed {
    Bed::Embedded(Arc::new(EmbeddedNode::start(&settings(schemes::UNPROTECTED)).unwrap()))
}

#[test]
fn only_allocations_and_frees_are_requests() {
    check_on(bed(), |bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(None));
        let terms = LeaseTerms::exclusive(SHORT);
        let mut objects = Vec::new();
        // Sizes of slots and of blocks, whose offsets are different multiples of 16.
        for bytes in [1, 65, 100, 1000, 20_000, 100_000] {
            let (object, mine) = a.allocate_object_blocking(bytes, Others::None, &terms).unwrap();
            a.write_blocking(&mine, bytes - 1, &[7]).unwrap();
            objects.push(object);
        }
        let (before, bound) = (b.node_status().unwrap().node, lease_status(&b));
        for object in &objects {
            let object = Object::from_bytes(&object.to_bytes()).unwrap();
            // Beside the exclusive permission of the other compute node.
            let theirs = b.acquire_blocking(&object, &terms).unwrap();
            let last =
                b.acquire_blocking(&object, &terms.clone().range(object.len - 1..object.len));
            let mut byte = [0];
            b.read_blocking(&last.unwrap(), 0, &mut byte).unwrap();
            assert_eq!(byte, [7]);
            assert!(b.extend_blocking(&theirs, LONG).unwrap() > LONG);
            assert!(b.renew_blocking(&theirs).unwrap() > LONG);
            b.revoke_blocking(&theirs).unwrap();
            let refused = b.read_blocking(&theirs, 0, &mut byte);
            assert!(matches!(refused, Err(Error::Expired { .. })), "{refused:?}");
            let refused = b.extend_blocking(&theirs, Duration::ZERO);
            assert!(matches!(refused, Err(Error::Expired { .. })), "{refused:?}");
        }
        let after = lease_status(&b);
        assert_eq!(after, bound, "an acquisition was a request");
        assert_eq!((after.binds, after.permissions, after.grants), (0, 0, objects.len() as u64));
        assert_eq!(before.allocations_cpu, objects.len() as u64);
        objects.iter().for_each(|object| b.free_object_blocking(object).unwrap());
    });
}

#[test]
fn freed_object_is_cleared_and_its_name_is_not_freed_again() {
    check_on(bed(), |bed| {
        let a = bed.connect(None);
        let terms = LeaseTerms::exclusive(SHORT);
        let (object, mine) = a.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        a.write_blocking(&mine, 0, &[9; 64]).unwrap();
        assert_no_such(a.acquire_blocking(&object, &terms.clone().range(60..65)));
        a.free_object_blocking(&object).unwrap();
        assert_no_such(a.free_object_blocking(&object));
        let (_, next) = a.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        assert_eq!(word(&a, &next), 0);
        // Nothing keeps the former holder out.
        a.write_blocking(&mine, 0, &[9; 8]).unwrap();
        assert_eq!(word(&a, &next), 0x0909_0909_0909_0909);
    });
}

#[test]
fn departed_compute_node_leaves_no_objects() {
    check_on(bed(), |bed| {
        let (a, b) = (bed.connect(None), bed.connect(None));
        let terms = LeaseTerms::exclusive(SHORT);
        a.allocate_object_blocking(64, Others::None, &terms).unwrap();
        a.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        a.allocate_blocking().unwrap();
        assert_eq!(lease_status(&b).objects, 3);
        drop(a);
        until(|| lease_status(&b).objects == 0);
    });
}
