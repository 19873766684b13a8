//! The responder's half: what a QP admits from its peer.
//!
//! Both kinds of requester reach it through [`Core::admit`], [`Core::receive`] and what these are made of: a
//! QP of this NIC within the step of its WQE, one of another NIC by packets (`remote/`).

use super::Core;
use super::execute::{Fault, Requester};
use crate::cqe::{self, Cqe, Syndrome};
use crate::dma::{Span, copy_lists};
use crate::ids::{Access, Cqn, Key, Pdn, Qpn};
use crate::protection::{Executor, Refusal, Through};
use crate::qp::{Peer, Qp};
use crate::queue::Waiting;
use crate::spaces::Space;
use crate::wqe::{INVALID_LKEY, SEGMENT, Sge};

/// The peer of a requester, fit to answer.
#[derive(Clone, Copy)]
pub(super) struct Responder {
    pub qpn: Qpn,
    pd: Pdn,
    pub space: Space,
    tag: u64,
    access: Access,
    pub recv: Option<u32>,
    pub recv_shared: bool,
    pub recv_cq: Cqn,
}

/// What consumes a receive WQE. The data of a SEND is what the requester gathered.
#[derive(Clone, Copy)]
pub(super) enum Message {
    /// SEND.
    Send {
        /// Immediate data.
        imm: Option<u32>,
        /// The responder's key to be invalidated.
        invalidate: Option<Key>,
        /// Bytes.
        len: u64,
    },
    /// The end of a WRITE with immediate.
    WriteImm {
        /// Immediate data.
        imm: u32,
        /// Bytes that were written.
        len: u64,
    },
}

/// What became of a message.
pub(super) enum Delivered {
    /// It was received.
    Yes,
    /// There is no receive WQE (RNR).
    NotReady(Waiting),
}

impl Responder {
    #[inline]
    pub fn of(qp: &Qp) -> Self {
        Responder {
            qpn: qp.qpn,
            pd: qp.pd,
            space: qp.space,
            tag: qp.tag,
            access: qp.access,
            recv: qp.recv,
            recv_shared: qp.recv_shared,
            recv_cq: qp.recv_cq,
        }
    }

    fn executor(&self) -> Executor {
        Executor { qpn: self.qpn, pd: self.pd, privileged: false }
    }
}

impl Core {
    /// The peer, if it is connected to this requester and in a state to answer. Else the requester
    /// hears what it would after its last retry.
    #[inline]
    pub fn responder(&self, me: &Requester) -> Result<Responder, Fault> {
        let found = match me.peer {
            Peer::Local(qpn) => self.qps.get(qpn.raw()),
            Peer::None | Peer::Remote(_) => None,
        };
        match found {
            Some(qp) if qp.responds() && qp.peer == Peer::Local(me.qpn) => Ok(Responder::of(qp)),
            _ => Err(Syndrome::RetryExceeded.into()),
        }
    }

    /// Checks that the peer answers such requests at all, also ones that move nothing.
    #[inline]
    pub fn admit_kind(&mut self, to: &Responder, need: Access) -> Result<(), Fault> {
        if to.access.allows(need) {
            return Ok(());
        }
        Err(self.refuse(to, Syndrome::RemoteAccess))
    }

    /// Checks an access by the peer's peer. A refusal ends the connection, at both ends.
    #[inline]
    pub fn admit(
        &mut self,
        to: &Responder,
        at: crate::wqe::Remote,
        len: u64,
        need: Access,
    ) -> Result<Span, Fault> {
        self.check(to, at, len, need).map_err(|_| self.refuse(to, Syndrome::RemoteAccess))
    }

    /// [`Core::admit`] without consequences.
    #[inline]
    pub fn check(
        &self,
        to: &Responder,
        at: crate::wqe::Remote,
        len: u64,
        need: Access,
    ) -> Result<Span, Refusal> {
        if !to.access.allows(need) {
            return Err(Refusal::Rights);
        }
        let by = Through { qpn: to.qpn, pd: to.pd, tag: to.tag };
        self.keys[to.space].remote(at.rkey, at.addr, len, need, by)
    }

    /// Puts the responder into Error; gives what the requester hears. Why exactly is not told to it.
    #[cold]
    pub fn refuse(&mut self, to: &Responder, syndrome: Syndrome) -> Fault {
        self.enter_error_refusing(to.qpn, syndrome);
        syndrome.into()
    }

    /// Whether the peer has a receive WQE.
    pub fn receive_ready(&mut self, to: &Responder) -> Result<Result<(), Waiting>, Fault> {
        let Some(n) = to.recv else {
            return Err(self.refuse(to, Syndrome::RemoteInvalidRequest));
        };
        let recv = self.recvs.get(n).expect("a receive queue in use lives");
        if recv.credits() > 0 {
            return Ok(Ok(()));
        }
        self.look_at_limit(n);
        Ok(Err(Waiting::Receive(n)))
    }

    /// Receives a message: takes a receive WQE, scatters, completes. Nothing happens in between.
    #[inline(always)]
    pub fn receive(
        &mut self,
        to: &Responder,
        message: Message,
        solicited: bool,
    ) -> Result<Delivered, Fault> {
        let n = match (self.receive_ready(to)?, to.recv) {
            (Ok(()), Some(n)) => n,
            (Err(wait), _) => return Ok(Delivered::NotReady(wait)),
            (Ok(()), None) => unreachable!("without a receive queue it is not ready"),
        };
        if let Message::Send { invalidate, len, .. } = message {
            self.may_revoke(to, invalidate)?;
            let recv = self.recvs.get(n).expect("a receive queue in use lives");
            let stride = recv.fetch(&mut self.scratch.recv_wqe).len();
            if let Err((mine, theirs)) = self.scatter(to.space, n, stride, 0, len) {
                return Err(self.receive_failed(to, n, None, mine, theirs));
            }
        }
        self.received(to, n, None, message, solicited)?;
        Ok(Delivered::Yes)
    }

    /// Refuses a SEND that would invalidate what it may not.
    #[inline]
    pub fn may_revoke(&mut self, to: &Responder, key: Option<Key>) -> Result<(), Fault> {
        match key {
            Some(key) if self.keys[to.space].check_invalidate(key, to.executor()).is_err() => {
                Err(self.refuse(to, Syndrome::RemoteAccess))
            }
            _ => Ok(()),
        }
    }

    /// Completes a receive of queue `n`: of its next WQE, or of one that was taken before, which had this
    /// index. A key that is to be invalidated was checked before data moved (`may_revoke`).
    #[inline]
    pub fn received(
        &mut self,
        to: &Responder,
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
                    if self.keys[to.space].invalidate(key, to.executor()).is_err() {
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
        let recv = self.recvs.get_mut(n).expect("a receive queue in use lives");
        cqe.wqe_counter = recv.use_one(taken);
        if recv.alarm != 0 {
            self.look_at_limit(n);
        }
        self.stats.receives += 1;
        if !self.push_cqe(to.recv_cq, &cqe) {
            return Err(self.refuse(to, Syndrome::RemoteOperation));
        }
        Ok(())
    }

    /// Scatters what the requester gathered over the receive WQE in `scratch.recv_wqe`, of queue `n` of a function with
    /// this key space and `stride` bytes, from byte `skip` on. On failure, the syndromes of the receiver and of the sender;
    /// nothing was moved.
    #[inline]
    pub fn scatter(
        &mut self,
        space: Space,
        n: u32,
        stride: usize,
        mut skip: u64,
        len: u64,
    ) -> Result<(), (Fault, Syndrome)> {
        let recv = self.recvs.get(n).expect("a receive queue in use lives");
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
            match self.keys[space].local(sge.lkey, addr, part, Access::LOCAL_WRITE, recv.pd) {
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
        self.work += len + super::WQE_WORK * scratch.receive.as_slice().len() as u64;
        Ok(())
    }

    /// Ends the receive WQE that could not take a message, and the connection with it.
    ///
    /// One of a managed queue is neither used up nor completed: a chain that WAITs for requests would
    /// count it as one, and run with what the request before it has left.
    #[cold]
    pub fn receive_failed(
        &mut self,
        to: &Responder,
        n: u32,
        taken: Option<u16>,
        mine: Fault,
        theirs: Syndrome,
    ) -> Fault {
        self.stats.errors += 1;
        let recv = self.recvs.get_mut(n).expect("a receive queue in use lives");
        if recv.managed {
            self.enter_error(to.qpn, Some(mine.syndrome));
            return theirs.into();
        }
        let cqe = Cqe {
            opcode: cqe::opcode::RESP_ERR,
            qpn: to.qpn,
            srqn: Self::srqn_of(n, to.recv_shared),
            wqe_counter: recv.use_one(taken),
            error: Some(cqe::CqeError { syndrome: mine.syndrome as u8, vendor: mine.vendor }),
            ..Cqe::default()
        };
        self.look_at_limit(n);
        self.push_cqe(to.recv_cq, &cqe);
        self.enter_error(to.qpn, Some(mine.syndrome));
        theirs.into()
    }
}
