//! Fetching and checking a WQE of a QP that is connected to another NIC, and storing it as a
//! request.

use super::{Connection, FetchGate, decode_kept};
use crate::engine::core::{Core, RDMA_BYTES_MAX, WQE_WORK};
use crate::engine::execute::Progress;
use crate::engine::local_wqe::{Fault, LocalWqe};
use crate::engine::poll::Step;
use crate::engine::queue::{Fetched, Waiting};
use crate::wire::requester::{Kind, Request, SPAN_MAX};
use verbs::cqe::Syndrome;
use verbs::wqe::{Control, FENCE_MASK, Sge, WQEBB, Wqe};
use verbs::{Access, Qpn};

/// Result of fetching a WQE.
enum FetchOutcome {
    Request(Request),
    /// The WQE is fetched again when the condition is met.
    Gated(FetchGate),
    Waits(Waiting),
}

impl Core {
    /// Fetches the next WQE. Local operations are executed at once and complete in order.
    pub(super) fn fetch_request(
        &mut self,
        connection: &mut Connection,
        qpn: Qpn,
        wqe: &mut Fetched,
    ) -> Step {
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("the QP of a connection exists");
        let send = qp.send.as_ref().expect("the QP has a send queue with work");
        let ctrl = send.fetch(wqe);
        self.work += WQE_WORK * (1 + ctrl.ds as u64);
        let me = LocalWqe::new(qp, &ctrl);
        connection.fetch_gate = FetchGate::Open;
        let mut request = match self.request_of(connection, &me, &ctrl, wqe.bytes()) {
            Ok(FetchOutcome::Request(request)) => request,
            Ok(FetchOutcome::Gated(gate)) => {
                connection.fetch_gate = gate;
                return Step::Idle;
            }
            Ok(FetchOutcome::Waits(on)) => {
                self.wait(qpn, on);
                return Step::Idle;
            }
            Err(fault) => {
                let mut request = Request::new(Kind::Local, 0, 0);
                request.fault = Some((fault.syndrome, fault.vendor));
                request
            }
        };
        request.opcode = ctrl.opcode;
        request.counter = me.consumer;
        request.signaled = ctrl.signaled();
        let kept = if request.packets > 0 { ctrl.blocks() as usize * WQEBB } else { 0 };
        connection.requester.push(request, &wqe.bytes()[..kept]);
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("the QP of a connection exists");
        let send = qp.send.as_mut().expect("the QP has a send queue with work");
        send.consumer = send.consumer.wrapping_add(ctrl.blocks().min(send.pending()) as u16);
        self.retire(connection, qpn);
        Step::Executed
    }

    /// Checks the form and the local side of a WQE. Executes local operations.
    ///
    /// WAIT, SEND_EN, RECV_EN and NOP do not wait for earlier requests. UMR and LOCAL_INV do:
    /// earlier requests, including their retransmissions, must be executed before them.
    fn request_of(
        &mut self,
        connection: &Connection,
        me: &LocalWqe,
        ctrl: &Control,
        bytes: &[u8],
    ) -> Result<FetchOutcome, Fault> {
        self.check_form(me, ctrl)?;
        let wqe = decode_kept(ctrl, bytes).map_err(|_| Syndrome::LocalQpOperation)?;
        if ctrl.fm_ce_se & FENCE_MASK != 0 && connection.requester.reads_outstanding() {
            return Ok(FetchOutcome::Gated(FetchGate::AfterReads));
        }
        let (kind, len) = match wqe {
            Wqe::Umr(_) | Wqe::LocalInvalidate { .. } if !connection.requester.is_empty() => {
                return Ok(FetchOutcome::Gated(FetchGate::AfterAll));
            }
            Wqe::Umr(_)
            | Wqe::LocalInvalidate { .. }
            | Wqe::Nop
            | Wqe::Wait { .. }
            | Wqe::SendEnable { .. }
            | Wqe::ReceiveEnable { .. } => {
                return Ok(match self.execute(me, ctrl, bytes, 0)? {
                    Progress::Blocked { on, .. } => FetchOutcome::Waits(on),
                    Progress::Done(_) | Progress::Part(_) => {
                        FetchOutcome::Request(Request::new(Kind::Local, 0, 0))
                    }
                });
            }
            // Not limited by `send_bytes_max`: this SEND is one step per packet.
            Wqe::Send { from, .. } => (Kind::Send, self.scratch.gather(&self.keys, me, from)?),
            Wqe::Write { from, .. } => (Kind::Write, self.scratch.gather(&self.keys, me, from)?),
            Wqe::Read { to, .. } => {
                self.scratch.list_local(&self.keys, me, to, Access::LOCAL_WRITE)?;
                (Kind::Read, self.scratch.local.total())
            }
            Wqe::CompareSwap { compare_mask, swap_mask, old, .. } => {
                // RoCEv2 has no opcode for masked atomics.
                if compare_mask != u64::MAX || swap_mask != u64::MAX {
                    return Err(Syndrome::LocalQpOperation.into());
                }
                self.result_place(me, old)?;
                (Kind::Atomic, 8)
            }
            Wqe::FetchAdd { boundary, old, .. } => {
                if boundary != 0 {
                    return Err(Syndrome::LocalQpOperation.into());
                }
                self.result_place(me, old)?;
                (Kind::Atomic, 8)
            }
        };
        let packets = match kind {
            Kind::Atomic => 1,
            _ => len.div_ceil(connection.peer.mtu.bytes() as u64).max(1),
        };
        if len > RDMA_BYTES_MAX || packets > SPAN_MAX as u64 {
            return Err(Syndrome::LocalLength.into());
        }
        Ok(FetchOutcome::Request(Request::new(kind, packets as u32, len as u32)))
    }

    /// Returns the buffer for an atomic's result.
    pub(super) fn result_place(&self, me: &LocalWqe, old: Sge) -> Result<crate::dma::Span, Fault> {
        if old.len < 8 {
            return Err(Syndrome::LocalLength.into());
        }
        self.keys[me.namespace]
            .local(old.lkey, old.addr, 8, Access::LOCAL_WRITE, me.pd)
            .map_err(Fault::local)
    }
}
