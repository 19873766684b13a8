//! A client dies, or loses its management QPs, at every step of its chains: the NIC executes WQE by
//! WQE and stops after k of them, for every k. The pool must be consistent in the end.

use rnic::limits::{FunctionLimits, Limits};
use rnic::port::Function;
use rnic::port::control::Verb;
use rnic::port::inline::{InlineFunction, InlineNic};
use verbs::DmaMemory;

use super::super::connection::Management;
use super::super::{ONESIDEDMW, ONESIDEDMW_PAPER};
use super::*;

const CHUNKS: u64 = 6;

/// A NIC that executes WQE by WQE, round-robin over the ready QPs.
struct Stepper {
    nic: Arc<InlineNic>,
    last: Cell<Qpn>,
}

impl Stepper {
    fn new() -> Self {
        let memory = |bytes: usize| DmaMemory::anonymous(bytes).unwrap();
        let nic = InlineNic::stepped(Limits::default(), Box::new(memory));
        Self { nic, last: Cell::new(Qpn::new(0)) }
    }

    fn physical(&self) -> SoftNic {
        SoftNic::new(Function::Inline(self.nic.physical()))
    }

    /// Executes up to `wqes` WQEs; returns the number executed.
    fn run(&self, wqes: usize) -> usize {
        for n in 0..wqes {
            let ready = self.nic.ready_qps();
            let after = ready.iter().find(|q| **q > self.last.get());
            let Some(&next) = after.or(ready.first()) else { return n };
            self.last.set(next);
            assert!(self.nic.step(next), "{next:?} was ready");
        }
        wqes
    }
}

/// A memory node with two clients. Client `a` fails; client `b` does not.
struct Scene {
    stepper: Stepper,
    node: Node<SoftNic>,
    /// The failing client, in a function of its own.
    a: Raw,
    function: InlineFunction,
    b: Raw,
    /// The chunk of `b`, which holds data.
    kept: Chunk,
    /// The chunks of `a`.
    held: Vec<Chunk>,
}

/// Requests that `a` has in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    Allocation,
    Free,
    Both,
    /// An allocation that finds no free chunk.
    Empty,
    /// As many requests of each kind as credits; the second free is a double free.
    Full,
}

const FLIGHTS: [Flight; 5] =
    [Flight::Allocation, Flight::Free, Flight::Both, Flight::Empty, Flight::Full];

impl Scene {
    fn new(scheme: Scheme, group_size: u32, flight: Flight) -> Self {
        let stepper = Stepper::new();
        let settings = NodeSettings { scheme, ..settings(CHUNKS, group_size, 4) };
        let mut node = Node::new(stepper.physical(), settings.clone()).unwrap();
        let function = stepper.nic.function(FunctionLimits::default()).unwrap();
        let own = SoftNic::new(Function::Inline(function.clone()));
        let a = Raw::join(&own, &mut node, 1, &settings);
        let b = Raw::join(&stepper.physical(), &mut node, 2, &settings);
        let allocate = |raw: &Raw| {
            raw.ask_chunk(0);
            stepper.run(usize::MAX);
            raw.drain();
            raw.chunk(0).unwrap()
        };
        let kept = allocate(&b);
        let at = Remote { addr: kept.addr, rkey: kept.keys[0] };
        let op = Op::WriteInline { to: at, data: b"kept" };
        b.access[0].post_send(&[WorkRequest { id: 7, op, signaled: true }]).unwrap();
        // Enough laps that a slot's data from earlier requests could be mistaken for this
        // request's.
        let mut held: Vec<Chunk> = (0..2).map(|_| allocate(&a)).collect();
        if flight == Flight::Empty {
            held.extend((0..CHUNKS - 3).map(|_| allocate(&a)));
        }
        let mut scene = Self { stepper, node, a, function, b, kept, held };
        scene.launch(flight);
        scene
    }

    fn launch(&mut self, flight: Flight) {
        match flight {
            Flight::Allocation | Flight::Empty => self.a.ask_chunk(8),
            Flight::Free => self.a.ask_free(self.held[0].entry, 4),
            Flight::Both => {
                self.a.ask_chunk(8);
                self.a.ask_free(self.held[0].entry, 4);
            }
            Flight::Full => {
                (8..12).for_each(|slot| self.a.ask_chunk(slot));
                let [x, y] = [self.held[0].entry, self.held[1].entry];
                (4..8).zip([x, x, y, y]).for_each(|(slot, entry)| self.a.ask_free(entry, slot));
            }
        }
        // Client `b` is active as well.
        self.b.ask_chunk(8);
    }

    /// Alternates the NIC and the CPU: `wqes` WQEs for each turn of the CPU.
    fn pump(&mut self, wqes: usize, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..100_000 {
            if done(self) {
                return;
            }
            self.node.poll().unwrap();
            self.stepper.run(wqes);
        }
        panic!("the scene does not finish");
    }

    fn settle(&mut self) {
        while self.stepper.run(usize::MAX) > 0 || self.node.poll().unwrap() {}
    }

    /// True once the stopped free worker runs again.
    fn is_repaired(&self) -> bool {
        let c = &self.node.clients[&ClientId(1)];
        let runs = c.queues().all(|d| d.worker.state().unwrap() != QpState::Error);
        runs && c.management == Management::Open
    }

    fn worker(&self, index: usize) -> Qpn {
        self.node.worker_qpns(ClientId(1)).unwrap()[index]
    }

    /// Stops a worker of `a` where it is.
    fn stop(&self, index: usize) {
        let change = verbs::QpChange::Error;
        let verb = Verb::ModifyQp { qpn: self.worker(index), change };
        self.stepper.nic.physical().execute(verb).unwrap();
    }

    /// Checks that the pool is consistent, and that every chunk not owned by `b` is free and zero.
    fn check_whole(mut self) {
        self.settle();
        self.b.drain();
        let mut all = vec![self.kept.clone()];
        all.extend(self.b.chunk(8).ok());
        self.node.audit().unwrap();
        assert_eq!(self.node.status().unwrap().free, CHUNKS - all.len() as u64);
        assert_eq!(self.node.memory().owned(1), 0);
        assert_eq!(self.read(&self.kept.clone(), 4), b"kept");
        while all.len() < CHUNKS as usize {
            self.b.ask_chunk(0);
            self.settle();
            self.b.drain();
            let chunk = self.b.chunk(0).unwrap();
            assert!(self.read(&chunk, 4096).iter().all(|&x| x == 0), "not cleared");
            assert!(all.iter().all(|c| c.entry != chunk.entry), "allocated twice");
            all.push(chunk);
        }
        self.node.audit().unwrap();
    }

    fn read(&mut self, chunk: &Chunk, len: usize) -> Vec<u8> {
        let to = [self.b.memory.sge(40000, len as u32)];
        let from = Remote { addr: chunk.addr, rkey: chunk.keys[0] };
        let op = Op::Read { from, to: &to };
        self.b.access[0].post_send(&[WorkRequest { id: 7, op, signaled: true }]).unwrap();
        self.settle();
        assert!(self.b.drain().iter().all(|c| c.status == Status::Success));
        self.b.read_back(len)
    }

    /// The entries that replies have granted to `a`, and the statuses of its frees.
    fn known(&self) -> (HashSet<EntryId>, Vec<(EntryId, u8)>) {
        let granted = (8..12).filter_map(|slot| self.a.chunk(slot).ok()).map(|c| c.entry);
        let held = self.held.iter().map(|c| c.entry);
        let [x, y] = [self.held[0].entry, self.held[1].entry];
        let frees = (4..8).zip([x, x, y, y]).map(|(slot, entry)| (entry, self.a.free_status(slot)));
        (held.chain(granted).collect(), frees.collect())
    }
}

/// Group sizes, and numbers of WQEs that the NIC executes per turn of the CPU.
fn variants() -> Vec<(u32, usize)> {
    match std::env::var_os("GRANARY_TEST_FULL") {
        None => vec![(2, 1), (5, 3)],
        Some(_) => (2..=6).flat_map(|group| [1, 2, 3, 64].map(|wqes| (group, wqes))).collect(),
    }
}

/// Runs `trouble` after every number of WQEs, until the NIC has no more to execute.
fn after_every_step(trouble: impl Fn(Scene, usize)) {
    let scenes = after_every_step_of(ONESIDEDMW, &FLIGHTS, trouble);
    assert!(scenes > 300, "{scenes}");
}

fn after_every_step_of(
    scheme: Scheme,
    flights: &[Flight],
    trouble: impl Fn(Scene, usize),
) -> usize {
    let mut scenes = 0;
    for (group, wqes) in variants() {
        for &flight in flights {
            // Only every third step of the long scenes, except in the full test.
            let long = flight == Flight::Full && std::env::var_os("GRANARY_TEST_FULL").is_none();
            for k in (wqes % 3..).step_by(if long { 3 } else { 1 }) {
                let scene = Scene::new(scheme, group, flight);
                let whole = scene.stepper.run(k) < k;
                let result =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trouble(scene, wqes)));
                if let Err(panic) = result {
                    eprintln!("group {group}, {wqes} WQEs a turn, {flight:?}, after {k} WQEs");
                    std::panic::resume_unwind(panic);
                }
                scenes += 1;
                if whole {
                    break;
                }
            }
        }
    }
    scenes
}

/// Flights that find no empty queue, where the published chain loses nothing.
#[test]
fn published_chain_ends_at_any_step_and_nothing_is_lost() {
    let flights = [Flight::Allocation, Flight::Both];
    let retires = |mut scene: Scene, wqes| {
        scene.node.retire(ClientId(1)).unwrap();
        scene.pump(wqes, |s| s.node.is_retired(ClientId(1)));
        scene.check_whole();
    };
    let stops = |scene: Scene, wqes| {
        scene.stop(0);
        retires(scene, wqes);
    };
    let recovers = |scene: Scene, wqes| {
        scene.stop(0);
        survive(scene, wqes);
    };
    let scenes = after_every_step_of(ONESIDEDMW_PAPER, &flights, retires)
        + after_every_step_of(ONESIDEDMW_PAPER, &flights, stops)
        + after_every_step_of(ONESIDEDMW_PAPER, &flights, survive)
        + after_every_step_of(ONESIDEDMW_PAPER, &flights, recovers);
    assert!(scenes > 300, "{scenes}");
}

#[test]
fn a_client_dies_at_any_step_and_the_pool_is_whole() {
    after_every_step(|mut scene, wqes| {
        let key = Remote { addr: scene.held[1].addr, rkey: scene.held[1].keys[0] };
        scene.node.retire(ClientId(1)).unwrap();
        // From now on the client's keys are useless, whatever the state of its chunks.
        let op = Op::WriteInline { to: key, data: b"late" };
        scene.a.access[0].post_send(&[WorkRequest { id: 99, op, signaled: true }]).unwrap();
        scene.pump(wqes, |s| s.node.is_retired(ClientId(1)));
        scene.settle();
        let late = scene.a.drain();
        let late = late.iter().find(|c| c.id == 99).expect("a completion");
        assert_eq!(late.status, Status::RetryExceeded);
        scene.function.remove();
        scene.check_whole();
    });
}

#[test]
fn a_client_dies_and_its_queues_with_it() {
    after_every_step(|mut scene, wqes| {
        scene.node.retire(ClientId(1)).unwrap();
        scene.function.remove();
        scene.pump(wqes, |s| s.node.is_retired(ClientId(1)));
        scene.check_whole();
    });
}

/// The chain itself stops, which no client can cause: the resources that it holds are returned.
#[test]
fn a_chain_stops_at_any_step_and_nothing_is_lost() {
    for worker in 0..2 {
        after_every_step(|mut scene, wqes| {
            scene.stop(worker);
            scene.node.retire(ClientId(1)).unwrap();
            scene.pump(wqes, |s| s.node.is_retired(ClientId(1)));
            scene.check_whole();
        });
    }
}

/// As above, but the client stays: it gets an error, re-establishes its QPs, and owns exactly the
/// chunks that it knows of.
#[test]
fn client_recovers_after_its_chains_stop() {
    for worker in 0..2 {
        after_every_step(|mut scene, wqes| {
            scene.stop(worker);
            scene.pump(wqes, |s| {
                let broken = |qp: &Qp| qp.state().unwrap() == QpState::Error;
                // A free worker that stops at the check of the guard is treated as having refused a
                // request.
                s.is_repaired() || broken(&s.a.alloc) && broken(&s.a.free)
            });
            survive(scene, wqes);
        });
    }
}

/// The client resets its management QPs at any step: undelivered grants are reclaimed.
#[test]
fn management_is_reset_at_any_step_and_no_grant_is_lost() {
    after_every_step(survive);
}

fn survive(mut scene: Scene, wqes: usize) {
    for qp in [&scene.a.alloc, &scene.a.free] {
        qp.modify(QpChange::Reset).unwrap();
    }
    let mut peers = None;
    scene.pump(wqes, |s| {
        peers = s.node.reset_management(ClientId(1)).unwrap();
        peers.is_some()
    });
    let peers = peers.expect("the reset has finished");
    scene.a.alloc.connect(Qpn::new(peers[0])).unwrap();
    scene.a.free.connect(Qpn::new(peers[1])).unwrap();
    scene.settle();
    scene.a.drain();
    let (mut known, frees) = scene.known();
    for (entry, told) in frees {
        match told {
            status::PENDING if known.contains(&entry) => {
                // The free may have been executed or not: the memory node's table shows which.
                if scene.node.memory().owner(entry) != 1 {
                    known.remove(&entry);
                }
            }
            status::FREED => {
                // The entry may have been granted again since.
                if scene.node.memory().owner(entry) != 1 {
                    known.remove(&entry);
                }
            }
            status::PENDING | status::REFUSED | status::AGAIN => {}
            other => panic!("status {other}"),
        }
    }
    let owned: HashSet<_> = (0..CHUNKS as u32)
        .map(EntryId::new)
        .filter(|i| scene.node.memory().owner(*i) == 1)
        .collect();
    assert_eq!(owned, known, "owned, and known to be owned");
    scene.node.audit().unwrap();
    // The client continues for many laps, with refusals in between.
    for round in 0..12 {
        scene.a.ask_chunk(0);
        scene.settle();
        scene.a.drain();
        if let Ok(chunk) = scene.a.chunk(0) {
            for expected in [status::FREED, status::REFUSED] {
                scene.a.ask_free(chunk.entry, 0);
                scene.settle();
                scene.a.drain();
                assert_eq!(scene.a.free_status(0), expected, "round {round}");
            }
        }
    }
    scene.node.retire(ClientId(1)).unwrap();
    scene.pump(64, |s| s.node.is_retired(ClientId(1)));
    scene.check_whole();
}

/// The client frees a chunk while the memory node reclaims it because its reply was lost: the chunk
/// becomes free once.
#[test]
fn chunk_being_reclaimed_cannot_be_freed_twice() {
    for k in 0..40 {
        let mut scene = Scene::new(ONESIDEDMW, 3, Flight::Empty);
        // Two chunks are free; they are granted, and the replies are lost.
        let [x, y] = [scene.held[2].entry, scene.held[1].entry];
        scene.settle();
        for (slot, entry) in [(4, x), (5, y)] {
            scene.a.ask_free(entry, slot);
        }
        scene.settle();
        scene.a.drain();
        scene.a.ask_chunk(8);
        scene.a.ask_chunk(9);
        // Steps only the requests and the alloc worker, so that chunks are granted but no reply is
        // sent.
        for qpn in [scene.a.alloc.qpn(), scene.worker(0)] {
            while scene.stepper.nic.step(qpn) {}
        }
        assert_eq!(scene.node.memory().owned(1), CHUNKS - 1);
        for qp in [&scene.a.alloc, &scene.a.free] {
            qp.modify(QpChange::Reset).unwrap();
        }
        let mut tries = 0;
        let peers = loop {
            if let Some(peers) = scene.node.reset_management(ClientId(1)).unwrap() {
                break peers;
            }
            tries += 1;
            scene.stepper.run(1);
        };
        assert!(tries > 0, "the connection was re-established while old chunks were still bound");
        scene.a.alloc.connect(Qpn::new(peers[0])).unwrap();
        scene.a.free.connect(Qpn::new(peers[1])).unwrap();
        scene.a.ask_free(x, 4);
        scene.a.ask_free(y, 5);
        scene.stepper.run(k);
        scene.settle();
        scene.node.audit().unwrap();
        scene.node.retire(ClientId(1)).unwrap();
        scene.pump(3, |s| s.node.is_retired(ClientId(1)));
        scene.check_whole();
    }
}
