//! The memory node: a scheme, the admitted compute nodes, and the threads that do the scheme's CPU
//! work.
//!
//! ```text
//!  control connections ─┐                  ┌─ QPs of compute nodes
//!  (service.rs)         ├─► MemoryNode ◄───┤
//!  embedded pools ──────┘   one lock       └─ CpuEvents ─► thread "granary-turn"
//! ```
//!
//! All CPU work is done under one lock. The control thread handles compute nodes that connect,
//! leave or send control requests. The thread `granary-turn` handles events from the NIC: RPC
//! requests, in schemes that use RPC; otherwise refused requests and the watch over an empty queue.
//! The time of both counts as the memory node's CPU time. If several cores answer requests, each
//! core has a thread that drives one [`Worker`] of the scheme, outside that lock.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use verbs::Qpn;

use crate::Error;
use crate::cpu::ThreadClock;
use crate::protocol::NodeHello;
use crate::remote::Start;
use crate::settings::Settings;
use scheme::options::Terms;
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, CpuEvents, GroupId, Lane, NodeScheme, NodeStatus,
    Offer, QpSet, Worker,
};
use units::cpus::cores;

/// A memory node. Clones share its state.
pub struct MemoryNode {
    inner: Arc<Inner>,
}

impl Clone for MemoryNode {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

struct Inner {
    core: Mutex<Core>,
    settings: Settings,
    events: Option<Arc<dyn CpuEvents>>,
    /// Workers until their threads are started.
    workers: Mutex<Vec<Box<dyn Worker>>>,
    /// See [`Cpu::polls`].
    polls: bool,
    /// See [`NodeScheme::functions`].
    functions: u32,
    /// See [`NodeScheme::spares`].
    spares: u32,
    /// See [`NodeScheme::terms`].
    terms: Terms,
    started: Instant,
    incarnation: u64,
    /// True while a departed compute node is not retired yet.
    any_leaving: AtomicBool,
    /// Called after a poll that did work.
    after_poll: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct Core {
    scheme: Box<dyn NodeScheme>,
    clients: BTreeSet<ClientId>,
    /// Departed compute nodes that are not retired yet.
    leaving: BTreeSet<ClientId>,
    /// Departed compute nodes for which [`NodeScheme::retire`] failed, with the error. It is
    /// retried.
    unretired: BTreeMap<ClientId, String>,
    last: u32,
}

/// Delay before [`NodeScheme::retire`] is retried after a failure.
const RETIRE_AGAIN: Duration = Duration::from_millis(100);

impl MemoryNode {
    /// A memory node with `scheme`, which was created with the same settings.
    pub fn new(mut scheme: Box<dyn NodeScheme>, settings: Settings) -> Self {
        let (functions, spares, terms) = (scheme.functions(), scheme.spares(), scheme.terms());
        let Cpu { events, workers, polls } = scheme.cpu();
        let core = Mutex::new(Core {
            scheme,
            clients: BTreeSet::new(),
            leaving: BTreeSet::new(),
            unretired: BTreeMap::new(),
            last: 0,
        });
        let started = Instant::now();
        let incarnation = random();
        let after_poll = OnceLock::new();
        let any_leaving = AtomicBool::new(false);
        let inner = Inner {
            core,
            settings,
            events,
            workers: Mutex::new(workers),
            polls,
            functions,
            spares,
            terms,
            started,
            incarnation,
            any_leaving,
            after_poll,
        };
        Self { inner: Arc::new(inner) }
    }

    /// The settings of this memory node.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Maximum number of QPs of a compute node.
    pub(crate) fn client_qps(&self) -> u32 {
        self.settings().client_qps(self.inner.functions * (1 + self.inner.spares))
    }

    /// Time since this memory node was created.
    pub fn uptime(&self) -> Duration {
        self.inner.started.elapsed()
    }

    /// The first reply to a compute node.
    pub fn welcome(&self) -> NodeHello {
        let Inner { settings, functions, spares, incarnation, terms, .. } = &*self.inner;
        let hello = NodeHello::of(&settings.scheme_part(), *functions, *incarnation, terms.clone());
        NodeHello { offer: Offer { spares: *spares, ..hello.offer }, ..hello }
    }

    /// Admits a compute node and assigns its number. A number is reused only after all others.
    pub fn admit(&self, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        self.check(request)?;
        let core = &mut *self.inner.core.lock();
        let id = core.next_id();
        let first_chunk = core.scheme.first_chunk();
        let admitted = ConnectReply { first_chunk, ..core.scheme.admit(id, request)? };
        core.clients.insert(id);
        if core.scheme.next_poll().is_some() {
            // The thread may sleep for longer than the scheme now allows.
            self.wake();
        }
        Ok(admitted)
    }

    /// Refuses requests that no scheme admits. The number of QPs is limited because each QP of a
    /// compute node needs a peer here.
    fn check(&self, request: &ConnectRequest) -> Result<(), Error> {
        let refuse =
            |why: String| Err(Error::Refused { attempt: "admitting a compute node".into(), why });
        let (groups, max) = (request.groups.len(), self.settings().groups_max);
        if groups > max as usize {
            return refuse(format!("it has {groups} QP groups; the maximum is {max}"));
        }
        let mut named = BTreeSet::new();
        let mut qpns = request.management.iter().chain(request.groups.iter().flatten());
        match qpns.find(|qpn| **qpn > Qpn::MAX || !named.insert(**qpn)) {
            Some(qpn) if *qpn > Qpn::MAX => refuse(format!("{qpn:#x} is not a QP number")),
            Some(qpn) => refuse(format!("it lists QP {qpn:#x} twice")),
            None => Ok(()),
        }
    }

    /// Begins to retire a departed compute node: from now on none of its keys is valid. Later polls
    /// reclaim its chunks, a bounded amount of work each: see [`MemoryNode::is_retired`].
    ///
    /// If the NIC refuses the revocation, the compute node keeps its chunks and later polls retry:
    /// see [`MemoryNode::unretired`].
    pub fn retire(&self, client: ClientId) {
        // The error is recorded in `unretired`.
        let _ = self.begin_retire(client);
    }

    fn begin_retire(&self, client: ClientId) -> Result<(), Error> {
        let core = &mut *self.inner.core.lock();
        if !core.clients.remove(&client) {
            return Ok(());
        }
        core.leaving.insert(client);
        self.inner.any_leaving.store(true, Ordering::Release);
        let result = core.retire(client);
        self.wake();
        result
    }

    /// Number of departed compute nodes that the scheme could not begin to retire yet, and one of
    /// the errors.
    pub fn unretired(&self) -> (u64, Option<String>) {
        let unretired = &self.inner.core.lock().unretired;
        (unretired.len() as u64, unretired.values().next().cloned())
    }

    /// True if no resource of a departed compute node is left.
    pub fn is_retired(&self, client: ClientId) -> bool {
        self.inner.core.lock().scheme.is_retired(client)
    }

    /// Like [`MemoryNode::retire`], but returns only when all chunks are reclaimed. Releases the
    /// lock between polls.
    pub fn retire_blocking(&self, client: ClientId) -> Result<(), Error> {
        self.begin_retire(client)?;
        while !self.is_retired(client) {
            self.poll_or_yield()?;
        }
        Ok(())
    }

    /// Polls once from the calling thread; yields if there was no work.
    fn poll_or_yield(&self) -> Result<(), Error> {
        match self.poll()?.busy {
            true => self.notify(),
            false => thread::yield_now(),
        }
        Ok(())
    }

    /// Wakes the polling thread, which may sleep for longer than new work can wait.
    fn wake(&self) {
        if let Some(events) = &self.inner.events {
            events.wake();
        }
    }

    fn notify(&self) {
        if let Some(tell) = self.inner.after_poll.get() {
            tell();
        }
    }

    /// True if a chunk is free. Otherwise the scheme watches for free memory from now on.
    pub fn has_memory(&self, client: ClientId) -> Result<bool, Error> {
        let waits = self.inner.core.lock().known(client)?.client_waits(client)?;
        if waits {
            self.wake();
        }
        Ok(!waits)
    }

    /// See [`NodeScheme::reset_management`].
    pub fn reset_management(&self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        let result = self.inner.core.lock().known(client)?.reset_management(client);
        if matches!(result, Ok(None)) {
            self.wake();
        }
        result
    }

    /// Like [`MemoryNode::reset_management`], repeated until it is complete.
    pub fn reset_management_blocking(&self, client: ClientId) -> Result<Vec<u32>, Error> {
        loop {
            match self.reset_management(client)? {
                Some(peers) => return Ok(peers),
                None => self.poll_or_yield()?,
            }
        }
    }

    /// See [`NodeScheme::management_is_open`].
    pub fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.inner.core.lock().known(client)?.management_is_open(client)
    }

    /// See [`NodeScheme::reset_access`].
    pub fn reset_access(&self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        self.inner.core.lock().known(client)?.reset_access(client, group, lane)
    }

    /// See [`NodeScheme::set_start`].
    pub fn set_start(&self, client: ClientId, part: QpSet, start: Start) -> Result<(), Error> {
        self.inner.core.lock().known(client)?.set_start(client, part, start);
        Ok(())
    }

    /// See [`NodeScheme::status`].
    pub fn status(&self) -> Result<NodeStatus, Error> {
        self.inner.core.lock().scheme.status()
    }

    /// See [`NodeScheme::audit`].
    pub fn audit(&self) -> Result<(), Error> {
        self.inner.core.lock().scheme.audit()
    }

    /// Registers `tell`, which is called after every poll that did work and when a compute node
    /// departs.
    pub(crate) fn on_poll(&self, tell: impl Fn() + Send + Sync + 'static) {
        assert!(self.inner.after_poll.set(Box::new(tell)).is_ok(), "on_poll is set once");
    }

    fn forget_retired(&self, core: &mut Core) {
        if !core.leaving.is_empty() {
            let scheme = &core.scheme;
            core.leaving.retain(|client| {
                let is_retired = scheme.is_retired(*client);
                if is_retired {
                    tracing::info!(client = client.0, "client reclaimed");
                }
                !is_retired
            });
            let left = !core.leaving.is_empty();
            self.inner.any_leaving.store(left, Ordering::Release);
        }
    }

    /// Polls one worker. Takes the memory node's lock only if a compute node may be departing.
    fn poll_worker(&self, worker: &mut dyn Worker) -> Result<PollOutcome, Error> {
        let busy = worker.poll()?;
        let mut next_poll = worker.next_poll();
        if self.inner.any_leaving.load(Ordering::Acquire) {
            let core = &mut *self.inner.core.lock();
            core.retire_again()?;
            next_poll = next_poll.into_iter().chain(core.next_retire()).min();
            if busy {
                self.forget_retired(core);
            }
        }
        Ok(PollOutcome { busy, watching: false, next_poll })
    }

    fn poll(&self) -> Result<PollOutcome, Error> {
        let core = &mut *self.inner.core.lock();
        core.retire_again()?;
        let busy = core.scheme.poll()?;
        self.forget_retired(core);
        let next_poll = core.scheme.next_poll().into_iter().chain(core.next_retire()).min();
        Ok(PollOutcome { busy, watching: core.scheme.is_watching(), next_poll })
    }
}

/// A number that is unique to this start of the memory node.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // The standard library seeds it from the kernel's random numbers.
    RandomState::new().build_hasher().finish()
}

struct PollOutcome {
    busy: bool,
    watching: bool,
    /// Longest time until the next poll.
    next_poll: Option<Duration>,
}

impl Core {
    fn next_id(&mut self) -> ClientId {
        loop {
            self.last = self.last.wrapping_add(1);
            let id = ClientId(self.last);
            if self.last != 0 && !self.clients.contains(&id) && !self.leaving.contains(&id) {
                return id;
            }
        }
    }

    /// Begins to retire a compute node; records a failure so that it is retried.
    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let result = self.scheme.retire(client);
        match &result {
            Ok(()) => drop(self.unretired.remove(&client)),
            Err(e) => {
                let why = format!("retiring compute node {}: {e}", client.0);
                if self.unretired.insert(client, why).is_none() {
                    tracing::warn!(
                        client = client.0,
                        why = e.to_string(),
                        "client keeps its chunks"
                    );
                }
            }
        }
        result
    }

    /// Retries the failed calls of [`Core::retire`].
    ///
    /// # Errors
    /// The NIC has exited, so the memory node cannot continue.
    fn retire_again(&mut self) -> Result<(), Error> {
        for client in self.unretired.keys().copied().collect::<Vec<_>>() {
            if let Err(e @ Error::Gone { .. }) = self.retire(client) {
                return Err(e);
            }
        }
        Ok(())
    }

    fn next_retire(&self) -> Option<Duration> {
        (!self.unretired.is_empty()).then_some(RETIRE_AGAIN)
    }

    fn known(&mut self, client: ClientId) -> Result<&mut dyn NodeScheme, Error> {
        if self.clients.contains(&client) {
            return Ok(&mut *self.scheme);
        }
        Err(Error::Refused {
            attempt: format!("a request of compute node {}", client.0),
            why: "it is not admitted".into(),
        })
    }
}

/// The threads that poll the scheme, one per core that the scheme uses. Dropping it stops them.
pub struct NodeThreads {
    threads: Vec<NodeThread>,
}

struct NodeThread {
    shared: Arc<ThreadShared>,
    events: Arc<dyn CpuEvents>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct ThreadShared {
    stop: AtomicBool,
    gate: PauseGate,
    clock: ThreadClock,
    wakeups: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// How the threads of a memory node use the CPU.
#[derive(Clone, Copy)]
struct BusyCpu {
    polls: bool,
    threads: usize,
}

/// Longest sleep while nothing is watched. It only bounds the delay of a lost wake-up.
const SLEEP: Duration = Duration::from_secs(10);
/// First sleep while the free queue is watched. Each further sleep doubles, up to [`WATCH_MAX`].
const WATCH_MIN: Duration = Duration::from_micros(100);
/// Longest sleep while the free queue is watched.
const WATCH_MAX: Duration = Duration::from_millis(4);
/// Timer slack of the threads. The kernel's default of 50 us would end leases late.
const TIMER_SLACK_NS: u64 = 1_000;
/// Idle polls of a polling CPU between two yields.
const POLLS_PER_YIELD: u32 = 4096;

impl ThreadShared {
    /// True if the thread must stop or pause.
    fn is_interrupted(&self) -> bool {
        self.stop.load(Ordering::Acquire) || self.gate.is_closed()
    }
}

impl NodeThreads {
    /// Starts the threads. Starts none if the scheme has no event source.
    pub fn start(node: &MemoryNode) -> Result<Self, Error> {
        let Some(events) = node.inner.events.clone() else {
            return Ok(Self { threads: Vec::new() });
        };
        let workers = std::mem::take(&mut *node.inner.workers.lock());
        let busy = BusyCpu { polls: node.inner.polls, threads: workers.len().max(1) };
        let mut threads = Vec::new();
        if workers.is_empty() {
            let polled = node.clone();
            threads.push(NodeThread::start(node, (events, busy), move || polled.poll())?);
        }
        for mut worker in workers {
            let (polled, events) = (node.clone(), worker.events());
            let poll = move || polled.poll_worker(&mut *worker);
            threads.push(NodeThread::start(node, (events, busy), poll)?);
        }
        Ok(Self { threads })
    }

    /// Total CPU time of the threads.
    pub fn cpu_time(&self) -> Duration {
        self.threads.iter().map(|t| t.shared.clock.read()).sum()
    }

    /// Total number of wake-ups.
    pub fn wakeups(&self) -> u64 {
        self.threads.iter().map(|t| t.shared.wakeups.load(Ordering::Relaxed)).sum()
    }

    /// The error of the first thread that ended by itself, if any.
    pub fn failure(&self) -> Option<String> {
        self.threads.iter().find_map(|t| t.shared.failure.lock().clone())
    }

    /// Pauses the threads at a point where they hold no lock; returns when all are paused.
    pub fn pause(&self) {
        for t in &self.threads {
            t.shared.gate.close();
            t.events.wake();
        }
        self.threads.iter().for_each(|t| t.shared.gate.wait_closed());
    }

    /// Resumes the threads.
    pub fn resume(&self) {
        self.threads.iter().for_each(|t| t.shared.gate.open());
    }
}

impl NodeThread {
    fn start(
        node: &MemoryNode,
        (events, busy): (Arc<dyn CpuEvents>, BusyCpu),
        poll: impl FnMut() -> Result<PollOutcome, Error> + Send + 'static,
    ) -> Result<Self, Error> {
        let shared = Arc::new(ThreadShared::default());
        let (node, its_events, its_shared) = (node.clone(), events.clone(), shared.clone());
        let thread = thread::Builder::new().name("granary-turn".into()).spawn(move || {
            its_shared.clock.adopt();
            // If the kernel refuses, sleeps are less precise.
            let _ = rustix::thread::set_current_timer_slack(NonZero::new(TIMER_SLACK_NS));
            if let Err(e) = run_polls(&node, poll, (&*its_events, busy), &its_shared) {
                tracing::error!(why = e.to_string(), "control thread ended");
                *its_shared.failure.lock() = Some(e.to_string());
            }
            its_shared.clock.retire();
            its_shared.gate.leave();
        });
        let thread = thread.map_err(|source| Error::System {
            attempt: "starting the memory node's control thread".into(),
            source,
        })?;
        Ok(Self { shared, events, thread: Some(thread) })
    }
}

impl Drop for NodeThreads {
    fn drop(&mut self) {
        for t in &self.threads {
            t.shared.stop.store(true, Ordering::Release);
            t.shared.gate.open();
            t.events.wake();
        }
        for thread in self.threads.iter_mut().filter_map(|t| t.thread.take()) {
            // A panic of that thread is reported on stderr already.
            let _ = thread.join();
        }
    }
}

fn run_polls(
    node: &MemoryNode,
    mut poll: impl FnMut() -> Result<PollOutcome, Error>,
    (events, busy): (&dyn CpuEvents, BusyCpu),
    shared: &ThreadShared,
) -> Result<(), Error> {
    let few_cores = cores() <= busy.threads;
    let (mut idle, mut nap) = (0u32, WATCH_MIN);
    while !shared.stop.load(Ordering::Acquire) {
        shared.gate.pass();
        // Fatal: the NIC refused an operation on the memory node's own queues or tables, which no
        // compute node can reach. The tables and the accounting may disagree now, and a chunk could
        // be allocated twice.
        let outcome = poll()?;
        if outcome.busy {
            (idle, nap) = (0, WATCH_MIN);
            node.notify();
        } else if busy.polls {
            idle = idle.wrapping_add(1);
            match few_cores || idle.is_multiple_of(POLLS_PER_YIELD) {
                true => thread::yield_now(),
                false => std::hint::spin_loop(),
            }
        } else if shared.is_interrupted() {
            // The poll may have consumed the wake-up that requests the pause, so the thread must
            // not sleep.
        } else {
            let sleep = if outcome.watching { nap } else { SLEEP };
            let sleep = sleep.min(outcome.next_poll.unwrap_or(SLEEP));
            nap = if outcome.watching { (nap * 2).min(WATCH_MAX) } else { WATCH_MIN };
            // Fatal: the wait fails only if the NIC has exited.
            events.wait(sleep)?;
            shared.wakeups.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// A point at which another thread can pause a thread.
#[derive(Default)]
pub(crate) struct PauseGate {
    state: Mutex<GateState>,
    changed: Condvar,
    closed: AtomicBool,
}

#[derive(Default)]
struct GateState {
    held: bool,
    left: bool,
}

impl PauseGate {
    /// Blocks the calling thread while the gate is closed.
    pub fn pass(&self) {
        if !self.closed.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state.lock();
        state.held = true;
        self.changed.notify_all();
        while self.closed.load(Ordering::Acquire) {
            self.changed.wait(&mut state);
        }
        state.held = false;
    }

    /// Marks the passing thread as ended: it will not call [`PauseGate::pass`] again.
    pub fn leave(&self) {
        self.state.lock().left = true;
        self.changed.notify_all();
    }

    /// Closes the gate.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// True if the next call of [`PauseGate::pass`] blocks.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Blocks until the passing thread is held at the gate or has ended.
    pub fn wait_closed(&self) {
        let mut state = self.state.lock();
        while !state.held && !state.left {
            self.changed.wait(&mut state);
        }
    }

    /// Opens the gate.
    pub fn open(&self) {
        let _state = self.state.lock();
        self.closed.store(false, Ordering::Release);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
