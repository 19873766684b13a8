//! The responder: access control and message delivery for the requests of a QP's peer.
//!
//! Both kinds of requester use [`Core::admit`], [`Core::receive`] and their parts: a QP of this NIC
//! within the step of its WQE, a QP of another NIC through packets (`remote/`).

use super::core::{Core, ENGINE_WORK};
use super::local_wqe::{Fault, LocalWqe};
use crate::dma::{Span, copy_lists};
use crate::engine::qp::{Peer, Qp};
use crate::engine::queue::Waiting;
use crate::key_namespaces::Namespace;
use crate::protection::{AccessingQp, ExecutingQp, Refusal};
use verbs::cqe::{self, Cqe, Syndrome};
use verbs::wqe::{INVALID_LKEY, SEGMENT, Sge};
use verbs::{Access, Cqn, Key, Pdn, Qpn};

/// The QP that responds to a requester, in a state to respond.
#[derive(Clone, Copy)]
pub(super) struct RemoteAccess {
    pub qpn: Qpn,
    pd: Pdn,
    pub namespace: Namespace,
    tag: u64,
    access: Access,
    pub recv: Option<u32>,
    pub recv_shared: bool,
    pub recv_cq: Cqn,
}

/// A message that consumes a receive WQE. `scratch.local` has the data of a SEND.
#[derive(Clone, Copy)]
pub(super) enum Message {
    /// SEND.
    Send {
        /// Immediate data.
        imm: Option<u32>,
        /// The responder's key to invalidate.
        invalidate: Option<Key>,
        /// Length in bytes.
        len: u64,
    },
    /// Completion of a WRITE with immediate.
    WriteImm {
        /// Immediate data.
        imm: u32,
        /// Number of bytes written.
        len: u64,
    },
}

/// Outcome of a message delivery.
pub(super) enum Delivery {
    /// The message was received.
    Received,
    /// No receive WQE is available (RNR).
    NotReady(Waiting),
}

impl RemoteAccess {
    #[inline]
    pub fn new(qp: &Qp) -> Self {
        RemoteAccess {
            qpn: qp.qpn,
            pd: qp.pd,
            namespace: qp.namespace,
            tag: qp.tag,
            access: qp.access,
            recv: qp.recv,
            recv_shared: qp.recv_shared,
            recv_cq: qp.recv_cq,
        }
    }

    fn executor(&self) -> ExecutingQp {
        ExecutingQp { qpn: self.qpn, pd: self.pd, privileged: false }
    }
}

impl Core {
    /// Returns the peer of the requester if the peer is connected to it and in a state to respond.
    /// Otherwise the requester fails as after its last retry.
    #[inline]
    pub fn responder(&self, me: &LocalWqe) -> Result<RemoteAccess, Fault> {
        let found = match me.peer {
            Peer::Local(qpn) => self.queues.qps.get(qpn.raw()),
            Peer::None | Peer::Remote(_) => None,
        };
        match found {
            Some(qp) if qp.responds() && qp.peer == Peer::Local(me.qpn) => {
                Ok(RemoteAccess::new(qp))
            }
            _ => Err(Syndrome::RetryExceeded.into()),
        }
    }

    /// Checks the QP's rights for a kind of request. Requests of length 0 need no more than this
    /// check.
    #[inline]
    pub fn admit_kind(&mut self, to: &RemoteAccess, need: Access) -> Result<(), Fault> {
        if to.access.allows(need) {
            return Ok(());
        }
        Err(self.refuse(to, Syndrome::RemoteAccess))
    }

    /// Checks an access by the requester. A failed check moves both QPs to Error.
    #[inline]
    pub fn admit(
        &mut self,
        to: &RemoteAccess,
        at: verbs::wqe::Remote,
        len: u64,
        need: Access,
    ) -> Result<Span, Fault> {
        self.check(to, at, len, need).map_err(|_| self.refuse(to, Syndrome::RemoteAccess))
    }

    /// Checks like [`Core::admit`], but changes nothing.
    #[inline]
    pub fn check(
        &self,
        to: &RemoteAccess,
        at: verbs::wqe::Remote,
        len: u64,
        need: Access,
    ) -> Result<Span, Refusal> {
        if !to.access.allows(need) {
            return Err(Refusal::Rights);
        }
        let by = AccessingQp { qpn: to.qpn, pd: to.pd, tag: to.tag };
        self.keys[to.namespace].remote(at.rkey, at.addr, len, need, by)
    }

    /// Moves the responder to Error; returns the requester's error, which does not contain the
    /// reason.
    #[cold]
    pub fn refuse(&mut self, to: &RemoteAccess, syndrome: Syndrome) -> Fault {
        self.enter_error_rejecting(to.qpn, syndrome);
        syndrome.into()
    }

    /// Calls the engine of the region at `at`, if the region has one, after the requester's WRITE
    /// of `len` bytes. Must run in the step that has checked and stored the last bytes.
    #[inline]
    pub fn write_ended(&mut self, to: &RemoteAccess, at: verbs::wqe::Remote, len: u64) {
        let keys = &mut self.keys[to.namespace];
        if keys.has_engines() && len > 0 && keys.write_ended(at.rkey, at.addr, len, to.tag) {
            self.work += ENGINE_WORK;
        }
    }

    /// Returns whether the responder has a receive WQE.
    pub fn receive_ready(&mut self, to: &RemoteAccess) -> Result<Result<(), Waiting>, Fault> {
        let Some(n) = to.recv else {
            return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
        };
        let recv = self.queues.recvs.get(n).expect("a receive queue in use exists");
        if recv.credits() > 0 {
            return Ok(Ok(()));
        }
        self.check_srq_limit(n);
        Ok(Err(Waiting::Receive(n)))
    }

    /// Receives a message in one step: takes a receive WQE, scatters the data, writes the
    /// completion.
    #[inline(always)]
    pub fn receive(
        &mut self,
        to: &RemoteAccess,
        message: Message,
        solicited: bool,
    ) -> Result<Delivery, Fault> {
        let n = match (self.receive_ready(to)?, to.recv) {
            (Ok(()), Some(n)) => n,
            (Err(wait), _) => return Ok(Delivery::NotReady(wait)),
            (Ok(()), None) => unreachable!("a QP without a receive queue is not ready"),
        };
        if let Message::Send { invalidate, len, .. } = message {
            self.check_invalidation(to, invalidate)?;
            let recv = self.queues.recvs.get(n).expect("a receive queue in use exists");
            let stride = recv.fetch(&mut self.scratch.recv_wqe).len();
            if let Err((mine, theirs)) = self.scatter(to.namespace, n, stride, 0, len) {
                return Err(self.receive_failed(to, n, None, mine, theirs));
            }
        }
        self.complete_receive(to, n, None, message, solicited)?;
        Ok(Delivery::Received)
    }

    /// Rejects a SEND that would invalidate a key that its receiver may not invalidate.
    #[inline]
    pub fn check_invalidation(&mut self, to: &RemoteAccess, key: Option<Key>) -> Result<(), Fault> {
        match key {
            Some(key) if self.keys[to.namespace].check_invalidate(key, to.executor()).is_err() => {
                Err(self.refuse(to, Syndrome::RemoteAccess))
            }
            _ => Ok(()),
        }
    }

    /// Completes a receive of queue `n`: of its next WQE, or of the WQE with index `taken`, which
    /// was consumed before. A key to invalidate was checked before the data was moved
    /// (`check_invalidation`).
    #[inline]
    pub fn complete_receive(
        &mut self,
        to: &RemoteAccess,
        n: u32,
        taken: Option<u16>,
        message: Message,
        solicited: bool,
    ) -> Result<(), Fault> {
        let mut cqe = Cqe {
            opcode: cqe::opcode::RESP_SEND,
            qpn: to.qpn,
            srqn: Self::srqn_of(n, to.recv_shared),
            solicited,
            timestamp_ns: self.now_ns,
            ..Cqe::default()
        };
        match message {
            Message::Send { imm, invalidate, len } => {
                cqe.byte_count = len as u32;
                if let Some(imm) = imm {
                    cqe.opcode = cqe::opcode::RESP_SEND_IMM;
                    cqe.imm = imm;
                }
                if let Some(key) = invalidate {
                    cqe.opcode = cqe::opcode::RESP_SEND_INV;
                    cqe.imm = key.0;
                    if self.keys[to.namespace].invalidate(key, to.executor()).is_err() {
                        return Err(self.refuse(to, Syndrome::RemoteAccess));
                    }
                    self.stats.unbinds += 1;
                }
            }
            Message::WriteImm { imm, len } => {
                cqe.opcode = cqe::opcode::RESP_WR_IMM;
                cqe.imm = imm;
                cqe.byte_count = len as u32;
            }
        }
        let recv = self.queues.recvs.get_mut(n).expect("a receive queue in use exists");
        cqe.wqe_counter = recv.consume(taken);
        if recv.srq_limit != 0 {
            self.check_srq_limit(n);
        }
        self.stats.receives += 1;
        if !self.push_cqe(to.recv_cq, &cqe) {
            return Err(self.refuse(to, Syndrome::RemoteOperation));
        }
        Ok(())
    }

    /// Scatters the data in `scratch.local` over the receive WQE in `scratch.recv_wqe`, starting at
    /// its byte `skip`. The WQE has `stride` bytes and belongs to queue `n` of a function with key
    /// namespace `namespace`. On failure, nothing is moved, and the result has the receiver's error
    /// and the sender's.
    #[inline]
    pub fn scatter(
        &mut self,
        namespace: Namespace,
        n: u32,
        stride: usize,
        mut skip: u64,
        len: u64,
    ) -> Result<(), (Fault, Syndrome)> {
        let recv = self.queues.recvs.get(n).expect("a receive queue in use exists");
        let scratch = &mut *self.scratch;
        let list = &scratch.recv_wqe[..stride];
        scratch.receive.clear();
        let mut left = len;
        for sge in list.as_chunks::<SEGMENT>().0.iter().map(Sge::from_bytes) {
            if left == 0 || sge.len == 0 && sge.lkey == INVALID_LKEY {
                break;
            }
            if sge.len as u64 <= skip {
                skip -= sge.len as u64;
                continue;
            }
            let part = left.min(sge.len as u64 - skip);
            let addr = sge.addr.wrapping_add(std::mem::take(&mut skip));
            match self.keys[namespace].local(sge.lkey, addr, part, Access::LOCAL_WRITE, recv.pd) {
                Ok(span) => scratch.receive.push(span),
                Err(why) => {
                    let mine = Fault { syndrome: Syndrome::LocalProtection, vendor: why as u8 };
                    return Err((mine, Syndrome::RemoteOperation));
                }
            }
            left -= part;
        }
        if left > 0 {
            return Err((Syndrome::LocalLength.into(), Syndrome::RemoteInvalidRequest));
        }
        copy_lists(scratch.receive.as_slice(), 0, scratch.local.as_slice(), 0, len);
        self.stats.bytes += len;
        self.work += len + super::core::WQE_WORK * scratch.receive.as_slice().len() as u64;
        Ok(())
    }

    /// Completes, with an error, the receive WQE that could not take a message, and ends the
    /// connection.
    ///
    /// A WQE of a managed queue is neither consumed nor completed: a chain that WAITs for requests
    /// would count the completion as a request and run on the data of the previous request.
    #[cold]
    pub fn receive_failed(
        &mut self,
        to: &RemoteAccess,
        n: u32,
        taken: Option<u16>,
        mine: Fault,
        theirs: Syndrome,
    ) -> Fault {
        self.stats.errors += 1;
        let recv = self.queues.recvs.get_mut(n).expect("a receive queue in use exists");
        if recv.managed {
            self.enter_error(to.qpn, Some(mine.syndrome));
            return theirs.into();
        }
        let cqe = Cqe {
            opcode: cqe::opcode::RESP_ERR,
            qpn: to.qpn,
            srqn: Self::srqn_of(n, to.recv_shared),
            wqe_counter: recv.consume(taken),
            error: Some(cqe::CqeError { syndrome: mine.syndrome as u8, vendor: mine.vendor }),
            ..Cqe::default()
        };
        self.check_srq_limit(n);
        self.push_cqe(to.recv_cq, &cqe);
        self.enter_error(to.qpn, Some(mine.syndrome));
        theirs.into()
    }
}
