//! What a forked child sees, and how it comes to page for itself.
//!
//! The kernel copies what is resident. What is not is kept for the child by the parent's *keeper*
//! ([`keeper`]), a process that outlives the parent:
//!
//! ```text
//!   parent                                      child
//!   fork() ------------------ copy --------->   light: its faults are served by the keeper
//!   a picture: page -> slot of all that is           |
//!     not resident; the slots are frozen             | 64 pages were given, or more is needed
//!   keeper:  serves light children              grown: a pager of its own (grow.rs): handler, evictor,
//!            reads pages for grown ones             bound, connection to the pool, chunks
//! ```
//!
//! - A light child evicts nothing and needs no connection: what forks and calls exec soon pays for none.
//! - To a grown child a page that the keeper has is in a slot with a number of its own kind
//!   ([`SlotId::inherited`]): it is read through the keeper, never written, and given up when the page
//!   is stored in a slot of the child's own.
//! - Frozen slots are neither overwritten nor used again until no child needs the keeper any more.
//! - When the parent ends, children grow, and move all that the keeper has for them to slots of their own;
//!   then the keeper ends, and with it the parent's connection.
//! - The child holds the descriptor of its own faults, so that they wait, and do not read zeros, if
//!   the keeper is killed; then it ends with a message.
//!
//! The kernel reports the fork and makes the descriptor of the child's faults
//! (UFFD_FEATURE_EVENT_FORK). That needs CAP_SYS_PTRACE; without it the child opens one itself, before anything
//! else runs in it ([`birth`]), and sends it to the keeper.
//!
//! The picture is exact, although other handlers go on: before the fork the evictor writes what is
//! staged and freezes all slots, and until the picture is taken it stages nothing that it does not write
//! and freeze too. So a page that is not resident at the fork has a slot, keeps it in its entry whatever
//! happens to it, and nobody overwrites it. `pthread_atfork` handlers ([`Pager::before_fork`],
//! [`Pager::after_fork_in_parent`], [`Pager::after_fork_in_child`]) keep mappings and the evictor still
//! meanwhile.

mod birth;
mod channel;
mod grow;
mod keeper;

use std::cell::UnsafeCell;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use self::birth::Birth;
use self::channel::Message;
use self::keeper::{Child, Inbox, Picture, Touched};
use crate::config::EXIT_PAGER;
use crate::descriptor;
use crate::page_table::{Entry, PageId, State};
use crate::pager::Pager;
use crate::region::{RangeSet, Space};
use crate::slots::SlotId;
use crate::staging::FrameId;
use crate::sys::{self, PAGE_BYTES, SignalsBlocked};
use crate::threads::spawn;
use crate::uffd::Uffd;

pub(crate) use self::grow::Inheritance;

/// What the forking thread holds across the fork.
struct Held {
    space: MutexGuard<'static, Space>,
    /// The evictor stands still, so that the child's copy of what is unreadable is whole.
    gate: MutexGuard<'static, RangeSet>,
    blocked: SignalsBlocked,
    calls: [OwnedFd; 2],
    bell: [OwnedFd; 2],
    done_before: u32,
    /// Where the kernel reports nothing.
    birth: Option<Box<Birth>>,
}

/// Steps of a fork.
const NONE: u32 = 0;
/// The evictor is asked to write and freeze.
const ASKED: u32 = 1;
/// It has.
const FROZEN: u32 = 2;
/// There is a child that the kernel did not report: the evictor is asked to hand it to the keeper.
const BORN: u32 = 3;
/// It has.
const HANDED: u32 = 4;

/// Forks of this process.
#[derive(Default)]
pub struct Forks {
    /// This process is a light child.
    light: AtomicBool,
    /// 1: this was a light child's pager, and another one took its place.
    grown: AtomicU32,
    /// A light child's end of its calls, in the program's table.
    calls: AtomicI32,
    /// What hangs up at the end of this process, in the pager's threads' table.
    life: AtomicI32,
    /// Raised by the thread of a light child that waits for the bell, once it does.
    watched: AtomicU32,
    /// The keeper's ends of the channel of the fork that is under way, or 0.
    announced: [AtomicI32; 2],
    /// Children that the keeper has got.
    done: AtomicU32,
    step: AtomicU32,
    /// The thread that forks, from when it holds up all others, or 0.
    thread: AtomicU32,
    /// Children that still need frozen slots.
    living: Mutex<u32>,
    inbox: OnceLock<Inbox>,
    held: UnsafeCell<Option<Held>>,
}

// SAFETY: `held` is accessed by the thread that holds `space` only (it is part of what is held).
unsafe impl Sync for Forks {}
// SAFETY: as above; a guard is released by the thread that took it, or by its copy in the child.
unsafe impl Send for Forks {}

impl Forks {
    /// True in a forked child that does not page for itself yet.
    pub(crate) fn is_light(&self) -> bool {
        self.light.load(Ordering::Acquire)
    }

    /// True if another pager took the place of this one.
    pub(crate) fn is_grown(&self) -> bool {
        self.grown.load(Ordering::Acquire) != 0
    }

    /// True from before the preparation of a fork to the end of the fork.
    pub(crate) fn is_forking(&self) -> bool {
        self.step.load(Ordering::Acquire) != NONE
    }

    /// True for the thread that holds up who makes room.
    pub(crate) fn is_forking_thread(&self, thread: u32) -> bool {
        self.thread.load(Ordering::Acquire) == thread
    }

    /// The evictor is asked to do something for a fork.
    pub(crate) fn is_asked(&self) -> bool {
        matches!(self.step.load(Ordering::Acquire), ASKED | BORN)
    }

    /// The number that hangs up at the end of this process.
    fn life(&self) -> RawFd {
        self.life.load(Ordering::Acquire)
    }

    fn one_more(&self) {
        *self.living.lock().expect("nobody panics with it locked") += 1;
    }

    /// The keeper has a child: its parent may end.
    fn kept(&self) {
        self.done.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake(&self.done);
    }

    /// Children that still need frozen slots.
    fn living(&self) -> u32 {
        *self.living.lock().expect("nobody panics with it locked")
    }

    /// In a light child, with `space` locked: drops pages, and tells the keeper that they read as zeros.
    pub(crate) fn drop_in_child(&self, pager: &Pager, range: Range<u32>) {
        self.tell(Message::pages(channel::DROPPED, range.clone()), &[]);
        let start = pager.region.address(PageId(range.start));
        // SAFETY: the program drops these pages.
        let dropped = unsafe { sys::madvise(start, range.len() * PAGE_BYTES, libc::MADV_DONTNEED) };
        if let Err(error) = dropped {
            pager.broken("drop pages in a forked child", &error);
        }
    }

    /// In a light child, with `space` locked: says something and waits until the keeper has done it.
    fn tell(&self, message: Message, fds: &[RawFd]) {
        if channel::call(self.calls.load(Ordering::Acquire), message, fds).is_err() {
            abandoned();
        }
    }

    /// In the program's table: what hangs up at the end of this process. The other end is for the pager's
    /// threads.
    pub(crate) fn open_life(&self) -> io::Result<OwnedFd> {
        let [reader, writer] = channel::pair()?;
        let writer = ManuallyDrop::new(descriptor::move_high(writer.as_raw_fd())?);
        debug_assert!(descriptor::is_ours(writer.as_raw_fd()));
        self.life.store(reader.as_raw_fd(), Ordering::Release);
        Ok(reader)
    }
}

/// The keeper is gone, and pages with it.
fn abandoned() -> ! {
    sys::die(
        EXIT_PAGER,
        &format!(
            "what kept the pages that process {} has from its parent was killed, so it ends now \
             (status {EXIT_PAGER})",
            descriptor::program()
        ),
    )
}

/// There is no way to follow a fork, and what is not followed must not happen.
fn cannot_fork(error: &io::Error) -> ! {
    sys::die(
        EXIT_PAGER,
        &format!(
            "process {} calls fork, and a paged process can fork only with CAP_SYS_PTRACE, or where the \
             kernel has Syscall User Dispatch (Linux 5.11, x86-64; here: {error}), so it ends now (status \
             {EXIT_PAGER}); run it as root or with that capability; vfork and posix_spawn work without",
            descriptor::program()
        ),
    )
}

impl Pager {
    /// To be called before every fork, by `pthread_atfork`.
    pub fn before_fork(&'static self) {
        let blocked = SignalsBlocked::new();
        let Ok(space) = self.space() else {
            drop(blocked);
            return self.wait_grown().before_fork();
        };
        let pairs = channel::pair().and_then(|calls| Ok((calls, channel::pair()?)));
        let (calls, bell) = match pairs {
            Ok(pairs) => pairs,
            Err(error) => self.broken("make a channel to a child", &error),
        };
        let ends = [calls[0].as_raw_fd(), bell[0].as_raw_fd()];
        let done_before = self.forks.done.load(Ordering::Acquire);
        if self.forks.is_light() {
            self.forks.tell(Message::of(channel::FORKS), &ends);
        } else {
            self.ask_evictor(ASKED);
            for (announced, end) in self.forks.announced.iter().zip(ends) {
                announced.store(end, Ordering::Release);
            }
        }
        let gate = self.gate();
        // The handler waits for no room from here on: it could not get any.
        self.forks.thread.store(sys::thread_id(), Ordering::Release);
        self.fork_waits.store(true, Ordering::Release);
        self.room.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake(&self.room);
        let birth = (!self.fork_events).then(|| {
            Birth::prepare(self, &space, &calls, &bell).unwrap_or_else(|error| cannot_fork(&error))
        });
        let held = Held { space, gate, blocked, calls, bell, done_before, birth };
        // SAFETY: this thread holds `space`.
        unsafe { *self.forks.held.get() = Some(held) };
        // SAFETY: the calling thread's own variable. A fork that fails sets it.
        unsafe { *libc::__errno_location() = 0 };
    }

    fn ask_evictor(&self, step: u32) {
        self.forks.step.store(step, Ordering::Release);
        self.call_evictor(true);
        while self.forks.is_asked() {
            sys::futex_wait(&self.forks.step, step, None);
        }
    }

    /// The evictor's part of a fork, if it is asked for one.
    pub(crate) fn help_fork(self: &Arc<Self>) {
        let done = match self.forks.step.load(Ordering::Acquire) {
            ASKED => {
                let gate = self.gate();
                self.flush_staging(&gate);
                self.slots().freeze();
                drop(gate);
                self.forks.one_more();
                FROZEN
            }
            BORN => {
                let channel = self.announced().unwrap_or_else(|| {
                    let error = io::Error::last_os_error();
                    self.broken("take over the channel to a forked child", &error)
                });
                let (picture, touched) = {
                    let _gate = self.gate();
                    self.picture()
                };
                // The descriptor of its faults comes by the channel.
                self.hand_to_keeper(Child::new(None, Some(channel), picture, touched));
                HANDED
            }
            _ => return,
        };
        self.forks.step.store(done, Ordering::Release);
        sys::futex_wake(&self.forks.step);
    }

    /// To be called after every fork in the parent, also one that failed: `errno` tells.
    pub fn after_fork_in_parent(&self) {
        // SAFETY: the calling thread's own variable; `before_fork` cleared it.
        let forked = unsafe { *libc::__errno_location() } == 0;
        // SAFETY: this thread holds `space`.
        let Some(held) = (unsafe { (*self.forks.held.get()).take() }) else { return };
        let Held { space, gate, blocked, calls, bell, done_before, birth } = held;
        let unreported = birth.is_some();
        let forked = match birth.map(|mut birth| birth.end()) {
            None => forked,
            Some(Ok(forked)) => forked,
            Some(Err(error)) => self.broken("keep memory from what is forked otherwise", &error),
        };
        self.forks.thread.store(0, Ordering::Release);
        drop(gate);
        if forked && unreported && !self.forks.is_light() {
            self.ask_evictor(BORN);
        }
        // A light child's own forks are followed by the keeper, not here.
        while forked && !self.forks.is_light() {
            let done = self.forks.done.load(Ordering::Acquire);
            if done != done_before {
                break;
            }
            sys::futex_wait(&self.forks.done, done, Some(1000));
        }
        if !self.forks.is_light() {
            self.forks.announced.iter().for_each(|end| end.store(0, Ordering::Release));
            self.fork_waits.store(false, Ordering::Release);
            self.slots().end_freezing();
            self.forks.step.store(NONE, Ordering::Release);
            if !forked {
                self.child_is_gone();
            }
        }
        drop((calls, bell));
        drop(space);
        drop(blocked);
    }

    /// One child less that needs frozen slots.
    fn child_is_gone(&self) {
        let mut living = self.forks.living.lock().expect("nobody panics with it locked");
        *living -= 1;
        let thawed = if *living == 0 { self.slots().thaw() } else { Vec::new() };
        drop(living);
        self.note_emptied(thawed);
    }

    /// To be called after every fork in the child: from here on it is a light child.
    pub fn after_fork_in_child(&'static self) {
        // SAFETY: the copy of the thread that holds `space`.
        let Some(held) = (unsafe { (*self.forks.held.get()).take() }) else { return };
        let Held { space, gate, blocked, calls, bell, birth, .. } = held;
        // This thread is the only one yet. The one that is started below may take them: the allocator
        // gives memory back whenever it is called.
        drop((space, gate));
        descriptor::note_program();
        self.forks.light.store(true, Ordering::Release);
        // These are our parent's: its userfaultfd, its channel to its own parent's keeper.
        descriptor::close_all_but(&self.sockets.descriptors());
        let [keepers_calls, calls] = calls;
        let [keepers_bell, bell] = bell;
        let faults = birth.map(|mut birth| birth.end_in_child());
        match faults {
            // It has closed them, and their numbers may be others' by now.
            Some(_) => std::mem::forget((keepers_calls, keepers_bell)),
            None => drop((keepers_calls, keepers_bell)),
        }
        if self.enter_light(calls, bell, faults).is_err() {
            abandoned();
        }
        drop(blocked);
    }

    /// The descriptor of its faults comes from the keeper, unless the child has made it.
    fn enter_light(
        &'static self,
        calls: OwnedFd,
        bell: OwnedFd,
        faults: Option<OwnedFd>,
    ) -> io::Result<()> {
        // Stays open as long as the process.
        let calls = ManuallyDrop::new(descriptor::move_high(calls.as_raw_fd())?).as_raw_fd();
        self.forks.calls.store(calls, Ordering::Release);
        let faults = match faults {
            Some(faults) => faults,
            None => {
                let (_, [faults, _]) = channel::receive(bell.as_raw_fd())?;
                faults.ok_or(io::ErrorKind::InvalidData)?
            }
        };
        // The grown child's mapping calls use it, in the program's table.
        let faults = ManuallyDrop::new(descriptor::move_high(faults.as_raw_fd())?);
        let life = self.forks.open_life()?;
        let ends = grow::Ends {
            calls,
            bell: bell.as_raw_fd(),
            faults: faults.as_raw_fd(),
            life: life.as_raw_fd(),
        };
        spawn("granary-light", move || {
            self.enter();
            let own = ends.own_table(self.sockets.descriptors());
            self.forks.watched.store(1, Ordering::Release);
            sys::futex_wake(&self.forks.watched);
            if own.is_err() {
                abandoned();
            }
            self.live_light(ends);
        })?;
        // A new thread of libc's looks at the locale, which is paged: only when it is past that
        // can it watch, and until then we do.
        while self.forks.watched.swap(0, Ordering::AcqRel) == 0 {
            sys::futex_wait(&self.forks.watched, 0, Some(10));
            if channel::has_hung_up(bell.as_raw_fd(), 0) {
                abandoned();
            }
        }
        Ok(())
    }

    /// The keeper's ends of the channel of the fork that is under way, for the calling thread's table.
    fn announced(&self) -> Option<[OwnedFd; 2]> {
        let take = |end: &AtomicI32| match end.swap(0, Ordering::AcqRel) {
            0 => None,
            end => descriptor::take_from_program(end).ok(),
        };
        let [calls, bell] = &self.forks.announced;
        Some([take(calls)?, take(bell)?])
    }

    /// The slots of all pages that have one, those that are resident among them, and where there are pages at
    /// all. With `gate` locked and nothing staged that is not in its slot.
    fn picture(&self) -> (Arc<Picture>, Touched) {
        let (mut picture, mut touched) = (Picture::new(), Touched::new());
        self.table.touched(0..self.region.pages(), |part| {
            touched.insert(part.start / channel::BLOCK_PAGES);
            for page in part.map(PageId) {
                let entry: Entry = self.table.load(page);
                let slot = match entry.state() {
                    State::Staged => entry.frame().and_then(|f| self.staging.slot(FrameId(f))),
                    State::Remote | State::Resident | State::Absent => entry.slot().map(SlotId),
                };
                picture.extend(slot.map(|slot| (page, slot)));
            }
        });
        (Arc::new(picture), touched)
    }

    /// On a thread of the pager's.
    fn hand_to_keeper(self: &Arc<Self>, child: Box<Child>) {
        let inbox = match self.forks.inbox.get() {
            Some(inbox) => Ok(inbox),
            None => Inbox::open(self).map(|inbox| self.forks.inbox.get_or_init(|| inbox)),
        };
        if let Err(error) = inbox.and_then(|inbox| inbox.put(child)) {
            self.broken("start what keeps the pages of a forked child", &error);
        }
    }
}

/// The handler has read the event of a fork.
pub(crate) fn follow(pager: &Arc<Pager>, faults: Uffd) {
    let channel = pager.announced();
    let (picture, touched) = {
        let gate = pager.gate();
        if channel.is_none() {
            // Forked by a raw system call: prepared late, which is as good if no other thread runs.
            pager.flush_staging(&gate);
            pager.forks.one_more();
            let mut slots = pager.slots();
            slots.freeze();
            slots.end_freezing();
        }
        pager.picture()
    };
    match keeper::introduce(&faults, channel.as_ref()) {
        Err(error) if error.raw_os_error() != Some(libc::EPIPE) => {
            pager.broken("hand a child the descriptor of its faults", &error);
        }
        _ => {}
    }
    pager.hand_to_keeper(Child::new(Some(faults), channel, picture, touched));
    pager.fork_waits.store(false, Ordering::Release);
}
