//! The memory node's side: what is set up before the first request, and the little that the CPU
//! does afterwards.
//!
//! The CPU admits compute nodes, tells them of empty and of available again (§4.3), answers the
//! free that was refused and writes that chain anew, and takes back what a gone compute node owned
//! (§4.3, by `owner_id`). It has no part in an allocation, an access or a free.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use fabric::direct::{DirectNic, DirectReceive};
use fabric::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow, Qpn, QueuePair,
    ReceiveAttr, Status,
};

use super::connection::{Connection, Management};
use super::layout::{Memory, Shape};
use super::program::Wrap;
use super::reclaim::Leaving;
use crate::chain::direction::{Parts, takes_requests};
use crate::chain::notice::Notice;
use crate::chain::push::{self, Push};
use crate::chain::reclaimer::Reclaimer;
use crate::events::CqEvents;
use crate::remote::route::{Start, begun, renew_lane};
use crate::scheme::{
    Admission, Admitted, ClientId, CpuEvents, GroupId, Lane, NodeScheme, NodeStatus, Part,
};
use crate::{Error, Settings};

/// WQEs of a free chain's instance, padding included: what its worker flushes when it stops.
const FREE_WQES: u32 = 20;

/// Entries of the CQ of faults. A compute node can stop its free worker, which then flushes its
/// lap, and stops again only after the CPU has seen to it.
fn fault_entries(settings: &Settings) -> u32 {
    let flushes = settings.clients_max * settings.credits * FREE_WQES;
    (flushes + 1024).min(1 << 21)
}

fn shape(settings: &Settings) -> Shape {
    let directions = match settings.separation {
        true => 2,
        false => settings.groups_max * settings.lanes() + 1,
    };
    Shape {
        chunks: settings.chunks() as u32,
        chunk_bytes: settings.chunk_bytes,
        group: settings.group_size as usize,
        in_flight: settings.clients_max * settings.credits * directions,
    }
}

/// The scheme's memory-node side on the NIC `N`.
pub struct Node<N: DirectNic> {
    pub(super) nic: N,
    pub(super) settings: Settings,
    pub(super) memory: Memory<N>,
    pub(super) data: N::Pd,
    pub(super) metadata: N::Pd,
    /// Workers that stop, and the reclaimer's batches, complete here; the CPU wakes on it.
    pub(super) faults: N::Cq,
    events: Arc<CqEvents<N>>,
    /// Counts pushes; nobody polls it.
    pub(super) pushes: N::Cq,
    /// What goes wrong with replies completes here: it is between the compute node and its QP, and
    /// nobody polls it.
    pub(super) replies: N::Cq,
    pub(super) push_queue: N::Srq,
    push_record: N::Mr,
    pub(super) reclaimer: Reclaimer<N>,
    pub(super) clients: BTreeMap<ClientId, Connection<N>>,
    /// Compute nodes that have gone.
    pub(super) leaving: BTreeMap<ClientId, Leaving<N>>,
    /// Whose a worker is.
    pub(super) workers: HashMap<Qpn, ClientId>,
    /// Compute nodes with a worker that stopped.
    pub(super) stopped: Vec<ClientId>,
    /// Compute nodes whose free chain is repaired when it is time to.
    pub(super) later: Vec<ClientId>,
    /// What was heard of workers whose compute node was in other hands just then.
    pub(super) unheard: Vec<Completion>,
    /// Compute nodes whose management connection is being closed.
    pub(super) closing: BTreeSet<ClientId>,
    /// Management connections that went over a budget.
    pub(super) over_budget: u64,
    /// When budgets are looked at next.
    pub(super) look_at: Option<Duration>,
    pub(super) notice: Notice<N>,
    pub(super) refused: u64,
    counted: Counted,
    _windows: Vec<N::Mw>,
}

/// Running counts that the NIC keeps modulo 2^24.
#[derive(Default)]
struct Counted {
    pushes_seen: u32,
    frees: u64,
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
        let memory = Memory::new(&nic, shape, &data, &metadata, &keys, settings.kept_bytes())?;
        let sink = CqAttr { entries: 64, ignore_overrun: true };
        let entries = fault_entries(&settings);
        let faults = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let events = Arc::new(CqEvents::new(&nic, &data, &faults)?);
        let (pushes, replies) = (nic.create_cq(sink.clone())?, nic.create_cq(sink)?);
        let notice = Notice::new(&nic, settings.clients_max)?;
        let push_queue =
            nic.create_srq(&metadata, ReceiveAttr { entries: shape.slots(), max_sges: 1 })?;
        let push_record = nic.reg_mr(&metadata, &push_queue.record(), Access::REMOTE_ATOMIC)?;
        push::fill(&memory, &push_queue);
        let pds = (&data, &metadata);
        let reclaimer = Reclaimer::new(&nic, pds, &push_queue, &pushes, &faults)?;
        Ok(Self {
            nic,
            settings,
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
            clients: BTreeMap::new(),
            leaving: BTreeMap::new(),
            workers: HashMap::new(),
            stopped: Vec::new(),
            later: Vec::new(),
            unheard: Vec::new(),
            closing: BTreeSet::new(),
            over_budget: 0,
            look_at: None,
            notice,
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
        self.clients.get(&client).map(|c| [c.allocs[0].worker.qpn(), c.free.worker.qpn()])
    }

    pub(super) fn parts(&self) -> Parts<'_, N> {
        Parts {
            nic: &self.nic,
            data: &self.data,
            metadata: &self.metadata,
            faults: &self.faults,
            replies: &self.replies,
            pushes: &self.pushes,
            credits: self.settings.credits,
        }
    }

    pub(super) fn push(&self) -> Push {
        let wrap = if self.memory.shape.slots() <= 1 << 15 { Wrap::Bits16 } else { Wrap::Bits32 };
        Push { record: self.push_record.remote(0), wrap }
    }

    /// Takes in what the NIC reports to the CPU: batches of the reclaimer that ended, and workers that
    /// stopped. True if there was anything.
    pub(super) fn hear_faults(&mut self) -> Result<bool, Error> {
        let mut heard = false;
        for fault in std::mem::take(&mut self.unheard) {
            heard |= self.hear_stop(&fault);
        }
        let mut some = [Completion::EMPTY; 16];
        loop {
            let n = self.faults.poll(&mut some);
            if n == 0 {
                return Ok(heard);
            }
            for c in &some[..n] {
                if c.qpn == self.reclaimer.qpn() {
                    self.reclaimer.completed(c)?;
                    heard = true;
                } else if c.status != Status::Success {
                    heard |= self.hear_stop(c);
                }
            }
        }
    }

    /// The first bad completion of a worker says where it stopped: those of a managed queue carry
    /// the index of their WQE. The rest is its flush.
    fn hear_stop(&mut self, fault: &Completion) -> bool {
        let Some(&client) = self.workers.get(&fault.qpn) else { return false };
        let connection = match self.clients.get_mut(&client) {
            Some(c) => Some(c),
            None => self.leaving.get_mut(&client).map(Leaving::connection),
        };
        let Some(connection) = connection else {
            self.unheard.push(*fault);
            return false;
        };
        let direction = connection.direction_of(fault.qpn);
        let Some(d) = direction.filter(|d| d.stopped.is_none()) else { return false };
        d.stopped = Some(fault.id as u16);
        self.stopped.push(client);
        true
    }

    /// Tells every compute node whether there is memory, if that is new to them (OneSidedMW §4.3).
    fn broadcast(&mut self, empty: bool) -> bool {
        let new = self.notice.changes(empty);
        if new {
            for c in self.clients.values() {
                // Without separation their send queues are the chains': they ask the control thread. Who
                // has sent no request may not have connected its QPs yet, and the write would break ours;
                // it was not told "empty" before either.
                if c.separate
                    && c.has_asked(&self.nic)
                    && let Some((qp, _)) = c.access.first().and_then(|lanes| lanes.first())
                {
                    self.notice.tell(qp, c.bulletin);
                }
            }
        }
        new
    }
}

fn unknown(client: ClientId) -> Error {
    Error::Refused {
        attempt: format!("serving compute node {}", client.0),
        why: "it is not connected".into(),
    }
}

impl<N: DirectNic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &Admission) -> Result<Admitted, Error> {
        let refuse =
            |why: String| Err(Error::Refused { attempt: "admitting a compute node".into(), why });
        let (here, leaving) = (self.clients.len(), self.leaving.len());
        if here + leaving >= self.settings.clients_max as usize {
            return refuse(format!(
                "{here} are connected and {leaving} are being taken back, the most allowed"
            ));
        }
        let lanes = self.settings.lanes() as usize;
        let groups = &request.groups;
        if groups.is_empty() {
            return refuse("it must have a QP group".into());
        }
        if groups.iter().any(|g| g.len() != lanes) {
            return refuse(format!("each of its QP groups must have {lanes} access QPs"));
        }
        if client.0 == 0 || self.clients.contains_key(&client) || self.leaving.contains_key(&client)
        {
            return refuse(format!("compute node {} is there already", client.0));
        }
        let mut c = self.connection(client, request)?;
        self.open(&mut c)?;
        let admitted = Admitted {
            client: client.0,
            chunk_bytes: self.settings.chunk_bytes,
            group_size: self.settings.group_size,
            credits: self.settings.credits,
            management: c.management_qpns(),
            groups: c
                .access
                .iter()
                .map(|lanes| lanes.iter().map(|(qp, _)| qp.qpn().raw()).collect())
                .collect(),
            metadata: None,
        };
        self.workers.extend(c.directions().map(|d| (d.worker.qpn(), client)));
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
        self.hear_faults()?;
        let Some(mut c) = self.clients.remove(&client) else { return Err(unknown(client)) };
        let result = self.reestablish(client, &mut c);
        self.clients.insert(client, c);
        result
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        let c = self.clients.get(&client).ok_or_else(|| unknown(client))?;
        Ok(c.management == Management::Open && takes_requests(c.directions())?)
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
        if !c.separate {
            return Err(Error::Refused {
                attempt: format!("re-establishing lane {} of group {}", lane.0, group.0),
                why: "without separation that is done with the management QPs, all at once".into(),
            });
        }
        qp.connect(*peer)?;
        Ok(qp.qpn().raw())
    }

    fn renew(&mut self, client: ClientId, part: Part, start: Start) {
        let Some(c) = self.clients.get_mut(&client) else { return };
        match part {
            Part::Management => c
                .allocs
                .iter_mut()
                .chain([&mut c.free])
                .for_each(|d| d.front_peer = begun(d.front_peer, start)),
            Part::Access(group, lane) => renew_lane(&mut c.access, group, lane, start),
        }
    }

    fn events(&self) -> Option<Arc<dyn CpuEvents>> {
        Some(self.events.clone())
    }

    fn turn(&mut self) -> Result<bool, Error> {
        let mut done = self.hear_faults()?;
        done |= self.see_to_stopped()?;
        done |= self.bring_to_rest()?;
        done |= self.take_back()?;
        done |= self.mind_budgets()?;
        if self.notice.is_watching() && self.memory.permits() > 0 {
            done |= self.broadcast(false);
        }
        Ok(done)
    }

    fn is_watching(&self) -> bool {
        let settling = || self.leaving.values().any(Leaving::is_settling);
        self.notice.is_watching() || !self.closing.is_empty() || settling()
    }

    fn next_look(&self) -> Option<Duration> {
        let watched = self.settings.budget.is_set() && !self.clients.is_empty();
        let budgets = watched.then_some(self.settings.budget.interval);
        budgets.into_iter().chain(self.next_repair()).min()
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        debug_assert!(self.clients.contains_key(&client));
        if self.memory.permits() > 0 {
            return Ok(false);
        }
        self.broadcast(true);
        Ok(true)
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let pushed = self.nic.cq_count(&self.pushes)?;
        self.counted.frees += (pushed.wrapping_sub(self.counted.pushes_seen) & 0xff_ffff) as u64;
        self.counted.pushes_seen = pushed;
        let chunks = self.memory.shape.chunks as u64;
        let free = self.memory.permits().clamp(0, chunks as i64) as u64;
        let returned = self.counted.frees;
        let reclaimed = self.reclaimer.released.min(returned);
        Ok(NodeStatus {
            scheme: "onesidedmw".into(),
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
        })
    }

    fn audit(&self) -> Result<(), Error> {
        super::audit::check(self)
    }
}
