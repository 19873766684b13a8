//! Fetching a WQE of a connected QP: once, whole, checked, and then kept as a request.

use super::{Connection, Held, decode_kept};
use crate::cqe::Syndrome;
use crate::engine::execute::{Fault, Progress, Requester};
use crate::engine::schedule::Step;
use crate::engine::{Core, RDMA_BYTES_MAX, WQE_WORK};
use crate::ids::{Access, Qpn};
use crate::queue::{Fetched, Waiting};
use crate::wire::requester::{Kind, Request, SPAN_MAX};
use crate::wqe::{Control, FENCE_MASK, Sge, WQEBB, Wqe};

/// What a WQE becomes.
enum Becomes {
    Request(Request),
    /// It is looked at again when that has come.
    Held(Held),
    Waits(Waiting),
}

impl Core {
    /// Fetches the next WQE. Local operations are executed at once, and complete in their turn.
    pub(super) fn fetch_request(
        &mut self,
        connection: &mut Connection,
        qpn: Qpn,
        wqe: &mut Fetched,
    ) -> Step {
        let qp = self.qps.get_mut(qpn.raw()).expect("its connection works");
        let send = qp.send.as_ref().expect("it has work");
        let ctrl = send.fetch(wqe);
        self.work += WQE_WORK * (1 + ctrl.ds as u64);
        let me = Requester::of(qp, &ctrl);
        connection.held = Held::No;
        let mut request = match self.request_of(connection, &me, &ctrl, wqe.bytes()) {
            Ok(Becomes::Request(request)) => request,
            Ok(Becomes::Held(held)) => {
                connection.held = held;
                return Step::Idle;
            }
            Ok(Becomes::Waits(on)) => {
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
        let qp = self.qps.get_mut(qpn.raw()).expect("its connection works");
        let send = qp.send.as_mut().expect("it has work");
        send.consumer = send.consumer.wrapping_add(ctrl.blocks().min(send.pending()) as u16);
        self.retire(connection, qpn);
        Step::Executed
    }

    /// Checks a WQE, its form and its local side; executes it if it is a local operation.
    ///
    /// WAIT, SEND_EN, RECV_EN and NOP do not wait for what was sent before them. UMR and LOCAL_INV do: a
    /// request that was posted before them is executed before them, also the second time it is sent.
    fn request_of(
        &mut self,
        connection: &Connection,
        me: &Requester,
        ctrl: &Control,
        bytes: &[u8],
    ) -> Result<Becomes, Fault> {
        self.check_form(me, ctrl)?;
        let wqe = decode_kept(ctrl, bytes).map_err(|_| Syndrome::LocalQpOperation)?;
        if ctrl.fm_ce_se & FENCE_MASK != 0 && connection.requester.reads_outstanding() {
            return Ok(Becomes::Held(Held::Reads));
        }
        let (kind, len) = match wqe {
            Wqe::Umr(_) | Wqe::LocalInvalidate { .. } if !connection.requester.is_empty() => {
                return Ok(Becomes::Held(Held::All));
            }
            Wqe::Umr(_)
            | Wqe::LocalInvalidate { .. }
            | Wqe::Nop
            | Wqe::Wait { .. }
            | Wqe::SendEnable { .. }
            | Wqe::ReceiveEnable { .. } => {
                return Ok(match self.execute(me, ctrl, bytes, 0)? {
                    Progress::Blocked { on, .. } => Becomes::Waits(on),
                    Progress::Done(_) | Progress::Part(_) => {
                        Becomes::Request(Request::new(Kind::Local, 0, 0))
                    }
                });
            }
            // As long as any: unlike one between QPs of this NIC it is not one step, but one for each packet.
            Wqe::Send { from, .. } => (Kind::Send, self.gather(me, from)?),
            Wqe::Write { from, .. } => (Kind::Write, self.gather(me, from)?),
            Wqe::Read { to, .. } => {
                self.list_local(me, to, Access::LOCAL_WRITE)?;
                (Kind::Read, self.scratch.local.total())
            }
            Wqe::CompareSwap { compare_mask, swap_mask, old, .. } => {
                // RoCEv2 has no opcode for masked ones.
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
        Ok(Becomes::Request(Request::new(kind, packets as u32, len as u32)))
    }

    /// Where an atomic's result goes.
    pub(super) fn result_place(&self, me: &Requester, old: Sge) -> Result<crate::dma::Span, Fault> {
        if old.len < 8 {
            return Err(Syndrome::LocalLength.into());
        }
        self.keys[me.space]
            .local(old.lkey, old.addr, 8, Access::LOCAL_WRITE, me.pd)
            .map_err(Fault::local)
    }
}
