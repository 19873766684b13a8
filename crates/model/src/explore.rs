//! Depth first through every state of a configuration.
//!
//! A state is known by a 128-bit digest of all that can make a difference later (`world`, `arena`): two
//! states that differ are taken for one with a probability below 2^-80 at a billion states.
//! After each action the arena is compared with what it was, and put back by what was found.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::hash::Hasher;
use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};

use crate::arena::{self, Arena, Undo};
use crate::config::Config;
use crate::world::{Action, World};

/// What an exploration found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Different states.
    pub states: u64,
    /// Actions that were taken, to new states and to known ones.
    pub actions: u64,
    /// States in which nothing could happen any more.
    pub ends: u64,
    /// How runs ended: where each chunk was and what each client was told.
    pub outcomes: BTreeSet<String>,
    /// The longest run.
    pub depth: usize,
    /// Every state was visited; else the limit was reached.
    pub exhausted: bool,
    /// How long it took.
    pub time: Duration,
    /// Bytes of a world that are kept track of.
    pub world_bytes: usize,
}

/// A run that ends in something wrong.
#[derive(Clone, Debug)]
pub struct Violation {
    /// What is wrong.
    pub what: String,
    /// What happened, step by step.
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
    /// What takes back the action that led here.
    undo: Undo,
    /// That action.
    by: Option<Action>,
    /// The state.
    digest: u128,
}

/// Visits every state of `config`, up to `limit` of them.
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

/// What a program keeps for its whole life, made when first needed, must not lie in an arena.
fn warm_up(config: &Config) {
    let mut arena = Arena::new();
    let world = World::new(config, &mut arena);
    // The CPU's actions come first in the list, and it may look in vain for ever.
    for _ in 0..1000 {
        let Some(&action) = world.actions().last() else { break };
        if world.act(action).is_err() {
            break;
        }
    }
}

/// What was written, to be hashed at once.
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
        // SAFETY: the world lies in the arena, which is put back only while no reference to it is held,
        // and always to bytes that were a world.
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
            // It may lie in the arena.
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
                return Err(self.tell(stack, Some(action), what));
            }
            let digest = self.digest();
            if !self.seen.insert(digest) {
                self.arena.undo(&undo);
                // A circle that nothing leads out of.
                if let Some(at) = stack.iter().rposition(|f| f.digest == digest)
                    && stack[at..].iter().all(|f| f.actions.len() == 1)
                {
                    return Err(self.tell(stack, Some(action), "this goes on for ever".into()));
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
                    return Err(self.tell(stack, Some(action), what));
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

    /// The run that led to the top of the stack, once more, in words.
    fn tell(&mut self, mut stack: Vec<Frame>, last: Option<Action>, what: String) -> Violation {
        let mut actions: Vec<Action> = stack.iter().filter_map(|f| f.by).chain(last).collect();
        while stack.len() > 1 {
            let frame = stack.pop().expect("more than one");
            self.arena.undo(&frame.undo);
        }
        let mut trace = Vec::new();
        for action in actions.drain(..) {
            let name = self.world().describe(action);
            let said = self.act(action);
            trace.push(match said {
                Ok(said) if said.is_empty() => name,
                Ok(said) => format!("{name}  --  {}", said.join("; ")),
                Err(_) => format!("{name}  --  !"),
            });
        }
        Violation { what, trace }
    }
}

/// Has panics inside an arena reported outside of it. Call it once, before anything is explored.
pub fn prepare() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| arena::outside(|| report(info))));
}
