//! Faults of the network: it loses, delays and blocks packets.
//!
//! A QP is reliable: a lost packet is retransmitted after a time-out, so a loss is a delay, of the
//! request or of the answer. Requests of one QP stay in order. A peer that does not answer for too
//! long breaks the QP. If the request's direction was cut, the request was not executed; if the
//! answer's direction was cut, it was.
//!
//! The memory node's QPs retransmit without limit. (InfiniBand's longest time-out is hours.)
//! Otherwise, a compute node that waits for a reply could wait forever: it has nothing in flight
//! that could fail, so it would not notice that the memory node's QP broke. The memory node learns
//! from the control connection that a compute node has departed.

use crate::ids::NodeId;
use crate::random::Random;
use crate::time::Time;

/// Fault rates of the network.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// One packet in this number is lost; 0 for none.
    pub loss: u64,
    /// One packet in this number is late; 0 for none.
    pub late: u64,
    /// Maximum delay of a late packet.
    pub late_by: Time,
    /// A partition between two nodes.
    pub partition: Option<Partition>,
}

/// A period in which two nodes cannot reach each other.
#[derive(Clone, Copy, Debug)]
pub struct Partition {
    /// The first node.
    pub a: NodeId,
    /// The second node.
    pub b: NodeId,
    /// Start of the period.
    pub from: Time,
    /// End of the period.
    pub until: Time,
    /// Only packets from `a` to `b` are blocked: requests of `b` arrive and are not answered.
    pub one_way: bool,
}

impl Partition {
    fn holds(&self, x: NodeId, y: NodeId, at: Time) -> bool {
        let there = (self.a, self.b) == (x, y);
        let between = there || !self.one_way && (self.a, self.b) == (y, x);
        between && (self.from..self.until).contains(&at)
    }
}

/// Retransmissions before a QP breaks (`retry_cnt` of 7).
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

    /// Returns the delay of a packet that leaves at `at`, beyond the link's latency. `None` if all
    /// retransmissions are lost. If `patient`, the sender retransmits without limit.
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
    fn lost_packet_is_late_and_partition_exhausts_retries() {
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
            "the partition ends before the last retransmission"
        );
        assert_eq!(net.delay(a, c, Time::us(10), false), Some(Time::ZERO), "another node");
        let one_way = Some(Partition { one_way: true, ..partition });
        net.set(Faults { partition: one_way, ..Faults::default() });
        assert_eq!(net.delay(a, b, Time::us(10), false), None);
        assert_eq!(net.delay(b, a, Time::us(10), false), Some(Time::ZERO), "the other way");
        let patient = net.delay(a, b, Time::us(10), true).expect("a patient sender");
        assert!((Time::us(990)..Time::us(1010)).contains(&patient), "{patient}");
    }
}
