//! The NIC as a state machine. Inputs: control verbs, doorbells, packets, time. Outputs:
//! completions in memory, packets, events.
//!
//! ```text
//!   verbs (control.rs) ──> tables: functions, PDs, keys, CQs, receive queues, QPs
//!                             │
//!   doorbell() ──> ready QPs ──> poll() ── quantum (poll.rs) ── WQE: fetch, decode, check
//!         (run_queue.rs,           next function: scheduler.rs    │
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
mod errors;
mod execute;
mod inspect;
mod local_wqe;
mod poll;
pub(crate) mod qp;
mod qp_list;
pub(crate) mod queue;
mod record_poller;
mod remote;
mod respond;
mod run_queue;
mod scheduler;
mod stepped;
#[cfg(test)]
pub(crate) mod tests;

use crate::dma::SpanList;
use crate::engine::qp::Qp;
use crate::engine::queue::{CompletionQueue, Fetched, RECV_STRIDE_MAX, RecvQueue};
use crate::key_namespaces::{KeyNamespaces, Namespace};
use crate::limits::{FunctionLimits, Limits};
use crate::spec::{Event, Stats};
use crate::table::Table;
use crate::wire::{Outbox, WireStats};
pub use inspect::{Reachability, Target};
pub use remote::AckDelay;
use scheduler::Scheduler;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
pub use stepped::{Next, NextKind, StepOutcome};
use verbs::{AsyncEvent, Cqn, FunctionId, KeyIndex, Qpn};

/// Maximum length in bytes of a READ or WRITE (IBTA vol. 1, §9.7).
const RDMA_BYTES_MAX: u64 = 1 << 31;

/// Scheduling cost of fetching and decoding a WQE, of each of its segments, and of a completion, in
/// bytes that the NIC could move in the same time.
const WQE_WORK: u64 = 64;
/// Scheduling cost of a QP that has nothing to execute in its quantum: its cache lines were loaded
/// in vain.
const EMPTY_QUANTUM_WORK: u64 = 256;

/// The software NIC. See the module documentation.
pub struct Engine {
    core: Core,
    /// The WQE in execution.
    wqe: Box<Fetched>,
}

/// The whole state but the WQE in execution. Separate, so that a decoded WQE can borrow the buffer
/// while this state changes.
struct Core {
    limits: Limits,
    now_ns: u64,
    functions: HashMap<FunctionId, Function>,
    next_function: u32,
    pds: Table<Pd>,
    keys: KeyNamespaces,
    cqs: Table<CompletionQueue>,
    recvs: Table<RecvQueue>,
    qps: Table<Qp>,
    /// Schedules the functions that have ready QPs.
    scheduler: Scheduler,
    /// Work since the NIC was created, in bytes moved.
    work: u64,
    /// CQs that received a completion in the current `poll`.
    touched: Vec<Cqn>,
    record_poller: record_poller::RecordPoller,
    wire: remote::RemoteState,
    events: VecDeque<Event>,
    stats: Stats,
    scratch: Box<Scratch>,
    /// Current slice length of READs and WRITEs, in bytes.
    slice: u64,
}

/// Buffers for the SGE lists of one WQE.
struct Scratch {
    /// The requester's SGEs after their checks.
    local: SpanList,
    /// The receive WQE's SGEs after their checks.
    receive: SpanList,
    recv_wqe: [u8; RECV_STRIDE_MAX as usize],
}

/// A function: its limits and the objects that it owns.
struct Function {
    limits: FunctionLimits,
    used: FunctionLimits,
    sched_index: u32,
    /// The namespace of its keys.
    namespace: Namespace,
    /// The function that opened this one, if a function did.
    opener: Option<FunctionId>,
    keys: HashSet<KeyIndex>,
    /// Numbers of its QPs. The sets below contain its CQs, shared receive queues and PDs.
    qps: HashSet<u32>,
    cqs: HashSet<u32>,
    recvs: HashSet<u32>,
    pds: HashSet<u32>,
}

/// A protection domain.
struct Pd {
    function: FunctionId,
    /// Number of keys, QPs and SRQs in this PD.
    users: u32,
}

impl Engine {
    /// Creates a NIC with its physical function.
    pub fn new(limits: Limits) -> Self {
        let physical =
            Function::new(FunctionLimits::NONE, Scheduler::PHYSICAL, KeyNamespaces::FIRST);
        let core = Core {
            now_ns: 0,
            functions: HashMap::from([(FunctionId::PHYSICAL, physical)]),
            next_function: 1,
            pds: Table::new(limits.pds),
            keys: KeyNamespaces::new(limits.keys),
            cqs: Table::new(limits.cqs),
            recvs: Table::new(limits.recvs),
            qps: match limits.random {
                None => Table::new(limits.qps),
                Some(random) => Table::scattered(limits.qps, random),
            },
            scheduler: Scheduler::new(&limits),
            work: 0,
            touched: Vec::with_capacity(64),
            record_poller: record_poller::RecordPoller::default(),
            wire: remote::RemoteState::new(limits.wire.as_ref()),
            events: VecDeque::with_capacity(64),
            stats: Stats::default(),
            scratch: Box::new(Scratch {
                local: SpanList::new(),
                receive: SpanList::new(),
                recv_wqe: [0; RECV_STRIDE_MAX as usize],
            }),
            slice: limits.slice_bytes.max(1) as u64,
            limits,
        };
        Self { core, wqe: Box::new(Fetched::new()) }
    }

    /// Handles a send doorbell: the unmanaged send queue of `qpn` has WQEs up to building-block
    /// index `producer`. The port has checked that the client owns the QP. A doorbell is ignored if
    /// the QP is unknown or cannot accept it. Returns true if the QP then has work.
    pub fn doorbell(&mut self, qpn: Qpn, producer: u16) -> bool {
        self.core.doorbell(qpn, producer)
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
        self.core.has_ready()
    }

    /// Returns the QPs of which `poll` could execute a WQE next, in the order of their numbers. For
    /// callers that schedule QPs themselves with [`Engine::step`].
    pub fn ready_qps(&self) -> Vec<Qpn> {
        self.core.ready_qps()
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
        self.core.poll_all_records();
        self.core.drain_ready(into);
    }

    /// Returns the next operation of `qpn`; `None` if it has none, or does not exist.
    pub fn peek(&mut self, qpn: Qpn) -> Option<Next> {
        self.core.peek(&mut self.wqe, qpn)
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
    pub fn time_out(&mut self, qpn: Qpn, completed: &mut Vec<(Cqn, u32)>) -> StepOutcome {
        self.core.time_out(&mut self.wqe, qpn, completed)
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
    /// now.
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
        self.core.polls_receive_records()
    }

    /// Takes the events since the last call. An event that was not taken is not raised again for
    /// the same object, so at most two events per CQ and QP are pending. The event of an SRQ's
    /// limit must be armed each time.
    pub fn take_events(&mut self) -> impl Iterator<Item = Event> + '_ {
        let Core { events, cqs, qps, .. } = &mut self.core;
        events.drain(..).inspect(|event| match event {
            Event::Completion(cqn) => _ = cqs.get_mut(cqn.raw()).map(|cq| cq.reported = false),
            Event::Async { event: AsyncEvent::QpError { qpn, .. }, .. } => {
                _ = qps.get_mut(qpn.raw()).map(|qp| qp.reported = false);
            }
            Event::Async { event: AsyncEvent::LastWqeReached { qpn }, .. } => {
                _ = qps.get_mut(qpn.raw()).map(|qp| qp.last_wqe_reported = false);
            }
            Event::Async { event: AsyncEvent::CqOverrun { .. }, .. }
            | Event::Async { event: AsyncEvent::SrqLimit { .. }, .. } => {}
        })
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.core.stats
    }
}

impl Function {
    fn new(limits: FunctionLimits, sched_index: u32, namespace: Namespace) -> Self {
        let used = FunctionLimits {
            pds: 0,
            qps: 0,
            cqs: 0,
            srqs: 0,
            keys: 0,
            windows: 0,
            functions: 0,
            registered_bytes: 0,
            ring_bytes: 0,
            remote_peers: 0,
        };
        Self {
            limits,
            used,
            sched_index,
            namespace,
            opener: None,
            keys: HashSet::new(),
            qps: HashSet::new(),
            cqs: HashSet::new(),
            recvs: HashSet::new(),
            pds: HashSet::new(),
        }
    }
}
