//! An allocator for calls before the dynamic linker has relocated this library.
//!
//! The dynamic linker relocates one object after another, and calls the resolvers of their IFUNCs
//! meanwhile. A resolver that allocates enters this library before the addresses in the library's
//! global offset table are set; a call through one would jump to address 0. So code that runs then
//! calls no other library, not even for `memcpy` or `errno`, and no other crate, and reads no
//! thread-local variable. System calls go through [`system_call`], which is inlined. Only one
//! thread runs at that time.
//!
//! The blocks are allocated consecutively, each with its size in front, and are never reused.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicUsize, Ordering};

use pager::sys::system_call;

/// Bytes for all blocks together. Unused bytes cost only address space.
const BYTES: usize = 64 << 20;
const HEADER_BYTES: usize = 16;

#[repr(C, align(16))]
struct Memory(UnsafeCell<[u8; BYTES]>);

// SAFETY: `USED` gives each caller a separate part.
unsafe impl Sync for Memory {}

static MEMORY: Memory = Memory(UnsafeCell::new([0; BYTES]));
static USED: AtomicUsize = AtomicUsize::new(0);

struct Mark(*const Memory);

// SAFETY: the pointer is only compared, never dereferenced.
unsafe impl Sync for Mark {}

/// Contains the address of `MEMORY` once the dynamic linker has relocated this library.
static MARK: Mark = Mark(&raw const MEMORY);

/// Returns true once this library is relocated, so that it may use all its variables and call other
/// libraries.
pub fn is_relocated() -> bool {
    // SAFETY: a static variable. The read is volatile so that the compiler does not assume the
    // initial value.
    let mark = unsafe { (&raw const MARK.0).read_volatile() };
    mark == &raw const MEMORY
}

/// Sets the calling thread's `errno`, if this library can reach it.
pub fn set_errno(errno: i32) {
    if is_relocated() {
        // SAFETY: the calling thread's own variable.
        unsafe { *libc::__errno_location() = errno };
    }
}

/// Makes the program's system call and returns its result in the C library's form: -1 and `errno`
/// on failure.
///
/// # Safety
/// As for the system call.
pub unsafe fn kernel(number: c_long, arguments: [usize; 6]) -> c_int {
    // SAFETY: by the caller.
    match unsafe { system_call(number, arguments) } {
        Ok(result) => result as c_int,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Returns true if the block was allocated by [`allocate`].
pub fn contains(block: *const u8) -> bool {
    (block as usize).wrapping_sub(&raw const MEMORY as usize) < BYTES
}

/// Allocates a block of zeros; returns null if there is no room. `align` is a power of two.
pub fn allocate(size: usize, align: usize) -> *mut u8 {
    let base = &raw const MEMORY as usize;
    let align = align.max(HEADER_BYTES);
    let used = base + USED.load(Ordering::Relaxed);
    let Some(block) = used.wrapping_add(HEADER_BYTES).checked_next_multiple_of(align) else {
        return std::ptr::null_mut();
    };
    match block.checked_add(size) {
        Some(end) if end <= base + BYTES => {
            USED.store(end.next_multiple_of(HEADER_BYTES) - base, Ordering::Relaxed);
            // SAFETY: the header and the block lie in `MEMORY`, after all used bytes.
            unsafe {
                let block = MEMORY.0.get().cast::<u8>().add(block - base);
                block.sub(HEADER_BYTES).cast::<usize>().write(size);
                block
            }
        }
        _ => std::ptr::null_mut(),
    }
}

/// Returns the requested size of a block.
///
/// # Safety
/// `block` was allocated by [`allocate`].
pub unsafe fn size(block: *const u8) -> usize {
    // SAFETY: the header that `allocate` wrote.
    unsafe { block.sub(HEADER_BYTES).cast::<usize>().read() }
}

/// Copies bytes without the C library's `memcpy`.
///
/// # Safety
/// As for `copy_nonoverlapping`.
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    for at in 0..bytes {
        // SAFETY: by the caller. Volatile, so that the compiler does not replace the loop by a call
        // of `memcpy`.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
}
