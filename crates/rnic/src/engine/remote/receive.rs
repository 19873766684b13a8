//! Incoming packets: requests for this NIC's memory and receive queues, and responses to its own
//! requests.
//!
//! Packets are untrusted. The work for a packet is bounded by its length and the SGE list of one
//! WQE. The worst effect of a packet is the error state of its destination QP, and only the QP's
//! peer can cause that.
//!
//! Checks are ordered by cost, so that unexpected packets cost least:
//!
//! ```text
//!   QP number ──> address ──> guess budget ──> ICRC ─┬─> headers ──> PSN ──> request, response
//!                        └──> counter ──> tag ────────┘
//! ```

use super::state::RemoteState;
use super::transmit::nak_of;
use super::{Connection, PacketAuth, decode_kept};
use crate::dma::{Span, copy_lists};
use crate::engine::core::{Core, RDMA_BYTES_MAX, WQE_WORK};
use crate::engine::local_wqe::{Fault, LocalWqe};
use crate::engine::queue::Fetched;
use crate::engine::respond::{self, Delivery};
use crate::wire::guess_limiter::PsnFit;
use crate::wire::mac::{self, Refused};
use crate::wire::packet::{self, AtomicOp, Body, ICRC, Malformed, Notice, Packet, Part, Reth};
use crate::wire::requester::Response;
use crate::wire::responder::{Answer, Arrival, Message, READ_PACKETS_MAX};
use std::net::{IpAddr, SocketAddr};
use verbs::cqe::Syndrome;
use verbs::wqe::{Remote, Wqe};
use verbs::{Access, QpState, Qpn};

/// Minimum number of outstanding bytes, if known, for `expects_more_packets`: two bursts.
const AMID_BYTES: u32 = 120 << 10;

/// Outcome of a request packet.
enum Verdict {
    /// Executed; it covers `packets` PSNs. `ends`: a message is complete.
    Done { packets: u32, ends: bool },
    /// No receive WQE is available (RNR).
    NotReady,
}

impl Core {
    /// See [`crate::Engine::receive`].
    pub fn receive_packet(
        &mut self,
        wqe: &mut Fetched,
        now_ns: u64,
        source: SocketAddr,
        destination: IpAddr,
        bytes: &[u8],
        is_intact: impl FnOnce() -> bool,
    ) {
        self.now_ns = now_ns;
        let RemoteState { stats, expects_more, .. } = &mut self.wire;
        *expects_more = false;
        stats.packets_in += 1;
        let Some(qpn) = packet::destination(bytes) else {
            return stats.not_a_packet(Malformed::Short);
        };
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()).filter(|qp| qp.remote.is_some()) else {
            stats.unknown_qp += 1;
            return;
        };
        let connection = qp.remote.as_mut().expect("looked up above");
        let peer = &connection.peer;
        if !peer.sends_from(source) || peer.local != destination {
            stats.strangers += 1;
            return;
        }
        let trailer = match &mut connection.auth {
            PacketAuth::Psn(guesses) => {
                if guesses.is_exhausted(now_ns) {
                    stats.shut_out += 1;
                    return;
                }
                if !is_intact() {
                    stats.bad_icrc += 1;
                    return;
                }
                ICRC
            }
            PacketAuth::Key(keys) => match keys.opener.check(bytes) {
                Ok(()) => mac::TRAILER,
                Err(Refused::Forged) => {
                    stats.forged += 1;
                    return;
                }
                Err(Refused::Old) => {
                    stats.outdated += 1;
                    return;
                }
            },
        };
        // Borrowed, not copied: a copy would wait for the stores that have just written the fields.
        let parsed = Packet::parse_before(bytes, trailer);
        let packet = match &parsed {
            Ok(packet) => packet,
            Err(why) => return stats.not_a_packet(*why),
        };
        if let PacketAuth::Psn(guesses) = &mut connection.auth {
            let fit = match packet.body.is_response() {
                true => connection.requester.fit(packet.psn),
                false => connection.responder.fit(packet.psn),
            };
            stats.guesses += (fit == PsnFit::Far) as u64;
            guesses.charge(fit, now_ns);
        }
        let (state, sched_index) = (qp.state, qp.sched_index);
        let mut connection = qp.remote.take().expect("looked up above");
        let before = self.work;
        self.work += WQE_WORK;
        if packet.body.is_response() {
            if state == QpState::ReadyToSend {
                self.response(&mut connection, qpn, packet, wqe);
                self.retire(&mut connection, qpn);
            } else {
                self.wire.stats.untimely += 1;
            }
        } else if matches!(state, QpState::ReadyToReceive | QpState::ReadyToSend) {
            self.request(&mut connection, qpn, packet);
        } else {
            connection.responder.repeat_nak(packet.psn);
            self.wire.stats.untimely += 1;
        }
        self.queues.scheduler.charge(sched_index, (self.work - before) as i64);
        self.put_back(qpn, connection);
    }

    // --- requests ------------------------------------------------------------------------------

    fn request(&mut self, connection: &mut Connection, qpn: Qpn, packet: &Packet<'_>) {
        match connection.responder.arrival(packet.psn) {
            Arrival::Expected => {}
            Arrival::Ahead => {
                self.wire.stats.ahead += 1;
                return;
            }
            Arrival::Duplicate => {
                self.wire.stats.duplicates += 1;
                match packet.body {
                    Body::Read(reth) => {
                        connection.responder.repeat_read(packet.psn, reth.at, reth.len);
                    }
                    Body::Atomic { .. } => connection.responder.repeat_atomic(packet.psn),
                    _ if packet.ack_request => connection.responder.acknowledge_now(),
                    _ => {}
                }
                return;
            }
        }
        let to = respond::RemoteAccess::new(
            self.queues.qps.get(qpn.raw()).expect("the QP of a connection exists"),
        );
        let verdict = match packet.body {
            Body::Send { part, notice } => self.send_arrives(connection, &to, packet, part, notice),
            Body::Write { part, reth, imm } => {
                self.write_arrives(connection, &to, packet, part, reth, imm)
            }
            Body::Read(reth) => self.read_arrives(connection, &to, reth),
            Body::Atomic { at, op } => self.atomic_arrives(connection, &to, at, op),
            _ => unreachable!("responses are handled by `response`"),
        };
        match verdict {
            Ok(Verdict::Done { packets, ends }) => {
                let answer = match packet.body {
                    Body::Read(_) | Body::Atomic { .. } => Answer::Data,
                    _ if packet.ack_request => Answer::Ack,
                    _ => Answer::Nothing,
                };
                if ends && answer != Answer::Data {
                    connection.piggyback.on_message();
                }
                self.wire.expects_more = match connection.responder.message {
                    Message::None => false,
                    Message::Send { .. } => true,
                    Message::Write { left, .. } => left >= AMID_BYTES,
                };
                connection.responder.accepted(packets, ends, answer);
            }
            Ok(Verdict::NotReady) => {
                self.stats.rnr += 1;
                connection.responder.queue_rnr_nak();
            }
            Err(fault) => connection.responder.reject(nak_of(fault.syndrome)),
        }
    }

    fn send_arrives(
        &mut self,
        connection: &mut Connection,
        to: &respond::RemoteAccess,
        packet: &Packet<'_>,
        part: Part,
        notice: Notice,
    ) -> Result<Verdict, Fault> {
        let (mtu, bytes) = (connection.peer.mtu.bytes() as u64, packet.payload.len() as u64);
        let before = match (part.begins(), connection.responder.message) {
            (true, Message::None) => 0,
            (false, Message::Send { len }) => len as u64,
            _ => return Err(self.refuse(to, Syndrome::RemoteInvalidRequest)),
        };
        let len = before + bytes;
        let full = if part.ends() { bytes <= mtu } else { bytes == mtu };
        if !full || len > RDMA_BYTES_MAX {
            return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
        }
        let (imm, invalidate) = match notice {
            Notice::None => (None, None),
            Notice::Imm(imm) => (Some(imm), None),
            Notice::Invalidate(key) => (None, Some(key)),
        };
        let message = respond::Message::Send { imm, invalidate, len };
        self.scratch.local.clear();
        self.scratch.local.push(Span::of_bytes(packet.payload));
        if part == Part::Only {
            return Ok(match self.receive_whole(to, message, packet.solicited)? {
                Delivery::Received => Verdict::Done { packets: 1, ends: true },
                Delivery::NotReady(_) => Verdict::NotReady,
            });
        }
        let Some(n) = to.recv else {
            return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
        };
        let responder = &mut connection.responder;
        if part.begins() {
            if self.receive_ready(to)?.is_err() {
                return Ok(Verdict::NotReady);
            }
            let recv = self.queues.recvs.get_mut(n).expect("a receive queue in use exists");
            let list = recv.fetch(&mut self.scratch.recv_wqe);
            responder.receive_wqe.copy_from_slice(list);
            // Other QPs take WQEs from a shared queue meanwhile. A QP's own WQE is consumed when
            // the message is complete.
            let taken = to.recv_shared.then(|| recv.consume(None));
            if taken.is_some() {
                self.check_srq_limit(n);
            }
            self.queues
                .qps
                .get_mut(to.qpn.raw())
                .expect("the QP of a connection exists")
                .taken_wqe = taken;
        }
        let stride = responder.receive_wqe.len();
        self.scratch.recv_wqe[..stride].copy_from_slice(&responder.receive_wqe);
        if let Err((mine, theirs)) = self.scatter(to.namespace, n, stride, before, bytes) {
            let taken = self.take_taken_wqe(to);
            return Err(self.receive_failed(to, n, taken, mine, theirs));
        }
        if !part.ends() {
            responder.message = Message::Send { len: len as u32 };
            return Ok(Verdict::Done { packets: 1, ends: false });
        }
        responder.message = Message::None;
        self.check_invalidation(to, invalidate)?;
        let taken = self.take_taken_wqe(to);
        self.complete_receive(to, n, taken, message, packet.solicited)?;
        Ok(Verdict::Done { packets: 1, ends: true })
    }

    /// `#[inline(never)]`, because the local-QP fast path inlines the callee.
    #[inline(never)]
    fn receive_whole(
        &mut self,
        to: &respond::RemoteAccess,
        message: respond::Message,
        solicited: bool,
    ) -> Result<Delivery, Fault> {
        self.receive(to, message, solicited)
    }

    /// Takes the index of the receive WQE that the current message has taken, to complete it.
    fn take_taken_wqe(&mut self, to: &respond::RemoteAccess) -> Option<u16> {
        self.queues
            .qps
            .get_mut(to.qpn.raw())
            .expect("the QP of a connection exists")
            .taken_wqe
            .take()
    }

    fn write_arrives(
        &mut self,
        connection: &mut Connection,
        to: &respond::RemoteAccess,
        packet: &Packet<'_>,
        part: Part,
        reth: Option<Reth>,
        imm: Option<u32>,
    ) -> Result<Verdict, Fault> {
        let (mtu, bytes) = (connection.peer.mtu.bytes(), packet.payload.len() as u32);
        let (at, left, len) = match (reth, connection.responder.message) {
            (Some(Reth { at, len }), Message::None) => {
                if len as u64 > RDMA_BYTES_MAX {
                    return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
                }
                // The whole range is checked before the first byte is written.
                if len == 0 {
                    self.admit_kind(to, Access::REMOTE_WRITE)?;
                } else {
                    self.admit(to, at, len as u64, Access::REMOTE_WRITE)?;
                }
                (at, len, len)
            }
            (None, Message::Write { at, left, len }) => (at, left, len),
            _ => return Err(self.refuse(to, Syndrome::RemoteInvalidRequest)),
        };
        let fits = match part.ends() {
            true => bytes == left && bytes <= mtu,
            false => bytes == mtu && bytes < left,
        };
        if !fits {
            return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
        }
        if imm.is_some() && self.receive_ready(to)?.is_err() {
            // Data is written only if a receive WQE for the notification is available.
            return Ok(Verdict::NotReady);
        }
        if bytes > 0 {
            let target = self.admit(to, at, bytes as u64, Access::REMOTE_WRITE)?;
            target.copy_from(Span::of_bytes(packet.payload));
            self.stats.bytes += bytes as u64;
            self.work += bytes as u64;
        }
        if !part.ends() {
            let at = Remote { addr: at.addr.wrapping_add(bytes as u64), rkey: at.rkey };
            connection.responder.message = Message::Write { at, left: left - bytes, len };
            return Ok(Verdict::Done { packets: 1, ends: false });
        }
        connection.responder.message = Message::None;
        let start = at.addr.wrapping_add(bytes as u64).wrapping_sub(len as u64);
        self.write_ended(to, Remote { addr: start, rkey: at.rkey }, len as u64);
        if let Some(imm) = imm {
            let message = respond::Message::WriteImm { imm, len: len as u64 };
            self.receive_whole(to, message, packet.solicited)?;
        }
        Ok(Verdict::Done { packets: 1, ends: true })
    }

    fn read_arrives(
        &mut self,
        connection: &mut Connection,
        to: &respond::RemoteAccess,
        reth: Reth,
    ) -> Result<Verdict, Fault> {
        let responder = &mut connection.responder;
        let packets = responder.packets(reth.len);
        let between = matches!(responder.message, Message::None);
        let fits = reth.len as u64 <= RDMA_BYTES_MAX && packets <= READ_PACKETS_MAX;
        if !between || !fits || !responder.has_room() {
            return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
        }
        if reth.len == 0 {
            self.admit_kind(to, Access::REMOTE_READ)?;
        } else {
            self.admit(to, reth.at, reth.len as u64, Access::REMOTE_READ)?;
        }
        connection.responder.read(reth.at, reth.len);
        Ok(Verdict::Done { packets, ends: true })
    }

    fn atomic_arrives(
        &mut self,
        connection: &mut Connection,
        to: &respond::RemoteAccess,
        at: Remote,
        op: AtomicOp,
    ) -> Result<Verdict, Fault> {
        let responder = &mut connection.responder;
        let between = matches!(responder.message, Message::None);
        if !between || !responder.has_room() || !at.addr.is_multiple_of(8) {
            return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
        }
        let word = self.admit(to, at, 8, Access::REMOTE_ATOMIC)?;
        let old = word.update_be64(|value| match op {
            AtomicOp::CompareSwap { compare, swap } => (value == compare).then_some(swap),
            AtomicOp::FetchAdd { add } => Some(value.wrapping_add(add)),
        });
        connection.responder.atomic(old);
        Ok(Verdict::Done { packets: 1, ends: true })
    }

    // --- answers -------------------------------------------------------------------------------

    fn response(
        &mut self,
        connection: &mut Connection,
        qpn: Qpn,
        packet: &Packet<'_>,
        wqe: &mut Fetched,
    ) {
        let (now, psn) = (self.now_ns, packet.psn);
        let requester = &mut connection.requester;
        match packet.body {
            Body::Acknowledge(aeth) => match aeth.syndrome {
                packet::Syndrome::Ack(_) => requester.on_ack(psn.plus(1), now),
                packet::Syndrome::Rnr(timer) => {
                    self.wire.stats.naks_in += 1;
                    requester.on_rnr_nak(psn, timer, now);
                }
                packet::Syndrome::Nak(nak) => {
                    self.wire.stats.naks_in += 1;
                    requester.on_nak(psn, nak, now);
                }
            },
            _ => match requester.response(psn) {
                Response::Next { request, packet: at } => {
                    self.result(connection, qpn, packet, wqe, request, at);
                }
                Response::Ahead => requester.on_response_gap(now),
                Response::Stray => self.wire.stats.stray += 1,
            },
        }
    }

    /// Stores the awaited result of a request; the packet has index `at` in it.
    fn result(
        &mut self,
        connection: &mut Connection,
        qpn: Qpn,
        packet: &Packet<'_>,
        wqe: &mut Fetched,
        request: usize,
        at: u32,
    ) {
        connection.requester.wqe(request, wqe.bytes_mut());
        let ctrl = wqe.control();
        let me = LocalWqe::new(
            self.queues.qps.get(qpn.raw()).expect("the QP of a connection exists"),
            &ctrl,
        );
        let skip = at as u64 * connection.peer.mtu.bytes() as u64;
        let put = match (packet.body, decode_kept(&ctrl, wqe.bytes())) {
            (Body::ReadResponse { .. }, Ok(Wqe::Read { to, .. })) => {
                let total = connection.requester.request(request).len as u64;
                let len = (total - skip).min(connection.peer.mtu.bytes() as u64);
                if packet.payload.len() as u64 != len {
                    self.wire.stats.stray += 1;
                    return;
                }
                self.scratch.list_local(&self.keys, &me, to, Access::LOCAL_WRITE).map(|()| {
                    let (list, data) = (self.scratch.local.as_slice(), packet.payload);
                    copy_lists(list, skip, &[Span::of_bytes(data)], 0, len);
                    self.stats.bytes += len;
                    self.work += len;
                })
            }
            (
                Body::AtomicAcknowledge { old, .. },
                Ok(Wqe::CompareSwap { old: place, .. } | Wqe::FetchAdd { old: place, .. }),
            ) => self.result_place(&me, place).map(|place| place.put_be64(old)),
            _ => {
                self.wire.stats.stray += 1;
                return;
            }
        };
        match put {
            Ok(()) => {
                connection.requester.on_response(packet.psn, self.now_ns);
                let total = connection.requester.request(request).len as u64;
                self.wire.expects_more = total - skip >= AMID_BYTES as u64;
            }
            Err(Fault { syndrome, vendor }) => {
                // A response also acknowledges all earlier requests.
                connection.requester.on_ack(packet.psn, self.now_ns);
                connection.requester.fault(request, syndrome, vendor);
            }
        }
    }
}
