//! What a forked child sees, until it calls exec.
//!
//! The kernel copies what is resident, and gives the child's mapping a userfaultfd of its own, which
//! it hands to us, the parent (UFFD_FEATURE_EVENT_FORK). So the child's faults on pages that were not resident
//! come to a thread of the parent's, which fills them as they were at the fork:
//!
//! ```text
//!   parent                                             child
//!   fork() ----------------------- copy ------------>  (runs)
//!   handler: reads the event, takes a picture:
//!     page -> slot, of all pages that are not resident;
//!     freezes the slots
//!   granary-child: reads faults of the child  <------  touches a page
//!     slot -> frame -> UFFDIO_COPY  --------------->   goes on
//!   handler: descriptor of the child's faults  ----->  granary-parent: holds it, and watches
//! ```
//!
//! - Frozen slots are neither overwritten nor used again until all children are gone or have called exec.
//! - The child evicts nothing. When it has been given as many pages as its bound admits, or when the parent
//!   ends before it, the child ends with a message: to fork and live on is not supported yet.
//! - The child holds the descriptor of its own faults, so that they wait, and do not read zeros, if the
//!   parent is killed.
//! - A child that unmaps or drops pages tells the parent, as they read as zeros from then on.
//!
//! The picture is exact, although other handlers go on: before the fork the evictor writes what is
//! staged and freezes all slots, and until the picture is taken it stages nothing that it does not write
//! and freeze too. So a page that is not resident at the fork has a slot, keeps it in its entry whatever
//! happens to it, and nobody overwrites it. `pthread_atfork` handlers ([`Pager::before_fork`],
//! [`Pager::after_fork_in_parent`], [`Pager::after_fork_in_child`]) keep mappings still meanwhile. Without
//! CAP_SYS_PTRACE the kernel does not report forks: then fork is refused in [`Pager::before_fork`].

use std::cell::UnsafeCell;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::config::EXIT_PAGER;
use crate::descriptor;
use crate::page_table::{Entry, PageId, State};
use crate::pager::{Pager, spawn};
use crate::region::Space;
use crate::slots::SlotId;
use crate::staging::FrameId;
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES, SignalsBlocked};
use crate::transport::Lane;
use crate::uffd::{Event, Fault, Uffd};

/// How often the parent looks whether a child that says nothing is still there.
const LOOK_MS: i32 = 200;

/// A message on the channel, with at most one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Message {
    kind: u32,
    start: u32,
    end: u32,
}

impl Message {
    /// Parent to child: the descriptor of your faults; or an answer.
    const DONE: Self = Self { kind: 0, start: 0, end: 0 };
    /// Child to parent: I am about to fork, and this is the parent's end of the new child's channel.
    const FORKS: Self = Self { kind: 1, start: 0, end: 0 };
    /// Child to parent: these pages are zeros from now on.
    fn dropped(range: Range<u32>) -> Self {
        Self { kind: 2, start: range.start, end: range.end }
    }
}

/// What the forking thread holds across the fork.
struct Held {
    space: MutexGuard<'static, Space>,
    blocked: SignalsBlocked,
    channel: (OwnedFd, OwnedFd),
    done_before: u32,
}

/// Forks of this process.
#[derive(Default)]
pub struct Forks {
    /// Set in a child, with its end of the channel.
    child: AtomicBool,
    child_channel: AtomicI32,
    child_faults: AtomicI32,
    /// Raised by the thread that watches the parent, once it does.
    watched: AtomicU32,
    /// The parent's end of the channel of the fork that is under way, or 0.
    announced: AtomicI32,
    /// Pictures taken.
    done: AtomicU32,
    /// 1: the evictor is asked to prepare a fork; 2: it has; 0: no fork is under way.
    preparing: AtomicU32,
    /// Children that still need frozen slots.
    living: Mutex<u32>,
    held: UnsafeCell<Option<Held>>,
}

// SAFETY: `held` is accessed by the thread that holds `space` only (it is part of what is held).
unsafe impl Sync for Forks {}
// SAFETY: as above; a guard is released by the thread that took it, or by its copy in the child.
unsafe impl Send for Forks {}

impl Forks {
    /// True in a forked child.
    pub fn is_child(&self) -> bool {
        self.child.load(Ordering::Acquire)
    }

    /// True from before the preparation of a fork to the end of the fork.
    pub(crate) fn is_forking(&self) -> bool {
        self.preparing.load(Ordering::Acquire) != 0
    }

    /// The evictor is asked to prepare a fork.
    pub(crate) fn is_asked(&self) -> bool {
        self.preparing.load(Ordering::Acquire) == 1
    }

    /// The evictor has prepared it.
    pub(crate) fn answer(&self) {
        *self.living.lock().expect("nobody panics with it locked") += 1;
        self.preparing.store(2, Ordering::Release);
        sys::futex_wake(&self.preparing);
    }

    /// In a child, with `space` locked: drops pages, and tells the parent that they read as zeros.
    pub(crate) fn drop_in_child(&self, pager: &Pager, range: Range<u32>) {
        self.tell_parent(Message::dropped(range.clone()), None);
        let start = pager.region.address(PageId(range.start));
        // SAFETY: the program drops these pages.
        let dropped = unsafe { sys::madvise(start, range.len() * PAGE_BYTES, libc::MADV_DONTNEED) };
        if let Err(error) = dropped {
            pager.broken("drop pages in a forked child", &error);
        }
    }

    /// In a child, with `space` locked: says something and waits until the parent has done it.
    fn tell_parent(&self, message: Message, fd: Option<RawFd>) {
        let channel = self.child_channel.load(Ordering::Acquire);
        if send(channel, message, fd).and_then(|()| receive(channel)).is_err() {
            orphaned();
        }
    }
}

fn retry(mut call: impl FnMut() -> isize) -> isize {
    loop {
        let result = call();
        if result >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return result;
        }
    }
}

fn orphaned() -> ! {
    sys::die(
        EXIT_PAGER,
        &format!(
            "the parent of process {} has ended and holds its pages; to fork and go on without exec \
             is not supported yet, so the process ends now (status {EXIT_PAGER})",
            std::process::id()
        ),
    )
}

impl Pager {
    /// To be called before every fork, by `pthread_atfork`.
    pub fn before_fork(&'static self) {
        if !self.fork_events {
            sys::die(
                EXIT_PAGER,
                "a paged process can fork only with CAP_SYS_PTRACE, which userfaultfd needs to \
                 follow it; vfork and posix_spawn work without",
            );
        }
        let blocked = SignalsBlocked::new();
        let space = self.space();
        let channel = match socket_pair() {
            Ok(pair) => pair,
            Err(error) => self.broken("make a channel to a child", &error),
        };
        if self.forks.is_child() {
            self.forks.tell_parent(Message::FORKS, Some(channel.0.as_raw_fd()));
        } else {
            self.forks.preparing.store(1, Ordering::Release);
            self.call_evictor(true);
            while self.forks.is_asked() {
                sys::futex_wait(&self.forks.preparing, 1, None);
            }
            self.forks.announced.store(channel.0.as_raw_fd(), Ordering::Release);
        }
        let done_before = self.forks.done.load(Ordering::Acquire);
        // SAFETY: this thread holds `space`.
        unsafe { *self.forks.held.get() = Some(Held { space, blocked, channel, done_before }) };
        // SAFETY: the calling thread's own variable. A fork that fails sets it.
        unsafe { *libc::__errno_location() = 0 };
    }

    /// To be called after every fork in the parent, also one that failed: `errno` tells.
    pub fn after_fork_in_parent(&self) {
        // SAFETY: the calling thread's own variable; `before_fork` cleared it.
        let forked = unsafe { *libc::__errno_location() } == 0;
        // SAFETY: this thread holds `space`.
        let Some(held) = (unsafe { (*self.forks.held.get()).take() }) else { return };
        // A child's own forks are followed by its parent, not here.
        while forked && !self.forks.is_child() {
            let done = self.forks.done.load(Ordering::Acquire);
            if done != held.done_before {
                break;
            }
            sys::futex_wait(&self.forks.done, done, Some(1000));
        }
        self.forks.announced.store(0, Ordering::Release);
        if !self.forks.is_child() {
            self.slots().end_freezing();
            self.forks.preparing.store(0, Ordering::Release);
            if !forked {
                self.child_is_gone();
            }
        }
        drop(held.channel);
        drop(held.space);
        drop(held.blocked);
    }

    /// One child less that needs frozen slots.
    fn child_is_gone(&self) {
        let mut living = self.forks.living.lock().expect("nobody panics with it locked");
        *living -= 1;
        let thawed = if *living == 0 { self.slots().thaw() } else { Vec::new() };
        drop(living);
        self.note_emptied(thawed);
    }

    /// To be called after every fork in the child: from here on it is served by its parent.
    /// `enter` is called in the thread that watches the parent.
    pub fn after_fork_in_child(&'static self) {
        // SAFETY: the copy of the thread that holds `space`.
        let Some(held) = (unsafe { (*self.forks.held.get()).take() }) else { return };
        let Held { space, blocked, channel, .. } = held;
        // This thread is the only one yet. The one that is started below may take it: the allocator
        // gives memory back whenever it is called.
        drop(space);
        if self.forks.is_child() {
            // These were between our parent and its own.
            for fd in [&self.forks.child_channel, &self.forks.child_faults] {
                descriptor::close(fd.load(Ordering::Acquire));
            }
        }
        self.forks.child.store(true, Ordering::Release);
        let (parents, channel) = channel;
        drop(parents);
        let connected = descriptor::move_high(channel.as_raw_fd()).and_then(|channel| {
            let (_, faults) = receive(channel.as_raw_fd())?;
            let faults = faults.ok_or(io::ErrorKind::InvalidData)?;
            let faults = descriptor::move_high(faults.as_raw_fd())?;
            // Both stay open as long as the process; the watcher has copies that stay anyway.
            let channel = ManuallyDrop::new(channel).as_raw_fd();
            let faults = ManuallyDrop::new(faults).as_raw_fd();
            self.forks.child_channel.store(channel, Ordering::Release);
            self.forks.child_faults.store(faults, Ordering::Release);
            spawn("granary-parent", move || {
                self.enter();
                self.forks.watched.store(1, Ordering::Release);
                sys::futex_wake(&self.forks.watched);
                watch(channel, faults);
            })?;
            // A new thread of libc's looks at the locale, which is paged: only when it is past that
            // can it watch, and until then we do.
            while self.forks.watched.swap(0, Ordering::AcqRel) == 0 {
                sys::futex_wait(&self.forks.watched, 0, Some(10));
                if has_hung_up(channel, 0) {
                    orphaned();
                }
            }
            Ok(())
        });
        if connected.is_err() {
            orphaned();
        }
        drop(blocked);
    }
}

/// Waits in the child until the parent is gone or says something.
fn watch(channel: RawFd, faults: RawFd) {
    if descriptor::own_table(&[channel, faults]).is_err() {
        orphaned();
    }
    while !has_hung_up(channel, -1) {}
    orphaned();
}

/// Waits at most `timeout_ms` for the other end to close. Data is not waited for.
fn has_hung_up(channel: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: channel, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) };
    poll.revents & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR | libc::POLLNVAL) != 0
}

fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: `pair` is valid for the write; the descriptors are ours.
    unsafe {
        if libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])))
    }
}

/// A buffer for one descriptor as a control message.
#[repr(C, align(8))]
struct Control([u8; 24]);

fn send(channel: RawFd, mut message: Message, fd: Option<RawFd>) -> io::Result<()> {
    let mut part =
        libc::iovec { iov_base: (&raw mut message).cast(), iov_len: size_of::<Message>() };
    let mut control = Control([0; 24]);
    // SAFETY: a zero header is valid; the control buffer holds one descriptor.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        if let Some(fd) = fd {
            header.msg_control = (&raw mut control).cast();
            header.msg_controllen = libc::CMSG_SPACE(4) as usize;
            let attached = libc::CMSG_FIRSTHDR(&header);
            (*attached).cmsg_level = libc::SOL_SOCKET;
            (*attached).cmsg_type = libc::SCM_RIGHTS;
            (*attached).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(attached).cast::<i32>().write_unaligned(fd);
        }
        if retry(|| libc::sendmsg(channel, &header, libc::MSG_NOSIGNAL)) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn receive(channel: RawFd) -> io::Result<(Message, Option<OwnedFd>)> {
    let mut message = Message::DONE;
    let mut part =
        libc::iovec { iov_base: (&raw mut message).cast(), iov_len: size_of::<Message>() };
    let mut control = Control([0; 24]);
    // SAFETY: a zero header is valid; any bytes are a valid message; a descriptor that arrives is
    // ours.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = size_of::<Control>();
        let got = retry(|| libc::recvmsg(channel, &mut header, libc::MSG_CMSG_CLOEXEC));
        if got != size_of::<Message>() as isize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let attached = libc::CMSG_FIRSTHDR(&header);
        let fd = (!attached.is_null() && (*attached).cmsg_type == libc::SCM_RIGHTS).then(|| {
            OwnedFd::from_raw_fd(libc::CMSG_DATA(attached).cast::<i32>().read_unaligned())
        });
        Ok((message, fd))
    }
}

/// A child, as the parent's thread that serves it sees it.
struct Child {
    pager: Arc<Pager>,
    faults: Uffd,
    channel: Option<OwnedFd>,
    /// What was in slots at the fork, by page, ascending.
    picture: Arc<Vec<(PageId, SlotId)>>,
    /// The channel of a fork that the child has announced.
    forks: Option<OwnedFd>,
    given: u32,
}

/// The handler has read the event of a fork.
pub(crate) fn follow(pager: &Arc<Pager>, faults: Uffd) {
    let announced = pager.forks.announced.swap(0, Ordering::AcqRel);
    let picture = {
        let gate = pager.gate();
        if announced == 0 {
            // Forked by a raw system call: prepared late, which is as good if no other thread runs.
            pager.flush_staging(&gate);
            *pager.forks.living.lock().expect("nobody panics with it locked") += 1;
            let mut slots = pager.slots();
            slots.freeze();
            slots.end_freezing();
        }
        picture(pager)
    };
    let channel =
        (announced != 0).then(|| descriptor::take_from_program(announced)).and_then(Result::ok);
    adopt(pager, faults, channel, Arc::new(picture));
    pager.fork_waits.store(false, Ordering::Release);
    pager.forks.done.fetch_add(1, Ordering::AcqRel);
    sys::futex_wake(&pager.forks.done);
}

/// Starts to serve a child. The caller has counted it among the living.
fn adopt(
    pager: &Arc<Pager>,
    faults: Uffd,
    channel: Option<OwnedFd>,
    picture: Arc<Vec<(PageId, SlotId)>>,
) {
    if let Some(channel) = &channel
        && let Err(error) = send(channel.as_raw_fd(), Message::DONE, Some(faults.as_raw_fd()))
        && error.raw_os_error() != Some(libc::EPIPE)
    {
        pager.broken("hand a child the descriptor of its faults", &error);
    }
    if let Err(error) = faults.set_nonblocking() {
        pager.broken("poll for the faults of a child", &error);
    }
    let child = Child { pager: pager.clone(), faults, channel, picture, forks: None, given: 0 };
    let started = spawn("granary-child", move || {
        child.pager.enter();
        child.serve();
    });
    if let Err(error) = started {
        pager.broken("start the thread that serves a forked child", &error);
    }
}

/// The slots of all pages that have one, those that are resident among them: the child does not ask for
/// what it got. With `gate` locked and nothing staged dirty.
fn picture(pager: &Pager) -> Vec<(PageId, SlotId)> {
    let mut picture = Vec::new();
    pager.table.touched(0..pager.region.pages(), |part| {
        for page in part.map(PageId) {
            let entry: Entry = pager.table.load(page);
            let slot = match entry.state() {
                State::Staged => entry.frame().and_then(|f| pager.staging.slot(FrameId(f))),
                State::Remote | State::Resident | State::Absent => entry.slot().map(SlotId),
            };
            picture.extend(slot.map(|slot| (page, slot)));
        }
    });
    picture
}

impl Child {
    fn serve(mut self) {
        let mut events = Vec::new();
        while self.wait() {
            match self.faults.read(&mut events) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => break,
                _ => {}
            }
            for event in events.drain(..) {
                match event {
                    Event::Fault(fault) => self.fault(fault),
                    Event::Fork(grandchild) => {
                        *self.living() += 1;
                        let (channel, picture) = (self.forks.take(), self.picture.clone());
                        adopt(&self.pager, grandchild, channel, picture);
                    }
                    Event::Other(_) => {}
                }
            }
        }
        self.pager.child_is_gone();
    }

    fn living(&self) -> MutexGuard<'_, u32> {
        self.pager.forks.living.lock().expect("nobody panics with it locked")
    }

    /// Waits for a fault. False when the child is gone or has called exec.
    fn wait(&mut self) -> bool {
        loop {
            let fd = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let channel = self.channel.as_ref().map_or(-1, |channel| channel.as_raw_fd());
            let mut polls = [fd(self.faults.as_raw_fd()), fd(channel)];
            // SAFETY: two valid entries.
            let ready = unsafe { libc::poll(polls.as_mut_ptr(), 2, LOOK_MS) };
            // A fork before what the child says after it.
            if polls[0].revents & libc::POLLIN != 0 {
                return true;
            }
            if polls[1].revents != 0 && !self.listen() {
                return false;
            }
            if ready <= 0 && self.is_gone() {
                return false;
            }
        }
    }

    /// True if the child has no such memory any more.
    fn is_gone(&self) -> bool {
        // Lifting a protection that the one page of zeros at our end never had changes nothing in the
        // child; the kernel looks for the child's memory before it looks at the address.
        // SAFETY: as said.
        let asked = unsafe { self.faults.unprotect(self.pager.zeros, PAGE_BYTES, false) };
        matches!(asked, Err(error) if error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Hears the child. False if it is gone.
    fn listen(&mut self) -> bool {
        let Some(channel) = &self.channel else { return true };
        let Ok((message, fd)) = receive(channel.as_raw_fd()) else { return false };
        if message.kind == Message::FORKS.kind {
            self.forks = fd;
        } else {
            let dropped = message.start..message.end;
            Arc::make_mut(&mut self.picture).retain(|(page, _)| !dropped.contains(&page.0));
        }
        send(channel.as_raw_fd(), Message::DONE, None).is_ok()
    }

    fn fault(&mut self, fault: Fault) {
        let pager = self.pager.clone();
        let page = pager.region.page(fault.address);
        if fault.write_protected {
            // SAFETY: memory of the child's, of which we serve the faults.
            let _ = unsafe { self.faults.unprotect(fault.address, PAGE_BYTES, true) };
            return;
        }
        self.given += 1;
        if self.given > pager.limit {
            sys::say(&format!(
                "a child of process {} has outgrown its bound; to fork and go on without exec is not \
                 supported yet, so it ends now",
                std::process::id()
            ));
            // SAFETY: a thread of the child's, by the kernel's own report.
            unsafe { libc::kill(fault.thread as i32, libc::SIGKILL) };
            return;
        }
        match self.picture.binary_search_by_key(&page, |&(page, _)| page) {
            Ok(index) => {
                let frame = pager.child_frame();
                let _one = pager.child_frame_lock.lock().expect("nobody panics with it locked");
                pager.transfer(Lane::Sync, false, &[(self.picture[index].1, frame)]);
                self.give(&pager, fault.address, pager.staging.address(frame) as usize);
            }
            Err(_) => self.give(&pager, fault.address, pager.zeros),
        }
    }

    fn give(&self, pager: &Pager, address: usize, source: usize) {
        // SAFETY: memory of the child's, of which we serve the faults; a page of zeros or a frame.
        match unsafe { self.faults.copy(address, source, PAGE_BYTES, false) } {
            Ok(_) => pager.stats.add(Counter::PagesToChildren, 1),
            // It is there already, or the child is going, or its layout changed: it tries again.
            Err(_) => drop(self.faults.wake(address, PAGE_BYTES)),
        }
    }
}
