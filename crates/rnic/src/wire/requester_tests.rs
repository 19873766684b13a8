//! Tests of the requester without packets: sequence numbers, windows, timers.

use super::*;
use verbs::Qpn;

const MTU: u32 = 1024;

fn requester(psn: u32) -> Requester {
    requester_with(psn, 64)
}

/// Makes a requester with a window of at most `window` packets.
fn requester_with(psn: u32, window: u32) -> Requester {
    let mut peer =
        RemotePeer::new("10.0.0.2:4791".parse().unwrap(), "10.0.0.1".parse().unwrap(), Qpn::new(9));
    peer.sq_psn = Psn::new(psn);
    peer.max_rd_atomic = 2;
    peer.retry_cnt = 2;
    peer.rnr_retry = 1;
    Requester::new(&peer, 8, 32, window * MTU)
}

fn push(r: &mut Requester, kind: Kind, packets: u32) {
    r.push(Request::new(kind, packets, packets * MTU), &[0; 64]);
}

/// Sends all packets that may be sent. Returns PSN and count of each plan.
fn send(r: &mut Requester, now: u64) -> Vec<(u32, u32)> {
    let mut sent = Vec::new();
    while let Some(plan) = r.next(1) {
        r.sent(&plan, now);
        sent.push((plan.psn.raw(), plan.count));
    }
    sent
}

fn retired(r: &mut Requester) -> usize {
    std::iter::from_fn(|| r.retire()).map(|e| assert!(matches!(e, Retired::Done(_)))).count()
}

#[test]
fn ack_covers_all_earlier_packets() {
    let mut r = requester(0xff_fffe);
    for _ in 0..3 {
        push(&mut r, Kind::Write, 2);
    }
    assert_eq!(send(&mut r, 0), [0xff_fffe, 0xff_ffff, 0, 1, 2, 3].map(|p| (p, 1)));
    assert_eq!(r.deadline(), Some(20_000_000));
    r.on_ack(Psn::new(1), 10);
    assert_eq!(retired(&mut r), 1);
    // ACKs of an old PSN, and of a PSN that was never sent.
    r.on_ack(Psn::new(0), 11);
    r.on_ack(Psn::new(5), 11);
    assert_eq!(retired(&mut r), 0);
    r.on_ack(Psn::new(4), 12);
    assert_eq!((retired(&mut r), r.deadline(), r.is_empty()), (2, None, true));
}

#[test]
fn requester_goes_back_to_the_lost_packet() {
    let mut r = requester(10);
    push(&mut r, Kind::Send, 8);
    assert_eq!(send(&mut r, 0).len(), 8);
    r.on_nak(Psn::new(13), Nak::Sequence, 5);
    assert_eq!(send(&mut r, 5), [13, 14, 15, 16, 17].map(|p| (p, 1)));
    // The same NAK again was sent before the retransmission arrived, and is ignored.
    r.on_nak(Psn::new(13), Nak::Sequence, 6);
    assert_eq!(send(&mut r, 6), []);
    r.on_nak(Psn::new(15), Nak::Sequence, 7);
    assert_eq!(send(&mut r, 7), [15, 16, 17].map(|p| (p, 1)));
    r.on_ack(Psn::new(18), 8);
    assert_eq!(retired(&mut r), 1);
}

/// Sends all packets that may be sent, at most `max_packets` in each plan. Returns the number of
/// packets, and the PSNs of those that request an ACK.
fn asking(r: &mut Requester, max_packets: u32) -> (u32, Vec<u32>) {
    let (mut count, mut asking) = (0, Vec::new());
    while let Some(plan) = r.next(max_packets) {
        r.sent(&plan, 0);
        count += plan.count;
        asking.extend(plan.ack.then_some(plan.psn.plus(plan.count - 1).raw()));
    }
    (count, asking)
}

#[test]
fn bursts_are_sent_whole_with_regular_ack_requests() {
    // The bursts do not depend on the number of packets in each plan.
    for max_packets in [1, 4, 15, 100] {
        bursts_made_in_parts_of(max_packets);
    }
}

fn bursts_made_in_parts_of(max_packets: u32) {
    let mut r = requester_with(0, 250);
    r.congestion.on_ack(1000);
    push(&mut r, Kind::Write, 500);
    // The window has room for ten more packets, which are less than a burst.
    assert_eq!(asking(&mut r, max_packets), (240, vec![59, 119, 179, 239]));
    r.on_ack(Psn::new(4), 1);
    assert_eq!(asking(&mut r, max_packets), (0, vec![]), "the window has room for 14");
    r.on_ack(Psn::new(5), 2);
    assert_eq!(asking(&mut r, max_packets), (15, vec![254]), "the window ends here");
    r.on_ack(Psn::new(240), 3);
    assert_eq!(asking(&mut r, max_packets), (225, vec![314, 374, 434]));
    r.on_ack(Psn::new(480), 4);
    // The last packets are sent although they are less than a burst.
    assert_eq!(asking(&mut r, max_packets), (20, vec![494, 499]));
}

#[test]
fn plan_never_mixes_new_and_retransmitted_packets() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 60);
    // The initial window has 32 packets.
    assert_eq!(asking(&mut r, 15), (32, vec![7, 15, 23, 31]));
    r.on_nak(Psn::new(29), Nak::Sequence, 1);
    let first = r.next(15).unwrap();
    assert_eq!((first.psn, first.count), (Psn::new(29), 3));
    assert!(r.sent(&first, 1), "again");
    let second = r.next(15).unwrap();
    assert_eq!(second.psn, Psn::new(32));
    assert!(!r.sent(&second, 1), "for the first time");
}

#[test]
fn last_packet_of_a_small_window_requests_an_ack() {
    let mut r = requester_with(0, 3);
    push(&mut r, Kind::Send, 8);
    assert_eq!(asking(&mut r, 1), (3, vec![0, 1, 2]));
    r.on_ack(Psn::new(1), 1);
    assert_eq!(asking(&mut r, 1), (1, vec![3]));
    let mut r = requester_with(0, 10);
    push(&mut r, Kind::Send, 30);
    assert_eq!(asking(&mut r, 1), (10, vec![1, 3, 5, 7, 9]));
    r.on_ack(Psn::new(1), 1);
    assert_eq!(asking(&mut r, 1), (0, vec![]), "a burst has two packets");
    r.on_ack(Psn::new(2), 1);
    assert_eq!(asking(&mut r, 1), (2, vec![11]));
}

#[test]
fn read_segments_keep_their_borders_when_repeated() {
    let mut r = requester(0);
    push(&mut r, Kind::Read, 100);
    push(&mut r, Kind::Atomic, 1);
    // The initial window has 32 packets.
    assert_eq!(send(&mut r, 0), [(0, 32)]);
    for psn in 0..5 {
        let response = r.response(Psn::new(psn));
        assert!(matches!(response, Response::Next { request: 0, packet } if packet == psn));
        r.on_response(Psn::new(psn), 1);
    }
    assert_eq!(r.response(Psn::new(3)), Response::Stray);
    assert_eq!(r.response(Psn::new(6)), Response::Ahead);
    assert_eq!(r.response(Psn::new(900)), Response::Stray);
    let more = send(&mut r, 1);
    assert_eq!((more.len(), more[0].0), (1, 32));
    r.on_response_gap(2);
    assert_eq!(send(&mut r, 2), [(5, 27)], "a repeated READ ends at the segment's border");
    for psn in 5..20 {
        r.on_response(Psn::new(psn), 3);
    }
    assert_eq!(send(&mut r, 3), more);
    // An ACK of a later PSN means that the remaining responses were lost.
    for psn in 20..40 {
        r.on_response(Psn::new(psn), 4);
    }
    r.on_ack(Psn::new(32 + more[0].1), 5);
    assert_eq!(retired(&mut r), 0);
    assert_eq!(send(&mut r, 5)[0], (40, 32 + more[0].1 - 40));
}

#[test]
fn connection_fails_after_all_retries() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 1);
    push(&mut r, Kind::Write, 1);
    send(&mut r, 1000);
    let mut timeouts = 0;
    while let Some(at) = r.deadline() {
        timeouts += r.on_timer(at) as u32;
        send(&mut r, at);
        assert!(at <= 1000 + 3 * timeout_ns(14));
    }
    assert!(timeouts >= 3);
    assert!(matches!(r.retire(), Some(Retired::Failed(_, Syndrome::RetryExceeded, 0))));
    assert!(r.flush().is_some() && r.flush().is_none());
}

#[test]
fn rnr_nak_delays_the_retransmission() {
    let mut r = requester(0);
    push(&mut r, Kind::Send, 1);
    push(&mut r, Kind::Send, 1);
    send(&mut r, 0);
    r.on_rnr_nak(Psn::new(0), 14, 100);
    assert_eq!((send(&mut r, 100).len(), r.deadline()), (0, Some(1_280_100)));
    assert!(!r.on_timer(1_280_100));
    assert_eq!(send(&mut r, 1_280_100), [(0, 1), (1, 1)]);
    // Progress of the first request resets the retries for the second.
    r.on_ack(Psn::new(1), 1_280_200);
    for round in 0..2 {
        r.on_rnr_nak(Psn::new(1), 1, 2_000_000);
        r.on_timer(3_000_000);
        assert_eq!(send(&mut r, 3_000_000).len(), 1 - round);
    }
    assert_eq!(retired_one(&mut r), None);
    assert_eq!(retired_one(&mut r), Some(Syndrome::RnrRetryExceeded));
}

fn retired_one(r: &mut Requester) -> Option<Syndrome> {
    match r.retire().expect("a request has ended") {
        Retired::Done(_) => None,
        Retired::Failed(_, syndrome, _) => Some(syndrome),
    }
}

#[test]
fn nak_fails_only_its_request() {
    for (nak, syndrome) in [
        (Nak::InvalidRequest, Syndrome::RemoteInvalidRequest),
        (Nak::RemoteAccess, Syndrome::RemoteAccess),
        (Nak::RemoteOperation, Syndrome::RemoteOperation),
    ] {
        let mut r = requester(0);
        for kind in [Kind::Write, Kind::Local, Kind::Write, Kind::Write] {
            push(&mut r, kind, (kind != Kind::Local) as u32);
        }
        send(&mut r, 0);
        r.on_nak(Psn::new(1), nak, 1);
        let ended = [0; 3].map(|_| retired_one(&mut r));
        assert_eq!(ended, [None, None, Some(syndrome)]);
    }
}

#[test]
fn requester_room_is_limited_by_wqe_blocks() {
    let mut r = requester(0);
    let mut pushed = 0;
    while r.has_room(16) {
        r.push(Request::new(Kind::Write, 1, 1), &[7; 4 * 64]);
        send(&mut r, 0);
        pushed += 1;
    }
    // Of 32 blocks 20 are used: a WQE of 16 blocks no longer fits.
    assert_eq!(pushed, 5);
    let mut wqe = [0; 1024];
    r.wqe(4, &mut wqe);
    assert_eq!((wqe[..256] == [7; 256], wqe[256]), (true, 0));
    r.on_ack(Psn::new(5), 1);
    assert_eq!(retired(&mut r), 5);
    assert!(r.has_room(16));
}

#[test]
fn requester_room_is_limited_by_requests_and_psns() {
    let mut r = requester(0);
    let capacity = r.requests.capacity();
    for n in 0..capacity {
        assert!(r.has_room(1), "{n} of {capacity}");
        push(&mut r, Kind::Write, 1);
        send(&mut r, 0);
    }
    assert!(!r.has_room(1));
    // The PSNs of outstanding requests must span less than half of the PSN space.
    let mut r = requester(9);
    r.assigned = r.una.plus(SPAN_MAX - 1);
    assert!(r.has_room(1));
    r.assigned = r.una.plus(SPAN_MAX);
    assert!(!r.has_room(1));
}

#[test]
fn answer_is_awaited_until_the_last_ack() {
    let mut r = requester(3);
    assert!(!r.awaits_answer());
    push(&mut r, Kind::Write, 2);
    assert!(!r.awaits_answer());
    send(&mut r, 0);
    assert!(r.awaits_answer());
    r.on_ack(Psn::new(4), 1);
    assert!(r.awaits_answer());
    r.on_ack(Psn::new(5), 2);
    assert!(!r.awaits_answer());
}

/// A local key becomes invalid after the peer has executed the request, but before its ACK arrives.
#[test]
fn acknowledged_request_completes_despite_a_later_fault() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 1);
    send(&mut r, 0);
    r.fault(0, Syndrome::LocalProtection, 3);
    r.on_ack(Psn::new(1), 1);
    assert_eq!(retired_one(&mut r), None);
    // A request without packets is not executed by the peer: its fault counts.
    let mut failed = Request::new(Kind::Local, 0, 0);
    failed.fault = Some((Syndrome::LocalProtection, 3));
    r.push(failed, &[]);
    assert_eq!(retired_one(&mut r), Some(Syndrome::LocalProtection));
}

#[test]
fn fault_failure_or_rnr_delay_stops_sending() {
    let reasons: [fn(&mut Requester); 3] = [
        |r| r.fault(0, Syndrome::LocalProtection, 0),
        |r| r.failed = Some(Syndrome::RetryExceeded),
        |r| r.rnr_until = Some(1),
    ];
    for (n, stop) in reasons.into_iter().enumerate() {
        let mut r = requester(0);
        push(&mut r, Kind::Write, 1);
        assert!(r.next(1).is_some());
        stop(&mut r);
        assert_eq!(r.next(1), None, "reason {n}");
    }
}

/// A READ waits while the window has little room, so that it is requested in few segments.
#[test]
fn read_waits_for_a_quarter_of_the_window() {
    for (before, segment) in [(0, Some(16)), (24, Some(8)), (25, None), (31, None)] {
        // The initial window has 32 packets.
        let mut r = requester(0);
        push(&mut r, Kind::Write, before.max(1));
        if before > 0 {
            send(&mut r, 0);
        } else {
            send(&mut r, 0);
            r.on_ack(Psn::new(1), 0);
        }
        push(&mut r, Kind::Read, 16);
        assert_eq!(r.next(1).map(|plan| plan.count), segment, "{before} in flight");
    }
}

#[test]
fn round_trip_is_measured_by_packets_with_ack_request() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 12);
    let first = r.next(3).unwrap();
    assert_eq!((first.count, first.ack), (3, false));
    r.sent(&first, 5);
    assert_eq!(r.probe, None, "the packet requests no ACK");
    let second = r.next(5).unwrap();
    assert_eq!((second.count, second.ack), (5, true));
    r.sent(&second, 6);
    assert_eq!(r.probe, Some((Psn::new(7), 6)));
    let third = r.next(4).unwrap();
    assert!(third.ack);
    r.sent(&third, 7);
    assert_eq!(r.probe, Some((Psn::new(7), 6)), "one probe at a time");
    r.on_ack(Psn::new(7), 8);
    assert!(r.probe.is_some());
    r.on_ack(Psn::new(8), 9);
    assert_eq!(r.probe, None);
    // The first response packet of a READ ends the measurement.
    let mut r = requester(0);
    push(&mut r, Kind::Read, 8);
    send(&mut r, 3);
    assert_eq!(r.probe, Some((Psn::new(0), 3)));
}

#[test]
fn response_without_request_is_stray() {
    let mut r = requester(0);
    push(&mut r, Kind::Read, 8);
    send(&mut r, 0);
    assert_eq!(r.response(Psn::new(7)), Response::Ahead);
    assert_eq!(r.response(Psn::new(8)), Response::Stray);
}

#[test]
fn rnr_nak_counts_once_per_delay() {
    let mut r = requester(0);
    push(&mut r, Kind::Send, 2);
    send(&mut r, 0);
    // An RNR NAK for a packet that was never sent.
    r.on_rnr_nak(Psn::new(2), 14, 50);
    assert_eq!((r.rnr_until, r.rnr_left), (None, 1));
    r.on_rnr_nak(Psn::new(0), 14, 100);
    assert_eq!((r.rnr_until, r.rnr_left), (Some(1_280_100), 0));
    // The same RNR NAK again during the delay.
    r.on_rnr_nak(Psn::new(0), 14, 200);
    assert_eq!((r.rnr_until, r.rnr_left, r.failed), (Some(1_280_100), 0, None));
}

#[test]
fn recovery_ends_when_all_packets_in_flight_are_acked() {
    let mut r = requester(0);
    push(&mut r, Kind::Send, 8);
    send(&mut r, 0);
    r.on_nak(Psn::new(3), Nak::Sequence, 5);
    assert_eq!(r.recovery_end, Some(Psn::new(8)));
    send(&mut r, 5);
    r.on_ack(Psn::new(7), 6);
    assert_eq!(r.recovery_end, Some(Psn::new(8)));
    r.on_ack(Psn::new(8), 7);
    assert_eq!(r.recovery_end, None);
}

#[test]
fn read_segment_has_at_most_240_kib() {
    let mut r = requester_with(0, 1000);
    r.congestion.on_ack(1000);
    push(&mut r, Kind::Read, 500);
    assert_eq!(send(&mut r, 0), [(0, 240), (240, 240)]);
}

#[test]
fn only_psns_in_flight_are_expected() {
    let mut r = requester(0xff_fffe);
    push(&mut r, Kind::Write, 4);
    assert_eq!(send(&mut r, 0).len(), 4);
    let fits = |r: &Requester, psn| r.fit(Psn::new(psn)) == PsnFit::Expected;
    for psn in [0xff_fffe, 0xff_ffff, 0, 1] {
        assert!(fits(&r, psn), "{psn:x} is in flight");
    }
    assert!(!fits(&r, 2) && !fits(&r, 0xff_fffd));
}

/// An ACK of all requests before a READ does not concern its result.
#[test]
fn ack_up_to_a_read_is_no_loss_of_its_result() {
    let mut r = requester(10);
    push(&mut r, Kind::Write, 1);
    push(&mut r, Kind::Read, 2);
    assert_eq!(send(&mut r, 0), [(10, 1), (11, 2)]);
    r.on_ack(Psn::new(11), 5);
    assert_eq!((retired(&mut r), send(&mut r, 5)), (1, vec![]));
    r.on_ack(Psn::new(12), 6);
    assert_eq!(send(&mut r, 6), [(11, 2)], "the ACK shows that the result was lost");
}
