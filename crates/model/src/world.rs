//! A memory node, its NIC and a few clients, small enough to explore every interleaving.
//!
//! The NIC is the product's engine, stepped WQE by WQE. The memory node is the product's
//! [`schemes::onesidedmw::Node`] with its own chains. Clients use raw verbs, so that they can send
//! invalid requests.

mod checks;
mod words;

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use pool::Settings;
use rnic::limits::Limits;
use rnic::nic::SoftNic;
use rnic::port::Function;
use rnic::port::control::{Reply, Verb as Control};
use rnic::port::inline::{InlineFunction, InlineNic};
use rnic::spec::QpDescription;
use scheme::NodeScheme;
use schemes::onesidedmw::Node;
use schemes::onesidedmw::layout::{Memory, status};
use verbs::{CompletionQueue, Cqn, DmaMemory, Key, MemoryRegion, Qpn, QueuePair};

use crate::arena::{self, Arena};
use crate::client::{Client, Grant, Outcome, wrong_qpn};
use crate::config::{Config, Op, WrongQp};
use crate::cpu::Cpu;
use crate::nic::{ModelCq, ModelNic, Points};
use crate::schedule::{CpuState, Task};
use crate::spec::{Actor, CHUNKS, CLIENTS, FORGED, GROUP, Identity, SLOTS, Spec, View, Window};

/// Bytes of a chunk: the minimum.
const CHUNK: u64 = 512;
/// Upper bound of QP and CQ numbers in a world.
const NUMBERS: u32 = 160;

/// An action that may happen next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The NIC executes one WQE of this QP.
    Step(Qpn),
    /// A client posts its next operation.
    Post(u8),
    /// A client's process ends: the NIC removes its function.
    Crash(u8),
    /// A client whose management queues broke resets them and requests new ones.
    Recover(u8),
    /// The CPU gets a task.
    Begin(Task),
    /// The CPU runs to its next verb.
    Resume,
}

/// The state of a world. It lies in an arena.
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
    /// The specification, which decides whether a step is allowed.
    pub spec: Spec,
    view: View,
    crashed: bool,
    forgotten: [bool; CLIENTS],
}

impl World {
    /// Creates a world in the calling thread's arena, in its initial state.
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
            Box::leak(Box::new(
                Node::new(model.clone(), settings.node().expect("valid settings"))
                    .expect("a memory node"),
            ))
        });
        let memory = node.memory().clone();
        let faults = node.faults().clone();
        let mut clients = Vec::new();
        let mut roles = Vec::new();
        let mut identities = [Identity::default(); CLIENTS];
        for (c, program) in config.clients.iter().enumerate() {
            let crashes = config.crash == Some(c);
            let (client, identity) =
                Client::join(&nic, node, c as u8, program, crashes, &mut roles);
            identities[c] = identity;
            clients.push(client);
        }
        for (c, client) in clients.iter().enumerate() {
            for op in &client.program {
                let Op::AllocateFor(wrong) = op else { continue };
                for lane in 1..=config.lanes as usize {
                    identities[c].named[lane][1] = wrong_qpn(*wrong, &clients, c).raw();
                }
            }
        }
        let spec = Spec::new(&memory.shape, identities);
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
            for (key, at) in memory.window_keys(scheme::index::EntryId::new(i as u32)).zip(keys) {
                *at = key;
            }
        }
        arena.exclude_from_digest(memory.dump.memory().addr() as usize, memory.dump.memory().len());
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
        world.view = world.observe();
        world
    }

    // --- possible actions ------------------------------------------------------------------------

    /// Returns all actions that can happen next.
    ///
    /// If one of them commutes with every action that other actors may take from here on, and
    /// changes nothing that is checked, it is returned alone ([`World::local`]).
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
        match (&self.cpu.task, &self.cpu.state) {
            (Some(_), CpuState::Waits(cqn, polled)) => {
                if count(&self.physical, *cqn).is_some_and(|n| n != *polled) {
                    all.push(Action::Resume);
                }
            }
            (Some(_), _) => all.push(Action::Resume),
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
            "a run uses more than the tracked bytes of the fault CQ"
        );
        if turn || faults != self.faults.consumed() {
            tasks.push(Task::Turn);
        }
        tasks
    }

    /// Returns an action that may be explored alone, without its alternatives:
    ///
    /// - A client's post. It writes the client's own ring and doorbell. No other actor sees them,
    ///   and the NIC may still execute the SEND at any later time.
    /// - Some WQEs of a worker: a WAIT (counters only grow, so one that passes will always pass,
    ///   and one that does not pass yet changes nothing), a NOP, the masked FAA on an index in the
    ///   worker's own ring, the SEND_EN on the worker itself, and the READ of the steering table,
    ///   which is never written, into the worker's own ring. No other actor reads or writes those
    ///   fields. A worker's ring has two keys: the first is used by its own chain and by receive
    ///   WQEs that scatter into fields that these WQEs do not touch; the second is used by its own
    ///   chain alone.
    ///
    /// Clients that may crash or break their queues are excluded, because the CPU then reads how
    /// far their workers have come. Runs are finite, so no other action is postponed forever.
    fn local(&self, ready: &[Qpn]) -> Option<Action> {
        for (c, client) in self.clients.iter().enumerate() {
            if client.can_post(&self.clients, self.in_flight) {
                return Some(Action::Post(c as u8));
            }
        }
        ready.iter().copied().find(|&qpn| self.is_local(qpn)).map(Action::Step)
    }

    fn is_local(&self, qpn: Qpn) -> bool {
        use verbs::wqe::{WQEBB, opcode};
        let Some((c, ring)) = self.worker_ring(qpn) else { return false };
        let client = &self.clients[c as usize];
        if client.crashes || client.breaks || !client.alive {
            return false;
        }
        let Some(info) = query(&self.physical, qpn) else { return false };
        if info.info.state != verbs::QpState::ReadyToSend {
            return false;
        }
        let at = info.progress.send_consumer as usize * WQEBB % ring.len();
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

    // --- execution --------------------------------------------------------------------------

    /// Executes an action. Returns a description of the changes, or the violation.
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
            Action::Resume => {
                if let Some((task, result)) = self.cpu.resume() {
                    self.finish_task(task, result)?;
                }
            }
        }
        let view = self.observe();
        let mut events = self.spec.step(actor, &self.view, &view)?;
        self.view = view;
        for c in 0..self.clients.len() {
            events.extend(self.poll_client(c)?);
        }
        self.check_workers()?;
        Ok(events)
    }

    fn finish_task(
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
            // SAFETY: the CPU is idle, and no other code uses the node.
            let node = unsafe { &*self.node };
            if client.leaves && client.known && node.is_retired(client.id) {
                client.known = false;
                self.forgotten[c] = true;
                self.spec.check_forgotten(c as u8)?;
            }
        }
        Ok(())
    }

    /// Polls the completions of a client and checks the outcomes of its operations.
    fn poll_client(&mut self, c: usize) -> Result<Vec<String>, String> {
        let client = &mut self.clients[c];
        if !client.alive {
            return Ok(Vec::new());
        }
        let ended = arena::inside(|| client.poll_completions());
        let mut events = Vec::new();
        for op in ended {
            let client = &mut self.clients[c];
            let (what, outcome) = (client.program[op], client.outcome[op]);
            events.push(format!("client {c}: {what:?} ends with {outcome:?}"));
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
                            "client {c} got the reply that chunk {i} was freed, but it was not"
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
        Ok(events)
    }

    fn actor(&self, qpn: Qpn) -> Actor {
        self.roles.iter().find(|r| r.0 == qpn).map_or(Actor::Cpu, |r| r.1)
    }

    /// Hashes the state that the hashed part of the arena does not contain.
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
                (i.info.state as u8, i.info.peer, i.progress.send_consumer, i.progress.send_limit)
                    .hash(h);
                (i.progress.recv_consumer, i.progress.recv_limit).hash(h);
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
            format!("{task:?} {:?} {}", self.cpu.state, self.cpu.has_begun()).hash(h);
            if self.cpu.has_begun() {
                let (low, end) = self.cpu.used_stack(arena);
                // SAFETY: the stack lies in the arena, and the CPU is suspended.
                h.write(unsafe { std::slice::from_raw_parts(low as *const u8, end - low) });
            }
        }
        for (at, len) in arena.cpu_heap() {
            // SAFETY: the piece lies in the arena, and the CPU is suspended.
            h.write(unsafe { std::slice::from_raw_parts(at as *const u8, len) });
        }
    }

    /// Returns the lowest address of the CPU's stack in use.
    pub fn stack_low(&self, arena: &Arena) -> usize {
        self.cpu.used_stack(arena).0
    }

    fn requests_for(&self, c: u8) -> Vec<Vec<u8>> {
        // The bytes that name the access QPs: the correct ones, then one list per invalid request.
        let lists =
            [None, Some(WrongQp::Foreign), Some(WrongQp::Nonexistent), Some(WrongQp::Worker)];
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

fn query(f: &InlineFunction, qpn: Qpn) -> Option<QpDescription> {
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
