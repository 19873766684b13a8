//! Tests of wake-ups: solicited completions and asynchronous events.
//!
//! A waiting thread also checks by itself at long intervals; in unit tests the interval is long
//! enough that a lost wake-up fails the test.

use std::time::{Duration, Instant};

use super::*;
use verbs::{
    AsyncEvent, Completion, Op, QpChange, QueuePair, Receive, ReceiveRequest, SendFlags, Status,
    WorkRequest,
};

const LONG: Duration = Duration::from_secs(60);
/// Shorter than the interval at which a waiting thread checks by itself.
const SOON: Duration = Duration::from_secs(10);

struct Bed {
    nic: SoftNic,
    cqs: [SoftCq; 2],
    qps: [SoftQp; 2],
}

fn beds() -> [Bed; 2] {
    [SoftNic::inline(), SoftNic::host().unwrap().0].map(|nic| {
        let pd = nic.alloc_pd().unwrap();
        let cq = || nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
        let cqs = [cq(), cq()];
        let qp = |cq: &SoftCq| {
            let receive = Receive::Own(ReceiveAttr { entries: 16, max_sges: 1 });
            let (send_cq, recv_cq, access) = (cq, cq, Access::NONE);
            nic.create_qp(&pd, QpAttr { send_cq, recv_cq, send_blocks: 16, receive, access })
        };
        let qps = [qp(&cqs[0]).unwrap(), qp(&cqs[1]).unwrap()];
        qps[0].connect(qps[1].qpn()).unwrap();
        qps[1].connect(qps[0].qpn()).unwrap();
        Bed { nic, cqs, qps }
    })
}

/// Runs `wake` once `wait` probably sleeps. Returns the result of `wait`, which must return soon.
fn woken<T: Send>(wait: impl FnOnce() -> T + Send, wake: impl FnOnce()) -> T {
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let since = Instant::now();
            let result = wait();
            assert!(since.elapsed() < SOON, "the wake-up was lost");
            result
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiter.is_finished(), "the wait returned before the wake-up");
        wake();
        waiter.join().unwrap()
    })
}

/// A receive has no doorbell, and the NIC thread sleeps after 0.1 ms without work.
#[test]
fn a_receive_that_is_flushed_wakes_the_nic() {
    for bed in beds() {
        bed.qps[0].modify(QpChange::Error).unwrap();
        for id in 0..3 {
            std::thread::sleep(Duration::from_millis(20));
            bed.qps[0].post_recv(&ReceiveRequest { id, to: &[] }).unwrap();
            assert!(bed.cqs[0].wait(SOON).unwrap(), "the NIC has not seen the receive");
            let mut out = [Completion::EMPTY; 2];
            assert_eq!(bed.cqs[0].poll(&mut out), 1);
            assert_eq!((out[0].id, out[0].status), (id, Status::Flushed));
        }
    }
}

#[test]
fn a_solicited_message_wakes() {
    for bed in beds() {
        for _ in 0..3 {
            bed.qps[1].post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
            let solicited = SendFlags { solicited: true, ..SendFlags::default() };
            let op = Op::With { flags: solicited, op: &Op::SendInline { data: &[] } };
            let send = [WorkRequest { id: 2, op, signaled: false }];
            let came = woken(
                || bed.cqs[1].wait_solicited(LONG).unwrap(),
                || bed.qps[0].post_send(&send).unwrap(),
            );
            assert!(came);
            assert_eq!(bed.cqs[1].poll(&mut [verbs::Completion::EMPTY; 2]), 1);
        }
    }
}

#[test]
fn an_event_wakes() {
    for bed in beds() {
        for _ in 0..3 {
            let bad = Op::LocalInvalidate { key: Key(0) };
            let bad = [WorkRequest { id: 2, op: bad, signaled: true }];
            let events = woken(
                || bed.nic.wait_events(LONG).unwrap(),
                || bed.qps[0].post_send(&bad).unwrap(),
            );
            let qpn = bed.qps[0].qpn();
            let own = |e: &AsyncEvent| match e {
                AsyncEvent::QpError { qpn: at, by_peer: false, .. } => *at == qpn,
                _ => false,
            };
            assert!(events.events.iter().any(own), "{events:?}");
            bed.qps[0].connect(bed.qps[1].qpn()).unwrap();
        }
    }
}
