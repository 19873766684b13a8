//! Movers: the ways in which the assist moves the pages of a request.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pool::ChunkMemory;
use verbs::DmaMemory;

use super::ring::{Item, Number, Outcome, Request};
use super::socket;
use crate::sys::PAGE_BYTES;
use crate::transport::Direction;

/// Moves the pages of one session.
pub trait Mover {
    /// Starts to move the pages of a request. Returns its end if it has ended, and `None` if
    /// [`Mover::poll`] returns its end later.
    fn start(&mut self, number: Number, request: &Request) -> Option<Outcome>;

    /// Returns a request that has ended since the last call.
    fn poll(&mut self) -> Option<(Number, Outcome)> {
        None
    }

    /// Returns true if [`Mover::start`] has room for a request.
    fn has_room(&self) -> bool {
        true
    }

    /// Returns true if requests are in flight, which [`Mover::poll`] must end.
    fn is_busy(&self) -> bool {
        false
    }
}

/// Moves pages of a private memory node by system calls, as `direct_transport` does in the host.
pub struct DirectMover {
    chunks: ChunkMemory,
    frames: DmaMemory,
    /// Duplicate of the host's control connection. The memory node gives the chunks of a host to
    /// others when its control connection ends. The duplicate keeps the connection open until the
    /// assist has ended the session, so no late store reaches a chunk of another process.
    control: OwnedFd,
}

impl DirectMover {
    /// Moves pages between `chunks` and `frames`, as long as `control` is connected.
    pub fn new(chunks: ChunkMemory, frames: DmaMemory, control: OwnedFd) -> Self {
        Self { chunks, frames, control }
    }

    /// The control connection.
    fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    fn move_item(&self, direction: Direction, item: &Item) -> std::io::Result<()> {
        let (frame, bytes) =
            (item.frame as usize * PAGE_BYTES, usize::from(item.pages) * PAGE_BYTES);
        match direction {
            Direction::Read => self.chunks.read(item.address, &self.frames, frame, bytes),
            Direction::Write => self.chunks.write(item.address, &self.frames, frame, bytes),
        }
    }
}

impl Mover for DirectMover {
    /// Moves all pages at once. If the memory node has closed the connection, no page is moved.
    fn start(&mut self, _: Number, request: &Request) -> Option<Outcome> {
        let is_done = !socket::has_hung_up(self.control())
            && request.items.iter().all(|item| self.move_item(request.direction, item).is_ok());
        Some(if is_done { Outcome::Moved } else { Outcome::Failed })
    }
}
