//! Threads of the simulation, as fibers of one thread: a schedule decides which one runs next.
//!
//! A fiber runs ordinary blocking code. It is suspended at each [`point`], while it waits
//! ([`wait_until`]), and when it gives way ([`pause`]). Between two of these, no other fiber runs.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

/// Reason for which a fiber is suspended.
enum Suspension {
    /// The fiber can go on at any time.
    Point,
    /// The fiber waits for progress of other fibers, without a condition.
    Pause,
    /// The fiber waits for a condition, which lies on its stack.
    Until(&'static str, *const dyn Fn() -> bool),
}

type FiberYielder = Yielder<(), Suspension>;
type YielderPlace = Cell<*const FiberYielder>;
type Program = Box<dyn FnOnce()>;

thread_local! {
    /// The running fiber, and the place of its yielder.
    static RUNNING: Cell<Option<(usize, *const YielderPlace)>> = const { Cell::new(None) };
    /// Number of the current step.
    static STEP: Cell<u32> = const { Cell::new(0) };
    /// Fibers that start at the next step.
    static SPAWNED: RefCell<Vec<(String, Program)>> = const { RefCell::new(Vec::new()) };
    /// Returns true if no fiber may be suspended now, because it holds a lock.
    static LOCKED: RefCell<Option<Box<dyn Fn() -> bool>>> = const { RefCell::new(None) };
    /// Fibers that are killed, with the number of points before.
    static KILLS: RefCell<Vec<(usize, u32)>> = const { RefCell::new(Vec::new()) };
    /// Stacks of ended fibers.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
    /// Lines of the trace, if a trace is recorded.
    static TRACE: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Bytes of a stack. Memory is allocated page by page on first use.
const STACK: usize = 256 << 10;
/// Lines of a trace that are kept.
const TRACE_LINES: usize = 400;

/// Returns the number of the running fiber.
pub(crate) fn current() -> Option<usize> {
    RUNNING.get().map(|(fiber, _)| fiber)
}

/// Returns the number of the current step, in place of the time. `None` outside of fibers.
pub(crate) fn step() -> Option<u32> {
    current().map(|_| STEP.get())
}

/// Payload of the unwinding that ends a killed fiber.
struct Killed;

/// Ends the running fiber after `points` further points, as SIGKILL ends a process.
pub(crate) fn kill_after(points: u32) {
    let fiber = current().expect("only a fiber can be killed");
    KILLS.with_borrow_mut(|kills| kills.push((fiber, points)));
}

/// Returns true if a fiber was killed.
pub(crate) fn is_killed(fiber: usize) -> bool {
    KILLS.with_borrow(|kills| kills.contains(&(fiber, 0)))
}

fn may_be_killed() {
    let Some(fiber) = current() else { return };
    KILLS.with_borrow_mut(|kills| {
        if let Some((_, points)) = kills.iter_mut().find(|(killed, _)| *killed == fiber) {
            *points = points.saturating_sub(1);
        }
    });
    if is_killed(fiber) {
        std::panic::resume_unwind(Box::new(Killed));
    }
}

/// Lets the schedule choose another fiber to run. Has no effect outside of fibers, or while the
/// fiber holds a lock of the pager's logic.
pub(crate) fn point() {
    may_be_killed();
    if RUNNING.get().is_some() && !LOCKED.with_borrow(|locked| locked.as_ref().is_some_and(|l| l()))
    {
        suspend(Suspension::Point);
    }
}

/// Lets other fibers run, because the calling fiber cannot go on without them.
pub(crate) fn pause() {
    suspend(Suspension::Pause);
}

/// Suspends the fiber until a condition holds. `what` names the condition in the report of a
/// deadlock.
pub(crate) fn wait_until(what: &'static str, condition: impl Fn() -> bool) {
    let condition: &dyn Fn() -> bool = &condition;
    // SAFETY: only the lifetime changes. The scheduler calls the condition only while this fiber is
    // suspended below, and the condition lives until then.
    let condition: *const (dyn Fn() -> bool + 'static) =
        unsafe { std::mem::transmute::<*const dyn Fn() -> bool, _>(condition) };
    suspend(Suspension::Until(what, condition));
}

#[inline(never)]
fn suspend(why: Suspension) {
    let (fiber, yielder) = RUNNING.get().expect("only a fiber can be suspended");
    let is_locked = LOCKED.with_borrow(|locked| locked.as_ref().is_some_and(|locked| locked()));
    assert!(!is_locked, "fiber {fiber} waits while it holds a lock");
    // SAFETY: `resume` has set the place, and the coroutine the pointer in it; the yielder lives on
    // the stack on which this code runs.
    unsafe { (*(*yielder).get()).suspend(why) };
}

/// Starts a fiber.
pub(crate) fn spawn(name: impl Into<String>, program: impl FnOnce() + 'static) {
    SPAWNED.with_borrow_mut(|spawned| spawned.push((name.into(), Box::new(program))));
}

/// Records a line, if a trace is recorded.
pub(crate) fn trace(line: impl FnOnce() -> String) {
    TRACE.with_borrow_mut(|trace| {
        if let Some(lines) = trace {
            if lines.len() == 2 * TRACE_LINES {
                lines.drain(..TRACE_LINES);
            }
            let fiber = current().map_or("-".to_string(), |fiber| fiber.to_string());
            lines.push(format!("[{fiber}] {}", line()));
        }
    });
}

/// Starts a new trace, or ends the recording.
pub(crate) fn set_trace(is_on: bool) {
    TRACE.set(is_on.then(Vec::new));
}

/// Returns the recorded lines.
pub(crate) fn take_trace() -> Vec<String> {
    TRACE.with_borrow_mut(|trace| trace.as_mut().map(std::mem::take).unwrap_or_default())
}

struct Fiber {
    name: String,
    yielder: Rc<YielderPlace>,
    thread: Coroutine<(), Suspension, (), DefaultStack>,
    why: Suspension,
    is_done: bool,
}

impl Fiber {
    fn new(name: String, program: Program) -> Self {
        let stack = STACKS.with_borrow_mut(Vec::pop);
        let stack =
            stack.unwrap_or_else(|| DefaultStack::new(STACK).expect("memory for a fiber's stack"));
        let place = Rc::new(Cell::new(std::ptr::null()));
        let yielder = place.clone();
        let thread = Coroutine::with_stack(stack, move |yielder: &FiberYielder, ()| {
            place.set(yielder);
            program();
        });
        Self { name, yielder, thread, why: Suspension::Point, is_done: false }
    }

    fn is_runnable(&self) -> bool {
        !self.is_done
            && match self.why {
                Suspension::Point | Suspension::Pause => true,
                // SAFETY: the fiber is suspended in `wait_until`, which has the condition.
                Suspension::Until(_, condition) => unsafe { (*condition)() },
            }
    }
}

/// A choice of the fiber that runs next.
pub(crate) struct Choice<'a> {
    /// Fibers that can run; at least one.
    pub runnable: &'a [usize],
    /// The fiber that ran last, if it can go on and does not wait for another one.
    pub last: Option<usize>,
}

/// Order of the steps of all fibers.
pub(crate) trait Schedule {
    /// Returns the fiber that runs next, one of `choice.runnable`.
    fn choose(&mut self, choice: &Choice<'_>) -> usize;
}

/// Runs the spawned fibers, and those that they spawn, until all have ended. Calls `check` after
/// each step.
///
/// # Errors
/// A message, if a fiber or `check` panics, if no fiber can run, or if `max_steps` are not enough.
pub(crate) fn run(
    schedule: &mut dyn Schedule,
    locked: impl Fn() -> bool + 'static,
    check: impl Fn(),
    max_steps: u32,
) -> Result<u32, String> {
    LOCKED.set(Some(Box::new(locked)));
    KILLS.take();
    let mut fibers: Vec<Fiber> = Vec::new();
    let result = run_all(&mut fibers, schedule, &check, max_steps);
    RUNNING.set(None);
    LOCKED.set(None);
    SPAWNED.take();
    match &result {
        Ok(_) => STACKS.with_borrow_mut(|stacks| {
            stacks.extend(fibers.into_iter().map(|fiber| fiber.thread.into_stack()));
        }),
        // A suspended fiber cannot be dropped: its destructors would run in the middle of a step.
        Err(_) => std::mem::forget(fibers),
    }
    result
}

fn run_all(
    fibers: &mut Vec<Fiber>,
    schedule: &mut dyn Schedule,
    check: &dyn Fn(),
    max_steps: u32,
) -> Result<u32, String> {
    let mut runnable = Vec::new();
    let mut last = None;
    for step in 0..max_steps {
        STEP.set(step);
        for (name, program) in SPAWNED.take() {
            fibers.push(Fiber::new(name, program));
        }
        runnable.clear();
        runnable.extend((0..fibers.len()).filter(|&index| fibers[index].is_runnable()));
        if runnable.is_empty() {
            if fibers.iter().all(|fiber| fiber.is_done) {
                return Ok(step);
            }
            return Err(format!("no thread can go on: {}", waiting(fibers)));
        }
        let goes_on = |&index: &usize| {
            !matches!(fibers[index].why, Suspension::Pause) && fibers[index].is_runnable()
        };
        let choice = Choice { runnable: &runnable, last: last.filter(goes_on) };
        let next = schedule.choose(&choice);
        last = Some(next);
        let fiber = &mut fibers[next];
        let resumed = catch_unwind(AssertUnwindSafe(|| {
            let result = resume(next, fiber);
            check();
            result
        }));
        match resumed {
            Ok(Some(why)) => fiber.why = why,
            Ok(None) => fiber.is_done = true,
            Err(panic) if panic.is::<Killed>() => {
                RUNNING.set(None);
                fiber.is_done = true;
            }
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| t.to_string()));
                let text = text.unwrap_or_default();
                return Err(format!("{} at step {step}: {text}", fibers[next].name));
            }
        }
    }
    Err(format!("no end after {max_steps} steps: {}", waiting(fibers)))
}

/// Runs a fiber until it is suspended. Returns `None` if it has ended.
fn resume(index: usize, fiber: &mut Fiber) -> Option<Suspension> {
    RUNNING.set(Some((index, &*fiber.yielder)));
    let result = fiber.thread.resume(());
    RUNNING.set(None);
    match result {
        CoroutineResult::Yield(why) => Some(why),
        CoroutineResult::Return(()) => None,
    }
}

fn waiting(fibers: &[Fiber]) -> String {
    let states = fibers.iter().filter(|fiber| !fiber.is_done).map(|fiber| {
        let why = match fiber.why {
            Suspension::Point => "runs",
            Suspension::Pause => "gives way",
            Suspension::Until(what, _) => what,
        };
        format!("{} ({why})", fiber.name)
    });
    states.collect::<Vec<_>>().join(", ")
}
