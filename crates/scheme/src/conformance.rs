//! What every scheme must do: allocate, free, refuse frees of others and second frees, run out of
//! memory, survive a reset, and give back the chunks of a departed client.
//!
//! The memory node and its clients are on one NIC. A thread polls the scheme.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use verbs::completion::Completer;
use verbs::executor::block_on;
use verbs::{
    Access as Rights, CqAttr, MemoryRegion, Nic, Op, QpAttr, QpChange, Qpn, QueuePair, Receive,
    ReceiveAttr, Remote, Status, WorkRequest,
};

use crate::Error;
use crate::connect::Offer;
use crate::options::SchemeOptions;
use crate::registry::{ClientParts, ClientRegistry, NodeRegistry};
use crate::request_queue::SharedQp;
use crate::settings::NodeSettings;
use crate::{
    Access, ClientId, ClientScheme, ConnectRequest, Grant, GroupId, Lane, NodeScheme, bulletin,
};

/// Bytes at the start of a chunk that the checks access.
const PROBE: usize = 64;

/// Runs all checks on the scheme that `settings` select, with memory for a few chunks.
///
/// # Panics
/// The scheme does not conform.
pub fn check<N: Nic>(
    nic: &N,
    nodes: &NodeRegistry<N>,
    clients: &ClientRegistry<N>,
    settings: &NodeSettings,
) {
    let mut scheme = nodes.node(nic, settings).expect("the memory node starts");
    let offer = Offer::new(settings, scheme.functions(), scheme.terms());
    let offer = Offer { spares: scheme.spares(), ..offer };
    let _cpu = scheme.cpu();
    let suite = Suite { nic, clients, settings, offer, node: Mutex::new(scheme) };
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                if !suite.node.lock().poll().expect("the memory node runs") {
                    thread::yield_now();
                }
            }
        });
        // The thread must end also if a check fails.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| suite.run()));
        stop.store(true, Ordering::Release);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

struct Suite<'a, N: Nic> {
    nic: &'a N,
    clients: &'a ClientRegistry<N>,
    settings: &'a NodeSettings,
    offer: Offer,
    node: Mutex<Box<dyn NodeScheme>>,
}

/// A connected client with one group.
struct Client<N: Nic> {
    id: ClientId,
    scheme: Box<dyn ClientScheme>,
    /// Access QPs by function and lane.
    access: Vec<SharedQp<N>>,
    /// The memory node's sides of the access QPs.
    peers: Vec<u32>,
    lanes: usize,
    buffer: N::Mr,
    _bulletin: N::Mr,
}

impl<N: Nic> Suite<'_, N> {
    fn run(&self) {
        let (a, b) = (self.join(1), self.join(2));
        self.chunks_are_disjoint_until_memory_is_exhausted(&a);
        self.frees_of_others_and_second_frees_are_refused(&a, &b);
        self.freed_chunk_is_cleared(&a, &b);
        self.reset_keeps_grants(&a);
        self.departed_client_gives_its_chunks_back(a, &b);
        self.node.lock().audit().expect("every chunk is free or owned once");
        let status = self.node.lock().status().expect("the status");
        assert_eq!((status.clients, status.leaving), (1, 0));
        assert_eq!(status.scheme, self.offer.scheme);
    }

    /// Connects a client, as the pool does.
    fn join(&self, number: u32) -> Client<N> {
        let (nic, offer) = (self.nic, &self.offer);
        let pd = nic.alloc_pd().unwrap();
        let (_, family) = self.clients.known(&offer.scheme).unwrap();
        let receives = family.access_receives(offer);
        let lanes = self.settings.lanes() as usize;
        let qps = lanes * (offer.functions.max(1) + offer.spares) as usize;
        let access: Vec<SharedQp<N>> = (0..qps)
            .map(|lane| {
                let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false }).unwrap();
                let receive = match receives {
                    entries if lane == 0 && entries > 0 => {
                        Receive::Own(ReceiveAttr { entries, max_sges: 1 })
                    }
                    _ => Receive::None,
                };
                let attr = QpAttr {
                    send_cq: &cq,
                    recv_cq: &cq,
                    send_blocks: 64,
                    receive,
                    access: Rights::REMOTE_WRITE,
                };
                (nic.create_qp(&pd, attr).unwrap(), Arc::new(Completer::new(cq)))
            })
            .collect();
        let options = SchemeOptions::default();
        let parts = ClientParts { nic, pd: &pd, offer, access: &access[..1], options: &options };
        let scheme = family.client(&parts).unwrap();
        let local =
            |bytes, rights| nic.reg_mr(&pd, &nic.alloc_dma(bytes).unwrap(), rights).unwrap();
        let written = local(bulletin::BYTES, Rights::LOCAL_WRITE | Rights::REMOTE_WRITE);
        let request = ConnectRequest {
            management: scheme.management().iter().map(|qpn| qpn.raw()).collect(),
            groups: vec![access.iter().map(|(qp, _)| qp.qpn().raw()).collect()],
            bulletin_addr: written.remote(0).addr,
            bulletin_rkey: written.remote(0).rkey.0,
            ..ConnectRequest::default()
        };
        let id = ClientId(number);
        let terms = self.node.lock().admit(id, &request).expect("a client is admitted");
        let peers = terms.groups[0].clone();
        connect_all::<N>(&access, &peers);
        scheme.accept(&terms).unwrap();
        let management: Vec<_> = terms.management.iter().map(|qpn| Qpn::new(*qpn).into()).collect();
        scheme.connect(&management).unwrap();
        assert!(!scheme.is_broken() && !scheme.is_closed());
        let buffer = local(self.settings.chunk_bytes as usize, Rights::LOCAL_ALL);
        Client { id, scheme, access, peers, lanes, buffer, _bulletin: written }
    }

    fn chunks_are_disjoint_until_memory_is_exhausted(&self, a: &Client<N>) {
        let held = a.allocate_all();
        assert_eq!(held.len() as u64, self.settings.chunks, "all chunks can be allocated");
        let begins: BTreeSet<u64> = held.iter().map(|grant| grant.addr).collect();
        assert_eq!(begins.len(), held.len(), "no chunk is granted twice");
        assert!(held.iter().all(|grant| grant.len == self.settings.chunk_bytes));
        for (grant, value) in held.iter().zip(1..) {
            a.write(grant, value);
        }
        for (grant, value) in held.iter().zip(1..) {
            assert_eq!(a.read(grant), [value; PROBE], "a chunk holds what its owner wrote");
        }
        held.iter().for_each(|grant| a.free(grant).expect("a chunk is freed"));
    }

    fn frees_of_others_and_second_frees_are_refused(&self, a: &Client<N>, b: &Client<N>) {
        let grant = a.allocate().expect("a chunk is free");
        a.write(&grant, 1);
        let foreign = b.free(&grant);
        assert!(matches!(foreign, Err(Error::NotYours { .. })), "foreign free: {foreign:?}");
        assert_eq!(a.read(&grant), [1; PROBE], "a foreign free changes nothing");
        a.free(&grant).expect("the owner frees");
        let second = a.free(&grant);
        assert!(matches!(second, Err(Error::NotYours { .. })), "second free: {second:?}");
    }

    fn freed_chunk_is_cleared(&self, a: &Client<N>, b: &Client<N>) {
        let grant = a.allocate().expect("a chunk is free");
        a.write(&grant, 0xee);
        a.free(&grant).expect("it is freed");
        let held = b.allocate_all();
        if self.clients.known(&self.offer.scheme).unwrap().0.clears() {
            let clear = |grant| b.read(grant) == [0; PROBE];
            assert!(held.iter().all(clear), "the next owner reads zeros");
        }
        held.iter().for_each(|grant| b.free(grant).expect("a chunk is freed"));
    }

    fn reset_keeps_grants(&self, a: &Client<N>) {
        let grant = a.allocate().expect("a chunk is free");
        a.write(&grant, 7);
        a.scheme.reset().unwrap();
        assert!(a.scheme.is_closed());
        let mut shared = false;
        a.scheme.each_queue(&mut |queue| shared |= queue.is_shared());
        if shared {
            a.access.iter().for_each(|(qp, _)| qp.modify(QpChange::Reset).unwrap());
        }
        let refused = a.allocate();
        assert!(refused.is_err() || matches!(a.scheme.access(), Access::Paged(_)));
        let peers = loop {
            if let Some(peers) = self.node.lock().reset_management(a.id).unwrap() {
                break peers;
            }
            thread::yield_now();
        };
        if shared {
            connect_all::<N>(&a.access, &a.peers);
        }
        let peers: Vec<_> = peers.iter().map(|qpn| Qpn::new(*qpn).into()).collect();
        a.scheme.connect(&peers).unwrap();
        block_on(a.scheme.settle()).unwrap();
        assert!(self.node.lock().management_is_open(a.id).unwrap());
        assert_eq!(a.read(&grant), [7; PROBE], "a grant outlives a reset");
        a.free(&grant).expect("a chunk of an earlier connection is freed");
        if let Ok(grant) = refused {
            a.free(&grant).unwrap();
        }
    }

    fn departed_client_gives_its_chunks_back(&self, a: Client<N>, b: &Client<N>) {
        let held = a.allocate_all();
        assert_eq!(held.len() as u64, self.settings.chunks);
        held.iter().for_each(|grant| a.write(grant, 9));
        self.node.lock().retire(a.id).expect("its keys are revoked");
        while !self.node.lock().is_retired(a.id) {
            thread::yield_now();
        }
        let held = b.allocate_all();
        assert_eq!(held.len() as u64, self.settings.chunks, "all chunks are free again");
        held.iter().for_each(|grant| b.free(grant).expect("a chunk is freed"));
        drop(a);
    }
}

fn connect_all<N: Nic>(access: &[SharedQp<N>], peers: &[u32]) {
    for ((qp, _), peer) in access.iter().zip(peers) {
        qp.connect(Qpn::new(*peer)).expect("an access QP is connected");
    }
}

impl<N: Nic> Client<N> {
    fn allocate(&self) -> Result<Grant, Error> {
        block_on(self.scheme.allocate(GroupId(0)))
    }

    fn free(&self, grant: &Grant) -> Result<(), Error> {
        block_on(self.scheme.free(grant))
    }

    /// Allocates until no chunk is free.
    fn allocate_all(&self) -> Vec<Grant> {
        let mut held = Vec::new();
        loop {
            match self.allocate() {
                Ok(grant) => held.push(grant),
                Err(Error::OutOfMemory { .. }) => return held,
                Err(e) => panic!("after {} chunks: {e}", held.len()),
            }
        }
    }

    /// Writes the start of a chunk.
    fn write(&self, grant: &Grant, value: u8) {
        match self.scheme.access() {
            Access::OneSided => {
                self.buffer.memory().write(0, &[value; PROBE]);
                let from = [self.buffer.sge(0, PROBE as u32)];
                let op = |to| Op::Write { to, from: &from };
                assert_eq!(self.execute(grant, op), Status::Success, "the owner writes");
            }
            Access::Paged(pages) => {
                let page = vec![value; pages.page_bytes()];
                block_on(pages.write_page(grant, &page)).expect("the owner writes");
            }
            Access::ByRpc(rpc) => {
                block_on(rpc.write(grant, 0, &[value; PROBE])).expect("the owner writes");
            }
        }
    }

    /// Reads the start of a chunk.
    fn read(&self, grant: &Grant) -> [u8; PROBE] {
        let mut bytes = [0xff; PROBE];
        match self.scheme.access() {
            Access::OneSided => {
                let to = [self.buffer.sge(0, PROBE as u32)];
                let op = |from| Op::Read { from, to: &to };
                assert_eq!(self.execute(grant, op), Status::Success, "the owner reads");
                self.buffer.memory().read(0, &mut bytes);
            }
            Access::Paged(pages) => {
                let mut page = vec![0xff; pages.page_bytes()];
                block_on(pages.read_page(grant, &mut page)).expect("the owner reads");
                bytes.copy_from_slice(&page[..PROBE]);
            }
            Access::ByRpc(rpc) => {
                block_on(rpc.read(grant, 0, &mut bytes)).expect("the owner reads");
            }
        }
        bytes
    }

    fn execute<'a>(&self, grant: &Grant, op: impl FnOnce(Remote) -> Op<'a>) -> Status {
        let (qp, completer) = &self.access[grant.function as usize * self.lanes];
        let op = op(Remote { addr: grant.addr, rkey: grant.key(Lane(0)) });
        let done =
            completer.submit(|id| qp.post_send(&[WorkRequest { id, op, signaled: true }])).unwrap();
        block_on(done).unwrap().status
    }
}
