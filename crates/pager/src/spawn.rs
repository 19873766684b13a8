//! Start of a thread without std.

use crate::config::EXIT_PAGER;
use crate::{descriptor, sys};

/// Starts a thread of the pager. A panic in the thread ends the process, because no other thread
/// would serve its faults.
///
/// Does not use std's threads. Before a std thread runs the given closure, it makes libc allocate,
/// and the thread has not yet entered the reentrancy guard. The allocation would take paged memory
/// from the program's allocator and, in a process that forks, deadlock on the thread's own fault.
/// So `run` enters the guard first.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let own_table = descriptor::has_own_table();
    let name = std::ffi::CString::new(name)?;
    let guarded = move || {
        // SAFETY: names the calling thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        if own_table {
            descriptor::shares_own_table();
        }
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
            sys::die(EXIT_PAGER, "a thread of the pager panicked, so the process ends now");
        }
    };
    type Run = Box<dyn FnOnce() + Send>;
    extern "C" fn start(run: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: the pointer that is passed below, used once.
        let run: Run = *unsafe { Box::from_raw(run.cast::<Run>()) };
        run();
        std::ptr::null_mut()
    }
    let run: *mut Run = Box::into_raw(Box::new(Box::new(guarded)));
    // SAFETY: the attributes are initialised before use. The new thread owns `run`; if there is no
    // new thread, this function frees it.
    let error = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstacksize(&mut attributes, 256 << 10);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let mut thread = std::mem::zeroed();
        let error = libc::pthread_create(&mut thread, &attributes, start, run.cast());
        libc::pthread_attr_destroy(&mut attributes);
        if error != 0 {
            drop(Box::from_raw(run));
        }
        error
    };
    if error == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(error)) }
}
