//! A core of the memory node's CPU, which answers the requests of its compute nodes.
//!
//! A poll collects the received requests (at most [`BATCH`]), decides on each, opens and closes
//! chunks (all binds and unbinds with one doorbell per QP), waits for the binds, clears freed
//! chunks and posts the replies.

mod background;
mod binds;
mod reclaim;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use scheme::client_table::ClientTable;
use scheme::index::{EntryId, Slot};
use scheme::wakeup::CqEvents;
use scheme::{ClientId, CpuEvents, Error, GroupId, Lane, MAX_GROUP, NodeSettings, Worker};
use verbs::{
    Access, Completion, CompletionKind, CompletionQueue, CqAttr, MemoryRegion, Nic, QpAttr, Qpn,
    QueuePair, Receive, Zeros,
};

use self::binds::WindowOp;
use super::Opening;
use super::blocks::Blocks;
use super::connection::Connection;
use super::table::{Protection, Table};
use super::{Ask, Outcome, REQUEST_BYTES, Reply, Request};
use crate::blocks::Order;

/// Maximum number of requests that one poll answers.
const BATCH: usize = 64;
/// Send blocks of a UMR that binds.
pub(super) const BIND_BLOCKS: u32 = 3;

/// State that all cores share.
pub(super) struct Shared<N: Nic> {
    pub nic: N,
    pub settings: NodeSettings,
    pub opening: Opening,
    /// PD of the windows, or of the region over all chunks, and of the QPs that use them.
    pub pd: N::Pd,
    /// The donated memory, registered in [`Shared::pd`].
    pub memory: N::Mr,
    pub blocks: Blocks,
    pub table: Mutex<Table<N>>,
    pub cores: Vec<Core<N>>,
}

/// A core: its event source, and its state, which the control thread also changes between polls.
pub(super) struct Core<N: Nic> {
    pub events: Arc<CqEvents<N>>,
    pub state: Mutex<State<N>>,
}

/// State of a core.
pub(super) struct State<N: Nic> {
    /// Index of the core.
    index: usize,
    /// CQ for requests of its compute nodes.
    pub requests: N::Cq,
    /// Buffer for completions polled from `requests`.
    arrived: Vec<Completion>,
    /// CQ for binds and unbinds.
    pub binds: N::Cq,
    /// QP to which binds of type-1 windows are posted.
    binder: Option<N::Qp>,
    pub peers: ClientTable<Connection<N>>,
    pub by_management: HashMap<Qpn, ClientId>,
    /// Compute nodes that may have too few chunks set aside.
    short: VecDeque<ClientId>,
    /// ID of the next bind or unbind.
    serial: u64,
    pub allocations: u64,
    pub frees: u64,
    pub refused: u64,
}

/// A request in progress.
struct Job {
    client: ClientId,
    slot: Slot,
    number: u64,
    step: Step,
}

enum Step {
    Refuse(Outcome, EntryId),
    /// `open`: the chunk is registered already. `from`: the chunk whose window is reused, which is
    /// then closed.
    Allocate {
        entry: EntryId,
        open: bool,
        from: Option<EntryId>,
        failed: bool,
    },
    Free {
        entry: EntryId,
        failed: bool,
    },
    /// A free that is answered while the chunk is still open.
    SetAside {
        entry: EntryId,
    },
}

/// A core, to be driven by a thread of its own.
pub(super) struct Handle<N: Nic> {
    pub shared: Arc<Shared<N>>,
    pub core: usize,
}

impl<N: Nic> Worker for Handle<N> {
    fn poll(&mut self) -> Result<bool, Error> {
        self.shared.poll(self.core)
    }

    fn events(&self) -> Arc<dyn CpuEvents> {
        self.shared.cores[self.core].events.clone()
    }
}

impl<N: Nic> Shared<N> {
    /// Polls a core.
    pub fn poll(&self, core: usize) -> Result<bool, Error> {
        let did = self.cores[core].state.lock().poll(self)?;
        if did {
            let wake = self.table.lock().cores_to_wake();
            wake.iter().filter(|c| **c != core).for_each(|c| self.cores[*c].events.wake());
        }
        Ok(did)
    }

    fn clear(&self, entry: EntryId) {
        let (offset, bytes) = self.blocks.range(entry);
        let mut zeros = Zeros::default();
        self.nic.zero(&mut zeros, self.memory.memory(), offset as usize, bytes as usize);
    }

    /// Registers a chunk in a compute node's PD.
    fn register(&self, pd: &N::Pd, entry: EntryId) -> Result<N::Mr, Error> {
        let (offset, bytes) = self.blocks.range(entry);
        let all = self.memory.memory();
        let chunk = all.slice(offset as usize, bytes as usize);
        let chunk = chunk.expect("a chunk lies in the donated memory");
        Ok(self.nic.reg_mr(pd, &chunk, Access::LOCAL_WRITE | Access::REMOTE_ALL)?)
    }

    /// Replaces the windows of a chunk, which invalidates the keys of the old ones.
    fn replace_windows(&self, entry: EntryId) -> Result<(), Error> {
        match &mut self.table.lock().protection {
            Protection::Type2(windows) => windows.replace(&self.nic, &self.pd, entry),
            Protection::Type1(windows) => windows.replace(&self.nic, &self.pd, entry),
            Protection::Regions(_) | Protection::Open(_) => Ok(()),
        }
    }
}

impl<N: Nic> Core<N> {
    /// A core without compute nodes.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        (settings, opening, cores): (&NodeSettings, Opening, u32),
        index: usize,
    ) -> Result<Self, Error> {
        // A new compute node is assigned to the core with the fewest.
        let clients = settings.clients_max.div_ceil(cores);
        let in_flight = clients * settings.credits;
        let requests = nic.create_cq(CqAttr {
            entries: 2 * in_flight + CqEvents::<N>::MARGIN,
            ignore_overrun: false,
        })?;
        let binds = nic.create_cq(CqAttr {
            entries: 2 * BATCH.max(settings.credits as usize) as u32 * MAX_GROUP as u32,
            ignore_overrun: false,
        })?;
        let binder = match opening.is_type1() {
            true => {
                let qp = nic.create_qp(
                    pd,
                    QpAttr {
                        send_cq: &binds,
                        recv_cq: &binds,
                        send_blocks: (BATCH.max(settings.credits as usize) as u32 * BIND_BLOCKS)
                            .next_power_of_two(),
                        receive: Receive::None,
                        access: Access::NONE,
                    },
                )?;
                qp.connect(qp.qpn())?;
                Some(qp)
            }
            _ => None,
        };
        let state = State {
            index,
            requests,
            arrived: vec![Completion::EMPTY; BATCH],
            binds,
            binder,
            peers: ClientTable::default(),
            by_management: HashMap::new(),
            short: VecDeque::new(),
            serial: 1,
            allocations: 0,
            frees: 0,
            refused: 0,
        };
        let events = Arc::new(CqEvents::new(nic, pd, &state.requests)?);
        Ok(Self { events, state: Mutex::new(state) })
    }
}

impl<N: Nic> State<N> {
    fn poll(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        // Before new requests: otherwise the chunk could be allocated to the same compute node
        // again first.
        let mut lost = false;
        while self.reclaim_undelivered(shared)? {
            lost = true;
        }
        let mut jobs = self.collect(shared)?;
        let any = !jobs.is_empty();
        if any {
            self.open_and_close(shared, &mut jobs)?;
            self.finish(shared, &jobs)?;
        }
        let back = self.reclaim_departed(shared)? || lost;
        let announced = self.announce_available(shared);
        Ok(self.open_ahead(shared)? || back || announced || any)
    }

    /// Registers a new compute node, which may need chunks opened in advance.
    pub fn add_client(&mut self, client: ClientId) {
        self.short.push_back(client);
    }

    /// The received requests, each with the decision on it.
    fn collect(&mut self, shared: &Shared<N>) -> Result<Vec<Job>, Error> {
        let n = self.requests.poll(&mut self.arrived);
        let mut jobs = Vec::with_capacity(n);
        for i in 0..n {
            if let Some(job) = self.take(shared, self.arrived[i])? {
                jobs.push(job);
            }
        }
        Ok(jobs)
    }

    fn take(&mut self, shared: &Shared<N>, c: Completion) -> Result<Option<Job>, Error> {
        if c.kind != CompletionKind::Receive {
            return Ok(None); // a wake-up
        }
        let Some(&client) = self.by_management.get(&c.qpn) else { return Ok(None) };
        let Some(peer) = self.peers.get_mut(&client) else { return Ok(None) };
        let mut bytes = [0; REQUEST_BYTES];
        let Some(slot) = peer.answers.receive(&c, &mut bytes) else { return Ok(None) };
        let (number, ask) = Request::parse(&bytes);
        let whole = c.bytes as usize == REQUEST_BYTES;
        let groups = peer.access.0.len();
        let step = match ask.filter(|_| whole) {
            Some(Ask::Allocate { group, order })
                if (group as usize) < groups && order <= shared.blocks.order_max() =>
            {
                self.start_allocate(shared, client, GroupId(group), order)?
            }
            Some(Ask::Free { entry }) => self.start_free(shared, client, entry),
            _ => Step::Refuse(Outcome::BadRequest, EntryId::default()),
        };
        Ok(Some(Job { client, slot, number, step }))
    }

    fn start_allocate(
        &mut self,
        shared: &Shared<N>,
        client: ClientId,
        group: GroupId,
        order: Order,
    ) -> Result<Step, Error> {
        loop {
            let mut table = shared.table.lock();
            if shared.opening == Opening::RegisterAhead
                && let Some(entry) = table.take_aside(client, group)
            {
                self.short.push_back(client);
                return Ok(Step::Allocate { entry, open: true, from: None, failed: false });
            }
            if let Some(entry) = table.take(client, group, order) {
                let from = match shared.opening == Opening::Rebind {
                    true => table.take_aside_to_close(client),
                    false => None,
                };
                return Ok(Step::Allocate { entry, open: false, from, failed: false });
            }
            if table.announce_empty(self.index) {
                return Ok(Step::Refuse(Outcome::Empty, EntryId::default()));
            }
            if !table.is_any_aside() {
                return Ok(Step::Refuse(Outcome::NoBlock, EntryId::default()));
            }
            drop(table);
            self.close_aside(shared)?;
        }
    }

    fn start_free(&mut self, shared: &Shared<N>, client: ClientId, entry: EntryId) -> Step {
        let mut table = shared.table.lock();
        if !table.start_free(entry, client) {
            return Step::Refuse(Outcome::NotYours, entry);
        }
        let room = table.aside_for(client) < shared.settings.credits as usize;
        if shared.opening == Opening::Rebind && room {
            table.set_aside(entry, client);
            return Step::SetAside { entry };
        }
        Step::Free { entry, failed: false }
    }

    /// Executes the binds, unbinds and registrations that the jobs need.
    fn open_and_close(&mut self, shared: &Shared<N>, jobs: &mut [Job]) -> Result<(), Error> {
        let mut ops = Vec::with_capacity(jobs.len() * shared.settings.lanes() as usize);
        for (index, job) in jobs.iter_mut().enumerate() {
            let client = job.client;
            match &mut job.step {
                Step::Allocate { entry, open: false, from, failed } => {
                    *failed = !self.open(shared, &mut ops, client, (*entry, *from), index);
                }
                Step::Free { entry, .. } => {
                    self.close(shared, &mut ops, Some(client), *entry, index);
                }
                _ => {}
            }
        }
        self.run(&mut ops)?;
        for op in ops.iter().filter(|op| !op.done) {
            match &mut jobs[op.job].step {
                Step::Allocate { failed, .. } | Step::Free { failed, .. } => *failed = true,
                Step::Refuse(..) | Step::SetAside { .. } => {}
            }
        }
        Ok(())
    }

    /// Opens a chunk, or adds the binds that open it to `ops`. False on failure.
    fn open(
        &mut self,
        shared: &Shared<N>,
        ops: &mut Vec<WindowOp>,
        client: ClientId,
        (entry, from): (EntryId, Option<EntryId>),
        job: usize,
    ) -> bool {
        let mut table = shared.table.lock();
        let group = table.group_of(entry);
        match &mut table.protection {
            Protection::Type2(windows) => {
                let paths = &self.peers[&client].access.0[group.0 as usize];
                for (lane, path) in paths.iter().enumerate() {
                    let lane = Lane(lane as u8);
                    let umr = windows.bind(entry, lane, path.qp.qpn());
                    ops.push(WindowOp { path: Some((client, group, lane)), umr, job, done: false });
                }
                true
            }
            Protection::Type1(windows) => {
                if let Some(from) = from {
                    windows.exchange(entry, from);
                }
                if !windows.is_ahead(entry) {
                    ops.push(WindowOp { path: None, umr: windows.bind(entry), job, done: false });
                }
                true
            }
            Protection::Regions(_) => {
                drop(table);
                let Ok(region) = shared.register(&self.peers[&client].pd, entry) else {
                    return false;
                };
                let Protection::Regions(regions) = &mut shared.table.lock().protection else {
                    unreachable!("the mechanism does not change")
                };
                regions.open(entry, region);
                true
            }
            Protection::Open(_) => true,
        }
    }

    /// Closes a chunk of `client`, or adds the unbinds that close it to `ops`.
    fn close(
        &mut self,
        shared: &Shared<N>,
        ops: &mut Vec<WindowOp>,
        client: Option<ClientId>,
        entry: EntryId,
        job: usize,
    ) {
        let mut table = shared.table.lock();
        let group = table.group_of(entry);
        match &mut table.protection {
            Protection::Type2(windows) => {
                let client = client.expect("a bound type-2 window belongs to a compute node");
                for lane in 0..windows.lanes() {
                    let lane = Lane(lane as u8);
                    let umr = windows.unbind(entry, lane);
                    ops.push(WindowOp { path: Some((client, group, lane)), umr, job, done: false });
                }
            }
            Protection::Type1(windows) => {
                ops.push(WindowOp { path: None, umr: windows.close(entry), job, done: false });
            }
            Protection::Regions(regions) => {
                let region = regions.close(entry);
                drop(table);
                drop(region);
            }
            Protection::Open(_) => {}
        }
    }

    /// Completes the jobs: updates the table and posts the replies in the order of the requests.
    fn finish(&mut self, shared: &Shared<N>, jobs: &[Job]) -> Result<(), Error> {
        let mut closed = Vec::new();
        for job in jobs {
            let reply = match job.step {
                Step::Refuse(outcome, entry) => {
                    let empty = matches!(outcome, Outcome::Empty | Outcome::NoBlock);
                    self.refused += !empty as u64;
                    Reply::bare(job.number, outcome, entry)
                }
                Step::Allocate { entry, from, failed: false, .. } => {
                    self.allocations += 1;
                    closed.extend(from);
                    shared.table.lock().grant(job.number, entry)
                }
                Step::Allocate { entry, from, failed: true, .. } => {
                    self.refused += 1;
                    for entry in [Some(entry), from].into_iter().flatten() {
                        shared.replace_windows(entry)?;
                    }
                    closed.extend(from);
                    shared.table.lock().release(entry);
                    Reply::bare(job.number, Outcome::Failed, entry)
                }
                Step::Free { entry, failed } => {
                    if failed {
                        shared.replace_windows(entry)?;
                    }
                    self.frees += 1;
                    shared.clear(entry);
                    shared.table.lock().release(entry);
                    self.short.push_back(job.client);
                    Reply::bare(job.number, Outcome::Done, entry)
                }
                Step::SetAside { entry } => {
                    self.frees += 1;
                    Reply::bare(job.number, Outcome::Done, entry)
                }
            };
            if let Some(peer) = self.peers.get_mut(&job.client) {
                if reply.outcome == Outcome::Empty {
                    peer.answers.announce_empty();
                }
                peer.answers.answer(job.slot, &reply.to_bytes(), reply.grant());
            }
        }
        // The rebinds invalidated their keys. Clearing them here delays no reply.
        for entry in closed {
            shared.clear(entry);
            shared.table.lock().release(entry);
        }
        Ok(())
    }
}
