//! READ and WRITE through the pool: the workload of [`crate::handoff`], with keys, queues and
//! work-queue elements.
//!
//! The memory node's side is one chunk, the client's side is registered memory, so that the NIC
//! makes the only copy. Operations cycle through both in the same order as those of the bare
//! hand-off:
//!
//! ```text
//!  operation i:  chunk[(i · stride) mod region]  ⇄  buffer[(i mod in_flight) · stride]
//! ```

use std::collections::VecDeque;

use pool::{Buffer, Error, Grant, Lane, Operation, Options, Pool, Settings, Transfer};
use verbs::Nic;

use crate::access::{Direction, Meter, Outcome, Spec};

/// Limit of the send-queue building blocks that one operation takes.
const BLOCKS_PER_OPERATION: usize = 4;

/// Settings of a memory node for measurements over `region` bytes.
pub fn settings(region: usize) -> Settings {
    let chunk_bytes = (region as u64).next_power_of_two();
    Settings { donate_bytes: 2 * chunk_bytes, chunk_bytes, ..Settings::default() }
}

/// Connection options of a compute node for `in_flight` operations.
pub fn options(in_flight: usize) -> Options {
    let blocks = (in_flight * BLOCKS_PER_OPERATION).next_power_of_two().clamp(256, 1 << 15);
    Options { groups: Some(1), send_blocks: blocks as u32, ..Options::default() }
}

/// Measures READs or WRITEs on a chunk of `pool`.
///
/// # Errors
/// Errors of the pool.
pub fn measure<N: Nic>(pool: &Pool<N>, spec: &Spec) -> Result<Outcome, Error> {
    let grant = pool.allocate_blocking()?;
    assert!(grant.len >= spec.region as u64, "a chunk is smaller than the region: {spec:?}");
    let buffer = pool.buffer(spec.stride() * spec.in_flight)?;
    let target = Target { pool, spec, grant, buffer };
    target.touch_all()?;
    let outcome = if spec.in_flight == 1 { target.ping() } else { target.stream() }?;
    let Target { grant, .. } = target;
    pool.free_blocking(grant)?;
    Ok(outcome)
}

struct Target<'a, N: Nic> {
    pool: &'a Pool<N>,
    spec: &'a Spec,
    grant: Grant,
    buffer: Buffer<N>,
}

impl<N: Nic> Target<'_, N> {
    /// Writes every page of both sides once, so that the measurement includes no page fault.
    fn touch_all(&self) -> Result<(), Error> {
        let pattern: Vec<u8> = (0..self.spec.region).map(|at| (at * 31 % 251) as u8).collect();
        self.pool.write_blocking(&self.grant, 0, &pattern)?;
        let memory = self.buffer.memory();
        memory.write(0, &vec![0xa5; self.buffer.len()]);
        Ok(())
    }

    /// Posts one operation.
    fn post(&self, operation: u64) -> Result<Operation<'_, N>, Error> {
        let stride = self.spec.stride();
        let offset = |slots: usize| (operation % slots as u64) as usize * stride;
        let transfer = Transfer {
            grant: &self.grant,
            offset: offset(self.spec.region / stride) as u64,
            buffer_offset: offset(self.spec.in_flight),
            len: self.spec.size as u32,
        };
        match self.spec.direction {
            Direction::Read => self.pool.read_into(&transfer, &self.buffer, Lane(0)),
            Direction::Write => self.pool.write_from(&transfer, &self.buffer, Lane(0)),
        }
    }

    /// With one operation in flight: measures the latency of every operation.
    fn ping(&self) -> Result<Outcome, Error> {
        let mut meter = Meter::start(self.spec.duration);
        let mut since = meter.started();
        for operation in 0.. {
            self.post(operation)?.wait()?;
            match meter.completed(since, operation + 1) {
                Some(now) => since = now,
                None => break,
            }
        }
        Ok(meter.outcome())
    }

    /// With many operations in flight: posts another operation for each completion, and measures
    /// the latency of one operation at a time.
    fn stream(&self) -> Result<Outcome, Error> {
        let mut meter = Meter::start(self.spec.duration);
        let (mut sampled, mut since) = (0, meter.started());
        let mut outstanding = VecDeque::with_capacity(self.spec.in_flight);
        for operation in 0..self.spec.in_flight as u64 {
            outstanding.push_back(self.post(operation)?);
        }
        for done in 1.. {
            let oldest = outstanding.pop_front().expect("the queue stays full");
            oldest.wait()?;
            let posted = done - 1 + self.spec.in_flight as u64;
            if done > sampled {
                match meter.completed(since, done) {
                    Some(now) => (sampled, since) = (posted, now),
                    None => break,
                }
            }
            outstanding.push_back(self.post(posted)?);
        }
        // The memory must stay registered while the NIC accesses it.
        outstanding.into_iter().try_for_each(Operation::wait)?;
        Ok(meter.outcome())
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
    fn measure_runs_in_every_direction_and_depth() {
        for in_flight in [1, 16] {
            let pool = Pool::embedded(settings(64 << 10)).unwrap();
            for direction in Direction::ALL {
                for size in [8, 4096] {
                    let spec = spec(direction, size, in_flight);
                    let outcome = measure(&pool, &spec).unwrap();
                    assert!(outcome.operations > 0 && outcome.elapsed >= spec.duration, "{spec:?}");
                    assert!(outcome.latencies.count() > 0, "{spec:?}");
                }
            }
            // Each measurement frees its chunk.
            assert_eq!(pool.node_status().unwrap().node.free, 2);
        }
    }

    #[test]
    fn bytes_arrive_in_the_right_slots() {
        let spec = spec(Direction::Read, 100, 4);
        let pool = Pool::embedded(settings(spec.region)).unwrap();
        let grant = pool.allocate_blocking().unwrap();
        let buffer = pool.buffer(spec.stride() * spec.in_flight).unwrap();
        let target = Target { pool: &pool, spec: &spec, grant, buffer };
        target.touch_all().unwrap();
        for operation in 0..1000u64 {
            target.post(operation).unwrap().wait().unwrap();
            let mut slot = [0; 100];
            target.buffer.memory().read(operation as usize % 4 * spec.stride(), &mut slot);
            let from = operation as usize % (spec.region / spec.stride()) * spec.stride();
            let expected = |at: usize| ((from + at) * 31 % 251) as u8;
            assert!((0..100).all(|at| slot[at] == expected(at)), "operation {operation}");
        }
    }
}
