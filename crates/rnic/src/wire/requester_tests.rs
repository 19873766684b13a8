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
