//! Arbitration of the thread that runs the engine: the NIC thread or a calling thread.
//!
//! A caller that waits for a completion has no other work, and the NIC thread would need a second
//! CPU. On a NIC that its process started for its own use, callers may therefore run the engine, as
//! on the inline port: a caller's *round* reads the socket, executes WQEs and sends packets. This
//! saves two thread switches for each message.
//!
//! ```text
//!               a caller waits                    no round for a while,
//!   NIC thread ───────────────────> callers ─────  or a caller sleeps ────────> NIC thread
//!     │ no work                        ^
//!     v                                │ a caller writes a doorbell or waits
//!   asleep ────────────────────────────┘
//! ```
//!
//! - The holder of the lock runs the engine. The NIC thread releases the lock only while it sleeps.
//! - While callers run the engine, the NIC thread sleeps. It wakes periodically to answer control
//!   verbs and to check that callers still run the engine; if not, it takes the engine back. So a
//!   packet that arrives while the callers compute waits for at most one check interval. A check
//!   takes a CPU from a caller. So the interval grows from [`ABSENT`] to [`CHECK_MAX`] while
//!   callers run the engine, and so does the timer slack, with which the kernel can merge the check
//!   with a scheduler tick. A late check may cause one retransmission by another NIC.
//! - A doorbell write also runs a round, so that a first message, or the reply to a message that
//!   has just arrived, leaves at once. If the NIC expects answers from peers and a caller has just
//!   run a round, the next round executes the WQEs, and sends several packets in one batch.
//! - ACKs to the peers are delayed until the first round in which no packet arrives, or for a few
//!   rounds: the caller has just received a completion, and its reply is more urgent. After several
//!   replies in succession an ACK is delayed further and leaves in one send with the next reply,
//!   because the kernel needs less time for two segments in one send than for two sends.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::mm::Advice;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use super::super::error::Error;
use super::idle::{IdlePolicy, Situation, Step};
use super::nic_thread::{NicThread, ROUNDS_PER_CLOCK, RoundResult, Shared, timespec, watch};
use units::cpus::has_one_cpu;
use units::scheduling::RunQueue;
use verbs::DmaMemory;

/// Time without a caller's round after which the NIC thread takes the engine back.
const ABSENT: Duration = Duration::from_micros(200);
/// The longest check interval: shorter than the shortest retransmission timeout of other NICs.
const CHECK_MAX: Duration = Duration::from_micros(800);
/// A check may be late by 1/`SLACK_PART` of the time for which callers have run the engine, at most
/// by `SLACK_MAX`, the tick of most schedulers. Because a separate timer interrupt takes up to 55
/// us of a caller's CPU in a virtual machine (including cache misses), and a check in an interrupt
/// that happens anyway takes a few.
const SLACK_PART: u32 = 8;
const SLACK_MAX: Duration = Duration::from_millis(4);
/// A caller that ran a round less than this time ago is expected to run another one soon.
const NEAR_NS: u64 = 20_000;

/// A waiting caller does not sleep if a caller's round had work less than this time ago.
const BUSY_NS: u64 = 60_000;
/// Consecutive rounds without work after which a waiting caller yields its CPU, which the peer's
/// process may need.
const YIELD_AFTER: u32 = 12;
/// The same after yields that found no other thread to run.
const YIELD_AFTER_MAX: u32 = 48;
/// A yield shorter than this found no other thread to run.
const UNCONTENDED_NS: u64 = 2_000;

/// Arbitrates which thread runs the engine: the NIC thread or a calling thread.
pub(super) struct EngineDriver {
    nic: Mutex<NicThread>,
    shared: Arc<Shared>,
    started: Instant,
    /// A word that is 0 in a forked child. The child has a copy of this structure, but must not use
    /// the socket of its parent.
    own_process: DmaMemory,
    /// Wakes the NIC thread for its first check after a caller has taken the engine over. `None` if
    /// only the NIC thread may run the engine.
    timer: Option<OwnedFd>,
    /// Callers run the engine. Changes under the lock.
    callers_drive: AtomicBool,
    /// A caller asks the running NIC thread for the engine.
    requested: AtomicBool,
    /// A caller is about to sleep: the NIC thread must take the engine back.
    released: AtomicBool,
    /// A doorbell was written while another thread held the lock: scan again.
    rescan: AtomicBool,
    /// The last round received packets: the next posted WQE may be a reply.
    received: AtomicBool,
    /// Consecutive rounds of waiting callers without work.
    idle_rounds: AtomicU32,
    /// Number of such rounds after which the CPU is yielded.
    yield_after: AtomicU32,
    /// Time of the last round, in ns since `started`.
    last_round_ns: AtomicU64,
    /// Time of the last round with work, in ns since `started`.
    last_work_ns: AtomicU64,
    /// After the last round, QPs were waiting for answers of other NICs.
    awaits_answers: AtomicBool,
}

/// Ends the engine when the NIC thread ends, also by a panic.
struct End<'a>(&'a EngineDriver);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.nic.lock().end();
    }
}

impl EngineDriver {
    /// Makes a driver. `callers`: calling threads may run the engine.
    pub fn new(nic: NicThread, shared: Arc<Shared>, callers: bool) -> Result<Self, Error> {
        let timer = callers.then(|| timer(&shared)).transpose()?;
        Ok(Self {
            started: nic.started,
            own_process: wiped_on_fork()?,
            nic: Mutex::new(nic),
            shared,
            timer,
            callers_drive: AtomicBool::new(false),
            requested: AtomicBool::new(false),
            released: AtomicBool::new(false),
            rescan: AtomicBool::new(false),
            received: AtomicBool::new(false),
            idle_rounds: AtomicU32::new(0),
            yield_after: AtomicU32::new(YIELD_AFTER),
            last_round_ns: AtomicU64::new(0),
            last_work_ns: AtomicU64::new(0),
            awaits_answers: AtomicBool::new(false),
        })
    }

    /// Whether calling threads may run the engine.
    pub fn is_shared(&self) -> bool {
        self.timer.is_some()
    }

    // --- NIC thread ------------------------------------------------------------------------------

    /// The main loop of the NIC thread: runs the engine until a job sets `stop`.
    pub fn run(&self) {
        let _end = End(self);
        let mut nic = self.nic.lock();
        let (mut policy, run_queue) = (IdlePolicy::default(), RunQueue::open());
        let mut idle_since = None;
        let mut now = 0;
        let mut rounds = 0;
        let mut one_cpu = has_one_cpu();
        while !nic.stop {
            if self.requested.load(Ordering::Relaxed) {
                self.release(&mut nic);
                (idle_since, now) = (None, nic.now_ns());
                continue;
            }
            if nic.work(now) {
                policy.worked(|| nic.now_ns());
                idle_since = None;
                rounds += 1;
                if rounds % ROUNDS_PER_CLOCK == 0 {
                    now = nic.now_ns();
                    if nic.scheduling.is_real_time()
                        && policy.must_step_down(now, || run_queue.is_long())
                    {
                        nic.scheduling.step_down();
                    }
                    // A client on this CPU would not see its completion until the scheduler
                    // preempts this thread.
                    if nic.take_yield_requests(now) {
                        nic.scheduling.step_down();
                        now = nic.yield_cpu(now, true);
                    }
                }
                continue;
            }
            now = nic.now_ns();
            let situation = Situation {
                now,
                since: *idle_since.get_or_insert(now),
                has_clients: nic.has_clients(),
                must_yield: nic.take_yield_requests(now) || one_cpu,
                real_time: nic.scheduling.is_real_time(),
            };
            match policy.step(situation, || run_queue.is_long()) {
                Step::Poll => {}
                Step::Yield => {
                    let before = now;
                    now = nic.yield_cpu(now, false);
                    policy.yielded(Duration::from_nanos(now - before), now);
                }
                Step::Sleep => {
                    nic.scheduling.step_up();
                    self.sleep(&mut nic, now);
                    one_cpu = has_one_cpu();
                    idle_since = None;
                    now = nic.now_ns();
                    policy.slept(now);
                }
            }
        }
    }

    /// Sleeps until there is work. Callers may take the engine over meanwhile.
    #[cold]
    fn sleep(&self, nic: &mut MutexGuard<'_, NicThread>, now: u64) {
        self.requested.store(false, Ordering::Relaxed);
        let Some(timeout) = nic.prepare_sleep(now) else { return };
        MutexGuard::unlocked(nic, || self.shared.wait(timeout));
        if self.callers_drive.load(Ordering::Relaxed) {
            self.stand_by(nic);
        } else {
            nic.wake_up();
        }
    }

    /// Hands the engine to callers, and returns when the NIC thread has it again.
    #[cold]
    fn release(&self, nic: &mut MutexGuard<'_, NicThread>) {
        self.requested.store(false, Ordering::Relaxed);
        self.hand_over(nic);
        // A caller that wrote its doorbell before it could see `callers_drive` relies on this scan:
        // see `handshake.rs`.
        fence(Ordering::SeqCst);
        nic.scan_everything();
        self.stand_by(nic);
    }

    /// Marks the engine as run by callers.
    fn hand_over(&self, nic: &mut NicThread) {
        nic.hand_to_callers();
        self.callers_drive.store(true, Ordering::SeqCst);
    }

    /// Arms the timer that wakes the NIC thread after `time`. A timer, because the timeouts of
    /// `epoll_wait` are in milliseconds.
    fn arm_timer(&self, time: Duration) {
        if let Some(timer) = &self.timer {
            let it_interval = timespec(Duration::ZERO);
            let value = Itimerspec { it_interval, it_value: timespec(time) };
            // The call fails for invalid arguments only.
            let _ = rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &value);
        }
    }

    /// Sleeps while callers run the engine, then takes the engine back.
    fn stand_by(&self, nic: &mut MutexGuard<'_, NicThread>) {
        let (began, mut next) = (self.now_ns(), ABSENT);
        // Pairs with the fence in `before_sleep`.
        fence(Ordering::SeqCst);
        while !nic.stop && !self.released.swap(false, Ordering::SeqCst) {
            // The check is made without the lock, so that it does not delay callers.
            MutexGuard::unlocked(nic, || {
                loop {
                    let ran = Duration::from_nanos(self.now_ns().saturating_sub(began));
                    self.shared.wait_for(next, next + slack_after(ran));
                    next = CHECK_MAX.min(2 * next);
                    let released = self.released.load(Ordering::SeqCst);
                    if released || self.shared.has_mail() || self.is_absent() {
                        break;
                    }
                }
            });
            if nic.take_mail() {
                nic.scan_everything();
            }
            if self.is_absent() {
                break;
            }
        }
        self.callers_drive.store(false, Ordering::SeqCst);
        if !nic.stop {
            nic.take_from_callers();
        }
    }

    // --- callers -------------------------------------------------------------------------------

    /// Runs a round for a caller that waits for a completion. Returns true if there was work.
    pub fn poll_engine(&self) -> bool {
        if self.timer.is_none() || !self.is_own_process() {
            return false;
        }
        let Some(mut nic) = self.nic.try_lock() else {
            if !self.callers_drive.load(Ordering::Relaxed) {
                self.released.store(false, Ordering::Relaxed);
                self.requested.store(true, Ordering::Relaxed);
            }
            return false;
        };
        let did = self.run_round(&mut nic, true);
        drop(nic);
        let idle = if did { 0 } else { self.idle_rounds.load(Ordering::Relaxed).saturating_add(1) };
        self.idle_rounds.store(idle, Ordering::Relaxed);
        if idle > self.yield_after.load(Ordering::Relaxed) {
            self.offer_cpu();
        }
        did
    }

    fn offer_cpu(&self) {
        let before = self.now_ns();
        rustix::thread::sched_yield();
        let away = self.now_ns().saturating_sub(before);
        let yield_after = match away {
            ..UNCONTENDED_NS => YIELD_AFTER_MAX.min(2 * self.yield_after.load(Ordering::Relaxed)),
            _ => YIELD_AFTER,
        };
        self.yield_after.store(yield_after, Ordering::Relaxed);
    }

    /// Runs a round for a caller that is about to sleep. Returns true if there was work lately, so
    /// that the caller should keep polling.
    pub fn poll_engine_before_sleep(&self) -> bool {
        self.poll_engine();
        let quiet_ns = self.now_ns().saturating_sub(self.last_work_ns.load(Ordering::Relaxed));
        self.callers_drive.load(Ordering::Relaxed) && quiet_ns < BUSY_NS
    }

    /// Called after a doorbell write: runs a round, or leaves the doorbell to the thread that runs
    /// the engine. Returns false if the caller must wake the NIC thread. `asleep`: whether the NIC
    /// sleeps.
    pub fn on_doorbell(&self, asleep: impl FnOnce() -> bool) -> bool {
        fence(Ordering::SeqCst);
        if !self.is_own_process() {
            return true;
        }
        if self.callers_drive.load(Ordering::Relaxed) {
            let may_answer = self.received.load(Ordering::Relaxed);
            if !may_answer
                && self.awaits_answers.load(Ordering::Relaxed)
                && self.since_last_round() < NEAR_NS
            {
                return true;
            }
            // If another caller holds the lock, it scans again; if the NIC thread does, it is
            // taking the engine back, and scans then.
            self.doorbell_round();
            return true;
        }
        !asleep() || self.doorbell_round()
    }

    fn is_own_process(&self) -> bool {
        self.own_process.word32(0).load(Ordering::Relaxed) != 0
    }

    /// Runs a round for a caller that has written a doorbell. Returns false if another thread holds
    /// the lock; a caller that holds it then scans again.
    fn doorbell_round(&self) -> bool {
        loop {
            let Some(mut nic) = self.nic.try_lock() else {
                self.rescan.store(true, Ordering::SeqCst);
                if self.nic.is_locked() {
                    return false;
                }
                continue;
            };
            self.rescan.store(false, Ordering::SeqCst);
            self.run_round(&mut nic, false);
            drop(nic);
            fence(Ordering::SeqCst);
            if !self.rescan.load(Ordering::SeqCst) {
                return true;
            }
        }
    }

    fn run_round(&self, nic: &mut NicThread, waits: bool) -> bool {
        if nic.stop {
            return false;
        }
        if !self.callers_drive.load(Ordering::Relaxed) {
            // The lock is free, so the NIC thread sleeps.
            self.arm_timer(ABSENT);
            self.hand_over(nic);
        }
        let guard = Unwinding(&mut *nic);
        let now = guard.0.now_ns();
        let RoundResult { received, worked } = guard.0.caller_round(now, waits);
        let awaits = guard.0.core.engine.awaits_answers();
        std::mem::forget(guard);
        self.awaits_answers.store(awaits, Ordering::Relaxed);
        self.received.store(received, Ordering::Relaxed);
        self.last_round_ns.store(now, Ordering::Relaxed);
        if worked {
            self.last_work_ns.store(now, Ordering::Relaxed);
        }
        worked
    }

    /// Whether no caller has run a round for [`ABSENT`].
    fn is_absent(&self) -> bool {
        self.since_last_round() >= ABSENT.as_nanos() as u64
    }

    fn since_last_round(&self) -> u64 {
        self.now_ns().saturating_sub(self.last_round_ns.load(Ordering::Relaxed))
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Called by a caller before it sleeps until a completion: the NIC thread takes the engine
    /// back.
    pub fn before_sleep(&self) {
        if self.timer.is_none() {
            return;
        }
        // Withdraw a request for the engine that the NIC thread has not granted yet.
        self.requested.store(false, Ordering::Relaxed);
        self.released.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.callers_drive.load(Ordering::Relaxed) {
            self.shared.wake_thread();
        }
    }
}

/// Timer slack of a check after callers have run the engine for `ran`.
fn slack_after(ran: Duration) -> Duration {
    SLACK_MAX.min(ran / SLACK_PART)
}

/// Stops the NIC if a caller's round panics, because the engine's state is then inconsistent.
struct Unwinding<'a>(&'a mut NicThread);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        self.0.stop = true;
    }
}

/// Allocates memory whose first word is 1 in this process and 0 in forked children.
fn wiped_on_fork() -> Result<DmaMemory, Error> {
    let memory = DmaMemory::anonymous(4).map_err(Error::system("mapping memory"))?;
    // SAFETY: the advice changes no contents of what is mapped.
    unsafe { rustix::mm::madvise(memory.as_ptr().cast(), memory.len(), Advice::LinuxWipeOnFork) }
        .map_err(Error::system("having memory wiped on fork"))?;
    memory.word32(0).store(1, Ordering::Relaxed);
    Ok(memory)
}

fn timer(shared: &Shared) -> Result<OwnedFd, Error> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
        .map_err(Error::system("making a timer"))?;
    watch(&shared.epoll, &timer)?;
    Ok(timer)
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
#[cfg(test)]
pub(super) use tests::Bench;
