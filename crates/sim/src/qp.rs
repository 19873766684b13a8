//! State of queue pairs in the world, and the record of a step.

use std::collections::VecDeque;

use rnic::engine::{Next, StepOutcome, Target};
use verbs::{Cqn, FunctionId, Qpn};

use crate::ids::NodeId;
use crate::time::Time;

/// A step of a QP, for observers.
#[derive(Clone, Copy, Debug)]
pub struct Observed {
    /// The QP.
    pub qpn: Qpn,
    /// The function of the QP.
    pub function: FunctionId,
    /// The function of the peer QP.
    pub towards: Option<FunctionId>,
    /// The work.
    pub next: Next,
    /// The result.
    pub stepped: StepOutcome,
    /// The request was retransmitted to the limit and never arrived.
    pub lost: bool,
    /// The request was executed, but the answer is lost permanently: the requester gets a time-out.
    pub unanswered: bool,
    /// The peer's memory that the work accessed, if any.
    pub aim: Option<Target>,
}

/// Timing state of a QP.
#[derive(Default)]
pub(crate) struct QpState {
    pub node: NodeId,
    pub send_cq: Cqn,
    pub managed: bool,
    /// Whether the QP is counted as one that carries a chain.
    pub chained: bool,
    /// Events of an earlier era have no effect: the QP has been destroyed, reset or broken since.
    pub era: u32,
    /// Whether an event will issue the next WQE, or a completion that it waits for will.
    pub planned: bool,
    /// Earliest start of the next WQE.
    pub free: Time,
    /// When the last request came to the responder's link, and when it takes effect: the next one
    /// does neither before it.
    pub arrival: Time,
    pub effect: Time,
    /// WQEs that were issued and have not taken effect, in order.
    pub flights: VecDeque<Flight>,
    /// Number of flights that have left the node: a `Land` or `Step` event of each is pending.
    pub sent: usize,
    /// Number of flights that have arrived: a `Step` event of each is pending.
    pub landed: usize,
    /// Whether an `Enter` event is pending, for the first flight that has not left.
    pub enters: bool,
}

impl QpState {
    /// Forgets the flights and what is planned.
    pub fn end_era(&mut self) {
        self.era = self.era.wrapping_add(1);
        self.flights.clear();
        (self.sent, self.landed, self.planned, self.enters) = (0, 0, false, false);
    }
}

/// A WQE that was issued and has not taken effect.
pub(crate) struct Flight {
    pub next: Next,
    /// Times at which the first and the last byte are at the link or, when the request has left, at
    /// the responder's link; none while the data is read from memory.
    pub ready: Option<(Time, Time)>,
    /// The request will not arrive.
    pub lost: bool,
}
