//! Paged memory outside of the region, in the test's own process: mapped at addresses that the test
//! chooses, compared with a shadow copy, unmapped in parts, moved and adopted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pager::extent::EXTENTS_MAX;
use pager::mapping::MapRequest;
use pager::stats::Counter;
use pager::sys::{self, PAGE_BYTES};
use pager::{Config, Pager};
use units::Random;

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn pager() -> Arc<Pager> {
    let config = Config::new(8 << 20, "memory:1GiB");
    let pager = Pager::new(&config, Pager::open_transport(&config).unwrap()).unwrap();
    pager.start().unwrap();
    pager
}

/// Returns the first address of 4 GiB that no other test and no other code uses.
fn free_addresses() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x2000_0000_0000);
    NEXT.fetch_add(4 << 30, Ordering::Relaxed)
}

fn request(address: usize, pages: usize, flags: i32) -> MapRequest {
    let (len, flags) = (pages * PAGE_BYTES, ANONYMOUS | flags);
    MapRequest { address, len, prot: READ_WRITE, flags, fd: -1, offset: 0 }
}

fn map_at(pager: &Pager, address: usize, pages: usize) {
    let mapped = pager.map_request(request(address, pages, libc::MAP_FIXED));
    assert_eq!(mapped, Ok(address));
}

fn word(base: usize, page: usize) -> *mut u64 {
    (base + page * PAGE_BYTES + page % 512 * 8) as *mut u64
}

fn write(base: usize, page: usize, value: u64) {
    // SAFETY: a page that the test has mapped.
    unsafe { word(base, page).write_volatile(value) };
}

fn read(base: usize, page: usize) -> u64 {
    // SAFETY: as above.
    unsafe { word(base, page).read_volatile() }
}

fn fill(base: usize, pages: usize, seed: u64) {
    (0..pages).for_each(|page| write(base, page, seed + page as u64));
}

fn holds(base: usize, pages: std::ops::Range<usize>, seed: u64) -> bool {
    pages.into_iter().all(|page| read(base, page) == seed + page as u64)
}

/// More pages than the bound.
const PAGES: usize = 3000;

/// Runs one thread's random steps on an extent of its own; `seed` determines them.
fn live(pager: &Pager, seed: u64) {
    let base = free_addresses();
    map_at(pager, base, PAGES);
    // `None` is a page that is not mapped.
    let mut shadow = vec![Some(0u64); PAGES];
    let mut random = Random::new(seed);
    let mut below = |bound: usize| random.below(bound as u64) as usize;
    for step in 0..20_000u64 {
        let page = below(PAGES);
        let len = (1 + below(200)).min(PAGES - page);
        let address = base + page * PAGE_BYTES;
        match below(1000) {
            0..2 => {
                pager.unmap(address, len * PAGE_BYTES).unwrap();
                shadow[page..page + len].fill(None);
            }
            2..6 => {
                map_at(pager, address, len);
                shadow[page..page + len].fill(Some(0));
            }
            6..8 if shadow[page..page + len].iter().all(Option::is_some) => {
                pager.advise(address, len * PAGE_BYTES, libc::MADV_DONTNEED).unwrap();
                shadow[page..page + len].fill(Some(0));
            }
            8..10 => {
                let (old, flags) = (len * PAGE_BYTES, libc::MREMAP_MAYMOVE);
                let whole = shadow[page..page + len].iter().all(Option::is_some)
                    && pager.region().pieces(address, old).len() == 1;
                if whole {
                    let moved = pager.remap(address, old, old + 64 * PAGE_BYTES, flags, 0).unwrap();
                    assert!(!(base..base + PAGES * PAGE_BYTES).contains(&moved));
                    let flags = flags | libc::MREMAP_FIXED;
                    let back = pager.remap(moved, old + 64 * PAGE_BYTES, old, flags, address);
                    assert_eq!(back, Ok(address));
                }
            }
            _ => match &mut shadow[page] {
                None => assert!(pager.region().find(address).is_none(), "step {step}"),
                Some(value) => {
                    assert_eq!(read(base, page), *value, "seed {seed}, step {step}, page {page}");
                    if step % 3 > 0 {
                        *value = step << 16 | page as u64;
                        write(base, page, *value);
                    }
                }
            },
        }
    }
    for (page, value) in shadow.iter().enumerate() {
        if let Some(value) = value {
            assert_eq!(read(base, page), *value, "seed {seed}, page {page} at the end");
        }
    }
    pager.unmap(base, PAGES * PAGE_BYTES).unwrap();
}

#[test]
fn extents_hold_what_was_written_while_others_change() {
    let pager = pager();
    let before = pager.stats().get(Counter::PagesIn);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let pager = &pager;
            scope.spawn(move || live(pager, seed));
        }
    });
    assert!(pager.stats().get(Counter::PagesIn) > before + 1000);
    assert_eq!((pager.resident(), pager.region().extents().len()), (0, 0));
}

/// The handler serves faults by runs of pages, which must end at the end of an extent even if
/// another extent follows.
#[test]
fn neighbouring_extents_do_not_mix() {
    let pager = pager();
    let base = free_addresses();
    // Mapped downwards, so that no extent grows: each has page numbers of its own.
    const EACH: usize = 100;
    for part in (0..PAGES / EACH).rev() {
        map_at(&pager, base + part * EACH * PAGE_BYTES, EACH);
    }
    assert_eq!(pager.region().extents().len(), PAGES / EACH);
    for seed in [7, 1 << 40] {
        fill(base, PAGES, seed);
        assert!(holds(base, 0..PAGES, seed));
    }
    pager.unmap(base, PAGES * PAGE_BYTES).unwrap();
    // Mapped upwards, they are one.
    for part in 0..PAGES / EACH {
        map_at(&pager, base + part * EACH * PAGE_BYTES, EACH);
    }
    assert_eq!(pager.region().extents().len(), 1);
    assert_eq!(read(base, PAGES - 1), 0);
    fill(base, PAGES, 3);
    assert!(holds(base, 0..PAGES, 3));
    pager.unmap(base + EACH * PAGE_BYTES, EACH * PAGE_BYTES).unwrap();
    assert_eq!(pager.region().extents().len(), 2);
    assert!(holds(base, 0..EACH, 3) && holds(base, 2 * EACH..PAGES, 3));
    pager.unmap(base, PAGES * PAGE_BYTES).unwrap();
    assert_eq!(pager.resident(), 0);
}

/// A thread that waits at a page that is unmapped and mapped again must not wait forever, and reads
/// the page's present content.
#[test]
fn faults_on_extents_that_come_and_go_end() {
    let pager = pager();
    let base = free_addresses();
    const SLOTS: usize = 4;
    const EACH: usize = 64;
    let done = AtomicBool::new(false);
    map_at(&pager, base, SLOTS * EACH);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut random, mut reads) = (Random::new(5), 0u64);
            while !done.load(Ordering::Acquire) {
                let page = random.below((SLOTS * EACH) as u64) as usize;
                assert_eq!(read(base, page) & !0xff, 0, "the content of another page");
                write(base, page, page as u64 % 256);
                reads += 1;
            }
            reads
        });
        let mut random = Random::new(6);
        for _ in 0..3000 {
            let slot = random.below(SLOTS as u64) as usize;
            // Replaces the memory: by new page numbers, if a file was there in between.
            let address = base + slot * EACH * PAGE_BYTES;
            if random.below(2) == 0 {
                let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                let shared = MapRequest { flags: shared, ..request(address, EACH, 0) };
                assert_eq!(pager.map_request(shared), Ok(address));
                std::thread::yield_now();
            }
            map_at(&pager, address, EACH);
        }
        done.store(true, Ordering::Release);
        assert!(reader.join().unwrap() > 1000);
    });
    pager.unmap(base, SLOTS * EACH * PAGE_BYTES).unwrap();
    assert_eq!(pager.resident(), 0);
}

#[test]
fn adopted_memory_keeps_its_content() {
    let pager = pager();
    let base = sys::map_anonymous(PAGES * PAGE_BYTES).unwrap();
    for page in (0..PAGES).step_by(3) {
        write(base, page, 1000 + page as u64);
    }
    // SAFETY: the whole pages that were just mapped; they stay mapped.
    assert!(unsafe { pager.adopt(base, PAGES * PAGE_BYTES) }.unwrap());
    assert!(pager.resident() >= 1000);
    for page in 0..PAGES {
        let value = if page % 3 == 0 { 1000 + page as u64 } else { 0 };
        assert_eq!(read(base, page), value, "{page}");
    }
    fill(base, PAGES, 5);
    assert!(holds(base, 0..PAGES, 5));
    assert!(pager.stats().get(Counter::PagesIn) > 1000);
    assert!(pager.resident() <= pager.limit());
}

#[test]
fn addresses_are_the_ones_that_the_kernel_would_choose() {
    let pager = pager();
    let noreplace = 0x10_0000;
    let base = free_addresses();
    let fixed = request(base, 10, noreplace);
    assert_eq!(pager.map_request(fixed), Ok(base));
    assert_eq!(pager.map_request(fixed), Err(libc::EEXIST));
    assert_eq!(
        pager.map_request(MapRequest { address: base + 1, ..fixed }),
        Err(libc::EINVAL),
        "not at a page"
    );
    let low = pager.map_request(request(0, 10, libc::MAP_32BIT)).unwrap();
    assert!(low < 1 << 31 && pager.region().find(low).is_some(), "{low:#x}");
    // A hint for free addresses is followed; none replaces a mapping.
    let (hint, high) = (20usize << 30, free_addresses());
    let mut inside = 0;
    for hint in [hint, high] {
        assert_eq!(pager.map_request(request(hint, 10, 0)), Ok(hint));
        inside = pager.map_request(request(hint, 10, 0)).unwrap();
        assert!(pager.region().clip(inside, 1).is_some());
    }
    pager.unmap(inside, 10 * PAGE_BYTES).unwrap();
    assert_eq!(pager.map_request(request(inside, 10, 0)), Ok(inside), "a hint in the region");
    for start in [base, low, hint, high] {
        fill(start, 10, 9);
        pager.protect(start, 10 * PAGE_BYTES, libc::PROT_READ).unwrap();
        assert!(holds(start, 0..10, 9));
        pager.unmap(start, 10 * PAGE_BYTES).unwrap();
    }
    assert!(pager.region().extents().is_empty());
}

#[test]
fn mappings_beyond_the_maximum_are_counted_and_work() {
    let pager = pager();
    let base = free_addresses();
    let address = |at: usize| base + 2 * at * PAGE_BYTES;
    for at in 0..EXTENTS_MAX + 3 {
        map_at(&pager, address(at), 1);
    }
    assert_eq!(pager.region().extents().len(), EXTENTS_MAX);
    assert_eq!(pager.stats().get(Counter::MappingsUnpaged), 3);
    assert_eq!(pager.stats().get(Counter::MappingsUnpagedBytes), 3 * PAGE_BYTES as u64);
    for at in 0..EXTENTS_MAX + 3 {
        write(address(at), 0, at as u64);
    }
    assert!((0..EXTENTS_MAX + 3).all(|at| read(address(at), 0) == at as u64));
    pager.unmap(base, 2 * (EXTENTS_MAX + 3) * PAGE_BYTES).unwrap();
    assert_eq!((pager.resident(), pager.region().extents().len()), (0, 0));
}

/// A reservation that is larger than the region.
#[test]
fn a_vast_reservation_is_paged() {
    let pager = pager();
    let len = 8usize << 40;
    let prot = libc::PROT_NONE;
    let base = pager.map_request(MapRequest { len, prot, ..request(0, 1, 0) }).unwrap();
    let at = base + len / 2;
    pager.protect(at, PAGES * PAGE_BYTES, READ_WRITE).unwrap();
    fill(at, PAGES, 11);
    assert!(holds(at, 0..PAGES, 11));
    assert!(pager.stats().get(Counter::PagesIn) > 1000);
    pager.unmap(base, len).unwrap();
    assert_eq!(pager.resident(), 0);
}
