//! The memory node's CPU in a world.
//!
//! It runs the scheme's own code on a stack of its own and is suspended before each verb until the
//! explorer resumes it.

use std::cell::Cell;
use std::ptr;

use corosensei::stack::{Stack, StackPointer};
use corosensei::{Coroutine, CoroutineResult};
use scheme::NodeScheme;
use schemes::onesidedmw::Node;

use crate::arena::{self, Arena};
use crate::nic::ModelNic;
use crate::schedule::{self, Command, CpuState, CpuYielder, Task, TaskResult, suspend};

/// The stack zone of an arena: lowest address and end address.
struct InArena(usize, usize);

// SAFETY: the zone is mapped and belongs to this thread alone. There is no guard page, but the zone
// below belongs to the same arena, and 256 KiB are far more than the code needs.
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
    thread: Coroutine<Command, CpuState, (), InArena>,
    yielder: *const CpuYielder,
    /// Lowest address of its stack in use.
    low: usize,
    begun: bool,
    /// The current task.
    pub task: Option<Task>,
    /// Where the CPU is suspended.
    pub state: CpuState,
}

impl Cpu {
    /// Creates the CPU that works for the node at `node`, which must live as long.
    pub fn new(arena: &Arena, node: *mut Node<ModelNic>) -> Self {
        let (limit, base) = arena.stack();
        let yielder = Box::leak(Box::new(Cell::new(ptr::null::<CpuYielder>())));
        let shared: *const Cell<*const CpuYielder> = yielder;
        let thread =
            Coroutine::with_stack(InArena(limit, base), move |yielder: &CpuYielder, first| {
                // SAFETY: the cell was leaked.
                unsafe { (*shared).set(yielder) };
                let mut command = first;
                loop {
                    let Command::Start(task) = command else {
                        unreachable!("an idle CPU gets a task")
                    };
                    // SAFETY: the node lives; other code uses it only while the CPU is idle.
                    let result = execute(unsafe { &mut *node }, task);
                    command = suspend(yielder, CpuState::Idle(result));
                }
            });
        let state = CpuState::Idle(Ok(None));
        let mut cpu =
            Self { thread, yielder: ptr::null(), low: base, begun: false, task: None, state };
        // Runs a first task, so that the CPU is suspended as idle on its own stack from now on.
        cpu.run(Command::Start(Task::Turn));
        cpu.yielder = yielder.get();
        cpu
    }

    /// Assigns a task, without running it.
    pub fn start(&mut self, task: Task) {
        assert!(self.task.is_none());
        self.task = Some(task);
        self.state = CpuState::Verb;
    }

    /// Resumes the CPU until its next verb or the end of its task. Returns the result in the second
    /// case.
    pub fn resume(&mut self) -> Option<(Task, TaskResult)> {
        let task = self.task.expect("it has a task");
        let command = if self.begun { Command::Resume } else { Command::Start(task) };
        self.begun = true;
        self.run(command);
        let CpuState::Idle(result) = &self.state else { return None };
        self.task = None;
        self.begun = false;
        Some((task, arena::outside(|| result.clone())))
    }

    /// Returns whether the CPU has run since it got its task.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Returns the part of the stack in use: lowest address and end address.
    pub fn used_stack(&self, arena: &Arena) -> (usize, usize) {
        (self.low, arena.stack().1)
    }

    #[inline(never)]
    fn run(&mut self, command: Command) {
        schedule::enter_cpu(self.yielder);
        let state = arena::inside_cpu(|| match self.thread.resume(command) {
            CoroutineResult::Yield(state) => state,
            CoroutineResult::Return(()) => unreachable!("the CPU never returns"),
        });
        self.low = schedule::leave_cpu();
        self.state = state;
    }
}

fn execute(node: &mut Node<ModelNic>, task: Task) -> TaskResult {
    match task {
        Task::Turn => node.poll().map(|_| None),
        Task::Retire(client) => node.retire(client).map(|()| None),
        Task::ResetManagement(client) => node.reset_management(client),
    }
    .map_err(|e| e.to_string())
}
