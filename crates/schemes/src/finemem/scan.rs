//! The scan, which ends quarantines: the only work of the memory node's CPU for a free.
//!
//! ```text
//! scan of the capability table ─> quarantined blocks ─> clear the owner in their logs: guarded
//!   windows admit no client ─> one rebind each: the old key is dead ─> clear the blocks
//!   ─> write their new keys to the table ─> one CAS for all blocks of a span: they are free
//! ```
//!
//! In scheme `finemem-paper` a freed block is already free, but has no backup key: the scan rebinds
//! the window of the old key to create one (FineMem §4.3, regeneration).
//!
//! Scans are periodic, because a free is a CAS that wakes no thread. The interval is
//! [`INTERVAL_MAX`] when there is nothing to do (FineMem §6.2) and shorter otherwise, but at least
//! [`INTERVAL_FACTOR`] times the duration of the last scan. A client that finds no memory sends a
//! *scan request*: a SEND that is answered when a scan that began after it has ended.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use scheme::Error;
use scheme::index::{EntryId, IndexRange, Slot};
use verbs::{Completion, CompletionKind, CompletionQueue, Key, Nic, QueuePair, Status, Zeros};

use super::block::{Block, Order, Place, SectionIndex};
use super::connection::ScanRequest;
use super::header::{Header, User};
use super::keys::WindowIndex;
use super::layout::Word;
use super::log::{Capability, FullLog};
use super::map::Map;
use super::node::Node;
use super::release::Release;
use super::words::now;

/// Interval between two scans while they find blocks.
const INTERVAL_MIN: Duration = Duration::from_millis(2);
/// Interval between two scans after several that found nothing.
const INTERVAL_MAX: Duration = Duration::from_millis(100);
/// Minimum interval between two scans, as a multiple of the time that one scan spends on the table.
/// No client waits for such a scan, otherwise it would have sent a scan request. So scans take at
/// most a seventh of a core, however large the pool is.
const INTERVAL_FACTOR: u32 = 6;
/// Maximum number of blocks that one turn releases.
const FOUND_MAX: usize = super::function::BATCH;
/// Maximum number of entries that one turn checks.
const ENTRIES_PER_TURN: u32 = 1 << 15;
/// Entries that are copied at a time, and entries of a cache line.
const COPY_ENTRIES: usize = 256;
const LINE_ENTRIES: usize = 8;
/// Prefetch distance in words: the hardware prefetcher does not cross pages.
const PREFETCH_ENTRIES: u32 = 2 * COPY_ENTRIES as u32;
/// Bytes that one turn clears: about a millisecond on a slow CPU.
const CLEAR_BYTES: u64 = 4 << 20;

/// Total CPU time of the memory node spent on releasing blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReleaseTimes {
    /// Finding the blocks of departed clients in the logs, and quarantining them.
    pub finding: Duration,
    /// Rebinding windows, which invalidates old keys.
    pub rebinding: Duration,
    /// Clearing blocks.
    pub clearing: Duration,
    /// Writing new keys, headers and logs, which makes the blocks free.
    pub freeing: Duration,
    /// Scanning the capability table for freed blocks.
    pub looking: Duration,
    /// Number of scanned entries, including entries skipped because their headers show no taken
    /// block.
    pub entries: u64,
}

/// Progress and statistics of the scan.
#[derive(Default)]
pub(super) struct Scan {
    /// CPU time spent so far.
    pub times: ReleaseTimes,
    /// The next entry to check; `None` if no scan is in progress.
    at: Option<EntryId>,
    /// Number of blocks that the current scan has found.
    found: u64,
    /// Time that the current scan has spent on checking entries.
    looked: Duration,
    /// Blocks whose old keys are dead and that are being cleared.
    releasing: Option<Releasing>,
    /// Number of scans that have begun.
    pub begun: u64,
    /// Number of blocks whose quarantine has ended.
    pub released: u64,
    /// Number of backup keys created in place of used ones.
    pub regenerated: u64,
    /// Number of blocks quarantined because their owners departed.
    pub reclaimed: u64,
    /// A scan is to begin as soon as none is in progress.
    scheduled_now: bool,
    interval: Duration,
    next: Duration,
    /// Recovery after an aborted pass, if not complete.
    recovery: Option<RecoveryPhase>,
    /// Number of aborted background passes.
    pub aborts: u64,
}

/// Recovery after an aborted background pass. Only scans run before it is complete.
///
/// The next scan finds every block in quarantine, however far its release had advanced, because
/// each step of a release can be repeated. A block whose new key is in the table but that is not
/// free yet can be recognized only by its log, which names no owner although the header marks the
/// block as taken. Therefore one whole scan runs first. After it, no block is partly released, and
/// every block that is taken in a header but has no owner in a log is freed. Until then the logs
/// are not searched for blocks of departed clients, because a partly withdrawn block looks like one
/// that a crash has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RecoveryPhase {
    /// Wait for a scan that begins after this number of scans.
    Scan(u64),
    /// Sections below this one are repaired.
    Sections(SectionIndex),
}

/// Blocks being released: several that one turn completes, or one that takes several turns.
struct Releasing {
    entries: Vec<EntryId>,
    /// The block that is cleared next, and the byte from which to clear.
    at: (usize, u64),
}

impl Scan {
    /// True if the block of an entry has a new key that is not in the table yet.
    pub fn is_releasing(&self, entry: EntryId) -> bool {
        self.releasing.as_ref().is_some_and(|r| r.entries.contains(&entry))
    }

    /// Number of scans that have ended.
    pub fn ended(&self) -> u64 {
        self.begun - self.at.is_some() as u64
    }

    /// True while blocks are partly released.
    pub fn is_busy(&self) -> bool {
        self.releasing.is_some()
    }

    /// True until recovery after an aborted pass is complete.
    pub fn is_recovering(&self) -> bool {
        self.recovery.is_some()
    }

    /// Discards the state of the aborted pass, and starts recovery.
    pub fn start_recovery(&mut self) {
        (self.at, self.releasing, self.scheduled_now) = (None, None, true);
        self.recovery = Some(RecoveryPhase::Scan(self.begun));
        self.aborts += 1;
    }

    /// Requests that a scan begin soon.
    pub fn schedule_now(&mut self) {
        self.scheduled_now = true;
    }

    /// True if a scan has ended that began after scan number `begun`.
    pub fn is_over(&self, begun: u64) -> bool {
        self.ended() > begun
    }

    /// Time until the scan has work to do.
    pub fn due_in(&self, now: Duration) -> Duration {
        if self.at.is_some() || self.scheduled_now || self.recovery.is_some() {
            Duration::ZERO
        } else {
            self.next.saturating_sub(now)
        }
    }
}

impl<N: Nic> Node<N> {
    /// Polls for scan requests of clients. Returns true if there were any.
    pub(super) fn poll_scan_requests(&mut self) -> Result<bool, Error> {
        let mut some = [Completion::EMPTY; 16];
        let mut any = false;
        loop {
            let n = self.requests.poll(&mut some);
            for c in some[..n].iter().filter(|c| c.kind == CompletionKind::Receive) {
                let mut peers = self.peers.values_mut();
                let peer = peers.find(|p| p.management.qp.qpn() == c.qpn && p.leaving.is_none());
                let Some(peer) = peer.filter(|_| c.status == Status::Success) else { continue };
                let slot = Slot::new(c.id as u32);
                let order = self.shape.order(peer.wanted_order(slot));
                // A request whose wait was aborted in the meantime has already been answered.
                if peer.post_receive(slot).is_ok() {
                    peer.scan_request = Some(ScanRequest { begun: self.scan.begun, order });
                    self.scan.schedule_now();
                    any = true;
                }
            }
            if n < some.len() {
                return Ok(any);
            }
        }
    }

    /// Repairs one section after an aborted pass. Returns true if it did any work.
    pub(super) fn repair_after_abort(&mut self) -> Result<bool, Error> {
        let index = match self.scan.recovery {
            Some(RecoveryPhase::Scan(after)) if self.scan.is_over(after) => SectionIndex::new(0),
            Some(RecoveryPhase::Sections(index)) => index,
            _ => return Ok(false),
        };
        // Blocks that are being released have no owner in a log either.
        if self.scan.is_busy() {
            return Ok(false);
        }
        if let Map::Tree(tree) = &self.map {
            now(tree.free_ownerless(&self.words, index))?;
        }
        let next = index.plus(1);
        self.scan.recovery = Some(RecoveryPhase::Sections(next));
        if next == self.shape.sections_end() {
            self.scan.recovery = None;
            // Notifies clients that wait for memory.
            self.scan.schedule_now();
        }
        Ok(true)
    }

    /// Starts a scan if one is due, and continues it. Returns true if it did any work.
    pub(super) fn continue_scan(&mut self) -> Result<bool, Error> {
        let time = self.nic.now();
        if self.scan.is_busy() {
            self.clear_blocks()?;
            self.end_scan_if_complete(time);
            return Ok(true);
        }
        let scan = &mut self.scan;
        if scan.at.is_none() {
            if !scan.scheduled_now && !self.watching && time < scan.next {
                return Ok(false);
            }
            (scan.at, scan.found, scan.looked, scan.scheduled_now) =
                (Some(EntryId::new(0)), 0, Duration::ZERO, false);
            scan.begun += 1;
        }
        let from = scan.at.unwrap_or_default();
        let end = self.shape.entries_end().min(from.plus(ENTRIES_PER_TURN));
        let (candidates, next) = match self.release {
            Release::AtOnce => {
                self.scan_entries(from..end, |c| c.is_quarantined() | c.lacks_backup(), |_| true)
            }
            Release::Quarantined => {
                self.scan_entries(from..end, Capability::is_quarantined, |headers| {
                    self.is_any_taken(headers)
                })
            }
        };
        let quarantined = |entry: &EntryId| self.capability(*entry).is_quarantined();
        let (found, lacking): (Vec<EntryId>, Vec<EntryId>) =
            candidates.into_iter().partition(quarantined);
        let looked = self.nic.now();
        self.scan.times.entries += (from..next).len() as u64;
        self.scan.times.looking += looked.saturating_sub(time);
        self.scan.looked += looked.saturating_sub(time);
        self.scan.found += (found.len() + lacking.len()) as u64;
        self.scan.at = Some(next);
        let any = !found.is_empty() || !lacking.is_empty();
        self.release(found)?;
        self.regenerate(&lacking)?;
        self.end_scan_if_complete(time);
        Ok(any || self.scan.at.is_some())
    }

    /// Scans a range for entries whose capability is `wanted`, up to the limit of a turn. Returns
    /// these entries and the entry after the last one checked. Skips entries of blocks whose
    /// headers are not `promising`.
    ///
    /// Most of a table is scanned without a match, so this loop must be fast: it copies several
    /// cache lines at a time, and compares each line as a whole, without branches.
    fn scan_entries(
        &self,
        range: Range<EntryId>,
        wanted: impl Fn(Capability) -> bool,
        promising: impl Fn(Range<Word>) -> bool,
    ) -> (Vec<EntryId>, EntryId) {
        let mut copy = [0; COPY_ENTRIES * 8];
        let mut found = Vec::new();
        for (order, base, entries) in self.shape.by_order(range.clone()) {
            for some in entries.batches(COPY_ENTRIES) {
                let headers = self.shape.headers((order, base), some.clone());
                if headers.is_some_and(|headers| !promising(headers)) {
                    continue;
                }
                let copy = &mut copy[..8 * some.len()];
                let first = self.shape.capability(some.start);
                self.words.copy(first, copy);
                self.words.prefetch(first.plus(PREFETCH_ENTRIES), COPY_ENTRIES);
                let (words, _) = copy.as_chunks::<8>();
                let is_wanted =
                    |word: &[u8; 8]| wanted(Capability::parse(u64::from_be_bytes(*word)));
                for (line, at) in words.chunks(LINE_ENTRIES).zip(some.batches(LINE_ENTRIES)) {
                    if !line.iter().fold(false, |any, word| any | is_wanted(word)) {
                        continue;
                    }
                    for (_, entry) in line.iter().zip(at.iter()).filter(|(word, _)| is_wanted(word))
                    {
                        // The copy may mix two states of a word, so the word is loaded again.
                        if wanted(self.capability(entry)) {
                            found.push(entry);
                        }
                        if found.len() == FOUND_MAX {
                            return (found, entry.plus(1));
                        }
                    }
                }
            }
        }
        (found, range.end)
    }

    /// True if any of these headers marks a block as taken. Blocks in quarantine are marked,
    /// because their bits are cleared last.
    fn is_any_taken(&self, headers: Range<Word>) -> bool {
        let mut copy = [0; COPY_ENTRIES * 8];
        let copy = &mut copy[..8 * headers.len()];
        self.words.copy(headers.start, copy);
        let union =
            copy.as_chunks().0.iter().fold(0, |union, word| union | u64::from_be_bytes(*word));
        Header(union).bitmap() != 0 || matches!(self.map, Map::Array(_))
    }

    /// The capability of an entry, as in the table.
    pub(super) fn capability(&self, entry: EntryId) -> Capability {
        Capability::parse(self.words.load(self.shape.capability(entry)))
    }

    /// Ends a scan that has reached the end of the table.
    fn end_scan_if_complete(&mut self, time: Duration) {
        let scan = &mut self.scan;
        if scan.is_busy() || scan.at != Some(self.shape.entries_end()) {
            return;
        }
        scan.at = None;
        scan.interval = match scan.found {
            0 => (scan.interval * 2).clamp(INTERVAL_MIN, INTERVAL_MAX),
            _ => INTERVAL_MIN,
        };
        scan.next = time + scan.interval.max(scan.looked * INTERVAL_FACTOR);
        self.answer_scan_requests();
    }

    fn answer_scan_requests(&mut self) {
        if self.scan.is_recovering() || self.peers.values().all(|peer| peer.scan_request.is_none())
        {
            return;
        }
        let (scan, map, words) = (&self.scan, &self.map, &self.words);
        let mut free: BTreeMap<Option<Order>, u32> = BTreeMap::new();
        for peer in self.peers.values_mut() {
            let Some(ScanRequest { order, .. }) =
                peer.scan_request.filter(|scan_request| scan.is_over(scan_request.begun))
            else {
                continue;
            };
            let count = || order.map_or(0, |order| map.free_blocks(order, |at| words.load(at)));
            peer.answer(scan.found as u32, *free.entry(order).or_insert_with(count));
        }
    }

    /// Starts to release quarantined blocks (see the module documentation), and continues as far as
    /// one turn allows.
    fn release(&mut self, entries: Vec<EntryId>) -> Result<(), Error> {
        if entries.is_empty() {
            return Ok(());
        }
        let began = self.nic.now();
        if let Map::Tree(tree) = &self.map {
            for block in entries.iter().filter_map(|entry| self.shape.block(*entry)) {
                now(tree.withdraw(&self.words, block))?;
            }
        }
        let windows: Vec<_> = entries.iter().flat_map(|e| self.keys.windows(*e).iter()).collect();
        self.words.step()?;
        self.keys.renew(&windows)?;
        self.scan.times.rebinding += self.nic.now().saturating_sub(began);
        if self.release == Release::AtOnce {
            return self.mark_free(&entries);
        }
        self.scan.releasing = Some(Releasing { entries, at: (0, 0) });
        self.clear_blocks()
    }

    /// Clears as many bytes as one turn allows; frees the blocks once all are cleared.
    fn clear_blocks(&mut self) -> Result<(), Error> {
        let Some(mut releasing) = self.scan.releasing.take() else { return Ok(()) };
        let began = self.nic.now();
        let mut left = CLEAR_BYTES;
        let mut zeros = Zeros::default();
        while let Some(&entry) = releasing.entries.get(releasing.at.0).filter(|_| left > 0) {
            let (start, bytes) = self.keys.range(entry);
            let from = releasing.at.1;
            let len = left.min(bytes - from);
            let offset = start - self.memory.addr() + from;
            self.words.step()?;
            self.nic.zero(&mut zeros, &self.memory, offset as usize, len as usize);
            left -= len;
            releasing.at = match from + len == bytes {
                true => (releasing.at.0 + 1, 0),
                false => (releasing.at.0, from + len),
            };
        }
        drop(zeros);
        let cleared = self.nic.now();
        self.scan.times.clearing += cleared.saturating_sub(began);
        if releasing.at.0 < releasing.entries.len() {
            self.scan.releasing = Some(releasing);
            return Ok(());
        }
        self.mark_free(&releasing.entries)?;
        self.scan.times.freeing += self.nic.now().saturating_sub(cleared);
        Ok(())
    }

    /// Writes new keys to the table, and marks the blocks free in their headers.
    fn mark_free(&mut self, entries: &[EntryId]) -> Result<(), Error> {
        let mut by_header: BTreeMap<Place, Vec<Block>> = BTreeMap::new();
        for &entry in entries {
            let block = self.shape.block(entry).expect("an entry of the table");
            let keys = self.keys.capability(entry);
            self.words.step()?;
            self.words.store(self.shape.capability(entry), keys.to_word());
            self.scan.released += 1;
            by_header.entry(block.place()).or_default().push(block);
        }
        by_header.values().try_for_each(|blocks| self.give_back(blocks))
    }

    /// Clears the bits of blocks of one header with one CAS. Their logs already mark them as free.
    fn give_back(&self, blocks: &[Block]) -> Result<(), Error> {
        let tree = match &self.map {
            Map::Tree(tree) => tree,
            Map::Array(array) => return Ok(now(array.give_back(&self.words, blocks))?),
        };
        let Some(last) = blocks.last() else { return Ok(()) };
        let owner: User = FullLog::parse(self.words.load(self.shape.log(last.chunk))).user;
        Ok(now(tree.give_back(&self.words, blocks, owner))?)
    }

    /// Creates a new backup key for blocks that were freed at once. It replaces the key of the last
    /// owner, which is dead from then on.
    fn regenerate(&mut self, entries: &[EntryId]) -> Result<(), Error> {
        let main = |entry| self.capability(entry).main;
        let with_window =
            |entry: &EntryId| Some((*entry, self.keys.other_than(*entry, main(*entry))?));
        let (entries, windows): (Vec<EntryId>, Vec<WindowIndex>) =
            entries.iter().filter_map(with_window).unzip();
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
            // The block may have been freed in the meantime; then the next scan handles it.
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
    use rnic::nic::SoftNic;

    use super::*;
    use scheme::NodeScheme;
    use scheme::NodeSettings;

    #[test]
    fn scans_take_a_seventh_of_a_core_without_requests() {
        let settings = NodeSettings::new(crate::FINEMEM, 256, 4096);
        let mut node = Node::new(&SoftNic::inline(), &settings).expect("a memory node");
        let entries = node.shape.entries_end();
        let (soon, ms) = (node.nic.now() + Duration::from_secs(900), Duration::from_millis);
        for (looked, found, pause) in [
            (ms(0), 1, INTERVAL_MIN),
            (ms(50), 1, ms(300)),
            (ms(0), 0, 2 * INTERVAL_MIN),
            (ms(50), 0, ms(300)),
            (ms(1), 0, 8 * INTERVAL_MIN),
        ] {
            let scan = &mut node.scan;
            (scan.at, scan.looked, scan.found) = (Some(entries), looked, found);
            node.end_scan_if_complete(soon);
            assert_eq!((node.scan.at, node.scan.next - soon), (None, pause), "after {looked:?}");
        }
        let begun = node.scan.begun;
        node.poll().expect("a turn");
        assert_eq!(node.scan.begun, begun, "the scan is not due");
        node.scan.scheduled_now = true;
        node.poll().expect("a turn");
        assert_eq!(node.scan.begun, begun + 1);
    }
}
