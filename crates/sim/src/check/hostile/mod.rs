//! A client that violates the protocol, with raw verbs.
//!
//! It replays old grants, names foreign objects, guesses keys, accesses memory beyond its chunks,
//! requests replies to addresses that cannot be written, and sends malformed requests. It is
//! admitted like any client and allocates correctly now and then, so that there is something to
//! replay. The oracle detects forbidden gains; the checks of the honest clients show that they are
//! not disturbed.

mod accesses;
mod chunks;
mod engine;
mod leases;
mod misuse;
mod nic_abuse;
mod pages;
mod trees;

use std::time::Duration;

use pool::Scheme;
use pool::client::control::ControlPlane;
use rnic::nic::SoftPd;
use rnic::nic::interposed::{InterposedCq, InterposedMr, InterposedQp};
use scheme::{ClientScheme, ConnectReply, ConnectRequest, Grant, GroupId, Lane};
use schemes::odrp::PAGE_BYTES;
use verbs::{
    Access, Completion, CompletionKind, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr,
    QpChange, Qpn, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Remote, Status, WorkRequest,
};

pub use self::misuse::Misuse;
use super::Context;
use super::scenario::{End, Role};
use crate::cluster::SimControl;
use crate::fiber;
use crate::nic::{SimHooks, SimNic};
use crate::random::Random;
use crate::time::Time;

/// Offsets in the client's memory of replies (0), of the bytes for accesses, and of the bulletin.
const SCRATCH: usize = 1024;
const BULLETIN: usize = 3072;
/// Bytes of the longest reply.
const REPLY: u32 = schemes::patronus::message::REPLY_BYTES as u32;
/// Offset of the page, if access is by pages.
const PAGE: usize = 4096;
/// How long the client waits for an answer that may never come.
const PATIENCE: Duration = Duration::from_micros(300);

#[derive(Clone)]
struct Side {
    qp: InterposedQp<SimHooks>,
    cq: InterposedCq<SimHooks>,
}

struct Hostile {
    cx: Context,
    nic: SimNic,
    pd: SoftPd,
    memory: InterposedMr<SimHooks>,
    management: Vec<Side>,
    /// The trusted service that allocates for the client, if compute nodes allocate by themselves.
    service: Option<trees::Service>,
    access: Vec<Vec<Side>>,
    control: SimControl,
    terms: ConnectReply,
    scheme: Scheme,
    random: Random,
    held: Vec<Grant>,
    /// All grants that the client ever had.
    had: Vec<Grant>,
    /// All permissions that the client ever had, in a scheme with leases.
    leased: Vec<leases::Had>,
    number: u64,
    /// Whether the connection is lost.
    out: bool,
    /// RNG for adversarial NIC operations, if enabled.
    nic_random: Option<Random>,
}

/// Program of a hostile client's fiber.
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
            // Leaves with requests in flight.
            for _ in 0..me.final_request_count() {
                me.send_any_request();
            }
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
        access: Access::REMOTE_READ | Access::REMOTE_WRITE,
    };
    let qp = nic.create_qp(pd, attr).ok()?;
    Some(Side { qp, cq })
}

impl Hostile {
    fn join(cx: Context, mut random: Random) -> Option<Self> {
        let nic = cx.nic();
        let control = cx.connector.control(&nic, cx.link.clone());
        let scheme = cx.case.scheme;
        let functions = control.welcome().offer.functions as usize;
        let qps = functions + control.welcome().offer.spares as usize;
        let pd = nic.alloc_pd().ok()?;
        let separation = cx.case.separation;
        let rights = Access::LOCAL_ALL | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let bytes = if cx.case.is_paged() { PAGE + PAGE_BYTES } else { PAGE };
        let memory = nic.reg_mr(&pd, &nic.alloc_dma(bytes).ok()?, rights).ok()?;
        let by_itself = cx.case.is_trusting();
        let sides = match scheme.needs_cpu() || !separation {
            _ if by_itself => 0,
            _ if cx.case.has_engine() => 1,
            true => 1,
            false => 2,
        };
        let service = match by_itself {
            true => Some(Box::new(
                schemes::finemem::Client::new(&nic, &pd, &control.welcome().offer).ok()?,
            )),
            false => None,
        };
        let management: Vec<Side> =
            (0..sides).map(|_| side(&nic, &pd, 16)).collect::<Option<_>>()?;
        // Without separation, allocation requests use the first access lane.
        let receives = |lane: usize| if separation || lane > 0 { 0 } else { 16 };
        let group = |_| {
            (0..cx.lanes * qps)
                .map(|lane| side(&nic, &pd, receives(lane)))
                .collect::<Option<Vec<_>>>()
        };
        let access: Vec<Vec<Side>> = (0..cx.groups).map(group).collect::<Option<_>>()?;
        let bulletin = memory.remote(BULLETIN);
        let wrong_bulletin = random.below(4) == 0;
        let numbers = |sides: &[Side]| sides.iter().map(|s| s.qp.qpn().raw()).collect();
        let admission = ConnectRequest {
            management: match &service {
                Some(service) => service.management().iter().map(|q| q.raw()).collect(),
                None => numbers(&management),
            },
            groups: access.iter().map(|g| numbers(g)).collect(),
            bulletin_addr: bulletin.addr,
            domain: cx.domain,
            bulletin_rkey: if wrong_bulletin { 0x1234_5678 } else { bulletin.rkey.0 },
            ..ConnectRequest::default()
        };
        let terms = loop {
            match control.admit(&admission) {
                Ok(terms) => break terms,
                Err(pool::Error::Refused { .. }) => fiber::sleep(Time::us(500)),
                Err(_) => return None,
            }
        };
        let me = Self {
            nic_random: cx.nic_random.clone(),
            cx,
            nic,
            pd,
            memory,
            management,
            service,
            access,
            control,
            terms,
            scheme,
            random,
            held: Vec::new(),
            had: Vec::new(),
            leased: Vec::new(),
            number: 1,
            out: false,
        };
        let peers = me.terms.management.iter().map(|q| Qpn::new(*q));
        for (side, peer) in me.management.iter().zip(peers) {
            side.qp.connect(peer).ok()?;
        }
        if let Some(service) = &me.service {
            trees::start(service, &me.terms)?;
        }
        me.connect_access()?;
        Some(me)
    }

    fn connect_access(&self) -> Option<()> {
        for (sides, peers) in self.access.iter().zip(&self.terms.groups) {
            for (side, peer) in sides.iter().zip(peers) {
                side.qp.connect(Qpn::new(*peer)).ok()?;
            }
        }
        Some(())
    }

    fn round(&mut self) {
        if let Some(misuse) = self.cx.case.misuse {
            return self.misuse(misuse);
        }
        if self.nic_random.as_mut().is_some_and(|random| random.below(4) == 0) {
            return self.abuse_nic();
        }
        if self.cx.case.has_engine() {
            return self.round_on_engine();
        }
        if self.cx.case.has_leases() {
            return self.round_on_leases();
        }
        if self.cx.case.is_paged() {
            return self.round_on_pages();
        }
        if self.service.is_some() {
            return self.round_on_trees();
        }
        // A type-1 window opens to any client that guesses its key; the scheme is unsafe in this
        // respect.
        let withstands = !self.scheme.isolation.has_type1_windows();
        let may_guess = withstands || self.cx.case.unsafe_by_design.is_some();
        match self.random.below(16) {
            0..=3 => self.allocate(&[]),
            4 => self.free_own(),
            5 => self.free_former(),
            6 => self.free_anything(),
            7 => self.use_former_key(),
            8 if withstands => self.steal(),
            9 if may_guess => self.guess(),
            10 => self.access_beyond(),
            11 if !self.scheme.needs_cpu() => self.name_foreign_qps(),
            12 => self.unanswerable(),
            13 => self.malformed(),
            14 => self.flood(),
            _ => self.windows(),
        }
    }

    // --- requests ------------------------------------------------------------------------------

    /// Returns the number of queues for requests.
    fn kinds(&self) -> usize {
        if self.cx.case.separation { self.management.len() } else { 2 }
    }

    /// Returns the QP for requests of a kind.
    fn side(&self, which: usize) -> &Side {
        match (self.cx.case.separation, which) {
            (true, which) => &self.management[which],
            (false, 0) => &self.access[0][0],
            (false, _) => &self.management[0],
        }
    }

    /// Posts a request. Returns false if a queue is full.
    fn send(&mut self, which: usize, data: &[u8]) -> bool {
        let to = self.memory.sge(which * 128, REPLY);
        let to = if self.scheme.needs_cpu() { &[to][..] } else { &[] };
        let side = self.side(which);
        let receive = ReceiveRequest { id: 1, to };
        let op = Op::SendInline { data };
        side.qp.post_recv(&receive).is_ok()
            && side.qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).is_ok()
    }

    /// Waits for the next answer. Returns whether it was successful; `None` if no answer came.
    fn answer(&mut self, which: usize) -> Option<bool> {
        let cq = self.side(which).cq.clone();
        self.next(&cq, CompletionKind::Receive).map(|status| status == Status::Success)
    }

    fn next(&self, cq: &InterposedCq<SimHooks>, kind: CompletionKind) -> Option<Status> {
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

    /// Re-establishes the management connection.
    fn recover(&mut self) {
        // Without separation, all QPs are re-established at once.
        let access = self.access.iter().flatten().filter(|_| !self.cx.case.separation);
        let mut old = [Completion::EMPTY; 16];
        for side in self.management.iter().chain(access) {
            let _ = side.qp.modify(QpChange::Reset);
            while side.cq.poll(&mut old) > 0 {}
        }
        match self.control.reset_management() {
            Ok(peers) => {
                if !self.cx.case.separation {
                    let _ = self.connect_access();
                }
                for (side, peer) in self.management.iter().zip(peers) {
                    let _ = side.qp.connect(peer);
                }
            }
            Err(_) => self.out = true,
        }
    }

    // --- accesses ------------------------------------------------------------------------------

    /// Returns the index within a group of the QP for a grant and a lane.
    fn qp_index(&self, grant: &Grant, lane: usize) -> usize {
        grant.function as usize * self.cx.lanes + lane
    }

    /// Posts an access on a QP of a group, and re-establishes the QP if it broke. Returns whether
    /// the access succeeded.
    fn access(&mut self, group: usize, lane: usize, op: Op<'_>) -> bool {
        let side = &self.access[group][lane];
        let (qp, cq) = (side.qp.clone(), side.cq.clone());
        if qp.post_send(&[WorkRequest { id: 3, op, signaled: true }]).is_err() {
            return false;
        }
        if self.next(&cq, CompletionKind::Send) == Some(Status::Success) {
            return true;
        }
        if !self.cx.case.separation {
            self.recover();
            return false;
        }
        let _ = qp.modify(QpChange::Reset);
        let mut old = [Completion::EMPTY; 16];
        while cq.poll(&mut old) > 0 {}
        match self.control.reset_access(GroupId(group as u16), Lane(lane as u8)) {
            Ok(peer) => _ = qp.connect(peer),
            Err(_) => self.out = true,
        }
        false
    }
}

fn to(grant: &Grant, lane: usize, offset: u64) -> Remote {
    Remote { addr: grant.addr + offset, rkey: grant.keys()[lane] }
}
