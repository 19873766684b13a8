//! The responder without packets: duplicates, gaps, the order of answers.

use super::*;
use crate::ids::{Key, Qpn};

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

/// Sends everything: PSNs, and what acknowledgements say.
fn answers(r: &mut Responder) -> Vec<(u32, Option<Syndrome>)> {
    let mut all = Vec::new();
    loop {
        match r.output() {
            Some(Output::Read { psn, .. }) => {
                r.read_sent(1);
                all.push((psn.raw(), None));
            }
            Some(Output::Atomic { psn, .. }) => {
                r.atomic_sent();
                all.push((psn.raw(), None));
            }
            Some(Output::Refusal { .. }) => panic!("nothing is refused here"),
            None => match r.take_reply() {
                Some((psn, says)) => all.push((psn.raw(), Some(says))),
                None => return all,
            },
        }
    }
}

const ACK: Option<Syndrome> = Some(Syndrome::Ack(31));

#[test]
fn acknowledgements_are_gathered() {
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
fn a_gap_is_told_once_until_it_is_filled() {
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
    // It is filled before the NAK has left.
    assert_eq!(r.arrival(Psn::new(6)), Arrival::Expected);
    r.accepted(1, true, Answer::Ack);
    assert_eq!(answers(&mut r), [(6, ACK)]);
}

#[test]
fn reads_are_answered_in_order_and_again_from_where_it_is_asked() {
    let mut r = responder(0);
    r.arrival(Psn::new(0));
    r.read(at(0), 5000);
    r.accepted(5, true, Answer::Data);
    r.arrival(Psn::new(5));
    r.atomic(77);
    r.accepted(1, true, Answer::Data);
    assert!(!r.has_room());
    r.read_sent(2);
    // What is still to come is not asked for twice; what was sent comes once more, then the rest.
    r.read_again(Psn::new(3), at(3072), 5000 - 3072);
    r.atomic_again(Psn::new(5));
    r.read_again(Psn::new(1), at(1024), 5000 - 1024);
    let want: Vec<_> = (1..6).map(|p| (p, None)).collect();
    assert_eq!(answers(&mut r), want);
    // Beyond what was ever asked, or across it.
    r.read_again(Psn::new(4), at(0), 5000);
    r.atomic_again(Psn::new(2));
    assert_eq!(answers(&mut r), []);
    r.atomic_again(Psn::new(5));
    assert_eq!(r.output(), Some(Output::Atomic { psn: Psn::new(5), old: 77 }));
    assert!(r.has_room(), "what is repeated takes no place from what is new");
    // No more than agreed is repeated at once.
    for psn in 0..4 {
        r.read_again(Psn::new(psn), at(0), 1);
    }
    assert_eq!(answers(&mut r).len(), 2);
}

/// Soft-RoCE takes an acknowledgement with the PSN of a READ or atomic for its end, also if the data never came.
#[test]
fn what_is_answered_with_data_is_never_acknowledged_without() {
    let mut r = responder(0);
    r.accepted(1, true, Answer::Ack);
    r.atomic(7);
    r.accepted(1, true, Answer::Data);
    assert_eq!(answers(&mut r), [(1, None)], "and that acknowledges what is before it");
    // A SEND before it comes again: its sender may have the one answer, and not the other.
    assert_eq!(r.arrival(Psn::new(0)), Arrival::Duplicate);
    r.acknowledge();
    assert_eq!(answers(&mut r), [(0, ACK)]);
    r.read(at(0), 5000);
    r.accepted(5, true, Answer::Data);
    answers(&mut r);
    r.acknowledge();
    assert_eq!(answers(&mut r), [(0, ACK)]);
    // Nor behind data that acknowledges more.
    r.acknowledge();
    r.atomic_again(Psn::new(1));
    r.acknowledge();
    assert_eq!(answers(&mut r), [(1, None)]);
    // What is behind it may be: who misses the data is told so by that.
    r.accepted(1, true, Answer::Ack);
    assert_eq!(answers(&mut r), [(7, ACK)]);
    // Nor after half of the circle, where a PSN could be taken for a later one.
    for _ in 0..2 {
        r.accepted(1 << 22, true, Answer::Data);
    }
    r.acknowledge();
    assert_eq!(answers(&mut r), []);
}

#[test]
fn results_are_kept_as_long_as_they_may_be_asked_for() {
    let mut r = responder(0);
    for old in 0..3 {
        r.atomic(old);
        r.accepted(1, true, Answer::Data);
        answers(&mut r);
    }
    r.atomic_again(Psn::new(0));
    assert_eq!(answers(&mut r), [], "two outstanding at most, so nobody waits for this one");
    r.atomic_again(Psn::new(1));
    assert_eq!(r.output(), Some(Output::Atomic { psn: Psn::new(1), old: 1 }));
}

#[test]
fn a_number_that_comes_again_has_the_latest_result() {
    let mut r = responder(9);
    r.atomic(1);
    r.accepted(1, true, Answer::Data);
    // Once around the circle.
    for _ in 0..4 {
        r.accepted(1 << 22, true, Answer::Nothing);
    }
    r.accepted(Psn::MAX, true, Answer::Nothing);
    answers(&mut r);
    r.atomic(2);
    r.accepted(1, true, Answer::Data);
    answers(&mut r);
    r.atomic_again(Psn::new(9));
    assert_eq!(r.output(), Some(Output::Atomic { psn: Psn::new(9), old: 2 }));
}

#[test]
fn a_refusal_is_repeated_to_who_has_missed_it() {
    let mut r = responder(3);
    r.arrival(Psn::new(3));
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    r.arrival(Psn::new(4));
    r.refuse(Nak::RemoteAccess);
    r.close();
    let nak = Some(Syndrome::Nak(Nak::RemoteAccess));
    assert_eq!(answers(&mut r), [(3, None), (4, nak)], "what came before it is answered");
    r.refuse_again(Psn::new(3));
    assert_eq!(answers(&mut r), []);
    r.refuse_again(Psn::new(4));
    r.refuse_again(Psn::new(6));
    assert_eq!(answers(&mut r), [(4, nak)]);
    // Without a refusal a QP in Error says nothing.
    let mut r = responder(3);
    r.acknowledge();
    r.close();
    r.refuse_again(Psn::new(3));
    assert_eq!(answers(&mut r), []);
}

#[test]
fn a_read_once_more_leaves_the_nak_of_a_gap_to_be_sent() {
    let mut r = responder(0);
    r.accepted(1, true, Answer::Ack);
    answers(&mut r);
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    answers(&mut r);
    assert_eq!(r.arrival(Psn::new(5)), Arrival::Ahead);
    r.read_again(Psn::new(1), at(0), 10);
    let gap = Some(Syndrome::Nak(Nak::Sequence));
    assert_eq!(answers(&mut r), [(1, None), (2, gap)]);
}

#[test]
fn an_acknowledgement_before_a_read_that_comes_again_goes_out_by_itself() {
    let mut r = responder(0);
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    answers(&mut r);
    r.accepted(1, true, Answer::Ack);
    // Its data says nothing of the WRITE behind it.
    r.read_again(Psn::new(0), at(0), 10);
    assert_eq!(answers(&mut r), [(0, None), (1, ACK)]);
}

#[test]
fn what_a_qp_in_error_still_had_to_answer_is_dropped() {
    let mut r = responder(0);
    r.read(at(0), 10);
    r.accepted(1, true, Answer::Data);
    r.acknowledge();
    assert!(r.has_output());
    r.close();
    assert!(!r.has_output());
    assert_eq!(answers(&mut r), []);
}

/// Asked for from before what is left of it, and not to its end: the rest is not lost for that.
#[test]
fn a_read_that_comes_again_in_part_does_not_replace_what_is_to_be_sent() {
    let mut r = responder(0);
    r.read(at(0), 6 * 1024);
    r.accepted(6, true, Answer::Data);
    r.read_sent(2);
    r.read_again(Psn::new(1), at(1024), 3 * 1024);
    assert_eq!(answers(&mut r), [(2, None), (3, None), (4, None), (5, None)]);
}

#[test]
fn a_result_that_is_asked_for_twice_is_sent_once() {
    let mut r = responder(0);
    for old in [7, 8] {
        r.atomic(old);
        r.accepted(1, true, Answer::Data);
    }
    answers(&mut r);
    for _ in 0..2 {
        r.atomic_again(Psn::new(1));
    }
    r.atomic_again(Psn::new(0));
    assert_eq!(answers(&mut r), [(0, None), (1, None)]);
}
