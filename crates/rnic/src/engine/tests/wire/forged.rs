//! Packets with the peer's address that the peer did not send.

use super::errors::{packet, world};
use super::*;
use crate::error::Error;
use crate::wire::mac::TRAILER;
use crate::wire::packet::{Aeth, Body, ICRC, Nak, Notice, Part, Reth, Syndrome as Says};
use std::net::SocketAddr;
use verbs::QpState;

/// Encodes a WRITE of four bytes to the start of `mr`.
fn evil(q: &TestQp, psn: u32, mr: &Mr) -> Vec<u8> {
    let reth = Some(Reth { at: mr.remote(0), len: 4 });
    packet(q, psn, Body::Write { part: Part::Only, reth, imm: None }, b"evil")
}

/// Replaces the ICRC of a packet by a tag trailer filled with `fill`.
fn tagged(mut bytes: Vec<u8>, fill: u8) -> Vec<u8> {
    bytes.truncate(bytes.len() - ICRC);
    bytes.extend([fill; TRAILER]);
    bytes
}

fn peer_of(net: &Net, end: usize) -> SocketAddr {
    SocketAddr::new(address(1 - end, net.v6), PORT)
}

/// Checks that the connection works in both directions.
#[track_caller]
fn assert_works(net: &mut Net, [a, b]: [&mut TestQp; 2], [mine, theirs]: [&Mr; 2]) {
    for (end, q, from, to) in [(0, a, mine, theirs), (1, b, theirs, mine)] {
        let write = |w: &mut Builder| _ = w.rdma_write(to.remote(8192), &[from.sge(0, 4)]);
        assert_eq!(net.execute(end, q, write).error, None);
        let read = |w: &mut Builder| _ = w.rdma_read(to.remote(0), &[from.sge(4096, 3000)]);
        assert_eq!(net.execute(end, q, read).error, None);
    }
}

/// The attack of an unprivileged user of the peer's host: all PSNs, in 2.3 s.
#[test]
#[cfg_attr(miri, ignore = "16 million packets")]
fn sweep_of_all_psns_is_stopped_by_the_guess_budget() {
    let link = Link { psn: [0x80_0123, 77], ..Link::default() };
    let (mut net, [mut a, mut b], [mine, theirs]) = world(&link);
    let from = peer_of(&net, 1);
    let mut bytes = evil(&b, 0, &theirs);
    for psn in 0..1u32 << 24 {
        bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
        net.now += 140;
        net.drop_in(1, from, &bytes);
    }
    assert_eq!(theirs.bytes(0, 4), [0; 4], "a guessed PSN was accepted");
    let stats = net.beds[1].e.wire_stats().clone();
    assert!((257..300).contains(&stats.guesses), "{stats:?}");
    assert!(stats.shut_out > (1 << 24) - 300, "{stats:?}");
    assert_works(&mut net, [&mut a, &mut b], [&mine, &theirs]);
}

/// The attacker knows PSN and port.
#[test]
fn packet_without_tag_does_not_affect_a_keyed_connection() {
    let (mut net, [mut a, mut b], [mine, theirs]) = world(&Link::authenticated());
    assert_works(&mut net, [&mut a, &mut b], [&mine, &theirs]);
    net.log = Some(Vec::new());
    let write = |w: &mut Builder| _ = w.rdma_write(theirs.remote(8192), &[mine.sge(0, 4)]);
    assert_eq!(net.execute(0, &mut a, write).error, None);
    let log = net.log.take().unwrap();
    let (_, last) = log.iter().find(|(end, _)| *end == 0).expect("a WRITE");
    let psn = u32::from_be_bytes([0, last[9], last[10], last[11]]);
    let from = peer_of(&net, 1);
    let mut tried = 0;
    for next in psn - 500..psn + 500 {
        let plain = evil(&b, next, &theirs);
        let long = tagged(plain.clone(), 0xff);
        let mut borrowed = tagged(plain.clone(), 0);
        let end = borrowed.len();
        // Counter and tag of another packet.
        borrowed[end - TRAILER..].copy_from_slice(last.last_chunk::<TRAILER>().unwrap());
        for bytes in [plain, long, borrowed] {
            net.drop_in(1, from, &bytes);
            tried += 1;
        }
    }
    let stats = net.beds[1].e.wire_stats();
    assert_eq!((stats.forged, stats.naks_out, stats.shut_out), (tried, 0, 0), "{stats:?}");
    assert_eq!(theirs.bytes(0, 4), [0; 4]);
    assert_works(&mut net, [&mut a, &mut b], [&mine, &theirs]);
}

#[test]
fn responses_without_tag_are_ignored() {
    let (mut net, [mut a, _b], [mine, theirs]) = world(&Link::authenticated());
    net.log = Some(Vec::new());
    net.beds[0].post(&mut a, |w| {
        w.rdma_write(theirs.remote(0), &[mine.sge(0, 3000)]).signaled();
    });
    net.beds[0].post(&mut a, |w| {
        w.rdma_read(theirs.remote(4096), &[mine.sge(4096, 1000)]).signaled();
    });
    net.turn(0);
    let sent = net.log.take().unwrap();
    let psn_of = |bytes: &[u8]| u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]]);
    let psns: Vec<u32> = sent.iter().map(|(_, bytes)| psn_of(bytes)).collect();
    assert_eq!(psns.len(), 4, "three packets and a READ");
    let from = peer_of(&net, 0);
    let ack = Aeth { syndrome: Says::Ack(31), msn: 1 };
    let says = |syndrome| Body::Acknowledge(Aeth { syndrome, msn: 1 });
    let bodies = [
        Body::Acknowledge(ack),
        says(Says::Nak(Nak::RemoteAccess)),
        says(Says::Nak(Nak::Sequence)),
        says(Says::Rnr(31)),
        Body::ReadResponse { part: Part::Only, aeth: Some(ack) },
    ];
    for &psn in &psns {
        for body in bodies {
            let len = if matches!(body, Body::ReadResponse { .. }) { 1000 } else { 0 };
            let plain = packet(&a, psn, body, &vec![0xee; len]);
            net.drop_in(0, from, &tagged(plain.clone(), 1));
            net.drop_in(0, from, &plain);
        }
    }
    let stats = net.beds[0].e.wire_stats();
    assert_eq!((stats.forged, stats.naks_in), (40, 0), "{stats:?}");
    assert_eq!(a.send_cq.reader.poll().map(|_| ()), None, "nothing has completed");
    assert_eq!(mine.bytes(4096, 1000), [0; 1000]);
    net.run();
    for _ in 0..2 {
        assert_eq!(a.send_cq.reader.poll().expect("a completion").error, None);
    }
}

#[test]
fn replayed_packets_are_duplicates_and_later_too_old() {
    let (mut net, [mut a, mut b], [mine, theirs]) = world(&Link::authenticated());
    net.log = Some(Vec::new());
    let mut write = |net: &mut Net| {
        let write = |w: &mut Builder| _ = w.rdma_write(theirs.remote(0), &[mine.sge(0, 4)]);
        assert_eq!(net.execute(0, &mut a, write).error, None);
    };
    write(&mut net);
    let log = net.log.take().unwrap();
    let (_, recorded) = log.into_iter().find(|(end, _)| *end == 0).expect("a WRITE");
    theirs.mem.write(0, b"mine");
    let from = peer_of(&net, 1);
    net.drop_in(1, from, &recorded);
    assert_eq!(net.beds[1].e.wire_stats().duplicates, 1);
    assert_eq!(theirs.bytes(0, 4), *b"mine");
    for _ in 0..2100 {
        write(&mut net);
    }
    net.drop_in(1, from, &recorded);
    let stats = net.beds[1].e.wire_stats();
    assert_eq!((stats.duplicates, stats.outdated), (1, 1), "{stats:?}");
    assert_works(&mut net, [&mut a, &mut b], [&mine, &theirs]);
}

/// No nonce is repeated under one key, even if both ends reconnect with the same secret.
#[test]
fn packet_counters_continue_after_a_reconnect() {
    let link = Link::authenticated();
    let (mut net, mut qps, [mine, theirs]) = world(&link);
    net.log = Some(Vec::new());
    for _ in 0..3 {
        let write = |w: &mut Builder| _ = w.rdma_write(theirs.remote(0), &[mine.sge(0, 3000)]);
        assert_eq!(net.execute(0, &mut qps[0], write).error, None);
        for (end, q) in qps.iter_mut().enumerate() {
            net.beds[end].e.modify_qp(q.function, q.qpn, QpChange::Reset).unwrap();
        }
        qps[0].producer = 0;
        net.connect([&qps[0], &qps[1]], &link);
    }
    let log = net.log.take().unwrap();
    let mut seen = std::collections::HashSet::new();
    for (end, bytes) in &log {
        let trailer = bytes.last_chunk::<TRAILER>().unwrap();
        assert!(seen.insert((*end, trailer[..8].to_vec())), "a packet counter was repeated");
    }
    assert!(log.len() >= 12, "{} packets", log.len());
}

#[test]
fn packets_from_another_port_are_dropped_if_the_port_is_fixed() {
    let link = Link { fixed_port: true, ..Link::default() };
    let (mut net, [mut a, mut b], [mine, theirs]) = world(&link);
    let psn = link.psn[0];
    let elsewhere = SocketAddr::new(address(0, net.v6), PORT + 1);
    net.drop_in(1, elsewhere, &evil(&b, psn, &theirs));
    assert_eq!(net.beds[1].e.wire_stats().strangers, 1);
    assert_eq!(theirs.bytes(0, 4), [0; 4]);
    assert_works(&mut net, [&mut a, &mut b], [&mine, &theirs]);
    // A peer with varying source ports is accepted from any port.
    let (mut net, [_a, b], [_, theirs]) = world(&Link::default());
    net.drop_in(1, elsewhere, &evil(&b, psn, &theirs));
    assert_eq!(theirs.bytes(0, 4), *b"evil");
}

/// A function that names the address and number of another function's peer takes nothing from it.
/// With keys both functions connect, and each receives only its own peer's packets.
#[test]
fn claiming_anothers_peer_does_not_block_a_keyed_qp() {
    let (mut net, [mut a, mut b], [mine, theirs]) = world(&Link::authenticated());
    let (victim, pd) = (a.qpn, b.pd);
    let claim = |net: &mut Net, link: &Link| {
        let shape = net.beds[1].shape(PF, pd);
        let claimer = net.beds[1].qp(&shape);
        let peer = net.peer(1, victim, link).into();
        net.beds[1].e.modify_qp(PF, claimer.qpn, QpChange::Init).unwrap();
        let change = QpChange::ReadyToReceive { peer };
        (net.beds[1].e.modify_qp(PF, claimer.qpn, change), claimer)
    };
    let stolen = Link { secret: Some(([9; 32], true)), ..Link::authenticated() };
    for link in [&stolen, &Link { fixed_port: true, ..Link::default() }] {
        let (result, claimer) = claim(&mut net, link);
        assert_eq!(result, Ok(()));
        // Packets of the claimer fail the tag check at the victim's peer.
        net.beds[1].e.modify_qp(PF, claimer.qpn, QpChange::ReadyToSend).unwrap();
        let mut claimer = claimer;
        net.beds[1].post(&mut claimer, |w| {
            w.rdma_write(mine.remote(0), &[theirs.sge(0, 4)]).signaled();
        });
        net.deliver();
        assert!(net.beds[0].e.wire_stats().forged > 0);
    }
    // The victim can connect after the claim, too.
    for (end, q) in [(0, &mut a), (1, &mut b)] {
        net.beds[end].e.modify_qp(q.function, q.qpn, QpChange::Reset).unwrap();
        q.producer = 0;
    }
    net.connect([&a, &b], &Link::authenticated());
    assert_works(&mut net, [&mut a, &mut b], [&mine, &theirs]);
    // Two peers without keys are distinguished only by their address.
    let plain = Link { fixed_port: true, ..Link::default() };
    assert!(matches!(claim(&mut net, &plain).0, Err(Error::PeerTaken { .. })));
}

/// The checksum is the most expensive check of an unexpected packet.
#[test]
fn unexpected_packets_cost_no_checksum() {
    let (mut net, [_a, b], [_, theirs]) = world(&Link::default());
    let nobody = TestQp { qpn: Qpn::new(0x99), ..net.beds[1].pair().0 };
    let here = address(1, net.v6);
    let peer = peer_of(&net, 1);
    let stranger = SocketAddr::new([10, 0, 0, 9].into(), PORT);
    let psn = Link::default().psn[0];
    let asked = std::cell::Cell::new(0);
    let is_intact = || {
        asked.set(asked.get() + 1);
        false
    };
    for (from, bytes) in [(peer, evil(&nobody, psn, &theirs)), (stranger, evil(&b, psn, &theirs))] {
        net.beds[1].e.receive(net.now, from, here, &bytes, is_intact);
    }
    assert_eq!(asked.get(), 0);
    net.beds[1].e.receive(net.now, peer, here, &evil(&b, psn, &theirs), is_intact);
    let stats = net.beds[1].e.wire_stats();
    assert_eq!((asked.get(), stats.bad_icrc, stats.unknown_qp), (1, 1, 1), "{stats:?}");
}

#[test]
fn forged_nak_or_last_packet_changes_neither_end() {
    let (mut net, [mut a, mut b], [mine, theirs]) = world(&Link::authenticated());
    let from = peer_of(&net, 1);
    for psn in [0, 1, 0x80_0000, 0xff_ffff] {
        let wrong = Body::Send { part: Part::Middle, notice: Notice::None };
        net.drop_in(1, from, &tagged(packet(&b, psn, wrong, &[0; 1024]), 3));
        net.drop_in(1, from, &tagged(vec![0; 3 + ICRC], 3));
    }
    assert_eq!(net.beds[1].state(&b), QpState::ReadyToSend);
    assert_works(&mut net, [&mut a, &mut b], [&mine, &theirs]);
}
