//! What work queues for: units that serve one piece of work at a time.

use crate::time::Time;

/// Units that serve in the order in which work comes.
#[derive(Clone, Debug)]
pub struct Servers {
    /// When each is free again.
    free: Vec<Time>,
    /// Time that they worked.
    busy: Time,
}

impl Servers {
    /// `count` units.
    pub fn new(count: usize) -> Self {
        Self { free: vec![Time::ZERO; count.max(1)], busy: Time::ZERO }
    }

    /// Work that comes at `at` and takes `length`: when it ends, on the unit that is free first.
    pub fn serve(&mut self, at: Time, length: Time) -> Time {
        let free = self.free.iter_mut().min().expect("at least one");
        let end = at.max(*free) + length;
        *free = end;
        self.busy += length;
        end
    }

    /// Time that all of them worked.
    pub fn busy(&self) -> Time {
        self.busy
    }
}

/// A link, or a bus: bytes pass one behind the other.
#[derive(Clone, Debug)]
pub struct Pipe {
    ps_per_byte: f64,
    free: Time,
    bytes: u64,
}

impl Pipe {
    /// A pipe of so many bytes a nanosecond (GB/s).
    pub fn new(bytes_per_ns: f64) -> Self {
        Self { ps_per_byte: 1e3 / bytes_per_ns, free: Time::ZERO, bytes: 0 }
    }

    /// How long `bytes` take.
    pub fn length(&self, bytes: u64) -> Time {
        Time((bytes as f64 * self.ps_per_byte).round() as u64)
    }

    /// `bytes` that begin to enter at `at` at the earliest: when the last one has.
    pub fn enter(&mut self, at: Time, bytes: u64) -> Time {
        let end = at.max(self.free) + self.length(bytes);
        self.free = end;
        self.bytes += bytes;
        end
    }

    /// `bytes` that come out of another pipe, the last one at `at`: when that has passed this one too. They
    /// are not collected in between.
    pub fn follow(&mut self, other: &Pipe, at: Time, bytes: u64) -> Time {
        self.pass(other.length(bytes), at, bytes)
    }

    /// [`Pipe::follow`] behind a pipe of the same width.
    pub fn leave(&mut self, at: Time, bytes: u64) -> Time {
        self.pass(self.length(bytes), at, bytes)
    }

    fn pass(&mut self, came_in: Time, at: Time, bytes: u64) -> Time {
        let begin = at.since(came_in).max(self.free);
        let end = at.max(begin + self.length(bytes));
        self.free = end;
        self.bytes += bytes;
        end
    }

    /// Bytes that passed.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_units_serve_three_pieces() {
        let mut units = Servers::new(2);
        let (at, length) = (Time(10), Time(100));
        assert_eq!(units.serve(at, length), Time(110));
        assert_eq!(units.serve(at, length), Time(110));
        assert_eq!(units.serve(at, length), Time(210));
        assert_eq!(units.serve(Time(500), length), Time(600), "an idle unit begins at once");
        assert_eq!(units.busy(), Time(400));
    }

    #[test]
    fn a_pipe_passes_bytes_one_behind_the_other() {
        let mut pipe = Pipe::new(10.0);
        assert_eq!(pipe.enter(Time(0), 10), Time(1_000));
        assert_eq!(pipe.enter(Time(500), 10), Time(2_000), "the first is in the way");
        let mut far = Pipe::new(10.0);
        assert_eq!(far.leave(Time(1_500), 10), Time(1_500), "nothing is in the way");
        assert_eq!(far.leave(Time(1_600), 10), Time(2_500), "two that arrive together");
        let (fast, mut slow) = (Pipe::new(100.0), Pipe::new(10.0));
        assert_eq!(slow.follow(&fast, Time(100), 10), Time(1_000), "the narrow one decides");
        assert_eq!(slow.bytes(), 10);
    }
}
