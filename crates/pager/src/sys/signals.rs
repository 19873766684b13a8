//! Signal actions, in the kernel's form.

use std::io;

use super::call;

/// Bytes of the kernel's `sigset_t`.
pub const SIGNAL_SET_BYTES: usize = 8;

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Action {
    /// Address of the handler, `SIG_DFL` or `SIG_IGN`.
    pub handler: usize,
    /// Flags, `SA_*`.
    pub flags: u64,
    /// Address of the code that returns from the handler.
    pub restorer: usize,
    /// Signals that are blocked while the handler runs.
    pub mask: u64,
}

impl Action {
    /// Returns the calling process's action for a signal.
    pub fn of(signal: i32) -> io::Result<Self> {
        let mut action = Self::default();
        let arguments = [signal as usize, 0, &raw mut action as usize, SIGNAL_SET_BYTES, 0, 0];
        // SAFETY: the kernel writes the action, which lives as long as the call.
        unsafe { call(libc::SYS_rt_sigaction, arguments) }.map(|_| action)
    }

    /// Sets the calling process's action for a signal.
    ///
    /// # Safety
    /// The handler may run at any time from now on, and is never unloaded.
    pub unsafe fn set(&self, signal: i32) -> io::Result<()> {
        let action = &raw const *self as usize;
        let arguments = [signal as usize, action, 0, SIGNAL_SET_BYTES, 0, 0];
        // SAFETY: by the caller.
        unsafe { call(libc::SYS_rt_sigaction, arguments) }.map(drop)
    }
}
