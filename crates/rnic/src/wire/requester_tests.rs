//! The requester without packets: sequence numbers, windows, timers.

use super::*;
use crate::ids::Qpn;

const MTU: u32 = 1024;

fn requester(psn: u32) -> Requester {
    requester_with(psn, 64)
}

/// With a window of so many packets at most.
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

/// Sends all that may be sent: (PSN, count) of each.
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
fn an_acknowledgement_covers_what_came_before_it() {
    let mut r = requester(0xff_fffe);
    for _ in 0..3 {
        push(&mut r, Kind::Write, 2);
    }
    assert_eq!(send(&mut r, 0), [0xff_fffe, 0xff_ffff, 0, 1, 2, 3].map(|p| (p, 1)));
    assert_eq!(r.deadline(), Some(20_000_000));
    r.acknowledged(Psn::new(1), 10);
    assert_eq!(retired(&mut r), 1);
    // Older, or of what was never sent.
    r.acknowledged(Psn::new(0), 11);
    r.acknowledged(Psn::new(5), 11);
    assert_eq!(retired(&mut r), 0);
    r.acknowledged(Psn::new(4), 12);
    assert_eq!((retired(&mut r), r.deadline(), r.is_empty()), (2, None, true));
}

#[test]
fn a_loss_is_mended_from_where_it_was() {
    let mut r = requester(10);
    push(&mut r, Kind::Send, 8);
    assert_eq!(send(&mut r, 0).len(), 8);
    r.refused(Psn::new(13), Nak::Sequence, 5);
    assert_eq!(send(&mut r, 5), [13, 14, 15, 16, 17].map(|p| (p, 1)));
    // The same again is one that was under way already.
    r.refused(Psn::new(13), Nak::Sequence, 6);
    assert_eq!(send(&mut r, 6), []);
    r.refused(Psn::new(15), Nak::Sequence, 7);
    assert_eq!(send(&mut r, 7), [15, 16, 17].map(|p| (p, 1)));
    r.acknowledged(Psn::new(18), 8);
    assert_eq!(retired(&mut r), 1);
}

/// What may be sent, at most `most` packets at a time, by the packets that ask for an acknowledgement.
fn asking(r: &mut Requester, most: u32) -> (u32, Vec<u32>) {
    let (mut count, mut asking) = (0, Vec::new());
    while let Some(plan) = r.next(most) {
        r.sent(&plan, 0);
        count += plan.count;
        asking.extend(plan.ack.then_some(plan.psn.plus(plan.count - 1).raw()));
    }
    (count, asking)
}

#[test]
fn bursts_are_sent_whole_and_an_acknowledgement_is_always_on_its_way() {
    // However they are made.
    for most in [1, 4, 15, 100] {
        bursts_made_in_parts_of(most);
    }
}

fn bursts_made_in_parts_of(most: u32) {
    let mut r = requester_with(0, 250);
    r.pace.progress(1000);
    push(&mut r, Kind::Write, 500);
    // Room for ten more would be there.
    assert_eq!(asking(&mut r, most), (240, vec![59, 119, 179, 239]));
    r.acknowledged(Psn::new(4), 1);
    assert_eq!(asking(&mut r, most), (0, vec![]), "14 have room now");
    r.acknowledged(Psn::new(5), 2);
    assert_eq!(asking(&mut r, most), (15, vec![254]), "the window ends here");
    r.acknowledged(Psn::new(240), 3);
    assert_eq!(asking(&mut r, most), (225, vec![314, 374, 434]));
    r.acknowledged(Psn::new(480), 4);
    // The last ones, though they are no burst.
    assert_eq!(asking(&mut r, most), (20, vec![494, 499]));
}

#[test]
fn what_is_sent_again_stays_apart_from_what_is_not() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 60);
    // The first window.
    assert_eq!(asking(&mut r, 15), (32, vec![7, 15, 23, 31]));
    r.refused(Psn::new(29), Nak::Sequence, 1);
    let first = r.next(15).unwrap();
    assert_eq!((first.psn, first.count), (Psn::new(29), 3));
    assert!(r.sent(&first, 1), "again");
    let second = r.next(15).unwrap();
    assert_eq!(second.psn, Psn::new(32));
    assert!(!r.sent(&second, 1), "for the first time");
}

#[test]
fn a_small_window_is_used_up_and_its_last_packet_asks() {
    let mut r = requester_with(0, 3);
    push(&mut r, Kind::Send, 8);
    assert_eq!(asking(&mut r, 1), (3, vec![0, 1, 2]));
    r.acknowledged(Psn::new(1), 1);
    assert_eq!(asking(&mut r, 1), (1, vec![3]));
    let mut r = requester_with(0, 10);
    push(&mut r, Kind::Send, 30);
    assert_eq!(asking(&mut r, 1), (10, vec![1, 3, 5, 7, 9]));
    r.acknowledged(Psn::new(1), 1);
    assert_eq!(asking(&mut r, 1), (0, vec![]), "two are what is waited for");
    r.acknowledged(Psn::new(2), 1);
    assert_eq!(asking(&mut r, 1), (2, vec![11]));
}

#[test]
fn reads_are_asked_for_in_segments_whose_borders_stay() {
    let mut r = requester(0);
    push(&mut r, Kind::Read, 100);
    push(&mut r, Kind::Atomic, 1);
    // A window of 32 packets at first.
    assert_eq!(send(&mut r, 0), [(0, 32)]);
    for psn in 0..5 {
        assert!(
            matches!(r.response(Psn::new(psn)), Response::Next { request: 0, packet } if packet == psn)
        );
        r.answered(Psn::new(psn), 1);
    }
    assert_eq!(r.response(Psn::new(3)), Response::Stray);
    assert_eq!(r.response(Psn::new(6)), Response::Ahead);
    assert_eq!(r.response(Psn::new(900)), Response::Stray);
    let more = send(&mut r, 1);
    assert_eq!((more.len(), more[0].0), (1, 32));
    r.gap(2);
    assert_eq!(send(&mut r, 2), [(5, 27)], "no segment reaches over another's border");
    for psn in 5..20 {
        r.answered(Psn::new(psn), 3);
    }
    assert_eq!(send(&mut r, 3), more);
    // An acknowledgement of what lies behind says that the rest was lost.
    for psn in 20..40 {
        r.answered(Psn::new(psn), 4);
    }
    r.acknowledged(Psn::new(32 + more[0].1), 5);
    assert_eq!(retired(&mut r), 0);
    assert_eq!(send(&mut r, 5)[0], (40, 32 + more[0].1 - 40));
}

#[test]
fn who_is_asked_in_vain_is_given_up() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 1);
    push(&mut r, Kind::Write, 1);
    send(&mut r, 1000);
    let mut timeouts = 0;
    while let Some(at) = r.deadline() {
        timeouts += r.on_time(at) as u32;
        send(&mut r, at);
        assert!(at <= 1000 + 3 * timeout_ns(14));
    }
    assert!(timeouts >= 3);
    assert!(matches!(r.retire(), Some(Retired::Failed(_, Syndrome::RetryExceeded, 0))));
    assert!(r.flush().is_some() && r.flush().is_none());
}

#[test]
fn who_is_not_ready_is_asked_again_later() {
    let mut r = requester(0);
    push(&mut r, Kind::Send, 1);
    push(&mut r, Kind::Send, 1);
    send(&mut r, 0);
    r.not_ready(Psn::new(0), 14, 100);
    assert_eq!((send(&mut r, 100).len(), r.deadline()), (0, Some(1_280_100)));
    assert!(!r.on_time(1_280_100));
    assert_eq!(send(&mut r, 1_280_100), [(0, 1), (1, 1)]);
    // The first one's progress gives the second its retries.
    r.acknowledged(Psn::new(1), 1_280_200);
    for round in 0..2 {
        r.not_ready(Psn::new(1), 1, 2_000_000);
        r.on_time(3_000_000);
        assert_eq!(send(&mut r, 3_000_000).len(), 1 - round);
    }
    assert_eq!(retired_one(&mut r), None);
    assert_eq!(retired_one(&mut r), Some(Syndrome::RnrRetryExceeded));
}

fn retired_one(r: &mut Requester) -> Option<Syndrome> {
    match r.retire().expect("one has ended") {
        Retired::Done(_) => None,
        Retired::Failed(_, syndrome, _) => Some(syndrome),
    }
}

#[test]
fn a_refusal_fails_its_request_and_no_other() {
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
        r.refused(Psn::new(1), nak, 1);
        let ended = [0; 3].map(|_| retired_one(&mut r));
        assert_eq!(ended, [None, None, Some(syndrome)]);
    }
}

#[test]
fn room_is_what_the_ring_has() {
    let mut r = requester(0);
    let mut pushed = 0;
    while r.has_room(16) {
        r.push(Request::new(Kind::Write, 1, 1), &[7; 4 * 64]);
        send(&mut r, 0);
        pushed += 1;
    }
    // 32 blocks: the longest WQE would no longer fit.
    assert_eq!(pushed, 5);
    let mut wqe = [0; 1024];
    r.wqe(4, &mut wqe);
    assert_eq!((wqe[..256] == [7; 256], wqe[256]), (true, 0));
    r.acknowledged(Psn::new(5), 1);
    assert_eq!(retired(&mut r), 5);
    assert!(r.has_room(16));
}

#[test]
fn there_is_room_for_so_many_requests_and_psns_and_no_more() {
    let mut r = requester(0);
    let most = r.requests.capacity();
    for n in 0..most {
        assert!(r.has_room(1), "{n} of {most}");
        push(&mut r, Kind::Write, 1);
        send(&mut r, 0);
    }
    assert!(!r.has_room(1));
    // PSNs of half a circle would be as far ahead as behind.
    let mut r = requester(9);
    r.assigned = r.una.plus(SPAN_MAX - 1);
    assert!(r.has_room(1));
    r.assigned = r.una.plus(SPAN_MAX);
    assert!(!r.has_room(1));
}

#[test]
fn an_answer_is_awaited_from_the_first_packet_to_the_last_acknowledgement() {
    let mut r = requester(3);
    assert!(!r.awaits_answer());
    push(&mut r, Kind::Write, 2);
    assert!(!r.awaits_answer());
    send(&mut r, 0);
    assert!(r.awaits_answer());
    r.acknowledged(Psn::new(4), 1);
    assert!(r.awaits_answer());
    r.acknowledged(Psn::new(5), 2);
    assert!(!r.awaits_answer());
}

/// A key ends after the peer has executed the request and before it says so.
#[test]
fn what_the_peer_has_done_is_done_whatever_was_found_wrong_since() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 1);
    send(&mut r, 0);
    r.fault(0, Syndrome::LocalProtection, 3);
    r.acknowledged(Psn::new(1), 1);
    assert_eq!(retired_one(&mut r), None);
    // Without packets there is nothing that the peer could have done.
    let mut failed = Request::new(Kind::Local, 0, 0);
    failed.fault = Some((Syndrome::LocalProtection, 3));
    r.push(failed, &[]);
    assert_eq!(retired_one(&mut r), Some(Syndrome::LocalProtection));
}

#[test]
fn each_of_three_reasons_stops_what_is_sent() {
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

/// A READ waits where the window has little room, so that it is asked for in few segments.
#[test]
fn a_read_waits_for_a_quarter_of_the_window_unless_nothing_is_in_flight() {
    for (before, segment) in [(0, Some(16)), (24, Some(8)), (25, None), (31, None)] {
        // A window of 32 packets at first.
        let mut r = requester(0);
        push(&mut r, Kind::Write, before.max(1));
        if before > 0 {
            send(&mut r, 0);
        } else {
            send(&mut r, 0);
            r.acknowledged(Psn::new(1), 0);
        }
        push(&mut r, Kind::Read, 16);
        assert_eq!(r.next(1).map(|plan| plan.count), segment, "{before} in flight");
    }
}

#[test]
fn the_round_trip_is_measured_by_the_last_packet_that_asks() {
    let mut r = requester(0);
    push(&mut r, Kind::Write, 12);
    let first = r.next(3).unwrap();
    assert_eq!((first.count, first.ack), (3, false));
    r.sent(&first, 5);
    assert_eq!(r.probe, None, "it asks for nothing");
    let second = r.next(5).unwrap();
    assert_eq!((second.count, second.ack), (5, true));
    r.sent(&second, 6);
    assert_eq!(r.probe, Some((Psn::new(7), 6)));
    let third = r.next(4).unwrap();
    assert!(third.ack);
    r.sent(&third, 7);
    assert_eq!(r.probe, Some((Psn::new(7), 6)), "one at a time");
    r.acknowledged(Psn::new(7), 8);
    assert!(r.probe.is_some());
    r.acknowledged(Psn::new(8), 9);
    assert_eq!(r.probe, None);
    // A READ's first packet is what comes back first.
    let mut r = requester(0);
    push(&mut r, Kind::Read, 8);
    send(&mut r, 3);
    assert_eq!(r.probe, Some((Psn::new(0), 3)));
}

#[test]
fn an_answer_to_what_was_not_sent_is_a_stray() {
    let mut r = requester(0);
    push(&mut r, Kind::Read, 8);
    send(&mut r, 0);
    assert_eq!(r.response(Psn::new(7)), Response::Ahead);
    assert_eq!(r.response(Psn::new(8)), Response::Stray);
}

#[test]
fn an_rnr_nak_counts_once_for_a_wait() {
    let mut r = requester(0);
    push(&mut r, Kind::Send, 2);
    send(&mut r, 0);
    // Of what was never sent.
    r.not_ready(Psn::new(2), 14, 50);
    assert_eq!((r.rnr_until, r.rnr_left), (None, 1));
    r.not_ready(Psn::new(0), 14, 100);
    assert_eq!((r.rnr_until, r.rnr_left), (Some(1_280_100), 0));
    // The same once more, while it waits.
    r.not_ready(Psn::new(0), 14, 200);
    assert_eq!((r.rnr_until, r.rnr_left, r.failed), (Some(1_280_100), 0, None));
}

#[test]
fn a_loss_is_mended_when_all_that_was_in_flight_has_arrived() {
    let mut r = requester(0);
    push(&mut r, Kind::Send, 8);
    send(&mut r, 0);
    r.refused(Psn::new(3), Nak::Sequence, 5);
    assert_eq!(r.mending, Some(Psn::new(8)));
    send(&mut r, 5);
    r.acknowledged(Psn::new(7), 6);
    assert_eq!(r.mending, Some(Psn::new(8)));
    r.acknowledged(Psn::new(8), 7);
    assert_eq!(r.mending, None);
}

#[test]
fn a_read_is_asked_for_by_240_kib_at_a_time() {
    let mut r = requester_with(0, 1000);
    r.pace.progress(1000);
    push(&mut r, Kind::Read, 500);
    assert_eq!(send(&mut r, 0), [(0, 240), (240, 240)]);
}

#[test]
fn answers_to_what_is_in_flight_fit_and_others_do_not() {
    let mut r = requester(0xff_fffe);
    push(&mut r, Kind::Write, 4);
    assert_eq!(send(&mut r, 0).len(), 4);
    let fits = |r: &Requester, psn| r.fit(Psn::new(psn)) == Fit::Expected;
    for psn in [0xff_fffe, 0xff_ffff, 0, 1] {
        assert!(fits(&r, psn), "{psn:x} is in flight");
    }
    assert!(!fits(&r, 2) && !fits(&r, 0xff_fffd));
}

/// The acknowledgement of all before a READ says nothing of its result.
#[test]
fn an_acknowledgement_up_to_a_read_is_no_loss_of_its_result() {
    let mut r = requester(10);
    push(&mut r, Kind::Write, 1);
    push(&mut r, Kind::Read, 2);
    assert_eq!(send(&mut r, 0), [(10, 1), (11, 2)]);
    r.acknowledged(Psn::new(11), 5);
    assert_eq!((retired(&mut r), send(&mut r, 5)), (1, vec![]));
    r.acknowledged(Psn::new(12), 6);
    assert_eq!(send(&mut r, 6), [(11, 2)], "the result is missing, says the peer");
}
