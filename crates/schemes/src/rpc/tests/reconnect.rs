//! Tests of management connections that fail and are re-established.

use std::time::Duration;

use super::*;

fn make_anew(node: &mut Node<SoftNic>, hand: &Hand) {
    hand.qp.modify(verbs::QpChange::Reset).unwrap();
    let peers = node.reset_management(hand.id).unwrap();
    hand.qp.connect(Qpn::new(peers.expect("nothing is in flight")[0])).unwrap();
    hand.completions();
}

#[test]
fn broken_management_is_closed_until_reset() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 4);
        let (bad, good) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
        let is_open = |node: &Node<SoftNic>, hand: &Hand| node.management_is_open(hand.id).unwrap();
        assert!(is_open(&node, &bad) && is_open(&node, &good), "{scheme}");
        bad.send(&[1; REQUEST_BYTES + 1]);
        assert!(!is_open(&node, &bad), "{scheme}: the CPU has not seen the failure");
        node.poll().unwrap();
        assert!(!is_open(&node, &bad) && is_open(&node, &good), "{scheme}");
        make_anew(&mut node, &bad);
        assert!(is_open(&node, &bad) && is_open(&node, &good), "{scheme}");
    }
}

/// The memory node's CPU may be asleep, and no other event may ever arrive.
#[test]
fn reset_wakes_the_cpu_for_undelivered_grants() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 8);
        let hand = Hand::join(&nic, &mut node, 1);
        // The compute node posts no receive for the reply.
        hand.send(
            &Request { number: 77, ask: Ask::Allocate { group: 0, order: CHUNK_ORDER } }.to_bytes(),
        );
        while node.poll().unwrap() {}
        // The receives are flushed now, so that no completion is left for the reset.
        hand.send(&[1; REQUEST_BYTES + 1]);
        while node.poll().unwrap() {}
        let events = node.cpu().events.unwrap();
        assert!(!events.wait(Duration::ZERO).unwrap(), "{scheme}: an event is pending");
        make_anew(&mut node, &hand);
        assert!(events.wait(Duration::ZERO).unwrap(), "{scheme}: no event arrived");
        while node.poll().unwrap() {}
        assert_eq!(node.status().unwrap().free, 8, "{scheme}");
    }
}
