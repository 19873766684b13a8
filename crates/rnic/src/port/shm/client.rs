//! The client side: a process that attaches to the NIC of another process.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::super::control::{Reply, Verb};
use super::super::error::Error;
use super::super::events::EventWord;
use super::doorbell::{DoorbellPage, MappedDoorbell};
use super::lend::{Arena, LendableMemory, Shareable};
use super::page::{ASLEEP_RNR, GONE, SLEEPING, doorbells_in, page_bytes};
use super::protocol::{Request, Response, SERVICE, Span, VERSION};
use super::sharing;
use super::socket::{self, Packet};
use verbs::{DmaMemory, SessionSecret};

/// Time without a response after which a verb fails. (In unit tests a host that does not respond is
/// waited for.)
const ANSWER_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });
/// Time limit of the verbs after that one, until the host responds again.
const SILENT_TIMEOUT: Duration = Duration::from_millis(10);

/// Number of doorbells for which a client allocates its doorbell page: two pages. The host may
/// allow fewer.
pub(super) const DOORBELLS_WANTED: u32 = 2016;

/// A function of another process's NIC. The function ends when its last clone and all its memory
/// are dropped.
#[derive(Clone)]
pub struct Attached(Arc<Inner>);

/// The objects that an attached process shares with the NIC, for direct access. See
/// [`Attached::raw`].
pub struct Raw<'a> {
    /// The doorbell page. [`raw`](super::raw) defines the offsets of its words.
    pub doorbells: DmaMemory,
    /// Doorbells in the page.
    pub slots: u32,
    /// The eventfd that wakes the NIC.
    pub wake: BorrowedFd<'a>,
    /// The session's socket, for packets with [`socket`](super::socket). Every verb of the
    /// [`Attached`] takes the next received packet as its response.
    pub socket: BorrowedFd<'a>,
}

struct Inner {
    /// One request at a time.
    socket: Mutex<Session>,
    /// A duplicate of the socket, polled without the lock to detect the end of the host.
    watched: OwnedFd,
    secret: SessionSecret,
    page: Arc<DoorbellPage>,
    /// Memory that the host has mapped, by its first address in this process.
    memories: Mutex<BTreeMap<u64, Shared>>,
    /// Memory that another process has mapped too, if queues can be lent.
    arena: OnceLock<Arena>,
    /// The reason, once the host is considered gone.
    gone: OnceLock<String>,
}

/// The session's socket.
struct Session {
    socket: OwnedFd,
    /// Responses to requests that have failed without one. They precede that of the next request.
    overdue: u32,
}

#[derive(Clone, Copy)]
struct Shared {
    number: u32,
    bytes: u64,
}

impl Attached {
    /// Connects to the socket at `path` and opens a function.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        Self::open(Self::socket(path)?)
    }

    /// Like [`Attached::connect`], with memory that a borrower has mapped already. The function
    /// allocates from the arena first.
    pub fn connect_lendable(path: &Path, lendable: LendableMemory) -> Result<Self, Error> {
        Self::open_lendable(Self::socket(path)?, lendable)
    }

    fn socket(path: &Path) -> Result<OwnedFd, Error> {
        let system = Error::system("connecting to the NIC's socket");
        let address = SocketAddrUnix::new(path).map_err(&system)?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(&system)?;
        // A host that is stopped accepts no connection when its queue is full.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(ANSWER_TIMEOUT))
            .map_err(&system)?;
        rustix::net::connect(&socket, &address).map_err(&system)?;
        Ok(socket)
    }

    /// Opens a function over a connected `SOCK_SEQPACKET` socket.
    pub fn open(socket: OwnedFd) -> Result<Self, Error> {
        let (file, memory) = sharing::make("granary-doorbells", page_bytes(DOORBELLS_WANTED))?;
        Self::open_with(socket, Shareable { file, memory })
    }

    /// Like [`Attached::open`], with memory that a borrower has mapped already.
    pub fn open_lendable(socket: OwnedFd, lendable: LendableMemory) -> Result<Self, Error> {
        let LendableMemory { page, arena } = lendable;
        let attached = Self::open_with(socket, page)?;
        let arena = attached.share(arena)?;
        let _ = attached.0.arena.set(Arena::new(arena));
        Ok(attached)
    }

    fn open_with(socket: OwnedFd, page: Shareable) -> Result<Self, Error> {
        let Shareable { file: page, memory } = page;
        socket::send(&socket, SERVICE.as_bytes(), &[])
            .map_err(Error::system("naming the service to the NIC's process"))?;
        let hello = Request::Hello { version: VERSION, bytes: memory.len() as u64 };
        let mut session = Session::new(socket);
        let (response, descriptors) = session.exchange(&hello, Some(&page))?;
        let (doorbells, secret) = match response {
            Response::Welcome { doorbells, secret, .. } => (doorbells, secret),
            Response::Error(why) => return Err(Error::Refused { why }),
            _ => return Err(unexpected("a hello")),
        };
        let [wake] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|d| Error::Protocol {
            what: format!("the welcome came with {} descriptors instead of one", d.len()),
        })?;
        if doorbells > doorbells_in(memory.len()) {
            let bytes = memory.len();
            let what =
                format!("the welcome names {doorbells} doorbells, too many for {bytes} bytes");
            return Err(Error::Protocol { what });
        }
        let watched = session
            .socket
            .try_clone()
            .map_err(|source| Error::System { attempt: "duplicating the NIC's socket", source })?;
        Ok(Self(Arc::new(Inner {
            socket: Mutex::new(session),
            watched,
            secret,
            page: Arc::new(DoorbellPage { memory, slots: doorbells, wake, driver: None }),
            memories: Mutex::new(BTreeMap::new()),
            arena: OnceLock::new(),
            gone: OnceLock::new(),
        })))
    }

    /// The session's secret, which ties another connection to the host's process to this session.
    pub fn secret(&self) -> SessionSecret {
        self.0.secret
    }

    /// Executes a control verb.
    pub fn execute(&self, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        let verb = verb.try_map(|memory| self.0.describe(&memory))?;
        match self.0.ask(&Request::Verb(verb), None)? {
            Response::Reply(reply) => Ok(reply),
            _ => Err(unexpected("a verb")),
        }
    }

    /// Allocates memory of this process and shares it with the host.
    pub fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        if let Some(part) = self.0.arena.get().and_then(|arena| arena.allocate(bytes)) {
            return Ok(part);
        }
        let (file, memory) = sharing::make("granary-dma", bytes)?;
        self.share(Shareable { file, memory })
    }

    /// Like [`Attached::alloc_dma`], in a memfd of its own. `show` is called before the host seals
    /// the memory, so that another process can map it ([`map_shared`](super::map_shared)).
    pub fn alloc_shown(
        &self,
        bytes: usize,
        show: &mut dyn FnMut(BorrowedFd<'_>),
    ) -> Result<DmaMemory, Error> {
        let (file, memory) = sharing::make("granary-dma", bytes)?;
        show(file.as_fd());
        self.share(Shareable { file, memory })
    }

    /// Offset of `memory` in the memory that a borrower has mapped; `None` if it lies elsewhere.
    pub fn lendable_offset(&self, memory: &DmaMemory) -> Option<usize> {
        self.0.arena.get()?.offset(memory)
    }

    /// A duplicate of the NIC's eventfd, for a borrower.
    pub fn wake(&self) -> Result<OwnedFd, Error> {
        self.0
            .page
            .wake
            .try_clone()
            .map_err(|source| Error::System { attempt: "duplicating the NIC's eventfd", source })
    }

    /// Shares memory with the host, which seals it.
    fn share(&self, memory: Shareable) -> Result<DmaMemory, Error> {
        let Shareable { file: fd, memory } = memory;
        let bytes = memory.len() as u64;
        let number = match self.0.ask(&Request::AddMemory { bytes }, Some(&fd))? {
            Response::Memory(number) => number,
            _ => return Err(unexpected("add_memory")),
        };
        self.0.memories.lock().insert(memory.addr(), Shared { number, bytes });
        let (base, len) = (memory.as_ptr(), memory.len());
        let owner = Owner { memory, function: Arc::downgrade(&self.0) };
        // SAFETY: `owner` keeps the mapping alive; it is used through raw pointers and atomics
        // only.
        Ok(unsafe { DmaMemory::from_raw(base, len, Arc::new(owner)) })
    }

    /// Returns an error if the host has ended.
    pub fn check_alive(&self) -> Result<(), Error> {
        self.0.check_alive()
    }

    /// Yields the calling thread's CPU to the NIC thread if the NIC thread runs on the same CPU;
    /// returns false otherwise.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        self.0.page.offer_cpu()
    }

    /// Direct access to the objects that this process shares with the NIC, besides the memory of
    /// [`Attached::alloc_dma`]. Nothing enforces the protocol.
    ///
    /// For tests that play a hostile client. An ordinary client does not need this access. It
    /// cannot harm other clients with it, because the NIC trusts none of these objects.
    pub fn raw(&self) -> Raw<'_> {
        let inner = &*self.0;
        Raw {
            doorbells: inner.page.memory.clone(),
            slots: inner.page.slots,
            wake: inner.page.wake.as_fd(),
            socket: inner.watched.as_fd(),
        }
    }

    /// Descriptors that the data path and the verbs need, for a thread that has its own descriptor
    /// table.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let socket = self.0.socket.lock().socket.as_raw_fd();
        vec![socket, self.0.watched.as_raw_fd(), self.0.page.wake.as_raw_fd()]
    }

    /// The futex word on which threads wait for asynchronous events.
    pub fn event_word(&self) -> EventWord {
        self.0.page.event_word()
    }

    /// The doorbell in `slot`.
    pub fn doorbell(&self, slot: u32) -> Result<MappedDoorbell, Error> {
        let page = &self.0.page;
        MappedDoorbell::new(page.clone(), slot).ok_or_else(|| Error::Protocol {
            what: format!("doorbell {slot} does not exist: the page has {}", page.slots),
        })
    }

    /// Must be called after a receive was posted.
    #[inline]
    pub fn receive_posted(&self) {
        self.0.page.wake_if_asleep(ASLEEP_RNR);
    }
}

impl Inner {
    /// Sends a request and waits for its response. Fails if the host rejects the request or is
    /// gone.
    fn ask(&self, request: &Request, descriptor: Option<&OwnedFd>) -> Result<Response, Error> {
        let mut session = self.socket.lock();
        if let Some(why) = self.gone.get() {
            return Err(gone(why.clone()));
        }
        let (response, _) = session.exchange(request, descriptor).inspect_err(|error| {
            // Requests and responses may be out of step: send no more.
            if let Error::Gone { why } = error {
                let _ = self.gone.set(why.clone());
            }
        })?;
        match response {
            Response::Error(why) => Err(Error::Refused { why }),
            response => Ok(response),
        }
    }

    fn check_alive(&self) -> Result<(), Error> {
        if let Some(why) = self.gone.get() {
            return Err(gone(why.clone()));
        }
        let mut fds = [PollFd::new(&self.watched, PollFlags::empty())];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = rustix::event::poll(&mut fds, Some(&now)).unwrap_or(0);
        let why = if ready > 0 && !fds[0].revents().is_empty() {
            "its process has closed the connection"
        } else if self.page.memory.word32(SLEEPING).load(Ordering::Relaxed) == GONE {
            "its thread has ended"
        } else {
            return Ok(());
        };
        Err(gone(self.gone.get_or_init(|| why.to_string()).clone()))
    }

    /// The position of `memory` within the memory that the host has mapped.
    fn describe(&self, memory: &DmaMemory) -> Result<Span, Error> {
        let memories = self.memories.lock();
        let (addr, bytes) = (memory.addr(), memory.len() as u64);
        if let Some((base, shared)) = memories.range(..=addr).next_back() {
            let offset = addr - base;
            if offset <= shared.bytes && bytes <= shared.bytes - offset {
                return Ok(Span { memory: shared.number, offset, bytes });
            }
        }
        Err(Error::NotDma { addr, len: memory.len() })
    }
}

/// Owns a mapping, and asks the host to unmap it when it is dropped.
struct Owner {
    memory: DmaMemory,
    function: Weak<Inner>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(function) = self.function.upgrade() else { return };
        // Removed before the address can be mapped again.
        let shared = function.memories.lock().remove(&self.memory.addr());
        if let Some(Shared { number, .. }) = shared {
            // Fails only if the host is gone, and its mapping with it.
            let _ = function.ask(&Request::RemoveMemory { memory: number }, None);
        }
    }
}

impl Session {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, overdue: 0 }
    }

    /// Sends one request and receives its response.
    ///
    /// # Errors
    /// [`Error::Unanswered`] if the host does not respond in time, and [`Error::Gone`] with the
    /// reason why the host is considered gone.
    fn exchange(
        &mut self,
        request: &Request,
        descriptor: Option<&OwnedFd>,
    ) -> Result<(Response, Vec<OwnedFd>), Error> {
        while self.overdue > 0 {
            // The caller of that request has got an error: its descriptors are closed.
            self.receive(SILENT_TIMEOUT)?;
            self.overdue -= 1;
        }
        let bytes = serde_json::to_vec(request).expect("a request is plain data");
        let fds: Vec<_> = descriptor.iter().map(|fd| fd.as_fd()).collect();
        socket::send(&self.socket, &bytes, &fds)
            .map_err(|e| gone(format!("sending a request: {e}")))?;
        let packet = self.receive(ANSWER_TIMEOUT).inspect_err(|error| {
            self.overdue += u32::from(matches!(error, Error::Unanswered { .. }));
        });
        let Packet { bytes, descriptors } = packet?;
        let response = serde_json::from_slice(&bytes)
            .map_err(|e| gone(format!("its response is malformed: {e}")))?;
        Ok((response, descriptors))
    }

    fn receive(&self, limit: Duration) -> Result<Packet, Error> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            match rustix::event::poll(&mut fds, Some(&left)) {
                Ok(0) => return Err(Error::Unanswered { waited: ANSWER_TIMEOUT }),
                Err(Errno::INTR) => {}
                // An error is that of the receive.
                _ => break,
            }
        }
        match socket::receive(&self.socket) {
            Ok(Some(packet)) => Ok(packet),
            Ok(None) => Err(gone("its process has closed the connection".to_string())),
            Err(e) => Err(gone(format!("receiving its response: {e}"))),
        }
    }
}

fn gone(why: String) -> Error {
    Error::Gone { why }
}

fn unexpected(request: &str) -> Error {
    Error::Protocol { what: format!("the response does not match the request ({request})") }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
