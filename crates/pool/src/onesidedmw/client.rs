//! The client's side of OneSidedMW. A request is a SEND. The reply is a WRITE with immediate into a
//! slot of the client's own memory (OneSidedMW §4.3).
//!
//! ```text
//! allocate: QPN of each access QP of the group (3 bytes each) | reply address (8) | reply rkey (4)
//! free:     entry index (3)                                   | reply address (8) | reply rkey (4)
//! ```

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use verbs::completion::{Completer, Pending};
use verbs::{
    Access, CompletionQueue, CqAttr, Error as VerbsError, Key, MemoryRegion, Nic, Op, PeerAddress,
    QpAttr, QpChange, QpState, Qpn, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Status,
    WorkRequest,
};

use super::layout::{reply, status};
use crate::Error;
use crate::credits::Credits;
use crate::protocol::NodeHello;
use crate::scheme::{ClientScheme, Grant, GroupId, MAX_GROUP, WhenIdle};

/// Bytes of a reply slot.
const SLOT_BYTES: usize = 64;
/// Maximum bytes of a request.
const REQUEST_BYTES: usize = 3 * (MAX_GROUP - 1) + 12;

/// The scheme's client on the NIC `N`.
pub struct Client<N: Nic> {
    chunk_bytes: u64,
    /// The memory node's access QPs, by group and lane: windows are bound to these.
    access: OnceLock<Vec<Vec<Qpn>>>,
    alloc: Alloc<N>,
    free: RequestQueue<N>,
}

/// An access QP that is also used for requests, with the completer of its completions.
pub(crate) type SharedQp<N> = (<N as Nic>::Qp, Arc<Completer<<N as Nic>::Cq>>);

/// QPs for allocations.
enum Alloc<N: Nic> {
    /// One QP for allocations only.
    Separate(RequestQueue<N>),
    /// Without separation: the first access QP of each group. Set once these QPs are known.
    Access(OnceLock<Vec<RequestQueue<N>>>),
}

/// One QP for requests, with its reply slots.
struct RequestQueue<N: Nic> {
    qp: N::Qp,
    completer: Arc<Completer<N::Cq>>,
    /// The QP also carries accesses.
    shared: bool,
    replies: N::Mr,
    credits: Credits,
    /// Held while posting, so that receives and SENDs have the same order: the n-th reply answers
    /// the n-th request.
    order: Mutex<()>,
    /// False while the QP is in Reset, where requests would never complete. Changes under `order`.
    open: AtomicBool,
}

impl<N: Nic> Client<N> {
    /// Creates the management QPs.
    pub fn new(nic: &N, pd: &N::Pd, welcome: &NodeHello) -> Result<Self, Error> {
        Ok(Self {
            chunk_bytes: welcome.chunk_bytes,
            access: OnceLock::new(),
            alloc: match welcome.separation {
                true => Alloc::Separate(RequestQueue::new(nic, pd, welcome.credits)?),
                false => Alloc::Access(OnceLock::new()),
            },
            free: RequestQueue::new(nic, pd, welcome.credits)?,
        })
    }
}

impl<N: Nic> Client<N> {
    /// Without separation: sets the first access QP of each group, with its completer, for
    /// allocations.
    pub(crate) fn share_access_qps(
        &self,
        nic: &N,
        pd: &N::Pd,
        credits: u32,
        groups: Vec<SharedQp<N>>,
    ) -> Result<(), Error> {
        let Alloc::Access(allocs) = &self.alloc else { return Ok(()) };
        let over = |(qp, completer)| RequestQueue::over(nic, pd, credits, (qp, completer), true);
        let _ = allocs.set(groups.into_iter().map(over).collect::<Result<_, _>>()?);
        Ok(())
    }

    fn allocs(&self) -> &[RequestQueue<N>] {
        match &self.alloc {
            Alloc::Separate(alloc) => std::slice::from_ref(alloc),
            Alloc::Access(allocs) => allocs.get().map_or(&[], Vec::as_slice),
        }
    }

    fn queues(&self) -> impl Iterator<Item = &RequestQueue<N>> {
        self.allocs().iter().chain([&self.free])
    }
}

impl<N: Nic> RequestQueue<N> {
    fn new(nic: &N, pd: &N::Pd, credits: u32) -> Result<Self, Error> {
        // A receive and a SEND for each request, and the same number again, flushed by a reset.
        let cq = nic.create_cq(CqAttr { entries: credits * 4, ignore_overrun: false })?;
        let qp = nic.create_qp(
            pd,
            QpAttr {
                send_cq: &cq,
                recv_cq: &cq,
                send_blocks: credits * 2,
                receive: Receive::Own(ReceiveAttr { entries: credits, max_sges: 1 }),
                access: Access::REMOTE_WRITE,
            },
        )?;
        Self::over(nic, pd, credits, (qp, Arc::new(Completer::new(cq))), false)
    }

    /// Sends requests over an existing QP, whose completions go to the completer.
    fn over(
        nic: &N,
        pd: &N::Pd,
        credits: u32,
        (qp, completer): SharedQp<N>,
        shared: bool,
    ) -> Result<Self, Error> {
        let memory = nic.alloc_dma(credits as usize * SLOT_BYTES)?;
        let replies = nic.reg_mr(pd, &memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        Ok(Self {
            qp,
            completer,
            shared,
            replies,
            credits: Credits::new(credits),
            order: Mutex::new(()),
            open: AtomicBool::new(false),
        })
    }

    /// Sends `arguments` and the reply's address. Returns the bytes of the reply.
    async fn ask(&self, what: &str, arguments: &[u8]) -> Result<[u8; reply::BYTES], Error> {
        let credit = self.credits.take().await;
        let at = credit.slot() as usize * SLOT_BYTES;
        let memory = self.replies.memory();
        memory.zero(at, SLOT_BYTES);
        let mut request = [0u8; REQUEST_BYTES];
        let target = self.replies.remote(at);
        let n = arguments.len();
        request[..n].copy_from_slice(arguments);
        request[n..n + 8].copy_from_slice(&target.addr.to_be_bytes());
        request[n + 8..n + 12].copy_from_slice(&target.rkey.0.to_be_bytes());
        let (answered, sent) = loop {
            match self.post(what, &request[..n + 12]) {
                Err(Error::Verbs(VerbsError::QueueFull { .. })) if self.shared => {
                    self.make_room()?
                }
                posted => break posted?,
            }
        };
        let (answered, sent) = (answered.await?, sent.await?);
        // A received reply means that the request was executed, whatever the completion of the SEND
        // says.
        if answered.status != Status::Success {
            let status = match sent.status {
                Status::Success => answered.status,
                status => status,
            };
            return Err(Error::ManagementBroken { attempt: what.to_owned(), status });
        }
        // The reply was written before its completion, which was polled above.
        fence(Ordering::Acquire);
        let mut bytes = [0; reply::BYTES];
        memory.read(at, &mut bytes);
        Ok(bytes)
    }
}

type Posted<N> = Pending<<N as Nic>::Cq>;

impl<N: Nic> RequestQueue<N> {
    /// Posts a request and the receive for its reply. On a shared QP the SEND may find the queue
    /// full, so it is posted before the receive; a reply that arrives before the receive waits for
    /// it.
    fn post(&self, what: &str, request: &[u8]) -> Result<(Posted<N>, Posted<N>), Error> {
        let receive =
            || self.completer.submit(|id| self.qp.post_recv(&ReceiveRequest { id, to: &[] }));
        let send = || {
            self.completer.submit(|id| {
                let op = Op::SendInline { data: request };
                self.qp.post_send(&[WorkRequest { id, op, signaled: true }])
            })
        };
        let _order = self.order.lock();
        if !self.open.load(Ordering::Relaxed) {
            let (attempt, status) = (what.to_owned(), Status::Flushed);
            return Err(Error::ManagementBroken { attempt, status });
        }
        if self.shared {
            let sent = send()?;
            return Ok((receive()?, sent));
        }
        Ok((receive()?, send()?))
    }

    /// Polls completions, including those of accesses, to free room in the send queue.
    #[cold]
    fn make_room(&self) -> Result<(), Error> {
        if self.completer.poll() == 0 {
            self.completer.cq().wait(Duration::from_millis(1))?;
        }
        Ok(())
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    async fn allocate(&self, group: GroupId) -> Result<Grant, Error> {
        let groups = self.access.get().map_or(&[][..], Vec::as_slice);
        let lanes = groups.get(group.0 as usize).ok_or_else(|| Error::Refused {
            attempt: format!("allocating a chunk for QP group {}", group.0),
            why: format!("the client has {} QP groups", groups.len()),
        })?;
        let mut arguments = [0u8; 3 * (MAX_GROUP - 1)];
        for (qpn, at) in lanes.iter().zip(arguments.chunks_exact_mut(3)) {
            at.copy_from_slice(&qpn.raw().to_be_bytes()[1..]);
        }
        let alloc = match &self.alloc {
            Alloc::Separate(alloc) => alloc,
            Alloc::Access(_) => &self.allocs()[group.0 as usize],
        };
        let bytes = alloc.ask("allocating a chunk", &arguments[..3 * lanes.len()]).await?;
        match bytes[reply::STATUS] {
            status::GRANTED => {}
            status::EMPTY => return Err(Error::OutOfMemory { bytes: self.chunk_bytes }),
            other => return Err(not_understood("allocating a chunk", other)),
        }
        let be32 = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let mut keys = [Key::default(); MAX_GROUP];
        for (lane, key) in keys[..lanes.len()].iter_mut().enumerate() {
            let window = lane + 1;
            let index = &bytes[reply::KEYS + 3 * window..][..3];
            // The key's tag is the tag that the table listed as the next one.
            let tag = bytes[reply::TAGS + 8 * (window / 4) + 4 + window % 4];
            *key = Key(u32::from_be_bytes([index[0], index[1], index[2], tag]));
        }
        let addr = u64::from_be_bytes(bytes[..8].try_into().expect("8 bytes"));
        let entry = be32(reply::ENTRY) >> 8;
        Ok(Grant::new(addr, self.chunk_bytes, entry, group, &keys[..lanes.len()]))
    }

    async fn free(&self, grant: &Grant) -> Result<(), Error> {
        loop {
            let bytes = self.free.ask("freeing a chunk", &grant.entry.to_be_bytes()[1..]).await?;
            match bytes[reply::FREE_STATUS + 3] {
                status::FREED => return Ok(()),
                status::REFUSED => return Err(Error::NotYours { entry: grant.entry }),
                status::AGAIN => continue,
                other => return Err(not_understood("freeing a chunk", other)),
            }
        }
    }

    fn management(&self) -> Vec<Qpn> {
        match &self.alloc {
            Alloc::Separate(alloc) => vec![alloc.qp.qpn(), self.free.qp.qpn()],
            Alloc::Access(_) => vec![self.free.qp.qpn()],
        }
    }

    fn is_broken(&self) -> bool {
        self.queues().any(|d| !matches!(d.qp.state(), Ok(QpState::ReadyToSend)))
    }

    fn is_closed(&self) -> bool {
        self.queues().any(|d| !d.open.load(Ordering::Acquire))
    }

    fn reset(&self) -> Result<(), Error> {
        for d in self.queues() {
            let _order = d.order.lock();
            d.open.store(false, Ordering::Relaxed);
            d.qp.modify(QpChange::Reset)?;
        }
        Ok(())
    }

    fn break_management(&self) -> Result<(), Error> {
        Ok(self.queues().try_for_each(|d| d.qp.modify(QpChange::Error))?)
    }

    fn when_idle(&self, look: &WhenIdle) {
        self.queues().for_each(|d| d.completer.when_idle(look.clone()));
    }

    fn name_access(&self, peers: Vec<Vec<Qpn>>) {
        // Access QPs keep their numbers when they are re-established.
        let _ = self.access.set(peers);
    }

    fn connect(&self, peers: &[PeerAddress]) -> Result<(), Error> {
        let own: Vec<_> = match &self.alloc {
            Alloc::Separate(alloc) => vec![alloc, &self.free],
            // Access QPs are connected by their owner, the pool client.
            Alloc::Access(_) => vec![&self.free],
        };
        for (d, &peer) in own.into_iter().zip(peers) {
            let _order = d.order.lock();
            d.qp.connect(peer)?;
        }
        self.queues().for_each(|d| d.open.store(true, Ordering::Release));
        Ok(())
    }
}

fn not_understood(attempt: &str, status: u8) -> Error {
    Error::Protocol {
        attempt: attempt.to_owned(),
        why: format!("the reply has unknown status {status}"),
    }
}
