//! The memory node's side of FineMem. It lays out the metadata and binds the windows; later it
//! admits clients and ends quarantines (`scan`). It takes no part in an allocation.

use std::sync::Arc;
use std::time::Duration;

use scheme::client_table::{ClientTable, Requirements, refuse};
use scheme::wakeup::CqEvents;
use scheme::{
    ClientId, ConnectReply, ConnectRequest, Cpu, Error, GroupId, Lane, NodeScheme, NodeSettings,
    NodeStatus, QpSet, Start, options,
};
use verbs::{Access, CqAttr, DmaMemory, MemoryRegion, Nic, QueuePair};

use super::allocation_view::{AllocationView, ClientsByUser};
use super::block::{CHUNK_ORDER, SectionIndex};
use super::connection::{Connection, ConnectionResources, Leaving};
use super::function::{self, Function};
use super::header::User;
use super::keys::Keys;
use super::layout::Shape;
use super::log::Capability;
use super::map::Map;
use super::options::{Admitted, Metadata, Options};
use super::release::Release;
use super::scan::{ReleaseTimes, Scan};
use super::table::initial;
use super::words::{Words, now};

/// The memory node of the schemes in which the client allocates.
pub struct Node<N: Nic> {
    pub(super) nic: N,
    settings: NodeSettings,
    options: Options,
    pub(super) shape: Shape,
    pub(super) memory: DmaMemory,
    metadata_pd: N::Pd,
    metadata: N::Mr,
    pub(super) words: Words,
    pub(super) keys: Keys<N>,
    pub(super) release: Release,
    /// Allocation state, as the memory node's CPU accesses it.
    pub(super) map: Map,
    /// Receives the scan requests of clients.
    pub(super) requests: N::Cq,
    events: Arc<CqEvents<N>>,
    pub(super) peers: ClientTable<Connection<N>>,
    names: ClientsByUser,
    /// The user number assigned last.
    last_user: u16,
    pub(super) scan: Scan,
    /// A client waits for memory.
    pub(super) watching: bool,
}

impl<N: Nic> Node<N> {
    /// Donates memory according to `settings`, with a window bound for every block.
    pub fn new(nic: &N, settings: &NodeSettings) -> Result<Self, Error> {
        let options = Options::of(settings)?;
        settings.scheme.check_caps(&nic.caps())?;
        let shape = Shape { chunks: settings.chunks as u32, chunk_bytes: settings.chunk_bytes };
        let functions = function::needed(nic, shape, settings)?;
        let metadata_pd = nic.alloc_pd()?;
        let (bytes, unit) = (shape.chunks as u64 * shape.chunk_bytes, shape.chunk_bytes);
        let memory = nic.alloc_thin(bytes as usize, unit as usize, settings.kept_bytes)?;
        let release = Release::of(settings.scheme);
        let words = Words::new(nic.alloc_dma(shape.words() as usize * 8)?);
        let map = Map::new(settings.scheme, shape, User::NOBODY, options.contention_control);
        if let Map::Tree(_) = map {
            initial(shape, |at, word| words.store(at, word));
        }
        let metadata = nic.reg_mr(&metadata_pd, words.memory(), Access::LOCAL_ALL)?;
        let functions = Function::open_all(nic, functions, (&memory, words.memory()))?;
        let keys = Keys::new(functions, shape, settings.scheme)?;
        for entry in shape.each_entry() {
            words.store(shape.capability(entry), keys.capability(entry).to_word());
        }
        let entries = settings.clients_max * 8 + CqEvents::<N>::MARGIN;
        let requests = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let events = Arc::new(CqEvents::new(nic, &metadata_pd, &requests)?);
        Ok(Self {
            nic: nic.clone(),
            settings: settings.clone(),
            options,
            shape,
            memory,
            metadata_pd,
            metadata,
            words,
            keys,
            release,
            map,
            requests,
            events,
            peers: ClientTable::default(),
            names: ClientsByUser::default(),
            last_user: 0,
            scan: Scan::default(),
            watching: false,
        })
    }

    /// CPU time spent so far on releasing blocks.
    pub fn release_times(&self) -> ReleaseTimes {
        self.scan.times
    }

    /// A read-only view of the metadata.
    pub fn allocation_view(&self) -> AllocationView {
        AllocationView {
            shape: self.shape,
            memory: self.memory.clone(),
            words: Words::new(self.words.memory().clone()),
            names: self.names.clone(),
            is_array: matches!(self.map, Map::Array(_)),
        }
    }

    /// An unused user number. Numbers are assigned round-robin, so that a number is reused as late
    /// as possible.
    fn new_user(&mut self) -> Result<User, Error> {
        for _ in 0..User::MAX {
            self.last_user = self.last_user % User::MAX + 1;
            let user = User::new(self.last_user).expect("it is at most the largest");
            if self.peers.values().all(|peer| peer.user != user) {
                return Ok(user);
            }
        }
        Err(refuse("all user numbers are in use"))
    }

    /// Number of free chunks, according to the headers.
    pub(super) fn free_chunks(&self) -> u64 {
        let free = self.map.free_blocks(CHUNK_ORDER, |at| self.words.load(at));
        // A client can corrupt headers, so the count is limited to the chunks of the pool.
        free.min(self.shape.chunks).into()
    }

    /// Number of blocks that were freed at once and have no backup key yet.
    fn lacking_blocks(&self) -> u64 {
        let entries = self.shape.each_entry();
        entries.filter(|entry| self.capability(*entry).lacks_backup()).count() as u64
    }

    /// Number of blocks in quarantine, and number of all taken blocks, including those in
    /// quarantine.
    fn taken_blocks(&self) -> (u64, u64) {
        let entries = self.shape.each_entry();
        let quarantined = entries.filter(|entry| self.capability(*entry).is_quarantined()).count();
        (quarantined as u64, self.map.taken_blocks(|at| self.words.load(at)))
    }
}

impl<N: Nic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        let settings = &self.settings;
        let lanes = settings.lanes() as usize;
        let qps = lanes * self.keys.functions().len();
        let expected = Requirements { settings, management: 1, lanes: qps, leaving: 0 };
        self.peers.check(client, request, &expected)?;
        let user = self.new_user()?;
        let common = ConnectionResources {
            nic: &self.nic,
            functions: self.keys.functions(),
            lanes,
            metadata_pd: &self.metadata_pd,
            metadata: &self.metadata,
            requests: &self.requests,
            guarded: super::keys::are_guarded(&self.nic, self.settings.scheme),
        };
        let peer = Connection::new(&common, user, request)?;
        let management = vec![peer.management.qp.qpn().raw()];
        let metadata = Some(Metadata {
            addr: self.metadata.memory().addr(),
            rkey: peer.key.0,
            user: user.raw(),
            data: self.memory.addr(),
            chunks: self.shape.chunks,
        });
        let admitted = ConnectReply {
            terms: options::terms(&Admitted { metadata }),
            ..ConnectReply::of(&self.settings, client, management, &peer.access)
        };
        self.names.lock().insert(user, client);
        self.peers.insert(client, peer);
        Ok(admitted)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        match self.peers.known_mut(client) {
            Ok(peer) => peer.shut_down(),
            Err(_) => Ok(()),
        }
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.peers.contains_key(&client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let mut done = self.poll_scan_requests()?;
        let before = (self.scan.released, self.scan.ended());
        match self.run_background_work() {
            Ok(any) => done |= any,
            Err(_) if self.words.take_abort() => {
                self.start_recovery();
                done = true;
            }
            Err(e) => return Err(e),
        }
        // Counting free chunks reads every header, and only the scan frees chunks.
        let may_have_freed = before != (self.scan.released, self.scan.ended());
        if self.watching && may_have_freed && self.free_chunks() > 0 {
            (self.watching, done) = (false, true);
        }
        Ok(done)
    }

    fn is_watching(&self) -> bool {
        self.watching
    }

    fn next_poll(&self) -> Option<Duration> {
        (!self.peers.is_empty()).then(|| self.scan.due_in(self.nic.now()))
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        self.peers.known(client)?;
        self.watching = self.free_chunks() == 0;
        Ok(self.watching)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        let peer = self.peers.known_mut(client)?;
        peer.reconnect()?;
        Ok(Some(vec![peer.management.qp.qpn().raw()]))
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.peers.management_is_open(client)
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        self.peers.reset_access(client, group, lane)
    }

    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        self.peers.set_start(client, part, start);
    }

    fn functions(&self) -> u32 {
        self.keys.functions().len() as u32
    }

    fn cpu(&mut self) -> Cpu {
        Cpu { events: Some(self.events.clone()), ..Cpu::default() }
    }

    fn terms(&self) -> options::Terms {
        options::terms(&self.options)
    }

    fn first_chunk(&self) -> Option<u64> {
        Some(self.memory.addr())
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let (quarantined, taken) = self.taken_blocks();
        let lacking = match self.release {
            Release::Quarantined => 0,
            Release::AtOnce => self.lacking_blocks(),
        };
        let scan = &self.scan;
        Ok(NodeStatus {
            scheme: self.settings.scheme.name.into(),
            chunk_bytes: self.settings.chunk_bytes,
            functions: self.functions(),
            chunks: self.shape.chunks as u64,
            free: self.free_chunks(),
            clients: self.peers.connected(),
            leaving: self.peers.leaving(),
            allocations_nic: scan.released + scan.regenerated + lacking + taken,
            // Saturates: a client can take a block out of quarantine again through its management
            // QP, and work can be aborted between the two counts.
            frees_nic: (scan.released + scan.regenerated + lacking + quarantined)
                .saturating_sub(scan.reclaimed),
            frees_cpu: scan.reclaimed,
            ..NodeStatus::default()
        })
    }

    fn audit(&self) -> Result<(), Error> {
        super::audit::check(self)
    }
}

impl<N: Nic> Node<N> {
    /// For tests, in schemes that have a tree: aborts the background work (recovery, regeneration)
    /// after `steps` more steps. A step is a change of a word, a rebind of windows with one
    /// doorbell, or the clearing of a part of a block. The abort discards all local state, and the
    /// next turn starts from the state in memory.
    pub fn abort_after(&mut self, steps: u64) {
        if let Map::Tree(_) = self.map {
            self.words.abort_after(steps);
        }
    }

    /// Number of aborted background passes.
    pub fn aborts(&self) -> u64 {
        self.scan.aborts
    }

    fn run_background_work(&mut self) -> Result<bool, Error> {
        self.words.begin_turn();
        let mut done = self.repair_after_abort()?;
        done |= self.reclaim_departed()?;
        done |= self.continue_scan()?;
        Ok(done)
    }

    /// Discards the state of an aborted pass: see [`RecoveryPhase`](super::scan::RecoveryPhase).
    fn start_recovery(&mut self) {
        self.scan.start_recovery();
        for peer in self.peers.values_mut().filter(|peer| peer.leaving.is_some()) {
            peer.leaving = Some(Leaving::Sections(SectionIndex::new(0)));
        }
    }

    /// Advances reclamation of departed clients: quarantines the blocks that their logs name. No
    /// client waits for it. Returns true if it did any work.
    fn reclaim_departed(&mut self) -> Result<bool, Error> {
        if self.scan.is_busy() || self.scan.is_recovering() {
            // Partly released blocks have no consistent state.
            return Ok(false);
        }
        let began = self.nic.now();
        let Self { peers, words, map, scan, shape, .. } = self;
        let mut any = false;
        let mut gone = Vec::new();
        for (client, peer) in peers.iter_mut() {
            match peer.leaving {
                None => continue,
                Some(Leaving::Sections(section)) if section < shape.sections_end() => {
                    for block in now(map.taken_by(words, peer.user, section))? {
                        let at = shape.capability(shape.entry(block));
                        let word = words.load(at);
                        let open = Capability::parse(word);
                        // The client may have freed the block just before it departed.
                        let shut = Capability::quarantined(open.main).to_word();
                        if !open.is_quarantined() {
                            words.step()?;
                            scan.reclaimed += (words.swap(at, word, shut) == word) as u64;
                        }
                    }
                    now(map.repair_section(words, section))?;
                    peer.leaving = Some(Leaving::Sections(section.plus(1)));
                    any = true;
                }
                Some(Leaving::Sections(_)) => {
                    peer.leaving = Some(Leaving::Scanned(scan.begun));
                    scan.schedule_now();
                    any = true;
                }
                Some(Leaving::Scanned(after)) if scan.is_over(after) => gone.push(*client),
                Some(Leaving::Scanned(_)) => {}
            }
        }
        if any {
            scan.times.finding += self.nic.now().saturating_sub(began);
        }
        any |= !gone.is_empty();
        gone.iter().for_each(|client| _ = peers.remove(client));
        Ok(any)
    }
}
