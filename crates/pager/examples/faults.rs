//! Measures the pager's fault times relative to bare userfaultfd, in one run: `cargo run --release
//! -p granary-pager --example faults`.
//!
//! Bare userfaultfd is a thread that reads faults and answers each with one UFFDIO_COPY, on the
//! core of the faulting thread; for sequential faults, 64 pages per UFFDIO_COPY, and MADV_DONTNEED
//! of the previous pages. The pager runs over a memory file, with the faulting thread pinned to one
//! core or free. The rounds alternate, and the medians are compared.

use std::hint::black_box;

use pager::sys::{self, PAGE_BYTES};
use pager::uffd::{Event, Features, Uffd};
use pager::{Config, Pager};

const ROUNDS: usize = 7;
const PAGES: usize = 16384;

fn pin(core: Option<usize>) {
    // SAFETY: a zero set is valid; the calling thread's affinity only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let all = 0..units::cpus::cores().max(2);
        for index in core.map_or(all, |core| core..core + 1) {
            libc::CPU_SET(index, &mut set);
        }
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

fn touch(base: usize, page: usize) {
    // SAFETY: a mapped page of a region that is served.
    black_box(unsafe { ((base + page * PAGE_BYTES) as *const u64).read_volatile() });
}

fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    units::Random::new(1).shuffle(&mut order);
    order
}

/// Returns the nanoseconds per page of `visit` over `pages` pages: elapsed time, or with `--cpu`
/// CPU time of the process, which other load on the machine disturbs less.
fn per_page(pages: usize, visit: impl FnOnce()) -> f64 {
    let cpu = std::env::args().any(|argument| argument == "--cpu");
    let now = || if cpu { cpu_ns() } else { sys::now_ns() };
    let start = now();
    visit();
    (now() - start) as f64 / pages as f64
}

fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

struct Bare {
    base: usize,
    batch: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

impl Bare {
    fn new() -> Self {
        let base = sys::map_anonymous(PAGES * PAGE_BYTES).expect("memory");
        let source = sys::map_anonymous(64 * PAGE_BYTES).expect("memory");
        // SAFETY: just mapped.
        unsafe { std::ptr::write_bytes(source as *mut u8, 7, 64 * PAGE_BYTES) };
        let batch = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(1));
        let uffd = Uffd::open(Features::default()).expect("userfaultfd");
        // SAFETY: just mapped, and served below.
        unsafe { uffd.register(base, PAGES * PAGE_BYTES).expect("registers") };
        let pages = batch.clone();
        std::thread::spawn(move || {
            pin(Some(0));
            let mut events = Vec::new();
            loop {
                uffd.read(&mut events).expect("readable");
                for event in events.drain(..) {
                    if let Event::Fault(fault) = event {
                        let len = pages.load(std::sync::atomic::Ordering::Relaxed) * PAGE_BYTES;
                        // SAFETY: pages of the region that was registered.
                        unsafe { uffd.copy(fault.address, source, len, false).expect("copies") };
                    }
                }
            }
        });
        Self { base, batch }
    }

    fn set(&self, batch: usize) {
        self.drop_all();
        self.batch.store(batch, std::sync::atomic::Ordering::Relaxed);
    }

    fn drop_all(&self) {
        // SAFETY: the content is no longer needed.
        unsafe { sys::madvise(self.base, PAGES * PAGE_BYTES, libc::MADV_DONTNEED).expect("drops") };
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2] / 1000.0
}

fn main() {
    let local = 16 << 20;
    let config = Config::new(local, "memory:1GiB");
    let pager =
        Pager::new(&config, Pager::open_transport(&config).expect("a store")).expect("a pager");
    pager.start().expect("threads");
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    let ours = pager.map(PAGES * PAGE_BYTES, read_write).expect("a mapping");
    for page in 0..PAGES {
        // SAFETY: a mapped page of the region.
        unsafe { ((ours + page * PAGE_BYTES) as *mut u64).write_volatile(page as u64 + 1) };
    }
    let bare = Bare::new();
    let order = shuffled(PAGES);
    let some = &order[..4000];
    let mut times: [Vec<f64>; 8] = Default::default();
    for _ in 0..ROUNDS {
        pin(Some(0));
        bare.set(1);
        times[0]
            .push(per_page(some.len(), || some.iter().for_each(|&page| touch(bare.base, page))));
        times[1].push(per_page(some.len(), || some.iter().for_each(|&page| touch(ours, page))));
        bare.set(64);
        times[2].push(per_page(PAGES, || {
            for page in 0..PAGES {
                touch(bare.base, page);
                if page % 64 == 63 {
                    let start = bare.base + (page - 63) * PAGE_BYTES;
                    // SAFETY: the content is no longer needed.
                    unsafe { sys::madvise(start, 64 * PAGE_BYTES, libc::MADV_DONTNEED) }
                        .expect("drops");
                }
            }
        }));
        times[3].push(per_page(PAGES, || (0..PAGES).for_each(|page| touch(ours, page))));
        pin(None);
        times[4].push(per_page(some.len(), || some.iter().for_each(|&page| touch(ours, page))));
        times[5].push(per_page(PAGES, || (0..PAGES).for_each(|page| touch(ours, page))));
        let write = |page: usize| {
            // SAFETY: a mapped page of the region.
            unsafe { ((ours + page * PAGE_BYTES) as *mut u64).write_volatile(page as u64 + 1) }
        };
        times[6].push(per_page(PAGES, || (0..PAGES).for_each(write)));
        times[7].push(per_page(some.len(), || some.iter().for_each(|&page| write(page))));
    }
    let [bare_random, random, bare_run, run, random_free, run_free, write_run, write_random] =
        times.map(median);
    println!(
        "random read      bare {bare_random:.2} us, ours {random:.2} us ({:.2}x); not pinned \
         {random_free:.2} us ({:.2}x)",
        random / bare_random,
        random_free / bare_random
    );
    println!(
        "sequential read  bare {bare_run:.2} us, ours {run:.2} us ({:.2}x); not pinned \
         {run_free:.2} us ({:.2}x)",
        run / bare_run,
        run_free / bare_run
    );
    println!("sequential write {write_run:.2} us, random write {write_random:.2} us, not pinned");
    println!("{}", pager.stats().snapshot());
}
