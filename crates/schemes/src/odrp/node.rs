//! The memory node's side of `odrp`: the setup before the first request, and the rare work of the
//! CPU. The CPU admits clients, broadcasts "empty" and "available again", closes the connection of
//! a client that sent an invalid page number, and reclaims the pages of departed clients.

use std::collections::HashMap;
use std::sync::Arc;

use scheme::client_table::{AccessQps, ClientTable, Requirements, refuse};
use scheme::wakeup::CqEvents;
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, Error, GroupId, Lane, NodeScheme, NodeSettings,
    NodeStatus, QpSet, Start,
};
use verbs::direct::{DirectNic, DirectQp};
use verbs::{
    Access, CompletionQueue, CqAttr, Cqn, DmaMemory, MemoryRegion, QpAttr, QpChange, Qpn,
    QueuePair, Receive, ReceiveAttr, Remote,
};

use super::chain::{self, Reads, Tables};
use super::connection::{Connection, Stage};
use super::{read_chain, table};
use crate::chain::availability::{AvailabilityNotifier, BULLETIN_BLOCKS};
use crate::chain::layout::{Memory, Shape};
use crate::chain::program::Wrap;
use crate::chain::push_queue::{self, PushRecord};
use crate::chain::queues::{COUNT, ChainQueues, QueueParams, SharedResources};
use crate::chain::reclaimer::Reclaimer;

/// Maximum number of WQEs that a stopping worker flushes, per instance.
const FLUSHED: u32 = 32;

/// Requests in flight, if all compute nodes use all of their credits.
pub(super) fn in_flight_max(settings: &NodeSettings) -> u32 {
    settings.clients_max * settings.credits
}

/// Entries of the CQ of faults: all workers may stop at once. The NIC's limit bounds them.
pub(super) fn faults_max(settings: &NodeSettings) -> u32 {
    (in_flight_max(settings) * FLUSHED + 1024).min(1 << 21)
}

/// The scheme's memory-node side on the NIC `N`.
pub struct Node<N: DirectNic> {
    pub(super) nic: N,
    pub(super) settings: NodeSettings,
    pub(super) memory: Memory<N>,
    pub(super) steps: N::Mr,
    pub(super) data: N::Pd,
    pub(super) metadata: N::Pd,
    /// Receives the completions of stopped workers and of the reclaimer's batches; wakes the CPU.
    pub(super) faults: N::Cq,
    pub(super) events: Arc<CqEvents<N>>,
    /// Counts pushes; not polled.
    pub(super) pushes: N::Cq,
    /// Receives the errors of loopback peers; not polled.
    pub(super) sink: N::Cq,
    pub(super) push_queue: N::Srq,
    pub(super) push_record: N::Mr,
    pub(super) reclaimer: Reclaimer<N>,
    pub(super) notice: AvailabilityNotifier<N>,
    pub(super) clients: ClientTable<Connection<N>>,
    pub(super) workers: HashMap<Qpn, ClientId>,
    pub(super) refused: u64,
    pub(super) frees: u64,
    pub(super) pushes_seen: u32,
}

impl<N: DirectNic> Node<N> {
    /// Allocates the memory and initializes the tables and the free queue.
    pub fn new(nic: N, settings: NodeSettings) -> Result<Self, Error> {
        settings.scheme.check_caps(&nic.caps())?;
        let shape = Shape {
            chunks: settings.chunks as u32,
            chunk_bytes: settings.chunk_bytes,
            group: 0,
            in_flight: in_flight_max(&settings),
            published: false,
        };
        let (data, metadata) = (nic.alloc_pd()?, nic.alloc_pd()?);
        let memory = Memory::new(&nic, shape, &data, &metadata, &[], settings.kept_bytes)?;
        table::write_images(&memory);
        let steps = table::new_steps(&nic, &metadata, chain::ALLOCATE, chain::FREE)?;
        let counter = CqAttr { entries: 64, ignore_overrun: true };
        let entries = faults_max(&settings);
        let faults = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let events = Arc::new(CqEvents::new(&nic, &data, &faults)?);
        let (pushes, sink) = (nic.create_cq(counter.clone())?, nic.create_cq(counter)?);
        let slots = ReceiveAttr { entries: shape.slots(), max_sges: 1 };
        let push_queue = nic.create_srq(&metadata, slots)?;
        let push_record = verbs::direct::DirectReceive::record(&push_queue);
        let push_record = nic.reg_mr(&metadata, &push_record, Access::REMOTE_ATOMIC)?;
        push_queue::fill(&memory, &push_queue);
        let pds = (&data, &metadata);
        let reclaimer = Reclaimer::new(&nic, pds, &push_queue, &pushes, &faults)?;
        Ok(Self {
            notice: AvailabilityNotifier::new(&nic, settings.clients_max)?,
            nic,
            settings,
            memory,
            steps,
            data,
            metadata,
            faults,
            events,
            pushes,
            sink,
            push_queue,
            push_record,
            reclaimer,
            clients: ClientTable::default(),
            workers: HashMap::new(),
            refused: 0,
            frees: 0,
            pushes_seen: 0,
        })
    }

    /// The memory that the chains work on.
    pub fn memory(&self) -> &Memory<N> {
        &self.memory
    }

    /// The tables of the clients whose chains may still run, for external checkers. The rows are as
    /// described in [`table`].
    pub fn tables(&self) -> Vec<(ClientId, DmaMemory)> {
        let runs = |c: &Connection<N>| !matches!(c.stage, Stage::Scanning(_) | Stage::Releasing(_));
        let rows = |(id, c): (&ClientId, &Connection<N>)| (*id, c.rows.memory().clone());
        self.clients.iter().filter(|(_, c)| runs(c)).map(rows).collect()
    }

    /// Page numbers of one client: enough for all the memory.
    fn numbers(&self) -> u64 {
        self.memory.shape.chunks as u64
    }

    pub(super) fn push(&self) -> PushRecord {
        let wrap = if self.memory.shape.slots() <= 1 << 15 { Wrap::Bits16 } else { Wrap::Bits32 };
        PushRecord { record: self.push_record.remote(0), wrap }
    }

    fn connection(
        &self,
        client: ClientId,
        request: &ConnectRequest,
    ) -> Result<Connection<N>, Error> {
        let [reads, writes] = request.management[..] else {
            return Err(refuse(
                "the request must name two management QPs: reads; writes and frees",
            ));
        };
        let parts = SharedResources {
            nic: &self.nic,
            data: &self.data,
            metadata: &self.metadata,
            faults: &self.faults,
            replies: &self.sink,
            pushes: &self.pushes,
            credits: self.settings.credits,
        };
        let read = QueueParams {
            owner: client,
            peer: request.peer(reads),
            worker_blocks: read_chain::ring_blocks(self.settings.credits),
            reply_blocks: read_chain::ANSWER_BLOCKS,
            credit_block: 0,
            receive_sges: read_chain::RECEIVE_SGES,
            push_queue: None,
            waits: true,
            access: Access::NONE,
            copies: false,
        };
        let write = QueueParams {
            owner: client,
            peer: request.peer(writes),
            worker_blocks: chain::ring_blocks(self.settings.credits),
            reply_blocks: chain::ANSWER_BLOCKS,
            credit_block: chain::CREDIT_BLOCK,
            receive_sges: chain::RECEIVE_SGES,
            push_queue: Some(&self.push_queue),
            waits: true,
            access: Access::NONE,
            copies: true,
        };
        let counters = self.nic.alloc_dma(read_chain::COUNTERS_BYTES)?;
        let rights = Access::REMOTE_ATOMIC | Access::REMOTE_READ;
        let access = |_| {
            let attr = QpAttr {
                send_cq: &self.notice.written,
                recv_cq: &self.notice.written,
                send_blocks: BULLETIN_BLOCKS,
                receive: Receive::None,
                access: Access::NONE,
            };
            Ok(self.nic.create_qp(&self.data, attr)?)
        };
        Ok(Connection {
            reads: ChainQueues::new(&parts, &read)?,
            writes: ChainQueues::new(&parts, &write)?,
            counters: self.nic.reg_mr(&self.metadata, &counters, rights)?,
            rows: table::new_table(&self.nic, &self.metadata, self.numbers())?,
            access: AccessQps::new(request, access)?,
            bulletin: Remote {
                addr: request.bulletin_addr,
                rkey: verbs::Key(request.bulletin_rkey),
            },
            stage: Stage::Closed,
            notify: false,
        })
    }

    /// Rewrites the chains and enables requests. No request may be in flight.
    fn open(&mut self, client: ClientId) -> Result<(), Error> {
        let c = self.clients.known(client)?;
        for d in c.queues() {
            d.worker.modify(QpChange::Reset)?;
        }
        // Drains completions of the workers before their reset; otherwise they would count as a new
        // stop.
        self.poll_faults()?;
        let push = self.push();
        let c = self.clients.known_mut(client)?;
        let mut answers = [(Cqn::new(0), 0); 2];
        for (d, answers) in [&mut c.reads, &mut c.writes].into_iter().zip(&mut answers) {
            (d.first, d.stopped) = (0, None);
            d.count = self.nic.cq_count(&d.requests)?;
            let cq = d.answers.as_ref().expect("these chains have a CQ for their answers");
            *answers = (cq.cqn(), self.nic.cq_count(cq)?);
            d.worker.connect(d.loopback.qpn())?;
            d.loopback.connect(d.worker.qpn())?;
        }
        let [(read_cqn, read_before), answers] = answers;
        // `begun` is one ahead of the number of the next request.
        let delta = read_before.wrapping_sub(c.reads.count).wrapping_sub(2) & COUNT;
        let reads = Reads { counters: c.counters.clone(), answers: read_cqn, delta };
        let (rows, steps) = (c.rows.clone(), self.steps.clone());
        let tables = Tables { rows, steps, push, answers, reads };
        let dump = self.memory.dump.sge(0, 8);
        let wiring = c.reads.wiring(dump);
        let requests = c.reads.requests.cqn();
        read_chain::write(&self.memory, &c.rows, &c.counters, (&wiring, requests));
        chain::write(&self.memory, &tables, &c.writes.wiring(dump));
        let credits = self.settings.credits;
        for (d, receives) in [(&c.reads, read_chain::receives(credits)), (&c.writes, credits)] {
            d.worker.enable_send(d.worker.send_ring().entries as u16)?;
            d.front.connect(d.front_peer)?;
            d.front.enable_recv(receives)?;
        }
        c.stage = Stage::Open;
        Ok(())
    }

    /// Broadcasts whether memory is available, if that changed.
    fn broadcast(&mut self, empty: bool) -> bool {
        let new = self.notice.set_empty(empty);
        if new {
            for c in self.clients.values().filter(|c| !c.stage.is_gone()) {
                if let Some(first) = c.access.iter().next() {
                    self.notice.notify(&first.qp, c.bulletin);
                }
            }
        }
        new
    }
}

impl<N: DirectNic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        let lanes = self.settings.lanes() as usize;
        let expected = Requirements { settings: &self.settings, management: 2, lanes, leaving: 0 };
        self.clients.check(client, request, &expected)?;
        let c = self.connection(client, request)?;
        let fronts = c.queues().map(|d| d.front.qpn().raw()).to_vec();
        let admitted = ConnectReply::of(&self.settings, client, fronts, &c.access);
        let workers = c.queues().map(|d| d.worker.qpn());
        self.clients.insert(client, c);
        if let Err(e) = self.open(client) {
            self.clients.remove(&client);
            return Err(e);
        }
        self.workers.extend(workers.map(|worker| (worker, client)));
        Ok(admitted)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let Ok(c) = self.clients.known_mut(client) else { return Ok(()) };
        c.close()?;
        c.access.shut_down()?;
        // A connection in stage Closed has been stopped already and holds no page.
        c.stage = if c.stage == Stage::Closed { Stage::Scanning(0) } else { Stage::Settling };
        Ok(())
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.clients.contains_key(&client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let mut done = self.poll_faults()?;
        done |= self.advance_reclamation()?;
        if self.notice.is_watching() && self.memory.permits() > 0 {
            done |= self.broadcast(false);
        }
        Ok(done)
    }

    fn is_watching(&self) -> bool {
        let moves = |c: &Connection<N>| matches!(c.stage, Stage::Closing | Stage::Settling);
        self.notice.is_watching() || self.clients.values().any(moves)
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        self.clients.known_mut(client)?;
        if self.memory.permits() > 0 {
            return Ok(false);
        }
        self.broadcast(true);
        Ok(true)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        self.poll_faults()?;
        let nic = self.nic.clone();
        let c = self.clients.known_mut(client)?;
        c.notify = false; // the client reset its side itself
        if c.stage == Stage::Open {
            c.close()?;
            c.stage = Stage::Closing;
        }
        if c.stage == Stage::Closing {
            if !c.is_at_rest(&nic)? {
                return Ok(None);
            }
            self.advance_reclamation()?;
        }
        let c = self.clients.known_mut(client)?;
        c.close()?;
        let fronts = c.queues().map(|d| d.front.qpn().raw()).to_vec();
        self.open(client)?;
        Ok(Some(fronts))
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.clients.management_is_open(client)
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        self.clients.reset_access(client, group, lane)
    }

    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        self.clients.set_start(client, part, start);
    }

    fn cpu(&mut self) -> Cpu {
        Cpu { events: Some(self.events.clone()), ..Cpu::default() }
    }

    fn first_chunk(&self) -> Option<u64> {
        None
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let pushed = self.nic.cq_count(&self.pushes)?;
        self.frees += (pushed.wrapping_sub(self.pushes_seen) & 0xff_ffff) as u64;
        self.pushes_seen = pushed;
        let chunks = self.memory.shape.chunks as u64;
        let free = self.memory.permits().clamp(0, chunks as i64) as u64;
        let reclaimed = self.reclaimer.released.min(self.frees);
        Ok(NodeStatus {
            scheme: self.settings.scheme.name.into(),
            chunk_bytes: self.settings.chunk_bytes,
            functions: 0,
            chunks,
            free,
            clients: self.clients.connected(),
            leaving: self.clients.leaving(),
            allocations_nic: self.frees + chunks - free,
            allocations_cpu: 0,
            frees_nic: self.frees - reclaimed,
            frees_cpu: reclaimed,
            refused: self.refused,
            budget: None,
            lease: None,
        })
    }

    /// Checks that every page is either mapped by exactly one row of one table or in the free queue
    /// once, that the queue has no hole from the head on, and that the permits equal its length.
    fn audit(&self) -> Result<(), Error> {
        let attempt = || "auditing the pool".into();
        let broken = |why: String| Error::Protocol { attempt: attempt(), why };
        if self.clients.values().any(|c| c.stage.is_gone()) {
            let why = "pages of departed clients are being reclaimed: retry when that is complete";
            return Err(Error::Refused { attempt: attempt(), why: why.into() });
        }
        let (run, filled) = self.memory.queued();
        if run.len() != filled || self.memory.permits() != run.len() as i64 {
            return Err(broken(format!(
                "{filled} slots of the free queue are filled, {} from the head on, with {} permits",
                run.len(),
                self.memory.permits()
            )));
        }
        let mut at = vec![None; self.memory.shape.chunks as usize];
        for value in run {
            let page = self.memory.entry_of(value);
            let page = page.ok_or_else(|| broken(format!("the queue holds {value:#x}")))?;
            if at[page.as_usize()].replace(ClientId(0)).is_some() {
                return Err(broken(format!("page {page} is in the free queue twice")));
            }
        }
        for (client, c) in self.clients.iter() {
            for n in 0..self.numbers() {
                let Some(page) = table::page_of(&self.memory, c.rows.memory(), n) else { continue };
                if let Some(other) = at[page.as_usize()].replace(*client) {
                    return Err(broken(format!(
                        "page {page} is number {n} of client {}, and also belongs to {other:?}",
                        client.0
                    )));
                }
            }
        }
        match at.iter().position(Option::is_none) {
            None => Ok(()),
            Some(page) => Err(broken(format!("page {page} is lost: neither free nor mapped"))),
        }
    }
}
