//! Requests at the limits of validity, at either side: a rejected request changes nothing.

use super::injected::{MTU, World, ack};
use super::*;
use crate::wire::Packet;
use crate::wire::packet::{Aeth, AtomicOp, Body, Nak, Notice, Part, Reth, Syndrome as Says};
use verbs::cqe::Syndrome;
use verbs::wqe::umr::{Umr, UmrFlags};
use verbs::wqe::{Remote, SE_SOLICITED, Sge};
use verbs::{Access, Key, PathMtu, Psn, QpState};

/// Maximum length of a message.
const LONGEST: u32 = 1 << 31;

fn nak(psn: u32, msn: u32, nak: Nak) -> Vec<(u32, Body)> {
    vec![(psn, Body::Acknowledge(Aeth { syndrome: Says::Nak(nak), msn }))]
}

fn write_first(at: Remote, len: u32) -> Body {
    Body::Write { part: Part::First, reth: Some(Reth { at, len }), imm: None }
}

fn write_only(at: Remote, len: u32) -> Body {
    Body::Write { part: Part::Only, reth: Some(Reth { at, len }), imm: None }
}

/// Injects a request that the far end must reject at once, with its QP in Error.
#[track_caller]
fn refused(mut w: World, body: Body, payload: &[u8], why: Nak) -> World {
    let psn = w.psn;
    let msn = w.receive(Body::Acknowledge(Aeth { syndrome: Says::Ack(31), msn: 0 }), &[]);
    assert_eq!(msn, [], "unexpected responses");
    w.psn = psn;
    let answers = w.receive(body, payload);
    assert_eq!(answers, nak(psn, 0, why), "{body:?}");
    assert_eq!(w.net.beds[1].state(&w.far), QpState::Error);
    w
}

#[test]
fn length_beyond_the_maximum_is_an_invalid_request() {
    for (len, why) in [(LONGEST, Nak::RemoteAccess), (LONGEST + 1, Nak::InvalidRequest)] {
        let w = World::new(false);
        let at = w.region.remote(0);
        refused(w, write_first(at, len), &[0; MTU], why);
        let w = World::new(false);
        refused(w, Body::Read(Reth { at, len }), &[], why);
    }
}

/// Every packet of a message but the last has as many bytes as the path MTU; the last has at most
/// as many.
#[test]
fn packet_of_wrong_length_moves_no_bytes() {
    let len = MTU as u32;
    let write = |part, at, len| Body::Write { part, reth: Some(Reth { at, len }), imm: None };
    for (part, len, bytes) in [
        (Part::Only, 8, 4),
        (Part::Only, 8, 12),
        (Part::Only, len + 4, MTU + 4),
        (Part::First, 2 * len, MTU - 4),
        (Part::First, 2 * len, MTU + 4),
        (Part::First, len, MTU),
        (Part::First, len - 4, MTU),
        (Part::First, len - 4, MTU - 4),
    ] {
        let w = World::new(false);
        let body = write(part, w.region.remote(0), len);
        let w = refused(w, body, &vec![7; bytes], Nak::InvalidRequest);
        assert_eq!(w.region.bytes(0, 16 << 10), vec![0; 16 << 10], "{part:?} of {bytes} bytes");
    }
    for (part, bytes) in [(Part::Only, MTU + 4), (Part::First, MTU - 4), (Part::First, MTU + 4)] {
        let mut w = World::new(false);
        w.post_receive();
        let body = Body::Send { part, notice: Notice::None };
        let w = refused(w, body, &vec![7; bytes], Nak::InvalidRequest);
        assert_eq!(w.region.bytes(0, 16 << 10), vec![0; 16 << 10], "{part:?} of {bytes} bytes");
    }
}

#[test]
fn request_ending_out_of_range_moves_no_bytes() {
    let w = World::new(false);
    let near_end = w.region.remote((16 << 10) - 2 * MTU);
    let w = refused(w, write_first(near_end, 3 * MTU as u32), &[7; MTU], Nak::RemoteAccess);
    assert_eq!(w.region.bytes(0, 16 << 10), vec![0; 16 << 10]);
    let w = World::new(false);
    let near_end = w.region.remote((16 << 10) - 2 * MTU);
    let read = Body::Read(Reth { at: near_end, len: 3 * MTU as u32 });
    refused(w, read, &[], Nak::RemoteAccess);
}

/// A request of length 0 accesses no memory: its key and address are ignored, the QP's rights are
/// checked.
#[test]
fn zero_length_request_needs_the_right_but_no_key() {
    let nowhere = Remote { addr: 5, rkey: Key(0x1234_5678) };
    let read = Body::Read(Reth { at: nowhere, len: 0 });
    let mut w = World::new(false);
    let psn = w.psn;
    assert_eq!(w.receive(write_only(nowhere, 0), &[]), ack(psn, 1));
    let aeth = Some(Aeth { syndrome: Says::Ack(31), msn: 2 });
    let empty = Body::ReadResponse { part: Part::Only, aeth };
    assert_eq!(w.receive(read, &[]), [(Psn::new(psn).plus(1).raw(), empty)]);
    for body in [write_only(nowhere, 0), read] {
        let w = World::with(false, |s| s.access = Access::NONE);
        refused(w, body, &[], Nak::RemoteAccess);
    }
}

#[test]
fn atomic_outside_its_limits_is_rejected() {
    let atomic = |at| Body::Atomic { at, op: AtomicOp::FetchAdd { add: 1 } };
    let w = World::new(false);
    let odd = w.region.remote(4);
    let w = refused(w, atomic(odd), &[], Nak::InvalidRequest);
    assert_eq!(w.region.bytes(0, 16), [0; 16]);
    // In the middle of a WRITE.
    let mut w = World::new(false);
    let at = w.region.remote(0);
    let psn = w.psn;
    assert_eq!(w.receive(write_first(at, 2 * MTU as u32), &[0; MTU]), ack(psn, 0));
    let answers = w.receive(atomic(at), &[]);
    assert_eq!(answers, nak(Psn::new(psn).plus(1).raw(), 0, Nak::InvalidRequest));
    // One more atomic than may be outstanding; none has been answered.
    let mut w = World::new(false);
    let (here, psn, at) = (address(1, w.net.v6), w.psn, w.region.remote(0));
    for _ in 0..16 {
        w.receive_at(here, atomic(at), &[]);
    }
    let at_once = w.receive(atomic(at), &[]);
    assert_eq!(at_once.len(), 17);
    assert_eq!(at_once[16..], nak(Psn::new(psn).plus(16).raw(), 16, Nak::InvalidRequest));
    assert_eq!(w.region.bytes(0, 8), 16u64.to_be_bytes());
}

#[test]
fn duplicate_without_ack_request_gets_no_response() {
    let mut w = World::new(false);
    let psn = w.psn;
    let write = write_only(w.region.remote(0), 4);
    assert_eq!(w.receive(write, &[1; 4]), ack(psn, 1));
    for (asks, answers) in [(false, vec![]), (true, ack(psn, 1))] {
        (w.asks, w.psn) = (asks, psn);
        assert_eq!(w.receive(write, &[2; 4]), answers);
    }
    assert_eq!(w.region.bytes(0, 4), [1; 4]);
}

/// The key of a READ becomes invalid before the response is sent: the READ fails and the connection
/// ends.
#[test]
fn read_with_invalid_key_ends_the_connection_if_unanswered() {
    let mut w = World::new(false);
    let (here, psn) = (address(1, w.net.v6), w.psn);
    let read = Body::Read(Reth { at: w.region.remote(0), len: 8 });
    w.receive_at(here, read, &[]);
    w.net.beds[1].e.dereg_mr(PF, w.region.key).unwrap();
    w.net.log = Some(Vec::new());
    w.net.turn(1);
    let log = w.net.log.take().unwrap();
    let answers: Vec<_> = log.iter().map(|(_, b)| Packet::parse(b).unwrap()).collect();
    let answers: Vec<_> = answers.iter().map(|p| (p.psn.raw(), p.body)).collect();
    assert_eq!(answers, nak(psn, 1, Nak::RemoteAccess));
    assert_eq!(w.net.beds[1].state(&w.far), QpState::Error);
}

/// A window is rebound to fewer bytes between a READ's arrival and its response.
#[test]
fn read_is_answered_up_to_the_shortened_window() {
    let mut w = World::new(false);
    let mut other = {
        let bed = &mut w.net.beds[1];
        let shape = Shape { privileged: true, ..bed.shape(PF, w.far.pd) };
        bed.qp(&shape)
    };
    w.net.beds[1].connect_to(&other, other.qpn);
    let window = w.net.beds[1].e.alloc_mw(PF, w.far.pd, Default::default()).unwrap();
    let (mr, start, qpn) = (w.region.key, w.region.mem.addr(), w.far.qpn);
    let bind = |key, len: usize| {
        let umr = Umr::bind(key, 9, qpn, Access::REMOTE_ALL, mr, start, len as u32);
        // The rebind may also apply to a bound window.
        Umr { flags: UmrFlags(umr.flags.0 & !UmrFlags::CHECK_FREE.0), ..umr }
    };
    let (whole, short) = (bind(window, 4 * MTU), bind(Key::new(window.index(), 9), 2 * MTU));
    assert_eq!(w.net.execute(1, &mut other, |b| _ = b.umr(&whole)).error, None);
    let at = Remote { addr: w.region.mem.addr(), rkey: Key::new(window.index(), 9) };
    // The rebind executes before the response is sent.
    w.net.beds[1].post(&mut other, |b| _ = b.umr(&short).signaled());
    let psn = w.psn;
    let answers = w.receive(Body::Read(Reth { at, len: 4 * MTU as u32 }), &[]);
    assert_eq!(other.send_cq.reader.poll().unwrap().error, None);
    let is_data = |body: &Body| matches!(body, Body::ReadResponse { .. });
    let later = |n: u32| Psn::new(n).since(Psn::new(psn));
    let kinds: Vec<_> = answers.iter().map(|(n, body)| (later(*n), is_data(body))).collect();
    assert_eq!(kinds, [(0, true), (1, true), (2, false)], "two packets and a NAK");
}

// --- the requester's side ------------------------------------------------------------------------

fn pair(link: &Link) -> (Net, [TestQp; 2], [Mr; 2]) {
    let mut net = Net::new(12);
    let qps = net.pair(link);
    let mine = net.beds[0].mr(PF, qps[0].pd, 64 << 10, ALL);
    let theirs = net.beds[1].mr(PF, qps[1].pd, 64 << 10, ALL);
    (net, qps, [mine, theirs])
}

#[test]
fn masked_atomics_fail_over_the_wire() {
    let all = u64::MAX;
    for (compare_mask, swap_mask) in [(all, 0xff), (0xff, all), (0xff, 0xff)] {
        let (mut net, [mut a, _b], [mine, theirs]) = pair(&Link::default());
        let cqe = net.execute(0, &mut a, |w| {
            let (compare, swap) = ((0, compare_mask), (1, swap_mask));
            w.masked_compare_swap(theirs.remote(0), compare, swap, mine.sge(0, 8));
        });
        assert_error(&cqe, Syndrome::LocalQpOperation);
        assert_eq!(net.beds[0].e.wire_stats().packets_out, 0);
    }
    let (mut net, [mut a, _b], [mine, theirs]) = pair(&Link::default());
    let cqe = net.execute(0, &mut a, |w| {
        w.masked_compare_swap(theirs.remote(0), (0, all), (1, all), mine.sge(0, 8));
    });
    assert_eq!(cqe.error, None, "masks of all ones make a plain atomic");
    assert_eq!(theirs.bytes(0, 8), 1u64.to_be_bytes());
}

#[test]
fn atomic_result_needs_eight_bytes() {
    for (room, fits) in [(4, false), (7, false), (8, true), (16, true)] {
        let (mut net, [mut a, _b], [mine, theirs]) = pair(&Link::default());
        mine.mem.write(0, &[9; 16]);
        let add = |w: &mut Builder| _ = w.fetch_add(theirs.remote(0), 1, mine.sge(0, room));
        let cqe = net.execute(0, &mut a, add);
        if fits {
            assert_eq!(cqe.error, None);
            assert_eq!(mine.bytes(0, 16)[8..], [9; 8]);
        } else {
            assert_error(&cqe, Syndrome::LocalLength);
            assert_eq!((mine.bytes(0, 16), theirs.bytes(0, 8)), (vec![9; 16], vec![0; 8]));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "64 MiB of zeros")]
fn request_beyond_the_maximum_length_is_not_sent() {
    const PART: usize = 64 << 20;
    for (mtu, most) in [(PathMtu::Mtu4096, LONGEST as u64), (PathMtu::Mtu256, 1 << 30)] {
        for more in [0, 1] {
            let link = Link { mtu, ..Link::default() };
            let (mut net, [mut a, _b], [_, theirs]) = pair(&link);
            let mine = net.beds[0].mr(PF, a.pd, PART, ALL);
            let mut list = vec![mine.sge(0, PART); (most / PART as u64) as usize];
            list.extend((more > 0).then(|| mine.sge(0, 1)));
            let cqe = net.execute(0, &mut a, |w| _ = w.rdma_read(theirs.remote(0), &list));
            // The far end rejects a request that is sent, because its region is smaller.
            let why = [Syndrome::RemoteAccess, Syndrome::LocalLength][more];
            assert_error(&cqe, why);
        }
    }
}

/// WQEs of several building blocks are stored whole, even if other WQEs are fetched later.
#[test]
fn long_wqe_is_retransmitted_as_fetched() {
    let (mut net, [mut a, _b], [mine, theirs]) = pair(&Link::default());
    let [mut other, _far] = net.pair(&Link { psn: [5, 6], ..Link::default() });
    let others = net.beds[0].mr(PF, other.pd, 4096, ALL);
    let theirs_too = net.beds[1].mr(PF, _far.pd, 4096, ALL);
    mine.mem.write(0, &(0..=255).cycle().take(4096).collect::<Vec<u8>>());
    others.mem.write(0, &[0xee; 4096]);
    let list = |mr: &Mr| (0..9).map(|n| mr.sge(n * 100, 10)).collect::<Vec<Sge>>();
    net.faults.loss = 10_000;
    net.beds[0].post(&mut a, |w| _ = w.rdma_write(theirs.remote(0), &list(&mine)).signaled());
    net.turn(0);
    net.beds[0]
        .post(&mut other, |w| _ = w.rdma_write(theirs_too.remote(0), &list(&others)).signaled());
    net.turn(0);
    net.faults.loss = 0;
    net.run();
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
    assert_eq!(other.send_cq.reader.poll().unwrap().error, None);
    let want: Vec<u8> = (0..9).flat_map(|n| mine.bytes(n * 100, 10)).collect();
    assert_eq!(theirs.bytes(0, 90), want);
    assert_eq!(theirs_too.bytes(0, 90), [0xee; 90]);
}

#[test]
fn padding_is_zero_in_a_reused_outbox() {
    let (mut net, [mut a, _b], [mine, theirs]) = pair(&Link::default());
    mine.mem.write(0, &[0xff; 4096]);
    let full = net.execute(0, &mut a, |w| _ = w.rdma_write(theirs.remote(0), &[mine.sge(0, 4096)]));
    assert_eq!(full.error, None);
    for len in 1..=8 {
        net.log = Some(Vec::new());
        let write = |w: &mut Builder| _ = w.rdma_write(theirs.remote(0), &[mine.sge(0, len)]);
        assert_eq!(net.execute(0, &mut a, write).error, None);
        let log = net.log.take().unwrap();
        let (_, bytes) = log.iter().find(|(end, _)| *end == 0).unwrap();
        let pad = len.next_multiple_of(4) - len;
        let end = bytes.len() - crate::wire::packet::ICRC;
        assert_eq!(bytes[end - pad..end], vec![0; pad], "{len} bytes");
    }
}

#[test]
fn last_packet_of_a_message_is_solicited() {
    let (mut net, [mut a, mut b], [mine, theirs]) = pair(&Link::default());
    net.beds[1].post_recv(&mut b, &[theirs.sge(0, 4096)]);
    net.log = Some(Vec::new());
    let message = [mine.sge(0, 2 * MTU + 1)];
    let cqe = net.execute(0, &mut a, |w| _ = w.send(&message).flags(SE_SOLICITED));
    assert_eq!(cqe.error, None);
    let log = net.log.take().unwrap();
    let sent = log.iter().filter(|(end, _)| *end == 0);
    let solicited: Vec<_> = sent.map(|(_, b)| Packet::parse(b).unwrap().solicited).collect();
    assert_eq!(solicited, [false, false, true]);
}

#[test]
fn last_packet_of_a_message_requests_an_ack() {
    let (mut net, [mut a, _b], [mine, theirs]) = pair(&Link::default());
    net.log = Some(Vec::new());
    let write = [mine.sge(0, 2 * MTU + 1)];
    let cqe = net.execute(0, &mut a, |w| _ = w.rdma_write(theirs.remote(0), &write));
    assert_eq!(cqe.error, None);
    let log = net.log.take().unwrap();
    let sent = log.iter().filter(|(end, _)| *end == 0);
    let asks: Vec<_> = sent.map(|(_, b)| Packet::parse(b).unwrap().ack_request).collect();
    assert_eq!(asks, [false, false, true]);
}

/// The receives of a QP in Error are flushed although the QP has sent nothing.
#[test]
fn receives_of_a_connected_qp_are_flushed() {
    let mut w = World::new(false);
    w.post_receive();
    w.net.beds[1].e.modify_qp(PF, w.far.qpn, QpChange::Error).unwrap();
    w.net.turn(1);
    assert_error(&w.far.recv_cq.reader.poll().expect("a receive"), Syndrome::Flushed);
}
