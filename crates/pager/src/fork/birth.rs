//! The first moments of a child of which the kernel reports nothing.
//!
//! Without CAP_SYS_PTRACE there is no UFFD_FEATURE_EVENT_FORK: the kernel copies the region to the child
//! as plain memory, in which what is missing reads as zeros. So the child opens a userfaultfd of its own
//! and registers the region, before anything touches it. A `pthread_atfork` handler is too late for that:
//! libc resets the locks of its streams before it, and those are in paged memory, and other libraries may
//! have handlers before ours. So the system call itself is ours: for the time of the fork the kernel hands all
//! system calls of the forking thread to us (Syscall User Dispatch, Linux 5.11), as SIGSYS. We make
//! them; and after the one that makes the child we are the first to run there:
//!
//! ```text
//!   forking thread                                   child
//!   before_fork: Birth::prepare
//!   libc: clone --> SIGSYS: deliver: clone ------>   opens a userfaultfd, registers the region,
//!   libc goes on    <-------/        \               sends the descriptor to the keeper
//!   after_fork: Birth::end            \-------->     libc goes on
//! ```
//!
//! Outside of a fork the region is not for children at all (MADV_DONTFORK): what is forked by a raw system call,
//! or by a function that calls no atfork handlers, finds nothing there, rather than zeros.

use std::fmt::Write;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use super::channel::{self, Message};
use crate::config::EXIT_PAGER;
use crate::pager::Pager;
use crate::region::Space;
use crate::sys::dispatch;
use crate::uffd::{Features, Uffd};

/// The fork that is under way. What the child needs is put together before, as it must not allocate.
static CURRENT: AtomicPtr<Birth> = AtomicPtr::new(std::ptr::null_mut());

/// A fork that the kernel does not report.
pub(super) struct Birth {
    /// What of the region the child gets, and registers: addresses and bytes.
    parts: Vec<(usize, usize)>,
    /// The child's end of its calls.
    calls: RawFd,
    /// What the child has no use for.
    keepers: [RawFd; 2],
    /// What the system call gave; 0 in the child, and -1 before it.
    made: AtomicI32,
    /// In the parent: the error of taking the region out of further forks, or 0.
    ended: AtomicI32,
    /// In the child: the descriptor of its faults.
    faults: AtomicI32,
    dispatch: Option<dispatch::Dispatch>,
}

impl Birth {
    /// In the parent, before the fork: the next system call that makes a process is ours.
    ///
    /// # Errors
    /// Where the kernel has no Syscall User Dispatch.
    pub fn prepare(
        pager: &Pager,
        space: &Space,
        calls: &[OwnedFd; 2],
        bell: &[OwnedFd; 2],
    ) -> io::Result<Box<Self>> {
        let mut birth = Box::new(Self {
            parts: pager.parts_for_children(space),
            calls: calls[1].as_raw_fd(),
            keepers: [calls[0].as_raw_fd(), bell[0].as_raw_fd()],
            made: AtomicI32::new(-1),
            ended: AtomicI32::new(0),
            faults: AtomicI32::new(-1),
            dispatch: None,
        });
        CURRENT.store(&raw mut *birth, Ordering::Release);
        // From here on the thread's system calls come to `on_syscall`.
        match dispatch::Dispatch::start(on_syscall) {
            Ok(dispatch) => birth.dispatch = Some(dispatch),
            Err(error) => {
                CURRENT.store(std::ptr::null_mut(), Ordering::Release);
                return Err(error);
            }
        }
        Ok(birth)
    }

    /// Says whether a fork copies the region; an error as the kernel gives it, or 0.
    fn advise(&self, advice: i32) -> i64 {
        for &(start, len) in &self.parts {
            // Parts of the region; only what a fork copies is changed.
            let arguments = [start as u64, len as u64, advice as u64, 0, 0, 0];
            let result = dispatch::bare(libc::SYS_madvise, arguments);
            if result < 0 {
                return result;
            }
        }
        0
    }

    /// In the parent, after the fork. True if there is a child.
    pub fn end(&mut self) -> io::Result<bool> {
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
        drop(self.dispatch.take());
        match self.ended.load(Ordering::Acquire) {
            0 => Ok(self.made.load(Ordering::Acquire) > 0),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    /// In the child: the descriptor of its faults.
    pub fn end_in_child(&mut self) -> OwnedFd {
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
        drop(self.dispatch.take());
        // SAFETY: `open_faults` left it there, for us.
        unsafe { OwnedFd::from_raw_fd(self.faults.load(Ordering::Acquire)) }
    }

    /// The first thing that runs in the child. It has the parent's locks as they were, so it allocates nothing.
    fn begin(&self) {
        for fd in self.keepers {
            // Makes room for the descriptor below, whatever the limit.
            // SAFETY: the child's copies; `Pager::after_fork_in_child` does not close them again.
            unsafe { libc::syscall(libc::SYS_close, fd) };
        }
        let (step, error) = match self.open_faults() {
            Ok(()) => return,
            Err(failed) => failed,
        };
        let mut text = Text::default();
        let _ = writeln!(
            text,
            "granary: a forked process cannot {step} (error {error}), so it ends now (status {EXIT_PAGER}), \
             before it could see wrong data"
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
                ("open a userfaultfd of its own, as its parent could", number(device))
            }
            crate::Error::UserfaultfdApi(error) => ("set its userfaultfd up", number(error)),
            _ => ("open a userfaultfd", 0),
        })?;
        for &(start, len) in &self.parts {
            // SAFETY: parts of the region; the keeper resolves their faults.
            unsafe { faults.register(start, len) }
                .map_err(|error| ("register its memory with userfaultfd", number(error)))?;
        }
        match self.advise(libc::MADV_DONTFORK) {
            0 => {}
            error => return Err(("keep its memory from its own children", -error as i32)),
        }
        channel::send(self.calls, Message::of(channel::FAULTS), &[faults.as_raw_fd()])
            .map_err(|error| ("reach what keeps its parent's pages", number(error)))?;
        self.faults.store(faults.into_fd().into_raw_fd(), Ordering::Release);
        Ok(())
    }
}

/// A message, put together without the heap.
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

/// Stack that the child may need before its faults are served: it is there already.
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

/// Makes a system call of the forking thread, by its number and arguments; returns what the kernel does.
/// No call in here goes to the kernel but by [`dispatch::bare`], as long as it is the parent.
fn on_syscall(number: i64, arguments: [u64; 6]) -> i64 {
    const AGAIN: i64 = -(libc::EAGAIN as i64);
    let makes_process = match number {
        libc::SYS_clone if arguments[0] & libc::CLONE_VM as u64 != 0 => return AGAIN,
        libc::SYS_clone3 | libc::SYS_vfork => return AGAIN,
        libc::SYS_clone | libc::SYS_fork => true,
        _ => false,
    };
    if !makes_process {
        return dispatch::bare(number, arguments);
    }
    // SAFETY: set before the first call comes here, and cleared after the last.
    let birth = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
    let Some(birth) = birth.filter(|birth| birth.made.load(Ordering::Acquire) < 0) else {
        // One child for each fork: another would share its parent's channel.
        return AGAIN;
    };
    touch_stack();
    // The region is for this child, and for no other that is made meanwhile, but by a rare chance.
    let admitted = birth.advise(libc::MADV_DOFORK);
    let made = if admitted == 0 { dispatch::bare(number, arguments) } else { admitted };
    birth.made.store(made.max(-1) as i32, Ordering::Release);
    if made == 0 {
        birth.begin();
    } else {
        birth.ended.store(birth.advise(libc::MADV_DONTFORK) as i32, Ordering::Release);
    }
    made
}
