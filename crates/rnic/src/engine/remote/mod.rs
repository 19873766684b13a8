//! QPs whose peer is on another NIC.
//!
//! ```text
//!                    step: one of these, in this order
//!                    ┌─ responses (transmit.rs) ───────────┐
//!   ready QP ────────┼─ packets of fetched WQEs ───────────┼──> outbox
//!                    └─ fetch the next WQE (fetch.rs)      │
//!                                                          │
//!   receive() ─┬─ requests: keys, memory, receive WQEs (receive.rs) ──> pending responses
//!              └─ responses: memory, finished requests ──> completions
//! ```
//!
//! A WQE is fetched after all earlier WQEs were sent, and is kept until it is acknowledged.
//! Completions are written in order. Keys are looked up for every packet in either direction, so no
//! packet carries bytes of a destroyed region or an unbound window.
//!
//! While a connection is processed it is moved out of its QP (`Qp::remote` is `None`), so that it
//! can be borrowed beside the rest of the engine. [`Core::put_back`] moves it back, sets its timer
//! and makes its QP ready.

pub(super) mod connection;
mod fetch;
mod receive;
pub(super) mod state;
mod transmit;

use super::poll::Step;
use super::qp_list::InList;
use crate::engine::core::{Core, WQE_WORK};
use crate::engine::qp::Peer;
use crate::engine::queue::Fetched;
use crate::error::Error;
use crate::wire::check_peer;
use crate::wire::piggyback::PiggybackState;
use crate::wire::requester::{Request, Requester, Retired};
use crate::wire::responder::Responder;
pub use connection::AckDelay;
use connection::{Connection, FetchGate, Keys, LONGEST_BLOCKS, PacketAuth};
use verbs::cqe::{self, Cqe, Syndrome};
use verbs::wqe::{Control, DecodeError, Wqe, decode};
use verbs::{FunctionId, QpState, Qpn, RemotePeer};

/// Maximum number of WQEs to fetch while an acknowledgement is pending. The acknowledgement is sent
/// behind their packets, in the same system call; being shorter, it can end a segmented send.
const FETCHED_BEFORE_ACK: u8 = 4;

/// Maximum delay of an acknowledgement that waits to be sent together with a request. Much shorter
/// than the peer's shortest retransmission timeout. After half of the delay, the acknowledgement is
/// sent with any request.
const PIGGYBACK_NS: u64 = 100_000;

/// [`decode`], but not inlined: the inlined copy is for QPs whose peer is on this NIC.
#[inline(never)]
fn decode_kept<'a>(ctrl: &Control, bytes: &'a [u8]) -> Result<Wqe<'a>, DecodeError> {
    decode(ctrl, bytes)
}

impl Core {
    // --- control verbs -------------------------------------------------------------------------

    /// Connects a QP in Init to a QP of another NIC.
    pub fn connect(&mut self, f: FunctionId, qpn: Qpn, mut peer: RemotePeer) -> Result<(), Error> {
        check_peer(&peer)?;
        let limits = self.limits.wire.as_ref().ok_or(Error::NoWire { qpn })?;
        let end = (peer.address, peer.qpn);
        let taken = self.wire.unkeyed_peers.get(&end).filter(|_| !peer.is_authenticated());
        if let Some(&by) = taken {
            return Err(Error::PeerTaken { address: end.0, peer: peer.qpn, by });
        }
        let qp = self.queues.qps.get(qpn.raw()).expect("the QP was looked up above");
        let stride = qp.recv.and_then(|n| self.queues.recvs.get(n)).map_or(0, |r| r.stride());
        let blocks = limits.blocks.max(LONGEST_BLOCKS);
        let requests = limits.requests.max(1);
        let bytes = blocks as u64 * verbs::wqe::WQEBB as u64
            + requests as u64 * size_of::<Request>() as u64
            + size_of::<Connection>() as u64
            + if peer.is_authenticated() { size_of::<Keys>() as u64 } else { 0 }
            + stride as u64;
        let function = self.owners.functions.get_mut(&f).expect("the calling function exists");
        let limit = function.limits.remote_peers;
        if function.used.remote_peers >= limit {
            let what = "connections of the function to other NICs";
            return Err(Error::Limit { what, limit: limit as u64 });
        }
        function.used.ring_bytes = function.room_for_rings(bytes)?;
        function.used.remote_peers += 1;
        let auth = self.wire.derive_keys(&mut peer, qpn, self.now_ns);
        if !peer.is_authenticated() {
            self.wire.unkeyed_peers.insert(end, qpn);
        }
        let connection = Connection {
            peer,
            requester: Requester::new(&peer, requests, blocks, limits.window_bytes),
            responder: Responder::new(&peer, stride),
            auth,
            fetch_gate: FetchGate::Open,
            timer_ns: None,
            fetched: 0,
            is_awaiting: false,
            ack_delay: AckDelay::None,
            ack_delay_since_ns: 0,
            piggyback: PiggybackState::new(),
            bytes,
        };
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("the QP was looked up above");
        qp.peer = Peer::Remote(peer.qpn);
        qp.remote = Some(Box::new(connection));
        qp.state = QpState::ReadyToReceive;
        Ok(())
    }

    /// Destroys the connection of a QP, if it has one. Packets that arrive later are dropped.
    pub fn disconnect(&mut self, qpn: Qpn) {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return };
        let Some(connection) = qp.remote.take() else { return };
        let owner = qp.function;
        if let Some(at) = connection.timer_ns {
            self.wire.timers.remove(&(at, qpn.raw()));
        }
        self.wire.awaiting -= connection.is_awaiting as u32;
        match &connection.auth {
            PacketAuth::Psn(_) => {
                self.wire.unkeyed_peers.remove(&(connection.peer.address, connection.peer.qpn));
            }
            PacketAuth::Key(keys) => {
                self.wire.last_counter = self.wire.last_counter.max(keys.sealer.last())
            }
        }
        if let Some(function) = self.owners.functions.get_mut(&owner) {
            function.used.ring_bytes -= connection.bytes;
            function.used.remote_peers -= 1;
        }
    }

    // --- turns ---------------------------------------------------------------------------------

    /// Executes one step of a connected QP: sends some packets, or fetches a WQE, or flushes a WQE.
    #[inline(never)]
    pub fn step_remote(&mut self, qpn: Qpn, wqe: &mut Fetched) -> Step {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return Step::Idle };
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
            if connection.ack_delay != AckDelay::None {
                self.send_requests(connection, qpn, wqe);
                let waited = self.now_ns.saturating_sub(connection.ack_delay_since_ns);
                if connection.ack_delay == AckDelay::Piggyback
                    && (waited >= PIGGYBACK_NS / 2
                        || connection.responder.ack_leaves_with_request())
                {
                    connection.piggyback.on_piggybacked();
                    self.send_answers(connection, qpn);
                }
                return Step::Executed;
            }
            if connection.responder.owes_only_an_ack() && state == QpState::ReadyToSend {
                if connection.requester.next(1).is_some() {
                    self.send_requests(connection, qpn, wqe);
                } else if connection.fetched < FETCHED_BEFORE_ACK
                    && self.queues.qps.get(qpn.raw()).is_some_and(|qp| qp.pending() > 0)
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
                let pending = self.queues.qps.get(qpn.raw()).is_some_and(|qp| qp.pending() > 0);
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

    /// Moves a connection back into its QP, sets its timer, and makes the QP ready if it has work.
    fn put_back(&mut self, qpn: Qpn, mut connection: Box<Connection>) {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return };
        // An earlier timer entry stays. When it expires, the timer is set to the right time.
        let deadline = connection.requester.deadline().filter(|_| qp.state == QpState::ReadyToSend);
        if let Some(at) = deadline
            && connection.timer_ns.is_none_or(|timer_ns| at < timer_ns)
        {
            if let Some(timer_ns) = connection.timer_ns.replace(at) {
                self.wire.timers.remove(&(timer_ns, qpn.raw()));
            }
            self.wire.timers.insert((at, qpn.raw()));
        }
        if qp.state == QpState::Error
            && let Some(timer_ns) = connection.timer_ns.take()
        {
            self.wire.timers.remove(&(timer_ns, qpn.raw()));
        }
        let is_awaiting = qp.state == QpState::ReadyToSend && connection.requester.awaits_answer();
        self.wire.awaiting =
            self.wire.awaiting + is_awaiting as u32 - connection.is_awaiting as u32;
        connection.is_awaiting = is_awaiting;
        let (responder, in_dialogue) = (&connection.responder, connection.piggyback.is_active());
        let ack_delay = match self.wire.ack_policy {
            AckDelay::Piggyback | AckDelay::All
                if in_dialogue && responder.ack_may_be_piggybacked() =>
            {
                AckDelay::Piggyback
            }
            AckDelay::All if responder.ack_may_wait_for_idle() => AckDelay::All,
            _ => AckDelay::None,
        };
        if ack_delay != connection.ack_delay {
            connection.ack_delay = ack_delay;
            connection.ack_delay_since_ns = self.now_ns;
            match ack_delay {
                AckDelay::None => {}
                AckDelay::Piggyback => self.wire.piggybacking.push_back((self.now_ns, qpn)),
                AckDelay::All => self.wire.delayed.push(qpn),
            }
        }
        let packets = connection.has_packets(qp.state) || qp.state == QpState::Error;
        qp.remote = Some(connection);
        if packets && matches!(qp.in_list, InList::CqWaiters { .. }) {
            // The next WQE of the QP waits, but the connection has work.
            self.queues.leave(qpn);
        }
        self.queues.schedule(qpn);
    }

    /// Sets the delayed-ACK policy. Returns true if delayed acknowledgements are now ready to be
    /// sent.
    pub fn delay_acks(&mut self, which: AckDelay) -> bool {
        self.wire.ack_policy = which;
        if which == AckDelay::All {
            return false;
        }
        let mut any = false;
        while let Some(&(since, qpn)) = self.wire.piggybacking.front()
            && (which == AckDelay::None || since + PIGGYBACK_NS <= self.now_ns)
        {
            self.wire.piggybacking.pop_front();
            any |= self.end_ack_delay(qpn, |connection| {
                let waits = connection.ack_delay == AckDelay::Piggyback
                    && connection.ack_delay_since_ns == since;
                if waits {
                    connection.piggyback.on_ack_timeout();
                }
                waits
            });
        }
        while let Some(qpn) = self.wire.delayed.pop() {
            any |= self.end_ack_delay(qpn, |connection| connection.ack_delay == AckDelay::All);
        }
        any
    }

    /// Ends the delay of a connection's acknowledgement if `waits` returns true for the connection.
    fn end_ack_delay(&mut self, qpn: Qpn, waits: impl FnOnce(&mut Connection) -> bool) -> bool {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return false };
        let Some(mut connection) = qp.remote.take() else { return false };
        let waits = waits(&mut connection);
        self.put_back(qpn, connection);
        waits
    }

    /// Handles the connections whose timers have expired.
    #[cold]
    pub fn run_timers(&mut self) {
        while let Some(&(at, number)) = self.wire.timers.first()
            && at <= self.now_ns
        {
            self.wire.timers.pop_first();
            let qpn = Qpn::new(number);
            let Some(qp) = self.queues.qps.get_mut(number) else { continue };
            let Some(mut connection) = qp.remote.take() else { continue };
            connection.timer_ns = None;
            if connection.requester.on_timer(self.now_ns) {
                self.wire.stats.timeouts += 1;
            }
            self.retire(&mut connection, qpn);
            self.put_back(qpn, connection);
        }
    }

    // --- the end of requests -------------------------------------------------------------------

    /// Completes finished requests, in order.
    fn retire(&mut self, connection: &mut Connection, qpn: Qpn) {
        let Some(qp) = self.queues.qps.get(qpn.raw()) else { return };
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

    /// Completes a request that succeeded. Returns false if the CQ is full.
    fn complete_request(&mut self, qpn: Qpn, request: &Request) -> bool {
        self.stats.wqes[(request.opcode & 0x3f) as usize] += 1;
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("the QP of a connection exists");
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
        let send_cq =
            self.queues.qps.get(qpn.raw()).expect("the QP of a connection exists").send_cq;
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

    /// Completes, as flushed, a fetched send WQE of a QP in Error. Returns false if there is none.
    #[cold]
    fn flush_connection(&mut self, connection: &mut Connection, qpn: Qpn) -> bool {
        let Some(request) = connection.requester.flush() else { return false };
        self.push_request_error(qpn, &request, Syndrome::Flushed, 0);
        self.stats.flushed += 1;
        self.work += WQE_WORK;
        true
    }
}
