//! The host's side of an attached process.
//!
//! A session is fed by whoever has accepted the connection: it has no socket. It trusts nothing in
//! a request. Memory is accepted as [`sharing`](super::sharing) says, mapped once, and stays mapped for
//! as long as a region or queue uses it. It counts against the limits for as long, and it is the
//! session that unmaps it: that takes time, which is not the NIC thread's.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use super::super::control::{Reply, Verb};
use super::super::error::Error;
use super::host::{Host, Piece, Removal};
use super::nic_thread::NicThread;
use super::socket::close_aside;
use super::wire::{MESSAGE_MAX, Request, Response, Secret, Span, VERSION};
use super::{doorbell, sharing};
use crate::ids::Qpn;
use crate::memory::DmaMemory;
use crate::verbs::FunctionLimits;

/// The most bytes of an error's text: it may quote the client.
const WHY_MAX: usize = 1024;
/// QPs that the NIC thread looks up between two looks at its doorbells: some microseconds.
const QUERIES: usize = 128;

/// What an attached process may have.
#[derive(Clone, Debug)]
pub struct SessionLimits {
    /// Its function's objects.
    pub function: FunctionLimits,
    /// Pieces of shared memory at a time. A process has a limited number of mappings: all sessions of
    /// a NIC together may have 32768, and then each up to 64 until there are 49152.
    pub memories: usize,
    /// Bytes of shared memory at a time.
    pub memory_bytes: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self { function: FunctionLimits::default(), memories: 1024, memory_bytes: 64 << 30 }
    }
}

/// One attached process. Dropping it removes its function from the NIC: first its keys die, then
/// its queues end.
pub struct Session {
    host: Host,
    limits: SessionLimits,
    // Before the memory: what is mapped is unmapped here, not by the NIC thread.
    function: Option<Removal>,
    page: Option<DmaMemory>,
    secret: Option<Secret>,
    memories: HashMap<u32, Shared>,
    /// No longer shared; regions or queues may use them yet.
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
    /// A session for a connection that has just named the service.
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

    /// True once it has said hello, and has a function.
    pub fn is_open(&self) -> bool {
        self.function.is_some()
    }

    /// Its secret, once it is open. Only its client has heard it.
    pub fn secret(&self) -> Option<Secret> {
        self.secret
    }

    /// Whether all these QPs are of its function. Waits for the NIC thread, a few times at most.
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

    /// Does what a request asks; gives the response to be sent. Whatever is wrong with a request
    /// is said in the response.
    ///
    /// Waits for the NIC thread, for microseconds.
    pub fn handle(&mut self, request: &[u8], descriptors: Vec<OwnedFd>) -> (Vec<u8>, Vec<OwnedFd>) {
        self.unmap_ended();
        let answer = self.answer(request, &descriptors);
        // Some of those that are not memory can keep who closes them for as long as their owner
        // likes.
        descriptors.into_iter().for_each(close_aside);
        let (response, descriptors) = answer.unwrap_or_else(|e| {
            let mut why = match e {
                // That it was the NIC that refused, the client's error says already.
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
        let request: Request =
            serde_json::from_slice(request).map_err(|e| protocol(format!("a request: {e}")))?;
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
                "version {version} of the attach protocol, and this NIC speaks {VERSION}; use the \
                 same release on both sides"
            )));
        }
        let range = doorbell::page_bytes(1)..=doorbell::PAGE_BYTES_MAX;
        if !usize::try_from(bytes).is_ok_and(|bytes| range.contains(&bytes)) {
            return Err(protocol(format!(
                "a doorbell page of {bytes} bytes; it has {} to {}",
                range.start(),
                range.end()
            )));
        }
        let page = sharing::adopt(only_one("hello", page)?, bytes)?;
        let secret = Secret::random().map_err(Error::system("drawing a session's secret"))?;
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

    /// Unmaps what is no longer shared and no longer used.
    fn unmap_ended(&mut self) {
        let bytes = &mut self.memory_bytes;
        self.ended.retain(|shared| {
            // Whoever could share it again would have to have it.
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
                "{} bytes at {} of memory {}, which has {}",
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
        d => Err(protocol(format!("{} descriptors with {request}, not one", d.len()))),
    }
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
