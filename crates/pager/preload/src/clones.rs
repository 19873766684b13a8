//! Forks past the function `fork` of libc: `clone`, `_Fork`, and the system calls by number
//! (`syscall`).
//!
//! A child that shares no memory with its parent is made as by `fork`: the pager's steps run before
//! and after the system call. The fork handlers of the program do not run, as without the pager.
//! In the child, the pager's thread is started before the program goes on.
//!
//! Children with flags that the steps cannot follow are made without them ([`crate::unseen`]).

use std::ffi::{c_int, c_long, c_void};

use pager::sys::system_call;

use crate::direct::Next;
use crate::{early, forks};

/// With CLONE_FILES, the child would close descriptors of its parent. With CLONE_VFORK, the parent
/// would hold locks of the pager until the child ends. With CLONE_SETTLS, the child has no
/// thread-local storage of libc.
const UNFOLLOWED: u64 =
    (libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_VFORK | libc::CLONE_SETTLS) as u64;

/// `struct clone_args`, as of its first version.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
}

/// Bytes of the first version of `struct clone_args`.
pub const ARGUMENTS_BYTES: usize = size_of::<Arguments>();
/// Offset of the child's stack in `struct clone_args`.
pub const STACK_OFFSET: usize = std::mem::offset_of!(Arguments, stack);

/// Makes a child by `call`, which returns its id, 0 in the child, or an error number. The kernel
/// writes to `child_tid` in the child before the pager's steps there.
fn fork_by(
    flags: u64,
    child_tid: *mut c_int,
    call: impl FnOnce() -> Result<usize, i32>,
) -> Result<usize, i32> {
    if flags & UNFOLLOWED != 0 || crate::pager().is_none() {
        return call();
    }
    // SAFETY: the steps of one fork, in their order.
    unsafe {
        forks::before();
        if flags & libc::CLONE_CHILD_SETTID as u64 != 0 && !child_tid.is_null() {
            // The child gets resident pages only. Until its first step, a missing one reads zeros.
            child_tid.read_volatile();
        }
        let result = call();
        match result {
            Ok(0) => forks::after_in_child(),
            Ok(_) => forks::after_in_parent(),
            Err(error) => {
                early::set_errno(error);
                forks::after_in_parent();
            }
        }
        result
    }
}

/// Returns a result in the C library's form.
fn answer(result: Result<usize, i32>) -> c_long {
    match result {
        Ok(id) => id as c_long,
        Err(error) => {
            early::set_errno(error);
            -1
        }
    }
}

/// The system call `fork`, by number.
///
/// # Safety
/// As for the system call.
pub unsafe extern "C" fn fork_by_number() -> c_long {
    // SAFETY: by the caller.
    let call = || unsafe { system_call(libc::SYS_fork, [0; 6]) };
    answer(fork_by(0, std::ptr::null_mut(), call))
}

/// The system call `clone`, by number, for a child that continues on its copy of this stack.
///
/// # Safety
/// As for the system call.
pub unsafe extern "C" fn clone_by_number(
    flags: usize,
    stack: usize,
    parent_tid: usize,
    child_tid: *mut c_int,
    tls: usize,
) -> c_long {
    let arguments = [flags, stack, parent_tid, child_tid as usize, tls, 0];
    // SAFETY: by the caller.
    let call = || unsafe { system_call(libc::SYS_clone, arguments) };
    answer(fork_by(flags as u64, child_tid, call))
}

/// The system call `clone3`, by number, for a child that continues on its copy of this stack.
///
/// # Safety
/// As for the system call; the arguments are valid for a read of their first version.
pub unsafe extern "C" fn clone3_by_number(arguments: *const c_void, bytes: usize) -> c_long {
    // SAFETY: by the caller.
    let first = unsafe { arguments.cast::<Arguments>().read_unaligned() };
    let child_tid = first.child_tid as *mut c_int;
    // SAFETY: by the caller.
    let call = || unsafe { system_call(libc::SYS_clone3, [arguments as usize, bytes, 0, 0, 0, 0]) };
    answer(fork_by(first.flags, child_tid, call))
}

type Start = extern "C" fn(*mut c_void) -> c_int;
type Clone = unsafe extern "C" fn(
    Option<Start>,
    *mut c_void,
    c_int,
    *mut c_void,
    usize,
    usize,
    usize,
) -> c_int;

static CLONE: Next = Next::new(c"clone");

/// Looks the C library's function up. Otherwise the first call would do so, perhaps in a thread of
/// the pager, which must not wait for a lock of the dynamic linker.
pub fn prepare() {
    CLONE.prepare();
}

/// clone(2). The last three parameters are variadic in the C prototype. Those that the flags do not
/// name are passed on unread.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    start: Option<Start>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: usize,
    tls: usize,
    child_tid: usize,
) -> c_int {
    if !early::is_relocated() {
        return -1;
    }
    let followed = start
        .filter(|_| !stack.is_null() && flags as u64 & UNFOLLOWED == 0 && crate::pager().is_some());
    let Some(start) = followed else {
        // SAFETY: the C library's function of this name has this type; the arguments are the
        // program's.
        return CLONE.call(|next| unsafe {
            std::mem::transmute::<*mut c_void, Clone>(next)(
                start, stack, flags, argument, parent_tid, tls, child_tid,
            )
        });
    };
    // The child changes to its stack after the pager's steps.
    // SAFETY: by the caller.
    let made = unsafe {
        clone_by_number(flags as u32 as usize, 0, parent_tid, child_tid as *mut c_int, tls)
    };
    if made == 0 {
        // SAFETY: by the caller.
        unsafe { run_on(stack, start, argument) };
    }
    made as c_int
}

/// Runs a function on a stack, and ends the process with its result. Not only the thread, as the C
/// library's function does: the process may have a thread of the pager.
///
/// # Safety
/// `stack` is the end of a stack.
#[unsafe(naked)]
unsafe extern "C" fn run_on(stack: *mut c_void, start: Start, argument: *mut c_void) -> ! {
    core::arch::naked_asm!(
        "and rdi, -16",
        "mov rsp, rdi",
        "xor ebp, ebp",
        "mov rdi, rdx",
        "call rsi",
        "mov edi, eax",
        "mov eax, {exit}",
        "syscall",
        "ud2",
        exit = const libc::SYS_exit_group,
    )
}

/// `_Fork` of glibc from 2.34 on, which calls no fork handlers.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> c_int {
    static NEXT: Next = Next::new(c"_Fork");
    type Fork = unsafe extern "C" fn() -> c_int;
    if !early::is_relocated() {
        return -1;
    }
    let call = || {
        // SAFETY: the C library's function of this name has this type.
        match NEXT.call(|next| unsafe { std::mem::transmute::<*mut c_void, Fork>(next)() }) {
            // SAFETY: the calling thread's own variable.
            ..0 => Err(unsafe { *libc::__errno_location() }),
            id => Ok(id as usize),
        }
    };
    answer(fork_by(0, std::ptr::null_mut(), call)) as c_int
}
