//! The client's side of `odrp`. A request is a SEND. The reply is the page or a status, written
//! into a slot of the client's own memory.
//!
//! ```text
//! read:    page number (3) | buffer: address (8), key (4)
//! others:  op (1) | page number (3) | buffer: address (8), key (4) | reply: address (8), key (4)
//! ```
//!
//! Each client chooses its own page numbers: an allocation takes an unused number without sending a
//! request, and the first write allocates the memory. The client records which pages are mapped,
//! because the chain of reads answers only for mapped pages.

use std::sync::Arc;

use parking_lot::Mutex;
use scheme::credits::Credit;
use scheme::index::EntryId;
use scheme::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr};
use scheme::{
    Access, Answer, ClientScheme, Error, Grant, GroupId, Offer, PageAccess, check_whole_page,
};
use verbs::{Access as Rights, MemoryRegion, Nic, Remote};

use super::table::PAGES_MAX;
use super::{ODRP, PAGE_BYTES, PageOp, READ_BYTES, REPLY_BYTES, REQUEST_BYTES, status};

/// Bytes from one reply slot to the next.
const REPLY_STRIDE: usize = 64;

/// The scheme's client on the NIC `N`.
pub struct Client<N: Nic> {
    reads: Queue<N>,
    writes: Queue<N>,
    numbers: Arc<Mutex<Numbers>>,
}

/// A request queue with its slots.
struct Queue<N: Nic> {
    queue: RequestQueue<N>,
    /// One page for each request in flight, which the memory node reads and writes.
    pages: N::Mr,
    replies: N::Mr,
}

/// Allocator and state of the page numbers.
struct Numbers {
    /// Numbers from this one on have never been used.
    fresh: u32,
    end: u32,
    /// Numbers that were used and are free again.
    free: Vec<u32>,
    pages: Vec<Page>,
}

#[derive(Clone, Copy)]
struct Page {
    state: State,
    /// Number of reads of the page in flight.
    reading: u32,
}

/// State of a page number, as far as the client knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not allocated.
    Unused,
    /// Allocated but never written: not mapped.
    Reserved,
    /// Mapped.
    Written,
    /// A request failed: the page may or may not be mapped.
    Unknown,
    /// A free is in flight.
    Leaving,
}

impl Numbers {
    fn take(&mut self) -> Option<u32> {
        let number = self.free.pop().or_else(|| {
            let fresh = self.fresh;
            self.fresh += (fresh < self.end) as u32;
            (fresh < self.end).then_some(fresh)
        })?;
        let unused = Page { state: State::Unused, reading: 0 };
        if self.pages.len() <= number as usize {
            self.pages.resize(number as usize + 1, unused);
        }
        self.pages[number as usize].state = State::Reserved;
        Some(number)
    }

    /// The page of an allocated number.
    fn get(&mut self, number: u32) -> Result<&mut Page, Error> {
        let page = self.pages.get_mut(number as usize);
        page.filter(|page| !matches!(page.state, State::Unused | State::Leaving))
            .ok_or(Error::NotYours { entry: EntryId::new(number) })
    }

    fn set(&mut self, number: u32, state: State) {
        self.pages[number as usize].state = state;
    }
}

/// Counts a read of a page as in flight until it is dropped.
struct Reading<'a> {
    numbers: &'a Mutex<Numbers>,
    number: u32,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.numbers.lock().pages[self.number as usize].reading -= 1;
    }
}

impl<N: Nic> Client<N> {
    /// Creates the QPs.
    pub fn new(nic: &N, pd: &N::Pd, offer: &Offer) -> Result<Self, Error> {
        if offer.chunk_bytes != PAGE_BYTES as u64 {
            return Err(Error::Protocol {
                attempt: "connecting to a memory node with scheme odrp".into(),
                why: format!(
                    "the memory node's pages have {} bytes, not {PAGE_BYTES}",
                    offer.chunk_bytes
                ),
            });
        }
        let end = offer.chunks.min(PAGES_MAX) as u32;
        let numbers = Numbers { fresh: 0, end, free: Vec::new(), pages: Vec::new() };
        Ok(Self {
            reads: Queue::new(nic, pd, offer.credits)?,
            writes: Queue::new(nic, pd, offer.credits)?,
            numbers: Arc::new(Mutex::new(numbers)),
        })
    }
}

impl<N: Nic> Queue<N> {
    fn new(nic: &N, pd: &N::Pd, credits: u32) -> Result<Self, Error> {
        let access = Rights::REMOTE_READ | Rights::REMOTE_WRITE;
        let queue = RequestQueue::new(nic, pd, RequestQueueAttr::new(credits, access))?;
        let remote = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
        let pages = nic.alloc_dma(credits as usize * PAGE_BYTES)?;
        let replies = nic.alloc_dma(credits as usize * REPLY_STRIDE)?;
        Ok(Self {
            queue,
            pages: nic.reg_mr(pd, &pages, remote | Rights::REMOTE_READ)?,
            replies: nic.reg_mr(pd, &replies, remote)?,
        })
    }

    /// Page buffer of the request.
    fn place(&self, credit: &Credit<'_>) -> Remote {
        self.pages.remote(credit.slot().offset(PAGE_BYTES))
    }

    /// Reads a mapped page into the request's page buffer.
    async fn read(&self, number: u32, credit: &Credit<'_>) -> Result<(), Error> {
        let mut request = [0; READ_BYTES];
        request[..3].copy_from_slice(&number.to_be_bytes()[1..]);
        put(&mut request[3..], self.place(credit));
        self.queue.ask("reading a page", credit, &request, &[]).await
    }

    /// Sends a request whose reply is a status.
    async fn ask(
        &self,
        what: &str,
        ask: PageOp,
        number: u32,
        credit: &Credit<'_>,
    ) -> Result<u64, Error> {
        let reply = credit.slot().offset(REPLY_STRIDE);
        self.replies.memory().zero(reply, REPLY_BYTES);
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&((ask as u32) << 24 | number).to_be_bytes());
        put(&mut request[4..], self.place(credit));
        put(&mut request[16..], self.replies.remote(reply));
        self.queue.ask(what, credit, &request, &[]).await?;
        Ok(self.replies.memory().load_be64(reply))
    }
}

/// Writes an address and a key into a request.
fn put(at: &mut [u8], place: Remote) {
    at[..8].copy_from_slice(&place.addr.to_be_bytes());
    at[8..12].copy_from_slice(&place.rkey.0.to_be_bytes());
}

fn check_whole(access: &str, len: usize) -> Result<(), Error> {
    check_whole_page(ODRP, access, len, PAGE_BYTES)
}

impl<N: Nic> PageAccess for Client<N> {
    fn page_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn read_page<'a>(&'a self, page: &'a Grant, into: &'a mut [u8]) -> Answer<'a, ()> {
        Box::pin(async move {
            check_whole("read", into.len())?;
            let number = page.entry.raw();
            let (state, _reading) = {
                let mut numbers = self.numbers.lock();
                let page = numbers.get(number)?;
                page.reading += 1;
                (page.state, Reading { numbers: &self.numbers, number })
            };
            let queue = match state {
                State::Written => &self.reads,
                State::Unknown => &self.writes,
                _ => {
                    into.fill(0);
                    return Ok(());
                }
            };
            let credit = queue.queue.slot().await;
            let said = match state {
                State::Written => queue.read(number, &credit).await.map(|()| status::PENDING),
                _ => queue.ask("reading a page", PageOp::Read, number, &credit).await,
            };
            match said? {
                status::PENDING => {
                    queue.pages.memory().read(credit.slot().offset(PAGE_BYTES), into);
                    Ok(())
                }
                status::UNMAPPED => {
                    into.fill(0);
                    Ok(())
                }
                other => Err(not_understood("reading a page", other)),
            }
        })
    }

    fn write_page<'a>(&'a self, page: &'a Grant, from: &'a [u8]) -> Answer<'a, ()> {
        Box::pin(async move {
            check_whole("write", from.len())?;
            let number = page.entry.raw();
            self.numbers.lock().get(number)?;
            let credit = self.writes.queue.slot().await;
            self.writes.pages.memory().write(credit.slot().offset(PAGE_BYTES), from);
            let said = self.writes.ask("writing a page", PageOp::Write, number, &credit).await;
            let mut numbers = self.numbers.lock();
            match said {
                Ok(status::DONE) => {
                    numbers.set(number, State::Written);
                    Ok(())
                }
                Ok(status::EMPTY) => Err(Error::OutOfMemory { bytes: PAGE_BYTES as u64 }),
                Ok(other) => Err(not_understood("writing a page", other)),
                Err(e) => {
                    if let Ok(Page { state: state @ State::Reserved, .. }) = numbers.get(number) {
                        *state = State::Unknown;
                    }
                    Err(e)
                }
            }
        })
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    /// Takes a page number; no request is sent: see [`PageAccess::write_page`].
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        Box::pin(async move {
            let number = self.numbers.lock().take();
            let number = number.ok_or(Error::OutOfMemory { bytes: PAGE_BYTES as u64 })?;
            let addr = number as u64 * PAGE_BYTES as u64;
            Ok(Grant::new(addr, PAGE_BYTES as u64, EntryId::new(number), group, &[]))
        })
    }

    fn free<'a>(&'a self, page: &'a Grant) -> Answer<'a, ()> {
        Box::pin(async move {
            let number = page.entry.raw();
            let was = {
                let mut numbers = self.numbers.lock();
                let page = numbers.get(number)?;
                if page.reading > 0 {
                    return Err(Error::Refused {
                        attempt: "freeing a page".into(),
                        why: format!(
                            "{} reads of the page are in flight: retry when they are complete",
                            page.reading
                        ),
                    });
                }
                std::mem::replace(&mut page.state, State::Leaving)
            };
            // A page that was never written has no memory to free.
            let said = match was {
                State::Reserved => Ok(status::UNMAPPED),
                _ => {
                    let credit = self.writes.queue.slot().await;
                    self.writes.ask("freeing a page", PageOp::Free, number, &credit).await
                }
            };
            let mut numbers = self.numbers.lock();
            match said {
                Ok(status::DONE | status::UNMAPPED) => {
                    numbers.set(number, State::Unused);
                    numbers.free.push(number);
                    Ok(())
                }
                Ok(other) => Err(not_understood("freeing a page", other)),
                // The caller may free the page again.
                Err(e) => {
                    numbers.set(number, State::Unknown);
                    Err(e)
                }
            }
        })
    }

    fn access(&self) -> Access<'_> {
        Access::Paged(self)
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        each(&self.reads.queue);
        each(&self.writes.queue);
    }
}

fn not_understood(attempt: &str, status: u64) -> Error {
    Error::Protocol {
        attempt: attempt.to_owned(),
        why: format!("the reply has unknown status {status}"),
    }
}
