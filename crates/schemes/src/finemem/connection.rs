//! The memory node's state for one client.

use std::ops::Range;

use scheme::client_table::{AccessQps, ClientEntry, PeerQp};
use scheme::index::{IndexRange, Slot};
use scheme::wakeup::poll_until;
use scheme::{ConnectRequest, Error, Start};
use verbs::wqe::Umr;
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow, Nic, Op, QpAttr,
    QpChange, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Status, WorkRequest,
};

use super::block::{Order, SectionIndex};
use super::function::Function;
use super::header::User;

/// Receives for scan requests: a client has one request at a time, and there may be more from
/// before a reset.
const SCAN_REQUESTS: u32 = 4;
/// The slots of scan requests.
const SLOTS: Range<Slot> = Slot::new(0)..Slot::new(SCAN_REQUESTS);
/// Bytes of a scan request.
const REQUEST_BYTES: usize = 8;
/// Building blocks of the management QP: the bind of its window, and answers to scan requests.
const BLOCKS: u32 = 16;

/// A client.
pub(super) struct Connection<N: Nic> {
    pub user: User,
    /// The QP through which the client reads and changes the metadata.
    pub management: PeerQp<N>,
    /// Receives the completions of the management QP's sends and binds.
    sent: N::Cq,
    /// Buffer of scan requests.
    inbox: N::Mr,
    /// The window that gives the management QP access to the metadata, and its key.
    _window: N::Mw,
    pub key: Key,
    /// Access QPs by group, function and lane.
    pub access: AccessQps<N>,
    /// The client's pending scan request.
    pub scan_request: Option<ScanRequest>,
    /// Progress of reclamation, if the client has departed.
    pub leaving: Option<Leaving>,
}

/// A client's request for a completed scan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ScanRequest {
    /// The request is answered by a scan that begins after this number of scans.
    pub begun: u64,
    /// Order of the wanted block; `None` if no block has the requested order.
    pub order: Option<Order>,
}

/// Progress of reclaiming a departed client's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Leaving {
    /// Sections below this one have been searched.
    Sections(SectionIndex),
    /// All its blocks are in quarantine; a scan after this number of scans releases them.
    Scanned(u64),
}

/// Resources that the QPs of all clients use.
pub(super) struct ConnectionResources<'a, N: Nic> {
    pub nic: &'a N,
    /// The functions that serve accesses.
    pub functions: &'a [Function<N>],
    /// Access QPs of a group to each function.
    pub lanes: usize,
    /// The PD of the metadata.
    pub metadata_pd: &'a N::Pd,
    pub metadata: &'a N::Mr,
    /// Receives scan requests.
    pub requests: &'a N::Cq,
    /// The windows of blocks check the QP's tag.
    pub guarded: bool,
}

impl<N: Nic> Connection<N> {
    /// Creates a client's QPs, and gives its management QP access to the metadata.
    pub fn new(
        common: &ConnectionResources<'_, N>,
        user: User,
        request: &ConnectRequest,
    ) -> Result<Self, Error> {
        let nic = common.nic;
        let sent = nic.create_cq(CqAttr { entries: 2 * BLOCKS, ignore_overrun: false })?;
        let management = nic.create_qp(
            common.metadata_pd,
            QpAttr {
                send_cq: &sent,
                recv_cq: common.requests,
                send_blocks: BLOCKS,
                receive: Receive::Own(ReceiveAttr { entries: SCAN_REQUESTS, max_sges: 1 }),
                access: Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            },
        )?;
        let inbox = nic.alloc_dma(SCAN_REQUESTS as usize * REQUEST_BYTES)?;
        let inbox = nic.reg_mr(common.metadata_pd, &inbox, Access::LOCAL_ALL)?;
        let access = AccessQps::new(request, |index| {
            let function = &common.functions[index / common.lanes];
            function.create_access_qp(common.guarded.then_some(user))
        })?;
        let window = nic.alloc_mw(common.metadata_pd)?;
        let (scan_request, leaving) = (None, None);
        let mut key = window.key();
        let management = PeerQp { qp: management, peer: request.peer(request.management[0]) };
        management.connect()?;
        grant_metadata_access(common, (&management.qp, &sent), &mut key)?;
        let peer = Self {
            user,
            management,
            sent,
            inbox,
            _window: window,
            key,
            access,
            scan_request,
            leaving,
        };
        SLOTS.iter().try_for_each(|slot| peer.post_receive(slot))?;
        Ok(peer)
    }

    /// The order of the block that the scan request in a slot wants.
    pub fn wanted_order(&self, slot: Slot) -> u64 {
        self.inbox.memory().load_be64(slot.offset(REQUEST_BYTES))
    }

    /// Posts the receive of a slot for the next scan request.
    pub fn post_receive(&self, slot: Slot) -> Result<(), Error> {
        let to = self.inbox.sge(slot.offset(REQUEST_BYTES), REQUEST_BYTES as u32);
        Ok(self.management.qp.post_recv(&ReceiveRequest { id: slot.raw().into(), to: &[to] })?)
    }

    /// Reconnects the management QP. Its window stays bound.
    pub fn reconnect(&mut self) -> Result<(), Error> {
        self.scan_request = None;
        self.management.connect()?;
        SLOTS.iter().try_for_each(|slot| self.post_receive(slot))
    }

    /// Answers a scan request: the number of quarantines that the scan has ended, and the number of
    /// free blocks of the wanted order. Errors are ignored: a client that does not accept the
    /// answer has broken its connection.
    pub fn answer(&mut self, ended: u32, free: u32) {
        self.scan_request = None;
        while self.sent.poll(&mut [Completion::EMPTY; 16]) > 0 {}
        let op = Op::SendInline { data: &((ended as u64) << 32 | free as u64).to_be_bytes() };
        let _ = self.management.qp.post_send(&[WorkRequest { id: 0, op, signaled: true }]);
    }

    /// Shuts the client's QPs, so that its keys are useless, and starts reclamation.
    pub fn shut_down(&mut self) -> Result<(), Error> {
        self.management.qp.modify(QpChange::Error)?;
        self.access.shut_down()?;
        self.scan_request = None;
        self.leaving = Some(Leaving::Sections(SectionIndex::new(0)));
        Ok(())
    }
}

impl<N: Nic> ClientEntry for Connection<N> {
    type Nic = N;

    fn access(&self) -> &AccessQps<N> {
        &self.access
    }

    fn access_mut(&mut self) -> &mut AccessQps<N> {
        &mut self.access
    }

    fn set_management_start(&mut self, start: Start) {
        self.management.set_start(start);
    }

    fn is_open(&self) -> Result<bool, Error> {
        self.management.is_ready()
    }

    fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }
}

/// Binds the window over the metadata to the management QP only. An application that guesses the
/// window's key has no QP to use it on (FineMem §4.3 uses a trusted service for this).
fn grant_metadata_access<N: Nic>(
    common: &ConnectionResources<'_, N>,
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
            attempt: "giving a client access to the metadata".into(),
            why: "the NIC did not bind the window to its management QP".into(),
        });
    }
    *key = Key::new(key.index(), tag);
    Ok(())
}
