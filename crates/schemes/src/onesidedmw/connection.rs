//! The memory node's state for one client: the queues of its requests and its access QPs.
//!
//! ```text
//! Open ── reset_management, over budget, a chain that stopped midway ──> Closing
//! Closing ── the chains are at rest; resources in flight are reclaimed ──> Closed
//! Closed ── reset_management, if the budget allows ──> Open
//! any ── the client leaves, or dies ──> retired (`reclaim`)
//! ```

use std::time::Duration;

use scheme::client_table::{AccessQps, ClientEntry};
use scheme::index::EntryId;
use scheme::route::with_start;
use scheme::{ClientId, ConnectRequest, Error, Start};
use units::TokenBucket;
use verbs::direct::{DirectNic, DirectQp};
use verbs::wqe::Builder;
use verbs::{Access, MemoryRegion, PeerAddress, QpAttr, QpChange, Qpn, QueuePair, Receive, Remote};

use super::meter::Meter;
use super::node::Node;
use super::program::{REPLY_BLOCKS, Wiring};
use super::{alloc_chain, free_chain, published_chain};
use crate::chain::availability::BULLETIN_BLOCKS;
use crate::chain::queues::{ChainQueues, QueueParams, SharedResources, accept_requests};

/// Queues and management state of one client.
pub(super) struct Connection<N: DirectNic> {
    /// Queues for allocations: one; without separation, one for each access QP.
    pub allocs: Vec<ChainQueues<N>>,
    pub free: ChainQueues<N>,
    pub access: AccessQps<N>,
    /// The client allocates over QPs other than its access QPs.
    pub separate: bool,
    pub bulletin: Remote,
    pub management: Management,
    /// Break the client's QPs once its management connection is closed, so that the client notices.
    pub notify: bool,
    /// Entries that are being reclaimed from the client while it stays connected.
    pub reclaiming: Vec<EntryId>,
    pub meter: Meter,
    /// Rate limit for repairs of the client's free chain after refused frees.
    pub repairs: TokenBucket,
}

/// Burst of repairs of one client, and the interval of further repairs. Only a faulty or hostile
/// program frees chunks that it does not own.
const REPAIRS: u32 = 16;
const REPAIR_EACH: Duration = Duration::from_millis(10);

/// State of a client's management connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Management {
    /// Requests are accepted.
    Open,
    /// No new request is accepted; requests in flight are executed to the end.
    Closing,
    /// Nothing is in flight.
    Closed,
}

impl<N: DirectNic> Connection<N> {
    /// True once the client has sent a request. All its QPs are connected by then.
    pub fn has_sent_requests(&self, nic: &N) -> bool {
        self.queues().any(|d| nic.cq_count(&d.requests).is_ok_and(|count| count > 0))
    }

    pub fn queues(&self) -> impl Iterator<Item = &ChainQueues<N>> {
        self.allocs.iter().chain([&self.free])
    }

    /// Numbers of the fronts, in the order of [`scheme::ConnectReply::management`].
    pub fn management_qpns(&self) -> Vec<u32> {
        let allocs = self.allocs.iter().take(if self.separate { 1 } else { 0 });
        allocs.chain([&self.free]).map(|d| d.front.qpn().raw()).collect()
    }

    /// The queues whose worker is `worker`.
    pub fn queues_of(&mut self, worker: Qpn) -> Option<&mut ChainQueues<N>> {
        let mut queues = self.allocs.iter_mut().chain([&mut self.free]);
        queues.find(|d| d.worker.qpn() == worker)
    }

    /// Resets the front QPs: no request is accepted and no reply is sent any more.
    pub fn close(&mut self) -> Result<(), Error> {
        if self.management == Management::Open {
            for d in self.queues() {
                d.front.modify(QpChange::Reset)?;
            }
            self.management = Management::Closing;
        }
        Ok(())
    }
}

impl<N: DirectNic> ClientEntry for Connection<N> {
    type Nic = N;

    fn access(&self) -> &AccessQps<N> {
        &self.access
    }

    fn access_mut(&mut self) -> &mut AccessQps<N> {
        &mut self.access
    }

    fn set_management_start(&mut self, start: Start) {
        for d in self.allocs.iter_mut().chain([&mut self.free]) {
            d.front_peer = with_start(d.front_peer, start);
        }
    }

    fn is_open(&self) -> Result<bool, Error> {
        Ok(self.management == Management::Open && accept_requests(self.queues())?)
    }
}

impl<N: DirectNic> Node<N> {
    /// Creates a client's QPs, and connects its access QPs.
    pub(super) fn connection(
        &self,
        client: ClientId,
        request: &ConnectRequest,
    ) -> Result<Connection<N>, Error> {
        let separate = self.options.separation;
        let (alloc_peers, free_peer) = match (&request.management[..], separate) {
            ([alloc, free], true) => (vec![*alloc], *free),
            ([free], false) => (request.groups.concat(), *free),
            _ => {
                let why = match separate {
                    true => "the request must name two management QPs: allocations and frees",
                    false => "the request must name one management QP, for frees",
                };
                let attempt = "admitting a client".into();
                return Err(Error::Refused { attempt, why: why.into() });
            }
        };
        let parts = SharedResources { credits: self.alloc_slots(), ..self.parts() };
        let alloc =
            |peer: &u32| ChainQueues::new(&parts, &self.alloc_purpose(client, request.peer(*peer)));
        let allocs = alloc_peers.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
        let free =
            ChainQueues::new(&self.parts(), &self.free_purpose(client, request.peer(free_peer)))?;
        let access = match separate {
            true => AccessQps::new(request, |_| self.access_qp())?,
            false => allocs
                .chunks(self.settings.lanes() as usize)
                .map(|lanes| lanes.iter().map(ChainQueues::access_qp).collect())
                .collect::<Vec<_>>()
                .into(),
        };
        let bulletin =
            Remote { addr: request.bulletin_addr, rkey: verbs::Key(request.bulletin_rkey) };
        let management = Management::Closed;
        let meter = Meter::new(&self.options.budget);
        Ok(Connection {
            allocs,
            free,
            access,
            separate,
            bulletin,
            management,
            notify: false,
            reclaiming: Vec::new(),
            meter,
            repairs: TokenBucket::new(REPAIRS, REPAIR_EACH, self.nic.now()),
        })
    }

    /// Creates a QP that an access QP of a client connects to.
    fn access_qp(&self) -> Result<N::Qp, Error> {
        let attr = QpAttr {
            send_cq: &self.notice.written,
            recv_cq: &self.notice.written,
            send_blocks: BULLETIN_BLOCKS,
            receive: Receive::None,
            access: Access::REMOTE_ALL,
        };
        Ok(self.nic.create_qp(&self.data, attr)?)
    }

    /// Requests of a client's alloc chain whose arguments, replies and instances have a slot.
    fn alloc_slots(&self) -> u32 {
        match self.memory.shape.published {
            true => published_chain::ahead(self.settings.credits),
            false => self.settings.credits,
        }
    }

    fn alloc_purpose(&self, owner: ClientId, peer: PeerAddress) -> QueueParams<'_, N> {
        let (shape, slots) = (&self.memory.shape, self.alloc_slots());
        let (worker_blocks, reply_blocks) = match shape.published {
            true => (published_chain::ring_blocks(shape, slots), published_chain::REPLY_BLOCKS),
            false => (alloc_chain::ring_blocks(shape, slots), REPLY_BLOCKS),
        };
        QueueParams {
            owner,
            peer,
            worker_blocks,
            reply_blocks,
            credit_block: reply_blocks - 1,
            receive_sges: alloc_chain::receive_sges(shape),
            push_queue: None,
            waits: false,
            access: if self.options.separation { Access::NONE } else { Access::REMOTE_ALL },
            copies: false,
        }
    }

    fn free_purpose(&self, owner: ClientId, peer: PeerAddress) -> QueueParams<'_, N> {
        QueueParams {
            worker_blocks: free_chain::ring_blocks(&self.memory.shape, self.settings.credits),
            reply_blocks: REPLY_BLOCKS,
            credit_block: REPLY_BLOCKS - 1,
            receive_sges: free_chain::RECEIVE_SGES,
            push_queue: Some(&self.push_queue),
            access: Access::NONE,
            ..self.alloc_purpose(owner, peer)
        }
    }

    /// Writes the chain for the requests from `first` on, and starts the worker. `write` returns
    /// the limit up to which the worker executes.
    fn arm(
        &mut self,
        d: &mut ChainQueues<N>,
        write: impl FnOnce(&Self, &Wiring) -> u16,
    ) -> Result<(), Error> {
        d.worker.modify(QpChange::Reset)?;
        // Drains completions of the worker before its reset; otherwise they would count as a new
        // stop.
        self.poll_faults()?;
        self.pending_faults.retain(|fault| fault.qpn != d.worker.qpn());
        d.stopped = None;
        let wiring = d.wiring(self.memory.dump.sge(0, 8));
        d.worker.connect(d.loopback.qpn())?;
        d.loopback.connect(d.worker.qpn())?;
        let limit = write(self, &wiring);
        Ok(d.worker.enable_send(limit)?)
    }

    /// Arms an alloc chain. `guard`: the client's free worker.
    pub(super) fn arm_alloc(&mut self, d: &mut ChainQueues<N>, guard: Qpn) -> Result<(), Error> {
        if !self.memory.shape.published {
            return self.arm(d, |node, w| {
                alloc_chain::write(&node.memory, w, guard);
                w.worker_ring.entries as u16
            });
        }
        d.posted = d.credits.into();
        let posted = d.posted;
        self.arm(d, |node, w| {
            published_chain::write_replies(w);
            published_chain::write(&node.memory, w, guard, 0..posted)
        })
    }

    pub(super) fn arm_free(&mut self, d: &mut ChainQueues<N>) -> Result<(), Error> {
        self.arm(d, |node, w| {
            free_chain::write(&node.memory, w, node.push());
            w.worker_ring.entries as u16
        })
    }

    /// Arms all chains and accepts requests. Nothing may be in flight, and the client must have
    /// reset its side, or not have been admitted yet.
    pub(super) fn open(&mut self, c: &mut Connection<N>) -> Result<(), Error> {
        for d in c.allocs.iter_mut().chain([&mut c.free]) {
            d.first = 0;
            d.count = self.nic.cq_count(&d.requests)?;
            d.opened = d.count;
            d.executed = d.front.progress()?.executed;
            // Clears replies of an earlier connection: a reply has no destination until a request
            // provides it.
            let ring = d.front.send_ring().memory;
            ring.zero(0, ring.len());
        }
        let guard = c.free.worker.qpn();
        for d in &mut c.allocs {
            self.arm_alloc(d, guard)?;
        }
        self.arm_free(&mut c.free)?;
        for d in c.queues() {
            d.front.connect(d.front_peer)?;
            d.front.enable_recv(d.credits)?;
        }
        c.management = Management::Open;
        Ok(())
    }

    /// Breaks the client's management QPs, so that a client that waits for a reply gets an error:
    /// posts a WRITE with an invalid key. No request may be in flight.
    pub(super) fn break_peer(&self, c: &Connection<N>) -> Result<(), Error> {
        for d in c.queues() {
            d.front.connect(d.front_peer)?;
            let mut b = Builder::new(d.front.qpn(), 0);
            b.rdma_write(Remote::default(), &[d.staging.sge(0, 8)]);
            d.front.send_ring().memory.write(0, b.bytes());
            d.front.enable_send(b.blocks() as u16)?;
        }
        Ok(())
    }
}
