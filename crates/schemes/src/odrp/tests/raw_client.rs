//! A client that posts raw requests.

use rnic::nic::SoftNic;
use scheme::{ClientId, ConnectRequest, NodeScheme};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr, Qpn, QueuePair,
    Receive, ReceiveAttr, ReceiveRequest, Status, WorkRequest,
};

use crate::odrp::*;

/// Posts raw requests. The page is at offset 0 of its memory, the reply after the page.
pub struct RawClient {
    pub id: ClientId,
    pub cq: <SoftNic as Nic>::Cq,
    /// QP for reads.
    pub reads: <SoftNic as Nic>::Qp,
    /// QP for writes and frees.
    pub qp: <SoftNic as Nic>::Qp,
    pub memory: <SoftNic as Nic>::Mr,
    /// Access QPs, which it does not use.
    pub _access: Vec<<SoftNic as Nic>::Qp>,
}

pub const REPLY: usize = PAGE_BYTES;

impl RawClient {
    pub fn join(nic: &SoftNic, node: &mut Node<SoftNic>, id: u32) -> Self {
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false }).unwrap();
        let attr = |receive, access| QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 64,
            receive,
            access,
        };
        let own = Receive::Own(ReceiveAttr { entries: 32, max_sges: 1 });
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let qp = nic.create_qp(&pd, attr(own.clone(), rights)).unwrap();
        let reads = nic.create_qp(&pd, attr(own, rights)).unwrap();
        let access: Vec<_> = (0..2)
            .map(|_| nic.create_qp(&pd, attr(Receive::None, Access::NONE)).unwrap())
            .collect();
        let memory = nic.alloc_dma(2 * PAGE_BYTES).unwrap();
        let memory = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL | rights).unwrap();
        let admission = ConnectRequest {
            management: vec![reads.qpn().raw(), qp.qpn().raw()],
            groups: vec![access.iter().map(|q| q.qpn().raw()).collect()],
            bulletin_addr: memory.remote(REPLY + 64).addr,
            bulletin_rkey: memory.key().0,
            ..ConnectRequest::default()
        };
        let id = ClientId(id);
        let admitted = node.admit(id, &admission).unwrap();
        reads.connect(Qpn::new(admitted.management[0])).unwrap();
        qp.connect(Qpn::new(admitted.management[1])).unwrap();
        Self { id, cq, reads, qp, memory, _access: access }
    }

    pub fn request(&self, op: u8, number: u32) -> Vec<u8> {
        let mut bytes = vec![op];
        bytes.extend(&number.to_be_bytes()[1..]);
        for place in [self.memory.remote(0), self.memory.remote(REPLY)] {
            bytes.extend(place.addr.to_be_bytes());
            bytes.extend(place.rkey.0.to_be_bytes());
        }
        bytes
    }

    pub fn read_request(&self, number: u32) -> Vec<u8> {
        let mut bytes = number.to_be_bytes()[1..].to_vec();
        let place = self.memory.remote(0);
        bytes.extend(place.addr.to_be_bytes());
        bytes.extend(place.rkey.0.to_be_bytes());
        bytes
    }

    /// Sends bytes to the queue of reads; returns the statuses of all completions.
    pub fn send_read(&self, data: &[u8]) -> Vec<Status> {
        self.reads.post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
        let op = Op::SendInline { data };
        self.reads.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
        self.completions()
    }

    /// Reads a page through the chain of reads; returns the byte that fills it.
    pub fn read_mapped(&self, number: u32) -> u8 {
        self.memory.memory().write(0, &[0xee; PAGE_BYTES]);
        assert_eq!(self.send_read(&self.read_request(number)), [Status::Success; 2]);
        self.full_of(number)
    }

    pub fn full_of(&self, number: u32) -> u8 {
        let mut page = [0; PAGE_BYTES];
        self.memory.memory().read(0, &mut page);
        assert!(page.iter().all(|b| *b == page[0]), "page {number} is torn");
        page[0]
    }

    /// Sends bytes to the queue of writes; returns the statuses of all completions.
    pub fn send(&self, data: &[u8]) -> Vec<Status> {
        self.memory.memory().zero(REPLY, 8);
        self.qp.post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
        let op = Op::SendInline { data };
        self.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
        self.completions()
    }

    pub fn completions(&self) -> Vec<Status> {
        let mut completions = vec![Completion::EMPTY; 64];
        let n = self.cq.poll(&mut completions);
        completions[..n].iter().map(|c| c.status).collect()
    }

    pub fn ask_raw(&self, op: u8, number: u32) -> u64 {
        let ended = self.send(&self.request(op, number));
        assert_eq!(ended, [Status::Success; 2]);
        self.memory.memory().load_be64(REPLY)
    }

    pub fn write(&self, number: u32, value: u8) -> u64 {
        self.memory.memory().write(0, &[value; PAGE_BYTES]);
        self.ask_raw(PageOp::Write as u8, number)
    }

    /// The byte that fills the page; `None` if the page is not mapped.
    pub fn read(&self, number: u32) -> Option<u8> {
        self.memory.memory().write(0, &[0xee; PAGE_BYTES]);
        match self.ask_raw(PageOp::Read as u8, number) {
            status::PENDING => {
                let value = self.full_of(number);
                assert_eq!(self.read_mapped(number), value);
                Some(value)
            }
            status::UNMAPPED => None,
            other => panic!("status {other}"),
        }
    }

    pub fn free(&self, number: u32) -> u64 {
        self.ask_raw(PageOp::Free as u8, number)
    }

    /// Re-establishes the connection.
    pub fn reset(&self, node: &mut Node<SoftNic>) {
        for qp in [&self.reads, &self.qp] {
            qp.modify(verbs::QpChange::Reset).unwrap();
        }
        let peers = loop {
            match node.reset_management(self.id).unwrap() {
                Some(peers) => break peers,
                None => drop(node.poll().unwrap()),
            }
        };
        self.reads.connect(Qpn::new(peers[0])).unwrap();
        self.qp.connect(Qpn::new(peers[1])).unwrap();
        self.completions();
    }
}
