//! Memory for callers that come before the dynamic linker has relocated this library.
//!
//! The dynamic linker relocates one object after another, and calls the resolvers of their IFUNCs
//! meanwhile. A resolver that allocates enters this library while the addresses in its global offset
//! table are not in place: a call through one ends at address 0. So no code that runs then calls
//! another library, not even for `memcpy` or `errno`, or another crate, and none reads a thread-local
//! variable. The kernel is reached by [`system_call`], which is inlined. One thread runs at that time.
//!
//! The blocks lie one behind the other, each with its size in front; none is used again.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicUsize, Ordering};

use pager::sys::system_call;

/// Bytes for all blocks together. Unused bytes cost address space only.
const BYTES: usize = 64 << 20;
const HEADER_BYTES: usize = 16;

#[repr(C, align(16))]
struct Memory(UnsafeCell<[u8; BYTES]>);

// SAFETY: `USED` gives each caller a part of its own.
unsafe impl Sync for Memory {}

static MEMORY: Memory = Memory(UnsafeCell::new([0; BYTES]));
static USED: AtomicUsize = AtomicUsize::new(0);

struct Mark(*const Memory);

// SAFETY: the pointer is compared and never followed.
unsafe impl Sync for Mark {}

/// Holds the address of `MEMORY` from the moment that the dynamic linker has relocated this library.
static MARK: Mark = Mark(&raw const MEMORY);

/// True once this library may use everything that is its own.
pub fn is_relocated() -> bool {
    // SAFETY: a static variable. The compiler must not take its initial value for granted.
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

/// The kernel's answer to the program's call, as the C library would give it.
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

/// True if the block came from [`allocate`].
pub fn contains(block: *const u8) -> bool {
    (block as usize).wrapping_sub(&raw const MEMORY as usize) < BYTES
}

/// A block of zeros; null if there is no room. `align` is a power of two.
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
            // SAFETY: the header and the block lie in `MEMORY`, behind all that was used.
            unsafe {
                let block = MEMORY.0.get().cast::<u8>().add(block - base);
                block.sub(HEADER_BYTES).cast::<usize>().write(size);
                block
            }
        }
        _ => std::ptr::null_mut(),
    }
}

/// The size that was asked for.
///
/// # Safety
/// `block` came from [`allocate`].
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
        // SAFETY: by the caller. Volatile, so that the compiler calls no `memcpy` for the loop.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
}
