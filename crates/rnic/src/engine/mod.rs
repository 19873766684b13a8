//! The NIC as a state machine: control verbs, doorbells and time in; completions in memory and
//! events out.
//!
//! ```text
//!   verbs (control.rs) ──> tables: functions, PDs, keys, CQs, receive queues, QPs
//!                             │
//!   ring() ──> ready QPs ───> poll() ── turn (schedule.rs) ── WQE: fetch, decode, check
//!              (lists.rs,        whose: shares.rs                 │
//!               by function)                                      ▼
//!                 ▲                                     requester (execute.rs)
//!                 │ wake: completion counted, RECV_EN,            │ admit, deliver
//!                 │ SEND_EN, record has moved (watch.rs)          ▼
//!              waiting QPs <── WAIT, RNR ───────────────  responder (respond.rs)
//!                                                                 ▲
//!   receive() ── packets of other NICs ── remote/ ────────────────┘ ──> outbox
//! ```
//!
//! Invariants:
//! - A WQE is fetched when it is executed, once, whole, into a buffer of the NIC, and then validated.
//! - A QP's WQEs execute in order; one ends, with all that it moved, before the next is fetched. Those of a
//!   QP that is connected to another NIC are sent in order, and several may be on their way.
//! - A QP is ready or waits or neither, and executes nothing while it waits.
//! - What one WQE, or one slice, takes is bounded, whatever the function that posted it has set up.
//! - No allocation, lock or system call on the path of a WQE.
//! - Whatever a WQE, ring or record holds, the worst outcome is the error state of the QP that they
//!   belong to and of its peer.

mod attributes;
mod control;
mod errors;
mod execute;
mod inspect;
pub(crate) mod lists;
pub(crate) mod remote;
mod respond;
mod schedule;
mod shares;
mod stepped;
#[cfg(test)]
pub(crate) mod tests;
mod watch;

use crate::dma::SpanList;
use crate::ids::{Cqn, FunctionId, KeyIndex, Qpn};
use crate::qp::Qp;
use crate::queue::{
    CQ_ENTRIES_MAX, CompletionQueue, Fetched, RECV_ENTRIES_MAX, RECV_ENTRIES_WIDE_MAX,
    RECV_STRIDE_MAX, RecvQueue, SEND_BLOCKS_MAX,
};
use crate::spaces::{KeySpaces, Space};
use crate::table::Table;
use crate::verbs::{
    AsyncEvent, AtomicOrder, AtomicScope, Caps, Event, FunctionLimits, Limits, Stats,
};
use crate::wire::{Outbox, WireStats};
use crate::wqe::MAX_SEGMENTS;
pub use inspect::{Aim, Reach};
pub use remote::Hold;
use shares::Shares;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
pub use stepped::{Next, NextKind, Stepped};

/// Bytes of a READ or WRITE at most (IBTA vol. 1, §9.7).
const RDMA_BYTES_MAX: u64 = 1 << 31;

/// Work of fetching and decoding a WQE, of each of its segments, and of a completion, as bytes that could
/// be moved meanwhile.
const WQE_WORK: u64 = 64;
/// What it counts if the QP whose turn it is has nothing to execute, which brings it near for nothing.
const LOOK_WORK: u64 = 256;

/// The software NIC. See the module.
pub struct Engine {
    core: Core,
    /// The WQE that is being executed.
    wqe: Box<Fetched>,
}

/// Everything but the WQE at hand, so that a decoded WQE can borrow that while this changes.
struct Core {
    limits: Limits,
    now_ns: u64,
    functions: HashMap<FunctionId, Function>,
    next_function: u32,
    pds: Table<Pd>,
    keys: KeySpaces,
    cqs: Table<CompletionQueue>,
    recvs: Table<RecvQueue>,
    qps: Table<Qp>,
    /// QPs with work, by function.
    shares: Shares,
    /// Work done since the NIC was made, in bytes moved.
    work: u64,
    /// CQs that got a completion in this `poll`.
    touched: Vec<Cqn>,
    watch: watch::Watch,
    wire: remote::Wire,
    events: VecDeque<Event>,
    stats: Stats,
    scratch: Box<Scratch>,
    /// READs and WRITEs are executed in slices of so many bytes now.
    slice: u64,
}

/// Room for one WQE's lists.
struct Scratch {
    /// The requester's SGEs, checked.
    local: SpanList,
    /// The receive WQE's SGEs, checked.
    receive: SpanList,
    recv_wqe: [u8; RECV_STRIDE_MAX as usize],
}

/// A function: who owns what.
struct Function {
    limits: FunctionLimits,
    used: FunctionLimits,
    share: u32,
    /// Where its keys are.
    space: Space,
    /// Who has opened it, if that is a function.
    opener: Option<FunctionId>,
    keys: HashSet<KeyIndex>,
    /// Numbers of its other objects; `recvs` are shared receive queues.
    qps: HashSet<u32>,
    cqs: HashSet<u32>,
    recvs: HashSet<u32>,
    pds: HashSet<u32>,
}

/// A protection domain.
struct Pd {
    function: FunctionId,
    /// Keys, QPs and SRQs in it.
    users: u32,
}

impl Engine {
    /// A NIC with its physical function and nothing else.
    pub fn new(limits: Limits) -> Self {
        let physical = Function::new(FunctionLimits::NONE, Shares::PHYSICAL, KeySpaces::FIRST);
        let core = Core {
            now_ns: 0,
            functions: HashMap::from([(FunctionId::PHYSICAL, physical)]),
            next_function: 1,
            pds: Table::new(limits.pds),
            keys: KeySpaces::new(limits.keys),
            cqs: Table::new(limits.cqs),
            recvs: Table::new(limits.recvs),
            qps: match limits.random {
                None => Table::new(limits.qps),
                Some(random) => Table::scattered(limits.qps, random),
            },
            shares: Shares::new(&limits),
            work: 0,
            touched: Vec::with_capacity(64),
            watch: watch::Watch::default(),
            wire: remote::Wire::new(limits.wire.as_ref()),
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

    /// What this NIC can do.
    pub fn caps(&self) -> Caps {
        Caps {
            atomic_order: AtomicOrder::BigEndian,
            atomic_scope: AtomicScope::Global,
            managed_queues: true,
            mw_type2: true,
            mw_type1: true,
            mw_guarded: true,
            send_blocks_max: SEND_BLOCKS_MAX,
            recv_entries_max: RECV_ENTRIES_MAX,
            recv_entries_wide_max: RECV_ENTRIES_WIDE_MAX,
            recv_stride_max: RECV_STRIDE_MAX,
            cq_entries_max: CQ_ENTRIES_MAX,
            rdma_sges_max: MAX_SEGMENTS as u32 - 2,
            rdma_bytes_max: RDMA_BYTES_MAX,
            send_bytes_max: self.core.limits.send_bytes_max,
            keys_max: self.core.limits.keys,
        }
    }

    /// Send doorbell: the unmanaged send queue of `qpn` has WQEs up to building-block index
    /// `producer`. The port has made sure that who rings owns the QP. A doorbell of an unknown QP, or
    /// of one that cannot take it, is ignored. True if the queue pair then has something to do.
    pub fn ring(&mut self, qpn: Qpn, producer: u16) -> bool {
        self.core.ring(qpn, producer)
    }

    /// Executes up to `budget` WQEs, or slices of them, of the QPs that are ready, in turns, at time
    /// `now_ns` (which never goes back), and not more work than [`Limits::function_turn`], or eight times that where one
    /// function has had all turns for a while (and what one WQE takes beyond it). Gives how many; 0 means that there is nothing to do.
    pub fn poll(&mut self, now_ns: u64, budget: usize) -> usize {
        self.core.poll(&mut self.wqe, now_ns, budget)
    }

    /// True if `poll` has something to execute. Receive records that moved without notice are looked at
    /// as far as that takes no time; `next_timeout` covers the rest.
    pub fn has_ready(&self) -> bool {
        self.core.has_ready()
    }

    /// The QPs of which `poll` may execute a WQE next, in the order of their numbers: for who schedules
    /// them himself with [`Engine::step`].
    pub fn ready_qps(&self) -> Vec<Qpn> {
        self.core.ready_qps()
    }

    /// Executes one WQE (or slice, or flush of one) of `qpn` at time `now_ns`, whoever else is ready;
    /// false if it is not ready itself. `poll` is free to run ready QPs in any order, so whatever order
    /// `step` is called in, it does what some `poll` could have done: a model checker tries all.
    pub fn step(&mut self, qpn: Qpn, now_ns: u64) -> bool {
        self.core.step_one(&mut self.wqe, now_ns, qpn)
    }

    /// Appends the QPs that have become ready since the last call to `into`, and forgets that they are:
    /// the caller owes each of them a [`Engine::step_reported`]. One may be named again before that,
    /// when more work comes for it.
    pub fn take_ready(&mut self, into: &mut Vec<Qpn>) {
        self.core.look_at_all_records();
        self.core.drain_ready(into);
    }

    /// What `qpn` would do next; `None` if there is nothing, or no such QP.
    pub fn peek(&mut self, qpn: Qpn) -> Option<Next> {
        self.core.peek(&mut self.wqe, qpn)
    }

    /// Like [`Engine::step`] for who was told of `qpn` by [`Engine::take_ready`]: says what came of it,
    /// and appends each CQ that got completions, with its count, to `completed`.
    pub fn step_reported(
        &mut self,
        qpn: Qpn,
        now_ns: u64,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> Stepped {
        self.core.step_told(&mut self.wqe, now_ns, qpn, completed)
    }

    /// The peer of `qpn` did not answer however often its next WQE was sent: that fails, with nothing done.
    /// For who simulates the network; appends to `completed` as [`Engine::step_reported`] does.
    pub fn time_out(&mut self, qpn: Qpn, completed: &mut Vec<(Cqn, u32)>) -> Stepped {
        self.core.time_out(&mut self.wqe, qpn, completed)
    }

    /// Like [`Engine::step_reported`], but the answer is lost however often the peer sends it: what was
    /// asked for is done, and the requester hears that its peer does not answer.
    pub fn step_unanswered(
        &mut self,
        qpn: Qpn,
        now_ns: u64,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> Stepped {
        self.core.step_unanswered(&mut self.wqe, now_ns, qpn, completed)
    }

    /// What `qpn` would do next to its peer's memory, if that is what it does next.
    pub fn aim(&mut self, qpn: Qpn) -> Option<Aim> {
        self.core.aim(&mut self.wqe, qpn)
    }

    /// Appends every way in which a QP could reach some of the `len` bytes from `start` on now.
    pub fn reaches(&self, start: u64, len: u64, into: &mut Vec<Reach>) {
        self.core.reaches(start, len, into);
    }

    /// Whose a QP is.
    pub fn function_of(&self, qpn: Qpn) -> Option<FunctionId> {
        self.core.function_of(qpn)
    }

    /// A packet came, at time `now_ns` (which never goes back): the payload of a UDP datagram from
    /// `source` to `destination`, from the BTH on. `is_intact` says whether its ICRC is right, as
    /// far as the caller can tell; it is asked only if the packet is for a connected QP whose peer
    /// sends no tags. Takes bounded time, whatever the packet holds; what is no packet of a
    /// connected peer is dropped and counted. [`Engine::poll`] is to be called after the last of
    /// some packets: answers are made and completions announced there.
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

    /// True if the last packet that came was a part of a message, or of a READ's answer, of which more is to come: 120 KiB,
    /// if it is known how much. Its sender waits for nobody then.
    pub fn is_amid_message(&self) -> bool {
        self.core.wire.amid
    }

    /// The packets that `poll` has made. They lie there until the caller, who has sent them, clears them;
    /// when there is no more room `poll` leaves QPs with packets as they are.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.core.wire.outbox
    }

    /// Which acknowledgements of few packets wait until less is said, as of the time of the last `poll` or `receive`. That
    /// may take as long as is nothing to the timeouts of the peers, well below a millisecond: else those send again what
    /// has arrived. For ports that know that something more urgent is about to come. True if some waited for what they
    /// wait for no more, and leave with the next `poll`.
    pub fn hold_acks(&mut self, which: Hold) -> bool {
        self.core.hold_acks(which)
    }

    /// Whether requests were sent to other NICs that have not been answered.
    pub fn awaits_answers(&self) -> bool {
        self.core.wire.awaiting > 0
    }

    /// Counters of connections to other NICs.
    pub fn wire_stats(&self) -> &WireStats {
        &self.core.wire.stats
    }

    /// When `poll` must be called at the latest, even if no doorbell rings and no packet comes: a WQE waits
    /// for a receive WQE that may be posted without any notice to the NIC, or a packet is to be sent again.
    pub fn next_timeout(&self) -> Option<u64> {
        let (records, wire) = (self.core.watch.deadline_ns(), self.core.wire.deadline_ns());
        match (records, wire) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Whether somebody waits for receive WQEs of which nobody tells the NIC.
    pub fn minds_receives(&self) -> bool {
        self.core.minds_receives()
    }

    /// What happened since the last call. An event of an object that was not taken is not repeated:
    /// there are never more than two for each CQ and QP. That of an SRQ's limit has to be armed each time.
    pub fn take_events(&mut self) -> impl Iterator<Item = Event> + '_ {
        let Core { events, cqs, qps, .. } = &mut self.core;
        events.drain(..).inspect(|event| match event {
            Event::Completion(cqn) => _ = cqs.get_mut(cqn.raw()).map(|cq| cq.reported = false),
            Event::Async { event: AsyncEvent::QpError { qpn, .. }, .. } => {
                _ = qps.get_mut(qpn.raw()).map(|qp| qp.reported = false);
            }
            Event::Async { event: AsyncEvent::LastWqeReached { qpn }, .. } => {
                _ = qps.get_mut(qpn.raw()).map(|qp| qp.last_reported = false);
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
    fn new(limits: FunctionLimits, share: u32, space: Space) -> Self {
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
            share,
            space,
            opener: None,
            keys: HashSet::new(),
            qps: HashSet::new(),
            cqs: HashSet::new(),
            recvs: HashSet::new(),
            pds: HashSet::new(),
        }
    }
}
