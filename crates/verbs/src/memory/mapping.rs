//! Memory mappings of this process, and discarding of their pages.

use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

/// A mapping of this process, unmapped when dropped.
pub(super) struct Mapping {
    pub base: *mut u8,
    pub len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: no method accesses the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` zeroed private bytes, rounded up to pages.
    pub fn anonymous(len: usize) -> Result<Self, Errno> {
        Self::private(len, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Maps `len` zeroed private bytes, rounded up to pages, with the given rights.
    fn private(len: usize, rights: ProtFlags) -> Result<Self, Errno> {
        let len = page_multiple(len);
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), len, rights, MapFlags::PRIVATE | MapFlags::NORESERVE)?
        };
        Ok(Self { base: base.cast(), len })
    }

    /// Maps `len` bytes of `fd` from `offset`, rounded up to pages, shared with other processes.
    pub fn shared(fd: impl std::os::fd::AsFd, offset: u64, len: usize) -> Result<Self, Errno> {
        let len = page_multiple(len);
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                offset,
            )?
        };
        Ok(Self { base: base.cast(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping; all ranges over it hold this object. After an error
        // the pages would stay mapped, which is harmless.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

pub(super) fn page_multiple(len: usize) -> usize {
    len.max(1).next_multiple_of(page_size())
}

/// Maximum size in bytes of a transparent huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Thin-provisioned memory: a page occupies RAM from its first write until it is discarded.
pub(super) struct Thin {
    _map: Mapping,
    pub base: *mut u8,
    pub len: usize,
    /// Bytes at the start whose pages are never discarded.
    kept: usize,
    /// Advice by which the kernel discards pages.
    discards: Advice,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Thin {}
// SAFETY: `discard` is the only method that accesses the memory; the kernel orders it.
unsafe impl Sync for Thin {}

impl Thin {
    /// Maps `len` zeroed bytes, rounded up to pages. The caller uses them in units of `unit` bytes,
    /// at multiples of `unit`.
    ///
    /// Huge pages are enabled only if a unit is at least as large. Otherwise a huge page across
    /// several units would occupy RAM for units that were never written.
    pub fn new(len: usize, unit: usize, kept: usize) -> Result<Self, Errno> {
        let len = page_multiple(len);
        let kept = kept.next_multiple_of(page_size()).min(len);
        if unit >= HUGE_PAGE {
            let map = Mapping::anonymous(len + HUGE_PAGE)?;
            let base = map.base.wrapping_add(map.base.align_offset(HUGE_PAGE));
            return Ok(Self { _map: map, base, len, kept, discards: Advice::LinuxDontNeed });
        }
        let map = Mapping::anonymous(len)?;
        let base = map.base;
        if kept < len {
            // SAFETY: advice about huge pages changes no byte. A kernel without huge pages rejects
            // the advice, and does not need it.
            let _ = unsafe {
                madvise(base.wrapping_add(kept).cast(), len - kept, Advice::LinuxNoHugepage)
            };
        }
        Ok(Self { _map: map, base, len, kept, discards: Advice::LinuxDontNeed })
    }

    /// Maps `len` zeroed bytes, rounded up to pages, of a new memfd, and returns the memfd too. The
    /// size of the memfd is sealed: no process with the descriptor can make an access here fail.
    pub fn file(len: usize, kept: usize) -> Result<(Self, OwnedFd), Errno> {
        let len = page_multiple(len);
        let kept = kept.next_multiple_of(page_size()).min(len);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("granary-chunks", flags)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = Mapping::shared(&file, 0, len)?;
        let base = map.base;
        // The pages of a file belong to all its mappings: only removing them from the file frees
        // their RAM.
        Ok((Self { _map: map, base, len, kept, discards: Advice::LinuxRemove }, file))
    }

    /// Returns how many of the `len` bytes at `at` lie in the kept part, which is at the front.
    pub fn kept(&self, at: *mut u8, len: usize) -> usize {
        let offset = at as usize - self.base as usize;
        self.kept.saturating_sub(offset).min(len)
    }

    /// Zeroes `len` bytes at `at` by returning their pages to the kernel. Returns false and changes
    /// nothing if the bytes are not whole pages, if one of them is kept, or if the kernel refuses
    /// (as for locked memory).
    pub fn discard(&self, at: *mut u8, len: usize) -> bool {
        let whole = (at as usize).is_multiple_of(page_size()) && len.is_multiple_of(page_size());
        if !whole || len == 0 || self.kept(at, len) > 0 {
            return false;
        }
        // SAFETY: the range lies in the mapping (checked by the caller). `discards` suits the
        // mapping, so its pages read as zeros afterwards. No reference into it exists (see
        // `memory`).
        unsafe { madvise(at.cast(), len, self.discards).is_ok() }
    }
}

/// Length in bytes of [`zeros`].
pub(super) const ZEROS: usize = 1 << 30;

/// Returns the process's zero mapping: [`ZEROS`] read-only bytes, which therefore never change. It
/// occupies no RAM, because a read of an untouched page of private memory maps the kernel's shared
/// zero page.
pub(super) fn zeros() -> Result<*mut u8, Errno> {
    if let Some(map) = MAP.get() {
        return Ok(map.base);
    }
    let map = Mapping::private(ZEROS, ProtFlags::READ)?;
    Ok(MAP.get_or_init(|| map).base)
}

static MAP: OnceLock<Mapping> = OnceLock::new();

/// Returns whether the byte at `at` lies in the process's zero mapping.
#[inline]
pub(super) fn is_in_zeros(at: *const u8) -> bool {
    MAP.get().is_some_and(|map| (at as usize).wrapping_sub(map.base as usize) < ZEROS)
}
