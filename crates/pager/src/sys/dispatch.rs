//! Syscall User Dispatch: redirects the system calls of a thread to a function
//! (`Documentation/admin-guide/syscall-user-dispatch.rst`; Linux 5.11, x86-64).
//!
//! The kernel refuses each system call of the thread with SIGSYS, except calls made by one range of
//! code that was registered: [`bare`], and the return from the signal handler. The signal handler
//! calls the function and stores its result as the system call's. A forked child has no
//! redirection.

/// Handles a redirected system call: gets its number and arguments, and returns a result in the
/// kernel's form.
pub type Serve = fn(i64, [u64; 6]) -> i64;

#[cfg(target_arch = "x86_64")]
pub use self::x86_64::{Dispatch, bare};

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::ffi::c_void;
    use std::io;
    use std::sync::atomic::{AtomicPtr, Ordering};

    use super::Serve;
    use crate::sys::{Action, SIGNAL_SET_BYTES};

    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    const OFF: usize = 0;
    const ON: usize = 1;
    /// `si_code` of a SIGSYS by Syscall User Dispatch.
    const SYS_USER_DISPATCH: i32 = 2;
    const SA_RESTORER: u64 = 0x0400_0000;
    const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);

    // `granary_bare_syscall` is like `syscall(3)`, but takes the arguments by pointer and leaves
    // `errno` alone. `granary_bare_restorer` returns from a signal handler. The kernel compares the
    // address after the instruction with the registered range.
    std::arch::global_asm!(
        ".pushsection .text.granary_bare,\"ax\",@progbits",
        ".balign 16",
        ".hidden granary_bare_syscall",
        ".globl granary_bare_syscall",
        "granary_bare_syscall:",
        "mov rax, rdi",
        "mov r11, rsi",
        "mov rdi, [r11]",
        "mov rsi, [r11 + 8]",
        "mov rdx, [r11 + 16]",
        "mov r10, [r11 + 24]",
        "mov r8, [r11 + 32]",
        "mov r9, [r11 + 40]",
        "syscall",
        "ret",
        ".hidden granary_bare_restorer",
        ".globl granary_bare_restorer",
        "granary_bare_restorer:",
        "mov eax, 15",
        "syscall",
        "ud2",
        ".hidden granary_bare_end",
        ".globl granary_bare_end",
        "granary_bare_end:",
        ".popsection",
    );

    unsafe extern "C" {
        fn granary_bare_syscall(number: i64, arguments: *const u64) -> i64;
        fn granary_bare_restorer();
        fn granary_bare_end();
    }

    /// Makes a system call that is not redirected. Returns the kernel's result, with errors as
    /// negative numbers.
    pub fn bare(number: i64, arguments: [u64; 6]) -> i64 {
        // SAFETY: the caller is responsible for memory that the arguments name. It is either the
        // program's code, whose calls are passed on, or the pager's.
        unsafe { granary_bare_syscall(number, arguments.as_ptr()) }
    }

    fn call(number: i64, arguments: [usize; 5]) -> io::Result<()> {
        let [a, b, c, d, e] = arguments.map(|argument| argument as u64);
        match bare(number, [a, b, c, d, e, 0]) {
            error @ ..0 => Err(io::Error::from_raw_os_error(-error as i32)),
            _ => Ok(()),
        }
    }

    fn set_action(new: &Action, old: Option<&mut Action>) -> io::Result<()> {
        let old = old.map_or(std::ptr::null_mut(), |old| old as *mut Action);
        let arguments = [
            libc::SIGSYS as usize,
            new as *const Action as usize,
            old as usize,
            SIGNAL_SET_BYTES,
            0,
        ];
        call(libc::SYS_rt_sigaction, arguments)
    }

    /// Function that gets the redirected system calls. Only one thread of a process is redirected
    /// at a time.
    static SERVE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    /// The program's handler for SIGSYS of other kinds.
    static PROGRAMS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

    /// Redirects the calling thread's system calls while it lives. It is dropped by the same
    /// thread, or by that thread's copy in a forked child.
    pub struct Dispatch {
        /// The program's SIGSYS action, restored on drop.
        action: Action,
        mask: u64,
    }

    impl Dispatch {
        /// Redirects the calling thread's system calls to `serve`.
        ///
        /// # Errors
        /// `EINVAL` if the kernel has no Syscall User Dispatch.
        pub fn start(serve: Serve) -> io::Result<Self> {
            let mut dispatch = Self { action: Action::default(), mask: 0 };
            SERVE.store(serve as *mut c_void, Ordering::Release);
            let ours = Action {
                handler: on_signal as *const () as usize,
                flags: libc::SA_SIGINFO as u64 | SA_RESTORER,
                restorer: granary_bare_restorer as *const () as usize,
                mask: !0,
            };
            set_action(&ours, Some(&mut dispatch.action))?;
            PROGRAMS.store(dispatch.action.handler as *mut c_void, Ordering::Release);
            dispatch.set_mask()?;
            let start = granary_bare_syscall as *const () as usize;
            let len = granary_bare_end as *const () as usize - start;
            // Without a selector, all calls outside of the registered range are redirected.
            let arguments = [PR_SET_SYSCALL_USER_DISPATCH as usize, ON, start, len, 0];
            if let Err(error) = call(libc::SYS_prctl, arguments) {
                dispatch.restore();
                std::mem::forget(dispatch);
                return Err(error);
            }
            Ok(dispatch)
        }

        /// Unblocks SIGSYS: a blocked SIGSYS would end the process at the next system call.
        fn set_mask(&mut self) -> io::Result<()> {
            let sys = SIGSYS_BIT;
            let (new, old) = (&raw const sys as usize, &raw mut self.mask as usize);
            let how = libc::SIG_UNBLOCK as usize;
            call(libc::SYS_rt_sigprocmask, [how, new, old, SIGNAL_SET_BYTES, 0])
        }

        fn restore(&self) {
            let how = libc::SIG_SETMASK as usize;
            let mask = &raw const self.mask as usize;
            let _ = call(libc::SYS_rt_sigprocmask, [how, mask, 0, SIGNAL_SET_BYTES, 0]);
            let _ = set_action(&self.action, None);
        }
    }

    impl Drop for Dispatch {
        fn drop(&mut self) {
            let arguments = [PR_SET_SYSCALL_USER_DISPATCH as usize, OFF, 0, 0, 0];
            let _ = call(libc::SYS_prctl, arguments);
            self.restore();
        }
    }

    type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut c_void);

    extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the kernel passes valid pointers for the duration of the handler.
        let (code, context) =
            unsafe { ((*info).si_code, &mut *context.cast::<libc::ucontext_t>()) };
        if code != SYS_USER_DISPATCH {
            return programs(signal, info, &raw mut *context);
        }
        let registers = &mut context.uc_mcontext.gregs;
        let value_of = |register: i32| registers[register as usize] as u64;
        let number = value_of(libc::REG_RAX) as i64;
        let arguments = [
            libc::REG_RDI,
            libc::REG_RSI,
            libc::REG_RDX,
            libc::REG_R10,
            libc::REG_R8,
            libc::REG_R9,
        ]
        .map(value_of);
        match number {
            libc::SYS_rt_sigreturn => {
                // Return from a handler of libc (setuid in another thread). The signal frame is
                // unchanged, so it is enough to continue in the registered restorer.
                let restorer = granary_bare_restorer as *const () as usize;
                registers[libc::REG_RIP as usize] = restorer as i64;
            }
            libc::SYS_rt_sigprocmask => {
                let mask = (&raw mut context.uc_sigmask).cast::<u64>();
                // SAFETY: the mask that takes effect when the handler returns; the caller of the
                // system call owns the sets.
                let result = unsafe { change_mask(mask, arguments) };
                context.uc_mcontext.gregs[libc::REG_RAX as usize] = result;
            }
            _ => {
                // SAFETY: `start` stored a function of this type.
                let serve: Serve = unsafe { std::mem::transmute(SERVE.load(Ordering::Acquire)) };
                registers[libc::REG_RAX as usize] = serve(number, arguments);
            }
        }
    }

    /// Does `rt_sigprocmask` on the mask that takes effect when the handler returns. SIGSYS stays
    /// unblocked.
    ///
    /// # Safety
    /// `mask` is valid, and so are the sets that the caller of the system call names.
    unsafe fn change_mask(mask: *mut u64, arguments: [u64; 6]) -> i64 {
        let [how, new, old, ..] = arguments;
        // SAFETY: by the caller.
        unsafe {
            let before = mask.read();
            if let Some(new) = (new as *const u64).as_ref() {
                let after = match how as i32 {
                    libc::SIG_BLOCK => before | new,
                    libc::SIG_UNBLOCK => before & !new,
                    libc::SIG_SETMASK => *new,
                    _ => return -i64::from(libc::EINVAL),
                };
                mask.write(after & !SIGSYS_BIT);
            }
            if let Some(old) = (old as *mut u64).as_mut() {
                *old = before;
            }
        }
        0
    }

    /// Passes a SIGSYS of another kind, for example of a seccomp filter of the program, to the
    /// program's handler.
    fn programs(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
        let handler = PROGRAMS.load(Ordering::Acquire);
        match handler as usize {
            libc::SIG_IGN => {}
            libc::SIG_DFL => {
                // The default action: end the process by SIGSYS.
                let _ = set_action(&Action::default(), None);
                let id = bare(libc::SYS_gettid, [0; 6]) as usize;
                let _ = call(libc::SYS_tkill, [id, signal as usize, 0, 0, 0]);
            }
            _ => {
                // SAFETY: the program's own handler. Without SA_SIGINFO it uses only the first
                // argument.
                let handler: Handler = unsafe { std::mem::transmute(handler) };
                handler(signal, info, context.cast());
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub use self::elsewhere::{Dispatch, bare};

/// Replacement for architectures without Syscall User Dispatch.
#[cfg(not(target_arch = "x86_64"))]
mod elsewhere {
    use std::io;

    use super::Serve;

    /// Cannot be created.
    pub struct Dispatch(std::convert::Infallible);

    impl Dispatch {
        /// Always fails.
        ///
        /// # Errors
        /// `Unsupported`.
        pub fn start(_: Serve) -> io::Result<Self> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    /// Returns ENOSYS. Never called, because no `Dispatch` can exist.
    pub fn bare(_: i64, _: [u64; 6]) -> i64 {
        -i64::from(libc::ENOSYS)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    static SEEN: AtomicI64 = AtomicI64::new(0);

    /// Answers getppid itself, and passes all other calls on.
    fn serve(number: i64, arguments: [u64; 6]) -> i64 {
        if number == libc::SYS_getppid {
            SEEN.fetch_add(1, Ordering::Relaxed);
            return 4242;
        }
        bare(number, arguments)
    }

    #[test]
    fn system_calls_are_redirected_until_drop() {
        // SAFETY: plain system calls.
        unsafe {
            let mut blocked: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut blocked);
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_SETMASK, &blocked, &mut before);
            let dispatch = Dispatch::start(serve).unwrap();
            let here = libc::getppid();
            // If this blocked SIGSYS, the next call would end the process.
            let mut during: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, &mut during);
            let again = libc::getppid();
            let refused = libc::close(-1);
            let error = *libc::__errno_location();
            let elsewhere = std::thread::scope(|_| bare(libc::SYS_getppid, [0; 6]));
            drop(dispatch);
            assert_eq!((here, again, SEEN.load(Ordering::Relaxed)), (4242, 4242, 2));
            assert_eq!((refused, error), (-1, libc::EBADF));
            assert_eq!(i64::from(libc::getppid()), elsewhere);
            assert_eq!(libc::sigismember(&during, libc::SIGUSR1), 1);
            let mut after: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, &mut after);
            assert_eq!(libc::sigismember(&after, libc::SIGSYS), 1, "blocked as before");
        }
    }
}
