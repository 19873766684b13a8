//! The host side of an attached process.
//!
//! A session has no socket: the event loop that has accepted the connection passes requests to the
//! session and sends its responses. The session trusts nothing in a request. Memory is accepted
//! under the conditions of [`sharing`](super::sharing), mapped once, and stays mapped and counts
//! against the limits for as long as a region or queue uses it. The session unmaps memory, not the
//! NIC thread, because unmapping takes time.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use super::super::control::{Reply, Verb};
use super::super::error::Error;
use super::host::{Host, Piece, Removal};
use super::nic_thread::NicThread;
use super::protocol::{MESSAGE_MAX, Request, Response, Span, VERSION};
use super::socket::close_deferred;
use super::{page, sharing};
use crate::limits::FunctionLimits;
use verbs::{DmaMemory, Qpn, SessionSecret};

/// Maximum bytes of an error text, which may quote the client's request.
const WHY_MAX: usize = 1024;
/// QPs that the NIC thread looks up in one job: a few microseconds.
const QUERIES: usize = 128;

/// Limits of an attached process.
#[derive(Clone, Debug)]
pub struct SessionLimits {
    /// Limits of its function's objects.
    pub function: FunctionLimits,
    /// Maximum pieces of shared memory at a time. All sessions of a NIC together may have 32,768,
    /// because a process has a limited number of mappings. Beyond that, sessions with fewer than 64
    /// pieces may share more, up to 49,152 in total.
    pub memories: usize,
    /// Maximum bytes of shared memory at a time.
    pub memory_bytes: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self { function: FunctionLimits::default(), memories: 1024, memory_bytes: 64 << 30 }
    }
}

/// One attached process. Dropping the session removes its function from the NIC: first its keys
/// become invalid, then its queues end.
pub struct Session {
    host: Host,
    limits: SessionLimits,
    // Declared, and so dropped, before the memory: the last reference to a mapping is then dropped
    // by this thread, not by the NIC thread.
    function: Option<Removal>,
    page: Option<DmaMemory>,
    secret: Option<SessionSecret>,
    memories: HashMap<u32, Shared>,
    /// Memory that is no longer shared, but that regions or queues may still use.
    ended: Vec<Shared>,
    next_memory: u32,
    memory_bytes: u64,
}

/// A piece of a client's memory.
struct Shared {
    memory: DmaMemory,
    _piece: Piece,
}

/// A response with the descriptors that go with it.
type Answer = (Response, Vec<OwnedFd>);

impl Session {
    /// Makes a session for a connection whose client has just named the service.
    pub fn new(host: &Host, limits: SessionLimits) -> Self {
        Self {
            host: host.clone(),
            limits,
            function: None,
            page: None,
            secret: None,
            memories: HashMap::new(),
            ended: Vec::new(),
            next_memory: 0,
            memory_bytes: 0,
        }
    }

    /// Whether the client's hello was accepted, so that the session has a function.
    pub fn is_open(&self) -> bool {
        self.function.is_some()
    }

    /// The session's secret, if the session is open. Only its client has received the secret.
    pub fn secret(&self) -> Option<SessionSecret> {
        self.secret
    }

    /// Whether all these QPs belong to the session's function. Waits for the NIC thread, once for
    /// each `QUERIES` QPs.
    pub fn owns_all(&self, qpns: &[Qpn]) -> Result<bool, Error> {
        let Some(function) = &self.function else { return Ok(false) };
        let id = function.id;
        for some in qpns.chunks(QUERIES) {
            let some = some.to_vec();
            let owned = move |nic: &mut NicThread| {
                some.iter().all(|qpn| nic.core.engine.query_qp(id, *qpn).is_ok())
            };
            if !self.host.call(owned)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Executes a request, and returns the response with its descriptors. An error in the request
    /// is reported in the response.
    ///
    /// Waits some microseconds for the NIC thread.
    pub fn handle(&mut self, request: &[u8], descriptors: Vec<OwnedFd>) -> (Vec<u8>, Vec<OwnedFd>) {
        self.unmap_ended();
        let answer = self.answer(request, &descriptors);
        // Deferred, because the client can send descriptors whose close takes arbitrarily long.
        descriptors.into_iter().for_each(close_deferred);
        let (response, descriptors) = answer.unwrap_or_else(|e| {
            let mut why = match e {
                // Without the prefix of `Error::Verb`, which the client adds itself.
                Error::Verb(e) => e.to_string(),
                e => e.to_string(),
            };
            truncate(&mut why, WHY_MAX);
            (Response::Error(why), Vec::new())
        });
        let bytes = serde_json::to_vec(&response).expect("a response is plain data");
        debug_assert!(bytes.len() <= MESSAGE_MAX);
        (bytes, descriptors)
    }

    fn answer(&mut self, request: &[u8], descriptors: &[OwnedFd]) -> Result<Answer, Error> {
        let request: Request = serde_json::from_slice(request)
            .map_err(|e| protocol(format!("malformed request: {e}")))?;
        match (request, &self.function) {
            (Request::Hello { version, bytes }, None) => self.open(version, bytes, descriptors),
            (Request::Hello { .. }, Some(_)) => Err(protocol("a second hello".to_string())),
            (_, None) => Err(protocol("a request before the hello".to_string())),
            (Request::AddMemory { bytes }, Some(_)) => {
                let number = self.add_memory(bytes, descriptors)?;
                Ok((Response::Memory(number), Vec::new()))
            }
            (Request::RemoveMemory { memory }, Some(_)) => {
                let memory = self.memories.remove(&memory).ok_or_else(|| unknown(memory))?;
                self.ended.push(memory);
                self.unmap_ended();
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

    fn open(&mut self, version: u32, bytes: u64, page: &[OwnedFd]) -> Result<Answer, Error> {
        if version != VERSION {
            return Err(protocol(format!(
                "the client speaks version {version}, this NIC version {VERSION}; use the same \
                 release on both sides"
            )));
        }
        let range = page::page_bytes(1)..=page::PAGE_BYTES_MAX;
        if !usize::try_from(bytes).is_ok_and(|bytes| range.contains(&bytes)) {
            return Err(protocol(format!(
                "the doorbell page has {bytes} bytes; it must have {} to {}",
                range.start(),
                range.end()
            )));
        }
        let page = sharing::adopt(only_one("hello", page)?, bytes)?;
        let secret =
            SessionSecret::random().map_err(Error::system("drawing a session's secret"))?;
        let (function, doorbells, wake) =
            self.host.shared_function(self.limits.function.clone(), page.clone())?;
        self.function = Some(function);
        self.page = Some(page);
        self.secret = Some(secret);
        Ok((Response::Welcome { version, doorbells, secret }, vec![wake]))
    }

    fn add_memory(&mut self, bytes: u64, descriptors: &[OwnedFd]) -> Result<u32, Error> {
        let fd = only_one("add_memory", descriptors)?;
        let held = self.memories.len() + self.ended.len();
        if held >= self.limits.memories {
            return Err(limit("pieces of shared memory", self.limits.memories as u64));
        }
        if bytes > self.limits.memory_bytes - self.memory_bytes {
            return Err(limit("bytes of shared memory", self.limits.memory_bytes));
        }
        let piece = self.host.take_piece(held)?;
        let memory = sharing::adopt(fd, bytes)?;
        let number = self.next_memory;
        self.next_memory =
            number.checked_add(1).ok_or_else(|| limit("numbers", u32::MAX as u64))?;
        self.memory_bytes += memory.len() as u64;
        self.memories.insert(number, Shared { memory, _piece: piece });
        Ok(number)
    }

    /// Unmaps memory that is no longer shared and no longer used.
    fn unmap_ended(&mut self) {
        let bytes = &mut self.memory_bytes;
        self.ended.retain(|shared| {
            // An unused mapping stays unused: only an existing user could pass it on.
            let in_use = shared.memory.is_shared();
            if !in_use {
                *bytes -= shared.memory.len() as u64;
            }
            in_use
        });
    }

    fn resolve(&self, span: Span) -> Result<DmaMemory, Error> {
        let shared = self.memories.get(&span.memory).ok_or_else(|| unknown(span.memory))?;
        let memory = &shared.memory;
        let part = match (usize::try_from(span.offset), usize::try_from(span.bytes)) {
            (Ok(offset), Ok(bytes)) => memory.slice(offset, bytes),
            _ => None,
        };
        part.ok_or_else(|| {
            protocol(format!(
                "{} bytes at {} exceed memory {}, which has {} bytes",
                span.bytes,
                span.offset,
                span.memory,
                memory.len()
            ))
        })
    }
}

fn truncate(text: &mut String, max: usize) {
    if let Some(at) = (0..=max).rev().find(|at| text.is_char_boundary(*at)) {
        text.truncate(at);
    }
}

fn only_one<'a>(request: &str, descriptors: &'a [OwnedFd]) -> Result<&'a OwnedFd, Error> {
    match descriptors {
        [fd] => Ok(fd),
        d => Err(protocol(format!("{request} came with {} descriptors instead of one", d.len()))),
    }
}

fn protocol(what: String) -> Error {
    Error::Protocol { what }
}

fn unknown(memory: u32) -> Error {
    protocol(format!("memory {memory} is not shared"))
}

fn limit(what: &'static str, limit: u64) -> Error {
    crate::error::Error::Limit { what, limit }.into()
}
