//! `malloc` and its family for the program.
//!
//! From the end of the constructor on, mimalloc serves the program from the arena in the region.
//! The internal heap serves this library, and the program before that. [`early`] serves callers
//! before this library is relocated. `free` recognises the allocator by the block's address. A
//! block of none of these allocators came from the next allocator in the link order, and is passed
//! on to it.
//!
//! The exported functions are at the end.

use std::ffi::c_void;
use std::ptr::null_mut;

use libmimalloc_sys as mi;
use pager::sys::PAGE_BYTES;

use crate::direct::Next;
use crate::early::{self, set_errno};
use crate::reentrancy::{ReentrancyGuard, is_reentrant};
use crate::{heap, heapinfo};

/// Alignment of every block.
pub const ALIGN: usize = 16;

type Free = unsafe extern "C" fn(*mut c_void);
type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type UsableSize = unsafe extern "C" fn(*mut c_void) -> usize;

/// Returns true if mimalloc serves the calling thread. The order of the tests matters: before this
/// library is relocated, the first is false, and the second would read a thread-local variable.
fn paged() -> bool {
    crate::arena_is_open() && !is_reentrant()
}

fn or_no_memory(block: *mut c_void) -> *mut c_void {
    if block.is_null() {
        set_errno(libc::ENOMEM);
    }
    block
}

/// Returns true for a block of mimalloc. The rest of the region contains mappings and the program
/// break, where other allocators of the program have their blocks.
fn in_arena(block: *const c_void) -> bool {
    crate::paged_memory().is_some_and(|pager| pager.region().arena_contains(block as usize))
}

/// Allocates unpaged memory; returns null if there is none. `align` is a power of two.
fn unpaged(size: usize, align: usize) -> *mut c_void {
    if early::is_relocated() {
        heap::allocate(size, align).cast()
    } else {
        early::allocate(size, align).cast()
    }
}

unsafe extern "C" {
    /// Frees the blocks of a heap that other threads have freed. Returns false if one must wait.
    fn _mi_heap_delayed_free_partial(heap: *mut mi::mi_heap_t) -> bool;
}

/// Size in bytes from which an allocation first collects blocks that other threads have freed.
const COLLECT_FROM: usize = 64 << 10;

/// Frees blocks of the calling thread's heap that other threads have freed, before the thread
/// allocates `size` bytes.
///
/// mimalloc 2 collects them only in every hundredth allocation beyond its fast path. A thread whose
/// blocks of 1 MiB are freed by another thread, such as a video decoder, would have a hundred of
/// them. mimalloc alone handles small blocks. Costs one load if there is nothing to free.
fn collect_freed(size: usize) {
    if size >= COLLECT_FROM {
        // SAFETY: the calling thread's own heap, which `mi_heap_get_default` initialises.
        unsafe { _mi_heap_delayed_free_partial(mi::mi_heap_get_default()) };
    }
}

/// Allocates a block; returns null and sets `errno` if there is no memory.
pub fn allocate(size: usize) -> *mut c_void {
    if paged() {
        let _guard = ReentrancyGuard::new();
        collect_freed(size);
        // SAFETY: no precondition.
        return or_no_memory(heapinfo::allocated(unsafe { mi::mi_malloc(size) }));
    }
    or_no_memory(unpaged(size, ALIGN))
}

/// Allocates a block of zeros; returns null and sets `errno` if there is no memory.
pub fn allocate_zeros(count: usize, size: usize) -> *mut c_void {
    if paged() {
        let _guard = ReentrancyGuard::new();
        collect_freed(count.saturating_mul(size));
        // SAFETY: no precondition.
        return or_no_memory(heapinfo::allocated(unsafe { mi::mi_calloc(count, size) }));
    }
    let Some(bytes) = count.checked_mul(size) else { return or_no_memory(null_mut()) };
    let block = unpaged(bytes, ALIGN);
    // Early blocks are zeros already.
    if !block.is_null() && !early::contains(block.cast()) {
        // SAFETY: just allocated with this size.
        unsafe { block.cast::<u8>().write_bytes(0, bytes) };
    }
    or_no_memory(block)
}

/// Allocates a block with an alignment that is a power of two. Returns null and leaves `errno`
/// unchanged if there is no memory.
fn aligned(align: usize, size: usize) -> *mut c_void {
    if paged() {
        let _guard = ReentrancyGuard::new();
        collect_freed(size);
        // SAFETY: the alignment is a power of two.
        return heapinfo::allocated(unsafe { mi::mi_malloc_aligned(size, align) });
    }
    unpaged(size, align)
}

/// Allocates a block with at least this alignment; returns null and sets `errno` if there is no
/// memory.
pub fn allocate_aligned(align: usize, size: usize) -> *mut c_void {
    let align = align.max(1).checked_next_power_of_two();
    or_no_memory(align.map_or(null_mut(), |align| aligned(align, size)))
}

/// Frees a block. Leaves `errno` unchanged.
///
/// # Safety
/// As for free(3).
pub unsafe fn release(block: *mut c_void) {
    if block.is_null() || early::contains(block.cast()) {
        return;
    }
    // SAFETY: the calling thread's own variable.
    let errno = unsafe { *libc::__errno_location() };
    if heap::contains(block as usize) {
        // SAFETY: the program's block, in the internal heap.
        unsafe { heap::free(block.cast()) };
    } else if in_arena(block) {
        let _guard = ReentrancyGuard::new();
        // SAFETY: the program's block, in the arena.
        unsafe {
            heapinfo::freed(block);
            mi::mi_free(block);
        }
    } else {
        static NEXT: Next = Next::new(c"free");
        // SAFETY: the next definition has this type; the block is the program's and of another
        // allocator.
        NEXT.call(|next| unsafe { std::mem::transmute::<*mut c_void, Free>(next)(block) });
    }
    set_errno(errno);
}

/// Resizes a block in place, or moves it.
///
/// # Safety
/// As for realloc(3).
pub unsafe fn resize(block: *mut c_void, size: usize) -> *mut c_void {
    if block.is_null() {
        return allocate(size);
    }
    if early::contains(block.cast()) {
        let new = allocate(size);
        if !new.is_null() {
            // SAFETY: an early block with its size; the new block does not overlap it.
            unsafe {
                let bytes = early::size(block.cast()).min(size);
                early::copy(block.cast(), new.cast(), bytes);
            }
        }
        return new;
    }
    if in_arena(block) {
        let _guard = ReentrancyGuard::new();
        collect_freed(size);
        // SAFETY: the program's block, in the arena. A block that cannot be resized stays.
        unsafe {
            heapinfo::freed(block);
            let new = mi::mi_realloc(block, size);
            heapinfo::allocated(if new.is_null() { block } else { new });
            return or_no_memory(new);
        }
    }
    if !heap::contains(block as usize) {
        static NEXT: Next = Next::new(c"realloc");
        // SAFETY: the next definition has this type; the block is the program's and of another
        // allocator.
        return NEXT.call(|next| unsafe {
            std::mem::transmute::<*mut c_void, Realloc>(next)(block, size)
        });
    }
    let new = allocate(size);
    if !new.is_null() {
        // SAFETY: the program's block, in the internal heap; the new block does not overlap it.
        unsafe {
            let old_size = heap::size(block.cast());
            std::ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), old_size.min(size));
            heap::free(block.cast());
        }
    }
    new
}

/// Returns the usable bytes of a block; 0 for null.
///
/// # Safety
/// As for malloc_usable_size(3).
pub unsafe fn usable_size(block: *mut c_void) -> usize {
    if block.is_null() {
        0
    } else if early::contains(block.cast()) {
        // SAFETY: an early block.
        unsafe { early::size(block.cast()) }
    } else if heap::contains(block as usize) {
        // SAFETY: the program's block, in the internal heap.
        unsafe { heap::size(block.cast()) }
    } else if in_arena(block) {
        // SAFETY: the program's block, in the arena.
        unsafe { mi::mi_usable_size(block) }
    } else {
        static NEXT: Next = Next::new(c"malloc_usable_size");
        // SAFETY: the next definition has this type; the block is the program's and of another
        // allocator.
        NEXT.call(|next| unsafe { std::mem::transmute::<*mut c_void, UsableSize>(next)(block) })
    }
}

fn allocate_pages(size: usize) -> *mut c_void {
    match size.checked_next_multiple_of(PAGE_BYTES) {
        Some(size) => allocate_aligned(PAGE_BYTES, size),
        None => or_no_memory(null_mut()),
    }
}

/// Allocates as posix_memalign(3).
///
/// # Safety
/// `result` is valid for a write. It is not written if the function fails.
unsafe fn memalign_to(result: *mut *mut c_void, align: usize, size: usize) -> i32 {
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

fn allocate_exactly_aligned(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    or_no_memory(aligned(align, size))
}

/// Resizes as reallocarray(3).
///
/// # Safety
/// As for realloc(3).
unsafe fn resize_array(block: *mut c_void, count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: by the caller.
        Some(bytes) => unsafe { resize(block, bytes) },
        None => or_no_memory(null_mut()),
    }
}

/// Exports C functions, each of which is a single call.
macro_rules! export {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $call:expr;)*) => {$(
        /// The C function of this name.
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: by the caller.
            #[allow(unused_unsafe)]
            unsafe { $call }
        }
    )*};
}

// The functions of malloc(3) and of posix_memalign(3).
export! {
    malloc(size: usize) -> *mut c_void = allocate(size);
    calloc(count: usize, size: usize) -> *mut c_void = allocate_zeros(count, size);
    realloc(block: *mut c_void, size: usize) -> *mut c_void = resize(block, size);
    reallocarray(block: *mut c_void, count: usize, size: usize) -> *mut c_void
        = resize_array(block, count, size);
    free(block: *mut c_void) = release(block);
    posix_memalign(result: *mut *mut c_void, align: usize, size: usize) -> i32
        = memalign_to(result, align, size);
    aligned_alloc(align: usize, size: usize) -> *mut c_void
        = allocate_exactly_aligned(align, size);
    memalign(align: usize, size: usize) -> *mut c_void = allocate_aligned(align, size);
    valloc(size: usize) -> *mut c_void = allocate_aligned(PAGE_BYTES, size);
    pvalloc(size: usize) -> *mut c_void = allocate_pages(size);
    malloc_usable_size(block: *mut c_void) -> usize = usable_size(block);
}

// Other names: the C library's own, and those of C23.
export! {
    __libc_malloc(size: usize) -> *mut c_void = allocate(size);
    __libc_calloc(count: usize, size: usize) -> *mut c_void = allocate_zeros(count, size);
    __libc_realloc(block: *mut c_void, size: usize) -> *mut c_void = resize(block, size);
    __libc_memalign(align: usize, size: usize) -> *mut c_void = allocate_aligned(align, size);
    __libc_valloc(size: usize) -> *mut c_void = allocate_aligned(PAGE_BYTES, size);
    __libc_pvalloc(size: usize) -> *mut c_void = allocate_pages(size);
    __libc_free(block: *mut c_void) = release(block);
    cfree(block: *mut c_void) = release(block);
    free_sized(block: *mut c_void, _size: usize) = release(block);
    free_aligned_sized(block: *mut c_void, _align: usize, _size: usize) = release(block);
}

// The functions of tcmalloc's own interface that take a block. A program linked with a shared
// libtcmalloc mixes them with the functions above. Blocks of `tc_malloc` and `new` are tcmalloc's:
// these functions initialise tcmalloc, and it takes its memory from the paged break.
export! {
    tc_free(block: *mut c_void) = release(block);
    tc_free_sized(block: *mut c_void, _size: usize) = release(block);
    tc_cfree(block: *mut c_void) = release(block);
    tc_realloc(block: *mut c_void, size: usize) -> *mut c_void = resize(block, size);
    tc_malloc_size(block: *mut c_void) -> usize = usable_size(block);
    malloc_size(block: *mut c_void) -> usize = usable_size(block);
    MallocExtension_GetAllocatedSize(block: *mut c_void) -> usize = usable_size(block);
}
