//! Required capabilities of the NIC, the tables shown to checkers, and re-established connections.

use scheme::route::{RoceEnd, Route, Start};
use scheme::{GroupId, Lane, QpSet};
use verbs::{Caps, PathMtu, Psn};

use super::*;

#[test]
fn nic_that_lacks_a_capability_is_rejected_by_name() {
    let whole = SoftNic::inline().caps();
    assert!(super::super::ODRP.check_caps(&whole).is_ok());
    for (caps, named) in [
        (Caps { chains: false, ..whole.clone() }, "WAIT and SEND_EN"),
        (Caps { big_endian_atomics: false, ..whole.clone() }, "big-endian atomics"),
    ] {
        let why = super::super::ODRP.check_caps(&caps).unwrap_err().to_string();
        assert!(why.contains(named), "{why}");
    }
}

#[test]
fn broken_connection_is_not_open_until_reset() {
    let (nic, mut node) = start(4);
    let (bad, good) = (RawClient::join(&nic, &mut node, 1), RawClient::join(&nic, &mut node, 2));
    let open = |node: &Node<SoftNic>| {
        [&bad, &good].map(|client| node.management_is_open(client.id).unwrap())
    };
    assert_eq!(open(&node), [true, true]);
    // A request longer than any valid one breaks the QP that receives it.
    let ended = bad.send(&[0; 200]);
    assert!(ended.iter().any(|status| *status != Status::Success), "{ended:?}");
    assert_eq!(open(&node), [false, true]);
    node.poll().unwrap();
    assert_eq!(open(&node), [false, true]);
    bad.reset(&mut node);
    assert_eq!(open(&node), [true, true]);
}

#[test]
fn lanes_reset_singly_and_start_at_the_last_psn() {
    let (nic, mut node) = start(4);
    let id = RawClient::join(&nic, &mut node, 1).id;
    let lanes: Vec<u32> =
        node.clients[&id].access.0[0].iter().map(|lane| lane.qp.qpn().raw()).collect();
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
    c.access.0[0].iter_mut().for_each(|lane| lane.peer = at(1));
    let begin = |node: &Node<SoftNic>| {
        let c = &node.clients[&id];
        [c.reads.front_peer, c.writes.front_peer, c.access.0[0][0].peer, c.access.0[0][1].peer]
    };
    node.set_start(id, QpSet::Access(GroupId(0), Lane(1)), Start::Psn(Psn::new(2)));
    assert_eq!(begin(&node), [at(1), at(1), at(1), at(2)]);
    node.set_start(id, QpSet::Management, Start::Psn(Psn::new(3)));
    assert_eq!(begin(&node), [at(3), at(3), at(1), at(2)]);
}

#[test]
fn table_of_a_client_is_shown_until_it_is_reclaimed() {
    let (nic, mut node) = start(4);
    let ids = [1, 2].map(|id| RawClient::join(&nic, &mut node, id).id);
    let shown = |node: &Node<SoftNic>| -> Vec<ClientId> {
        node.tables().iter().map(|(id, _)| *id).collect()
    };
    assert_eq!(shown(&node), ids);
    node.retire(ids[0]).unwrap();
    while !node.is_retired(ids[0]) {
        node.poll().unwrap();
    }
    assert_eq!(shown(&node), ids[1..]);
}
