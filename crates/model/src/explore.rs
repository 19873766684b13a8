//! Depth-first exploration of every state of a configuration.
//!
//! A state is identified by a 128-bit digest of everything that can affect later steps (`world`,
//! `arena`). Two different states have the same digest with a probability below 2^-80 at a billion
//! states. After each action, the changed blocks of the arena are recorded; undoing the action
//! restores them.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::hash::Hasher;
use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};

use crate::arena::{self, Arena, Undo};
use crate::config::Config;
use crate::world::{Action, World};

/// Result of an exploration.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Distinct states.
    pub states: u64,
    /// Executed actions, to new states and to known ones.
    pub actions: u64,
    /// Final states, in which no action was possible.
    pub ends: u64,
    /// Final states in words: the state of each chunk and the outcomes of each client.
    pub outcomes: BTreeSet<String>,
    /// Length of the longest run.
    pub depth: usize,
    /// Whether every state was visited; otherwise the limit was reached.
    pub exhausted: bool,
    /// Duration.
    pub time: Duration,
    /// Tracked bytes of a world.
    pub world_bytes: usize,
}

/// A run that ends in a violation.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The violation.
    pub what: String,
    /// The steps of the run.
    pub trace: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, line) in self.trace.iter().enumerate() {
            writeln!(f, "{i:4}  {line}")?;
        }
        write!(f, "wrong: {}", self.what)
    }
}

struct Frame {
    actions: Vec<Action>,
    next: usize,
    /// Undoes the action that led to this state.
    undo: Undo,
    /// The action that led to this state.
    by: Option<Action>,
    /// The digest of this state.
    digest: u128,
}

/// Visits every state of `config`, up to `limit` states.
pub fn explore(config: &Config, limit: u64) -> Result<Report, Box<Violation>> {
    warm_up(config);
    let started = Instant::now();
    let mut arena = Arena::new();
    let world: *mut World = World::new(config, &mut arena);
    let mut e = Explorer { arena, world, report: Report::default(), seen: HashSet::new() };
    e.settle();
    let undo = e.arena.mark();
    let first = e.digest();
    e.seen.insert(first);
    let found = e.run(undo, limit);
    let mut report = e.report;
    report.states = e.seen.len() as u64;
    report.time = started.elapsed();
    report.world_bytes = e.arena.tracked();
    found.map(|exhausted| Report { exhausted, ..report }).map_err(Box::new)
}

/// Runs a world once outside the exploration, so that lazily created statics are not allocated in
/// the arena.
fn warm_up(config: &Config) {
    let mut arena = Arena::new();
    let world = World::new(config, &mut arena);
    // The CPU's actions come first in the list, and the CPU may poll without success forever.
    for _ in 0..1000 {
        let Some(&action) = world.actions().last() else { break };
        if world.act(action).is_err() {
            break;
        }
    }
}

/// Collects the written bytes, to be hashed at once.
struct Bytes(Vec<u8>);

impl Hasher for Bytes {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
    fn finish(&self) -> u64 {
        unreachable!("the bytes are taken")
    }
}

struct Explorer {
    arena: Arena,
    world: *mut World,
    report: Report,
    seen: HashSet<u128>,
}

impl Explorer {
    fn world(&mut self) -> &mut World {
        // SAFETY: the world lies in the arena. The arena is restored only while no reference to the
        // world is held, and always to bytes that were a valid world.
        unsafe { &mut *self.world }
    }

    fn settle(&mut self) {
        // SAFETY: as in `world`.
        let low = unsafe { &*self.world }.stack_low(&self.arena);
        self.arena.extend_stack(low);
    }

    fn digest(&self) -> u128 {
        // SAFETY: as in `world`.
        let world = unsafe { &*self.world };
        let mut rest = Bytes(Vec::with_capacity(4096));
        world.hash_rest(&self.arena, &mut rest);
        self.arena.digest() ^ arena::hash(&rest.0, u64::MAX)
    }

    fn act(&mut self, action: Action) -> Result<Vec<String>, String> {
        let done = panic::catch_unwind(AssertUnwindSafe(|| self.world().act(action)));
        done.unwrap_or_else(|payload| {
            let text = payload
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| payload.downcast_ref::<&str>().map(|s| s.to_string()))
                .unwrap_or_else(|| "a panic".into());
            // The payload may lie in the arena.
            std::mem::forget(payload);
            Err(format!("panic: {text}"))
        })
    }

    fn check_end(&mut self) -> Result<(), String> {
        let checked = panic::catch_unwind(AssertUnwindSafe(|| self.world().check_end()));
        let result = checked.unwrap_or_else(|payload| {
            std::mem::forget(payload);
            Err("panic at the end".into())
        });
        self.settle();
        let undo = self.arena.mark();
        self.arena.undo(&undo);
        result
    }

    fn run(&mut self, undo: Undo, limit: u64) -> Result<bool, Violation> {
        let actions = self.world().actions();
        let mut stack = vec![Frame { actions, next: 0, undo, by: None, digest: self.digest() }];
        while let Some(frame) = stack.last_mut() {
            if frame.next == frame.actions.len() {
                let frame = stack.pop().expect("just seen");
                if !stack.is_empty() {
                    self.arena.undo(&frame.undo);
                }
                continue;
            }
            let action = frame.actions[frame.next];
            frame.next += 1;
            self.report.actions += 1;
            let done = self.act(action);
            self.settle();
            let undo = self.arena.mark();
            if let Err(what) = done {
                self.arena.undo(&undo);
                return Err(self.replay(stack, Some(action), what));
            }
            let digest = self.digest();
            if !self.seen.insert(digest) {
                self.arena.undo(&undo);
                // A cycle without an exit.
                if let Some(at) = stack.iter().rposition(|f| f.digest == digest)
                    && stack[at..].iter().all(|f| f.actions.len() == 1)
                {
                    return Err(self.replay(stack, Some(action), "this goes on for ever".into()));
                }
                continue;
            }
            let actions = self.world().actions();
            if actions.is_empty() {
                self.report.ends += 1;
                let summary = self.world().summary();
                self.report.outcomes.insert(summary);
                if let Err(what) = self.check_end() {
                    self.arena.undo(&undo);
                    return Err(self.replay(stack, Some(action), what));
                }
            }
            stack.push(Frame { actions, next: 0, undo, by: Some(action), digest });
            self.report.depth = self.report.depth.max(stack.len());
            if self.seen.len() as u64 >= limit {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Replays the run that led to the top of the stack and describes its steps.
    fn replay(&mut self, mut stack: Vec<Frame>, last: Option<Action>, what: String) -> Violation {
        let mut actions: Vec<Action> = stack.iter().filter_map(|f| f.by).chain(last).collect();
        while stack.len() > 1 {
            let frame = stack.pop().expect("more than one");
            self.arena.undo(&frame.undo);
        }
        let mut trace = Vec::new();
        for action in actions.drain(..) {
            let name = self.world().describe(action);
            let events = self.act(action);
            trace.push(match events {
                Ok(events) if events.is_empty() => name,
                Ok(events) => format!("{name}  --  {}", events.join("; ")),
                Err(_) => format!("{name}  --  !"),
            });
        }
        Violation { what, trace }
    }
}

/// Reports panics inside an arena from outside of it. Call this once, before exploring.
pub fn prepare() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| arena::outside(|| report(info))));
}
