//! The engine without a NIC, then the memory node and the client on the inline NIC.

mod client;
mod engine;
mod member;
mod model;
mod node;
mod statistics;

use std::collections::BTreeSet;
use std::sync::Arc;

use verbs::{DmaMemory, RegionEngine};

use super::PAGE_BYTES;
use super::Tier;
use super::command::{ANSWER_BYTES, Answer, Command, Operation, Status};
use super::engine::Engine;
use super::layout::{Layout, Owner, Peer};
use super::random::Random;
use super::table::Tables;

type Page = [u8; PAGE_BYTES];

/// An engine, and the part of the NIC that asks it.
struct Bench {
    memory: DmaMemory,
    layout: Layout,
    tables: Arc<Tables>,
    engine: Engine,
    sequence: u64,
}

const OWNERS: u16 = 3;
const SLOTS: u32 = 2;

impl Bench {
    fn new(pages: u32, fast: u32, seed: u64) -> Self {
        let layout = Layout { owners: OWNERS, slots: SLOTS, pages };
        let memory = DmaMemory::anonymous(layout.bytes() as usize).unwrap();
        let tables = Arc::new(Tables::new(pages, fast));
        let random = Random::new(Some(seed)).unwrap();
        let engine = Engine::new(memory.clone(), layout, tables.clone(), random);
        Self { memory, layout, tables, engine, sequence: 0 }
    }

    /// A WRITE, in steps of `step` bytes. Returns false if it was refused.
    fn write_in_steps(&mut self, peer: Peer, at: u64, bytes: &[u8], step: usize) -> bool {
        let tag = peer.tag();
        for (i, part) in bytes.chunks(step).enumerate() {
            let at = at + (i * step) as u64;
            if !self.engine.may_write(tag, at, part.len() as u64) {
                return false;
            }
            self.memory.write(at as usize, part);
        }
        self.engine.written(tag, at, bytes.len() as u64);
        true
    }

    fn write(&mut self, peer: Peer, at: u64, bytes: &[u8]) -> bool {
        self.write_in_steps(peer, at, bytes, usize::MAX)
    }

    /// A READ; `None` if it was refused.
    fn read(&self, peer: Peer, at: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.engine.may_read(peer.tag(), at, len as u64).then(|| {
            self.memory.read(at as usize, &mut bytes);
            bytes
        })
    }

    fn load(&self, owner: Owner, at: u64) -> Option<Page> {
        self.read(Peer::Donee(owner), at, PAGE_BYTES).map(|bytes| bytes.try_into().unwrap())
    }

    /// A command with the usual fields for `owner`.
    fn command(&mut self, owner: Owner, operation: Operation, remote_addr: u64) -> Command {
        self.sequence += 1;
        let page = self.layout.page_at(remote_addr);
        let tier = page.map_or(0, |page| self.tables.tier_of(page) as u8);
        let (target_tier, sequence) = (Tier::Dram as u8, self.sequence);
        Command { operation, tier, target_tier, src_mid: owner, sequence, remote_addr }
    }

    /// Executes a command in the first slot of a peer, and checks that its answer is that of the
    /// command.
    fn execute(&mut self, peer: Peer, command: &Command) -> Answer {
        let slot = self.layout.first_slot(peer);
        assert!(self.write(peer, self.layout.command(slot), &command.to_bytes()));
        let answer = self.read(peer, self.layout.answer(slot), ANSWER_BYTES).unwrap();
        let answer = Answer::parse(&answer.try_into().unwrap()).unwrap();
        assert_eq!(answer.sequence, command.sequence);
        answer
    }

    fn set_data(&mut self, owner: Owner, content: &Page) {
        let peer = Peer::Donee(owner);
        assert!(self.write(peer, self.layout.data(self.layout.first_slot(peer)), content));
    }

    /// STOREs a page over the one at `replaced`, or a new one if that is 0.
    fn store_over(&mut self, owner: Owner, value: u8, replaced: u64) -> Answer {
        self.set_data(owner, &[value; PAGE_BYTES]);
        let command = self.command(owner, Operation::Store, replaced);
        self.execute(Peer::Donee(owner), &command)
    }

    /// STOREs a page; returns its address.
    fn store(&mut self, owner: Owner, value: u8) -> u64 {
        let answer = self.store_over(owner, value, 0);
        assert_eq!(answer.status, Status::Done);
        answer.remote_addr
    }

    fn invalidate(&mut self, owner: Owner, at: u64) -> Status {
        let command = self.command(owner, Operation::InvalidatePage, at);
        self.execute(Peer::Donee(owner), &command).status
    }

    /// Executes all slices of INVALIDATE AREA; returns their number.
    fn invalidate_area(&mut self, peer: Peer, owner: Owner) -> u32 {
        let (mut next, mut slices) = (0, 0);
        loop {
            let command = self.command(owner, Operation::InvalidateArea, next);
            let answer = self.execute(peer, &command);
            assert_eq!(answer.status, Status::Done);
            slices += 1;
            match answer.remote_addr {
                0 => return slices,
                address => next = address,
            }
        }
    }

    /// Checks the tables, and that free pages are clear.
    fn check(&self) {
        self.tables.audit(|owner| (1..=OWNERS).contains(&owner)).unwrap();
        let free = (0..self.layout.pages).filter(|page| self.tables.owner(*page) == 0);
        for page in free {
            let mut content = [1; PAGE_BYTES];
            self.memory.read(self.layout.page(page) as usize, &mut content);
            assert!(content == [0; PAGE_BYTES], "free page {page} is not clear");
        }
    }

    fn pages_of(&self, owner: Owner) -> BTreeSet<u32> {
        (0..self.layout.pages).filter(|page| self.tables.owner(*page) == owner).collect()
    }
}
