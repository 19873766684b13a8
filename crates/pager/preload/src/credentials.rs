//! Functions that change only the calling thread's credentials: the pager's threads repeat them
//! ([`pager::credentials`]).
//!
//! glibc makes all threads repeat `setuid` and its kin, but not the process that serves forked
//! children: it follows after them. By number (`syscall`), they change one thread only, and are
//! repeated too.

use std::ffi::{c_int, c_long, c_void};

use pager::credentials;
use pager::sys::system_call;

use crate::direct::{Next, next_definitions};
use crate::reentrancy::{self, ReentrancyGuard};
use crate::{early, redirect};

/// Bytes of `struct __user_cap_header_struct`, and of `struct __user_cap_data_struct` in the
/// versions of the kernel's interface from 2 on, which have two such structures.
const HEADER_BYTES: usize = 8;
const DATA_BYTES: usize = 12;
const VERSION_1: u32 = 0x1998_0330;
/// Maximum number of supplementary groups (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65536;

/// capset(2).
///
/// # Safety
/// As for the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capset(header: *const c_void, data: *const c_void) -> c_int {
    // SAFETY: by the caller.
    unsafe { changed(libc::SYS_capset, [header as usize, data as usize, 0, 0, 0, 0]) as c_int }
}

/// prctl(2).
///
/// # Safety
/// As for the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    // SAFETY: by the caller.
    unsafe { changed(libc::SYS_prctl, [option as usize, a, b, c, d, 0]) as c_int }
}

/// A system call by number that may change the calling thread's credentials; `number` is in the
/// place of a sixth argument, which none of these calls has.
///
/// # Safety
/// As for the system call.
#[cfg(target_arch = "x86_64")]
pub unsafe extern "C" fn by_number(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    number: c_long,
) -> c_long {
    // SAFETY: by the caller.
    unsafe { changed(number, [a, b, c, d, e, 0]) }
}

/// Makes the call, and then makes the pager's threads repeat it if it has changed credentials.
///
/// # Safety
/// As for the system call.
unsafe fn changed(number: c_long, arguments: [usize; 6]) -> c_long {
    // SAFETY: by the caller.
    let result = match unsafe { system_call(number, arguments) } {
        Ok(result) => result as c_long,
        Err(errno) => {
            early::set_errno(errno);
            return -1;
        }
    };
    if changes_credentials(number, arguments) && early::is_relocated() && crate::pager().is_some() {
        // SAFETY: the kernel has just accepted the arguments.
        unsafe { repeat(number, arguments) };
    }
    result
}

fn changes_credentials(number: c_long, arguments: [usize; 6]) -> bool {
    const OPTIONS: [c_int; 4] = [
        libc::PR_SET_KEEPCAPS,
        libc::PR_SET_SECUREBITS,
        libc::PR_CAPBSET_DROP,
        libc::PR_CAP_AMBIENT,
    ];
    number != libc::SYS_prctl || OPTIONS.contains(&(arguments[0] as c_int))
}

/// Makes the pager's threads repeat a call.
///
/// # Safety
/// The call's pointers are valid.
unsafe fn repeat(number: c_long, arguments: [usize; 6]) {
    if reentrancy::is_reentrant() {
        return;
    }
    let _guard = ReentrancyGuard::new();
    // The memory that the arguments name may be paged, and the pager's threads must not wait for a
    // page of their own program. This copy is not.
    let mut copied = Vec::<u8>::new();
    let mut copy = |address: usize, bytes: usize| {
        // SAFETY: by the caller.
        let source = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
        copied.extend_from_slice(source);
    };
    let mut own = arguments;
    match number {
        libc::SYS_capset => {
            // SAFETY: by the caller.
            let version = unsafe { (arguments[0] as *const u32).read_unaligned() };
            copy(arguments[0], HEADER_BYTES);
            copy(arguments[1], if version == VERSION_1 { 1 } else { 2 } * DATA_BYTES);
            // Process 0 is the calling thread; the program may have named its own thread.
            copied[4..HEADER_BYTES].fill(0);
            own[0] = copied.as_ptr() as usize;
            own[1] = own[0] + HEADER_BYTES;
        }
        libc::SYS_setgroups => {
            let count = arguments[0].min(GROUPS_MAX);
            if count > 0 {
                copy(arguments[1], count * size_of::<libc::gid_t>());
            }
            own[1] = copied.as_ptr() as usize;
        }
        _ => {}
    }
    // SAFETY: the other calls have no pointers; `copied` lives until all threads have answered.
    unsafe { credentials::follow(number, own) };
}

/// Functions that glibc makes all threads repeat.
macro_rules! for_all_threads {
    ($($name:ident, $symbol:literal, ($($argument:ident: $type:ty),*);)*) => {
        next_definitions! { $($name = $symbol;)* }

        $(
            /// As the C library's function. Then the process that serves forked children follows.
            ///
            /// # Safety
            /// As for the C library's function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                type Change = unsafe extern "C" fn($($type),*) -> c_int;
                if !early::is_relocated() {
                    return -1;
                }
                // SAFETY: the C library's function of this name has this type; the arguments are
                // the program's.
                let result = next::$name.call(|next| unsafe {
                    std::mem::transmute::<*mut c_void, Change>(next)($($argument),*)
                });
                if result == 0 && crate::pager().is_some() && !reentrancy::is_reentrant() {
                    let _guard = ReentrancyGuard::new();
                    credentials::server_follows();
                }
                result
            }
        )*
    };
}

for_all_threads! {
    setuid, c"setuid", (id: libc::uid_t);
    setgid, c"setgid", (id: libc::gid_t);
    seteuid, c"seteuid", (id: libc::uid_t);
    setegid, c"setegid", (id: libc::gid_t);
    setreuid, c"setreuid", (real: libc::uid_t, effective: libc::uid_t);
    setregid, c"setregid", (real: libc::gid_t, effective: libc::gid_t);
    setresuid, c"setresuid", (real: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t);
    setresgid, c"setresgid", (real: libc::gid_t, effective: libc::gid_t, saved: libc::gid_t);
    setgroups, c"setgroups", (count: usize, groups: *const libc::gid_t);
    initgroups, c"initgroups", (user: *const libc::c_char, group: libc::gid_t);
}

type Start = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut c_void, *const c_void, Start, *mut c_void) -> c_int;

/// Starts a thread. Threads that this library's own code starts are entered into the pager's list.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    static NEXT: Next = Next::new(c"pthread_create");
    // SAFETY: the C library's function of this name has this type.
    let create = |next: *mut c_void| unsafe { std::mem::transmute::<*mut c_void, Create>(next) };
    if !reentrancy::is_reentrant() {
        // SAFETY: by the caller.
        return NEXT.call(|next| unsafe { create(next)(thread, attributes, start, argument) });
    }
    let run = Box::into_raw(Box::new((start, argument)));
    credentials::thread_starts();
    // `dlsym` would wait for a program's thread that faults within `dlopen`.
    let error = match redirect::c_library_function(c"pthread_create") {
        // SAFETY: by the caller; the new thread owns `run`.
        Some(own) => unsafe { create(own)(thread, attributes, run_own, run.cast()) },
        // SAFETY: as above. Before glibc 2.34, another library has the function.
        None => NEXT.call(|next| unsafe { create(next)(thread, attributes, run_own, run.cast()) }),
    };
    if error != 0 {
        credentials::thread_failed();
        // SAFETY: there is no thread that owns it.
        drop(unsafe { Box::from_raw(run) });
    }
    error
}

extern "C" fn run_own(run: *mut c_void) -> *mut c_void {
    let guard = ReentrancyGuard::new();
    // SAFETY: the pointer that `pthread_create` passed, used once.
    let (start, argument) = *unsafe { Box::from_raw(run.cast::<(Start, *mut c_void)>()) };
    credentials::thread_started();
    drop(guard);
    let result = start(argument);
    credentials::thread_ends();
    result
}
