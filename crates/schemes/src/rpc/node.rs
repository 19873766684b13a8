//! The memory node's side: the work of the control thread. `worker` answers the requests.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use scheme::client_table::{AccessQps, Requirements};
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, CpuEvents, Error, GroupId, Lane, NodeScheme,
    NodeSettings, NodeStatus, QpSet, Start, Worker, options,
};
use verbs::{Access, MemoryRegion, Nic, QpAttr, QueuePair, Receive};

use super::blocks::Blocks;
use super::connection::Connection;
use super::regions::Regions;
use super::table::{Protection, Table};
use super::view::AllocationView;
use super::windows::{Type1, Type2};
use super::worker::{BIND_BLOCKS, Core, Handle, Shared, State};
use super::{Opening, Options, REQUEST_BYTES, Region};
use crate::answers::{Answers, AnswersAttr};
use crate::cores::{self, Assignment};

/// The memory node of a scheme by RPC.
pub struct Node<N: Nic> {
    shared: Arc<Shared<N>>,
    options: Options,
    assignment: Assignment,
}

impl<N: Nic> Node<N> {
    /// Donates memory according to `settings`.
    pub fn new(nic: &N, settings: &NodeSettings) -> Result<Self, Error> {
        let options = Options::of(settings)?;
        let opening = Opening::of(settings.scheme)?;
        settings.scheme.check_caps(&nic.caps())?;
        let blocks = Blocks::of(settings);
        let lanes = settings.lanes() as usize;
        let pd = nic.alloc_pd()?;
        let (bytes, unit) = (settings.chunks * settings.chunk_bytes, settings.chunk_bytes);
        let memory = nic.alloc_thin(bytes as usize, unit as usize, settings.kept_bytes)?;
        let rights = match opening {
            Opening::Always => Access::LOCAL_ALL | Access::REMOTE_ALL,
            _ => Access::LOCAL_ALL,
        };
        let memory = nic.reg_mr(&pd, &memory, rights)?;
        let protection = match opening {
            Opening::Bind => Protection::Type2(Type2::new(nic, &pd, &memory, blocks, lanes)?),
            Opening::Rebind | Opening::BindAhead => {
                let ahead = opening == Opening::BindAhead;
                Protection::Type1(Type1::new(nic, &pd, &memory, blocks, ahead)?)
            }
            Opening::Register | Opening::RegisterAhead => {
                Protection::Regions(Regions::new(blocks.count()))
            }
            Opening::Always => Protection::Open(memory.key()),
        };
        let count = options.cores.min(settings.clients_max);
        let base = memory.memory().addr();
        let table = Table::new(protection, lanes, base, blocks, count as usize);
        let cores = (0..count as usize)
            .map(|index| Core::new(nic, &pd, (settings, opening, count), index))
            .collect::<Result<Vec<_>, _>>()?;
        let (nic, settings, table) = (nic.clone(), settings.clone(), Mutex::new(table));
        let assignment = Assignment::new(count as usize, settings.clients_max);
        let shared = Arc::new(Shared { nic, settings, opening, pd, memory, blocks, table, cores });
        if opening == Opening::BindAhead {
            shared.cores[0].state.lock().bind_ahead(&shared)?;
        }
        Ok(Self { shared, options, assignment })
    }

    /// A view of the allocations.
    pub fn allocation_view(&self) -> AllocationView<N> {
        AllocationView(self.shared.clone())
    }

    /// Key of the region over all chunks, in a scheme in which all compute nodes have it.
    fn region_key(&self) -> Option<u32> {
        match self.shared.table.lock().protection {
            Protection::Open(key) => Some(key.0),
            _ => None,
        }
    }

    fn core_of(&self, client: ClientId) -> usize {
        self.assignment.core_of(client)
    }

    /// State of the core that serves a compute node.
    pub(super) fn state_of(&self, client: ClientId) -> MutexGuard<'_, State<N>> {
        self.shared.cores[self.core_of(client)].state.lock()
    }

    fn make_peer(
        &self,
        state: &State<N>,
        request: &ConnectRequest,
    ) -> Result<Connection<N>, Error> {
        let settings = &self.shared.settings;
        let (nic, credits) = (&self.shared.nic, settings.credits);
        let pd = match self.shared.opening.is_region() {
            true => nic.alloc_pd()?,
            false => self.shared.pd.clone(),
        };
        let attr = AnswersAttr { credits, request_bytes: REQUEST_BYTES, access: Access::NONE };
        let answers = Answers::new(nic, &pd, request, &state.requests, attr)?;
        let access = AccessQps::new(request, |_| {
            let attr = QpAttr {
                send_cq: &state.binds,
                recv_cq: &state.binds,
                send_blocks: (credits * BIND_BLOCKS).next_power_of_two(),
                receive: Receive::None,
                access: Access::REMOTE_ALL,
            };
            Ok(nic.create_qp(&pd, attr)?)
        })?;
        Ok(Connection { pd, answers, access, leaving: None })
    }
}

impl<N: Nic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        // Departed compute nodes may have left since the last admission.
        for (client, core) in self.assignment.all() {
            if !self.shared.cores[core].state.lock().peers.contains_key(&client) {
                self.assignment.remove(client);
            }
        }
        let core = self.assignment.least_loaded()?;
        let settings = &self.shared.settings;
        let mut state = self.shared.cores[core].state.lock();
        let lanes = settings.lanes() as usize;
        let expected = Requirements { settings, management: 1, lanes, leaving: 0 };
        state.peers.check(client, request, &expected)?;
        let peer = self.make_peer(&state, request)?;
        let management = vec![peer.answers.management.qp.qpn().raw()];
        let region = Region { key: self.region_key() };
        let reply = ConnectReply::of(settings, client, management, &peer.access);
        let admitted = ConnectReply { terms: options::terms(&region), ..reply };
        state.by_management.insert(peer.answers.management.qp.qpn(), client);
        state.peers.insert(client, peer);
        state.add_client(client);
        self.assignment.assign(client, core);
        Ok(admitted)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let mut state = self.state_of(client);
        let state = &mut *state;
        let Some(peer) = state.peers.get_mut(&client) else { return Ok(()) };
        state.by_management.remove(&peer.answers.management.qp.qpn());
        // After the reset, accesses of the compute node are refused. The QPs, now connected to
        // themselves, can still unbind their windows.
        peer.answers.close()?;
        for path in peer.access.iter() {
            path.qp.connect(path.qp.qpn())?;
        }
        peer.leaving = Some(self.shared.table.lock().owned_by(client));
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

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        let core = self.core_of(client);
        let mut state = self.state_of(client);
        if !self.shared.table.lock().announce_empty(core) {
            return Ok(false);
        }
        let peer = state.peers.known_mut(client)?;
        peer.answers.announce_empty();
        Ok(true)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        let mut state = self.state_of(client);
        let peer = state.peers.known_mut(client)?;
        let qpn = peer.answers.reconnect()?;
        if peer.answers.has_lost() {
            self.shared.cores[self.core_of(client)].events.wake();
        }
        Ok(Some(vec![qpn]))
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.state_of(client).peers.management_is_open(client)
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        self.state_of(client).peers.reset_access(client, group, lane)
    }

    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        self.state_of(client).peers.set_start(client, part, start);
    }

    fn cpu(&mut self) -> Cpu {
        let events = self.shared.cores.iter().map(|core| core.events.clone()).collect();
        let worker =
            |core| -> Box<dyn Worker> { Box::new(Handle { shared: self.shared.clone(), core }) };
        cores::cpu(events, worker, self.options.control)
    }

    fn first_chunk(&self) -> Option<u64> {
        Some(self.shared.memory.memory().addr())
    }

    fn terms(&self) -> options::Terms {
        options::terms(&serde_json::json!({ "control": self.options.control }))
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let settings = &self.shared.settings;
        let mut status = NodeStatus {
            scheme: settings.scheme.name.into(),
            chunk_bytes: settings.chunk_bytes,
            ..NodeStatus::default()
        };
        {
            let table = self.shared.table.lock();
            (status.chunks, status.free) = (table.chunks(), table.available());
        }
        for core in &self.shared.cores {
            let state = core.state.lock();
            status.leaving += state.peers.leaving();
            status.clients += state.peers.connected();
            status.allocations_cpu += state.allocations;
            status.frees_cpu += state.frees;
            status.refused += state.refused;
        }
        Ok(status)
    }

    fn audit(&self) -> Result<(), Error> {
        let states: Vec<_> = self.shared.cores.iter().map(|core| core.state.lock()).collect();
        let exists = |client| states.iter().any(|state| state.peers.contains_key(&client));
        self.shared.table.lock().audit(exists)
    }
}
