//! The memory node: a scheme, the compute nodes that it knows, and the CPU thread that does what
//! the scheme leaves to the CPU.
//!
//! ```text
//!  control connections ─┐                  ┌─ QPs of compute nodes
//!  (service.rs)         ├─► MemoryNode ◄───┤
//!  embedded pools ──────┘   one lock       └─ CpuEvents ─► thread "granary-turn"
//! ```
//!
//! All that the CPU does happens under one lock, by the control thread for a compute node that
//! comes, goes or asks, and by the thread `granary-turn` for what the NIC reports: requests, where
//! the scheme answers by RPC; refused requests and the watch over an empty queue, where it does
//! not. Both count as the memory node's CPU. Where requests are answered by several cores, each is a
//! thread that turns a [`Worker`] of the scheme, beside the one lock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fabric::Qpn;
use parking_lot::{Condvar, Mutex};

use crate::Error;
use crate::cpu::ThreadClock;
use crate::events::cores;
use crate::protocol::Welcome;
use crate::remote::Start;
use crate::scheme::{
    Admission, Admitted, ClientId, CpuEvents, GroupId, Lane, NodeScheme, NodeStatus, Part, Worker,
};
use crate::settings::{ControlMode, SchemeKind, Settings};

/// A memory node. Clones are the same one.
pub struct MemoryNode<S: NodeScheme> {
    inner: Arc<Inner<S>>,
}

impl<S: NodeScheme> Clone for MemoryNode<S> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

struct Inner<S> {
    core: Mutex<Core<S>>,
    settings: Settings,
    events: Option<Arc<dyn CpuEvents>>,
    /// See [`NodeScheme::functions`].
    functions: u32,
    started: Instant,
    incarnation: u64,
    /// True while somebody has gone who is not retired yet.
    somebody_leaves: AtomicBool,
    /// Called after a turn that did something.
    after_turn: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct Core<S> {
    scheme: S,
    clients: BTreeSet<ClientId>,
    /// Those that have gone, and are not retired yet.
    leaving: BTreeSet<ClientId>,
    /// Those of them that the scheme could not begin to retire, and why. It is tried again.
    unretired: BTreeMap<ClientId, String>,
    last: u32,
}

/// After the scheme could not begin to retire a compute node, the next attempt comes so much later.
const RETIRE_AGAIN: Duration = Duration::from_millis(100);

impl<S: NodeScheme> MemoryNode<S> {
    /// A memory node with `scheme`, made with the same settings.
    pub fn new(scheme: S, settings: Settings) -> Self {
        let (events, functions) = (scheme.events(), scheme.functions());
        let core = Mutex::new(Core {
            scheme,
            clients: BTreeSet::new(),
            leaving: BTreeSet::new(),
            unretired: BTreeMap::new(),
            last: 0,
        });
        let started = Instant::now();
        let incarnation = random();
        let after_turn = OnceLock::new();
        let somebody_leaves = AtomicBool::new(false);
        let inner = Inner {
            core,
            settings,
            events,
            functions,
            started,
            incarnation,
            somebody_leaves,
            after_turn,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// QPs that a compute node needs at most.
    pub(crate) fn client_qps(&self) -> u32 {
        self.settings().client_qps(self.inner.functions)
    }

    /// Time since it was made.
    pub fn uptime(&self) -> Duration {
        self.inner.started.elapsed()
    }

    /// What it tells a compute node first.
    pub fn welcome(&self) -> Welcome {
        Welcome::of(&self.inner.settings, self.inner.functions, self.inner.incarnation)
    }

    /// Admits a compute node and numbers it. Numbers are not used again before all others were.
    pub fn admit(&self, request: &Admission) -> Result<Admitted, Error> {
        self.check(request)?;
        let core = &mut *self.inner.core.lock();
        let id = core.next_id();
        let admitted = core.scheme.admit(id, request)?;
        core.clients.insert(id);
        if core.scheme.next_look().is_some() {
            // The first one to look at finds the thread asleep for longer than that.
            self.wake();
        }
        Ok(admitted)
    }

    /// Refuses what no scheme admits: every QP that a compute node names costs one here.
    fn check(&self, request: &Admission) -> Result<(), Error> {
        let refuse =
            |why: String| Err(Error::Refused { attempt: "admitting a compute node".into(), why });
        let (groups, max) = (request.groups.len(), self.settings().groups_max);
        if groups > max as usize {
            return refuse(format!("it has {groups} QP groups, and may have {max}"));
        }
        let mut named = BTreeSet::new();
        let mut all = request.management.iter().chain(request.groups.iter().flatten());
        match all.find(|qpn| **qpn > Qpn::MAX || !named.insert(**qpn)) {
            Some(qpn) if *qpn > Qpn::MAX => refuse(format!("{qpn:#x} is no QP number")),
            Some(qpn) => refuse(format!("it names QP {qpn:#x} twice")),
            None => Ok(()),
        }
    }

    /// A compute node has gone: from now on none of its keys opens anything. Its chunks come back in
    /// later turns, in bounded pieces: see [`MemoryNode::is_retired`].
    ///
    /// Where the NIC refuses it, the chunks stay that compute node's, and later turns try again:
    /// see [`MemoryNode::unretired`].
    pub fn retire(&self, client: ClientId) {
        // An error is noted already.
        let _ = self.begin_retire(client);
    }

    fn begin_retire(&self, client: ClientId) -> Result<(), Error> {
        let core = &mut *self.inner.core.lock();
        if !core.clients.remove(&client) {
            return Ok(());
        }
        core.leaving.insert(client);
        self.inner.somebody_leaves.store(true, Ordering::Release);
        let result = core.retire(client);
        self.wake();
        result
    }

    /// Compute nodes that have gone and that the scheme could not begin to retire yet: how many,
    /// and why not one of them.
    pub fn unretired(&self) -> (u64, Option<String>) {
        let unretired = &self.inner.core.lock().unretired;
        (unretired.len() as u64, unretired.values().next().cloned())
    }

    /// True if nothing is left of a compute node that has gone.
    pub fn is_retired(&self, client: ClientId) -> bool {
        self.inner.core.lock().scheme.is_retired(client)
    }

    /// [`MemoryNode::retire`], and takes its chunks back before it returns. Others get their turns in
    /// between.
    pub fn retire_wholly(&self, client: ClientId) -> Result<(), Error> {
        self.begin_retire(client)?;
        while !self.is_retired(client) {
            self.turn_or_yield()?;
        }
        Ok(())
    }

    /// Does what a turn of the CPU does, from the calling thread.
    fn turn_or_yield(&self) -> Result<(), Error> {
        match self.turn()?.busy {
            true => self.tell(),
            false => thread::yield_now(),
        }
        Ok(())
    }

    /// Wakes the thread that turns: it may sleep for longer than what was begun may wait.
    fn wake(&self) {
        if let Some(events) = &self.inner.events {
            events.wake();
        }
    }

    fn tell(&self) {
        if let Some(tell) = self.inner.after_turn.get() {
            tell();
        }
    }

    /// True if there is memory to allocate. If not, the scheme watches for it from now on.
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

    /// [`MemoryNode::reset_management`], asked until it is done.
    pub fn reset_management_wholly(&self, client: ClientId) -> Result<Vec<u32>, Error> {
        loop {
            match self.reset_management(client)? {
                Some(peers) => return Ok(peers),
                None => self.turn_or_yield()?,
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

    /// See [`NodeScheme::renew`].
    pub fn renew(&self, client: ClientId, part: Part, start: Start) -> Result<(), Error> {
        self.inner.core.lock().known(client)?.renew(client, part, start);
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

    /// Has `tell` called after every turn that did something, and when a compute node has gone.
    pub(crate) fn on_turn(&self, tell: impl Fn() + Send + Sync + 'static) {
        assert!(self.inner.after_turn.set(Box::new(tell)).is_ok(), "on_turn is set once");
    }

    fn forget_retired(&self, core: &mut Core<S>) {
        if !core.leaving.is_empty() {
            let scheme = &core.scheme;
            core.leaving.retain(|client| !scheme.is_retired(*client));
            let left = !core.leaving.is_empty();
            self.inner.somebody_leaves.store(left, Ordering::Release);
        }
    }

    /// A turn of one core. The lock over the memory node is taken only if somebody may have left.
    fn turn_of(&self, worker: &mut dyn Worker) -> Result<Turn, Error> {
        let busy = worker.turn()?;
        let mut look = None;
        if self.inner.somebody_leaves.load(Ordering::Acquire) {
            let core = &mut *self.inner.core.lock();
            core.retire_again()?;
            look = core.next_retire();
            if busy {
                self.forget_retired(core);
            }
        }
        Ok(Turn { busy, watching: false, look })
    }

    fn turn(&self) -> Result<Turn, Error> {
        let core = &mut *self.inner.core.lock();
        core.retire_again()?;
        let busy = core.scheme.turn()?;
        self.forget_retired(core);
        let look = core.scheme.next_look().into_iter().chain(core.next_retire()).min();
        Ok(Turn { busy, watching: core.scheme.is_watching(), look })
    }
}

/// A number that another start of a memory node does not have.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // The standard library seeds it from the system's random numbers.
    RandomState::new().build_hasher().finish()
}

struct Turn {
    busy: bool,
    watching: bool,
    /// The longest that the next turn may be away.
    look: Option<Duration>,
}

impl<S: NodeScheme> Core<S> {
    fn next_id(&mut self) -> ClientId {
        loop {
            self.last = self.last.wrapping_add(1);
            let id = ClientId(self.last);
            if self.last != 0 && !self.clients.contains(&id) && !self.leaving.contains(&id) {
                return id;
            }
        }
    }

    /// Begins to retire a compute node, or notes that it is to be tried again.
    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let result = self.scheme.retire(client);
        match &result {
            Ok(()) => drop(self.unretired.remove(&client)),
            Err(e) => {
                let why = format!("retiring compute node {}: {e}", client.0);
                self.unretired.insert(client, why);
            }
        }
        result
    }

    /// Tries again what [`Core::retire`] could not do.
    ///
    /// # Errors
    /// The NIC has ended: there is nothing to serve with.
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

    fn known(&mut self, client: ClientId) -> Result<&mut S, Error> {
        if self.clients.contains(&client) {
            return Ok(&mut self.scheme);
        }
        Err(Error::Refused {
            attempt: format!("a request of compute node {}", client.0),
            why: "it is not admitted".into(),
        })
    }
}

/// The threads that do the turns, one for each core that the scheme is made for; ended when dropped.
pub struct Turner {
    threads: Vec<TurnThread>,
}

struct TurnThread {
    shared: Arc<TurnerShared>,
    events: Arc<dyn CpuEvents>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct TurnerShared {
    stop: AtomicBool,
    gate: Gate,
    clock: ThreadClock,
    wakeups: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// Longest sleep while nothing is watched: only a guard against a wake-up that never comes.
const SLEEP: Duration = Duration::from_secs(10);
/// First sleep while the free queue is watched; it doubles up to [`WATCH_MAX`].
const WATCH_MIN: Duration = Duration::from_micros(100);
/// Longest sleep while the free queue is watched.
const WATCH_MAX: Duration = Duration::from_millis(4);
/// Idle polls of a polling CPU between two offers of its core to others.
const POLLS_PER_YIELD: u32 = 4096;

impl TurnerShared {
    /// True if the thread is to stop or to stand still.
    fn is_called(&self) -> bool {
        self.stop.load(Ordering::Acquire) || self.gate.is_closed()
    }
}

impl Turner {
    /// Starts the threads, if the scheme has anything for them.
    pub fn start<S: NodeScheme + 'static>(node: &MemoryNode<S>) -> Result<Self, Error> {
        let Some(events) = node.inner.events.clone() else {
            return Ok(Self { threads: Vec::new() });
        };
        let workers = {
            let scheme = &mut node.inner.core.lock().scheme;
            if scheme.workers() > 1 { scheme.take_workers() } else { Vec::new() }
        };
        let mut threads = Vec::new();
        if workers.is_empty() {
            let of = node.clone();
            threads.push(TurnThread::start(node, events, move || of.turn())?);
        }
        for mut worker in workers {
            let of = node.clone();
            threads
                .push(TurnThread::start(node, worker.events(), move || of.turn_of(&mut *worker))?);
        }
        Ok(Self { threads })
    }

    /// CPU time of the threads.
    pub fn cpu_time(&self) -> Duration {
        self.threads.iter().map(|t| t.shared.clock.read()).sum()
    }

    /// How often they woke up.
    pub fn wakeups(&self) -> u64 {
        self.threads.iter().map(|t| t.shared.wakeups.load(Ordering::Relaxed)).sum()
    }

    /// Why one of them ended by itself, if one did.
    pub fn failure(&self) -> Option<String> {
        self.threads.iter().find_map(|t| t.shared.failure.lock().clone())
    }

    /// Stops the threads at a point where they do nothing, and returns when they stand there.
    pub fn pause(&self) {
        for t in &self.threads {
            t.shared.gate.close();
            t.events.wake();
        }
        self.threads.iter().for_each(|t| t.shared.gate.wait_closed());
    }

    /// Lets the threads go on.
    pub fn resume(&self) {
        self.threads.iter().for_each(|t| t.shared.gate.open());
    }
}

impl TurnThread {
    fn start<S: NodeScheme + 'static>(
        node: &MemoryNode<S>,
        events: Arc<dyn CpuEvents>,
        turn: impl FnMut() -> Result<Turn, Error> + Send + 'static,
    ) -> Result<Self, Error> {
        let shared = Arc::new(TurnerShared::default());
        let (node, its_events, its_shared) = (node.clone(), events.clone(), shared.clone());
        let thread = thread::Builder::new().name("granary-turn".into()).spawn(move || {
            its_shared.clock.adopt();
            if let Err(e) = take_turns(&node, turn, &*its_events, &its_shared) {
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

impl Drop for Turner {
    fn drop(&mut self) {
        for t in &self.threads {
            t.shared.stop.store(true, Ordering::Release);
            t.shared.gate.open();
            t.events.wake();
        }
        for thread in self.threads.iter_mut().filter_map(|t| t.thread.take()) {
            // A panic of that thread was reported on stderr; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn take_turns<S: NodeScheme>(
    node: &MemoryNode<S>,
    mut take_turn: impl FnMut() -> Result<Turn, Error>,
    events: &dyn CpuEvents,
    shared: &TurnerShared,
) -> Result<(), Error> {
    let settings = node.settings();
    let polling = settings.control == ControlMode::Polling && settings.scheme.needs_cpu();
    let threads = if settings.scheme.needs_cpu() { settings.cores as usize } else { 1 };
    let few_cores = cores() <= threads;
    let (mut idle, mut nap) = (0u32, WATCH_MIN);
    while !shared.stop.load(Ordering::Acquire) {
        shared.gate.pass();
        // Fatal: the NIC refused the memory node's own queues or tables, which no compute node
        // reaches. What they hold and the books may differ now, and a chunk could be given twice.
        let turn = take_turn()?;
        if turn.busy {
            (idle, nap) = (0, WATCH_MIN);
            node.tell();
        } else if polling {
            idle = idle.wrapping_add(1);
            match few_cores || idle.is_multiple_of(POLLS_PER_YIELD) {
                true => thread::yield_now(),
                false => std::hint::spin_loop(),
            }
        } else if shared.is_called() {
            // The turn may have taken the wake-up that says so.
        } else {
            let sleep = if turn.watching { nap } else { SLEEP };
            let sleep = sleep.min(turn.look.unwrap_or(SLEEP));
            nap = if turn.watching { (nap * 2).min(WATCH_MAX) } else { WATCH_MIN };
            // Fatal: it fails only for a NIC that has ended.
            events.wait(sleep)?;
            shared.wakeups.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// A place where a thread can be held.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    closed: AtomicBool,
}

#[derive(Default)]
struct GateState {
    held: bool,
    left: bool,
}

impl Gate {
    /// Holds the calling thread while the gate is closed.
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

    /// The thread that passes will not come again.
    pub fn leave(&self) {
        self.state.lock().left = true;
        self.changed.notify_all();
    }

    /// Closes the gate.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// True if whoever comes is held.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Returns when the thread is held, or has left.
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

impl SchemeKind {
    /// True if every allocation needs the memory node's CPU.
    pub const fn needs_cpu(self) -> bool {
        self.is_by_rpc()
    }
}

#[cfg(test)]
mod tests;
