//! Reads of the program's memory that never wait for a page.
//!
//! The pager copies a page where the kernel cannot move it. Meanwhile the program may drop the page
//! by a raw system call, which the pager does not see. A plain load would then wait for the pager
//! itself, and so would `process_vm_readv(2)`. A read of `/proc/self/mem` fails instead: the kernel
//! allows no retry of a fault in such a read, and userfaultfd then refuses the fault. Such a read
//! also ignores the mapping's protection. It costs 0.14 us a page more than a plain copy.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;

use crate::descriptor;
use crate::sys::{self, PAGE_BYTES};

/// Reader of the program's memory.
#[derive(Debug)]
pub(super) struct ProgramReader {
    /// `/proc/self/mem`, or `None` if the file cannot be opened. The file names the memory of the
    /// process that has opened it: a forked child needs a reader of its own.
    file: Option<OwnedFd>,
}

impl ProgramReader {
    pub(super) fn open() -> Self {
        let moved = sys::open_own(c"/proc/self/mem")
            .and_then(|file: File| descriptor::move_high(file.as_raw_fd()));
        Self { file: moved.ok() }
    }

    /// Returns the reader's descriptor.
    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.file.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Copies `len` bytes of whole pages from `source` to `target`. A page that is missing at the
    /// source leaves the target unchanged. Returns the number of pages that were copied.
    ///
    /// Without `/proc`, the copy is made by `process_vm_readv(2)`: it waits for a page that is
    /// missing, and fails for a page without read access.
    ///
    /// # Safety
    /// `target` is valid for writes of `len` bytes, by this thread only.
    pub(super) unsafe fn read(
        &self,
        source: usize,
        target: *mut u8,
        len: usize,
    ) -> io::Result<usize> {
        let (mut at, mut copied) = (0, 0);
        while at < len {
            // SAFETY: by the caller; the rest of the target.
            let got = unsafe { self.read_part(source + at, target.add(at), len - at) };
            match got {
                Ok(bytes) if bytes >= PAGE_BYTES => {
                    let pages = bytes / PAGE_BYTES;
                    copied += pages;
                    at += pages * PAGE_BYTES;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() != Some(libc::EIO) => return Err(error),
                // The page is missing.
                Ok(_) | Err(_) => at += PAGE_BYTES,
            }
        }
        Ok(copied)
    }

    /// # Safety
    /// As for [`ProgramReader::read`].
    unsafe fn read_part(&self, source: usize, target: *mut u8, len: usize) -> io::Result<usize> {
        let done = match &self.file {
            // SAFETY: by the caller.
            Some(file) => unsafe {
                libc::pread64(file.as_raw_fd(), target.cast(), len, source as i64)
            },
            None => {
                let local = libc::iovec { iov_base: target.cast(), iov_len: len };
                let remote = libc::iovec { iov_base: source as *mut _, iov_len: len };
                // SAFETY: by the caller.
                unsafe {
                    libc::process_vm_readv(std::process::id() as i32, &local, 1, &remote, 1, 0)
                }
            }
        };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as usize) }
    }
}

impl Drop for ProgramReader {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            descriptor::forget(file.as_raw_fd());
        }
    }
}

/// Writes to a page without changing its content, and without waiting if the page is missing. The
/// page is not shared with a forked child afterwards.
///
/// The kernel makes the write, as the second operation of FUTEX_WAKE_OP: an atomic `or` of 0. Like
/// a read of `/proc/self/mem`, this write fails for a missing page. If a thread of the program
/// waits with a futex at the page's first word, and this word is 2047, the thread wakes up early.
/// Because a futex may wake up early at any time, programs expect this.
pub(super) fn touch(address: usize) {
    const OP_OR: u32 = 2;
    const COMPARE_EQUAL: u32 = 0;
    let operation = OP_OR << 28 | COMPARE_EQUAL << 24 | 2047;
    let own = AtomicU32::new(0);
    let command = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel changes no value, and checks both addresses.
    unsafe { libc::syscall(libc::SYS_futex, own.as_ptr(), command, 0, 0, address, operation) };
}
