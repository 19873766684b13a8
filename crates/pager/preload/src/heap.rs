//! The internal heap: memory for the library itself, never paged.
//!
//! It is dlmalloc over one reserved range, so that `free` can recognise its blocks by their
//! address. It also serves allocations that libc makes for the library, and the program's
//! allocations before the library is initialised. Blocks for C code store their size and alignment
//! in front:
//!
//! ```text
//!    ... padding | size (8) | alignment (8) | block, aligned ...
//! ```

use std::alloc::{GlobalAlloc, Layout};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use dlmalloc::Dlmalloc;
use pager::config::EXIT_PAGER;
use pager::sys::{self, PAGE_BYTES, SignalsBlocked};

/// Bytes of address space for the heap.
const RANGE_BYTES: usize = 4 << 30;
const HEADER_BYTES: usize = 16;

static BASE: AtomicUsize = AtomicUsize::new(0);
static USED: AtomicUsize = AtomicUsize::new(0);

/// Ends the process because the heap cannot be reserved. The message is a constant, because the
/// heap is locked and formatting allocates.
fn no_room() -> ! {
    const TEXT: &str = "granary: cannot reserve 4 GiB of address space for the pager: RLIMIT_AS \
                        and RLIMIT_DATA (ulimit -v and -d) must be unlimited before a paged \
                        program starts\n";
    loop {
        // SAFETY: the text is valid for the read; exit_group does not return.
        unsafe {
            libc::syscall(libc::SYS_write, 2, TEXT.as_ptr(), TEXT.len());
            libc::syscall(libc::SYS_exit_group, EXIT_PAGER);
        }
    }
}

struct Range;

// SAFETY: returns disjoint parts of a range that stays mapped, each only once.
unsafe impl dlmalloc::Allocator for Range {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let none = (std::ptr::null_mut(), 0, 0);
        let size = size.next_multiple_of(PAGE_BYTES);
        // The caller holds the heap's lock, so only one thread maps the range.
        if BASE.load(Ordering::Acquire) == 0 {
            match sys::map_anonymous(RANGE_BYTES) {
                Ok(base) => BASE.store(base, Ordering::Release),
                Err(_) => no_room(),
            }
        }
        let at = USED.load(Ordering::Relaxed);
        if at + size > RANGE_BYTES {
            return none;
        }
        USED.store(at + size, Ordering::Relaxed);
        ((BASE.load(Ordering::Relaxed) + at) as *mut u8, size, 0)
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, _: *mut u8, _: usize, _: usize) -> bool {
        false
    }

    fn free(&self, _: *mut u8, _: usize) -> bool {
        false
    }

    fn can_release_part(&self, _: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE_BYTES
    }
}

/// Maximum number of forks in a chain. Each forked child uses a new heap, because the lock of the
/// previous heap may be held by a thread that does not exist in the child.
const GENERATIONS: usize = 1024;
static HEAPS: [Mutex<Dlmalloc<Range>>; GENERATIONS] =
    [const { Mutex::new(Dlmalloc::new_with_allocator(Range)) }; GENERATIONS];
static GENERATION: AtomicUsize = AtomicUsize::new(0);
/// Bytes of the range that were used by heaps of earlier generations.
static INHERITED: AtomicUsize = AtomicUsize::new(0);

fn with_heap<T>(run: impl FnOnce(&mut Dlmalloc<Range>) -> T) -> T {
    match HEAPS[GENERATION.load(Ordering::Acquire)].lock() {
        Ok(mut heap) => run(&mut heap),
        Err(poisoned) => run(&mut poisoned.into_inner()),
    }
}

/// In a forked child: switches to a new heap. Blocks of earlier heaps are never reused.
pub fn renew_in_child() {
    let next = GENERATION.load(Ordering::Acquire) + 1;
    if next == GENERATIONS {
        sys::die(
            pager::config::EXIT_PAGER,
            "cannot continue after 1023 nested forks without exec: each forked child needs a heap \
             of its own, and there are no more; the process ends now",
        );
    }
    INHERITED.store(USED.load(Ordering::Acquire), Ordering::Release);
    GENERATION.store(next, Ordering::Release);
}

fn is_inherited(block: *mut u8) -> bool {
    (block as usize) < BASE.load(Ordering::Acquire) + INHERITED.load(Ordering::Acquire)
}

/// Returns true if the address is in the heap.
pub fn contains(address: usize) -> bool {
    let base = BASE.load(Ordering::Acquire);
    base != 0 && address.wrapping_sub(base) < RANGE_BYTES
}

/// Allocates a block for C code; returns null if there is no memory. `align` is a power of two.
pub fn allocate(size: usize, align: usize) -> *mut u8 {
    let align = align.max(HEADER_BYTES);
    let Some(total) = size.checked_add(align) else { return std::ptr::null_mut() };
    let _blocked = SignalsBlocked::new();
    // SAFETY: a non-zero size and a power of two.
    let start = with_heap(|heap| unsafe { heap.malloc(total, align) });
    if start.is_null() {
        return start;
    }
    // SAFETY: `align` is at least the header's size, so both words lie before the block, inside the
    // allocation.
    unsafe {
        let block = start.add(align);
        block.sub(HEADER_BYTES).cast::<usize>().write(size);
        block.sub(HEADER_BYTES / 2).cast::<usize>().write(align);
        block
    }
}

/// Returns the requested size of a block.
///
/// # Safety
/// `block` was allocated by [`allocate`] and was not freed.
pub unsafe fn size(block: *mut u8) -> usize {
    // SAFETY: the header that `allocate` wrote.
    unsafe { block.sub(HEADER_BYTES).cast::<usize>().read() }
}

/// Frees a block.
///
/// # Safety
/// `block` was allocated by [`allocate`] and was not freed.
pub unsafe fn free(block: *mut u8) {
    if is_inherited(block) {
        return;
    }
    let _blocked = SignalsBlocked::new();
    // SAFETY: the header that `allocate` wrote, and the allocation that contains it.
    unsafe {
        let size = size(block);
        let align = block.sub(HEADER_BYTES / 2).cast::<usize>().read();
        with_heap(|heap| heap.free(block.sub(align), size + align, align));
    }
}

/// The allocator of the library's Rust code.
pub struct Internal;

// SAFETY: dlmalloc's guarantees, under a lock.
unsafe impl GlobalAlloc for Internal {
    // SAFETY: the caller fulfils the trait's contract.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the layout is valid by the trait's contract.
        with_heap(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }

    // SAFETY: the caller fulfils the trait's contract.
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !is_inherited(block) {
            // SAFETY: the block was allocated by `alloc` with this layout.
            with_heap(|heap| unsafe { heap.free(block, layout.size(), layout.align()) });
        }
    }

    // SAFETY: the caller fulfils the trait's contract.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_inherited(block) {
            // SAFETY: a valid size with the alignment of a valid layout; the new block is large
            // enough for the copied bytes.
            unsafe {
                let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
                if !new.is_null() {
                    std::ptr::copy_nonoverlapping(block, new, layout.size().min(size));
                }
                return new;
            }
        }
        // SAFETY: the block was allocated by `alloc` with this layout.
        with_heap(|heap| unsafe { heap.realloc(block, layout.size(), layout.align(), size) })
    }
}
