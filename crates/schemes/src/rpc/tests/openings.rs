//! Tests of the mechanisms that open chunks: rebound type-1 windows, regions, and regions
//! registered in advance; and of several cores that share the table.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use verbs::direct::DirectNic;
use verbs::{Key, Nic};

use super::*;

fn with_key(granted: &Reply, key: Key) -> Reply {
    Reply { keys: [key; MAX_GROUP], ..*granted }
}

/// OneSidedMW §2.3: the attack that type-1 windows allow and the other mechanisms prevent.
#[test]
fn guessed_tag_opens_only_type_1_windows_and_the_shared_region() {
    for scheme in SCHEMES {
        let (nic, mut node) = start(scheme, 4);
        let (victim, thief) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
        let granted = victim.allocate(&mut node);
        let mut opened = 0;
        for tag in 0..=255 {
            let guess = with_key(&granted, Key::new(granted.keys[0].index(), tag));
            if thief.read(&guess) == Status::Success {
                opened += 1;
            } else {
                let peer = node.reset_access(thief.id, GroupId(0), Lane(0)).unwrap();
                thief.access.connect(Qpn::new(peer)).unwrap();
                thief.completions();
            }
        }
        let is_open = scheme == crate::SHARED_REGION || scheme.isolation.has_type1_windows();
        assert_eq!(opened, is_open as u32, "{scheme}");
    }
}

#[test]
fn type_1_window_moves_from_the_freed_chunk_to_the_next() {
    let (nic, mut node) = start(crate::RPC_MW_1, 4);
    let hand = Hand::join(&nic, &mut node, 1);
    let first = hand.allocate(&mut node);
    let free = Ask::Free { entry: first.entry };
    assert_eq!(hand.ask(&mut node, free).outcome, Outcome::Done);
    assert_eq!(hand.ask(&mut node, free).outcome, Outcome::NotYours, "twice");
    // The key stays valid for its last owner; the chunk has no other owner meanwhile.
    assert_eq!(hand.read(&first), Status::Success);
    assert_eq!(node.status().unwrap().free, 4);
    node.audit().unwrap();
    let second = hand.allocate(&mut node);
    assert_ne!(second.entry, first.entry);
    assert_eq!(second.keys[0].index(), first.keys[0].index(), "another window");
    assert_ne!(second.keys[0], first.keys[0]);
    assert_eq!(hand.read(&second), Status::Success);
    assert_eq!(hand.read(&first), Status::RemoteAccess);
    node.audit().unwrap();
}

#[test]
fn chunk_set_aside_is_closed_and_cleared_for_other_clients() {
    let (nic, mut node) = start(crate::RPC_MW_1, 4);
    let (a, b) = (Hand::join(&nic, &mut node, 1), Hand::join(&nic, &mut node, 2));
    let granted: Vec<Reply> = (0..4).map(|_| a.allocate(&mut node)).collect();
    assert_eq!(b.allocate(&mut node).outcome, Outcome::Empty);
    for g in &granted {
        assert_eq!(a.ask(&mut node, Ask::Free { entry: g.entry }).outcome, Outcome::Done);
    }
    // Data written after a free does not reach the next owner.
    let from = [a.memory.sge(1024, 8)];
    a.memory.memory().write(1024, b"leftover");
    for g in &granted {
        let to = verbs::Remote { addr: g.addr, rkey: g.keys[0] };
        let op = Op::Write { to, from: &from };
        a.access.post_send(&[WorkRequest { id: 3, op, signaled: true }]).unwrap();
        assert_eq!(a.completions()[0].status, Status::Success);
    }
    for _ in 0..4 {
        let got = b.allocate(&mut node);
        assert_eq!(got.outcome, Outcome::Done);
        assert_eq!(b.read(&got), Status::Success);
        assert_eq!(b.memory.memory().load_be64(1024), 0);
        let old = granted.iter().find(|g| g.entry == got.entry).unwrap();
        assert_ne!(a.read(old), Status::Success);
        let peer = node.reset_access(a.id, GroupId(0), Lane(0)).unwrap();
        a.access.connect(Qpn::new(peer)).unwrap();
        a.completions();
    }
    assert_eq!(b.allocate(&mut node).outcome, Outcome::Empty);
    node.audit().unwrap();
}

/// A second free of a chunk fails while an allocation in the same poll takes over its window.
#[test]
fn chunk_whose_window_is_reused_is_not_freed_again() {
    let (nic, mut node) = start(crate::RPC_MW_1, 4);
    let hand = Hand::join(&nic, &mut node, 1);
    let entry = hand.allocate(&mut node).entry;
    assert_eq!(hand.ask(&mut node, Ask::Free { entry }).outcome, Outcome::Done);
    for ask in [Ask::Allocate { group: 0, order: CHUNK_ORDER }, Ask::Free { entry }] {
        hand.receive();
        hand.send(&Request { number: 77, ask }.to_bytes());
    }
    assert!(node.poll().unwrap());
    assert!(hand.completions().iter().all(|c| c.status == Status::Success));
    let last = hand.reply();
    assert_eq!((last.outcome, last.entry), (Outcome::NotYours, entry));
    node.audit().unwrap();
    assert_eq!(node.status().unwrap().free, 3);
}

#[test]
fn chunks_set_aside_are_limited_by_credits() {
    let (nic, mut node) = start(crate::RPC_MW_1, 16);
    let hand = Hand::join(&nic, &mut node, 1);
    let granted: Vec<Reply> = (0..16).map(|_| hand.allocate(&mut node)).collect();
    for g in &granted {
        assert_eq!(hand.ask(&mut node, Ask::Free { entry: g.entry }).outcome, Outcome::Done);
    }
    let open = granted.iter().filter(|g| is_bound(&nic, g.keys[0])).count();
    assert_eq!(open as u32, CREDITS);
    retire(&mut node, hand.id);
    assert!(!granted.iter().any(|g| is_bound(&nic, g.keys[0])));
    node.audit().unwrap();
}

/// True if the window is bound.
fn is_bound(nic: &SoftNic, key: Key) -> bool {
    nic.query_key(key).unwrap().len > 0
}

#[test]
fn region_lives_as_long_as_its_grant() {
    let (nic, mut node) = start(crate::FINE_MR, 4);
    let hand = Hand::join(&nic, &mut node, 1);
    for _ in 0..100 {
        let granted = hand.allocate(&mut node);
        let key = granted.keys[0];
        assert_eq!(nic.query_key(key).unwrap().tag, key.tag());
        assert_eq!(hand.read(&granted), Status::Success);
        let free = Ask::Free { entry: granted.entry };
        assert_eq!(hand.ask(&mut node, free).outcome, Outcome::Done);
        assert!(nic.query_key(key).is_err(), "the region is still registered");
    }
}

#[test]
fn static_regions_are_registered_in_advance() {
    let (nic, mut node) = start(crate::STATIC_MR, 8);
    let hand = Hand::join(&nic, &mut node, 1);
    while node.poll().unwrap() {}
    assert_eq!(node.status().unwrap().free, 8);
    // A region registered now has a higher index than the regions registered in advance.
    let pd = nic.alloc_pd().unwrap();
    let memory = nic.alloc_dma(4096).unwrap();
    let marker = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
    let granted = hand.allocate(&mut node);
    assert!(granted.keys[0].index() < marker.key().index(), "the chunk was registered on request");
    assert_eq!(hand.read(&granted), Status::Success);
    node.audit().unwrap();
}

#[test]
fn static_regions_of_other_clients_are_taken_when_none_is_free() {
    let (nic, mut node) = start(crate::STATIC_MR, 4);
    let hands: Vec<Hand> = (1..=3).map(|id| Hand::join(&nic, &mut node, id)).collect();
    while node.poll().unwrap() {}
    for _ in 0..4 {
        assert_eq!(hands[2].allocate(&mut node).outcome, Outcome::Done);
    }
    assert_eq!(hands[0].allocate(&mut node).outcome, Outcome::Empty);
    assert_eq!(node.status().unwrap().free, 0);
    retire(&mut node, hands[2].id);
    assert_eq!(hands[0].allocate(&mut node).outcome, Outcome::Done);
    node.audit().unwrap();
}

/// Several cores answer their compute nodes concurrently, over one nearly empty table.
#[test]
fn cores_share_one_table() {
    const CLIENTS: u32 = 8;
    const ROUNDS: u32 = 300;
    for scheme in SCHEMES {
        let nic = SoftNic::inline();
        let settings =
            NodeSettings { clients_max: CLIENTS, ..settings(scheme, CLIENTS as u64 + 3) }
                .with("cores", 4);
        let mut node = Node::new(&nic, &settings).unwrap();
        let hands: Vec<Hand> = (1..=CLIENTS).map(|id| Hand::join(&nic, &mut node, id)).collect();
        let workers = node.cpu().workers;
        assert_eq!(workers.len(), 4);
        // The compute nodes of a core are those that it answers.
        let held = Arc::new(Mutex::new(BTreeSet::new()));
        let left = AtomicU32::new(CLIENTS);
        thread::scope(|s| {
            for mut worker in workers {
                let left = &left;
                s.spawn(move || {
                    while left.load(Ordering::Acquire) > 0 {
                        if !worker.poll().unwrap() {
                            thread::yield_now();
                        }
                    }
                });
            }
            for hand in &hands {
                let (held, left) = (held.clone(), &left);
                s.spawn(move || {
                    for round in 0..ROUNDS {
                        let mut mine = Vec::new();
                        for _ in 0..1 + round % 2 {
                            let granted =
                                hand.ask_and_wait(Ask::Allocate { group: 0, order: CHUNK_ORDER });
                            if granted.outcome == Outcome::Done {
                                let new = held.lock().unwrap().insert(granted.entry);
                                assert!(new, "chunk {} has two owners", granted.entry);
                                assert_eq!(hand.read(&granted), Status::Success);
                                mine.push(granted.entry);
                            } else {
                                assert_eq!(granted.outcome, Outcome::Empty);
                            }
                        }
                        for entry in mine {
                            held.lock().unwrap().remove(&entry);
                            let freed = hand.ask_and_wait(Ask::Free { entry });
                            assert_eq!(freed.outcome, Outcome::Done);
                        }
                    }
                    left.fetch_sub(1, Ordering::AcqRel);
                });
            }
        });
        while node.poll().unwrap() {}
        node.audit().unwrap();
        let status = node.status().unwrap();
        assert_eq!((status.free, status.clients), (CLIENTS as u64 + 3, CLIENTS as u64));
        assert_eq!(status.allocations_cpu, status.frees_cpu);
        assert!(status.allocations_cpu > (CLIENTS * ROUNDS) as u64, "{scheme}: {status:?}");
    }
}

impl Hand {
    /// Sends a request and waits until another thread has answered it.
    fn ask_and_wait(&self, ask: Ask) -> Reply {
        self.receive();
        self.send(&Request { number: 77, ask }.to_bytes());
        let mut left = 2;
        while left > 0 {
            let got = self.completions();
            assert!(got.iter().all(|c| c.status == Status::Success), "{got:?}");
            left -= got.len();
            if got.is_empty() {
                thread::yield_now();
            }
        }
        self.reply()
    }
}
