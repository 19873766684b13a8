//! Bare userfaultfd: the yardstick of the pager.
//!
//! A fault with nothing behind it: no page table of ours, no pool, no residency policy. The
//! handler blocks in read(2) on the faulting thread's own core, which is where it wakes
//! fastest, and answers with UFFDIO_COPY:
//!
//! ```text
//!  random       touch a missing page  ─▶  UFFDIO_COPY of that page
//!  sequential   touch a missing page  ─▶  UFFDIO_COPY of it and the 63 behind it,
//!                                         MADV_DONTNEED of the oldest 64 above the local bound
//! ```
//!
//! With random touches the memory is dropped between the rounds, outside the measured time:
//! what is measured is the fault alone.
//!
//! In records it is the scheme [`crate::bare::SCHEME`] on the NIC [`crate::bare::NIC`].

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pager::uffd::{Event, Features, Uffd};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Error;
use crate::cores::{self, system};
use crate::fault::{Outcome, PAGE_BYTES, Pattern, Spec};
use crate::histogram::Latencies;

/// Pages of one UFFDIO_COPY with sequential touches.
const BATCH_PAGES: usize = 64;
/// Pages that are touched before the clock counts.
const WARM_UP_PAGES: u64 = 2048;

/// Measures bare userfaultfd.
///
/// # Errors
/// [`Error::Pager`] if userfaultfd is not permitted; [`Error::System`] if a system call fails.
pub fn measure(spec: &Spec) -> Result<Outcome, Error> {
    let batch = match spec.pattern {
        Pattern::Random => 1,
        Pattern::Sequential => BATCH_PAGES,
    };
    let pages = spec.memory / PAGE_BYTES / batch * batch;
    let local_batches = spec.local / PAGE_BYTES / batch;
    assert!(local_batches > 0 && pages / batch > local_batches, "nothing is remote: {spec:?}");

    let uffd = Uffd::open(Features::default())?;
    // One page more, at the end: a touch of it tells the handler to stop.
    let memory = Mapping::new((pages + 1) * PAGE_BYTES)?;
    let source = Mapping::new(batch * PAGE_BYTES)?;
    source.touch_all();
    // SAFETY: the mapping is ours and outlives the descriptor's use below; its faults are
    // resolved by the handler.
    unsafe { uffd.register(memory.start, memory.len) }.map_err(system("register memory"))?;
    let handler = Handler { uffd: &uffd, memory: &memory, source: &source, batch, local_batches };
    let evicts = spec.pattern == Pattern::Sequential;
    let failed = AtomicBool::new(false);
    // Some core that this thread may use: the one that it is on.
    let core = rustix::thread::sched_getcpu();
    thread::scope(|scope| {
        let handling = scope.spawn(|| {
            let handled = cores::pin(core).and_then(|()| handler.run(evicts));
            if handled.is_err() {
                // Whoever waits at a page goes on (with zeros), sees this and stops.
                failed.store(true, Ordering::Release);
                let _ = uffd.unregister(memory.start, memory.len);
            }
            handled
        });
        let touching = scope.spawn(|| {
            let pinned = cores::pin(core);
            let toucher = Toucher { memory: &memory, pages, failed: &failed };
            let outcome = pinned.and_then(|()| match spec.pattern {
                Pattern::Random => toucher.random(spec.duration),
                Pattern::Sequential => Ok(toucher.sequential(spec.duration)),
            });
            memory.touch(pages);
            outcome
        });
        let outcome = touching.join().expect("the touching thread does not panic");
        handling.join().expect("the handler does not panic")?;
        outcome
    })
}

/// Answers faults.
struct Handler<'a> {
    uffd: &'a Uffd,
    memory: &'a Mapping,
    source: &'a Mapping,
    batch: usize,
    local_batches: usize,
}

impl Handler<'_> {
    /// Answers until the last page is touched.
    fn run(&self, evicts: bool) -> Result<(), Error> {
        let last = self.memory.start + self.memory.len - PAGE_BYTES;
        let batch_bytes = self.batch * PAGE_BYTES;
        let mut resident = VecDeque::new();
        let mut events = Vec::new();
        loop {
            self.uffd.read(&mut events).map_err(system("read a fault"))?;
            for event in events.drain(..) {
                let Event::Fault(fault) = event else { continue };
                if fault.address == last {
                    return self.copy(last, PAGE_BYTES);
                }
                self.copy(fault.address, batch_bytes)?;
                if !evicts {
                    continue;
                }
                resident.push_back(fault.address);
                if resident.len() > self.local_batches
                    && let Some(oldest) = resident.pop_front()
                {
                    self.memory.drop_pages(oldest, batch_bytes)?;
                }
            }
        }
    }

    fn copy(&self, to: usize, bytes: usize) -> Result<(), Error> {
        // SAFETY: the source has a batch of pages, `to` is a fault's page in the registered
        // memory, and batches end within it because touches begin at a multiple of a batch.
        let copied = unsafe { self.uffd.copy(to, self.source.start, bytes, false) };
        copied.map(drop).map_err(system("resolve a fault"))
    }
}

/// Touches pages and takes the time.
struct Toucher<'a> {
    memory: &'a Mapping,
    pages: usize,
    failed: &'a AtomicBool,
}

impl Toucher<'_> {
    fn random(&self, duration: Duration) -> Result<Outcome, Error> {
        let mut order: Vec<usize> = (0..self.pages).collect();
        let mut random = SplitMix::new(0x6772_616e);
        let mut outcome = Outcome::default();
        let mut warm_up = WARM_UP_PAGES;
        while outcome.elapsed < duration && !self.failed() {
            random.shuffle(&mut order);
            for &page in &order {
                let start = Instant::now();
                self.memory.touch(page);
                let latency = start.elapsed();
                if warm_up > 0 {
                    warm_up -= 1;
                    continue;
                }
                outcome.latencies.record(latency);
                outcome.pages += 1;
                outcome.elapsed += latency;
                if outcome.elapsed >= duration || self.failed() {
                    break;
                }
            }
            self.memory.drop_pages(self.memory.start, self.pages * PAGE_BYTES)?;
        }
        Ok(outcome)
    }

    fn sequential(&self, duration: Duration) -> Outcome {
        let mut warm_up = WARM_UP_PAGES;
        let mut start = Instant::now();
        let mut touched = 0;
        for page in (0..self.pages).cycle() {
            self.memory.touch(page);
            if warm_up > 0 {
                warm_up -= 1;
                start = Instant::now();
                continue;
            }
            touched += 1;
            // The clock at the end of a batch, where the next touch faults anyway.
            if page % BATCH_PAGES == BATCH_PAGES - 1
                && (start.elapsed() >= duration || self.failed())
            {
                break;
            }
        }
        Outcome { latencies: Latencies::new(), pages: touched, elapsed: start.elapsed() }
    }

    fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

/// Private anonymous memory of this module's own.
struct Mapping {
    start: usize,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> Result<Self, Error> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without a fixed address no mapping of anybody is replaced.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) };
        let start = start.map_err(|errno| system("map memory")(errno.into()))? as usize;
        let mapping = Self { start, len };
        mapping.advise(start, len, Advice::LinuxNoHugepage)?;
        Ok(mapping)
    }

    /// Reads a byte of a page; waits while it is missing.
    fn touch(&self, page: usize) {
        let address = self.start + page * PAGE_BYTES;
        assert!(page * PAGE_BYTES < self.len, "page {page} is not in the mapping");
        // SAFETY: within the mapping, which is readable as long as `self` lives; the read is
        // volatile, and nobody has a reference to this memory.
        unsafe { std::ptr::read_volatile(address as *const u8) };
    }

    /// Writes a byte of each page, so that each is there.
    fn touch_all(&self) {
        for address in (self.start..self.start + self.len).step_by(PAGE_BYTES) {
            // SAFETY: within the mapping, which is writable as long as `self` lives, and
            // nobody has a reference to this memory.
            unsafe { std::ptr::write_volatile(address as *mut u8, 0x5a) };
        }
    }

    /// Drops pages: the next touch faults again.
    fn drop_pages(&self, start: usize, len: usize) -> Result<(), Error> {
        self.advise(start, len, Advice::LinuxDontNeed)
    }

    fn advise(&self, start: usize, len: usize, advice: Advice) -> Result<(), Error> {
        assert!(start >= self.start && start + len <= self.start + self.len, "not our memory");
        // SAFETY: the range is this mapping's, whose content nobody relies on.
        unsafe { rustix::mm::madvise(start as *mut c_void, len, advice) }
            .map_err(|errno| system("advise on memory")(errno.into()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and its borrowers are gone. If it fails, the memory is
        // leaked, which harms nobody.
        let _ = unsafe { rustix::mm::munmap(self.start as *mut c_void, self.len) };
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): as random as a shuffle needs, and repeatable.
pub(crate) struct SplitMix(u64);

impl SplitMix {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            let other = self.next() % (at as u64 + 1);
            items.swap(at, other as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_resolved_and_measured() {
        for pattern in Pattern::ALL {
            let duration = Duration::from_millis(30);
            let spec = Spec { pattern, memory: 16 << 20, local: 4 << 20, duration };
            let outcome = match measure(&spec) {
                Ok(outcome) => outcome,
                Err(Error::Pager(error)) => {
                    eprintln!("skipped: {error}");
                    return;
                }
                Err(error) => panic!("{error}"),
            };
            assert!(outcome.pages > 0 && outcome.elapsed >= duration, "{outcome:?}");
            let faults = outcome.latencies.count();
            match pattern {
                Pattern::Random => assert_eq!(faults, outcome.pages),
                Pattern::Sequential => assert_eq!(faults, 0),
            }
        }
    }

    #[test]
    fn a_shuffle_keeps_all() {
        let mut items: Vec<usize> = (0..1000).collect();
        SplitMix::new(1).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort();
        assert!(items.iter().copied().eq(0..1000));
    }
}
