//! The verbs on every port of the software NIC.

mod common;

use std::time::Duration;

use common::{End, LONG, all_ports, end, pair};
use verbs::direct::{DirectNic, DirectQp, Managed};
use verbs::wqe::{Builder, Umr};
use verbs::{
    Access, Completion, CompletionKind, CompletionQueue, CqAttr, Error, Feature, MemoryRegion,
    MemoryWindow, Nic, Op, QpAttr, QpChange, QpState, QueuePair, Receive, ReceiveAttr,
    ReceiveQueue, ReceiveRequest, RegionEngine, Remote, Status, WorkRequest,
};

#[test]
fn one_sided_operations_move_bytes() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        let data: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
        a.put(0, &data);
        let c = a.run(Op::Write { to: b.mr.remote(5), from: &[a.sge(0, 100_000)] });
        assert_eq!(c.status, Status::Success, "{port}");
        assert_eq!(b.get(5, 100_000), data, "{port}");
        let to = [a.sge(200_000, 60_000), a.sge(300_000, 40_000)];
        assert_eq!(a.run(Op::Read { from: b.mr.remote(5), to: &to }).status, Status::Success);
        assert_eq!(a.get(200_000, 60_000), data[..60_000]);
        assert_eq!(a.get(300_000, 40_000), data[60_000..]);
        let inline = [9; 300];
        assert_eq!(
            a.run(Op::WriteInline { to: b.mr.remote(0), data: &inline }).status,
            Status::Success
        );
        assert_eq!(b.get(0, 300), inline);
    }
}

#[test]
fn atomics_work_on_big_endian_words() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        b.put(8, &40u64.to_be_bytes());
        let at = b.mr.remote(8);
        let old = a.sge(0, 8);
        assert_eq!(a.run(Op::FetchAdd { at, add: 2, old }).status, Status::Success, "{port}");
        assert_eq!(a.get(0, 8), 40u64.to_be_bytes());
        a.run(Op::CompareSwap { at, compare: 41, swap: 1, old });
        assert_eq!(a.get(0, 8), 42u64.to_be_bytes());
        assert_eq!(b.get(8, 8), 42u64.to_be_bytes());
        a.run(Op::CompareSwap { at, compare: 42, swap: 1, old });
        assert_eq!(b.get(8, 8), 1u64.to_be_bytes());
        // Two fields of 4 bytes: no carry from the lower into the upper.
        let (add, boundary) = (0xffff_ffff, 1 << 31 | 1 << 63);
        a.run(Op::MaskedFetchAdd { at, add, boundary, old });
        assert_eq!(b.get(8, 8), 0u64.to_be_bytes());
        a.run(Op::MaskedCompareSwap {
            at,
            compare: 0xff00,
            compare_mask: 0xff,
            swap: 0xaabb,
            swap_mask: 0xff00,
            old,
        });
        assert_eq!(b.get(8, 8), 0xaa00u64.to_be_bytes());
    }
}

#[test]
fn messages_arrive_in_order_with_their_lengths() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        for i in 0..32 {
            let to = [b.sge(i * 100, 3), b.sge(i * 100 + 50, 50)];
            b.qp.post_recv(&ReceiveRequest { id: 1000 + i as u64, to: &to }).unwrap();
        }
        let full = b.qp.post_recv(&ReceiveRequest { id: 0, to: &[] });
        assert!(matches!(full, Err(Error::QueueFull { capacity: 32, .. })), "{port}: {full:?}");
        for i in 0..100u8 {
            a.put(0, &[i; 20]);
            assert_eq!(a.run(Op::Send { from: &[a.sge(0, 20)] }).status, Status::Success);
            let c = b.next();
            let slot = i as usize % 32;
            assert_eq!(
                (c.id, c.kind, c.bytes),
                (1000 + slot as u64, CompletionKind::Receive, 20),
                "{port}"
            );
            assert_eq!(b.get(slot * 100, 3), [i; 3]);
            assert_eq!(b.get(slot * 100 + 50, 17), [i; 17]);
            let to = [b.sge(slot * 100, 3), b.sge(slot * 100 + 50, 50)];
            b.qp.post_recv(&ReceiveRequest { id: c.id, to: &to }).unwrap();
        }
    }
}

#[test]
fn a_message_waits_for_its_receive() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        let send = [WorkRequest { id: 1, op: Op::SendInline { data: b"late" }, signaled: true }];
        a.qp.post_send(&send).unwrap();
        // Long enough for a NIC thread to go to sleep.
        assert!(
            !a.cq.wait(Duration::from_millis(20)).unwrap(),
            "{port}: completed without a receive"
        );
        b.qp.post_recv(&ReceiveRequest { id: 2, to: &[b.sge(0, 100)] }).unwrap();
        assert_eq!(a.next().status, Status::Success);
        let c = b.next();
        assert_eq!((c.id, c.bytes), (2, 4));
        assert_eq!(b.get(0, 4), b"late");
    }
}

#[test]
fn a_shared_receive_queue_serves_several_queue_pairs() {
    for (port, nic) in all_ports() {
        let pd = nic.alloc_pd().unwrap();
        let cqs = [64, 64]
            .map(|entries| nic.create_cq(CqAttr { entries, ignore_overrun: false }).unwrap());
        let srq = nic.create_srq(&pd, ReceiveAttr { entries: 8, max_sges: 1 }).unwrap();
        let memory = nic.alloc_dma(4096).unwrap();
        let mr = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
        let senders = [end(&nic, 4096), end(&nic, 4096)];
        let receivers: Vec<_> = (0..2)
            .map(|i| {
                let attr = QpAttr {
                    send_cq: &cqs[i],
                    recv_cq: &cqs[i],
                    send_blocks: 0,
                    receive: Receive::Shared(&srq),
                    access: Access::NONE,
                };
                let qp = nic.create_qp(&pd, attr).unwrap();
                qp.connect(senders[i].qp.qpn()).unwrap();
                senders[i].qp.connect(qp.qpn()).unwrap();
                qp
            })
            .collect();
        let post =
            |id: u64| srq.post_recv(&ReceiveRequest { id, to: &[mr.sge(id as usize * 64, 64)] });
        (0..8).for_each(|id| post(id).unwrap());
        assert!(matches!(post(8), Err(Error::QueueFull { .. })), "{port}");
        // The second CQ is polled first, so entries are freed out of order.
        for round in 0..50u8 {
            for (i, sender) in senders.iter().enumerate() {
                sender.run(Op::SendInline { data: &[round, i as u8] });
            }
            let mut done = Vec::new();
            for i in [1, 0] {
                let mut out = [Completion::EMPTY];
                while cqs[i].poll(&mut out) == 0 {
                    assert!(cqs[i].wait(LONG).unwrap());
                }
                assert_eq!(out[0].qpn, receivers[i].qpn());
                let mut data = [0; 2];
                memory.read(out[0].id as usize * 64, &mut data);
                assert_eq!(data, [round, i as u8], "{port}");
                done.push(out[0].id);
            }
            done.into_iter().for_each(|id| post(id).unwrap());
        }
    }
}

#[test]
fn unsignaled_work_is_retired_by_later_completion() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        // 128 building blocks, one per request.
        for round in 0..20u64 {
            let list: Vec<_> = (0..64u64)
                .map(|i| WorkRequest {
                    id: i,
                    op: Op::Write { to: b.mr.remote(i as usize * 8), from: &[] },
                    signaled: i == 63,
                })
                .collect();
            a.qp.post_send(&list).unwrap_or_else(|e| panic!("{port}, round {round}: {e}"));
            let c = a.next();
            assert_eq!((c.id, c.status), (63, Status::Success));
        }
        assert_eq!(a.cq.poll(&mut [Completion::EMPTY; 4]), 0);
    }
}

#[test]
fn full_queue_is_an_error_and_posts_nothing() {
    for (port, nic) in all_ports() {
        let a = end(&nic, 4096);
        // The peer posts no receive, so nothing completes.
        let b = end(&nic, 4096);
        common::connect(&a, &b);
        let send =
            |signaled| WorkRequest { id: 5, op: Op::SendInline { data: &[1; 60] }, signaled };
        // 5 segments need two building blocks: 64 requests fill the ring.
        for _ in 0..63 {
            a.qp.post_send(&[send(false)]).unwrap();
        }
        let full = a.qp.post_send(&[send(true), send(true)]);
        assert!(matches!(full, Err(Error::QueueFull { capacity: 128, .. })), "{port}: {full:?}");
        a.qp.post_send(&[send(true)]).unwrap();
        assert!(matches!(a.qp.post_send(&[send(true)]), Err(Error::QueueFull { .. })));
        for i in 0..64 {
            if i >= 32 {
                b.next();
            }
            b.qp.post_recv(&ReceiveRequest { id: i, to: &[b.sge(0, 64)] }).unwrap();
        }
        assert_eq!(a.next().id, 5);
        assert_eq!(
            a.cq.poll(&mut [Completion::EMPTY; 4]),
            0,
            "{port}: an unsignaled request completed"
        );
        a.qp.post_send(&[send(true)]).unwrap();
    }
}

#[test]
fn errors_flush_and_a_reset_starts_again() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        let bad = Remote { addr: b.mr.remote(0).addr, rkey: verbs::Key(0xdead_be00) };
        let read = |id, from| WorkRequest {
            id,
            op: Op::Read { from, to: std::slice::from_ref(Box::leak(Box::new(a.sge(0, 8)))) },
            signaled: true,
        };
        a.qp.post_send(&[read(1, b.mr.remote(0)), read(2, bad), read(3, b.mr.remote(0))]).unwrap();
        let ends: Vec<_> = (0..3).map(|_| a.next()).map(|c| (c.id, c.status)).collect();
        let expected = [(1, Status::Success), (2, Status::RemoteAccess), (3, Status::Flushed)];
        assert_eq!(ends, expected, "{port}");
        assert_eq!(a.qp.state().unwrap(), QpState::Error);
        assert_eq!(a.run(Op::Nop).status, Status::Flushed);

        // The QP number survives the reset; earlier doorbells have no effect any more.
        let qpn = a.qp.qpn();
        common::connect(&a, &b);
        assert_eq!(a.qp.qpn(), qpn);
        for _ in 0..200 {
            let c = a.run(Op::Read { from: b.mr.remote(0), to: &[a.sge(0, 8)] });
            assert_eq!(c.status, Status::Success, "{port}");
        }
    }
}

#[test]
fn reset_flushes_posted_work() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        b.qp.post_recv(&ReceiveRequest { id: 8, to: &[] }).unwrap();
        a.run(Op::Nop);
        // No receive is posted at `a`, so the SEND waits.
        let send = WorkRequest { id: 9, op: Op::SendInline { data: b"x" }, signaled: true };
        b.qp.post_send(&[send]).unwrap();
        b.qp.modify(QpChange::Reset).unwrap();
        let mut ends: Vec<_> = (0..2).map(|_| b.next()).map(|c| (c.id, c.status)).collect();
        ends.sort_by_key(|e| e.0);
        assert_eq!(ends, [(8, Status::Flushed), (9, Status::Flushed)], "{port}");
    }
}

#[test]
fn windows_follow_the_queue_pair_that_they_name() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        let windows = nic.alloc_mws(&b.pd, 1500).unwrap();
        let window = &windows[1499];
        let start = b.mr.remote(4096).addr;
        let umr = Umr::bind(
            window.key(),
            window.key().tag().wrapping_add(1),
            b.qp.qpn(),
            Access::REMOTE_ALL,
            b.mr.key(),
            start,
            64,
        );
        assert_eq!(b.run(Op::Window(&umr)).status, Status::Success, "{port}");
        let info = nic.query_key(window.key()).unwrap();
        assert_eq!((info.bound_to(), info.start, info.len), (Some(b.qp.qpn()), start, 64));
        let key = info.key(window.key().index());
        let to = Remote { addr: start, rkey: key };
        a.put(0, &[7; 64]);
        assert_eq!(a.run(Op::Write { to, from: &[a.sge(0, 64)] }).status, Status::Success);
        assert_eq!(b.get(4096, 64), [7; 64]);
        assert_eq!(b.run(Op::LocalInvalidate { key }).status, Status::Success);
        let dead = a.run(Op::Write { to, from: &[a.sge(0, 64)] });
        assert_eq!(dead.status, Status::RemoteAccess, "{port}");
    }
}

#[test]
fn a_type_1_window_is_bound_rebound_and_emptied() {
    for (port, nic) in all_ports() {
        assert!(nic.caps().type1_windows);
        let (a, b) = pair(&nic);
        let window = nic.alloc_type1_mws(&b.pd, 1).unwrap().remove(0);
        let start = b.mr.remote(4096).addr;
        let mut old = None;
        for len in [64, 32, 0] {
            let current = || nic.query_key(window.key()).unwrap().key(window.key().index());
            let key = current();
            let tag = key.tag().wrapping_add(1);
            let umr = Umr::bind_type1(key, tag, Access::REMOTE_ALL, b.mr.key(), start, len);
            assert_eq!(b.run(Op::Window(&umr)).status, Status::Success, "{port}");
            let info = nic.query_key(window.key()).unwrap();
            assert_eq!((info.bound_to(), info.len), (None, len as u64), "{port}");
            let write = |rkey, len: u32| {
                let to = Remote { addr: start, rkey };
                let status = a.run(Op::Write { to, from: &[a.sge(0, len)] }).status;
                if status != Status::Success {
                    common::connect(&a, &b);
                }
                status
            };
            if len > 0 {
                assert_eq!(write(current(), len), Status::Success, "{port}");
            }
            assert_eq!(write(current(), len + 1), Status::RemoteAccess, "{port}");
            if let Some(old) = old.replace(current()) {
                assert_eq!(write(old, 1), Status::RemoteAccess, "{port}");
            }
        }
    }
}

#[test]
fn a_managed_queue_runs_when_it_is_enabled() {
    for (port, nic) in all_ports() {
        let cq = nic.create_cq(CqAttr { entries: 8, ignore_overrun: true }).unwrap();
        let pd = nic.alloc_pd().unwrap();
        let attr = || QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 8,
            receive: Receive::None,
            access: Access::NONE,
        };
        let managed = Managed { send: true, ..Managed::default() };
        let chain = nic.create_managed_qp(&pd, attr(), managed).unwrap();
        chain.connect(chain.qpn()).unwrap();
        let ring = chain.send_ring();
        assert_eq!((ring.entries, ring.stride), (8, 64));
        for slot in 0..8 {
            let mut wqe = Builder::new(chain.qpn(), slot);
            wqe.nop().signaled();
            ring.memory.write(slot as usize * 64, wqe.bytes());
        }
        assert!(matches!(chain.post_send(&[]), Err(Error::BadRequest { .. })));
        assert_eq!(nic.cq_count(&cq).unwrap(), 0, "{port}");
        chain.enable_send(3).unwrap();
        while nic.cq_count(&cq).unwrap() < 3 {
            std::thread::yield_now();
        }
        let progress = chain.progress().unwrap();
        assert_eq!((progress.send_consumer, progress.send_limit), (3, 3));
        // Wraps around the ring, and past the end of the CQ.
        chain.enable_send(103).unwrap();
        while nic.cq_count(&cq).unwrap() < 103 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn bad_arguments_are_errors() {
    for (_, nic) in all_ports() {
        let (a, b) = pair(&nic);
        let many = vec![a.sge(0, 1); 62];
        let bad = |op| {
            let refused = a.qp.post_send(&[WorkRequest { id: 0, op, signaled: true }]);
            assert!(matches!(refused, Err(Error::BadRequest { .. })), "{refused:?}");
        };
        bad(Op::Read { from: b.mr.remote(0), to: &many });
        bad(Op::SendInline { data: &[0; 2000] });
        assert!(nic.create_cq(CqAttr { entries: 0, ignore_overrun: false }).is_err());
        assert!(nic.create_srq(&a.pd, ReceiveAttr { entries: 1 << 30, max_sges: 1 }).is_err());
        assert!(matches!(a.qp.modify(QpChange::Init), Err(Error::Refused { .. })));
    }
}

/// An engine that admits every access.
struct OpenEngine;

impl RegionEngine for OpenEngine {
    fn may_read(&self, _tag: u64, _offset: u64, _len: u64) -> bool {
        true
    }

    fn may_write(&self, _tag: u64, _offset: u64, _len: u64) -> bool {
        true
    }

    fn written(&mut self, _tag: u64, _offset: u64, _len: u64) {}
}

#[test]
fn region_engines_need_the_process_of_the_nic() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        let (memory, access) = (nic.alloc_dma(4096).expect("memory"), Access::REMOTE_WRITE);
        let made = nic.reg_engine_mr(&b.pd, &memory, access, Box::new(OpenEngine));
        assert_eq!(nic.caps().has(Feature::RegionEngines), port != "attached");
        match made {
            Ok(mr) => {
                assert_ne!(port, "attached");
                let op = Op::WriteInline { to: mr.remote(8), data: &[7; 4] };
                assert_eq!(a.run(op).status, Status::Success, "{port}");
                assert_eq!(memory.load_be32(8), 0x0707_0707);
            }
            Err(why) => {
                assert_eq!(port, "attached", "{why}");
                assert!(matches!(why, Error::Unsupported { .. }), "{why}");
                assert!(why.to_string().contains("runs in another process"), "{why}");
            }
        }
    }
}

#[test]
fn several_threads_post_and_poll() {
    for (port, nic) in all_ports() {
        let (a, b) = pair(&nic);
        let (a, b): (&End, &End) = (&a, &b);
        let polled = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|s| {
            for t in 0..4u64 {
                let polled = &polled;
                s.spawn(move || {
                    let op = Op::FetchAdd { at: b.mr.remote(0), add: 1, old: a.sge(64, 8) };
                    for _ in 0..500 {
                        let wr = WorkRequest { id: t, op, signaled: true };
                        while a.qp.post_send(&[wr]).is_err() {
                            take(a, polled);
                        }
                        take(a, polled);
                    }
                    while polled.load(std::sync::atomic::Ordering::Relaxed) < 2000 {
                        take(a, polled);
                        a.cq.wait_unless(Duration::from_millis(1), &|| false).unwrap();
                    }
                });
            }
        });
        assert_eq!(b.get(0, 8), 2000u64.to_be_bytes(), "{port}");
    }
}

fn take(a: &End, polled: &std::sync::atomic::AtomicU64) {
    let mut out = [Completion::EMPTY; 8];
    let n = a.cq.poll(&mut out);
    assert!(out[..n].iter().all(|c| c.status == Status::Success));
    polled.fetch_add(n as u64, std::sync::atomic::Ordering::Relaxed);
}
