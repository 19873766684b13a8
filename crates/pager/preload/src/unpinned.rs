//! `vmsplice` and `setsockopt`, by which the kernel would reference pages without a pin.
//!
//! Where pages are moved ([`pager::Pager::moves_pages`]), the kernel also moves a page that only a
//! pipe or a socket references. The memory of the page is then used again for other pages, and the
//! pipe or socket would transfer their content. So paged memory is copied into a pipe, and sockets
//! refuse `SO_ZEROCOPY`, as kernels before Linux 4.14 do. Without this option the kernel ignores
//! `MSG_ZEROCOPY` and copies.

use std::ffi::{c_int, c_long, c_uint, c_void};

use pager::sys::{PAGE_BYTES, system_call};

use crate::direct::Next;
use crate::early;

/// All flags of `vmsplice`, `SPLICE_F_MOVE` to `SPLICE_F_GIFT`.
const FLAGS: c_uint = 0xf;
/// Maximum number of ranges of a call (`IOV_MAX`).
const RANGES_MAX: usize = 1024;
/// Linux 4.14; not in all versions of the `libc` crate for all C libraries.
const RWF_NOWAIT: usize = 8;

/// vmsplice(2).
///
/// # Safety
/// As for the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(
    fd: c_int,
    ranges: *const libc::iovec,
    count: usize,
    flags: c_uint,
) -> isize {
    type Vmsplice = unsafe extern "C" fn(c_int, *const libc::iovec, usize, c_uint) -> isize;
    static NEXT: Next = Next::new(c"vmsplice");
    // SAFETY: by the caller.
    if !early::is_relocated() || unsafe { must_copy(fd, ranges, count, flags) } {
        // SAFETY: by the caller.
        return unsafe { vmsplice_by_number(fd, ranges, count, flags) };
    }
    // SAFETY: the C library's function of this name has this type; the arguments are the program's.
    NEXT.call(|next| unsafe {
        std::mem::transmute::<*mut c_void, Vmsplice>(next)(fd, ranges, count, flags)
    })
}

/// `syscall(SYS_vmsplice, ...)`.
///
/// # Safety
/// As for the system call.
pub unsafe extern "C" fn vmsplice_by_number(
    fd: c_int,
    ranges: *const libc::iovec,
    count: usize,
    flags: c_uint,
) -> isize {
    // SAFETY: by the caller; the ranges were checked.
    let result = unsafe {
        if must_copy(fd, ranges, count, flags) {
            let waits = flags & libc::SPLICE_F_NONBLOCK == 0;
            copy(fd, std::slice::from_raw_parts(ranges, count), waits)
        } else {
            let arguments = [fd as usize, ranges as usize, count, flags as usize, 0, 0];
            system_call(libc::SYS_vmsplice, arguments)
        }
    };
    result.map_or_else(
        |errno| {
            early::set_errno(errno);
            -1
        },
        |bytes| bytes as isize,
    )
}

/// Returns true if the pipe would reference paged memory after the call. The kernel answers all
/// other calls: it also detects the errors, and copies from a pipe into memory.
///
/// # Safety
/// As for the system call.
unsafe fn must_copy(fd: c_int, ranges: *const libc::iovec, count: usize, flags: c_uint) -> bool {
    let Some(pager) = crate::pager().filter(|pager| pager.moves_pages()) else { return false };
    if ranges.is_null() || count > RANGES_MAX || flags & !FLAGS != 0 {
        return false;
    }
    // SAFETY: by the caller.
    let ranges = unsafe { std::slice::from_raw_parts(ranges, count) };
    let is_paged = |range: &libc::iovec| {
        range.iov_len > 0 && pager.region().overlaps(range.iov_base as usize, range.iov_len)
    };
    ranges.iter().any(is_paged) && is_writable_pipe(fd)
}

fn is_writable_pipe(fd: c_int) -> bool {
    let control = |command: c_int| {
        // SAFETY: these commands have no argument and change nothing.
        unsafe { system_call(libc::SYS_fcntl, [fd as usize, command as usize, 0, 0, 0, 0]) }
    };
    control(libc::F_GETPIPE_SZ).is_ok()
        && control(libc::F_GETFL)
            .is_ok_and(|flags| flags as c_int & libc::O_ACCMODE != libc::O_RDONLY)
}

/// Copies the ranges into a pipe, and returns the number of bytes. As `vmsplice`, the function
/// waits at most until the pipe has room for the first bytes, because the caller may be the thread
/// that empties the pipe.
///
/// # Safety
/// The ranges are the program's.
unsafe fn copy(fd: c_int, ranges: &[libc::iovec], waits: bool) -> Result<usize, i32> {
    let mut done = 0;
    for range in ranges {
        let mut at = 0;
        while at < range.iov_len {
            let rest = libc::iovec {
                iov_base: range.iov_base.wrapping_byte_add(at),
                iov_len: range.iov_len - at,
            };
            // SAFETY: by the caller.
            match unsafe { write_part(fd, &rest, waits && done == 0) } {
                Ok(written) => (at, done) = (at + written, done + written),
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => return Ok(done),
            }
        }
    }
    Ok(done)
}

/// Writes the first bytes of a range into a pipe, at least one. Returns EAGAIN if the pipe has no
/// room and the call must not wait.
///
/// # Safety
/// The range is the program's.
unsafe fn write_part(fd: c_int, range: &libc::iovec, waits: bool) -> Result<usize, i32> {
    let at_position = usize::MAX;
    let arguments =
        [fd as usize, range as *const _ as usize, 1, at_position, at_position, RWF_NOWAIT];
    // SAFETY: by the caller.
    match unsafe { system_call(libc::SYS_pwritev2, arguments) } {
        Err(libc::EAGAIN) if waits => {}
        // FIFOs, and pipes before Linux 6.5.
        Err(libc::EOPNOTSUPP) if waits || has_room(fd, 0)? => {}
        Err(libc::EOPNOTSUPP) => return Err(libc::EAGAIN),
        result => return result,
    }
    // A pipe that is writable has room for a page.
    let bytes = range.iov_len.min(PAGE_BYTES);
    loop {
        // The C library's function is a cancellation point, as `vmsplice` is.
        // SAFETY: by the caller.
        match unsafe { libc::write(fd, range.iov_base, bytes) } {
            -1 => match errno() {
                // `vmsplice` does not regard O_NONBLOCK of the descriptor.
                libc::EAGAIN if waits => drop(has_room(fd, -1)?),
                errno => return Err(errno),
            },
            written => return Ok(written as usize),
        }
    }
}

/// Waits until the pipe has room, at most `timeout_ms`, and returns true if it has.
fn has_room(fd: c_int, timeout_ms: c_int) -> Result<bool, i32> {
    let mut polled = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one valid entry.
    match unsafe { libc::poll(&mut polled, 1, timeout_ms) } {
        -1 => Err(errno()),
        ready => Ok(ready > 0),
    }
}

fn errno() -> i32 {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() }
}

/// setsockopt(2).
///
/// # Safety
/// As for the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: libc::socklen_t,
) -> c_int {
    type SetOption =
        unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, libc::socklen_t) -> c_int;
    static NEXT: Next = Next::new(c"setsockopt");
    if !early::is_relocated() || is_refused(level, name) {
        // SAFETY: by the caller.
        return unsafe { setsockopt_by_number(fd, level, name, value, len) } as c_int;
    }
    // SAFETY: the C library's function of this name has this type; the arguments are the program's.
    NEXT.call(|next| unsafe {
        std::mem::transmute::<*mut c_void, SetOption>(next)(fd, level, name, value, len)
    })
}

/// `syscall(SYS_setsockopt, ...)`.
///
/// # Safety
/// As for the system call.
pub unsafe extern "C" fn setsockopt_by_number(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: libc::socklen_t,
) -> c_long {
    if is_refused(level, name) {
        early::set_errno(libc::ENOPROTOOPT);
        return -1;
    }
    let arguments = [fd as usize, level as usize, name as usize, value as usize, len as usize, 0];
    // SAFETY: the program's own request.
    c_long::from(unsafe { early::kernel(libc::SYS_setsockopt, arguments) })
}

fn is_refused(level: c_int, name: c_int) -> bool {
    (level, name) == (libc::SOL_SOCKET, libc::SO_ZEROCOPY)
        && crate::pager().is_some_and(|pager| pager.moves_pages())
}
