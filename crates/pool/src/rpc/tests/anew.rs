//! Management connections that break, and are made anew.

use std::time::Duration;

use super::*;

fn make_anew(node: &mut Node<SoftNic>, hand: &Hand) {
    hand.qp.modify(fabric::QpChange::Reset).unwrap();
    let peers = node.reset_management(hand.id).unwrap();
    hand.qp.connect(Qpn::new(peers.expect("nothing is in flight")[0])).unwrap();
    hand.completions();
}

#[test]
fn a_connection_that_broke_is_not_open_until_it_is_made_anew() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 4);
        let (bad, good) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
        let is_open = |node: &Node<SoftNic>, hand: &Hand| node.management_is_open(hand.id).unwrap();
        assert!(is_open(&node, &bad) && is_open(&node, &good), "{scheme}");
        bad.send(&[1; REQUEST_BYTES + 1]);
        assert!(!is_open(&node, &bad), "{scheme}: the CPU has not heard of it");
        node.turn().unwrap();
        assert!(!is_open(&node, &bad) && is_open(&node, &good), "{scheme}");
        make_anew(&mut node, &bad);
        assert!(is_open(&node, &bad) && is_open(&node, &good), "{scheme}");
    }
}

/// The memory node's CPU may sleep, and nothing else may ever come.
#[test]
fn the_cpu_is_woken_for_grants_that_did_not_arrive() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 8);
        let hand = Hand::join(&nic, &mut node, 1);
        // It takes no reply.
        hand.send(&Request { number: 77, ask: Ask::Allocate { group: 0, order: 0 } }.to_bytes());
        while node.turn().unwrap() {}
        // What was posted for its requests is flushed now, so that nothing is when it comes back.
        hand.send(&[1; REQUEST_BYTES + 1]);
        while node.turn().unwrap() {}
        let events = node.events().unwrap();
        assert!(!events.wait(Duration::ZERO).unwrap(), "{scheme}: it may sleep");
        make_anew(&mut node, &hand);
        assert!(events.wait(Duration::ZERO).unwrap(), "{scheme}: it sleeps on");
        while node.turn().unwrap() {}
        assert_eq!(node.status().unwrap().free, 8, "{scheme}");
    }
}
