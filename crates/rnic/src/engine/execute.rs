//! The requester: execution of each opcode of a send queue.
//!
//! Order of checks: the WQE's form, the local side, then the peer and the remote side. No data is
//! moved before all checks have passed, so a failed WQE has changed nothing.

use super::core::Core;
use super::local_wqe::{Fault, LocalWqe};
use super::respond::{Delivery, Message, RemoteAccess};
use crate::dma::copy_lists;
use crate::engine::queue::Waiting;
use verbs::cqe::Syndrome;
use verbs::wqe::{Control, Remote, Sge, Sges, Umr, Wqe, decode};
use verbs::{Access, QpState};

/// Progress of a WQE.
pub(super) enum Progress {
    /// Complete; the number of bytes moved.
    Done(u64),
    /// In progress; the number of bytes moved so far. Later quanta continue.
    Part(u64),
    /// Blocked; executed again, from byte `done`, when the QP is woken.
    Blocked {
        /// The awaited condition.
        on: Waiting,
        /// Bytes moved so far.
        done: u64,
    },
}

/// Number of slices of zeros in one step if their pages are returned to the kernel. Returning a
/// page costs about as much as writing it, and the system call as much as ten pages.
const DISCARDED_SLICES: u64 = 4;

/// Smallest page size in bytes. Shorter zeros discard no page.
const PAGE: u64 = units::PAGE_BYTES as u64;

impl Core {
    /// Executes a fetched WQE from byte `done`. Always inlined: otherwise a NOP takes 50% longer.
    #[inline(always)]
    pub fn execute(
        &mut self,
        me: &LocalWqe,
        ctrl: &Control,
        bytes: &[u8],
        done: u64,
    ) -> Result<Progress, Fault> {
        self.check_form(me, ctrl)?;
        let wqe = decode(ctrl, bytes).map_err(|_| Syndrome::LocalQpOperation)?;
        match wqe {
            Wqe::Nop => Ok(Progress::Done(0)),
            Wqe::Write { to, from, imm } => self.write(me, to, from, imm, done),
            Wqe::Read { from, to } => self.read(me, from, to, done),
            Wqe::CompareSwap { at, compare, compare_mask, swap, swap_mask, old } => {
                self.atomic(me, at, old, |word| {
                    let same = (word ^ compare) & compare_mask == 0;
                    same.then_some((word & !swap_mask) | (swap & swap_mask))
                })
            }
            Wqe::FetchAdd { at, add, boundary, old } => {
                self.atomic(me, at, old, |word| Some(add_in_fields(word, add, boundary)))
            }
            Wqe::Send { from, imm, invalidate } => {
                let len = self.scratch.gather(&self.keys, me, from)?;
                if len > self.limits.send_bytes_max as u64 {
                    return Err(Syndrome::LocalLength.into());
                }
                self.deliver(me, Message::Send { imm, invalidate, len }, len, 0)
            }
            Wqe::Umr(umr) => self.umr(me, &umr),
            Wqe::LocalInvalidate { key } => {
                self.keys[me.namespace].invalidate(key, me.executor()).map_err(Fault::bind)?;
                self.stats.unbinds += 1;
                Ok(Progress::Done(0))
            }
            Wqe::Wait { cqn, index } => {
                let cq = self.queues.cqs.get(cqn.raw()).filter(|c| c.function == me.function);
                let cq = cq.ok_or(Syndrome::LocalQpOperation)?;
                if cq.reached(index) {
                    return Ok(Progress::Done(0));
                }
                Ok(Progress::Blocked { on: Waiting::Count(cqn), done: 0 })
            }
            Wqe::SendEnable { qpn, index } => {
                let target =
                    self.queues.qps.get_mut(qpn.raw()).filter(|q| q.function == me.function);
                let target = target.ok_or(Syndrome::LocalQpOperation)?;
                let reset = target.state == QpState::Reset;
                match &mut target.send {
                    Some(send) if send.managed => {
                        // A QP in Reset ignores SEND_EN: a late one must not start WQEs posted
                        // after the reset.
                        if !reset {
                            send.limit = index as u16;
                        }
                    }
                    _ => return Err(Syndrome::LocalQpOperation.into()),
                }
                if qpn != me.qpn {
                    self.queues.schedule(qpn);
                }
                Ok(Progress::Done(0))
            }
            Wqe::ReceiveEnable { qpn, index } => {
                let target = self.queues.qps.get(qpn.raw()).filter(|q| q.function == me.function);
                let target = target.ok_or(Syndrome::LocalQpOperation)?;
                if target.state != QpState::Reset && !self.queues.enable_receive(qpn, index) {
                    return Err(Syndrome::LocalQpOperation.into());
                }
                Ok(Progress::Done(0))
            }
        }
    }

    /// Checks index, QPN and length in a control segment.
    #[inline(always)]
    pub fn check_form(&self, me: &LocalWqe, ctrl: &Control) -> Result<(), Fault> {
        let named = ctrl.index == me.consumer && ctrl.qpn == me.qpn;
        if ctrl.blocks() > me.blocks || !named && (!me.managed || self.limits.strict) {
            return Err(Syndrome::LocalQpOperation.into());
        }
        Ok(())
    }

    // --- one-sided operations ------------------------------------------------------------------

    #[inline]
    fn write(
        &mut self,
        me: &LocalWqe,
        to: Remote,
        from: Sges<'_>,
        imm: Option<u32>,
        mut done: u64,
    ) -> Result<Progress, Fault> {
        let len = self.scratch.gather(&self.keys, me, from)?;
        if len > super::core::RDMA_BYTES_MAX {
            return Err(Syndrome::LocalLength.into());
        }
        let peer = self.responder(me)?;
        if len == 0 {
            self.admit_kind(&peer, Access::REMOTE_WRITE)?;
        }
        if imm.is_some() && done == 0 {
            // Without a receive WQE, the WRITE must not change memory.
            if let Err(wait) = self.receive_ready(&peer)? {
                return Ok(Progress::Blocked { on: wait, done });
            }
        }
        if done < len {
            let target = self.admit(&peer, to, len, Access::REMOTE_WRITE)?;
            let mut n = (len - done).min(self.slice);
            match self.scratch.local.as_slice() {
                [one] if len - done >= PAGE && one.is_zeros() => {
                    let many = (len - done).min(DISCARDED_SLICES * self.slice) / PAGE * PAGE;
                    if self.keys[peer.namespace].discard(to.rkey, target.part(done, many)) {
                        n = many;
                    } else {
                        target.part(done, n).copy_from(one.part(done, n));
                    }
                }
                [one] => target.part(done, n).copy_from(one.part(done, n)),
                list => copy_lists(&[target], done, list, done, n),
            }
            self.stats.bytes += n;
            self.work += n;
            done += n;
            if done < len {
                return Ok(Progress::Part(done));
            }
            // Here, because a WQE that then waits for a receive WQE is executed again.
            self.write_ended(&peer, to, len);
        }
        match imm {
            None => Ok(Progress::Done(len)),
            Some(imm) => self.deliver(me, Message::WriteImm { imm, len }, len, done),
        }
    }

    #[inline]
    fn read(
        &mut self,
        me: &LocalWqe,
        from: Remote,
        to: Sges<'_>,
        done: u64,
    ) -> Result<Progress, Fault> {
        self.scratch.list_local(&self.keys, me, to, Access::LOCAL_WRITE)?;
        let len = self.scratch.local.total();
        if len > super::core::RDMA_BYTES_MAX {
            return Err(Syndrome::LocalLength.into());
        }
        let peer = self.responder(me)?;
        if len == 0 {
            self.admit_kind(&peer, Access::REMOTE_READ)?;
            return Ok(Progress::Done(0));
        }
        let source = self.admit(&peer, from, len, Access::REMOTE_READ)?;
        let n = (len - done).min(self.slice);
        match self.scratch.local.as_slice() {
            [one] => one.part(done, n).copy_from(source.part(done, n)),
            list => copy_lists(list, done, &[source], done, n),
        }
        self.stats.bytes += n;
        self.work += n;
        if done + n < len { Ok(Progress::Part(done + n)) } else { Ok(Progress::Done(len)) }
    }

    /// Replaces the word at `at` by the result of `change`; writes its old value to `old`.
    #[inline]
    fn atomic(
        &mut self,
        me: &LocalWqe,
        at: Remote,
        old: Sge,
        change: impl Fn(u64) -> Option<u64>,
    ) -> Result<Progress, Fault> {
        if old.len < 8 {
            return Err(Syndrome::LocalLength.into());
        }
        let result = self.keys[me.namespace]
            .local(old.lkey, old.addr, 8, Access::LOCAL_WRITE, me.pd)
            .map_err(Fault::local)?;
        let peer = self.responder(me)?;
        if !at.addr.is_multiple_of(8) {
            return Err(self.refuse(&peer, Syndrome::RemoteInvalidRequest));
        }
        let word = self.admit(&peer, at, 8, Access::REMOTE_ATOMIC)?;
        result.put_be64(word.update_be64(change));
        Ok(Progress::Done(8))
    }

    // --- windows -------------------------------------------------------------------------------

    #[inline]
    fn umr(&mut self, me: &LocalWqe, umr: &Umr) -> Result<Progress, Fault> {
        if self.keys[me.namespace].umr(umr, me.executor()).map_err(Fault::bind)? {
            self.stats.binds += 1;
        } else {
            self.stats.unbinds += 1;
        }
        Ok(Progress::Done(0))
    }

    // --- two-sided operations ------------------------------------------------------------------

    /// Delivers the gathered message to the peer's receive queue.
    fn deliver(
        &mut self,
        me: &LocalWqe,
        message: Message,
        len: u64,
        done: u64,
    ) -> Result<Progress, Fault> {
        let peer: RemoteAccess = self.responder(me)?;
        match self.receive(&peer, message, me.solicited)? {
            Delivery::Received => Ok(Progress::Done(len)),
            Delivery::NotReady(on) => {
                self.stats.rnr += 1;
                Ok(Progress::Blocked { on, done })
            }
        }
    }
}

/// Adds field by field. A field ends at each set bit of `boundary`; the carry out of a field is
/// dropped.
///
/// Without the boundary bits, no carry can leave a field. The boundary bits are added by XOR.
#[inline]
fn add_in_fields(word: u64, add: u64, boundary: u64) -> u64 {
    (word & !boundary).wrapping_add(add & !boundary) ^ ((word ^ add) & boundary)
}
