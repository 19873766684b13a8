//! A client that keeps to no rule, on raw verbs: it replays what it had, names what is not its own, guesses
//! keys, reaches beyond borders, wants replies where none can be written, and sends what makes no sense.
//!
//! It is admitted like any other and allocates honestly now and then, so that there is something to replay.
//! What it may not gain, the oracle sees; that others go on, their own checks show.

use std::time::Duration;

use fabric::hooked::{HookedCq, HookedMr, HookedQp};
use fabric::soft::SoftPd;
use fabric::wqe::Umr;
use fabric::{
    Access, Completion, CompletionKind, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow,
    Nic, Op, QpAttr, QpChange, Qpn, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Remote,
    Status, WorkRequest,
};
use pool::SchemeKind;
use pool::client::control::ControlPlane;
use pool::onesidedmw::layout::{reply, status};
use pool::scheme::{Admission, Admitted, Grant, GroupId, Lane};

use super::Context;
use super::scenario::{End, Role};
use crate::cluster::SimControl;
use crate::fiber;
use crate::nic::{SimHooks, SimNic};
use crate::random::Random;
use crate::time::Time;

/// Where in its memory replies go, accesses read and write, and the bulletin is.
const SCRATCH: usize = 1024;
const BULLETIN: usize = 3072;
/// How long it waits for an answer that may never come.
const PATIENCE: Duration = Duration::from_micros(300);

struct Side {
    qp: HookedQp<SimHooks>,
    cq: HookedCq<SimHooks>,
}

struct Hostile {
    cx: Context,
    nic: SimNic,
    pd: SoftPd,
    memory: HookedMr<SimHooks>,
    management: Vec<Side>,
    access: Vec<Vec<Side>>,
    control: SimControl,
    terms: Admitted,
    scheme: SchemeKind,
    random: Random,
    held: Vec<Grant>,
    /// All that it ever had.
    had: Vec<Grant>,
    number: u64,
    /// Its connection is over.
    out: bool,
}

/// What the fiber of a hostile client runs.
pub(super) fn run(cx: Context, role: Role, random: Random) {
    let Some(mut me) = Hostile::join(cx, random) else { return };
    for _ in 0..role.rounds {
        if me.out {
            break;
        }
        me.round();
        if me.random.below(3) == 0 {
            fiber::sleep(Time(me.random.below(Time::us(40).0)));
        }
    }
    match role.end {
        End::Dies => me.cx.die(),
        End::Tidy | End::Careless => {
            me.cx.leaves();
            let _ = me.control.goodbye();
        }
    }
}

fn side(nic: &SimNic, pd: &SoftPd, receives: u32) -> Option<Side> {
    let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false }).ok()?;
    let receive = match receives {
        0 => Receive::None,
        entries => Receive::Own(ReceiveAttr { entries, max_sges: 1 }),
    };
    let attr = QpAttr {
        send_cq: &cq,
        recv_cq: &cq,
        send_blocks: 64,
        receive,
        access: Access::REMOTE_WRITE,
    };
    let qp = nic.create_qp(pd, attr).ok()?;
    Some(Side { qp, cq })
}

impl Hostile {
    fn join(cx: Context, mut random: Random) -> Option<Self> {
        let nic = cx.nic();
        let control = cx.connector.control(&nic, cx.link.clone());
        let scheme = control.welcome().scheme;
        let pd = nic.alloc_pd().ok()?;
        let rights = Access::LOCAL_ALL | Access::REMOTE_WRITE;
        let memory = nic.reg_mr(&pd, &nic.alloc_dma(4096).ok()?, rights).ok()?;
        let sides = if scheme.is_by_rpc() { 1 } else { 2 };
        let management: Vec<Side> =
            (0..sides).map(|_| side(&nic, &pd, 16)).collect::<Option<_>>()?;
        let group = |_| (0..cx.lanes).map(|_| side(&nic, &pd, 0)).collect::<Option<Vec<_>>>();
        let access: Vec<Vec<Side>> = (0..cx.groups).map(group).collect::<Option<_>>()?;
        let bulletin = memory.remote(BULLETIN);
        let wrong_bulletin = random.below(4) == 0;
        let numbers = |sides: &[Side]| sides.iter().map(|s| s.qp.qpn().raw()).collect();
        let admission = Admission {
            management: numbers(&management),
            groups: access.iter().map(|g| numbers(g)).collect(),
            bulletin_addr: bulletin.addr,
            bulletin_rkey: if wrong_bulletin { 0x1234_5678 } else { bulletin.rkey.0 },
        };
        let terms = loop {
            match control.admit(&admission) {
                Ok(terms) => break terms,
                Err(pool::Error::Refused { .. }) => fiber::sleep(Time::us(500)),
                Err(_) => return None,
            }
        };
        let me = Self {
            cx,
            nic,
            pd,
            memory,
            management,
            access,
            control,
            terms,
            scheme,
            random,
            held: Vec::new(),
            had: Vec::new(),
            number: 1,
            out: false,
        };
        let peers = me.terms.management.iter().map(|q| Qpn::new(*q));
        for (side, peer) in me.management.iter().zip(peers) {
            side.qp.connect(peer).ok()?;
        }
        for (sides, peers) in me.access.iter().zip(&me.terms.groups) {
            for (side, peer) in sides.iter().zip(peers) {
                side.qp.connect(Qpn::new(*peer)).ok()?;
            }
        }
        Some(me)
    }

    fn round(&mut self) {
        // A type-1 window opens to whoever guesses its key: that is what is unsafe about it.
        let may_guess = self.scheme != SchemeKind::RpcMw1;
        match self.random.below(16) {
            0..=3 => self.allocate(&[]),
            4 => self.free_own(),
            5 => self.free_what_was(),
            6 => self.free_anything(),
            7 => self.use_what_was(),
            8 if may_guess => self.steal(),
            9 if may_guess => self.guess(),
            10 => self.reach_beyond(),
            11 if !self.scheme.is_by_rpc() => self.name_others(),
            12 => self.unanswerable(),
            13 => self.malformed(),
            14 => self.flood(),
            _ => self.windows(),
        }
    }

    // --- requests ------------------------------------------------------------------------------

    /// Posts a request; false if there is no room.
    fn send(&mut self, which: usize, data: &[u8]) -> bool {
        let to = self.memory.sge(which * 128, 64);
        let to = if self.scheme.is_by_rpc() { &[to][..] } else { &[] };
        let side = &self.management[which];
        let receive = ReceiveRequest { id: 1, to };
        let op = Op::SendInline { data };
        side.qp.post_recv(&receive).is_ok()
            && side.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).is_ok()
    }

    /// The next answer: whether it came, and came well.
    fn answer(&mut self, which: usize) -> Option<bool> {
        let cq = self.management[which].cq.clone();
        self.next(&cq, CompletionKind::Receive).map(|status| status == Status::Success)
    }

    fn next(&self, cq: &HookedCq<SimHooks>, kind: CompletionKind) -> Option<Status> {
        let mut one = [Completion::EMPTY];
        let until = self.cx.now() + Time::from(PATIENCE);
        while self.cx.now() < until {
            if cq.poll(&mut one) == 0 {
                cq.wait(PATIENCE).ok()?;
            } else if one[0].kind == kind || one[0].status != Status::Success {
                return Some(one[0].status);
            }
        }
        None
    }

    fn ask_allocate(&mut self, named: &[u32], target: Remote) -> Vec<u8> {
        self.number += 1;
        if self.scheme.is_by_rpc() {
            let mut data = vec![0; 16];
            data[0] = 1;
            data[8..].copy_from_slice(&self.number.to_be_bytes());
            return data;
        }
        let own = &self.terms.groups[0];
        let names = own.iter().enumerate().map(|(i, q)| named.get(i).copied().unwrap_or(*q));
        let mut data: Vec<u8> = names.flat_map(|q| q.to_be_bytes()[1..].to_vec()).collect();
        data.extend(target.addr.to_be_bytes());
        data.extend(target.rkey.0.to_be_bytes());
        data
    }

    fn ask_free(&mut self, entry: u32, target: Remote) -> Vec<u8> {
        self.number += 1;
        let mut data = vec![];
        if self.scheme.is_by_rpc() {
            data.resize(16, 0);
            data[0] = 2;
            data[4..8].copy_from_slice(&entry.to_be_bytes());
            data[8..].copy_from_slice(&self.number.to_be_bytes());
        } else {
            data.extend(&entry.to_be_bytes()[1..]);
            data.extend(target.addr.to_be_bytes());
            data.extend(target.rkey.0.to_be_bytes());
        }
        data
    }

    fn free_side(&self) -> usize {
        self.management.len() - 1
    }

    /// Allocates, for the QPs that are `named` instead of its own.
    fn allocate(&mut self, named: &[u32]) {
        let who = self.cx.who;
        let target = self.memory.remote(0);
        let data = self.ask_allocate(named, target);
        self.cx.tell(|o| o.asks(who));
        let sent = self.send(0, &data);
        match sent.then(|| self.answer(0)).flatten() {
            Some(true) => match self.granted() {
                Some(grant) => {
                    self.cx.tell(|o| o.granted(who, &grant));
                    self.held.push(grant);
                    self.had.push(grant);
                    let data = [0xbb; 8];
                    self.access(0, 0, Op::WriteInline { to: to(&grant, 0, 8), data: &data });
                }
                None => self.cx.tell(|o| o.not_granted(who, "there is none")),
            },
            _ => {
                self.recover();
                self.cx.tell(|o| o.not_granted(who, "the connection broke"));
            }
        }
    }

    /// The grant that stands in its memory.
    fn granted(&self) -> Option<Grant> {
        let mut b = [0; 64];
        self.memory.memory().read(0, &mut b);
        let lanes = self.cx.lanes;
        let be32 = |at: usize| u32::from_be_bytes(b[at..at + 4].try_into().expect("4 bytes"));
        let be64 = |at: usize| u64::from_be_bytes(b[at..at + 8].try_into().expect("8 bytes"));
        let bytes = self.terms.chunk_bytes;
        if self.scheme.is_by_rpc() {
            let keys: Vec<Key> = (0..lanes).map(|i| Key(be32(32 + 4 * i))).collect();
            return (b[0] == 1).then(|| Grant::new(be64(16), bytes, be32(4), GroupId(0), &keys));
        }
        let key = |window: usize| {
            let index = &b[reply::KEYS + 3 * window..][..3];
            let tag = b[reply::TAGS + 8 * (window / 4) + 4 + window % 4];
            Key(u32::from_be_bytes([index[0], index[1], index[2], tag]))
        };
        let keys: Vec<Key> = (1..=lanes).map(key).collect();
        let entry = be32(reply::ENTRY) >> 8;
        let granted = b[reply::STATUS] == status::GRANTED;
        granted.then(|| Grant::new(be64(reply::CHUNK), bytes, entry, GroupId(0), &keys))
    }

    fn free_own(&mut self) {
        let Some(grant) = self.held.pop() else { return };
        let (who, keys) = (self.cx.who, grant.keys().to_vec());
        self.cx.tell(|o| o.frees(who, grant.entry, &keys));
        if self.free(grant.entry) {
            self.cx.tell(|o| o.freed(who, grant.entry, &keys));
        }
    }

    /// Asks for an entry to be freed; true if that is answered with "freed".
    fn free(&mut self, entry: u32) -> bool {
        let which = self.free_side();
        let target = self.memory.remote(which * 128);
        let data = self.ask_free(entry, target);
        let mine = self.cx.tell(|o| o.may_own(self.cx.who, entry));
        let sent = self.send(which, &data);
        if sent.then(|| self.answer(which)).flatten() != Some(true) {
            self.recover();
            return false;
        }
        let mut b = [0; 64];
        self.memory.memory().read(which * 128, &mut b);
        let freed = match self.scheme.is_by_rpc() {
            true => b[0] == 1,
            false => b[reply::FREE_STATUS + 3] == status::FREED,
        };
        if freed && !mine {
            self.cx.tell(|o| {
                let name = o.name(self.cx.who);
                o.wrong(format!("{name} frees chunk {entry}, which is not its own"));
            });
        }
        freed
    }

    /// Frees again what it had, whoever has it now.
    fn free_what_was(&mut self) {
        if self.had.is_empty() {
            return;
        }
        let at = self.random.below(self.had.len() as u64) as usize;
        let entry = self.had[at].entry;
        self.free_and_forget(entry);
    }

    fn free_anything(&mut self) {
        let entry = match self.random.below(4) {
            0 => self.random.bits() as u32 & 0xff_ffff,
            _ => self.random.below(10) as u32,
        };
        self.free_and_forget(entry);
    }

    fn free_and_forget(&mut self, entry: u32) {
        let who = self.cx.who;
        let held = self.held.iter().position(|g| g.entry == entry);
        let held = held.map(|at| self.held.swap_remove(at));
        if let Some(grant) = &held {
            self.cx.tell(|o| o.frees(who, entry, grant.keys()));
        }
        let freed = self.free(entry);
        if let Some(grant) = held.filter(|_| freed) {
            self.cx.tell(|o| o.freed(who, entry, grant.keys()));
        }
    }

    fn name_others(&mut self) {
        self.cx.tell(|o| o.misnamed = true);
        let lane = self.terms.groups[0][0];
        let near = lane.wrapping_add_signed(self.random.below(60) as i32 - 30) & Qpn::MAX;
        let named = *self.random.pick(&[near, near, self.terms.management[0], Qpn::NONE.raw(), 0]);
        self.allocate(&[named, named]);
    }

    /// Wants an answer where none can be: no key opens it, or nobody waits.
    fn unanswerable(&mut self) {
        if self.random.below(2) == 0 {
            return self.malformed();
        }
        let who = self.cx.who;
        let rkey = Key(self.random.bits() as u32);
        let target = Remote { addr: self.memory.remote(0).addr, rkey };
        self.cx.tell(|o| o.asks(who));
        let data = self.ask_allocate(&[], target);
        self.send(0, &data);
        let _ = self.answer(0);
        self.recover();
        self.cx.tell(|o| o.not_granted(who, "it wanted no answer"));
    }

    /// Something that is no request.
    fn malformed(&mut self) {
        let which = self.random.below(self.management.len() as u64) as usize;
        let data: Vec<u8> = (0..self.random.below(60)).map(|_| self.random.bits() as u8).collect();
        // It may happen to be one, and to free what is its own.
        let who = self.cx.who;
        for grant in std::mem::take(&mut self.held) {
            self.cx.tell(|o| o.frees(who, grant.entry, grant.keys()));
        }
        self.cx.tell(|o| {
            o.misnamed = true;
            o.asks(who);
        });
        self.send(which, &data);
        let _ = self.answer(which);
        self.recover();
        self.cx.tell(|o| o.not_granted(who, "it sent what is no request"));
    }

    /// More requests than it may have in flight, at once.
    fn flood(&mut self) {
        let which = self.free_side();
        let count = 1 + self.random.below(8);
        for _ in 0..count {
            let entry = 0xff_ff00 + self.random.below(0xff) as u32;
            let target = self.memory.remote(which * 128);
            let data = self.ask_free(entry, target);
            self.send(which, &data);
        }
        for _ in 0..count {
            if self.answer(which) != Some(true) {
                return self.recover();
            }
        }
    }

    /// Re-establishes its management connection.
    fn recover(&mut self) {
        for side in &self.management {
            let _ = side.qp.modify(QpChange::Reset);
        }
        let mut old = [Completion::EMPTY; 16];
        for side in &self.management {
            while side.cq.poll(&mut old) > 0 {}
        }
        match self.control.reset_management() {
            Ok(peers) => {
                for (side, peer) in self.management.iter().zip(peers) {
                    let _ = side.qp.connect(Qpn::new(peer));
                }
            }
            Err(_) => self.out = true,
        }
    }

    // --- accesses ------------------------------------------------------------------------------

    /// Posts an access on a lane, and re-establishes that if it broke. True if it was done.
    fn access(&mut self, group: usize, lane: usize, op: Op<'_>) -> bool {
        let side = &self.access[group][lane];
        let (qp, cq) = (side.qp.clone(), side.cq.clone());
        if qp.post_send(&[WorkRequest { id: 3, op, signaled: true }]).is_err() {
            return false;
        }
        if self.next(&cq, CompletionKind::Send) == Some(Status::Success) {
            return true;
        }
        let _ = qp.modify(QpChange::Reset);
        let mut old = [Completion::EMPTY; 16];
        while cq.poll(&mut old) > 0 {}
        match self.control.reset_access(GroupId(group as u16), Lane(lane as u8)) {
            Ok(peer) => _ = qp.connect(Qpn::new(peer)),
            Err(_) => self.out = true,
        }
        false
    }

    /// Some access of a random kind.
    fn access_at(&mut self, lane: usize, at: Remote, len: u32) {
        let local = self.memory.sge(SCRATCH, len.min(1024));
        let local = [local];
        let word = self.memory.sge(SCRATCH, 8);
        let op = match self.random.below(4) {
            0 => Op::Read { from: at, to: &local },
            1 => Op::Write { to: at, from: &local },
            2 => Op::FetchAdd { at, add: 1, old: word },
            _ => Op::CompareSwap { at, compare: 0, swap: u64::MAX, old: word },
        };
        let group = self.random.below(self.access.len() as u64) as usize;
        self.access(group, lane, op);
    }

    fn some_lane(&mut self) -> usize {
        self.random.below(self.cx.lanes as u64) as usize
    }

    fn use_what_was(&mut self) {
        if self.had.is_empty() {
            return;
        }
        let at = self.random.below(self.had.len() as u64) as usize;
        let (grant, lane) = (self.had[at], self.some_lane());
        let offset = 8 * self.random.below(8);
        self.access_at(lane, to(&grant, lane, offset), 8);
    }

    /// Uses a key that somebody else was granted.
    fn steal(&mut self) {
        let all = self.cx.tell(|o| o.keys_of_others(self.cx.who));
        if all.is_empty() {
            return self.guess();
        }
        let (_, addr, rkey) = *self.random.pick(&all);
        let lane = self.some_lane();
        self.access_at(lane, Remote { addr, rkey }, 8);
    }

    /// Tries tags of keys that it had, and keys beside them, at any chunk.
    fn guess(&mut self) {
        let Some(grant) = self.had.last().copied() else { return };
        let base = grant.addr - grant.entry as u64 * grant.len;
        for _ in 0..4 {
            let lane = self.some_lane();
            let key = grant.keys()[lane].0;
            let by = self.random.below(16) as u32;
            let rkey = match self.random.below(2) {
                0 => Key(key.wrapping_add(by)),
                _ => {
                    Key((key & 0xff).wrapping_add((key >> 8).wrapping_sub(8).wrapping_add(by) << 8))
                }
            };
            let addr = base + self.random.below(8) * grant.len;
            self.access_at(lane, Remote { addr, rkey }, 8);
        }
    }

    fn reach_beyond(&mut self) {
        let Some(grant) = self.held.last().copied() else { return };
        let lane = self.some_lane();
        let key = grant.keys()[lane];
        let (addr, len) = match self.random.below(4) {
            0 => (grant.addr + grant.len - 8, 16),
            1 => (grant.addr - 8, 16),
            2 => (grant.addr + grant.len, 8),
            _ => (grant.addr, grant.len as u32 + 8),
        };
        self.access_at(lane, Remote { addr, rkey: key }, len);
    }

    /// Binds windows of its own in ways that only the NIC's owner may.
    fn windows(&mut self) {
        let Ok(window) = self.nic.alloc_mw(&self.pd) else { return };
        let own = self.access[0][0].qp.qpn();
        let others = Qpn::new(self.terms.groups[0][0]);
        let bind = |qpn: Qpn| {
            let key = window.key();
            let (mr, start) = (self.memory.key(), self.memory.remote(0).addr);
            Umr::bind(key, key.tag().wrapping_add(1), qpn, Access::REMOTE_READ, mr, start, 64)
        };
        let (foreign, proper) = (bind(others), bind(own));
        let bound = Key::new(window.key().index(), window.key().tag().wrapping_add(1));
        if self.access(0, 0, Op::Window(&foreign)) {
            self.cx.tell(|o| o.wrong("a guest's window is bound to another's QP"));
        }
        if self.access(0, 0, Op::Window(&proper))
            && self.access(0, 0, Op::Window(&Umr::unbind(bound, false)))
        {
            self.cx.tell(|o| o.wrong("a guest unbinds without the QP check"));
        }
    }
}

fn to(grant: &Grant, lane: usize, offset: u64) -> Remote {
    Remote { addr: grant.addr + offset, rkey: grant.keys()[lane] }
}
