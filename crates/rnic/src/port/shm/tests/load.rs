//! Tests of clients with many queue pairs, doorbells and sleeping threads.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::{LocalFunction, MappedDoorbell};
use super::*;
use verbs::{Cqn, Qpn};

/// A QP that is connected to itself, with a CQ.
struct Queue {
    qpn: Qpn,
    cqn: Cqn,
    doorbell: MappedDoorbell,
    ring: DmaMemory,
    cq: CqReader,
    record: DmaMemory,
    /// The receive ring's record.
    received: DmaMemory,
    index: u16,
}

fn queues(f: &LocalFunction, count: usize) -> Vec<Queue> {
    let Ok(Reply::Pd(pd)) = f.execute(Verb::AllocPd) else { panic!("no PD") };
    let one = |_| {
        let memory = DmaMemory::anonymous(12288).unwrap();
        let (ring, cq) = (memory.slice(0, 4096).unwrap(), memory.slice(4096, 4096).unwrap());
        let record = memory.slice(8192, 8).unwrap();
        let received = memory.slice(8200, 8).unwrap();
        // Receive WQEs for empty messages.
        let receives = memory.slice(8256, 64).unwrap();
        for entry in 0..4 {
            receives.write(entry * 16 + 4, &[0, 0, 1, 0]);
        }
        let receives =
            ReceiveRing { ring: receives, entries: 4, stride: 16, record: received.clone() };
        for entry in 0..64 {
            cq.write(entry * 64 + 63, &[0xf1]);
        }
        let (spec, ignore_overrun) = ((cq.clone(), record.clone()), false);
        let verb = Verb::CreateCq { ring: spec.0, entries: 64, record: spec.1, ignore_overrun };
        let Ok(Reply::Cq(cqn)) = f.execute(verb) else { panic!("no CQ") };
        let verb = Verb::CreateQp(QpVerb {
            pd,
            send: Some(SendRing { ring: ring.clone(), blocks: 64, managed: false }),
            receive: ReceiveVerb::Own { ring: receives, managed: false },
            send_cq: cqn,
            recv_cq: cqn,
            access: Access::NONE,
            privileged: false,
        });
        let Ok(Reply::Qp { qpn, doorbell }) = f.execute(verb) else { panic!("no QP") };
        for change in
            [QpChange::Init, QpChange::ReadyToReceive { peer: qpn.into() }, QpChange::ReadyToSend]
        {
            f.execute(Verb::ModifyQp { qpn, change }).unwrap();
        }
        let doorbell = f.doorbell(doorbell.unwrap()).unwrap();
        let cq = CqReader::new(cq, 64, record.clone(), 0);
        Queue { qpn, cqn, doorbell, ring, cq, record, received, index: 0 }
    };
    (0..count).map(one).collect()
}

impl Queue {
    fn post(&mut self) {
        let mut wqe = Builder::new(self.qpn, self.index);
        wqe.nop().signaled();
        self.put(&wqe);
        self.doorbell.write(self.index);
    }

    fn put(&mut self, wqe: &Builder) {
        self.ring.write(self.index as usize % 64 * 64, wqe.bytes());
        self.index = self.index.wrapping_add(1);
    }

    fn wait(&mut self) {
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while self.cq.poll().is_none() {
            assert!(std::time::Instant::now() < until, "QP {} of CQ {}", self.qpn, self.cqn);
            std::thread::yield_now();
        }
    }
}

#[test]
fn every_doorbell_of_many_is_seen() {
    let host = host();
    let f = host.function(crate::limits::FunctionLimits::default()).unwrap();
    let mut queues = queues(&f, 300);
    for round in 0..50 {
        // Read before the work, because the NIC may be asleep again before `wait` returns.
        let sleeps = host.0.shared.sleeps.load(Ordering::Relaxed);
        // All doorbells at once, then single ones while the NIC is awake, then single ones while it
        // sleeps.
        match round {
            0..5 => queues.iter_mut().for_each(Queue::post),
            _ => queues[round * 37 % 300].post(),
        }
        match round {
            0..5 => queues.iter_mut().for_each(Queue::wait),
            _ => queues[round * 37 % 300].wait(),
        }
        if round > 25 {
            while host.0.shared.sleeps.load(Ordering::Relaxed) == sleeps {
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn send_blocked_as_the_nic_sleeps_gets_its_receive() {
    let host = host();
    let f = host.function(crate::limits::FunctionLimits::default()).unwrap();
    let mut q = queues(&f, 1).remove(0);
    let mut wqe = Builder::new(q.qpn, 0);
    wqe.send_inline(&[]).signaled();
    q.put(&wqe);
    // The doorbell is written after the NIC thread's last scan, just before it announces its sleep.
    let (mut q, sleeps) = host
        .call(move |nic| {
            q.doorbell.write(q.index);
            let sleeps = nic.prepare_sleep(nic.now_ns());
            nic.wake_up();
            (q, sleeps.map(|timeout| timeout.is_some()))
        })
        .unwrap();
    assert_eq!(sleeps, None, "the NIC slept although a SEND waits for a receive");
    q.received.store_be32(0, 1);
    f.receive_posted();
    // The completions of the receive and of the SEND.
    q.wait();
    q.wait();
}

#[test]
fn all_sleeping_threads_are_woken_in_rounds() {
    use rustix::thread::futex;
    let host = host();
    let f = host.function(crate::limits::FunctionLimits::default()).unwrap();
    let mut queues = queues(&f, 40);
    let sleepers: Vec<_> = queues
        .iter()
        .map(|q| {
            let record = q.record.clone();
            q.cq.arm();
            std::thread::spawn(move || {
                let armed = record.word32(super::super::super::ARMED);
                let long = futex::Timespec { tv_sec: 20, tv_nsec: 0 };
                while armed.load(Ordering::SeqCst) == 1 {
                    let end = futex::wait(armed, futex::Flags::empty(), 1, Some(&long));
                    assert_ne!(end, Err(rustix::io::Errno::TIMEDOUT), "not woken");
                }
            })
        })
        .collect();
    queues.iter_mut().for_each(Queue::post);
    for sleeper in sleepers {
        sleeper.join().unwrap();
    }
    // A CQ may be destroyed while wake-ups for it are pending.
    let mut more = self::queues(&f, 40);
    more.iter().for_each(|q| q.cq.arm());
    more.iter_mut().for_each(Queue::post);
    for q in &more {
        f.execute(Verb::DestroyQp { qpn: q.qpn }).unwrap();
        f.execute(Verb::DestroyCq { cqn: q.cqn }).unwrap();
    }
    queues.iter_mut().for_each(|q| {
        q.wait();
        q.post();
        q.wait();
    });
}
