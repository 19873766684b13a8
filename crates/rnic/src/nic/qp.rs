//! Queue pairs and shared receive queues of the software NIC.

use std::sync::Arc;

use verbs::direct::{DirectQp, DirectReceive, Managed, Progress, Ring};
use verbs::wqe::WQEBB;
use verbs::{
    DmaMemory, Error, QpAttr, QpChange, QpInfo, QpState, Qpn, QueuePair, Receive, ReceiveAttr,
    ReceiveQueue, ReceiveRequest, SrqInfo, Srqn, WorkRequest,
};

use super::cq::SoftCq;
use super::queue::{ReceiveRing, SendQueue};
use super::{MAX_ENTRIES, MAX_QUEUE, SoftNic, SoftPd, call, system, unexpected, work};
use crate::port::Function;
use crate::port::control::{
    QpVerb, ReceiveRing as ReceiveSpec, ReceiveVerb, Reply, SendRing, Verb,
};
use crate::spec::QpDescription;

/// A queue pair.
#[derive(Clone)]
pub struct SoftQp(Arc<QpInner>);

struct QpInner {
    function: Function,
    qpn: Qpn,
    send: Option<Arc<SendQueue>>,
    receive: OwnOrShared,
    send_cq: SoftCq,
    recv_cq: SoftCq,
    /// `None` for a borrowed queue pair.
    _pd: Option<SoftPd>,
}

enum OwnOrShared {
    None,
    Own(Arc<ReceiveRing>),
    Shared(SoftSrq),
}

/// A shared receive queue.
#[derive(Clone)]
pub struct SoftSrq(Arc<SrqInner>);

struct SrqInner {
    function: Function,
    srqn: Srqn,
    queue: Arc<ReceiveRing>,
    _pd: SoftPd,
}

impl SoftQp {
    pub(super) fn create(
        pd: &SoftPd,
        attr: &QpAttr<'_, SoftNic>,
        managed: Managed,
    ) -> Result<Self, Error> {
        let function = pd.function().clone();
        if attr.send_blocks > MAX_QUEUE {
            return Err(Error::BadRequest {
                what: format!(
                    "a send queue of {} building blocks; at most {MAX_QUEUE} are possible",
                    attr.send_blocks
                ),
            });
        }
        let blocks = attr.send_blocks.checked_next_power_of_two().filter(|_| attr.send_blocks > 0);
        let send_ring = match blocks {
            None => None,
            Some(blocks) => {
                let bytes = blocks as usize * WQEBB;
                Some((function.alloc_dma(bytes).map_err(system("memory of a send queue"))?, blocks))
            }
        };
        let receive = match &attr.receive {
            Receive::None => OwnOrShared::None,
            Receive::Own(attr) => {
                OwnOrShared::Own(Arc::new(receive_ring(&function, attr, managed.recv)?))
            }
            Receive::Shared(srq) => OwnOrShared::Shared((*srq).clone()),
        };
        let verb = Verb::CreateQp(QpVerb {
            pd: pd.number(),
            send: send_ring.as_ref().map(|(ring, blocks)| SendRing {
                ring: ring.clone(),
                blocks: *blocks,
                managed: managed.send,
            }),
            receive: match &receive {
                OwnOrShared::None => ReceiveVerb::None,
                OwnOrShared::Own(queue) => {
                    ReceiveVerb::Own { ring: describe(queue), managed: managed.recv }
                }
                OwnOrShared::Shared(srq) => ReceiveVerb::Shared { srqn: srq.0.srqn },
            },
            send_cq: attr.send_cq.0.cqn,
            recv_cq: attr.recv_cq.0.cqn,
            access: attr.access,
            privileged: managed.privileged,
        });
        let Reply::Qp { qpn, doorbell } = call(&function, "create_qp", verb)? else {
            return Err(unexpected("create_qp"));
        };
        let doorbell = function.doorbell(qpn, doorbell).map_err(system("a doorbell"))?;
        let send = send_ring.map(|(ring, blocks)| {
            Arc::new(SendQueue::new(qpn, ring, blocks, managed.send, doorbell))
        });
        attr.send_cq.0.add(qpn, send.clone(), None);
        attr.recv_cq.0.add(qpn, None, receive.queue().cloned());
        Ok(SoftQp(Arc::new(QpInner {
            function,
            qpn,
            send,
            receive,
            send_cq: attr.send_cq.clone(),
            recv_cq: attr.recv_cq.clone(),
            _pd: Some(pd.clone()),
        })))
    }

    /// Wraps a queue pair of another process, which completes to `cq`. Its ring has `blocks`
    /// building blocks, none of which is in use.
    pub(super) fn borrowed(
        function: &Function,
        cq: &SoftCq,
        qpn: Qpn,
        (ring, blocks): (DmaMemory, u32),
        slot: u32,
    ) -> Result<Self, Error> {
        let doorbell = function.doorbell(qpn, Some(slot)).map_err(system("a lent doorbell"))?;
        let send = Arc::new(SendQueue::new(qpn, ring, blocks, false, doorbell));
        send.set_state(QpState::ReadyToSend);
        cq.0.add(qpn, Some(send.clone()), None);
        Ok(SoftQp(Arc::new(QpInner {
            function: function.clone(),
            qpn,
            send: Some(send),
            receive: OwnOrShared::None,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            _pd: None,
        })))
    }

    /// Ring, building blocks and doorbell slot of a queue pair that can be lent.
    pub(super) fn lendable(&self) -> Result<(&DmaMemory, u32, u32), Error> {
        let send = self.send_queue()?;
        match (&self.0.receive, send.slot()) {
            (OwnOrShared::None, Some(slot)) => Ok((send.ring(), send.blocks(), slot)),
            _ => Err(Error::BadRequest {
                what: format!("lending QP {}, which has receives or no doorbell", self.0.qpn),
            }),
        }
    }

    /// Refuses posts from now on, and resets the queue pair: work in flight ends as flushed.
    pub(super) fn lend(&self) -> Result<(), Error> {
        self.send_queue()?.set_lent(true);
        self.modify(QpChange::Reset)
    }

    /// Allows posts again, once the queue pair is connected.
    pub(super) fn end_loan(&self) {
        if let Some(send) = &self.0.send {
            send.set_lent(false);
        }
    }

    fn send_queue(&self) -> Result<&SendQueue, Error> {
        self.0.send.as_deref().ok_or_else(|| Error::BadRequest {
            what: format!("QP {} was created without a send queue", self.0.qpn),
        })
    }

    fn describe(&self) -> Result<QpDescription, Error> {
        match call(&self.0.function, "query_qp", Verb::QueryQp { qpn: self.0.qpn })? {
            Reply::QpInfo(info) => Ok(info),
            _ => Err(unexpected("query_qp")),
        }
    }
}

impl OwnOrShared {
    fn queue(&self) -> Option<&Arc<ReceiveRing>> {
        match self {
            OwnOrShared::None => None,
            OwnOrShared::Own(queue) => Some(queue),
            OwnOrShared::Shared(srq) => Some(&srq.0.queue),
        }
    }
}

impl QpInner {
    /// Sets the state, which decides what may be posted.
    fn set_state(&self, state: QpState) {
        if let Some(send) = &self.send {
            send.set_state(state);
        }
        if let OwnOrShared::Own(queue) = &self.receive {
            queue.set_state(state);
        }
    }

    /// Returns the posted work that the NIC dropped at a reset, as flushed completions.
    fn forget_posted(&self) {
        let own_receive = matches!(self.receive, OwnOrShared::Own(_));
        self.send_cq.0.forget_posted(self.qpn, own_receive);
        if self.send_cq.0.cqn != self.recv_cq.0.cqn {
            self.recv_cq.0.forget_posted(self.qpn, own_receive);
        }
    }
}

impl QueuePair for SoftQp {
    fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    fn modify(&self, change: QpChange) -> Result<(), Error> {
        if change == QpChange::Reset {
            // Work posted from now on would be dropped by the reset.
            self.0.set_state(QpState::Reset);
        }
        call(&self.0.function, "modify_qp", Verb::ModifyQp { qpn: self.0.qpn, change })?;
        match change {
            QpChange::Reset => self.0.forget_posted(),
            QpChange::Init => self.0.set_state(QpState::Init),
            QpChange::ReadyToReceive { .. } => self.0.set_state(QpState::ReadyToReceive),
            QpChange::ReadyToSend => self.0.set_state(QpState::ReadyToSend),
            QpChange::Error => self.0.set_state(QpState::Error),
            QpChange::Access { .. } | QpChange::Tag { .. } => {}
        }
        Ok(())
    }

    fn query(&self) -> Result<QpInfo, Error> {
        Ok(self.describe()?.info)
    }

    #[inline]
    fn post_send(&self, list: &[WorkRequest<'_>]) -> Result<(), Error> {
        self.send_queue()?.post(list)
    }

    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error> {
        match &self.0.receive {
            OwnOrShared::Own(queue) => queue.post(wr),
            OwnOrShared::None | OwnOrShared::Shared(_) => Err(Error::BadRequest {
                what: format!("QP {} has no receive queue of its own", self.0.qpn),
            }),
        }
    }
}

impl DirectQp for SoftQp {
    fn send_ring(&self) -> Ring {
        let queue = self.0.send.as_ref().expect("a QP with a send queue");
        Ring { memory: queue.ring().clone(), entries: queue.blocks(), stride: WQEBB as u32 }
    }

    fn recv_ring(&self) -> Option<Ring> {
        match &self.0.receive {
            OwnOrShared::Own(queue) => Some(ring_of(queue)),
            OwnOrShared::None | OwnOrShared::Shared(_) => None,
        }
    }

    fn enable_send(&self, limit: u16) -> Result<(), Error> {
        let verb = Verb::EnableSend { qpn: self.0.qpn, limit };
        call(&self.0.function, "enable_send", verb).map(drop)
    }

    fn enable_recv(&self, limit: u32) -> Result<(), Error> {
        let verb = Verb::EnableRecv { qpn: self.0.qpn, limit };
        call(&self.0.function, "enable_recv", verb).map(drop)
    }

    fn progress(&self) -> Result<Progress, Error> {
        let progress = self.describe()?.progress;
        let shared = matches!(self.0.receive, OwnOrShared::Shared(_));
        let recv_consumer = if shared { 0 } else { progress.recv_consumer };
        Ok(Progress { recv_consumer, ..progress })
    }
}

impl Drop for QpInner {
    fn drop(&mut self) {
        // A NIC that is gone has freed the queue already. In both cases no further completion
        // arrives.
        let _ = self.function.execute(Verb::DestroyQp { qpn: self.qpn });
        self.forget_posted();
        self.send_cq.0.remove(self.qpn);
        self.recv_cq.0.remove(self.qpn);
    }
}

impl SoftSrq {
    pub(super) fn create(pd: &SoftPd, attr: &ReceiveAttr) -> Result<Self, Error> {
        let function = pd.function().clone();
        let queue = Arc::new(receive_ring(&function, attr, false)?);
        queue.set_state(QpState::ReadyToReceive);
        let verb = Verb::CreateSrq { pd: pd.number(), ring: describe(&queue) };
        let Reply::Srq(srqn) = call(&function, "create_srq", verb)? else {
            return Err(unexpected("create_srq"));
        };
        Ok(SoftSrq(Arc::new(SrqInner { function, srqn, queue, _pd: pd.clone() })))
    }
}

impl ReceiveQueue for SoftSrq {
    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error> {
        self.0.queue.post(wr)
    }

    fn set_limit(&self, limit: u32) -> Result<(), Error> {
        let verb = Verb::ModifySrq { srqn: self.0.srqn, limit };
        call(&self.0.function, "modify_srq", verb).map(drop)
    }

    fn query(&self) -> Result<SrqInfo, Error> {
        match call(&self.0.function, "query_srq", Verb::QuerySrq { srqn: self.0.srqn })? {
            Reply::SrqInfo(info) => Ok(info),
            _ => Err(unexpected("query_srq")),
        }
    }

    fn srqn(&self) -> Srqn {
        self.0.srqn
    }
}

impl DirectReceive for SoftSrq {
    fn ring(&self) -> Ring {
        ring_of(&self.0.queue)
    }

    fn record(&self) -> DmaMemory {
        self.0.queue.record().clone()
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        // A NIC that is gone has freed the queue already.
        let _ = self.function.execute(Verb::DestroySrq { srqn: self.srqn });
    }
}

fn receive_ring(
    function: &Function,
    attr: &ReceiveAttr,
    managed: bool,
) -> Result<ReceiveRing, Error> {
    let max_sges = attr.max_sges.max(1);
    let entries_max = if managed { MAX_QUEUE } else { MAX_ENTRIES };
    if attr.entries == 0 || attr.entries > entries_max || max_sges as usize > work::MAX_SGES {
        return Err(Error::BadRequest {
            what: format!(
                "a receive queue of {} entries of {max_sges} SGEs; possible are 1 to {entries_max} \
                 entries of at most {} SGEs",
                attr.entries,
                work::MAX_SGES
            ),
        });
    }
    let entries = attr.entries.next_power_of_two();
    let memory = function
        .alloc_dma(ReceiveRing::bytes(entries, max_sges))
        .map_err(system("memory of a receive queue"))?;
    Ok(ReceiveRing::new(function.clone(), &memory, entries, max_sges, managed))
}

fn describe(queue: &ReceiveRing) -> ReceiveSpec<DmaMemory> {
    ReceiveSpec {
        ring: queue.ring().clone(),
        entries: queue.entries(),
        stride: queue.stride(),
        record: queue.record().clone(),
    }
}

fn ring_of(queue: &ReceiveRing) -> Ring {
    Ring { memory: queue.ring().clone(), entries: queue.entries(), stride: queue.stride() }
}
