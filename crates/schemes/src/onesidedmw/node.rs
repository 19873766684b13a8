//! The memory node's side of OneSidedMW: the setup before the first request, and the rare work of
//! the CPU.
//!
//! The CPU admits clients, broadcasts "empty" and "available again" (§4.3), answers refused frees
//! and rewrites their chains, and reclaims the chunks of departed clients (§4.3, by `owner_id`). It
//! takes no part in an allocation, an access or a free.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use scheme::client_table::{ClientTable, Requirements, refuse, unknown};
use scheme::wakeup::CqEvents;
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, Error, GroupId, Lane, NodeScheme, NodeSettings,
    NodeStatus, QpSet, Start, options,
};
use verbs::direct::{DirectNic, DirectReceive};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow, Qpn, QueuePair,
    ReceiveAttr, Status,
};

use super::connection::Connection;
use super::layout::{Memory, Shape};
use super::options::{Options, Terms};
use super::program::Wrap;
use super::reclaim::Leaving;
use super::{ONESIDEDMW_PAPER, published_chain};
use crate::chain::availability::AvailabilityNotifier;
use crate::chain::push_queue::{self, PushRecord};
use crate::chain::queues::SharedResources;
use crate::chain::reclaimer::Reclaimer;

/// WQEs of a free chain's instance, padding included: its worker flushes them when it stops.
const FREE_WQES: u32 = 20;

/// Entries of the CQ of faults. A client can stop its free worker, which then flushes one lap; the
/// worker can stop again only after the CPU has handled the first stop.
fn fault_entries(settings: &NodeSettings) -> u32 {
    let mut flushes = settings.clients_max * settings.credits * FREE_WQES;
    if settings.scheme == ONESIDEDMW_PAPER {
        // Its alloc workers stop when the queue is empty.
        let each = published_chain::ahead(settings.credits);
        flushes +=
            settings.clients_max * each * published_chain::wqes(settings.group_size as usize);
    }
    (flushes + 1024).min(1 << 21)
}

fn shape(settings: &NodeSettings, options: &Options) -> Shape {
    let directions = match options.separation {
        true => 2,
        false => settings.groups_max * settings.lanes() + 1,
    };
    Shape {
        chunks: settings.chunks as u32,
        chunk_bytes: settings.chunk_bytes,
        group: settings.group_size as usize,
        in_flight: settings.clients_max * settings.credits * directions,
        published: settings.scheme == ONESIDEDMW_PAPER,
    }
}

/// The scheme's memory-node side on the NIC `N`.
pub struct Node<N: DirectNic> {
    pub(super) nic: N,
    pub(super) settings: NodeSettings,
    pub(super) options: Options,
    pub(super) memory: Memory<N>,
    pub(super) data: N::Pd,
    pub(super) metadata: N::Pd,
    /// Receives the completions of stopped workers and of the reclaimer's batches; wakes the CPU.
    pub(super) faults: N::Cq,
    events: Arc<CqEvents<N>>,
    /// Counts pushes; not polled.
    pub(super) pushes: N::Cq,
    /// Receives the errors of replies; not polled. Such an error concerns only the client and its
    /// QP.
    pub(super) replies: N::Cq,
    pub(super) push_queue: N::Srq,
    push_record: N::Mr,
    pub(super) reclaimer: Reclaimer<N>,
    pub(super) clients: ClientTable<Connection<N>>,
    /// Departed clients whose chunks are being reclaimed.
    pub(super) leaving: BTreeMap<ClientId, Leaving<N>>,
    /// The client of each worker.
    pub(super) workers: HashMap<Qpn, ClientId>,
    /// Clients with a stopped worker.
    pub(super) stopped: Vec<ClientId>,
    /// Clients whose free chain waits for a rate-limited repair.
    pub(super) deferred_repairs: Vec<ClientId>,
    /// Faults of workers whose connection was temporarily not in `clients` or `leaving`.
    pub(super) pending_faults: Vec<Completion>,
    /// Clients whose management connection is being closed.
    pub(super) closing: BTreeSet<ClientId>,
    /// Number of management connections closed because they exceeded a budget.
    pub(super) over_budget: u64,
    /// Time of the next budget check.
    pub(super) next_budget_check: Option<Duration>,
    pub(super) notice: AvailabilityNotifier<N>,
    pub(super) refused: u64,
    /// A published chain has found the queue empty since the last broadcast.
    pub(super) found_empty: bool,
    counted: Counted,
    _windows: Vec<N::Mw>,
}

/// Running totals of counts that the NIC keeps modulo 2^24.
#[derive(Default)]
struct Counted {
    pushes_seen: u32,
    frees: u64,
}

impl<N: DirectNic> Node<N> {
    /// Allocates the memory and the windows, and initializes the table and the free queue.
    pub fn new(nic: N, settings: NodeSettings) -> Result<Self, Error> {
        let options = Options::of(&settings)?;
        settings.scheme.check_caps(&nic.caps())?;
        let shape = shape(&settings, &options);
        let (data, metadata) = (nic.alloc_pd()?, nic.alloc_pd()?);
        let windows = nic.alloc_mws(&data, shape.chunks as usize * shape.group)?;
        let keys: Vec<Key> = windows.iter().map(|w| w.key()).collect();
        let memory = Memory::new(&nic, shape, &data, &metadata, &keys, settings.kept_bytes)?;
        let sink = CqAttr { entries: 64, ignore_overrun: true };
        let entries = fault_entries(&settings);
        let faults = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let events = Arc::new(CqEvents::new(&nic, &data, &faults)?);
        let (pushes, replies) = (nic.create_cq(sink.clone())?, nic.create_cq(sink)?);
        let notice = AvailabilityNotifier::new(&nic, settings.clients_max)?;
        let push_queue =
            nic.create_srq(&metadata, ReceiveAttr { entries: shape.slots(), max_sges: 1 })?;
        let push_record = nic.reg_mr(&metadata, &push_queue.record(), Access::REMOTE_ATOMIC)?;
        push_queue::fill(&memory, &push_queue);
        let pds = (&data, &metadata);
        let reclaimer = Reclaimer::new(&nic, pds, &push_queue, &pushes, &faults)?;
        Ok(Self {
            nic,
            settings,
            options,
            memory,
            data,
            metadata,
            faults,
            events,
            pushes,
            replies,
            push_queue,
            push_record,
            reclaimer,
            clients: ClientTable::default(),
            leaving: BTreeMap::new(),
            workers: HashMap::new(),
            stopped: Vec::new(),
            deferred_repairs: Vec::new(),
            pending_faults: Vec::new(),
            closing: BTreeSet::new(),
            over_budget: 0,
            next_budget_check: None,
            notice,
            refused: 0,
            found_empty: false,
            counted: Counted::default(),
            _windows: windows,
        })
    }

    /// The memory that the chains work on.
    pub fn memory(&self) -> &Memory<N> {
        &self.memory
    }

    /// The CQ that receives a completion when the CPU has something to repair.
    pub fn faults(&self) -> &N::Cq {
        &self.faults
    }

    /// The worker QPs of `client`, for tests.
    pub fn worker_qpns(&self, client: ClientId) -> Option<[Qpn; 2]> {
        self.clients.get(&client).map(|c| [c.allocs[0].worker.qpn(), c.free.worker.qpn()])
    }

    pub(super) fn parts(&self) -> SharedResources<'_, N> {
        SharedResources {
            nic: &self.nic,
            data: &self.data,
            metadata: &self.metadata,
            faults: &self.faults,
            replies: &self.replies,
            pushes: &self.pushes,
            credits: self.settings.credits,
        }
    }

    pub(super) fn push(&self) -> PushRecord {
        let wrap = if self.memory.shape.slots() <= 1 << 15 { Wrap::Bits16 } else { Wrap::Bits32 };
        PushRecord { record: self.push_record.remote(0), wrap }
    }

    /// Free chunks that an allocation can take. Negative while requests overdraw the permits, and
    /// in scheme `onesidedmw-paper` once the head has passed empty slots.
    pub(super) fn free_chunks(&self) -> Result<i64, Error> {
        match self.memory.shape.published {
            true => Ok(self.memory.distance_to_tail(self.nic.cq_count(&self.pushes)?)),
            false => Ok(self.memory.permits()),
        }
    }

    /// Drains the fault CQ: completed batches of the reclaimer, workers that stopped, and executed
    /// WQEs that are to be posted again. Returns true if it processed any.
    pub(super) fn poll_faults(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for fault in std::mem::take(&mut self.pending_faults) {
            any |= self.record(&fault)?;
        }
        let mut some = [Completion::EMPTY; 16];
        loop {
            let n = self.faults.poll(&mut some);
            if n == 0 {
                return Ok(any);
            }
            for c in &some[..n] {
                if c.qpn == self.reclaimer.qpn() {
                    self.reclaimer.completed(c)?;
                    any = true;
                } else if c.status != Status::Success || self.memory.shape.published {
                    any |= self.record(c)?;
                }
            }
        }
    }

    /// Handles a worker's completion. A success is that of a published chain, whose WQEs are posted
    /// again. The first error tells where the worker stopped: completions of a managed queue carry
    /// the index of their WQE. Later errors are the worker's flush.
    fn record(&mut self, fault: &Completion) -> Result<bool, Error> {
        let Some(&client) = self.workers.get(&fault.qpn) else { return Ok(false) };
        let connection = match self.clients.get_mut(&client) {
            Some(c) => Some(c),
            None => self.leaving.get_mut(&client).map(Leaving::connection),
        };
        let Some(connection) = connection else {
            self.pending_faults.push(*fault);
            return Ok(false);
        };
        let guard = connection.free.worker.qpn();
        let queues = connection.queues_of(fault.qpn);
        let Some(d) = queues.filter(|d| d.stopped.is_none()) else { return Ok(false) };
        if fault.status == Status::Success {
            published_chain::post_again(&self.memory, d, guard)?;
            return Ok(true);
        }
        d.stopped = Some(fault.id as u16);
        self.stopped.push(client);
        Ok(true)
    }

    /// Broadcasts whether memory is available, if that changed (OneSidedMW §4.3).
    pub(super) fn broadcast(&mut self, empty: bool) -> bool {
        let new = self.notice.set_empty(empty);
        if new {
            for c in self.clients.values() {
                // Without separation the access QPs' send queues belong to the chains, so the
                // client asks the control thread instead. A client that has sent no request may not
                // have connected its QPs yet, and the WRITE would break the memory node's QP; such
                // a client has not received "empty" either.
                if c.separate
                    && c.has_sent_requests(&self.nic)
                    && let Some(first) = c.access.iter().next()
                {
                    self.notice.notify(&first.qp, c.bulletin);
                }
            }
        }
        new
    }
}

impl<N: DirectNic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        let settings = &self.settings;
        if self.leaving.contains_key(&client) {
            return Err(refuse(format!("client {} is being reclaimed", client.0)));
        }
        let expected = Requirements {
            settings,
            management: if self.options.separation { 2 } else { 1 },
            lanes: settings.lanes() as usize,
            leaving: self.leaving.len(),
        };
        self.clients.check(client, request, &expected)?;
        let mut c = self.connection(client, request)?;
        self.open(&mut c)?;
        let fronts = c.management_qpns();
        let admitted = ConnectReply::of(&self.settings, client, fronts, &c.access);
        self.workers.extend(c.queues().map(|d| (d.worker.qpn(), client)));
        self.clients.insert(client, c);
        Ok(admitted)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        self.begin_retire(client)
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.clients.contains_key(&client) && !self.leaving.contains_key(&client)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        self.poll_faults()?;
        let Some(mut c) = self.clients.remove(&client) else { return Err(unknown(client)) };
        let result = self.reestablish(client, &mut c);
        self.clients.insert(client, c);
        result
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.clients.management_is_open(client)
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        if !self.options.separation {
            return Err(Error::Refused {
                attempt: format!("re-establishing lane {} of group {}", lane.0, group.0),
                why: "without separation, lanes are re-established with the management QPs".into(),
            });
        }
        self.clients.reset_access(client, group, lane)
    }

    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        self.clients.set_start(client, part, start);
    }

    fn cpu(&mut self) -> Cpu {
        Cpu { events: Some(self.events.clone()), ..Cpu::default() }
    }

    fn terms(&self) -> options::Terms {
        let Options { separation, budget } = &self.options;
        options::terms(&Terms { separation: *separation, budget_chunks: budget.chunks })
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let mut done = self.poll_faults()?;
        done |= self.handle_stopped()?;
        done |= self.complete_closings()?;
        done |= self.reclaim_departed()?;
        done |= self.check_budgets()?;
        if self.notice.is_watching() && self.free_chunks()? > 0 {
            done |= self.broadcast(false);
        }
        Ok(done)
    }

    fn is_watching(&self) -> bool {
        let settling = || self.leaving.values().any(Leaving::is_settling);
        self.notice.is_watching() || !self.closing.is_empty() || settling()
    }

    fn next_poll(&self) -> Option<Duration> {
        let watched = self.options.budget.is_set() && !self.clients.is_empty();
        let budgets = watched.then_some(self.options.budget.interval);
        budgets.into_iter().chain(self.next_repair()).min()
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        debug_assert!(self.clients.contains_key(&client));
        if self.free_chunks()? > 0 {
            return Ok(false);
        }
        self.broadcast(true);
        Ok(true)
    }

    fn first_chunk(&self) -> Option<u64> {
        Some(self.memory.chunks.memory().addr())
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let pushed = self.nic.cq_count(&self.pushes)?;
        self.counted.frees += (pushed.wrapping_sub(self.counted.pushes_seen) & 0xff_ffff) as u64;
        self.counted.pushes_seen = pushed;
        let chunks = self.memory.shape.chunks as u64;
        let free = self.free_chunks()?.clamp(0, chunks as i64) as u64;
        let returned = self.counted.frees;
        let reclaimed = self.reclaimer.released.min(returned);
        Ok(NodeStatus {
            scheme: self.settings.scheme.name.into(),
            chunk_bytes: self.settings.chunk_bytes,
            functions: 0,
            chunks,
            free,
            clients: self.clients.len() as u64,
            leaving: self.leaving.len() as u64,
            allocations_nic: returned + chunks - free,
            allocations_cpu: 0,
            frees_nic: returned - reclaimed,
            frees_cpu: reclaimed,
            refused: self.refused,
            budget: self.budget_status(),
            lease: None,
        })
    }

    fn audit(&self) -> Result<(), Error> {
        super::audit::check(self)
    }
}
