//! A session in the assist: the set-up with a host, and the service of the host's ring.

use std::os::fd::OwnedFd;

use pool::{ChunkMemory, ChunkPart};
use verbs::DmaMemory;

use super::mover::{DirectMover, Mover};
use super::protocol::{Message, VERSION};
use super::ring::{self, Consumer, Number, Outcome};
use crate::sys::PAGE_BYTES;

/// Maximum number of memory nodes, and of parts of the chunk memory, of a session.
const PARTS_MAX: usize = 64;
/// Maximum length of the frames of a memory node.
const FRAMES_BYTES_MAX: u64 = 1 << 30;

/// A host of which parts are missing.
#[derive(Default)]
pub struct SetUp {
    is_greeted: bool,
    frames: Vec<DmaMemory>,
    chunks: Vec<(ChunkPart, OwnedFd)>,
    control: Option<OwnedFd>,
}

/// Result of a packet.
pub enum Step {
    /// Further packets follow. The answer is sent to the host.
    Next(Option<Message>),
    /// The set-up is complete.
    Complete(Box<Session>),
}

impl SetUp {
    /// Takes a packet of the host.
    ///
    /// # Errors
    /// The reason for which the session must end.
    pub fn take(&mut self, message: Message, descriptor: Option<OwnedFd>) -> Result<Step, String> {
        let known = self.is_greeted || matches!(message, Message::Hello { .. });
        if !known || message.has_descriptor() != descriptor.is_some() {
            return Err(format!("unexpected packet {message:?}"));
        }
        match (message, descriptor) {
            (Message::Hello { version: VERSION }, _) => self.is_greeted = true,
            (Message::Hello { version }, _) => {
                return Err(format!(
                    "version {version} of the process, version {VERSION} of the assist: use one \
                     build of granary and its preload library"
                ));
            }
            (Message::Frames { bytes }, Some(file)) if self.frames.len() < PARTS_MAX => {
                self.frames.push(map(&file, bytes)?);
                return Ok(Step::Next(Some(Message::Ready)));
            }
            (Message::Chunks { address, bytes }, Some(file)) if self.chunks.len() < PARTS_MAX => {
                self.chunks.push((ChunkPart { address, bytes }, file));
            }
            (Message::Control, Some(socket)) => self.control = Some(socket),
            (Message::Ring, Some(file)) => {
                let ring = map(&file, ring::BYTES as u64)?;
                return self.complete(ring).map(Box::new).map(Step::Complete);
            }
            (message, _) => return Err(format!("unexpected packet {message:?}")),
        }
        Ok(Step::Next(None))
    }

    fn complete(&mut self, ring: DmaMemory) -> Result<Session, String> {
        let pages = |memory: &DmaMemory| (memory.len() / PAGE_BYTES) as u32;
        let frames: Vec<u32> = self.frames.iter().map(pages).collect();
        let consumer = Consumer::new(ring, &frames).map_err(|error| error.to_string())?;
        match (&self.frames[..], self.control.take()) {
            ([frames], Some(control)) => {
                let parts = std::mem::take(&mut self.chunks);
                let chunks = ChunkMemory::from_parts(parts).map_err(|error| error.to_string())?;
                let mover = DirectMover::new(chunks, frames.clone(), control);
                Ok(Session::new(consumer, Box::new(mover)))
            }
            _ => Err("the process names no way to move pages".into()),
        }
    }
}

/// Maps memory of a host, of which at least `bytes` bytes are used.
fn map(file: &OwnedFd, bytes: u64) -> Result<DmaMemory, String> {
    let mapped = pool::map_frames(file, FRAMES_BYTES_MAX).map_err(|error| error.to_string())?;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    mapped.slice(0, bytes).ok_or_else(|| format!("{} bytes of {bytes}", mapped.len()))
}

/// A host whose requests are served.
pub struct Session {
    consumer: Consumer,
    mover: Box<dyn Mover>,
}

impl Session {
    /// Serves the requests of `consumer` by `mover`.
    pub fn new(consumer: Consumer, mover: Box<dyn Mover>) -> Self {
        Self { consumer, mover }
    }

    /// Starts at most one request, and ends those that are done. Returns true if there was one.
    ///
    /// # Errors
    /// The host violates the layout of the ring: the session must end.
    pub fn work(&mut self) -> Result<bool, ring::Violation> {
        let mut worked = false;
        while let Some((number, outcome)) = self.mover.poll() {
            self.end(number, outcome);
            worked = true;
        }
        if self.mover.has_room()
            && let Some((number, request)) = self.consumer.take()?
        {
            if let Some(outcome) = self.mover.start(number, &request) {
                self.end(number, outcome);
            }
            worked = true;
        }
        Ok(worked)
    }

    fn end(&self, number: Number, outcome: Outcome) {
        self.consumer.complete(number, outcome);
    }

    /// Announces that the assist is about to sleep. Returns false if there is work to do first.
    pub fn may_sleep(&self) -> bool {
        self.consumer.announce_sleep();
        !self.mover.is_busy() && !self.consumer.has_request()
    }

    /// Announces that the assist is awake.
    pub fn announce_awake(&self) {
        self.consumer.announce_awake();
    }
}
