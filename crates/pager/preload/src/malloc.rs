//! `malloc` and its family, as the program sees them.
//!
//! Outside the library and once it is initialised, mimalloc serves them from the arena in the region.
//! Inside and before, the internal heap does. `free` goes by the address.

use std::ffi::c_void;
use std::ptr::null_mut;

use libmimalloc_sys as mi;
use pager::sys::PAGE_BYTES;

use crate::heap;
use crate::inside::{Inside, is_inside};

fn paged() -> bool {
    !is_inside() && crate::arena_is_open()
}

fn set_errno(errno: i32) {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() = errno };
}

fn or_no_memory(block: *mut c_void) -> *mut c_void {
    if block.is_null() {
        set_errno(libc::ENOMEM);
    }
    block
}

fn in_arena(block: *const c_void) -> bool {
    crate::pager().is_some_and(|pager| pager.region().contains(block as usize))
}

/// malloc(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    if paged() {
        let _inside = Inside::new();
        // SAFETY: no precondition.
        return or_no_memory(unsafe { mi::mi_malloc(size) });
    }
    or_no_memory(heap::allocate(size, 16).cast())
}

/// calloc(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    if paged() {
        let _inside = Inside::new();
        // SAFETY: no precondition.
        return or_no_memory(unsafe { mi::mi_calloc(count, size) });
    }
    let Some(bytes) = count.checked_mul(size) else { return or_no_memory(null_mut()) };
    let block = heap::allocate(bytes, 16);
    if !block.is_null() {
        // SAFETY: just allocated with this size.
        unsafe { block.write_bytes(0, bytes) };
    }
    or_no_memory(block.cast())
}

/// free(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    if block.is_null() {
        return;
    }
    // SAFETY: the calling thread's own variable; free(3) leaves errno alone.
    let errno = unsafe { *libc::__errno_location() };
    if heap::contains(block as usize) {
        // SAFETY: the program's block, in the internal heap.
        unsafe { heap::free(block.cast()) };
    } else if in_arena(block) {
        let _inside = Inside::new();
        // SAFETY: the program's block, in the arena.
        unsafe { mi::mi_free(block) };
    }
    // Anything else came from the dynamic linker's own allocator, which never takes it back.
    set_errno(errno);
}

/// realloc(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    if block.is_null() {
        // SAFETY: as malloc.
        return unsafe { malloc(size) };
    }
    if in_arena(block) {
        let _inside = Inside::new();
        // SAFETY: the program's block, in the arena.
        return or_no_memory(unsafe { mi::mi_realloc(block, size) });
    }
    if !heap::contains(block as usize) {
        // The dynamic linker's: its size is not known, so nothing can be copied.
        return or_no_memory(null_mut());
    }
    // SAFETY: the program's block, in the internal heap; the new one may be in either.
    unsafe {
        let new = malloc(size);
        if !new.is_null() {
            let old_size = heap::size(block.cast());
            std::ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), old_size.min(size));
            heap::free(block.cast());
        }
        new
    }
}

/// reallocarray(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(
    block: *mut c_void,
    count: usize,
    size: usize,
) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: as realloc.
        Some(bytes) => unsafe { realloc(block, bytes) },
        None => or_no_memory(null_mut()),
    }
}

fn aligned(align: usize, size: usize) -> *mut c_void {
    if paged() {
        let _inside = Inside::new();
        // SAFETY: the alignment is a power of two.
        return unsafe { mi::mi_malloc_aligned(size, align) };
    }
    heap::allocate(size, align).cast()
}

/// posix_memalign(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    result: *mut *mut c_void,
    align: usize,
    size: usize,
) -> i32 {
    if !align.is_power_of_two() || align < size_of::<usize>() {
        return libc::EINVAL;
    }
    let block = aligned(align, size);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's variable.
    unsafe { result.write(block) };
    0
}

/// aligned_alloc(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    or_no_memory(aligned(align, size))
}

/// memalign(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    match align.max(1).checked_next_power_of_two() {
        Some(align) => or_no_memory(aligned(align, size)),
        None => or_no_memory(null_mut()),
    }
}

/// valloc(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    or_no_memory(aligned(PAGE_BYTES, size))
}

/// pvalloc(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    match size.checked_next_multiple_of(PAGE_BYTES) {
        Some(size) => or_no_memory(aligned(PAGE_BYTES, size)),
        None => or_no_memory(null_mut()),
    }
}

/// malloc_usable_size(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    if block.is_null() {
        0
    } else if heap::contains(block as usize) {
        // SAFETY: the program's block, in the internal heap.
        unsafe { heap::size(block.cast()) }
    } else if in_arena(block) {
        // SAFETY: the program's block, in the arena.
        unsafe { mi::mi_usable_size(block) }
    } else {
        0
    }
}
