//! Resources with queues: units that serve one request at a time, and pipes.

use crate::time::Time;
use crate::waits::Waits;

/// Units that serve requests in order of arrival.
#[derive(Clone, Debug)]
pub struct Servers {
    /// Time at which each unit is free again.
    free: Vec<Time>,
    waits: Waits,
}

impl Servers {
    /// Creates `count` units.
    pub fn new(count: usize) -> Self {
        Self { free: vec![Time::ZERO; count.max(1)], waits: Waits::default() }
    }

    /// Serves a request that arrives at `at` and takes `length`, on the unit that is free first;
    /// returns the end.
    pub fn serve(&mut self, at: Time, length: Time) -> Time {
        let free = self.free.iter_mut().min().expect("at least one");
        let begin = at.max(*free);
        let end = begin + length;
        *free = end;
        self.waits.add(begin.since(at), length);
        end
    }

    /// Returns the waits of the requests.
    pub fn waits(&self) -> &Waits {
        &self.waits
    }
}

/// A link or a bus: bytes pass one after another.
#[derive(Clone, Debug)]
pub struct Pipe {
    ps_per_byte: f64,
    free: Time,
    bytes: u64,
    waits: Waits,
}

impl Pipe {
    /// Creates a pipe with a rate in bytes per nanosecond (GB/s).
    pub fn new(bytes_per_ns: f64) -> Self {
        Self {
            ps_per_byte: 1e3 / bytes_per_ns,
            free: Time::ZERO,
            bytes: 0,
            waits: Waits::default(),
        }
    }

    /// Returns the transfer time of `bytes`.
    pub fn length(&self, bytes: u64) -> Time {
        Time((bytes as f64 * self.ps_per_byte).round() as u64)
    }

    /// Transfers `bytes`, of which the first is there at `from` and the last at `last`; returns
    /// when the first byte enters and when the last byte has passed.
    ///
    /// Transfers pass in the order of the calls, so a caller waits for the event at `from`.
    pub fn pass(&mut self, from: Time, last: Time, bytes: u64) -> (Time, Time) {
        let begin = from.max(self.free);
        let end = last.max(begin + self.length(bytes));
        self.free = end;
        self.bytes += bytes;
        self.waits.add(begin.since(from), end.since(begin));
        (begin, end)
    }

    /// Transfers `bytes` that come out of another pipe, the last byte at `at`; returns when the
    /// last byte has passed this pipe too. The bytes are not buffered in between.
    pub fn follow(&mut self, other: &Pipe, at: Time, bytes: u64) -> Time {
        self.pass(at.since(other.length(bytes)), at, bytes).1
    }

    /// Returns the number of bytes that passed.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the waits of the transfers.
    pub fn waits(&self) -> &Waits {
        &self.waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_units_serve_three_requests() {
        let mut units = Servers::new(2);
        let (at, length) = (Time(10), Time(100));
        assert_eq!(units.serve(at, length), Time(110));
        assert_eq!(units.serve(at, length), Time(110));
        assert_eq!(units.serve(at, length), Time(210));
        assert_eq!(units.serve(Time(500), length), Time(600), "an idle unit begins at once");
        assert_eq!(units.waits().busy(), Time(400));
        assert_eq!(units.waits().most(), Time(100));
    }

    #[test]
    fn pipe_serializes_transfers() {
        let mut pipe = Pipe::new(10.0);
        let mut enter = |at| pipe.pass(at, at, 10);
        assert_eq!(enter(Time(0)), (Time(0), Time(1_000)));
        assert_eq!(enter(Time(500)), (Time(1_000), Time(2_000)), "the first occupies the pipe");
        let slow_source = pipe.pass(Time(3_000), Time(9_000), 10);
        assert_eq!(slow_source, (Time(3_000), Time(9_000)), "the bytes come slowly");
        let mut far = Pipe::new(10.0);
        let long = far.pass(Time(1_000), Time(9_000), 80);
        let short = far.pass(Time(5_000), Time(5_500), 5);
        assert_eq!((long.1, short), (Time(9_000), (Time(9_000), Time(9_500))), "no time is lost");
        let (fast, mut slow) = (Pipe::new(100.0), Pipe::new(10.0));
        assert_eq!(slow.follow(&fast, Time(100), 10), Time(1_000), "the slower pipe decides");
        assert_eq!(slow.bytes(), 10);
    }
}
