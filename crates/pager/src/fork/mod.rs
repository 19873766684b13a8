//! Forked children: how a child gets the pages of its parent, and its promotion to a pager of its
//! own.
//!
//! The kernel copies resident pages to the child. The parent's *page server* (`page_server`), a
//! process that outlives the parent, serves the other pages:
//!
//! ```text
//!   parent                                      child
//!   fork() ------------------ copy --------->   light: the page server serves its faults
//!   snapshot: page -> slot of all pages that         |
//!     are not resident; the slots are frozen         | 64 pages were served, or a call needs more
//!   page server: serves light children          promoted: a pager of its own (child_promotion.rs):
//!            reads pages for promoted ones          handler, worker, bound, connection, chunks
//! ```
//!
//! - A light child evicts nothing and needs no connection, so a child that soon calls exec does not
//!   pay for one.
//! - A promoted child's page that the page server holds is in a slot with a special index
//!   (`SlotId::inherited`). Such a slot is read through the page server, never written, and freed
//!   when the page is stored in one of the child's own slots.
//! - Frozen slots are neither overwritten nor reused while a child of a fork since their freeze
//!   needs the page server.
//! - When the parent ends, light children are promoted, and all children copy the pages that the
//!   page server holds for them to slots of their own. Then the page server ends, and with it the
//!   parent's connection.
//! - The child holds the descriptor of its own faults. So if the page server is killed, faults wait
//!   instead of reading zeros, and then the child ends with a message.
//!
//! With UFFD_FEATURE_EVENT_FORK, which needs CAP_SYS_PTRACE, the kernel reports the fork and makes
//! the descriptor of the child's faults. Otherwise the child opens a descriptor itself, before any
//! other code runs in it (`child_setup`), and sends it to the page server.
//!
//! The snapshot is exact although the handler continues to serve faults. Before the fork, the
//! worker writes back all pages on the shelf and freezes all slots. Until the snapshot is taken, no
//! page is taken out. So a page that is not resident at the fork has a slot, its entry or its
//! position keeps the slot in every later state, and the slot is not overwritten. `pthread_atfork`
//! handlers ([`Pager::before_fork`], [`Pager::after_fork_in_parent`],
//! [`Pager::after_fork_in_child`]) keep mappings unchanged meanwhile and exclude the taking out.

mod channel;
mod child;
mod child_promotion;
mod child_setup;
pub(crate) mod inheritance;
pub(crate) mod keeper;
mod page_server;
pub(crate) mod state;
pub mod unseen;

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use self::channel::Message;
use self::child::{Child, Snapshot, Touched};
use self::child_setup::ChildSetup;
pub use self::state::Forks;
use self::state::{ASKED, CHILD_MADE, FROZEN, ForkGuards, HANDED, NONE, server_lost};
use crate::config::EXIT_PAGER;
use crate::page_table::PageId;
use crate::pager::Pager;
use crate::pages::Hand;
use crate::pages::standstill::Cause;
use crate::slots::Epoch;
use crate::spawn::spawn;
use crate::sys::{self, PAGE_BYTES, SignalsBlocked};
use crate::uffd::Uffd;
use crate::{credentials, descriptor};

impl Forks {
    /// In a light child, with `space` locked: drops pages and informs the page server that they
    /// read as zeros.
    pub(crate) fn drop_in_child(&self, pager: &Pager, range: Range<u32>) {
        self.request(Message::pages(channel::DROPPED, range.clone()), &[]);
        let start = pager.region.address(PageId(range.start));
        // SAFETY: the program drops these pages.
        let dropped = unsafe { sys::madvise(start, range.len() * PAGE_BYTES, libc::MADV_DONTNEED) };
        if let Err(error) = dropped {
            pager.fatal("drop pages in a forked child", &error);
        }
    }
}

/// Ends the process because a fork cannot be followed. A child of such a fork would read wrong
/// data.
fn cannot_fork(error: &io::Error) -> ! {
    sys::die(
        EXIT_PAGER,
        &format!(
            "process {} calls fork, which a paged process can do only with CAP_SYS_PTRACE or on a \
             kernel with Syscall User Dispatch (Linux 5.11, x86-64; here: {error}), so the process \
             ends now (status {EXIT_PAGER}); run it as root or with CAP_SYS_PTRACE; vfork and \
             posix_spawn work without",
            descriptor::program()
        ),
    )
}

impl Pager {
    /// Prepares a fork. Called before every fork, by `pthread_atfork`.
    pub fn before_fork(&'static self) {
        let blocked = SignalsBlocked::new();
        let Ok(space) = self.space() else {
            drop(blocked);
            return self.wait_promoted().before_fork();
        };
        let pairs = channel::pair().and_then(|calls| Ok((calls, channel::pair()?)));
        let (calls, notices) = match pairs {
            Ok(pairs) => pairs,
            Err(error) => self.fatal("create the sockets for a forked child", &error),
        };
        let ends = [calls[0].as_raw_fd(), notices[0].as_raw_fd()];
        let added_before = self.forks.children_added.load(Ordering::Acquire);
        if self.forks.is_light() {
            self.forks.request(Message::of(channel::FORKS), &ends);
        } else {
            keeper::before_fork();
            // From here on no page is taken out, so the handler serves this thread beyond the
            // bound.
            self.forks.thread.store(sys::thread_id(), Ordering::Release);
            self.pages.begin_standstill(Cause::Prepared);
            self.ask_worker(ASKED);
            for (server_ends, end) in self.forks.server_ends.iter().zip(ends) {
                server_ends.store(end, Ordering::Release);
            }
        }
        let protection = self.pages.lock_protection();
        let setup = (!self.fork_events).then(|| {
            ChildSetup::prepare(self.parts_for_children(&space), &calls, &notices)
                .unwrap_or_else(|error| cannot_fork(&error))
        });
        let guards = ForkGuards { space, protection, blocked, calls, notices, added_before, setup };
        // SAFETY: this thread holds `space`.
        unsafe { *self.forks.guards.get() = Some(guards) };
        // SAFETY: the calling thread's own variable. A failed fork sets it.
        unsafe { *libc::__errno_location() = 0 };
    }

    fn ask_worker(&self, step: u32) {
        self.forks.step.store(step, Ordering::Release);
        self.wake_worker(true);
        while self.forks.is_asked() {
            sys::futex_wait(&self.forks.step, step, None);
        }
    }

    /// Does the worker's part of a fork if one waits for it.
    pub(crate) fn help_fork(self: &Arc<Self>, hand: &mut Hand) {
        let done = match self.forks.step.load(Ordering::Acquire) {
            ASKED => {
                let protection = self.pages.lock_protection();
                self.pages.flush(hand);
                let epoch = self.pages.slots().freeze();
                drop(protection);
                self.forks.epoch.store(epoch.0, Ordering::Release);
                FROZEN
            }
            CHILD_MADE => {
                let channel = self.server_ends().unwrap_or_else(|| {
                    let error = io::Error::last_os_error();
                    self.fatal("duplicate the sockets of a forked child", &error)
                });
                let (snapshot, touched) = {
                    let _protection = self.pages.lock_protection();
                    self.snapshot()
                };
                self.pages.end_standstill(Cause::Prepared);
                // The child sends the descriptor of its faults through the request socket.
                let epoch = self.forks.epoch();
                let extents = self.region.extents().all().into();
                self.hand_to_server(Child::new(
                    None,
                    Some(channel),
                    epoch,
                    snapshot,
                    touched,
                    extents,
                ));
                HANDED
            }
            _ => return,
        };
        self.forks.step.store(done, Ordering::Release);
        sys::futex_wake(&self.forks.step);
    }

    /// Ends a fork in the parent. Called after every fork, including failed ones, which `errno`
    /// reveals.
    pub fn after_fork_in_parent(&self) {
        // SAFETY: the calling thread's own variable; `before_fork` cleared it.
        let forked = unsafe { *libc::__errno_location() } == 0;
        // SAFETY: this thread holds `space`.
        let Some(guards) = (unsafe { (*self.forks.guards.get()).take() }) else { return };
        let ForkGuards { space, protection, blocked, calls, notices, added_before, setup } = guards;
        let unreported = setup.is_some();
        let forked = match setup.map(|mut setup| setup.end()) {
            None => forked,
            Some(Ok(forked)) => forked,
            Some(Err(error)) => self.fatal("exclude memory from further forks", &error),
        };
        self.forks.thread.store(0, Ordering::Release);
        drop(protection);
        if forked && unreported && !self.forks.is_light() {
            self.ask_worker(CHILD_MADE);
        }
        // The page server follows a light child's own forks, not this process.
        let mut wait = keeper::Wait::for_child();
        while forked && !self.forks.is_light() {
            let done = self.forks.children_added.load(Ordering::Acquire);
            if done != added_before {
                break;
            }
            sys::futex_wait(&self.forks.children_added, done, Some(keeper::LOOK_MS as u64));
            wait.look();
        }
        if !self.forks.is_light() {
            self.forks.server_ends.iter().for_each(|end| end.store(0, Ordering::Release));
            // Has no effect after a fork that succeeded: the standstill ended with the snapshot.
            self.pages.end_standstill(Cause::Prepared);
            self.forks.step.store(NONE, Ordering::Release);
            if !forked {
                self.child_is_gone(self.forks.epoch());
            }
        }
        drop((calls, notices));
        drop(space);
        drop(blocked);
    }

    /// Records that one child less needs the frozen slots of an epoch.
    fn child_is_gone(&self, epoch: Epoch) {
        let emptied = self.pages.slots().remove_dependent(epoch);
        self.pages.note_emptied(emptied);
        if self.pages.has_emptied() {
            self.wake_worker(true);
        }
    }

    /// Makes the child a light child. Called after every fork in the child.
    pub fn after_fork_in_child(&'static self) {
        // SAFETY: this thread is the copy of the thread that holds `space`.
        let Some(guards) = (unsafe { (*self.forks.guards.get()).take() }) else { return };
        let ForkGuards { space, protection, blocked, calls, notices, setup, .. } = guards;
        unseen::settle();
        // No other thread exists yet. The thread that is started below may need these locks,
        // because the allocator may drop pages in any call.
        drop((space, protection));
        descriptor::note_program();
        credentials::forget_threads();
        keeper::enter_child(self.forks.is_light());
        self.forks.light.store(true, Ordering::Release);
        // Closes the parent's descriptors: its userfaultfd, and its sockets to its own parent's
        // page server.
        descriptor::close_all_but(&self.sockets.descriptors());
        let [server_calls, calls] = calls;
        let [server_notices, notices] = notices;
        let faults = setup.map(|mut setup| setup.end_in_child());
        match faults {
            // The child set-up has closed them, and their numbers may have been reused.
            Some(_) => std::mem::forget((server_calls, server_notices)),
            None => drop((server_calls, server_notices)),
        }
        if let Some(sealer) = self.pages.sealing.made() {
            // The page server opens the pages of a light child, and a promoted child makes a key.
            // SAFETY: this is the only thread of the child, and atfork handlers do not run within a
            // call to the sealer.
            unsafe { sealer.wipe_in_child() };
        }
        if self.enter_light(calls, notices, faults).is_err() {
            server_lost();
        }
        drop(blocked);
    }

    /// Starts the thread of a light child. The descriptor of the child's faults comes from the page
    /// server, unless the child has made it (`faults`).
    fn enter_light(
        &'static self,
        calls: OwnedFd,
        notices: OwnedFd,
        faults: Option<OwnedFd>,
    ) -> io::Result<()> {
        // Stays open until the process ends.
        let calls = ManuallyDrop::new(descriptor::move_high(calls.as_raw_fd())?).as_raw_fd();
        self.forks.calls.store(calls, Ordering::Release);
        let faults = match faults {
            Some(faults) => faults,
            None => {
                keeper::wait_for_answer(notices.as_raw_fd());
                let (_, [faults, _]) = channel::receive(notices.as_raw_fd())?;
                faults.ok_or(io::ErrorKind::InvalidData)?
            }
        };
        // The promoted child's mapping calls use it, in the program's table.
        let faults = ManuallyDrop::new(descriptor::move_high(faults.as_raw_fd())?);
        let exit_socket = self.forks.open_exit_socket()?;
        let ends = child_promotion::ChildSockets {
            calls,
            notices: notices.as_raw_fd(),
            faults: faults.as_raw_fd(),
            exit_socket: exit_socket.as_raw_fd(),
        };
        spawn("granary-light", move || {
            self.enter();
            let own = ends.own_table(self.sockets.descriptors());
            self.forks.watched.store(1, Ordering::Release);
            sys::futex_wake(&self.forks.watched);
            if own.is_err() {
                server_lost();
            }
            self.wait_for_promotion(ends);
        })?;
        // A new libc thread reads the locale, which is paged. Only after that can it wait for
        // notices; until then this thread does.
        let mut wait = keeper::Wait::for_pages();
        while self.forks.watched.swap(0, Ordering::AcqRel) == 0 {
            sys::futex_wait(&self.forks.watched, 0, Some(10));
            wait.look();
            if channel::has_hung_up(notices.as_raw_fd(), 0) {
                server_lost();
            }
        }
        channel::send(calls, Message::of(channel::LIGHT), &[])
    }

    /// Copies the page server's ends of the sockets of the fork in progress into the calling
    /// thread's table.
    fn server_ends(&self) -> Option<[OwnedFd; 2]> {
        let take = |end: &AtomicI32| match end.swap(0, Ordering::AcqRel) {
            0 => None,
            end => descriptor::take_from_program(end).ok(),
        };
        let [calls, notices] = &self.forks.server_ends;
        Some([take(calls)?, take(notices)?])
    }

    /// Takes the snapshot for a child: the slots of all pages that have one, resident pages
    /// included, and the blocks in which pages exist. The caller excludes the taking out of
    /// pages, and every page on the shelf is equal to its slot.
    fn snapshot(&self) -> (Arc<Snapshot>, Touched) {
        let (mut snapshot, mut touched) = (Snapshot::new(), Touched::new());
        let mut all = self.region.all_numbers();
        all.sort_unstable_by_key(|numbers| numbers.start);
        for numbers in all {
            self.pages.visit_slots(
                numbers,
                |start| {
                    touched.insert(start / channel::BLOCK_PAGES);
                },
                |page, slot| snapshot.push((page, slot)),
            );
        }
        (Arc::new(snapshot), touched)
    }

    /// Hands a child to the page server. Called on a thread of the pager.
    fn hand_to_server(self: &Arc<Self>, child: Box<Child>) {
        let inbox = match self.forks.inbox.get() {
            Some(inbox) => Ok(inbox),
            None => {
                page_server::open_inbox(self).map(|inbox| self.forks.inbox.get_or_init(|| inbox))
            }
        };
        if let Err(error) = inbox.and_then(|inbox| inbox.put(child)) {
            self.fatal("start the thread granary-keeper, which serves forked children", &error);
        }
    }
}

/// Follows a fork whose event the handler has read.
pub(crate) fn follow(pager: &Arc<Pager>, faults: Uffd) {
    let channel = pager.server_ends();
    // A fork by a raw system call was not prepared. Preparing it now is sufficient if no other
    // thread runs meanwhile.
    let cause = if channel.is_none() { Cause::Raw } else { Cause::Prepared };
    pager.pages.begin_standstill(cause);
    // The forking thread holds `space`, so the extents are those of the child.
    let extents = pager.region.extents().all().into();
    let (epoch, (snapshot, touched)) = {
        let _protection = pager.pages.lock_protection();
        let epoch = match cause {
            Cause::Prepared => pager.forks.epoch(),
            Cause::Raw => {
                pager.pages.flush(&mut Hand::default());
                pager.pages.slots().freeze_used()
            }
        };
        (epoch, pager.snapshot())
    };
    pager.pages.end_standstill(cause);
    match page_server::send_fault_descriptor(&faults, channel.as_ref()) {
        Err(error) if error.raw_os_error() != Some(libc::EPIPE) => {
            pager.fatal("send a forked child the descriptor of its faults", &error);
        }
        _ => {}
    }
    pager.hand_to_server(Child::new(Some(faults), channel, epoch, snapshot, touched, extents));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn a_light_child_measures_memory_without_a_lock_of_its_parent() {
        let config = Config { region_bytes: 64 << 20, ..Config::new(8 << 20, "memory:64MiB") };
        let transport = Pager::open_transport(&config).unwrap();
        let pager = Pager::new(&config, transport).unwrap();
        pager.forks.light.store(true, Ordering::Release);
        // As the child's copy of a lock that a thread of the parent held at the fork.
        let _held = pager.pages.state();
        pager.measure_unpaged(true);
    }
}
