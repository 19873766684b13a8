//! The compute node's side of the schemes by RPC. A request is a SEND, and its answer is a SEND
//! from the memory node's CPU.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use scheme::index::EntryId;
use scheme::options::parse_terms;
use scheme::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr, return_all};
use scheme::{Answer, ClientScheme, ConnectReply, Error, Grant, GroupId, Offer, too_large};
use verbs::{Access, Key, MemoryRegion, Nic};

use super::blocks::Blocks;
use super::{Ask, Outcome, REPLY_BYTES, Region, Reply, Request};
use crate::blocks::CHUNK_ORDER;

/// The client of the schemes by RPC on a NIC of type `N`.
pub struct Client<N: Nic> {
    queue: RequestQueue<N>,
    replies: N::Mr,
    number: AtomicU64,
    blocks: Blocks,
    lanes: usize,
    /// The grant of all chunks, in a scheme with one region.
    whole: OnceLock<Grant>,
    /// Entries that the memory node granted although the request had ended as unanswered.
    undelivered: Mutex<Vec<EntryId>>,
}

impl<N: Nic> Client<N> {
    /// Creates the management QP.
    pub fn new(nic: &N, pd: &N::Pd, offer: &Offer) -> Result<Self, Error> {
        let credits = offer.credits;
        let access = Access::REMOTE_WRITE; // the bulletin
        let send_blocks = credits.max(2);
        let attr = RequestQueueAttr { send_blocks, ..RequestQueueAttr::new(credits, access) };
        let memory = nic.alloc_dma(credits as usize * REPLY_BYTES)?;
        Ok(Self {
            queue: RequestQueue::new(nic, pd, attr)?,
            replies: nic.reg_mr(pd, &memory, Access::LOCAL_WRITE)?,
            number: AtomicU64::new(1),
            blocks: Blocks::new(
                offer.chunks as u32,
                offer.chunk_bytes,
                super::find(&offer.scheme)?.has_sizes(),
            ),
            lanes: offer.group_size as usize - 1,
            whole: OnceLock::new(),
            undelivered: Mutex::default(),
        })
    }

    /// Sends a request and waits for its reply. `wanted`: bytes requested, for error messages.
    async fn ask(&self, attempt: &'static str, ask: Ask, wanted: u64) -> Result<Reply, Error> {
        let credit = self.queue.slot().await;
        let at = credit.slot().offset(REPLY_BYTES);
        let to = self.replies.sge(at, REPLY_BYTES as u32);
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let request = Request { number, ask }.to_bytes();
        self.queue.ask(attempt, &credit, &request, &[to]).await?;
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
            Outcome::BadRequest => {
                Err(wrong("the memory node could not decode the request".into()))
            }
            Outcome::Failed => Err(Error::Refused {
                attempt: attempt.into(),
                why: "the memory node's NIC could not bind the windows; check that the access QPs \
                      are connected"
                    .into(),
            }),
        }
    }
}

impl<N: Nic> Client<N> {
    async fn free_entry(&self, entry: EntryId) -> Result<(), Error> {
        self.ask("freeing a chunk", Ask::Free { entry }, 0).await.map(drop)
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        self.allocate_bytes(group, self.blocks.bytes(CHUNK_ORDER))
    }

    fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Answer<'_, Grant> {
        Box::pin(async move {
            let attempt = "allocating a chunk";
            let Some(order) = self.blocks.order_for(bytes) else {
                let has_sizes = self.blocks.order_max() > CHUNK_ORDER;
                return Err(too_large(bytes, self.blocks.bytes_max(), has_sizes));
            };
            let ask = Ask::Allocate { group: group.0, order };
            let reply = self.ask(attempt, ask, bytes).await?;
            if reply.lanes != self.lanes || reply.len != self.blocks.bytes(order) {
                return Err(Error::Protocol {
                    attempt: attempt.into(),
                    why: format!("invalid grant of {} bytes with {} keys", reply.len, reply.lanes),
                });
            }
            let keys = &reply.keys[..reply.lanes];
            Ok(Grant::new(reply.addr, reply.len, reply.entry, group, keys))
        })
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        Box::pin(self.free_entry(grant.entry))
    }

    fn reset(&self) -> Result<(), Error> {
        self.queue.reset()?;
        for slot in self.queue.take_late() {
            let mut bytes = [0; REPLY_BYTES];
            self.replies.memory().read(slot.offset(REPLY_BYTES), &mut bytes);
            let granted = Reply::parse(&bytes)
                .filter(|reply| reply.outcome == Outcome::Done && reply.len > 0);
            self.undelivered.lock().extend(granted.map(|reply| reply.entry));
        }
        Ok(())
    }

    fn settle(&self) -> Answer<'_, ()> {
        Box::pin(return_all(&self.undelivered, |entry| self.free_entry(entry)))
    }

    fn accept(&self, terms: &ConnectReply) -> Result<(), Error> {
        let Region { key } = parse_terms(&terms.terms)?;
        if let (Some(key), Some(first)) = (key, terms.first_chunk) {
            let len = u64::from(self.blocks.chunks()) * terms.chunk_bytes;
            let keys = vec![Key(key); self.lanes];
            // No chunk has this number, so that the grant cannot be freed.
            let entry = EntryId::new(u32::MAX);
            let _ = self.whole.set(Grant::new(first, len, entry, GroupId(0), &keys));
        }
        Ok(())
    }

    fn whole_pool(&self, group: GroupId) -> Option<Grant> {
        let mut grant = *self.whole.get()?;
        grant.group = group;
        Some(grant)
    }

    /// Re-establishes the QP only after a request has failed, also a request that was flushed.
    fn is_broken(&self) -> bool {
        self.queue.has_lost_answers()
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        each(&self.queue);
    }
}
