//! Tests of the required NIC capabilities, and of the initial state of re-established QPs.

use rnic::nic::SoftNic;
use scheme::info::Need;
use scheme::route::{RoceEnd, Route};
use scheme::{QpSet, Start};
use verbs::{Caps, PathMtu, Psn, Qpn};

use super::*;

#[test]
fn missing_nic_capability_is_named() {
    let whole = SoftNic::inline().caps();
    let no_windows = Caps { windows: false, ..whole.clone() };
    let no_type1 = Caps { type1_windows: false, ..whole.clone() };
    let short = |by| Caps { max_inline: REPLY_BYTES as u32 - by, ..whole.clone() };
    for (scheme, caps, lacks) in [
        (crate::RPC_MW_2, &whole, None),
        (crate::RPC_MW_2, &no_windows, Some(Need::Type2Windows)),
        (crate::RPC_MW_2, &no_type1, None),
        (crate::RPC_MW_1, &no_type1, Some(Need::Type1Windows)),
        (crate::PREMMAP_RPC, &no_type1, Some(Need::Type1Windows)),
        (crate::RPC_MW_1, &no_windows, None),
        (crate::STATIC_MR, &no_type1, None),
        (crate::STATIC_MR, &short(0), None),
        (crate::STATIC_MR, &short(1), Some(Need::Inline(REPLY_BYTES as u32))),
    ] {
        assert_eq!(scheme.missing(caps), lacks, "{scheme}");
    }
}

/// Both ends derive the state from a salt that the compute node draws each time.
#[test]
fn reestablished_remote_qp_uses_the_latest_start() {
    let nic = SoftNic::inline();
    let settings = NodeSettings::new(crate::RPC_MW_2, 4, 4096);
    let mut node = Node::new(&nic, &settings).unwrap();
    let pd = nic.alloc_pd().unwrap();
    let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false }).unwrap();
    let qp = || {
        let (receive, access) = (Receive::None, Access::NONE);
        let attr = QpAttr { send_cq: &cq, recv_cq: &cq, send_blocks: 16, receive, access };
        nic.create_qp(&pd, attr).unwrap()
    };
    let (management, lanes): (_, Vec<_>) = (qp(), (0..settings.lanes()).map(|_| qp()).collect());
    let request = ConnectRequest {
        management: vec![management.qpn().raw()],
        groups: vec![lanes.iter().map(|lane| lane.qpn().raw()).collect()],
        ..ConnectRequest::default()
    };
    let id = ClientId(1);
    node.admit(id, &request).unwrap();
    let end = RoceEnd { port: 4791, mtu: PathMtu::Mtu1024 };
    let ip = |last| std::net::IpAddr::from([10, 0, 0, last]);
    let route = Route::between(ip(1), end, ip(2), end);
    let at = |psn| route.peer(Qpn::new(7), Start::Psn(Psn::new(psn)));
    {
        let mut state = node.state_of(id);
        let peer = state.peers.get_mut(&id).unwrap();
        peer.answers.management.peer = at(1);
        peer.access.0[0].iter_mut().for_each(|lane| lane.peer = at(1));
    }
    let begin = |node: &Node<SoftNic>| {
        let peer = &node.state_of(id).peers[&id];
        [peer.answers.management.peer, peer.access.0[0][0].peer, peer.access.0[0][1].peer]
    };
    node.set_start(id, QpSet::Access(GroupId(0), Lane(1)), Start::Psn(Psn::new(2)));
    assert_eq!(begin(&node), [at(1), at(1), at(2)]);
    node.set_start(id, QpSet::Management, Start::Psn(Psn::new(3)));
    assert_eq!(begin(&node), [at(3), at(1), at(2)]);
    // These lanes do not exist.
    node.set_start(id, QpSet::Access(GroupId(0), Lane(99)), Start::Psn(Psn::new(4)));
    node.set_start(id, QpSet::Access(GroupId(99), Lane(0)), Start::Psn(Psn::new(4)));
    assert_eq!(begin(&node), [at(3), at(1), at(2)]);
}
