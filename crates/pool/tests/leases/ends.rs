//! The end of objects, of requests and of compute nodes; limits; grants without a lease.

use std::future::Future;
use std::sync::mpsc;
use std::task::{Context, Waker};
use std::thread;

use pool::{Error, Grant, LeaseTerms, Others};

use crate::bed::*;

#[test]
fn free_ends_the_own_permissions_and_waits_for_others() {
    each(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let read = LeaseTerms::shared_read(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Read, &read).unwrap();
        let second = b.acquire_blocking(&object, &read).unwrap();
        let (report, reports) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| report.send(a.free_object_blocking(&object)).unwrap());
            // The object is being freed once no extension is possible.
            until(|| matches!(b.extend_blocking(&second, LONG), Err(Error::NotExtendable { .. })));
            assert_no_such(b.acquire_blocking(&object, &read));
            assert_no_such(a.free_object_blocking(&object));
            b.read_blocking(&second, 0, &mut [0; 8]).unwrap();
            assert!(reports.try_recv().is_err(), "released under an open permission");
            b.revoke_blocking(&second).unwrap();
            reports.recv().unwrap().unwrap();
        });
        assert_dead(&a, &forged(&first));
        assert_dead(&b, &forged(&second));
    });
}

#[test]
fn freed_memory_is_allocated_as_zeros() {
    each(|bed| {
        let a = bed.connect(None);
        let terms = LeaseTerms::exclusive(LONG);
        // Fills the pool, so that the second round uses the same memory.
        for _ in 0..2 {
            let mut objects = Vec::new();
            loop {
                match a.allocate_object_blocking(48 << 10, Others::None, &terms) {
                    Ok((object, permission)) => {
                        let mut bytes = vec![1; 48 << 10];
                        a.read_blocking(&permission, 0, &mut bytes).unwrap();
                        assert!(bytes.iter().all(|byte| *byte == 0));
                        a.write_blocking(&permission, 0, &vec![7; 48 << 10]).unwrap();
                        objects.push(object);
                    }
                    Err(Error::OutOfMemory { .. }) => break,
                    Err(e) => panic!("{e}"),
                }
            }
            assert_eq!(objects.len(), 16);
            objects.iter().for_each(|object| a.free_object_blocking(object).unwrap());
        }
        assert_eq!(a.stats().empty, 2);
    });
}

#[test]
fn request_whose_future_is_dropped_leaves_nothing() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, first) = a.allocate_object_blocking(64, Others::Write, &terms).unwrap();
        let cx = &mut Context::from_waker(Waker::noop());
        let mut acquire = Box::pin(b.acquire(&object, &terms));
        assert!(acquire.as_mut().poll(cx).is_pending());
        until_waiting(&a, 1);
        drop(acquire);
        // The dropped request is granted, and its permission revoked.
        a.revoke_blocking(&first).unwrap();
        let third = a.acquire_blocking(&object, &terms).unwrap();
        until(|| b.stats().revocations == 1);
        a.revoke_blocking(&third).unwrap();
        a.free_object_blocking(&object).unwrap();

        let mut allocate = Box::pin(a.allocate_object(64, Others::None, &terms));
        match allocate.as_mut().poll(cx) {
            std::task::Poll::Ready(done) => a.free_object_blocking(&done.unwrap().0).unwrap(),
            std::task::Poll::Pending => drop(allocate),
        }
        until(|| a.stats().frees == 2);
    });
}

#[test]
fn departed_holder_makes_room_for_the_next() {
    each_form(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let terms = LeaseTerms::exclusive(LONG);
        let (object, _) = a.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        let (private, _) = a.allocate_object_blocking(64, Others::None, &terms).unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| b.acquire_blocking(&object, &terms).unwrap());
            until_waiting(&b, 1);
            drop(a);
            let permission = waiter.join().unwrap();
            b.write_blocking(&permission, 0, &[1]).unwrap();
        });
        assert_no_such(b.acquire_blocking(&private, &terms));
        // The last member of the domain takes the object along.
        drop(b);
        let c = bed.connect(OURS);
        until(|| c.node_status().unwrap().node.lease.expect("leases").objects == 0);
        assert_no_such(c.acquire_blocking(&object, &terms));
    });
}

#[test]
fn number_of_permissions_is_limited() {
    each_with(
        |settings| settings.with("permissions_max", 2),
        |bed| {
            let (a, b) = (bed.connect(OURS), bed.connect(OURS));
            let read = LeaseTerms::shared_read(LONG);
            let (object, first) = a.allocate_object_blocking(64, Others::Read, &read).unwrap();
            a.acquire_blocking(&object, &read).unwrap();
            let refused = a.acquire_blocking(&object, &read);
            assert!(matches!(refused, Err(Error::TooMany { limit: 2, .. })), "{refused:?}");
            // The limit is that of each compute node.
            let other = b.acquire_blocking(&object, &read).unwrap();
            a.revoke_blocking(&first).unwrap();
            a.acquire_blocking(&object, &read).unwrap();
            b.revoke_blocking(&other).unwrap();
            a.free_object_blocking(&object).unwrap();
        },
    );
}

#[test]
fn allocation_is_a_permission_without_a_lease() {
    each(|bed| {
        let (a, b) = (bed.connect(OURS), bed.connect(OURS));
        let grant = a.allocate_blocking().unwrap();
        assert_eq!((grant.until, grant.len), (Grant::FOREVER, a.chunk_bytes()));
        a.write_blocking(&grant, 0, &[7; 8]).unwrap();
        assert_dead(&b, &grant.with_connection(Default::default()));
        let refused = b.free_blocking(grant.with_connection(Default::default()));
        assert!(matches!(refused, Err(Error::NotYours { .. })), "{refused:?}");
        a.free_blocking(grant).unwrap();
        let refused = a.free_blocking(grant);
        assert!(matches!(refused, Err(Error::NotYours { .. })), "{refused:?}");
        assert_dead(&a, &grant);
    });
}
