//! What arrives: requests for this NIC's memory and receive queues, and answers to what was asked.
//!
//! A packet is foreign. Whatever it holds, the work for it is bounded by its length and the lists of one WQE,
//! and the worst that it does is to put the QP into Error that it is for, if it comes from that QP's peer.
//!
//! Checks come in the order of their cost, so that a packet which nobody here waits for costs
//! least:
//!
//! ```text
//!   QP number ──> address ──> guesses left ──> ICRC ─┬─> headers ──> PSN ──> request, response
//!                        └──> counter ──> tag ───────┘
//! ```

use super::transmit::nak_of;
use super::{Connection, Trust, Wire, decode_kept};
use crate::cqe::Syndrome;
use crate::dma::{Span, copy_lists};
use crate::engine::execute::{Fault, Requester};
use crate::engine::respond::{self, Delivered};
use crate::engine::{Core, RDMA_BYTES_MAX, WQE_WORK};
use crate::ids::{Access, Qpn};
use crate::queue::Fetched;
use crate::verbs::QpState;
use crate::wire::guesses::Fit;
use crate::wire::mac::{self, Refused};
use crate::wire::packet::{self, AtomicOp, Body, ICRC, Malformed, Notice, Packet, Part, Reth};
use crate::wire::requester::Response;
use crate::wire::responder::{Answer, Arrival, Message, READ_PACKETS_MAX};
use crate::wqe::{Remote, Wqe};
use std::net::{IpAddr, SocketAddr};

/// So much more of a message, where that is known, is in its middle: two bursts.
const AMID_BYTES: u32 = 120 << 10;

/// What a request came to.
enum Verdict {
    /// Executed, so many PSNs of it; it ends a message.
    Done { packets: u32, ends: bool },
    /// No receive WQE.
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
        let Wire { stats, amid, .. } = &mut self.wire;
        *amid = false;
        stats.packets_in += 1;
        let Some(qpn) = packet::destination(bytes) else {
            return stats.not_a_packet(Malformed::Short);
        };
        let Some(qp) = self.qps.get_mut(qpn.raw()).filter(|qp| qp.remote.is_some()) else {
            stats.unknown_qp += 1;
            return;
        };
        let connection = qp.remote.as_mut().expect("just seen");
        let peer = &connection.peer;
        if !peer.sends_from(source) || peer.local != destination {
            stats.strangers += 1;
            return;
        }
        let trailer = match &mut connection.trust {
            Trust::Psn(guesses) => {
                if guesses.is_shut(now_ns) {
                    stats.shut_out += 1;
                    return;
                }
                if !is_intact() {
                    stats.bad_icrc += 1;
                    return;
                }
                ICRC
            }
            Trust::Key(keys) => match keys.opener.check(bytes) {
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
        // Left where it is: to copy what was just written in parts is to wait for them.
        let parsed = Packet::parse_before(bytes, trailer);
        let packet = match &parsed {
            Ok(packet) => packet,
            Err(why) => return stats.not_a_packet(*why),
        };
        if let Trust::Psn(guesses) = &mut connection.trust {
            let fit = match packet.body.is_response() {
                true => connection.requester.fit(packet.psn),
                false => connection.responder.fit(packet.psn),
            };
            stats.guesses += (fit == Fit::Far) as u64;
            guesses.charge(fit, now_ns);
        }
        let (state, share) = (qp.state, qp.share);
        let mut connection = qp.remote.take().expect("just seen");
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
            connection.responder.refuse_again(packet.psn);
            self.wire.stats.untimely += 1;
        }
        self.shares.charge(share, (self.work - before) as i64);
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
                        connection.responder.read_again(packet.psn, reth.at, reth.len);
                    }
                    Body::Atomic { .. } => connection.responder.atomic_again(packet.psn),
                    _ if packet.ack_request => connection.responder.acknowledge_again(),
                    _ => {}
                }
                return;
            }
        }
        let to = respond::Responder::of(self.qps.get(qpn.raw()).expect("its connection works"));
        let verdict = match packet.body {
            Body::Send { part, notice } => self.send_arrives(connection, &to, packet, part, notice),
            Body::Write { part, reth, imm } => {
                self.write_arrives(connection, &to, packet, part, reth, imm)
            }
            Body::Read(reth) => self.read_arrives(connection, &to, reth),
            Body::Atomic { at, op } => self.atomic_arrives(connection, &to, at, op),
            _ => unreachable!("answers go elsewhere"),
        };
        match verdict {
            Ok(Verdict::Done { packets, ends }) => {
                let answer = match packet.body {
                    Body::Read(_) | Body::Atomic { .. } => Answer::Data,
                    _ if packet.ack_request => Answer::Ack,
                    _ => Answer::Nothing,
                };
                if ends && answer != Answer::Data {
                    connection.dialogue.heard();
                }
                self.wire.amid = match connection.responder.message {
                    Message::None => false,
                    Message::Send { .. } => true,
                    Message::Write { left, .. } => left >= AMID_BYTES,
                };
                connection.responder.accepted(packets, ends, answer);
            }
            Ok(Verdict::NotReady) => {
                self.stats.rnr += 1;
                connection.responder.not_ready();
            }
            Err(fault) => connection.responder.refuse(nak_of(fault.syndrome)),
        }
    }

    fn send_arrives(
        &mut self,
        connection: &mut Connection,
        to: &respond::Responder,
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
                Delivered::Yes => Verdict::Done { packets: 1, ends: true },
                Delivered::NotReady(_) => Verdict::NotReady,
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
            let recv = self.recvs.get_mut(n).expect("a receive queue in use lives");
            let list = recv.fetch(&mut self.scratch.recv_wqe);
            responder.receive_wqe.copy_from_slice(list);
            // Others take from a shared queue meanwhile. One of its own is used up when it is full.
            let taken = to.recv_shared.then(|| recv.use_one(None));
            if taken.is_some() {
                self.look_at_limit(n);
            }
            self.qps.get_mut(to.qpn.raw()).expect("its connection works").taken = taken;
        }
        let stride = responder.receive_wqe.len();
        self.scratch.recv_wqe[..stride].copy_from_slice(&responder.receive_wqe);
        if let Err((mine, theirs)) = self.scatter(to.space, n, stride, before, bytes) {
            let taken = self.taken_by(to);
            return Err(self.receive_failed(to, n, taken, mine, theirs));
        }
        if !part.ends() {
            responder.message = Message::Send { len: len as u32 };
            return Ok(Verdict::Done { packets: 1, ends: false });
        }
        responder.message = Message::None;
        self.may_revoke(to, invalidate)?;
        let taken = self.taken_by(to);
        self.received(to, n, taken, message, packet.solicited)?;
        Ok(Verdict::Done { packets: 1, ends: true })
    }

    /// Not inlined: what QPs of this NIC do is.
    #[inline(never)]
    fn receive_whole(
        &mut self,
        to: &respond::Responder,
        message: respond::Message,
        solicited: bool,
    ) -> Result<Delivered, Fault> {
        self.receive(to, message, solicited)
    }

    /// The receive WQE that the message at hand has taken, to be completed now.
    fn taken_by(&mut self, to: &respond::Responder) -> Option<u16> {
        self.qps.get_mut(to.qpn.raw()).expect("its connection works").taken.take()
    }

    fn write_arrives(
        &mut self,
        connection: &mut Connection,
        to: &respond::Responder,
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
                // All of it, before any of it.
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
            // The data goes only where its notice can follow.
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
        if let Some(imm) = imm {
            let message = respond::Message::WriteImm { imm, len: len as u64 };
            self.receive_whole(to, message, packet.solicited)?;
        }
        Ok(Verdict::Done { packets: 1, ends: true })
    }

    fn read_arrives(
        &mut self,
        connection: &mut Connection,
        to: &respond::Responder,
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
        to: &respond::Responder,
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
                packet::Syndrome::Ack(_) => requester.acknowledged(psn.plus(1), now),
                packet::Syndrome::Rnr(timer) => {
                    self.wire.stats.naks_in += 1;
                    requester.not_ready(psn, timer, now);
                }
                packet::Syndrome::Nak(nak) => {
                    self.wire.stats.naks_in += 1;
                    requester.refused(psn, nak, now);
                }
            },
            _ => match requester.response(psn) {
                Response::Next { request, packet: at } => {
                    self.result(connection, qpn, packet, wqe, request, at);
                }
                Response::Ahead => requester.gap(now),
                Response::Stray => self.wire.stats.stray += 1,
            },
        }
    }

    /// Puts the awaited result of a request, which is packet `at` of it, where it belongs.
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
        let me = Requester::of(self.qps.get(qpn.raw()).expect("its connection works"), &ctrl);
        let skip = at as u64 * connection.peer.mtu.bytes() as u64;
        let put = match (packet.body, decode_kept(&ctrl, wqe.bytes())) {
            (Body::ReadResponse { .. }, Ok(Wqe::Read { to, .. })) => {
                let total = connection.requester.request(request).len as u64;
                let len = (total - skip).min(connection.peer.mtu.bytes() as u64);
                if packet.payload.len() as u64 != len {
                    self.wire.stats.stray += 1;
                    return;
                }
                self.list_local(&me, to, Access::LOCAL_WRITE).map(|()| {
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
                connection.requester.answered(packet.psn, self.now_ns);
                let total = connection.requester.request(request).len as u64;
                self.wire.amid = total - skip >= AMID_BYTES as u64;
            }
            Err(Fault { syndrome, vendor }) => {
                // What it overtook was acknowledged with it.
                connection.requester.acknowledged(packet.psn, self.now_ns);
                connection.requester.fault(request, syndrome, vendor);
            }
        }
    }
}
