//! Compares a pager in the test's own process with a shadow copy: threads write, read, drop and
//! move pages of mappings several times the bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pager::mapping::MapRequest;
use pager::stats::Counter;
use pager::sys::{self, PAGE_BYTES};
use pager::{Config, Pager};
use units::Random;

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

fn pager(pool: &str) -> Arc<Pager> {
    let config = Config::new(8 << 20, pool);
    let pager = Pager::new(&config, Pager::open_transport(&config).unwrap()).unwrap();
    pager.start().unwrap();
    pager
}

fn word(base: usize, page: usize, index: usize) -> *mut u64 {
    (base + page * PAGE_BYTES + index * 8) as *mut u64
}

/// Runs one thread's random steps on mappings of its own; `seed` determines them.
fn live(pager: &Pager, seed: u64) {
    const PAGES: usize = 3000;
    let mut base = pager.map(PAGES * PAGE_BYTES, READ_WRITE).unwrap();
    let mut shadow = vec![0u64; PAGES];
    let mut random = Random::new(seed);
    let mut random = move |below: usize| random.below(below as u64) as usize;
    for step in 0..12_000u64 {
        let page = random(PAGES);
        match random(100) {
            0 => {
                let len = random(200).min(PAGES - page);
                if len > 0 {
                    pager
                        .advise(base + page * PAGE_BYTES, len * PAGE_BYTES, libc::MADV_DONTNEED)
                        .unwrap();
                    shadow[page..page + len].fill(0);
                }
            }
            1 if step % 16 == 0 => {
                let bytes = PAGES * PAGE_BYTES;
                let target = pager.map(bytes, READ_WRITE).unwrap();
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                base = pager.remap(base, bytes, bytes, flags, target).unwrap();
                assert_eq!(base, target);
            }
            2..=30 => {
                // A run of reads, to trigger read-ahead.
                for (page, &wanted) in shadow.iter().enumerate().skip(page).take(40) {
                    // SAFETY: a mapped page of this thread's.
                    let found = unsafe { word(base, page, 7).read_volatile() };
                    assert_eq!(found, wanted, "page {page} at step {step}");
                }
            }
            _ => {
                // SAFETY: a mapped page of this thread's.
                unsafe {
                    assert_eq!(word(base, page, 7).read_volatile(), shadow[page]);
                    assert_eq!(word(base, page, 511).read_volatile(), shadow[page]);
                    word(base, page, 7).write_volatile(step + 1);
                    word(base, page, 511).write_volatile(step + 1);
                }
                shadow[page] = step + 1;
            }
        }
        assert!(pager.present() <= pager.limit(), "resident pages exceed the bound");
    }
    pager.unmap(base, PAGES * PAGE_BYTES).unwrap();
}

fn three_threads(pager: &Arc<Pager>) {
    let threads: Vec<_> = (1..4)
        .map(|seed| {
            let pager = pager.clone();
            std::thread::spawn(move || live(&pager, seed))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Waits until the worker has freed chunks, which happens some time after the last page was
/// dropped.
fn wait_for_chunks(pager: &Pager, wanted: u64) {
    let held =
        || pager.stats().get(Counter::PoolChunks) + pager.stats().get(Counter::OverflowChunks);
    wait_for("chunks held", held, wanted);
}

/// Waits until no page is resident.
///
/// A handler that has read a fault late may map zeros where the program has unmapped its memory
/// since: another fault had already mapped the block of the page. These pages stay until memory is
/// short, or until their addresses are mapped and unmapped again, as here. The pager gives out its
/// last free addresses first, so `PAGES` pages cover all mappings of a test.
fn wait_for_no_pages(pager: &Pager) {
    const PAGES: usize = 32_768;
    let resident = || {
        let base = pager.map(PAGES * PAGE_BYTES, READ_WRITE).unwrap();
        pager.unmap(base, PAGES * PAGE_BYTES).unwrap();
        pager.resident().into()
    };
    wait_for("resident pages", resident, 0);
}

fn wait_for(what: &str, count: impl Fn() -> u64, wanted: u64) {
    let end = sys::now_ns() + 10_000_000_000;
    while count() != wanted {
        assert!(sys::now_ns() < end, "{} {what}, {wanted} expected", count());
        std::thread::yield_now();
    }
}

#[test]
fn threads_read_back_their_writes_and_chunks_are_freed() {
    let pager = pager("memory:1GiB");
    three_threads(&pager);
    assert!(pager.stats().get(Counter::PagesIn) > 1000);
    assert!(pager.stats().get(Counter::PagesRestored) > 0);
    assert!(pager.stats().get(Counter::PoolChunksPeak) > 4);
    wait_for_chunks(&pager, 0);
    wait_for_no_pages(&pager);
}

#[test]
fn threads_read_back_their_writes_with_a_full_pool() {
    let pager = pager("memory:3MiB");
    three_threads(&pager);
    assert!(pager.stats().get(Counter::OverflowChunksPeak) > 4);
    wait_for_chunks(&pager, 0);
}

/// While the kernel compacts memory, its moves of pages meet pages in migration. Linux 6.18 then
/// reports pages that it has moved as an error.
#[test]
fn threads_read_back_their_writes_while_the_kernel_compacts_memory() {
    const COMPACT: &str = "/proc/sys/vm/compact_memory";
    if let Err(error) = std::fs::write(COMPACT, "1") {
        eprintln!("not tested: cannot write {COMPACT}: {error}");
        return;
    }
    let pager = pager("memory:1GiB");
    let done = Arc::new(AtomicBool::new(false));
    let compacting = std::thread::spawn({
        let done = done.clone();
        move || {
            while !done.load(Ordering::Acquire) {
                std::fs::write(COMPACT, "1").unwrap();
            }
        }
    });
    three_threads(&pager);
    done.store(true, Ordering::Release);
    compacting.join().unwrap();
    wait_for_no_pages(&pager);
}

/// Read-ahead of the pages below fills pages of the target during `mremap`.
#[test]
fn mapping_moves_while_read_ahead_fills_its_target() {
    const BELOW: usize = 64;
    const MOVED: usize = 48;
    let pager = pager("memory:64MiB");
    let below = pager.map((BELOW + MOVED) * PAGE_BYTES, READ_WRITE).unwrap();
    let (moved_bytes, above) = (MOVED * PAGE_BYTES, below + BELOW * PAGE_BYTES);
    let elsewhere = pager.map(moved_bytes, READ_WRITE).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let reader = std::thread::spawn({
        let (pager, done) = (pager.clone(), done.clone());
        move || {
            while !done.load(Ordering::Acquire) {
                pager.advise(below, BELOW * PAGE_BYTES, libc::MADV_DONTNEED).unwrap();
                for page in 0..BELOW {
                    // SAFETY: a mapped page that only this thread touches.
                    assert_eq!(unsafe { word(below, page, 0).read_volatile() }, 0);
                }
            }
        }
    });
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    for round in 1..400u64 {
        for page in (0..MOVED).step_by(3) {
            // SAFETY: a mapped page that only this thread touches.
            unsafe { word(elsewhere, page, 7).write_volatile(round) };
        }
        pager.remap(elsewhere, moved_bytes, moved_bytes, flags, above).unwrap();
        for page in 0..MOVED {
            let wanted = if page % 3 == 0 { round } else { 0 };
            // SAFETY: as above.
            assert_eq!(unsafe { word(above, page, 7).read_volatile() }, wanted, "page {page}");
        }
        pager.remap(above, moved_bytes, moved_bytes, flags, elsewhere).unwrap();
        let cleared = pager.map_fixed(MapRequest {
            address: elsewhere,
            len: moved_bytes,
            prot: READ_WRITE,
            flags: libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            fd: -1,
            offset: 0,
        });
        assert_eq!(cleared, Ok(elsewhere));
    }
    done.store(true, Ordering::Release);
    reader.join().unwrap();
    pager.unmap(below, (BELOW + MOVED) * PAGE_BYTES).unwrap();
    pager.unmap(elsewhere, moved_bytes).unwrap();
    wait_for_no_pages(&pager);
}

#[test]
fn a_bound_below_the_shelf_is_refused() {
    let config = Config::new(4 << 20, "memory:1GiB");
    let large = Config::new(64 << 20, "memory:1GiB");
    let transport = Pager::open_transport(&large).unwrap();
    assert!(Pager::new(&config, transport).is_err(), "the shelf does not fit in 4 MiB");
}
