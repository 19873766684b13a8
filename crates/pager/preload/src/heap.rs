//! The internal heap: memory of the library's own, never paged.
//!
//! dlmalloc over one reserved range, so that `free` can tell by the address whose a block is. It also
//! serves what libc allocates on the library's behalf, and what the program allocates before the
//! library is initialised. Blocks that C code asks for carry their size in front:
//!
//! ```text
//!    ... padding | size (8) | padding (8) | block, aligned ...
//! ```

use std::alloc::{GlobalAlloc, Layout};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use dlmalloc::Dlmalloc;
use pager::config::EXIT_PAGER;
use pager::sys::{self, PAGE_BYTES, SignalsBlocked};

/// Address space of the heap.
const RANGE_BYTES: usize = 4 << 30;
const HEADER_BYTES: usize = 16;

static BASE: AtomicUsize = AtomicUsize::new(0);
static USED: AtomicUsize = AtomicUsize::new(0);

/// Nothing works without the heap; and no message can be put together, with the heap locked.
fn no_room() -> ! {
    const TEXT: &str = "granary: cannot reserve 4 GiB of address space for the pager itself: where a paged \
                        program starts, RLIMIT_AS and RLIMIT_DATA (ulimit -v and -d) must be unlimited\n";
    loop {
        // SAFETY: the text is valid for the read; exit_group does not return.
        unsafe {
            libc::syscall(libc::SYS_write, 2, TEXT.as_ptr(), TEXT.len());
            libc::syscall(libc::SYS_exit_group, EXIT_PAGER);
        }
    }
}

struct Range;

// SAFETY: hands out disjoint parts of a range that stays mapped, each once; never takes one back.
unsafe impl dlmalloc::Allocator for Range {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let none = (std::ptr::null_mut(), 0, 0);
        let size = size.next_multiple_of(PAGE_BYTES);
        // Called with the heap locked, so there is no race for the first time.
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

/// One heap for each generation of forked children: in a child, the lock of the one before may be
/// held by a thread that is not there.
const GENERATIONS: usize = 1024;
static HEAPS: [Mutex<Dlmalloc<Range>>; GENERATIONS] =
    [const { Mutex::new(Dlmalloc::new_with_allocator(Range)) }; GENERATIONS];
static GENERATION: AtomicUsize = AtomicUsize::new(0);
/// Bytes of the range that belong to heaps before this generation's.
static INHERITED: AtomicUsize = AtomicUsize::new(0);

fn with_heap<T>(run: impl FnOnce(&mut Dlmalloc<Range>) -> T) -> T {
    match HEAPS[GENERATION.load(Ordering::Acquire)].lock() {
        Ok(mut heap) => run(&mut heap),
        Err(poisoned) => run(&mut poisoned.into_inner()),
    }
}

/// In a forked child: goes on with a fresh heap. Blocks of the one before stay as they are for good.
pub fn renew_in_child() {
    let next = GENERATION.load(Ordering::Acquire) + 1;
    if next == GENERATIONS {
        sys::die(
            pager::config::EXIT_PAGER,
            "a chain of more than 1023 forks without exec is not supported",
        );
    }
    INHERITED.store(USED.load(Ordering::Acquire), Ordering::Release);
    GENERATION.store(next, Ordering::Release);
}

fn is_inherited(block: *mut u8) -> bool {
    (block as usize) < BASE.load(Ordering::Acquire) + INHERITED.load(Ordering::Acquire)
}

/// True if the address is in the heap.
pub fn contains(address: usize) -> bool {
    let base = BASE.load(Ordering::Acquire);
    base != 0 && address.wrapping_sub(base) < RANGE_BYTES
}

/// A block for C code; null if there is no memory. `align` is a power of two.
pub fn allocate(size: usize, align: usize) -> *mut u8 {
    let align = align.max(HEADER_BYTES);
    let Some(total) = size.checked_add(align) else { return std::ptr::null_mut() };
    let _blocked = SignalsBlocked::new();
    // SAFETY: a non-zero size and a power of two.
    let start = with_heap(|heap| unsafe { heap.malloc(total, align) });
    if start.is_null() {
        return start;
    }
    // SAFETY: `align` is at least the header, so both words lie before the block, inside what was
    // allocated.
    unsafe {
        let block = start.add(align);
        block.sub(HEADER_BYTES).cast::<usize>().write(size);
        block.sub(HEADER_BYTES / 2).cast::<usize>().write(align);
        block
    }
}

/// Size that was asked for.
///
/// # Safety
/// `block` came from [`allocate`] and was not freed.
pub unsafe fn size(block: *mut u8) -> usize {
    // SAFETY: the header that `allocate` wrote.
    unsafe { block.sub(HEADER_BYTES).cast::<usize>().read() }
}

/// Frees a block.
///
/// # Safety
/// `block` came from [`allocate`] and was not freed.
pub unsafe fn free(block: *mut u8) {
    if is_inherited(block) {
        return;
    }
    let _blocked = SignalsBlocked::new();
    // SAFETY: the header that `allocate` wrote, and the block that it came with.
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
    // SAFETY: the caller keeps the trait's contract.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the layout is valid by the trait's contract.
        with_heap(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }

    // SAFETY: the caller keeps the trait's contract.
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !is_inherited(block) {
            // SAFETY: the block came from `alloc` with this layout.
            with_heap(|heap| unsafe { heap.free(block, layout.size(), layout.align()) });
        }
    }

    // SAFETY: the caller keeps the trait's contract.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_inherited(block) {
            // SAFETY: a valid size with the alignment of a valid layout; the new block is large enough
            // for what is copied.
            unsafe {
                let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
                if !new.is_null() {
                    std::ptr::copy_nonoverlapping(block, new, layout.size().min(size));
                }
                return new;
            }
        }
        // SAFETY: the block came from `alloc` with this layout.
        with_heap(|heap| unsafe { heap.realloc(block, layout.size(), layout.align(), size) })
    }
}
