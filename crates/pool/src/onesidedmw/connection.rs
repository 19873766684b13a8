//! What the memory node has for one compute node: two management directions and the access QPs.
//!
//! ```text
//! Open ── reset_management, over budget, a chain that stopped in the middle ──> Closing
//! Closing ── the chains are at rest; what they have in flight is taken back ──> Closed
//! Closed ── reset_management, if the budget allows ──> Open
//! any ── the compute node leaves, or dies ──> it is retired (`reclaim`)
//! ```

use std::time::Duration;

use fabric::direct::{DirectNic, DirectQp};
use fabric::wqe::Builder;
use fabric::{
    Access, MemoryRegion, PeerAddress, QpAttr, QpChange, Qpn, QueuePair, Receive, Remote,
};
use rnic::bucket::TokenBucket as Pace;

use super::node::Node;
use super::program::{REPLY_BLOCKS, Wiring};
use super::{alloc_chain, free_chain};
use crate::Error;
use crate::budget::Meter;
use crate::chain::direction::{Direction, Purpose};
use crate::chain::notice::BULLETIN_BLOCKS;
use crate::scheme::{Admission, ClientId};

/// Access QPs by group and lane, with the compute node's QPs that they are connected to.
pub(super) type AccessQps<N> = Vec<Vec<(<N as fabric::Nic>::Qp, PeerAddress)>>;

/// What the memory node has for one compute node.
pub(super) struct Connection<N: DirectNic> {
    /// Where it allocates: one QP; without separation, each of its access QPs.
    pub allocs: Vec<Direction<N>>,
    pub free: Direction<N>,
    /// Access QPs by group and lane, with the compute node's QPs that they are connected to.
    pub access: AccessQps<N>,
    /// Its access QPs are not those that it allocates over.
    pub separate: bool,
    pub bulletin: Remote,
    pub management: Management,
    /// Tell it, once its management is closed.
    pub tell: bool,
    /// Entries that are taken back from it although it lives.
    pub owed: Vec<u32>,
    pub meter: Meter,
    /// How often the CPU writes its free chain anew after a free that was refused.
    pub repairs: Pace,
}

/// Repairs at once of one compute node, and then one in this time. Only a program that is broken, or
/// hostile, frees what is not its own.
const REPAIRS: u32 = 16;
const REPAIR_EACH: Duration = Duration::from_millis(10);

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

impl<N: DirectNic> Connection<N> {
    /// True once it has sent a request: all its QPs are connected then.
    pub fn has_asked(&self, nic: &N) -> bool {
        self.directions().any(|d| nic.cq_count(&d.requests).is_ok_and(|count| count > 0))
    }

    pub fn directions(&self) -> impl Iterator<Item = &Direction<N>> {
        self.allocs.iter().chain([&self.free])
    }

    /// Numbers of the fronts, in the order of [`crate::scheme::Admitted::management`].
    pub fn management_qpns(&self) -> Vec<u32> {
        let allocs = self.allocs.iter().take(if self.separate { 1 } else { 0 });
        allocs.chain([&self.free]).map(|d| d.front.qpn().raw()).collect()
    }

    /// The direction of the worker `qpn`.
    pub fn direction_of(&mut self, worker: Qpn) -> Option<&mut Direction<N>> {
        let mut all = self.allocs.iter_mut().chain([&mut self.free]);
        all.find(|d| d.worker.qpn() == worker)
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
        let separate = self.settings.separation;
        let (alloc_peers, free_peer) = match (&request.management[..], separate) {
            ([alloc, free], true) => (vec![*alloc], *free),
            ([free], false) => (request.groups.concat(), *free),
            _ => {
                let why = match separate {
                    true => "it must name two management QPs: for allocations and for frees",
                    false => "it must name one management QP, for frees",
                };
                let attempt = "admitting a compute node".into();
                return Err(Error::Refused { attempt, why: why.into() });
            }
        };
        let alloc = |peer: &u32| {
            Direction::new(&self.parts(), &self.alloc_purpose(client, request.peer(*peer)))
        };
        let allocs = alloc_peers.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
        let free =
            Direction::new(&self.parts(), &self.free_purpose(client, request.peer(free_peer)))?;
        let access = match separate {
            true => self.access_qps(request)?,
            false => allocs
                .chunks(self.settings.lanes() as usize)
                .map(|lanes| lanes.iter().map(|d| (d.front.clone(), d.front_peer)).collect())
                .collect(),
        };
        let bulletin =
            Remote { addr: request.bulletin_addr, rkey: fabric::Key(request.bulletin_rkey) };
        let management = Management::Closed;
        let meter = Meter::new(&self.settings.budget);
        Ok(Connection {
            allocs,
            free,
            access,
            separate,
            bulletin,
            management,
            tell: false,
            owed: Vec::new(),
            meter,
            repairs: Pace::new(REPAIRS, REPAIR_EACH, self.nic.now()),
        })
    }

    /// The QPs that a compute node's access QPs are connected to.
    fn access_qps(&self, request: &Admission) -> Result<AccessQps<N>, Error> {
        let mut access = Vec::new();
        for group in &request.groups {
            let mut lanes = Vec::new();
            for &peer in group {
                let qp = self.nic.create_qp(
                    &self.data,
                    QpAttr {
                        send_cq: &self.notice.written,
                        recv_cq: &self.notice.written,
                        send_blocks: BULLETIN_BLOCKS,
                        receive: Receive::None,
                        access: Access::REMOTE_ALL,
                    },
                )?;
                let peer = request.peer(peer);
                qp.connect(peer)?;
                lanes.push((qp, peer));
            }
            access.push(lanes);
        }
        Ok(access)
    }

    fn alloc_purpose(&self, owner: ClientId, peer: PeerAddress) -> Purpose<'_, N> {
        let shape = &self.memory.shape;
        Purpose {
            owner,
            peer,
            worker_blocks: alloc_chain::ring_blocks(shape, self.settings.credits),
            reply_blocks: REPLY_BLOCKS,
            credit_block: REPLY_BLOCKS - 1,
            receive_sges: alloc_chain::receive_sges(shape),
            push_queue: None,
            waits: false,
            access: if self.settings.separation { Access::NONE } else { Access::REMOTE_ALL },
            copies: false,
        }
    }

    fn free_purpose(&self, owner: ClientId, peer: PeerAddress) -> Purpose<'_, N> {
        Purpose {
            worker_blocks: free_chain::ring_blocks(&self.memory.shape, self.settings.credits),
            receive_sges: free_chain::RECEIVE_SGES,
            push_queue: Some(&self.push_queue),
            access: Access::NONE,
            ..self.alloc_purpose(owner, peer)
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
        let wiring = d.wiring(self.memory.dump.sge(0, 8));
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
        for d in c.allocs.iter_mut().chain([&mut c.free]) {
            d.first = 0;
            d.count = self.nic.cq_count(&d.requests)?;
            d.opened = d.count;
            d.executed = d.front.progress()?.executed;
            // Nothing of an earlier connection is sent any more: replies go nowhere until they are asked for.
            let ring = d.front.send_ring().memory;
            ring.zero(0, ring.len());
        }
        let guard = c.free.worker.qpn();
        for d in &mut c.allocs {
            self.arm(d, |node, w| alloc_chain::write(&node.memory, w, guard))?;
        }
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
