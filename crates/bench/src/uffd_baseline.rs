//! Bare userfaultfd: the baseline of the pager.
//!
//! Faults are resolved without a pager: no page table, no pool, no residency policy. The handler
//! blocks in read(2) on the faulting thread's own core, where it wakes fastest, and resolves the
//! fault with UFFDIO_COPY:
//!
//! ```text
//!  random       touch a missing page  ─▶  UFFDIO_COPY of that page
//!  sequential   touch a missing page  ─▶  UFFDIO_COPY of that page and the next 63,
//!                                         MADV_DONTNEED of the oldest 64 above the local limit
//! ```
//!
//! With random touches the memory is dropped between the rounds, outside the measured time, so that
//! only the fault is measured.
//!
//! In records the scheme is [`bench_report::record::BASELINE_SCHEME`] and the NIC
//! [`bench_report::record::BASELINE_NIC`].

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pager::uffd::{Event, Features, Uffd};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Error;
use crate::cores::{self, system};
use crate::fault::{Outcome, Pattern, Spec};
use bench_report::histogram::Latencies;
use units::{PAGE_BYTES, Random};

/// Pages per UFFDIO_COPY with sequential touches.
const BATCH_PAGES: usize = 64;
/// Pages that are touched before the measurement.
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
    assert!(local_batches > 0 && pages / batch > local_batches, "all pages are local: {spec:?}");

    let uffd = Uffd::open(Features::default())?;
    // One extra page at the end: a touch of that page tells the handler to stop.
    let memory = Mapping::new((pages + 1) * PAGE_BYTES)?;
    let source = Mapping::new(batch * PAGE_BYTES)?;
    source.touch_all();
    // SAFETY: the mapping outlives the use of the descriptor below, and the handler resolves its
    // faults.
    unsafe { uffd.register(memory.start, memory.len) }.map_err(system("register memory"))?;
    let handler = Handler { uffd: &uffd, memory: &memory, source: &source, batch, local_batches };
    let evicts = spec.pattern == Pattern::Sequential;
    let failed = AtomicBool::new(false);
    // Both threads share the core on which this thread runs.
    let core = rustix::thread::sched_getcpu();
    thread::scope(|scope| {
        let handling = scope.spawn(|| {
            let handled = cores::pin(core).and_then(|()| handler.run(evicts));
            if handled.is_err() {
                // Unregistering resumes the faulting thread with a zero page; that thread then
                // sees the flag and stops.
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

/// Resolves faults.
struct Handler<'a> {
    uffd: &'a Uffd,
    memory: &'a Mapping,
    source: &'a Mapping,
    batch: usize,
    local_batches: usize,
}

impl Handler<'_> {
    /// Resolves faults until the last page is touched.
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
        // SAFETY: the source has one batch of pages, and `to` is the page of a fault in the
        // registered memory. Batches end within that memory, because touches start at a multiple
        // of the batch size.
        let copied = unsafe { self.uffd.copy(to, self.source.start, bytes, false) };
        copied.map(drop).map_err(system("resolve a fault"))
    }
}

/// Touches pages and measures the time.
struct Toucher<'a> {
    memory: &'a Mapping,
    pages: usize,
    failed: &'a AtomicBool,
}

impl Toucher<'_> {
    fn random(&self, duration: Duration) -> Result<Outcome, Error> {
        let mut order: Vec<usize> = (0..self.pages).collect();
        let mut random = Random::stream(0x6772_616e, 0);
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
            // Reads the clock only at the end of a batch, before a touch that faults anyway.
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

/// Private anonymous memory.
struct Mapping {
    start: usize,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> Result<Self, Error> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without a fixed address the call replaces no existing mapping.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) };
        let start = start.map_err(|errno| system("map memory")(errno.into()))? as usize;
        let mapping = Self { start, len };
        mapping.advise(start, len, Advice::LinuxNoHugepage)?;
        Ok(mapping)
    }

    /// Reads a byte of a page; blocks while the page is missing.
    fn touch(&self, page: usize) {
        let address = self.start + page * PAGE_BYTES;
        assert!(page * PAGE_BYTES < self.len, "page {page} is not in the mapping");
        // SAFETY: the address is in the mapping, which is readable as long as `self` lives. The
        // read is volatile, and no reference to this memory exists.
        unsafe { std::ptr::read_volatile(address as *const u8) };
    }

    /// Writes a byte of each page, so that every page is resident.
    fn touch_all(&self) {
        for address in (self.start..self.start + self.len).step_by(PAGE_BYTES) {
            // SAFETY: the address is in the mapping, which is writable as long as `self` lives,
            // and no reference to this memory exists.
            unsafe { std::ptr::write_volatile(address as *mut u8, 0x5a) };
        }
    }

    /// Drops pages, so that their next touch faults.
    fn drop_pages(&self, start: usize, len: usize) -> Result<(), Error> {
        self.advise(start, len, Advice::LinuxDontNeed)
    }

    fn advise(&self, start: usize, len: usize, advice: Advice) -> Result<(), Error> {
        let end = self.start + self.len;
        assert!(start >= self.start && start + len <= end, "the range is outside the mapping");
        // SAFETY: the range is in this mapping, and no code relies on its content.
        unsafe { rustix::mm::madvise(start as *mut c_void, len, advice) }
            .map_err(|errno| system("advise on memory")(errno.into()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no borrower is left. A failed call would only
        // leak the memory.
        let _ = unsafe { rustix::mm::munmap(self.start as *mut c_void, self.len) };
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
}
