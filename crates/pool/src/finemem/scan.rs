//! The end of a quarantine: the only work of the memory node's CPU for a free.
//!
//! ```text
//! scan of the capability table ─> quarantined blocks ─> their logs say that nobody has them: a NIC that asks these
//!   admits nobody ─> one rebind each: the old key is dead ─> the blocks are cleared ─> their new keys are in the
//!   table ─> one CAS for all of a span: they are free
//! ```
//!
//! In scheme `finemem-paper` a block that was freed is free already, and lacks a backup key: the window of its old key is
//! rebound for one (FineMem §4.3, regeneration).
//!
//! A scan begins from time to time, since a free is a CAS that wakes nobody: after [`EVERY_MAX`] if there is
//! nothing to do (FineMem §6.2), sooner while there is, but never before [`APART`] times as long as the last one
//! looked. Who finds no memory asks for one: a *bell*, a SEND that is answered when a scan that began after it has
//! ended.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use fabric::{Completion, CompletionKind, CompletionQueue, Key, Nic, QueuePair, Status, Zeros};

use super::header::{CHUNKS, Header, User};
use super::layout::{Block, SECTION, Word};
use super::log::{Capability, FullLog, Layer};
use super::map::Map;
use super::node::Node;
use super::peer::Bell;
use super::release::Release;
use super::words::now;
use crate::Error;

/// Between two scans, while they find something.
const EVERY_MIN: Duration = Duration::from_millis(2);
/// Between two scans, when they have not for a while.
const EVERY_MAX: Duration = Duration::from_millis(100);
/// Between two scans, as long as one takes to look at the table, so many times: nobody waits for what they find, or a
/// bell would ring. So they take a seventh of a core at most, however large the pool is.
const APART: u32 = 6;
/// Blocks that one turn sees to.
const FOUND_MAX: usize = super::keys::BATCH;
/// Entries that one turn looks at.
const PIECE: u32 = 1 << 15;
/// Entries that are copied at once, and those of a cache line.
const COPY: usize = 256;
const LINE: usize = 8;
/// How far ahead of that words are brought near: processors do not do that by themselves beyond a page.
const AHEAD: u32 = 2 * COPY as u32;
/// Bytes that one turn clears: about a millisecond of a slow CPU.
const CLEARED: u64 = 4 << 20;

/// Time of the memory node's CPU that went into taking blocks back, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReleaseTimes {
    /// Finding in the logs what compute nodes had that have gone, and putting it into quarantine.
    pub finding: Duration,
    /// Rebinding windows, so that old keys are dead.
    pub rebinding: Duration,
    /// Writing zeros over blocks.
    pub clearing: Duration,
    /// New keys into the table, headers and logs: the blocks are free.
    pub freeing: Duration,
    /// Looking at the capability table for what was freed.
    pub looking: Duration,
    /// Entries of it that this was about: they were looked at, or headers say that nobody has their blocks.
    pub entries: u64,
}

/// How far the scan is.
#[derive(Default)]
pub(super) struct Scan {
    /// What it has cost.
    pub times: ReleaseTimes,
    /// The entry that is looked at next, while one is under way.
    at: Option<u32>,
    /// Blocks that it found.
    found: u64,
    /// Time that went into looking at entries since it began.
    looked: Duration,
    /// Those whose old keys are dead, and that are being cleared.
    releasing: Option<Releasing>,
    /// Scans that have begun.
    pub begun: u64,
    /// Blocks whose quarantine has ended.
    pub released: u64,
    /// Backup keys that were made in place of used ones.
    pub regenerated: u64,
    /// Those of them that their owners left behind.
    pub reclaimed: u64,
    /// One is to begin as soon as none is under way.
    hurried: bool,
    every: Duration,
    next: Duration,
    /// It was broken off, and what that left is not set right yet.
    anew: Option<Anew>,
    /// How often it was.
    pub broken_off: u64,
}

/// What is to be done once background work was broken off, before anything else than a scan.
///
/// What is in quarantine is found by the next scan, however far its release had come: each step of that can be done
/// again. What has its new key in the table and is not free is found by nothing but its log, which says that it is
/// nobody's, where a header has it as taken. So there is a whole scan first; then no block is half-way back, and
/// what headers have as taken and no log has is given back. Until then nobody who has gone is looked for in logs:
/// what is withdrawn in part looks like what a crash has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Anew {
    /// A scan, after this many.
    Scan(u64),
    /// Sections below this one are right.
    Sections(u32),
}

/// Blocks on their way back: a few, as far as one turn goes, or one that takes several.
struct Releasing {
    entries: Vec<u32>,
    /// The one that is cleared next, and from which byte on.
    at: (usize, u64),
}

impl Scan {
    /// True if the block of an entry has a key that is not in the table yet.
    pub fn is_releasing(&self, entry: u32) -> bool {
        self.releasing.as_ref().is_some_and(|r| r.entries.contains(&entry))
    }

    /// Scans that have ended.
    pub fn ended(&self) -> u64 {
        self.begun - self.at.is_some() as u64
    }

    /// True if blocks are half-way back.
    pub fn is_busy(&self) -> bool {
        self.releasing.is_some()
    }

    /// True until what a break left is set right.
    pub fn is_anew(&self) -> bool {
        self.anew.is_some()
    }

    /// What was under way is not known any more.
    pub fn begin_anew(&mut self) {
        (self.at, self.releasing, self.hurried) = (None, None, true);
        self.anew = Some(Anew::Scan(self.begun));
        self.broken_off += 1;
    }

    /// One begins soon.
    pub fn hurry(&mut self) {
        self.hurried = true;
    }

    /// True if a scan has ended that began after `begun` had.
    pub fn is_over(&self, begun: u64) -> bool {
        self.ended() > begun
    }

    /// How long until there is something to do.
    pub fn due_in(&self, now: Duration) -> Duration {
        if self.at.is_some() || self.hurried || self.anew.is_some() {
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
                let order = peer.wanted(c.id as u32);
                // One that was broken off since has been answered by that.
                if peer.listen(c.id as u32).is_ok() {
                    peer.bell = Some(Bell { begun: self.scan.begun, order });
                    self.scan.hurry();
                    any = true;
                }
            }
            if n < some.len() {
                return Ok(any);
            }
        }
    }

    /// Sets right what a break left, a section in a turn. True if that did something.
    pub(super) fn mend(&mut self) -> Result<bool, Error> {
        let index = match self.scan.anew {
            Some(Anew::Scan(after)) if self.scan.is_over(after) => 0,
            Some(Anew::Sections(index)) => index,
            _ => return Ok(false),
        };
        // Blocks that are on their way back are nobody's too.
        if self.scan.is_busy() {
            return Ok(false);
        }
        if let Map::Tree(tree) = &self.map {
            now(tree.mend(&self.words, index))?;
        }
        self.scan.anew = Some(Anew::Sections(index + 1));
        if index + 1 == self.shape.sections() {
            self.scan.anew = None;
            // Who waits for memory is told of it.
            self.scan.hurry();
        }
        Ok(true)
    }

    /// Begins a scan if it is time to, and goes on with it. True if that did something.
    pub(super) fn go_on_scanning(&mut self) -> Result<bool, Error> {
        let time = self.nic.now();
        if self.scan.is_busy() {
            self.clear_some()?;
            self.end_if_over(time);
            return Ok(true);
        }
        let scan = &mut self.scan;
        if scan.at.is_none() {
            if !scan.hurried && !self.watching && time < scan.next {
                return Ok(false);
            }
            (scan.at, scan.found, scan.looked, scan.hurried) = (Some(0), 0, Duration::ZERO, false);
            scan.begun += 1;
        }
        let from = scan.at.unwrap_or(0);
        let end = self.shape.entries().min(from + PIECE);
        let (given_up, next) = match self.release {
            Release::AtOnce => {
                self.look(from..end, |c| c.is_quarantined() | c.lacks_backup(), |_| true)
            }
            Release::Quarantined => self
                .look(from..end, Capability::is_quarantined, |headers| self.is_any_taken(headers)),
        };
        let quarantined = |entry: &u32| self.capability(*entry).is_quarantined();
        let (found, lacking): (Vec<u32>, Vec<u32>) = given_up.into_iter().partition(quarantined);
        let looked = self.nic.now();
        self.scan.times.entries += (next - from) as u64;
        self.scan.times.looking += looked.saturating_sub(time);
        self.scan.looked += looked.saturating_sub(time);
        self.scan.found += (found.len() + lacking.len()) as u64;
        self.scan.at = Some(next);
        let any = !found.is_empty() || !lacking.is_empty();
        self.release(found)?;
        self.regenerate(&lacking)?;
        self.end_if_over(time);
        Ok(any || self.scan.at.is_some())
    }

    /// The entries of a range whose capabilities are as `wanted`, no more than a turn sees to, and the entry behind the
    /// last one that was looked at. Those of blocks whose headers are not `promising` are passed over.
    ///
    /// Nearly all of a table is looked at in vain, so that is what must be quick: a few cache lines are copied at once,
    /// and each compared as a whole, without branches.
    fn look(
        &self,
        range: Range<u32>,
        wanted: impl Fn(Capability) -> bool,
        promising: impl Fn(Range<u32>) -> bool,
    ) -> (Vec<u32>, u32) {
        let mut copy = [0; COPY * 8];
        let mut found = Vec::new();
        for (order, base, entries) in self.shape.by_order(range.clone()) {
            for first in entries.clone().step_by(COPY) {
                let end = entries.end.min(first + COPY as u32);
                let headers = self.shape.headers(order, first - base..end - base);
                if headers.is_some_and(|headers| !promising(headers)) {
                    continue;
                }
                let copy = &mut copy[..8 * (end - first) as usize];
                self.words.copy(self.shape.capability(first), copy);
                self.words.prefetch(self.shape.capability(first + AHEAD), COPY);
                let (words, _) = copy.as_chunks::<8>();
                let is_wanted =
                    |word: &[u8; 8]| wanted(Capability::parse(u64::from_be_bytes(*word)));
                for (line, at) in words.chunks(LINE).zip((first..).step_by(LINE)) {
                    if !line.iter().fold(false, |any, word| any | is_wanted(word)) {
                        continue;
                    }
                    for (_, entry) in line.iter().zip(at..).filter(|(word, _)| is_wanted(word)) {
                        // A copy may be of two states of a word.
                        if wanted(self.capability(entry)) {
                            found.push(entry);
                        }
                        if found.len() == FOUND_MAX {
                            return (found, entry + 1);
                        }
                    }
                }
            }
        }
        (found, range.end)
    }

    /// Whether headers have anything as taken. What is in quarantine is: its header's bits are cleared at the very end.
    fn is_any_taken(&self, headers: Range<u32>) -> bool {
        let mut copy = [0; COPY * 8];
        let copy = &mut copy[..8 * headers.len()];
        self.words.copy(Word(headers.start), copy);
        let all = copy.as_chunks().0.iter().fold(0, |all, word| all | u64::from_be_bytes(*word));
        Header(all).bitmap() != 0 || matches!(self.map, Map::Array(_))
    }

    fn capability(&self, entry: u32) -> Capability {
        Capability::parse(self.words.load(self.shape.capability(entry)))
    }

    /// Ends the scan that has come to the end of the table.
    fn end_if_over(&mut self, time: Duration) {
        let scan = &mut self.scan;
        if scan.is_busy() || scan.at != Some(self.shape.entries()) {
            return;
        }
        scan.at = None;
        scan.every = match scan.found {
            0 => (scan.every * 2).clamp(EVERY_MIN, EVERY_MAX),
            _ => EVERY_MIN,
        };
        scan.next = time + scan.every.max(scan.looked * APART);
        self.answer_bells();
    }

    fn answer_bells(&mut self) {
        if self.scan.is_anew() || self.peers.values().all(|peer| peer.bell.is_none()) {
            return;
        }
        let (scan, map, words) = (&self.scan, &self.map, &self.words);
        let mut free: BTreeMap<u64, u32> = BTreeMap::new();
        for peer in self.peers.values_mut() {
            let Some(Bell { order, .. }) = peer.bell.filter(|bell| scan.is_over(bell.begun)) else {
                continue;
            };
            let count = || map.free_blocks(order, |at| words.load(at));
            peer.answer(scan.found as u32, *free.entry(order).or_insert_with(count));
        }
    }

    /// Ends the quarantine of blocks, or begins to: see the module.
    fn release(&mut self, entries: Vec<u32>) -> Result<(), Error> {
        if entries.is_empty() {
            return Ok(());
        }
        let began = self.nic.now();
        if let Map::Tree(tree) = &self.map {
            for block in entries.iter().filter_map(|entry| self.shape.block(*entry)) {
                now(tree.withdraw(&self.words, block))?;
            }
        }
        let windows: Vec<u32> = entries.iter().flat_map(|e| self.keys.windows(*e)).collect();
        self.words.step()?;
        self.keys.renew(&windows)?;
        self.scan.times.rebinding += self.nic.now().saturating_sub(began);
        if self.release == Release::AtOnce {
            return self.set_free(&entries);
        }
        self.scan.releasing = Some(Releasing { entries, at: (0, 0) });
        self.clear_some()
    }

    /// Clears as much as a turn may; when all is clear, the blocks are free.
    fn clear_some(&mut self) -> Result<(), Error> {
        let Some(mut releasing) = self.scan.releasing.take() else { return Ok(()) };
        let began = self.nic.now();
        let mut left = CLEARED;
        let mut zeros = Zeros::default();
        while let Some(&entry) = releasing.entries.get(releasing.at.0).filter(|_| left > 0) {
            let (start, bytes) = self.keys.range(entry);
            let from = releasing.at.1;
            let some = left.min(bytes - from);
            let offset = start - self.memory.addr() + from;
            self.words.step()?;
            self.nic.zero(&mut zeros, &self.memory, offset as usize, some as usize);
            left -= some;
            releasing.at = match from + some == bytes {
                true => (releasing.at.0 + 1, 0),
                false => (releasing.at.0, from + some),
            };
        }
        drop(zeros);
        let cleared = self.nic.now();
        self.scan.times.clearing += cleared.saturating_sub(began);
        if releasing.at.0 < releasing.entries.len() {
            self.scan.releasing = Some(releasing);
            return Ok(());
        }
        self.set_free(&releasing.entries)?;
        self.scan.times.freeing += self.nic.now().saturating_sub(cleared);
        Ok(())
    }

    /// Puts new keys into the table, and says in headers that blocks are free.
    fn set_free(&mut self, entries: &[u32]) -> Result<(), Error> {
        let mut by_header: BTreeMap<(bool, u32), Vec<Block>> = BTreeMap::new();
        for &entry in entries {
            let block = self.shape.block(entry).expect("an entry of the table");
            let keys = self.keys.capability(entry);
            self.words.step()?;
            self.words.store(self.shape.capability(entry), keys.to_word());
            self.scan.released += 1;
            let header = match block.layer() {
                Layer::Span => (false, block.chunk / CHUNKS),
                Layer::Section => (true, block.chunk / SECTION),
            };
            by_header.entry(header).or_default().push(block);
        }
        by_header.values().try_for_each(|blocks| self.give_back(blocks))
    }

    /// Clears the bits of blocks of one header, with one CAS. Their logs say that already.
    fn give_back(&self, blocks: &[Block]) -> Result<(), Error> {
        let tree = match &self.map {
            Map::Tree(tree) => tree,
            Map::Array(array) => return Ok(now(array.give_back(&self.words, blocks))?),
        };
        let Some(last) = blocks.last() else { return Ok(()) };
        let owner: User = FullLog::parse(self.words.load(self.shape.log(last.chunk))).user;
        Ok(now(tree.give_back(&self.words, blocks, owner))?)
    }

    /// Gives blocks that were freed at once a new backup key, in place of the key that their last owner had: it is
    /// dead from here on.
    fn regenerate(&mut self, entries: &[u32]) -> Result<(), Error> {
        let main = |entry| self.capability(entry).main;
        let of = |entry: &u32| Some((*entry, self.keys.other_than(*entry, main(*entry))?));
        let (entries, windows): (Vec<u32>, Vec<u32>) = entries.iter().filter_map(of).unzip();
        let began = self.nic.now();
        if !windows.is_empty() {
            self.words.step()?;
        }
        self.keys.renew(&windows)?;
        self.scan.times.rebinding += self.nic.now().saturating_sub(began);
        self.scan.regenerated += windows.len() as u64;
        for (entry, window) in entries.into_iter().zip(windows) {
            let at = self.shape.capability(entry);
            let word = self.words.load(at);
            let main = Capability::parse(word).main;
            // It may have been given up meanwhile; the scan comes by again.
            if Capability::open(main).to_word() == word && main != Key::default() {
                let both = Capability { main, backup: self.keys.key(window) };
                self.words.step()?;
                self.words.swap(at, word, both.to_word());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fabric::soft::SoftNic;

    use super::*;
    use crate::scheme::NodeScheme;
    use crate::{SchemeKind, Settings};

    #[test]
    fn looking_takes_a_seventh_of_a_core_unless_a_bell_rings() {
        let settings = Settings {
            donate_bytes: 1 << 20,
            chunk_bytes: 4096,
            scheme: SchemeKind::FineMem,
            ..Settings::default()
        };
        let mut node = Node::new(&SoftNic::inline(), &settings).expect("a memory node");
        let entries = node.shape.entries();
        let (soon, ms) = (node.nic.now() + Duration::from_secs(900), Duration::from_millis);
        for (looked, found, pause) in [
            (ms(0), 1, EVERY_MIN),
            (ms(50), 1, ms(300)),
            (ms(0), 0, 2 * EVERY_MIN),
            (ms(50), 0, ms(300)),
            (ms(1), 0, 8 * EVERY_MIN),
        ] {
            let scan = &mut node.scan;
            (scan.at, scan.looked, scan.found) = (Some(entries), looked, found);
            node.end_if_over(soon);
            assert_eq!((node.scan.at, node.scan.next - soon), (None, pause), "after {looked:?}");
        }
        let begun = node.scan.begun;
        node.turn().expect("a turn");
        assert_eq!(node.scan.begun, begun, "its time has not come");
        node.scan.hurried = true;
        node.turn().expect("a turn");
        assert_eq!(node.scan.begun, begun + 1);
    }
}
