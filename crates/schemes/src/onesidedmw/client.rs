//! The client's side of OneSidedMW. A request is a SEND. The reply is a WRITE with immediate into a
//! slot of the client's own memory (OneSidedMW §4.3).
//!
//! ```text
//! allocate: QPN of each access QP of the group (3 bytes each) | reply address (8) | reply rkey (4)
//! free:     entry index (3)                                   | reply address (8) | reply rkey (4)
//! ```

use super::layout::{entry_index, granted_entry};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use scheme::index::{EntryId, Slot};
use scheme::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr, SharedQp, return_all};
use scheme::{Answer, ClientScheme, ConnectReply, Error, Grant, GroupId, MAX_GROUP, Offer};
use verbs::{Access, Key, MemoryRegion, Nic, Qpn};

use super::layout::{reply, status};
use super::options::Terms;

/// Bytes of a reply slot.
const SLOT_BYTES: usize = 64;
/// Maximum bytes of a request.
const REQUEST_BYTES: usize = 3 * (MAX_GROUP - 1) + 12;
/// Requests for one free, each of which ends because an earlier free is refused.
///
/// The earlier free is one of this compute node too. A program that frees each chunk once has none
/// refused, and the memory node answers 100 refused ones in a second.
pub(super) const FREE_ATTEMPTS: u32 = 64;

/// The scheme's client on the NIC `N`.
pub struct Client<N: Nic> {
    chunk_bytes: u64,
    /// The memory node's access QPs, by group and lane: windows are bound to these.
    access: OnceLock<Vec<Vec<Qpn>>>,
    /// Queues for allocations: one; without separation, the first access QP of each group.
    allocs: Vec<ReplyQueue<N>>,
    free: ReplyQueue<N>,
    /// Maximum number of chunks that this client may hold, if limited.
    budget: Option<u64>,
    /// Chunks held or requested.
    held: AtomicU64,
    /// Entries that the memory node granted although the request had ended as unanswered.
    undelivered: Mutex<Vec<EntryId>>,
}

/// A request queue with its reply slots.
struct ReplyQueue<N: Nic> {
    queue: RequestQueue<N>,
    replies: N::Mr,
}

impl<N: Nic> Client<N> {
    /// Creates the management QPs. Without separation, `access` carries the allocations: the first
    /// access QP of each group, with its completer.
    pub fn new(nic: &N, pd: &N::Pd, offer: &Offer, access: &[SharedQp<N>]) -> Result<Self, Error> {
        let terms = Terms::of(offer)?;
        let credits = offer.credits;
        let own = || -> Result<_, Error> {
            let attr = RequestQueueAttr::new(credits, Access::REMOTE_WRITE);
            ReplyQueue::over(nic, pd, credits, RequestQueue::new(nic, pd, attr)?)
        };
        let shared = |qp: &SharedQp<N>| {
            ReplyQueue::over(nic, pd, credits, RequestQueue::over(qp.clone(), credits))
        };
        Ok(Self {
            chunk_bytes: offer.chunk_bytes,
            access: OnceLock::new(),
            allocs: match terms.separation {
                true => vec![own()?],
                false => access.iter().map(shared).collect::<Result<_, _>>()?,
            },
            free: own()?,
            budget: terms.budget_chunks,
            held: AtomicU64::new(0),
            undelivered: Mutex::default(),
        })
    }

    /// The queue for the allocations of a group.
    fn alloc(&self, group: GroupId) -> &ReplyQueue<N> {
        self.allocs.get(group.0 as usize).unwrap_or(&self.allocs[0])
    }
}

impl<N: Nic> Client<N> {
    /// Counts a requested chunk. Fails if the memory node would close the management connection for
    /// it.
    fn reserve_chunk(&self) -> Result<(), Error> {
        let held = self.held.fetch_add(1, Ordering::Relaxed);
        let Some(budget) = self.budget.filter(|budget| held >= *budget) else {
            return Ok(());
        };
        self.held.fetch_sub(1, Ordering::Relaxed);
        Err(Error::OverBudget {
            attempt: "allocating a chunk".into(),
            why: format!(
                "this compute node holds {held} chunks and its budget is {budget}: free some, or \
                 have the operator raise --budget-chunks"
            ),
            retry_after: Duration::ZERO,
        })
    }

    async fn request_chunk(&self, group: GroupId) -> Result<Grant, Error> {
        let groups = self.access.get().map_or(&[][..], Vec::as_slice);
        let lanes = groups.get(group.0 as usize).ok_or_else(|| Error::Refused {
            attempt: format!("allocating a chunk for QP group {}", group.0),
            why: format!("the client has {} QP groups", groups.len()),
        })?;
        let mut arguments = [0u8; 3 * (MAX_GROUP - 1)];
        for (qpn, at) in lanes.iter().zip(arguments.chunks_exact_mut(3)) {
            at.copy_from_slice(&qpn.raw().to_be_bytes()[1..]);
        }
        let bytes =
            self.alloc(group).ask("allocating a chunk", &arguments[..3 * lanes.len()]).await?;
        match bytes[reply::STATUS] {
            status::GRANTED => {}
            status::EMPTY => return Err(Error::OutOfMemory { bytes: self.chunk_bytes }),
            other => return Err(not_understood("allocating a chunk", other)),
        }
        let mut keys = [Key::default(); MAX_GROUP];
        for (lane, key) in keys[..lanes.len()].iter_mut().enumerate() {
            let window = lane + 1;
            let index = &bytes[reply::KEYS + 3 * window..][..3];
            // The key's tag is the tag that the table listed as the next one.
            let tag = bytes[reply::TAGS + 8 * (window / 4) + 4 + window % 4];
            *key = Key(u32::from_be_bytes([index[0], index[1], index[2], tag]));
        }
        let addr = u64::from_be_bytes(bytes[..8].try_into().expect("8 bytes"));
        Ok(Grant::new(addr, self.chunk_bytes, entry_in(&bytes), group, &keys[..lanes.len()]))
    }

    async fn free_entry(&self, entry: EntryId) -> Result<(), Error> {
        let attempt = "freeing a chunk";
        for _ in 0..FREE_ATTEMPTS {
            let bytes = self.free.ask(attempt, &entry_index(entry)).await?;
            match bytes[reply::FREE_STATUS + 3] {
                status::FREED => return Ok(()),
                status::REFUSED => return Err(Error::NotYours { entry }),
                status::AGAIN => {}
                other => return Err(not_understood(attempt, other)),
            }
        }
        // The chunk is this compute node's still.
        Err(Error::Contended {
            attempt: format!("freeing chunk {entry}"),
            attempts: FREE_ATTEMPTS,
            why: "before each of them, this compute node freed a chunk that it does not own, and \
                  the memory node executed no free behind that one; end the double frees, and try \
                  again"
                .into(),
        })
    }
}

fn is_granted(reply: &[u8; reply::BYTES]) -> bool {
    reply[reply::STATUS] == status::GRANTED
}

/// The entry that a reply grants.
fn entry_in(reply: &[u8; reply::BYTES]) -> EntryId {
    let entry = &reply[reply::ENTRY..][..4];
    granted_entry(u32::from_be_bytes(entry.try_into().expect("4 bytes")))
}

impl<N: Nic> ReplyQueue<N> {
    fn over(nic: &N, pd: &N::Pd, credits: u32, queue: RequestQueue<N>) -> Result<Self, Error> {
        let memory = nic.alloc_dma(credits as usize * SLOT_BYTES)?;
        let replies = nic.reg_mr(pd, &memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        Ok(Self { queue, replies })
    }

    /// Sends `arguments` and the reply's address. Returns the bytes of the reply.
    async fn ask(&self, what: &str, arguments: &[u8]) -> Result<[u8; reply::BYTES], Error> {
        let credit = self.queue.slot().await;
        let at = credit.slot().offset(SLOT_BYTES);
        let memory = self.replies.memory();
        memory.zero(at, SLOT_BYTES);
        let mut request = [0u8; REQUEST_BYTES];
        let target = self.replies.remote(at);
        let n = arguments.len();
        request[..n].copy_from_slice(arguments);
        request[n..n + 8].copy_from_slice(&target.addr.to_be_bytes());
        request[n + 8..n + 12].copy_from_slice(&target.rkey.0.to_be_bytes());
        self.queue.ask(what, &credit, &request[..n + 12], &[]).await?;
        let mut bytes = [0; reply::BYTES];
        memory.read(at, &mut bytes);
        Ok(bytes)
    }

    /// Replies that no caller waits for any more: [`RequestQueue::take_late`].
    fn take_late(&self) -> Vec<[u8; reply::BYTES]> {
        let read = |slot: Slot| {
            let mut bytes = [0; reply::BYTES];
            self.replies.memory().read(slot.offset(SLOT_BYTES), &mut bytes);
            bytes
        };
        self.queue.take_late().into_iter().map(read).collect()
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        Box::pin(async move {
            self.reserve_chunk()?;
            let granted = self.request_chunk(group).await;
            if granted.is_err() {
                self.held.fetch_sub(1, Ordering::Relaxed);
            }
            granted
        })
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        Box::pin(async move {
            self.free_entry(grant.entry).await?;
            self.held.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        })
    }

    fn reset(&self) -> Result<(), Error> {
        self.try_each(&mut |queue| queue.reset())?;
        for queue in &self.allocs {
            let granted = queue.take_late().into_iter().filter(is_granted);
            self.undelivered.lock().extend(granted.map(|bytes| entry_in(&bytes)));
        }
        Ok(())
    }

    /// Frees the chunks of late replies, which `held` does not count.
    fn settle(&self) -> Answer<'_, ()> {
        Box::pin(return_all(&self.undelivered, |entry| self.free_entry(entry)))
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        self.allocs.iter().chain([&self.free]).for_each(|queue| each(&queue.queue));
    }

    fn accept(&self, terms: &ConnectReply) -> Result<(), Error> {
        let lanes = |group: &Vec<u32>| group.iter().map(|qpn| Qpn::new(*qpn)).collect();
        // Access QPs keep their numbers when they are re-established.
        let _ = self.access.set(terms.groups.iter().map(lanes).collect());
        Ok(())
    }
}

fn not_understood(attempt: &str, status: u8) -> Error {
    Error::Protocol {
        attempt: attempt.to_owned(),
        why: format!("the reply has unknown status {status}"),
    }
}
