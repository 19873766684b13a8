//! The state of a connection to a QP of another NIC.

use crate::wire::Envelope;
use crate::wire::guess_limiter::GuessLimiter;
use crate::wire::mac::{Opener, Sealer};
use crate::wire::piggyback::PiggybackState;
use crate::wire::requester::Requester;
use crate::wire::responder::Responder;
use verbs::{QpState, RemotePeer};

/// Building blocks of the longest WQE.
pub(super) const LONGEST_BLOCKS: u32 = 16;

/// A connection to a QP of another NIC.
pub(crate) struct Connection {
    pub peer: RemotePeer,
    pub requester: Requester,
    pub responder: Responder,
    /// Authentication of the peer's packets.
    pub(super) auth: PacketAuth,
    /// Reason why the next WQE was not executed when it was fetched last.
    pub(super) fetch_gate: FetchGate,
    /// The time of its entry among the timers.
    pub(super) timer_ns: Option<u64>,
    /// Number of WQEs fetched while an acknowledgement was pending.
    pub(super) fetched: u8,
    /// The connection is counted in `RemoteState::awaiting`.
    pub(super) is_awaiting: bool,
    /// Kind of the current delay of its acknowledgement, and the start time of the delay.
    pub(super) ack_delay: AckDelay,
    pub(super) ack_delay_since_ns: u64,
    /// Detects whether acknowledgements can be piggybacked on requests.
    pub(super) piggyback: PiggybackState,
    /// Memory charged to its function, in bytes.
    pub(super) bytes: u64,
}

/// Authentication of the peer's packets.
pub(super) enum PacketAuth {
    /// By address and PSN, with a budget for wrong PSNs; packets have an ICRC.
    Psn(GuessLimiter),
    /// By a tag in each packet.
    Key(Box<Keys>),
}

/// Authentication keys of a connection.
pub(super) struct Keys {
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
}

/// Delay of acknowledgements of short messages; as a policy, or as the kind of one delay.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AckDelay {
    /// No delay.
    None,
    /// Piggybacking: in request/response traffic, an acknowledgement is delayed for up to 100 us,
    /// to be sent with a request of the same QP.
    Piggyback,
    /// Every acknowledgement of a short message is delayed until the port changes the policy.
    All,
}

/// Condition for fetching the next WQE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FetchGate {
    /// None.
    Open,
    /// All earlier requests have completed.
    AfterAll,
    /// All earlier READs and atomics have completed.
    AfterReads,
}

impl Connection {
    pub(super) fn envelope(&self) -> Envelope {
        Envelope { from: self.peer.local, to: self.peer.address }
    }

    /// The sealer of outgoing packets, if the connection is authenticated.
    pub(super) fn sealer(&mut self) -> Option<&mut Sealer> {
        match &mut self.auth {
            PacketAuth::Psn(_) => None,
            PacketAuth::Key(keys) => Some(&mut keys.sealer),
        }
    }

    /// True if the next WQE may be fetched.
    pub fn may_fetch(&self) -> bool {
        self.requester.has_room(LONGEST_BLOCKS)
            && match self.fetch_gate {
                FetchGate::Open => true,
                FetchGate::AfterAll => self.requester.is_empty(),
                FetchGate::AfterReads => !self.requester.reads_outstanding(),
            }
    }

    /// True if a packet is ready to be sent.
    pub fn has_packets(&self, state: QpState) -> bool {
        self.responder.has_output() && self.ack_delay == AckDelay::None
            || state == QpState::ReadyToSend && self.requester.next(1).is_some()
    }
}
