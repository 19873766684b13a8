//! Layout of the memory node's region. Address 0 is its first byte.
//!
//! ```text
//! 0        data windows: a page for each slot
//!          controls: for each slot, the command (64 bytes) and the answer (64 bytes)
//!          pages: those of tier `fast`, then those of tier `dram`
//! ```
//!
//! A slot is the place of one request in flight. Each owner has the same number of slots; the slots
//! of owner 1 come first. The last slot belongs to the memory node's CPU.

use serde::{Deserialize, Serialize};

use super::PAGE_BYTES;
use super::command::{ANSWER_BYTES, COMMAND_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of a slot's control.
pub const CONTROL_BYTES: u64 = (COMMAND_BYTES + ANSWER_BYTES) as u64;

/// The owner of pages and slots. 0 means "free".
pub type Owner = u16;

/// Numbers from which all addresses follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Layout {
    /// Number of owners.
    pub owners: u16,
    /// Slots of an owner.
    pub slots: u32,
    /// Pages.
    pub pages: u32,
}

/// A part of the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The data window of a slot.
    Data(u64),
    /// The command of a slot.
    Command(u64),
    /// The answer of a slot.
    Answer(u64),
    /// A page.
    Page(u32),
}

/// A user of the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// A compute node.
    Donee(Owner),
    /// The memory node's CPU.
    Administrator,
}

impl Peer {
    const ADMINISTRATOR: u64 = 1 << 63;

    /// The tag of the peer's QP at the memory node.
    pub fn tag(self) -> u64 {
        match self {
            Self::Donee(owner) => u64::from(owner),
            Self::Administrator => Self::ADMINISTRATOR,
        }
    }

    /// The peer with this tag. A QP without a tag is no peer.
    pub fn of_tag(tag: u64) -> Option<Self> {
        match tag {
            0 => None,
            Self::ADMINISTRATOR => Some(Self::Administrator),
            tag => Owner::try_from(tag).ok().map(Self::Donee),
        }
    }
}

impl Layout {
    fn slots_in_all(&self) -> u64 {
        u64::from(self.owners) * u64::from(self.slots) + 1
    }

    /// Bytes of the region.
    pub fn bytes(&self) -> u64 {
        self.page(self.pages)
    }

    /// The first slot of a peer.
    pub fn first_slot(&self, peer: Peer) -> u64 {
        match peer {
            Peer::Donee(owner) => (u64::from(owner).max(1) - 1) * u64::from(self.slots),
            Peer::Administrator => self.slots_in_all() - 1,
        }
    }

    /// The peer that has a slot.
    fn peer(&self, slot: u64) -> Peer {
        match slot / u64::from(self.slots.max(1)) {
            block if block < u64::from(self.owners) => Peer::Donee(block as Owner + 1),
            _ => Peer::Administrator,
        }
    }

    /// Returns whether a peer has a slot.
    pub fn has_slot(&self, peer: Peer, slot: u64) -> bool {
        slot < self.slots_in_all() && self.peer(slot) == peer
    }

    /// Address of a slot's data window.
    pub fn data(&self, slot: u64) -> u64 {
        slot * PAGE
    }

    /// Address of a slot's command.
    pub fn command(&self, slot: u64) -> u64 {
        self.slots_in_all() * PAGE + slot * CONTROL_BYTES
    }

    /// Address of a slot's answer.
    pub fn answer(&self, slot: u64) -> u64 {
        self.command(slot) + COMMAND_BYTES as u64
    }

    /// Address of a page.
    pub fn page(&self, page: u32) -> u64 {
        self.command(self.slots_in_all()).next_multiple_of(PAGE) + u64::from(page) * PAGE
    }

    /// The page with this address; `None` if it is not the first byte of a page.
    pub fn page_at(&self, address: u64) -> Option<u32> {
        let number = address.checked_sub(self.page(0)).filter(|at| at.is_multiple_of(PAGE))? / PAGE;
        u32::try_from(number).ok().filter(|page| *page < self.pages)
    }

    /// The part that contains `len` bytes at `offset`; `None` if no single part does.
    pub fn part(&self, offset: u64, len: u64) -> Option<Part> {
        let last = offset.checked_add(len.max(1) - 1)?;
        if last >= self.bytes() {
            return None;
        }
        let (controls, pages) = (self.command(0), self.page(0));
        if offset >= pages {
            let page = (offset - pages) / PAGE;
            return ((last - pages) / PAGE == page).then_some(Part::Page(page as u32));
        }
        if offset < controls {
            let slot = offset / PAGE;
            return (last / PAGE == slot).then_some(Part::Data(slot));
        }
        let half = CONTROL_BYTES / 2;
        let (first, last) = ((offset - controls) / half, (last - controls) / half);
        let slot = first / 2;
        match (first == last && slot < self.slots_in_all(), first % 2) {
            (true, 0) => Some(Part::Command(slot)),
            (true, _) => Some(Part::Answer(slot)),
            _ => None,
        }
    }
}
