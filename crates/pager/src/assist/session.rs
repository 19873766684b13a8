//! A session in the assist: the set-up with a host, and the service of the host's ring.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use pool::{BorrowedLanes, BorrowedMemory, ChunkMemory, ChunkPart, LentLanes};
use verbs::DmaMemory;

use super::mover::{DirectMover, LentMover, Mover};
use super::protocol::{Message, VERSION};
use super::ring::{self, Consumer};
use crate::sys::PAGE_BYTES;

/// Maximum number of memory nodes, and of parts of the chunk memory, of a session.
const PARTS_MAX: usize = 64;
/// Maximum length of the frames.
const FRAMES_BYTES_MAX: u64 = 1 << 30;

/// A host of which parts are missing.
#[derive(Default)]
pub struct SetUp {
    is_greeted: bool,
    frames: Option<DmaMemory>,
    chunks: Vec<(ChunkPart, OwnedFd)>,
    control: Option<OwnedFd>,
    /// Memory of queues, by the index of the memory node.
    queues: BTreeMap<u64, BorrowedMemory>,
    /// Lent queues, with the number of frames that they reach.
    lanes: Vec<(BorrowedLanes, u32)>,
}

/// Result of a packet.
pub enum Step {
    /// Further packets follow. The answer is sent to the host.
    Next(Option<Message>),
    /// The set-up is complete.
    Complete(Box<Session>),
}

impl SetUp {
    /// Takes a packet of the host, with its descriptors.
    ///
    /// # Errors
    /// The reason for which the session must end.
    pub fn take(&mut self, message: Message, fds: Vec<OwnedFd>) -> Result<Step, String> {
        if !self.is_greeted && !matches!(message, Message::Hello { .. }) {
            return Err(format!("unexpected packet {message:?}"));
        }
        match (message, <[OwnedFd; 1]>::try_from(fds)) {
            (Message::Hello { version: VERSION }, _) => self.is_greeted = true,
            (Message::Hello { version }, _) => {
                return Err(format!(
                    "version {version} of the process, version {VERSION} of the assist: use one \
                     build of granary and its preload library"
                ));
            }
            (Message::Frames { bytes }, Ok([file])) => {
                self.frames = Some(map(&file, bytes)?);
                return Ok(Step::Next(Some(Message::Ready)));
            }
            (Message::Chunks { address, bytes }, Ok([file])) if self.chunks.len() < PARTS_MAX => {
                self.chunks.push((ChunkPart { address, bytes }, file));
            }
            (Message::Control, Ok([socket])) => self.control = Some(socket),
            (Message::Queues { node }, Err(files)) if node < PARTS_MAX as u64 => {
                let files = files.try_into().map_err(|_| "queues need two descriptors")?;
                self.queues.insert(node, BorrowedMemory::map(files).map_err(text)?);
                return Ok(Step::Next(Some(Message::Ready)));
            }
            (Message::Lent { node, bytes, state }, Ok([wake])) => {
                self.adopt(node, bytes, LentLanes { state, wake })?;
            }
            (Message::Ring, Ok([file])) => {
                let ring = map(&file, ring::BYTES as u64)?;
                return self.complete(ring).map(Box::new).map(Step::Complete);
            }
            (message, _) => return Err(format!("unexpected packet {message:?}")),
        }
        Ok(Step::Next(None))
    }

    fn adopt(&mut self, node: u64, bytes: u64, lent: LentLanes) -> Result<(), String> {
        let memory = match node == self.lanes.len() as u64 {
            true => self.queues.remove(&node).ok_or("lent queues without their memory")?,
            false => {
                return Err("lent queues in another order than that of the memory nodes".into());
            }
        };
        let frames = u32::try_from(bytes / PAGE_BYTES as u64).map_err(|_| "too many frames")?;
        self.lanes.push((BorrowedLanes::adopt(&memory, lent).map_err(text)?, frames));
        Ok(())
    }

    fn complete(&mut self, ring: DmaMemory) -> Result<Session, String> {
        let lanes = std::mem::take(&mut self.lanes);
        let (frames, mover): (Vec<u32>, Box<dyn Mover>) = match (&self.frames, self.control.take())
        {
            (Some(frames), Some(control)) => {
                let chunks = ChunkMemory::from_parts(std::mem::take(&mut self.chunks));
                let mover = DirectMover::new(chunks.map_err(text)?, frames.clone(), control);
                (vec![(frames.len() / PAGE_BYTES) as u32], Box::new(mover))
            }
            _ if !lanes.is_empty() => {
                let frames = lanes.iter().map(|(_, frames)| *frames).collect();
                let lanes = lanes.into_iter().map(|(lanes, _)| lanes).collect();
                (frames, Box::new(LentMover::new(lanes)))
            }
            _ => return Err("the process names no way to move pages".into()),
        };
        let consumer = Consumer::new(ring, &frames).map_err(text)?;
        Ok(Session::new(consumer, mover))
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Maps memory of a host, of which at least `bytes` bytes are used.
fn map(file: &OwnedFd, bytes: u64) -> Result<DmaMemory, String> {
    let mapped = pool::map_frames(file, FRAMES_BYTES_MAX).map_err(text)?;
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
    /// The reason for which the session must end.
    pub fn work(&mut self) -> Result<bool, String> {
        let mut worked = false;
        while let Some((number, outcome)) = self.mover.poll()? {
            self.consumer.complete(number, outcome);
            worked = true;
        }
        if self.mover.has_room()
            && let Some((number, request)) = self.consumer.take().map_err(text)?
        {
            if let Some(outcome) = self.mover.start(number, &request)? {
                self.consumer.complete(number, outcome);
            }
            worked = true;
        }
        Ok(worked)
    }

    /// Announces that the assist is about to sleep. Returns false if there is work to do first.
    ///
    /// # Errors
    /// As [`Session::work`].
    pub fn may_sleep(&mut self) -> Result<bool, String> {
        self.consumer.announce_sleep();
        if self.mover.is_busy() {
            self.mover.arm()?;
        }
        // Without room for it, a request waits for the end of others.
        Ok(!self.mover.has_room() || !self.consumer.has_request())
    }

    /// Announces that the assist is awake.
    pub fn announce_awake(&self) {
        self.consumer.announce_awake();
    }

    /// Calls `visit` with the descriptors to wait for beside the host's socket.
    pub fn events(&self, visit: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.mover.events(visit);
    }
}
