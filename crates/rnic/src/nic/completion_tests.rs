//! Tests of completers on the software NIC.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use verbs::completion::{Completer, Pending, id_at, position};
use verbs::executor::block_on;
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, Nic, Op, QpAttr, QueuePair,
    Receive, ReceiveAttr, ReceiveRequest, Remote, Status, WorkRequest,
};

use crate::nic::{SoftCq, SoftMr, SoftNic, SoftQp};

/// Two connected QPs, one of which has a completer.
struct Bed {
    completer: Completer<SoftCq>,
    qp: SoftQp,
    peer: SoftQp,
    mr: SoftMr,
    peer_cq: SoftCq,
}

fn nics() -> [SoftNic; 2] {
    [SoftNic::inline(), SoftNic::host().unwrap().0]
}

fn bed(nic: &SoftNic) -> Bed {
    let cq = nic.create_cq(CqAttr { entries: 1024, ignore_overrun: false }).unwrap();
    bed_on(nic, Completer::new(cq))
}

fn bed_on(nic: &SoftNic, completer: Completer<SoftCq>) -> Bed {
    let pd = nic.alloc_pd().unwrap();
    let peer_cq = nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
    let qp = |cq: &SoftCq| {
        let receive = Receive::Own(ReceiveAttr { entries: 16, max_sges: 1 });
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            send_blocks: 256,
            receive,
            access: Access::REMOTE_ALL,
        };
        nic.create_qp(&pd, attr).unwrap()
    };
    let (qp, peer) = (qp(completer.cq()), qp(&peer_cq));
    qp.connect(peer.qpn()).unwrap();
    peer.connect(qp.qpn()).unwrap();
    let memory = nic.alloc_dma(1 << 16).unwrap();
    let mr = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL).unwrap();
    Bed { completer, qp, peer, mr, peer_cq }
}

impl Bed {
    fn post(&self, op: Op<'_>) -> Pending<SoftCq> {
        self.completer
            .submit(|id| self.qp.post_send(&[WorkRequest { id, op, signaled: true }]))
            .unwrap()
    }

    fn add(&self, place: usize) -> Pending<SoftCq> {
        self.post(Op::FetchAdd { at: self.mr.remote(0), add: 1, old: self.mr.sge(place, 8) })
    }

    fn sum(&self) -> u64 {
        self.mr.memory().load_be64(0)
    }

    /// Posts a message that completes only after [`Bed::unblock`].
    fn post_blocked(&self) -> Pending<SoftCq> {
        self.post(Op::SendInline { data: b"held" })
    }

    fn unblock(&self) {
        self.peer_cq.poll(&mut [Completion::EMPTY; 16]);
        self.peer.post_recv(&ReceiveRequest { id: 0, to: &[self.mr.sge(4096, 64)] }).unwrap();
    }
}

#[test]
fn thread_waits_for_its_own_operation() {
    for nic in nics() {
        let bed = bed(&nic);
        let all: Vec<_> = (0..100).map(|i| bed.add(8 + i * 8)).collect();
        for (i, pending) in all.into_iter().enumerate().rev() {
            assert_eq!(pending.wait().unwrap().status, Status::Success);
            assert_eq!(bed.mr.memory().load_be64(8 + i * 8), i as u64, "in the order of posting");
        }
    }
}

#[test]
fn operation_is_polled_to_its_end() {
    for nic in nics() {
        let bed = bed(&nic);
        let mut blocked = bed.post_blocked();
        for _ in 0..100 {
            assert_eq!(blocked.try_wait().unwrap(), None, "no receive is posted");
        }
        bed.unblock();
        let completion = loop {
            match blocked.try_wait().unwrap() {
                Some(completion) => break completion,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(completion.status, Status::Success);
        // A poll for one operation takes the completions of all.
        let mut all: Vec<_> = (0..20).map(|i| bed.add(8 + i * 8)).collect();
        while all.last_mut().unwrap().try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        all.pop();
        for (i, mut pending) in all.into_iter().enumerate() {
            let completion = pending.try_wait().unwrap().expect("completions come in order");
            assert_eq!(completion.status, Status::Success);
            assert_eq!(bed.mr.memory().load_be64(8 + i * 8), i as u64);
        }
    }
}

/// The status of a request that fails is reported although its operation was abandoned, before the
/// requests behind it end as flushed.
#[test]
fn failures_are_reported_before_flushed_operations_end() {
    for nic in nics() {
        let bed = bed(&nic);
        let failures = Arc::new(Mutex::new(Vec::new()));
        let reported = failures.clone();
        bed.completer.when_failed(Arc::new(move |completion| {
            reported.lock().push((completion.qpn, completion.status));
        }));
        assert_eq!(bed.add(8).wait().unwrap().status, Status::Success);
        let from = Remote { rkey: Key(0xdead_be00), ..bed.mr.remote(0) };
        drop(bed.post(Op::Read { from, to: &[bed.mr.sge(16, 8)] }));
        for _ in 0..3 {
            assert_eq!(bed.add(24).wait().unwrap().status, Status::Flushed);
            assert_eq!(*failures.lock(), [(bed.qp.qpn(), Status::RemoteAccess)]);
        }
    }
}

#[test]
fn many_threads_share_a_completer() {
    for nic in nics() {
        let bed = bed(&nic);
        std::thread::scope(|s| {
            for t in 0..6 {
                let bed = &bed;
                s.spawn(move || {
                    for _ in 0..500 {
                        let pending = bed.add(64 + t * 8);
                        assert_eq!(pending.wait().unwrap().status, Status::Success);
                    }
                });
            }
        });
        assert_eq!(bed.sum(), 3000);
    }
}

#[test]
fn sleeping_threads_are_woken_one_by_one() {
    for nic in nics() {
        let cq = nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
        let completer = Completer::new(cq);
        let beds: Vec<_> = (0..5).map(|_| bed_on(&nic, completer.clone())).collect();
        let ended = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for bed in &beds {
                let ended = &ended;
                s.spawn(move || {
                    assert_eq!(bed.post_blocked().wait().unwrap().status, Status::Success);
                    ended.fetch_add(1, Ordering::SeqCst);
                });
            }
            for (i, at) in [2, 0, 4, 1, 3].into_iter().enumerate() {
                // Long enough for all threads to sleep. Each must be woken by an event, not by a
                // timeout.
                std::thread::sleep(Duration::from_millis(15));
                assert_eq!(ended.load(Ordering::SeqCst), i);
                let since = Instant::now();
                beds[at].unblock();
                while ended.load(Ordering::SeqCst) == i {
                    std::thread::yield_now();
                }
                assert!(since.elapsed() < Duration::from_secs(5), "woken by a timeout");
            }
        });
    }
}

#[test]
fn polling_thread_does_not_steal_a_wakeup() {
    for nic in nics() {
        let bed = bed(&nic);
        let stop = AtomicUsize::new(0);
        std::thread::scope(|s| {
            s.spawn(|| {
                while stop.load(Ordering::Relaxed) == 0 {
                    bed.completer.poll();
                    std::thread::yield_now();
                }
            });
            let _stop = StopWhenDropped(&stop);
            for _ in 0..30 {
                let pending = bed.post_blocked();
                let waiter = s.spawn(|| {
                    let c = pending.wait().unwrap();
                    (c.status, Instant::now())
                });
                std::thread::sleep(Duration::from_millis(2));
                let since = Instant::now();
                bed.unblock();
                let (status, at) = waiter.join().unwrap();
                assert_eq!(status, Status::Success);
                assert!(at - since < Duration::from_secs(5), "woken by a timeout");
            }
        });
    }
}

/// Stops the other thread even if the test fails.
struct StopWhenDropped<'a>(&'a AtomicUsize);

impl Drop for StopWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Relaxed);
    }
}

#[test]
fn dropped_operation_executes_and_frees_its_slot() {
    for nic in nics() {
        let bed = bed(&nic);
        for _ in 0..1000 {
            drop(bed.add(8));
            bed.add(16).wait().unwrap();
        }
        assert_eq!(bed.sum(), 2000);
        let wr = |id| WorkRequest { id, op: Op::Nop, signaled: true };
        let pending = bed.completer.submit(|id| {
            assert!(id as u32 <= 64, "few slots were needed");
            bed.qp.post_send(&[wr(id)])
        });
        pending.unwrap().wait().unwrap();
    }
}

#[test]
fn a_failed_list_ends_once() {
    for nic in nics() {
        let bed = bed(&nic);
        let bad = verbs::Remote { addr: 0, rkey: verbs::Key(0x7700) };
        let to = [bed.mr.sge(0, 8)];
        let pending = bed
            .completer
            .submit(|id| {
                let read = |at, from| WorkRequest {
                    id: id_at(id, at),
                    op: Op::Read { from, to: &to },
                    signaled: false,
                };
                let last = WorkRequest { signaled: true, ..read(2, bed.mr.remote(0)) };
                bed.qp.post_send(&[read(0, bed.mr.remote(0)), read(1, bad), last])
            })
            .unwrap();
        let other = bed.add(8);
        let failed = pending.wait().unwrap();
        assert_eq!((failed.status, position(&failed)), (Status::RemoteAccess, 1));
        assert_eq!(other.wait().unwrap().status, Status::Flushed);
        assert_eq!(bed.add(8).wait().unwrap().status, Status::Flushed);
    }
}

#[test]
fn futures_run_under_block_on() {
    for nic in nics() {
        let beds = [bed(&nic), bed(&nic)];
        let sum = block_on(async {
            for i in 0..200 {
                beds[i % 2].add(8).await.unwrap();
            }
            beds.iter().map(Bed::sum).sum::<u64>()
        });
        assert_eq!(sum, 200);
        // Sleeps, on one CQ and on two.
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(Duration::from_millis(10));
                beds[0].unblock();
                std::thread::sleep(Duration::from_millis(10));
                beds[1].unblock();
                std::thread::sleep(Duration::from_millis(10));
                beds[0].unblock();
            });
            let since = Instant::now();
            block_on(async {
                beds[0].post_blocked().await.unwrap();
                let (mut second, mut first) = (beds[1].post_blocked(), beds[0].post_blocked());
                let mut ended = [false; 2];
                std::future::poll_fn(|cx| {
                    for (pending, ended) in [&mut first, &mut second].into_iter().zip(&mut ended) {
                        *ended = *ended || Pin::new(pending).poll(cx).is_ready();
                    }
                    if ended == [true; 2] { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
            });
            assert!(since.elapsed() < Duration::from_secs(5), "woken by a timeout");
        });
    }
}

#[test]
fn futures_run_under_another_executor() {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    for nic in nics() {
        let bed = bed(&nic);
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut cx = Context::from_waker(&waker);
        for _ in 0..5 {
            let mut pending = bed.post_blocked();
            assert!(Pin::new(&mut pending).poll(&mut cx).is_pending());
            bed.unblock();
            let completion = loop {
                match Pin::new(&mut pending).poll(&mut cx) {
                    Poll::Ready(c) => break c,
                    // This thread does not poll the CQ; the completer's driver thread must.
                    Poll::Pending => std::thread::park(),
                }
            };
            assert_eq!(completion.unwrap().status, Status::Success);
        }
    }
}
