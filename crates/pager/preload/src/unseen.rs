//! Memory of a child that was made by a system call past this library
//! ([`pager::fork::unseen`]).
//!
//! Where the kernel reports forks, granary-keeper serves the pages that the child has inherited.
//! The child has no thread of a pager, and only a copy of the pager's state, so its mappings are
//! the kernel's. Two calls on inherited memory would give wrong data then: the keeper would bring
//! dropped pages back, and pages that are missing would read as zeros at another address.
//! Where the kernel reports no forks, the child has no inherited memory, and ends at its first
//! access ([`crate::segv`]).

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use pager::config::EXIT_PAGER;
use pager::fork::unseen::is_unseen_child;
use pager::sys::{self, system_call};

use crate::reentrancy::ReentrancyGuard;
use crate::{early, heap, paged_memory};

/// Linux 5.18; not in all versions of the `libc` crate for all C libraries.
const MADV_DONTNEED_LOCKED: c_int = 24;

/// Returns true in such a child. At its first call, the child gets a heap of its own for this
/// library: a thread of its parent may have held the lock of the old one.
pub fn is_this_process() -> bool {
    if !is_unseen_child() {
        return false;
    }
    note();
    true
}

#[cold]
fn note() {
    static NOTED: AtomicI32 = AtomicI32::new(0);
    let id = std::process::id() as i32;
    if NOTED.swap(id, Ordering::AcqRel) != id {
        heap::renew_in_child();
    }
}

/// Returns true in such a child for memory that was paged in its parent.
pub fn is_inherited(address: usize, len: usize) -> bool {
    let overlaps = |pager: &pager::Pager| pager.region().overlaps(address, len);
    early::is_relocated() && is_this_process() && paged_memory().is_some_and(overlaps)
}

/// Does madvise(2) on inherited memory. `None` if the kernel can do it.
pub fn advise(address: usize, len: usize, advice: c_int) -> Option<Result<(), i32>> {
    match advice {
        libc::MADV_DONTNEED | libc::MADV_REMOVE | MADV_DONTNEED_LOCKED | libc::MADV_FREE => {}
        _ => return None,
    }
    if !is_inherited(address, len) {
        return None;
    }
    // The old content may stay.
    if advice == libc::MADV_FREE {
        return Some(Ok(()));
    }
    let ends_in_arena = |pager: &pager::Pager| {
        let region = pager.region();
        region.arena_contains(address) && region.arena_contains(address + len - 1)
    };
    if !paged_memory().is_some_and(ends_in_arena) {
        refuse("drops pages (madvise)");
    }
    let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let arguments = [address, len, access, flags as usize, usize::MAX, 0];
    // SAFETY: the program drops these pages; the whole arena has this access.
    Some(unsafe { system_call(libc::SYS_mmap, arguments) }.map(drop))
}

/// Ends the process if mremap(2) would move inherited memory.
pub fn check_remap(address: usize, len: usize) {
    if is_inherited(address, len.max(1)) {
        refuse("moves pages (mremap)");
    }
}

/// Ends the process because it does what such a child cannot do.
pub fn refuse(what: &str) -> ! {
    let _guard = ReentrancyGuard::new();
    sys::die(
        EXIT_PAGER,
        &format!(
            "process {}, which was made by a system call past libc, {what} of its parent, so it \
             ends now (status {EXIT_PAGER}): otherwise it could read wrong data; let the program \
             use fork, clone or syscall of libc",
            std::process::id()
        ),
    )
}
