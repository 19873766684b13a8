//! The keeper as other processes see it, and the limit of waits for a keeper that is stopped.
//!
//! The kernel keeps the process id of a keeper in a word that forked children share with their
//! parent. A process that waits for a keeper looks at the keeper's state in `/proc` meanwhile. A
//! keeper that has been stopped for `GRANARY_WAIT_S` (SIGSTOP, a debugger) is killed: the thread
//! that started it starts another one, which continues with the same children
//! ([`super::page_server`]). Where the parent has ended too, or the keeper was stopped within a
//! transfer, its end ends those that wait, with a message.
//!
//! A keeper that runs needs no limit here: it has a watchdog, and its own waits for the pool end.

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::channel;
use crate::config::EXIT_PAGER;
use crate::descriptor;
use crate::patience::{self, Patience};
use crate::sys::{self, PAGE_BYTES};

/// Name of the process.
pub(super) const NAME: &CStr = c"granary-keeper";
/// Interval between two looks of a thread that waits.
pub(crate) const LOOK_MS: i32 = 100;

/// Process ids of a keeper and of its parent, in memory that a process shares with its children.
#[repr(C)]
pub(crate) struct Words {
    /// Process id of the keeper; 0 without one. The kernel writes the word when the keeper starts
    /// and ends, and wakes threads that wait for it.
    pub keeper: AtomicU32,
    /// Process id of the parent, a thread of which takes the place of a keeper if no further
    /// process is allowed.
    parent: AtomicU32,
}

/// Words that are not shared, where no memory could be mapped.
static PRIVATE: Words = Words { keeper: AtomicU32::new(0), parent: AtomicU32::new(0) };
/// The words of the keeper of this process's children; null before the first fork.
static OWN: AtomicPtr<Words> = AtomicPtr::new(ptr::null_mut());
/// The words of the keeper that holds pages of this process; null without one.
static PARENTS: AtomicPtr<Words> = AtomicPtr::new(ptr::null_mut());

/// Maps the words for the keeper of this process's children, once. Called before a fork.
pub(crate) fn prepare() -> &'static Words {
    if OWN.load(Ordering::Acquire).is_null() {
        let mapped = sys::map_shared_anonymous(PAGE_BYTES).ok();
        let words = mapped.map_or(ptr::from_ref(&PRIVATE).cast_mut(), |at| at as *mut Words);
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let lost = OWN.compare_exchange(ptr::null_mut(), words, success, failure).is_err();
        if lost && let Some(mapped) = mapped {
            // SAFETY: just mapped, and known to no other thread.
            let _ = unsafe { sys::unmap_anonymous(mapped, PAGE_BYTES) };
        }
    }
    own().unwrap_or(&PRIVATE)
}

/// Returns the words of the keeper of this process's children.
pub(crate) fn own() -> Option<&'static Words> {
    // SAFETY: null, or memory that is unmapped only in a forked child, before any use there.
    unsafe { OWN.load(Ordering::Acquire).as_ref() }
}

/// Called before a fork on a thread that is not a light child's: as [`prepare`], and notes the
/// parent.
pub(super) fn before_fork() {
    prepare().parent.store(descriptor::program() as u32, Ordering::Release);
}

/// Called in a forked child. The parent's keeper has its pages; that of a light parent's parent if
/// the parent was `light`.
pub(super) fn enter_child(light: bool) {
    let own = OWN.swap(ptr::null_mut(), Ordering::AcqRel);
    if light {
        return;
    }
    let before = PARENTS.swap(own, Ordering::AcqRel);
    if !before.is_null() && before != ptr::from_ref(&PRIVATE).cast_mut() {
        // SAFETY: the mapping that `prepare` of an ancestor made, which this process uses no more.
        let _ = unsafe { sys::unmap_anonymous(before as usize, PAGE_BYTES) };
    }
}

/// A wait for a keeper.
pub(super) struct Wait {
    words: Option<&'static Words>,
    patience: Patience,
    /// The keeper may not be killed by this process. Its parent's monitor has had no time for it
    /// yet.
    is_denied: bool,
}

impl Wait {
    /// A wait for the keeper that holds pages of this process.
    pub fn for_pages() -> Self {
        // SAFETY: null, or memory that this process does not unmap.
        let words = unsafe { PARENTS.load(Ordering::Acquire).as_ref() };
        Self { words, patience: Patience::default(), is_denied: false }
    }

    /// A wait for the keeper of this process's children.
    pub fn for_child() -> Self {
        Self { words: own(), patience: Patience::default(), is_denied: false }
    }

    /// Looks whether the keeper is stopped, and kills it if that has lasted for longer than the
    /// limit. Called at least each [`LOOK_MS`] while a thread waits. Returns true if the keeper is
    /// stopped.
    pub fn look(&mut self) -> bool {
        let Some(words) = self.words else { return false };
        let keeper = words.keeper.load(Ordering::Acquire);
        let id = if keeper != 0 { keeper } else { words.parent.load(Ordering::Acquire) };
        if id == 0 || !is_stopped(id, keeper != 0) {
            self.patience = Patience::default();
            return false;
        }
        let limit_s = patience::limit_s();
        let limit_ns = u64::from(limit_s) * 1_000_000_000;
        if self.patience.is_over(sys::now_ns(), limit_ns, id) {
            self.patience = Patience::default();
            self.end(id, keeper != 0, limit_s);
        }
        true
    }

    /// Ends a wait that has lasted for longer than the limit.
    fn end(&mut self, id: u32, is_keeper: bool, limit_s: u32) {
        let process = descriptor::program();
        if !is_keeper {
            sys::die(
                EXIT_PAGER,
                &format!(
                    "process {id}, which holds pages of the forked process {process}, has been \
                     stopped for {limit_s} s, so process {process} ends now (status \
                     {EXIT_PAGER}); continue the stopped process earlier (kill -CONT {id}), or set \
                     GRANARY_WAIT_S to more seconds"
                ),
            );
        }
        let name = NAME.to_string_lossy();
        match kill_stopped(id) {
            // The keeper goes on, or has ended.
            Ok(false) => {}
            Ok(true) => sys::say(&format!(
                "{name} (process {id}), which holds pages of forked processes, has been stopped \
                 for {limit_s} s (GRANARY_WAIT_S): process {process} kills it, and another one \
                 takes its place unless their parent has ended"
            )),
            Err(_) if !std::mem::replace(&mut self.is_denied, true) => {}
            Err(error) => sys::die(
                EXIT_PAGER,
                &format!(
                    "{name} (process {id}), which holds pages of forked processes, has been \
                     stopped for {} s, and process {process}, one of these, may not kill it ({}), \
                     so process {process} ends now (status {EXIT_PAGER}); continue the stopped \
                     process earlier (kill -CONT {id}), or set GRANARY_WAIT_S to more seconds",
                    2 * limit_s,
                    std::io::Error::from_raw_os_error(error)
                ),
            ),
        }
    }
}

/// A look now and then at the keeper of this process's children, on a thread that does not wait.
#[derive(Default)]
pub(crate) struct Watch(Option<Wait>);

impl Watch {
    /// As [`Wait::look`], once this process has had a keeper.
    pub fn look(&mut self) -> bool {
        if self.0.is_none() && own().is_some() {
            self.0 = Some(Wait::for_child());
        }
        self.0.as_mut().is_some_and(Wait::look)
    }
}

/// Waits until a socket, whose other end is the keeper's, has a message or is closed.
pub(super) fn wait_for_answer(channel: RawFd) {
    // Most answers are there within the first look, which makes no wait.
    if channel::is_ready(channel, LOOK_MS) {
        return;
    }
    let mut wait = Wait::for_pages();
    while !channel::is_ready(channel, LOOK_MS) {
        wait.look();
    }
}

/// Kills a keeper, if it is still stopped. Returns false if it is not.
fn kill_stopped(id: u32) -> Result<bool, i32> {
    let arguments = [id as usize, 0, 0, 0, 0, 0];
    // SAFETY: opens a descriptor of a process.
    let process = match unsafe { sys::system_call(libc::SYS_pidfd_open, arguments) } {
        Ok(process) => process,
        Err(libc::ESRCH) => return Ok(false),
        Err(error) => return Err(error),
    };
    let killed = match is_stopped(id, true) {
        // SAFETY: sends a signal to the process whose state was read after it was opened.
        true => unsafe {
            let arguments = [process, libc::SIGKILL as usize, 0, 0, 0, 0];
            sys::system_call(libc::SYS_pidfd_send_signal, arguments).map(|_| true)
        },
        false => Ok(false),
    };
    // SAFETY: this function's own descriptor.
    let _ = unsafe { sys::system_call(libc::SYS_close, [process, 0, 0, 0, 0, 0]) };
    killed
}

/// Returns true if a process is stopped, by a signal or a debugger. The name distinguishes a keeper
/// from a process that has its id later, or in another namespace. Without `/proc` no process is
/// stopped. Does not allocate.
fn is_stopped(id: u32, is_keeper: bool) -> bool {
    let mut path = [0u8; 32];
    let mut text = [0u8; 256];
    let Ok(()) = write!(&mut path[..], "/proc/{id}/stat\0") else { return false };
    // SAFETY: the path ends with a zero byte; the buffer is valid for its length; the descriptor is
    // this function's own.
    let read = unsafe {
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
        let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0, 0, 0];
        let Ok(file) = sys::system_call(libc::SYS_openat, arguments) else { return false };
        let arguments = [file, text.as_mut_ptr() as usize, text.len(), 0, 0, 0];
        let read = sys::system_call(libc::SYS_read, arguments);
        let _ = sys::system_call(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
        read.unwrap_or(0)
    };
    let state = state_of(&text[..read]);
    let has_name = |name: &[u8]| !is_keeper || name == NAME.to_bytes();
    state.is_some_and(|(name, state)| has_name(name) && matches!(state, b'T' | b't'))
}

/// Returns the name and the state of a process in a text of proc_pid_stat(5).
fn state_of(text: &[u8]) -> Option<(&[u8], u8)> {
    let start = text.iter().position(|&byte| byte == b'(')? + 1;
    let end = text.iter().rposition(|&byte| byte == b')')?;
    Some((text.get(start..end)?, *text.get(end + 2)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn name_and_state_are_read_from_the_text() {
        assert_eq!(state_of(b"12 (granary-keeper) T 1 12"), Some((&b"granary-keeper"[..], b'T')));
        assert_eq!(state_of(b"12 (a) b (c) S 1"), Some((&b"a) b (c"[..], b'S')));
        for text in ["", "12", "12 (a", "12 (a)", "12 (a) "] {
            assert_eq!(state_of(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn only_stopped_processes_are_stopped() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let id = child.id();
        assert!(!is_stopped(id, false) && !is_stopped(1 << 23, false));
        // SAFETY: signals to this test's own child, and a wait for its next change of state.
        unsafe {
            libc::kill(id as i32, libc::SIGSTOP);
            let mut status = 0;
            assert_eq!(libc::waitpid(id as i32, &mut status, libc::WUNTRACED), id as i32);
        }
        assert!(is_stopped(id, false));
        assert!(!is_stopped(id, true), "its name is not that of a keeper");
        assert_eq!(kill_stopped(id), Ok(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(kill_stopped(1 << 23), Ok(false));
    }
}
