//! The end of a quarantine: the only work of the memory node's CPU for a free.
//!
//! ```text
//! scan of the capability table ─> quarantined blocks ─> one rebind each: the old key is dead
//!   ─> the blocks are cleared ─> their new keys are in the table ─> one CAS for all of a span: they are free
//! ```
//!
//! A scan begins from time to time, since a free is a CAS that wakes nobody: after [`EVERY_MAX`] if there is
//! nothing to do (FineMem §6.2), sooner while there is. Who finds no memory asks for one: a *bell*, a SEND
//! that is answered when a scan that began after it has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric::{Completion, CompletionKind, CompletionQueue, MemoryRegion, Nic, QueuePair, Status};

use super::header::{CHUNKS, User};
use super::keys;
use super::layout::{Block, SECTION};
use super::log::{Capability, FullLog, Layer};
use super::map::Map;
use super::node::Node;
use super::words::now;
use crate::Error;

/// Between two scans, while they find something.
const EVERY_MIN: Duration = Duration::from_millis(2);
/// Between two scans, when they have not for a while.
const EVERY_MAX: Duration = Duration::from_millis(100);
/// Entries that one turn looks at.
const PIECE: u32 = 1 << 15;

/// How far the scan is.
#[derive(Default)]
pub(super) struct Scan {
    /// The entry that is looked at next, while one is under way.
    at: Option<u32>,
    /// Blocks that it found.
    found: u64,
    /// Scans that have begun.
    pub begun: u64,
    /// Blocks whose quarantine has ended.
    pub released: u64,
    /// Those of them that their owners left behind.
    pub reclaimed: u64,
    /// One is to begin as soon as none is under way.
    hurried: bool,
    every: Duration,
    next: Duration,
}

impl Scan {
    /// One begins soon.
    pub fn hurry(&mut self) {
        self.hurried = true;
    }

    /// True if a scan has ended that began after `begun` had.
    pub fn is_over(&self, begun: u64) -> bool {
        self.begun - self.at.is_some() as u64 > begun
    }

    /// How long until there is something to do.
    pub fn due_in(&self, now: Duration) -> Duration {
        if self.at.is_some() || self.hurried {
            Duration::ZERO
        } else {
            self.next.saturating_sub(now)
        }
    }
}

impl<N: Nic> Node<N> {
    /// Takes in who asks for a scan.
    pub(super) fn hear_bells(&mut self) -> Result<bool, Error> {
        let mut some = [Completion::EMPTY; 16];
        let mut any = false;
        loop {
            let n = self.requests.poll(&mut some);
            for c in some[..n].iter().filter(|c| c.kind == CompletionKind::Receive) {
                let mut peers = self.peers.values_mut();
                let peer = peers.find(|p| p.management.qpn() == c.qpn && p.leaving.is_none());
                let Some(peer) = peer.filter(|_| c.status == Status::Success) else { continue };
                // One that was broken off since has been answered by that.
                if peer.listen(c.id as u32).is_ok() {
                    peer.bell = Some(self.scan.begun);
                    self.scan.hurry();
                    any = true;
                }
            }
            if n < some.len() {
                return Ok(any);
            }
        }
    }

    /// Begins a scan if it is time to, and goes on with it. True if that did something.
    pub(super) fn go_on_scanning(&mut self) -> Result<bool, Error> {
        let time = self.nic.now();
        let scan = &mut self.scan;
        if scan.at.is_none() {
            if !scan.hurried && !self.watching && time < scan.next {
                return Ok(false);
            }
            (scan.at, scan.found, scan.hurried) = (Some(0), 0, false);
            scan.begun += 1;
        }
        let from = scan.at.unwrap_or(0);
        let mut found = Vec::new();
        let end = self.shape.entries().min(from + PIECE);
        let mut next = from;
        while next < end && found.len() < keys::BATCH {
            let word = self.words.load(self.shape.capability(next));
            if Capability::parse(word).is_quarantined() {
                found.push(next);
            }
            next += 1;
        }
        self.release(&found)?;
        let scan = &mut self.scan;
        scan.found += found.len() as u64;
        scan.released += found.len() as u64;
        scan.at = (next < self.shape.entries()).then_some(next);
        if scan.at.is_none() {
            scan.every = match scan.found {
                0 => (scan.every * 2).clamp(EVERY_MIN, EVERY_MAX),
                _ => EVERY_MIN,
            };
            scan.next = time + scan.every;
            self.answer_bells();
        }
        Ok(!found.is_empty() || self.scan.at.is_some())
    }

    fn answer_bells(&mut self) {
        if self.peers.values().all(|peer| peer.bell.is_none()) {
            return;
        }
        let (scan, free) = (&self.scan, self.free_chunks() as u32);
        let waits = |bell: Option<u64>| bell.is_some_and(|begun| scan.is_over(begun));
        let ended = scan.found as u32;
        self.peers.values_mut().filter(|p| waits(p.bell)).for_each(|p| p.answer(ended, free));
    }

    /// Ends the quarantine of blocks: see the module.
    fn release(&mut self, entries: &[u32]) -> Result<(), Error> {
        if entries.is_empty() {
            return Ok(());
        }
        self.keys.renew(entries)?;
        let mut by_header: BTreeMap<(bool, u32), Vec<Block>> = BTreeMap::new();
        for &entry in entries {
            let block = self.shape.block(entry).expect("an entry of the table");
            let (start, bytes) = self.keys.range(entry);
            let offset = start - self.memory.memory().addr();
            self.nic.zero(self.memory.memory(), offset as usize, bytes as usize);
            let open = Capability::open(self.keys.key(entry));
            self.words.store(self.shape.capability(entry), open.to_word());
            let header = match block.layer() {
                Layer::Span => (false, block.chunk / CHUNKS),
                Layer::Section => (true, block.chunk / SECTION),
            };
            by_header.entry(header).or_default().push(block);
        }
        for blocks in by_header.values() {
            self.give_back(blocks);
        }
        Ok(())
    }

    /// Clears the bits of blocks of one header, with one CAS, and says so in their logs.
    fn give_back(&mut self, blocks: &[Block]) {
        let tree = match &self.map {
            Map::Tree(tree) => tree,
            Map::Array(array) => return now(array.give_back(&self.words, blocks)),
        };
        let Some((last, others)) = blocks.split_last() else { return };
        let log = |block: &Block| self.words.load(self.shape.log(block.chunk));
        let owner: User = FullLog::parse(log(last)).user;
        let before: Vec<u64> = others.iter().map(log).collect();
        now(tree.give_back(&self.words, blocks, owner));
        // The header's log names the last one only. If one of the others has a new owner by now, its log is
        // another one, or will be.
        for (block, before) in others.iter().zip(before) {
            let log = FullLog::parse(before);
            let free = FullLog { taken: false, timestamp: log.timestamp.next(), ..log };
            self.words.swap(self.shape.log(block.chunk), before, free.to_word());
        }
    }
}
