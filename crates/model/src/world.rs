//! A memory node, its NIC and some clients, small enough that all that can happen is tried.
//!
//! The NIC is the real engine, stepped WQE by WQE; the memory node is the real
//! [`pool::onesidedmw::Node`], with its own chains; clients speak raw verbs, so that they can lie.

mod checks;
mod words;

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use fabric::soft::SoftNic;
use fabric::{CompletionQueue, DmaMemory, Key, MemoryRegion, Qpn, QueuePair};
use pool::Settings;
use pool::onesidedmw::Node;
use pool::onesidedmw::layout::{Memory, status};
use pool::scheme::NodeScheme;
use rnic::ids::Cqn;
use rnic::port::Function;
use rnic::port::control::{Reply, Verb as Control};
use rnic::port::inline::{InlineFunction, InlineNic};
use rnic::verbs::{Limits, QpInfo};

use crate::arena::{self, Arena};
use crate::client::{Client, Grant, Outcome, wrong_qpn};
use crate::config::{Config, Op, Wrong};
use crate::cpu::{Cpu, Standing, Task};
use crate::nic::{ModelCq, ModelNic, Points};
use crate::spec::{Actor, CHUNKS, CLIENTS, FORGED, GROUP, Identity, SLOTS, Spec, View, Window};

/// Bytes of a chunk: the fewest that there can be.
const CHUNK: u64 = 512;
/// QP and CQ numbers are below this in a world.
const NUMBERS: u32 = 160;

/// What may happen next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The NIC executes a WQE of this QP.
    Step(Qpn),
    /// A client posts its next operation.
    Post(u8),
    /// A client's process ends: its function is removed from the NIC.
    Crash(u8),
    /// A client whose management queues broke resets its side and asks for new ones.
    Recover(u8),
    /// The CPU is given something to do.
    Begin(Task),
    /// The CPU goes on to its next verb.
    GoOn,
}

/// A world. It lies in an arena.
pub struct World {
    nic: Arc<InlineNic>,
    physical: InlineFunction,
    node: *mut Node<ModelNic>,
    faults: ModelCq,
    memory: Memory<ModelNic>,
    windows: [[Key; GROUP]; CHUNKS],
    clients: Vec<Client>,
    cpu: Cpu,
    roles: Vec<(Qpn, Actor, &'static str)>,
    /// Send rings of the memory node's managed queues.
    rings: Vec<(Qpn, DmaMemory)>,
    qps: Vec<(InlineFunction, Qpn)>,
    cqs: Vec<(InlineFunction, Cqn)>,
    in_flight: usize,
    reduce: bool,
    /// The machine that says what may happen.
    pub spec: Spec,
    view: View,
    crashed: bool,
    forgotten: [bool; CLIENTS],
}

impl World {
    /// Makes a world in the calling thread's arena. Nothing has happened in it.
    pub fn new(config: &Config, arena: &mut Arena) -> &'static mut World {
        arena::inside(|| Self::build(config, arena))
    }

    fn build(config: &Config, arena: &mut Arena) -> &'static mut World {
        let nic = InlineNic::stepped(Limits::default(), Box::new(arena::dma));
        let physical = nic.physical();
        let settings = Settings {
            donate_bytes: config.chunks as u64 * CHUNK,
            chunk_bytes: CHUNK,
            group_size: config.lanes + 1,
            credits: config.in_flight,
            groups_max: 1,
            clients_max: config.clients.len() as u32,
            ..Settings::default()
        };
        let soft = SoftNic::new(Function::Inline(physical.clone()));
        let model = Points::before(soft);
        let node: &'static mut Node<ModelNic> = arena::inside_node(|| {
            Box::leak(Box::new(Node::new(model.clone(), settings).expect("a memory node")))
        });
        let memory = node.memory().clone();
        let faults = node.faults().clone();
        let mut clients = Vec::new();
        let mut roles = Vec::new();
        let mut who = [Identity::default(); CLIENTS];
        for (c, program) in config.clients.iter().enumerate() {
            let crashes = config.crash == Some(c);
            let (client, identity) =
                Client::join(&nic, node, c as u8, program, crashes, &mut roles);
            who[c] = identity;
            clients.push(client);
        }
        for (c, client) in clients.iter().enumerate() {
            for op in &client.program {
                let Op::AllocateFor(wrong) = op else { continue };
                for lane in 1..=config.lanes as usize {
                    who[c].named[lane][1] = wrong_qpn(*wrong, &clients, c).raw();
                }
            }
        }
        let spec = Spec::new(&memory.shape, who);
        let functions: Vec<InlineFunction> = [physical.clone()]
            .into_iter()
            .chain(clients.iter().map(|c| c.function.clone()))
            .collect();
        let (mut qps, mut cqs) = (Vec::new(), Vec::new());
        for f in &functions {
            for n in 0..NUMBERS {
                if query(f, Qpn::new(n)).is_some() {
                    qps.push((f.clone(), Qpn::new(n)));
                }
                if count(f, Cqn::new(n)).is_some() {
                    cqs.push((f.clone(), Cqn::new(n)));
                }
            }
        }
        let mut windows = [[Key::default(); GROUP]; CHUNKS];
        for (i, keys) in windows[..config.chunks as usize].iter_mut().enumerate() {
            for (key, at) in memory.window_keys(i as u32).zip(keys) {
                *at = key;
            }
        }
        arena.silence(memory.dump.memory().addr() as usize, memory.dump.memory().len());
        let node: *mut Node<ModelNic> = node;
        let cpu = Cpu::new(arena, node);
        let view = View {
            slots: [0; SLOTS],
            head: 0,
            avail: 0,
            owners: [0; CHUNKS],
            windows: [[Window::default(); GROUP]; CHUNKS],
            zero: [true; CHUNKS],
        };
        let world = Box::leak(Box::new(World {
            nic,
            physical,
            node,
            faults,
            memory,
            windows,
            clients,
            cpu,
            roles,
            rings: model.hooks().rings(),
            qps,
            cqs,
            in_flight: config.in_flight as usize,
            reduce: config.reduce,
            spec,
            view,
            crashed: false,
            forgotten: [false; CLIENTS],
        }));
        world.view = world.look();
        world
    }

    // --- what can happen ---------------------------------------------------------------------------

    /// Everything that can happen next. Where one of them commutes with all that anybody else may do
    /// from here on, and changes nothing that is checked, it alone ([`World::local`]).
    pub fn actions(&self) -> Vec<Action> {
        let mut all = Vec::new();
        let ready = self.nic.ready_qps();
        if self.reduce
            && let Some(local) = self.local(&ready)
        {
            return vec![local];
        }
        for (c, client) in self.clients.iter().enumerate() {
            if client.can_post(&self.clients, self.in_flight) {
                all.push(Action::Post(c as u8));
            }
            if client.crashes && client.alive && !self.crashed {
                all.push(Action::Crash(c as u8));
            }
            if client.can_recover() {
                all.push(Action::Recover(c as u8));
            }
        }
        match (&self.cpu.task, &self.cpu.standing) {
            (Some(_), Standing::Waits(cqn, polled)) => {
                if count(&self.physical, *cqn).is_some_and(|n| n != *polled) {
                    all.push(Action::GoOn);
                }
            }
            (Some(_), _) => all.push(Action::GoOn),
            (None, _) => all.extend(self.tasks().into_iter().map(Action::Begin)),
        }
        all.extend(ready.into_iter().map(Action::Step));
        all
    }

    fn tasks(&self) -> Vec<Task> {
        let mut tasks = Vec::new();
        let mut turn = false;
        for client in self.clients.iter().filter(|c| c.known) {
            if !client.alive && !client.leaves {
                tasks.push(Task::Retire(client.id));
            } else if client.alive && client.wants_reset {
                tasks.push(Task::ResetManagement(client.id));
            }
            turn |= client.leaves || client.wants_reset;
        }
        let faults = count(&self.physical, self.faults.cqn()).expect("the CQ lives");
        assert!(
            (faults as usize) * 64 < arena::FAR_TRACKED,
            "a run reaches beyond what is tracked"
        );
        if turn || faults != self.faults.consumed() {
            tasks.push(Task::Turn);
        }
        tasks
    }

    /// An action that may be taken alone, without trying the others first:
    ///
    /// - A client's post. It writes its own ring and rings a doorbell; nobody else sees that, and its
    ///   SEND may still come whenever the NIC likes.
    /// - Of a worker's WQEs: a WAIT (counts only grow: one that passes always will, and one that does
    ///   not yet changes nothing), a NOP, the masked FAA on an index in the worker's own ring, the
    ///   SEND_EN on itself, the READ of the steering table, which nobody writes, into the worker's own
    ///   ring. Nobody else reads or writes those fields: of the two keys of a worker's ring one is
    ///   named in its own chain and in receive WQEs that scatter into fields that these WQEs do not
    ///   touch, the other in its own chain alone.
    ///
    /// Not for a client that may crash or break its queues: then the CPU looks at how far its worker
    /// has come. Runs are finite, so that nobody is put off for ever.
    fn local(&self, ready: &[Qpn]) -> Option<Action> {
        for (c, client) in self.clients.iter().enumerate() {
            if client.can_post(&self.clients, self.in_flight) {
                return Some(Action::Post(c as u8));
            }
        }
        ready.iter().copied().find(|&qpn| self.is_local(qpn)).map(Action::Step)
    }

    fn is_local(&self, qpn: Qpn) -> bool {
        use fabric::wqe::{WQEBB, opcode};
        let Some((c, ring)) = self.worker_ring(qpn) else { return false };
        let client = &self.clients[c as usize];
        if client.crashes || client.breaks || !client.alive {
            return false;
        }
        let Some(info) = query(&self.physical, qpn) else { return false };
        if info.state != rnic::verbs::QpState::ReadyToSend {
            return false;
        }
        let at = info.send_consumer as usize * WQEBB % ring.len();
        let mut wqe = [0; WQEBB];
        ring.read(at, &mut wqe[..WQEBB.min(ring.len() - at)]);
        let be64 = |at: usize| u64::from_be_bytes(wqe[at..at + 8].try_into().expect("8 bytes"));
        let be32 = |at: usize| u32::from_be_bytes(wqe[at..at + 4].try_into().expect("4 bytes"));
        match wqe[3] {
            opcode::NOP => true,
            opcode::WAIT => true,
            opcode::SEND_EN => be32(28) == qpn.raw(),
            opcode::ATOMIC_MASKED_FA => {
                let (addr, start) = (be64(16), ring.addr());
                (start..start + ring.len() as u64).contains(&addr)
            }
            opcode::RDMA_READ => {
                let (addr, steer) = (be64(16), self.memory.steer.memory());
                (steer.addr()..steer.addr() + steer.len() as u64).contains(&addr)
                    && be32(24) == self.memory.steer.key().0
            }
            _ => false,
        }
    }

    fn worker_ring(&self, qpn: Qpn) -> Option<(u8, DmaMemory)> {
        let (_, actor, _) = self.roles.iter().find(|r| r.0 == qpn)?;
        let (Actor::AllocWorker(c) | Actor::FreeWorker(c)) = *actor else { return None };
        self.rings.iter().find(|(n, _)| *n == qpn).map(|(_, ring)| (c, ring.clone()))
    }

    // --- making it happen --------------------------------------------------------------------------

    /// Makes it happen; in words what that changed, or what is wrong with it.
    pub fn act(&mut self, action: Action) -> Result<Vec<String>, String> {
        let mut actor = Actor::Cpu;
        match action {
            Action::Step(qpn) => {
                actor = self.actor(qpn);
                arena::inside(|| self.nic.step(qpn));
            }
            Action::Post(c) => {
                actor = Actor::Client(c);
                let grants: Vec<Option<Grant>> = self.clients.iter().map(Client::latest).collect();
                let wrong: Vec<Vec<u8>> = self.requests_for(c);
                arena::inside(|| self.clients[c as usize].post(&grants, &wrong));
            }
            Action::Crash(c) => {
                actor = Actor::Client(c);
                self.crashed = true;
                let client = &mut self.clients[c as usize];
                client.alive = false;
                self.spec.gone[c as usize] = true;
                arena::inside(|| client.function.remove());
            }
            Action::Recover(c) => {
                actor = Actor::Client(c);
                self.spec.gone[c as usize] = true;
                arena::inside(|| self.clients[c as usize].recover())?;
            }
            Action::Begin(task) => self.cpu.start(task),
            Action::GoOn => {
                if let Some((task, result)) = self.cpu.go_on() {
                    self.ended(task, result)?;
                }
            }
        }
        let view = self.look();
        let mut said = self.spec.step(actor, &self.view, &view)?;
        self.view = view;
        for c in 0..self.clients.len() {
            said.extend(self.hear(c)?);
        }
        self.check_workers()?;
        Ok(said)
    }

    fn ended(
        &mut self,
        task: Task,
        result: Result<Option<Vec<u32>>, String>,
    ) -> Result<(), String> {
        let done = result.map_err(|e| format!("the CPU failed at {task:?}: {e}"))?;
        match task {
            Task::Turn => {}
            Task::Retire(id) => {
                let client = self.clients.iter_mut().find(|c| c.id == id).expect("a client");
                client.leaves = true;
            }
            Task::ResetManagement(id) => {
                let client = self.clients.iter_mut().find(|c| c.id == id).expect("a client");
                let Some(done) = done else { return Ok(()) };
                client.wants_reset = false;
                if client.alive {
                    arena::inside(|| {
                        let peers: Vec<Qpn> = done.iter().map(|&n| Qpn::new(n)).collect();
                        client.alloc.qp.connect(peers[0]).expect("a QP in Reset");
                        client.free.qp.connect(peers[1]).expect("a QP in Reset");
                    });
                }
            }
        }
        for c in 0..self.clients.len() {
            let client = &mut self.clients[c];
            // SAFETY: the CPU stands idle, and nobody else looks at the node.
            let node = unsafe { &*self.node };
            if client.leaves && client.known && node.is_retired(client.id) {
                client.known = false;
                self.forgotten[c] = true;
                self.spec.check_forgotten(c as u8)?;
            }
        }
        Ok(())
    }

    /// A client takes in what has completed.
    fn hear(&mut self, c: usize) -> Result<Vec<String>, String> {
        let client = &mut self.clients[c];
        if !client.alive {
            return Ok(Vec::new());
        }
        let heard = arena::inside(|| client.take_in());
        let mut said = Vec::new();
        for op in heard {
            let client = &mut self.clients[c];
            let (what, outcome) = (client.program[op], client.outcome[op]);
            said.push(format!("client {c} hears of {what:?}: {outcome:?}"));
            match (what, outcome) {
                (Op::Allocate | Op::AllocateFor(_), Outcome::Granted(grant)) => {
                    self.check_grant(c, what, &grant)?;
                }
                (Op::Allocate | Op::AllocateFor(_), Outcome::Said(status::EMPTY)) => {}
                (
                    Op::Free(_) | Op::FreeTwice(_) | Op::FreeEntry(_),
                    Outcome::Said(status::FREED),
                ) => {
                    let i = client.entry_of(what);
                    client.freed[i] += 1;
                    if client.freed[i] > self.spec.released[c][i] {
                        return Err(format!(
                            "client {c} is told that chunk {i} is free; it is not"
                        ));
                    }
                }
                (Op::Free(_), Outcome::Said(status::AGAIN)) if !client.honest => {
                    arena::inside(|| {
                        client.program.push(what);
                        client.outcome.push(Outcome::Ahead);
                    });
                }
                (
                    Op::FreeTwice(_) | Op::FreeEntry(_),
                    Outcome::Said(status::REFUSED | status::AGAIN),
                ) => {}
                (Op::Use(_), Outcome::Access(0)) => {}
                (Op::UseStale(_) | Op::Steal(_), Outcome::Access(s)) if s != 0 => {}
                (Op::AllocateUnwritable, Outcome::Broken(_)) => {}
                (_, Outcome::Broken(_)) if !client.honest => {}
                (what, outcome) => {
                    return Err(format!("client {c}: {what:?} ends with {outcome:?}"));
                }
            }
        }
        Ok(said)
    }

    fn actor(&self, qpn: Qpn) -> Actor {
        self.roles.iter().find(|r| r.0 == qpn).map_or(Actor::Cpu, |r| r.1)
    }

    /// What tells this state from others, beside the hashed part of the arena.
    pub fn hash_rest(&self, arena: &Arena, h: &mut impl Hasher) {
        self.spec.hash(h);
        self.view.hash(h);
        self.crashed.hash(h);
        self.forgotten.hash(h);
        for client in &self.clients {
            client.outcome.hash(h);
            (client.next, client.alive, client.known, client.freed).hash(h);
            (client.leaves, client.wants_reset).hash(h);
            for side in [&client.alloc, &client.free].into_iter().chain(&client.access) {
                side.outstanding.hash(h);
            }
        }
        for (f, qpn) in &self.qps {
            if let Some(i) = query(f, *qpn) {
                (i.state as u8, i.peer, i.send_consumer, i.send_limit).hash(h);
                (i.recv_consumer, i.recv_limit).hash(h);
            } else {
                h.write_u8(0xff);
            }
        }
        for (f, cqn) in &self.cqs {
            count(f, *cqn).hash(h);
        }
        for qpn in self.nic.ready_qps() {
            qpn.hash(h);
        }
        self.faults.consumed().hash(h);
        if let Some(task) = self.cpu.task {
            format!("{task:?} {:?} {}", self.cpu.standing, self.cpu.has_begun()).hash(h);
            if self.cpu.has_begun() {
                let (low, end) = self.cpu.living(arena);
                // SAFETY: the stack lies in the arena, and the CPU stands.
                h.write(unsafe { std::slice::from_raw_parts(low as *const u8, end - low) });
            }
        }
        for (at, len) in arena.cpu_heap() {
            // SAFETY: the piece lies in the arena, and the CPU stands.
            h.write(unsafe { std::slice::from_raw_parts(at as *const u8, len) });
        }
    }

    /// The lowest address of the CPU's stack that is in use.
    pub fn stack_low(&self, arena: &Arena) -> usize {
        self.cpu.living(arena).0
    }

    fn requests_for(&self, c: u8) -> Vec<Vec<u8>> {
        // The bytes that name the access QPs: honest ones, then one list per lie.
        let lists = [None, Some(Wrong::Foreign), Some(Wrong::Nobody), Some(Wrong::Worker)];
        lists
            .into_iter()
            .map(|wrong| {
                let own = &self.clients[c as usize].peers;
                let named = own.iter().map(|&own| match wrong {
                    None => own,
                    Some(wrong) => wrong_qpn(wrong, &self.clients, c as usize),
                });
                named.flat_map(|q| q.raw().to_be_bytes()[1..].to_vec()).collect()
            })
            .collect()
    }
}

fn query(f: &InlineFunction, qpn: Qpn) -> Option<QpInfo> {
    match f.execute(Control::QueryQp { qpn }) {
        Ok(Reply::QpInfo(info)) => Some(info),
        _ => None,
    }
}

fn count(f: &InlineFunction, cqn: Cqn) -> Option<u32> {
    match f.execute(Control::CqCount { cqn }) {
        Ok(Reply::Count(n)) => Some(n),
        _ => None,
    }
}
