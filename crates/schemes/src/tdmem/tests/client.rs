//! The client with its memory node: lost connections, tiers, pending operations.

use std::pin::pin;

use parking_lot::Mutex;

use super::member::*;
use super::*;
use crate::tdmem::{ClientOptions, Node, TierSizes};
use scheme::{ClientScheme, Error, GroupId, NodeScheme, PageAccess};

#[test]
fn interrupted_store_is_executed_or_not() {
    // The WQEs of a STORE: the page, the command, and the READ of the answer.
    for (wqes, old) in (0..=3).flat_map(|wqes| [(wqes, 0u8), (wqes, 1)]) {
        let (inline, nic) = stepped();
        let settings = settings(3);
        let node = Arc::new(Mutex::new(Node::new(nic.clone(), settings.clone()).unwrap()));
        let member = Member::join(&nic, &node, &settings, 1);
        let grant = member.allocate();
        if old > 0 {
            let mut store = pin!(member.client.write_page(&grant, &[7; PAGE_BYTES]));
            begin(store.as_mut());
            assert_eq!(step(&inline, 100), 3);
            now(store).unwrap();
        }
        if wqes == 3 {
            // The answer has arrived: the request succeeds although the QP is reset then.
            let mut store = pin!(member.client.write_page(&grant, &[8; PAGE_BYTES]));
            begin(store.as_mut());
            assert_eq!(step(&inline, wqes), wqes);
            now(store).unwrap();
            member.client.reset().unwrap();
        } else {
            let store = member.client.write_page(&grant, &[8; PAGE_BYTES]);
            interrupted(&inline, &member, wqes, store);
        }
        let refused = member.read(&grant);
        assert!(matches!(refused, Err(Error::ManagementBroken { .. })), "{refused:?}");
        member.reconnect();
        let expected = if wqes >= 2 { 8 } else { 7 * old };
        let mut content = [0; PAGE_BYTES];
        drive(&inline, pin!(member.client.settle())).unwrap();
        drive(&inline, pin!(member.client.read_page(&grant, &mut content))).unwrap();
        assert_eq!(content, [expected; PAGE_BYTES], "{wqes} WQEs, {old} pages before");
        node.lock().audit().unwrap();
        let used = u64::from(old > 0 || wqes >= 2);
        assert_eq!(node.lock().status().unwrap().free, 3 - used);
        drive(&inline, pin!(member.client.free(&grant))).unwrap();
        assert_eq!(node.lock().status().unwrap().free, 3);
    }
}

#[test]
fn interrupted_free_can_be_repeated() {
    for wqes in 0..=1 {
        let (inline, nic) = stepped();
        let settings = settings(3);
        let node = Arc::new(Mutex::new(Node::new(nic.clone(), settings.clone()).unwrap()));
        let member = Member::join(&nic, &node, &settings, 1);
        let grant = member.allocate();
        drive(&inline, pin!(member.client.write_page(&grant, &[7; PAGE_BYTES]))).unwrap();
        {
            let mut free = pin!(member.client.free(&grant));
            begin(free.as_mut());
            assert_eq!(step(&inline, wqes), wqes);
            // Dropped: nobody learns the result.
        }
        member.reconnect();
        let mut content = [1; PAGE_BYTES];
        drive(&inline, pin!(member.client.read_page(&grant, &mut content))).unwrap();
        assert_eq!(content, [7 * (1 - wqes as u8); PAGE_BYTES], "{wqes} WQEs");
        drive(&inline, pin!(member.client.free(&grant))).unwrap();
        assert!(matches!(member.free(&grant), Err(Error::NotYours { .. })));
        assert_eq!(node.lock().status().unwrap().free, 3);
        node.lock().audit().unwrap();
    }
}

/// Runs a future to its end; the NIC executes WQEs between its polls.
fn drive<T>(
    nic: &rnic::port::inline::InlineNic,
    mut future: std::pin::Pin<&mut impl std::future::Future<Output = T>>,
) -> T {
    let cx = &mut std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        if let std::task::Poll::Ready(value) = future.as_mut().poll(cx) {
            return value;
        }
        if step(nic, 100) == 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn tiers_fill_in_order_and_fall_back() {
    let settings = settings(4).with("tiers", TierSizes { fast: 8192, dram: None });
    let (nic, node) = start(&settings);
    let own = ClientOptions { local_bytes: 3 * 4096, ..ClientOptions::default() };
    let member = Member::join_with(&nic, &node, &settings, 1, &own).unwrap();
    let stores = || member.client.counters().into_iter().map(|(_, n)| n).collect::<Vec<_>>();
    let grants: Vec<_> = (0..7).map(|_| member.allocate()).collect();
    assert!(matches!(now(member.client.allocate(GroupId(0))), Err(Error::OutOfMemory { .. })));
    for (i, grant) in (1..).zip(&grants) {
        member.write(grant, i).unwrap();
        let i = u64::from(i);
        let fast = i.saturating_sub(3).min(2);
        assert_eq!(stores(), [i.min(3), fast, i.saturating_sub(5)]);
    }
    for (i, grant) in (1..).zip(&grants) {
        assert_eq!(member.read(grant).unwrap(), i);
    }
    // Everything is full: each page is overwritten where it is.
    for (i, grant) in (11..).zip(&grants) {
        member.write(grant, i).unwrap();
        assert_eq!(member.read(grant).unwrap(), i);
    }
    // A page moves to the local tier as soon as that has room, and its old place becomes free.
    member.free(&grants[0]).unwrap();
    member.write(&grants[6], 99).unwrap();
    assert_eq!(member.read(&grants[6]).unwrap(), 99);
    assert_eq!(node.lock().status().unwrap().free, 1);
    member.write(&grants[1], 98).unwrap();
    assert_eq!(member.read(&grants[1]).unwrap(), 98);
    grants[1..].iter().for_each(|grant| member.free(grant).unwrap());
    assert_eq!(node.lock().status().unwrap().free, 4);
    node.lock().audit().unwrap();
}

#[test]
fn content_never_returns_to_its_old_place() {
    let settings = settings(16);
    let (nic, node) = start(&settings);
    let member = Member::join(&nic, &node, &settings, 1);
    let grant = member.allocate();
    let place = || {
        let node = node.lock();
        (0..16).find(|page| node.tables().owner(*page) != 0)
    };
    let mut last = None;
    for value in 0..200 {
        member.write(&grant, value).unwrap();
        assert_ne!(place(), last, "write {value}");
        last = place();
        assert_eq!(node.lock().status().unwrap().free, 15);
    }
}

#[test]
fn requests_of_several_threads_match_their_pages() {
    let settings = settings(64);
    let (nic, node) = start(&settings);
    let member = Member::join(&nic, &node, &settings, 1);
    let shared = member.allocate();
    member.write(&shared, 1).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let (member, shared) = (&member, &shared);
            scope.spawn(move || {
                let own = member.allocate();
                for round in 0..500u32 {
                    let value = thread << 6 | (round % 60) as u8;
                    member.write(&own, value).unwrap();
                    assert_eq!(member.read(&own).unwrap(), value);
                    // A page that all write is never torn, and never lost.
                    member.write(shared, value).unwrap();
                    member.read(shared).unwrap();
                }
                member.free(&own).unwrap();
            });
        }
    });
    assert_eq!(node.lock().status().unwrap().free, 63);
    node.lock().audit().unwrap();
}
