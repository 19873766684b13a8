//! State of queue pairs in the world, and the record of a step.

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
    /// Whether a `Step` event of the QP is pending.
    pub held: bool,
    /// Work reported by the NIC that is to take effect at the pending `Step`.
    pub next: Option<Next>,
    /// Earliest start of the next WQE.
    pub free: Time,
    /// Arrival time of the last request; the next one does not arrive before it.
    pub arrival: Time,
    pub managed: bool,
    /// Whether the QP is counted as one that carries a chain.
    pub chained: bool,
    pub lost: bool,
}
