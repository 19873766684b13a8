//! Destructors of thread-local variables of the pager's threads.
//!
//! Rust's standard library and C++ register the destructor of a thread-local variable at its first
//! use by `__cxa_thread_atexit_impl`. The C library's function takes the lock of the dynamic
//! linker. A thread of the program that faults within `dlopen`, for example in a constructor of the
//! opened library, holds this lock until a thread of the pager has served the fault. So a thread of
//! the pager that registered a destructor meanwhile would wait for ever.

use std::ffi::{c_int, c_void};

use crate::{redirect, reentrancy};

type Destructor = unsafe extern "C" fn(*mut c_void);
type Register = unsafe extern "C" fn(Destructor, *mut c_void, *mut c_void) -> c_int;

/// Registers a destructor that runs at the end of the calling thread. Registers nothing for code of
/// this library: its threads end with the process, and a thread of the program leaves at most one
/// small allocation behind.
///
/// # Safety
/// As in the C++ ABI.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cxa_thread_atexit_impl(
    destructor: Destructor,
    object: *mut c_void,
    library: *mut c_void,
) -> c_int {
    if reentrancy::is_reentrant() {
        return 0;
    }
    match redirect::c_library_function(c"__cxa_thread_atexit_impl") {
        // SAFETY: the C library's function of this name has this type; the arguments are the
        // caller's.
        Some(own) => unsafe {
            std::mem::transmute::<*mut c_void, Register>(own)(destructor, object, library)
        },
        None => -1,
    }
}
