//! The NIC as a state machine. Inputs: control verbs, doorbells, packets, time. Outputs:
//! completions in memory, packets, events.
//!
//! ```text
//!   verbs (control.rs) ──> tables: functions, PDs, keys, CQs, receive queues, QPs
//!                             │
//!   doorbell() ──> ready QPs ──> poll() ── quantum (poll.rs) ── WQE: fetch, decode, check
//!         (queues.rs,           next function: scheduler.rs    │
//!          by function)                                           ▼
//!                 ▲                                     requester (execute.rs)
//!                 │ wake: completion counted, RECV_EN, SEND_EN,   │ admit, deliver
//!                 │ doorbell record changed (record_poller.rs)    ▼
//!              waiting QPs <── WAIT, RNR ───────────────  responder (respond.rs)
//!                                                                 ▲
//!   receive() ── packets of other NICs ── remote/ ────────────────┘ ──> outbox
//! ```
//!
//! Invariants:
//! - A WQE is fetched when it is executed: once, as a whole, into a buffer of the NIC. Only then is
//!   the WQE validated.
//! - The WQEs of a QP execute in order, and each moves all its data before the next is fetched. A
//!   QP that is connected to another NIC sends its WQEs in order, and several may be in flight.
//! - A QP is ready, or waiting, or idle. A waiting QP executes nothing.
//! - The time for one WQE, or for one slice of it, is bounded, regardless of the objects that the
//!   posting function has created.
//! - Executing a WQE allocates no memory, takes no lock and makes no system call.
//! - Whatever a WQE, ring or doorbell record contains, the worst outcome is the error state of its
//!   QP and of the peer QP.

mod attributes;
mod control;
mod core;
mod errors;
mod events;
mod execute;
mod inspect;
mod local_wqe;
mod owners;
mod poll;
pub(crate) mod qp;
mod qp_list;
pub(crate) mod queue;
mod queues;
mod record_poller;
mod remote;
mod respond;
mod scheduler;
mod scratch;
mod stepped;
#[cfg(test)]
pub(crate) mod tests;

use self::core::Core;
use crate::limits::Limits;
use crate::spec::{Event, Stats};
use crate::wire::{Outbox, WireStats};
pub use inspect::{Reachability, Target};
use queue::Fetched;
pub use remote::AckDelay;
use std::net::{IpAddr, SocketAddr};
pub use stepped::{Next, NextKind, StepOutcome};
use verbs::{Cqn, FunctionId, Qpn};

/// The software NIC. See the module documentation.
pub struct Engine {
    core: Core,
    /// The WQE in execution.
    wqe: Box<Fetched>,
}

impl Engine {
    /// Creates a NIC with its physical function.
    pub fn new(limits: Limits) -> Self {
        Self { core: Core::new(limits), wqe: Box::new(Fetched::new()) }
    }

    /// Handles a send doorbell: the unmanaged send queue of `qpn` has WQEs up to building-block
    /// index `producer`. The port has checked that the client owns the QP. A doorbell is ignored if
    /// the QP is unknown or cannot accept it. Returns true if the QP then has work.
    pub fn doorbell(&mut self, qpn: Qpn, producer: u16) -> bool {
        self.core.queues.doorbell(qpn, producer)
    }

    /// Executes up to `budget` WQEs, or slices of WQEs, of the ready QPs, at time `now_ns` (which
    /// never decreases). Stops after the work of [`Limits::function_turn`], or of eight times that
    /// if one function alone has been active for a while; the last WQE may exceed this limit.
    /// Returns the number of executed WQEs and slices; 0 means that no work is left.
    pub fn poll(&mut self, now_ns: u64, budget: usize) -> usize {
        self.core.poll(&mut self.wqe, now_ns, budget)
    }

    /// Returns true if `poll` has something to execute. Only the next few receive doorbell records
    /// are polled for this answer; `next_timeout` covers the rest.
    pub fn has_ready(&self) -> bool {
        self.core.queues.scheduler.is_active()
            || self.core.record_poller.has_ready(&self.core.queues)
    }

    /// Returns the QPs of which `poll` could execute a WQE next, in the order of their numbers. For
    /// callers that schedule QPs themselves with [`Engine::step`].
    pub fn ready_qps(&self) -> Vec<Qpn> {
        self.core.queues.ready_qps()
    }

    /// Executes one WQE (or a slice, or the flush of a WQE) of `qpn` at time `now_ns`, ahead of all
    /// other ready QPs. Returns false if `qpn` is not ready. `poll` may execute ready QPs in any
    /// order, so every order of `step` calls is a possible behaviour of `poll`. A model checker
    /// tries all orders.
    pub fn step(&mut self, qpn: Qpn, now_ns: u64) -> bool {
        self.core.step_one(&mut self.wqe, now_ns, qpn)
    }

    /// Appends the QPs that have become ready since the last call to `into` and removes them from
    /// the run queue. The caller must call [`Engine::step_reported`] for each of them. A QP may be
    /// reported again before that, when it gets more work.
    pub fn take_ready(&mut self, into: &mut Vec<Qpn>) {
        let Core { record_poller, queues, now_ns, .. } = &mut self.core;
        record_poller.poll_all(queues, *now_ns);
        queues.drain_ready(into);
    }

    /// Returns the next operation of `qpn`; `None` if it has none, or does not exist.
    pub fn peek(&mut self, qpn: Qpn) -> Option<Next> {
        self.core.peek(&mut self.wqe, qpn, None)
    }

    /// Like [`Engine::peek`], for the operation at index `at` of the send ring, or for the next
    /// one. `None` if no operation may be executed there. The index is [`Next::after`] of an
    /// operation that was not executed yet.
    pub fn peek_at(&mut self, qpn: Qpn, at: Option<u16>) -> Option<Next> {
        self.core.peek(&mut self.wqe, qpn, at)
    }

    /// Returns the index of the next operation of `qpn` in its send ring; `None` if `qpn` does not
    /// exist.
    pub fn position(&self, qpn: Qpn) -> Option<u16> {
        self.core.position(qpn)
    }

    /// Executes like [`Engine::step`], for a QP that [`Engine::take_ready`] reported. Returns the
    /// outcome, and appends each CQ that received completions, with its count, to `completed`.
    pub fn step_reported(
        &mut self,
        qpn: Qpn,
        now_ns: u64,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> StepOutcome {
        self.core.step_reported(&mut self.wqe, now_ns, qpn, completed)
    }

    /// Fails the next WQE of `qpn` as if all its packets had been lost: its peer has executed
    /// nothing. For simulators of the network. Appends to `completed` as [`Engine::step_reported`]
    /// does.
    pub fn time_out(
        &mut self,
        qpn: Qpn,
        now_ns: u64,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> StepOutcome {
        self.core.time_out(&mut self.wqe, now_ns, qpn, completed)
    }

    /// Executes like [`Engine::step_reported`], but as if all responses were lost: the peer
    /// executes the operation, and the requester fails because its peer does not respond.
    pub fn step_unanswered(
        &mut self,
        qpn: Qpn,
        now_ns: u64,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> StepOutcome {
        self.core.step_unanswered(&mut self.wqe, now_ns, qpn, completed)
    }

    /// Returns the memory range of the peer that the next WQE of `qpn` accesses, if it accesses
    /// one.
    pub fn next_target(&mut self, qpn: Qpn) -> Option<Target> {
        self.core.next_target(&mut self.wqe, qpn)
    }

    /// Appends every QP and key through which any of the `len` bytes from `start` can be accessed
    /// now. Regions with an engine are left out: the engine decides over each access.
    pub fn reachability(&self, start: u64, len: u64, into: &mut Vec<Reachability>) {
        self.core.reachability(start, len, into);
    }

    /// Returns the function that owns a QP.
    pub fn function_of(&self, qpn: Qpn) -> Option<FunctionId> {
        self.core.function_of(qpn)
    }

    /// Handles a packet that arrived at time `now_ns` (which never decreases): the payload, from
    /// the BTH on, of a UDP datagram from `source` to `destination`. `is_intact` checks the ICRC as
    /// far as the caller can; it is called only if the packet is for a connected QP whose peer
    /// sends no authentication tags. The time is bounded, whatever the packet contains. A packet
    /// that is not from a connected peer is dropped and counted. After a batch of packets the port
    /// must call [`Engine::poll`], which sends the responses and raises the completion events.
    pub fn receive(
        &mut self,
        now_ns: u64,
        source: SocketAddr,
        destination: IpAddr,
        packet: &[u8],
        is_intact: impl FnOnce() -> bool,
    ) {
        let Self { core, wqe } = self;
        core.receive_packet(wqe, now_ns, source, destination, packet, is_intact);
    }

    /// True if the last packet belongs to a message or READ response of which more packets are
    /// expected: at least 120 KiB more, if the rest is known. Its sender sends them without waiting
    /// for an acknowledgement.
    pub fn expects_more_packets(&self) -> bool {
        self.core.wire.expects_more
    }

    /// The packets that `poll` has produced. The caller sends them and then clears the outbox.
    /// While the outbox is full, `poll` does not execute QPs that have packets to send.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.core.wire.outbox
    }

    /// Sets which acknowledgements of short messages are delayed, as of the time of the last `poll`
    /// or `receive`. For ports that expect a more urgent event soon. A delay must be short compared
    /// to the peers' timeouts, well below a millisecond: otherwise the peers retransmit data that
    /// has arrived. Returns true if this call ends the delay of some acknowledgements, which the
    /// next `poll` then sends.
    pub fn delay_acks(&mut self, which: AckDelay) -> bool {
        self.core.delay_acks(which)
    }

    /// Returns whether requests to other NICs are outstanding.
    pub fn awaits_answers(&self) -> bool {
        self.core.wire.awaiting > 0
    }

    /// Counters of connections to other NICs.
    pub fn wire_stats(&self) -> &WireStats {
        &self.core.wire.stats
    }

    /// Returns the latest time of the next `poll` call, even without a doorbell or packet. A
    /// timeout is pending if a WQE waits for a receive WQE, because posting one does not notify the
    /// NIC, or if a retransmission timer runs.
    pub fn next_timeout(&self) -> Option<u64> {
        let (records, wire) = (self.core.record_poller.deadline_ns(), self.core.wire.deadline_ns());
        match (records, wire) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Returns whether the engine polls the doorbell records of any receive queue.
    pub fn polls_receive_records(&self) -> bool {
        self.core.record_poller.is_polling()
    }

    /// True if [`Engine::take_events`] would return an event.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.core.events.is_empty()
    }

    /// Takes the events since the last call. An event that was not taken is not raised again for
    /// the same object, so at most two events per CQ and QP are pending. The event of an SRQ's
    /// limit must be armed each time.
    pub fn take_events(&mut self) -> impl Iterator<Item = Event> + '_ {
        let Core { events, queues, .. } = &mut self.core;
        events.take(queues)
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.core.stats
    }
}
