//! Mappings of this process, and what the system does with their pages.

use std::ptr;
use std::sync::OnceLock;

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
// SAFETY: it has no method that touches the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` zeroed bytes of this process's own, rounded up to pages.
    pub fn anonymous(len: usize) -> Result<Self, Errno> {
        Self::private(len, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// `len` zeroed bytes of this process's own, rounded up to pages, with these rights.
    fn private(len: usize, rights: ProtFlags) -> Result<Self, Errno> {
        let len = page_multiple(len);
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), len, rights, MapFlags::PRIVATE | MapFlags::NORESERVE)?
        };
        Ok(Self { base: base.cast(), len })
    }

    /// `len` bytes of `fd` from `offset` on, rounded up to pages, shared with other processes.
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
        // SAFETY: this object owns the mapping; all spans over it have ended with it. An error
        // would leave the pages mapped, and wrong nothing.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

pub(super) fn page_multiple(len: usize) -> usize {
    len.max(1).next_multiple_of(page_size())
}

/// Bytes that a transparent huge page has at most.
const HUGE_PAGE: usize = 2 << 20;

/// Thin-provisioned memory: a page takes RAM from its first write until it is discarded.
pub(super) struct Thin {
    _map: Mapping,
    pub base: *mut u8,
    pub len: usize,
    /// Bytes at the start whose pages are never discarded.
    kept: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Thin {}
// SAFETY: `discard` is the one method that touches the memory; the system orders it.
unsafe impl Sync for Thin {}

impl Thin {
    /// `len` zeroed bytes, rounded up to pages, used in units of `unit` bytes at multiples of
    /// `unit`.
    ///
    /// A huge page that reached over several units would take RAM for units that nobody has
    /// written: the memory has huge pages only where a unit is as large.
    pub fn new(len: usize, unit: usize, kept: usize) -> Result<Self, Errno> {
        let len = page_multiple(len);
        let kept = kept.next_multiple_of(page_size()).min(len);
        if unit >= HUGE_PAGE {
            let map = Mapping::anonymous(len + HUGE_PAGE)?;
            let base = map.base.wrapping_add(map.base.align_offset(HUGE_PAGE));
            return Ok(Self { _map: map, base, len, kept });
        }
        let map = Mapping::anonymous(len)?;
        let base = map.base;
        if kept < len {
            // SAFETY: advice about huge pages changes no byte. A system without huge pages refuses
            // the advice, and needs none.
            let _ = unsafe {
                madvise(base.wrapping_add(kept).cast(), len - kept, Advice::LinuxNoHugepage)
            };
        }
        Ok(Self { _map: map, base, len, kept })
    }

    /// How many of the `len` bytes at `at` are kept: those at the front.
    pub fn kept(&self, at: *mut u8, len: usize) -> usize {
        let offset = at as usize - self.base as usize;
        self.kept.saturating_sub(offset).min(len)
    }

    /// Gives the pages of `len` bytes at `at`, within the memory, back to the system: the bytes are
    /// zero then. False, with nothing changed, where they are not whole pages, where one of them is
    /// kept, and where the system refuses (it does for locked memory).
    pub fn discard(&self, at: *mut u8, len: usize) -> bool {
        let whole = (at as usize).is_multiple_of(page_size()) && len.is_multiple_of(page_size());
        if !whole || len == 0 || self.kept(at, len) > 0 {
            return false;
        }
        // SAFETY: the range lies in the mapping (the caller's check), which is private and
        // anonymous: its pages read as zeros afterwards. No reference into it exists (see
        // `memory`).
        unsafe { madvise(at.cast(), len, Advice::LinuxDontNeed).is_ok() }
    }
}

/// Bytes of [`zeros`].
pub(super) const ZEROS: usize = 1 << 30;

/// The process's zeros: [`ZEROS`] bytes that cannot be written, so that they never change. They
/// take no RAM: reading an untouched page of private memory shows the system's one page of zeros.
pub(super) fn zeros() -> Result<*mut u8, Errno> {
    if let Some(map) = MAP.get() {
        return Ok(map.base);
    }
    let map = Mapping::private(ZEROS, ProtFlags::READ)?;
    Ok(MAP.get_or_init(|| map).base)
}

static MAP: OnceLock<Mapping> = OnceLock::new();

/// Whether the byte at `at` lies in the process's zeros.
#[inline]
pub(super) fn is_in_zeros(at: *const u8) -> bool {
    MAP.get().is_some_and(|map| (at as usize).wrapping_sub(map.base as usize) < ZEROS)
}
