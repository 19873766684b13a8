//! The client's side: a process that has attached to the NIC of another one.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::super::control::{Reply, Verb};
use super::super::error::Error;
use super::super::events::EventWord;
use super::doorbell::{ASLEEP_RNR, GONE, MappedDoorbell, Page, SLEEPING, doorbells_in, page_bytes};
use super::sharing;
use super::socket::{self, Packet};
use super::wire::{Request, Response, SERVICE, Secret, Span, VERSION};
use crate::memory::DmaMemory;

/// A host that does not answer for this long is taken for dead.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Doorbells that a client brings room for: two pages' worth. The host may allow less.
const DOORBELLS_WANTED: u32 = 2016;

/// A function of another process's NIC. It ends with its last clone and the last of its memory.
#[derive(Clone)]
pub struct Attached(Arc<Inner>);

/// What an attached process shares with the NIC, without the protocol. See [`Attached::raw`].
pub struct Raw<'a> {
    /// The doorbell page: [`raw`](super::raw) has the offsets of its words.
    pub doorbells: DmaMemory,
    /// Doorbells in the page.
    pub slots: u32,
    /// The eventfd that wakes the NIC.
    pub wake: BorrowedFd<'a>,
    /// The session's socket, for packets with [`socket`](super::socket). A verb of the [`Attached`]
    /// takes the next packet that arrives for its answer.
    pub socket: BorrowedFd<'a>,
}

struct Inner {
    /// One request at a time.
    socket: Mutex<OwnedFd>,
    /// The same socket, for looking whether the host is still there.
    watched: OwnedFd,
    secret: Secret,
    page: Arc<Page>,
    /// Memory that the host has mapped, by its first address here.
    memories: Mutex<BTreeMap<u64, Shared>>,
    /// Why the host is given up.
    gone: OnceLock<String>,
}

#[derive(Clone, Copy)]
struct Shared {
    number: u32,
    bytes: u64,
}

impl Attached {
    /// Connects to the socket at `path` and opens a function.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let system = Error::system("connecting to the NIC's socket");
        let address = SocketAddrUnix::new(path).map_err(&system)?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(&system)?;
        rustix::net::connect(&socket, &address).map_err(&system)?;
        Self::open(socket)
    }

    /// Opens a function over a connected `SOCK_SEQPACKET` socket.
    pub fn open(socket: OwnedFd) -> Result<Self, Error> {
        let timeout = Some(ANSWER_TIMEOUT);
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, timeout)
            .map_err(Error::system("setting the timeout of the NIC's socket"))?;
        socket::send(&socket, SERVICE.as_bytes(), &[])
            .map_err(Error::system("naming the service to the NIC's process"))?;
        let (page, memory) = sharing::make("granary-doorbells", page_bytes(DOORBELLS_WANTED))?;
        let hello = Request::Hello { version: VERSION, bytes: memory.len() as u64 };
        let (response, descriptors) = exchange(&socket, &hello, Some(&page)).map_err(gone)?;
        let (doorbells, secret) = match response {
            Response::Welcome { doorbells, secret, .. } => (doorbells, secret),
            Response::Error(why) => return Err(Error::Refused { why }),
            _ => return Err(unexpected("a hello")),
        };
        let [wake] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|d| Error::Protocol {
            what: format!("{} descriptors with the welcome, not one", d.len()),
        })?;
        if doorbells > doorbells_in(memory.len()) {
            let what = format!("{doorbells} doorbells in a page of {} bytes", memory.len());
            return Err(Error::Protocol { what });
        }
        let watched = socket
            .try_clone()
            .map_err(|source| Error::System { attempt: "duplicating the NIC's socket", source })?;
        Ok(Self(Arc::new(Inner {
            socket: Mutex::new(socket),
            watched,
            secret,
            page: Arc::new(Page { memory, slots: doorbells, wake, seat: None }),
            memories: Mutex::new(BTreeMap::new()),
            gone: OnceLock::new(),
        })))
    }

    /// The session's secret: with it another connection to the host's process is tied to this one.
    pub fn secret(&self) -> Secret {
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

    /// Memory of this process that the host has mapped too.
    pub fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        let (fd, memory) = sharing::make("granary-dma", bytes)?;
        let bytes = memory.len() as u64;
        let number = match self.0.ask(&Request::AddMemory { bytes }, Some(&fd))? {
            Response::Memory(number) => number,
            _ => return Err(unexpected("add_memory")),
        };
        self.0.memories.lock().insert(memory.addr(), Shared { number, bytes });
        let (base, len) = (memory.as_ptr(), memory.len());
        let owner = Owner { memory, function: Arc::downgrade(&self.0) };
        // SAFETY: `owner` keeps the mapping; it is used through raw pointers and atomics only.
        Ok(unsafe { DmaMemory::from_raw(base, len, Arc::new(owner)) })
    }

    /// Whether the host is still there.
    pub fn check_alive(&self) -> Result<(), Error> {
        self.0.check_alive()
    }

    /// Yields the calling thread's CPU to the NIC if that runs there; false if it does not.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        self.0.page.offer_cpu()
    }

    /// What this process shares with the NIC besides the memory of [`Attached::alloc_dma`], as it
    /// is: nothing keeps what is done with it to the protocol.
    ///
    /// For tests that play a hostile client. The NIC trusts none of it, so that a client has no need of
    /// this and does no harm to others with it.
    pub fn raw(&self) -> Raw<'_> {
        let inner = &*self.0;
        Raw {
            doorbells: inner.page.memory.clone(),
            slots: inner.page.slots,
            wake: inner.page.wake.as_fd(),
            socket: inner.watched.as_fd(),
        }
    }

    /// Descriptors that the data path and the verbs need: for a thread with a descriptor table of
    /// its own.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let socket = self.0.socket.lock().as_raw_fd();
        vec![socket, self.0.watched.as_raw_fd(), self.0.page.wake.as_raw_fd()]
    }

    /// The word that who waits for asynchronous events sleeps on.
    pub fn event_word(&self) -> EventWord {
        self.0.page.event_word()
    }

    /// The doorbell in `slot`.
    pub fn doorbell(&self, slot: u32) -> Result<MappedDoorbell, Error> {
        let page = &self.0.page;
        MappedDoorbell::new(page.clone(), slot)
            .ok_or_else(|| Error::Protocol { what: format!("doorbell {slot} of {}", page.slots) })
    }

    /// To be called after a receive was posted.
    #[inline]
    pub fn receive_posted(&self) {
        self.0.page.wake_if_asleep(ASLEEP_RNR);
    }
}

impl Inner {
    /// Sends a request and waits for its response; an error if the host refuses or is gone.
    fn ask(&self, request: &Request, descriptor: Option<&OwnedFd>) -> Result<Response, Error> {
        let socket = self.socket.lock();
        if let Some(why) = self.gone.get() {
            return Err(gone(why.clone()));
        }
        match exchange(&socket, request, descriptor) {
            Ok((Response::Error(why), _)) => Err(Error::Refused { why }),
            Ok((response, _)) => Ok(response),
            Err(why) => {
                // After a failed exchange requests and responses may be out of step: no more of them.
                let _ = self.gone.set(why.clone());
                Err(gone(why))
            }
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

    /// Where `memory` lies in what the host has mapped.
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

/// Keeps a mapping, and tells the host when it ends.
struct Owner {
    memory: DmaMemory,
    function: Weak<Inner>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(function) = self.function.upgrade() else { return };
        // Before the address can be used again.
        let shared = function.memories.lock().remove(&self.memory.addr());
        if let Some(Shared { number, .. }) = shared {
            // If the host is gone, so is its mapping.
            let _ = function.ask(&Request::RemoveMemory { memory: number }, None);
        }
    }
}

/// One request and its response; an error says why the host is given up.
fn exchange(
    socket: &OwnedFd,
    request: &Request,
    descriptor: Option<&OwnedFd>,
) -> Result<(Response, Vec<OwnedFd>), String> {
    let bytes = serde_json::to_vec(request).expect("a request is plain data");
    let fds: Vec<_> = descriptor.iter().map(|fd| fd.as_fd()).collect();
    socket::send(socket, &bytes, &fds).map_err(|e| format!("sending it a request: {e}"))?;
    let Packet { bytes, descriptors } = match socket::receive(socket) {
        Ok(Some(packet)) => packet,
        Ok(None) => return Err("its process has closed the connection".to_string()),
        Err(rustix::io::Errno::AGAIN) => {
            return Err(format!("its process did not answer for {} s", ANSWER_TIMEOUT.as_secs()));
        }
        Err(e) => return Err(format!("receiving its answer: {e}")),
    };
    let response = serde_json::from_slice(&bytes).map_err(|e| format!("its answer: {e}"))?;
    Ok((response, descriptors))
}

fn gone(why: String) -> Error {
    Error::Gone { why }
}

fn unexpected(request: &str) -> Error {
    Error::Protocol { what: format!("an answer that is not one to {request}") }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
