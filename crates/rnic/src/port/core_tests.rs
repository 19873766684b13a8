use std::sync::atomic::Ordering;

use super::super::test_queue::TestQueue;
use super::*;
use verbs::AsyncEvent;

const F: FunctionId = FunctionId::PHYSICAL;

fn with_queue() -> (Core, TestQueue) {
    let mut core = Core::new(Limits::default());
    let q = TestQueue::new(|verb| core.execute(F, verb).unwrap());
    while core.deliver_events() {}
    (core, q)
}

fn events(core: &mut Core, f: FunctionId) -> Vec<AsyncEvent> {
    match core.execute(f, Verb::TakeEvents) {
        Ok(Reply::Events(events)) => events.events,
        other => panic!("{other:?}"),
    }
}

#[test]
fn destroyed_cq_has_no_sleeper_and_no_events() {
    let (mut core, q) = with_queue();
    assert!(core.sleepers.contains_key(&q.cqn));
    let (ended, other) = (q.cqn, Cqn::new(q.cqn.raw() + 1));
    for cqn in [ended, other] {
        core.events.push(F, AsyncEvent::CqOverrun { cqn });
    }
    assert!(core.execute(F, Verb::DestroyCq { cqn: ended }).is_err(), "the CQ is in use");
    assert!(core.sleepers.contains_key(&q.cqn));
    core.execute(F, Verb::DestroyQp { qpn: q.qpn }).unwrap();
    core.execute(F, Verb::DestroyCq { cqn: ended }).unwrap();
    assert!(core.sleepers.is_empty());
    assert_eq!(events(&mut core, F), [AsyncEvent::CqOverrun { cqn: other }]);
}

#[test]
fn destroyed_srq_has_no_events() {
    let (mut core, q) = with_queue();
    let Ok(Reply::Pd(pd)) = core.execute(F, Verb::AllocPd) else { panic!("no PD") };
    let memory = DmaMemory::anonymous(4096).unwrap();
    let (ring, record) = (memory.slice(0, 64).unwrap(), memory.slice(64, 8).unwrap());
    let ring = super::super::control::ReceiveRing { ring, entries: 4, stride: 16, record };
    let Ok(Reply::Srq(srqn)) = core.execute(F, Verb::CreateSrq { pd, ring }) else {
        panic!("no SRQ")
    };
    core.events.push(F, AsyncEvent::SrqLimit { srqn });
    core.events.push(F, AsyncEvent::LastWqeReached { qpn: q.qpn });
    core.execute(F, Verb::DestroySrq { srqn }).unwrap();
    assert_eq!(events(&mut core, F), [AsyncEvent::LastWqeReached { qpn: q.qpn }]);
    core.execute(F, Verb::DestroyQp { qpn: q.qpn }).unwrap();
    assert_eq!(events(&mut core, F), []);
}

#[test]
fn removed_function_leaves_no_state() {
    let (mut core, other) = with_queue();
    let f = core.engine.add_function(crate::limits::FunctionLimits::default()).unwrap();
    let q = TestQueue::new(|verb| core.execute(f, verb).unwrap());
    core.events.push(f, AsyncEvent::LastWqeReached { qpn: q.qpn });
    let sleeper = core.sleepers[&q.cqn].clone();
    core.wakes.queue(&sleeper);
    core.remove_function(f);
    assert!(core.sleepers.keys().eq([&other.cqn]));
    assert!(core.wakes.is_empty());
    assert_eq!(core.events.take(f).events, []);
}

#[test]
fn wake_wakes_all_threads_that_sleep_on_a_cq() {
    use rustix::thread::futex;
    let record = DmaMemory::anonymous(8).unwrap();
    record.word32(ARMED).store(1, Ordering::SeqCst);
    let sleep = || {
        let record = record.clone();
        std::thread::spawn(move || {
            let long = futex::Timespec { tv_sec: 20, tv_nsec: 0 };
            futex::wait(record.word32(ARMED), futex::Flags::empty(), 1, Some(&long))
        })
    };
    let sleepers = [sleep(), sleep()];
    // Repeated, because a thread may not be asleep yet at the time of a wake-up.
    while !sleepers.iter().all(|sleeper| sleeper.is_finished()) {
        wake(&record);
        std::thread::yield_now();
    }
    for sleeper in sleepers {
        assert_ne!(sleeper.join().unwrap(), Err(rustix::io::Errno::TIMEDOUT), "not woken");
    }
}
