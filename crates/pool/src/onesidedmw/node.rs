//! The memory node's side: what is set up before the first request, and the little that the CPU
//! does afterwards.
//!
//! The CPU admits compute nodes, tells them of empty and of available again (§4.3), answers the
//! free that was refused and writes that chain anew, and takes back what a gone compute node owned
//! (§4.3, by `owner_id`). It has no part in an allocation, an access or a free.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fabric::direct::{DirectNic, DirectQp, DirectReceive, Managed};
use fabric::{
    Access, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow, Op, QpAttr, QpChange,
    QpState, Qpn, QueuePair, Receive, ReceiveAttr, Remote, Status, WorkRequest,
};

use super::layout::{Memory, Shape, status};
use super::program::{REPLY_BLOCKS, STAGING_BYTES, Wiring, Wrap};
use super::{alloc_chain, free_chain, reclaim};
use crate::scheme::{
    self, Admission, Admitted, ClientId, CpuEvents, GroupId, Lane, NodeScheme, NodeStatus,
};
use crate::{Error, Settings};

/// Entries of the CQ of faults. A worker that stops flushes its lap, some hundred WQEs; it stops
/// again only after the CPU has seen to it.
const FAULTS: u32 = 1 << 15;

/// Building blocks of the send queues that bulletins are written from.
const BULLETIN_BLOCKS: u32 = 16;

fn shape(settings: &Settings) -> Shape {
    Shape {
        chunks: settings.chunks() as u32,
        chunk_bytes: settings.chunk_bytes,
        group: settings.group_size as usize,
        in_flight: settings.clients_max * settings.credits * 2,
    }
}

/// The scheme's memory-node side on the NIC `N`.
pub struct Node<N: DirectNic> {
    pub(super) nic: N,
    pub(super) settings: Settings,
    pub(super) memory: Memory<N>,
    pub(super) data: N::Pd,
    metadata: N::Pd,
    /// Errors of the management queues come here; the CPU wakes on it.
    faults: N::Cq,
    events: Arc<Events<N>>,
    /// Counts pushes; nobody polls it.
    pushes: N::Cq,
    /// What is written to bulletins completes here.
    bulletins: N::Cq,
    push_queue: N::Srq,
    push_record: N::Mr,
    reclaimer: reclaim::Reclaimer<N>,
    clients: BTreeMap<ClientId, Client<N>>,
    empty: bool,
    generation: u32,
    waiting: bool,
    refused: u64,
    counted: Counted,
    _windows: Vec<N::Mw>,
}

/// Running counts that the NIC keeps modulo 2^24.
#[derive(Default)]
struct Counted {
    pushes_seen: u32,
    frees: u64,
    reclaimed: u64,
}

/// What the memory node has for one compute node.
struct Client<N: DirectNic> {
    alloc: Direction<N>,
    free: Direction<N>,
    /// Access QPs by group and lane, with the compute node's QPs that they are connected to.
    access: Vec<Vec<(N::Qp, Qpn)>>,
    bulletin: Remote,
}

/// One direction's queues: the QP that faces the compute node, the worker, its loopback peer.
struct Direction<N: DirectNic> {
    front: N::Qp,
    front_peer: Qpn,
    worker: N::Qp,
    loopback: N::Qp,
    requests: N::Cq,
    worker_local: N::Mr,
    worker_remote: N::Mr,
    front_local: N::Mr,
    front_remote: N::Mr,
    staging: N::Mr,
    /// Number of the request that position 0 of the chain's present text serves.
    first: u32,
    /// What the CQ of requests will have counted before that request.
    count: u32,
}

impl<N: DirectNic> Node<N> {
    /// Maps the memory, allocates the windows, fills table and queue.
    pub fn new(nic: N, settings: Settings) -> Result<Self, Error> {
        settings.validate()?;
        let caps = nic.caps();
        if !caps.chains || !caps.windows || !caps.big_endian_atomics {
            return Err(fabric::Error::Unsupported {
                attempt: "serving with scheme onesidedmw".into(),
                why: format!(
                    "it needs WAIT and SEND_EN, type-2B windows and big-endian atomics; {} has \
                     chains: {}, windows: {}, big-endian atomics: {}",
                    caps.name, caps.chains, caps.windows, caps.big_endian_atomics
                ),
            }
            .into());
        }
        let shape = shape(&settings);
        let (data, metadata) = (nic.alloc_pd()?, nic.alloc_pd()?);
        let windows = nic.alloc_mws(&data, shape.chunks as usize * shape.group)?;
        let keys: Vec<Key> = windows.iter().map(|w| w.key()).collect();
        let memory = Memory::new(&nic, shape, &data, &metadata, &keys)?;
        let sink = CqAttr { entries: 64, ignore_overrun: true };
        let faults = nic.create_cq(CqAttr { entries: FAULTS, ignore_overrun: false })?;
        let events = Arc::new(Events::new(&nic, &data, &faults)?);
        let pushes = nic.create_cq(sink)?;
        let bulletins = nic.create_cq(CqAttr {
            entries: settings.clients_max * BULLETIN_BLOCKS,
            ignore_overrun: false,
        })?;
        let push_queue =
            nic.create_srq(&metadata, ReceiveAttr { entries: shape.slots(), max_sges: 1 })?;
        let push_record = nic.reg_mr(&metadata, &push_queue.record(), Access::REMOTE_ATOMIC)?;
        fill_push_queue(&memory, &push_queue);
        let reclaimer = reclaim::Reclaimer::new(&nic, &data, &metadata, &push_queue, &pushes)?;
        Ok(Self {
            nic,
            settings,
            memory,
            data,
            metadata,
            faults,
            events,
            pushes,
            bulletins,
            push_queue,
            push_record,
            reclaimer,
            clients: BTreeMap::new(),
            empty: false,
            generation: 0,
            waiting: false,
            refused: 0,
            counted: Counted::default(),
            _windows: windows,
        })
    }

    /// The memory that the chains work on.
    pub fn memory(&self) -> &Memory<N> {
        &self.memory
    }

    /// The CQ that gets a completion when the CPU has something to repair.
    pub fn faults(&self) -> &N::Cq {
        &self.faults
    }

    /// The node-side QPs that answer `client`: for tests that look behind the scenes.
    pub fn worker_qpns(&self, client: ClientId) -> Option<[Qpn; 2]> {
        self.clients.get(&client).map(|c| [c.alloc.worker.qpn(), c.free.worker.qpn()])
    }

    pub(super) fn push(&self) -> free_chain::Push {
        let wrap = if self.memory.shape.slots() <= 1 << 15 { Wrap::Bits16 } else { Wrap::Bits32 };
        free_chain::Push { record: self.push_record.remote(0), wrap }
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
        let attr = |send_blocks, receive, access| QpAttr {
            send_cq: &self.faults,
            recv_cq: &requests,
            send_blocks,
            receive,
            access,
        };
        let own = ReceiveAttr { entries: credits, max_sges: receive_sges };
        let front = nic.create_managed_qp(
            &self.data,
            attr(REPLY_BLOCKS * credits, Receive::Own(own), Access::NONE),
            Managed { send: true, recv: true, privileged: false },
        )?;
        let worker = nic.create_managed_qp(
            &self.data,
            attr(worker_blocks, Receive::None, Access::NONE),
            Managed { send: true, recv: false, privileged: true },
        )?;
        let receive = if push { Receive::Shared(&self.push_queue) } else { Receive::None };
        let loopback = nic.create_qp(
            &self.metadata,
            QpAttr { recv_cq: &self.pushes, ..attr(0, receive, Access::REMOTE_ALL) },
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
            credits: self.settings.credits,
            first: d.first,
            count: d.count,
        }
    }

    /// Writes the chain of a direction from its `first` request on, and starts the worker on it.
    fn arm(&self, d: &Direction<N>, write: impl FnOnce(&Wiring)) -> Result<(), Error> {
        let wiring = self.wiring(d);
        d.worker.connect(d.loopback.qpn())?;
        d.loopback.connect(d.worker.qpn())?;
        write(&wiring);
        Ok(d.worker.enable_send(wiring.worker_ring.entries as u16)?)
    }

    fn arm_alloc(&self, c: &Client<N>) -> Result<(), Error> {
        let guard = c.free.worker.qpn();
        self.arm(&c.alloc, |w| alloc_chain::write(&self.memory, w, guard))
    }

    fn arm_free(&self, c: &Client<N>) -> Result<(), Error> {
        self.arm(&c.free, |w| free_chain::write(&self.memory, w, self.push()))
    }

    /// Connects the front to the compute node and lets the first requests in.
    fn open(&self, d: &Direction<N>) -> Result<(), Error> {
        d.front.connect(d.front_peer)?;
        Ok(d.front.enable_recv(self.settings.credits)?)
    }

    /// Re-establishes the two management directions after one of their QPs broke: nothing is in
    /// flight any more, the compute node has reset its side.
    fn reopen(&mut self, client: ClientId) -> Result<(), Error> {
        let mut c = self.clients.remove(&client).expect("checked by the caller");
        let result = (|| {
            for d in [&mut c.alloc, &mut c.free] {
                d.front.modify(QpChange::Reset)?;
                self.settle(d)?;
                d.first = 0;
                d.count = self.nic.cq_count(&d.requests)?;
            }
            self.arm_alloc(&c)?;
            self.arm_free(&c)?;
            self.open(&c.alloc)?;
            self.open(&c.free)
        })();
        self.clients.insert(client, c);
        result
    }

    /// Waits until a worker has executed every request that came in, or has stopped on one. Its
    /// chain needs nothing from the compute node, so this is a matter of microseconds.
    fn settle(&self, d: &Direction<N>) -> Result<(), Error> {
        let mut last = None;
        loop {
            if d.worker.state()? == QpState::Error {
                return Ok(());
            }
            let now = (d.worker.progress()?.send_consumer, self.nic.cq_count(&d.requests)?);
            if last == Some(now) {
                return Ok(());
            }
            last = Some(now);
            std::thread::yield_now();
        }
    }

    /// The worker of `client`'s free chain has stopped at the WQE of index `at`: answers what is in
    /// flight and writes the chain anew.
    ///
    /// No request can come in meanwhile: the receive queue's limit is set back, and moves on only
    /// with the replies that are sent here.
    fn repair_free(&mut self, client: ClientId, at: u16) -> Result<(), Error> {
        let mut c = self.clients.remove(&client).expect("checked by the caller");
        let result = self.repair(&mut c.free, at, |node, d| {
            node.arm(d, |w| free_chain::write(&node.memory, w, node.push()))
        });
        self.clients.insert(client, c);
        self.refused += result?;
        Ok(())
    }

    fn repair(
        &self,
        d: &mut Direction<N>,
        at: u16,
        arm: impl FnOnce(&Self, &Direction<N>) -> Result<(), Error>,
    ) -> Result<u64, Error> {
        let ring = d.worker.send_ring().entries;
        let stopped = free_chain::stopped_at(&self.memory.shape, ring, at);
        if !stopped.refused {
            return Err(Error::Protocol {
                attempt: "repairing a free chain".into(),
                why: format!("it stopped in the middle of a release, at building block {at}"),
            });
        }
        let credits = self.settings.credits;
        let taken = d.front.progress()?.recv_consumer;
        d.front.enable_recv(taken)?;
        // Receive indices have 16 bits and are met modulo that only: one lap more keeps the
        // subtractions below from wrapping.
        let received = (d.front.progress()?.recv_consumer & 0xffff) + (1 << 16);
        // The request that stopped the chain: the last one at this position that has come in.
        let at = (d.first + stopped.position) % credits;
        let failed = received - 1 - (received - 1).wrapping_sub(at) % credits;
        d.count = self.nic.cq_count(&d.requests)?;
        d.first = received;
        for request in failed..received {
            let answer = if request == failed { status::REFUSED } else { status::AGAIN };
            let slot = (request % credits * STAGING_BYTES) as usize;
            let reply = slot + super::layout::entry::FREE_REPLY;
            d.staging.memory().store_be32(reply + super::layout::reply::FREE_STATUS, answer as u32);
        }
        let replies = Replies::keep(d, failed..received, credits);
        arm(self, d)?;
        replies.restore(d);
        d.front.enable_send((REPLY_BLOCKS * received) as u16)?;
        Ok(1)
    }

    /// Tells every compute node whether there is memory (OneSidedMW §4.3).
    fn broadcast(&mut self, empty: bool) -> Result<(), Error> {
        self.empty = empty;
        self.generation = self.generation.wrapping_add(1);
        let mut written = [fabric::Completion::EMPTY; 16];
        while self.bulletins.poll(&mut written) > 0 {}
        for c in self.clients.values() {
            self.write_bulletin(c);
        }
        Ok(())
    }

    /// Writes the present state to a compute node's bulletin.
    fn write_bulletin(&self, c: &Client<N>) {
        let Some((qp, _)) = c.access.first().and_then(|lanes| lanes.first()) else { return };
        let state = if self.empty { scheme::bulletin::EMPTY } else { scheme::bulletin::AVAILABLE };
        let text = ((state as u64) << 32 | self.generation as u64).to_be_bytes();
        let op = Op::WriteInline { to: c.bulletin, data: &text };
        // One that cannot be told has broken this QP; it asks before it waits.
        let _ = qp.post_send(&[WorkRequest { id: 0, op, signaled: true }]);
    }
}

/// The replies to requests that a stopped chain did not answer: their target addresses stand in
/// the front ring, and writing the chain anew would wipe them out.
struct Replies(Vec<(usize, [u8; 12])>);

impl Replies {
    fn keep<N: DirectNic>(d: &Direction<N>, of: std::ops::Range<u32>, credits: u32) -> Self {
        let ring = d.front.send_ring().memory;
        Self(
            of.map(|request| {
                let block = (request % credits * REPLY_BLOCKS) as usize;
                let at = block * fabric::wqe::WQEBB + fabric::wqe::offset::REMOTE_ADDR;
                let mut target = [0; 12];
                ring.read(at, &mut target);
                (at, target)
            })
            .collect(),
        )
    }

    fn restore<N: DirectNic>(&self, d: &Direction<N>) {
        let ring = d.front.send_ring().memory;
        for (at, target) in &self.0 {
            ring.write(*at, target);
        }
    }
}

fn unknown(client: ClientId) -> Error {
    Error::Refused {
        attempt: format!("serving compute node {}", client.0),
        why: "it is not connected".into(),
    }
}

/// Wakes the CPU when a management queue broke, or when the bell is rung.
struct Events<N: DirectNic> {
    faults: N::Cq,
    /// A QP that talks to itself.
    bell: N::Qp,
}

impl<N: DirectNic> Events<N> {
    fn new(nic: &N, pd: &N::Pd, faults: &N::Cq) -> Result<Self, Error> {
        let bell = nic.create_qp(
            pd,
            QpAttr {
                send_cq: faults,
                recv_cq: faults,
                send_blocks: 16,
                receive: Receive::None,
                access: Access::NONE,
            },
        )?;
        bell.connect(bell.qpn())?;
        Ok(Self { faults: faults.clone(), bell })
    }
}

impl<N: DirectNic> CpuEvents for Events<N> {
    fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        Ok(self.faults.wait(timeout)?)
    }

    fn wake(&self) {
        // A full queue means that it was rung and not heard yet.
        let _ = self.bell.post_send(&[WorkRequest { id: 0, op: Op::Nop, signaled: true }]);
    }
}

fn fill_push_queue<N: DirectNic>(memory: &Memory<N>, queue: &N::Srq) {
    let (ring, slots) = (queue.ring(), memory.shape.slots());
    assert_eq!(ring.entries, slots);
    for k in 0..slots {
        // The first push goes behind the entries that are in the queue from the start.
        let slot = (k + memory.shape.chunks) % slots;
        let sge = memory.queue.sge(slot as usize * 8, 8);
        ring.memory.write((k * ring.stride) as usize, &sge.to_bytes());
    }
    queue.record().store_be32(0, slots);
}

impl<N: DirectNic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &Admission) -> Result<Admitted, Error> {
        let refuse =
            |why: String| Err(Error::Refused { attempt: "admitting a compute node".into(), why });
        if self.clients.len() >= self.settings.clients_max as usize {
            return refuse(format!("{} are connected, the most allowed", self.clients.len()));
        }
        let lanes = self.settings.lanes() as usize;
        let [alloc_peer, free_peer] = request.management[..] else {
            return refuse("it must name two management QPs: for allocations and for frees".into());
        };
        if request.groups.is_empty() || request.groups.iter().any(|g| g.len() != lanes) {
            return refuse(format!("each of its QP groups must have {lanes} access QPs"));
        }
        if client.0 == 0 || self.clients.contains_key(&client) {
            return refuse(format!("compute node {} is there already", client.0));
        }
        let (shape, credits) = (&self.memory.shape, self.settings.credits);
        let alloc = self.direction(
            alloc_peer,
            alloc_chain::ring_blocks(shape, credits),
            alloc_chain::receive_sges(shape),
            false,
            client,
        )?;
        let free = self.direction(
            free_peer,
            free_chain::ring_blocks(shape, credits),
            free_chain::RECEIVE_SGES,
            true,
            client,
        )?;
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
        let bulletin = Remote { addr: request.bulletin_addr, rkey: Key(request.bulletin_rkey) };
        let c = Client { alloc, free, access, bulletin };
        self.arm_alloc(&c)?;
        self.arm_free(&c)?;
        self.open(&c.alloc)?;
        self.open(&c.free)?;
        let admitted = Admitted {
            client: client.0,
            chunk_bytes: self.settings.chunk_bytes,
            group_size: self.settings.group_size,
            credits,
            management: vec![c.alloc.front.qpn().raw(), c.free.front.qpn().raw()],
            groups: c
                .access
                .iter()
                .map(|lanes| lanes.iter().map(|(qp, _)| qp.qpn().raw()).collect())
                .collect(),
        };
        self.clients.insert(client, c);
        Ok(admitted)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let Some(c) = self.clients.remove(&client) else { return Ok(()) };
        for d in [&c.alloc, &c.free] {
            // No request comes in from now on; those that did are executed to their end.
            d.front.modify(QpChange::Reset)?;
            self.settle(d)?;
        }
        for (qp, _) in c.access.iter().flatten() {
            qp.modify(QpChange::Error)?;
        }
        self.counted.reclaimed += self.reclaimer.reclaim(&self.memory, self.push(), client)?;
        drop(c);
        Ok(())
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Vec<u32>, Error> {
        if !self.clients.contains_key(&client) {
            return Err(unknown(client));
        }
        self.reopen(client)?;
        let c = &self.clients[&client];
        Ok(vec![c.alloc.front.qpn().raw(), c.free.front.qpn().raw()])
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        let c = self.clients.get(&client).ok_or_else(|| unknown(client))?;
        let lanes = c.access.get(group.0 as usize);
        let Some((qp, peer)) = lanes.and_then(|lanes| lanes.get(lane.0 as usize)) else {
            return Err(Error::Refused {
                attempt: format!("re-establishing lane {} of group {}", lane.0, group.0),
                why: "this compute node has no such QP".into(),
            });
        };
        qp.connect(*peer)?;
        Ok(qp.qpn().raw())
    }

    fn events(&self) -> Option<Arc<dyn CpuEvents>> {
        Some(self.events.clone())
    }

    fn turn(&mut self) -> Result<bool, Error> {
        let mut done = false;
        let mut faults = [fabric::Completion::EMPTY; 16];
        let mut stopped = Vec::new();
        loop {
            let n = self.faults.poll(&mut faults);
            for fault in faults[..n].iter().filter(|f| f.status != Status::Success) {
                done = true;
                let owner = self.clients.iter().find(|(_, c)| c.free.worker.qpn() == fault.qpn);
                if let Some((&client, _)) = owner.filter(|_| fault.status != Status::Flushed) {
                    // A managed queue's completions carry the index of their WQE.
                    stopped.push((client, fault.id as u16));
                }
            }
            if n == 0 {
                break;
            }
        }
        for (client, at) in stopped {
            // It may have been re-established meanwhile.
            if self.clients[&client].free.worker.state()? == QpState::Error {
                self.repair_free(client, at)?;
            }
        }
        if self.empty && self.memory.permits() > 0 {
            self.waiting = false;
            self.broadcast(false)?;
            done = true;
        }
        Ok(done)
    }

    fn is_watching(&self) -> bool {
        self.empty || self.waiting
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        debug_assert!(self.clients.contains_key(&client));
        if self.memory.permits() > 0 {
            return Ok(false);
        }
        self.waiting = true;
        if !self.empty {
            self.broadcast(true)?;
        }
        Ok(true)
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let pushed = self.nic.cq_count(&self.pushes)?;
        self.counted.frees += (pushed.wrapping_sub(self.counted.pushes_seen) & 0xff_ffff) as u64;
        self.counted.pushes_seen = pushed;
        let chunks = self.memory.shape.chunks as u64;
        let free = self.memory.permits().clamp(0, chunks as i64) as u64;
        let returned = self.counted.frees;
        Ok(NodeStatus {
            scheme: "onesidedmw".into(),
            chunk_bytes: self.settings.chunk_bytes,
            chunks,
            free,
            clients: self.clients.len() as u64,
            allocations_nic: returned + chunks - free,
            allocations_cpu: 0,
            frees_nic: returned - self.counted.reclaimed,
            frees_cpu: self.counted.reclaimed,
            refused: self.refused,
        })
    }

    fn audit(&self) -> Result<(), Error> {
        super::audit::check(self)
    }
}
