//! The `close` family, which spares the pager's descriptors: to the program they are not open.

use std::ffi::{c_int, c_uint};

use pager::descriptor;

fn bad() -> c_int {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() = libc::EBADF };
    -1
}

/// close(2).
#[unsafe(no_mangle)]
pub extern "C" fn close(fd: c_int) -> c_int {
    if descriptor::is_ours(fd) {
        return bad();
    }
    // SAFETY: what the program asked for.
    unsafe { libc::syscall(libc::SYS_close, fd) as c_int }
}

/// close_range(2).
#[unsafe(no_mangle)]
pub extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut result = 0;
    if first > last || crate::pager().is_none() {
        // SAFETY: what the program asked for.
        return unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) as c_int };
    }
    descriptor::between_ours(first, last, |first, last| {
        // SAFETY: what the program asked for, but for ours.
        let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) as c_int };
        if done != 0 {
            result = done;
        }
    });
    result
}

/// closefrom(3).
#[unsafe(no_mangle)]
pub extern "C" fn closefrom(first: c_int) {
    close_range(first.max(0) as c_uint, c_uint::MAX, 0);
}

/// dup2(2): not onto ours.
#[unsafe(no_mangle)]
pub extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if descriptor::is_ours(new) {
        return bad();
    }
    // SAFETY: what the program asked for.
    unsafe { libc::syscall(libc::SYS_dup2, old, new) as c_int }
}

/// dup3(2): not onto ours.
#[unsafe(no_mangle)]
pub extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if descriptor::is_ours(new) {
        return bad();
    }
    // SAFETY: what the program asked for.
    unsafe { libc::syscall(libc::SYS_dup3, old, new, flags) as c_int }
}
