//! The memory node's CPU in a world: it runs the scheme's own code on a stack of its own, and
//! stands at each verb until it is told to go on.

use std::cell::Cell;
use std::hint::black_box;
use std::ptr;

use corosensei::stack::{Stack, StackPointer};
use corosensei::{Coroutine, CoroutineResult, Yielder};
use fabric::Cqn;
use pool::onesidedmw::Node;
use pool::scheme::{ClientId, NodeScheme};

use crate::arena::{self, Arena};
use crate::nic::ModelNic;

/// What the CPU has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// `NodeScheme::turn`: look at what the NIC reports.
    Turn,
    /// `NodeScheme::retire`: begin to take back what a gone compute node owned.
    Retire(ClientId),
    /// `NodeScheme::reset_management`: re-establish broken management queues, or say that it is too
    /// early.
    ResetManagement(ClientId),
}

/// How a task ended: the numbers of management queues that were re-established, or what went wrong.
pub type Ended = Result<Option<Vec<u32>>, String>;

/// Where it stands.
#[derive(Clone, Debug)]
pub enum Standing {
    /// It has nothing to do; how its last task ended.
    Idle(Ended),
    /// Before a verb.
    Verb,
    /// Until the CQ has counted more completions than this.
    Waits(Cqn, u32),
}

#[derive(Clone, Copy)]
enum Command {
    Start(Task),
    GoOn,
}

type Way = Yielder<Command, Standing>;

thread_local! {
    /// The way back to the explorer, while the CPU runs on this thread.
    static RUNS: Cell<*const Way> = const { Cell::new(ptr::null()) };
    /// Lowest address of the stack that the CPU left behind when it last stood.
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

struct InArena(usize, usize);

// SAFETY: the zone is mapped, of this thread alone and used for nothing else; there is no guard page,
// but the zone below is another one of the arena, and its 256 KiB are far more than the code needs.
unsafe impl Stack for InArena {
    fn base(&self) -> StackPointer {
        StackPointer::new(self.1).expect("not null")
    }
    fn limit(&self) -> StackPointer {
        StackPointer::new(self.0).expect("not null")
    }
}

/// The CPU. It lies in the arena.
pub struct Cpu {
    thread: Coroutine<Command, Standing, (), InArena>,
    way: *const Way,
    /// Lowest address of its stack that is in use.
    low: usize,
    begun: bool,
    /// Its task.
    pub task: Option<Task>,
    /// Where it stands.
    pub standing: Standing,
}

impl Cpu {
    /// The CPU that works for the node at `node`, which lives as long.
    pub fn new(arena: &Arena, node: *mut Node<ModelNic>) -> Self {
        let (limit, base) = arena.stack();
        let way = Box::leak(Box::new(Cell::new(ptr::null::<Way>())));
        let told: *const Cell<*const Way> = way;
        let thread = Coroutine::with_stack(InArena(limit, base), move |way: &Way, first| {
            // SAFETY: the cell was leaked.
            unsafe { (*told).set(way) };
            let mut command = first;
            loop {
                let Command::Start(task) = command else { unreachable!("it stands idle") };
                // SAFETY: the node lives; who else looks at it does so while the CPU stands idle.
                let result = execute(unsafe { &mut *node }, task);
                command = stand(way, Standing::Idle(result));
            }
        });
        let standing = Standing::Idle(Ok(None));
        let mut cpu =
            Self { thread, way: ptr::null(), low: base, begun: false, task: None, standing };
        // A first task, so that it stands idle on its own stack from now on.
        cpu.run(Command::Start(Task::Turn));
        cpu.way = way.get();
        cpu
    }

    /// Gives it a task, of which it does nothing yet.
    pub fn start(&mut self, task: Task) {
        assert!(self.task.is_none());
        self.task = Some(task);
        self.standing = Standing::Verb;
    }

    /// Lets it go on to its next verb, or to the end of its task: then how that ended.
    pub fn go_on(&mut self) -> Option<(Task, Ended)> {
        let task = self.task.expect("it has a task");
        let command = if self.begun { Command::GoOn } else { Command::Start(task) };
        self.begun = true;
        self.run(command);
        let Standing::Idle(result) = &self.standing else { return None };
        self.task = None;
        self.begun = false;
        Some((task, arena::outside(|| result.clone())))
    }

    /// Whether it has gone on since it was given its task.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// The part of the stack that lives.
    pub fn living(&self, arena: &Arena) -> (usize, usize) {
        (self.low, arena.stack().1)
    }

    #[inline(never)]
    fn run(&mut self, command: Command) {
        RUNS.set(if self.way.is_null() { ptr::null() } else { self.way });
        let standing = arena::inside_cpu(|| match self.thread.resume(command) {
            CoroutineResult::Yield(standing) => standing,
            CoroutineResult::Return(()) => unreachable!("it never ends"),
        });
        RUNS.set(ptr::null());
        self.low = LEFT.get();
        self.standing = standing;
    }
}

fn execute(node: &mut Node<ModelNic>, task: Task) -> Ended {
    match task {
        Task::Turn => node.turn().map(|_| None),
        Task::Retire(client) => node.retire(client).map(|()| None),
        Task::ResetManagement(client) => node.reset_management(client),
    }
    .map_err(|e| e.to_string())
}

/// Stands before a verb until told to go on. Nothing if who calls is not the CPU.
pub fn give_way() {
    let way = RUNS.get();
    if !way.is_null() {
        // SAFETY: `run` set it: the CPU runs, on the stack that the yielder lies on.
        stand(unsafe { &*way }, Standing::Verb);
    }
}

/// Stands until there are more completions than `polled` in a CQ.
pub fn wait(cqn: Cqn, polled: u32) {
    let way = RUNS.get();
    assert!(!way.is_null(), "only the CPU waits");
    // SAFETY: as in `give_way`.
    stand(unsafe { &*way }, Standing::Waits(cqn, polled));
}

#[inline(never)]
fn stand(way: &Way, standing: Standing) -> Command {
    let here = 0u8;
    // Below lies what this switch saves, and what earlier calls left: zeros make states that differ in
    // that alone the same.
    scrub();
    LEFT.set(black_box(&here) as *const u8 as usize - SAVED);
    way.suspend(standing)
}

/// Room for what a switch saves below the frame that switches.
const SAVED: usize = 1024;

#[inline(never)]
fn scrub() {
    let mut room = [0u8; 16 << 10];
    black_box(&mut room);
}
