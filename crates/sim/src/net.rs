//! What the network does to packets besides taking time: it loses, delays and holds them.
//!
//! A QP is reliable: a packet that is lost is sent again after a time-out, so that what a loss amounts to
//! is delay, on the way there or on the way back. Requests of one QP stay in order. A peer that does
//! not answer for too long breaks the QP: its request was not done if the way there was cut, and was done
//! if it was the way back.
//!
//! The memory node's QPs are patient: they try for as long as it takes. (InfiniBand's longest time-out is
//! hours.) A compute node that waits for a reply has nothing in flight that could fail, so it would never
//! hear that the memory node has given up; and who is gone, the memory node learns on the control
//! connection.

use crate::random::Random;
use crate::state::NodeId;
use crate::time::Time;

/// How bad the network is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// One packet in so many is lost; 0: none.
    pub loss: u64,
    /// One packet in so many is late; 0: none.
    pub late: u64,
    /// By how much at most.
    pub late_by: Time,
    /// When nodes cannot reach each other.
    pub partition: Option<Partition>,
}

/// A time in which two nodes cannot reach each other.
#[derive(Clone, Copy, Debug)]
pub struct Partition {
    /// One of them.
    pub a: NodeId,
    /// The other.
    pub b: NodeId,
    /// Since when.
    pub from: Time,
    /// Until when.
    pub until: Time,
    /// Only what `a` sends to `b` is held: what `b` asks arrives, and is not answered.
    pub one_way: bool,
}

impl Partition {
    fn holds(&self, x: NodeId, y: NodeId, at: Time) -> bool {
        let there = (self.a, self.b) == (x, y);
        let between = there || !self.one_way && (self.a, self.b) == (y, x);
        between && (self.from..self.until).contains(&at)
    }
}

/// Tries before a QP gives up (`retry_cnt` of 7).
pub(crate) const TRIES: u32 = 7;

/// The network.
pub(crate) struct Net {
    faults: Faults,
    random: Random,
    retry: Time,
}

impl Net {
    pub fn new(seed: u64, retry: Time) -> Self {
        Self { faults: Faults::default(), random: Random::new(seed, 1), retry }
    }

    pub fn set(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// How much later than it should a packet arrives that leaves at `at`; `None` if all tries to send it
    /// are lost. Who is `patient` tries for as long as it takes.
    pub fn delay(&mut self, from: NodeId, to: NodeId, at: Time, patient: bool) -> Option<Time> {
        let f = &self.faults;
        if f.loss == 0 && f.late == 0 && f.partition.is_none() {
            return Some(Time::ZERO);
        }
        let mut late = Time::ZERO;
        let mut tries = 0;
        while patient || tries <= TRIES {
            tries += 1;
            let held = f.partition.is_some_and(|p| p.holds(from, to, at + late));
            if !held && !self.random.once_in(f.loss) {
                if self.random.once_in(f.late) {
                    late += Time(self.random.below(f.late_by.0.max(1)));
                }
                return Some(late);
            }
            late += self.retry;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_packet_comes_late_and_a_partition_ends_the_tries() {
        let retry = Time::us(16);
        let mut net = Net::new(1, retry);
        let (a, b, c) = (NodeId(0), NodeId(1), NodeId(2));
        assert_eq!(net.delay(a, b, Time::ZERO, false), Some(Time::ZERO));
        net.set(Faults { loss: 2, ..Faults::default() });
        let delays: Vec<_> = (0..64).map(|_| net.delay(a, b, Time::ZERO, false)).collect();
        assert!(delays.contains(&Some(Time::ZERO)) && delays.contains(&Some(retry)));
        let (from, until) = (Time::us(10), Time::us(1000));
        let partition = Partition { a, b, from, until, one_way: false };
        net.set(Faults { partition: Some(partition), ..Faults::default() });
        assert_eq!(net.delay(b, a, Time::us(10), false), None);
        assert_eq!(net.delay(a, b, Time::us(2), false), Some(Time::ZERO), "before");
        assert_eq!(
            net.delay(a, b, Time::us(990), false),
            Some(retry),
            "it ends before the tries do"
        );
        assert_eq!(net.delay(a, c, Time::us(10), false), Some(Time::ZERO), "another node");
        let one_way = Some(Partition { one_way: true, ..partition });
        net.set(Faults { partition: one_way, ..Faults::default() });
        assert_eq!(net.delay(a, b, Time::us(10), false), None);
        assert_eq!(net.delay(b, a, Time::us(10), false), Some(Time::ZERO), "the other way");
        let patient = net.delay(a, b, Time::us(10), true).expect("it tries on");
        assert!((Time::us(990)..Time::us(1010)).contains(&patient), "{patient}");
    }
}
