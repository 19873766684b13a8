//! A client: it uses raw verbs on its own function and executes a short program. Programs may
//! contain invalid requests.

use std::collections::VecDeque;
use std::sync::Arc;

use rnic::limits::FunctionLimits;
use rnic::nic::{SoftCq, SoftMr, SoftNic, SoftQp};
use rnic::port::Function;
use rnic::port::inline::{InlineFunction, InlineNic};
use scheme::{ClientId, ConnectRequest, NodeScheme};
use schemes::onesidedmw::Node;
use schemes::onesidedmw::layout::{reply, status};
use verbs::{
    Access, Completion, CompletionKind, CompletionQueue, CqAttr, Key, MemoryRegion, Nic,
    Op as Verb, QpAttr, QpChange, QpState, Qpn, QueuePair, Receive, ReceiveAttr, ReceiveRequest,
    Remote, Status, WorkRequest,
};

use crate::arena;
use crate::config::{Op, WrongQp};
use crate::nic::ModelNic;
use crate::spec::{Actor, CHUNKS, GROUP, Identity};

/// Offset in the client's memory of the bytes for accesses; the replies lie below it.
const SOURCE: usize = 2048;
/// Offset of the client's bulletin.
const BULLETIN: usize = 3072;

/// Progress of a client's operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// Not posted yet.
    Ahead,
    /// Posted and not answered yet.
    Posted,
    /// Not posted, because the chunk that it needs was not granted.
    Skipped,
    /// The operation allocated a chunk.
    Granted(Grant),
    /// The reply's status: empty, freed, refused or again.
    Said(u8),
    /// The completion status of an access.
    Access(u8),
    /// The queue pair broke; contains the syndrome.
    Broken(u8),
}

/// A chunk, as granted to a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grant {
    /// Entry number of the chunk.
    pub entry: u32,
    pub(crate) addr: u64,
    pub(crate) keys: [u32; GROUP],
}

/// A QP of a client, with its own CQ.
pub(crate) struct Side {
    pub(crate) qp: SoftQp,
    pub(crate) cq: SoftCq,
    /// Operations that were posted and not answered yet.
    pub(crate) outstanding: VecDeque<u8>,
}

/// The state of a client. It lies in the arena.
pub struct Client {
    pub(crate) id: ClientId,
    pub(crate) function: InlineFunction,
    pub(crate) alloc: Side,
    pub(crate) free: Side,
    pub(crate) access: Vec<Side>,
    pub(crate) memory: SoftMr,
    /// The memory node's access QPs that are connected to the client.
    pub(crate) peers: Vec<Qpn>,
    pub(crate) free_worker: Qpn,
    pub(crate) program: Vec<Op>,
    pub(crate) outcome: Vec<Outcome>,
    pub(crate) next: usize,
    pub(crate) honest: bool,
    pub(crate) breaks: bool,
    pub(crate) alive: bool,
    pub(crate) known: bool,
    pub(crate) crashes: bool,
    pub(crate) leaves: bool,
    pub(crate) wants_reset: bool,
    pub(crate) freed: [u8; CHUNKS],
}

type Roles = Vec<(Qpn, Actor, &'static str)>;

impl Client {
    /// Creates a client with its own function and has the memory node admit it.
    pub fn join(
        nic: &Arc<InlineNic>,
        node: &mut Node<ModelNic>,
        c: u8,
        program: &[Op],
        crashes: bool,
        roles: &mut Roles,
    ) -> (Self, Identity) {
        let function = nic.function(FunctionLimits::default()).expect("a function");
        let verbs = SoftNic::new(Function::Inline(function.clone()));
        let pd = verbs.alloc_pd().expect("a PD");
        let side = || {
            // The client polls completions at once, so the content of the ring adds no information
            // to the state.
            let attr = CqAttr { entries: 32, ignore_overrun: false };
            let cq = arena::outside_digest(|| verbs.create_cq(attr)).expect("a CQ");
            let attr = QpAttr {
                send_cq: &cq,
                recv_cq: &cq,
                send_blocks: 32,
                receive: Receive::Own(ReceiveAttr { entries: 16, max_sges: 1 }),
                access: Access::REMOTE_WRITE,
            };
            let qp = verbs.create_qp(&pd, attr).expect("a QP");
            Side { qp, cq, outstanding: VecDeque::with_capacity(8) }
        };
        let lanes = node.memory().shape.group - 1;
        let (alloc, free) = (side(), side());
        let access: Vec<Side> = (0..lanes).map(|_| side()).collect();
        let memory = verbs.alloc_dma(4096).expect("memory");
        let rights = Access::LOCAL_ALL | Access::REMOTE_WRITE;
        let memory = verbs.reg_mr(&pd, &memory, rights).expect("a region");
        memory.memory().write(SOURCE, &[0xa0 | c; 8]);
        let id = ClientId(c as u32 + 1);
        let request = ConnectRequest {
            management: vec![alloc.qp.qpn().raw(), free.qp.qpn().raw()],
            groups: vec![access.iter().map(|s| s.qp.qpn().raw()).collect()],
            bulletin_addr: memory.memory().addr() + BULLETIN as u64,
            bulletin_rkey: memory.key().0,
            ..ConnectRequest::default()
        };
        let admitted = arena::inside_node(|| node.admit(id, &request)).expect("to be admitted");
        let fronts = [admitted.management[0], admitted.management[1]].map(Qpn::new);
        alloc.qp.connect(fronts[0]).expect("a connection");
        free.qp.connect(fronts[1]).expect("a connection");
        let peers: Vec<Qpn> = admitted.groups[0].iter().map(|&n| Qpn::new(n)).collect();
        for (side, peer) in access.iter().zip(&peers) {
            side.qp.connect(*peer).expect("a connection");
        }
        let [alloc_worker, free_worker] = node.worker_qpns(id).expect("it was admitted");
        roles.extend([
            (alloc_worker, Actor::AllocWorker(c), "alloc worker"),
            (free_worker, Actor::FreeWorker(c), "free worker"),
            (fronts[0], Actor::Front(c), "alloc front"),
            (fronts[1], Actor::Front(c), "free front"),
            (alloc.qp.qpn(), Actor::Client(c), "alloc QP"),
            (free.qp.qpn(), Actor::Client(c), "free QP"),
        ]);
        roles.extend(access.iter().map(|s| (s.qp.qpn(), Actor::Client(c), "access QP")));
        roles.extend(peers.iter().map(|&p| (p, Actor::Cpu, "the memory node's access QP")));
        let mut identity =
            Identity { id: id.0 as u64, free_worker: free_worker.raw(), named: [[0; 2]; GROUP] };
        for (lane, peer) in peers.iter().enumerate() {
            identity.named[lane + 1] = [peer.raw(); 2];
        }
        let client = Self {
            id,
            function,
            alloc,
            free,
            access,
            memory,
            peers,
            free_worker,
            program: program.to_vec(),
            outcome: vec![Outcome::Ahead; program.len()],
            next: 0,
            honest: program.iter().all(|op| op.is_honest()),
            // Its management queues may break; the CPU then reads how far its workers have come.
            breaks: program.contains(&Op::AllocateUnwritable),
            alive: true,
            known: true,
            crashes,
            leaves: false,
            wants_reset: false,
            freed: [0; CHUNKS],
        };
        (client, identity)
    }

    /// Returns the chunk that was granted last.
    pub fn latest(&self) -> Option<Grant> {
        self.outcome.iter().rev().find_map(|o| match o {
            Outcome::Granted(grant) => Some(*grant),
            _ => None,
        })
    }

    fn busy(&self) -> usize {
        let sides = [&self.alloc, &self.free].into_iter().chain(&self.access);
        sides.map(|s| s.outstanding.len()).sum()
    }

    /// Returns whether the next operation's operands are known and the queues have room for it.
    pub fn can_post(&self, all: &[Client], in_flight: usize) -> bool {
        let Some(op) = self.program.get(self.next) else { return false };
        if !self.alive || self.wants_reset || self.can_recover() || self.busy() >= in_flight {
            return false;
        }
        match *op {
            Op::Free(n) | Op::Use(n) | Op::FreeTwice(n) => self.ended(n),
            // Only after the chunk was freed.
            Op::UseStale(n) => {
                self.ended(n)
                    && self.program.iter().zip(&self.outcome).all(|(op, outcome)| {
                        *op != Op::Free(n) || !matches!(outcome, Outcome::Ahead | Outcome::Posted)
                    })
            }
            Op::Steal(victim) => {
                let victim = &all[victim as usize];
                victim.latest().is_some()
                    || victim.next >= victim.program.len() && victim.busy() == 0
            }
            Op::Allocate | Op::AllocateFor(_) | Op::AllocateUnwritable | Op::FreeEntry(_) => true,
        }
    }

    fn ended(&self, n: u8) -> bool {
        !matches!(self.outcome[n as usize], Outcome::Ahead | Outcome::Posted)
    }

    /// Returns whether a management queue broke and no operation is in flight.
    pub fn can_recover(&self) -> bool {
        self.alive
            && self.known
            && !self.honest
            && !self.wants_reset
            && self.busy() == 0
            && [&self.alloc, &self.free].iter().any(|s| s.qp.state().ok() == Some(QpState::Error))
    }

    /// Returns whether both management queues work.
    pub fn works(&self) -> bool {
        let ready = |s: &Side| s.qp.state().ok() == Some(QpState::ReadyToSend);
        ready(&self.alloc) && ready(&self.free)
    }

    /// Resets the client's side of the management queues.
    pub fn recover(&mut self) -> Result<(), String> {
        for side in [&self.alloc, &self.free] {
            side.qp.modify(QpChange::Reset).map_err(|e| e.to_string())?;
        }
        self.wants_reset = true;
        Ok(())
    }

    /// Returns the chunk that a free operation names.
    pub fn entry_of(&self, op: Op) -> usize {
        match op {
            Op::FreeEntry(entry) => entry as usize,
            Op::Free(n) | Op::FreeTwice(n) => match self.outcome[n as usize] {
                Outcome::Granted(grant) => grant.entry as usize,
                _ => unreachable!("it was granted"),
            },
            _ => unreachable!("no free"),
        }
    }

    /// Posts the next operation.
    ///
    /// `latest` is the chunk that each client was granted last. `qpns` are the bytes that name the
    /// access QPs: the correct ones, then each kind of wrong ones.
    pub fn post(&mut self, latest: &[Option<Grant>], qpns: &[Vec<u8>]) {
        let at = self.next;
        self.next += 1;
        let op = self.program[at];
        let grant = |n: u8| match self.outcome[n as usize] {
            Outcome::Granted(grant) => Some(grant),
            _ => None,
        };
        let named = match op {
            Op::AllocateFor(WrongQp::Foreign) => &qpns[1],
            Op::AllocateFor(WrongQp::Nonexistent) => &qpns[2],
            Op::AllocateFor(WrongQp::Worker) => &qpns[3],
            _ => &qpns[0],
        };
        let posted = match op {
            Op::Allocate | Op::AllocateFor(_) => self.send_request(false, at, named.clone(), true),
            Op::AllocateUnwritable => self.send_request(false, at, named.clone(), false),
            Op::Free(n) | Op::FreeTwice(n) => match grant(n) {
                Some(grant) => {
                    self.send_request(true, at, grant.entry.to_be_bytes()[1..].to_vec(), true)
                }
                None => false,
            },
            Op::FreeEntry(entry) => {
                self.send_request(true, at, entry.to_be_bytes()[1..].to_vec(), true)
            }
            Op::Use(n) | Op::UseStale(n) => match grant(n) {
                Some(grant) => self.write(at, grant),
                None => false,
            },
            Op::Steal(victim) => match latest[victim as usize] {
                Some(grant) => self.write(at, grant),
                None => false,
            },
        };
        self.outcome[at] = if posted { Outcome::Posted } else { Outcome::Skipped };
    }

    fn send_request(&mut self, free: bool, at: usize, mut data: Vec<u8>, writable: bool) -> bool {
        let slot = at * 64;
        let mut target = self.memory.remote(slot);
        if !writable {
            target.rkey = Key(0xeeee_ee00);
        }
        data.extend(target.addr.to_be_bytes());
        data.extend(target.rkey.0.to_be_bytes());
        let side = if free { &mut self.free } else { &mut self.alloc };
        let receive = ReceiveRequest { id: 1000 + at as u64, to: &[] };
        let op = Verb::SendInline { data: &data };
        let send = WorkRequest { id: at as u64, op, signaled: true };
        side.qp.post_recv(&receive).expect("room in the receive queue");
        side.qp.post_send(&[send]).expect("room in the send queue");
        side.outstanding.push_back(at as u8);
        true
    }

    fn write(&mut self, at: usize, grant: Grant) -> bool {
        let to = Remote { addr: grant.addr, rkey: Key(grant.keys[1]) };
        let from = [self.memory.sge(SOURCE, 8)];
        let op = Verb::Write { to, from: &from };
        let side = &mut self.access[0];
        side.qp
            .post_send(&[WorkRequest { id: at as u64, op, signaled: true }])
            .expect("room in the send queue");
        side.outstanding.push_back(at as u8);
        true
    }

    /// Polls completions and returns the operations that ended.
    pub fn poll_completions(&mut self) -> Vec<usize> {
        let mut ended = Vec::new();
        for free in [false, true] {
            loop {
                let side = if free { &mut self.free } else { &mut self.alloc };
                let mut one = [Completion::EMPTY];
                if side.cq.poll(&mut one) == 0 {
                    break;
                }
                let answered = one[0].kind == CompletionKind::Receive;
                if !answered {
                    continue;
                }
                let Some(at) = side.outstanding.pop_front() else { continue };
                let at = at as usize;
                self.outcome[at] = match one[0].status {
                    Status::Success => self.read_reply(at, free),
                    status => Outcome::Broken(status.syndrome()),
                };
                ended.push(at);
            }
        }
        let mut one = [Completion::EMPTY];
        while self.access[0].cq.poll(&mut one) > 0 {
            let at = self.access[0].outstanding.pop_front().expect("a completion of something");
            self.outcome[at as usize] = Outcome::Access(one[0].status.syndrome());
            ended.push(at as usize);
        }
        ended
    }

    fn read_reply(&self, at: usize, free: bool) -> Outcome {
        let mut b = [0; reply::BYTES];
        self.memory.memory().read(at * 64, &mut b);
        if free {
            return Outcome::Said(b[reply::FREE_STATUS + 3]);
        }
        if b[reply::STATUS] != status::GRANTED {
            return Outcome::Said(b[reply::STATUS]);
        }
        let mut keys = [0; GROUP];
        for (window, key) in keys.iter_mut().enumerate().take(self.access.len() + 1).skip(1) {
            let index = &b[reply::KEYS + 3 * window..][..3];
            let tag = b[reply::TAGS + 8 * (window / 4) + 4 + window % 4];
            *key = u32::from_be_bytes([index[0], index[1], index[2], tag]);
        }
        Outcome::Granted(Grant {
            addr: u64::from_be_bytes(b[..8].try_into().expect("8 bytes")),
            entry: u32::from_be_bytes([0, b[8], b[9], b[10]]),
            keys,
        })
    }
}

/// Returns the QP that an invalid request of client `c` names.
pub fn wrong_qpn(wrong: WrongQp, clients: &[Client], c: usize) -> Qpn {
    let other = &clients[(c + 1) % clients.len()];
    match wrong {
        WrongQp::Foreign => other.peers[0],
        WrongQp::Nonexistent => Qpn::new(0xbeef),
        WrongQp::Worker => other.free_worker,
    }
}
