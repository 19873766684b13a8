//! Memory that a client shares with the NIC of another process: allocation by the client,
//! acceptance by the host.
//!
//! The client keeps the memory and may write any bytes into it at any time. The client must not be
//! able to make an *access* by the NIC fail, block, or cost memory of the NIC's process. So the
//! host accepts memory only if
//!
//! - it is a memfd of ordinary pages (no other file can be sealed, and huge pages can run out);
//! - the NIC's process can map it for reading and writing;
//! - it is sealed against shrinking (an access to a page beyond the end raises SIGBUS), growing,
//!   and *writing through new mappings*: with the last seal Linux also refuses to punch holes. The
//!   host sets the seals itself, after both sides have mapped the memory;
//! - it then has no hole. The first access to a hole allocates a page that is charged to the NIC's
//!   process, or raises SIGBUS if memory is short.
//!
//! The host checks size and holes after it has set the seals, when they can no longer change. Pages
//! may still be swapped out: on a machine with swap the NIC can block on the disk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::Advice;

use super::super::error::Error;
use verbs::DmaMemory;

/// `f_type` of the file system of ordinary shared memory (`TMPFS_MAGIC`). Huge pages have another
/// file system, and an access to them can fail when no huge page is left.
const TMPFS: u64 = 0x0102_1994;

/// The seals: afterwards only the bytes can change, and only through existing mappings.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Allocates `bytes` of shared memory, rounded up to pages and fully populated. Returns its mapping
/// and a descriptor for the NIC's process. The host seals the memory; after that no new writable
/// mapping is possible.
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

/// Allocates all pages. If memory is short, this fails with an error, where a later access would
/// raise a signal.
fn populate(memory: &DmaMemory) -> Result<(), Errno> {
    // SAFETY: this advice does not change the contents of the mapping.
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

/// Maps a whole memfd of another process, at most `most` bytes, before the NIC's process seals it.
/// The size is sealed first, so that an access to the mapping cannot fail because the other
/// process shrinks the memfd.
pub(super) fn borrow(fd: &OwnedFd, most: u64) -> Result<DmaMemory, Error> {
    let seals = check_kind(fd)?;
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(refused(
            "the lent memory is sealed: the borrower must map it before its owner attaches",
        ));
    }
    let fixed_size = SealFlags::SHRINK | SealFlags::GROW;
    if !seals.contains(fixed_size) {
        rustix::fs::fcntl_add_seals(fd.as_fd(), fixed_size)
            .map_err(|e| refused_owned(format!("the lent memory cannot be sealed ({e})")))?;
    }
    let size = rustix::fs::fstat(fd).map_err(Error::system("examining lent memory"))?.st_size;
    let whole_pages = size > 0 && (size as u64).is_multiple_of(rustix::param::page_size() as u64);
    if !whole_pages || size as u64 > most {
        return Err(refused_owned(format!(
            "lent memory of {size} bytes; possible are whole pages, up to {most} bytes"
        )));
    }
    DmaMemory::map_shared(fd, 0, size as usize).map_err(Error::system("mapping lent memory"))
}

/// Returns the seals of a memfd of ordinary pages, and an error for any other file.
fn check_kind(fd: &OwnedFd) -> Result<SealFlags, Error> {
    // The first check, because it fails for other files without accessing them.
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|_| refused("the descriptor does not refer to sealable shared memory (memfd)"))?;
    let kind = rustix::fs::fstatfs(fd).map_err(Error::system("examining shared memory"))?.f_type;
    if kind as u64 != TMPFS {
        return Err(refused("the shared memory must have ordinary pages, not huge pages"));
    }
    Ok(seals)
}

/// Maps and seals `bytes` of memory that a client sent. Fails if an access to the memory could
/// fail.
pub(super) fn adopt(fd: &OwnedFd, bytes: u64) -> Result<DmaMemory, Error> {
    check_kind(fd)?;
    let whole_pages = bytes > 0 && bytes.is_multiple_of(rustix::param::page_size() as u64);
    let len = usize::try_from(bytes).ok().filter(|_| whole_pages);
    let len = len.ok_or_else(|| {
        refused_owned(format!("the size of shared memory must be whole pages, not {bytes} bytes"))
    })?;
    let memory =
        DmaMemory::map_shared(fd, 0, len).map_err(Error::system("mapping shared memory"))?;
    rustix::fs::fcntl_add_seals(fd.as_fd(), SEALS).map_err(|e| {
        refused_owned(format!(
            "the shared memory cannot be sealed ({e}): create the memfd with MFD_ALLOW_SEALING and \
             set no seals"
        ))
    })?;
    let size = rustix::fs::fstat(fd).map_err(Error::system("examining shared memory"))?.st_size;
    if bytes != size as u64 {
        return Err(refused_owned(format!(
            "the request names {bytes} bytes of shared memory, but the memfd has {size}; share the \
             whole memfd"
        )));
    }
    let hole = rustix::fs::seek(fd, SeekFrom::Hole(0))
        .map_err(Error::system("searching for holes in shared memory"))?;
    if hole < bytes {
        return Err(refused_owned(format!(
            "the shared memory has no page at {hole}: write or populate every page before sharing \
             it"
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
