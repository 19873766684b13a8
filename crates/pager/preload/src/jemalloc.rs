//! jemalloc's own functions (`mallocx` and its relatives), implemented by this library's allocator.
//!
//! A program linked with a shared libjemalloc mixes them with malloc and free: it calls `sdallocx`
//! on a block of `malloc`, and `free` on a block of `mallocx`. Because `malloc` is this library's,
//! all of these functions must be too. Arenas and thread caches, which a caller may name, are
//! ignored.

use std::ffi::{c_int, c_void};

use libmimalloc_sys as mi;

use crate::malloc::{self, ALIGN};

/// Mask of the lowest bits of `flags`: log2 of the alignment.
const LG_ALIGN: c_int = 63;
/// Flag: bytes that the caller did not have before are zero.
const ZERO: c_int = 64;

fn align_of(flags: c_int) -> usize {
    1 << (flags & LG_ALIGN)
}

/// Zeroes the bytes of a block after the first `old` bytes.
///
/// # Safety
/// The block was allocated by this library.
unsafe fn clear_behind(block: *mut c_void, old: usize) {
    // SAFETY: by the caller.
    let size = unsafe { malloc::usable_size(block) };
    if size > old {
        // SAFETY: inside the block.
        unsafe { block.cast::<u8>().add(old).write_bytes(0, size - old) };
    }
}

fn allocate(size: usize, flags: c_int) -> *mut c_void {
    let align = align_of(flags);
    let zero = flags & ZERO != 0;
    if align <= ALIGN {
        return if zero { malloc::allocate_zeros(1, size) } else { malloc::allocate(size) };
    }
    let block = malloc::allocate_aligned(align, size);
    if zero && !block.is_null() {
        // SAFETY: just allocated.
        unsafe { clear_behind(block, 0) };
    }
    block
}

/// mallocx(3).
#[unsafe(no_mangle)]
pub extern "C" fn mallocx(size: usize, flags: c_int) -> *mut c_void {
    allocate(size, flags)
}

/// rallocx(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rallocx(block: *mut c_void, size: usize, flags: c_int) -> *mut c_void {
    // SAFETY: the caller's block; the new one is large enough for the copied bytes.
    unsafe {
        let old = malloc::usable_size(block);
        let new = if align_of(flags) <= ALIGN {
            malloc::resize(block, size)
        } else {
            let new = allocate(size, flags & !ZERO);
            if !new.is_null() {
                std::ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), old.min(size));
                malloc::release(block);
            }
            new
        };
        if flags & ZERO != 0 && !new.is_null() {
            clear_behind(new, old.min(size));
        }
        new
    }
}

/// xallocx(3). Never resizes a block, which the interface permits.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xallocx(block: *mut c_void, _: usize, _: usize, _: c_int) -> usize {
    // SAFETY: by the caller.
    unsafe { malloc::usable_size(block) }
}

/// sallocx(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sallocx(block: *mut c_void, _: c_int) -> usize {
    // SAFETY: by the caller.
    unsafe { malloc::usable_size(block) }
}

/// dallocx(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dallocx(block: *mut c_void, _: c_int) {
    // SAFETY: by the caller.
    unsafe { malloc::release(block) };
}

/// sdallocx(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdallocx(block: *mut c_void, _: usize, _: c_int) {
    // SAFETY: by the caller.
    unsafe { malloc::release(block) };
}

/// nallocx(3): at least the usable size that [`mallocx`] provides.
#[unsafe(no_mangle)]
pub extern "C" fn nallocx(size: usize, flags: c_int) -> usize {
    let align = align_of(flags).max(ALIGN);
    // SAFETY: no precondition.
    size.checked_next_multiple_of(align).map_or(0, |size| unsafe { mi::mi_good_size(size) })
}
