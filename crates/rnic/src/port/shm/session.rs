//! The host's side of an attached process.
//!
//! A session is fed by whoever has accepted the connection: it has no socket. It trusts nothing in
//! a request. Memory is accepted only as a descriptor of ordinary shared memory, sealed against
//! shrinking, whose size is checked once; then it is mapped once, and stays mapped for as long as a
//! region or queue uses it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use rustix::fs::SealFlags;

use super::super::control::{Reply, Verb};
use super::super::error::Error;
use super::host::{Host, Removal, SharedPage};
use super::wire::{Request, Response, Span, VERSION};
use crate::memory::DmaMemory;
use crate::verbs::FunctionLimits;

/// `f_type` of a file system whose files are ordinary shared memory (`TMPFS_MAGIC`). Memory of huge
/// pages is another one's: touching it can fail when none is left.
const TMPFS: u64 = 0x0102_1994;

/// What an attached process may have.
#[derive(Clone, Debug)]
pub struct SessionLimits {
    /// Its function's objects.
    pub function: FunctionLimits,
    /// Descriptors of shared memory at a time.
    pub memories: usize,
    /// Bytes of shared memory at a time.
    pub memory_bytes: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self { function: FunctionLimits::default(), memories: 4096, memory_bytes: 1 << 40 }
    }
}

/// One attached process. Dropping it removes its function from the NIC: first its keys die, then
/// its queues end.
pub struct Session {
    host: Host,
    limits: SessionLimits,
    function: Option<Removal>,
    memories: HashMap<u32, DmaMemory>,
    next_memory: u32,
    memory_bytes: u64,
}

/// A response with the descriptors that go with it.
type Answer = (Response, Vec<OwnedFd>);

impl Session {
    /// A session for a connection that has just named the service.
    pub fn new(host: &Host, limits: SessionLimits) -> Self {
        Self {
            host: host.clone(),
            limits,
            function: None,
            memories: HashMap::new(),
            next_memory: 0,
            memory_bytes: 0,
        }
    }

    /// Does what a request asks; gives the response to be sent. Whatever is wrong with a request
    /// is said in the response.
    ///
    /// Waits for the NIC thread, for microseconds.
    pub fn handle(&mut self, request: &[u8], descriptors: Vec<OwnedFd>) -> (Vec<u8>, Vec<OwnedFd>) {
        let (response, descriptors) =
            self.answer(request, descriptors).unwrap_or_else(|e| match e {
                // That it was the NIC that refused, the client's error says already.
                Error::Verb(e) => (Response::Error(e.to_string()), Vec::new()),
                e => (Response::Error(e.to_string()), Vec::new()),
            });
        (serde_json::to_vec(&response).expect("a response is plain data"), descriptors)
    }

    fn answer(&mut self, request: &[u8], descriptors: Vec<OwnedFd>) -> Result<Answer, Error> {
        let request: Request =
            serde_json::from_slice(request).map_err(|e| protocol(format!("a request: {e}")))?;
        match (request, &self.function) {
            (Request::Hello { version }, None) => self.open(version),
            (Request::Hello { .. }, Some(_)) => Err(protocol("a second hello".to_string())),
            (_, None) => Err(protocol("a request before the hello".to_string())),
            (Request::AddMemory { bytes }, Some(_)) => {
                let number = self.add_memory(bytes, descriptors)?;
                Ok((Response::Memory(number), Vec::new()))
            }
            (Request::RemoveMemory { memory }, Some(_)) => {
                let memory = self.memories.remove(&memory).ok_or_else(|| unknown(memory))?;
                self.memory_bytes -= memory.len() as u64;
                Ok((Response::Reply(Reply::Done), Vec::new()))
            }
            (Request::Verb(verb), Some(function)) => {
                let id = function.id;
                let verb: Verb<DmaMemory> = verb.try_map(|span| self.resolve(span))?;
                let reply = self.host.call(move |nic| nic.execute(id, verb))??;
                Ok((Response::Reply(reply), Vec::new()))
            }
        }
    }

    fn open(&mut self, version: u32) -> Result<Answer, Error> {
        if version != VERSION {
            return Err(protocol(format!(
                "version {version} of the attach protocol, and this NIC speaks {VERSION}; use the \
                 same release on both sides"
            )));
        }
        let (function, SharedPage { fd, wake, doorbells }) =
            self.host.shared_function(self.limits.function.clone())?;
        self.function = Some(function);
        Ok((Response::Welcome { version, doorbells }, vec![fd, wake]))
    }

    fn add_memory(&mut self, bytes: u64, descriptors: Vec<OwnedFd>) -> Result<u32, Error> {
        let [fd] = <[OwnedFd; 1]>::try_from(descriptors)
            .map_err(|d| protocol(format!("{} descriptors with add_memory, not one", d.len())))?;
        if self.memories.len() >= self.limits.memories {
            return Err(limit("pieces of shared memory", self.limits.memories as u64));
        }
        if bytes > self.limits.memory_bytes - self.memory_bytes {
            return Err(limit("bytes of shared memory", self.limits.memory_bytes));
        }
        let memory = map_sealed(&fd, bytes)?;
        let number = self.next_memory;
        self.next_memory += 1;
        self.memory_bytes += memory.len() as u64;
        self.memories.insert(number, memory);
        Ok(number)
    }

    fn resolve(&self, span: Span) -> Result<DmaMemory, Error> {
        let memory = self.memories.get(&span.memory).ok_or_else(|| unknown(span.memory))?;
        let part = match (usize::try_from(span.offset), usize::try_from(span.bytes)) {
            (Ok(offset), Ok(bytes)) => memory.slice(offset, bytes),
            _ => None,
        };
        part.ok_or_else(|| {
            protocol(format!(
                "{} bytes at {} of memory {}, which has {}",
                span.bytes,
                span.offset,
                span.memory,
                memory.len()
            ))
        })
    }
}

/// Maps a descriptor that a client sent, if touching it can never fail.
fn map_sealed(fd: &OwnedFd, bytes: u64) -> Result<DmaMemory, Error> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| {
        protocol("the descriptor is not of shared memory that can be sealed (memfd)".to_string())
    })?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(protocol(
            "the shared memory is not sealed against shrinking (F_SEAL_SHRINK)".to_string(),
        ));
    }
    let kind = rustix::fs::fstatfs(fd).map_err(Error::system("looking at shared memory"))?.f_type;
    if kind as u64 != TMPFS {
        return Err(protocol("the shared memory is not of ordinary pages".to_string()));
    }
    let size = rustix::fs::fstat(fd).map_err(Error::system("looking at shared memory"))?.st_size;
    let page = rustix::param::page_size() as u64;
    if bytes == 0 || bytes > size as u64 || !bytes.is_multiple_of(page) {
        return Err(protocol(format!(
            "{bytes} bytes of shared memory that has {size}; whole pages of it can be shared"
        )));
    }
    let bytes = usize::try_from(bytes).map_err(|_| protocol(format!("{bytes} bytes")))?;
    DmaMemory::map_shared(fd, 0, bytes).map_err(Error::system("mapping shared memory"))
}

fn protocol(what: String) -> Error {
    Error::Protocol { what }
}

fn unknown(memory: u32) -> Error {
    protocol(format!("memory {memory}, which is not shared"))
}

fn limit(what: &'static str, limit: u64) -> Error {
    crate::error::Error::Limit { what, limit }.into()
}
