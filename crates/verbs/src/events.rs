//! Asynchronous events.

use serde::{Deserialize, Serialize};

use crate::cqe::Syndrome;
use crate::{Cqn, Qpn, Srqn};

/// Affiliated asynchronous events (IBTA vol. 1, chapter 11, "asynchronous events").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AsyncEvent {
    /// The QP went to Error because one of its WQEs failed or because it refused its peer's
    /// request.
    QpError {
        /// The QP.
        qpn: Qpn,
        /// Cause of the error.
        syndrome: Syndrome,
        /// True: the QP rejected a request of its peer, which produces no completion at this QP.
        /// False: one of the QP's own WQEs failed.
        by_peer: bool,
    },
    /// A completion found the CQ full. The CQ accepts no more completions; a QP that completes to
    /// this CQ goes to Error at its next completion.
    CqOverrun {
        /// The CQ.
        cqn: Cqn,
    },
    /// Fewer receive WQEs are left in the SRQ than its limit. The event disarms the limit.
    SrqLimit {
        /// The SRQ.
        srqn: Srqn,
    },
    /// The QP is in Error and uses no more receive WQEs of its SRQ.
    LastWqeReached {
        /// The QP.
        qpn: Qpn,
    },
}

/// Asynchronous events of a function, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// The events.
    pub events: Vec<AsyncEvent>,
    /// Number of older events that were dropped since the previous reply because the queue was
    /// full.
    pub lost: u32,
}
