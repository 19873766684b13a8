//! Who runs a NIC: its thread, or for a while the threads that use it.
//!
//! A thread that waits for a completion has nothing else to do, and the NIC's thread wants a CPU beside it. On a NIC
//! that is this process's own, one with a wire, the one who waits plays the NIC as on the inline port: it
//! reads the socket, executes, and sends. That saves two hand-overs between threads for each message.
//!
//! ```text
//!            a caller waits                          no caller had a turn for a while,
//!   thread ────────────────────────> callers ──────  or one goes to sleep ─────────────> thread
//!     │ nothing to do                   ^
//!     v                                 │ a caller rings or waits
//!   asleep ─────────────────────────────┘
//! ```
//!
//! - Who holds the lock runs the NIC. The thread lets go of it only while it sleeps, with or without callers.
//! - While callers run the NIC the thread sleeps, looks every now and then whether one of them still does, and takes over
//!   if not: what arrives when they compute waits so long at most, once. A look takes a CPU from a caller, so the time
//!   between two grows with how long they run it already, from [`ABSENT`] to [`LOOK`]; and where they run it for long it need
//!   not be kept to, so that the scheduler's tick can bring the look along: then another NIC may send something again, once.
//!   The thread also answers control verbs.
//! - A doorbell is a turn as well, so that the first message leaves at once, and so does what answers one that has just come.
//!   Where answers are awaited and a caller has just had a turn, the next turn takes it along: that makes rows of packets.
//! - What a caller has been sent is acknowledged in the first turn in which nothing comes, or after a few turns: it has just
//!   been given a completion, and what it answers is more urgent. Where it has answered a few times in a row, later still:
//!   in one send with an answer. The kernel takes longer for two segments than for one, but less than for two sends.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::mm::Advice;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use super::super::error::Error;
use super::super::has_one_cpu;
use super::nic_thread::{
    NicThread, ROUNDS_PER_CLOCK, SLEEP_AFTER, SPIN, Shared, Turn, timespec, watch,
};
use crate::memory::DmaMemory;

/// Callers that had no turn for this long do something else.
const ABSENT: Duration = Duration::from_micros(200);
/// The longest time between two looks that is asked for: below the shortest time after which other NICs send again.
const LOOK: Duration = Duration::from_micros(800);
/// Where callers run the NIC for long, a look may be late by this part of that time, and by no more than `LATE_MAX`, a tick of
/// most schedulers: a timer of its own takes up to 55 us of a caller's CPU in a virtual machine, with the cache lines
/// that it costs, and a look in an interrupt that comes anyway a few.
const LATE_PART: u32 = 8;
const LATE_MAX: Duration = Duration::from_millis(4);
/// One that had a turn this long ago will soon have another one.
const NEAR_NS: u64 = 20_000;

/// Where callers' turns had something to do this long ago, who waits does not sleep.
const BUSY_NS: u64 = 60_000;
/// After so many turns with nothing to do a caller offers its CPU between two turns: the other side may want it.
const PATIENCE: u32 = 12;
/// ... where nobody wanted it the last times.
const PATIENCE_MAX: u32 = 48;
/// Who has its CPU back within this time gave it to nobody.
const NOBODY_NS: u64 = 2_000;

/// The place of who runs the NIC.
pub(super) struct Seat {
    nic: Mutex<NicThread>,
    shared: Arc<Shared>,
    started: Instant,
    /// A word that is 0 in a child of this process: that has a copy of all this, and must leave the socket to its
    /// parent.
    here: DmaMemory,
    /// Wakes the thread for its first look where a caller has taken the NIC over. None: the thread alone runs this NIC.
    timer: Option<OwnedFd>,
    /// Callers run it. Changes under the lock.
    callers: AtomicBool,
    /// A caller has found the thread running.
    wanted: AtomicBool,
    /// A caller goes to sleep.
    left: AtomicBool,
    /// A doorbell was rung while another caller had a turn.
    again: AtomicBool,
    /// Packets came in the last turn: what is posted next may be an answer.
    brought: AtomicBool,
    /// Turns of waiting callers that found nothing to do, in a row; after how many the CPU is offered.
    idle: AtomicU32,
    patience: AtomicU32,
    /// When the last one ended, in ns since `started`; whether answers of other NICs were awaited then.
    last_ns: AtomicU64,
    /// When one last had something to do.
    worked_ns: AtomicU64,
    awaits: AtomicBool,
}

/// Callers' turns end when the NIC does.
struct End<'a>(&'a Seat);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.nic.lock().end();
    }
}

impl Seat {
    /// With callers' turns, if they are to be.
    pub fn new(nic: NicThread, shared: Arc<Shared>, callers: bool) -> Result<Self, Error> {
        let timer = callers.then(|| timer(&shared)).transpose()?;
        Ok(Self {
            started: nic.started,
            here: wiped_on_fork()?,
            nic: Mutex::new(nic),
            shared,
            timer,
            callers: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            left: AtomicBool::new(false),
            again: AtomicBool::new(false),
            brought: AtomicBool::new(false),
            idle: AtomicU32::new(0),
            patience: AtomicU32::new(PATIENCE),
            last_ns: AtomicU64::new(0),
            worked_ns: AtomicU64::new(0),
            awaits: AtomicBool::new(false),
        })
    }

    /// Whether callers have turns.
    pub fn is_shared(&self) -> bool {
        self.timer.is_some()
    }

    // --- the thread ----------------------------------------------------------------------------

    /// The thread's life: runs the NIC until a job sets `stop`.
    pub fn run(&self) {
        let _end = End(self);
        let mut nic = self.nic.lock();
        let mut idle_since = None;
        let mut now = 0;
        let mut rounds = 0;
        let mut one_cpu = has_one_cpu();
        while !nic.stop {
            if self.wanted.load(Ordering::Relaxed) {
                self.leave(&mut nic);
                (idle_since, now) = (None, nic.now_ns());
                continue;
            }
            if nic.work(now) {
                idle_since = None;
                rounds += 1;
                if rounds % ROUNDS_PER_CLOCK == 0 {
                    now = nic.now_ns();
                    // Who waits on this CPU for what is done already would wait until the scheduler takes it away.
                    if nic.is_waited_for_here(now) {
                        now = nic.yield_cpu(now, true);
                    }
                }
                continue;
            }
            now = nic.now_ns();
            let since = *idle_since.get_or_insert(now);
            let idle = Duration::from_nanos(now - since);
            if idle >= SLEEP_AFTER {
                self.sleep(&mut nic, now);
                one_cpu = has_one_cpu();
                idle_since = None;
                now = nic.now_ns();
            } else if nic.is_waited_for_here(now) || one_cpu || idle >= SPIN {
                now = nic.yield_cpu(now, false);
            }
        }
    }

    /// Sleeps until there is something to do; callers may take the NIC over meanwhile.
    #[cold]
    fn sleep(&self, nic: &mut MutexGuard<'_, NicThread>, now: u64) {
        self.wanted.store(false, Ordering::Relaxed);
        let Some(timeout) = nic.fall_asleep(now) else { return };
        MutexGuard::unlocked(nic, || self.shared.wait(timeout));
        if self.callers.load(Ordering::Relaxed) {
            self.stand_by(nic);
        } else {
            nic.wake_up();
        }
    }

    /// Leaves the NIC to callers.
    #[cold]
    fn leave(&self, nic: &mut MutexGuard<'_, NicThread>) {
        self.wanted.store(false, Ordering::Relaxed);
        self.give(nic);
        // Who has rung and could not see that relies on this look: see `handshake.rs`.
        fence(Ordering::SeqCst);
        nic.look_at_all();
        self.stand_by(nic);
    }

    /// Callers run the NIC from now on.
    fn give(&self, nic: &mut NicThread) {
        nic.leave_to_callers();
        self.callers.store(true, Ordering::SeqCst);
    }

    /// Has the sleeping thread look after its NIC in so much time. (The times of `epoll_wait` are milliseconds.)
    fn look_in(&self, time: Duration) {
        if let Some(timer) = &self.timer {
            let it_interval = timespec(Duration::ZERO);
            let value = Itimerspec { it_interval, it_value: timespec(time) };
            // It can fail for want of arguments only.
            let _ = rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &value);
        }
    }

    /// Sleeps as long as callers run the NIC, then takes it back.
    fn stand_by(&self, nic: &mut MutexGuard<'_, NicThread>) {
        let (began, mut next) = (self.now_ns(), ABSENT);
        // The other half of `before_sleep`.
        fence(Ordering::SeqCst);
        while !nic.stop && !self.left.swap(false, Ordering::SeqCst) {
            // A look needs no lock, for which callers would have to make room.
            MutexGuard::unlocked(nic, || {
                loop {
                    let ran = Duration::from_nanos(self.now_ns().saturating_sub(began));
                    self.shared.wait_for(next, next + late_after(ran));
                    next = LOOK.min(2 * next);
                    let left = self.left.load(Ordering::SeqCst);
                    if left || self.shared.has_mail() || self.is_absent() {
                        break;
                    }
                }
            });
            if nic.take_mail() {
                nic.look_at_all();
            }
            if self.is_absent() {
                break;
            }
        }
        self.callers.store(false, Ordering::SeqCst);
        if !nic.stop {
            nic.take_back();
        }
    }

    // --- callers -------------------------------------------------------------------------------

    /// A turn of who waits for a completion; true if there was anything to do.
    pub fn wait_turn(&self) -> bool {
        if self.timer.is_none() || !self.is_here() {
            return false;
        }
        let Some(mut nic) = self.nic.try_lock() else {
            if !self.callers.load(Ordering::Relaxed) {
                self.left.store(false, Ordering::Relaxed);
                self.wanted.store(true, Ordering::Relaxed);
            }
            return false;
        };
        let did = self.turn(&mut nic, true);
        drop(nic);
        let idle = if did { 0 } else { self.idle.load(Ordering::Relaxed).saturating_add(1) };
        self.idle.store(idle, Ordering::Relaxed);
        if idle > self.patience.load(Ordering::Relaxed) {
            self.offer_cpu();
        }
        did
    }

    fn offer_cpu(&self) {
        let before = self.now_ns();
        rustix::thread::sched_yield();
        let away = self.now_ns().saturating_sub(before);
        let patience = match away {
            ..NOBODY_NS => PATIENCE_MAX.min(2 * self.patience.load(Ordering::Relaxed)),
            _ => PATIENCE,
        };
        self.patience.store(patience, Ordering::Relaxed);
    }

    /// A turn of who would sleep otherwise; true as long as packets come and go, so that it should not.
    pub fn busy_turn(&self) -> bool {
        self.wait_turn();
        let quiet_ns = self.now_ns().saturating_sub(self.worked_ns.load(Ordering::Relaxed));
        self.callers.load(Ordering::Relaxed) && quiet_ns < BUSY_NS
    }

    /// A doorbell was rung: the NIC executes it now, or somebody will soon. False if the thread has to be
    /// woken for that.
    pub fn rung(&self, asleep: impl FnOnce() -> bool) -> bool {
        fence(Ordering::SeqCst);
        if !self.is_here() {
            return true;
        }
        if self.callers.load(Ordering::Relaxed) {
            let may_answer = self.brought.load(Ordering::Relaxed);
            if !may_answer && self.awaits.load(Ordering::Relaxed) && self.since_turn() < NEAR_NS {
                return true;
            }
            // Whoever has the NIC at the moment looks again, or takes it back and looks then.
            self.post_turn();
            return true;
        }
        !asleep() || self.post_turn()
    }

    fn is_here(&self) -> bool {
        self.here.word32(0).load(Ordering::Relaxed) != 0
    }

    /// A turn of who has rung; false if another one has the NIC, who will look again.
    fn post_turn(&self) -> bool {
        loop {
            let Some(mut nic) = self.nic.try_lock() else {
                self.again.store(true, Ordering::SeqCst);
                if self.nic.is_locked() {
                    return false;
                }
                continue;
            };
            self.again.store(false, Ordering::SeqCst);
            self.turn(&mut nic, false);
            drop(nic);
            fence(Ordering::SeqCst);
            if !self.again.load(Ordering::SeqCst) {
                return true;
            }
        }
    }

    fn turn(&self, nic: &mut NicThread, waits: bool) -> bool {
        if nic.stop {
            return false;
        }
        if !self.callers.load(Ordering::Relaxed) {
            // The thread sleeps, or it would have the lock.
            self.look_in(ABSENT);
            self.give(nic);
        }
        let guard = Unwinding(&mut *nic);
        let now = guard.0.now_ns();
        let Turn { received, worked } = guard.0.caller_turn(now, waits);
        let awaits = guard.0.core.engine.awaits_answers();
        std::mem::forget(guard);
        self.awaits.store(awaits, Ordering::Relaxed);
        self.brought.store(received, Ordering::Relaxed);
        self.last_ns.store(now, Ordering::Relaxed);
        if worked {
            self.worked_ns.store(now, Ordering::Relaxed);
        }
        worked
    }

    /// No caller has had a turn for a while.
    fn is_absent(&self) -> bool {
        self.since_turn() >= ABSENT.as_nanos() as u64
    }

    fn since_turn(&self) -> u64 {
        self.now_ns().saturating_sub(self.last_ns.load(Ordering::Relaxed))
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// A caller goes to sleep until a completion comes: the thread takes the NIC back.
    pub fn before_sleep(&self) {
        if self.timer.is_none() {
            return;
        }
        // It may have asked for the NIC, and not have got it yet.
        self.wanted.store(false, Ordering::Relaxed);
        self.left.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.callers.load(Ordering::Relaxed) {
            self.shared.wake_thread();
        }
    }
}

/// By how much a look may be late where callers have run the NIC for so long.
fn late_after(ran: Duration) -> Duration {
    LATE_MAX.min(ran / LATE_PART)
}

/// A panic in a caller's turn is one of the NIC, which has to end then: half of its work is done.
struct Unwinding<'a>(&'a mut NicThread);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        self.0.stop = true;
    }
}

/// Memory whose first word is 1 here, and 0 in children of this process.
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
#[path = "seat_tests.rs"]
mod tests;
#[cfg(test)]
pub(super) use tests::Bench;
