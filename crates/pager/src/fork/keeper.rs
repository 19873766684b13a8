//! The keeper: a process of its own in the parent's memory, which outlives the parent.
//!
//! It keeps what forked children may still need: pages that were not resident at the fork, in slots
//! that are frozen for them. It is made with `CLONE_VM`, so it works with the parent's page table, QPs
//! and frames while the parent lives and after, however that ends; its descriptors are those of the
//! pager's threads. There is none as long as there is no child.
//!
//! ```text
//!   parent's thread "granary-keeper"      keeper process
//!     a child in the inbox? -- clone -->    serves children, those of light children too
//!     waits for its end     <-- exit --     the last child is gone or needs nothing more
//! ```
//!
//! The thread lends the process its thread-local storage, and meanwhile makes no call that touches it.
//!
//! A keeper that is killed while it waits is replaced by another one, which goes on with its children: all that
//! it knows is in the parent's memory. One that is killed while it works may hold locks of the parent's:
//! then the parent ends with a message, and the children with it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use super::channel::{self, Block, Message};
use crate::config::EXIT_PAGER;
use crate::page_table::PageId;
use crate::pager::Pager;
use crate::slots::SlotId;
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::Lane;
use crate::uffd::{Event, Fault, Uffd};

/// How often the keeper looks whether a child that says nothing is still there.
const LOOK_MS: i32 = 500;
/// Pages that are given to a child before it is asked to page for itself. Twice as many are given in all:
/// they fit in what the child does not use yet of its bound, the staging area.
const GIVEN_BEFORE_GROWTH: u32 = 64;
/// How long the keeper may take over one round once the parent is gone.
const PATIENCE_S: u32 = 10;

/// What was in slots at a fork, by page, ascending. Pages that are resident are among them: the child
/// does not ask for what it got.
pub(super) type Picture = Vec<(PageId, SlotId)>;
/// Blocks of pages in which a child may have something.
pub(super) type Touched = BTreeSet<u32>;

/// A child, as the keeper sees it.
pub(super) struct Child {
    /// Of a light child, once it is known; a child that opens it itself sends it.
    pub faults: Option<Uffd>,
    /// Calls and bell; a child that was forked by a raw system call has none.
    pub channel: Option<[OwnedFd; 2]>,
    /// Calls of a grown child's own keeper.
    kin: Option<OwnedFd>,
    pub picture: Arc<Picture>,
    /// The channel of a fork that the child has announced.
    forks: Option<[OwnedFd; 2]>,
    /// Shared with children that the child has while it is light: a block too many harms nobody.
    touched: Rc<RefCell<Touched>>,
    given: u32,
    asked_to_grow: bool,
}

impl Child {
    pub fn new(
        faults: Option<Uffd>,
        channel: Option<[OwnedFd; 2]>,
        picture: Arc<Picture>,
        touched: Touched,
    ) -> Box<Self> {
        Box::new(Self {
            faults,
            channel,
            kin: None,
            picture,
            forks: None,
            touched: Rc::new(RefCell::new(touched)),
            given: 0,
            asked_to_grow: false,
        })
    }
}

/// How the parent's threads reach the keeper.
pub(super) struct Inbox {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl Inbox {
    /// Makes it, and the thread behind it. To be called on a thread of the pager's.
    pub fn open(pager: &Arc<Pager>) -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: `ends` is valid for the write; the descriptors are ours.
        let inbox = unsafe {
            if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
                return Err(io::Error::last_os_error());
            }
            Self { reader: OwnedFd::from_raw_fd(ends[0]), writer: OwnedFd::from_raw_fd(ends[1]) }
        };
        let (pager, reader) = (pager.clone(), inbox.reader.as_raw_fd());
        crate::threads::spawn("granary-keeper", move || {
            pager.enter();
            lend(&pager, reader);
        })?;
        Ok(inbox)
    }

    /// Hands a child over. The caller has counted it among the living.
    pub fn put(&self, child: Box<Child>) -> io::Result<()> {
        let pointer = (Box::into_raw(child) as usize).to_ne_bytes();
        // SAFETY: a pointer is written whole, or not at all.
        let put =
            unsafe { libc::write(self.writer.as_raw_fd(), pointer.as_ptr().cast(), pointer.len()) };
        if put == pointer.len() as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

fn take_child(reader: RawFd) -> Option<Box<Child>> {
    let mut pointer = [0u8; size_of::<usize>()];
    // SAFETY: valid for the write.
    let got = unsafe { libc::read(reader, pointer.as_mut_ptr().cast(), pointer.len()) };
    // SAFETY: what comes out was put in by `Inbox::put`, once.
    (got == pointer.len() as isize)
        .then(|| unsafe { Box::from_raw(usize::from_ne_bytes(pointer) as *mut Child) })
}

thread_local! {
    /// Of the thread that lends its storage to a keeper, too, which does nothing meanwhile.
    static KEEPER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// True in a keeper.
pub(super) fn is_keeper() -> bool {
    KEEPER.get()
}

/// The stack of the keeper.
const STACK_BYTES: usize = 256 << 10;

/// The thread's life: makes a keeper whenever there is a child, and waits for its end.
fn lend(pager: &Arc<Pager>, inbox: RawFd) {
    let stack = sys::map_anonymous(STACK_BYTES).ok();
    let mut keeper = Keeper::new(pager, inbox);
    // Put together now: the lock of the heap may be among those that are lost.
    let killed = format!(
        "granary-keeper, which keeps the pages of the forked children of process {}, was killed in the \
         middle of a transfer, and locks that it held are lost; so the process ends now (status \
         {EXIT_PAGER})",
        crate::descriptor::program()
    );
    KEEPER.set(true);
    loop {
        let mut poll = libc::pollfd { fd: inbox, events: libc::POLLIN, revents: 0 };
        // A keeper that was killed has left its children behind: the next one goes on with them.
        // SAFETY: one valid entry.
        if keeper.children.is_empty() && unsafe { libc::poll(&mut poll, 1, -1) } != 1 {
            continue;
        }
        const FLAGS: i32 = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_UNTRACED;
        // SAFETY: the keeper runs on a stack of its own, which nobody else uses while it lives; this
        // thread's storage, and `keeper`, are that process's until it has ended.
        let process = stack.map_or(-1, |stack| unsafe {
            libc::clone(
                run_keeper,
                (stack + STACK_BYTES) as *mut libc::c_void,
                FLAGS,
                (&raw mut keeper).cast(),
            )
        });
        if process > 0 {
            sys::wait_for_clone(process);
        } else {
            // No further process is allowed: the children live as long as we do.
            keeper.is_process = false;
            keeper.serve();
        }
        if keeper.is_busy.load(Ordering::Acquire) {
            sys::die(EXIT_PAGER, &killed);
        }
    }
}

extern "C" fn run_keeper(keeper: *mut libc::c_void) -> libc::c_int {
    // SAFETY: what `lend` passed; it waits for our end.
    let keeper = unsafe { &mut *keeper.cast::<Keeper>() };
    LIFE.store(keeper.life, Ordering::Release);
    // SAFETY: plain system calls on this process: out of the way of signals to the program's group
    // and of the directory that it is in. The handler is async-signal-safe; handlers and mask are this
    // process's own.
    unsafe {
        libc::setsid();
        libc::chdir(c"/".as_ptr());
        libc::prctl(libc::PR_SET_NAME, c"granary-keeper".as_ptr());
        libc::signal(libc::SIGALRM, watchdog as extern "C" fn(i32) as libc::sighandler_t);
        let mut alarm: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut alarm, libc::SIGALRM);
        libc::sigprocmask(libc::SIG_UNBLOCK, &alarm, std::ptr::null_mut());
    }
    keeper.is_process = true;
    let run = std::panic::AssertUnwindSafe(|| keeper.serve());
    libc::c_int::from(std::panic::catch_unwind(run).is_err())
}

/// Where the watchdog looks whether the parent lives.
static LIFE: AtomicI32 = AtomicI32::new(-1);

/// A thread of the parent's that was killed may have held a lock for which we wait.
extern "C" fn watchdog(_: libc::c_int) {
    if channel::has_hung_up(LIFE.load(Ordering::Acquire), 0) {
        sys::die(
            EXIT_PAGER,
            "a process was killed in the middle of a transfer, and its forked children's pages \
             cannot be read any more",
        );
    }
    // SAFETY: async-signal-safe.
    unsafe { libc::alarm(PATIENCE_S) };
}

/// The keeper's state. It lives in the thread that lends its storage, and outlives a keeper that is
/// killed.
struct Keeper<'a> {
    pager: &'a Arc<Pager>,
    inbox: RawFd,
    /// Hangs up when the parent ends or calls exec.
    life: RawFd,
    orphaned: bool,
    /// It is a process, and not the parent's thread.
    is_process: bool,
    /// The keeper may hold locks, and this state may be half changed: not while it waits in `poll`.
    is_busy: AtomicBool,
    children: Vec<Child>,
}

impl<'a> Keeper<'a> {
    fn new(pager: &'a Arc<Pager>, inbox: RawFd) -> Self {
        Self {
            pager,
            inbox,
            life: pager.forks.life(),
            orphaned: false,
            is_process: false,
            is_busy: AtomicBool::new(false),
            children: Vec::new(),
        }
    }

    /// Serves until no child is left.
    fn serve(&mut self) {
        let mut polls: Vec<libc::pollfd> = Vec::new();
        loop {
            self.is_busy.store(true, Ordering::Release);
            while let Some(child) = take_child(self.inbox) {
                self.add(*child);
                self.pager.forks.kept();
            }
            if self.children.is_empty() {
                drop(polls);
                self.is_busy.store(false, Ordering::Release);
                return;
            }
            polls.clear();
            let fd = |fd, events| libc::pollfd { fd, events, revents: 0 };
            polls.push(fd(self.inbox, libc::POLLIN));
            polls.push(fd(if self.orphaned { -1 } else { self.life }, libc::POLLRDHUP));
            for child in &self.children {
                let faults = child.faults.as_ref().map_or(-1, |faults| faults.as_raw_fd());
                let calls = child.channel.as_ref().map_or(-1, |ends| ends[0].as_raw_fd());
                polls.push(fd(faults, libc::POLLIN));
                polls.push(fd(calls, libc::POLLIN));
                let kin = child.kin.as_ref().map_or(-1, |kin| kin.as_raw_fd());
                polls.push(fd(kin, libc::POLLIN));
            }
            self.watch(0);
            self.is_busy.store(false, Ordering::Release);
            // SAFETY: as many entries as are said.
            let ready = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as u64, LOOK_MS) };
            self.is_busy.store(true, Ordering::Release);
            self.watch(PATIENCE_S);
            if polls[1].revents != 0 {
                self.orphan();
            }
            let count = (polls.len() - 2) / 3;
            // From the last on: those that are gone are taken out, and new ones come behind.
            for at in (0..count).rev() {
                let revents = |which: usize| polls[2 + 3 * at + which].revents;
                let (faults, calls, kin) = (revents(0), revents(1), revents(2));
                // A fork before what the child says after it.
                let lives = (faults == 0 || self.faults(at))
                    && (calls == 0 || self.listen(at))
                    && (kin == 0 || self.listen_to_kin(at))
                    && (ready > 0 || !self.is_gone(at));
                if !lives {
                    drop(self.children.swap_remove(at));
                    if !self.orphaned {
                        self.pager.child_is_gone();
                    }
                }
            }
        }
    }

    fn watch(&self, seconds: u32) {
        if self.is_process {
            // SAFETY: this process's own alarm.
            unsafe { libc::alarm(seconds) };
        }
    }

    fn add(&mut self, child: Child) {
        self.children.push(child);
        if self.orphaned {
            self.tell_orphaned(self.children.len() - 1);
        }
    }

    /// The parent has ended: what it had resident is of no use any more, and children are to fetch what
    /// they need, so that the rest can be freed.
    fn orphan(&mut self) {
        self.orphaned = true;
        let region = &self.pager.region;
        // SAFETY: nobody runs in this memory any more but the keeper, which does not touch the region.
        let _ = unsafe { sys::madvise(region.base(), region.len(), libc::MADV_DONTNEED) };
        for at in 0..self.children.len() {
            self.tell_orphaned(at);
        }
    }

    fn tell_orphaned(&mut self, at: usize) {
        let child = &mut self.children[at];
        if let Some([_, bell]) = &child.channel {
            // A light child pages for itself first. One that is gone is noticed by its calls.
            let kind = if child.kin.is_none() { channel::GROW } else { channel::ORPHANED };
            child.asked_to_grow |= kind == channel::GROW;
            let _ = channel::send(bell.as_raw_fd(), Message::of(kind), &[]);
        }
    }

    /// True if the child has no such memory any more.
    fn is_gone(&self, at: usize) -> bool {
        let Some(faults) = &self.children[at].faults else { return false };
        // Lifting a protection that the one page of zeros at our end never had changes nothing in the
        // child; the kernel looks for the child's memory before it looks at the address.
        // SAFETY: as said.
        let asked = unsafe { faults.unprotect(self.pager.zeros, PAGE_BYTES, false) };
        matches!(asked, Err(error) if error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Reads what a light child's memory reports. False if the child is gone.
    fn faults(&mut self, at: usize) -> bool {
        let mut events = Vec::new();
        match self.children[at].faults.as_ref().map(|faults| faults.read(&mut events)) {
            Some(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => return false,
            _ => {}
        }
        for event in events {
            match event {
                Event::Fault(fault) => self.fault(at, fault),
                Event::Fork(grandchild) => self.adopt(at, Some(grandchild)),
                Event::Other(_) => {}
            }
        }
        true
    }

    /// A light child has forked: its child was given what it was given, and needs what it needs. Where it opens
    /// its faults itself it is adopted before it is there; if it never is, its channel hangs up.
    fn adopt(&mut self, at: usize, faults: Option<Uffd>) {
        let child = &mut self.children[at];
        let mut grandchild =
            Child::new(None, child.forks.take(), child.picture.clone(), Touched::new());
        grandchild.touched = child.touched.clone();
        grandchild.given = child.given;
        let known = faults.as_ref().map(|faults| introduce(faults, grandchild.channel.as_ref()));
        if known.is_none_or(|known| known.is_ok()) {
            grandchild.faults = faults;
            self.pager.forks.one_more();
            self.add(*grandchild);
        }
    }

    /// Hears a child. False if it is gone or needs nothing more.
    fn listen(&mut self, at: usize) -> bool {
        let child = &mut self.children[at];
        let Some([calls, _]) = &child.channel else { return true };
        let calls = calls.as_raw_fd();
        let Ok((message, fds)) = channel::receive(calls) else { return false };
        let range = message.start..message.end;
        match message.kind {
            channel::READ => return self.read(at, calls, range).is_ok(),
            channel::TAKE => {
                // What of its faults was read and not served is reported again when it wakes them.
                child.faults = None;
                let [kin, _] = fds;
                child.kin = kin;
                let taken = channel::send_blocks(calls, &child.blocks());
                if self.orphaned && taken.is_ok() {
                    self.tell_orphaned(at);
                }
                return taken.is_ok();
            }
            channel::FORKS => {
                child.forks = match fds {
                    [Some(calls), Some(bell)] => Some([calls, bell]),
                    _ => None,
                };
                if !self.pager.fork_events && child.forks.is_some() {
                    self.adopt(at, None);
                }
            }
            channel::FAULTS if child.faults.is_none() && child.kin.is_none() => {
                let [faults, _] = fds;
                child.faults = faults.map(Uffd::from_fd);
                return child.faults.as_ref().is_some_and(|own| own.set_nonblocking().is_ok());
            }
            channel::DROPPED => child.forget(range),
            channel::GROW => child.ask_to_grow(),
            _ => return false,
        }
        channel::send(calls, Message::of(channel::DONE), &[]).is_ok()
    }

    /// Hears the keeper of a grown child. It may end any time, and come again.
    fn listen_to_kin(&mut self, at: usize) -> bool {
        let Some(kin) = self.children[at].kin.as_ref().map(|kin| kin.as_raw_fd()) else {
            return true;
        };
        match channel::receive(kin) {
            Ok((Message { kind: channel::READ, start, end }, _)) => {
                self.read(at, kin, start..end).is_ok()
            }
            _ => false,
        }
    }

    /// Pages for a child that pages for itself.
    fn read(&mut self, at: usize, calls: RawFd, range: Range<u32>) -> io::Result<()> {
        let pages = range.len();
        if pages == 0 || pages > channel::PAGES_AT_ONCE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let first = self.pager.child_frames();
        let mut pairs = Vec::with_capacity(pages);
        for (index, page) in range.enumerate() {
            let frame = crate::staging::FrameId(first.0 + index as u32);
            match self.children[at].slot(PageId(page)) {
                Some(slot) => pairs.push((slot, frame)),
                // SAFETY: the keeper's frame.
                None => unsafe { self.pager.staging.address(frame).write_bytes(0, PAGE_BYTES) },
            }
        }
        self.pager.transfer(Lane::Sync, false, &pairs);
        self.pager.stats.add(Counter::PagesToChildren, pages as u64);
        // SAFETY: the keeper's frames, as many as a call may ask for.
        unsafe { channel::send_pages(calls, self.pager.staging.address(first), pages) }
    }

    /// A fault of a light child.
    fn fault(&mut self, at: usize, fault: Fault) {
        let (pager, child) = (self.pager, &mut self.children[at]);
        let Some(faults) = &child.faults else { return };
        let page = pager.region.page(fault.address);
        if fault.write_protected {
            // SAFETY: memory of the child's, of which we serve the faults.
            let _ = unsafe { faults.unprotect(fault.address, PAGE_BYTES, true) };
            return;
        }
        if child.channel.is_some() {
            if child.given >= 2 * GIVEN_BEFORE_GROWTH {
                // It is growing: it serves this one itself.
                return;
            }
        } else if child.given >= pager.limit {
            sys::say(&format!(
                "a process that process {} made by a raw system call has outgrown its bound, so it \
                 ends now; fork() has no such limit",
                crate::descriptor::program()
            ));
            // SAFETY: a thread of the child's, by the kernel's own report.
            unsafe { libc::kill(fault.thread as i32, libc::SIGKILL) };
            return;
        }
        child.given += 1;
        child.touched.borrow_mut().insert(page.0 / channel::BLOCK_PAGES);
        let source = match child.slot(page) {
            Some(slot) => {
                let frame = pager.child_frames();
                pager.transfer(Lane::Sync, false, &[(slot, frame)]);
                pager.staging.address(frame) as usize
            }
            None => pager.zeros,
        };
        // SAFETY: memory of the child's, of which we serve the faults; a page of zeros or a frame.
        match unsafe { faults.copy(fault.address, source, PAGE_BYTES, false) } {
            Ok(_) => pager.stats.add(Counter::PagesToChildren, 1),
            // It is there already, or the child is going, or its layout changed: it tries again.
            Err(_) => drop(faults.wake(fault.address, PAGE_BYTES)),
        }
        if child.given >= GIVEN_BEFORE_GROWTH {
            child.ask_to_grow();
        }
    }
}

impl Child {
    fn ask_to_grow(&mut self) {
        if let Some([_, bell]) = &self.channel
            && !std::mem::replace(&mut self.asked_to_grow, true)
        {
            let _ = channel::send(bell.as_raw_fd(), Message::of(channel::GROW), &[]);
        }
    }

    fn slot(&self, page: PageId) -> Option<SlotId> {
        let at = self.picture.binary_search_by_key(&page, |&(page, _)| page).ok()?;
        Some(self.picture[at].1)
    }

    fn forget(&mut self, range: Range<u32>) {
        let at = |page: u32| self.picture.partition_point(|&(p, _)| p.0 < page);
        let dropped = at(range.start)..at(range.end.max(range.start));
        if !dropped.is_empty() {
            Arc::make_mut(&mut self.picture).drain(dropped);
        }
    }

    /// All blocks in which the child may have a page, and the pages there that we have.
    fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let touched = self.touched.borrow();
        let mut given = touched.iter().copied().peekable();
        let empty = |index: u32| Block { index: u64::from(index), bits: [0; 8] };
        for &(page, _) in self.picture.iter() {
            let index = page.0 / channel::BLOCK_PAGES;
            while let Some(other) = given.next_if(|&other| other <= index) {
                blocks.extend((other < index).then(|| empty(other)));
            }
            if blocks.last().is_none_or(|last| last.index != u64::from(index)) {
                blocks.push(empty(index));
            }
            let bit = page.0 % channel::BLOCK_PAGES;
            let last = blocks.last_mut().expect("just pushed");
            last.bits[bit as usize / 64] |= 1 << (bit % 64);
        }
        blocks.extend(given.map(empty));
        blocks
    }
}

/// Tells a child the descriptor of its faults. An error if it is gone already.
pub(super) fn introduce(faults: &Uffd, channel: Option<&[OwnedFd; 2]>) -> io::Result<()> {
    faults.set_nonblocking()?;
    match channel {
        Some([_, bell]) => {
            channel::send(bell.as_raw_fd(), Message::of(channel::FAULTS), &[faults.as_raw_fd()])
        }
        None => Ok(()),
    }
}
