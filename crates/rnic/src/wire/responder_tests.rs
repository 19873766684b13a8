//! Tests of the responder without packets: duplicates, gaps, the order of responses.

use super::*;
use verbs::{Key, Qpn};

fn responder(psn: u32) -> Responder {
    let mut peer =
        RemotePeer::new("10.0.0.2:4791".parse().unwrap(), "10.0.0.1".parse().unwrap(), Qpn::new(9));
    peer.rq_psn = Psn::new(psn);
    peer.max_dest_rd_atomic = 2;
    Responder::new(&peer, 64)
}

fn at(addr: u64) -> Remote {
    Remote { addr, rkey: Key(1) }
}

/// Sends all responses. Returns their PSNs, and the syndromes of responses without data.
fn answers(r: &mut Responder) -> Vec<(u32, Option<Syndrome>)> {
    let mut sent = Vec::new();
    loop {
        match r.output() {
            Some(Output::Read { psn, .. }) => {
                r.read_sent(1);
                sent.push((psn.raw(), None));
            }
            Some(Output::Atomic { psn, .. }) => {
                r.pop_output();
                sent.push((psn.raw(), None));
            }
            Some(Output::Refusal { .. }) => panic!("no request is rejected in this test"),
            None => match r.take_reply() {
                Some((psn, says)) => sent.push((psn.raw(), Some(says))),
                None => return sent,
            },
        }
    }
}

const ACK: Option<Syndrome> = Some(Syndrome::Ack(31));

#[test]
fn acks_are_merged() {
    let mut r = responder(0xff_ffff);
    for psn in [0xff_ffff, 0, 1] {
        assert_eq!(r.arrival(Psn::new(psn)), Arrival::Expected);
        r.accepted(1, true, Answer::Ack);
    }
    assert_eq!(answers(&mut r), [(1, ACK)]);
    assert_eq!(r.msn(), 3);
    assert_eq!(r.arrival(Psn::new(0)), Arrival::Duplicate);
    r.acknowledge();
    assert_eq!(answers(&mut r), [(1, ACK)]);
}

#[test]
fn gap_is_nakked_once() {
    let mut r = responder(5);
    for psn in 6..9 {
        assert_eq!(r.arrival(Psn::new(psn)), Arrival::Ahead);
    }
    let gap = Some(Syndrome::Nak(Nak::Sequence));
    assert_eq!(answers(&mut r), [(5, gap)]);
    r.arrival(Psn::new(7));
    assert_eq!(answers(&mut r), []);
    assert_eq!(r.arrival(Psn::new(5)), Arrival::Expected);
    r.accepted(1, true, Answer::Nothing);
    r.arrival(Psn::new(7));
    // The gap is filled before the NAK was sent.
    assert_eq!(r.arrival(Psn::new(6)), Arrival::Expected);
    r.accepted(1, true, Answer::Ack);
    assert_eq!(answers(&mut r), [(6, ACK)]);
}

#[test]
fn repeated_reads_are_answered_in_psn_order() {
    let mut r = responder(0);
    r.arrival(Psn::new(0));
    r.read(at(0), 5000);
    r.accepted(5, true, Answer::Data);
    r.arrival(Psn::new(5));
    r.atomic(77);
    r.accepted(1, true, Answer::Data);
    assert!(!r.has_room());
    r.read_sent(2);
    // Repeated requests for queued responses have no effect. The repeated READ from PSN 1 on sends
    // the packets that were already sent once more, then the rest.
    r.repeat_read(Psn::new(3), at(3072), 5000 - 3072);
    r.repeat_atomic(Psn::new(5));
    r.repeat_read(Psn::new(1), at(1024), 5000 - 1024);
    let want: Vec<_> = (1..6).map(|p| (p, None)).collect();
    assert_eq!(answers(&mut r), want);
    // A READ beyond the requested range, and an atomic where a READ was requested.
    r.repeat_read(Psn::new(4), at(0), 5000);
    r.repeat_atomic(Psn::new(2));
    assert_eq!(answers(&mut r), []);
    r.repeat_atomic(Psn::new(5));
    assert_eq!(r.output(), Some(Output::Atomic { psn: Psn::new(5), old: 77 }));
    assert!(r.has_room(), "repeated responses do not count against the limit of new ones");
    // The number of repeated responses is limited, too.
    for psn in 0..4 {
        r.repeat_read(Psn::new(psn), at(0), 1);
    }
    assert_eq!(answers(&mut r).len(), 2);
}

/// Soft-RoCE takes an ACK with the PSN of a READ or atomic for its completion, even if no data has
/// arrived.
#[test]
fn read_and_atomic_are_never_acked_without_data() {
    let mut r = responder(0);
    r.accepted(1, true, Answer::Ack);
    r.atomic(7);
    r.accepted(1, true, Answer::Data);
    assert_eq!(answers(&mut r), [(1, None)], "the data acknowledges the SEND before it");
    // The SEND before it is repeated: the peer may have missed the data.
    assert_eq!(r.arrival(Psn::new(0)), Arrival::Duplicate);
    r.acknowledge();
    assert_eq!(answers(&mut r), [(0, ACK)]);
    r.read(at(0), 5000);
    r.accepted(5, true, Answer::Data);
    answers(&mut r);
    r.acknowledge();
    assert_eq!(answers(&mut r), [(0, ACK)]);
    // No ACK is sent after data that implies it.
    r.acknowledge();
    r.repeat_atomic(Psn::new(1));
    r.acknowledge();
    assert_eq!(answers(&mut r), [(1, None)]);
    // A request after the atomic may be acknowledged: this tells a peer without the data that it
    // was lost.
    r.accepted(1, true, Answer::Ack);
    assert_eq!(answers(&mut r), [(7, ACK)]);
    // No ACK with a PSN at a distance of half the PSN space, which could be taken for a later one.
    for _ in 0..2 {
        r.accepted(1 << 22, true, Answer::Data);
    }
    r.acknowledge();
    assert_eq!(answers(&mut r), []);
}

#[test]
fn atomic_results_are_kept_while_they_may_be_repeated() {
    let mut r = responder(0);
    for old in 0..3 {
        r.atomic(old);
        r.accepted(1, true, Answer::Data);
        answers(&mut r);
    }
    r.repeat_atomic(Psn::new(0));
    assert_eq!(
        answers(&mut r),
        [],
        "at most two are outstanding, so the peer cannot repeat this one"
    );
    r.repeat_atomic(Psn::new(1));
    assert_eq!(r.output(), Some(Output::Atomic { psn: Psn::new(1), old: 1 }));
}

#[test]
fn recurring_psn_has_the_latest_atomic_result() {
    let mut r = responder(9);
    r.atomic(1);
    r.accepted(1, true, Answer::Data);
    // Advance by the whole PSN space.
    for _ in 0..4 {
        r.accepted(1 << 22, true, Answer::Nothing);
    }
    r.accepted(Psn::MAX, true, Answer::Nothing);
    answers(&mut r);
    r.atomic(2);
    r.accepted(1, true, Answer::Data);
    answers(&mut r);
    r.repeat_atomic(Psn::new(9));
    assert_eq!(r.output(), Some(Output::Atomic { psn: Psn::new(9), old: 2 }));
}

#[test]
fn nak_of_a_rejected_request_is_repeated() {
    let mut r = responder(3);
    r.arrival(Psn::new(3));
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    r.arrival(Psn::new(4));
    r.reject(Nak::RemoteAccess);
    r.close();
    let nak = Some(Syndrome::Nak(Nak::RemoteAccess));
    assert_eq!(answers(&mut r), [(3, None), (4, nak)], "earlier requests are answered");
    r.repeat_nak(Psn::new(3));
    assert_eq!(answers(&mut r), []);
    r.repeat_nak(Psn::new(4));
    r.repeat_nak(Psn::new(6));
    assert_eq!(answers(&mut r), [(4, nak)]);
    // Without a rejected request a QP in the error state sends no response.
    let mut r = responder(3);
    r.acknowledge();
    r.close();
    r.repeat_nak(Psn::new(3));
    assert_eq!(answers(&mut r), []);
}

#[test]
fn repeated_read_keeps_the_nak_of_a_gap() {
    let mut r = responder(0);
    r.accepted(1, true, Answer::Ack);
    answers(&mut r);
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    answers(&mut r);
    assert_eq!(r.arrival(Psn::new(5)), Arrival::Ahead);
    r.repeat_read(Psn::new(1), at(0), 10);
    let gap = Some(Syndrome::Nak(Nak::Sequence));
    assert_eq!(answers(&mut r), [(1, None), (2, gap)]);
}

#[test]
fn repeated_read_does_not_replace_a_later_ack() {
    let mut r = responder(0);
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    answers(&mut r);
    r.accepted(1, true, Answer::Ack);
    // The data of the READ does not acknowledge the later WRITE.
    r.repeat_read(Psn::new(0), at(0), 10);
    assert_eq!(answers(&mut r), [(0, None), (1, ACK)]);
}

#[test]
fn qp_in_error_drops_queued_responses() {
    let mut r = responder(0);
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    r.acknowledge();
    assert!(r.has_output());
    r.close();
    assert!(!r.has_output());
    assert_eq!(answers(&mut r), []);
}

/// The repeated READ begins before the queued part of the response and ends within it. The queued
/// part must still be sent whole.
#[test]
fn partly_repeated_read_keeps_the_queued_response() {
    let mut r = responder(0);
    r.read(at(0), 6 * 1024);
    r.accepted(6, true, Answer::Data);
    r.read_sent(2);
    r.repeat_read(Psn::new(1), at(1024), 3 * 1024);
    assert_eq!(answers(&mut r), [(2, None), (3, None), (4, None), (5, None)]);
}

#[test]
fn atomic_result_requested_twice_is_sent_once() {
    let mut r = responder(0);
    for old in [7, 8] {
        r.atomic(old);
        r.accepted(1, true, Answer::Data);
    }
    answers(&mut r);
    for _ in 0..2 {
        r.repeat_atomic(Psn::new(1));
    }
    r.repeat_atomic(Psn::new(0));
    assert_eq!(answers(&mut r), [(0, None), (1, None)]);
}
