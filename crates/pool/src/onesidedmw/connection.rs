//! What the memory node has for one compute node: two management directions and the access QPs.
//!
//! ```text
//! Open ── reset_management, over budget, a chain that stopped in the middle ──> Closing
//! Closing ── the chains are at rest; what they have in flight is taken back ──> Closed
//! Closed ── reset_management, if the budget allows ──> Open
//! any ── the compute node leaves, or dies ──> it is retired (`reclaim`)
//! ```

use fabric::direct::{DirectNic, DirectQp, Managed};
use fabric::wqe::Builder;
use fabric::{
    Access, CompletionQueue, CqAttr, MemoryRegion, QpAttr, QpChange, Qpn, QueuePair, Receive,
    ReceiveAttr, Remote,
};

use super::node::Node;
use super::program::{REPLY_BLOCKS, STAGING_BYTES, Wiring};
use super::{alloc_chain, free_chain};
use crate::Error;
use crate::budget::Meter;
use crate::scheme::{Admission, ClientId};

/// Building blocks of the send queues that bulletins are written from.
pub(super) const BULLETIN_BLOCKS: u32 = 16;

/// What the memory node has for one compute node.
pub(super) struct Connection<N: DirectNic> {
    pub alloc: Direction<N>,
    pub free: Direction<N>,
    /// Access QPs by group and lane, with the compute node's QPs that they are connected to.
    pub access: Vec<Vec<(N::Qp, Qpn)>>,
    pub bulletin: Remote,
    pub management: Management,
    /// Tell it, once its management is closed.
    pub tell: bool,
    /// Entries that are taken back from it although it lives.
    pub owed: Vec<u32>,
    pub meter: Meter,
}

/// The state of a compute node's management connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Management {
    /// Requests come in.
    Open,
    /// None come in; what did is executed to its end.
    Closing,
    /// Nothing is in flight.
    Closed,
}

/// One direction's queues: the QP that faces the compute node, the worker, its loopback peer.
pub(super) struct Direction<N: DirectNic> {
    pub front: N::Qp,
    pub front_peer: Qpn,
    pub worker: N::Qp,
    pub loopback: N::Qp,
    pub requests: N::Cq,
    worker_local: N::Mr,
    worker_remote: N::Mr,
    front_local: N::Mr,
    front_remote: N::Mr,
    pub staging: N::Mr,
    /// Number of the request that position 0 of the chain's present text serves.
    pub first: u32,
    /// What the CQ of requests will have counted before that request.
    pub count: u32,
    /// What that CQ had counted when the direction was opened.
    pub opened: u32,
    /// WQEs that the front had executed by then.
    pub executed: u64,
    /// The WQE before which the worker stopped, if it is known to be in the error state.
    pub stopped: Option<u16>,
}

impl<N: DirectNic> Connection<N> {
    pub fn directions(&self) -> [&Direction<N>; 2] {
        [&self.alloc, &self.free]
    }

    /// Numbers of the fronts, in the order of [`crate::scheme::Admitted::management`].
    pub fn management_qpns(&self) -> Vec<u32> {
        self.directions().map(|d| d.front.qpn().raw()).to_vec()
    }

    /// The direction of the worker `qpn`.
    pub fn direction_of(&mut self, worker: Qpn) -> Option<&mut Direction<N>> {
        [&mut self.alloc, &mut self.free].into_iter().find(|d| d.worker.qpn() == worker)
    }

    /// No request comes in from now on, and no reply goes out.
    pub fn close(&mut self) -> Result<(), Error> {
        if self.management == Management::Open {
            for d in self.directions() {
                d.front.modify(QpChange::Reset)?;
            }
            self.management = Management::Closing;
        }
        Ok(())
    }
}

impl<N: DirectNic> Node<N> {
    /// Makes the QPs for a compute node, and connects its access QPs.
    pub(super) fn connection(
        &self,
        client: ClientId,
        request: &Admission,
    ) -> Result<Connection<N>, Error> {
        let [alloc_peer, free_peer] = request.management[..] else {
            let why = "it must name two management QPs: for allocations and for frees".into();
            return Err(Error::Refused { attempt: "admitting a compute node".into(), why });
        };
        let (shape, credits) = (&self.memory.shape, self.settings.credits);
        let blocks = alloc_chain::ring_blocks(shape, credits);
        let sges = alloc_chain::receive_sges(shape);
        let alloc = self.direction(alloc_peer, blocks, sges, false, client)?;
        let (blocks, sges) = (free_chain::ring_blocks(shape, credits), free_chain::RECEIVE_SGES);
        let free = self.direction(free_peer, blocks, sges, true, client)?;
        let mut access = Vec::new();
        for group in &request.groups {
            let mut lanes = Vec::new();
            for &peer in group {
                let qp = self.nic.create_qp(
                    &self.data,
                    QpAttr {
                        send_cq: &self.bulletins,
                        recv_cq: &self.bulletins,
                        send_blocks: BULLETIN_BLOCKS,
                        receive: Receive::None,
                        access: Access::REMOTE_ALL,
                    },
                )?;
                qp.connect(Qpn::new(peer))?;
                lanes.push((qp, Qpn::new(peer)));
            }
            access.push(lanes);
        }
        let bulletin =
            Remote { addr: request.bulletin_addr, rkey: fabric::Key(request.bulletin_rkey) };
        let management = Management::Closed;
        let meter = Meter::new(&self.settings.budget);
        Ok(Connection {
            alloc,
            free,
            access,
            bulletin,
            management,
            tell: false,
            owed: Vec::new(),
            meter,
        })
    }

    fn direction(
        &self,
        peer: u32,
        worker_blocks: u32,
        receive_sges: u32,
        push: bool,
        owner: ClientId,
    ) -> Result<Direction<N>, Error> {
        let (nic, credits) = (&self.nic, self.settings.credits);
        let requests = nic.create_cq(CqAttr { entries: 64, ignore_overrun: true })?;
        let attr = |send_cq, send_blocks, receive, access| QpAttr {
            send_cq,
            recv_cq: &requests,
            send_blocks,
            receive,
            access,
        };
        let own = ReceiveAttr { entries: credits, max_sges: receive_sges };
        let front = nic.create_managed_qp(
            &self.data,
            attr(&self.replies, REPLY_BLOCKS * credits, Receive::Own(own), Access::NONE),
            Managed { send: true, recv: true, privileged: false },
        )?;
        let worker = nic.create_managed_qp(
            &self.data,
            attr(&self.faults, worker_blocks, Receive::None, Access::NONE),
            Managed { send: true, recv: false, privileged: true },
        )?;
        let receive = if push { Receive::Shared(&self.push_queue) } else { Receive::None };
        let loopback = nic.create_qp(
            &self.metadata,
            QpAttr { recv_cq: &self.pushes, ..attr(&self.replies, 0, receive, Access::REMOTE_ALL) },
        )?;
        let staging = nic.reg_mr(
            &self.data,
            &nic.alloc_dma(Wiring::staging_bytes(credits))?,
            Access::LOCAL_ALL,
        )?;
        staging.memory().store_be64((credits * STAGING_BYTES) as usize, owner.0 as u64);
        let (worker_ring, front_ring) = (worker.send_ring().memory, front.send_ring().memory);
        let atomic = Access::REMOTE_ATOMIC;
        Ok(Direction {
            worker_local: nic.reg_mr(&self.data, &worker_ring, Access::LOCAL_WRITE)?,
            worker_remote: nic.reg_mr(&self.metadata, &worker_ring, atomic)?,
            front_local: nic.reg_mr(&self.data, &front_ring, Access::LOCAL_WRITE)?,
            front_remote: nic.reg_mr(&self.metadata, &front_ring, atomic)?,
            front,
            front_peer: Qpn::new(peer),
            worker,
            loopback,
            requests,
            staging,
            first: 0,
            count: 0,
            opened: 0,
            executed: 0,
            stopped: None,
        })
    }

    fn wiring(&self, d: &Direction<N>) -> Wiring {
        Wiring {
            worker_ring: d.worker.send_ring(),
            worker: d.worker.qpn(),
            worker_lkey: d.worker_local.key(),
            worker_rkey: d.worker_remote.key(),
            front_ring: d.front.send_ring(),
            front_recv: d.front.recv_ring().expect("a management QP has its own receive queue"),
            front: d.front.qpn(),
            front_lkey: d.front_local.key(),
            front_rkey: d.front_remote.key(),
            recv_cq: d.requests.cqn(),
            staging: d.staging.sge(0, STAGING_BYTES),
            dump: self.memory.dump.sge(0, 8),
            credits: self.settings.credits,
            first: d.first,
            count: d.count,
        }
    }

    /// Writes the chain of a direction from its `first` request on, and starts the worker on it.
    pub(super) fn arm(
        &mut self,
        d: &mut Direction<N>,
        write: impl FnOnce(&Self, &Wiring),
    ) -> Result<(), Error> {
        d.worker.modify(QpChange::Reset)?;
        // What the worker's last life left in the CQ must not count as a stop of the next.
        self.hear_faults()?;
        self.unheard.retain(|fault| fault.qpn != d.worker.qpn());
        d.stopped = None;
        let wiring = self.wiring(d);
        d.worker.connect(d.loopback.qpn())?;
        d.loopback.connect(d.worker.qpn())?;
        write(self, &wiring);
        Ok(d.worker.enable_send(wiring.worker_ring.entries as u16)?)
    }

    pub(super) fn arm_free(&mut self, d: &mut Direction<N>) -> Result<(), Error> {
        self.arm(d, |node, w| free_chain::write(&node.memory, w, node.push()))
    }

    /// Arms both chains and lets requests in; nothing is in flight, and the compute node has reset
    /// its side, or not been admitted yet.
    pub(super) fn open(&mut self, c: &mut Connection<N>) -> Result<(), Error> {
        for d in [&mut c.alloc, &mut c.free] {
            d.first = 0;
            d.count = self.nic.cq_count(&d.requests)?;
            d.opened = d.count;
            d.executed = d.front.progress()?.executed;
        }
        let guard = c.free.worker.qpn();
        self.arm(&mut c.alloc, |node, w| alloc_chain::write(&node.memory, w, guard))?;
        self.arm_free(&mut c.free)?;
        for d in c.directions() {
            d.front.connect(d.front_peer)?;
            d.front.enable_recv(self.settings.credits)?;
        }
        c.management = Management::Open;
        Ok(())
    }

    /// Breaks the compute node's side of its management QPs, so that whoever waits for a reply learns
    /// that there will be none: a WRITE with a key that is not one. Nothing is in flight.
    pub(super) fn break_peer(&self, c: &Connection<N>) -> Result<(), Error> {
        for d in c.directions() {
            d.front.connect(d.front_peer)?;
            let mut b = Builder::new(d.front.qpn(), 0);
            b.rdma_write(Remote::default(), &[d.staging.sge(0, 8)]);
            d.front.send_ring().memory.write(0, b.bytes());
            d.front.enable_send(b.blocks() as u16)?;
        }
        Ok(())
    }
}
