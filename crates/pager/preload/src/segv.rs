//! The reason in place of a bare SIGSEGV, where the kernel reports no forks.
//!
//! A child that was made by a system call past this library ([`crate::unseen`]) finds no memory at
//! the addresses of paged memory. So a handler of SIGSEGV names the reason. It is in place of the
//! default action, and before the program's own handler. A program that asks for the action sees
//! its own, and a SIGSEGV for another reason has the program's effect.
//!
//! Actions that the program sets by system calls of its own take the handler's place.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pager::sys::{Action, system_call};

use crate::direct::Next;
use crate::{early, unseen};

type Change = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;

/// True once the handler is in place of the default action.
static HANDLES: AtomicBool = AtomicBool::new(false);

/// The last actions of the program.
const PLACES_MAX: usize = 64;
static PLACES: [Place; PLACES_MAX] =
    // SAFETY: all zeros is a value of this type, the default action.
    [const { Place(UnsafeCell::new(unsafe { std::mem::zeroed() })) }; PLACES_MAX];
/// Number of the last one in `PLACES`.
static LAST: AtomicUsize = AtomicUsize::new(0);

/// An action of the program. Each change takes the next place, so that a handler which runs
/// meanwhile reads a whole action.
struct Place(UnsafeCell<libc::sigaction>);

// SAFETY: a place is written again only after as many further changes as there are places.
unsafe impl Sync for Place {}

/// Returns the program's action.
fn programs() -> libc::sigaction {
    // SAFETY: as explained at `Place`.
    unsafe { *PLACES[LAST.load(Ordering::Acquire) % PLACES_MAX].0.get() }
}

fn set_programs(action: libc::sigaction) {
    let next = LAST.load(Ordering::Acquire).wrapping_add(1);
    // SAFETY: as explained at `Place`. Of two changes at a time, one has an effect, as in C.
    unsafe { *PLACES[next % PLACES_MAX].0.get() = action };
    LAST.store(next, Ordering::Release);
}

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
    // SAFETY: the program's pointer, as in C. Both pointers may be the same.
    let asked = unsafe { new.as_ref() }.copied();
    let is_ours = signal == libc::SIGSEGV && HANDLES.load(Ordering::Acquire);
    let (mut before, mut ours) = (None, None);
    if is_ours {
        let own = programs();
        before = Some(own);
        if let Some(action) = asked.filter(|action| action.sa_sigaction != libc::SIG_IGN) {
            let flags = match action.sa_sigaction {
                libc::SIG_DFL => libc::SA_ONSTACK,
                _ => action.sa_flags,
            };
            let handler = own_handler();
            let flags = flags | libc::SA_SIGINFO;
            ours = Some(libc::sigaction { sa_sigaction: handler, sa_flags: flags, ..action });
            set_programs(action);
        }
    }
    let new = ours.as_ref().map_or(new, std::ptr::from_ref);
    // SAFETY: the program's pointers, as in C.
    let (result, old) = unsafe {
        let call = |next| std::mem::transmute::<*mut c_void, Change>(next)(signal, new, old);
        (SIGACTION.call(call), old.as_mut())
    };
    if let Some(before) = before {
        match old {
            _ if result != 0 => set_programs(before),
            Some(old) if old.sa_sigaction == own_handler() => *old = before,
            _ => {}
        }
    }
    result
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
    if signal == libc::SIGSEGV && HANDLES.load(Ordering::Acquire) {
        let mut new = libc::sigaction {
            sa_sigaction: handler,
            sa_flags: libc::SA_RESTART,
            ..default_action()
        };
        let mut old = default_action();
        // SAFETY: live values; the handler is the program's.
        return unsafe {
            libc::sigaddset(&mut new.sa_mask, signal);
            match sigaction(signal, &new, &mut old) {
                0 => old.sa_sigaction,
                _ => libc::SIG_ERR,
            }
        };
    }
    // SAFETY: the C library's function of this name has this type.
    SIGNAL.call(|next| unsafe { std::mem::transmute::<*mut c_void, Set>(next)(signal, handler) })
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    type WithInfo = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
    type Plain = extern "C" fn(c_int);
    // SAFETY: the kernel passes a valid pointer for the duration of the handler.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let is_fault = code > 0;
    if is_fault && unseen::is_inherited(address, 1) {
        unseen::refuse("needs memory");
    }
    let action = programs();
    if action.sa_sigaction != libc::SIG_DFL {
        // SAFETY: the program's handler, whose type the flag tells.
        unsafe {
            match action.sa_flags & libc::SA_SIGINFO {
                0 => std::mem::transmute::<usize, Plain>(action.sa_sigaction)(signal),
                _ => {
                    let handler = std::mem::transmute::<usize, WithInfo>(action.sa_sigaction);
                    handler(signal, info, context);
                }
            }
        }
        return;
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
