//! Set-up of a forked child when the kernel does not report the fork.
//!
//! Without CAP_SYS_PTRACE there is no UFFD_FEATURE_EVENT_FORK: the kernel copies the region to the
//! child as plain memory, in which missing pages read as zeros. So the child opens a userfaultfd of
//! its own and registers the region before any code touches it. A `pthread_atfork` handler runs too
//! late: before it, libc resets the locks of its streams, which are in paged memory, and handlers
//! of other libraries may run earlier. So the pager makes the system call itself. During the fork,
//! the kernel delivers all system calls of the forking thread as SIGSYS (Syscall User Dispatch,
//! Linux 5.11), and the signal handler makes them. After the call that makes the child, the
//! handler's code is the first to run in the child:
//!
//! ```text
//!   forking thread                                   child
//!   before_fork: ChildSetup::prepare
//!   libc: clone --> SIGSYS: deliver: clone ------>   opens a userfaultfd, registers the region,
//!   libc continues  <-----/        \                 sends the descriptor to the page server
//!   after_fork: ChildSetup::end       \-------->     libc continues
//! ```
//!
//! Outside of a fork, the region has MADV_DONTFORK. So a child made by an instruction of the
//! program, past libc, finds no memory there instead of zeros.

use std::fmt::Write;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use super::channel::{self, Message};
use crate::config::EXIT_PAGER;
use crate::sys::dispatch;
use crate::uffd::{Features, Uffd};

/// The fork in progress. Data for the child is prepared before the fork, because the child must not
/// allocate.
static CURRENT: AtomicPtr<ChildSetup> = AtomicPtr::new(std::ptr::null_mut());

/// State of a fork that the kernel does not report.
pub(super) struct ChildSetup {
    /// Parts of the region that the child gets and registers, as addresses and bytes.
    parts: Vec<(usize, usize)>,
    /// The child's request socket.
    calls: RawFd,
    /// The page server's ends of the sockets, which the child closes.
    server_ends: [RawFd; 2],
    /// Result of the system call: 0 in the child, -1 before the call.
    made: AtomicI32,
    /// In the parent: the error of excluding the region from further forks, or 0.
    ended: AtomicI32,
    /// In the child: the descriptor of its faults.
    faults: AtomicI32,
    dispatch: Option<dispatch::Dispatch>,
}

impl ChildSetup {
    /// In the parent, before the fork: redirects the thread's system calls to [`on_syscall`].
    /// `parts` are the parts of the region that the child gets.
    ///
    /// # Errors
    /// The kernel has no Syscall User Dispatch.
    pub fn prepare(
        parts: Vec<(usize, usize)>,
        calls: &[OwnedFd; 2],
        notices: &[OwnedFd; 2],
    ) -> io::Result<Box<Self>> {
        let mut setup = Box::new(Self {
            parts,
            calls: calls[1].as_raw_fd(),
            server_ends: [calls[0].as_raw_fd(), notices[0].as_raw_fd()],
            made: AtomicI32::new(-1),
            ended: AtomicI32::new(0),
            faults: AtomicI32::new(-1),
            dispatch: None,
        });
        CURRENT.store(&raw mut *setup, Ordering::Release);
        // From here on `on_syscall` receives the thread's system calls.
        match dispatch::Dispatch::start(on_syscall) {
            Ok(dispatch) => setup.dispatch = Some(dispatch),
            Err(error) => {
                CURRENT.store(std::ptr::null_mut(), Ordering::Release);
                return Err(error);
            }
        }
        Ok(setup)
    }

    /// Sets with MADV_DOFORK or MADV_DONTFORK whether a fork copies the region. Returns 0 or a
    /// negative error number.
    fn advise(&self, advice: i32) -> i64 {
        for &(start, len) in &self.parts {
            // Parts of the region; the advice changes only whether a fork copies them.
            let arguments = [start as u64, len as u64, advice as u64, 0, 0, 0];
            let result = dispatch::bare(libc::SYS_madvise, arguments);
            if result < 0 {
                return result;
            }
        }
        0
    }

    /// In the parent, after the fork: ends the redirection. Returns true if a child was made.
    pub fn end(&mut self) -> io::Result<bool> {
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
        drop(self.dispatch.take());
        match self.ended.load(Ordering::Acquire) {
            0 => Ok(self.made.load(Ordering::Acquire) > 0),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    /// In the child: ends the redirection and returns the descriptor of the child's faults.
    pub fn end_in_child(&mut self) -> OwnedFd {
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
        drop(self.dispatch.take());
        // SAFETY: `open_faults` stored it here and does not use it any more.
        unsafe { OwnedFd::from_raw_fd(self.faults.load(Ordering::Acquire)) }
    }

    /// Runs first in the child. Must not allocate, because the child has a copy of the parent's
    /// locks, some of them held.
    fn begin(&self) {
        for fd in self.server_ends {
            // Makes room for the descriptor that is opened below, in case the limit is reached.
            // SAFETY: the child's copies; `after_fork_in_child` does not close them again.
            unsafe { libc::syscall(libc::SYS_close, fd) };
        }
        let (step, error) = match self.open_faults() {
            Ok(()) => return,
            Err(failed) => failed,
        };
        let mut text = Text::default();
        let _ = writeln!(
            text,
            "granary: a forked process cannot {step} (error {error}), so it ends now (status \
             {EXIT_PAGER}): otherwise it could read wrong data"
        );
        loop {
            // SAFETY: the text is valid for the read; exit_group does not return.
            unsafe {
                libc::syscall(libc::SYS_write, 2, text.bytes.as_ptr(), text.len);
                libc::syscall(libc::SYS_exit_group, EXIT_PAGER);
            }
        }
    }

    fn open_faults(&self) -> Result<(), (&'static str, i32)> {
        let number = |error: io::Error| error.raw_os_error().unwrap_or(0);
        let faults = Uffd::open(Features::default()).map_err(|error| match error {
            crate::Error::Userfaultfd { device, .. } => {
                ("open a userfaultfd, although its parent could", number(device))
            }
            crate::Error::UserfaultfdApi(error) => ("set up its userfaultfd", number(error)),
            _ => ("open a userfaultfd", 0),
        })?;
        for &(start, len) in &self.parts {
            // SAFETY: parts of the region; the page server resolves their faults.
            unsafe { faults.register(start, len) }
                .map_err(|error| ("register its memory with userfaultfd", number(error)))?;
        }
        match self.advise(libc::MADV_DONTFORK) {
            0 => {}
            error => return Err(("exclude its memory from its own forks", -error as i32)),
        }
        channel::send(self.calls, Message::of(channel::FAULTS), &[faults.as_raw_fd()])
            .map_err(|error| ("reach granary-keeper, which holds its pages", number(error)))?;
        self.faults.store(faults.into_fd().into_raw_fd(), Ordering::Release);
        Ok(())
    }
}

/// Buffer to format a message without the heap.
struct Text {
    bytes: [u8; 256],
    len: usize,
}

impl Default for Text {
    fn default() -> Self {
        Self { bytes: [0; 256], len: 0 }
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let len = text.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + len].copy_from_slice(&text.as_bytes()[..len]);
        self.len += len;
        Ok(())
    }
}

/// Stack that the child may use before its faults are served. It is made resident before the fork.
const STACK_BYTES: usize = 8 << 10;

#[inline(never)]
fn touch_stack() {
    let mut below = std::mem::MaybeUninit::<[u8; STACK_BYTES]>::uninit();
    let start = below.as_mut_ptr().cast::<u8>();
    for at in (0..STACK_BYTES).step_by(1024).chain([STACK_BYTES - 1]) {
        // SAFETY: within the array.
        unsafe { start.add(at).write_volatile(0) };
    }
}

/// Handles a system call of the forking thread and returns the kernel's result. In the parent, this
/// function must make system calls only through [`dispatch::bare`].
fn on_syscall(number: i64, arguments: [u64; 6]) -> i64 {
    const AGAIN: i64 = -(libc::EAGAIN as i64);
    let flags = match number {
        libc::SYS_clone => arguments[0],
        libc::SYS_fork => 0,
        libc::SYS_vfork => libc::CLONE_VM as u64,
        // The first word of `struct clone_args` has the flags. libc makes no such call here, so
        // the caller is the preload library, and has read the structure.
        libc::SYS_clone3 if arguments[0] != 0 => {
            // SAFETY: as explained.
            unsafe { (arguments[0] as *const u64).read_unaligned() }
        }
        _ => return dispatch::bare(number, arguments),
    };
    if flags & libc::CLONE_VM as u64 != 0 {
        return AGAIN;
    }
    // SAFETY: set before the first redirected call, and cleared after the last.
    let setup = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
    let Some(setup) = setup.filter(|setup| setup.made.load(Ordering::Acquire) < 0) else {
        // Only one child per fork: another would share the first child's sockets.
        return AGAIN;
    };
    touch_stack();
    // The region is copied to this child only, unless another thread forks by a raw system call
    // right now.
    let admitted = setup.advise(libc::MADV_DOFORK);
    let made = if admitted == 0 { dispatch::bare(number, arguments) } else { admitted };
    setup.made.store(made.max(-1) as i32, Ordering::Release);
    if made == 0 {
        setup.begin();
    } else {
        setup.ended.store(setup.advise(libc::MADV_DONTFORK) as i32, Ordering::Release);
    }
    made
}
