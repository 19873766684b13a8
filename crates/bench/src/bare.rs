//! The bare hand-off between two threads: the yardstick of READ and WRITE.
//!
//! What is left of a software RNIC when keys, queues and work-queue elements are taken away:
//! the client rings (one cache line), the server copies (one `memcpy` an operation), the
//! server completes (another cache line).
//!
//! ```text
//!  client thread                                server thread
//!  doorbell = operations posted      ───────▶   copies operation by operation
//!  polls                             ◀───────   completion = operations done
//!
//!  operation i:  region[(i · stride) mod region]  ⇄  local[i mod in_flight]
//! ```
//!
//! Both counters only grow, so both sides need nothing but a load, a store and the difference.
//! Each side has a core of its own, if there are two: a yardstick in which the scheduler put
//! both on one would flatter whatever is measured by it. A waiting side spins and then yields its
//! core, so it also finishes when there is only one; a yielding thread does not sleep, because
//! its peer is at work as long as it waits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::Error;
use crate::access::{Direction, Meter, Outcome, Spec};
use crate::cores;

/// The name in records of what has nothing around it, in the place of a scheme.
pub const SCHEME: &str = "bare";
/// And in the place of a NIC.
pub const NIC: &str = "none";

/// How often a waiting side looks before it yields, if it has a core of its own.
const SPINS: u32 = 10_000;

/// Measures the bare hand-off.
///
/// # Errors
/// [`Error::System`] if a thread cannot be put on a core.
pub fn measure(spec: &Spec) -> Result<Outcome, Error> {
    Handoff::new(spec).run()
}

/// A counter on a cache line of its own (two, because some processors fetch lines in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

struct Handoff {
    spec: Spec,
    /// The memory node's bytes and the client's: `in_flight` places of `stride` bytes.
    region: Vec<u8>,
    local: Vec<u8>,
    doorbell: Line,
    completion: Line,
    stop: AtomicBool,
}

/// The server's view of the buffers.
#[derive(Clone, Copy)]
struct Buffers {
    from: *const u8,
    from_places: u64,
    to: *mut u8,
    to_places: u64,
    stride: usize,
    size: usize,
}

// SAFETY: only the server thread goes through these pointers, and `Handoff::run` keeps the
// buffers alive and untouched until that thread has ended.
unsafe impl Send for Buffers {}

impl Handoff {
    fn new(spec: &Spec) -> Self {
        assert!(spec.size > 0 && spec.in_flight > 0, "nothing to hand over: {spec:?}");
        assert!(spec.region >= spec.stride(), "the region holds no operation: {spec:?}");
        // Every page is written once here, so that no fault is measured.
        let pattern = |at: usize| (at * 31 % 251) as u8;
        let mut region: Vec<u8> = (0..spec.region).map(pattern).collect();
        let mut local = vec![0xa5; spec.stride() * spec.in_flight];
        if spec.direction == Direction::Write {
            local.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
            region.fill(0x5a);
        }
        Self {
            spec: *spec,
            region,
            local,
            doorbell: Line::default(),
            completion: Line::default(),
            stop: AtomicBool::new(false),
        }
    }

    fn run(&mut self) -> Result<Outcome, Error> {
        let buffers = self.buffers();
        let (doorbell, completion, stop) = (&self.doorbell.0, &self.completion.0, &self.stop);
        let spec = self.spec;
        let [ours, other] = cores::two()?;
        thread::scope(|scope| {
            let serving = scope.spawn(move || {
                // Serves in any case: the client waits for nothing else.
                let pinned = cores::pin(other);
                serve(buffers, doorbell, completion, stop);
                pinned
            });
            let client = scope.spawn(move || {
                cores::pin(ours)?;
                let outcome = if spec.in_flight == 1 {
                    ping(&spec, doorbell, completion)
                } else {
                    stream(&spec, doorbell, completion)
                };
                Ok(outcome)
            });
            let outcome = client.join().expect("the client does not panic");
            stop.store(true, Ordering::Release);
            serving.join().expect("the server does not panic")?;
            outcome
        })
    }

    fn buffers(&mut self) -> Buffers {
        let stride = self.spec.stride();
        let region_places = (self.region.len() / stride) as u64;
        let local_places = self.spec.in_flight as u64;
        let (region, local) = (self.region.as_mut_ptr(), self.local.as_mut_ptr());
        let (from, from_places, to, to_places) = match self.spec.direction {
            Direction::Read => (region, region_places, local, local_places),
            Direction::Write => (local, local_places, region, region_places),
        };
        Buffers {
            from: from.cast_const(),
            from_places,
            to,
            to_places,
            stride,
            size: self.spec.size,
        }
    }
}

impl Buffers {
    /// Moves the bytes of one operation.
    fn copy(&self, operation: u64) {
        let place = |places: u64| (operation % places) as usize * self.stride;
        // SAFETY: both buffers have `places` places of `stride` bytes, `size` is no more than
        // that, the buffers are two allocations, and nobody else touches them while this
        // thread runs (see `Send` above).
        unsafe {
            let from = self.from.add(place(self.from_places));
            let to = self.to.add(place(self.to_places));
            std::ptr::copy_nonoverlapping(from, to, self.size);
        }
    }
}

/// The server: copies what was rung for, in order, until it is told to stop.
fn serve(buffers: Buffers, doorbell: &AtomicU64, completion: &AtomicU64, stop: &AtomicBool) {
    let mut done = 0;
    let mut wait = Wait::new();
    while !stop.load(Ordering::Acquire) {
        let posted = doorbell.load(Ordering::Acquire);
        if posted == done {
            wait.turn();
            continue;
        }
        wait.reset();
        while done < posted {
            buffers.copy(done);
            done += 1;
            completion.store(done, Ordering::Release);
        }
    }
}

/// The client with one operation at a time: each one's latency is measured.
fn ping(spec: &Spec, doorbell: &AtomicU64, completion: &AtomicU64) -> Outcome {
    let mut wait = Wait::new();
    let mut meter = Meter::start(spec.duration);
    let mut since = meter.started();
    for operation in 1.. {
        doorbell.store(operation, Ordering::Release);
        while completion.load(Ordering::Acquire) < operation {
            wait.turn();
        }
        wait.reset();
        match meter.completed(since, operation) {
            Some(now) => since = now,
            None => break,
        }
    }
    meter.outcome()
}

/// The client with many in flight: rings for each operation, keeps the queue full, and
/// follows one operation at a time with the clock.
fn stream(spec: &Spec, doorbell: &AtomicU64, completion: &AtomicU64) -> Outcome {
    let depth = spec.in_flight as u64;
    let mut wait = Wait::new();
    let mut meter = Meter::start(spec.duration);
    let mut posted = 0;
    // The operation that the clock follows, and when it was posted.
    let (mut followed, mut since) = (0, meter.started());
    loop {
        let done = completion.load(Ordering::Acquire);
        if done + depth == posted {
            wait.turn();
            continue;
        }
        wait.reset();
        posted += 1;
        doorbell.store(posted, Ordering::Release);
        if done < followed {
            continue;
        }
        match meter.completed(since, done) {
            Some(now) => (followed, since) = (posted, now),
            None => return meter.outcome(),
        }
    }
}

/// Waiting: spins while that is likely to be short, then yields the core.
struct Wait {
    spins: u32,
    limit: u32,
}

impl Wait {
    fn new() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self { spins: 0, limit: if cores == 1 { 0 } else { SPINS } }
    }

    fn turn(&mut self) {
        if self.spins < self.limit {
            self.spins += 1;
            std::hint::spin_loop();
        } else {
            thread::yield_now();
        }
    }

    fn reset(&mut self) {
        self.spins = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn spec(direction: Direction, size: usize, in_flight: usize) -> Spec {
        let duration = Duration::from_millis(20);
        Spec { direction, size, in_flight, region: 64 << 10, duration }
    }

    #[test]
    fn bytes_arrive_where_they_belong() {
        for (direction, size, in_flight) in [
            (Direction::Read, 8, 1),
            (Direction::Read, 4096, 16),
            (Direction::Write, 100, 1),
            (Direction::Write, 1000, 64),
        ] {
            let spec = spec(direction, size, in_flight);
            let mut handoff = Handoff::new(&spec);
            let outcome = handoff.run().unwrap();
            assert!(outcome.operations > 0 && outcome.latencies.count() > 0, "{spec:?}");
            assert!(outcome.elapsed >= spec.duration, "{spec:?}");
            let (from, to) = match direction {
                Direction::Read => (&handoff.region, &handoff.local),
                Direction::Write => (&handoff.local, &handoff.region),
            };
            let places = |buffer: &[u8]| buffer.len() / spec.stride();
            // The last operations are the ones that nothing has overwritten since.
            let done = handoff.completion.0.load(Ordering::Acquire);
            let last = done.saturating_sub(places(to) as u64)..done;
            assert!(!last.is_empty());
            for operation in last {
                let at = |buffer: &[u8]| operation as usize % places(buffer) * spec.stride();
                let (from, to) = (&from[at(from)..][..size], &to[at(to)..][..size]);
                assert!(from == to, "{spec:?}: operation {operation} of {done}");
            }
        }
    }

    #[test]
    fn latency_and_rate_agree_one_at_a_time() {
        let outcome = measure(&spec(Direction::Read, 64, 1)).unwrap();
        let per_operation_us = outcome.elapsed.as_secs_f64() * 1e6 / outcome.operations as f64;
        let off = outcome.latencies.mean_us() / per_operation_us;
        assert!((0.9..1.1).contains(&off), "mean latency over time per operation is {off}");
    }
}
