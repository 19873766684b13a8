//! The `close` family, which leaves the pager's descriptors open: for the program they do not
//! exist.

use std::ffi::{c_int, c_uint};

use pager::descriptor;

use crate::early::{kernel, set_errno};

/// Returns true if the descriptor is one of the pager's.
fn is_ours(fd: c_int) -> bool {
    crate::pager().is_some() && descriptor::is_ours(fd)
}

fn bad() -> c_int {
    set_errno(libc::EBADF);
    -1
}

/// close(2).
#[unsafe(no_mangle)]
pub extern "C" fn close(fd: c_int) -> c_int {
    if is_ours(fd) {
        return bad();
    }
    // SAFETY: the program's own request.
    unsafe { kernel(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) }
}

/// Makes the system call close_range.
///
/// # Safety
/// As for close_range(2).
unsafe fn range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let arguments = [first as usize, last as usize, flags as usize, 0, 0, 0];
    // SAFETY: by the caller.
    unsafe { kernel(libc::SYS_close_range, arguments) }
}

/// close_range(2).
#[unsafe(no_mangle)]
pub extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut result = 0;
    if first > last || crate::pager().is_none() {
        // SAFETY: the program's own request.
        return unsafe { range(first, last, flags) };
    }
    descriptor::between_ours(first, last, |first, last| {
        // SAFETY: the program's own request, without the pager's descriptors.
        let done = unsafe { range(first, last, flags) };
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

/// dup2(2). Fails with EBADF if `new` is one of the pager's descriptors.
#[unsafe(no_mangle)]
pub extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if is_ours(new) {
        return bad();
    }
    // SAFETY: the program's own request.
    unsafe { kernel(libc::SYS_dup2, [old as usize, new as usize, 0, 0, 0, 0]) }
}

/// dup3(2). Fails with EBADF if `new` is one of the pager's descriptors.
#[unsafe(no_mangle)]
pub extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if is_ours(new) {
        return bad();
    }
    // SAFETY: the program's own request.
    unsafe { kernel(libc::SYS_dup3, [old as usize, new as usize, flags as usize, 0, 0, 0]) }
}
