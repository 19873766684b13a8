//! What the memory node has for one compute node.

use fabric::wqe::Umr;
use fabric::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow, Nic, Op,
    PeerAddress, QpAttr, QpChange, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Status,
    WorkRequest,
};

use super::function::Function;
use super::header::User;
use crate::Error;
use crate::events::poll_until;
use crate::scheme::Admission;

/// Requests for a scan that may wait: a compute node has one at a time, and as many again of before a reset.
const BELLS: u32 = 4;
/// Building blocks of the management QP: the bind of its window, and answers to bells.
const BLOCKS: u32 = 16;

/// A compute node.
pub(super) struct Peer<N: Nic> {
    pub user: User,
    /// Through it the compute node reads and changes the metadata.
    pub management: N::Qp,
    pub management_peer: PeerAddress,
    /// What it sends, and binds, completes here.
    sent: N::Cq,
    /// Where bells say what is wanted: 8 bytes each.
    inbox: N::Mr,
    /// The window that opens the metadata to that QP, and its key.
    _window: N::Mw,
    pub key: Key,
    /// Access QPs by group, function and lane, with whom they are connected to.
    pub groups: Vec<Vec<(N::Qp, PeerAddress)>>,
    /// It has asked for a scan.
    pub bell: Option<Bell>,
    /// It has gone.
    pub leaving: Option<Leaving>,
}

/// Somebody wants to know of a scan that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bell {
    /// Of one that began after this many had.
    pub begun: u64,
    /// The block that is wanted: 2^order chunks. Anything may stand here.
    pub order: u64,
}

/// How far a compute node that has gone was taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Leaving {
    /// Sections below this one were looked at.
    Sections(u32),
    /// What it had is in quarantine; the scan that ends it is the one after this many.
    Scanned(u64),
}

/// What QPs of all compute nodes share.
pub(super) struct Common<'a, N: Nic> {
    pub nic: &'a N,
    /// What answers accesses.
    pub functions: &'a [Function<N>],
    /// Access QPs of a group to each of them.
    pub lanes: usize,
    /// The PD of the metadata.
    pub metadata_pd: &'a N::Pd,
    pub metadata: &'a N::Mr,
    /// Bells ring here.
    pub requests: &'a N::Cq,
    /// The windows of blocks ask whose QP it is.
    pub guarded: bool,
}

impl<N: Nic> Peer<N> {
    /// QPs for a compute node, and the metadata opened to its management QP.
    pub fn new(common: &Common<'_, N>, user: User, request: &Admission) -> Result<Self, Error> {
        let nic = common.nic;
        let sent = nic.create_cq(CqAttr { entries: 2 * BLOCKS, ignore_overrun: false })?;
        let [management_peer] = request.management[..] else {
            return Err(Error::Refused {
                attempt: "admitting a compute node".into(),
                why: format!("it names {} management QPs, not one", request.management.len()),
            });
        };
        let management = nic.create_qp(
            common.metadata_pd,
            QpAttr {
                send_cq: &sent,
                recv_cq: common.requests,
                send_blocks: BLOCKS,
                receive: Receive::Own(ReceiveAttr { entries: BELLS, max_sges: 1 }),
                access: Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            },
        )?;
        let inbox = nic.alloc_dma(8 * BELLS as usize)?;
        let inbox = nic.reg_mr(common.metadata_pd, &inbox, Access::LOCAL_ALL)?;
        let path = |(at, peer): (usize, &u32)| -> Result<(N::Qp, PeerAddress), Error> {
            let function = &common.functions[at / common.lanes];
            let peer = request.peer(*peer);
            Ok((function.answer(peer, common.guarded.then_some(user))?, peer))
        };
        let groups = request
            .groups
            .iter()
            .map(|group| group.iter().enumerate().map(path).collect())
            .collect::<Result<_, _>>()?;
        let window = nic.alloc_mw(common.metadata_pd)?;
        let (bell, leaving) = (None, None);
        let (management_peer, mut key) = (request.peer(management_peer), window.key());
        management.connect(management_peer)?;
        open_metadata(common, (&management, &sent), &mut key)?;
        let peer = Self {
            user,
            management,
            management_peer,
            sent,
            inbox,
            _window: window,
            key,
            groups,
            bell,
            leaving,
        };
        (0..BELLS).try_for_each(|slot| peer.listen(slot))?;
        Ok(peer)
    }

    /// The order of the block that the bell in a slot wants.
    pub fn wanted(&self, slot: u32) -> u64 {
        self.inbox.memory().load_be64(slot as usize * 8)
    }

    /// Takes a bell.
    pub fn listen(&self, slot: u32) -> Result<(), Error> {
        let to = self.inbox.sge(slot as usize * 8, 8);
        Ok(self.management.post_recv(&ReceiveRequest { id: slot as u64, to: &[to] })?)
    }

    /// Connects the management QP anew. Its window lives on.
    pub fn reconnect(&mut self) -> Result<(), Error> {
        self.bell = None;
        self.management.connect(self.management_peer)?;
        (0..BELLS).try_for_each(|slot| self.listen(slot))
    }

    /// Answers a bell: the scan has ended; how many quarantines it has ended, and how many blocks of the wanted
    /// order are free. One that does not take answers has broken its connection.
    pub fn answer(&mut self, ended: u32, free: u32) {
        self.bell = None;
        while self.sent.poll(&mut [Completion::EMPTY; 16]) > 0 {}
        let op = Op::SendInline { data: &((ended as u64) << 32 | free as u64).to_be_bytes() };
        let _ = self.management.post_send(&[WorkRequest { id: 0, op, signaled: true }]);
    }

    /// From here on its keys open nothing: neither QP answers any more.
    pub fn shut(&mut self) -> Result<(), Error> {
        self.management.modify(QpChange::Error)?;
        for (qp, _) in self.groups.iter().flatten() {
            qp.modify(QpChange::Error)?;
        }
        self.bell = None;
        self.leaving = Some(Leaving::Sections(0));
        Ok(())
    }
}

/// Binds the window over the metadata to the management QP, and to no other: an application that guesses
/// its key has no QP to use it on (FineMem §4.3 has a trusted service there).
fn open_metadata<N: Nic>(
    common: &Common<'_, N>,
    (management, sent): (&N::Qp, &N::Cq),
    key: &mut Key,
) -> Result<(), Error> {
    let region = common.metadata;
    let (start, len) = (region.memory().addr(), region.memory().len() as u32);
    let tag = key.tag().wrapping_add(1);
    let access = Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let umr = Umr::bind(*key, tag, management.qpn(), access, region.key(), start, len);
    management.post_send(&[WorkRequest { id: 1, op: Op::Window(&umr), signaled: true }])?;
    let (qpn, mut bound) = (management.qpn(), false);
    poll_until(sent, 1, |c| {
        bound |= c.qpn == qpn && c.status == Status::Success;
        c.qpn == qpn
    })?;
    if !bound {
        return Err(Error::Refused {
            attempt: "opening the metadata to a compute node".into(),
            why: "the NIC did not bind the window to its management QP".into(),
        });
    }
    *key = Key::new(key.index(), tag);
    Ok(())
}
