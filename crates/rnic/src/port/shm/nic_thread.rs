//! The NIC thread: the hardware.
//!
//! It looks at its mailbox (control verbs) and at the doorbells, lets the engine execute, wakes who
//! sleeps on a completion, and starts over. When nothing has happened for a while it sleeps on the
//! eventfds of its functions; then it takes no CPU at all. `seat.rs` has that loop, and says who else may run
//! the NIC.
//!
//! A function's eventfd is shared with its client, which may do with it what it likes. The NIC thread
//! never reads it: it is watched edge-triggered, so that each write to it is one wake-up. The thread
//! that asks for the function makes and closes it (`host.rs`), since the client decides how long the
//! closing of the last copy takes.

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
use super::super::roce::Wire;
use super::bells::Bells;
use super::doorbell::{ASLEEP, ASLEEP_RNR, AWAKE, GONE, SLEEPING, WHERE, event_word, this_cpu};
use crate::engine::Hold;
use crate::ids::FunctionId;
use crate::memory::DmaMemory;
use crate::verbs::{Limits, QpChange};

/// WQEs that the engine executes between two looks at the doorbells.
const BUDGET: usize = 64;
/// Bytes of packets that are sent together where there is more to execute: what one send with segmentation takes.
const SEND_BYTES: usize = 60 << 10;
/// Such sends in a turn of a caller who waits: what comes meanwhile is looked for after them.
const SENDS: u32 = 3;
/// Times that the engine executes before packets are sent at the latest.
const POLLS: u32 = 8;
/// Turns of callers for which acknowledgements wait at most.
const HELD_TURNS: u32 = 8;
/// After this long without work the thread offers its CPU to others between two looks.
pub(super) const SPIN: Duration = Duration::from_micros(2);
/// After this long without work it goes to sleep.
pub(super) const SLEEP_AFTER: Duration = Duration::from_micros(100);
/// Busy rounds between two looks at the clock, and at who waits on the NIC's CPU: a few microseconds.
pub(super) const ROUNDS_PER_CLOCK: u32 = 16;

/// The thread leaves its CPU after it has shared it with waiting clients so often...
const CROWDED_MAX: u32 = 32;
/// ... and has not left one for this long. Where leaving does not help (a client that says it waits
/// wherever the NIC is), it stays twice as long each time, up to `STAY_MAX`.
const STAY: Duration = Duration::from_millis(5);
const STAY_MAX: Duration = Duration::from_secs(5);

/// Work for the NIC thread.
pub(super) type Job = Box<dyn FnOnce(&mut NicThread) + Send>;

/// What the NIC thread shares with its process.
pub(super) struct Shared {
    mailbox: Mutex<Mailbox>,
    has_mail: AtomicBool,
    /// Like the word of the same name in a doorbell page.
    sleeping: AtomicU32,
    wake: OwnedFd,
    /// What wakes the thread.
    pub epoll: OwnedFd,
    /// Times the thread has gone to sleep.
    pub sleeps: AtomicU64,
}

struct Mailbox {
    /// `None`: the thread has ended.
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

    /// Puts a job into the mailbox and wakes the thread if it sleeps. False if it has ended.
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

    /// True if there are jobs.
    pub fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// Wakes the thread, if it sleeps.
    pub fn wake_thread(&self) {
        // It does not block; if its counter is full, the thread is woken already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Sleeps until something wakes the thread, or this time is over.
    pub fn wait(&self, timeout: Option<Timespec>) {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        // Interrupted or failed: the loop looks at everything again in any case.
        let _ = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref());
    }

    /// Sleeps until something wakes the thread, or for `least`, or up to `most` where the system can do that together
    /// with something else.
    pub fn wait_for(&self, least: Duration, most: Duration) {
        // Without it the look costs more, that is all.
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

    pub fn is_alive(&self) -> bool {
        self.mailbox.lock().jobs.is_some()
    }
}

pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos() as i64 }
}

/// A descriptor that wakes the NIC thread.
pub(super) fn eventfd() -> Result<OwnedFd, Error> {
    use rustix::event::EventfdFlags;
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(Error::system("making an eventfd"))
}

/// What came of a turn of a caller.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    /// Packets.
    pub received: bool,
    /// There was anything to do.
    pub worked: bool,
}

/// The thread's state.
pub(super) struct NicThread {
    pub core: Core,
    pub stop: bool,
    shared: Arc<Shared>,
    doorbells: Vec<Bells>,
    /// The way to other hosts; what comes wakes the thread.
    wire: Option<Wire>,
    watched: bool,
    pub started: Instant,
    /// Turns of callers since acknowledgements were let go.
    held: u32,
    /// The CPU that it runs on, as the doorbell pages have it.
    cpu: u32,
    /// How often a client waited on the NIC's own CPU since the NIC left one for that.
    crowded: u32,
    left_at: u64,
    stay: Duration,
}

impl NicThread {
    pub fn new(limits: Limits, shared: Arc<Shared>, wire: Option<Wire>) -> Result<Self, Error> {
        if let Some(wire) = &wire {
            let flags = epoll::EventFlags::IN;
            epoll::add(&shared.epoll, wire, epoll::EventData::new_u64(0), flags)
                .map_err(Error::system("watching the UDP socket"))?;
        }
        Ok(Self {
            core: Core::new(limits),
            stop: false,
            shared,
            doorbells: Vec::new(),
            watched: wire.is_some(),
            wire,
            started: Instant::now(),
            held: 0,
            cpu: 0,
            crowded: 0,
            left_at: 0,
            stay: STAY,
        })
    }

    /// Leaves its CPU to others, since `now`, with or without work of its own left; gives the time when it has it again.
    pub fn yield_cpu(&mut self, now: u64, busy: bool) -> u64 {
        rustix::thread::sched_yield();
        let back = self.now_ns();
        let away = Duration::from_nanos(back - now);
        for bells in &mut self.doorbells {
            bells.judge(&mut self.core.engine, away, back, busy);
        }
        back
    }

    /// Whether a client waits on this CPU. Says first which one that is. Where that goes on, the
    /// thread looks for another one: two that wait for each other do not look busy to the
    /// scheduler's balancing, however many CPUs are idle.
    #[inline]
    pub fn is_waited_for_here(&mut self, now: u64) -> bool {
        let cpu = this_cpu();
        if cpu != self.cpu {
            self.cpu = cpu;
            for bells in &self.doorbells {
                bells.page.word32(WHERE).store(cpu, Ordering::Relaxed);
            }
        }
        let mut any = false;
        for bells in &mut self.doorbells {
            any |= bells.waits_on(cpu, now);
        }
        self.crowded += any as u32;
        if self.crowded >= CROWDED_MAX {
            let here = Duration::from_nanos(now - self.left_at);
            if here >= self.stay {
                self.crowded = 0;
                self.left_at = now;
                self.stay = stay_after(self.stay, here);
                leave_cpu();
            }
        }
        any
    }

    /// One look at everything; true if there was anything to do.
    #[inline]
    pub fn work(&mut self, now: u64) -> bool {
        let mail = self.shared.has_mail() && self.take_mail();
        for bells in &mut self.doorbells {
            bells.scan(&mut self.core.engine);
        }
        if self.wire.is_some() {
            return self.work_wired(now) | mail;
        }
        let executed = self.core.engine.poll(now, BUDGET) > 0;
        let events = self.core.deliver_events();
        mail | executed | events
    }

    #[inline(never)]
    fn work_wired(&mut self, now: u64) -> bool {
        let busy = self.wire.as_ref().is_some_and(Wire::is_busy);
        let now = if busy { self.now_ns() } else { now };
        let received = self.receive(now);
        let executed = self.execute_wired(now);
        let sent = self.send();
        let events = self.core.deliver_events();
        received | executed | sent | events
    }

    /// Lets the engine execute until there is nothing left, or enough to be sent.
    fn execute_wired(&mut self, now: u64) -> bool {
        for polls in 0..POLLS {
            if self.core.engine.poll(now, BUDGET) == 0 {
                return polls > 0;
            }
            if self.core.engine.outbox().bytes().len() >= SEND_BYTES {
                break;
            }
            for bells in &mut self.doorbells {
                bells.scan(&mut self.core.engine);
            }
        }
        true
    }

    /// Packets that the kernel did not take.
    pub fn unsent(&self) -> u64 {
        self.wire.as_ref().map_or(0, |wire| wire.unsent)
    }

    fn send(&mut self) -> bool {
        self.wire.as_mut().is_some_and(|wire| wire.send(self.core.engine.outbox()))
    }

    /// A turn of a thread that uses the NIC: one that waits, or one that has rung a doorbell. What it has been sent is
    /// acknowledged when nobody has anything else to do: in the first turn of who waits in which nothing comes, or after a
    /// few turns if there is none; in a dialogue, with one of the next requests.
    pub fn caller_turn(&mut self, mut now: u64, waits: bool) -> Turn {
        for bells in &mut self.doorbells {
            bells.scan_all(&mut self.core.engine);
        }
        self.core.engine.hold_acks(Hold::All);
        let received = waits && self.receive(now);
        let mut executed = self.execute_wired(now);
        for _ in 1..if waits { SENDS } else { 1 } {
            if self.core.engine.outbox().bytes().len() < SEND_BYTES {
                break;
            }
            self.send();
            now = self.now_ns();
            executed |= self.execute_wired(now);
        }
        self.held += 1;
        if waits && !received || self.held >= HELD_TURNS {
            self.held = 0;
            if self.core.engine.hold_acks(Hold::Dialogues) {
                executed |= self.execute_wired(now);
            }
        }
        let sent = self.send();
        let mut events = false;
        while self.core.deliver_events() {
            events = true;
        }
        Turn { received, worked: received | executed | sent | events }
    }

    /// Takes in what other hosts have sent.
    #[inline(never)]
    fn receive(&mut self, now: u64) -> bool {
        let Self { wire, core, .. } = self;
        let Some(wire) = wire else { return false };
        wire.receive(now, &mut core.engine)
    }

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

    /// Says that the thread will sleep until a doorbell, mail, or the engine's next timeout, which is in so much
    /// time. Outer `None`: there is something to do.
    #[cold]
    pub fn fall_asleep(&mut self, now: u64) -> Option<Option<Timespec>> {
        if !self.watch_wire() {
            return None;
        }
        let depth = self.depth_of_sleep();
        // The other half of the pair described in `doorbell.rs`. What executes nothing may still wait for
        // something from then on: a SEND for a receive, which nobody would wake the NIC for who saw `depth`.
        let look = |nic: &mut Self| {
            for bells in &mut nic.doorbells {
                bells.scan_all(&mut nic.core.engine);
            }
            let any = nic.shared.has_mail.load(Ordering::Relaxed) || nic.work(now);
            any || nic.depth_of_sleep() != depth
        };
        if !may_sleep::<AtomicU32, _>(self, |nic| nic.announce(depth), look) {
            self.announce(AWAKE);
            return None;
        }
        self.shared.sleeps.fetch_add(1, Ordering::Relaxed);
        let left = |at: u64| timespec(Duration::from_nanos(at.saturating_sub(now)));
        Some(self.core.engine.next_timeout().map(left))
    }

    /// What `sleeping` says if the thread sleeps now.
    fn depth_of_sleep(&self) -> u32 {
        let engine = &self.core.engine;
        if engine.minds_receives() || engine.next_timeout().is_some() { ASLEEP_RNR } else { ASLEEP }
    }

    /// Says that the thread is awake.
    pub fn wake_up(&self) {
        self.announce(AWAKE);
    }

    /// Says that callers run the NIC: they need not wake the thread, packets neither; verbs must.
    #[cold]
    pub fn leave_to_callers(&mut self) {
        self.announce(AWAKE);
        self.shared.sleeping.store(ASLEEP, Ordering::SeqCst);
        self.cpu = 0;
        for bells in &self.doorbells {
            bells.page.word32(WHERE).store(0, Ordering::Relaxed);
        }
        // Not only without flags: then the kernel would still tell the instance of each packet.
        if let Some(wire) = self.wire.as_ref().filter(|_| self.watched) {
            self.watched = epoll::delete(&self.shared.epoll, wire).is_err();
        }
    }

    /// The thread runs the NIC again.
    #[cold]
    pub fn take_back(&mut self) {
        self.core.engine.hold_acks(Hold::None);
        self.announce(AWAKE);
        self.watch_wire();
        self.look_at_all();
    }

    /// One look at all doorbells and everything else.
    #[cold]
    pub fn look_at_all(&mut self) {
        for bells in &mut self.doorbells {
            bells.scan_all(&mut self.core.engine);
        }
        let now = self.now_ns();
        self.work(now);
    }

    /// Has the socket wake the thread; false if the system has no room for that.
    fn watch_wire(&mut self) -> bool {
        if let Some(wire) = self.wire.as_ref().filter(|_| !self.watched) {
            let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
            self.watched = epoll::add(&self.shared.epoll, wire, data, flags).is_ok();
        }
        self.watched || self.wire.is_none()
    }

    /// The thread ends, whatever the reason: who waits for it must learn it.
    pub fn end(&mut self) {
        self.stop = true;
        let jobs = self.shared.mailbox.lock().jobs.take();
        drop(jobs);
        self.announce(GONE);
    }

    fn announce(&self, sleeping: u32) {
        self.shared.sleeping.store(sleeping, Ordering::Relaxed);
        for bells in &self.doorbells {
            bells.page.word32(SLEEPING).store(sleeping, Ordering::Relaxed);
        }
    }

    pub fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Looks at the doorbells of `function` from now on.
    pub fn add_doorbells(&mut self, function: FunctionId, page: DmaMemory, slots: u32) {
        page.word32(WHERE).store(self.cpu, Ordering::Relaxed);
        self.core.watch_events(function, event_word(&page));
        self.doorbells.push(Bells::new(function, page, slots));
    }

    /// Removes a function with all that it has.
    pub fn remove_function(&mut self, function: FunctionId) {
        self.doorbells.retain(|bells| bells.function != function);
        self.core.remove_function(function);
    }

    /// Executes a control verb, and minds the doorbells of the queue pairs that it makes, resets or
    /// ends.
    pub fn execute(&mut self, f: FunctionId, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        let rings =
            matches!(&verb, Verb::CreateQp(qp) if qp.send.as_ref().is_some_and(|s| !s.managed));
        let (reset, destroyed) = match verb {
            Verb::ModifyQp { qpn, change: QpChange::Reset } => (Some(qpn), None),
            Verb::DestroyQp { qpn } => (None, Some(qpn)),
            _ => (None, None),
        };
        let at =
            self.doorbells.iter().position(|b| b.function == f).expect("a function's doorbells");
        let slot = match rings.then(|| self.doorbells[at].free_slot()) {
            None => None,
            Some(Some(slot)) => Some(slot),
            Some(None) => {
                let limit = self.doorbells[at].slots as u64;
                return Err(crate::error::Error::Limit { what: "doorbells", limit }.into());
            }
        };
        let mut reply = self.core.execute(f, verb)?;
        let bells = &mut self.doorbells[at];
        if let (Reply::Qp { qpn, doorbell }, Some(slot)) = (&mut reply, slot) {
            bells.take_slot(slot, *qpn);
            *doorbell = Some(slot);
        }
        if let Some(qpn) = reset {
            bells.ignore_past(qpn);
        }
        if let Some(qpn) = destroyed {
            bells.release(qpn);
        }
        Ok(reply)
    }
}

/// How long the thread stays on its next CPU, when it leaves one after `here` on which it wanted to stay
/// for `stay`.
fn stay_after(stay: Duration, here: Duration) -> Duration {
    // It was crowded all the while, or it had peace for a time.
    if here < stay * 4 { (stay * 2).min(STAY_MAX) } else { STAY }
}

/// Moves the calling thread to another of the CPUs that it may run on, if there is one.
#[cold]
fn leave_cpu() {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return };
    let mut others = allowed;
    others.unset(rustix::thread::sched_getcpu());
    if others.count() > 0 && rustix::thread::sched_setaffinity(None, &others).is_ok() {
        // It is elsewhere now; the scheduler may move it as before.
        let _ = rustix::thread::sched_setaffinity(None, &allowed);
    }
}

pub(super) fn watch(epoll: &OwnedFd, fd: &OwnedFd) -> Result<(), Error> {
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(epoll, fd, epoll::EventData::new_u64(0), flags)
        .map_err(Error::system("watching an eventfd"))
}

#[cfg(test)]
#[path = "nic_thread_tests.rs"]
mod tests;
