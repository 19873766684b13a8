//! The compute node's side: a request is a SEND, its answer the page or a status, written into a slot of
//! the compute node's own memory.
//!
//! ```text
//! op (1) | page number (3) | buffer: address (8), key (4) | reply: address (8), key (4)
//! ```
//!
//! Page numbers are the compute node's own: an allocation takes one that is not in use, and asks
//! nobody; memory is allocated by the first write.

use std::sync::atomic::{Ordering, fence};

use fabric::completion::Completer;
use fabric::{
    Access, CqAttr, MemoryRegion, Nic, Op, QpAttr, QpChange, QpState, Qpn, QueuePair, Receive,
    ReceiveAttr, ReceiveRequest, Status, WorkRequest,
};
use parking_lot::Mutex;

use super::table::PAGES_MAX;
use super::{Ask, PAGE_BYTES, REQUEST_BYTES, status};
use crate::Error;
use crate::credits::{Credit, Credits};
use crate::protocol::Welcome;
use crate::scheme::{ClientScheme, Grant, GroupId, PageScheme};

/// Bytes from one reply to the next.
const REPLY_STRIDE: usize = 64;

/// The scheme's compute-node side on the NIC `N`.
pub struct Client<N: Nic> {
    qp: N::Qp,
    completer: Completer<N::Cq>,
    /// A page for each request in flight, which the memory node reads and writes.
    pages: N::Mr,
    replies: N::Mr,
    credits: Credits,
    /// Receives and SENDs are posted in the same order: the n-th reply answers the n-th request.
    order: Mutex<()>,
    numbers: Mutex<Numbers>,
}

/// Page numbers.
struct Numbers {
    /// Numbers from here on were never used.
    fresh: u32,
    end: u32,
    /// Numbers that were used, and are not.
    free: Vec<u32>,
    used: Vec<bool>,
}

impl Numbers {
    fn take(&mut self) -> Option<u32> {
        let number = self.free.pop().or_else(|| {
            let fresh = self.fresh;
            self.fresh += (fresh < self.end) as u32;
            (fresh < self.end).then_some(fresh)
        })?;
        if self.used.len() <= number as usize {
            self.used.resize(number as usize + 1, false);
        }
        self.used[number as usize] = true;
        Some(number)
    }

    fn is_used(&self, number: u32) -> bool {
        self.used.get(number as usize).is_some_and(|used| *used)
    }

    /// It is on its way out: nobody else may free it.
    fn retire(&mut self, number: u32) -> bool {
        match self.used.get_mut(number as usize) {
            Some(used) => std::mem::replace(used, false),
            None => false,
        }
    }
}

impl<N: Nic> Client<N> {
    /// Makes the QP.
    pub fn new(nic: &N, pd: &N::Pd, welcome: &Welcome) -> Result<Self, Error> {
        let credits = welcome.credits;
        if welcome.chunk_bytes != PAGE_BYTES as u64 {
            return Err(Error::Protocol {
                attempt: "connecting to a memory node with scheme odrp".into(),
                why: format!("its pages have {} bytes, not {PAGE_BYTES}", welcome.chunk_bytes),
            });
        }
        // A receive and a SEND for each request, and as many again that are flushed at a reset.
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
        let end = welcome.chunks.min(PAGES_MAX) as u32;
        Ok(Self {
            qp,
            completer: Completer::new(cq),
            pages: nic.reg_mr(pd, &pages, remote | Access::REMOTE_READ)?,
            replies: nic.reg_mr(pd, &replies, remote)?,
            credits: Credits::new(credits),
            order: Mutex::new(()),
            numbers: Mutex::new(Numbers { fresh: 0, end, free: Vec::new(), used: Vec::new() }),
        })
    }

    /// Sends a request; the status that it is answered with.
    async fn ask(
        &self,
        what: &str,
        ask: Ask,
        number: u32,
        credit: &Credit<'_>,
    ) -> Result<u64, Error> {
        let slot = credit.slot() as usize;
        let replies = self.replies.memory();
        replies.zero(slot * REPLY_STRIDE, REPLY_STRIDE);
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&((ask as u32) << 24 | number).to_be_bytes());
        let places =
            [self.pages.remote(slot * PAGE_BYTES), self.replies.remote(slot * REPLY_STRIDE)];
        for (place, at) in places.iter().zip(request[4..].chunks_exact_mut(12)) {
            at[..8].copy_from_slice(&place.addr.to_be_bytes());
            at[8..].copy_from_slice(&place.rkey.0.to_be_bytes());
        }
        let (answered, sent) = {
            let _order = self.order.lock();
            let answered =
                self.completer.submit(|id| self.qp.post_recv(&ReceiveRequest { id, to: &[] }))?;
            let sent = self.completer.submit(|id| {
                let op = Op::SendInline { data: &request };
                self.qp.post_send(&[WorkRequest { id, op, signaled: true }])
            })?;
            (answered, sent)
        };
        for pending in [answered, sent] {
            let completion = pending.await?;
            if completion.status != Status::Success {
                let (attempt, status) = (what.to_owned(), completion.status);
                return Err(Error::ManagementBroken { attempt, status });
            }
        }
        // The reply was written before its completion, which was just read.
        fence(Ordering::Acquire);
        Ok(replies.load_be64(slot * REPLY_STRIDE))
    }

    fn check(&self, page: &Grant, op: &'static str, len: usize) -> Result<(), Error> {
        if len != PAGE_BYTES {
            return Err(Error::Setting {
                setting: "length",
                value: len.to_string(),
                why: format!("scheme odrp moves whole pages of {PAGE_BYTES} bytes: {op} one"),
            });
        }
        match self.numbers.lock().is_used(page.entry) {
            true => Ok(()),
            false => Err(Error::NotYours { entry: page.entry }),
        }
    }
}

impl<N: Nic> PageScheme for Client<N> {
    async fn read_page(&self, page: &Grant, into: &mut [u8]) -> Result<(), Error> {
        self.check(page, "read", into.len())?;
        let credit = self.credits.take().await;
        match self.ask("reading a page", Ask::Read, page.entry, &credit).await? {
            status::PENDING => {
                self.pages.memory().read(credit.slot() as usize * PAGE_BYTES, into);
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
        self.check(page, "write", from.len())?;
        let credit = self.credits.take().await;
        self.pages.memory().write(credit.slot() as usize * PAGE_BYTES, from);
        match self.ask("writing a page", Ask::Write, page.entry, &credit).await? {
            status::DONE => Ok(()),
            status::EMPTY => Err(Error::OutOfMemory { bytes: PAGE_BYTES as u64 }),
            other => Err(not_understood("writing a page", other)),
        }
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    /// Takes a page number. That is all: see [`PageScheme::write_page`].
    async fn allocate(&self, group: GroupId) -> Result<Grant, Error> {
        let number = self.numbers.lock().take();
        let number = number.ok_or(Error::OutOfMemory { bytes: PAGE_BYTES as u64 })?;
        let addr = number as u64 * PAGE_BYTES as u64;
        Ok(Grant::new(addr, PAGE_BYTES as u64, number, group, &[]))
    }

    async fn free(&self, page: &Grant) -> Result<(), Error> {
        let number = page.entry;
        if !self.numbers.lock().retire(number) {
            return Err(Error::NotYours { entry: number });
        }
        let credit = self.credits.take().await;
        let said = self.ask("freeing a page", Ask::Free, number, &credit).await;
        let mut numbers = self.numbers.lock();
        match said {
            // One that was never written was never allocated.
            Ok(status::DONE | status::UNMAPPED) => {
                numbers.free.push(number);
                Ok(())
            }
            Ok(other) => Err(not_understood("freeing a page", other)),
            // Whether it was freed is open: it may be freed again.
            Err(e) => {
                numbers.used[number as usize] = true;
                Err(e)
            }
        }
    }

    fn management(&self) -> Vec<Qpn> {
        vec![self.qp.qpn()]
    }

    fn is_broken(&self) -> bool {
        !matches!(self.qp.state(), Ok(QpState::ReadyToSend))
    }

    fn reset(&self) -> Result<(), Error> {
        Ok(self.qp.modify(QpChange::Reset)?)
    }

    fn connect(&self, peers: &[Qpn]) -> Result<(), Error> {
        let [peer] = peers else {
            return Err(Error::Protocol {
                attempt: "connecting the QP for pages".into(),
                why: format!("{} peers were named for one QP", peers.len()),
            });
        };
        Ok(self.qp.connect(*peer)?)
    }
}

fn not_understood(attempt: &str, status: u64) -> Error {
    Error::Protocol {
        attempt: attempt.to_owned(),
        why: format!("the reply's status is {status}, which means nothing"),
    }
}
