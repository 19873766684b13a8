//! The reason in place of a bare SIGSEGV, where the kernel reports no forks.
//!
//! A child that was made by a system call past this library ([`crate::unseen`]) finds no memory at
//! the addresses of paged memory. So a handler of SIGSEGV names the reason. It is in place of the
//! default action only. A program that asks for the action sees the default action, and a SIGSEGV
//! for another reason has the default effect.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use pager::sys::{Action, system_call};

use crate::direct::Next;
use crate::{early, unseen};

type Change = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;

/// True once the handler is in place of the default action.
static HANDLES: AtomicBool = AtomicBool::new(false);

static SIGACTION: Next = Next::new(c"sigaction");
static SIGNAL: Next = Next::new(c"signal");

/// Looks the C library's functions up. Otherwise the first call would do so, perhaps in a signal
/// handler, where `dlsym` is not allowed.
pub fn prepare() {
    SIGACTION.prepare();
    SIGNAL.prepare();
}

/// Installs the handler if the program starts with the default action.
pub fn install() {
    if Action::of(libc::SIGSEGV).is_ok_and(|action| action.handler == libc::SIG_DFL) {
        HANDLES.store(true, Ordering::Release);
        // SAFETY: the handler is in place of the default action, as which it acts.
        unsafe { sigaction(libc::SIGSEGV, &default_action(), std::ptr::null_mut()) };
    }
}

fn default_action() -> libc::sigaction {
    // SAFETY: all zeros is a value of this type: SIG_DFL, no flags, no signals.
    unsafe { std::mem::zeroed() }
}

fn own_handler() -> libc::sighandler_t {
    on_fault as *const () as libc::sighandler_t
}

/// sigaction(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    if !early::is_relocated() {
        return -1;
    }
    let is_ours = signal == libc::SIGSEGV && HANDLES.load(Ordering::Acquire);
    let own = libc::sigaction {
        sa_sigaction: own_handler(),
        sa_flags: libc::SA_SIGINFO | libc::SA_ONSTACK,
        ..default_action()
    };
    // SAFETY: the program's pointers, as in C.
    unsafe {
        let is_default = |new: &libc::sigaction| new.sa_sigaction == libc::SIG_DFL;
        let new = if is_ours && new.as_ref().is_some_and(is_default) { &own } else { new };
        let result = SIGACTION
            .call(|next| std::mem::transmute::<*mut c_void, Change>(next)(signal, new, old));
        if result == 0
            && let Some(old) = old.as_mut()
            && old.sa_sigaction == own_handler()
        {
            *old = default_action();
        }
        result
    }
}

/// signal(2), whose actions have the meaning of BSD's.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    type Set = unsafe extern "C" fn(c_int, libc::sighandler_t) -> libc::sighandler_t;
    if !early::is_relocated() {
        return libc::SIG_ERR;
    }
    // SAFETY: the C library's function of this name has this type; `old` is a live value.
    unsafe {
        if signal == libc::SIGSEGV && handler == libc::SIG_DFL {
            let mut old = default_action();
            return match sigaction(signal, &default_action(), &mut old) {
                0 => old.sa_sigaction,
                _ => libc::SIG_ERR,
            };
        }
        let old =
            SIGNAL.call(|next| std::mem::transmute::<*mut c_void, Set>(next)(signal, handler));
        if old == own_handler() { libc::SIG_DFL } else { old }
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a valid pointer for the duration of the handler.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let is_fault = code > 0;
    if is_fault && unseen::is_inherited(address, 1) {
        unseen::refuse("needs memory");
    }
    // SAFETY: the default action.
    let _ = unsafe { Action::default().set(signal) };
    // A fault happens again at the return from this handler. A signal that was sent is sent again.
    if !is_fault {
        // SAFETY: sends the signal to the calling thread.
        unsafe {
            let thread = system_call(libc::SYS_gettid, [0; 6]).unwrap_or(0);
            let arguments = [std::process::id() as usize, thread, signal as usize, 0, 0, 0];
            let _ = system_call(libc::SYS_tgkill, arguments);
        }
    }
}
