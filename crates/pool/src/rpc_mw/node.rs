//! The memory node's side of `rpc-mw-2`: the CPU that answers.
//!
//! A turn takes what requests have arrived (at most [`BATCH`]), decides on each, posts all their
//! binds and unbinds with one doorbell per access QP, waits for them, clears what was freed and
//! posts the replies.

use std::collections::HashMap;
use std::sync::Arc;

use fabric::wqe::Umr;
use fabric::{
    Access, Completion, CompletionKind, CompletionQueue, CqAttr, Key, MemoryRegion, Nic, Op,
    QpAttr, QpChange, Qpn, QueuePair, Receive, ReceiveAttr, Remote, Status, WorkRequest,
};

use super::peer::{Path, Peer};
use super::table::{Owner, Table};
use super::{Ask, Outcome, REPLY_BYTES, REQUEST_BYTES, Reply, Request};
use crate::Error;
use crate::events::{CqEvents, poll_until};
use crate::scheme::{
    Admission, Admitted, ClientId, CpuEvents, GroupId, Lane, MAX_GROUP, NodeScheme, NodeStatus,
    bulletin,
};
use crate::settings::{SchemeKind, Settings};

/// Requests that one turn answers at most.
const BATCH: usize = 64;
/// Bytes that one turn clears at most of what a compute node had that has gone.
const CLEAR_BYTES: u64 = 1 << 20;
/// Building blocks of a UMR that binds.
const BIND_BLOCKS: u32 = 3;
/// Building blocks that answering one request takes of a management QP: the reply, the bulletin
/// before it, and the bulletin that takes that back.
const ANSWER_BLOCKS: u32 = 4;

/// The memory node of `rpc-mw-2`.
pub struct Node<N: Nic> {
    nic: N,
    settings: Settings,
    pd: N::Pd,
    /// Requests of all compute nodes arrive here.
    requests: N::Cq,
    /// Completions that were polled there.
    arrived: Vec<Completion>,
    /// Binds and unbinds complete here.
    binds: N::Cq,
    events: Arc<CqEvents<N>>,
    table: Table<N>,
    peers: HashMap<ClientId, Peer<N>>,
    by_management: HashMap<Qpn, ClientId>,
    /// Id of the next bind or unbind.
    serial: u64,
    allocations: u64,
    frees: u64,
    refused: u64,
}

/// A request on its way through a turn.
struct Job {
    client: ClientId,
    slot: u32,
    number: u64,
    step: Step,
}

enum Step {
    Refuse(Outcome, u32),
    Allocate { entry: u32, failed: bool },
    Free { entry: u32, failed: bool },
}

/// One bind or unbind.
struct WindowOp {
    client: ClientId,
    group: GroupId,
    lane: Lane,
    umr: Umr,
    job: usize,
    done: bool,
}

impl<N: Nic> Node<N> {
    /// Donates memory as `settings` say.
    pub fn new(nic: &N, settings: &Settings) -> Result<Self, Error> {
        settings.validate()?;
        let caps = nic.caps();
        if !caps.windows || (caps.max_inline as usize) < REPLY_BYTES {
            return Err(Error::Setting {
                setting: "scheme",
                value: SchemeKind::RpcMw2.name().into(),
                why: format!("the NIC {} has no type-2 windows or no inline data", caps.name),
            });
        }
        let pd = nic.alloc_pd()?;
        let in_flight = settings.clients_max * settings.credits;
        let requests = nic.create_cq(CqAttr {
            entries: 2 * in_flight + CqEvents::<N>::MARGIN,
            ignore_overrun: false,
        })?;
        let binds = nic.create_cq(CqAttr {
            entries: 2 * BATCH.max(settings.credits as usize) as u32 * MAX_GROUP as u32,
            ignore_overrun: false,
        })?;
        Ok(Self {
            events: Arc::new(CqEvents::new(nic, &pd, &requests)?),
            table: Table::new(nic, &pd, settings)?,
            nic: nic.clone(),
            settings: settings.clone(),
            pd,
            requests,
            arrived: vec![Completion::EMPTY; BATCH],
            binds,
            peers: HashMap::new(),
            by_management: HashMap::new(),
            serial: 1,
            allocations: 0,
            frees: 0,
            refused: 0,
        })
    }

    fn make_peer(&self, request: &Admission) -> Result<Peer<N>, Error> {
        let (nic, credits) = (&self.nic, self.settings.credits);
        let lanes = self.settings.lanes() as usize;
        let [management_peer] = request.management[..] else {
            return Err(refuse(format!(
                "scheme rpc-mw-2 has one management QP, {} were named",
                request.management.len()
            )));
        };
        if !(1..=self.settings.groups_max as usize).contains(&request.groups.len()) {
            return Err(refuse(format!(
                "{} QP groups were named, 1 to {} are served",
                request.groups.len(),
                self.settings.groups_max
            )));
        }
        let blocks = (credits * ANSWER_BLOCKS).next_power_of_two();
        let replies = nic.create_cq(CqAttr { entries: blocks, ignore_overrun: false })?;
        let management = nic.create_qp(
            &self.pd,
            QpAttr {
                send_cq: &replies,
                recv_cq: &self.requests,
                send_blocks: blocks,
                receive: Receive::Own(ReceiveAttr { entries: credits, max_sges: 1 }),
                access: Access::NONE,
            },
        )?;
        let inbox = nic.alloc_dma(credits as usize * REQUEST_BYTES)?;
        let mut groups = Vec::with_capacity(request.groups.len());
        for group in &request.groups {
            if group.len() != lanes {
                return Err(refuse(format!(
                    "a QP group of {} QPs was named; windows of a group of {} serve {lanes}",
                    group.len(),
                    self.settings.group_size
                )));
            }
            groups.push(group.iter().map(|peer| self.make_path(*peer)).collect::<Result<_, _>>()?);
        }
        let mut peer = Peer {
            management,
            management_peer: Qpn::new(management_peer),
            epoch: 0,
            replies,
            inbox: nic.reg_mr(&self.pd, &inbox, Access::LOCAL_ALL)?,
            groups,
            bulletin: Remote { addr: request.bulletin_addr, rkey: Key(request.bulletin_rkey) },
            generation: 0,
            told_empty: false,
            broken: false,
            leaving: None,
        };
        peer.connect_management(credits)?;
        Ok(peer)
    }

    fn make_path(&self, peer: u32) -> Result<Path<N>, Error> {
        let attr = QpAttr {
            send_cq: &self.binds,
            recv_cq: &self.binds,
            send_blocks: (self.settings.credits * BIND_BLOCKS).next_power_of_two(),
            receive: Receive::None,
            access: Access::REMOTE_ALL,
        };
        let path: Path<N> = Path { qp: self.nic.create_qp(&self.pd, attr)?, peer: Qpn::new(peer) };
        path.qp.connect(path.peer)?;
        Ok(path)
    }

    /// The requests that have arrived, each with what to do.
    fn collect(&mut self) -> Vec<Job> {
        let n = self.requests.poll(&mut self.arrived);
        (0..n).filter_map(|i| self.take(self.arrived[i])).collect()
    }

    fn take(&mut self, c: Completion) -> Option<Job> {
        if c.kind != CompletionKind::Receive {
            return None; // somebody woke us
        }
        let client = *self.by_management.get(&c.qpn)?;
        let peer = self.peers.get_mut(&client)?;
        if (c.id >> 32) as u32 != peer.epoch {
            return None;
        }
        if c.status != Status::Success {
            peer.broken = true;
            return None;
        }
        let slot = c.id as u32;
        let mut bytes = [0; REQUEST_BYTES];
        peer.inbox.memory().read(slot as usize * REQUEST_BYTES, &mut bytes);
        let (number, ask) = Request::parse(&bytes);
        let whole = c.bytes as usize == REQUEST_BYTES;
        let step = match ask.filter(|_| whole) {
            Some(Ask::Allocate { group }) if (group as usize) < peer.groups.len() => {
                match self.table.take(client, GroupId(group)) {
                    Some(entry) => Step::Allocate { entry, failed: false },
                    None => Step::Refuse(Outcome::Empty, 0),
                }
            }
            Some(Ask::Free { entry }) => match self.table.start_free(entry, client) {
                true => Step::Free { entry, failed: false },
                false => Step::Refuse(Outcome::NotYours, entry),
            },
            _ => Step::Refuse(Outcome::BadRequest, 0),
        };
        Some(Job { client, slot, number, step })
    }

    /// Binds and unbinds what the jobs need.
    fn move_windows(&mut self, jobs: &mut [Job]) -> Result<(), Error> {
        let mut ops = Vec::with_capacity(jobs.len() * self.table.lanes());
        for (index, job) in jobs.iter().enumerate() {
            let (entry, bind) = match job.step {
                Step::Allocate { entry, .. } => (entry, true),
                Step::Free { entry, .. } => (entry, false),
                Step::Refuse(..) => continue,
            };
            self.window_ops(&mut ops, job.client, entry, bind, index);
        }
        self.run(&mut ops)?;
        for op in ops.iter().filter(|op| !op.done) {
            match &mut jobs[op.job].step {
                Step::Allocate { failed, .. } | Step::Free { failed, .. } => *failed = true,
                Step::Refuse(..) => {}
            }
        }
        Ok(())
    }

    fn window_ops(
        &mut self,
        ops: &mut Vec<WindowOp>,
        client: ClientId,
        entry: u32,
        bind: bool,
        job: usize,
    ) {
        let group = self.table.group_of(entry);
        for lane in 0..self.table.lanes() {
            let lane = Lane(lane as u8);
            let umr = if bind {
                let qpn = self.peers[&client].groups[group.0 as usize][lane.0 as usize].qp.qpn();
                self.table.bind(entry, lane, qpn)
            } else {
                self.table.unbind(entry, lane)
            };
            ops.push(WindowOp { client, group, lane, umr, job, done: false });
        }
    }

    /// Executes the operations and waits for them. What fails because its QP is in the error state
    /// (its compute node made a bad access) is tried again on the same QP, connected anew.
    fn run(&mut self, ops: &mut [WindowOp]) -> Result<(), Error> {
        ops.sort_by_key(|op| (op.client, op.group, op.lane));
        self.run_once(ops)?;
        if ops.iter().all(|op| op.done) {
            return Ok(());
        }
        for run in ops.chunk_by(same_path).filter(|run| run.iter().any(|o| !o.done)) {
            if let Some(path) = self.path(&run[0]) {
                path.qp.connect(path.peer)?;
            }
        }
        self.run_once(ops)
    }

    fn run_once(&mut self, ops: &mut [WindowOp]) -> Result<(), Error> {
        let first = self.serial;
        self.serial += ops.len() as u64;
        let mut posted = 0;
        let mut list = Vec::with_capacity(ops.len());
        let mut index = 0;
        for run in ops.chunk_by(same_path) {
            list.clear();
            for op in run {
                if !op.done {
                    let id = first + index;
                    list.push(WorkRequest { id, op: Op::Window(&op.umr), signaled: true });
                }
                index += 1;
            }
            // A compute node has at most `credits` requests in a turn, which its QPs have room for.
            if let Some(path) = self.path(&run[0])
                && !list.is_empty()
                && path.qp.post_send(&list).is_ok()
            {
                posted += list.len();
            }
        }
        poll_until(&self.binds, posted, |c| {
            let Some(op) = c.id.checked_sub(first).and_then(|i| ops.get_mut(i as usize)) else {
                return false; // of an earlier run
            };
            op.done = c.status == Status::Success;
            true
        })
    }

    /// Takes back some of what compute nodes had that have gone: as much as it takes little time to
    /// clear. True if there was any.
    fn take_back(&mut self) -> Result<bool, Error> {
        let gone = self.peers.iter_mut().find(|(_, peer)| peer.leaving.is_some());
        let Some((&client, peer)) = gone else { return Ok(false) };
        let some = (CLEAR_BYTES / self.settings.chunk_bytes).clamp(1, self.settings.credits as u64);
        let entries = peer.leaving.as_mut().expect("just seen");
        let some = entries.split_off(entries.len() - entries.len().min(some as usize));
        if some.is_empty() {
            self.peers.remove(&client);
            return Ok(true);
        }
        let mut ops = Vec::with_capacity(some.len() * self.table.lanes());
        for (job, entry) in some.iter().enumerate() {
            self.window_ops(&mut ops, client, *entry, false, job);
        }
        ops.sort_by_key(|op| (op.group, op.lane));
        self.run_once(&mut ops)?;
        for op in ops.iter().filter(|op| !op.done) {
            self.table.replace_windows(&self.nic, &self.pd, some[op.job])?;
        }
        for entry in some {
            self.table.clear(entry);
            self.table.release(entry);
        }
        self.tell_available();
        Ok(true)
    }

    fn path(&self, op: &WindowOp) -> Option<&Path<N>> {
        self.peers.get(&op.client)?.groups.get(op.group.0 as usize)?.get(op.lane.0 as usize)
    }

    /// Ends the jobs: chunks change hands, replies are posted in the order of the requests.
    fn finish(&mut self, jobs: &[Job]) -> Result<(), Error> {
        for job in jobs {
            let reply = match job.step {
                Step::Refuse(outcome, entry) => {
                    self.refused += (outcome != Outcome::Empty) as u64;
                    Reply::bare(job.number, outcome, entry)
                }
                Step::Allocate { entry, failed: false } => {
                    self.allocations += 1;
                    self.table.grant(job.number, entry)
                }
                Step::Allocate { entry, failed: true } => {
                    self.refused += 1;
                    self.table.replace_windows(&self.nic, &self.pd, entry)?;
                    self.table.release(entry);
                    Reply::bare(job.number, Outcome::Failed, entry)
                }
                Step::Free { entry, failed } => {
                    if failed {
                        self.table.replace_windows(&self.nic, &self.pd, entry)?;
                    }
                    self.frees += 1;
                    self.table.clear(entry);
                    self.table.release(entry);
                    Reply::bare(job.number, Outcome::Done, entry)
                }
            };
            if let Some(peer) = self.peers.get_mut(&job.client) {
                peer.answer(job.slot, reply);
            }
        }
        self.tell_available();
        Ok(())
    }

    /// Takes "empty" back where it was said.
    fn tell_available(&mut self) {
        if self.table.free() > 0 {
            for peer in self.peers.values_mut().filter(|p| p.told_empty) {
                peer.told_empty = false;
                peer.post_bulletin(bulletin::AVAILABLE);
            }
        }
    }
}

impl<N: Nic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &Admission) -> Result<Admitted, Error> {
        if self.peers.len() >= self.settings.clients_max as usize {
            return Err(refuse(format!("{} compute nodes are connected", self.peers.len())));
        }
        let peer = self.make_peer(request)?;
        let admitted = Admitted {
            client: client.0,
            chunk_bytes: self.settings.chunk_bytes,
            group_size: self.settings.group_size,
            credits: self.settings.credits,
            management: vec![peer.management.qpn().raw()],
            groups: peer
                .groups
                .iter()
                .map(|group| group.iter().map(|path| path.qp.qpn().raw()).collect())
                .collect(),
        };
        self.by_management.insert(peer.management.qpn(), client);
        self.peers.insert(client, peer);
        Ok(admitted)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let Some(peer) = self.peers.get_mut(&client) else { return Ok(()) };
        self.by_management.remove(&peer.management.qpn());
        peer.leaving = Some(self.table.owned_by(client));
        (peer.broken, peer.told_empty) = (true, false);
        // From the reset on its accesses are refused; the QPs, connected to nobody but themselves,
        // still unbind their windows.
        peer.management.modify(QpChange::Reset)?;
        for path in peer.groups.iter().flatten() {
            path.qp.connect(path.qp.qpn())?;
        }
        Ok(())
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.peers.contains_key(&client)
    }

    fn turn(&mut self) -> Result<bool, Error> {
        let mut jobs = self.collect();
        let any = !jobs.is_empty();
        if any {
            self.move_windows(&mut jobs)?;
            self.finish(&jobs)?;
        }
        Ok(self.take_back()? || any)
    }

    fn is_watching(&self) -> bool {
        false // every free passes through this CPU
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        if self.table.free() > 0 {
            return Ok(false);
        }
        let peer = self.peers.get_mut(&client).ok_or_else(|| refuse(NOT_ADMITTED))?;
        peer.tell_empty();
        Ok(true)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        let credits = self.settings.credits;
        let peer = self.peers.get_mut(&client).ok_or_else(|| refuse(NOT_ADMITTED))?;
        peer.management.modify(QpChange::Error)?;
        peer.epoch += 1;
        peer.connect_management(credits)?;
        Ok(Some(vec![peer.management.qpn().raw()]))
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        let peer = self.peers.get(&client).ok_or_else(|| refuse(NOT_ADMITTED))?;
        let path = peer
            .groups
            .get(group.0 as usize)
            .and_then(|g| g.get(lane.0 as usize))
            .ok_or_else(|| refuse(format!("group {} has no lane {}", group.0, lane.0)))?;
        path.qp.connect(path.peer)?;
        Ok(path.qp.qpn().raw())
    }

    fn events(&self) -> Option<Arc<dyn CpuEvents>> {
        Some(self.events.clone())
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        Ok(NodeStatus {
            scheme: SchemeKind::RpcMw2.name().into(),
            chunk_bytes: self.settings.chunk_bytes,
            chunks: self.table.chunks(),
            free: self.table.free(),
            clients: self.peers.values().filter(|p| p.leaving.is_none()).count() as u64,
            leaving: self.peers.values().filter(|p| p.leaving.is_some()).count() as u64,
            allocations_nic: 0,
            allocations_cpu: self.allocations,
            frees_nic: 0,
            frees_cpu: self.frees,
            refused: self.refused,
            budget: None,
        })
    }

    fn audit(&self) -> Result<(), Error> {
        self.table.audit(|owner| match owner {
            Owner::Client(client) => self.peers.contains_key(&client),
            Owner::Nobody => true,
        })
    }
}

const NOT_ADMITTED: &str = "this compute node is not admitted";

fn refuse(why: impl ToString) -> Error {
    Error::Refused { attempt: "admitting a compute node".into(), why: why.to_string() }
}

fn same_path(a: &WindowOp, b: &WindowOp) -> bool {
    (a.client, a.group, a.lane) == (b.client, b.group, b.lane)
}
