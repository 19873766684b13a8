//! Outgoing packets: requests of fetched WQEs, and responses to the peer's requests.

use super::{Connection, decode_kept};
use crate::crc::Sum;
use crate::dma::{Span, copy_out};
use crate::engine::core::{Core, WQE_WORK};
use crate::engine::local_wqe::{Fault, LocalWqe};
use crate::engine::queue::Fetched;
use crate::engine::respond;
use crate::wire::mac::{self, Sealer};
use crate::wire::packet::{self, Aeth, AtomicOp, Body, Nak, Notice, Packet, Part, Reth};
use crate::wire::requester::{Kind, Plan, Request};
use crate::wire::responder::Output;
use crate::wire::{Ending, Envelope, LONG_BURST, Outbox};
use verbs::cqe::Syndrome;
use verbs::wqe::{Remote, Wqe};
use verbs::{Access, Psn, Qpn};

/// Maximum number of packets per step.
const STEP_PACKETS: u32 = LONG_BURST;

/// Returns the NAK code for a rejected request.
pub(super) fn nak_of(syndrome: Syndrome) -> Nak {
    match syndrome {
        Syndrome::RemoteInvalidRequest => Nak::InvalidRequest,
        Syndrome::RemoteAccess => Nak::RemoteAccess,
        _ => Nak::RemoteOperation,
    }
}

impl Core {
    /// Sends packets of the next request that has unsent packets.
    pub(super) fn send_requests(
        &mut self,
        connection: &mut Connection,
        qpn: Qpn,
        wqe: &mut Fetched,
    ) {
        let max_packets = self.wire.outbox.packets_max(STEP_PACKETS);
        let Some(mut plan) = connection.requester.next(max_packets) else { return };
        let at = plan.request;
        connection.requester.wqe(at, wqe.bytes_mut());
        let ctrl = wqe.control();
        let qp = self.queues.qps.get(qpn.raw()).expect("the QP of a connection exists");
        let me = LocalWqe::new(qp, &ctrl);
        let Ok(decoded) = decode_kept(&ctrl, wqe.bytes()) else {
            unreachable!("a stored WQE was decoded when it was fetched");
        };
        self.work += WQE_WORK;
        // Keys are checked again now, because a region may have been destroyed since the fetch.
        if let Wqe::Send { from, .. } | Wqe::Write { from, .. } = decoded
            && let Err(Fault { syndrome, vendor }) = self.scratch.gather(&self.keys, &me, from)
        {
            connection.requester.fault(at, syndrome, vendor);
            self.retire(connection, qpn);
            return;
        }
        let (envelope, mtu) = (connection.envelope(), connection.peer.mtu.bytes());
        let request = *connection.requester.request(at);
        let list = self.scratch.local.as_slice();
        let mut made = 0;
        loop {
            let packets = match request.kind {
                Kind::Send | Kind::Write => plan.count,
                _ => 1,
            };
            let mut bytes = 0;
            for n in 0..packets {
                let index = plan.packet + n;
                let skip = index as u64 * mtu as u64;
                let len = match request.kind {
                    Kind::Send | Kind::Write => (request.len as u64 - skip).min(mtu as u64),
                    _ => 0,
                };
                let last = n + 1 == packets;
                let packet = Packet {
                    qpn: connection.peer.qpn,
                    psn: plan.psn.plus(n),
                    ack_request: last && plan.ack,
                    solicited: me.solicited && last && plan.packet + plan.count == request.packets,
                    body: body_of(&decoded, &request, &plan, index, mtu),
                    payload: &[],
                };
                let fill = |to: Span, summed| copy_out(to, list, skip, summed);
                let sealer = connection.sealer();
                put(&mut self.wire.outbox, envelope, &packet, len as usize, sealer, fill);
                bytes += len;
            }
            made += packets;
            self.wire.stats.packets_out += packets as u64;
            self.stats.bytes += bytes;
            self.work += WQE_WORK * packets as u64 + bytes;
            connection.piggyback.on_request();
            if connection.requester.sent(&plan, self.now_ns) {
                self.wire.stats.repeated += packets as u64;
            }
            let max_packets = self.wire.outbox.packets_max(STEP_PACKETS - made);
            match connection.requester.next(max_packets) {
                Some(next) if next.request == at => plan = next,
                _ => return,
            }
        }
    }

    /// Sends the pending responses.
    pub(super) fn send_answers(&mut self, connection: &mut Connection, qpn: Qpn) {
        let envelope = connection.envelope();
        let qp = self.queues.qps.get(qpn.raw()).expect("the QP of a connection exists");
        let to = respond::RemoteAccess::new(qp);
        let mut made = 0;
        while made < STEP_PACKETS {
            let max_packets = self.wire.outbox.packets_max(STEP_PACKETS - made);
            if max_packets == 0 {
                return;
            }
            let responder = &mut connection.responder;
            let aeth = Aeth { syndrome: responder.positive(), msn: responder.msn() };
            let (psn, body) = match responder.output() {
                Some(Output::Read { psn, at, left, fresh }) => {
                    made += self.send_read(connection, &to, (psn, at, left, fresh), max_packets);
                    continue;
                }
                Some(Output::Atomic { psn, old }) => {
                    responder.pop_output();
                    (psn, Body::AtomicAcknowledge { aeth, old })
                }
                Some(Output::Refusal { psn }) => {
                    responder.pop_output();
                    self.wire.stats.naks_out += 1;
                    let syndrome = packet::Syndrome::Nak(Nak::RemoteAccess);
                    (psn, Body::Acknowledge(Aeth { syndrome, msn: responder.msn() }))
                }
                None => match responder.take_reply() {
                    Some((psn, syndrome)) => {
                        if !matches!(syndrome, packet::Syndrome::Ack(_)) {
                            self.wire.stats.naks_out += 1;
                        }
                        (psn, Body::Acknowledge(Aeth { syndrome, msn: responder.msn() }))
                    }
                    None => return,
                },
            };
            let packet = answer(connection.peer.qpn, psn, body);
            let sealer = connection.sealer();
            put(&mut self.wire.outbox, envelope, &packet, 0, sealer, |_, _| None);
            self.wire.stats.packets_out += 1;
            self.work += WQE_WORK;
            made += 1;
        }
    }

    /// Sends up to `max_packets` packets of the READ response at the head of the output queue, or
    /// its NAK; returns the number of packets.
    fn send_read(
        &mut self,
        connection: &mut Connection,
        to: &respond::RemoteAccess,
        (psn, at, left, fresh): (Psn, Remote, u32, bool),
        max_packets: u32,
    ) -> u32 {
        let (envelope, mtu) = (connection.envelope(), connection.peer.mtu.bytes());
        let responder = &mut connection.responder;
        let aeth = Aeth { syndrome: responder.positive(), msn: responder.msn() };
        let mut packets = max_packets.min(left.div_ceil(mtu)).max(1);
        let source = loop {
            let len = left.min(packets * mtu);
            if len == 0 {
                break Span::EMPTY;
            }
            // Keys are checked again now, because the key may have become invalid since the
            // request.
            match self.check(to, at, len as u64, Access::REMOTE_READ) {
                Ok(span) => break span,
                // A part of the range may still be accessible.
                Err(_) if packets > 1 => packets = 1,
                // A repeated request whose response was already sent once. Usually the peer no
                // longer waits for it, and the key has become invalid since: drop the response
                // instead of ending the connection.
                Err(_) if responder.output_is_repeated() => {
                    responder.nak_output();
                    return 0;
                }
                Err(_) => {
                    let fault = self.refuse(to, Syndrome::RemoteAccess);
                    responder.nak_at(psn, nak_of(fault.syndrome));
                    return 0;
                }
            }
        };
        responder.read_sent(packets);
        for n in 0..packets {
            let skip = (n * mtu) as u64;
            let len = (source.len() - skip).min(mtu as u64);
            let part = match (fresh && n == 0, left as u64 - skip <= mtu as u64) {
                (true, true) => Part::Only,
                (true, false) => Part::First,
                (false, false) => Part::Middle,
                (false, true) => Part::Last,
            };
            let aeth = (part != Part::Middle).then_some(aeth);
            let packet =
                answer(connection.peer.qpn, psn.plus(n), Body::ReadResponse { part, aeth });
            let fill = |to: Span, summed| copy_out(to, &[source], skip, summed);
            let sealer = connection.sealer();
            put(&mut self.wire.outbox, envelope, &packet, len as usize, sealer, fill);
        }
        self.wire.stats.packets_out += packets as u64;
        self.stats.bytes += source.len();
        self.work += WQE_WORK * packets as u64 + source.len();
        packets
    }
}

/// Creates a response packet. Its payload is added later.
#[inline]
fn answer(qpn: Qpn, psn: Psn, body: Body) -> Packet<'static> {
    Packet { qpn, psn, ack_request: false, solicited: false, body, payload: &[] }
}

/// Returns the headers of packet `index` of a request.
#[inline]
fn body_of(wqe: &Wqe<'_>, request: &Request, plan: &Plan, index: u32, mtu: u32) -> Body {
    let part = Part::of(index, request.packets);
    match *wqe {
        Wqe::Send { imm, invalidate, .. } => {
            let notice = match (imm, invalidate) {
                _ if !part.ends() => Notice::None,
                (Some(imm), _) => Notice::Imm(imm),
                (None, Some(key)) => Notice::Invalidate(key),
                (None, None) => Notice::None,
            };
            Body::Send { part, notice }
        }
        Wqe::Write { to, imm, .. } => Body::Write {
            part,
            reth: part.begins().then_some(Reth { at: to, len: request.len }),
            imm: imm.filter(|_| part.ends()),
        },
        Wqe::Read { from, .. } => {
            let skip = plan.packet as u64 * mtu as u64;
            let len = (request.len as u64 - skip).min(plan.count as u64 * mtu as u64);
            let at = Remote { addr: from.addr.wrapping_add(skip), rkey: from.rkey };
            Body::Read(Reth { at, len: len as u32 })
        }
        Wqe::CompareSwap { at, compare, swap, .. } => {
            Body::Atomic { at, op: AtomicOp::CompareSwap { compare, swap } }
        }
        Wqe::FetchAdd { at, add, .. } => Body::Atomic { at, op: AtomicOp::FetchAdd { add } },
        _ => unreachable!("local operations have no packets"),
    }
}

/// Writes a packet to the outbox, which has room for it. `fill` writes the payload of `len` bytes,
/// and returns its CRC sum if its second argument is true. The packet ends with a tag of `sealer`,
/// or with room for the ICRC.
#[inline]
fn put(
    outbox: &mut Outbox,
    envelope: Envelope,
    packet: &Packet<'_>,
    len: usize,
    sealer: Option<&mut Sealer>,
    fill: impl FnOnce(Span, bool) -> Option<Sum>,
) {
    let room = outbox.room().expect("there is room");
    let headers = packet.encode_headers(len, room);
    let sum = fill(Span::of_bytes_mut(&mut room[headers..headers + len]), sealer.is_none());
    let (pad, rest) = (packet::padding(len), &mut room[headers + len..]);
    // Most packets have no padding.
    if pad > 0 {
        rest[..pad].fill(0);
    }
    let end = headers + len + pad;
    match sealer {
        None => {
            *room[end..].first_chunk_mut().expect("there is room") = [0; packet::ICRC];
            outbox.commit(envelope, end + packet::ICRC, Ending::Icrc(sum));
        }
        Some(sealer) => {
            let len = end + mac::TRAILER;
            sealer.seal(&mut room[..len]);
            outbox.commit(envelope, len, Ending::Tag);
        }
    }
}
