//! Tests of each port behind a [`Function`], and of the inline port.

use super::inline::InlineNic;
use super::test_queue::TestQueue;
use super::*;
use crate::limits::{FunctionLimits, Limits};
use verbs::{AsyncEvent, FunctionId, QpChange};

fn inline() -> (std::sync::Arc<InlineNic>, Function) {
    let nic = InlineNic::new(Limits::default());
    let f = nic.physical();
    (nic, Function::Inline(f))
}

fn queue(f: &Function) -> (TestQueue, Doorbell) {
    let q = TestQueue::new(|verb| f.execute(verb).unwrap());
    let doorbell = f.doorbell(q.qpn, q.slot).unwrap();
    (q, doorbell)
}

#[test]
fn doorbell_write_runs_the_inline_engine() {
    let (nic, f) = inline();
    assert_eq!((f.port_name(), f.descriptors()), ("inline", vec![]));
    assert!(f.check_alive().is_ok());
    assert!(!f.offer_cpu() && !f.poll_engine() && !f.poll_engine_before_sleep());
    let (mut q, mut doorbell) = queue(&f);
    let before = nic.stats().completions;
    for _ in 0..1000 {
        q.nop();
        doorbell.write(q.index);
        assert!(q.is_done() && !q.is_done());
    }
    assert_eq!(nic.stats().completions - before, 1000);
    assert!(nic.ready_qps().is_empty());
}

#[test]
fn doorbell_write_executes_all_qps_that_it_makes_ready() {
    let (nic, f) = inline();
    let execute = |verb| f.execute(verb).unwrap();
    // More WQEs than the engine executes in one call.
    let mut managed: Vec<_> = (0..6).map(|_| TestQueue::with_management(true, execute)).collect();
    let (mut first, mut doorbell) = queue(&f);
    for q in &mut managed {
        (0..60).for_each(|_| q.nop());
        f.doorbell(q.qpn, q.slot).unwrap().write(q.index);
        assert!(!q.is_done(), "nothing is enabled");
        first.put(|wqe| _ = wqe.send_enable(q.qpn, q.index.into()));
    }
    doorbell.write(first.index);
    assert!(nic.ready_qps().is_empty());
    for q in &mut managed {
        assert_eq!((0..61).filter(|_| q.is_done()).count(), 60);
    }
}

#[test]
fn posting_a_receive_completes_a_blocked_send() {
    let (_nic, f) = inline();
    let (mut q, mut doorbell) = queue(&f);
    q.received.store_be32(0, 1);
    f.receive_posted();
    q.send();
    doorbell.write(q.index);
    assert!(q.is_done() && q.is_done(), "the receive was posted before");
    // That SEND set no flag, because it was not blocked: posting a receive does not run the engine.
    q.send();
    doorbell.write(q.index);
    assert!(!q.is_done());
    q.received.store_be32(0, 2);
    assert!(!q.is_done());
    f.receive_posted();
    assert!(q.is_done() && q.is_done());
    q.send();
    doorbell.write(q.index);
    q.received.store_be32(0, 3);
    f.before_sleep();
    assert!(q.is_done() && q.is_done(), "a caller runs the engine before it sleeps");
}

#[test]
fn inline_function_ends_with_last_handle_or_on_remove() {
    let (nic, physical) = inline();
    let f = nic.function(FunctionLimits::default()).unwrap();
    let g = nic.function(FunctionLimits::default()).unwrap();
    assert!(f.id() != g.id() && f.id() != FunctionId::PHYSICAL);
    assert_eq!(nic.physical().id(), FunctionId::PHYSICAL);
    let (function_f, function_g) = (Function::Inline(f.clone()), Function::Inline(g.clone()));
    let (mut q, mut doorbell) = queue(&function_f);
    let (other, _) = queue(&function_g);
    let query = |qpn| Verb::QueryQp { qpn };
    assert!(function_f.execute(query(q.qpn)).is_ok());
    g.remove();
    assert!(function_g.execute(query(other.qpn)).is_err());
    let unknown = physical.execute(query(other.qpn));
    assert!(matches!(unknown, Err(Error::Verb(crate::Error::Unknown(_)))), "{unknown:?}");
    q.nop();
    doorbell.write(q.index);
    assert!(q.is_done(), "the removal of a function affects no other");
    drop(doorbell);
    drop((f, function_f));
    let unknown = physical.execute(query(q.qpn));
    assert!(matches!(unknown, Err(Error::Verb(crate::Error::Unknown(_)))), "{unknown:?}");
}

#[test]
fn function_has_one_event_word() {
    let (_nic, f) = inline();
    let words = [f.event_word().unwrap(), f.event_word().unwrap()];
    assert_eq!(words[0].memory().addr(), words[1].memory().addr());
    let (q, _) = queue(&f);
    words[0].arm();
    let Ok(Reply::Srq(_)) = create_srq(&f) else { panic!("no SRQ") };
    f.execute(Verb::ModifyQp { qpn: q.qpn, change: QpChange::Error }).unwrap();
    let Ok(Reply::Events(events)) = f.execute(Verb::TakeEvents) else { panic!("no events") };
    let last = |event: &AsyncEvent| matches!(event, AsyncEvent::LastWqeReached { .. });
    assert!(!events.events.iter().any(last), "the QP has no SRQ");
}

fn create_srq(f: &Function) -> Result<Reply, Error> {
    let Reply::Pd(pd) = f.execute(Verb::AllocPd)? else { panic!("no PD") };
    let memory = f.alloc_dma(4096)?;
    let (ring, record) = (memory.slice(0, 64).unwrap(), memory.slice(64, 8).unwrap());
    let ring = control::ReceiveRing { ring, entries: 4, stride: 16, record };
    f.execute(Verb::CreateSrq { pd, ring })
}

#[test]
fn stepped_nic_runs_only_in_step() {
    let memory = |bytes| DmaMemory::anonymous(bytes).unwrap();
    let nic = InlineNic::stepped(Limits::default(), Box::new(memory));
    let f = Function::Inline(nic.physical());
    let (mut q, mut doorbell) = queue(&f);
    assert!(nic.ready_qps().is_empty() && !nic.step(q.qpn));
    q.nop();
    q.nop();
    doorbell.write(q.index);
    assert!(!q.is_done());
    for _ in 0..2 {
        assert_eq!(nic.ready_qps(), [q.qpn]);
        assert!(nic.step(q.qpn) && q.is_done() && !q.is_done());
    }
    assert!(nic.ready_qps().is_empty() && !nic.step(q.qpn));
}

#[test]
fn reset_qp_restarts_with_its_doorbell() {
    let host = shm::Host::start(Limits::default()).unwrap();
    for f in [inline().1, Function::Local(host.physical())] {
        let (mut q, mut doorbell) = queue(&f);
        for _ in 0..3 {
            // The producer index is the same as before the reset.
            q.nop();
            doorbell.write(q.index);
            let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while !q.is_done() {
                assert!(std::time::Instant::now() < until, "{}", f.port_name());
                std::thread::yield_now();
            }
            f.execute(Verb::ModifyQp { qpn: q.qpn, change: QpChange::Reset }).unwrap();
            doorbell.reset();
            q.index = 0;
            q.connect(|verb| f.execute(verb).unwrap());
        }
    }
}
