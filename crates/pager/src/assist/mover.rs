//! Movers: the ways in which the assist moves the pages of a request.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pool::client::lend::Finished;
use pool::{BorrowedLanes, ChunkMemory, LaneTransfer};
use smallvec::SmallVec;
use verbs::{DmaMemory, Status};

use super::ring::{ITEMS_MAX, Item, Number, Outcome, Request};
use super::socket;
use crate::sys::PAGE_BYTES;
use crate::transport::Direction;

/// Moves the pages of one session.
///
/// The error of each method is the reason for which the session must end: the mover can move no
/// more pages, or the host is not to be served.
pub trait Mover: Send {
    /// Starts to move the pages of a request. Returns its end if it has ended, and `None` if
    /// [`Mover::poll`] returns its end later.
    fn start(&mut self, number: Number, request: &Request) -> Result<Option<Outcome>, String>;

    /// Returns a request that has ended since the last call.
    fn poll(&mut self) -> Result<Option<(Number, Outcome)>, String> {
        Ok(None)
    }

    /// Returns true if [`Mover::start`] has room for a request.
    fn has_room(&self) -> bool {
        true
    }

    /// Returns true if requests are in flight, which [`Mover::poll`] must end.
    fn is_busy(&self) -> bool {
        false
    }

    /// Makes the descriptors of [`Mover::events`] readable when [`Mover::poll`] has a request to
    /// end, also if it has one already.
    fn arm(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Calls `visit` with the descriptors to wait for while requests are in flight.
    fn events(&self, _visit: &mut dyn FnMut(BorrowedFd<'_>)) {}
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
    /// Moves all pages at once. If the memory node has closed the connection, no page is written,
    /// and a page that was read does not count: the memory node clears chunks after that.
    fn start(&mut self, _: Number, request: &Request) -> Result<Option<Outcome>, String> {
        let lives = || !socket::has_hung_up(self.control());
        let move_all =
            || request.items.iter().all(|item| self.move_item(request.direction, item).is_ok());
        let is_done = match request.direction {
            Direction::Read => move_all() && lives(),
            Direction::Write => lives() && move_all(),
        };
        Ok(Some(if is_done { Outcome::Moved } else { Outcome::Failed }))
    }
}

/// Moves pages by READs and WRITEs on queues that the host has lent, one set for each memory node.
pub struct LentMover {
    nodes: Vec<BorrowedLanes>,
    /// A request for which a queue has no room yet.
    held: Option<(Number, Request)>,
}

impl LentMover {
    /// Moves pages on these lanes, by the index of their memory node.
    pub fn new(nodes: Vec<BorrowedLanes>) -> Self {
        Self { nodes, held: None }
    }

    /// Posts a request. Returns false if there is no room.
    fn post(&mut self, number: Number, request: &Request) -> Result<bool, String> {
        let transfers: SmallVec<[LaneTransfer; ITEMS_MAX]> =
            request.items.iter().map(transfer_of).collect();
        let node = request.items.first().map_or(0, |item| usize::from(item.node));
        let lanes = self.nodes.get_mut(node).ok_or("a request names an unknown memory node")?;
        let direction = match request.direction {
            Direction::Read => pool::Direction::Read,
            Direction::Write => pool::Direction::Write,
        };
        let is_idle = lanes.in_flight() == 0;
        match lanes.post(number.to_u64(), direction, &transfers) {
            Ok(false) if is_idle => Err("a request is longer than the lent queue".into()),
            done => done.map_err(|error| error.to_string()),
        }
    }
}

fn transfer_of(item: &Item) -> LaneTransfer {
    LaneTransfer {
        qp: item.qp,
        address: item.address,
        rkey: item.rkey,
        offset: u64::from(item.frame) * PAGE_BYTES as u64,
        bytes: u32::from(item.pages) * PAGE_BYTES as u32,
    }
}

impl Mover for LentMover {
    fn start(&mut self, number: Number, request: &Request) -> Result<Option<Outcome>, String> {
        if !self.post(number, request)? {
            self.held = Some((number, request.clone()));
        }
        Ok(None)
    }

    /// A transfer that fails ends the session, because its queue executes nothing more. The host
    /// then takes the queues back and repeats the request.
    fn poll(&mut self) -> Result<Option<(Number, Outcome)>, String> {
        let ended = self.nodes.iter_mut().find_map(BorrowedLanes::poll);
        if let Some((number, request)) = self.held.take()
            && !self.post(number, &request)?
        {
            self.held = Some((number, request));
        }
        match ended {
            None => Ok(None),
            Some(Finished { token, status: Status::Success }) => {
                Ok(Some((Number::from_u64(token), Outcome::Moved)))
            }
            Some(Finished { status, .. }) => Err(format!("a transfer failed: {status:?}")),
        }
    }

    fn has_room(&self) -> bool {
        self.held.is_none()
    }

    fn is_busy(&self) -> bool {
        self.held.is_some() || self.nodes.iter().any(|lanes| lanes.in_flight() > 0)
    }

    fn arm(&mut self) -> Result<(), String> {
        let mut busy = self.nodes.iter_mut().filter(|lanes| lanes.in_flight() > 0);
        busy.try_for_each(BorrowedLanes::arm).map_err(|error| error.to_string())
    }

    fn events(&self, visit: &mut dyn FnMut(BorrowedFd<'_>)) {
        let busy = self.nodes.iter().filter(|lanes| lanes.in_flight() > 0);
        busy.for_each(|lanes| visit(lanes.event()));
    }
}
