//! A hand-made compute node: it is admitted like any client, and then posts arbitrary requests.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use granary_tests::control::Control;
use pool::protocol::{Admission, Reply, Request};
use pool::remote::Route;
use pool::remote::token::Nonce;
use pool::{ConnectReply, ConnectRequest};
use verbs::cqe::Cqe;
use verbs::wqe::{Remote, Sge};
use verbs::{Access, DmaMemory, Key, Pdn, PeerAddress};

use crate::Arguments;
use crate::nic::Nic;
use crate::path::Path;
use crate::queue::{Qp, Shape};

/// Bytes of a reply slot.
pub const SLOT: usize = 64;
/// Timeout for expected answers; long enough for a busy machine.
pub const LONG: Duration = Duration::from_secs(10);
/// Timeout for answers that must not come.
pub const SHORT: Duration = Duration::from_millis(30);

/// Status bytes of replies.
pub mod status {
    pub const GRANTED: u8 = 1;
    pub const EMPTY: u8 = 2;
    pub const FREED: u8 = 3;
    pub const REFUSED: u8 = 4;
    pub const AGAIN: u8 = 5;
}

/// A compute node.
pub struct Compute {
    pub nic: Nic,
    pub control: Control,
    path: Path,
    pub pd: Pdn,
    pub alloc: Management,
    pub free: Management,
    /// Access QPs of the one group.
    pub access: Vec<Qp>,
    pub terms: ConnectReply,
    /// Local memory for reads and writes.
    pub local: DmaMemory,
    pub lkey: Key,
}

/// A management QP with its reply slots.
pub struct Management {
    pub qp: Qp,
    pub replies: DmaMemory,
    pub rkey: Key,
    sent: u32,
}

/// Result of a request.
#[derive(Debug)]
pub enum Answer {
    /// The reply's bytes.
    Reply([u8; 48]),
    /// The SEND or the receive failed with this syndrome.
    Failed(u8),
    /// No completion before the timeout.
    Silence,
}

/// A chunk with the keys that its owner has.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Chunk {
    pub entry: u32,
    pub addr: u64,
    pub len: u64,
    pub keys: Vec<u32>,
}

impl Management {
    fn new(nic: &Nic, pd: Pdn, credits: u32) -> Result<Self> {
        let shape = Shape {
            blocks: 1024,
            receives: 1024,
            completions: 4096,
            access: Access::REMOTE_WRITE,
            ..Shape::default()
        };
        let replies = nic.memory(credits as usize * 4 * SLOT)?;
        let rkey = nic.register(pd, &replies, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        Ok(Self { qp: Qp::new(nic, pd, shape)?, replies, rkey, sent: 0 })
    }

    /// Offset of the next reply slot, for well-formed requests.
    pub fn slot(&self) -> usize {
        self.sent as usize * SLOT % self.replies.len()
    }

    /// SENDs a request: `arguments`, then the address and the key for the reply.
    pub fn send_to(&mut self, nic: &Nic, arguments: &[u8], addr: u64, rkey: Key) {
        let mut request = arguments.to_vec();
        request.extend(addr.to_be_bytes());
        request.extend(rkey.0.to_be_bytes());
        self.send_raw(nic, &request);
    }

    /// SENDs arbitrary bytes, with a receive for the reply.
    pub fn send_raw(&mut self, nic: &Nic, request: &[u8]) {
        self.sent += 1;
        self.qp.post_receives(nic, 1);
        self.qp.post(nic, |b| {
            b.send_inline(request);
        });
    }

    /// SENDs a request whose reply goes to `slot`.
    pub fn send(&mut self, nic: &Nic, arguments: &[u8], slot: usize) {
        self.replies.zero(slot, SLOT);
        self.send_to(nic, arguments, self.replies.addr() + slot as u64, self.rkey);
    }

    /// Waits for the next answer; its reply is in `slot`.
    pub fn answer(&mut self, slot: usize, timeout: Duration) -> Answer {
        match self.qp.wait(timeout) {
            None => Answer::Silence,
            Some(Cqe { error: Some(e), .. }) => Answer::Failed(e.syndrome),
            Some(_) => {
                let mut bytes = [0; 48];
                self.replies.read(slot, &mut bytes);
                Answer::Reply(bytes)
            }
        }
    }

    /// Sends a request and waits for the answer.
    pub fn ask(&mut self, nic: &Nic, arguments: &[u8]) -> Answer {
        let slot = self.slot();
        self.send(nic, arguments, slot);
        self.answer(slot, LONG)
    }
}

impl Compute {
    /// Attaches to the NIC and is admitted by the memory node.
    pub fn join(a: &Arguments) -> Result<Self> {
        let nic = Nic::open(&a.socket)?;
        let (control, mut path) = Path::open(a)?;
        let salt = path.draw()?;
        let pd = nic.pd()?;
        let (alloc, free) = (Management::new(&nic, pd, 16)?, Management::new(&nic, pd, 16)?);
        let lanes = 2;
        let access =
            (0..lanes).map(|_| Qp::new(&nic, pd, Shape::default())).collect::<Result<Vec<_>>>()?;
        let local = nic.memory(1 << 20)?;
        let lkey = nic.register(pd, &local, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let connect = ConnectRequest {
            management: vec![alloc.qp.qpn.raw(), free.qp.qpn.raw()],
            groups: vec![access.iter().map(|q| q.qpn.raw()).collect()],
            bulletin_addr: local.addr(),
            bulletin_rkey: lkey.0,
            ..ConnectRequest::default()
        };
        let admission = Admission {
            connect,
            session: Some(nic.secret()),
            roce: path.remote().map(|way| way.local),
            salt,
            ..Admission::default()
        };
        let terms = match control.ask(Request::Admit(Box::new(admission)))? {
            Reply::Admitted(terms) => terms,
            other => bail!("not admitted: {other:?}"),
        };
        let me = Self { nic, control, path, pd, alloc, free, access, terms, local, lkey };
        me.alloc.qp.connect(&me.nic, me.peer(me.terms.management[0]))?;
        me.free.qp.connect(&me.nic, me.peer(me.terms.management[1]))?;
        for (qp, peer) in me.access.iter().zip(&me.terms.groups[0]) {
            qp.connect(&me.nic, me.peer(*peer))?;
        }
        Ok(me)
    }

    /// The route to the memory node, if it is on another host.
    pub fn route(&self) -> Option<Route> {
        self.path.route()
    }

    /// See [`Path::peer`].
    pub fn peer(&self, qpn: u32) -> PeerAddress {
        self.path.peer(qpn)
    }

    /// See [`Path::draw`].
    pub fn draw_start(&mut self) -> Result<Option<Nonce>> {
        self.path.draw()
    }

    /// The number of the pool's chunks.
    pub fn chunks(&self) -> Result<u32> {
        match self.control.ask(Request::Status)? {
            Reply::Status(status) => Ok(status.node.chunks as u32),
            other => bail!("{other:?}"),
        }
    }

    /// The arguments of a well-formed allocation: the memory node's access QPs.
    pub fn lanes(&self) -> Vec<u32> {
        self.terms.groups[0].clone()
    }

    /// Allocates with these QP numbers for the windows; `None` if the pool is empty.
    pub fn allocate_for(&mut self, qpns: &[u32]) -> Result<Option<Chunk>> {
        match self.alloc.ask(&self.nic, &qpn_bytes(qpns)) {
            Answer::Reply(bytes) => chunk(&bytes, self.terms.chunk_bytes, qpns.len()),
            other => bail!("an allocation ended with {other:?}"),
        }
    }

    /// Allocates as a normal client does.
    pub fn allocate(&mut self) -> Result<Chunk> {
        let lanes = self.lanes();
        self.allocate_for(&lanes)?.context("the pool is empty")
    }

    /// Frees an entry and returns the reply's status. Repeats the request after status AGAIN.
    pub fn free_entry(&mut self, entry: u32) -> Result<u8> {
        loop {
            match self.free.ask(&self.nic, &entry.to_be_bytes()[1..]) {
                Answer::Reply(bytes) if bytes[7] == status::AGAIN => {}
                Answer::Reply(bytes) => return Ok(bytes[7]),
                other => bail!("a free of entry {entry} ended with {other:?}"),
            }
        }
    }

    /// Frees its own chunk; fails if the memory node refuses.
    pub fn release(&mut self, chunk: &Chunk) -> Result<()> {
        let got = self.free_entry(chunk.entry)?;
        ensure!(got == status::FREED, "freeing entry {} gave status {got}", chunk.entry);
        Ok(())
    }

    /// An SGE of local memory.
    pub fn sge(&self, at: usize, len: u32) -> Sge {
        Sge { addr: self.local.addr() + at as u64, len, lkey: self.lkey }
    }

    /// READs over a lane; returns the syndrome, 0 for success.
    pub fn read(&mut self, lane: usize, from: Remote, len: u32) -> Result<u8> {
        let to = self.sge(4096, len);
        self.access(lane, |b| {
            b.rdma_read(from, &[to]);
        })
    }

    /// WRITEs over a lane; returns the syndrome, 0 for success.
    pub fn write(&mut self, lane: usize, to: Remote, len: u32) -> Result<u8> {
        let from = self.sge(4096, len);
        self.access(lane, |b| {
            b.rdma_write(to, &[from]);
        })
    }

    /// Executes one access and returns its syndrome, 0 for success. Re-establishes a broken lane.
    pub fn access(
        &mut self,
        lane: usize,
        build: impl FnOnce(&mut verbs::wqe::Builder),
    ) -> Result<u8> {
        let qp = &mut self.access[lane];
        qp.post(&self.nic, |b| {
            build(b);
            b.signaled();
        });
        let cqe = qp.wait(LONG).context("an access did not complete")?;
        let Some(error) = cqe.error else { return Ok(0) };
        self.recover(lane)?;
        Ok(error.syndrome)
    }

    /// Re-establishes a lane.
    pub fn recover(&mut self, lane: usize) -> Result<()> {
        let qp = &mut self.access[lane];
        qp.reset(&self.nic)?;
        while qp.poll().is_some() {}
        let salt = self.draw_start()?;
        let request = Request::ResetAccess { group: 0, lane: lane as u8, salt };
        match self.control.ask(request)? {
            Reply::Access { peer } => self.access[lane].connect(&self.nic, self.peer(peer)),
            other => bail!("lane {lane} was not re-established: {other:?}"),
        }
    }

    /// Re-establishes the management QPs.
    pub fn recover_management(&mut self) -> Result<()> {
        for m in [&mut self.alloc, &mut self.free] {
            m.qp.reset(&self.nic)?;
            while m.qp.poll().is_some() {}
        }
        let salt = self.draw_start()?;
        match self.control.ask(Request::ResetManagement { salt })? {
            Reply::Management { peers } => {
                for (m, peer) in [&self.alloc, &self.free].into_iter().zip(peers) {
                    m.qp.connect(&self.nic, self.peer(peer))?;
                }
                Ok(())
            }
            other => bail!("the management QPs were not re-established: {other:?}"),
        }
    }
}

/// QP numbers as arguments of an allocation: three bytes each.
pub fn qpn_bytes(qpns: &[u32]) -> Vec<u8> {
    qpns.iter().flat_map(|q| q.to_be_bytes()[1..].to_vec()).collect()
}

/// Parses the reply to an allocation; `None` if the pool was empty.
pub fn chunk(bytes: &[u8; 48], len: u64, lanes: usize) -> Result<Option<Chunk>> {
    match bytes[11] {
        status::GRANTED => {}
        status::EMPTY => return Ok(None),
        other => bail!("the status of an allocation is {other}"),
    }
    let keys = (1..=lanes)
        .map(|window| {
            let index = &bytes[12 + 3 * window..][..3];
            let tag = bytes[32 + 8 * (window / 4) + 4 + window % 4];
            u32::from_be_bytes([index[0], index[1], index[2], tag])
        })
        .collect();
    Ok(Some(Chunk {
        entry: u32::from_be_bytes(bytes[8..12].try_into().expect("4 bytes")) >> 8,
        addr: u64::from_be_bytes(bytes[..8].try_into().expect("8 bytes")),
        len,
        keys,
    }))
}

/// A remote address with a raw key.
pub fn remote(addr: u64, rkey: u32) -> Remote {
    Remote { addr, rkey: Key(rkey) }
}
