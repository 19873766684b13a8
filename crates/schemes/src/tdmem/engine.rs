//! The donor engine (TDMEM §5.3.3): it guards the region, and executes the commands.
//!
//! The engine runs in the NIC's thread. It is the only writer of the tables and of the pages. Each
//! call copies or clears a bounded number of pages: one for a STORE, two if the STORE replaces a
//! page, [`SLICE_CLEARED`] for a slice of INVALIDATE AREA.

use std::sync::Arc;

use verbs::{DmaMemory, RegionEngine, Zeros};

use super::command::{Answer, COMMAND_BYTES, Command, Operation, Status, sequence};
use super::layout::{Layout, Owner, Part, Peer};
use super::random::Random;
use super::table::{Tables, count};
use super::{PAGE_BYTES, Tier};

/// Maximum number of pages that a slice of INVALIDATE AREA examines.
pub const SLICE_EXAMINED: u32 = 4096;
/// Maximum number of pages that a slice of INVALIDATE AREA clears: 32 pages take about as long as
/// the NIC's other long steps. The paper names no number.
pub const SLICE_CLEARED: u32 = 32;

/// The engine behind the memory node's region.
pub struct Engine {
    memory: DmaMemory,
    layout: Layout,
    tables: Arc<Tables>,
    random: Random,
}

impl Engine {
    /// An engine over `memory`, which has the bytes of `layout` and is clear.
    pub fn new(memory: DmaMemory, layout: Layout, tables: Arc<Tables>, random: Random) -> Self {
        assert!(memory.len() as u64 >= layout.bytes(), "the memory holds the region");
        assert_eq!(tables.pages(), layout.pages, "tables for the same pages");
        Self { memory, layout, tables, random }
    }

    fn execute(&mut self, peer: Peer, slot: u64, command: &Command) -> Answer {
        let result = match (peer, command.operation) {
            (Peer::Donee(owner), _) if owner != command.src_mid => Err(Status::Invalid),
            (Peer::Donee(owner), Operation::Store) => self.store(owner, slot, command),
            (Peer::Donee(owner), Operation::InvalidatePage) => self.invalidate(owner, command),
            (_, Operation::InvalidateArea) => self.invalidate_slice(peer, command),
            (Peer::Administrator, _) => Err(Status::Invalid),
        };
        result.unwrap_or_else(|status| self.refuse(command.sequence, status))
    }

    fn refuse(&self, sequence: u64, status: Status) -> Answer {
        if status != Status::Full {
            count(&self.tables.counts.refused);
        }
        Answer::bare(sequence, status)
    }

    /// Draws a page, copies the data window to it, and frees the page that it replaces.
    fn store(&mut self, owner: Owner, slot: u64, command: &Command) -> Result<Answer, Status> {
        let target = Tier::from_raw(command.target_tier);
        let target = target.filter(|tier| Tier::DONOR.contains(tier)).ok_or(Status::Invalid)?;
        let replaced = match command.remote_addr {
            0 => None,
            _ => Some(self.own_page(owner, command)?),
        };
        let page = match (self.tables.draw(target, &mut self.random), replaced) {
            (Some(page), _) => page,
            (None, None) => return Err(Status::Full),
            (None, Some(replaced)) => {
                count(&self.tables.counts.overwrites);
                replaced
            }
        };
        let mut content = [0; PAGE_BYTES];
        self.memory.read(self.layout.data(slot) as usize, &mut content);
        self.memory.write(self.layout.page(page) as usize, &content);
        self.tables.set_owner(page, owner);
        if let Some(replaced) = replaced.filter(|replaced| *replaced != page) {
            self.release(replaced);
        }
        let (tier, address) = (self.tables.tier_of(page), self.layout.page(page));
        Ok(Answer::with_page(command.sequence, tier, address))
    }

    /// Clears and frees a page.
    fn invalidate(&mut self, owner: Owner, command: &Command) -> Result<Answer, Status> {
        let page = self.own_page(owner, command)?;
        self.release(page);
        Ok(Answer::with_page(command.sequence, self.tables.tier_of(page), command.remote_addr))
    }

    /// Clears and frees the pages of an owner in one slice of the table.
    fn invalidate_slice(&mut self, peer: Peer, command: &Command) -> Result<Answer, Status> {
        let first = match command.remote_addr {
            0 => 0,
            address => self.layout.page_at(address).ok_or(Status::Invalid)?,
        };
        let frees = match peer {
            Peer::Donee(_) => &self.tables.counts.frees,
            Peer::Administrator => &self.tables.counts.reclaimed,
        };
        let owner = command.src_mid;
        if owner == 0 {
            return Err(Status::Invalid);
        }
        let (mut zeros, mut cleared) = (Zeros::default(), [0; SLICE_CLEARED as usize]);
        let (mut pages, mut next) = (0, first);
        let end = self.layout.pages.min(first.saturating_add(SLICE_EXAMINED));
        while next < end && pages < cleared.len() {
            if self.tables.owner(next) == owner {
                self.clear(&mut zeros, next);
                cleared[pages] = next;
                pages += 1;
            }
            next += 1;
        }
        // The pages are clear only after the drop.
        drop(zeros);
        for page in &cleared[..pages] {
            self.tables.free_page(*page);
            count(frees);
        }
        let rest = if next < self.layout.pages { self.layout.page(next) } else { 0 };
        Ok(Answer { remote_addr: rest, ..Answer::bare(command.sequence, Status::Done) })
    }

    /// The page that a command names, if `owner` has it.
    fn own_page(&self, owner: Owner, command: &Command) -> Result<u32, Status> {
        let page = self.layout.page_at(command.remote_addr).ok_or(Status::Invalid)?;
        if self.tables.owner(page) != owner {
            return Err(Status::NotYours);
        }
        match self.tables.tier_of(page) as u8 == command.tier {
            true => Ok(page),
            false => Err(Status::Invalid),
        }
    }

    /// Clears a page, and then frees it for a compute node.
    fn release(&self, page: u32) {
        self.clear(&mut Zeros::default(), page);
        self.tables.free_page(page);
        count(&self.tables.counts.frees);
    }

    fn clear(&self, zeros: &mut Zeros, page: u32) {
        zeros.write(&self.memory, self.layout.page(page) as usize, PAGE_BYTES);
    }
}

impl RegionEngine for Engine {
    /// A compute node may read its answers and its pages, the memory node's CPU its answer.
    fn may_read(&self, tag: u64, offset: u64, len: u64) -> bool {
        let Some(peer) = Peer::of_tag(tag) else { return false };
        match self.layout.part(offset, len) {
            Some(Part::Answer(slot)) => self.layout.has_slot(peer, slot),
            Some(Part::Page(page)) => match peer {
                Peer::Donee(owner) => self.tables.owner(page) == owner,
                Peer::Administrator => false,
            },
            Some(Part::Data(_) | Part::Command(_)) | None => false,
        }
    }

    /// A peer may write its data windows and its commands.
    fn may_write(&self, tag: u64, offset: u64, len: u64) -> bool {
        let Some(peer) = Peer::of_tag(tag) else { return false };
        match self.layout.part(offset, len) {
            Some(Part::Data(slot) | Part::Command(slot)) => self.layout.has_slot(peer, slot),
            Some(Part::Answer(_) | Part::Page(_)) | None => false,
        }
    }

    /// Executes the command, if the WRITE was exactly a command. A copy of the command is
    /// validated, because the peer may write again at any time.
    fn written(&mut self, tag: u64, offset: u64, len: u64) {
        let Some(peer) = Peer::of_tag(tag) else { return };
        let Some(Part::Command(slot)) = self.layout.part(offset, len) else { return };
        if len != COMMAND_BYTES as u64 || !self.layout.has_slot(peer, slot) {
            return;
        }
        let mut bytes = [0; COMMAND_BYTES];
        self.memory.read(offset as usize, &mut bytes);
        let answer = match Command::parse(&bytes) {
            Some(command) => self.execute(peer, slot, &command),
            None => self.refuse(sequence(&bytes), Status::Invalid),
        };
        self.memory.write(self.layout.answer(slot) as usize, &answer.to_bytes());
    }
}
