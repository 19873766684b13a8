//! The compute node's side of the schemes by RPC. A request is a SEND, and its answer is a SEND
//! from the memory node's CPU.
//!
//! The receive for the answer is posted before the request, under the same lock, and the memory
//! node answers in order: the n-th receive completes with the n-th answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fabric::completion::Completer;
use fabric::{
    Access, CqAttr, MemoryRegion, Nic, Op, PeerAddress, QpAttr, QpChange, Qpn, QueuePair, Receive,
    ReceiveAttr, ReceiveRequest, Status, WorkRequest,
};
use parking_lot::Mutex;

use super::blocks::Blocks;
use super::{Ask, Outcome, REPLY_BYTES, Reply, Request};
use crate::Error;
use crate::credits::Credits;
use crate::protocol::NodeHello;
use crate::scheme::{ClientScheme, Grant, GroupId, WhenIdle, too_large};

/// The client of the schemes by RPC on a NIC of type `N`.
pub struct Client<N: Nic> {
    qp: N::Qp,
    completer: Completer<N::Cq>,
    replies: N::Mr,
    credits: Credits,
    order: Mutex<()>,
    number: AtomicU64,
    blocks: Blocks,
    lanes: usize,
    broken: AtomicBool,
}

impl<N: Nic> Client<N> {
    /// Creates the management QP.
    pub fn new(nic: &N, pd: &N::Pd, welcome: &NodeHello) -> Result<Self, Error> {
        let credits = welcome.credits;
        // Room for a receive and a SEND per request, and as many again that are flushed at a reset.
        let cq = nic.create_cq(CqAttr { entries: credits * 4, ignore_overrun: false })?;
        let qp = nic.create_qp(
            pd,
            QpAttr {
                send_cq: &cq,
                recv_cq: &cq,
                send_blocks: credits.max(2),
                receive: Receive::Own(ReceiveAttr { entries: credits, max_sges: 1 }),
                access: Access::REMOTE_WRITE, // the bulletin
            },
        )?;
        let memory = nic.alloc_dma(credits as usize * REPLY_BYTES)?;
        Ok(Self {
            qp,
            completer: Completer::new(cq),
            replies: nic.reg_mr(pd, &memory, Access::LOCAL_WRITE)?,
            credits: Credits::new(credits),
            order: Mutex::new(()),
            number: AtomicU64::new(1),
            blocks: Blocks::new(
                welcome.chunks as u32,
                welcome.chunk_bytes,
                super::find(&welcome.scheme)?.has_sizes(),
            ),
            lanes: welcome.group_size as usize - 1,
            broken: AtomicBool::new(false),
        })
    }

    /// Sends a request and waits for its reply. `wanted`: bytes requested, for error messages.
    async fn ask(&self, attempt: &'static str, ask: Ask, wanted: u64) -> Result<Reply, Error> {
        let credit = self.credits.take().await;
        let at = credit.slot() as usize * REPLY_BYTES;
        let to = self.replies.sge(at, REPLY_BYTES as u32);
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let request = Request { number, ask }.to_bytes();
        let (answered, sent) = {
            let _order = self.order.lock();
            let receive = |id| self.qp.post_recv(&ReceiveRequest { id, to: &[to] });
            let answered = self.completer.submit(receive)?;
            let sent = self.completer.submit(|id| {
                let op = Op::SendInline { data: &request };
                self.qp.post_send(&[WorkRequest { id, op, signaled: true }])
            })?;
            (answered, sent)
        };
        let (answered, sent) = (answered.await?, sent.await?);
        // A received reply proves that the request was executed, whatever the status of its SEND.
        if answered.status != Status::Success {
            self.broken.store(true, Ordering::Release);
            let status = match sent.status {
                Status::Success => answered.status,
                status => status,
            };
            return Err(Error::ManagementBroken { attempt: attempt.into(), status });
        }
        let mut bytes = [0; REPLY_BYTES];
        self.replies.memory().read(at, &mut bytes);
        let wrong = |why: String| Error::Protocol { attempt: attempt.into(), why };
        let reply =
            Reply::parse(&bytes).ok_or_else(|| wrong("the reply cannot be decoded".into()))?;
        if reply.number != number {
            return Err(wrong(format!("reply to request {} instead of {number}", reply.number)));
        }
        match reply.outcome {
            Outcome::Done => Ok(reply),
            Outcome::Empty | Outcome::NoBlock => Err(Error::OutOfMemory { bytes: wanted }),
            Outcome::NotYours => Err(Error::NotYours { entry: reply.entry }),
            Outcome::BadRequest => Err(wrong("the memory node could not decode the request".into())),
            Outcome::Failed => Err(Error::Refused {
                attempt: attempt.into(),
                why: "the memory node's NIC could not bind the windows; check that the access QPs are connected"
                    .into(),
            }),
        }
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    async fn allocate(&self, group: GroupId) -> Result<Grant, Error> {
        self.allocate_bytes(group, self.blocks.bytes(0)).await
    }

    async fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Result<Grant, Error> {
        let attempt = "allocating a chunk";
        let Some(order) = self.blocks.order_for(bytes) else {
            let has_sizes = self.blocks.order_max() > 0;
            return Err(too_large(bytes, self.blocks.bytes_max(), has_sizes));
        };
        let ask = Ask::Allocate { group: group.0, order: order as u8 };
        let reply = self.ask(attempt, ask, bytes).await?;
        if reply.lanes != self.lanes || reply.len != self.blocks.bytes(order) {
            return Err(Error::Protocol {
                attempt: attempt.into(),
                why: format!("invalid grant of {} bytes with {} keys", reply.len, reply.lanes),
            });
        }
        let keys = &reply.keys[..reply.lanes];
        Ok(Grant::new(reply.addr, reply.len, reply.entry, group, keys))
    }

    async fn free(&self, grant: &Grant) -> Result<(), Error> {
        self.ask("freeing a chunk", Ask::Free { entry: grant.entry }, 0).await.map(drop)
    }

    fn management(&self) -> Vec<Qpn> {
        vec![self.qp.qpn()]
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    fn reset(&self) -> Result<(), Error> {
        Ok(self.qp.modify(QpChange::Reset)?)
    }

    fn break_management(&self) -> Result<(), Error> {
        Ok(self.qp.modify(QpChange::Error)?)
    }

    fn when_idle(&self, look: &WhenIdle) {
        self.completer.when_idle(look.clone());
    }

    fn connect(&self, peers: &[PeerAddress]) -> Result<(), Error> {
        let [peer] = peers else {
            return Err(Error::Protocol {
                attempt: "connecting the management QP".into(),
                why: format!("{} peers were given for one QP", peers.len()),
            });
        };
        self.qp.connect(*peer)?;
        self.broken.store(false, Ordering::Release);
        Ok(())
    }
}
