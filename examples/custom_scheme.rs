//! A complete allocation scheme outside the library: the memory node's CPU allocates chunks of one
//! region, by a bump allocator with a free list. Because all clients share the region's key, they
//! must trust each other.
//!
//! `cargo run --example custom_scheme`

use std::sync::Arc;

use pool::{EmbeddedNode, Options, Pool, Settings};
use scheme::client_table::{AccessQps, ClientTable, PeerQp, Requirements, SimpleClient};
use scheme::info::{AccessKind, Allocator, Isolation, ReleaseTime, Sizes};
use scheme::registry::{ClientFamily, ClientParts, Family, NodeFamily};
use scheme::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr};
use scheme::wakeup::CqEvents;
use scheme::{
    Answer, ClientId, ClientScheme, ConnectReply, ConnectRequest, Cpu, Error, Grant, GroupId, Lane,
    NodeScheme, NodeSettings, NodeStatus, QpSet, Scheme, SchemeInfo, Start,
};
use verbs::{
    Access, Completion, CompletionKind, CompletionQueue, CqAttr, Key, MemoryRegion, Nic, Op,
    QpAttr, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Status, WorkRequest,
};

/// The scheme.
pub const BUMP: Scheme = &SchemeInfo {
    name: "bump",
    source: "examples/custom_scheme.rs",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::SharedRegion,
    sizes: Sizes::Chunk,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[],
    chunk_bytes: None,
    chunks_max: 1 << 20,
    options: &[],
    unsafe_because: Some("all clients share one key"),
};

/// Registers the scheme.
pub struct Bump;

impl Family for Bump {
    fn schemes(&self) -> &'static [Scheme] {
        &[BUMP]
    }
}

impl<N: Nic> NodeFamily<N> for Bump {
    fn node(&self, nic: &N, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error> {
        Ok(Box::new(Node::new(nic, settings)?))
    }
}

impl<N: Nic> ClientFamily<N> for Bump {
    fn client(&self, parts: &ClientParts<'_, N>) -> Result<Box<dyn ClientScheme>, Error> {
        Ok(Box::new(Client::new(parts)?))
    }
}

/// Entry of a request to allocate, and of the answer to a refused request.
const NONE: u32 = u32::MAX;
/// Request: the entry to free, or [`NONE`] to allocate.
const REQUEST: usize = 4;
/// Answer: entry (4), key (4), address (8).
const ANSWER: usize = 16;

struct Node<N: Nic> {
    nic: N,
    settings: NodeSettings,
    pd: N::Pd,
    memory: N::Mr,
    requests: N::Cq,
    events: Arc<CqEvents<N>>,
    clients: ClientTable<Peer<N>>,
    owners: Vec<Option<ClientId>>,
    free: Vec<u32>,
}

/// A client, with the buffer of its requests.
type Peer<N> = SimpleClient<N, <N as Nic>::Mr>;

fn receive<N: Nic>(peer: &Peer<N>, slot: u64) -> Result<(), Error> {
    let to = [peer.own.sge(slot as usize * REQUEST, REQUEST as u32)];
    Ok(peer.management.qp.post_recv(&ReceiveRequest { id: slot, to: &to })?)
}

fn connect<N: Nic>(peer: &Peer<N>, credits: u32) -> Result<(), Error> {
    peer.management.connect()?;
    (0..credits.into()).try_for_each(|slot| receive(peer, slot))
}

impl<N: Nic> Node<N> {
    fn new(nic: &N, settings: &NodeSettings) -> Result<Self, Error> {
        let pd = nic.alloc_pd()?;
        let memory = nic.alloc_dma((settings.chunks * settings.chunk_bytes) as usize)?;
        let memory = nic.reg_mr(&pd, &memory, Access::LOCAL_WRITE | Access::REMOTE_ALL)?;
        let entries = 4 * settings.clients_max * settings.credits + CqEvents::<N>::MARGIN;
        let requests = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let events = Arc::new(CqEvents::new(nic, &pd, &requests)?);
        let (nic, settings, clients) = (nic.clone(), settings.clone(), ClientTable::default());
        let (owners, free) = (Vec::new(), Vec::new());
        Ok(Self { nic, settings, pd, memory, requests, events, clients, owners, free })
    }

    fn qp(&self, receive: Receive<'_, N>, access: Access) -> Result<N::Qp, Error> {
        let (send_cq, send_blocks) = (&self.requests, 2 * self.settings.credits);
        let attr = QpAttr { send_cq, recv_cq: send_cq, send_blocks, receive, access };
        Ok(self.nic.create_qp(&self.pd, attr)?)
    }

    /// Executes a request. Returns the entry of the answer.
    fn execute(&mut self, client: ClientId, entry: u32) -> u32 {
        if entry == NONE {
            let all = self.settings.chunks as usize;
            let fresh = (self.owners.len() < all).then_some(self.owners.len() as u32);
            let Some(entry) = self.free.pop().or(fresh) else { return NONE };
            self.owners.resize(self.owners.len().max(entry as usize + 1), None);
            self.owners[entry as usize] = Some(client);
            return entry;
        }
        match self.owners.get_mut(entry as usize) {
            Some(owner) if *owner == Some(client) => {
                *owner = None;
                let bytes = self.settings.chunk_bytes as usize;
                self.memory.memory().zero(entry as usize * bytes, bytes);
                self.free.push(entry);
                entry
            }
            _ => NONE,
        }
    }

    fn answer(&mut self, request: &Completion) -> Result<(), Error> {
        let sender = |(_, peer): &(&ClientId, &Peer<N>)| peer.management.qp.qpn() == request.qpn;
        let Some((&client, peer)) = self.clients.iter().find(sender) else { return Ok(()) };
        let mut entry = [0; REQUEST];
        peer.own.memory().read(request.id as usize * REQUEST, &mut entry);
        let entry = self.execute(client, u32::from_be_bytes(entry));
        let index = entry as usize % self.settings.chunks as usize;
        let place = self.memory.remote(index * self.settings.chunk_bytes as usize);
        let mut data = [0; ANSWER];
        data[..4].copy_from_slice(&entry.to_be_bytes());
        data[4..8].copy_from_slice(&place.rkey.0.to_be_bytes());
        data[8..].copy_from_slice(&place.addr.to_be_bytes());
        let peer = &self.clients[&client];
        receive(peer, request.id)?;
        let op = Op::SendInline { data: &data };
        Ok(peer.management.qp.post_send(&[WorkRequest { id: 0, op, signaled: true }])?)
    }
}

impl<N: Nic> NodeScheme for Node<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        let (settings, lanes) = (&self.settings, self.settings.lanes() as usize);
        let expected = Requirements { settings, management: 1, lanes, leaving: 0 };
        self.clients.check(client, request, &expected)?;
        let credits = settings.credits;
        let receives = ReceiveAttr { entries: credits, max_sges: 1 };
        let qp = self.qp(Receive::Own(receives), Access::NONE)?;
        let inbox = self.nic.alloc_dma(credits as usize * REQUEST)?;
        let inbox = self.nic.reg_mr(&self.pd, &inbox, Access::LOCAL_ALL)?;
        let access = AccessQps::new(request, |_| self.qp(Receive::None, Access::REMOTE_ALL))?;
        let management = PeerQp::<N> { qp, peer: request.peer(request.management[0]) };
        let numbers = vec![management.qp.qpn().raw()];
        let reply = ConnectReply::of(settings, client, numbers, &access);
        let peer = Peer { management, access, own: inbox };
        connect(&peer, credits)?;
        self.clients.insert(client, peer);
        Ok(reply)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        if let Some(peer) = self.clients.remove(&client) {
            peer.access.shut_down()?;
        }
        // A free of a chunk of another client has no effect.
        (0..self.owners.len() as u32).for_each(|entry| _ = self.execute(client, entry));
        Ok(())
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.clients.contains_key(&client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let mut done = [Completion::EMPTY; 16];
        let n = self.requests.poll(&mut done);
        let is_request =
            |c: &&Completion| c.kind == CompletionKind::Receive && c.status == Status::Success;
        done[..n].iter().filter(is_request).try_for_each(|request| self.answer(request))?;
        Ok(n > 0)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        let peer = self.clients.known(client)?;
        connect(peer, self.settings.credits)?;
        Ok(Some(vec![peer.management.qp.qpn().raw()]))
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

    fn first_chunk(&self) -> Option<u64> {
        Some(self.memory.memory().addr())
    }

    fn cpu(&mut self) -> Cpu {
        Cpu { events: Some(self.events.clone()), ..Cpu::default() }
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        let held = self.owners.iter().flatten().count() as u64;
        Ok(NodeStatus {
            scheme: BUMP.name.into(),
            chunk_bytes: self.settings.chunk_bytes,
            chunks: self.settings.chunks,
            free: self.settings.chunks - held,
            clients: self.clients.connected(),
            ..NodeStatus::default()
        })
    }

    fn audit(&self) -> Result<(), Error> {
        Ok(())
    }
}

struct Client<N: Nic> {
    queue: RequestQueue<N>,
    answers: N::Mr,
    chunk_bytes: u64,
}

impl<N: Nic> Client<N> {
    fn new(parts: &ClientParts<'_, N>) -> Result<Self, Error> {
        let (credits, chunk_bytes) = (parts.offer.credits, parts.offer.chunk_bytes);
        let attr = RequestQueueAttr::new(credits, Access::REMOTE_WRITE);
        let queue = RequestQueue::new(parts.nic, parts.pd, attr)?;
        let memory = parts.nic.alloc_dma(credits as usize * ANSWER)?;
        let answers = parts.nic.reg_mr(parts.pd, &memory, Access::LOCAL_WRITE)?;
        Ok(Self { queue, answers, chunk_bytes })
    }

    async fn ask(&self, attempt: &str, entry: u32) -> Result<[u8; ANSWER], Error> {
        let slot = self.queue.slot().await;
        let at = slot.slot().as_usize() * ANSWER;
        let to = self.answers.sge(at, ANSWER as u32);
        self.queue.ask(attempt, &slot, &entry.to_be_bytes(), &[to]).await?;
        let mut answer = [0; ANSWER];
        self.answers.memory().read(at, &mut answer);
        Ok(answer)
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        Box::pin(async move {
            let answer = self.ask("allocating a chunk", NONE).await?;
            let word = |at: usize| u32::from_be_bytes(answer[at..at + 4].try_into().unwrap());
            let (entry, key) = (word(0), Key(word(4)));
            let addr = u64::from(word(8)) << 32 | u64::from(word(12));
            match entry {
                NONE => Err(Error::OutOfMemory { bytes: self.chunk_bytes }),
                _ => Ok(Grant::new(addr, self.chunk_bytes, entry.into(), group, &[key])),
            }
        })
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        Box::pin(async move {
            let answer = self.ask("freeing a chunk", grant.entry.raw()).await?;
            match answer[..4] == grant.entry.raw().to_be_bytes() {
                true => Ok(()),
                false => Err(Error::NotYours { entry: grant.entry }),
            }
        })
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        each(&self.queue);
    }
}

#[allow(dead_code, reason = "a test includes this file")]
fn main() -> Result<(), Error> {
    let settings = Settings { donate_bytes: 8 << 20, scheme: BUMP, ..Settings::default() };
    let (nodes, clients) = (schemes::nodes().with(&Bump), schemes::clients().with(&Bump));
    let node = Arc::new(EmbeddedNode::start_with(&settings, &nodes, clients)?);
    let pool = Pool::embedded_in(&node, Options::default())?;
    let grant = pool.allocate_blocking()?;
    println!("allocated {} bytes by scheme {}", grant.len, pool.scheme());
    pool.free_blocking(grant)
}
