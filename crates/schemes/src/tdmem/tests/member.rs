//! A connected client, with the memory node, on the inline NIC.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use rnic::limits::Limits;
use rnic::nic::{SoftNic, SoftQp};
use rnic::port::Function;
use rnic::port::inline::InlineNic;
use scheme::connect::Offer;
use scheme::options::{SchemeOptions, Terms};
use scheme::{
    ClientId, ClientScheme, ConnectRequest, Error, Grant, GroupId, NodeScheme, NodeSettings,
    PageAccess,
};
use verbs::{Access, CqAttr, DmaMemory, MemoryRegion, Nic, QpAttr, Qpn, QueuePair, Receive};

use super::*;
use crate::tdmem::options::Region;
use crate::tdmem::{Client, ClientOptions, Node};

pub type Shared = Arc<Mutex<Node<SoftNic>>>;

pub fn settings(pages: u64) -> NodeSettings {
    let settings = NodeSettings::new(crate::TDMEM, pages, PAGE_BYTES as u64);
    NodeSettings { credits: 4, clients_max: 3, group_size: 2, ..settings }.with("seed", 5)
}

pub fn start(settings: &NodeSettings) -> (SoftNic, Shared) {
    let nic = SoftNic::inline();
    let node = Node::new(nic.clone(), settings.clone()).unwrap();
    (nic, Arc::new(Mutex::new(node)))
}

/// A NIC that executes single WQEs when it is told to.
pub fn stepped() -> (Arc<InlineNic>, SoftNic) {
    let memory = |bytes: usize| DmaMemory::anonymous(bytes).unwrap();
    let nic = InlineNic::stepped(Limits::default(), Box::new(memory));
    let physical = SoftNic::new(Function::Inline(nic.physical()));
    (nic, physical)
}

/// Executes up to `wqes` WQEs; returns the number of executed ones.
pub fn step(nic: &InlineNic, wqes: usize) -> usize {
    let steps = (0..wqes).map_while(|_| nic.ready_qps().first().map(|qpn| nic.step(*qpn)));
    steps.filter(|done| *done).count()
}

pub struct Member {
    pub id: ClientId,
    pub client: Client<SoftNic>,
    pub node: Shared,
    pub region: Region,
    pub bulletin: <SoftNic as Nic>::Mr,
    _access: SoftQp,
}

impl Member {
    pub fn join(nic: &SoftNic, node: &Shared, settings: &NodeSettings, id: u32) -> Self {
        Self::join_with(nic, node, settings, id, &ClientOptions::default()).unwrap()
    }

    pub fn join_with(
        nic: &SoftNic,
        node: &Shared,
        settings: &NodeSettings,
        id: u32,
        own: &ClientOptions,
    ) -> Result<Self, Error> {
        let pd = nic.alloc_pd()?;
        let mut options = SchemeOptions::default();
        options.set("local_bytes", own.local_bytes);
        options.set("local_seed", 9);
        let client = Client::new(nic, &pd, &Offer::new(settings, 0, Terms::new()), &options)?;
        let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false })?;
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 16,
            receive: Receive::None,
            access: Access::REMOTE_WRITE,
        };
        let access = nic.create_qp(&pd, attr)?;
        let memory = nic.alloc_dma(8)?;
        let bulletin = nic.reg_mr(&pd, &memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let request = ConnectRequest {
            management: client.management().iter().map(|qpn| qpn.raw()).collect(),
            groups: vec![vec![access.qpn().raw()]],
            bulletin_addr: bulletin.remote(0).addr,
            bulletin_rkey: bulletin.key().0,
            ..ConnectRequest::default()
        };
        let id = ClientId(id);
        let reply = node.lock().admit(id, &request)?;
        access.connect(Qpn::new(reply.groups[0][0]))?;
        client.accept(&reply)?;
        let peers: Vec<_> = reply.management.iter().map(|qpn| Qpn::new(*qpn).into()).collect();
        client.connect(&peers)?;
        let region = Region::of(&reply)?;
        Ok(Self { id, client, node: node.clone(), region, bulletin, _access: access })
    }

    /// Resets the QPs of both sides and connects them again.
    pub fn reconnect(&self) {
        self.client.reset().unwrap();
        let peers = self.node.lock().reset_management(self.id).unwrap().unwrap();
        let peers: Vec<_> = peers.iter().map(|qpn| Qpn::new(*qpn).into()).collect();
        self.client.connect(&peers).unwrap();
    }

    pub fn allocate(&self) -> Grant {
        now(self.client.allocate(GroupId(0))).unwrap()
    }

    pub fn write(&self, grant: &Grant, value: u8) -> Result<(), Error> {
        now(self.client.write_page(grant, &[value; PAGE_BYTES]))
    }

    /// The byte that fills a page.
    pub fn read(&self, grant: &Grant) -> Result<u8, Error> {
        let mut page = [0xee; PAGE_BYTES];
        now(self.client.read_page(grant, &mut page))?;
        assert!(page.iter().all(|byte| *byte == page[0]), "a torn page");
        Ok(page[0])
    }

    pub fn free(&self, grant: &Grant) -> Result<(), Error> {
        now(self.client.free(grant))
    }
}

/// Runs a future to its end.
pub fn now<T>(future: impl Future<Output = T>) -> T {
    verbs::executor::block_on(future)
}

/// Polls a future once; it must not have ended.
pub fn begin<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) {
    let poll = future.poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(poll, Poll::Pending), "the request needs the NIC");
}

pub fn retire(node: &Shared, client: ClientId) {
    let mut node = node.lock();
    node.retire(client).unwrap();
    while !node.is_retired(client) {
        node.poll().unwrap();
    }
}

/// Begins a request, lets the NIC execute some WQEs of it, and breaks the connection. The request
/// must fail.
pub fn interrupted<T>(
    nic: &InlineNic,
    member: &Member,
    wqes: usize,
    request: impl Future<Output = Result<T, Error>>,
) {
    let mut request = pin!(request);
    begin(request.as_mut());
    assert_eq!(step(nic, wqes), wqes);
    member.client.reset().unwrap();
    assert!(matches!(now(request), Err(Error::ManagementBroken { .. })));
}
