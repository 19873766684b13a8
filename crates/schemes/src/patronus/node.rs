//! The memory node's side: the work of the control thread. `worker` answers the requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::MutexGuard;
use scheme::client_table::{AccessQps, Requirements};
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, CpuEvents, Error, GroupId, Lane, LeaseStatus,
    NodeScheme, NodeSettings, NodeStatus, QpSet, Start, Worker, options,
};
use verbs::{Access, Key, MemoryRegion, Nic, QpAttr, QueuePair, Receive};

use super::book::{Book, BookSettings};
use super::connection::Connection;
use super::door::manager::ManagerWindows;
use super::door::{Door, DoorKind, QpWindows, Regions, Windows};
use super::header::HEADER_BYTES;
use super::headers::Headers;
use super::lifetimes::{Table, Tables};
use super::message::REQUEST_BYTES;
use super::options::{LeaseOffer, Options, UnprotectedTerms};
use super::view::LeaseView;
use super::worker::{BINDER_BLOCKS, Core, Handle, Shared, State};
use crate::answers::{Answers, AnswersAttr};
use crate::cores;
use crate::rpc::blocks::Blocks;

/// Objects of a compute node without a domain, or of a domain, if the pool has fewer chunks.
const OBJECTS_MAX: u64 = 1 << 20;

/// The memory node of scheme `patronus`.
pub struct Node<N: Nic> {
    shared: Arc<Shared<N>>,
    /// The donated memory with all rights, in scheme `unprotected`.
    all: Option<N::Mr>,
}

impl<N: Nic> Node<N> {
    /// Donates memory according to `settings`.
    pub fn new(nic: &N, settings: &NodeSettings) -> Result<Self, Error> {
        let options = Options::of(settings)?;
        settings.scheme.check_caps(&nic.caps())?;
        let (bytes, unit) = (settings.chunks * settings.chunk_bytes, settings.chunk_bytes);
        let memory = nic.alloc_thin(bytes as usize, unit as usize, settings.kept_bytes)?;
        let pd = nic.alloc_pd()?;
        let kind = super::door_of(settings.scheme);
        let book = Book::new(BookSettings {
            blocks: Blocks::of(settings),
            chunk_bytes: settings.chunk_bytes,
            lease_min_us: options.lease_min_us,
            lease_max_us: options.lease_max_us,
            permissions_max: options.permissions_max,
            waiting_max: (settings.credits / 2).max(1),
            domain_bytes: options.domain_bytes,
            objects_max: OBJECTS_MAX.max(settings.chunks),
            deviations: options.deviations(settings.scheme),
        });
        let count = options.cores.min(settings.clients_max);
        let cores = (0..count as usize)
            .map(|index| Core::new(nic, &pd, (settings, count), index))
            .collect::<Result<Vec<_>, _>>()?;
        let tables = match kind {
            DoorKind::Manager => {
                let each = options.headers_each(bytes, count);
                let pool = nic.alloc_dma((each * u64::from(count) * HEADER_BYTES) as usize)?;
                for (first, core) in (0..).step_by(each as usize).zip(&cores) {
                    let regions = (
                        nic.reg_mr(&pd, &memory, Access::LOCAL_ALL)?,
                        nic.reg_mr(&pd, &pool, Access::LOCAL_ALL)?,
                    );
                    let (part, techniques) = (first..first + each, options.techniques);
                    let mut state = core.state.lock();
                    let binds = (&state.binds, BINDER_BLOCKS);
                    let windows = ManagerWindows::new(nic, &pd, regions, part, techniques, binds)?;
                    state.published = Some(windows);
                }
                Tables::published(Headers::new(pool, memory.clone()))
            }
            _ => Tables::default(),
        };
        let all = match kind {
            DoorKind::Unprotected => {
                Some(nic.reg_mr(&pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL)?)
            }
            _ => None,
        };
        let (nic, own) = ((nic.clone(), pd), (settings.clone(), options));
        let shared = Shared::new(nic, own, (memory, tables), book, cores);
        Ok(Self { shared: Arc::new(shared), all })
    }

    /// A view of the book, for external checkers.
    pub fn lease_view(&self) -> LeaseView<N> {
        LeaseView(self.shared.clone())
    }

    /// State of the core that serves a compute node.
    fn state_of(&self, client: ClientId) -> MutexGuard<'_, State<N>> {
        self.shared.cores[self.shared.core_of(client)].state.lock()
    }

    /// The key to all memory, in scheme `unprotected`.
    fn key_to_all(&self) -> Key {
        self.all.as_ref().map(MemoryRegion::key).unwrap_or_default()
    }

    fn make_peer(
        &self,
        state: &State<N>,
        request: &ConnectRequest,
    ) -> Result<Connection<N>, Error> {
        let Shared { nic, settings, options, memory, .. } = &*self.shared;
        let kind = super::door_of(settings.scheme);
        let pd = if kind.has_common_pd() { self.shared.pd.clone() } else { nic.alloc_pd()? };
        // One receive more than the credits is for requests that end permissions, which must not
        // wait behind those that wait for permissions to end.
        let attr = AnswersAttr {
            credits: settings.credits + 1,
            request_bytes: REQUEST_BYTES,
            access: Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        };
        let answers = Answers::new(nic, &pd, request, &state.requests, attr)?;
        let qp = |send_blocks, access| -> Result<N::Qp, Error> {
            let attr = QpAttr {
                send_cq: &state.binds,
                recv_cq: &state.binds,
                send_blocks,
                receive: Receive::None,
                access,
            };
            Ok(nic.create_qp(&pd, attr)?)
        };
        let access = AccessQps::new(request, |_| qp(BINDER_BLOCKS, Access::REMOTE_ALL))?;
        let binder = qp(BINDER_BLOCKS, Access::NONE)?;
        binder.connect(binder.qpn())?;
        let region = || nic.reg_mr(&pd, memory, Access::LOCAL_ALL);
        let door = match kind {
            DoorKind::Window => Door::Window(Windows::new(nic, &pd, region()?)?),
            DoorKind::QpWindows => {
                let lanes = settings.lanes() as usize;
                Door::QpWindows(QpWindows::new(nic, &pd, region()?, lanes)?)
            }
            DoorKind::Region => Door::Region(Regions::new(&pd, memory)),
            DoorKind::Manager => Door::Manager,
            DoorKind::Unprotected => Door::Unprotected(self.key_to_all()),
        };
        let mut lifetimes = None;
        if !kind.has_common_pd() {
            let table = Table::new(nic, &pd, options.permissions_max)?;
            answers.bind(&table.bind(answers.management.qp.qpn()))?;
            lifetimes = Some(table);
        }
        let spares = request.groups.len() as u64 * u64::from(settings.lanes() * options.spares);
        let numbers = vec![0; attr.credits as usize];
        let leaving = false;
        Ok(Connection { answers, access, door, binder, lifetimes, numbers, spares, leaving })
    }
}

impl<N: Nic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        let core = self.shared.assignment.least_loaded()?;
        let shared = &self.shared;
        let settings = &shared.settings;
        let mut state = shared.cores[core].state.lock();
        let lanes = (settings.lanes() * (1 + shared.options.spares)) as usize;
        let expected = Requirements { settings, management: 1, lanes, leaving: 0 };
        state.peers.check(client, request, &expected)?;
        let peer = self.make_peer(&state, request)?;
        let qpn = peer.answers.management.qp.qpn();
        let reply = ConnectReply::of(settings, client, vec![qpn.raw()], &peer.access);
        let terms = match (&peer.lifetimes, &peer.door) {
            (Some(table), _) => options::terms(&table.terms()),
            (None, Door::Unprotected(key)) => options::terms(&UnprotectedTerms {
                memory_addr: shared.memory.addr(),
                memory_key: key.0,
            }),
            _ => reply.terms.clone(),
        };
        let admitted = ConnectReply { terms, ..reply };
        if let Some(table) = &peer.lifetimes {
            shared.tables.insert(client, table.memory());
        }
        shared.with_book(|book| book.join(client, request.domain));
        state.by_management.insert(qpn, client);
        state.peers.insert(client, peer);
        shared.assignment.assign(client, core);
        if let Some(period) = shared.options.poll_qps() {
            shared.cores[core].begin_heartbeats(shared.nic.now(), period);
        }
        Ok(admitted)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let mut effects = Vec::new();
        self.state_of(client).depart(&self.shared, client, &mut effects)?;
        self.shared.give(effects);
        // Also without effects, the core removes the compute node.
        self.shared.cores[self.shared.core_of(client)].events.wake();
        Ok(())
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.state_of(client).peers.contains_key(&client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for core in 0..self.shared.cores.len() {
            any |= self.shared.poll(core)?;
        }
        Ok(any)
    }

    fn next_poll(&self) -> Option<Duration> {
        (0..self.shared.cores.len()).filter_map(|core| self.shared.next_poll(core)).min()
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        if self.shared.book.lock().has_memory() {
            return Ok(false);
        }
        let mut state = self.state_of(client);
        state.peers.known_mut(client)?.answers.announce_empty();
        let core = &self.shared.cores[self.shared.core_of(client)];
        if !core.announced_empty.swap(true, Ordering::AcqRel) {
            // Memory may have become free since the question above.
            core.events.wake();
        }
        Ok(true)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        let mut effects = Vec::new();
        let qpn = {
            let mut state = self.state_of(client);
            // Before the attempt: one that fails half-way may lose grants, too.
            state.has_undelivered = true;
            let qpn = state.peers.known_mut(client)?.answers.reconnect()?;
            let (now, tables) = (self.shared.nic.now(), &self.shared.tables);
            self.shared.with_book(|book| {
                book.forget_requests(now, client, &mut &*tables, &mut effects);
            });
            qpn
        };
        self.shared.give(effects);
        // The core takes back what was not delivered.
        self.shared.cores[self.shared.core_of(client)].events.wake();
        Ok(Some(vec![qpn]))
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.state_of(client).peers.management_is_open(client)
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        let mut state = self.state_of(client);
        state.counts.qp_resets += 1;
        state.peers.reset_access(client, group, lane)
    }

    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        self.state_of(client).peers.set_start(client, part, start);
    }

    fn cpu(&mut self) -> Cpu {
        let events = self.shared.cores.iter().map(|core| core.events.clone()).collect();
        let worker =
            |core| -> Box<dyn Worker> { Box::new(Handle { shared: self.shared.clone(), core }) };
        cores::cpu(events, worker, self.shared.options.control)
    }

    fn first_chunk(&self) -> Option<u64> {
        Some(self.shared.memory.addr())
    }

    fn terms(&self) -> options::Terms {
        options::terms(&LeaseOffer::from(&self.shared.options))
    }

    fn spares(&self) -> u32 {
        self.shared.options.spares
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let settings = &self.shared.settings;
        let mut status = NodeStatus {
            scheme: settings.scheme.name.into(),
            chunk_bytes: settings.chunk_bytes,
            chunks: settings.chunks,
            ..NodeStatus::default()
        };
        let mut lease: LeaseStatus = {
            let book = self.shared.book.lock();
            status.free = book.free_chunks();
            book.status()
        };
        for core in &self.shared.cores {
            let state = core.state.lock();
            status.leaving += state.peers.leaving();
            status.clients += state.peers.connected();
            let counts = &state.counts;
            status.allocations_cpu += counts.allocations;
            status.frees_cpu += counts.frees;
            status.refused += counts.refused;
            lease.extensions_rpc += counts.extensions;
            lease.binds += counts.binds;
            lease.unbinds += counts.unbinds;
            lease.handovers += counts.handovers;
            lease.qp_resets += counts.qp_resets;
            lease.windows += state.published.as_ref().map_or(0, |windows| windows.count() as u64);
            lease.heartbeats += counts.heartbeats;
            lease.dead_qps += counts.dead_qps;
            for peer in state.peers.values() {
                lease.windows += peer.door.count() as u64;
                lease.spares += peer.spares;
            }
        }
        Ok(NodeStatus { lease: Some(lease), ..status })
    }

    fn audit(&self) -> Result<(), Error> {
        let wrong = |why: String| Error::Protocol { attempt: "auditing the pool".into(), why };
        for core in &self.shared.cores {
            if let Some(windows) = &core.state.lock().published {
                windows.audit().map_err(wrong)?;
            }
        }
        self.shared.book.lock().audit().map_err(wrong)
    }
}
