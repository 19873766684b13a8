//! `fork`: the pager's steps are the last before it and the first after it.
//!
//! Handlers of `pthread_atfork` run in the order in which they were registered, and those before a fork in the
//! reverse order. A library that is initialised before this one may register some; so its call comes here,
//! and ours are registered first. Then all others run while memory is paged as ever.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::direct::Next;
use crate::{heap, inside, pager};

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

/// What `pthread_atfork` of the C library's static part calls, in every library that has it.
///
/// # Safety
/// As for the C library's.
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

unsafe extern "C" fn before() {
    let _inside = inside::Inside::new();
    if let Some(pager) = pager() {
        pager.before_fork();
    }
}

unsafe extern "C" fn after_in_parent() {
    let _inside = inside::Inside::new();
    if let Some(pager) = pager() {
        pager.after_fork_in_parent();
    }
}

unsafe extern "C" fn after_in_child() {
    let _inside = inside::Inside::new();
    if let Some(pager) = pager() {
        heap::renew_in_child();
        pager.after_fork_in_child();
    }
}
