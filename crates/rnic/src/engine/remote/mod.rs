//! QPs whose peer is on another NIC.
//!
//! ```text
//!                    step: one of these, in this order
//!                    ┌─ answers (transmit.rs) ─────────────┐
//!   ready QP ────────┼─ packets of fetched WQEs ───────────┼──> outbox
//!                    └─ fetch the next WQE (fetch.rs)      │
//!                                                          │
//!   receive() ─┬─ requests: keys, memory, receive WQEs (receive.rs) ──> answers that are due
//!              └─ responses: memory, requests that have ended ──> completions
//! ```
//!
//! A WQE is fetched when all before it have been sent, and kept until it is acknowledged; completions come in
//! order. Memory is reached through keys that are looked up for every packet, in either direction: no packet
//! carries bytes of a region or window that has ended.
//!
//! While a connection works it is out of its QP (`Qp::remote` is `None`), so that it can be changed beside
//! everything else; [`Core::put_back`] puts it there again, sets its timer and makes its QP ready.

mod fetch;
mod receive;
mod transmit;

use super::schedule::Step;
use super::{Core, lists::Place};
use crate::cqe::{self, Cqe, Syndrome};
use crate::error::Error;
use crate::ids::{FunctionId, Qpn};
use crate::qp::{Peer, Qp};
use crate::queue::Fetched;
use crate::verbs::{QpState, WireLimits};
use crate::wire::dialogue::Dialogue;
use crate::wire::guesses::Guesses;
use crate::wire::mac::{Opener, Sealer};
use crate::wire::requester::{Request, Requester, Retired};
use crate::wire::responder::Responder;
use crate::wire::{Envelope, Outbox, RemotePeer, WireStats};
use crate::wqe::{Control, DecodeError, Wqe, decode};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;

/// WQEs that are fetched at most while an acknowledgement is due. Behind their packets, and shorter, it can leave in
/// one send with them.
const FETCHED_BEFORE_ACK: u8 = 4;

/// How long an acknowledgement waits for a request that it may leave with: much less than the shortest time after which
/// the peer sends again. After half of it, it leaves with the first.
const DIALOGUE_NS: u64 = 100_000;

/// Building blocks of the longest WQE.
const LONGEST_BLOCKS: u32 = 16;

/// What a NIC has for its connections to others.
pub(super) struct Wire {
    pub outbox: Outbox,
    pub stats: WireStats,
    /// When connections want to be looked at, at the latest; one entry of each.
    timers: BTreeSet<(u64, u32)>,
    /// The QP here of each peer without a key. Packets with that peer's address are taken for its
    /// own, so that no two QPs may have it. A peer with a key is told by that, whatever address
    /// others name.
    ends: HashMap<(SocketAddr, Qpn), Qpn>,
    /// The highest counter that a connection which has ended gave to a packet. The next one goes on
    /// from there: so no counter repeats under one key, even if two QPs are connected anew with the
    /// secret that they had.
    counter: u64,
    /// Connections with requests in flight.
    pub awaiting: u32,
    /// See [`crate::Engine::is_amid_message`].
    pub amid: bool,
    /// Which acknowledgements of little wait.
    holds_acks: Hold,
    /// Whose do for a request of their own, since when, the first in front; and whose do for better times. Who does no
    /// more, or again, may still be listed.
    in_dialogue: VecDeque<(u64, Qpn)>,
    holding: Vec<Qpn>,
}

/// A connection to a QP of another NIC.
pub(crate) struct Connection {
    pub peer: RemotePeer,
    pub requester: Requester,
    pub responder: Responder,
    /// How packets are known to be the peer's.
    trust: Trust,
    /// Why the next WQE was not executed when it was looked at.
    held: Held,
    /// Its entry among the timers.
    armed: Option<u64>,
    /// WQEs that were fetched while an acknowledgement was due.
    fetched: u8,
    /// It is one of `Wire::awaiting`.
    awaits: bool,
    /// What its acknowledgement waits for, and since when.
    holds: Hold,
    holds_since_ns: u64,
    /// Whether its acknowledgements may wait for its requests.
    dialogue: Dialogue,
    /// Bytes that its function pays for it.
    bytes: u64,
}

/// How packets are known to be the peer's.
enum Trust {
    /// By address and PSN, of which the peer has so many guesses; packets have an ICRC.
    Psn(Guesses),
    /// By a tag.
    Key(Box<Keys>),
}

/// The keys of a connection.
struct Keys {
    sealer: Sealer,
    opener: Opener,
}

/// Which acknowledgements of few packets wait; one by itself: as which of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Hold {
    /// None.
    None,
    /// Those of connections that ask and answer in turns: for 100 us, or until a request of their own takes them along.
    Dialogues,
    /// All, until less is said.
    All,
}

/// What must come before the next WQE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Held {
    No,
    /// The end of all requests.
    All,
    /// The end of all READs and atomics.
    Reads,
}

/// Not inlined, as [`decode`] is where QPs of this NIC execute.
#[inline(never)]
fn decode_kept<'a>(ctrl: &Control, bytes: &'a [u8]) -> Result<Wqe<'a>, DecodeError> {
    decode(ctrl, bytes)
}

impl Wire {
    pub fn new(limits: Option<&WireLimits>) -> Self {
        Self {
            outbox: Outbox::new(limits.map_or(0, |l| l.outbox_bytes)),
            stats: WireStats::default(),
            timers: BTreeSet::new(),
            ends: HashMap::new(),
            counter: 0,
            awaiting: 0,
            amid: false,
            holds_acks: Hold::None,
            in_dialogue: VecDeque::new(),
            holding: Vec::new(),
        }
    }

    /// Draws first PSNs and keys of a connection of `qpn` from its secret, if it has one.
    fn begin(&self, peer: &mut RemotePeer, qpn: Qpn, now_ns: u64) -> Trust {
        let guesses = || Trust::Psn(Guesses::new(now_ns));
        let Some(secret) = peer.secret else { return guesses() };
        let directions = secret.directions(qpn, peer.qpn);
        (peer.sq_psn, peer.rq_psn) = (directions.out_psn, directions.in_psn);
        let Some((out, into)) = directions.keys else { return guesses() };
        let keys = Keys { sealer: Sealer::new(out, self.counter), opener: Opener::new(into) };
        Trust::Key(Box::new(keys))
    }

    /// When some connection wants to be looked at.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.timers.first().map(|&(at, _)| at)
    }
}

impl Connection {
    fn envelope(&self) -> Envelope {
        Envelope { from: self.peer.local, to: self.peer.address }
    }

    /// What authenticates its packets, if anything does.
    fn sealer(&mut self) -> Option<&mut Sealer> {
        match &mut self.trust {
            Trust::Psn(_) => None,
            Trust::Key(keys) => Some(&mut keys.sealer),
        }
    }

    /// True if the next WQE may be fetched.
    fn may_fetch(&self) -> bool {
        self.requester.has_room(LONGEST_BLOCKS)
            && match self.held {
                Held::No => true,
                Held::All => self.requester.is_empty(),
                Held::Reads => !self.requester.reads_outstanding(),
            }
    }

    /// True if there is a packet to be made.
    fn has_packets(&self, state: QpState) -> bool {
        self.responder.has_output() && self.holds == Hold::None
            || state == QpState::ReadyToSend && self.requester.next(1).is_some()
    }
}

impl Core {
    // --- control verbs -------------------------------------------------------------------------

    /// Connects a QP in Init to one of another NIC.
    pub fn connect(&mut self, f: FunctionId, qpn: Qpn, mut peer: RemotePeer) -> Result<(), Error> {
        peer.check()?;
        let limits = self.limits.wire.as_ref().ok_or(Error::NoWire { qpn })?;
        let end = (peer.address, peer.qpn);
        let taken = self.wire.ends.get(&end).filter(|_| !peer.is_authenticated());
        if let Some(&by) = taken {
            return Err(Error::PeerTaken { address: end.0, peer: peer.qpn, by });
        }
        let qp = self.qps.get(qpn.raw()).expect("the QP was just seen");
        let stride = qp.recv.and_then(|n| self.recvs.get(n)).map_or(0, |r| r.stride());
        let blocks = limits.blocks.max(LONGEST_BLOCKS);
        let requests = limits.requests.max(1);
        let bytes = blocks as u64 * crate::wqe::WQEBB as u64
            + requests as u64 * size_of::<Request>() as u64
            + size_of::<Connection>() as u64
            + if peer.is_authenticated() { size_of::<Keys>() as u64 } else { 0 }
            + stride as u64;
        let function = self.functions.get_mut(&f).expect("the caller lives");
        let limit = function.limits.remote_peers;
        if function.used.remote_peers >= limit {
            let what = "connections of the function to other NICs";
            return Err(Error::Limit { what, limit: limit as u64 });
        }
        function.used.ring_bytes = function.room_for_rings(bytes)?;
        function.used.remote_peers += 1;
        let trust = self.wire.begin(&mut peer, qpn, self.now_ns);
        if !peer.is_authenticated() {
            self.wire.ends.insert(end, qpn);
        }
        let connection = Connection {
            peer,
            requester: Requester::new(&peer, requests, blocks, limits.window_bytes),
            responder: Responder::new(&peer, stride),
            trust,
            held: Held::No,
            armed: None,
            fetched: 0,
            awaits: false,
            holds: Hold::None,
            holds_since_ns: 0,
            dialogue: Dialogue::new(),
            bytes,
        };
        let qp = self.qps.get_mut(qpn.raw()).expect("the QP was just seen");
        qp.peer = Peer::Remote(peer.qpn);
        qp.remote = Some(Box::new(connection));
        qp.state = QpState::ReadyToReceive;
        Ok(())
    }

    /// Ends the connection of a QP, if it has one. What comes for it later is not heard.
    pub fn disconnect(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return };
        let Some(connection) = qp.remote.take() else { return };
        let owner = qp.function;
        if let Some(at) = connection.armed {
            self.wire.timers.remove(&(at, qpn.raw()));
        }
        self.wire.awaiting -= connection.awaits as u32;
        match &connection.trust {
            Trust::Psn(_) => {
                self.wire.ends.remove(&(connection.peer.address, connection.peer.qpn));
            }
            Trust::Key(keys) => self.wire.counter = self.wire.counter.max(keys.sealer.last()),
        }
        if let Some(function) = self.functions.get_mut(&owner) {
            function.used.ring_bytes -= connection.bytes;
            function.used.remote_peers -= 1;
        }
    }

    // --- turns ---------------------------------------------------------------------------------

    /// See `Core::has_work`. Not inlined, nor is the step: what QPs of this NIC do stays small.
    #[inline(never)]
    pub fn remote_has_work(&self, qp: &Qp, connection: &Connection) -> bool {
        connection.has_packets(qp.state)
            || match qp.state {
                QpState::ReadyToSend => qp.pending() > 0 && connection.may_fetch(),
                QpState::Error => {
                    qp.pending() > 0
                        || !connection.requester.is_empty()
                        || self.flushable(qp.qpn) > 0
                }
                _ => false,
            }
    }

    /// Does one thing of a connected QP: makes some packets, or fetches a WQE, or flushes one.
    #[inline(never)]
    pub fn step_remote(&mut self, qpn: Qpn, wqe: &mut Fetched) -> Step {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return Step::Idle };
        let Some(mut connection) = qp.remote.take() else { return Step::Idle };
        let state = qp.state;
        let step = self.step_connection(&mut connection, qpn, state, wqe);
        self.put_back(qpn, connection);
        step
    }

    fn step_connection(
        &mut self,
        connection: &mut Connection,
        qpn: Qpn,
        state: QpState,
        wqe: &mut Fetched,
    ) -> Step {
        if state == QpState::Error {
            connection.responder.close();
        }
        if connection.has_packets(state) {
            if self.wire.outbox.room().is_none() {
                return Step::Idle;
            }
            if connection.holds != Hold::None {
                self.send_requests(connection, qpn, wqe);
                let waited = self.now_ns.saturating_sub(connection.holds_since_ns);
                if connection.holds == Hold::Dialogues
                    && (waited >= DIALOGUE_NS / 2 || connection.responder.goes_along())
                {
                    connection.dialogue.went_along();
                    self.send_answers(connection, qpn);
                }
                return Step::Executed;
            }
            if connection.responder.owes_only_an_ack() && state == QpState::ReadyToSend {
                if connection.requester.next(1).is_some() {
                    self.send_requests(connection, qpn, wqe);
                } else if connection.fetched < FETCHED_BEFORE_ACK
                    && self.qps.get(qpn.raw()).is_some_and(|qp| qp.pending() > 0)
                    && connection.may_fetch()
                {
                    connection.fetched += 1;
                    return self.fetch_request(connection, qpn, wqe);
                }
                connection.fetched = 0;
            } else if !connection.responder.has_output() {
                self.send_requests(connection, qpn, wqe);
                return Step::Executed;
            }
            self.send_answers(connection, qpn);
            return Step::Executed;
        }
        match state {
            QpState::ReadyToSend => {
                let pending = self.qps.get(qpn.raw()).is_some_and(|qp| qp.pending() > 0);
                if !pending || !connection.may_fetch() {
                    return Step::Idle;
                }
                self.fetch_request(connection, qpn, wqe)
            }
            QpState::Error => {
                let flushed = self.flush_connection(connection, qpn) || self.flush(qpn);
                if flushed { Step::Executed } else { Step::Idle }
            }
            _ => Step::Idle,
        }
    }

    /// Gives a connection back to its QP, sets its timer, and makes the QP ready if that can do something.
    fn put_back(&mut self, qpn: Qpn, mut connection: Box<Connection>) {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return };
        // An earlier entry stays: when it comes, it is put where it belongs then.
        let deadline = connection.requester.deadline().filter(|_| qp.state == QpState::ReadyToSend);
        if let Some(at) = deadline
            && connection.armed.is_none_or(|armed| at < armed)
        {
            if let Some(armed) = connection.armed.replace(at) {
                self.wire.timers.remove(&(armed, qpn.raw()));
            }
            self.wire.timers.insert((at, qpn.raw()));
        }
        if qp.state == QpState::Error
            && let Some(armed) = connection.armed.take()
        {
            self.wire.timers.remove(&(armed, qpn.raw()));
        }
        let awaits = qp.state == QpState::ReadyToSend && connection.requester.awaits_answer();
        self.wire.awaiting = self.wire.awaiting + awaits as u32 - connection.awaits as u32;
        connection.awaits = awaits;
        let (responder, in_dialogue) = (&connection.responder, connection.dialogue.is_on());
        let holds = match self.wire.holds_acks {
            Hold::Dialogues | Hold::All if in_dialogue && responder.owes_little_in_dialogue() => {
                Hold::Dialogues
            }
            Hold::All if responder.owes_little() => Hold::All,
            _ => Hold::None,
        };
        if holds != connection.holds {
            connection.holds = holds;
            connection.holds_since_ns = self.now_ns;
            match holds {
                Hold::None => {}
                Hold::Dialogues => self.wire.in_dialogue.push_back((self.now_ns, qpn)),
                Hold::All => self.wire.holding.push(qpn),
            }
        }
        let packets = connection.has_packets(qp.state) || qp.state == QpState::Error;
        qp.remote = Some(connection);
        if packets && matches!(qp.place, Place::Count { .. }) {
            // Its next WQE waits, the connection does not.
            self.leave(qpn);
        }
        self.schedule(qpn);
    }

    /// Says which acknowledgements wait. True if there may be some that leave with the next `poll` instead.
    pub fn hold_acks(&mut self, which: Hold) -> bool {
        self.wire.holds_acks = which;
        if which == Hold::All {
            return false;
        }
        let mut any = false;
        while let Some(&(since, qpn)) = self.wire.in_dialogue.front()
            && (which == Hold::None || since + DIALOGUE_NS <= self.now_ns)
        {
            self.wire.in_dialogue.pop_front();
            any |= self.release(qpn, |connection| {
                let waits =
                    connection.holds == Hold::Dialogues && connection.holds_since_ns == since;
                if waits {
                    connection.dialogue.fell_silent();
                }
                waits
            });
        }
        while let Some(qpn) = self.wire.holding.pop() {
            any |= self.release(qpn, |connection| connection.holds == Hold::All);
        }
        any
    }

    /// Lets the acknowledgement of a connection leave, if that is one that `waits`.
    fn release(&mut self, qpn: Qpn, waits: impl FnOnce(&mut Connection) -> bool) -> bool {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return false };
        let Some(mut connection) = qp.remote.take() else { return false };
        let waits = waits(&mut connection);
        self.put_back(qpn, connection);
        waits
    }

    /// Looks at the connections whose time has come.
    #[cold]
    pub fn run_timers(&mut self) {
        while let Some(&(at, number)) = self.wire.timers.first()
            && at <= self.now_ns
        {
            self.wire.timers.pop_first();
            let qpn = Qpn::new(number);
            let Some(qp) = self.qps.get_mut(number) else { continue };
            let Some(mut connection) = qp.remote.take() else { continue };
            connection.armed = None;
            if connection.requester.on_time(self.now_ns) {
                self.wire.stats.timeouts += 1;
            }
            self.retire(&mut connection, qpn);
            self.put_back(qpn, connection);
        }
    }

    // --- the end of requests -------------------------------------------------------------------

    /// Completes the requests that have ended, in order.
    fn retire(&mut self, connection: &mut Connection, qpn: Qpn) {
        let Some(qp) = self.qps.get(qpn.raw()) else { return };
        if qp.state != QpState::ReadyToSend {
            return;
        }
        while let Some(ended) = connection.requester.retire() {
            let done = match ended {
                Retired::Done(request) => self.complete_request(qpn, &request),
                Retired::Failed(request, syndrome, vendor) => {
                    self.stats.errors += 1;
                    self.push_request_error(qpn, &request, syndrome, vendor);
                    self.enter_error(qpn, Some(syndrome));
                    false
                }
            };
            if !done {
                return;
            }
        }
    }

    /// Ends a request that succeeded; false if its completion found no room.
    fn complete_request(&mut self, qpn: Qpn, request: &Request) -> bool {
        self.stats.wqes[(request.opcode & 0x3f) as usize] += 1;
        let qp = self.qps.get_mut(qpn.raw()).expect("its connection works");
        qp.executed += 1;
        if !request.signaled {
            return true;
        }
        let send_cq = qp.send_cq;
        let cqe = Cqe {
            opcode: cqe::opcode::REQ,
            qpn,
            wqe_opcode: request.opcode,
            wqe_counter: request.counter,
            byte_count: request.len,
            timestamp_ns: self.now_ns,
            ..Cqe::default()
        };
        let written = self.push_cqe(send_cq, &cqe);
        if !written {
            self.enter_error(qpn, Some(Syndrome::LocalQpOperation));
        }
        written
    }

    fn push_request_error(&mut self, qpn: Qpn, request: &Request, why: Syndrome, vendor: u8) {
        let send_cq = self.qps.get(qpn.raw()).expect("its connection works").send_cq;
        let cqe = Cqe {
            opcode: cqe::opcode::REQ_ERR,
            qpn,
            wqe_opcode: request.opcode,
            wqe_counter: request.counter,
            error: Some(cqe::CqeError { syndrome: why as u8, vendor }),
            ..Cqe::default()
        };
        self.push_cqe(send_cq, &cqe);
    }

    /// Completes as flushed a send WQE that a QP in Error has fetched. False if there is none.
    #[cold]
    fn flush_connection(&mut self, connection: &mut Connection, qpn: Qpn) -> bool {
        let Some(request) = connection.requester.flush() else { return false };
        self.push_request_error(qpn, &request, Syndrome::Flushed, 0);
        self.stats.flushed += 1;
        self.work += super::WQE_WORK;
        true
    }
}
