//! The queue of requests that a compute node sends over a management QP.
//!
//! A request is a SEND, and its answer completes a receive. Receives and SENDs are posted under one
//! lock, and the memory node answers in order: the n-th receive completes with the n-th answer.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use verbs::completion::{Completer, Pending, Source, WhenIdle};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Data, Error as VerbsError, Nic, Op, PeerAddress,
    QpAttr, QpChange, QpState, Qpn, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Sge, Status,
    WorkRequest,
};

use crate::Error;
use crate::credits::{Credit, Credits, Take};
use crate::index::Slot;

/// An access QP that also carries requests, with the completer of its completions.
pub type SharedQp<N> = (<N as Nic>::Qp, Arc<Completer<<N as Nic>::Cq>>);

/// Sizes of a request queue.
#[derive(Clone, Copy, Debug)]
pub struct RequestQueueAttr {
    /// Requests in flight.
    pub credits: u32,
    /// Entries of the receive queue.
    pub receives: u32,
    /// Building blocks of the send queue.
    pub send_blocks: u32,
    /// Entries of the CQ.
    pub completions: u32,
    /// Rights of the memory node over the QP, with keys that allow them.
    pub access: Access,
}

impl RequestQueueAttr {
    /// A receive and a SEND for each of `credits` requests. The CQ has room for as many again,
    /// which a reset flushes.
    pub fn new(credits: u32, access: Access) -> Self {
        let (send_blocks, completions) = (credits * 2, credits * 4);
        Self { credits, receives: credits, send_blocks, completions, access }
    }
}

/// A management QP with its completions, its credits and its state.
pub struct RequestQueue<N: Nic> {
    qp: N::Qp,
    completer: Arc<Completer<N::Cq>>,
    /// The QP also carries accesses.
    shared: bool,
    credits: Credits,
    /// Held while posting, so that receives and SENDs have the same order.
    order: Mutex<()>,
    /// False while the QP is in Reset, where requests would never complete. Changes under `order`.
    open: AtomicBool,
    /// A request has seen that its answer is lost, since the last connect.
    lost: AtomicBool,
    /// A request had no answer in time, since the last connect. Its slot and its receive are still
    /// in use, so that no request may follow.
    late: AtomicBool,
    /// Number of connects. Changes under `order`.
    epoch: AtomicU64,
    late_answers: Mutex<LateAnswers<N>>,
}

/// Answers that no caller waits for any more.
struct LateAnswers<N: Nic> {
    /// The receives, with the slots of their requests.
    expected: Vec<(Slot, Posted<N>)>,
    /// Slots whose answer has arrived, since the last reset.
    arrived: Vec<Slot>,
}

pub(crate) type Posted<N> = Pending<<N as Nic>::Cq>;

/// A request in flight.
pub(crate) struct PostedRequest<N: Nic> {
    /// The receive of the answer.
    pub answer: Posted<N>,
    pub sent: Posted<N>,
    /// Number of connects before it.
    pub epoch: u64,
}

impl<N: Nic> RequestQueue<N> {
    /// Creates the QP.
    pub fn new(nic: &N, pd: &N::Pd, attr: RequestQueueAttr) -> Result<Self, Error> {
        let entries = attr.completions;
        let cq = nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let receives = ReceiveAttr { entries: attr.receives, max_sges: 1 };
        let qp = nic.create_qp(
            pd,
            QpAttr {
                send_cq: &cq,
                recv_cq: &cq,
                send_blocks: attr.send_blocks,
                receive: Receive::Own(receives),
                access: attr.access,
            },
        )?;
        Ok(Self::with((qp, Arc::new(Completer::new(cq))), attr.credits, false))
    }

    /// A queue over an access QP. The owner of the QP connects it.
    pub fn over(qp: SharedQp<N>, credits: u32) -> Self {
        Self::with(qp, credits, true)
    }

    fn with((qp, completer): SharedQp<N>, credits: u32, shared: bool) -> Self {
        let (credits, order) = (Credits::new(credits), Mutex::new(()));
        let [open, lost, late] = [(); 3].map(|()| AtomicBool::new(false));
        let epoch = AtomicU64::new(0);
        let late_answers = Mutex::new(LateAnswers { expected: Vec::new(), arrived: Vec::new() });
        Self { qp, completer, shared, credits, order, open, lost, late, epoch, late_answers }
    }

    /// Takes a slot for a request; waits until one is free.
    pub fn slot(&self) -> Take<'_> {
        self.credits.take()
    }

    /// Sends a request and waits for its answer, which is written to `to`, memory of the slot.
    ///
    /// # Errors
    /// [`Error::ManagementBroken`] if the answer was lost, [`Error::Unanswered`] if there is none
    /// within the time limit. The answer may come later: [`RequestQueue::take_late`].
    pub async fn ask(
        &self,
        attempt: &str,
        slot: &Credit<'_>,
        request: &[u8],
        to: &[Sge],
    ) -> Result<(), Error> {
        self.ask_with(attempt, slot, Data::Inline(request), to).await
    }

    /// Like [`RequestQueue::ask`], with a request that may be gathered from registered memory.
    pub async fn ask_with(
        &self,
        attempt: &str,
        slot: &Credit<'_>,
        request: Data<'_>,
        to: &[Sge],
    ) -> Result<(), Error> {
        // A received answer means that the request was executed, whatever the completion of the
        // SEND says.
        match self.exchange_with(attempt, Some(slot), request, to).await? {
            (Status::Success, _) => Ok(()),
            (status, Status::Success) | (_, status) => Err(broken(attempt, status)),
        }
    }

    /// Like [`RequestQueue::ask`], but returns the status of the answer and of the SEND, and a late
    /// answer is forgotten.
    pub async fn exchange(
        &self,
        attempt: &str,
        request: &[u8],
        to: &[Sge],
    ) -> Result<(Status, Status), Error> {
        self.exchange_with(attempt, None, Data::Inline(request), to).await
    }

    async fn exchange_with(
        &self,
        attempt: &str,
        slot: Option<&Credit<'_>>,
        request: Data<'_>,
        to: &[Sge],
    ) -> Result<(Status, Status), Error> {
        let mut waited = Duration::ZERO;
        let mut posted = loop {
            match self.post_request(attempt, request, to) {
                Err(Error::Verbs(VerbsError::QueueFull { .. })) if self.shared => {
                    self.completer.make_room(&mut waited)?
                }
                posted => break posted?,
            }
        };
        let ended = async {
            let PostedRequest { answer, sent, .. } = &mut posted;
            let answered = poll_fn(|cx| match Pin::new(&mut *answer).poll(cx) {
                Poll::Pending if sent.is_unanswered() => Poll::Ready(Err(sent.late())),
                polled => polled,
            });
            Ok::<_, VerbsError>((answered.await?, sent.await?))
        };
        let (answered, sent) = match ended.await {
            Ok(both) => both,
            Err(error) => {
                let error = self.failed(attempt, posted.epoch, error);
                if let (Some(slot), Error::Unanswered { .. }) = (slot, &error) {
                    let late = (slot.slot(), posted.answer);
                    self.late_answers.lock().expected.push(late);
                }
                return Err(error);
            }
        };
        if answered.status != Status::Success {
            self.mark_lost();
        }
        // The answer was written before its completion, which was polled above.
        fence(Ordering::Acquire);
        Ok((answered.status, sent.status))
    }

    /// Posts work requests of which only the last one is signaled, and waits for its completion.
    pub async fn execute(&self, attempt: &str, list: &mut [WorkRequest<'_>]) -> Result<(), Error> {
        let (done, epoch) = {
            let _order = self.order.lock();
            self.check_open(attempt)?;
            let done = self.completer.submit(|id| {
                list.iter_mut().for_each(|wr| wr.id = id);
                self.qp.post_send(list)
            })?;
            (done, self.epoch.load(Ordering::Relaxed))
        };
        let Completion { status, .. } = done.await.map_err(|e| self.failed(attempt, epoch, e))?;
        match status {
            Status::Success => Ok(()),
            status => Err(broken(attempt, status)),
        }
    }

    /// Posts a request and the receive for its answer. On a shared QP the SEND may find the queue
    /// full, so it is posted before the receive; an answer that arrives before the receive waits
    /// for it.
    pub(crate) fn post_request(
        &self,
        attempt: &str,
        request: Data<'_>,
        to: &[Sge],
    ) -> Result<PostedRequest<N>, Error> {
        // The memory node's program answers, perhaps after a long time.
        let post = |id| self.qp.post_recv(&ReceiveRequest { id, to });
        let receive = || self.completer.submit_endless(post);
        let send = || {
            self.completer.submit(|id| {
                let op = match request {
                    Data::Inline(data) => Op::SendInline { data },
                    Data::Gather(from) => Op::Send { from },
                };
                self.qp.post_send(&[WorkRequest { id, op, signaled: true }])
            })
        };
        let _order = self.order.lock();
        self.check_open(attempt)?;
        let (answer, sent) = if self.shared {
            let sent = send()?;
            (receive()?, sent)
        } else {
            (receive()?, send()?)
        };
        Ok(PostedRequest { answer, sent, epoch: self.epoch.load(Ordering::Relaxed) })
    }

    /// The error of a request that was posted in `epoch`. If it is that no answer came in time, the
    /// queue accepts no request until it is connected again.
    #[cold]
    pub(crate) fn failed(&self, attempt: &str, epoch: u64, error: VerbsError) -> Error {
        let _order = self.order.lock();
        let is_late = matches!(error, VerbsError::Unanswered { .. });
        if is_late && self.epoch.load(Ordering::Relaxed) == epoch {
            self.late.store(true, Ordering::Release);
            self.open.store(false, Ordering::Release);
        }
        match Error::from(error) {
            Error::Unanswered { why, .. } => Error::Unanswered { attempt: attempt.to_owned(), why },
            error => error,
        }
    }

    /// Slots of requests that were executed although their callers got [`Error::Unanswered`]. The
    /// answers are in the slots' memory until the queue is connected, so the call belongs between
    /// [`ManagementQp::reset`] and [`ManagementQp::connect`].
    pub fn take_late(&self) -> Vec<Slot> {
        // The answers were written before their completions, which the reset has polled.
        fence(Ordering::Acquire);
        std::mem::take(&mut self.late_answers.lock().arrived)
    }

    /// Looks which late answers came before the reset of the QP, which has flushed the other
    /// receives.
    fn settle_late(&self) {
        let LateAnswers { expected, arrived } = &mut *self.late_answers.lock();
        arrived.clear();
        for (slot, mut answer) in expected.drain(..) {
            if wait_flushed(&mut answer) == Some(Status::Success) {
                arrived.push(slot);
            }
        }
    }

    /// Records that the answer to a request is lost.
    pub(crate) fn mark_lost(&self) {
        self.lost.store(true, Ordering::Release);
    }

    fn check_open(&self, attempt: &str) -> Result<(), Error> {
        match self.open.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(broken(attempt, Status::Flushed)),
        }
    }
}

/// A management QP of any NIC. See [`ClientScheme::each_queue`](crate::ClientScheme).
pub trait ManagementQp {
    /// Number of the QP.
    fn qpn(&self) -> Qpn;

    /// True if the QP also carries accesses, so that its owner connects it.
    fn is_shared(&self) -> bool;

    /// True if the QP is not connected, or in the error state.
    fn is_broken(&self) -> bool;

    /// True while the QP is in Reset, or [late](ManagementQp::is_late): no request is accepted.
    fn is_closed(&self) -> bool;

    /// True if a request had no answer in time, since the last connect.
    fn is_late(&self) -> bool;

    /// True if a request has seen, since the last connect, that its answer is lost. The request may
    /// be one of an earlier connection, which was flushed.
    fn has_lost_answers(&self) -> bool;

    /// Takes the QP to Reset.
    fn reset(&self) -> Result<(), Error>;

    /// Takes the QP to Error: requests in flight end with an error.
    fn break_off(&self) -> Result<(), Error>;

    /// Connects the QP, and accepts requests. A shared QP is connected by its owner, and has no
    /// `peer`.
    fn connect(&self, peer: Option<PeerAddress>) -> Result<(), Error>;

    /// Registers `look`, which a waiting request calls periodically while its answer is overdue.
    fn when_idle(&self, look: &WhenIdle);

    /// Sets the time limit of requests, and the memory node's name
    /// ([`Completer::set_limit`]).
    fn set_limit(&self, limit: Duration, peer: &str);

    /// Notes whether the memory node's program answers ([`Completer::set_peer_silent`]).
    fn set_peer_silent(&self, is_silent: bool);

    /// The completions of the QP.
    fn source(&self) -> Source;
}

impl<N: Nic> ManagementQp for RequestQueue<N> {
    fn qpn(&self) -> Qpn {
        self.qp.qpn()
    }

    fn is_shared(&self) -> bool {
        self.shared
    }

    fn is_broken(&self) -> bool {
        !matches!(self.qp.state(), Ok(QpState::ReadyToSend))
    }

    fn is_closed(&self) -> bool {
        !self.open.load(Ordering::Acquire)
    }

    fn is_late(&self) -> bool {
        self.late.load(Ordering::Acquire)
    }

    fn has_lost_answers(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn reset(&self) -> Result<(), Error> {
        let _order = self.order.lock();
        self.open.store(false, Ordering::Release);
        self.qp.modify(QpChange::Reset)?;
        self.settle_late();
        Ok(())
    }

    fn break_off(&self) -> Result<(), Error> {
        Ok(self.qp.modify(QpChange::Error)?)
    }

    fn connect(&self, peer: Option<PeerAddress>) -> Result<(), Error> {
        let _order = self.order.lock();
        if let Some(peer) = peer {
            self.qp.connect(peer)?;
        }
        self.epoch.fetch_add(1, Ordering::Relaxed);
        self.lost.store(false, Ordering::Release);
        self.late.store(false, Ordering::Release);
        self.open.store(true, Ordering::Release);
        Ok(())
    }

    fn when_idle(&self, look: &WhenIdle) {
        self.completer.when_idle(look.clone());
    }

    fn set_limit(&self, limit: Duration, peer: &str) {
        self.completer.set_limit(limit, peer);
    }

    fn set_peer_silent(&self, is_silent: bool) {
        self.completer.set_peer_silent(is_silent);
    }

    fn source(&self) -> Source {
        self.completer.source()
    }
}

/// Gives back with `free` what the memory node granted to callers that had stopped waiting.
///
/// # Errors
/// Those of `free`, after which the rest stays in `undelivered`. A memory node that has taken the
/// grant back meanwhile is none.
pub async fn return_all<T: Copy, F: Future<Output = Result<(), Error>>>(
    undelivered: &Mutex<Vec<T>>,
    free: impl Fn(T) -> F,
) -> Result<(), Error> {
    loop {
        let Some(grant) = undelivered.lock().pop() else { return Ok(()) };
        match free(grant).await {
            Ok(()) | Err(Error::NotYours { .. } | Error::NoSuchObject { .. }) => {}
            Err(error) => {
                undelivered.lock().push(grant);
                return Err(error);
            }
        }
    }
}

/// The status of an operation whose QP was reset: its completion is there, or another thread is
/// polling it. `None` if the NIC is gone, or gives no completion.
pub(crate) fn wait_flushed<C: CompletionQueue>(pending: &mut Pending<C>) -> Option<Status> {
    const POLLS: u32 = 10_000;
    for _ in 0..POLLS {
        match pending.try_wait().ok()? {
            Some(completion) => return Some(completion.status),
            None => std::thread::yield_now(),
        }
    }
    None
}

pub(crate) fn broken(attempt: &str, status: Status) -> Error {
    Error::ManagementBroken { attempt: attempt.into(), status }
}
