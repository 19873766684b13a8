//! Resource usage of this process: CPU time of a thread, readable by other threads, and RAM.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

/// The CPU clock of one thread.
#[derive(Default)]
pub struct ThreadClock {
    /// Thread ID in the kernel; 0 before [`ThreadClock::adopt`] and after [`ThreadClock::retire`].
    tid: AtomicI32,
    /// Last value of the clock, kept after the thread's end.
    last_ns: AtomicU64,
}

impl ThreadClock {
    /// Makes this the calling thread's clock.
    pub fn adopt(&self) {
        self.tid.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
    }

    /// Records the final value. Must be called by the clock's thread before it ends.
    pub fn retire(&self) {
        self.last_ns.store(self.read().as_nanos() as u64, Ordering::Release);
        self.tid.store(0, Ordering::Release);
    }

    /// CPU time of the thread, user and system.
    pub fn read(&self) -> Duration {
        let tid = self.tid.load(Ordering::Acquire);
        let last = Duration::from_nanos(self.last_ns.load(Ordering::Acquire));
        if tid == 0 {
            return last;
        }
        // The kernel's encoding of a thread's CPU clock (`MAKE_THREAD_CPUCLOCK`, CPUCLOCK_SCHED).
        let clock = (!tid << 3) | 0b110;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a valid place for the result; an unknown clock is an error.
        match unsafe { libc::clock_gettime(clock, &mut time) } {
            0 => Duration::new(time.tv_sec as u64, time.tv_nsec as u32),
            _ => last,
        }
    }
}

/// Private (anonymous) resident memory of this process in bytes, accurate to some hundred KiB; 0 if
/// the system does not report it. The kernel maintains the sum, so the cost does not depend on the
/// size.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn thread_clock_is_readable_during_and_after_the_thread() {
        let clock = Arc::new(ThreadClock::default());
        assert_eq!(clock.read(), Duration::ZERO);
        let worker = thread::spawn({
            let clock = clock.clone();
            move || {
                clock.adopt();
                while clock.read() < Duration::from_millis(5) {
                    std::hint::spin_loop();
                }
                clock.retire();
            }
        });
        while clock.read() < Duration::from_millis(2) {
            thread::yield_now();
        }
        worker.join().unwrap();
        let end = clock.read();
        assert!(end >= Duration::from_millis(5), "{end:?}");
        assert_eq!(clock.read(), end);
    }
}
