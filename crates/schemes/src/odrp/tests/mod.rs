//! The chain against conforming and non-conforming clients. Requests are posted directly on the
//! inline NIC, and the test's thread is the memory node's CPU.

mod raw_client;
mod reconnect;

use std::collections::BTreeMap;
use std::sync::Arc;

use rnic::nic::SoftNic;
use scheme::{ClientId, NodeScheme, NodeSettings};
use verbs::{
    DmaMemory, MemoryRegion, Nic, Op, QpState, Qpn, QueuePair, ReceiveRequest, Status, WorkRequest,
};

use rnic::limits::Limits;
use rnic::port::Function;
use rnic::port::inline::InlineNic;

use self::raw_client::{REPLY, RawClient};
use super::*;

const CREDITS: u32 = 4;

fn settings(pages: u64) -> NodeSettings {
    let settings = NodeSettings::new(crate::ODRP, pages, PAGE_BYTES as u64);
    NodeSettings { credits: CREDITS, clients_max: 8, ..settings }
}

fn start(pages: u64) -> (SoftNic, Node<SoftNic>) {
    let nic = SoftNic::inline();
    let node = Node::new(nic.clone(), settings(pages)).unwrap();
    (nic, node)
}

#[test]
fn queues_have_room_for_all_credits_of_all_compute_nodes() {
    let settings = NodeSettings { clients_max: 50, credits: 16, ..settings(4) };
    assert_eq!(super::node::in_flight_max(&settings), 800);
    assert_eq!(super::node::faults_max(&settings), 800 * 32 + 1024);
    let node = Node::new(SoftNic::inline(), settings).unwrap();
    assert_eq!(node.memory().shape.in_flight, 800);
}

fn retire(node: &mut Node<SoftNic>, client: ClientId) {
    node.retire(client).unwrap();
    while !node.is_retired(client) {
        node.poll().unwrap();
    }
}

#[test]
fn first_write_allocates_a_page_and_free_returns_it() {
    let (nic, mut node) = start(4);
    let client = RawClient::join(&nic, &mut node, 1);
    let free = |node: &mut Node<SoftNic>| node.status().unwrap().free;
    assert_eq!((client.read(3), free(&mut node)), (None, 4));
    assert_eq!((client.write(3, 7), free(&mut node)), (status::DONE, 3));
    assert_eq!((client.write(3, 8), free(&mut node)), (status::DONE, 3));
    assert_eq!(client.read(3), Some(8));
    assert_eq!(client.read(2), None);
    node.audit().unwrap();
    assert_eq!((client.free(3), free(&mut node)), (status::DONE, 4));
    assert_eq!(client.free(3), status::UNMAPPED, "twice");
    assert_eq!(client.read(3), None);
    node.audit().unwrap();
    let status = node.status().unwrap();
    assert_eq!((status.allocations_nic, status.frees_nic, status.frees_cpu), (1, 1, 0));
}

#[test]
fn empty_pool_answers_out_of_memory() {
    let (nic, mut node) = start(3);
    let (a, b) = (RawClient::join(&nic, &mut node, 1), RawClient::join(&nic, &mut node, 2));
    for number in 0..3 {
        assert_eq!(a.write(number, number as u8 + 1), status::DONE);
    }
    for _ in 0..20 {
        assert_eq!(b.write(0, 9), status::EMPTY);
        assert_eq!(b.read(0), None);
    }
    assert!(node.client_waits(b.id).unwrap());
    assert!(node.is_watching());
    assert_eq!(a.write(1, 5), status::DONE, "a mapped page remains writable");
    assert_eq!(a.free(1), status::DONE);
    assert!(node.poll().unwrap(), "available was not broadcast");
    assert!(!node.is_watching());
    assert_eq!(b.write(0, 9), status::DONE);
    assert_eq!((a.read(0), a.read(1), a.read(2)), (Some(1), None, Some(3)));
    assert_eq!(b.read(0), Some(9));
    node.audit().unwrap();
}

#[test]
fn page_numbers_are_private_to_a_client() {
    let (nic, mut node) = start(8);
    let clients: Vec<RawClient> = (1..=3).map(|id| RawClient::join(&nic, &mut node, id)).collect();
    for (client, value) in clients.iter().zip(1..) {
        assert_eq!(client.write(2, value), status::DONE);
    }
    assert_eq!(clients[1].free(2), status::DONE);
    let seen: Vec<_> = clients.iter().map(|client| client.read(2)).collect();
    assert_eq!(seen, [Some(1), None, Some(3)]);
    node.audit().unwrap();
}

#[test]
fn unknown_requests_are_answered_with_bad() {
    let (nic, mut node) = start(4);
    let client = RawClient::join(&nic, &mut node, 1);
    assert_eq!(client.write(0, 1), status::DONE);
    for op in (0..=255).filter(|op| !(1..=3).contains(op)) {
        for number in [0, 1] {
            assert_eq!(client.ask_raw(op, number), status::BAD, "op {op}");
        }
    }
    // A truncated request uses the remaining arguments of an earlier request of the same client.
    for len in 1..REQUEST_BYTES {
        assert_eq!(
            client.send(&client.request(PageOp::Read as u8, 0)[..len]),
            [Status::Success; 2]
        );
    }
    assert_eq!((client.read(0), client.read(1)), (Some(1), None));
    node.audit().unwrap();
}

#[test]
fn page_number_beyond_table_breaks_only_the_sender() {
    let (nic, mut node) = start(4);
    let (bad, good) = (RawClient::join(&nic, &mut node, 1), RawClient::join(&nic, &mut node, 2));
    assert_eq!((bad.write(0, 1), good.write(0, 2)), (status::DONE, status::DONE));
    for (round, number) in [4, 5, 100, 0x10000, 0xff_ffff].into_iter().enumerate() {
        for op in 0..=3 {
            let sent = match op {
                0 => bad.send_read(&bad.read_request(number)),
                _ => bad.send(&bad.request(op, number)),
            };
            assert!(sent.len() < 2, "an invalid page number was answered: {sent:?}");
            while node.poll().unwrap() {}
            assert_ne!(
                bad.qp.state().unwrap(),
                QpState::ReadyToSend,
                "the client's QP is not broken"
            );
            assert_eq!(good.read(0), Some(2));
            bad.reset(&mut node);
            assert_eq!(bad.read(0), Some(1), "round {round}");
        }
    }
    node.audit().unwrap();
    assert_eq!(node.status().unwrap().refused, 20);
}

#[test]
fn foreign_addresses_break_only_the_sender() {
    let (nic, mut node) = start(4);
    let (bad, good) = (RawClient::join(&nic, &mut node, 1), RawClient::join(&nic, &mut node, 2));
    assert_eq!(good.write(0, 2), status::DONE);
    assert_eq!(bad.write(0, 1), status::DONE);
    // Offsets and lengths of the buffer's address and key, and of the reply's.
    for (at, len) in [(4, 8), (12, 4), (16, 8), (24, 4)] {
        for op in 1..=3 {
            for number in [0, 1] {
                let mut request = bad.request(op, number);
                request[at..at + len].fill(0x5a);
                let ended = bad.send(&request);
                while node.poll().unwrap() {}
                if ended != [Status::Success; 2] {
                    bad.reset(&mut node);
                }
                assert_eq!(good.read(0), Some(2));
                node.audit().unwrap();
            }
        }
    }
    assert_eq!(bad.write(0, 1), status::DONE);
    for at in [3, 11] {
        let mut request = bad.read_request(0);
        request[at..at + 4].fill(0x5a);
        assert_ne!(bad.send_read(&request), [Status::Success; 2]);
        while node.poll().unwrap() {}
        bad.reset(&mut node);
        assert_eq!(bad.read(0), Some(1));
    }
    let mut request = bad.request(PageOp::Write as u8, 2);
    request[4..16].copy_from_slice(&good.request(0, 0)[4..16]);
    bad.send(&request);
    while node.poll().unwrap() {}
    bad.reset(&mut node);
    assert_ne!(bad.read(2), Some(2), "it read another client's page");
    retire(&mut node, bad.id);
    node.audit().unwrap();
    assert_eq!(node.status().unwrap().free, 3);
}

#[test]
fn client_that_exceeds_its_credits_blocks_only_itself() {
    let (nic, mut node) = start(64);
    let (eager, modest) =
        (RawClient::join(&nic, &mut node, 1), RawClient::join(&nic, &mut node, 2));
    // The eager client posts no receives: its answers wait, and with them its credits.
    for number in 0..3 * CREDITS {
        let request = eager.request(PageOp::Write as u8, number);
        let op = Op::SendInline { data: &request };
        eager.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
    }
    assert!(eager.completions().len() as u32 <= CREDITS);
    for round in 0..20 {
        assert_eq!(modest.write(round, 1), status::DONE);
    }
    for _ in 0..3 * CREDITS {
        eager.qp.post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
    }
    let mut done = 0;
    while done < 3 * CREDITS as usize {
        done += eager.completions().len();
        node.poll().unwrap();
    }
    node.audit().unwrap();
}

#[test]
fn freed_pages_are_cleared_and_departure_frees_all() {
    let (nic, mut node) = start(4);
    for id in 1..=6 {
        let client = RawClient::join(&nic, &mut node, id);
        for number in 0..4 {
            assert_eq!(client.read(number), None);
            assert_eq!(client.write(number, id as u8), status::DONE);
        }
        if id % 2 == 0 {
            assert_eq!(client.free(2), status::DONE);
        }
        retire(&mut node, client.id);
        assert_eq!(node.status().unwrap().free, 4);
        node.audit().unwrap();
        let mut pages = vec![0xee; 4 * PAGE_BYTES];
        node.memory().chunks.memory().read(0, &mut pages);
        assert!(pages.iter().all(|b| *b == 0), "pages are not cleared");
        assert_ne!(client.send(&client.request(PageOp::Read as u8, 0)), [Status::Success; 2]);
    }
}

/// A NIC that executes single WQEs, in an order that a seed determines.
struct Stepper {
    nic: Arc<InlineNic>,
    state: u64,
    order: u64,
}

impl Stepper {
    fn new(seed: u64) -> Self {
        let memory = |bytes: usize| DmaMemory::anonymous(bytes).unwrap();
        let nic = InlineNic::stepped(Limits::default(), Box::new(memory));
        Self { nic, state: seed, order: seed }
    }

    fn physical(&self) -> SoftNic {
        SoftNic::new(Function::Inline(self.nic.physical()))
    }

    fn random(&mut self, below: usize) -> usize {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % below
    }

    /// Executes up to `wqes` WQEs, each of the ready QP that is first in an order. The order
    /// changes from time to time, so that some QPs make no progress for long while others advance
    /// far.
    fn run(&mut self, wqes: usize) {
        for _ in 0..wqes {
            if self.random(24) == 0 {
                self.order = self.random(1 << 30) as u64;
            }
            let ready = self.nic.ready_qps();
            if ready.is_empty() {
                return;
            }
            let rank =
                |qpn: &&Qpn| (self.order ^ qpn.raw() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let next = *ready.iter().min_by_key(rank).expect("one is ready");
            assert!(self.nic.step(next), "{next:?} was ready");
        }
    }
}

impl RawClient {
    fn post(&self, qp: &<SoftNic as Nic>::Qp, data: &[u8]) {
        qp.post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
        let op = Op::SendInline { data };
        qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
    }
}

/// A page is read and freed concurrently, and another client waits for a page. In every order of
/// WQEs the read returns the reader's own data, or no page.
#[test]
fn page_is_not_reallocated_before_reads_end() {
    let seeds = if std::env::var_os("GRANARY_TEST_FULL").is_some() { 20_000 } else { 1500 };
    let (mut read, mut unmapped, mut given) = (0, 0, 0);
    for seed in 0..seeds {
        let mut stepper = Stepper::new(seed);
        let nic = stepper.physical();
        let mut node = Node::new(nic.clone(), settings(1)).unwrap();
        let (a, b) = (RawClient::join(&nic, &mut node, 1), RawClient::join(&nic, &mut node, 2));
        stepper.run(usize::MAX);
        a.memory.memory().write(0, &[7; PAGE_BYTES]);
        a.post(&a.qp, &a.request(PageOp::Write as u8, 0));
        stepper.run(usize::MAX);
        a.memory.memory().write(0, &[0xee; PAGE_BYTES]);
        b.memory.memory().write(0, &[9; PAGE_BYTES]);
        a.post(&a.reads, &a.read_request(0));
        stepper.run(seed as usize % 8);
        a.post(&a.qp, &a.request(PageOp::Free as u8, 0));
        stepper.run(seed as usize % 13);
        for _ in 0..CREDITS {
            b.post(&b.qp, &b.request(PageOp::Write as u8, 0));
        }
        stepper.run(usize::MAX);
        match a.full_of(0) {
            7 => read += 1,
            0xee => unmapped += 1,
            other => panic!("seed {seed}: the read returned {other}"),
        }
        given += (b.memory.memory().load_be64(REPLY) == status::DONE) as u32;
        assert!(!node.poll().unwrap());
        node.audit().unwrap();
    }
    println!("read {read}, unmapped {unmapped}, given to another client {given}");
    assert!(read > 100 && unmapped > 10 && given > 100, "{read} {unmapped} {given}");
}

/// As above, with a write that is still being transferred when the page is freed: the write must
/// not reach the page after another client has got it.
#[test]
fn page_is_not_reallocated_before_writes_end() {
    let seeds = if std::env::var_os("GRANARY_TEST_FULL").is_some() { 20_000 } else { 1500 };
    let mut given = 0;
    for seed in 0..seeds {
        let mut stepper = Stepper::new(seed);
        let nic = stepper.physical();
        let mut node = Node::new(nic.clone(), settings(1)).unwrap();
        let (a, b) = (RawClient::join(&nic, &mut node, 1), RawClient::join(&nic, &mut node, 2));
        stepper.run(usize::MAX);
        a.memory.memory().write(0, &[7; PAGE_BYTES]);
        b.memory.memory().write(0, &[9; PAGE_BYTES]);
        for ask in [PageOp::Write, PageOp::Write, PageOp::Free] {
            a.post(&a.qp, &a.request(ask as u8, 0));
            stepper.run(seed as usize % 11);
        }
        for _ in 0..CREDITS {
            b.post(&b.qp, &b.request(PageOp::Write as u8, 0));
        }
        stepper.run(usize::MAX);
        if b.memory.memory().load_be64(REPLY) == status::DONE {
            given += 1;
            let mut page = [0; PAGE_BYTES];
            node.memory().chunks.memory().read(0, &mut page);
            assert!(page == [9; PAGE_BYTES], "seed {seed}: the first client wrote to the page");
        }
        assert!(!node.poll().unwrap());
        node.audit().unwrap();
    }
    assert!(given > 100, "{given}");
}

/// A client breaks the QP of its reads while it frees the page, at every step. The page is not
/// lost, whether the client reconnects or leaves.
#[test]
fn free_that_waits_for_a_stuck_read_loses_no_page() {
    for steps in 0..120 {
        for leaves in [false, true] {
            let mut stepper = Stepper::new(steps as u64);
            let nic = stepper.physical();
            let mut node = Node::new(nic.clone(), settings(2)).unwrap();
            let a = RawClient::join(&nic, &mut node, 1);
            stepper.run(usize::MAX);
            for number in 0..2 {
                a.post(&a.qp, &a.request(PageOp::Write as u8, number));
                stepper.run(usize::MAX);
            }
            // The read has no receive, or a bad key, so it is never answered.
            let mut request = a.read_request(0);
            if steps % 2 == 0 {
                request[11..].fill(0x5a);
            }
            let op = Op::SendInline { data: &request };
            a.reads.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
            stepper.run(steps % 10);
            a.post(&a.qp, &a.request(PageOp::Free as u8, 0));
            stepper.run(steps);
            let settle = |stepper: &mut Stepper, node: &mut Node<SoftNic>| {
                stepper.run(usize::MAX);
                node.poll().unwrap();
            };
            if leaves {
                node.retire(a.id).unwrap();
                while !node.is_retired(a.id) {
                    settle(&mut stepper, &mut node);
                }
                assert_eq!(node.status().unwrap().free, 2, "after {steps} steps");
            } else {
                for qp in [&a.reads, &a.qp] {
                    qp.modify(verbs::QpChange::Reset).unwrap();
                }
                let peers = loop {
                    match node.reset_management(a.id).unwrap() {
                        Some(peers) => break peers,
                        None => settle(&mut stepper, &mut node),
                    }
                };
                a.reads.connect(Qpn::new(peers[0])).unwrap();
                a.qp.connect(Qpn::new(peers[1])).unwrap();
                for _ in 0..10 {
                    settle(&mut stepper, &mut node);
                }
                a.completions();
                for (op, expected) in [(PageOp::Write, status::DONE), (PageOp::Free, status::DONE)]
                {
                    a.memory.memory().zero(REPLY, 8);
                    a.post(&a.qp, &a.request(op as u8, 0));
                    stepper.run(usize::MAX);
                    assert_eq!(a.memory.memory().load_be64(REPLY), expected, "after {steps} steps");
                }
                assert_eq!(node.status().unwrap().free, 1);
            }
            node.audit().unwrap();
        }
    }
}

/// Compares random requests of several clients with a model of their pages, over many laps of the
/// rings and past the wrap of the rings' indices.
#[test]
fn random_requests_match_the_model() {
    let rounds = if std::env::var_os("GRANARY_TEST_FULL").is_some() { 400_000 } else { 70_000 };
    let seed = 0x0dd9_u64;
    println!("seed {seed:#x}");
    let mut state = seed;
    let mut random = move |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    const PAGES: usize = 12;
    let (nic, mut node) = start(PAGES as u64);
    let clients: Vec<RawClient> = (1..=3).map(|id| RawClient::join(&nic, &mut node, id)).collect();
    let mut model: Vec<BTreeMap<u32, u8>> = vec![BTreeMap::new(); clients.len()];
    for round in 0..rounds {
        // Client 0 sends most requests, so that its counters wrap.
        let who = if random(8) == 0 { 1 + random(2) as usize } else { 0 };
        let (client, number) = (&clients[who], random(PAGES as u64) as u32);
        let mapped: usize = model.iter().map(BTreeMap::len).sum();
        let mine = &mut model[who];
        match random(4) {
            0 => assert_eq!(client.read(number), mine.get(&number).copied(), "round {round}"),
            1 => {
                let was = mine.remove(&number).is_some();
                let expected = if was { status::DONE } else { status::UNMAPPED };
                assert_eq!(client.free(number), expected, "round {round}");
            }
            _ => {
                let value = random(255) as u8 + 1;
                let fits = mapped < PAGES || mine.contains_key(&number);
                let expected = if fits { status::DONE } else { status::EMPTY };
                assert_eq!(client.write(number, value), expected, "round {round}");
                if fits {
                    mine.insert(number, value);
                }
            }
        }
        if round % 1000 == 0 {
            node.audit().unwrap();
            assert!(!node.poll().unwrap());
        }
    }
    node.audit().unwrap();
}
