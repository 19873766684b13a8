//! Tools and filters under which a process cannot be paged.

use std::ffi::CStr;

use pager::sys::system_call;

use crate::redirect;

/// Returns the reason why a tool in this process keeps the program from being paged.
pub fn obstacle() -> Option<&'static str> {
    if is_under_valgrind() {
        return Some(
            "valgrind runs it, and does not know the system calls of the pager; run valgrind \
             without granary run",
        );
    }
    has_thread_sanitizer().then_some(
        "it is built with ThreadSanitizer, which must start before all threads; use a build \
         without it",
    )
}

/// Returns true if the process has ThreadSanitizer, which replaces `setjmp`, as no other library
/// does. A program into which it is linked statically exports its replacements only.
fn has_thread_sanitizer() -> bool {
    const NAME: &CStr = c"__sigsetjmp";
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, NAME.as_ptr()) };
    redirect::address_of(NAME).is_some_and(|own| own != found)
}

/// Returns true if valgrind runs this process: it answers this "client request". For the processor,
/// the instructions change nothing.
#[cfg(target_arch = "x86_64")]
fn is_under_valgrind() -> bool {
    const RUNNING_ON_VALGRIND: usize = 0x1001;
    let request = [RUNNING_ON_VALGRIND, 0, 0, 0, 0, 0];
    let answer: usize;
    // SAFETY: rotates a register by 128 bits in total, and exchanges another one with itself.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            inout("rdi") 0usize => _,
            in("rax") request.as_ptr(),
            inout("rdx") 0usize => answer,
            options(nostack),
        );
    }
    answer > 0
}

#[cfg(not(target_arch = "x86_64"))]
fn is_under_valgrind() -> bool {
    false
}

/// Returns true if a seccomp filter of this process refuses sockets, without which a process cannot
/// connect to a memory node. Programs install such a filter and then call exec (man-db).
pub fn filter_refuses_sockets() -> bool {
    const FILTER: usize = 2;
    let arguments = [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0];
    // SAFETY: a query.
    if unsafe { system_call(libc::SYS_prctl, arguments) } != Ok(FILTER) {
        return false;
    }
    let kind = (libc::SOCK_STREAM | libc::SOCK_CLOEXEC) as usize;
    // SAFETY: opens a socket, which is closed below.
    match unsafe { system_call(libc::SYS_socket, [libc::AF_UNIX as usize, kind, 0, 0, 0, 0]) } {
        Ok(fd) => {
            // SAFETY: this function's own descriptor.
            let _ = unsafe { system_call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]) };
            false
        }
        Err(errno) => [libc::ENOSYS, libc::EPERM, libc::EACCES].contains(&errno),
    }
}
