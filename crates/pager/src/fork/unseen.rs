//! Detection of a child that was made by a system call past the preload library.
//!
//! No step before or after such a fork runs. The child has a copy of the pager's state, perhaps in
//! the middle of a change, and no thread of the pager: a call of the pager in the child would wait
//! for ever. So a process in which threads of the pager run has a mark in memory that the kernel
//! wipes in each child. A child whose fork was seen sets the mark again.

use std::io;
use std::sync::OnceLock;

static HOME: OnceLock<seal::Home> = OnceLock::new();

/// Marks this process as one in which threads of the pager run.
pub(crate) fn mark() -> io::Result<()> {
    if HOME.get().is_none() {
        // Another thread of a test may have been faster.
        let _ = HOME.set(seal::Home::new().map_err(io::Error::other)?);
    }
    Ok(())
}

/// Marks a child whose fork was seen.
pub(super) fn settle() {
    if let Some(home) = HOME.get() {
        home.settle();
    }
}

/// Returns true in a child whose fork was not seen.
#[inline]
pub fn is_unseen_child() -> bool {
    HOME.get().is_some_and(seal::Home::is_left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_is_unseen_until_it_settles() {
        mark().unwrap();
        assert!(!is_unseen_child());
        // SAFETY: the child calls no function that allocates or locks, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let first = is_unseen_child();
            settle();
            // SAFETY: ends the child only.
            unsafe { libc::_exit(i32::from(first && !is_unseen_child())) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the write.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1, "{status:#x}");
        assert!(!is_unseen_child());
    }
}
