//! The bare hand-off between two threads: the baseline of READ and WRITE.
//!
//! This is a software RNIC without keys, queues and work-queue elements: the client writes a
//! doorbell (one cache line), the server copies (one `memcpy` per operation) and writes a
//! completion counter (another cache line).
//!
//! ```text
//!  client thread                                server thread
//!  doorbell = operations posted      ───────▶   copies operation by operation
//!  polls                             ◀───────   completion = operations done
//!
//!  operation i:  region[(i · stride) mod region]  ⇄  local[i mod in_flight]
//! ```
//!
//! Both counters only grow, so each side needs only a load, a store and a subtraction. Each side
//! runs on its own core if there are two. With both sides on one core the baseline would be slow,
//! and the ratio to it too favourable. A waiting side spins and then yields its core, so that the
//! measurement also ends on a single core. A waiting side never sleeps, because its peer always has
//! work while it waits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::Error;
use crate::access::{Direction, Meter, Outcome, Spec};
use crate::cores;

/// Spins of a waiting side before it yields, if it has its own core.
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
    /// Stands in for the memory node's chunk.
    region: Vec<u8>,
    /// The client's buffer: `in_flight` slots of `stride` bytes.
    local: Vec<u8>,
    doorbell: Line,
    completion: Line,
    stop: AtomicBool,
}

/// Source and destination of the copies, as the server uses them.
#[derive(Clone, Copy)]
struct Buffers {
    from: *const u8,
    /// Slots of `stride` bytes at `from`.
    from_slots: u64,
    to: *mut u8,
    /// Slots of `stride` bytes at `to`.
    to_slots: u64,
    stride: usize,
    size: usize,
}

// SAFETY: only the server thread uses these pointers, and `Handoff::run` keeps the buffers alive
// and untouched until that thread has ended.
unsafe impl Send for Buffers {}

impl Handoff {
    fn new(spec: &Spec) -> Self {
        assert!(spec.size > 0 && spec.in_flight > 0, "nothing to hand over: {spec:?}");
        assert!(spec.region >= spec.stride(), "the region is smaller than an operation: {spec:?}");
        // Writes every page once, so that the measurement includes no page fault.
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
        let [client_core, server_core] = cores::two()?;
        thread::scope(|scope| {
            let server = scope.spawn(move || {
                // Serves even if pinning fails, because the client waits for completions.
                let pinned = cores::pin(server_core);
                serve(buffers, doorbell, completion, stop);
                pinned
            });
            let client = scope.spawn(move || {
                cores::pin(client_core)?;
                let outcome = if spec.in_flight == 1 {
                    ping(&spec, doorbell, completion)
                } else {
                    stream(&spec, doorbell, completion)
                };
                Ok(outcome)
            });
            let outcome = client.join().expect("the client does not panic");
            stop.store(true, Ordering::Release);
            server.join().expect("the server does not panic")?;
            outcome
        })
    }

    fn buffers(&mut self) -> Buffers {
        let stride = self.spec.stride();
        let region_slots = (self.region.len() / stride) as u64;
        let local_slots = self.spec.in_flight as u64;
        let (region, local) = (self.region.as_mut_ptr(), self.local.as_mut_ptr());
        let (from, from_slots, to, to_slots) = match self.spec.direction {
            Direction::Read => (region, region_slots, local, local_slots),
            Direction::Write => (local, local_slots, region, region_slots),
        };
        let (from, size) = (from.cast_const(), self.spec.size);
        Buffers { from, from_slots, to, to_slots, stride, size }
    }
}

impl Buffers {
    /// Copies the bytes of one operation.
    fn copy(&self, operation: u64) {
        let offset = |slots: u64| (operation % slots) as usize * self.stride;
        // SAFETY: each buffer has that many slots of `stride` bytes, and `size` is at most
        // `stride`. The buffers are two allocations, and no other thread touches them while this
        // thread runs (see `Send` above).
        unsafe {
            let from = self.from.add(offset(self.from_slots));
            let to = self.to.add(offset(self.to_slots));
            std::ptr::copy_nonoverlapping(from, to, self.size);
        }
    }
}

/// The server: executes posted operations in order until `stop` is set.
fn serve(buffers: Buffers, doorbell: &AtomicU64, completion: &AtomicU64, stop: &AtomicBool) {
    let mut done = 0;
    let mut wait = Wait::new();
    while !stop.load(Ordering::Acquire) {
        let posted = doorbell.load(Ordering::Acquire);
        if posted == done {
            wait.pause();
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

/// The client with one operation in flight: measures the latency of every operation.
fn ping(spec: &Spec, doorbell: &AtomicU64, completion: &AtomicU64) -> Outcome {
    let mut wait = Wait::new();
    let mut meter = Meter::start(spec.duration);
    let mut since = meter.started();
    for operation in 1.. {
        doorbell.store(operation, Ordering::Release);
        while completion.load(Ordering::Acquire) < operation {
            wait.pause();
        }
        wait.reset();
        match meter.completed(since, operation) {
            Some(now) => since = now,
            None => break,
        }
    }
    meter.outcome()
}

/// The client with many operations in flight: writes the doorbell for each operation, keeps the
/// queue full, and measures the latency of one operation at a time.
fn stream(spec: &Spec, doorbell: &AtomicU64, completion: &AtomicU64) -> Outcome {
    let depth = spec.in_flight as u64;
    let mut wait = Wait::new();
    let mut meter = Meter::start(spec.duration);
    let mut posted = 0;
    // The operation whose latency is being measured, and the time of its post.
    let (mut sampled, mut since) = (0, meter.started());
    loop {
        let done = completion.load(Ordering::Acquire);
        if done + depth == posted {
            wait.pause();
            continue;
        }
        wait.reset();
        posted += 1;
        doorbell.store(posted, Ordering::Release);
        if done < sampled {
            continue;
        }
        match meter.completed(since, done) {
            Some(now) => (sampled, since) = (posted, now),
            None => return meter.outcome(),
        }
    }
}

/// Wait strategy: spins for short waits, then yields the core.
struct Wait {
    spins: u32,
    limit: u32,
}

impl Wait {
    fn new() -> Self {
        let cores = units::cpus::cores();
        Self { spins: 0, limit: if cores == 1 { 0 } else { SPINS } }
    }

    fn pause(&mut self) {
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
    fn bytes_arrive_in_the_right_slots() {
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
            let slots = |buffer: &[u8]| buffer.len() / spec.stride();
            // Later operations have overwritten the slots of all but the last operations.
            let done = handoff.completion.0.load(Ordering::Acquire);
            let last = done.saturating_sub(slots(to) as u64)..done;
            assert!(!last.is_empty());
            for operation in last {
                let at = |buffer: &[u8]| operation as usize % slots(buffer) * spec.stride();
                let (from, to) = (&from[at(from)..][..size], &to[at(to)..][..size]);
                assert!(from == to, "{spec:?}: operation {operation} of {done}");
            }
        }
    }

    #[test]
    fn mean_latency_matches_the_rate_with_one_in_flight() {
        let outcome = measure(&spec(Direction::Read, 64, 1)).unwrap();
        let per_operation_us = outcome.elapsed.as_secs_f64() * 1e6 / outcome.operations as f64;
        let off = outcome.latencies.mean_us() / per_operation_us;
        assert!((0.9..1.1).contains(&off), "mean latency over time per operation is {off}");
    }
}
