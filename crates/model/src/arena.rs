//! All memory of a world, in an arena whose earlier contents can be restored.
//!
//! While a thread is *inside* its arena, Rust's allocations come from the arena. So do the NIC's
//! DMA memory and the stack of the memory node's CPU. A snapshot is then a copy of the bytes, and
//! restoring it copies back the blocks that have changed. No type needs to be `Clone`.
//!
//! ```text
//! zone      content                                        in the digest of a state
//! heap      the NIC, the memory node, the clients          no: the digest queries them
//! node      the memory node, its side of the NIC's verbs   yes
//! cpu heap  allocations that the CPU makes later           yes, the pieces in use
//! dma       rings, records, table, queue, chunks           yes
//! quiet     DMA memory whose content adds no information   no
//! table     the MW table, at a multiple of 4 GiB           yes
//! far       the start of rings longer than any run         yes
//! stack     the CPU's stack                                the part in use, during a task
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use units::PAGE_BYTES as PAGE;

/// Bytes that are compared, hashed and restored as a unit.
const BLOCK: usize = 256;

/// Kinds of zones, in address order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ZoneKind {
    Heap,
    CpuHeap,
    Node,
    Dma,
    Quiet,
    Stack,
    Far,
    Table,
}

const ZONES: [(ZoneKind, usize, bool); 8] = [
    (ZoneKind::Heap, 16 << 20, false),
    (ZoneKind::CpuHeap, 4 << 20, false),
    (ZoneKind::Node, 16 << 20, true),
    (ZoneKind::Dma, 16 << 20, true),
    (ZoneKind::Quiet, 16 << 20, false),
    (ZoneKind::Stack, 256 << 10, false),
    (ZoneKind::Far, 8 * FAR, true),
    (ZoneKind::Table, 1 << 20, true),
];

/// Alignment of the MW table's address (`schemes::onesidedmw::layout`).
const TABLE_ALIGN: usize = 1 << 32;
/// DMA allocations longer than this go to the far zone.
const SHORT: usize = 96 << 10;
/// Distance between two far allocations.
const FAR: usize = 8 << 20;
/// Tracked bytes at the start of a far allocation; a bounded run must not use more.
pub const FAR_TRACKED: usize = 8 << 10;

/// The zone that the calling thread allocates from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Outside,
    Heap,
    Node,
    Cpu,
}

#[derive(Clone, Copy)]
struct ThreadArena {
    mode: Mode,
    /// Addresses of the heap and of the end of the CPU and node heaps of this thread's arena; 0 if
    /// the thread has none.
    heap: usize,
    end: usize,
    quiet: bool,
}

thread_local! {
    static THREAD_ARENA: Cell<ThreadArena> =
        const { Cell::new(ThreadArena { mode: Mode::Outside, heap: 0, end: 0, quiet: false }) };
}

/// State of the arena's allocators. It lies at the start of the heap, so that it is restored too.
#[repr(C)]
struct Head {
    next: [usize; ZONES.len()],
    /// Releaser size class (power of two): the first free piece of the heap.
    free: [usize; 40],
    /// Releaser size class (power of two): bit mask of the pieces of the CPU heap in use.
    cpu: [u32; CPU_CLASSES],
}

/// Number of size classes of the CPU heap; pieces have 2^4 to 2^16 bytes.
const CPU_CLASSES: usize = 17;
/// Pieces of each size class in the CPU heap.
const CPU_PIECES: u32 = 16;

/// Returns the address of the CPU heap's pieces of 2^class bytes.
fn cpu_pieces(heap: usize, class: usize) -> usize {
    place(heap, ZoneKind::CpuHeap).0 + CPU_PIECES as usize * ((1 << class) - 16)
}

/// The global allocator of programs that link this crate: the system allocator, except on threads
/// inside an arena.
pub struct Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

// SAFETY: pieces of an arena are disjoint, large enough and aligned (their sizes are powers of two
// and their addresses are multiples of their sizes, up to a page); all other memory is the system
// allocator's.
unsafe impl GlobalAlloc for Allocator {
    // SAFETY: the caller keeps the trait's contract.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let here = THREAD_ARENA.get();
        match here.mode {
            // SAFETY: the caller's promise.
            Mode::Outside => unsafe { System.alloc(layout) },
            // SAFETY: this thread has an arena: only `Arena::inside` sets the mode.
            Mode::Heap => unsafe { heap_alloc(here, layout) },
            Mode::Node => bump(here, ZoneKind::Node, layout.size().max(1), layout.align().max(16)),
            // SAFETY: as above.
            Mode::Cpu => unsafe { cpu_alloc(here, layout) },
        }
    }

    // SAFETY: the caller keeps the trait's contract.
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        let here = THREAD_ARENA.get();
        let at = p as usize;
        if at < here.heap || at >= here.end {
            // SAFETY: it was not allocated in an arena, and arenas' objects stay in their thread.
            return unsafe { System.dealloc(p, layout) };
        }
        if at < here.heap + ZONES[0].1 {
            // SAFETY: the piece is free now, and at least 16 bytes long.
            unsafe {
                let free = &mut (*(here.heap as *mut Head)).free[class(layout)];
                p.cast::<usize>().write(*free);
                *free = at;
            }
            return;
        }
        if at >= place(here.heap, ZoneKind::Node).0 {
            return; // what is made there stays
        }
        let class = (4..CPU_CLASSES).rev().find(|&c| at >= cpu_pieces(here.heap, c));
        let class = class.expect("a piece of the CPU heap");
        // SAFETY: the head lies at the start of the heap.
        let used = unsafe { &mut (*(here.heap as *mut Head)).cpu[class] };
        *used &= !(1 << ((at - cpu_pieces(here.heap, class)) >> class));
    }
}

/// Allocates the lowest free piece, so that earlier allocations and frees leave no trace in the
/// state.
///
/// # Safety
/// `here` is of a thread with an arena.
unsafe fn cpu_alloc(here: ThreadArena, layout: Layout) -> *mut u8 {
    for class in class(layout)..CPU_CLASSES {
        // SAFETY: the head lies at the start of the heap.
        let head = unsafe { &mut *(here.heap as *mut Head) };
        let piece = head.cpu[class].trailing_ones();
        if piece < CPU_PIECES {
            head.cpu[class] |= 1 << piece;
            let at = cpu_pieces(here.heap, class) + ((piece as usize) << class);
            let end = at + (1 << class) - place(here.heap, ZoneKind::CpuHeap).0;
            head.next[ZoneKind::CpuHeap as usize] = head.next[ZoneKind::CpuHeap as usize].max(end);
            return at as *mut u8;
        }
    }
    ptr::null_mut()
}

fn class(layout: Layout) -> usize {
    layout.size().max(layout.align()).max(16).next_power_of_two().trailing_zeros() as usize
}

/// # Safety
/// `here` is of a thread with an arena.
unsafe fn heap_alloc(here: ThreadArena, layout: Layout) -> *mut u8 {
    let class = class(layout);
    let size = 1usize << class;
    // SAFETY: the head lies at the start of the heap; a free piece holds the address of the next.
    unsafe {
        let free = &mut (*(here.heap as *mut Head)).free[class];
        if *free != 0 {
            let p = *free as *mut usize;
            *free = *p;
            return p.cast();
        }
    }
    bump(here, ZoneKind::Heap, size, size.min(PAGE))
}

/// Allocates unused bytes of a zone.
fn bump(here: ThreadArena, zone: ZoneKind, size: usize, align: usize) -> *mut u8 {
    let (start, cap) = place(here.heap, zone);
    // SAFETY: the head lies at the start of the heap.
    let next = unsafe { &mut (*(here.heap as *mut Head)).next[zone as usize] };
    let at = (start + *next).next_multiple_of(align);
    if at + size > start + cap {
        return ptr::null_mut();
    }
    *next = at + size - start;
    at as *mut u8
}

/// Returns address and size of a zone, computed from the address of the heap. The table's address
/// is aligned to [`TABLE_ALIGN`].
fn place(heap: usize, zone: ZoneKind) -> (usize, usize) {
    let mut start = heap;
    for (z, cap, _) in ZONES {
        if z == ZoneKind::Table {
            start = start.next_multiple_of(TABLE_ALIGN);
        }
        if z == zone {
            return (start, cap);
        }
        start += cap;
    }
    unreachable!("every zone is in the list")
}

/// Bytes of address space that an arena reserves; most are never touched.
const RESERVED: usize = 2 * TABLE_ALIGN + (256 << 20);

/// Allocates DMA memory from the calling thread's arena, for [`rnic::port::inline::Provider`].
pub fn dma(bytes: usize) -> verbs::DmaMemory {
    let here = THREAD_ARENA.get();
    assert!(here.heap != 0, "DMA memory is asked for outside an arena");
    let base = if bytes > TABLE_ALIGN {
        // The MW table: its owner uses the part that starts at the multiple of 4 GiB.
        let (table, cap) = place(here.heap, ZoneKind::Table);
        assert!(bytes - TABLE_ALIGN <= cap, "the table does not fit its zone");
        let next = bump(here, ZoneKind::Table, bytes - TABLE_ALIGN, BLOCK);
        assert_eq!(next as usize, table, "there is one table");
        // The address space from the heap to the end of the table belongs to this arena.
        here.heap as *mut u8
    } else if bytes > SHORT {
        assert!(bytes <= FAR, "a ring does not fit the far zone");
        bump(here, ZoneKind::Far, FAR, PAGE)
    } else {
        let zone = if here.quiet { ZoneKind::Quiet } else { ZoneKind::Dma };
        bump(here, zone, bytes, PAGE.min(bytes.next_power_of_two().max(BLOCK)))
    };
    assert!(!base.is_null(), "the arena is full");
    // SAFETY: the arena stays mapped while its world is used, and only the world uses this memory.
    unsafe { verbs::DmaMemory::from_raw(base, bytes, std::sync::Arc::new(())) }
}

/// Runs `f`, with its DMA allocations excluded from digests. For memory whose content follows from
/// the rest of the state, or that no program reads.
pub fn outside_digest<R>(f: impl FnOnce() -> R) -> R {
    let here = THREAD_ARENA.get();
    THREAD_ARENA.set(ThreadArena { quiet: true, ..here });
    let r = f();
    THREAD_ARENA.set(ThreadArena { quiet: here.quiet, ..THREAD_ARENA.get() });
    r
}

/// Runs `f` with the system allocator, even inside an arena.
pub fn outside<R>(f: impl FnOnce() -> R) -> R {
    switch(Mode::Outside, f)
}

/// Runs `f` with allocations from the calling thread's arena.
pub fn inside<R>(f: impl FnOnce() -> R) -> R {
    switch(Mode::Heap, f)
}

/// Runs `f` with allocations from the calling thread's arena that are part of digests.
pub fn inside_node<R>(f: impl FnOnce() -> R) -> R {
    switch(Mode::Node, f)
}

/// Runs `f` with allocations from the CPU heap of the calling thread's arena.
pub fn inside_cpu<R>(f: impl FnOnce() -> R) -> R {
    switch(Mode::Cpu, f)
}

fn switch<R>(mode: Mode, f: impl FnOnce() -> R) -> R {
    struct Back(Mode);
    impl Drop for Back {
        fn drop(&mut self) {
            THREAD_ARENA.set(ThreadArena { mode: self.0, ..THREAD_ARENA.get() });
        }
    }
    let here = THREAD_ARENA.get();
    assert!(mode == Mode::Outside || here.heap != 0, "the thread has no arena");
    let _back = Back(here.mode);
    THREAD_ARENA.set(ThreadArena { mode, ..here });
    f()
}

/// Tracking state of one zone.
struct Zone {
    start: usize,
    /// The tracked range: it grows from the zone's start upwards; for the stack, from its end
    /// downwards.
    used: std::ops::Range<usize>,
    hashed: bool,
    /// Content of the zone at the last mark.
    shadow: Vec<u8>,
    /// Hash of each block, for a hashed zone.
    hashes: Vec<u128>,
    /// Blocks that are excluded from the digest.
    excluded: Vec<usize>,
}

/// A thread's arena.
pub struct Arena {
    base: *mut std::ffi::c_void,
    heap: usize,
    zones: Vec<Zone>,
    digest: u128,
}

/// The old contents of changed blocks, which undo the changes between two marks: zone, block,
/// content.
pub struct Undo(Vec<(u8, u32, Box<[u8; BLOCK]>)>);

impl Arena {
    /// Creates the calling thread's arena. A thread has one arena at a time.
    pub fn new() -> Self {
        let here = THREAD_ARENA.get();
        assert!(here.heap == 0, "a thread has one arena at a time");
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), RESERVED, protection, flags) };
        let base = base.expect("4 GiB of address space");
        // The zones before the table must not cross the multiple of 4 GiB.
        let small: usize = ZONES.iter().map(|z| z.1).sum();
        let mut heap = base as usize;
        if heap.next_multiple_of(TABLE_ALIGN) - heap < small {
            heap = heap.next_multiple_of(TABLE_ALIGN) + (2 << 20);
        }
        let zones = ZONES
            .iter()
            .map(|&(z, cap, hashed)| {
                let (start, _) = place(heap, z);
                let used = if z == ZoneKind::Stack { cap..cap } else { 0..0 };
                Zone {
                    start,
                    used,
                    hashed,
                    shadow: Vec::new(),
                    hashes: Vec::new(),
                    excluded: vec![],
                }
            })
            .collect();
        let (end, _) = place(heap, ZoneKind::Dma);
        // SAFETY: the heap is mapped and zero.
        unsafe { (*(heap as *mut Head)).next[ZoneKind::Heap as usize] = size_of::<Head>() };
        THREAD_ARENA.set(ThreadArena { heap, end, ..here });
        Self { base, heap, zones, digest: 0 }
    }

    /// Returns the range of the CPU's stack: lowest address and end address.
    pub fn stack(&self) -> (usize, usize) {
        let (start, cap) = place(self.heap, ZoneKind::Stack);
        (start, start + cap)
    }

    /// Returns the pieces of the CPU heap in use: addresses and lengths.
    pub fn cpu_heap(&self) -> Vec<(usize, usize)> {
        // SAFETY: the head lies at the start of the heap.
        let used = unsafe { (*(self.heap as *mut Head)).cpu };
        let mut all = Vec::new();
        for (class, used) in used.iter().enumerate() {
            let pieces = (0..CPU_PIECES as usize).filter(|p| used >> p & 1 != 0);
            all.extend(pieces.map(|p| (cpu_pieces(self.heap, class) + (p << class), 1 << class)));
        }
        all
    }

    /// Extends the tracked part of the stack down to `lowest`.
    pub fn extend_stack(&mut self, lowest: usize) {
        let zone = &mut self.zones[ZoneKind::Stack as usize];
        let at = (lowest - zone.start) / PAGE * PAGE;
        if at < zone.used.start {
            // The bytes below were zero at every earlier mark.
            let grown = zone.used.start - at;
            zone.shadow.splice(0..0, std::iter::repeat_n(0, grown));
            zone.used.start = at;
        }
    }

    /// Excludes the `len` bytes at `addr`, in a hashed zone, from the digest.
    pub fn exclude_from_digest(&mut self, addr: usize, len: usize) {
        let zone = self.zones.iter_mut().find(|z| (z.start..z.start + (64 << 20)).contains(&addr));
        let zone = zone.expect("an address of this arena");
        let first = (addr - zone.start) / BLOCK;
        let blocks = first..(addr + len - zone.start).div_ceil(BLOCK);
        outside(|| zone.excluded.extend(blocks));
    }

    /// Updates the shadow copy to the current contents and returns the changes since the last mark.
    pub fn mark(&mut self) -> Undo {
        let mut undo = Vec::new();
        self.grow();
        for (z, zone) in self.zones.iter_mut().enumerate() {
            let Zone { start, used, hashed, shadow, hashes, excluded } = zone;
            let live = *start + used.start;
            for at in changed(live, shadow) {
                let old: [u8; BLOCK] = shadow[at..at + BLOCK].try_into().expect("a block");
                let block = (used.start + at) / BLOCK;
                // SAFETY: the block lies in a mapped zone that only this thread uses.
                let new = unsafe { std::slice::from_raw_parts((live + at) as *const u8, BLOCK) };
                shadow[at..at + BLOCK].copy_from_slice(new);
                if *hashed && !excluded.contains(&block) {
                    if hashes.len() <= block {
                        hashes.resize(block + 1, 0);
                    }
                    let hash = hash(new, (z as u64) << 32 | block as u64);
                    self.digest ^= hashes[block] ^ hash;
                    hashes[block] = hash;
                }
                undo.push((z as u8, block as u32, Box::new(old)));
            }
        }
        Undo(undo)
    }

    /// Restores the contents before the last mark; `undo` is what that mark returned.
    pub fn undo(&mut self, undo: &Undo) {
        for (z, block, old) in &undo.0 {
            let zone = &mut self.zones[*z as usize];
            let (block, at) = (*block as usize, *block as usize * BLOCK - zone.used.start);
            zone.shadow[at..at + BLOCK].copy_from_slice(&old[..]);
            // SAFETY: as in `mark`; no reference into the arena exists while it is restored.
            unsafe {
                ptr::copy_nonoverlapping(
                    old.as_ptr(),
                    (zone.start + block * BLOCK) as *mut u8,
                    BLOCK,
                );
            }
            if zone.hashed && !zone.excluded.contains(&block) {
                let hash = hash(&old[..], (*z as u64) << 32 | block as u64);
                self.digest ^= zone.hashes[block] ^ hash;
                zone.hashes[block] = hash;
            }
        }
    }

    /// Returns the digest of all hashed zones at the last mark.
    pub fn digest(&self) -> u128 {
        self.digest
    }

    /// Returns the number of tracked bytes.
    pub fn tracked(&self) -> usize {
        self.zones.iter().map(|z| z.used.len()).sum()
    }

    fn grow(&mut self) {
        // SAFETY: the head lies at the start of the heap.
        let next = unsafe { (*(self.heap as *mut Head)).next };
        for (zone, (z, ..)) in self.zones.iter_mut().zip(ZONES) {
            if z == ZoneKind::Stack || z == ZoneKind::Far {
                continue;
            }
            zone.used.end = zone.used.end.max(next[z as usize].next_multiple_of(PAGE));
            zone.shadow.resize(zone.used.end, 0);
        }
        // Each far allocation is a zone of its own behind the fixed zones.
        let (far, _) = place(self.heap, ZoneKind::Far);
        while self.zones.len() < ZONES.len() + next[ZoneKind::Far as usize] / FAR {
            let start = far + (self.zones.len() - ZONES.len()) * FAR;
            let (shadow, hashes, excluded) = (vec![0; FAR_TRACKED], Vec::new(), Vec::new());
            let used = 0..FAR_TRACKED;
            self.zones.push(Zone { start, used, hashed: true, shadow, hashes, excluded });
        }
    }
}

impl Default for Arena {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Arena {
    /// Unmaps the arena without dropping the objects in it.
    fn drop(&mut self) {
        THREAD_ARENA.set(ThreadArena { mode: Mode::Outside, heap: 0, end: 0, quiet: false });
        // SAFETY: the arena owns the mapping, and no code uses it any more.
        let _ = unsafe { munmap(self.base, RESERVED) };
    }
}

/// Returns the offset of each block at `live` that differs from `shadow`.
fn changed(live: usize, shadow: &[u8]) -> Vec<usize> {
    // SAFETY: the zone is mapped, and only this thread uses it.
    let live = unsafe { std::slice::from_raw_parts(live as *const u8, shadow.len()) };
    let mut all = Vec::new();
    for (page, (now, old)) in live.chunks(PAGE).zip(shadow.chunks(PAGE)).enumerate() {
        if now != old {
            let blocks = now.chunks(BLOCK).zip(old.chunks(BLOCK)).enumerate();
            all.extend(blocks.filter(|(_, (a, b))| a != b).map(|(i, _)| page * PAGE + i * BLOCK));
        }
    }
    all
}

/// Returns a 128-bit hash of `bytes`. A block of zeros hashes to 0, so that unused memory does not
/// change a digest.
pub fn hash(bytes: &[u8], salt: u64) -> u128 {
    if bytes.iter().all(|&b| b == 0) {
        return 0;
    }
    // Two lanes of multiply and fold over all bytes, each with its own constants (wyhash's).
    let fold = |x: u64, y: u64| {
        let product = x as u128 * y as u128;
        product as u64 ^ (product >> 64) as u64
    };
    let mut lanes = [salt ^ 0xa076_1d64_78bd_642f, salt.rotate_left(32) ^ 0xe703_7ed1_a0b4_28db];
    let mut take = |x: u64, y: u64| {
        lanes[0] = fold(x ^ 0x8ebc_6af0_9c88_c6e3, y ^ lanes[0]);
        lanes[1] = fold(y ^ 0x5899_65cc_7537_4cc3, x ^ lanes[1].rotate_left(23)) ^ lanes[1];
    };
    let (sixteens, rest) = bytes.as_chunks::<16>();
    let halves = |b: &[u8; 16]| {
        let both = u128::from_le_bytes(*b);
        (both as u64, (both >> 64) as u64)
    };
    for both in sixteens {
        let (x, y) = halves(both);
        take(x, y);
    }
    let mut last = [0; 16];
    last[..rest.len()].copy_from_slice(rest);
    let (x, y) = halves(&last);
    take(x, y);
    take(bytes.len() as u64, 0x1d8e_4e27_c47d_124f);
    take(salt, 0xeb44_acca_b455_d165);
    (lanes[0] as u128) << 64 | lanes[1] as u128
}
