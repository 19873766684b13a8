//! The software NIC as the memory node's CPU sees it in a world: each verb is a point where
//! everybody else may come first. What the verbs allocate is not the node's own: it lies apart.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::direct::{DirectNic, DirectQp, KeyInfo, Managed, Progress, Ring};
use fabric::soft::{SoftCq, SoftMr, SoftMw, SoftNic, SoftPd, SoftQp, SoftSrq};
use fabric::{
    Access, Caps, Completion, CompletionQueue, CqAttr, Cqn, DmaMemory, Error, Key, Nic, QpAttr,
    QpChange, QpState, Qpn, QueuePair, Receive, ReceiveAttr, ReceiveRequest, WorkRequest,
};

use crate::{arena, cpu};

/// A [`SoftNic`] whose verbs give way.
#[derive(Clone)]
pub struct ModelNic {
    inner: SoftNic,
    /// Send rings of managed queues.
    rings: Arc<Mutex<Vec<(Qpn, DmaMemory)>>>,
}

impl ModelNic {
    /// The verbs of `inner`, with a point before each where others may come first.
    pub fn new(inner: SoftNic) -> Self {
        Self { inner, rings: Arc::default() }
    }

    /// The send rings of the managed queues that were made.
    pub fn rings(&self) -> Vec<(Qpn, DmaMemory)> {
        self.rings.lock().expect("one thread uses it").clone()
    }
}

/// A CQ that knows how many completions were taken from it.
#[derive(Clone)]
pub struct ModelCq {
    inner: SoftCq,
    polled: Arc<AtomicU32>,
}

/// A QP.
#[derive(Clone)]
pub struct ModelQp(SoftQp);

impl Nic for ModelNic {
    type Pd = SoftPd;
    type Mr = SoftMr;
    type Mw = SoftMw;
    type Cq = ModelCq;
    type Srq = SoftSrq;
    type Qp = ModelQp;

    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        arena::inside(|| self.inner.alloc_dma(bytes))
    }

    fn alloc_pd(&self) -> Result<SoftPd, Error> {
        arena::inside(|| self.inner.alloc_pd())
    }

    fn reg_mr(&self, pd: &SoftPd, memory: &DmaMemory, access: Access) -> Result<SoftMr, Error> {
        arena::inside(|| self.inner.reg_mr(pd, memory, access))
    }

    fn alloc_mw(&self, pd: &SoftPd) -> Result<SoftMw, Error> {
        arena::inside(|| self.inner.alloc_mw(pd))
    }

    fn alloc_type1_mws(&self, pd: &SoftPd, count: usize) -> Result<Vec<SoftMw>, Error> {
        arena::inside(|| self.inner.alloc_type1_mws(pd, count))
    }

    fn create_cq(&self, attr: CqAttr) -> Result<ModelCq, Error> {
        // Nobody reads a CQ that overwrites: its count says all.
        let quiet = attr.ignore_overrun;
        let create = || arena::inside(|| self.inner.create_cq(attr));
        let inner = if quiet { arena::quietly(create)? } else { create()? };
        Ok(ModelCq { inner, polled: Arc::default() })
    }

    fn create_srq(&self, pd: &SoftPd, attr: ReceiveAttr) -> Result<SoftSrq, Error> {
        arena::inside(|| self.inner.create_srq(pd, attr))
    }

    fn create_qp(&self, pd: &SoftPd, attr: QpAttr<'_, Self>) -> Result<ModelQp, Error> {
        arena::inside(|| self.inner.create_qp(pd, soft(&attr))).map(ModelQp)
    }
}

fn soft<'a>(attr: &'a QpAttr<'_, ModelNic>) -> QpAttr<'a, SoftNic> {
    QpAttr {
        send_cq: &attr.send_cq.inner,
        recv_cq: &attr.recv_cq.inner,
        send_blocks: attr.send_blocks,
        receive: match &attr.receive {
            Receive::None => Receive::None,
            Receive::Own(own) => Receive::Own(own.clone()),
            Receive::Shared(srq) => Receive::Shared(*srq),
        },
        access: attr.access,
    }
}

impl DirectNic for ModelNic {
    fn create_managed_qp(
        &self,
        pd: &SoftPd,
        attr: QpAttr<'_, Self>,
        managed: Managed,
    ) -> Result<ModelQp, Error> {
        let qp = arena::inside(|| self.inner.create_managed_qp(pd, soft(&attr), managed))?;
        if managed.send {
            let ring = (qp.qpn(), qp.send_ring().memory);
            arena::inside(|| self.rings.lock().expect("one thread uses it").push(ring));
        }
        Ok(ModelQp(qp))
    }

    fn query_key(&self, key: Key) -> Result<KeyInfo, Error> {
        cpu::give_way();
        self.inner.query_key(key)
    }

    fn cq_count(&self, cq: &ModelCq) -> Result<u32, Error> {
        cpu::give_way();
        self.inner.cq_count(&cq.inner)
    }
}

impl ModelCq {
    /// Completions that were taken from it.
    pub fn polled(&self) -> u32 {
        self.polled.load(Ordering::Relaxed)
    }
}

impl CompletionQueue for ModelCq {
    fn cqn(&self) -> Cqn {
        self.inner.cqn()
    }

    fn poll(&self, out: &mut [Completion]) -> usize {
        cpu::give_way();
        let n = self.inner.poll(out);
        self.polled.fetch_add(n as u32, Ordering::Relaxed);
        n
    }

    fn wait_unless(&self, _: Duration, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        if done() {
            return Ok(false);
        }
        cpu::wait(self.cqn(), self.polled());
        Ok(true)
    }

    fn wake(&self) {
        self.inner.wake();
    }
}

impl QueuePair for ModelQp {
    fn qpn(&self) -> Qpn {
        self.0.qpn()
    }

    fn modify(&self, change: QpChange) -> Result<(), Error> {
        cpu::give_way();
        self.0.modify(change)
    }

    fn state(&self) -> Result<QpState, Error> {
        cpu::give_way();
        self.0.state()
    }

    fn post_send(&self, list: &[WorkRequest<'_>]) -> Result<(), Error> {
        cpu::give_way();
        self.0.post_send(list)
    }

    fn post_recv(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error> {
        cpu::give_way();
        self.0.post_recv(wr)
    }
}

impl DirectQp for ModelQp {
    fn send_ring(&self) -> Ring {
        self.0.send_ring()
    }

    fn recv_ring(&self) -> Option<Ring> {
        self.0.recv_ring()
    }

    fn enable_send(&self, limit: u16) -> Result<(), Error> {
        cpu::give_way();
        self.0.enable_send(limit)
    }

    fn enable_recv(&self, limit: u32) -> Result<(), Error> {
        cpu::give_way();
        self.0.enable_recv(limit)
    }

    fn progress(&self) -> Result<Progress, Error> {
        cpu::give_way();
        self.0.progress()
    }
}
