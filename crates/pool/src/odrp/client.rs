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
use std::sync::atomic::{Ordering, fence};

use parking_lot::Mutex;
use verbs::completion::Completer;
use verbs::{
    Access, CqAttr, MemoryRegion, Nic, Op, PeerAddress, QpAttr, QpChange, QpState, Qpn, QueuePair,
    Receive, ReceiveAttr, ReceiveRequest, Remote, Status, WorkRequest,
};

use super::table::PAGES_MAX;
use super::{PAGE_BYTES, PageOp, READ_BYTES, REPLY_BYTES, REQUEST_BYTES, status};
use crate::Error;
use crate::credits::{Credit, Credits};
use crate::protocol::NodeHello;
use crate::scheme::{ClientScheme, Grant, GroupId, PageScheme, WhenIdle};

/// Bytes from one reply slot to the next.
const REPLY_STRIDE: usize = 64;

/// The scheme's client on the NIC `N`.
pub struct Client<N: Nic> {
    reads: Queue<N>,
    writes: Queue<N>,
    numbers: Arc<Mutex<Numbers>>,
}

/// One QP with its request slots.
struct Queue<N: Nic> {
    qp: N::Qp,
    completer: Completer<N::Cq>,
    /// One page for each request in flight, which the memory node reads and writes.
    pages: N::Mr,
    replies: N::Mr,
    credits: Credits,
    /// Held while posting, so that receives and SENDs have the same order: the n-th reply answers
    /// the n-th request.
    order: Mutex<()>,
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
            .ok_or(Error::NotYours { entry: number })
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
    pub fn new(nic: &N, pd: &N::Pd, welcome: &NodeHello) -> Result<Self, Error> {
        if welcome.chunk_bytes != PAGE_BYTES as u64 {
            return Err(Error::Protocol {
                attempt: "connecting to a memory node with scheme odrp".into(),
                why: format!(
                    "the memory node's pages have {} bytes, not {PAGE_BYTES}",
                    welcome.chunk_bytes
                ),
            });
        }
        let end = welcome.chunks.min(PAGES_MAX) as u32;
        let numbers = Numbers { fresh: 0, end, free: Vec::new(), pages: Vec::new() };
        Ok(Self {
            reads: Queue::new(nic, pd, welcome.credits)?,
            writes: Queue::new(nic, pd, welcome.credits)?,
            numbers: Arc::new(Mutex::new(numbers)),
        })
    }

    fn queues(&self) -> [&Queue<N>; 2] {
        [&self.reads, &self.writes]
    }
}

impl<N: Nic> Queue<N> {
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
                access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            },
        )?;
        let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let pages = nic.alloc_dma(credits as usize * PAGE_BYTES)?;
        let replies = nic.alloc_dma(credits as usize * REPLY_STRIDE)?;
        Ok(Self {
            qp,
            completer: Completer::new(cq),
            pages: nic.reg_mr(pd, &pages, remote | Access::REMOTE_READ)?,
            replies: nic.reg_mr(pd, &replies, remote)?,
            credits: Credits::new(credits),
            order: Mutex::new(()),
        })
    }

    /// Page buffer of the request.
    fn place(&self, credit: &Credit<'_>) -> Remote {
        self.pages.remote(credit.slot() as usize * PAGE_BYTES)
    }

    /// Reads a mapped page into the request's page buffer.
    async fn read(&self, number: u32, credit: &Credit<'_>) -> Result<(), Error> {
        let mut request = [0; READ_BYTES];
        request[..3].copy_from_slice(&number.to_be_bytes()[1..]);
        put(&mut request[3..], self.place(credit));
        self.send("reading a page", &request).await
    }

    /// Sends a request whose reply is a status.
    async fn ask(
        &self,
        what: &str,
        ask: PageOp,
        number: u32,
        credit: &Credit<'_>,
    ) -> Result<u64, Error> {
        let reply = credit.slot() as usize * REPLY_STRIDE;
        self.replies.memory().zero(reply, REPLY_BYTES);
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&((ask as u32) << 24 | number).to_be_bytes());
        put(&mut request[4..], self.place(credit));
        put(&mut request[16..], self.replies.remote(reply));
        self.send(what, &request).await?;
        Ok(self.replies.memory().load_be64(reply))
    }

    /// Sends a request and waits for its reply.
    async fn send(&self, what: &str, request: &[u8]) -> Result<(), Error> {
        let (answered, sent) = {
            let _order = self.order.lock();
            let answered =
                self.completer.submit(|id| self.qp.post_recv(&ReceiveRequest { id, to: &[] }))?;
            let sent = self.completer.submit(|id| {
                let op = Op::SendInline { data: request };
                self.qp.post_send(&[WorkRequest { id, op, signaled: true }])
            })?;
            (answered, sent)
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
        Ok(())
    }
}

/// Writes an address and a key into a request.
fn put(at: &mut [u8], place: Remote) {
    at[..8].copy_from_slice(&place.addr.to_be_bytes());
    at[8..12].copy_from_slice(&place.rkey.0.to_be_bytes());
}

fn check_whole(op: &'static str, len: usize) -> Result<(), Error> {
    if len == PAGE_BYTES {
        return Ok(());
    }
    Err(Error::Setting {
        setting: "length",
        value: len.to_string(),
        why: format!("scheme odrp transfers whole pages: {op} {PAGE_BYTES} bytes"),
    })
}

impl<N: Nic> PageScheme for Client<N> {
    async fn read_page(&self, page: &Grant, into: &mut [u8]) -> Result<(), Error> {
        check_whole("read", into.len())?;
        let number = page.entry;
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
        let credit = queue.credits.take().await;
        let said = match state {
            State::Written => queue.read(number, &credit).await.map(|()| status::PENDING),
            _ => queue.ask("reading a page", PageOp::Read, number, &credit).await,
        };
        match said? {
            status::PENDING => {
                queue.pages.memory().read(credit.slot() as usize * PAGE_BYTES, into);
                Ok(())
            }
            status::UNMAPPED => {
                into.fill(0);
                Ok(())
            }
            other => Err(not_understood("reading a page", other)),
        }
    }

    async fn write_page(&self, page: &Grant, from: &[u8]) -> Result<(), Error> {
        check_whole("write", from.len())?;
        let number = page.entry;
        self.numbers.lock().get(number)?;
        let credit = self.writes.credits.take().await;
        self.writes.pages.memory().write(credit.slot() as usize * PAGE_BYTES, from);
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
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    /// Takes a page number; no request is sent: see [`PageScheme::write_page`].
    async fn allocate(&self, group: GroupId) -> Result<Grant, Error> {
        let number = self.numbers.lock().take();
        let number = number.ok_or(Error::OutOfMemory { bytes: PAGE_BYTES as u64 })?;
        let addr = number as u64 * PAGE_BYTES as u64;
        Ok(Grant::new(addr, PAGE_BYTES as u64, number, group, &[]))
    }

    async fn free(&self, page: &Grant) -> Result<(), Error> {
        let number = page.entry;
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
                let credit = self.writes.credits.take().await;
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
    }

    fn management(&self) -> Vec<Qpn> {
        self.queues().map(|q| q.qp.qpn()).to_vec()
    }

    fn is_broken(&self) -> bool {
        self.queues().iter().any(|q| !matches!(q.qp.state(), Ok(QpState::ReadyToSend)))
    }

    fn reset(&self) -> Result<(), Error> {
        Ok(self.queues().iter().try_for_each(|q| q.qp.modify(QpChange::Reset))?)
    }

    fn break_management(&self) -> Result<(), Error> {
        Ok(self.queues().iter().try_for_each(|q| q.qp.modify(QpChange::Error))?)
    }

    fn when_idle(&self, look: &WhenIdle) {
        self.queues().iter().for_each(|q| q.completer.when_idle(look.clone()));
    }

    fn connect(&self, peers: &[PeerAddress]) -> Result<(), Error> {
        if peers.len() != 2 {
            return Err(Error::Protocol {
                attempt: "connecting the management QPs".into(),
                why: format!("the memory node named {} peers for two QPs", peers.len()),
            });
        }
        Ok(self.queues().iter().zip(peers).try_for_each(|(q, peer)| q.qp.connect(*peer))?)
    }
}

fn not_understood(attempt: &str, status: u64) -> Error {
    Error::Protocol {
        attempt: attempt.to_owned(),
        why: format!("the reply has unknown status {status}"),
    }
}
