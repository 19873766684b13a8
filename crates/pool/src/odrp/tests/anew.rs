//! What the memory node needs, what it says of its compute nodes, and connections that are made anew.

use fabric::{Caps, PathMtu, Psn};

use super::*;
use crate::odrp::node::check_caps;
use crate::remote::{RoceEnd, Route, Start};
use crate::scheme::{GroupId, Lane, Part};

#[test]
fn a_nic_that_lacks_anything_is_refused_and_what_it_lacks_is_named() {
    let whole = SoftNic::inline().caps();
    assert!(check_caps(&whole).is_ok());
    for (caps, named) in [
        (Caps { chains: false, ..whole.clone() }, "chains: false"),
        (Caps { big_endian_atomics: false, ..whole.clone() }, "big-endian atomics: false"),
    ] {
        let why = check_caps(&caps).unwrap_err().to_string();
        assert!(why.contains(named), "{why}");
    }
}

#[test]
fn a_connection_that_broke_is_not_open_until_it_is_made_anew() {
    let (nic, mut node) = start(4);
    let (bad, good) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
    let open =
        |node: &Node<SoftNic>| [&bad, &good].map(|hand| node.management_is_open(hand.id).unwrap());
    assert_eq!(open(&node), [true, true]);
    // A longer one than any request breaks the QP that it comes to.
    let ended = bad.send(&[0; 200]);
    assert!(ended.iter().any(|status| *status != Status::Success), "{ended:?}");
    assert_eq!(open(&node), [false, true]);
    node.turn().unwrap();
    assert_eq!(open(&node), [false, true]);
    bad.reset(&mut node);
    assert_eq!(open(&node), [true, true]);
}

#[test]
fn each_lane_is_made_anew_by_itself_and_begins_with_what_was_told_last() {
    let (nic, mut node) = start(4);
    let id = Hand::join(&nic, &mut node, 1).id;
    let lanes: Vec<u32> =
        node.clients[&id].access[0].iter().map(|(qp, _)| qp.qpn().raw()).collect();
    for (lane, qpn) in (0..).zip(&lanes) {
        assert_eq!(node.reset_access(id, GroupId(0), Lane(lane)).unwrap(), *qpn);
    }
    assert!(node.reset_access(id, GroupId(0), Lane(lanes.len() as u8)).is_err());
    assert!(node.reset_access(id, GroupId(1), Lane(0)).is_err());
    let end = RoceEnd { port: 4791, mtu: PathMtu::Mtu1024 };
    let ip = |last| std::net::IpAddr::from([10, 0, 0, last]);
    let route = Route::between(ip(1), end, ip(2), end);
    let at = |psn| route.peer(Qpn::new(7), Start::Psn(Psn::new(psn)));
    let c = node.clients.get_mut(&id).unwrap();
    (c.reads.front_peer, c.writes.front_peer) = (at(1), at(1));
    c.access[0].iter_mut().for_each(|(_, lane)| *lane = at(1));
    let begin = |node: &Node<SoftNic>| {
        let c = &node.clients[&id];
        [c.reads.front_peer, c.writes.front_peer, c.access[0][0].1, c.access[0][1].1]
    };
    node.renew(id, Part::Access(GroupId(0), Lane(1)), Start::Psn(Psn::new(2)));
    assert_eq!(begin(&node), [at(1), at(1), at(1), at(2)]);
    node.renew(id, Part::Management, Start::Psn(Psn::new(3)));
    assert_eq!(begin(&node), [at(3), at(3), at(1), at(2)]);
}

#[test]
fn the_table_of_a_compute_node_is_shown_until_it_is_taken_back() {
    let (nic, mut node) = start(4);
    let ids = [1, 2].map(|id| Hand::join(&nic, &mut node, id).id);
    let shown = |node: &Node<SoftNic>| -> Vec<ClientId> {
        node.tables().iter().map(|(id, _)| *id).collect()
    };
    assert_eq!(shown(&node), ids);
    node.retire(ids[0]).unwrap();
    while !node.is_retired(ids[0]) {
        node.turn().unwrap();
    }
    assert_eq!(shown(&node), ids[1..]);
}
