//! Keeps LeakSanitizer from a check that would not end.
//!
//! At the exit of a program, LeakSanitizer stops all other threads by ptrace, those of the pager
//! too, and then reads the heap. A page in the pool would never come. The heap that LeakSanitizer
//! knows is its own, which paged programs do not use: without the check nothing is lost.

use std::ffi::c_int;

use pager::sys;

/// Tells LeakSanitizer's runtime library not to check for leaks, with a line. The library calls
/// this function before each check.
///
/// A program into which the runtime is linked statically does not call the function.
#[unsafe(no_mangle)]
pub extern "C" fn __lsan_is_turned_off() -> c_int {
    if crate::pager().is_none() {
        return 0;
    }
    sys::say(&format!(
        "process {}: LeakSanitizer checks nothing, because it would stop the pager's threads and \
         then wait for their pages; run the program without Granary to find its leaks",
        std::process::id()
    ));
    1
}
