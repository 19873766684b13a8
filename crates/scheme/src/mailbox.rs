//! Requests over a management QP whose replies come in any order.
//!
//! A [`RequestQueue`] expects the n-th answer to be that of the n-th request. Here the memory node
//! may answer a request late, because the request waits for an event, and other requests must not
//! wait behind it. Each request has a number, which its reply repeats. Each request posts a
//! receive, but its reply may complete the receive of another request: all waiting requests
//! together poll the oldest receive, and the one that finds a reply hands it to the request that it
//! belongs to.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use verbs::completion::{Pending, Source, WhenIdle};
use verbs::{Access, Data, MemoryRegion, Nic, PeerAddress, Qpn, Status, WorkRequest};

use crate::Error;
use crate::index::Slot;
use crate::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr, broken, wait_flushed};

/// A management QP with replies of `REPLY` bytes, in any order.
pub struct Mailbox<N: Nic, const REPLY: usize> {
    queue: RequestQueue<N>,
    /// Receive buffers of `REPLY` bytes.
    replies: N::Mr,
    buffers: u32,
    /// The number in a reply.
    number_in: fn(&[u8; REPLY]) -> u64,
    next: AtomicU64,
    state: Mutex<State<N, REPLY>>,
}

struct State<N: Nic, const REPLY: usize> {
    /// Number of connects. A failure concerns the requests of its connection only.
    epoch: u64,
    /// Receive buffers that are not posted.
    free: Vec<Slot>,
    /// Posted receives, the oldest first.
    receives: VecDeque<PostedReceive<N>>,
    /// Requests without a reply, by number.
    waiting: HashMap<u64, Waiting<REPLY>>,
    /// Requests whose callers got [`Error::Unanswered`], since the last connect.
    late: HashSet<u64>,
    /// Replies to these.
    late_replies: Vec<[u8; REPLY]>,
}

struct PostedReceive<N: Nic> {
    pending: Pending<N::Cq>,
    buffer: Slot,
    epoch: u64,
}

struct Waiting<const REPLY: usize> {
    epoch: u64,
    waker: Option<Waker>,
    result: Option<Result<[u8; REPLY], Status>>,
}

impl<N: Nic, const REPLY: usize> Mailbox<N, REPLY> {
    /// Creates the QP, with receives for `requests` requests in flight, and send blocks for as many
    /// requests of `request_bytes` and `executes` further work requests.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        (requests, request_bytes, executes): (u32, usize, u32),
        access: Access,
        number_in: fn(&[u8; REPLY]) -> u64,
    ) -> Result<Self, Error> {
        // A SEND with inline data has its headers in the first block.
        let blocks = (request_bytes as u32).div_ceil(64) + 1;
        let send_blocks = (requests * blocks + executes).next_power_of_two();
        let completions = 2 * (2 * requests + executes);
        let attr = RequestQueueAttr {
            send_blocks,
            completions,
            ..RequestQueueAttr::new(requests, access)
        };
        let memory = nic.alloc_dma(requests as usize * REPLY)?;
        let state = State {
            epoch: 0,
            free: slots(requests).collect(),
            receives: VecDeque::new(),
            waiting: HashMap::new(),
            late: HashSet::new(),
            late_replies: Vec::new(),
        };
        Ok(Self {
            queue: RequestQueue::new(nic, pd, attr)?,
            replies: nic.reg_mr(pd, &memory, Access::LOCAL_WRITE)?,
            buffers: requests,
            number_in,
            next: AtomicU64::new(1),
            state: Mutex::new(state),
        })
    }

    /// A number for a request.
    pub fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends request `number` and waits for its reply. At most the `requests` of [`Mailbox::new`]
    /// may be in flight.
    ///
    /// # Errors
    /// [`Error::ManagementBroken`] if the reply was lost, [`Error::Unanswered`] if the memory node
    /// does not answer any request. The reply may come later: [`Mailbox::take_late`].
    pub async fn ask(
        &self,
        attempt: &str,
        number: u64,
        request: &[u8],
    ) -> Result<[u8; REPLY], Error> {
        let (sent, epoch) = self.post(attempt, number, request)?;
        let Some(reply) = (Reply { mailbox: self, number, sent: &sent }).await else {
            self.state.lock().late.insert(number);
            return Err(self.queue.failed(attempt, epoch, sent.late()));
        };
        // A request is in flight until the completion of its SEND has been taken.
        let sent = sent.await;
        match reply {
            Ok(reply) => Ok(reply),
            // The first error of the connection names the cause.
            Err(Status::Flushed) => Err(broken(attempt, sent?.status)),
            Err(status) => Err(broken(attempt, status)),
        }
    }

    /// Posts work requests of which only the last one is signaled, and waits for its completion.
    pub async fn execute(&self, attempt: &str, list: &mut [WorkRequest<'_>]) -> Result<(), Error> {
        self.queue.execute(attempt, list).await
    }

    /// Replies to requests whose callers got [`Error::Unanswered`]. All that will ever come have
    /// come when the queue is reset.
    pub fn take_late(&self) -> Vec<[u8; REPLY]> {
        std::mem::take(&mut self.state.lock().late_replies)
    }

    fn post(
        &self,
        attempt: &str,
        number: u64,
        request: &[u8],
    ) -> Result<(Pending<N::Cq>, u64), Error> {
        let mut state = self.state.lock();
        // A request whose future was dropped keeps its receive. If no buffer is free for that
        // reason, the caller re-establishes the QP, which frees all.
        let Some(buffer) = state.free.pop() else {
            self.queue.mark_lost();
            return Err(broken(attempt, Status::Flushed));
        };
        let to = self.replies.sge(buffer.offset(REPLY), REPLY as u32);
        let posted = match self.queue.post_request(attempt, Data::Inline(request), &[to]) {
            Ok(posted) => posted,
            Err(e) => {
                state.free.push(buffer);
                return Err(e);
            }
        };
        let epoch = state.epoch;
        state.receives.push_back(PostedReceive { pending: posted.answer, buffer, epoch });
        state.waiting.insert(number, Waiting { epoch, waker: None, result: None });
        Ok((posted.sent, posted.epoch))
    }

    /// Polls the oldest receives and hands out their replies, until the oldest one is pending.
    fn poll_receives(&self, state: &mut State<N, REPLY>, cx: &mut Context<'_>) {
        while let Some(oldest) = state.receives.front_mut() {
            let Poll::Ready(ended) = Pin::new(&mut oldest.pending).poll(cx) else { return };
            self.settle_oldest(state, ended.map_or(Status::Flushed, |ended| ended.status));
        }
        // Every request has a receive: the memory node sent a reply that belongs to none.
        let epoch = state.epoch;
        self.fail(state, epoch, Status::RemoteOperation);
    }

    /// Hands out the reply of the oldest receive, which ended with `status`.
    fn settle_oldest(&self, state: &mut State<N, REPLY>, status: Status) {
        let oldest = state.receives.pop_front();
        let PostedReceive { buffer, epoch, .. } = oldest.expect("a receive that has ended");
        state.free.push(buffer);
        if status != Status::Success {
            return self.fail(state, epoch, status);
        }
        // The reply was written before its completion, which the caller has polled.
        fence(Ordering::Acquire);
        let mut bytes = [0; REPLY];
        self.replies.memory().read(buffer.offset(REPLY), &mut bytes);
        // A reply with another number belongs to a request whose future was dropped.
        let number = (self.number_in)(&bytes);
        if let Some(waiting) = state.waiting.get_mut(&number) {
            waiting.finish(Ok(bytes));
        } else if state.late.remove(&number) {
            state.late_replies.push(bytes);
        }
    }

    /// Ends all requests of the connection `epoch` and of earlier ones.
    fn fail(&self, state: &mut State<N, REPLY>, epoch: u64, status: Status) {
        let mut lost = false;
        for waiting in state.waiting.values_mut().filter(|w| w.epoch <= epoch) {
            if waiting.result.is_none() {
                lost = true;
                waiting.finish(Err(status));
            }
        }
        if lost {
            self.queue.mark_lost();
        }
    }
}

impl<const REPLY: usize> Waiting<REPLY> {
    fn finish(&mut self, result: Result<[u8; REPLY], Status>) {
        self.result.get_or_insert(result);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

fn slots(count: u32) -> impl Iterator<Item = Slot> {
    use crate::index::IndexRange;
    (Slot::new(0)..Slot::new(count)).iter()
}

/// The reply to a request; `None` if there is none within the time limit.
struct Reply<'a, N: Nic, const REPLY: usize> {
    mailbox: &'a Mailbox<N, REPLY>,
    number: u64,
    sent: &'a Pending<N::Cq>,
}

impl<N: Nic, const REPLY: usize> Future for Reply<'_, N, REPLY> {
    type Output = Option<Result<[u8; REPLY], Status>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let state = &mut *self.mailbox.state.lock();
        let own = |state: &State<N, REPLY>| {
            state.waiting.get(&self.number).expect("a request that waits").result
        };
        let mut result = own(state);
        if result.is_none() {
            self.mailbox.poll_receives(state, cx);
            result = own(state);
        }
        match result {
            // Dropping the future lets another request watch the receives.
            Some(result) => Poll::Ready(Some(result)),
            None if self.sent.is_unanswered() => Poll::Ready(None),
            None => {
                let waiting = state.waiting.get_mut(&self.number).expect("a request that waits");
                waiting.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<N: Nic, const REPLY: usize> Drop for Reply<'_, N, REPLY> {
    fn drop(&mut self) {
        let state = &mut *self.mailbox.state.lock();
        state.waiting.remove(&self.number);
        // The oldest receive wakes the request that polled it last, which may be this one.
        let next = state.waiting.values_mut().find(|w| w.waker.is_some());
        if let Some(waker) = next.and_then(|w| w.waker.take()) {
            waker.wake();
        }
    }
}

impl<N: Nic, const REPLY: usize> ManagementQp for Mailbox<N, REPLY> {
    fn qpn(&self) -> Qpn {
        self.queue.qpn()
    }

    fn is_shared(&self) -> bool {
        self.queue.is_shared()
    }

    fn is_broken(&self) -> bool {
        self.queue.is_broken()
    }

    fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    fn is_late(&self) -> bool {
        self.queue.is_late()
    }

    fn has_lost_answers(&self) -> bool {
        self.queue.has_lost_answers()
    }

    fn reset(&self) -> Result<(), Error> {
        self.queue.reset()?;
        let state = &mut *self.state.lock();
        if !state.late.is_empty() {
            // The reset has flushed the receives without a reply.
            while let Some(oldest) = state.receives.front_mut() {
                match wait_flushed(&mut oldest.pending) {
                    Some(ended) => self.settle_oldest(state, ended),
                    None => break,
                }
            }
        }
        Ok(())
    }

    fn break_off(&self) -> Result<(), Error> {
        self.queue.break_off()
    }

    fn connect(&self, peer: Option<PeerAddress>) -> Result<(), Error> {
        let state = &mut *self.state.lock();
        // The reset has flushed all receives, so that their buffers are free.
        let epoch = state.epoch;
        self.fail(state, epoch, Status::Flushed);
        state.receives.clear();
        state.late.clear();
        state.free = slots(self.buffers).collect();
        state.epoch += 1;
        self.queue.connect(peer)
    }

    fn when_idle(&self, look: &WhenIdle) {
        self.queue.when_idle(look);
    }

    fn set_limit(&self, limit: Duration, peer: &str) {
        self.queue.set_limit(limit, peer);
    }

    fn set_peer_silent(&self, is_silent: bool) {
        self.queue.set_peer_silent(is_silent);
    }

    fn source(&self) -> Source {
        self.queue.source()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Wake;
    use std::thread;

    use rnic::nic::{SoftNic, SoftQp};
    use verbs::executor::block_on;
    use verbs::{
        Completion, CompletionKind, CompletionQueue, CqAttr, Op, QpAttr, QueuePair, Receive,
        ReceiveAttr, ReceiveRequest,
    };

    use super::*;

    const REQUESTS: u32 = 4;

    type Box8 = Mailbox<SoftNic, 8>;

    /// A mailbox, and the peer of its QP, which has a receive for each request.
    struct Bed {
        mailbox: Arc<Box8>,
        peer: SoftQp,
        received: <SoftNic as Nic>::Cq,
        requests: <SoftNic as Nic>::Mr,
    }

    impl Bed {
        fn new() -> Self {
            let nic = SoftNic::inline();
            let pd = nic.alloc_pd().unwrap();
            let number = |reply: &[u8; 8]| u64::from_be_bytes(*reply);
            let sizes = (REQUESTS, 8, 1);
            let mailbox = Mailbox::new(&nic, &pd, sizes, Access::NONE, number).unwrap();
            let received = nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
            let attr = QpAttr {
                send_cq: &received,
                recv_cq: &received,
                send_blocks: 64,
                receive: Receive::Own(ReceiveAttr { entries: 16, max_sges: 1 }),
                access: Access::NONE,
            };
            let peer = nic.create_qp(&pd, attr).unwrap();
            let memory = nic.alloc_dma(16 * 8).unwrap();
            let requests = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
            let bed = Self { mailbox: Arc::new(mailbox), peer, received, requests };
            bed.connect();
            bed
        }

        fn connect(&self) {
            self.peer.connect(self.mailbox.qpn()).unwrap();
            (0..16).for_each(|id| self.post_receive(id));
            self.mailbox.connect(Some(self.peer.qpn().into())).unwrap();
        }

        fn post_receive(&self, id: u64) {
            let to = self.requests.sge(8 * id as usize, 8);
            self.peer.post_recv(&ReceiveRequest { id, to: &[to] }).unwrap();
        }

        /// Waits for `count` requests and returns their numbers.
        fn requests(&self, count: usize) -> Vec<u64> {
            let mut numbers = Vec::new();
            let mut batch = [Completion::EMPTY; 16];
            while numbers.len() < count {
                let n = self.received.poll(&mut batch);
                let is_request = |c: &&Completion| {
                    c.kind == CompletionKind::Receive && c.status == Status::Success
                };
                for c in batch[..n].iter().filter(is_request) {
                    numbers.push(self.requests.memory().load_be64(8 * c.id as usize));
                    self.post_receive(c.id);
                }
                thread::yield_now();
            }
            numbers
        }

        fn reply(&self, number: u64) {
            let op = Op::SendInline { data: &number.to_be_bytes() };
            self.peer.post_send(&[WorkRequest { id: 0, op, signaled: true }]).unwrap();
        }

        fn ask(&self) -> (u64, impl Future<Output = Result<[u8; 8], Error>> + Send + use<>) {
            let (mailbox, number) = (self.mailbox.clone(), self.mailbox.number());
            let ask = async move { mailbox.ask("asking", number, &number.to_be_bytes()).await };
            (number, ask)
        }
    }

    #[test]
    fn replies_in_reverse_order_reach_their_threads() {
        let bed = Bed::new();
        for _ in 0..100 {
            thread::scope(|scope| {
                let asking: Vec<_> = (0..REQUESTS)
                    .map(|_| {
                        let (number, ask) = bed.ask();
                        scope.spawn(move || (number, block_on(ask)))
                    })
                    .collect();
                let mut numbers = bed.requests(REQUESTS as usize);
                numbers.reverse();
                numbers.into_iter().for_each(|number| bed.reply(number));
                for thread in asking {
                    let (number, reply) = thread.join().unwrap();
                    assert_eq!(reply.unwrap(), number.to_be_bytes());
                }
            });
        }
    }

    struct Flag(std::sync::atomic::AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Release);
        }
    }

    /// A request whose reply arrives in the receive of another one, which was dropped, is woken.
    #[test]
    fn request_is_woken_after_another_one_was_dropped() {
        let bed = Bed::new();
        let (_, first) = bed.ask();
        let (number, second) = bed.ask();
        let (mut first, mut second) = (Box::pin(first), Box::pin(second));
        let flag = Arc::new(Flag(false.into()));
        let waker = Waker::from(flag.clone());
        assert!(second.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        // The dropped request was the last one to poll the oldest receive.
        assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(first);
        assert!(flag.0.swap(false, Ordering::AcqRel), "the other request watches the receive now");
        assert!(second.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(bed.requests(2).len(), 2);
        bed.reply(number);
        assert_eq!(block_on(second).unwrap(), number.to_be_bytes());
    }

    /// A reply after the time limit is kept for the owner of the mailbox.
    #[test]
    fn late_replies_are_kept_across_the_reset() {
        let bed = Bed::new();
        bed.mailbox.set_limit(Duration::from_secs(1), "the peer");
        bed.mailbox.set_peer_silent(true);
        let numbers = [(); 2].map(|()| {
            let (number, ask) = bed.ask();
            (number, thread::spawn(move || block_on(ask)))
        });
        let numbers = numbers.map(|(number, ask)| {
            let late = ask.join().unwrap();
            assert!(matches!(late, Err(Error::Unanswered { .. })), "{late:?}");
            number
        });
        assert!(bed.mailbox.is_late() && bed.mailbox.is_closed());
        assert_eq!(bed.requests(2).len(), 2);
        bed.reply(numbers[1]);
        bed.mailbox.reset().unwrap();
        assert_eq!(bed.mailbox.take_late(), [numbers[1].to_be_bytes()]);
        bed.connect();
        assert!(!bed.mailbox.is_late());
        bed.mailbox.set_peer_silent(false);
        let (number, ask) = bed.ask();
        let asking = thread::spawn(move || block_on(ask));
        assert_eq!(bed.requests(1), [number]);
        bed.reply(number);
        assert_eq!(asking.join().unwrap().unwrap(), number.to_be_bytes());
        assert_eq!(bed.mailbox.take_late(), [[0; 8]; 0]);
    }

    /// Requests of a broken connection fail, and the next connection has all receives.
    #[test]
    fn broken_connection_ends_its_requests_only() {
        let bed = Bed::new();
        for _ in 0..3 {
            let asking: Vec<_> = (0..REQUESTS)
                .map(|_| {
                    let (_, ask) = bed.ask();
                    thread::spawn(move || block_on(ask))
                })
                .collect();
            bed.requests(REQUESTS as usize);
            assert!(!bed.mailbox.has_lost_answers());
            bed.mailbox.break_off().unwrap();
            for thread in asking {
                let lost = thread.join().unwrap();
                assert!(matches!(lost, Err(Error::ManagementBroken { .. })), "{lost:?}");
            }
            assert!(bed.mailbox.has_lost_answers());
            bed.mailbox.reset().unwrap();
            let refused = block_on(bed.ask().1);
            assert!(matches!(refused, Err(Error::ManagementBroken { .. })), "{refused:?}");
            bed.connect();
            let (number, ask) = bed.ask();
            let asking = thread::spawn(move || block_on(ask));
            assert_eq!(bed.requests(1), [number]);
            // A reply to a request that does not exist is ignored.
            bed.reply(u64::MAX);
            let refused = asking.join().unwrap();
            assert!(refused.is_err(), "the receive of the request is used up");
            bed.mailbox.reset().unwrap();
            bed.connect();
        }
    }
}
