//! The memory node's side: the work of the control thread. `worker` executes the requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{MutexGuard, RwLock};
use scheme::client_table::{AccessQps, Requirements};
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, CpuEvents, Error, GroupId, Lane, NodeScheme,
    NodeSettings, NodeStatus, QpSet, Start, Worker, options,
};
use verbs::{Access, Nic, QpAttr, QueuePair, Receive};

use super::connection::Connection;
use super::message::{HEADER_BYTES, ObjectId};
use super::options::{DataOffer, Options};
use super::table::{Table, TableSettings};
use super::worker::{Core, Handle, Shared, State};
use crate::answers::{Answers, AnswersAttr};
use crate::cores::{self, Assignment};
use crate::rpc::blocks::Blocks;

/// Objects of a compute node without a domain, or of a domain, if the pool has fewer chunks.
const OBJECTS_MAX: u64 = 1 << 20;
/// Send blocks of the memory node's side of an access QP, to which nothing is posted.
const ACCESS_BLOCKS: u32 = 16;

/// The memory node of scheme `rpc-data`.
pub struct Node<N: Nic> {
    shared: Arc<Shared<N>>,
    options: Options,
    /// PD of all QPs. No region in it has remote rights.
    pd: N::Pd,
}

impl<N: Nic> Node<N> {
    /// Donates memory according to `settings`.
    pub fn new(nic: &N, settings: &NodeSettings) -> Result<Self, Error> {
        let options = Options::of(settings)?;
        settings.scheme.check_caps(&nic.caps())?;
        let (bytes, unit) = (settings.chunks * settings.chunk_bytes, settings.chunk_bytes);
        let memory = nic.alloc_thin(bytes as usize, unit as usize, settings.kept_bytes)?;
        let pd = nic.alloc_pd()?;
        let table = Table::new(TableSettings {
            blocks: Blocks::of(settings),
            chunk_bytes: settings.chunk_bytes,
            domain_bytes: options.domain_bytes,
            objects_max: OBJECTS_MAX.max(settings.chunks),
        });
        let (count, data_bytes) =
            (options.cores.min(settings.clients_max), options.data_bytes as usize);
        let core = |index| Core::new(nic, &pd, (settings, count), data_bytes, index);
        let shared = Shared {
            nic: nic.clone(),
            settings: settings.clone(),
            data_bytes,
            memory,
            table: RwLock::new(table),
            cores: (0..count as usize).map(core).collect::<Result<_, _>>()?,
            assignment: Assignment::new(count as usize, settings.clients_max),
        };
        Ok(Self { shared: Arc::new(shared), options, pd })
    }

    /// State of the core that serves a compute node.
    fn state_of(&self, client: ClientId) -> MutexGuard<'_, State<N>> {
        self.shared.cores[self.shared.core_of(client)].state.lock()
    }

    fn make_peer(
        &self,
        state: &State<N>,
        request: &ConnectRequest,
    ) -> Result<Connection<N>, Error> {
        let Shared { nic, settings, data_bytes, .. } = &*self.shared;
        let message_bytes = HEADER_BYTES + data_bytes;
        let attr = AnswersAttr {
            credits: settings.credits,
            request_bytes: message_bytes,
            access: Access::NONE,
        };
        let answers = Answers::new(nic, &self.pd, request, &state.requests, attr)?;
        let replies = nic.alloc_dma(settings.credits as usize * message_bytes)?;
        let replies = nic.reg_mr(&self.pd, &replies, Access::NONE)?;
        let access = AccessQps::new(request, |_| {
            let attr = QpAttr {
                send_cq: &state.unused,
                recv_cq: &state.unused,
                send_blocks: ACCESS_BLOCKS,
                receive: Receive::None,
                access: Access::NONE,
            };
            Ok(nic.create_qp(&self.pd, attr)?)
        })?;
        Ok(Connection { answers, replies, access, leaving: None })
    }
}

impl<N: Nic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        let core = self.shared.assignment.least_loaded()?;
        let shared = &self.shared;
        let settings = &shared.settings;
        let mut state = shared.cores[core].state.lock();
        let lanes = settings.lanes() as usize;
        let expected = Requirements { settings, management: 1, lanes, leaving: 0 };
        state.peers.check(client, request, &expected)?;
        let peer = self.make_peer(&state, request)?;
        let qpn = peer.answers.management.qp.qpn();
        let reply = ConnectReply::of(settings, client, vec![qpn.raw()], &peer.access);
        shared.table.write().join(client, request.domain);
        state.by_management.insert(qpn, client);
        state.peers.insert(client, peer);
        shared.assignment.assign(client, core);
        Ok(reply)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let mut state = self.state_of(client);
        let state = &mut *state;
        let Some(peer) = state.peers.get_mut(&client) else { return Ok(()) };
        state.by_management.remove(&peer.answers.management.qp.qpn());
        peer.answers.close()?;
        peer.access.shut_down()?;
        if peer.leaving.is_some() {
            return Ok(());
        }
        peer.answers.drop_unconfirmed();
        let mut table = self.shared.table.write();
        let mut freed = Vec::new();
        // An object of a domain whose name was not delivered would live as long as the domain.
        while let Some(name) = peer.answers.take_lost() {
            freed.extend(table.take_back(client, ObjectId::from_raw(name)));
        }
        freed.extend(table.depart(client));
        peer.leaving = Some(freed);
        self.shared.cores[self.shared.core_of(client)].events.wake();
        Ok(())
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.state_of(client).peers.contains_key(&client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for core in 0..self.shared.cores.len() {
            any |= self.shared.poll(core);
        }
        Ok(any)
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        if self.shared.table.read().has_memory() {
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
        let mut state = self.state_of(client);
        let peer = state.peers.known_mut(client)?;
        let qpn = peer.answers.reconnect()?;
        if peer.answers.has_lost() {
            self.shared.cores[self.shared.core_of(client)].events.wake();
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

    /// A grant names an object, not a place of the memory.
    fn first_chunk(&self) -> Option<u64> {
        None
    }

    fn terms(&self) -> options::Terms {
        let Options { control, data_bytes, .. } = self.options;
        options::terms(&DataOffer { control, data_bytes })
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let settings = &self.shared.settings;
        let mut status = NodeStatus {
            scheme: settings.scheme.name.into(),
            chunk_bytes: settings.chunk_bytes,
            chunks: settings.chunks,
            free: self.shared.table.read().free_chunks(),
            ..NodeStatus::default()
        };
        for core in &self.shared.cores {
            let state = core.state.lock();
            status.leaving += state.peers.leaving();
            status.clients += state.peers.connected();
            status.allocations_cpu += state.counts.allocations;
            status.frees_cpu += state.counts.frees;
            status.refused += state.counts.refused;
        }
        Ok(status)
    }

    fn audit(&self) -> Result<(), Error> {
        let wrong = |why: String| Error::Protocol { attempt: "auditing the pool".into(), why };
        self.shared.table.read().audit().map_err(wrong)
    }
}

#[cfg(test)]
impl<N: Nic> Node<N> {
    /// The donated memory.
    pub(super) fn shared_memory(&self) -> &verbs::DmaMemory {
        &self.shared.memory
    }
}
