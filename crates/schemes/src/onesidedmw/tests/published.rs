//! Scheme `onesidedmw-paper`: the chain of figure 5, and its holes.

use verbs::direct::DirectQp;

use super::super::{ONESIDEDMW, ONESIDEDMW_PAPER, published_chain};
use super::*;

fn published(chunks: u64, group_size: u32, credits: u32) -> NodeSettings {
    NodeSettings { scheme: ONESIDEDMW_PAPER, ..settings(chunks, group_size, credits) }
}

/// WQEs that the queues of client 1 executed for allocations, the replies included.
fn executed(node: &Node<SoftNic>) -> u64 {
    let d = &node.clients.get(&ClientId(1)).unwrap().allocs[0];
    d.worker.progress().unwrap().executed + d.front.progress().unwrap().executed
}

/// Figure 7's stores have groups of 2 windows, figure 5 has 3.
#[test]
fn allocation_executes_the_wqes_of_figure_5() {
    for (group, paper, rearmed) in [(2, 10, 16), (3, 11, 17)] {
        assert_eq!(published_chain::wqes(group as usize), paper);
        for (scheme, expected) in [(ONESIDEDMW_PAPER, paper), (ONESIDEDMW, rearmed)] {
            let nic = SoftNic::inline();
            let settings = NodeSettings { scheme, ..settings(64, group, 32) };
            let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
            let a = Raw::join(&nic, &mut node, 1, &settings);
            let before = executed(&node);
            // Fewer than a lap, whose end has further WQEs.
            (0..16).for_each(|_| drop(a.allocate().unwrap()));
            // The worker of a chain that re-arms itself executes the FAAs behind the reply, too.
            assert_eq!(executed(&node) - before, 16 * u64::from(expected), "{scheme}, {group}");
        }
    }
}

#[test]
fn published_chain_allocates_and_frees_for_many_laps() {
    for group in 2..=6 {
        let nic = SoftNic::inline();
        let settings = published(8, group, 4);
        let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
        let clients: Vec<Raw> =
            (1..=3).map(|id| Raw::join(&nic, &mut node, id, &settings)).collect();
        // Enough rounds for the 16-bit building-block indices to wrap.
        for round in 0..3000 {
            let c = &clients[round % 3];
            let held = [c.allocate().unwrap(), c.allocate().unwrap()];
            for chunk in &held {
                for (lane, &rkey) in chunk.keys.iter().enumerate() {
                    let at = Remote { addr: chunk.addr + 8, rkey };
                    assert_eq!(c.access(lane, at, Some(b"granary!"), 0), Status::Success);
                }
            }
            for chunk in &held {
                assert_eq!(c.free(chunk.entry), status::FREED);
            }
            node.poll().unwrap();
        }
        node.audit().unwrap();
        let s = node.status().unwrap();
        assert_eq!((s.allocations_nic, s.frees_nic, s.free), (6000, 6000, 8));
    }
}

/// The chain needs the CPU, which posts executed WQEs again.
#[test]
fn allocations_wait_for_the_cpu_once_the_posted_wqes_are_executed() {
    let nic = SoftNic::inline();
    let settings = published(256, 2, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    for _ in 0..published_chain::ahead(4) {
        a.allocate().unwrap();
    }
    a.ask_chunk(1);
    a.drain();
    assert_eq!(a.chunk(1).unwrap_err(), status::PENDING);
    assert!(node.poll().unwrap(), "the CPU was not notified");
    let mut waited = 0;
    while a.chunk(1).is_err() {
        a.drain();
        waited += 1;
        assert!(waited < 1_000_000, "the request was not executed");
    }
    node.audit().unwrap();
}

/// The head passes the empty slot of each refused allocation, and the chunk that is pushed into
/// that slot is lost. Scheme `onesidedmw` loses none.
#[test]
fn empty_queue_loses_chunks_in_the_published_chain_only() {
    for (scheme, refused, left) in [(ONESIDEDMW_PAPER, 2, 6), (ONESIDEDMW, 2, 8)] {
        let nic = SoftNic::inline();
        let settings = NodeSettings { scheme, ..settings(8, 3, 4) };
        let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
        let a = Raw::join(&nic, &mut node, 1, &settings);
        let held: Vec<Chunk> = (0..8).map(|_| a.allocate().unwrap()).collect();
        for _ in 0..refused {
            a.ask_chunk(0);
            a.drain();
            node.poll().unwrap();
            a.drain();
            assert_eq!(a.chunk(0).unwrap_err(), status::EMPTY);
        }
        for chunk in &held {
            assert_eq!(a.free(chunk.entry), status::FREED);
        }
        node.poll().unwrap();
        assert_eq!(node.status().unwrap().free, left, "{scheme}");
        assert_eq!(node.audit().is_ok(), left == 8, "{scheme}");
        (0..left).for_each(|_| drop(a.allocate().unwrap()));
    }
}

/// Windows keep their keys, so a client's key opens a chunk that it freed and got again.
#[test]
fn old_key_opens_the_next_grant_of_the_published_chain_only() {
    for (scheme, outcome) in
        [(ONESIDEDMW_PAPER, Status::Success), (ONESIDEDMW, Status::RemoteAccess)]
    {
        let nic = SoftNic::inline();
        let settings = NodeSettings { scheme, ..settings(1, 2, 4) };
        let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
        let a = Raw::join(&nic, &mut node, 1, &settings);
        let old = a.allocate().unwrap();
        let at = Remote { addr: old.addr, rkey: old.keys[0] };
        assert_eq!(a.free(old.entry), status::FREED);
        assert_eq!(a.allocate().unwrap().addr, old.addr);
        assert_eq!(a.access(0, at, None, 8), outcome, "{scheme}");
    }
}

/// Requests in flight behind the one that found the queue empty are answered too.
#[test]
fn several_requests_in_flight_find_the_published_queue_empty() {
    let nic = SoftNic::inline();
    let settings = published(3, 3, 8);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    let b = Raw::join(&nic, &mut node, 2, &settings);
    (0..8).for_each(|slot| a.ask_chunk(slot));
    a.drain();
    assert!(node.poll().unwrap(), "the CPU was not notified");
    a.drain();
    let held: Vec<Chunk> = (0..3).map(|slot| a.chunk(slot).unwrap()).collect();
    (3..8).for_each(|slot| assert_eq!(a.chunk(slot).unwrap_err(), status::EMPTY));
    // The bulletin of a client that sent requests says "empty".
    assert_eq!(a.memory.memory().load_be32(32768), 1);
    for chunk in &held {
        assert_eq!(a.free(chunk.entry), status::FREED);
    }
    // One request has reached the head.
    node.poll().unwrap();
    assert_eq!(node.status().unwrap().free, 2);
    let mine = [b.allocate().unwrap(), b.allocate().unwrap()];
    // A departed client's chunks are free again, with or without requests in flight.
    a.ask_chunk(0);
    retire(&mut node, b.id);
    retire(&mut node, a.id);
    assert_eq!(mine.len(), 2);
    assert_eq!(node.memory().owned(0), 3);
}

#[test]
fn undelivered_grant_of_the_published_chain_is_reclaimed() {
    let nic = SoftNic::inline();
    let settings = published(8, 3, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    for _ in 0..20 {
        let chunk = a.allocate().unwrap();
        assert_eq!(a.free(chunk.entry), status::FREED);
    }
    a.ask_chunk_without_reply();
    assert_eq!(node.status().unwrap().free, 7);
    a.reset_management(&mut node);
    node.poll().unwrap();
    assert_eq!(node.status().unwrap().free, 8);
    for _ in 0..100 {
        let chunk = a.allocate().unwrap();
        assert_eq!(a.free(chunk.entry), status::FREED);
        node.poll().unwrap();
    }
    node.audit().unwrap();
}

#[test]
fn published_chain_needs_separate_queue_pairs() {
    let error = Options::of(&published(8, 3, 4).with("separation", false)).unwrap_err();
    assert!(error.to_string().contains("onesidedmw-paper"), "{error}");
}
