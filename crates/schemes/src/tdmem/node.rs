//! The memory node's side of `tdmem` that its CPU executes: admission, bulletins, and the pages of
//! departed compute nodes. The [engine](super::engine) does all else.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use scheme::client_table::{AccessQps, ClientTable, PeerQp, Requirements, refuse};
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, Error, GroupId, Lane, NodeScheme, NodeSettings,
    NodeStatus, QpSet, Start,
};
use verbs::{
    Access, DmaMemory, Key, MemoryRegion, Nic, QpAttr, QpChange, QueuePair, Receive, Remote, Zeros,
};

use super::administrator::Administrator;
use super::connection::Connection;
use super::engine::Engine;
use super::layout::{CONTROL_BYTES, Layout, Owner, Peer};
use super::options::{Options, Region};
use super::random::Random;
use super::table::Tables;
use super::{PAGE_BYTES, Tier};
use crate::chain::availability::{AvailabilityNotifier, BULLETIN_BLOCKS};

/// The scheme's memory-node side on the NIC `N`.
pub struct Node<N: Nic> {
    nic: N,
    settings: NodeSettings,
    pd: N::Pd,
    layout: Layout,
    region: N::Mr,
    tables: Arc<Tables>,
    administrator: Administrator<N>,
    notice: AvailabilityNotifier<N>,
    clients: ClientTable<Connection<N>>,
    /// Numbers of owners that no compute node has.
    owners: Vec<Owner>,
}

impl<N: Nic> Node<N> {
    /// Allocates the memory, and registers it behind an engine.
    pub fn new(nic: N, settings: NodeSettings) -> Result<Self, Error> {
        settings.scheme.check_caps(&nic.caps())?;
        let options = Options::of(&settings)?;
        let fast = options.fast_pages(&settings)?;
        let owners = Owner::try_from(settings.clients_max).unwrap_or(Owner::MAX);
        let pages = settings.chunks as u32;
        let layout = Layout { owners, slots: settings.credits, pages };
        let pd = nic.alloc_pd()?;
        let kept = layout.page(0) as usize + settings.kept_bytes;
        let memory = nic.alloc_thin(layout.bytes() as usize, PAGE_BYTES, kept)?;
        let tables = Arc::new(Tables::new(pages, fast));
        let random = Random::new(options.seed)?;
        let engine = Engine::new(memory.clone(), layout, tables.clone(), random);
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let region = nic.reg_engine_mr(&pd, &memory, access, Box::new(engine))?;
        Ok(Self {
            administrator: Administrator::new(&nic, &pd, &region, layout)?,
            notice: AvailabilityNotifier::new(&nic, settings.clients_max)?,
            nic,
            settings,
            pd,
            layout,
            region,
            tables,
            clients: ClientTable::default(),
            owners: (1..=owners).rev().collect(),
        })
    }

    /// The donor's tables, for external checkers.
    pub fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// The addresses of the region.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The memory of the region.
    pub fn memory(&self) -> &DmaMemory {
        self.region.memory()
    }

    /// The key of the region.
    pub fn key(&self) -> Key {
        self.region.key()
    }

    /// The compute nodes that own pages, by their numbers as owners.
    pub fn owners(&self) -> impl Iterator<Item = (Owner, ClientId)> {
        self.clients.iter().map(|(client, c)| (c.owner, *client))
    }

    fn qp(&self, access: Access) -> Result<N::Qp, Error> {
        let attr = QpAttr {
            send_cq: &self.notice.written,
            recv_cq: &self.notice.written,
            send_blocks: BULLETIN_BLOCKS,
            receive: Receive::None,
            access,
        };
        Ok(self.nic.create_qp(&self.pd, attr)?)
    }

    fn connection(&self, request: &ConnectRequest, owner: Owner) -> Result<Connection<N>, Error> {
        let [management] = request.management[..] else {
            return Err(refuse("the request must name one management QP"));
        };
        let qp = self.qp(Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        qp.modify(QpChange::Tag { tag: Peer::Donee(owner).tag() })?;
        let connection = Connection {
            owner,
            management: PeerQp { qp, peer: request.peer(management) },
            access: AccessQps::new(request, |_| self.qp(Access::NONE))?,
            bulletin: Remote { addr: request.bulletin_addr, rkey: Key(request.bulletin_rkey) },
            leaving: false,
        };
        connection.management.connect()?;
        Ok(connection)
    }

    /// Clears the slots of an owner whose QPs are dead. Otherwise the next compute node with this
    /// number could take an old answer for its own.
    fn clear_slots(&self, owner: Owner) {
        let (first, slots) =
            (self.layout.first_slot(Peer::Donee(owner)), u64::from(self.layout.slots));
        let mut zeros = Zeros::default();
        for (at, bytes) in [
            (self.layout.data(first), PAGE_BYTES as u64),
            (self.layout.command(first), CONTROL_BYTES),
        ] {
            let len = (slots * bytes) as usize;
            self.nic.zero(&mut zeros, self.region.memory(), at as usize, len);
        }
    }

    /// Frees the pages of departed compute nodes, one slice at a time. Returns true if a slice was
    /// executed or begun.
    fn advance_reclamation(&mut self) -> Result<bool, Error> {
        let slice = self.administrator.poll()?;
        match slice {
            Some(slice) if slice.next != 0 => {
                self.administrator.begin(slice.owner, slice.next)?;
                return Ok(true);
            }
            Some(slice) => {
                let client = self.clients.iter().find(|(_, c)| c.owner == slice.owner);
                if let Some(client) = client.map(|(client, _)| *client) {
                    self.clients.remove(&client);
                }
                self.clear_slots(slice.owner);
                self.owners.push(slice.owner);
            }
            None => {}
        }
        let leaving = self.clients.values().find(|c| c.leaving).map(|c| c.owner);
        match leaving.filter(|_| self.administrator.is_idle()) {
            Some(owner) => self.administrator.begin(owner, 0).map(|()| true),
            None => Ok(slice.is_some()),
        }
    }

    /// Broadcasts whether memory is available, if that changed.
    fn broadcast(&mut self, empty: bool) -> bool {
        let new = self.notice.set_empty(empty);
        if new {
            for c in self.clients.values().filter(|c| !c.leaving) {
                if let Some(first) = c.access.iter().next() {
                    self.notice.notify(&first.qp, c.bulletin);
                }
            }
        }
        new
    }
}

impl<N: Nic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        let lanes = self.settings.lanes() as usize;
        let expected = Requirements { settings: &self.settings, management: 1, lanes, leaving: 0 };
        self.clients.check(client, request, &expected)?;
        let Some(&owner) = self.owners.last() else {
            return Err(refuse(format!("all {} numbers are in use", self.layout.owners)));
        };
        let c = self.connection(request, owner)?;
        self.owners.pop();
        let region = Region {
            rkey: self.region.key().0,
            owner,
            layout: self.layout,
            fast_pages: self.tables.tier(Tier::Fast).range().end,
        };
        let management = vec![c.management.qp.qpn().raw()];
        let reply = ConnectReply {
            terms: region.to_terms(),
            ..ConnectReply::of(&self.settings, client, management, &c.access)
        };
        self.clients.insert(client, c);
        Ok(reply)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        let Ok(c) = self.clients.known_mut(client) else { return Ok(()) };
        c.shut_down()?;
        // Begins the first slice, whose completion wakes the CPU.
        self.advance_reclamation().map(drop)
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.clients.contains_key(&client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let mut done = self.advance_reclamation()?;
        if self.notice.is_watching() && self.tables.free() > 0 {
            done |= self.broadcast(false);
        }
        Ok(done)
    }

    fn is_watching(&self) -> bool {
        self.notice.is_watching()
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        self.clients.known_mut(client)?;
        if self.tables.free() > 0 {
            return Ok(false);
        }
        self.broadcast(true);
        Ok(true)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        let c = self.clients.known_mut(client)?;
        c.management.connect()?;
        Ok(Some(vec![c.management.qp.qpn().raw()]))
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
        Cpu { events: Some(self.administrator.events()), ..Cpu::default() }
    }

    fn first_chunk(&self) -> Option<u64> {
        None
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let counts = &self.tables.counts;
        let [draws, frees, reclaimed, refused] =
            [&counts.draws, &counts.frees, &counts.reclaimed, &counts.refused]
                .map(|counter| counter.load(Ordering::Relaxed));
        Ok(NodeStatus {
            scheme: self.settings.scheme.name.into(),
            chunk_bytes: self.settings.chunk_bytes,
            chunks: self.tables.pages().into(),
            free: self.tables.free().into(),
            clients: self.clients.connected(),
            leaving: self.clients.leaving(),
            allocations_nic: draws,
            frees_nic: frees,
            frees_cpu: reclaimed,
            refused,
            ..NodeStatus::default()
        })
    }

    /// Checks that each page is free once, or belongs to a compute node. The engine may execute
    /// commands meanwhile; then the result can be wrong.
    fn audit(&self) -> Result<(), Error> {
        let attempt = || "auditing the pool".into();
        if self.clients.values().any(|c| c.leaving) {
            let why = "pages of departed clients are being reclaimed: retry when that is complete";
            return Err(Error::Refused { attempt: attempt(), why: why.into() });
        }
        let exists = |owner| self.clients.values().any(|c| c.owner == owner);
        self.tables.audit(exists).map_err(|why| Error::Protocol { attempt: attempt(), why })
    }
}
