//! Memory that a client gives to the NIC of another process: made by the one, accepted by the other.
//!
//! The client stays its owner and may write into it what it likes, when it likes. What it must not be
//! able to do is to make *touching* it fail, wait, or cost the NIC's process memory. So memory is
//! accepted only when
//!
//! - it is a memfd of ordinary pages (no other file can be sealed; huge pages can run out);
//! - the NIC's process could map it for reading and writing;
//! - it is sealed against shrinking (a page beyond the end raises SIGBUS), growing, and *writing
//!   through new mappings*: with that seal Linux also refuses to punch holes. The host sets the seals
//!   itself, after both sides have mapped the memory;
//! - after that there is no hole in it. A hole is filled when the NIC touches it, with a page charged
//!   to the NIC's process, or not at all where memory is short (SIGBUS).
//!
//! The last two are looked at after the seals are set, when they can no longer change. Pages may still
//! be swapped out: on a machine with swap the NIC can wait for the disk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::Advice;

use super::super::error::Error;
use crate::memory::DmaMemory;

/// `f_type` of a file system whose files are ordinary shared memory (`TMPFS_MAGIC`). Memory of huge
/// pages is another one's: touching it can fail when none is left.
const TMPFS: u64 = 0x0102_1994;

/// Nothing but the bytes can change any more, and they through mappings that exist only.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// `bytes` of memory of this process, rounded up to pages, all of them there, with a descriptor for the
/// NIC's process. The host seals it: after that no other mapping can be made that writes.
pub(super) fn make(name: &str, bytes: usize) -> Result<(OwnedFd, DmaMemory), Error> {
    let bytes = bytes.max(1).next_multiple_of(rustix::param::page_size());
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(Error::system("creating shared memory"))?;
    rustix::fs::ftruncate(&fd, bytes as u64).map_err(Error::system("sizing shared memory"))?;
    let memory =
        DmaMemory::map_shared(&fd, 0, bytes).map_err(Error::system("mapping shared memory"))?;
    populate(&memory).map_err(Error::system("allocating the pages of shared memory"))?;
    Ok((fd, memory))
}

/// Allocates all pages, now: where there is not enough memory this is an error, not a signal.
fn populate(memory: &DmaMemory) -> Result<(), Errno> {
    // SAFETY: the advice changes no contents of what is mapped.
    let done = unsafe {
        rustix::mm::madvise(memory.as_ptr().cast(), memory.len(), Advice::LinuxPopulateWrite)
    };
    if done == Err(Errno::INVAL) {
        // A kernel before 5.14.
        for page in (0..memory.len()).step_by(rustix::param::page_size()) {
            memory.word32(page).store(0, Ordering::Relaxed);
        }
        return Ok(());
    }
    done
}

/// Maps and seals `bytes` of memory that a client sent, if touching it can never fail.
pub(super) fn adopt(fd: &OwnedFd, bytes: u64) -> Result<DmaMemory, Error> {
    // Asked first: for what is not a memfd, this fails without touching it.
    rustix::fs::fcntl_get_seals(fd).map_err(|_| {
        refused("the descriptor is not of shared memory that can be sealed (memfd)")
    })?;
    let kind = rustix::fs::fstatfs(fd).map_err(Error::system("looking at shared memory"))?.f_type;
    if kind as u64 != TMPFS {
        return Err(refused("the shared memory is not of ordinary pages"));
    }
    let whole_pages = bytes > 0 && bytes.is_multiple_of(rustix::param::page_size() as u64);
    let len = usize::try_from(bytes).ok().filter(|_| whole_pages);
    let len = len.ok_or_else(|| refused_owned(format!("{bytes} bytes are not whole pages")))?;
    let memory =
        DmaMemory::map_shared(fd, 0, len).map_err(Error::system("mapping shared memory"))?;
    rustix::fs::fcntl_add_seals(fd.as_fd(), SEALS).map_err(|e| {
        refused_owned(format!(
            "the shared memory cannot be sealed ({e}): it must be a memfd that allows sealing, and \
             the NIC's process sets the seals"
        ))
    })?;
    let size = rustix::fs::fstat(fd).map_err(Error::system("looking at shared memory"))?.st_size;
    if bytes != size as u64 {
        return Err(refused_owned(format!(
            "{bytes} bytes of shared memory that has {size}; it is shared whole"
        )));
    }
    let hole = rustix::fs::seek(fd, SeekFrom::Hole(0))
        .map_err(Error::system("looking for holes in shared memory"))?;
    if hole < bytes {
        return Err(refused_owned(format!(
            "the shared memory has no page at {hole}: write every page, or have it populated, before \
             it is shared"
        )));
    }
    Ok(memory)
}

fn refused(what: &str) -> Error {
    refused_owned(what.to_string())
}

fn refused_owned(what: String) -> Error {
    Error::Protocol { what }
}
