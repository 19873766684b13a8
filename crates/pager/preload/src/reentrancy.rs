//! Detection of calls that the library makes to itself, by a per-thread depth counter.
//!
//! While a thread runs code of this library, all its allocations, also those that libc makes for
//! the library, must not come from paged memory. They are served from the internal heap. The
//! pager's own threads are in this state permanently.

unsafe extern "C" {
    safe fn granary_depth() -> *mut i32;
}

/// Returns true if the calling thread runs code of this library.
pub fn is_reentrant() -> bool {
    // SAFETY: the calling thread's own variable.
    unsafe { *granary_depth() > 0 }
}

/// Marks the calling thread as running code of this library, as long as the guard lives.
pub struct ReentrancyGuard(());

impl ReentrancyGuard {
    /// Increments the calling thread's depth.
    pub fn new() -> Self {
        // SAFETY: the calling thread's own variable.
        unsafe { *granary_depth() += 1 };
        Self(())
    }
}

impl Drop for ReentrancyGuard {
    fn drop(&mut self) {
        // SAFETY: the calling thread's own variable.
        unsafe { *granary_depth() -= 1 };
    }
}
