//! The state and the round of the NIC thread, which plays the hardware.
//!
//! A round takes jobs from the mailbox (control verbs), scans the doorbells, runs the engine, and
//! wakes threads that sleep on completions. After a while without work (`idle.rs`) the NIC thread
//! sleeps on the eventfds of its functions; then it uses no CPU. The loop, and the threads that may
//! also run the engine, are in `driver.rs`.
//!
//! A function's eventfd is shared with its client, which may misuse it. So the NIC thread never
//! reads the eventfd, but watches it edge-triggered: each write is one wake-up. The thread that
//! requests the function makes and closes the eventfd (`host.rs`), because the client controls how
//! long the closing of the last copy takes.

use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};

use super::super::control::{Reply, Verb};
use super::super::core::Core;
use super::super::error::Error;
use super::super::handshake::{may_sleep, must_wake_nic};
use super::super::roce::RoceSocket;
use super::doorbell_scanner::DoorbellScanner;
use super::page::{ASLEEP, ASLEEP_RNR, AWAKE, GONE, SLEEPING, WHERE, event_word, this_cpu};
use crate::engine::AckDelay;
use crate::limits::Limits;
use units::scheduling::{Granted, Scheduling};
use verbs::{DmaMemory, FunctionId, QpChange};

/// WQEs that the engine executes between two doorbell scans.
const BUDGET: usize = 64;
/// Bytes of packets after which a round sends although there is more to execute: one GSO send.
const SEND_BYTES: usize = 60 << 10;
/// Maximum such sends in a round of a waiting caller; then it reads the socket again.
const SENDS: u32 = 3;
/// Maximum engine polls before packets are sent.
const POLLS: u32 = 8;
/// Maximum rounds of callers for which ACKs are delayed.
const DELAY_ROUNDS: u32 = 8;
/// Busy rounds between two reads of the clock and of the yield requests: a few microseconds.
pub(super) const ROUNDS_PER_CLOCK: u32 = 16;

/// Yield requests of clients after which the NIC thread moves to another CPU.
const YIELD_REQUESTS_MAX: u32 = 32;
/// Minimum time between two such moves. If moving does not help (a hostile client can request
/// yields on every CPU), the time doubles with each move, up to `STAY_MAX`.
const STAY: Duration = Duration::from_millis(5);
const STAY_MAX: Duration = Duration::from_secs(5);

/// A job for the NIC thread.
pub(super) type Job = Box<dyn FnOnce(&mut NicThread) + Send>;

/// The state that the NIC thread shares with other threads of its process.
pub(super) struct Shared {
    mailbox: Mutex<Mailbox>,
    has_mail: AtomicBool,
    /// Like the word of the same name in a doorbell page.
    sleeping: AtomicU32,
    /// The eventfd by which this process wakes the NIC thread.
    wake: OwnedFd,
    /// The epoll instance on which the NIC thread sleeps.
    pub epoll: OwnedFd,
    /// Number of times that the NIC thread has gone to sleep.
    pub sleeps: AtomicU64,
}

struct Mailbox {
    /// `None` if the NIC thread has ended.
    jobs: Option<Vec<Job>>,
}

impl Shared {
    pub fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(Error::system("making an epoll instance"))?;
        let wake = eventfd()?;
        watch(&epoll, &wake)?;
        Ok(Self {
            mailbox: Mutex::new(Mailbox { jobs: Some(Vec::new()) }),
            has_mail: AtomicBool::new(false),
            sleeping: AtomicU32::new(AWAKE),
            wake,
            epoll,
            sleeps: AtomicU64::new(0),
        })
    }

    /// Puts a job into the mailbox and wakes the NIC thread if it sleeps. Returns false if the NIC
    /// thread has ended.
    pub fn submit(&self, job: Job) -> bool {
        match &mut self.mailbox.lock().jobs {
            None => return false,
            Some(jobs) => jobs.push(job),
        }
        self.has_mail.store(true, Ordering::Release);
        if must_wake_nic(&self.sleeping, ASLEEP) {
            self.wake_thread();
        }
        true
    }

    /// Whether there are jobs.
    pub fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// Wakes the NIC thread if it sleeps.
    pub fn wake_thread(&self) {
        // The write does not block. If the counter is full, a wake-up is already pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Sleeps until an event or the timeout.
    pub fn wait(&self, timeout: Option<Timespec>) {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        // The result does not matter: the loop scans everything in any case.
        let _ = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref());
    }

    /// Sleeps until an event, at least for `least` and at most for `most`. Within this range the
    /// kernel may merge the wake-up with another timer.
    pub fn wait_for(&self, least: Duration, most: Duration) {
        // Without timer slack the wake-up only costs more.
        let slack = |time| {
            let _ = rustix::thread::set_current_timer_slack(time);
        };
        slack(NonZero::new(most.saturating_sub(least).as_nanos() as u64));
        let mut ready = [PollFd::new(&self.epoll, PollFlags::IN)];
        let any = rustix::event::poll(&mut ready, Some(&timespec(least))).is_ok_and(|n| n > 0);
        slack(None);
        if any {
            self.wait(Some(timespec(Duration::ZERO)));
        }
    }

    /// Whether the NIC thread has not ended.
    pub fn is_alive(&self) -> bool {
        self.mailbox.lock().jobs.is_some()
    }
}

pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos() as i64 }
}

/// Makes a nonblocking eventfd that wakes the NIC thread.
pub(super) fn eventfd() -> Result<OwnedFd, Error> {
    use rustix::event::EventfdFlags;
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(Error::system("making an eventfd"))
}

/// Result of a caller's round.
#[derive(Clone, Copy)]
pub(super) struct RoundResult {
    /// Packets were received.
    pub received: bool,
    /// There was work.
    pub worked: bool,
}

/// The state of a NIC with a thread: the engine, the doorbells and the socket.
pub(super) struct NicThread {
    pub core: Core,
    pub stop: bool,
    shared: Arc<Shared>,
    scanners: Vec<DoorbellScanner>,
    /// The UDP socket for RoCEv2; readable data wakes the NIC thread.
    socket: Option<RoceSocket>,
    /// The epoll instance watches the socket.
    watched: bool,
    pub started: Instant,
    /// Rounds of callers since delayed ACKs were released.
    delayed_rounds: u32,
    /// The CPU of the NIC thread as announced in the doorbell pages: its number plus 1, or 0.
    cpu: u32,
    /// Yield requests since the last move to another CPU.
    yield_requests: u32,
    /// Time of the last move.
    moved_at: u64,
    /// Minimum time until the next move.
    min_stay: Duration,
    /// Scheduling of the NIC thread; ordinary until [`NicThread::prioritize`].
    pub scheduling: Scheduling,
}

impl NicThread {
    pub fn new(
        limits: Limits,
        shared: Arc<Shared>,
        wire: Option<RoceSocket>,
    ) -> Result<Self, Error> {
        if let Some(wire) = &wire {
            let flags = epoll::EventFlags::IN;
            epoll::add(&shared.epoll, wire, epoll::EventData::new_u64(0), flags)
                .map_err(Error::system("watching the UDP socket"))?;
        }
        Ok(Self {
            core: Core::new(limits),
            stop: false,
            shared,
            scanners: Vec::new(),
            watched: wire.is_some(),
            socket: wire,
            started: Instant::now(),
            delayed_rounds: 0,
            cpu: 0,
            yield_requests: 0,
            moved_at: 0,
            min_stay: STAY,
            scheduling: Scheduling::default(),
        })
    }

    /// Asks for a better scheduling of the calling thread, the NIC thread.
    pub fn prioritize(&mut self) -> Granted {
        self.scheduling = Scheduling::ask();
        self.scheduling.granted().clone()
    }

    /// Whether the NIC has functions besides the physical one, or a socket to other hosts.
    pub fn has_clients(&self) -> bool {
        self.scanners.len() > 1 || self.socket.is_some()
    }

    /// Yields the CPU at the time `now`, and returns the time when the thread runs again. `busy`:
    /// the NIC still has work.
    pub fn yield_cpu(&mut self, now: u64, busy: bool) -> u64 {
        rustix::thread::sched_yield();
        let back = self.now_ns();
        let away = Duration::from_nanos(back - now);
        for scanner in &mut self.scanners {
            scanner.after_yield(&mut self.core.engine, away, back, busy);
        }
        back
    }

    /// Announces the CPU of the NIC thread, and returns whether a client requests that the thread
    /// yields this CPU.
    ///
    /// After many requests the NIC thread moves to another CPU. The scheduler does not move it,
    /// because two threads that wait for each other do not look busy to load balancing, even if
    /// other CPUs are idle.
    #[inline]
    pub fn take_yield_requests(&mut self, now: u64) -> bool {
        let cpu = this_cpu();
        if cpu != self.cpu {
            self.cpu = cpu;
            for scanner in &self.scanners {
                scanner.page.word32(WHERE).store(cpu, Ordering::Relaxed);
            }
        }
        let mut any = false;
        for scanner in &mut self.scanners {
            any |= scanner.take_yield_request(cpu, now);
        }
        self.yield_requests += any as u32;
        if self.yield_requests >= YIELD_REQUESTS_MAX {
            let here = Duration::from_nanos(now - self.moved_at);
            if here >= self.min_stay {
                self.yield_requests = 0;
                self.moved_at = now;
                self.min_stay = stay_after(self.min_stay, here);
                move_to_another_cpu();
            }
        }
        any
    }

    /// Runs one round of the NIC thread. Returns true if there was work.
    #[inline]
    pub fn work(&mut self, now: u64) -> bool {
        let mail = self.shared.has_mail() && self.take_mail();
        for scanner in &mut self.scanners {
            scanner.scan(&mut self.core.engine);
        }
        if self.socket.is_some() {
            return self.work_roce(now) | mail;
        }
        let executed = self.core.engine.poll(now, BUDGET) > 0;
        let events = self.core.deliver_events();
        mail | executed | events
    }

    #[inline(never)]
    fn work_roce(&mut self, now: u64) -> bool {
        let busy = self.socket.as_ref().is_some_and(RoceSocket::is_busy);
        let now = if busy { self.now_ns() } else { now };
        let received = self.receive(now);
        let executed = self.execute_roce(now);
        let sent = self.send();
        let events = self.core.deliver_events();
        received | executed | sent | events
    }

    /// Runs the engine until there is no work, or until there is enough to send. Returns true if
    /// there was work.
    fn execute_roce(&mut self, now: u64) -> bool {
        for polls in 0..POLLS {
            if self.core.engine.poll(now, BUDGET) == 0 {
                return polls > 0;
            }
            if self.core.engine.outbox().bytes().len() >= SEND_BYTES {
                break;
            }
            for scanner in &mut self.scanners {
                scanner.scan(&mut self.core.engine);
            }
        }
        true
    }

    /// Number of packets that the kernel did not accept.
    pub fn unsent(&self) -> u64 {
        self.socket.as_ref().map_or(0, |socket| socket.unsent)
    }

    fn send(&mut self) -> bool {
        self.socket.as_mut().is_some_and(|socket| socket.send(self.core.engine.outbox()))
    }

    /// Runs a round on a caller's thread. `waits`: the caller waits for a completion; otherwise it
    /// has written a doorbell.
    ///
    /// ACKs are delayed until a round of a waiting caller in which no packet arrives, or for
    /// [`DELAY_ROUNDS`] rounds. In a request/response exchange they are piggybacked on one of the
    /// next requests.
    pub fn caller_round(&mut self, mut now: u64, waits: bool) -> RoundResult {
        for scanner in &mut self.scanners {
            scanner.scan_all(&mut self.core.engine);
        }
        self.core.engine.delay_acks(AckDelay::All);
        let received = waits && self.receive(now);
        let mut executed = self.execute_roce(now);
        for _ in 1..if waits { SENDS } else { 1 } {
            if self.core.engine.outbox().bytes().len() < SEND_BYTES {
                break;
            }
            self.send();
            now = self.now_ns();
            executed |= self.execute_roce(now);
        }
        self.delayed_rounds += 1;
        if waits && !received || self.delayed_rounds >= DELAY_ROUNDS {
            self.delayed_rounds = 0;
            if self.core.engine.delay_acks(AckDelay::Piggyback) {
                executed |= self.execute_roce(now);
            }
        }
        let sent = self.send();
        let mut events = false;
        while self.core.deliver_events() {
            events = true;
        }
        RoundResult { received, worked: received | executed | sent | events }
    }

    /// Reads packets from the socket into the engine. Returns true if there was any.
    #[inline(never)]
    fn receive(&mut self, now: u64) -> bool {
        let Self { socket, core, .. } = self;
        let Some(socket) = socket else { return false };
        socket.receive(now, &mut core.engine)
    }

    /// Executes the jobs in the mailbox. Returns true if there was any.
    #[cold]
    pub fn take_mail(&mut self) -> bool {
        self.shared.has_mail.store(false, Ordering::Relaxed);
        let jobs = self.shared.mailbox.lock().jobs.replace(Vec::new()).unwrap_or_default();
        let any = !jobs.is_empty();
        for job in jobs {
            job(self);
        }
        any
    }

    /// Announces that the NIC thread is about to sleep. Returns the time until the engine's next
    /// timeout (inner `None`: no timeout), or outer `None` if there is work and the thread must not
    /// sleep.
    #[cold]
    pub fn prepare_sleep(&mut self, now: u64) -> Option<Option<Timespec>> {
        if !self.watch_socket() {
            return None;
        }
        let level = self.sleep_level();
        // The NIC's half of the handshake in `page.rs`. Even a scan that executes nothing may block
        // a SEND on a receive. Then the announced level is too low: a client that posts the receive
        // would not wake the NIC.
        let has_work = |nic: &mut Self| {
            for scanner in &mut nic.scanners {
                scanner.scan_all(&mut nic.core.engine);
            }
            let any = nic.shared.has_mail.load(Ordering::Relaxed) || nic.work(now);
            any || nic.sleep_level() != level
        };
        if !may_sleep::<AtomicU32, _>(self, |nic| nic.announce(level), has_work) {
            self.announce(AWAKE);
            return None;
        }
        self.shared.sleeps.fetch_add(1, Ordering::Relaxed);
        let left = |at: u64| timespec(Duration::from_nanos(at.saturating_sub(now)));
        Some(self.core.engine.next_timeout().map(left))
    }

    /// The value of `sleeping` if the NIC thread sleeps now.
    fn sleep_level(&self) -> u32 {
        let engine = &self.core.engine;
        if engine.polls_receive_records() || engine.next_timeout().is_some() {
            ASLEEP_RNR
        } else {
            ASLEEP
        }
    }

    /// Announces that the NIC thread is awake.
    pub fn wake_up(&self) {
        self.announce(AWAKE);
    }

    /// Announces that callers run the engine. From now on doorbell writes and packets do not wake
    /// the NIC thread; control verbs do.
    #[cold]
    pub fn hand_to_callers(&mut self) {
        self.announce(AWAKE);
        self.shared.sleeping.store(ASLEEP, Ordering::SeqCst);
        self.cpu = 0;
        for scanner in &self.scanners {
            scanner.page.word32(WHERE).store(0, Ordering::Relaxed);
        }
        // Removed, not modified to no events: the kernel would still notify the epoll instance of
        // each packet.
        if let Some(socket) = self.socket.as_ref().filter(|_| self.watched) {
            self.watched = epoll::delete(&self.shared.epoll, socket).is_err();
        }
    }

    /// Announces that the NIC thread runs the engine again, and runs a full round.
    #[cold]
    pub fn take_from_callers(&mut self) {
        self.core.engine.delay_acks(AckDelay::None);
        self.announce(AWAKE);
        self.watch_socket();
        self.scan_everything();
    }

    /// Scans all doorbells and runs one round.
    #[cold]
    pub fn scan_everything(&mut self) {
        for scanner in &mut self.scanners {
            scanner.scan_all(&mut self.core.engine);
        }
        let now = self.now_ns();
        self.work(now);
    }

    /// Adds the socket to the epoll instance. Returns false if the system lacks the resources.
    fn watch_socket(&mut self) -> bool {
        if let Some(socket) = self.socket.as_ref().filter(|_| !self.watched) {
            let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
            self.watched = epoll::add(&self.shared.epoll, socket, data, flags).is_ok();
        }
        self.watched || self.socket.is_none()
    }

    /// Stops the NIC: drops all jobs, and announces the end to all clients.
    pub fn end(&mut self) {
        self.stop = true;
        let jobs = self.shared.mailbox.lock().jobs.take();
        drop(jobs);
        self.announce(GONE);
    }

    /// Stores the sleep state where this process and all clients see it.
    fn announce(&self, sleeping: u32) {
        self.shared.sleeping.store(sleeping, Ordering::Relaxed);
        for scanner in &self.scanners {
            scanner.page.word32(SLEEPING).store(sleeping, Ordering::Relaxed);
        }
    }

    /// Time since the NIC was started.
    pub fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Adds the doorbell page of `function`, with its event word.
    pub fn add_doorbells(&mut self, function: FunctionId, page: DmaMemory, slots: u32) {
        page.word32(WHERE).store(self.cpu, Ordering::Relaxed);
        self.core.watch_events(function, event_word(&page));
        self.scanners.push(DoorbellScanner::new(function, page, slots));
    }

    /// Removes a function with all its objects.
    pub fn remove_function(&mut self, function: FunctionId) {
        self.scanners.retain(|scanner| scanner.function != function);
        self.core.remove_function(function);
    }

    /// Executes a control verb, and updates the doorbell slots of queue pairs that it creates,
    /// resets or destroys.
    pub fn execute(&mut self, f: FunctionId, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        let has_doorbell =
            matches!(&verb, Verb::CreateQp(qp) if qp.send.as_ref().is_some_and(|s| !s.managed));
        let (reset, destroyed) = match verb {
            Verb::ModifyQp { qpn, change: QpChange::Reset } => (Some(qpn), None),
            Verb::DestroyQp { qpn } => (None, Some(qpn)),
            _ => (None, None),
        };
        let at =
            self.scanners.iter().position(|s| s.function == f).expect("a function's doorbells");
        let slot = match has_doorbell.then(|| self.scanners[at].free_slot()) {
            None => None,
            Some(Some(slot)) => Some(slot),
            Some(None) => {
                let limit = self.scanners[at].slots as u64;
                return Err(crate::error::Error::Limit { what: "doorbells", limit }.into());
            }
        };
        let mut reply = self.core.execute(f, verb)?;
        let scanner = &mut self.scanners[at];
        if let (Reply::Qp { qpn, doorbell }, Some(slot)) = (&mut reply, slot) {
            scanner.assign_slot(slot, *qpn);
            *doorbell = Some(slot);
        }
        if let Some(qpn) = reset {
            scanner.mark_seen(qpn);
        }
        if let Some(qpn) = destroyed {
            scanner.release(qpn);
        }
        Ok(reply)
    }
}

/// Minimum time on the next CPU, after `here` on the previous one, where the minimum was `stay`.
fn stay_after(stay: Duration, here: Duration) -> Duration {
    // A move soon after the minimum means that the previous move did not help.
    if here < stay * 4 { (stay * 2).min(STAY_MAX) } else { STAY }
}

/// Moves the calling thread to another CPU of its affinity mask, if there is one.
#[cold]
fn move_to_another_cpu() {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return };
    let mut others = allowed;
    others.unset(rustix::thread::sched_getcpu());
    if others.count() > 0 && rustix::thread::sched_setaffinity(None, &others).is_ok() {
        // The thread has moved: restore the mask, so that the scheduler may move it as before.
        let _ = rustix::thread::sched_setaffinity(None, &allowed);
    }
}

/// Adds an eventfd or a timer to an epoll instance, edge-triggered.
pub(super) fn watch(epoll: &OwnedFd, fd: &OwnedFd) -> Result<(), Error> {
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(epoll, fd, epoll::EventData::new_u64(0), flags)
        .map_err(Error::system("watching an eventfd"))
}

#[cfg(test)]
#[path = "nic_thread_tests.rs"]
mod tests;
