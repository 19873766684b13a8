//! `mallinfo`, `malloc_info`, `malloc_stats` and `malloc_trim`: the state of the program's heap.
//!
//! Each thread counts the bytes that it allocates and frees in a slot of its own, without an atomic
//! read-modify-write operation. The sum of all slots is the memory in use: blocks may be freed by
//! other threads than those that allocated them. The slots of ended threads keep their value.
//!
//! mimalloc lists the pages of the calling thread's heap only. So the free bytes are those of the
//! calling thread, and the bytes from the system are the sum of both.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

use libmimalloc_sys as mi;

use crate::early::set_errno;
use crate::reentrancy::ReentrancyGuard;

/// Number of slots. The last one is shared by all threads that start when the others are taken.
const SLOTS: usize = 4096;

#[repr(align(64))]
struct Slot(AtomicIsize);

static ALL: [Slot; SLOTS] = [const { Slot(AtomicIsize::new(0)) }; SLOTS];
static TAKEN: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    /// Returns the calling thread's variable for the number of its slot, from 1 on; 0 is none.
    safe fn granary_slot() -> *mut i32;
}

fn count(bytes: isize) {
    let variable = granary_slot();
    // SAFETY: the calling thread's own variable.
    let mut slot = unsafe { *variable } as usize;
    if slot == 0 {
        slot = TAKEN.fetch_add(1, Ordering::Relaxed).min(SLOTS - 1) + 1;
        // SAFETY: as above.
        unsafe { *variable = slot as i32 };
    }
    let Slot(sum) = &ALL[slot - 1];
    if slot == SLOTS {
        sum.fetch_add(bytes, Ordering::Relaxed);
    } else {
        sum.store(sum.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
    }
}

/// Counts a block of mimalloc that was just allocated, and returns it.
pub fn allocated(block: *mut c_void) -> *mut c_void {
    if !block.is_null() {
        // SAFETY: a block of mimalloc.
        count(unsafe { mi::mi_usable_size(block) } as isize);
    }
    block
}

/// Counts a block of mimalloc that is about to be freed.
///
/// # Safety
/// The block is one of mimalloc's.
pub unsafe fn freed(block: *mut c_void) {
    // SAFETY: by the caller.
    count(-(unsafe { mi::mi_usable_size(block) } as isize));
}

/// Bytes of the program's heap.
#[derive(Clone, Copy)]
struct Heap {
    /// In blocks of the program.
    used: usize,
    /// In pages of the calling thread's heap, outside of blocks.
    free: usize,
}

impl Heap {
    fn now() -> Self {
        let slots = &ALL[..TAKEN.load(Ordering::Relaxed).min(SLOTS)];
        let used = slots.iter().map(|Slot(sum)| sum.load(Ordering::Relaxed)).sum::<isize>();
        Self { used: used.max(0) as usize, free: free_bytes() }
    }

    fn total(self) -> usize {
        self.used + self.free
    }
}

unsafe extern "C" fn add_free(
    _: *const mi::mi_heap_t,
    area: *const mi::mi_heap_area_t,
    _: *mut c_void,
    _: usize,
    sum: *mut c_void,
) -> bool {
    // SAFETY: mimalloc passes a valid area, and the pointer of `free_bytes`.
    let (area, sum) = unsafe { (&*area, &mut *sum.cast::<usize>()) };
    *sum += area.committed.saturating_sub(area.used * area.full_block_size);
    true
}

fn free_bytes() -> usize {
    let mut sum = 0usize;
    if crate::arena_is_open() {
        let _guard = ReentrancyGuard::new();
        // SAFETY: the calling thread's own heap; `sum` outlives the call.
        unsafe {
            let heap = mi::mi_heap_get_default();
            mi::mi_heap_visit_blocks(heap, false, Some(add_free), (&raw mut sum).cast());
        }
    }
    sum
}

/// `struct mallinfo2` of mallinfo(3), or with `c_int`, `struct mallinfo`.
#[repr(C)]
#[derive(Default)]
pub struct Info<T> {
    arena: T,
    ordblks: T,
    smblks: T,
    hblks: T,
    hblkhd: T,
    usmblks: T,
    fsmblks: T,
    uordblks: T,
    fordblks: T,
    keepcost: T,
}

fn info<T: Default>(convert: impl Fn(usize) -> T) -> Info<T> {
    let heap = Heap::now();
    Info {
        arena: convert(heap.total()),
        uordblks: convert(heap.used),
        fordblks: convert(heap.free),
        ..Info::default()
    }
}

/// mallinfo2(3).
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo2() -> Info<usize> {
    info(|bytes| bytes)
}

/// mallinfo(3). Numbers that are too large for the type are its maximum.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo() -> Info<c_int> {
    info(|bytes| bytes.try_into().unwrap_or(c_int::MAX))
}

/// malloc_info(3), with the elements that glibc writes.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_info(options: c_int, stream: *mut libc::FILE) -> c_int {
    if options != 0 {
        return libc::EINVAL;
    }
    let heap = Heap::now();
    let text = {
        let _guard = ReentrancyGuard::new();
        let (free, total) = (heap.free, heap.total());
        let sums = format!(
            "<total type=\"fast\" count=\"0\" size=\"0\"/>\n\
             <total type=\"rest\" count=\"0\" size=\"{free}\"/>\n"
        );
        let system = format!(
            "<system type=\"current\" size=\"{total}\"/>\n\
             <system type=\"max\" size=\"{total}\"/>\n\
             <aspace type=\"total\" size=\"{total}\"/>\n\
             <aspace type=\"mprotect\" size=\"{total}\"/>\n"
        );
        CString::new(format!(
            "<malloc version=\"1\">\n<heap nr=\"0\">\n<sizes>\n</sizes>\n{sums}{system}</heap>\n\
             {sums}<total type=\"mmap\" count=\"0\" size=\"0\"/>\n{system}</malloc>\n"
        ))
        .expect("no zero bytes")
    };
    // Without the guard: the stream's buffer is the program's memory.
    // SAFETY: the program's stream, and a C string.
    let written = unsafe { libc::fputs(text.as_ptr().cast::<c_char>(), stream) };
    let _guard = ReentrancyGuard::new();
    drop(text);
    if written < 0 { -1 } else { 0 }
}

/// malloc_stats(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc_stats() {
    let heap = Heap::now();
    let _guard = ReentrancyGuard::new();
    let sums =
        format!("system bytes     = {:>10}\nin use bytes     = {:>10}\n", heap.total(), heap.used);
    let text = format!(
        "Arena 0:\n{sums}Total (incl. mmap):\n{sums}max mmap regions = {:>10}\n\
         max mmap bytes   = {:>10}\n",
        0, 0
    );
    // SAFETY: the text is valid for the read.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// malloc_trim(3): gives free pages of the calling thread's heap back. Returns 1 if there were any.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_keep: usize) -> c_int {
    // SAFETY: the calling thread's own variable.
    let errno = unsafe { *libc::__errno_location() };
    let before = free_bytes();
    if crate::arena_is_open() {
        let _guard = ReentrancyGuard::new();
        // SAFETY: no precondition.
        unsafe { mi::mi_collect(true) };
    }
    set_errno(errno);
    c_int::from(free_bytes() < before)
}
