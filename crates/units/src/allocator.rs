//! The allocator of this process.

/// Gives the memory that is free in the allocator back to the system.
///
/// The allocator of glibc keeps freed memory for later requests, without a limit if blocks that
/// live are behind the free ones. On other C libraries the call has no effect. It takes about as
/// long as the system takes to free the pages.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call has no requirements, and takes the locks of the allocator itself.
    unsafe {
        libc::malloc_trim(0);
    }
}
