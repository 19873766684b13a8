//! The page server: a process in the parent's memory that serves forked children and outlives the
//! parent.
//!
//! It serves the pages that forked children may still need: pages that were not resident at the
//! fork, in slots that are frozen for the children. It is made with `CLONE_VM`, so it uses the
//! parent's page table, QPs and frames while the parent lives and afterwards, however the parent
//! ends. It has the descriptors of the pager's threads. The process exists only while there are
//! children.
//!
//! ```text
//!   parent's thread "granary-keeper"      page server, process "granary-keeper"
//!     a child in the inbox? -- clone -->    serves children, and the children of light children
//!     waits for its end     <-- exit --     every child has ended or needs no more pages
//! ```
//!
//! A page server also ends when the program has changed its credentials ([`crate::credentials`]).
//! The next one has those of the thread.
//!
//! The thread lends its thread-local storage to the process. Meanwhile it makes no call that uses
//! thread-local storage.
//!
//! A page server that is killed while it waits is replaced by another one, which continues to serve
//! the children, because all its state is in the parent's memory. A page server that is killed
//! while it works may hold locks of the parent. Then the parent ends with a message, and so do the
//! children.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use super::channel::{self, Message};
use super::child::{Arrival, Child, Inbox, Touched, take_arrival};
use super::inheritance::set_page_server;
use super::keeper;
use crate::config::EXIT_PAGER;
use crate::credentials;
use crate::page_table::PageId;
use crate::pager::Pager;
use crate::priority::HandlerPriority;
use crate::spawn::spawn;
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::FrameId;
use crate::uffd::{Event, Fault, Uffd};

/// Interval at which the page server checks which children still exist.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Pages served to a child before it must be promoted. Up to twice as many are served to a child
/// that can be promoted: they fit in the part of the child's bound that is reserved for its frames.
const PAGES_BEFORE_PROMOTION: u32 = 64;
/// Maximum duration of one round of the page server after the parent has ended, in seconds.
const ROUND_TIMEOUT_S: u32 = 10;

/// Bytes of the page server's stack.
const STACK_BYTES: usize = 256 << 10;

/// Creates the inbox and the thread that reads it. Called on a thread of the pager.
pub(super) fn open_inbox(pager: &Arc<Pager>) -> io::Result<Inbox> {
    let inbox = Inbox::new()?;
    let (pager, reader, writer) = (pager.clone(), inbox.reader(), inbox.writer());
    spawn("granary-keeper", move || {
        pager.enter();
        run_server_thread(&pager, reader, credentials::serves_children(writer));
    })?;
    Ok(inbox)
}

/// Runs the parent's thread: starts a page server whenever there is a child, and waits for its end.
/// The kernel keeps the page server's process id in `id`.
fn run_server_thread(pager: &Arc<Pager>, inbox: RawFd, id: *mut i32) {
    let stack = sys::map_anonymous(STACK_BYTES).ok();
    let mut server = PageServer::new(pager, inbox);
    // Formatted in advance: a killed page server may have held the lock of the heap.
    let killed = format!(
        "granary-keeper, which holds the pages of the forked children of process {}, was killed \
         during a transfer and may have held locks, so the process ends now (status {EXIT_PAGER})",
        crate::descriptor::program()
    );
    set_page_server();
    loop {
        let mut poll = libc::pollfd { fd: inbox, events: libc::POLLIN, revents: 0 };
        // Children that a killed page server has left are served by the next one.
        // SAFETY: one valid entry.
        if server.children.is_empty() && unsafe { libc::poll(&mut poll, 1, -1) } != 1 {
            continue;
        }
        const FLAGS: i32 = libc::CLONE_VM
            | libc::CLONE_FILES
            | libc::CLONE_UNTRACED
            | libc::CLONE_PARENT_SETTID
            | libc::CLONE_CHILD_CLEARTID;
        // SAFETY: the page server's stack is used by no other thread while it lives. This thread's
        // storage, and `server`, belong to that process until it has ended.
        let process = stack.map_or(-1, |stack| unsafe {
            libc::clone(
                run_page_server,
                (stack + STACK_BYTES) as *mut libc::c_void,
                FLAGS,
                (&raw mut server).cast(),
                id,
                std::ptr::null_mut::<libc::c_void>(),
                id,
            )
        });
        if process > 0 {
            sys::wait_for_clone(process);
        } else {
            // No further process is allowed. This thread serves the children, which then cannot
            // outlive the parent.
            server.is_process = false;
            server.serve();
        }
        if server.is_busy.load(Ordering::Acquire) {
            sys::die(EXIT_PAGER, &killed);
        }
    }
}

extern "C" fn run_page_server(server: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the pointer that `run_server_thread` passed, which waits for the end of this process.
    let server = unsafe { &mut *server.cast::<PageServer>() };
    EXIT_SOCKET.store(server.exit_socket, Ordering::Release);
    // SAFETY: plain system calls on this process. It leaves the program's session, so that signals
    // to the program's group do not reach it, and the program's working directory. The handler is
    // async-signal-safe; handlers and mask belong to this process.
    unsafe {
        libc::setsid();
        libc::chdir(c"/".as_ptr());
        libc::prctl(libc::PR_SET_NAME, keeper::NAME.as_ptr());
        libc::signal(libc::SIGALRM, watchdog as extern "C" fn(i32) as libc::sighandler_t);
        let mut alarm: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut alarm, libc::SIGALRM);
        libc::sigprocmask(libc::SIG_UNBLOCK, &alarm, std::ptr::null_mut());
    }
    server.is_process = true;
    server.priority = HandlerPriority::ask();
    let run = std::panic::AssertUnwindSafe(|| server.serve());
    libc::c_int::from(std::panic::catch_unwind(run).is_err())
}

/// Socket by which the watchdog checks whether the parent lives.
static EXIT_SOCKET: AtomicI32 = AtomicI32::new(-1);

/// Ends the page server if the parent has ended in the meantime: a killed thread of the parent may
/// have held a lock for which the page server waits.
extern "C" fn watchdog(_: libc::c_int) {
    if channel::has_hung_up(EXIT_SOCKET.load(Ordering::Acquire), 0) {
        sys::die(
            EXIT_PAGER,
            "a paged process was killed during a transfer, so the pages of its forked children can \
             no longer be read",
        );
    }
    // SAFETY: async-signal-safe.
    unsafe { libc::alarm(ROUND_TIMEOUT_S) };
}

/// State of the page server. It belongs to the thread that lends its storage, so it outlives a page
/// server that is killed.
struct PageServer<'a> {
    pager: &'a Arc<Pager>,
    inbox: RawFd,
    /// Hangs up when the parent ends or calls exec.
    exit_socket: RawFd,
    orphaned: bool,
    /// False if the parent's thread serves the children itself.
    is_process: bool,
    /// True while the page server may hold locks and its state may be inconsistent: at all times
    /// except in `poll`.
    is_busy: AtomicBool,
    children: Vec<Child>,
    /// Threads of children wait for the page server as for a handler. Ordinary where a thread of
    /// the parent serves the children.
    priority: HandlerPriority,
    /// Pages on their way to children. The NIC reaches the frames, and must not see plain content.
    buffer: Box<[Page; channel::PAGES_AT_ONCE]>,
    /// Time of the next check which children still exist. No event reveals the end of a child that
    /// was made by a raw system call.
    next_check: Instant,
}

impl<'a> PageServer<'a> {
    fn new(pager: &'a Arc<Pager>, inbox: RawFd) -> Self {
        Self {
            pager,
            inbox,
            exit_socket: pager.forks.exit_socket(),
            orphaned: false,
            is_process: false,
            is_busy: AtomicBool::new(false),
            children: Vec::new(),
            priority: HandlerPriority::default(),
            buffer: Box::new([const { Page([0; PAGE_BYTES]) }; channel::PAGES_AT_ONCE]),
            next_check: Instant::now(),
        }
    }

    /// Serves children until none is left, or the page server must end.
    fn serve(&mut self) {
        let mut polls: Vec<libc::pollfd> = Vec::new();
        let mut start = sys::now_ns();
        loop {
            self.is_busy.store(true, Ordering::Release);
            let mut must_end = false;
            while let Some(arrival) = take_arrival(self.inbox) {
                match arrival {
                    Arrival::Child(child) => {
                        self.add(*child);
                        self.pager.forks.note_child_added();
                    }
                    Arrival::End => must_end = self.is_process,
                }
            }
            if self.children.is_empty() || must_end {
                drop(polls);
                self.is_busy.store(false, Ordering::Release);
                return;
            }
            polls.clear();
            let fd = |fd, events| libc::pollfd { fd, events, revents: 0 };
            polls.push(fd(self.inbox, libc::POLLIN));
            polls.push(fd(if self.orphaned { -1 } else { self.exit_socket }, libc::POLLRDHUP));
            for child in &self.children {
                let faults = child.faults.as_ref().map_or(-1, |faults| faults.as_raw_fd());
                let calls = child.channel.as_ref().map_or(-1, |ends| ends[0].as_raw_fd());
                polls.push(fd(faults, libc::POLLIN));
                polls.push(fd(calls, libc::POLLIN));
                let server_calls =
                    child.server_calls.as_ref().map_or(-1, |server_calls| server_calls.as_raw_fd());
                polls.push(fd(server_calls, libc::POLLIN));
            }
            self.set_watchdog(0);
            self.priority.served(start, sys::now_ns());
            self.is_busy.store(false, Ordering::Release);
            // SAFETY: the vector has as many entries as its length.
            unsafe {
                let timeout = CHECK_INTERVAL.as_millis() as i32;
                libc::poll(polls.as_mut_ptr(), polls.len() as u64, timeout);
            }
            self.is_busy.store(true, Ordering::Release);
            start = sys::now_ns();
            self.set_watchdog(ROUND_TIMEOUT_S);
            if polls[1].revents != 0 {
                self.orphan();
            }
            // By the clock and not in silence, because other children may never be silent.
            let now = Instant::now();
            let is_check = now >= self.next_check;
            if is_check {
                self.next_check = now + CHECK_INTERVAL;
            }
            let count = (polls.len() - 2) / 3;
            // Backwards, because `swap_remove` takes out children that have ended, and new children
            // are appended.
            for at in (0..count).rev() {
                let revents = |which: usize| polls[2 + 3 * at + which].revents;
                let (faults, calls, server_calls) = (revents(0), revents(1), revents(2));
                // Fork events first, because later messages of the child may depend on them.
                let lives = (faults == 0 || self.faults(at))
                    && (calls == 0 || self.serve_call(at))
                    && (server_calls == 0 || self.serve_server_call(at))
                    && (!is_check || !self.is_gone(at));
                if !lives {
                    let epoch = self.children.swap_remove(at).epoch;
                    if !self.orphaned {
                        self.pager.child_is_gone(epoch);
                    }
                }
            }
        }
    }

    fn set_watchdog(&self, seconds: u32) {
        if self.is_process {
            // SAFETY: this process's own alarm.
            unsafe { libc::alarm(seconds) };
        }
    }

    fn add(&mut self, child: Child) {
        self.children.push(child);
        if self.orphaned {
            self.notify_orphaned(self.children.len() - 1);
        }
    }

    /// Handles the end of the parent: frees its resident pages, which no thread needs any more, and
    /// makes the children read their pages, so that the rest can be freed.
    fn orphan(&mut self) {
        self.orphaned = true;
        for (start, len) in self.pager.region.all_addresses() {
            // SAFETY: only the page server still runs in this memory, and it does not touch paged
            // memory.
            let _ = unsafe { sys::madvise(start, len, libc::MADV_DONTNEED) };
        }
        for at in 0..self.children.len() {
            self.notify_orphaned(at);
        }
    }

    fn notify_orphaned(&mut self, at: usize) {
        let child = &mut self.children[at];
        if let Some([_, notices]) = &child.channel {
            // A light child is promoted first. A child that has ended is detected on its call
            // socket.
            let kind =
                if child.server_calls.is_none() { channel::PROMOTE } else { channel::ORPHANED };
            child.promotion_requested |= kind == channel::PROMOTE;
            let _ = channel::send(notices.as_raw_fd(), Message::of(kind), &[]);
        }
    }

    /// Returns true if the child's memory no longer exists.
    fn is_gone(&self, at: usize) -> bool {
        let Some(faults) = &self.children[at].faults else { return false };
        // Removing a write-protection that the page of zeros never had changes nothing in the
        // child. The kernel checks that the child's memory exists before it checks the address.
        // SAFETY: as explained.
        let asked = unsafe { faults.unprotect(zeros(), PAGE_BYTES, false) };
        matches!(asked, Err(error) if error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Handles the events of a light child's userfaultfd. Returns false if the child has ended.
    fn faults(&mut self, at: usize) -> bool {
        let mut events = Vec::new();
        match self.children[at].faults.as_ref().map(|faults| faults.read(&mut events)) {
            Some(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => return false,
            _ => {}
        }
        for event in events {
            match event {
                Event::Fault(fault) => self.fault(at, fault),
                Event::Fork(grandchild) => self.add_grandchild(at, Some(grandchild)),
                Event::Other(_) => {}
            }
        }
        true
    }

    /// Adds the child of a light child, with a copy of the light child's state. A child that opens
    /// the descriptor of its faults itself is added before it exists; if the fork fails, its
    /// sockets hang up.
    fn add_grandchild(&mut self, at: usize, faults: Option<Uffd>) {
        let child = &mut self.children[at];
        let mut grandchild = Child::new(
            None,
            child.forks.take(),
            child.epoch,
            child.snapshot.clone(),
            Touched::new(),
            child.extents.clone(),
        );
        grandchild.touched = child.touched.clone();
        grandchild.pages_served = child.pages_served;
        let known = faults
            .as_ref()
            .map(|faults| send_fault_descriptor(faults, grandchild.channel.as_ref()));
        if known.is_none_or(|known| known.is_ok()) {
            grandchild.faults = faults;
            self.pager.pages.slots().add_dependent(grandchild.epoch);
            self.add(*grandchild);
        }
    }

    /// Handles a call of a child. Returns false if the child has ended or needs no more pages.
    fn serve_call(&mut self, at: usize) -> bool {
        let child = &mut self.children[at];
        let Some([calls, _]) = &child.channel else { return true };
        let calls = calls.as_raw_fd();
        let Ok((message, fds)) = channel::receive(calls) else { return false };
        let range = message.start..message.end;
        match message.kind {
            channel::READ => return self.read(at, calls, range).is_ok(),
            channel::TAKE => {
                // Faults that were read but not served are reported again when the child wakes
                // their threads.
                child.faults = None;
                let [server_calls, _] = fds;
                child.server_calls = server_calls;
                let taken = channel::send_blocks(calls, &child.blocks());
                if self.orphaned && taken.is_ok() {
                    self.notify_orphaned(at);
                }
                return taken.is_ok();
            }
            channel::FORKS => {
                child.forks = match fds {
                    [Some(calls), Some(notices)] => Some([calls, notices]),
                    _ => None,
                };
                if !self.pager.fork_events && child.forks.is_some() {
                    self.add_grandchild(at, None);
                }
            }
            channel::FAULTS if child.faults.is_none() && child.server_calls.is_none() => {
                let [faults, _] = fds;
                child.faults = faults.map(Uffd::from_fd);
                return child.faults.as_ref().is_some_and(|own| own.set_nonblocking().is_ok());
            }
            channel::LIGHT => {
                child.is_light = true;
                return true;
            }
            channel::DROPPED => child.forget(range),
            channel::PROMOTE => child.request_promotion(),
            _ => return false,
        }
        channel::send(calls, Message::of(channel::DONE), &[]).is_ok()
    }

    /// Handles a call of a promoted child's own page server, which may end and be replaced at any
    /// time.
    fn serve_server_call(&mut self, at: usize) -> bool {
        let Some(server_calls) =
            self.children[at].server_calls.as_ref().map(|server_calls| server_calls.as_raw_fd())
        else {
            return true;
        };
        match channel::receive(server_calls) {
            Ok((Message { kind: channel::READ, start, end }, _)) => {
                self.read(at, server_calls, start..end).is_ok()
            }
            _ => false,
        }
    }

    /// Sends pages to a promoted child.
    fn read(&mut self, at: usize, calls: RawFd, range: Range<u32>) -> io::Result<()> {
        let pages = range.len();
        if pages == 0 || pages > channel::PAGES_AT_ONCE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let pages_of_parent = &self.pager.pages;
        let first = pages_of_parent.sizes.first_child_frame();
        let mut reads = Vec::with_capacity(pages);
        for (index, page) in range.map(PageId).enumerate() {
            let to = self.buffer[index].0.as_mut_ptr();
            match self.children[at].slot(page) {
                Some(slot) => reads.push((page, slot, FrameId(first + index as u32), to)),
                None => self.buffer[index].0.fill(0),
            }
        }
        // SAFETY: frames and buffer of the page server.
        unsafe { pages_of_parent.read_now(&reads) };
        pages_of_parent.stats.add(Counter::PagesToChildren, pages as u64);
        // SAFETY: the buffer has as many pages as one call may name.
        unsafe { channel::send_pages(calls, self.buffer.as_ptr().cast(), pages) }
    }

    /// Serves a fault of a light child.
    fn fault(&mut self, at: usize, fault: Fault) {
        let (pager, child) = (self.pager, &mut self.children[at]);
        let Some(faults) = &child.faults else { return };
        let Some(page) = child.page(&pager.region, fault.address) else {
            // The child has unmapped the memory: its thread finds that out when it is woken.
            drop(faults.wake(fault.address, PAGE_BYTES));
            return;
        };
        if fault.write_protected {
            // SAFETY: memory of the child, whose faults this process serves.
            if unsafe { faults.unprotect(fault.address, PAGE_BYTES, true) }.is_err() {
                // The child is forking or ending: its thread faults again.
                drop(faults.wake(fault.address, PAGE_BYTES));
            }
            return;
        }
        if child.channel.is_some() {
            if child.is_light && child.pages_served >= 2 * PAGES_BEFORE_PROMOTION {
                // The promoted child serves this fault itself. A child of a light child starts with
                // its parent's number of pages, and its own promotion may not be requested yet.
                child.request_promotion();
                return;
            }
        } else if child.pages_served >= pager.pages.sizes.limit {
            // Ends the thread by SIGBUS. The kernel reports a thread's id in the namespace of the
            // child, so a signal to that id could reach another process.
            // SAFETY: memory of the child, whose faults this process serves.
            let ends = unsafe { faults.poison(fault.address, PAGE_BYTES) }.is_ok();
            if ends || child.pages_served == pager.pages.sizes.limit {
                let effect = if ends { "ends now by SIGBUS" } else { "goes beyond the bound" };
                sys::say(&format!(
                    "a process that process {} made by a system call past libc needs more memory \
                     than its bound (--local), so it {effect}; a process made by fork() has no \
                     such limit",
                    crate::descriptor::program()
                ));
            }
            if ends {
                return;
            }
        }
        child.pages_served += 1;
        child.touched.borrow_mut().insert(page.0 / channel::BLOCK_PAGES);
        let source = match child.slot(page) {
            Some(slot) => {
                let frame = FrameId(pager.pages.sizes.first_child_frame());
                let to = self.buffer[0].0.as_mut_ptr();
                // SAFETY: a frame and the buffer of the page server.
                unsafe { pager.pages.read_now(&[(page, slot, frame, to)]) };
                to as usize
            }
            None => zeros(),
        };
        // SAFETY: memory of the child, whose faults this process serves; the source is the page of
        // zeros or a frame.
        match unsafe { faults.copy(fault.address, source, PAGE_BYTES, false) } {
            Ok(_) => pager.stats().add(Counter::PagesToChildren, 1),
            // The page is already mapped, or the child is ending, or its layout has changed: the
            // thread retries.
            Err(_) => drop(faults.wake(fault.address, PAGE_BYTES)),
        }
        if child.pages_served >= PAGES_BEFORE_PROMOTION {
            child.request_promotion();
        }
    }
}

/// Memory of a page.
#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Returns the address of a page of zeros.
fn zeros() -> usize {
    static ZEROS: Page = Page([0; PAGE_BYTES]);
    ZEROS.0.as_ptr() as usize
}

/// Sends a child the descriptor of its faults.
///
/// # Errors
/// `EPIPE` if the child has ended already.
pub(super) fn send_fault_descriptor(
    faults: &Uffd,
    channel: Option<&[OwnedFd; 2]>,
) -> io::Result<()> {
    faults.set_nonblocking()?;
    match channel {
        Some([_, notices]) => {
            channel::send(notices.as_raw_fd(), Message::of(channel::FAULTS), &[faults.as_raw_fd()])
        }
        None => Ok(()),
    }
}
