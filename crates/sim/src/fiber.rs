//! Fibers: each simulated core runs its program on a stack of its own, and stands wherever that
//! waits. Programs are ordinary blocking code, or futures under [`block_on`].
//!
//! What a program computes takes no time by itself; what it costs is added up ([`spend`]) and passes
//! when it next waits, or as soon as the sum is larger than its patience.

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

/// A fiber, by number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FiberId(pub u32);

/// Why it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stand {
    /// For so long.
    For(Time),
    /// Until somebody wakes it.
    Waits,
}

type Way = Yielder<(), Stand>;

/// What the fiber that runs on this thread is.
struct Here {
    way: *const Way,
    id: FiberId,
    owed: Cell<Time>,
    patience: Time,
    waker: Waker,
    /// It is being ended: nothing waits any more.
    ending: Cell<bool>,
}

thread_local! {
    static HERE: Cell<*const Here> = const { Cell::new(ptr::null()) };
}

/// A program on its own stack.
pub(crate) struct Fiber {
    thread: Coroutine<(), Stand, (), DefaultStack>,
    here: Box<Here>,
    pub name: String,
}

/// Bytes of a stack. Memory is taken page by page as it is used.
const STACK: usize = 256 << 10;

impl Fiber {
    pub fn new(
        id: FiberId,
        name: String,
        patience: Time,
        waker: Waker,
        stack: Option<DefaultStack>,
        program: impl FnOnce() + 'static,
    ) -> Self {
        let here = Box::new(Here {
            way: ptr::null(),
            id,
            owed: Cell::new(Time::ZERO),
            patience,
            waker,
            ending: Cell::new(false),
        });
        let told: *const Here = &*here;
        let stack =
            stack.unwrap_or_else(|| DefaultStack::new(STACK).expect("memory for a fiber's stack"));
        let thread = Coroutine::with_stack(stack, move |way: &Way, ()| {
            // SAFETY: the box outlives the coroutine, and only the fiber's own thread touches it.
            unsafe { (*told.cast_mut()).way = way };
            program();
        });
        Self { thread, here, name }
    }

    /// Lets it run until it stands; `None` when its program has ended.
    pub fn resume(&mut self) -> Option<Stand> {
        let _inside = Inside::of(&self.here);
        match self.thread.resume(()) {
            CoroutineResult::Yield(stand) => Some(stand),
            CoroutineResult::Return(()) => None,
        }
    }

    /// Ends its program where it stands: what it holds is dropped, and none of it waits for anything.
    pub fn end(mut self) -> DefaultStack {
        self.here.ending.set(true);
        let inside = Inside::of(&self.here);
        if self.thread.started() && !self.thread.done() {
            self.thread.force_unwind();
        } else if !self.thread.started() {
            // SAFETY: nothing of it has run: there is nothing on its stack to drop but its program.
            unsafe { self.thread.force_reset() };
        }
        drop(inside);
        self.thread.into_stack()
    }
}

/// A fiber runs, until this is dropped: also if its program panics.
struct Inside(*const Here);

impl Inside {
    fn of(here: &Here) -> Self {
        Self(HERE.replace(here))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        HERE.set(self.0);
    }
}

fn here<T>(f: impl FnOnce(&Here) -> T) -> Option<T> {
    let here = HERE.get();
    // SAFETY: `resume` set it to the fiber's box, which lives while the fiber runs.
    (!here.is_null()).then(|| f(unsafe { &*here }))
}

/// The fiber that runs, if one does.
pub fn current() -> Option<FiberId> {
    here(|h| h.id)
}

/// True if the fiber that runs is being ended: what would wait must fail instead.
pub fn is_ending() -> bool {
    here(|h| h.ending.get()).unwrap_or(false)
}

/// What the running fiber has done that time has not passed for yet.
pub fn owed() -> Time {
    here(|h| h.owed.get()).unwrap_or_default()
}

/// Adds to what the running fiber has done. Time passes for it now if that is more than its patience.
pub fn spend(time: Time) {
    let must_pass = here(|h| {
        h.owed.set(h.owed.get() + time);
        h.owed.get() > h.patience && !h.ending.get()
    });
    if must_pass == Some(true) {
        pass();
    }
}

/// Has time pass for what the running fiber has done.
pub fn pass() {
    let owed = here(|h| if h.ending.get() { Time::ZERO } else { h.owed.replace(Time::ZERO) });
    if let Some(owed) = owed.filter(|t| *t > Time::ZERO) {
        stand(Stand::For(owed));
    }
}

/// Stands for `time`, and for what is owed.
pub fn sleep(time: Time) {
    if let Some(all) = here(|h| h.owed.replace(Time::ZERO) + time)
        && !is_ending()
    {
        stand(Stand::For(all));
    }
}

/// Stands until somebody wakes this fiber, which may be for no reason.
pub(crate) fn wait() {
    pass();
    if !is_ending() {
        stand(Stand::Waits);
    }
}

#[inline(never)]
fn stand(why: Stand) {
    let way = here(|h| h.way).expect("only a fiber stands");
    // SAFETY: the coroutine set it, and its yielder lives as long as its stack, on which this runs.
    unsafe { (*way).suspend(why) };
}

/// Wakes the running fiber. Panics outside of fibers.
pub fn waker() -> Waker {
    here(|h| h.waker.clone()).expect("a fiber runs")
}

/// Wakes a future's fiber, and keeps in mind that it did.
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
/// The future may wait for something in the middle of a poll, as who re-establishes a connection does. That
/// takes the fiber's wake-ups, also one that was meant for the future: so it is kept in mind.
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
        assert!(!is_ending(), "a program that is being ended starts nothing");
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
    fn a_fiber_stands_and_goes_on() {
        let log = Rc::new(RefCell::new(Vec::new()));
        let told = log.clone();
        let mut fiber = Fiber::new(
            FiberId(7),
            "test".into(),
            Time(100),
            Waker::noop().clone(),
            None,
            move || {
                assert_eq!(current(), Some(FiberId(7)));
                spend(Time(60));
                told.borrow_mut().push("patient");
                spend(Time(60));
                told.borrow_mut().push("passed");
                spend(Time(30));
                wait();
                told.borrow_mut().push("woken");
            },
        );
        assert_eq!(fiber.resume(), Some(Stand::For(Time(120))));
        assert_eq!(*log.borrow(), ["patient"]);
        assert_eq!(
            fiber.resume(),
            Some(Stand::For(Time(30))),
            "what is owed passes before it waits"
        );
        assert_eq!(fiber.resume(), Some(Stand::Waits));
        assert_eq!(fiber.resume(), None);
        assert_eq!(*log.borrow(), ["patient", "passed", "woken"]);
        assert_eq!(current(), None);
    }

    /// A future's waker is called, then it waits in the middle of its poll for something else: the fiber goes
    /// on with the future all the same.
    #[test]
    fn a_wait_within_a_poll_does_not_swallow_the_wake_up_of_a_future() {
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
        assert_eq!(fiber.resume(), Some(Stand::Waits), "in the middle of the poll");
        let before = wakes.0.load(Ordering::SeqCst);
        assert_eq!(fiber.resume(), Some(Stand::Waits));
        assert_eq!(wakes.0.load(Ordering::SeqCst), before + 1, "the future is to be polled again");
        assert_eq!(fiber.resume(), Some(Stand::Waits));
        assert_eq!(wakes.0.load(Ordering::SeqCst), before + 1, "nobody has woken it since");
        assert_eq!(fiber.resume(), None);
    }

    #[test]
    fn a_panic_comes_out_of_the_fiber_and_leaves_nobody_running() {
        let noop = Waker::noop().clone();
        let program = || panic!("as planned");
        let mut fiber = Fiber::new(FiberId(1), "test".into(), Time(0), noop, None, program);
        let run = std::panic::AssertUnwindSafe(|| fiber.resume());
        assert!(std::panic::catch_unwind(run).is_err());
        assert_eq!(current(), None);
        fiber.end();
    }

    #[test]
    fn who_is_ended_drops_what_it_holds_and_waits_for_nothing() {
        struct Told(Rc<Cell<u32>>);
        impl Drop for Told {
            fn drop(&mut self) {
                assert!(is_ending());
                spend(Time(1 << 40));
                sleep(Time(5));
                wait();
                self.0.set(self.0.get() + 1);
            }
        }
        let drops = Rc::new(Cell::new(0));
        let held = Told(drops.clone());
        let mut fiber = Fiber::new(
            FiberId(0),
            "test".into(),
            Time(0),
            Waker::noop().clone(),
            None,
            move || {
                let _held = held;
                wait();
                unreachable!("nobody woke it");
            },
        );
        fiber.resume();
        fiber.end();
        assert_eq!(drops.get(), 1);
    }
}
