//! Fork handlers: the pager's handlers run last before a fork and first after it.
//!
//! `pthread_atfork` runs the handlers after a fork in the order of registration, and the handlers
//! before a fork in the reverse order. Libraries that are initialised before this one may register
//! handlers earlier. So this library interposes the registration function and registers the pager's
//! handlers before the first other ones. Then all other handlers run while paging works.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use pager::Pager;

use crate::direct::Next;
use crate::{heap, paged_memory, pager, reentrancy};

type Handler = Option<unsafe extern "C" fn()>;
type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// Registers the pager's handlers, once.
pub fn register() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::AcqRel) {
        // SAFETY: the handlers are functions of this library, which is never unloaded.
        unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    }
}

/// Registers fork handlers. `pthread_atfork`, which is linked statically into every library that
/// uses it, calls this function.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> c_int {
    const NAME: &CStr = c"__register_atfork";
    static NEXT: Next = Next::new(NAME);
    register();
    // SAFETY: the C library's function of this name has this type; the arguments are the program's.
    NEXT.call(|next| unsafe {
        std::mem::transmute::<*mut c_void, Register>(next)(prepare, parent, child, library)
    })
}

/// True if the pager has prepared the fork in progress. A child without threads of a pager
/// ([`crate::unseen`]) forks without the pager.
static PREPARED: AtomicBool = AtomicBool::new(false);

/// Runs before each fork.
pub unsafe extern "C" fn before() {
    let _guard = reentrancy::ReentrancyGuard::new();
    let pager = pager();
    if let Some(pager) = pager {
        pager.before_fork();
    }
    PREPARED.store(pager.is_some(), Ordering::Release);
}

fn prepared() -> Option<&'static Pager> {
    if PREPARED.load(Ordering::Acquire) { paged_memory() } else { None }
}

/// Runs in the parent after each fork, also one that failed.
pub unsafe extern "C" fn after_in_parent() {
    let _guard = reentrancy::ReentrancyGuard::new();
    if let Some(pager) = prepared() {
        pager.after_fork_in_parent();
    }
}

/// Runs in the child after each fork.
pub unsafe extern "C" fn after_in_child() {
    let _guard = reentrancy::ReentrancyGuard::new();
    if let Some(pager) = prepared() {
        heap::renew_in_child();
        pager.after_fork_in_child();
    }
}
