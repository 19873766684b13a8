//! Detection of a forked child, without a system call.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Error;

/// One page, since the kernel wipes whole pages.
pub const BYTES: usize = 4096;
const AT_HOME: u64 = 1;

/// A word of memory that reads zero in every child that a fork makes of this process.
///
/// The kernel gives a child zero pages in place of memory with MADV_WIPEONFORK. A process that
/// `vfork` or `clone(CLONE_VM)` makes shares the memory, counters included, and is no child here.
pub struct Home(NonNull<u64>);

// SAFETY: the memory belongs to this value, and is accessed by atomic loads only.
unsafe impl Send for Home {}
// SAFETY: as above.
unsafe impl Sync for Home {}

impl Home {
    /// Makes this process the home.
    ///
    /// # Errors
    /// [`Error::WipeOnFork`] if there is no memory, or the kernel cannot wipe it at a fork.
    pub fn new() -> Result<Self, Error> {
        let failed = |errno: rustix::io::Errno| Error::WipeOnFork(errno.into());
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let page = unsafe { mmap_anonymous(null_mut(), BYTES, rights, MapFlags::PRIVATE) };
        let page = NonNull::new(page.map_err(failed)?.cast()).expect("a mapping is not at zero");
        let home = Self(page);
        // SAFETY: the page belongs to `home`. The advice changes only the content in a child.
        unsafe { madvise(page.as_ptr().cast(), BYTES, Advice::LinuxWipeOnFork) }.map_err(failed)?;
        home.settle();
        Ok(home)
    }

    /// Returns whether this process is a forked child of the process that made this value, or that
    /// settled last.
    #[inline]
    pub fn is_left(&self) -> bool {
        self.word().load(Ordering::Acquire) != AT_HOME
    }

    /// Makes this process the home.
    pub fn settle(&self) {
        self.word().store(AT_HOME, Ordering::Release);
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: aligned, mapped until the drop, and accessed atomically only.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr()) }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // SAFETY: the page belongs to this value. An error would leave the page mapped.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}
