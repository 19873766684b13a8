//! Suspension of the memory node's CPU: the points at which the explorer may run other actors.
//!
//! The CPU runs on a stack of its own (`cpu`). The functions here switch from that stack to the
//! explorer, and know nothing of the memory node's code or of its NIC.

use std::cell::Cell;
use std::hint::black_box;
use std::ptr;

use corosensei::Yielder;
use scheme::ClientId;
use verbs::Cqn;

/// A task of the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// `NodeScheme::poll`: process the NIC's reports.
    Turn,
    /// `NodeScheme::retire`: begin to reclaim the chunks of a departed client.
    Retire(ClientId),
    /// `NodeScheme::reset_management`: re-establish broken management queues, or report that it is
    /// too early.
    ResetManagement(ClientId),
}

/// Result of a task: the numbers of re-established management QPs, or an error.
pub type TaskResult = Result<Option<Vec<u32>>, String>;

/// Where the CPU is suspended.
#[derive(Clone, Debug)]
pub enum CpuState {
    /// It has no task; contains the result of the last task.
    Idle(TaskResult),
    /// Before a verb.
    Verb,
    /// Until the CQ has counted more completions than this number.
    Waits(Cqn, u32),
}

/// A command of the explorer to the suspended CPU.
#[derive(Clone, Copy)]
pub enum Command {
    /// Begin a task.
    Start(Task),
    /// Continue the current task.
    Resume,
}

/// The CPU's side of the switch between the CPU and the explorer.
pub type CpuYielder = Yielder<Command, CpuState>;

thread_local! {
    /// The yielder to the explorer, while the CPU runs on this thread.
    static RUNNING: Cell<*const CpuYielder> = const { Cell::new(ptr::null()) };
    /// Lowest used stack address when the CPU was last suspended.
    static LOWEST_USED: Cell<usize> = const { Cell::new(0) };
}

/// Marks the CPU as running on this thread; `yielder` is null before the CPU was first suspended.
pub fn enter_cpu(yielder: *const CpuYielder) {
    RUNNING.set(yielder);
}

/// Marks the CPU as suspended. Returns the lowest stack address that it uses.
pub fn leave_cpu() -> usize {
    RUNNING.set(ptr::null());
    LOWEST_USED.get()
}

/// Suspends the CPU before a verb. Does nothing if the caller is not the CPU.
pub fn yield_to_explorer() {
    let yielder = RUNNING.get();
    if !yielder.is_null() {
        // SAFETY: `enter_cpu` has set the pointer; the CPU runs on the stack that holds the
        // yielder.
        suspend(unsafe { &*yielder }, CpuState::Verb);
    }
}

/// Suspends the CPU until a CQ has counted more completions than `polled`.
pub fn wait(cqn: Cqn, polled: u32) {
    let yielder = RUNNING.get();
    assert!(!yielder.is_null(), "only the CPU waits");
    // SAFETY: as in `yield_to_explorer`.
    suspend(unsafe { &*yielder }, CpuState::Waits(cqn, polled));
}

/// Suspends the CPU in `state` until the explorer's next command.
#[inline(never)]
pub fn suspend(yielder: &CpuYielder, state: CpuState) -> Command {
    let here = 0u8;
    // The stack below holds the registers that this switch saves, and leftovers of earlier calls.
    // Zeroing the leftovers makes states equal that differ in nothing else.
    scrub();
    LOWEST_USED.set(black_box(&here) as *const u8 as usize - SAVED);
    yielder.suspend(state)
}

/// Bytes that a context switch may use below the frame that switches.
const SAVED: usize = 1024;

/// Zeroes the stack below the caller's frame.
#[inline(never)]
fn scrub() {
    let mut room = [0u8; 16 << 10];
    black_box(&mut room);
}
