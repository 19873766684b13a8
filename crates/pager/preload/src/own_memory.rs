//! The `read` and `write` families on `/proc/self/mem`, by which crash reporters, profilers and
//! unwinders access the memory of their own process.
//!
//! The kernel allows no wait for a page in an access by this file. Therefore userfaultfd refuses
//! the fault, and the call fails with EIO at the first paged page that is not resident. The library
//! then brings this page in by madvise(2), which may wait, and repeats the call from there.
//!
//! The calls are passed on to the C library's functions, which are cancellation points of threads.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use pager::sys::{PAGE_BYTES, system_call};

use crate::direct::next_definitions;
use crate::{early, reentrancy};

/// Linux 5.14; not in all versions of the `libc` crate for all C libraries.
const MADV_POPULATE_READ: usize = 22;
const MADV_POPULATE_WRITE: usize = 23;
/// Number of times in a row that a page is brought in for one call. Each time, the page may be
/// evicted again before the call is repeated.
const ATTEMPTS: u32 = 64;
/// `/proc/PID/task/TID/mem` with two numbers of 10 digits, and more than that.
const PATH_BYTES: usize = 64;

/// True once the program has opened a file that may be `/proc/self/mem`.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Notes that the program has opened a file. The path is the program's, and valid.
pub fn note_opened(fd: c_int, path: *const c_char) {
    if fd < 0 || reentrancy::is_reentrant() {
        return;
    }
    // SAFETY: the kernel has read this path without an error.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if path.strip_suffix(b"mem").is_some_and(|parent| parent.last().is_none_or(|&at| at == b'/')) {
        IS_USED.store(true, Ordering::Relaxed);
    }
}

/// Returns true if the descriptor is the memory of this process.
fn is_own_memory(fd: c_int) -> bool {
    let (link, mut target) = (format!("/proc/self/fd/{fd}\0"), [0u8; PATH_BYTES]);
    let buffer = target.as_mut_ptr();
    let arguments = [link.as_ptr() as usize, buffer as usize, PATH_BYTES, 0, 0, 0];
    // SAFETY: the path ends with a zero byte; the buffer is valid for its length.
    let len = unsafe { system_call(libc::SYS_readlink, arguments) }.unwrap_or(0);
    let own = format!("/proc/{}/", std::process::id());
    let rest = target[..len].strip_prefix(own.as_bytes());
    let is_thread = |rest: &[u8]| rest.starts_with(b"task/") && rest.ends_with(b"/mem");
    rest.is_some_and(|rest| rest == b"mem" || is_thread(rest))
}

/// A call of the program on a descriptor that may be `/proc/self/mem`.
struct Access {
    fd: c_int,
    buffer: *mut c_void,
    len: usize,
    /// Address of the first byte; `None` if it is the position of the file.
    offset: Option<i64>,
    writes: bool,
}

impl Access {
    /// Returns the result of the program's call, of which `result` is the kernel's. An access of
    /// `/proc/self/mem` that ended at a page that is not resident is continued.
    fn complete(self, result: isize) -> isize {
        let is_complete = result >= 0 && result as usize >= self.len;
        if is_complete || !IS_USED.load(Ordering::Relaxed) || reentrancy::is_reentrant() {
            return result;
        }
        // SAFETY: the calling thread's own variable.
        let error = unsafe { *libc::__errno_location() };
        if result < 0 && error != libc::EIO {
            return result;
        }
        let _guard = reentrancy::ReentrancyGuard::new();
        let mut done = result.max(0) as usize;
        let mut attempts = 0;
        let is_own = is_own_memory(self.fd);
        while is_own && done < self.len && attempts < ATTEMPTS && self.bring_in(done) {
            match self.repeat(done) {
                Ok(more) if more > 0 => (done, attempts) = (done + more, 0),
                _ => attempts += 1,
            }
        }
        early::set_errno(error);
        if done > 0 { done as isize } else { result }
    }

    /// Returns the address of the byte after the first `done` ones.
    fn address(&self, done: usize) -> Option<usize> {
        if let Some(offset) = self.offset {
            return Some((offset as usize).wrapping_add(done));
        }
        let arguments = [self.fd as usize, 0, libc::SEEK_CUR as usize, 0, 0, 0];
        // SAFETY: reads the position of the program's file.
        unsafe { system_call(libc::SYS_lseek, arguments) }.ok()
    }

    /// Makes the page of the byte after the first `done` ones resident. Returns false if the page
    /// is not paged, or if the program has no access to the page.
    fn bring_in(&self, done: usize) -> bool {
        let Some(page) = self.address(done).map(|address| address / PAGE_BYTES * PAGE_BYTES) else {
            return false;
        };
        if !crate::paged_memory().is_some_and(|pager| pager.region().overlaps(page, 1)) {
            return false;
        }
        let advice = if self.writes { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
        // SAFETY: brings a page in, and changes nothing.
        unsafe { system_call(libc::SYS_madvise, [page, PAGE_BYTES, advice, 0, 0, 0]) }.is_ok()
    }

    /// Repeats the call without its first `done` bytes.
    fn repeat(&self, done: usize) -> Result<usize, i32> {
        let (number, offset) = match (self.offset, self.writes) {
            (None, false) => (libc::SYS_read, 0),
            (None, true) => (libc::SYS_write, 0),
            (Some(offset), false) => (libc::SYS_pread64, offset as usize + done),
            (Some(offset), true) => (libc::SYS_pwrite64, offset as usize + done),
        };
        let buffer = self.buffer.wrapping_byte_add(done) as usize;
        // SAFETY: the rest of the program's own request.
        unsafe { system_call(number, [self.fd as usize, buffer, self.len - done, offset, 0, 0]) }
    }
}

/// Defines functions with the parameters descriptor, buffer and length, then those in parentheses.
/// Then follow whether the function writes, the offset, and the system call.
macro_rules! access {
    ($($name:ident, $symbol:literal, ($($more:ident: $type:ty),*), $writes:literal, $offset:expr,
        $number:expr;)*) => {
        next_definitions! { $($name = $symbol;)* }

        $(
            /// As the C library's function, also for pages that are not resident.
            ///
            /// # Safety
            /// As for the C library's function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                fd: c_int,
                buffer: *mut c_void,
                len: usize,
                $($more: $type),*
            ) -> isize {
                type Access_ = unsafe extern "C" fn(c_int, *mut c_void, usize, $($type),*) -> isize;
                let offset: Option<i64> = $offset;
                if !early::is_relocated() {
                    let at = offset.map_or(0, |offset| offset as usize);
                    let arguments = [fd as usize, buffer as usize, len, at, 0, 0];
                    // SAFETY: the program's own request.
                    return unsafe { early::kernel($number, arguments) } as isize;
                }
                // SAFETY: the C library's function of this name has this type; the arguments are
                // the program's.
                let result = next::$name.call(|next| unsafe {
                    std::mem::transmute::<*mut c_void, Access_>(next)(fd, buffer, len, $($more),*)
                });
                Access { fd, buffer, len, offset, writes: $writes }.complete(result)
            }
        )*
    };
}

access! {
    read, c"read", (), false, None, libc::SYS_read;
    write, c"write", (), true, None, libc::SYS_write;
    pread, c"pread", (at: i64), false, Some(at), libc::SYS_pread64;
    pread64, c"pread64", (at: i64), false, Some(at), libc::SYS_pread64;
    pwrite, c"pwrite", (at: i64), true, Some(at), libc::SYS_pwrite64;
    pwrite64, c"pwrite64", (at: i64), true, Some(at), libc::SYS_pwrite64;
    // `_FORTIFY_SOURCE`: the last parameter is the size of the buffer.
    __read_chk, c"__read_chk", (room: usize), false, None, libc::SYS_read;
    __pread_chk, c"__pread_chk", (at: i64, room: usize), false, Some(at), libc::SYS_pread64;
    __pread64_chk, c"__pread64_chk", (at: i64, room: usize), false, Some(at), libc::SYS_pread64;
}
