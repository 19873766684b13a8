//! Budgets: a client that exceeds one loses its management connection, learns the reason, and keeps
//! everything else.

use std::time::{Duration, Instant};

use scheme::Error;

use super::*;
use crate::onesidedmw::Budget;

fn start(budget: Budget) -> (SoftNic, Node<SoftNic>, Raw, Raw) {
    let nic = SoftNic::inline();
    let settings = settings(64, 3, 8).with("budget", budget);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    let b = Raw::join(&nic, &mut node, 2, &settings);
    (nic, node, a, b)
}

/// Short enough that the interval has always elapsed at the next turn.
const INTERVAL: Duration = Duration::from_nanos(1_000_000);

fn turn(node: &mut Node<SoftNic>) {
    let until = Instant::now() + 2 * INTERVAL;
    while node.poll().unwrap() || Instant::now() < until {
        std::thread::yield_now();
    }
}

fn is_cut(raw: &Raw) -> bool {
    let states = [&raw.alloc, &raw.free].map(|qp| qp.state().unwrap());
    raw.drain();
    states == [QpState::Error; 2]
}

/// Requests a re-establishment, as the client code does.
fn ask_again(node: &mut Node<SoftNic>, raw: &Raw) -> Error {
    for qp in [&raw.alloc, &raw.free] {
        qp.modify(QpChange::Reset).unwrap();
    }
    match node.reset_management(raw.id) {
        Err(e) => e,
        Ok(peers) => panic!("re-established: {peers:?}"),
    }
}

/// Re-establishes the connection once the suspension has ended.
fn come_back(node: &mut Node<SoftNic>, raw: &Raw) {
    let e = ask_again(node, raw);
    assert!(matches!(e, Error::OverBudget { .. }), "{e}");
    node.clients.get_mut(&raw.id).unwrap().meter.end_suspension();
    raw.reset_management(node);
}

fn can_use(raw: &Raw, chunk: &Chunk) {
    for lane in 0..2 {
        let at = Remote { addr: chunk.addr, rkey: chunk.keys[lane] };
        assert_eq!(raw.access(lane, at, Some(b"still"), 0), Status::Success);
        assert_eq!(raw.access(lane, at, None, 5), Status::Success);
        assert_eq!(raw.read_back(5), b"still");
    }
}

#[test]
fn request_rate_over_budget_ends_the_connection() {
    let budget = Budget { requests_per_s: Some(100), interval: INTERVAL, ..Budget::default() };
    let (_nic, mut node, a, b) = start(budget);
    let kept = a.allocate().unwrap();
    let other = b.allocate().unwrap();
    turn(&mut node);
    assert!(!is_cut(&a));
    // This takes far less than three seconds, also under a race detector.
    for _ in 0..150 {
        let c = a.allocate().unwrap();
        assert_eq!(a.free(c.entry), status::FREED);
    }
    turn(&mut node);
    assert!(is_cut(&a) && !is_cut(&b));
    can_use(&a, &kept);
    can_use(&b, &other);
    let s = node.status().unwrap().budget.unwrap();
    assert_eq!((s.ended, s.suspended, s.requests_per_s), (1, 1, Some(100)));
    assert_eq!((s.most[0].client, s.most[0].suspended), (1, true));
    let e = ask_again(&mut node, &a);
    let text = e.to_string();
    for part in
        ["requests in", "100 a second", "--budget-requests-per-s", "stay usable", "retry in"]
    {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    come_back(&mut node, &a);
    assert_eq!(a.free(kept.entry), status::FREED);
    turn(&mut node);
    assert!(!is_cut(&a) && !is_cut(&b));
    assert_eq!(node.status().unwrap().budget.unwrap().suspended, 0);
    // Refused requests count as requests too.
    for _ in 0..230 {
        a.ask_free(other.entry, 0);
        node.poll().unwrap();
        a.drain();
    }
    turn(&mut node);
    assert!(is_cut(&a) && !is_cut(&b));
    can_use(&b, &other);
    retire(&mut node, a.id);
    retire(&mut node, b.id);
    node.audit().unwrap();
    assert_eq!(node.status().unwrap().free, 64);
}

#[test]
fn chunks_over_budget_end_the_connection() {
    let budget = Budget { chunks: Some(4), interval: INTERVAL, ..Budget::default() };
    let (_nic, mut node, a, b) = start(budget);
    let mut held: Vec<Chunk> = (0..4).map(|_| a.allocate().unwrap()).collect();
    // The client stays within the budget with many requests, including refused frees.
    for _ in 0..100 {
        let c = b.allocate().unwrap();
        assert_eq!(b.free(c.entry), status::FREED);
        b.ask_free(c.entry, 0);
        node.poll().unwrap();
        b.drain();
        assert_eq!(b.free_status(0), status::REFUSED);
    }
    turn(&mut node);
    assert!(!is_cut(&a) && !is_cut(&b));
    // Refused frees do not reduce the count.
    for _ in 0..10 {
        a.ask_free(EntryId::new(60), 0);
        node.poll().unwrap();
        a.drain();
    }
    held.extend((0..2).map(|_| a.allocate().unwrap()));
    turn(&mut node);
    assert!(is_cut(&a) && !is_cut(&b));
    held.iter().for_each(|c| can_use(&a, c));
    let text = ask_again(&mut node, &a).to_string();
    for part in ["holds 6 chunks", "budget is 4", "--budget-chunks", "stay usable"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    come_back(&mut node, &a);
    // The client may keep its chunks and free them, but not allocate more.
    turn(&mut node);
    assert!(!is_cut(&a));
    assert_eq!(a.free(held.pop().unwrap().entry), status::FREED);
    turn(&mut node);
    held.push(a.allocate().unwrap());
    held.push(a.allocate().unwrap());
    turn(&mut node);
    assert!(is_cut(&a) && !is_cut(&b));
    held.iter().for_each(|c| can_use(&a, c));
    come_back(&mut node, &a);
    held.drain(4..).for_each(|c| assert_eq!(a.free(c.entry), status::FREED));
    turn(&mut node);
    assert!(!is_cut(&a));
    assert_eq!(node.status().unwrap().budget.unwrap().ended, 2);
    node.audit().unwrap();
    assert_eq!(node.memory().owned(1), 4);
}

/// Requests in flight when the connection is ended: every wait for a reply ends, and no grant is
/// lost.
#[test]
fn requests_in_flight_end_when_budget_closes_connection() {
    let budget = Budget { requests_per_s: Some(5), interval: INTERVAL, ..Budget::default() };
    let (_nic, mut node, a, _b) = start(budget);
    (0..8).for_each(|slot| a.ask_chunk(slot));
    (0..8).for_each(|slot| a.ask_free(EntryId::new(63), 8 + slot));
    turn(&mut node);
    let ended = a.drain();
    // A receive and a SEND for each of the 16 requests.
    assert_eq!(ended.len(), 32, "{ended:?}");
    let told = (0..8).filter(|&slot| a.chunk(slot).is_ok()).count() as u64;
    turn(&mut node);
    node.audit().unwrap();
    assert_eq!(node.memory().owned(1), told);
}
