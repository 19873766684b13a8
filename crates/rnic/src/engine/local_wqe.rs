//! The WQE in execution: its QP's attributes, and the cause of its failure.

use super::qp::{Peer, Qp};
use crate::key_namespaces::Namespace;
use crate::protection::{ExecutingQp, Refusal};
use verbs::cqe::Syndrome;
use verbs::wqe::{Control, SE_SOLICITED};
use verbs::{Cqn, FunctionId, Pdn, Qpn};

/// The QP whose WQE is executed, with the attributes that the execution needs.
#[derive(Clone, Copy)]
pub(super) struct LocalWqe {
    pub qpn: Qpn,
    pub function: FunctionId,
    pub pd: Pdn,
    pub namespace: Namespace,
    pub peer: Peer,
    pub send_cq: Cqn,
    /// Index of the WQE.
    pub consumer: u16,
    /// The WQE requests an event at the peer.
    pub solicited: bool,
    pub privileged: bool,
    pub managed: bool,
    pub blocks: u32,
}

impl LocalWqe {
    #[inline]
    pub fn new(qp: &Qp, ctrl: &Control) -> Self {
        let send = qp.send.as_ref().expect("the executing QP exists");
        Self {
            qpn: qp.qpn,
            function: qp.function,
            pd: qp.pd,
            namespace: qp.namespace,
            peer: qp.peer,
            send_cq: qp.send_cq,
            consumer: send.consumer,
            solicited: ctrl.fm_ce_se & SE_SOLICITED != 0,
            privileged: qp.privileged,
            managed: send.managed,
            blocks: send.blocks(),
        }
    }

    pub fn executor(&self) -> ExecutingQp {
        ExecutingQp { qpn: self.qpn, pd: self.pd, privileged: self.privileged }
    }
}

/// Cause of a WQE's failure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub syndrome: Syndrome,
    pub vendor: u8,
}

impl From<Syndrome> for Fault {
    fn from(syndrome: Syndrome) -> Self {
        Fault { syndrome, vendor: 0 }
    }
}

impl Fault {
    pub fn local(refusal: Refusal) -> Self {
        Fault { syndrome: Syndrome::LocalProtection, vendor: refusal as u8 }
    }

    pub fn bind(refusal: Refusal) -> Self {
        Fault { syndrome: Syndrome::MwBind, vendor: refusal as u8 }
    }
}
