//! Is the calling thread inside the library?
//!
//! What is allocated there, by us or by libc on our behalf, must not come from the memory that we
//! page: it comes from the internal heap. The pager's own threads are inside for good.

unsafe extern "C" {
    safe fn granary_depth() -> *mut i32;
}

/// True if the calling thread is inside.
pub fn is_inside() -> bool {
    // SAFETY: the calling thread's own variable.
    unsafe { *granary_depth() > 0 }
}

/// Inside, as long as it lives.
pub struct Inside(());

impl Inside {
    /// Goes inside.
    pub fn new() -> Self {
        // SAFETY: the calling thread's own variable.
        unsafe { *granary_depth() += 1 };
        Self(())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // SAFETY: the calling thread's own variable.
        unsafe { *granary_depth() -= 1 };
    }
}
