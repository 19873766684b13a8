//! The compute node's side: each access is a request on the management QP.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use scheme::index::EntryId;
use scheme::lease::Lease;
use scheme::options::parse_terms;
use scheme::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr, return_all};
use scheme::{
    Access as Operations, Answer, Atomic, ClientScheme, Error, Grant, GroupId, Lane, LeaseScheme,
    LeaseTerms, Object, Offer, Others, Permission, RpcAccess, too_large,
};
use verbs::{Access, Data, Key, MemoryRegion, Nic};

use super::message::{Ask, HEADER_BYTES, ObjectId, Outcome, Range};
use super::options::DataOffer;
use crate::blocks::CHUNK_ORDER;
use crate::rpc::blocks::Blocks;

/// Length of the longest request that is sent inline.
const INLINE_BYTES: usize = HEADER_BYTES + 128;
/// Send blocks of an inline request: its control segment shares the first one.
const SEND_BLOCKS: u32 = INLINE_BYTES.div_ceil(64) as u32 + 1;

/// The client of scheme `rpc-data` on a NIC of type `N`.
pub struct Client<N: Nic> {
    queue: RequestQueue<N>,
    /// Requests and replies that are in flight, by slot.
    requests: N::Mr,
    replies: N::Mr,
    number: AtomicU64,
    inline_bytes: usize,
    data_bytes: usize,
    blocks: Blocks,
    lanes: usize,
    /// Objects that were allocated although the request had ended as unanswered.
    undelivered: Mutex<Vec<ObjectId>>,
}

impl<N: Nic> Client<N> {
    /// Creates the management QP.
    pub fn new(nic: &N, pd: &N::Pd, offer: &Offer) -> Result<Self, Error> {
        let credits = offer.credits;
        let DataOffer { data_bytes, .. } = parse_terms(&offer.terms)?;
        let data_bytes = data_bytes as usize;
        let attr = RequestQueueAttr {
            send_blocks: (credits * SEND_BLOCKS).next_power_of_two(),
            ..RequestQueueAttr::new(credits, Access::REMOTE_WRITE) // the bulletin
        };
        let memory = || nic.alloc_dma(credits as usize * (HEADER_BYTES + data_bytes));
        Ok(Self {
            queue: RequestQueue::new(nic, pd, attr)?,
            requests: nic.reg_mr(pd, &memory()?, Access::NONE)?,
            replies: nic.reg_mr(pd, &memory()?, Access::LOCAL_WRITE)?,
            number: AtomicU64::new(1),
            inline_bytes: INLINE_BYTES.min(nic.caps().max_inline as usize),
            data_bytes,
            blocks: Blocks::new(offer.chunks as u32, offer.chunk_bytes, true),
            lanes: offer.group_size.saturating_sub(1) as usize,
            undelivered: Mutex::default(),
        })
    }

    /// Sends a request with `data`, and waits for its reply, of which it copies the data to `into`
    /// if the request was executed.
    async fn ask(
        &self,
        attempt: &'static str,
        ask: Ask,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<Outcome, Error> {
        let credit = self.queue.slot().await;
        let at = credit.slot().offset(HEADER_BYTES + self.data_bytes);
        let to = [self.replies.sge(at, (HEADER_BYTES + self.data_bytes) as u32)];
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let header = ask.to_bytes(number);
        let bytes = HEADER_BYTES + data.len();
        if bytes <= self.inline_bytes {
            let mut request = [0; INLINE_BYTES];
            request[..HEADER_BYTES].copy_from_slice(&header);
            request[HEADER_BYTES..bytes].copy_from_slice(data);
            self.queue.ask(attempt, &credit, &request[..bytes], &to).await?;
        } else {
            let memory = self.requests.memory();
            memory.write(at, &header);
            memory.write(at + HEADER_BYTES, data);
            let from = [self.requests.sge(at, bytes as u32)];
            self.queue.ask_with(attempt, &credit, Data::Gather(&from), &to).await?;
        }
        let mut header = [0; HEADER_BYTES];
        self.replies.memory().read(at, &mut header);
        match Outcome::parse(&header) {
            (of, _) if of != number => {
                Err(protocol(attempt, format!("reply to request {of} instead of {number}")))
            }
            (_, None) => Err(protocol(attempt, "the reply cannot be decoded")),
            (_, Some(Outcome::BadRequest)) => Err(Error::Refused {
                attempt: attempt.into(),
                why: "the memory node could not decode the request, or its values are not \
                      possible: no bytes, or an object for others without a domain"
                    .into(),
            }),
            (_, Some(Outcome::TooMany(limit, most))) => {
                Err(Error::TooMany { attempt, what: limit.name(), limit: most })
            }
            (_, Some(outcome)) => {
                if outcome == Outcome::Done {
                    self.replies.memory().read(at + HEADER_BYTES, into);
                }
                Ok(outcome)
            }
        }
    }

    async fn free_named(&self, object: ObjectId) -> Result<(), Error> {
        let attempt = "freeing a chunk";
        match self.ask(attempt, Ask::Free { object }, &[], &mut []).await? {
            Outcome::Done => Ok(()),
            Outcome::NoSuchObject => Err(Error::NotYours { entry: EntryId::new(object.entry) }),
            other => Err(unexpected(attempt, other)),
        }
    }

    async fn execute(
        &self,
        attempt: &'static str,
        grant: &Grant,
        ask: Ask,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<Outcome, Error> {
        match self.ask(attempt, ask, data, into).await? {
            Outcome::NoSuchObject => Err(Error::NoSuchObject { attempt, entry: grant.entry.raw() }),
            outcome => Ok(outcome),
        }
    }

    async fn allocate_some(
        &self,
        attempt: &'static str,
        bytes: u64,
        others: Others,
    ) -> Result<ObjectId, Error> {
        match self.ask(attempt, Ask::Allocate { bytes, others }, &[], &mut []).await? {
            Outcome::Allocated(object) => Ok(object),
            Outcome::Empty | Outcome::NoBlock => Err(Error::OutOfMemory { bytes }),
            other => Err(unexpected(attempt, other)),
        }
    }

    /// A grant of an object's bytes from `offset` on.
    fn grant(&self, id: ObjectId, offset: u64, len: u64, group: GroupId) -> Grant {
        let keys = vec![Key(id.generation); self.lanes];
        Grant::new(id.address().wrapping_add(offset), len, EntryId::new(id.entry), group, &keys)
    }

    /// A permission for a range of an object, which never ends by itself.
    fn permission(&self, group: GroupId, object: Object, terms: &LeaseTerms) -> Permission {
        let Object { entry, generation, len, .. } = object;
        let range = terms.range.clone().unwrap_or(0..len);
        let id = ObjectId { entry, generation };
        let grant = self.grant(id, range.start, range.end.saturating_sub(range.start), group);
        let grant = grant.leased(terms.right, Grant::FOREVER);
        let lease = Lease {
            grant,
            number: 0,
            slot: 0,
            word: 0,
            header: None,
            since: Duration::ZERO,
            ended: false,
        };
        Permission::new(object, terms.clone(), lease)
    }
}

/// The object of a grant, and the offset in it of the grant's byte `offset`. Of a forged grant, the
/// offset lies beyond the object.
fn place(grant: &Grant, offset: u64) -> (ObjectId, u64) {
    let object = ObjectId { entry: grant.entry.raw(), generation: grant.key(Lane(0)).0 };
    (object, grant.addr.wrapping_add(offset).wrapping_sub(object.address()))
}

impl<N: Nic> RpcAccess for Client<N> {
    fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    fn read<'a>(&'a self, grant: &'a Grant, offset: u64, into: &'a mut [u8]) -> Answer<'a, ()> {
        Box::pin(async move {
            let ((object, offset), len) = (place(grant, offset), into.len() as u32);
            let ask = Ask::Read(Range { object, offset, len });
            self.execute("reading object", grant, ask, &[], into).await.map(drop)
        })
    }

    fn write<'a>(&'a self, grant: &'a Grant, offset: u64, from: &'a [u8]) -> Answer<'a, ()> {
        Box::pin(async move {
            let ((object, offset), len) = (place(grant, offset), from.len() as u32);
            let ask = Ask::Write(Range { object, offset, len });
            self.execute("writing object", grant, ask, from, &mut []).await.map(drop)
        })
    }

    fn atomic<'a>(&'a self, grant: &'a Grant, offset: u64, atomic: Atomic) -> Answer<'a, u64> {
        Box::pin(async move {
            let attempt = "changing a word of object";
            let (object, offset) = place(grant, offset);
            let ask = Ask::Atomic { object, offset, atomic };
            match self.execute(attempt, grant, ask, &[], &mut []).await? {
                Outcome::Previous(word) => Ok(word),
                other => Err(unexpected(attempt, other)),
            }
        })
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        self.allocate_bytes(group, self.blocks.bytes(CHUNK_ORDER))
    }

    fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Answer<'_, Grant> {
        Box::pin(async move {
            let Some(order) = self.blocks.order_for(bytes) else {
                return Err(too_large(bytes, self.blocks.bytes_max(), true));
            };
            let len = self.blocks.bytes(order);
            let result = self.allocate_some("allocating a chunk", len, Others::None).await;
            match result {
                Ok(object) => Ok(self.grant(object, 0, len, group)),
                Err(Error::OutOfMemory { .. }) => Err(Error::OutOfMemory { bytes }),
                Err(e) => Err(e),
            }
        })
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        Box::pin(self.free_named(place(grant, 0).0))
    }

    fn reset(&self) -> Result<(), Error> {
        self.queue.reset()?;
        for slot in self.queue.take_late() {
            let mut header = [0; HEADER_BYTES];
            let at = slot.offset(HEADER_BYTES + self.data_bytes);
            self.replies.memory().read(at, &mut header);
            if let (_, Some(Outcome::Allocated(object))) = Outcome::parse(&header) {
                self.undelivered.lock().push(object);
            }
        }
        Ok(())
    }

    fn settle(&self) -> Answer<'_, ()> {
        Box::pin(return_all(&self.undelivered, |object| self.free_named(object)))
    }

    fn access(&self) -> Operations<'_> {
        Operations::ByRpc(self)
    }

    fn leases(&self) -> Option<&dyn LeaseScheme> {
        Some(self)
    }

    /// Re-establishes the QP only after a request has failed, also a request that was flushed.
    fn is_broken(&self) -> bool {
        self.queue.has_lost_answers()
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        each(&self.queue);
    }
}

/// Permissions without leases: all but the allocation and the free is local.
impl<N: Nic> LeaseScheme for Client<N> {
    fn allocate_object<'a>(
        &'a self,
        group: GroupId,
        bytes: u64,
        others: Others,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, (Object, Permission)> {
        Box::pin(async move {
            if bytes > self.blocks.bytes_max() {
                return Err(too_large(bytes, self.blocks.bytes_max(), true));
            }
            let id = self.allocate_some("allocating an object", bytes, others).await?;
            let ObjectId { entry, generation } = id;
            // The pool fills in the incarnation and the memory node.
            let object = Object { incarnation: 0, entry, generation, len: bytes, node: 0 };
            let whole = LeaseTerms { range: None, ..terms.clone() };
            Ok((object, self.permission(group, object, &whole)))
        })
    }

    fn acquire<'a>(
        &'a self,
        group: GroupId,
        object: &'a Object,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, Permission> {
        Box::pin(async move {
            let range = terms.range.clone().unwrap_or(0..object.len);
            if range.is_empty() || range.end > object.len {
                let attempt = "acquiring object";
                return Err(Error::NoSuchObject { attempt, entry: object.entry });
            }
            Ok(self.permission(group, *object, terms))
        })
    }

    fn extend<'a>(&'a self, permission: &'a Permission, _by: Duration) -> Answer<'a, Duration> {
        self.renew(permission)
    }

    fn renew<'a>(&'a self, permission: &'a Permission) -> Answer<'a, Duration> {
        Box::pin(async move {
            match permission.lease().ended {
                true => Err(Error::Expired { op: "renewing a permission" }),
                false => Ok(Grant::FOREVER),
            }
        })
    }

    fn revoke<'a>(&'a self, permission: &'a Permission) -> Answer<'a, ()> {
        permission.update(|lease| {
            lease.ended = true;
            lease.grant.until = Duration::ZERO;
        });
        Box::pin(async { Ok(()) })
    }

    fn free_object<'a>(&'a self, object: &'a Object) -> Answer<'a, ()> {
        Box::pin(async move {
            let attempt = "freeing object";
            let Object { entry, generation, .. } = *object;
            let ask = Ask::Free { object: ObjectId { entry, generation } };
            match self.ask(attempt, ask, &[], &mut []).await? {
                Outcome::Done => Ok(()),
                Outcome::NoSuchObject => Err(Error::NoSuchObject { attempt, entry }),
                other => Err(unexpected(attempt, other)),
            }
        })
    }
}

fn protocol(attempt: &str, why: impl Into<String>) -> Error {
    Error::Protocol { attempt: attempt.into(), why: why.into() }
}

fn unexpected(attempt: &str, outcome: Outcome) -> Error {
    protocol(attempt, format!("the reply {outcome:?} is not one to this request"))
}
