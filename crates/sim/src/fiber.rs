//! Fibers: each simulated core runs its program on a stack of its own, and is suspended while the
//! program waits. Programs are ordinary blocking code, or futures under [`block_on`].
//!
//! A program's computation takes no virtual time by itself. Its cost is accumulated by [`charge`],
//! and passes when the program next waits or when the sum exceeds the fiber's quantum.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use crate::time::Time;

/// Number of a fiber.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FiberId(pub u32);

/// Why a fiber is suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Suspension {
    /// For this length of time.
    For(Time),
    /// Until it is woken.
    Waits,
}

type FiberYielder = Yielder<(), Suspension>;

/// State of the fiber that runs on this thread.
struct Running {
    yielder: *const FiberYielder,
    id: FiberId,
    charged: Cell<Time>,
    quantum: Time,
    waker: Waker,
    /// Whether the fiber is being ended: it must not wait any more.
    ending: Cell<bool>,
}

thread_local! {
    static RUNNING: Cell<*const Running> = const { Cell::new(ptr::null()) };
}

/// A program on its own stack.
pub(crate) struct Fiber {
    thread: Coroutine<(), Suspension, (), DefaultStack>,
    running: Box<Running>,
    pub name: String,
}

/// Bytes of a stack. Memory is allocated page by page on first use.
const STACK: usize = 256 << 10;

impl Fiber {
    pub fn new(
        id: FiberId,
        name: String,
        quantum: Time,
        waker: Waker,
        stack: Option<DefaultStack>,
        program: impl FnOnce() + 'static,
    ) -> Self {
        let running = Box::new(Running {
            yielder: ptr::null(),
            id,
            charged: Cell::new(Time::ZERO),
            quantum,
            waker,
            ending: Cell::new(false),
        });
        let shared: *const Running = &*running;
        let stack =
            stack.unwrap_or_else(|| DefaultStack::new(STACK).expect("memory for a fiber's stack"));
        let thread = Coroutine::with_stack(stack, move |yielder: &FiberYielder, ()| {
            // SAFETY: the box outlives the coroutine, and only the fiber's own thread touches it.
            unsafe { (*shared.cast_mut()).yielder = yielder };
            program();
        });
        Self { thread, running, name }
    }

    /// Runs the fiber until it is suspended. Returns `None` when its program has ended.
    pub fn resume(&mut self) -> Option<Suspension> {
        let _inside = Inside::enter(&self.running);
        match self.thread.resume(()) {
            CoroutineResult::Yield(suspension) => Some(suspension),
            CoroutineResult::Return(()) => None,
        }
    }

    /// Ends the suspended program: drops the values on its stack; nothing of it waits any more.
    pub fn end(mut self) -> DefaultStack {
        self.running.ending.set(true);
        let inside = Inside::enter(&self.running);
        if self.thread.started() && !self.thread.done() {
            self.thread.force_unwind();
        } else if !self.thread.started() {
            // SAFETY: the coroutine has not run, so its stack holds no value to drop except the
            // program.
            unsafe { self.thread.force_reset() };
        }
        drop(inside);
        self.thread.into_stack()
    }
}

/// Marks a fiber as running until dropped, even if its program panics.
struct Inside(*const Running);

impl Inside {
    fn enter(running: &Running) -> Self {
        Self(RUNNING.replace(running))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        RUNNING.set(self.0);
    }
}

fn running<T>(f: impl FnOnce(&Running) -> T) -> Option<T> {
    let running = RUNNING.get();
    // SAFETY: `resume` has set the pointer to the fiber's box, which lives while the fiber runs.
    (!running.is_null()).then(|| f(unsafe { &*running }))
}

/// Returns the running fiber, if any.
pub fn current() -> Option<FiberId> {
    running(|h| h.id)
}

/// Returns whether the running fiber is being ended. Operations that would wait must fail then.
pub fn is_ending() -> bool {
    running(|h| h.ending.get()).unwrap_or(false)
}

/// Returns the time that the running fiber has spent and that has not passed yet.
pub fn charged() -> Time {
    running(|h| h.charged.get()).unwrap_or_default()
}

/// Charges virtual time to the running fiber. The time passes once the accumulated charge exceeds
/// the fiber's quantum.
pub fn charge(time: Time) {
    let must_pass = running(|h| {
        h.charged.set(h.charged.get() + time);
        h.charged.get() > h.quantum && !h.ending.get()
    });
    if must_pass == Some(true) {
        pass();
    }
}

/// Lets the time pass that the running fiber has spent.
pub fn pass() {
    let charged =
        running(|h| if h.ending.get() { Time::ZERO } else { h.charged.replace(Time::ZERO) });
    if let Some(charged) = charged.filter(|t| *t > Time::ZERO) {
        suspend(Suspension::For(charged));
    }
}

/// Suspends the running fiber for `time` and for the time that it has spent.
pub fn sleep(time: Time) {
    if let Some(all) = running(|h| h.charged.replace(Time::ZERO) + time)
        && !is_ending()
    {
        suspend(Suspension::For(all));
    }
}

/// Suspends the running fiber until it is woken. Wake-ups may be spurious.
pub(crate) fn wait() {
    pass();
    if !is_ending() {
        suspend(Suspension::Waits);
    }
}

#[inline(never)]
fn suspend(why: Suspension) {
    let yielder = running(|h| h.yielder).expect("only a fiber can be suspended");
    // SAFETY: the coroutine has set the pointer; its yielder lives on the stack on which this code
    // runs.
    unsafe { (*yielder).suspend(why) };
}

/// Returns the waker of the running fiber. Panics outside of fibers.
pub fn waker() -> Waker {
    running(|h| h.waker.clone()).expect("a fiber runs")
}

/// Wakes a future's fiber and remembers the wake-up.
struct FutureWaker {
    fiber: Waker,
    woken: AtomicBool,
}

impl Wake for FutureWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.fiber.wake_by_ref();
    }
}

/// Runs a future on the running fiber.
///
/// The future may block the fiber in the middle of a poll, for example to re-establish a
/// connection. That wait consumes the fiber's wake-ups, including one that was meant for the
/// future. So wake-ups of the future are remembered separately.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let me = Arc::new(FutureWaker { fiber: waker(), woken: AtomicBool::new(false) });
    let waker = Waker::from(me.clone());
    let mut cx = Context::from_waker(&waker);
    loop {
        me.woken.store(false, Ordering::SeqCst);
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        assert!(!is_ending(), "a program that is being ended must not wait for a future");
        if me.woken.load(Ordering::SeqCst) {
            me.fiber.wake_by_ref();
        }
        wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn fiber_suspends_and_resumes() {
        let log = Rc::new(RefCell::new(Vec::new()));
        let shared = log.clone();
        let mut fiber = Fiber::new(
            FiberId(7),
            "test".into(),
            Time(100),
            Waker::noop().clone(),
            None,
            move || {
                assert_eq!(current(), Some(FiberId(7)));
                charge(Time(60));
                shared.borrow_mut().push("patient");
                charge(Time(60));
                shared.borrow_mut().push("passed");
                charge(Time(30));
                wait();
                shared.borrow_mut().push("woken");
            },
        );
        assert_eq!(fiber.resume(), Some(Suspension::For(Time(120))));
        assert_eq!(*log.borrow(), ["patient"]);
        assert_eq!(
            fiber.resume(),
            Some(Suspension::For(Time(30))),
            "charged time passes before the wait"
        );
        assert_eq!(fiber.resume(), Some(Suspension::Waits));
        assert_eq!(fiber.resume(), None);
        assert_eq!(*log.borrow(), ["patient", "passed", "woken"]);
        assert_eq!(current(), None);
    }

    /// The future's waker is called, then the future blocks within its poll. The future must be
    /// polled again nevertheless.
    #[test]
    fn wait_within_poll_keeps_the_futures_wakeup() {
        struct Wakes(AtomicU32);
        impl Wake for Wakes {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let wakes = Arc::new(Wakes(AtomicU32::new(0)));
        let mut fiber = Fiber::new(
            FiberId(2),
            "test".into(),
            Time(0),
            Waker::from(wakes.clone()),
            None,
            || {
                let mut polls = 0;
                block_on(std::future::poll_fn(|cx| {
                    polls += 1;
                    if polls == 1 {
                        cx.waker().wake_by_ref();
                        wait();
                    }
                    if polls < 3 { Poll::Pending } else { Poll::Ready(()) }
                }));
            },
        );
        assert_eq!(fiber.resume(), Some(Suspension::Waits), "in the middle of the poll");
        let before = wakes.0.load(Ordering::SeqCst);
        assert_eq!(fiber.resume(), Some(Suspension::Waits));
        assert_eq!(wakes.0.load(Ordering::SeqCst), before + 1, "the future must be polled again");
        assert_eq!(fiber.resume(), Some(Suspension::Waits));
        assert_eq!(wakes.0.load(Ordering::SeqCst), before + 1, "no wake-up since");
        assert_eq!(fiber.resume(), None);
    }

    #[test]
    fn panic_propagates_out_of_the_fiber() {
        let noop = Waker::noop().clone();
        let program = || panic!("as planned");
        let mut fiber = Fiber::new(FiberId(1), "test".into(), Time(0), noop, None, program);
        let run = std::panic::AssertUnwindSafe(|| fiber.resume());
        assert!(std::panic::catch_unwind(run).is_err());
        assert_eq!(current(), None);
        fiber.end();
    }

    #[test]
    fn ended_fiber_drops_its_values_without_waiting() {
        struct CountsDrops(Rc<Cell<u32>>);
        impl Drop for CountsDrops {
            fn drop(&mut self) {
                assert!(is_ending());
                charge(Time(1 << 40));
                sleep(Time(5));
                wait();
                self.0.set(self.0.get() + 1);
            }
        }
        let drops = Rc::new(Cell::new(0));
        let held = CountsDrops(drops.clone());
        let mut fiber = Fiber::new(
            FiberId(0),
            "test".into(),
            Time(0),
            Waker::noop().clone(),
            None,
            move || {
                let _held = held;
                wait();
                unreachable!("the fiber was not woken");
            },
        );
        fiber.resume();
        fiber.end();
        assert_eq!(drops.get(), 1);
    }
}
