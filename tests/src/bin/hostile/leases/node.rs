//! A hand-made compute node of schemes patronus, patronus-2 and patronus-mr.
//!
//! Its requests and replies are SENDs on one management QP. The receive ring has as many entries as
//! the inbox has slots, so that the n-th reply is in slot n modulo the number of slots.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use granary_tests::control::Control;
use pool::protocol::{Admission, Reply as ControlReply, Request as ControlRequest};
use pool::{ConnectRequest, DomainToken, GroupId, Others, Right, Sharing};
use schemes::patronus::TableTerms;
use schemes::patronus::message::{
    Ask, AskTerms, Granted, ObjectId, Outcome, PermissionNumber, REPLY_BYTES, Reply, Request,
};
use verbs::cqe::{Cqe, opcode};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{Access, DmaMemory, Key};

use crate::Arguments;
use crate::compute::LONG;
use crate::nic::Nic;
use crate::path::Path;
use crate::queue::{Qp, STRIDE, Shape};

/// Lanes of the one group.
pub const LANES: usize = 2;
/// Slots of the inbox: more than the memory node sends replies at a time.
const SLOTS: usize = 64;
const MICROS_LONG: u64 = u64::MAX - 1;

/// A compute node.
pub struct Node {
    pub nic: Nic,
    pub control: Control,
    path: Path,
    pub management: Qp,
    inbox: DmaMemory,
    /// Completed receives since the QP was connected.
    received: usize,
    /// Replies that were received while another one was expected.
    early: VecDeque<Reply>,
    next: u64,
    /// QPs of the one group: the lanes, then the spare QPs of each lane (Patronus §5.5).
    pub access: Vec<Qp>,
    /// True if each lane has a key of its own, which opens nothing on the other lane's QPs.
    pub has_key_per_lane: bool,
    /// Its lifetime words.
    pub table: TableTerms,
    pub local: DmaMemory,
    pub lkey: Key,
}

/// Terms of a permission for the only group. The longest wait is that of the memory node.
pub fn terms(right: Right, sharing: Sharing, lease_us: u64) -> AskTerms {
    AskTerms { group: GroupId(0), right, sharing, lease_us, wait_us: MICROS_LONG }
}

/// Terms of an exclusive permission for writing.
pub fn exclusive(lease_us: u64) -> AskTerms {
    terms(Right::Write, Sharing::Exclusive, lease_us)
}

/// Terms of a shared permission for reading.
pub fn shared_read(lease_us: u64) -> AskTerms {
    terms(Right::Read, Sharing::Shared, lease_us)
}

/// The request for a whole object of `len` bytes.
pub fn acquire(terms: AskTerms, object: ObjectId, len: u64) -> Ask {
    Ask::Acquire { terms, object, offset: 0, len }
}

impl Node {
    /// Attaches to the NIC and is admitted by the memory node.
    pub fn join(a: &Arguments, domain: Option<DomainToken>) -> Result<Self> {
        let nic = Nic::open(&a.socket)?;
        let (control, mut path) = Path::open(a)?;
        let salt = path.draw()?;
        let (scheme, spares) = (control.offer()?.scheme.clone(), control.offer()?.spares as usize);
        let pd = nic.pd()?;
        let shape = Shape {
            blocks: 1024,
            receives: SLOTS as u32,
            completions: 1024,
            access: Access::REMOTE_WRITE,
            ..Shape::default()
        };
        let management = Qp::new(&nic, pd, shape)?;
        let inbox = nic.memory(SLOTS * REPLY_BYTES)?;
        let inbox_key = nic.register(pd, &inbox, Access::LOCAL_WRITE)?;
        for slot in 0..SLOTS {
            let (addr, len) = (inbox.addr() + (slot * REPLY_BYTES) as u64, REPLY_BYTES as u32);
            let receive = Sge { addr, len, lkey: inbox_key };
            management.memory.write(management.receive_at() + slot * STRIDE, &receive.to_bytes());
        }
        let access = (0..LANES * (1 + spares))
            .map(|_| Qp::new(&nic, pd, Shape::default()))
            .collect::<Result<Vec<_>>>()?;
        let local = nic.memory(64 << 10)?;
        let lkey = nic.register(pd, &local, Access::LOCAL_WRITE)?;
        let connect = ConnectRequest {
            management: vec![management.qpn.raw()],
            groups: vec![access.iter().map(|qp| qp.qpn.raw()).collect()],
            ..ConnectRequest::default()
        };
        let mut admission =
            Admission { connect, session: Some(nic.secret()), salt, ..Admission::default() };
        match path.remote() {
            None => admission.domain = domain,
            // Between hosts the token is proved and not sent.
            Some(way) => {
                admission.roce = Some(way.local);
                admission.domain_proof = domain.map(|token| way.domain_proof(&token));
            }
        }
        let terms = match control.ask(ControlRequest::Admit(Box::new(admission)))? {
            ControlReply::Admitted(terms) => terms,
            other => bail!("not admitted: {other:?}"),
        };
        let table = scheme::options::parse_terms(&terms.terms)?;
        management.connect(&nic, path.peer(terms.management[0]))?;
        for (qp, peer) in access.iter().zip(&terms.groups[0]) {
            qp.connect(&nic, path.peer(*peer))?;
        }
        let (received, early, next) = (0, VecDeque::new(), 1);
        Ok(Self {
            nic,
            control,
            path,
            management,
            inbox,
            received,
            early,
            next,
            access,
            has_key_per_lane: scheme == schemes::PATRONUS_2.name,
            table,
            local,
            lkey,
        })
    }

    /// SENDs arbitrary bytes as a request, with a receive for its reply.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.management.post_receives(&self.nic, 1);
        self.send_without_receive(bytes);
    }

    /// SENDs arbitrary bytes as a request.
    pub fn send_without_receive(&mut self, bytes: &[u8]) {
        self.management.post(&self.nic, |b| _ = b.send_inline(bytes));
    }

    /// The bytes of a request with a new number.
    pub fn request(&mut self, ask: Ask) -> (u64, [u8; 64]) {
        let number = self.next;
        self.next += 1;
        (number, Request { number, ask }.to_bytes())
    }

    /// SENDs a request; returns its number.
    pub fn send(&mut self, ask: Ask) -> u64 {
        let (number, bytes) = self.request(ask);
        self.send_bytes(&bytes);
        number
    }

    /// The next reply, with any number. `None` after the timeout. An error if the QP has failed.
    fn next_reply(&mut self, timeout: Duration) -> Result<Option<Reply>> {
        let Some(cqe) = self.management.wait(timeout) else { return Ok(None) };
        if let Some(error) = cqe.error {
            bail!("the management QP has failed: syndrome {:#x}", error.syndrome);
        }
        ensure!(cqe.opcode == opcode::RESP_SEND, "an unexpected completion: {cqe:?}");
        self.take_reply().map(Some)
    }

    fn take_reply(&mut self) -> Result<Reply> {
        let mut bytes = [0; REPLY_BYTES];
        self.inbox.read(self.received % SLOTS * REPLY_BYTES, &mut bytes);
        self.received += 1;
        Reply::parse(&bytes).context("a reply cannot be decoded")
    }

    /// The next reply, to any request.
    pub fn any_reply(&mut self) -> Result<Reply> {
        self.next_reply(LONG)?.context("a request was not answered")
    }

    /// The reply to a request, if it comes before the timeout.
    pub fn reply_within(&mut self, number: u64, timeout: Duration) -> Result<Option<Outcome>> {
        if let Some(at) = self.early.iter().position(|reply| reply.number == number) {
            return Ok(self.early.remove(at).map(|reply| reply.outcome));
        }
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next_reply(left)? {
                None => return Ok(None),
                Some(reply) if reply.number == number => return Ok(Some(reply.outcome)),
                Some(reply) => self.early.push_back(reply),
            }
        }
    }

    /// Waits for the reply to a request.
    pub fn reply(&mut self, number: u64) -> Result<Outcome> {
        self.reply_within(number, LONG)?.context("a request was not answered")
    }

    /// Sends a request and waits for its reply.
    pub fn ask(&mut self, ask: Ask) -> Result<Outcome> {
        let number = self.send(ask);
        self.reply(number)
    }

    /// Sends a request that must end with `expected`.
    pub fn expect(&mut self, ask: Ask, expected: Outcome) -> Result<()> {
        let got = self.ask(ask)?;
        ensure!(got == expected, "{ask:?} ended with {got:?} and not with {expected:?}");
        Ok(())
    }

    /// Sends a request that must be granted.
    pub fn granted(&mut self, ask: Ask) -> Result<Granted> {
        match self.ask(ask)? {
            Outcome::Granted(granted) => Ok(granted),
            other => bail!("{ask:?} was not granted: {other:?}"),
        }
    }

    /// Allocates an object for the domain, with a permission of these terms.
    pub fn allocate(&mut self, bytes: u64, others: Others, terms: AskTerms) -> Result<Granted> {
        self.granted(Ask::Allocate { terms, bytes, others })
    }

    /// Revokes a permission of its own.
    pub fn revoke(&mut self, permission: PermissionNumber) -> Result<()> {
        self.expect(Ask::Revoke { permission }, Outcome::Done)
    }

    /// Frees an object of its own.
    pub fn free(&mut self, object: ObjectId) -> Result<()> {
        self.expect(Ask::Free { object }, Outcome::Done)
    }

    /// An SGE of local memory.
    pub fn sge(&self, len: u32) -> Sge {
        Sge { addr: self.local.addr(), len, lkey: self.lkey }
    }

    /// Executes one access on a QP of the group and returns its syndrome, 0 for success.
    /// Re-establishes the QP if it breaks.
    pub fn access(&mut self, qp: usize, build: impl FnOnce(&mut Builder)) -> Result<u8> {
        let got = self.access_once(qp, build)?;
        if got != 0 {
            self.recover(qp)?;
        }
        Ok(got)
    }

    /// [`Node::access`] that leaves a broken QP broken.
    pub fn access_once(&mut self, qp: usize, build: impl FnOnce(&mut Builder)) -> Result<u8> {
        let qp = &mut self.access[qp];
        qp.post(&self.nic, |b| {
            build(b);
            b.signaled();
        });
        let cqe = qp.wait(LONG).context("an access did not complete")?;
        Ok(cqe.error.map_or(0, |error| error.syndrome))
    }

    /// Re-establishes a QP of the group.
    pub fn recover(&mut self, qp: usize) -> Result<()> {
        self.access[qp].reset(&self.nic)?;
        while self.access[qp].poll().is_some() {}
        let salt = self.path.draw()?;
        let reset = ControlRequest::ResetAccess { group: 0, lane: qp as u8, salt };
        match self.control.ask(reset)? {
            ControlReply::Access { peer } => {
                self.access[qp].connect(&self.nic, self.path.peer(peer))
            }
            other => bail!("QP {qp} was not re-established: {other:?}"),
        }
    }

    /// READs 8 bytes; returns the syndrome.
    pub fn read(&mut self, qp: usize, at: Remote) -> Result<u8> {
        let to = self.sge(8);
        self.access(qp, |b| _ = b.rdma_read(at, &[to]))
    }

    /// WRITEs 8 bytes; returns the syndrome.
    pub fn write(&mut self, qp: usize, at: Remote) -> Result<u8> {
        let from = self.sge(8);
        self.access(qp, |b| _ = b.rdma_write(at, &[from]))
    }

    /// Executes one WQE on the management QP, with no request in flight, and returns its syndrome.
    /// Re-establishes the QP if it breaks.
    pub fn on_management(&mut self, build: impl FnOnce(&mut Builder)) -> Result<u8> {
        self.management.post(&self.nic, |b| {
            build(b);
            b.signaled();
        });
        let cqe = loop {
            let cqe: Cqe = self.management.wait(LONG).context("a WQE did not complete")?;
            if cqe.opcode != opcode::RESP_SEND {
                break cqe;
            }
            let reply = self.take_reply()?;
            self.early.push_back(reply);
        };
        let Some(error) = cqe.error else { return Ok(0) };
        self.recover_management()?;
        Ok(error.syndrome)
    }

    /// A CAS of a word that the table's key opens. Returns the syndrome and the old value.
    pub fn swap_word(&mut self, at: Remote, compare: u64, swap: u64) -> Result<(u8, u64)> {
        let old = self.sge(8);
        let got = self.on_management(|b| _ = b.compare_swap(at, compare, swap, old))?;
        Ok((got, self.local.load_be64(0)))
    }

    /// Address and key of a word of its table.
    pub fn word(&self, slot: u64) -> Remote {
        let addr = self.table.lifetimes_addr.wrapping_add(slot.wrapping_mul(8));
        Remote { addr, rkey: Key(self.table.lifetimes_key) }
    }

    /// Re-establishes the management QP.
    pub fn recover_management(&mut self) -> Result<()> {
        self.management.reset(&self.nic)?;
        while self.management.poll().is_some() {}
        self.received = 0;
        let salt = self.path.draw()?;
        match self.control.ask(ControlRequest::ResetManagement { salt })? {
            ControlReply::Management { peers } => {
                self.management.connect(&self.nic, self.path.peer(peers[0]))
            }
            other => bail!("the management QP was not re-established: {other:?}"),
        }
    }
}

/// Address and key of what a permission opens to access QP `qp`.
pub fn place(granted: &Granted, qp: usize) -> Remote {
    Remote { addr: granted.address, rkey: granted.keys[qp % LANES] }
}

/// The keys of a permission, each one once.
pub fn keys(granted: &Granted) -> Vec<Key> {
    let mut keys = granted.keys[..granted.lanes].to_vec();
    keys.dedup();
    keys
}
